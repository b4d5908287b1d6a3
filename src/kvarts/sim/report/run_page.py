"""Views of a run: a self-contained page of HTML with the data that it shows, and a few lines for a terminal.

Only steps in which a count changes or a request is preempted are kept: a row holds until the next one, so the page
draws the same. A run with millions of such steps is thinned to MOST_ROWS, and the page states so.

The page holds every step: columns packed in base64, drawn by uPlot (MIT licence, in `assets/`), which thins them to the
available pixels. All values of the run enter the page as data, never as markup.
"""

from __future__ import annotations

import shlex
import zlib
from base64 import b64encode
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvarts.base.columns import Column
from kvarts.base.errors import InputError
from kvarts.proof.verify.chunk import RowChunk, is_count
from kvarts.proof.verify.reader import open_recording
from kvarts.sim.report.page import fill_page
from kvarts.sim.report.requests import of_prompts
from kvarts.sim.report.run_directory import About, RequestRow, RunDirectory
from kvarts.sim.report.words import LATENCIES, count, duration, facts, memory_unit, wrapped

__all__ = [
    "ShownOverview",
    "ShownTokens",
    "ShownWait",
    "columns_of",
    "page_data",
    "render_html",
    "render_text",
    "sparkline",
]

MAX_POINTS = 1000
MOST_ROWS = 200_000
"""Rows of all timelines of a page together; each takes three or four bytes of the page."""
TEXT_WIDTH = 60
"""Characters of a sparkline."""
NUM_STRETCHES = 200
"""Number of equal stretches of a run, for charts over time of values that are not known per step."""
MARKS = ("p50", "p90", "p99")
NO_JOURNAL = "Not recorded: the run has no journal of events."
NOT_READ = "Not shown: the journal of events was not read."
COLOURS = {
    "device_hit": "green",
    "host_hit": "teal",
    "disk_hit": "sky",
    "never_seen": "grey",
    "evicted": "red",
    "alignment": "orange",
    "not_kept": "blue",
    "recomputed": "violet",
    "not_computed": "line",
}
OF_TIERS = ("teal", "sky")
"""The colours of hits in tiers that are neither host memory nor files, in turn."""
LABELS = {
    "device_hit": "hit on the device",
    "host_hit": "hit in host memory",
    "disk_hit": "hit in files",
    "never_seen": "never seen before",
    "evicted": "seen, but evicted",
    "alignment": "lost to page alignment",
    "not_kept": "seen, but not kept by a window or a state",
    "recomputed": "recomputed after preemption",
    "not_computed": "never computed: the request ended before",
}
TIERS = {"host": "host memory", "disk": "files", "store": "a shared store"}
COUNTS = {"used": "used_blocks", "cached": "cached_blocks", "running": "active_seqs", "waiting": "waiting"}
"""Columns of a timeline, by their names on the page."""
SPARKS = "▁▂▃▄▅▆▇█"


class ShownTokens(msgspec.Struct, frozen=True):
    """Prompt tokens of one kind: hit on the device, never seen, evicted and so on. `remark`: may be empty."""

    kind: str
    tokens: int
    remark: str = ""


class ShownWait(msgspec.Struct, frozen=True):
    """A request that waited long to be admitted. `num_others` waited with it for the same cause. `lines`: its story."""

    request: str
    waited_ms: float
    cause: str
    num_others: int
    lines: list[str]


class ShownOverview(msgspec.Struct, frozen=True):
    """Reasons for hits and misses of prompt tokens and for waits of requests, of all replicas together.

    `waits`: the longest, the longest first; no two with the same story. `evictions`: the end of each stretch of time,
    in ms, and the pages evicted in it. `notes`: remarks on journals that break off.
    """

    prompt_tokens: int
    kinds: list[ShownTokens]
    waits: list[ShownWait]
    evictions: list[tuple[float, int]]
    notes: list[str]


