"""A mock server in a thread of this process, for tests: the requests, the cache hits, and the client's mistakes."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from kvarts.base.tenants import Keys, Owner
from kvarts.core.config import EngineConfig
from kvarts.core.event_log import EventReader
from kvarts.doors.openai.answers import rules_of
from kvarts.doors.openai.app import Watcher
from kvarts.doors.openai.failures import FailureScript
from kvarts.doors.openai.opening import Door, Opened, open_mock
from kvarts.doors.openai.served import Limits
from kvarts.doors.openai.server import Address, OpenAIServer
from kvarts.doors.openai.sessions.door import open_own
from kvarts.doors.openai.sharing.device import open_several
from kvarts.run.llm_engine import LLMEngine
from kvarts.sim.config import ReplayConfig

if TYPE_CHECKING:
    from kvarts.doors.openai.access import AccessLog

__all__ = ["MockOptions", "RunningServer", "SeenRequest"]

T = TypeVar("T")

RETRYABLE = (408, 429, 500, 502, 503, 504)
START_S = 30.0


class SeenRequest(msgspec.Struct, kw_only=True):
    """One request that generates, as received. `status`: of its answer; 0 before it, or if the connection was closed.

    `is_whole`: the answer was written as far as the server intended.
    """

    number: int
    path: str
    body: Any
    headers: dict[str, str]
    digest: str
    status: int = 0
    is_whole: bool = False
    has_ended: bool = False


class _Seen(Watcher):
    """Owner of the received requests."""

    def __init__(self) -> None:
        self.requests: list[SeenRequest] = []

    def began(self, number: int, path: str, payload: bytes, headers: dict[bytes, bytes]) -> None:
        """Record a request."""
        try:
            body = msgspec.json.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            body = payload
        told = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers.items()}
        digest = hashlib.sha256(path.encode() + payload).hexdigest()
        self.requests.append(SeenRequest(number=number, path=path, body=body, headers=told, digest=digest))

    def ended(self, number: int, status: int, *, is_whole: bool) -> None:
        """Record the end of a request."""
        seen = self.requests[number - 1]
        seen.status, seen.is_whole, seen.has_ended = status, is_whole, True


class MockOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a RunningServer.

    `model`, `pages`, `page_size`, `max_seqs`, `max_batched_tokens` and `cost`: the engine, by default with steps of a
    millisecond. `seed`: for texts and failures. `fail`: a script of failures. `allows_failures`: requests may ask for
    their own failures. `answers`: rules of the answers, as objects or as a file. `has_page`: serve the live page.
    `access_log`: receives every request. `residency_share`: the share of KV blocks whose residency is measured.
    `media`: openai, qwen, gemma or claude, see kvarts.doors.openai.media. `api_key`: one key, several, or keys with
    their owners. `speedup`: divides the time of steps. `readers` receive all events of the engine. `several`: a
    SharingConfig, which replaces `model` and the settings of the engine; its models are served under their names.
    `sessions`: a SessionsConfig, which allows requests to name sessions.
    """

    model: str = "mock"
    pages: int = 4096
    page_size: int = 16
    max_seqs: int = 256
    max_batched_tokens: int = 8192
    cost: Any = None
    seed: int = 0
    speedup: float = 1.0
    fail: str = ""
    api_key: str | Sequence[str] | Mapping[str, Owner] | None = None
    admin_key: str | None = None
    shares_prefix_cache: bool = False
    allows_failures: bool = True
    max_queued: int = 1024
    max_model_len: int = 131_072
    output_tokens: int | None = None
    answers: Sequence[Any] | str | Path = ()
    media: str = ""
    has_page: bool = True
    access_log: AccessLog | None = None
    residency_share: float = 0.0
    trust_request_chat_template: bool = False
    is_recording: bool = False
    readers: Sequence[EventReader] = ()
    several: Any = None
    sessions: Any = None


