"""States that are kept by page: chunks of prompts that end at pages, where states are kept only there."""

from __future__ import annotations

from kvarts.core.kv.cache import Cache
from kvarts.core.request import Request
from kvarts.core.sched.running import Running
from kvarts.core.sched.step import FOR_BUDGET, PASS, Acts, Ask, Step, Verdict

__all__ = ["AlignedChunks", "ChunkEnds", "StatesOfSteps"]


class AlignedChunks:
    """Chunks of prompts that end at pages, where a state is kept, as in vLLM's mode `align` of states.

    The last chunk of a prompt begins at its last page end, unless the state there is saved inside a chunk
    (`saves_inside`), and a chunk ends where the prompt leaves another one. `most_tokens`: the most tokens of a chunk.
    `drops_last`: a request computes the last page again that it finds, so that the last page end is one page earlier.
    """

    __slots__ = ("_drops_last", "_most_tokens", "_page_size", "_saves_inside")

    def __init__(
        self, page_size: int, most_tokens: int, *, saves_inside: bool = False, drops_last: bool = False
    ) -> None:
        self._saves_inside = saves_inside
        self._drops_last = drops_last
        self._page_size = page_size
        self._most_tokens = most_tokens

    def _last_page(self, num_tokens: int) -> int:
        """Return the number of pages after which a sequence of `num_tokens` tokens is continued by an equal one."""
        return num_tokens // self._page_size - 1 if self._drops_last else (num_tokens - 1) // self._page_size

    def num_tokens(self, request: Request, start: int, num_tokens: int, branch: int) -> int:
        """Return how many of the tokens [start, start + num_tokens) the next chunk computes; 0 short of a page end.

        `branch`: the tokens that the request has in common with another one, or 0.
        """
        page_size = self._page_size
        num_known = request.num_prompt_tokens + request.num_output_tokens
        prefill_end = max(request.num_prompt_tokens, num_known - 1)
        if start >= prefill_end:
            return num_tokens
        end = start + num_tokens
        if end < prefill_end:
            page_end = end // page_size * page_size
            if page_end > start or page_size <= self._most_tokens:
                end = page_end
        is_saved = self._saves_inside and end >= prefill_end and not start % page_size
        is_saved = is_saved and self._last_page(prefill_end) > start // page_size
        if not is_saved:
            last_end = self._last_page(num_known) * page_size
            if start < last_end < end:
                end = last_end
        if start % page_size:
            next_end = (start // page_size + 1) * page_size
            if next_end < end:
                end = next_end
        if start < branch < end:
            end = branch
        return end - start if end > start else 0

    def note_state(self, cache: Cache, request: Request, start: int, end: int, num_in_flight: int) -> None:
        """Note that a step computes from `start` on, if that is just after the last page end of a prompt.

        `end`: the tokens that are known. vLLM 0.32 counts the state there as computed by this step, as long as the
        request still has it, so that an equal prompt begins after it in a later step.
        """
        page = self._last_page(request.num_prompt_tokens)
        if not cache.states.renames:
            return
        if page > 0 and end // self._page_size == page and start - num_in_flight <= page * self._page_size <= start:
            cache.states.note(request.content, page)


class ChunkEnds:
    """The gate of chunks that end at pages. `may_be_empty`: a load may bring the tokens that reach a page end."""

    __slots__ = ("_aligned", "_cache", "_may_be_empty", "_running")

    def __init__(self, aligned: AlignedChunks, cache: Cache, running: Running, *, may_be_empty: bool) -> None:
        self._aligned = aligned
        self._cache = cache
        self._running = running
        self._may_be_empty = may_be_empty

    def acts(self) -> Acts:
        """Return where it acts."""
        return Acts(gates={"chunk ends": self.reaches_end}, resumes=self.note_states, starts=self.begin)

    def reaches_end(self, ask: Ask, step: Step) -> Verdict:
        """Let the head pass if its first chunk reaches the end of a page."""
        request, hit_tokens, cache = ask.request, ask.hit_tokens, self._cache
        num_new = min(ask.num_new, ask.num_known - hit_tokens)
        ask.num_new = self._aligned.num_tokens(request, hit_tokens, num_new, cache.states.branch_of(ask.match))
        return PASS if ask.num_new or self._may_be_empty else FOR_BUDGET

    def begin(self, ask: Ask, step: Step) -> None:
        """Let the head, which starts, keep states inside its chunks up to the end of its prefill."""
        request = ask.request
        assert request.table is not None
        self._cache.states.begin(request.table, max(request.num_prompt_tokens, ask.num_known - 1))

    def note_states(self, step: Step) -> None:
        """Note the states of requests that started to decode after the last step."""
        running = self._running
        wheel = running.wheel
        for request in running.joined:
            if wheel.has(request):
                start = wheel.num_computed(request)
                self._aligned.note_state(self._cache, request, start, start, running.num_in_flight(request))


class StatesOfSteps:
    """The gate of states that the step being planned computes: requests begin after them in later steps only."""

    __slots__ = ("_cache",)

    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    def acts(self) -> Acts:
        """Return where it acts."""
        return Acts(gates={"states": self.is_before}, before=self.begin)

    def begin(self, step: Step) -> None:
        """Let the cache begin a step, which has computed no state yet."""
        self._cache.states.begin_step()

    def is_before(self, ask: Ask, step: Step) -> Verdict:
        """Let the head pass unless this step computes the state that it begins after."""
        return FOR_BUDGET if ask.match.num_pages and self._cache.states.is_of_step(ask.match) else PASS
