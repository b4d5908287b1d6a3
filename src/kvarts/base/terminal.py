"""Texts of others on a terminal: names, ids and answers may hold escape sequences, which a terminal would obey."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["in_line", "plain", "shortened"]

_DIRECTIONS: Final = (0x61C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))
"""Line separators, and marks after which text is shown in another order than it is written in."""
_ESCAPES: Final = {
    **{code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"},
    **{code: f"\\u{code:04x}" for code in _DIRECTIONS},
}
_LONG: Final = re.compile(r"\S{600,}|[^\n]{3000,}")
_BEGIN_CHARS, _END_CHARS = 300, 100
_IN_LINE: Final = {**_ESCAPES, ord("\n"): "\\n", ord("\t"): "\\t"}


def plain(text: str) -> str:
    r"""Return `text` with its control characters, but for newlines and tabs, spelled as in `\x1b`.

    So are marks that change the direction of text.
    """
    return text if text.isprintable() else text.translate(_ESCAPES)


def in_line(text: str) -> str:
    r"""Return `text` as `plain` does, with newlines and tabs spelled too, so that a name stays in its line."""
    return text if text.isprintable() else text.translate(_IN_LINE)


def shortened(text: str) -> str:
    """Return `text` with the middle of words of 600 characters or more, and of lines of 3,000, left out."""
    return _LONG.sub(_without_middle, text)


def _without_middle(found: re.Match[str]) -> str:
    text = found[0]
    num_left_out = len(text) - _BEGIN_CHARS - _END_CHARS
    return f"{text[:_BEGIN_CHARS]}...({num_left_out:,} characters)...{text[-_END_CHARS:]}"
