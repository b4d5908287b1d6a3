"""L11: a replay of the requests behind a front end of vLLM makes the same page decisions, event for event."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from time import sleep
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvarts.core.tiers.config import OffloadConfig
from kvarts.cost.polynomial import LinearCost
from kvarts.doors.vllm_front.core import Behind
from kvarts.sim.config import ReplayConfig
from kvarts.sim.replaying import replay
from kvarts.sim.traffic.logs import RecordedRow, recorded_trace

from builders.fake_front_end import front_end
from builders.parity import Heard, come_to_rest, shifted

tokens = st.integers(0, 3)
prompts = st.one_of(
    st.lists(tokens, min_size=1, max_size=30),
    st.tuples(st.integers(0, 2), st.lists(tokens, max_size=6)).map(lambda pair: [pair[0]] * 17 + pair[1]),
)


class Sent(msgspec.Struct, frozen=True):
    prompt: list[int]
    num_tokens: int = 4
    priority: int = 0
    salt: str | None = None
    delay_ms: float = 0.0


requests = st.builds(
    Sent,
    prompt=prompts,
    num_tokens=st.integers(1, 24),
    priority=st.integers(0, 1),
    salt=st.sampled_from([None, None, "a"]),
    delay_ms=st.sampled_from([0.0, 0.0, 0.3, 1.0]),
)


def config_of(pages: int, page_size: int, budget: int, seqs: int, *, has_host: bool) -> ReplayConfig:
    return ReplayConfig(
        num_pages=pages,
        page_size=page_size,
        max_num_batched_tokens=max(budget, seqs),
        max_num_seqs=seqs,
        cost=LinearCost(step_ms=0.05, chunk_token_ms=0.01, decode_ms=0.01),
        offload=OffloadConfig(host_pages=pages, policy="eager") if has_host else None,
        audit=True,
    )


def served(
    config: ReplayConfig, sent: list[Sent], directory: Path
) -> tuple[list[RecordedRow], list[Any], dict[str, int], dict[str, Any]]:
    """Return the recording, the events, the cached tokens that the front end received, and summed statistics."""
    heard = Heard()
    behind = Behind(max_model_len=1 << 20)
    with front_end(directory, config=config, behind=behind, readers=[heard], is_recording=True) as (front, core):
        open_ids: set[str] = set()
        for number, each in enumerate(sent):
            if each.delay_ms:
                sleep(each.delay_ms / 1000)
            sampling = {"max_tokens": each.num_tokens, "ignore_eos": True}
            front.add(str(number), each.prompt, sampling_params=sampling, priority=each.priority, cache_salt=each.salt)
            open_ids.add(str(number))
        cached: dict[str, int] = {}
        stats: dict[str, Any] = {"hits": 0, "queries": 0, "preempted": 0}

        def read(outputs: dict[str, Any]) -> None:
            for output in outputs["outputs"]:
                if output.get("prefill_stats"):
                    cached[output["request_id"]] = output["prefill_stats"]["num_cached_tokens"]
                stats["preempted"] += sum(each["type"] == 3 for each in output.get("events") or ())
                if output.get("finish_reason") is not None:
                    open_ids.discard(output["request_id"])
            for name, count in ((outputs.get("scheduler_stats") or {}).get("prefix_cache_stats") or {}).items():
                if name in stats:
                    stats[name] += count

        while open_ids:
            read(front.outputs())
        come_to_rest(core.host.loop, [core.host.core])
        assert core.recorder is not None
        rows = core.host.loop.call(lambda _: core.recorder.rows())  # type: ignore[union-attr]
    return rows, heard.events, cached, stats


def assert_same(config: ReplayConfig, rows: list[RecordedRow], live: list[Any]) -> None:
    heard = Heard()
    again = msgspec.structs.replace(config, step_by_step=True)
    replay(recorded_trace(rows), again, observers_of=lambda _: [heard])
    expected = shifted(live, min(row.arrival_ns for row in rows))
    for number, (mine, other) in enumerate(zip(expected, heard.events, strict=False)):
        assert mine == other, f"event {number}"
    assert len(expected) == len(heard.events)


@pytest.mark.laws
@settings(deadline=None, max_examples=settings().max_examples // 2, suppress_health_check=list(HealthCheck))
@given(
    sent=st.lists(requests, min_size=1, max_size=12),
    pages=st.integers(20, 40),
    page_size=st.sampled_from([2, 4]),
    budget=st.sampled_from([4, 16, 64]),
    seqs=st.integers(1, 4),
    has_host=st.booleans(),
)
def test_recorded_run_replays_to_the_same_events(
    tmp_path_factory: pytest.TempPathFactory,
    sent: list[Sent],
    pages: int,
    page_size: int,
    budget: int,
    seqs: int,
    has_host: bool,
) -> None:
    config = config_of(pages, page_size, budget, seqs, has_host=has_host)
    rows, live, _, _ = served(config, sent, tmp_path_factory.mktemp("law"))
    if rows:
        assert_same(config, rows, live)


def test_run_with_preemptions_says_what_its_replay_says(tmp_path: Path) -> None:
    config = config_of(24, 4, 32, 6, has_host=False)
    sent = [Sent([index % 3] * 16 + [index], 20, delay_ms=0.2) for index in range(30)]
    rows, live, cached, stats = served(config, sent, tmp_path)
    assert_same(config, rows, live)
    report = replay(recorded_trace(rows), config)
    assert stats["preempted"] == report.summary["num_preemptions"] > 0
    assert stats["hits"] == sum(cached.values())
    assert stats["queries"] == sum(len(each.prompt) for each in sent)
    assert [cached[str(number)] for number in range(30)] == list(report.requests["cached_tokens"])


@pytest.mark.slow
def test_thousand_requests_of_the_conversation_trace(tmp_path: Path) -> None:
    """Prompts and lengths of the bundled trace, a sixteenth as long, so that 16 tokens stand for 256."""
    text = (files("kvarts") / "data" / "mooncake-conversation-1000.jsonl").read_text()
    sent = []
    for line in text.splitlines():
        row = json.loads(line)
        prompt = [512 * block + place for block in row["hash_ids"] for place in range(32)]
        sent.append(Sent(prompt[: max(1, row["input_length"] // 16)], max(1, row["output_length"] // 16)))
    config = config_of(4096, 16, 8192, 256, has_host=False)
    rows, live, cached, stats = served(config, sent, tmp_path)
    assert len(rows) == 1000
    assert_same(config, rows, live)
    assert stats["hits"] == sum(cached.values()) > 0
