"""How many tokens a mock streams, what each costs, and how true its time is.

    python benchmarks/serve_streams.py --streams 256 --tokens 200            # as fast as it goes
    python benchmarks/serve_streams.py --streams 256 --tokens 250 --step-ms 20   # at 20 ms a token
    python benchmarks/serve_streams.py --streams 256 --tokens 200 --clients 2

The server is `kvarts mock` in a process of its own, on the first core; the client, plain asyncio that counts events, is
this process, on the last one. Without `--step-ms`, a step costs 1 us, so the server is never idle. Tokens a second are
told by the wall clock and by the server's CPU time: on a machine that does other things as well, only the second says
what one core could do. `--clients` processes read the streams. With `--step-ms`, a token's time is that from the one
before it in its stream, and its error is against the cost model: when the system has it at the client's socket
(`came`), and when the client has read it (`read`), since a client of 256 streams is late as well. What the server says
of itself is beside it: how long after the end of its step each token was written.
Prints JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from itertools import pairwise
from typing import Any

CLOCK_HZ = os.sysconf("SC_CLK_TCK")
SO_TIMESTAMPNS = 35
"""Of Linux, which Python does not name: when data came to a socket is told with it."""


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used, in all its threads."""
    with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK_HZ


MARK, DONE = b'"text"', b"[DONE]"
"""Marks of an event and of the end, of one length."""


class Reader:
    """One stream: sends its request, and notes when events come to its socket, and when they are read from it."""

    def __init__(self, address: tuple[str, int], request: bytes, loop: asyncio.AbstractEventLoop) -> None:
        self.done: asyncio.Future[None] = loop.create_future()
        self.came_s: list[float] = []
        self.read_s: list[float] = []
        self.counts: list[int] = []
        self._rest = b""
        self._loop = loop
        self._socket = socket.create_connection(address)
        self._socket.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        self._socket.setblocking(False)
        loop.add_reader(self._socket.fileno(), self._read)
        self._socket.sendall(request)

    def _read(self) -> None:
        data, told, _, _ = self._socket.recvmsg(1 << 16, 64)
        if not data:
            self._end(ConnectionError("the server closed a stream before its end"))
            return
        self.read_s.append(time.time())
        seconds, nanoseconds = struct.unpack_from("qq", told[0][2])
        self.came_s.append(seconds + nanoseconds * 1e-9)
        data = self._rest + data
        self._rest = data[1 - len(MARK) :]  # a mark may be in two parts
        self.counts.append(data.count(MARK))
        if DONE in data:
            self._end()

    def _end(self, error: Exception | None = None) -> None:
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)


async def run(url: str, streams: int, tokens: int) -> tuple[float, list[Reader]]:
    """Run all streams at once; return the seconds that took, and what each saw."""
    host, _, port = url.removeprefix("http://").partition(":")
    loop = asyncio.get_running_loop()
    readers = []
    began = time.perf_counter()
    for number in range(streams):
        body = json.dumps(
            {"prompt": f"number {number}", "max_tokens": tokens, "ignore_eos": True, "stream": True}
        ).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        readers.append(Reader((host, int(port)), head + body, loop))
        await asyncio.sleep(0)
    await asyncio.gather(*(reader.done for reader in readers))
    return time.perf_counter() - began, readers


def several_clients(url: str, arguments: argparse.Namespace) -> tuple[float, int, list[Reader]]:
    """Run the streams in several processes; return the seconds that took, the events, and no readers."""
    each = arguments.streams // arguments.clients
    code = (
        "import asyncio, serve_streams as s; "
        f"print(sum(sum(r.counts) for r in asyncio.run(s.run({url!r}, {each}, {arguments.tokens}))[1]))"
    )
    directory = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
    began = time.perf_counter()
    clients = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=directory)
        for _ in range(arguments.clients)
    ]
    num_events = sum(int(client.communicate()[0]) for client in clients)
    return time.perf_counter() - began, num_events, []


