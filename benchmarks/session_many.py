"""Many sessions on one server: 10,000 open, 256 of them generating, over gRPC.

    python benchmarks/session_many.py [--sessions 10000] [--generating 256] [--tokens 200] [--rounds 5]

The server is `kvarts serve sessions --mock` in a process of its own, with a cost model a thousand times faster than a
device, so that what is measured is the runtime and its door; the client is this process. Every session has a history of
64 tokens. Beside it, in turns: a bare grpc.aio servicer that streams as many of the same messages to as many clients.
A round generates in 256 sessions chosen anew; figures are medians over rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import grpc

from kvarts.proto.kakeya.v1 import runtime_pb2 as contract
from kvarts.proto.kakeya.v1.runtime_pb2_grpc import (
    RuntimeServiceServicer,
    RuntimeServiceStub,
    add_RuntimeServiceServicer_to_server,
)

aio: Any = grpc.aio  # its stubs know little of it
HISTORY = 64


class Echo(RuntimeServiceServicer):
    """Streams tokens that are made of nothing, as the stubs are meant to be used."""

    async def Generate(self, request: Any, context: Any) -> AsyncGenerator[Any, None]:  # noqa: N802
        for token in range(request.max_tokens):
            yield contract.GenerateResponse(token_id=token)
        yield contract.GenerateResponse(done=contract.GenerateDone(generated_token_count=request.max_tokens))


async def echo() -> None:
    server = aio.server()
    add_RuntimeServiceServicer_to_server(Echo(), server)
    print(f"listening on 127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", file=sys.stderr, flush=True)
    await server.start()
    await server.wait_for_termination()


class Server:
    """A server process, which says where it listens on its standard error."""

    def __init__(self, *command: str) -> None:
        self.process = subprocess.Popen([sys.executable, *command], stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        line = self.process.stderr.readline()
        self.address = line.split("listening on ")[1].split()[0]

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def rss_bytes(self) -> int:
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def stop(self) -> None:
        self.process.terminate()
        self.process.communicate()


async def generate(stub: Any, names: list[str], num_tokens: int) -> int:
    """Generate in all sessions at once; return the number of messages."""

    async def read(name: str) -> int:
        request = contract.GenerateRequest(session_id=name, max_tokens=num_tokens)
        return sum([1 async for _ in stub.Generate(request)])

    return sum(await asyncio.gather(*map(read, names)))


async def round_of(server: Server, stub: Any, names: list[str], num_tokens: int) -> tuple[float, float]:
    """Return messages a second, and microseconds of server CPU a message."""
    cpu_s, start_s = server.cpu_s(), time.perf_counter()
    messages = await generate(stub, names, num_tokens)
    duration_s = time.perf_counter() - start_s
    return messages / duration_s, (server.cpu_s() - cpu_s) / messages * 1e6


async def measure(arguments: argparse.Namespace) -> None:
    pages = arguments.sessions * 6 + 1024
    options = ["--bind", "127.0.0.1:0", "--kv-memory", str(pages * 16 * 114_688), "--speedup", "1000"]
    real = Server("-m", "kvarts", "serve", "sessions", "--mock", *options, "--max-seqs", "256")
    bare = Server(__file__, "--echo")
    choose = random.Random(0)
    try:
        async with aio.insecure_channel(real.address) as channel, aio.insecure_channel(bare.address) as beside:
            stub, bare_stub = RuntimeServiceStub(channel), RuntimeServiceStub(beside)
            first = (await stub.CreateSession(contract.CreateSessionRequest())).session_id
            await stub.AppendTokens(contract.AppendTokensRequest(session_id=first, token_ids=range(HISTORY)))
            await generate(stub, [first], 10)
            await generate(bare_stub, ["x"], 10)
            before, start_s = real.rss_bytes(), time.perf_counter()
            names = [
                (await stub.CreateSession(contract.CreateSessionRequest())).session_id
                for _ in range(arguments.sessions)
            ]
            created_s = time.perf_counter() - start_s
            for index in range(0, len(names), 256):
                await asyncio.gather(
                    *(
                        stub.AppendTokens(contract.AppendTokensRequest(session_id=name, token_ids=range(HISTORY)))
                        for name in names[index : index + 256]
                    )
                )
            grown = (real.rss_bytes() - before) / len(names)
            rows = []
            for _ in range(arguments.rounds):
                chosen = choose.sample(names, arguments.generating)
                rows.append(
                    (
                        *await round_of(real, stub, chosen, arguments.tokens),
                        *await round_of(bare, bare_stub, chosen, arguments.tokens),
                    )
                )
    finally:
        real.stop()
        bare.stop()
    rate, cpu, bare_rate, bare_cpu = (statistics.median(column) for column in zip(*rows, strict=True))
    ratios = statistics.median(row[0] / row[2] for row in rows)
    print(
        f"{len(names):,} sessions created in {created_s:.1f} s, one after the other; {grown / 1024:.2f} KiB of memory"
    )
    print(f"for each beside what the process had, a history of {HISTORY} tokens included")
    print(f"{arguments.generating} generating: {rate:,.0f} messages/s, {cpu:.0f} us of server CPU a message")
    print(f"bare grpc.aio servicer: {bare_rate:,.0f} messages/s, {bare_cpu:.0f} us; ratio of rates {ratios:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--generating", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--echo", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    asyncio.run(echo() if arguments.echo else measure(arguments))


if __name__ == "__main__":
    main()
