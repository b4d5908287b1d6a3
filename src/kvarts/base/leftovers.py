"""Files and folders of a process while it lives, which the next one removes if it was killed.

A process holds a lock on each, which ends with the process however it ends. Only names and folders that kvarts itself
has made are removed, and never without their lock.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["create", "locked_leftover", "remove_leftovers", "temporary_folder"]

NAME = re.compile(r"\.kvarts-[0-9a-f]{16}")
"""Names of files that are being written."""
MARKER = ".kvarts-temporary"
"""File in a temporary folder, and its lock. A folder without it is not removed."""
MOST_LOOKED_AT = 10_000
"""Entries of a folder in which leftovers are looked for."""

_looked_at: set[str] = set()


def create(path: Path | str) -> int:
    """Create a file for writing, which no other process takes for a leftover until it is closed; return its number."""
    import fcntl

    while True:
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with suppress(OSError):  # on a disk without locks, no process removes it
            fcntl.flock(number, fcntl.LOCK_EX)
        if os.fstat(number).st_nlink:
            return number
        os.close(number)  # it was removed before it was locked


@contextmanager
def locked_leftover(path: Path | str) -> Iterator[bool]:
    """Yield whether no process is writing the file `path`; then none does during the block."""
    import fcntl

    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_left = True
        except OSError:
            is_left = False
        yield is_left
    finally:
        os.close(number)


def remove_leftovers(folder: str) -> None:
    """Remove what killed processes were writing in `folder`, once per process and folder. Raises nothing."""
    if folder in _looked_at:
        return
    _looked_at.add(folder)
    with suppress(OSError), os.scandir(folder or ".") as entries:
        for entry in islice(entries, MOST_LOOKED_AT):
            if NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                with locked_leftover(entry.path) as is_left, suppress(OSError):
                    if is_left:
                        os.unlink(entry.path)  # noqa: PTH108


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make a folder for the block, and remove those that killed processes have left."""
    import shutil
    import tempfile
    from pathlib import Path

    place = Path(tempfile.gettempdir())
    with suppress(OSError):
        for marker in islice(place.glob(f"kvarts-*/{MARKER}"), MOST_LOOKED_AT):
            with locked_leftover(marker) as is_left:
                if is_left and marker.parent.lstat().st_uid == os.getuid():
                    shutil.rmtree(marker.parent, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="kvarts-", ignore_cleanup_errors=True) as name:
        marker = Path(name, MARKER)
        # It gets its name when it is locked: a marker without a lock is that of a leftover.
        number = create(marker.with_suffix(".new"))
        try:
            marker.with_suffix(".new").rename(marker)
            yield Path(name)
        finally:
            os.close(number)