def page_data(run: RunDirectory, overviews: Mapping[Path, ShownOverview | None]) -> dict[str, Any]:
    """Return the data of the page of a run, or of each model of a run; `overviews` by the path of each.

    Raise InputError for files that cannot be read.
    """
    runs = run.runs()
    has_models = runs != [run]
    title = ", ".join(each.path.name for each in runs) if has_models else run.summary.trace or run.path.name
    num_requests = sum(each.summary.num_requests or 0 for each in runs)
    num_steps = sum(each.summary.num_steps or 0 for each in runs)
    models = f"{len(runs)} models, " if has_models else ""
    num_timelines = sum(len(each.timelines()) for each in runs)
    most_rows = MOST_ROWS // max(1, num_timelines)
    return {
        "title": f"Replay of {title}",
        "subtitle": f"{models}{count(num_requests)} requests in {count(num_steps)} steps",
        "source": "Made by kvarts; charts by uPlot (MIT licence).",
        "advice": f"{runs[0].summary.advice}." if len(runs) == 1 and runs[0].summary.advice else "",
        "about": _about(runs[0].about()),
        "parts": [
            {
                "name": each.path.name if has_models else "",
                "facts": [("trace", each.summary.trace or "-"), *facts(each.summary)]
                if has_models
                else [fact for fact in facts(each.summary) if fact[0] != "try next"],  # it is shown above them
                "config": _flat(each.summary.config),
                **_part(each, overviews.get(each.path), most_rows),
            }
            for each in runs
        ],
    }


def _about(about: About) -> list[tuple[str, str]]:
    out = []
    if about.kvarts is not None:
        out.append(("version", f"kvarts {about.kvarts}"))
    if about.command is not None:
        out.append(("command", shlex.join(about.command)))
    return out


def _flat(config: Mapping[str, Any], before: str = "") -> list[tuple[str, str]]:
    """Return settings by name; those of nested tables are dotted."""
    out = []
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            out += _flat(value, f"{before}{name}.")
        elif value is not None:
            out.append((before + name, f"{value:,}" if is_count(value) else str(value)))
    return out


def _part(run: RunDirectory, overview: ShownOverview | None, most_rows: int) -> dict[str, Any]:
    config = run.summary.config
    pages, replicas = config.get("pages"), config.get("replicas", 1)
    pool = pages * replicas if is_count(pages) and is_count(replicas) else 0
    num_distinct = run.summary.distinct_pages
    requests = run.requests()
    is_unknown = run.summary.prefix_hit_ratio is None and bool(run.summary.num_input_tokens)
    return {
        "unit": memory_unit(run.summary),
        "replicas": [_replica(number, columns_of(path), most_rows) for number, path in run.timelines()],
        "curves": _curves(run, requests),
        "hit_rates": [] if is_unknown else _hit_rates(requests),
        "unknown_hits": "Unknown: the trace does not identify prefixes that prompts share." if is_unknown else None,
        "evictions": None if overview is None else list(overview.evictions),
        "hits": None if overview is None else _hits(overview),
        "distinct": {"pages": num_distinct, "pool": pool} if num_distinct and pool else None,
        "waits": None if overview is None else _waits(overview),
        "has_admitted": any(row.first_admitted_ms is not None for row in requests),
        "notes": [] if overview is None else list(overview.notes),
        "no_journal": NOT_READ if overview is None and run.journals() else NO_JOURNAL,
    }


def columns_of(path: Path) -> dict[str, Any]:
    """Return columns of a timeline, and its `total_blocks` and `block_size_tokens`."""
    recording = open_recording(path)
    chunks = [chunk for chunk in recording.chunks() if len(chunk.rows)]
    names = chunks[0].columns if chunks else ()
    columns: dict[str, Any] = {name: np.concatenate([chunk.columns[name] for chunk in chunks]) for name in names}
    columns.update(_of_tiers(recording.top, chunks))
    for name in ("total_blocks", "block_size_tokens"):
        value = recording.top.get(name)
        if not is_count(value) or value < 1:
            raise InputError(f"does not state its {name}", path=path)
        columns[name] = value
    if not chunks:
        columns.update({name: np.zeros(0) for name in ("t_ms", "used_pct")})
    if (np.diff(columns["t_ms"]) < 0).any():
        raise InputError("has times that go back", path=path, field="t_ms", hint="kvarts verify names the rows.")
    return columns


def _of_tiers(top: Mapping[str, Any], chunks: Sequence[RowChunk]) -> dict[str, Any]:
    """Return the columns of tiers that rows list, by the names of the tiers; empty without a list."""
    listed = top.get("tiers")
    if not isinstance(listed, list):
        return {}
    tiers = [str(tier.get("name")) for tier in listed if isinstance(tier, Mapping)]
    found: dict[str, Any] = {"tiers": tiers}
    for what in ("used", "cached"):
        rows = [numbers or () for chunk in chunks for numbers in chunk.parts[f"tier_{what}_blocks"]]
        for place, tier in enumerate(tiers):
            numbers = (each[place] if place < len(each) else -1 for each in rows)
            found[f"{tier}_{what}_blocks"] = np.fromiter(numbers, np.int64, len(rows))
    return found


