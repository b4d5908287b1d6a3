"""The part of `kvarts replay` for routers: the age of their view of workers, and the user's own routers."""

from __future__ import annotations

from kvarts.cli.parts import CommandPart
from kvarts.routers.config import Routing
from kvarts.settings import Section

__all__ = ["PART"]


class RoutersPart(CommandPart):
    """Staleness, lag, seed and queue: options, and the table [routing]."""

    sections = (Section(struct=Routing, title="Router", table="routing"),)


PART = RoutersPart()
