"""The working set of a trace: the number of pages that would hold everything it computes, once."""

from __future__ import annotations

from itertools import pairwise

from kvarts.content import UNIT_BYTES
from kvarts.few import arrays_pay
from kvarts.traffic.trace import Trace, TraceRequest, spell

__all__ = ["working_set_pages"]

SLAB = 20_000
"""Number of prompts compared at once, to bound memory."""


def working_set_pages(trace: Trace, page_size: int) -> int | None:
    """Return the number of distinct full pages of all prompts, plus the pages of outputs; None for a stream.

    In order of content and length, a prompt shares exactly as much with all prompts before it as with its direct
    predecessor.
    """
    requests = trace.requests
    if not requests:
        return None
    lengths = [request.num_prompt_tokens for request in requests]
    # A sequence's last token is never computed.
    num_pages = sum(
        (num_prompt + request.num_output_tokens - 1) // page_size
        for num_prompt, request in zip(lengths, requests, strict=True)
    )
    units = [spell(request.units) for request in requests]
    for members in _by_tenant(requests):
        # The last unit may be partial, so equal units can be prompts of different lengths. Sorting is stable, so two
        # sorts suffice, and neither compares contents twice.
        members.sort(key=lengths.__getitem__)
        members.sort(key=units.__getitem__)
        for start in range(1, len(members), SLAB):
            slab = members[start - 1 : start + SLAB]
            num_pages -= _shared_pages(
                [units[index] for index in slab],
                [lengths[index] // page_size for index in slab],
                trace.unit_tokens,
                page_size,
            )
    return num_pages


def _by_tenant(requests: list[TraceRequest]) -> list[list[int]]:
    """Return the indices of each tenant's requests."""
    members: dict[str | None, list[int]] = {}
    if len({request.tenant for request in requests}) == 1:
        return [list(range(len(requests)))]
    for index, request in enumerate(requests):
        members.setdefault(request.tenant, []).append(index)
    return list(members.values())


def _shared_pages(prompts: list[bytes], num_pages: list[int], unit_tokens: int, page_size: int) -> int:
    """Return the total number of pages that each prompt shares with the one before it."""
    common = _common_of_many(prompts) if arrays_pay(sum(map(len, prompts)) // UNIT_BYTES) else _common(prompts)
    return sum(
        min(num_units * unit_tokens // page_size, before, after)
        for num_units, (before, after) in zip(common, pairwise(num_pages), strict=True)
    )


def _common(prompts: list[bytes]) -> list[int]:
    """Return the number of units that each prompt shares with the one before it."""
    common = []
    for before, after in pairwise(prompts):
        low, high = 0, min(len(before), len(after)) // UNIT_BYTES
        while low < high:  # at least `low` first units are equal, and at most `high`
            middle = (low + high + 1) // 2
            part = slice(low * UNIT_BYTES, middle * UNIT_BYTES)
            if before[part] == after[part]:
                low = middle
            else:
                high = middle - 1
        common.append(low)
    return common


def _common_of_many(prompts: list[bytes]) -> list[int]:
    """Vectorised `_common`."""
    import numpy as np

    units = np.frombuffer(b"".join(prompts), np.uint64)
    num_units = np.fromiter(map(len, prompts), np.int64, len(prompts)) // UNIT_BYTES
    # Align each prompt with the one before it, over their common length, and find the first difference.
    starts = np.cumsum(num_units) - num_units
    compared = np.minimum(num_units[1:], num_units[:-1])
    offsets = np.cumsum(compared) - compared
    within = np.arange(compared.sum()) - np.repeat(offsets, compared)
    differs = units[np.repeat(starts[1:], compared) + within] != units[np.repeat(starts[:-1], compared) + within]
    common = compared.copy()
    where = np.flatnonzero(differs)[::-1]  # reversed, so the first difference of a prompt is written last
    pair = np.searchsorted(offsets, where, side="right") - 1
    common[pair] = within[where]
    shared: list[int] = common.tolist()
    return shared
