"""The command lines that a plan lists."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvarts.base.settings import INLINE, SET, Given, Section, Setting, is_inline, settings_of
from kvarts.plan.purchases import given_policy
from kvarts.sim.report.advice import as_size

if TYPE_CHECKING:
    from kvarts.sim.config import ReplayConfig

__all__ = ["CommandLines", "command_line", "listed_tiers", "of_host_memory"]

DROPPED_BY = {"pages": ("kv_memory",), "speedup": ("concurrency",)}


def command_line(
    given: Given,
    sections: Sequence[Section],
    trace: Path | None,
    config_file: Path | None,
    changes: Mapping[str, Any],
    command: Sequence[str] = ("replay",),
    options: Collection[str] | None = None,
) -> str:
    """Return a `kvarts replay` command with the options given on the command line, overridden by `changes`.

    `changes` maps setting keys to values; None omits the option. `command`: another one, with only `options`; its other
    settings are keys of `--set`.
    """
    words = ["kvarts", *command]
    done: set[str] = set()
    if trace is not None:
        words.append(str(trace))
    if config_file is not None:
        words += ["--config", str(config_file)]
    dropped = {key for changed in changes for key in DROPPED_BY.get(changed, ())}
    for section in sections:
        inline: dict[str, list[str]] = {}
        for setting in () if section.is_named else section.settings:
            if setting.flag is None or setting.key in dropped:
                continue
            if setting.flag in done:
                continue
            if setting.key in changes:
                value = changes[setting.key]
            elif setting.key in given and _is_from_command_line(given, setting.key):
                value = given[setting.key]
            else:
                continue
            if is_inline(setting):
                option, _, name = setting.flag.partition(INLINE)
                if value is not None:
                    inline.setdefault(option, []).append(f"{name}={_text(value)}")
            elif value is not None:
                done.add(setting.flag)
                words += _words(setting, value, options)
        for option, values in inline.items():
            words += [option, ",".join(values)]
        if section.into:
            words += _listed_words(given, section, changes)
    return shlex.join(words)


def _words(setting: Setting, value: Any, options: Collection[str] | None) -> list[str]:
    """Return the words that give a value: those of the option, else those of `--set`."""
    assert setting.flag is not None
    if setting.flag.startswith(SET) or (options is not None and setting.flag not in options):
        if value is False:
            return []
        return [SET.strip(), f"{setting.key}={'true' if value is True else _text(value)}"]
    if isinstance(value, bool):
        return [setting.flag] if value else []
    return [setting.flag, _text(value)]


def _listed_words(given: Given, section: Section, changes: Mapping[str, Any]) -> list[str]:
    """Return an option for each table of a list that has values from the command line, or changes."""
    words = []
    for name in given.names(section.table):
        settings = {each.field: each for each in settings_of(section.struct, f"{section.table}.{name}")}
        dropped = {key for each in settings.values() if each.key in changes for key in each.replaces}
        values = {}
        for field, each in settings.items():
            if each.key in changes:
                values[field] = changes[each.key]
            elif each.key in given and each.key not in dropped and _is_from_command_line(given, each.key):
                values[field] = given[each.key]
        if values:
            text = ",".join(f"{field}={_text(value)}" for field, value in values.items())
            words += [f"--{section.table}", f"{name}:{text}"]
    return words


def listed_tiers(config: ReplayConfig) -> list[str]:
    """Return the names of the tiers of a list; empty without a list."""
    offload = {} if config.offload is None else config.offload.to_builtins()
    return [tier["name"] for tier in offload.get("tiers", ())]


def of_host_memory(config: ReplayConfig, host_bytes: int, policy: str) -> dict[str, Any]:
    """Return the changes, by setting key, that add host memory per device: as the first tier of a list, if any."""
    of_policy = "hicache_write_policy" if config.plans_batches else "offload.policy"
    changes = {"offload.host_memory": as_size(host_bytes), of_policy: policy}
    if not (listed := listed_tiers(config)):
        return changes
    assert config.offload is not None
    size = {f"tier.{listed[0]}.size": changes.pop("offload.host_memory")}
    return size if policy == given_policy(config) else {**size, **changes}


def _is_from_command_line(given: Given, key: str) -> bool:
    """Return whether the value was given on the command line. Values from a file need no option: --config names it."""
    return given.source_of(key).path is None


def _text(value: Any) -> str:
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    return str(value)


class CommandLines:
    """Builds the command lines that a plan lists, so that each of its points can be replayed or planned again.

    Here they are empty: those of a plan that was not made on the command line.
    """

    def plan(self, *more: str) -> str:
        """Return the command line of the plan, with `more` options."""
        return ""

    def replay(self, changes: Mapping[str, Any]) -> str:
        """Return the command line of a replay with `changes` by setting key; False drops a setting."""
        return ""

    def users_replay(self, users: int, copies: int, host_bytes: int, policy: str, settings: Mapping[str, Any]) -> str:
        """Return the command line of a replay of `users` in a closed loop, of so many `copies` of the trace.

        `host_bytes`: added per device, with a store policy.
        """
        return ""
