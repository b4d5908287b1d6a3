"""GGUF files: a model's config, tokenizer and weights, quantized or not, in one file.

The format is documented at https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The reader of the `gguf` package
creates an object per string, which takes seconds for a vocabulary; this one reads what llama.cpp writes, versions 2 and
3.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvarts.errors import ConfigError, InputError, MissingFileError

__all__ = ["GgufFile", "StoredTensor", "find_gguf"]

MAGIC = b"GGUF"
VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
LENGTH = struct.Struct("<Q")
FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""`struct` formats of fixed-size values, by their type numbers in the file."""
ALIGNMENT = 32
PLAIN = {0: np.float32, 1: np.float16, 28: np.float64}
"""Tensor types that NumPy reads directly."""
BFLOAT16 = 30
STRETCH = 1 << 15
"""Number of quantized values that are read at a time: all that is made of them on the way fits into a CPU's cache."""


def find_gguf(path: str | Path) -> Path | None:
    """Return `path` if it is a GGUF file, or the only one in a directory without config.json; else None.

    Raise MissingFileError for a file that does not exist, ConfigError for a directory with several.
    """
    path = Path(path)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise MissingFileError("no such file", path=path)
        return path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        raise ConfigError(
            f"has {len(files)} GGUF files", path=path, hint=f"Name one, such as {files[0].name}; parts are not joined."
        )
    return files[0] if files else None


