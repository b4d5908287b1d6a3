"""Replays that count KV groups: what a user says and sees of them."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvarts.base.errors import ConfigError
from kvarts.core.content import pack_units
from kvarts.core.kv.groups import PartGroup
from kvarts.core.kv.layers import KvLayer
from kvarts.proof.record.timeline import timelines_of
from kvarts.proof.verify import verify_file
from kvarts.sim.config import SECTIONS, TABLES, ReplayConfig, make_config
from kvarts.sim.replaying import replay
from kvarts.sim.report.advice import advice
from kvarts.sim.report.report import Report
from kvarts.sim.traffic.trace import Trace
from kvarts.sim.traffic.trace_request import TraceRequest
from kvarts.sim.traffic.workload import FixedLength, Workload

from builders.case import Case, Row
from builders.command_line import parsed
from builders.grouped import FULL, STATES, WINDOW, assert_grouped_as_in_naive

GROUPS = (PartGroup(FULL, 1), WINDOW)


def traffic(**changes: Any) -> Workload:
    settings: dict[str, Any] = {
        "num_sessions": 6,
        "turns_per_session": 2,
        "new_tokens": FixedLength(1500),
        "output_tokens": FixedLength(40),
        "sessions_per_s": 1.0,
        **changes,
    }
    return Workload(**settings)


def replayed(model: str, **changes: Any) -> Report:
    return replay(traffic(), make_config({"model": model, "device": "h100-80gb", **changes}))


def test_a_model_of_full_layers_is_replayed_as_ever() -> None:
    off, on = (replayed("llama-3.1-8b", kv_groups=way) for way in ("off", "all"))
    assert on.to_json() == off.to_json()
    assert on.requests_jsonl() == off.requests_jsonl()


def test_groups_are_counted_unless_they_are_off() -> None:
    settings: list[dict[str, str]] = [{}, {"kv_groups": "all"}, {"kv_groups": "off"}]
    on, asked, off = (replayed("gemma-3-27b", engine="none", **given) for given in settings)
    assert on.to_json() == asked.to_json()
    assert on.summary["config"]["kv_groups"] == "all"
    assert "kv_groups" not in off.summary and "kv_groups" not in off.summary["config"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"profile": "mocker"}, "profile does not go with KV groups: Dynamo's mocker knows whole pages only"),
        pytest.param(
            {"offload.host_memory": "8GB", "offload.full_prompt_hits": True},
            "full_prompt_hits does not go with KV groups: the last token of a prompt may see what no hit needs",
        ),
    ],
)
def test_the_default_gives_way_to_what_it_does_not_go_with(changes: dict[str, Any], why: str) -> None:
    sections = [*SECTIONS, *TABLES]
    given = {"model": "gemma-3-27b", "device": "h100-80gb", "engine": "none", **changes}
    config = make_config(given, sections=sections)
    assert config.whole_pages == why
    assert msgspec.structs.replace(config, whole_pages="") == make_config(
        {**given, "kv_groups": "off"}, sections=sections
    )
    stated = config.to_builtins()
    assert (stated["kv_groups"], stated["whole_pages"]) == ("off", why)
    with pytest.raises(ConfigError, match="does not go with KV groups"):
        make_config({**given, "kv_groups": "all"}, sections=sections)


def test_an_error_that_whole_pages_have_too_is_theirs() -> None:
    with pytest.raises(ConfigError, match="speedup: must be above 0"):
        make_config({"model": "gemma-3-27b", "device": "h100-80gb", "speedup": 0})


def test_memory_is_that_of_whole_pages_and_holds_more() -> None:
    off, on = (replayed("gemma-3-27b", kv_groups=way).summary for way in ("off", "all"))
    assert on["config"]["pages"] == off["config"]["pages"]
    assert on["total_blocks"] * on["block_bytes"] == on["config"]["pages"] * on["config"]["page_bytes"]
    full, window = on["kv_groups"]
    assert (full["kind"], full["layers"], window["kind"], window["layers"], window["tokens"]) == (
        "full", 10, "window", 52, 1024,
    )  # fmt: skip
    assert window["peak_used_parts"] < full["peak_used_parts"]
    assert on["peak_used_pct"] < off["peak_used_pct"]


def test_every_row_of_a_timeline_adds_up_over_groups(tmp_path: Path) -> None:
    report = replayed("gemma-3-27b", kv_groups="tails")
    (timeline,) = timelines_of(report)
    blocks = np.array([group["part_blocks"] for group in report.summary["kv_groups"]])
    for what in ("used", "cached"):
        parts = timeline.columns[f"group_{what}_parts"]
        assert (parts @ blocks).tolist() == timeline.columns[f"{what}_blocks"].tolist()
    for form in ("t.json", "t.jsonl"):
        timeline.write(tmp_path / form, every=3)
        assert verify_file(tmp_path / form).verdict == "ok"
    body = json.loads((tmp_path / "t.json").read_bytes())
    assert [group["part_blocks"] for group in body["kv_groups"]] == blocks.tolist()
    assert len(body["timeline"][0]["group_used_parts"]) == 2
    parquet = pytest.importorskip("pyarrow.parquet")
    timeline.write(tmp_path / "t.parquet")
    column = parquet.read_table(tmp_path / "t.parquet").column("group_used_parts").to_pylist()
    assert column == timeline.columns["group_used_parts"].tolist()


def traced(prompts: list[list[int]]) -> Trace:
    """A prompt every two seconds, of which two tokens are generated."""
    rows = [
        TraceRequest(index, index * 2 * 10**9, array("Q", prompt).tobytes(), len(prompt), 2)
        for index, prompt in enumerate(prompts)
    ]
    return Trace(rows, unit_tokens=1)


@pytest.mark.parametrize("tokens", [1023, 1024, 1025, 2048])
def test_a_prompt_of_whole_pages_is_found_again_from_its_snapshot(tokens: int) -> None:
    """The last token is computed again, so that a prompt of 1,024 tokens resumes from the state after 1,008."""
    config = make_config({"model": "granite-4.0-h-tiny", "device": "h100-80gb", "engine": "none", "audit": True})
    rows = [TraceRequest(row, row * 10**10, pack_units([7] * tokens), tokens, 1) for row in range(3)]
    longer = TraceRequest(3, 4 * 10**10, pack_units([7] * tokens + [8] * 50), tokens + 50, 1)
    cached = replay(Trace([*rows, longer]), config).request_columns["cached_tokens"].tolist()
    resumed = (tokens - 1) // 16 * 16
    assert cached == [0, resumed, resumed, tokens // 16 * 16]


@pytest.mark.parametrize(("mode", "cached"), [("snapshots", 0), ("all", 1392), ("align", 1392)])
def test_states_by_page_are_found_where_a_prompt_leaves_others(mode: str, cached: int) -> None:
    """Prompts of 1,500 tokens share their first 1,400. In `align`, the second ends a chunk there."""
    trace = traced([[*range(1400), *range(5000 + 100 * index, 5100 + 100 * index)] for index in range(3)])
    config = make_config(
        {"model": "granite-4.0-h-tiny", "device": "h100-80gb", "kv_groups": "all", "mamba_cache_mode": mode}
    )
    report = replay(trace, config)
    found = report.request_columns["cached_tokens"].tolist()
    assert found == ([0, cached, cached] if mode == "all" else [0, 0, cached])


def test_in_align_the_chunks_of_a_prompt_end_at_pages() -> None:
    """Of 100 tokens, a step computes 96, and the next one the rest."""
    trace = traced([list(range(100))])
    given = {"model": "granite-4.0-h-tiny", "device": "h100-80gb", "kv_groups": "all"}
    for mode, tokens in (("snapshots", [100, 1]), ("all", [100, 1]), ("align", [96, 4, 1])):
        report = replay(trace, make_config({**given, "mamba_cache_mode": mode}))
        assert report.steps["tokens"].tolist() == tokens


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"mamba_cache_mode": "none"}, "Use one of snapshots, all, align"),
        ({"model": "gemma-3-27b", "mamba_cache_mode": "all"}, "has no effect without layers with a state"),
        ({"mamba_cache_mode": "all", "kv_groups": "off"}, "has no effect without layers with a state"),
        ({"mamba_cache_mode": "all", "snapshots": "branches"}, "snapshots: has no effect"),
        ({"mamba_cache_mode": "align", "no_prefix_caching": True}, "such an engine keeps no states for prefixes"),
    ],
)
def test_what_does_not_go_with_states_by_page_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        make_config({"model": "granite-4.0-h-tiny", "device": "h100-80gb", "kv_groups": "all", **changes})


def test_a_state_is_found_at_the_last_page_end_of_a_prompt() -> None:
    report = replay(
        traffic(turns_per_session=1, num_sessions=4, new_tokens=FixedLength(1), prefix_tokens=1599),
        make_config({"model": "granite-4.0-h-tiny", "device": "h100-80gb", "kv_groups": "all"}),
    )
    # 1,600 tokens are 100 pages; the last token is computed, so a hit is of 99 pages, and a snapshot is there as well.
    assert report.summary["num_cached_tokens"] == 3 * 1584
    report = replay(
        traffic(turns_per_session=1, num_sessions=4, new_tokens=FixedLength(2), prefix_tokens=1600),
        make_config({"model": "granite-4.0-h-tiny", "device": "h100-80gb", "kv_groups": "all"}),
    )
    assert report.summary["num_cached_tokens"] == 3 * 1600
    assert {group["kind"] for group in report.summary["kv_groups"]} == {"full", "state"}


@pytest.mark.parametrize(("page_size", "warns"), [(16, True), (64, False), (128, False)])
def test_pages_smaller_than_what_a_hash_id_stands_for_are_warned_of(page_size: int, warns: bool) -> None:
    """The next turn has another id for the last block of a prompt, so a snapshot within it is never found."""
    prompts = [[*range(length), 60 + length] for length in (40, 41, 42)]
    rows = [Row(2000 * place, units, 64 * len(units) - 20, 1, None, 0, None) for place, units in enumerate(prompts)]
    case = Case(rows, 64, page_size, 100_000 // page_size, 8192, 4, "default", 1)
    report = replay(case.trace(), case.config(kv_groups="all", groups=STATES))
    warnings = report.summary.get("warnings", [])
    assert [warning.partition(":")[0] for warning in warnings] == [
        "layers have a state, and a hash id of the trace stands for 64 tokens"
    ] * warns
    assert (report.summary["num_cached_tokens"] == 0) == warns
    whole = replay(case.trace(), case.config())
    assert "warnings" not in whole.summary and whole.summary["num_cached_tokens"] > 0


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model": "llama-3.1-8b"}, "has no effect without layers with a state"),
        ({"model": "granite-4.0-h-tiny", "kv_groups": "off"}, "has no effect without layers with a state"),
    ],
)
def test_snapshots_are_of_models_with_states(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=f"snapshots: {why}"):
        make_config({"device": "h100-80gb", "snapshots": "branches", **changes})


def test_a_window_that_goes_one_token_too_early_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the naive engine looks at tokens, and does not ask a layer for its first one."""
    case = Case([Row(0, [1, 2, 3, 4], 16, 30, None, 0, None)], 4, 4, 20, 64, 8, "default", 1)
    assert_grouped_as_in_naive(case, GROUPS, "all")
    first_seen = KvLayer.first_seen
    monkeypatch.setattr(KvLayer, "first_seen", lambda layer, position: first_seen(layer, position + 1))
    with pytest.raises(AssertionError, match="used"):
        assert_grouped_as_in_naive(case, GROUPS, "all")


