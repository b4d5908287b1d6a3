"""What every source of pages promises a scheduler. A subclass brings the source."""

from __future__ import annotations

import pytest

from kvarts.core.content import Content
from kvarts.core.kv.page_cache import PageCache
from kvarts.core.request import Request
from kvarts.core.sched.page_source import PageSource

__all__ = ["PageSourceContract", "asking"]


def asking(index: int = 0) -> Request:
    """Return a request that may ask for pages."""
    content = Content.from_tokens([1, 2, 3, 4], page_size=1, owner=index)
    return Request(index, content, num_prompt_tokens=4, max_tokens=1)


def answers(source: PageSource, cache: PageCache) -> list[object]:
    """Everything that it can be asked without asking others for pages."""
    to_admit = [source.num_free_to_admit(num_pages) for num_pages in range(1, cache.pool.total + 1)]
    return [source.token_budget, source.is_draining, source.num_most, source.num_withheld, to_admit]


class PageSourceContract:
    """Run these by a subclass that makes a source, and the cache that takes its pages. Nothing is in use."""

    def make(self) -> tuple[PageSource, PageCache]:
        """Return a source and its cache, of some 24 pages."""
        raise NotImplementedError

    def begin_turn(self, source: PageSource) -> None:
        """Do what comes between two steps."""

    def made(self) -> tuple[PageSource, PageCache]:
        """Return a source between two steps."""
        source, cache = self.make()
        self.begin_turn(source)
        return source, cache

    def test_it_has_tokens_and_pages_for_one_request(self) -> None:
        source, cache = self.made()
        assert source.token_budget > 0
        assert not source.is_draining
        assert 0 < source.num_most <= cache.pool.total
        assert source.num_free_to_admit(source.num_most) >= source.num_most

    def test_asking_changes_nothing(self) -> None:
        source, cache = self.made()
        assert answers(source, cache) == answers(source, cache)

    def test_one_that_is_alone_answers_as_its_cache_does(self) -> None:
        source, cache = self.made()
        if not source.is_alone:
            return
        before = source.token_budget, source.num_most
        content = Content.from_tokens(range(5), page_size=1, owner=0)
        cache.grow(cache.open(cache.match(content, 0)), 5)
        assert source.num_free_to_admit(3) == cache.num_free
        assert not source.is_draining and source.num_withheld == 0
        assert (source.token_budget, source.num_most) == before

    @pytest.mark.parametrize("num_pages", [1, 5, 11])
    def test_what_is_taken_is_gone_and_what_is_given_back_is_there_again(self, num_pages: int) -> None:
        source, cache = self.made()
        before = answers(source, cache)
        num_free = source.num_free_to_admit(1)
        content = Content.from_tokens(range(num_pages), page_size=1, owner=0)
        table = cache.open(cache.match(content, 0))
        cache.grow(table, num_pages)
        assert source.num_free_to_admit(1) == num_free - num_pages
        cache.close(table, 0, num_pages)
        self.begin_turn(source)
        assert answers(source, cache) == before

    def test_cached_pages_can_be_taken(self) -> None:
        source, cache = self.made()
        num_free = source.num_free_to_admit(1)
        content = Content.from_tokens(range(7), page_size=1, owner=0)
        table = cache.open(cache.match(content, 0))
        cache.grow(table, 7)
        cache.close(table, 7, 7)
        self.begin_turn(source)
        assert cache.num_cached == 7
        assert source.num_free_to_admit(1) == num_free

    def test_what_is_used_free_and_withheld_is_all_there_is(self) -> None:
        source, cache = self.made()
        for num_pages in range(9):
            assert cache.num_used + cache.num_free + source.num_withheld == cache.pool.total
            content = Content.from_tokens(range(num_pages), page_size=1, owner=num_pages)
            table = cache.open(cache.match(content, 0))
            if num_pages > cache.num_free:
                break
            cache.grow(table, num_pages)
            self.begin_turn(source)

    @pytest.mark.parametrize("to_admit", [True, False])
    def test_it_says_truly_whether_way_was_made(self, to_admit: bool) -> None:
        source, cache = self.made()
        before = answers(source, cache)
        assert not source.preempt_for(asking(), cache.pool.total + 1, to_admit=to_admit), "more than there is"
        assert answers(source, cache) == before
