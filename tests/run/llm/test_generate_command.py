"""`kvarts generate` and `kvarts model check`: prompts from anywhere, bad ones by line, chats, and messages."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="real models need kvarts[torch]")
pytest.importorskip("transformers", reason="real models need kvarts[torch]")

from kvarts.base.errors import ConfigError
from kvarts.core.sampling import SamplingParams
from kvarts.run.torch.llm import LLM

Run = Callable[..., int]
Printed = pytest.CaptureFixture[bytes]
TEMPLATE = "{% for one in messages %}<{{ one.role }}>{{ one.content }}{% endfor %}<assistant>"


@pytest.fixture
def options(tiny: Callable[[str], Path]) -> tuple[Any, ...]:
    engine = ("--kv-memory", "1MiB", "--set", "attention=sdpa")
    return ("--model", tiny("qwen3"), "--max-tokens", 5, "--set", "ignore_eos=true", *engine)


def lines_of(printed: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in printed.splitlines()]


def from_input(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8"))


def test_prompts_come_from_standard_input(
    options: tuple[Any, ...], run_command: Run, capsysbinary: Printed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = '{"prompt": "ab"}\n\n{"prompt": [1, 2, 3]}\n'
    (tmp_path / "prompts.jsonl").write_text(text)
    assert run_command("generate", "--prompts", tmp_path / "prompts.jsonl", *options) == 0
    said = capsysbinary.readouterr()
    assert "kvarts: on cpu in float32, attention by sdpa, " in said.err.decode()
    assert "kvarts: 2 of 2 prompts, 10 tokens in " in said.err.decode()
    assert "% in use" in said.err.decode()
    from_input(monkeypatch, text)
    assert run_command("generate", "--prompts", "-", *options) == 0
    assert lines_of(capsysbinary.readouterr().out) == lines_of(said.out)
    from_input(monkeypatch, "ab")
    assert run_command("generate", "--prompt", "-", *options) == 0
    assert capsysbinary.readouterr().out.decode() == lines_of(said.out)[0]["text"] + "\n"
    from_input(monkeypatch, "")
    assert run_command("generate", "--prompts", "-", *options) == 4


def test_a_bad_prompt_is_named_by_its_line_and_the_rest_run_if_asked(
    options: tuple[Any, ...], run_command: Run, capsysbinary: Printed, tmp_path: Path
) -> None:
    path = tmp_path / "prompts.jsonl"
    bad = ['{"prompt": 7}', "{", '{"prompt": [999]}', '{"prompt": ""}', "{}", '{"messages": [{"role": "user"}]}']
    for line in bad:
        path.write_text(f'{{"prompt": "ab"}}\n{line}\n{{"prompt": "cd"}}\n')
        assert run_command("generate", "--prompts", path, *options) == 4
        said = capsysbinary.readouterr()
        assert f"{path}:2: " in said.err.decode() and not said.out
    path.write_text("".join(f'{{"prompt": "ab"}}\n{line}\n' for line in bad))
    assert run_command("generate", "--prompts", path, "--set", "skip_bad=true", *options) == 0
    rows = lines_of(capsysbinary.readouterr().out)
    assert [row.get("line") for row in rows[1::2]] == [2, 4, 6, 8, 10, 12]
    assert all(f"{path}:{row['line']}: " in row["error"] for row in rows[1::2])
    assert {tuple(row["tokens"]) for row in rows[0::2]} == {tuple(rows[0]["tokens"])}


def test_log_probabilities_of_one_prompt(options: tuple[Any, ...], run_command: Run, capsysbinary: Printed) -> None:
    assert run_command("generate", "--prompt", "ab", "--set", "logprobs=true", *options) == 0
    (row,) = lines_of(capsysbinary.readouterr().out)
    assert len(row["logprobs"]) == len(row["tokens"]) == 5


def test_a_conversation_is_made_a_prompt_by_the_template(tiny: Callable[[str], Path]) -> None:
    llm = LLM(tiny("qwen3"), kv_memory="1MiB", attention="sdpa")
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(ConfigError, match="has no chat template"):
        llm.chat(messages, params)
    llm.tokenizer.chat_template = TEMPLATE
    expected = llm.generate(["<user>hi<assistant>"], params)[0]
    (answer,) = llm.chat(messages, params)
    assert answer.tokens == expected.tokens
    more = [*messages, {"role": "assistant", "content": "ho"}, {"role": "user", "content": "hi"}]
    both = llm.chat([messages, more], params)
    assert both[0].tokens == expected.tokens
    assert both[1].tokens == llm.generate(["<user>hi<assistant>ho<user>hi<assistant>"], params)[0].tokens
    wrong: list[Any] = [[], [{"content": "hi"}], ["hi"]]
    for bad in wrong:
        with pytest.raises(ConfigError, match="messages: "):
            llm.chat([bad], params)
    llm.tokenizer.chat_template = "{{ raise_exception('no such role') }}"
    with pytest.raises(ConfigError, match="messages: cannot be made a prompt: no such role"):
        llm.chat(messages, params)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--kv-memory", "900GiB"), "--kv-memory: 900.0 GiB of KV are more than the "),
        (("--device", "foo"), "--device: 'foo' is no device that PyTorch knows"),
        (("--device", "cuda:77"), "--device: 'cuda:77' is not there"),
        (("--seed", str(2**70)), "sampling.seed: must be at most"),
        (("--temperature", "-1"), "sampling.temperature: is out of range"),
        (("--chat",), "has no chat template"),
    ],
)
def test_what_cannot_be_is_a_message(
    options: tuple[Any, ...], run_command: Run, capsysbinary: Printed, more: tuple[str, str], says: str
) -> None:
    assert run_command("generate", "--prompt", "a", *options, *more) == 2
    assert says in capsysbinary.readouterr().err.decode()


def test_check_says_what_a_model_asks_for(
    tiny: Callable[[str], Path], run_command: Run, capsysbinary: Printed, tmp_path: Path
) -> None:
    model = tiny("gemma3")
    assert run_command("model", "check", model, "--set", "attention=sdpa", "--prompts", 3, "--json") == 0
    found = json.loads(capsysbinary.readouterr().out)
    assert found["is_exact"] and found["num_alike"] == found["num_tokens"] == 48
    assert found["windows"] == {"24": 2, "all": 2} and found["attention"] == "sdpa"
    assert run_command("model", "check", tmp_path / "nothing") == 3
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    assert run_command("model", "check", tmp_path) == 2


def test_a_small_model_is_not_written_over_another(tiny: Callable[[str], Path], run_command: Run) -> None:
    directory = tiny("llama")
    before = (directory / "model.safetensors").read_bytes()
    assert run_command("model", "tiny", directory) != 0
    assert (directory / "model.safetensors").read_bytes() == before


def test_guesses_change_no_answer(
    options: tuple[Any, ...], run_command: Run, capsysbinary: Printed, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "abababababab"}\n{"prompt": "a"}\n')
    asked = ("generate", "--prompts", prompts, *options, "--max-tokens", 30)
    assert run_command(*asked) == 0
    plain = capsysbinary.readouterr()
    assert "guessed" not in plain.err.decode()
    for config in ("ngram", '{"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 4}'):
        assert run_command(*asked, "--speculative-config", config) == 0
        said = capsysbinary.readouterr()
        assert said.out == plain.out
        assert "guessed tokens were right" in said.err.decode()
    for config in ("medusa", '{"num_speculative_tokens": 0}', "{"):
        assert run_command(*asked, "--speculative-config", config) == 2
        assert "speculative" in capsysbinary.readouterr().err.decode()
