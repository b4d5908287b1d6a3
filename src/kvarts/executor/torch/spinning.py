"""Limits how long PyTorch's threads spin while they wait for each other.

GCC's OpenMP, which PyTorch ships with, lets them spin 300,000 times before they sleep: some milliseconds. On a CPU with
other work, this delays all threads: a barrier is passed only when the last thread arrives, and that thread does not get
a CPU while another one spins on it. The library reads the spin count from the environment when it is loaded.
"""

from __future__ import annotations

import os
import sys

__all__ = ["NUM_SPINS", "limit_spinning"]

NUM_SPINS = 10_000
SETTINGS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def limit_spinning() -> None:
    """Set the spin count to NUM_SPINS, unless the environment sets one or PyTorch is loaded already."""
    if "torch" not in sys.modules and not any(name in os.environ for name in SETTINGS):
        os.environ[SETTINGS[0]] = str(NUM_SPINS)
