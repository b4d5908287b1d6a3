"""Messages become requests with prefixes: each form, against an independent count; what is left out or refused."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts import ReplayConfig, replay
from kvarts.base.errors import ConfigError, InputError
from kvarts.plan.why import why
from kvarts.sim.traffic.formats import load_trace
from kvarts.sim.traffic.prompts import Prompts
from kvarts.sim.traffic.trace import Trace

Row = dict[str, Any]
SYSTEM = "You answer in verse, as the captain of a ship of the line would, and never in fewer than four of them."
QUESTIONS = ("What is the weather at the cape, and how are the winds?", "And 12 miles to the south?", "Why so?")
ANSWERS = ("The wind is fair, the sea is calm,\nthe gulls are few.", "There it blows, from west to east.", "It does.")
CONFIG = ReplayConfig(num_pages=100_000, page_size=16, concurrency=1)


def kind(char: str) -> str:
    if char.isascii() and (char.isalpha() or char.isdigit()):
        return "letter" if char.isalpha() else "digit"
    if not char.isascii():
        return "other"
    return "line" if char in "\r\n" else "blank" if char in " \t" else "sign"


MOST = {"letter": 8, "digit": 3, "other": 3, "sign": 3, "line": 10**9, "blank": 10**9}


def naive_tokens(text: str) -> list[str]:
    """Tokens of a text without special tokens, control characters or two signs of special meaning, one by one."""
    found: list[str] = []
    data = [(chr(byte) if byte < 128 else "\u00ff") for byte in text.encode()]
    at = 0
    while at < len(data):
        start = at
        if data[at] == " " and at + 1 < len(data) and kind(data[at + 1]) in ("letter", "digit"):
            at += 1
        sort, length = kind(data[at]), 0
        while at < len(data) and kind(data[at]) == sort and length < MOST[sort] and not (length and data[at] == "<"):
            at, length = at + 1, length + 1
        found.append(text.encode()[start:at].decode("latin-1"))
    return found


def naive_prompt(messages: list[tuple[str, str]], *, tools: str = "", is_open: bool = True) -> list[str]:
    """Tokens of a prompt in ChatML."""
    tokens: list[str] = []
    for role, content in ([("tools", tools)] if tools else []) + messages:
        tokens += ["<|im_start|>", *naive_tokens(role), "\n", *naive_tokens(content), "<|im_end|>", "\n"]
    return [*tokens, "<|im_start|>", "assistan", "t", "\n"] if is_open else tokens


def naive_hits(prompts: list[list[str]], answered: list[list[str]], size: int = 16) -> int:
    """Tokens that prompts find in a cache without limit, of whole pages; what they leave there, they and answers."""
    seen: set[tuple[str, ...]] = set()
    hits = 0
    for prompt, whole in zip(prompts, answered, strict=True):
        for end in range(size, len(prompt), size):
            if tuple(prompt[:end]) not in seen:
                break
            hits += size
        seen |= {tuple(whole[:end]) for end in range(size, len(whole), size)}
    return hits


def said(role: str, content: Any) -> Row:
    return {"role": role, "content": content}


def chat(turn: int) -> list[Row]:
    """The messages of a turn of one conversation."""
    pairs = [said(*pair) for at in range(turn) for pair in (("user", QUESTIONS[at]), ("assistant", ANSWERS[at]))]
    return [said("system", SYSTEM), *pairs, said("user", QUESTIONS[turn])]


def completion(turn: int) -> Row:
    return {"created": 1_700_000_000 + turn, "choices": [{"message": said("assistant", ANSWERS[turn])}]}


def blocks(messages: list[Row]) -> list[Row]:
    return [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in messages]


def anthropic(turn: int) -> Row:
    return {"model": "m", "max_tokens": 9, "system": SYSTEM, "messages": blocks(chat(turn)[1:])}


def lines(*rows: Row) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


THREE = range(3)
GPT = {"system": "system", "user": "human", "assistant": "gpt"}
WHOLE = [*chat(2), said("assistant", ANSWERS[2])]
FORMS: dict[str, str] = {
    "a log of requests and responses": lines(*({"request": {"model": "m", "messages": chat(turn)},
                                               "response": completion(turn)} for turn in THREE)),
    "bodies in a log as text": lines(*({"request_body": json.dumps({"model": "m", "messages": chat(turn)}),
                                       "response_body": json.dumps(completion(turn))} for turn in THREE)),
    "rows with all": lines(*({"messages": chat(turn), **completion(turn)} for turn in THREE)),
    "an array": json.dumps([{"messages": chat(turn), "response": ANSWERS[turn]} for turn in THREE], indent=1),
    "Anthropic": lines(*({**anthropic(turn), "response": {"role": "assistant", "content": blocks(
        [said("assistant", ANSWERS[turn])])[0]["content"]}} for turn in THREE)),
    "Responses": lines(*({"model": "m", "instructions": SYSTEM, "input": chat(turn)[1:], "response": {
        "created_at": 1_700_000_000 + turn, "output": [{"type": "message", "role": "assistant", "content": [
            {"type": "output_text", "text": ANSWERS[turn]}]}]}} for turn in THREE)),
    "ShareGPT": json.dumps([{"id": "one", "conversations": [
        {"from": GPT[each["role"]], "value": each["content"]} for each in WHOLE]}]),
    "WildChat": lines({"conversation_hash": "h", "model": "m", "turn": 3, "conversation": WHOLE}),
    "fine-tuning": lines({"messages": WHOLE}),
}  # fmt: skip


def loaded(tmp_path: Path, text: str, **options: Any) -> Trace:
    path = tmp_path / "log.jsonl"
    path.write_text(text)
    return load_trace(path, **options)


@pytest.mark.parametrize("form", FORMS)
def test_sums_and_hits_are_those_of_an_independent_count(tmp_path: Path, form: str) -> None:
    trace = loaded(tmp_path, FORMS[form])
    prompts = [naive_prompt([(each["role"], each["content"]) for each in chat(turn)]) for turn in THREE]
    answers = [naive_tokens(answer) for answer in ANSWERS]
    requests = sorted(trace, key=lambda request: request.row)
    assert [request.num_prompt_tokens for request in requests] == list(map(len, prompts))
    assert [request.num_output_tokens for request in requests] == list(map(len, answers))
    summary = replay(trace, CONFIG).summary
    whole = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    assert summary["num_cached_tokens"] == naive_hits(prompts, whole) > 0
    assert trace.knows_prefixes and "tokens of words" in " ".join(trace.warnings)


@pytest.mark.parametrize(
    "text",
    [
        lines(*({"model": "m", "messages": chat(turn)} for turn in THREE)),
        lines(*(anthropic(turn) for turn in THREE)),
        json.dumps({"data": [{"session_id": "s", "payloads": [{"messages": chat(turn)} for turn in THREE]}]}),
        lines(*({"custom_id": f"{turn}", "method": "POST", "url": "/v1/chat/completions",
                 "body": {"model": "m", "messages": chat(turn)}} for turn in THREE)),
    ],
    ids=["OpenAI", "Anthropic", "inputs_json", "batch input"],
)  # fmt: skip
def test_bare_bodies_have_the_answers_that_later_turns_reveal(tmp_path: Path, text: str) -> None:
    """The last answer is not known: it has the length of the others, and nothing of it is found later."""
    trace = loaded(tmp_path, text)
    first, second, last = sorted(trace, key=lambda request: request.row)
    lengths = [len(naive_tokens(answer)) for answer in ANSWERS[:2]]
    assert [request.num_output_tokens for request in (first, second, last)] == [*lengths, min(lengths)]
    assert first.session_id == second.session_id == last.session_id is not None
    prompts = [naive_prompt([(each["role"], each["content"]) for each in chat(turn)]) for turn in THREE]
    whole = [[*prompts[turn], *naive_tokens(ANSWERS[turn])] for turn in THREE]
    assert replay(trace, CONFIG).summary["num_cached_tokens"] == naive_hits(prompts, whole)
    assert "each counts as" in " ".join(trace.warnings)


def test_one_body_alone_needs_an_output_length(tmp_path: Path) -> None:
    text = lines({"model": "m", "messages": chat(0)}, {"prompt": "Once upon a time"})
    with pytest.raises(InputError, match=r"log.jsonl: has no answers and no usage.*--set output_tokens=N"):
        loaded(tmp_path, text)
    assert [request.num_output_tokens for request in loaded(tmp_path, text, output_tokens=7)] == [7, 7]


def test_a_batch_is_its_input_and_its_output(tmp_path: Path) -> None:
    asked = [{"custom_id": f"r{turn}", "body": {"model": "m", "messages": chat(turn)}} for turn in THREE]
    answered = [
        {"custom_id": f"r{turn}", "response": {"status_code": 200, "body": completion(turn)}} for turn in (2, 0)
    ]
    answered.append({"custom_id": "r1", "response": {"status_code": 500, "body": {"error": {"message": "no"}}}})
    (tmp_path / "batch").mkdir()
    (tmp_path / "batch" / "input.jsonl").write_text(lines(*asked))
    (tmp_path / "batch" / "output.jsonl").write_text(lines(*answered))
    trace = load_trace(tmp_path / "batch")
    assert [request.num_output_tokens for request in trace] == [len(naive_tokens(ANSWERS[turn])) for turn in (0, 2)]
    assert trace.left_out == {"failed": 1}
    with pytest.raises(InputError, match=r"has the answers of a batch, not its prompts\. Give a directory"):
        load_trace(tmp_path / "batch" / "output.jsonl")


def test_a_directory_of_raw_payloads_is_read_file_by_file(tmp_path: Path) -> None:
    for name in ("b", "a"):
        text = lines(*({"model": "m", "messages": [said("user", name), *chat(turn)]} for turn in THREE))
        (tmp_path / f"{name}.jsonl").write_text(text)
    trace = load_trace(tmp_path)
    assert [request.session_id for request in trace] == ["turns of row 1"] * 3 + ["turns of row 4"] * 3


def test_texts_and_token_ids_are_prompts_too(tmp_path: Path) -> None:
    rows: list[Row] = [
        {"prompt": "Once upon a time", "completion": " there was"},
        {"prompt": [5] * 40, "usage": {"completion_tokens": 3}},
    ]
    one, two = loaded(tmp_path, lines(*rows))
    assert (one.num_prompt_tokens, one.num_output_tokens) == (4, 2)
    assert (two.num_prompt_tokens, two.num_output_tokens, len(two.units)) == (40, 3, 24)


def test_tools_and_images_count(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "look", "description": "Look at the sea."}}
    png = b"\x89PNG\r\n\x1a\n" + b"\x00" * 8 + struct.pack(">II", 1024, 512)
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(png).decode()}"}}
    shown = said("user", [{"type": "text", "text": QUESTIONS[0]}, image])
    rows = [{"messages": [shown], "response": "A."}, {"messages": [shown], "tools": [tool], "response": "A."}]
    plain, with_tool = (request.num_prompt_tokens for request in loaded(tmp_path, lines(*rows)))
    assert plain == len(naive_prompt([("user", QUESTIONS[0])])) + 85 + 170 * 2
    tools = json.dumps([tool], separators=(",", ":"))
    assert with_tool - plain == len(naive_prompt([], tools=tools, is_open=False))


def test_models_and_salts_share_nothing(tmp_path: Path) -> None:
    rows = [{"messages": chat(0), "response": "A.", "model": name, "cache_salt": salt}
            for name, salt in (("m", "s"), ("n", "s"), ("m", "t"), ("m", "s"))]  # fmt: skip
    trace = loaded(tmp_path, lines(*rows))
    assert replay(trace, CONFIG).summary["num_cached_tokens"] == 16 * ((len(naive_prompt(
        [("system", SYSTEM), ("user", QUESTIONS[0])])) - 1) // 16)  # fmt: skip
    assert "ask for 2 models" in " ".join(trace.warnings)


def test_nothing_of_a_text_is_kept(tmp_path: Path) -> None:
    trace = loaded(tmp_path, FORMS["rows with all"])
    kept = repr([list(trace), trace.warnings, trace.left_out])
    assert not any(word in kept for word in ("captain", "verse", "gulls", "weather"))


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ('{"messages": [{"content": "x"}]}', r"log.jsonl:2: messages\[0\]: has no role"),
        ('{"messages": ["x"]}', r"log.jsonl:2: messages\[0\]: is not a message"),
        ('{"messages": [{"role": "user", "content": 7}]}', r"log.jsonl:2: messages\[0\].content: is not text"),
        ('{"messages": "x"}', "log.jsonl:2: messages: is a list of messages"),
        ('{"prompt": {"a": 1}}', "log.jsonl:2: prompt: is a text or token ids"),
        ('{"messages": [{"role": "user", "content": "x"}], "usage": {"completion_tokens": -1}}',
         "log.jsonl:2: usage.completion_tokens: is not a number of tokens"),
        ('{"messages": [{"role": "user", "content": "x"}], "created": "noon"}', "log.jsonl:2: created: 'noon' is not"),
        ('{"messages": [{"role": "user", "content": "x"}], "created": 1e300}', "log.jsonl:2: created: is not a time"),
        ('{"messages": [{"role"', "log.jsonl:2: ends too early"),
        ("[]", "log.jsonl:2: is not an object"),
        ('{"data": [{"payloads": [{"messages": [7]}]}]}', r"jsonl:2: data\[0\].payloads\[0\].messages\[0\]: is not"),
        ("[" * 100_000, "log.jsonl:2: "),
    ],
)  # fmt: skip
def test_malformed_rows_are_named_by_line_and_field(tmp_path: Path, row: str, what: str) -> None:
    good = {"created": 1, "messages": [said("user", "Hello")], "response": "Hi."}
    text = f"{json.dumps(good)}\n{row}\n"
    with pytest.raises(InputError, match=what):
        loaded(tmp_path, text)
    assert loaded(tmp_path, text, skip_bad_lines=True).num_skipped_lines == 1


def test_some_rows_without_a_time_are_refused(tmp_path: Path) -> None:
    row = {"messages": [said("user", "Hello")], "response": "Hi."}
    with pytest.raises(InputError, match=r"log\.jsonl:2: has no time, and other rows have one"):
        loaded(tmp_path, lines({"created": 1, **row}, row))
    assert "no row has a time" in " ".join(loaded(tmp_path, lines(row)).warnings)


def test_other_shapes_of_prompts_and_answers(tmp_path: Path) -> None:
    """Messages as text of JSON, a prompt and a completion as messages, items of Responses that have no role."""
    asked, answered = [said("user", "Hello")], [said("assistant", "Hi there.")]
    call = {"type": "web_search_call", "id": "w", "status": "completed"}
    rows: list[Row] = [
        {"messages": json.dumps(asked), "response": "Hi there."},
        {"prompt": asked, "completion": answered},
        {"model": "m", "input": [call, *asked], "output": [{"type": "reasoning", "summary": []}, *answered]},
    ]
    requests = loaded(tmp_path, lines(*rows)).requests
    assert requests is not None
    plain = len(naive_prompt([("user", "Hello")]))
    text = json.dumps(call, separators=(",", ":"))
    lengths = [request.num_prompt_tokens for request in requests]
    assert lengths == [plain, plain, len(naive_prompt([("assistant", text), ("user", "Hello")]))]
    assert [request.num_output_tokens for request in requests] == [3, 3, 3]


def test_rows_that_are_not_requests_are_left_out_and_counted(tmp_path: Path) -> None:
    good = {"messages": [said("user", "Hello")], "response": "Hi."}
    silent = {"messages": [said("user", "x")], "usage": {"completion_tokens": 0}}
    stored = {"model": "m", "input": "Go on.", "previous_response_id": "resp_1"}
    rows: list[Row] = [good, {**good, "error": {"code": 500}}, {"messages": []}, silent, stored]
    trace = loaded(tmp_path, lines(*rows))
    assert trace.left_out == {
        "failed": 1, "without messages": 1, "without output tokens": 1, "continuing what the server stores": 1
    }  # fmt: skip


def test_times_may_be_of_any_unit_and_dates(tmp_path: Path) -> None:
    times: list[Any] = [1_700_000_000, 1_700_000_001_000, 1_700_000_002_000_000, 1_700_000_003_000_000_000,
                        "2023-11-14T22:13:24Z", "2023-11-14 23:13:25.5+01:00"]  # fmt: skip
    rows = [{"timestamp": time, "messages": [said("user", "Hello")], "response": "Hi."} for time in times]
    arrivals = [request.arrival_ns / 1e9 for request in loaded(tmp_path, lines(*rows))]
    assert arrivals == [0, 1, 2, 3, 4, 5.5]


def test_usage_that_differs_is_said(tmp_path: Path) -> None:
    row = {
        "messages": [said("user", "Hello")],
        "response": "Hi.",
        "usage": {"input_tokens": 1, "cache_read_input_tokens": 19},
    }
    assert "usage records 20 prompt tokens where 10 were counted (2.00 times)" in " ".join(
        loaded(tmp_path, lines(row)).warnings
    )


def test_a_tokenizer_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tokenizer"):
        loaded(tmp_path, FORMS["rows with all"], tokenizer=str(tmp_path))
    with pytest.raises(ConfigError, match="tokenizer: is given, and this is Mooncake"):
        load_trace("sample:mooncake", tokenizer="words")


def test_a_chat_template_makes_the_prompts(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}<|assistant|>")
    trace = loaded(tmp_path, FORMS["rows with all"], chat_template=str(template))
    first = min(trace, key=lambda request: request.row)
    assert first.num_prompt_tokens == 5 + len(naive_tokens(SYSTEM)) + len(naive_tokens(QUESTIONS[0]))
    assert "prompts by chat.jinja" in " ".join(trace.warnings)
    template.write_text("{% for %}")
    with pytest.raises(ConfigError, match=r"chat.jinja:1: .*Expected an expression|chat.jinja:1: "):
        loaded(tmp_path, FORMS["rows with all"], chat_template=str(template))
    template.write_text("{{ raise_exception('only system messages') }}")
    with pytest.raises(InputError, match=r"log\.jsonl:1: messages: .*only system messages"):
        loaded(tmp_path, FORMS["rows with all"], chat_template=str(template))


def test_a_tokenizer_of_a_directory_counts_its_tokens(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "Hello": 1, "Hi": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    (tmp_path / "model").mkdir()
    backend.save(str(tmp_path / "model" / "tokenizer.json"))
    settings = {"chat_template": "{% for m in messages %}{{ m.content }} {% endfor %}"}
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(settings))
    (request,) = loaded(tmp_path, lines({"messages": chat(0), "response": "Hi Hi"}), tokenizer=str(tmp_path / "model"))
    assert request.num_prompt_tokens == len(backend.encode(f"{SYSTEM} {QUESTIONS[0]} ").ids)
    assert request.num_output_tokens == 2


words = st.text(st.sampled_from("ab1 \n.,<äö日"), max_size=60)


@given(st.lists(words, min_size=1, max_size=5), st.lists(words, min_size=1, max_size=5), st.integers(1, 20))
def test_ids_agree_exactly_as_far_as_tokens_do(one: list[str], other: list[str], size: int) -> None:
    """Whatever was read before, and wherever texts are cut: parts are cut at the same places."""
    prompts = Prompts(block_tokens=size)
    tokens = [[token for part in parts for token in naive_tokens(part)] for parts in (one, other)]
    ids = [prompts.ids(parts) for parts in (one, other)]
    assert [each.num_tokens for each in ids] == list(map(len, tokens))
    common = next(
        (at for at, pair in enumerate(zip(*tokens, strict=False)) if pair[0] != pair[1]), min(map(len, tokens))
    )
    units = [[each.units[at : at + 8] for at in range(0, len(each.units), 8)] for each in ids]
    for place in range(min(map(len, tokens)) // size):
        assert (units[0][place] == units[1][place]) == ((place + 1) * size <= common)


SPENT = {"startTime": "2026-01-01T00:00:00Z", "prompt_tokens": 20, "completion_tokens": 5, "status": "success"}


def test_logs_of_a_gateway_are_messages_where_they_have_them(tmp_path: Path) -> None:
    """LiteLLM's spend logs have an empty object in place of the messages, unless it is told to store them."""
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps({**SPENT, "request_id": "a", "messages": {}, "response": {}}) + "\n")
    trace = load_trace(path)
    assert not trace.knows_prefixes and [request.num_prompt_tokens for request in trace] == [20]
    said = [{"role": "user", "content": "hello " * 40}]
    rows = [
        {**SPENT, "request_id": "a", "messages": said, "response": {}},
        {**SPENT, "request_id": "b", "messages": said, "status": "failure"},
        {**SPENT, "request_id": "c", "messages": said, "cache_hit": "True"},
        {**SPENT, "request_id": "d", "messages": said, "call_type": "aembedding"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    trace = load_trace(path)
    assert trace.knows_prefixes and [request.num_output_tokens for request in trace] == [5]
    assert trace.left_out == {"failed": 1, "answered by a proxy cache": 1, "embeddings": 1}


def test_a_table_with_a_prompt_is_one_of_columns(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("time,prompt,prompt_tokens,completion_tokens\n2026-01-01T00:00:00Z,hello,5,2\n")
    assert [request.num_prompt_tokens for request in load_trace(path)] == [5]


@pytest.mark.parametrize(
    ("answer", "what"), [('{"custom_id":"b","resp', "ends too early"), ("[1]", "is not an object")]
)
def test_a_malformed_answer_of_a_batch_is_named_by_its_line(tmp_path: Path, answer: str, what: str) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hello there"}]}
    (tmp_path / "in.jsonl").write_text(
        json.dumps({"custom_id": "a", "url": "/v1/chat/completions", "body": body}) + "\n"
    )
    choice = {"message": {"role": "assistant", "content": "yes"}}
    good = {"custom_id": "a", "response": {"status_code": 200, "body": {"choices": [choice]}}, "error": None}
    (tmp_path / "out.jsonl").write_text(f"{json.dumps(good)}\n{answer}\n")
    with pytest.raises(InputError, match=rf"out\.jsonl:2: {what}"):
        load_trace(tmp_path)
    trace = load_trace(tmp_path, skip_bad_lines=True)
    assert (len(list(trace)), trace.num_skipped_lines) == (1, 1)


def test_a_chat_template_that_is_not_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"messages":[{"role":"user","content":"hello there"}]}\n')
    (tmp_path / "template.jinja").write_bytes(b"\xff\xfe{{")
    with pytest.raises(InputError, match=r"template\.jinja: cannot be read"):
        load_trace(tmp_path / "log.jsonl", chat_template=str(tmp_path / "template.jinja"), output_tokens=1)


def test_times_in_seconds_keep_their_nanoseconds(tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "hello there"}], "response": {"choices": [{"text": "yes"}]}}
    (tmp_path / "log.jsonl").write_text(
        "".join(json.dumps({**row, "created": at}) + "\n" for at in (1700000000, 1700000000.25, 1700000001.000001))
    )
    first, second, third = (request.arrival_ns for request in load_trace(tmp_path / "log.jsonl"))
    assert (second - first, third - first) == (250_000_000, round((1700000001.000001 - 1700000000) * 1e9))


