"""Clients of a publisher of KV events that ask and do not read, watched from outside."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zmq", reason="needs kvarts[serve]")
import zmq

from kvarts.doors.kv_events.publisher import FULL_STATE

from builders.kv_event_client import END, TIMEOUT_MS, Client, open_client
from builders.kv_publisher import AT_ONCE
from builders.server_process import MIB, Process, assert_short_waits, python_process

MAX_GROWTH_BYTES = 200 * MIB
MAX_P99_S = 0.5
NUM_BATCHES = 2000
NUM_UNREAD = 600

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="watches memory in /proc")


@contextmanager
def published() -> Iterator[tuple[Process, str, str]]:
    with python_process("builders.kv_publisher", str(NUM_BATCHES)) as process:
        found = process.wait_for(r"published at (\S+) (\S+)")
        yield process, found[1], found[2]


@contextmanager
def asking(endpoint: str, num_sockets: int, frames: tuple[bytes, ...], *, times: int = 1) -> Iterator[None]:
    """Sockets that have asked, and read nothing."""
    context: zmq.Context[Any] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, num_sockets + 10)
    sockets: list[zmq.Socket[bytes]] = []
    try:
        for _ in range(num_sockets):
            socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
            socket.setsockopt(zmq.RCVHWM, 1)
            socket.setsockopt(zmq.RCVBUF, 4096)
            socket.connect(endpoint)
            for _ in range(times):
                socket.send_multipart(frames)
            sockets.append(socket)
        yield
    finally:
        for socket in sockets:
            socket.close(linger=0)
        context.term()


@pytest.mark.long
@pytest.mark.parametrize(
    ("start", "times"),
    [
        (bytes(8), 1),
        (bytes(8), 50),
        (FULL_STATE, 1),
    ],
)
def test_replays_that_are_not_read_take_no_memory_and_keep_nothing_waiting(start: bytes, times: int) -> None:
    with published() as (process, endpoint, replay_endpoint), open_client(endpoint, replay_endpoint) as innocent:
        innocent.receive()
        idle = process.resident_bytes
        process.forget_peak()
        with asking(replay_endpoint, NUM_UNREAD, (b"", start), times=times):
            time.sleep(0.5)
            last_ones = LastOnes(innocent)
            assert_short_waits(process, last_ones.replay, lambda: time.sleep(2.0), most_s=MAX_P99_S)
            assert last_ones.most < 1000, "no longer a short answer"
            begin = time.monotonic()
            seen = [innocent.receive()[1] for _ in range(100)]
            assert time.monotonic() - begin < 20
        grown = process.peak_bytes - idle
    assert seen == list(range(seen[0], seen[0] + 100))
    assert grown <= MAX_GROWTH_BYTES, f"{grown / MIB:.0f} MiB"


class LastOnes:
    """Asks for the batches since ten before the last one that it has seen, which are few however long it asks."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._last = NUM_BATCHES
        self.most = 0
        """Batches of the longest answer."""

    def replay(self) -> None:
        socket = self._client.ask(b"", (self._last - 10).to_bytes(8, "big"))
        count = 0
        while True:
            assert socket.poll(TIMEOUT_MS)
            number = socket.recv_multipart()[2]
            if number == END:
                break
            self._last, count = int.from_bytes(number, "big"), count + 1
        self.most = max(self.most, count)
        self._client.asked.remove(socket)
        socket.close(linger=0)


@pytest.mark.long
def test_requests_and_subscriptions_of_any_length_are_refused_or_ignored() -> None:
    with published() as (process, endpoint, replay_endpoint), open_client(endpoint, replay_endpoint) as innocent:
        innocent.receive()
        idle = process.resident_bytes
        process.forget_peak()
        with asking(replay_endpoint, 20, (b"", bytes(10_000_000)), times=3):
            context: zmq.Context[Any] = zmq.Context()
            subscriber: zmq.Socket[bytes] = context.socket(zmq.DEALER)  # its messages are those of a SUB here
            subscriber.setsockopt(zmq.IMMEDIATE, 1)
            subscriber.connect(endpoint)
            for number in range(20):
                with suppress(zmq.Again):
                    subscriber.send(b"\1" + number.to_bytes(2, "big") * 2_000_000, zmq.NOBLOCK)
                time.sleep(0.01)
            time.sleep(1.0)
            LastOnes(innocent).replay()
            subscriber.close(linger=0)
            context.term()
        grown = process.peak_bytes - idle
    assert grown <= MAX_GROWTH_BYTES, f"{grown / MIB:.0f} MiB"


@pytest.mark.long
def test_a_slow_reader_gets_its_whole_answer_while_others_read_nothing() -> None:
    with published() as (_, endpoint, replay_endpoint), open_client(endpoint, replay_endpoint) as innocent:
        with asking(replay_endpoint, 100, (b"", bytes(8))):
            numbers = [seq for _, seq, _ in innocent.replay(0)]
        assert numbers == list(range(numbers[-1] + 1)) and len(numbers) >= NUM_BATCHES


@pytest.mark.long
def test_subscribers_that_read_nothing_take_no_memory_and_keep_nothing_from_those_that_do() -> None:
    with published() as (process, endpoint, replay_endpoint), open_client(endpoint, replay_endpoint) as innocent:
        last = innocent.receive()[1]
        idle = process.resident_bytes
        process.forget_peak()
        num_missed: list[int] = []
        for _ in range(3):
            with stalled_subscribers(endpoint, 50):
                time.sleep(0.5)
                end = last + AT_ONCE
                process.popen.send_signal(signal.SIGUSR1)
                while last < end:
                    _, seq, _ = innocent.receive()
                    if seq != last + 1:
                        assert {before for _, before, _ in innocent.replay(last + 1)} >= set(range(last + 1, seq))
                        num_missed.append(seq - last - 1)
                    last = seq
        grown = process.peak_bytes - idle
    assert 1 <= len(num_missed) <= 3, num_missed
    assert grown <= MAX_GROWTH_BYTES, f"{grown / MIB:.0f} MiB"


@contextmanager
def stalled_subscribers(endpoint: str, count: int) -> Iterator[None]:
    """Subscribers that read nothing."""
    context: zmq.Context[Any] = zmq.Context()
    sockets = [context.socket(zmq.SUB) for _ in range(count)]
    try:
        for socket in sockets:
            for option, value in ((zmq.RCVHWM, 1), (zmq.RCVBUF, 4096), (zmq.SUBSCRIBE, b"")):
                socket.setsockopt(option, value)
            socket.connect(endpoint)
        yield
    finally:
        for socket in sockets:
            socket.close(linger=0)
        context.term()
