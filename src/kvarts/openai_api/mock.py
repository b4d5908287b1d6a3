"""A mock of a model: the engine of a replay, advanced step by step on a clock that keeps pace with real time.

Its decisions about pages depend only on its configuration, its arrivals and their order, so a replay of recorded
arrivals makes the same decisions at the same model time, event for event.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from kvarts.build import TierSettings, build_engine, preparation_of
from kvarts.clock import Clock, PacedClock, PutOffClock
from kvarts.config import EngineConfig
from kvarts.engine import Engine
from kvarts.event_log import EventReader
from kvarts.executor.base import CostModel
from kvarts.executor.cost import PrefillCost
from kvarts.executor.mock import MockExecutor
from kvarts.executor.page_bytes import NoPageBytes
from kvarts.executor.simulated import SimExecutor
from kvarts.executor.wrappers import WaitingExecutor
from kvarts.kv.eviction import EvictionOrder, LruOrder
from kvarts.kv.groups import GroupMemory
from kvarts.llm.llm_engine import LLMEngine
from kvarts.llm.loop import EngineLoop, ModelHost
from kvarts.llm.text import DetokenizingExecutor
from kvarts.openai_api.words import NUM_WORDS, VOCABULARY_SIZE, vary_words
from kvarts.request import Request
from kvarts.sim.replica import Replica

__all__ = ["MockParts", "PacedEngine", "mock_model", "mock_parts"]


class PacedEngine:
    """A CoreEngine: a Replica that executes one step at a time, and sleeps through its pauses."""

    def __init__(self, replica: Replica, clock: Clock) -> None:
        self._replica = replica
        self._clock = clock

    def submit(self, request: Request, now_ns: int) -> str | None:
        """Queue `request`, or return why it can never run. Transfers that have ended meanwhile are finished first."""
        self._replica.run_until(now_ns, [])
        return self._replica.submit(request, now_ns)

    def cancel(self, request: Request) -> None:
        """Drop `request` between steps; its pages are free at once."""
        self._replica.cancel(request)

    def step(self, now_ns: int) -> list[Request]:
        """Execute one step that starts at `now_ns`, or wait until one is possible. Return finished requests."""
        replica = self._replica
        if not replica.scheduler.has_work:  # transfers only, which have progressed meanwhile
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


class MockParts(msgspec.Struct, frozen=True):
    """The parts of a mock of one model, alone or on a shared device.

    `executor` makes tokens, `detokenizing` turns them into words, and `waiting` ends the step when its time has passed;
    the engine must be built on `waiting`. `seed` draws the tokens.
    """

    executor: MockExecutor
    detokenizing: DetokenizingExecutor
    waiting: WaitingExecutor
    seed: int

    def host(
        self,
        loop: EngineLoop,
        core: Engine,
        config: EngineConfig,
        clock: Clock,
        *,
        token_bytes: int,
        max_positions: int | None,
        groups: GroupMemory | None,
    ) -> ModelHost:
        """Return the model that `core` computes, advanced by `loop`. Other arguments as for ModelHost."""
        return ModelHost(
            loop=loop,
            core=core,
            config=config,
            clock=clock,
            slots=self.executor.slots,
            rotation=self.executor.rotation,
            kv=NoPageBytes(),
            token_bytes=token_bytes,
            vocab_size=VOCABULARY_SIZE,
            max_positions=max_positions,
            fingerprint=lambda: f"mock {self.seed}",
            kv_groups="off" if groups is None else groups.keeps,
            memory=groups,
        )


def mock_parts(
    config: EngineConfig, cost: CostModel, clock: Clock, *, seed: int, groups: GroupMemory | None, num_blocks: int
) -> MockParts:
    """Return the parts of a mock. `groups`, `num_blocks`: KV groups of the model, and the blocks of its memory."""
    put_off = PutOffClock(clock)
    executor = MockExecutor(
        config, cost, put_off, vocab_size=NUM_WORDS, seed=seed, vary=vary_words, groups=groups, num_blocks=num_blocks
    )
    detokenizing = DetokenizingExecutor(executor, max_num_seqs=config.max_num_seqs, clock=put_off)
    return MockParts(executor, detokenizing, WaitingExecutor(detokenizing, put_off), seed)


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
    make_order: Callable[[], EvictionOrder] = LruOrder,
) -> ModelHost:
    """Return a model whose steps take the time of `cost`, divided by `speedup`, and which writes words.

    `clock`: replaces the clock that keeps pace with real time. `groups`: KV groups of the model. Other arguments as for
    `build_engine` and ModelHost.
    """
    paced = PacedClock(speedup=speedup)
    if clock is None:
        clock = paced
    num_blocks = 0 if groups is None else groups.num_blocks(config.num_pages)
    parts = mock_parts(config, cost, clock, seed=seed, groups=groups, num_blocks=num_blocks)
    core = build_engine(
        config,
        parts.waiting,
        memory=groups,
        readers=readers,
        audit=audit,
        tiers=preparation_of(offload),
        make_order=make_order,
        prefill=PrefillCost(cost, token_budget=config.max_num_batched_tokens, pool_tokens=config.pool_tokens),
        moves_pages=False,
        step_ns=cost.step_ns,
    )
    paced.is_at_rest = lambda: not core.scheduler.has_work
    replica = Replica(core, SimExecutor(cost), step_by_step=True)
    paced_engine = PacedEngine(replica, clock)
    engine = LLMEngine(paced_engine, parts.executor, parts.detokenizing, clock, page_size=config.page_size)
    return parts.host(
        EngineLoop(engine),
        core,
        config,
        clock,
        token_bytes=token_bytes,
        max_positions=max_positions,
        groups=groups,
    )