def _replica(number: int, columns: dict[str, Any], most_rows: int) -> dict[str, Any]:
    nothing = np.zeros(len(columns["t_ms"]), np.int64)
    # A missing value is -1 in a timeline, and 0 here.
    shown = {name: np.maximum(columns.get(field, nothing), 0) for name, field in COUNTS.items()}
    tiers = []
    for tier in dict.fromkeys((*TIERS, *columns.get("tiers", ()))):
        used = columns.get(f"{tier}_used_blocks", nothing)
        if (used > 0).any() or (columns.get(f"{tier}_cached_blocks", nothing) > 0).any():
            shown[f"{tier}_used"] = np.maximum(used, 0)
            shown[f"{tier}_cached"] = np.maximum(columns[f"{tier}_cached_blocks"], 0)
            tiers.append({"name": TIERS.get(tier, tier), "used": f"{tier}_used", "cached": f"{tier}_cached"})
    preempting = columns.get("preempted_seqs", nothing) > 0
    changes = _changes(list(shown.values()), preempting)
    rows = _thinned(changes, [shown["used"], shown["waiting"]], most_rows)
    packed = {name: _packed(values[rows]) for name, values in shown.items()}
    return {
        "number": number,
        "total_blocks": columns["total_blocks"],
        "block_size_tokens": columns["block_size_tokens"],
        "t_us": _packed(np.rint(columns["t_ms"][rows] * 1e3)),
        **{name: packed[name] for name in COUNTS},
        "preempting": _packed(np.flatnonzero(preempting[rows])),
        "num_preempting": int(preempting.sum()),
        "tiers": [{**tier, "used": packed[tier["used"]], "cached": packed[tier["cached"]]} for tier in tiers],
        "left_out": len(changes) - len(rows),
    }


def _changes(columns: Sequence[Column], preempting: Column) -> Column:
    """Return the rows in which any of `columns` changes or a request is preempted, with the first and the last row."""
    changes = preempting.copy()
    changes[:1] = changes[-1:] = True
    for values in columns:
        changes[1:] |= values[1:] != values[:-1]
    return np.flatnonzero(changes)


