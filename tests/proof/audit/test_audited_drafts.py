"""The auditor follows drafts by their events: what does not add up is found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from kvarts.core.config import EngineConfig
from kvarts.core.engine import Engine
from kvarts.core.event_log import EventLog
from kvarts.core.events import DraftJudged, DraftTaken, Event
from kvarts.core.kv.groups import GroupMemory, PartGroup
from kvarts.proof.audit.auditor import AuditError, Auditor, Finding
from kvarts.proof.audit.ledger import LedgerGroup

from builders.case import Case, Row
from builders.engines import engine_with
from builders.guesser import Guesser, Knowing
from builders.live_groups import FULL, LiveRun, window, with_outputs
from builders.serving import Arrival, make_request
from builders.toy_model import ToyExecutor

CONFIG = EngineConfig(num_pages=30, page_size=2, max_num_batched_tokens=16, max_num_seqs=3)
Change = Callable[[Event], Event | None]


class Tampered:
    """Hands events on to an auditor, changed."""

    wants_details = True

    def __init__(self, change: Change) -> None:
        self.auditor = Auditor(CONFIG.num_pages, CONFIG.page_size, account=lambda: self.engine.scheduler.cache)
        self.engine: Any = None
        self._change = change

    def observe(self, events: Sequence[Event]) -> None:
        self.auditor.observe([changed for event in events if (changed := self._change(event)) is not None])


def run(change: Change = lambda event: event, plant: Callable[[Engine], None] = lambda engine: None) -> list[Finding]:
    """Three requests with drafts, half of them wrong; what the audit says."""
    reader = Tampered(change)
    guesser = Guesser(4, wrong=0.5, most=5)
    executor = ToyExecutor(CONFIG.num_pages, CONFIG.page_size, CONFIG.max_num_seqs)
    engine = engine_with(CONFIG, executor, log=EventLog((reader,)), drafter=guesser)
    reader.engine = engine
    plant(engine)
    for index in range(3):
        engine.submit(make_request(index, Arrival(0, [1, 2, 3, index], 12, 0, None), CONFIG.page_size), 0)
    try:
        while engine.has_work:
            engine.step(0)
    except AuditError as error:
        return list(error.findings)
    assert any(0 < right < guessed for _, guessed, right in guesser.judged)
    return []


def test_an_engine_in_order_passes() -> None:
    assert run() == []


def test_a_page_of_a_rejected_token_that_does_not_go_back_is_found() -> None:
    def plant(engine: Engine) -> None:
        cache = engine.scheduler.cache

        class Keeping(type(cache)):  # type: ignore[misc]
            __slots__ = ()

            def shrink(self, *args: Any) -> None:
                pass

        cache.__class__ = Keeping

    findings = run(plant=plant)
    assert "the engine counts" in findings[0].what


@pytest.mark.parametrize("kind", [DraftTaken, DraftJudged])
def test_a_lost_event_is_found(kind: type[Event]) -> None:
    assert run(lambda event: None if isinstance(event, kind) else event)


@pytest.mark.parametrize("more", [-1, 1])
def test_tokens_that_were_not_accepted_as_told_are_found(more: int) -> None:
    def change(event: Event) -> Event | None:
        if isinstance(event, DraftJudged) and 0 < event.num_accepted < event.num_drafted:
            return msgspec.structs.replace(event, num_accepted=event.num_accepted + more)
        return event

    assert run(change)


def test_a_draft_that_begins_elsewhere_is_found() -> None:
    def change(event: Event) -> Event | None:
        return DraftTaken(event.request, event.start + 1, event.end) if isinstance(event, DraftTaken) else event

    findings = run(change)
    assert "drafts tokens" in findings[0].what


# With KV groups -------------------------------------------------------------------------------------------


class Everything:
    """Keeps every event."""

    wants_details = True

    def __init__(self) -> None:
        self.events: list[Event] = []

    def observe(self, events: Sequence[Event]) -> None:
        self.events += events


def events_of_groups() -> list[Event]:
    """What an engine with a full group and a window tells of requests with drafts, half of them wrong."""
    rows = [Row(0, [1, 2, 3, index], 4, 12, None, 0, None) for index in range(3)]
    case = Case(rows, 1, 2, 30, 16, 3, "default", 1)
    drafter, kept = Knowing(4, 0.4, 5), Everything()
    live = LiveRun(
        with_outputs(case.naive_requests()), MEMORY, CONFIG, MEMORY.num_blocks(30), drafter=drafter, readers=[kept]
    )
    drafter.tokens = live.tokens
    live.run()
    assert 0 < drafter.num_accepted < drafter.num_drafted
    return kept.events


MEMORY = GroupMemory((PartGroup(FULL, 1), PartGroup(window(5), 2)))
GROUPS = (LedgerGroup("full", 1, None, 0), LedgerGroup("window", 2, 5, 0))


def audited_with_groups(change: Change) -> list[Finding]:
    """What the audit says of these events, changed."""
    auditor = Auditor(MEMORY.num_blocks(30), CONFIG.page_size, groups=GROUPS)
    auditor.observe([changed for event in events_of_groups() if (changed := change(event)) is not None])
    return auditor.findings


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        (lambda event: event, None),
        (lambda event: None if isinstance(event, DraftJudged) else event, "was not judged"),
        (lambda event: None if isinstance(event, DraftTaken) else event, "tokens, and 0 were drafted"),
        (
            lambda event: (
                msgspec.structs.replace(event, start=event.start + 1, end=event.end + 1)
                if isinstance(event, DraftTaken)
                else event
            ),
            "drafts tokens",
        ),
        (
            lambda event: (
                msgspec.structs.replace(event, num_accepted=event.num_drafted)
                if isinstance(event, DraftJudged)
                else event
            ),
            "",
        ),
    ],
)
def test_drafts_with_kv_groups_are_followed(change: Change, finding: str | None) -> None:
    findings = audited_with_groups(change)
    assert bool(findings) is (finding is not None)
    assert not findings or any(finding in str(one) for one in findings if finding is not None)