class RunningServer:
    """A mock on a free port of the loopback address, until `stop`.

    `given`: fields of `options`, as `answers=["Yes."]`, and further fields of ReplayConfig.
    """

    def __init__(self, options: MockOptions | None = None, **given: Any) -> None:
        own = {name: given.pop(name) for name in MockOptions.__struct_fields__ if name in given}
        options = msgspec.structs.replace(MockOptions() if options is None else options, **own)
        door = _door_of(options)
        self.model = options.model
        self.seed = options.seed
        self._seen = _Seen()
        self._steps = _Steps()
        if options.several is None:
            self.opened: Opened = open_mock(
                _engine_of(options, given),
                door,
                model=options.model,
                speedup=options.speedup,
                readers=(*options.readers, self._steps),
                watcher=self._seen,
            )
        else:
            self.opened = open_several(options.several, door, speedup=options.speedup, watcher=self._seen)
            self.model = self.opened.served.names[0]
        if options.sessions is not None:
            self.opened.served.sessions = open_own(self.opened.served, options.sessions)
        self.config: EngineConfig = self.opened.served.host.config
        self._excused: set[str] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._started: Future[str] = Future()
        self._thread = threading.Thread(target=self._run, name="kvarts-server", daemon=True)
        self._thread.start()
        self.url = self._started.result(START_S)
        """URL of the server: http://127.0.0.1:PORT."""

    @property
    def base_url(self) -> str:
        """The base URL for OpenAI's SDKs."""
        return f"{self.url}/v1"

    # Observations -----------------------------------------------------------------------------------------

    @property
    def requests(self) -> list[SeenRequest]:
        """The requests that generate, in order of arrival; those whose answer was received have ended."""
        self._pass_turn()
        return list(self._seen.requests)

    def cache_hits(self) -> int:
        """Return the number of prompt tokens that were hit in the cache."""
        return self._between_steps(lambda: sum(served.meter.num_hit_tokens for served in self.opened.models))

    def timeline(self) -> list[dict[str, int]]:
        """Return the steps so far, of a single model: start, duration, pages, requests and tokens of each."""
        return self._between_steps(lambda: list(self._steps.rows))

    def assert_conserved(self) -> None:
        """Assert that every page is accounted for and, without requests under way, that none is in use."""

        def check() -> None:
            for served in self.opened.models:
                scheduler = served.host.core.scheduler
                scheduler.check()
                if not scheduler.has_work:
                    num_held = scheduler.cache.num_used - scheduler.cache.num_reserved  # minus those of sessions
                    assert num_held == 0, "no request runs, and pages are in use"

        self._between_steps(check)

    def fail_next(self, script: str) -> None:
        """Set the script of failures from the next request on; `script` counts from that request."""
        self.opened.app.set_script(FailureScript(script, seed=self.seed))

    # Mistakes of the client -------------------------------------------------------------------------------

    def excuse(self, what: str) -> None:
        """Permit `what` in this test: "unread stream" or "missing retry"."""
        assert what in ("unread stream", "missing retry"), what
        self._excused.add(what)

    def complaints(self) -> list[str]:
        """Return the client's mistakes: streams that it did not read, and refusals without a retry."""
        self.settle()
        told = []
        requests = self._seen.requests
        for index, seen in enumerate(requests):
            if seen.status in RETRYABLE and "missing retry" not in self._excused:
                if not any(later.digest == seen.digest for later in requests[index + 1 :]):
                    told.append(
                        f"request {seen.number} to {seen.path} was answered {seen.status} and was not sent again"
                    )
            elif not seen.is_whole and "unread stream" not in self._excused:
                told.append(f"the answer to request {seen.number} to {seen.path} was not read to its end")
        return told

    def settle(self, timeout_s: float = 1.0) -> None:
        """Wait until all requests have ended, because a disconnection is noticed only after a moment."""
        deadline = monotonic() + timeout_s
        while monotonic() < deadline and not all(seen.has_ended for seen in self._seen.requests):
            sleep(0.005)

    # Life cycle -------------------------------------------------------------------------------------------

    def stop(self, drain_s: float = 0.2) -> None:
        """Stop serving; requests under way are aborted after `drain_s`."""
        if self._loop is None or not self._thread.is_alive():
            return
        self._drain_s = drain_s
        assert self._stopping is not None
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(START_S)

    def __enter__(self) -> RunningServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    _drain_s = 0.2

    def _run(self) -> None:
        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            self._stopping = asyncio.Event()
            try:
                server = OpenAIServer(self.opened.app, self.opened.models, Address(port=0))
                await server.start()
            except BaseException as error:
                self._started.set_exception(error)
                raise
            self._started.set_result(server.url)
            await self._stopping.wait()
            await server.stop(self._drain_s)

        asyncio.run(serve())

    def _pass_turn(self) -> None:
        """Wait until the event loop is done with the answer that it wrote last."""
        loop = self._loop
        if loop is None or loop.is_closed() or threading.current_thread() is self._thread:
            return
        done = threading.Event()
        with suppress(RuntimeError):  # it was closed meanwhile
            loop.call_soon_threadsafe(done.set)
            done.wait(1.0)

    def _between_steps(self, task: Callable[[], T]) -> T:
        def run(_: LLMEngine) -> T:
            return task()

        return self.opened.served.host.loop.call(run)


