"""A real model, tiny and with random weights, behind the same door."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from kvarts.core.config import EngineConfig
from kvarts.core.sampling import SamplingParams
from kvarts.doors.openai.opening import Door, open_model
from kvarts.doors.openai.server import Address, OpenAIServer
from kvarts.run.sessions.opening import sessions_on
from kvarts.run.sessions.sessions import Sessions
from kvarts.run.sessions.values import SessionsConfig, SessionSettings, Token
from kvarts.run.torch.llm import LLM
from kvarts.run.torch.tiny import write_tiny
from kvarts.sim.orders import HintedOrder

from builders.guessing import untimed
from builders.http_client import call, events_of

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
CONFIG = EngineConfig(num_pages=256, page_size=4, max_num_batched_tokens=64, max_num_seqs=8)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny("qwen3", path)
    return str(path)


@pytest.fixture(scope="module")
def url(directory: str) -> Iterator[str]:
    with served(directory) as address:
        yield address


@contextmanager
def served(directory: str, config: EngineConfig = CONFIG, **settings: Any) -> Iterator[str]:
    """The address of a server of the model."""
    opened = open_model(directory, Door(names=("tiny",)), config=config, audit=True, **settings)
    started: Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        server = OpenAIServer(opened.app, opened.models, Address(port=0))
        await server.start()
        stopping = asyncio.Event()
        started.set_result((server.url, asyncio.get_running_loop(), stopping))
        await stopping.wait()
        await server.stop(1.0)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    address, loop, stopping = started.result(30)
    try:
        yield address
    finally:
        loop.call_soon_threadsafe(stopping.set)
        thread.join(30)
    opened.served.host.loop.call(lambda _: opened.served.host.core.scheduler.check())


def complete(url: str, **body: Any) -> Any:
    reply = call(url, COMPLETIONS, {"temperature": 0, **body})
    assert reply.status == 200, reply.payload
    return reply.json


def test_what_comes_over_http_is_what_the_model_says_in_process(url: str, directory: str) -> None:
    llm = LLM(directory, config=CONFIG)
    prompts = ["once upon a time", "once upon a hill", "the sea"]
    expected = llm.generate(prompts, SamplingParams(max_tokens=12, ignore_eos=True))
    told = complete(url, prompt=prompts, max_tokens=12, ignore_eos=True)
    assert [choice["text"] for choice in told["choices"]] == [completion.text for completion in expected]
    reply = call(url, COMPLETIONS, {"prompt": prompts[0], "max_tokens": 12, "ignore_eos": True, "temperature": 0,
                                    "stream": True})  # fmt: skip
    assert "".join(event["choices"][0]["text"] for event in events_of(reply.payload)) == expected[0].text
    ids = [list(map(int, llm.tokenizer(prompt)["input_ids"])) for prompt in prompts]
    assert complete(url, prompt=ids, max_tokens=12, ignore_eos=True)["choices"] == told["choices"]


def test_likeliest_tokens_are_told_in_a_stream_and_whole(url: str) -> None:
    body = {"prompt": "abc", "max_tokens": 4, "logprobs": 3, "ignore_eos": True, "temperature": 0}
    (choice,) = complete(url, **body)["choices"]
    logprobs = choice["logprobs"]
    assert all(len(top) <= 3 for top in logprobs["top_logprobs"])
    for logprob, top in zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert max(top.values()) == pytest.approx(logprob)
    events = events_of(call(url, COMPLETIONS, {**body, "stream": True}).payload)
    streamed = [value for event in events for value in event["choices"][0]["logprobs"]["token_logprobs"]]
    assert streamed == pytest.approx(logprobs["token_logprobs"])


def test_penalties_and_min_tokens_change_what_is_chosen(url: str) -> None:
    def tokens(**more: Any) -> list[str]:
        told = complete(url, prompt="aaaa", max_tokens=24, ignore_eos=True, logprobs=0, **more)
        return list(told["choices"][0]["logprobs"]["tokens"])

    def repeated(found: list[str]) -> int:
        return len(found) - len(set(found))

    assert repeated(tokens(presence_penalty=2.0, frequency_penalty=2.0)) <= repeated(tokens())
    (first, *_) = call(
        url, "/tokenize", {"prompt": complete(url, prompt="aaaa", max_tokens=2)["choices"][0]["text"]}
    ).json["tokens"]
    told = complete(url, prompt="aaaa", max_tokens=6, ignore_eos=True, stop_token_ids=[first])
    assert (told["usage"]["completion_tokens"], told["choices"][0]["finish_reason"]) == (1, "stop")
    assert told["choices"][0]["stop_reason"] == first
    told = complete(url, prompt="aaaa", max_tokens=6, min_tokens=6, ignore_eos=True, stop_token_ids=[first])
    assert told["usage"]["completion_tokens"] == 6


def test_a_seed_gives_the_same_text_and_choices_differ(url: str) -> None:
    def texts(**more: Any) -> list[str]:
        told = complete(url, prompt="seed", max_tokens=10, temperature=1.0, ignore_eos=True, **more)
        return [choice["text"] for choice in told["choices"]]

    assert texts(seed=3, n=2) == texts(seed=3, n=2)
    assert len(set(texts(seed=3, n=3))) == 3


def test_chats_hits_and_errors(url: str) -> None:
    messages = [{"role": "user", "content": "tell me of the sea"}]
    body = {"messages": messages, "max_tokens": 5, "ignore_eos": True, "cache_salt": "chat"}
    first, second = (call(url, CHAT, body).json["usage"] for _ in range(2))
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"]["cached_tokens"] == (second["prompt_tokens"] - 1) // 4 * 4
    assert call(url, COMPLETIONS, {"prompt": [99_999]}).error["param"] == "prompt"
    assert call(url, COMPLETIONS, {"prompt": "x", "max_tokens": 10**6}).status == 400
    assert json.loads(call(url, "/v1/models").payload)["data"][0]["max_model_len"] == 256 * 4


def test_tools_that_the_template_leaves_out_are_described_and_the_answer_says_so(url: str) -> None:
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"]}
    tools = [{"type": "function", "function": {"name": "f", "description": "counts sheep", "parameters": schema}}]
    messages: list[Any] = [{"role": "user", "content": "how many?"}]
    body = {"messages": messages, "tools": tools, "tool_choice": {"type": "function", "function": {"name": "f"}}}
    reply = call(url, CHAT, {**body, "max_tokens": 32, "temperature": 0})
    (made,) = reply.json["choices"][0]["message"]["tool_calls"]
    assert made["function"]["name"] == "f" and made["function"]["arguments"].startswith("{")
    made["function"]["arguments"] = '{"n":7}'  # random weights may be stuck in blanks
    (warning,) = reply.json["warnings"]
    assert "the chat template of the model has no tools" in warning
    assert reply.headers["x-kvarts-warning"] == warning
    history = [*messages, {"role": "assistant", "content": None, "tool_calls": [made]},
               {"role": "tool", "tool_call_id": made["id"], "content": "seven"}]  # fmt: skip
    asked = {"messages": history, "tools": tools}
    told = call(url, "/tokenize", {**asked, "return_token_strs": True}).json
    text = "".join(told["token_strs"])
    assert "counts sheep" in text and '{"name": "f", "arguments": {"n":7}}' in text and "seven" in text
    again = call(url, CHAT, {**asked, "max_tokens": 4, "temperature": 0}).json
    assert again["usage"]["prompt_tokens"] == told["count"]
    plain = call(url, CHAT, {**body, "tool_choice": "none", "max_tokens": 4})
    assert "warnings" not in plain.json and "x-kvarts-warning" not in plain.headers


def test_guesses_change_nothing_but_how_much_comes_at_once(
    url: str, directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole, streamed, with log-probabilities: the same answers, several tokens of some steps in one event."""
    untimed(monkeypatch)
    body = {"prompt": [1, 2, 3, 4] * 6, "max_tokens": 40, "ignore_eos": True, "temperature": 0, "logprobs": 2}
    (expected,) = complete(url, **body)["choices"]
    with served(directory, speculative_config={"prompt_lookup_min": 1}) as guessing:
        (choice,) = complete(guessing, **body)["choices"]
        assert choice["text"] == expected["text"]
        assert choice["logprobs"]["tokens"] == expected["logprobs"]["tokens"]
        events = events_of(call(guessing, COMPLETIONS, {**body, "stream": True}).payload)
        assert "".join(event["choices"][0]["text"] for event in events) == expected["text"]
        told = [token for event in events for token in (event["choices"][0]["logprobs"] or {}).get("tokens", ())]
        assert told == expected["logprobs"]["tokens"]
        text = call(guessing, "/metrics").payload.decode()
    values = {line.split("{")[0]: float(line.split()[-1]) for line in text.splitlines() if line.startswith("vllm:spec")}
    guessed, right = (values[f"vllm:spec_decode_num_{name}_tokens_total"] for name in ("draft", "accepted"))
    assert guessed >= values["vllm:spec_decode_num_drafts_total"] > 0
    assert guessed >= right
    assert "spec_decode" not in call(url, "/metrics").payload.decode()


