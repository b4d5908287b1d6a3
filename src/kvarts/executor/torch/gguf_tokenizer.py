"""The tokenizer of a GGUF file, with the file's chat template."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from kvarts.errors import ConfigError
from kvarts.executor.torch.gguf_file import GgufFile

__all__ = ["FileTokenizer", "read_tokenizer"]

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
