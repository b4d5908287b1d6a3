"""A pytest plugin: the fixture `kvarts_server`, a stand-in for a vLLM server with a cache and a queue that are true."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from kvarts.openai_api.running import RunningServer

__all__ = ["kvarts_server", "pytest_configure"]


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line(
        "markers",
        "kvarts(answers, model, pages, page_size, cost, seed, speedup, fail, ...): how `kvarts_server` is set up; "
        "`kvarts_server` is another name of it, and the nearest of each says what it says",
    )
    config.addinivalue_line("markers", "kvarts_server(...): as `kvarts`")


@pytest.fixture
def kvarts_server(request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    """A mock of a vLLM server on a free port, set up by the marker `kvarts`.

    The test fails if its client left a stream unread, or took a refusal that asks to come again for good, unless it
    excuses that: `kvarts_server.excuse("missing retry")`.
    """
    from kvarts.openai_api.running import RunningServer

    markers = map(request.node.get_closest_marker, ("kvarts_server", "kvarts"))
    server = RunningServer(**{name: value for each in markers if each for name, value in each.kwargs.items()})
    try:
        yield server
        complaints = server.complaints()
    finally:
        server.stop()
    if complaints:
        pytest.fail("the client misbehaved:\n" + "\n".join(complaints), pytrace=False)