def test_layers_that_keep_a_state_are_served(tmp_path: Path) -> None:
    """A conversation goes on from the snapshot at the end of its last prompt, and says what it says from the start."""
    write_tiny("qwen3-next", tmp_path / "next")
    directory = str(tmp_path / "next")
    first = {"prompt": "once upon a time, by the sea", "max_tokens": 8, "ignore_eos": True, "temperature": 0}
    then = {**first, "prompt": "once upon a time, by the sea there was"}
    with served(directory, kv_groups="all") as url:
        expected = complete(url, **then)["choices"]
    with served(directory, kv_groups="all") as url:
        complete(url, **first)
        answer = complete(url, **then)
        assert answer["choices"] == expected
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 28
        events = events_of(call(url, COMPLETIONS, {**then, "stream": True}).payload)
        assert "".join(event["choices"][0]["text"] for event in events) == expected[0]["text"]


def test_bounded_sessions_go_with_layers_that_keep_a_state(tmp_path: Path) -> None:
    """With a window that holds all of it, a conversation says what requests of the whole history say."""
    write_tiny("qwen3-next", tmp_path / "next")
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    prompts = [[token * 7 % 250 for token in range(first, first + 30)] for first in (0, 40)]
    llm = LLM(tmp_path / "next", config=CONFIG, kv_groups="all")
    history: list[int] = []
    expected = []
    for prompt in prompts:
        history += prompt
        (completion,) = llm.generate([history], params)
        expected.append(list(completion.tokens))
        history += completion.tokens
    sessions = sessions_on(llm.host(), SessionsConfig(defaults=SessionSettings(sink=4, window=128)))

    async def talk() -> list[list[int]]:
        session = await sessions.create("me")
        said = []
        for prompt in prompts:
            await sessions.append("me", session, prompt)
            said.append(
                [one.token_id async for one in sessions.generate("me", session, params) if isinstance(one, Token)]
            )
        info = await sessions.info("me", session)
        assert info.kv_bound_bytes is not None and 0 < info.kv_allocated_bytes <= info.kv_bound_bytes
        assert (info.inv1_violations, info.inv2_violations) == (0, 0)
        await sessions.shut_down()
        return said

    assert asyncio.run(talk()) == expected


