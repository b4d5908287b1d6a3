"""Options common to all commands that run a model in an engine, and sampling options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import click

from kvarts.config import EngineOptions, Snapshots

__all__ = [
    "MODEL_HELP",
    "SAMPLING",
    "engine_options",
    "engine_options_of",
    "kv_groups_option",
    "snapshots_option",
    "speculation_option",
]

Command = Callable[..., Any]

MODEL_HELP = "Directory of a model, or name in the hub's cache."
SAMPLING: list[tuple[str, Any, str]] = [
    ("max_tokens", int, "Tokens to generate at most. [128]"),
    ("temperature", float, "0 is greedy. [0]"),
    ("top_k", int, "Draw from the K likeliest tokens; 0: from all. [0]"),
    ("top_p", float, "Draw from the likeliest tokens that have this share together. [1]"),
    ("min_p", float, "Draw from tokens at least this likely, relative to the likeliest. [0]"),
    ("repetition_penalty", float, "Make tokens that have occurred less likely. [1]"),
    ("seed", int, "The same seed gives the same text, alone and in any batch."),
]


def engine_options(command: Command, **attributes: Any) -> Command:
    """Add the options of an engine that runs a model. `attributes` are passed to each option."""
    at_least_one = click.IntRange(min=1)
    options: list[tuple[str, dict[str, Any]]] = [
        ("--kv-memory", {"metavar": "SIZE", "default": "auto", "help": "KV memory: auto, or 2GiB."}),
        ("--page-size", {"metavar": "TOKENS", "type": at_least_one, "default": 16, "help": "Tokens per page."}),
        (
            "--max-batched-tokens",
            {"metavar": "TOKENS", "type": at_least_one, "default": 2048, "help": "Most tokens computed per step."},
        ),
        ("--max-seqs", {"metavar": "N", "type": at_least_one, "default": 64, "help": "Requests that may run at once."}),
        (
            "--max-itl-ms",
            {
                "metavar": "MS",
                "type": float,
                "help": "Longest step of decodes: chunks of prompts are cut to keep it, to a page at least.",
            },
        ),
        ("--dtype", {"metavar": "DTYPE", "default": "auto", "help": "auto, float32, bfloat16 or float16."}),
        (
            "--quantization",
            {
                "metavar": "NAME",
                "help": "Weights in 8 or 4 bits, on a CPU: int8 or int4. It changes tokens; the loss is printed.",
            },
        ),
        (
            "--kv-dtype",
            {
                "metavar": "NAME",
                "default": "auto",
                "help": "KV in pages: auto, in the model's numbers, or int8 or fp8, which change tokens.",
            },
        ),
        (
            "--trust-remote-code",
            {"is_flag": True, "help": "Run the Python code in the model's directory, with all your permissions."},
        ),
        ("--device", {"metavar": "NAME", "default": "auto", "help": "auto, cpu or cuda."}),
        (
            "--attention",
            {"metavar": "NAME", "default": "auto", "help": "Attention backend: auto, flash, numba, sdpa or triton."},
        ),
        (
            "--layers",
            {"metavar": "NAME", "default": "auto", "help": "How layers are computed: auto, compiled or model."},
        ),
        (
            "--enforce-eager",
            {"is_flag": True, "help": "On a GPU, run decodes kernel by kernel, without CUDA graphs."},
        ),
    ]
    for name, settings in reversed(options):
        command = click.option(name, show_default=True, **settings, **attributes)(command)
    return command


def engine_options_of(values: dict[str, Any]) -> EngineOptions:
    """Return the options of the engine; fields without an option on the command line keep their defaults."""
    names = {"max_num_batched_tokens": "max_batched_tokens", "max_num_seqs": "max_seqs"}
    options = {field: names.get(field, field) for field in EngineOptions.__struct_fields__}
    return EngineOptions(**{field: values[option] for field, option in options.items() if option in values})


def kv_groups_option(command: Command, **attributes: Any) -> Command:
    """Add the option `--kv-groups`: which KV the layers retain. `attributes` are passed to it."""
    text = (
        "KV that layers with a window keep. off: all tokens. all, tails: the tokens that later tokens attend to, "
        "and for later requests everything while there is room, or the tokens that a hit at the end of a prompt "
        "or an answer needs. Changes no token. [all if layers keep less and the other options permit it, else off]"
    )
    return click.option("--kv-groups", metavar="NAME", help=text, **attributes)(command)


def snapshots_option(command: Command, **attributes: Any) -> Command:
    """Add the option `--snapshots`: where layers with a state leave snapshots. `attributes` are passed to it."""
    return click.option(
        "--snapshots",
        type=click.Choice(get_args(Snapshots)),
        default="ends",
        show_default=True,
        help="Where layers with a state leave snapshots: at the ends of prompts, or also where a prompt leaves "
        "another. Changes no token.",
        **attributes,
    )(command)


def speculation_option(command: Command, **attributes: Any) -> Command:
    """Add the option `--speculative-config`, with `attributes`."""
    text = (
        "Guess tokens, and verify them in the same step: ngram, or as JSON with num_speculative_tokens, "
        "prompt_lookup_max and prompt_lookup_min. Changes no token."
    )
    return click.option("--speculative-config", metavar="ngram|JSON", help=text, **attributes)(command)
