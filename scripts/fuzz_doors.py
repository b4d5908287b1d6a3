"""Fuzz the doors that are not HTTP: `python scripts/fuzz_doors.py --seconds 3600 --seed 1`.

Starts a session server, a publisher of KV events and a watch, each a process of its own, and sends them gRPC messages,
HTTP/2 frames and ZMQ frames that are valid, mutated or random, from short ones to the largest that are read. Memory is
read from /proc, and another client calls all the while. Ends with 1 if a process ends, writes a traceback, has more
than 200 MiB above its idle memory, or lets the other client wait for more than 0.5 s at the 99th percentile, by the
median of ten-second windows. Prints a summary as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import grpc
import msgspec
import zmq

from kvarts.doors.proto.kakeya.v1 import runtime_pb2 as contract
from kvarts.doors.proto.kvarts.v1 import sessions_pb2 as added

MIB = 1 << 20
MAX_GROWTH_BYTES = 200 * MIB
MAX_P99_S = 0.5
WINDOW_S = 10.0
LARGEST = 15_500_000
HANG_S = 120.0
"""A call of a client that means no harm has hung after so long, however busy the machine is."""
MINE, THEIRS = "innocent-token", "hostile-token"


class Watched:
    """A process, its memory, and what it writes to standard error."""

    def __init__(self, stack: ExitStack, name: str, *arguments: str) -> None:
        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvarts", *arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        stack.callback(self.end)
        self.lines: list[str] = []
        self.idle = self.most = 0
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)

    def find(self, pattern: str) -> re.Match[str]:
        """The first line that matches, soon."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and self.process.poll() is None:
            for line in list(self.lines):
                if (found := re.search(pattern, line)) is not None:
                    return found
            time.sleep(0.05)
        raise SystemExit(f"{self.name} did not start: {''.join(self.lines)}")

    def look(self) -> int:
        """Note and return its memory."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+) kB", text)
        resident = int(found[1]) * 1024 if found else 0
        self.most = max(self.most, resident)
        return resident

    def end(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait()


class Fuzz:
    """What is sent, by one thread for each kind, until `stop`."""

    def __init__(self, seed: int, pause_s: float = 0.0) -> None:
        self.seed = seed
        self.pause_s = pause_s
        self.stop = threading.Event()
        self.counts: Counter[str] = Counter()
        self.errors: list[str] = []
        self._threads: list[threading.Thread] = []

    def begin(self, kind: str, step: Callable[[random.Random], str]) -> None:
        """Run `step` again and again, which returns the name of what came of it."""
        rng = random.Random(f"{self.seed} {kind}")

        def run() -> None:
            while not self.stop.wait(self.pause_s):
                try:
                    self.counts[f"{kind}: {step(rng)}"] += 1
                except Exception as error:
                    self.errors.append(f"{kind}: {type(error).__name__}: {error}")
                    return

        thread = threading.Thread(target=run)
        thread.start()
        self._threads.append(thread)

    def end(self) -> None:
        """Wait for all."""
        self.stop.set()
        for thread in self._threads:
            thread.join(60)


def length_of(rng: random.Random, most: int) -> int:
    """Most often short, and sometimes as long as it gets."""
    return rng.choice([0, 1, rng.randrange(40), rng.randrange(5000), rng.randrange(100_000), rng.randrange(most + 1)])


def mutated(rng: random.Random, data: bytes, most: int) -> bytes:
    """Return bytes that are nearly `data`, or nothing like it."""
    kind = rng.randrange(7)
    if kind == 0 or not data:
        return rng.randbytes(length_of(rng, most))
    changed = bytearray(data)
    if kind == 1:
        for _ in range(rng.randrange(1, 8)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
    elif kind == 2:
        del changed[rng.randrange(len(changed)) :]
    elif kind == 3:
        at = rng.randrange(len(changed))
        changed[at:at] = rng.randbytes(rng.randrange(20))
    elif kind == 4:
        changed = changed * min(rng.choice([2, 10, 1000]), max(1, most // len(changed)))
    elif kind == 5:
        changed += bytes([rng.randrange(256)]) * length_of(rng, max(0, most - len(changed)))
    return bytes(changed[:most])


# gRPC -----------------------------------------------------------------------------------------------------


def messages(rng: random.Random, session_id: str) -> tuple[str, bytes]:
    """A method of the server, and a message for it."""
    ids = [rng.randrange(200_000) for _ in range(length_of(rng, 20_000))]
    made: list[tuple[str, Any]] = [
        ("CreateSession", added.CreateSessionRequest(window=rng.randrange(64), client_label="x" * rng.randrange(300))),
        ("AppendTokens", added.AppendTokensRequest(session_id=session_id, token_ids=ids, queue=rng.random() < 0.5)),
        ("Generate", added.GenerateRequest(session_id=session_id, max_tokens=rng.choice([0, 1, 50, 2**32 - 1]),
                                           temperature=rng.choice([0.0, -1.0, 1e30]), stop_token_ids=ids[:2000])),
        ("Fork", added.ForkRequest(session_id=session_id)),
        ("Rollback", added.RollbackRequest(session_id=session_id, length=rng.choice([0, 1, 2**40]))),
        ("Cancel", added.CancelRequest(session_id=session_id)),
        ("Info", added.InfoRequest(session_id=session_id)),
        ("List", added.ListRequest()),
        ("CloseSession", contract.CloseSessionRequest(session_id=session_id)),
        ("GetSessionInfo", contract.GetSessionInfoRequest(session_id=session_id)),
    ]  # fmt: skip
    name, message = rng.choice(made)
    service = rng.choice(["kvarts.v1.Sessions", "kakeya.v1.RuntimeService"])
    method = f"/{service}/{name}"
    if rng.random() < 0.15:
        method = rng.choice(
            [
                "/grpc.health.v1.Health/Check",
                "/grpc.health.v1.Health/Watch",
                "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
                f"/{service}/Nothing",
            ]
        )
    return method, message.SerializeToString()


class Caller:
    """Calls of a hostile client, some of which it abandons."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._channel = self._open()
        self._session_id = "0" * 32

    def _open(self) -> grpc.Channel:
        return grpc.insecure_channel(self._address, options=[("grpc.use_local_subchannel_pool", 1)])

    def step(self, rng: random.Random) -> str:
        """Make a call."""
        method, data = messages(rng, self._session_id)
        if rng.random() < 0.6:
            data = mutated(rng, data, LARGEST)
        token = rng.choice([THEIRS, THEIRS, THEIRS, "", "wrong", "x" * 4000])
        if rng.random() < 0.02:
            self._channel.close()
            self._channel = self._open()
        try:
            if method.endswith(("Generate", "Watch", "ServerReflectionInfo")):
                self._stream(method, data, token, rng)
            else:
                answer = unary(self._channel, method, data, token, rng.choice([0.01, 1.0, 3.0]))
                if method.endswith("CreateSession") and rng.random() < 0.5:
                    self._session_id = contract.CreateSessionResponse.FromString(answer).session_id
        except grpc.RpcError as error:
            code: Any = error
            return str(code.code().name)
        return "OK"

    def _stream(self, method: str, data: bytes, token: str, rng: random.Random) -> None:
        """Read some of a stream."""
        metadata = (("authorization", f"Bearer {token}"),) if token else ()
        channel: Any = self._channel
        stream = channel.unary_stream(method)(data, metadata=metadata, timeout=rng.choice([0.05, 1.0]))
        for number, _ in enumerate(stream):
            if number > 20:
                stream.cancel()
                break


