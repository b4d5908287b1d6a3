"""The auditor finds what is damaged, rule by rule, and any event that is changed, lost or told twice.

Of whole pages, which are the parts of one full group, as of other KV groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvarts.core.events import (
    Admitted,
    ChunkComputed,
    CopiesRemoved,
    Event,
    Finished,
    LeapDone,
    PagesRemoved,
    PagesStored,
    PartsGivenBack,
    Preemption,
    StepDone,
    StepEnded,
)
from kvarts.core.kv.groups import GroupMemory, PartGroup
from kvarts.core.kv.layers import KvLayer
from kvarts.core.kv.run_cache import RunCache
from kvarts.proof.audit.auditor import AuditError, Auditor, Finding
from kvarts.proof.audit.facts import EngineRules
from kvarts.proof.audit.ledger import LedgerGroup
from kvarts.sim.replaying import replay

from builders.case import Case, Row, cases
from builders.fields import changed
from builders.grouped import FULL, WINDOW, part_groups, told_by
from builders.outcome import run_kvarts
from oracles.naive_grouped import needed_pages

STATE = PartGroup(KvLayer(kind="state", state_bytes=1), 2)
GROUPS = (PartGroup(FULL, 2), WINDOW, STATE)


WHOLE: tuple[PartGroup, ...] = ()
"""Pages that are whole."""


def audited(
    groups: Sequence[PartGroup], case: Case, keeps: str, events: Sequence[Event], *, plans_ahead: bool = False
) -> list[Finding]:
    """What the audit finds in what one engine told."""
    if not groups:
        auditor = Auditor(case.num_pages, case.page_size)
        auditor.observe(events)
        return auditor.findings
    memory = GroupMemory(tuple(groups))
    facts = tuple(
        LedgerGroup(
            group.layer.kind,  # type: ignore[arg-type]  # of layers that keep something
            group.part_bytes // memory.block_bytes,
            group.layer.span,
            group.layer.sink,
        )
        for group in groups
    )
    auditor = Auditor(
        memory.num_blocks(case.num_pages),
        case.page_size,
        groups=facts,
        keeps_all=keeps == "all",
        rules=EngineRules(plans_ahead=plans_ahead),
    )
    auditor.observe(events)
    return auditor.findings


@given(part_groups(), st.integers(1, 6), st.integers(0, 60))
def test_what_tokens_need_is_what_a_look_at_every_token_says(
    groups: tuple[PartGroup, ...], page_size: int, num_tokens: int
) -> None:
    for group in groups:
        kind: Any = group.layer.kind
        sink, others = LedgerGroup(kind, 1, group.layer.span, group.layer.sink).needed(num_tokens, page_size)
        assert not set(sink) & set(others)
        needed = set(needed_pages(group.layer, num_tokens, page_size))
        if num_tokens % page_size and not group.is_state:
            needed.add(num_tokens // page_size)  # the next token goes there
        assert {*sink, *others} == needed if kind != "full" else others == range(-(-num_tokens // page_size))


# Damaged logs, one for each rule --------------------------------------------------------------------------

PROMPT = list(range(1, 17))
LONGER = [Row(5 * turn, [*PROMPT, *range(50 * turn, 50 * turn + 6)], 22, 16, None, 0, None) for turn in range(1, 5)]
CASE = Case([Row(0, PROMPT, 16, 16, None, 0, None), *LONGER], 1, 2, 20, 16, 3, "default", 1)
"""Prompts that share their beginning, in a memory that is short: hits, preemptions, evictions, snapshots."""


def events_of(case: Case, groups: tuple[PartGroup, ...], keeps: str) -> list[Event]:
    return told_by(case, groups, keeps)[1][0].events if groups else run_kvarts(case).events[0]


@pytest.fixture(scope="module")
def told() -> dict[str, list[Event]]:
    """By what windows leave behind, and of whole pages."""
    of_groups = {keeps: events_of(CASE, GROUPS, keeps) for keeps in ("all", "tails")}
    return {**of_groups, "whole": events_of(CASE, WHOLE, "all")}


def first(events: Sequence[Event], kind: type, is_it: Callable[[Any], bool] = lambda event: True) -> int:
    return next(index for index, event in enumerate(events) if isinstance(event, kind) and is_it(event))


@pytest.mark.parametrize("keeps", ["all", "tails"])
def test_a_run_as_it_was_passes_and_has_everything(told: dict[str, list[Event]], keeps: str) -> None:
    events = told[keeps]
    assert audited(GROUPS, CASE, keeps, events) == []
    kinds = {type(event) for event in events}
    assert kinds >= {Admitted, ChunkComputed, PagesStored, PagesRemoved, PartsGivenBack, Preemption, Finished, StepDone}
    assert any(isinstance(event, PagesStored) and event.group == 2 for event in events), "a snapshot"
    assert any(isinstance(event, Admitted) and event.num_hit_pages for event in events)
    assert any(isinstance(event, PagesRemoved) and event.is_dropped for event in events) == (keeps == "tails")


def damage(events: list[Event], index: int, **fields: Any) -> list[Event]:
    return [*events[:index], changed(events[index], **fields), *events[index + 1 :]]


DAMAGES: dict[str, tuple[Callable[[list[Event]], list[Event]], str]] = {
    "a hit that is longer than a window can go on from": (
        lambda events: damage(events, hit(events), num_hit_pages=events[hit(events)].num_hit_pages + 1),  # type: ignore[union-attr]
        "was hit and is not resident in group",
    ),
    "a hit that is shorter than it might be": (
        lambda events: damage(events, hit(events), num_hit_pages=0),
        "could be hit,",
    ),
    "a group that is said to end a hit and did not": (
        lambda events: damage(events, hit(events), reach=(0, 0, 0)),
        "and the engine says (0, 0, 0)",
    ),
    "a part of a window that is given back too early": (
        lambda events: damage(events, given_back(events), end_page=events[given_back(events)].end_page + 1),  # type: ignore[union-attr]
        "a later token sees it",
    ),
    "a part of a window that is not given back": (
        lambda events: [*events[: given_back(events)], *events[given_back(events) + 1 :]],
        "the step counts",
    ),
    "a part that is evicted out of turn": (
        lambda events: damage(events, run(events), end_page=events[run(events)].end_page - 1),  # type: ignore[union-attr]
        "and it was the turn of page",
    ),
    "a part that is evicted and not told": (
        lambda events: [*events[: (at := last_gone_of_a_step(events))], *events[at + 1 :]],
        "was evicted in group",
    ),
    "a part that is evicted while it is in use": (
        lambda events: [
            *events[: (at := first(events, StepDone)) + 1],
            PagesRemoved(stored(events).content, 0, 1, group=0),
            *events[at + 1 :],
        ],
        "while it is in use",
    ),
    "a part that can be found and is not told": (
        lambda events: [*events[: last_stored(events)], *events[last_stored(events) + 1 :]],
        "was stored in group 1 (window 6) and no event says so",
    ),
    "a snapshot of a state that is not told": (
        lambda events: [*events[: snapshot(events)], *events[snapshot(events) + 1 :]],
        "was stored in group 2 (state) and no event says so",
    ),
    "a preemption for what was free": (
        lambda events: damage(events, first(events, Preemption), num_pages_asked=0),
        "that were free",
    ),
    "tokens that a preemption did not lose": (
        lambda events: damage(events, first(events, Preemption), num_computed_tokens=1),
        "lost 1 tokens; it had",
    ),
    "prompt tokens that are counted twice": (
        lambda events: damage(events, chunk(events), start=0),
        "computes tokens from 0 of",
    ),
    "a step that counts other parts": (
        lambda events: damage(events, first(events, StepDone), tiers=(1, 0, 1, 0, 1, 0)),
        "the step counts",
    ),
    "a step that counts other memory": (
        lambda events: damage(events, at := first(events, StepDone), num_used=events[at].num_used + 1),  # type: ignore[union-attr]
        "the step counts",
    ),
    "a page that does not follow the one before": (
        lambda events: damage(events, later(events), parent=None),
        "was stored after no page, which does not precede it",
    ),
    "a group that is not there": (
        lambda events: damage(events, first(events, PagesStored), group=3),
        "group 3, which is not there",
    ),
    "parts that nobody has to give back": (
        lambda events: [
            *events[: given_back(events) + 1],
            events[given_back(events)],
            *events[given_back(events) + 1 :],
        ],
        "and was not held",
    ),
}


DAMAGES_OF_WHOLE_PAGES: dict[str, str] = {
    "a hit that is longer than a window can go on from": "was hit and is not resident",
    "a hit that is shorter than it might be": "",
    "a part that is evicted out of turn": "",
    "a part that is evicted and not told": "was evicted and no event says so",
    "a part that is evicted while it is in use": "",
    "a preemption for what was free": "",
    "tokens that a preemption did not lose": "",
    "prompt tokens that are counted twice": "",
    "a step that counts other memory": "",
    "a page that does not follow the one before": "",
    "a group that is not there": "",
}
"""Those that whole pages can have, and what is said of them where that differs."""


def hit(events: Sequence[Event]) -> int:
    return first(events, Admitted, lambda event: event.num_hit_pages > 0)


def given_back(events: Sequence[Event]) -> int:
    return first(events, PartsGivenBack, lambda event: event.group == 1)


def gone(events: Sequence[Event]) -> int:
    return first(events, PagesRemoved, lambda event: not event.is_dropped and event.group < 2)


def run(events: Sequence[Event]) -> int:
    return first(events, PagesRemoved, lambda event: event.end_page - event.start_page > 1)


def last_stored(events: Sequence[Event], group: int = 1) -> int:
    """The first part of a group, by default a window's, with no other after it."""
    stored = enumerate(pairwise(events))
    return next(
        index
        for index, (event, after) in stored
        if isinstance(event, PagesStored) and event.group == group and not isinstance(after, PagesStored)
    )


