"""The live page of a server: a history of each model, and what its memory holds now."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from math import isnan
from time import monotonic
from urllib.parse import parse_qs

import msgspec

from kvarts.base.columns import percentile_rank
from kvarts.base.tenants import Owner
from kvarts.doors.openai.answer import Choice
from kvarts.doors.openai.errors import ApiError
from kvarts.doors.openai.generation import Exchange
from kvarts.doors.openai.meter import BucketCounts
from kvarts.doors.openai.served import Models, Served
from kvarts.run.llm_engine import EngineDeadError
from kvarts.sim.report.page import (
    EVERY_S,
    LiveEngine,
    LiveHistory,
    LiveHolder,
    LiveMemory,
    LiveRow,
    live_headers,
    live_page,
)

__all__ = ["Live", "middle_and_tail_ms"]

MOST_HOLDERS = 64
FRESH_S = 0.25
"""Requests for the data within this time share what was read from the engine."""
TOTALS = (
    ("running", "num_running"), ("waiting", "num_waiting"), ("prompt tokens", "num_prompt_tokens"),
    ("hit tokens", "num_hit_tokens"), ("generated", "num_generated_tokens"), ("preemptions", "num_preemptions"),
    ("steps", "num_steps"), ("refused", "num_refused"),
)  # fmt: skip


class _Counted:
    """Counters at the end of a row."""

    def __init__(self, served: Served) -> None:
        meter = served.meter
        self.prompt_tokens, self.hit_tokens = meter.num_prompt_tokens, meter.num_hit_tokens
        self.tokens, self.preemptions = meter.num_generated_tokens, meter.num_preemptions
        self.first, self.next = list(meter.first_token_s.counts), list(meter.next_token_s.counts)


class _Look(msgspec.Struct, frozen=True):
    """The values read from an engine between two steps. `held`: each request under way with its owner."""

    at_s: float
    memories: list[LiveMemory]
    held: list[tuple[str, LiveHolder]]
    totals: dict[str, int]


class _Model:
    """Owner of the history of one model."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.history = LiveHistory()
        self._counted = _Counted(served)
        self._look: _Look | None = None
        self._looking: asyncio.Task[_Look] | None = None

    def add_row(self) -> None:
        """Add a row for the time since the last one."""
        served, before = self.served, self._counted
        self._counted = now = _Counted(served)
        scheduler = served.host.core.scheduler
        self.history.add(
            LiveRow(
                self.history.now_s,
                scheduler.cache.num_used,
                scheduler.cache.num_cached,
                scheduler.running.num_running,
                scheduler.num_waiting,
                now.prompt_tokens - before.prompt_tokens,
                now.hit_tokens - before.hit_tokens,
                now.tokens - before.tokens,
                now.preemptions - before.preemptions,
                middle_and_tail_ms(served.meter.first_token_s, before.first, now.first),
                middle_and_tail_ms(served.meter.next_token_s, before.next, now.next),
            )
        )

    async def look(self) -> _Look:
        """Return the state of the engine, at most FRESH_S old. Raise EngineDeadError."""
        if self._look is not None and monotonic() - self._look.at_s < FRESH_S:
            return self._look
        if self._looking is None or self._looking.done():
            self._looking = asyncio.ensure_future(self._read())
        self._look = await asyncio.shield(self._looking)
        return self._look

    async def _read(self) -> _Look:
        served = self.served
        choices = served.live_choices()
        return await served.between_steps(lambda _: _looked_at(served, choices))


