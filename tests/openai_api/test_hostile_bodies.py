"""A thousand bodies, most of them wrong, of which one fails inside at each stage: the others' answers do not change."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("torch", reason="real models need kvarts[torch]")
pytest.importorskip("llguidance", reason="grammars need llguidance")

from kvarts.executor.torch import grammars, sampling
from kvarts.executor.torch.tiny import write_tiny
from kvarts.llm import llm_engine
from kvarts.llm.text import Generation
from kvarts.openai_api.answer import Choice
from kvarts.openai_api.prompts import HubText
from kvarts.sampling import StructuredOutputs
from openai_api.test_real_model import CHAT, COMPLETIONS, served

from builders.http_client import Reply, call

NUM_BODIES = 1000
VARIANTS: list[dict[str, Any]] = [{}, {"logprobs": 1}, {"temperature": 0.9, "seed": 4}, {"guided_regex": "[a-f]{6}"},
                                  {"echo": True, "logprobs": 0}, {"stop": "a"}]  # fmt: skip
GOOD = [
    {"prompt": [token * 7 % 250 for token in range(start, start + 12)], "max_tokens": 10, "ignore_eos": True,
     "temperature": 0, **more}
    for start, more in enumerate(VARIANTS)
]  # fmt: skip
XYZ, UVW = "[xyz]{6}", "[uvw]{6}"
"""Grammars of requests that fail inside."""
MARK = 77_777
"""The seed of requests that fail inside."""
STAGES = {
    "text": (Generation, "_extend_text", lambda this, args: this.params.seed == MARK),
    "end": (llm_engine.LLMEngine, "_completion", lambda this, args: args[1].params.seed == MARK),
    "sampling": (sampling.Sampler, "choose", lambda this, args: this._params.seed == MARK),
    "sampler": (sampling.Sampler, "__init__", lambda this, args: args[0].seed == MARK),
    "scores": (sampling._PromptScores, "note", lambda this, args: this._num_top == 7),
    "grammar": (grammars.Grammars, "matcher", lambda this, args: args[0].regex == XYZ),
    "token of a grammar": (grammars.Matcher, "accept", lambda this, args: getattr(this, "is_victim", False)),
    "template": (HubText, "conversation", lambda this, args: args[0][0]["content"] == "victim"),
    "answer": (Choice, "update", lambda this, args: args[0].params.seed == MARK),
    "last answer": (Choice, "end", lambda this, args: this.request is not None and this.request.priority == 7),
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path: Path = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny("qwen3", path)
    with served(str(path)) as address:
        yield address


def random_value(random: Random, depth: int = 0) -> Any:
    kinds: list[Any] = [
        None,
        True,
        -1,
        0,
        3,
        2**63,
        1e308,
        float(random.randrange(9)),
        "",
        "a",
        "\ud800",
        "[TOOL_CALLS]",
        [],
        {},
    ]
    if depth < 2 and random.random() < 0.3:
        return [random_value(random, depth + 1) for _ in range(random.randrange(4))]
    if depth < 2 and random.random() < 0.3:
        return {random.choice(["type", "json", "regex", "name", "function", "a"]): random_value(random, depth + 1)}
    return random.choice(kinds)


FIELDS = ("prompt", "messages", "max_tokens", "temperature", "top_p", "top_k", "stop", "seed", "logprobs", "echo", "n",
          "prompt_logprobs", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
          "response_format", "tools", "tool_choice", "min_tokens", "stop_token_ids", "stream", "stream_options",
          "repetition_penalty", "chat_template_kwargs", "skip_special_tokens", "priority")  # fmt: skip


def hostile_body(random: Random) -> tuple[str, bytes]:
    path = random.choice([CHAT, COMPLETIONS])
    body: dict[str, Any] = {"prompt": [1, 2, 3], "max_tokens": random.randrange(1, 6)}
    if path == CHAT:
        body["messages"] = [{"role": "user", "content": "x"}]
    for _ in range(random.randrange(1, 4)):
        body[random.choice(FIELDS)] = random_value(random)
    if body.get("n") not in (None, 0, 1):
        body["max_tokens"] = 1
    text = json.dumps(body)
    if random.random() < 0.1:
        text = text[: random.randrange(len(text))]
    return path, text.encode()


CHANGES: dict[str, dict[str, Any]] = {
    "scores": {"prompt_logprobs": 7, "seed": 1},
    "last answer": {"priority": -7, "seed": 1},
    "grammar": {"guided_regex": XYZ, "seed": 1},
    "token of a grammar": {"guided_regex": UVW, "seed": 1},
}


def failing_body(random: Random, stage: str) -> tuple[str, bytes]:
    if stage == "template":
        return CHAT, b'{"messages": [{"role": "user", "content": "victim"}], "max_tokens": 4}'
    body: dict[str, Any] = {"prompt": [random.randrange(250) for _ in range(9)], "max_tokens": 6, "seed": MARK,
                            "ignore_eos": True, "temperature": 0.7, "logprobs": 1}  # fmt: skip
    return COMPLETIONS, json.dumps(body | CHANGES.get(stage, {})).encode()


def said(reply: Reply) -> Any:
    """The tokens of an answer and why it ended; log-probabilities are rounded otherwise in other batches."""
    (choice,) = reply.json["choices"]
    logprobs = choice["logprobs"] or {}
    return choice["text"], choice["finish_reason"], logprobs.get("tokens"), logprobs.get("text_offset")


@pytest.mark.long
def test_hostile_bodies_change_no_answer(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [said(call(url, COMPLETIONS, body)) for body in GOOD]
    for owner, name, is_victim in STAGES.values():
        whole = getattr(owner, name)

        def failing(this: Any, *args: Any, whole: Any = whole, is_victim: Any = is_victim, **settings: Any) -> Any:
            if is_victim(this, args):
                raise RuntimeError("injected")
            return whole(this, *args, **settings)

        monkeypatch.setattr(owner, name, failing)
    made = grammars.Grammars.matcher

    def marking(this: grammars.Grammars, wanted: StructuredOutputs) -> grammars.Matcher:
        matcher: Any = made(this, wanted)
        matcher.is_victim = wanted.regex == UVW
        return matcher  # type: ignore[no-any-return]

    monkeypatch.setattr(grammars.Grammars, "matcher", marking)
    random = Random(5)
    stages = list(STAGES)
    bodies = [
        failing_body(random, stages[number // 10 % len(stages)]) if number % 10 == 0 else hostile_body(random)
        for number in range(NUM_BODIES)
    ]

    def ask(number: int) -> tuple[int, Any]:
        if number % 5 == 0:
            reply = call(url, COMPLETIONS, GOOD[number // 5 % len(GOOD)])
            assert reply.status == 200, reply.payload
            return number, said(reply)
        return number, call(url, bodies[number][0], bodies[number][1]).status

    failed = [call(url, *failing_body(random, stage)).status for stage in stages]
    assert failed == [500] * len(stages)
    with ThreadPoolExecutor(8) as pool:
        for number, told in pool.map(ask, range(NUM_BODIES)):
            if number % 5 == 0:
                assert told == expected[number // 5 % len(GOOD)], number
            else:
                assert 200 <= told < 600
    assert call(url, "/health").status == 200
    assert [said(call(url, COMPLETIONS, body)) for body in GOOD] == expected
