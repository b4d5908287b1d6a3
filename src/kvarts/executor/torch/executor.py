"""The executor of real models: carries out a plan as one forward pass over a flat batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvarts.clock import Clock, WallClock
from kvarts.config import EngineConfig
from kvarts.executor.copier import PageCopier, PageStore
from kvarts.executor.torch.attention import ATTENTION_KEYWORD, PagedAttention
from kvarts.executor.torch.backend import choose_backend
from kvarts.executor.torch.metadata import AttentionMetadata, ChunkMetadata
from kvarts.executor.torch.pools import KVPools
from kvarts.executor.torch.probe import layer_shapes
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
        self._page_size = config.page_size
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
            self._copier = PageCopier(self.pools.as_arrays(), num_host_pages=num_host_pages, files=files)
        self._tables = np.zeros((config.max_num_seqs, 16), np.int64)
        self._requests = np.full(config.max_num_seqs, -1, np.int64)
        """By row, the index of the request that has it."""

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
        tokens: list[npt.NDArray[Any]] = []
        positions: list[npt.NDArray[np.int64]] = []
        slots: list[npt.NDArray[np.int64]] = []
        rows: list[int] = []
        places: list[int] = []
        chunks: list[ChunkMetadata] = []
        page_size = self._page_size
        decode_positions = np.zeros(0, np.int64)
        decode_tables = np.zeros((0, 1), np.int64)
        num_tokens = 0
        if plan.decodes is not None:
            decodes = plan.decodes
            for row, index, page_id in decodes.new_pages:
                self._reserve(index + 1)
                self._tables[row, index] = page_id
            decode_positions = decodes.positions
            most = int(decode_positions.max()) // page_size + 1
            decode_tables = self._tables[decodes.rows, :most]
            own = self._tables[decodes.rows, decode_positions // page_size]
            tokens.append(decodes.tokens)
            positions.append(decode_positions)
            slots.append(own * page_size + decode_positions % page_size)
            rows += decodes.rows.tolist()
            num_tokens = len(rows)
            places += range(num_tokens)
        for chunk in plan.batch.chunks:
            assert chunk.page_ids is not None
            page_ids = np.array(chunk.page_ids, np.int64)
            self._reserve(len(page_ids))
            self._tables[chunk.row, : len(page_ids)] = page_ids
            self._requests[chunk.row] = chunk.request_index
            where = np.arange(chunk.start, chunk.end)
            tokens.append(chunk.tokens)
            positions.append(where)
            slots.append(page_ids[where // page_size] * page_size + where % page_size)
            chunks.append(ChunkMetadata(num_tokens, num_tokens + len(where), chunk.start, page_ids))
            num_tokens += len(where)
            if chunk.is_last:
                rows.append(chunk.row)
                places.append(num_tokens - 1)
        sampled = np.zeros(self._max_num_seqs, np.uint64)
        stopped: tuple[int, ...] = ()
        if num_tokens:
            metadata = AttentionMetadata(
                self.pools.device,
                slots=np.concatenate(slots),
                chunks=chunks,
                decode_positions=decode_positions,
                decode_tables=decode_tables,
            )
            self._attention.begin(metadata)
            logits = self._model(
                input_ids=metadata.tensor(np.concatenate(tokens).astype(np.int64))[None],
                position_ids=metadata.tensor(np.concatenate(positions))[None],
                use_cache=False,
                # No logits are computed where no token is sampled; a step of unfinished chunks computes one.
                logits_to_keep=metadata.tensor(np.array(places or [0], np.int64)),
                **{ATTENTION_KEYWORD: self._attention},
            ).logits[0]
            if rows:
                chosen, ends = self._sampler.sample(self._requests[rows].tolist(), logits)
                sampled[rows] = chosen.astype(np.uint64)
                stopped = tuple(row for row, is_end in zip(rows, ends.tolist(), strict=True) if is_end)
        return StepResult(self._clock.now_ns() - start_ns, sampled, stopped, reports)

    def _reserve(self, num_pages: int) -> None:
        """Make page tables at least `num_pages` long."""
        if num_pages > self._tables.shape[1]:
            longer = np.zeros((self._max_num_seqs, max(num_pages, 2 * self._tables.shape[1])), np.int64)
            longer[:, : self._tables.shape[1]] = self._tables
            self._tables = longer
