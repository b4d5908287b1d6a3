"""kvarts: a KV-cache engine for LLM serving.

The names below are loaded when they are first used, so `import kvarts` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvarts.errors import ConfigError, InputError, KvartsError, MissingFileError, OutputError
    from kvarts.executor.cost import LinearCost, PolynomialCost
    from kvarts.executor.roofline import RooflineCost
    from kvarts.executor.torch.sampling import SamplingParams
    from kvarts.live.engine import Engine
    from kvarts.offload.config import OffloadConfig
    from kvarts.replayer import ReplayConfig, Report, Trace, TraceRequest, Workload, load_mooncake, load_trace, replay
    from kvarts.replayer.config import Slo
    from kvarts.replayer.shared import replay_shared
    from kvarts.replayer.sharedreport import SharedReport
    from kvarts.replayer.sharing import resolve_sharing

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "Engine",
    "InputError",
    "KvartsError",
    "LinearCost",
    "MissingFileError",
    "OffloadConfig",
    "OutputError",
    "PolynomialCost",
    "ReplayConfig",
    "Report",
    "RooflineCost",
    "SamplingParams",
    "SharedReport",
    "Slo",
    "Trace",
    "TraceRequest",
    "Workload",
    "load_mooncake",
    "load_trace",
    "replay",
    "replay_shared",
    "resolve_sharing",
]

_HOMES = {
    "kvarts.errors": ("ConfigError", "InputError", "KvartsError", "MissingFileError", "OutputError"),
    "kvarts.executor.cost": ("LinearCost", "PolynomialCost"),
    "kvarts.executor.roofline": ("RooflineCost",),
    "kvarts.executor.torch.sampling": ("SamplingParams",),
    "kvarts.live.engine": ("Engine",),
    "kvarts.offload.config": ("OffloadConfig",),
    "kvarts.replayer": (
        "Report",
        "ReplayConfig",
        "Trace",
        "TraceRequest",
        "Workload",
        "load_mooncake",
        "load_trace",
        "replay",
    ),
    "kvarts.replayer.config": ("Slo",),
    "kvarts.replayer.shared": ("replay_shared",),
    "kvarts.replayer.sharedreport": ("SharedReport",),
    "kvarts.replayer.sharing": ("resolve_sharing",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'kvarts' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(home), name)
    return value
