"""What `kvarts plan` was asked, and how the parts of a plan are made from it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvarts.cli.plan_command import command_line
from kvarts.cli.plan_policy import find_on_path
from kvarts.cli.replay import all_sections
from kvarts.errors import ConfigError
from kvarts.units import parse_bytes, parse_rate

if TYPE_CHECKING:
    from kvarts.plan.cache import CachePlan
    from kvarts.settings import Given
    from kvarts.sim.config import ReplayConfig
    from kvarts.traffic.trace import Trace

__all__ = ["TIER_NAMES", "Asked"]

TIER_NAMES = ("device", "host", "disk")
RATES = {"host": ("offload.h2d", "50GB/s"), "disk": ("offload.disk_read", "5GB/s")}
TOKEN_BYTES = 131_072
"""Of Llama 3.1 8B in 16 bits, where nothing says it."""
SHORTEST, LONGEST = 1, 200


class Asked:
    """Everything that was given, and the trace. `config`: None where nothing is replayed.

    `options`: those of the command itself that belong into the command line of any part of the plan.
    """

    def __init__(
        self,
        given: Given,
        trace: Path | None,
        config_file: Path | None,
        traffic: Trace,
        config: ReplayConfig | None,
        slo_share: float,
        cost_error: float | None,
        options: Sequence[str],
    ) -> None:
        self._given = given
        self._trace = trace
        self._config_file = config_file
        self._traffic = traffic
        self._config = config
        self._slo_share = slo_share
        self._cost_error = cost_error
        self._options = options
        self._num_replays = 0

    def plan_command(self, *more: str) -> str:
        """Return the command line of a plan with what was given, and `more` options."""
        words = shlex.split(self._replay_command({}))
        return shlex.join(["kvarts", "plan", *words[2:], *self._options, *more])

    def latency(self, plan: CachePlan) -> dict[str, Any]:
        """Return replays, options, and the largest rate."""
        from kvarts.plan.latency import LatencyPlan

        assert self._config is not None
        found = LatencyPlan(
            plan,
            self._config,
            command=self._replay_command,
            slo_share=self._slo_share,
            cost_error=self._cost_error,
            router=self._given["router"] if "router" in self._given else "prefix",  # noqa: SIM401  (no dict)
            on_replay=self._on_replay,
        ).to_builtins()
        self._end_progress()
        return found

    def league(
        self, plan: CachePlan, policies: Sequence[str], all_of_them: bool, sizes: Sequence[int] | None
    ) -> list[dict[str, Any]]:
        """Return a row for each policy: at the sizes given, or else the knee; replayed too where there is a model."""
        from kvarts.plan.league import ALL_POLICIES, League

        try:
            league = League(
                plan,
                [*(ALL_POLICIES if all_of_them else ()), *policies],
                config=self._config,
                find=find_on_path,
                command=lambda name, pages: self.plan_command("--policy", name, "--at", str(pages)),
                replay_command=lambda name: self._replay_command({"eviction": name}),
                on_replay=self._on_replay,
            )
        except ConfigError as error:
            raise ConfigError(error.what, field="--policy", hint=error.hint) from error
        rows = league.to_builtins(sizes if sizes is not None else [plan.main_knee])
        self._end_progress()
        return rows

    def tiers(self, plan: CachePlan, prices: dict[str, float] | None) -> dict[str, Any]:
        """Return the curve over host memory, and what the next GiB of each tier saves."""
        from kvarts.plan.tiers import Tier, TiersPlan, best_buy, prefill_s_per_token

        config = self._config
        assert config is not None
        token_bytes = self._token_bytes()
        prices = prices or {}
        tiers = [Tier(name="device", pages=config.num_pages * config.replicas, price=prices.get("device"))]
        for name, (key, default) in RATES.items():
            rate = self._given[key] if key in self._given else default  # noqa: SIM401  (no dict)
            tiers.append(
                Tier(
                    name=name,
                    pages=self._pages_below(name, token_bytes * config.page_size),
                    bytes_per_s=rate if isinstance(rate, int) else parse_rate(rate),
                    price=prices.get(name),
                )
            )
        num_tokens = max(1, plan.num_prompt_tokens // max(1, len(self._traffic.requests or ())))
        s_per_token = prefill_s_per_token(config, num_tokens)
        values = TiersPlan(plan, tiers, kv_bytes_per_token=token_bytes, s_per_token=s_per_token).to_builtins()
        values["best_buy"] = best_buy(values)
        return values

    def users(self, low: int, high: int) -> dict[str, Any]:
        """Return how many users fit."""
        from kvarts.plan.users import UsersPlan

        if self._config is None:
            raise ConfigError(
                "needs a model and a device, or a cost", field="--users", hint="Give --model and --device."
            )
        try:
            users = UsersPlan(
                self._traffic,
                self._config,
                low,
                high,
                command=self._users_command,
                slo_share=self._slo_share,
                on_replay=self._on_replay,
            )
        except ConfigError as error:
            raise ConfigError(error.what, field="--users", hint="Give a trace with sessions.") from error
        values = {
            "trace": self._traffic.name,
            "setting": f"pages of {self._config.page_size} tokens, {self._config.num_pages:,} a replica",
            "users": users.to_builtins(),
            "command": self.plan_command("--users", f"{low}..{high}"),
        }
        self._end_progress()
        return values

    def _users_command(self, users: int, copies: int) -> str:
        if copies == 1:
            return self._replay_command({"concurrency": users})
        if self._trace is None:
            return f"kvarts plan --users {users}"
        # What the trace is copied to says itself nothing about its ids.
        again = command_line(
            self._given,
            all_sections(),
            Path("users.jsonl"),
            self._config_file,
            {"concurrency": users, "trace_block_size": self._traffic.unit_tokens},
        )
        scale = ["kvarts", "trace", "scale", str(self._trace), "--copies", str(copies), "-o", "users.jsonl"]
        return f"{shlex.join(scale)} && {again}"

    def _replay_command(self, changes: dict[str, Any]) -> str:
        return command_line(self._given, all_sections(), self._trace, self._config_file, changes)

    def _token_bytes(self) -> int:
        from kvarts.sim.hardware import resolve_hardware

        facts = resolve_hardware(self._given)
        if "kv_bytes_per_token" in facts:
            return int(facts["kv_bytes_per_token"])
        key = "offload.kv_bytes_per_token"
        return int(self._given[key]) if key in self._given else TOKEN_BYTES

    def _pages_below(self, name: str, page_bytes: int) -> int:
        pages, memory = f"offload.{name}_pages", f"offload.{name}_memory"
        if pages in self._given:
            return int(self._given[pages])
        if memory in self._given:
            size = self._given[memory]
            return (size if isinstance(size, int) else parse_bytes(size)) // page_bytes
        return 0

    def _on_replay(self) -> None:
        self._num_replays += 1
        if sys.stderr.isatty():
            click.echo(f"\rkvarts: replay {self._num_replays}", err=True, nl=False)

    def _end_progress(self) -> None:
        if sys.stderr.isatty() and self._num_replays:
            click.echo(err=True)
