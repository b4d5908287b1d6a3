"""Refusal of options that cannot have an effect: the same rules in every command, from the tables below.

Only typed options are refused. Keys of a file are not, because other commands may read that file.
"""

# Annotations are evaluated when this module is imported: NamedTuple would compile their texts one by one.
import re
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from kvarts.base.errors import ConfigError
from kvarts.sim.traffic.settings import READING as TRACES

if TYPE_CHECKING:
    import click

__all__ = ["MODES", "NEEDS", "TABLES", "Mode", "Need", "check_effects", "check_typed"]


class Need(NamedTuple):
    """`options` have an effect only if one of `needs` is given: an option, or `--option=value`.

    `commands`: the commands that the rule applies to; if empty, all that know one of the options and one of `needs`.
    `unless`: the options have no effect if one of these is given. `except_with`: with one of these, the
    rule does not apply, because the code that reads the options gives a better error.
    """

    options: tuple[str, ...]
    needs: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    except_with: tuple[str, ...] = ()


class Mode(NamedTuple):
    """With the option or fact `when`, `command` reads only the options in `keeps`, or all except those in `drops`.

    `unless`: an option with which the rule does not apply.
    """

    command: str
    when: str
    keeps: tuple[str, ...] = ()
    drops: tuple[str, ...] = ()
    unless: str = ""
    why: str | None = None
    hint: str = "Leave it out."


NO_REPLAY = "no replay"
SLO = ("--slo-ttft-ms", "--slo-tpot-ms", "--set slo.e2e_ms")
READING = tuple(f"--set {key}" for key in TRACES)
PLAN_RESULTS = ("--json", "--html", "--open", "--config", "--page-size", *READING)
OF_MODEL = ("--dtype", "--set quantization", "--device", "--set attention", "--set layers")
OF_FIT = ("--set column", "--set time_unit", "--set trace_block_size", "--set seed")

NEEDS = (
    Need(("--set timeline_every",), ("--timeline", "--run-dir")),
    Need(
        (
            "--set kv_events_replay",
            "--set kv_events_format",
            "--set kv_events_topic",
            "--set kv_events_wait",
            "--set kv_events_stay",
        ),
        ("--kv-events",),
    ),
    *(
        Need(
            (f"--{role} memory_fraction",),
            unless=("--pages", f"--{role} pages", "--kv-memory", f"--{role} kv_memory"),
            commands=("replay",),
        )
        for role in ("prefill", "decode")
    ),
    Need(
        ("--router",),
        ("--replicas", "--set data_parallel", "--prefill", "--decode", "[[pool]]"),
        commands=("replay", "calibrate"),
    ),
    Need(
        ("--set workers",),
        ("--replicas", "--cost"),
        unless=("--prefill", "--decode", "[[pool]]"),
        commands=("replay",),
    ),
    Need(("--slo-share", "--set cost_error"), SLO, commands=("plan slo", "plan users", "plan fleet")),
    Need(("--gpus",), SLO, commands=("plan fleet",)),
    Need(("--set trace_block_size",), ("--prompts",), commands=("calibrate",)),
    Need(("--set hold_out",), ("--points",), commands=("calibrate",)),
    Need(("--speedup",), ("--mock",), commands=("serve sessions",)),
    Need(("--set top_k", "--set top_p", "--set min_p"), ("--temperature",), commands=("generate", "profile")),
    Need(("--open",), ("--html",)),
    Need(("--host", "--port", "--set server_pid"), unless=("--virtual",), commands=("soak",)),
    Need(("--set every",), unless=("--set quiet",), commands=("watch",)),
    Need(("--set max_rss_growth",), ("--set server_pid",), unless=("--virtual",), commands=("soak",)),
)

TABLES = {"--prefill", "--decode"}
"""Options of tables with settings that others make useless."""
INLINE_VALUE = r"(?:^|,)(\w+)=([^,]*)"

