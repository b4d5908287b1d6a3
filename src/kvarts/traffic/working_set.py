"""The working set of a trace: the number of pages that would hold everything it computes, once."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from sys import byteorder

from kvarts.content import UNIT_BYTES
from kvarts.few import arrays_pay
from kvarts.traffic.request_columns import RequestColumns
from kvarts.traffic.trace import Trace, spell
from kvarts.traffic.trace_request import Units

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
    if isinstance(requests, RequestColumns):
        lengths: Iterable[tuple[int, int]] = zip(requests.prompts, requests.outputs, strict=True)
        groups = _alike(requests.first_ids(), [None] * len(requests))
    else:
        lengths = ((request.num_prompt_tokens, request.num_output_tokens) for request in requests)
        firsts = array("Q", (_first_unit(request.units) for request in requests))
        groups = _alike(firsts, [request.tenant for request in requests])
    # A sequence's last token is never computed.
    num_pages = sum((prompt + output - 1) // page_size for prompt, output in lengths)
    for members in groups:
        is_run = members[-1] - members[0] == len(members) - 1
        prompts = requests[members[0] : members[-1] + 1] if is_run else [requests[index] for index in members]
        units = [spell(request.units) for request in prompts]
        # The last unit may be partial, so equal units can be prompts of different lengths. Sorting is stable, so two
        # sorts suffice, and neither compares contents twice.
        order = sorted(range(len(prompts)), key=lambda place: prompts[place].num_prompt_tokens)
        order.sort(key=units.__getitem__)
        for start in range(1, len(order), SLAB):
            slab = order[start - 1 : start + SLAB]
            num_pages -= _shared_pages(
                [units[place] for place in slab],
                [prompts[place].num_prompt_tokens // page_size for place in slab],
                trace.unit_tokens,
                page_size,
            )
    return num_pages


def _first_unit(units: Units) -> int:
    """Return the first unit; units are not empty."""
    return int.from_bytes(units[:UNIT_BYTES], byteorder) if isinstance(units, bytes) else next(filter(None, units))[0]


def _alike(firsts: array[int], tenants: Sequence[str | None]) -> Iterator[list[int]]:
    """Return the indices of requests that may share pages: several of one tenant whose first units are equal."""
    by_tenant: dict[str | None, list[int]] = {}
    for index, tenant in enumerate(tenants):
        by_tenant.setdefault(tenant, []).append(index)
    for members in by_tenant.values():
        members.sort(key=firsts.__getitem__)
        for _, group in groupby(members, key=firsts.__getitem__):
            alike = list(group)
            if len(alike) > 1:
                yield alike


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
