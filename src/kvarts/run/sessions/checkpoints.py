"""Checkpoints: the KV of a session in one file, written completely or not at all, and the format of that file.

A file consists of a line with the format version, the length of a header, the header in msgpack, the raw bytes of
arrays, each aligned to ALIGNMENT, and a CRC-32 of everything before it. CRC-32 detects every burst error of up to 32
bits, such as torn writes and bit rot cause, and is four times as fast as BLAKE2b (8 MB: 3 ms and 12 ms, zlib on one
core). It does not protect against deliberately forged files.

The KV in a checkpoint can always be computed again, so failures are not errors: a checkpoint that cannot be saved or
loaded gives `Refused`, with the reason.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Collection, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec
import numpy as np
import numpy.typing as npt

from kvarts.base.decoders import UNDECODED
from kvarts.base.errors import ConfigError, OutputError, problem_of
from kvarts.base.files import make_private, open_private, write_private

__all__ = [
    "Checkpoint",
    "CheckpointHeader",
    "Checkpoints",
    "Refused",
    "decode_checkpoint",
    "encode_checkpoint",
    "token_digest",
]

MAGIC = b"kvarts kv 1\n"
HEAD = struct.Struct(f"<{len(MAGIC)}sI")
"""The first line, and the length of the header in bytes."""
TAIL = struct.Struct("<I")
ALIGNMENT = 64
DTYPE_KINDS = "biuf"

Array = npt.NDArray[Any]
Tokens = Sequence[int] | npt.NDArray[np.integer[Any]]


class CheckpointHeader(msgspec.Struct, frozen=True, kw_only=True):
    """Identifies the KV in a checkpoint.

    `fingerprint`: everything that KV depends on, by name: weights, dtype, geometry, rope, sink, window, page size.
    `num_tokens`: computed tokens of the history; `token_digest`: their `token_digest`, because a history can be rolled
    back and continued differently. `tables`: per page table, the number of its pages, of dropped pages, and of pages of
    the sink.
    """

    session_id: str
    fingerprint: dict[str, str]
    num_tokens: int
    token_digest: bytes
    tables: tuple[tuple[int, int, int], ...]


class Checkpoint(msgspec.Struct, frozen=True):
    """KV and its header. Decoded arrays are writable and share one buffer."""

    header: CheckpointHeader
    arrays: dict[str, Array]


class _Layout(msgspec.Struct, frozen=True):
    """An array: its name, its shape, and its dtype in NumPy's notation."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        num_items = 1
        for length in self.shape:
            num_items *= length
        return num_items * np.dtype(self.dtype).itemsize


class _Contents(msgspec.Struct, frozen=True):
    header: CheckpointHeader
    layout: list[_Layout]


def token_digest(tokens: Sequence[int] | npt.NDArray[np.integer[Any]]) -> bytes:
    """Return a 16-byte digest of tokens, independent of the integer type of their ids."""
    return blake2b(np.asarray(tokens, dtype="<u4").tobytes(), digest_size=16).digest()


def encode_checkpoint(header: CheckpointHeader, arrays: Mapping[str, Array]) -> list[bytes | memoryview]:
    """Return the bytes of a checkpoint, in parts; contiguous arrays are not copied.

    Raise ConfigError for arrays of other types than booleans and plain numbers.
    """
    stored = {}
    for name, array in arrays.items():
        if array.dtype.kind not in DTYPE_KINDS:
            raise ConfigError(
                f"has the dtype {array.dtype}, which cannot be stored", field=name, hint="View bfloat16 as uint16."
            )
        stored[name] = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    layout = [_Layout(name, arrays[name].shape, array.dtype.str) for name, array in stored.items()]
    text = msgspec.msgpack.encode(_Contents(header, layout))
    parts: list[bytes | memoryview] = [HEAD.pack(MAGIC, len(text)), text]
    at = HEAD.size + len(text)
    for start, array in zip(_starts(at, layout), stored.values(), strict=True):
        parts += [bytes(start - at), array.reshape(-1).view(np.uint8).data]
        at = start + array.nbytes
    checksum = 0
    for part in parts:
        checksum = crc32(part, checksum)
    return [*parts, TAIL.pack(checksum)]


def decode_checkpoint(data: npt.NDArray[np.uint8]) -> Checkpoint | str:
    """Return the inverse of `encode_checkpoint`, with arrays as views of `data`; or the reason for a failure."""
    if not len(data):
        return "is empty"
    text = data.data
    if text[: len(MAGIC)] != MAGIC:
        return "is no checkpoint of this version"
    if len(text) < HEAD.size + TAIL.size or crc32(text[: -TAIL.size]) != TAIL.unpack(text[-TAIL.size :])[0]:
        return "is damaged: its checksum is another"
    _, size = HEAD.unpack(text[: HEAD.size])
    begin = HEAD.size + size
    try:
        contents = msgspec.msgpack.decode(text[HEAD.size : begin], type=_Contents)
        end = begin
        arrays = {}
        for start, part in zip(_starts(begin, contents.layout), contents.layout, strict=True):
            end = start + part.num_bytes
            dtype = np.dtype(part.dtype)
            if dtype.kind not in DTYPE_KINDS or min(part.shape, default=0) < 0 or end > len(data) - TAIL.size:
                return "is damaged: its header describes no arrays"
            arrays[part.name] = data[start:end].view(dtype).reshape(part.shape)
    except (*UNDECODED, TypeError, ValueError) as error:
        return f"is damaged: its header cannot be read ({problem_of(error)})"
    if end != len(data) - TAIL.size or len(arrays) != len(contents.layout):
        return "is damaged: its header describes another file"
    return Checkpoint(contents.header, arrays)


