"""A real model with real weights, SmolLM2-135M-Instruct as `kvarts model get` downloads it: its answers equal those
of transformers, whatever the engine does meanwhile, and make sense.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from math import exp
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("torch", reason="real models need kvarts[torch]")
pytest.importorskip("gguf", reason="GGUF files need gguf")

import torch

from kvarts.core.config import EngineConfig
from kvarts.core.sampling import SamplingParams
from kvarts.core.tiers.config import OffloadConfig
from kvarts.run.sessions.values import SessionsConfig, SessionSettings
from kvarts.run.torch.gguf_file import GgufFile
from kvarts.run.torch.gguf_model import read_model
from kvarts.run.torch.llm import LLM

from builders.real_model import real_model
from builders.sessions import OWNER, say, sessions_on
from oracles.masked_forward import masked_choices

pytestmark = pytest.mark.long

NUM_TOKENS = 24
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
STORY = "Once upon a time, in a small village by the sea, there lived an old fisherman who had three daughters. "
QUESTIONS = (
    "What is the capital of France?", "Name three primary colours.", "What do bees make?", "Count from one to five.",
    "What is the opposite of hot?", "How many days are in a week?", "What is the largest ocean?", "Who wrote Hamlet?",
    "What is water made of?", "Which animal says meow?",
)  # fmt: skip
CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo", "China": "Beijing",
    "Russia": "Moscow", "Egypt": "Cairo", "Greece": "Athens", "Portugal": "Lisbon", "Austria": "Vienna",
    "Norway": "Oslo", "Sweden": "Stockholm", "Finland": "Helsinki", "Poland": "Warsaw", "Ireland": "Dublin",
    "Hungary": "Budapest", "Denmark": "Copenhagen", "Turkey": "Ankara", "Canada": "Ottawa", "Cuba": "Havana",
    "Peru": "Lima", "Chile": "Santiago", "Kenya": "Nairobi", "Thailand": "Bangkok",
}  # fmt: skip
FORMS = (
    "The capital of {} is", "Q: What is the capital of {}?\nA:", "The capital city of {} is called",
    "{} is a country. Its capital is",
)  # fmt: skip


@pytest.fixture(scope="module")
def path() -> Path:
    return real_model()


@pytest.fixture(scope="module")
def reference(path: Path) -> Any:
    return read_model(GgufFile(path), torch.float32, model_impl="transformers")


@pytest.fixture(scope="module")
def loaded(path: Path) -> LLM:
    return LLM(path, config=EngineConfig(num_pages=512, page_size=16, max_num_batched_tokens=256, max_num_seqs=8))


@pytest.fixture(scope="module")
def prompts(loaded: LLM) -> list[list[int]]:
    """Twenty prompts: ten conversations, which begin alike, and ten that go on from longer and longer stories."""
    asked = [loaded.encode_chat([{"role": "user", "content": question}], GREEDY) for question in QUESTIONS]
    told = [loaded.encode(STORY * (1 + count // 2) + "One day" * (count % 2), GREEDY) for count in range(10)]
    return asked + told


def greedy(reference: Any, prompt: list[int], tokens: Sequence[int]) -> list[int]:
    """The token that transformers chooses at each place, after the prompt and the tokens before: what `generate` says,
    as long as it is equal to `tokens`.
    """
    asked = (*prompt, *tokens)
    if asked not in _chosen:
        with torch.inference_mode():
            logits = reference(torch.tensor([asked]), logits_to_keep=len(tokens) + 1).logits[0]
        _chosen[asked] = logits[:-1].argmax(-1).tolist()
    return _chosen[asked]


_chosen: dict[tuple[int, ...], list[int]] = {}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_pages": 30},
        {"speculative_config": "ngram"},
        {"layers": "model", "attention": "sdpa"},
        {"num_pages": 40, "offload": OffloadConfig(host_pages=200, policy="eager")},
        {"max_itl_ms": 30.0},
    ],
    ids=["plain", "preempted", "guessed", "its own layers", "host memory", "bounded latency"],
)
def test_tokens_are_those_of_generate(
    loaded: LLM, reference: Any, prompts: list[list[int]], settings: dict[str, Any]
) -> None:
    settings = dict(settings)
    config = EngineConfig(
        num_pages=settings.pop("num_pages", 512),
        page_size=16,
        max_num_batched_tokens=64,
        max_num_seqs=8,
        max_itl_ms=settings.pop("max_itl_ms", None),
    )
    llm = LLM(loaded._model, loaded.tokenizer, config, audit=True, **settings)
    for _ in range(2):  # the second time, prefixes are found
        told = llm.generate(prompts, GREEDY)
        for prompt, one in zip(prompts, told, strict=True):
            assert list(one.tokens) == greedy(reference, prompt, one.tokens)
    assert sum(one.cached_tokens for one in told) > 0
    assert llm.kv_live_bytes() == 0
    llm.check()


@pytest.mark.parametrize("window", [None, 48])
def test_sessions_say_what_a_pass_over_their_history_says(
    loaded: LLM, reference: Any, prompts: list[list[int]], window: int | None
) -> None:
    """Four sessions at once, of two turns each; with a window, most of each history is dropped."""
    reference.set_attn_implementation("eager")
    llm = LLM(loaded._model, loaded.tokenizer, EngineConfig(num_pages=200, max_num_batched_tokens=64, max_num_seqs=8))
    sessions = sessions_on(llm.host(), SessionsConfig(chunk_tokens=32))

    async def talk(asked: list[list[int]]) -> None:
        session = await sessions.create(OWNER, SessionSettings(sink=4, window=window))
        history: list[int] = []
        for tokens in asked:
            said = await say(sessions, session, tokens, 8)
            history += tokens
            history += said
            far = len(history) if window is None else window
            assert said == masked_choices(reference, history, 8, sink=4, window=far)[:8]
        await sessions.close(OWNER, session)

    async def every() -> None:
        await asyncio.gather(*(talk(prompts[first::8]) for first in range(4)))
        await sessions.shut_down()

    asyncio.run(every())
    llm.check()
    assert llm.kv_live_bytes() == 0


GUESSING = """
import json, sys
from kvarts.core.config import EngineConfig
from kvarts.core.sampling import SamplingParams
from kvarts.core.tiers.config import OffloadConfig
from kvarts.run.torch.llm import LLM
path, files, prompts = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
config = EngineConfig(num_pages=40, page_size=16, max_num_batched_tokens=64, max_num_seqs=8)
llm = LLM(path, config=config, offload=OffloadConfig(host_pages=12, disk_pages=400, policy="eager"), disk_path=files,
          speculative_config="ngram", audit=True)
