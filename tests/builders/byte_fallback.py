"""A tokenizer with SentencePiece's bytes, as Gemma's and Llama's are."""

from __future__ import annotations

from typing import Any

__all__ = ["BYTES", "byte_fallback_tokenizer"]

BYTES = 3
"""The token of byte 0; those of others come after it."""


def byte_fallback_tokenizer(words: tuple[str, ...] = (), *, strips: bool = False) -> Any:
    """A tokenizer of transformers: three special tokens, 256 bytes, a space, and `words`.

    `strips`: a text begins without its first space, as of Llama 2.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *words]
    vocab = {piece: token for token, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if strips else parts)
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
