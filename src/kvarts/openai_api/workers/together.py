"""Which requests concern all workers, or another one than that which received them, and how these are answered.

A client cannot choose the worker that its connection reaches, so every answer must be right on each: what describes the
server covers all workers, what changes it is done in all of them, and a request that continues a conversation is passed
to the worker that has it.

The private door between workers carries requests and answers as messages of ASGI, over UNIX sockets. A worker passes a
request on with its head and body, and the other answers it as any request, with the same checks of access. Each request
has a connection; it closes early if the client or a worker has disconnected. The sockets are in a directory that only
this user can enter.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, MutableMapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar
from zlib import crc32

import msgspec
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from kvarts.decoders import decoder_of
from kvarts.openai_api.access import Route
from kvarts.openai_api.app import ABORT, OpenAIApp
from kvarts.openai_api.bodies import parsed
from kvarts.openai_api.errors import ApiError
from kvarts.openai_api.failures import Cut
from kvarts.openai_api.generation import SESSION_HEADERS, Exchange
from kvarts.openai_api.http import RELAYED, ClientGone
from kvarts.openai_api.opening import Opened
from kvarts.openai_api.responses import rank_in
from kvarts.openai_api.routes import sources_told
from kvarts.openai_api.workers.processes import WorkerProcess

__all__ = ["PeerAnswer", "PeerGoneError", "PeerRequest", "Together", "WorkerPeers", "joined", "merged"]

SIZE_BYTES = 4
TIMEOUT_S = 10.0
"""Time limit of a short answer."""


class PeerRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request. `headers`: with names in lower case."""

    method: str
    path: str
    query: bytes = b""
    headers: dict[bytes, bytes] = {}
    body: bytes = b""
    client: tuple[str, int] | None = None


class _Message(msgspec.Struct, frozen=True, array_like=True):
    """A message of an answer. `status`: 0 for a part of its body."""

    status: int = 0
    headers: list[tuple[bytes, bytes]] = []
    body: bytes = b""
    more_body: bool = True

    @staticmethod
    def of(message: Mapping[str, Any]) -> _Message:
        """Return a message of ASGI."""
        if message["type"] == "http.response.start":
            return _Message(message["status"], [(bytes(name), bytes(value)) for name, value in message["headers"]])
        return _Message(body=message.get("body", b""), more_body=message.get("more_body", False))

    def asgi(self) -> MutableMapping[str, Any]:
        """Return it as a message of ASGI."""
        if self.status:
            return {"type": "http.response.start", "status": self.status, "headers": self.headers}
        return {"type": "http.response.body", "body": self.body, "more_body": self.more_body}


class PeerAnswer(msgspec.Struct, frozen=True):
    """A whole answer."""

    status: int
    payload: bytes


class PeerGoneError(Exception):
    """A worker has closed the connection before the end of its answer, or was not `reached` at all."""

    def __init__(self, *, reached: bool) -> None:
        super().__init__()
        self.reached = reached


StructT = TypeVar("StructT", PeerRequest, _Message)


class WorkerPeers:
    """The private doors of all workers, by rank. `rank`: the rank of the worker whose door `open` opens."""

    def __init__(self, rank: int, paths: Sequence[Path]) -> None:
        self.rank = rank
        self._paths = tuple(paths)
        self._door: asyncio.Server | None = None

    @property
    def others(self) -> list[int]:
        """The ranks of all other workers."""
        return [rank for rank in range(len(self._paths)) if rank != self.rank]

    def __len__(self) -> int:
        return len(self._paths)

    async def open(self, app: OpenAIApp) -> None:
        """Let other workers pass on requests to `app`."""

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await _serve(app, reader, writer)
            except (ConnectionError, PeerGoneError):
                pass  # the other worker has closed the connection
            finally:
                writer.close()

        self._door = await asyncio.start_unix_server(serve, self._paths[self.rank])

    def close(self) -> None:
        """Accept no more requests of other workers."""
        if self._door is not None:
            self._door.close()

    async def messages(self, rank: int, asked: PeerRequest) -> AsyncGenerator[MutableMapping[str, Any]]:
        """Pass a request on to a worker, and yield the messages of its answer. Raise PeerGoneError if it is cut off."""
        try:
            reader, writer = await asyncio.open_unix_connection(self._paths[rank])
        except OSError:
            raise PeerGoneError(reached=False) from None
        try:
            await _write(writer, asked)
            more = True
            while more:
                message = await _read(reader, _Message)
                more = message.more_body
                yield message.asgi()
        except ConnectionError:
            raise PeerGoneError(reached=True) from None
        finally:
            writer.close()

    async def ask(self, rank: int, asked: PeerRequest) -> PeerAnswer:
        """Return the whole answer of a worker. Raise PeerGoneError if it is late or cut off."""
        status, parts = 0, []
        try:
            async with asyncio.timeout(TIMEOUT_S), aclosing(self.messages(rank, asked)) as messages:
                async for message in messages:
                    status = message.get("status", status)
                    parts.append(message.get("body", b""))
        except TimeoutError:
            raise PeerGoneError(reached=True) from None
        return PeerAnswer(status, b"".join(parts))


