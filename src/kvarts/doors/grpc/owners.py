"""Bearer tokens and their owners, checked before a message is read.

Messages are read only after their metadata, and a few at a time per owner.

gRPC announces a message without its length, and holds all of it in memory while it arrives. Until the message is
requested, it holds at most a window of 64 KiB. So a call waits here before its message is read: an owner occupies the
memory of at most READS messages, regardless of how many it sends. A call whose message arrives slowly is ended if
others of its owner wait.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import aclosing, asynccontextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from kvarts.base.errors import InputError, KvartsError
from kvarts.base.files import read_text
from kvarts.base.tenants import Keys, Owner
from kvarts.doors.grpc.messages import refuse

__all__ = ["NO_MESSAGE", "OPEN_METHODS", "OWNER", "READS", "CallGate", "CallIntake", "Owners", "read_owners"]

OWNER: ContextVar[str] = ContextVar("OWNER", default="")
"""The owner of the current call."""

OPEN_METHODS = "/grpc.health.v1.Health/"
"""Calls that require no token: health checks should not need an owner's."""

OPEN_READS = 2
OPEN_PATIENCE_S = 0.01
OPEN_READ_S = 2.0

SCHEME = "bearer "
READS = 2
"""Messages of an owner that are read concurrently."""

LARGE_BYTES = 64 * 1024
"""A larger message is parsed in a thread, one at a time."""

NO_MESSAGE = object()

PATIENCE_S = 0.5
"""Time limit for the arrival of a message while others of its owner wait."""

READ_S = 30.0
"""Time limit for the arrival of a message."""

MAX_CALLS = 16_384
"""Limit of an owner's calls in progress or waiting; further calls are refused."""


class _Reading:
    """A message that is being read for the call of `context`."""

    def __init__(self, context: Any, begun_s: float) -> None:
        self.context = context
        self.begun_s = begun_s
        self.timer: asyncio.TimerHandle | None = None
        self.aborting: asyncio.Task[Any] | None = None


class CallIntake:
    """Owner of the turns in which messages are read, for one event loop."""

    def __init__(self, *, reads: int = READS, patience_s: float = PATIENCE_S, read_s: float = READ_S) -> None:
        self._reads = reads
        self._patience_s = patience_s
        self._read_s = read_s
        self._parsing = asyncio.Lock()
        self._num_reading: dict[str, int] = {}
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._num_calls: dict[str, int] = {}

    async def read(self, owner: str, context: Any, parse: Callable[[bytes], Any]) -> Any:
        """Wait for a turn; return the result of `parse` for the next message of a call, or NO_MESSAGE at the end.

        Raise the errors of `parse`. A message that arrives too slowly ends the call.
        """
        await self._take(owner)
        try:
            holder = [await self._read(owner, context)]
            if not isinstance(holder[0], bytes):
                return NO_MESSAGE
            if len(holder[0]) <= LARGE_BYTES:
                return parse(holder.pop())
            async with self._parsing:
                found, error = await asyncio.to_thread(_parse, parse, holder)
        finally:
            self._give(owner)
        if error is not None:
            raise error
        return found

    @asynccontextmanager
    async def call(self, owner: str, context: Any) -> AsyncIterator[None]:
        """Count a call of `owner`. End it if there are too many."""
        num_calls = self._num_calls.get(owner, 0)
        if num_calls >= MAX_CALLS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_CALLS} calls are under way already")
        self._num_calls[owner] = num_calls + 1
        try:
            yield
        finally:
            _count_down(self._num_calls, owner)

    async def _read(self, owner: str, context: Any) -> Any:
        loop = asyncio.get_running_loop()
        reading = _Reading(context, loop.time())
        reading.timer = loop.call_later(self._patience_s, self._look, owner, reading)
        try:
            data = await context.read()  # raises if the call was aborted
        finally:
            reading.timer.cancel()
        if reading.aborting is not None:
            data = None  # it arrived in the meantime: the error raised here would keep it alive
            await reading.aborting
        return data

    def _look(self, owner: str, reading: _Reading) -> None:
        """Check whether a message that has not arrived must give up its turn."""
        loop = asyncio.get_running_loop()
        if self._waiting.get(owner) or loop.time() - reading.begun_s >= self._read_s:
            # The read is not cancelled: gRPC would keep the received part of the message forever.
            reading.aborting = loop.create_task(
                reading.context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the message arrives too slowly")
            )
            reading.aborting.add_done_callback(lambda task: task.cancelled() or task.exception())
        else:
            reading.timer = loop.call_later(self._patience_s, self._look, owner, reading)

    async def _take(self, owner: str) -> None:
        num_reading = self._num_reading.get(owner, 0)
        if num_reading < self._reads:
            self._num_reading[owner] = num_reading + 1
            return
        turn = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(owner, deque())
        waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give(owner)  # the turn was granted already
            raise

    def _give(self, owner: str) -> None:
        """Pass the turn to the call that has waited longest, or free it."""
        waiting = self._waiting.get(owner, deque())
        while waiting:
            turn = waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._waiting.pop(owner, None)
        _count_down(self._num_reading, owner)


