"""A pytest plugin: stand-ins for vLLM servers with a real cache and queue, `kvarts_server` and `kvarts_servers`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from kvarts.base.errors import KvartsError

if TYPE_CHECKING:
    from kvarts.doors.openai.running import RunningServer

__all__ = ["Servers", "kvarts_server", "kvarts_servers", "pytest_configure"]


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers, and let asserts of contracts explain themselves."""
    pytest.register_assert_rewrite("kvarts.testing")
    config.addinivalue_line(
        "markers",
        "kvarts(model, device, pages, cost, speedup, answers, fail, seed, any_model, kv_events, ...): options of "
        "`kvarts_server` and `kvarts_servers`, those of kvarts.mock; an option of the nearest mark wins",
    )
    config.addinivalue_line("markers", "kvarts_server(...): as `kvarts`")


class Servers:
    """Starts mocks for one test. `options`: those of its marks."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._running: list[RunningServer] = []

    def __call__(self, num_servers: int, **options: Any) -> list[RunningServer]:
        """Start `num_servers` servers, each on its own port, with `options` over those of the marks.

        Text differs between servers: the seed of each is that of the one before, plus 1.
        """
        seed = {**self._options, **options}.get("seed", 0)
        return [self.start(**options, seed=seed + number) for number in range(num_servers)]

    def fleet(self, num_workers: int, *, router: Any = "round-robin", **options: Any) -> RunningServer:
        """Start a server whose `router` sends requests to `num_workers` workers, at the URLs `workers`."""
        return self.start(**options, replicas=num_workers, router=router)

    def start(self, **options: Any) -> RunningServer:
        """Start one server."""
        from kvarts.doors.openai.running import RunningServer

        try:
            server = RunningServer(**{"any_model": True, **self._options, **options})
        except (KvartsError, TypeError) as error:
            pytest.fail(str(error), pytrace=False)
        self._running.append(server)
        return server

    def complaints(self) -> list[str]:
        """Return the mistakes of clients: a refusal may be repeated at any of the servers."""
        found = []
        for number, server in enumerate(self._running):
            where = f"server {number}: " if len(self._running) > 1 else ""
            found += [f"{where}{complaint}" for complaint in server.complaints(self._running)]
        return found

    def stop(self) -> None:
        """Stop all servers."""
        for server in self._running:
            server.stop()


@pytest.fixture
def kvarts_servers(request: pytest.FixtureRequest) -> Iterator[Servers]:
    """Start mocks of vLLM servers: `kvarts_servers(3)`, or `kvarts_servers.fleet(3, router="prefix")`.

    The test fails if a client left a stream unread, or did not retry after a refusal that asks for it, at that server
    or at another one, unless the test excuses that: `server.excuse("missing retry")`.
    """
    options: dict[str, Any] = {}
    for mark in map(request.node.get_closest_marker, ("kvarts_server", "kvarts")):
        if mark is not None and mark.args:
            pytest.fail(f"@pytest.mark.{mark.name} takes options by name only, got {mark.args[0]!r}", pytrace=False)
        options |= {} if mark is None else mark.kwargs
    servers = Servers(options)
    try:
        yield servers
        complaints = servers.complaints()
    finally:
        servers.stop()
    if complaints:
        pytest.fail("the client misbehaved:\n" + "\n".join(complaints), pytrace=False)


@pytest.fixture
def kvarts_server(kvarts_servers: Servers) -> RunningServer:
    """A mock of a vLLM server on a free port, with the options of the mark `kvarts`; see `kvarts_servers`."""
    return kvarts_servers.start()
