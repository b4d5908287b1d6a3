"""Events with the observable state of a scheduler: after a step was planned, and at rest."""

from __future__ import annotations

from kvarts.events import AtRest, StepDone
from kvarts.sched.plan import StepPlan, StepResult
from kvarts.sched.scheduler import Scheduler

__all__ = ["at_rest", "step_done", "with_drafts"]


def step_done(scheduler: Scheduler, plan: StepPlan, now_ns: int, duration_ns: int, num_withheld: int) -> StepDone:
    """Return the event of the step that starts at `now_ns`, for which the scheduler has just made `plan`.

    `num_withheld`: pages that other models kept from this one when the step was planned. Drafts are added by
    `with_drafts`: few engines draft, and this is called in every step.
    """
    mark, loads, batch = scheduler.mark, scheduler.loads, plan.batch
    num_loading = 0 if loads is None else loads.num_waiting
    num_tokens = num_decodes = batch.num_decodes
    for chunk in batch.chunks:
        num_tokens += chunk.num_tokens
    return StepDone(
        plan.step,
        now_ns,
        duration_ns,
        mark.used,
        mark.cached,
        mark.released,
        scheduler.running.num_running,
        scheduler.waiting.num_waiting + len(scheduler.waiting_with_pages) + num_loading,
        scheduler.blocked,
        num_decodes - plan.num_joined,
        num_tokens,
        len(plan.admitted),
        plan.preemptions,
        scheduler.side_counts_at_mark() if scheduler.has_sides else (),
        num_withheld,
        scheduler.cache.num_reserved,
        num_loading,
    )


def with_drafts(done: StepDone, plan: StepPlan, result: StepResult) -> StepDone:
    """Return `done` with the numbers of drafted tokens of `plan` and of accepted ones."""
    num_drafted = plan.batch.num_drafted
    num_accepted = sum(count for _, count in result.accepted)
    return done.replaced(num_tokens=done.num_tokens + num_drafted, num_drafted=num_drafted, num_accepted=num_accepted)


def at_rest(scheduler: Scheduler, now_ns: int) -> AtRest:
    """Return the event of a scheduler that has run out of work at `now_ns`, between steps."""
    cache = scheduler.cache
    return AtRest(
        scheduler.wheel.step - 1,
        now_ns,
        cache.num_used,
        cache.num_cached,
        cache.num_released,
        scheduler.side_counts(),
        cache.num_reserved,
    )
