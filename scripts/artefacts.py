"""What a case left: bytes by the name of the artefact, and where two of them differ."""

from __future__ import annotations

import gzip
import zlib
from itertools import zip_longest
from pathlib import Path

__all__ = ["Artefacts", "first_difference", "read_files"]

Artefacts = dict[str, bytes]
"""Bytes by name: `stdout`, `stderr`, `exit code`, paths of files, and `PATH!inside` for what a .gz holds."""

CONTEXT = 60
"""Characters shown on either side of a difference."""


def read_files(folder: Path) -> Artefacts:
    """Return every file below `folder`, and empty directories; links are inputs, and are left out."""
    found: Artefacts = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink() or any(folder.joinpath(parent).is_symlink() for parent in Path(name).parents):
            continue
        if path.is_dir():
            if not any(path.iterdir()):
                found[f"{name}/"] = b""
            continue
        found[name] = path.read_bytes()
        if path.suffix == ".gz":
            try:
                found[f"{name}!inside"] = gzip.decompress(found[name])
            except (EOFError, OSError, zlib.error):
                continue  # damaged on purpose; the packed bytes are compared
    return found


def first_difference(before: bytes, after: bytes) -> str:
    """Return where two artefacts first differ: line and byte, with what stands there on either side."""
    place = next(
        (place for place, (ours, theirs) in enumerate(zip_longest(before, after)) if ours != theirs), len(before)
    )
    line = before.count(b"\n", 0, place) + 1
    sizes = f"{len(before):,} and {len(after):,} bytes"
    where = f"differs from byte {place:,} on, line {line:,}; {sizes}"
    return f"{where}\n           BEFORE {_around(before, place)}\n           AFTER  {_around(after, place)}"


def _around(text: bytes, place: int) -> str:
    """The line in which `place` is, cut to what is near it."""
    start = max(text.rfind(b"\n", 0, place) + 1, place - CONTEXT)
    end = text.find(b"\n", place)
    end = min(len(text) if end < 0 else end + 1, place + CONTEXT)
    return ascii(text[start:end].decode(errors="backslashreplace"))
