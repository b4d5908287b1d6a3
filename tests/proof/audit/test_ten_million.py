"""Ten million events of random workloads, over every kind of memory: all are accounted for, and leaps change nothing.

`pytest -m long tests/proof/audit/test_ten_million.py` takes about half an hour. A failure names its seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import msgspec
import pytest

from kvarts.core.events import Event
from kvarts.core.kv.groups import PartGroup
from kvarts.core.kv.layers import KvLayer
from kvarts.core.tiers.config import OffloadConfig
from kvarts.sim.config import ReplayConfig
from kvarts.sim.fleet.config import FleetConfig, PoolConfig, StoreSettings
from kvarts.sim.replaying import replay

from builders.case import Case, Row
from builders.group_tiers import COST
from builders.tiered import BYTES_PER_TOKEN

NUM_EVENTS = 10_000_000
MOST_REQUESTS = 60


class Count:
    """Counts the events of a replay."""

    def __init__(self) -> None:
        self.num_events = 0

    def observe(self, events: Sequence[Event]) -> None:
        self.num_events += len(events)


def random_case(rng: Random) -> Case:
    """Prompts that share beginnings, on memory that is too small for them, and clients that give up."""
    unit_tokens, page_size = rng.choice([1, 2, 4, 8]), rng.choice([1, 2, 3, 4, 8])
    prefixes = [rng.choices(range(3), k=rng.randrange(12)) for _ in range(rng.randint(1, 3))]
    most_output = rng.choice([1, 3, 12, 40])
    with_output = unit_tokens == 1 and rng.random() < 0.5
    rows: list[Row] = []
    arrival_ms = 0
    for _ in range(rng.randint(1, MOST_REQUESTS)):
        arrival_ms += rng.choice([0, 0, 1, 7, 40, 200])
        units = [*rng.choice(prefixes), *rng.choices(range(4), k=rng.randrange(5))] or [0]
        if rows and rng.random() < 0.2:
            before = rng.choice(rows)
            units = [*before.units, *(before.output or ())][:40]
        num_outputs = rng.randint(1, most_output)
        rows.append(
            Row(
                arrival_ms,
                units,
                rng.randint((len(units) - 1) * unit_tokens + 1, len(units) * unit_tokens),
                num_outputs,
                rng.choices(range(2), k=num_outputs) if with_output else None,
                rng.choice([0, 0, 0, -1, 1]),
                rng.choice([None, None, None, "a"]),
                rng.choice([None, None, None, None, 0, 1, 40, 1000]),
            )
        )
    most = max(-(-(row.num_prompt_tokens + row.num_output_tokens - 1) // page_size) for row in rows)
    return Case(
        rows, unit_tokens, page_size, max(1, most + rng.choice([-1, 0, 1, 3, 10, 50])), rng.choice([4, 16, 64]),
        rng.choice([1, 2, 4]), "default", 1, rng.choice([0, 0, 0, 2, 8]), rng.choice([0.0, 0.0, 0.1]),
    )  # fmt: skip


def layer(rng: Random, kind: Any) -> PartGroup:
    if kind == "state":
        return PartGroup(KvLayer(kind="state", state_bytes=1), part_bytes=rng.choice([1, 2, 4]))
    span = rng.randint(1, 9) if kind in ("window", "chunk") else None
    sink = rng.choice([0, 0, 1, 3]) if kind == "window" else 0
    return PartGroup(
        KvLayer(kind=kind, num_heads=1, head_numbers=2, span=span, sink=sink), part_bytes=rng.choice([1, 1, 2, 4])
    )


def groups(rng: Random) -> dict[str, Any]:
    kinds = [
        rng.choice(["full", "full", "window", "latent", "chunk"]),
        *rng.choices(["full", "window", "chunk", "state"], k=rng.randrange(3)),
    ]
    snapshots = rng.choice(["ends", "branches"]) if "state" in kinds else "ends"
    return {
        "groups": tuple(layer(rng, kind) for kind in kinds), "kv_groups": rng.choice(["all", "tails"]),
        "snapshots": snapshots,
    }  # fmt: skip


def host(rng: Random, **more: Any) -> dict[str, Any]:
    rates = [50_000, 1_000_000, 1_000_000_000]
    return {
        "offload": OffloadConfig(
            host_pages=rng.choice([1, 3, 8, 30, 200]), policy=rng.choice(["eager", "lazy"]), h2d=rng.choice(rates),
            target_free=rng.choice([0, 1, 4, 20, None]), d2h=rng.choice(rates), kv_bytes_per_token=BYTES_PER_TOKEN,
            latency_us=rng.choice([0.0, 10.0, 5000.0]), store_within_ms=rng.choice([0.0, 1.0, 20.0, 500.0]),
            fail_every=rng.choice([0, 0, 1, 2, 5]), **more,
        )
    }  # fmt: skip


def files(rng: Random, *, of_groups: bool = False) -> dict[str, Any]:
    rates = [50_000, 1_000_000, 1_000_000_000]
    return host(
        rng, disk_pages=rng.choice([2, 10, 100]), disk_read=rng.choice(rates), disk_write=rng.choice(rates),
        full_prompt_hits=rng.random() < 0.5 and not of_groups,
    )  # fmt: skip


def overlapping(rng: Random, case: Case) -> ReplayConfig:
    """Loads that take about as long as computing, in part behind it."""
    rates = [500, 1000, 2000, 5000, 20_000]
    offload = msgspec.structs.replace(
        files(rng, of_groups=True)["offload"], h2d=rng.choice(rates), disk_read=rng.choice(rates),
        load_overlap=rng.choice(["none", "layers"]), num_layers=rng.choice([2, 8]),
    )  # fmt: skip
    return case.config(**groups(rng), offload=offload, cost=COST)


def mixed(rng: Random, case: Case) -> ReplayConfig:
    case.replicas = rng.choice([2, 3])
    return case.config(router=rng.choice(["round-robin", "least-loaded", "prefix"]), **files(rng))


def apart(rng: Random, case: Case, *, has_store: bool) -> FleetConfig:
    of_all = rng.choice([host, files])(rng) if has_store or rng.random() < 0.5 else groups(rng)
    if has_store:
        of_all = {"offload": OffloadConfig(kv_bytes_per_token=BYTES_PER_TOKEN, policy="eager")}
    rate = rng.choice(["50kB/s", "1MB/s", "1GB/s"])
    return FleetConfig(
        pools=tuple(
            PoolConfig(role=role, each=case.config(replicas=rng.choice([1, 2]), **of_all))
            for role in ("prefill", "decode")
        ),
        bytes_per_s=rng.choice([None, 50.0, 1000.0, 100_000.0]),
        latency_ms=rng.choice([0.0, 3.0, 30.0]),
        transfer=rng.choice(["missing", "full-prompt"]),
        token_bytes=1,
        least_remote=rng.choice([None, None, 1, 5, 20]),
        store=StoreSettings(pages=rng.choice([1, 4, 20, 200]), rate=rate, worker_rate=rate) if has_store else None,
    )


KINDS: dict[str, Callable[[Random, Case], ReplayConfig | FleetConfig]] = {
    "whole pages": lambda rng, case: case.config(),
    "KV groups": lambda rng, case: case.config(**groups(rng)),
    "whole pages, host memory": lambda rng, case: case.config(**host(rng)),
    "whole pages, host memory and files": lambda rng, case: case.config(**files(rng)),
    "KV groups, host memory": lambda rng, case: case.config(**groups(rng), **host(rng)),
    "KV groups, host memory and files": lambda rng, case: case.config(**groups(rng), **files(rng, of_groups=True)),
    "KV groups, host memory and files, loads behind computing": overlapping,
    "replicas, host memory and files": mixed,
    "prefill and decode apart": lambda rng, case: apart(rng, case, has_store=False),
    "a store that workers share": lambda rng, case: apart(rng, case, has_store=True),
}


def audited(config: Any) -> Any:
    """The same configuration, with an auditor that raises for the first finding."""
    if isinstance(config, FleetConfig):
        pools = tuple(msgspec.structs.replace(pool, each=audited(pool.each)) for pool in config.pools)
        return msgspec.structs.replace(config, pools=pools)
    return msgspec.structs.replace(config, audit=True)


def replayed(kind: str, seed: int) -> int:
    """Replay one workload with and without readers; return the number of its events."""
    rng = Random(seed)
    case = random_case(rng)
    config = KINDS[kind](rng, case)
    count = Count()
    watched = replay(case.trace(), audited(config), observers_of=lambda _: [count])
    leapt = replay(case.trace(), config)
    assert watched.requests_jsonl() == leapt.requests_jsonl()
    for name, column in watched.steps.items():
        assert column.tobytes() == leapt.steps[name].tobytes(), name
    return count.num_events


@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        ("KV groups", 1514),
        ("whole pages, host memory and files", 1333),
        ("whole pages, host memory and files", 1376),
        ("KV groups, host memory", 680),
        ("KV groups, host memory and files, loads behind computing", 9193),
    ],
    ids=[
        "a sink",
        "a load that ends before its front",
        "who awaits such a load",
        "an offer that is not taken",
        "a client that leaves a front",
    ],
)
def test_workloads_that_failed(kind: str, seed: int) -> None:
    assert replayed(kind, seed) > 100


@pytest.mark.parametrize("kind", KINDS)
def test_a_few(kind: str) -> None:
    assert sum(replayed(kind, seed) for seed in range(5)) > 100


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_ten_million(kind: str) -> None:
    num_events = seed = 0
    while num_events < NUM_EVENTS // len(KINDS):
        try:
            num_events += replayed(kind, seed)
        except Exception as error:
            raise AssertionError(f"{kind}, seed {seed}") from error
        seed += 1
