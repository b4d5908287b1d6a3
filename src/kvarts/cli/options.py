"""Command-line options, generated from settings, and the settings that were given by them.

No type of a path looks at the file system. `kvarts.base.files` reports paths that cannot be read or written, with the
library's exit codes and messages.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import inf, isfinite
from pathlib import Path
from typing import Any, Literal

import click
import msgspec

from kvarts.base.errors import ConfigError, did_you_mean, renamed
from kvarts.base.files import check_outputs
from kvarts.base.settings import Section, Setting, inline_settings, is_inline, param_of, param_of_inline, value_kind
from kvarts.cli.effects import check_effects
from kvarts.cli.helps import common_of, examples_of, groups_of, summary_of

__all__ = [
    "ALIASES",
    "ANSWERS",
    "DERIVED",
    "DIRECTORY",
    "INPUT",
    "OUTPUT",
    "WINDOW",
    "Command",
    "Group",
    "GroupedOption",
    "PathRole",
    "grouped",
    "in_our_words",
    "open_option",
    "options_of",
    "role_of",
]

PathRole = Literal["input", "output", "derived", "directory"]
ALIASES = {
    "--num-gpu-blocks-override": "--pages",
    "--block-size": "--page-size",
    "--max-num-seqs": "--max-seqs",
    "--max-num-batched-tokens": "--max-batched-tokens",
    "--tensor-parallel-size": "--tensor-parallel",
    "--tp": "--tensor-parallel",
    "-tp": "--tensor-parallel",
    "--data-parallel-size": "--data-parallel",
    "--dp": "--data-parallel",
    "-dp": "--data-parallel",
    "--pipeline-parallel-size": "--pipeline-parallel",
    "--pp": "--pipeline-parallel",
    "-pp": "--pipeline-parallel",
    "--gpu-memory-utilization": "--memory-fraction",
    "--kv-cache-dtype": "--kv-dtype",
    "--kv-cache-memory-bytes": "--kv-memory",
    "--no-enable-prefix-caching": "--no-prefix-caching",
}
"""Options of `vllm serve`, and the option here with the same meaning and values."""

ANSWERS = {
    "--cpu-offload-gb": "kvarts keeps weights on the device; for KV below it, give --host-memory 64GiB",
    "--enable-chunked-prefill": "prompts are always chunked; --max-batched-tokens sets the largest chunk",
    "--enable-expert-parallel": "give --expert-parallel N, over how many devices experts are divided",
    "--enable-prefix-caching": "the prefix cache is on unless --no-prefix-caching is given",
    "--kv-offloading-size": "give --host-memory 64GiB",
    "--max-model-len": "a replay takes each request as long as the trace has it",
    "--num-gpu-blocks": "give --pages N",
    "--quantization": "give --weight-dtype fp8, and --kv-dtype for KV",
    "--scheduling-policy": "requests are ordered by priority and arrival; for another policy see "
    "docs/guide-policies.md",
    "--swap-space": "give --host-memory 64GiB",
    "-q": "give --weight-dtype fp8, and --kv-dtype for KV",
}
"""Options of `vllm serve` without an equivalent, and what to do instead."""
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
HELP_ALL = "kvarts.help_all"
NEVER = ("--reclaim-after",)
"""Options that accept `inf`, which means never."""


class _PathType(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions only
    name = "path"

    def __init__(self, role: PathRole) -> None:
        self.role: PathRole = role

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        if value == "":
            self.fail("a path is not empty", param, ctx)
        if value == "-" and self.role == "directory":
            self.fail("standard output is not a directory; use ./- for a directory of that name", param, ctx)
        return Path(value)


INPUT = _PathType("input")
"""A file, or a directory, that is read."""
OUTPUT = _PathType("output")
"""A file that is written."""
DERIVED = _PathType("derived")
"""A name from which those of several files are made, one per replica or model; the command checks them."""
DIRECTORY = _PathType("directory")
"""A directory that only the command writes to."""


def role_of(param: click.Parameter) -> PathRole | None:
    """Return how a command uses the path of a parameter; None if the parameter is not a path."""
    role: PathRole | None = getattr(param.type, "role", None)
    return role


def in_our_words(args: Sequence[str], known: Collection[str]) -> list[str]:
    """Return `args` with vLLM's option names replaced. `known`: the options of the command.

    Raise UsageError for an option in ANSWERS. Words after `--` are not changed.
    """
    ours: list[str] = []
    for place, word in enumerate(args):
        if word == "--":
            return [*ours, *args[place:]]
        name, equals, value = word.partition("=")
        if name not in known:
            if ALIASES.get(name) in known:
                name = ALIASES[name]
            elif name in ANSWERS:
                raise click.UsageError(f"No such option: {name}: {ANSWERS[name]}.")
        ours.append(f"{name}{equals}{value}")
    return ours


class GroupedOption(click.Option):
    """An option listed under a title in the help."""

    def __init__(self, *args: Any, group: str, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.group = group


class Command(click.Command):
    """Base class of all commands.

    Before a command runs, it refuses outputs that would destroy an input or each other, and options that cannot have an
    effect. With `checks_effects`, the command checks effects itself, once it has read a settings file. An error whose
    field is a parameter of a function is renamed to the option that was typed. Options may be spelled as in vLLM.
    """

    checks_effects = False

    def __init__(self, *args: Any, checks_effects: bool = False, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.checks_effects = checks_effects

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, after renaming vLLM's options."""
        known = {name for param in self.params for name in param.opts}
        return super().parse_args(ctx, in_our_words(args, known))

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the parameters, and the options that print help."""
        return [*super().get_params(ctx), _help_all(hidden=not common_of(ctx))]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options by group, in order of first appearance; options without a group are first.

        A command with many options shows only the common ones, unless `--help-all` is given.
        """
        common = () if ctx.meta.get(HELP_ALL) else common_of(ctx)
        groups: dict[str, list[tuple[str, str]]] = {"Options": []}
        num_left = 0
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if param.param_type_name == "option" else None
            if record is None:
                continue
            if common and param.opts[0] not in common and not {"--help", "--help-all"}.intersection(param.opts):
                num_left += 1
                continue
            if common:
                record = record[0], _first_sentence(record[1])
            groups.setdefault(getattr(param, "group", "Options"), []).append(record)
        for title, records in groups.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)
        if num_left:
            formatter.write_paragraph()
            formatter.write_text(f"{num_left} more options: {ctx.command_path} --help-all")

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples."""
        examples = examples_of(ctx)
        if examples:
            with formatter.section("Examples" if len(examples) > 1 else "Example"):
                for example in examples:
                    formatter.write(f"{'':>{formatter.current_indent}}{example}\n")
        super().format_epilog(ctx, formatter)

    def invoke(self, ctx: click.Context) -> Any:
        """Check the arguments, then run the command."""
        paths: dict[str | None, list[Path]] = {}
        for param in self.params:
            given = ctx.params.get(param.name or "")
            if given is not None:
                paths.setdefault(role_of(param), []).extend(given if isinstance(given, tuple) else (given,))
        check_outputs(paths.get("output", ()), (*paths.get("input", ()), *paths.get("directory", ())))
        self._check_values(ctx)
        if not self.checks_effects:
            check_effects(ctx)
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            typed = renamed(error, self._typed())
            if typed is error:
                raise
            raise typed from error

    def _check_values(self, ctx: click.Context) -> None:
        """Raise ConfigError for NaN, infinity except in NEVER, and text that is not UTF-8; no click range does."""
        for param in self.params:
            value = ctx.params.get(param.name or "")
            is_never = value == inf and param.opts[0] in NEVER
            if isinstance(value, float) and not isfinite(value) and not is_never:
                raise ConfigError(f"must be a finite number, got {value}", field=param.opts[0])
            for text in value if isinstance(value, tuple) else (value,):
                if isinstance(text, str) and not _is_text(text):
                    raise ConfigError("is not text in UTF-8", field=param.opts[0])

    def _typed(self) -> dict[str, str]:
        """Return the options and arguments by the fields of errors that they stand for."""
        typed: dict[str, str] = {}
        for param in self.params:
            shown = param.opts[0] if param.param_type_name == "option" else param.human_readable_name
            for name in (param.name or "", *(name.removeprefix("--").replace("-", "_") for name in param.opts)):
                typed.setdefault(name, shown)
        return typed


def _is_text(argument: str) -> bool:
    """Return whether an argument is text: Python passes bytes that are not UTF-8 as lone surrogates."""
    try:
        argument.encode()
    except UnicodeEncodeError:
        return False
    return True


class Group(click.Group):
    """A group of commands: `-h` lists them by purpose, one line each; a misspelled name gets suggestions."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command. Raise UsageError with the closest names if it does not exist."""
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            close = did_you_mean(name, self.list_commands(ctx))
            hint = close or f"Commands: {', '.join(self.list_commands(ctx))}."
            raise click.UsageError(f"No such command {name!r}. {hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands in groups, each with its line."""
        names = self.list_commands(ctx)
        width = max(map(len, names)) + 2
        for title, members in groups_of(ctx, names).items():
            with formatter.section(title):
                for name in members:
                    line = summary_of(ctx, name)
                    formatter.write(f"{'':>{formatter.current_indent}}{name:<{width}}{line}\n")


def _first_sentence(text: str) -> str:
    """Return the first sentence of an option's help, and its default."""
    sentence, dot, rest = text.partition(". ")
    if not dot:
        return text
    default = re.search(r"\[[^\[]*\](?:  \[.*\])?$", rest)
    return f"{sentence}. {default[0]}" if default else f"{sentence}."


def _help_all(*, hidden: bool) -> click.Option:
    return click.Option(
        ["--help-all"], is_flag=True, is_eager=True, expose_value=False, hidden=hidden, callback=_print_all,
        help="Show all options and exit.",
    )  # fmt: skip


def _print_all(ctx: click.Context, _: click.Parameter, is_asked: bool) -> None:
    if is_asked and not ctx.resilient_parsing:
        ctx.meta[HELP_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


def grouped(group: str) -> Callable[..., Callable[[Callable[..., Any]], Callable[..., Any]]]:
    """Return `click.option` for options under the title `group`."""

    def option(*names: str, **attributes: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        return click.option(*names, cls=GroupedOption, group=group, **attributes)

    return option


def open_option(option: Callable[..., Decorator] = click.option) -> Decorator:
    """Return the `--open` option of a command that has `--html`; `option` is its decorator."""
    return option("--open", "opens", is_flag=True, help="Open the page in the browser as well.")


def options_of(sections: Iterable[Section], only: Sequence[str] | None = None) -> list[click.Option]:
    """Return an option for each setting that has a flag; with `only`, for the settings with these keys.

    An option that is not given is None, so that the file decides, and then the setting's default.
    """
    sections = [section for section in sections if not section.is_named]
    options = [
        _option(setting, section.title)
        for section in sections
        for setting in section.settings
        if setting.flag is not None and not is_inline(setting) and (only is None or setting.key in only)
    ]
    for section in sections if only is None else ():
        options += [_of_table(option, known, section) for option, known in inline_settings([section]).items()]
    return options


def _of_table(option: str, known: Mapping[str, Setting], section: Section) -> click.Option:
    """Return the option of a table. Click parses no value of it: there is one for several settings."""
    return GroupedOption(
        [option, param_of_inline(option)],
        group=section.title,
        multiple=True,
        metavar="KEY=VALUE,...",
        help=f"The table [{section.table}] of a file, in one line: {', '.join(known)}.",
    )


def _option(setting: Setting, group: str) -> click.Option:
    assert setting.flag is not None
    text = setting.help
    default = setting.default_text if setting.default_text is not None else _default_text(setting.default)
    if default:
        text += f" [{default}]"
    return GroupedOption(
        [setting.flag, param_of(setting)],
        group=group,
        default=None,
        help=text,
        metavar=setting.metavar,
        **_attributes(setting.kind),
    )


def _default_text(default: Any) -> str:
    if default is None or isinstance(default, bool | tuple | msgspec.Struct) or default is msgspec.NODEFAULT:
        return ""
    return f"{default:g}" if isinstance(default, float) else str(default)


def _attributes(kind: Any) -> dict[str, Any]:
    """Return click's attributes for a type."""
    match value_kind(kind):
        case range() as numbers:
            return {"type": click.IntRange(min=numbers.start)}
        case tuple() as choices:
            return {"type": click.Choice(choices)}
        case None:
            return {"multiple": True}
        case each if each is bool:
            return {"is_flag": True}
        case each if each is str:
            return {}
        case each:
            return {"type": each}


class _Window(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions only
    """A number of tokens, or `all`, which becomes 0."""

    name = "window"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if value == "all":
            return 0
        return click.IntRange(min=1).convert(value, param, ctx)


WINDOW = _Window()
