"""Whatever goes wrong in one request ends that request with an error, and changes nothing for any other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="real models need kvarts[torch]")

from kvarts.core.config import EngineConfig
from kvarts.core.sampling import SamplingParams
from kvarts.run import engine_loop as loop
from kvarts.run import llm_engine, speculation
from kvarts.run.llm_engine import RequestFailedError
from kvarts.run.text import Completion, Generation
from kvarts.run.torch import sampling
from kvarts.run.torch.llm import LLM

CONFIG = EngineConfig(num_pages=128, page_size=4, max_num_batched_tokens=32, max_num_seqs=4)
PROMPTS = [[token * 7 % 250 for token in range(start, start + 30)] for start in range(6)]
VICTIM = 2
DRAWN = SamplingParams(max_tokens=12, temperature=0.8, seed=3, logprobs=True, top_logprobs=2, ignore_eos=True)
SCORED = SamplingParams(max_tokens=6, prompt_logprobs=1, ignore_eos=True)
GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)


class InjectedError(Exception):
    """What is raised in the middle."""


@pytest.fixture
def llm(tiny: Callable[[str], Path]) -> LLM:
    return LLM(tiny("qwen3"), config=CONFIG, speculative_config={"prompt_lookup_min": 1})


def failing_at(place: str, monkeypatch: pytest.MonkeyPatch, at_call: int) -> None:
    """Let one per-request call raise at its `at_call`-th call for the victim."""
    owner, name = {
        "text": (Generation, "_extend_text"),
        "end of text": (Generation, "completion"),
        "sampling": (sampling.Sampler, "choose"),
        "scores": (sampling._PromptScores, "note"),
        "sampler": (sampling.Sampler, "__init__"),
        "generation": (Generation, "__init__"),
        "draft": (speculation.NgramDrafter, "draft"),
        "verdict on a draft": (speculation.NgramDrafter, "judge"),
    }[place]
    whole = getattr(owner, name)
    num_calls = 0

    def is_victim(this: Any, args: tuple[Any, ...]) -> bool:
        if place == "sampling":
            return bool(this.index == VICTIM)
        if place in ("text", "end of text"):
            return bool(this.request.index == VICTIM)
        if place == "sampler":
            return bool(args[1] == VICTIM)
        if place == "scores":
            return list(this.prompt) == PROMPTS[VICTIM]
        return bool(args[0].index == VICTIM)

    def failing(this: Any, *args: Any, **settings: Any) -> Any:
        nonlocal num_calls
        if is_victim(this, args):
            num_calls += 1
            if num_calls == at_call:
                raise InjectedError(place)
        return whole(this, *args, **settings)

    monkeypatch.setattr(owner, name, failing)


def generated(llm: LLM, params: SamplingParams) -> list[Completion | BaseException]:
    """What becomes of each prompt, all of them together, each waited for on its own."""

    async def every() -> list[Any]:
        async def one(prompt: list[int]) -> Completion:
            heard: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()

            class Listener:
                def update(self, generation: Generation) -> None: ...

                def end(self, completion: Completion) -> None:
                    running.call_soon_threadsafe(heard.set_result, completion)

                def fail(self, error: BaseException) -> None:
                    running.call_soon_threadsafe(heard.set_exception, error)

            running = asyncio.get_running_loop()
            llm._loop.start(lambda engine: engine.submit(prompt, params), Listener())
            return await asyncio.wait_for(heard, 60)

        return await asyncio.gather(*map(one, PROMPTS), return_exceptions=True)

    return asyncio.run(every())


def assert_only_the_victim_failed(told: list[Any], expected: list[Any]) -> None:
    for index, (one, other) in enumerate(zip(told, expected, strict=True)):
        if index == VICTIM:
            failed = isinstance(one, RequestFailedError) or (one.finish_reason == "error" and "Injected" in one.error)
            assert failed, one
            if isinstance(one, Completion):
                assert other.tokens[: len(one.tokens)] == one.tokens
        else:
            assert (one.tokens, one.text, one.finish_reason) == (other.tokens, other.text, other.finish_reason)
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4) if one.logprobs else other.logprobs is None


@pytest.mark.parametrize(
    ("place", "params", "at_call"),
    [
        ("text", GREEDY, 1),
        ("text", DRAWN, 7),
        ("sampling", DRAWN, 1),
        ("sampling", DRAWN, 5),
        ("scores", SCORED, 1),
        ("scores", SCORED, 2),
        ("sampler", DRAWN, 1),
        ("generation", GREEDY, 1),
        ("end of text", DRAWN, 1),
    ],
)
def test_an_error_ends_its_own_request(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, place: str, params: SamplingParams, at_call: int
) -> None:
    expected = LLM(llm._model, llm.tokenizer, config=CONFIG).generate(PROMPTS, params)
    failing_at(place, monkeypatch, at_call)
    assert_only_the_victim_failed(generated(llm, params), expected)
    monkeypatch.undo()
    assert llm.kv_live_bytes() == 0
    llm.check()
    again = llm.generate(PROMPTS, params)
    assert [one.tokens for one in again] == [one.tokens for one in expected]


@pytest.mark.parametrize("place", ["draft", "verdict on a draft"])
def test_a_guess_that_fails_changes_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """Guesses change no token, so there is nothing to end."""
    prompts = [[1, 2, 3, 4] * 6, [5, 6] * 9, [7, 8, 9] * 7]
    expected = LLM(llm._model, llm.tokenizer, config=CONFIG).generate(prompts, GREEDY)
    failing_at(place, monkeypatch, 1)
    assert [one.tokens for one in llm.generate(prompts, GREEDY)] == [one.tokens for one in expected]
    llm.check()


@pytest.mark.parametrize("call", ["update", "end"])
def test_a_listener_that_fails_ends_its_own_request(llm: LLM, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    expected = llm.generate(PROMPTS, GREEDY)

    async def every() -> list[Any]:
        async def one(prompt: list[int]) -> str:
            return "".join([text async for text in llm.stream(prompt, GREEDY)])

        return await asyncio.gather(*map(one, PROMPTS), return_exceptions=True)

    whole = getattr(loop._StreamListener, call)

    def failing(this: Any, told: Any) -> None:
        index = told.index if isinstance(told, Completion) else told.request.index
        if index == len(PROMPTS) + VICTIM:
            raise InjectedError(call)
        whole(this, told)

    monkeypatch.setattr(loop._StreamListener, call, failing)
    said = asyncio.run(every())
    for index, (text, one) in enumerate(zip(said, expected, strict=True)):
        if index == VICTIM:
            assert isinstance(text, RequestFailedError) and "Injected" in str(text)
        else:
            assert text == one.text
    assert llm.kv_live_bytes() == 0
    llm.check()


def test_a_batch_names_what_went_wrong_and_returns_the_rest(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    failing_at("text", monkeypatch, 3)
    told = llm.generate(PROMPTS, GREEDY)
    assert [one.finish_reason for one in told] == ["length"] * VICTIM + ["error"] + ["length"] * 3
    assert told[VICTIM].error == "InjectedError: text" and len(told[VICTIM].tokens) == 3


def test_an_error_of_the_engine_is_still_one(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """What may have left pages half counted ends all."""

    def submit(*_: Any) -> None:
        raise InjectedError("core")

    monkeypatch.setattr(llm_engine.LLMEngine, "step", submit)
    with pytest.raises(InjectedError):
        llm.generate(PROMPTS[:1], GREEDY)
