"""The pages to which a token attends in a layer, and the memory that a request with KV groups needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from kvarts.core.kv.groups import GroupMemory, PartGroup
from kvarts.core.kv.layers import KvLayer

__all__ = ["FirstSeen", "GroupNeeds", "Held"]

FAR: Final = 1 << 40
"""A position after any window."""


class FirstSeen:
    """Attended positions of `layer`, in pages of `page_size` tokens."""

    __slots__ = ("_layer", "_page_size", "lag")

    def __init__(self, layer: KvLayer, page_size: int) -> None:
        self._layer = layer
        self._page_size = page_size
        # The reach of a window is the same at every position; in other layers it is not.
        has_lag = layer.kind == "window" or (layer.kind == "state" and layer.span is not None)
        self.lag = FAR - layer.first_seen(FAR) if has_lag else -1
        """The tokens before its own that a token attends to, where they are as many at every position; else -1."""

    def page(self, position: int) -> int:
        """Return the page of the first token after the sink that the token at `position` attends to."""
        lag = self.lag
        if lag < 0:
            return self._layer.first_seen(position) // self._page_size
        return (position - lag) // self._page_size if position > lag else 0


class Held(Protocol):
    """The parts of a match that others hold, by the number of a group."""

    def num_shared(self, group: int, first_page: int) -> int:
        """Return how many of the parts of pages from `first_page` on and of the sink others hold."""

    def num_idle(self, group: int) -> int:
        """Return how many snapshots of a group of states are not held."""

    def num_with_held_copy(self, group: int) -> int:
        """Return how many parts of a group nothing holds, but a copy of them."""


class GroupNeeds:
    """Memory needs, in blocks of `memory`. `most_new`: the most tokens of a request that a step may compute.

    `most_kept`: the most tokens of a request beyond a window whose parts are not released yet; `most_new` by default.

    A window or a chunk holds at most the pages that its span and the tokens of one step extend over, its *cap*: it
    bounds the need of a request, whatever its length and wherever its steps begin and end.
    """

    def __init__(self, memory: GroupMemory, *, page_size: int, most_new: int, most_kept: int | None = None) -> None:
        self._page_size = page_size
        self._aligns = memory.aligns
        self._memory = memory
        self.most_new = most_new
        self._groups = [(group, group.part_bytes // memory.block_bytes) for group in memory.groups]
        self._whole_blocks = sum(blocks for group, blocks in self._groups if group.layer.kind in ("full", "latent"))
        self._keeps_all = [not (group.is_state or group.is_bounded) for group, _ in self._groups]
        self._is_state = [group.is_state for group, _ in self._groups]
        self._is_window = [group.layer.kind == "window" and memory.hit_pages == 1 for group, _ in self._groups]
        """By group, whether it is of windows, in a model whose blocks have one size."""
        self._first_seen = [FirstSeen(group.layer, page_size) for group, _ in self._groups]
        self._sinks = [self._num_sink(group.layer) for group, _ in self._groups]
        bounded = [(group.layer, blocks) for group, blocks in self._groups if group.is_bounded]
        most_new_states = 1 + memory.saves_inside
        self._new_caps = [most_new_states if memory.aligns and layer.kind == "state" else FAR for layer, _ in bounded]
        self._caps = [(self._cap(group, most_kept), blocks) for group, blocks in self._groups if group.is_bounded]
        alike: dict[tuple[int, int], int] = {}
        for (cap, blocks), new_cap in zip(self._caps, self._new_caps, strict=True):
            alike[cap, new_cap] = alike.get((cap, new_cap), 0) + blocks
        self._alike = [(cap, new_cap, blocks) for (cap, new_cap), blocks in alike.items()]
        """The cap of groups with windows or chunks, that of new pages, and the blocks of a page in all these groups."""
        # Chunks that begin inside a page may reach into one page more, which vLLM's cap does not count.
        self._most = [
            (cap + (layer.kind == "chunk" and (layer.span or 1) % page_size > 0), blocks)
            for (layer, _), (cap, blocks) in zip(bounded, self._caps, strict=True)
        ]
        if memory.aligns:
            # The state before a chunk or two, and the one after it.
            most = (2 if most_kept is None or most_kept == most_new else 3) + memory.saves_inside
            self._most = [
                (most if layer.kind == "state" else cap, blocks)
                for (layer, _), (cap, blocks) in zip(bounded, self._most, strict=True)
            ]
        self._less_in_chunk = sum(blocks for layer, blocks in bounded if memory.aligns and layer.kind == "state")
        self._state_blocks = sum(blocks for group, blocks in self._groups if group.is_state)
        self.page_blocks = sum(blocks * group.block_pages for group, blocks in self._groups if not group.is_state)
        """The most blocks that a decode takes for the first token of a page."""
        self.mean_page_blocks = sum(blocks for group, blocks in self._groups if not group.is_state)
        """The blocks that it takes on average."""

    def _cap(self, group: PartGroup, most_kept: int | None = None) -> int:
        """Return the most pages of a window or a chunk, as vLLM counts them, and those of the sink.

        States that are kept by page have no cap.
        """
        layer, pages = group.layer, group.block_pages
        if layer.kind == "state":
            return FAR
        most, span = self.most_new if most_kept is None else most_kept, layer.span or 1
        if layer.kind == "chunk":
            return -(-(span + most) // self._page_size)
        return (-(-(span - 1 + most) // (self._page_size * pages)) + 1) * pages + self._num_sink(layer)

    def _num_sink(self, layer: KvLayer) -> int:
        return -(-layer.sink // self._page_size)

    def of_page(self, page: int) -> int:
        """Return the blocks that a decode takes for the first token of `page`."""
        return self.page_blocks

    def at_most_whole(self, num_tokens: int) -> int:
        """Return an upper bound of all the others for a request of `num_tokens` tokens; fast to compute."""
        return self.page_blocks * -(-num_tokens // self._page_size) + 2 * self._state_blocks

    def to_compute(self, num_tokens: int) -> int:
        """Return the most blocks that `num_tokens` tokens need at one time, wherever their chunks begin and end."""
        num_pages = -(-num_tokens // self._page_size)
        blocks = self._state_blocks + self._whole_blocks * num_pages
        for most, part_blocks in self._most:
            blocks += part_blocks * min(num_pages, most)
        return blocks

    def at_most(self, num_tokens: int) -> int:
        """Return the blocks that a request of `num_tokens` tokens needs alone, wherever its chunks begin and end.

        A request that begins from snapshots holds them in addition to its states during one step.
        """
        blocks = self.to_compute(num_tokens)
        if num_tokens > self._page_size:
            blocks += self._state_blocks
        return blocks

    def most_tokens(self, limit: int, num_blocks: int) -> int:
        """Return the longest request, of up to `limit` tokens, that can run in `num_blocks`; 0 if none can."""
        fewest, most = 0, limit
        while fewest < most:
            middle = (fewest + most + 1) // 2
            if self.at_most(middle) <= num_blocks:
                fewest = middle
            else:
                most = middle - 1
        return fewest

    def of_request(self, num_prompt_tokens: int, max_tokens: int) -> int:
        """Return the same for a request with this prompt and output, whose last token is never computed."""
        return self.at_most(max(1, num_prompt_tokens + max_tokens - 1))

    def to_admit(
        self, start: int, num_known: int, end: int, found: Held, enough: int = -1, *, prefill_end: int = 0
    ) -> int:
        """Return the blocks that must be free for a request whose match has `start` of its `num_known` tokens.

        `end`: the number of computed tokens when its first step ends; `prefill_end`: when its prefill ends. The rule is
        vLLM's: in each group the most pages that a request holds, minus all pages of the match, even those that its
        window has passed; or the pages of the first step, if they are more. The parts of `found` that are not held are
        counted as well: they are free until the request holds them. If `enough` blocks certainly suffice, the result
        may be larger.
        """
        most = self.at_most_whole(num_known)
        if most <= enough:
            return most
        in_all, in_step = self._beside_found(start, num_known, end, prefill_end)
        most = max(in_all, in_step)
        if start:
            most += self._idle(start, found, of_whole=True) + self._idle(start, found, of_whole=False)
        return most

    def to_load(self, missing: Sequence[int], idle: Sequence[int]) -> int:
        """Return the blocks of a load: by group, `missing` parts, and `idle` ones of the device without a holder."""
        return sum(part_blocks * (missing[index] + idle[index]) for index, (_, part_blocks) in enumerate(self._groups))

    def to_admit_loaded(
        self,
        start: int,
        loaded: int,
        num_known: int,
        end: int,
        loads: tuple[list[int], list[int], list[int]],
        found: Held,
        *,
        prefill_end: int = 0,
        num_kept: int = 0,
    ) -> int:
        """Return what `to_admit` does for a request that gets the tokens [start, loaded) by a load.

        `loads`: by group, the numbers of parts to load, of parts of the device without a holder, and of parts of the
        device after `start`. Pages that a window has passed before the end of the load count as pages of the match.
        `found`: the match. `num_kept`: blocks to leave free, included. Where states are kept at the ends of chunks,
        vLLM does not count the state of the load and that of the chunk after it as two; here both have to be free, of
        the blocks to leave free if need be.
        """
        missing, idle, beyond = loads
        num_hit, num_pages = start // self._page_size, -(-num_known // self._page_size)
        num_loaded = loaded // self._page_size
        num_new = -(-end // self._page_size) - num_loaded
        num_states = self._memory.num_states(num_new, end, prefill_end)
        in_all, in_step, num_uncounted, place = self._state_blocks, self._state_blocks, 0, 0
        for index, (group, part_blocks) in enumerate(self._groups):
            if group.is_state:
                in_all += part_blocks * missing[index]
                in_step += part_blocks * missing[index]
                continue
            most, num_passed = num_pages, num_hit
            if group.is_bounded:
                most, new_cap = min(num_pages, self._caps[place][0]), self._new_caps[place]
                place += 1
                if new_cap < FAR:
                    new_cap = min(new_cap, max(1, num_pages - num_loaded))  # a state inside a chunk is after the load
                    num_counted = min(new_cap, max(0, most - num_hit)) + self._passed_state(index, start, found)
                    in_all += part_blocks * num_counted
                    in_step += part_blocks * num_counted
                    num_uncounted += part_blocks * (missing[index] + min(num_states, num_new) - num_counted)
                    continue
                num_passed = max(num_hit, group.layer.first_seen(loaded) // self._page_size)
            in_all += part_blocks * max(0, most - num_passed - beyond[index])
            in_step += part_blocks * (missing[index] + num_new)
        return max(max(in_all, in_step) + num_kept, in_step + num_uncounted) + self.to_load([0] * len(idle), idle)

    def passed_states(self, start: int, found: Held) -> int:
        """Return the blocks of the states of a match that a load passes, if nothing holds them.

        vLLM counts them where it keeps states at the ends of chunks, though no request will hold them.
        """
        return sum(
            part_blocks * self._passed_state(index, start, found)
            for index, (group, part_blocks) in enumerate(self._groups)
            if self._aligns and group.has_states_by_page
        )

    def _passed_state(self, index: int, start: int, found: Held) -> int:
        """Return whether nothing holds the state that a match of `start` tokens has in a group, as a number."""
        return 1 - found.num_shared(index, start // self._page_size - 1) if start else 0

    def to_go_on(
        self, num_taken: int, num_known: int, start: int, end: int, state_blocks: int, *, prefill_end: int = 0
    ) -> int:
        """Return the blocks for the tokens after `num_taken` pages of a request; a step computes [start, end).

        The rule is vLLM's, as of `to_admit`. `state_blocks`: those of its own states, if it lacks them.
        """
        num_pages = -(-num_known // self._page_size)
        in_all = self._whole_blocks * (num_pages - num_taken)
        # No state is saved inside a chunk that begins inside a page.
        most_states = 1 if start % self._page_size else FAR
        for (cap, part_blocks), new_cap in zip(self._caps, self._new_caps, strict=True):
            most_new = new_cap if new_cap == FAR else min(new_cap, most_states)
            in_all += part_blocks * min(most_new, max(0, min(num_pages, cap) - num_taken))
        num_new = -(-end // self._page_size) - num_taken
        num_states = self._memory.num_states(num_new, end, prefill_end)
        in_step = self.page_blocks * num_new - self._less_in_chunk * max(0, num_new - num_states)
        return state_blocks + max(in_all, in_step)

    def front(self, held: Sequence[int], num_pages: int) -> int:
        """Return the most blocks of windows and chunks that a request holds which computes `num_pages` pages.

        `held`: the parts of each group that it begins with.
        """
        bounded = [held[index] for index, (group, _) in enumerate(self._groups) if group.is_bounded]
        return sum(
            part_blocks * min(most, count + num_pages)
            for count, (most, part_blocks) in zip(bounded, self._most, strict=True)
        )

    def sent(self, start: int, num_tokens: int) -> int:
        """Return the blocks of the parts, of pages from token `start` on, that the last of `num_tokens` tokens needs.

        It is computed again where they arrive, so a state is that of the tokens before it.
        """
        num_hit, num_pages = start // self._page_size, -(-num_tokens // self._page_size)
        blocks = self._state_blocks + self._whole_blocks * (num_pages - num_hit)
        for group, part_blocks in self._groups:
            if group.is_bounded:
                sink, first_page = self._seen(group, num_tokens)
                blocks += part_blocks * (num_pages - max(first_page, num_hit) + max(0, sink - num_hit))
        return blocks

    def to_receive(self, start: int, num_tokens: int, found: Held) -> int:
        """Return the blocks that must be free to receive the others, after a match of `start` tokens.

        The parts of `found` that are needed and not held are counted as well.
        """
        blocks = self.sent(start, num_tokens)
        num_hit = start // self._page_size
        for index, (group, part_blocks) in enumerate(self._groups if start else ()):
            if group.is_state:
                blocks += part_blocks * found.num_idle(index) if start == num_tokens - 1 else 0
                continue
            sink, first_page = self._seen(group, num_tokens)
            num_found = max(0, num_hit - first_page) + min(sink, num_hit)
            blocks += part_blocks * (num_found - found.num_shared(index, first_page))
        return blocks

    def _seen(self, group: PartGroup, num_tokens: int) -> tuple[int, int]:
        """Return (s, f): the last of `num_tokens` tokens sees the first s pages, and those from page f on."""
        first_page = group.layer.first_seen(num_tokens - 1) // self._page_size
        return min(self._num_sink(group.layer), first_page), first_page

    def least_to_admit(self, start: int, num_known: int, end: int, found: Held, *, prefill_end: int = 0) -> int:
        """Return a lower bound of `to_admit` that stays valid if parts of `found` are evicted.

        A request that finds less may have no idle parts of windows to hold, unless these reach to its first page: then
        it needs a part more for each that it does not find. And it may find a copy that others hold.
        """
        in_all, in_step = self._beside_found(start, num_known, end, prefill_end)
        idle, num_hit = self._idle(start, found, of_whole=True), start // self._page_size
        for index, (_, part_blocks) in enumerate(self._groups if start else ()):
            if self._keeps_all[index]:
                idle -= part_blocks * found.num_with_held_copy(index) if idle else 0
            elif self._is_window[index] and not self._first_seen[index].page(start):
                num_idle = num_hit - found.num_shared(index, 0)
                if num_idle:
                    idle += part_blocks * (num_idle - found.num_with_held_copy(index))
        return max(in_all + idle, in_step)

    def _beside_found(self, start: int, num_known: int, end: int, prefill_end: int) -> tuple[int, int]:
        """Return the blocks needed in addition to a match: the most at one time, and those of the first step."""
        num_hit = start // self._page_size
        num_pages = -(-num_known // self._page_size)
        in_all = self._whole_blocks * (num_pages - num_hit)
        for cap, new_cap, part_blocks in self._alike:
            most = (num_pages if num_pages < cap else cap) - num_hit
            if most > 0:
                in_all += part_blocks * (most if most < new_cap else new_cap)
        num_new = -(-end // self._page_size) - num_hit
        in_step = self.page_blocks * num_new
        if self._less_in_chunk:
            num_states = self._memory.num_states(num_new, end, prefill_end)
            in_step -= self._less_in_chunk * max(0, num_new - num_states)
        return self._state_blocks + in_all, self._state_blocks + in_step

    def _idle(self, start: int, found: Held, *, of_whole: bool) -> int:
        """Return the blocks of a match that are not held, in groups that keep all tokens or in the others."""
        blocks = 0
        if not start:
            return 0
        num_hit = start // self._page_size
        for index, (_, part_blocks) in enumerate(self._groups):
            if of_whole is not self._keeps_all[index]:
                continue
            if of_whole:
                blocks += part_blocks * (num_hit - found.num_shared(index, 0))
                continue
            if self._is_state[index]:
                blocks += part_blocks * found.num_idle(index)
                continue
            first_page, sink = self._first_seen[index].page(start), self._sinks[index]
            num_found = num_hit - first_page + (sink if sink < first_page else first_page)
            blocks += part_blocks * (num_found - found.num_shared(index, first_page))
        return blocks
