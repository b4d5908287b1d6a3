"""The executor of real models: carries out a plan as one forward pass over a flat batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kvarts.clock import Clock, WallClock
from kvarts.config import EngineConfig
from kvarts.executor.copier import PageCopier, PageStore
from kvarts.executor.flat_batch import RowTables
from kvarts.executor.page_slots import PageSlots
from kvarts.executor.torch.attention import ATTENTION_KEYWORD, PagedAttention
from kvarts.executor.torch.backend import choose_backend
from kvarts.executor.torch.fingerprint import fingerprint
from kvarts.executor.torch.metadata import AttentionMetadata
from kvarts.executor.torch.pools import KVPools
from kvarts.executor.torch.probe import layer_shapes
from kvarts.executor.torch.rotary import TorchRotation
from kvarts.executor.torch.sampling import TokenSampler
from kvarts.kv.transfer import TransferReport
from kvarts.sched.plan import StepPlan, StepResult

__all__ = ["TorchExecutor"]


class TorchExecutor:
    """An Executor of a model of transformers that `load_model` has loaded. Owner of its KV pools and page tables.

    `sampler` chooses the tokens. `num_host_pages`: pages of host memory below the device, which transfers go to and
    come from; `files`: pages below those. `attention`: the backend, by name. `clock` measures how long a step takes.
    """

    needs_page_ids = True

    def __init__(
        self,
        model: Any,
        config: EngineConfig,
        sampler: TokenSampler,
        *,
        num_host_pages: int = 0,
        files: PageStore | None = None,
        attention: str = "auto",
        clock: Clock | None = None,
    ) -> None:
        self._model = model
        self._sampler = sampler
        self._clock = WallClock() if clock is None else clock
        self._max_num_seqs = config.max_num_seqs
        self.pools = KVPools(
            layer_shapes(model),
            num_pages=config.num_pages,
            page_size=config.page_size,
            dtype=model.dtype,
            device=model.device,
        )
        self._attention = PagedAttention(self.pools, choose_backend(self.pools, attention))
        self._copier: PageCopier | None = None
        if num_host_pages:
            self._copier = PageCopier(self.pools.as_arrays(), num_host_pages=num_host_pages, files=files, clock=clock)
        self._rows = RowTables(config.max_num_seqs, config.page_size)
        self.rotation = TorchRotation(model)
        self.slots = PageSlots(config.num_pages, config.page_size)

    def fingerprint(self) -> str:
        """Return what pages depend on, beside tokens."""
        return fingerprint(self._model)

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
        if batch is not None:
            metadata = AttentionMetadata(
                self.pools.device,
                slots=batch.slots,
                chunks=batch.chunks,
                decodes=batch.decodes,
                rotary=self.rotation.rotary,
            )
            assert self._attention.reads_sinks or metadata.is_plain, "the backend reads no sinks"
            self._attention.begin(metadata)
            self.slots.write(batch.slots, batch.positions)
            logits = self._model(
                input_ids=metadata.tensor(batch.tokens)[None],
                position_ids=metadata.tensor(batch.rotated_positions)[None],
                use_cache=False,
                # No logits are computed where no token is sampled; a step of unfinished chunks computes one.
                logits_to_keep=metadata.tensor(np.array(batch.sampled_at or [0], np.int64)),
                **{ATTENTION_KEYWORD: self._attention},
            ).logits[0]
            if batch.sampled_rows:
                chosen, ends = self._sampler.sample(batch.requests, logits)
                sampled[batch.sampled_rows] = chosen.astype(np.uint64)
                stopped = tuple(row for row, is_end in zip(batch.sampled_rows, ends.tolist(), strict=True) if is_end)
        return StepResult(self._clock.now_ns() - start_ns, sampled, stopped, reports)
