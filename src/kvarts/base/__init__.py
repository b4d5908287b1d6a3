"""Errors, units, files, settings, clocks, processes: tools of every wing. Knows nothing of KV, requests or models."""
