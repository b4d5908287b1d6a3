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
        if by_flags and not {f"{TABLE}.host_pages", f"{TABLE}.host_memory"} & set(given.in_table(TABLE)):
            raise given.error(
                by_flags[0], "has no effect without a size", hint="Give --host-pages or --host-memory as well."
            )


PART = OffloadPart()
