"""Command-line options, generated from settings, and the settings that were given by them.

No type of a path looks at the file system. `kvarts.base.files` reports paths that cannot be read or written, with the
library's exit codes and messages.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from math import inf, isfinite
from pathlib import Path
from typing import Any

import click
import msgspec
from click.shell_completion import CompletionItem

from kvarts.base.errors import ConfigError, did_you_mean, renamed
from kvarts.base.files import check_outputs
from kvarts.base.settings import (
    SET,
    Section,
    Setting,
    inline_settings,
    is_inline,
    param_of,
    param_of_inline,
    value_kind,
)
from kvarts.cli.completed import NamesType, PathRole, keys_completed, names_of, path_completed
from kvarts.cli.effects import check_effects
from kvarts.cli.helps import common_of, examples_of, groups_of, summary_of
from kvarts.cli.process import say

__all__ = [
    "ALIASES",
    "ANSWERS",
    "DERIVED",
    "DIRECTORY",
    "INPUT",
    "LINES",
    "OUTPUT",
    "WINDOW",
    "Command",
    "Group",
    "GroupedOption",
    "KeyOption",
    "PathRole",
    "grouped",
    "in_our_words",
    "key_option",
    "line_options",
    "open_option",
    "options_of",
    "role_of",
    "set_option",
]

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
    "--chunked-prefill-size": "--max-batched-tokens",
    "--max-running-requests": "--max-seqs",
    "--mem-fraction-static": "--memory-fraction",
    **{
        name: name
        for name in (
            "--chat-template",
            "--disable-overlap-schedule",
            "--disable-priority-preemption",
            "--enable-priority-scheduling",
            "--enforce-eager",
            "--kv-cache-metrics",
            "--kv-cache-metrics-sample",
            "--max-model-len",
            "--max-prefill-tokens",
            "--no-async-scheduling",
            "--priority-scheduling-preemption-threshold",
            "--hicache-ratio",
            "--hicache-size",
            "--hicache-storage-backend",
            "--hicache-storage-backend-extra-config",
            "--hicache-storage-prefetch-policy",
            "--hicache-storage-prefetch-retry-max-attempts",
            "--hicache-storage-prefetch-retry-poll-interval",
            "--hicache-write-policy",
            "--radix-eviction-policy",
            "--radix-eviction-policy-config",
            "--retraction-policy",
            "--schedule-conservativeness",
            "--schedule-low-priority-values-first",
            "--schedule-policy",
            "--tokenizer",
            "--tool-call-parser",
            "--trust-remote-code",
            "--column",
            "--output-tokens",
            "--run",
            "--trace-block-size",
        )
    },
}
"""Options of `vllm serve` and of SGLang's server, and the option here with the same meaning and values.