def metric(url: str, name: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics") as response:
        text = response.read().decode()
    found = re.search(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


def late(url: str) -> dict[str, float]:
    """How many tokens were written how long after their step, at most, by the server's own histogram: cumulative."""
    with urllib.request.urlopen(f"{url}/metrics") as response:
        text = response.read().decode()
    found = re.findall(r"^kvarts:mock_write_late_seconds_bucket\{.*le=\"([^\"]+)\".*\} (\S+)$", text, re.MULTILINE)
    return {bound: float(count) for bound, count in found}


def bound_of(after: dict[str, float], before: dict[str, float], share: float) -> str | None:
    """The bucket in which that share of the tokens of one run is reached, in milliseconds."""
    counts = {bound: count - before.get(bound, 0.0) for bound, count in after.items()}
    return next(
        (f"<= {float(bound) * 1e3:g}" for bound, count in counts.items() if count >= share * counts["+Inf"]), None
    )


def percentile(values: list[float], share: float) -> float:
    values = sorted(values)
    return values[round(share * (len(values) - 1))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--step-ms", type=float)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--clients", type=int, default=1, help="processes that read, without --step-ms")
    parser.add_argument("--no-pin", action="store_true", help="leave cores to the system")
    arguments = parser.parse_args()
    step_ms = arguments.step_ms or 0.001
    command = [sys.executable, "-m", "kvarts", "mock", "--port", "0", "--cost", f"linear:step_ms={step_ms}"]
    command += ["--pages", str(arguments.streams * (arguments.tokens // 16 + 4)), "--max-seqs", str(arguments.streams)]
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
        url = found[0]
        try:
            import uvloop

            runner: Any = uvloop.run
        except ImportError:
            runner = asyncio.run
        results = []
        for _ in range(arguments.repeat):
            late_before_run = late(url)
            before = cpu_s(server.pid)
            if arguments.clients > 1:
                wall_s, num_events, readers = several_clients(url, arguments)
            else:
                wall_s, readers = runner(run(url, arguments.streams, arguments.tokens))
                num_events = sum(sum(reader.counts) for reader in readers)
            used_s = cpu_s(server.pid) - before
            # A mock that is late may put several tokens into one event.
            num_tokens = arguments.streams * arguments.tokens
            assert 0.9 * num_tokens < num_events <= num_tokens, num_events
            result: dict[str, Any] = {
                "events": num_events,
                "wall_s": round(wall_s, 3),
                "events_per_s": round(num_events / wall_s),
                "server_cpu_s": round(used_s, 3),
                "events_per_cpu_s": round(num_events / used_s),
                "cpu_us_per_event": round(used_s / num_events * 1e6, 2),
                "cpu_share": round(used_s / wall_s, 3),
            }
            if arguments.step_ms:
                result |= times_of(readers, arguments.step_ms)
                result["server_most_late_ms"] = round(metric(url, "kvarts:mock_most_late_seconds") * 1e3, 3)
                written = late(url)
                result |= {
                    f"server_write_late_ms_p{share * 100:g}": bound_of(written, late_before_run, share)
                    for share in (0.5, 0.99)
                }
            results.append(result)
        print(json.dumps({"load_average": os.getloadavg()[0], "runs": results}, indent=1))
    finally:
        server.terminate()
        server.wait(10)


def times_of(readers: list[Reader], step_ms: float) -> dict[str, Any]:
    """The time of a token, without the first, in milliseconds: when it came to the client's socket, and when read."""
    told: dict[str, Any] = {}
    for name in ("came", "read"):
        gaps, spans = [], []
        for reader in readers:
            seen: list[float] = getattr(reader, f"{name}_s")
            times = [at for at, count in zip(seen, reader.counts, strict=True) for _ in range(count)][1:]
            gaps += [(later - earlier) * 1e3 for earlier, later in pairwise(times)]
            spans.append((times[-1] - times[0]) * 1e3 / (len(times) - 1))
        errors = [abs(gap - step_ms) for gap in gaps]
        told |= {
            f"{name}_ms_mean_error": round(sum(spans) / len(spans) - step_ms, 4),
            f"{name}_ms_error_p50": round(percentile(errors, 0.5), 3),
            f"{name}_ms_error_p99": round(percentile(errors, 0.99), 3),
            f"{name}_ms_p99": round(percentile(gaps, 0.99), 3),
            f"{name}_ms_max": round(max(gaps), 3),
        }
    return told


if __name__ == "__main__":
    main()
