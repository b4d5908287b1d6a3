"""Mocks that count KV groups, over HTTP: answers report the cached tokens that a replay of the record reports."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from builders import preforked
from builders.http_client import call

pytestmark = pytest.mark.slow

Run = Callable[..., int]
ENGINE = ("--device", "h100-80gb", "--max-seqs", "8", "--page-size", "64")
HYBRID = ("--model", "granite-4.0-h-tiny", *ENGINE, "--kv-memory", "2GiB")
WINDOWS = ("--model", "gpt-oss-20b", *ENGINE, "--kv-memory", "100MiB")
STARTED = ("--model", "gemma-4-31b", "--device", "h200", "--tensor-parallel", "2", "--max-seqs", "8")
SIZED = (*STARTED, "--max-model-len", "3000", "--kv-memory", "1500MiB")
SEVERAL = (
    *("--model", "chat=granite-4.0-h-tiny:mamba_cache_mode=align", "--model", "code=gpt-oss-20b:kv_groups=tails"),
    *(*ENGINE, "--kv-memory", "2GiB"),
)
HOST = ("--host-memory", "16GiB", "--set", "offload.h2d=100GB/s", "--set", "offload.d2h=100GB/s")


def prompts(count: int) -> list[str]:
    """Turns of few conversations, each of which is too long to stay while the others go on."""
    random = Random(7)
    said = [" ".join(random.choices("abcdefgh", k=700)) for _ in range(4)]
    asked = []
    for _ in range(count):
        number = random.randrange(len(said))
        said[number] += " " + " ".join(random.choices("abcdefgh", k=100))
        asked.append(said[number])
    return asked


def served(options: tuple[str, ...], record: Path, names: tuple[str, ...], asked: list[str]) -> dict[str, list[int]]:
    """Ask one model after the other; return the cached tokens of each answer, by model."""
    found: dict[str, list[int]] = {name: [] for name in names}
    command = ("mock", *options, "--speedup", "100", "--port", "0", "--record", record)
    with preforked.start(*map(str, command)) as process:
        assert process.stderr is not None
        url = re.search(r"http://127\.0\.0\.1:\d+", process.stderr.readline())
        assert url is not None
        for number, prompt in enumerate(asked):
            name = names[number % len(names)]
            reply = call(url[0], "/v1/completions", {"model": name, "prompt": prompt, "max_tokens": 20})
            assert reply.status == 200, reply.payload
            found[name].append(reply.json["usage"]["prompt_tokens_details"]["cached_tokens"])
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    return found


def cached(rows: Path) -> list[int]:
    return [json.loads(line)["cached_tokens"] for line in rows.read_text().splitlines()]


@pytest.mark.parametrize(
    "options",
    [
        (*HYBRID, "--set", "mamba_cache_mode=all"),
        (*HYBRID, "--set", "mamba_cache_mode=align", *HOST),
        (*WINDOWS, "--kv-groups", "tails", *HOST),
        SIZED,
    ],
    ids=" ".join,
)
def test_answers_report_the_cached_tokens_of_a_replay(
    options: tuple[str, ...], tmp_path: Path, run_command: Run
) -> None:
    record, rows, (model,) = tmp_path / "run.jsonl", tmp_path / "rows.jsonl", options[1:2]
    more = ("--no-async-scheduling",) if options is SIZED else ()  # as all mocks
    found = served(options, record, (model,), prompts(10))[model]
    assert run_command("replay", record, *options, *more, "--speedup", "0.01", "--requests", rows) == 0
    assert cached(rows) == found
    assert 0 < sum(map(bool, found)) < len(found)


@pytest.mark.parametrize("more", [(), HOST])
def test_answers_of_several_models_report_the_cached_tokens_of_a_replay(
    more: tuple[str, ...], tmp_path: Path, run_command: Run
) -> None:
    names = ("chat", "code")
    found = served((*SEVERAL, *more), tmp_path / "run.jsonl", names, prompts(16))
    traces = [word for name in names for word in ("--trace", f"{name}={tmp_path / f'run-{name}.jsonl'}")]
    assert run_command("replay", *SEVERAL, *more, *traces, "--run-dir", tmp_path / "run") == 0
    for name in names:
        assert cached(tmp_path / "run" / name / "requests.jsonl") == found[name]
        assert any(found[name])
