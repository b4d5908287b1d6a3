"""`kvarts plan` and `kvarts sweep`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from kvarts.base.files import check_outputs, check_writable, is_standard_output, write_whole
from kvarts.base.limits import MOST_PAGES, brief, whole_number
from kvarts.base.settings import given_by_flags
from kvarts.cli.effects import NO_REPLAY, check_effects
from kvarts.cli.fleet import PART as FLEET
from kvarts.cli.options import (
    DIRECTORY,
    INPUT,
    OUTPUT,
    Command,
    Group,
    KeyOption,
    grouped,
    key_option,
    line_options,
    open_option,
    options_of,
)
from kvarts.cli.outputs import check_opening, open_page
from kvarts.cli.parts import engine_options, load_parts, with_engine_options
from kvarts.cli.plan_options import PlanCall, PlanOptions, fleet_kinds
from kvarts.cli.process import Progress, print_json, print_text, tell_whole_pages
from kvarts.cli.replaying import all_sections, load_traffic, over_sample_settings, paths_in, read_settings, set_by
from kvarts.core.config import EngineConfig
from kvarts.plan.policy import check_policy, with_policy
from kvarts.sim.config import resolve_replay
from kvarts.sim.traffic.settings import READING
from kvarts.sim.traffic.trace import NO_PREFIXES

if TYPE_CHECKING:
    from kvarts.base.settings import Given
    from kvarts.sim.config import ReplayConfig

__all__ = ["Pictures", "plan_command", "sweep_command"]

MOST_USERS = 100_000
OWN = ("sizes", "policies", "prices", "slo_share", "cost_error", "quick")
# A test compares these names with the league's.
POLICY_NAMES = "auto, soonest-return, hinted, session-aware"
PICTURES = ("png", "svg")

_TIMED = {"model", "device", "cost", "slo.ttft_ms", "slo.tpot_ms"}
_SIZED = {"tensor_parallel", "page_size", "max_batched_tokens", "max_seqs"}
SHOWN = {
    "curve": {"page_size"},
    "slo": {*_TIMED, *_SIZED, "pages", "replicas", "router", "offload.host_memory"},
    "users": {*_TIMED, "pages", "replicas", "offload.host_memory"},
    "fleet": {*_TIMED, "tensor_parallel"},
    "routers": {"model", "device", "cost", "pages", "replicas"},
    "policies": {"model", "device", "cost", "pages", "page_size"},
}  # fmt: skip
"""The settings that are options of each command; the others are keys of `--set`."""

OF_TRACES = ("page_size", *READING, "answers")
WITHOUT = {
    "users": ("concurrency", "speedup"),
    "fleet": ("eviction",),
    "routers": ("router", "routing.staleness", "routing.event_lag"),
}
"""The settings that a command determines itself."""
BY_OPTION = {"--gpus": "fleet", "--users": "users", "--routers": "routers", "--policy": "policies"}
"""Options of one command each, without which it has nothing to do."""


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


def _options(name: str) -> list[click.Parameter]:
    """Return the trace and the settings of a command."""
    parts = load_parts()
    apart = [section for part in parts if not part.of_one_model for section in part.sections]
    if name != "fleet":
        apart += FLEET.sections
    settings = [
        option
        for option in options_of(
            [section for section in all_sections() if section not in apart],
            only=OF_TRACES if name == "curve" else None,
            shown=SHOWN[name],
        )
        if getattr(option, "key", "") not in WITHOUT.get(name, ())
    ]
    by_flag: dict[str, click.Option] = {}
    for option in settings:
        by_flag.setdefault(option.opts[0], option)
    if name in ("slo", "users", "fleet"):
        by_flag.update({option.opts[0]: option for option in engine_options()})
    own = [] if name == "curve" else line_options()
    return [click.Argument(["trace"], required=False, type=INPUT), *by_flag.values(), *own]


def _is_count(text: str, most: int) -> bool:
    """Return whether `text` is a whole number from 1 to `most`."""
    return 1 <= (whole_number(text) or 0) <= most


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


class PlanGroup(Group):
    """The commands of `kvarts plan`; without the name of one, `slo` is called."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, with the default command in front of arguments that name none.

        Raise UsageError for an option by which another command is recognised.
        """
        if not args or args[0] not in (*self.commands, *ctx.help_option_names):
            for word in args:
                if (other := BY_OPTION.get(word.partition("=")[0])) is not None:
                    raise click.UsageError(f"No such option: {word}: it is of kvarts plan {other}.", ctx)
            args = ["slo", *args]
        return super().parse_args(ctx, args)


@click.group("plan", cls=PlanGroup, no_args_is_help=False)
def plan_command() -> None:
    """Find how much KV memory, and how many replicas, a TRACE needs.

    `kvarts plan TRACE ...` is `kvarts plan slo TRACE ...`, whose options `kvarts plan slo -h` lists. Without TRACE, the
    bundled sample is used. A plan is printed on standard output, everything else on standard error.
    """


Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
results = grouped("Results")
config_option = click.option(
    "--config", "config_file", metavar="FILE", type=INPUT,
    help="TOML file with settings by their keys, and trace or a [workload] table. Options given here win.",
)  # fmt: skip
json_option = results("--json", "as_json", is_flag=True, help="Print the plan as JSON instead of tables.")
workers_option = key_option(
    "--workers", metavar="N", type=click.IntRange(min=1),
    help="Processes that replay. [as many as there are cores, if the plan takes longer than a second]",
)  # fmt: skip
slo_share_option = click.option(
    "--slo-share", metavar="X", type=click.FloatRange(0, 1, min_open=True), default=0.99,
    help="An SLO is kept where this share of the requests keeps it. [0.99]",
)  # fmt: skip
prices_option = click.option(
    "--prices", metavar="FILE", type=INPUT,
    help="TOML file of prices per hour: date, currency, and in [per_hour] host_gib and the device. [relative prices: a "
    "device as much as 1,024 GiB of host memory]",
)  # fmt: skip
cost_error_option = key_option(
    "--cost-error", metavar="X", default=None, type=click.FloatRange(0, 1, min_open=True, max_open=True),
    help="Error of step times as a share: the answer is replayed with steps longer by up to it. "
    "[their error in 1 of 10 measurements; 0.15 if that is not known]",
)  # fmt: skip
quick_option = click.option(
    "--quick", is_flag=True, help="Only the answer and its confidence, not how far the traffic may differ."
)
at_option = click.option(
    "--at", "sizes", metavar="PAGES", type=_Sizes(),
    help="Sizes to look at, such as 4000,16000. [the knees, and sizes for 50 to 100 % of the hits]",
)  # fmt: skip
outputs_option = key_option(
    "--outputs", "count_outputs", is_flag=True,
    help="Let generated tokens that are not known take pages as well, as an engine's do.",
)  # fmt: skip
html_option = results(
    "--html", "html_file", metavar="FILE", type=OUTPUT,
    help="Write a page with charts to FILE, which needs nothing else.",
)  # fmt: skip
plot_option = results(
    "--plot", "plot_files", cls=KeyOption, metavar="FILE", type=OUTPUT, multiple=True,
    help="Write the charts to FILE: a PNG if it ends in .png, else an SVG. Needs kvarts[plan].",
)  # fmt: skip


def _command(name: str, *options: Decorator) -> Callable[[Callable[..., None]], click.Command]:
    """Return the decorator of a command of `kvarts plan`: its settings, --config, --json and `options`."""

    def declare(function: Callable[..., Any]) -> click.Command:
        declared: Any = function
        for add in (json_option, *reversed(options), config_option):
            declared = add(declared)
        command = plan_command.command(name, cls=Command, params=_options(name), checks_effects=True)
        return command(declared)

    return declare


class _Asked:
    """A call of a command of `kvarts plan`, read: its settings, its traffic, and what it prints.

    `replays`: whether steps are timed, by default where a model, a device or a cost is given. `facts`: those of
    `check_effects`, if nothing is. Raise ConfigError before anything is computed.
    """

    def __init__(self, values: dict[str, Any], *, replays: bool | None = None, facts: Sequence[str] = ()) -> None:
        self.call = call = PlanCall.taken_from(values)
        self._pictures = pictures = Pictures(call.html_file, call.plot_files, opens=call.opens)
        sections = all_sections()
        given = with_engine_options(values, given_by_flags(values, sections))
        given = given.over(read_settings(call.config_file, sections))
        if several := given.names("models"):
            hint = "Plan for each alone, or replay them on one device."
            raise given.error(f"[models.{several[0]}]", "a plan is for one model", hint=hint)
        if call.trace is None and call.config_file is None and replays is not False:
            given = over_sample_settings(given, sections)
        if replays is None:
            replays = any(key in given for key in ("model", "device", "cost"))
        self.context = click.get_current_context()
        check_effects(self.context, is_set=set_by(given, sections), facts=() if replays else facts)
        named = [given.path_of("trace")] if "trace" in given else []
        check_outputs(pictures.paths, [*named, *paths_in(given)])
        check_policy(given)
        self.given = given
        self.replays = replays
        self.own = _own_options(self.context)

    def config(self, **asked: str) -> ReplayConfig | None:
        """Return the configuration of replays; None if nothing is replayed. `asked`: as in the table of features."""
        from kvarts.plan.fleet_search import given_of_fleets

        if not self.replays:
            return None
        of_plan = {"plan": "plan", **asked}
        if typed := [key for key in given_of_fleets(self.given) if self.given.source_of(key).path is None]:
            of_plan["pools"] = typed[0]
        config = resolve_replay(self.given, all_sections(), asked=of_plan)
        tell_whole_pages(config)
        return config

    def options(self, config: ReplayConfig | None) -> PlanOptions:
        """Load the traffic, and return the inputs of the plan."""
        if "agentic_replay" in self.given:
            hint = "Leave it out, and replay the answer with it."
            raise self.given.error("agentic_replay", "is a load that is replayed, not planned for", hint=hint)
        traffic = load_traffic(self.given, self.call.trace)
        if config is not None:
            config = with_policy(config, self.given, traffic)
        for warning in traffic.warnings:
            click.echo(f"kvarts: {warning}", err=True)
        if not traffic.knows_prefixes and self.context.info_name != "fleet":
            click.echo(f"kvarts: {NO_PREFIXES}", err=True)
        flags = {flag for param in self.context.command.params for flag in param.opts}
        name = self.context.info_name or ""
        return PlanOptions(self.call, self.given, traffic, config, own=self.own, command=name, flags=flags)

    def write(self, values: dict[str, Any], render: Callable[[dict[str, Any]], str]) -> None:
        """Write the pictures, and print the plan unless they are on standard output."""
        self._pictures.write(values)
        if not self._pictures.are_printed:
            if self.call.as_json:
                print_json(values)
            else:
                print_text(render(values))


@_command("curve", at_option, outputs_option, html_option, open_option(results), plot_option)
def curve_command(**values: Any) -> None:
    """Print what each size of KV memory buys on a TRACE: hits at all sizes at once, with the best that is possible.

    Nothing is replayed. TRACE is as in `kvarts replay`; without it, the bundled sample is used.
    """
    from kvarts.plan import tables

    asked = _Asked(values, replays=False)
    plan = asked.options(None).make(page_size=_page_size(asked.given))
    asked.write(plan.values, tables.render)


@_command(
    "slo",
    at_option, outputs_option, prices_option, slo_share_option, cost_error_option, quick_option, workers_option,
    html_option, open_option(results), plot_option,
)  # fmt: skip
def slo_command(prices: Path | None, **values: Any) -> None:
    """Find the cheapest GPUs and host memory that keep an SLO on a TRACE, and how far the traffic may grow.

    TRACE is as in `kvarts replay`; without it, the bundled sample is used. Hits are printed at all sizes; with a model
    and a device, or a cost, some sizes are also replayed, on replicas too.
    """
    from kvarts.plan import tables

    asked = _Asked(values, facts=(NO_REPLAY,))
    config = asked.config()
    plan = asked.options(config).make(page_size=_page_size(asked.given, config), prices=prices)
    asked.write(plan.values, tables.render)
    end_interrupted(plan.values)


@_command(
    "users",
    click.option(
        "--users", metavar="LOW..HIGH", type=_Range(), required=True,
        help="Sessions of the trace in a closed loop, LOW to HIGH at a time.",
    ),
    prices_option, slo_share_option, cost_error_option, quick_option, workers_option, html_option, open_option(results),
)  # fmt: skip
def users_command(users: tuple[int, int], prices: Path | None, **values: Any) -> None:
    """Find how many users fit: sessions of a TRACE, each of which waits for its answers."""
    from kvarts.plan import tables

    asked = _Asked(values)
    options = asked.options(asked.config())
    found = options.users(*users, prices)
    found["command"] = options.plan("--users", f"{users[0]}..{users[1]}", *asked.own)
    asked.write(found, tables.render_users)
    end_interrupted(found["users"])


@_command(
    "fleet",
    click.option(
        "--gpus", metavar="N", type=click.IntRange(min=1), required=True,
        help="Most devices: mixed workers of all shapes (tensor parallel, ranks of attention over shared experts, a "
        "stage per node), also with host memory, and prefill and decode apart are tried.",
    ),
    click.option(
        "--routers", metavar="NAME,..",
        help="Routers that are tried, such as prefix,llm-d:prefix=3,queue=2,dynamo-kv. [prefix,least-loaded]",
    ),
    key_option(
        "--store-sizes", metavar="SIZE,..",
        help="Also try a store of this size that all workers share: 500GiB,2TiB. [no store]",
    ),
    prices_option, slo_share_option, cost_error_option, workers_option, html_option, open_option(results),
)  # fmt: skip
def fleet_command(gpus: int, routers: str | None, store_sizes: str | None, prices: Path | None, **values: Any) -> None:
    """Find the fewest devices that keep an SLO on a TRACE, and in which pools of workers."""
    from kvarts.plan.tables import render_fleets

    asked = _Asked(values)
    kinds = fleet_kinds(asked.given, gpus, routers, store_sizes)
    options = asked.options(None)
    found = options.fleets(kinds, prices)
    words = ["--gpus", f"{gpus}"]
    words += [] if routers is None else ["--routers", routers]
    words += [] if store_sizes is None else ["--set", f"store_sizes={store_sizes}"]
    found["command"] = options.plan(*words, *asked.own)
    asked.write(found, render_fleets)
    end_interrupted(found["fleets"])


@_command(
    "routers",
    click.option(
        "--routers", metavar="NAME,..", required=True,
        help="Routers to compare, such as prefix,llm-d:prefix=3,queue=2,dynamo-kv.",
    ),
    key_option(
        "--router-ages", "ages", metavar="TIME,..",
        help="Compare them with metrics and cache events of this age: 0,50ms,1s.",
    ),
    prices_option, cost_error_option, quick_option, workers_option,
)  # fmt: skip
def routers_command(routers: str, ages: str | None, prices: Path | None, **values: Any) -> None:
    """Compare routers on a TRACE, with --replicas."""
    from kvarts.plan import tables

    asked = _Asked(values)
    config = asked.config(**({} if ages is None else {"late_events": "router_ages"}))
    options = asked.options(config)
    found = options.routers(routers, ages, prices)
    of_ages = () if ages is None else ("--set", f"router_ages={ages}")
    found["command"] = options.plan("--routers", routers, *of_ages, *asked.own)
    asked.write(found, tables.render_routers)
    end_interrupted(found["routers"])


@_command(
    "policies",
    click.option(
        "--policy", "policies", metavar="NAME", multiple=True,
        help="An eviction policy to compare with LRU: " + POLICY_NAMES + ", or module:Class. May be given again. "
        "[all of these]",
    ),
    at_option, outputs_option, workers_option, html_option, open_option(results),
)  # fmt: skip
def policies_command(policies: tuple[str, ...], **values: Any) -> None:
    """Compare eviction policies on a TRACE, next to LRU and the best that is possible."""
    from kvarts.plan import tables
    from kvarts.sim.eviction import ALL_POLICIES

    asked = _Asked(values, facts=(NO_REPLAY,))
    config = asked.config()
    plan = asked.options(config).make(page_size=_page_size(asked.given, config), policies=policies or ALL_POLICIES)
    asked.write(plan.values, tables.render)
    end_interrupted(plan.values)


def end_interrupted(found: dict[str, Any]) -> None:
    """End as interrupted if the searches of a plan were; what they had found is printed by then."""
    if not found["is_complete"]:
        raise KeyboardInterrupt


def _own_options(context: click.Context) -> list[str]:
    """Return the typed options of this command that determine the plan, except the key `outputs`."""
    assert isinstance(context.command, Command)
    words: list[str] = []
    for param in context.command.every:
        name = param.name or ""
        if name not in OWN or context.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            continue
        value, flag = context.params[name], param.opts[0]
        if isinstance(param, KeyOption):
            words += ["--set", f"{param.key}={value:g}"]
        elif isinstance(value, bool):
            words.append(flag)
        elif isinstance(value, Path):
            words += [flag, str(value)]
        elif name == "policies":
            words += [word for policy in value for word in (flag, policy)]
        else:
            words += [flag, ",".join(map(str, value)) if isinstance(value, list) else f"{value:g}"]
    return words


def _page_size(given: Given, config: ReplayConfig | None = None) -> int:
    if config is not None:
        return config.page_size
    return given.build(EngineConfig).page_size if "page_size" in given else EngineConfig().page_size


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
    from kvarts.plan.sweep import sweep
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
