"""A part of a shared device is a source of pages as any other: alone, beside others, and where nothing is lent."""

from __future__ import annotations

import pytest

from kvarts.core.kv.page_cache import PageCache
from kvarts.core.sched.page_source import PageSource
from kvarts.sim.sharing.device import SharedDevice
from kvarts.sim.sharing.memory import DevicePart

from builders.engines import whole_pages
from builders.page_source_contract import PageSourceContract

pytestmark = pytest.mark.laws


class Part(PageSourceContract):
    def device(self) -> SharedDevice:
        return SharedDevice(240)

    def make(self) -> tuple[PageSource, PageCache]:
        part = self.device().register("a", page_bytes=10)
        part.token_budget = 100
        return part, whole_pages(part.cache)

    def begin_turn(self, source: PageSource) -> None:
        assert isinstance(source, DevicePart)
        source.refresh()


class TestTheWholeDevice(Part):
    """One model has it all."""


class TestBesideAnIdleModel(Part):
    def device(self) -> SharedDevice:
        device = super().device()
        device.register("b", page_bytes=5, guaranteed_bytes=60)
        return device


class TestWithMemoryOfItsOwn(Part):
    def make(self) -> tuple[PageSource, PageCache]:
        device = SharedDevice(480, is_static=True)
        device.register("b", page_bytes=5, guaranteed_bytes=240)
        part = device.register("a", page_bytes=10, guaranteed_bytes=240)
        part.token_budget = 100
        return part, whole_pages(part.cache)
