"""The cost of a step: how long it takes on a device, and how many blocks of a model fit there.

It owns cost models and the geometry of models and devices. It must not know traffic, replays or clocks.
"""
