"""The rows of a live batch: tokens are kept by step and row, and enter each content in the order they were sampled."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvarts.core.sched.input_batch
from kvarts.core.build import build_engine
from kvarts.core.config import EngineConfig
from kvarts.core.content import Content
from kvarts.core.kv.page_cache import PageCache
from kvarts.core.request import Request, RequestState
from kvarts.core.sched.input_batch import InputBatch
from kvarts.core.sched.plan import StepPlan, StepResult
from kvarts.core.sched.scheduler import Scheduler

PAGE_SIZE, NUM_ROWS = 4, 5


@given(st.data())
def test_tokens_of_several_requests_are_appended_as_each_sampled_them(data: st.DataObject) -> None:
    """A naive batch has a list of tokens for each request. As many are appended as the ring keeps, at most."""
    batch = InputBatch(NUM_ROWS, PAGE_SIZE)
    requests = []
    for index in range(NUM_ROWS):
        content = Content.from_tokens([index] * (index + 1), page_size=PAGE_SIZE, owner=index)
        requests.append(Request(index, content, num_prompt_tokens=index + 1, max_tokens=100))
        batch.enter(requests[-1])
    expected = [[index] * (index + 1) for index in range(NUM_ROWS)]
    sampled: list[list[int]] = [[] for _ in requests]
    for step in range(data.draw(st.integers(0, 12), label="steps")):
        tokens = data.draw(st.lists(st.integers(0, 2**64 - 1), min_size=NUM_ROWS, max_size=NUM_ROWS), label="tokens")
        batch.keep(step, StepResult(1, np.array(tokens, np.uint64)))
        for row, token in enumerate(tokens):
            sampled[row].append(token)
        chosen = data.draw(st.lists(st.sampled_from(range(NUM_ROWS)), unique=True), label="chosen")
        # No request waits longer than the ring keeps tokens.
        chosen += [row for row in range(NUM_ROWS) if row not in chosen and len(sampled[row]) > PAGE_SIZE]
        known = []
        for row in chosen:
            expected[row] += sampled[row]
            sampled[row] = []
            known.append(len(expected[row]))
        batch.append_all_sampled([requests[row] for row in chosen], known, step + 1)
        for row in range(NUM_ROWS):
            content = requests[row].content
            assert content.num_known_tokens == len(expected[row])
            assert content.tokens(0, len(expected[row])).tolist() == expected[row]


class PagesByHand:
    """Stands for an executor that needs page ids; the tokens of steps are made below."""

    needs_page_ids = True

    def execute(self, plan: StepPlan) -> StepResult:
        raise NotImplementedError


class Pair:
    """Two engines that get the same requests and tokens: one publishes each page when it is full, one later."""

    def __init__(self, config: EngineConfig, most_late: int, patch: pytest.MonkeyPatch) -> None:
        self.page_size = config.page_size
        self.schedulers = []
        for most in (config.page_size, config.page_size + most_late):
            patch.setattr(kvarts.core.sched.input_batch, "MOST_LATE", most)
            self.schedulers.append(build_engine(config, PagesByHand()).scheduler)
        assert [each.running.most_late for each in self.schedulers] == [0, most_late]
        self.requests: list[list[Request]] = [[], []]
        self.step = 0

    def add(self, prompt: list[int], max_tokens: int, priority: int) -> None:
        for scheduler, requests in zip(self.schedulers, self.requests, strict=True):
            content = Content.from_tokens(prompt, page_size=self.page_size, owner=len(requests))
            request = Request(
                len(requests), content, num_prompt_tokens=len(prompt), max_tokens=max_tokens, priority=priority
            )
            assert scheduler.add(request) is None
            requests.append(request)

    def do_step(self, tokens: list[int], stopped: int) -> None:
        """Plan and end a step; `stopped`: the row, if it computes a token, whose token ends its sequence."""
        plans = [scheduler.schedule(self.step) for scheduler in self.schedulers]
        eager, late = map(self.words, plans)
        assert eager == late
        rows = [] if plans[0].decodes is None else plans[0].decodes.rows.tolist()
        result = StepResult(1, np.array(tokens, np.uint64), stopped_rows=(stopped,) if stopped in rows else ())
        self.step += 1
        ended = [[each.index for each in every.commit(self.step, result)] for every in self.schedulers]
        assert ended[0] == ended[1]
        counts = [(each.cache.num_used, each.cache.num_cached, each.cache.num_evicted) for each in self.schedulers]
        assert counts[0] == counts[1]

    @staticmethod
    def words(plan: StepPlan) -> object:
        """Return all that an executor reads."""
        chunks = [(each.row, each.start, each.tokens.tolist(), each.tables) for each in plan.batch.chunks]
        decodes = plan.decodes
        rows = None
        if decodes is not None:
            rows = decodes.rows.tolist(), decodes.positions.tolist(), decodes.tokens.tolist(), decodes.new_blocks
        return chunks, rows, plan.admitted, plan.preemptions, plan.batch.num_decodes

    def cancel(self, index: int) -> None:
        for scheduler, requests in zip(self.schedulers, self.requests, strict=True):
            if requests[index].state in {RequestState.WAITING, RequestState.PREFILLING, RequestState.DECODING}:
                scheduler.cancel(requests[index])

    def look(self) -> None:
        """Compare what can be found: for each page, all tokens up to its end, its copies, their ids and references."""
        eager, late = map(self.found, self.schedulers)
        assert eager == late
        for scheduler in self.schedulers:
            scheduler.check()

    def found(self, scheduler: Scheduler) -> dict[tuple[int, ...], list[tuple[int, int]]]:
        found: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        tree = cast(PageCache, scheduler.cache).tree
        for node in tree.nodes():
            assert node.page_ids is not None
            for page, page_id in zip(range(node.start, node.end), node.page_ids, strict=True):
                tokens = tuple(node.content.tokens(0, (page + 1) * self.page_size))
                found.setdefault(tokens, []).append((page_id, node.refs))
        return found


@given(st.data())
@pytest.mark.laws
def test_pages_that_are_published_late_are_those_that_are_published_at_once(data: st.DataObject) -> None:
    """Plans, ends and what is found are the same, whenever anyone looks; prompts and answers are often equal."""
    few = st.integers(0, 1)
    config = EngineConfig(
        num_pages=data.draw(st.integers(14, 40), label="pages"),
        page_size=PAGE_SIZE,
        max_num_seqs=NUM_ROWS,
        max_num_batched_tokens=data.draw(st.integers(6, 40), label="budget"),
        watermark=0,
    )
    with pytest.MonkeyPatch.context() as patch:
        pair = Pair(config, data.draw(st.integers(1, 30), label="late"), patch)
    always_equal = data.draw(st.booleans(), label="always equal")
    for _ in range(data.draw(st.integers(1, 60), label="steps")):
        what = data.draw(st.integers(0, 9), label="what")
        if what <= 1:
            prompt = [*data.draw(st.lists(few, max_size=12)), 1]
            pair.add(prompt, data.draw(st.integers(1, 30)), data.draw(few))
        elif what == 2 and pair.requests[0]:
            pair.cancel(data.draw(st.sampled_from(range(len(pair.requests[0])))))
        elif what == 3:
            pair.look()
        if pair.schedulers[0].has_work:
            equal = always_equal or data.draw(st.booleans())
            tokens = [0] * NUM_ROWS if equal else data.draw(st.lists(few, min_size=NUM_ROWS, max_size=NUM_ROWS))
            pair.do_step(tokens, data.draw(st.integers(-20, NUM_ROWS - 1)))
    pair.look()
