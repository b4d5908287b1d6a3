"""How long threads of PyTorch that wait for each other keep their CPUs busy.

GCC's OpenMP, which PyTorch comes with, lets them spin 300,000 times before they sleep, some milliseconds. Where a CPU
has other work, that is what the others wait for: a barrier is passed when the last thread has come, and it does not get
a CPU while one spins on it. How often they spin is read from the environment when the library is loaded.
"""

from __future__ import annotations

import os
import sys

__all__ = ["NUM_SPINS", "limit_spinning"]

NUM_SPINS = 10_000
SETTINGS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def limit_spinning() -> None:
    """Let threads spin NUM_SPINS times, unless the environment says otherwise, or PyTorch is loaded already."""
    if "torch" not in sys.modules and not any(name in os.environ for name in SETTINGS):
        os.environ[SETTINGS[0]] = str(NUM_SPINS)
