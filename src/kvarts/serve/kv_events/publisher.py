"""Publishes batches over ZMQ, and answers requests for past ones and for full state. One thread has all sockets.

A batch is three frames: topic, number in eight bytes (big endian), payload. A replay request is an empty frame and the
number to begin with; its answer is one message a batch: empty, topic, number, payload; and at the end empty, empty,
eight bytes of ff, empty. The number FULL_STATE asks for everything instead: batches that clear and then store what
there is, all under the number of the last batch that they include. vLLM answers that request with an end alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from threading import Event as Flag
from threading import Thread
from typing import Any, Protocol

import zmq

from kvarts.errors import ConfigError
from kvarts.serve.kv_events.batch_queue import BatchQueue
from kvarts.serve.kv_events.config import KvEventsConfig, at_rank
from kvarts.serve.kv_events.told import Batch
from kvarts.serve.kv_events.wire import Wire

__all__ = ["END", "FULL_STATE", "StateSource", "ZmqPublisher"]

END = b"\xff" * 8
FULL_STATE = (-2).to_bytes(8, "big", signed=True)
LINGER_MS = 1000
RUNS_IN_A_MESSAGE = 1000
"""Of full state: bounds the size of a message."""


class StateSource(Protocol):
    """Knows which blocks there are. Any thread may ask."""

    def snapshot(self) -> Batch:
        """Return what tells of everything that there is after the last batch, under its number; -1 before the first."""

    def announce(self) -> None:
        """Tell of everything that there is, in a batch of its own."""


class ZmqPublisher:
    """Owner of the sockets of `config`, and of the past batches. It sends what comes to `queue`, in order.

    `source` answers what there is. Raises ConfigError for an endpoint that cannot be bound.
    """

    def __init__(self, config: KvEventsConfig, queue: BatchQueue, source: StateSource) -> None:
        self._config = config
        self._queue = queue
        self._source = source
        self._wire = Wire(config.form, rank=config.rank, hash_bytes=config.hash_bytes, groups=config.groups)
        self._topic = config.topic.encode()
        self._past: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self.num_sent = 0
        self.num_replays = 0
        self.num_bad_requests = 0
        self.num_subscriptions = 0
        """Subscriptions that hold now."""
        self._context: zmq.Context[Any] = zmq.Context()
        self._replay: zmq.Socket[bytes] | None = None
        try:
            self._publish = self._open_publish()
            self.endpoint = _name_of(self._publish)
            self.replay_endpoint: str | None = None
            if config.replay_endpoint is not None:
                self._replay = self._open_replay(config.replay_endpoint)
                self.replay_endpoint = _name_of(self._replay)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._has_subscriber = Flag()
        self._is_closing = False
        self._thread = Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def wait_for_subscriber(self, timeout_s: float | None = None) -> bool:
        """Wait until there has been a subscription; return whether there has."""
        return self._has_subscriber.wait(timeout_s)

    def close(self) -> None:
        """Send what waits, and close the sockets."""
        if self._is_closing:
            return
        self._is_closing = True
        self._queue.wake()
        self._thread.join()
        self._queue.close()

    def _open_publish(self) -> zmq.Socket[bytes]:
        config = self._config
        # XPUB is PUB that also says that something subscribes.
        publish: zmq.Socket[bytes] = self._context.socket(zmq.XPUB)
        publish.setsockopt(zmq.XPUB_VERBOSER, 1)
        publish.setsockopt(zmq.SNDHWM, config.high_water_mark)
        publish.setsockopt(zmq.LINGER, LINGER_MS)
        _open(publish, at_rank(config.endpoint, config.rank), "endpoint", connects=config.connects)
        return publish

    def _open_replay(self, endpoint: str) -> zmq.Socket[bytes]:
        replay: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        # With a mark, a ROUTER silently drops what a slow client has not read: a replay would have gaps of its own.
        replay.setsockopt(zmq.SNDHWM, 0)
        replay.setsockopt(zmq.LINGER, LINGER_MS)
        _open(replay, at_rank(endpoint, self._config.rank), "replay_endpoint")
        return replay

    # Its thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._queue.fileno(), zmq.POLLIN)
        poller.register(self._publish, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        while True:
            is_closing = self._is_closing  # asked first: what was put before it was set is sent
            if not is_closing:
                poller.poll()
            self._heed_subscriptions()
            for batch in self._queue.take():
                self._send(batch)
            if self._replay is not None:
                self._answer(self._replay)
            if is_closing and self._queue.is_empty:
                break
        self._publish.close()
        if self._replay is not None:
            self._replay.close()
        self._context.term()

    def _send(self, batch: Batch) -> None:
        payload = self._wire.encode(batch.told, batch.time_s)
        self._publish.send_multipart((self._topic, _number(batch.seq), payload))
        self._past.append((batch.seq, payload))
        self.num_sent += 1

    def _heed_subscriptions(self) -> None:
        while self._publish.poll(0):
            message = self._publish.recv()
            if not message:
                continue
            if message[0]:
                self.num_subscriptions += 1
                if self._config.state_on_subscribe:
                    self._source.announce()
                self._has_subscriber.set()
            else:
                self.num_subscriptions -= 1

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        while replay.poll(0):
            frames = replay.recv_multipart()
            if len(frames) != 3 or len(frames[2]) > 8:
                self.num_bad_requests += 1
                continue
            client, _, start = frames
            for number, payload in self._answers(start):
                replay.send_multipart((client, b"", self._topic, number, payload))
            replay.send_multipart((client, b"", b"", END, b""))
            self.num_replays += 1

    def _answers(self, start: bytes) -> Iterator[tuple[bytes, bytes]]:
        if start == FULL_STATE:
            yield from self._state()
            return
        first = int.from_bytes(start, "big")
        past = list(self._past)
        oldest = past[0][0] if past else 0
        if self._config.state_on_replay and first < oldest:
            yield from self._state()
            return
        for seq, payload in past:
            if seq >= first:
                yield _number(seq), payload

    def _state(self) -> Iterator[tuple[bytes, bytes]]:
        state = self._source.snapshot()
        if state.seq < 0:
            return
        for start in range(0, len(state.told), RUNS_IN_A_MESSAGE):
            part = state.told[start : start + RUNS_IN_A_MESSAGE]
            yield _number(state.seq), self._wire.encode(part, state.time_s)


def _number(seq: int) -> bytes:
    return seq.to_bytes(8, "big")


def _open(socket: zmq.Socket[bytes], endpoint: str, field: str, *, connects: bool = False) -> None:
    try:
        if connects:
            socket.connect(endpoint)
        else:
            socket.bind(endpoint)
    except zmq.ZMQError as error:
        verb = "connected to" if connects else "bound"
        raise ConfigError(f"{endpoint} cannot be {verb}: {error.strerror}", field=field) from None


def _name_of(socket: zmq.Socket[bytes]) -> str:
    name = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(name, bytes)
    return name.rstrip(b"\0").decode()
