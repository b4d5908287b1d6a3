"""The parts of `kvarts replay`, and of the commands that run real models, for tiers below the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from kvarts.cli.options import DIRECTORY
from kvarts.cli.parts import CommandPart
from kvarts.errors import ConfigError
from kvarts.offload.config import OffloadConfig
from kvarts.settings import Flags, Given, Section

__all__ = ["PART", "add_options", "settings_of"]

TABLE = "offload"
Command = Callable[..., None]

OPTIONS = (
    click.option("--host-memory", metavar="SIZE", help="Host memory below the pages, on a CPU: 4GiB."),
    click.option("--disk-memory", metavar="SIZE", help="Files below host memory: 20GiB."),
    click.option("--disk-path", metavar="DIR", type=DIRECTORY,
                 help="Directory of the files. A later run of the same model reads them again."),
)  # fmt: skip


class OffloadPart(CommandPart):
    """Host memory and files: options, and the table [offload]."""

    sections = (Section(struct=OffloadConfig, title="Host memory and files", table=TABLE),)
    tier_flag = "--host-pages"

    def check(self, given: Given) -> None:
        """Raise ConfigError for an offload option without a size for host memory."""
        by_flags = [key for key in given.in_table(TABLE) if given.source_of(key) == Flags()]
        tables = (TABLE, "prefill", "decode", *(f"pool.{name}" for name in given.names("pool")))
        sizes = [f"{table}.{name}" for table in tables for name in ("host_pages", "host_memory")]
        sizes += ["store.pages", "store.memory"]  # what a token weighs, it weighs there, too
        if by_flags and not any(size in given for size in sizes):
            raise given.error(
                by_flags[0], "has no effect without a size", hint="Give --host-pages or --host-memory as well."
            )


PART = OffloadPart()


def add_options(command: Command) -> Command:
    """Add the options that `settings_of` reads."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


def settings_of(values: dict[str, Any]) -> dict[str, Any]:
    """Return the tier settings of an LLM."""
    from kvarts.offload.config import OffloadConfig

    host, disk, path = (values[name] for name in ("host_memory", "disk_memory", "disk_path"))
    if (disk is None) != (path is None):
        raise ConfigError(
            "files need both a size and a directory", field="disk_path", hint="Give --disk-memory and --disk-path."
        )
    if host is None and disk is None:
        return {}
    return {"offload": OffloadConfig(host_memory=host, disk_memory=disk), "disk_path": path}