def raw_frames(address: str, rng: random.Random) -> str:
    """Send HTTP/2 frames over a connection of their own, or what is none."""
    host, _, port = address.rpartition(":")
    with suppress(OSError), socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.settimeout(0.05)
        if rng.random() < 0.9:
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04\x00" + bytes(4))
        for _ in range(rng.randrange(1, 20)):
            payload = rng.randbytes(length_of(rng, 30_000))
            kind, flags, stream = rng.randrange(12), rng.randrange(256), rng.randrange(1 << 16)
            head = len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big")
            connection.sendall(head + payload)
        with suppress(TimeoutError):
            connection.recv(65536)
    return "sent"


# ZMQ ------------------------------------------------------------------------------------------------------


def a_batch(rng: random.Random) -> bytes:
    """A batch of KV events."""
    names = [rng.randrange(1 << rng.choice([4, 40])) for _ in range(rng.choice([0, length_of(rng, 20_000)]))]
    as_map = {
        "type": rng.choice(["BlockStored", "BlockRemoved", "AllBlocksCleared", "Else"]),
        "block_hashes": names,
        "parent_block_hash": rng.choice([None, 3]),
        "token_ids": [rng.randrange(100_000) for _ in range(rng.choice([0, len(names), 2 * len(names)]))],
        "block_size": rng.choice([0, 1, 2, -1, 1 << 62]),
        "medium": rng.choice([None, "CPU", f"m{rng.randrange(1000)}"]),
        "group_idx": rng.choice([None, 0, rng.randrange(1000), -1, 1 << 62]),
        "kv_cache_spec_kind": rng.choice([None, "full_attention", "sliding_window", "mamba", 7]),
        "kv_cache_spec_sliding_window": rng.choice([None, 0, 1, 128, -5, 1 << 62, "x"]),
    }
    return msgspec.msgpack.encode([rng.random(), [as_map] * rng.choice([0, 1, 1, 3]), rng.choice([0, None])])


