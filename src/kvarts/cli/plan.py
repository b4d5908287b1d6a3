"""`kvarts plan` and `kvarts sweep`."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from kvarts.base.errors import ConfigError
from kvarts.base.files import check_outputs, check_writable, is_standard_output, write_whole
from kvarts.base.limits import MOST_PAGES, brief
from kvarts.base.settings import given_by_flags
from kvarts.cli.effects import NO_REPLAY, check_effects
from kvarts.cli.options import DIRECTORY, INPUT, OUTPUT, Command, grouped, open_option, options_of
from kvarts.cli.outputs import check_opening, open_page
from kvarts.cli.parts import engine_options, load_parts, with_engine_options
from kvarts.cli.plan_options import PlanOptions, fleet_kinds
from kvarts.cli.process import Progress, print_json, print_text, tell_whole_pages
from kvarts.cli.replaying import all_sections, load_traffic, over_sample_settings, paths_in, read_settings, set_by
from kvarts.core.config import EngineConfig
from kvarts.plan.policy import check_policy, with_policy
from kvarts.sim.config import resolve_replay

if TYPE_CHECKING:
    from kvarts.base.settings import Given

__all__ = ["Pictures", "plan_command", "sweep_command"]

MOST_USERS = 100_000
OWN = ("sizes", "policies", "league", "prices", "slo_share", "cost_error", "curves_only")
# A test compares these names with the league's.
POLICY_NAMES = "auto, soonest-return, hinted, session-aware"

curves = grouped("Cache curves")
latencies = grouped("Latencies")
fleets = grouped("Fleets")
more = grouped("Next to the curve")
results = grouped("Results")
PICTURES = ("png", "svg")


class Pictures:
    """The files of charts, checked before anything is computed. Raises ConfigError and OutputError."""

    def __init__(self, html_file: Path | None, plot_files: tuple[Path, ...], *, opens: bool) -> None:
        check_opening(html_file, opens=opens)
        self._opens = opens
        self._html_file = html_file
        self._plot_files = plot_files
        self.paths = [*plot_files, *([html_file] if html_file is not None else [])]
        if plot_files:
            from kvarts.sim.report.pictures import check_installed

            check_installed("--plot")
        for path in self.paths:
            check_writable(path)

    @property
    def are_printed(self) -> bool:
        """Whether one of the files is standard output; then nothing else is printed there."""
        return any(map(is_standard_output, self.paths))

    def write(self, values: dict[str, Any]) -> None:
        """Write all files."""
        if self._html_file is not None:
            from kvarts.plan.page import render_page

            write_whole(self._html_file, render_page(values))
            open_page(self._html_file, opens=self._opens)
        for path in self._plot_files:
            from kvarts.plan.page import draw

            write_whole(path, draw(values, "png" if path.suffix == ".png" else "svg"))


def _options() -> list[click.Parameter]:
    by_flag: dict[str, click.Option] = {}
    several = [section for part in load_parts() if not part.of_one_model for section in part.sections]
    for option in options_of(section for section in all_sections() if section not in several):
        by_flag.setdefault(option.opts[0], option)
    by_flag.update({option.opts[0]: option for option in engine_options()})
    return [click.Argument(["trace"], required=False, type=INPUT), *by_flag.values()]


def _is_count(text: str, most: int) -> bool:
    """Return whether `text` is a whole number from 1 to `most`."""
    return text.isascii() and text.isdecimal() and len(text) <= len(str(most)) and 1 <= int(text) <= most


class _Sizes(click.ParamType[Any]):
    """Sizes in pages, separated by commas."""

    name = "sizes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the sizes in the given order."""
        if not isinstance(value, str):
            return value
        sizes = [part.strip().replace("_", "") for part in value.split(",")]
        if not all(_is_count(size, MOST_PAGES) for size in sizes):
            self.fail(
                f"{brief(value)} is not a list of whole numbers from 1 to {MOST_PAGES:,}, such as 4000,16000",
                param,
                ctx,
            )
        return [int(size) for size in sizes]


