"""Replays that start as a version of vLLM starts; `tests/equal` compares their steps with vLLM's scheduler."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from inspect import isfunction
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvarts.base.errors import ConfigError
from kvarts.base.settings import given_by_keywords
from kvarts.cli.replaying import all_sections
from kvarts.core.content import pack_units
from kvarts.core.kv.block_sizes import SizedParts, SizedTree
from kvarts.core.sched.policy import PriorityPolicy
from kvarts.sim.config import ReplayConfig, resolve_replay
from kvarts.sim.replay import open_replica
from kvarts.sim.replaying import replay
from kvarts.sim.routers.config import Routing
from kvarts.sim.traffic.logs import RecordedRow, recorded_trace
from kvarts.sim.traffic.trace import Trace, TraceRequest

from builders.case import Case, Row


def started(model: str, device: str = "h100-80gb", engine: str = "vllm==0.32", **given: Any) -> ReplayConfig:
    return ReplayConfig.for_device(model, device, engine=engine, **given)


def test_windows_come_first_and_retain_few_parts() -> None:
    """gpt-oss-20b: 12 layers with windows are the first group of vLLM's plan; one of its blocks is no block."""
    config = started("gpt-oss-20b", pages=150_186)
    assert [(group.layer.kind, group.num_layers) for group in config.memory.groups] == [("window", 12), ("full", 12)]
    assert (config.page_size, config.max_num_batched_tokens, config.max_num_seqs) == (16, 8192, 1024)
    assert (config.num_blocks, config.retention_interval, config.async_scheduling) == (150_185, 0, True)
    assert config.to_builtins()["start"]["lines"][-1].startswith("GPU KV cache size: 2,133,894 tokens")


def test_blocks_of_several_sizes_are_counted_in_pieces() -> None:
    """Gemma 4: full layers have half as many heads as those with windows, and blocks of 32 tokens next to 16."""
    config = started("gemma-4-31b", "h200", tensor_parallel=2, engine="vllm==0.33")
    memory = config.memory
    assert [group.block_pages for group in memory.groups] == [1, 1, 1, 1, 1, 2]
    assert (config.page_size, memory.hit_pages, memory.num_pieces, config.retention_interval) == (16, 2, 2, 0)
    assert config.start is not None
    assert config.num_blocks == 2 * (config.start.num_blocks - 1)


REFUSED = [
    ("--eviction session-aware", "does not go with an eviction order other than LRU"),
    ("--host-memory 8GiB", "host memory has pages of one size"),
    ("--set sessions.window=64 --set prefix_cache_retention_interval=none", "sessions: they keep pages of one size"),
    ("--prefill replicas=1 --decode replicas=1", "a fleet: workers send pages of one size"),
]
"""Options that a replay with blocks of several sizes refuses, and the words of the refusal."""


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_what_blocks_of_several_sizes_do_not_support_is_refused_by_name(
    options: str,
    words: str,
    tmp_path: Path,
    run_command: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 20, "output_length": 2, "hash_ids": [1]}\n')
    model = ("--model", "gemma-4-31b", "--device", "h200", "--tensor-parallel", "2", "--engine", "vllm==0.33")
    assert run_command("replay", trace, *model, *options.split()) == 2
    assert words in capsys.readouterr().err


def test_a_run_with_blocks_of_several_sizes_is_verified_from_its_events(
    tmp_path: Path, run_command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    """Three turns of one conversation, of which the second finds 576 tokens and the third 992, in blocks of 32."""
    turns = [(0, 600, [1, 2]), (60_000, 1000, [1, 2]), (120_000, 1300, [1, 2, 3])]
    fields = ("timestamp", "input_length", "hash_ids", "output_length")
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(dict(zip(fields, (*turn, 20), strict=True))) + "\n" for turn in turns))
    model = ("--model", "gemma-4-31b", "--device", "h200", "--tensor-parallel", "2", "--engine", "vllm==0.33")
    assert run_command("replay", trace, *model, "--run-dir", tmp_path / "run") == 0
    capsys.readouterr()
    rows = (tmp_path / "run" / "requests.jsonl").read_text().splitlines()
    assert [json.loads(row)["cached_tokens"] for row in rows] == [0, 576, 992]
    assert run_command("verify", tmp_path / "run") == 0
    assert re.search(r"group_parts +ok", capsys.readouterr().out)


