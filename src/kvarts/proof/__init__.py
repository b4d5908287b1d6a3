"""Proof: what happened in an engine, and whether it adds up.

It owns journals, timelines, the auditor, the verifier and explanations. It reads events; it must not know what drives
the engine, and nothing that it finds changes a step.
"""