class _Prices(click.ParamType[Any]):
    """Prices of tiers, by name."""

    name = "prices"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the prices by name."""
        if not isinstance(value, str):
            return value
        prices: dict[str, float] = {}
        for part in value.split(","):
            name, _, text = part.strip().partition("=")
            try:
                price = float(text)
            except ValueError:
                price = -1.0
            if not name or not 1e-12 <= price <= 1e12:
                self.fail(f"{brief(part)} is not TIER=X, the name of a tier and a number above 0", param, ctx)
            prices[name] = price
        return prices


class _Range(click.ParamType[Any]):
    """A range of whole numbers such as 1..200, or a single number."""

    name = "range"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return both ends."""
        if not isinstance(value, str):
            return value
        low, dots, high = value.partition("..")
        ends = [low, high if dots else low]
        if not all(_is_count(end, MOST_USERS) for end in ends):
            self.fail(f"{brief(value)} is not a range such as 1..200, up to {MOST_USERS:,}", param, ctx)
        if int(ends[0]) > int(ends[1]):
            self.fail(f"{brief(value)} ends before it begins", param, ctx)
        return int(ends[0]), int(ends[1])


@click.command("plan", cls=Command, params=_options(), no_args_is_help=False, checks_effects=True)
@click.option("--config", "config_file", metavar="FILE", type=INPUT,
              help="TOML file with these settings by their long names, and trace or a [workload] table. Options given "
              "here win.")  # fmt: skip
@results("--json", "as_json", is_flag=True, help="Print the plan as JSON instead of tables.")
@results("--html", "html_file", metavar="FILE", type=OUTPUT,
         help="Write a page with charts to FILE, which needs nothing else.")  # fmt: skip
@open_option(results)
@results("--plot", "plot_files", metavar="FILE", type=OUTPUT, multiple=True,
         help="Write the charts to FILE: a PNG if it ends in .png, else an SVG. Needs kvarts[plan].")  # fmt: skip
@curves("--at", "sizes", metavar="PAGES", type=_Sizes(),
        help="Sizes to look at, such as 4000,16000. [the knees, and sizes for 50 to 100 % of the hits]")  # fmt: skip
@curves("--outputs", "count_outputs", is_flag=True,
        help="Let generated tokens that are not known take pages as well, as an engine's do.")  # fmt: skip
@more(
    "--policy",
    "policies",
    metavar="NAME",
    multiple=True,
    help="An eviction policy to compare with LRU: " + POLICY_NAMES + ", or module:Class. May be given again.",
)
@more("--league", is_flag=True, help="Compare all of these.")
@more(
    "--price",
    "prices",
    metavar="TIER=X,..",
    type=_Prices(),
    help="Price of a GiB of device, host and disk memory: the plan also prints what the next GiB of each saves per "
    "price.",
)
@latencies(
    "--users",
    metavar="LOW..HIGH",
    type=_Range(),
    help="Find how many users fit: sessions of the trace in a closed loop, LOW to HIGH at a time.",
)
@latencies(
    "--routers",
    metavar="NAME,..",
    help="Compare these routers on the trace, with --replicas: prefix,llm-d:prefix=3,queue=2,dynamo-kv. With --gpus: "
    "those that are tried. [prefix,least-loaded]",
)
@latencies(
    "--router-ages",
    "ages",
    metavar="TIME,..",
    help="Compare them with metrics and cache events of this age: 0,50ms,1s.",
)
@fleets(
    "--gpus",
    metavar="N",
    type=click.IntRange(min=1),
    help="Search for fleets of at most N devices: mixed workers, or prefill and decode apart, of all tensor parallel "
    "sizes, behind --routers.",
)
@fleets(
    "--store-sizes",
    metavar="SIZE,..",
    help="Also try a store of this size that all workers share: 500GiB,2TiB. [no store]",
)
@click.option("--workers", metavar="N", type=click.IntRange(min=1),
              help="Processes that replay. [as many as there are cores, if the plan takes longer than a "
              "second]")  # fmt: skip
@latencies("--slo-share", metavar="X", type=click.FloatRange(0, 1, min_open=True), default=0.99,
           help="An SLO is kept where this share of the requests keeps it. [0.99]")  # fmt: skip