def test_what_never_fits_is_refused_with_what_it_needs() -> None:
    config = ReplayConfig(num_pages=4, page_size=4, max_num_batched_tokens=256, kv_groups="all", groups=GROUPS)
    report = replay(traffic(new_tokens=FixedLength(30), output_tokens=FixedLength(3), turns_per_session=1), config)
    assert report.summary["num_rejected"] == 6
    assert report.requests["reason"][0] == (
        "needs 24 blocks of 1 bytes for 30 prompt and 3 output tokens, with 256 tokens a step; the memory has 12"
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"groups": ()}, "kv_groups: says nothing without one model. Give a model and a"),
        ({"profile": "mocker"}, "profile: does not go with KV groups: Dynamo's mocker knows whole pages only"),
        ({"kv_groups": "some"}, "kv_groups: must be 'off', 'all' or 'tails', got 'some'"),
        ({"kv_groups": "off"}, "groups: are given, and kv_groups is off"),
        ({"num_pages": 1 << 40}, "num_pages: make 3,298,534,883,328 blocks of 1 bytes"),
    ],
)
def test_what_does_not_combine_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        ReplayConfig(**{"kv_groups": "all", "groups": GROUPS, **changes})
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--kv-groups all", "--kv-groups: says nothing without one model. Give a model and a device, or"),
        ("--model gemma-3-27b --device h100-80gb --kv-groups all --profile mocker", "--profile: does not go with KV"),
        ("--model gemma-3-27b --device h100-80gb --kv-groups all --kv-memory 1MB", "--kv-memory: 1MB hold no page of"),
    ],
)
def test_what_the_command_line_refuses(arguments: str, says: str) -> None:
    from kvarts.sim.config import resolve_replay

    with pytest.raises(ConfigError) as refused:
        resolve_replay(parsed(*arguments.split()))
    assert says in str(refused.value)


