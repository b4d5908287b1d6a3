"""Host memory shared by the scheduler's and the workers' processes of one engine."""

from __future__ import annotations

import hashlib
import mmap
import os
import tempfile
from pathlib import Path

from kvarts.files import open_private

__all__ = ["HostRegion"]


class HostRegion:
    """`num_places` places of `place_bytes` bytes, each divided equally among the workers, in the order of their ranks.

    The first process that opens the region creates its file. `unlink` removes the file's name once every process has
    opened it, so that an engine that is killed leaves no file behind.
    """

    def __init__(self, engine_id: str, num_places: int, place_bytes: int) -> None:
        self.num_places = num_places
        self.place_bytes = place_bytes
        shared = Path("/dev/shm")
        folder = shared if shared.is_dir() else Path(tempfile.gettempdir())
        self._path = folder / f"kvarts-{hashlib.sha256(engine_id.encode()).hexdigest()[:24]}"
        number = open_private(self._path, os.O_RDWR | os.O_CREAT)
        try:
            os.ftruncate(number, num_places * place_bytes)
            self.memory = mmap.mmap(number, num_places * place_bytes)
        finally:
            os.close(number)
        self._has_name = True

    def read(self, place: int) -> bytes:
        """Return the bytes of a place."""
        return self.memory[place * self.place_bytes : (place + 1) * self.place_bytes]

    def write(self, place: int, payload: bytes) -> None:
        """Set the bytes of a place; `payload` must have exactly as many."""
        self.memory[place * self.place_bytes : (place + 1) * self.place_bytes] = payload

    def unlink(self) -> None:
        """Remove the name of the file: no further process can open it."""
        if self._has_name:
            self._has_name = False
            self._path.unlink(missing_ok=True)