class StoredTensor(msgspec.Struct, frozen=True):
    """A tensor of a file. `shape`: as in PyTorch. `kind`: the number of its type. `data`: its bytes."""

    name: str
    shape: tuple[int, ...]
    kind: int
    data: npt.NDArray[np.uint8]

    def numbers(self) -> npt.NDArray[Any]:
        """Return the values, as float32 if quantized or bfloat16. Raise ConfigError for an unknown type."""
        if self.kind in PLAIN:
            return self.data.view(PLAIN[self.kind]).reshape(self.shape)
        if self.kind == BFLOAT16:
            return (self.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(self.shape)
        numbers = np.empty(self.shape, np.float32)
        self._dequantize(numbers.reshape(-1))
        return numbers

    def read_into(self, target: npt.NDArray[Any]) -> None:
        """Write the values into `target`, an array of this shape. Raise ConfigError for an unknown type."""
        if self.is_quantized:
            self._dequantize(target.reshape(-1))
        else:
            target[...] = self.numbers()

    def _dequantize(self, target: npt.NDArray[Any]) -> None:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize

        try:
            kind = GGMLQuantizationType(self.kind)
            num_values, num_bytes = GGML_QUANT_SIZES[kind]
            blocks = self.data.reshape(-1, num_bytes)
            each = max(1, STRETCH // num_values)
            for start in range(0, len(blocks), each):
                stretch = blocks[start : start + each].reshape(1, -1)
                target[start * num_values : (start + each) * num_values] = dequantize(stretch, kind)[0]
        except (ValueError, NotImplementedError) as error:
            raise ConfigError(f"tensor {self.name!r} has type {self.kind}, which is not read: {error}") from error

    @property
    def is_quantized(self) -> bool:
        """Whether the values are stored in quantized blocks."""
        return self.kind not in PLAIN and self.kind != BFLOAT16


class GgufFile:
    """A GGUF file, read lazily. Raises InputError if it is not GGUF or is truncated.

    `values`: its metadata by key. `architecture`: the model's, as llama.cpp names it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self._bytes = memoryview(np.memmap(self.path, np.uint8, "r"))  # type: ignore[arg-type]  # it has a buffer
        except (OSError, ValueError) as error:
            raise InputError(f"cannot be read: {error}", path=self.path) from error
        try:
            self.values, self._tensors = self._read()
        except (struct.error, IndexError, UnicodeDecodeError, KeyError, MemoryError, OverflowError) as error:
            raise InputError(f"is cut short, or is not GGUF: {error}", path=self.path) from error
        self.architecture = str(self.values.get("general.architecture"))

    def value(self, key: str, default: Any = None) -> Any:
        """Return the value of a key of the architecture's namespace, `default` if it is missing."""
        return self.values.get(f"{self.architecture}.{key}", default)

    def need(self, key: str) -> Any:
        """Return the value of a key as `value` does. Raise InputError if it is missing."""
        found = self.value(key)
        if found is None:
            raise InputError("is missing", path=self.path, field=f"{self.architecture}.{key}")
        return found

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return [name for name, *_ in self._tensors]

    def tensors(self) -> Iterator[StoredTensor]:
        """Yield all tensors; their data are read on first use. Raise InputError if one is truncated."""
        whole = np.frombuffer(self._bytes, np.uint8)
        for name, shape, kind, start in self._tensors:
            num_bytes = self._num_bytes(name, shape, kind)
            if start + num_bytes > len(whole):
                raise InputError(f"is cut short: tensor {name!r} ends after the file", path=self.path)
            yield StoredTensor(name, shape, kind, whole[start : start + num_bytes])

    def _num_bytes(self, name: str, shape: tuple[int, ...], kind: int) -> int:
        if kind in PLAIN:
            return prod(shape) * int(np.dtype(PLAIN[kind]).itemsize)
        if kind == BFLOAT16:
            return prod(shape) * 2
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            block, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        except (ValueError, KeyError) as error:
            raise InputError(f"tensor {name!r} has the unknown type {kind}", path=self.path) from error
        return int(prod(shape) // block * num_bytes)

    def _read(self) -> tuple[dict[str, Any], list[tuple[str, tuple[int, ...], int, int]]]:
        if bytes(self._bytes[:4]) != MAGIC:
            raise InputError("is not GGUF", path=self.path)
        version, num_tensors, num_values = struct.unpack_from("<IQQ", self._bytes, 4)
        if version not in VERSIONS:
            raise InputError(f"is GGUF of version {version}; 2 and 3 are read", path=self.path)
        place, values = 24, {}
        for _ in range(num_values):
            key, place = self._text(place)
            (kind,) = struct.unpack_from("<I", self._bytes, place)
            values[key], place = self._value(place + 4, kind)
        tensors = []
        for _ in range(num_tensors):
            name, place = self._text(place)
            (num_dims,) = struct.unpack_from("<I", self._bytes, place)
            dims = struct.unpack_from(f"<{num_dims}Q", self._bytes, place + 4)
            kind, offset = struct.unpack_from("<IQ", self._bytes, place + 4 + 8 * num_dims)
            place += 16 + 8 * num_dims
            tensors.append((name, tuple(reversed(dims)), kind, offset))
        step = int(values.get("general.alignment", ALIGNMENT))
        first = -(-place // step) * step
        return values, [(name, shape, kind, first + offset) for name, shape, kind, offset in tensors]

    def _text(self, place: int) -> tuple[str, int]:
        (length,) = LENGTH.unpack_from(self._bytes, place)
        end = place + 8 + length
        if end > len(self._bytes):
            raise IndexError("a text ends after the file")
        return str(self._bytes[place + 8 : end], "utf-8", "replace"), end

    def _value(self, place: int, kind: int) -> tuple[Any, int]:
        if kind == STRING:
            return self._text(place)
        if kind != ARRAY:
            (value,) = struct.unpack_from(f"<{FORMATS[kind]}", self._bytes, place)
            return value, place + struct.calcsize(f"<{FORMATS[kind]}")
        of_kind, count = struct.unpack_from("<IQ", self._bytes, place)
        place += 12
        if of_kind in FORMATS:
            form = f"<{count}{FORMATS[of_kind]}"
            return list(struct.unpack_from(form, self._bytes, place)), place + struct.calcsize(form)
        read = self._text if of_kind == STRING else partial(self._value, kind=of_kind)
        found = []
        for _ in range(count):
            value, place = read(place)
            found.append(value)
        return found, place
