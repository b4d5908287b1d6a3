"""A pytest plugin: the fixture `kvarts_server`, a stand-in for a vLLM server with a real cache and queue."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from kvarts.doors.openai.running import RunningServer

__all__ = ["kvarts_server", "pytest_configure"]


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers."""
    config.addinivalue_line(
        "markers",
        "kvarts(answers, model, pages, page_size, cost, seed, speedup, fail, ...): how `kvarts_server` is set up; "
        "`kvarts_server` is another name of it, and the nearest of each says what it says",
    )
    config.addinivalue_line("markers", "kvarts_server(...): as `kvarts`")


@pytest.fixture
def kvarts_server(request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    """A mock of a vLLM server on a free port, configured by the marker `kvarts`.

    The test fails if its client left a stream unread, or did not retry after a refusal that asks for it, unless the
    test excuses that: `kvarts_server.excuse("missing retry")`.
    """
    from kvarts.doors.openai.running import RunningServer

    markers = map(request.node.get_closest_marker, ("kvarts_server", "kvarts"))
    server = RunningServer(**{name: value for each in markers if each for name, value in each.kwargs.items()})
    try:
        yield server
        complaints = server.complaints()
    finally:
        server.stop()
    if complaints:
        pytest.fail("the client misbehaved:\n" + "\n".join(complaints), pytrace=False)
