"""The executor of real models: carries out a plan as one forward pass over a flat batch.

It chooses an attention backend for a device, a number format and a page size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch

from kvarts.base.clock import Clock, WallClock
from kvarts.base.errors import ConfigError
from kvarts.core.config import EngineConfig, EngineOptions
from kvarts.core.kv.transfer import TransferReport
from kvarts.core.sched.plan import PageScores, StepPlan, StepResult
from kvarts.run.flat_batch import (
    WHOLE_PAGES,
    DecodeMetadata,
    FlatBatch,
    Ints,
    Observed,
    PageTables,
    StateBatch,
    StateTables,
    TableBatch,
)
from kvarts.run.page_bytes import PageCopier, PageSlots, PageStore
from kvarts.run.torch.attention import AttentionBackend, AttentionMetadata, PagedAttention, attending
from kvarts.run.torch.block_cut import BlockCut
from kvarts.run.torch.flash import FlashBackend, flash_fits
from kvarts.run.torch.graphs import DecodeGraphs, Forward
from kvarts.run.torch.huge_pages import use_huge_pages
from kvarts.run.torch.layers import open_layers
from kvarts.run.torch.loading import kv_fingerprint
from kvarts.run.torch.numba_backend import NumbaBackend, numba_fits
from kvarts.run.torch.pools import KVPools
from kvarts.run.torch.probe import examine
from kvarts.run.torch.rotary import TorchRotation
from kvarts.run.torch.sampling import BatchSampler
from kvarts.run.torch.sdpa import SdpaBackend
from kvarts.run.torch.states import PagedStates, keeping
from kvarts.run.torch.triton_backend import TritonBackend, triton_fits

__all__ = ["BACKENDS", "CAPTURED", "TorchExecutor", "backend_name", "choose_backend"]

SCORED_TOKENS = 256
"""Number of prompt tokens that are scored at a time."""
BACKENDS: dict[str, tuple[Callable[[KVPools], AttentionBackend], Callable[[KVPools], str | None]]] = {
    "flash": (FlashBackend, flash_fits),
    "numba": (NumbaBackend, numba_fits),
    "sdpa": (SdpaBackend, lambda _: None),
    "triton": (TritonBackend, triton_fits),
}
"""By name: the backend, and a function that returns why it does not fit some pools, or None."""
ON_CUDA = ("triton", "flash", "sdpa")
ON_OTHERS = ("numba", "sdpa")
CAPTURED = ("triton",)
"""Backends whose kernels read all that changes from step to step from the device's memory, as CUDA graphs demand."""


def backend_name(pools: KVPools, *more: KVPools, name: str = "auto") -> str:
    """Return `name`, or for `auto` the device's first backend that fits all pools.

    Raise ConfigError for an unknown name, or a backend that does not fit these pools.
    """
    every = (pools, *more)
    if name == "auto":
        meant = ON_CUDA if pools.device.type == "cuda" else ON_OTHERS
        return next(name for name in meant if all(_refusal(name, one) is None for one in every))
    if name not in BACKENDS:
        raise ConfigError(f"{name!r} is not known", field="attention", hint=f"Known: auto, {', '.join(BACKENDS)}.")
    for one in every:
        if reason := _refusal(name, one):
            raise ConfigError(f"{name} cannot be had: {reason}", field="attention", hint="Leave it to auto.")
    return name


def _refusal(name: str, pools: KVPools) -> str | None:
    if pools.kv_dtype != "auto" and name != "sdpa":
        return f"it reads no KV in {pools.kv_dtype}"
    return BACKENDS[name][1](pools)


def choose_backend(pools: KVPools, name: str = "auto") -> AttentionBackend:
    """Return the backend that `backend_name` chooses. Raises ConfigError as it does."""
    make, _ = BACKENDS[backend_name(pools, name=name)]
    return make(pools)


