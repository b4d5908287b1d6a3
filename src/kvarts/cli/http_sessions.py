"""OpenAI's API beside sessions over gRPC, on one runtime."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvarts.cli.http_options import need_http, say
from kvarts.errors import ConfigError

if TYPE_CHECKING:
    from kvarts.cli.serve_sessions import Beside

__all__ = ["beside"]

DRAIN_S = 5.0


def beside(values: dict[str, Any], settings: dict[str, Any], owners: Any) -> list[Beside]:
    """Return what serves OpenAI's API beside, where `--http` asks for it. Raise ConfigError.

    A mock then writes words: `settings`, of `open_sessions`, say so.
    """
    if values["http"] is None:
        return []
    need_http()
    from kvarts.openai_api.server import Address
    from kvarts.openai_api.sessions.opening import open_beside, word_mock

    host, colon, port = values["http"].rpartition(":")
    if not colon or not port.isdecimal():
        raise ConfigError(f"must be HOST:PORT, got {values['http']!r}", field="http")
    address = Address(host=host.strip("[]"), port=int(port), has_keys=owners is not None, insecure=values["insecure"])
    if values["mock"]:
        settings["make_mock"] = word_mock

    @asynccontextmanager
    async def serve(runtime: Any) -> AsyncIterator[None]:
        from kvarts.openai_api.opening import Door
        from kvarts.openai_api.server import OpenAIServer

        door = Door(owner_of=None if owners is None else owners.owner_of_token)
        opened = open_beside(runtime, door, model="mock" if values["mock"] else Path(values["model"]).name)
        server = OpenAIServer(opened.app, opened.models, address)
        await server.start()
        say(f"OpenAI's API, with the same sessions, on {server.url}/v1")
        try:
            yield
        finally:
            await server.stop(DRAIN_S)

    return [serve]
