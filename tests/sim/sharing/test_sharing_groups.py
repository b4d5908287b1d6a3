"""Models with KV groups on one device, case by case: what is empty, what goes first, who gives way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvarts import ConfigError, ModelShare, ReplayConfig, SharingConfig, replay
from kvarts.core.config import EngineConfig
from kvarts.core.kv.group_pages import GroupPages
from kvarts.core.kv.groups import STATE_SPAN, GroupMemory, PartGroup, Retention
from kvarts.core.kv.layers import KvLayer
from kvarts.core.kv.pool import CountPool, IdPool
from kvarts.core.request import Request
from kvarts.sim.sharing.device import SharedDevice

from builders.grouped import FULL
from builders.sharing_rigs import PAGE_SIZE, Rig

WINDOW = KvLayer(kind="window", num_heads=1, head_numbers=2, span=PAGE_SIZE)
GROUPS = (PartGroup(FULL, 10), PartGroup(WINDOW, 10))
STATES = (PartGroup(FULL, 10), PartGroup(KvLayer(kind="state", state_bytes=10), 10))
"""Blocks of 10 bytes, two a page."""


class GroupRig(Rig):
    """Of its models `a` has groups, the others pages of 10 bytes."""

    def __init__(
        self,
        num_bytes: int,
        *,
        guarantees: Mapping[str, int] | None = None,
        keeps: Retention = "all",
        ids: bool = False,
    ) -> None:
        super().__init__(SharedDevice(num_bytes))
        for name in ("a", "b", "c"):
            guaranteed = (guarantees or {}).get(name, 0)
            config = EngineConfig(num_pages=num_bytes // 20, page_size=PAGE_SIZE)
            if name != "a":
                part = self.device.register(name, page_bytes=10, guaranteed_bytes=guaranteed)
                self.attach(name, part, part.cache, config)
            else:
                memory = GroupMemory(GROUPS, keeps)
                pool = (IdPool if ids else CountPool)(num_bytes // 10)
                cache = GroupPages(memory, pool, page_size=PAGE_SIZE, most_new_tokens=1000)
                part = self.device.register(name, parts=cache, guaranteed_bytes=guaranteed)
                self.attach(name, part, cache, config)

    def run(self, model: str, num_pages: int, **more: Any) -> Request:
        request = self.add(model, num_pages, **{"num_output": 1, **more})
        self.turn(model)
        return request

    def used(self) -> tuple[int, ...]:
        return tuple(scheduler.cache.num_used for scheduler in self.schedulers.values())

    def cached(self) -> tuple[int, ...]:
        return tuple(scheduler.cache.num_cached for scheduler in self.schedulers.values())


@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize(
    ("keeps", "num_pages", "used", "cached"),
    [
        # Of four pages `a` holds all in the full group, and one in the window; it left three of the window, and one of
        # these is what the same prompt needs again.
        ("all", 0, (5, 0, 0), (3, 0, 0)),
        ("all", 12, (5, 12, 0), (3, 0, 0)),
        ("all", 13, (5, 13, 0), (2, 0, 0)),
        ("all", 15, (5, 15, 0), (0, 0, 0)),
        ("all", 16, (5, 0, 0), (3, 0, 0)),
        ("tails", 0, (5, 0, 0), (1, 0, 0)),
        ("tails", 15, (5, 15, 0), (0, 0, 0)),
        ("tails", 16, (5, 0, 0), (1, 0, 0)),
    ],
)
def test_what_a_window_has_passed_is_free_for_another_model(
    keeps: Retention, num_pages: int, used: tuple[int, ...], cached: tuple[int, ...], ids: bool
) -> None:
    rig = GroupRig(200, keeps=keeps, ids=ids)
    rig.run("a", 4, num_output=5)
    if num_pages:
        rig.run("b", num_pages, num_output=5)
    assert (rig.used(), rig.cached()) == (used, cached)


@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize(
    ("guarantees", "num_pages", "cached"),
    [
        # First the one, then the other has two pages cached, of `a` four blocks; `c` needs more than the empty four.
        ({}, 5, (3, 2, 0)),
        ({}, 8, (0, 2, 0)),
        ({}, 9, (0, 1, 0)),
        ({"a": 40}, 5, (4, 1, 0)),
        ({"a": 20}, 6, (2, 2, 0)),
        ({"a": 20}, 7, (2, 1, 0)),
        ({"b": 20}, 5, (3, 2, 0)),
        ({"b": 20}, 7, (1, 2, 0)),
    ],
)
def test_the_oldest_part_goes_first_across_models_and_those_beyond_a_guarantee_before_others(
    guarantees: Mapping[str, int], num_pages: int, cached: tuple[int, ...], ids: bool
) -> None:
    rig = GroupRig(100, guarantees=guarantees, ids=ids)
    rig.run("a", 2)
    rig.run("b", 2)
    assert rig.cached() == (4, 2, 0)
    rig.run("c", num_pages, num_output=2)
    assert rig.used() == (0, 0, num_pages)
    assert rig.cached() == cached


def test_blocks_come_from_less_important_work_of_others_and_parts_that_several_hold_count_once() -> None:
    rig = GroupRig(240, guarantees={"b": 100})
    low = rig.run("a", 4, num_output=6)
    high = rig.run("a", 2, num_output=6, priority=2)
    rig.run("c", 7, num_output=2, priority=2)
    rig.run("b", 4, num_output=4, priority=1)
    assert rig.used() == (10, 4, 7), "the first has begun a page in both groups"
    assert (low.num_preemptions, high.num_preemptions) == (0, 0)
    asks = rig.run("b", 5, num_output=2, priority=1)
    assert asks.num_output_tokens == 1
    assert (low.num_preemptions, high.num_preemptions) == (1, 0)
    assert rig.device.num_reclaimed("a") == 1
    assert rig.cached()[0] > 0, "its parts stay cached until they are taken"


def test_what_the_rest_of_a_prompt_needs_is_kept_for_it() -> None:
    rig = GroupRig(200)
    part = rig.device.memory.parts["a"]
    part.token_budget = 8
    rig.run("a", 6)
    # Two pages are computed, and nothing of the window is released before the next chunk.
    scheduler = rig.schedulers["a"]
    assert scheduler.cache.num_used == 4
    assert scheduler.num_pages_of_chunked() == 6 + 6 - 4, "a window of a step of all tokens holds all six pages"
    waits = rig.add("b", 10, num_output=2)
    rig.turn("b")
    assert waits.admission < 0, "16 are free, and eight of them are kept"
    fits = rig.add("c", 8, num_output=2)
    rig.turn("c")
    assert fits.admission < 0, "claims hold in the order in which they were made"


def test_what_a_waiting_request_needs_in_all_groups_is_kept_for_it() -> None:
    rig = GroupRig(200, guarantees={"a": 120})
    rig.run("b", 1, num_output=3)
    mine = rig.add("a", 6, num_output=1)
    waits = rig.run("c", 8)
    assert waits.admission < 0, "19 are free, and twelve of them are kept"
    rig.turn("a")
    rig.turn("c")
    assert (mine.num_output_tokens, waits.num_output_tokens) == (1, 1)
    assert rig.cached() == (11, 0, 8), "of what is cached, one block went"


# Options --------------------------------------------------------------------------------------------------

DATA = Path(__file__).parents[3] / "src" / "kvarts" / "data"
CHAT, CODE = DATA / "azure-conv-1000.csv", DATA / "azure-code-1000.csv"
SHORT = ["--device", "h100-80gb", "--tensor-parallel", "2", "--kv-memory", "2GiB", "--json"]


def short_traces(folder: Path) -> list[str]:
    """Options for the first requests of two traces, of models `chat` and `code`."""
    options = []
    for name, whole in (("chat", CHAT), ("code", CODE)):
        short = folder / f"{name}.csv"
        short.write_text("".join(whole.read_text().splitlines(keepends=True)[:80]))
        options += ["--trace", f"{name}={short}"]
    return options


def test_the_option_changes_nothing_for_layers_that_keep_all(
    run_command: Callable[..., int], capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> None:
    traces = short_traces(tmp_path)
    printed = []
    for option in ("", ",kv_groups=all"):
        models = ["--model", f"chat=llama-3.1-8b:weight=2{option}", "--model", f"code=qwen3-8b:weight=1{option}"]
        assert run_command("replay", *models, *traces, *SHORT) == 0
        printed.append(capsysbinary.readouterr().out)
    assert printed[0] == printed[1]
    config = tmp_path / "share.toml"
    config.write_text(
        'device = "h100-80gb"\nkv_memory = "2GiB"\ntensor_parallel = 2\n'
        f'[models.chat]\nmodel = "gemma-3-27b"\nkv_groups = "tails"\ntrace = "{tmp_path}/chat.csv"\n'
        f'[models.code]\nmodel = "qwen3-8b"\ntrace = "{tmp_path}/code.csv"\n'
    )
    assert run_command("replay", "--config", config, "--json") == 0
    from_file = capsysbinary.readouterr().out
    models = ["--model", "chat=gemma-3-27b:kv_groups=tails", "--model", "code=qwen3-8b"]
    assert run_command("replay", *models, *traces, *SHORT, "--run-dir", tmp_path / "run") == 0
    assert capsysbinary.readouterr().out == from_file, "observed, it is the same"
    of_models = msgspec.json.decode(from_file)["models"]
    assert "kv_groups" in of_models["chat"] and "kv_groups" not in of_models["code"]
    assert of_models["chat"]["peak_used_bytes"] <= 2 << 30
    for name in ("chat", "code"):
        assert run_command("verify", tmp_path / "run" / name / "timeline.json.gz") == 0
        capsysbinary.readouterr()


NUMBERS: dict[str, Any] = {"cost": "polynomial", "groups": GROUPS, "kv_groups": "all"}


@pytest.mark.parametrize(
    ("share", "each", "says"),
    [
        ({"kv_groups": "some"}, {}, "kv_groups: must be 'off', 'all' or 'tails', got 'some'"),
        ({"kv_groups": "off"}, {}, r"models\.a\.groups: are given, and kv_groups is off"),
        ({"groups": (), "kv_bytes_per_token": 8}, {}, r"models\.a\.kv_groups: says nothing where a model does not say"),
        ({}, {"profile": "mocker"}, "profile: does not go with KV groups"),
        ({}, {"async_scheduling": True}, "async_scheduling: does not go with several models on a device"),
        ({}, {"kv_groups": "all", "groups": GROUPS}, "kv_groups: is for a replay of one model"),
        ({"mamba_cache_mode": "none"}, {}, "mamba_cache_mode: must be 'snapshots', 'all' or 'align', got 'none'"),
        ({"mamba_cache_mode": "all"}, {}, r"models\.a\.mamba_cache_mode: has no effect without layers with a state"),
        (
            {"mamba_cache_mode": "all", "groups": STATES},
            {"no_prefix_caching": True},
            r"models\.a\.mamba_cache_mode: does not go with an engine without a prefix cache",
        ),
    ],
)
def test_what_cannot_be_is_named(share: dict[str, Any], each: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        SharingConfig(
            models={"a": ModelShare(**{**NUMBERS, **share})}, kv_memory="1KiB", each=ReplayConfig(page_size=4, **each)
        )


def test_several_models_say_it_each(run_command: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    models = ["--model", "a=gemma-3-27b", "--trace", f"a={CHAT}", "--device", "h200-141gb"]
    assert run_command("replay", *models, "--kv-groups", "all") == 2
    said = capsys.readouterr().err
    assert said.startswith("kvarts: --kv-groups: is for a replay of one model. Say it of each: --model NAME=MODEL:kv_g")
    tiers = ["--model", "a=gemma-3-27b:kv_groups=all", *models[2:], "--profile", "mocker"]
    assert run_command("replay", *tiers) == 2
    assert "does not go with KV groups" in capsys.readouterr().err


def test_states_by_page_are_said_of_each_model(
    run_command: Callable[..., int], capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> None:
    """States by page are parts of pages, and draw on the memory that the models share."""
    traces = short_traces(tmp_path)
    models = ["--model", "chat=granite-4.0-h-tiny:mamba_cache_mode=align", "--model", "code=qwen3-8b"]
    assert run_command("replay", *models, *traces, *SHORT, "--run-dir", tmp_path / "run", "--audit") == 0
    of_models = msgspec.json.decode(capsysbinary.readouterr().out)["models"]
    (state,) = [group for group in of_models["chat"]["kv_groups"] if group["kind"] == "state"]
    assert state["tokens"] == STATE_SPAN and state["num_evicted_parts"] > 0
    for name in ("chat", "code"):
        assert run_command("verify", tmp_path / "run" / name / "timeline.json.gz") == 0
        capsysbinary.readouterr()
    assert run_command("replay", *models, *traces, *SHORT, "--set", "mamba_cache_mode=align") == 2
    said = capsysbinary.readouterr().err.decode()
    assert "Say it of each: --model NAME=MODEL:mamba_cache_mode=align." in said


def test_a_split_is_cut_in_blocks_and_lends_nothing() -> None:
    models = {"a": ModelShare(**NUMBERS), "b": ModelShare(cost="polynomial", kv_bytes_per_token=5)}
    config = SharingConfig(
        models=models, kv_memory=4000, static_split=True, each=ReplayConfig(page_size=4, max_num_seqs=8)
    )
    report = replay({"a": CHAT, "b": CODE}, config)
    assert not report.loans
    assert report.reports["a"].summary["total_blocks"] == 200
    assert report.reports["a"].summary["num_completed"] > 0
