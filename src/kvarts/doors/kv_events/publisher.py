"""Publishes batches over ZMQ, and answers requests for past ones and for full state. One thread owns all sockets.

A batch is three frames: topic, number in eight bytes (big endian), payload. A replay request is an empty frame and the
number to begin with; its answer is one message per batch: empty, topic, number, payload; and at the end empty, empty,
eight bytes of ff, empty. The number FULL_STATE requests the full state instead: batches that clear and then store all
blocks, each with the number of the last batch that the state includes. vLLM answers that request with only an end.
SNAPSHOT, the word of vLLM's PR 50134, requests the same with the number of the next batch in its place.

Clients of the ROUTER socket may read slowly or not at all.

ZMQ would keep a whole answer in memory until it is read. Here answers are produced as they are read: at most MARK
messages per client wait in ZMQ, and the position in the answer is kept here.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import ceil
from threading import Event as Flag
from threading import Thread
from types import MappingProxyType
from typing import Any

import zmq

from kvarts.base.errors import ConfigError
from kvarts.core.keys import KeyMaker, root_key
from kvarts.doors.kv_events.batches import (
    Batch,
    BatchQueue,
    BlocksCleared,
    Extent,
    KvEventsConfig,
    Told,
    Wire,
    at_rank,
)
from kvarts.doors.kv_events.copies import CopiesReader, ReportsReader
from kvarts.doors.kv_events.reader import KvEventReader
from kvarts.doors.kv_events.sglang import SglangReader, SglangWire

__all__ = [
    "END",
    "FULL_STATE",
    "MARK_BYTES",
    "SNAPSHOT",
    "Frames",
    "KvEvents",
    "Replies",
    "Reply",
    "Unread",
    "ZmqPublisher",
    "open_kv_events",
]

MARK_BYTES = 1 << 20
MARK = 4
"""Messages per client queued in ZMQ."""
MOST_CLIENTS = 1024
"""Clients answered concurrently. Requests of further clients are dropped."""
MOST_ASKED = 4
"""Requests that may wait per client. Further ones are dropped."""
MOST_COPIES = 2
"""Copies of full state in memory. All clients that wait when a copy is made share it."""
COPY_SHARE = 0.2
"""Largest share of the time spent in making copies."""
STALLED_S = 1.0
"""A client that has read nothing of a copy for this time loses it if another client waits for one."""
AT_ONCE = 8
"""Consecutive messages to one client."""
REQUESTS_AT_ONCE = 1000
ROUND_S = 0.01
"""Time for sending answers before other work has a turn."""
SEND_BUFFER_BYTES = 128 * 1024
"""Send buffer per client in the operating system."""
SOONEST_S = 0.0005
LATEST_S = 0.05
"""Range of the delay before a client that was not ready is retried; it doubles with each attempt."""
MAX_REQUEST_BYTES = 1024

Frames = tuple[bytes, ...]


class Reply:
    """The messages of an answer, without the client's name. `is_copy`: they are a copy of full state, made at once.

    `adapt`: changes each message of a copy, which clients share, for this client.
    """

    def __init__(
        self,
        messages: Callable[[], Iterator[Frames]],
        *,
        is_copy: bool,
        adapt: Callable[[Frames], Frames] = lambda frames: frames,
    ) -> None:
        self.messages = messages
        self.is_copy = is_copy
        self.adapt = adapt


class _Client:
    """The answers to a client, beginning with the one in progress, and the next message."""

    def __init__(self) -> None:
        self.replies: deque[Reply] = deque()
        self.under_way: Iterator[Frames] | None = None
        self.next: Frames | None = None
        self.copy: tuple[Frames, ...] | None = None
        """Source of the answer in progress, if it is a copy."""
        self.num_sent = 0
        self.moved_s = 0.0
        """Time of the last message to it, or of the start of its answer."""
        self.try_again_s = 0.0
        self.pause_s = SOONEST_S

    @property
    def waits_for_copy(self) -> bool:
        """Whether its next answer needs a copy that it does not have."""
        return bool(self.replies) and self.replies[0].is_copy and self.copy is None

    def wait(self, now_s: float) -> None:
        """Delay the next attempt, and double the delay after it."""
        self.try_again_s = now_s + self.pause_s
        self.pause_s = min(LATEST_S, 2 * self.pause_s)


class Replies:
    """Owner of the answers in progress on `socket`, for one thread.

    `reply_to`: returns the answer to the frames of a request after the client's name; None if they are not a request.
    """

    def __init__(self, socket: zmq.Socket[bytes], reply_to: Callable[[list[bytes]], Reply | None]) -> None:
        self._socket = socket
        self._reply_to = reply_to
        self._clients: dict[bytes, _Client] = {}
        self._next_copy_s = 0.0
        self.num_answered = 0
        self.num_bad = 0
        self.num_dropped = 0
        """Requests and answers that were dropped because there were too many."""

    @staticmethod
    def set_limits(socket: zmq.Socket[bytes]) -> None:
        """Prepare a socket that is not bound yet."""
        socket.setsockopt(zmq.SNDHWM, MARK)
        socket.setsockopt(zmq.SNDBUF, SEND_BUFFER_BYTES)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # raises if a client is not ready, instead of dropping silently
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)

    def take(self) -> None:
        """Receive requests that have arrived, up to a limit."""
        for _ in range(REQUESTS_AT_ONCE):
            try:
                name, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            reply = self._reply_to(frames)
            if reply is None:
                self.num_bad += 1
                continue
            client = self._clients.get(name)
            if client is None and len(self._clients) < MOST_CLIENTS:
                client = self._clients[name] = _Client()
            if client is None or len(client.replies) >= MOST_ASKED:
                self.num_dropped += 1
            else:
                client.replies.append(reply)

    def send(self) -> float | None:
        """Send messages to ready clients; return the seconds until the next call, None to wait for a request."""
        if not self._clients:
            return None
        now_s = time.monotonic()
        self._drop_stalled(now_s)
        has_sent = False
        able = [(name, client) for name, client in self._clients.items() if client.try_again_s <= now_s]
        able.sort(key=lambda each: each[1].num_sent)  # a short answer does not wait for the long ones of others
        for name, client in able:
            if self._send_to(name, client, now_s):
                has_sent = True
            if not client.replies:
                del self._clients[name]
            if time.monotonic() - now_s > ROUND_S:
                has_sent = True  # other clients may be ready
                break
        if has_sent:
            return 0.0
        return min((max(0.0, client.try_again_s - now_s) for client in self._clients.values()), default=None)

    def _send_to(self, name: bytes, client: _Client, now_s: float) -> bool:
        """Send some messages; return whether any were sent."""
        has_sent = False
        for _ in range(AT_ONCE):
            if client.next is None and not self._advance(client, now_s):
                return has_sent
            assert client.next is not None
            try:
                # Without copying: large frames are shared with the past batches and among clients.
                self._socket.send_multipart((name, *client.next), zmq.NOBLOCK, copy=False)
            except zmq.Again:
                client.wait(now_s)
                return has_sent
            except zmq.ZMQError:  # the client has disconnected
                client.replies.clear()
                return has_sent
            client.next = None
            client.num_sent += 1
            client.moved_s, client.pause_s = now_s, SOONEST_S
            has_sent = True
        return has_sent

    def _advance(self, client: _Client, now_s: float) -> bool:
        """Prepare the next message of a client; return whether it is available now."""
        while client.replies:
            if client.waits_for_copy and not self._copy(client.replies[0], now_s):
                client.wait(now_s)
                return False
            if client.under_way is None:
                client.under_way, client.moved_s = client.replies[0].messages(), now_s
            message = next(client.under_way, None)
            if message is not None:
                client.next = client.replies[0].adapt(message)
                return True
            self._end(client)
            self.num_answered += 1
        return False

    def _copy(self, reply: Reply, now_s: float) -> bool:
        """Make a copy for all clients that wait for one; return whether the limits allow it now."""
        copies = {id(client.copy) for client in self._clients.values() if client.copy is not None}
        if len(copies) >= MOST_COPIES or now_s < self._next_copy_s:
            return False
        begin_s = time.monotonic()
        messages = tuple(reply.messages())
        self._next_copy_s = now_s + (time.monotonic() - begin_s) / COPY_SHARE
        for client in self._clients.values():
            if client.waits_for_copy:
                client.copy, client.under_way, client.moved_s = messages, iter(messages), now_s
        return True

    def _drop_stalled(self, now_s: float) -> None:
        """Take copies away from clients that do not read them, if another client waits for one."""
        if not any(client.waits_for_copy for client in self._clients.values()):
            return
        for client in self._clients.values():
            if client.copy is not None and now_s - client.moved_s > STALLED_S:
                self._end(client)
                self.num_dropped += 1

    @staticmethod
    def _end(client: _Client) -> None:
        client.replies.popleft()
        client.under_way = client.next = client.copy = None


class Unread:
    """Upper bound of the waiting bytes, from one tracked message per MARK_BYTES.

    Messages of a subscriber wait in order: all waiting messages were sent after the last mark that no longer waits.
    """

    def __init__(self) -> None:
        self._marks: deque[tuple[zmq.MessageTracker, int]] = deque()
        """Marks that may wait, each with the number of bytes sent up to it."""
        self._num_sent_bytes = 0
        self._next_mark = 0

    def add(self, num_bytes: int) -> bool:
        """Count a message; return whether it must be tracked as a mark."""
        self._num_sent_bytes += num_bytes
        if self._num_sent_bytes <= self._next_mark:
            return False
        self._next_mark = self._num_sent_bytes + MARK_BYTES
        return True

    def mark(self, tracker: zmq.MessageTracker) -> None:
        """Record the tracker of the last counted message."""
        self._marks.append((tracker, self._num_sent_bytes))

    def update(self) -> int:
        """Drop marks that no longer wait; return the bytes that may wait, to within MARK_BYTES."""
        marks = self._marks
        while marks and marks[0][0].done:
            marks.popleft()
        return self._num_sent_bytes - marks[0][1] if marks else 0


END = b"\xff" * 8
FULL_STATE = (-2).to_bytes(8, "big", signed=True)
SNAPSHOT = b"snapshot"
LINGER_MS = 1000
RUNS_IN_A_MESSAGE = 1000
BLOCKS_IN_A_MESSAGE = 4096
"""Limits of runs and blocks per message of full state, which bound its size."""
ANSWERED = (b"", b"", END, b"")
MAX_PAST_BYTES = 32 << 20
MAX_UNREAD_BYTES = 16 << 20
"""Limit of all batches that wait for subscribers. Beyond it, all are disconnected; those that read reconnect."""
STALLED_MS = 10_000
"""A subscriber that has read nothing for this time is disconnected."""
OPEN_AGAIN_MS = 10
MAX_SUBSCRIPTION_BYTES = 4096
SUBSCRIPTIONS_AT_ONCE = 1000


class ZmqPublisher:
    """Owner of the sockets of `config`, and of the past batches. It sends the batches of `queue`, in order.

    `source` provides the full state; `wire` encodes batches. Raises ConfigError for an endpoint that cannot be bound.
    """

    def __init__(self, config: KvEventsConfig, queue: BatchQueue, source: KvEventReader, wire: Wire) -> None:
        self._config = config
        self._queue = queue
        self._source = source
        self._wire = wire
        self._topic = config.topic.encode()
        self._past: deque[bytes] = deque()
        """Payloads of the last batches: at most `buffer_steps`, and at most MAX_PAST_BYTES."""
        self._num_past_bytes = 0
        self._first_past = 0
        """Number of the first of these batches."""
        self._unread = Unread()
        self.num_sent = 0
        self.num_subscriptions = 0
        """Present number of subscriptions."""
        self._context: zmq.Context[Any] = zmq.Context()
        self._replay: zmq.Socket[bytes] | None = None
        self._replies: Replies | None = None
        self._publish: zmq.Socket[bytes] | None
        """None after all subscribers were disconnected, until it is open again."""
        try:
            self._publish = publish = self._open_publish(at_rank(config.endpoint, config.rank))
            self.endpoint = _name_of(publish)
            self.replay_endpoint: str | None = None
            if config.replay_endpoint is not None:
                self._replay = self._open_replay(config.replay_endpoint)
                self.replay_endpoint = _name_of(self._replay)
                self._replies = Replies(self._replay, self._reply_to)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._has_subscriber = Flag()
        self._is_closing = False
        self._thread = Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    @property
    def num_replays(self) -> int:
        """Requests that were answered."""
        return 0 if self._replies is None else self._replies.num_answered

    @property
    def num_bad_requests(self) -> int:
        """Messages that were not requests."""
        return 0 if self._replies is None else self._replies.num_bad

    def wait_for_subscriber(self, timeout_s: float | None = None) -> bool:
        """Wait for the first subscription; return whether there was one."""
        return self._has_subscriber.wait(timeout_s)

    def close(self) -> None:
        """Send queued batches, and close the sockets."""
        if self._is_closing:
            return
        self._is_closing = True
        self._queue.wake()
        self._thread.join()
        self._queue.close()

    def _open_publish(self, endpoint: str) -> zmq.Socket[bytes]:
        config = self._config
        # XPUB is PUB that also receives subscriptions.
        publish: zmq.Socket[bytes] = self._context.socket(zmq.XPUB)
        publish.setsockopt(zmq.XPUB_VERBOSER, 1)
        publish.setsockopt(zmq.SNDHWM, config.high_water_mark)
        publish.setsockopt(zmq.MAXMSGSIZE, MAX_SUBSCRIPTION_BYTES)
        publish.setsockopt(zmq.LINGER, LINGER_MS)
        publish.setsockopt(zmq.TCP_MAXRT, STALLED_MS)
        publish.copy_threshold = 0  # for tracked messages, whatever their size
        try:
            _open(publish, endpoint, "endpoint", connects=config.connects)
        except ConfigError:
            publish.close()
            raise
        return publish

    def _open_replay(self, endpoint: str) -> zmq.Socket[bytes]:
        replay: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        Replies.set_limits(replay)
        replay.setsockopt(zmq.LINGER, LINGER_MS)
        _open(replay, at_rank(endpoint, self._config.rank), "replay_endpoint")
        return replay

    # Its thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._queue.fileno(), zmq.POLLIN)
        for socket in (self._publish, self._replay):
            if socket is not None:
                poller.register(socket, zmq.POLLIN)
        wait_ms: int | None = None
        while True:
            is_closing = self._is_closing  # read first: batches put before it was set are sent
            if not is_closing:
                poller.poll(wait_ms)
            wait_ms = None
            if self._publish is None:
                wait_ms = self._open_again(poller)
            self._heed_subscriptions()
            for batch in self._queue.take():
                self._send(batch)
            if self._unread.update() > MAX_UNREAD_BYTES:
                self._cut_off(poller)
                wait_ms = 0
            if self._replies is not None:
                self._replies.take()
                again_s = self._replies.send()
                if again_s is not None:
                    again_ms = ceil(again_s * 1000)
                    wait_ms = again_ms if wait_ms is None else min(again_ms, wait_ms)
            if is_closing and self._queue.is_empty:
                break
        for socket in (self._publish, self._replay):
            if socket is not None:
                socket.close()
        self._context.term()

    def _cut_off(self, poller: zmq.Poller) -> None:
        """Disconnect all subscribers, dropping their queued messages: ZMQ cannot disconnect a single one."""
        assert self._publish is not None
        poller.unregister(self._publish)
        self._publish.close(linger=0)
        self._publish = None
        self._unread = Unread()
        self.num_subscriptions = 0

    def _open_again(self, poller: zmq.Poller) -> int | None:
        """Let subscribers reconnect; return the milliseconds until the next attempt, None on success."""
        try:
            self._publish = self._open_publish(self.endpoint)
        except ConfigError:  # ZMQ is still closing the old socket
            return OPEN_AGAIN_MS
        poller.register(self._publish, zmq.POLLIN)
        return None

    def _send(self, batch: Batch) -> None:
        payload = self._wire.encode(batch.told, batch.time_s)
        if self._publish is not None:
            frames = self._topic, _number(batch.seq), payload
            if self._unread.add(len(payload)):
                tracker = self._publish.send_multipart(frames, copy=False, track=True)
                assert tracker is not None
                self._unread.mark(tracker)
            else:
                self._publish.send_multipart(frames)
        if not self._past:
            self._first_past = batch.seq
        self._past.append(payload)
        self._num_past_bytes += len(payload)
        while len(self._past) > self._config.buffer_steps or (
            self._num_past_bytes > MAX_PAST_BYTES and len(self._past) > 1
        ):
            self._num_past_bytes -= len(self._past.popleft())
            self._first_past += 1
        self.num_sent += 1

    def _heed_subscriptions(self) -> None:
        if self._publish is None:
            return
        for _ in range(SUBSCRIPTIONS_AT_ONCE):
            try:
                message = self._publish.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            if not message:
                continue
            if message[0]:
                self.num_subscriptions += 1
                if self._config.state_on_subscribe:
                    self._source.announce()
                self._has_subscriber.set()
            else:
                self.num_subscriptions -= 1

    def _reply_to(self, frames: list[bytes]) -> Reply | None:
        """Return the answer to a request; None if the message is not a request."""
        if len(frames) != 2 or len(frames[1]) > 8:
            return None
        if frames[1] == FULL_STATE:
            return Reply(self._state, is_copy=True)
        if frames[1] == SNAPSHOT:
            return Reply(self._state, is_copy=True, adapt=_with_next_number)
        first = int.from_bytes(frames[1], "big")
        if self._config.state_on_replay and first < self._first_past:
            return Reply(self._state, is_copy=True)
        return Reply(lambda: self._batches(first), is_copy=False)

    def _batches(self, seq: int) -> Iterator[Frames]:
        """Yield the batches still available from `seq` up to the present last one, and the end."""
        end = self._first_past + len(self._past)
        while True:
            seq = max(seq, self._first_past)
            if seq >= end:
                break
            yield b"", self._topic, _number(seq), self._past[seq - self._first_past]
            seq += 1
        yield ANSWERED

    def _state(self) -> Iterator[Frames]:
        """Yield the full state, in messages of bounded size, and the end."""
        state = self._source.snapshot()
        if state.seq >= 0:
            for part in _parts(state.told):
                yield b"", self._topic, _number(state.seq), self._wire.encode(part, state.time_s)
        yield ANSWERED


def _parts(told: Sequence[Told]) -> Iterator[Sequence[Told]]:
    """Yield all events in parts of at most RUNS_IN_A_MESSAGE runs, and BLOCKS_IN_A_MESSAGE blocks if possible."""
    start = num_blocks = 0
    for place, one in enumerate(told):
        num_more = 0 if isinstance(one, BlocksCleared) else len(one.keys)
        if place > start and (place - start >= RUNS_IN_A_MESSAGE or num_blocks + num_more > BLOCKS_IN_A_MESSAGE):
            yield told[start:place]
            start, num_blocks = place, 0
        num_blocks += num_more
    yield told[start:]


def _with_next_number(frames: Frames) -> Frames:
    if frames == ANSWERED:
        return frames
    before, topic, number, payload = frames
    return before, topic, _number(int.from_bytes(number, "big") + 1), payload


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


class KvEvents:
    """A reader of the events of one engine, to be passed to the engine when it is built, and its publisher."""

    def __init__(self, config: KvEventsConfig, reader: KvEventReader, publisher: ZmqPublisher) -> None:
        self.config = config
        self.reader = reader
        self.publisher = publisher

    def close(self) -> None:
        """Publish queued batches, and close the sockets."""
        self.publisher.close()


READERS: Mapping[Extent, type[KvEventReader]] = MappingProxyType(
    {"blocks": KvEventReader, "copies": CopiesReader, "reports": ReportsReader}
)


def open_kv_events(config: KvEventsConfig, *, now_s: Callable[[], float] | None = None) -> KvEvents:
    """Open the sockets of `config`. `now_s`: clock for batches, time.time for a server; by default, the engine's.

    Raise ConfigError for an endpoint that cannot be bound.
    """
    queue = BatchQueue()
    reader: KvEventReader
    wire: Wire
    if config.form == "sglang":
        reader, wire = SglangReader(queue, now_s=now_s), SglangWire(rank=config.rank)
    else:
        hashes = KeyMaker(config.algorithm, root_key(config.algorithm, config.seed))
        block_pages = [group.block_pages for group in config.groups]
        reader = READERS[config.extent](
            queue, hashes=hashes, now_s=now_s, clears=config.rank == 0, block_pages=block_pages
        )
        wire = Wire(config.form or "map", rank=config.rank, hash_bytes=config.hash_bytes, groups=config.groups)
    try:
        return KvEvents(config, reader, ZmqPublisher(config, queue, reader, wire))
    except BaseException:
        queue.close()
        raise
