"""Chooses the implementation of a model's layers: its own code, or compiled calls for standard decoders on a CPU.

Each compiled layer gets the model's input of that layer, so a difference is the error of one layer and not the sum over
several.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
import numpy as np
import torch
from msgspec.structs import replace

from kvarts.base.errors import ConfigError
from kvarts.run.flat_batch import ChunkMetadata, DecodeMetadata
from kvarts.run.torch.attention import (
    AttentionBackend,
    AttentionCall,
    AttentionMetadata,
    AttentionParams,
    PagedAttention,
    attending,
)
from kvarts.run.torch.compiled_layers import CompiledLayers
from kvarts.run.torch.decoder import ATTENTION, MLP, Decoder, DecoderParts, UnlikeError, find_parts
from kvarts.run.torch.numba_backend import NumbaBackend
from kvarts.run.torch.openmp import team
from kvarts.run.torch.packing import pack_together
from kvarts.run.torch.pools import KVPools
from kvarts.run.torch.probe import Facts

__all__ = ["LAYERS", "MOST_ERROR", "open_layers", "prove"]

LAYERS = ("auto", "compiled", "model")
MOST_ERROR = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Largest relative error (L2) of a row, by number format: a few consecutive roundings."""
SEVERAL = 8.0
"""Factor on that limit for the accumulated error of all layers."""
LENGTHS = (1, 12, 45)
"""Lengths of the tested sequences."""
CHUNK = 5
CHECKED_LAYERS = 2
"""Layers of a Decoder that are run: one that passes its output on, and one that receives it."""


def prove(model: Any, facts: Facts, parts: DecoderParts, page_size: int) -> list[AttentionParams]:
    """Return the attention parameters of each layer. Raise UnlikeError if compiled layers differ from the model.

    All layers of a Decoder run the same code, so that some of them stand for all.
    """
    if isinstance(model, Decoder) and len(facts.layers) > CHECKED_LAYERS:
        short = model.shortened(CHECKED_LAYERS)
        shapes = facts.layers[:CHECKED_LAYERS]
        checked = _Proof(short, replace(facts, layers=shapes), find_parts(short, shapes), page_size).run()
        return [checked[0]] * len(facts.layers)
    return _Proof(model, facts, parts, page_size).run()


class _Batch(msgspec.Struct):
    tokens: torch.Tensor
    positions: torch.Tensor
    metadata: AttentionMetadata


class _Ran(msgspec.Struct):
    """Results of a model on a batch. Per layer: input, states after attention, output, output of the MLP, the call of
    attention and its output. `last`: the input of the norm after all layers.
    """

    begun: list[torch.Tensor] = []
    after: list[torch.Tensor] = []
    ended: list[torch.Tensor] = []
    made: list[torch.Tensor] = []
    calls: list[AttentionCall] = []
    read: list[torch.Tensor] = []
    last: list[torch.Tensor] = []
    logits: torch.Tensor | None = None


