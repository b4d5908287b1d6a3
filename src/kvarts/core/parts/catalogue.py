"""All parts, in the order of their hooks, and the order of gates. A part is imported by the engines that have it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import gcd
from typing import TYPE_CHECKING, Final, NamedTuple, cast

from kvarts.base.errors import ConfigError
from kvarts.base.limits import MOST_COUNT
from kvarts.core.config import BatchRules, EngineConfig
from kvarts.core.kv.cache import Cache
from kvarts.core.sched.plan import Batch
from kvarts.core.sched.step import Acts, Gate, Hooks

if TYPE_CHECKING:
    from kvarts.core.kv.group_pages import GroupPages
    from kvarts.core.kv.groups import GroupMemory
    from kvarts.core.parts.chunk_ends import AlignedChunks
    from kvarts.core.parts.combines import Refusal
    from kvarts.core.sched.drafts import Drafter
    from kvarts.core.sched.foreseen_drafts import Speculation
    from kvarts.core.sched.handoffs import Handoffs
    from kvarts.core.sched.loads import Loads
    from kvarts.core.sched.scheduler import Scheduler
    from kvarts.core.tiers.hicache import HostMemory

__all__ = ["GATES", "PARTS", "Opening", "Part", "compose"]

GATES: Final = (
    "seats",
    "handoffs",
    "find",
    "cadence",
    "states",
    "kept states",
    "chunk ends",
    "drafts",
    "memory",
    "latency",
    "loads",
)
"""The order in which gates judge the head of the queue. `find` and `memory` are those of every engine; the first waits
for tokens and matches the head, and a part may put its own in their places."""


class Opening(NamedTuple):
    """One scheduler, and what was made or asked for around it. None where the engine does not have it.

    `num_kept`: blocks that an admission leaves free if a request runs. `step_ns`: the expected
    duration of a step. `num_draft_slots`: the most tokens of a draft, if drafts come before prompts.
    `speculation`: drafts in virtual time. `batches`: the rules of steps of prompts or of decodes. `host`: host memory
    below their cache.
    """

    scheduler: Scheduler
    config: EngineConfig
    loads: Loads | None = None
    handoffs: Handoffs | None = None
    drafter: Drafter | None = None
    num_draft_slots: int = 0
    speculation: Speculation | None = None
    step_ns: Callable[[Batch], int] | None = None
    num_kept: int = 0
    batches: BatchRules | None = None
    host: HostMemory | None = None


class Part(NamedTuple):
    """What only some engines do. `summary`: a clause for people. `settings`: the names of settings that ask for it.

    `features`: its rows in the table of combinations, where users can ask for it by name. `open`: returns where it acts
    in the steps of a scheduler, or None if nothing asks for it.
    """

    name: str
    summary: str
    open: Callable[[Opening], Acts | None]
    settings: tuple[str, ...] = ()
    features: tuple[str, ...] = ()

    @property
    def places(self) -> tuple[str, ...]:
        """The places where it exists, as keys of PLACES; empty where no feature names it."""
        from kvarts.core.parts.combines import FEATURES

        names: dict[str, None] = {}
        for feature in self.features:
            names.update(dict.fromkeys(FEATURES[feature].places))
        return tuple(names)

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        """What it does not combine with, and why."""
        from kvarts.core.parts.combines import REFUSED

        return tuple(refusal for refusal in REFUSED if any(feature in refusal.together for feature in self.features))


def compose(opening: Opening) -> Hooks:
    """Return the gates and hooks of a scheduler with every part that was asked for."""
    memory = opening.scheduler.memory
    of_parts: dict[str, Gate] = {}
    acts: list[Acts] = []
    for part in PARTS:
        of_part = part.open(opening)
        if of_part is not None:
            acts.append(of_part)
            of_parts.update(of_part.get("gates", {}))
    if not of_parts and opening.scheduler.pages.is_alone:
        return Hooks([memory.admit], acts)
    gates = {"find": memory.find, "memory": memory.fits, **of_parts}
    return Hooks([gates[name] for name in GATES if name in gates], acts)


def _open_rows(opening: Opening) -> Acts | None:
    session_pages, wheel = opening.scheduler.session_pages, opening.scheduler.wheel
    return None if opening.scheduler.running.batch is None else Acts(turns=partial(session_pages.take_turns, wheel))


def _open_states(opening: Opening) -> Acts | None:
    cache = opening.scheduler.cache
    if not cache.states.defers:
        return None
    from kvarts.core.parts.chunk_ends import StatesOfSteps

    return StatesOfSteps(cache).acts()


def _open_handoffs(opening: Opening) -> Acts | None:
    if opening.handoffs is None:
        return None
    opening.scheduler.handoffs = opening.handoffs
    opening.handoffs.connect(opening.scheduler)
    return opening.handoffs.acts()


def _open_ahead(opening: Opening) -> Acts | None:
    scheduler = opening.scheduler
    if not scheduler.running.lag:
        return None
    from kvarts.core.parts.ahead import PlansAhead

    scheduler.ahead = PlansAhead(scheduler)
    return scheduler.ahead.acts()


def _open_settling(opening: Opening) -> Acts | None:
    scheduler, loads = opening.scheduler, opening.loads
    cache = scheduler.cache
    if not cache.frees_skipped or opening.num_draft_slots or opening.speculation is not None:
        return None
    from kvarts.core.parts.settling import Settling

    # Else others take and release parts between steps, and may use what decodes release.
    waits = cache.releases and scheduler.pages.is_alone and (loads is None or loads.settles_ends)
    places = _settle_places(cast("GroupPages", cache).memory, opening.config.page_size)
    if not opening.handoffs:
        scheduler.leaps.note_places(places)
    scheduler.settling = Settling(scheduler, places, waits=waits, handoffs=opening.handoffs, drafts=scheduler.drafts)
    return scheduler.settling.acts()


def _open_times(opening: Opening) -> Acts | None:
    cache = opening.scheduler.cache
    if not cache.keeps_time:
        return None
    return Acts(before=lambda step: cache.set_time(step.now_ns), ending=cache.set_time)


def _open_drafts(opening: Opening) -> Acts | None:
    scheduler = opening.scheduler
    if opening.speculation is not None:
        from kvarts.core.sched.foreseen_drafts import ForeseenDrafts

        foreseen = ForeseenDrafts(scheduler, opening.speculation)
        scheduler.draft_totals = foreseen.totals
        return foreseen.acts()
    if opening.drafter is None:
        return None
    from kvarts.core.sched.drafts import Drafts

    scheduler.drafts = Drafts(scheduler, opening.drafter, opening.num_draft_slots)
    scheduler.draft_totals = scheduler.drafts.totals
    return scheduler.drafts.acts()


def _open_chunk_ends(opening: Opening) -> Acts | None:
    scheduler, loads = opening.scheduler, opening.loads
    aligned = _aligned(opening.config, scheduler.cache)
    if aligned is None:
        return None
    from kvarts.core.parts.chunk_ends import ChunkEnds

    scheduler.prefill.align(aligned)
    may_be_empty = loads is not None and loads.begins_anywhere
    return ChunkEnds(aligned, scheduler.cache, scheduler.running, may_be_empty=may_be_empty).acts()


def _open_latency(opening: Opening) -> Acts | None:
    config, scheduler = opening.config, opening.scheduler
    if config.max_itl_ms is None:
        return None
    if opening.step_ns is None:
        raise ConfigError("needs an engine of its own, with a cost of steps", field="max_itl_ms", hint="Leave it out.")
    from kvarts.core.parts.latency import ItlBound

    most_ns = round(config.max_itl_ms * 1e6)
    itl = ItlBound(
        most_ns, opening.step_ns, scheduler.wheel, page_size=config.page_size, pool_tokens=config.pool_tokens
    )
    scheduler.prefill.bound(itl)
    return itl.acts()


def _open_tiers(opening: Opening) -> Acts | None:
    if opening.loads is None:
        return None
    from kvarts.core.parts.tiers import LoadAdmissions

    aligned = _aligned(opening.config, opening.scheduler.cache)
    return LoadAdmissions(opening.scheduler, opening.loads, aligned, opening.num_kept).acts()


def _open_turns(opening: Opening) -> Acts | None:
    threshold = opening.config.long_prefill_token_threshold
    is_periodic = opening.config.prefill_schedule_interval > 1
    if not (threshold or is_periodic or opening.scheduler.cache.states.aligns):
        return None
    from kvarts.core.parts.turns import TurnsAfterChunks

    return TurnsAfterChunks(opening.scheduler, threshold, orders=opening.speculation is None).acts()


def _open_cadence(opening: Opening) -> Acts | None:
    interval = opening.config.prefill_schedule_interval
    if interval == 1:
        return None
    from kvarts.core.parts.cadence import PrefillCadence

    return PrefillCadence(opening.scheduler, interval).acts()


def _open_batches(opening: Opening) -> Acts | None:
    if opening.batches is None:
        return None
    if opening.host is not None:
        from kvarts.core.parts.hicache import BatchesOverHost, BatchesOverStorage

        kind = BatchesOverHost if opening.host.storage is None else BatchesOverStorage
        return kind(opening.scheduler, opening.batches, opening.host).acts()
    if opening.batches.window:
        from kvarts.core.parts.windows import BatchesWithWindows

        return BatchesWithWindows(opening.scheduler, opening.batches).acts()
    if opening.batches.slots:
        from kvarts.core.parts.states import BatchesWithStates

        return BatchesWithStates(opening.scheduler, opening.batches).acts()
    if opening.batches.preempts:
        from kvarts.core.parts.priorities import BatchesByPriority

        return BatchesByPriority(opening.scheduler, opening.batches).acts()
    from kvarts.core.parts.batches import Batches

    return Batches(opening.scheduler, opening.batches).acts()


PARTS: Final = (
    Part("rows", "tokens, rows and page ids for an executor that computes", _open_rows),
    Part("states", "states that are kept by page", _open_states, features=("states_by_page",)),
    Part(
        "handoffs",
        "requests whose prompt one engine computes and that another continues",
        _open_handoffs,
        settings=("pools",),
        features=("pools",),
    ),
    Part(
        "ahead",
        "plans that are made while the step before runs",
        _open_ahead,
        settings=("async_scheduling",),
        features=("ahead",),
    ),
    Part(
        "drafts",
        "guessed tokens after those of decodes, or before prompts",
        _open_drafts,
        features=("speculation", "first_drafts", "started_drafts"),
    ),
    Part(
        "settling",
        "releases of windows and chunks",
        _open_settling,
        settings=("kv_groups",),
        features=("kv_groups",),
    ),
    Part(
        "times",
        "eviction orders that use times",
        _open_times,
        settings=("eviction",),
        features=("orders",),
    ),
    Part(
        "chunk ends",
        "chunks of prompts that end at pages",
        _open_chunk_ends,
        settings=("kv_groups",),
        features=("states_by_page",),
    ),
    Part(
        "latency",
        "a bound on inter-token latency",
        _open_latency,
        settings=("max_itl_ms",),
        features=("bound",),
    ),
    Part(
        "loads",
        "pages from tiers below the device",
        _open_tiers,
        settings=("offload",),
        features=("tiers", "layers", "async_loads", "sync_loads"),
    ),
    Part(
        "turns",
        "several prompts at a time, and turns of decodes after them",
        _open_turns,
        settings=("long_prefill_token_threshold",),
    ),
    Part(
        "cadence",
        "prompts every few steps only",
        _open_cadence,
        settings=("prefill_schedule_interval",),
        features=("cadence",),
    ),
    Part(
        "batches",
        "steps of prompts or of decodes",
        _open_batches,
        settings=("engine",),
        features=("batches",),
    ),
)
"""In the order in which their hooks are called."""


def _aligned(config: EngineConfig, cache: Cache) -> AlignedChunks | None:
    """Return the rule of chunks that end at pages, if `cache` keeps states only there."""
    if not cache.states.aligns:
        return None
    from kvarts.core.parts.chunk_ends import AlignedChunks

    most_tokens = min(config.max_num_batched_tokens, config.long_prefill_token_threshold or MOST_COUNT)
    states = cache.states
    return AlignedChunks(config.page_size, most_tokens, saves_inside=states.saves_inside, drops_last=states.drops_last)


def _settle_places(memory: GroupMemory, page_size: int) -> tuple[int, ...]:
    """Return the offsets in a page at which a token no longer needs a page that the previous token needed."""
    places: set[int] = set()
    for group in memory.groups:
        span = group.layer.span or 1
        if group.layer.kind == "window" or group.has_states_by_page:
            places.add((span - 1) % page_size)
        elif group.layer.kind == "chunk":
            places.update(range(0, page_size, gcd(span, page_size)))
    return tuple(sorted(places))