class Publisher:
    """Publishes to a watch, and answers its requests, as no engine would."""

    def __init__(self, stack: ExitStack, context: zmq.Context[Any]) -> None:
        self._publish: zmq.Socket[bytes] = context.socket(zmq.PUB)
        self._replay: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        for each in (self._publish, self._replay):
            each.setsockopt(zmq.LINGER, 0)
            each.setsockopt(zmq.SNDHWM, 20)
            stack.callback(each.close)
        self.endpoint = f"tcp://127.0.0.1:{self._publish.bind_to_random_port('tcp://127.0.0.1')}"
        self.replay_endpoint = f"tcp://127.0.0.1:{self._replay.bind_to_random_port('tcp://127.0.0.1')}"
        self._seq = 0

    def step(self, rng: random.Random) -> str:
        """Send a message, and sometimes an answer."""
        payload = a_batch(rng)
        if rng.random() < 0.4:
            payload = mutated(rng, payload, rng.choice([100_000, 8 << 20, 20 << 20]))
        self._seq = rng.choice([self._seq + 1, self._seq + 1, self._seq + 1, 0, rng.randrange(1 << 63)])
        frames = [b"", (self._seq % (1 << 64)).to_bytes(8, "big"), payload]
        if rng.random() < 0.05:
            frames = [rng.randbytes(rng.randrange(20)) for _ in range(rng.randrange(1, 6))]
        self._publish.send_multipart(frames)
        if self._replay.poll(0):
            client = self._replay.recv_multipart()[0]
            for number in range(rng.choice([0, 1, 100])):
                with suppress(zmq.Again):
                    answer = mutated(rng, a_batch(rng), 1 << 20)
                    self._replay.send_multipart((client, b"", b"", number.to_bytes(8, "big"), answer), zmq.NOBLOCK)
            if rng.random() < 0.7:
                with suppress(zmq.Again):
                    self._replay.send_multipart((client, b"", b"", b"\xff" * 8, b""), zmq.NOBLOCK)
        time.sleep(0.002)
        return "published"


