"""The loop that owns an engine: threads, streams and steps by hand at once, on a model of integers that is exact."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from random import Random
from typing import Any

import pytest

pytest.importorskip("tokenizers", reason="real models need kvarts[torch]")

from kvarts.base.clock import VirtualClock
from kvarts.base.errors import ConfigError
from kvarts.core.config import EngineConfig
from kvarts.core.events import Arrived, Rejected
from kvarts.core.sampling import Logprobs, SamplingParams
from kvarts.core.sched.plan import StepPlan, StepResult
from kvarts.proof.audit.opening import open_audit
from kvarts.run.engine_loop import EngineLoop
from kvarts.run.llm_engine import EngineDeadError, LLMEngine
from kvarts.run.text import DetokenizingExecutor

from builders.engines import engine_with
from builders.kept import Kept
from builders.toy_model import NUM_TOKEN_IDS, ToyExecutor, generate

PATIENCE_S = 60
Ids = list[int]


class Digits:
    """A tokenizer: each token is a digit."""

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(map(str, tokens))


class NoSampling:
    """The toy model chooses its tokens itself."""

    def __init__(self) -> None:
        self.under_way: set[int] = set()

    def add(
        self, request_index: int, params: SamplingParams, prompt: Sequence[int], stop_ids: Collection[int] = ()
    ) -> None:
        self.under_way.add(request_index)

    def drop(self, request_index: int) -> None:
        self.under_way.discard(request_index)

    def logprobs(self, request_index: int) -> Logprobs:
        return Logprobs()

    def prompt_logprobs(self, request_index: int) -> None:
        return None

    def error(self, request_index: int) -> None:
        return None


class Toy(ToyExecutor):
    """Calls `before_step` before each step."""

    needs_page_ids = True
    num_steps = 0
    before_step: Callable[[int], object] = staticmethod(lambda _: None)

    def execute(self, plan: StepPlan) -> StepResult:
        self.num_steps += 1
        self.before_step(self.num_steps)
        return super().execute(plan)


class Served:
    """A loop, and what it runs on."""

    def __init__(self, *, num_pages: int = 60, seqs: int = 4) -> None:
        config = EngineConfig(num_pages=num_pages, page_size=2, max_num_batched_tokens=8, max_num_seqs=seqs)
        clock = VirtualClock()
        self.toy = Toy(num_pages, config.page_size, seqs)
        executor = DetokenizingExecutor(self.toy, max_num_seqs=seqs, clock=clock)
        self.kept = Kept()
        self.core = engine_with(config, executor, readers=[self.kept], audit=open_audit)
        self.sampling = NoSampling()
        engine = LLMEngine(
            self.core, self.sampling, executor, clock, page_size=config.page_size, tokenizer=Digits()
        )  # fmt: skip
        self.loop = EngineLoop(engine)

    def assert_at_rest(self) -> None:
        """Nothing is under way, nothing is held, and no thread is left."""
        for thread in threading.enumerate():
            if thread.name == "kvarts-engine-loop":
                thread.join(PATIENCE_S)
                assert not thread.is_alive()
        assert not self.loop.has_work
        assert not self.sampling.under_way
        assert self.core.scheduler.cache.num_used == 0
        self.core.scheduler.check()


def prompts(count: int, seed: int = 0) -> list[Ids]:
    random = Random(seed)
    shared = [random.randrange(NUM_TOKEN_IDS) for _ in range(6)]
    return [[*shared[: random.randrange(7)], random.randrange(NUM_TOKEN_IDS)] for _ in range(count)]


def text_of(prompt: Ids, num_tokens: int) -> str:
    return "".join(map(str, generate(prompt, num_tokens)))


def params(num_tokens: int = 12, **kwargs: Any) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, **kwargs)


async def text_from(stream: AsyncGenerator[str, None]) -> str:
    return "".join([text async for text in stream])


def run(coroutine: Any) -> Any:
    async def patiently() -> Any:
        return await asyncio.wait_for(coroutine, PATIENCE_S)

    return asyncio.run(patiently())


def test_threads_get_their_own_completions() -> None:
    served = Served()
    asked = [prompts(5, seed) for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(served.loop.generate, [(prompt, params()) for prompt in batch]) for batch in asked]
        for batch, future in zip(asked, futures, strict=True):
            told = [completion.text for completion in future.result(PATIENCE_S)]
            assert told == [text_of(prompt, 12) for prompt in batch]
    served.assert_at_rest()


def test_streams_threads_and_steps_by_hand_go_together() -> None:
    """Whatever does a step, every completion comes to the caller that asked for it."""
    served = Served(num_pages=24, seqs=3)
    streamed, batched, by_hand = prompts(30, 1), prompts(10, 2), prompts(10, 3)
    indices: dict[int, Ids] = {}
    done: dict[int, str] = {}

    def drive() -> None:
        for prompt in by_hand:
            indices[served.loop.submit(prompt, params(9))] = prompt
            done.update({completion.index: completion.text for completion in served.loop.step()})
        while len(done) < len(indices):
            done.update({completion.index: completion.text for completion in served.loop.step()})

    async def listen() -> list[str]:
        streams = [text_from(served.loop.stream(prompt, params(7))) for prompt in streamed]
        return list(await asyncio.gather(*streams))

    with ThreadPoolExecutor(3) as pool:
        driving = pool.submit(drive)
        batch = pool.submit(served.loop.generate, [(prompt, params()) for prompt in batched])
        others = pool.submit(lambda: run(listen()))
        assert run(listen()) == [text_of(prompt, 7) for prompt in streamed]
        assert others.result(PATIENCE_S) == [text_of(prompt, 7) for prompt in streamed]
        assert [completion.text for completion in batch.result(PATIENCE_S)] == [text_of(p, 12) for p in batched]
        driving.result(PATIENCE_S)
    assert done == {index: text_of(prompt, 9) for index, prompt in indices.items()}
    served.assert_at_rest()


def test_generate_does_not_drop_what_was_submitted_by_hand() -> None:
    served = Served()
    first, second = prompts(2)
    index = served.loop.submit(first, params(3))
    assert served.loop.generate([(second, params(20))])[0].text == text_of(second, 20)
    completions = []
    while served.loop.has_work:
        completions += served.loop.step()
    assert [(completion.index, completion.text) for completion in completions] == [(index, text_of(first, 3))]
    assert served.loop.step() == []


def test_closing_a_stream_cancels_it_and_no_other() -> None:
    served = Served()
    kept, left = prompts(2)

    async def leave(stream: AsyncGenerator[str, None]) -> None:
        await anext(stream)
        await stream.aclose()

    async def both() -> str:
        keep = asyncio.create_task(text_from(served.loop.stream(kept, params(30))))
        for _ in range(10):
            await leave(served.loop.stream(left, params(50)))
        cancelled = asyncio.create_task(text_from(served.loop.stream(left, params(50))))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        return await keep

    assert run(both()) == text_of(kept, 30)
    served.assert_at_rest()


def test_a_stop_text_ends_a_request_in_its_step() -> None:
    served = Served()
    prompt = prompts(1)[0]
    whole = text_of(prompt, 30)
    stop = whole[8:11]
    place = whole.index(stop)
    completion = served.loop.generate([(prompt, params(30, stop=(stop,)))])[0]
    assert (completion.text, completion.finish_reason) == (whole[:place], "stop")
    assert len(completion.tokens) == place + 3
    assert run(text_from(served.loop.stream(prompt, params(30, stop=(stop,))))) == whole[:place]
    served.assert_at_rest()


def test_a_bad_prompt_is_the_error_of_its_caller_only() -> None:
    served = Served(num_pages=8)
    good, long = [1, 2, 3], [1] * 40
    index = served.loop.submit(good, params(4))
    with pytest.raises(ConfigError, match="needs"):
        served.loop.generate([(good, params(4)), (long, params(4))])
    with pytest.raises(ConfigError, match="needs"):
        run(text_from(served.loop.stream(long, params(4))))
    with pytest.raises(ConfigError, match="needs"):
        served.loop.submit(long, params(4))
    while not (completions := served.loop.step()):
        pass
    assert [completion.index for completion in completions] == [index]
    assert run(text_from(served.loop.stream(good, params(4)))) == text_of(good, 4)
    served.assert_at_rest()


def test_the_index_of_a_rejected_prompt_is_not_given_out_again() -> None:
    served = Served(num_pages=8)
    with pytest.raises(ConfigError, match="needs"):
        served.loop.submit([1] * 40, params(4))
    served.loop.generate([([1, 2, 3], params(4))])
    rejected = [event.request for event in served.kept.events if isinstance(event, Rejected)]
    arrived = [event.request for event in served.kept.events if isinstance(event, Arrived)]
    assert (rejected, arrived) == ([0], [1])


class BrokenError(Exception):
    """What a step raises."""


@pytest.mark.parametrize("is_interrupt", [False, True])
def test_an_error_in_a_step_reaches_every_caller_and_closes_the_loop(is_interrupt: bool) -> None:
    served = Served()
    error = KeyboardInterrupt if is_interrupt else BrokenError
    all_there = threading.Event()

    def fail(step: int) -> None:
        if step == 3:
            assert all_there.wait(PATIENCE_S)
        if step == 6:
            raise error

    served.toy.before_step = fail

    async def listen() -> list[Any]:
        streams = [text_from(served.loop.stream(prompt, params(40))) for prompt in prompts(5)]
        tasks = [asyncio.ensure_future(stream) for stream in streams]
        await asyncio.sleep(0)
        all_there.set()
        return [type(outcome) for outcome in await asyncio.gather(*tasks, return_exceptions=True)]

    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(served.loop.generate, [(prompts(1)[0], params(40))]) for _ in range(2)]
        if not is_interrupt:
            assert run(listen()) == [BrokenError] * 5
        all_there.set()
        for future in waiting:
            with pytest.raises((error, EngineDeadError)):
                future.result(PATIENCE_S)
    for later in (
        lambda: served.loop.generate([([1], params())]),
        lambda: served.loop.submit([1], params()),
        lambda: run(text_from(served.loop.stream([1], params()))),
        served.loop.step,
    ):
        with pytest.raises(EngineDeadError, match="has stopped after an error"):
            later()
    assert not served.loop.has_work, "a loop that steps by hand comes to an end"


@pytest.mark.parametrize(
    ("error", "words"),
    [(BrokenError(), "BrokenError"), (MemoryError(), "MemoryError"), (OSError("no\nroom"), "OSError: no")],
    ids=repr,
)
def test_an_error_in_a_step_by_hand_is_raised_there_and_logged(
    error: Exception, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    served = Served()

    def fail(step: int) -> None:
        raise error

    served.loop.submit([1], params())
    served.toy.before_step = fail
    with pytest.raises(type(error)):
        served.loop.step()
    for _ in range(2):
        with pytest.raises(EngineDeadError, match=rf"an error: {words}\."):
            served.loop.step()
    assert caplog.messages == [f"the engine has stopped after an error: {words}"]


def test_a_stream_whose_event_loop_has_gone_is_dropped() -> None:
    served = Served()
    loop = asyncio.new_event_loop()
    stream = served.loop.stream([1, 2], params(100))
    gate = threading.Event()
    served.toy.before_step = lambda step: step > 3 and gate.wait(PATIENCE_S)
    loop.run_until_complete(anext(stream))
    loop.close()
    gate.set()
    assert served.loop.generate([([3], params(5))])[0].text == text_of([3], 5)
    served.assert_at_rest()
    with pytest.raises(StopIteration):  # closed, though nothing can be awaited any more
        stream.aclose().send(None)


def test_waiting_that_is_given_up_leaves_no_request_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served()
    result = Future.result
    interrupts = iter([False, True])

    def interrupted(future: Future[Any], timeout: float | None = None) -> Any:
        if next(interrupts, False):
            raise KeyboardInterrupt
        return result(future, timeout)

    monkeypatch.setattr(Future, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        served.loop.generate([(prompt, params(200)) for prompt in prompts(3)])
    served.assert_at_rest()
    assert served.loop.generate([([3], params(5))])[0].text == text_of([3], 5)
