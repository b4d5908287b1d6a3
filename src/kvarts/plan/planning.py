"""`kvarts.plan`: the memory that a trace needs, in one value that prints, plots and serialises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from kvarts.base.errors import ConfigError
from kvarts.base.processes import Processes
from kvarts.base.settings import SettingError
from kvarts.base.units import parse_rate
from kvarts.core.config import EngineConfig
from kvarts.plan.cache import CachePlan, GroupPlan, HitPlan, PricedTier, TiersPlan, best_buy, prefill_s_per_token
from kvarts.plan.commands import CommandLines, listed_tiers
from kvarts.plan.confidence import SLO_SHARE, Goal
from kvarts.plan.latency import NUM_POINTS, LatencyPlan
from kvarts.plan.purchases import Prices, load_prices
from kvarts.plan.replays import UNSEEN, PlanProgress
from kvarts.plan.serve_lines import offload_of_vllm, serve_lines
from kvarts.plan.tables import lead
from kvarts.sim.replay import replay_one, trace_of
from kvarts.sim.traffic.trace import NO_PREFIXES
from kvarts.sim.trials import ReplayTrials

if TYPE_CHECKING:
    from kvarts.sim.config import ReplayConfig
    from kvarts.sim.replay import Traffic
    from kvarts.sim.traffic.trace import Trace

__all__ = ["TOKEN_BYTES", "Plan", "make_plan", "prices_of"]

RATES = {"host": "50GB/s", "disk": "5GB/s"}
"""The bandwidth from each tier, if none is configured."""
FLEET_VALUES = (
    "devices",
    "device_hours",
    "goodput_per_s",
    "goodput_per_s_per_device",
    "slo_ratio",
    "hit_ratio",
)
"""Values of a fleet that its options and the columns of a plan of fleets have."""
REPLAYED = ("fleets", "users", "routers")
"""Kinds of plans that have no sizes of memory."""
OF_FLEET = ("name", *FLEET_VALUES, "on_front", "command")
"""Columns of a plan of fleets."""
TOKEN_BYTES = 131_072
"""KV bytes per token of Llama 3.1 8B in 16 bits, assumed if there is no model."""


class Plan:
    """Hits and latencies for each size of KV memory on a trace, as tables, a page, a figure, and JSON-able `values`.

    `values` contains the curve of hits over all sizes, its knees, and the sizes examined (`at`) with their optimum; of
    KV groups, `groups` has curve and knees.
    With a configuration it also contains memory below the device (`tiers`), and replays with recommendations
    (`latency`). A plan of fleets contains `fleets` instead, one of users `users`, and one of routers `routers`. The
    reference lists all fields.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    @classmethod
    def of_replays(cls, trace: Trace, config: ReplayConfig, advice: str, **found: Any) -> Plan:
        """Return a plan that has the results `found`, by their kind, of replays of `config`."""
        return cls(
            {
                "trace": trace.name,
                "setting": f"pages of {config.page_size} tokens, {config.num_pages:,} a replica",
                "config": config.to_builtins(),
                **found,
                "advice": advice,
            }
        )

    @property
    def advice(self) -> str:
        """The result of the plan in one or two sentences."""
        return str(self.values["advice"])

    @property
    def options(self) -> list[dict[str, Any]]:
        """The recommendations, the cheapest that keeps the SLO first; empty without a configuration.

        Of users: how many fit, with and without host memory; of routers: the best.
        """
        if "users" in self.values:
            return list(self.values["users"]["answers"])
        if "routers" in self.values:
            return [self.values["routers"]["best"]]
        found = self.values.get("fleets") or self.values.get("latency") or {}
        return list(found.get("options", []))

    def hit_ratio(self, num_pages: int) -> float:
        """Return the share of prompt tokens that are hits in `num_pages`, one request at a time, with LRU eviction.

        Where KV groups are counted, it is interpolated between simulated sizes.
        """
        curve = (self.values.get("groups") or self.values)["curve"]
        return float(np.interp(num_pages, curve["pages"], curve["hit_ratio"], left=0.0))

    def to_text(self) -> str:
        """Return the tables that `kvarts plan` prints, with a line end."""
        from kvarts.plan.tables import render_plan

        return render_plan(self.values)

    def to_html(self) -> bytes:
        """Return the self-contained page that `kvarts plan --html` writes."""
        from kvarts.plan.page import render_page

        return render_page(self.values)

    def to_json(self) -> bytes:
        """Return `values` as indented JSON, with a line end."""
        return msgspec.json.format(msgspec.json.encode(self.values), indent=2) + b"\n"

    @property
    def parts(self) -> list[str]:
        """Names of the tables that `to_pandas` returns; the first is its default."""
        first = next((kind for kind in REPLAYED if kind in self.values), "sizes")
        return [first, *(name for name, rows in self._rows.items() if rows)]

    @property
    def _rows(self) -> dict[str, list[dict[str, Any]]]:
        """The rows of the parts, by name, other than the first part."""
        values = self.values
        curve = (values.get("groups") or values).get("curve") or {}
        latency, tiers = values.get("latency") or {}, values.get("tiers") or {}
        return {
            "curve": [dict(zip(curve, row, strict=True)) for row in zip(*curve.values(), strict=True)],
            "league": values.get("league") or [],
            "options": self.options,
            "replays": latency.get("points") or [],
            "host_memory": tiers.get("curve") or [],
            "disk": tiers.get("disk_curve") or [],
        }

    def to_pandas(self, part: str | None = None) -> Any:
        """Return a part of the plan as a pandas.DataFrame. `part`: one of `parts`.

        `sizes`, by default: a row per size examined: hits, optimum, evicted tokens. `curve`: the hit ratio of all
        sizes. `league`: a row per policy and size. `options`: the recommendations; `replays`: what they were chosen
        from. `host_memory`, `disk`: hits by the size of that tier. `fleets`, of a plan of fleets: a row per fleet;
        `users` and `routers`, of such plans: a row per number of users, and per router. Values in tables have columns
        named after both: `ttft_ms_p99`. Raise ConfigError for an unknown part.
        """
        from kvarts.base.columns import columns_of, to_frame

        if part is not None and part not in self.parts:
            raise ConfigError(f"{part!r} is not in this plan", field="part", hint=f"It has {', '.join(self.parts)}.")
        if part is not None and part != self.parts[0]:
            return to_frame(columns_of(self._rows[part]))
        if "fleets" in self.values:
            points = self.values["fleets"]["points"]
            return to_frame({name: [point[name] for point in points] for name in OF_FLEET})
        if self.parts[0] != "sizes":
            return to_frame(columns_of(self.values[self.parts[0]]["points"]))
        names: tuple[str, ...] = ("pages", "tokens", "hit_ratio", "optimum_hit_ratio", "hit_tokens")
        at = self.values["at"]
        if "groups" in self.values:
            names = (*names, "group_hit_ratio", "group_optimum_hit_ratio")
        columns = {name: [point[name] for point in at] for name in names}
        kinds = at[0]["computed_tokens"] if at else {}
        columns |= {f"{kind}_tokens": [point["computed_tokens"][kind] for point in at] for kind in kinds}
        return to_frame(columns)

    def plot(self) -> Any:
        """Return the charts of the page as a matplotlib Figure. Raise ConfigError if matplotlib is not installed."""
        from kvarts.plan.page import figure_of
        from kvarts.sim.report.pictures import check_installed

        check_installed("plot")
        return figure_of(self.values)

    def __repr__(self) -> str:
        return f"<Plan for {self.values['trace']}: {self.advice}>"

    def _repr_html_(self) -> str:
        from kvarts.plan.page import summary_html

        return summary_html(self.values)


