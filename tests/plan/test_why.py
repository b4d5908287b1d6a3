"""`why` names what costs hits: 25 public issues on hit ratios, by their numbers, each as a small input of our own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvarts.base.errors import ConfigError
from kvarts.cli.commands import cli
from kvarts.doors.watch.journal import StreamJournal
from kvarts.doors.watch.watched import Watched
from kvarts.plan.why import RULES, Why, _Partings, why
from kvarts.sim.traffic.prompts import Chat, Prompts

from builders.streams import removed, stored

Row = dict[str, Any]
RULES_TEXT = (
    "You answer questions about the handbook of a company that builds and repairs wooden boats for lakes and rivers. "
    "Each answer names the page and the paragraph it rests on, and says so if the handbook is silent on the matter. "
    "Prices are in the list at the end, and are never guessed, not even for parts that the list has in another size. "
)
QUESTION = "Which varnish does the handbook advise for a hull of larch that lies in fresh water through the winter?"
ANSWER = "Page twelve advises three coats of tung oil varnish, with a day of drying between one coat and the next."
THOUGHT = "The user asks for varnish. Larch is resinous, the water is fresh, so page twelve on oils is the one to cite."


def said(role: str, content: Any, **more: Any) -> Row:
    return {"role": role, "content": content, **more}


def turns(*contents: str, system: str | None = RULES_TEXT) -> list[Row]:
    """Messages of a conversation: a system message, then those of user and assistant in turn."""
    roles = ["user", "assistant"] * len(contents)
    head = [] if system is None else [said("system", system)]
    return [*head, *(said(role, content) for role, content in zip(roles, contents, strict=False))]


def body(messages: list[Row], **more: Any) -> Row:
    return {"model": "m", "max_tokens": 100, "messages": messages, **more}


def tool(name: str, **more: Any) -> Row:
    schema = {"type": "object", "properties": {"path": {"type": "string", "description": f"What to {name}."}}}
    return {"type": "function", "function": {"name": name, "description": f"Can {name} a file.", "parameters": schema}}


def two_turns(first: str, second: str, **more: Any) -> list[Row]:
    """Two turns of one conversation, with other system messages."""
    return [
        body(turns(QUESTION, system=first), **more),
        body(turns(QUESTION, ANSWER, "And for oak?", system=second), **more),
    ]


def call(arguments: str) -> Row:
    function = {"name": "read", "arguments": arguments}
    return said("assistant", "", tool_calls=[{"id": "c1", "type": "function", "function": function}])


TOOLS = [tool(name) for name in ("read", "write", "search", "move")]
CONTEXT = turns(
    QUESTION, ANSWER, "And for oak?", ANSWER.replace("tung", "linseed"), "And for pine?", ANSWER, "And ash?"
)
RESULT = "The list of parts: " + ", ".join(f"part {name} in brass" for name in ("hinge", "cleat", "screw", "lock") * 8)
LOOP = [
    *turns(QUESTION),
    call('{"path":"list"}'),
    said("tool", RESULT, tool_call_id="c1"),
    *turns(ANSWER, "Go on.", system=None)[1:],
]

LAST_USER = """{%- for message in messages -%}
{%- if message.role == 'user' and loop.last -%}
[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]
{%- endif -%}
[{{ message.role }}]{{ message.content }}
{%- endfor -%}
"""
DROPS_THOUGHTS = """{%- set ns = namespace(last=-1) -%}
{%- for message in messages if message.role == 'user' -%}{%- set ns.user = message -%}{%- endfor -%}
{%- for message in messages -%}{%- if message == ns.user -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.reasoning_content and loop.index0 > ns.last -%}
<think>{{ message.reasoning_content }}</think>
{%- endif -%}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""
EMPTY_THOUGHTS = DROPS_THOUGHTS.replace(
    "message.reasoning_content and loop", "message.role == 'assistant' and loop"
).replace("{{ message.reasoning_content }}", "{{ message.reasoning_content or '' }}")
LAST_MARK = """{%- for message in messages -%}
<|{{ message.role }}|>{{ message.content }}
{%- if message.role == 'user' -%}
{{ '<think>' if loop.last else '</think>' }}
{%- endif -%}
{%- endfor -%}
"""
DROPS_INLINE = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if '</think>' in message.content and not loop.last -%}
{{ message.content.split('</think>')[-1].lstrip('\\n') }}
{%- else -%}
{{ message.content }}
{%- endif -%}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""
EFFORT = """{%- if enable_thinking -%}<|system|>Reasoning effort: {{ reasoning_effort }}{%- endif -%}
{%- for message in messages -%}
<|{{ message.role }}|>{{ message.content }}
{%- endfor -%}
"""
HARMONY = DROPS_THOUGHTS.replace("<think>", "<|channel|>analysis<|message|>").replace("</think>", "<|end|>")
LONG = " ".join([RULES_TEXT] * 6)


