"""Texts of others on a terminal: names, ids and answers may hold escape sequences, which a terminal would obey."""

from __future__ import annotations

from typing import Final

__all__ = ["plain"]

_ESCAPES: Final = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def plain(text: str) -> str:
    r"""Return `text` with its control characters, but for newlines and tabs, spelled as in `\x1b`."""
    return text if text.isprintable() else text.translate(_ESCAPES)
