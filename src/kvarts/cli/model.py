"""`kvarts model`: figures of models and devices, and how much fits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
import msgspec

from kvarts.cli import llm_model
from kvarts.cli.options import Command, Group, options_of, vllm_option
from kvarts.cli.process import print_json
from kvarts.config import EngineConfig
from kvarts.errors import ConfigError
from kvarts.settings import Section, given_by_flags
from kvarts.sim.hardware import DeviceSettings, ModelSettings
from kvarts.units import as_memory

if TYPE_CHECKING:
    from kvarts.hardware.fit import LocalGroup, MemoryFit, SequenceFit
    from kvarts.hardware.geometry import Geometry
    from kvarts.hardware.kv_groups import KvLayer

__all__ = ["group_values", "layers_text", "model_command", "numbers_text", "sequence_rows"]


def layers_text(geometry: Geometry) -> str:
    """Return the number of layers of each kind, by the tokens that they attend to."""
    counts: dict[str, int] = {}
    for group in geometry.kv_groups:
        what = _what(group.layer)
        counts[what] = counts.get(what, 0) + group.num_layers
    return ", ".join(f"{count} {what}" for what, count in counts.items())


def _what(layer: KvLayer) -> str:
    if layer.kind == "chunk":
        return f"that attend to chunks of {layer.span:,} tokens"
    if layer.kind == "state":
        return "that keep a state"
    if layer.kind == "none":
        return "that see one token at a time"
    seen = "all tokens" if layer.span is None else f"the last {layer.span:,} tokens"
    text = f"that attend to {seen}"
    return f"{text} in the KV of other layers" if layer.kind == "shared" else text


def numbers_text(geometry: Geometry, tensor_parallel: int, pipeline_parallel: int) -> str:
    """Return the numbers per token in the layers that keep tokens, as a product, for one device of one stage."""
    counts: dict[tuple[int, int], int] = {}
    for layer in geometry.layers:
        if layer.keeps_tokens:
            size = (layer.num_heads, layer.head_numbers)
            counts[size] = counts.get(size, 0) + 1
    terms = []
    for (heads, numbers), count in counts.items():
        text = f"{-(-count // pipeline_parallel)} layers x "
        if geometry.latent is None:
            text += f"2 x {-(-heads // tensor_parallel)} KV heads x {numbers // 2}"
        else:
            text += f"({geometry.latent.kv_rank} latent + {geometry.latent.rope_dim} rotary"
            index = numbers - geometry.latent.kv_rank - geometry.latent.rope_dim
            text += f" + {index} index)" if index else ")"
        terms.append(text)
    return terms[0] if len(terms) == 1 else f"({' + '.join(terms)})"


def group_values(group: LocalGroup) -> dict[str, Any]:
    """Return the JSON fields of a KV group."""
    layer = group.layer
    return {
        "kind": layer.kind,
        "num_layers": group.num_layers,
        "window": layer.span,
        "sink": layer.sink,
        "page_bytes": group.page_bytes,
        "state_bytes": group.state_bytes,
    }


def sequence_rows(groups: list[LocalGroup], page_size: int, sequence: SequenceFit) -> list[tuple[str, str]]:
    """Return the rows of the KV groups, of a sequence's memory, and of the number of sequences that fit."""
    rows: list[tuple[str, str]] = []
    for group, pages in zip(groups, sequence.num_pages, strict=True):
        if group.layer.kind in ("shared", "none"):
            continue
        kept = f"{group.num_layers} layers, {group.layer.kind}"
        if group.layer.span is not None:
            kept += f" {group.layer.span:,}"
        if group.layer.kind == "state":
            kept += f": {group.state_bytes:,} bytes"
        else:
            kept += f": {pages:,} pages of {group.page_bytes:,} bytes"
        rows.append(("" if rows else "KV groups", kept))
    text = f"{sequence.num_tokens:,} tokens take {sequence.num_bytes:,} bytes in pages of {page_size}"
    if sequence.full_bytes != sequence.num_bytes:
        text += f", and {sequence.full_bytes:,} if every layer keeps every token"
    rows.append(("a sequence", text))
    if sequence.num_sequences is not None:
        text = f"{sequence.num_sequences:,} fit"
        if sequence.num_full_sequences != sequence.num_sequences:
            text += f", and {sequence.num_full_sequences:,} if every layer keeps every token"
        rows.append(("", text))
    return rows


@click.group("model", cls=Group)
def model_command() -> None:
    """Models and devices: parameters, bytes of KV, and the pages that fit."""


@model_command.command("list", cls=Command)
def list_command() -> None:
    """List the models and devices that are known by name, with the sources of their figures.

    KV bytes per token are those of all layers, as if each kept every token; `kvarts model show` has the memory of
    windows and states.
    """
    from kvarts.hardware.device import device_names, load_device
    from kvarts.hardware.model_config import load_geometry, preset_names

    width = max(len(name) for name in (*preset_names(), *device_names())) + 2
    click.echo(f"{'model':<{width}}{'parameters':>12}{'weights':>12}{'KV a token':>14}  source")
    for name in preset_names():
        geometry = load_geometry(name)
        click.echo(
            f"{name:<{width}}{_in_billions(geometry.num_parameters):>12}{as_memory(geometry.weight_bytes):>12}"
            f"{geometry.kv_bytes_per_token():>8,} bytes  {geometry.source}"
        )
    click.echo()
    click.echo(f"{'device':<{width}}{'memory':>12}{'bandwidth':>12}{'16-bit':>14}  source")
    for name in device_names():
        device = load_device(name)
        click.echo(
            f"{name:<{width}}{as_memory(device.memory_bytes):>12}{device.bandwidth_bytes_per_s / 1e9:>7,.0f} GB/s"
            f"{device.tflops['bfloat16']:>8,.0f} Tflop/s  {device.source}"
        )