def _door_of(options: MockOptions) -> Door:
    return Door(
        names=(options.model,),
        keys=_keys(options.api_key, options.admin_key),
        shares_prefix_cache=options.shares_prefix_cache,
        hosts=(),
        allows_failures=options.allows_failures,
        limits=Limits(
            max_queued=options.max_queued,
            max_model_len=options.max_model_len,
            default_tokens=options.output_tokens,
            trust_request_chat_template=options.trust_request_chat_template,
        ),
        fail=options.fail,
        seed=options.seed,
        is_recording=options.is_recording,
        answers=rules_of(options.answers),
        has_page=options.has_page,
        access_log=options.access_log,
        residency_share=options.residency_share,
        media=options.media,
    )


def _engine_of(options: MockOptions, settings: Mapping[str, Any]) -> ReplayConfig:
    """Return the configuration of the engine of `options`. `settings`: further fields of it."""
    from kvarts.cost.polynomial import LinearCost
    from kvarts.cost.roofline import parse_cost

    cost = LinearCost(step_ms=1.0) if options.cost is None else options.cost
    return ReplayConfig(
        num_pages=options.pages,
        page_size=options.page_size,
        max_num_seqs=min(options.max_seqs, options.max_batched_tokens),
        max_num_batched_tokens=options.max_batched_tokens,
        cost=parse_cost(cost) if isinstance(cost, str) else cost,
        **settings,
    )


def _keys(api_key: str | Sequence[str] | Mapping[str, Owner] | None, admin_key: str | None) -> Keys | None:
    admin_keys = () if admin_key is None else (admin_key,)
    if api_key is None:
        return None if admin_key is None else Keys.of((), admin_keys=admin_keys)
    if isinstance(api_key, Mapping):
        return Keys.of((), api_key, admin_keys=admin_keys)
    return Keys.of((api_key,) if isinstance(api_key, str) else api_key, admin_keys=admin_keys)


class _Steps:
    wants_details = False

    def __init__(self) -> None:
        self.rows: list[dict[str, int]] = []

    def observe(self, events: Sequence[Any]) -> None:
        """Record steps."""
        for event in events:
            if hasattr(event, "num_admitted"):
                self.rows.append(
                    {
                        "step": event.step,
                        "start_ns": event.start_ns,
                        "duration_ns": event.duration_ns,
                        "used_pages": event.num_used,
                        "cached_pages": event.num_cached,
                        "running": event.num_running,
                        "waiting": event.num_waiting,
                        "tokens": event.num_tokens,
                        "preemptions": len(event.preemptions),
                    }
                )
