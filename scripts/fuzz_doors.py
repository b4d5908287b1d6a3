"""Fuzz all doors: `python scripts/fuzz_doors.py --seconds 3600 --seed 1`.

Starts a session server, a mock that publishes KV events and a watch, each a process of its own, and sends them gRPC
messages, HTTP/2 frames, HTTP requests and ZMQ frames that are valid, mutated or random, from short ones to the largest
that are read. Memory, descriptors and threads are read from /proc, and two other clients, one of sessions and one of
HTTP, call all the while. Ends with 1 if a process ends, writes a traceback, has more than 200 MiB above its idle
memory, answers 500, or lets another client wait for more than 0.5 s at the 99th percentile, by the median of ten-second
windows. Prints a summary as JSON, and on standard error each of its `--rows` rows as it is taken.
"""

from __future__ import annotations

import argparse
import http.client
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
from urllib.parse import urlsplit

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
        resident = 1024 * self._status("VmRSS")
        self.most = max(self.most, resident)
        return resident

    def row(self) -> dict[str, int]:
        """Return what it has of the machine now."""
        descriptors = sum(1 for _ in Path(f"/proc/{self.process.pid}/fd").iterdir())
        return {"rss_mib": self.look() // MIB, "descriptors": descriptors, "threads": self._status("Threads")}

    def _status(self, name: str) -> int:
        found = re.search(rf"{name}:\s+(\d+)", Path(f"/proc/{self.process.pid}/status").read_text())
        return int(found[1]) if found else 0

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


# HTTP -----------------------------------------------------------------------------------------------------

PATHS = (
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/tokenize",
    "/detokenize", "/v1/models", "/metrics", "/admin/config", "/abort_requests", "/v1/load_lora_adapter", "/none",
)  # fmt: skip
WEIGHTS = (9, 9, 4, 4, *[1] * (len(PATHS) - 4))
FIELDS = (
    "model", "prompt", "messages", "input", "max_tokens", "n", "stop", "logprobs", "tools", "tool_choice",
    "response_format", "stream_options", "priority", "cache_salt", "session_id", "seed", "temperature", "top_k",
    "kv_transfer_params", "chat_template_kwargs", "thinking", "kvarts_answer", "tokens", "dimensions",
)  # fmt: skip
NAMES = ("type", "$ref", "allOf", "enum", "function", "name", "role", "content", "json_schema", "schema", "x")
VALUES = (
    None, True, -1, 0, 2, 2**31, 2**63, 10**400, 1e308, 0.5, "", "a", "function", "user", "json_schema", "#/schema",
    "\x1b[2J",
)  # fmt: skip


def a_value(rng: random.Random, depth: int = 0) -> Any:
    """Return any JSON, often at a bound."""
    if depth < 4 and rng.random() < 0.3:
        return [a_value(rng, depth + 1)] * (rng.choice([0, 1, 500]) if depth == 3 else rng.randrange(3))
    if depth < 4 and rng.random() < 0.3:
        return {rng.choice(NAMES): a_value(rng, depth + 1) for _ in range(rng.randrange(4))}
    return rng.choice([*VALUES, "a" * length_of(rng, 40 if depth else 1_000_000)])


def a_body(rng: random.Random) -> bytes:
    """Return a request with fields that are odd, or bytes that are nearly one."""
    words = " ".join(str(rng.randrange(1000)) for _ in range(rng.randrange(1, 300)))
    body: dict[str, Any] = {
        "model": "llama-3.1-8b",
        "prompt": words,
        "messages": [{"role": "user", "content": words}],
        "input": words,
        "max_tokens": rng.randrange(1, 40),
        "stream": rng.random() < 0.5,
    }
    body |= {rng.choice(FIELDS): a_value(rng) for _ in range(rng.choice([0, 0, 1, 1, 3]))}
    data = b"[" * 200_000 if rng.random() < 0.02 else json.dumps(body).encode()
    return mutated(rng, data, LARGEST) if rng.random() < 0.4 else data


def raw_http(netloc: str, rng: random.Random) -> str:
    """Send a request, whole or torn; read its answer, some of it, or nothing. Return its status."""
    body = a_body(rng)
    length = rng.choice([len(body)] * 20 + [0, len(body) // 2, len(body) + 9, -1, 2**70])
    key = rng.choice([THEIRS] * 20 + ["", "wrong", "x" * 4000])
    method = rng.choice(["POST"] * 20 + ["GET", "DELETE", "PUT", "\x00"])
    path = rng.choices(PATHS, WEIGHTS)[0]
    lines = [f"{method} {path} HTTP/1.1", "host: x", f"authorization: Bearer {key}", "content-type: application/json"]
    lines += rng.choice([[f"content-length: {length}"]] * 20 + [["transfer-encoding: chunked"], []])
    lines += rng.choice([["connection: close"]] * 20 + [[f"x-{number}: y" for number in range(5000)]])
    head = ("\r\n".join(lines) + "\r\n\r\n").encode()
    sent = mutated(rng, head, 100_000) if rng.random() < 0.08 else head + body
    host, _, port = netloc.rpartition(":")
    answer = b""
    with suppress(OSError), socket.create_connection((host, int(port)), timeout=HANG_S) as connection:
        connection.settimeout(1.0)
        size = rng.choice([100, 65536])
        connection.sendall(sent[: rng.randrange(len(sent) + 1)] if rng.random() < 0.1 else sent)
        if rng.random() < 0.1:
            return "left"
        while (part := connection.recv(size)) and (answer := answer + part):
            if rng.random() < 0.02:
                break
    status = answer[9:12].decode("latin-1") if answer.startswith(b"HTTP/1.1 ") else "no answer"
    if status == "500":
        raise ValueError(f"{sent[:600]!r} was answered {answer[:600]!r}")
    return status


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
    """Call again and again; print when, and how long a call took, in seconds."""
    step, num_calls = asks_http(address) if address.startswith("http:") else asks_sessions(address)
    while True:
        begin = time.monotonic()
        step()
        print(begin, (time.monotonic() - begin) / num_calls, flush=True)
        time.sleep(0.05)


def asks_http(url: str) -> tuple[Callable[[], None], int]:
    """Return a function that asks for four tokens over a new connection, and its number of calls."""

    def step() -> None:
        status = prompt(url, "hello", MINE)
        if status != "200":
            raise SystemExit(f"an answer has the status {status}")

    return step, 1


def asks_sessions(address: str) -> tuple[Callable[[], None], int]:
    """Return a function that makes a session, appends to it and closes it, and its number of calls."""
    channel = grpc.insecure_channel(address)

    def call(name: str, message: Any) -> bytes:
        return unary(channel, f"/kvarts.v1.Sessions/{name}", message.SerializeToString(), MINE, HANG_S)

    def step() -> None:
        made = contract.CreateSessionResponse.FromString(call("CreateSession", added.CreateSessionRequest(window=16)))
        call("AppendTokens", added.AppendTokensRequest(session_id=made.session_id, token_ids=[1, 2, 3]))
        call("CloseSession", contract.CloseSessionRequest(session_id=made.session_id))

    return step, 3


def unary(channel: Any, method: str, data: bytes, token: str, timeout_s: float) -> bytes:
    """Make a call of one message each way."""
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    answer: bytes = channel.unary_unary(method)(data, metadata=metadata, timeout=timeout_s)
    return answer


class Other:
    """A client that means no harm, in a process of its own (the threads here take turns), and what it waited for."""

    def __init__(self, stack: ExitStack, name: str, address: str) -> None:
        self.name = name
        self.waits: list[tuple[float, float]] = []
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--innocent", address], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        stack.callback(self.process.kill)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if len(words := line.split()) == 2:
                self.waits.append((float(words[0]), float(words[1])))

    def end(self) -> str:
        """End it; return its complaints."""
        self.process.terminate()
        assert self.process.stderr is not None
        complaints = self.process.stderr.read()
        self._reader.join(10)
        return complaints

    def row(self, since_s: float) -> dict[str, float]:
        """Return percentiles of what it waited for since then; the 100th is the longest."""
        waits = [wait for at, wait in list(self.waits) if at >= since_s]
        return {"calls": len(waits)} | {
            f"p{share}_ms": round(1000 * percentile(waits, share), 1) for share in (50, 99, 100) if waits
        }

    @property
    def median_p99_s(self) -> float:
        """The median, over windows of WINDOW_S, of the 99th percentile of its waits."""
        windows: dict[int, list[float]] = {}
        for at, wait in self.waits:
            windows.setdefault(int((at - self.waits[0][0]) // WINDOW_S), []).append(wait)
        return statistics.median(percentile(each, 99) for each in windows.values()) if windows else float("inf")


def percentile(values: list[float], share: int) -> float:
    """Return the value that `share` percent do not exceed."""
    return sorted(values)[max(0, -(-len(values) * share // 100) - 1)]


def run(seconds: float, seed: int, pause_s: float, num_rows: int) -> dict[str, Any]:
    """Fuzz for so long, with a pause after each message; return the summary."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "tokens").write_text(f"ann:{MINE}\neve:{THEIRS}\n")
        (folder / "keys").write_text(f"{MINE} owner=ann\n{THEIRS} owner=eve\n")
        options = [
            "--port",
            "0",
            "--token-file",
            str(folder / "tokens"),
            "--state-dir",
            str(folder / "state"),
        ]
        server = Watched(stack, "serve sessions", "serve", "sessions", "--mock", "--speedup", "100", *options)
        address = server.find(r"listening on (\S+) for")[1]
        ports = [free_port() for _ in range(2)]
        events = ["--kv-events", f"tcp://127.0.0.1:{ports[0]}", "--set", f"kv_events_replay=tcp://127.0.0.1:{ports[1]}"]
        keys = ["--api-key-file", str(folder / "keys")]
        mock = Watched(stack, "mock", "mock", "--port", "0", "--speedup", "100", *keys, *events)
        url = mock.find(r"(http://\S+)/v1")[1]
        context: zmq.Context[Any] = zmq.Context()
        stack.callback(lambda: context.destroy(linger=0))
        publisher = Publisher(stack, context)
        watch = Watched(
            stack, "watch", "watch", publisher.endpoint, "--replay", publisher.replay_endpoint, "--set", "quiet=true",
            "--events", str(folder / "journal.jsonl.gz"), "--verdict", str(folder / "verdict.json"),
        )  # fmt: skip
        asker = Asker(context, f"tcp://127.0.0.1:{ports[0]}", f"tcp://127.0.0.1:{ports[1]}")
        stack.callback(asker.close)
        time.sleep(2.0)
        processes = [server, mock, watch]
        fuzz = Fuzz(seed, pause_s)
        others = [Other(stack, "sessions", address), Other(stack, "http", url)]
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
        fuzz.begin("prompts", lambda rng: prompt(url, some_words(rng), THEIRS))
        for number in range(3):
            fuzz.begin(f"http {number}", lambda rng: raw_http(urlsplit(url).netloc, rng))
        problems: list[str] = []
        rows: list[dict[str, Any]] = []
        begin = last = time.monotonic()
        deadline = begin + seconds
        while time.monotonic() < deadline and not problems:
            time.sleep(0.2)
            if (now := time.monotonic()) >= begin + seconds * len(rows) / num_rows:
                rows.append({"minute": round((now - begin) / 60, 1), "sent": fuzz.counts.total()})
                rows[-1] |= {each.name: each.row() for each in processes}
                rows[-1] |= {each.name: each.row(last) for each in others}
                last = now
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
            problems += fuzz.errors
            problems += [f"the other client of {each.name} ended" for each in others if each.process.poll() is not None]
            for process in processes:
                if process.process.poll() is not None:
                    problems.append(f"{process.name} ended with {process.process.returncode}")
                elif process.look() - process.idle > MAX_GROWTH_BYTES:
                    problems.append(f"{process.name} has {(process.most - process.idle) / MIB:.0f} MiB more than idle")
        fuzz.end()
        problems += filter(None, [each.end() for each in others])
        for process in processes:
            text = "".join(process.lines)
            if "Traceback" in text or "unexpected error" in text:
                problems.append(f"{process.name} wrote {text[-2000:]}")
        for each in others:
            if each.median_p99_s > MAX_P99_S:
                problems.append(f"the other client of {each.name} waited {each.median_p99_s:.2f} s")
        return {
            "seconds": seconds,
            "seed": seed,
            "sent": dict(sorted(fuzz.counts.items())),
            "grown_mib": {process.name: round((process.most - process.idle) / MIB, 1) for process in processes},
            "p99_s_median_of_windows": {each.name: round(each.median_p99_s, 4) for each in others},
            "calls_of_others": {each.name: each.row(0.0) for each in others},
            "rows": rows,
            "problems": problems,
            "ran_s": round(seconds - max(0.0, deadline - time.monotonic()), 1),
        }


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def some_words(rng: random.Random) -> str:
    """Return a prompt that no request had before: the mock stores blocks, so that there are events."""
    return " ".join(str(rng.randrange(1000)) for _ in range(rng.randrange(1, 2000)))


def prompt(url: str, words: str, key: str) -> str:
    """Ask for four tokens; return the status of the answer."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=HANG_S)
    body = json.dumps({"model": "llama-3.1-8b", "prompt": words, "max_tokens": 4})
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    try:
        connection.request("POST", "/v1/completions", body, headers)
        answer = connection.getresponse()
        answer.read()
        return str(answer.status)
    finally:
        connection.close()


def main() -> int:
    """Parse the arguments, fuzz, and print the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pause-s", type=float, default=0.0, help="after each message, to leave the machine to others")
    parser.add_argument("--rows", type=int, default=12, help="of the table over time")
    parser.add_argument("--innocent", metavar="ADDRESS", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.innocent is not None:
        innocent(given.innocent)
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    summary = run(given.seconds, given.seed, given.pause_s, given.rows)
    print(json.dumps(summary, indent=2))
    return 1 if summary["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
