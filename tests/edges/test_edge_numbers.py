"""Numbers that no machine has: for every option of every command, for files, and for the library."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts import KvartsError, LinearCost, OffloadConfig, ReplayConfig, SamplingParams, Slo, Workload
from kvarts.base.limits import LATEST_NS, TooLateError, brief, check_number, check_whole, whole_number
from kvarts.base.units import parse_bytes, parse_duration_s, parse_rate
from kvarts.cli.options import role_of
from kvarts.core.config import EngineConfig
from kvarts.cost.roofline import RooflineCost
from kvarts.run.sessions.soak.run import SoakPlan
from kvarts.run.sessions.values import SessionsConfig, SessionSettings
from kvarts.sim.hardware import DeviceSettings
from kvarts.sim.traffic.workload import FixedLength, LogNormalLength, UniformLength

from builders.calls import CALLS, commands

Run = Callable[..., tuple[int, bytes, str]]

DOCUMENTED = {0, 2, 3, 4, 5, 6, 7}
FEW = ("-1", str(2**63), "1e308")
MANY = (
    "0", "-0", "1.5", "nan", "inf", "-inf", str(2**31), str(2**64), str(-(2**63)), "9" * 5000, "1e-308", "1e400",
    "", " ", "x", "\N{ARABIC-INDIC DIGIT THREE}", "1_000", "0x10", "16EiB", "9" * 400 + "GB",
    "9" * 400 + "h", "a=" + "9" * 400,
)  # fmt: skip
VALUES = {
    f"--set offload.{name}" for name in ["target_free", "latency_us", "kv_bytes_per_token", "h2d", "d2h", "disk_pages"]
}
VALUES |= {f"--set offload.{name}" for name in ["disk_memory", "disk_read", "disk_write", "disk_latency_us"]} | {
    "--offload"
}

NAMED_INSTEAD = {
    "--sglang-args": "--model",
    "--vllm-args": "--model",
    "--set max_model_len": "--set engine",
    "--set kv_memory": "--set engine",
    "--set memory_fraction": "--device",
    "--set pipeline_parallel": "--gpus",
    "--replicas": "--routers",
}
"""Options that say what others do: an error may name one of those."""


def valued(name: str) -> list[click.Parameter]:
    """The options that take a value which is no path."""
    return [
        param
        for param in commands()[name].get_params(click.Context(commands()[name]))
        if param.param_type_name == "option" and not getattr(param, "is_flag", False) and role_of(param) is None
    ]


NAMES = [name for name, call in CALLS.items() if not call.is_slow and name not in ("serve sessions", "watch")]


def words(name: str, param: click.Parameter, value: str) -> list[str]:
    here = ["127.0.0.1" if text == "0.0.0.0" else text for text in CALLS[name].arguments]
    arguments = [*name.split(), *here, *with_option(param, value)]
    if param.opts[0] in VALUES:
        arguments += ["--host-pages", "5"]
    return arguments


def with_option(param: click.Parameter, value: str) -> list[str]:
    flag, *key = param.opts[0].split(" ")
    return [flag, f"{key[0]}={value}"] if key else [flag, value]


def try_values(name: str, call: Run, values: tuple[str, ...], *, in_turn: bool = False) -> None:
    """Try every value with every option; `in_turn`: one value with each."""
    for place, param in enumerate(valued(name)):
        for value in values[place % len(values) :][:1] if in_turn else values:
            code, _, err = call(*words(name, param, value))
            what = f"{param.opts[0]} {value[:20]}: {code} {err[:300]}"
            assert code in DOCUMENTED, what
            assert len(err) < 4000, what
            if code == 2 and err.startswith("kvarts: --"):
                named = (param.opts[0], NAMED_INSTEAD.get(param.opts[0], param.opts[0]))
                assert err.startswith(tuple(f"kvarts: {flag}" for flag in named)), what


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("soak", "calibrate")])
def test_a_number_for_each_option_is_not_answered_by_a_traceback(name: str, here: Path, call: Run) -> None:
    try_values(name, call, FEW, in_turn=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("soak", "calibrate")])
def test_no_number_is_answered_by_a_traceback(name: str, here: Path, call: Run) -> None:
    try_values(name, call, FEW)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_no_value_is_answered_by_a_traceback(name: str, here: Path, call: Run) -> None:
    try_values(name, call, FEW + MANY)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--host-pages 5 --set offload.latency_us=-1", "--set offload.latency_us: must be at least 0"),
        ("--host-pages 5 --set offload.latency_us=1e308", "--set offload.latency_us: must be at most 1e+12"),
        (
            "--host-pages 5 --set offload.kv_bytes_per_token=9223372036854775808",
            "--set offload.kv_bytes_per_token: must be at most",
        ),
        ("--page-size 9223372036854775808", "--page-size: must be at most 1,048,576"),
        ("--replicas 9223372036854775808", "--replicas: must be at most 4,096"),
        ("--trace-block-size 9223372036854775808", "--trace-block-size"),
        ("--cost linear:", "--cost: says nothing: every step would take no time"),
        ("--cost linear:step_ms=1,step_ms=2", "--cost: says step_ms twice"),
        ("--cost linear:step_ms=1e308", "must be at most"),
        ("--speedup 1e-308", "the replay lasts longer than 73 years"),
        ("--model llama-3.1-8b --device cpu:cores=8,cores=9", "has cores twice"),
        ("--replicas 2 --pages 9 --store pages=0", "--store pages: must be at least 1"),
        ("--replicas 2 --router llm-d:prefix=3,prefix=4", "--router: llm-d has prefix twice"),
        (
            "--replicas 2 --host-pages 9 --set transfer.pull=true --store pages=5 --transfer rate=1GB/s",
            "--set transfer.pull: does not go with a store",
        ),
        ("--replicas 2 --set transfer.pull=true --transfer rate=1GB/s,token_bytes=8", "Give --host-memory as well"),
    ],
)
def test_what_is_out_of_its_limits_is_named_as_it_was_typed(arguments: str, says: str, here: Path, call: Run) -> None:
    code, out, err = call("replay", "trace.jsonl", *arguments.split())
    assert (code, out, says in err) == (2, b"", True), err


LAYER_WISE = "--prefill replicas=1 --decode replicas=1 --transfer rate=1B/s,mode=layer-wise,layers=2"


@pytest.mark.parametrize(
    "arguments",
    [
        "--replicas 2 --store pages=500,rate=1B/s",
        "--replicas 2 --store pages=500,worker_rate=1B/s",
        "--host-pages 500 --set offload.d2h=1B/s",
        "--prefill replicas=1 --decode replicas=1 --transfer rate=1B/s,sharing=worker",
        "--prefill replicas=1 --decode replicas=1 --transfer rate=1B/s --set faults.script=slow:0:1000000=0s",
        f"{LAYER_WISE} --set faults.script=slow:0:1000000=0s",
    ],
)
def test_transfers_that_last_longer_than_virtual_time_are_refused(arguments: str, here: Path, call: Run) -> None:
    """Where transfers share a rate, they were never ended."""
    rows = [
        f'{{"timestamp": {row}, "input_length": 512, "output_length": 2, "hash_ids": [{row}]}}' for row in range(60)
    ]
    (here / "trace.jsonl").write_text("\n".join(rows))
    of_links = ("--transfer", f"token_bytes={1 << 30}")
    bytes_per_token = of_links if "--transfer rate" in arguments else ("--set", f"offload.kv_bytes_per_token={1 << 30}")
    code, _, err = call("replay", "trace.jsonl", *arguments.split(), *bytes_per_token)
    assert (code, "the replay lasts longer than 73 years" in err) == (2, True), err


@pytest.mark.parametrize(
    "arguments",
    [
        "--model a=llama-3.1-8b --model a=qwen3-8b --trace a=trace.jsonl",
        "--model a=llama-3.1-8b --trace a=trace.jsonl --trace a=other.jsonl",
        "--model a=llama-3.1-8b:weight=1,weight=2 --trace a=trace.jsonl",
    ],
)
def test_nothing_that_is_given_twice_is_dropped(arguments: str, here: Path, call: Run) -> None:
    code, _, err = call("replay", "--device", "h100-80gb", *arguments.split())
    assert (code, "is given twice" in err) == (2, True), err


ROW = '{{"timestamp": {}, "input_length": {}, "output_length": {}, "hash_ids": [7, 8]}}\n'


@pytest.mark.parametrize(
    ("timestamp", "input_length", "output_length"),
    [
        (4 * 10**18, 600, 3),
        ("1e308", 600, 3),
        ("1e400", 600, 3),
        (2**63, 600, 3),
        (0, 600, 2**63),
        (0, 600, 2**31),
        (0, 2**63, 3),
        (0, -(2**63), 3),
        (-1, 600, 3),
    ],
)
def test_a_row_out_of_its_limits_is_named(
    timestamp: Any, input_length: int, output_length: int, here: Path, call: Run
) -> None:
    Path("far.jsonl").write_text(ROW.format(0, 600, 3) + ROW.format(timestamp, input_length, output_length))
    code, _, err = call("replay", "far.jsonl")
    assert (code, err.startswith("kvarts: far.jsonl:2: ")) == (4, True), err


def test_times_in_another_unit_are_found(here: Path, call: Run) -> None:
    """Nanoseconds by mistake: more than virtual time can count after 38 minutes."""
    Path("ns.jsonl").write_text(ROW.format(0, 600, 3) + ROW.format(77 * 60 * 10**9, 600, 3))
    assert call("replay", "ns.jsonl")[0] == 4
    Path("far.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n0001-01-01 00:00:00,5,5\n9999-01-01 00:00:00,5,5\n"
    )
    assert call("replay", "far.csv")[0] == 4
    Path("m.csv").write_text(Path("measured.csv").read_text().replace("0,0.0,", "0,-1e300,"))
    assert call("compare", "run", "m.csv")[0] == 4


@pytest.mark.parametrize(
    "text",
    [
        "num_sessions = 1000000000000",
        "num_sessions = 2\nsessions_per_s = 1e-300",
        "num_sessions = 2\nprefix_tokens = 9223372036854775808",
        "num_sessions = 2\nseed = -1",
        "num_sessions = 2\nthink_time_s = 1e308",
        f"num_sessions = {'9' * 5000}",
    ],
)
def test_traffic_that_would_not_fit_is_refused(text: str, here: Path, call: Run) -> None:
    lengths = 'new_tokens = {kind = "fixed", tokens = 1}\noutput_tokens = {kind = "fixed", tokens = 1}\n'
    Path("w.toml").write_text(f"[workload]\n{text}\n{lengths}")
    code, _, err = call("replay", "--config", "w.toml")
    assert (code in (2, 4), err.startswith("kvarts: w.toml: ")) == (True, True), err


@pytest.mark.parametrize(
    "change", ['"head_dim": 0', '"num_hidden_layers": 1000000000000', '"num_key_value_heads": 0', '"hidden_size": 2']
)
def test_a_model_without_numbers_is_refused(change: str, here: Path, call: Run) -> None:
    text = Path("config.json").read_text()
    Path("bad.json").write_text(text[:-1] + f", {change}}}")
    code, out, err = call("model", "show", "bad.json")
    assert (code, out, err.startswith("kvarts: bad.json: ")) == (4, b"", True), err


# The library -------------------------------------------------------------------------------------------------

STRANGE: list[Any] = [-1, 2**63, 10**5000, math.nan, math.inf, -math.inf, 1e308, True, "4", b"4", [], 1.5]
LENGTH = FixedLength(1)
WORKLOAD = {"num_sessions": 1, "new_tokens": LENGTH, "output_tokens": LENGTH}
SOAK = {"target": "x", "duration_s": 1.0}
Built = tuple[Callable[..., Any], dict[str, Any], tuple[str, ...]]
BUILT: list[Built] = [
    (EngineConfig, {}, ("num_pages", "page_size", "max_num_batched_tokens", "max_num_seqs")),
    (ReplayConfig, {}, ("replicas", "concurrency", "num_pages")),
    (OffloadConfig, {"host_pages": 5}, ("host_pages", "kv_bytes_per_token", "workers", "fail_every", "target_free")),
    (Workload, WORKLOAD, ("num_sessions", "turns_per_session", "seed")),
    (FixedLength, {}, ("tokens",)),
    (UniformLength, {"low": 1, "high": 2}, ("low", "high")),
    (LogNormalLength, {"median": 1}, ("median", "high")),
    (SamplingParams, {}, ("max_tokens", "top_k", "seed")),
    (SessionSettings, {}, ("sink", "window")),
    (SessionsConfig, {}, ("max_sessions", "memory_bytes", "chunk_tokens")),
    (SoakPlan, SOAK, ("num_sessions", "prompt_tokens", "max_tokens", "seed", "vocab_size")),
    (DeviceSettings, {}, ("tensor_parallel",)),
]  # fmt: skip
FLOATS: list[Built] = [
    (ReplayConfig, {}, ("speedup",)),
    (Slo, {}, ("ttft_ms", "tpot_ms", "e2e_ms")),
    (LinearCost, {}, ("step_ms", "chunk_token_ms", "decode_ms", "context_token_ms")),
    (OffloadConfig, {"host_pages": 5}, ("latency_us", "disk_latency_us")),
    (Workload, WORKLOAD, ("sessions_per_s", "think_time_s")),
    (SessionSettings, {}, ("ttl_s",)),
    (SoakPlan, SOAK, ("duration_s", "turn_spacing_s", "max_drift", "turn_timeout_s")),
    (RooflineCost, {"llm": "llama-3.1-8b", "device": "h100-80gb"}, ("step_us", "sequence_us", "compute_efficiency")),
]


@pytest.mark.parametrize(("kind", "values", "fields"), BUILT)
def test_counts_are_checked_where_they_are_built(
    kind: Callable[..., Any], values: dict[str, Any], fields: tuple[str, ...]
) -> None:
    for field in fields:
        for strange in STRANGE:
            if strange == 2**63 and field == "seed":
                continue
            with pytest.raises(KvartsError):
                kind(**{**values, field: strange})


@pytest.mark.parametrize(("kind", "values", "fields"), FLOATS)
def test_numbers_are_checked_where_they_are_built(
    kind: Callable[..., Any], values: dict[str, Any], fields: tuple[str, ...]
) -> None:
    for field in fields:
        for strange in (-1.0, math.nan, math.inf, -math.inf, 1e308, True, "4"):
            with pytest.raises(KvartsError):
                kind(**{**values, field: strange})


@pytest.mark.laws
@given(st.text(max_size=30) | st.from_regex(r"\s*\d{1,400}(\.\d{1,400})?([kMGT]i?B?|[dhms])?", fullmatch=True))
def test_what_is_parsed_has_its_limits(text: str) -> None:
    for parse in (parse_bytes, parse_rate, parse_duration_s):
        try:
            assert 0 <= parse(text) <= 1 << 60
        except KvartsError as error:
            assert len(str(error)) < 300  # noqa: PT017


@pytest.mark.laws
@given(st.integers() | st.floats() | st.text() | st.binary() | st.none())
def test_a_value_is_shown_in_a_few_characters(value: Any) -> None:
    assert len(brief(value)) <= 43
    for check in (check_whole, check_number):
        try:
            check(value, "field", least=0, most=10)
        except KvartsError as error:
            assert error.field == "field"  # noqa: PT017
        else:
            assert 0 <= value <= 10


def test_virtual_time_has_an_end() -> None:
    """And nothing that a replay makes of time is longer than 64 bits."""
    from kvarts import Trace, TraceRequest, replay
    from kvarts.core.content import pack_units

    def request(row: int, arrival_ns: int) -> TraceRequest:
        return TraceRequest(row, arrival_ns, pack_units([row]), 1, 50)

    slow = ReplayConfig(num_pages=100, cost=LinearCost(step_ms=1e12))
    for step_by_step in (False, True):
        with pytest.raises(TooLateError):
            replay(Trace([request(0, 0)]), ReplayConfig(num_pages=100, cost=slow.cost, step_by_step=step_by_step))
    assert LATEST_NS < 1 << 62


@pytest.mark.parametrize(
    "words",
    [
        ["replay", "trace.jsonl", "--set", f"prefix_cache_retention_interval={'9' * 5000}"],
        ["replay", "trace.jsonl", "--vllm-args", f"--max-num-batched-tokens {'9' * 5000}k"],
        ["replay", "trace.jsonl", "--sglang-args", f"--max-total-tokens {'9' * 5000}Ki"],
        ["replay", "trace.jsonl", "--report", f"/dev/fd/{'9' * 30}"],
        ["soak", "--virtual", "--duration", "1m", "--set", f"bytes_per_token={'9' * 5000}@4"],
        ["story", "run", "--block", f"0:{'9' * 5000}"],
    ],
    ids=lambda words: words[-1][:40],
)
def test_numbers_longer_than_python_converts_are_refused(words: list[str], here: Path, call: Run) -> None:
    code, out, err = call(*words)
    assert (code in (2, 4, 7), out, len(err) < 1500) == (True, b"", True), err


DEEP = '{"a":' * 3000 + "1" + "}" * 3000


@pytest.mark.parametrize(
    "words",
    [
        ["replay", "trace.jsonl", "--vllm-args", f"--speculative-config '{DEEP}'"],
        ["replay", "trace.jsonl", "--engine", "sglang", "--set", f"radix_eviction_policy_config={DEEP}"],
        ["replay", "deep.jsonl"],
    ],
    ids=["vllm-args", "set", "recorded"],
)
def test_texts_that_are_nested_too_deeply_are_refused(words: list[str], here: Path, call: Run) -> None:
    row = '{"arrival_ns": 0, "prompt": [5, 6], "num_output_tokens": 2, "output": [8, 9]'
    (here / "deep.jsonl").write_text(f'{row}}}\n{row}, "x": {DEEP}}}\n{row}}}\n')
    code, out, err = call(*words)
    assert (code in (2, 4), out, len(err) < 1500) == (True, b"", True), err
    assert "deep.jsonl" not in words or "deep.jsonl:2: it is nested too deeply" in err


@given(st.text() | st.from_regex("[0-9]{1,20}", fullmatch=True))
def test_a_text_is_a_number_if_it_is_a_few_decimal_digits(text: str) -> None:
    expected = int(text) if text and len(text) <= 18 and set(text) <= set("0123456789") else None
    assert whole_number(text) == expected