def test_files_find_what_host_memory_has_lost() -> None:
    """Leaps, steps and audited steps agree; with files, more is hit."""
    given = {"model": "gemma-3-27b", "device": "h100-80gb", "offload.host_pages": 300}
    sections = [*SECTIONS, *TABLES]
    without, config = (
        msgspec.structs.replace(make_config({**given, **more}, sections=sections), num_pages=200)
        for more in ({}, {"offload.disk_pages": 4000})
    )
    assert config.kv_groups == "all"
    files = replay(traffic(), config)
    for changes in ({"step_by_step": True}, {"audit": True}):
        other = replay(traffic(), msgspec.structs.replace(config, **changes))
        assert other.requests_jsonl() == files.requests_jsonl()
    assert files.request_columns["disk_tokens"].sum() > 0
    assert (
        files.request_columns["cached_tokens"].sum() > replay(traffic(), without).request_columns["cached_tokens"].sum()
    )


def test_advice_names_a_tier_with_groups_as_well() -> None:
    config = ReplayConfig(num_pages=110, page_size=4, kv_groups="all", groups=GROUPS)
    report = replay(
        traffic(
            new_tokens=FixedLength(100), num_sessions=8, turns_per_session=3, sessions_per_s=0.1, think_time_s=30.0
        ),
        config,
    )
    assert report.summary["num_evicted_pages"]
    assert "try --host-memory " in (report.advice or "")
    assert "--host-memory" not in (advice(report.summary) or "")
