"""The routes of a server, found by method and path, and described by an OpenAPI document and a page of it."""

from __future__ import annotations

import inspect
from base64 import b64encode
from collections.abc import Iterable
from functools import cached_property, partial
from hashlib import sha256
from html import escape
from typing import Any

import msgspec

import kvarts
from kvarts.base.limits import brief
from kvarts.doors.openai.access import Access, Route
from kvarts.doors.openai.errors import TYPES, ApiError
from kvarts.doors.openai.generation import Exchange

__all__ = ["Router"]

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 56rem; padding: 0 1rem; }
code, pre { font: 13px/1.5 ui-monospace, monospace; overflow-wrap: anywhere; white-space: pre-wrap; }
summary { cursor: pointer; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; } table { border-collapse: collapse; }
td { border-top: 1px solid #8884; padding: .2rem .8rem .2rem 0; vertical-align: top; }
@media (prefers-color-scheme: dark) { body { background: #111; color: #ddd; } a { color: #8bf; } }
"""
POLICY = b"default-src 'none'; style-src 'sha256-%b'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'" % (
    b64encode(sha256(STYLE.encode()).digest())
)
ACCESS = {
    Access.OPEN: "open",
    Access.KEY: "any key, if the server asks for keys",
    Access.ADMIN: "the key of an administrator, if the server asks for keys",
}


class _ErrorDetail(msgspec.Struct, rename="lower"):
    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(msgspec.Struct):
    """Every refusal, except those of /v1/messages, which have the form of Anthropic's API."""

    error: _ErrorDetail


class Router:
    """Owner of the table of routes."""

    def __init__(self, routes: Iterable[Route]) -> None:
        open_to_all = partial(Route, method="GET", access=Access.OPEN)
        self.routes = (
            *routes,
            open_to_all(path="/openapi.json", handler=self._tell_document),
            open_to_all(path="/docs", handler=self._show_page),
        )
        self._exact = {(route.method, route.path): route for route in self.routes if route.prefix is None}
        self._prefixes = [(route.method, route.prefix, route) for route in self.routes if route.prefix is not None]

    def find(self, method: str, path: str) -> Route:
        """Return the route of a request. Raise ApiError for an unknown path or method."""
        method = "GET" if method == "HEAD" else method
        found = self._exact.get((method, path))
        if found is not None:
            return found
        for other, prefix, route in self._prefixes:
            if other == method and path.startswith(prefix):
                return route
        if any(path == known for _, known in self._exact):
            raise ApiError(405, f"{method} is not what {brief(path)} answers to")
        raise ApiError(404, f"there is no {brief(path)}")

    @cached_property
    def document(self) -> dict[str, Any]:
        """The OpenAPI 3.1 document: every route, with the schema of its body."""
        kinds = {route.body: None for route in self.routes if route.body is not None} | {ErrorBody: None}
        refs, schemas = msgspec.json.schema_components(list(kinds), ref_template="#/components/schemas/{name}")
        schema_of = dict(zip(kinds, refs, strict=True))
        paths: dict[str, dict[str, Any]] = {}
        for route in self.routes:
            paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schema_of)
        keys = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
        return {
            "openapi": "3.1.0",
            "info": {"title": "kvarts", "version": kvarts.__version__},
            "paths": paths,
            "components": {"schemas": schemas, "securitySchemes": keys},
        }

    @cached_property
    def _encoded(self) -> bytes:
        return msgspec.json.encode(self.document)

    @cached_property
    def _page(self) -> bytes:
        """The document as a page without a script."""
        document = self.document
        schemas = document["components"]["schemas"]
        parts = [
            "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>",
            f"<title>kvarts: HTTP API</title><style>{STYLE}</style><h1>HTTP API of kvarts {kvarts.__version__}</h1>",
            "<p>For tools: <a href=openapi.json>openapi.json</a>.</p>",
        ]
        for route in self.routes:
            operation = document["paths"][route.path][route.method.lower()]
            parts.append(f"<h2><code>{route.method} {escape(route.path)}</code></h2><p>{escape(operation['summary'])} ")
            parts.append(f"Access: {ACCESS[route.access]}.</p>")
            parts += (f"<p>Query: <code>{escape(name)}</code>: {escape(what)}</p>" for name, what in route.query)
            if route.body is not None:
                schema = schemas[route.body.__name__]
                parts.append(f"<details><summary>Body: {escape(schema.get('description', ''))}</summary><table>")
                parts += (
                    f"<tr><td><code>{escape(name)}</code><td><code>{escape(_told(each))}</code>"
                    for name, each in schema["properties"].items()
                )
                parts.append("</table></details>")
        parts.append("<h2>Types</h2>")
        bodies = {route.body.__name__ for route in self.routes if route.body is not None}
        for name in sorted(schemas.keys() - bodies):
            text = msgspec.json.format(msgspec.json.encode(schemas[name]), indent=2).decode()
            parts.append(f"<details id={name}><summary>{escape(name)}</summary><pre>{escape(text)}</pre></details>")
        return "".join(parts).encode()

    async def _tell_document(self, exchange: Exchange) -> None:
        """Describe this API as an OpenAPI document."""
        await exchange.response.whole(self._encoded)

    async def _show_page(self, exchange: Exchange) -> None:
        """Show this page."""
        headers = ((b"content-security-policy", POLICY), (b"x-content-type-options", b"nosniff"))
        await exchange.response.whole(self._page, content_type=b"text/html; charset=utf-8", headers=headers)


def _operation(route: Route, schema_of: dict[type[Any], dict[str, Any]]) -> dict[str, Any]:
    def in_json(kind: type[Any]) -> dict[str, Any]:
        return {"application/json": {"schema": schema_of[kind]}}

    given: list[dict[str, Any]] = [{"name": name, "in": "query", "schema": {"type": "string"}, "description": what}
             for name, what in route.query]  # fmt: skip
    if route.prefix is not None:
        name = route.path.removeprefix(route.prefix).strip("{}")
        given.append({"name": name, "in": "path", "required": True, "schema": {"type": "string"}})
    handler: Any = route.handler
    about = route.about or (inspect.getdoc(handler) or "").partition("\n")[0]
    operation: dict[str, Any] = {
        "operationId": f"{route.method} {route.path}".lower().translate(str.maketrans("/ .{}", "_____")),
        "summary": about,
        "responses": {
            "200": {"description": "The answer; a stream of server-sent events if the body asks for one."
                    if route.generates else "The answer."},
            "default": {"description": f"A refusal: {', '.join(map(str, TYPES))}.", "content": in_json(ErrorBody)},
        },
    }  # fmt: skip
    if given:
        operation["parameters"] = given
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": in_json(route.body)}
    if route.access is not Access.OPEN:
        operation["security"] = [{"bearer": []}, {"header": []}, {}]
    return operation


def _told(schema: dict[str, Any]) -> str:
    """Return a schema in a line."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        return " or ".join(map(_told, schema["anyOf"]))
    if "enum" in schema:
        return " or ".join(map(repr, schema["enum"]))
    if schema.get("type") == "array":
        return f"list of {_told(schema.get('items') or {})}"
    if schema.get("type") == "object" and schema.get("additionalProperties"):
        return "object"
    return str(schema.get("type", "any value"))
