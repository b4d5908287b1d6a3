"""Pages of HTML: self-contained ones, filled from a template, and the live page of an engine with its data."""

from __future__ import annotations

from base64 import b64encode
from collections import deque
from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import sha256
from html import escape
from importlib.resources import files
from time import monotonic
from typing import Any, Literal

import msgspec

__all__ = [
    "LineChart",
    "LiveEngine",
    "LiveHistory",
    "LiveHolder",
    "LiveMemory",
    "LiveRow",
    "fill_page",
    "live_headers",
    "live_page",
    "render_lines",
    "table_html",
]

EVERY_S = 1.0
MOST_ROWS = 600
"""Rows of the history: ten minutes."""


def fill_page(template: str, parts: Mapping[str, str], data: Any) -> bytes:
    """Return `template` with `parts`, the chart library and `data` as JSON in place of their marks.

    Everything that is not ours enters as data, never as markup.
    """
    assets = files("kvarts.sim.report") / "assets"
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


class LineChart(msgspec.Struct):
    """Lines over the values `at`. `x`, `y`: title and unit of an axis, whose range is near the values or from 0."""

    name: str
    x: tuple[str, str]
    y: tuple[str, str]
    at: Sequence[float]
    is_near: bool = False
    lines: list[dict[str, Any]] = []

    def add(
        self,
        label: str,
        colour: str,
        values: Sequence[float | None],
        style: Literal["line", "dashes", "dots", "rings"] = "line",
    ) -> None:
        """Add a line, drawn over those before. None: no value."""
        self.lines.append({"label": label, "colour": colour, "values": values, "style": style})


def render_lines(
    title: str, subtitle: str, heads: Sequence[str], rows: Sequence[Sequence[str]], charts: Sequence[LineChart]
) -> bytes:
    """Return a page with a table and charts."""
    assets = files("kvarts.sim.report") / "assets"
    template, script = ((assets / name).read_text(encoding="utf-8") for name in ("lines.html", "lines.js"))
    data = {"title": title, "subtitle": subtitle, "heads": heads, "rows": rows, "charts": charts}
    return fill_page(template, {"lines.js": script}, data)


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


class LiveRow(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One second of an engine; None for what is not known. Tokens and preemptions are those of the second.

    `t_s`: seconds since the start of the history. `used`, `cached`: blocks of the device. `first_ms`, `next_ms`: time
    to first token and inter-token latency, the median and the 99th percentile, or the mean twice.
    """

    t_s: float
    used: int | None = None
    cached: int | None = None
    running: int | None = None
    waiting: int | None = None
    prompt_tokens: int | None = None
    hit_tokens: int | None = None
    tokens: int | None = None
    preemptions: int | None = None
    first_ms: tuple[float, float] | None = None
    next_ms: tuple[float, float] | None = None


class LiveHistory:
    """The rows of the last ten minutes of one engine."""

    def __init__(self) -> None:
        self._rows: deque[LiveRow] = deque(maxlen=MOST_ROWS)
        self._start_s = monotonic()

    @property
    def now_s(self) -> float:
        """Seconds since the start."""
        return round(monotonic() - self._start_s, 3)

    def add(self, row: LiveRow) -> None:
        """Add a row, which is later than all before."""
        self._rows.append(row)

    def since(self, t_s: float) -> list[LiveRow]:
        """Return the rows after `t_s`."""
        return [row for row in self._rows.copy() if row.t_s > t_s]


class LiveMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of one memory. `total`: None if unknown. `reserved`: used by sessions while no request runs."""

    name: str
    unit: str = "pages"
    total: int | None = None
    used: int = 0
    cached: int = 0
    reserved: int = 0


class LiveHolder(msgspec.Struct, frozen=True, kw_only=True):
    """A request. `pages`: that it holds, `shared` of them found in the cache. `tokens`: generated so far."""

    name: str
    owner: str = ""
    state: str
    pages: int = 0
    shared: int = 0
    prompt_tokens: int = 0
    tokens: int = 0


class LiveEngine(msgspec.Struct, frozen=True, kw_only=True):
    """An engine at this moment. `memories`: the device first. `others`: requests that are not listed.

    `rows`: of its history. `notes`: sentences about it. `now_s`: as `t_s` of a row.
    """

    name: str
    health: str
    memories: list[LiveMemory]
    page_size: int | None = None
    holders: list[LiveHolder] = []
    others: int = 0
    other_pages: int = 0
    totals: dict[str, int] = {}
    notes: list[str] = []
    now_s: float = 0.0
    rows: list[LiveRow] = []


@cache
def live_page() -> bytes:
    """Return the page."""
    assets = files("kvarts.sim.report") / "assets"
    page = (assets / "live.html").read_text(encoding="utf-8")
    for name in ("live.css", "live.js"):
        page = page.replace(f"/*{{{name}}}*/", (assets / name).read_text(encoding="utf-8"))
    return page.encode()


@cache
def live_headers() -> tuple[tuple[bytes, bytes], ...]:
    """Return headers for the page: it runs its own script, and talks to its own server, and to no other."""
    assets = files("kvarts.sim.report") / "assets"
    script, style = (
        b"'sha256-%b'" % b64encode(sha256((assets / name).read_bytes()).digest()) for name in ("live.js", "live.css")
    )
    policy = (
        b"default-src 'none'; script-src %b; style-src %b; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        b"frame-ancestors 'none'" % (script, style)
    )
    return (
        (b"content-security-policy", policy),
        (b"x-content-type-options", b"nosniff"),
        (b"referrer-policy", b"no-referrer"),
        (b"cache-control", b"no-store"),
    )
