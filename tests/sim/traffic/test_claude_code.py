"""Session files of Claude Code: one request for its several lines, prompts that grow, agents that begin and end."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvarts.base.errors import InputError
from kvarts.sim.config import ReplayConfig
from kvarts.sim.replaying import replay
from kvarts.sim.traffic.formats import load_trace
from kvarts.sim.traffic.trace_request import After

FOLDER = Path(__file__).parent / "forms" / "claude-code"
S = 1_000_000_000


def naive_usage(folder: Path) -> dict[str, tuple[int, int]]:
    """By request, prompt and output tokens: of its last line."""
    found = {}
    for path in sorted(folder.rglob("*.jsonl")):
        for text in path.read_text().splitlines():
            row = json.loads(text)
            if row["type"] == "assistant" and not row.get("isApiErrorMessage"):
                usage = row["message"]["usage"]
                num_prompt = sum(count for name, count in usage.items() if name != "output_tokens")
                found[row["requestId"]] = num_prompt, usage["output_tokens"]
    return found


def test_sums_are_those_of_the_usage() -> None:
    trace, usage = load_trace(FOLDER), naive_usage(FOLDER)
    assert len(usage) == 7
    lengths = sorted((request.num_prompt_tokens, request.num_output_tokens) for request in trace)
    assert lengths == sorted(usage.values())
    assert trace.left_out == {"failed": 1}
    assert "inferred" in trace.said()[0]
    assert [request.session_id for request in trace] == [
        "sess-1", "sess-1", "sess-1/x1/claude-haiku-4-5", "sess-1/x1/claude-haiku-4-5", "sess-1", "sess-1", "sess-2",
    ]  # fmt: skip


def test_requests_wait_as_in_the_recording() -> None:
    trace = load_trace(FOLDER)
    requests = {request.row: request for request in trace}
    assert [request.arrival_ns // S for request in trace] == [0, 6, 7, 10, 60, 301, 1800]
    # Answers end at 5, 20, 9, 12.5 and 64 s. The agent began and ended while the second request ran.
    assert requests[1].after == (After(0, 1 * S),)
    assert requests[2].after == (After(1, 1 * S, of_arrival=True),)
    assert requests[3].after == (After(2, 1 * S),)
    assert requests[4].after == (After(1, 40 * S), After(3, 40 * S))
    assert requests[5].after == (After(4, 237 * S),)
    assert requests[6].after == ()


def test_prompts_begin_with_what_was_sent_before() -> None:
    """One after the other in an endless cache of pages of one token: counted by hand from lengths and cache reads."""
    report = replay(load_trace(FOLDER), ReplayConfig(num_pages=100_000, page_size=1, concurrency=1))
    columns = {name: report.request_columns[name].tolist() for name in ("row", "cached_tokens")}
    cached = dict(zip(columns["row"], columns["cached_tokens"], strict=True))
    # An answer's last token is never computed. 0: nothing yet. 1: the prompt of 0 and its answer. 4: those of 1. 5:
    # after a compaction, what was read. 3: the agent's own. 6: another session has in common what it read.
    assert cached == {0: 0, 1: 4000 + 59, 2: 0, 3: 2510 + 29, 4: 4500 + 39, 5: 3000, 6: 3000}


def test_a_resumed_session_is_counted_once(tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "all")
    (tmp_path / "all" / "sess-3.jsonl").write_text((FOLDER / "sess-2.jsonl").read_text())
    trace = load_trace(tmp_path / "all")
    assert len(list(trace)) == 7
    assert trace.left_out["that another file has as well"] == 1
    one = load_trace(FOLDER / "sess-2.jsonl")
    assert [request.num_prompt_tokens for request in one] == [3500]


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ('"output_tokens": 40', '"output_tokens": -40', "message.usage.output_tokens"),
        ('"timestamp": "2026-04-01T10:00:20.000Z"', '"timestamp": "later"', "timestamp"),
        ('"timestamp": "2026-04-01T10:00:20.000Z", ', "", "timestamp"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, old: str, new: str, field: str) -> None:
    text = (FOLDER / "sess-1.jsonl").read_text()
    assert old in text
    path = tmp_path / "s.jsonl"
    path.write_text(text.replace(old, new))
    with pytest.raises(InputError) as caught:
        load_trace(path)
    assert (caught.value.line, caught.value.field) == (6, field)
    assert load_trace(path, skip_bad_lines=True).num_skipped_lines == 1


def test_a_folder_of_sessions_is_replayed(run_command: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    on = ("--model", "llama-3.1-8b", "--device", "h100-80gb")
    assert run_command("replay", FOLDER, *on, "--concurrency", 2) == 0
    table = " ".join(capsys.readouterr().out.split())
    assert "7 requests" in table and "inferred" in table
