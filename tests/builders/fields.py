"""The fields of events and plans, whether these are structs or values of the hot loop."""

from __future__ import annotations

from typing import Any

import msgspec

from kvarts.base.records import Value

__all__ = ["changed", "fields_of"]


def fields_of(value: Any) -> tuple[str, ...]:
    """The names of the fields of `value`, in order."""
    names: tuple[str, ...] = value.FIELDS if isinstance(value, Value) else value.__struct_fields__
    return names


def changed(value: Any, **fields: Any) -> Any:
    """`value` with other `fields`."""
    return value.replaced(**fields) if isinstance(value, Value) else msgspec.structs.replace(value, **fields)
