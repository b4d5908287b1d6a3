"""Doors: each parses a request, calls a service, and renders the answer. They decide nothing."""
