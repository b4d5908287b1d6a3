"""What a model and a device are to a planner: geometry, memory, and how the one fits the other."""

from __future__ import annotations

from kvarts.hardware.device import Device, load_device
from kvarts.hardware.fit import MemoryFit, fit_memory
from kvarts.hardware.geometry import Geometry, load_geometry

__all__ = ["Device", "Geometry", "MemoryFit", "fit_memory", "load_device", "load_geometry"]
