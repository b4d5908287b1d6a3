"""Answers of a mock other than drawn words: from rules, from a request, or for tools and schemas.

An answer is known before it is written. The engine writes it token by token, like words; it therefore takes the time of
its tokens, is cut off at `max_tokens`, and is hit in the cache by the next turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import Any

import msgspec

from kvarts.errors import ConfigError, InputError, parts_of
from kvarts.files import read_bytes, read_toml
from kvarts.openai_api.budget import Budget
from kvarts.openai_api.errors import ApiError
from kvarts.openai_api.failures import MAX_STALL_S, NO_FAILURE, Failure, parse_failure
from kvarts.openai_api.schemas import value_of
from kvarts.openai_api.shapes import ANY_OBJECT, Segment
from kvarts.openai_api.tool_calls import call_text
from kvarts.openai_api.words import WORDS

__all__ = ["Answers", "Question", "Rule", "Told", "ToldCall", "ToldUsage", "load_rules", "rules_of", "told_by"]

MAX_RULES = 1000
MAX_PATTERN_CHARS = 1000
SEEN_CHARS = 10_000
"""Rules match this many characters of a message, from its start."""
HINT = "docs/reference.md lists the fields of a rule."
encode = msgspec.json.encode


class ToldCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call of a tool. `arguments`: an object, or its JSON as text, which may be invalid on purpose."""

    name: str
    arguments: dict[str, Any] | str = msgspec.field(default_factory=dict)

    @property
    def written(self) -> str:
        """The arguments as text."""
        return self.arguments if isinstance(self.arguments, str) else encode(self.arguments).decode()


class ToldUsage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Usage numbers that replace the counted ones."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class Told(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An answer. `text`: a text, or a value to write as JSON. `finish_reason`: used if the answer is not cut off.

    `latency_s`: delay before the first byte. `fail`: a failure, as in one rule of a script of failures. Raises
    ConfigError for a value out of range.
    """

    text: str | dict[str, Any] | list[Any] = ""
    calls: tuple[ToldCall, ...] = ()
    reasoning: str = ""
    refusal: str = ""
    usage: ToldUsage = ToldUsage()
    finish_reason: str = ""
    latency_s: float = 0.0
    fail: str = ""

    def __post_init__(self) -> None:
        if self.refusal and (self.text or self.calls):
            raise ConfigError("is instead of a text and calls", field="refusal")
        if not 0.0 <= self.latency_s <= MAX_STALL_S:
            raise ConfigError(f"must be from 0 to {MAX_STALL_S:g}, got {self.latency_s}", field="latency_s")
        if self.fail:
            parse_failure(self.fail)

    @property
    def failure(self) -> Failure:
        """The failure or delay of the answer."""
        failure = parse_failure(self.fail) if self.fail else NO_FAILURE
        return msgspec.structs.replace(failure, stall_s=self.latency_s) if self.latency_s else failure

    def segments(self) -> tuple[Segment, ...]:
        """Return the text in segments, in the format of the Qwen family."""
        parts: list[Segment] = []
        if self.reasoning:
            parts += [Segment("unseen", "<think>\n"), Segment("reasoning", self.reasoning)]
            parts.append(Segment("unseen", "\n</think>\n\n"))
        text = self.text if isinstance(self.text, str) else encode(self.text).decode()
        if text or self.refusal:
            parts.append(Segment("refusal" if self.refusal else "content", self.refusal or text))
        for index, call in enumerate(self.calls):
            before, after = call_text(call.name, is_first=not (index or text))
            parts += [
                Segment("unseen", before),
                Segment("arguments", call.written, call.name),
                Segment("unseen", after),
            ]
        return tuple(parts)


class Rule(Told, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An answer with the requests that it matches.

    `model` and `message`: patterns for the name of the model and the last message of the user, in which `*` matches any
    text. `tools`: names that must all be offered. `turn`: 1 for a conversation without an answer. `times`: number of
    requests that the rule answers; later ones continue to the next rule.
    """

    model: str = "*"
    message: str = "*"
    tools: tuple[str, ...] = ()
    turn: int | None = None
    times: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("model", "message"):
            if len(getattr(self, field)) > MAX_PATTERN_CHARS:
                raise ConfigError(f"has at most {MAX_PATTERN_CHARS} characters", field=field)
        for field in ("turn", "times"):
            if (count := getattr(self, field)) is not None and count < 1:
                raise ConfigError(f"counts from 1, got {count}", field=field)

    def is_for(self, question: Question) -> bool:
        """Return whether the rule matches `question`."""
        return (
            (self.turn is None or self.turn == question.turn)
            and all(name in question.tools for name in self.tools)
            and _matches(self.model, question.model)
            and _matches(self.message, question.message[:SEEN_CHARS])
        )


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """The input of rules. `tools`: the offered functions, by name. `num_results`: results of tools so far."""

    model: str
    message: str
    tools: Mapping[str, Mapping[str, Any]] = {}
    turn: int = 1
    num_results: int = 0
    seed: int = 0


def _matches(pattern: str, text: str) -> bool:
    """Return whether `pattern` matches all of `text`, in linear time."""
    first, *rest = pattern.split("*")
    if not rest:
        return text == pattern
    *middle, last = rest
    if len(text) < len(first) + len(last) or not (text.startswith(first) and text.endswith(last)):
        return False
    place, end = len(first), len(text) - len(last)
    for part in middle:
        place = text.find(part, place, end)
        if place < 0:
            return False
        place += len(part)
    return True