def test_layers_that_keep_less_say_the_same(tmp_path: Path) -> None:
    """With KV groups: the same answers, whole and streamed, hits, and metrics that count blocks."""
    write_tiny("gemma3", tmp_path / "gemma")
    directory = str(tmp_path / "gemma")
    bodies = [
        {"prompt": ("once upon a time " * 4)[:length], "max_tokens": 40, "ignore_eos": True, "temperature": 0}
        for length in (9, 30, 60)
    ]
    with served(directory) as plain:
        expected = [complete(plain, **body)["choices"] for body in bodies]
        most = json.loads(call(plain, "/v1/models").payload)["data"][0]["max_model_len"]
    with served(directory, kv_groups="all") as grouped:
        assert [complete(grouped, **body)["choices"] for body in bodies] == expected
        again = complete(grouped, **bodies[2])
        assert again["choices"] == expected[2]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 56
        events = events_of(call(grouped, COMPLETIONS, {**bodies[1], "stream": True}).payload)
        assert "".join(event["choices"][0]["text"] for event in events) == expected[1][0]["text"]
        assert json.loads(call(grouped, "/v1/models").payload)["data"][0]["max_model_len"] >= most
        text = call(grouped, "/metrics").payload.decode()
        assert 'num_gpu_blocks="512"' in text
        pages = {
            line.split('state="')[1].split('"')[0]: float(line.split()[-1])
            for line in text.splitlines()
            if line.startswith("kvarts:pages{")
        }
        assert pages["used"] == 0 < pages["cached"] and sum(pages.values()) == 512


