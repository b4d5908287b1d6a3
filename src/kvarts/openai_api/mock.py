"""A mock of a model: the engine of a replay, moved step by step on a clock that keeps pace with real time.

What it decides about pages depends on its configuration, its arrivals and their order only, so a replay of recorded
arrivals decides the same, at the same model time, event for event.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvarts.build import TierSettings, build_engine
from kvarts.clock import Clock, PacedClock, PutOffClock
from kvarts.config import EngineConfig
from kvarts.event_log import EventReader
from kvarts.executor.cost import CostModel
from kvarts.executor.mock import MockExecutor
from kvarts.executor.page_bytes import NoPageBytes
from kvarts.executor.prefill import PrefillCost
from kvarts.executor.simulated import SimExecutor
from kvarts.executor.waiting import WaitingExecutor
from kvarts.kv.group_memory import GroupMemory
from kvarts.llm.detokenizing import DetokenizingExecutor
from kvarts.llm.host import ModelHost
from kvarts.llm.llm_engine import LLMEngine
from kvarts.llm.loop import EngineLoop
from kvarts.openai_api.words import NUM_WORDS, VOCABULARY_SIZE, vary_words
from kvarts.request import Request
from kvarts.sim.replica import Replica

__all__ = ["PacedEngine", "mock_model"]


class PacedEngine:
    """A CoreEngine: a Replica that does one step at a time, and sleeps through its pauses."""

    def __init__(self, replica: Replica, clock: Clock) -> None:
        self._replica = replica
        self._clock = clock

    def submit(self, request: Request, now_ns: int) -> str | None:
        """Queue `request`, or return why it can never run. Transfers that have ended since the last step end first."""
        self._replica.run_until(now_ns, [])
        return self._replica.submit(request, now_ns)

    def cancel(self, request: Request) -> None:
        """Drop `request` between steps; its pages are free at once."""
        self._replica.cancel(request)

    def step(self, now_ns: int) -> list[Request]:
        """Do one step that starts at `now_ns`, or wait until one is possible. Return the requests that finished."""
        replica = self._replica
        if not replica.scheduler.has_work:  # transfers only, which have gone on meanwhile
            replica.run_until(now_ns, [])
            if replica.has_work:
                self._clock.wait_until_ns(replica.now_ns)
            return []
        end_ns = replica.start(now_ns)
        if replica.is_pausing:
            self._clock.wait_until_ns(end_ns)
        return replica.finish()

    @property
    def has_work(self) -> bool:
        """Whether there are requests, or transfers under way."""
        return self._replica.has_work


def mock_model(
    config: EngineConfig,
    cost: CostModel,
    *,
    seed: int = 0,
    speedup: float = 1.0,
    offload: TierSettings | None = None,
    token_bytes: int = 0,
    max_positions: int | None = None,
    readers: Sequence[EventReader] = (),
    audit: bool = False,
    clock: Clock | None = None,
    groups: GroupMemory | None = None,
) -> ModelHost:
    """Return a model that takes as long as `cost` says, divided by `speedup`, and writes words.

    `clock`: instead of one that keeps pace with real time. `groups`: of a model with KV groups. The rest as of
    `build_engine` and ModelHost.
    """
    paced = PacedClock(speedup=speedup)
    if clock is None:
        clock = paced
    put_off = PutOffClock(clock)
    num_blocks = 0 if groups is None else groups.num_blocks(config.num_pages)
    executor = MockExecutor(
        config, cost, put_off, vocab_size=NUM_WORDS, seed=seed, vary=vary_words, groups=groups, num_blocks=num_blocks
    )
    detokenizing = DetokenizingExecutor(executor, max_num_seqs=config.max_num_seqs, clock=put_off)
    waiting = WaitingExecutor(detokenizing, put_off)
    assert groups is None or offload is None, "a mock with KV groups has no tiers"
    core = build_engine(
        config,
        waiting,
        memory=groups,
        readers=readers,
        audit=audit,
        offload=offload,
        prefill=PrefillCost(cost, token_budget=config.max_num_batched_tokens, pool_tokens=config.pool_tokens),
        moves_pages=False,
    )
    paced.is_at_rest = lambda: not core.scheduler.has_work
    replica = Replica(core, SimExecutor(cost), step_by_step=True)
    engine = LLMEngine(PacedEngine(replica, clock), executor, detokenizing, clock, page_size=config.page_size)
    return ModelHost(
        loop=EngineLoop(engine),
        core=core,
        config=config,
        clock=clock,
        slots=executor.slots,
        rotation=executor.rotation,
        kv=NoPageBytes(),
        token_bytes=token_bytes,
        vocab_size=VOCABULARY_SIZE,
        max_positions=max_positions,
        fingerprint=lambda: f"mock {seed}",
        kv_groups="off" if groups is None else groups.keeps,
    )
