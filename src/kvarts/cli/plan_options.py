"""The inputs of `kvarts plan`, and the construction of a plan from them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvarts.base.errors import ConfigError
from kvarts.base.settings import SettingError, parts_of_error
from kvarts.cli.process import Progress, tell_whole_pages
from kvarts.cli.replaying import all_sections
from kvarts.plan.commands import CommandLines, command_line, of_host_memory
from kvarts.sim.traffic.settings import OF_TEXTS

if TYPE_CHECKING:
    from kvarts.base.settings import Given
    from kvarts.plan.fleet_search import FleetKinds
    from kvarts.plan.planning import Plan
    from kvarts.plan.replays import PlanProgress
    from kvarts.sim.config import ReplayConfig
    from kvarts.sim.traffic.trace import Trace

__all__ = ["PlanCall", "PlanOptions", "fleet_kinds"]

OUTPUTS = ("--set", "outputs=true")
GIVE_MODEL = "Give --model and --device."


@dataclass(frozen=True)
class PlanCall:
    """The argument and the options that several commands of `kvarts plan` have, with what is used where one has not."""

    trace: Path | None = None
    config_file: Path | None = None
    sizes: list[int] | None = None
    count_outputs: bool = False
    slo_share: float = 0.99
    cost_error: float | None = None
    quick: bool = False
    workers: int | None = None
    as_json: bool = False
    html_file: Path | None = None
    opens: bool = False
    plot_files: tuple[Path, ...] = ()

    @classmethod
    def taken_from(cls, values: dict[str, Any]) -> PlanCall:
        """Return the call with parameters of a command, and remove them from `values`."""
        return cls(**{each.name: values.pop(each.name) for each in fields(cls) if each.name in values})


class PlanOptions(CommandLines):
    """All options, and the trace. `config`: None if nothing is replayed.

    `own`: the options of the plan that belong in every command line of it that is printed. `command`: that of `kvarts
    plan`, which has the options `flags`.
    """

    def __init__(
        self,
        call: PlanCall,
        given: Given,
        traffic: Trace,
        config: ReplayConfig | None,
        *,
        own: Sequence[str],
        command: str,
        flags: Collection[str],
    ) -> None:
        self._call = call
        self._given = given
        self._traffic = traffic
        self._config = config
        self._own = own
        self._command = command
        self._flags = flags

    def plan(self, *more: str) -> str:
        """Return the command line of the plan; with `more`, that of another plan of the same trace."""
        command = ("plan", *([] if self._command == "slo" else [self._command]))
        changes = self._changes({})
        sections, trace, file = all_sections(), self._call.trace, self._call.config_file
        words = command_line(self._given, sections, trace, file, changes, command=command, options=self._flags)
        outputs = OUTPUTS if self._call.count_outputs else ()
        return " ".join(filter(None, (words, shlex.join([*outputs, *(more or self._own)]))))

    def replay(self, changes: Mapping[str, Any]) -> str:
        """Return the command line of a replay with `changes`, which is not of a start of vLLM where the plan is not."""
        if self._config is not None and self._config.not_started and "engine" not in self._given:
            changes = {"engine": "none", **changes}
        return command_line(
            self._given, all_sections(), self._call.trace, self._call.config_file, self._changes(changes)
        )

    def _changes(self, changes: Mapping[str, Any]) -> Mapping[str, Any]:
        if self._config is not None and self._config.whole_pages:
            return {"kv_groups": "off", **changes}  # what led to that may be an option of the plan
        return changes

    def make(
        self,
        *,
        page_size: int,
        policies: Sequence[str] = (),
        prices: Path | None = None,
    ) -> Plan:
        """Return the plan. Raise ConfigError that names options."""
        from kvarts.plan.planning import make_plan

        try:
            with _progress() as progress:
                return make_plan(
                    self._traffic,
                    self._config,
                    at=self._call.sizes,
                    page_size=page_size,
                    count_outputs=self._call.count_outputs,
                    policies=policies,
                    slo_share=self._call.slo_share,
                    cost_error=self._call.cost_error,
                    router=self._given["router"] if "router" in self._given else None,  # noqa: SIM401  (not a dict)
                    prices=prices,
                    quick=self._call.quick,
                    kv_bytes_per_token=None if self._config is None else self._token_bytes(),
                    commands=self,
                    workers=self._call.workers,
                    progress=progress,
                )
        except SettingError as error:
            raise _as_options(error) from error

    def users(self, low: int, high: int, prices: Path | None) -> dict[str, Any]:
        """Return how many users fit. `prices`: a file of them."""
        from kvarts.plan.users import plan_users

        config = self._timed("--users")
        try:
            with _progress() as progress:
                return plan_users(
                    self._traffic,
                    config,
                    (low, high),
                    commands=self,
                    slo_share=self._call.slo_share,
                    cost_error=self._call.cost_error,
                    prices=prices,
                    quick=self._call.quick,
                    workers=self._call.workers,
                    progress=progress,
                ).values
        except ConfigError as error:
            if error.field != "users":
                raise
            raise ConfigError(error.what, field="--users", hint="Give a trace with sessions.") from error

    def routers(self, names: str, ages: str | None, prices: Path | None) -> dict[str, Any]:
        """Return the comparison of routers. `names` and `ages`: lists separated by commas; `prices`: a file of them."""
        from kvarts.plan.routers import plan_routers
        from kvarts.sim.routers.policies import split_names

        config = self._timed("--routers")
        try:
            with _progress() as progress:
                return plan_routers(
                    self._traffic,
                    config,
                    split_names(names),
                    [] if ages is None else [age.strip() for age in ages.split(",")],
                    commands=self,
                    cost_error=self._call.cost_error,
                    prices=prices,
                    quick=self._call.quick,
                    workers=self._call.workers,
                    progress=progress,
                ).values
        except SettingError as error:
            of_names = ("router", "routers")
            error.fields = tuple("routers" if field in of_names else "router_ages" for field in error.fields)
            raise _as_options(error) from error

    def fleets(self, kinds: FleetKinds, prices: Path | None) -> dict[str, Any]:
        """Return the search among `kinds` of fleets. `prices`: a file of them."""
        from kvarts.plan.confidence import Goal
        from kvarts.plan.fleets import FleetsPlan
        from kvarts.plan.planning import prices_of

        with _progress() as progress:
            fleets = FleetsPlan(
                self._traffic,
                kinds,
                Goal(self._call.slo_share, self._call.cost_error, prices_of(prices, kinds.first.cost)),
                command=self.replay,
                workers=self._call.workers,
                progress=progress,
            ).to_builtins()
        return {
            "trace": self._traffic.name,
            "config": kinds.first.to_builtins(),
            "fleets": fleets,
            "advice": fleets["answer"],
        }

    def _timed(self, option: str) -> ReplayConfig:
        """Return the configuration of a replay with a cost model. Raise ConfigError that names `option` without one."""
        if self._config is None:
            raise ConfigError("needs a model and a device, or a cost", field=option, hint=GIVE_MODEL)
        return self._config

    def users_replay(self, users: int, copies: int, host_bytes: int, policy: str, settings: Mapping[str, Any]) -> str:
        """Return the command line of a replay of users, after that of the copies of the trace if it needs more."""
        changes: dict[str, Any] = {"concurrency": users, **settings}
        if host_bytes:
            assert self._config is not None
            changes |= of_host_memory(self._config, host_bytes, policy)
        if copies == 1:
            return self.replay(changes)
        if self._call.trace is None:
            return f"kvarts plan users --users {users}"
        # Lines of the copies do not contain the tokens per hash id, so the command line does.
        again = command_line(
            self._given,
            all_sections(),
            Path("users.jsonl"),
            self._call.config_file,
            {
                **changes,
                "trace_block_size": self._traffic.unit_tokens,
                **({"session_turns": "whole"} if "session_turns" in self._given else {}),  # as the copies are
                **dict.fromkeys(OF_TEXTS),
            },
        )
        scale = ["kvarts", "trace", "scale", str(self._call.trace), "--copies", str(copies), "-o", "users.jsonl"]
        scale += [word for key in OF_TEXTS if key in self._given for word in ("--set", f"{key}={self._given[key]}")]
        return f"{shlex.join(scale)} && {again}"

    def _token_bytes(self) -> int | None:
        from kvarts.sim.hardware import resolve_hardware

        facts = resolve_hardware(self._given)
        if "kv_bytes_per_token" in facts:
            return int(facts["kv_bytes_per_token"])
        key = "offload.kv_bytes_per_token"
        return int(self._given[key]) if key in self._given else None


def fleet_kinds(given: Given, most_devices: int, routers: str | None, stores: str | None) -> FleetKinds:
    """Return the kinds of fleets of a search. `routers` and `stores`: lists separated by commas.

    Raise ConfigError that names options.
    """
    from kvarts.plan.fleet_search import FleetKinds
    from kvarts.sim.routers.policies import split_names

    if not any(key in given for key in ("model", "device", "cost")):
        raise ConfigError("needs a model and a device, or a cost", field="--gpus", hint=GIVE_MODEL)
    try:
        kinds = FleetKinds(
            given,
            all_sections(),
            most_devices,
            routers=[] if routers is None else split_names(routers),
            stores=[] if stores is None else [size.strip() for size in stores.split(",")],
        )
    except SettingError as error:
        raise _as_options(error) from error
    tell_whole_pages(kinds.first)
    return kinds


@contextmanager
def _progress() -> Iterator[PlanProgress]:
    """Show the progress of a plan, which the value receives."""
    from kvarts.plan.replays import PlanProgress

    with Progress("planning", None, "replays") as progress:
        yield PlanProgress(progress.update, progress.firm_up)


def _as_options(error: SettingError) -> ConfigError:
    """Return `error` with options in place of the arguments of a plan."""

    def spelled(text: str) -> str:
        return re.sub(r"\{(\w+)\}", lambda match: _option(match[1]), text)

    what, hint, (field, *_) = parts_of_error(error)
    return ConfigError(spelled(what), field=_option(field), hint=hint and spelled(hint))


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