@latencies("--cost-error", metavar="X", default=None, type=click.FloatRange(0, 1, min_open=True, max_open=True),
           help="Error of the cost model as a share: the search is repeated with steps shorter and longer by it. "
                "[its error in 1 of 10 measurements; 0.15 if nothing was measured]")  # fmt: skip
@latencies("--curves-only", is_flag=True, help="Replay nothing, also where model and device are given.")
def plan_command(
    trace: Path | None,
    config_file: Path | None,
    as_json: bool,
    sizes: list[int] | None,
    count_outputs: bool,
    slo_share: float,
    cost_error: float | None,
    curves_only: bool,
    policies: tuple[str, ...],
    league: bool,
    prices: dict[str, float] | None,
    users: tuple[int, int] | None,
    routers: str | None,
    ages: str | None,
    gpus: int | None,
    store_sizes: str | None,
    workers: int | None,
    html_file: Path | None,
    opens: bool,
    plot_files: tuple[Path, ...],
    **params: Any,
) -> None:
    """Print what each size of KV memory buys on a TRACE: hits at all sizes at once, with the best that is possible.

    TRACE is as in `kvarts replay`; without it, the bundled sample is used. With a model and a device, or a cost, some
    sizes are also replayed; with an SLO, the plan has the smallest size that keeps it, and the largest rate; with
    --gpus, the fewest devices that keep it, and in which pools. The plan is printed on standard output, everything
    else on standard error.
    """
    from kvarts.plan import tables
    from kvarts.plan.fleet_search import given_of_fleets
    from kvarts.plan.tables import render_fleets

    sections = all_sections()
    given = with_engine_options(params, given_by_flags(params, sections)).over(read_settings(config_file, sections))
    if several := given.names("models"):
        hint = "Plan for each alone, or replay them on one device."
        raise given.error(f"[models.{several[0]}]", "a plan is for one model", hint=hint)
    pictures = Pictures(html_file, plot_files, opens=opens)
    if trace is None and config_file is None:
        given = over_sample_settings(given, sections)
    replays = not curves_only and any(key in given for key in ("model", "device", "cost"))
    is_other = curves_only or users is not None or routers is not None or gpus is not None
    facts = () if replays or is_other else (NO_REPLAY,)
    check_effects(click.get_current_context(), is_set=set_by(given, sections), facts=facts)
    named = [given.path_of("trace")] if "trace" in given else []
    check_outputs(pictures.paths, [*named, *paths_in(given)])
    check_policy(given)
    if gpus is not None:
        kinds = fleet_kinds(given, gpus, routers, store_sizes)
        traffic = load_traffic(given, trace)
        options = PlanOptions(given, trace, config_file, traffic, None, slo_share, cost_error, [], [], workers)
        values = options.fleets(kinds)
        words = ["--gpus", f"{gpus}"]
        words += [] if routers is None else ["--routers", routers]
        words += [] if store_sizes is None else ["--store-sizes", store_sizes]
        values["command"] = options.plan(*words, *_own_options(click.get_current_context()))
        pictures.write(values)
        if not pictures.are_printed:
            _print(values, as_json, render_fleets)
        return
    config = None
    if replays:
        of_plan = {"plan": "plan"}
        if typed := [key for key in given_of_fleets(given) if given.source_of(key).path is None]:
            of_plan["pools"] = typed[0]
        if ages is not None:
            of_plan["late_events"] = "router_ages"
        config = resolve_replay(given, sections, asked=of_plan)
        tell_whole_pages(config)
    traffic = load_traffic(given, trace)
    if config is not None:
        config = with_policy(config, given, traffic)
    if not traffic.knows_prefixes:
        click.echo("kvarts: the trace does not identify prefixes that prompts share: no curve rises above 0", err=True)
    outputs = ["--outputs"] if count_outputs else []
    own = _own_options(click.get_current_context())
    options = PlanOptions(given, trace, config_file, traffic, config, slo_share, cost_error, outputs, own, workers)
    if users is not None:
        values = options.users(*users)
        values["command"] = options.plan("--users", f"{users[0]}..{users[1]}", *own)
        pictures.write(values)
        if not pictures.are_printed:
            _print(values, as_json, tables.render_users)
        return
    if routers is not None:
        if pictures.paths:
            raise ConfigError("has nothing to draw", field="--routers", hint="Leave out --html and --plot.")
        values = options.routers(routers, ages)
        values["command"] = options.plan("--routers", routers, *(() if ages is None else ("--router-ages", ages)))
        _print(values, as_json, tables.render_routers)
        return
    if league:
        from kvarts.plan.league import ALL_POLICIES

        policies = (*ALL_POLICIES, *policies)
    values = options.make(
        sizes=sizes,
        page_size=_page_size(given),
        count_outputs=count_outputs,
        policies=policies,
        prices=prices,
    ).values
    pictures.write(values)
    if not pictures.are_printed:
        _print(values, as_json, tables.render)


