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

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvarts.core.sampling import StructuredOutputs
from kvarts.doors.openai.answer import Choice
from kvarts.doors.openai.prompts import HubText
from kvarts.run import llm_engine
from kvarts.run.text import Generation
from kvarts.run.torch import sampling
from kvarts.run.torch.tiny import write_tiny
from openai_api.test_real_model import CHAT, COMPLETIONS, served

from builders.byte_fallback import byte_fallback_tokenizer
from builders.http_client import OpenStream, Reply, call, events_of
from builders.real_model import real_model

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
    "grammar": (sampling.Grammars, "matcher", lambda this, args: args[0].regex == XYZ),
    "token of a grammar": (sampling.Matcher, "accept", lambda this, args: getattr(this, "is_victim", False)),
    "template": (HubText, "conversation", lambda this, args: args[0][0]["content"] == "victim"),
    "prompt": (HubText, "encode", lambda this, args: args[0] == "victim"),
    "answer": (Choice, "update", lambda this, args: args[0].params.seed == MARK),
    "last answer": (Choice, "end", lambda this, args: this.request is not None and this.request.priority == 7),
}


MODELS = ["bytes", "byte fallback", "small model"]


@pytest.fixture(scope="module", params=MODELS)
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Servers of two tiny models, whose tokenizers have bytes in two ways, and of a real one, if it is installed."""
    if request.param == "small model":
        path = real_model()
    else:
        path = tmp_path_factory.mktemp("model") / "tiny"
        write_tiny("qwen3", path)
        if request.param == "byte fallback":
            write_byte_fallback(path)
    with served(str(path), dtype="float32") as address:
        yield address


def write_byte_fallback(path: Path) -> None:
    """Give the model another tokenizer, of bytes and some words."""
    tokenizer = byte_fallback_tokenizer(("a", "b", "c", "d", "e", "f", "\u2581as", "x", "y", "z", "u", "v", "w"))
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    config = AutoConfig.from_pretrained(path)
    config.vocab_size, config.eos_token_id, config.pad_token_id = len(tokenizer), 2, 2
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    tokenizer.save_pretrained(path)


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


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema, "b": schema}, "required": ["a", "b"]}
    return schema


BOMBS: list[dict[str, Any]] = [
    {"n": 10**9},
    {"n": 100_000, "stream": True},
    {"n": 2, "best_of": 10**6},
    {"best_of": -1},
    {"logit_bias": {"": 1, "-1": 2, "1e9": 3, "a": 4, "99999999999999999999": 5}},
    {"logit_bias": {"5": 1e308, "6": "x"}},
    {"logit_bias": {str(token): -100 for token in range(300)}},
    {"logit_bias": [1, 2]},
    {"guided_json": nested(12)},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": nested(14)}}},
    {"guided_json": {"$ref": "#"}},
    {"guided_json": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
    {"guided_json": {"allOf": [{"enum": [str(one) for one in range(2000)]}] * 50}},
    {"guided_regex": "(a{1,999}){1,999}"},
    {"guided_regex": "((((((a*)*)*)*)*)*)*" * 20},
    {"guided_grammar": "start: start start"},
    {"guided_choice": ["a" * 5000] * 100},
    {"stop": ["\ud800", "\udfff\ud800", "a\udc00"]},
    {"stop": ["", "\u0000"]},
    {"seed": 2**64},
    {"seed": -(2**63) - 1},
    {"seed": 1.5},
    {"seed": "4"},
    {"prompt": "\ud800"},
    {"prompt": [2**31]},
    {"prompt": [-1, 2]},
    {"prompt": [[]] * 1000},
    {"prompt": [[1]] * 2000, "stream": True},
    {"temperature": float("nan")},
    {"top_p": float("inf")},
    {"max_tokens": 2**70},
    {"max_tokens": 0, "echo": True, "logprobs": 10**9},
    {"prompt_logprobs": 10**9},
    {"stop_token_ids": [2**70]},
    {"messages": [{"role": "\ud800", "content": "\udc00"}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]},
    {"tools": [{"type": "function", "function": {"name": "f", "parameters": nested(14)}}], "tool_choice": "required"},
    {"chat_template_kwargs": {"messages": 1, "tools": 2, "self": 3}},
    {"chat_template": "{% for x in range(10**9) %}{% endfor %}"},
]
"""What is far out of range, nested, endless, or no text."""


def hostile_body(random: Random) -> tuple[str, bytes]:
    path = random.choice([CHAT, COMPLETIONS])
    body: dict[str, Any] = {"prompt": [1, 2, 3], "max_tokens": random.randrange(1, 6)}
    if path == CHAT:
        body["messages"] = [{"role": "user", "content": "x"}]
    if random.random() < 0.3:
        body |= random.choice(BOMBS)
    else:
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
    if stage == "prompt":
        return COMPLETIONS, b'{"prompt": "victim", "max_tokens": 4}'
    body: dict[str, Any] = {"prompt": [random.randrange(250) for _ in range(9)], "max_tokens": 6, "seed": MARK,
                            "ignore_eos": True, "temperature": 0.7, "logprobs": 1}  # fmt: skip
    return COMPLETIONS, json.dumps(body | CHANGES.get(stage, {})).encode()


def said(reply: Reply) -> Any:
    """The tokens of an answer and why it ended; log-probabilities are rounded otherwise in other batches."""
    return together(reply.json["choices"])


def said_in_stream(reply: Reply) -> Any:
    """The same of the pieces of a stream."""
    return together([event["choices"][0] for event in events_of(reply.payload) if event["choices"]])


def together(choices: list[Any]) -> Any:
    logprobs = [choice["logprobs"] for choice in choices if choice.get("logprobs")]
    text = "".join(choice["text"] for choice in choices)
    tokens = [token for one in logprobs for token in one["tokens"]]
    return text, choices[-1]["finish_reason"], tokens, [place for one in logprobs for place in one["text_offset"]]


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
    made = sampling.Grammars.matcher

    def marking(this: sampling.Grammars, wanted: StructuredOutputs) -> sampling.Matcher:
        matcher: Any = made(this, wanted)
        matcher.is_victim = wanted.regex == UVW
        return matcher  # type: ignore[no-any-return]

    monkeypatch.setattr(sampling.Grammars, "matcher", marking)
    random = Random(5)
    stages = list(STAGES)
    bodies = [
        failing_body(random, stages[number // 10 % len(stages)]) if number % 10 == 0 else hostile_body(random)
        for number in range(NUM_BODIES)
    ]

    def ask(number: int) -> tuple[int, Any]:
        if number % 5 == 0:
            body = GOOD[number // 5 % len(GOOD)]
            streams = number % 2 == 0 and not body.get("echo")
            reply = call(url, COMPLETIONS, body | {"stream": streams})
            assert reply.status == 200, reply.payload
            return number, said_in_stream(reply) if streams else said(reply)
        if number % 11 == 0:  # a client that leaves in the middle
            leaving = OpenStream(url, COMPLETIONS, GOOD[0] | {"stream": True, "max_tokens": 100, "n": 2})
            leaving.begin()
            leaving.close()
            return number, 200
        if number == NUM_BODIES // 2 + 1:
            return number, call(url, COMPLETIONS, {"prompt": "a b " * 2_500_000, "max_tokens": 1}).status
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
