"""That a model within its guarantee waits no longer for memory than said, looked at whenever one waits or asks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from unittest.mock import patch

from kvarts.core.events import Blocked
from kvarts.core.request import Request
from kvarts.core.sched.policy import NEVER_NS
from kvarts.sim.sharing.device import SharedDevice

__all__ = ["guarantees_kept"]


def holds_more_important_work(device: SharedDevice, model: str, priority: int) -> bool:
    """Whether a model beyond its guarantee runs a request that does not give way to one of `priority`."""
    return any(
        request.priority > priority
        for name, member in device._members.items()
        if name != model and member.scheduler is not None
        if member.part.num_used_bytes > member.part.guaranteed_bytes
        for request in member.scheduler.running
    )


@contextmanager
def guarantees_kept(reclaim_after_s: float) -> Iterator[None]:
    """Assert it of all devices meanwhile, with `reclaim_after_s` as they have it."""
    end_turn, preempt_for = SharedDevice.end_turn, SharedDevice.preempt_for

    def checked_way(device: SharedDevice, model: str, request: Request, num_pages: int, *, to_admit: bool) -> bool:
        member = device._members[model]
        is_within = member.part.is_within(num_pages)
        is_granted = preempt_for(device, model, request, num_pages, to_admit=to_admit)
        if to_admit and not is_within:
            assert not is_granted
        elif is_within and not is_granted and reclaim_after_s < inf:
            has_waited = member.since_ns != NEVER_NS and device.now_ns - member.since_ns >= reclaim_after_s * 1e9
            if not to_admit or not reclaim_after_s or has_waited:
                assert holds_more_important_work(device, model, request.priority)
        return is_granted

    def checked_end(device: SharedDevice, model: str, *, has_released: bool) -> None:
        member = device._members[model]
        scheduler, part = member.scheduler, member.part
        assert scheduler is not None
        if scheduler.waiting.num_waiting and scheduler.blocked is Blocked.PAGES:
            head, num_wanted = scheduler.waiting.head(device.now_ns), scheduler.num_pages_wanted
            part.refresh()
            # What windows gave back when the step had ended is looked at in the next turn.
            given = scheduler.mark.used - part.cache.num_used
            others = [other.scheduler for name, other in device._members.items() if name != model]
            if part.is_within(num_wanted + given):
                assert reclaim_after_s or holds_more_important_work(device, model, head.priority)
            elif not any(other is not None and other.has_work for other in others):
                assert num_wanted > part.cache.num_free - given or scheduler.running.chunked
        end_turn(device, model, has_released=has_released)

    with patch.object(SharedDevice, "end_turn", checked_end), patch.object(SharedDevice, "preempt_for", checked_way):
        yield
