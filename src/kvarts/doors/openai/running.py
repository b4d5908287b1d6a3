"""The opener of mocks, and a mock in a thread of this process: its requests, cache hits, and the client's mistakes."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar

import msgspec

from kvarts.base.errors import ConfigError, MissingFileError, did_you_mean, parts_of
from kvarts.base.limits import check_number
from kvarts.base.tenants import Keys, Owner
from kvarts.core.config import EngineConfig
from kvarts.core.event_log import EventReader
from kvarts.doors.openai.answers import rules_of
from kvarts.doors.openai.app import Watcher
from kvarts.doors.openai.failures import FailureScript
from kvarts.doors.openai.opening import (
    VLLM_FACE,
    MockSettings,
    Opened,
    OwnReaders,
    Readers,
    face_of,
    foreseen_mock,
    meter_of,
    mock_facts,
    mock_limits,
    mock_of,
    open_app,
)
from kvarts.doors.openai.prompts import WordText
from kvarts.doors.openai.served import Door, Limits, Served
from kvarts.doors.openai.server import Address, OpenAIServer
from kvarts.run.llm_engine import LLMEngine
from kvarts.sim.config import MOST_SPEEDUP, ReplayConfig, option_names
from kvarts.sim.fleet.config import FleetConfig, PoolConfig
from kvarts.sim.sharing.config import SharingConfig

if TYPE_CHECKING:
    from kvarts.doors.kv_events.servers import ServerReaders
    from kvarts.run.sessions.values import SessionsConfig

__all__ = ["DEFAULT_DEVICE", "DEFAULT_MODEL", "MockConfig", "RunningServer", "SeenRequest", "mock", "open_mock"]

T = TypeVar("T")
StructT = TypeVar("StructT", bound=msgspec.Struct)

DEFAULT_MODEL, DEFAULT_DEVICE, DEFAULT_PAGES = "llama-3.1-8b", "h100-80gb", 4096

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
        open_engine = foreseen_mock if _is_foreseen(config) else mock_of
        host = open_engine(
            config,
            (*settings.readers.of_model(name, config), *meter.readers),
            seed=door.seed,
            speedup=settings.speedup,
            token_bytes=settings.token_bytes,
            max_positions=limits.max_model_len,
        )
        facts = mock_facts(door, settings.speedup, config)
        served = [Served(host, WordText(), door.names or (name,), door, limits=limits, meter=meter, facts=facts)]
    face = face_of(config) if isinstance(config, ReplayConfig) else VLLM_FACE
    opened = open_app(served, door, speedup=settings.speedup, watcher=settings.watcher, face=face)
    for place in range(len(served)):
        opened.routes.event_sources += settings.readers.sources_of(place)
    return opened


def _is_foreseen(config: ReplayConfig) -> bool:
    """Return whether the engine plans, or computes, tokens that are not known yet."""
    return config.async_scheduling or config.batches is not None or "started_drafts" in config.features


class MockOptions(msgspec.Struct, kw_only=True):
    """The options of a mock that need no objects, checked by their types."""

    model: str | None
    device: str | None
    served_model_name: str | tuple[str, ...]
    any_model: bool
    fail: str
    speedup: float
    seed: int
    output_tokens: int | None
    kv_events: bool | str

    def __post_init__(self) -> None:
        check_number(self.speedup, "speedup", above=True, most=MOST_SPEEDUP)


class RunningServer:
    """A mock of a vLLM server on a free port of the loopback address, until `stop`; use it in a `with` statement.

    `config`: a ReplayConfig, a SharingConfig for several models on one device, or a FleetConfig. Without one:

    - `model` and `device`, as of `kvarts mock`: steps take the time of that model on that device, and as many pages as
      fit. Either one has the default of `kvarts mock`; without both, there are 4096 pages, and a step takes 1 ms.
    - further settings of `kvarts replay` by their names: `pages`, `page_size`, `max_seqs`, `cost`, `host_memory`, and
      objects where these have names, as for `ReplayConfig.of_options`. With `replicas`, there are as many servers, at
      the URLs `workers`, and one with a `router` in front of them.

    `served_model_name`: one name or several, by default `model`, or `mock`. `any_model`: every other name is answered
    by the first model, too. `answers`: rules, as objects or as a file. `fail`: a script of failures. `speedup`: divides
    the time of steps. `seed`: of text and failures. `output_tokens`: mean length of answers. `api_key`: one key,
    several, or keys with their owners; `admin_key`: that of an administrator. `kv_events`: publish KV events, at any
    free ports or at this endpoint; `kv_event_sources` has them. `readers`: receive all events of the engines.
    `sessions`: a SessionsConfig, which allows requests to name sessions. `settings` may also have fields of Door and of
    its Limits. Requests may ask for failures unless `allows_failures` is false.

    Raises ConfigError that names the argument, and what it may have meant.

    >>> import kvarts
    >>> from urllib.request import urlopen
    >>> with kvarts.mock(model="llama-3.1-8b", device="h100-80gb", speedup=10) as server:
    ...     print(server.model, urlopen(f"{server.url}/health").status)
    llama-3.1-8b 200
    """

    def __init__(
        self,
        config: MockConfig | None = None,
        *,
        model: str | None = None,
        device: str | None = None,
        served_model_name: str | Sequence[str] = (),
        any_model: bool = False,
        answers: Sequence[Any] | str | Path = (),
        fail: str = "",
        speedup: float = 1.0,
        seed: int = 0,
        output_tokens: int | None = None,
        api_key: str | Sequence[str] | Mapping[str, Owner] | None = None,
        admin_key: str | None = None,
        kv_events: bool | str = False,
        readers: Sequence[EventReader] = (),
        sessions: SessionsConfig | None = None,
        **settings: Any,
    ) -> None:
        _check_names(settings)
        options = _converted(
            {
                "model": model,
                "device": device,
                "served_model_name": served_model_name,
                "any_model": any_model,
                "fail": fail,
                "speedup": speedup,
                "seed": seed,
                "output_tokens": output_tokens,
                "kv_events": kv_events,
            },
            MockOptions,
        )
        of_limits = {name: settings.pop(name) for name in Limits.__struct_fields__ if name in settings}
        if output_tokens is not None:
            of_limits["default_tokens"] = output_tokens
        of_door = {name: settings.pop(name) for name in Door.__struct_fields__ if name in settings}
        names = options.served_model_name
        names = (names,) if isinstance(names, str) else names or (() if model is None else (model,))
        door = Door(
            **{
                "names": names or (("mock",) if config is None or isinstance(config, ReplayConfig) else ()),
                "hosts": (),
                "allows_failures": True,
                "keys": _keys(api_key, admin_key),
                "media": model or "",
                "answers": rules_of(answers),
                "any_model": any_model,
                "fail": fail,
                "seed": seed,
                **of_door,
            },
            limits=_converted(of_limits, Limits),
        )
        placed = {name: each for name, each in (("model", model), ("device", device)) if each is not None}
        if config is None:
            config = _engine_of(placed, settings)
        elif settings or placed:
            field = min({*settings, *placed})
            raise ConfigError("is of the configuration, which is given", field=field, hint="Set it there.")
        self.seed = seed
        self._steps = _Steps()
        self._seen = _Seen()
        self._published = _publishers(options.kv_events)
        token_bytes = 0
        if isinstance(config, ReplayConfig):
            token_bytes = 0 if config.placement is None else config.placement.kv_bytes_per_token
            if config.replicas > 1:
                config = FleetConfig(pools=(PoolConfig(role="mixed", each=config),))
        mock_settings = MockSettings(
            model=names[0] if names else "mock",
            speedup=options.speedup,
            token_bytes=token_bytes,
            readers=_AllReaders(OwnReaders(*readers, self._steps), self._published),
            watcher=self._seen,
        )
        self.opened: Opened = open_mock(config, door, mock_settings)
        self.model = self.opened.served.names[0]
        """The name that requests ask for; of several models, the first one's."""
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

    @property
    def workers(self) -> list[str]:
        """The URLs of the workers behind a router; empty without one."""
        return [url for _, url in self.server.urls]

    @property
    def kv_event_sources(self) -> list[dict[str, Any]]:
        """Where KV events are published: for each engine, `endpoint`, `replay_endpoint`, and of a worker `worker`."""
        return list(self.opened.routes.event_sources)

    # Observations -----------------------------------------------------------------------------------------

    @property
    def requests(self) -> list[SeenRequest]:
        """The requests that generate, in order of arrival; those whose answer was received have ended."""
        self._pass_turn()
        return list(self._seen.requests)

    def cache_hits(self) -> int:
        """Return the number of prompt tokens that were hit in the cache."""
        return self._between_steps(lambda: sum(served.meter.num_hit_tokens for served in self.opened.engines))

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

    def complaints(self, others: Sequence[RunningServer] = ()) -> list[str]:
        """Return the client's mistakes: streams that it did not read, and refusals without a retry.

        A retry may go to one of `others`.
        """
        for server in (self, *others):
            server.settle()
        told = []
        requests = self._seen.requests
        elsewhere = {seen.digest for server in others if server is not self for seen in server.requests}
        for index, seen in enumerate(requests):
            if seen.status in RETRYABLE and "missing retry" not in self._excused:
                again = elsewhere | {later.digest for later in requests[index + 1 :]}
                if seen.digest not in again:
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
        if self._published is not None:
            self._published.close_all()
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


