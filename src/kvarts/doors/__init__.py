"""Doors: each parses a request, calls a service, and renders the answer. They decide nothing.

They own HTTP, gRPC, KV events over ZMQ, clients, and what connects other engines. No wing below knows of a network.
"""
