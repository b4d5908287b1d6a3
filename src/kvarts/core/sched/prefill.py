"""Prefill: the chunks of prompts that the steps of a scheduler compute, and the pages that they fill."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from kvarts.base.limits import MOST_COUNT
from kvarts.core.event_log import Emit
from kvarts.core.events import ChunkComputed, ChunkPlanned
from kvarts.core.kv.cache import BlockTable, Cache
from kvarts.core.parts.session_pages import SessionPagesInUse
from kvarts.core.request import Request
from kvarts.core.sched.plan import Chunk, chunk_of
from kvarts.core.sched.preemption import Planned, Preemptor
from kvarts.core.sched.running import Running

if TYPE_CHECKING:
    from kvarts.core.parts.chunk_ends import AlignedChunks
    from kvarts.core.parts.latency import ItlBound
    from kvarts.core.sched.input_batch import InputBatch
    from kvarts.core.sched.loads import Loads, LoadUnderWay

__all__ = ["DraftRoom", "Prefill"]


class DraftRoom(NamedTuple):
    """`of`: returns the tokens that a request has room for after a step that computes its first so many.

    `extend`: takes the room of a chunk that ends with so many tokens, of so many known ones, and names its pages.
    `turns_before`: lets decodes have their turns that were admitted before an admission, with so many tokens left for
    them, and returns how many they take.
    """

    of: Callable[[int], int]
    extend: Callable[[Request, BlockTable, int, int], None]
    turns_before: Callable[[int, int], int]


class Prefill:
    """Known tokens of admitted requests that are computed off the wheel."""

    __slots__ = (
        "_aligned",
        "_batch",
        "_cache",
        "_computing_step",
        "_draft_room",
        "_emit",
        "_is_limited",
        "_itl",
        "_loads",
        "_notes_chunks",
        "_own_pages",
        "_page_size",
        "_preemptor",
        "_published",
        "_running",
        "completing",
        "computed",
        "computing",
        "has_turns",
        "in_turn",
        "is_held",
        "most_tokens",
        "turned",
    )

    def __init__(
        self,
        running: Running,
        cache: Cache,
        session_pages: SessionPagesInUse,
        preemptor: Preemptor,
        *,
        batch: InputBatch | None,
        emit: Emit | None,
    ) -> None:
        self.completing: list[Request] = []
        """Requests that compute the last of their known tokens in the scheduled step."""
        self.computing: dict[Request, int] = {}
        """The tokens that each request computes in the step being planned, if there is a lag, or tiers below."""
        self._computing_step = -1
        """Without a lag: the step that `computing` is of."""
        self.computed: list[int] | None = None
        """Indices of requests that computed their prompt, until they are taken; None if they are not recorded."""
        self.most_tokens: int = MOST_COUNT
        """The most tokens of one request in the step being planned."""
        self.is_held = False
        """Whether no chunk of a prompt goes on in the step being planned."""
        self.in_turn: list[Request] = []
        """Decodes that have their turns among the chunks of the step being planned."""
        self.turned: list[int] = []
        """The tokens that each of these knows which has computed one in this step, that one included."""
        self._published = -1
        """Decodes admitted before this have published the pages that they fill in the step being planned."""
        self._running = running
        self._cache = cache
        self._own_pages = session_pages
        self._preemptor = preemptor
        self._batch = batch
        self._page_size = running.wheel.page_size
        self._emit = emit
        self._loads: Loads | None = None
        self._itl: ItlBound | None = None
        self._aligned: AlignedChunks | None = None
        self._draft_room: DraftRoom | None = None
        self._is_limited = False
        """Whether more than the budget limits a chunk."""
        self._notes_chunks = running.lag > 0
        """Whether more is noted about a chunk than its pages."""
        self.has_turns = False
        """Whether requests may be admitted after a chunked one, so that some decodes take their turn after it."""

    def note_for(self, loads: Loads) -> None:
        """Record the pages that chunks fill for the tiers below, and compute the fronts of `loads`."""
        self._loads = loads
        self._notes_chunks = True

    def room_for(self, drafts: DraftRoom) -> None:
        """Let requests have the room that `drafts` asks for, and name their pages as it says."""
        self._draft_room = drafts
        self._notes_chunks = True

    def _room(self, num_tokens: int) -> int:
        """Return the tokens for which a request has room after a step that computes its first `num_tokens`."""
        return num_tokens if self._draft_room is None else self._draft_room.of(num_tokens)

    def bound(self, itl: ItlBound) -> None:
        """Compute no more than `itl` allows beside decodes."""
        self._itl = itl
        self._is_limited = True

    def align(self, aligned: AlignedChunks) -> None:
        """End chunks at pages."""
        self._aligned = aligned
        self._is_limited = self._notes_chunks = True

    @property
    def may_wait(self) -> bool:
        """Whether a step may wait for loads that it uses: without decodes, or without a bound of latency."""
        return self._itl is None or not (self._running.wheel.num_decoding or self.in_turn)

    def let_in_turn(self, decodes: list[Request]) -> None:
        """Let `decodes` have their turns among the chunks of the step being planned. They still are decodes of it."""
        self.in_turn = decodes
        if self._itl is not None:
            self._itl.num_beside = len(decodes)
            self._itl.tokens_beside = sum([request.num_known for request in decodes])

    def num_planned(self, request: Request) -> int:
        """Return how many tokens `request` computes in the step being planned."""
        is_old = not self._running.lag and self._computing_step != self._running.wheel.step
        return 0 if is_old else self.computing.get(request, 0)

    def has_room(self, request: Request, start: int, chunks: list[Chunk]) -> bool:
        """Return whether a chunk of `request` from `start` on may follow `chunks` within the bound of latency."""
        return self._itl is None or self._itl.most_tokens(request, start, 1, chunks) > 0

    def start(self, request: Request, hit_tokens: int, budget: int, now_ns: int, chunks: list[Chunk]) -> int:
        """Let `request` run, with its first `hit_tokens` tokens in pages; return the tokens used of `budget`.

        A request that its own pages, or the bound of latency, keep from computing more uses up the budget.
        """
        self._running.enter(request, hit_tokens, now_ns)
        num_known = request.num_prompt_tokens + request.num_output_tokens
        num_tokens = num_known - hit_tokens
        if num_tokens > budget:
            num_tokens = budget
        if num_tokens > self.most_tokens:
            num_tokens = self.most_tokens
        if not self._is_limited and request.own is None:
            self._compute(request, num_tokens, num_known, chunks)
            return num_tokens
        num_allowed = num_tokens
        if self._aligned is not None and request.table is not None:
            branch = self._cache.states.branch(request.table)
            num_allowed = num_tokens = self._aligned.num_tokens(request, hit_tokens, num_tokens, branch)
            if not num_tokens:
                # After its load, the budget reaches no page end: it computes in a later step.
                self._running.chunked.append(request)
                return 0
        if request.own is not None:
            num_tokens = request.own.most_tokens(hit_tokens, num_tokens)
        if self._itl is not None:
            # At least one, as `has_room` found.
            num_tokens = max(1, self._itl.most_tokens(request, hit_tokens, num_tokens, chunks))
        self._compute(request, num_tokens, num_known, chunks)
        return budget if num_tokens < num_allowed else num_tokens

    def compute_front(self, load: LoadUnderWay, budget: int, chunks: list[Chunk]) -> int:
        """Compute pages of a request before those that are loaded for it; return the tokens used of `budget`.

        A request that the bound of latency keeps from computing more uses up the budget.
        """
        request, table, loads = load.request, load.request.table, self._loads
        assert table is not None and loads is not None and self._batch is None
        start, front_end = request.num_computed, load.front_end * self._page_size
        num_allowed = num_tokens = min(front_end - start, budget, self.most_tokens)
        if self._aligned is not None:
            branch = self._cache.states.branch(table)
            num_allowed = num_tokens = self._aligned.num_tokens(request, start, num_tokens, branch)
            if not num_tokens:
                return 0  # the budget reaches no page end
        if self._itl is not None:
            num_tokens = self._itl.most_tokens(request, start, num_tokens, chunks)
            if not num_tokens:
                return budget
        end = request.num_computed = start + num_tokens
        num_known = request.num_prompt_tokens + request.num_output_tokens
        loads.begin_front(table, start, self._running.num_in_flight(request))
        if self._emit is not None:
            self._emit(ChunkComputed(request.index, start, end, num_known))
        loads.extend_front(table, end)
        if self._running.lag:
            self.computing[request] = num_tokens
        self._note_full(request, table, start, end)
        chunks.append(Chunk(start, end - start, request.num_prompt_tokens, num_known))
        if end == front_end:
            loads.fronts.remove(load)
        return budget if num_tokens < num_allowed else num_tokens

    def resume(self, budget: int, now_ns: int, chunks: list[Chunk]) -> int:
        """Compute the next chunk of each chunked request; return the rest of `budget`.

        Preempt for their pages, then make findable the pages that decodes fill. A request that has to preempt itself
        ends the step for those after it, if `Preemptor.ends_steps`. One that its own pages, or the bound of latency,
        keep from computing more uses up the budget. As in vLLM, each takes its pages at its turn, also if it can be
        preempted in this step.
        """
        cache, running = self._cache, self._running
        self._published = -1
        if not self._is_limited:
            first = running.chunked[0]
            if len(running.chunked) == 1 and first.own is None:
                return budget - self._resume_one(first, budget, now_ns, chunks)
        planned: dict[int, Planned] = {}
        num_most = 0
        is_cut = False
        for request in running.chunked.copy():
            if self._draft_room is not None:
                budget -= self._compute_planned(planned, chunks)
                budget -= self._draft_room.turns_before(request.admission, budget)
            if request.admission < 0 or (self.is_held and request not in self.in_turn):
                continue  # preempted for an earlier request, or not computed in this step
            start = request.num_computed
            num_left = request.num_prompt_tokens + request.num_output_tokens - start
            num_given = 0
            if planned:
                num_given = sum([chunk.end - chunk.request.num_computed for chunk in planned.values()])
            num_allowed = min(budget - num_given, self.most_tokens)
            num_allowed = num_tokens = min(num_left, num_allowed)
            if num_tokens <= 0:
                break
            if self._aligned is not None and request.table is not None:
                branch = cache.states.branch(request.table)
                num_allowed = num_tokens = self._aligned.num_tokens(request, start, num_tokens, branch)
                if not num_tokens:
                    continue  # the budget reaches no page end
            if request.own is not None:
                num_tokens = request.own.most_tokens(start, num_tokens)
            if self._itl is not None and request not in self.in_turn:
                before = [each for each in planned.values() if each.request not in self.in_turn]
                num_tokens = self._itl.most_tokens(request, start, num_tokens, [*chunks, *_chunks_of(before)])
            is_cut = is_cut or num_tokens < num_allowed
            if not num_tokens:
                break
            if request.own is None:
                assert request.table is not None
                # Usually there is much more room than the next chunk can take.
                num_room = self._room(start + num_tokens) - start
                num_most += (num_room // self._page_size + 2) * cache.page_blocks
                if planned and (cache.releases or num_most > cache.num_free):
                    if running.is_in_order:  # those planned are certain to be computed
                        budget -= self._compute_planned(planned, chunks)
                    else:
                        self._take_planned(planned)
                if cache.releases:
                    running.settle(request, start)
                if num_most > cache.num_free:
                    num_blocks = max(0, cache.needs.to_run(request.table, start, start + num_room))
                    num_decoding = running.wheel.num_decoding
                    if not self._preemptor.make_room(request, num_blocks, now_ns, planned):
                        if self._preemptor.ends_steps:
                            break
                        continue
                    budget += self._num_freed(num_decoding)
            planned[request.admission] = Planned(request, start + num_tokens)
        budget -= self._compute_planned(planned, chunks)
        if running.num_sharing:
            self._publish_before(MOST_COUNT)
        return 0 if is_cut else budget

    def _resume_one(self, request: Request, budget: int, now_ns: int, chunks: list[Chunk]) -> int:
        """Compute the next chunk of the only chunked request; return the number of its tokens."""
        running = self._running
        start = request.num_computed
        num_known = request.num_prompt_tokens + request.num_output_tokens
        num_tokens = num_known - start
        if num_tokens > budget:
            num_tokens = budget
        if num_tokens > self.most_tokens:
            num_tokens = self.most_tokens
        if self.is_held and request not in self.in_turn:
            num_tokens = 0
        num_freed = 0
        cache = self._cache
        if cache.releases and num_tokens > 0:
            running.settle(request, start)
        num_room = self._room(start + num_tokens) - start if num_tokens > 0 else num_tokens
        if (num_room // self._page_size + 2) * cache.page_blocks > cache.num_free:
            assert request.table is not None
            num_blocks = max(0, cache.needs.to_run(request.table, start, start + num_room))
            num_decoding = running.wheel.num_decoding
            if not self._preemptor.make_room(request, num_blocks, now_ns, {}):
                num_tokens = 0
            else:
                num_freed = self._num_freed(num_decoding)
        if num_tokens:
            if running.num_sharing:
                self._publish_before(request.admission)
            self._compute(request, num_tokens, num_known, chunks)
        if running.num_sharing:
            self._publish_before(MOST_COUNT)
        return num_tokens - num_freed

    def _num_freed(self, num_decoding: int) -> int:
        """Return the tokens that the budget has again for decodes that were preempted since there were `num_decoding`.

        Drafts take none of the budget before the turns of their decodes, which are later.
        """
        return 0 if self._draft_room is not None else num_decoding - self._running.wheel.num_decoding

    def _take_planned(self, planned: dict[int, Planned]) -> None:
        """Take the pages of the chunks in `planned`, which a request with a later turn may withdraw."""
        for chunk in planned.values():
            request = chunk.request
            if not chunk.has_pages and request.own is None:
                chunk.has_pages = True
                if self._emit is not None:
                    self._emit(ChunkPlanned(request.index, chunk.end))
                assert request.table is not None
                self._cache.take_for(request.table, self._room(chunk.end))

    def _compute_planned(self, planned: dict[int, Planned], chunks: list[Chunk]) -> int:
        """Compute the chunks in `planned`, and remove them; return the number of their tokens.

        Of equal pages, those of the request admitted first become findable first, whether a chunk or a decode fills
        them.
        """
        num_tokens = 0
        if len(planned) > 1 and not self._running.is_in_order:
            self._take_planned(planned)
        for admission, chunk in planned.items():
            request = chunk.request
            if self._running.num_sharing:
                self._publish_before(admission)
            num_new = chunk.end - request.num_computed
            num_tokens += num_new
            self._compute(request, num_new, request.num_prompt_tokens + request.num_output_tokens, chunks)
        planned.clear()
        return num_tokens

    def complete(self, end_ns: int, stopped: frozenset[Request]) -> list[Request]:
        """Count the sampled token of each request that computed its last known token; return those that have ended.

        Those in `stopped` end with this token; others join the wheel.
        """
        ended: list[Request] = []
        for request in self.completing:
            if request.computes_only:
                ended.append(request)
                continue
            request.num_output_tokens += 1
            if request.first_token_ns < 0:
                request.first_token_ns = end_ns
                if self.computed is not None:
                    self.computed.append(request.index)
            else:
                request.stalls_ns += (end_ns - request.last_token_ns,)
            if request.num_output_tokens == request.max_tokens or request in stopped:
                ended.append(request)
            else:
                self._running.start_decoding(request)
        self.completing = []
        return ended

    def _publish_before(self, admission: int) -> None:
        """Make findable the pages that decodes admitted before `admission` fill in this step, if any may be found."""
        first = self._published
        if admission > first:
            self._published = admission
            self.publish_filled(1, first, admission)

    def publish_filled(self, num_steps: int, first: int = -1, end: int = MOST_COUNT) -> None:
        """Make findable the pages that decodes fill in the next `num_steps` steps, if requests may find them.

        Where a step is planned ahead, these are as many steps from the last one on. Only decodes of the admissions
        from `first` up to `end` are considered.
        """
        wheel, cache, batch, lag = self._running.wheel, self._cache, self._batch, self._running.lag
        if cache.decodes is not None:
            assert num_steps == 1, "the cache does what a leap fills"
            cache.decodes.publish_due(first, end)
            return
        filling = wheel.completing_page(num_steps, lag)
        if first >= 0 or end < MOST_COUNT:
            filling = [request for request in filling if first <= request.admission < end]
        if batch is not None and filling:
            # The token computed in this step is the one sampled in the step before.
            batch.append_all_sampled(filling, [wheel.num_computed(request) + 1 for request in filling], wheel.step)
        for request in filling:
            if request.own is not None:
                continue
            num_computed = wheel.num_computed(request) + num_steps - lag
            table = request.table
            assert table is not None
            cache.publish(table, num_computed)
            if self._loads is not None:
                self._note_full(request, table, num_computed - num_steps, num_computed)

    def _note_full(self, request: Request, table: BlockTable, start: int, end: int) -> None:
        """Record, for the tiers below, the pages of known tokens that are full now that [start, end) are computed."""
        loads, content = self._loads, request.content
        assert loads is not None
        num_full = min(end // self._page_size, content.num_known_pages)
        if num_full > start // self._page_size:
            loads.add_computed(content, num_full, table)

    def _compute(self, request: Request, num_tokens: int, num_known: int, chunks: list[Chunk]) -> None:
        """Take the pages of a chunk and count it as computed; its full pages can be hit from now on."""
        running = self._running
        start = request.num_computed
        end = request.num_computed = start + num_tokens
        is_last = end == num_known
        if self._emit is not None:
            self._emit(ChunkComputed(request.index, start, end, num_known))
        own, table, chunked = request.own, request.table, running.chunked
        if own is not None:
            self._own_pages.compute(own, start, end)
            if running.lag:
                self.computing[request] = num_tokens
        else:
            assert table is not None
            if self._notes_chunks:
                self._fill(request, table, start, end, num_known)
            else:
                self._cache.extend(table, end, is_end=is_last)
        if is_last:
            self.completing.append(request)
            if chunked and request in chunked:
                chunked.remove(request)
        elif request not in chunked:
            chunked.append(request)
        if self._batch is not None:
            chunks.append(self._batch.chunk(request, start, num_tokens, num_known))
        elif self.in_turn and request in self.in_turn:
            self.turned.append(end)
        elif own is None and not request.computes_only:  # `chunk_of`, inlined: this runs for every chunk
            chunks.append(Chunk(start, num_tokens, request.num_prompt_tokens, num_known))
        else:
            chunks.append(chunk_of(request, start, num_tokens, num_known))

    def _fill(self, request: Request, table: BlockTable, start: int, end: int, num_known: int) -> None:
        """Take the pages of a chunk, and note what states, loads, or plans made ahead need to know about it."""
        running, cache = self._running, self._cache
        is_taken_off = bool(running.taken_off) and request in running.taken_off
        if self._aligned is not None:
            known_end = start if is_taken_off else end
            self._aligned.note_state(cache, request, start, known_end, running.num_in_flight(request))
        if is_taken_off:  # as on the wheel
            running.taken_off.remove(request)
            request.has_unread = True
            cache.take_for(table, end)
            cache.publish(table, start)
        elif self._draft_room is not None:
            self._draft_room.extend(request, table, end, num_known)
        else:
            cache.extend(table, end, is_end=end == num_known)
        if self._loads is not None:
            self._note_full(request, table, start, end)
            if not running.lag and self._computing_step != running.wheel.step:
                self.computing, self._computing_step = {}, running.wheel.step
        if running.lag or self._loads is not None:
            self.computing[request] = end - start


def _chunks_of(planned: list[Planned]) -> list[Chunk]:
    """Return planned chunks as a cost model should see them."""
    chunks = []
    for one in planned:
        request, start = one.request, one.request.num_computed
        num_known = request.num_prompt_tokens + request.num_output_tokens
        chunks.append(chunk_of(request, start, one.end - start, num_known))
    return chunks
