"""A self-contained page of HTML: a template whose marks are replaced by scripts, styles and data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

import msgspec

__all__ = ["fill_page", "table_html"]


def fill_page(template: str, parts: Mapping[str, str], data: Any) -> bytes:
    """Return `template` with `parts`, the chart library and `data` as JSON in place of their marks.

    Everything that is not ours enters as data, never as markup.
    """
    assets = files("kvarts.report") / "assets"
    # In a script element, only its end tag is special.
    text = msgspec.json.encode(data).decode().replace("<", "\\u003c")
    shared = {
        "uplot.css": (assets / "uPlot.min.css").read_text(encoding="utf-8"),
        "report.css": (assets / "report.css").read_text(encoding="utf-8"),
        "uplot.js": (assets / "uPlot.iife.min.js").read_text(encoding="utf-8"),
        "charts.js": (assets / "charts.js").read_text(encoding="utf-8"),
    }
    page = template
    for name, part in {**shared, **parts, "data": text}.items():
        before, mark, after = page.partition(f"/*{{{name}}}*/")
        assert mark, f"the page has no place for {name}"
        page = before + part + after
    return page.encode()


def table_html(title: str, paragraphs: Sequence[str], heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table with a title and paragraphs as HTML: the rich display of a value in notebooks.

    A head that begins with > marks a column of numbers. Without `heads`, the first cell of each row is its name.
    """
    styles = ["text-align: right" if head.startswith(">") else "text-align: left" for head in heads] or []
    lines = [f"<h4>{escape(title)}</h4>", *(f"<p>{escape(text)}</p>" for text in paragraphs if text), "<table>"]
    if heads:
        cells = (
            f'<th style="{style}">{escape(head.lstrip(">"))}</th>' for style, head in zip(styles, heads, strict=True)
        )
        lines.append(f"<thead><tr>{''.join(cells)}</tr></thead>")
    lines.append("<tbody>")
    for row in rows:
        shown = styles or ["text-align: left"] * len(row)
        cells = (f'<td style="{style}">{escape(cell)}</td>' for style, cell in zip(shown, row, strict=True))
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return "\n".join([*lines, "</tbody>", "</table>"])
