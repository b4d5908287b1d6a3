"""Columns of steps come back as they were, in the same blocks, and need little where they rise."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.report import packed
from kvarts.report.distributions import distribution_ms, weighted_distribution_ms
from kvarts.report.packed import PackedColumn
from kvarts.report.steps import StepLog
from kvarts.sim.replay import replay

from builders.case import Case, Row
from builders.reader_contract import NUM_PAGES, PAGE_SIZE, batches_of_a_run

pytestmark = pytest.mark.laws

BLOCK = 8
RECENT = 5


@pytest.fixture(autouse=True, scope="module")
def _blocks_are_small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed, "BLOCK_STEPS", BLOCK)
        patch.setattr(packed, "RECENT_STEPS", RECENT)
        patch.setattr(packed, "PACK_AT", 3 * BLOCK)
        yield


NUMBERS = st.integers(-(1 << 40), 1 << 40)
RISES = st.builds(
    lambda first, rise, n: [first + rise * index // 7 for index in range(n)], NUMBERS, NUMBERS, st.integers(0, 40)
)


class TestPackedColumn:
    @given(st.lists(st.one_of(st.lists(NUMBERS, max_size=20), RISES), max_size=12))
    def test_gives_back_what_was_appended(self, batches: list[list[int]]) -> None:
        column, expected = PackedColumn("q"), [number for batch in batches for number in batch]
        for batch in batches:
            column.recent.extend(batch)
            column.settle()
            assert len(column.recent) < RECENT
            assert len(column._later) < packed.PACK_AT
        assert len(column) == len(expected)
        assert column.whole().tolist() == expected
        blocks = [block.tolist() for block in column.blocks()]
        assert [number for block in blocks for number in block] == expected
        assert all(len(block) == BLOCK for block in blocks[:-1])

    def test_keeps_few_numbers_as_they_are(self) -> None:
        column = PackedColumn("i")
        column.recent.extend(list(range(3 * BLOCK - 1)))
        column.settle()
        assert column.whole().tolist() == list(range(3 * BLOCK - 1))
        assert not column._blocks

    @pytest.mark.parametrize("extreme", [(1 << 61, -(1 << 61)), ((1 << 62), 0)])
    def test_keeps_what_no_line_comes_near(self, extreme: tuple[int, int]) -> None:
        column = PackedColumn("q")
        numbers = [extreme[index * 7 % 3 % 2] for index in range(4 * BLOCK)]
        column.recent.extend(numbers)
        column.settle()
        assert len(column._blocks) == 4
        assert column.whole().tolist() == numbers

    def test_needs_bits_for_times_that_rise(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(packed, "BLOCK_STEPS", 1 << 16)
        monkeypatch.setattr(packed, "PACK_AT", 1 << 16)
        column = PackedColumn("q")
        column.recent.extend([round(6_012_345 + 39.1287 * step) for step in range(1 << 16)])
        column.settle()
        assert len(column) == 1 << 16 and len(column._blocks) == 1
        assert sum(len(block.differences) for block in column._blocks) < (1 << 16) * 4 / 8


class TestALogOfManySteps:
    def test_is_as_one_that_keeps_them_all(self, monkeypatch: pytest.MonkeyPatch) -> None:
        plain, short = StepLog(NUM_PAGES), StepLog(NUM_PAGES)
        for events in batches_of_a_run():
            short.observe(events)
        assert short._durations_ns._blocks
        monkeypatch.setattr(packed, "PACK_AT", 1 << 40)
        for events in batches_of_a_run():
            plain.observe(events)
        assert not plain._durations_ns._blocks
        assert any(slab.num_steps.max() > 1 for slab in short.slabs())
        assert len(list(short.slabs())) > 5
        for name in plain.columns:
            assert short.columns[name].tolist() == plain.columns[name].tolist(), name
        assert short.spans["duration_ns"].tolist() == plain.spans["duration_ns"].tolist()
        assert short.end_ns == plain.end_ns
        assert short.released().tolist() == plain.released().tolist()
        gaps = [
            [pair for part in log.gaps() for pair in zip(*map(np.ndarray.tolist, part), strict=True)]
            for log in (short, plain)
        ]
        assert gaps[0] == gaps[1]

    def test_reports_the_same(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rows = [Row(3 * index, [1, 2, 3, 4, index % 3], 5, 30 + index, None, 0, None) for index in range(12)]
        case = Case(rows, 1, PAGE_SIZE, NUM_PAGES, 16, 4, "default", 2)
        trace, config = case.trace(), case.config()
        packed_report = replay(trace, config)
        assert packed_report.step_logs[0]._durations_ns._blocks
        packed_bytes = packed_report.to_json(), packed_report.distributions_json()
        monkeypatch.setattr(packed, "PACK_AT", 1 << 40)
        report = replay(trace, config)
        assert packed_bytes == (report.to_json(), report.distributions_json())


class TestWeightedDistribution:
    @given(
        st.lists(
            st.lists(st.tuples(st.integers(-(1 << 50), 1 << 50) | st.integers(0, 5), st.integers(0, 4)), max_size=20),
            max_size=5,
        )
    )
    def test_is_that_of_each_value_as_often_as_its_weight_says(self, pairs: list[list[tuple[int, int]]]) -> None:
        parts = [(np.array([v for v, _ in part], np.int64), np.array([w for _, w in part], np.int64)) for part in pairs]
        repeated = np.array([value for part in pairs for value, weight in part for _ in range(weight)], np.int64)
        expected = distribution_ms(repeated)
        for most_sorted in (1 << 24, 0):
            found = weighted_distribution_ms(lambda: parts, most_sorted=most_sorted)
            mean, mean_expected = found.pop("mean"), distribution_ms(repeated)["mean"]
            assert mean == pytest.approx(mean_expected, abs=1e-9) if mean is not None else mean_expected is None
            assert found == {name: value for name, value in expected.items() if name != "mean"}
