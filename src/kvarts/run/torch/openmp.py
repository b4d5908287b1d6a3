"""Runs compiled functions on PyTorch's threads.

PyTorch's loops run on an OpenMP team; its waiting threads keep their CPU busy for a while. A second team would have
to wait for these. So compiled functions run on the same team: GCC's OpenMP library can run any function by its address.
If PyTorch ships with another library, Python threads run them.
"""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch

__all__ = ["OpenMpThreads", "num_threads", "team"]

FEW_NUMBERS = 1 << 16
"""Work on fewer numbers than this takes less time than starting and joining threads."""
FUNCTIONS = ("GOMP_parallel", "GOMP_barrier", "omp_get_thread_num", "omp_get_num_threads")


class OpenMpThreads:
    """Runs a function in several threads at once.

    `barrier`, `thread_number` and `team_size`: addresses of functions that the function may call; 0 if the library
    lacks them, in which case it must not depend on the number of threads.
    """

    def __init__(self, library: ctypes.CDLL | None) -> None:
        self._library = library
        self.barrier = self.thread_number = self.team_size = 0
        if library is not None:
            self._parallel = library.GOMP_parallel
            self._parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
            self._parallel.restype = None
            self.barrier, self.thread_number, self.team_size = (
                ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in FUNCTIONS[1:]
            )
        self._others: ThreadPoolExecutor | None = None

    @property
    def has_barrier(self) -> bool:
        """Whether threads can wait for each other and know their numbers."""
        return self._library is not None

    def run(self, function: int, work: int, num_threads: int) -> None:
        """Call the function at an address with `work`, in `num_threads` threads."""
        if self._library is not None:
            self._parallel(function, work, num_threads, 0)
            return
        plain = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)
        if self._others is None:
            self._others = ThreadPoolExecutor(thread_name_prefix="kvarts-attention")
        others = [self._others.submit(plain, work) for _ in range(num_threads - 1)]
        plain(work)
        for other in others:
            other.result()


def num_threads(num_numbers: int) -> int:
    """Return the number of threads for work on `num_numbers` numbers: PyTorch's, or one."""
    return 1 if num_numbers < FEW_NUMBERS else int(torch.get_num_threads())


@cache
def team() -> OpenMpThreads:
    """Return the team of this process."""
    return OpenMpThreads(_library())


def _library() -> ctypes.CDLL | None:
    """Return the library that has PyTorch's OpenMP: the process's global symbols, or else libtorch_cpu."""
    for name in (None, Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"):
        try:
            library = ctypes.CDLL(None if name is None else str(name))
            if all(hasattr(library, function) for function in FUNCTIONS):
                return library
        except OSError:
            continue
    return None