def test_sessions_go_with_layers_that_keep_less(tmp_path: Path) -> None:
    """A window of the model's own keeps no more of a session than it sees; the same is said."""
    write_tiny("gemma3", tmp_path / "gemma")
    said, held = [], []
    for kv_groups in ("off", "all"):
        llm = LLM(tmp_path / "gemma", config=CONFIG, kv_groups=kv_groups)
        sessions = sessions_on(llm.host(), SessionsConfig(defaults=SessionSettings(sink=4, window=64)))

        async def talk(sessions: Sessions = sessions) -> tuple[list[int], int]:
            session = await sessions.create("me")
            await sessions.append("me", session, [token * 7 % 250 for token in range(150)])
            params = SamplingParams(max_tokens=8, ignore_eos=True)
            tokens = [one.token_id async for one in sessions.generate("me", session, params) if isinstance(one, Token)]
            info = await sessions.info("me", session)
            assert info.kv_bound_bytes is not None and info.kv_allocated_bytes <= info.kv_bound_bytes
            await sessions.shut_down()
            return tokens, info.kv_bound_bytes

        tokens, num_bytes = asyncio.run(talk())
        said.append(tokens)
        held.append(num_bytes)
    assert said[1] == said[0] and held[1] < held[0]


def test_an_echo_has_the_log_probabilities_of_its_prompt(url: str, directory: str) -> None:
    """As lm_eval's local-completions reads them, and exactly those of transformers."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, reference = AutoTokenizer.from_pretrained(directory), AutoModelForCausalLM.from_pretrained(directory)
    prompt = "once upon a time, été 😀, by the sea"
    ids = tokenizer(prompt)["input_ids"]
    with torch.inference_mode():
        rows = torch.log_softmax(reference(torch.tensor([ids])).logits[0].float(), dim=-1)
    expected = [float(rows[place, token]) for place, token in enumerate(ids[1:])]
    for given in (prompt, ids):
        body = {"prompt": given, "max_tokens": 1, "logprobs": 2, "echo": True, "ignore_eos": True, "temperature": 0}
        (choice,) = complete(url, **body)["choices"]
        told = choice["logprobs"]
        assert choice["text"].startswith(prompt) and len(told["tokens"]) == len(ids) + 1
        assert (told["token_logprobs"][0], told["top_logprobs"][0]) == (None, None)
        assert told["token_logprobs"][1:-1] == pytest.approx(expected, abs=1e-4)
        for offset, piece in zip(told["text_offset"], told["tokens"], strict=True):
            if not piece.startswith("bytes:"):
                assert choice["text"][offset:].startswith(piece)
        events = events_of(call(url, COMPLETIONS, {**body, "stream": True}).payload)
        assert "".join(event["choices"][0]["text"] for event in events) == choice["text"]
        parts = [event["choices"][0]["logprobs"] for event in events if event["choices"][0]["logprobs"]]
        for name in ("tokens", "text_offset"):
            assert [each for part in parts for each in part[name]] == told[name]
    (none,) = complete(url, prompt=prompt, max_tokens=0, logprobs=1, echo=True)["choices"]
    assert (none["text"], none["finish_reason"]) == (prompt, "length")
    assert none["logprobs"]["token_logprobs"] == told["token_logprobs"][:-1]
    answer = complete(url, prompt=prompt, max_tokens=0, echo=True)
    assert (answer["choices"][0]["text"], answer["usage"]["completion_tokens"]) == (prompt, 0)
    (scored,) = complete(url, prompt=prompt, max_tokens=2, prompt_logprobs=1)["choices"]
    entries = scored["prompt_logprobs"]
    assert entries[0] is None
    for place, (token, entry) in enumerate(zip(ids[1:], entries[1:], strict=True)):
        assert entry[str(token)]["logprob"] == pytest.approx(expected[place], abs=1e-4)
        assert min(one["rank"] for one in entry.values()) == 1
    chat = call(url, CHAT, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "prompt_logprobs": 0})
    assert chat.json["prompt_logprobs"][0] is None and len(chat.json["prompt_logprobs"]) > 1
    assert call(url, COMPLETIONS, {"prompt": "x", "prompt_logprobs": 1, "stream": True}).status == 400


def test_tokens_of_parts_of_characters_have_their_own_bytes(url: str) -> None:
    """Of a byte-level model with random weights nearly all tokens are no characters."""
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 12, "logprobs": True, "ignore_eos": True}
    told = call(url, CHAT, {**body, "temperature": 0}).json["choices"][0]
    tokens = told["logprobs"]["content"]
    assert all(len(one["bytes"]) >= 1 for one in tokens if not one["token"].startswith("<"))
    kept = b"".join(bytes(one["bytes"]) for one in tokens)
    assert kept.decode("utf-8", "replace").startswith(told["message"]["content"][:-3])


def test_one_request_that_fails_is_one_request_that_fails(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvarts.run.text import Generation

    whole = Generation._extend_text
    body = {"prompt": "the sea", "max_tokens": 8, "ignore_eos": True, "temperature": 0}
    expected = complete(url, **body)["choices"]

    def failing(this: Generation, token: int) -> None:
        if this.params.seed == 13 and len(this.tokens) == 4:
            raise RuntimeError("no text for that")
        whole(this, token)

    monkeypatch.setattr(Generation, "_extend_text", failing)
    reply = call(url, COMPLETIONS, {**body, "seed": 13})
    assert reply.status == 500 and "no text for that" in reply.error["message"]
    reply = call(url, COMPLETIONS, {**body, "seed": 13, "stream": True})
    # If it fails before anything of the stream is written, it has a status of its own.
    error = reply.error if reply.status == 500 else events_of(reply.payload)[-1]["error"]
    assert "no text for that" in error["message"]
    assert call(url, "/health").status == 200
    assert complete(url, **body)["choices"] == expected
    assert 'finished_reason="error"' in call(url, "/metrics").payload.decode()


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function.arguments.city }}</tool_call>{% endfor %}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PERSON}},
    {"type": "function", "function": {"name": "time"}},
]


def answers(url: str, path: str, body: dict[str, Any]) -> Iterator[Any]:
    """A choice of the whole answer, and the same of the stream put together."""
    reply = call(url, path, body)
    assert reply.status == 200, reply.payload
    (choice,) = reply.json["choices"]
    yield choice
    events = events_of(call(url, path, {**body, "stream": True}).payload)
    parts = [event["choices"][0] for event in events if event["choices"]]
    if path == COMPLETIONS:
        yield {"text": "".join(part["text"] for part in parts), "finish_reason": parts[-1]["finish_reason"]}
        return
    message: dict[str, Any] = {"content": "".join(part["delta"].get("content") or "" for part in parts)}
    calls: dict[int, Any] = {}
    for made in (made for part in parts for made in part["delta"].get("tool_calls", ())):
        if made["index"] in calls:
            calls[made["index"]]["function"]["arguments"] += made["function"]["arguments"]
        else:
            calls[made["index"]] = made
    message["tool_calls"] = list(calls.values())
    yield {"message": message, "finish_reason": parts[-1]["finish_reason"]}


@pytest.fixture(scope="module")
def with_tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server of a model of which the template tells of tools."""
    path = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny("qwen3", path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    with served(str(path), speculative_config="ngram") as address:
        yield address


@pytest.mark.parametrize(
    "more",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}},
        {"structured_outputs": {"json": PERSON}},
        {"guided_json": PERSON},
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_json_of_a_schema_is_enforced(url: str, path: str, more: dict[str, Any]) -> None:
    pytest.importorskip("llguidance")
    body = {"max_tokens": 200, "temperature": 1.0, "seed": 5, "logprobs": True, **more}
    body |= {"messages": [{"role": "user", "content": "who?"}]} if path == CHAT else {"prompt": "who?"}
    for choice in answers(url, path, body):
        text = choice["message"]["content"] if path == CHAT else choice["text"]
        assert choice["finish_reason"] == "stop"
        assert set(json.loads(text)) == {"name", "age"}