It may be a key of `--set`. The last four are keys of all commands that read traces, and may be spelled as options.
"""

ANSWERS = {
    "--cpu-offload-gb": "kvarts keeps weights on the device; for KV below it, give --host-memory 64GiB",
    "--enable-chunked-prefill": "prompts are always chunked; --max-batched-tokens sets the largest chunk",
    "--enable-expert-parallel": "give --set expert_parallel=N, over how many devices experts are divided",
    "--enable-prefix-caching": "the prefix cache is on unless --set no_prefix_caching=true is given",
    "--kv-offloading-size": "give --host-memory 64GiB",
    "--num-gpu-blocks": "give --pages N",
    "--quantization": "give --set weight_dtype=fp8, and --set kv_dtype=fp8 for KV",
    "--swap-space": "give --host-memory 64GiB",
    "-q": "give --set weight_dtype=fp8, and --set kv_dtype=fp8 for KV",
}
"""Options of `vllm serve` without an equivalent, and what to do instead."""
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
LINES = {"--vllm-args": "vllm serve", "--sglang-args": "sglang serve"}
"""Options that take argument lines of servers, and what starts these."""
HELP_ALL = "kvarts.help_all"
NEVER = ("--set reclaim_after_s",)
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

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[Any]]:
        return path_completed(self.role, param, incomplete)


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


def in_our_words(
    args: Sequence[str], known: Collection[str], keys: Mapping[str, click.Option] | None = None
) -> list[str]:
    """Return `args` with vLLM's option names replaced, and `--set KEY=VALUE` as one word that the parser knows.

    `known`: the options of the command; `keys`: its keys of `--set`, with the options that they stand for. Raise
    UsageError for an option in ANSWERS, for one that is a key, and for an unknown key. Words after `--` are not
    changed.
    """
    keys = keys or {}
    of_flags = {option.flag: option for option in keys.values() if isinstance(option, KeyOption)}
    ours: list[str] = []
    words = iter(enumerate(args))
    for place, word in words:
        if word == "--":
            return [*ours, *args[place:]]
        name, equals, value = word.partition("=")
        if name == "--set" and keys and (equals or place + 1 < len(args)):
            ours += _of_key(value if equals else next(words)[1], keys)
            continue
        if name not in known:
            same = ALIASES.get(name, "")
            if same in known:
                name = same
            elif same in of_flags:
                option = of_flags[same]
                name, equals, value = option.opts[0], *(("=", "true") if option.type is click.BOOL else (equals, value))
            elif (option_of := of_flags.get(f"--{name[5:]}")) and name[:5] == "--no-" and option_of.type is click.BOOL:
                name, equals, value = option_of.opts[0], "=", "false"
            elif name in of_flags:
                raise click.UsageError(f"No such option: {name}: give {of_flags[name].opts[0]}=VALUE.")
            elif name in ANSWERS:
                raise click.UsageError(f"No such option: {name}: {ANSWERS[name]}.")
        ours.append(f"{name}{equals}{value}")
    return ours


def _of_key(text: str, keys: Mapping[str, click.Option]) -> list[str]:
    """Return the word for `KEY=VALUE`; none for a flag that is false."""
    key, equals, value = text.partition("=")
    if not equals:
        raise click.UsageError(f"Invalid value for '--set': {text!r} is not KEY=VALUE.")
    option = keys.get(key.strip())
    if option is None:
        known = did_you_mean(key, list(keys)) or f"Known: {', '.join(sorted(keys))}."
        raise click.UsageError(f"Invalid value for '--set': there is no key {key!r}. {known}")
    if option.is_flag:
        if value not in ("true", "false"):
            raise click.UsageError(f"Invalid value for '--set': {key} is true or false, not {value!r}.")
        return [option.opts[0]] if value == "true" else []
    return [f"{option.opts[0]}={value}"]


class GroupedOption(click.Option):
    """An option listed under a title in the help. `key`: of `--set`, for the same."""

    def __init__(self, *args: Any, group: str = "Options", key: str = "", **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.group = group
        self.key = key


def key_option(*names: str, **attributes: Any) -> Decorator:
    """Return `click.option` for a setting without an option of its own; see KeyOption."""
    return click.option(*names, cls=KeyOption, **attributes)


class KeyOption(GroupedOption):
    """A setting without an option of its own: `--set KEY=VALUE`, which reaches the parser as one word.

    It is declared like an option. `flag`: the option that it would be. `key`: the name of that by default.
    """

    def __init__(self, names: Sequence[str], *, key: str = "", is_flag: bool = False, **attributes: Any) -> None:
        (self.flag,) = (name for name in names if name.startswith("--"))
        key = key or self.flag.removeprefix("--").replace("-", "_")
        param = next((name for name in names if not name.startswith("-")), key)
        if is_flag:
            attributes = {"type": click.BOOL, "default": False, **attributes}
        super().__init__([SET + key, param], key=key, hidden=True, **attributes)

    def record_of_key(self, ctx: click.Context) -> tuple[str, str]:
        """Return the lines of the help for the key: its name and value, and its meaning."""
        shown = copy(self)
        shown.hidden = False
        record = shown.get_help_record(ctx)
        return f"{self.key}={self.make_metavar(ctx)}", record[1] if record else ""


class Command(click.Command):
    """Base class of all commands.

    Before a command runs, it refuses outputs that would destroy an input or each other, and options that cannot have an
    effect. With `checks_effects`, the command checks effects itself, once it has read a settings file. An error whose
    field is a parameter of a function is renamed to the option that was typed. Options may be spelled as in vLLM.
    """

    checks_effects = False

    def __init__(
        self,
        name: str | None,
        *,
        params: list[click.Parameter] | None = None,
        checks_effects: bool = False,
        **attributes: Any,
    ) -> None:
        keys = [param for param in params or () if isinstance(param, KeyOption)]
        shown = [param for param in params or () if not isinstance(param, KeyOption)]
        super().__init__(name, params=[*shown, *([set_option()] if keys else [])], **attributes)
        self.keys = keys
        self.checks_effects = checks_effects
        has_weights = any(param.opts[0] == "--dtype" for param in self.every)
        for param in self.every:
            if param.type is click.STRING and (names := names_of(param, has_weights=has_weights)) is not None:
                param.type = NamesType(names)

    @property
    def every(self) -> list[click.Parameter]:
        """The parameters, and the keys of `--set`."""
        return [*self.params, *self.keys]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, after renaming vLLM's options and reading `--set` and argument lines of servers."""
        known = {name for param in self.params for name in param.opts}
        keys = self.known_keys()
        if not known.isdisjoint(LINES):
            args = self._with_lines(args, keys, LINES.keys() & known)
        return super().parse_args(ctx, in_our_words(args, known, keys))

    def _with_lines(self, args: Sequence[str], keys: Collection[str], names: Collection[str]) -> list[str]:
        """Return `args` after the settings of the argument lines in them, over which the others win.

        `names`: the options that take lines.
        """
        lines: list[tuple[str, str]] = []
        others: list[str] = []
        words = iter(args)
        for word in words:
            name, equals, value = word.partition("=")
            if name not in names:
                others.append(word)
                continue
            line = value if equals else next(words, None)
            if line is None:
                raise click.UsageError(f"Option '{name}' requires an argument.")
            lines.append((name, line))
        if not lines:
            return others
        if len({name for name, _ in lines}) > 1:
            raise click.UsageError(f"{' and '.join(LINES)} are of two servers: leave one of them out.")
        from kvarts.cli.argument_lines import settings_of_line

        has_model = any(param.human_readable_name == "MODEL" for param in self.params)
        given = [
            pair
            for name, line in lines
            for pair in settings_of_line(line, name, keys.__contains__, has_model=has_model, beside=others, say=say)
        ]
        if any(word.partition("=")[0] == "--model" for word in others):
            given = [pair for pair in given if pair[0] != "model"]  # that option may be repeated
        return [*(word for key, value in given for word in ("--set", f"{key}={value}")), *others]

    def known_keys(self) -> dict[str, click.Option]:
        """Return the keys of `--set`, with the options that they stand for; empty for a command without `--set`."""
        if not self.keys:
            return {}
        return {param.key: param for param in self.every if isinstance(param, GroupedOption) and param.key}

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the parameters, the keys of `--set`, and the options that print help."""
        return [*super().get_params(ctx), *self.keys, _help_all(hidden=not (self.keys or common_of(ctx)))]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options by group, in order of first appearance; options without a group are first.

        A command with many options shows only the common ones, unless `--help-all` is given.
        """
        is_all = ctx.meta.get(HELP_ALL, False)
        common = () if is_all else common_of(ctx)
        groups: dict[str, list[tuple[str, str]]] = {"Options": []}
        num_left = 0
        for param in self.get_params(ctx):
            if isinstance(param, KeyOption):
                num_left += not is_all
                if is_all:
                    groups.setdefault(f"{param.group}: keys of --set", []).append(param.record_of_key(ctx))
                continue
            record = param.get_help_record(ctx) if param.param_type_name == "option" else None
            if record is None:
                continue
            if common and param.opts[0] not in common and not {"--help", "--help-all"}.intersection(param.opts):
                num_left += 1
                continue
            groups.setdefault(getattr(param, "group", "Options"), []).append(record)
        for title, records in groups.items():
            if records:
                with formatter.section(title):
                    room = formatter.width - formatter.current_indent - max(len(name) for name, _ in records) - 2
                    formatter.write_dl([(name, _in_short(text, room)) for name, text in records] if common else records)
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
        for param in self.every:
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
        for param in self.every:
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
        for param in self.every:
            shown = param.opts[0] if param.param_type_name == "option" else param.human_readable_name
            for name in (param.name or "", *(name.removeprefix("--").replace("-", "_") for name in param.opts)):
                typed.setdefault(name, shown)
            if isinstance(param, KeyOption):
                typed[param.flag] = shown
                typed.setdefault(param.flag.removeprefix("--").replace("-", "_"), shown)
                typed.setdefault(param.key, shown)
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


