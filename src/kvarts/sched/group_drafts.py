"""Drafts of a model with KV groups: guessed tokens have parts of pages in every group, until they are judged.

What a window has passed goes back at the end of the step, when it is known which guesses were right: until then a
request holds what its next token attends to, and what it would attend to after every guess.
"""

from __future__ import annotations

from kvarts.event_log import Tell
from kvarts.kv.cache import Holding
from kvarts.kv.part_pages import PartPages
from kvarts.request import Request, RequestState
from kvarts.sched.drafts import Drafter, Drafts
from kvarts.sched.group_batch import GroupBatch
from kvarts.sched.wheel import DecodeWheel

__all__ = ["GroupDrafts"]


class GroupDrafts(Drafts):
    """Drafts of which pages are parts in `cache`; a page takes `page_blocks` blocks."""

    def __init__(
        self,
        drafter: Drafter,
        wheel: DecodeWheel,
        cache: PartPages,
        rows: GroupBatch,
        *,
        page_blocks: int,
        tell: Tell | None,
    ) -> None:
        super().__init__(drafter, wheel, cache, rows, loads=None, tell=tell)
        self._parts = cache
        self._page_blocks = page_blocks
        self._ahead: list[Request] = []
        """Requests of which more than one token was counted in the step."""

    def take_ahead(self) -> list[Request]:
        """Return the requests that were more than a token ahead in the step that has ended, and still decode."""
        ahead, self._ahead = self._ahead, []
        return [request for request in ahead if request.state is RequestState.DECODING]

    def _num_room(self, holding: Holding, end: int) -> int:
        num_free = self._cache.num_free // self._page_blocks
        return (-(-end // self._page_size) + num_free) * self._page_size - end

    def _take_pages(self, request: Request, holding: Holding, start: int, end: int) -> None:
        for page in range(-(-start // self._page_size), -(-end // self._page_size)):
            self._parts.take_page(holding, page)
            self._new_blocks.append(self._batch.new_blocks(request, page))

    def _keep_pages(self, request: Request, before: int, end: int) -> None:
        holding = request.holding
        assert holding is not None
        self._parts.drop_pages(holding, -(-end // self._page_size))
        if end // self._page_size > before // self._page_size:
            self._parts.fill_page(holding, end)
        if end > before:
            self._ahead.append(request)
