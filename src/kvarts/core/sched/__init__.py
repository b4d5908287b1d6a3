"""Scheduling: plans the next step from the state of requests and pages."""