class _Proof:
    def __init__(self, model: Any, facts: Facts, parts: DecoderParts, page_size: int) -> None:
        self._model, self._facts, self._parts = model, facts, parts
        self._page_size = page_size
        text = model.config.get_text_config(decoder=True)
        most = getattr(text, "max_position_embeddings", None)
        most = most if isinstance(most, int) and most > CHUNK else 1 << 20
        if facts.switch is not None:
            most = min(most, facts.switch.length)
        self._lengths = [min(length, most - CHUNK) for length in LENGTHS]
        self._pages_each = -(-(max(self._lengths) + CHUNK) // page_size)
        self._pools = KVPools(
            facts.layers, num_pages=len(LENGTHS) * self._pages_each, page_size=page_size, dtype=model.dtype
        )
        generator = torch.Generator().manual_seed(5)
        for pool in self._pools.tensors:
            pool.copy_(torch.randn(pool.shape, generator=generator))
        self._ids = torch.randint(text.vocab_size, (64,), generator=generator)
        self._backend = NumbaBackend(self._pools)
        self._most = MOST_ERROR[model.dtype]

    def run(self) -> list[AttentionParams]:
        """Compare decodes, then decodes together with a chunk."""
        params: list[AttentionParams] = []
        for num_decodes in (len(self._lengths), len(self._lengths) - 1):
            batch = self._batch(num_decodes)
            kept = [pool.clone() for pool in self._pools.tensors]
            ran = self._run_model(batch)
            theirs = [pool.clone() for pool in self._pools.tensors]
            for pool, before in zip(self._pools.tensors, kept, strict=True):
                pool.copy_(before)
            if not params:
                params = [call.params(layer.window) for call, layer in zip(ran.calls, self._facts.layers, strict=True)]
            layers = CompiledLayers(self._parts, self._pools, [self._backend], [0] * len(params), params)
            self._compare(layers, batch, ran)
            for mine, other in zip(self._pools.tensors, theirs, strict=True):
                self._expect(mine.flatten(2), other.flatten(2), "keys or values")
        return params

    def _batch(self, num_decodes: int) -> _Batch:
        """Return decodes of `num_decodes` sequences, and chunks of the others."""
        size, each = self._page_size, self._pages_each
        tables = np.arange(len(LENGTHS) * each).reshape(len(LENGTHS), each)
        spans = [(length - 1, length) for length in self._lengths[:num_decodes]]
        spans += [(length - 1, length - 1 + CHUNK) for length in self._lengths[num_decodes:]]
        positions = np.concatenate([np.arange(*span) for span in spans])
        slots = np.concatenate(
            [tables[row][np.arange(*span) // size] * size + np.arange(*span) % size for row, span in enumerate(spans)]
        )
        chunks = [
            ChunkMetadata(num_decodes, num_decodes + CHUNK, spans[row][0], tables[row][: -(-spans[row][1] // size)])
            for row in range(num_decodes, len(spans))
        ]
        decodes = DecodeMetadata.plain(positions[:num_decodes], tables[:num_decodes])
        metadata = AttentionMetadata(self._pools.device, slots=slots, chunks=chunks, decodes=decodes)
        return _Batch(self._ids[: len(positions)], torch.from_numpy(positions), metadata)

    def _run_model(self, batch: _Batch) -> _Ran:
        ran = _Ran()
        paged = PagedAttention(self._pools, [self._backend])
        paged.begin([batch.metadata])

        class Watching:
            keeps_latents = False

            def called(self, call: AttentionCall) -> torch.Tensor:
                read = paged.called(call)
                ran.calls.append(call)
                ran.read.append(read)
                return read

            def mask(self, **_: Any) -> None:
                return None

        with self._watched(ran), attending(Watching()), self._chosen(batch):
            ran.logits = self._model(
                input_ids=batch.tokens[None], position_ids=batch.positions[None], use_cache=False
            ).logits[0]
        return ran

    @contextmanager
    def _watched(self, ran: _Ran) -> Iterator[None]:
        """Record inputs and outputs of modules while the model runs."""

        def given(args: Any, kwargs: Any) -> torch.Tensor:
            tensor: torch.Tensor = (args[0] if args else kwargs["hidden_states"])[0]
            return tensor.clone()

        def note_ends(_: Any, args: Any, kwargs: Any, out: Any) -> None:
            ran.begun.append(given(args, kwargs))
            ran.ended.append((out[0] if isinstance(out, tuple) else out)[0].clone())

        handles = []
        for layer in self._parts.layers:
            handles += [
                layer.module.register_forward_hook(note_ends, with_kwargs=True),
                layer.module.post_attention_layernorm.register_forward_pre_hook(
                    lambda _, args, kwargs: ran.after.append(given(args, kwargs)), with_kwargs=True
                ),
                layer.mlp.register_forward_hook(lambda _, args, out: ran.made.append(out[0].clone())),
            ]
        last = self._model.get_decoder().norm
        handles.append(
            last.register_forward_pre_hook(
                lambda _, args, kwargs: ran.last.append(given(args, kwargs)), with_kwargs=True
            )
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _chosen(self, batch: _Batch) -> AbstractContextManager[None]:
        switch = self._facts.switch
        return nullcontext() if switch is None else switch.chosen(torch.zeros(len(batch.tokens), dtype=torch.bool))

    def _compare(self, layers: CompiledLayers, batch: _Batch, ran: _Ran) -> None:
        count, every = len(batch.tokens), torch.arange(len(batch.tokens))
        for notes in (ran.begun, ran.after, ran.ended, ran.made, ran.calls):
            if len(notes) != len(self._parts.layers) or len(ran.last) != 1 or ran.logits is None:
                raise UnlikeError("its layers are not run one after the other, once each")
        self._backend.begin(batch.metadata)
        with self._chosen(batch):
            layers.begin(batch.tokens, batch.positions, [batch.metadata])
        room = layers.room
        self._expect_same(room["hidden"][:count], ran.begun[0], "embeddings")
        for number, (begun, ended) in enumerate(zip(ran.begun, ran.ended, strict=True)):
            following = [*ran.begun, ran.last[0]][number + 1]
            self._expect_same(ended, following, f"layer {number} and the one after it")
            layers.set_hidden(begun)
            layers.run_layer(number)
            of_layer = f"of layer {number}"
            queries, _, _ = ran.calls[number].packed()
            self._expect(room["queries"][:count], queries, f"queries {of_layer}")
            self._expect(room["attended"][:count], ran.read[number].flatten(1), f"what attention {of_layer} reads")
            self._expect(room["hidden"][:count], ran.after[number], f"states after attention {of_layer}")
            self._expect(layers.delta(count), ran.made[number], f"the MLP {of_layer}")
            self._expect(room["hidden"][:count] + layers.delta(count), ended, f"states {of_layer}")
        layers.set_hidden(ran.last[0])
        layers.add_and_norm()
        self._expect(layers.head(count, every), ran.logits, "logits")
        self._backend.begin(batch.metadata)
        with self._chosen(batch):
            (all_layers,) = layers.logits(batch.tokens, batch.positions, [batch.metadata], [every])
        self._expect(all_layers, ran.logits, "logits after all layers", SEVERAL)

    def _expect(self, mine: torch.Tensor, theirs: torch.Tensor, what: str, several: float = 1.0) -> None:
        """Raise UnlikeError if rows differ by more than rounding."""
        mine, theirs = mine.float().flatten(1), theirs.float().flatten(1)
        error = (mine - theirs).norm(dim=1) / theirs.norm(dim=1).clamp_min(1e-20)
        worst = float(error.max())
        if not worst <= self._most * several:
            raise UnlikeError(f"{what} differ by {worst:.1g}")

    def _expect_same(self, mine: torch.Tensor, theirs: torch.Tensor, what: str) -> None:
        if not torch.equal(mine.to(theirs.dtype), theirs):
            raise UnlikeError(f"{what} differ")


def open_layers(
    model: Any,
    facts: Facts,
    pools: KVPools,
    backends: Sequence[AttentionBackend],
    tables: Sequence[int],
    name: str = "auto",
) -> tuple[CompiledLayers | None, str]:
    """Return compiled layers for a model, or None for its own code, and the reason.

    `backends`: the attention backend of each page table; `tables`: the page table of each layer. `auto` chooses
    compiled layers if they compute the same as the model. Raise ConfigError for an unknown name, and for `compiled`
    if the model does not support it.
    """
    if name not in LAYERS:
        raise ConfigError(f"{name!r} is not known", field="layers", hint=f"Known: {', '.join(LAYERS)}.")
    if name == "model":
        return None, "as asked"
    try:
        return _compiled(model, facts, pools, backends, tables), "compared with the model's own code"
    except UnlikeError as error:
        if name == "compiled":
            raise ConfigError(f"compiled cannot be had: {error}", field="layers", hint="Leave it to auto.") from None
        return None, str(error)


_proven: WeakKeyDictionary[Any, dict[int, list[AttentionParams] | str]] = WeakKeyDictionary()
"""By model and page size: attention parameters of its layers, or why it cannot have compiled layers."""


def _compiled(
    model: Any, facts: Facts, pools: KVPools, backends: Sequence[AttentionBackend], tables: Sequence[int]
) -> CompiledLayers:
    if facts.states:
        raise UnlikeError(f"{len(facts.states)} layers keep a state")
    numba = [backend for backend in backends if type(backend) is NumbaBackend]
    if len(numba) < len(backends):
        raise UnlikeError("attention is not that of numba")
    if not team().has_barrier:
        raise UnlikeError("PyTorch's threads cannot be had")
    parts = find_parts(model, facts.layers)
    parameters = [
        one for module in (*(layer.module for layer in parts.layers), parts.head) for one in module.parameters()
    ]
    if any(parameter.dtype != model.dtype for parameter in (*parameters, parts.norm.weight)):
        raise UnlikeError("weights have several number formats")
    known = _proven.setdefault(model, {})
    if pools.page_size not in known:
        try:
            with torch.inference_mode():
                known[pools.page_size] = prove(model, facts, parts, pools.page_size)
        except UnlikeError as error:
            known[pools.page_size] = str(error)
    params = known[pools.page_size]
    if isinstance(params, str):
        raise UnlikeError(params)
    modules = [(layer.attention, layer.mlp) for layer in parts.layers]
    del parts  # so that a weight is in memory twice only while its layer is packed
    for attention, mlp in modules:
        pack_together(attention, ATTENTION[:3])
        pack_together(mlp, MLP[:2])
    return CompiledLayers(find_parts(model, facts.layers), pools, numba, tables, params)
