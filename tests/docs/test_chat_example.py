"""The chat of docs/examples: with a mock, with a server of OpenAI's API, and in a session over gRPC."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc", reason="needs kvarts[grpc]")
pytest.importorskip("openai", reason="the example talks to servers with it")
import chat

from kvarts.doors.openai.running import RunningServer

from builders.fake_runtime import FakeRuntime
from builders.real_model import real_model
from builders.server_process import kvarts_process
from builders.session_server import serving_on_a_thread

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def _typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n\nagain, ä"))


@pytest.mark.usefixtures("_typed")
def test_a_mock_in_this_process_finds_the_first_turn(capsys: pytest.CaptureFixture[str]) -> None:
    chat.main([])
    said = capsys.readouterr()
    assert all(line.islower() for line in said.out.splitlines()) and len(said.out.splitlines()) == 2
    found = re.findall(r"TTFT \d+ ms, \d+ tokens, (\d+) of \d+ prompt tokens found\n", said.err)
    assert [int(number) > 30 for number in found] == [False, True]


@pytest.mark.usefixtures("_typed")
def test_a_server_receives_the_whole_conversation(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    answers = [{"turn": 1, "text": "One ä."}, {"turn": 2, "text": "Two."}]
    with RunningServer(served_model_name="some-name", api_key="secret", answers=answers) as server:
        chat.main([server.base_url])
        bodies = [request.body for request in server.requests]
    assert capsys.readouterr().out == "One ä.\nTwo.\n"
    assert [message["content"] for message in bodies[1]["messages"]] == ["hello", "One ä.", "again, ä"]
    assert [bodies[1][name] for name in ("model", "temperature", "max_tokens")] == ["some-name", 0.0, 128]


@pytest.mark.usefixtures("_typed")
def test_an_answer_that_is_cut_is_not_part_of_the_conversation(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with RunningServer(served_model_name="m", api_key="secret", fail="first 1: no finish_reason; rest: ok") as server:
        chat.main([server.base_url])
        bodies = [request.body for request in server.requests]
    assert capsys.readouterr().err.startswith("the stream ended before the answer did")
    assert [message["content"] for message in bodies[1]["messages"]] == ["again, ä"]


@pytest.mark.usefixtures("_typed")
def test_a_session_receives_what_each_turn_adds_and_is_closed(capsys: pytest.CaptureFixture[str]) -> None:
    runtime = FakeRuntime()
    with serving_on_a_thread(runtime) as address:
        chat.main([address, "--max-tokens", "3", "--window", "64"])
    said = capsys.readouterr()
    assert [len(line) for line in said.out.splitlines()] == [3, 3]
    first, second = said.err.splitlines()
    assert first.startswith("3 tokens, ") and first.endswith(" of 9 tokens")
    assert second.endswith(" of 22 tokens")  # 6 + 3 and 10 + 3: the bytes of both lines, and both answers
    assert runtime.sessions == {}


def test_bytes_as_text() -> None:
    text = chat.ByteText()
    assert text.tokens("ä", is_first=True, end=None) == [0xC3, 0xA4, 10]
    write = text.writer()
    assert [write(token) for token in (0xC3, 0xA4, 300, 65)] == ["", "ä", "<300>", "A"]


@pytest.mark.parametrize("has_template", [False, True])
def test_a_turn_adds_what_the_whole_conversation_has_more(tmp_path: Path, *, has_template: bool) -> None:
    pytest.importorskip("transformers", reason="a model's tokenizer needs kvarts[torch]")
    from kvarts.run.torch.tiny import byte_tokenizer

    tokenizer: Any = byte_tokenizer()
    if has_template:
        tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    text = chat.ModelText(str(tmp_path))
    assert text.eos_ids == (256,)

    def added(line: str, *, is_first: bool, end: int | None) -> str:
        return str(tokenizer.decode(text.tokens(line, is_first=is_first, end=end)))

    if not has_template:
        assert added("hä", is_first=True, end=None) == "hä\n"
        write = text.writer()
        assert "".join(write(token) for token in [*text.tokens("hä", is_first=True, end=None), 256]) == "hä\n"
        return
    assert added("hi", is_first=True, end=None) == "<user>hi<end>\n<assistant>"
    rest = "\n<user>so<end>\n<assistant>"
    assert added("so", is_first=False, end=None) == f"<end>{rest}"
    assert added("so", is_first=False, end=256) == rest


@pytest.mark.long
@pytest.mark.usefixtures("_typed")
@pytest.mark.parametrize("over", ["HTTP", "gRPC"])
def test_a_real_model_says_text_that_ends(
    over: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch", reason="real models need kvarts[torch]")
    real_model()
    monkeypatch.setattr("sys.stdin", io.StringIO("What is the capital of France?\nAnd of Italy?\nAnd Spain?"))
    command = ["serve", "model", "--port", "0"] if over == "HTTP" else ["serve", "sessions", "--port", "0"]
    with kvarts_process(*command, "--model", "smollm2", "--kv-memory", "64MiB") as server:
        if over == "HTTP":
            chat.main([server.wait_for(r"(http://\S+)/v1")[1]])
        else:
            chat.main([server.wait_for(r"listening on (\S+) for")[1], "--model", "smollm2"])
    said = capsys.readouterr()
    assert said.out.startswith("The capital of France is Paris.\n") and "Rome" in said.out
    if over == "gRPC":
        kept, length = re.findall(r"(\d+) of (\d+) tokens", said.err.splitlines()[-1])[0]
        assert int(length) > 80 and int(length) - int(kept) < 16, "all whole pages of the conversation are kept"
