"""Memory of a sequence of a given length in each KV group, and the number of such sequences that fit."""

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
