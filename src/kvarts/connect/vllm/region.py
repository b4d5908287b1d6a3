"""Host memory that the scheduler's and the workers' processes of one engine share."""

from __future__ import annotations

import hashlib
import mmap
import os
import tempfile
from pathlib import Path

from kvarts.directories import open_private

__all__ = ["HostRegion"]


class HostRegion:
    """`num_places` places of `place_bytes` bytes, of which each worker has an equal part, in the order of their ranks.

    The first process that opens it makes the file behind it. `unlink` removes its name as soon as every process has
    opened it, so that nothing is left of an engine that is killed.
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
        """Set the bytes of a place, of which there are as many as `payload` has."""
        self.memory[place * self.place_bytes : (place + 1) * self.place_bytes] = payload

    def unlink(self) -> None:
        """Remove the name of the file: no other process opens it any more."""
        if self._has_name:
            self._has_name = False
            self._path.unlink(missing_ok=True)
