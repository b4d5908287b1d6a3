"""The content of the pages of one sequence, as far as its tokens are known.

A sequence consists of *units*, each standing for `unit_tokens` equal tokens: a token id in a live engine (`unit_tokens`
1), a hash id in a recorded trace (512 tokens for Mooncake). Two pages are equal exactly if all tokens up to their ends
are equal. The tree compares positions, so a content only compares units.

Pages beyond the known tokens are private: no other sequence's page can equal them, but the sequence itself can find
them again after a preemption. `owner` distinguishes such pages.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from sys import getsizeof
from typing import Any, Final

from kvarts.base.errors import ConfigError
from kvarts.core.hints import Hints

__all__ = ["NOTHING", "UNIT_BYTES", "Content", "PageKey", "pack_units"]

PageKey = bytes | int
"""Identifies a page among the pages that may follow one prefix: the bytes of its units, or an owner."""

UNIT_BYTES: Final = 8

TRIM_BYTES: Final = 1024
"""Smallest saving in bytes that justifies a copy."""


class Content:
    """The known tokens of one sequence, and the hints of its request, which are not compared.

    Only its request appends to it; readers may attach notes.
    """

    __slots__ = (
        "_notes",
        "_pages_per_unit",
        "hints",
        "lookahead",
        "num_known_pages",
        "num_known_tokens",
        "num_prompt_tokens",
        "owner",
        "page_size",
        "salt",
        "swapped_tokens",
        "unit_tokens",
        "units",
    )

    def __init__(
        self,
        units: bytes | bytearray,
        *,
        num_tokens: int,
        page_size: int,
        unit_tokens: int = 1,
        owner: int,
        salt: str | None = None,
        hints: Hints | None = None,
        lookahead: int = 0,
    ) -> None:
        """Create a content from `units`, 8 bytes each in native byte order. `salt`: the tenant.

        `lookahead`: the tokens after a page that have to be equal as well for it to be equal.
        """
        if len(units) // UNIT_BYTES * unit_tokens < num_tokens:
            raise ConfigError(
                f"{len(units) // UNIT_BYTES} units of {unit_tokens} tokens do not cover {num_tokens} tokens",
                field="units",
            )
        self.units = units
        self.unit_tokens = unit_tokens
        self.page_size = page_size
        self.num_known_tokens = num_tokens
        self.lookahead = lookahead
        self.num_known_pages = max(0, num_tokens - lookahead) // page_size
        self.num_prompt_tokens = num_tokens
        """The tokens of its request's prompt, as far as there is a request."""
        # 0 if page and unit boundaries are not aligned.
        self._pages_per_unit = 0 if unit_tokens % page_size or lookahead else unit_tokens // page_size
        self.owner = owner
        self.salt = salt
        self.hints = hints
        self.swapped_tokens = 0
        """While its request waits after a preemption that kept its state: the tokens that the state is of; else 0."""
        self._notes: dict[object, Any] | None = None

    @classmethod
    def from_tokens(
        cls,
        token_ids: Iterable[int],
        *,
        page_size: int,
        owner: int,
        salt: str | None = None,
        hints: Hints | None = None,
        lookahead: int = 0,
    ) -> Content:
        """Return a growable content of single tokens, ids in [0, 2**64). Raise ConfigError for other ids."""
        units = bytearray(pack_units(token_ids))
        num_tokens = len(units) // UNIT_BYTES
        return cls(
            units,
            num_tokens=num_tokens,
            page_size=page_size,
            owner=owner,
            salt=salt,
            hints=hints,
            lookahead=lookahead,
        )

    def append(self, packed_tokens: bytes) -> None:
        """Append known tokens, packed in 8 bytes each. Requires `unit_tokens` 1."""
        assert self.unit_tokens == 1 and isinstance(self.units, bytearray)
        self.units += packed_tokens
        self.num_known_tokens += len(packed_tokens) // UNIT_BYTES
        self.num_known_pages = max(0, self.num_known_tokens - self.lookahead) // self.page_size

    def note(self, reader: object, notes: object) -> None:
        """Attach `notes` of `reader` to this content, for as long as it lives."""
        if self._notes is None:
            self._notes = {}
        self._notes[reader] = notes

    def noted(self, reader: object) -> Any:
        """Return the notes of `reader`; None if it has attached none."""
        return None if self._notes is None else self._notes.get(reader)

    def trim(self) -> None:
        """Free spare capacity: a growing content reserves about an eighth in advance."""
        if isinstance(self.units, bytearray) and getsizeof(self.units) - len(self.units) > TRIM_BYTES:
            self.units = bytearray(self.units)

    def tokens(self, start: int, end: int) -> array[int]:
        """Return the token ids [start, end), which must be known."""
        assert end <= self.num_known_tokens
        first, last = start // self.unit_tokens, -(-end // self.unit_tokens)
        units = array("Q", bytes(self.units[first * UNIT_BYTES : last * UNIT_BYTES]))
        if self.unit_tokens == 1:
            return units
        spelled = array("Q")
        for unit in units:
            spelled.extend([unit] * self.unit_tokens)
        offset = start - first * self.unit_tokens
        return spelled[offset : offset + end - start]

    def key(self, page: int) -> PageKey:
        """Return the key of `page` among its siblings."""
        if page >= self.num_known_pages:
            return self.owner
        if self._pages_per_unit:
            first = page // self._pages_per_unit * UNIT_BYTES
            last = first + UNIT_BYTES
        else:
            first = page * self.page_size // self.unit_tokens * UNIT_BYTES
            last = -(-((page + 1) * self.page_size + self.lookahead) // self.unit_tokens) * UNIT_BYTES
        units = self.units
        return units[first:last] if isinstance(units, bytes) else bytes(units[first:last])

    def common_pages(self, other: Content, start: int, end: int) -> int:
        """Return the largest r in [start, end] such that pages [start, r) are equal; earlier pages must be."""
        if self is other:
            return end
        if end > self.num_known_pages:
            end = self.num_known_pages
        if end > other.num_known_pages:
            end = other.num_known_pages
        if end <= start:
            return start
        if self._pages_per_unit:
            first = start // self._pages_per_unit
            last = -(-end // self._pages_per_unit)
        else:
            first = start * self.page_size // self.unit_tokens
            last = -(-(end * self.page_size + self.lookahead) // self.unit_tokens)
        first_byte, last_byte = first * UNIT_BYTES, last * UNIT_BYTES
        units, others = self.units, other.units
        # Compiled, a part of bytes is made without a slice object.
        mine = units[first_byte:last_byte] if isinstance(units, bytes) else bytes(units[first_byte:last_byte])
        theirs = others[first_byte:last_byte] if isinstance(others, bytes) else bytes(others[first_byte:last_byte])
        if mine == theirs:
            return end
        # Read as little-endian numbers, the lowest differing bit is in the first differing unit.
        differing = int.from_bytes(mine, "little") ^ int.from_bytes(theirs, "little")
        first_differing = first + ((differing & -differing).bit_length() - 1) // (8 * UNIT_BYTES)
        return max(start, (first_differing * self.unit_tokens - self.lookahead) // self.page_size)


NOTHING = Content(b"", num_tokens=0, page_size=1, owner=-1)
"""The content of a run without pages."""


def pack_units(ids: Iterable[int]) -> bytes:
    """Return ids in [0, 2**64) as 8 bytes each. Raise ConfigError for anything else."""
    try:
        return array("Q", ids).tobytes()
    except (OverflowError, TypeError) as error:
        raise ConfigError(f"ids must be whole numbers from 0 to 2**64 - 1 ({error})") from error
