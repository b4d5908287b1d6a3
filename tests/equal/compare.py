"""The first step in which two engines differ."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from itertools import islice, zip_longest

import msgspec

from equal.workload import Step

MOST_STEPS_WITHOUT_WORK = 400
"""More steps than pass in any workload before the next request arrives or a load ends."""


def in_one_form(step: Step | None) -> Step | None:
    """Return `step` with what has no order in one order."""
    if step is not None:
        # A page that is evicted while a decode fills a copy of it is there before the step and after it.
        passing = set(step.stored) & set(step.removed)
        step.stored = sorted(set(step.stored) - passing)
        step.removed = [name for name in step.removed if name not in passing]
        for name in passing:
            step.published.pop(name, None)
        step.preempted.sort()
        step.ended.sort()
    return step


COMPARED = tuple(name for name in Step.__struct_fields__ if name != "uncomputed")


def is_same(ours: Step | None, theirs: Step | None) -> bool:
    """Return whether all that is compared is the same; brings both into one form."""
    ours, theirs = in_one_form(ours), in_one_form(theirs)
    if ours is None or theirs is None:
        return ours is theirs
    return all(getattr(ours, name) == getattr(theirs, name) for name in COMPARED)


class Difference(msgspec.Struct):
    """The first step that differs. A side that has no more steps has None."""

    step: int
    kvarts: Step | None
    vllm: Step | None
    is_end_of_vllm: bool = False
    """Whether vLLM plans nothing from here on, though requests wait."""

    @property
    def is_of_uncomputed_page(self) -> bool:
        """Whether vLLM finds a page that it has not computed, and only what can be found differs."""
        if self.vllm is None or self.kvarts is None or set(self.fields()) - {"stored", "removed", "published"}:
            return False
        found = [{*side.stored, *side.removed} for side in (self.kvarts, self.vllm)]
        return not (found[0] ^ found[1]).isdisjoint(self.vllm.uncomputed)

    @property
    def of_vllm_alone(self) -> str | None:
        """In words, what vLLM does in this step that no scheduler should; None if it does nothing of the kind."""
        if self.is_of_uncomputed_page:
            return "a page that vLLM finds and has not computed"
        if self.is_end_of_vllm:
            return "a step after which vLLM plans nothing"
        if self.vllm is not None and self.vllm.fails:
            return "a step in which vLLM takes more blocks than it counted"
        return None

    def fields(self) -> list[str]:
        """Return the names of what differs."""
        if self.kvarts is None or self.vllm is None:
            return ["number of steps"]
        return [name for name in COMPARED if getattr(self.kvarts, name) != getattr(self.vllm, name)]


def first_difference(ours: Iterator[Step], theirs: Iterator[Step], counts: Counter[str]) -> Difference | None:
    """Run both; return the first difference, None without one. `counts`: what was compared."""
    for number, (mine, peers) in enumerate(zip_longest(ours, theirs)):
        if not is_same(mine, peers):
            rest = [peers, *islice(theirs, MOST_STEPS_WITHOUT_WORK)]
            is_end = len(rest) > MOST_STEPS_WITHOUT_WORK and not any(done is None or done.tokens for done in rest)
            return Difference(number, mine, peers, is_end)
        counts["steps"] += 1
        counts["preemptions"] += len(mine.preempted)
        counts["tokens hit"] += sum(mine.admitted.values())
        counts["blocks evicted"] += len(mine.removed)
        counts["requests"] += len(mine.ended)
        if number % 10_000 == 9_999:
            print(f"{number + 1:,} steps, {dict(counts)}", file=sys.stderr, flush=True)
    return None
