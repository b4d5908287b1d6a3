"""KV timelines: recorded, judged, explained, shown.

Recording (`spans`, `record`, `live`) and judging (`reader`, `rules`, `verifier`) share no code: a verifier that does
verifies nothing. The names below are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvarts.timeline.auditor import AuditError, Auditor, Finding
    from kvarts.timeline.hits import HitLedger, hit_ledger
    from kvarts.timeline.journal import Journal, JournalWriter, load_journal
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
    from kvarts.timeline.story import story_of_block, story_of_request
    from kvarts.timeline.verifier import Verdict, verify, verify_file

__all__ = [
    "AuditError",
    "Auditor",
    "BlockInUseError",
    "Finding",
    "FullBlock",
    "HitLedger",
    "Journal",
    "JournalWriter",
    "LedgerError",
    "LiveTimeline",
    "NotUniqueError",
    "PageLedger",
    "PartialBlock",
    "StepLog",
    "Timeline",
    "UnknownBlockError",
    "Verdict",
    "hit_ledger",
    "load_journal",
    "story_of_block",
    "story_of_request",
    "verify",
    "verify_file",
]

_HOMES = {
    "auditor": ("AuditError", "Auditor", "Finding"),
    "hits": ("HitLedger", "hit_ledger"),
    "journal": ("Journal", "JournalWriter", "load_journal"),
    "ledger": (
        "BlockInUseError",
        "FullBlock",
        "LedgerError",
        "NotUniqueError",
        "PageLedger",
        "PartialBlock",
        "UnknownBlockError",
    ),
    "live": ("LiveTimeline",),
    "record": ("Timeline",),
    "spans": ("StepLog",),
    "story": ("story_of_block", "story_of_request"),
    "verifier": ("Verdict", "verify", "verify_file"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'kvarts.timeline' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"kvarts.timeline.{home}"), name)
    return value
