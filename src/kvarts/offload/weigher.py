"""Decision whether to load: how much of an offer is loaded sooner than it is computed."""

from __future__ import annotations

from collections.abc import Sequence

from kvarts.kv.transfer import Awaited, Offer, PrefillTimes, Weighed
from kvarts.offload.channel import Channel
from kvarts.offload.measured import MeasuredPrefill

__all__ = ["Weigher"]


class Weigher:
    """Weighs loads over `lanes`, one per tier, against `prefill`; by default, against measured times.

    Owner of the counts of good and failed loads.
    """

    def __init__(self, lanes: Sequence[Channel], page_bytes: int, prefill: PrefillTimes | None) -> None:
        self._lanes = lanes
        self._page_bytes = page_bytes
        self._measured = MeasuredPrefill()
        self._prefill: PrefillTimes = self._measured if prefill is None else prefill
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
        prefill = self._prefill
        compute_ns = prefill.prefill_ns(start * page_size, num_known)
        if compute_ns is None:
            return Weighed(offer.num_pages, offer.by_tier, is_awaited=awaited is not None)
        num_good, num_loads = self._num_good_loads + 1, self._num_loads + 1

        def worth_ns(num_pages: int) -> int:
            left_ns = prefill.prefill_ns((start + num_pages) * page_size, num_known) or 0
            return (compute_ns - left_ns) * (1 + num_behind) * num_good // num_loads

        best, best_gain_ns, worth, load_ns = 0, 0, 0, 0
        position = 0
        for lane, num_pages, num_bytes in zip(self._lanes, offer.by_tier, self._bytes_of(offer), strict=True):
            if num_pages:
                position += num_pages
                load_ns = max(load_ns, lane.within_ns(now_ns, num_bytes))
                worth = worth_ns(position)
                if worth - load_ns >= best_gain_ns:
                    best, best_gain_ns = position, worth - load_ns
        if awaited is not None:
            wait_ns = max(0, awaited.end_ns - now_ns)
            if worth_ns(awaited.num_pages) - wait_ns >= best_gain_ns:
                return Weighed(0, (0,) * len(offer.by_tier), is_awaited=True)
        by_tier = []
        num_left = best
        for lane, num_pages in zip(self._lanes, offer.by_tier, strict=True):
            by_tier.append(min(num_left, num_pages))
            num_left -= by_tier[-1]
            if by_tier[-1] < num_pages:
                lane.passed_over()
        return Weighed(best, tuple(by_tier), load_ns=load_ns, worth_ns=worth)

    def _bytes_of(self, offer: Offer) -> Sequence[int]:
        return offer.num_bytes or [num_pages * self._page_bytes for num_pages in offer.by_tier]
