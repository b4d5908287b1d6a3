"""Tiers below the device, as the command line and a file describe them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvarts.base.errors import ConfigError
from kvarts.base.settings import given_in
from kvarts.cli.replaying import all_sections
from kvarts.core.tiers.config import OffloadConfig
from kvarts.sim.config import ReplayConfig, resolve_replay
from kvarts.sim.fleet.config import resolve_fleet

from builders.command_line import parsed

SECTIONS = all_sections()


def test_every_flag_reaches_the_tiers() -> None:
    flags = (
        "--host-pages 70 --offload lazy --set offload.target_free=3 --set offload.h2d=1GB/s --set offload.d2h=2GB/s "
        "--set offload.latency_us=4 "
        "--set offload.kv_bytes_per_token=1000 --set offload.disk_memory=1GB --set offload.disk_read=3GB/s "
        "--set offload.disk_write=5GB/s --set offload.disk_latency_us=6 "
        "--set offload.preemption_mode=recompute --set offload.load_overlap=layers"
    )
    assert resolve_replay(parsed(*flags.split()), SECTIONS).offload == OffloadConfig(
        host_pages=70,
        policy="lazy",
        target_free=3,
        h2d="1GB/s",
        d2h="2GB/s",
        latency_us=4.0,
        kv_bytes_per_token=1000,
        disk_memory="1GB",
        disk_read="3GB/s",
        disk_write="5GB/s",
        disk_latency_us=6.0,
        preemption_mode="recompute",
        load_overlap="layers",
    )


def test_the_report_has_the_tiers(
    run_command: Callable[..., int], capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [7, 8]}\n')
    assert run_command("replay", trace, "--host-pages", 70, "--json") == 0
    assert json.loads(capsysbinary.readouterr().out)["config"]["offload"] == {
        "host_pages": 70,
        "host_memory": None,
        "policy": "eager",
        "target_free": None,
        "h2d": "50GB/s",
        "d2h": "50GB/s",
        "latency_us": 10.0,
        "kv_bytes_per_token": 131072,
        "full_prompt_hits": False,
        "workers": 1,
        "disk_pages": None,
        "disk_memory": None,
        "disk_read": "5GB/s",
        "disk_write": "3GB/s",
        "disk_latency_us": 100.0,
        "store_within_ms": 500.0,
        "preemption_mode": "swap",
        "load_overlap": "none",
        "load_kv": "placed",
        "num_layers": 32,
        "deadline_s": 60.0,
        "fail_every": 0,
    }


def test_a_model_says_how_many_layers_it_has_unless_they_are_given() -> None:
    command = "--host-pages 10 --set offload.load_overlap=layers --model qwen3-0.6b --device l40s"
    given = parsed(*command.split())
    for more, num_layers in (({}, 28), ({"offload.num_layers": 5}, 5)):
        offload: Any = resolve_replay(given.over(given_in(more, SECTIONS)), SECTIONS).offload
        assert offload.num_layers == num_layers


def test_a_model_says_what_a_token_weighs_unless_it_is_given() -> None:
    command = "--host-pages 10 --model qwen3-0.6b --device l40s"
    for more, weighs in (("", 114_688), (" --set offload.kv_bytes_per_token=5", 5)):
        offload: Any = resolve_replay(parsed(*(command + more).split()), SECTIONS).offload
        assert offload.kv_bytes_per_token == weighs


@pytest.mark.parametrize("fleet", ["", " --prefill replicas=1 --decode replicas=1 --transfer rate=1GB/s"])
def test_kv_groups_say_what_a_token_weighs(fleet: str) -> None:
    """The option had no effect, and nothing was said of it."""
    resolve: Any = resolve_fleet if fleet else resolve_replay
    command = f"--host-pages 10 --model gpt-oss-20b --device h100-80gb{fleet}"
    of_token = ("--set", "offload.kv_bytes_per_token=7")
    resolve(parsed(*command.split()), SECTIONS)
    resolve(parsed(*command.split(), *of_token, "--kv-groups", "off"), SECTIONS)
    with pytest.raises(
        ConfigError, match=r"--set offload.kv_bytes_per_token: has no effect where KV is counted by KV group"
    ):
        resolve(parsed(*command.split(), *of_token), SECTIONS)
    in_file = given_in({"offload": {"kv_bytes_per_token": 7}}, SECTIONS, Path("c.toml"))  # for other commands as well
    resolve(parsed(*command.split()).over(in_file), SECTIONS)
    with pytest.raises(ConfigError, match="kv_bytes_per_token: has no effect where"):
        ReplayConfig.for_device("gpt-oss-20b", "h100-80gb", host_pages=10, kv_bytes_per_token=7)


@pytest.mark.parametrize(
    ("file", "arguments", "expected"),
    [
        ({"host_memory": "1GiB"}, "--host-pages 7", {"host_pages": 7}),
        ({"host_pages": 7}, "--host-memory 1GiB", {"host_memory": "1GiB"}),
        ({"host_pages": 7, "disk_memory": "1GiB"}, "--set offload.disk_pages=9", {"host_pages": 7, "disk_pages": 9}),
        ({"host_pages": 7, "h2d": "3GB/s"}, "--set offload.h2d=4GB/s", {"host_pages": 7, "h2d": "4GB/s"}),
    ],
)
def test_pages_and_memory_replace_each_other(file: dict[str, Any], arguments: str, expected: dict[str, Any]) -> None:
    merged = parsed(*arguments.split()).over(given_in({"offload": file}, SECTIONS))
    assert resolve_replay(merged, SECTIONS).offload == OffloadConfig(**expected)


@pytest.mark.parametrize(
    ("file", "arguments", "says"),
    [
        ("host_pages = 3\nhost_memory = '1GiB'", "", "c.toml: offload.host_pages: is given beside offload.host_memory"),
        ("host_pages = 3", "--set offload.h2d=fast", "--set offload.h2d: 'fast' is not a bandwidth"),
        ("host_pages = 3\nh2d = 'fast'", "--set offload.d2h=3GB/s", "c.toml: offload.h2d: 'fast' is not a bandwidth"),
        ("host_pags = 3", "", "c.toml: offload.host_pags: unknown key. Known: "),
        ("", "--host-pages 3 --host-memory 1GiB", "--host-pages: is given beside --host-memory. Keep one of them."),
        (
            "",
            "--set offload.h2d=3GB/s",
            "--set offload.h2d: has no effect without a size. Give --host-pages or --host-memory as well.",
        ),
        ("disk_pages = 3", "", "c.toml: offload.disk_pages: needs host memory above it. Give offload.host_pages"),
        ("disk_memory = '3GB'", "", "c.toml: offload.disk_memory: needs host memory above it."),
    ],
)
def test_an_error_says_where_the_value_came_from(
    file: str, arguments: str, says: str, refusal: Callable[[str, str], str]
) -> None:
    assert refusal(f"[offload]\n{file}\n", arguments).startswith(f"kvarts: {says}")


def test_a_mock_refuses_what_has_no_effect_without_a_size(
    run_command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    """It was refused by replays, and a mock said nothing."""
    assert run_command("mock", "--port", "0", "--set", "offload.h2d=3GB/s") == 2
    assert "--set offload.h2d: has no effect without a size" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("--set offload.h2d=3GB/s", "--set offload.h2d: has no effect without a size"),
        ("--set offload.latency_us=3", "--set offload.latency_us: has no effect without a size"),
        ("--set offload.preemption_mode=recompute", "--set offload.preemption_mode: has no effect without a size"),
        ("--set offload.load_overlap=layers", "--set offload.load_overlap: has no effect without a size"),
        ("--set offload.kv_bytes_per_token=3", "--set offload.kv_bytes_per_token: has no effect without a size"),
    ],
)
def test_a_store_alone_reads_few_options_of_tiers(
    option: str, says: str, run_command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its size was taken for that of host memory, and the options had no effect."""
    model = ("--model", "qwen3-8b", "--device", "h100-80gb")
    assert run_command("replay", *model, "--replicas", "2", "--store", "pages=9", *option.split()) == 2
    assert says in capsys.readouterr().err
