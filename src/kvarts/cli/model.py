"""`kvarts model`: figures of models and devices, and how much fits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from kvarts.base.errors import ConfigError
from kvarts.base.settings import Section, given_by_flags
from kvarts.base.units import as_memory
from kvarts.cli import llm_model
from kvarts.cli.model_start import START_OPTIONS, start_settings, started
from kvarts.cli.options import INPUT, Command, Group, key_option, line_options, options_of
from kvarts.cli.process import print_json
from kvarts.core.config import EngineConfig
from kvarts.core.kv.number_formats import is_fp8, kv_bits
from kvarts.sim.hardware import WAYS, DeviceSettings, ModelSettings

if TYPE_CHECKING:
    from kvarts.core.kv.layers import KvLayer
    from kvarts.cost.hardware.fit import LocalGroup, MemoryFit, SequenceFit
    from kvarts.cost.hardware.geometry import Geometry

__all__ = ["group_values", "layers_text", "model_command", "numbers_text", "sequence_rows"]


def layers_text(geometry: Geometry) -> str:
    """Return the number of layers of each kind, by the tokens that they attend to."""
    counts: dict[str, int] = {}
    for layer in geometry.layers:
        what = _what(layer)
        counts[what] = counts.get(what, 0) + 1
    text = ", ".join(f"{count} {what}" for what, count in counts.items())
    compressed = sum(cache.every > 1 and cache.num_vectors == 1 for cache in geometry.caches)
    return f"{text}; beside them {compressed} caches of compressed tokens" if compressed else text


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


def numbers_text(geometry: Geometry, tensor_parallel: int, pipeline_parallel: int, kept: str) -> str:
    """Return what layers keep of a token as a product, for one device of one stage, with KV in the format `kept`.

    Numbers times the format where all of KV is in it; else bytes, since scales and indexers' keys have their own.
    """
    counts: dict[KvLayer, int] = {}
    for layer in (*geometry.layers, *geometry.caches):
        if layer.keeps_tokens:
            alike = msgspec.structs.replace(layer, kind="full", span=None, sink=0)
            counts[alike] = counts.get(alike, 0) + 1
    is_plain = not any(kv_bits(layer.own_dtype or kept)[1] or _is_own(layer, kept) for layer in counts)
    terms = []
    for layer, count in counts.items():
        text = f"{-(-count // pipeline_parallel)} layers x "
        if not is_plain:
            whole = layer.read_bits(kept, tensor_parallel) / 8
            index = f" + {layer.fixed_bytes} index" if layer.fixed_bytes else ""
            text += f"({float(whole - layer.fixed_bytes):,g}{index})" if index else f"{float(whole):,g}"
        elif geometry.latent is None:
            text += f"2 x {-(-layer.num_heads // tensor_parallel)} KV heads x {layer.head_numbers / 2:g}"
        else:
            text += f"({geometry.latent.kv_rank} latent + {geometry.latent.rope_dim} rotary)"
        terms.append(text)
    product = terms[0] if len(terms) == 1 else f"({' + '.join(terms)})"
    return f"{product} x {kept}" if is_plain else f"{product} bytes, {kept}"


def _is_own(layer: KvLayer, kept: str) -> bool:
    """Return whether a token takes other bytes in a layer than its numbers in the format of KV."""
    packs = layer.packed_bytes is not None and is_fp8(kept)
    return packs or layer.every > 1 or layer.fixed_bytes > 0 or layer.own_dtype is not None


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
    """List the models and devices that are known by name, with the sources of their figures, and ids of the hub.

    KV bytes per token are those of all layers, as if each kept every token; `kvarts model show` has the memory of
    windows and states.
    """
    from kvarts.cost.hardware.device import device_names, load_device
    from kvarts.cost.hardware.model_config import hub_models, load_geometry, preset_names
    from kvarts.run.model_files import MODELS

    width = max(len(name) for name in (*preset_names(), *device_names())) + 2
    click.echo(f"{'model':<{width}}{'parameters':>12}{'weights':>12}{'KV a token':>14}  source")
    for name in preset_names():
        geometry = load_geometry(name)
        click.echo(
            f"{name:<{width}}{_in_billions(geometry.num_parameters):>12}{as_memory(geometry.weight_bytes):>12}"
            f"{geometry.kv_bytes_per_token():>8,} bytes  {geometry.source}"
        )
    click.echo()
    click.echo("by the ids of their repositories, at https://huggingface.co/ID/blob/main/config.json:")
    for repository in sorted(hub_models(), key=str.lower):
        click.echo(f"  {repository}")
    click.echo()
    click.echo(f"{'device':<{width}}{'memory':>12}{'bandwidth':>12}{'16-bit':>14}  source")
    for name in device_names():
        device = load_device(name)
        click.echo(
            f"{name:<{width}}{as_memory(device.memory_bytes):>12}{device.bandwidth_bytes_per_s / 1e9:>7,.0f} GB/s"
            f"{device.tflops['bfloat16']:>8,.0f} Tflop/s  {device.source}"
        )
    click.echo()
    click.echo("downloads, with weights: `kvarts model get NAME`")
    for name, model in MODELS.items():
        click.echo(f"{name:<{width}}{model.num_bytes / 1e6:>9,.0f} MB  {model.what}")


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
    "expert_parallel",
    "pipeline_parallel",
    "page_size",
    "memory_fraction",
    "weight_dtype",
    "kv_dtype",
    "max_batched_tokens",
    "max_seqs",
)
SHOWN = ("device", "tensor_parallel", "page_size", "kv_dtype", "max_batched_tokens", "max_seqs")
"""The settings with an option of their own, among KEYS."""


@model_command.command(
    "show",
    cls=Command,
    params=[click.Argument(["model"]), *options_of(SECTIONS, KEYS, SHOWN), *START_OPTIONS, *line_options("vllm serve")],
)
@key_option("--sequence-tokens", metavar="N", type=int, help="Also print the bytes of a sequence of N tokens. [32768]")
@key_option(
    "--kv-layout",
    metavar="FILE",
    type=INPUT,
    help="What the layers of MODEL keep, where its config is not understood: a TOML file of five lines.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def show_command(
    model: str, sequence_tokens: int | None, kv_layout: str | Path | None, as_json: bool, **settings: Any
) -> None:
    """Print the memory of a token, a page and a sequence, and with --device how many pages and sequences fit.

    MODEL is a name that `kvarts model list` prints or that it has on the hub, a config.json as Hugging Face models have
    it, a directory with one (weights are not needed), or a GGUF file.
    """
    from kvarts.cost.hardware.device import load_device
    from kvarts.cost.hardware.fit import (
        check_split,
        fit_memory,
        fit_sequences,
        local_kv_bytes_per_token,
        local_kv_groups,
    )

    asked = {**settings, **start_settings(settings)}
    given = given_by_flags(settings, SECTIONS)
    formats, on, engine = given.build(ModelSettings), given.build(DeviceSettings), given.build(EngineConfig)
    page_size, tensor_parallel, kv_dtype = engine.page_size, on.tensor_parallel, formats.kv_dtype
    try:
        device = None if on.device is None else load_device(on.device)
        geometry = _geometry(model, None if kv_layout is None else Path(kv_layout), formats.weight_dtype).on(device)
        check_split(geometry, **{ways: getattr(on, ways) for ways in WAYS})
        vllm = started(geometry, device, on, asked, kv_dtype)
        fit = None
        if device is not None and vllm is None:
            fit = fit_memory(
                geometry,
                device,
                engine,
                tensor_parallel=tensor_parallel,
                data_parallel=on.data_parallel,
                pipeline_parallel=on.pipeline_parallel,
                memory_fraction=on.memory_fraction,
                kv_dtype=kv_dtype,
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
            "num_parameters": geometry.num_parameters if geometry.counts_weights else None,
            "num_active_parameters": geometry.num_active_parameters if geometry.counts_weights else None,
            "weight_bytes": geometry.weight_bytes,
            "weight_dtype": geometry.weight_dtype,
            "expert_dtype": geometry.expert_dtype,
            "kv_dtype": geometry.kept_as(kv_dtype),
            "notes": list(geometry.notes),
            "kv_bytes_per_token": token_bytes,
            "kv_bytes_per_page": token_bytes * page_size,
            "expanded_kv_bytes_per_token": geometry.expanded_kv_bytes_per_token(kv_dtype),
            "page_size": page_size,
            "layers_by_window": {str(window or "all"): count for window, count in geometry.layers_by_window.items()},
            "kv_groups": [group_values(group) for group in groups],
            "sequence": msgspec.to_builtins(sequence),
            "fit": None if fit is None else {**msgspec.to_builtins(fit), "equation": fit.equation},
        }
        if vllm is not None:
            values["vllm"] = vllm.values()
        print_json(values)
        return
    rows = _rows(geometry, token_bytes, page_size, on, kv_dtype, fit)
    if sequence_tokens is not None or geometry.keeps_less:
        rows += sequence_rows(groups, page_size, sequence)
    if vllm is not None:
        rows += vllm.rows()
    for name, text in rows:
        click.echo(f"{name:<14}{text}")


def _geometry(model: str, kv_layout: Path | None, weight_dtype: str | None) -> Geometry:
    from kvarts.cost.hardware.layout_file import EXAMPLE, load_layout
    from kvarts.cost.hardware.model_config import LAYOUT_HINT, load_geometry

    if kv_layout is not None:
        return load_layout(model, kv_layout).stored_as(weight_dtype)
    try:
        if (path := Path(model)).suffix == ".gguf" and path.is_file():
            from kvarts.run.torch.gguf_sizes import geometry_of_gguf

            return geometry_of_gguf(path).stored_as(weight_dtype)
        return load_geometry(model, weight_dtype)
    except ConfigError as error:
        if error.hint is not None and LAYOUT_HINT in error.hint:
            lines = " | ".join(line.strip() for line in EXAMPLE.splitlines())
            hint = f"{error.hint} It has five lines, such as: {lines}"
            raise ConfigError(error.what, path=error.path, field=error.field, hint=hint) from error
        raise


def _rows(
    geometry: Geometry,
    token_bytes: int,
    page_size: int,
    on: DeviceSettings,
    kv_dtype: str | None,
    fit: MemoryFit | None,
) -> list[tuple[str, str]]:
    parameters = f"{geometry.num_parameters:,}" if geometry.counts_weights else "not known"
    if geometry.experts is not None:
        parameters += f", {geometry.num_active_parameters:,} of them for a token"
    rows = [
        ("model", f"{geometry.name} ({geometry.source})"),
        ("parameters", parameters),
        ("weights", f"{geometry.weight_bytes:,} bytes"),
        ("layers", layers_text(geometry)),
    ]
    rows[1:1] = [("note", note) for note in geometry.notes]
    if geometry.state_bytes:
        rows.append(("states", f"{geometry.state_bytes:,} bytes a sequence"))
    numbers = numbers_text(geometry, on.tensor_parallel, on.pipeline_parallel, geometry.kept_as(kv_dtype))
    rows.append(("KV a token", f"{numbers} = {token_bytes:,} bytes"))
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
model_command.add_command(llm_model.get_command)
model_command.add_command(llm_model.tiny_command)
