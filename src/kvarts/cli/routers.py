"""The part of `kvarts replay` for routers: the age of their view of workers, and the user's own routers."""

from __future__ import annotations

from kvarts.base.settings import Section
from kvarts.cli.parts import CommandPart
from kvarts.sim.routers.config import Routing

__all__ = ["PART"]


class RoutersPart(CommandPart):
    """Staleness, lag, seed and queue: options, and the table [routing]."""

    sections = (Section(struct=Routing, title="Router", table="routing"),)


PART = RoutersPart()