def _check_names(settings: Mapping[str, Any]) -> None:
    """Raise ConfigError for an argument that neither a mock, nor its door, nor its engine has."""
    own = [name for name in inspect.signature(RunningServer).parameters if name not in ("config", "settings")]
    known = [*own, *Door.__struct_fields__, *Limits.__struct_fields__, *option_names()]
    for name in settings:
        if name not in known:
            hint = did_you_mean(name, known) or "See kvarts.mock, and the settings of kvarts replay."
            raise ConfigError("is not an option of a mock", field=name, hint=hint)


def _converted(values: dict[str, Any], struct: type[StructT]) -> StructT:
    """Return `values` as a `struct`. Raise ConfigError that names the field of a wrong type."""
    try:
        return msgspec.convert(values, struct)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):  # of a check, which msgspec has wrapped
            raise error.__cause__ from None
        what, field = parts_of(error)
        raise ConfigError(what[0].lower() + what[1:], field=field) from None


def _publishers(asked: bool | str) -> ServerReaders | None:
    """Return the publishers of KV events; None without any. Raise ConfigError."""
    if asked is False:
        return None
    from kvarts.doors.kv_events.batches import KvEventsConfig
    from kvarts.doors.kv_events.servers import ServerReaders, as_options

    anywhere = "tcp://127.0.0.1:0"
    with as_options():
        return ServerReaders(KvEventsConfig(endpoint=anywhere if asked is True else asked, replay_endpoint=anywhere))


