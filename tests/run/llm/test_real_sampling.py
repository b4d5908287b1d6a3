"""What is drawn from the numbers of a real model, where it stops, and how it is streamed, token by token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="real models need kvarts[torch]")
pytest.importorskip("transformers", reason="real models need kvarts[torch]")

import torch

from kvarts.base.errors import ConfigError
from kvarts.core.content import Content
from kvarts.core.request import Request
from kvarts.core.sampling import SamplingParams
from kvarts.run.text import Generation
from kvarts.run.torch.llm import LLM
from kvarts.run.torch.sampling import BatchSampler
from kvarts.run.torch.tiny import byte_tokenizer

from builders.real_models import PAGE_SIZE, engine_of, prompts_with_prefixes

DRAWN = SamplingParams(
    max_tokens=16, temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, repetition_penalty=1.1, seed=5, ignore_eos=True
)


def test_a_seed_says_the_same_alone_and_in_any_batch(models: Callable[[str], tuple[Any, Any]]) -> None:
    model, _ = models("llama")
    prompts = prompts_with_prefixes()
    alone = engine_of(model).generate([prompts[0]], DRAWN)[0].tokens
    assert alone != engine_of(model).generate([prompts[0]], msgspec.structs.replace(DRAWN, seed=6))[0].tokens
    engine = engine_of(model, budget=9)
    first = engine.submit(prompts[0], DRAWN)
    for prompt in prompts[1:]:
        engine.submit(prompt, msgspec.structs.replace(DRAWN, seed=None))
    done = {}
    while engine.has_work:
        done.update({completion.index: completion for completion in engine.step()})
    assert done[first].tokens == alone


NUMBERS = st.sampled_from([-2.0, -0.0, 0.0, 1.0, 1.5, 3.0, 3e4, float("inf"), float("-inf"), float("nan")])


@given(
    rows=st.lists(st.lists(NUMBERS, min_size=5, max_size=5), min_size=1, max_size=4),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
)
def test_the_largest_logit_is_that_of_the_numbers(rows: list[list[float]], dtype: str) -> None:
    """In 16 bits it is found among integers, the first of equal ones."""
    logits = torch.tensor(rows).to(getattr(torch, dtype))
    sampler = BatchSampler(logits.device)
    for index in range(len(rows)):
        sampler.add(index, SamplingParams(), [1])
    chosen, _ = sampler.sample(range(len(rows)), logits)
    expected = logits.float().numpy().argmax(axis=-1)
    for row, mine, theirs in zip(rows, chosen.tolist(), expected.tolist(), strict=True):
        assert mine == theirs or any(number != number for number in row)  # whatever it is of no number


def test_log_probabilities_and_stops(tiny: Callable[[str], Path]) -> None:
    engine = LLM.from_pretrained(tiny("qwen3"), kv_memory="4MiB", page_size=PAGE_SIZE)
    told = engine.generate(["hello"], SamplingParams(max_tokens=6, logprobs=True, ignore_eos=True))[0]
    assert told.logprobs is not None and len(told.logprobs) == 6
    assert all(logprob <= 0.0 for logprob in told.logprobs)
    assert told.finish_reason == "length"
    with pytest.raises(ConfigError, match="forced_tokens"):
        engine.generate(["hello"], SamplingParams(forced_tokens=(1,)))
    third = told.tokens[2]
    stopped = engine.generate(["hello"], SamplingParams(max_tokens=6, stop_token_ids=(third,), ignore_eos=True))[0]
    assert (stopped.tokens, stopped.finish_reason) == (told.tokens[: told.tokens.index(third) + 1], "stop")
    whole = engine.generate(["abc"], SamplingParams(max_tokens=30, ignore_eos=True))[0].text
    middle = whole[len(whole) // 2]
    ended = engine.generate(["abc"], SamplingParams(max_tokens=30, stop=(middle,), ignore_eos=True))[0]
    assert ended.text == whole[: whole.index(middle)]
    assert ended.finish_reason == "stop"
    for bad in ({"max_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}, {"min_p": 2.0}, {"stop": ("",)}):
        with pytest.raises(ConfigError, match=r"sampling\."):
            SamplingParams(**bad)


def test_streams_run_side_by_side_and_closing_one_cancels_it(tiny: Callable[[str], Path]) -> None:
    engine = LLM.from_pretrained(tiny("mistral"), kv_memory="4MiB", page_size=PAGE_SIZE)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    expected = [completion.text for completion in engine.generate(["one", "two"], params)]

    async def listen(prompt: str) -> str:
        return "".join([text async for text in engine.stream(prompt, params)])

    async def leave() -> None:
        stream = engine.stream("three", params)
        await anext(stream)
        await stream.aclose()

    async def all_of_them() -> list[str | None]:
        return list(await asyncio.gather(listen("one"), leave(), listen("two")))

    texts = asyncio.run(all_of_them())
    assert texts == [expected[0], None, expected[1]]
    assert engine.kv_live_bytes() == 0


def test_a_stream_never_tells_what_a_stop_takes_back(tiny: Callable[[str], Path]) -> None:
    engine = LLM.from_pretrained(tiny("qwen3"), kv_memory="4MiB", page_size=PAGE_SIZE)
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    whole = engine.generate(["abc"], params)[0].text
    places = [place for place in range(len(whole) - 3) if whole.index(whole[place : place + 3]) == place]
    for place in places[:: max(1, len(places) // 8)]:
        stop = whole[place : place + 3]
        # A stop that begins alike and never comes holds text back, and loses none.
        stopping = msgspec.structs.replace(params, stop=(stop, whole[2:4] + "never"))

        async def listen(stopping: SamplingParams = stopping) -> str:
            return "".join([text async for text in engine.stream("abc", stopping)])

        assert asyncio.run(listen()) == whole[:place] == engine.generate(["abc"], stopping)[0].text


@given(
    texts=st.lists(st.text(st.sampled_from("aé你🙂 "), min_size=1), max_size=4),
    raw=st.lists(st.integers(0, 255), max_size=20),
)
def test_text_told_token_by_token_is_that_of_all_tokens(texts: list[str], raw: list[int]) -> None:
    tokenizer = byte_tokenizer()
    prompt = Request(0, Content.from_tokens([1], page_size=4, owner=0), 1, 400)
    generation = Generation(prompt, SamplingParams(), tokenizer)
    tokens = [token for text in texts for token in tokenizer(text)["input_ids"]] + raw
    for count, token in enumerate(tokens, 1):
        generation.take(token)
        text = tokenizer.decode(tokens[:count])
        assert text.startswith(generation.text)
        if not text.endswith("\ufffd"):
            assert generation.text == text
