"""What a fleet is built from: pools of workers, and how KV goes between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import msgspec

from kvarts.limits import MOST_MS, MOST_REPLICAS, check_number, check_whole
from kvarts.settings import SettingError, setting
from kvarts.sim.config import ReplayConfig, Slo

if TYPE_CHECKING:
    from kvarts.event_log import EventReader
    from kvarts.fleet.report import FleetReport
    from kvarts.sim.replay import Traffic

__all__ = ["FleetConfig", "FleetSettings", "PoolConfig", "Role", "TransferMode"]

Role = Literal["mixed", "prefill", "decode"]
TransferMode = Literal["full-prompt", "missing"]


class FleetSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Workers that compute prompts and workers that generate, and the links between them."""

    prefill_replicas: Annotated[
        int | None, setting("Engines that only compute prompts. Their KV goes to those that generate.", metavar="N")
    ] = None
    decode_replicas: Annotated[
        int | None, setting("Engines that only generate, from KV that others have computed.", metavar="N")
    ] = None
    transfer_rate: Annotated[
        str | None,
        setting("Bytes a second of each transfer of KV, such as 25GB/s. Left out: transfers take no time.",
                metavar="RATE"),
    ] = None  # fmt: skip
    transfer_latency: Annotated[float, setting("Milliseconds of each transfer beside that.", metavar="MS")] = 0.0
    transfer: Annotated[
        TransferMode,
        setting("What is sent: the whole prompt, or only pages that the receiver does not have."),
    ] = "full-prompt"
    transfer_token_bytes: Annotated[
        int | None,
        setting("Bytes of KV of a token on a link.", metavar="N", default="those of the model"),
    ] = None

    def __post_init__(self) -> None:
        for field in ("prefill_replicas", "decode_replicas"):
            if getattr(self, field) is not None:
                check_whole(getattr(self, field), field, most=MOST_REPLICAS)
        check_number(self.transfer_latency, "transfer_latency", most=MOST_MS)
        if self.transfer not in get_args(TransferMode):
            raise SettingError(f"must be 'full-prompt' or 'missing', got {self.transfer!r}", "transfer")


class PoolConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Workers that are alike: as many as `each` has replicas."""

    role: Role
    each: ReplayConfig


class FleetConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One replay on a fleet: a pool of mixed workers, or one that computes prompts and one that generates.

    `bytes_per_s`: of each transfer; None: it takes `latency_ms` alone.
    """

    pools: tuple[PoolConfig, ...]
    bytes_per_s: float | None = None
    latency_ms: float = 0.0
    transfer: TransferMode = "full-prompt"
    token_bytes: int = 0

    def __post_init__(self) -> None:
        roles = [pool.role for pool in self.pools]
        if roles not in (["mixed"], ["prefill", "decode"]):
            raise SettingError(
                f"have the roles {', '.join(roles)}",
                "pools",
                hint="Give one mixed pool, or one prefill and one decode.",
            )
        if len({pool.each.page_size for pool in self.pools}) > 1:
            raise SettingError("have pages of different sizes", "pools", hint="KV goes from page to page.")
        if len({pool.each.profile for pool in self.pools}) > 1:
            raise SettingError("have different profiles", "pools")

    @property
    def first(self) -> ReplayConfig:
        """The engines that requests arrive at."""
        return self.pools[0].each

    @property
    def num_pages(self) -> int:
        """Pages of a worker of the last pool."""
        return self.pools[-1].each.num_pages

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self.first.page_size

    @property
    def replicas(self) -> int:
        """All workers."""
        return sum(pool.each.replicas for pool in self.pools)

    @property
    def slo(self) -> Slo:
        """For goodput."""
        return self.first.slo

    def to_builtins(self) -> dict[str, Any]:
        """Return what the report says of it."""
        return {
            "pools": [{"role": pool.role, **pool.each.to_builtins()} for pool in self.pools],
            "transfer": {
                "bytes_per_s": self.bytes_per_s,
                "latency_ms": self.latency_ms,
                "mode": self.transfer,
                "token_bytes": self.token_bytes,
            },
        }

    def replay(
        self,
        traffic: Traffic,
        *,
        on_progress: Callable[[int], object] | None = None,
        observers_of: Callable[[int], Sequence[EventReader]] | None = None,
    ) -> FleetReport:
        """Replay `traffic` and report, see `kvarts.replay`. `observers_of` answers what observes a worker."""
        from kvarts.fleet.replay import replay_fleet

        return replay_fleet(traffic, self, on_progress=on_progress, observers_of=observers_of)
