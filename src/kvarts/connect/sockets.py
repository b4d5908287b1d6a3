"""The sockets of a watch: what is published, and requests for what was."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvarts.connect.decoding import MAX_BATCH_BYTES
from kvarts.connect.follower import Numbered
from kvarts.errors import ConfigError
from kvarts.reach import check_endpoint

__all__ = ["Stream"]

END = b"\xff" * 8
MAX_AT_ONCE = 1000
MAX_WAITING = 4
"""Messages of a socket that wait here; others wait at the publisher. They may be MAX_BATCH_BYTES long each."""
CUT_S = 0.5
MAX_ANSWER_BYTES = 64 << 20
"""Of all batches that answer one request."""
MAX_ANSWER_S = 60.0
FRAME_BYTES = 100
"""Of a message, beside its frames."""


class Stream:
    """Owner of the sockets: a SUB to `endpoint`, bound if `binds`, and a DEALER to `replay_endpoint`, if there is one.

    `num_strange`: messages that are no batch, such as those with another number of frames. Raises ConfigError for an
    endpoint that cannot be.
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
        """Requests for past batches without an answer, or without its end."""
        self.num_too_long = 0
        """Answers to these that were longer than is read."""
        self.num_cut = 0
        """Connections that ended with a message too long."""
        self._endpoint, self._binds = endpoint, binds
        self._down_s: float | None = None
        """When the connection ended that ZMQ has not tried to make again, as it does unless a message was too long."""
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
                # Tried here, so that what is no endpoint is an error at once.
                _to(self._open(zmq.DEALER), replay_endpoint, "replay")
        except BaseException:
            self.close()
            raise
        self._poller = zmq.Poller()
        self._poller.register(self._live, zmq.POLLIN)
        self._poller.register(monitor, zmq.POLLIN)

    def wait_for_connection(self, timeout_s: float) -> bool:
        """Wait until something is at the other end; return whether it is."""
        assert self._monitor is not None
        if self._monitor.poll(int(timeout_s * 1000)):
            self.take_connections()
        return self._has_connected

    def wait(self, timeout_s: float) -> None:
        """Wait until there may be something to take."""
        self._poller.poll(max(0, int(timeout_s * 1000)))

    def take_connections(self) -> int:
        """Return how often the other end has come back since last asked; the first time does not count."""
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
        """Return batches that have come, at most MAX_AT_ONCE."""
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
        """Return past batches from `start` on, or full state for -2; None without an answer that has an end.

        With or without a topic's frame, as newer and older engines answer.
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
            frames = asking.recv_multipart()[1:]  # without the empty one
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
        # What does not fit here waits at the publisher. A connection with a longer message ends.
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
