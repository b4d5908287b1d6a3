"""Recorders of an engine's events: timelines and journals."""