async def _serve(app: OpenAIApp, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer the request of one connection."""
    asked = await _read(reader, PeerRequest)
    is_read = False

    async def receive() -> MutableMapping[str, Any]:
        nonlocal is_read
        if not is_read:
            is_read = True
            return {"type": "http.request", "body": asked.body, "more_body": False}
        with suppress(ConnectionError):
            await reader.read(1)
        return {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        await _write(writer, _Message.of(message))

    scope = {
        "type": "http",
        "method": asked.method,
        "path": asked.path,
        "query_string": asked.query,
        "headers": [*asked.headers.items()],
        "client": asked.client,
        "extensions": {RELAYED: {}, ABORT: {"call": writer.transport.abort}},
    }
    await app(scope, receive, send)


async def _write(writer: asyncio.StreamWriter, message: PeerRequest | _Message) -> None:
    payload = msgspec.msgpack.encode(message)
    writer.write(len(payload).to_bytes(SIZE_BYTES, "big") + payload)
    await writer.drain()


async def _read(reader: asyncio.StreamReader, kind: type[StructT]) -> StructT:
    try:
        size = int.from_bytes(await reader.readexactly(SIZE_BYTES), "big")
        return msgspec.msgpack.decode(await reader.readexactly(size), type=kind)
    except asyncio.IncompleteReadError:
        raise PeerGoneError(reached=True) from None


HELP = "# HELP "
STARTED = "process_start_time_seconds"
NUM_WORKERS = """\
# HELP kvarts:workers Processes behind this port whose metrics are here.
# TYPE kvarts:workers gauge
kvarts:workers """
LEADER = 0
"""The rank of the worker that makes all changes, one after the other, so that all workers make them in one order."""
CHANGES = frozenset((
    "/reset_prefix_cache", "/sleep", "/wake_up", "/abort_requests", "/v1/load_lora_adapter", "/v1/unload_lora_adapter",
    "/admin/config",
))  # fmt: skip
"""Requests that change the server, as POST."""
CONFIG, RESPONSE = "/admin/config", "/v1/responses/"
NOT_ALL = "not all workers answer: one starts, or has ended"
QUERIES = {"/kv_event_sources": b"form=list"}
"""Queries to workers, if they differ from that of the client."""
ONE_ORDER = "a script counts requests in one order, and several workers have none: requests can ask for failures"


def merged(pages: Sequence[bytes]) -> bytes:
    """Return one page with the samples of all `pages`, in the text format of Prometheus.

    Each family is there once, with its type and help. Series of engines differ by the label `engine`. Series of
    the process lack that label: they are added, and so describe the server as if it were one process.
    """
    heads: dict[str, str] = {}
    samples: dict[str, dict[str, str]] = {}
    for page in pages:
        # Labels may contain any character except a line feed.
        for family in f"\n{page.decode()}".split(f"\n{HELP}")[1:]:
            lines = family.removesuffix("\n").split("\n")
            name = lines[0].split(" ", 1)[0]
            heads.setdefault(name, f"{HELP}{lines[0]}\n{lines[1]}\n")
            of_family = samples.setdefault(name, {})
            for line in lines[2:]:
                series, _, value = line.rpartition(" ")
                of_family[series] = value if series not in of_family else _combined(name, of_family[series], value)
    families = [
        head + "".join(f"{series} {value}\n" for series, value in samples[name].items()) for name, head in heads.items()
    ]
    return "".join([*families, f"{NUM_WORKERS}{float(len(pages))}\n"]).encode()


def _combined(name: str, before: str, value: str) -> str:
    """Combine the values of a series on two pages: for a process the sum, or the earlier start; else the larger one."""
    values = float(before), float(value)
    if name == STARTED:
        return repr(min(values))
    return repr(sum(values) if name.startswith("process_") else max(values))


class _Continued(msgspec.Struct):
    """The fields of a body that decide which worker answers it."""

    session_id: str | None = None
    previous_response_id: str | None = None


class Together:
    """An OtherWorkers. For one event loop."""

    def __init__(self, peers: WorkerPeers) -> None:
        self._peers = peers
        self._changing = asyncio.Lock()
        self._num_relayed = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    async def answered(self, route: Route, exchange: Exchange) -> bool:
        """Answer a request that concerns other workers. Return False if it remains to be answered here."""
        request = exchange.request
        if route.method == "POST" and route.path in CHANGES:
            return await self._change(route, exchange)
        if request.is_relayed:
            return False
        if route.generates or route.path == RESPONSE:
            rank = self._home(route, exchange)
            if rank is None or rank == self._peers.rank:
                return False
            await self._relay(rank, exchange)
            return True
        if route.path in ("/health", "/ping"):
            await self._all(exchange, self._peers.others)
            return False
        if route.path == "/metrics":
            texts = [answer.payload for answer in await self._all(exchange, range(len(self._peers)), leaves_out=True)]
            payload = await exchange.work(lambda: merged(texts), num_bytes=sum(map(len, texts)))
            await self._tell(exchange, payload, content_type=CONTENT_TYPE_PLAIN_0_0_4.encode())
            return True
        if route.method == "GET" and (merge := MERGES.get(route.path)) is not None:
            answers = await self._all(exchange, range(len(self._peers)))
            told = [msgspec.json.decode(answer.payload) for answer in answers]
            await self._tell(exchange, msgspec.json.encode(merge(exchange, told)))
            return True
        return False

    async def drained(self, timeout_s: float) -> bool:
        """Wait until the answers of others to requests received here have ended; return whether they did in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_idle.wait()
        except TimeoutError:
            return False
        return True

    # What describes the server ----------------------------------------------------------------------------

    async def _all(self, exchange: Exchange, ranks: Sequence[int], *, leaves_out: bool = False) -> list[PeerAnswer]:
        """Return the answers of the workers `ranks` to a request. Raise ApiError for the first that is not 200.

        `leaves_out`: a worker that cannot be asked is left out.
        """
        asked = _asked(exchange)
        is_head, query = asked.method == "HEAD", QUERIES.get(asked.path, asked.query)
        asked = msgspec.structs.replace(asked, method="GET" if is_head else asked.method, query=query)
        found = await asyncio.gather(*(self._ask(rank, asked) for rank in ranks))
        answers = [each for each in found if each is not None]
        if len(answers) < len(found) and not leaves_out:
            raise ApiError(503, NOT_ALL, retry_after_s=1.0)
        for answer in answers:
            if answer.status != 200:
                raise _error_of(answer)
        return answers

    async def _ask(self, rank: int, asked: PeerRequest) -> PeerAnswer | None:
        try:
            return await self._peers.ask(rank, asked)
        except PeerGoneError:
            return None

    async def _tell(self, exchange: Exchange, payload: bytes, content_type: bytes = b"application/json") -> None:
        is_head = exchange.request.method == "HEAD"
        await exchange.response.whole(payload, content_type=content_type, without_body=is_head)

    # What changes it --------------------------------------------------------------------------------------

    async def _change(self, route: Route, exchange: Exchange) -> bool:
        """Make a change in all workers. Return False if the leader has asked this one to make it."""
        if self._peers.rank != LEADER:
            if not exchange.request.is_relayed:
                await self._relay(LEADER, exchange)
            return not exchange.request.is_relayed
        if route.path == CONFIG and "fail" in parsed(exchange.payload, dict[str, Any]):
            raise ApiError(400, ONE_ORDER, param="fail")
        async with self._changing:
            for rank in self._peers.others:
                await self._all(exchange, [rank])
            await route.handler(exchange)
        return True

    # What continues something -----------------------------------------------------------------------------

    def _home(self, route: Route, exchange: Exchange) -> int | None:
        """Return the rank of the worker that a request continues with; None if any worker can answer it."""
        request, payload = exchange.request, exchange.payload
        if route.path == RESPONSE:
            return self._rank_in(request.path.removeprefix(RESPONSE))
        name: str | None = None
        if b"session_id" in payload or b"previous_response_id" in payload:
            try:
                continued = decoder_of(_Continued).decode(payload)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                return None  # any worker refuses it
            if route.path == RESPONSE[:-1] and continued.previous_response_id is not None:
                return self._rank_in(continued.previous_response_id)
            name = continued.session_id
        if not name:
            name = next((told for header in SESSION_HEADERS if (told := request.header(header))), None)
        return crc32(name.encode()) % len(self._peers) if name else None

    def _rank_in(self, response_id: str) -> int | None:
        rank = rank_in(response_id)
        return rank if rank is not None and rank < len(self._peers) else None

    async def _relay(self, rank: int, exchange: Exchange) -> None:
        """Answer as the worker `rank` does, part by part."""
        asked = _asked(exchange)
        self._num_relayed += 1
        self._is_idle.clear()
        task = asyncio.current_task()
        assert task is not None
        is_gone = False

        def gone() -> None:
            nonlocal is_gone
            is_gone = True
            task.cancel()

        exchange.drop_payload()
        exchange.request.when_gone(gone)
        try:
            async with aclosing(self._peers.messages(rank, asked)) as messages:
                async for message in messages:
                    await exchange.response.pass_on(message)
        except PeerGoneError as error:
            if error.reached:
                raise Cut from None
            raise ApiError(503, NOT_ALL, retry_after_s=1.0) from None
        except asyncio.CancelledError:
            if not is_gone:
                raise
            task.uncancel()
            raise ClientGone from None
        finally:
            await exchange.request.settle()
            self._num_relayed -= 1
            if not self._num_relayed:
                self._is_idle.set()


def _asked(exchange: Exchange) -> PeerRequest:
    request = exchange.request
    headers = {**request.headers, b"x-request-id": exchange.request_id.encode("latin-1", "replace")}
    return PeerRequest(request.method, request.path, request.query.encode("latin-1"), headers, exchange.payload)


def _error_of(answer: PeerAnswer) -> ApiError:
    """Return the error of a worker that refuses."""
    try:
        error = msgspec.json.decode(answer.payload)["error"]
        return ApiError(answer.status, str(error["message"]), param=error.get("param"))
    except (msgspec.DecodeError, KeyError, TypeError):
        return ApiError(answer.status, "a worker refuses the request")


def _load(_: Exchange, told: list[Any]) -> Any:
    return {"server_load": sum(each["server_load"] for each in told)}


def _event_sources(exchange: Exchange, told: list[Any]) -> Any:
    """Return the sources of all workers, whose ranks are those of their engines."""
    return sources_told(exchange, [source for each in told for source in each])


def _live(_: Exchange, told: list[Any]) -> Any:
    """Return the engines of all workers, each by a name of its own."""
    return [{**engine, "name": f"{engine['name']} {rank}"} for rank, each in enumerate(told) for engine in each]


def _config(_: Exchange, told: list[Any]) -> Any:
    """Return the settings, which all workers share, with the number of requests and the worst health of all."""
    health = {
        name: next((state for each in told if (state := each["health"][name]) != "healthy"), "healthy")
        for name in told[0]["health"]
    }
    return {**told[0], "num_requests": sum(each["num_requests"] for each in told), "health": health}


MERGES: dict[str, Callable[[Exchange, list[Any]], Any]] = {
    "/load": _load,
    "/kv_event_sources": _event_sources,
    "/live": _live,
    CONFIG: _config,
}
"""Requests whose answers are made of those of all workers."""


@asynccontextmanager
async def joined(opened: Opened, worker: WorkerProcess) -> AsyncIterator[None]:
    """Make a server that is about to start one of several workers, until the end of the block."""
    peers = WorkerPeers(worker.rank, worker.paths)
    together = Together(peers)
    opened.app.others = together
    await peers.open(opened.app)
    worker.follow_parent()
    try:
        yield
    finally:
        peers.close()
