"""Bounded requests on the decode wheel, against requests counted one by one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvarts.core.content import Content
from kvarts.core.kv.cache import PageReserve
from kvarts.core.kv.eviction import LruOrder
from kvarts.core.kv.groups import SinkWindow
from kvarts.core.kv.page_cache import PageCache
from kvarts.core.kv.pool import IdPool
from kvarts.core.kv.session_pages import ChunkRoom, SessionPages
from kvarts.core.kv.tree import PrefixTree
from kvarts.core.request import Request
from kvarts.core.sched.wheel import DecodeWheel


class Naive:
    """A request, and how far it is."""

    def __init__(self, request: Request, num_computed: int, num_left: int) -> None:
        self.request = request
        self.num_computed = num_computed
        self.num_left = num_left

    @property
    def num_seen(self) -> int:
        own = self.request.own
        return (self.num_computed if own is None else min(self.num_computed, own.keeps.sink + own.keeps.window)) + 1


@given(
    st.integers(1, 6),
    st.lists(
        st.one_of(
            st.tuples(
                st.just("join"),
                st.tuples(st.integers(0, 30), st.integers(1, 25)),
                st.one_of(st.none(), st.tuples(st.integers(0, 5), st.integers(1, 12))),
            ),
            st.tuples(st.just("leave"), st.integers(0, 9), st.none()),
            st.tuples(st.just("turn"), st.integers(1, 9), st.none()),
        ),
        max_size=40,
    ),
)
def test_the_wheel_knows_what_bounded_requests_see(page_size: int, acts: list[tuple[str, object, object]]) -> None:
    wheel = DecodeWheel(page_size)
    reserve = PageReserve(PageCache(IdPool(1), PrefixTree(LruOrder())))
    room = ChunkRoom(1, page_size)
    there: list[Naive] = []
    for admission, (what, amount, keeps) in enumerate(acts):
        if what == "join":
            assert isinstance(amount, tuple)
            num_computed, num_left = amount
            own = None
            if isinstance(keeps, tuple):
                own = SessionPages(SinkWindow(*keeps), reserve, room)
            content = Content.from_tokens([1] * num_computed, page_size=page_size, owner=admission)
            request = Request(
                admission, content, num_prompt_tokens=num_computed, max_tokens=num_left + 1, own=own, start=0
            )
            request.num_computed, request.num_output_tokens, request.admission = num_computed, 1, admission
            wheel.join(request)
            there.append(Naive(request, num_computed, num_left))
        elif there and what == "leave":
            assert isinstance(amount, int)
            naive = there.pop(amount % len(there))
            wheel.leave(naive.request)
            assert naive.request.num_computed == naive.num_computed
            naive.request.admission = -1
        elif there and what == "turn":
            assert isinstance(amount, int)
            assert wheel.steps_to_finish() == min(naive.num_left for naive in there)
            num_steps = min(amount, wheel.steps_to_finish())
            finished = wheel.turn(num_steps)
            for naive in there:
                naive.num_computed += num_steps
                naive.num_left -= num_steps
            ended = [naive for naive in there if not naive.num_left]
            assert finished == [naive.request for naive in ended]
            for naive in ended:
                there.remove(naive)
                naive.request.admission = -1
        assert wheel.num_decoding == len(there)
        assert wheel.known_tokens == sum(naive.num_seen for naive in there)
        assert wheel.pages_due() == sum(
            naive.request.own is None and naive.num_computed % page_size == 0 for naive in there
        )
        windows = [naive.request.own.keeps.window % page_size for naive in there if naive.request.own is not None]
        assert dict(wheel.window_places) == {place: windows.count(place) for place in windows}
        for place in range(page_size):
            computing = [naive.request for naive in there if naive.num_computed % page_size == place]
            assert wheel.computing_at(place) == computing
