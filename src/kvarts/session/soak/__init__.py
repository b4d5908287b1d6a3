"""A long run of sessions with a verdict: whether memory and latency stayed bounded, turn by turn."""