def _own_options(context: click.Context) -> list[str]:
    """Return the typed options of this command that determine the plan, except --outputs."""
    words: list[str] = []
    for param in context.command.params:
        name = param.name or ""
        if name not in OWN or context.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            continue
        value, flag = context.params[name], param.opts[0]
        if value is True:
            words.append(flag)
        elif isinstance(value, dict):
            words += [flag, ",".join(f"{key}={number:g}" for key, number in value.items())]
        elif name == "policies":
            words += [word for policy in value for word in (flag, policy)]
        else:
            words += [flag, ",".join(map(str, value)) if isinstance(value, list) else f"{value:g}"]
    return words


def _page_size(given: Given) -> int:
    return given.build(EngineConfig).page_size if "page_size" in given else EngineConfig().page_size


def _print(plan: dict[str, Any], as_json: bool, render: Callable[[dict[str, Any]], str]) -> None:
    if as_json:
        print_json(plan)
    else:
        print_text(render(plan))


@click.command("sweep", cls=Command)
@click.argument("config_file", metavar="CONFIG", type=INPUT)
@click.option("-o", "--output", "directory", metavar="DIR", type=DIRECTORY, required=True,
              help="Directory of the results, where an interrupted sweep also resumes.")  # fmt: skip
@click.option("--workers", metavar="N", type=click.IntRange(min=1), help="Processes. [as many as there are cores]")
@click.option("--ray", "ray_address", metavar="ADDRESS",
              help="Run points on the Ray cluster at ADDRESS, or auto, instead. Needs kvarts[ray]; the trace must be "
              "at the same path on its nodes.")  # fmt: skip
@click.option("--plot", "with_pictures", is_flag=True,
              help="Write the charts of the page as points.png and points.svg too. Needs kvarts[plan].")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print all rows as JSON instead of the Pareto front.")
def sweep_command(
    config_file: Path,
    directory: Path,
    workers: int | None,
    ray_address: str | None,
    with_pictures: bool,
    as_json: bool,
) -> None:
    """Replay every point of a grid.

    CONFIG is a file of `kvarts replay --config` with a table [grid] of lists, whose combinations are the points, or
    with tables [[points]]. DIR gets points.json, and points.parquet if pyarrow is installed: one row per point; and
    points.html, a page with charts. The Pareto front of KV memory, TTFT and throughput is printed on standard output.
    """
    from kvarts.base.files import write_whole
    from kvarts.base.processes import num_cores
    from kvarts.plan.sweeping import sweep
    from kvarts.sim.report.pictures import check_installed

    if with_pictures:
        check_installed("--plot")
    with Progress("sweeping", None, "points") as progress:
        found = sweep(
            config_file,
            directory,
            workers=workers or num_cores(),
            ray_address=ray_address,
            on_done=progress.reach,
        )
        for form in PICTURES if with_pictures else ():
            write_whole(directory / f"points.{form}", found.picture(form))
    if find_spec("pyarrow") is None:
        click.echo("kvarts: no points.parquet without pyarrow: pip install 'kvarts[parquet]'", err=True)
    if as_json:
        print_json(found.rows)
    else:
        print_text(found.to_text())
