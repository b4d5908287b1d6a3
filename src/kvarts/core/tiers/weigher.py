"""Decision whether to load: how much of an offer is loaded sooner than it is computed."""

from __future__ import annotations

from collections.abc import Sequence

from kvarts.core.kv.transfer import Awaited, Offer, PrefillNs, Weighed
from kvarts.core.tiers.channel import Channel, MeasuredPrefill

__all__ = ["Weigher", "between"]

SPLIT_GAIN, PER_GAIN = 5, 4
"""A load is split only if that is 5/4 as quick as the better of loading and computing: the front takes device time from
other requests, and its pages are no hits."""


class Weigher:
    """Weighs loads over `lanes`, one per tier, against `prefill`; by default, against measured times.

    `splits`: the first pages of an offer may be computed while the others are loaded. `num_layers`: the first step that
    uses a load, of up to `step_tokens` tokens, computes one of as many layers while later ones are loaded; 1: it waits
    for the whole load. Owner of the counts of good and failed loads.
    """

    def __init__(
        self,
        lanes: Sequence[Channel],
        page_bytes: int,
        prefill: PrefillNs | None,
        *,
        splits: bool = False,
        num_layers: int = 1,
        step_tokens: int = 1,
    ) -> None:
        self.num_layers = num_layers
        self._step_tokens = step_tokens
        self._lanes = lanes
        self._splits = splits
        self._page_bytes = page_bytes
        self._measured = MeasuredPrefill()
        self._prefill_ns = self._measured.prefill_ns if prefill is None else prefill
        self._num_loads = 0
        self._num_good_loads = 0

    def measure(self, num_tokens: int, num_decodes: int, duration_ns: int) -> None:
        """Record how long a step of a real executor took, without transfers; `num_tokens`: tokens of prompts."""
        self._measured.measure(num_tokens, num_decodes, duration_ns)

    def loaded(self, *, is_whole: bool) -> None:
        """Record that a load has ended."""
        self._num_loads += 1
        self._num_good_loads += is_whole

    def weigh(
        self,
        now_ns: int,
        offer: Offer,
        start: int,
        page_size: int,
        num_known: int,
        *,
        num_behind: int,
        awaited: Awaited | None,
    ) -> Weighed:
        """Return how many pages of `offer`, which begins at page `start`, to load for a prompt of `num_known` tokens.

        Loading keeps the request waiting, and leaves its compute time to the `num_behind` requests behind it that do
        not wait for memory: it pays if their total gain is at least the wait. The gain is scaled by the share of loads
        that succeeded. `awaited`: the pages of another request's load, if there is one.
        """
        prefill_ns = self._prefill_ns
        start_token = start * page_size
        compute_ns = prefill_ns(start_token, num_known)
        offered = offer.by_tier
        if compute_ns is None:
            return Weighed(offer.num_pages, offered, is_awaited=awaited is not None)
        num_good, num_loads = (1 + num_behind) * (self._num_good_loads + 1), self._num_loads + 1
        best, front, best_gain_ns, worth, load_ns, wait_ns = 0, 0, 0, 0, 0, 0
        position = 0
        for place, num_pages in enumerate(offered):
            if num_pages:
                position += num_pages
                hidden_ns = self._hidden_ns(start_token + position * page_size, num_known)
                load_ns = self._wait_ns(now_ns, offer, start, 0, position, hidden_ns)
                rest_ns = prefill_ns(start_token + position * page_size, num_known) or 0
                worth = (compute_ns - rest_ns) * num_good // num_loads
                if worth - load_ns >= best_gain_ns:
                    best, front, best_gain_ns, wait_ns = position, 0, worth - load_ns, load_ns
                if not self._splits:
                    continue
                # Where the wait for the last pages takes no longer than the computation of those before them.
                num_front, num_above = 0, position
                while num_front < num_above:
                    count = (num_front + num_above) // 2
                    took_ns = prefill_ns(start_token, start_token + count * page_size) or 0
                    if took_ns >= self._wait_ns(now_ns, offer, start, count, position, hidden_ns):
                        num_above = count
                    else:
                        num_front = count + 1
                most_front = offer.most_front
                if most_front:
                    num_front = min(num_front, most_front[place])
                if 0 < num_front < position:
                    took_ns = prefill_ns(start_token, start_token + num_front * page_size) or 0
                    tail_ns = self._wait_ns(now_ns, offer, start, num_front, position, hidden_ns)
                    both_ns, either_ns = max(took_ns, tail_ns) + rest_ns, min(load_ns + rest_ns, compute_ns)
                    gain_ns = (compute_ns - took_ns - rest_ns) * num_good // num_loads
                    gain_ns -= max(0, tail_ns - took_ns)
                    if gain_ns > best_gain_ns and both_ns * SPLIT_GAIN <= either_ns * PER_GAIN:
                        best, front, best_gain_ns, wait_ns = position, num_front, gain_ns, tail_ns
        if awaited is not None:
            awaits_ns = max(0, awaited.end_ns - now_ns)
            rest_ns = prefill_ns(start_token + awaited.num_pages * page_size, num_known) or 0
            if (compute_ns - rest_ns) * num_good // num_loads - awaits_ns >= best_gain_ns:
                return Weighed(0, (0,) * len(offered), is_awaited=True)
        by_tier = between(offered, front, best)
        for place, num_pages in enumerate(offered):
            if by_tier[place] < num_pages:
                self._lanes[place].passed_over()
        took_ns = (prefill_ns(start_token, start_token + front * page_size) or 0) if front else 0
        return Weighed(
            best, by_tier, load_ns=load_ns, worth_ns=worth, num_front=front, front_ns=took_ns, wait_ns=wait_ns
        )

    def _hidden_ns(self, start: int, num_known: int) -> int:
        """Return how long the step that computes from token `start` on is busy before its last layer."""
        if self.num_layers == 1:
            return 0
        start = min(start, num_known - 1)
        step_ns = self._prefill_ns(start, min(num_known, start + self._step_tokens)) or 0
        return step_ns * (self.num_layers - 1) // self.num_layers

    def _wait_ns(self, now_ns: int, offer: Offer, first: int, start: int, end: int, hidden_ns: int) -> int:
        """Return how long pages [start, end) of `offer` keep a request waiting that computes `hidden_ns` meanwhile.

        It waits at least for the first of their layers, or for all layers if a step cannot await one of the lanes.
        `first`: the page at which the offer begins.
        """
        if not hidden_ns and not offer.runs:
            return self._wait_for_pages_ns(now_ns, offer.by_tier, start, end)
        wait_ns = 0
        counts = zip(self._lanes, self._bytes_of(offer, first, start, end), strict=True)
        moving = [(lane, num_bytes) for lane, num_bytes in counts if num_bytes]
        if not all(lane.can_be_awaited for lane, _ in moving):
            hidden_ns = 0
        for lane, num_bytes in moving:
            wait_ns = max(wait_ns, lane.within_ns(now_ns, num_bytes) - hidden_ns)
            if hidden_ns:
                wait_ns = max(wait_ns, lane.within_ns(now_ns, -(-num_bytes // self.num_layers)))
        return wait_ns

    def _wait_for_pages_ns(self, now_ns: int, by_tier: Sequence[int], start: int, end: int) -> int:
        """Return how long whole pages [start, end) of an offer keep a request waiting without computing."""
        wait_ns = position = 0
        for place, num_pages in enumerate(by_tier):
            first = position if position > start else start
            position += num_pages
            num_moved = (position if position < end else end) - first
            if num_moved > 0:
                within_ns = self._lanes[place].within_ns(now_ns, num_moved * self._page_bytes)
                if within_ns > wait_ns:
                    wait_ns = within_ns
        return wait_ns

    def _bytes_of(self, offer: Offer, first: int, start: int, end: int) -> Sequence[int]:
        """Return the bytes of pages [start, end) of `offer`, which begins at page `first`, to move from each tier."""
        by_tier = between(offer.by_tier, start, end)
        if not offer.runs:
            return [num_pages * self._page_bytes for num_pages in by_tier]
        num_bytes = [0] * len(by_tier)
        last = max(place for place, num_pages in enumerate(by_tier) if num_pages)
        for place, begin, stop, part_bytes in offer.runs[last]:
            num_bytes[place] += max(0, stop - max(begin, first + start)) * part_bytes
        return num_bytes


def between(by_tier: Sequence[int], start: int, end: int) -> tuple[int, ...]:
    """Return how many of pages [start, end) of an offer each tier has."""
    counts = []
    position = 0
    for num_pages in by_tier:
        counts.append(max(0, min(end, position + num_pages) - max(start, position)))
        position += num_pages
    return tuple(counts)