def thinking_turns(*, sends: bool) -> list[Row]:
    thought = said("assistant", ANSWER, reasoning_content=THOUGHT)
    answered = thought if sends else said("assistant", ANSWER)
    return [
        {**body(turns(QUESTION)), "response": {"choices": [{"message": thought}]}},
        body([*turns(QUESTION), answered, said("user", "And for oak?")]),
    ]


def with_image(url: str, *contents: str) -> Row:
    first = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": QUESTION}]
    rest = turns("", *contents, system=None)[1:]
    return body([said("system", RULES_TEXT), said("user", first), *rest])


ISSUES: list[tuple[str, str, list[Row], dict[str, Any], str]] = [
    ("adolfousier/opencrabs#657", "volatile",
     two_turns(*(f"Timestamp: 2026-07-20 10:00:0{second} UTC\n{RULES_TEXT}" for second in (1, 9))),
     {}, "messages[0] (system), line 1"),
    ("Mintplex-Labs/anything-llm#6398", "volatile",
     two_turns(f"Be brief.\nThe current date and time is Thursday, September 17, 2026 9:59 AM.\n{RULES_TEXT}",
               f"Be brief.\nThe current date and time is Thursday, September 17, 2026 10:01 AM.\n{RULES_TEXT}"),
     {}, "messages[0] (system), line 2"),
    ("aaif-goose/goose#2434", "volatile",
     [body(turns(QUESTION, system=f"It is 2025-05-04 08:5{minute}:11.\n{RULES_TEXT}")) for minute in range(4)],
     {}, "line 1"),
    ("anthropics/claude-code#68900", "volatile",
     [{"model": "m", "max_tokens": 9, "system": [
         {"type": "text", "text": f"x-header: version=2.1; entry=cli; cch={nonce};"},
         {"type": "text", "text": RULES_TEXT}], "messages": turns(QUESTION, system=None)}
      for nonce in ("36ee5", "0aaa9", "fa690")],
     {}, "messages[0] (system), line 1"),
    ("waybarrios/vllm-mlx#277", "volatile",
     two_turns(*(f"header: version=2.1.100.{suffix}; cch={nonce};\n{RULES_TEXT}"
                 for suffix, nonce in (("7b4", "eb6c6"), ("7c1", "defa0")))), {}, "messages[0] (system), line 1"),
    ("vllm-project/vllm#16016", "salt",
     [body(turns(QUESTION), cache_salt=f"salt-{number}") for number in range(3)], {}, "cache_salt: 'salt-1'"),
    ("redpanda-data/ai-sdk-go#157", "tool order",
     [body(turns(QUESTION), tools=TOOLS), body(turns(QUESTION), tools=TOOLS[::-1])], {}, "tools[0] (move)"),
    ("Lakr233/FlowDown#273", "tool keys",
     [body(turns(QUESTION), tools=TOOLS),
      body(turns(QUESTION), tools=[{**each, "function": dict(reversed(each["function"].items()))} for each in TOOLS])],
     {}, "tools[0]"),
    ("anthropics/claude-code#92033", "tools",
     [body(turns(QUESTION), tools=TOOLS[1:]), body(turns(QUESTION, ANSWER, "And for oak?"), tools=TOOLS)],
     {}, "tools[0] (read)"),
    ("nibor1896/Crow#60", "reasoning left out", thinking_turns(sends=False), {}, "messages[2] (assistant)"),
    ("ggml-org/llama.cpp#28987", "template drops reasoning", thinking_turns(sends=True),
     {"chat_template": DROPS_THOUGHTS}, "of the template"),
    ("mdegans/drama_llama#98", "template drops reasoning", thinking_turns(sends=True),
     {"chat_template": HARMONY}, "of the template"),
    ("jundot/omlx#2501", "template",
     [body(turns(QUESTION)), body([*turns(QUESTION), said("assistant", ANSWER), said("user", "And for oak?")])],
     {"chat_template": LAST_MARK}, "line 4 of the template"),
    ("QwenLM/Qwen3.8#131", "template",
     [body(LOOP[:4]), body([*LOOP[:5], *turns("Go on.", system=None)])],
     {"chat_template": EMPTY_THOUGHTS}, "of the template"),
    ("MiaAI-Lab/GLM-5.3-Flash-EXL3-2x-DGX-Sparks#63", "variables",
     [body(turns(QUESTION), chat_template_kwargs={"enable_thinking": thinks, "reasoning_effort": "high"})
      for thinks in (True, False)],
     {"chat_template": EFFORT}, "chat_template_kwargs"),
    ("vllm-project/vllm#40696", "block",
     [body(turns(QUESTION)), body(turns("Which glue does the handbook advise?"))], {"page_size": 528}, "shares"),
    ("vllm-project/vllm#53749", "block",
     [body(turns(question, system=LONG)) for question in (QUESTION, "Which glue?", "Which saw?")],
     {"page_size": 1920}, "shares"),
    ("vllm-project/vllm#3942", "block",
     [{"prompt": list(range(35)), "max_tokens": 1}, {"prompt": [*range(34), 99, 98], "max_tokens": 1}],
     {"page_size": 32}, "shares 34 tokens"),
    ("anomalyco/opencode#32515", "rewritten",
     [body(LOOP), body([*LOOP[:3], said("tool", "[Old result cleared]", tool_call_id="c1"), *LOOP[4:],
                        said("assistant", ANSWER), said("user", "And now?")])],
     {}, "messages[3] (tool), line 1"),
    ("anomalyco/opencode#5224", "system",
     two_turns("Files:\nhull.md\nmast.md\n" + RULES_TEXT, "Files:\nhull.md\nkeel.md\nmast.md\n" + RULES_TEXT),
     {}, "messages[0] (system), line 3"),
    ("HKUDS/nanobot#4568", "shortened",
     [body(CONTEXT, session_id="s"),
      body([CONTEXT[0], *CONTEXT[3:], said("assistant", ANSWER), said("user", "And fir?")], session_id="s")],
     {}, "messages[1] (user)"),
    ("openclaw/openclaw#115273", "shortened",
     [body([CONTEXT[0], *CONTEXT[start:start + 4]], session_id="s") for start in (1, 3)], {}, "messages[1] (user)"),
    ("stanfordnlp/dspy#10216", "json",
     [body([*turns(QUESTION), call('{"path": "list", "lines": 40}'), said("tool", RESULT, tool_call_id="c1")]),
      body([*turns(QUESTION), call('{"lines": 40, "path": "list"}'), said("tool", RESULT, tool_call_id="c1"),
            said("assistant", ANSWER), said("user", "Go on.")])],
     {}, "messages[2] (assistant)"),
    ("vllm-project/vllm#42948", "evicted",
     [body(turns(QUESTION.replace("larch", name), system=f"The {name} desk. {LONG}"))
      for _ in range(2) for name in ("oak", "elm", "ash", "fir")],
     {"pages": 60}, "pages of 16 tokens keep 95 %"),
    ("headroomlabs-ai/headroom#1313", "gone",
     [{**body(turns(QUESTION)), "created": created, "usage": {
         "prompt_tokens": 120, "completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": 0}}}
      for created in (1_700_000_000, 1_700_000_900)],
     {}, "15.0 minutes after it"),
]  # fmt: skip
"""(issue, the rule that it is about, its input, settings, what the place of the first case contains)"""
OURS: list[tuple[str, str, list[Row], dict[str, Any], str]] = [
    ("Mistral's tools at the last question", "template",
     [body(turns(QUESTION), tools=TOOLS), body(turns(QUESTION, ANSWER, "And for oak?"), tools=TOOLS)],
     {"chat_template": LAST_USER}, "line 5 and line 3 of the template"),
    ("a signed URL", "image",
     [with_image("https://x.example/boat.png?sig=one"),
      with_image("https://x.example/boat.png?sig=two", ANSWER, "And for oak?")], {}, "messages[1] (user)"),
    ("an answer without its spaces", "spaces",
     [{**body(turns(QUESTION)), "response": {"choices": [{"message": said("assistant", f"\n\n{ANSWER}")}]}},
      body(turns(QUESTION, ANSWER, "And for oak?"))], {}, "messages[2] (assistant)"),
    ("another model", "model", [body(turns(QUESTION)), body(turns(QUESTION)) | {"model": "n"}], {}, "model: 'n'"),
    ("reasoning in the content", "reasoning left out",
     [{**body(turns(QUESTION)), "response": {"choices": [{"message": said(
         "assistant", f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}")}]}}, body(turns(QUESTION, ANSWER, "And for oak?"))],
     {}, "messages[2] (assistant)"),
    ("reasoning in the content, and a template", "template drops reasoning",
     [{**body(turns(QUESTION)), "response": {"choices": [{"message": said(
         "assistant", f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}")}]}},
      body(turns(QUESTION, f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}", "And for oak?"))],
     {"chat_template": DROPS_INLINE}, "of the template"),
    ("documents before the instructions", "text order",
     [{"model": "m", "max_tokens": 9, "prompt": f"Document: {document}\n\n{RULES_TEXT}"}
      for document in (ANSWER, QUESTION, THOUGHT)], {}, "in prompt, line 1"),
    ("questions before the instructions", "text order",
     [body(turns(f"{question}\n\n{RULES_TEXT}", system=None)) for question in (QUESTION, "Which glue?", "Why so?")],
     {}, "messages[0] (user), line 1"),
    ("a reminder", "inserted",
     [body(CONTEXT), body([*CONTEXT[:2], said("system", "Be brief."), *CONTEXT[2:]])], {}, "messages[2]"),
]  # fmt: skip


def found(tmp_path: Path, rows: list[Row], settings: dict[str, Any]) -> Why:
    path = tmp_path / "log.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    if "chat_template" in settings:
        pytest.importorskip("jinja2")
        template = tmp_path / "template.jinja"
        template.write_text(settings["chat_template"])
        settings = {**settings, "chat_template": str(template)}
    return why(path, **settings)


@pytest.mark.parametrize(("rule", "rows", "settings", "where"), [each[1:] for each in (*ISSUES, *OURS)],
                         ids=[each[0] for each in (*ISSUES, *OURS)])  # fmt: skip
def test_the_cause_is_named(tmp_path: Path, rule: str, rows: list[Row], settings: dict[str, Any], where: str) -> None:
    result = found(tmp_path, rows, settings)
    assert result.losses, "nothing was found"
    first = result.losses[0]
    assert (first.rule, where in first.where) == (rule, True), result.to_text()
    assert 0 < first.tokens <= result.prompt_tokens


def test_the_losses_of_a_log_add_up(tmp_path: Path) -> None:
    """What is mended is found: hits rise by what the losses say, to the page."""
    rows = [body(turns(QUESTION, system=f"At 10:0{minute}.\n{RULES_TEXT}"), created=60 * minute) for minute in range(9)]
    before = found(tmp_path, rows, {})
    (volatile,) = (loss for loss in before.losses if loss.rule == "volatile")
    after = found(tmp_path, [body(turns(QUESTION), created=60 * minute) for minute in range(9)], {})
    assert volatile.requests == 8
    assert after.hit_tokens is not None and before.hit_tokens is not None
    assert abs(after.hit_tokens - before.hit_tokens - volatile.tokens) <= 8 * 16
    assert before.to_text().count("mend: ") == len(before.losses)
    assert json.loads(before.to_json())["losses"][0]["rule"] == "volatile"


def test_a_log_that_only_grows_loses_nothing_but_parts_of_pages(tmp_path: Path) -> None:
    rows = [body(CONTEXT[: 2 * turn]) for turn in (1, 2, 3, 4)]
    result = found(tmp_path, rows, {})
    assert {loss.rule for loss in result.losses} <= {"block"}
    assert result.hit_tokens is not None and result.hit_tokens > 0.6 * result.prompt_tokens


def test_two_prompts_are_compared(tmp_path: Path) -> None:
    for name, minute in (("one.json", 1), ("two.json", 2)):
        text = json.dumps(body(turns(QUESTION, system=f"{RULES_TEXT}\nAt 10:0{minute}.\n{RULES_TEXT}")), indent=1)
        (tmp_path / name).write_text(text)
    (first, *_) = why(tmp_path / "one.json", tmp_path / "two.json").losses
    assert (first.rule, first.requests) == ("volatile", 1)
    assert first.where == "two.json:1 parts from one.json:1 in messages[0] (system), line 2"
    assert "At 10:02" in first.shows[0] and "At 10:01" in first.shows[1]


def test_a_template_that_writes_the_date_is_named(tmp_path: Path) -> None:
    settings = {"chat_template": "{{ strftime_now('%d %b %Y') }}\n{% for m in messages %}{{ m.content }}{% endfor %}"}
    assert "line 1 of the template writes the date" in " ".join(
        found(tmp_path, [body(turns(QUESTION))], settings).notes
    )


def test_traces_without_messages_have_salts_broken_turns_and_evictions(tmp_path: Path) -> None:
    def row(at: int, ids: list[int], **more: Any) -> Row:
        return {"timestamp": at, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids, **more}

    rows = [row(0, [1, 2, 3], session_id="s"), row(1, [1, 9, 3, 4], session_id="s"),
            row(2, [5, 6], tenant="a"), row(3, [5, 6], tenant="b")]  # fmt: skip
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(f"{json.dumps(each)}\n" for each in rows))
    losses = {loss.rule: loss for loss in why(path).losses}
    assert (
        losses["rewritten"].tokens == 2 * 512
        and "row 2 shares 512 of the 1,536 tokens of row 1" in losses["rewritten"].where
    )
    assert losses["salt"].requests == 1
    rows = [row(at, [at % 3 * 2, at % 3 * 2 + 1]) for at in range(9)]
    path.write_text("".join(f"{json.dumps(each)}\n" for each in rows))
    result = why(path, pages=128)
    (evicted,) = result.losses
    assert result.hit_tokens is not None
    assert (evicted.rule, evicted.requests, result.hit_tokens + evicted.tokens) == ("evicted", 6, 6 * 1008)


def test_a_run_has_the_mends_of_its_ledger(tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    trace = tmp_path / "trace.jsonl"
    ids = ([at % 3 * 2, at % 3 * 2 + 1] for at in range(9))
    rows = [{"timestamp": 100_000 * at, "input_length": 1000, "output_length": 1, "hash_ids": each}
            for at, each in enumerate(ids)]  # fmt: skip
    trace.write_text("".join(f"{json.dumps(each)}\n" for each in rows))
    words = ["replay", str(trace), "--pages", "128", "--run-dir", str(tmp_path / "run")]
    cli.main(words, standalone_mode=False)
    capsysbinary.readouterr()
    cli.main(["why", str(tmp_path / "run"), "--json"], standalone_mode=False)
    values = json.loads(capsysbinary.readouterr().out)
    assert (values["requests"], values["prompt_tokens"]) == (9, 9000)
    (evicted,) = (loss for loss in values["losses"] if loss["rule"] == "evicted")
    assert values["hit_tokens"] + evicted["tokens"] == 6 * 992 and evicted["tokens"] > 5000
    assert evicted["requests"] == 6 and "more memory" in evicted["mend"]


@pytest.mark.parametrize(("sizes", "field"), [({"page_size": 0}, "page_size"), ({"pages": 0}, "pages")])
def test_sizes_are_checked(tmp_path: Path, sizes: dict[str, int], field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field}: must be at least 1"):
        found(tmp_path, [body(turns(QUESTION))], sizes)
    with pytest.raises(ConfigError, match="TRACE: are several"):
        why("sample:mooncake", "sample:mooncake")


def test_each_rule_has_words_of_its_own() -> None:
    assert len({rule.name for rule in RULES}) == len({rule.mend for rule in RULES}) == len(RULES)


@pytest.mark.parametrize("prompt", ["a word " * 1500, list(range(10_000))])
def test_requests_that_are_kept_are_bounded_whatever_their_prompt_is(
    prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvarts.plan.why.KEPT_CHARS", 100_000)
    partings = _Partings(Prompts(), 16)
    for _ in range(40):
        partings.add(Chat(prompt=prompt), b"", -1)
    assert sum(len(chat.prompt or ()) for chat in partings._kept.values()) <= 100_000


def test_the_journal_of_an_engine_has_what_it_stored_again(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    """Two blocks are evicted and stored again, and one is stored under a second name while the first is there."""
    path = tmp_path / "journal.jsonl"
    with path.open("wb") as file:
        journal = StreamJournal(file.write, total_blocks=9)
        watched = Watched(journal=journal)
        watched.begin(is_complete=True)
        batches = [[stored([1, 2])], [removed([2, 1])], [stored([1, 2])], [stored([7], token_ids=[1, 1])]]
        for seq, events in enumerate(batches):
            watched.apply(seq, msgspec.msgpack.encode([float(seq), events, 0]))
        journal.close()
    cli.main(["why", str(path), "--json"], standalone_mode=False)
    values = json.loads(capsysbinary.readouterr().out)
    assert values["hit_tokens"] is None and values["prompt_tokens"] == 5 * 2
    assert {loss["rule"]: loss["tokens"] for loss in values["losses"]} == {"evicted": 4, "other name": 2}
    cli.main(["why", str(path)], standalone_mode=False)
    assert b"hits 0" not in capsysbinary.readouterr().out


@pytest.mark.parametrize("data", [b"\x1f\x8bno gzip at all", b"\x1f\x8b", b""])
def test_a_damaged_packed_file_is_an_error_that_names_it(
    kvarts: Callable[..., tuple[int, str, str]], tmp_path: Path, data: bytes
) -> None:
    path = tmp_path / "journal.jsonl.gz"
    path.write_bytes(data)
    code, out, err = kvarts("why", path)
    assert (code, out) == (4, "") and "Traceback" not in err
    assert err.startswith("kvarts: ") and path.name in err


def test_a_run_of_states_names_the_block_at_which_none_is(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    """The second prompt parts where full attention goes on and no state is; the third one finds the state there."""
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 60_000 * at, "input_length": 4096, "output_length": 1, "hash_ids": [1, 2, 3, 4, 5, 10 + at,
             20 + at, 30 + at]} for at in range(3)]  # fmt: skip
    trace.write_text("".join(f"{json.dumps(each)}\n" for each in rows))
    words = ["replay", str(trace), "--model", "qwen3.5-27b", "--device", "h200", "--engine", "vllm==0.33"]
    words += ["--max-seqs", "64", "--run-dir", str(tmp_path / "run")]
    cli.main(words, standalone_mode=False)
    capsysbinary.readouterr()
    cli.main(["why", str(tmp_path / "run"), "--json"], standalone_mode=False)
    values = json.loads(capsysbinary.readouterr().out)
    (loss,) = (loss for loss in values["losses"] if loss["rule"] == "no state")
    assert loss["tokens"] == 3 * 832 and loss["requests"] == 1 and "state" in loss["where"]
    assert values["hit_tokens"] == 3 * 832
