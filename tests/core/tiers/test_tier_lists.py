"""Tiers as a list: host memory and files in that form, and lists of more tiers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given

import kvarts.sim.router
from kvarts.base.errors import ConfigError
from kvarts.base.settings import given_in
from kvarts.cli.replaying import all_sections, read_settings
from kvarts.core.content import Content
from kvarts.core.tiers.config import OffloadConfig, TierConfig
from kvarts.sim.config import ReplayConfig, resolve_replay
from kvarts.sim.replaying import replay
from kvarts.sim.traffic.formats import load_trace

from builders.command_line import parsed
from builders.group_tiers import Grouped, grouped
from builders.tiered import Tiered, as_list, tiered, tiers_between

SECTIONS = all_sections()
THREE = (
    TierConfig(name="dram", pages=40),
    TierConfig(name="cxl", pages=80, read="20GB/s", write="10GB/s", latency_us=2.0),
    TierConfig(kind="files", pages=400),
)
AS_TABLES = """
[[tier]]
name = "dram"
pages = 40
[[tier]]
name = "cxl"
pages = 80
read = "20GB/s"
write = "10GB/s"
latency_us = 2.0
[[tier]]
kind = "files"
pages = 400
"""
AS_FLAGS = (
    *("--tier", "dram:pages=40"),
    *("--tier", "cxl:pages=80,read=20GB/s,write=10GB/s,latency_us=2.0"),
    *("--tier", "disk:kind=files,pages=400"),
)


def write_trace(path: Path, *, rounds: int = 6, num_prompts: int = 3, num_tokens: int = 1600) -> Path:
    """Some prompts, of 100 pages of 16 tokens each, again and again."""
    rows = [
        {
            "timestamp": 2000 * (round_ * num_prompts + at),
            "input_length": num_tokens,
            "output_length": 4,
            "hash_ids": [4 * at, 4 * at + 1, 4 * at + 2, 4 * at + 3],
        }
        for round_ in range(rounds)
        for at in range(num_prompts)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@given(tiered(all_loads=True, cancels=True))
def test_a_list_of_host_memory_and_files_is_what_their_options_are(tiers: Tiered) -> None:
    short, listed = (
        replay(tiers.case.trace(), tiers.case.config(offload=offload))
        for offload in (tiers.offload, as_list(tiers.offload))
    )
    assert short.requests_jsonl() == listed.requests_jsonl()
    assert {**short.summary, "config": None} == {**listed.summary, "config": None}


@given(grouped(), tiers_between())
def test_three_tiers_below_groups_fast_as_step_by_step(of: Grouped, between: TierConfig) -> None:
    offload = as_list(of.offload, between)
    fast, slow = (of.replayed(offload=offload, step_by_step=slowly) for slowly in (False, True))
    assert fast.requests_jsonl() == slow.requests_jsonl()
    assert fast.to_json() == slow.to_json()


def test_a_file_options_and_arguments_name_the_same_tiers(tmp_path: Path) -> None:
    expected = OffloadConfig(tiers=THREE)
    assert resolve_replay(parsed(*AS_FLAGS), SECTIONS).offload == expected
    (tmp_path / "run.toml").write_text(AS_TABLES)
    assert resolve_replay(read_settings(tmp_path / "run.toml", SECTIONS), SECTIONS).offload == expected
    tables: Any = [{"name": "dram", "pages": 40}, THREE[1], {"kind": "files", "pages": 400}]
    config = ReplayConfig.for_device("llama-3.1-8b", "h100-80gb", tier=tables)
    assert config.offload is not None
    assert config.offload.sizes(16) == {"dram": 40, "cxl": 80, "disk": 400}


def test_an_option_changes_one_tier_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(AS_TABLES)
    given = parsed("--tier", "cxl:size=1GiB", "--tier", "dram:pages=0")
    given = given.over(read_settings(tmp_path / "run.toml", SECTIONS))
    offload = resolve_replay(given, SECTIONS).offload
    assert offload is not None
    assert offload.sizes(16) == {"cxl": 512, "disk": 400}
    assert offload.read_rates["cxl"] == 20_000_000_000


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([{"name": "a"}], "tier.a: has no size"),
        ([{"name": "a", "pages": 3, "size": "4GiB"}], "tier.a.pages: is given beside tier.a.size"),
        ([{"pages": 3}, {"pages": 4}], "tier.2.name: two tables have the name 'host'. Name each."),
        ([{"name": "cached", "pages": 3}], "tier.cached: cannot be 'cached', which reports and KV"),
        ([{"name": "Fast-1", "pages": 3}], "cannot be 'Fast-1'"),
        ([{"name": "group0", "pages": 3}], "cannot be 'group0', which reports and KV events use"),
        ([{"name": "gpu", "pages": 3}], "Not to be used: cached, cpu, device, free, gpu, "),
        ([{"name": "2", "pages": 3}], "tier.2: cannot be '2'. It is a part of names of columns: small letters and"),
        ([{"pages": 3, "size": 2.5}], "tier.host.size: Expected"),
        (
            [{"name": "disk", "pages": 3}],
            "tier.disk: is of memory, and has the name of the other kind. Give it kind=files",
        ),
        ([{"name": "store", "pages": 3}], "is the name of the tier that all engines share"),
        (
            [{"name": "files", "pages": 3}],
            "tier.files: is of memory, and has the name of the other kind. Give it kind=f",
        ),
        ([{"naem": "x", "pages": 3}], "tier.host.naem: unknown key. Known: kind, latency_us, name, pages"),
        ([{"pages": 3, "kind": "tape"}], "tier.1.kind: Invalid enum value 'tape'"),
        ([{"pages": 3, "read": 0}], "tier.host.read: must be at least one byte a second"),
        ([{"pages": 3, "rate": "4GB/s"}], "tier.host.rate: is of a tier that all engines share"),
        ([{"size": "1KiB"}], "tier.host.size: 1KiB hold no page"),
        ([{"pages": 3, "speed": 5}], "tier.host.speed: unknown key"),
        ({"pages": 3}, "must be a list of tables"),
    ],
)
def test_a_list_that_cannot_be_is_refused_where_it_is_wrong(tables: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_replay(given_in({"tier": tables}, SECTIONS), SECTIONS)
    assert message in str(caught.value).replace("[", "").replace("]", "")


def test_a_list_and_its_short_form_are_refused_together() -> None:
    with pytest.raises(ConfigError, match="--host-pages: does not go with a list of tiers"):
        resolve_replay(parsed(*AS_FLAGS, "--host-pages", "4"), SECTIONS)
    for rate in ("4GB/s", "50GB/s"):  # the last one is what it is without that
        with pytest.raises(
            ConfigError, match=r"--set offload.h2d: does not go with a list of tiers\. Say read of a tier, in"
        ):
            resolve_replay(parsed(*AS_FLAGS, "--set", f"offload.h2d={rate}"), SECTIONS)
    with pytest.raises(ConfigError, match=r"h2d: does not go with a list of tiers\. Give read to a TierConfig"):
        OffloadConfig(tiers=THREE, h2d="4GB/s")


@pytest.mark.parametrize("command", ["replay", "plan", "mock"])
def test_an_option_of_files_beside_a_list_names_the_key_of_a_tier(
    run_command: Callable[..., int], capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path, command: str
) -> None:
    trace = () if command == "mock" else (write_trace(tmp_path / "trace.jsonl"),)
    of_model = ("--model", "llama-3.1-8b", "--device", "h100-80gb")
    assert run_command(command, *trace, *of_model, "--tier", "x:pages=40", "--set", "offload.disk_latency_us=100") == 2
    error = capsysbinary.readouterr().err.decode()
    assert "--set offload.disk_latency_us: does not go with a list of tiers" in error
    assert "--tier NAME:latency_us=VALUE" in error


def test_a_table_without_a_name_has_that_of_its_kind(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[[tier]]\npages = 40\n[[tier]]\nkind = "files"\npages = 400\n')
    of_file = read_settings(tmp_path / "run.toml", SECTIONS)
    given = parsed("--tier", "disk:pages=50", "--tier", "host:read=9GB/s").over(of_file)
    offload = resolve_replay(given, SECTIONS).offload
    assert offload is not None
    assert offload.sizes(16) == {"host": 40, "disk": 50}
    assert offload.read_rates["host"] == 9 * 10**9


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OffloadConfig(tiers=[{"pages": 3}]), "tiers: must be a list of TierConfig, has {'pages': 3}"),  # type: ignore[arg-type]
        (lambda: OffloadConfig(tiers=3), "tiers: must be a list of TierConfig, got 3"),  # type: ignore[arg-type]
        (lambda: OffloadConfig(tiers=TierConfig(pages=3)), "tiers: must be a list of TierConfig"),  # type: ignore[arg-type]
        (lambda: OffloadConfig(tiers=(TierConfig(pages=3),) * 2), "tiers: has two tiers with the name host"),
        (lambda: OffloadConfig(h2d=None), "h2d: must be a whole number or a text such as 50GB/s, got None"),  # type: ignore[arg-type]
        (lambda: TierConfig(name=3, pages=3), "name: must be a text, got 3"),  # type: ignore[arg-type]
        (lambda: TierConfig(size=2.5), "size: must be a whole number or a text such as 64GiB, got 2.5"),  # type: ignore[arg-type]
        (lambda: TierConfig(pages=3, read=[]), r"read: must be a whole number or a text such as 50GB/s, got \[\]"),  # type: ignore[arg-type]
    ],
)
def test_a_value_of_the_wrong_type_is_refused_at_once(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize("text", ["dram", "dram:", "dram:pages", "dram:sise=3", ":pages=3", "dram:pages=3,pages=4"])
def test_an_option_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--tier"):
        resolve_replay(parsed("--tier", text), SECTIONS)


def test_everything_that_is_written_names_the_tiers(
    run_command: Callable[..., int], capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> None:
    trace = write_trace(tmp_path / "trace.jsonl")
    run_dir, timeline = tmp_path / "run", tmp_path / "timeline.jsonl"
    command = ("replay", trace, "--pages", 150, *AS_FLAGS, "--audit", "--run-dir", run_dir, "--timeline", timeline)
    assert run_command(*command) == 0
    text = capsysbinary.readouterr().out.decode()
    assert "dram 40 pages, cxl 80 pages, disk 400 pages" in text
    assert "cxl write" in text

    report = json.loads((run_dir / "report.json").read_text())
    assert report["config"]["offload"]["tiers"][1] == {
        "name": "cxl",
        "kind": "memory",
        "pages": 80,
        "read": "20GB/s",
        "write": "10GB/s",
        "latency_us": 2.0,
        "scope": "engine",
    }
    assert "host_pages" not in report["config"]["offload"]
    assert list(report["prefix_hit_ratio_by_tier"]) == ["device", "dram", "cxl", "disk"]
    assert report["transfers"]["bytes"]["disk_read"]

    head, *rows = map(json.loads, timeline.read_text().splitlines())
    assert head["tiers"] == [
        {"name": "dram", "total_blocks": 40},
        {"name": "cxl", "total_blocks": 80},
        {"name": "disk", "total_blocks": 400},
    ]
    assert max(row["tier_cached_blocks"][1] for row in rows if "step" in row) == 80
    assert run_command("verify", timeline) == 0
    assert run_command("report", run_dir, "--html", tmp_path / "page.html") == 0
    assert '"name":"cxl"' in (tmp_path / "page.html").read_text().replace(": ", ":")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"tier_used_blocks": [1, 2]}, "tier_used_blocks does not have a number for each of 3 tiers"),
        ({"tier_cached_blocks": [41, 0, 0]}, "'dram': used 0 + cached 41 are more than its total 40"),
        ({"tier_used_blocks": [0, 0, -1]}, "tier_used_blocks"),
        ({"tier_used_blocks": 3}, "tier_used_blocks"),
    ],
)
def test_the_verifier_reads_lists_of_tiers(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    from kvarts.proof.verify import verify

    body = {
        "block_size_tokens": 16,
        "total_blocks": 10,
        "peak_used_pct": 0.1,
        "preemption_count": 0,
        "tiers": [{"name": name, "total_blocks": total} for name, total in (("dram", 40), ("cxl", 80), ("disk", 400))],
        "timeline": [
            {"step": step, "t_ms": step, "used_blocks": 1, "free_blocks": 9, "used_pct": 0.1, "active_seqs": 1,
             "preempted_seqs": 0, "tier_used_blocks": [0, 0, 0], "tier_cached_blocks": [40, 80, 400]}
            for step in range(3)
        ],
    }  # fmt: skip
    assert verify(body).verdict == "ok"
    assert verify(json.dumps(body)).verdict == "ok"
    timeline: Any = body["timeline"]
    timeline[1] |= {"tier_used_blocks": [0, 0, 0], "tier_cached_blocks": [0, 0, 0]} | row
    verdict = verify(body)
    assert verdict.verdict == "violated"
    assert message in verdict.to_text()


def test_a_router_weighs_a_tier_by_its_kind() -> None:
    from kvarts.sim.routers.policies import PrefixAware
    from kvarts.sim.routers.view import View, WorkerFacts

    view = View(PrefixAware.needs, WorkerFacts(1, 16, are_files=OffloadConfig(tiers=THREE).are_files))
    assert view.weights_below(0.75, 0.25) == [0.75, 0.75, 0.25]


def test_a_tier_of_all_engines_is_the_store_of_a_fleet(tmp_path: Path) -> None:
    from kvarts.sim.fleet.config import resolve_fleet

    table = {"scope": "all", "pages": 900, "read": "40GB/s", "write": "20GB/s", "rate": "90GB/s", "latency_us": 7.0}
    of_engines = {"replicas": 2, "tier": [{"pages": 20}, table]}
    fleet = resolve_fleet(given_in(of_engines, SECTIONS), SECTIONS)
    assert fleet.store is not None
    assert fleet.store.bytes_per_s == (90 * 10**9, 40 * 10**9, 20 * 10**9)
    assert (fleet.store.pages, fleet.store.latency_us) == (900, 7.0)
    assert fleet.tier_names == ["host", "store"]
    store = {"pages": 900, "worker_rate": "40GB/s", "worker_write_rate": "20GB/s", "rate": "90GB/s", "latency_us": 7.0}
    short = {"replicas": 2, "offload": {"host_pages": 20}, "store": store}
    trace = load_trace(write_trace(tmp_path / "trace.jsonl"))
    lists, options = (
        replay(trace, resolve_fleet(given_in({"pages": 150, **values}, SECTIONS), SECTIONS))
        for values in (of_engines, short)
    )
    assert lists.requests_jsonl() == options.requests_jsonl()
    assert {**lists.summary, "config": None} == {**options.summary, "config": None}
    assert lists.summary["num_cached_tokens_by_tier"]["store"]


def test_a_tier_that_is_added_is_above_the_store_of_a_file(tmp_path: Path) -> None:
    from kvarts.sim.fleet.config import resolve_fleet

    (tmp_path / "run.toml").write_text('[[tier]]\nname = "dram"\npages = 20\n[[tier]]\nscope = "all"\npages = 900\n')
    of_file = read_settings(tmp_path / "run.toml", SECTIONS)
    fleet = resolve_fleet(parsed("--tier", "cxl:pages=50", "--tier", "store:pages=800").over(of_file), SECTIONS)
    assert fleet.tier_names == ["dram", "cxl", "store"]
    assert fleet.store is not None
    assert fleet.store.pages == 800
    with pytest.raises(ConfigError, match="is shared by all engines, and is not the last"):
        resolve_fleet(parsed("--tier", "store:scope=all,pages=9", "--tier", "cxl:pages=50"), SECTIONS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tier", "store:scope=all,size=10"], "--tier store: size: 10 hold no page of 2,097,152 bytes"),
        (["--store", "memory=10"], "--store memory: 10 hold no page"),
        (
            [
                "--tier",
                "a:size=0",
                "--set",
                "transfer.pull=true",
                "--transfer",
                "rate=9GB/s",
                "--transfer",
                "token_bytes=9",
            ],
            "--set transfer.pull: needs workers with host memory. Give a [[tier]] with a size to each",
        ),
    ],
)
def test_errors_of_a_fleet_name_what_was_given(options: list[str], message: str) -> None:
    from kvarts.sim.fleet.config import resolve_fleet

    with pytest.raises(ConfigError) as caught:
        resolve_fleet(parsed("--replicas", "2", *options), SECTIONS)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("option", "field"),
    [
        (("--store", "memory=10GiB"), b"--store memory"),
        (("--tier", "store:scope=all,size=10GiB"), b"--tier store: scope"),
        (("--prefill", "replicas=2", "--decode", "replicas=2"), b"--prefill replicas"),
    ],
)
def test_several_models_with_a_store_are_refused_by_its_name(
    run_command: Callable[..., int],
    capsysbinary: pytest.CaptureFixture[bytes],
    tmp_path: Path,
    option: tuple[object, ...],
    field: bytes,
) -> None:
    trace = write_trace(tmp_path / "trace.jsonl")
    models = [word for name in "ab" for word in ("--model", f"{name}=llama-3.1-8b", "--trace", f"{name}={trace}")]
    assert run_command("replay", *models, "--device", "h200-141gb", *option) == 2
    assert field + b": does not go with several models on a device" in capsysbinary.readouterr().err


def test_a_pool_can_have_some_of_the_tiers() -> None:
    from kvarts.sim.fleet.config import resolve_fleet

    tables = {
        "tier": [{"name": "dram", "pages": 20}, {"kind": "files", "pages": 50}],
        "pool": [{"name": "large", "tiers": ["dram", "disk"]}, {"name": "small", "tiers": ["dram"]}, {"name": "all"}],
    }
    fleet = resolve_fleet(given_in(tables, SECTIONS), SECTIONS)
    assert [pool.each.tiers for pool in fleet.pools] == [
        {"dram": 20, "disk": 50},
        {"dram": 20},
        {"dram": 20, "disk": 50},
    ]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tier": [{"scope": "all", "pages": 9}, {"pages": 3}]}, "is shared by all engines, and is not the last"),
        (
            {"tier": [{"scope": "all", "pages": 9}, {"scope": "all", "pages": 3}]},
            "tier.2.name: two tables have the name 'store'",
        ),
        ({"tier": [{"scope": "all", "pages": 9}], "store": {"pages": 3}}, "store.pages: says what a tier of scope all"),
        (
            {"tier": [{"kind": "files", "scope": "all", "pages": 9}]},
            "tier.store.kind: has no effect on a tier that all",
        ),
        (
            {"tier": [{"pages": 9}], "pool": [{"disk_memory": "1GiB"}]},
            "pool.1.disk_memory: does not go with a list of tiers. Say size of a tier",
        ),
        (
            {"offload": {"host_pages": 9}, "pool": [{"tiers": []}]},
            "pool.1.tiers: names tables tier, and there are none",
        ),
        (
            {"tier": [{"name": "s3", "scope": "all", "pages": 9}]},
            "is shared by all engines, and that tier is called store",
        ),
        ({"tier": [{"pages": 9}], "pool": [{"tiers": ["nvme"]}]}, "pool.1.tiers: has no tier 'nvme'"),
    ],
)
def test_tiers_of_a_fleet_that_cannot_be_are_refused_where_they_are_wrong(values: Any, message: str) -> None:
    from kvarts.sim.fleet.config import resolve_fleet

    with pytest.raises(ConfigError) as caught:
        resolve_fleet(given_in(values, SECTIONS), SECTIONS)
    assert message in str(caught.value).replace("[", "").replace("]", "")


def test_one_engine_has_no_tier_of_all() -> None:
    with pytest.raises(ConfigError, match="is a tier that all engines share, and these are the tiers of one"):
        OffloadConfig(tiers=(TierConfig(scope="all", pages=9),))


def test_a_plan_compares_the_tiers_of_a_list(
    run_command: Callable[..., int], capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> None:
    trace = write_trace(tmp_path / "trace.jsonl")
    of_model = ("--model", "llama-3.1-8b", "--device", "h100-80gb", "--pages", 150)
    prices = tmp_path / "prices.toml"
    prices.write_text(
        'date = "2026-11-01"\ncurrency = "EUR"\n[per_hour]\ndevice = 9\nhost_gib = 1\ndram_gib = 3\ncxl_gib = 2\n'
    )
    assert run_command("plan", trace, *of_model, *AS_FLAGS, "--prices", prices, "--json") == 0
    plan = json.loads(capsysbinary.readouterr().out)
    tiers = plan["tiers"]
    assert [each["tier"] for each in tiers["next_gib"]] == ["device", "dram", "cxl", "disk"]
    assert [each["price"] for each in tiers["next_gib"]] == [pytest.approx(9 / 80), 3, 2, None]
    assert list(tiers["load_us_per_token"]) == ["dram", "cxl", "disk"]
    point = next(each for each in tiers["disk_curve"] if each["pages"]["cxl"] == 80)
    assert "--tier dram:pages=40 --tier cxl:pages=80,read=20GB/s,write=10GB/s,latency_us=2" in point["command"]
    words = point["command"].split()
    capsysbinary.readouterr()
    assert run_command(*words[1:], "--json") == 0
    replayed = json.loads(capsysbinary.readouterr().out)
    assert replayed["prefix_hit_ratio"] == point["replayed"]["hit_ratio"]


def test_a_plan_searches_for_its_first_tier_alone(
    run_command: Callable[..., int], capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> None:
    """Whatever is below it in the list, the plan finds the same size, and says what was searched."""
    trace = write_trace(tmp_path / "trace.jsonl")
    of_model = ("--model", "llama-3.1-8b", "--device", "h100-80gb", "--pages", 150)
    lists: list[tuple[object, ...]] = [("--tier", "dram:pages=40"), AS_FLAGS]
    lists += [("--set", "offload.host_pages=40")]
    lists += [("--set", "offload.host_pages=40", "--set", "offload.disk_pages=400")]
    found = []
    for tiers in lists:
        assert run_command("plan", trace, *of_model, *tiers, "--json") == 0
        plan = json.loads(capsysbinary.readouterr().out)
        assert None not in [point["replayed"] for point in plan["tiers"]["curve"]] or "offload.disk_pages=400" in tiers
        least = plan["tiers"]["least_host"]
        assert least.pop("hit_ratio_without", 0.0) == 0.0
        assert run_command("plan", trace, *of_model, *tiers) == 0
        text = " ".join(capsysbinary.readouterr().out.decode().split())
        assert "instead of 0.0 %" in text
        assert (" alone a replay finds" in text) == (len(tiers) > 2)
        found.append(least)
    assert found == found[:1] * 4


def test_a_plan_of_users_names_the_first_tier_of_a_list(
    run_command: Callable[..., int], capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    slo = ("--slo-ttft-ms", 20000, "--slo-share", 0.9)
    of_model = ("--model", "llama-3.1-8b", "--device", "h100-80gb", "--pages", 12000)
    command = ("plan", "users", "sample:agents", "--users", "8..12", *slo, *of_model, "--tier", "dram:size=0", "--json")
    assert run_command(*command) == 0
    users = json.loads(capsysbinary.readouterr().out)["users"]
    point = users["host"]["points"][0]
    assert "--tier dram:size=" in point["command"]
    assert "--host-memory" not in point["command"]
    words = point["command"].partition(" && ")[0].split()
    assert run_command(*words[1:], "--json") == 0
    assert json.loads(capsysbinary.readouterr().out)["prefix_hit_ratio"] == point["hit_ratio"]


def test_a_sweep_changes_a_tier_by_its_name() -> None:
    from kvarts.plan.grid import with_changes

    values = {"tier": [{"name": "dram", "pages": 4}, {"name": "cxl", "pages": 8}]}
    assert with_changes(values, {"tier.cxl.pages": 9, "offload.policy": "lazy"}) == {
        "tier": [{"name": "dram", "pages": 4}, {"name": "cxl", "pages": 9}],
        "offload": {"policy": "lazy"},
    }
    unnamed: Any = {"tier": [{"pages": 4}, {"kind": "files", "pages": 8}]}
    assert with_changes(unnamed, {"tier.disk.pages": 9}, SECTIONS)["tier"][1]["pages"] == 9
    with pytest.raises(ConfigError, match=r"tier\.nvme\.pages: has no table with the name 'nvme'"):
        with_changes(values, {"tier.nvme.pages": 9})


@pytest.mark.parametrize("tiers", [None, "dram:size=1GiB", 4])
def test_an_argument_that_is_no_list_of_tiers_is_refused(tiers: Any) -> None:
    with pytest.raises(ConfigError, match="tier: must be a list of tables"):
        ReplayConfig.for_device("llama-3.1-8b", "h100-80gb", tier=tiers)


def test_a_router_knows_the_tiers_of_every_pool(tmp_path: Path) -> None:
    """Two pools with a tier each, of one name or of two: the same fleet."""
    from kvarts.sim.fleet.config import resolve_fleet

    trace = load_trace(write_trace(tmp_path / "trace.jsonl"))
    tier = {"pages": 400, "read": "500GB/s", "write": "500GB/s"}
    found = []
    for names in (["x", "x"], ["x", "y"]):
        tables = [{"name": name, **tier} for name in ("x", "y")]
        pools = [{"name": f"pool{place}", "tiers": [name]} for place, name in enumerate(names)]
        values = {"pages": 150, "router": "prefix", "tier": tables, "pool": pools}
        found.append(replay(trace, resolve_fleet(given_in(values, SECTIONS), SECTIONS)))
    same, other = found
    assert same.summary["prefix_hit_ratio"] == other.summary["prefix_hit_ratio"]
    assert same.summary["ttft_ms"] == other.summary["ttft_ms"]


@pytest.mark.skipif(not kvarts.sim.router.__file__.endswith(".py"), reason="compiled, a router takes only real engines")
def test_a_router_that_asks_caches_knows_tiers_by_name() -> None:
    """Workers with a list of tiers each: what one has in its first tier may be in the last of all."""
    from kvarts.sim.router import AskedCaches

    def worker(**found: int) -> Any:
        tiers = SimpleNamespace(tier_names=(*found, "store"), found=lambda *_: tuple(found.values()))
        cache = SimpleNamespace(match=lambda *_: SimpleNamespace(num_pages=2))
        return SimpleNamespace(scheduler=SimpleNamespace(cache=cache, tiers=tiers))

    without = worker()
    without.scheduler.tiers = None
    workers = [worker(dram=3, cxl=4, disk=5), worker(disk=6), worker(cxl=7), without, worker()]
    content = Content.from_tokens(range(4), page_size=1, owner=0)
    assert AskedCaches(workers, ["dram", "cxl", "disk"]).matches(content, 100) == {
        0: (2, 3, 4, 5),
        1: (2, 0, 0, 6),
        2: (2, 0, 7, 0),
        3: (2,),
        4: (2, 0, 0, 0),
    }


@pytest.mark.parametrize(("shared", "num_first"), [("", 60), ("store", 60), ("peers", 400)])
def test_three_tiers_of_groups_above_what_engines_share(tmp_path: Path, shared: str, num_first: int) -> None:
    """Two pools with three tiers and one: conserved after every step, and the fast path is that of single steps."""
    from kvarts.sim.fleet.config import resolve_fleet

    trace = load_trace(write_trace(tmp_path / "trace.jsonl", num_prompts=5, num_tokens=2040))
    sizes = {"dram": num_first, "cxl": 90, "nvme": 800}
    rates = {"read": "500GB/s", "write": "500GB/s", "latency_us": 0.0}
    tables = [{"name": name, "pages": pages, **rates} for name, pages in sizes.items()]
    values: dict[str, Any] = {
        "model": "gemma-3-27b",
        "device": "h100-80gb",
        "kv_groups": "all",
        "pages": 150,
        "tier": [*tables, *([{"scope": "all", "pages": 3000}] if shared == "store" else [])],
        "pool": [{"name": "large", "tiers": ["dram", "cxl", "nvme"]}, {"name": "small", "tiers": ["dram"]}],
        **({"transfer": {"pull": True, "rate": "900GB/s"}} if shared == "peers" else {}),
    }
    fast, slow = (
        replay(
            trace,
            resolve_fleet(given_in({**values, "audit": True, "step_by_step": slowly}, SECTIONS), SECTIONS),
        )
        for slowly in (False, True)
    )
    assert fast.requests_jsonl() == slow.requests_jsonl()
    tokens = fast.summary["num_cached_tokens_by_tier"]
    assert tokens[shared or "nvme"]
