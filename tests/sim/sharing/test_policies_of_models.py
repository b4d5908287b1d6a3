"""Several models on one device under a researcher's own admission policy, and under an eviction order."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.core.kv.eviction import EvictionOrder
from kvarts.sim.config import ReplayConfig
from kvarts.sim.replaying import replay
from kvarts.sim.sharing.config import ModelShare, SharingConfig

from builders.case import Case, cases
from builders.guide_policies import LeastHits, shortest_first
from builders.orders import FewestHits
from builders.policies import patiences_ms


def sharing(names: tuple[str, ...] = ("a", "b"), **each: object) -> SharingConfig:
    models = {name: ModelShare(cost="polynomial", kv_bytes_per_token=2) for name in names}
    config = ReplayConfig(page_size=2, max_num_batched_tokens=16, max_num_seqs=4, **each)  # type: ignore[arg-type]
    return SharingConfig(models=models, kv_memory=400, each=config)


@pytest.mark.laws
@given(cases(max_requests=16), cases(max_requests=16), patiences_ms)
def test_fast_forward_equals_step_by_step(one: Case, other: Case, patience_ms: int) -> None:
    """L5, L8: with a head that changes with time in each model."""
    traces = {"a": one.trace(), "b": other.trace()}
    admission = shortest_first(patience_ms)
    fast, slow = (replay(traces, sharing(admission=admission, step_by_step=slowly)) for slowly in (False, True))
    assert fast.to_json() == slow.to_json()
    for name, report in fast.reports.items():
        assert report.requests_jsonl() == slow.reports[name].requests_jsonl()


@pytest.mark.laws
@given(cases(max_requests=16), cases(max_requests=16), st.sampled_from([LeastHits, FewestHits]))
def test_each_model_evicts_by_an_order_of_its_own(
    one: Case, other: Case, eviction: Callable[[], EvictionOrder]
) -> None:
    """L1 to L3 after every turn, L5, L8: the order says which run of a model goes, and its age which model's."""
    traces = {"a": one.trace(), "b": other.trace()}
    fast, slow = (replay(traces, sharing(eviction=eviction, step_by_step=slowly, audit=slowly))
                  for slowly in (False, True))  # fmt: skip
    assert fast.to_json() == slow.to_json()
    for name, report in fast.reports.items():
        assert report.requests_jsonl() == slow.reports[name].requests_jsonl()
        assert report.summary["config"]["eviction"] == type(eviction()).__name__


@pytest.mark.laws
@given(cases(max_requests=16), cases(max_requests=16))
def test_an_order_of_one_model_is_not_that_of_the_others(one: Case, other: Case) -> None:
    traces = {"a": one.trace(), "b": other.trace()}
    config = sharing(eviction=FewestHits)
    of_a = msgspec.structs.replace(config.models["a"], eviction=LeastHits)
    config = msgspec.structs.replace(config, models={**config.models, "a": of_a})
    fast, slow = (
        replay(traces, msgspec.structs.replace(config, each=each))
        for each in (config.each, msgspec.structs.replace(config.each, step_by_step=True, audit=True))
    )
    assert fast.to_json() == slow.to_json()
    named = {name: report.summary["config"]["eviction"] for name, report in fast.reports.items()}
    assert named == {"a": type(LeastHits()).__name__, "b": type(FewestHits()).__name__}
    alone = msgspec.structs.replace(config, models={"a": of_a})
    same = sharing(("a",), eviction=LeastHits)
    assert (
        replay({"a": one.trace()}, alone).reports["a"].summary == replay({"a": one.trace()}, same).reports["a"].summary
    )


@pytest.mark.laws
@given(cases(max_requests=16))
def test_a_model_alone_evicts_as_in_a_replay_of_one(case: Case) -> None:
    config = sharing(("a",), eviction=LeastHits)
    shared = replay({"a": case.trace()}, config).reports["a"]
    alone = replay(case.trace(), config.configs["a"])
    assert shared.requests_jsonl() == alone.requests_jsonl()
    assert shared.summary == alone.summary


COMMAND = ("replay", "--model", "chat=llama-3.1-8b", "--model", "code=qwen3-8b{}", "--device", "h100-80gb", "--json")


def policies_of(told: bytes) -> dict[str, str]:
    models = json.loads(told)["models"]
    return {name: of_model["config"].get("eviction", "-") for name, of_model in models.items()}


def test_commands_name_the_policy_of_all_models_or_of_one(
    run_command: Callable[..., int],
    capsysbinary: pytest.CaptureFixture[bytes],
    short_traces: list[str],
    tmp_path: Path,
) -> None:
    """`--eviction` was refused with several models, as of one model."""

    def told(of_code: str, *more: str | Path) -> bytes:
        words = [word.format(of_code) for word in COMMAND]
        assert run_command(*words, "--kv-memory", "1GiB", *short_traces, *more) == 0
        return capsysbinary.readouterr().out

    plain, of_one = told(""), told(":eviction=session-aware")
    assert policies_of(plain) == {"chat": "-", "code": "-"}
    assert policies_of(of_one) == {"chat": "-", "code": "SessionAwareOrder"}
    assert policies_of(told("", "--eviction", "auto")) == {"chat": "AutoOrder", "code": "AutoOrder"}
    assert policies_of(told(":eviction=hinted", "--eviction", "auto")) == {"chat": "AutoOrder", "code": "HintedOrder"}
    (tmp_path / "c.toml").write_text('[models.chat]\n[models.code]\neviction = "session-aware"\n')
    assert told("", "--config", tmp_path / "c.toml") == of_one


def test_a_model_names_a_policy_that_there_is(
    run_command: Callable[..., int], capsys: pytest.CaptureFixture[str], short_traces: list[str], tmp_path: Path
) -> None:
    words = [word.format(":eviction=nothing") for word in COMMAND]
    assert run_command(*words, *short_traces) == 2
    assert "--model code: eviction: 'nothing' is not a policy" in capsys.readouterr().err
    (tmp_path / "c.toml").write_text('[models.code]\neviction = "some:Code"\n')
    words = [word.format("") for word in COMMAND]
    assert run_command(*words, *short_traces, "--config", tmp_path / "c.toml") == 2
    assert "models.code.eviction: names code, which no file may" in capsys.readouterr().err
