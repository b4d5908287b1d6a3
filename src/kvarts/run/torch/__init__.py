"""Real models: Hugging Face decoders in PyTorch, with KV in pages that the control plane allocates.

Needs `kvarts[torch]`. Nothing outside this package imports PyTorch.
"""

from __future__ import annotations

import os
import sys

from kvarts.run.torch.huge_pages import ask_for_huge_pages

NUM_SPINS = 10_000
SETTINGS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def limit_spinning() -> None:
    """Set the spin count to NUM_SPINS, unless the environment sets one or PyTorch is loaded already.

    GCC's OpenMP, which PyTorch ships with, lets its threads spin 300,000 times before they sleep: some milliseconds. On
    a CPU with other work, this delays all threads: a barrier is passed only when the last thread arrives, and that
    thread does not get a CPU while another one spins on it. The library reads the spin count from the environment when
    it is loaded.
    """
    if "torch" not in sys.modules and not any(name in os.environ for name in SETTINGS):
        os.environ[SETTINGS[0]] = str(NUM_SPINS)


limit_spinning()
ask_for_huge_pages()
