"""Many steps of a RunCache in which every decode computes a token, and nothing else happens."""

from __future__ import annotations

from kvarts.kv.run_cache import RunCache

__all__ = ["leap"]


def leap(cache: RunCache, most_steps: int, wanted_bytes: int, counts: list[int]) -> int:
    """Do up to `most_steps` steps, and return how many; the first of them fits.

    The last one is under way, and `end_step` must follow, which may have nothing left to do. It ends before a step for
    which decodes lack memory; and, where a request waits for `wanted_bytes`, before one in which these are free once
    decodes have taken their pages, or in which a page becomes findable that the request may find.

    Add what is in use in each step to `counts`, once its pages are taken: the bytes used, cached and released, then the
    parts used and cached in each group.
    """
    decodes, page_size, page_bytes = cache.decodes, cache.page_size, cache.page_bytes
    num_due, filling = decodes.num_due, decodes.filling
    slot = decodes.step % page_size
    num_steps = 0
    while True:
        if num_due[slot]:
            cache.take_pages(num_due[slot])
        if filling[slot]:
            cache.fill_pages()
        counts += (cache.used_bytes, cache.cached_bytes, cache.released_bytes)
        for pair in zip(cache.num_used, cache.num_cached, strict=True):
            counts += pair
        num_steps += 1
        if num_steps == most_steps:
            return num_steps
        cache.end_step()
        slot += 1
        if slot == page_size:
            slot = 0
        left_bytes = cache.free_bytes - num_due[slot] * page_bytes
        if left_bytes < 0 or (wanted_bytes and (wanted_bytes <= left_bytes or filling[slot])):
            cache.has_ended = True
            return num_steps
