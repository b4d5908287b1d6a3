"""Tables of pools: workers that differ, mixed ones next to prefill and decode apart; and what is no pool."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from kvarts.base.errors import ConfigError
from kvarts.sim.config import ReplayConfig
from kvarts.sim.fleet.config import FleetConfig, PoolConfig, Role
from kvarts.sim.fleet.faults import Fault
from kvarts.sim.replaying import replay

from builders.case import Case, cases
from builders.fleet import FleetCase, fault, fleets

SAMPLE = files("kvarts") / "data" / "mooncake-conversation-1000.jsonl"


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "slice.jsonl"
    path.write_text("".join(SAMPLE.read_text().splitlines(keepends=True)[:80]))
    return path


ALL_THREE = """
model = "llama-3.1-8b"
device = "h100-80gb"
[transfer]
rate = "50GB/s"
[[pool]]
role = "prefill"
[[pool]]
role = "decode"
name = "big"
device = "h200-141gb"
max_seqs = 64
[[pool]]
replicas = 2
"""


def test_pools_of_all_three_roles(asked: Callable[..., Any], trace: Path, tmp_path: Path) -> None:
    config, rows_file = tmp_path / "fleet.toml", tmp_path / "rows.jsonl"
    config.write_text(ALL_THREE)
    report = asked("replay", trace, "--config", config, "--json", "--requests", rows_file)
    assert report["num_completed"] == 80
    pools = {pool["name"]: pool for pool in report["fleet"]["pools"]}
    assert {name: (pool["role"], pool["replicas"]) for name, pool in pools.items()} == {
        "prefill": ("prefill", [0]),
        "big": ("decode", [1]),
        "mixed": ("mixed", [2, 3]),
    }
    rows = [json.loads(line) for line in rows_file.read_text().splitlines()]
    assert {(row["prefill_replica"], row["replica"]) for row in rows} == {(0, 1), (2, 2), (3, 3)}
    settings = {pool["name"]: pool for pool in report["config"]["pools"]}
    assert (settings["big"]["device"], settings["big"]["max_seqs"]) == ("h200-141gb", 64)
    assert settings["mixed"]["device"] == settings["prefill"]["device"] == "h100-80gb"


def test_options_of_one_pool_are_short_for_tables(asked: Callable[..., Any], trace: Path, tmp_path: Path) -> None:
    config = tmp_path / "fleet.toml"
    config.write_text(
        'pages = 600\npage_size = 512\n[[pool]]\nrole = "prefill"\n'
        '[[pool]]\nrole = "decode"\nreplicas = 2\npages = 300\n'
    )
    long = asked("replay", trace, "--config", config, "--json")
    short = asked(
        "replay", trace, "--pages", 600, "--page-size", 512, "--json",
        "--prefill", "replicas=1", "--decode", "replicas=2", "--decode", "pages=300",
    )  # fmt: skip
    assert long == short


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[[pool]]\nrole = "both"', "pool.1.role"),
        ("[[pool]]\nreplicas = 0", "pool.1.replicas"),
        ('[[pool]]\nname = "a"\npages = -3', "pool.a.pages"),
        ("[[pool]]\nspeed = 3", "pool.1.speed"),
        ('[[pool]]\nname = "a"\n[[pool]]\nname = "a"', "pool.2.name"),
        ('[[pool]]\nname = "a.b"', "pool.1.name"),
        ("[pool]\nreplicas = 1", "list of tables"),
        ('[[pool]]\nrole = "prefill"', "of prefill workers only"),
        ("replicas = 2\n[[pool]]\nreplicas = 1", "replicas"),
        ("[[pool]]\nreplicas = 1\n[decode]\nreplicas = 1", "decode.replicas"),
        ('[transfer]\nrate = "1GB/s"\n[[pool]]\nreplicas = 2', "transfer.rate"),
        (
            """device = "h100-80gb"
            [[pool]]
            role = "prefill"
            model = "llama-3.1-8b"
            [[pool]]
            role = "decode"
            model = "qwen3-8b" """,
            "different models",
        ),
        ('[[pool]]\nrouter = "llm-d"\n[[pool]]\nreplicas = 1', "behind one router"),
    ],
)
def test_what_is_no_pool_is_refused_by_table_and_field(
    run_command: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    trace: Path,
    tmp_path: Path,
    text: str,
    said: str,
) -> None:
    config = tmp_path / "fleet.toml"
    config.write_text(text)
    assert run_command("replay", trace, "--config", config) == 2
    err = capsys.readouterr().err
    assert said in err
    assert "fleet.toml" in err


@pytest.mark.laws
@given(fleets(cancels=True, faults=True))
def test_pools_that_are_alike_are_one_pool(case: FleetCase) -> None:
    """However the workers of a role are put into pools, the same happens to every request."""
    whole = case.config()
    parts = tuple(
        PoolConfig(role=pool.role, each=structs.replace(pool.each, replicas=1), name=f"{pool.role}-{number}")
        for pool in whole.pools
        for number in range(pool.each.replicas)
    )
    split = structs.replace(whole, pools=parts)
    assert replay(case.case.trace(), split).requests_jsonl() == replay(case.case.trace(), whole).requests_jsonl()


@pytest.mark.laws
@given(
    cases(max_requests=30),
    st.sampled_from(["round-robin", "least-loaded", "prefix"]),
    st.booleans(),
)
def test_replicas_are_one_pool_of_mixed_workers(case: Case, router: str, stops: bool) -> None:
    """The same bytes, if requests arrive at known times and are not cancelled: decision 26 lists other differences."""
    config = case.config(profile="default", router=router, stop_tokens=stops)
    alone = replay(case.trace(), config)
    pool = replay(case.trace(), FleetConfig(pools=(PoolConfig(role="mixed", each=config),)))
    of_pool = pool.requests
    for name, column in alone.requests.items():
        assert list(map(str, of_pool[name])) == list(map(str, column)), name
    for name, column in alone.steps.items():
        assert pool.steps[name].tobytes() == column.tobytes(), name
    assert {**pool.summary, "config": None, "fleet": None} == {**alone.summary, "config": None, "fleet": None}


ROLES: list[list[Role]] = [
    ["mixed", "mixed"],
    ["prefill", "decode", "mixed"],
    ["mixed", "prefill", "decode", "decode"],
    ["prefill", "mixed", "prefill", "decode"],
]


@pytest.mark.laws
@given(
    cases(max_requests=30, cancels=True),
    st.sampled_from(ROLES),
    st.lists(st.sampled_from([1, 4, 8, 40]), min_size=4, max_size=4),
    st.lists(fault(4), max_size=4, unique_by=lambda each: (each.kind, each.worker)),
    st.sampled_from([None, 1000.0]),
)
def test_unlike_workers_of_all_roles_keep_the_laws(
    case: Case, roles: list[Role], more_pages: list[int], faults: list[Fault], rate: float | None
) -> None:
    """L5, L8 and L14; laws L1 to L3 of each worker are checked after each of its steps."""
    is_split = "prefill" in roles
    fast, slow = (
        replay(
            case.trace(),
            FleetConfig(
                pools=tuple(
                    PoolConfig(
                        role=role,
                        each=case.config(
                            replicas=1, num_pages=case.num_pages + more, audit=True, step_by_step=step_by_step
                        ),
                        name=f"{role}-{place}",
                    )
                    for place, (role, more) in enumerate(zip(roles, more_pages, strict=False))
                ),
                bytes_per_s=rate,
                token_bytes=1,
                faults=tuple(each for each in faults if each.worker < len(roles) and (is_split or each.kind == "down")),
            ),
        )
        for step_by_step in (False, True)
    )
    assert fast.requests_jsonl() == slow.requests_jsonl()
    assert fast.to_json() == slow.to_json()
    summary = fast.summary
    ended = sum(summary.get(f"num_{end}", 0) for end in ("completed", "rejected", "failed", "cancelled"))
    assert ended == len(case.rows)
    if case.profile == "default" and not faults:
        assert summary["num_failed"] == 0


def test_a_fleet_of_mixed_pools_has_no_parts_of_a_wait(asked: Callable[..., Any], trace: Path, tmp_path: Path) -> None:
    """They are those of handoffs."""
    config = tmp_path / "fleet.toml"
    config.write_text('pages = 600\npage_size = 512\n[[pool]]\n[[pool]]\nname = "other"\n')
    assert asked("replay", trace, "--config", config, "--json")["fleet"]["waits"] == {}


def test_workers_that_differ_are_named_by_pool(
    run_command: Callable[..., int], capsys: pytest.CaptureFixture[str], trace: Path, tmp_path: Path
) -> None:
    """And not as replicas of the last pool."""
    config = tmp_path / "fleet.toml"
    config.write_text(ALL_THREE)
    assert run_command("replay", trace, "--config", config) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:6] == [
        "rules of vLLM; step times: roofline",
        "prefill: llama-3.1-8b on h100-80gb, 28,392 pages of 16 tokens (55.5 GiB)",
        "big: llama-3.1-8b on h200-141gb, 56,595 pages of 16 tokens (110.5 GiB)",
        "mixed: llama-3.1-8b on h100-80gb, 2 replicas, each of 28,392 pages of 16 tokens",
        "  (55.5 GiB)",
    ]
    assert (
        run_command(
            "replay",
            trace,
            "--model",
            "llama-3.1-8b",
            "--device",
            "h100-80gb",
            "--prefill",
            "replicas=1",
            "--decode",
            "replicas=1",
        )
        == 0
    )
    assert capsys.readouterr().out.splitlines()[2] == "2 replicas, each of 28,392 pages of 16 tokens (55.5 GiB)"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"bytes_per_s": 0}, "bytes_per_s: must be above 0"),
        ({"bytes_per_s": float("nan")}, "bytes_per_s"),
        ({"bytes_per_s": 1e30}, "bytes_per_s: must be at most"),
        ({"latency_ms": -1.0}, "latency_ms: must be at least 0"),
        ({"latency_ms": float("nan")}, "latency_ms"),
        ({"startup_s": -1.0}, "startup_s"),
        ({"hold_s": float("inf")}, "hold_s"),
        ({"token_bytes": -5}, "token_bytes"),
        ({"least_remote": 0}, "least_remote"),
        ({"transfer": "half"}, "transfer: must be one of full-prompt"),
        ({"sharing": "all"}, "sharing: must be one of none"),
        ({"faults": (Fault("down", -1, 0),)}, "names worker -1"),
        ({"faults": (Fault("down", 0, 10, 5),)}, "ends before it begins"),
        ({"faults": (Fault("down", 0, 0, 10), Fault("down", 0, 5))}, "before the one before it ends"),
    ],
)
def test_a_fleet_in_python_is_checked_where_it_is_made(changes: dict[str, Any], said: str) -> None:
    pools = (
        PoolConfig(role="prefill", each=ReplayConfig(num_pages=50)),
        PoolConfig(role="decode", each=ReplayConfig(num_pages=50)),
    )
    with pytest.raises(ConfigError, match=said):
        FleetConfig(pools=pools, **changes)


def test_a_pool_in_python_is_checked_where_it_is_made() -> None:
    with pytest.raises(ConfigError, match="role: must be 'mixed', 'prefill' or 'decode'"):
        PoolConfig(role="both", each=ReplayConfig(num_pages=50))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="gpu_price: must be at least 0"):
        PoolConfig(role="mixed", each=ReplayConfig(num_pages=50), gpu_price=-1.0)
