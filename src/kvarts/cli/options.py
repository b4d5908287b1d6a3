"""Options of the command line, made from settings, and what was given by them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import click
import msgspec

from kvarts.cli.paths import role_of
from kvarts.errors import ConfigError
from kvarts.files import check_outputs
from kvarts.settings import Flags, Given, Section, Setting

__all__ = ["Command", "GroupedCommand", "GroupedOption", "given_by_flags", "grouped", "options_of", "settings_by_param"]


class GroupedOption(click.Option):
    """An option that the help lists under a title."""

    def __init__(self, *args: Any, group: str, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.group = group


class Command(click.Command):
    """A command: all commands are of this class.

    Before anything is done, it refuses outputs that would destroy an input or each other; and an error that names a
    parameter of a function names the option that was typed.
    """

    def invoke(self, ctx: click.Context) -> Any:
        """Carry out the command."""
        paths: dict[str | None, list[Path]] = {}
        for param in self.params:
            given = ctx.params.get(param.name or "")
            if given is not None:
                paths.setdefault(role_of(param), []).extend(given if isinstance(given, tuple) else (given,))
        check_outputs(paths.get("output", ()), (*paths.get("input", ()), *paths.get("directory", ())))
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            option = self._typed(error)
            if option is None:
                raise
            raise ConfigError(error.what, hint=error.hint, field=option) from error

    def _typed(self, error: ConfigError) -> str | None:
        """Return the option or argument that the field of an error stands for; None where it stands for none."""
        if error.path is not None or error.field is None:
            return None
        for param in self.params:
            names = {param.name, *(name.removeprefix("--").replace("-", "_") for name in param.opts)}
            if error.field in names:
                return param.opts[0] if param.param_type_name == "option" else param.human_readable_name
        return None


class GroupedCommand(Command):
    """A command that lists options in its help by their groups, in the order in which these first appear."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the groups; what is in none comes first."""
        groups: dict[str, list[tuple[str, str]]] = {"Options": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if param.param_type_name == "option" else None
            if record is not None:
                groups.setdefault(getattr(param, "group", "Options"), []).append(record)
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)


def grouped(group: str) -> Callable[..., Callable[[Callable[..., Any]], Callable[..., Any]]]:
    """Return `click.option` for options under the title `group`."""

    def option(*names: str, **attributes: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        return click.option(*names, cls=GroupedOption, group=group, **attributes)

    return option


def options_of(sections: Iterable[Section], only: Sequence[str] | None = None) -> list[click.Option]:
    """Return an option for each setting that has a flag; with `only`, for those of these keys.

    An option that is left out is None, so that a file decides, and then the setting's default.
    """
    return [
        _option(setting, section.title)
        for section in sections
        if not section.is_named
        for setting in section.settings
        if setting.flag is not None and (only is None or setting.key in only)
    ]


def settings_by_param(sections: Iterable[Section]) -> dict[str, Setting]:
    """Return the settings that have a flag, by the name of the option's parameter."""
    return {
        _param(setting): setting
        for section in sections
        if not section.is_named
        for setting in section.settings
        if setting.flag is not None
    }


def given_by_flags(params: Mapping[str, Any], sections: Iterable[Section]) -> Given:
    """Return what the options of `options_of` gave; what else is among `params` is left alone."""
    given = Given()
    for param, setting in settings_by_param(sections).items():
        value = params.get(param)
        if value is not None and value != ():
            given.add(setting, value, Flags())
    return given


def _param(setting: Setting) -> str:
    assert setting.flag is not None
    return "set_" + setting.flag.removeprefix("--").replace("-", "_")


def _option(setting: Setting, group: str) -> click.Option:
    assert setting.flag is not None
    text = setting.help
    default = setting.default_text if setting.default_text is not None else _default_text(setting.default)
    if default:
        text += f" [{default}]"
    return GroupedOption(
        [setting.flag, _param(setting)],
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
    """Return what a type is on the command line. Of several types, a value is a text that the struct reads."""
    if get_origin(kind) is Annotated:
        kind, *metas = get_args(kind)
        least = next((meta.ge for meta in metas if isinstance(meta, msgspec.Meta) and meta.ge is not None), None)
        return _attributes(kind) if least is None else {"type": click.IntRange(min=int(least))}
    if get_origin(kind) is Literal:
        return {"type": click.Choice(get_args(kind))}
    if get_origin(kind) is tuple:
        return {"multiple": True}
    of_union = [part for part in get_args(kind) if part is not type(None)]
    if of_union:
        return _attributes(of_union[0]) if len(of_union) == 1 else {}
    if kind is bool:
        return {"is_flag": True}
    return {"type": kind} if kind in (int, float) else {}