def audited(seed: int) -> tuple[Trace, ReplayConfig]:
    """Return random traffic on little memory, and gemma-4-31b as vLLM starts it, with an audit."""
    draw = random.Random(seed)
    scale = draw.choice([1, 4])  # 4: requests are longer than the windows of 1,024 tokens
    config = started(
        "gemma-4-31b",
        "h200",
        tensor_parallel=2,
        engine=draw.choice(["vllm==0.33", "vllm==0.32"]),
        pages=draw.choice([330, 360, 500, 800]) + (450 if scale > 1 else 0),
        max_model_len=700 * scale + 200,
        max_batched_tokens=256,
        max_seqs=8,
        async_scheduling=draw.choice([True, False]),
        audit=True,
        cost="linear:step_ms=1",
    )
    rows: list[TraceRequest] = []
    arrival_ns = 0
    for index in range(30):
        arrival_ns += draw.choice([0, 0, 1, 20]) * 10**6
        stem, end = scale * draw.randint(1, 400), scale * draw.randint(1, 200)
        units = [draw.randrange(3)] * stem + [100 + draw.randrange(3)] * end
        rows.append(TraceRequest(index, arrival_ns, pack_units(units), len(units), draw.randint(1, 150)))
    return Trace(rows), config


@pytest.mark.parametrize("seed", range(8))
def test_an_audit_follows_blocks_of_several_sizes(seed: int) -> None:
    """Laws L1 to L4, by a ledger that takes the pages of a block at once and names them by the block's end."""
    trace, config = audited(seed)
    assert replay(trace, config).summary["num_evicted_pages"] > 0


DAMAGES: list[tuple[type, str, Callable[[Any], Any], str]] = [
    (SizedTree, "needed", lambda real: lambda self, index, tokens: real(self, index, tokens + 64), "a later token"),
    (SizedTree, "match", lambda real: lambda self, content, limit: real(self, content, max(0, limit - 4)), "be hit"),
    (SizedParts, "_num_beyond", lambda real: lambda self, table, index: 0, "counted"),
]
"""Methods of the parts and of their index, each with a damage to it, and words of the audit."""


