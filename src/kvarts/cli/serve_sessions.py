"""`kvarts serve sessions`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from typing import Any

import click

from kvarts.base.errors import ConfigError
from kvarts.base.units import parse_bytes
from kvarts.cli import (
    http_sessions,
    record,
)
from kvarts.cli.llm import MODEL_HELP, engine_options, engine_options_of, kv_groups_option
from kvarts.cli.options import DIRECTORY, INPUT, WINDOW, Command, GroupedOption, KeyOption, grouped
from kvarts.cli.process import ServesRuntime, collect_garbage, narrate, need_grpc
from kvarts.run.sessions.values import SessionSettings

__all__ = ["sessions_command"]

MAX_SESSIONS = 16_384
M_ARENA_MAX = -8
"""Number of a setting of glibc's mallopt."""

of_model = grouped("Model")
of_session = grouped("Sessions, where a client asks for nothing else")
of_all = grouped("All sessions together")
of_address = grouped("Address")


@click.command("sessions", cls=Command)
@of_model("--model", metavar="DIR", help=MODEL_HELP)
@of_model("--mock", is_flag=True, help="No model: tokens by a rule, step times by a cost model.")
@of_model("--speedup", metavar="X", type=float, help="For the mock: steps take 1/X of their time. [1]")
@of_session("--sink", metavar="N", type=click.IntRange(min=0), default=4, show_default=True,
            help="Keep the KV of the first N tokens,")  # fmt: skip
@of_session("--window", metavar="N", type=WINDOW, default=64, show_default=True,
            help="and of the last N; all: of all tokens.")  # fmt: skip
@of_session("--keep", cls=KeyOption, type=click.Choice(["window", "h2o", "snapkv"]), default="window",
            show_default=True,
            help="Also keep pages of `heavy` tokens between these, by the attention that they receive.")  # fmt: skip
@of_session("--heavy", cls=KeyOption, metavar="N", type=click.IntRange(min=0), default=0, show_default=True,
            help="With keep=h2o or snapkv: as many tokens.")  # fmt: skip
@of_session("--positions", cls=KeyOption, type=click.Choice(["global", "cache"]), default="global", show_default=True,
            help="Count positions in the history, or among the tokens that are kept.")  # fmt: skip
@of_session(
    "--past-max-positions",
    cls=KeyOption,
    is_flag=True,
    help="Go on beyond the positions that the model was trained for.",
)
@of_session("--retention", cls=KeyOption, type=click.Choice(["pin", "cache", "host"]), default="cache",
            show_default=True, help="With --window all: where KV is between turns.")  # fmt: skip
@of_session(
    "--ttl", cls=KeyOption, metavar="SECONDS", type=float, help="Time after which idle sessions expire. [never]"
)
@of_all("--max-sessions", cls=KeyOption, metavar="N", type=click.IntRange(min=1), default=MAX_SESSIONS,
        show_default=True, help="As many sessions at most.")  # fmt: skip
@of_all("--max-history-tokens", cls=KeyOption, metavar="N", type=click.IntRange(min=1),
        help="Their histories have as many tokens together, 8 bytes each. [16777216]")  # fmt: skip
@of_all("--session-memory", metavar="SIZE", help="Their KV takes as much at most: 4GiB.")
@of_all("--at-capacity", cls=KeyOption, type=click.Choice(["refuse", "evict"]), default="refuse", show_default=True,
        help="Without room for a session: refuse it, or evict the one that is idle longest.")  # fmt: skip
@of_all("--state-dir", metavar="DIR", type=DIRECTORY,
        help="Keep sessions here, also beyond the end of the process.")  # fmt: skip
@of_all(
    "--host-memory", cls=KeyOption, metavar="SIZE", help="Host memory below the pages, for retention in the host: 8GiB."
)
@of_address("--host", metavar="HOST", default="127.0.0.1", show_default=True, help="Address to listen on.")
@of_address("--port", metavar="N", type=click.IntRange(0, 65535), default=50051, show_default=True,
            help="Of gRPC; 0: a free one.")  # fmt: skip
@of_address("--http-port", metavar="N", type=click.IntRange(0, 65535),
            help="Serve OpenAI's API as well: a request continues the session that it names.")  # fmt: skip
