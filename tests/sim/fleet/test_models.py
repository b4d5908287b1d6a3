"""Several models in one fleet: a request goes to workers of its model, as if the others were not there."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from kvarts.base.errors import InputError
from kvarts.base.settings import SettingError
from kvarts.core.tiers.config import OffloadConfig
from kvarts.sim.config import ReplayConfig
from kvarts.sim.fleet.config import FleetConfig, PoolConfig, StoreSettings
from kvarts.sim.fleet.report import FleetReport
from kvarts.sim.fleet.scaling import parse_scaler
from kvarts.sim.replaying import replay
from kvarts.sim.routers.config import Routing
from kvarts.sim.traffic.trace import Trace
from kvarts.sim.traffic.trace_request import TraceRequest

from builders.case import NS_PER_MS, Row
from builders.fleet import ENDS, FleetCase, assert_as_naive, fleets, with_changes
from builders.tiered import BYTES_PER_TOKEN

NAMES = ("llama", "qwen", "gemma")


@dataclass
class ModelsCase:
    """The traffic and the workers of each model."""

    cases: list[FleetCase]

    @property
    def rows(self) -> list[tuple[str, int, Row, FleetCase]]:
        """The rows of all models in order of time, each with its place among those of its model."""
        rows = [
            (name, place, row, case)
            for name, case in zip(NAMES, self.cases, strict=False)
            for place, row in enumerate(case.case.rows)
        ]
        return sorted(rows, key=lambda each: each[2].arrival_ms)

    def trace(self, only: str | None = None, *, tenants: bool = False) -> Trace:
        """The requests with their models, or those of one model without."""
        return Trace(
            [
                TraceRequest(
                    number,
                    row.arrival_ms * NS_PER_MS,
                    tokens_of(row, case),
                    row.num_prompt_tokens,
                    row.num_output_tokens,
                    output_units=None if row.output is None else array("Q", row.output).tobytes(),
                    priority=row.priority,
                    tenant=f"{row.tenant} {name}" if tenants else row.tenant,
                    cancel_after_ns=None if row.cancel_after_ms is None else row.cancel_after_ms * NS_PER_MS,
                    request_id=f"{name} {place}",
                    hints=row.hints,
                    model=name if only is None else None,
                )
                for number, (name, place, row, case) in enumerate(self.rows)
                if only in (None, name)
            ],
            has_output_tokens=any(row.output is not None for _, _, row, _ in self.rows),
        )

    @property
    def first_workers(self) -> list[int]:
        """The number of the first worker of each model."""
        return [0, *accumulate(case.num_prefills + case.num_decodes for case in self.cases)][:-1]

    def config(self, *, mixed: int = 0, **changes: Any) -> FleetConfig:
        """The fleet. `mixed`: of the first so many models, all workers do both."""
        first = self.cases[0].config(**changes)
        pools, faults = [], []
        for place, (name, case) in enumerate(zip(NAMES, self.cases, strict=False)):
            config = case.config(**changes)
            prefill, decode = config.pools
            own = [structs.replace(prefill, name=f"{name} P"), structs.replace(decode, name=f"{name} D")]
            if place < mixed:
                num_workers = case.num_prefills + case.num_decodes
                each = structs.replace(decode.each, replicas=num_workers, routing=prefill.each.routing)
                own = [PoolConfig(role="mixed", each=each, name=name)]
            pools += [structs.replace(pool, served_model_name=name) for pool in own]
            faults += [
                structs.replace(fault, worker=fault.worker + self.first_workers[place])
                for fault in case.faults
                if place >= mixed or fault.kind == "down"
            ]
        return structs.replace(first, pools=tuple(pools), faults=tuple(faults))

    def config_of(self, config: FleetConfig, place: int) -> FleetConfig:
        """The workers of one model of `config` alone."""
        begin = self.first_workers[place]
        end = begin + self.cases[place].num_prefills + self.cases[place].num_decodes
        faults = [
            structs.replace(fault, worker=fault.worker - begin)
            for fault in config.faults
            if begin <= fault.worker < end
        ]
        pools = tuple(
            structs.replace(pool, served_model_name=None)
            for pool in config.pools
            if pool.served_model_name == NAMES[place]
        )
        is_mixed = all(pool.role == "mixed" for pool in pools)
        changes: dict[str, Any] = {"transfer": "full-prompt", "layers": 0} if is_mixed else {}
        return structs.replace(config, pools=pools, faults=tuple(faults), **changes)


def tokens_of(row: Row, case: FleetCase) -> bytes:
    tokens = [unit for unit in row.units for _ in range(case.case.unit_tokens)]
    return array("Q", tokens[: row.num_prompt_tokens]).tobytes()


@st.composite
def models(draw: st.DrawFn, /, **settings: Any) -> ModelsCase:
    """Two or three random fleets over the same links, in pages of one size."""
    found = draw(st.lists(fleets(max_requests=14, **settings), min_size=2, max_size=3))
    first = found[0]
    for case in found:
        case.case.page_size, case.case.profile = first.case.page_size, first.case.profile
        case.rate, case.latency_ms, case.only_missing = first.rate, first.latency_ms, first.only_missing
        case.least_remote, case.num_layers, case.queue = first.least_remote, first.num_layers, first.queue
    return ModelsCase(found)


@pytest.mark.laws
@given(st.tuples(st.booleans(), st.booleans()).flatmap(lambda each: models(cancels=each[0], faults=each[1])))
def test_every_model_is_a_naive_fleet_of_its_own(case: ModelsCase) -> None:
    """L4, L7, L8; laws L1 to L3 of each worker are checked after each of its steps."""
    naive = [each.naive() for each in case.cases]
    if any(each.num_deadlocks for each in naive):
        return  # a deadlock is found once nothing happens in the whole fleet
    report: FleetReport = replay(case.trace(), case.config())
    for name, each, fleet, first in zip(NAMES, case.cases, naive, case.first_workers, strict=False):
        places = [number for number, (of, _, _, _) in enumerate(case.rows) if of == name]
        assert_as_naive(each, fleet, report, places, first)
    assert report.requests["model"] == [name for name, _, _, _ in case.rows]


@st.composite
def settings_of_all(draw: st.DrawFn) -> dict[str, Any]:
    """Routers of all kinds, with queues, old metrics, and steps that are planned ahead."""
    router = draw(st.sampled_from(["round-robin", "least-loaded", "power-of-two", "prefix", "dynamo-kv", "llm-d"]))
    staleness = draw(st.sampled_from([None, None, "20ms"]))
    threshold = draw(st.sampled_from([None, None, 0.1, 1.0]))
    routing: dict[str, Any] = {} if threshold is None else {"queue_threshold": threshold}
    if staleness is not None and router in ("prefix", "llm-d"):
        routing["staleness"] = staleness
    return {"router": router, "routing": Routing(**routing), "async_scheduling": draw(st.booleans())}


HOST = OffloadConfig(host_pages=6, h2d="1MB/s", d2h="1MB/s", kv_bytes_per_token=BYTES_PER_TOKEN)
STORES = (
    None,
    StoreSettings(pages=8, rate="1000GB/s", worker_rate="1MB/s", latency_us=0.0),
    StoreSettings(pages=50, rate="1000GB/s", worker_rate="50kB/s", latency_us=5000.0),
)
"""Stores whose own links are never what a transfer waits for."""


@pytest.mark.slow
@pytest.mark.laws
@given(
    models(profile="default", cancels=True, faults=True),
    st.integers(0, 3),
    settings_of_all(),
    st.sampled_from([None, HOST]),
    st.sampled_from(STORES),
    st.booleans(),
    st.sampled_from([None, "queue,target=1,every=0.03s,stable=0.1s", "kv,target=40,every=0.05s,stable=0s,most=3"]),
    st.sampled_from(["none", "worker", "pool"]),
)
def test_a_model_is_served_as_if_the_others_were_not_there(
    case: ModelsCase,
    mixed: int,
    changes: dict[str, Any],
    offload: OffloadConfig | None,
    store: StoreSettings | None,
    pulls: bool,
    policy: str | None,
    sharing: Any,
) -> None:
    """Routers, queues, handoffs, stores, pulls, faults and scalers of one model know nothing of another; and L5."""
    rate = case.cases[0].rate
    pulls = pulls and offload is not None and rate is not None and store is None and not case.cases[0].is_layer_wise
    for each in case.cases:
        each.queue = None
    config = structs.replace(
        case.config(mixed=min(mixed, len(case.cases)), offload=offload, **changes),
        store=store,
        pulls=pulls,
        sharing="none" if rate is None else sharing,
        scaler=None if policy is None else partial(parse_scaler, policy),
        startup_s=0.03,
    )
    report: FleetReport = replay(case.trace(), config)
    slow: FleetReport = replay(case.trace(), with_changes(config, step_by_step=True))
    assert slow.requests_jsonl() == report.requests_jsonl()
    assert slow.to_json() == report.to_json()
    rows = [json.loads(line) for line in report.requests_jsonl().splitlines()]
    summary = report.summary
    assert sum(summary.get(f"num_{end}", 0) for end in ENDS) == len(case.rows)
    for place, name in enumerate(NAMES[: len(case.cases)]):
        alone = replay(case.trace(name), case.config_of(config, place))
        of_alone = [json.loads(line) for line in alone.requests_jsonl().splitlines()]
        workers = sorted(
            worker
            for pool, told in zip(config.pools, summary["fleet"]["pools"], strict=True)
            for worker in told["replicas"]
            if pool.served_model_name == name
        )
        mine = [{key: row[key] for key in row if key != "model"} for row in rows if row["model"] == name]
        for row in mine:
            for field in ("replica", "prefill_replica"):
                row[field] = workers.index(row[field]) if row[field] >= 0 else row[field]
        assert mine == of_alone
        (of_model,) = [each for each in summary["fleet"]["models"] if each["name"] == name]
        for field in ("num_completed", "ttft_ms", "tpot_ms", "e2e_ms", "prefix_hit_ratio"):
            assert of_model[field] == alone.summary[field], field
        if store is not None:
            (used,) = [each for each in summary["fleet"]["store"] if each["model"] == name]
            assert used["num_evicted_pages"] == alone.summary["fleet"]["store"]["num_evicted_pages"]


@pytest.mark.laws
@given(models(profile="default", faults=True), st.sampled_from(["1MB/s", "50kB/s"]), st.booleans())
def test_models_share_no_kv(case: ModelsCase, rate: str, pulls: bool) -> None:
    """Where links are shared, too: prompts of two models are no more alike than those of two tenants."""
    offload = HOST if pulls else None
    store = None if pulls else StoreSettings(pages=20, rate=rate, worker_rate=rate)
    for each in case.cases:
        each.rate, each.num_layers = each.rate or 1e5, 0
    config = structs.replace(case.config(mixed=1, offload=offload), store=store, pulls=pulls)
    apart, together = replay(case.trace(tenants=True), config), replay(case.trace(), config)
    assert together.requests_jsonl() == apart.requests_jsonl()
    assert together.summary["fleet"] == apart.summary["fleet"]


def pool(name: str, **settings: Any) -> PoolConfig:
    each = ReplayConfig(num_pages=100, page_size=4, **settings)
    return PoolConfig(role="mixed", each=each, name=name, served_model_name=name)


def request(row: int, model: str | None) -> TraceRequest:
    return TraceRequest(row, row * NS_PER_MS, array("Q", [1, 2, 3]).tobytes(), 3, 2, model=model)


@pytest.mark.parametrize(
    ("model", "said"),
    [("mistral", "row 2 asks for 'mistral', and the pools have llama and qwen"), (None, "row 2 names no model, and")],
)
def test_a_request_for_a_model_that_is_not_there_is_an_error(model: str | None, said: str) -> None:
    config = FleetConfig(pools=(pool("llama"), pool("qwen")))
    trace = Trace([request(0, "llama"), request(1, model)], name="two.jsonl")
    with pytest.raises(InputError, match=said) as caught:
        replay(trace, config)
    assert caught.value.field == "model"


def test_a_stream_is_not_read_beforehand() -> None:
    config = FleetConfig(pools=(pool("llama"), pool("qwen")))
    rows = (request(row, model) for row, model in enumerate(["llama", "mistral", "qwen"]))
    trace = Trace(rows)
    trace.names_models = True
    report = replay(trace, config)
    assert report.requests["status"] == ["completed", "rejected", "completed"]
    assert report.requests["reason"][1] == "no worker has the model 'mistral'"
    assert [model["num_requests"] for model in report.summary["fleet"]["models"]] == [1, 1]


def test_a_stream_whose_models_are_not_announced_is_an_error() -> None:
    """Of a fleet with several models; with one, all go there."""
    rows = [request(0, None), request(1, "qwen")]
    config = FleetConfig(pools=(pool("llama"), pool("qwen")))
    with pytest.raises(InputError, match="row 2 names a model") as caught:
        replay(Trace(iter(rows)), config)
    assert caught.value.field == "model" and "`names_models`" in (caught.value.hint or "")
    assert replay(Trace(iter(rows)), FleetConfig(pools=(pool("llama"),))).requests["status"] == ["completed"] * 2


def test_requests_without_models_go_to_any_worker() -> None:
    """And with models, if all workers have one: nothing changes by a byte."""
    trace = Trace([request(row, None) for row in range(6)])
    named = replay(trace, FleetConfig(pools=(pool("llama"), pool("qwen"))))
    pools = tuple(structs.replace(pool(name), served_model_name=None) for name in ("llama", "qwen"))
    plain = replay(trace, FleetConfig(pools=pools))
    assert named.requests_jsonl() == plain.requests_jsonl()
    assert sorted(set(named.requests["replica"].tolist())) == [0, 1]
    of_one = Trace([request(row, "gpt") for row in range(6)])
    asked = replay(of_one, FleetConfig(pools=pools))
    assert asked.to_json() == plain.to_json()
    assert asked.requests_jsonl() == plain.requests_jsonl()


def test_models_may_have_unlike_routers() -> None:
    """Then every request must say whose it is."""
    config = FleetConfig(pools=(pool("llama", router="prefix"), pool("qwen", router="least-loaded")))
    report = replay(Trace([request(0, "llama"), request(1, "qwen")]), config)
    assert report.requests["replica"].tolist() == [0, 1]
    with pytest.raises(InputError, match="row 1 names no model"):
        replay(Trace([request(0, None)]), config)


def test_prefill_and_decode_of_several_models_need_to_be_told_which() -> None:
    pools = tuple(
        PoolConfig(role=role, each=ReplayConfig(num_pages=100), name=f"{name} {role}", served_model_name=name)
        for name in ("llama", "qwen")
        for role in ("prefill", "decode")
    )
    with pytest.raises(InputError, match="row 1 names no model"):
        replay(Trace([request(0, None)]), FleetConfig(pools=pools))
    with pytest.raises(SettingError, match="different models"):
        FleetConfig(pools=(pools[0], pools[3]))


TWO = """
device = "h100-80gb"
[transfer]
rate = "50GB/s"
[[pool]]
name = "chat-P"
role = "prefill"
model = "llama-3.1-8b"
served_model_name = "chat"
[[pool]]
name = "chat-D"
role = "decode"
model = "llama-3.1-8b"
served_model_name = "chat"
[[pool]]
name = "code"
model = "qwen3-8b"
replicas = 2
router = "prefix"
"""


def two_models(path: Path) -> Path:
    rows = [
        {"timestamp": 40 * number, "input_length": 900, "output_length": 20, "hash_ids": [number % 5, number % 7],
         "model": "qwen3-8b" if number % 3 else "chat"}
        for number in range(60)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_two_models_from_the_command_line(
    run_command: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Rows of the report have the names of pools and models; timelines verify."""
    config, trace = tmp_path / "fleet.toml", two_models(tmp_path / "trace.jsonl")
    config.write_text(TWO)
    assert run_command("replay", trace, "--config", config, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert [(each["name"], each["num_requests"]) for each in report["fleet"]["models"]] == [
        ("chat", 20), ("qwen3-8b", 40)
    ]  # fmt: skip
    assert [each.get("served_model_name") for each in report["config"]["pools"]] == ["chat", "chat", None]
    timeline, rows_file = tmp_path / "t.json", tmp_path / "rows.jsonl"
    assert run_command("replay", trace, "--config", config, "--timeline", timeline, "--requests", rows_file) == 0
    lines = capsys.readouterr().out.splitlines()
    begins = [line[:22].split("  ")[0] for line in lines]
    for name in ("chat", "qwen3-8b", "chat-P (prefill)", "chat-D (decode)", "code (mixed)"):
        assert name in begins, lines
    rows = [json.loads(line) for line in rows_file.read_text().splitlines()]
    placed = {(row["model"], row["prefill_replica"], row["replica"]) for row in rows}
    assert placed == {("chat", 0, 1), ("qwen3-8b", 2, 2), ("qwen3-8b", 3, 3)}
    for worker in range(4):
        assert run_command("verify", tmp_path / f"t-r{worker}.json") == 0
    capsys.readouterr()


def test_each_model_has_its_own_weight_on_a_link(asked: Callable[..., Any], tmp_path: Path) -> None:
    """A token of Llama 3.1 8B has 131,072 bytes, one of Qwen3 8B 147,456."""
    config, trace, rows_file = tmp_path / "fleet.toml", two_models(tmp_path / "trace.jsonl"), tmp_path / "rows.jsonl"
    config.write_text(
        'device = "h100-80gb"\n[transfer]\nrate = "50GB/s"\n'
        + "".join(
            f'[[pool]]\nname = "{served}-{role}"\nrole = "{role}"\nmodel = "{model}"\nserved_model_name = "{served}"\n'
            for model, served in (("llama-3.1-8b", "chat"), ("qwen3-8b", "qwen3-8b"))
            for role in ("prefill", "decode")
        )
    )
    asked("replay", trace, "--config", config, "--json", "--requests", rows_file)
    rows = [json.loads(line) for line in rows_file.read_text().splitlines()]
    assert {(row["model"], row["transferred_bytes"] / 900) for row in rows} == {
        ("chat", 131_072),
        ("qwen3-8b", 147_456),
    }


def test_a_workload_of_two_models(asked: Callable[..., Any], tmp_path: Path) -> None:
    config = tmp_path / "fleet.toml"
    config.write_text(
        TWO + '[workload]\nnum_sessions = 30\nsessions_per_s = 20.0\nmodels = ["chat", "qwen3-8b", "chat"]\n'
        'new_tokens = {kind = "fixed", tokens = 200}\noutput_tokens = {kind = "fixed", tokens = 10}\n'
    )
    report = asked("replay", "--config", config, "--json")
    assert [each["num_completed"] for each in report["fleet"]["models"]] == [20, 10]


def test_workers_of_a_model_that_start_do_not_keep_another_from_scaling() -> None:
    each = ReplayConfig(num_pages=40, max_num_seqs=4)
    scaler = partial(parse_scaler, "dynamo,context=1000,every=1s")

    def ends_of_first(*names: str) -> list[float]:
        pools = tuple(PoolConfig(role="mixed", each=each, name=name, served_model_name=name) for name in names)
        arrivals = [(place * 50, name) for place in range(200) for name in names if name != "a" or place >= 30]
        rows = [
            TraceRequest(index, at_ms * NS_PER_MS, (range(10_000 * index, 10_000 * index + 100),), 100, 40, model=name)
            for index, (at_ms, name) in enumerate(arrivals)
        ]
        report = replay(Trace(rows), FleetConfig(pools=pools, scaler=scaler, startup_s=5.0))
        ends = report.requests["last_token_ms"]
        return [float(end) for end, (_, name) in zip(ends, arrivals, strict=True) if name == "a"]

    assert ends_of_first("a") == ends_of_first("a", "b")


ALIKE = """
device = "h100-80gb"
tensor_parallel = 4
pages = 200
"""
"""Settings of workers whose models have tokens with the same number of bytes."""

LLAMA_AND_QWEN = """
[[pool]]
name = "l"
model = "llama-3.1-70b"
{served}
[[pool]]
name = "q"
model = "qwen2.5-72b"
{served}
"""

SHARED = {
    "a store": '[store]\nmemory = "64GB"\n',
    "pulls": '[transfer]\nrate = "100GB/s"\npull = true\n[offload]\nhost_pages = 1000\n',
}


@pytest.mark.parametrize("shared", SHARED.values(), ids=SHARED)
@pytest.mark.parametrize(
    ("served", "said"), [("", "row 1 names no model"), ('served_model_name = "x"', "pools with different models")]
)
def test_kv_is_of_one_model_although_another_has_tokens_of_the_same_size(
    shared: str,
    served: str,
    said: str,
    run_command: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    config, trace = tmp_path / "fleet.toml", tmp_path / "trace.jsonl"
    config.write_text(ALIKE + shared + LLAMA_AND_QWEN.format(served=served))
    trace.write_text('{"timestamp": 0, "input_length": 512, "output_length": 4, "hash_ids": [1]}\n')
    assert run_command("replay", trace, "--config", config) != 0
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("is_first", [False, True])
def test_the_kv_of_a_model_without_a_known_weight_has_not_that_of_another(
    is_first: bool, run_command: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config, trace = tmp_path / "fleet.toml", two_models(tmp_path / "trace.jsonl")
    known, unknown = (
        "".join(
            f'[[pool]]\nname = "{served}-{role}"\nrole = "{role}"\nserved_model_name = "{served}"\n{own}\n'
            for role in ("prefill", "decode")
        )
        for served, own in (
            ("chat", 'model = "llama-3.1-8b"\ndevice = "h100-80gb"'),
            ("qwen3-8b", 'pages = 400\ncost = "linear:step_ms=5"'),
        )
    )
    config.write_text('[transfer]\nrate = "1GB/s"\n' + (unknown + known if is_first else known + unknown))
    assert run_command("replay", trace, "--config", config) == 2
    assert "nothing says what the KV of a token weighs" in capsys.readouterr().err
    assert run_command("replay", trace, "--config", config, "--transfer", "token_bytes=1000") == 0
    capsys.readouterr()


def pool_of(name: str, model: str, *more: str) -> str:
    lines = [f'name = "{name}"', f'model = "{model}"', f'served_model_name = "{name}"', "pages = 400", *more]
    return "\n".join(["[[pool]]", *lines, ""])


def test_pages_of_several_models_have_no_size_in_common(
    run_command: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """In any order of pools."""
    config, trace = tmp_path / "fleet.toml", two_models(tmp_path / "trace.jsonl")
    pools = [pool_of("chat", "llama-3.1-8b"), pool_of("qwen3-8b", "qwen3-0.6b")]
    for ordered in (pools, pools[::-1]):
        config.write_text('device = "h100-80gb"\nrouter = "least-loaded"\n' + "".join(ordered))
        assert run_command("replay", trace, "--config", config) == 0
        lines = capsys.readouterr().out.splitlines()
        (distinct,) = [line for line in lines if line.startswith("distinct")]
        assert "GiB" not in distinct
    config.write_text('device = "h100-80gb"\n' + pool_of("chat", "qwen3-0.6b") + pool_of("qwen3-8b", "qwen3-0.6b"))
    assert run_command("replay", trace, "--config", config) == 0
    assert "GiB" in capsys.readouterr().out


def test_the_report_has_the_weight_of_a_token_of_each_pool(asked: Callable[..., Any], tmp_path: Path) -> None:
    config, trace = tmp_path / "fleet.toml", two_models(tmp_path / "trace.jsonl")
    config.write_text(TWO)
    report = asked("replay", trace, "--config", config, "--json")
    assert [each["token_bytes"] for each in report["config"]["pools"]] == [131_072, 131_072, 147_456]


def test_rows_of_models_with_kv_groups_are_of_blocks_and_name_their_store(
    run_command: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config, trace = tmp_path / "fleet.toml", two_models(tmp_path / "trace.jsonl")
    more = ('kv_memory = "400MB"',)
    pools = [
        pool_of(name, model, *more).replace("pages = 400\n", "")
        for name, model in (("chat", "gpt-oss-20b"), ("qwen3-8b", "gemma-3-4b"))
    ]
    config.write_text('device = "h100-80gb"\n[store]\nmemory = "20GB"\n' + "".join(pools))
    assert run_command("replay", trace, "--config", config) == 0
    lines = capsys.readouterr().out.splitlines()
    (evicted,) = [line for line in lines if line.startswith("KV pages")]
    assert evicted.endswith(" blocks evicted")
    stores = [line for line in lines if line.startswith("store ")]
    assert [line.rpartition(", of ")[2] for line in stores] == ["chat", "qwen3-8b"]
    (of_pool,) = [line for line in lines if line.startswith("qwen3-8b (mixed)")]
    assert {line.index(line.split()[1]) for line in stores} == {of_pool.index("1 worker")}
