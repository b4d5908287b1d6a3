"""The OpenAPI document and its page: every route is listed, references resolve, schemas of bodies are correct."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from kvarts.doors.openai.access import Access
from kvarts.doors.openai.router import POLICY, STYLE
from kvarts.doors.openai.running import RunningServer

from builders.http_client import call

VERBS = {"GET", "POST", "DELETE"}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """A server that requires keys; these routes do not."""
    with RunningServer(api_key="of-an-owner", admin_key="of-an-admin", has_page=True) as running:
        yield running


@pytest.fixture(scope="module")
def document(server: RunningServer) -> dict[str, Any]:
    reply = call(server.url, "/openapi.json")
    assert reply.status == 200
    told: dict[str, Any] = reply.json
    return told


def refs_in(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(ref := value.get("$ref"), str):
            yield ref
        for each in value.values():
            yield from refs_in(each)
    elif isinstance(value, list):
        for each in value:
            yield from refs_in(each)


def test_the_document_has_each_route_with_its_access_and_its_name(
    server: RunningServer, document: dict[str, Any]
) -> None:
    routes = server.opened.app.router.routes
    told = {(verb.upper(), path) for path, verbs in document["paths"].items() for verb in verbs}
    assert told == {(route.method, route.path) for route in routes} and {verb for verb, _ in told} == VERBS
    for route in routes:
        operation = document["paths"][route.path][route.method.lower()]
        assert operation["summary"].endswith("."), route.path
        assert ("security" in operation) is (route.access is not Access.OPEN)
        names = re.findall(r"\{(\w+)\}", route.path)
        assert [each["name"] for each in operation.get("parameters", ()) if each["in"] == "path"] == names
        assert operation["responses"].keys() == {"200", "default"}
    ids = [each["operationId"] for verbs in document["paths"].values() for each in verbs.values()]
    assert len(set(ids)) == len(ids)


def test_references_lead_to_types_and_every_type_is_referred_to(document: dict[str, Any]) -> None:
    refs = set(refs_in(document))
    assert refs == {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}


def test_bodies_have_the_types_that_the_document_tells(server: RunningServer, document: dict[str, Any]) -> None:
    """A value of another type is refused with the name of the field, for each field of a plain type."""
    wrong = {"string": 7, "integer": "many", "number": "many", "boolean": "perhaps"}
    num_tried = 0
    for path, verbs in document["paths"].items():
        if "requestBody" not in verbs.get("post", {}):
            continue
        ref = verbs["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        for name, schema in document["components"]["schemas"][ref.rpartition("/")[2]]["properties"].items():
            kinds = {each.get("type") for each in schema.get("anyOf", [schema])} - {"null"}
            if len(kinds) == 1 and (kind := kinds.pop()) in wrong:
                key = {"authorization": "Bearer of-an-admin"}
                reply = call(server.url, path, {name: wrong[kind]}, headers=key)
                assert reply.status == 400 and name in reply.payload.decode(), (path, name)
                num_tried += 1
    assert num_tried > 60


def test_the_page_has_each_route_and_no_script_and_is_allowed_its_style(
    server: RunningServer, document: dict[str, Any]
) -> None:
    reply = call(server.url, "/docs")
    page = reply.payload.decode()
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert reply.headers["content-security-policy"].encode() == POLICY
    assert f"<style>{STYLE}</style>" in page and "<script" not in page and "style=" not in page
    told = re.findall(r"<h2><code>(\w+) (\S+)</code></h2>", page)
    assert set(told) == {(verb.upper(), path) for path, verbs in document["paths"].items() for verb in verbs}
    bodies = {route.body.__name__ for route in server.opened.app.router.routes if route.body is not None}
    types = re.findall(r"<details id=(\w+)>", page)
    assert sorted({*types, *bodies}) == sorted(document["components"]["schemas"])


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/models/", 404), ("GET", "/v1/models/mock", 200), ("HEAD", "/docs", 200), ("POST", "/docs", 405),
     ("DELETE", "/v1/models/mock", 404), ("GET", "/v1/completions", 405), ("GET", "/docs/", 404)],
)  # fmt: skip
def test_a_path_is_found_with_its_method_alone(server: RunningServer, method: str, path: str, status: int) -> None:
    key = {"authorization": "Bearer of-an-owner"}
    assert call(server.url, path, method=method, headers=key).status == status
