"""The working set of a trace: how many pages would hold everything it computes, once."""

from __future__ import annotations

from kvarts.replayer.trace import Trace, spell

__all__ = ["working_set_pages"]

UNIT_BITS = 64


def working_set_pages(trace: Trace, page_size: int) -> int | None:
    """Distinct full pages of all prompts, plus the pages that outputs add; None for a trace read as a stream.

    Sorted by content, a prompt shares with the prompts before it just what it shares with the one right before it.
    """
    requests = trace.requests
    if requests is None:
        return None
    unit_tokens = trace.unit_tokens
    prompts = []
    num_pages = 0
    for request in requests:
        units = request.units
        if isinstance(units, tuple):
            units = spell(units)
        num_prompt_pages = request.num_prompt_tokens // page_size
        prompts.append((request.tenant or "", units, num_prompt_pages))
        # A sequence's last token is never computed.
        num_pages += (request.num_prompt_tokens + request.num_output_tokens - 1) // page_size - num_prompt_pages
    prompts.sort()
    tenant_before: str | None = None
    units_before, pages_before = b"", 0
    for tenant, units, prompt_pages in prompts:
        num_pages += prompt_pages
        if tenant == tenant_before:
            shorter = min(len(units), len(units_before))
            a, b = units[:shorter], units_before[:shorter]
            if a == b:
                common = shorter * 8 // UNIT_BITS
            else:
                differing = int.from_bytes(a, "little") ^ int.from_bytes(b, "little")
                common = ((differing & -differing).bit_length() - 1) // UNIT_BITS
            num_pages -= min(common * unit_tokens // page_size, prompt_pages, pages_before)
        tenant_before, units_before, pages_before = tenant, units, prompt_pages
    return num_pages