while True:
    for number, prompt in enumerate(prompts):
        told = llm.generate([prompt], SamplingParams(max_tokens=24, ignore_eos=True))[0]
        print(json.dumps([number, list(told.tokens), told.cached_tokens, llm.drafts.num_accepted_tokens]), flush=True)
"""


def test_guesses_over_files_are_killed_and_say_the_same(
    path: Path, loaded: LLM, prompts: list[list[int]], tmp_path: Path
) -> None:
    """`kill -9` while tokens are guessed, and pages stored in host memory and files: the next process finds them."""
    rng = Random(3)
    asked = [prompts[-1], *prompts[-2:-5:-1]]
    expected = [list(one.tokens) for one in loaded.generate(asked, GREEDY)]
    words = [sys.executable, "-c", GUESSING, str(path), str(tmp_path), json.dumps(asked)]
    num_accepted = 0
    for kill in range(4):
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for count in range(rng.randrange(1, 6)):
                number, tokens, num_cached, num_accepted_here = json.loads(process.stdout.readline())
                assert tokens == expected[number]
                assert num_cached > 0 or kill == 0 or count > 0, "nothing was found in the files"
            num_accepted += num_accepted_here
            time.sleep(rng.random())
            process.send_signal(signal.SIGKILL)
    assert num_accepted > 0


def test_kv_in_eight_bits_loses_little(loaded: LLM) -> None:
    """Less than a hundredth of the perplexity of a text, for under a third of the bytes."""
    text = (Path(__file__).parents[3] / "LICENSE").read_text()[:3000]
    perplexities, sizes = [], []
    for kv_dtype in ("auto", "int8"):
        llm = LLM(loaded._model, loaded.tokenizer, loaded.config, kv_dtype=kv_dtype)
        (told,) = llm.generate(text, SamplingParams(max_tokens=0, prompt_logprobs=0))
        assert told.prompt_logprobs is not None
        values = told.prompt_logprobs.values[1:]
        perplexities.append(exp(-sum(value or 0.0 for value in values) / len(values)))
        sizes.append(llm.host().token_bytes)
    assert perplexities[1] == pytest.approx(perplexities[0], rel=0.01)
    assert sizes == [46_080, 12_240]


def test_it_makes_sense(loaded: LLM) -> None:
    told = loaded.chat(
        [[{"role": "user", "content": question}] for question in QUESTIONS], SamplingParams(max_tokens=60)
    )
    said = " ".join(one.text for one in told)
    for number, word in ((0, "Paris"), (3, "5"), (4, "cold"), (5, "7 days"), (9, "cat")):
        assert word in told[number].text
    assert "\ufffd" not in said and "<|" not in said
    assert sum(one.finish_reason == "stop" for one in told) >= 4


def test_multiple_choice_as_transformers_answers(loaded: LLM, reference: Any) -> None:
    """A hundred items of four options each, scored by the log-probability of the option."""
    cities = list(CAPITALS.values())
    items = []
    for number, country in enumerate(CAPITALS):
        options = [cities[(number + step) % len(cities)] for step in (0, 3, 7, 11)]
        items += [(form.format(country), options) for form in FORMS]
    assert len(items) == 100
    asked, starts = [], []
    for question, options in items:
        start = len(loaded.tokenizer(question)["input_ids"])
        for option in options:
            asked.append(list(loaded.tokenizer(f"{question} {option}")["input_ids"]))
            starts.append(start)
    told = loaded.generate(asked, SamplingParams(max_tokens=0, prompt_logprobs=0))
    mine, theirs = [], []
    for start, tokens, one in zip(starts, asked, told, strict=True):
        assert one.prompt_logprobs is not None and len(one.prompt_logprobs.values) == len(tokens)
        mine.append(sum(value or 0.0 for value in one.prompt_logprobs.values[start:]))
    for first in range(0, len(asked), 4):
        four = asked[first : first + 4]
        most = max(map(len, four))
        padded = torch.tensor([[*tokens, *[0] * (most - len(tokens))] for tokens in four])  # seen by no token before
        with torch.inference_mode():
            rows = torch.log_softmax(reference(padded).logits, -1)
        for row, ids, start in zip(rows, four, starts[first : first + 4], strict=True):
            theirs.append(sum(float(row[place - 1, ids[place]]) for place in range(start, len(ids))))
    assert mine == pytest.approx(theirs, abs=1e-3)
    answers = [max(range(4), key=mine[first : first + 4].__getitem__) for first in range(0, 400, 4)]
    expected = [max(range(4), key=theirs[first : first + 4].__getitem__) for first in range(0, 400, 4)]
    assert answers == expected
    assert sum(answer == 0 for answer in answers) > 60