def make_plan(
    traffic: Traffic,
    config: ReplayConfig | None = None,
    *,
    at: Sequence[int] | None = None,
    page_size: int | None = None,
    count_outputs: bool = False,
    policies: Sequence[Any] = (),
    slo_share: float = SLO_SHARE,
    cost_error: float | None = None,
    router: Any = None,
    prices: Prices | Path | str | None = None,
    quick: bool = False,
    kv_bytes_per_token: int | None = None,
    commands: CommandLines | None = None,
    workers: int | None = 1,
    progress: PlanProgress = UNSEEN,
) -> Plan:
    """Plan KV memory for `traffic`; with `config`, also replay some of the sizes.

    `at`: sizes to examine, in pages; default: the knees and the sizes for round shares of the hits. `page_size`: that
    of `config` by default, or 16. `count_outputs`: generated tokens that the trace does not contain occupy pages too.
    `policies`: eviction policies to compare with LRU, as names, module:Class, classes or objects. If `config` has an
    SLO, the plan finds the cheapest devices and host memory that keep it for `slo_share` of the requests, and how far
    traffic and step times, by `cost_error`, may differ; `quick` leaves out the traffic. `router`: that of several
    replicas, as a name, module:Class, a class or an object; default: the class in `config`, else prefix. `prices`:
    Prices, or a file of them; default: relative ones.
    `kv_bytes_per_token`: that of the model of `config` by default. `commands`: builds the command lines of points.
    `workers`: processes that replay, with the same result; more than one requires a script that can be imported; None:
    one per core, where that pays. `progress`: receives how far the plan is. An interrupt after the curve
    is known returns what was found.

    Raise ConfigError for incompatible arguments, InputError for a trace that cannot be read.
    """
    trace = trace_of(traffic)
    answers = commands or CommandLines()
    if config is None and prices is not None:
        raise SettingError("needs a model and a device, or a cost", "prices", hint="Give {model} and {device}.")
    known = None if config is None else prices_of(prices, config.cost)
    goal = Goal(slo_share, cost_error, known or Prices(), quick)
    if config is not None:
        config = config.of_trace(trace)
    if page_size is None:
        page_size = EngineConfig().page_size if config is None else config.page_size
    curves = CachePlan(trace, page_size, count_outputs=count_outputs)
    with Processes(workers, trace) as processes:
        counted: HitPlan = curves
        groups = None
        if config is not None and config.kv_groups != "off":
            counted = groups = GroupPlan(curves, config.certain, processes)
        sizes = at
        if at is None and config is not None:
            sizes = sorted({*counted.default_sizes(), config.num_pages})
        values = curves.to_builtins(sizes)
        if groups is not None:
            _count_groups(values, groups)
        values["is_complete"] = True
        values["config"] = None if config is None else config.to_builtins()
        values["command"] = answers.plan()
        for point in values["at"]:
            point["command"] = answers.plan("--at", str(point["pages"]))
        try:
            if config is not None and trace.knows_prefixes:
                progress.on_answer(lead(values), NUM_POINTS)
            if policies:
                values |= _league(counted, policies, config, at, goal, answers, progress, processes)
            if config is not None:
                if not _has_slo(config):
                    values["tiers"] = _tiers(
                        counted,
                        config,
                        None if prices is None else known,
                        kv_bytes_per_token,
                        answers,
                        progress,
                        processes,
                    )
                latency = LatencyPlan(
                    counted,
                    config,
                    goal,
                    command=answers.replay,
                    reused_pages=curves.curve.most_pages if trace.knows_prefixes else 0,
                    router=_router_of(router, config),
                    progress=progress,
                    processes=processes,
                )
                values["latency"] = latency.to_builtins()
                values["is_complete"] = latency.is_complete
                for option in values["latency"]["options"]:
                    option["serve"] = serve_lines(config, option)
        except KeyboardInterrupt:
            values["is_complete"] = False
    if not trace.knows_prefixes:
        _forget_hits(values)
    values["advice"] = lead(values)
    return Plan(values)


