"""kvarts: a KV-cache engine for LLM serving.

The names below are imported on first use, so `import kvarts` is almost free. `kvarts.policies` has what a user can
replace in an engine, `kvarts.testing` the contracts of these, and `kvarts.proof.evidence` what happened in a run.

>>> import kvarts
>>> report = kvarts.replay("sample:mooncake", kvarts.ReplayConfig(num_pages=2_000, page_size=512))
>>> report.summary["num_completed"]
1000
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # each name has a line here, for type checkers, and one in _HOMES
    from kvarts.base.errors import ConfigError as ConfigError
    from kvarts.base.errors import KvartsError as KvartsError
    from kvarts.core.sampling import SamplingParams as SamplingParams
    from kvarts.core.sampling import StructuredOutputs as StructuredOutputs
    from kvarts.core.tiers.config import OffloadConfig as OffloadConfig
    from kvarts.cost.polynomial import LinearCost as LinearCost
    from kvarts.doors.openai.running import mock as mock
    from kvarts.plan import plan as plan
    from kvarts.plan.calibrate import calibrate as calibrate
    from kvarts.plan.sweep import sweep as sweep
    from kvarts.proof.verify import verify as verify
    from kvarts.run.torch.llm import LLM as LLM
    from kvarts.sim.config import ReplayConfig as ReplayConfig
    from kvarts.sim.config import Slo as Slo
    from kvarts.sim.fleet.config import FleetConfig as FleetConfig
    from kvarts.sim.fleet.config import PoolConfig as PoolConfig
    from kvarts.sim.replaying import replay as replay
    from kvarts.sim.report.report import Report as Report
    from kvarts.sim.sharing.config import ModelShare as ModelShare
    from kvarts.sim.sharing.config import SharingConfig as SharingConfig
    from kvarts.sim.traffic.formats import load_trace as load_trace
    from kvarts.sim.traffic.info import trace_info as trace_info
    from kvarts.sim.traffic.trace import Trace as Trace
    from kvarts.sim.traffic.trace import TraceRequest as TraceRequest
    from kvarts.sim.traffic.workload import Workload as Workload

__version__ = "0.1.0"

_HOMES = {
    "ConfigError": "kvarts.base.errors",
    "FleetConfig": "kvarts.sim.fleet.config",
    "KvartsError": "kvarts.base.errors",
    "LLM": "kvarts.run.torch.llm",
    "LinearCost": "kvarts.cost.polynomial",
    "ModelShare": "kvarts.sim.sharing.config",
    "OffloadConfig": "kvarts.core.tiers.config",
    "PoolConfig": "kvarts.sim.fleet.config",
    "ReplayConfig": "kvarts.sim.config",
    "Report": "kvarts.sim.report.report",
    "SamplingParams": "kvarts.core.sampling",
    "SharingConfig": "kvarts.sim.sharing.config",
    "Slo": "kvarts.sim.config",
    "StructuredOutputs": "kvarts.core.sampling",
    "Trace": "kvarts.sim.traffic.trace",
    "TraceRequest": "kvarts.sim.traffic.trace",
    "Workload": "kvarts.sim.traffic.workload",
    "calibrate": "kvarts.plan.calibrate",
    "load_trace": "kvarts.sim.traffic.formats",
    "mock": "kvarts.doors.openai.running",
    "plan": "kvarts.plan",
    "replay": "kvarts.sim.replaying",
    "sweep": "kvarts.plan.sweep",
    "trace_info": "kvarts.sim.traffic.info",
    "verify": "kvarts.proof.verify",
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
