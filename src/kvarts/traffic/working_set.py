"""The working set of a trace: how many pages would hold everything it computes, once."""

from __future__ import annotations

import numpy as np

from kvarts.columns import Column
from kvarts.content import UNIT_BYTES
from kvarts.traffic.trace import Trace, TraceRequest, spell

__all__ = ["working_set_pages"]

SLAB = 20_000
"""Prompts compared at once: bounds the memory it takes."""


def working_set_pages(trace: Trace, page_size: int) -> int | None:
    """Return the distinct full pages of all prompts, plus the pages that outputs add; None for a stream.

    Sorted by content and length, a prompt shares with all prompts before it just what it shares with the one right
    before it.
    """
    requests = trace.requests
    if not requests:
        return None
    lengths = [request.num_prompt_tokens for request in requests]
    num_prompt = np.array(lengths)
    num_output = np.array([request.num_output_tokens for request in requests])
    num_prompt_pages = num_prompt // page_size
    # A sequence's last token is never computed.
    num_pages = int(((num_prompt + num_output - 1) // page_size).sum())
    units = [spell(request.units) for request in requests]
    for members in _by_tenant(requests):
        # The last unit may be cut short: equal units can be prompts of different lengths. Sorting keeps the order of
        # equals, so two sorts do, and neither compares contents twice.
        members.sort(key=lengths.__getitem__)
        members.sort(key=units.__getitem__)
        for start in range(1, len(members), SLAB):
            slab = members[start - 1 : start + SLAB]
            num_pages -= _shared_pages(
                [units[index] for index in slab], num_prompt_pages[slab], trace.unit_tokens, page_size
            )
    return num_pages


def _by_tenant(requests: list[TraceRequest]) -> list[list[int]]:
    """Return the places of each tenant's requests."""
    members: dict[str | None, list[int]] = {}
    if len({request.tenant for request in requests}) == 1:
        return [list(range(len(requests)))]
    for index, request in enumerate(requests):
        members.setdefault(request.tenant, []).append(index)
    return list(members.values())


def _shared_pages(prompts: list[bytes], num_pages: Column, unit_tokens: int, page_size: int) -> int:
    """Return how many pages each prompt has in common with the one before it, summed up."""
    units = np.frombuffer(b"".join(prompts), np.uint64)
    num_units = np.fromiter(map(len, prompts), np.int64, len(prompts)) // UNIT_BYTES
    # Lay each prompt, as far as it can agree, beside the one before it, and find where they first differ.
    starts = np.cumsum(num_units) - num_units
    compared = np.minimum(num_units[1:], num_units[:-1])
    offsets = np.cumsum(compared) - compared
    within = np.arange(compared.sum()) - np.repeat(offsets, compared)
    differs = units[np.repeat(starts[1:], compared) + within] != units[np.repeat(starts[:-1], compared) + within]
    common = compared.copy()
    where = np.flatnonzero(differs)[::-1]  # of several for a prompt, the first is written last
    pair = np.searchsorted(offsets, where, side="right") - 1
    common[pair] = within[where]
    shared = np.minimum(common * unit_tokens // page_size, np.minimum(num_pages[1:], num_pages[:-1]))
    return int(shared.sum())
