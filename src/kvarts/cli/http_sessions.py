"""Sessions over OpenAI's API: in the runtime that also serves gRPC, or in a server that only has HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvarts.base.errors import ConfigError
from kvarts.base.units import parse_bytes
from kvarts.cli.http_options import need_http, say
from kvarts.cli.options import DIRECTORY, WINDOW, GroupedOption, KeyOption
from kvarts.cli.process import ServesRuntime
from kvarts.core.parts.combines import check_combination, why_not

if TYPE_CHECKING:
    from kvarts.base.tenants import Keys
    from kvarts.doors.openai.opening import Opened

__all__ = ["beside", "check_options_beside", "open_sessions_of", "server_options"]

DRAIN_S = 5.0
MAX_SESSIONS = 1024
TTL_S = 3600.0
GIVEN = {
    "session_window": "--set session_window",
    "session_sink": "--set session_sink",
    "session_retention": "--set session_retention",
    "session_memory": "--set session_memory",
    "session_ttl": "--set session_ttl",
    "max_sessions": "--set max_sessions",
    "state_dir": "--state-dir",
}
"""Session options, by parameter."""


def server_options() -> list[click.Option]:
    """Return the session options of an HTTP server. Sessions are on unless `no_sessions` is."""
    title = "Sessions, of requests that name one"

    def key(*names: str, **attributes: Any) -> click.Option:
        return KeyOption(list(names), group=title, **attributes)

    return [
        key("--session-window", metavar="N", type=WINDOW,
               help="Keep the KV of the last N tokens, in pages that are reserved; all: of all tokens, in the prefix "
               "cache. [all]"),
        key("--session-sink", metavar="N", type=click.IntRange(min=0),
               help="With a window, keep that of the first N tokens as well. [4]"),
        key("--session-retention", type=click.Choice(["pin", "cache", "host"]),
               help="Without a window: where KV is between turns. [cache]"),
        key("--session-memory", metavar="SIZE",
               help="Most memory that windows may reserve: 4GiB. [half of the pages]"),
        key("--session-ttl", metavar="SECONDS", type=click.FloatRange(min=0.0, min_open=True),
               help=f"Time after which idle sessions expire. [{TTL_S:g}]"),
        key("--max-sessions", metavar="N", type=click.IntRange(min=1),
               help=f"Most sessions; one more ends the session that is idle longest. [{MAX_SESSIONS}]"),
        GroupedOption(["--state-dir"], group=title, metavar="DIR", type=DIRECTORY,
               help="Keep sessions here, as `kvarts serve sessions` does. [in memory]"),
        key("--no-sessions", is_flag=True, help="Answer as if no session had been named."),
    ]  # fmt: skip


def check_options_beside(other: dict[str, str], values: Mapping[str, Any]) -> None:
    """Raise ConfigError if an option of sessions is given that does not combine with `other`, as in combines.py."""
    for name in GIVEN:
        if values.get(name) is not None:
            check_combination({"sessions": name, **other})


def given_options(values: Mapping[str, Any]) -> list[str]:
    """Return the options of sessions in the command line."""
    return [flag for name, flag in GIVEN.items() if values[name] is not None]


def open_sessions_of(opened: Opened, values: dict[str, Any], keys: Keys | None) -> None:
    """Let requests name sessions, with the options of `server_options`. Raise ConfigError.

    `keys`: the owners, with their shares of the limits of all sessions.
    """
    given = given_options(values)
    why = _why_not(opened, values)
    if why:
        if given:
            raise ConfigError(f"is of sessions: {why}", field=given[0], hint="Leave it out.")
        if not values["no_sessions"]:  # with no_sessions, session names are ignored
            for served in opened.models:
                served.why_no_sessions = f"there are no sessions here: {why}"
        return
    for name in ("session_sink", "session_memory"):
        if values[name] is not None and not values["session_window"]:
            raise ConfigError("is of sessions with a window", field=GIVEN[name], hint="Give --set session_window=N.")
    if values["session_retention"] is not None and values["session_window"]:
        raise ConfigError("is of sessions without a window", field=GIVEN["session_retention"], hint="Leave one out.")
    from kvarts.doors.openai.served import SessionsOnDemand

    served = opened.served

    def open_now() -> Any:
        from kvarts.doors.openai.sessions.door import open_own
        from kvarts.run.sessions.values import SessionsConfig, SessionSettings

        memory, window, sink = (values[f"session_{name}"] for name in ("memory", "window", "sink"))
        config = SessionsConfig(
            defaults=SessionSettings(
                sink=4 if sink is None else sink,
                window=window or None,
                retention=values["session_retention"] or "cache",
                ttl_s=TTL_S if values["session_ttl"] is None else values["session_ttl"],
            ),
            max_sessions=values["max_sessions"] or MAX_SESSIONS,
            memory_bytes=None if memory is None else parse_bytes(memory),
            at_capacity="evict",
        )
        shares = None if keys is None else keys.shares
        return open_own(served, config, shares=shares, state_dir=values["state_dir"], say=say)

    # With options given, they are checked and the saved sessions are read before the server is ready.
    served.sessions = open_now() if given else SessionsOnDemand(open_now)


def _why_not(opened: Opened, values: dict[str, Any]) -> str:
    """Return why the server cannot have sessions; empty if it can."""
    if values["no_sessions"]:
        return "--set no_sessions=true was given"
    given = ["sessions"]
    if len(opened.models) > 1:
        given.append("several")
    if values["record"] is not None:
        given.append("record")
    if any(served.host.memory is not None and served.host.memory.hit_pages > 1 for served in opened.models):
        given.insert(0, "sizes")
    reasons = [served.host.why_no_sessions for served in opened.models]
    return why_not(*given) or next(filter(None, reasons), "")


def beside(values: dict[str, Any], settings: dict[str, Any], owners: Any) -> list[ServesRuntime]:
    """Return the server of OpenAI's API that runs next to gRPC, if `--http-port` asks for it. Raise ConfigError.

    With a mock, sets `mock` in `settings`, the arguments of `open_sessions`, so that the mock generates words.
    """
    if values["http_port"] is None:
        return []
    need_http()
    from kvarts.doors.openai.server import Address
    from kvarts.doors.openai.sessions.door import open_beside, word_mock

    address = Address(
        host=values["host"],
        port=values["http_port"],
        has_keys=owners is not None,
        tls_cert=values["tls_cert"],
        tls_key=values["tls_key"],
        insecure=values["insecure"],
        key_option="--token-file",
    )
    if values["mock"]:
        settings["mock"] = word_mock

    @asynccontextmanager
    async def serve(runtime: Any) -> AsyncIterator[None]:
        from kvarts.doors.openai.opening import Door
        from kvarts.doors.openai.server import OpenAIServer

        door = Door(keys=None if owners is None else owners.keys)
        opened = open_beside(runtime, door, model="mock" if values["mock"] else Path(values["model"]).name)
        server = OpenAIServer(opened.app, opened.models, address)
        await server.start()
        say(f"OpenAI's API, with the same sessions, on {server.url}/v1")
        try:
            yield
        finally:
            await server.stop(DRAIN_S)

    return [serve]
