"""`kvarts soak`."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvarts.cli import record as recording
from kvarts.cli.options import INPUT, OUTPUT, Command
from kvarts.cli.process import print_bytes
from kvarts.errors import ConfigError
from kvarts.files import check_writable, is_replaceable, is_standard_output, write_whole
from kvarts.units import parse_duration_s

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvarts.sampling import SamplingParams
    from kvarts.session.soak.run import KvLayers, SoakPlan, SoakRecord
    from kvarts.session.soak.target import SessionsTarget
    from kvarts.session.values import SessionSettings

__all__ = ["soak_command"]


class _Seconds(click.ParamType):  # type: ignore[type-arg]
    name = "duration"

    def convert(self, value: str | float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        return parse_duration_s(value) if isinstance(value, str) else value


CLOCK = time.monotonic, asyncio.sleep
"""The clock of a run against a server: what returns the time, and what sleeps."""


@click.command("soak", cls=Command)
@click.option("--address", metavar="HOST:PORT", help="A server of sessions, such as kvarts serve sessions.")
@click.option("--virtual", is_flag=True, help="The mock in this process, on a virtual clock: hours take seconds.")
@click.option("--judge", metavar="FILE", type=INPUT, help="Judge a file that --json wrote, and run nothing.")
@click.option("--duration", metavar="TIME", type=_Seconds(), default="4h", show_default=True, help="How long to run.")
@click.option("--turn-spacing", metavar="TIME", type=_Seconds(), default="30s", show_default=True,
              help="From the beginning of a turn to that of the next.")  # fmt: skip
@click.option("--sessions", metavar="N", type=int, default=4, show_default=True, help="Their turns rotate.")
@click.option("--prompt-tokens", metavar="N", type=int, default=32, show_default=True, help="Appended in each turn.")
@click.option("--max-tokens", metavar="N", type=int, default=32, show_default=True, help="Generated in each turn.")
@click.option("--sink", metavar="N", type=int, default=4, show_default=True, help="First tokens that are retained.")
@click.option("--window", metavar="N", type=int, default=64, show_default=True, help="Last tokens that are retained.")
@click.option("--vocab-size", metavar="N", type=int, default=256, show_default=True,
              help="Token ids that are sent are below this.")  # fmt: skip
@click.option("--seed", metavar="N", type=int, default=0, show_default=True, help="Seed of the tokens that are sent.")
@click.option("--bytes-per-token", "layers", metavar="BYTES[@TOKENS]", multiple=True,
              help="What a token takes, of layers that retain TOKENS tokens [sink + window]; once for each kind of "
              "layers. Left out, it is derived while sessions fill up.")  # fmt: skip
@click.option("--server-pid", metavar="PID", type=int, help="The server's process on this machine: judge its memory.")
@click.option("--max-drift", metavar="SHARE", type=float, default=0.1, show_default=True,
              help="By how much the time between tokens may rise over the run.")  # fmt: skip
@click.option("--max-rss-growth", metavar="SHARE", type=float, default=0.05, show_default=True,
              help="How much the server's memory may grow over the run, in addition to 8 bytes per token.")  # fmt: skip
@click.option("--checkpoint-turns", metavar="N", type=click.IntRange(min=1), default=10, show_default=True,
              help="Write --json after every N turns, for the case that this process is killed.")  # fmt: skip
@click.option("--json", "json_file", metavar="OUT", type=OUTPUT,
              help="Write the measurements and the verdict.")  # fmt: skip
@click.option("--page", "page_file", metavar="OUT", type=OUTPUT, help="Write a page that shows it.")
@recording.kv_timeline_option
def soak_command(
    address: str | None,
    virtual: bool,
    judge: Path | None,
    json_file: Path | None,
    page_file: Path | None,
    checkpoint_turns: int,
    **values: Any,
) -> int:
    """Run turns of sessions for hours, and judge: is memory bounded to the byte, does latency drift, does it leak?

    The exit code is 0 for bounded, 5 for violated and 6 for inconclusive: constant zero, missing or too few samples, or
    too much noise to decide. SIGTERM and SIGINT end the run; the part that has run is then judged.
    """
    from kvarts.session.soak.rules import judge_soak, render_soak_page
    from kvarts.session.soak.run import load_record, write_record

    timeline = values.get("kv_timeline")
    if timeline is not None and not virtual:
        raise ConfigError(
            "is of --virtual: a client does not see the pages of a server",
            field="kv_timeline",
            hint="Give --kv-timeline to kvarts serve sessions, and that file to kvarts verify.",
        )
    if sum((address is not None, virtual, judge is not None)) != 1:
        raise ConfigError("give exactly one of --address, --virtual and --judge", field="address")
    for path in (json_file, page_file, timeline):
        if path is not None:
            check_writable(path)
    if timeline is not None and not is_replaceable(timeline):
        raise ConfigError("is read again for the verdict: give the path of a file", field="kv_timeline")
    if judge is not None:
        record = load_record(judge)
    else:
        plan = _plan(address or "virtual", values)

        def checkpoint(record: SoakRecord) -> None:
            # A device or a pipe is written once, when the record is complete.
            if json_file is not None and is_replaceable(json_file):
                write_record(json_file, record, judge_soak(record))

        with ExitStack() as stack:
            virtual_settings: dict[str, Any] = {"sink": plan.sink, "window": plan.window}
            virtual_settings["record"] = recording.live_reader(stack, values)

            def open_target(stack: AsyncExitStack) -> Awaitable[SessionsTarget]:
                return _open(stack, address, values["server_pid"], virtual_settings)

            record = asyncio.run(_run(plan, open_target, checkpoint, checkpoint_turns))
    verdict = judge_soak(record)
    if json_file is not None:
        write_record(json_file, record, verdict)
    if page_file is not None:
        write_whole(page_file, render_soak_page(record, verdict))
    text, exit_code = verdict.to_text(), verdict.exit_code
    if timeline is not None:
        text, exit_code = _with_timeline(text, exit_code, timeline)
    if not is_standard_output(json_file) and not is_standard_output(page_file):
        print_bytes(text.encode())
    return exit_code


def _with_timeline(text: str, exit_code: int, timeline: Path) -> tuple[str, int]:
    """Return the verdicts of a run and its timeline: violated if either is, else inconclusive if either is."""
    from kvarts.verify.verifier import verify_file

    verdict = verify_file(timeline)
    code = next((code for code in (5, 6) if code in (exit_code, verdict.exit_code)), 0)
    return f"{text}{timeline}: {verdict.to_text()}", code


def _plan(target: str, values: dict[str, Any]) -> SoakPlan:
    from kvarts.session.soak.run import SoakPlan

    return SoakPlan(
        target=target,
        duration_s=values["duration"],
        turn_spacing_s=values["turn_spacing"],
        num_sessions=values["sessions"],
        layers=tuple(_layers(text, values["sink"] + values["window"]) for text in values["layers"]),
        expects_rss=values["server_pid"] is not None,
        **{
            name: values[name]
            for name in (
                "prompt_tokens", "max_tokens", "sink", "window", "vocab_size", "seed", "max_drift", "max_rss_growth",
            )
        },
    )  # fmt: skip


def _layers(text: str, bound_tokens: int) -> KvLayers:
    from kvarts.session.soak.run import KvLayers

    match = re.fullmatch(r"(\d+)(?:@(\d+))?", text)
    if match is None:
        raise ConfigError(
            f"{text!r} is not a number of bytes", field="--bytes-per-token", hint="Write 114688 or 4096@512."
        )
    return KvLayers(max_tokens=int(match[2] or bound_tokens), bytes_per_token=int(match[1]))


async def _run(
    plan: SoakPlan,
    open_target: Callable[[AsyncExitStack], Awaitable[SessionsTarget]],
    checkpoint: Callable[[SoakRecord], None],
    checkpoint_turns: int,
) -> SoakRecord:
    from kvarts.session.soak.run import run_soak

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number in before:
        loop.add_signal_handler(number, stop.set)
    try:
        async with AsyncExitStack() as stack:
            target = await open_target(stack)
            click.echo(
                f"kvarts: soak of {plan.num_sessions} sessions on {plan.target} for {plan.duration_s:,.0f} s; "
                "SIGTERM ends it with a verdict",
                err=True,
            )
            return await run_soak(plan, target, stop=stop, checkpoint=checkpoint, checkpoint_turns=checkpoint_turns)
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)  # a write that has begun from here on is completed or undone


async def _open(
    stack: AsyncExitStack, address: str | None, pid: int | None, virtual_settings: dict[str, Any]
) -> SessionsTarget:
    from kvarts.session.soak.target import SessionsTarget, rss_of

    if address is None:
        from kvarts.session.opening import open_virtual_target

        return await stack.enter_async_context(open_virtual_target(**virtual_settings))
    from kvarts.client import AsyncSessions  # which needs gRPC

    sessions = await stack.enter_async_context(AsyncSessions(address))
    return SessionsTarget(_OfClient(sessions), *CLOCK, lambda: None if pid is None else rss_of(pid))


class _OfClient:
    """Adapter of a client to the interface of SessionRuntime: sessions are named by id."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def create(self, settings: SessionSettings) -> str:
        session = await self._client.create(sink=settings.sink, window=settings.window)
        return str(session.id)

    async def append(self, session_id: str, tokens: Sequence[int], *, expected_length: int) -> int:
        return int(await self._client.get(session_id).append(tokens, expected_length=expected_length))

    def generate(self, session_id: str, params: SamplingParams) -> Any:
        return self._client.get(session_id).generate(params.max_tokens, ignore_eos=params.ignore_eos)

    async def info(self, session_id: str) -> Any:
        return await self._client.get(session_id).info()

    async def close(self, session_id: str) -> int:
        return int(await self._client.get(session_id).close())
