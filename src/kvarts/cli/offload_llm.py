"""Tier options of the commands that run real models: host memory, and files below it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from kvarts.cli.paths import DIRECTORY
from kvarts.errors import ConfigError

__all__ = ["add_options", "settings_of"]

Command = Callable[..., None]

OPTIONS = (
    click.option("--host-memory", metavar="SIZE", help="Host memory below the pages, on a CPU: 4GiB."),
    click.option("--disk-memory", metavar="SIZE", help="Files below host memory: 20GiB."),
    click.option("--disk-path", metavar="DIR", type=DIRECTORY,
                 help="Directory of the files. A later run of the same model reads them again."),
)  # fmt: skip


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
