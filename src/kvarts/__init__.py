"""kvarts: a KV-cache engine for LLM serving.

The names below are imported on first use, so `import kvarts` is almost free.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # each name has a line here, for type checkers, and one in _HOMES
    from kvarts.audit.auditor import AuditError as AuditError
    from kvarts.audit.auditor import Auditor as Auditor
    from kvarts.audit.auditor import Finding as Finding
    from kvarts.audit.ledger import Ledger as Ledger
    from kvarts.calibrate import Calibration as Calibration
    from kvarts.calibrate import calibrate as calibrate
    from kvarts.config import EngineConfig as EngineConfig
    from kvarts.content import Content as Content
    from kvarts.errors import ConfigError as ConfigError
    from kvarts.errors import InputError as InputError
    from kvarts.errors import KvartsError as KvartsError
    from kvarts.errors import MissingFileError as MissingFileError
    from kvarts.errors import OutputError as OutputError
    from kvarts.executor.cost import LinearCost as LinearCost
    from kvarts.executor.cost import PolynomialCost as PolynomialCost
    from kvarts.executor.roofline import RooflineCost as RooflineCost
    from kvarts.explain.hits import HitLedger as HitLedger
    from kvarts.explain.hits import hit_ledger as hit_ledger
    from kvarts.explain.reading import Journal as Journal
    from kvarts.explain.reading import load_journal as load_journal
    from kvarts.explain.story import story_of_block as story_of_block
    from kvarts.explain.story import story_of_request as story_of_request
    from kvarts.kv.eviction import LruOrder as LruOrder
    from kvarts.kv.page_cache import PageCache as PageCache
    from kvarts.kv.pool import CountPool as CountPool
    from kvarts.kv.pool import IdPool as IdPool
    from kvarts.kv.pool import PageError as PageError
    from kvarts.kv.tree import PrefixTree as PrefixTree
    from kvarts.llm.llm import LLM as LLM
    from kvarts.offload.config import OffloadConfig as OffloadConfig
    from kvarts.offload.config import TierConfig as TierConfig
    from kvarts.plan import Plan as Plan
    from kvarts.plan import plan as plan
    from kvarts.plan.sweeping import Sweep as Sweep
    from kvarts.plan.sweeping import sweep as sweep
    from kvarts.record.journal import JournalWriter as JournalWriter
    from kvarts.record.live import LiveTimeline as LiveTimeline
    from kvarts.record.timeline import Timeline as Timeline
    from kvarts.record.timeline import timelines_of as timelines_of
    from kvarts.replaying import replay as replay
    from kvarts.report.report import Report as Report
    from kvarts.routers.config import Routing as Routing
    from kvarts.routers.view import Needs as Needs
    from kvarts.sampling import SamplingParams as SamplingParams
    from kvarts.sampling import StructuredOutputs as StructuredOutputs
    from kvarts.sharing.config import ModelShare as ModelShare
    from kvarts.sharing.config import SharingConfig as SharingConfig
    from kvarts.sharing.report import SharedReport as SharedReport
    from kvarts.sim.config import ReplayConfig as ReplayConfig
    from kvarts.sim.config import Slo as Slo
    from kvarts.traffic.formats import load_trace as load_trace
    from kvarts.traffic.info import TraceInfo as TraceInfo
    from kvarts.traffic.info import trace_info as trace_info
    from kvarts.traffic.mooncake import load_mooncake as load_mooncake
    from kvarts.traffic.trace import Trace as Trace
    from kvarts.traffic.trace import TraceRequest as TraceRequest
    from kvarts.traffic.workload import Workload as Workload
    from kvarts.verify import verify as verify
    from kvarts.verify.verifier import Verdict as Verdict
    from kvarts.verify.verifier import verify_file as verify_file

__version__ = "0.1.0"

_HOMES = {
    "AuditError": "kvarts.audit.auditor",
    "Auditor": "kvarts.audit.auditor",
    "Calibration": "kvarts.calibrate",
    "ConfigError": "kvarts.errors",
    "Content": "kvarts.content",
    "CountPool": "kvarts.kv.pool",
    "EngineConfig": "kvarts.config",
    "Finding": "kvarts.audit.auditor",
    "HitLedger": "kvarts.explain.hits",
    "IdPool": "kvarts.kv.pool",
    "InputError": "kvarts.errors",
    "Journal": "kvarts.explain.reading",
    "JournalWriter": "kvarts.record.journal",
    "KvartsError": "kvarts.errors",
    "LLM": "kvarts.llm.llm",
    "Ledger": "kvarts.audit.ledger",
    "LinearCost": "kvarts.executor.cost",
    "LiveTimeline": "kvarts.record.live",
    "LruOrder": "kvarts.kv.eviction",
    "MissingFileError": "kvarts.errors",
    "ModelShare": "kvarts.sharing.config",
    "Needs": "kvarts.routers.view",
    "OffloadConfig": "kvarts.offload.config",
    "OutputError": "kvarts.errors",
    "PageCache": "kvarts.kv.page_cache",
    "PageError": "kvarts.kv.pool",
    "Plan": "kvarts.plan",
    "PolynomialCost": "kvarts.executor.cost",
    "PrefixTree": "kvarts.kv.tree",
    "ReplayConfig": "kvarts.sim.config",
    "Report": "kvarts.report.report",
    "RooflineCost": "kvarts.executor.roofline",
    "Routing": "kvarts.routers.config",
    "SamplingParams": "kvarts.sampling",
    "SharedReport": "kvarts.sharing.report",
    "SharingConfig": "kvarts.sharing.config",
    "Slo": "kvarts.sim.config",
    "StructuredOutputs": "kvarts.sampling",
    "Sweep": "kvarts.plan.sweeping",
    "TierConfig": "kvarts.offload.config",
    "Timeline": "kvarts.record.timeline",
    "Trace": "kvarts.traffic.trace",
    "TraceInfo": "kvarts.traffic.info",
    "TraceRequest": "kvarts.traffic.trace",
    "Verdict": "kvarts.verify.verifier",
    "Workload": "kvarts.traffic.workload",
    "calibrate": "kvarts.calibrate",
    "hit_ledger": "kvarts.explain.hits",
    "load_journal": "kvarts.explain.reading",
    "load_mooncake": "kvarts.traffic.mooncake",
    "load_trace": "kvarts.traffic.formats",
    "plan": "kvarts.plan",
    "replay": "kvarts.replaying",
    "story_of_block": "kvarts.explain.story",
    "story_of_request": "kvarts.explain.story",
    "sweep": "kvarts.plan.sweeping",
    "timelines_of": "kvarts.record.timeline",
    "trace_info": "kvarts.traffic.info",
    "verify": "kvarts.verify",
    "verify_file": "kvarts.verify.verifier",
}
"""The module that each name is imported from."""

_EXTRAS = {"LLM": "torch"}
"""Names that need an extra, with that extra. A star import omits them."""

__all__ = [name for name in _HOMES if name not in _EXTRAS]


def __dir__() -> list[str]:
    """Return the public names, whether imported yet or not."""
    return sorted([*_HOMES, "__version__"])


if not TYPE_CHECKING:  # type checkers should know only the names above

    def __getattr__(name: str) -> Any:
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module 'kvarts' has no attribute {name!r}")
        try:
            value = globals()[name] = getattr(import_module(home), name)
        except ModuleNotFoundError as error:
            if name not in _EXTRAS or (error.name or "").startswith("kvarts"):
                raise
            extra = f"kvarts[{_EXTRAS[name]}]"
            what = f"kvarts.{name} needs {extra} ({error}). pip install '{extra}'."
            raise ModuleNotFoundError(what, name=error.name) from error
        return value
