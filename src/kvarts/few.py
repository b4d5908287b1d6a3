"""Whether NumPy pays, and columns of numbers that are too few for it.

NumPy takes longer to load than a short replay to run. Where it is not loaded, work on few numbers is done without it,
with the same results to the last bit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import compress, repeat
from operator import add, and_, eq, floordiv, gt, le, lt, mod, mul, sub
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy.typing as npt

    Column = npt.NDArray[Any]
else:  # not in a compiled module: mypyc takes this branch for one that is never reached
    Column = Any

__all__ = ["Column", "Few", "Numbers", "arrays_pay"]

Numbers = Any
"""A column: an array of NumPy, or Few."""

PAYS = 1 << 16
"""Work on so many numbers in Python takes about as long as loading NumPy."""

_num_asked = [0]
"""Numbers that were worked on without NumPy so far, in this process."""


def arrays_pay(num_values: int) -> bool:
    """Return whether to work on `num_values` numbers as arrays: NumPy is loaded, or has been asked for often enough."""
    if "numpy" in sys.modules:
        return True
    _num_asked[0] += num_values
    return _num_asked[0] > PAYS


class Few:
    """A column of numbers with those methods of NumPy's arrays that summaries call."""

    __slots__ = ("_values",)

    def __init__(self, values: Iterable[Any]) -> None:
        self._values = list(values)

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values)

    def __setitem__(self, key: Few, values: Few) -> None:
        new = iter(values)
        self._values = [next(new) if is_set else value for is_set, value in zip(key, self._values, strict=True)]

    def __getitem__(self, key: int | Few) -> Any:
        return Few(compress(self._values, key)) if isinstance(key, Few) else self._values[key]

    def _with(self, operation: Callable[[Any, Any], Any], other: Any) -> Few:
        return Few(map(operation, self._values, other if isinstance(other, Few) else repeat(other)))

    def __add__(self, other: Any) -> Few:
        return self._with(add, other)

    def __sub__(self, other: Any) -> Few:
        return self._with(sub, other)

    def __mul__(self, other: Any) -> Few:
        return self._with(mul, other)

    def __floordiv__(self, other: Any) -> Few:
        return self._with(floordiv, other)

    def __mod__(self, other: Any) -> Few:
        return self._with(mod, other)

    def __truediv__(self, other: Any) -> Few:
        return self._with(_divided, other)

    def __and__(self, other: Any) -> Few:
        return self._with(and_, other)

    def __gt__(self, other: Any) -> Few:
        return self._with(gt, other)

    def __lt__(self, other: Any) -> Few:
        return self._with(lt, other)

    def __le__(self, other: Any) -> Few:
        return self._with(le, other)

    def __eq__(self, other: object) -> Few:  # type: ignore[override]
        return self._with(eq, other)

    __hash__ = None  # type: ignore[assignment]

    def all(self) -> bool:
        """Return whether all are true."""
        return all(self._values)

    def sum(self) -> Any:
        """Return the sum, exact for whole numbers."""
        return sum(self._values)

    def max(self, initial: int = 0) -> Any:
        """Return the largest, `initial` included."""
        return max(initial, *self._values) if self._values else initial

    def clip(self, least: int) -> Few:
        """Return the numbers, those below `least` as that."""
        return Few(max(least, value) for value in self._values)

    def dot(self, other: Few) -> int:
        """Return the sum of products, exact."""
        return sum(map(mul, self._values, other._values))

    def copy(self) -> Few:
        """Return the same numbers."""
        return Few(self._values)

    def sort(self) -> None:
        """Sort in place."""
        self._values.sort()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        import numpy as np

        return np.array(self._values, np.int64 if dtype is None else dtype)

    def tolist(self) -> list[Any]:
        """Return the numbers; they are not to be changed."""
        return self._values


def _divided(number: float, by: float) -> float:
    """Return what NumPy does: both numbers are rounded first."""
    return float(number) / float(by)
