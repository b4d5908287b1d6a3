"""The sockets of a watch: published batches in order, and requests for past ones.

A Follower does no input or output: batches are passed in, and its requests are answered by a function.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any, Protocol

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from kvarts.base.errors import ConfigError
from kvarts.doors.exposure import check_endpoint
from kvarts.doors.watch.decoding import MAX_BATCH_BYTES

__all__ = ["FULL_STATE", "EngineStream", "Followed", "Follower", "Follows", "Numbered"]

FULL_STATE = -2
"""Number that requests the full state. An engine without support for it returns no batches."""

Numbered = tuple[int, bytes]
"""The number of a batch, and its payload."""


Ask = Callable[[int], Sequence[Numbered] | None]
"""Returns the batches available from a number on, or the full state for FULL_STATE; None without an answer."""


class Follows(Protocol):
    """Receives batches in order."""

    def begin(self, *, is_complete: bool) -> None:
        """Forget everything. If `is_complete`, nothing is stored; otherwise the contents are unknown."""

    def apply(self, seq: int, payload: bytes) -> None:
        """Process the next batch."""

    def lose(self, first: int, last: int) -> None:
        """Record that these batches are not available."""


class Followed(msgspec.Struct):
    """Counts of missing, repeated and replayed batches so far."""

    num_gaps: int = 0
    """Number of gaps in the sequence of batches."""
    num_replayed: int = 0
    """Batches received late, on request."""
    num_lost: int = 0
    num_duplicates: int = 0
    num_restarts: int = 0
    num_states: int = 0
    """Number of full states received."""


class Follower:
    """Owner of the number of the last batch passed to `follows`. `ask`: None without a replay endpoint."""

    def __init__(self, follows: Follows, ask: Ask | None = None) -> None:
        self._follows = follows
        self._past = ask
        self.counts = Followed()
        self.last: int | None = None
        """Number of the last batch applied; None before the first."""
        self._last_live: int | None = None
        self._digest: bytes | None = None
        """Digest of the last batch, by which the same engine is recognized; None after full state."""

    def start(self) -> None:
        """Find out the contents before the first batch arrives."""
        self.last = self._last_live = self._digest = None
        if self._take_state():
            return
        past = self._ask(0)
        self._follows.begin(is_complete=bool(past) and past[0][0] == 0)
        for seq, payload in past:
            self._apply(seq, payload)
            self.counts.num_replayed += 1

    def reconnected(self) -> None:
        """Find out whether the engine is still the same, and request missed batches."""
        past = None if self.last is None or self._past is None else self._past(self.last)
        if past is None:
            return  # the next batch will show whether it is another
        # The same engine has at least the last batch.
        if not past or self._is_another(past):
            self.counts.num_restarts += 1
            self.start()
        elif self._digest is not None and past[0][0] == self.last:
            self._catch_up(past)
        else:
            self.start()  # it may be another: the last batch is not available for comparison

    def receive(self, seq: int, payload: bytes) -> None:
        """Process a batch as it arrived."""
        if self._last_live is not None and seq <= self._last_live:
            # Batch numbers only increase, so another engine has started.
            self._restart(seq, payload)
            return
        if self.last is None and seq:
            self.start()  # batches before this one were missed since
        if self.last is None:
            self._follows.begin(is_complete=seq == 0)
        elif seq > self.last + 1 and not self._mend(seq):
            self._restart(seq, payload)
            return
        self._last_live = seq
        if self.last is not None and seq <= self.last:
            self.counts.num_duplicates += 1
            return
        self._apply(seq, payload)

    # Inside -----------------------------------------------------------------------------------------------

    def _restart(self, seq: int, payload: bytes) -> None:
        self.counts.num_restarts += 1
        if seq == 0:
            self.last = None
            self._follows.begin(is_complete=True)
        else:
            self.start()
        self._last_live = seq
        if self.last is None:
            if seq:
                self._follows.begin(is_complete=False)
            self._apply(seq, payload)
        elif seq > self.last:
            self._apply(seq, payload)

    def _mend(self, seq: int) -> bool:
        """Request the batches missing before batch `seq`. Return False if another engine answers."""
        assert self.last is not None
        self.counts.num_gaps += 1
        past = self._ask(self.last)
        if self._is_another(past):
            return False
        if next((number for number, _ in past if number > self.last), seq) > self.last + 1:
            # Some are no longer available: the full state is better than unknown contents.
            first = self.last + 1
            if self._take_state():
                self._lose(first, min(seq, self.last) - 1)
                return True
        self._catch_up(past)
        return True

    def _take_state(self) -> bool:
        """Replace everything with the full state; return False if the engine does not provide it."""
        state = self._ask(FULL_STATE)
        if not state:
            return False
        self.counts.num_states += 1
        self._follows.begin(is_complete=True)
        for seq, payload in state:
            self._follows.apply(seq, payload)
            self.last = seq
        self._digest = None
        return True

    def _is_another(self, past: Sequence[Numbered]) -> bool:
        """Return whether the answer has another payload under the number of the last batch."""
        if not past or past[0][0] != self.last or self._digest is None:
            return False
        return _digest(past[0][1]) != self._digest

    def _catch_up(self, past: Sequence[Numbered]) -> None:
        for seq, payload in past:
            if self.last is not None and seq > self.last:
                self._apply(seq, payload)
                self.counts.num_replayed += 1

    def _apply(self, seq: int, payload: bytes) -> None:
        if self.last is not None and seq > self.last + 1:
            self._lose(self.last + 1, seq - 1)
            self._follows.begin(is_complete=False)
        self._follows.apply(seq, payload)
        self.last = seq
        self._digest = _digest(payload)

    def _lose(self, first: int, last: int) -> None:
        self.counts.num_lost += last - first + 1
        self._follows.lose(first, last)

    def _ask(self, start: int) -> Sequence[Numbered]:
        answer = None if self._past is None else self._past(start)
        return answer or ()


def _digest(payload: bytes) -> bytes:
    return blake2b(payload, digest_size=16).digest()


END = b"\xff" * 8
MAX_AT_ONCE = 1000
MAX_WAITING = 4
"""Messages queued per socket; others wait at the publisher. Each may have MAX_BATCH_BYTES."""
CUT_S = 0.5
MAX_ANSWER_BYTES = 64 << 20
"""Size limit of all batches that answer one request."""
MAX_ANSWER_S = 60.0
FRAME_BYTES = 100
"""Overhead counted per message, in addition to its frames."""


class EngineStream:
    """Owner of the sockets: a SUB to `endpoint`, bound if `binds`, and a DEALER to `replay_endpoint`, if given.

    `num_strange`: messages that are not batches, such as those with another number of frames. Raises ConfigError for an
    invalid endpoint.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        binds: bool = False,
        answer_s: float = 5.0,
    ) -> None:
        check_endpoint(endpoint, field="endpoint", binds=binds)
        if replay_endpoint is not None:
            check_endpoint(replay_endpoint, field="replay", binds=False)
        try:
            prefix = topic.encode()
        except UnicodeEncodeError:
            raise ConfigError("is not text in UTF-8", field="topic") from None
        self._replay_endpoint = replay_endpoint
        self._answer_s = answer_s
        self.num_strange = 0
        self.num_unanswered = 0
        """Requests for past batches whose answer did not arrive or was incomplete."""
        self.num_too_long = 0
        """Answers to such requests that exceeded the limits."""
        self.num_cut = 0
        """Connections that were cut by a message that was too long."""
        self._endpoint, self._binds = endpoint, binds
        self._down_s: float | None = None
        """Time when the connection ended, until ZMQ retries it. After a message that was too long it does not retry."""
        self._context: zmq.Context[Any] = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._has_connected = False
        self._monitor: zmq.Socket[bytes] | None = None
        try:
            self._live: zmq.Socket[bytes] = self._open(zmq.SUB)
            self._live.setsockopt(zmq.SUBSCRIBE, prefix)
            events = (
                zmq.EVENT_HANDSHAKE_SUCCEEDED
                | zmq.EVENT_DISCONNECTED
                | zmq.EVENT_CONNECT_DELAYED
                | zmq.EVENT_CONNECT_RETRIED
            )
            self._monitor = monitor = self._live.get_monitor_socket(events)
            _to(self._live, endpoint, "endpoint", binds=binds)
            if replay_endpoint is not None:
                # Connect once now, so that an invalid endpoint raises at once.
                _to(self._open(zmq.DEALER), replay_endpoint, "replay")
        except BaseException:
            self.close()
            raise
        self._poller = zmq.Poller()
        self._poller.register(self._live, zmq.POLLIN)
        self._poller.register(monitor, zmq.POLLIN)

    def wait_for_connection(self, timeout_s: float) -> bool:
        """Wait for the connection; return whether it is established."""
        assert self._monitor is not None
        if self._monitor.poll(int(timeout_s * 1000)):
            self.take_connections()
        return self._has_connected

    def wait(self, timeout_s: float) -> None:
        """Wait until there may be a message."""
        self._poller.poll(max(0, int(timeout_s * 1000)))

    def take_connections(self) -> int:
        """Return the number of reconnections since the last call; the first connection does not count."""
        assert self._monitor is not None
        num = 0
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())["event"]
            self._down_s = time.monotonic() if event == zmq.EVENT_DISCONNECTED else None
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                num += self._has_connected
                self._has_connected = True
        if self._down_s is not None and not self._binds and time.monotonic() - self._down_s > CUT_S:
            self.num_cut += 1
            self._down_s = None
            with suppress(zmq.ZMQError):
                self._live.disconnect(self._endpoint)
            _to(self._live, self._endpoint, "endpoint")
        return num

    def take(self) -> Iterator[Numbered]:
        """Return the batches that have arrived, at most MAX_AT_ONCE."""
        for _ in range(MAX_AT_ONCE):
            try:
                frames = self._live.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) == 3 and len(frames[1]) == 8:
                yield int.from_bytes(frames[1], "big"), frames[2]
            else:
                self.num_strange += 1

    def ask(self, start: int) -> list[Numbered] | None:
        """Return past batches from `start` on, or full state for -2; None without a complete answer.

        Messages may have a frame for the topic, as from newer engines, or lack it, as from older ones.
        """
        if self._replay_endpoint is None:
            return None
        asking = self._open(zmq.DEALER)
        try:
            asking.connect(self._replay_endpoint)
            asking.send_multipart((b"", start.to_bytes(8, "big", signed=start < 0)))
            return self._answer(asking)
        finally:
            self._sockets.remove(asking)
            asking.close(linger=0)

    def _answer(self, asking: zmq.Socket[bytes]) -> list[Numbered] | None:
        found: list[Numbered] = []
        num_bytes = 0
        begin = time.monotonic()
        deadline = begin + self._answer_s
        while asking.poll(max(0, int((deadline - time.monotonic()) * 1000))):
            frames = asking.recv_multipart()[1:]  # without the empty frame
            deadline = time.monotonic() + self._answer_s
            if len(frames) not in (2, 3) or len(frames[-2]) != 8:
                self.num_strange += 1
            elif frames[-2] == END:
                return found
            else:
                found.append((int.from_bytes(frames[-2], "big"), frames[-1]))
            num_bytes += sum(map(len, frames)) + FRAME_BYTES
            if num_bytes > MAX_ANSWER_BYTES or time.monotonic() - begin > MAX_ANSWER_S:
                self.num_too_long += 1
                return None
        self.num_unanswered += 1
        return None

    def close(self) -> None:
        """Close the sockets."""
        if self._monitor is not None:
            self._live.disable_monitor()
            self._monitor.close(linger=0)
        for socket in self._sockets:
            socket.close(linger=0)
        self._sockets.clear()
        self._context.term()

    def _open(self, kind: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        # Further messages wait at the publisher. A longer message ends the connection.
        socket.setsockopt(zmq.RCVHWM, MAX_WAITING)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_BATCH_BYTES)
        self._sockets.append(socket)
        return socket


def _to(socket: zmq.Socket[bytes], endpoint: str, field: str, *, binds: bool = False) -> None:
    try:
        if binds:
            socket.bind(endpoint)
        else:
            socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(
            f"is no endpoint that can be used: {endpoint!r} ({error.strerror})",
            field=field,
            hint="An endpoint is tcp://HOST:PORT or ipc://PATH.",
        ) from None
