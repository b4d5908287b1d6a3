"""The part of `kvarts replay` that is about routers: how they know their workers, and routers of one's own."""

from __future__ import annotations

import sys
from pathlib import Path

from kvarts.cli.parts import Part
from kvarts.routers.config import Routing
from kvarts.settings import Given, Section

__all__ = ["PART"]

KEY = "router"


class RoutersPart(Part):
    """Staleness, lag, seed and queue: options, and the table [routing]."""

    sections = (Section(struct=Routing, title="Router", table="routing"),)

    def check(self, given: Given) -> None:
        """Raise ConfigError where a file names code; let Python find code that the command line names."""
        if KEY not in given or ":" not in given[KEY]:
            return
        from kvarts.routers.spec import is_own  # most routers need no other code

        if not is_own(given[KEY]):
            return
        if given.source_of(KEY).path is not None:
            # Files are passed around; opening one must not run what lies beside it.
            raise given.error(
                KEY, "names code, which no file may", hint=f"Give it on the command line: --router {given[KEY]}."
            )
        if "" not in sys.path:
            sys.path.append(str(Path.cwd()))  # where a router of one's own is most often


PART = RoutersPart()
