"""Doors: each parses, calls, and renders what came back. They decide nothing."""
