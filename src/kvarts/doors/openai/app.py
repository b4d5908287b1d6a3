"""The application: dispatch by path, access checks, and rendering of errors."""

from __future__ import annotations

import logging
import re
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

import msgspec

from kvarts.base.errors import ConfigError, OutputError
from kvarts.base.limits import MOST_SHOWN, brief
from kvarts.doors.openai.access import Access, Guard, Route
from kvarts.doors.openai.bodies import model_in, parsed
from kvarts.doors.openai.budget import Workbench
from kvarts.doors.openai.dialects import CHAT, COMPLETIONS
from kvarts.doors.openai.embeddings import EMBEDDINGS
from kvarts.doors.openai.errors import ApiError, api_error, is_bug
from kvarts.doors.openai.failures import NO_FAILURE, Cut, Failure, FailureScript, parse_failure
from kvarts.doors.openai.generation import Exchange, Generating
from kvarts.doors.openai.http import Body, ClientGone, HttpRequest, HttpResponse, Intake, new_id
from kvarts.doors.openai.messages import MESSAGES, count_tokens
from kvarts.doors.openai.responses import Responses
from kvarts.doors.openai.router import Router
from kvarts.doors.openai.routes import TOKENIZED_BYTES, Routes
from kvarts.doors.openai.served import Health, Models

if TYPE_CHECKING:
    from kvarts.doors.openai.access import AccessLog
    from kvarts.doors.openai.live import Live

__all__ = ["OpenAIApp", "Watcher"]

BODIES_AT_ONCE = 4
"""Number of maximum-size bodies whose bytes may be read at once, in total."""
FAILURES_OFF = "failures on purpose are off: start a mock with --set allow_failures=true"
LOG = logging.getLogger("kvarts.doors.openai")
MAX_ID_CHARS = 256
HEADERS = re.compile(r"[a-z0-9-]{1,100}(, ?[a-z0-9-]{1,100}){0,99}")
PREFLIGHT = (
    (b"access-control-allow-methods", b"GET, POST, DELETE"),
    (b"access-control-max-age", b"600"),
)
"""Headers of the answer to a browser's preflight request."""


class Watcher:
    """Receives requests that generate. The base class ignores them."""

    def began(self, number: int, path: str, payload: bytes, headers: dict[bytes, bytes]) -> None:
        """Record a request, by its number."""

    def ended(self, number: int, status: int, *, is_whole: bool) -> None:
        """Record its answer's `status`; `is_whole` is false if its client disconnected before the intended end."""


class ConfigBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /admin/config. `fail`: a script of failures, drawn from `seed`. `health`: by the names of models."""

    fail: str = ""
    seed: int = 0
    health: dict[str, Health] = {}
    max_queued: int = 1024
    retry_after_s: float = 1.0


class OpenAIApp:
    """Answers requests to the served models. `guard`: finds the owner of a request.

    `allows_failures`: requests may ask for their own failures, and administrators may set a script. `has_page`: serve
    the live page. `access_log` receives every request.
    """

    def __init__(
        self,
        models: Models,
        routes: Routes,
        *,
        script: FailureScript,
        guard: Guard,
        allows_failures: bool = False,
        watcher: Watcher | None = None,
        has_page: bool = False,
        access_log: AccessLog | None = None,
    ) -> None:
        self._models = models
        self._routes = routes
        self._guard = guard
        self._allows_failures = allows_failures
        self._watcher = Watcher() if watcher is None else watcher
        self._access_log = access_log
        self._has_page = has_page
        self._live: Live | None = None
        """The live page, between `open` and `close`."""
        self._num_requests = 0
        self.shares_log = False
        """Whether the log is of other applications as well, one of which closes it."""
        self.script = FailureScript()
        self.set_script(script)
        shares = {} if guard.keys is None else guard.keys.shares
        most = models.first.limits.max_body_bytes
        self._intake = Intake(most * BODIES_AT_ONCE, shares)
        self._workbench = Workbench()
        generating = Generating(models)
        responses = Responses(shares)
        self._dialects = (COMPLETIONS, CHAT, responses.dialect, MESSAGES, EMBEDDINGS)
        post, get, key, admin = "POST", "GET", Access.KEY, Access.ADMIN
        self.router = Router((
            *(Route(method=post, path=dialect.path, handler=partial(generating.answer, dialect), access=key,
                    max_body_bytes=None, generates=True, body=dialect.body, about=dialect.about)
              for dialect in self._dialects),
            Route(method=post, path=f"{MESSAGES.path}/count_tokens", handler=partial(count_tokens, models), access=key,
                  max_body_bytes=TOKENIZED_BYTES, body=MESSAGES.body, about="Count the tokens of a prompt."),
            Route(method=get, path="/v1/responses/{response_id}", handler=responses.find, access=key),
            Route(method="DELETE", path="/v1/responses/{response_id}", handler=responses.delete, access=key),
            *(() if not has_page else (
                Route(method=get, path="/", handler=self._show_page, access=Access.OPEN),
                Route(method=get, path="/live", handler=self._tell_live, access=key),
            )),
            *routes.table(),
            Route(method=get, path="/admin/config", handler=self._tell_config, access=admin),
            Route(method=post, path="/admin/config", handler=self._set_config, access=admin, body=ConfigBody),
        ))  # fmt: skip

    def open(self) -> None:
        """Start what runs besides requests, in the running event loop."""
        if self._has_page:
            from kvarts.doors.openai.live import Live  # a server is ready before it has a page

            self._live = Live(self._models)
            self._live.open()

    def close(self) -> None:
        """Stop everything that runs besides requests. Raise OutputError if the access log lacks lines."""
        self._workbench.close()
        if self._live is not None:
            self._live.close()
        if self._access_log is not None and not self.shares_log:
            self._access_log.close()

    def set_script(self, script: FailureScript) -> None:
        """Set the script of failures from now on. Raise ConfigError if it fails transfers of models without tiers."""
        self._models.fail_transfers(script.transfer_fails if script.has_transfers else None)
        self.script = script

    async def __call__(self, request: HttpRequest, response: HttpResponse) -> None:
        """Answer one request. The connection of an answer that has not ended is closed."""
        started_s = monotonic()
        request_id = (request.header("x-request-id") or new_id())[:MAX_ID_CHARS]
        response.extra_headers.append((b"x-request-id", request_id.encode("latin-1", "replace")))
        origin = request.header("origin")
        if origin is not None and self._guard.shares_with(origin):
            response.extra_headers += [
                (b"access-control-allow-origin", origin.encode("latin-1")),
                (b"vary", b"origin"),
                (b"access-control-expose-headers", b"x-request-id, retry-after"),
            ]
            if request.method == "OPTIONS" and request.header("access-control-request-method") is not None:
                # SDKs send headers of their own with every request, and a preflight request never has a key.
                asked = request.header("access-control-request-headers") or ""
                headers = asked if HEADERS.fullmatch(asked) else "authorization, content-type"
                await response.whole(
                    b"", headers=[*PREFLIGHT, (b"access-control-allow-headers", headers.encode("latin-1"))]
                )
                return
        if self._access_log is None:
            await self._respond(request, response, request_id, started_s)
            return
        try:
            await self._respond(request, response, request_id, started_s)
        finally:
            self._access_log.add(
                request.method,
                request.path,
                response.status,
                started_s,
                request_id,
                owner=request.owner_name,
                client=request.client,
                is_whole=response.has_ended,
            )

    async def _respond(self, request: HttpRequest, response: HttpResponse, request_id: str, started_s: float) -> None:
        try:
            await self._handle(request, response, request_id, started_s)
        except (ClientGone, Cut):
            return
        except Exception as error:
            if not response.has_begun:
                # Do not bind the error: its traceback holds this frame, and its data would wait for the collector.
                await response.error(*self._answer_to(error, request.path))

    def _answer_to(self, error: Exception, path: str) -> tuple[ApiError, Any]:
        """Return the error that the client receives, and the body of the answer, in the form of the API at `path`."""
        told = self._told(error)
        forms = (dialect.error_body for dialect in self._dialects if path.startswith(dialect.path))
        return told, next(forms, COMPLETIONS.error_body)(told)

    def _told(self, error: Exception) -> ApiError:
        """Return the error that the client receives."""
        if isinstance(error, OutputError):
            LOG.error("%s", error)
        if is_bug(error) and self._models.first.host.loop.is_alive:
            LOG.exception("an unexpected error")
            return ApiError(500, f"{type(error).__name__}: {error}")
        return api_error(error)

    async def _handle(self, request: HttpRequest, response: HttpResponse, request_id: str, started_s: float) -> None:
        if request.is_ambiguous:
            raise ApiError(400, "has a header twice that may be there once, such as Host or Authorization")
        route = self.router.find(request.method, request.path)
        owner = self._guard.owner_of(request, route.access)
        request.owner_name = owner.name
        if request.has_body and not request.is_json(unless_told=route.access is not Access.ADMIN):
            raise ApiError(415, "a body is JSON: content-type: application/json")
        limits = self._models.first.limits
        most = limits.max_body_bytes if route.max_body_bytes is None else route.max_body_bytes
        body = Body(owner.name)
        try:
            payload = await self._intake.read(
                request, body, min(most, limits.max_body_bytes), timeout_s=limits.body_timeout_s
            )
            exchange = Exchange(
                request=request,
                response=response,
                payload=payload,
                request_id=request_id,
                started_s=started_s,
                failure=NO_FAILURE,
                owner=owner,
                budget=self._models.budget(),
                workbench=self._workbench,
                read=partial(self._intake.drop, body),
            )
            del payload
            if route.generates:
                await self._generate(route, exchange)
            else:
                await route.handler(exchange)
        finally:
            self._intake.drop(body)

    async def _generate(self, route: Route, exchange: Exchange) -> None:
        request, response = exchange.request, exchange.response
        self._num_requests += 1
        number = self._num_requests
        self._watcher.began(number, request.path, exchange.payload, request.headers)
        try:
            exchange.failure = self._failure_of(request)
            if exchange.failure.kills_engine:
                self._models.of(model_in(exchange.payload)).kill()
            exchange.failure.before_request()
            await route.handler(exchange)
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

    def _failure_of(self, request: HttpRequest) -> Failure:
        """Return the failure of a request: the one that it asks for, else the script's."""
        asked = request.header("x-kvarts-fail")
        status = request.header("x-return-error")
        failure = self.script.next()
        if (asked is not None or status is not None) and not self._allows_failures:
            raise ApiError(403, FAILURES_OFF)
        try:
            if asked is not None:
                return parse_failure(asked)
            if status is not None:
                return parse_failure(status)
        except ConfigError as error:
            raise ApiError(400, str(error)) from error
        return failure

    async def _show_page(self, exchange: Exchange) -> None:
        """Show the live page."""
        assert self._live is not None
        await self._live.page(exchange)

    async def _tell_live(self, exchange: Exchange) -> None:
        """Return the data of the live page."""
        assert self._live is not None
        await self._live.data(exchange)

    async def _tell_config(self, exchange: Exchange) -> None:
        """Return the settings of the running server."""
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
        """Change settings of the running server: failures, health and the length of the queue."""
        asked = parsed(exchange.payload, dict[str, msgspec.Raw])
        if not self._allows_failures and not asked.keys().isdisjoint(_FAILURES):
            raise ApiError(403, FAILURES_OFF, param=min(asked.keys() & _FAILURES))
        unknown = sorted(asked.keys() - set(ConfigBody.__struct_fields__))
        if unknown:
            raise ApiError(400, f"{brief(unknown[0])} cannot be set", param=unknown[0][:MOST_SHOWN])
        body = parsed(exchange.payload, ConfigBody)
        try:
            given = {name: getattr(body, name) for name in ("max_queued", "retry_after_s") if name in asked}
            limits = [msgspec.structs.replace(served.limits, **given) for served in self._models]
            script = FailureScript(body.fail, seed=body.seed) if "fail" in asked else None
        except ConfigError as error:
            raise ApiError(400, str(error)) from error
        if script is not None:
            self.set_script(script)
        changes = [(self._models.by_own_name(name), state) for name, state in body.health.items()]
        for served, new in zip(self._models, limits, strict=True):
            served.limits = new
        for served, state in changes:
            await served.set_health(state)
        await self._tell_config(exchange)


_FAILURES = frozenset(("fail", "health", "seed"))
