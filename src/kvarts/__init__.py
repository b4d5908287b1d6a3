"""kvarts: a KV-cache engine for LLM serving.

The names below are imported on first use, so `import kvarts` is almost free.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # each name has a line here, for type checkers, and one in _HOMES
    from kvarts.base.errors import ConfigError as ConfigError
    from kvarts.base.errors import InputError as InputError
    from kvarts.base.errors import KvartsError as KvartsError
    from kvarts.base.errors import MissingFileError as MissingFileError
    from kvarts.base.errors import OutputError as OutputError
    from kvarts.core.config import EngineConfig as EngineConfig
    from kvarts.core.content import Content as Content
    from kvarts.core.kv.eviction import LruOrder as LruOrder
    from kvarts.core.kv.page_cache import PageCache as PageCache
    from kvarts.core.kv.pool import CountPool as CountPool
    from kvarts.core.kv.pool import IdPool as IdPool
    from kvarts.core.kv.pool import PageError as PageError
    from kvarts.core.kv.tree import PrefixTree as PrefixTree
    from kvarts.core.sampling import SamplingParams as SamplingParams
    from kvarts.core.sampling import StructuredOutputs as StructuredOutputs
    from kvarts.core.tiers.config import OffloadConfig as OffloadConfig
    from kvarts.core.tiers.config import TierConfig as TierConfig
    from kvarts.cost.polynomial import LinearCost as LinearCost
    from kvarts.cost.polynomial import PolynomialCost as PolynomialCost
    from kvarts.cost.roofline import RooflineCost as RooflineCost
    from kvarts.doors.openai.running import mock as mock
    from kvarts.plan import Plan as Plan
    from kvarts.plan import plan as plan
    from kvarts.plan.calibrate import Calibration as Calibration
    from kvarts.plan.calibrate import calibrate as calibrate
    from kvarts.plan.sweep import Sweep as Sweep
    from kvarts.plan.sweep import sweep as sweep
    from kvarts.proof.audit.auditor import AuditError as AuditError
    from kvarts.proof.audit.auditor import Auditor as Auditor
    from kvarts.proof.audit.auditor import Finding as Finding
    from kvarts.proof.audit.ledger import Ledger as Ledger
    from kvarts.proof.explain.hits import HitLedger as HitLedger
    from kvarts.proof.explain.hits import hit_ledger as hit_ledger
    from kvarts.proof.explain.reading import Journal as Journal
    from kvarts.proof.explain.reading import load_journal as load_journal
    from kvarts.proof.explain.story import story_of_block as story_of_block
    from kvarts.proof.explain.story import story_of_request as story_of_request
    from kvarts.proof.record.journal import JournalWriter as JournalWriter
    from kvarts.proof.record.live import LiveTimeline as LiveTimeline
    from kvarts.proof.record.timeline import Timeline as Timeline
    from kvarts.proof.record.timeline import timelines_of as timelines_of
    from kvarts.proof.verify import verify as verify
    from kvarts.proof.verify.verifier import Verdict as Verdict
    from kvarts.proof.verify.verifier import verify_file as verify_file
    from kvarts.run.torch.llm import LLM as LLM
    from kvarts.sim.config import ReplayConfig as ReplayConfig
    from kvarts.sim.config import Slo as Slo
    from kvarts.sim.replaying import replay as replay
    from kvarts.sim.report.report import Report as Report
    from kvarts.sim.routers.config import Routing as Routing
    from kvarts.sim.routers.view import Needs as Needs
    from kvarts.sim.sharing.config import ModelShare as ModelShare
    from kvarts.sim.sharing.config import SharingConfig as SharingConfig
    from kvarts.sim.sharing.report import SharedReport as SharedReport
    from kvarts.sim.traffic.formats import load_trace as load_trace
    from kvarts.sim.traffic.info import TraceInfo as TraceInfo
    from kvarts.sim.traffic.info import trace_info as trace_info
    from kvarts.sim.traffic.mooncake import load_mooncake as load_mooncake
    from kvarts.sim.traffic.trace import Trace as Trace
    from kvarts.sim.traffic.trace import TraceRequest as TraceRequest
    from kvarts.sim.traffic.workload import Workload as Workload

__version__ = "0.1.0"

_HOMES = {
    "AuditError": "kvarts.proof.audit.auditor",
    "Auditor": "kvarts.proof.audit.auditor",
    "Calibration": "kvarts.plan.calibrate",
    "ConfigError": "kvarts.base.errors",
    "Content": "kvarts.core.content",
    "CountPool": "kvarts.core.kv.pool",
    "EngineConfig": "kvarts.core.config",
    "Finding": "kvarts.proof.audit.auditor",
    "HitLedger": "kvarts.proof.explain.hits",
    "IdPool": "kvarts.core.kv.pool",
    "InputError": "kvarts.base.errors",
    "Journal": "kvarts.proof.explain.reading",
    "JournalWriter": "kvarts.proof.record.journal",
    "KvartsError": "kvarts.base.errors",
    "LLM": "kvarts.run.torch.llm",
    "Ledger": "kvarts.proof.audit.ledger",
    "LinearCost": "kvarts.cost.polynomial",
    "LiveTimeline": "kvarts.proof.record.live",
    "LruOrder": "kvarts.core.kv.eviction",
    "MissingFileError": "kvarts.base.errors",
    "ModelShare": "kvarts.sim.sharing.config",
    "Needs": "kvarts.sim.routers.view",
    "OffloadConfig": "kvarts.core.tiers.config",
    "OutputError": "kvarts.base.errors",
    "PageCache": "kvarts.core.kv.page_cache",
    "PageError": "kvarts.core.kv.pool",
    "Plan": "kvarts.plan",
    "PolynomialCost": "kvarts.cost.polynomial",
    "PrefixTree": "kvarts.core.kv.tree",
    "ReplayConfig": "kvarts.sim.config",
    "Report": "kvarts.sim.report.report",
    "RooflineCost": "kvarts.cost.roofline",
    "Routing": "kvarts.sim.routers.config",
    "SamplingParams": "kvarts.core.sampling",
    "SharedReport": "kvarts.sim.sharing.report",
    "SharingConfig": "kvarts.sim.sharing.config",
    "Slo": "kvarts.sim.config",
    "StructuredOutputs": "kvarts.core.sampling",
    "Sweep": "kvarts.plan.sweep",
    "TierConfig": "kvarts.core.tiers.config",
    "Timeline": "kvarts.proof.record.timeline",
    "Trace": "kvarts.sim.traffic.trace",
    "TraceInfo": "kvarts.sim.traffic.info",
    "TraceRequest": "kvarts.sim.traffic.trace",
    "Verdict": "kvarts.proof.verify.verifier",
    "Workload": "kvarts.sim.traffic.workload",
    "calibrate": "kvarts.plan.calibrate",
    "hit_ledger": "kvarts.proof.explain.hits",
    "load_journal": "kvarts.proof.explain.reading",
    "load_mooncake": "kvarts.sim.traffic.mooncake",
    "load_trace": "kvarts.sim.traffic.formats",
    "mock": "kvarts.doors.openai.running",
    "plan": "kvarts.plan",
    "replay": "kvarts.sim.replaying",
    "story_of_block": "kvarts.proof.explain.story",
    "story_of_request": "kvarts.proof.explain.story",
    "sweep": "kvarts.plan.sweep",
    "timelines_of": "kvarts.proof.record.timeline",
    "trace_info": "kvarts.sim.traffic.info",
    "verify": "kvarts.proof.verify",
    "verify_file": "kvarts.proof.verify.verifier",
}
"""The module that each name is imported from."""

_EXTRAS = {"LLM": "torch", "mock": "serve"}
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
