"""`kvarts model tiny`."""

from __future__ import annotations

from pathlib import Path

import click

from kvarts.cli.llm import need_torch
from kvarts.cli.options import Command
from kvarts.cli.paths import DIRECTORY
from kvarts.directories import new_directory
from kvarts.files import writing
from kvarts.limits import MOST_SEED, check_whole

__all__ = ["tiny_command"]


@click.command("tiny", cls=Command)
@click.argument("directory", type=DIRECTORY)
@click.option("--family", metavar="NAME", default="qwen3", show_default=True,
              help="qwen3, llama, mistral (sliding window), gemma2 (soft caps), gemma3 (mixed windows) "
                   "or qwen3-next (layers with a state, which need --kv-groups).")  # fmt: skip
@click.option("--seed", metavar="N", type=int, default=0, show_default=True, help="Seed of the weights.")
def tiny_command(directory: Path, family: str, seed: int) -> None:
    """Write a small model with random weights and a byte tokenizer to DIRECTORY, new or empty.

    Its output is meaningless. Use it to try things out: `kvarts generate --model DIRECTORY --prompt hello`.
    """
    need_torch()
    from kvarts.executor.torch.tiny import write_tiny

    check_whole(seed, "seed", least=0, most=MOST_SEED)
    with writing(directory):
        directory.parent.mkdir(parents=True, exist_ok=True)
    with new_directory(directory, last="config.json") as folder:
        write_tiny(family, folder, seed=seed)
    click.echo(f"kvarts: a small {family} model is in {directory}", err=True)
