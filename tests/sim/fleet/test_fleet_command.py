"""`kvarts replay` with prefill and decode apart."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

SAMPLE = files("kvarts") / "data" / "mooncake-conversation-1000.jsonl"
APART = ("--prefill", "replicas=1", "--decode", "replicas=2")
SMALL = ("--pages", 600, "--page-size", 512, "--decode", "pages=300")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "slice.jsonl"
    path.write_text("".join(SAMPLE.read_text().splitlines(keepends=True)[:80]))
    return path


def test_the_parts_of_a_wait_add_up_to_ttft(asked: Callable[..., Any], trace: Path, tmp_path: Path) -> None:
    rows_file = tmp_path / "rows.jsonl"
    report = asked(
        "replay", trace, *APART, *SMALL, "--transfer", "rate=10GB/s", "--transfer", "token_bytes=131072",
        "--json", "--requests", rows_file,
    )  # fmt: skip
    waits = report["fleet"]["waits"]
    assert sum(part["mean"] for part in waits.values()) == pytest.approx(report["ttft_ms"]["mean"])
    assert waits["transfer_ms"]["mean"] > 0
    rows = [json.loads(line) for line in rows_file.read_text().splitlines()]
    assert sum(row["transferred_bytes"] for row in rows) == report["fleet"]["transferred_bytes"]
    for row in rows:
        times = [row[f"{name}_ms"] for name in ("arrival", "prefill_admitted", "held", "reserved", "activated")]
        times += [row["decode_admitted_ms"], row["first_token_ms"], row["last_token_ms"]]
        assert all(before <= after for before, after in pairwise(times))
        assert row["released_ms"] >= row["activated_ms"]
    assert [pool["role"] for pool in report["fleet"]["pools"]] == ["prefill", "decode"]


def test_the_timeline_of_each_worker_is_true(run_command: Callable[..., int], trace: Path, tmp_path: Path) -> None:
    for profile in ("default", "mocker"):
        path = tmp_path / f"{profile}.jsonl"
        assert run_command("replay", trace, *APART, *SMALL, "--profile", profile, "--timeline", path) == 0
        for worker in range(3):
            assert run_command("verify", path.with_stem(f"{profile}-r{worker}")) == 0


def test_a_run_directory_has_the_timelines_of_all_workers_and_makes_a_page(
    run_command: Callable[..., int], trace: Path, tmp_path: Path
) -> None:
    run, page = tmp_path / "run", tmp_path / "page.html"
    scaler = ("--set", "scaling.policy=script,10s=2:3", "--set", "faults.script=down:1=20s-30s")
    assert run_command("replay", trace, *APART, *SMALL, *scaler, "--run-dir", run, "--html", page) == 0
    assert {path.name for path in run.iterdir()} == {
        "report.json",
        "requests.jsonl",
        "distributions.json",
        "run.json",
        *(f"timeline-r{worker}.json.gz" for worker in range(5)),
        *(f"events-r{worker}.jsonl.gz" for worker in range(5)),
    }
    assert run_command("verify", run) == 0
    assert run_command("report", run) == 0
    assert page.read_text().rstrip().endswith("</html>")


@pytest.mark.parametrize("fleet", [(), APART, ("--replicas", 2)])
@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm"])
def test_a_request_that_can_never_run_has_a_story(
    run_command: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path, fleet: Any, engine: str
) -> None:
    if engine == "sglang" and fleet == APART:
        pytest.skip("SGLang's steps are not modelled in pools")
    trace, run = tmp_path / "trace.jsonl", tmp_path / "run"
    trace.write_text('{"timestamp": 0, "input_length": 255, "output_length": 400, "hash_ids": [1]}\n')
    given = ("--pages", 40, "--page-size", 16, "--engine", engine, "--run-dir", run)
    assert run_command("replay", trace, *given, *fleet) in (0, 6)
    capsys.readouterr()
    assert run_command("story", run, "--request", "0") == 0
    assert capsys.readouterr().out.count("rejected: needs 4") == 1


@pytest.mark.parametrize("model", [(), ("--model", "gpt-oss-20b", "--device", "h100-80gb", "--kv-memory", "6GiB")])
def test_journals_tell_the_story_of_a_request_on_both_workers(
    run_command: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    trace: Path,
    tmp_path: Path,
    model: tuple[object, ...],
) -> None:
    """L10, and KV groups are what a fleet counts without being asked."""
    path = tmp_path / "events.jsonl"
    options = model or SMALL
    assert run_command("replay", trace, *APART, *options, "--events", path, "--requests", tmp_path / "rows.jsonl") == 0
    row = json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[5])
    capsys.readouterr()
    stories = []
    for worker in (row["prefill_replica"], row["replica"]):
        assert run_command("story", path.with_stem(f"events-r{worker}"), "--request", row["request_id"]) == 0
        stories.append(capsys.readouterr().out)
    assert "its prompt is computed, and held until another worker has it" in stories[0]
    assert "its pages are free" in stories[0] and "finished" not in stories[0]
    assert "from worker" in stories[1] and f"finished: {row['output_tokens']:,} tokens made" in stories[1]
    for worker in range(3):
        lines = [json.loads(line) for line in path.with_stem(f"events-r{worker}").read_text().splitlines()]
        assert ("kv_groups" in lines[0]) == bool(model)
        times = [line["t_ms"] for line in lines[1:] if line["event"] in ("loading", "loaded", "held", "released")]
        assert times == sorted(times)


def test_workers_of_a_pool_have_settings_of_their_own(asked: Callable[..., Any], trace: Path, tmp_path: Path) -> None:
    config = tmp_path / "fleet.toml"
    config.write_text(
        'model = "llama-3.1-8b"\ndevice = "h100-80gb"\n[prefill]\nreplicas = 2\nmax_batched_tokens = 4096\n'
        '[decode]\nreplicas = 1\ndevice = "h200-141gb"\n[transfer]\nrate = "50GB/s"\n'
    )
    prefill, decode = asked("replay", trace, "--config", config, "--json")["config"]["pools"]
    assert (prefill["device"], prefill["max_batched_tokens"], prefill["replicas"]) == ("h100-80gb", 4096, 2)
    assert (decode["device"], decode["max_batched_tokens"], decode["replicas"]) == ("h200-141gb", 8192, 1)
    assert decode["pages"] > prefill["pages"]


def test_prompts_of_which_a_decode_worker_has_most_are_computed_there(
    run_command: Callable[..., int], asked: Callable[..., Any], tmp_path: Path, capsysbinary: Any
) -> None:
    """A prompt that comes again, and is one token longer than the pages that were sent."""
    trace, rows = tmp_path / "trace.jsonl", tmp_path / "rows.jsonl"
    asked_for = [(0, 0, 5121), (60_000, 0, 5121), (120_000, 20, 5121)]
    trace.write_text(
        "".join(
            json.dumps(
                {"timestamp": at, "input_length": num, "output_length": 9, "hash_ids": list(range(first, first + 11))}
            )
            + "\n"
            for at, first, num in asked_for
        )
    )
    options = ("--prefill", "replicas=1", "--decode", "replicas=1", *SMALL, "--transfer", "rate=1GB/s")
    weighs = ("--transfer", "token_bytes=1000", "--set", "transfer.least_remote=2", "--requests", rows)
    report = asked("replay", trace, *options, *weighs, "--json")
    assert report["fleet"]["num_local_prefills"] == 1
    first, again, other = (json.loads(line) for line in rows.read_text().splitlines())
    assert (first["prefill_replica"], again["prefill_replica"], other["prefill_replica"]) == (0, 1, 0)
    assert again["transferred_bytes"] == 0 and again["held_ms"] is None and again["cached_tokens"] == 5120
    assert run_command("replay", trace, *options, *weighs) == 0
    assert b"1 prompts computed where they are continued" in capsysbinary.readouterr().out


def test_pools_have_tiers_of_their_own(asked: Callable[..., Any], tmp_path: Path) -> None:
    """And each prompt comes again, to the same worker."""
    config, rows, trace = tmp_path / "fleet.toml", tmp_path / "rows.jsonl", tmp_path / "twice.jsonl"
    once = [json.loads(line) for line in SAMPLE.read_text().splitlines()[:39]]
    again = [{**row, "timestamp": row["timestamp"] + 60_000} for row in once]
    trace.write_text("".join(json.dumps(row) + "\n" for row in (*once, *again)))
    config.write_text(
        "pages = 200\npage_size = 512\n[offload]\nh2d = '9GB/s'\n[[pool]]\nreplicas = 1\nhost_pages = 5000\n"
        "[[pool]]\nname = 'bare'\n[[pool]]\nname = 'files'\nhost_pages = 60\ndisk_pages = 3000\nh2d = '50GB/s'\n"
    )
    options = ("--requests", rows, "--run-dir", tmp_path / "run", "--set", "offload.kv_bytes_per_token=9000")
    report = asked("replay", trace, "--config", config, *options, "--json")
    first, bare, files = report["config"]["pools"]
    assert (first["offload"]["host_pages"], first["offload"]["h2d"]) == (5000, "9GB/s")
    assert (files["offload"]["disk_pages"], files["offload"]["h2d"]) == (3000, "50GB/s")
    assert not bare["offload"]["host_pages"]
    tiers = report["num_cached_tokens_by_tier"]
    assert list(tiers) == ["device", "host", "disk"] and tiers["host"] and tiers["disk"]
    by_row = [json.loads(line) for line in rows.read_text().splitlines()]
    for name in ("host", "disk"):
        assert sum(row[f"{name}_tokens"] for row in by_row) == tiers[name]
    assert not any(row["host_tokens"] or row["disk_tokens"] for row in by_row if row["replica"] == 1)
    assert report["transfers"]["bytes"]["disk_write"] and sum(tiers.values()) == report["num_cached_tokens"]


def test_replicas_share_a_store(
    run_command: Callable[..., int], asked: Callable[..., Any], tmp_path: Path, capsysbinary: Any
) -> None:
    """Each prompt comes again, to another replica, which has it from the store."""
    rows, run, trace = tmp_path / "rows.jsonl", tmp_path / "run", tmp_path / "twice.jsonl"
    once = [json.loads(line) for line in SAMPLE.read_text().splitlines()[:40]]
    again = [{**row, "timestamp": row["timestamp"] + 60_000} for row in once]
    trace.write_text("".join(json.dumps(row) + "\n" for row in (*once, *again)))
    options = ("--pages", 400, "--page-size", 512, "--replicas", 3, "--set", "offload.kv_bytes_per_token=9000")
    without = asked("replay", trace, *options[:-2], "--json")
    report = asked("replay", trace, *options, "--store", "memory=30GB", "--run-dir", run, "--requests", rows, "--json")
    store, tiers = report["fleet"]["store"], report["num_cached_tokens_by_tier"]
    assert store["pages"] == 30 * 10**9 // (9000 * 512)
    assert tiers["store"] > 10 * tiers["device"]
    assert report["ttft_ms"]["mean"] < without["ttft_ms"]["mean"]
    assert tiers["store"] == sum(json.loads(line)["store_tokens"] for line in rows.read_text().splitlines())
    assert store["of_others_pct"] == 1 and store["num_loaded_pages"] == sum(row["pages"] for row in store["loaded"])
    assert {(row["reader"] - row["writer"]) % 3 for row in store["loaded"]} == {1}, "forty prompts, in turn"
    assert report["transfers"]["bytes"]["store_read"] == store["num_loaded_pages"] * store["page_bytes"]
    assert store["num_cached_pages"] <= store["pages"] and 0 < store["read_busy_pct"] < 1
    assert run_command("verify", run) == 0
    capsysbinary.readouterr()
    assert run_command("story", run, "--request", "45") == 0
    assert b"from store" in capsysbinary.readouterr().out
    assert run_command("replay", trace, *options, "--store", "pages=5000") == 0
    assert b"of other workers" in capsysbinary.readouterr().out


PULLS = "--set", "transfer.pull=true", "--transfer", "rate=1GB/s", "--transfer", "token_bytes=1000"


def test_workers_read_from_each_other(
    run_command: Callable[..., int], asked: Callable[..., Any], tmp_path: Path, capsysbinary: Any
) -> None:
    """Each prompt comes again, to another replica, which reads it from the host memory of the first."""
    rows, run, trace = tmp_path / "rows.jsonl", tmp_path / "run", tmp_path / "twice.jsonl"
    once = [json.loads(line) for line in SAMPLE.read_text().splitlines()[:40]]
    again = [{**row, "timestamp": row["timestamp"] + 60_000} for row in once]
    trace.write_text("".join(json.dumps(row) + "\n" for row in (*once, *again)))
    host = "--host-pages", 5000, "--set", "offload.kv_bytes_per_token=9000"
    options = ("replay", trace, "--pages", 400, "--page-size", 512, "--replicas", 3, *host)
    without = asked(*options, "--json")
    report = asked(*options, *PULLS, "--run-dir", run, "--requests", rows, "--json")
    pulls, tiers = report["fleet"]["pulls"], report["num_cached_tokens_by_tier"]
    assert tiers["peers"] > 10 * tiers["device"]
    assert tiers["peers"] == 512 * pulls["num_pulled_pages"] == 512 * sum(row["pages"] for row in pulls["pulled"])
    assert tiers["peers"] == sum(json.loads(line)["peers_tokens"] for line in rows.read_text().splitlines())
    assert {(row["reader"] - row["source"]) % 3 for row in pulls["pulled"]} == {1}, "forty prompts, in turn"
    assert report["transfers"]["bytes"]["peers_read"] == tiers["peers"] * 1000
    assert report["ttft_ms"]["mean"] < without["ttft_ms"]["mean"]
    assert report["config"]["transfer"]["pull"] is True
    assert run_command("verify", run) == 0
    capsysbinary.readouterr()
    assert run_command("story", run, "--request", "45") == 0
    assert b"from peers" in capsysbinary.readouterr().out


def test_an_audit_says_what_its_ledger_does_not_follow(
    run_command: Callable[..., int], trace: Path, capsysbinary: Any
) -> None:
    said = (
        b"kvarts: the ledger of the audit does not follow requests that engines hand over, with tiers below the device"
    )
    for below, is_said in (((), False), (("--host-memory", "10GB"), True)):
        assert run_command("replay", trace, *APART, *SMALL, *below, "--audit", "--json") == 0
        assert (said in capsysbinary.readouterr().err) is is_said


@pytest.mark.slow
def test_replicas_share_a_store_of_parts(
    run_command: Callable[..., int], asked: Callable[..., Any], tmp_path: Path, capsysbinary: Any
) -> None:
    """The same of a model half of whose layers have windows: their tails come back with the pages of the others."""
    run, trace = tmp_path / "run", tmp_path / "twice.jsonl"
    once = [json.loads(line) for line in SAMPLE.read_text().splitlines()[:40]]
    again = [{**row, "timestamp": row["timestamp"] + 60_000} for row in once]
    trace.write_text("".join(json.dumps(row) + "\n" for row in (*once, *again)))
    options = ("--model", "gpt-oss-20b", "--device", "h100-80gb", "--pages", 400, "--page-size", 512, "--replicas", 3)
    report = asked("replay", trace, *options, "--store", "memory=30GB", "--run-dir", run, "--audit", "--json")
    assert [group["kind"] for group in report["kv_groups"]] == ["full", "window"]
    store, tiers = report["fleet"]["store"], report["num_cached_tokens_by_tier"]
    assert store["blocks"] == 30 * 10**9 // store["block_bytes"]
    assert tiers["store"] > 10 * tiers["device"]
    assert store["of_others_pct"] == 1 and store["num_loaded_blocks"] == sum(row["blocks"] for row in store["loaded"])
    assert {(row["reader"] - row["writer"]) % 3 for row in store["loaded"]} == {1}, "forty prompts, in turn"
    assert report["transfers"]["bytes"]["store_read"] == store["num_loaded_blocks"] * store["block_bytes"]
    # A window of 128 tokens needs one page of its group, and the others need all.
    assert tiers["store"] // 512 < store["num_loaded_blocks"] <= tiers["store"] // 512 + 40
    assert run_command("verify", run) == 0
    capsysbinary.readouterr()
    assert run_command("story", run, "--request", "45") == 0
    assert b"from store" in capsysbinary.readouterr().out
    assert run_command("replay", trace, *options, "--store", "pages=5000") == 0
    assert b"of other workers" in capsysbinary.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--prefill", "replicas=2"), "needs decode workers as well"),
        (("--transfer", "latency_ms=3"), "needs prefill workers as well"),
        ((*APART, "--transfer", "rate=fast"), "--transfer rate"),
        ((*APART, "--transfer", "rate=1GB/s"), "--transfer token_bytes"),
        ((*APART, "--decode", "pages=0"), "--decode pages"),
        ((*APART, "--replicas", 2), "says nothing of pools"),
        ((*APART, "--decode", "host_memory=1B", "--set", "offload.kv_bytes_per_token=9"), "--decode host_memory"),
        ((*APART, "--set", "offload.h2d=1GB/s"), "has no effect without a size"),
        ((*APART, "--store", "rate=1GB/s"), "says how, and not how much"),
        ((*APART, "--set", "transfer.least_remote=0"), "--set transfer.least_remote"),
        ((*APART, "--set", "transfer.least_remote=9", "--profile", "mocker"), "--set transfer.least_remote"),
        ((*APART, "--store", "memory=1MB"), "hold no page of 2,097,152 bytes"),
        ((*APART, "--store", "pages=9", "--host-pages", 9, "--offload", "lazy"), "--offload"),
        ((*APART, "--set", "scaling.policy=script,30s=3"), "a pool mixed, which is not there"),
    ],
)
def test_what_cannot_be_is_refused(
    run_command: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    trace: Path,
    tmp_path: Path,
    options: tuple[object, ...],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command("replay", trace, *options) == 2
    assert said in capsys.readouterr().err


def test_layers_are_sent_while_the_prompt_is_computed(asked: Callable[..., Any], trace: Path) -> None:
    model = "--model", "llama-3.1-8b", "--device", "h100-80gb", "--transfer", "rate=5GB/s"
    whole = asked("replay", trace, *APART, *model, "--json")
    layer_wise = asked("replay", trace, *APART, *model, "--transfer", "mode=layer-wise", "--json")
    assert layer_wise["config"]["transfer"]["layers"] == 32
    assert layer_wise["fleet"]["transferred_bytes"] == whole["fleet"]["transferred_bytes"]
    waits, waits_of_whole = layer_wise["fleet"]["waits"], whole["fleet"]["waits"]
    assert waits["transfer_ms"]["mean"] < 0.6 * waits_of_whole["transfer_ms"]["mean"]
    assert waits["prefill_ms"] == waits_of_whole["prefill_ms"]
    assert sum(part["mean"] for part in waits.values()) == pytest.approx(layer_wise["ttft_ms"]["mean"])
    one = asked("replay", trace, *APART, *model, "--transfer", "mode=layer-wise", "--transfer", "layers=1", "--json")
    assert waits["transfer_ms"]["mean"] < one["fleet"]["waits"]["transfer_ms"]["mean"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--transfer", "mode=layer-wise"), "has no effect on transfers that take no time"),
        (
            ("--transfer", "mode=layer-wise", "--transfer", "rate=1GB/s", "--transfer", "token_bytes=1000"),
            "--transfer layers",
        ),
        (("--transfer", "layers=3"), "has no effect without layer-wise transfers"),
        (
            (
                *("--transfer", "mode=layer-wise", "--transfer", "rate=1GB/s", "--transfer", "token_bytes=1000"),
                *("--transfer", "layers=3", "--profile", "mocker"),
            ),
            "is not in Dynamo's mocker",
        ),
    ],
)
def test_layer_wise_transfers_that_are_refused(
    run_command: Callable[..., int], capsys: Any, trace: Path, options: tuple[Any, ...], message: str
) -> None:
    assert run_command("replay", trace, *APART, *SMALL, *options) == 2
    assert message in capsys.readouterr().err


def test_requests_wait_in_the_router_of_prefill_workers(asked: Callable[..., Any], trace: Path) -> None:
    """Short prompts first: the mean wait falls, and that of the last rises."""
    burst = *APART, *SMALL, "--speedup", 50, "--router", "least-loaded", "--json"
    waits = [
        asked("replay", trace, *burst, *queue)["fleet"]["waits"]["prefill_queue_ms"]
        for queue in (
            (),
            ("--set", "routing.queue_threshold=1"),
            ("--set", "routing.queue_threshold=1", "--set", "routing.queue=wspt"),
        )
    ]
    assert waits[1]["mean"] == pytest.approx(waits[0]["mean"], rel=0.1), "with one worker, the order is the same"
    assert waits[2]["mean"] < 0.9 * waits[1]["mean"]


def test_ages_apply_to_the_routers_that_read_what_ages(
    kvarts: Callable[..., tuple[int, str, str]], asked: Callable[..., Any], trace: Path
) -> None:
    """One router of a fleet may read metrics or cache events that the other one does not."""
    pools = ("--prefill", "replicas=2", "--decode", "replicas=2")
    base = ("replay", trace, *pools, *SMALL, "--prefill", "router=llm-d")
    late, current = (asked(*base, "--set", f"routing.staleness={age}", "--json") for age in ("30s", 0))
    assert late["num_completed"] == current["num_completed"]
    assert late["ttft_ms"]["mean"] > 1.1 * current["ttft_ms"]["mean"]
    for more in (("--decode", "router=dynamo-kv"), ("--decode", "router=prefix", "--set", "routing.event_lag=1s")):
        assert kvarts(*base, "--set", "routing.staleness=1s", *more)[0] == 0
    code, _, told = kvarts(*base, "--decode", "router=least-loaded", "--set", "routing.event_lag=1s")
    assert (code, "which reads no events" in told) == (2, True), told


def test_pools_of_one_role_are_told_apart(
    kvarts: Callable[..., tuple[int, str, str]], trace: Path, tmp_path: Path
) -> None:
    pools = ['[[pool]]\nrole = "prefill"', *(f'[[pool]]\nrole = "decode"\nname = "{name}"' for name in ("old", "new"))]
    (tmp_path / "fleet.toml").write_text("\n".join(["pages = 600", "page_size = 512", *pools]))
    _, told, _ = kvarts("replay", trace, "--config", tmp_path / "fleet.toml")
    starts = [line.split("1 worker")[0] for line in told.splitlines() if " GPU hours" in line]
    assert starts == ["prefill pool  ", "old (decode)  ", "new (decode)  "]


def test_requests_that_no_worker_can_take_are_counted(kvarts: Callable[..., tuple[int, str, str]], trace: Path) -> None:
    num_rows = len(trace.read_text().splitlines())
    _, told, _ = kvarts("replay", trace, *APART, *SMALL, "--set", "faults.script=down:0=0s,down:1=0s")
    assert f"0 completed, 0 rejected, {num_rows} failed" in told