class TorchExecutor:
    """An Executor for a transformers model from `load_model`. Owner of its KV pools and page tables.

    `sampler` chooses the tokens. `options`: `attention`, `layers`, `kv_dtype` and `enforce_eager` are read.
    `num_host_pages`: pages of host memory below the device, the target of stores and source of loads; `files`: pages
    below those. `cut` and `num_blocks`: the memory of a model with KV groups, where plans name the blocks of every page
    table. `clock` times the steps.
    """

    needs_page_ids = True

    def __init__(
        self,
        model: Any,
        config: EngineConfig,
        sampler: BatchSampler,
        *,
        options: EngineOptions | None = None,
        num_host_pages: int = 0,
        files: PageStore | None = None,
        cut: BlockCut | None = None,
        num_blocks: int = 0,
        clock: Clock | None = None,
    ) -> None:
        options = EngineOptions() if options is None else options
        self._model = model
        self._sampler = sampler
        self._clock = WallClock() if clock is None else clock
        self._max_num_seqs = config.max_num_seqs
        self._facts = examine(model)
        self.pools = KVPools(
            self._facts.layers,
            num_pages=config.num_pages if cut is None else num_blocks,
            page_size=config.page_size,
            dtype=model.dtype,
            device=model.device,
            places=None if cut is None else cut.places,
            page_sizes=None if cut is None else cut.page_sizes,
            kv_dtype=options.kv_dtype,
        )
        self._tables = (0,) * len(self._facts.layers) if cut is None else cut.tables
        pools = [self.pools.of_layers(numbers) for numbers in _layers_by_table(self._tables)]
        self.attention = backend_name(*pools, name=options.attention)
        """The name of the attention backend."""
        backends = [choose_backend(one, self.attention) for one in pools]
        self._attention = PagedAttention(self.pools, backends, self._tables)
        self._layers, self.layers_reason = open_layers(
            model, self._facts, self.pools, backends, self._tables, options.layers
        )
        use_huge_pages(model)
        self._copier: PageCopier | None = None
        if num_host_pages:
            self._copier = PageCopier(self.pools.as_arrays(), num_host_pages=num_host_pages, files=files, clock=clock)
        self._rows = PageTables(config.max_num_seqs, config.page_size, WHOLE_PAGES if cut is None else cut.layer_tables)
        self._states: PagedStates | None = None
        """States of layers that have one; None for a model without."""
        if cut is not None and self._facts.states:
            self._states = PagedStates(self.pools, self._facts.states, cut.num_state_blocks)
            self._state_tables = StateTables(config.max_num_seqs, cut.num_state_blocks)
        self._graphs: DecodeGraphs | None = None
        if (
            not options.enforce_eager
            and self.attention in CAPTURED
            and self._states is None
            and self._facts.switch is None
        ):

            def open_forward(every: Sequence[AttentionMetadata]) -> Forward:
                own = [choose_backend(one, self.attention) for one in pools]
                attention = PagedAttention(self.pools, own, self._tables)
                attention.begin(every)
                return partial(self._run_model, attention)

            self._graphs = DecodeGraphs(
                open_forward,
                self.pools.device,
                most=config.max_num_seqs,
                num_pages=[one.num_pages for one in pools],
            )
        self.rotation = TorchRotation(model)
        self.slots = PageSlots(self.pools.num_pages, config.page_size)

    def fingerprint(self) -> str:
        """Return a fingerprint of everything that pages depend on except the tokens."""
        return kv_fingerprint(self._model, self.pools.kv_dtype, has_latents=self._attention.keeps_latents)

    @property
    def layers(self) -> str:
        """The name of the implementation of layers; `layers_reason` explains the choice."""
        return "model" if self._layers is None else "compiled"

    @property
    def switch_length(self) -> int | None:
        """Prompts longer than this get other KV, as the model's rotation changes; None for almost all models."""
        return None if self._facts.switch is None else self._facts.switch.length

    def time_steps(self, counts: Sequence[int], *, are_drafted: bool = False) -> list[tuple[int, float]]:
        """Return (count, seconds) for a step of each of `counts` tokens, each the first of a sequence.

        `are_drafted`: for layers with a state, all but the first are drafted tokens after it, which are accepted.
        Overwrites pages, so call it only while no page is in use or cached.
        """
        timed = []
        for count in counts:
            zeros = np.zeros(count, np.int64)
            of_table = TableBatch(zeros, DecodeMetadata.plain(zeros, zeros[:, None]), [])
            tables = [of_table] * len(set(self._tables))
            rows = list(range(count))
            batch = FlatBatch(zeros, zeros, tables, zeros[None], rows, rows, rows)
            num_drafted = count - 1 if are_drafted else 0
            taken_ns = []
            for _ in range(2):  # the first is slower if something is prepared for its size
                start_ns = self._clock.now_ns()
                with torch.inference_mode():
                    if self._states is not None:
                        blocks = np.zeros((count - num_drafted, self._states.memory.num_blocks), np.int64)
                        self._states.begin(StateBatch(blocks, (), zeros[:num_drafted]))
                    (logits,) = self._logits(batch, self._attend_to(tables), [zeros])
                    logits.argmax(dim=-1).tolist()
                    if self._states is not None and num_drafted:
                        self._states.accept(np.array([num_drafted]))
                taken_ns.append(self._clock.now_ns() - start_ns)
            timed.append((count, min(taken_ns) / 1e9))
        return timed

    def execute(self, plan: StepPlan) -> StepResult:
        """Carry out one step: transfers, then one forward pass, then sampling."""
        with torch.inference_mode():
            return self._execute(plan)

    def _execute(self, plan: StepPlan) -> StepResult:
        start_ns = self._clock.now_ns()
        reports: tuple[TransferReport, ...] = ()
        if self._copier is not None:
            self._copier.begin(plan.transfers)
            reports = tuple(self._copier.run())
        for source, target in plan.page_copies:
            self.pools.copy_page(source, target)
            self.slots.copy_page(source, target)
        batch = self._rows.flatten(plan)
        sampled = np.zeros(self._max_num_seqs, np.uint64)
        stopped: tuple[int, ...] = ()
        accepted: tuple[tuple[int, int], ...] = ()
        attended: tuple[PageScores, ...] = ()
        if batch is not None:
            for slots in batch.block_slots:
                self.slots.write(slots, batch.positions)
            if self._states is not None:
                states = self._state_tables.batch(plan)
                self._states.begin(states)
                self.slots.write_states(states, batch.positions)
            scored = self._scored(plan, batch) if self._sampler.num_scored else []
            captured = None
            if self._graphs is not None and not (scored or batch.observed):
                captured = self._graphs.logits(batch)
            if captured is None:
                every = self._attend_to(batch.tables, batch.observed)
                where = [np.array(batch.sampled_at or [0], np.int64), *(places for *_, places in scored)]
                all_logits = self._logits(batch, every, where)
            else:
                all_logits = iter((captured,))
            logits = next(all_logits)
            if batch.observed:
                attended = tuple(
                    PageScores(one.row, one.start, one.end, scores)
                    for one, scores in zip(batch.observed, self._attention.scores(), strict=True)
                )
            for (request, start, _), of_prompt in zip(scored, all_logits, strict=True):
                self._sampler.score(request, start, of_prompt)
            if batch.sampled_rows:
                if batch.drafts:
                    chosen, ends, counts = self._sampler.sample_drafted(batch.requests, logits, batch.drafts)
                    accepted = tuple(pair for pair in zip(batch.sampled_rows, counts, strict=True) if pair[1])
                    if self._states is not None:
                        self._states.accept(np.array(counts, np.int64))
                else:
                    chosen, ends = self._sampler.sample(batch.requests, logits)
                sampled[batch.sampled_rows] = chosen.astype(np.uint64)
                stopped = tuple(row for row, is_end in zip(batch.sampled_rows, ends.tolist(), strict=True) if is_end)
        return StepResult(self._clock.now_ns() - start_ns, sampled, stopped, reports, accepted, attended)

    def _attend_to(self, tables: Sequence[TableBatch], observed: Sequence[Observed] = ()) -> list[AttentionMetadata]:
        """Prepare attention for a step. Return its metadata, one entry per page table."""
        every = [
            AttentionMetadata(
                self.pools.device, slots=one.slots, chunks=one.chunks, decodes=one.decodes, rotate=self.rotation.rotate
            )
            for one in tables
        ]
        assert self._attention.reads_sinks or all(one.is_plain for one in every), "the backend reads no sinks"
        self._attention.begin(every, observed)
        return every

    def _scored(self, plan: StepPlan, batch: FlatBatch) -> list[tuple[int, int, Ints]]:
        """Return (request, position, places in the batch) of the prompt stretches to score.

        Stretches are short, since logits of a large vocabulary take many bytes per token.
        """
        scored = []
        chunks = batch.tables[0].chunks
        of_chunks = chunks[len(chunks) - len(plan.batch.chunks) :]  # decodes with late rotation precede them
        for chunk, flat in zip(plan.batch.chunks, of_chunks, strict=True):
            num_prompt_tokens = self._sampler.num_to_score(chunk.request_index)
            last = min(chunk.end, num_prompt_tokens - 1)
            for start in range(chunk.start, last, SCORED_TOKENS):
                places = np.arange(start, min(start + SCORED_TOKENS, last)) - chunk.start + flat.first
                scored.append((chunk.request_index, start, places))
        return scored

    def _logits(
        self, batch: FlatBatch, every: Sequence[AttentionMetadata], wheres: Sequence[Ints]
    ) -> Iterator[torch.Tensor]:
        """Run the model, and yield the logits at each of `wheres`, places in the batch, one after the other.

        `every`: the attention metadata of the step, one entry per page table.
        """
        metadata = every[0]
        switch = self._facts.switch
        chosen = nullcontext() if switch is None else switch.chosen(self._are_long(batch))
        tokens, positions = metadata.tensor(batch.tokens), metadata.tensor(batch.rotated_positions)
        if self._layers is not None and not batch.observed:  # compiled layers return no weights
            with chosen:
                return self._layers.logits(tokens, positions, every, [metadata.tensor(one) for one in wheres])
        with keeping(None if self._states is None else self._states.state_called), chosen:
            where = metadata.tensor(np.concatenate(wheres))
            logits = self._run_model(self._attention, tokens, positions, where)
        return iter(logits.split([len(one) for one in wheres]))

    def _run_model(
        self, attention: PagedAttention, tokens: torch.Tensor, positions: torch.Tensor, where: torch.Tensor
    ) -> torch.Tensor:
        """Return the logits at the places `where` of a step for which `attention` is prepared."""
        keep = {"logits_to_keep": where} if self._facts.keeps_logits else {}
        with attending(attention):
            logits: torch.Tensor = self._model(
                input_ids=tokens[None], position_ids=positions[None], use_cache=False, **keep
            ).logits[0]
        return logits if keep else logits[where]

    def _are_long(self, batch: FlatBatch) -> torch.Tensor:
        """Return, per token, whether the rotation for long sequences applies to its sequence."""
        assert self._facts.switch is not None
        step = batch.tables[0]
        num_decodes = len(step.decodes.positions)
        are_long = np.zeros(len(batch.tokens), np.bool_)
        are_long[:num_decodes] = step.decodes.prompts > self._facts.switch.length
        for chunk in step.chunks:
            are_long[chunk.first : chunk.last] = chunk.num_prompt_tokens > self._facts.switch.length
        return torch.from_numpy(are_long).to(self.pools.device)


def _layers_by_table(tables: Sequence[int]) -> list[list[int]]:
    """Return the numbers of the layers of each page table."""
    layers: list[list[int]] = [[] for _ in range(max(tables) + 1)]
    for number, table in enumerate(tables):
        layers[table].append(number)
    return layers