def _in_short(text: str, room: int) -> str:
    """Return the beginning of an option's help, in `room` characters where it can be cut, and its default.

    It is the first sentence, or less if that is long.
    """
    match = re.search(r" \[([^\[;]*)[^\[]*\](?:  \[.*\])?$", text)
    default = f" [{match[1]}]" if match else ""
    said = text[: match.start()] if match else text
    for end in (". ", "; ", ", ", ": ", " ("):
        if len(said) + len(default) > room or end == ". ":
            said = said.partition(end)[0].rstrip(".") + "."
    return said + default


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
    """Return `click.option` for options under the title `group`; with `cls=KeyOption`, for keys of `--set`."""

    def option(*names: str, **attributes: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        return click.option(*names, **{"cls": GroupedOption, "group": group, **attributes})

    return option


def open_option(option: Callable[..., Decorator] = click.option) -> Decorator:
    """Return the `--open` option of a command that has `--html`; `option` is its decorator."""
    return option("--open", "opens", is_flag=True, help="Open the page in the browser as well.")


def set_option() -> click.Option:
    """Return `--set` of a command with keys, which is read before the command line is parsed."""

    def keys_of(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem[Any]]:
        assert isinstance(ctx.command, Command)
        return keys_completed(ctx.command.known_keys(), ctx, incomplete)

    return click.Option(
        ["--set"], metavar="KEY=VALUE", multiple=True, expose_value=False, shell_complete=keys_of,
        help="Any other setting; --help-all lists their keys. May be repeated.",
    )  # fmt: skip


def line_options(*servers: str) -> list[click.Option]:
    """Return the options that take argument lines, which are read before the command line is parsed."""
    return [
        click.Option(
            [name], metavar="LINE|@FILE", multiple=True, expose_value=False,
            help=f"Settings in an argument line of `{server}`, or in a file with one. Options given here win.",
        )
        for name, server in LINES.items()
        if not servers or server in servers
    ]  # fmt: skip


def options_of(
    sections: Iterable[Section], only: Sequence[str] | None = None, shown: Collection[str] | None = None
) -> list[click.Option]:
    """Return an option, or a key of `--set`, for each setting that has a flag; with `only`, for those with these keys.

    `shown`: the keys of settings that are options, among those that can be; None for all.

    An option that is not given is None, so that the file decides, and then the setting's default.
    """
    sections = [section for section in sections if not section.is_named]
    options = [
        _option(setting, section.title, is_shown=shown is None or setting.key in shown)
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


def _option(setting: Setting, group: str, *, is_shown: bool) -> click.Option:
    assert setting.flag is not None
    is_shown = is_shown and not setting.flag.startswith(SET)
    text = setting.help
    default = setting.default_text if setting.default_text is not None else _default_text(setting.default)
    if default:
        text += f" [{default}]"
    return (GroupedOption if is_shown else KeyOption)(
        [f"--{setting.name}", param_of(setting)],
        group=group,
        key=setting.key,
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