MODES = (
    *(Mode(command, NO_REPLAY, keeps=(own, "--at", "--set outputs", *PLAN_RESULTS),
           why="has no effect: nothing is replayed", hint="Give --model and --device, or --cost.")
      for command, own in (("plan slo", "--set plot"), ("plan policies", "--policy"))),
    Mode("calibrate", "--points", keeps=("--points", "--set prior", "--set hold_out", "--set workers", "--out",
                                         "--json")),
    Mode("calibrate", "--design", drops=(*OF_FIT, "--prompts", "--series", "--set fit_on", "--set prior",
                                         "--set workers",
                                       "--out")),
    Mode("serve sessions", "--mock", drops=OF_MODEL),
)  # fmt: skip


def check_effects(
    context: "click.Context", *, is_set: Callable[[str], bool] = lambda flag: False, facts: Collection[str] = ()
) -> None:
    """Raise ConfigError for an option that was typed and cannot have an effect.

    `is_set`: returns whether a file sets an option. `facts`: conditions of modes that are not options, such as
    NO_REPLAY.
    """
    from kvarts.cli.helps import path_of

    flags = _flags_of(context)
    typed = {flag: context.params[name] for flag, name in flags.items() if _is_typed(context, name)}
    for table in TABLES & typed.keys():
        typed |= {f"{table} {name}": value for text in typed[table] for name, value in re.findall(INLINE_VALUE, text)}
    check_typed(path_of(context), flags, typed, is_set=is_set, facts=facts)


def check_typed(
    command: str,
    flags: Collection[str],
    typed: Mapping[str, Any],
    *,
    is_set: Callable[[str], bool] = lambda flag: False,
    facts: Collection[str] = (),
) -> None:
    """Raise ConfigError as `check_effects` does. `flags`: the options of `command`; `typed`: the values of some."""

    def is_given(what: str) -> bool:
        flag, equals, value = what.partition("=")
        if not equals:
            return flag in typed or is_set(flag)
        return str(typed.get(flag)) == value or (flag not in typed and is_set(what))

    for mode in MODES:
        if mode.unless and is_given(mode.unless):
            continue
        if mode.command == command and (is_given(mode.when) or mode.when in facts):
            _refuse_others(mode, typed)
    for need in NEEDS:
        if need.commands and command not in need.commands:
            continue
        if need.needs and not any(what.partition("=")[0] in flags for what in need.needs):
            continue
        if any(map(is_given, need.except_with)):
            continue
        for flag in need.options:
            if flag in typed:
                _refuse_unless(need, flag, is_given)


def _refuse_others(mode: Mode, typed: Mapping[str, Any]) -> None:
    for flag in typed:
        if flag != mode.when and (flag not in mode.keeps if mode.keeps else flag in mode.drops):
            raise ConfigError(mode.why or f"has no effect with {mode.when}", field=flag, hint=mode.hint)


def _refuse_unless(need: Need, flag: str, is_given: Callable[[str], bool]) -> None:
    for other in need.unless:
        if is_given(other):
            raise ConfigError(f"has no effect with {other}", field=flag, hint="Keep one of them.")
    if need.needs and not any(map(is_given, need.needs)):
        choices = [what.replace("=", " ") for what in need.needs]
        *others, last = choices
        raise ConfigError(
            f"has no effect without {' or '.join([', '.join(others), last] if others else [last])}",
            field=flag,
            hint=f"Give {choices[0]} as well, or leave it out.",
        )


def _flags_of(context: "click.Context") -> dict[str, str]:
    """Return the parameter names of the command's options, by flag; arguments are not included."""
    return {
        param.opts[0] if param.opts[0].startswith("--") else param.opts[-1]: param.name or ""
        for param in context.command.get_params(context)
        if param.param_type_name == "option"
    }


def _is_typed(context: "click.Context", name: str) -> bool:
    from click.core import ParameterSource

    return name in context.params and context.get_parameter_source(name) is ParameterSource.COMMANDLINE
