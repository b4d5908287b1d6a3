"""The parts of `kvarts replay`, and of the commands that run real models, for tiers below the device."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import click

from kvarts.base.errors import ConfigError
from kvarts.base.settings import Flags, Given, Section
from kvarts.base.settings import settings_of as settings_of_struct
from kvarts.cli.options import DIRECTORY, GroupedOption, key_option
from kvarts.cli.parts import CommandPart
from kvarts.core.tiers.config import TIERS, OffloadConfig

__all__ = ["PART", "add_options", "settings_of"]

TABLE = "offload"
Command = Callable[..., None]

OPTIONS = (
    click.option("--host-memory", metavar="SIZE", help="Host memory below the pages, on a CPU: 4GiB."),
    key_option("--disk-memory", metavar="SIZE", help="Files below host memory: 20GiB."),
    key_option("--disk-path", metavar="DIR", type=DIRECTORY,
               help="Directory of the files. A later run of the same model reads them again."),
)  # fmt: skip


class OffloadPart(CommandPart):
    """Host memory and files: options, and the table [offload]."""

    sections = (Section(struct=OffloadConfig, title="Host memory and files", table=TABLE), TIERS)
    is_of_engines = True
    tier_flag = "--host-pages"

    def options(self) -> Sequence[click.Option]:
        """Return `--tier`, which may be repeated."""
        return (
            GroupedOption(
                ["--tier", "tiers"], group=TIERS.title, multiple=True, metavar="NAME:KEY=VALUE,...",
                help="A tier below the device, the fastest first, or changes to that [[tier]] of the file: "
                f"{', '.join(each.field for each in settings_of_struct(TIERS.struct))}. Instead of --host-memory "
                "and offload.disk_memory, for other tiers than host memory and files.",
            ),
        )  # fmt: skip

    def given(self, params: dict[str, Any]) -> Given:
        """Return the settings from `--tier`."""
        given = Given()
        for text in params.pop("tiers", None) or ():
            name, _, rest = text.partition(":")
            flag = f"--tier {name}"
            if not re.fullmatch(r"[\w-]+", name):
                raise ConfigError(
                    f"{text!r} is not NAME:KEY=VALUE", field="--tier", hint="For example --tier dram:size=64GiB."
                )
            if name in given.names(TIERS.table):
                raise ConfigError("is given twice", field=flag, hint="Give each tier a different name.")
            settings = {each.field: each for each in settings_of_struct(TIERS.struct, f"{TIERS.table}.{name}")}
            spellings = {each.key: f"{flag}: {each.field}" for each in settings.values()}
            source = Flags({**spellings, f"[{TIERS.table}.{name}]": flag})
            given.add_name(TIERS.table, name, source)
            for part in filter(None, rest.split(",")):
                key, equals, value = (word.strip() for word in part.partition("="))
                if not equals or key not in settings:
                    raise ConfigError(
                        f"{part!r} is not known", field=flag, hint=f"Known: {', '.join(settings)}, each with =VALUE."
                    )
                if settings[key].key in given:
                    raise ConfigError("is given twice", field=f"{flag}: {key}", hint="Keep one of them.")
                given.add(settings[key], _number(value) if key in NUMBERS else value, source)
        return given

    def check(self, given: Given) -> None:
        """Raise ConfigError for an offload option without a size for host memory."""
        by_flags = [key for key in given.in_table(TABLE) if given.source_of(key) == Flags()]
        tables = (TABLE, "prefill", "decode", *(f"pool.{name}" for name in given.names("pool")))
        sizes = [f"{table}.{name}" for table in tables for name in ("host_pages", "host_memory")]
        if given.names(TIERS.table) or any(size in given for size in (*sizes, "hicache_ratio", "hicache_size")):
            return
        if "store.pages" in given or "store.memory" in given:
            read = (*OF_STORES, *(("kv_bytes_per_token",) if "model" not in given else ()))
            by_flags = [key for key in by_flags if key.removeprefix(f"{TABLE}.") not in read]
        if by_flags:
            raise given.error(
                by_flags[0], "has no effect without a size", hint="Give --host-pages or --host-memory as well."
            )


NUMBERS = ("pages", "latency_us")
OF_STORES = ("policy", "target_free", "store_within_ms", "load_kv")
"""Fields of [offload] that a store alone reads, or that are refused with it for another reason."""


def _number(text: str) -> int | float | str:
    """Return the number that `text` is; else the text, which the setting then refuses."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


PART = OffloadPart()


def add_options(command: Command) -> Command:
    """Add the options that `settings_of` reads."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


def settings_of(values: dict[str, Any]) -> dict[str, Any]:
    """Return the tier settings of an LLM."""
    from kvarts.core.tiers.config import OffloadConfig

    host, disk, path = (values[name] for name in ("host_memory", "disk_memory", "disk_path"))
    if (disk is None) != (path is None):
        raise ConfigError(
            "files need both a size and a directory",
            field="disk_path",
            hint="Give --set disk_memory=SIZE and --set disk_path=DIR.",
        )
    if host is None and disk is None:
        return {}
    return {"offload": OffloadConfig(host_memory=host, disk_memory=disk), "disk_path": path}
