"""Owners of requests and sessions: their keys, and what each may hold of what all of them share."""
