"""Options of the commands that run real models."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from kvarts.cli import offload_llm
from kvarts.cli.engine_options import MODEL_HELP, SAMPLING, engine_options
from kvarts.errors import ConfigError, InputError
from kvarts.files import read_text
from kvarts.sampling import SamplingParams

if TYPE_CHECKING:
    from kvarts.llm.llm import LLM

__all__ = [
    "llm_options",
    "need_torch",
    "open_llm",
    "read_prompts",
    "sampling_options",
    "sampling_params",
]

Command = Callable[..., None]


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
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
            raise InputError(str(error), path=path, line=number, hint='A line is {"prompt": "some text"}.') from error
    if not prompts:
        raise InputError("has no prompts", path=path, hint='A line is {"prompt": "some text"}.')
    return prompts
