"""The transcript of a small model in a chat and an agent with a tool: its examples, in order, with a server."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="real models need kvarts[torch]")
pytest.importorskip("openai", reason="its client is OpenAI's")

from builders.real_model import real_model
from builders.server_process import kvarts_process

PAGE = Path(__file__).parents[2] / "docs" / "transcript-small-model.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.long
def test_the_transcript_is_what_is_printed() -> None:
    real_model()
    text = PAGE.read_text()
    blocks = BLOCK.findall(text)
    once, serving = (block.splitlines() for kind, block in blocks if kind == "text")
    command = shlex.split(once[0])[2:]
    ended = subprocess.run(
        [sys.executable, "-m", "kvarts", *command], env=os.environ, capture_output=True, text=True, check=True
    )
    assert ended.stdout.splitlines() == once[1:]
    *command, port = shlex.split(serving[0])[2:]
    assert (command[-1], port) == ("--port", "8000")
    namespace: dict[str, Any] = {"__name__": "example"}
    num_shown = 0
    with kvarts_process(*command, "0") as server:
        ready = server.wait_for(r"kvarts: (smollm2, with .* pages of 16 tokens), on (http://\S+)/v1")
        assert serving[1] == f"kvarts: {ready[1]}, on http://127.0.0.1:8000/v1"
        for (kind, code), (after, output) in zip(blocks, [*blocks[1:], ("", "")], strict=True):
            if kind == "python":
                printed = io.StringIO()
                with contextlib.redirect_stdout(printed):
                    exec(code.replace("http://127.0.0.1:8000", ready[2]), namespace)
                assert after == "output" and printed.getvalue() == output
                num_shown += 1
    assert num_shown == 2
