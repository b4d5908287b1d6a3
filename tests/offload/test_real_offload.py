"""L6 and L2 with tiers below: a model that reads its pages, and pages that are really copied to other places and back.

Transfers end late, in part, twice, or not well; workers report in any order; requests are cancelled and preempted
meanwhile; tiers are reset. The output is that of an undisturbed run.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.config import EngineConfig
from kvarts.engine import Engine
from kvarts.executor.copier import PageCopier
from kvarts.kv.transfer import Direction, Transfer, TransferReport
from kvarts.offload.config import FilesBelow, OffloadConfig
from kvarts.offload.pagefiles import HEAD, PageFiles
from kvarts.sched.plan import StepPlan, StepResult

from builders.serving import Arrival, assert_undisturbed, output_of, serve, served
from builders.tiers import offloader_of
from builders.toy_model import ToyExecutor, generate

pytestmark = pytest.mark.laws


class TieredToy(ToyExecutor):
    """Carries transfers out late and reports them badly, as `rng` has it."""

    def __init__(
        self, config: EngineConfig, offload: OffloadConfig, rng: Random, files: PageFiles | None = None
    ) -> None:
        super().__init__(config.num_pages, config.page_size, config.max_num_seqs)
        assert offload.host_pages is not None
        pages = self.kv.reshape(2, config.num_pages, config.page_size)
        self.copier = PageCopier(list(pages), num_host_pages=offload.host_pages, files=files)
        self.rng = rng
        self.num_workers = offload.workers
        self.transfers: dict[int, Transfer] = {}
        self.pending: list[TransferReport] = []
        self.sent: list[TransferReport] = []
        self.loaded_pages = 0
        self.fails = 0.1

    def execute(self, plan: StepPlan) -> StepResult:
        rng = self.rng
        self.copier.begin(plan.transfers)
        self.transfers.update((transfer.transfer_id, transfer) for transfer in plan.transfers)
        result = super().execute(plan)
        for report in self.copier.run(rng.choice([0, 0, 1, 2, None])):
            told = report
            if rng.random() < self.fails:
                told = self.break_transfer(report)
            for worker in range(self.num_workers):
                # Only one of the workers knows that it failed.
                good = told.num_good_pages if worker == rng.randrange(self.num_workers) else report.num_good_pages
                if worker == self.num_workers - 1:
                    good = told.num_good_pages
                self.pending.append(TransferReport(report.transfer_id, worker, good))
        rng.shuffle(self.pending)
        count = rng.randint(0, len(self.pending))
        reports, self.pending = self.pending[:count], self.pending[count:]
        self.sent += reports
        if self.sent and rng.random() < 0.2:
            reports.append(rng.choice(self.sent))  # late, and a second time
        if rng.random() < 0.1:
            reports.append(TransferReport(10_000 + rng.randrange(100)))
        return msgspec.structs.replace(result, transfer_reports=tuple(reports))

    def break_transfer(self, report: TransferReport) -> TransferReport:
        """The pages from some point on did not arrive; what is there instead must not be read."""
        transfer = self.transfers[report.transfer_id]
        num_good = self.rng.randrange(transfer.num_pages)
        if transfer.direction is Direction.LOAD:
            targets = [page for move in transfer.moves for page in move.target_ids]
            for page in targets[num_good:]:
                assert not isinstance(page, bytes)
                start = page * self.page_size
                self.kv[:, start : start + self.page_size] = self.rng.getrandbits(60)
        return TransferReport(report.transfer_id, report.worker, num_good)


@st.composite
def offloads(draw: st.DrawFn) -> OffloadConfig:
    return OffloadConfig(
        host_pages=draw(st.sampled_from([1, 4, 16, 64])),
        policy=draw(st.sampled_from(["eager", "lazy"])),
        target_free=draw(st.sampled_from([1, 4, None])),
        full_prompt_hits=draw(st.booleans()),
        workers=draw(st.sampled_from([1, 1, 3])),
        disk_pages=draw(st.sampled_from([None, None, 3, 40])),
    )


def check_outputs(
    arrivals: list[Arrival],
    config: EngineConfig,
    offload: OffloadConfig,
    rng: Random,
    *,
    resets: bool = False,
    files: PageFiles | None = None,
) -> tuple[Engine, TieredToy]:
    executor = TieredToy(config, offload, rng, files)

    def between_steps(engine: Engine, step: int) -> None:
        if resets and rng.random() < 0.05:
            assert engine.tiers is not None
            engine.tiers.reset()

    engine, requests, cancelled = serve(
        arrivals,
        config,
        executor,
        between_steps=between_steps,
        offload=FilesBelow(config=offload, known_keys=() if files is None else tuple(files.keys()), namespace="toy"),
    )
    assert_undisturbed(arrivals, requests, cancelled)
    offloader = offloader_of(engine)
    for tier in offloader.tiers:
        assert tier.num_used == 0, "L2: at rest nothing is held"
    return engine, executor


@given(served(), offloads(), st.integers(0, 1 << 30), st.booleans())
def test_outputs_equal_an_undisturbed_run(
    case: tuple[list[Arrival], EngineConfig], offload: OffloadConfig, seed: int, resets: bool
) -> None:
    """L1 to L3, L6 and L8, whatever becomes of transfers."""
    arrivals, config = case
    with TemporaryDirectory() as directory:
        files = PageFiles(directory, max_bytes=1 << 20) if offload.disk_pages else None
        check_outputs(arrivals, config, offload, Random(seed), resets=resets, files=files)


def busy(policy: str = "eager", **kwargs: int) -> tuple[list[Arrival], EngineConfig, OffloadConfig]:
    """Three prompts that share a beginning, again and again, on a device for one of them."""
    shared = [1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5]
    arrivals = [Arrival(30 * i, [*shared[: 12 - 2 * (i % 3)], *([i % 3] * 8)], 4, 0, None) for i in range(12)]
    config = EngineConfig(num_pages=14, page_size=2, max_num_batched_tokens=8, max_num_seqs=4)
    return arrivals, config, OffloadConfig(host_pages=64, policy=policy, target_free=6, **kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", ["eager", "lazy"])
def test_pages_come_back_from_host_memory(policy: str) -> None:
    arrivals, config, offload = busy(policy)
    engine, _ = check_outputs(arrivals, config, offload, Random(0))
    offloader = offloader_of(engine)
    assert offloader.counts.num_loads > 0
    assert offloader.counts.num_stores > 0


class ReadsElsewhere(TieredToy):
    """One load puts one page where another should be."""

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan)
        for transfer in plan.transfers:
            if transfer.direction is Direction.LOAD and transfer.num_pages > 1:
                self.copier.run()
                self.pending = [TransferReport(number) for number in self.transfers]
                first, second = transfer.moves[0].target_ids[:2]
                assert not isinstance(first, bytes)
                assert not isinstance(second, bytes)
                pages = self.kv.reshape(2, -1, self.page_size)
                pages[:, first] = pages[:, second]
        return result


def test_a_page_copied_to_the_wrong_place_changes_the_output() -> None:
    """The negative control."""
    arrivals, config, offload = busy()
    executor = ReadsElsewhere(config, offload, Random(0))
    executor.fails = 0.0
    _, requests, _ = serve(arrivals, config, executor, offload=offload)
    assert [output_of(request) for request in requests] != [generate(a.prompt, a.num_output) for a in arrivals]


def test_files_survive_a_restart(tmp_path: Path) -> None:
    arrivals, config, offload = busy(disk_pages=64)
    files = PageFiles(tmp_path, max_bytes=1 << 20)
    check_outputs(arrivals, config, offload, Random(1), files=files)
    found = PageFiles(tmp_path, max_bytes=1 << 20)
    assert found.keys()
    assert sorted(found.keys()) == sorted(files.keys())
    engine, _ = check_outputs(arrivals[:1], config, offload, Random(2), files=found)
    assert offloader_of(engine).counts.num_loads == 1


@pytest.mark.parametrize("damage", ["truncated", "changed", "foreign", "gone"])
def test_a_damaged_file_is_a_miss(tmp_path: Path, damage: str) -> None:
    arrivals, config, offload = busy(disk_pages=64)
    check_outputs(arrivals, config, offload, Random(1), files=PageFiles(tmp_path, max_bytes=1 << 20))
    for path in sorted(tmp_path.glob("*/*.kv")):
        text = path.read_bytes()
        if damage == "truncated":
            path.write_bytes(text[:-1])
        elif damage == "changed":
            path.write_bytes(text[:-1] + bytes([text[-1] ^ 1]))
        elif damage == "foreign":
            path.write_bytes(text[: HEAD.size - 24] + np.zeros(6).tobytes())
    found = PageFiles(tmp_path, max_bytes=1 << 20)
    if damage == "gone":
        for path in sorted(tmp_path.glob("*/*.kv")):
            path.unlink()
    engine, _ = check_outputs(arrivals[:1], config, offload, Random(2), files=found)
    assert offloader_of(engine).counts.num_failed >= 1


def test_files_keep_their_byte_limit(tmp_path: Path) -> None:
    arrivals, config, offload = busy(disk_pages=64)
    size = HEAD.size + 2 * config.page_size * 8
    files = PageFiles(tmp_path, max_bytes=5 * size)
    check_outputs(arrivals, config, offload, Random(1), files=files)
    assert files.num_bytes <= 5 * size
    assert sum(path.stat().st_size for path in tmp_path.glob("*/*")) == files.num_bytes
