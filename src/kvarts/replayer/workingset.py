"""The working set of a trace: how many pages would hold everything it computes, once."""

from __future__ import annotations

import numpy as np

from kvarts.content import UNIT_BYTES
from kvarts.replayer.trace import Trace, spell

__all__ = ["working_set_pages"]


def working_set_pages(trace: Trace, page_size: int) -> int | None:
    """Distinct full pages of all prompts, plus the pages that outputs add; None for a trace read as a stream.

    Sorted by content, a prompt shares with all prompts before it just what it shares with the one right before it.
    """
    requests = trace.requests
    if requests is None:
        return None
    by_tenant: dict[str | None, list[tuple[bytes, int]]] = {}
    num_pages = 0
    for request in requests:
        units = request.units
        if isinstance(units, tuple):
            units = spell(units)
        num_prompt = request.num_prompt_tokens
        by_tenant.setdefault(request.tenant, []).append((units, num_prompt))
        # A sequence's last token is never computed.
        num_pages += (num_prompt + request.num_output_tokens - 1) // page_size - num_prompt // page_size
    for prompts in by_tenant.values():
        num_pages += _distinct_pages(prompts, trace.unit_tokens, page_size)
    return num_pages


def _distinct_pages(prompts: list[tuple[bytes, int]], unit_tokens: int, page_size: int) -> int:
    """Distinct full pages of prompts, each given as units and number of tokens."""
    prompts.sort()
    units = np.frombuffer(b"".join([units for units, _ in prompts]), np.uint64)
    num_units = np.array([len(units) for units, _ in prompts]) // UNIT_BYTES
    pages = np.array([num_tokens for _, num_tokens in prompts]) // page_size
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
    shared = np.minimum(common * unit_tokens // page_size, np.minimum(pages[1:], pages[:-1]))
    return int(pages.sum() - shared.sum())
