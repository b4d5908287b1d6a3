"""An engine with KV groups in virtual time.

What a step gives back may let a request in, so how many steps are alike is not known before they are done.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvarts.build import GroupTierSettings, build_grouped_engine
from kvarts.config import EngineConfig
from kvarts.engine import Engine
from kvarts.event_log import EventLog, EventReader
from kvarts.events import LeapDone, PartsMoved
from kvarts.executor.base import VirtualExecutor
from kvarts.kv.group_memory import GroupMemory
from kvarts.kv.group_pages import GroupPages
from kvarts.kv.transfer import PrefillTimes
from kvarts.limits import LATEST_NS, TooLateError
from kvarts.sched.group_leaps import LeapingScheduler
from kvarts.sched.policy import AdmissionPolicy
from kvarts.sim.replica import MOST_STEPS, Replica

__all__ = ["GroupedReplica", "open_grouped"]


class GroupedReplica(Replica):
    """A Replica with a LeapingScheduler."""

    def __init__(
        self,
        engine: Engine,
        scheduler: LeapingScheduler,
        executor: VirtualExecutor,
        *,
        step_by_step: bool = False,
        plans_ahead: bool = False,
    ) -> None:
        super().__init__(engine, executor, step_by_step=step_by_step, plans_ahead=plans_ahead)
        self._grouped = scheduler

    def quiet_until(self, now_ns: int) -> int | None:
        """Return when the first of many steps would end if many alike could start now; else None."""
        num_steps = self._grouped.horizon(now_ns) if self._leaps and not self.num_joining else 0
        return now_ns + self._decode_ns(1)[0] if num_steps else None

    def _leap(self, now_ns: int, until_ns: int, num_steps: int) -> int:
        """Do up to `num_steps` steps; the last one is under way when this returns, as if it had been scheduled."""
        num_wanted = (until_ns - now_ns) // self._last_decode_ns + 2
        durations_ns = self._decode_ns(min(num_steps, num_wanted, MOST_STEPS))
        end_ns = now_ns + sum(durations_ns)
        while len(durations_ns) > 1 and end_ns - durations_ns[-1] >= until_ns:
            end_ns -= durations_ns.pop()
        scheduler, tell = self._grouped, self.engine.log.tell
        cache, step = scheduler.parts, scheduler.wheel.step
        num_used, num_cached, num_released, parts = cache.num_used, cache.num_cached, cache.num_released, cache.counts()
        done = scheduler.leap(len(durations_ns))
        while len(durations_ns) > len(done.taken):
            end_ns -= durations_ns.pop()
        if end_ns > LATEST_NS:
            raise TooLateError
        self._last_decode_ns = durations_ns[-1] or 1
        if tell is not None:
            tell(
                LeapDone(
                    step,
                    now_ns,
                    durations_ns,
                    done.taken,
                    num_used,
                    num_cached,
                    num_released,
                    scheduler.running.num_running,
                    scheduler.num_waiting,
                    scheduler.blocked,
                    parts,
                    parts=PartsMoved(done.listed, done.emptied, done.evicted),
                )
            )
        self.engine.now_ns = end_ns
        return end_ns


def open_grouped(
    config: EngineConfig,
    memory: GroupMemory,
    executor: VirtualExecutor,
    *,
    readers: Sequence[EventReader],
    num_waiting: int,
    policy: AdmissionPolicy,
    step_by_step: bool,
    audit: bool,
    plans_ahead: bool = False,
    offload: GroupTierSettings | None = None,
    prefill: PrefillTimes | None = None,
    holds_pages: bool = False,
) -> Replica:
    """Build an engine of a model with KV groups.

    Its memory is that of `config.num_pages` pages with parts in every group of `memory`. Where something reads page and
    request events, parts are accounted for page by page, and every step is scheduled: what these say is what happened.
    The same with `holds_pages`: some of the memory is kept in use between requests; and with `offload`: tiers below the
    device. `prefill`: how long prompts take to compute. `audit`: assert the laws of page accounting after every step,
    and check every event against a second bookkeeping.
    """
    num_blocks = memory.num_blocks(config.num_pages)
    log = EventLog(readers, num_waiting=num_waiting)
    if offload is not None or audit or holds_pages or log.tell_details is not None:
        engine = build_grouped_engine(
            config,
            memory,
            executor,
            num_blocks=num_blocks,
            readers=readers,
            num_waiting=num_waiting,
            policy=policy,
            audit=audit,
            offload=offload,
            prefill=prefill,
        )
        return Replica(engine, executor, step_by_step=step_by_step, plans_ahead=plans_ahead)
    cache = GroupPages(memory, num_blocks=num_blocks, page_size=config.page_size)
    scheduler = LeapingScheduler(config, cache, policy)
    engine = Engine(config, scheduler, executor, log)
    return GroupedReplica(engine, scheduler, executor, step_by_step=step_by_step, plans_ahead=plans_ahead)
