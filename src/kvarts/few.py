"""Decides whether NumPy is worth loading, and provides columns for numbers too few for it.

Loading NumPy takes longer than running a short replay. If it is not loaded, small columns are processed without it,
with bit-identical results.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import compress, repeat
from operator import add, and_, eq, floordiv, gt, le, lt, mod, mul, sub, truediv
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy.typing as npt

    Column = npt.NDArray[Any]
else:  # not in compiled modules, where mypyc treats this branch as unreachable
    Column = Any

__all__ = ["NEEDS_ARRAYS", "Column", "Few", "Numbers", "ReadColumns", "arrays_pay", "load_if_arrays_pay", "narrowed"]

Numbers = Any
"""A column: a NumPy array, or Few."""

BITS = (("b", 7), ("h", 15), ("i", 31), ("q", 63))
"""Type codes of integers of 1, 2, 4 and 8 bytes, and their bits without the sign."""

PAYS = 3 << 19
"""Processing this many numbers in Python takes about as long as loading NumPy and processing them as arrays.

Measured with Mooncake's conversation trace: the summary of 12,031 requests counts 940,000 numbers, and takes 58 ms more
than with arrays where loading NumPy takes 95 ms.
"""

NEEDS_ARRAYS = PAYS + 1
"""So many numbers are processed as arrays in any case."""

MOST_EXACT = 1 << 53
"""Smaller integers are floats without rounding."""

_num_asked = [0]
"""Count of numbers processed without NumPy so far in this process."""


def arrays_pay(num_values: int, *, are_kept: bool = False) -> bool:
    """Return whether to process `num_values` numbers as arrays: NumPy is loaded or worth loading by now.

    `are_kept`: a summary will read all numbers that are kept once more.
    """
    if "numpy" in sys.modules:
        return True
    _num_asked[0] += num_values
    return _num_asked[0] > (PAYS >> 1 if are_kept else PAYS)


def load_if_arrays_pay(num_values: int) -> None:
    """Load NumPy before a summary of `num_values` numbers if they are too many, so that no part is computed in vain."""
    if _num_asked[0] + num_values > PAYS:
        import numpy as np  # noqa: F401


class Few:
    """A column of numbers with the methods of NumPy arrays that summaries use."""

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

    def _with_table(self, operation: Callable[[Any, Any], Any], other: Any) -> Few:
        """Return the same; small numbers are looked up among the results for all bytes. True is 1, and False 0."""
        if len(self._values) > 256 and not isinstance(other, Few):
            try:
                small, results = bytes(self._values), bytes(map(operation, range(256), repeat(other)))
            except (TypeError, ValueError):
                pass  # not whole numbers, or not all of them of a byte
            else:
                return Few(small.translate(results))
        return self._with(operation, other)

    def __add__(self, other: Any) -> Few:
        return self._with(add, other)

    def __sub__(self, other: Any) -> Few:
        return self._with(sub, other)

    def __mul__(self, other: Any) -> Few:
        return self._with(mul, other)

    def __floordiv__(self, other: Any) -> Few:
        return self._with_table(floordiv, other)

    def __mod__(self, other: Any) -> Few:
        return self._with_table(mod, other)

    def __truediv__(self, other: Few) -> Few:
        # NumPy rounds both numbers to floats first, which makes no difference if they are exact as floats.
        is_exact = self.max() < MOST_EXACT and other.max() < MOST_EXACT
        return self._with(truediv if is_exact else _divided, other)

    def __and__(self, other: Any) -> Few:
        return self._with_table(and_, other)

    def __gt__(self, other: Any) -> Few:
        return self._with_table(gt, other)

    def __lt__(self, other: Any) -> Few:
        return self._with_table(lt, other)

    def __le__(self, other: Any) -> Few:
        return self._with_table(le, other)

    def __eq__(self, other: object) -> Few:  # type: ignore[override]
        return self._with_table(eq, other)

    __hash__ = None  # type: ignore[assignment]

    def all(self) -> bool:
        """Return whether all are true."""
        return all(self._values)

    def sum(self) -> Any:
        """Return the sum, exact for whole numbers."""
        return sum(self._values)

    def max(self, initial: int = 0) -> Any:
        """Return the largest value, including `initial`."""
        return max(initial, max(self._values, default=initial))

    @staticmethod
    def where(is_first: Few, first: Few, second: Few) -> Few:
        """Return the numbers of one column where `is_first` is not 0, and those of another elsewhere."""
        chosen = second.copy()
        for place in compress(range(len(chosen)), is_first):
            chosen._values[place] = first._values[place]
        return chosen

    def clip(self, least: int) -> Few:
        """Return the numbers, raised to at least `least`."""
        return Few(max(least, value) for value in self._values)

    def dot(self, other: Few) -> int:
        """Return the exact sum of products."""
        return sum(map(mul, self._values, other._values))

    def copy(self) -> Few:
        """Return a copy."""
        return Few(self._values)

    def sort(self) -> None:
        """Sort in place: as floats if they are exact, which are compared faster."""
        if min(self._values, default=0) > -MOST_EXACT and self.max() < MOST_EXACT:
            self._values = list(map(float, self._values))
        self._values.sort()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        import numpy as np

        return np.array(self._values, np.int64 if dtype is None else dtype)

    def tolist(self) -> list[Any]:
        """Return the numbers. The list must not be modified."""
        return self._values


def _divided(number: float, by: float) -> float:
    """Return the quotient as NumPy computes it: both numbers are rounded to floats first."""
    return float(number) / float(by)


class ReadColumns(Mapping[str, Numbers]):
    """Columns of integers that are made each time that they are read by `read`."""

    def __init__(self, names: Iterable[str], read: Callable[[str], Numbers]) -> None:
        self._names = tuple(names)
        self._read = read

    def __getitem__(self, name: str) -> Numbers:
        if name not in self._names:
            raise KeyError(name)
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def narrowed(column: Column) -> Column:
    """Return a column of integers in as few bytes per integer as the largest of them needs."""
    least, most = int(column.min(initial=0)), int(column.max(initial=0))
    fits = next(kind for kind, bits in BITS if -1 << bits <= least and most < 1 << bits)
    return column.astype(fits, copy=False)
