"""Positions of tokens in slots, against lists of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.run.flat_batch import StateBatch
from kvarts.run.page_bytes import PageSlots

NUM_PAGES = 6
STATM = Path("/proc/self/statm")


@given(st.sampled_from([1, 3]), st.data())
def test_slots_have_what_was_written_last(page_size: int, data: st.DataObject) -> None:
    slots, naive = PageSlots(NUM_PAGES, page_size), np.full((NUM_PAGES, page_size), -1)
    pages = st.lists(st.integers(0, NUM_PAGES - 1), min_size=1, max_size=3, unique=True)
    for _ in range(data.draw(st.integers(1, 12))):
        match data.draw(st.sampled_from(["tokens", "state", "copy", "restore"])):
            case "tokens":
                page = data.draw(st.integers(0, NUM_PAGES - 1))
                at = np.arange(page_size)
                start = data.draw(st.integers(0, 50))
                slots.write(page * page_size + at, start + at)
                naive[page, at] = start + at
            case "state":
                blocks, position = data.draw(pages), data.draw(st.integers(0, 50))
                batch = StateBatch(np.array([blocks]), (), np.zeros(0, np.int64))
                slots.write_states(batch, np.array([position]))
                naive[blocks] = position
                assert slots.are_state_after(blocks, position)
                assert not slots.are_state_after(blocks, position + 1)
            case "copy":
                source, target = (data.draw(st.integers(0, NUM_PAGES - 1)) for _ in range(2))
                slots.copy_page(source, target)
                naive[target] = naive[source]
            case _:
                ids = data.draw(pages)
                saved = slots.positions(data.draw(st.permutations(range(NUM_PAGES)))[: len(ids)])
                slots.restore(ids, saved)
                naive[ids] = saved
        if data.draw(st.booleans()):
            ids = data.draw(pages)
            assert slots.positions(ids).tolist() == naive[ids].tolist()


def num_resident() -> int:
    """Pages of memory that this process has."""
    return int(STATM.read_text().split()[1])


@pytest.mark.skipif(not STATM.exists(), reason="only Linux tells")
def test_slots_take_memory_where_something_is_written_only() -> None:
    before = num_resident()
    slots = PageSlots(1 << 22, 512)  # 16 GiB
    slots.write(np.arange(512), np.arange(512))
    slots.write_states(StateBatch(np.arange(1 << 16)[None], (), np.zeros(0, np.int64)), np.array([9]))
    assert (num_resident() - before) * 4096 < 1 << 27
