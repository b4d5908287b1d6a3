"""`--vllm-args`: an argument line of `vllm serve`, in the settings of kvarts. Names are those of vLLM 0.32."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

import click
import msgspec

from kvarts.base.errors import ConfigError, did_you_mean
from kvarts.base.files import read_text

__all__ = ["KEYS", "NAME", "options_of_vllm", "settings_of_line"]

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
    "spec-tokens": "speculative_tokens",
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

SHORT = {
    "sc": "speculative-config",
    "tp": "tensor-parallel-size",
    "pp": "pipeline-parallel-size",
    "dp": "data-parallel-size",
    "q": "quantization",
}

OPTIONS_FILE = Path(__file__).with_name("vllm_options.json")


@cache
def options_of_vllm() -> dict[str, tuple[str, ...]]:
    """Return the names of all options of `vllm serve` 0.32, without dashes: `flags`, `values`, and `several` values."""
    found = msgspec.json.decode(OPTIONS_FILE.read_bytes())
    return {kind: tuple(found[kind]) for kind in ("flags", "values", "several")}


def settings_of_line(
    text: str, knows: Callable[[str], bool], *, has_model: bool = False, say: Callable[[str], object] = click.echo
) -> list[tuple[str, str]]:
    """Return the keys and values of an argument line of `vllm serve`, or of the file that `text` names with `@`.

    `knows`: whether the command has a key. `has_model`: the command has a model of its own. Names without effect here
    are passed to `say`. Raise UsageError for a name or value that is not known, MissingFileError or InputError for the
    file.
    """
    words = _words(text)
    found: list[tuple[str, str]] = []
    idle: list[str] = []
    theirs = options_of_vllm()
    while words:
        word = words.pop()
        name, equals, value = word.partition("=")
        if not name.startswith("-"):
            found.append(("model", word))
            continue
        option = name.lstrip("-").replace("_", "-")
        option = SHORT.get(option, option)
        if option == "enable-expert-parallel":
            raise click.UsageError(
                f"Invalid value for '{NAME}': {name} has no number; leave it out, and give --set expert_parallel=N."
            )
        if option in FLAGS:
            given = FLAGS[option]
            found += [] if given is None else [given]
            continue
        if option in theirs["flags"]:
            idle.append(name)
            continue
        if option not in theirs["values"] and option not in theirs["several"]:
            raise _unknown(name, option)
        if not equals:
            if not words:
                raise click.UsageError(f"Invalid value for '{NAME}': {name} needs a value.")
            value = words.pop()
        while option in theirs["several"] and words and not words[-1].startswith("-"):
            words.pop()
        if value in DEFAULTS.get(option, ()):
            continue
        if option == "speculative-config":
            found.append((KEYS["spec-tokens"], _drafted(value)))
        elif option in KEYS:
            found.append((KEYS[option], value))
        elif option in DEFAULTS:
            choices = ", ".join(DEFAULTS[option])
            raise click.UsageError(f"Invalid value for '{NAME}': {name} {value} is not known. Use one of {choices}.")
        else:
            idle.append(name)
    if has_model:
        found = [(key, value) for key, value in found if key != "model"]
    idle += [_spelled(key) for key, _ in found if not knows(key) and key not in ANYWAY]
    if idle:
        say(f"kvarts: {NAME}: without effect here: {', '.join(idle)}")
    return [(key, value) for key, value in found if knows(key)]


def _words(text: str) -> list[str]:
    """Return the words of an argument line or its file, without `vllm serve`, the last first."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError("is not text in UTF-8", field=NAME) from None
    if text.startswith("@"):
        text = read_text(Path(text[1:]), hint=f"Check the path of {NAME}.")
    try:
        words = shlex.split(text.replace("\\\n", " "))
    except ValueError as error:
        raise click.UsageError(f"Invalid value for '{NAME}': {error}.") from None
    return (words[2:] if words[:2] == ["vllm", "serve"] else words)[::-1]


def _spelled(key: str) -> str:
    names: Mapping[str, str] = {key: name for name, key in KEYS.items()}
    flags = {given[0]: name for name, given in FLAGS.items() if given is not None}
    return f"--{names.get(key) or flags[key]}"


def _unknown(name: str, option: str) -> click.UsageError:
    known: Sequence[str] = [name for names in options_of_vllm().values() for name in names]
    close = did_you_mean(option, known)
    return click.UsageError(f"Invalid value for '{NAME}': vllm serve's {name} is not known here. {close}".rstrip())


def _drafted(text: str) -> str:
    """Return the number of drafted tokens in the JSON of a speculative configuration."""
    try:
        return str(msgspec.json.decode(text, type=dict[str, object])["num_speculative_tokens"])
    except (msgspec.DecodeError, KeyError):
        raise click.UsageError(
            f"Invalid value for '{NAME}': --speculative-config {text} is no JSON object with num_speculative_tokens."
        ) from None
