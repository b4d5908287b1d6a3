"""Bearer tokens and their owners, checked before a message is read."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from kvarts.errors import InputError, KvartsError
from kvarts.files import read_text
from kvarts.owners.keys import Keys, Owner
from kvarts.serve.intake import NO_MESSAGE, CallIntake
from kvarts.serve.messages import refuse

__all__ = ["OPEN_METHODS", "OWNER", "CallGate", "Owners", "read_owners"]

OWNER: ContextVar[str] = ContextVar("OWNER", default="")
"""The owner of the current call."""

OPEN_METHODS = "/grpc.health.v1.Health/"
"""Calls that require no token: health checks should not need an owner's."""

OPEN_READS = 2
OPEN_PATIENCE_S = 0.01
OPEN_READ_S = 2.0

SCHEME = "bearer "


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
