"""What every source of pages promises: all pages of one pool."""

from __future__ import annotations

import pytest

from kvarts.core.kv.eviction import LruOrder
from kvarts.core.kv.page_cache import PageCache
from kvarts.core.kv.pool import CountPool, IdPool
from kvarts.core.kv.tree import PrefixTree
from kvarts.core.sched.page_source import OnePool, PageSource

from builders.page_source_contract import PageSourceContract

pytestmark = pytest.mark.laws


class TestOnePool(PageSourceContract):
    def make(self) -> tuple[PageSource, PageCache]:
        cache = PageCache(CountPool(24), PrefixTree(LruOrder()))
        return OnePool(cache, token_budget=100), cache


class TestOnePoolWithIds(PageSourceContract):
    def make(self) -> tuple[PageSource, PageCache]:
        cache = PageCache(IdPool(24), PrefixTree(LruOrder()))
        return OnePool(cache, token_budget=100), cache
