"""Grammars that constrain generated text, by llguidance: which tokens may follow, and whether the text may end."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvarts.errors import ConfigError
from kvarts.sampling import StructuredOutputs

__all__ = ["Grammars", "Matcher"]

MAX_KEPT = 64
"""Compiled grammars in the cache."""
MOST_FUEL = 100_000
"""Limit of the work on the states of a grammar's terminals before the first token: at most a third of a second. With
llguidance's default, it was seven.
"""
MOST_ITEMS = 800
"""Limit of the ways in which a text may continue in its grammar. With llguidance's default, 2,000, each token of an
ambiguous grammar took up to 1.4 s, for which all requests wait; with this one it takes 0.1 s. An object of a JSON
schema takes four for each optional property.
"""
MOST_STEP_ITEMS = 5_000
"""Limit of the work on the next token."""
SPACES = r"[ \t\n\r]{0,16}"
"""Whitespace between parts of JSON, bounded because a model may otherwise generate spaces without end."""
FIELD = "sampling.structured_outputs"


class Matcher:
    """The state of one text in a grammar, advanced token by token."""

    def __init__(self, matcher: Any, end_ids: frozenset[int], vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._num_tokens = 0
        self.end_ids = end_ids
        """Tokens that end the text if the grammar allows it."""

    @property
    def is_complete(self) -> bool:
        """Whether only an end may follow."""
        return bool(self._matcher.is_stopped())

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Return which tokens may follow, [vocabulary]. Raise ConfigError if the grammar became too complex."""
        self._check()
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        self._check()
        allowed = np.zeros(self._vocab_size, np.bool_)
        count = min(self._vocab_size, len(bits))
        allowed[:count] = bits[:count]
        return allowed

    def accept(self, token: int) -> None:
        """Advance by the chosen token, which must be allowed."""
        if token not in self.end_ids:
            self._matcher.consume_token(token)
            self._num_tokens += 1
            self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ConfigError(
                f"cannot be kept to: {_first_line(self._matcher.get_error())}, after {self._num_tokens} tokens",
                field=FIELD,
            )


class Grammars:
    """Compiles grammars for one tokenizer, with an LRU cache. Thread-safe.

    `end_ids`: tokens that end a text. The tokenizer's data are prepared when the first grammar is compiled.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, end_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = end_ids
        self._lock = Lock()
        """Guards the compiled grammars. No thread holds it while it compiles one, so that steps can look up others."""
        self._making = Lock()
        self._made: Any = None
        self._compiled: OrderedDict[bytes, Any] = OrderedDict()

    def compile(self, wanted: StructuredOutputs) -> Any:
        """Return a matcher at the start of the grammar. Raise ConfigError if it cannot be compiled.

        A grammar may take a second to compile: call this before passing the request to the engine, which then finds it
        cached.
        """
        key = msgspec.json.encode(wanted)
        with self._lock:
            if key in self._compiled:
                self._compiled.move_to_end(key)
                return self._compiled[key]
        compiled = self._compile(wanted)
        with self._lock:
            self._compiled[key] = compiled
            if len(self._compiled) > MAX_KEPT:
                self._compiled.popitem(last=False)
        return compiled

    def matcher(self, wanted: StructuredOutputs) -> Matcher:
        """Return a Matcher for a new text. Raise ConfigError if the grammar cannot be compiled."""
        return Matcher(self.compile(wanted).deep_copy(), self._end_ids, self._vocab_size)

    def _compile(self, wanted: StructuredOutputs) -> Any:
        try:
            import llguidance
        except ImportError as error:
            raise ConfigError(
                "needs llguidance, which is not installed", field=FIELD, hint="pip install llguidance"
            ) from error
        kind, text = wanted.as_text()
        try:
            if kind == "json":
                grammar = llguidance.LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": SPACES})
            else:
                grammar = llguidance.grammar_from(kind, text)
            limits = llguidance.LLParserLimits(
                initial_lexer_fuel=MOST_FUEL, max_items_in_row=MOST_ITEMS, step_max_items=MOST_STEP_ITEMS
            )
            matcher = llguidance.LLMatcher(self._with_bytes(llguidance), grammar, log_level=0, limits=limits)
            matcher.compute_bitmask()  # the first one takes longest, and finds grammars that allow no text
        except ValueError as error:
            raise ConfigError(f"cannot be compiled: {_first_line(error)}", field=FIELD) from error
        if matcher.is_error():
            raise ConfigError(f"cannot be compiled: {_first_line(matcher.get_error())}", field=FIELD)
        # Some grammars turn out to be too complex with the first token.
        probe = Matcher(matcher.deep_copy(), self._end_ids, self._vocab_size)
        for token in np.flatnonzero(probe.allowed()).tolist():
            if token not in self._end_ids:
                probe.accept(token)
                break
        return matcher

    def _with_bytes(self, llguidance: Any) -> Any:
        with self._making:
            if self._made is None:
                backend = getattr(self._tokenizer, "backend_tokenizer", None)
                if backend is None:
                    raise ConfigError("needs the model's tokenizer, a fast one of transformers", field=FIELD)
                if not self._end_ids:
                    raise ConfigError("needs a model that has a token for the end", field=FIELD)
                self._made = llguidance.LLTokenizer(
                    backend.to_str(), n_vocab=self._vocab_size, eos_token=sorted(self._end_ids)
                )
            return self._made


def _first_line(error: object) -> str:
    return (str(error).strip().splitlines() or ["unknown"])[0][:300]
