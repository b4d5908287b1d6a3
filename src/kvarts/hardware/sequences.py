"""What a sequence of a given length takes in each KV group, and how many such sequences fit."""

from __future__ import annotations

from fractions import Fraction

import msgspec

from kvarts.errors import ConfigError
from kvarts.hardware.dtypes import dtype_bits
from kvarts.hardware.fit import MemoryFit
from kvarts.hardware.geometry import Geometry, whole_bytes
from kvarts.hardware.kv_groups import KvLayer
from kvarts.limits import check_whole

__all__ = ["LocalGroup", "SequenceFit", "fit_sequences", "local_kv_groups", "sequence_bytes"]


class LocalGroup(msgspec.Struct, frozen=True):
    """A KV group on one device: the bytes of a page, or of the states of a sequence, in all of its layers."""

    layer: KvLayer
    num_layers: int
    page_bytes: int
    state_bytes: int


class SequenceFit(msgspec.Struct, frozen=True):
    """A sequence of `num_tokens` tokens on one device, while its last token is computed.

    `num_pages`: for each group. `full_bytes`: if every layer kept every token, as a replay counts it.
    `num_sequences`: how many fit while one of them is computed in steps as large as they may be, since what leaves a
    window is kept until its step ends; `num_full_sequences`: in pages with every layer. None without a memory.
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

    KV heads and states are split over the devices, latent KV is kept whole on each. Of `pipeline_parallel` stages, the
    one with the most layers counts, with its part of every group.
    """
    bits = dtype_bits(kv_dtype or geometry.dtype, field="kv_dtype")
    stage = Fraction(-(-geometry.num_layers // pipeline_parallel), geometry.num_layers)
    return [
        LocalGroup(
            layer=group.layer,
            num_layers=group.num_layers,
            page_bytes=whole_bytes(page_size * group.token_bits(bits, tensor_parallel) * stage),
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
    """Return what a sequence takes, and how many fit in `memory`. Raise ConfigError for what cannot be."""
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
