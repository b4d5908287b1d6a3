"""What every reader of events promises. A subclass brings the reader, and tells what it has read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from kvarts.core.event_log import EventLog, EventReader
from kvarts.core.events import Event, StepDone
from kvarts.sim.arrivals import Arrivals
from kvarts.sim.driver import Driver
from kvarts.sim.router import RoundRobin

from builders.case import Case, Row
from builders.engines import make_replica

__all__ = ["NUM_PAGES", "PAGE_SIZE", "EventReaderContract", "batches_of_a_run"]

NUM_PAGES, PAGE_SIZE = 23, 2


class Unheard(msgspec.Struct, frozen=True, gc=False):
    """An event that no reader knows."""

    number: int


class Batches:
    """A reader that keeps events as they are handed out: the events of a step together."""

    def __init__(self) -> None:
        self.batches: list[list[Event]] = []

    def observe(self, events: Sequence[Event]) -> None:
        self.batches.append(list(events))


def batches_of_a_run(*, step_by_step: bool = False) -> list[list[Event]]:
    """The events of a run with hits, evictions and preemptions, as a log hands them out after every step."""
    from kvarts.sim.report.requests import RequestLog
    from kvarts.sim.traffic.source import OpenLoop

    rows = [Row(3 * index, [1, 2, 3, 4, index % 3], 5, 30 + index, None, index % 2, None) for index in range(12)]
    case = Case(rows, 1, PAGE_SIZE, NUM_PAGES, 16, 4, "default", 1)
    heard, trace = Batches(), case.trace()
    replica = make_replica(case.config(), readers=[heard], step_by_step=step_by_step)
    Driver(
        [Arrivals(trace, OpenLoop(trace), RoundRobin(1), [replica], RequestLog(largest_hit_counts=False))], [replica]
    ).run()
    assert any(done.preemptions for events in heard.batches for done in events if isinstance(done, StepDone))
    assert replica.scheduler.cache.num_evicted
    return heard.batches


class EventReaderContract:
    """Run these by a subclass that makes the reader."""

    takes_leaps = True
    """Whether it can read an engine that does many steps at once."""

    def make(self, path: Path) -> EventReader:
        """Return a reader that has read nothing. `path`: of a file that it may write."""
        raise NotImplementedError

    def outcome(self, reader: EventReader, path: Path) -> object:
        """Return everything that came of what was read, to be compared."""
        raise NotImplementedError

    @pytest.fixture
    def batches(self) -> list[list[Event]]:
        return batches_of_a_run(step_by_step=not self.takes_leaps)

    def read(self, tmp_path: Path, name: str, batches: Sequence[Sequence[Event]]) -> object:
        path = tmp_path / name
        path.mkdir()
        reader = self.make(path)
        for events in batches:
            reader.observe(events)
        return self.outcome(reader, path)

    def test_events_in_one_batch_or_in_many_come_to_the_same(self, tmp_path: Path, batches: list[list[Event]]) -> None:
        step_by_step = self.read(tmp_path, "many", batches)
        assert step_by_step != self.read(tmp_path, "none", [])
        assert self.read(tmp_path, "one", [[event for events in batches for event in events]]) == step_by_step
        by_seven = [[event for events in batches[at : at + 7] for event in events] for at in range(0, len(batches), 7)]
        assert self.read(tmp_path, "seven", by_seven) == step_by_step

    def test_a_batch_of_nothing_is_nothing(self, tmp_path: Path, batches: list[list[Event]]) -> None:
        with_nothing = [part for events in batches for part in (events, [])]
        assert self.read(tmp_path, "some", with_nothing) == self.read(tmp_path, "none", batches)

    def test_an_event_that_it_does_not_know_is_passed_over(self, tmp_path: Path, batches: list[list[Event]]) -> None:
        unheard = [[*events, Unheard(number)] for number, events in enumerate(batches)]
        assert self.read(tmp_path, "more", unheard) == self.read(tmp_path, "known", batches)  # type: ignore[arg-type]

    def test_it_changes_neither_the_events_nor_what_others_read(
        self, tmp_path: Path, batches: list[list[Event]]
    ) -> None:
        path = tmp_path / "one"
        path.mkdir()
        after = Batches()
        reader = self.make(path)
        log = EventLog([reader, after])
        for events in batches:
            assert log.emit is not None
            for event in events:
                log.emit(event)
            log.flush()
        self.outcome(reader, path)
        assert after.batches == batches

    def test_it_says_whether_it_wants_details(self, tmp_path: Path) -> None:
        reader = self.make(tmp_path)
        wants_details = getattr(reader, "wants_details", True)
        assert (EventLog([reader]).emit_details is not None) is wants_details
        self.outcome(reader, tmp_path)

    def test_without_details_it_reads_the_same(self, tmp_path: Path, batches: list[list[Event]]) -> None:
        """Where it says that it needs none."""
        reader = self.make(tmp_path)
        self.outcome(reader, tmp_path)
        if getattr(reader, "wants_details", True):
            return
        plain = [[event for event in events if type(event).__name__ in STEP_EVENTS] for events in batches]
        assert self.read(tmp_path, "plain", plain) == self.read(tmp_path, "details", batches)


STEP_EVENTS = ("StepDone", "LeapDone", "AtRest")
