"""Processes behind one port: each is a server with an engine, and together they answer for all."""