def _in_billions(count: int) -> str:
    return f"{count / 1e9:,.2f} B" if count < 10e9 else f"{count / 1e9:,.1f} B"


SEQUENCE_TOKENS = 32_768
"""Length of the sequence whose memory is printed by default."""

SECTIONS = (
    Section(struct=ModelSettings, title="Model and device"),
    Section(struct=DeviceSettings, title="Model and device"),
    Section(struct=EngineConfig, title="Engine"),
)
KEYS = (
    "device",
    "tensor_parallel",
    "data_parallel",
    "pipeline_parallel",
    "page_size",
    "memory_fraction",
    "weight_dtype",
    "kv_dtype",
    "max_batched_tokens",
    "max_seqs",
)


@model_command.command(
    "show", cls=Command, params=[click.Argument(["model"]), *options_of(SECTIONS, KEYS), vllm_option()]
)
@click.option(
    "--sequence-tokens", metavar="N", type=int, help="Also print the bytes of a sequence of N tokens. [32768]"
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def show_command(model: str, sequence_tokens: int | None, as_json: bool, **settings: Any) -> None:
    """Print the memory of a token, a page and a sequence, and with --device how many pages and sequences fit.

    MODEL is a name that `kvarts model list` prints, a config.json as Hugging Face models have it, or a directory with
    one.
    """
    from kvarts.hardware.device import load_device
    from kvarts.hardware.fit import fit_memory, fit_sequences, local_kv_bytes_per_token, local_kv_groups
    from kvarts.hardware.model_config import load_geometry

    given = given_by_flags(settings, SECTIONS)
    formats, on, engine = given.build(ModelSettings), given.build(DeviceSettings), given.build(EngineConfig)
    page_size, tensor_parallel, kv_dtype = engine.page_size, on.tensor_parallel, formats.kv_dtype
    try:
        geometry = load_geometry(model).stored_as(formats.weight_dtype)
        fit = None
        if on.device is not None:
            fit = fit_memory(
                geometry,
                load_device(on.device),
                page_size=page_size,
                tensor_parallel=tensor_parallel,
                data_parallel=on.data_parallel,
                pipeline_parallel=on.pipeline_parallel,
                memory_fraction=on.memory_fraction,
                kv_dtype=kv_dtype,
                max_num_batched_tokens=engine.max_num_batched_tokens,
                max_num_seqs=engine.max_num_seqs,
            )
        token_bytes = local_kv_bytes_per_token(geometry, tensor_parallel, kv_dtype, on.pipeline_parallel)
        placed: dict[str, Any] = {
            "page_size": page_size,
            "tensor_parallel": tensor_parallel,
            "pipeline_parallel": on.pipeline_parallel,
            "kv_dtype": kv_dtype,
        }
        groups = local_kv_groups(geometry, **placed)
        sequence = fit_sequences(
            geometry,
            SEQUENCE_TOKENS if sequence_tokens is None else sequence_tokens,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            memory=fit,
            **placed,
        )
    except ConfigError as error:
        raise given.named(error, (setting for section in SECTIONS for setting in section.settings)) from error
    if as_json:
        values: dict[str, Any] = {
            "model": geometry.name,
            "source": geometry.source,
            "num_parameters": geometry.num_parameters,
            "num_active_parameters": geometry.num_active_parameters,
            "weight_bytes": geometry.weight_bytes,
            "kv_bytes_per_token": token_bytes,
            "kv_bytes_per_page": token_bytes * page_size,
            "expanded_kv_bytes_per_token": geometry.expanded_kv_bytes_per_token(kv_dtype),
            "page_size": page_size,
            "layers_by_window": {str(window or "all"): count for window, count in geometry.layers_by_window.items()},
            "kv_groups": [group_values(group) for group in groups],
            "sequence": msgspec.to_builtins(sequence),
            "fit": None if fit is None else {**msgspec.to_builtins(fit), "equation": fit.equation},
        }
        print_json(values)
        return
    rows = _rows(geometry, token_bytes, page_size, on, kv_dtype, fit)
    if sequence_tokens is not None or geometry.keeps_less:
        rows += sequence_rows(groups, page_size, sequence)
    for name, text in rows:
        click.echo(f"{name:<14}{text}")


def _rows(
    geometry: Geometry,
    token_bytes: int,
    page_size: int,
    on: DeviceSettings,
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
        ("layers", layers_text(geometry)),
    ]
    if geometry.state_bytes:
        rows.append(("states", f"{geometry.state_bytes:,} bytes a sequence"))
    numbers = numbers_text(geometry, on.tensor_parallel, on.pipeline_parallel)
    rows.append(("KV a token", f"{numbers} x {kv_dtype or geometry.dtype} = {token_bytes:,} bytes"))
    expanded = geometry.expanded_kv_bytes_per_token(kv_dtype)
    if expanded is not None:
        rows.append(("", f"as a latent; {expanded:,} bytes if it is expanded to keys and values"))
    rows.append(("KV a page", f"{page_size} tokens = {page_size * token_bytes:,} bytes"))
    if geometry.has_spans:
        long = 131_072
        least, most = geometry.kv_bytes(long, kv_dtype), long * geometry.kv_bytes_per_token(kv_dtype)
        text = f"if every layer keeps every token; {long:,} tokens need {least:,} bytes with windows, not {most:,}"
        rows.append(("", text))
    if fit is not None:
        rows.append(("fits", fit.equation))
        rows.append(("", f"{fit.num_pages * page_size:,} tokens in {fit.num_pages * fit.page_bytes:,} bytes"))
    return rows


model_command.add_command(llm_model.check_command)
model_command.add_command(llm_model.tiny_command)
