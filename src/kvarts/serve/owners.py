"""Bearer tokens, and the owners that they stand for."""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import grpc

from kvarts.errors import InputError
from kvarts.files import read_text
from kvarts.owners.keys import Keys, Owner

__all__ = ["OPEN_METHODS", "OWNER", "Owners", "TokenCheck", "read_owners"]

OWNER: ContextVar[str] = ContextVar("OWNER", default="")
"""The owner of the call under way."""

OPEN_METHODS = "/grpc.health.v1.Health/"
"""Calls that need no token: what watches over a server should not need to hold one of its owners'."""

SCHEME = "bearer "


class Owners:
    """The owners of a server's sessions, each by a token of its own. Only digests of tokens are kept."""

    def __init__(self, owners_by_token: dict[str, str]) -> None:
        self.keys = Keys({token: Owner(name=owner) for token, owner in owners_by_token.items()})

    def owner_of(self, metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
        """Return the owner of the token in `authorization: Bearer TOKEN`; None if it has none."""
        value = next((value for key, value in metadata if key == "authorization"), "")
        text = value.decode("latin-1") if isinstance(value, bytes) else value
        is_bearer = text[: len(SCHEME)].lower() == SCHEME
        found = self.keys.find(text[len(SCHEME) :].strip()) if is_bearer else None
        return None if found is None else found.name


class TokenCheck(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Refuses calls without a token that is known; of others, sets OWNER."""

    def __init__(self, owners: Owners) -> None:
        self._owners = owners
        self._refusal = grpc.unary_unary_rpc_method_handler(_refuse)

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """Return the handler of a call, or one that refuses it."""
        if not handler_call_details.method.startswith(OPEN_METHODS):
            owner = self._owners.owner_of(handler_call_details.invocation_metadata)
            if owner is None:
                return self._refusal
            OWNER.set(owner)
        return await continuation(handler_call_details)


async def _refuse(_: Any, context: Any) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "needs the metadata `authorization: Bearer TOKEN`")


def read_owners(path: Path) -> Owners:
    """Return the owners of a token file: a line `OWNER:TOKEN` each, or one line with one token, of the owner ``.

    Lines that are empty or begin with `#` are left out. Raise MissingFileError, or InputError with file and line.
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