def _has_slo(config: ReplayConfig) -> bool:
    return any(getattr(config.slo, field) is not None for field in config.slo.__struct_fields__)


def prices_of(prices: Prices | Path | str | None, cost: Any) -> Prices:
    """Return prices as Prices: those of a file for the device of `cost`, and relative ones by default."""
    if prices is None or isinstance(prices, Prices):
        return prices or Prices()
    return load_prices(Path(prices), getattr(cost, "device", None))


def _router_of(router: Any, config: ReplayConfig) -> Any:
    if router is None:
        return config.router if callable(config.router) else "prefix"
    return msgspec.structs.replace(config, router=router).router  # an object becomes what copies it


def _forget_hits(values: dict[str, Any]) -> None:
    """Remove from a plan what depends on hits, of a trace in which they cannot be known."""
    values["unknown_hits"] = NO_PREFIXES
    for name in ("league", "league_lead", "groups", "tiers"):
        values.pop(name, None)
    values.update(at=[], knees=[], most_hit_ratio=None, most_pages=None, pages_for_share_of_hits={})
    values["curve"] = {name: [] for name in values["curve"]}
    latency = values.get("latency")
    if latency is not None:
        latency["options"] = [option for option in latency["options"] if option["name"] not in ("knee", "best")]
        for point in latency["points"]:
            point["predicted_hit_ratio"] = None


def _count_groups(values: dict[str, Any], groups: GroupPlan) -> None:
    """Add the hits with KV groups, in as much memory, to the values of whole pages."""
    groups.look(point["pages"] for point in values["at"])
    for point in values["at"]:
        found = groups.point(point["pages"])
        point["group_hit_ratio"] = found["hit_ratio"]
        point["group_optimum_hit_ratio"] = found["optimum_hit_ratio"]
    values["groups"] = {**groups.sizes_to_builtins(), "curve": groups.curve_to_builtins()}


def _league(
    curves: HitPlan,
    policies: Sequence[Any],
    config: ReplayConfig | None,
    sizes: Sequence[int] | None,
    goal: Goal,
    commands: CommandLines,
    progress: PlanProgress,
    processes: Processes,
) -> dict[str, Any]:
    """Return a row per policy and size, rows of replays, and the one that gains most; None without replays.

    `sizes`: None: the main knee and half of it.
    """
    from kvarts.plan.league import League

    try:
        league = League(
            curves,
            policies,
            config=config,
            command=lambda name, pages: commands.plan("--policy", name, "--at", str(pages)),
            replay_command=lambda name, pages: commands.replay({"eviction": name, "pages": pages}),
            on_replay=progress.on_replay,
            processes=processes,
        )
    except ConfigError as error:
        raise SettingError(error.what, "policy", hint=error.hint) from error
    rows = league.to_builtins(sizes if sizes is not None else curves.sizes_under_pressure)
    if config is None:
        return {"league": rows}
    return {"league": rows, "league_lead": league.lead(rows, goal.error(config, curves.trace))}


