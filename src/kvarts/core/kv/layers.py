"""The KV that each layer of a model keeps of a sequence, and the groups of layers that keep the same.

Positions count from 0. While the token at position p is computed, a layer needs all tokens that p attends to, including
p. Tokens that no position from p on attends to can be released.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from fractions import Fraction

__all__ = ["KvGroup", "KvKind", "KvLayer", "grouped"]

KvKind = Literal["full", "window", "chunk", "latent", "state", "shared", "none"]


class KvLayer(msgspec.Struct, frozen=True, kw_only=True):
    """The KV that one layer keeps of a sequence.

    `full`: keys and values of all tokens; `latent`: one vector per token; `window`: keys and values of the last `span`
    tokens and the first `sink`; `chunk`: those of the tokens since the last multiple of `span`; `state`: `state_bytes`,
    independent of the length, or with a `span` of 2 as many for each page, of which a token needs those of its own page
    and of the page of the token before it; `shared`: nothing, since it reads the KV of another layer, with that layer's
    `span`; `none`: nothing, since it processes each token separately. A token has `num_heads` times `head_numbers`
    numbers; devices divide heads, never their numbers.

    `num_vectors`: those of a head that have a scale each where the format has scales: key and value, or one latent.
    `packed_bytes`: bytes of a token in fp8 as DeepSeek's kernels pack a latent, with scales and rotary numbers in 16
    bits. `fixed_bytes`: further bytes of a token, in every format of KV and on every device: the key of an indexer.
    `own_dtype`: its format whatever that of the KV is. `every`: tokens that share one entry, where KV is compressed.
    """

    kind: KvKind
    num_heads: int = 0
    head_numbers: int = 0
    span: int | None = None
    sink: int = 0
    state_bytes: int = 0
    num_vectors: int = 2
    packed_bytes: int | None = None
    fixed_bytes: int = 0
    own_dtype: str | None = None
    every: int = 1

    def read_bits(self, kv_dtype: str, num_devices: int = 1) -> Fraction:
        """Return the bits of a token's KV that are read, on one of the devices that divide the heads."""
        from kvarts.core.kv.number_formats import is_fp8, kv_bits  # fractions: longer to import than to replay

        kv_dtype = self.own_dtype or kv_dtype
        if self.packed_bytes is not None and is_fp8(kv_dtype):
            return kv_bits(kv_dtype)[0] * (self.packed_bytes + self.fixed_bytes) / self.every
        bits, scale_bits = kv_bits(kv_dtype)
        heads = -(-self.num_heads // num_devices)
        bits = heads * (self.head_numbers * bits + self.num_vectors * scale_bits)
        return (bits + 8 * self.fixed_bytes) / self.every

    @property
    def keeps_tokens(self) -> bool:
        """Whether it keeps numbers for each token that it may still need."""
        return self.kind in ("full", "latent", "window", "chunk")

    @property
    def attends(self) -> bool:
        """Whether it reads keys and values of other tokens, from its own KV or from that of another layer."""
        return self.keeps_tokens or self.kind == "shared"

    def first_seen(self, position: int) -> int:
        """Return the first position after the sink that the token at `position` attends to, if the layer attends."""
        if self.span is None:
            return 0
        if self.kind == "chunk":
            return position - position % self.span
        return max(0, position + 1 - self.span)

    def num_tokens(self, num_tokens: int, num_new: int = 1) -> int:
        """Return the number of tokens kept while the last `num_new` of `num_tokens` tokens are computed."""
        if not self.keeps_tokens or not num_tokens:
            return 0
        first = self.first_seen(num_tokens - min(num_new, num_tokens))
        return num_tokens - first + min(self.sink, first)

    def num_pages(self, num_tokens: int, page_size: int, num_new: int = 1) -> int:
        """Return the number of pages of those tokens. A page is kept as long as one of its tokens is needed."""
        if not self.keeps_tokens or not num_tokens:
            return 0
        first_page = self.first_seen(num_tokens - min(num_new, num_tokens)) // page_size
        return -(-num_tokens // page_size) - first_page + min(-(-self.sink // page_size), first_page)


class KvGroup(msgspec.Struct, frozen=True):
    """`num_layers` layers that keep the same tokens in the same format."""

    layer: KvLayer
    num_layers: int

    def token_bits(self, kv_dtype: str, num_devices: int = 1) -> Fraction:
        """Return the bits per token in all layers of the group, on one of the devices that divide the heads."""
        bits = self.num_layers * self.layer.read_bits(kv_dtype, num_devices)
        return bits if self.layer.keeps_tokens else 0 * bits


def grouped(layers: Sequence[KvLayer]) -> tuple[KvGroup, ...]:
    """Return the groups of the layers, in the order of their first layers."""
    counts: dict[KvLayer, int] = {}
    for layer in layers:
        counts[layer] = counts.get(layer, 0) + 1
    return tuple(KvGroup(layer, count) for layer, count in counts.items())
