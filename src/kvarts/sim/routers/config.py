"""Settings of a router's knowledge of its workers, and of its queue."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import msgspec

from kvarts.base.errors import ConfigError
from kvarts.base.limits import MOST_SEED, check_number, check_whole
from kvarts.base.settings import SettingError, setting
from kvarts.base.units import parse_delay_ms

if TYPE_CHECKING:
    from kvarts.sim.routers.router import PolicyRouter
    from kvarts.sim.routers.view import Needs, WorkerFacts

__all__ = ["QueueOrder", "Routing", "ages_read_by"]

QueueOrder = Literal["fcfs", "lcfs", "wspt"]
Delay = float | str
"""Milliseconds, or a text with a unit: 50ms, 1s."""
NS_PER_MS = 1e6
MOST_DELAY_MS = 1e9


class Routing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Information available to a router, its age, and its queue. Raises ConfigError for a value out of range.

    `staleness`: interval at which metrics are read, 0 for always current; by default that of the policy. `event_lag`:
    time from a cache event to its arrival at the router. `seed`: seed of random choices. `queue_threshold`: a request
    waits in the router while each worker has more than this many times the token budget of a step to prefill, or other
    requests wait. `queue`: order of waiting requests.
    """

    staleness: Annotated[
        Delay | None,
        setting(
            "Age that metrics of workers reach before the router reads them again: 50ms.",
            flag="--router-staleness",
            metavar="TIME",
            default="50ms with llm-d, else 0",
        ),
    ] = None
    event_lag: Annotated[
        Delay,
        setting("Time until cache events of workers reach the router: 5ms.", flag="--router-event-lag", metavar="TIME"),
    ] = 0.0
    seed: Annotated[int, setting("Seed of a router's random choices.", flag="--router-seed", metavar="N")] = 0
    queue_threshold: Annotated[
        float | None,
        setting(
            "Keep requests in the router while every worker has more than X times --max-batched-tokens to prefill.",
            flag="--router-queue-threshold",
            metavar="X",
            default="no queue",
        ),
    ] = None
    queue: Annotated[
        QueueOrder,
        setting(
            "Order of the router's queue: first come, last come, or weighted shortest prefill time first.",
            flag="--router-queue",
        ),
    ] = "fcfs"

    def __post_init__(self) -> None:
        if self.staleness is not None:
            _ns(self.staleness, "staleness")
        _ns(self.event_lag, "event_lag")
        check_whole(self.seed, "seed", least=0, most=MOST_SEED)
        if self.queue_threshold is not None:
            check_number(self.queue_threshold, "queue_threshold", most=1e9)
        if self.queue not in get_args(QueueOrder):
            raise SettingError(f"must be 'fcfs', 'lcfs' or 'wspt', got {self.queue!r}", "queue")
        if self.queue != "fcfs" and self.queue_threshold is None:
            raise SettingError(
                "orders a queue, and there is none", "queue", hint="Give {queue_threshold} as well, or leave it out."
            )

    def check(self, router: str | Callable[[], Any], *, has_pages: bool = True) -> None:
        """Raise ConfigError if `router` is not a policy, and for settings without effect on it.

        `has_pages`: whether workers have cached pages, which some policies ask for.
        """
        from kvarts.sim.routers.policies import policy_of  # options must be declarable without loading the policies

        policy = policy_of(router)
        needs: Needs | None = getattr(policy, "needs", None)
        name = router if isinstance(router, str) else getattr(router, "__name__", repr(router))
        if not has_pages and needs is not None and needs.pages != "no":
            raise SettingError(
                "chooses by cached pages, and without a prefix cache there are none", "router", hint="Take another one."
            )
        ages = _ages(needs)
        if self.staleness is not None and "staleness" not in ages:
            raise SettingError(
                f"has no effect on {name}, which reads no metrics", "routing.staleness", hint="Leave it out."
            )
        if _ns(self.event_lag, "event_lag") and "event_lag" not in ages:
            raise SettingError(
                f"has no effect on {name}, which reads no events", "routing.event_lag", hint="Leave it out."
            )

    @property
    def event_lag_ns(self) -> int:
        """Time until cache events reach the router."""
        return _ns(self.event_lag, "event_lag")

    def staleness_ns(self, router: str | Callable[[], Any]) -> int:
        """Return the interval at which metrics are read; 0 reads them whenever a request arrives."""
        from kvarts.sim.routers.policies import STALENESS_NS

        if self.staleness is not None:
            return _ns(self.staleness, "staleness")

        return STALENESS_NS.get(router.partition(":")[0], 0) if isinstance(router, str) else 0

    def counts_at_ends(self, router: str | Callable[[], Any]) -> bool:
        """Return whether `router` counts the pages of a step once it has ended, and not once it is planned."""
        from kvarts.sim.routers.policies import policy_of

        needs: Needs | None = getattr(policy_of(router), "needs", None)
        return needs is not None and needs.pages == "end"

    def open(self, router: str | Callable[[], Any], workers: WorkerFacts) -> PolicyRouter:
        """Return a new router of `workers`."""
        from kvarts.sim.routers.policies import policy_of
        from kvarts.sim.routers.router import PolicyRouter

        threshold = self.queue_threshold
        return PolicyRouter(
            policy_of(router),
            workers,
            order=self.queue,
            queue_tokens=None if threshold is None else threshold * workers.max_num_batched_tokens,
            event_lag_ns=self.event_lag_ns,
            staleness_ns=self.staleness_ns(router),
            seed=self.seed,
        )


def ages_read_by(router: str | Callable[[], Any]) -> set[str]:
    """Return the fields of Routing for the age of the router's knowledge that have an effect on `router`.

    Raise ConfigError if it is not a policy.
    """
    from kvarts.sim.routers.policies import policy_of

    return _ages(getattr(policy_of(router), "needs", None))


def _ages(needs: Needs | None) -> set[str]:
    if needs is None:
        return set()
    return {*(["staleness"] if needs.metrics else []), *(["event_lag"] if needs.pages != "no" else [])}


def _ns(value: Delay, field: str) -> int:
    if isinstance(value, str):
        try:
            value = parse_delay_ms(value)
        except ConfigError as error:
            raise SettingError(error.what, field, hint=error.hint) from error
    check_number(value, field, most=MOST_DELAY_MS)
    return round(value * NS_PER_MS)
