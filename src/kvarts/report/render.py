"""Shows a run: a page of HTML that needs nothing else, and a few lines for a terminal.

The page holds every step: columns packed in base64, drawn by uPlot (MIT licence, in `assets/`), which thins them to the
pixels there are. Everything the run says enters the page as data, never as markup.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from importlib.resources import files
from typing import Any, Protocol

import numpy as np

from kvarts.columns import Column
from kvarts.errors import InputError
from kvarts.report.page import fill_page
from kvarts.report.run_directory import RunDirectory
from kvarts.verify.reader import open_recording

__all__ = ["Overview", "TokenKind", "Wait", "render_html", "render_text", "sparkline"]

MAX_POINTS = 1000
SPARKS = "▁▂▃▄▅▆▇█"
NO_JOURNAL = "Not recorded: the run has no journal of events."
NOT_READ = "Not shown: the journal of events was not read."
COLOURS = {
    "device_hit": "green",
    "host_hit": "green",
    "disk_hit": "green",
    "never_seen": "grey",
    "evicted": "red",
    "alignment": "orange",
    "recomputed": "violet",
    "not_computed": "line",
}
LABELS = {
    "device_hit": "hit on the device",
    "host_hit": "hit in host memory",
    "disk_hit": "hit in files",
    "never_seen": "never seen before",
    "evicted": "seen, but evicted",
    "alignment": "lost to page alignment",
    "recomputed": "recomputed after preemption",
    "not_computed": "never computed: the request ended before",
}


class TokenKind(Protocol):
    """Prompt tokens of one kind: hit on the device, never seen, evicted and so on."""

    @property
    def kind(self) -> str:
        """Its name."""

    @property
    def tokens(self) -> int:
        """How many."""

    @property
    def remark(self) -> str:
        """What else is to be said of them; empty for nothing."""


class Wait(Protocol):
    """A request that waited long to be admitted."""

    @property
    def request(self) -> str:
        """Its id."""

    @property
    def waited_ms(self) -> float:
        """How long."""

    @property
    def lines(self) -> list[str]:
        """Its story."""


class Overview(Protocol):
    """Why prompt tokens were found or not, and why requests waited: of all replicas together."""

    @property
    def prompt_tokens(self) -> int:
        """All of them."""

    @property
    def kinds(self) -> Sequence[TokenKind]:
        """The prompt tokens by kind."""

    @property
    def waits(self) -> Sequence[Wait]:
        """The longest, the longest first."""


def render_html(run: RunDirectory, overview: Overview | None = None) -> bytes:
    """Return the whole page, with `overview` where there is one. Raise InputError for files that cannot be read."""
    assets = files("kvarts.report") / "assets"
    template = (assets / "report.html").read_text(encoding="utf-8")
    script = (assets / "report.js").read_text(encoding="utf-8")
    return fill_page(template, {"report.js": script}, _page_data(run, overview))


def render_text(run: RunDirectory, *, width: int = 60) -> str:
    """Return a sparkline of KV use for each replica and a short table, with a line end."""
    lines = [f"{run.report.get('trace', run.path.name)}"]
    timelines = run.timelines()
    for number, path in timelines:
        columns = _columns(path)
        name = f"KV use r{number}" if len(timelines) > 1 else "KV use"
        lines.append(f"{name:<14}{sparkline(columns['t_ms'], columns['used_pct'], width)}")
    lines += [f"{name:<14}{value}" for name, value in _facts(run)]
    return "\n".join(lines) + "\n"


def sparkline(times: Column, shares: Column, width: int) -> str:
    """Return the largest of `shares`, in [0, 1], in each of `width` equal stretches of time, as characters.

    Where nothing was recorded, it is as before.
    """
    if not len(times):
        return ""
    span = float(times[-1] - times[0]) or 1.0
    at = np.minimum(((times - times[0]) / span * width).astype(np.int64), width - 1)
    highest = np.full(width, -1.0)
    np.maximum.at(highest, at, shares)
    line = ""
    level = 0
    for value in highest.tolist():
        if value >= 0:
            level = min(round(value * (len(SPARKS) - 1)), len(SPARKS) - 1)
        line += SPARKS[level]
    return line


def _page_data(run: RunDirectory, overview: Overview | None) -> dict[str, Any]:
    report = run.report
    config = report.get("config") or {}
    pool = (config.get("pages") or 0) * (config.get("replicas") or 1)
    working_set = report.get("working_set_pages")
    return {
        "title": str(report.get("trace", run.path.name)),
        "subtitle": f"{_count(report.get('num_requests'))} requests in {_count(report.get('num_steps'))} steps",
        "source": "Made by kvarts; charts by uPlot (MIT licence).",
        "facts": _facts(run),
        "replicas": [_replica(number, _columns(path)) for number, path in run.timelines()],
        "distributions": _distributions(run),
        "hits": None if overview is None else _hits(overview),
        "working_set": {"pages": working_set, "pool": pool} if working_set and pool else None,
        "waits": None if overview is None else _waits(overview),
        "no_journal": NOT_READ if overview is None and run.journals() else NO_JOURNAL,
    }


def _columns(path: Any) -> dict[str, Any]:
    """Return columns of a timeline, and under `total_blocks` and `block_size_tokens` what it says of the whole."""
    recording = open_recording(path)
    chunks = list(recording.chunks())
    names = chunks[0].columns if chunks else ()
    columns: dict[str, Any] = {name: np.concatenate([chunk.columns[name] for chunk in chunks]) for name in names}
    for name in ("total_blocks", "block_size_tokens"):
        value = recording.top.get(name)
        if not isinstance(value, int):
            raise InputError(f"does not say its {name}", path=path)
        columns[name] = value
    if not chunks:
        columns.update({name: np.zeros(0) for name in ("t_ms", "used_pct")})
    return columns


def _replica(number: int, columns: dict[str, Any]) -> dict[str, Any]:
    names = {"used": "used_blocks", "cached": "cached_blocks", "running": "active_seqs", "waiting": "waiting"}
    nothing = np.zeros(0, np.int64)
    out: dict[str, Any] = {
        "number": number,
        "total_blocks": columns["total_blocks"],
        "block_size_tokens": columns["block_size_tokens"],
        "t_s": _packed(columns["t_ms"] / 1e3, "f8"),
        "preempting": _packed(np.flatnonzero(columns.get("preempted_seqs", nothing)), "i4"),
    }
    for name, field in names.items():
        # What a timeline does not say is -1 there, and nothing here.
        out[name] = _packed(np.maximum(columns.get(field, nothing), 0), "i4")
    return out


def _packed(values: Column, dtype: str) -> dict[str, str]:
    return {"type": dtype, "base64": b64encode(np.ascontiguousarray(values, f"<{dtype}").tobytes()).decode()}


def _distributions(run: RunDirectory) -> list[dict[str, Any]]:
    started = [row for row in run.requests() if row.get("first_token_ms") is not None]
    ttft = [row["first_token_ms"] - row["arrival_ms"] for row in started]
    ordered = np.sort(np.array(ttft, np.float64))
    at = np.unique(np.linspace(0, len(ordered) - 1, min(MAX_POINTS, len(ordered))).round().astype(np.int64))
    out = [{"name": "TTFT", **_points(ordered[at], (at + 1) / max(1, len(ordered)))}]
    histogram = run.distributions().get("itl_ms") or {"upper_ms": [], "counts": []}
    counts = np.cumsum(np.array(histogram["counts"], np.float64))
    total = counts[-1] if len(counts) else 1.0
    out.append({"name": "ITL", **_points(np.array(histogram["upper_ms"], np.float64), counts / total)})
    return out


def _points(ms: Column, share: Column) -> dict[str, list[float]]:
    """Return points for a logarithmic axis, which has no 0."""
    return {"ms": np.maximum(ms, 1e-3).tolist(), "share": share.tolist()}


def _hits(overview: Overview) -> dict[str, Any]:
    parts = [
        [LABELS.get(one.kind, one.kind), one.tokens, COLOURS.get(one.kind, "line"), one.remark]
        for one in overview.kinds
    ]
    return {"prompt_tokens": overview.prompt_tokens, "parts": parts}


def _waits(overview: Overview) -> list[dict[str, Any]]:
    return [
        {"name": f"request {wait.request}", "waited": f"{wait.waited_ms / 1e3:,.3f} s", "lines": wait.lines}
        for wait in overview.waits
    ]


def _facts(run: RunDirectory) -> list[tuple[str, str]]:
    report = run.report
    facts = [
        ("requests", f"{_count(report.get('num_completed'))} completed, {_count(report.get('num_rejected'))} rejected"),
    ]
    for name in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms"):
        values = report.get(name)
        if isinstance(values, dict) and values.get("p50") is not None:
            both = f"p50 {values['p50']:,.1f} ms, p99 {values['p99']:,.1f} ms"
            facts.append((name.removesuffix("_ms").upper(), both))
    facts += [
        (
            "KV blocks",
            f"peak {_percent(report.get('peak_used_pct'))} used, mean {_percent(report.get('mean_used_pct'))}",
        ),
        ("prefix hits", f"{_percent(report.get('prefix_hit_ratio'))} of prompt tokens"),
        ("preempted", f"{_count(report.get('num_preemptions'))} times"),
    ]
    limited_by = report.get("limited_by")
    if isinstance(limited_by, dict):
        facts.append(("limited by", str(limited_by.get("cause", "-")).replace("_", " ")))
    return facts


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else "-"


def _percent(value: Any) -> str:
    return f"{value * 100:.1f} %" if isinstance(value, int | float) else "-"
