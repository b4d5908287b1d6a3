"""Several models on one device, each with host memory, and perhaps files, below its part."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from test_sharing_groups_laws import Device, devices
from test_sharing_laws import Sharing, everything, sharings

from kvarts import replay
from kvarts.core.tiers.config import LoadKv, OffloadConfig
from kvarts.sim.sharing.config import SharingConfig
from kvarts.sim.sharing.report import SharedReport

from builders.case import Case, Row
from builders.kept import Kept

pytestmark = pytest.mark.laws


@st.composite
def offloads(draw: st.DrawFn) -> OffloadConfig:
    """Small tiers and slow channels: everything that makes transfers meet evictions."""
    rate = draw(st.sampled_from(["100B/s", "1kB/s", "100kB/s", "1GB/s"]))
    load_kv: LoadKv = draw(st.sampled_from(("placed", "placed", "async", "sync")))
    return OffloadConfig(
        load_kv=load_kv,
        host_pages=draw(st.sampled_from([1, 3, 8, 40])),
        disk_pages=draw(st.sampled_from([None, None, 2, 30])),
        policy=draw(st.sampled_from(["eager", "lazy"])),
        target_free=draw(st.sampled_from([None, 1, 4, 20])),
        full_prompt_hits=draw(st.booleans()),
        h2d=rate,
        d2h=draw(st.sampled_from(["100B/s", "1kB/s", "1GB/s"])),
        disk_read=rate,
        disk_write=rate,
        fail_every=0 if load_kv == "sync" else draw(st.sampled_from([0, 0, 0, 3])),
    )


def without_settings(summary: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in summary.items() if name != "config"}


LIKE = [Row(0, [0] * 11, 22, 1, None, 0, tenant) for tenant in (None, "a", None, None)]
STORES_HOLD_PAGES = (
    Sharing([Case(LIKE, 2, 2, 27, 4, 1, "default", 1)], 2, [4], [0], [1], [0], [1000], 55, 3, 1),
    OffloadConfig(host_pages=3, policy="lazy", h2d="100B/s", d2h="100B/s"),
)
"""A request that waits finds pages that are held by a store, and needs fewer than when it was found to lack memory."""


@example(*STORES_HOLD_PAGES)
@given(sharings(max_models=1), offloads())
def test_a_model_alone_with_tiers_is_a_replay_of_one(case: Sharing, tiers: OffloadConfig) -> None:
    """One model with all of the memory and all of the tokens is a replay of one with the same tiers."""
    of_model = case.cases[0]
    case = Sharing([of_model], case.page_size, case.page_bytes[:1], [0], [1], [0], [1000], case.num_bytes,
                   case.total_tokens, case.max_num_seqs)  # fmt: skip
    shared = case.run(offload=tiers, audit=True)
    report = shared.reports["m0"]
    config = shared.config.configs["m0"]
    assert config.offload == tiers.for_model(case.page_bytes[0] // case.page_size)
    alone = replay(of_model.trace(), msgspec.structs.replace(config, audit=True))
    assert report.requests_jsonl() == alone.requests_jsonl()
    assert report.summary == alone.summary
    for name, column in alone.steps.items():
        assert report.steps[name].tolist() == column.tolist(), name
    (log,) = alone.step_logs
    for name, column in log.rests.items():
        assert shared.devices[0].logs["m0"].rests[name].tolist() == column.tolist(), name


@given(sharings(max_models=2, max_requests=20), offloads(), st.booleans())
def test_with_tiers_too_it_is_the_same_observed_and_step_by_step(
    case: Sharing, tiers: OffloadConfig, is_static: bool
) -> None:
    """L1, L2, L3 after every turn; L5; L8."""
    if is_static and min(case.guarantees) < max(case.page_bytes):
        is_static = False
    fast = case.run(offload=tiers, static_split=is_static)
    kept = [Kept() for _ in case.cases]
    slow = case.run(kept, offload=tiers, static_split=is_static, audit=True, step_by_step=True)
    assert everything(fast) == everything(slow)
    for name, report in fast.reports.items():
        summary = report.summary
        assert summary["num_failed"] == 0
        rests = fast.devices[0].logs[name].rests
        assert not len(fast.devices[0].logs[name]) or rests["used"].max() == 0
        for tier in tiers.sizes(case.page_size):
            assert not len(fast.devices[0].logs[name]) or rests[f"{tier}_used"].max() == 0


@st.composite
def of_parts(draw: st.DrawFn) -> OffloadConfig:
    """The same for parts of pages: hits of whole prompts are refused."""
    return msgspec.structs.replace(draw(offloads()), full_prompt_hits=False)


@given(devices(max_models=1), of_parts())
def test_a_model_alone_with_groups_and_tiers_is_a_replay_of_one(case: Device, tiers: OffloadConfig) -> None:
    """As above, in blocks: promises to requests that wait for loads are those of a device of its own."""
    (model,) = case.models
    model.guarantee, model.floor, model.ceiling = 0, 0, None
    case.num_bytes -= case.num_bytes % model.whole_page
    shared = case.run(offload=tiers, audit=True)
    alone = replay(model.case.trace(), msgspec.structs.replace(shared.config.configs["m0"], audit=True))
    report = shared.reports["m0"]
    assert report.requests_jsonl() == alone.requests_jsonl()
    for name, column in alone.steps.items():
        assert report.steps[name].tolist() == column.tolist(), name


@given(devices(max_models=3, max_requests=16), of_parts(), st.booleans())
def test_with_groups_and_tiers_too_it_is_the_same_step_by_step(
    case: Device, tiers: OffloadConfig, is_static: bool
) -> None:
    """L1, L2, L3 after every turn; L5: models with groups and with whole pages, each with tiers of its own."""
    is_static = is_static and case.can_be_split
    fast, slow = (
        case.run(offload=tiers, static_split=is_static, audit=True, step_by_step=slowly) for slowly in (False, True)
    )
    for name, report in fast.reports.items():
        assert report.requests_jsonl() == slow.reports[name].requests_jsonl()
        assert report.to_json() == slow.reports[name].to_json()
        assert report.summary["num_failed"] == 0


@given(sharings(), st.sampled_from(["eager", "lazy"]))
def test_host_memory_of_no_pages_is_none(case: Sharing, policy: Any) -> None:
    plain, empty = case.run(), case.run(offload=OffloadConfig(host_pages=0, policy=policy))
    assert everything(plain)[1:] == everything(empty)[1:]
    for name, report in plain.reports.items():
        assert without_settings(report.summary) == without_settings(empty.reports[name].summary)


@given(sharings(max_models=2, max_requests=20), offloads(), st.data())
def test_models_that_fall_ill_leave_nothing_behind(case: Sharing, tiers: OffloadConfig, data: st.DataObject) -> None:
    """Requests that wait for loads are cancelled while these are under way; a degraded model admits what it loads."""
    traces = {f"m{place}": of_model.trace() for place, of_model in enumerate(case.cases)}
    assert_nothing_left(case.config(offload=tiers, audit=True), traces, data)


@given(devices(max_models=2, max_requests=16), of_parts(), st.data())
def test_models_with_groups_that_fall_ill_leave_nothing_behind(
    case: Device, tiers: OffloadConfig, data: st.DataObject
) -> None:
    """As above: what is promised to such requests, and parts that their loads hold, states by page among them."""
    assert_nothing_left(case.config(offload=tiers, audit=True), case.traces, data)


def assert_nothing_left(config: SharingConfig, traces: dict[str, Any], data: st.DataObject) -> None:
    names = st.sampled_from(list(traces))
    states = st.sampled_from(["dead", "dead", "degraded", "healthy"])
    changes = data.draw(st.lists(st.tuples(names, states, st.integers(0, 400)), min_size=1, max_size=4))
    health = tuple(f"{name}={state}@{ms / 1000:.3f}" for name, state, ms in changes)
    report: SharedReport = replay(traces, msgspec.structs.replace(config, health=health))
    for name, of_model in report.reports.items():
        summary = of_model.summary
        ended = summary["num_completed"] + summary["num_rejected"] + summary["num_failed"]
        assert ended == len(traces[name].requests or ())
        assert not len(report.devices[0].logs[name]) or report.devices[0].logs[name].rests["used"].max() == 0


# The command -----------------------------------------------------------------------------------------------

MODELS = ["--model", "chat=llama-3.1-8b:weight=2", "--model", "code=qwen3-8b:weight=1"]
DEVICE = ["--device", "h100-80gb", "--kv-memory", "4GiB"]


@pytest.mark.slow
def test_each_model_has_host_memory_of_its_own(
    tmp_path: Path, run_command: Callable[..., int], capsysbinary: pytest.CaptureFixture[bytes], short_traces: list[str]
) -> None:
    command = [
        "replay",
        *MODELS,
        *short_traces,
        "--device",
        "h100-80gb",
        "--kv-memory",
        "4GiB",
        "--host-memory",
        "1GiB",
        "--offload",
        "lazy",
        "--json",
    ]
    assert run_command(*command) == 0
    printed = capsysbinary.readouterr().out
    assert run_command(*command, "--run-dir", tmp_path) == 0
    assert capsysbinary.readouterr().out == printed
    models = msgspec.json.decode(printed)["models"]
    for name, token_bytes in (("chat", 131_072), ("code", 147_456)):
        assert models[name]["config"]["offload"]["kv_bytes_per_token"] == token_bytes
        assert models[name]["transfers"]["num_stores"] > 0
        capsysbinary.readouterr()
        assert run_command("verify", tmp_path / name / "timeline.json.gz") == 0
        assert "host" in (tmp_path / name / "report.json").read_text()


@pytest.mark.slow
def test_a_model_with_states_by_page_has_them_in_its_host_memory(
    tmp_path: Path, run_command: Callable[..., int], capsysbinary: pytest.CaptureFixture[bytes], short_traces: list[str]
) -> None:
    models = ["--model", "chat=granite-4.0-h-tiny:mamba_cache_mode=align,kv_groups=tails", "--model", "code=qwen3-8b"]
    below = [
        "--host-memory",
        "8GiB",
        "--set",
        "offload.disk_memory=8GiB",
        "--set",
        "offload.store_within_ms=0.1",
        "--page-size",
        256,
    ]
    command = ["replay", *models, *short_traces, *DEVICE, *below, "--json"]
    assert run_command(*command, "--audit", "--run-dir", tmp_path) == 0
    printed = capsysbinary.readouterr().out
    assert run_command(*command, "--step-by-step") == 0
    of_models = msgspec.json.decode(printed)["models"]
    again = msgspec.json.decode(capsysbinary.readouterr().out)["models"]
    for name in ("chat", "code"):
        assert again[name]["ttft_ms"] == of_models[name]["ttft_ms"]
        capsysbinary.readouterr()
        assert run_command("verify", tmp_path / name / "timeline.json.gz") == 0
    (state,) = [place for place, group in enumerate(of_models["chat"]["kv_groups"]) if group["kind"] == "state"]
    assert of_models["chat"]["transfers"][f"num_stored_parts_group{state}"] > 0


def test_bytes_of_a_token_are_those_of_each_model(
    tmp_path: Path, run_command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "c.toml"
    config.write_text("[offload]\nhost_pages = 9\nkv_bytes_per_token = 2\n[models.a]")
    assert run_command("replay", "--config", config) == 2
    says = f"{config}: offload.kv_bytes_per_token: is for a replay of one model: a token of each of several weighs what"
    assert capsys.readouterr().err.startswith(f"kvarts: {says}")
