"""KV timelines: recorded, judged, explained, shown.

Recording (`spans`, `record`, `live`) and judging (`reader`, `rules`, `verifier`) share no code: a verifier that does
verifies nothing.
"""

from __future__ import annotations

from kvarts.timeline.auditor import AuditError, Auditor, Finding
from kvarts.timeline.ledger import (
    BlockInUseError,
    FullBlock,
    LedgerError,
    NotUniqueError,
    PageLedger,
    PartialBlock,
    UnknownBlockError,
)
from kvarts.timeline.live import LiveTimeline
from kvarts.timeline.record import Timeline
from kvarts.timeline.spans import StepLog
from kvarts.timeline.verifier import Verdict, verify, verify_file

__all__ = [
    "AuditError",
    "Auditor",
    "BlockInUseError",
    "Finding",
    "FullBlock",
    "LedgerError",
    "LiveTimeline",
    "NotUniqueError",
    "PageLedger",
    "PartialBlock",
    "StepLog",
    "Timeline",
    "UnknownBlockError",
    "Verdict",
    "verify",
    "verify_file",
]
