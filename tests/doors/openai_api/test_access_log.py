"""The access log: every request once, whatever becomes of it."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest

from kvarts.base.errors import OutputError
from kvarts.base.tenants import Owner
from kvarts.doors.openai.access import FLUSH_S, AccessLog
from kvarts.doors.openai.running import RunningServer

from builders.full_disk import full_disk
from builders.http_client import OpenStream, call

COMPLETIONS = "/v1/completions"


def wait_for(found: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_request_has_a_line_without_its_key_query_and_body(tmp_path: Path) -> None:
    path, said = tmp_path / "access.jsonl", list[str]()
    path.write_text('{"before": true}\n')
    keys = {"secret": Owner(name="red")}
    with RunningServer(api_key=keys, access_log=AccessLog(path, said.append)) as server:
        server.excuse("unread stream")
        key = {"authorization": "Bearer secret"}
        body = {"prompt": "private", "max_tokens": 2}
        call(server.url, "/health?token=hidden")
        call(server.url, COMPLETIONS, body)
        call(server.url, COMPLETIONS, body, headers={**key, "x-request-id": "one\n two"} | {"x-request-id": "one"})
        call(server.url, COMPLETIONS, body | {"stream": True}, headers=key)
        call(server.url, "/" + "x" * 1000, headers=key)
        with pytest.raises((OSError, HTTPException)):
            call(server.url, COMPLETIONS, body, headers={**key, "x-kvarts-fail": "drop"})
        endless = {"prompt": "a", "max_tokens": 9999, "ignore_eos": True, "stream": True}
        with OpenStream(server.url, COMPLETIONS, endless, key) as stream:
            assert stream.begin().startswith(b"HTTP/1.1 200")
        wait_for(lambda: server.opened.served.num_live == 0)
    told = lines_of(path)[1:]
    assert [(line["path"][:20], line["status"], line.get("owner", "")) for line in told] == [
        ("/health", 200, ""),
        (COMPLETIONS, 401, ""),
        (COMPLETIONS, 200, "red"),
        (COMPLETIONS, 200, "red"),
        ("/" + "x" * 19, 404, ""),
        (COMPLETIONS, 0, "red"),
        (COMPLETIONS, 200, "red"),
    ]
    assert told[2]["id"] == "one" and told[2]["client"] == "127.0.0.1" and 0 < told[2]["ms"] < 5000
    assert [line.get("is_whole", True) for line in told] == [True] * 5 + [False] * 2
    text = path.read_text()
    assert not any(word in text for word in ("secret", "hidden", "private")) and said == []


def test_lines_are_appended_while_the_server_runs(tmp_path: Path) -> None:
    path = tmp_path / "access.jsonl"
    for _ in range(2):
        with RunningServer(access_log=AccessLog(path, print)) as server:
            for _ in range(30):
                call(server.url, "/health")
    assert len(lines_of(path)) == 60


def test_a_log_that_cannot_be_written_ends_and_the_server_does_not(tmp_path: Path) -> None:
    with pytest.raises(OutputError):
        AccessLog(tmp_path / "none" / "access.jsonl", print)
    if not os.path.exists("/dev/full"):  # noqa: PTH110
        pytest.skip("needs /dev/full")
    said: list[str] = []

    async def log() -> None:
        access = AccessLog(Path("/dev/full"), said.append)
        for _ in range(2):
            access.add("GET", "/health", 200, 0.0, "id", owner="", client="", is_whole=True)
            await asyncio.sleep(2 * FLUSH_S)
        with pytest.raises(OutputError, match="space"):  # the exit code of the command
            access.close()

    asyncio.run(log())
    assert len(said) == 1 and "access log" in said[0]


def test_a_full_disk_tears_no_line(tmp_path: Path) -> None:
    path, said = tmp_path / "access.jsonl", list[str]()

    async def log() -> None:
        access = AccessLog(path, said.append)
        with full_disk(250):
            for _ in range(9):
                access.add("GET", "/health", 200, 0.0, "id", owner="", client="", is_whole=True)
                access.flush()
        with pytest.raises(OutputError, match="large"):
            access.close()

    asyncio.run(log())
    assert len(said) == 1 and len(lines_of(path)) == 2


@pytest.mark.parametrize(
    ("forwarded", "client"),
    [(None, "127.0.0.1"), ("", "127.0.0.1"), ("8.8.8.8", "8.8.8.8"), ("forged, 8.8.8.8, 127.0.0.1", "8.8.8.8")],
)
def test_the_client_is_the_one_that_a_proxy_on_this_machine_tells(
    tmp_path: Path, forwarded: str | None, client: str
) -> None:
    path, said = tmp_path / "access.jsonl", list[str]()
    with RunningServer(access_log=AccessLog(path, said.append)) as server:
        call(server.url, "/health", headers={} if forwarded is None else {"x-forwarded-for": forwarded})
    assert [line["client"] for line in lines_of(path)] == [client]
