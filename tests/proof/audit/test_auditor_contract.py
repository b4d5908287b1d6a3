"""The auditor reads events as every reader promises."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvarts.core.event_log import EventReader
from kvarts.proof.audit.auditor import Auditor

from builders.reader_contract import NUM_PAGES, PAGE_SIZE, EventReaderContract

pytestmark = pytest.mark.laws


class TestAuditor(EventReaderContract):
    def make(self, path: Path) -> EventReader:
        return Auditor(NUM_PAGES, PAGE_SIZE)

    def outcome(self, reader: EventReader, path: Path) -> object:
        assert isinstance(reader, Auditor)
        assert reader.findings == []
        return reader.ledger.counts(), [(key, len(copies)) for key, copies in reader.ledger.copies.items()]


class TestAuditorOfAnOrderThatIsTold(TestAuditor):
    def make(self, path: Path) -> EventReader:
        return Auditor(NUM_PAGES, PAGE_SIZE, is_lru=False)