class _AllReaders:
    """Readers of this process, and publishers of KV events if there are any."""

    def __init__(self, own: OwnReaders, published: ServerReaders | None) -> None:
        self._all: tuple[Readers, ...] = (own,) if published is None else (own, published)

    def of_model(self, name: str, config: ReplayConfig) -> list[EventReader]:
        """Return the readers of the next model."""
        return [reader for each in self._all for reader in each.of_model(name, config)]

    def of_worker(self, name: str, config: ReplayConfig, worker: int, *, is_added: bool) -> list[EventReader]:
        """Return the readers of a worker."""
        return [reader for each in self._all for reader in each.of_worker(name, config, worker, is_added=is_added)]

    def sources_of(self, worker: int) -> list[dict[str, Any]]:
        """Return where its events are published."""
        return [source for each in self._all for source in each.sources_of(worker)]

    def close(self, worker: int) -> None:
        """End with a worker that has left."""
        for each in self._all:
            each.close(worker)


def _keys(api_key: str | Sequence[str] | Mapping[str, Owner] | None, admin_key: str | None) -> Keys | None:
    admin_keys = () if admin_key is None else (admin_key,)
    if api_key is None:
        return None if admin_key is None else Keys.of((), admin_keys=admin_keys)
    if isinstance(api_key, Mapping):
        return Keys.of((), api_key, admin_keys=admin_keys)
    return Keys.of((api_key,) if isinstance(api_key, str) else api_key, admin_keys=admin_keys)


def _engine_of(placed: dict[str, str], settings: dict[str, Any]) -> ReplayConfig:
    """Return the configuration of an engine: of a model on a device, or one with short steps. Raise ConfigError.

    `placed`: the given ones of model and device.
    """
    if placed:
        on_device = {"model": placed.get("model") or DEFAULT_MODEL, "device": placed.get("device") or DEFAULT_DEVICE}
        try:
            return ReplayConfig.of_options(**on_device, **settings)
        except MissingFileError as error:
            name = placed.get("model")
            hint = f"To serve a mock by a name of your own: served_model_name={name!r}. {error.hint or ''}"
            raise MissingFileError(error.what, path=error.path, field=error.field, hint=hint.strip()) from None
    from kvarts.cost.polynomial import LinearCost

    budget = settings.get("max_batched_tokens", settings.get("max_num_batched_tokens"))
    if budget is not None and not settings.keys() & {"max_seqs", "max_num_seqs"}:
        settings["max_seqs"] = min(256, budget)
    if not settings.keys() & {"pages", "num_pages", "kv_memory"}:
        settings["pages"] = DEFAULT_PAGES
    return ReplayConfig.of_options(**{"cost": LinearCost(step_ms=1.0), **settings})


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


mock = RunningServer
