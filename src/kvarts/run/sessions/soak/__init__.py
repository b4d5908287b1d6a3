"""Soak test of sessions, with a verdict on whether memory and latency stay bounded from turn to turn."""
