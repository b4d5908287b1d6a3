"""The part of `kvarts replay` that is about routers: how they know their workers, and routers of one's own."""

from __future__ import annotations

from kvarts.cli.parts import Part
from kvarts.routers.config import Routing
from kvarts.settings import Section

__all__ = ["PART"]


class RoutersPart(Part):
    """Staleness, lag, seed and queue: options, and the table [routing]."""

    sections = (Section(struct=Routing, title="Router", table="routing"),)


PART = RoutersPart()
