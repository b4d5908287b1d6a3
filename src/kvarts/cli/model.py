"""`kvarts model`: what models are, and how they fit devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
import msgspec

from kvarts.cli import llm_tiny
from kvarts.cli.printing import print_json

if TYPE_CHECKING:
    from kvarts.hardware import Geometry, MemoryFit

__all__ = ["model_command"]


@click.group("model")
def model_command() -> None:
    """Models and devices: parameters, bytes of KV, and the pages that fit."""


@model_command.command("list")
def list_command() -> None:
    """List the models and devices that are known by name, with where their figures are from."""
    from kvarts.hardware.device import device_names, load_device
    from kvarts.hardware.geometry import load_geometry, preset_names

    for name in preset_names():
        click.echo(f"{name:<16}{load_geometry(name).source}")
    click.echo()
    for name in device_names():
        click.echo(f"{name:<16}{load_device(name).source}")


@model_command.command("show")
@click.argument("model")
@click.option("--device", metavar="NAME", help="Say what fits this device: see `kvarts model list`.")
@click.option("--tensor-parallel", metavar="N", type=click.IntRange(min=1), default=1, show_default=True,
              help="Devices it is split over.")  # fmt: skip
@click.option("--page-size", metavar="TOKENS", type=click.IntRange(min=1), default=16, show_default=True,
              help="Tokens a page.")  # fmt: skip
@click.option("--memory-fraction", metavar="X", type=float, default=0.9, show_default=True,
              help="How much of the device may be used.")  # fmt: skip
@click.option("--weight-dtype", metavar="DTYPE", help="Number format of weights. [that of the model]")
@click.option("--kv-dtype", metavar="DTYPE", help="Number format of KV. [that of the model]")
@click.option("--max-batched-tokens", metavar="TOKENS", type=click.IntRange(min=1), default=8192, show_default=True,
              help="Tokens a step may compute.")  # fmt: skip
@click.option("--max-seqs", metavar="N", type=click.IntRange(min=1), default=256, show_default=True,
              help="Requests that may run at once.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def show_command(
    model: str,
    device: str | None,
    tensor_parallel: int,
    page_size: int,
    memory_fraction: float,
    weight_dtype: str | None,
    kv_dtype: str | None,
    max_batched_tokens: int,
    max_seqs: int,
    as_json: bool,
) -> None:
    """Print what a token and a page take, and with --device how many pages fit.

    MODEL is a name that `kvarts model list` knows, a config.json as Hugging Face models have it, or the directory that
    holds one.
    """
    from kvarts.hardware import fit_memory, load_device, load_geometry
    from kvarts.hardware.fit import local_kv_bytes_per_token

    geometry = load_geometry(model).stored_as(weight_dtype)
    fit = None
    if device is not None:
        fit = fit_memory(
            geometry,
            load_device(device),
            page_size=page_size,
            tensor_parallel=tensor_parallel,
            memory_fraction=memory_fraction,
            kv_dtype=kv_dtype,
            max_num_batched_tokens=max_batched_tokens,
            max_num_seqs=max_seqs,
        )
    token_bytes = local_kv_bytes_per_token(geometry, tensor_parallel, kv_dtype)
    if as_json:
        values: dict[str, Any] = {
            "model": geometry.name,
            "source": geometry.source,
            "num_parameters": geometry.num_parameters,
            "num_active_parameters": geometry.num_active_parameters,
            "weight_bytes": geometry.weight_bytes,
            "kv_bytes_per_token": token_bytes,
            "kv_bytes_per_page": token_bytes * page_size,
            "page_size": page_size,
            "layers_by_window": {str(window or "all"): count for window, count in geometry.layers_by_window.items()},
            "fit": None if fit is None else {**msgspec.to_builtins(fit), "equation": fit.equation},
        }
        print_json(values)
        return
    for name, text in _rows(geometry, token_bytes, page_size, tensor_parallel, kv_dtype, fit):
        click.echo(f"{name:<14}{text}")


def _rows(
    geometry: Geometry,
    token_bytes: int,
    page_size: int,
    tensor_parallel: int,
    kv_dtype: str | None,
    fit: MemoryFit | None,
) -> list[tuple[str, str]]:
    parameters = f"{geometry.num_parameters:,}"
    if geometry.experts is not None:
        parameters += f", {geometry.num_active_parameters:,} of them for a token"
    rows = [
        ("model", f"{geometry.name} ({geometry.source})"),
        ("parameters", parameters),
        ("weights", f"{geometry.weight_bytes:,} bytes"),
        ("layers", ", ".join(_layers(window, count) for window, count in geometry.layers_by_window.items())),
    ]
    numbers = f"{geometry.num_layers} layers x "
    if geometry.latent is None:
        heads = -(-geometry.num_kv_heads // tensor_parallel)
        numbers += f"2 x {heads} KV heads x {geometry.head_dim}"
    else:
        numbers += f"({geometry.latent.kv_rank} latent + {geometry.latent.rope_dim} rotary)"
    rows.append(("KV a token", f"{numbers} x {kv_dtype or geometry.dtype} = {token_bytes:,} bytes"))
    rows.append(("KV a page", f"{page_size} tokens = {page_size * token_bytes:,} bytes"))
    if len(geometry.layers_by_window) > 1 or None not in geometry.layers_by_window:
        long = 131_072
        least, most = geometry.kv_bytes(long, kv_dtype), long * geometry.kv_bytes_per_token(kv_dtype)
        text = f"if every layer keeps every token; {long:,} tokens need {least:,} bytes with windows, not {most:,}"
        rows.append(("", text))
    if fit is not None:
        rows.append(("fits", fit.equation))
        rows.append(("", f"{fit.num_pages * page_size:,} tokens in {fit.num_pages * fit.page_bytes:,} bytes"))
    return rows


def _layers(window: int | None, count: int) -> str:
    return f"{count} that attend to {'all tokens' if window is None else f'the last {window:,} tokens'}"


model_command.add_command(llm_tiny.tiny_command)
