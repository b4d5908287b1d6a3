"""Parsers of a timeline's JSON, whole or in lines, piece by piece, in memory independent of its length.

The text is cut at commas, at any depth. Each piece, wrapped in the brackets that are open around it, must be valid
JSON; then the whole text is, and no piece is read twice. So a cut may be a guess.

JSON lines are an optional header line, one row per line, and a last line with the totals.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from kvarts.proof.verify.chunk import TOP_FIELDS, Column, brief, line_rows_of, rows_of
from kvarts.proof.verify.text import JSON_ERRORS, SPACE, Broken, Twice, any_value, check, unescaped, why_not

__all__ = ["LARGEST_PIECE_BYTES", "JsonText", "LinesText"]

LARGEST_PIECE_BYTES = 1 << 22
"""Longest text between two commas, and largest row, after long strings are shortened."""
DEEPEST = 256
MOST_KEYS = 100
"""Number of top-level keys that are kept regardless of name; later ones are kept only if in TOP_FIELDS."""
LARGEST_KEPT_BYTES = 1 << 12
SHORT_TEXT_BYTES = 1 << 16
"""A shorter text is extended, if there is more, before a cut is searched."""

QUOTE, COMMA, COLON, OPEN_ARRAY = b'",:['
_MARKS = np.zeros(256, np.bool_)
_MARKS[list(b'"{}[],:')] = True
_CHANGES = np.zeros(256, np.int64)
_CHANGES[list(b"{[")] = 1
_CHANGES[list(b"}]")] = -1
_CLOSERS = bytes.maketrans(b"{[", b"}]")
_TOP_NAMES = [name.encode() for name in TOP_FIELDS]

_string = msgspec.json.Decoder(str)


class _Marks:
    """Brackets, colons and commas of a text outside strings: their places, their codes, and the depth after each."""

    __slots__ = ("at", "codes", "depths")

    def __init__(self, at: Column, codes: Column, depths: Column) -> None:
        self.at = at
        self.codes = codes
        self.depths = depths

    def __len__(self) -> int:
        return len(self.at)

    def up_to(self, end: int) -> _Marks:
        """Return the first `end` marks."""
        return _Marks(self.at[:end], self.codes[:end], self.depths[:end])

    def first(self, where: Column) -> int | None:
        """Return the first mark where `where` is true; None without any."""
        found = int(where.argmax()) if len(where) else 0
        return found if len(where) and where[found] else None


def _marks(text: bytes, depth: int) -> _Marks:
    data = np.frombuffer(unescaped(text), np.uint8)
    at = np.flatnonzero(_MARKS[data])
    codes = data[at]
    quotes = codes == QUOTE
    outside = ~quotes & (np.cumsum(quotes, dtype=np.int32) % 2 == 0)
    at, codes = at[outside], codes[outside]
    return _Marks(at, codes, depth + np.cumsum(_CHANGES[codes]))


class JsonText:
    """One object with rows in its array `timeline`. `top` holds its other fields.

    `twice`: the TOP_FIELDS that it repeats.

    `blocks`: the text, cut anywhere outside strings. Raises the error made by `broken` if the text is not such an
    object.
    """

    def __init__(self, blocks: Iterator[bytes], broken: Broken) -> None:
        self._blocks = blocks
        self._broken = broken
        self.top: dict[str, Any] = {}
        self.twice: list[str] = []
        self.has_timeline = False
        self._text = b""
        self._opened = b""  # brackets open before the text
        self._is_first = True  # the last of them directly precedes the text
        self._num_keys = 0

    def rows(self) -> Iterator[list[Any]]:
        """Iterate over the rows in batches. At the end, the whole text has been read."""
        self._strip("is empty")
        if self._text[:1] != b"{":
            raise self._broken(self._what_else())
        self._text, self._opened = self._text[1:], b"{"
        while self._opened:
            if self._skip():
                yield from self._array()
                self._after_array()
        while True:
            if self._text.strip(SPACE):
                raise self._broken("is no JSON: something follows its end")
            self._text = b""
            if not self._more():
                break

    def _what_else(self) -> str:
        """Return the error of a text that does not begin with an object."""
        while len(self._text) < LARGEST_KEPT_BYTES and self._more():
            pass
        if len(self._text) < LARGEST_KEPT_BYTES:
            try:
                return f"must be an object, is {brief(any_value(self._text))}"
            except JSON_ERRORS as error:
                return f"is no JSON: {why_not(error)}"
        kind = {b"[": "an array", b'"': "a string"}.get(self._text[:1])
        return "is no JSON" if kind is None else f"must be an object, begins as {kind}"

    def _more(self) -> bool:
        block = next(self._blocks, b"")
        self._text += block
        return bool(block)

    def _strip(self, what: str = "is no JSON: it breaks off") -> None:
        """Read up to the next character that is not white space."""
        while not (text := self._text.lstrip(SPACE)):
            self._text = b""
            if not self._more():
                raise self._broken(what)
        self._text = text

    def _grow(self, what: str) -> None:
        """Read more text because the present one cannot be cut."""
        if len(self._text) > LARGEST_PIECE_BYTES:
            raise self._broken(f"has {what} of more than {LARGEST_PIECE_BYTES} bytes")
        if not self._more():
            raise self._broken("is no JSON: it breaks off")

    def _check_depth(self, marks: _Marks) -> None:
        if len(marks) and int(marks.depths.max()) > DEEPEST:
            raise self._broken("is no JSON: it is nested too deeply")

    # Around the rows --------------------------------------------------------------------------------------

    def _skip(self) -> bool:
        """Check the next piece outside the rows; return whether it ends where the rows begin."""
        while True:
            marks = _marks(self._text, len(self._opened))
            end = marks.first(marks.depths == 0)
            if end is not None:
                marks = marks.up_to(end + 1)
            self._check_depth(marks)
            names = self._names(marks)
            begin = self._timeline_begins(marks, names)
            if begin is not None:
                self._take(marks.up_to(begin + 1), names, b"{[")
                return True
            if end is not None:
                self._take(marks, names, b"")
                return False
            commas = np.flatnonzero(marks.codes == COMMA)
            if len(commas):
                cut = int(commas[-1]) + 1
                self._take(marks.up_to(cut), names, _still_open(self._opened, marks.up_to(cut)))
                return False
            self._grow("a value")

    def _names(self, marks: _Marks) -> dict[int, str]:
        """Return the relevant top-level keys, by the mark of the colon after each."""
        text = self._text
        if self._num_keys >= MOST_KEYS and b"\\" not in text and not any(name in text for name in _TOP_NAMES):
            return {}
        names: dict[int, str] = {}
        for colon in np.flatnonzero((marks.codes == COLON) & (marks.depths == 1)).tolist():
            begin = int(marks.at[colon - 1]) + 1 if colon else 0
            try:
                name = _string.decode(text[begin : int(marks.at[colon])])
            except JSON_ERRORS:
                continue  # the check of the piece will report the error
            if name in TOP_FIELDS or self._num_keys + len(names) < MOST_KEYS:
                names[colon] = name
        return names

    def _timeline_begins(self, marks: _Marks, names: dict[int, str]) -> int | None:
        """Return the mark that opens the array of rows; None if none does."""
        for colon, name in names.items():
            if name == "timeline" and colon + 1 < len(marks) and marks.codes[colon + 1] == OPEN_ARRAY:
                return colon + 1
        return None

    def _take(self, marks: _Marks, names: dict[int, str], opened: bytes) -> None:
        """Check the text up to the last of `marks`, keep its top-level fields, and continue after it."""
        end = int(marks.at[-1]) + 1
        has_comma = marks.codes[-1] == COMMA
        piece = self._text[: end - 1 if has_comma else end]
        # Errors that the brackets added around a piece would hide.
        if not self._is_first and piece.lstrip(SPACE)[:1] in (b"", b"}", b"]"):
            raise self._broken("is no JSON: nothing follows a comma")
        if has_comma and piece.rstrip(SPACE)[-1:] in (b"", b"{", b"["):
            raise self._broken("is no JSON: nothing stands before a comma")
        closers = opened[::-1].translate(_CLOSERS)
        try:
            check(_openers(self._opened) + piece + closers)
        except JSON_ERRORS as error:
            raise self._broken(f"is no JSON: {why_not(error)}") from error
        stops = np.flatnonzero((marks.depths < 1) | ((marks.codes == COMMA) & (marks.depths == 1)))
        begins_rows = opened == b"{[" and not has_comma
        for colon, name in names.items():
            if colon >= len(marks):
                break
            self._num_keys += 1
            if name == "timeline":
                if self.has_timeline or name in self.top:
                    raise self._broken("has two timelines")
                if begins_rows and colon == len(marks) - 2:
                    self.has_timeline = True
                    continue
            elif name in TOP_FIELDS and name in self.top and name not in self.twice:
                self.twice.append(name)
            place = int(np.searchsorted(stops, colon))
            stop = int(marks.at[stops[place]]) if place < len(stops) else end
            self.top[name] = _small_value(piece[int(marks.at[colon]) + 1 : stop])
        self._text, self._opened, self._is_first = self._text[end:], opened, False

    def _after_array(self) -> None:
        """Continue after the end of the rows."""
        self._strip()
        mark, self._text, self._opened = self._text[:1], self._text[1:], b"{"
        if mark == b"}":
            self._opened = b""
        elif mark != b",":
            raise self._broken("is no JSON: no comma follows its rows")

    # Rows -------------------------------------------------------------------------------------------------

    def _array(self) -> Iterator[list[Any]]:
        """Iterate over the elements of the array at the beginning of the text, up to its end."""
        self._strip()
        if self._text[:1] == b"]":
            self._text = self._text[1:]
            return
        has_ended = False
        while not has_ended:
            self._strip()
            if self._text[:1] in b"],":
                raise self._broken("is no JSON: nothing stands before or after a comma")
            rows, has_ended = self._piece()
            yield rows

    def _piece(self) -> tuple[list[Any], bool]:
        """Return rows from the beginning of the text, at least one, and whether the array ended after them."""
        if len(self._text) < SHORT_TEXT_BYTES:
            self._more()
        guess = self._text.rfind(b"},") + 1
        if guess:
            try:
                rows = rows_of(self._text[:guess])
            except JSON_ERRORS:
                pass  # the comma is not between rows
            else:
                self._text = self._text[guess + 1 :]
                return rows, False
        while True:
            marks = _marks(self._text, 0)
            end = marks.first(marks.depths < 0)
            if end is not None:
                break
            self._check_depth(marks)
            commas = np.flatnonzero((marks.codes == COMMA) & (marks.depths == 0))
            if len(commas):
                break
            self._grow("a row")
        cut = int(marks.at[end if end is not None else commas[-1]])
        text, after = self._text[:cut], self._text[cut : cut + 1]
        try:
            rows = rows_of(text)
        except JSON_ERRORS as error:
            raise self._broken(f"is no JSON: {why_not(error)}") from error
        if after == b"}":
            raise self._broken("is no JSON: its rows end in a brace")
        self._text = self._text[cut + 1 :]
        return rows, after == b"]"


def _still_open(opened: bytes, marks: _Marks) -> bytes:
    """Return the brackets open after `marks`, given those `opened` before."""
    lowest_after = np.minimum.accumulate(marks.depths[::-1])[::-1]
    stay = (_CHANGES[marks.codes] == 1) & (marks.depths <= lowest_after)
    return opened[: int(lowest_after[0])] + bytes(marks.codes[stay])


def _openers(opened: bytes) -> bytes:
    """Return a text that leaves these brackets open at a place where an element may follow."""
    around = opened[:-1].replace(b"{", b'{"":')
    return around + opened[-1:]


def _small_value(text: bytes) -> Any:
    """Return a value; an empty value of its type if it is large or continues in another piece."""
    text = text.strip(SPACE)
    if len(text) <= LARGEST_KEPT_BYTES:
        try:
            return any_value(text)
        except JSON_ERRORS:
            pass
    return {} if text[:1] == b"{" else []


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
