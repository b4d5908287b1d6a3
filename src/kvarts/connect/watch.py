"""Watches an engine: receives batches from its stream and reads its metrics until stopped."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from kvarts.connect.follower import Follower
from kvarts.connect.journal import WatchedTimeline
from kvarts.connect.metrics import EngineSample
from kvarts.connect.sockets import EngineStream
from kvarts.connect.watched import Watched

__all__ = ["Looks", "Watch"]

WAIT_S = 0.2


class Looks(Protocol):
    """Reader of metrics."""

    last: EngineSample | None
    num_seen: int


class Watch:
    """One watch of `stream`. `looks`: reader of its metrics, if any; `timeline` gets one row per sample.

    `on_status` is called every `every_s` seconds, `on_look` several times a second.
    """

    def __init__(
        self,
        stream: EngineStream,
        watched: Watched,
        *,
        looks: Looks | None = None,
        open_timeline: Callable[[int | None, int | None], WatchedTimeline] | None = None,
        on_status: Callable[[Watch], object] | None = None,
        every_s: float = 1.0,
        on_look: Callable[[Watch], object] | None = None,
    ) -> None:
        self.watched = watched
        self.follower = Follower(watched, stream)
        self.looks = looks
        self.timeline: WatchedTimeline | None = None
        self._stream = stream
        self._open_timeline = open_timeline
        self._on_status = on_status
        self._every_s = every_s
        self._on_look = on_look
        self._num_seen = 0
        self._num_cut = 0
        self._start_s = 0.0

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start of the watch."""
        return time.monotonic() - self._start_s

    def run(self, should_stop: Callable[[], bool], *, duration_s: float | None = None) -> None:
        """Watch until `should_stop`, or for `duration_s`."""
        self._start_s = time.monotonic()
        deadline = float("inf") if duration_s is None else self._start_s + duration_s
        next_status = self._start_s + self._every_s
        # Connect before requesting the state: batches published between the two would be missed otherwise.
        while not self._stream.wait_for_connection(min(WAIT_S, max(0.0, deadline - time.monotonic()))):
            if should_stop() or time.monotonic() >= deadline:
                return
        self.follower.start()
        while not should_stop() and time.monotonic() < deadline:
            self._stream.wait(min(WAIT_S, deadline - time.monotonic()))
            self._take()
            if self._on_look is not None:
                self._on_look(self)
            now = time.monotonic()
            if now >= next_status:
                next_status = now + self._every_s
                if self._on_status is not None:
                    self._on_status(self)
        self._take()

    def _take(self) -> None:
        num_connections = self._stream.take_connections()
        while self._num_cut < self._stream.num_cut:
            self._num_cut += 1
            self.watched.refuse()
        if num_connections:
            self.follower.reconnected()
        for seq, payload in self._stream.take():
            self.follower.receive(seq, payload)
        if self.looks is not None and self.looks.num_seen > self._num_seen:
            self._num_seen = self.looks.num_seen
            if self.looks.last is not None:
                self._look(self.looks.last)

    def _look(self, sample: EngineSample) -> None:
        claims = self.watched.claims
        if claims.total_blocks is None:
            claims.total_blocks = sample.num_blocks
        if self._open_timeline is None or claims.total_blocks is None:
            return
        if self.timeline is None:
            if claims.block_size is None:
                return  # events contain it
            self.timeline = self._open_timeline(claims.total_blocks, claims.block_size)
        self.timeline.add(self.elapsed_s, sample)