def _thinned(rows: Column, columns: Sequence[Column], most: int) -> Column:
    """Return at most `most` of `rows`: of many stretches, the first row and those where `columns` are largest."""
    if len(rows) <= most:
        return rows
    stretches = np.array_split(rows, most // (1 + len(columns)))
    kept = [rows[-1:], np.array([stretch[0] for stretch in stretches])]
    kept += [np.array([stretch[values[stretch].argmax()] for stretch in stretches]) for values in columns]
    return np.unique(np.concatenate(kept))[-most:]


def _packed(values: Column) -> str:
    """Return whole numbers as differences of 64-bit floats, deflated, in base64."""
    steps = np.diff(np.asarray(values, "<f8"), prepend=0.0)
    return b64encode(zlib.compress(steps.tobytes())).decode()


def _curves(run: RunDirectory, requests: list[RequestRow]) -> list[dict[str, Any]]:
    """Return the cumulative distribution of each latency, and its percentiles as given in the report."""
    histogram = run.distributions().itl_ms
    slo = run.summary.config.get("slo")
    slo = slo if isinstance(slo, dict) else {}
    out = []
    for name, field in LATENCIES.items():
        if field == "itl_ms":
            counts = np.cumsum(np.array(histogram.counts, np.float64))
            below = counts / max(1.0, counts[-1]) if len(counts) else counts
            points = _points(np.array(histogram.upper_ms, np.float64), below)
        else:
            ordered = np.sort(
                np.array([ms for row in requests if (ms := _latency(row, field)) is not None], np.float64)
            )
            at = np.unique(np.linspace(0, len(ordered) - 1, min(MAX_POINTS, len(ordered))).round().astype(np.int64))
            points = _points(ordered[at], (at + 1) / max(1, len(ordered)))
        spread = getattr(run.summary, field)
        values = [] if spread is None else [(p, getattr(spread, p), float(p[1:]) / 100) for p in MARKS]
        marks = [(f"{p} {duration(ms)}", max(ms, 1e-3), share) for p, ms, share in values if ms is not None]
        out.append({"name": name, **points, "marks": marks, "slo_ms": slo.get(field)})
    return out


def _latency(row: RequestRow, field: str) -> float | None:
    if field == "tpot_ms":
        if row.first_token_ms is None or row.last_token_ms is None or row.output_tokens < 2:
            return None
        return (row.last_token_ms - row.first_token_ms) / (row.output_tokens - 1)
    ends = {"ttft_ms": row.first_token_ms, "e2e_ms": row.last_token_ms, "queue_ms": row.first_admitted_ms}
    end = ends[field]
    return None if end is None else end - row.arrival_ms


def _points(ms: Column, share: Column) -> dict[str, list[float]]:
    """Return points for a logarithmic axis, which lacks 0."""
    return {"ms": np.maximum(ms, 1e-3).tolist(), "share": share.tolist()}


def _hit_rates(requests: list[RequestRow]) -> list[tuple[float, float]]:
    """Return the end of each stretch of time, in ms, and the hit ratio of prompt tokens admitted in it."""
    admitted = [row for row in requests if row.first_admitted_ms is not None]
    times = np.array([row.first_admitted_ms for row in admitted], np.float64)
    end_ms = float(times.max(initial=0.0))
    if end_ms <= 0:
        return []
    at = np.minimum(times / end_ms * NUM_STRETCHES, NUM_STRETCHES - 1).astype(np.int64)
    input_tokens = np.array([row.input_tokens for row in admitted], np.float64)
    cached_tokens = np.array([row.cached_tokens for row in admitted], np.float64)
    hits, tokens = (
        np.bincount(at, weights=each, minlength=NUM_STRETCHES)
        for each in (of_prompts(cached_tokens, input_tokens), input_tokens)
    )
    filled = np.flatnonzero(tokens)
    return [(end_ms * (index + 1) / NUM_STRETCHES, float(hits[index] / tokens[index])) for index in filled.tolist()]


def _hits(overview: ShownOverview) -> dict[str, Any]:
    others = [one.kind for one in overview.kinds if one.kind not in LABELS]
    labels = {kind: f"hit in {kind.removesuffix('_hit')}" for kind in others}
    colours = {kind: OF_TIERS[place % len(OF_TIERS)] for place, kind in enumerate(others)}
    parts = [
        [(LABELS | labels)[one.kind], one.tokens, (COLOURS | colours)[one.kind], one.remark] for one in overview.kinds
    ]
    return {"prompt_tokens": overview.prompt_tokens, "parts": parts}


def _waits(overview: ShownOverview) -> list[dict[str, Any]]:
    out = []
    for wait in overview.waits:
        if not wait.waited_ms:
            continue
        others = f"; {wait.num_others:,} more waited with it for the same" if wait.num_others else ""
        what = f"waited {duration(wait.waited_ms)} for {wait.cause}{others}"
        out.append({"name": f"request {wait.request}", "waited": what, "lines": wait.lines})
    return out


def render_html(run: RunDirectory, overviews: Mapping[Path, ShownOverview | None] | None = None) -> bytes:
    """Return the whole page. `overviews`: the overview of each of `run.runs()`, by its path.

    Raise InputError for files that cannot be read.
    """
    assets = files("kvarts.sim.report") / "assets"
    template = (assets / "report.html").read_text(encoding="utf-8")
    script = (assets / "report.js").read_text(encoding="utf-8")
    return fill_page(template, {"report.js": script}, page_data(run, overviews or {}))


def render_text(run: RunDirectory) -> str:
    """Return, for each model, a sparkline of KV use of each replica and a short table, ending in a line end."""
    runs = run.runs()
    texts = [_run_text(each, title=None if each is run else each.path.name) for each in runs]
    return "\n".join(texts)


def _run_text(run: RunDirectory, *, title: str | None) -> str:
    trace = run.summary.trace or run.path.name
    lines = [trace if title is None else f"{title}: {trace}"]
    timelines = run.timelines()
    for number, path in timelines:
        columns = columns_of(path)
        name = f"KV use r{number}" if len(timelines) > 1 else "KV use"
        lines.append(f"{name:<14}{sparkline(columns['t_ms'], columns['used_pct'], TEXT_WIDTH)}")
    for name, value in facts(run.summary):
        lines += wrapped(value, f"{name:<14}", " " * 14)
    return "\n".join(lines) + "\n"


def sparkline(times: Column, shares: Column, width: int) -> str:
    """Return, as characters, the maximum of `shares` (in [0, 1]) in each of `width` equal stretches of time.

    A stretch without rows repeats the level before it.
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
