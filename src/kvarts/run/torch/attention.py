"""Paged attention for any decoder of transformers, through its AttentionInterface.

transformers calls `paged_attention` wherever a model asks for attention, and the function forwards the call to the
thread's Attention, which `attending` sets for one forward pass, so nothing depends on which keywords a model passes to
its layers. Calls are numbered in order and each has separate keys and values, so nothing depends on how a model names
its layers, or on how often a layer attends.

PagedAttention writes keys and values into the pools, and has a backend attend through the page tables. It does not
matter whether a page was computed earlier, left by another request or loaded from a tier below.

Latents (MLA) are attended to as they are, without expanding them to keys and values of every head. A model of
transformers with latents expands them in `expand_kv` of its attention modules, right before it asks for attention. With
an Attention that keeps latents, `expand_kv` returns the latents instead, and what the expansion would do to keys and
values is done to queries and outputs: score and sum are linear in both, so that the results are the same, except for
rounding (DeepSeek-V2, section 2.1.3; the matrices are "absorbed").
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import pad

from kvarts.run.flat_batch import ChunkMetadata, DecodeMetadata, Ints, Observed
from kvarts.run.torch.pools import KVPools

__all__ = [
    "ATTENTION",
    "Attention",
    "AttentionBackend",
    "AttentionCall",
    "AttentionMetadata",
    "AttentionParams",
    "ChunkMetadata",
    "DecodeMetadata",
    "Ints",
    "LatentShape",
    "PagedAttention",
    "Rotate",
    "attending",
    "find_latent",
    "is_absorbed",
    "is_attending",
    "keep_latents",
    "paged_attention",
    "register",
    "takes_latents",
]


class AttentionParams(msgspec.Struct, frozen=True):
    """Parameters of one layer's attention: its scale, the last `window` tokens or all, and a soft cap on scores.

    `sinks` [heads]: the score of each head's attention sink, which takes some of the weight without having a value.
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    def less_sinks(self, attended: torch.Tensor, log_sums: torch.Tensor) -> torch.Tensor:
        """Return `attended` [..., heads, head_dim] without the share of the sinks.

        `log_sums` [..., heads] are the logarithms of the sums of exponentials of the scores without sinks.
        """
        assert self.sinks is not None
        return attended * torch.sigmoid(log_sums - self.sinks.float())[..., None].to(attended.dtype)


Rotate = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]
"""Returns states [tokens, heads, head_dim] as a layer rotates them at positions [tokens]."""


class AttentionMetadata:
    """Where each token of one step is written, and which pages it attends to.

    `slots` [tokens]: the slots in the pools for each token's keys and values. Decodes are the first tokens of the
    batch, one per sequence; chunks follow. `rotate`: for chunks with queries and keys that are not rotated yet.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        slots: Ints,
        chunks: Sequence[ChunkMetadata],
        decodes: DecodeMetadata,
        rotate: Rotate | None = None,
    ) -> None:
        self.device = device
        self.chunks = chunks
        self.decodes = decodes
        self.rotate = rotate
        self.slots = self.tensor(slots)

    @cached_property
    def decode_positions(self) -> torch.Tensor:
        """The positions of decodes, [tokens], in 32 bits."""
        return self.tensor(self.decodes.positions.astype(np.int32))

    @cached_property
    def decode_tables(self) -> torch.Tensor:
        """The page tables of decodes, [tokens, pages], in 32 bits."""
        return self.tensor(self.decodes.tables.astype(np.int32))

    @property
    def is_plain(self) -> bool:
        """Whether all sequences retain all tokens."""
        return self.decodes.is_plain and all(chunk.keeps is None for chunk in self.chunks)

    def tensor(self, values: npt.NDArray[np.generic]) -> torch.Tensor:
        """Return `values` as a tensor on the batch's device."""
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)


class AttentionBackend(Protocol):
    """Computes attention over pages. Everything that depends on the step but not on the layer is prepared once per
    step.
    """

    reads_sinks: bool
    """Whether it supports sequences that retain a sink and a window, with dropped pages between them."""

    def begin(self, metadata: AttentionMetadata) -> None:
        """Prepare for a step; every `forward` until the next `begin` belongs to it."""

    def forward(self, layer: int, queries: torch.Tensor, params: AttentionParams) -> torch.Tensor:
        """Return the attention output for `queries` [tokens, heads, head_dim] of the whole batch, of the same shape.

        Keys and values of these tokens are already in their pages.
        """


