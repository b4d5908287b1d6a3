"""Options of the commands that run a model in an engine, and of those that run real models."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import click
import msgspec

from kvarts.base.decoders import UNDECODED
from kvarts.base.errors import ConfigError, InputError, KvartsError, problem_of
from kvarts.base.files import read_text
from kvarts.cli import offload
from kvarts.cli.options import KeyOption, key_option
from kvarts.cli.process import hold_signals_back, narrate
from kvarts.core.config import EngineOptions, Snapshots
from kvarts.core.sampling import SamplingParams

if TYPE_CHECKING:
    from kvarts.run.torch.llm import LLM

__all__ = [
    "MODEL_HELP",
    "SAMPLING",
    "PromptLine",
    "encode_prompts",
    "engine_options",
    "engine_options_of",
    "kv_groups_option",
    "llm_options",
    "need_torch",
    "open_llm",
    "read_prompts",
    "sampling_options",
    "sampling_params",
    "snapshots_option",
    "speculation_option",
]

Command = Callable[..., Any]
MODEL_HELP = "Directory of a model, its name for `kvarts model get`, or one in the hub's cache."
SAMPLING: list[tuple[str, Any, str]] = [
    ("max_tokens", int, "Tokens to generate at most. [128]"),
    ("temperature", float, "0 is greedy. [0]"),
    ("top_k", int, "Draw from the K likeliest tokens; 0: from all. [0]"),
    ("top_p", float, "Draw from the likeliest tokens that have this share together. [1]"),
    ("min_p", float, "Draw from tokens at least this likely, relative to the likeliest. [0]"),
    ("repetition_penalty", float, "Make tokens that have occurred less likely. [1]"),
    ("seed", int, "The same seed gives the same text, alone and in any batch."),
]
OPTIONS = ("--kv-memory", "--dtype", "--device")
"""The settings of an engine with an option of their own; the others are keys of `--set`."""
RARE_SAMPLING = ("top_k", "top_p", "min_p", "repetition_penalty")


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
        declared = attributes if name in OPTIONS else {**attributes, "cls": KeyOption}
        command = click.option(name, show_default=True, **settings, **declared)(command)
    return command


def engine_options_of(values: dict[str, Any]) -> EngineOptions:
    """Return the options of the engine; fields without an option on the command line keep their defaults."""
    names = {"max_num_batched_tokens": "max_batched_tokens", "max_num_seqs": "max_seqs"}
    options = {field: names.get(field, field) for field in EngineOptions.__struct_fields__}
    return EngineOptions(**{field: values[option] for field, option in options.items() if option in values})


def kv_groups_option(command: Command, **attributes: Any) -> Command:
    """Add the key `kv_groups`: which KV the layers retain. `attributes` are passed to it."""
    text = (
        "KV that layers with a window keep. off: all tokens. all, tails: the tokens that later tokens attend to, "
        "and for later requests everything while there is room, or the tokens that a hit at the end of a prompt "
        "or an answer needs. Changes no token. [all if layers keep less and the other options permit it, else off]"
    )
    return key_option("--kv-groups", metavar="NAME", help=text, **attributes)(command)


def snapshots_option(command: Command, **attributes: Any) -> Command:
    """Add the key `snapshots`: where layers with a state leave snapshots. `attributes` are passed to it."""
    return key_option(
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
        "prompt_lookup_max, prompt_lookup_min and draft_order. Changes no token."
    )
    return click.option("--speculative-config", metavar="ngram|JSON", help=text, **attributes)(command)


def need_torch() -> None:
    """Import PyTorch, and send kvarts' log to standard error. Raise ConfigError if PyTorch is not installed."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    import kvarts.run.torch  # noqa: F401  # before PyTorch, which reads when it is loaded how long threads spin

    try:
        with hold_signals_back():
            import torch  # noqa: F401

            version("transformers")  # whose import takes seconds, and not every model needs it
    except ImportError as error:
        raise ConfigError(
            f"real models need PyTorch and transformers ({error})", hint="pip install 'kvarts[torch]'."
        ) from None
    narrate()


def llm_options(command: Command) -> Command:
    """Add the options that `open_llm` reads."""
    command = offload.add_options(command)
    command = engine_options(kv_groups_option(snapshots_option(command)))
    return click.option("--model", metavar="DIR", required=True, help=MODEL_HELP)(command)


