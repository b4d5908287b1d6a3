"""`kvarts replay`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from kvarts.base.settings import Given, Section, given_by_flags
from kvarts.cli.effects import check_effects
from kvarts.cli.options import (
    DERIVED,
    DIRECTORY,
    INPUT,
    LINES,
    Command,
    KeyOption,
    grouped,
    key_option,
    line_options,
    open_option,
    options_of,
    set_option,
)
from kvarts.cli.parts import CommandPart, concern_parts, load_parts
from kvarts.cli.replaying import OWN_SECTIONS, all_sections, read_settings, run_replay

__all__ = ["ReplayCommand", "replay_command"]

result = grouped("Results")


class ReplayCommand(Command):
    """The command, whose settings become options when its parameters are first read.

    `sections`: the settings among its options; None for all, including those of parts. A command line is parsed by a
    copy with fewer, so that parts are imported only if one of them may have to see it.
    """

    sections: tuple[Section, ...] | None = None
    _all: tuple[list[click.Parameter], list[KeyOption]] | None = None

    @property
    def params(self) -> list[click.Parameter]:
        """The argument and the options of the settings, then the options of the command itself."""
        return self._split()[0]

    @params.setter
    def params(self, own: list[click.Parameter]) -> None:
        self._own = [param for param in own if param.opts[0] != "--set"]

    @property
    def keys(self) -> list[KeyOption]:
        """The settings without an option of their own."""
        return self._split()[1]

    @keys.setter
    def keys(self, own: list[KeyOption]) -> None:
        self._own_keys = own

    def _split(self) -> tuple[list[click.Parameter], list[KeyOption]]:
        if self._all is None:
            declared = _declared(self.sections)
            keys = [*(param for param in declared if isinstance(param, KeyOption)), *self._own_keys]
            self._all = [*(param for param in declared if not isinstance(param, KeyOption)), *self._own], keys
        return self._all

    @property
    def parts(self) -> tuple[CommandPart, ...]:
        """The parts whose options are declared."""
        return load_parts() if self.sections is None else ()

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Parse `args` with the options that they need."""
        command = self if extra.get("resilient_parsing") else self._for(args)  # completion has to know all
        return super(ReplayCommand, command).make_context(info_name, args, parent, **extra)

    def _for(self, args: Sequence[str]) -> ReplayCommand:
        if {"--set", *LINES} & {word.partition("=")[0] for word in args}:
            return self
        fewer = self._with_only(())
        if not {word.partition("=")[0] for word in args if word.startswith("-")} <= _names(self._own):
            fewer = self._with_only(OWN_SECTIONS)
        return self if concern_parts(args, _names(fewer.params)) else fewer

    def _with_only(self, sections: tuple[Section, ...]) -> ReplayCommand:
        fewer = ReplayCommand.__new__(ReplayCommand)
        fewer.__dict__.update(self.__dict__, sections=sections, _all=None)
        return fewer


def _names(params: Sequence[click.Parameter]) -> set[str]:
    return {name for param in params for name in param.opts}


def _declared(sections: Sequence[Section] | None) -> list[click.Parameter]:
    """Return the argument, and the options of the settings; a part's own option replaces one with the same flag."""
    by_flag: dict[str, click.Option] = {}
    for option in options_of(all_sections() if sections is None else sections):
        by_flag.setdefault(option.opts[0], option)
    if sections is None:
        by_flag.update({option.opts[0]: option for part in load_parts() for option in part.options()})
    return [click.Argument(["trace"], required=False, type=INPUT), *by_flag.values(), set_option(), *line_options()]


@click.command("replay", cls=ReplayCommand, no_args_is_help=False, checks_effects=True)
@click.option("--config", "config_file", metavar="FILE", type=INPUT,
              help="TOML file with settings by their keys (max_seqs for --max-seqs), and trace or a [workload] "
              "table. Options given here win.")  # fmt: skip
@key_option("--workers", metavar="N", type=click.IntRange(min=1),
              help="Processes for replicas that do not affect each other, behind --router round-robin. [as many as "
              "there are cores, for 20,000 requests or more]")  # fmt: skip
@result("--json", "as_json", is_flag=True, help="Print the report as JSON instead of a table.")
@result("--report", "report_file", metavar="FILE", type=DERIVED,
        help="Write the report as JSON to FILE.")  # fmt: skip
@result("--requests", "requests_file", metavar="FILE", type=DERIVED,
        help="Write one JSON line a request to FILE, in arrival order.")  # fmt: skip
@result("--html", "html_file", metavar="FILE", type=DERIVED,
        help="Write a page to FILE that shows the run, and needs nothing else.")  # fmt: skip
@open_option(result)
@result("--run-dir", metavar="DIR", type=DIRECTORY,
        help="Write everything about the run to DIR, a new directory, for `kvarts report`: report, requests, "
        "timeline, events. With several models, a directory each in it.")  # fmt: skip
def replay_command(
    trace: Path | None,
    config_file: Path | None,
    html_file: Path | None,
    opens: bool,
    **params: Any,
) -> int:
    """Replay traffic through the KV-cache control plane, in virtual time.

    TRACE is in a form that `kvarts trace forms` lists. Without it, twelve bundled sessions of coding agents are
    replayed, on llama-3.1-8b on an h100-80gb if neither options nor --config say otherwise. The exit code is 6 if no
    request fits into the memory.
    """
    context = click.get_current_context()
    assert isinstance(context.command, ReplayCommand)
    parts = context.command.parts
    sections = all_sections() if parts else OWN_SECTIONS
    given = _given_on_command_line(params, sections, parts).over(read_settings(config_file, sections))
    return run_replay(
        given,
        trace,
        sections,
        parts,
        params,
        check_effects=lambda is_set: check_effects(context, is_set=is_set),
        config_file=config_file,
        html_file=html_file,
        opens=opens,
    )


def _given_on_command_line(params: dict[str, Any], sections: Sequence[Section], parts: Sequence[CommandPart]) -> Given:
    """Return the settings from options, and leave the other options in `params`."""
    given = given_by_flags(params, sections)
    for name in list(params):
        if name.startswith("set_"):
            del params[name]
    for part in parts:
        given = part.given(params).over(given)
    return given