class Answers:
    """The answers of a mock. `rules`: the first match decides. `seed`: for answers that are drawn without a rule.

    `allows_failures`: a request may ask for an answer that fails or is delayed. Owner of the number of answers of each
    rule.
    """

    def __init__(self, rules: Sequence[Rule] = (), *, seed: int = 0, allows_failures: bool = False) -> None:
        self._rules = tuple(rules)
        self._left = {index: rule.times for index, rule in enumerate(rules) if rule.times is not None}
        self._lock = Lock()
        self._seed = seed
        self._allows_failures = allows_failures

    def asked(self, value: Any, param: str) -> Told:
        """Return the answer that a request carries. Raise ApiError if it is not an answer."""
        try:
            told: Told = told_by(value, Told)
        except ConfigError as error:
            raise ApiError(400, f"is not an answer: {error}", param=param) from error
        if (told.fail or told.latency_s) and not self._allows_failures:
            raise ApiError(403, "failures on purpose are off: start a mock with --allow-failures", param=param)
        return told

    def find(self, question: Question) -> Told | None:
        """Return the answer of the first rule that matches `question`; None without a match. From any thread."""
        for index, rule in enumerate(self._rules):
            if rule.is_for(question) and self._take(index):
                return rule
        return None

    def _take(self, index: int) -> bool:
        """Count an answer of a rule. Return whether the rule had any left."""
        with self._lock:
            num_left = self._left.get(index, 1)
            if index in self._left and num_left:
                self._left[index] -= 1
        return num_left > 0

    def json(self, schema: dict[str, Any], question: Question, copy: int, budget: Budget) -> Told:
        """Return JSON that `schema` allows. Raise ApiError for a schema whose values cannot be made."""
        if schema is ANY_OBJECT:
            schema = {"type": "object", "properties": {"text": {"type": "string"}}}
        return Told(text=self._value(schema, question, copy, budget, "response_format"))

    def call(self, names: Sequence[str], question: Question, copy: int, budget: Budget) -> Told:
        """Return a call of one of the tools in `names`.

        The seed and the user's message select the first tool; after each result the next tool follows, so that every
        tool is called eventually.
        """
        return self._call(names[(self._drawn(question, 0) + question.num_results) % len(names)], question, copy, budget)

    def call_or_text(self, names: Sequence[str], question: Question, copy: int, budget: Budget) -> Told | None:
        """Return a call, or None for a text. A text follows after at most as many results as there are tools."""
        turn = self._drawn(question, 0) % (len(names) + 1) + question.num_results
        if turn >= len(names):
            return None
        try:
            return self._call(names[turn], question, copy, budget)
        except ApiError:
            return None  # a schema whose values cannot be made

    def _call(self, name: str, question: Question, copy: int, budget: Budget) -> Told:
        schema = question.tools[name].get("parameters")
        schema = {"type": "object", **(schema if isinstance(schema, dict) else {})}
        return Told(calls=(ToldCall(name, encode(self._value(schema, question, copy, budget, "tools")).decode()),))

    def _value(self, schema: dict[str, Any], question: Question, copy: int, budget: Budget, param: str) -> Any:
        drawn = self._drawn(question, copy)
        words = [WORDS[(drawn >> 16 * place) % len(WORDS)] for place in range(1 + drawn % 3)]
        value = value_of(schema, " ".join(words), param=param, budget=budget)
        return value if isinstance(value, dict | list) else encode(value).decode()

    def _drawn(self, question: Question, copy: int) -> int:
        key = encode((self._seed, question.seed, copy, question.message))
        return int.from_bytes(sha256(key).digest()[:8], "little")


def told_by(value: Any, kind: type[Any], where: str = "") -> Any:
    """Convert JSON values to a Told or Rule. Raise ConfigError, which names the field below `where`."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        what, field = parts_of(error)
    except ConfigError as error:
        what, field = error.what, error.field
    raise ConfigError(what, field=".".join(filter(None, (where, field))))


def rules_of(given: Sequence[Any] | str | Path) -> tuple[Rule, ...]:
    """Return rules from a file, or from objects with their fields. Raise ConfigError, or the errors of `load_rules`."""
    if isinstance(given, str | Path):
        return load_rules(Path(given))
    if len(given) > MAX_RULES:
        raise ConfigError(f"has {len(given):,} rules, and {MAX_RULES:,} at most", field="answers")
    return tuple(
        each if isinstance(each, Rule) else told_by(each, Rule, f"answers[{index}]") for index, each in enumerate(given)
    )


def load_rules(path: Path) -> tuple[Rule, ...]:
    """Return the rules of a file: tables `[[answers]]` of a .toml, or a list in a .json.

    Raise MissingFileError, InputError or ConfigError.
    """
    try:
        if path.suffix == ".json":
            given = msgspec.json.decode(read_bytes(path, hint=HINT))
        else:
            tables = read_toml(path, hint=HINT)
            given = tables.pop("answers", [])
            if tables:
                raise ConfigError("is not known", field=min(tables), hint=HINT)
        if not isinstance(given, list):
            raise ConfigError("is not a list of rules", field="answers", hint=HINT)
        return rules_of(given)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InputError(f"is not JSON: {error}", path=path, hint=HINT) from error
    except ConfigError as error:
        error.path = path
        raise
