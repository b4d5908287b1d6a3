"""Steps of prompts or of decodes, as SGLang's: a step computes a batch of prompts if it can, and else decodes.

Before a plan, the part of a prompt that was computed so far becomes findable, and requests whose prompts are computed
join those that decode. A prompt is admitted if what it lacks, and the tokens that it asks for, are free beside what is
*promised* to running requests: all that these may still generate, or a share of it, the *ratio*. The ratio falls with
each step of decodes. If decodes lack memory after all, requests are retracted, those with the fewest tokens first, and
the ratio is set to what the others have used of theirs. After a prompt that was not admitted, none is looked at before
a request leaves: admission is *shut*.

With overlap, a plan is made before the results of the step before it are taken: requests that ended then keep their
memory and their places for that plan, what was computed is not findable yet, and a retracted request loses the token
that it computed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from kvarts.base.limits import MOST_COUNT
from kvarts.core.config import BatchRules
from kvarts.core.events import Blocked, Finished, Preemption
from kvarts.core.kv.radix import RadixCache
from kvarts.core.parts.queue_orders import order_of_queue
from kvarts.core.request import NEXT_STATES, Request, RequestState
from kvarts.core.sched.running import Running
from kvarts.core.sched.step import FOR_BUDGET, PASS, Acts, Ask, Step, Verdict, Wait

if TYPE_CHECKING:
    from kvarts.core.sched.state import SchedulerState

__all__ = ["Batches", "RunningInBatches"]

MOST_PROMISED: Final = 4096
"""The most tokens that a request is promised at a time."""
RETRACTED_STEPS: Final = 20
"""The steps of decodes for which a retraction makes room."""
DECAY_STEPS: Final = 600
"""The steps of decodes in which the ratio falls to its least value."""
LEAST_SHARE: Final = 0.14
"""That value, as a share of the first one."""
FIRST_RATIO: Final = 0.7
FEW_STALLS: Final = 256
FINISHED: Final = RequestState.FINISHED
DECODING: Final = RequestState.DECODING
FOR_SEQS: Final = Blocked.SEQS
FOR_PAGES: Final = Wait(Blocked.PAGES)


class RunningInBatches(Running):
    """Running requests whose generated tokens others find only when they have ended."""

    __slots__ = ()

    def shares(self, request: Request) -> bool:
        """Return False."""
        return False


class Batches:
    """Owner of the order of running requests, of the ratio, and of results that were not taken yet."""

    __slots__ = (
        "_answered",
        "_budget",
        "_budget_of_step",
        "_cache",
        "_chunked",
        "_completed",
        "_computed",
        "_decoded_ns",
        "_end_ns",
        "_ended",
        "_first_ratio",
        "_first_stalls",
        "_had_chunked",
        "_has_decoded",
        "_ignores_eos",
        "_is_shut",
        "_is_trying",
        "_least_ratio",
        "_most_running",
        "_most_stalls",
        "_order",
        "_overlaps",
        "_page_size",
        "_promised",
        "_rest_of_input",
        "_resumes",
        "_rules",
        "_running",
        "_scheduler",
        "_stalls_ns",
        "_step",
        "_taken",
        "_turn",
        "ratio",
    )

    def __init__(self, scheduler: SchedulerState, rules: BatchRules) -> None:
        assert isinstance(scheduler.cache, RadixCache), "prompts become findable by the batch"
        self._order = order_of_queue(scheduler, rules)
        self._scheduler = scheduler
        self._cache: RadixCache = scheduler.cache
        self._page_size = scheduler.wheel.page_size
        self._rules = rules
        self._overlaps = rules.overlaps
        # Attributes of structs take longer to read than these.
        self._ignores_eos = rules.ignores_eos
        self._budget_of_step = scheduler.config.max_num_batched_tokens
        self._most_running = scheduler.config.max_num_seqs
        self._first_ratio = min(FIRST_RATIO * rules.conservativeness, 1.0)
        self._least_ratio = min(self._first_ratio * LEAST_SHARE, 1.0)
        self.ratio = self._first_ratio
        """The share of what running requests may generate that they are promised."""
        self._running: dict[Request, None] = {}
        """Requests whose prompts are computed, in the order in which they decode."""
        self._is_shut = False
        """Whether no prompt is looked at before a request leaves."""
        self._is_trying = False
        """Whether the step being planned may compute prompts."""
        self._chunked: Request | None = None
        """The request whose prompt goes on."""
        self._had_chunked = self._has_decoded = False
        """Whether the last step computed a part of a prompt that goes on; and whether it computed decodes."""
        self._promised = 0.0
        """The tokens that are promised to running requests, and to those admitted in the step being planned."""
        self._taken = 0
        """Of these, the tokens that the step takes."""
        self._budget = 0
        self._rest_of_input = 0
        self._computed = 0
        """The tokens of prompts that the step computes."""
        self._completed: list[Request] = []
        """Requests that computed the last of their prompt in the last step, which is not taken yet."""
        self._ended: list[Request] = []
        """Requests that have generated their last token in the last step, which is not taken yet."""
        self._end_ns = self._decoded_ns = 0
        """End of the last step; and of the last one that computed decodes."""
        self._answered: dict[Request, int] = {}
        """Decodes that have had no step as such yet, with the end of their prompts' steps."""
        self._resumes = False
        """Whether decodes go on in the step that was planned last, and rested in the one before."""
        self._stalls_ns: list[int] = []
        """The times from each such step to the last one that computed decodes, while any decode was there."""
        self._most_stalls = FEW_STALLS
        """As many as these are kept before those that no decode there has rested in are forgotten."""
        self._first_stalls: dict[Request, int] = {}
        """By decode that has had a step as such: the first of these in which it rested."""
        self._step = Step(0)
        """The step that was planned last."""
        self._turn = 0
        """The step of the wheel that follows the one that was planned last."""

    def acts(self) -> Acts:
        """Return where it acts."""
        return Acts(
            gates={"find": self.find, "memory": self.fits},
            before=self.begin,
            turns=self.rest,
            resumes=self.resume,
            started=self.start,
            closing=self.close,
            planned=self.take_late,
            ending=self.end_step,
            after=self.end,
            finishes=self.keep,
            given_up=self.drop,
            changes=self.changes,
            bounds=self.num_certain,
        )

    # The plan ---------------------------------------------------------------------------------------------

    def begin(self, step: Step) -> None:
        """Begin a plan: note what joins the decodes and what has left them, and whether prompts may be computed."""
        scheduler, running = self._scheduler, self._scheduler.running
        self._step = step
        self._turn = scheduler.wheel.step + 1
        chunked = self._chunked = running.chunked[0] if running.chunked else None
        if chunked is not None:
            self._insert(chunked)
        elif self._was_idle(step):
            self.ratio = self._first_ratio
        if self._had_chunked or not self._running:
            self._is_shut = False
        self._had_chunked = False
        for request in self._completed:
            self._running[request] = None
        self._is_trying = chunked is not None or self._may_admit()
        if not self._is_trying:
            return
        self._order.arrange()
        self._promised = self._promises()
        self._taken = self._computed = 0
        self._budget, self._rest_of_input = self._budget_of_step, self._rules.max_prefill_tokens
        if chunked is not None:
            num_free = self._cache.num_free * self._page_size + -chunked.num_computed % self._page_size
            scheduler.prefill.most_tokens = min(self._most_of_chunk(), num_free)

    def _most_of_chunk(self) -> int:
        """Return how many tokens of a prompt that goes on the step may compute."""
        most = min(self._budget, int(self._room()))
        return most if most > 0 else self._budget

    def _was_idle(self, step: Step) -> bool:
        """Return whether no request was here before this step."""
        return not (self._running or self._completed) and step.now_ns > self._end_ns

    def _has_candidate(self) -> bool:
        """Return whether a request waits that can be looked at in this step."""
        return self._scheduler.waiting.num_waiting > 0

    def _may_admit(self) -> bool:
        """Return whether the head of the queue is looked at, if no prompt goes on."""
        scheduler = self._scheduler
        if self._is_shut or not scheduler.waiting.num_waiting:
            return False
        self._is_shut = scheduler.running.num_running >= self._most_running
        return not self._is_shut

    def _promises(self) -> float:
        """Return the tokens that are promised to running requests."""
        wheel, num_running = self._scheduler.wheel, len(self._running)
        has_results = int(self._overlaps and self._has_decoded)
        offset = 1 - wheel.step + has_results
        if self._ignores_eos and wheel.last_stop + offset < MOST_PROMISED:
            num_decoding, num_joined = wheel.num_decoding, len(self._completed) if self._overlaps else 0
            num_left = wheel.stop_sum + num_decoding * offset + (num_running - num_decoding) * has_results
            return float(num_left + num_joined)
        # `_num_generated`, inlined: this runs for each running request.
        left = [stop + offset if (stop := request.stop_step) >= 0 else has_results for request in self._running]
        if self._overlaps and self._completed:  # they have just joined
            first = len(left) - len(self._completed)
            left[first:] = [count + 1 for count in left[first:]]
        if left and max(left) > MOST_PROMISED:
            left = [min(count, MOST_PROMISED) for count in left]
        if self._ignores_eos:
            return float(sum(left))
        ratio = self.ratio
        return sum([count * ratio for count in left])

    def rest(self, step: Step) -> bool:
        """Let decodes wait until it is known whether there are prompts."""
        step.rests = True
        return True

    def resume(self, step: Step) -> None:
        """Count the part of a prompt that goes on in this step."""
        if not self._is_trying:
            return
        if self._chunked is not None:
            self._scheduler.prefill.most_tokens = MOST_COUNT
            if step.chunks:
                self._charge(self._chunked, step.chunks[0].num_tokens)
        self._limit(step)

    def find(self, ask: Ask, step: Step) -> Verdict:
        """Match the head, unless admission is shut; what it finds is recent from now on."""
        if self._is_shut or not self._is_trying:
            return FOR_PAGES
        request = ask.request
        num_known = ask.num_known = request.num_prompt_tokens + request.num_output_tokens
        ask.match = self._order.find(request, (num_known - 1) // self._page_size)
        ask.hit_tokens = ask.match.num_pages * self._page_size
        return PASS

    def fits(self, ask: Ask, step: Step) -> Verdict:
        """Let the head pass if what it may take is free beside what is promised; else shut admission."""
        request, match = ask.request, ask.match
        num_new = min(request.max_tokens - request.num_output_tokens, MOST_PROMISED)
        num_asked = ask.num_known - ask.hit_tokens + num_new + self._page_size
        ask.least = 0
        if num_asked >= self._room() - (match.num_pages - match.num_shared) * self._page_size:
            self._is_shut = bool(step.chunks or self._running)
            return FOR_PAGES
        return PASS if self._budget >= self._page_size else FOR_BUDGET

    def start(self, request: Request, step: Step) -> None:
        """Count the prompt that begins in this step."""
        self._order.found.pop(request, None)
        self._charge(request, step.chunks[-1].num_tokens)
        if self._has_room():
            self._limit(step)
        else:
            self._is_shut = True
            step.budget = 0

    def _charge(self, request: Request, num_tokens: int) -> None:
        """Count a chunk: whole pages, one more, and the answer that follows the last chunk of a prompt."""
        page_size = self._page_size
        num_charged = -(-num_tokens // page_size) * page_size
        self._taken += num_charged + page_size
        self._promised += num_charged + page_size
        if request not in self._scheduler.running.chunked:
            self._promised += min(request.max_tokens, MOST_PROMISED)
        self._budget -= num_charged
        self._rest_of_input -= num_charged
        self._computed += num_tokens

    def _limit(self, step: Step) -> None:
        """Set the budget of the next prompt. Where it is too small for any, or no room is left, one is looked at."""
        budget = self._budget // self._page_size * self._page_size
        if self._has_room() and (self._budget <= 0 or self._rest_of_input <= 0):
            step.budget = 0
        else:
            step.budget = budget if budget > 0 else 1

    def _room(self) -> float:
        """Return the tokens that are free and not promised."""
        return self._cache.num_free * self._page_size - self._promised

    def _has_room(self) -> bool:
        return self._room() > 0 and self._cache.num_free * self._page_size > self._taken

    def close(self, step: Step) -> None:
        """Take the memory of the prompts of this step, or of its decodes."""
        scheduler, page_size = self._scheduler, self._page_size
        if self._is_trying and self._has_candidate() and scheduler.blocked is FOR_SEQS and step.budget > 0:
            self._is_shut = True
        step.is_idle = False
        step.num_joined, step.num_leaving = 0, len(self._ended)
        if step.chunks:
            num_spare = len(step.chunks) * page_size if page_size > 1 else 0
            self._cache.take_asked(self._computed + num_spare, page_size)
            self._had_chunked = bool(scheduler.running.chunked)
            return
        if self._ended:
            self._leave(self._ended)
        step.rests = not (self._running and self._take_due(step))
        step.is_idle = step.rests and bool(self._ended)
        if not (step.rests or self._has_decoded):
            self._resumes = True
            step.num_joined = scheduler.wheel.num_decoding

    # Decodes ----------------------------------------------------------------------------------------------

    def _take_due(self, step: Step) -> bool:
        """Take the pages that decodes need; return whether they go on in this step."""
        cache, wheel = self._cache, self._scheduler.wheel
        if self._has_memory(wheel.pages_due()):
            self._decay(1)
        elif self._ended:
            self._is_shut = False  # their memory is free in the next step
            return False
        else:
            self._retract(step)
            if not self._running:
                return False
        self._free_skipped()
        cache.make_room(len(self._running))
        cache.take_pages(wheel.pages_due())
        return True

    def _free_skipped(self) -> None:
        """Release what the next tokens of decodes do not need: with whole pages, nothing."""

    def _decay(self, num_steps: int) -> None:
        """Let the ratio fall, step by step: a product would not have the same last digits."""
        decay = (self._first_ratio - self._least_ratio) / DECAY_STEPS
        while num_steps > 0 and self.ratio > self._least_ratio:
            self.ratio = max(self.ratio - decay, self._least_ratio)
            num_steps -= 1

    def _has_memory(self, num_pages: int) -> bool:
        """Return whether so many pages are empty, once as many as can be are evicted for them."""
        self._cache.make_room(num_pages)
        return self._cache.has_empty(num_pages)

    def _retract(self, step: Step) -> None:
        """Retract requests until the others can go on, at least one: those with the fewest tokens, then the longest
        prompts, first. The others go on in that order."""
        wheel, page_size = self._scheduler.wheel, self._page_size
        weight = -self._rules.sign if self._rules.retracts_by_priority else 0
        kept = sorted(
            self._running,
            key=lambda each: (weight * each.priority, self._num_generated(each), -each.num_prompt_tokens),
            reverse=True,
        )

        def num_due() -> int:
            return sum([wheel.num_computed(request) % page_size == 0 for request in kept])

        asker = kept[0]
        while len(kept) > 1:
            num_pages = num_due()
            self._retract_one(kept.pop(), asker, num_pages, step.now_ns, len(kept))
            if self._has_memory(num_due()):
                break
        if not self._has_memory(num_due()):
            self._retract_one(kept.pop(), asker, 1, step.now_ns, 0)
        self._running = dict.fromkeys(kept)
        self._is_shut = False
        num_generated = sum([self._num_generated(request) for request in kept])
        num_asked = sum([request.max_tokens for request in kept])
        self.ratio = min(1.0, (num_generated + RETRACTED_STEPS * len(kept)) / (num_asked + 1))

    def _retract_one(
        self, request: Request, asker: Request, num_pages: int, now_ns: int, num_left: int, *, is_queued: bool = True
    ) -> None:
        """Take a request's memory, and make room for the `num_left` that are left. It waits again, at the end.

        It loses the token whose result was not taken yet.
        """
        scheduler, cache = self._scheduler, self._cache
        cache.look(scheduler.mark)
        has_result = self._has_result(request)
        self._end_stalls(request)
        scheduler.running.leave(request)
        request.last_token_ns = now_ns
        request.num_output_tokens -= has_result
        if not request.num_output_tokens:
            request.first_token_ns = -1
        preemption = Preemption(
            request.index,
            asker.index,
            num_pages,
            max(0, num_pages - cache.num_free),
            cache.num_used,
            request.num_computed,
        )
        scheduler.preemptor.preemptions.append(preemption)
        if scheduler.emit is not None:
            scheduler.emit(preemption)
        scheduler.running.release(request)
        request.num_preemptions += 1
        assert request.state in (DECODING, FINISHED), f"{request!r} is retracted"
        request.state = RequestState.PREEMPTED
        request.num_computed = 0
        cache.make_room(-(-num_left * RETRACTED_STEPS // self._page_size))
        if is_queued:
            scheduler.waiting.push(request)

    def _num_generated(self, request: Request) -> int:
        """Return the tokens of a running request whose results were taken."""
        num_generated = request.num_output_tokens
        if request.state is DECODING:
            num_generated = request.max_tokens - (request.stop_step - self._scheduler.wheel.step + 1)
        return num_generated - self._has_result(request)

    def _has_result(self, request: Request) -> bool:
        """Return whether a running request computed a token in the last step that was not taken yet."""
        return self._overlaps and (self._has_decoded or request in self._completed)

    # Results ----------------------------------------------------------------------------------------------

    def take_late(self, step: Step) -> None:
        """Take the results of the step before the one that was planned, with overlap."""
        if self._overlaps:
            self._take_results()

    def end_step(self, end_ns: int) -> None:
        """Count a step in which decodes rested; after it, record how long each has waited for its token."""
        self._end_ns = end_ns
        if self._step.rests:
            self._scheduler.wheel.num_rests += 1
            return
        if self._resumes:
            self._resumes = False
            if len(self._stalls_ns) >= self._most_stalls:
                self._forget_stalls()
            self._stalls_ns.append(end_ns - self._decoded_ns)
            if self._answered:
                for request, answered_ns in self._answered.items():
                    request.stalls_ns += (end_ns - answered_ns,)
                    self._first_stalls[request] = len(self._stalls_ns)
                self._answered = {}
        self._decoded_ns = end_ns

    def _forget_stalls(self) -> None:
        """Forget the stalls before all decodes that are there."""
        first = next(iter(self._first_stalls.values()), len(self._stalls_ns))  # the least: they are in this order
        del self._stalls_ns[:first]
        for request in self._first_stalls:
            self._first_stalls[request] -= first
        self._most_stalls = 2 * len(self._stalls_ns) + FEW_STALLS

    def _end_stalls(self, request: Request) -> None:
        """Note how long `request`, which decodes no more, has waited for its tokens."""
        self._answered.pop(request, None)
        first = self._first_stalls.pop(request, -1)
        if first >= 0:
            request.stalls_ns += tuple(self._stalls_ns[first:])

    def keep(self, request: Request, end_ns: int) -> bool:
        """Let `request`, which has generated its last token, keep its place and pages until its result is taken."""
        request.last_token_ns = end_ns
        assert FINISHED in NEXT_STATES[request.state]
        self._scheduler.running.keep(request)
        request.state = FINISHED
        self._ended.append(request)
        self._end_stalls(request)
        return True

    def end(self, completing: list[Request], end_ns: int) -> None:
        """Note the results of a step; without overlap, take them."""
        self._completed = list(completing)
        for request in completing:
            if request.state is DECODING:
                self._answered[request] = end_ns
        turn = self._scheduler.wheel.step
        if turn > self._turn:  # steps that were not planned one by one
            self._decay(turn - self._turn)
            self._turn = turn
        self._has_decoded = not self._step.rests
        if len(self._ended) > 1 and not completing:
            places = {request: place for place, request in enumerate(self._running)}
            self._ended.sort(key=lambda request: places[request])
        if not self._overlaps:
            self._take_results()
            self._completed = [request for request in completing if request.state is DECODING]
            if len(self._completed) < len(completing):
                self._is_shut = False

    def _take_results(self) -> None:
        """Make findable what the last step has computed, and release the requests that have ended, in their order."""
        scheduler, ended = self._scheduler, self._ended
        for request in self._completed or ended:
            if request.state is DECODING:
                self._insert(request)
            elif request.state is FINISHED:
                self._insert(request)
                if scheduler.emit is not None:
                    scheduler.emit(Finished(request.index, request.content))
                scheduler.running.release(request)
        if ended:
            self._leave(ended)
            scheduler.running.ended = []
            self._ended = []
        self._completed = []

    def _leave(self, requests: Iterable[Request]) -> None:
        """Remove requests from the running ones; the next prompt is looked at."""
        running = self._running
        for request in requests:
            if request in running:
                del running[request]
                self._is_shut = False

    def _insert(self, request: Request) -> None:
        """Make the computed pages of `request` findable; while it decodes, those of its prompt."""
        table = request.table
        assert table is not None
        self._cache.insert(table, request.num_computed // self._page_size, request.priority)

    def drop(self, request: Request) -> None:
        """Forget a request that is about to be cancelled."""
        self._order.found.pop(request, None)
        self._end_stalls(request)
        self._leave((request,))
        if request in self._completed:
            self._completed.remove(request)
        if request in self._ended:
            self._ended.remove(request)

    def changes(self) -> bool:
        """Return whether the next step may differ from the last one, or takes its results."""
        if self._ended or not self._has_decoded:
            return True
        scheduler = self._scheduler
        may_admit = scheduler.running.num_running < self._most_running
        return may_admit and not self._is_shut and scheduler.waiting.num_waiting > 0

    def num_certain(self, num_steps: int) -> int:
        """Return how many of `num_steps` steps of decodes evict nothing, though each has room for a page of each."""
        if num_steps <= 0:
            return num_steps
        wheel, cache = self._scheduler.wheel, self._cache
        num_empty = cache.num_empty - wheel.num_decoding
        if num_steps * wheel.num_decoding <= num_empty:
            return num_steps
        if self._page_size == 1:
            return max(0, min(num_steps, num_empty // wheel.num_decoding + 1))
        most = min(num_steps, self._page_size * (max(0, num_empty) // wheel.num_decoding + 1))
        return wheel.steps_within(num_empty, most) if num_empty >= 0 else 0
