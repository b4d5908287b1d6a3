"""Values that a JSON schema allows: the simplest ones, with words in place of free text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, floor
from typing import Any

import msgspec

from kvarts.limits import brief
from kvarts.openai_api.budget import Budget
from kvarts.openai_api.errors import ApiError

__all__ = ["value_of"]

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
        """Return a value that the schema contains, and draw its size."""
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