class Asker:
    """Asks a publisher for past batches and full state, and reads some of the answers."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, replay_endpoint: str) -> None:
        self._context, self._endpoint, self._replay_endpoint = context, endpoint, replay_endpoint
        self._sockets: list[zmq.Socket[bytes]] = []

    def step(self, rng: random.Random) -> str:
        """Ask, over a new socket or an old one."""
        if len(self._sockets) < 200 and rng.random() < 0.3:
            made: zmq.Socket[bytes] = self._context.socket(rng.choice([zmq.DEALER, zmq.DEALER, zmq.SUB]))
            made.setsockopt(zmq.LINGER, 0)
            made.setsockopt(zmq.RCVHWM, 2)
            made.setsockopt(zmq.SNDHWM, 10)
            if made.socket_type == zmq.SUB:
                made.setsockopt(zmq.SUBSCRIBE, rng.randbytes(rng.randrange(100)))
                made.connect(self._endpoint)
            else:
                made.connect(self._replay_endpoint)
            self._sockets.append(made)
        elif self._sockets and rng.random() < 0.1:
            self._sockets.pop(rng.randrange(len(self._sockets))).close()
        askers = [each for each in self._sockets if each.socket_type == zmq.DEALER]
        if askers:
            asker = rng.choice(askers)
            start = rng.choice([bytes(8), b"\xff" * 7 + b"\xfe", rng.randbytes(rng.randrange(12))])
            frames = [b"", start] if rng.random() < 0.8 else [rng.randbytes(rng.randrange(2000)) for _ in range(3)]
            with suppress(zmq.Again):
                asker.send_multipart(frames, zmq.NOBLOCK)
            for _ in range(rng.randrange(20)):
                try:
                    asker.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
        time.sleep(0.002)
        return "asked"

    def close(self) -> None:
        """Close all sockets."""
        for each in self._sockets:
            each.close()


def raw_zmtp(endpoints: list[str], rng: random.Random) -> str:
    """Speak ZMTP to a socket, or nearly."""
    host, _, port = rng.choice(endpoints).removeprefix("tcp://").rpartition(":")
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31)
    with suppress(OSError), socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.settimeout(0.05)
        connection.sendall(greeting if rng.random() < 0.8 else mutated(rng, greeting, 1000))
        ready = b"\x05READY\x0bSocket-Type" + len(b"DEALER").to_bytes(4, "big") + b"DEALER"
        connection.sendall(bytes([4, len(ready)]) + ready)
        for _ in range(rng.randrange(10)):
            length = rng.choice([rng.randrange(255), 1 << 40, rng.randrange(1 << 20)])
            connection.sendall(bytes([rng.choice([2, 3, 6])]) + length.to_bytes(8, "big") + rng.randbytes(500))
        with suppress(TimeoutError):
            connection.recv(65536)
    time.sleep(0.01)
    return "sent"


# The run --------------------------------------------------------------------------------------------------


def innocent(address: str) -> None:
    """Make a session, append to it and close it, again and again; print when, and how long a call took, in seconds."""
    channel = grpc.insecure_channel(address)

    def call(name: str, message: Any) -> bytes:
        return unary(channel, f"/kvarts.v1.Sessions/{name}", message.SerializeToString(), MINE, HANG_S)

    while True:
        begin = time.monotonic()
        made = contract.CreateSessionResponse.FromString(call("CreateSession", added.CreateSessionRequest(window=16)))
        call("AppendTokens", added.AppendTokensRequest(session_id=made.session_id, token_ids=[1, 2, 3]))
        call("CloseSession", contract.CloseSessionRequest(session_id=made.session_id))
        print(begin, (time.monotonic() - begin) / 3, flush=True)
        time.sleep(0.05)


def unary(channel: Any, method: str, data: bytes, token: str, timeout_s: float) -> bytes:
    """Make a call of one message each way."""
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    answer: bytes = channel.unary_unary(method)(data, metadata=metadata, timeout=timeout_s)
    return answer


def median_p99_s(waits: list[tuple[float, float]]) -> float:
    """Return the median, over windows of WINDOW_S, of the 99th percentile of waits."""
    if not waits:
        return float("inf")
    windows: dict[int, list[float]] = {}
    for at, wait in waits:
        windows.setdefault(int((at - waits[0][0]) // WINDOW_S), []).append(wait)
    return statistics.median(sorted(each)[max(0, -(-len(each) * 99 // 100) - 1)] for each in windows.values())


def run(seconds: float, seed: int, pause_s: float) -> dict[str, Any]:
    """Fuzz for so long, with a pause after each message; return the summary."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "tokens").write_text(f"ann:{MINE}\neve:{THEIRS}\n")
        options = [
            "--bind",
            "127.0.0.1:0",
            "--token-file",
            str(folder / "tokens"),
            "--state-dir",
            str(folder / "state"),
        ]
        server = Watched(stack, "serve sessions", "serve", "sessions", "--mock", "--speedup", "100", *options)
        address = server.find(r"listening on (\S+) for")[1]
        ports = [free_port() for _ in range(2)]
        events = ["--kv-events", f"tcp://127.0.0.1:{ports[0]}", "--kv-events-replay", f"tcp://127.0.0.1:{ports[1]}"]
        mock = Watched(stack, "mock", "mock", "--port", "0", "--speedup", "100", *events)
        url = mock.find(r"(http://\S+)/v1")[1]
        context: zmq.Context[Any] = zmq.Context()
        stack.callback(lambda: context.destroy(linger=0))
        publisher = Publisher(stack, context)
        watch = Watched(
            stack, "watch", "watch", publisher.endpoint, "--replay", publisher.replay_endpoint, "--quiet",
            "--events", str(folder / "journal.jsonl.gz"), "--verdict", str(folder / "verdict.json"),
        )  # fmt: skip
        asker = Asker(context, f"tcp://127.0.0.1:{ports[0]}", f"tcp://127.0.0.1:{ports[1]}")
        stack.callback(asker.close)
        time.sleep(2.0)
        processes = [server, mock, watch]
        fuzz = Fuzz(seed, pause_s)
        # In a process of its own: the threads here take turns.
        other = subprocess.Popen(
            [sys.executable, __file__, "--innocent", address], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        stack.callback(other.kill)
        time.sleep(1.0)
        for process in processes:
            process.idle = process.most = process.look()
        for number in range(3):
            fuzz.begin(f"grpc {number}", Caller(address).step)
        fuzz.begin("http2", lambda rng: raw_frames(address, rng))
        fuzz.begin("publisher", publisher.step)
        fuzz.begin("asker", asker.step)
        endpoints = [f"tcp://127.0.0.1:{port}" for port in ports]
        fuzz.begin("zmtp", lambda rng: raw_zmtp(endpoints, rng))
        fuzz.begin("prompts", lambda rng: prompt(url, rng))
        problems: list[str] = []
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not problems:
            time.sleep(0.2)
            problems += fuzz.errors
            if other.poll() is not None:
                problems.append("the other client ended")
            for process in processes:
                if process.process.poll() is not None:
                    problems.append(f"{process.name} ended with {process.process.returncode}")
                elif process.look() - process.idle > MAX_GROWTH_BYTES:
                    problems.append(f"{process.name} has {(process.most - process.idle) / MIB:.0f} MiB more than idle")
        fuzz.end()
        other.terminate()
        told, complaints = other.communicate()
        lines = [line.split() for line in told.splitlines()]
        waits = [(float(words[0]), float(words[1])) for words in lines if len(words) == 2]
        problems += filter(None, [complaints])
        for process in processes:
            text = "".join(process.lines)
            if "Traceback" in text or "unexpected error" in text:
                problems.append(f"{process.name} wrote {text[-2000:]}")
        p99_s = median_p99_s(waits)
        if p99_s > MAX_P99_S:
            problems.append(f"the other client waited {p99_s:.2f} s")
        return {
            "seconds": seconds,
            "seed": seed,
            "sent": dict(sorted(fuzz.counts.items())),
            "grown_mib": {process.name: round((process.most - process.idle) / MIB, 1) for process in processes},
            "p99_s_median_of_windows": round(p99_s, 4),
            "longest_wait_s": round(max(wait for _, wait in waits), 3),
            "problems": problems,
            "ran_s": round(seconds - max(0.0, deadline - time.monotonic()), 1),
        }


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def prompt(url: str, rng: random.Random) -> str:
    """Have the mock store blocks, so that there are events."""
    import http.client
    from urllib.parse import urlsplit

    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=HANG_S)
    words = " ".join(str(rng.randrange(1000)) for _ in range(rng.randrange(1, 2000)))
    body = json.dumps({"model": "llama-3.1-8b", "prompt": words, "max_tokens": 4})
    try:
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        return str(connection.getresponse().status)
    finally:
        connection.close()


def main() -> int:
    """Parse the arguments, fuzz, and print the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pause-s", type=float, default=0.0, help="after each message, to leave the machine to others")
    parser.add_argument("--innocent", metavar="ADDRESS", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.innocent is not None:
        innocent(given.innocent)
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    summary = run(given.seconds, given.seed, given.pause_s)
    print(json.dumps(summary, indent=2))
    return 1 if summary["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
