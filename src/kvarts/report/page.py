"""A page of HTML that needs nothing else: a template, and what goes in where it has a mark."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import msgspec

__all__ = ["fill_page"]


def fill_page(template: str, parts: Mapping[str, str], data: Any) -> bytes:
    """Return `template` with `parts`, the charts and `data`, as JSON, in place of their marks.

    Everything that is not ours enters as data, never as markup.
    """
    assets = files("kvarts.report") / "assets"
    # In a script element, only the end of one has a meaning.
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
