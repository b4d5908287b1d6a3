"""How many short answers a mock gives: one token, not streamed, over connections that stay open.

    python benchmarks/serve_short.py --connections 64 --requests 20000

The server is `kvarts mock` in a process of its own, on the first core; the client is this process, on the last one. A
step costs 1 us, so the server is never idle. Answers a second are told by the wall clock and by the server's CPU time:
on a machine that does other things as well, only the second says what one core could do. Prints JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import time
from typing import Any

from serve_streams import cpu_s


class Client(asyncio.Protocol):
    """One connection: sends a request as soon as the answer to the one before has come."""

    def __init__(self, requests: list[bytes], left: list[int], done: asyncio.Future[None]) -> None:
        self._requests = requests
        self._left = left
        self._done = done
        self._buffer = b""
        self._number = 0
        self.num_failed = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._send()

    def _send(self) -> None:
        if self._left[0] <= 0:
            if not self._done.done():
                self._done.set_result(None)
            self._transport.close()
            return
        self._left[0] -= 1
        self._transport.write(self._requests[self._number % len(self._requests)])
        self._number += 1

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, end, body = self._buffer.partition(b"\r\n\r\n")
        if not end:
            return
        found = re.search(rb"content-length: (\d+)", head)
        assert found is not None, head
        if len(body) >= int(found[1]):
            self.num_failed += not head.startswith(b"HTTP/1.1 200")
            self._buffer = b""
            self._send()

    def connection_lost(self, error: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(error or ConnectionError("the server closed a connection"))


async def run(url: str, connections: int, num_requests: int, path: str) -> float:
    """Return the seconds that all requests took."""
    host, _, port = url.removeprefix("http://").partition(":")
    loop = asyncio.get_running_loop()
    left = [num_requests]
    began_s = time.perf_counter()
    waits, clients = [], []
    for number in range(connections):
        requests = []
        for turn in range(16):
            text = f"number {number} {turn}"
            asked: dict[str, Any] = {"model": "mock", "max_tokens": 1}
            asked |= {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
            body = json.dumps(asked).encode()
            head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            requests.append(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        done: asyncio.Future[None] = loop.create_future()
        client = Client(requests, left, done)
        await loop.create_connection(lambda client=client: client, host, int(port))  # type: ignore[misc]
        waits.append(done)
        clients.append(client)
    await asyncio.gather(*waits)
    assert not sum(client.num_failed for client in clients)
    return time.perf_counter() - began_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--no-pin", action="store_true", help="leave cores to the system")
    parser.add_argument("options", nargs="*", help="of `kvarts mock`, after --")
    arguments = parser.parse_args()
    command = [sys.executable, "-m", "kvarts", "mock", "--port", "0", "--cost", "linear:step_ms=0.001"]
    command += ["--pages", "4096", "--served-model-name", "mock", *arguments.options]
    cores = sorted(os.sched_getaffinity(0))
    if not arguments.no_pin:
        command = ["taskset", "-c", str(cores[0]), *command]
        os.sched_setaffinity(0, {cores[-1]})
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        line = server.stderr.readline()
        found = re.search(r"http://[\d.:]+", line)
        assert found is not None, line
        path = "/v1/chat/completions" if arguments.chat else "/v1/completions"
        results = []
        for _ in range(arguments.repeat):
            before = cpu_s(server.pid)
            wall_s = asyncio.run(run(found[0], arguments.connections, arguments.requests, path))
            used_s = cpu_s(server.pid) - before
            results.append(
                {
                    "answers_per_s": round(arguments.requests / wall_s),
                    "answers_per_cpu_s": round(arguments.requests / used_s),
                    "cpu_us_per_answer": round(used_s / arguments.requests * 1e6, 1),
                    "server_cpu_share": round(used_s / wall_s, 3),
                }
            )
        print(json.dumps({"load_average": os.getloadavg()[0], "runs": results}, indent=1))
    finally:
        server.terminate()
        server.wait(10)


if __name__ == "__main__":
    main()
