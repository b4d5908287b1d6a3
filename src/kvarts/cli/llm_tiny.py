"""`kvarts model tiny`."""

from __future__ import annotations

from pathlib import Path

import click

from kvarts.cli.llm import need_torch

__all__ = ["tiny_command"]


@click.command("tiny")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--family", metavar="NAME", default="qwen3", show_default=True,
              help="qwen3, llama, mistral (sliding window), gemma2 (soft caps) or gemma3 (mixed windows).")  # fmt: skip
@click.option("--seed", metavar="N", type=int, default=0, show_default=True, help="Of its weights.")
def tiny_command(directory: Path, family: str, seed: int) -> None:
    """Write a small model with random weights and a tokenizer of bytes to DIRECTORY.

    Its text means nothing. It is for trying things out: `kvarts generate --model DIRECTORY --prompt hello`.
    """
    need_torch()
    from kvarts.executor.torch.tiny import write_tiny

    write_tiny(family, directory, seed=seed)
    click.echo(f"kvarts: a small {family} model is in {directory}", err=True)
