"""`kvarts generate`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
import msgspec

from kvarts.cli.llm import (
    llm_options,
    need_torch,
    open_llm,
    read_prompts,
    sampling_options,
    sampling_params,
)
from kvarts.cli.options import Command
from kvarts.cli.paths import INPUT
from kvarts.errors import ConfigError

__all__ = ["generate_command"]


@click.command("generate", cls=Command)
@llm_options
@click.option("--prompt", metavar="TEXT", help="One prompt; its answer is printed as it comes.")
@click.option("--prompts", "prompts_file", metavar="FILE", type=INPUT,
              help='Many, run as they fit: JSON lines {"prompt": TEXT}. A JSON line each is printed, in their '
              "order.")  # fmt: skip
@sampling_options
def generate_command(prompt: str | None, prompts_file: Path | None, **values: Any) -> None:
    """Generate text with a real model, its KV in pages."""
    if (prompt is None) == (prompts_file is None):
        raise ConfigError("give either", field="prompt", hint="Give --prompt TEXT or --prompts FILE.")
    prompts = [] if prompts_file is None else read_prompts(prompts_file)
    need_torch()
    params = sampling_params(values)
    llm = open_llm(values)
    if prompt is not None:
        _stream(llm, prompt, params)
        return
    for completion in llm.generate(prompts, params):
        sys.stdout.buffer.write(msgspec.json.encode(completion) + b"\n")
    sys.stdout.buffer.flush()


def _stream(llm: Any, prompt: Any, params: Any) -> None:
    import asyncio

    async def print_text() -> None:
        async for text in llm.stream(prompt, params):
            sys.stdout.buffer.write(text.encode())
            sys.stdout.buffer.flush()

    asyncio.run(print_text())
    sys.stdout.buffer.write(b"\n")
    sys.stdout.buffer.flush()
