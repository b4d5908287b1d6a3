"""Parser of JSON lines: an optional header line, one row per line, and a last line with the totals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvarts.verify.chunk import TOP_FIELDS, line_rows_of
from kvarts.verify.json_text import LARGEST_PIECE_BYTES
from kvarts.verify.text import SPACE, Broken
from kvarts.verify.values import JSON_ERRORS, Twice, any_value, check, why_not

__all__ = ["LinesText"]


class LinesText:
    """JSON lines; the last one may break off. `top` holds the fields of the header and of the totals.

    `twice`: fields repeated in one of them, or different in both. Raises the error made by `broken` for a line that is
    not JSON.
    """

    def __init__(self, blocks: Iterator[bytes], broken: Broken) -> None:
        self._blocks = blocks
        self._broken = broken
        self.top: dict[str, Any] = {}
        self.twice: list[str] = []
        self.broken_line: int | None = None
        """The number, from 1, of a last line that breaks off."""
        self._num_lines = 0  # consumed so far, including empty ones
        self._is_first = True

    def rows(self) -> Iterator[list[Any]]:
        """Iterate over the rows in batches."""
        held: list[bytes] = []  # the last line that is not empty, and the empty lines after it
        rest = b""
        for block in self._blocks:
            text = rest + block
            cut = text.rfind(b"\n") + 1
            rest = text[cut:]
            if len(rest) > LARGEST_PIECE_BYTES:
                number = self._num_lines + len(held) + text.count(b"\n") + 1
                raise self._broken(f"has more than {LARGEST_PIECE_BYTES} bytes in a line", line=number)
            if not cut:
                continue
            lines = held + text[:cut].split(b"\n")[:-1]
            last = next((place for place in range(len(lines) - 1, -1, -1) if lines[place].strip(SPACE)), None)
            if last is None:
                self._num_lines += len(lines)
                held = []
                continue
            held = lines[last:]
            yield self._rows(lines[:last])
        if rest.strip(SPACE):
            try:
                check(rest)
                yield self._rows(held)
                held = [rest]
            except JSON_ERRORS:
                self.broken_line = self._num_lines + len(held) + 1
        if held:
            totals = self._of_the_whole(held[0])
            yield self._rows(held[1:] if totals else held)

    def _rows(self, lines: list[bytes]) -> list[Any]:
        """Return the rows in `lines`; the first line of the file may be the header."""
        number = self._num_lines + 1
        self._num_lines += len(lines)
        if self._is_first:
            for place, line in enumerate(lines):
                if line.strip(SPACE):
                    self._is_first = False
                    if self._of_the_whole(line):
                        lines, number = lines[place + 1 :], number + place + 1
                    break
        try:
            return line_rows_of([line for line in lines if line.strip(SPACE)])
        except JSON_ERRORS as error:
            for place, line in enumerate(lines):
                self._check(line.strip(SPACE) or b"0", number + place)
            raise self._broken(f"is no JSON: {why_not(error)}", line=number) from error

    def _check(self, line: bytes, number: int) -> None:
        try:
            check(line)
        except JSON_ERRORS as error:
            raise self._broken(f"is no JSON: {why_not(error)}", line=number) from error

    def _of_the_whole(self, line: bytes) -> bool:
        """Keep the fields of a line that is not a row; return False if it is one."""
        try:
            value = any_value(line)
        except JSON_ERRORS:
            return False
        if not isinstance(value, dict) or "step" in value:
            return False
        twice = value.names if isinstance(value, Twice) else []
        twice = twice + [name for name, said in value.items() if name in self.top and self.top[name] != said]
        self.twice += sorted(set(twice) & TOP_FIELDS)
        self.top.update(value)
        return True