NOTHING_STORED = StepDone | StepEnded | LeapDone


def last_gone_of_a_step(events: Sequence[Event]) -> int:
    """An eviction after which nothing becomes findable in its step."""
    pairs = pairwise(events)
    return next(
        index
        for index, (event, after) in enumerate(pairs)
        if isinstance(event, PagesRemoved) and not event.is_dropped and isinstance(after, NOTHING_STORED)
    )


def snapshot(events: Sequence[Event]) -> int:
    """The last part of a prompt: a prompt of whole pages has another before its last page."""
    return last_stored(events, 2)


def stored(events: Sequence[Event]) -> PagesStored:
    event = events[first(events, PagesStored)]
    assert isinstance(event, PagesStored)
    return event


def later(events: Sequence[Event]) -> int:
    return first(events, PagesStored, lambda event: event.start_page > 0)


def chunk(events: Sequence[Event]) -> int:
    return first(events, ChunkComputed, lambda event: event.start > 0)


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_found(told: dict[str, list[Event]], name: str) -> None:
    make, says = DAMAGES[name]
    findings = audited(GROUPS, CASE, "all", make(told["all"]))
    assert findings and says in str(findings[0]), [str(finding) for finding in findings[:3]]


@pytest.mark.parametrize("name", DAMAGES_OF_WHOLE_PAGES)
def test_damage_of_whole_pages_is_found(told: dict[str, list[Event]], name: str) -> None:
    make, says = DAMAGES[name]
    findings = audited(WHOLE, CASE, "all", make(told["whole"]))
    says = DAMAGES_OF_WHOLE_PAGES[name] or says
    assert findings and says in str(findings[0]), [str(finding) for finding in findings[:3]]
    assert "group" not in str(findings[0]) or name == "a group that is not there"


