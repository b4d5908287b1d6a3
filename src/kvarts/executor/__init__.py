"""Executors carry out plans: a cost model in virtual time, a model on a device in real time."""