@pytest.mark.skipif(not isfunction(SizedTree.match), reason="methods of a compiled class call each other directly")
@pytest.mark.parametrize(("owner", "method", "damage", "words"), DAMAGES, ids=[each[1] for each in DAMAGES])
def test_an_audit_of_blocks_of_several_sizes_finds_damage(
    owner: type, method: str, damage: Callable[[Any], Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, method, damage(getattr(owner, method)))

    def replayed() -> None:
        for seed in range(8):
            replay(*audited(seed))

    with pytest.raises(AssertionError, match=words):  # of the ledger, or of the engine's own laws
        replayed()


def test_a_hit_is_a_multiple_of_the_longest_block() -> None:
    """A prompt of 80 tokens: the same one finds 64, and one that leaves it after 48 finds 32."""
    rows = [Row(0, [0, 1, 2, 3, 4], 80, 1, None, 0, None), Row(1000, [0, 1, 2, 3, 4], 80, 1, None, 0, None)]
    rows.append(Row(2000, [0, 1, 2, 9, 9], 80, 1, None, 0, None))
    case = Case(rows, 16, 16, 300, 64, 4, "default", 1)
    groups = started("gemma-4-31b", tensor_parallel=2).memory.groups
    report = replay(case.trace(), case.config(kv_groups="all", groups=groups, prefix_cache_retention_interval=0))
    assert report.request_columns["cached_tokens"].tolist() == [0, 64, 32]


@pytest.mark.parametrize(
    ("model", "given"),
    [("gpt-oss-20b", {"pages": 150_188}), ("gemma-3-27b", {}), ("gemma-4-31b", {"tensor_parallel": 2})],
)
def test_a_replay_has_all_blocks_of_the_start(model: str, given: dict[str, Any]) -> None:
    """Also those that are no whole page in all groups."""
    config = started(model, **given)
    assert config.start is not None
    total = open_replica(config, ()).engine.scheduler.cache.pool.total
    assert total == config.num_blocks == (config.start.num_blocks - 1) * config.memory.num_pieces
    assert total > config.memory.num_blocks(config.num_pages)


def test_a_router_finds_hits_by_events_of_blocks_of_several_sizes() -> None:
    """Of two replicas, the one that has computed a prompt of 80 tokens is sent it again, and finds 64."""
    rows = [Row(1000 * number, [number % 2] * 5, 80, 1, None, 0, None) for number in (0, 1, 3, 2, 4, 7)]
    case = Case(sorted(rows, key=lambda row: row.arrival_ms), 16, 16, 300, 64, 4, "default", 2)
    groups = started("gemma-4-31b", tensor_parallel=2).memory.groups
    late = {"router": "prefix", "routing": Routing(event_lag="5ms")}
    config = case.config(kv_groups="all", groups=groups, prefix_cache_retention_interval=0, **late)
    columns = replay(case.trace(), config).request_columns
    assert columns["cached_tokens"].tolist() == [0, 0, 64, 64, 64, 64]


def test_states_are_in_the_pool() -> None:
    """Qwen3.5-27B: three groups of states before a full one, in blocks of 784 tokens."""
    config = started("qwen3.5-27b", "h200", max_seqs=64)
    memory = config.memory
    assert [group.layer.kind for group in memory.groups] == ["state", "state", "state", "full"]
    assert (config.page_size, memory.aligns, memory.num_state_blocks) == (784, True, 0)


@pytest.mark.parametrize(
    ("model", "engine"), [("qwen3.5-27b", "vllm==0.33"), ("nemotron-3-nano-30b-a3b", "vllm==0.32")]
)
def test_states_are_saved_inside_the_last_chunk_of_a_prompt(model: str, engine: str) -> None:
    """A prompt of 3 blocks and 100 tokens in one chunk leaves the state after the third block."""
    config = started(model, "h200", engine=engine, max_seqs=64, pages=600, async_scheduling=False, step_by_step=True)
    size = config.page_size
    length = 3 * size + 100
    rows = [Row(time_ms, [0, 1, 2, 3], length, 1, None, 0, None) for time_ms in (0, 9000)]
    case = Case(rows, size, 16, 300, 64, 4, "default", 1)
    report = replay(case.trace(), msgspec.structs.replace(config, audit=True))
    assert config.memory.saves_inside
    assert report.request_columns["cached_tokens"].tolist() == [0, 3 * size]


def test_one_group_is_counted_in_whole_pages() -> None:
    config = started("qwen3-8b", pages=5000)
    assert (config.kv_groups, config.num_pages, config.retention_interval) == ("off", 4999, None)
    small = started("qwen3-8b", "l4", max_model_len=8192)
    assert (small.max_num_batched_tokens, small.max_num_seqs) == (2048, 256)


def test_a_prompt_of_whole_pages_is_found_again_up_to_its_last_page() -> None:
    """With interval 0, a prompt of 48 tokens retains what it resumes with after 32; a longer one finds no more."""
    rows = [Row(0, [0, 1, 2], 48, 1, None, 0, None), Row(1000, [0, 1, 2], 48, 1, None, 0, None)]
    rows.append(Row(2000, [0, 1, 2, 3], 64, 1, None, 0, None))
    case = Case(rows, 16, 16, 300, 64, 4, "default", 1)
    window = started("gpt-oss-20b").memory.groups
    report = replay(case.trace(), case.config(kv_groups="all", groups=window, prefix_cache_retention_interval=0))
    dense = replay(case.trace(), case.config(kv_groups="all", groups=window))
    assert report.request_columns["cached_tokens"].tolist() == [0, 32, 32]
    assert dense.request_columns["cached_tokens"].tolist() == [0, 32, 48]


@pytest.mark.parametrize(
    ("model", "engine", "given", "words"),
    [
        ("gpt-oss-20b", "vllm==0.32", {"pages": 100}, "To serve at least one request"),
        ("qwen3.5-27b", "vllm==0.32", {"pages": 1500, "max_model_len": 4000, "max_seqs": 2000}, "exceeds available"),
        ("gpt-oss-20b", "vllm==0.32", {"kv_groups": "tails"}, "is what engine decides"),
        ("gpt-oss-20b", "vllm==0.32", {"session_window": 64}, "does not go with sessions or sinks"),
        ("gpt-oss-20b", "sglang", {"max_model_len": 100}, "is of a start of vLLM"),
        ("gpt-oss-20b", "vllm", {"prefix_cache_retention_interval": 24}, "must be none, 0 or a multiple of 16 tokens"),
    ],
)
def test_what_does_not_start_says_why(model: str, engine: str, given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        started(model, engine=engine, **given)


def test_a_model_whose_layers_keep_less_starts_without_an_engine() -> None:
    for model in ("gpt-oss-20b", "nemotron-3-nano-30b-a3b"):
        assert ReplayConfig.for_device(model, "h200") == started(model, "h200", engine="vllm==0.33")
    for config in (
        ReplayConfig.for_device("qwen3-8b", "h200"),
        ReplayConfig.for_device("gpt-oss-20b", "h200", engine="none"),
    ):
        assert (config.engine, config.start, config.not_started, config.max_num_seqs) == ("none", None, "", 256)


@pytest.mark.parametrize(
    ("model", "given", "words"),
    [
        ("gpt-oss-20b", {"pages": 1000}, "pages is given, and a start decides it"),
        ("gpt-oss-20b", {"kv_groups": "tails"}, "kv_groups is given"),
        ("gpt-oss-20b", {"session_window": 64}, "does not go with sessions or sinks"),
        ("gemma-3-27b", {"kv_memory": "1GiB"}, "does not start on h100-80gb: To serve at least one request"),
    ],
)
def test_without_an_engine_what_does_not_start_is_replayed_without_a_start(
    model: str, given: dict[str, Any], words: str
) -> None:
    config = ReplayConfig.for_device(model, "h100-80gb", **given)
    assert words in config.not_started
    assert msgspec.structs.replace(config, not_started="") == ReplayConfig.for_device(
        model, "h100-80gb", engine="none", **given
    )


def test_the_refusal_is_that_of_vllm_if_nothing_fits_without_a_start_either() -> None:
    """The states of 256 sequences of Qwen3.6-27B do not fit next to its weights, and vLLM has 395 blocks for them."""
    with pytest.raises(ConfigError, match="exceeds available Mamba cache blocks") as refused:
        ReplayConfig.for_device("qwen3.6-27b", "h100-80gb")
    assert refused.value.hint == "Give max_seqs 395."
    config = ReplayConfig.for_device("qwen3.6-27b", "h100-80gb", max_seqs=395)
    assert config.start is not None and config.start.num_blocks >= 395


def test_states_are_not_in_the_error_of_a_device_that_is_too_small() -> None:
    for engine in ({}, {"engine": "vllm"}):
        with pytest.raises(ConfigError, match="nemotron-h-56b does not fit") as refused:
            ReplayConfig.for_device("nemotron-h-56b", "h100-80gb", **engine)
        assert "0.92 x 80.00 memory" in refused.value.what and "states" not in refused.value.what


def test_the_text_of_ids_decides_between_arrivals_at_one_time() -> None:
    """12 requests arrive together and run one at a time; 10 runs before 2, and 3 is the most important."""
    rows = [Row(0, [index], 16, 1, None, 3 if index == 3 else 0, None) for index in range(12)]
    case = Case(rows, 16, 100, 64, 64, 1, "default", 1)
    report = replay(case.trace(), case.config(scheduling_policy="priority"))
    order = np.argsort(report.request_columns["first_token_ns"]).tolist()
    assert order == [3, *sorted(set(range(12)) - {3}, key=str)]
    with pytest.raises(ConfigError, match="does not go with an order of your own"):
        case.config(scheduling_policy="priority", admission=type("Own", (PriorityPolicy,), {}))


@pytest.mark.parametrize(
    ("given", "load_kv"),
    [
        ({"engine": "vllm==0.33"}, "async"),
        ({"engine": "vllm==0.33", "load_kv": "placed"}, "placed"),
        ({"engine": "vllm==0.33", "load_overlap": "layers"}, "placed"),
        ({"engine": "none"}, "placed"),
    ],
)
def test_loads_of_a_start_are_those_of_vllm_s_connectors_where_they_combine(
    given: dict[str, Any], load_kv: str
) -> None:
    sections = all_sections()
    asked = {"model": "llama-3.1-8b", "device": "h100-80gb", "host_memory": "8GiB", **given}
    config = resolve_replay(given_by_keywords(asked, sections), sections)
    assert config.offload is not None and config.offload.load_kv == load_kv


# Drafts ---------------------------------------------------------------------------------------------------

DRAFTS: dict[str, Any] = {"speculative_tokens": 3, "acceptance": "0.8,0.6,0.4"}


def cached_of(config: ReplayConfig, *prompts: tuple[int, ...]) -> list[int]:
    """Return the tokens that prompts find, one after the other, each of runs of 16 equal tokens."""
    rows = [
        TraceRequest(place, place * 60 * 10**9, pack_units(prompt), 16 * len(prompt), 20)
        for place, prompt in enumerate(prompts)
    ]
    cached: list[int] = replay(Trace(rows, unit_tokens=16), config).request_columns["cached_tokens"].tolist()
    return cached


@pytest.mark.parametrize(("engine", "again", "longer"), [("vllm==0.33", 112, 112), ("vllm==0.32", 96, 112)])
def test_with_drafts_the_last_block_is_computed_again(engine: str, again: int, longer: int) -> None:
    """0.33 finds a block if the token after it is the same; 0.32 drops the last of those that it finds."""
    config = started("llama-3.1-8b", engine=engine, **DRAFTS)
    assert config.start is not None and config.start.drafts is not None
    one, two = tuple(range(8)), (*range(8), 100)
    assert cached_of(config, one, one) == [0, again]
    assert cached_of(config, one, two) == [0, longer]
    assert cached_of(started("llama-3.1-8b", engine=engine), one, two) == [0, 128]


@pytest.mark.parametrize("engine", ["vllm==0.32", "vllm==0.33"])
@pytest.mark.parametrize(("method", "is_async"), [("mtp", True), ("eagle3", False), ("ngram", False)])
def test_drafts_generate_tokens_at_the_rates_that_are_given(engine: str, method: str, is_async: bool) -> None:
    """Each step verifies 4 tokens and generates 2.8 on average; nothing is lost in small memory."""
    config = started(
        "llama-3.1-8b",
        engine=engine,
        pages=300,
        max_model_len=600,
        async_scheduling=is_async,
        cost="linear:step_ms=1",
        speculative_method=method,
        **DRAFTS,
    )
    rows = [TraceRequest(place, place * 10**6, pack_units([place, 50]), 100, 400) for place in range(20)]
    report = replay(Trace(rows, unit_tokens=64), config)
    assert report.summary["num_completed"] == 20 and report.summary["num_preemptions"] > 0
    alone = replay(Trace(rows[:1], unit_tokens=64), config)
    assert alone.summary["num_steps"] / 400 == pytest.approx(1 / 2.8, rel=0.12)


@pytest.mark.parametrize(
    ("model", "given"),
    [
        ("qwen3.5-27b", {"engine": "vllm==0.32", "max_seqs": 8}),
        ("qwen3.5-27b", {"engine": "vllm==0.33", "max_seqs": 8}),
        ("nemotron-3-nano-30b-a3b", {"engine": "vllm==0.33", "max_seqs": 8, "async_scheduling": False}),
        ("gemma-4-31b", {"engine": "vllm==0.33", "tensor_parallel": 2}),
        ("gpt-oss-20b", {"engine": "vllm==0.33", "speculative_method": "eagle3"}),
    ],
)
def test_drafts_of_models_that_keep_less_generate_tokens_at_the_rates_that_are_given(
    model: str, given: dict[str, Any]
) -> None:
    asked = {"max_model_len": 4000, "cost": "linear:step_ms=1", **DRAFTS, **given}
    rows = [TraceRequest(place, place * 10**6, pack_units([place, 50, 51]), 2400, 400) for place in range(20)]
    alone = replay(Trace(rows[:1], unit_tokens=1200), started(model, **asked))
    assert alone.summary["num_steps"] / 400 == pytest.approx(1 / 2.8, rel=0.12)
    report = replay(Trace(rows, unit_tokens=1200), started(model, **asked))
    assert report.summary["num_completed"] == 20


@pytest.mark.parametrize(
    ("model", "given", "words"),
    [
        ("qwen3.5-27b", {"max_seqs": 16, "engine": "vllm==0.32", "speculative_method": "eagle"}, "every layer's hits"),
        ("nemotron-3-nano-30b-a3b", {"engine": "vllm==0.32"}, "names states inside chunks"),
        ("llama-3.1-8b", {"speculative_method": "ngram"}, "one step after the other"),
        ("llama-3.1-8b", {"speculative_method": "medusa"}, "is not modelled"),
        (
            "llama-3.1-8b",
            {"speculative_method": "eagle", "speculative_tokens": 0, "acceptance": None},
            "has no effect without",
        ),
        ("gpt-oss-20b", {"engine": "vllm==0.32", "speculative_method": "eagle3"}, "if the drafting layers keep all"),
        ("llama-3.1-8b", {"host_memory": "8GiB"}, "names blocks otherwise with a connector"),
        ("llama-3.1-8b", {"max_batched_tokens": 512, "max_seqs": 256}, "drafted tokens each need"),
    ],
)
def test_drafts_that_are_not_scheduled_as_in_vllm_are_refused(model: str, given: dict[str, Any], words: str) -> None:
    def opened() -> object:
        return open_replica(started(model, **{"engine": "vllm==0.33", **DRAFTS, **given}), ())

    with pytest.raises(ConfigError, match=words):
        opened()


def test_with_drafts_a_request_beyond_the_longest_is_refused_alone() -> None:
    config = started("llama-3.1-8b", **{"engine": "vllm==0.33", **DRAFTS, "max_model_len": 1000})
    lengths = {900: 20, 990: 20, 1500: 20}
    rows = [
        RecordedRow(arrival_ns=0, prompt=[place] * length, num_output_tokens=count, output=[5] * count)
        for place, (length, count) in enumerate(lengths.items())
    ]
    report = replay(recorded_trace(rows), config)
    assert (report.summary["num_completed"], report.summary["num_rejected"]) == (1, 2)
    assert report.advice is not None and report.advice.endswith("1,520 tokens; try --set max_model_len=1520 or more")
