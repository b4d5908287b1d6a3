"""The step log reads events as every reader promises."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvarts.core.event_log import EventReader
from kvarts.sim.report.steps import StepLog

from builders.kept import Kept
from builders.reader_contract import NUM_PAGES, EventReaderContract

pytestmark = pytest.mark.laws


class TestStepLog(EventReaderContract):
    def make(self, path: Path) -> EventReader:
        return StepLog(NUM_PAGES)

    def outcome(self, reader: EventReader, path: Path) -> object:
        assert isinstance(reader, StepLog)
        columns = {name: column.tolist() for name, column in reader.columns.items()} if len(reader) else {}
        return columns, reader.preemptions


class TestStepLogStepByStep(TestStepLog):
    takes_leaps = False


class TestAReaderThatKeepsEverything(EventReaderContract):
    def make(self, path: Path) -> EventReader:
        return Kept()

    def outcome(self, reader: EventReader, path: Path) -> object:
        assert isinstance(reader, Kept)
        return [event for event in reader.events if type(event).__name__ != "Unheard"]