def test_what_is_not_kept_must_be_told(told: dict[str, list[Event]]) -> None:
    events = told["tails"]
    index = first(events, PagesRemoved, lambda event: event.is_dropped)
    findings = audited(GROUPS, CASE, "tails", [*events[:index], *events[index + 1 :]])
    assert "was dropped in group 1 (window 6) and no event says so" in str(findings[0])


@pytest.mark.parametrize("setting", [{}, {"step_by_step": True}, {"async_scheduling": True}], ids=str)
@pytest.mark.parametrize("page_size", [4, 8, 16])
@pytest.mark.parametrize(("kind", "held", "seen"), [("chunk", 32, 16), ("window", 21, 20), ("window", 40, 20)])
def test_a_part_that_a_decode_releases_late_is_found(
    kind: Any, held: int, seen: int, page_size: int, setting: dict[str, bool]
) -> None:
    """The layers of the engine see more tokens than those that the audit is told of; a chunk, one chunk more."""

    def groups_of(span: int) -> tuple[PartGroup, ...]:
        return PartGroup(FULL, 1), PartGroup(KvLayer(kind=kind, num_heads=1, head_numbers=2, span=span), 1)

    case = Case([Row(0, [1] * 7, 7, 90, None, 0, None)], 1, page_size, 200 // page_size, 16, 3, "default", 1)
    events = told_by(case, groups_of(held), "all", **setting)[1][0].events
    plans_ahead = "async_scheduling" in setting
    assert audited(groups_of(held), case, "all", events, plans_ahead=plans_ahead) == []
    findings = audited(groups_of(seen), case, "all", events, plans_ahead=plans_ahead)
    assert f"is held in group 1 ({kind} {seen}), and no later token sees it" in str(findings[0])


def test_an_engine_that_counts_other_parts_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A control: it forgets to give back what windows have passed, and says nothing of it."""
    monkeypatch.setattr(RunCache, "free_skipped_in", lambda cache, table, index, num_tokens: None)
    with pytest.raises(AuditError, match="no later token sees it"):
        replay(CASE.trace(), CASE.config(kv_groups="all", groups=GROUPS, audit=True))


# Any change -----------------------------------------------------------------------------------------------

AUDITED = (Admitted, ChunkComputed, PagesStored, PagesRemoved, CopiesRemoved, PartsGivenBack, Preemption)
NUMBERS = (
    "num_hit_pages",
    "start",
    "end",
    "start_page",
    "end_page",
    "group",
    "num_computed_tokens",
    "num_used_pages",
    "copy",
    "num_known_tokens",
)


@pytest.mark.laws
@given(cases(max_requests=12), st.just(WHOLE) | part_groups(), st.sampled_from(["all", "tails"]), st.data())
def test_any_event_that_is_changed_lost_or_told_twice_is_found(
    case: Case, groups: tuple[PartGroup, ...], keeps: str, data: st.DataObject
) -> None:
    case.profile, case.replicas = "default", 1
    case.num_pages = max(1, case.num_pages * 2 // 3)
    events = events_of(case, groups, keeps)
    assert audited(groups, case, keeps, events) == []
    places = [index for index, event in enumerate(events) if isinstance(event, AUDITED)]
    assume(places)
    index = data.draw(st.sampled_from(places))
    event = events[index]
    how = data.draw(st.sampled_from(["lost", "twice", "changed"]))
    if how == "lost":
        damaged = [*events[:index], *events[index + 1 :]]
    elif how == "twice":
        damaged = [*events[: index + 1], *events[index:]]
    else:
        names = [name for name in NUMBERS if getattr(event, name, None) is not None]
        name = data.draw(st.sampled_from(names))
        value = getattr(event, name) + data.draw(st.sampled_from([-1, 1]))
        assume(value >= 0)
        damaged = damage(list(events), index, **{name: value})
    try:
        assert audited(groups, case, keeps, damaged), event
    except (KeyError, IndexError, AssertionError) as error:
        pytest.fail(f"{how}: {error!r} of {event}")
