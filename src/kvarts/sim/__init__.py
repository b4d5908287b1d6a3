"""Virtual time: replay of traffic through the engine, with leaps over identical steps.

It owns traffic, replicas, routers, fleets, shared devices and reports. It must not know sockets or PyTorch.
"""