def _starts(begin: int, layout: Sequence[_Layout]) -> list[int]:
    """Return the offset of each array after a header that ends at `begin`."""
    starts = []
    for part in layout:
        starts.append(-(-begin // ALIGNMENT) * ALIGNMENT)
        begin = starts[-1] + part.num_bytes
    return starts


class Refused(msgspec.Struct, frozen=True):
    """The reason why no file was written or used."""

    reason: str


class Checkpoints:
    """The only writer of the checkpoints in a directory.

    May be called from any thread, but by one at a time for each session. The directory must belong to one process,
    which `Histories` enforces. Raises OutputError if the directory cannot be created.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        try:
            make_private(directory, lambda name: name.removeprefix(".")[:32].isalnum())
        except OSError as error:
            raise OutputError(f"cannot hold checkpoints: {error.strerror}", path=directory) from error

    def save(self, header: CheckpointHeader, arrays: Mapping[str, Array]) -> Refused | None:
        """Write the KV of a session, replacing any older checkpoint. It is on disk when this returns.

        Refused, with the older checkpoint kept, if the disk cannot be written. Raise ConfigError for arrays of other
        types than booleans and plain numbers: view bfloat16 as uint16.
        """
        parts = encode_checkpoint(header, arrays)
        path = self._path(header.session_id)
        try:
            write_private(path, parts)
        except OSError as error:
            return Refused(f"{path} cannot be written: {error.strerror}")
        return None

    def load(self, session_id: str, fingerprint: Mapping[str, str], tokens: Tokens) -> Checkpoint | Refused | None:
        """Return the KV of a session with the history `tokens`; None if there is no file.

        Refused if the file is damaged, has another format, or belongs to another session, or if its KV has another
        fingerprint or is not that of a prefix of `tokens`.
        """
        path = self._path(session_id)
        try:
            with os.fdopen(open_private(path, os.O_RDONLY), "rb") as file:
                data = np.fromfile(file, dtype=np.uint8)
        except FileNotFoundError:
            return None
        except OSError as error:
            return Refused(f"{path} cannot be read: {error.strerror}")
        found = decode_checkpoint(data)
        if isinstance(found, str):
            return Refused(f"{path} {found}")
        misfit = _misfit(found.header, session_id, fingerprint, tokens)
        return found if misfit is None else Refused(f"{path} {misfit}")

    def remove(self, session_id: str) -> bool:
        """Remove the file of a session; return whether there was one. Raise OutputError if it cannot be removed."""
        path = self._path(session_id)
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise OutputError(f"cannot be removed: {error.strerror}", path=path) from error
        return True

    def sweep(self, known_ids: Collection[str]) -> list[Path]:
        """Remove unfinished files and files of sessions not in `known_ids`; return the removed paths, sorted.

        Files with unknown kinds of names are kept. Must not run during a save.
        """
        known = frozenset(known_ids)
        removed = []
        for path in sorted(self.directory.iterdir()):
            is_unfinished = re.fullmatch(r"\.[0-9a-f]{32}\.tmp", path.name) is not None
            if is_unfinished or (_is_ours(path) and path.stem not in known):
                try:
                    path.unlink()
                except OSError as error:
                    raise OutputError(f"cannot be removed: {error.strerror}", path=path) from error
                removed.append(path)
        return removed

    def _path(self, session_id: str) -> Path:
        assert re.fullmatch("[0-9a-f]{32}", session_id), "an id is 32 hexadecimal digits, and never a path"
        return self.directory / f"{session_id}.kv"


def _is_ours(path: Path) -> bool:
    return re.fullmatch(r"[0-9a-f]{32}\.kv", path.name) is not None


def _misfit(header: CheckpointHeader, session_id: str, fingerprint: Mapping[str, str], tokens: Tokens) -> str | None:
    """Return the reason why a checkpoint does not match; None if it does."""
    if header.session_id != session_id:
        return f"is of session {header.session_id}"
    differing = sorted(
        name for name in {*fingerprint, *header.fingerprint} if fingerprint.get(name) != header.fingerprint.get(name)
    )
    if differing:
        name = differing[0]
        theirs, ours = (values.get(name, "not given") for values in (header.fingerprint, fingerprint))
        more = f", and other {', '.join(differing[1:])}" if len(differing) > 1 else ""
        return f"is of another {name}: {theirs}, here {ours}{more}"
    if header.num_tokens > len(tokens):
        return f"has KV of {header.num_tokens} tokens, and the history has {len(tokens)}"
    if token_digest(tokens[: header.num_tokens]) != header.token_digest:
        return f"has KV of other tokens than the first {header.num_tokens} of the history"
    return None
