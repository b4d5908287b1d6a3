"""Wall time: engines whose tokens clients wait for, computed by a real model or by a mock.

It owns the loop of a live engine, text, sessions and executors that copy pages. It must not know doors or capacity
plans; only `torch` imports PyTorch.
"""