def sampling_options(command: Command) -> Command:
    """Add the options that `sampling_params` reads."""
    command = key_option("--logprobs", is_flag=True, help="Print the log-probability of each token.")(command)
    command = key_option("--ignore-eos", is_flag=True, help="The model's own end is a token like any other.")(command)
    command = key_option(
        "--stop", multiple=True, metavar="TEXT", help="End where this text is generated. May be repeated."
    )(command)
    for name, kind, text in reversed(SAMPLING):
        declare = key_option if name in RARE_SAMPLING else click.option
        command = declare(f"--{name.replace('_', '-')}", name, type=kind, default=None, help=text)(command)
    return command


def sampling_params(values: dict[str, Any]) -> SamplingParams:
    """Return the SamplingParams of the options, and remove them from `values`."""
    given = {name: values.pop(name) for name, _, _ in SAMPLING}
    params = {name: value for name, value in given.items() if value is not None}
    params |= {name: values.pop(name) for name in ("ignore_eos", "logprobs")}
    return SamplingParams(stop=tuple(values.pop("stop")), **params)


def open_llm(values: dict[str, Any], **settings: Any) -> LLM:
    """Return the LLM that the options describe."""
    from kvarts.run.torch.llm import LLM

    settings |= offload.settings_of(values)
    llm = LLM(values["model"], options=engine_options_of(values), **settings)
    config = llm.config
    blocks = "" if llm.kv_groups == "off" else f" as {llm.num_pages:,} blocks of {llm.kv_blocks['block_bytes']:,} bytes"
    latent = ""
    if llm.latent_token_bytes is not None:
        expanded = llm.kv_bytes() // (config.num_pages * config.page_size)
    if llm.latent_token_bytes is not None and expanded > llm.latent_token_bytes:
        latent = f"; its latent is kept as keys and values, {expanded:,} bytes a token, not {llm.latent_token_bytes:,}"
    click.echo(
        f"kvarts: on {llm.device} in {llm.dtype}, attention by {llm.attention}, layers by {llm.layers} "
        f"({llm.layers_reason}), {config.num_pages:,} pages of {config.page_size} tokens in "
        f"{llm.kv_bytes() / 2**20:,.1f} MiB{blocks}{latent}",
        err=True,
    )
    return llm


class _Row(msgspec.Struct):
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None


class PromptLine(NamedTuple):
    """A line of a prompts file: its number, and its text, token ids or chat messages; or its error."""

    number: int
    prompt: str | list[int] | None
    messages: list[dict[str, Any]] | None = None
    error: KvartsError | None = None

    def tokens(self, llm: LLM, params: SamplingParams) -> list[int]:
        """Return the token ids for a model. Raise the line's error if it has one."""
        if self.error is not None:
            raise self.error
        if self.messages is not None:
            return llm.encode_chat(self.messages, params)
        assert self.prompt is not None
        return llm.encode(self.prompt, params)


HINT = 'A line is {"prompt": "some text"}, or {"messages": [{"role": "user", "content": "some text"}]}.'


def read_prompts(path: Path) -> list[PromptLine]:
    """Return the prompts of a JSONL file, or of standard input for `-`: text, token ids or messages, one per line.

    A line that cannot be read is included with its error, an InputError with file, line and field. Raise InputError if
    the file does not have a prompt.
    """
    prompts: list[PromptLine] = []
    shown = "standard input" if str(path) == "-" else path
    for number, line in enumerate(_text_of(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = msgspec.json.decode(line, type=_Row)
            if (row.prompt is None) == (row.messages is None):
                raise msgspec.DecodeError("needs either `prompt` or `messages`")
            prompts.append(PromptLine(number, row.prompt, row.messages))
        except UNDECODED as error:
            prompts.append(
                PromptLine(number, None, None, InputError(problem_of(error), path=shown, line=number, hint=HINT))
            )
    if not prompts:
        raise InputError("has no prompts", path=shown, hint=HINT)
    return prompts


def encode_prompts(
    llm: LLM, prompts: Sequence[PromptLine], params: SamplingParams, path: Path
) -> list[list[int] | KvartsError]:
    """Return the token ids of each prompt, or the error of its line, with file and line number."""
    encoded: list[list[int] | KvartsError] = []
    for prompt in prompts:
        try:
            encoded.append(prompt.tokens(llm, params))
        except ConfigError as error:
            where = f"{error.field}: {error.what}" if error.field else error.what
            shown = "standard input" if str(path) == "-" else path
            encoded.append(InputError(where, path=shown, line=prompt.number, hint=error.hint))
        except InputError as error:
            encoded.append(error)
    return encoded


def _text_of(path: Path) -> str:
    if str(path) != "-":
        return read_text(path, hint="Check the path of the prompts.")
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise InputError(f"cannot be read: {error}", path="standard input") from error
