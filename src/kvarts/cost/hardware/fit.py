"""The number of KV pages, and of sequences of a given length, that fit on a device together with a model."""

from __future__ import annotations

from fractions import Fraction

import msgspec

from kvarts.base.errors import ConfigError
from kvarts.base.limits import check_whole
from kvarts.core.config import EngineConfig
from kvarts.core.kv.layers import KvLayer
from kvarts.core.kv.number_formats import dtype_bits, whole_bytes
from kvarts.cost.hardware.device import Device
from kvarts.cost.hardware.geometry import Geometry

__all__ = [
    "LocalGroup",
    "MemoryFit",
    "SequenceFit",
    "check_split",
    "draft_bytes_per_token",
    "fit_memory",
    "fit_sequences",
    "local_kv_bytes_per_token",
    "local_kv_groups",
    "local_layer_bytes_per_token",
    "local_state_bytes",
    "local_weight_bytes",
    "sequence_bytes",
]

CONTEXT_BYTES = 512 << 20
"""Bytes that the driver, the libraries and the allocator occupy on a device."""


class MemoryFit(msgspec.Struct, frozen=True):
    """Memory of one device, in bytes: pages = (fraction of memory - weights - activations - context - states) / page.

    `kv_bytes`: memory left for KV and states. `state_bytes`: states of the maximum number of running sequences; 0 for
    models without states.
    """

    num_pages: int
    page_bytes: int
    memory_bytes: int
    memory_fraction: float
    weight_bytes: int
    activation_bytes: int
    context_bytes: int
    kv_bytes: int
    state_bytes: int = 0

    @property
    def equation(self) -> str:
        """The computation of `num_pages` as text, in GiB."""
        gib = [
            f"{value / 2**30:.2f}"
            for value in (self.memory_bytes, self.weight_bytes, self.activation_bytes, self.context_bytes)
        ]
        states = f" - {self.state_bytes / 2**30:.2f} states" if self.state_bytes else ""
        return (
            f"({self.memory_fraction:g} x {gib[0]} memory - {gib[1]} weights - {gib[2]} activations - "
            f"{gib[3]} context{states}) GiB / {self.page_bytes:,} bytes = {self.num_pages:,} pages"
        )


def check_split(
    geometry: Geometry,
    *,
    tensor_parallel: int = 1,
    data_parallel: int = 1,
    expert_parallel: int = 1,
    pipeline_parallel: int = 1,
) -> None:
    """Raise ConfigError, with the field, if engines would refuse to divide a model in these ways.

    Heads are divided evenly; KV heads evenly, or each is on the same number of devices. With weights in fp8, a device
    has whole blocks of numbers that share a scale (vLLM 0.32, quantization/utils/fp8_utils.py).
    """
    hint = "Engines refuse that, too: give a divisor of the number of heads."
    if geometry.num_heads % tensor_parallel:
        heads = geometry.num_heads
        raise ConfigError(
            f"{tensor_parallel} devices cannot share the {heads} attention heads of {geometry.name} evenly",
            field="tensor_parallel",
            hint=hint,
        )
    for heads in sorted({layer.num_heads for layer in geometry.layers if layer.attends and layer.kind != "latent"}):
        if heads > 1 and heads % tensor_parallel and tensor_parallel % heads:
            raise ConfigError(
                f"{tensor_parallel} devices cannot share the {heads} KV heads of {geometry.name} evenly",
                field="tensor_parallel",
                hint=hint,
            )
    every = tensor_parallel * data_parallel
    if expert_parallel > 1 and geometry.experts is None:
        raise ConfigError(f"{geometry.name} has no experts", field="expert_parallel")
    if expert_parallel > 1 and expert_parallel != every:
        raise ConfigError(
            f"must be 1 or {every}, got {expert_parallel}",
            field="expert_parallel",
            hint="Experts are divided over all devices of all ranks: tensor_parallel x data_parallel.",
        )
    if pipeline_parallel > geometry.num_layers:
        raise ConfigError(
            f"must be at most {geometry.num_layers}, the layers of {geometry.name}, got {pipeline_parallel}",
            field="pipeline_parallel",
        )
    if geometry.fp8_block is not None:
        _check_blocks(geometry, min(geometry.fp8_block), tensor_parallel, every if expert_parallel == 1 else 1)


