"""Descriptions of models and devices: geometry, memory, and how many pages of a model fit on a device."""

from __future__ import annotations

from kvarts.hardware.device import Device, load_device
from kvarts.hardware.fit import MemoryFit, fit_memory
from kvarts.hardware.geometry import Geometry, Sparse
from kvarts.hardware.kv_groups import KvGroup, KvLayer
from kvarts.hardware.model_config import load_geometry

__all__ = ["Device", "Geometry", "KvGroup", "KvLayer", "MemoryFit", "Sparse"]
__all__ += ["fit_memory", "load_device", "load_geometry"]
