"""The part of `kvarts replay` for sessions."""

from __future__ import annotations

from kvarts.base.settings import Flags, Given, Section
from kvarts.cli.parts import CommandPart
from kvarts.sim.sessions import SessionReplay

__all__ = ["PART"]

TABLE = "sessions"


class SessionsPart(CommandPart):
    """KV that engines retain for sessions: options, and the table [sessions]."""

    sections = (Section(struct=SessionReplay, title="Sessions", table=TABLE),)

    def check(self, given: Given) -> None:
        """Raise ConfigError for a setting that needs another one that was not given."""
        keys = {key.removeprefix(f"{TABLE}.") for key in given.in_table(TABLE)}
        for key in ("sink", "at_capacity"):
            if key in keys and "window" not in keys and given.source_of(f"{TABLE}.{key}") == Flags():
                raise given.error(
                    f"{TABLE}.{key}",
                    "is of bounded sessions",
                    hint="Give --set sessions.window=N as well, or leave it out.",
                )
        has_host = not {"offload.host_pages", "offload.host_memory"}.isdisjoint(given.in_table("offload"))
        has_host = has_host or bool(given.names("tier"))
        if "retention" in keys and given[f"{TABLE}.retention"] == "host" and not has_host:
            raise given.error(f"{TABLE}.retention", "needs host memory", hint="Give --host-memory or --host-pages.")


PART = SessionsPart()