def _check_blocks(geometry: Geometry, block: int, tensor_parallel: int, expert_ways: int) -> None:
    experts, latent = geometry.experts, geometry.latent
    widths = {
        "attention output": (geometry.num_heads * (latent.v_dim if latent else geometry.head_dim), tensor_parallel)
    }
    if geometry.num_dense_layers and geometry.weight_dtype == "fp8-block":
        widths["feed-forward"] = (geometry.intermediate_size, tensor_parallel)
    if experts is not None and geometry.expert_dtype == "fp8-block":
        widths["expert"] = (experts.intermediate_size, expert_ways)
        if experts.shared_size:
            widths["shared expert"] = (experts.shared_size, tensor_parallel)
    for what, (width, ways) in widths.items():
        if ways > 1 and (width % ways or width // ways % block):
            raise ConfigError(
                f"{ways} devices leave {width / ways:g} of the {width:,} numbers of {geometry.name}'s {what} width, "
                f"and its fp8 weights have a scale per {block}",
                field="tensor_parallel",
                hint="vLLM refuses that: use fewer devices per split, or divide whole experts (expert_parallel).",
            )


def local_kv_bytes_per_token(
    geometry: Geometry, tensor_parallel: int = 1, kv_dtype: str | None = None, pipeline_parallel: int = 1
) -> int:
    """Return the bytes of KV per token on one of `tensor_parallel` devices, if every layer keeps every token.

    KV heads are split over the devices, with at least one per device; latent KV is replicated on each device. With
    `pipeline_parallel` stages, this is for the stage with the most layers.
    """
    kept = geometry.kept_as(kv_dtype)
    total = whole_bytes(sum((group.token_bits(kept, tensor_parallel) for group in geometry.kv_groups), Fraction(0)))
    if pipeline_parallel > 1:
        total = total * -(-geometry.num_layers // pipeline_parallel) // geometry.num_layers
    return total


def draft_bytes_per_token(geometry: Geometry, tensor_parallel: int = 1, kv_dtype: str | None = None) -> int:
    """Return the bytes of KV per token that a layer keeps that drafts, on one of `tensor_parallel` devices."""
    if geometry.draft is None:
        return 0
    return whole_bytes(geometry.draft.read_bits(geometry.kept_as(kv_dtype), tensor_parallel))


def local_layer_bytes_per_token(
    geometry: Geometry, layer: KvLayer, tensor_parallel: int = 1, kv_dtype: str | None = None
) -> float:
    """Return the bytes that an attending layer reads per token on one of `tensor_parallel` devices."""
    return float(layer.read_bits(geometry.kept_as(kv_dtype), tensor_parallel) / 8)


def local_weight_bytes(
    geometry: Geometry, tensor_parallel: int = 1, data_parallel: int = 1, pipeline_parallel: int = 1
) -> int:
    """Return the bytes of weights on one device.

    Experts are divided over all devices of all `data_parallel` ranks, all other weights over the devices of a rank.
    """
    if data_parallel == 1:
        return -(-geometry.weight_bytes // (tensor_parallel * pipeline_parallel))
    experts = geometry.expert_bytes
    common = -(-(geometry.weight_bytes - experts) // (tensor_parallel * pipeline_parallel))
    return common + -(-experts // (tensor_parallel * data_parallel * pipeline_parallel))


def local_state_bytes(
    geometry: Geometry, num_sequences: int, tensor_parallel: int = 1, pipeline_parallel: int = 1
) -> int:
    """Return the bytes of states on one device. They are reserved for `num_sequences` sequences, outside pages."""
    return -(-num_sequences * geometry.state_bytes // (tensor_parallel * pipeline_parallel))


def fit_memory(
    geometry: Geometry,
    device: Device,
    engine: EngineConfig,
    *,
    memory_fraction: float,
    tensor_parallel: int = 1,
    data_parallel: int = 1,
    pipeline_parallel: int = 1,
    kv_dtype: str | None = None,
    num_draft_layers: int = 0,
    states_in_pool: bool = False,
) -> MemoryFit:
    """Return the number of pages of `engine` that fit. Raise ConfigError if none fits besides the weights.

    `states_in_pool`: states take blocks as requests run, as in vLLM; else they are set aside for `max_num_seqs`.
    Activations are an estimate; an engine measures its real needs. Per token of a step: the residual stream twice,
    queries, and the widest feed-forward layer with its gate. Per sequence: its logits in 32 bits, twice.
    """
    ways = {
        "tensor_parallel": tensor_parallel,
        "data_parallel": data_parallel,
        "pipeline_parallel": pipeline_parallel,
    }
    for field, count in ways.items():
        if count < 1:
            raise ConfigError(f"must be at least 1, got {count}", field=field)
    if not 0.0 < memory_fraction <= 1.0:
        raise ConfigError(f"must be above 0 and at most 1, got {memory_fraction}", field="memory_fraction")
    page_size, max_num_seqs = engine.page_size, engine.max_num_seqs
    number_bytes = float(dtype_bits(geometry.dtype, field="dtype")) / 8
    width = geometry.intermediate_size
    if geometry.experts is not None:
        width = max(
            width if geometry.num_dense_layers else 0,
            geometry.experts.per_token * geometry.experts.intermediate_size + geometry.experts.shared_size,
        )
    split = (geometry.num_heads * geometry.head_dim + 3 * width) / tensor_parallel
    activation_bytes = round(engine.max_num_batched_tokens * (2 * geometry.hidden_size + split) * number_bytes)
    activation_bytes += 2 * 4 * max_num_seqs * geometry.vocab_size // tensor_parallel
    weight_bytes = local_weight_bytes(geometry, **ways)
    page_bytes = page_size * local_kv_bytes_per_token(geometry, tensor_parallel, kv_dtype, pipeline_parallel)
    if num_draft_layers:
        weight_bytes += -(-weight_bytes * num_draft_layers // geometry.num_layers)
        page_bytes += page_size * num_draft_layers * draft_bytes_per_token(geometry, tensor_parallel, kv_dtype)
    kv_bytes = int(memory_fraction * device.memory_bytes) - weight_bytes - activation_bytes - CONTEXT_BYTES
    state_bytes = 0
    if not states_in_pool:
        state_bytes = local_state_bytes(geometry, max_num_seqs, tensor_parallel, pipeline_parallel)
    fit = MemoryFit(
        max(0, (kv_bytes - state_bytes) // page_bytes),
        page_bytes,
        device.memory_bytes,
        memory_fraction,
        weight_bytes,
        activation_bytes,
        CONTEXT_BYTES,
        max(0, kv_bytes),
        state_bytes,
    )
    if not fit.num_pages:
        hint = "Use a larger device, more of them (tensor_parallel), or a smaller model."
        if state_bytes:
            hint = f"{hint} States are set aside for {max_num_seqs} sequences (max_seqs)."
        raise ConfigError(f"{geometry.name} does not fit {device.name}: {fit.equation}", field="device", hint=hint)
    return fit


class LocalGroup(msgspec.Struct, frozen=True):
    """A KV group on one device: bytes per page, and bytes of a sequence's states, over all of its layers."""

    layer: KvLayer
    num_layers: int
    page_bytes: int
    state_bytes: int


class SequenceFit(msgspec.Struct, frozen=True):
    """A sequence of `num_tokens` tokens on one device, while its last token is computed.

    `num_pages`: pages per group. `full_bytes`: bytes if every layer kept every token, as replays count it.
    `num_sequences`: sequences that fit while one of them is computed in steps of the maximum size, since pages that
    leave a window are kept until the step ends; `num_full_sequences`: the same in pages with every layer. Both are None
    without a memory.
    """

    num_tokens: int
    num_pages: tuple[int, ...]
    num_bytes: int
    full_bytes: int
    num_sequences: int | None
    num_full_sequences: int | None


def local_kv_groups(
    geometry: Geometry,
    *,
    page_size: int,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    kv_dtype: str | None = None,
) -> list[LocalGroup]:
    """Return the KV groups on one device, in the order of the geometry.

    KV heads and states are split over the devices, latent KV is replicated on each. With `pipeline_parallel` stages,
    this is for the stage with the most layers, with its share of every group.
    """
    kept = geometry.kept_as(kv_dtype)
    stage = Fraction(-(-geometry.num_layers // pipeline_parallel), geometry.num_layers)
    return [
        LocalGroup(
            layer=group.layer,
            num_layers=group.num_layers,
            page_bytes=whole_bytes(page_size * group.token_bits(kept, tensor_parallel) * stage),
            state_bytes=whole_bytes(Fraction(8 * group.num_layers * group.layer.state_bytes, tensor_parallel) * stage),
        )
        for group in geometry.kv_groups
    ]


def sequence_bytes(groups: list[LocalGroup], num_tokens: int, page_size: int, num_new: int = 1) -> int:
    """Return the bytes of a sequence while the last `num_new` of its `num_tokens` tokens are computed."""
    if not num_tokens:
        return 0
    return sum(
        group.state_bytes + group.page_bytes * group.layer.num_pages(num_tokens, page_size, num_new) for group in groups
    )


def fit_sequences(
    geometry: Geometry,
    num_tokens: int,
    *,
    page_size: int,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    kv_dtype: str | None = None,
    max_num_batched_tokens: int = 1,
    memory: MemoryFit | None = None,
) -> SequenceFit:
    """Return the memory of a sequence, and how many fit in `memory`. Raise ConfigError for invalid values."""
    check_whole(num_tokens, "sequence_tokens")
    if page_size < 1:
        raise ConfigError(f"must be at least 1, got {page_size}", field="page_size")
    groups = local_kv_groups(
        geometry,
        page_size=page_size,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        kv_dtype=kv_dtype,
    )
    num_bytes = sequence_bytes(groups, num_tokens, page_size)
    all_pages = -(-num_tokens // page_size)
    num_sequences = num_full = None
    if memory is not None:
        of_step = sequence_bytes(groups, num_tokens, page_size, max_num_batched_tokens) - num_bytes
        num_sequences = max(0, (memory.kv_bytes - of_step) // num_bytes)
        num_full = memory.num_pages // all_pages
    return SequenceFit(
        num_tokens=num_tokens,
        num_pages=tuple(group.layer.num_pages(num_tokens, page_size) for group in groups),
        num_bytes=num_bytes,
        full_bytes=sum(group.page_bytes * all_pages + group.state_bytes for group in groups),
        num_sequences=num_sequences,
        num_full_sequences=num_full,
    )
