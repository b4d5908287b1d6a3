"""Many steps priced at once by a RooflineCost, with the formulas of step_parts.py over arrays.

The formulas exist once. `ArrayParts` overrides the few operations that arrays need in another form; it inherits from
the Python source of `StepParts`, also where that is compiled, since compiled methods take only numbers.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvarts.core.sched.plan import Batch

if TYPE_CHECKING:
    from kvarts.cost.roofline import RooflineCost
    from kvarts.cost.step_parts import StepParts
else:

    def _source_of(name: str) -> Any:
        """Return the module `name` as its Python source defines it."""
        path = Path(importlib.util.find_spec(name).origin).parent / f"{name.rpartition('.')[2]}.py"
        loader = SourceFileLoader(f"{name}_of_arrays", str(path))
        module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
        loader.exec_module(module)
        return module

    StepParts = _source_of("kvarts.cost.step_parts").StepParts

__all__ = ["StepArrays"]

Values = npt.NDArray[np.float64]
Counts = Any
"""npt.NDArray[np.int64], where the formulas state a number."""


class ArrayParts(StepParts):
    """StepParts whose formulas take arrays in place of numbers."""

    def larger(self, one: Any, other: Any) -> Any:
        return np.maximum(one, other)

    def smaller(self, one: Any, other: Any) -> Any:
        return np.minimum(one, other)

    def fewer(self, one: Any, other: Any) -> Any:
        return np.minimum(one, other)

    def root(self, number: Any) -> Any:
        return np.sqrt(number)

    def padded(self, num_tokens: Any) -> Any:
        sizes = _sizes(self.graph_tokens)
        return np.where(num_tokens > self.graph_tokens, num_tokens, sizes[np.minimum(num_tokens, self.graph_tokens)])


@cache
def _sizes(graph_tokens: int) -> npt.NDArray[np.int64]:
    """Return the padded size of each number of tokens up to `graph_tokens`."""
    from kvarts.cost.step_parts import graph_size

    return np.array([graph_size(num, graph_tokens) for num in range(graph_tokens + 1)], np.int64)


class _Passes:
    """Forward passes as columns: one element per rank with work, in the order of the passes, and one per chunk."""

    def __init__(self, passes: Sequence[Sequence[Batch]], num_verified: int) -> None:
        ranks = [batch for batches in passes for batch in batches]
        chunks = [(chunk, rank) for rank, batch in enumerate(ranks) for chunk in batch.chunks]
        lasts = [sum(chunk.is_last for chunk in batch.chunks) for batch in ranks]
        prompts = [sum(chunk.num_tokens for chunk in batch.chunks) for batch in ranks]
        self._starts: Counts = np.array([chunk.start for chunk, _ in chunks], np.int64)
        self._ends: Counts = np.array([chunk.end for chunk, _ in chunks], np.int64)
        self._rank_of_chunk = np.array([rank for _, rank in chunks], np.int64)
        self._decodes: Counts = np.array([batch.num_decodes for batch in ranks], np.int64)
        self._known: Counts = np.array([batch.decode_known_tokens for batch in ranks], np.int64)
        self._sequences: Counts = self._decodes + np.array([len(batch.chunks) for batch in ranks], np.int64)
        self._tokens: Counts = self._decodes * num_verified + np.array(prompts, np.int64)
        self._samples: Counts = self._decodes * num_verified + np.array(lasts, np.int64)
        sizes = np.array([len(batches) for batches in passes], np.int64)
        self._first = np.cumsum(sizes) - sizes
        self._pass_of_rank = np.repeat(np.arange(len(passes)), sizes)
        self._is_lockstep = bool((sizes > 1).any())

    def times_ms(self, parts: ArrayParts) -> Any:
        """Return the time of each pass."""
        if not len(self._decodes):
            return np.zeros(0)
        of_each: Any = parts.chunk_ms(self._starts, self._ends)
        chunks_ms: Any = np.bincount(self._rank_of_chunk, of_each, minlength=len(self._decodes))
        if not self._is_lockstep:
            return parts.pass_ms(self._decodes, self._known, self._tokens, self._samples, self._sequences, chunks_ms)
        all_tokens: Counts = np.add.reduceat(self._tokens, self._first)
        of_ranks: Any = parts.rank_ms(
            self._decodes,
            self._known,
            self._tokens,
            self._samples,
            self._sequences,
            chunks_ms,
            all_tokens[self._pass_of_rank],
        )
        slowest_ms: Any = np.maximum.reduceat(of_ranks, self._first)
        most_tokens: Counts = np.maximum.reduceat(self._tokens, self._first)
        most_decodes: Counts = np.maximum.reduceat(self._decodes, self._first)
        all_decodes: Counts = np.add.reduceat(self._decodes, self._first)
        return parts.lockstep_ms(slowest_ms, most_tokens, all_tokens, most_decodes, all_decodes)


class StepArrays:
    """Steps that are priced together: each is a sequence of batches, one per rank that has work.

    The steps are taken apart once. They can then be priced under any constants of `cost`, but not for another model,
    device or engine.
    """

    def __init__(self, cost: RooflineCost, steps: Sequence[Sequence[Batch]]) -> None:
        parts = cost.parts
        self._num_steps = len(steps)
        self._composes = parts.composes
        if not self._composes:
            self._whole = _Passes(steps, parts.num_verified)
            return
        decodes: list[list[Batch]] = []
        rest: list[Sequence[Batch]] = []
        self._with_decodes: list[int] = []
        self._with_prompts: list[int] = []
        for place, batches in enumerate(steps):
            of_decodes, of_prompts = parts.apart(batches)
            if of_decodes:
                decodes.append(of_decodes)
                self._with_decodes.append(place)
            if of_prompts:
                rest.append(of_prompts if parts.separates or not of_decodes else batches)
                self._with_prompts.append(place)
        self._decodes = _Passes(decodes, parts.num_verified)
        self._rest = _Passes(rest, parts.num_verified)

    def times_ms(self, cost: RooflineCost) -> Values:
        """Return the time of each step under the constants of `cost`, not rounded: shape [steps]."""
        parts = ArrayParts(cost)
        if not self._composes:
            whole: Values = self._whole.times_ms(parts)
            return whole
        decodes_ms: Any = np.zeros(self._num_steps)
        rest_ms: Any = np.zeros(self._num_steps)
        decodes_ms[self._with_decodes] = self._decodes.times_ms(parts)
        rest_ms[self._with_prompts] = self._rest.times_ms(parts)
        composed: Any = parts.composed_ms(decodes_ms, rest_ms)
        times: Values = composed
        return times