def test_other_grammars_and_what_is_none(url: str) -> None:
    pytest.importorskip("llguidance")
    wanted: dict[str, Any]
    for wanted, expected in (
        ({"guided_choice": ["red", "blue"]}, "(red|blue)"),
        ({"guided_regex": "[ab]{4}"}, "[ab]{4}"),
        ({"structured_outputs": {"grammar": 'start: "x" "y"'}}, "xy"),
        ({"guided_json": {"const": 5}}, "5"),
    ):
        (choice,) = complete(url, prompt="say", max_tokens=60, **wanted)["choices"]
        assert re.fullmatch(expected, choice["text"]) and choice["finish_reason"] == "stop"
    for wanted in (
        {"guided_regex": "("},
        {"structured_outputs": {"json": {}, "regex": "a"}},
        {"structured_outputs": {"other": 1}},
        {"guided_regex": "a", "guided_choice": ["a"]},
        {"structured_outputs": {}},
    ):
        reply = call(url, COMPLETIONS, {"prompt": "say", **wanted})
        field = "structured_outputs" if len(wanted) > 1 else next(iter(wanted))
        assert reply.status == 400 and field in reply.error["param"], reply.payload
    assert call(url, "/health").status == 200


AMBIGUOUS = """start: s
s: (s s) | (s "a" s) | "a" | "b" | ("a" s "b") | ""
"""


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("field", ["guided_grammar", "structured_outputs"])
def test_a_grammar_that_becomes_too_complex_ends_its_own_request_with_its_name(
    url: str, monkeypatch: pytest.MonkeyPatch, field: str, streams: bool
) -> None:
    """As an error of the request, not of the server; and another request is answered as it is alone."""
    pytest.importorskip("llguidance")
    from kvarts.run.torch import sampling

    monkeypatch.setattr(sampling, "MOST_ITEMS", 60)
    other = {"prompt": "another", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    alone = complete(url, **other)["choices"]
    wanted = {"guided_grammar": AMBIGUOUS} if field == "guided_grammar" else {field: {"grammar": AMBIGUOUS}}
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(complete, url, **other)
        body = {"prompt": "say", "max_tokens": 100, "min_tokens": 100, "seed": 3, "stream": streams, **wanted}
        reply = call(url, COMPLETIONS, body)
        assert beside.result()["choices"] == alone
    if streams:
        assert reply.status == 200
        pieces = events_of(reply.payload)
        assert len(pieces) > 2
        error = pieces[-1]["error"]
    else:
        assert reply.status == 400, reply.payload
        error = reply.error
    assert (error["code"], error["param"], error["type"]) == (400, field, "BadRequestError")
    assert error["message"].startswith(f"{field}: cannot be kept to: ") and "tokens" in error["message"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_calls_of_tools_are_enforced(with_tools: str, choice: Any) -> None:
    pytest.importorskip("llguidance")
    body = {"messages": [{"role": "user", "content": "who?"}], "tools": TOOLS, "tool_choice": choice,
            "max_tokens": 300, "temperature": 1.0, "seed": 2}  # fmt: skip
    body["response_format"] = {"type": "json_schema", "json_schema": {"name": "text", "schema": {"type": "array"}}}
    for told in answers(with_tools, CHAT, body):
        if told["finish_reason"] == "length":  # a random model may list calls for ever
            assert choice == "required"
            continue
        assert told["finish_reason"] == "tool_calls" and not told["message"]["content"]
        for made in told["message"]["tool_calls"]:
            arguments = json.loads(made["function"]["arguments"])
            assert made["function"]["name"] in ("weather", "time")
            assert made["function"]["name"] == "time" or set(arguments) == {"name", "age"}


def test_tools_are_told_and_calls_come_back_to_the_template(with_tools: str, url: str) -> None:
    asked = [{"role": "user", "content": "weather?"}]
    called = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Lund"}'}}
    answered = [*asked, {"role": "assistant", "tool_calls": [called]}, {"role": "tool", "content": "rain"}]
    told = call(with_tools, f"{CHAT}/render", {"messages": answered, "tools": TOOLS}).json
    text = call(with_tools, "/detokenize", {"tokens": told["token_ids"]}).json["prompt"]
    assert '"name": "time"' in text and "<tool_call>Lund</tool_call>" in text
    broken = {**called, "function": {"name": "f", "arguments": "{"}}
    messages = [*asked, {"role": "assistant", "tool_calls": [broken]}]
    reply = call(with_tools, CHAT, {"messages": messages, "max_tokens": 1})
    assert reply.status == 400 and "arguments of a call are JSON" in reply.error["message"]
    # The template leaves tools out, so they are described in the system message.
    for chosen in ("none", "auto", None):
        body = {"messages": asked, "tools": TOOLS, "tool_choice": chosen, "max_tokens": 1}
        reply = call(url, CHAT, body)
        assert reply.status == 200 and ("warnings" in reply.json) == (chosen != "none")


@pytest.mark.parametrize(("given", "num_hit"), [({}, 224), ({"cache_control": {"type": "ephemeral"}}, 396)])
def test_a_hint_keeps_a_prompt_of_a_real_model(directory: str, given: dict[str, Any], num_hit: int) -> None:
    """The third prompt of 100 pages pushes 44 pages of the first out of 256, or of the second if the first is kept."""
    with served(directory, eviction=HintedOrder) as address:
        for first, more in ((1, given), (2, {}), (3, {}), (1, {})):
            prompt = [first, *(10 + place % 200 for place in range(399))]
            reply = call(address, COMPLETIONS, {"prompt": prompt, "max_tokens": 1, "temperature": 0, **more})
            assert reply.status == 200, reply.payload
    assert reply.json["usage"]["prompt_tokens_details"]["cached_tokens"] == num_hit
