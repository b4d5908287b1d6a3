"""A toy model with a paged KV cache: two layers of attention in wrapping 64-bit integers.

Every token's K/V goes into the page and slot that the plan names; what the second layer stores depends on everything
the first reads back through the page table, and the next token on everything the second reads. Integers make sums
exact in any order, so there is one right output, and a wrong page anywhere changes it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvarts.core.sched.plan import StepPlan, StepResult

Words = npt.NDArray[np.uint64]

NUM_TOKEN_IDS = 7
WEIGHTS = tuple(np.uint64(word) for word in (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9))


def mix(words: Words) -> Words:
    """Scrambles each word."""
    words = (words ^ (words >> np.uint64(31))) * WEIGHTS[0]
    words = (words ^ (words >> np.uint64(29))) * WEIGHTS[1]
    return words ^ (words >> np.uint64(32))


def first_kv(tokens: Words, positions: Words) -> Words:
    return mix(tokens * WEIGHTS[2] + positions + np.uint64(1))


def attend(kv: Words, positions: Words) -> Words:
    """What each of `positions` reads: a sum over everything up to it, weighted by place."""
    places = np.arange(len(kv), dtype=np.uint64)
    return np.cumsum(kv * mix(places + np.uint64(5)), dtype=np.uint64)[positions]


def generate(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The undisturbed run: no pages, no batch, everything computed from scratch for every token."""
    known = list(prompt)
    for _ in range(num_tokens):
        tokens = np.array(known, np.uint64)
        positions = np.arange(len(known), dtype=np.uint64)
        first = first_kv(tokens, positions)
        second = mix(attend(first, positions) ^ tokens)
        known.append(int(mix(attend(second, positions[-1:]))[0]) % NUM_TOKEN_IDS)
    return known[len(prompt) :]


def drafted_of(plan: StepPlan) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Words]:
    """Rows, positions and tokens of the drafts of a step."""
    assert plan.drafts is not None
    return plan.drafts.rows, plan.drafts.positions, plan.drafts.tokens


class ToyExecutor:
    """An Executor of pages. `stop_token`: ends a sequence when it is sampled."""

    needs_page_ids = True

    def __init__(self, num_pages: int, page_size: int, max_num_seqs: int, *, stop_token: int | None = None) -> None:
        self.page_size = page_size
        self.max_num_seqs = max_num_seqs
        self.stop_token = stop_token
        rng = np.random.default_rng(0)
        # Pages start with rubbish: reading what was not written must not go unnoticed.
        self.kv = rng.integers(0, 1 << 63, (2, num_pages * page_size), dtype=np.uint64)
        self.tables: dict[int, list[int]] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        work: list[tuple[int, int, Words, bool]] = []
        drafts: dict[int, list[int]] = {}
        for chunk in plan.batch.chunks:
            (table,) = chunk.tables
            self.tables[chunk.row] = list(table.page_ids)
            work.append((chunk.row, chunk.start, chunk.tokens, chunk.is_last))
        if plan.decodes is not None:
            decodes = plan.decodes
            for row, index, (page_id,) in decodes.new_blocks:
                assert index <= len(self.tables[row]), "pages come in order"
                self.tables[row][index:] = [page_id]
            if plan.drafts is not None:
                assert plan.batch.num_drafted == len(plan.drafts.rows)
                for row, position, token in zip(*map(np.ndarray.tolist, drafted_of(plan)), strict=True):
                    guessed = drafts.setdefault(row, [])
                    at = decodes.positions[decodes.rows.tolist().index(row)]
                    assert position == at + 1 + len(guessed), "drafts come in order, after the decode"
                    guessed.append(token)
            for row, position, token in zip(decodes.rows, decodes.positions, decodes.tokens, strict=True):
                tokens = np.array([token, *drafts.get(int(row), ())], np.uint64)
                work.append((int(row), int(position), tokens, True))
        slots = [self.slots(row, start + len(tokens)) for row, start, tokens, _ in work]
        sampled = np.zeros(self.max_num_seqs, np.uint64)
        # Layer by layer over the whole batch, so that a step may read what it writes for another sequence.
        for (_, start, tokens, _), mine in zip(work, slots, strict=True):
            positions = np.arange(start, start + len(tokens), dtype=np.uint64)
            self.kv[0, mine[start:]] = first_kv(tokens, positions)
        for (_, start, tokens, _), mine in zip(work, slots, strict=True):
            positions = np.arange(start, start + len(tokens), dtype=np.uint64)
            self.kv[1, mine[start:]] = mix(attend(self.kv[0, mine], positions) ^ tokens)
        accepted = []
        for (row, start, tokens, samples), mine in zip(work, slots, strict=True):
            if not samples:
                continue
            end = start + len(tokens) - len(drafts.get(row, ()))
            for drafted in [*drafts.get(row, ()), None]:
                sampled[row] = int(mix(attend(self.kv[1, mine], np.array([end - 1], np.uint64)))[0]) % NUM_TOKEN_IDS
                if sampled[row] != drafted or sampled[row] == self.stop_token:
                    break
                end += 1
            if num_accepted := end - (start + len(tokens) - len(drafts.get(row, ()))):
                accepted.append((row, num_accepted))
        stopped: tuple[int, ...] = ()
        if self.stop_token is not None:
            stopped = tuple(row for row, _, _, samples in work if samples and sampled[row] == self.stop_token)
        return StepResult(1_000_000, sampled, stopped, accepted=tuple(accepted))

    def slots(self, row: int, num_tokens: int) -> npt.NDArray[np.int64]:
        """Where the first `num_tokens` tokens of a row are, read through its page table."""
        table = np.array(self.tables[row], np.int64)
        positions = np.arange(num_tokens)
        return table[positions // self.page_size] * self.page_size + positions % self.page_size
