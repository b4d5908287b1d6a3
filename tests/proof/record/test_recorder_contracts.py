"""The journal and the live timeline read events as every reader promises."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from kvarts.core.event_log import EventReader
from kvarts.proof.record.journal import JournalWriter
from kvarts.proof.record.live import LiveTimeline

from builders.reader_contract import NUM_PAGES, PAGE_SIZE, EventReaderContract

pytestmark = pytest.mark.laws


class TestLiveTimeline(EventReaderContract):
    suffix = ".jsonl"

    def make(self, path: Path) -> EventReader:
        return LiveTimeline(path / f"t{self.suffix}", total_blocks=NUM_PAGES, block_size_tokens=PAGE_SIZE)

    def outcome(self, reader: EventReader, path: Path) -> object:
        assert isinstance(reader, LiveTimeline)
        reader.close()
        return (path / f"t{self.suffix}").read_bytes()


class TestLiveTimelineOfOneDocument(TestLiveTimeline):
    suffix = ".json"


class TestJournal(EventReaderContract):
    def make(self, path: Path) -> EventReader:
        self.file = io.BytesIO()
        return JournalWriter(self.file, total_blocks=NUM_PAGES, block_size_tokens=PAGE_SIZE)

    def outcome(self, reader: EventReader, path: Path) -> object:
        return self.file.getvalue()
