"""Servers of these tests: mocks, on the loopback address, with every event checked against a second bookkeeping."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvarts.doors.openai.running import RunningServer

Start = Callable[..., RunningServer]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts servers. At the end, every page of each is accounted for, and none is in use."""
    running: list[RunningServer] = []

    def begin(**settings: Any) -> RunningServer:
        settings.setdefault("audit", True)
        running.append(RunningServer(**settings))
        return running[-1]

    yield begin
    for server in running:
        server.settle()
        if server.opened.served.is_alive:
            server.assert_conserved()
        server.stop()


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """One server for all tests that only ask."""
    with RunningServer(audit=True, pages=2048, seed=7) as running:
        yield running
        running.settle()
        running.assert_conserved()
