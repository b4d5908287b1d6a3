"""The choice of a mock's answers: by rules, by a field of the request, or by its tools and schemas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import msgspec

from kvarts.decoders import convert
from kvarts.errors import ConfigError, InputError, parts_of
from kvarts.files import read_bytes, read_toml
from kvarts.openai_api.budget import Budget
from kvarts.openai_api.errors import ApiError
from kvarts.openai_api.schemas import value_of
from kvarts.openai_api.scripted import ScriptedAnswer, ScriptedCall
from kvarts.openai_api.shapes import ANY_OBJECT
from kvarts.openai_api.words import WORDS

if TYPE_CHECKING:
    from kvarts.openai_api.recordings import RecordedAnswers

__all__ = [
    "Answers",
    "Question",
    "Rule",
    "converted",
    "load_rules",
    "rules_of",
]

MAX_RULES = 1000
MAX_PATTERN_CHARS = 1000
SEEN_CHARS = 10_000
"""Length of the beginning of a message that patterns are compared with."""
HINT = "docs/reference.md lists the fields of a rule."
encode = msgspec.json.encode


class Rule(ScriptedAnswer, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An answer and its conditions. `model`, `message`: patterns for the model name and the last user message, in which
    `*` matches any text. `tools`: tool names that the request must offer. `turn`: 1 plus the number of assistant
    messages. `times`: the number of requests that the rule answers; later ones go to the rules after it.
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
        """Return whether all conditions hold for `question`."""
        return (
            (self.turn is None or self.turn == question.turn)
            and all(name in question.tools for name in self.tools)
            and _matches(self.model, question.model)
            and _matches(self.message, question.message[:SEEN_CHARS])
        )


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a request that rules match. `tools`: functions by name. `num_results`: tool messages so far."""

    model: str
    message: str
    tools: Mapping[str, Mapping[str, Any]] = {}
    turn: int = 1
    num_results: int = 0
    seed: int = 0


def _matches(pattern: str, text: str) -> bool:
    """Return whether `pattern` matches all of `text`. Linear in the length of the text."""
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
    """Chooses the answers of a mock. `rules`: the first match wins. `recordings`: answers where no rule matches; None:
    they are drawn, by `seed`.

    `allows_failures`: a request's own answer may have `fail` and `latency_s`. Owner of the use count of each rule.
    """

    def __init__(
        self,
        rules: Sequence[Rule] = (),
        *,
        seed: int = 0,
        allows_failures: bool = False,
        recordings: RecordedAnswers | None = None,
    ) -> None:
        self.recordings = recordings
        self._rules = tuple(rules)
        self._left = {index: rule.times for index, rule in enumerate(rules) if rule.times is not None}
        self._lock = Lock()
        self._seed = seed
        self._allows_failures = allows_failures

    def asked(self, value: Any, param: str) -> ScriptedAnswer:
        """Convert the answer in a request. Raise ApiError for an invalid one."""
        try:
            answer: ScriptedAnswer = converted(value, ScriptedAnswer)
        except ConfigError as error:
            raise ApiError(400, f"is not an answer: {error}", param=param) from error
        if (answer.fail or answer.latency_s) and not self._allows_failures:
            raise ApiError(403, "failures on purpose are off: start a mock with --allow-failures", param=param)
        return answer

    @property
    def has_words_alone(self) -> bool:
        """Whether it lacks rules and recordings: words then answer every request that brings no answer along."""
        return not self._rules and self.recordings is None

    def find(self, question: Question) -> ScriptedAnswer | None:
        """Return the first rule that matches `question` and has uses left, or None. Thread-safe."""
        for index, rule in enumerate(self._rules):
            if rule.is_for(question) and self._take(index):
                return rule
        return None

    def _take(self, index: int) -> bool:
        """Use a rule once. Return False if its uses are spent."""
        with self._lock:
            num_left = self._left.get(index, 1)
            if index in self._left and num_left:
                self._left[index] -= 1
        return num_left > 0

    def json(self, schema: dict[str, Any], question: Question, copy: int, budget: Budget) -> ScriptedAnswer:
        """Return a JSON answer that `schema` allows. Raise ApiError for an unsupported schema."""
        if schema is ANY_OBJECT:
            schema = {"type": "object", "properties": {"text": {"type": "string"}}}
        return ScriptedAnswer(text=self._value(schema, question, copy, budget, "response_format"))

    def call(self, names: Sequence[str], question: Question, copy: int, budget: Budget) -> ScriptedAnswer:
        """Return a call of one of the tools in `names`.

        The seed and the user message select the first tool. Each tool result advances to the next one, so an agent loop
        reaches every tool.
        """
        return self._call(names[(self._drawn(question, 0) + question.num_results) % len(names)], question, copy, budget)

    def call_or_text(
        self, names: Sequence[str], question: Question, copy: int, budget: Budget
    ) -> ScriptedAnswer | None:
        """Return a call, or None for words. At most `len(names)` calls precede the words, so an agent loop ends."""
        turn = self._drawn(question, 0) % (len(names) + 1) + question.num_results
        if turn >= len(names):
            return None
        try:
            return self._call(names[turn], question, copy, budget)
        except ApiError:
            return None  # an unsupported schema

    def _call(self, name: str, question: Question, copy: int, budget: Budget) -> ScriptedAnswer:
        schema = question.tools[name].get("parameters")
        schema = {"type": "object", **(schema if isinstance(schema, dict) else {})}
        return ScriptedAnswer(
            calls=(ScriptedCall(name, encode(self._value(schema, question, copy, budget, "tools")).decode()),)
        )

    def _value(self, schema: dict[str, Any], question: Question, copy: int, budget: Budget, param: str) -> Any:
        drawn = self._drawn(question, copy)
        words = [WORDS[(drawn >> 16 * place) % len(WORDS)] for place in range(1 + drawn % 3)]
        value = value_of(schema, " ".join(words), param=param, budget=budget)
        return value if isinstance(value, dict | list) else encode(value).decode()

    def _drawn(self, question: Question, copy: int) -> int:
        key = encode((self._seed, question.seed, copy, question.message))
        return int.from_bytes(sha256(key).digest()[:8], "little")


def converted(value: Any, kind: type[Any], where: str = "") -> Any:
    """Convert JSON values to `kind`, ScriptedAnswer or Rule. Raise ConfigError with the field, prefixed by `where`."""
    try:
        return convert(value, kind)
    except msgspec.ValidationError as error:
        (what, field), hint = parts_of(error), None
    except ConfigError as error:
        what, field, hint = error.what, error.field, error.hint
    raise ConfigError(what, field=".".join(filter(None, (where, field))), hint=hint)


def rules_of(given: Sequence[Any] | str | Path) -> tuple[Rule, ...]:
    """Convert rules from dicts, or load them from a file. Raise ConfigError, or the errors of `load_rules`."""
    if isinstance(given, str | Path):
        return load_rules(Path(given))
    if len(given) > MAX_RULES:
        raise ConfigError(f"has {len(given):,} rules, and {MAX_RULES:,} at most", field="answers")
    return tuple(
        each if isinstance(each, Rule) else converted(each, Rule, f"answers[{index}]")
        for index, each in enumerate(given)
    )


def load_rules(path: Path) -> tuple[Rule, ...]:
    """Load rules from the tables `[[answers]]` of a .toml, or from the list in a .json.

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
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"is not JSON: {error}", path=path, hint=HINT) from error
    except ConfigError as error:
        error.path = path
        raise