BODIES: tuple[dict[str, Any], ...] = (
    {
        "created": 5, "model": "m", "session_id": "s", "cache_salt": "c", "chat_template_kwargs": {"a": 1},
        "messages": [
            {"role": "system", "content": "You help."},
            {"role": "user",
             "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "u"}}]},
            {"role": "assistant", "content": None, "reasoning_content": "r",
             "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "c", "name": "f", "content": "42"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "response": {"choices": [{"message": {"role": "assistant", "content": "b", "tool_calls": []}}],
                     "usage": {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {}}},
    },
    {
        "timestamp": "2026-01-01T00:00:00Z", "system": [{"type": "text", "text": "S"}],
        "messages": [
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text"}]}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "n", "input": {}},
                                              {"type": "thinking", "thinking": "t"}]},
        ],
        "tools": [{"name": "n", "input_schema": {}}],
        "response": {"content": [{"type": "text", "text": "A"}], "usage": {"input_tokens": 5, "output_tokens": 2}},
    },
    {
        "created_at": 5.5, "instructions": "I", "output": [{"type": "message", "content": [{"type": "output_text"}]}],
        "input": [{"role": "user", "content": "q"}, {"type": "function_call", "call_id": "c", "arguments": "{}"},
                  {"type": "function_call_output", "call_id": "c", "output": "o"},
                  {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]}],
    },
)  # fmt: skip
OTHERS: tuple[Any, ...] = (
    1e308,
    -1,
    None,
    True,
    "x",
    [],
    {},
    [[]],
    [None],
    {"function": None},
    ["a"],
    "\ud83d",
    "\x1b[31m",
)


def replaced(value: Any) -> Iterator[Any]:
    """Copies of a value, each with one part of it replaced by one of OTHERS."""
    yield from OTHERS
    if isinstance(value, dict):
        for key, item in value.items():
            yield from ({**value, key: each} for each in replaced(item))
    elif isinstance(value, list):
        for place, item in enumerate(value):
            yield from ([*value[:place], each, *value[place + 1 :]] for each in replaced(item))


@pytest.mark.parametrize("body", BODIES, ids=["chat", "anthropic", "responses"])
def test_a_value_of_any_type_at_any_place_is_read_or_named(body: dict[str, Any], tmp_path: Path) -> None:
    rows = [row for row in replaced(body) if isinstance(row, dict)]
    paths = [tmp_path / f"{number}.jsonl" for number in range(len(rows))]
    assert len(rows) > 200
    for path, row in zip(paths, rows, strict=True):
        path.write_text("".join(json.dumps(each) + "\n" for each in (body, row)))
        try:
            assert len(list(load_trace(path))) >= 1
            why(path)
        except (ConfigError, InputError):
            continue
        except Exception as error:
            error.add_note(json.dumps(row))
            raise
