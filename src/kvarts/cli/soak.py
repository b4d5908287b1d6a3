"""`kvarts soak`."""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

from kvarts.base.errors import ConfigError
from kvarts.base.files import check_writable, is_replaceable, is_standard_output, write_whole
from kvarts.base.limits import brief, whole_number
from kvarts.base.units import parse_duration_s
from kvarts.cli.options import OUTPUT, Command, key_option
from kvarts.cli.process import ReaderGoneError, print_text
from kvarts.doors.exposure import host_port

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvarts.run.sessions.soak.run import SoakPlan, SoakRecord

__all__ = ["soak_command"]


class _Seconds(click.ParamType):  # type: ignore[type-arg]
    name = "duration"

    def convert(self, value: str | float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        return parse_duration_s(value) if isinstance(value, str) else value


CLOCK = time.monotonic, asyncio.sleep
"""The clock of a run against a server: what returns the time, and what sleeps."""
OF_PLAN = ("prompt_tokens", "max_tokens", "sink", "window", "vocab_size", "seed", "max_drift", "max_rss_growth")


NUMBERS = (
    ("--sessions", 4, "Their turns rotate."),
    ("--prompt-tokens", 32, "Appended in each turn."),
    ("--max-tokens", 32, "Generated in each turn."),
    ("--sink", 4, "First tokens that are retained."),
    ("--window", 64, "Last tokens that are retained."),
    ("--vocab-size", 256, "Token ids that are sent are below this."),
    ("--seed", 0, "Seed of the tokens that are sent."),
)
RARE = ("--prompt-tokens", "--max-tokens", "--sink", "--window", "--vocab-size", "--seed")
"""Keys of `--set`."""


def _numbers(command: Any) -> Any:
    for name, default, text in reversed(NUMBERS):
        declare = key_option if name in RARE else click.option
        command = declare(name, metavar="N", type=int, default=default, show_default=True, help=text)(command)
    return command


@click.command("soak", cls=Command)
@click.option("--host", metavar="HOST", default="127.0.0.1", show_default=True,
              help="That of a server of sessions, such as kvarts serve sessions.")  # fmt: skip
@click.option("--port", metavar="N", type=click.IntRange(1, 65535), default=50051, show_default=True, help="Its port.")
@click.option("--virtual", is_flag=True, help="The mock in this process, on a virtual clock: hours take seconds.")
@click.option("--duration", metavar="TIME", type=_Seconds(), default="4h", show_default=True, help="How long to run.")
@key_option("--turn-spacing", metavar="TIME", type=_Seconds(), default="30s", show_default=True,
            help="From the beginning of a turn to that of the next.")  # fmt: skip
@_numbers
@key_option("--bytes-per-token", "layers", metavar="BYTES[@TOKENS]", multiple=True,
              help="What a token takes, of layers that retain TOKENS tokens [sink + window]; once for each kind of "
              "layers. Left out, it is derived while sessions fill up.")  # fmt: skip
@key_option("--server-pid", metavar="PID", type=int, help="The server's process on this machine: judge its memory.")
@key_option("--max-drift", metavar="SHARE", type=float, default=0.1, show_default=True,
            help="By how much the time between tokens may rise over the run.")  # fmt: skip
@key_option("--max-rss-growth", metavar="SHARE", type=float, default=0.05, show_default=True,
            help="How much the server's memory may grow over the run, in addition to 8 bytes per token.")  # fmt: skip
@click.option("--json", "json_file", metavar="OUT", type=OUTPUT,
              help="Write the measurements and the verdict, also while it runs.")  # fmt: skip
@click.option("--page", "page_file", metavar="OUT", type=OUTPUT, help="Write a page that shows it.")
def soak_command(
    host: str, port: int, virtual: bool, json_file: Path | None, page_file: Path | None, **values: Any
) -> int:
    """Run turns of sessions for hours, and judge: is memory bounded to the byte, does latency drift, does it leak?

    The exit code is 0 for bounded, 5 for violated and 6 for inconclusive: constant zero, missing or too few samples, or
    too much noise to decide. SIGTERM and SIGINT end the run; the part that has run is then judged.
    """
    from kvarts.run.sessions.soak.rules import judge_soak, render_soak_page
    from kvarts.run.sessions.soak.run import write_record

    address = None if virtual else host_port(host, port)
    for path in filter(None, (json_file, page_file)):
        check_writable(path)

    def checkpoint(record: SoakRecord) -> None:
        # A device or a pipe is written once, when the record is complete.
        if json_file is not None and (is_replaceable(json_file) or record.ended_by is not None):
            write_record(json_file, record, judge_soak(record))

    record = asyncio.run(_run(_plan(address or "virtual", values), address, values, checkpoint))
    verdict = judge_soak(record)
    if page_file is not None:
        write_whole(page_file, render_soak_page(record, verdict))
    if not is_standard_output(json_file) and not is_standard_output(page_file):
        with suppress(ReaderGoneError):
            print_text(verdict.to_text())
    return verdict.exit_code


def _plan(target: str, values: dict[str, Any]) -> SoakPlan:
    from kvarts.run.sessions.soak.run import KvLayers, SoakPlan

    layers = []
    for text in values["layers"]:
        size, at, last = text.partition("@")
        num_bytes = whole_number(size)
        num_tokens = whole_number(last) if at else values["sink"] + values["window"]
        if num_bytes is None or num_tokens is None:
            what, hint = f"{brief(text)} is not a number of bytes", "Write 114688 or 4096@512."
            raise ConfigError(what, field="--set bytes_per_token", hint=hint)
        layers.append(KvLayers(num_tokens, num_bytes))
    return SoakPlan(
        target=target,
        duration_s=values["duration"],
        turn_spacing_s=values["turn_spacing"],
        num_sessions=values["sessions"],
        layers=tuple(layers),
        expects_rss=values["server_pid"] is not None,
        **{name: values[name] for name in OF_PLAN},
    )


async def _run(
    plan: SoakPlan, address: str | None, values: dict[str, Any], checkpoint: Callable[[SoakRecord], None]
) -> SoakRecord:
    from kvarts.run.sessions.soak.run import SoakClock, rss_of, run_soak

    stop, loop, pid = asyncio.Event(), asyncio.get_running_loop(), values["server_pid"]
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number in before:
        loop.add_signal_handler(number, stop.set)
    try:
        async with AsyncExitStack() as stack:
            if address is None:
                from kvarts.run.sessions.opening import open_virtual_target

                opening = open_virtual_target(sink=plan.sink, window=plan.window)
                sessions, clock = await stack.enter_async_context(opening)
            else:
                from kvarts.doors.client import AsyncSessions

                sessions = _of_client(await stack.enter_async_context(AsyncSessions(address)))
                clock = SoakClock(*CLOCK)
                what = f"soak of {plan.num_sessions} sessions on {address} for {plan.duration_s:,.0f} s"
                click.echo(f"kvarts: {what}; SIGTERM ends it with a verdict", err=True)
            rss_bytes = (lambda: None) if pid is None else (lambda: rss_of(pid))
            return await run_soak(plan, sessions, clock, stop=stop, checkpoint=checkpoint, rss_bytes=rss_bytes)
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)  # a write that has begun from here on is completed or undone


def _of_client(client: Any) -> Any:
    """Return the methods of SessionRuntime, of one owner: sessions are named by id."""

    async def create(settings: Any) -> str:
        return str((await client.create(sink=settings.sink, window=settings.window)).id)

    return SimpleNamespace(
        create=create,
        append=lambda name, tokens, *, expected_length: client.get(name).append(
            tokens, expected_length=expected_length
        ),
        generate=lambda name, params: client.get(name).generate(params.max_tokens, ignore_eos=params.ignore_eos),
        info=lambda name: client.get(name).info(),
        close=lambda name: client.get(name).close(),
    )
