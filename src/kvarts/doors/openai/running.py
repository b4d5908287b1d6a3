"""The opener of mocks, and a mock in a thread of this process: its requests, cache hits, and the client's mistakes."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from time import monotonic, sleep
from typing import Any, Self, TypeAlias, TypeVar

import msgspec

from kvarts.base.clock import PacedClock
from kvarts.base.errors import ConfigError
from kvarts.base.tenants import Keys, Owner
from kvarts.core.build import Storage, Watching, preparation_of
from kvarts.core.config import EngineConfig
from kvarts.doors.openai.answers import rules_of
from kvarts.doors.openai.app import Watcher
from kvarts.doors.openai.failures import FailureScript
from kvarts.doors.openai.opening import (
    MockSettings,
    Opened,
    OwnReaders,
    groups_of,
    meter_of,
    mock_facts,
    mock_limits,
    mock_model,
    open_app,
)
from kvarts.doors.openai.prompts import WordText
from kvarts.doors.openai.served import Door, Limits, Served
from kvarts.doors.openai.server import Address, OpenAIServer
from kvarts.proof.audit.opening import audit_of
from kvarts.run.llm_engine import LLMEngine
from kvarts.sim.config import ReplayConfig
from kvarts.sim.fleet.config import FleetConfig
from kvarts.sim.sharing.config import SharingConfig

__all__ = ["MockConfig", "RunningServer", "SeenRequest", "mock", "open_mock"]

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


MockConfig: TypeAlias = ReplayConfig | SharingConfig | FleetConfig
"""The engine of a mock, several models on one device, or a fleet behind a router."""


def open_mock(config: MockConfig, door: Door, settings: MockSettings) -> Opened:
    """Return a mock of what `config` describes.

    It is served under the names of `door`, or as `settings.model`; several models under their names in `config`.
    `max_model_len` of the limits is reduced to the tokens that the pages can hold.
    """
    if isinstance(config, FleetConfig):
        from kvarts.doors.openai.fleet.opening import OpenedFleet  # a mock of one engine starts without these
        from kvarts.doors.openai.fleet.servers import FleetServer

        return OpenedFleet(config, door, settings, FleetServer)
    if isinstance(config, SharingConfig):
        from kvarts.doors.openai.sharing.device import open_several

        served = open_several(config, door, settings)
    else:
        name = (door.names or (settings.model,))[0]
        limits, meter = mock_limits(door, config), meter_of(door, config, settings.speedup)
        host = mock_model(
            config,
            config.cost_model,
            seed=door.seed,
            clock=PacedClock(speedup=settings.speedup),
            token_bytes=settings.token_bytes,
            max_positions=limits.max_model_len,
            storage=Storage(memory=groups_of(config), make_order=config.eviction, tiers=preparation_of(config.offload)),
            watching=Watching((*settings.readers.of_model(name, config), *meter.readers), audit=audit_of(config.audit)),
        )
        facts = mock_facts(door, settings.speedup, config)
        served = [Served(host, WordText(), door.names or (name,), door, limits=limits, meter=meter, facts=facts)]
    opened = open_app(served, door, speedup=settings.speedup, watcher=settings.watcher)
    for place in range(len(served)):
        opened.routes.event_sources += settings.readers.sources_of(place)
    return opened


NAMES = {
    "pages": "num_pages",
    "max_seqs": "max_num_seqs",
    "max_batched_tokens": "max_num_batched_tokens",
    "output_tokens": "default_tokens",
}
"""Short names of settings."""


def mock(config: MockConfig | None = None, **given: Any) -> RunningServer:
    """Start a mock in a thread of this process, as `RunningServer(config, **given)`; use it in a `with` statement."""
    return RunningServer(config, **given)


class RunningServer:
    """A mock on a free port of the loopback address, until `stop`.

    `config`: a ReplayConfig, a SharingConfig for several models, or a FleetConfig. Without one, `given` has fields of a
    ReplayConfig: `pages`, 4096 by default, `page_size`, `max_seqs`, `max_batched_tokens`, `cost`, by default steps of a
    millisecond, and others.

    `given` also has fields of Door and of its Limits, as `fail`, `seed` or `output_tokens`. `model`: its name, by
    default `mock`. `answers`: rules, as objects or as a file. `api_key`: one key, several, or keys with their owners;
    `admin_key`: that of an administrator. `speedup`: divides the time of steps. `readers`: receive all events of the
    engines. `sessions`: a SessionsConfig, which allows requests to name sessions. Requests may ask for failures unless
    `allows_failures` is false.
    """

    def __init__(self, config: MockConfig | None = None, **given: Any) -> None:
        self.model: str = given.pop("model", "mock")
        speedup, sessions = given.pop("speedup", 1.0), given.pop("sessions", None)
        self._steps = _Steps()
        readers = OwnReaders(*given.pop("readers", ()), self._steps)
        given = {NAMES.get(name, name): value for name, value in given.items()}
        door = _door_of(self.model if config is None or isinstance(config, ReplayConfig) else "", given)
        if config is None:
            config = _engine_of(**given)
        elif given:
            raise ConfigError("is of the configuration, which is given", field=min(given), hint="Set it there.")
        self.seed = door.seed
        self._seen = _Seen()
        settings = MockSettings(model=self.model, speedup=speedup, readers=readers, watcher=self._seen)
        self.opened: Opened = open_mock(config, door, settings)
        self.model = self.opened.served.names[0]
        if sessions is not None:
            from kvarts.doors.openai.sessions.door import open_own

            self.opened.served.sessions = open_own(self.opened.served, sessions)
        self.config: EngineConfig = self.opened.served.host.config
        self._excused: set[str] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._started: Future[OpenAIServer] = Future()
        self._thread = threading.Thread(target=self._run, name="kvarts-server", daemon=True)
        self._thread.start()
        self.server = self._started.result(START_S)
        self.url = self.server.url
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
            for served in self.opened.engines:
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

    def stop(self, drain_s: float = 0.2) -> bool:
        """Stop serving; requests under way are aborted after `drain_s`. Return whether there were none by then."""
        if self._loop is not None and self._thread.is_alive():
            self._drain_s = drain_s
            assert self._stopping is not None
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(START_S)
        return self._was_whole

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    _drain_s = 0.2
    _was_whole = False

    def _run(self) -> None:
        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            self._stopping = asyncio.Event()
            try:
                server = self.opened.server(Address(port=0))
                await server.start()
            except BaseException as error:
                self._started.set_exception(error)
                raise
            self._started.set_result(server)
            await self._stopping.wait()
            self._was_whole = await server.stop(self._drain_s)

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


def _door_of(name: str, given: dict[str, Any]) -> Door:
    """Return the door with the fields in `given`, which are removed. `name`: of its model; empty for its own."""
    limits = {each: given.pop(each) for each in Limits.__struct_fields__ if each in given}
    fields = {each: given.pop(each) for each in Door.__struct_fields__ if each in given}
    keys = _keys(given.pop("api_key", None), given.pop("admin_key", None))
    fields["answers"] = rules_of(fields.get("answers", ()))
    own = {"names": (name,) if name else (), "hosts": (), "allows_failures": True, "keys": keys}
    return Door(**{**own, **fields}, limits=Limits(**limits))


def _keys(api_key: str | Sequence[str] | Mapping[str, Owner] | None, admin_key: str | None) -> Keys | None:
    admin_keys = () if admin_key is None else (admin_key,)
    if api_key is None:
        return None if admin_key is None else Keys.of((), admin_keys=admin_keys)
    if isinstance(api_key, Mapping):
        return Keys.of((), api_key, admin_keys=admin_keys)
    return Keys.of((api_key,) if isinstance(api_key, str) else api_key, admin_keys=admin_keys)


def _engine_of(
    cost: Any = None, num_pages: int = 4096, max_num_seqs: int = 256, max_num_batched_tokens: int = 8192, **given: Any
) -> ReplayConfig:
    """Return the configuration of an engine. `given`: further fields of it."""
    from kvarts.cost.polynomial import LinearCost
    from kvarts.cost.roofline import parse_cost

    cost = LinearCost(step_ms=1.0) if cost is None else cost
    return ReplayConfig(
        num_pages=num_pages,
        max_num_seqs=min(max_num_seqs, max_num_batched_tokens),
        max_num_batched_tokens=max_num_batched_tokens,
        cost=parse_cost(cost) if isinstance(cost, str) else cost,
        **given,
    )


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
