"""The ASGI application: what answers which path, keys, and what becomes of errors."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Any
from uuid import uuid4

import msgspec

from kvarts.errors import ConfigError
from kvarts.openai_api.bodies import model_in
from kvarts.openai_api.errors import ApiError, api_error
from kvarts.openai_api.failures import NO_FAILURE, Cut, Failure, FailureScript, parse_failure
from kvarts.openai_api.generation import Exchange, Generating
from kvarts.openai_api.http import DIRECT, ClientGone, HttpRequest, HttpResponse, Receive, Scope, Send
from kvarts.openai_api.models import Models
from kvarts.openai_api.responses import Responses
from kvarts.openai_api.routes import Routes
from kvarts.openai_api.served import Health, Limits
from kvarts.owners.keys import Keys

__all__ = ["ABORT", "OpenAIApp", "Watcher"]

ABORT = "kvarts.abort"
"""The extension of a scope that closes the connection at once."""

Handler = Callable[[Exchange], Awaitable[None]]
LOG = logging.getLogger("kvarts.openai_api")
MAX_ID_CHARS = 256


class Watcher:
    """Is told of requests that generate. Does nothing itself."""

    def began(self, number: int, path: str, payload: bytes, headers: dict[bytes, bytes]) -> None:
        """Note a request, by its number."""

    def ended(self, number: int, status: int, *, is_whole: bool) -> None:
        """Note that it was answered with `status`: to the end, as far as the server wanted, or only until its client
        went.
        """


class OpenAIApp:
    """An ASGI application for what is served. `keys`: one of them is asked for below /v1; None: nothing is."""

    def __init__(
        self,
        models: Models,
        routes: Routes,
        *,
        script: FailureScript,
        keys: Keys | None = None,
        watcher: Watcher | None = None,
    ) -> None:
        self._models = models
        self._routes = routes
        self._keys = keys
        self._watcher = Watcher() if watcher is None else watcher
        self._num_requests = 0
        self.script = FailureScript()
        self.set_script(script)
        generating = Generating(models)
        responses = Responses(models)
        self._generating: dict[tuple[str, str], Handler] = {
            ("POST", "/v1/completions"): generating.completion,
            ("POST", "/v1/chat/completions"): generating.chat,
            ("POST", "/v1/responses"): responses.create,
        }
        self._others: dict[tuple[str, str], Handler] = {
            **routes.table(),
            ("GET", "/admin/config"): self._tell_config,
            ("POST", "/admin/config"): self._set_config,
        }
        self._prefixes: dict[tuple[str, str], Handler] = {
            ("GET", "/v1/responses/"): responses.find,
            ("DELETE", "/v1/responses/"): responses.delete,
            ("GET", "/v1/models/"): routes.model,
        }
        self._paths = {path for _, path in (*self._generating, *self._others)}

    def set_script(self, script: FailureScript) -> None:
        """Let things go wrong as `script` says, from now on. Raise ConfigError for transfers that there are not."""
        self._models.fail_transfers(script.transfer_fails if script.has_transfers else None)
        self.script = script

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await _live(receive, send)
            return
        if scope["type"] != "http":
            raise RuntimeError(f"{scope['type']} is not served")
        started_s = monotonic()
        request = HttpRequest(scope, receive)
        direct = (scope.get("extensions") or {}).get(DIRECT)
        response = HttpResponse(send, None if direct is None else direct["call"])
        request_id = (request.header("x-request-id") or uuid4().hex)[:MAX_ID_CHARS]
        response.extra_headers.append((b"x-request-id", request_id.encode("latin-1", "replace")))
        try:
            await self._handle(request, response, request_id, started_s)
        except (ClientGone, Cut):
            self._cut(scope, response)
        except Exception as error:
            if response.has_begun:
                self._cut(scope, response)
            else:
                told = api_error(error)
                if told.status == 500 and self._models.first.host.loop.is_alive:
                    LOG.exception("an unexpected error")
                    told = ApiError(500, f"{type(error).__name__}: {error}")
                await response.error(told, without_body=request.method == "HEAD")

    async def _handle(self, request: HttpRequest, response: HttpResponse, request_id: str, started_s: float) -> None:
        method = "GET" if request.method == "HEAD" else request.method
        handler = self._generating.get((method, request.path))
        is_generating = handler is not None
        if handler is None:
            handler = self._others.get((method, request.path)) or self._prefixed(method, request.path)
        if handler is None:
            if request.path in self._paths:
                raise ApiError(405, f"{method} is not what {request.path} answers to")
            raise ApiError(404, f"there is no {request.path}")
        owner = self._owner_of(request)
        limits = self._models.first.limits
        payload = await request.body(limits.max_body_bytes, timeout_s=limits.body_timeout_s)
        exchange = Exchange(
            request=request,
            response=response,
            payload=payload,
            request_id=request_id,
            started_s=started_s,
            failure=NO_FAILURE,
            owner=owner,
        )
        if not is_generating:
            await handler(exchange)
            return
        self._num_requests += 1
        number = self._num_requests
        self._watcher.began(number, request.path, payload, request.headers)
        try:
            exchange.failure = self._failure_of(request)
            if exchange.failure.kills_engine:
                self._models.of(model_in(payload)).kill()
            exchange.failure.before_request()
            await handler(exchange)
        except ClientGone:
            self._watcher.ended(number, response.status, is_whole=False)
            raise
        except Cut:
            self._watcher.ended(number, response.status, is_whole=True)
            raise
        except Exception as error:
            self._watcher.ended(number, response.status or api_error(error).status, is_whole=True)
            raise
        self._watcher.ended(number, response.status, is_whole=response.has_ended)

    def _prefixed(self, method: str, path: str) -> Handler | None:
        return next(
            (handler for (of, prefix), handler in self._prefixes.items() if of == method and path.startswith(prefix)),
            None,
        )

    def _owner_of(self, request: HttpRequest) -> str:
        """Return the owner of the key that a request came with.

        Raise ApiError for one below /v1, or of an administrator, without a key that is known.
        """
        if self._keys is None or not request.path.startswith(("/v1/", "/admin/")):
            return ""
        scheme, _, key = (request.header("authorization") or "").partition(" ")
        found = self._keys.find(key.strip())
        if found is None or scheme.lower() != "bearer":
            raise ApiError(401, "an API key is needed: Authorization: Bearer KEY")
        return found.name

    def _failure_of(self, request: HttpRequest) -> Failure:
        """Return what goes wrong: what the request asks for itself, or what the script says."""
        asked = request.header("x-kvarts-fail")
        status = request.header("x-return-error")
        failure = self.script.next()
        try:
            if asked is not None:
                return parse_failure(asked)
            if status is not None:
                return parse_failure(status)
        except ConfigError as error:
            raise ApiError(400, str(error)) from error
        return failure

    async def _tell_config(self, exchange: Exchange) -> None:
        await exchange.response.whole(
            msgspec.json.encode(
                {
                    "fail": self.script.text,
                    "num_requests": self.script.num_requests,
                    "max_queued": self._models.first.limits.max_queued,
                    "retry_after_s": self._models.first.limits.retry_after_s,
                    "health": {served.names[0]: served.told_health for served in self._models},
                    "speedup": self._routes.speedup,
                }
            )
        )

    async def _set_config(self, exchange: Exchange) -> None:
        """Change what can be changed while the server runs: failures and the length of the queue."""
        try:
            asked: dict[str, Any] = msgspec.json.decode(exchange.payload or b"{}", type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise ApiError(400, f"the body is no JSON object: {error}") from error
        unknown = sorted(set(asked) - {"fail", "health", "seed", *_LIMITS})
        if unknown:
            raise ApiError(400, f"{unknown[0]!r} cannot be set", param=unknown[0])
        try:
            limits = msgspec.convert(
                {**msgspec.to_builtins(self._models.first.limits), **{k: v for k, v in asked.items() if k in _LIMITS}},
                Limits,
            )
            health = msgspec.convert(asked.get("health", {}), dict[str, Health])
            script = FailureScript(str(asked["fail"]), seed=int(asked.get("seed", 0))) if "fail" in asked else None
        except (msgspec.ValidationError, ConfigError, ValueError, TypeError) as error:
            raise ApiError(400, str(error)) from error
        if script is not None:
            self.set_script(script)
        changes = [(self._models.by_own_name(name), state) for name, state in health.items()]
        for served in self._models:
            served.limits = msgspec.structs.replace(
                served.limits, max_queued=limits.max_queued, retry_after_s=limits.retry_after_s
            )
        for served, state in changes:
            await served.set_health(state)
        await self._tell_config(exchange)

    def _cut(self, scope: Scope, response: HttpResponse) -> None:
        """Close a connection that has not got its whole answer."""
        abort = (scope.get("extensions") or {}).get(ABORT)
        if abort is not None and not response.has_ended:
            abort["call"]()


_LIMITS = ("max_queued", "retry_after_s")


async def _live(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        if message["type"] == "lifespan.startup":
            await send({"type": "lifespan.startup.complete"})
        elif message["type"] == "lifespan.shutdown":
            await send({"type": "lifespan.shutdown.complete"})
            return
