"""Routers: policies by name, each over a view of the workers that is told and never looks."""
