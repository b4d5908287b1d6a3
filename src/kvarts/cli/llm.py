"""Options of the commands that run real models."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from kvarts.cli import offload_llm
from kvarts.errors import ConfigError, InputError
from kvarts.files import read_text
from kvarts.sampling import SamplingParams

if TYPE_CHECKING:
    from kvarts.llm.llm import LLM

__all__ = [
    "MODEL_HELP",
    "SAMPLING",
    "engine_options",
    "llm_options",
    "need_torch",
    "open_llm",
    "read_prompts",
    "sampling_options",
    "sampling_params",
]

Command = Callable[..., None]

MODEL_HELP = "Directory of a model, or name in the hub's cache."
SAMPLING: list[tuple[str, Any, str]] = [
    ("max_tokens", int, "Tokens to generate at most. [128]"),
    ("temperature", float, "0 is greedy. [0]"),
    ("top_k", int, "Draw from the K likeliest tokens; 0: from all. [0]"),
    ("top_p", float, "Draw from the likeliest tokens that have this share together. [1]"),
    ("min_p", float, "Draw from tokens at least this likely, beside the likeliest. [0]"),
    ("repetition_penalty", float, "Make tokens that have occurred less likely. [1]"),
    ("seed", int, "The same seed gives the same text, alone and in any batch."),
]


def need_torch() -> None:
    """Raise ConfigError where PyTorch or transformers are not installed."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        import torch  # noqa: F401
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"real models need PyTorch and transformers ({error})", hint="pip install 'kvarts[torch]'."
        ) from None
    transformers.utils.logging.disable_progress_bar()


def llm_options(command: Command) -> Command:
    """Add the options that `open_llm` reads."""
    command = engine_options(offload_llm.add_options(command))
    return click.option("--model", metavar="DIR", required=True, help=MODEL_HELP)(command)


def engine_options(command: Command, **attributes: Any) -> Command:
    """Add the options of an engine that runs a model, with `attributes` of each."""
    at_least_one = click.IntRange(min=1)
    options: list[tuple[str, dict[str, Any]]] = [
        ("--kv-memory", {"metavar": "SIZE", "default": "auto", "help": "KV memory: auto, or 2GiB."}),
        ("--page-size", {"metavar": "TOKENS", "type": at_least_one, "default": 16, "help": "Tokens a page."}),
        (
            "--max-batched-tokens",
            {"metavar": "TOKENS", "type": at_least_one, "default": 2048, "help": "Tokens a step may compute."},
        ),
        ("--max-seqs", {"metavar": "N", "type": at_least_one, "default": 64, "help": "Requests that may run at once."}),
        ("--dtype", {"metavar": "DTYPE", "default": "auto", "help": "auto, float32, bfloat16 or float16."}),
        ("--device", {"metavar": "NAME", "default": "auto", "help": "auto, cpu or cuda."}),
        (
            "--attention",
            {"metavar": "NAME", "default": "auto", "help": "Attention backend: auto, flash, flex, numba or sdpa."},
        ),
    ]
    for name, settings in reversed(options):
        command = click.option(name, show_default=True, **settings, **attributes)(command)
    return command


def sampling_options(command: Command) -> Command:
    """Add the options that `sampling_params` reads."""
    command = click.option("--logprobs", is_flag=True, help="Print the log-probability of each token.")(command)
    command = click.option("--ignore-eos", is_flag=True, help="The model's own end is a token like any other.")(command)
    command = click.option(
        "--stop", multiple=True, metavar="TEXT", help="End where this text is generated. May be repeated."
    )(command)
    for name, kind, text in reversed(SAMPLING):
        command = click.option(f"--{name.replace('_', '-')}", name, type=kind, default=None, help=text)(command)
    return command


def sampling_params(values: dict[str, Any]) -> SamplingParams:
    """Return the SamplingParams that were given, and take them out of `values`."""
    given = {name: values.pop(name) for name, _, _ in SAMPLING}
    params = {name: value for name, value in given.items() if value is not None}
    params |= {name: values.pop(name) for name in ("ignore_eos", "logprobs")}
    return SamplingParams(stop=tuple(values.pop("stop")), **params)


def open_llm(values: dict[str, Any], **settings: Any) -> LLM:
    """Return the LLM that the options describe."""
    from kvarts.llm.llm import LLM

    settings |= offload_llm.settings_of(values)
    return LLM(
        values["model"],
        kv_memory=values["kv_memory"],
        page_size=values["page_size"],
        max_num_batched_tokens=values["max_batched_tokens"],
        max_num_seqs=values["max_seqs"],
        dtype=values["dtype"],
        device=values["device"],
        attention=values["attention"],
        **settings,
    )


class _Row(msgspec.Struct):
    prompt: str | list[int]


def read_prompts(path: Path) -> list[str | list[int]]:
    """Return the prompts of a JSONL file, `{"prompt": TEXT}` or a list of token ids a line.

    Raise InputError with file, line and field.
    """
    prompts: list[str | list[int]] = []
    for number, line in enumerate(read_text(path, hint="Check the path of the prompts.").splitlines(), 1):
        if not line.strip():
            continue
        try:
            prompts.append(msgspec.json.decode(line, type=_Row).prompt)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise InputError(str(error), path=path, line=number, hint='A line is {"prompt": "some text"}.') from error
    if not prompts:
        raise InputError("has no prompts", path=path, hint='A line is {"prompt": "some text"}.')
    return prompts