def _looked_at(served: Served, choices: Sequence[Choice]) -> _Look:
    """Read the engine, in its thread."""
    core, meter = served.host.core, served.meter
    scheduler = core.scheduler
    cache, running = scheduler.cache, scheduler.running
    page_size = served.host.config.page_size
    unit = "pages" if served.host.memory is None else "blocks"
    memories = [
        LiveMemory(name="device", unit=unit, total=cache.pool.total, used=cache.num_used, cached=cache.num_cached,
                   reserved=cache.num_reserved)
    ]  # fmt: skip
    if core.tiers is not None:
        counts = core.tiers.num_pages()
        for place, name in enumerate(core.tiers.tier_names):
            used, cached = counts[2 * place : 2 * place + 2]
            memories.append(LiveMemory(name=name, unit=unit, used=used, cached=cached))
    held = []
    for choice in choices:
        request = choice.request
        if request is None or request.is_over:
            continue
        has_pages = request.admission >= 0 and request.table is not None
        pages = running.num_pages_of(request) if has_pages else 0
        holder = LiveHolder(
            name=request.request_id or str(request.index),
            owner=choice.owner,
            state=request.state.name.lower(),
            pages=pages,
            shared=min(pages, request.hit_tokens // page_size) if has_pages else 0,
            prompt_tokens=request.num_prompt_tokens,
            tokens=choice.num_tokens,
        )
        held.append((choice.owner, holder))
    held.sort(key=lambda each: each[1].pages, reverse=True)
    values = {"num_running": running.num_running, "num_waiting": scheduler.num_waiting}
    totals = {name: values[field] if field in values else getattr(meter, field) for name, field in TOTALS}
    totals["evicted"] = cache.num_evicted
    return _Look(monotonic(), memories, held, totals)


class Live:
    """The routes of the live page. Owner of the histories."""

    def __init__(self, models: Models) -> None:
        self._models = [_Model(served) for served in models]
        self._running: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Start the histories, in the running event loop."""
        self._running = asyncio.ensure_future(self._run())

    def close(self) -> None:
        """Stop them."""
        if self._running is not None:
            self._running.cancel()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            for model in self._models:
                model.add_row()

    async def page(self, exchange: Exchange) -> None:
        """Answer GET /."""
        await exchange.response.whole(
            live_page(),
            content_type=b"text/html; charset=utf-8",
            headers=[*live_headers()],
        )

    async def data(self, exchange: Exchange) -> None:
        """Answer GET /live: each model at this moment, with the rows of its history after `since`."""
        since = parse_qs(exchange.request.query).get("since", ["-1"])[0]
        try:
            since_s = float(since)
            if isnan(since_s):
                raise ValueError("nan is not a time")
        except ValueError:
            raise ApiError(400, "must be a number of seconds", param="since") from None
        engines = [await self._engine(model, exchange.owner, since_s) for model in self._models]
        payload = await exchange.work(lambda: msgspec.json.encode(engines), num_bytes=0)
        await exchange.response.whole(payload)

    async def _engine(self, model: _Model, owner: Owner, since_s: float) -> LiveEngine:
        served = model.served
        try:
            look = await model.look()
        except EngineDeadError:
            look = _Look(0.0, [LiveMemory(name="device", total=served.host.core.scheduler.cache.pool.total)], [], {})
        seen = [holder for name, holder in look.held if owner.is_admin or name == owner.name]
        listed = seen[:MOST_HOLDERS]
        return LiveEngine(
            name=served.names[0],
            health=served.told_health,
            memories=look.memories,
            page_size=served.host.config.page_size,
            holders=listed,
            others=len(look.held) - len(listed),
            other_pages=sum(holder.pages for _, holder in look.held) - sum(holder.pages for holder in listed),
            totals=look.totals,
            now_s=model.history.now_s,
            rows=model.history.since(since_s),
        )


def middle_and_tail_ms(of: BucketCounts, before: Sequence[int], now: Sequence[int]) -> tuple[float, float] | None:
    """Return the median and the 99th percentile of what was counted between, by upper bounds of buckets."""
    counts = [later - earlier for earlier, later in zip(before, now, strict=True)]
    total = sum(counts)
    if not total:
        return None
    found = []
    for percent in (50, 99):
        place = bisect_right(list(accumulate(counts)), percentile_rank(percent, total))
        found.append(round(1e3 * of.bounds[min(place, len(of.bounds) - 1)], 2))
    return found[0], found[1]
