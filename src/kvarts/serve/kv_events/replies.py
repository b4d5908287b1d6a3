"""Answers over a ROUTER socket to clients that may read slowly or not at all.

ZMQ would keep a whole answer in memory until it is read. Here answers are produced as they are read: at most MARK
messages per client wait in ZMQ, and the position in the answer is kept here.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator

import zmq

__all__ = ["Frames", "Replies", "Reply"]

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
