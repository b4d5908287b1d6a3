"""The model directory of a front end: its vocabulary, in which a core writes words, and text that obeys a grammar."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from math import log
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvarts.base.decoders import UNDECODED
from kvarts.base.errors import ConfigError, InputError, MissingFileError, problem_of
from kvarts.base.files import read_bytes
from kvarts.doors.openai.scripted import ScriptedAnswer
from kvarts.doors.openai.words import WORDS
from kvarts.run.mock import Vocabulary

if TYPE_CHECKING:
    from kvarts.doors.vllm_front.grammar import Writer

__all__ = ["FrontModel"]

SPACES = ("Ġ", "▁", " ")
"""How vocabularies write a space before a word: byte-level ones, SentencePiece, others."""
LEAST_WORDS = 16
ANSWER = "kvarts_answer"
"""The key of `vllm_xargs` with a scripted answer, as JSON."""
THINKS = ("<think>", "</think>")
"""The tokens around reasoning."""
TAIL = 16
"""Tokens at the end of a prompt among which its template may begin or end the reasoning."""
MOST_DIMENSIONS = 65_536

Arrays = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.int32]]


class FrontModel:
    """A model without weights. `directory`: config.json and tokenizer.json, of which a front end has its tokenizer.

    Raises MissingFileError, InputError, or ConfigError for a tokenizer without common words.
    """

    def __init__(self, directory: Path) -> None:
        config = _read(directory, "config.json")
        config = config.get("text_config") or config
        self._tokenizer = _read(directory, "tokenizer.json")
        ends = config.get("eos_token_id")
        self._end_ids: tuple[int, ...] = tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,)
        self.end_id = self._end_ids[0] if self._end_ids else None
        """The token that ends an answer, None if the model has none."""
        self._hidden_size = int(config.get("hidden_size") or 0)
        self.dtype = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16")
        vocab = _vocab_of(self._tokenizer)
        added = {each["content"]: each["id"] for each in self._tokenizer.get("added_tokens") or ()}
        self._thinks = tuple((added | vocab).get(text) for text in THINKS)
        self.size = max(int(config.get("vocab_size") or 0), 1 + max([*vocab.values(), *added.values()], default=0))
        """Number of ids."""
        words = [next((vocab[space + word] for space in SPACES if space + word in vocab), None) for word in WORDS]
        ids = [token for token in words if token is not None]
        if len(ids) < LEAST_WORDS:
            raise ConfigError(
                f"the vocabulary has {len(ids)} of {len(WORDS)} common English words, and at least {LEAST_WORDS} are "
                "needed",
                path=str(directory / "tokenizer.json"),
                hint="Give a model with another tokenizer.",
            )
        self._ids = np.array(ids, np.uint64)
        self._logprob = -log(len(ids))

    @property
    def vocabulary(self) -> Vocabulary:
        """The words that it writes."""
        ids = self._ids
        return Vocabulary(len(ids), lambda _, drawn: ids[drawn.astype(np.int64)], 1 << 64)

    def num_top(self, asked: int) -> int:
        """Return the number of alternatives per token; -1: all of the vocabulary."""
        return self.size if asked < 0 else min(asked, self.size)

    def even_logprobs(self, tokens: Sequence[int], num_top: int) -> Arrays:
        """Return ids and log-probabilities of shape [len(tokens), num_top + 1], and ranks.

        The first column is the token itself; each is as likely as any other.
        """
        first = np.asarray(tokens, np.int64)[:, None]
        others = (first + np.arange(self.num_top(num_top))) % self.size
        ids = np.concatenate([first, others], axis=1).astype("<i4")
        return ids, np.full(ids.shape, self._logprob, "<f4"), np.ones(len(ids), "<i4")

    def vector_of(
        self,
        make: Callable[[Sequence[int], int], npt.NDArray[np.float32]],
        tokens: Sequence[int],
        pooling: Sequence[Any],
    ) -> npt.NDArray[np.float32]:
        """Return the embedding of a prompt, by `make`, with the requested dimensions. `pooling`: PoolingParams."""
        asked = pooling[1] if len(pooling) > 1 else None
        dimensions = int(asked or self._hidden_size or 1024)
        if not 1 <= dimensions <= MOST_DIMENSIONS:
            raise ConfigError(f"must be from 1 to {MOST_DIMENSIONS}, got {dimensions}", field="dimensions")
        return make(tokens, dimensions)

    def written(self, sampling: Mapping[str, Any], seed: int | None, most: int) -> Sequence[int]:
        """Return the tokens of an answer that a request prescribes, without its end; empty if it prescribes none.

        Raise ConfigError for a grammar or an answer that cannot be written.
        """
        scripted = (sampling.get("extra_args") or {}).get(ANSWER)
        if scripted is not None:
            return self._writer.tokens("".join(each.text for each in _answer_of(scripted).segments()))
        structured = sampling.get("structured_outputs")
        if structured is not None:
            return self._writer.obeying(structured, seed or 0, most)
        return ()

    @staticmethod
    def has_own_reasoning(sampling: Mapping[str, Any]) -> bool:
        """Return whether a request decides about reasoning: it brings its answer, or its grammar contains some."""
        if ANSWER in (sampling.get("extra_args") or {}):
            return True
        return THINKS[1] in str((sampling.get("structured_outputs") or {}).get("structural_tag"))

    def reasoning(self, prompt: Sequence[int], seed: int | None) -> Sequence[int]:
        """Return the tokens of reasoning before an answer; empty if the prompt ends it, or the model has none."""
        opening, closing = self._thinks
        if closing is None:
            return ()
        last = next((token for token in reversed(prompt[-TAIL:]) if token in (opening, closing)), None)
        return () if last == closing else self._writer.reasoning(seed or 0, is_open=last == opening)

    @cached_property
    def _writer(self) -> Writer:
        from kvarts.doors.vllm_front.grammar import Writer

        return Writer(
            msgspec.json.encode(self._tokenizer).decode(), self.size, self._end_ids, [int(each) for each in self._ids]
        )


def _answer_of(text: Any) -> ScriptedAnswer:
    try:
        if isinstance(text, str):
            return msgspec.json.decode(text, type=ScriptedAnswer)
        return msgspec.convert(text, ScriptedAnswer)
    except UNDECODED as error:
        raise ConfigError(f"is no answer: {problem_of(error)}", field=ANSWER, hint='As {"text": "yes"}.') from error


def _read(directory: Path, name: str) -> dict[str, Any]:
    path = directory / name
    if not path.exists():
        hint = "Give a model directory with config.json and tokenizer.json; weights are not needed."
        raise MissingFileError("does not exist", path=str(path), hint=hint)
    try:
        return msgspec.json.decode(read_bytes(path), type=dict[str, Any])
    except UNDECODED as error:
        raise InputError(f"is no JSON object: {problem_of(error)}", path=str(path)) from error


def _vocab_of(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Return the ids by pieces; Unigram vocabularies are lists of pieces with their scores."""
    vocab = (tokenizer.get("model") or {}).get("vocab") or {}
    return vocab if isinstance(vocab, dict) else {piece: index for index, (piece, _) in enumerate(vocab)}
