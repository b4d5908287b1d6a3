"""The clients of docs/guide-sessions.md run against a server."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc", reason="needs kvarts[grpc]")
from builders.fake_runtime import FakeRuntime, next_token
from builders.session_server import serving, serving_on_a_thread

PAGE = (Path(__file__).parents[3] / "docs" / "guide-sessions.md").read_text()


def defined(name: str) -> Any:
    """The function of that name on the page."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    code = next(block for block in blocks if f"def {name}(" in block)
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    return namespace[name]


def test_the_client_that_waits(capsys: pytest.CaptureFixture[str]) -> None:
    history = list(range(100, 200))
    with serving_on_a_thread(FakeRuntime()) as address:
        defined("talk")(address, history)
    for _ in range(4):
        history.append(next_token(history))
    expected = [
        "32 tokens are no longer attended to",
        *(f"token {token}" for token in history[-4:]),
        "MAX_TOKENS after 4",
        "68 tokens are kept",
    ]
    assert capsys.readouterr().out.splitlines() == expected


def test_the_client_for_asyncio() -> None:
    async def run() -> int:
        async with serving(FakeRuntime()) as address:
            length: int = await defined("count")(address, [1, 2])
            return length

    assert asyncio.run(run()) == 18
