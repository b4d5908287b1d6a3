"""Who may do what: a walk over all routes, with each kind of key; and the page that lists them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvarts.doors.openai.access import Access, Route
from kvarts.doors.openai.running import RunningServer

from builders.http_client import call, raw

PAGE = Path(__file__).parents[3] / "docs" / "security.md"
KEY, ADMIN = {"authorization": "Bearer of-an-owner"}, {"authorization": "Bearer of-an-admin"}
WRONG = [
    {},
    {"authorization": "Bearer other"},
    {"authorization": "of-an-owner"},
    {"authorization": "Basic of-an-owner"},
    {"authorization": "Bearer "},
]


def routes() -> tuple[Route, ...]:
    with RunningServer() as server:
        return server.opened.app.router.routes


ROUTES = routes()
IDS = [f"{route.method} {route.path}" for route in ROUTES]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """A server with a key of an owner, and one of an administrator."""
    with RunningServer(api_key="of-an-owner", admin_key="of-an-admin", pages=2048) as running:
        yield running


def ask(server: RunningServer, route: Route, headers: dict[str, str]) -> int:
    path = route.path if route.prefix is None else f"{route.prefix}x"
    body: Any = {"prompt": "a", "input": "a", "max_tokens": 1} if route.method == "POST" else None
    return call(server.url, path, body, method=route.method, headers=headers).status


@pytest.mark.parametrize("route", ROUTES, ids=IDS)
def test_a_route_asks_for_what_it_is_to_ask_for(server: RunningServer, route: Route) -> None:
    refused = {401, 403}
    for headers in WRONG:
        assert (ask(server, route, headers) == 401) is (route.access is not Access.OPEN)
    assert (ask(server, route, KEY) in refused) is (route.access is Access.ADMIN)
    assert ask(server, route, ADMIN) not in refused


@pytest.mark.parametrize("route", ROUTES, ids=IDS)
def test_without_an_administrator_nobody_changes_the_server(route: Route) -> None:
    with RunningServer(api_key=("of-an-owner", "of-another"), pages=64) as server:
        server.excuse("missing retry")
        for headers in (KEY, ADMIN):
            is_refused = ask(server, route, headers) in {401, 403}
            assert is_refused is (route.access is Access.ADMIN or (route.access is Access.KEY and headers is ADMIN))


def test_only_an_administrators_key_protects_only_what_changes_the_server() -> None:
    with RunningServer(admin_key="of-an-admin") as server:
        server.excuse("missing retry")
        for route in ROUTES:
            assert (ask(server, route, {}) in {401, 403}) is (route.access is Access.ADMIN)


def test_the_page_lists_every_route_with_its_access() -> None:
    table = PAGE.read_text().split("### Who may do what")[1].split("\n\n")[1]
    told = {}
    for row in table.splitlines()[2:]:
        names, access = row.strip("|").split("|")
        for method, path in re.findall(r"`([A-Z]+) (\S+)`", names):
            told[method, path.replace("/ID", "/{response_id}").replace("/NAME", "/{model}")] = access.strip()
    assert told == {(route.method, route.path): route.access.value for route in ROUTES}


@pytest.mark.parametrize("name", ["Host", "Authorization", "Origin", "Content-Type"])
def test_of_two_values_of_a_header_none_is_chosen(server: RunningServer, name: str) -> None:
    """A proxy in front may have checked the other one."""
    head = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n%b: a\r\n%b: b\r\n\r\n" % (name.encode(), name.lower().encode())
    answer = raw(server.base_url.removesuffix("/v1"), head)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"twice" in answer


def test_what_has_no_route_is_not_there_for_anyone(server: RunningServer) -> None:
    for headers in ({}, KEY, ADMIN):
        assert call(server.url, "/nothing", headers=headers).status == 404
        assert call(server.url, "/v1/completions", headers=headers).status == 405
        assert call(server.url, "/v1/completions", method="OPTIONS", headers=headers).status == 405
