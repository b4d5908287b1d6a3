"""A client of a publisher of KV events: a SUB socket and replay requests, in a few lines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import zmq

__all__ = ["Client", "open_client"]

END = b"\xff" * 8
TIMEOUT_MS = 10_000


class Client:
    def __init__(self, context: zmq.Context[Any], endpoint: str, replay_endpoint: str | None, topic: str) -> None:
        self.context, self.replay_endpoint = context, replay_endpoint
        self.asked: list[zmq.Socket[bytes]] = []
        self.subscriber: zmq.Socket[bytes] = context.socket(zmq.SUB)
        self.subscriber.setsockopt(zmq.RCVHWM, 0)
        self.subscriber.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self.subscriber.connect(endpoint)

    def receive(self) -> tuple[bytes, int, bytes]:
        """The next batch: topic, number, payload."""
        assert self.subscriber.poll(TIMEOUT_MS), "nothing comes"
        topic, number, payload = self.subscriber.recv_multipart()
        assert len(number) == 8
        return topic, int.from_bytes(number, "big"), payload

    def ask(self, *frames: bytes) -> zmq.Socket[bytes]:
        """A socket that has sent a request; it is closed with the client."""
        assert self.replay_endpoint is not None
        asking: zmq.Socket[bytes] = self.context.socket(zmq.DEALER)
        asking.setsockopt(zmq.RCVHWM, 0)
        asking.connect(self.replay_endpoint)
        asking.send_multipart(frames)
        self.asked.append(asking)
        return asking

    def replay(self, start: int) -> list[tuple[bytes, int, bytes]]:
        """What is answered to a request for batches from `start` on, without the end."""
        return self.answers(start.to_bytes(8, "big", signed=start < 0))

    def answers(self, request: bytes) -> list[tuple[bytes, int, bytes]]:
        """What is answered to a request, without the end."""
        asking = self.ask(b"", request)
        found: list[tuple[bytes, int, bytes]] = []
        while True:
            assert asking.poll(TIMEOUT_MS), "the replay does not end"
            empty, topic, number, payload = asking.recv_multipart()
            assert empty == b""
            if number == END:
                assert (topic, payload) == (b"", b"")
                return found
            found.append((topic, int.from_bytes(number, "big"), payload))


@contextmanager
def open_client(endpoint: str, replay_endpoint: str | None = None, *, topic: str = "") -> Iterator[Client]:
    context: zmq.Context[Any] = zmq.Context()
    client = Client(context, endpoint, replay_endpoint, topic)
    try:
        yield client
    finally:
        for socket in (client.subscriber, *client.asked):
            socket.close(linger=0)
        context.term()
