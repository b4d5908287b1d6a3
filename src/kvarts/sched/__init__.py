"""Scheduling: from the state of requests and pages, a plan for the next step."""
