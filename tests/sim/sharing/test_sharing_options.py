"""Several models, as the command line, a file and Python describe them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvarts import ConfigError, ModelShare, ReplayConfig, SharingConfig
from kvarts.base.settings import given_in
from kvarts.cli.replaying import all_sections
from kvarts.cost.hardware.model_config import load_geometry
from kvarts.sim.sessions import SessionReplay
from kvarts.sim.sharing.config import check_each, resolve_shares

from builders.command_line import parsed

SECTIONS = all_sections()
DATA = Path(__file__).parents[3] / "src" / "kvarts" / "data"
NUMBERS: dict[str, Any] = {"cost": "polynomial", "kv_bytes_per_token": 64}


def test_the_command_line_is_laid_over_the_tables_of_a_file() -> None:
    file = {
        "kv_memory": "1GiB",
        "max_seqs": 7,
        "slo": {"e2e_ms": 3.0},
        "models": {"a": {**NUMBERS, "weight": 2}, "b": {**NUMBERS, "guarantee": 0.25}},
    }
    command = "--model c=:cost=polynomial,kv_bytes_per_token=8 --model a=:weight=3,priority=1 --set health=b=dead@3"
    given = parsed(*command.split(), "--slo-ttft-ms", "5", "--set", "static_split=true").over(given_in(file, SECTIONS))
    config = resolve_shares(given, SECTIONS)
    assert config.models == {
        "a": ModelShare(**NUMBERS, weight=3.0, priority=1),
        "b": ModelShare(**NUMBERS, guarantee=0.25),
        "c": ModelShare(cost="polynomial", kv_bytes_per_token=8),
    }
    assert (config.static_split, config.kv_bytes, config.each.max_num_seqs) == (True, 1 << 30, 7)
    assert (config.each.slo.ttft_ms, config.each.slo.e2e_ms) == (5.0, 3.0)
    assert config.guaranteed_bytes == {"a": 603979776, "b": 1 << 28, "c": 201326592}
    assert config.changes[0].time_ns == 3_000_000_000


def test_python_says_the_same_with_values() -> None:
    models = {"a": ModelShare(**NUMBERS, weight=3.0), "b": ModelShare(**NUMBERS)}
    config = SharingConfig(models=models, kv_memory="1MiB", each=ReplayConfig(page_size=8, audit=True))
    assert {name: of_model.num_pages for name, of_model in config.configs.items()} == {"a": 2048, "b": 2048}
    assert all(of_model.audit and of_model.page_size == 8 for of_model in config.configs.values())
    split = SharingConfig(models=models, kv_memory="1MiB", each=ReplayConfig(page_size=8), static_split=True)
    assert {name: of_model.num_pages for name, of_model in split.configs.items()} == {"a": 1536, "b": 512}


def test_an_engine_does_not_plan_ahead_where_models_take_turns() -> None:
    command = "--model a=:cost=polynomial,kv_bytes_per_token=8 --kv-memory 1MiB --engine vllm"
    (of_model,) = resolve_shares(parsed(*command.split()), SECTIONS).configs.values()
    assert (of_model.max_num_batched_tokens, of_model.engine, of_model.async_scheduling) == (8192, "vllm", False)
    with pytest.raises(ConfigError, match="does not go with several models on a device: models take turns"):
        resolve_shares(parsed(*command.split()[:-2], "--set", "async_scheduling=true"), SECTIONS)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"models": {}}, "models: names no model"),
        ({"reclaim_after_s": -1.0}, "reclaim_after_s: must be at least 0, got -1.0"),
        ({"reclaim_after_s": float("nan")}, "reclaim_after_s: must be at least 0, got nan"),
        (
            {"models": {"a": ModelShare(floor=600, ceiling=500, **NUMBERS)}},
            "models.a.floor: must be from 0 to 500 per mille, got 600",
        ),
        (
            {"models": {"a": ModelShare(ceiling=900, **NUMBERS)}},
            "models.a.ceiling: leaves 100 per mille of the time to no model",
        ),
        ({"health": ("c=dead@1",)}, "health: is of 'c', which is no model"),
        ({"health": ("a=dad@1",)}, "health: 'a=dad@1' is not NAME=STATE@SECONDS"),
        ({"each": ReplayConfig(num_pages=2)}, "num_pages: is for a replay of one model"),
        ({"memory_fraction": 2.0}, "memory_fraction: must be above 0"),
        ({"kv_memory": "auto"}, "kv_memory: is not known"),
        (
            {"models": {"a": ModelShare(priority=2, **NUMBERS)}, "each": ReplayConfig(profile="mocker")},
            "models.a.priority: is 2, and the mocker knows no priorities",
        ),
        ({"kv_memory": 63}, "kv_memory: 63 bytes hold no page of 1,024 bytes"),
        ({"models": {"a": ModelShare(model="qwen3-8b")}}, "models.a.model: says nothing without a device"),
        (
            {"models": {"a": ModelShare(snapshots="branches", **NUMBERS)}},
            "models.a.snapshots: has no effect without layers with a state",
        ),
        (
            {"each": ReplayConfig(max_itl_ms=5.0)},
            "max_itl_ms: does not go with several models on a device: steps of the other models lie between",
        ),
        ({"each": ReplayConfig(stop_tokens=True)}, "stop_tokens: has no effect without asynchronous scheduling"),
        ({"models": {"a": ModelShare(guarantee="2MiB", **NUMBERS)}}, "models.a.guarantee: all guarantees are"),
    ],
)
def test_from_python_an_error_names_the_field(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(says)}"):
        SharingConfig(**{"models": {"a": ModelShare(**NUMBERS)}, "kv_memory": "1MiB", **values})


def test_states_of_all_models_are_set_aside() -> None:
    each = ReplayConfig(max_num_seqs=8)
    states = 8 * load_geometry("granite-4.0-h-tiny").state_bytes
    models = {"a": ModelShare(model="granite-4.0-h-tiny", kv_groups="off"), "b": ModelShare(model="qwen3-0.6b")}
    given = SharingConfig(models=models, each=each, device="h100-80gb", kv_memory="4GiB")
    assert given.kv_bytes == (4 << 30) - states
    fits = SharingConfig(models=models, each=each, device="h100-80gb")
    more = SharingConfig(models=models, each=ReplayConfig(max_num_seqs=16), device="h100-80gb")
    logits = 2 * 4 * 8 * load_geometry("qwen3-0.6b").vocab_size
    assert abs(fits.kv_bytes - more.kv_bytes - states) <= logits, "and the logits of as many sequences"
    with pytest.raises(ConfigError, match=r"kv_memory: 1MiB hold no more than .* bytes of states"):
        SharingConfig(models=models, each=each, device="h100-80gb", kv_memory="1MiB")


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"num_pages": 3}, "num_pages"),
        ({"cost": print}, "cost"),
    ],
)
def test_what_several_models_do_not_combine_with_is_refused(values: dict[str, Any], field: str) -> None:
    check_each(ReplayConfig())
    with pytest.raises(ConfigError, match="is for a replay of one model") as caught:
        check_each(ReplayConfig(**values))
    assert caught.value.field == field


def test_a_start_of_vllm_is_of_one_model() -> None:
    """It used to be replayed without one, and without a word."""
    models = {"a": ModelShare(model="qwen3-8b"), "b": ModelShare(model="qwen3-0.6b")}
    with pytest.raises(ConfigError, match="vLLM plans one model for the whole device"):
        SharingConfig(models=models, each=ReplayConfig(engine="vllm==0.33"), device="h100-80gb", kv_memory="4GiB")
    SharingConfig(models=models, each=ReplayConfig(engine="vllm"), device="h100-80gb", kv_memory="4GiB")


def test_sessions_of_several_models_are_refused() -> None:
    """A window changed nothing, and nothing was said of it."""
    sessions = SessionReplay(window=100)
    models = {"a": ModelShare(cost="polynomial", kv_bytes_per_token=8)}
    with pytest.raises(ConfigError, match="sessions: does not go with several models on a device"):
        SharingConfig(models=models, kv_memory="1MiB", each=ReplayConfig(sessions=sessions))


@pytest.mark.parametrize(
    ("file", "arguments", "says"),
    [
        ("[models.a]\nweight = 0", "", "c.toml: models.a.weight: must be at least 1e-12, got 0.0"),
        ("[models.a]\nweigth = 1", "", "c.toml: models.a.weigth: unknown key. Known: acceptance, ceiling, cost, "),
        ("[models.a]", "", "c.toml: [models.a]: names no model."),
        ("models = 3", "", "c.toml: models: must be a table, got 3"),
        ("model = 'qwen3-8b'\n[models.a]", "", "c.toml: model: is for a replay of one model."),
        ("trace = 'x'\n[models.a]", "", "c.toml: trace: is for a replay of one model."),
        ("pages = 2\n[models.a]", "", "c.toml: pages: is for a replay of one model: pages of several differ in bytes"),
        ("health = ['a=dead@3']", "", "c.toml: health: is for several models on one device."),
        (
            "profile = 'mocker'\nkv_memory = 9\n[models.a]\ncost = 'polynomial'\nkv_bytes_per_token = 2\npriority = 2",
            "",
            "c.toml: models.a.priority: is 2, and the mocker knows no priorities. Leave out profile, or the priority.",
        ),
        ("", "--set loans=x", "--set loans: is for several models on one device."),
        ("", "--trace a=x", "--trace a: is for several models on one device."),
        (
            "device = 'l40s'\n[models.a]\nmodel = 'qwen3-8b'\nkv_dtype = 'x'",
            "",
            "c.toml: models.a.kv_dtype: 'x' is not",
        ),
        (
            "[models.a]\nmodel = 'qwen3-8b'\nweight_dtype = 'x'",
            "--device l40s",
            "c.toml: models.a.weight_dtype: 'x' is",
        ),
        ("[models.a]\ncost = 'cubic'", "", "c.toml: models.a.cost: 'cubic': "),
        ("", "--model a=:cost=cubic", "--model a: cost: 'cubic': "),
    ],
)
def test_an_error_says_where_the_value_came_from(
    file: str, arguments: str, says: str, refusal: Callable[[str, str], str]
) -> None:
    assert refusal(file, arguments).startswith(f"kvarts: {says}")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"snapshots": "end"}, "snapshots: must be 'ends' or 'branches', got 'end'"),
        ({"eviction": "arc"}, "eviction: 'arc' is not a policy"),
    ],
)
def test_a_share_names_the_field(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=f"^{says}"):
        ModelShare(**NUMBERS, **settings)


HYBRID = "--model a=granite-4.0-h-tiny{} --model b=gpt-oss-20b --device h100-80gb --kv-memory 4GiB"


def test_snapshots_are_those_of_one_model() -> None:
    """They were refused together with a model without states, though each model has its own."""
    config = resolve_shares(parsed(*HYBRID.format(":snapshots=branches").split()), SECTIONS)
    assert {name: of_model.snapshots for name, of_model in config.configs.items()} == {"a": "branches", "b": "ends"}
    with pytest.raises(ConfigError, match=r"--set snapshots: .*Say it of each: --model NAME=MODEL:snapshots=branches"):
        resolve_shares(parsed(*HYBRID.format("").split(), "--set", "snapshots=branches"), SECTIONS)


def test_drafts_are_those_of_one_model() -> None:
    """The list of rates has commas, as the list of settings has."""
    of_a = ":acceptance=0.7,0.4,speculative_tokens=2,weight=2"
    config = resolve_shares(parsed(*HYBRID.format(of_a).split()), SECTIONS)
    costs = {name: of_model.cost for name, of_model in config.configs.items()}
    assert [cost.acceptance for cost in costs.values()] == [(0.7, 0.4), ()]
    assert config.models["a"].weight == 2.0
    for option, value, hint in (
        ("--set", "speculative_tokens=2", "speculative_tokens=2,acceptance=0.7,0.4"),
        ("--set", "acceptance=0.7", "acceptance=0.7,speculative_tokens=1"),
        ("--kv-dtype", "fp8", "kv_dtype=fp8"),
    ):
        named = f"{option} {value.partition('=')[0]}" if option == "--set" else option
        with pytest.raises(ConfigError, match=f"{named}: .*Say it of each: --model NAME=MODEL:{hint}."):
            resolve_shares(parsed(*HYBRID.format("").split(), option, value), SECTIONS)
        resolve_shares(parsed(*HYBRID.format(f":{hint}").split()), SECTIONS)
    with pytest.raises(ConfigError, match=r"--model a: '0\.4' is not known"):
        parsed(*HYBRID.format(":weight=2,0.4").split())
