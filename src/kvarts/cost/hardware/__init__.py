"""Descriptions of models and devices: geometry, memory, and how many pages of a model fit on a device."""
