"""What happened in a run, and whether it adds up: timelines, journals, stories, verdicts, and a second bookkeeping.

>>> import kvarts
>>> from kvarts.proof.evidence import timelines_of
>>> config = kvarts.ReplayConfig(num_pages=2_000, page_size=512)
>>> (timeline,) = timelines_of(kvarts.replay("sample:mooncake", config))
>>> kvarts.verify(timeline.to_json()).verdict
'ok'
"""

from kvarts.proof.audit.auditor import AuditError, Auditor, Finding
from kvarts.proof.audit.ledger import Ledger
from kvarts.proof.explain.hits import HitLedger, hit_ledger
from kvarts.proof.explain.reading import Journal, load_journal
from kvarts.proof.explain.story import story_of_block, story_of_request
from kvarts.proof.record.journal import JournalWriter
from kvarts.proof.record.live import LiveTimeline
from kvarts.proof.record.timeline import Timeline, timelines_of
from kvarts.proof.verify.verifier import Verdict, verify_file

__all__ = [
    "AuditError",
    "Auditor",
    "Finding",
    "HitLedger",
    "Journal",
    "JournalWriter",
    "Ledger",
    "LiveTimeline",
    "Timeline",
    "Verdict",
    "hit_ledger",
    "load_journal",
    "story_of_block",
    "story_of_request",
    "timelines_of",
    "verify_file",
]