@of_address("--tls-cert", metavar="FILE", type=INPUT,
            help="Certificate, PEM. With --tls-key: encrypt, on both doors.")  # fmt: skip
@of_address("--tls-key", metavar="FILE", type=INPUT, help="Its key.")
@of_address("--insecure", is_flag=True,
            help="Allow addresses that other machines reach, without TLS or without a token.")  # fmt: skip
@of_address("--token-file", metavar="FILE", type=INPUT,
            help="Ask for a bearer token. A line is OWNER:TOKEN, or the only line is a token.")  # fmt: skip
@of_address("--max-message-bytes", cls=KeyOption, metavar="N", type=click.IntRange(min=1024), default=16 * 1024 * 1024,
            show_default=True, help="Refuse longer requests.")  # fmt: skip
@record.kv_timeline_option
@lambda command: kv_groups_option(command, group="Engine")
@lambda command: engine_options(command, cls=GroupedOption, group="Engine")
def sessions_command(**values: Any) -> None:
    """Serve sessions over gRPC: conversations whose state is kept here, in bounded memory."""
    if (values["model"] is None) == (not values["mock"]):
        raise ConfigError("give either", field="model", hint="Give --model DIR or --mock.")
    settings = _engine_settings(values)
    need_grpc()
    narrate()
    from kvarts.doors.grpc.owners import read_owners
    from kvarts.doors.grpc.server import Binding

    owners = None if values["token_file"] is None else read_owners(values["token_file"])
    binding = Binding(
        host=values["host"],
        port=values["port"],
        tls_cert=values["tls_cert"],
        tls_key=values["tls_key"],
        asks_for_token=owners is not None,
        insecure=values["insecure"],
    )
    share_arenas()
    with ExitStack() as stack:
        if owners is not None:
            settings["shares"] = owners.keys.shares
        settings["record"] = record.live_reader(stack, values, settings["say"])
        beside: list[ServesRuntime] = []
        beside += http_sessions.beside(values, settings, owners)
        asyncio.run(_serve(settings, binding, owners, values["max_message_bytes"], beside))


def share_arenas() -> None:
    """Let all threads allocate from two arenas, where the C library is glibc.

    It has eight per core otherwise, and gRPC's threads take one each, which keeps the room of the largest messages that
    the thread ever read.
    """
    from ctypes import CDLL

    with suppress(AttributeError, OSError):
        CDLL(None).mallopt(M_ARENA_MAX, 2)


def _engine_settings(values: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `open_sessions`, without those that were not given."""
    settings = {
        name: values[name]
        for name in (
            "model",
            "mock",
            "max_sessions",
            "max_history_tokens",
            "at_capacity",
            "state_dir",
            "host_memory",
            "speedup",
        )
        if values[name] is not None
    }
    settings["options"] = engine_options_of(values)
    if values["session_memory"] is not None:
        settings["session_memory"] = parse_bytes(values["session_memory"])
    settings["defaults"] = SessionSettings(
        sink=values["sink"],
        window=values["window"] or None,
        keep=values["keep"],
        heavy=values["heavy"],
        positions=values["positions"],
        past_max_positions=values["past_max_positions"],
        retention=values["retention"],
        ttl_s=values["ttl"],
    )
    settings["say"] = lambda line: click.echo(f"kvarts: {line}", err=True)
    return settings


async def _serve(
    settings: dict[str, Any], binding: Any, owners: Any, max_message_bytes: int, beside: Sequence[ServesRuntime]
) -> None:
    from kvarts.doors.grpc.server import SessionServer, serve_until_signal
    from kvarts.run.sessions.opening import open_sessions

    def say(address: str) -> None:
        tls = "TLS" if binding.is_encrypted else "no TLS"
        token = "no token is asked for" if owners is None else "a token is asked for"
        click.echo(f"kvarts: listening on {address} for sessions over gRPC ({tls}, {token})", err=True)

    runtime = open_sessions(**settings)
    collect_garbage()
    server = SessionServer(runtime, binding, owners=owners, max_message_bytes=max_message_bytes)
    async with AsyncExitStack() as stack:
        for door in beside:
            await stack.enter_async_context(door(runtime))
        await serve_until_signal(server, say)
