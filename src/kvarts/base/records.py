"""A base of values that the hot loop makes and reads, as native classes in the compiled build."""

from __future__ import annotations

from typing import Any, ClassVar, Self

__all__ = ["Value"]


class Value:
    """Equal to another of its type if all `FIELDS` are. Nothing may change a field after the value is made.

    `FIELDS`: the arguments of the constructor, in order.
    """

    __slots__ = ()
    FIELDS: ClassVar[tuple[str, ...]] = ()

    def values(self) -> tuple[Any, ...]:
        """Return the values of the fields."""
        return tuple([getattr(self, name) for name in self.FIELDS])

    def replaced(self, **changes: Any) -> Self:
        """Return the value with some fields changed."""
        made = type(self)(*[changes.pop(name) if name in changes else getattr(self, name) for name in self.FIELDS])
        assert not changes, f"no fields: {', '.join(changes)}"
        return made

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and isinstance(other, Value) and self.values() == other.values()

    def __hash__(self) -> int:
        return hash(self.values())

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how another process makes the value: `pickle` does not find the state of native objects."""
        return type(self), self.values()

    def __repr__(self) -> str:
        pairs = zip(self.FIELDS, self.values(), strict=True)
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in pairs)})"
