"""The front door of replays: one model, a fleet, or several models on a device, by the type of the configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

import msgspec

from kvarts.core.event_log import EventReader
from kvarts.sim.config import ReplayConfig
from kvarts.sim.fleet.config import FleetConfig, FleetWorker
from kvarts.sim.replay import Traffic, replay_with_spread, trace_of
from kvarts.sim.report.report import Report
from kvarts.sim.sharing.config import ObserversOf, SharingConfig

if TYPE_CHECKING:
    from kvarts.sim.fleet.report import FleetReport
    from kvarts.sim.sharing.report import SharedReport

__all__ = ["Replayable", "replay"]

Replayable = ReplayConfig | FleetConfig | SharingConfig
"""A configuration that can be replayed."""

OnProgress = Callable[[int], object]


@overload
def replay(
    trace: Traffic,
    config: FleetConfig,
    *,
    workers: int | None = 1,
    on_progress: OnProgress | None = None,
    observers_of: Callable[[FleetWorker], Sequence[EventReader]] | None = None,
) -> FleetReport: ...


@overload
def replay(
    trace: Mapping[str, Traffic],
    config: SharingConfig,
    *,
    workers: int | None = 1,
    on_progress: OnProgress | None = None,
    observers_of: ObserversOf | None = None,
) -> SharedReport: ...


@overload
def replay(
    trace: Traffic,
    config: ReplayConfig | None = None,
    *,
    workers: int | None = 1,
    on_progress: OnProgress | None = None,
    observers_of: Callable[[int], Sequence[EventReader]] | None = None,
) -> Report: ...


def replay(
    trace: Any,
    config: Replayable | None = None,
    *,
    workers: int | None = 1,
    on_progress: OnProgress | None = None,
    observers_of: Callable[[Any], Sequence[EventReader]] | None = None,
) -> Report | SharedReport:
    """Replay `trace` with `config` and return the report.

    With a ReplayConfig, `trace` is a Trace, a Workload to make one from, or the path of a file. With a SharingConfig it
    is a mapping of these by the name of the model. `workers`: processes that replay the replicas of one model which do
    not affect each other, with the same result; more than one requires a script that can be imported; None: one per
    core for many requests. `on_progress` is called with the number of requests that have ended since its last call.
    `observers_of` returns the readers that observe the events of a replica, by number, or of a model, by name. Raises
    InputError for a trace that cannot be read.

    >>> from kvarts import ReplayConfig, replay
    >>> report = replay("sample:mooncake", ReplayConfig(num_pages=2_000, page_size=512, eviction="auto"))
    >>> report.summary["num_completed"]
    1000
    """
    trace, config = _with_its_trace(trace, config or ReplayConfig())
    match config:
        case FleetConfig():
            from kvarts.sim.fleet.replay import replay_fleet  # few replays are of a fleet or of several models

            return replay_fleet(trace, config, on_progress=on_progress, observers_of=observers_of)
        case SharingConfig():
            from kvarts.sim.sharing.replay import replay_several

            return replay_several(trace, config, on_progress=on_progress, observers_of=observers_of)
    return replay_with_spread(trace, config, workers=workers, on_progress=on_progress, observers_of=observers_of)


def _with_its_trace(trace: Any, config: Replayable) -> tuple[Any, Replayable]:
    """Return trace and configuration, with eviction orders that know the trace if they need it."""
    replace = msgspec.structs.replace
    match config:
        case ReplayConfig() if hasattr(config.eviction, "of_trace"):
            trace = trace_of(trace)
            return trace, config.of_trace(trace)
        case FleetConfig() if any(hasattr(pool.each.eviction, "of_trace") for pool in config.pools):
            trace = trace_of(trace)
            return trace, replace(
                config, pools=tuple(replace(pool, each=pool.each.of_trace(trace)) for pool in config.pools)
            )
        case SharingConfig() if any(hasattr(share.eviction, "of_trace") for share in config.models.values()):
            trace = {name: trace_of(each) for name, each in trace.items()}
            makers = {name: getattr(share.eviction, "of_trace", None) for name, share in config.models.items()}
            models = {
                name: share if (make := makers[name]) is None else replace(share, eviction=make(trace[name]))
                for name, share in config.models.items()
            }
            return trace, replace(config, models=models)
    return trace, config
