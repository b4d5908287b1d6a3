"""The part of `kvarts replay` for tiers below the device."""

from __future__ import annotations

from kvarts.cli.parts import CommandPart
from kvarts.offload.config import OffloadConfig
from kvarts.settings import Flags, Given, Section

__all__ = ["PART"]

TABLE = "offload"


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
