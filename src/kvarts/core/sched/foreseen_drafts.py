"""Drafts in virtual time, as vLLM schedules them: no token is computed, and the number that is right is foreseen.

Each decode takes room for its next token, for the tokens of its draft, and for those that the drafter writes after
them; requests are preempted for that room, and what is left of the budget is for prompts. At the end of the step, the
accepted tokens count as computed and generated. A request keeps the pages of rejected tokens for its next ones.

Where a step is planned while the one before runs, the plan does not know which drafts that one accepts. It takes room
as if all were right, and a request that ends with an accepted token is planned once more (vLLM 0.32 and 0.33:
v1/core/sched/async_scheduler.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from kvarts.base.errors import ConfigError
from kvarts.base.limits import MOST_COUNT
from kvarts.core.events import DraftJudged, DraftTaken
from kvarts.core.kv.cache import BlockTable
from kvarts.core.kv.draft_states import DraftSpace
from kvarts.core.request import Request, RequestState
from kvarts.core.sched.drafts import DraftTotals
from kvarts.core.sched.preemption import table_of
from kvarts.core.sched.prefill import DraftRoom
from kvarts.core.sched.step import FOR_BUDGET, PASS, Acts, Ask, Step, Verdict

if TYPE_CHECKING:
    from kvarts.core.sched.state import SchedulerState

__all__ = ["ForeseenDrafts", "Speculation"]


class Speculation(NamedTuple):
    """Drafts of an engine in virtual time.

    `num_drafts`: tokens drafted after each decode. `num_slots`: tokens after those of a step for which a request has
    room, since the drafter has KV of its own. `most_tokens`: of a request, which never takes room for more. `accepts`:
    returns how many of a draft's tokens are right, by the index of the request and the tokens that it has generated.

    `lookahead`: tokens after a page that its name covers, so that it can be found when these are known; as the contents
    of requests have it. `drops_last`: instead, requests compute the last page that they find again. `names_at_ends`:
    pages can be found when the step that fills them has ended, and not in the next one.
    """

    num_drafts: int
    num_slots: int
    most_tokens: int
    accepts: Callable[[int, int], int]
    lookahead: int = 0
    drops_last: bool = False
    names_at_ends: bool = False

    @property
    def space(self) -> DraftSpace:
        """Return the space that a request has for them."""
        return DraftSpace(self.num_drafts, self.num_slots, self.most_tokens)


class ForeseenDrafts:
    """Owner of the drafts of the step under way, and of how many tokens of the last one were accepted."""

    def __init__(self, scheduler: SchedulerState, speculation: Speculation) -> None:
        self._scheduler = scheduler
        self._wheel = scheduler.wheel
        self._cache = scheduler.cache
        self._emit = scheduler.emit
        self._page_size = scheduler.wheel.page_size
        self._asked = speculation
        self._space = speculation.space
        self._budget = scheduler.config.max_num_batched_tokens
        self._taken: list[tuple[Request, int]] = []
        """The decodes of the step, and how many tokens of each are drafted."""
        self._later: deque[Request] = deque()
        """Decodes that have not had their turns in the step being planned, in the order of admission."""
        self._served: set[int] = set()
        self._is_cut = False
        self._now_ns = 0
        """The start of the step."""
        self._joined: list[Request] = []
        """Requests whose prefill was completed in the last step."""
        self._held: list[Request] = []
        """Decodes that compute nothing in the step: a whole draft before may have taken them to the most tokens, or no
        tokens of the budget are left."""
        self._waited: set[int] = set()
        """Requests that computed nothing in the last step, so that all of their tokens are known."""
        self._num_drafts = self._num_drafted = self._num_right = 0
        self._padded: list[Request] = []
        """Requests that start in the step with room for a draft, which they do not have."""
        self._judged: dict[int, tuple[int, int]] = {}
        """By request, the tokens of its draft in the last step that were accepted, and those that were not."""
        self._num_named: dict[int, int] = {}
        """By request, how many of its pages can be found, once it has released them if their tokens are not known."""
        self._has_prefills = self._has_running = False
        """Whether prompts are computed in the step being planned, or anything, when the queue is first looked at."""
        self._end = 0
        """The tokens that the head has room for when it starts."""
        scheduler.lookahead = speculation.lookahead
        scheduler.max_model_len = speculation.most_tokens
        scheduler.running.names_at_turns = self.num_named
        scheduler.prefill.room_for(DraftRoom(self.room, self.extend, self.turns_before))
        config = scheduler.config
        if (most := config.max_num_seqs * (1 + speculation.num_drafts)) > config.max_num_batched_tokens:
            raise ConfigError(
                f"{config.max_num_seqs} sequences with {speculation.num_drafts} drafted tokens each need up to {most} "
                f"tokens a step, and its budget is {config.max_num_batched_tokens}",
                field="max_num_batched_tokens",
                hint="Raise it, or lower max_num_seqs or speculative_tokens.",
            )

    def acts(self) -> Acts:
        """Return where it acts."""
        acts = Acts(
            gates={"drafts": self.has_tokens} | ({"find": self.find} if self._asked.drops_last else {}),
            turns=self.take_turns,
            resumes=self.take_rest,
            after=self.note_completed,
            entries=self.look,
            starts=self.take_room,
            ending=self.judge,
            changes=self.has_decodes,
        )
        if self._scheduler.running.lag:
            acts["planned"], acts["leaving"] = self.publish_read, self.publish_ended
        return acts

    def totals(self) -> DraftTotals:
        """Return the totals so far."""
        return DraftTotals(self._num_drafts, self._num_drafted, self._num_right)

    def has_decodes(self) -> bool:
        """Return whether the next step drafts, so that it is computed alone."""
        return self._wheel.num_decoding > 0

    def num_named(self, request: Request) -> int:
        """Return how many pages of `request`, which releases them, can be found from now on."""
        return max(table_of(request).num_named, self._num_named.pop(request.index, 0))

    def room(self, num_tokens: int) -> int:
        """Return the tokens for which a request has room after a step that computes its first `num_tokens`.

        They are `num_tokens` where the cache adds the rest.
        """
        return num_tokens if self._cache.states.adds_room else self._space.room(num_tokens)

    def extend(self, request: Request, table: BlockTable, end: int, num_known: int) -> None:
        """Take the room of a chunk, and make findable the pages that it fills whose names are of known tokens."""
        self._cache.take_for(table, self.room(end))
        self._publish(request, table, min(end, num_known - self._asked.lookahead))

    # Turns of decodes -----------------------------------------------------------------------------------------

    def take_turns(self, step: Step) -> bool:
        """Let decodes take the room of their next token and of their draft, in the order of admission.

        Those that were admitted after a chunked request have their turns after its chunk, by `turns_before`.
        """
        running, wheel = self._scheduler.running, self._wheel
        self._now_ns = step.now_ns
        self._waited = {request.index for request in self._held}
        self._taken, self._padded, self._held = [], [], []
        self._served = set()
        decodes = [request for request in running if wheel.has(request) and request.own is None]
        self._later = deque(sorted(decodes, key=lambda request: request.admission))
        if running.lag:
            running.joined = [request for request in self._joined if wheel.has(request)]
        self.turns_before(running.chunked[0].admission if running.chunked else MOST_COUNT, self._budget)
        step.is_cut = step.is_cut or self._is_cut
        self._count(step)
        return True

    def take_rest(self, step: Step) -> None:
        """Let the other decodes have their turns, after all chunks."""
        if self._later:
            if not step.is_cut:
                step.budget -= self.turns_before(MOST_COUNT, step.budget)
            self._held += [request for request in self._later if request.admission >= 0]
            self._later.clear()
        self._count(step)

    def turns_before(self, admission: int, budget: int) -> int:
        """Let decodes that were admitted before `admission` have their turns; return the tokens used of `budget`."""
        later, num_used = self._later, 0
        self._is_cut = False
        while later and later[0].admission < admission and num_used < budget and not self._is_cut:
            request = later.popleft()
            if request.admission >= 0:
                self._is_cut = not self._take_turn(request, budget - num_used)
                if self._taken and self._taken[-1][0] is request:
                    num_used += 1 + self._taken[-1][1]
        return num_used

    def _count(self, step: Step) -> None:
        """Count the drafts of the step, and the decodes that compute nothing in it, so far."""
        self._taken = [each for each in self._taken if each[0].admission >= 0]
        self._held = [request for request in self._held if request.admission >= 0]
        step.held = [request.index for request in (*self._held, *self._later) if request.admission >= 0]
        step.num_drafted = sum([count for _, count in self._taken])
        step.num_accepted = sum([self._num_accepted(*each) for each in self._taken])

    def _take_turn(self, request: Request, budget: int) -> bool:
        """Let one decode take its turn, and preempt requests for it; return whether more can be planned."""
        scheduler, cache, asked, table = self._scheduler, self._cache, self._asked, table_of(request)
        start = self._wheel.num_computed(request)
        lag = scheduler.running.lag and request.index not in self._waited
        accepted, rejected = self._judged.get(request.index, (0, 0)) if lag else (0, 0)
        planned = start + rejected  # as if all drafts of the step under way were right
        if planned + 1 >= asked.most_tokens:
            self._judged.pop(request.index, None)
            self._held.append(request)
            return True
        if cache.releases:
            cache.free_skipped(table, start, scheduler.running.num_in_flight(request) + accepted if lag else 0)
            cache.count()
        num_drafted = max(0, min(asked.num_drafts, asked.most_tokens - planned - 2, budget - 1))
        end = self.room(planned + 1 + num_drafted)
        num_blocks = cache.needs.to_run(table, start, end)
        if num_blocks > 0 and not scheduler.preemptor.take_turn(request, num_blocks, self._now_ns, self._served):
            return False
        if request.admission < 0:
            return True  # it preempted itself
        self._served.add(request.index)
        self._taken.append((request, num_drafted))
        if self._emit is not None and num_drafted:
            self._emit(DraftTaken(request.index, start + 1, start + 1 + num_drafted))
        cache.take_for(table, end)
        num_known = start - accepted if lag else start + 1
        self._publish(request, table, num_known - asked.lookahead)
        return True

    def _publish(self, request: Request, table: BlockTable, num_tokens: int) -> None:
        """Make the full pages of the first `num_tokens` tokens findable, if any are not."""
        num_full = num_tokens // self._page_size
        if num_full > max(table.num_named, self._num_named.get(request.index, 0)):
            self._num_named[request.index] = num_full
            self._cache.publish(table, num_tokens)

    # Admissions -----------------------------------------------------------------------------------------------

    def look(self, step: Step) -> None:
        """Take note of what the step computes before it admits requests from the queue."""
        self._has_prefills = bool(step.chunks)
        self._has_running = bool(step.chunks or self._wheel.num_decoding)

    def find(self, ask: Ask, step: Step) -> Verdict:
        """Match the head, without the last page that layers with all tokens know.

        With several groups, that page may be the one that ends with its last token.
        """
        scheduler, cache, content = self._scheduler, self._cache, ask.request.content
        verdict = scheduler.memory.find(ask, step)
        if verdict is not PASS or not scheduler.memory.most_pages(ask.num_known):
            return verdict
        num_pages = ask.match.num_pages
        if cache.states.drops_last:
            num_pages = cache.states.num_found(content, ask.num_known // self._page_size)
        if num_pages:
            ask.match = cache.match(content, num_pages - 1)
            ask.hit_tokens = ask.match.num_pages * self._page_size
        return PASS

    def has_tokens(self, ask: Ask, step: Step) -> Verdict:
        """Let the head pass if there are tokens for it.

        A request with one token to compute takes the room of a whole draft, unless prompts are computed in this step.
        """
        asked = self._asked
        hit_tokens, num_known = ask.hit_tokens, ask.num_known
        is_padded = num_known - hit_tokens == 1 and not self._has_prefills and (self._has_running or hit_tokens > 0)
        is_padded = is_padded and num_known + asked.num_drafts < asked.most_tokens
        num_padded = asked.num_drafts if is_padded else 0
        if 1 + num_padded > step.budget:
            return FOR_BUDGET
        self._end = self.room(hit_tokens + min(ask.num_new, num_known - hit_tokens) + num_padded)
        most = max(num_known, self._end)
        ask.num_wanted = self._cache.needs.to_admit(ask.match, most, self._end - hit_tokens, ask.num_kept)
        ask.num_padded = num_padded
        return PASS

    def take_room(self, ask: Ask, step: Step) -> None:
        """Take the room of the head, which starts."""
        request = ask.request
        self._num_named.pop(request.index, None)
        if ask.num_padded:
            self._cache.take_for(table_of(request), self._end)
            step.budget -= ask.num_padded
            self._padded.append(request)

    def note_completed(self, completing: list[Request], end_ns: int) -> None:
        """Note the requests whose prefill was completed in the step that has ended."""
        self._joined = completing

    # Ends -----------------------------------------------------------------------------------------------------

    def judge(self, end_ns: int) -> None:
        """Count accepted drafts. The step has ended; the wheel has not turned yet."""
        wheel, asked, lag = self._wheel, self._asked, self._scheduler.running.lag
        self._judged = {request.index: (0, asked.num_drafts) for request in self._padded}
        for request, num_drafted in self._taken:
            if not wheel.has(request):
                continue
            num_left, num_accepted = request.stop_step - wheel.step, self._num_accepted(request, num_drafted)
            self._judged[request.index] = num_accepted, num_drafted - num_accepted
            self._num_drafts += num_drafted > 0
            self._num_drafted += num_drafted
            self._num_right += num_accepted
            if num_accepted:
                wheel.skip(request, num_accepted)
                if lag and num_accepted == num_left:
                    request.stops = True  # with a token that the next plan does not foresee
            if self._emit is not None and num_drafted:
                self._emit(DraftJudged(request.index, num_drafted, num_accepted))
        if asked.names_at_ends and not lag:
            ends = [(each.admission, wheel.num_computed(each) + 1, each) for each, _ in self._taken if wheel.has(each)]
            ends += [(each.admission, each.num_computed, each) for each in self._scheduler.prefill.completing]
            for _, num_computed, request in sorted(ends, key=lambda end: end[0]):
                self._publish(request, table_of(request), num_computed)
        for request in self._held:
            if wheel.has(request):
                wheel.hold(request)

    def _num_accepted(self, request: Request, num_drafted: int) -> int:
        """Return how many of the tokens that are drafted for a decode are accepted; 0 for one that has ended."""
        num_left = max(0, request.stop_step - self._wheel.step)
        num_right = self._asked.accepts(request.index, request.max_tokens - num_left - 1)
        return min(num_right, num_drafted, num_left)

    def publish_read(self, step: Step) -> None:
        """Make findable, after a plan, what the step before it has filled: its tokens are known now."""
        for request in (*[request for request, _ in self._taken], *self._held):
            if request.admission >= 0 and request.state is RequestState.DECODING:
                self._publish(request, table_of(request), self._wheel.num_computed(request))

    def publish_ended(self, request: Request) -> None:
        """Do the same for a request that ended, before it is released."""
        if request.table is not None:
            self._publish(request, request.table, request.num_computed)