def _tiers(
    curves: HitPlan,
    config: ReplayConfig,
    known: Prices | None,
    token_bytes: int | None,
    commands: CommandLines,
    progress: PlanProgress,
    processes: Processes,
) -> dict[str, Any]:
    """Return the curve over host memory, and the savings of the next GiB of each tier."""
    if config.kv_groups != "off":
        page_bytes, unit_bytes = config.page_bytes, config.memory.block_bytes
    else:
        if token_bytes is None:
            token_bytes = TOKEN_BYTES if config.placement is None else config.placement.kv_bytes_per_token
        page_bytes = unit_bytes = token_bytes * config.page_size
    hardware = getattr(config.cost, "hardware", None)
    prices = {} if known is None else known.per_gib(None if hardware is None else hardware.memory_bytes)
    tiers = [PricedTier(name="device", pages=config.num_pages * config.replicas, price=prices.get("device"))]
    rates = _rates(config)
    for name, rate in rates.items():
        pages = config.tiers.get(name, 0) * unit_bytes // page_bytes * config.replicas
        tiers.append(PricedTier(name=name, pages=pages, bytes_per_s=rate, price=prices.get(name)))
    trials = ReplayTrials(
        replay_one, curves.trace, config, is_asked=True, on_replay=progress.on_replay, processes=processes
    )
    most_bytes = 0 if config.kv_groups == "off" else curves.most_below([0]) * page_bytes
    base = trials.replayed(0) if trials.can_have_host_memory else None
    found = None if base is None else trials.host_memory(base, most_bytes)
    also = {} if found is None else {next(iter(rates)): [found.num_bytes // page_bytes * config.replicas]}
    num_tokens = max(1, curves.num_prompt_tokens // max(1, len(curves.trace.requests or ())))
    values = TiersPlan(
        curves,
        tiers,
        page_bytes=page_bytes,
        s_per_token=prefill_s_per_token(config, num_tokens),
        replayed=lambda points: _replayed(trials, points, page_bytes, config),
        also=also,
    ).to_builtins()
    for curve in ("curve", "disk_curve"):
        for point in values[curve]:
            point["command"] = _tiers_command(point["pages"], config, commands)
    values["best_buy"] = best_buy(values)
    values["least_host"] = None if found is None else msgspec.to_builtins(found)
    if found is not None and base is not None and any(tier.pages for tier in tiers[2:]):
        values["least_host"]["hit_ratio_without"] = base["prefix_hit_ratio"]  # the curve has what is below
    values["kv_transfer_config"] = None
    if found is not None and not config.plans_batches:
        values["kv_transfer_config"] = offload_of_vllm(found.num_bytes, "eager")
    return values


def _rates(config: ReplayConfig) -> dict[str, int]:
    """Return the bandwidth from each tier below the device."""
    if config.offload is not None:
        return config.offload.read_rates
    return {name: parse_rate(rate) for name, rate in RATES.items()}


def _tiers_command(pages: Mapping[str, int], config: ReplayConfig, commands: CommandLines) -> str:
    """Return the command that replays with `pages` per tier, over all replicas; the plan's if no replay can."""
    below = {name: pages[name] // config.replicas for name in _rates(config)}
    if listed_tiers(config):
        return commands.replay({f"tier.{name}.pages": size for name, size in below.items()})
    first, *others = below.values()
    if any(others) and not first:
        return commands.plan()
    changes: dict[str, Any] = {f"offload.{name}_memory": False for name in below}
    return commands.replay({**changes, **{f"offload.{name}_pages": size for name, size in below.items() if size}})


def _replayed(
    trials: ReplayTrials, points: Sequence[Sequence[PricedTier]], page_bytes: int, config: ReplayConfig
) -> list[dict[str, Any] | None]:
    """Return the results of replays with tiers, given for all replicas together; None if one is not possible.

    Files need host memory above them, except in a list of tiers.
    """
    sizes = [tuple(tier.pages // config.replicas * page_bytes for tier in tiers[1:]) for tiers in points]
    is_list = bool(listed_tiers(config))
    possible = [each for each in sizes if (is_list or each[0] or not any(each)) and trials.can_have_host_memory]
    summaries = dict(zip(possible, trials.all_replayed(possible), strict=True))
    return [
        {
            "hit_ratio": summary["prefix_hit_ratio"],
            "hit_ratio_by_tier": summary["prefix_hit_ratio_by_tier"],
            "ttft_ms": summary["ttft_ms"],
        }
        if (summary := summaries.get(each)) is not None
        else None
        for each in sizes
    ]
