"""The rows of a live batch: tokens are kept by step and row, and enter each content in the order they were sampled."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvarts.content import Content
from kvarts.request import Request
from kvarts.sched.input_batch import InputBatch
from kvarts.sched.plan import StepResult

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
