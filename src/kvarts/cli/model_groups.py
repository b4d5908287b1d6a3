"""KV groups of a model, and the memory of a sequence in them, for `kvarts model show`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvarts.hardware import Geometry
    from kvarts.hardware.kv_groups import KvLayer
    from kvarts.hardware.sequences import LocalGroup, SequenceFit

__all__ = ["group_values", "layers_text", "numbers_text", "sequence_rows"]


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
