"""The choice of a mock's answers: by rules, by a field of the request, or by its tools and schemas.

Of the values that a schema allows, the simplest ones are taken, with words in place of free text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from math import ceil, floor
from pathlib import Path
from threading import Lock
from typing import Any

import msgspec

from kvarts.base.decoders import UNDECODED, convert
from kvarts.base.errors import ConfigError, InputError, parts_of, problem_of
from kvarts.base.files import read_bytes, read_toml
from kvarts.base.limits import brief
from kvarts.doors.openai.budget import Budget
from kvarts.doors.openai.errors import ApiError
from kvarts.doors.openai.scripted import ScriptedAnswer, ScriptedCall
from kvarts.doors.openai.shapes import ANY_OBJECT
from kvarts.doors.openai.words import WORDS

__all__ = ["Answers", "Question", "Rule", "converted", "load_rules", "rules_of", "value_of"]

MAX_RULES = 1000
MAX_PATTERN_CHARS = 1000
SEEN_CHARS = 10_000
"""Length of the beginning of a message that patterns are compared with."""
HINT = "docs/reference.md lists the fields of a rule."
encode = msgspec.json.encode
MAX_DEPTH = 24
MOST_ITEMS, MOST_CHARS = 1000, 100_000
"""Limits of `minItems` and `minLength`."""
MOST_BYTES_PER_CHAR = 6
"""Bytes of JSON per character: a character may have to be written as an escape."""
NOT_MADE = ("pattern", "multipleOf", "not", "if", "patternProperties", "propertyNames", "contains", "dependentSchemas")
"""Unsupported keywords."""
FORMATS = {
    "date-time": "2026-01-01T00:00:00Z",
    "date": "2026-01-01",
    "time": "00:00:00Z",
    "email": "a@example.com",
    "uri": "http://example.com/",
    "uuid": "00000000-0000-4000-8000-000000000000",
    "ipv4": "127.0.0.1",
    "hostname": "example.com",
}


def value_of(schema: Any, text: str, *, param: str, budget: Budget) -> Any:
    """Return a value that `schema` allows, with `text` in place of free texts, as far as the budget allows.

    Raise ApiError, for the field `param`, if the schema is not supported or its value would be too large.
    """
    maker = _Maker(schema, "", param, budget)
    value = maker.made()
    if text and maker.num_texts:
        most = budget.num_made_bytes // (MOST_BYTES_PER_CHAR * maker.num_texts)
        value = _Maker(schema, text[:most], param, Budget(sequences=0)).made()
    return value


class _Maker:
    """Makes the values of one schema. Draws on a budget before it makes, follows or merges anything."""

    def __init__(self, root: Any, text: str, param: str, budget: Budget) -> None:
        self._root = root
        self._text = text
        self._param = param
        self._budget = budget
        self._sizes: dict[int, int] = {}
        """JSON sizes of values that the schema contains, by identity."""
        self.num_texts = 0
        """Number of texts that were made."""

    def made(self) -> Any:
        """Return a value of the whole schema."""
        try:
            return self.value(self._root, 0)
        except (TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            # A keyword's value has an invalid type, wherever that was noticed.
            raise ApiError(400, f"this is no JSON schema: {brief(str(error))}", param=self._param) from error

    def _draw(self, count: int = 1, num_bytes: int = 0) -> None:
        self._budget.draw_made(count, num_bytes, self._param)

    def _given(self, value: Any) -> Any:
        """Return a value that the schema prescribes, after drawing its size on the budget."""
        size = self._sizes.get(id(value))
        if size is None:
            size = self._sizes[id(value)] = len(msgspec.json.encode(value))
        self._draw(0, size)
        return value

    def value(self, schema: Any, depth: int) -> Any:
        """Return a value that `schema`, a part of the whole, allows."""
        self._draw()
        if schema is True or schema == {}:
            return self._written()
        if not isinstance(schema, dict):
            raise self._refused("a schema is an object")
        if depth > MAX_DEPTH:
            raise self._refused(f"it is nested more than {MAX_DEPTH} deep, or never ends")
        schema = self._resolved(schema, depth)
        for keyword in NOT_MADE:
            if keyword in schema:
                raise self._refused(f"{keyword!r} cannot be kept")
        if "const" in schema:
            return self._given(schema["const"])
        if "enum" in schema:
            if not isinstance(schema["enum"], list) or not schema["enum"]:
                raise self._refused("'enum' is a list of values")
            return self._given(schema["enum"][0])
        return self._of_kind(_kind_of(schema), schema, depth)

    def _of_kind(self, kind: Any, schema: Mapping[str, Any], depth: int) -> Any:
        if kind == "object":
            return self._object(schema, depth)
        if kind == "array":
            return self._array(schema, depth)
        if kind in ("integer", "number"):
            return self._number(schema, is_whole=kind == "integer")
        if kind == "string":
            return self._string(schema)
        if kind == "boolean":
            return False
        if kind == "null":
            return None
        raise self._refused(f"there is no type {brief(kind)}")

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        properties = schema.get("properties", {})
        names = schema.get("required", list(properties) if isinstance(properties, dict) else [])
        if not isinstance(properties, dict) or not isinstance(names, list):
            raise self._refused("'properties' is an object, and 'required' a list")
        if schema.get("minProperties", 0) > len(names):
            raise self._refused("'minProperties' cannot be kept")
        self._draw(len(names), sum(map(len, names)))
        extra = schema.get("additionalProperties", True)
        return {str(name): self.value(properties.get(name, extra or {}), depth + 1) for name in names}

    def _array(self, schema: Mapping[str, Any], depth: int) -> list[Any]:
        least, most = schema.get("minItems", 1), schema.get("maxItems", 1 << 30)
        first = schema.get("prefixItems", [])
        if not _is_size(least) or not _is_size(most) or not isinstance(first, list) or least > MOST_ITEMS:
            raise self._refused(
                f"'minItems' (at most {MOST_ITEMS:,}) and 'maxItems' are numbers from 0, and 'prefixItems' a list"
            )
        count = min(max(least, len(first)), most)
        if schema.get("uniqueItems") and count > 1:
            raise self._refused("'uniqueItems' cannot be kept")
        self._draw(count)
        items = [*first, *[schema.get("items", {})] * count][:count]
        return [self.value(item, depth + 1) for item in items]

    def _number(self, schema: Mapping[str, Any], *, is_whole: bool) -> float:
        step = 1 if is_whole else 0.5
        least, most = schema.get("minimum"), schema.get("maximum")
        above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
        try:
            lows = [bound for bound in (least, None if above is None else above + step) if bound is not None]
            highs = [bound for bound in (most, None if below is None else below - step) if bound is not None]
            low = max(lows, default=None)
            high = min(highs, default=None)
            found: float = 0 if low is None or low <= 0 else (ceil(low) if is_whole else low)
            if high is not None and found > high:
                found = floor(high) if is_whole else high
            if low is not None and found < low:
                raise self._refused("no number is within its bounds")
        except TypeError:
            raise self._refused("bounds are numbers") from None
        return int(found) if is_whole else float(found)

    def _string(self, schema: Mapping[str, Any]) -> str:
        if "format" in schema:
            if schema["format"] not in FORMATS:
                raise self._refused(f"the format {brief(schema['format'])} cannot be kept")
            return FORMATS[schema["format"]]
        least, most = schema.get("minLength", 0), schema.get("maxLength", 1 << 30)
        if not _is_size(least) or not _is_size(most) or least > MOST_CHARS:
            raise self._refused(f"'minLength' (at most {MOST_CHARS:,}) and 'maxLength' are numbers from 0")
        self._draw(0, least)
        return self._written().ljust(least, "x")[:most]

    def _written(self) -> str:
        """Return the text, for one free text of the schema."""
        self.num_texts += 1
        self._draw(0, MOST_BYTES_PER_CHAR * len(self._text))
        return self._text

    def _resolved(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        """Return the schema with `$ref`s resolved and the first alternative chosen."""
        self._draw(len(schema))
        merged = dict(schema)
        for _ in range(MAX_DEPTH):
            if "$ref" in merged:
                merged = {**self._found(merged.pop("$ref")), **merged}
            elif "allOf" in merged:
                for part in self._list(merged.pop("allOf")):
                    merged = self._both(merged, self._resolved(part, depth + 1))
            elif "anyOf" in merged or "oneOf" in merged:
                keyword = "anyOf" if "anyOf" in merged else "oneOf"
                merged = self._both(merged, self._list(merged.pop(keyword))[0])
            else:
                return merged
        raise self._refused("it refers to itself without end")

    def _list(self, parts: Any) -> Sequence[dict[str, Any]]:
        self._draw(len(parts) if isinstance(parts, list) else 1)
        if not isinstance(parts, list) or not parts or not all(isinstance(part, dict) for part in parts):
            raise self._refused("alternatives are a list of schemas")
        return parts

    def _found(self, reference: Any) -> dict[str, Any]:
        place: Any = self._root
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise self._refused(f"it refers to {brief(reference)}, which is not in it")
        self._draw(1 + len(reference) // 16)
        for name in reference.removeprefix("#").strip("/").split("/"):
            key = name.replace("~1", "/").replace("~0", "~")
            place = place.get(key) if isinstance(place, dict) and name else (place if not name else None)
        if not isinstance(place, dict):
            raise self._refused(f"it refers to {brief(reference)}, which is not in it")
        return place

    def _both(self, one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
        """Return the conjunction of two schemas."""
        self._draw(len(one) + len(other))
        merged = {**one, **other}
        for keyword in ("properties", "required"):
            if keyword in one and keyword in other:
                self._draw(len(one[keyword]) + len(other[keyword]))
        if "properties" in one and "properties" in other:
            merged["properties"] = {**one["properties"], **other["properties"]}
        if "required" in one and "required" in other:
            merged["required"] = list(dict.fromkeys([*one["required"], *other["required"]]))
        return merged

    def _refused(self, what: str) -> ApiError:
        return ApiError(400, f"no value of this JSON schema can be made: {what}", param=self._param)


def _is_size(value: Any) -> bool:
    """Return whether a keyword's value is a size."""
    return isinstance(value, int) and value >= 0


def _kind_of(schema: Mapping[str, Any]) -> Any:
    kind = schema.get("type")
    if isinstance(kind, list):
        return kind[0] if kind else "null"
    if kind is not None:
        return kind
    if "properties" in schema or "required" in schema or "additionalProperties" in schema:
        return "object"
    return "array" if "items" in schema or "prefixItems" in schema else "string"


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
    """Chooses the answers of a mock. `rules`: the first match wins; where none matches, answers are drawn, by `seed`.

    `allows_failures`: a request's own answer may have `fail` and `latency_s`. Owner of the use count of each rule.
    """

    def __init__(
        self,
        rules: Sequence[Rule] = (),
        *,
        seed: int = 0,
        allows_failures: bool = False,
    ) -> None:
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
            raise ApiError(403, "failures on purpose are off: start a mock with --set allow_failures=true", param=param)
        return answer

    @property
    def has_words_alone(self) -> bool:
        """Whether it lacks rules: words then answer every request that brings no answer along."""
        return not self._rules

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
    except UNDECODED as error:
        raise InputError(f"is not JSON: {problem_of(error)}", path=path, hint=HINT) from error
    except ConfigError as error:
        error.path = path
        raise