SIZES = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")


class LatentShape(msgspec.Struct, frozen=True):
    """Sizes of a layer's attention to latents, in elements: of the parts of a head's key that come from the latent and
    from the rotation, of a head's value, and of the latent.
    """

    nope_dim: int
    rope_dim: int
    value_dim: int
    rank: int

    @property
    def head_dim(self) -> int:
        """The elements that are kept of a token: its latent, and the rotated part of its keys, which heads share."""
        return self.rank + self.rope_dim

    def absorbed(self, module: Any, queries: torch.Tensor) -> torch.Tensor:
        """Return `queries` [tokens, heads, nope_dim + rope_dim] for latents, [tokens, heads, rank + rope_dim]."""
        keys, _ = self._matrices(module)
        nope, rotated = queries.split([self.nope_dim, self.rope_dim], dim=-1)
        return torch.cat((torch.einsum("thn,hnr->thr", nope, keys), rotated), dim=-1)

    def expanded(self, module: Any, attended: torch.Tensor) -> torch.Tensor:
        """Return the sums of values [tokens, heads, value_dim] that `attended` [tokens, heads, rank + rope_dim] are."""
        _, values = self._matrices(module)
        return torch.einsum("thr,hvr->thv", attended[..., : self.rank], values)

    def is_that_of(self, module: Any) -> bool:
        """Return whether `expand_kv` of `module` multiplies latents with these matrices, tested on random latents."""
        keys_of, values_of = self._matrices(module)
        weight, generator = module.kv_b_proj.weight, torch.Generator().manual_seed(0)
        latents, rotated = (
            torch.randn(1, 1, 5, size, generator=generator).to(weight) for size in (self.rank, self.rope_dim)
        )
        try:
            keys, values = (states[0] for states in type(module).expand_kv(module, latents, rotated))
        except (RuntimeError, TypeError, ValueError, AttributeError):
            return False
        expected = torch.einsum("tr,hnr->htn", latents[0, 0].float(), keys_of.float())
        shared = rotated[0].float().expand(len(expected), -1, -1)
        pairs = (
            (keys, torch.cat((expected, shared), dim=-1)),
            (values, torch.einsum("tr,hvr->htv", latents[0, 0].float(), values_of.float())),
        )
        most = 1e-4 if weight.dtype == torch.float32 else 0.02
        return all(
            mine.shape == theirs.shape and bool((mine.float() - theirs).abs().max() <= most * theirs.abs().max())
            for mine, theirs in pairs
        )

    def _matrices(self, module: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the matrices of keys and values, [heads, nope_dim or value_dim, rank]."""
        weight = module.kv_b_proj.weight.view(-1, self.nope_dim + self.value_dim, self.rank)
        keys, values = weight.split([self.nope_dim, self.value_dim], dim=1)
        return keys, values


def find_latent(module: Any) -> LatentShape | None:
    """Return the sizes of an attention module that expands latents; None for any other."""
    projection = getattr(module, "kv_b_proj", None)
    sizes = [size for name in SIZES if isinstance(size := getattr(module, name, None), int)]
    if not callable(getattr(module, "expand_kv", None)) or len(sizes) < len(SIZES):
        return None
    nope, rope, value, rank = sizes
    weight = getattr(projection, "weight", None)
    if weight is None or getattr(projection, "bias", None) is not None or weight.dim() != 2:
        return None
    if type(projection) is not torch.nn.Linear or weight.shape[1] != rank or weight.shape[0] % (nope + value):
        return None
    return LatentShape(nope, rope, value, rank)


def is_absorbed(module: Any, name: str) -> bool:
    """Return whether the layer `name` of `module` is the matrix that expands latents, which must remain readable."""
    return name == "kv_b_proj" and find_latent(module) is not None


def keep_latents(model: Any, takes_latents: Callable[[], bool]) -> None:
    """Have the attention modules of `model` return latents from `expand_kv` while `takes_latents` returns True."""
    for module in model.modules():
        if "expand_kv" not in vars(module) and find_latent(module) is not None:
            module.expand_kv = partial(_latents_or_expanded, module, type(module).expand_kv, takes_latents)


def _latents_or_expanded(
    module: Any, own: Any, takes_latents: Callable[[], bool], latents: torch.Tensor, rotated: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of all heads, or of one: the latents with the rotated part, and the latents."""
    if not takes_latents():
        expanded: tuple[torch.Tensor, torch.Tensor] = own(module, latents, rotated)
        return expanded
    kept = torch.cat((latents, rotated), dim=-1)
    return kept, kept


ATTENTION = "kvarts_paged"
"""The name under which `register` adds `paged_attention` to transformers."""


class AttentionCall(msgspec.Struct):
    """A model's call of attention, as transformers passes it. `number`: the call's index in its forward pass, from 0.

    `query` [1, heads, tokens, head_dim], `key` [1, kv_heads, tokens, head_dim], `value` [1, kv_heads, tokens, any].
    `latent`: set if keys and values are both the latents, of one head.
    """

    number: int
    module: Any
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: Any
    keywords: dict[str, Any]
    latent: LatentShape | None = None

    def params(self, window: int | None) -> AttentionParams:
        """Return the parameters of attention from the known keywords; `window`: the last tokens attended to, None for
        all.
        """
        of = self.keywords.get
        scaling = of("scaling")
        scaling = self.query.shape[-1] ** -0.5 if scaling is None else scaling
        return AttentionParams(scaling, window, of("softcap"), of("s_aux"))

    def packed(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys and values as [tokens, heads, head_dim] each.

        If values and keys have different head sizes, the smaller is padded with zeros, which change no score and no
        sum.
        """
        queries, keys, values = (states[0].transpose(0, 1) for states in (self.query, self.key, self.value))
        if self.latent is not None:
            return self.latent.absorbed(self.module, queries), keys, values
        missing = values.shape[-1] - keys.shape[-1]
        if missing > 0:
            queries, keys = pad(queries, (0, missing)), pad(keys, (0, missing))
        elif missing < 0:
            values = pad(values, (0, -missing))
        return queries, keys, values

    def unpacked(self, attended: torch.Tensor) -> torch.Tensor:
        """Return the output for the model, given that of attention to what `packed` returned."""
        if self.latent is not None:
            return self.latent.expanded(self.module, attended)
        return attended[..., : self.value.shape[-1]]


class Attention(Protocol):
    """Attention as called by a model's layers."""

    keeps_latents: bool
    """Whether layers with latents pass these instead of keys and values."""

    def called(self, call: AttentionCall) -> torch.Tensor:
        """Return the output of attention, as [tokens, heads, value size]."""

    def mask(self, **asked: Any) -> Any:
        """Return the mask that a model asks for, given the keywords of transformers' mask functions."""


class _Thread(threading.local):
    attention: Attention | None = None
    num_calls: int = 0


_thread = _Thread()


@contextmanager
def attending(attention: Attention) -> Iterator[None]:
    """Have models that run in this thread use `attention`, for one forward pass."""
    before = _thread.attention, _thread.num_calls
    _thread.attention, _thread.num_calls = attention, 0
    try:
        yield
    finally:
        _thread.attention, _thread.num_calls = before


def takes_latents() -> bool:
    """Return whether this thread runs models with an Attention that keeps latents."""
    return _thread.attention is not None and _thread.attention.keeps_latents


def is_attending() -> bool:
    """Return whether this thread runs models with an Attention of `attending`."""
    return _thread.attention is not None


class PagedAttention:
    """Attention over pages: writes keys and values to their slots, then has a backend attend.

    `tables`: the number of each layer's page table; by default all layers share one. `backends`: one per page table.
    """

    def __init__(
        self, pools: KVPools, backends: Sequence[AttentionBackend], tables: Sequence[int] | None = None
    ) -> None:
        self._pools = pools
        self._backends = tuple(backends)
        self._tables = (0,) * len(pools.layers) if tables is None else tuple(tables)
        self.keeps_latents = any(layer.is_latent for layer in pools.layers)
        self._slots: list[torch.Tensor] = []
        self._observing: list[_Observing] = []

    @property
    def reads_sinks(self) -> bool:
        """Whether sequences may retain a sink and a window."""
        return all(backend.reads_sinks for backend in self._backends)

    def begin(self, every: Sequence[AttentionMetadata], observed: Sequence[Observed] = ()) -> None:
        """Prepare for the step that `every` describes, one entry per page table. `observed`: what is to be scored."""
        self._slots = [metadata.slots for metadata in every]
        self._observing = [_Observing(self._pools, one) for one in observed]
        for backend, metadata in zip(self._backends, every, strict=True):
            backend.begin(metadata)

    def called(self, call: AttentionCall) -> torch.Tensor:
        """Attend for a layer, with the window that was found when the model was examined."""
        params = call.params(self._pools.layers[call.number].window)
        return call.unpacked(self.attend(call.number, *call.packed(), params))

    def mask(self, **_: Any) -> None:
        """Return no mask: the masks of transformers assume one sequence per row, and a step has many in one row."""

    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Write `keys` and `values`, unless the layer shares another layer's, and return the output of attention.

        `queries` [tokens, heads, head_dim]; `keys` and `values` [tokens, kv_heads, head_dim], of the same tokens.
        """
        table = self._tables[layer]
        if self._pools.layers[layer].owner == layer:
            self._pools.write(layer, self._slots[table], keys, values)
        for observing in self._observing:
            observing.add(layer, queries, params)
        return self._backends[table].forward(layer, queries, params)

    def scores(self) -> list[npt.NDArray[np.float32]]:
        """Return the scores of the pages of each of the sequences that were observed in the step, [pages]."""
        return [observing.scores.cpu().numpy() for observing in self._observing]


class _Observing:
    """Owner of the scores of the pages of one sequence in a step, summed over layers, heads and observed tokens."""

    def __init__(self, pools: KVPools, observed: Observed) -> None:
        self._pools = pools
        self._tokens = slice(observed.first, observed.last)
        self._page_ids = torch.from_numpy(observed.page_ids).to(pools.device)
        places = torch.arange(len(observed.page_ids) * pools.page_size)
        self._is_later = (places > torch.from_numpy(observed.places)[:, None]).to(pools.device)
        self.scores = torch.zeros(len(observed.page_ids), device=pools.device)

    def add(self, layer: int, queries: torch.Tensor, params: AttentionParams) -> None:
        """Add the weights of one layer. `queries`: those of the whole batch."""
        pools = self._pools
        keys = pools.decoded(layer, pools.keys[layer][self._page_ids]).flatten(0, 1).transpose(0, 1)
        mine = queries[self._tokens].transpose(0, 1)  # [heads, tokens, head_dim]
        of_heads = mine.reshape(len(keys), -1, mine.shape[-1]).float()
        logits = (of_heads @ keys.float().transpose(-1, -2)) * params.scaling
        if params.softcap is not None:
            logits = torch.tanh(logits / params.softcap) * params.softcap
        logits = logits.view(len(keys), -1, *self._is_later.shape).masked_fill(self._is_later, float("-inf"))
        weights = torch.softmax(logits, dim=-1).sum(dim=(0, 1, 2))
        self.scores += weights.view(len(self.scores), -1).sum(dim=-1)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """Return the output of a layer's attention, as [1, tokens, heads, value size]."""
    attention = _thread.attention
    if attention is None:
        raise RuntimeError("a model that attends through pages runs in an LLM only; set another attention before this")
    number = _thread.num_calls
    _thread.num_calls += 1
    latent = find_latent(module) if attention.keeps_latents else None
    read = attention.called(AttentionCall(number, module, query, key, value, attention_mask, keywords, latent))
    return read[None], None


def _mask(*_: Any, **asked: Any) -> Any:
    return None if _thread.attention is None else _thread.attention.mask(**asked)


def register() -> None:
    """Let transformers' models attend by `paged_attention`. Imports the models' code, which takes two seconds."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(ATTENTION, paged_attention)
    AttentionMaskInterface.register(ATTENTION, _mask)
