"""The sockets of a watch: published batches, and requests for past ones."""

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

__all__ = ["EngineStream"]

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
