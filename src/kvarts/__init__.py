"""kvarts: a KV-cache engine for LLM serving.

The names below are loaded when they are first used, so `import kvarts` costs next to nothing.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvarts import moved

if TYPE_CHECKING:
    from kvarts.errors import ConfigError, InputError, KvartsError, MissingFileError, OutputError
    from kvarts.executor.cost import LinearCost, PolynomialCost
    from kvarts.executor.roofline import RooflineCost
    from kvarts.llm.llm import LLM
    from kvarts.offload.config import OffloadConfig
    from kvarts.report.report import Report
    from kvarts.sampling import SamplingParams
    from kvarts.sharing.config import ModelShare, SharingConfig, resolve_sharing
    from kvarts.sharing.replay import replay_shared
    from kvarts.sharing.report import SharedReport
    from kvarts.sim.config import ReplayConfig, Slo
    from kvarts.sim.replay import replay
    from kvarts.traffic.formats import load_trace
    from kvarts.traffic.mooncake import load_mooncake
    from kvarts.traffic.trace import Trace, TraceRequest
    from kvarts.traffic.workload import Workload

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "ConfigError",
    "InputError",
    "KvartsError",
    "LinearCost",
    "MissingFileError",
    "OutputError",
    "PolynomialCost",
    "ReplayConfig",
    "Report",
    "RooflineCost",
    "SamplingParams",
    "Slo",
    "Trace",
    "TraceRequest",
    "Workload",
    "load_mooncake",
    "load_trace",
    "replay",
]
__all__ += ["OffloadConfig"]  # offload
__all__ += ["ModelShare", "SharedReport", "SharingConfig", "replay_shared", "resolve_sharing"]  # sharing

_HOMES = {
    "kvarts.errors": ("ConfigError", "InputError", "KvartsError", "MissingFileError", "OutputError"),
    "kvarts.executor.cost": ("LinearCost", "PolynomialCost"),
    "kvarts.executor.roofline": ("RooflineCost",),
    "kvarts.llm.llm": ("LLM",),
    "kvarts.offload.config": ("OffloadConfig",),
    "kvarts.report.report": ("Report",),
    "kvarts.sampling": ("SamplingParams",),
    "kvarts.sharing.config": ("ModelShare", "SharingConfig", "resolve_sharing"),
    "kvarts.sharing.replay": ("replay_shared",),
    "kvarts.sharing.report": ("SharedReport",),
    "kvarts.sim.config": ("ReplayConfig", "Slo"),
    "kvarts.sim.replay": ("replay",),
    "kvarts.traffic.formats": ("load_trace",),
    "kvarts.traffic.mooncake": ("load_mooncake",),
    "kvarts.traffic.trace": ("Trace", "TraceRequest"),
    "kvarts.traffic.workload": ("Workload",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "Engine":
        warnings.warn("kvarts.Engine is now kvarts.LLM", DeprecationWarning, stacklevel=2)
        name = "LLM"
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'kvarts' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(home), name)
    return value


moved.install()
