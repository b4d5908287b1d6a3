"""A model that carries out transfers badly, served with tiers below its pages and checked token by token."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

from hypothesis import strategies as st

from kvarts.core.config import EngineConfig
from kvarts.core.engine import Engine
from kvarts.core.kv.transfer import Direction, Transfer, TransferReport
from kvarts.core.sched.drafts import Drafter
from kvarts.core.sched.plan import StepPlan, StepResult
from kvarts.core.tiers.config import OffloadConfig
from kvarts.core.tiers.opening import prepare_tiers
from kvarts.core.tiers.pagefiles import PageFiles
from kvarts.run.page_bytes import PageCopier

from builders.serving import Arrival, assert_undisturbed, serve
from builders.tiers import offloader_of
from builders.toy_model import ToyExecutor

__all__ = ["TieredToy", "busy", "check_outputs", "offloads"]


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
        return result.replaced(transfer_reports=tuple(reports))

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
    policy: Any = draw(st.sampled_from(["eager", "lazy", "exclusive"]))
    return OffloadConfig(
        host_pages=draw(st.sampled_from([1, 4, 16, 64])),
        policy=policy,
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
    interfere: Callable[[int], object] = lambda step: None,
    drafter: Drafter | None = None,
) -> tuple[Engine, TieredToy]:
    """Serve `arrivals` and check what they got. `interfere`: is called between steps."""
    executor = TieredToy(config, offload, rng, files)

    def between_steps(engine: Engine, step: int) -> None:
        interfere(step)
        if resets and rng.random() < 0.05:
            assert engine.tiers is not None
            engine.tiers.reset()

    engine, requests, cancelled = serve(
        arrivals,
        config,
        executor,
        between_steps=between_steps,
        drafter=drafter,
        tiers=partial(prepare_tiers, offload, known_keys=() if files is None else files.keys(), namespace="toy"),
    )
    assert_undisturbed(arrivals, requests, cancelled)
    offloader = offloader_of(engine)
    for tier in offloader.tiers:
        assert tier.num_used_blocks == 0, "L2: at rest nothing is held"
    return engine, executor


def busy(policy: str = "eager", **kwargs: int) -> tuple[list[Arrival], EngineConfig, OffloadConfig]:
    """Three prompts that share a beginning, again and again, on a device for one of them."""
    shared = [1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5]
    arrivals = [Arrival(30 * i, [*shared[: 12 - 2 * (i % 3)], *([i % 3] * 8)], 4, 0, None) for i in range(12)]
    config = EngineConfig(num_pages=14, page_size=2, max_num_batched_tokens=8, max_num_seqs=4)
    return arrivals, config, OffloadConfig(host_pages=64, policy=policy, target_free=6, **kwargs)  # type: ignore[arg-type]
