"""GGUF files: a model's config, tokenizer and weights, quantized or not, in one file.

The format is documented at https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The reader of the `gguf` package
creates an object per string, which takes seconds for a vocabulary; this one reads what llama.cpp writes, versions 2 and
3.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvarts.base.errors import ConfigError, InputError, MissingFileError
from kvarts.run.model_files import located_model

__all__ = ["FileTokenizer", "GgufFile", "StoredTensor", "find_gguf", "read_tokenizer"]

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

    A name of `kvarts.run.model_files` stands for a directory. Raise MissingFileError for a file that does not exist,
    ConfigError for a directory with several.
    """
    path = located_model(path)
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

    def layout(self) -> tuple[dict[str, tuple[int, ...]], set[int], int]:
        """Return the shapes of all tensors, the numbers of their types, and where the first begins."""
        shapes = {name: shape for name, shape, *_ in self._tensors}
        starts = [start for *_, start in self._tensors]
        return shapes, {kind for _, _, kind, _ in self._tensors}, min(starts, default=len(self._bytes))

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


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
SPLITS: dict[str, tuple[str, ...]] = {
    "gpt-2": (GPT2,),
    "default": (GPT2,),
    "smollm": (r"\p{N}", GPT2),
    "llama-bpe": (LLAMA3,),
    "llama3": (LLAMA3,),
    "smaug-bpe": (LLAMA3,),
    "qwen2": (QWEN2,),
    "deepseek-r1-qwen": (QWEN2,),
}
"""Patterns that split a text before merging, applied one after the other, by llama.cpp's name."""
CONTROL, USER_DEFINED, BYTE = 3, 4, 6
SPACE = "\u2581"


class FileTokenizer:
    """The tokenizer of a file, with the methods of transformers' tokenizers that kvarts calls, and their results.

    `backend_tokenizer`: the tokenizer of the library `tokenizers`. `of_transformers`: returns that of transformers,
    which renders conversations: its import takes half a second, and text alone does not need it.
    """

    def __init__(self, backend: Any, of_transformers: Callable[[], Any], *, chat_template: str | None) -> None:
        self.backend_tokenizer = backend
        self.chat_template = chat_template
        self._open = of_transformers

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends an answer."""
        end: int | None = self._of_transformers.eos_token_id
        return end

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """Return a mapping with `input_ids`."""
        return {"input_ids": self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids}

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of tokens."""
        text: str = self.backend_tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens)
        return text

    def get_vocab(self) -> dict[str, int]:
        """Return the ids of all tokens by their text."""
        vocab: dict[str, int] = self.backend_tokenizer.get_vocab(with_added_tokens=True)
        return vocab

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, Any]], *, chat_template: str | None = None, **settings: Any
    ) -> Any:
        """Return what the method of transformers' tokenizers returns."""
        template = self.chat_template if chat_template is None else chat_template
        return self._of_transformers.apply_chat_template(conversation, chat_template=template, **settings)

    @cached_property
    def _of_transformers(self) -> Any:
        return self._open()


def read_tokenizer(file: GgufFile) -> Any:
    """Return the tokenizer of a file, or None. Raise ConfigError if its kind is unknown."""
    values = file.values
    tokens: list[str] | None = values.get("tokenizer.ggml.tokens")
    if tokens is None:
        return None
    kind = values.get("tokenizer.ggml.model")
    if kind == "gpt2":
        backend = _byte_level(file, tokens)
    elif kind == "llama":
        backend = _sentencepiece(file, tokens)
    else:
        raise ConfigError(
            f"tokenizer {kind!r} is not read from GGUF; known: gpt2 (byte-level BPE), llama (SentencePiece BPE)",
            path=file.path,
            hint="Give token ids, or the model's directory with tokenizer.json.",
        )
    return _wrapped(file, backend, tokens)


def _byte_level(file: GgufFile, tokens: list[str]) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    name = file.values.get("tokenizer.ggml.pre", "default")
    if name not in SPLITS:
        raise ConfigError(
            f"tokenizer {name!r} splits text in a way that is not known; known: {', '.join(SPLITS)}",
            path=file.path,
            field="tokenizer.ggml.pre",
            hint="Give the model's directory with tokenizer.json.",
        )
    merges = [tuple(merge.split(" ", 1)) for merge in file.values.get("tokenizer.ggml.merges") or ()]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(BPE(vocab, merges, ignore_merges=name in ("llama-bpe", "llama3")))
    splits = [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in SPLITS[name]]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(file: GgufFile, tokens: list[str]) -> Any:
    """Return a BPE equivalent to SentencePiece, which merges the neighbouring pair with the best score."""
    from tokenizers import Tokenizer, decoders, normalizers
    from tokenizers.models import BPE

    values = file.values
    kinds = values.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    scores = values.get("tokenizer.ggml.scores") or [-float(index) for index in range(len(tokens))]
    vocab = {token: index for index, token in enumerate(tokens)}
    pairs = []
    for token, index in vocab.items():
        if kinds[index] in (CONTROL, BYTE, USER_DEFINED) or len(token) < 2:
            continue
        for cut in range(1, len(token)):
            left, right = vocab.get(token[:cut]), vocab.get(token[cut:])
            if left is not None and right is not None:
                pairs.append((-scores[index], left, right, token, cut))
    pairs.sort(key=lambda pair: pair[:3])
    merges = [(token[:cut], token[cut:]) for *_, token, cut in pairs]
    unknown = values.get("tokenizer.ggml.unknown_token_id")
    unk = tokens[unknown] if unknown is not None else None
    backend = Tokenizer(BPE(vocab, merges, unk_token=unk, byte_fallback=True, fuse_unk=True))
    spaces = normalizers.Replace(" ", SPACE)
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if values.get("tokenizer.ggml.add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces])
        parts.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = spaces
    backend.decoder = decoders.Sequence(parts)
    return backend


def _wrapped(file: GgufFile, backend: Any, tokens: list[str]) -> Any:
    from tokenizers import AddedToken, processors

    values = file.values
    kinds = values.get("tokenizer.ggml.token_type") or ()
    pairs = list(zip(tokens, kinds, strict=False))
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token, kind in pairs if kind == CONTROL]
    )
    backend.add_tokens(
        [AddedToken(token, special=False, normalized=False) for token, kind in pairs if kind == USER_DEFINED]
    )

    def named(name: str) -> str | None:
        index = values.get(f"tokenizer.ggml.{name}_token_id")
        return None if index is None else tokens[index]

    first, last = named("bos"), named("eos")
    # As in llama.cpp, SentencePiece vocabularies add a BOS token unless the file sets this to false.
    adds_first = values.get("tokenizer.ggml.add_bos_token", values.get("tokenizer.ggml.model") == "llama")
    before = [first] if adds_first and first is not None else []
    after = [last] if values.get("tokenizer.ggml.add_eos_token", False) and last is not None else []
    if before or after:
        backend.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            special_tokens=[(token, backend.token_to_id(token)) for token in {*before, *after}],
        )
    template = values.get("tokenizer.chat_template")
    unknown, padding = named("unknown"), named("padding")

    def of_transformers() -> Any:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(
            tokenizer_object=backend,
            chat_template=template,
            clean_up_tokenization_spaces=False,
            bos_token=first,
            eos_token=last,
            unk_token=unknown,
            pad_token=padding,
        )

    return FileTokenizer(backend, of_transformers, chat_template=template)
