"""`--vllm-args`: an argument line of `vllm serve`, in the settings of kvarts. Names are those of vLLM 0.32."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import click

from kvarts.base.errors import ConfigError, MissingFileError, did_you_mean

__all__ = ["IGNORED", "KEYS", "NAME", "settings_of_line"]

NAME = "--vllm-args"

KEYS = {
    "model": "model",
    "max-num-batched-tokens": "max_batched_tokens",
    "max-num-seqs": "max_seqs",
    "block-size": "page_size",
    "gpu-memory-utilization": "memory_fraction",
    "num-gpu-blocks-override": "pages",
    "kv-cache-memory-bytes": "kv_memory",
    "tensor-parallel-size": "tensor_parallel",
    "pipeline-parallel-size": "pipeline_parallel",
    "data-parallel-size": "data_parallel",
    "kv-cache-dtype": "kv_dtype",
    "quantization": "weight_dtype",
    "long-prefill-token-threshold": "long_prefill_token_threshold",
    "mamba-cache-mode": "mamba_cache_mode",
    "max-model-len": "max_model_len",
}
"""Options with a value, and the keys of settings with the same meaning and values."""

FLAGS = {
    "no-enable-prefix-caching": ("no_prefix_caching", "true"),
    "enable-prefix-caching": None,
    "async-scheduling": ("async_scheduling", "true"),
    "no-async-scheduling": ("no_async_scheduling", "true"),
    "enable-chunked-prefill": None,
}
"""Options without a value, and the settings that they give; None: what kvarts does anyway."""

ANYWAY = ("no_async_scheduling",)
"""Keys of what kvarts does anyway, in commands that do not have them."""

DEFAULTS = {"dtype": ("auto", "bfloat16", "float16", "half"), "scheduling-policy": ("fcfs", "priority"),
            "kv-cache-dtype": ("auto",)}  # fmt: skip
"""Options that give no setting with these values, which are what kvarts does anyway."""

SHORT = {"tp": "tensor-parallel-size", "pp": "pipeline-parallel-size", "dp": "data-parallel-size", "q": "quantization"}

IGNORED = frozenset(
    {
        "host", "port", "api-key", "served-model-name", "chat-template", "tokenizer", "tokenizer-mode", "download-dir",
        "load-format", "revision", "seed", "uvicorn-log-level", "max-log-len", "tool-call-parser", "reasoning-parser",
        "ssl-keyfile", "ssl-certfile", "root-path", "api-server-count", "distributed-executor-backend",
    }
)  # fmt: skip
"""Options with a value that concern neither memory nor scheduling."""

IGNORED_FLAGS = frozenset(
    {
        "trust-remote-code", "enforce-eager", "disable-log-requests", "disable-log-stats", "enable-auto-tool-choice",
        "enable-log-requests", "enable-request-id-headers", "disable-uvicorn-access-log",
    }
)  # fmt: skip
"""Options without a value that concern neither memory nor scheduling."""


def settings_of_line(
    text: str, knows: Callable[[str], bool], *, has_model: bool = False, say: Callable[[str], object] = click.echo
) -> list[tuple[str, str]]:
    """Return the keys and values of an argument line of `vllm serve`, or of the file that `text` names with `@`.

    `knows`: whether the command has a key. `has_model`: the command has a model of its own. Names without effect here
    are passed to `say`. Raise UsageError for a name or value that is not known, MissingFileError for the file.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError("is not text in UTF-8", field=NAME) from None
    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise MissingFileError("cannot be read", path=text[1:], hint=f"Check the path of {NAME}.") from error
    try:
        words = shlex.split(text.replace("\\\n", " "))
    except ValueError as error:
        raise click.UsageError(f"Invalid value for '{NAME}': {error}.") from None
    words = words[2:] if words[:2] == ["vllm", "serve"] else words
    found: list[tuple[str, str]] = []
    idle: list[str] = []
    place = 0
    while place < len(words):
        name, equals, value = words[place].partition("=")
        place += 1
        if not name.startswith("-"):
            found.append(("model", words[place - 1]))
            continue
        option = name.lstrip("-").replace("_", "-")
        option = SHORT.get(option, option)
        if option in FLAGS:
            given = FLAGS[option]
            found += [] if given is None else [given]
            continue
        if option in IGNORED_FLAGS:
            idle.append(name)
            continue
        if option not in {*KEYS, *DEFAULTS, *IGNORED, "enable-expert-parallel"}:
            raise _unknown(name, option)
        if option == "enable-expert-parallel":
            raise click.UsageError(
                f"Invalid value for '{NAME}': {name} has no number; leave it out, and give --set expert_parallel=N."
            )
        if not equals:
            if place == len(words):
                raise click.UsageError(f"Invalid value for '{NAME}': {name} needs a value.")
            value = words[place]
            place += 1
        if option in IGNORED:
            idle.append(name)
        elif value not in DEFAULTS.get(option, ()):
            if option not in KEYS:
                choices = ", ".join(DEFAULTS[option])
                raise click.UsageError(
                    f"Invalid value for '{NAME}': {name} {value} is not known. Use one of {choices}."
                )
            found.append((KEYS[option], value))
    if has_model:
        found = [(key, value) for key, value in found if key != "model"]
    idle += [_spelled(key) for key, _ in found if not knows(key) and key not in ANYWAY]
    if idle:
        say(f"kvarts: {NAME}: without effect here: {', '.join(idle)}")
    return [(key, value) for key, value in found if knows(key)]


def _spelled(key: str) -> str:
    names: Mapping[str, str] = {key: name for name, key in KEYS.items()}
    flags = {given[0]: name for name, given in FLAGS.items() if given is not None}
    return f"--{names.get(key) or flags[key]}"


def _unknown(name: str, option: str) -> click.UsageError:
    known: Sequence[str] = [*KEYS, *FLAGS, *DEFAULTS, *IGNORED, *IGNORED_FLAGS]
    close = did_you_mean(option, known)
    return click.UsageError(f"Invalid value for '{NAME}': vllm serve's {name} is not known here. {close}".rstrip())
