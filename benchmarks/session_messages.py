"""What a token costs that a session server sends: messages a second, and server CPU for each.

    python benchmarks/session_messages.py

Beside two bare grpc.aio servers that stream the same messages: `echo`, as its stubs are meant to be used, and `bytes`,
which sends one ready-made message over and over, the least that grpc.aio costs. Each server is a process of its own on
one core, the client on another; rounds alternate, and medians are over rounds. The runtime below makes tokens from
nothing, so all that is measured is the door.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import grpc

from kvarts.proto.kakeya.v1 import runtime_pb2 as contract
from kvarts.proto.kakeya.v1.runtime_pb2_grpc import RuntimeServiceServicer, add_RuntimeServiceServicer_to_server
from kvarts.sampling import SamplingParams
from kvarts.serve.server import Binding, SessionServer
from kvarts.session.values import Done, SessionSettings, StopReason, Token, Update

aio: Any = grpc.aio  # its stubs know little of it
METHOD = "/kakeya.v1.RuntimeService/Generate"
KINDS = ("door", "echo", "bytes")


class FastRuntime:
    """Generates tokens from nothing."""

    defaults = SessionSettings()

    async def generate(
        self, owner: str, session_id: str, params: SamplingParams, *, queue: bool = False
    ) -> AsyncGenerator[Update, None]:
        for token in range(params.max_tokens):
            yield Token(token)
        yield Done(StopReason.MAX_TOKENS, params.max_tokens, 0.0, 0.0)

    async def shut_down(self) -> None:
        pass


class Echo(RuntimeServiceServicer):
    """The same messages, from no runtime."""

    async def Generate(  # noqa: N802  # the service's name for it
        self, request: Any, context: Any
    ) -> AsyncGenerator[contract.GenerateResponse, None]:
        for token in range(request.max_tokens):
            yield contract.GenerateResponse(token_id=token)
        done = contract.GenerateDone(stop_reason="STOP_REASON_MAX_TOKENS", generated_token_count=request.max_tokens)
        yield contract.GenerateResponse(done=done)


async def send_bytes(data: bytes, _: Any) -> AsyncGenerator[bytes, None]:
    message = contract.GenerateResponse(token_id=999).SerializeToString()
    for _ in range(contract.GenerateRequest.FromString(data).max_tokens + 1):
        yield message


async def serve(kind: str) -> None:
    """Serves until the end of the input. Prints the port, and for each line of the input the CPU time so far."""
    if kind == "door":
        door = SessionServer(FastRuntime(), Binding(address="127.0.0.1:0"))  # type: ignore[arg-type]  # no more is asked
        address = await door.start()
    else:
        server = aio.server()
        if kind == "echo":
            add_RuntimeServiceServicer_to_server(Echo(), server)
        else:
            handler = grpc.unary_stream_rpc_method_handler(send_bytes)
            generic = grpc.method_handlers_generic_handler("kakeya.v1.RuntimeService", {"Generate": handler})
            server.add_generic_rpc_handlers([generic])
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
    print(address, flush=True)
    loop = asyncio.get_running_loop()
    while await loop.run_in_executor(None, sys.stdin.readline):
        print(time.process_time(), flush=True)
    os._exit(0)


class Server:
    """One of the servers, in a process of its own."""

    def __init__(self, kind: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()

    def cpu_s(self) -> float:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


async def round_of(server: Server, streams: int, tokens: int) -> tuple[float, float]:
    """Messages a second, and microseconds of server CPU a message."""
    request = contract.GenerateRequest(session_id="x", max_tokens=tokens).SerializeToString()

    async def read(channel: Any) -> int:
        return sum([1 async for _ in channel.unary_stream(METHOD)(request)])

    async with aio.insecure_channel(server.address) as channel:
        await read(channel)
        cpu_s, start_s = server.cpu_s(), time.perf_counter()
        messages = sum(await asyncio.gather(*(read(channel) for _ in range(streams))))
        duration_s, cpu_s = time.perf_counter() - start_s, server.cpu_s() - cpu_s
    assert messages == streams * (tokens + 1)
    return messages / duration_s, cpu_s / messages * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--serve", choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        asyncio.run(serve(options.serve))
    servers = {kind: Server(kind) for kind in KINDS}
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    rounds: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    try:
        for _ in range(options.rounds):
            for kind, server in servers.items():
                rounds[kind].append(asyncio.run(round_of(server, options.streams, options.tokens)))
    finally:
        for server in servers.values():
            server.stop()
    medians = {
        kind: {
            "messages_per_s": statistics.median(rate for rate, _ in rows),
            "server_cpu_us_per_message": statistics.median(cpu_us for _, cpu_us in rows),
        }
        for kind, rows in rounds.items()
    }
    print(f"{options.streams} streams of {options.tokens} tokens, medians of {options.rounds} rounds")
    print(f"{'':<8}{'messages/s':>12}{'server CPU a message':>24}")
    for kind, figures in medians.items():
        print(f"{kind:<8}{figures['messages_per_s']:>12,.0f}{figures['server_cpu_us_per_message']:>21.1f} us")
    if options.json is not None:
        result = {"streams": options.streams, "tokens": options.tokens, "rounds": rounds, "medians": medians}
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
