"""Owners of requests and sessions: their keys, and their shares of common resources."""
