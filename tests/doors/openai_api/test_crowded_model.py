"""Requests of all kinds at once, some given up in the middle, get the answers that each gets alone."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import pytest

pytest.importorskip("torch", reason="real models need kvarts[torch]")
pytest.importorskip("llguidance", reason="grammars need llguidance")

from kvarts.core.config import EngineConfig
from kvarts.run.torch.tiny import write_tiny
from openai_api.test_real_model import CHAT, COMPLETIONS, served

from builders.http_client import OpenStream, call, events_of

TEXT = "ten green bottles hanging on the wall and if one should fall there would be nine \u00e9\u4e2d\U0001f600 left"
WORDS = TEXT.split()
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]},
    },
}
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }} <tool_call>{% endif %}"
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"
)
GRAMMARS: list[dict[str, Any]] = [
    {"guided_regex": "[a-f]{1,9}"},
    {"guided_choice": ["yes", "no", "\u00e9t\u00e9"]},
    {"guided_json": {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}},
    {"guided_grammar": 'start: "a" start | "b"'},
]
STYLES: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 5},
    {"temperature": 0, "repetition_penalty": 1.3},
    {"temperature": 0.7, "presence_penalty": 0.5, "frequency_penalty": 0.4, "min_p": 0.01},
]


@pytest.fixture(scope="module", params=["pages", "guesses", "host memory"])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Servers with too few pages for all requests at once."""
    path = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny("qwen3", path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    config = EngineConfig(num_pages=90, page_size=4, max_num_batched_tokens=48, max_num_seqs=6)
    settings: dict[str, Any] = {"config": config}
    if request.param == "guesses":
        settings["speculative_config"] = {"prompt_lookup_min": 1}
    elif request.param == "host memory":
        from kvarts.core.tiers.config import OffloadConfig

        settings["offload"] = OffloadConfig(host_pages=60)
    with served(str(path), **settings) as address:
        yield address


def body_of(random: Random) -> tuple[str, dict[str, Any]]:
    """A request with an answer that depends on nothing but itself."""
    text = " ".join(random.choices(WORDS, k=random.choice([1, 5, 12, 30])))
    shared = " ".join(WORDS[: random.randrange(8)])
    body: dict[str, Any] = {
        "max_tokens": random.choice([1, 4, 12, 30]),
        "seed": random.randrange(1 << 40),
        **random.choice(STYLES),
    }
    for chance, change in (
        (0.3, {"ignore_eos": True}),
        (0.2, {"stop": random.choice(["e", ["a", "th"], "\u00e9"])}),
        (0.1, {"include_stop_str_in_output": True}),
        (0.1, {"stop_token_ids": [random.randrange(250)]}),
        (0.2, {"n": random.choice([2, 3])}),
        (0.2, random.choice(GRAMMARS)),
        (0.1, {"min_tokens": 1}),
        (0.1, {"priority": random.randrange(3)}),
    ):
        if random.random() < chance:
            body |= change
    if random.random() < 0.4:
        body["messages"] = [{"role": "user", "content": f"{shared} {text}"}]
        if random.random() < 0.5:
            body |= {"logprobs": True, "top_logprobs": random.randrange(3)}
        if random.random() < 0.2:
            for name in ("guided_regex", "guided_choice", "guided_json", "guided_grammar", "stop", "n"):
                body.pop(name, None)
            body["messages"] = [{"role": "user", "content": text[:30]}]
            body |= {"tools": [TOOL], "tool_choice": random.choice(["required", "auto"]), "max_tokens": 40}
        return CHAT, body
    body["prompt"] = f"{shared} {text}"
    if random.random() < 0.3:
        body["prompt"] = random.choice([[body["prompt"], text[:9]], [random.randrange(250) for _ in range(14)]])
    if random.random() < 0.4:
        body["logprobs"] = random.randrange(3)
    if random.random() < 0.2:
        body["echo"] = True
    if random.random() < 0.1:
        body["prompt_logprobs"] = 1
    return COMPLETIONS, body


Told = list[tuple[Any, ...]]


def ask(url: str, path: str, body: dict[str, Any], *, streams: bool) -> Told:
    """The text, tokens and their places, calls and reason of each choice, and then the usage."""
    wanted = {**body, "stream": True, "stream_options": {"include_usage": True}} if streams else body
    reply = call(url, path, wanted)
    assert reply.status == 200, (body, reply.payload)
    pieces = events_of(reply.payload) if streams else [reply.json]
    assert not any("error" in piece for piece in pieces), (body, pieces[-1])
    texts: dict[int, str] = {}
    tokens: dict[int, list[str]] = {}
    places: dict[int, list[int]] = {}
    calls: dict[int, str] = {}
    reasons: dict[int, Any] = {}
    for piece in pieces:
        for choice in piece["choices"]:
            index = choice["index"]
            said = choice if path == COMPLETIONS else choice.get("delta" if streams else "message") or {}
            texts[index] = texts.get(index, "") + (said.get("text" if path == COMPLETIONS else "content") or "")
            for one in said.get("tool_calls") or ():
                function = one["function"]
                more = f"{function.get('name') or ''}{function.get('arguments') or ''}"
                calls[index] = calls.get(index, "") + more
            logprobs = choice.get("logprobs") or {}
            made = logprobs.get("tokens") or [one["token"] for one in logprobs.get("content") or ()]
            tokens.setdefault(index, []).extend(made)
            places.setdefault(index, []).extend(logprobs.get("text_offset") or ())
            reasons[index] = choice["finish_reason"] or reasons.get(index)
    usage = next(piece["usage"] for piece in reversed(pieces) if piece.get("usage"))
    counts = usage["prompt_tokens"], usage["completion_tokens"]
    each = [(texts[index], tokens[index], places[index], calls.get(index), reasons[index]) for index in sorted(texts)]
    return [*each, counts]


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=[pytest.mark.long] * (seed > 0)) for seed in range(8)])
def test_in_a_crowd_as_alone(url: str, seed: int) -> None:
    random = Random(seed)
    bodies = [body_of(random) for _ in range(16)]
    alone = [ask(url, *one, streams=False) for one in bodies]
    every = [*range(len(bodies))] * 2
    order = [(number, "prompt_logprobs" not in bodies[number][1] and random.random() < 0.5) for number in every]
    random.shuffle(order)

    def one_of(item: tuple[int, tuple[int, bool]]) -> tuple[int, bool, Told] | None:
        place, (number, streams) = item
        path, body = bodies[number]
        if place % 6 == 0:  # a client that leaves in the middle
            leaving = OpenStream(url, path, {**body, "stream": True, "max_tokens": 60})
            leaving.begin()
            if place % 12 == 0:
                leaving.read()
            leaving.close()
        return number, streams, ask(url, path, body, streams=streams)

    with ThreadPoolExecutor(12) as pool:
        for told in pool.map(one_of, enumerate(order)):
            assert told is not None
            number, streams, answer = told
            assert answer == alone[number], (bodies[number], streams)
    assert call(url, "/health").status == 200
