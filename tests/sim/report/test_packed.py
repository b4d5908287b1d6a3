"""Columns of steps come back as they were, in the same blocks, and need little where they rise."""

from __future__ import annotations

from collections.abc import Iterator
from math import fsum

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.core.events import Event, LeapDone, PerStep, StepDone
from kvarts.core.sched.wheel import PagesDue
from kvarts.cost.mocker_formula import MockerTimes
from kvarts.sim.replaying import replay
from kvarts.sim.report import packed
from kvarts.sim.report.distributions import distribution_ms, exact_sum, weighted_distribution_ms
from kvarts.sim.report.packed import PackedColumn
from kvarts.sim.report.steps import StepLog

from builders.case import Case, Row
from builders.reader_contract import NUM_PAGES, PAGE_SIZE, batches_of_a_run

pytestmark = pytest.mark.laws

BLOCK = 8
PERIOD = 5
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
        assert len(list(packed_report.step_logs[0].slabs())) > 5
        packed_bytes = packed_report.to_json(), packed_report.distributions_json()
        monkeypatch.setattr(packed, "PACK_AT", 1 << 40)
        monkeypatch.setattr(packed, "BLOCK_STEPS", 1 << 16)
        report = replay(trace, config)
        assert packed_bytes == (report.to_json(), report.distributions_json())


def made_leaps(kinds: list[tuple[int, int, int, int, list[tuple[int, int]]]]) -> tuple[list[Event], list[Event]]:
    """Events of steps and leaps, by rules where a kind says so, and the same with all durations and pages listed."""
    by_rule: list[Event] = []
    listed: list[Event] = []
    step, start_ns, used = 0, 0, 0
    for kind, num_decodes, known_tokens, num_steps, due in kinds:
        if not kind:
            done = StepDone(step, start_ns, known_tokens, used, 0, 0, num_decodes, 0, 0, num_decodes, 9, 1, ())
            by_rule.append(done)
            listed.append(done)
            step, start_ns = step + 1, start_ns + known_tokens
            continue
        times = MockerTimes(num_decodes, known_tokens, 500, num_steps)
        offsets = {offset: count for offset, count in due if offset < num_steps}
        total = sum(count * len(range(offset, num_steps, PERIOD)) for offset, count in offsets.items())
        taken = PagesDue(num_steps, PERIOD, list(offsets), list(offsets.values()), total)
        assert sum(taken) == total
        as_lists = LeapDone(step, start_ns, list(times), list(taken), used, 0, 0, num_decodes, 0, 0)
        listed.append(as_lists)
        kept: PerStep = times if kind & 1 else as_lists.durations_ns
        by_rule.append(as_lists.replaced(durations_ns=kept, pages_taken=taken if kind & 2 else list(taken)))
        step, start_ns, used = step + num_steps, start_ns + times.total_ns, used + total
    return by_rule, listed


def assert_gaps_are_narrowed(log: StepLog) -> None:
    """What a log knows of its gaps without a pass over them, and which of them it returns in a range."""
    pairs = [pair for part in log.gaps() for pair in zip(*map(np.ndarray.tolist, part), strict=True)]
    times_ns = sorted(time_ns for time_ns, weight in pairs for _ in range(weight))
    if log.gap_extent() is not None:
        assert log.gap_extent() == (len(times_ns), sum(times_ns), times_ns[0], times_ns[-1])
    for low in times_ns[:: len(times_ns) // 4 + 1]:
        ranges = [(low, low + 2), (times_ns[-1], times_ns[-1] + 1)]
        parts = log.gaps_within(ranges)
        found = sorted(pair for part in parts for pair in zip(*map(np.ndarray.tolist, part), strict=True))
        assert not set(found) - set(pairs)
        for first, end in ranges:
            wanted = [(time_ns, weight) for time_ns, weight in pairs if first <= time_ns < end]
            assert sorted(wanted) == [(time_ns, weight) for time_ns, weight in found if first <= time_ns < end]
    distribution = weighted_distribution_ms(log.gaps)
    narrowed = weighted_distribution_ms(log.gaps, within=log.gaps_within, extent=log.gap_extent(), most_sorted=0)
    assert narrowed == distribution


KINDS = st.tuples(
    st.integers(0, 3),
    st.integers(1, 5),
    st.integers(1, 600),
    st.integers(1, 3 * BLOCK),
    st.lists(st.tuples(st.integers(0, PERIOD - 1), st.integers(1, 4)), max_size=3),
)


class TestStepsByRule:
    @given(st.lists(KINDS, min_size=1, max_size=8))
    def test_are_as_listed_ones(self, kinds: list[tuple[int, int, int, int, list[tuple[int, int]]]]) -> None:
        logs = [StepLog(NUM_PAGES), StepLog(NUM_PAGES)]
        for log, events in zip(logs, made_leaps(kinds), strict=True):
            for event in events:
                log.observe([event])
        found = [
            (
                [[list(map(int, column)) for column in part] for part in log.gaps()],
                [[list(map(int, column)) for column in part] for part in log.used_over_time()],
                list(map(int, log.spans["duration_ns"])),
                len(log),
                log.end_ns,
            )
            for log in logs
        ]
        assert found[0] == found[1]
        assert_gaps_are_narrowed(logs[0])
        for name, column in logs[1].columns.items():
            assert logs[0].columns[name].tolist() == column.tolist(), name


class TestWeightedDistribution:
    @given(
        st.lists(
            st.lists(st.tuples(st.integers(-(1 << 50), 1 << 50) | st.integers(0, 5), st.integers(0, 4)), max_size=20),
            max_size=5,
        ),
    )
    def test_is_that_of_each_value_as_often_as_its_weight_says(self, pairs: list[list[tuple[int, int]]]) -> None:
        parts = [
            (np.array([value for value, _ in part], np.int64), np.array([weight for _, weight in part], np.int64))
            for part in pairs
        ]
        repeated = np.array([value for part in pairs for value, weight in part for _ in range(weight)], np.int64)
        expected = distribution_ms(repeated)
        for most_sorted in (1 << 24, 0):
            found = weighted_distribution_ms(lambda: parts, most_sorted=most_sorted)
            mean, mean_expected = found.pop("mean"), distribution_ms(repeated)["mean"]
            assert mean == pytest.approx(mean_expected, abs=1e-9) if mean is not None else mean_expected is None
            assert found == {name: value for name, value in expected.items() if name != "mean"}


class TestExactSum:
    @given(st.lists(st.integers(-(1 << 60), 1 << 60), max_size=20), st.integers(0, 200))
    def test_is_that_of_each_number(self, numbers: list[int], times: int) -> None:
        whole = np.array(numbers * times, np.int64)
        assert exact_sum(whole) == fsum(numbers * times)
        parts = whole // 3 / 7
        assert exact_sum(parts) == fsum(parts.tolist())