def _parse(parse: Callable[[bytes], Any], holder: list[Any]) -> tuple[Any, Exception | None]:
    """Return the result of `parse`, or its error without the frames that hold the message."""
    try:
        return parse(holder.pop()), None
    except Exception as error:
        return None, error.with_traceback(None)


def _count_down(counts: dict[str, int], owner: str) -> None:
    counts[owner] -= 1
    if not counts[owner]:
        del counts[owner]


class Owners:
    """The owners of a server's sessions, each with its own token. Only digests of tokens are kept."""

    def __init__(self, owners_by_token: dict[str, str]) -> None:
        self.keys = Keys({token: Owner(name=owner) for token, owner in owners_by_token.items()})

    def owner_of(self, metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
        """Return the owner of the token in `authorization: Bearer TOKEN`; None without a known token."""
        value = next((value for key, value in metadata if key == "authorization"), "")
        text = value.decode("latin-1") if isinstance(value, bytes) else value
        is_bearer = text[: len(SCHEME)].lower() == SCHEME
        found = self.keys.find(text[len(SCHEME) :].strip()) if is_bearer else None
        return None if found is None else found.name


class CallGate(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Refuses calls without a known token, by their metadata alone; sets OWNER for the others.

    Messages are read in turns, as in CallIntake. Without `owners`, every call belongs to the owner ``.
    """

    def __init__(self, owners: Owners | None) -> None:
        self._owners = owners
        self._intake = CallIntake()
        # One intake for all health checks: their messages are short and arrive at once.
        self._open_intake = CallIntake(reads=OPEN_READS, patience_s=OPEN_PATIENCE_S, read_s=OPEN_READ_S)
        # A handler of a request stream is called before any message is read.
        self._refusal = grpc.stream_unary_rpc_method_handler(_refuse)

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """Return the handler of a call, or one that refuses it."""
        is_open = handler_call_details.method.startswith(OPEN_METHODS)
        if not is_open and self._owners is not None:
            owner = self._owners.owner_of(handler_call_details.invocation_metadata)
            if owner is None:
                return self._refusal
            OWNER.set(owner)
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        return self._reading(handler, self._open_intake if is_open else self._intake)

    def _reading(self, handler: Any, intake: CallIntake) -> Any:
        """Return `handler`, with its messages read through `intake`."""
        parse = handler.request_deserializer

        async def message(context: Any) -> Any:
            try:
                return await intake.read(OWNER.get(), context, parse)
            except (KvartsError, DecodeError) as error:
                return await refuse(context, error)

        async def messages(context: Any) -> AsyncIterator[Any]:
            while (request := await message(context)) is not NO_MESSAGE:
                yield request

        async def one_message(context: Any) -> Any:
            request = await message(context)
            if request is NO_MESSAGE:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call has no message")
            return request

        async def answer_one(_: Any, context: Any) -> Any:
            async with intake.call(OWNER.get(), context):
                return await handler.unary_unary(await one_message(context), context)

        async def answer_many(_: Any, context: Any) -> None:
            async with intake.call(OWNER.get(), context):
                await _pass_on(handler.unary_stream(await one_message(context), context), context)

        async def answer_stream(_: Any, context: Any) -> None:
            async with intake.call(OWNER.get(), context):
                await _pass_on(handler.stream_stream(messages(context), context), context)

        assert handler.stream_unary is None, "no service has such calls"
        if handler.unary_unary is not None:
            return grpc.stream_unary_rpc_method_handler(answer_one, None, handler.response_serializer)
        answer = answer_many if handler.unary_stream is not None else answer_stream
        return grpc.stream_stream_rpc_method_handler(answer, None, handler.response_serializer)


async def _pass_on(answers: Any, context: Any) -> None:
    """Send the messages that a handler yields. A handler that writes them itself is only awaited."""
    if not hasattr(answers, "__aiter__"):
        await answers
        return
    async with aclosing(answers):
        async for answer in answers:
            await context.write(answer)


async def _refuse(_: Any, context: Any) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "needs the metadata `authorization: Bearer TOKEN`")


def read_owners(path: Path) -> Owners:
    """Return the owners of a token file: one line `OWNER:TOKEN` per owner, or a single token for the owner ``.

    Empty lines and lines that begin with `#` are skipped. Raise MissingFileError, or InputError with file and line.
    """
    lines = read_text(path, hint="Check the path of the tokens.").splitlines()
    rows = [(number, line.strip()) for number, line in enumerate(lines, 1)]
    rows = [(number, line) for number, line in rows if line and not line.startswith("#")]
    if not rows:
        raise InputError("has no tokens", path=path, hint="A line is OWNER:TOKEN, or the only line is a token.")
    owners: dict[str, str] = {}
    for number, line in rows:
        owner, colon, token = line.partition(":")
        is_alone = not colon and len(rows) == 1
        if is_alone:
            owner, token = "", line
        problem = None
        if not is_alone and not (owner and colon):
            problem = "has no owner"
        elif not token or " " in token or not (token.isascii() and token.isprintable()):
            problem = "a token is printable ASCII, without spaces"
        elif token in owners:
            problem = "the token is another line's already"
        if problem is not None:
            raise InputError(problem, path=path, line=number, hint="A line is OWNER:TOKEN.")
        owners[token] = owner
    return Owners(owners)
