"""`kvarts replay`."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvarts.cli.outputs import Outputs, part_options
from kvarts.errors import ConfigError

if TYPE_CHECKING:
    from kvarts.traffic.trace import Trace

__all__ = ["replay_command"]

SAMPLE = "mooncake-conversation-1000.jsonl"
SAMPLE_SOURCE = "the first 1,000 requests of Mooncake's conversation trace (Apache-2.0)"

Command = Callable[..., None]


def _setting(*names: str, field: str, **kwargs: Any) -> Callable[[Command], Command]:
    """An option for a setting of the replay; left out, the file decides, and then the setting's own default."""
    return click.option(*names, f"set_{field}", default=None, **kwargs)


@click.command("replay", no_args_is_help=False)
@click.argument("trace", required=False, type=click.Path(path_type=Path))
@click.option("--config", "config_file", metavar="FILE", type=click.Path(path_type=Path),
              help="TOML file with these settings by their long names (max_seqs for --max-seqs), and trace "
              "or a [workload] table. Options given here win.")  # fmt: skip
@_setting("--model", field="model", multiple=True, metavar="NAME",
          help="Model that is served: a name that `kvarts model list` knows, or a config.json. With --device, says "
          "how long steps take and how many pages fit. Several models on one device: --model NAME=MODEL for each, and "
          "after a colon its weight=2, floor=100, ceiling=800 (per mille of the tokens), guarantee=20GiB or 0.3, "
          "priority=1, weight_dtype=fp8, kv_dtype=fp8, cost=FILE.")  # fmt: skip
@_setting("--trace", field="trace", multiple=True, metavar="NAME=FILE",
          help="With several models: the traffic of one.")  # fmt: skip
@_setting("--static-split", field="static_split", is_flag=True,
          help="With several models: nothing is lent, neither memory nor tokens. For comparison.")  # fmt: skip
@_setting("--health", field="health", multiple=True, metavar="NAME=STATE@SECONDS",
          help="With several models: from then on, one is dead, degraded (admits nobody) or healthy.")  # fmt: skip
@_setting("--device", field="device", metavar="NAME", help="Device it is served on, or cpu:cores=8,bandwidth=80GB/s.")
@_setting("--tensor-parallel", field="tensor_parallel", type=int, metavar="N", help="Devices it is split over. [1]")
@_setting("--weight-dtype", field="weight_dtype", metavar="DTYPE",
          help="Number format of weights. [that of the model]")  # fmt: skip
@_setting("--kv-dtype", field="kv_dtype", metavar="DTYPE", help="Number format of KV. [that of the model]")
@_setting("--kv-memory", field="kv_memory", metavar="SIZE",
          help="KV memory of each device: auto for what fits, or 40GiB. [auto]")  # fmt: skip
@_setting("--memory-fraction", field="memory_fraction", type=float, metavar="X",
          help="For auto: how much of the device may be used. [0.9]")  # fmt: skip
@_setting("--pages", field="pages", type=int, metavar="N", help="Pages of KV memory of each replica. [32768]")
@_setting("--page-size", field="page_size", type=int, metavar="TOKENS", help="Tokens a page. [16]")
@_setting("--profile", field="profile", type=click.Choice(["default", "mocker"]),
          help="Rules of the scheduler: kvarts' own, or those of NVIDIA Dynamo's mocker. [default]")  # fmt: skip
@_setting("--cost", field="cost", metavar="MODEL",
          help="How long a step takes: polynomial, or linear:step_ms=5,chunk_token_ms=0.02,decode_ms=0.1,"
          "context_token_ms=0, or a file that `kvarts calibrate` wrote. [polynomial; with --device, its "
          "roofline]")  # fmt: skip
@_setting("--max-batched-tokens", field="max_batched_tokens", type=int, metavar="TOKENS",
          help="Tokens a step may compute. [8192]")  # fmt: skip
@_setting("--max-seqs", field="max_seqs", type=int, metavar="N", help="Requests that may run at once. [256]")
@_setting("--replicas", field="replicas", type=int, metavar="N", help="Engines of this configuration. [1]")
@_setting("--router", field="router", type=click.Choice(["round-robin", "least-loaded", "prefix"]),
          help="Which replica a request goes to: in turn; fewest requests; or the fewest prompt pages left to "
          "compute plus pages in use or waited for. [round-robin]")  # fmt: skip
@_setting("--concurrency", field="concurrency", type=int, metavar="N",
          help="Closed loop: keep N requests (or sessions) in flight, whatever their times in the trace.")  # fmt: skip
@_setting("--speedup", field="speedup", type=float, metavar="X",
          help="Open loop: divide arrival times and session delays by X. [1]")  # fmt: skip
@_setting("--host-pages", field="offload_host_pages", type=int, metavar="N",
          help="Host memory below the device of each replica, in pages. [0]")  # fmt: skip
@_setting("--host-memory", field="offload_host_memory", metavar="SIZE",
          help="The same in bytes: 64GiB. A page weighs --kv-bytes-per-token times its tokens.")  # fmt: skip
@_setting("--offload", field="offload_policy", type=click.Choice(["eager", "lazy"]),
          help="Store a page below as soon as it is complete, or when its eviction comes near. [eager]")  # fmt: skip
@_setting("--target-free", field="offload_target_free", type=int, metavar="N",
          help="Lazy: so many pages can be taken without losing anything. [twice a token budget]")  # fmt: skip
@_setting("--h2d", field="offload_h2d", metavar="RATE", help="Bandwidth from host memory to the device. [50GB/s]")
@_setting("--d2h", field="offload_d2h", metavar="RATE", help="Bandwidth from the device to host memory. [50GB/s]")
@_setting("--transfer-latency-us", field="offload_latency_us", type=float, metavar="US",
          help="On top of every transfer to or from host memory. [10]")  # fmt: skip
@_setting("--kv-bytes-per-token", field="offload_kv_bytes_per_token", type=int, metavar="BYTES",
          help="What a token weighs. [131072: Llama 3.1 8B in 16 bits]")  # fmt: skip
@_setting("--disk-pages", field="offload_disk_pages", type=int, metavar="N",
          help="Files below host memory, in pages. [0]")  # fmt: skip
@_setting("--disk-memory", field="offload_disk_memory", metavar="SIZE", help="The same in bytes.")
@_setting("--disk-read", field="offload_disk_read", metavar="RATE", help="Bandwidth from files. [5GB/s]")
@_setting("--disk-write", field="offload_disk_write", metavar="RATE", help="Bandwidth to files. [3GB/s]")
@_setting("--disk-latency-us", field="offload_disk_latency_us", type=float, metavar="US",
          help="On top of every transfer to or from files. [100]")  # fmt: skip
@_setting("--slo-ttft-ms", field="slo_ttft_ms", type=float, metavar="MS", help="Goodput: longest time to first token.")
@_setting("--slo-tpot-ms", field="slo_tpot_ms", type=float, metavar="MS",
          help="Goodput: longest mean time per output token after the first.")  # fmt: skip
@_setting("--slo-e2e-ms", field="slo_e2e_ms", type=float, metavar="MS", help="Goodput: longest time to last token.")
@_setting("--trace-block-size", field="trace_block_size", type=click.IntRange(min=1), metavar="TOKENS",
          help="Tokens that a hash id of the trace stands for. [512]")  # fmt: skip
@_setting("--skip-bad-lines", field="skip_bad_lines", is_flag=True,
          help="Leave out lines that cannot be read; the report says how many.")  # fmt: skip
@_setting("--step-by-step", field="step_by_step", is_flag=True,
          help="Never do many steps at once. The outcome is the same, only slower: for checking.")  # fmt: skip
@_setting("--audit", field="audit", is_flag=True, help="After every step, check that each page is accounted for.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON instead of a table.")
@click.option("--report", "report_file", metavar="FILE", type=click.Path(path_type=Path),
              help="Write the report as JSON to FILE.")  # fmt: skip
@click.option("--requests", "requests_file", metavar="FILE", type=click.Path(path_type=Path),
              help="Write one JSON line a request to FILE, in arrival order.")  # fmt: skip
@part_options
@click.option("--run-dir", metavar="DIR", type=click.Path(path_type=Path),
              help="Write everything about the run to DIR, a new directory, for `kvarts report`: report, requests, "
              "timeline, events. With several models, a directory each in it.")  # fmt: skip
@click.option("--loans", "loans_file", metavar="FILE", type=click.Path(path_type=Path),
              help="With several models: write who owed whom memory, and when, to FILE, a JSON line for each period "
              "without a pause.")  # fmt: skip
def replay_command(
    trace: Path | None,
    config_file: Path | None,
    as_json: bool,
    report_file: Path | None,
    requests_file: Path | None,
    run_dir: Path | None,
    loans_file: Path | None,
    **settings: Any,
) -> None:
    """Replay traffic through the KV-cache control plane, in virtual time.

    TRACE is a Mooncake JSONL file, or a .csv of Azure's 2023 traces; without it, a bundled sample is replayed: the
    first 1,000 requests of Mooncake's conversation trace. The report goes to standard output, everything else to
    standard error.
    """
    part_values = {name: value for name, value in settings.items() if not name.startswith("set_")}
    given = {
        name.removeprefix("set_"): value
        for name, value in settings.items()
        if name not in part_values and value not in (None, ())
    }
    places: dict[str, Any] = {
        "as_json": as_json,
        "report_file": report_file,
        "requests_file": requests_file,
        "run_dir": run_dir,
        "part_values": part_values,
    }
    read = _read(config_file)
    if _is_shared(given, read):
        _replay_shared(trace, read, given, config_file, {**places, "loans_file": loans_file})
        return
    if loans_file is not None:
        given["loans"] = loans_file
    from kvarts.sim.config import make_config
    from kvarts.sim.replay import replay

    values, traffic = _settings(given, read, config_file)
    config = make_config(values)
    outputs = Outputs(config, **places)
    loaded = _traffic(trace, traffic, config_file)
    with outputs.observers() as observers_of, _Progress([loaded]) as progress:
        report = replay(loaded, config, on_progress=progress, observers_of=observers_of)
    outputs.write(report)


def _read(config_file: Path | None) -> dict[str, Any]:
    """What the file says, if there is one."""
    from kvarts.files import read_toml

    return {} if config_file is None else read_toml(config_file, hint="Check the path of the configuration.")


def _is_shared(given: dict[str, Any], read: dict[str, Any]) -> bool:
    """Whether this is about several models: they have names, on the command line or in the file."""
    has_names = any(re.match(r"[A-Za-z0-9][A-Za-z0-9_.-]*=", model) for model in given.get("model", ()))
    return has_names or "models" in read


def _replay_shared(
    trace: Path | None,
    values: dict[str, Any],
    given: dict[str, Any],
    config_file: Path | None,
    places: dict[str, Any],
) -> None:
    """`values`: what the file says; what is `given` on the command line wins."""
    from kvarts.cli.sharing import SharedRun

    if trace is not None:
        raise ConfigError("each model has its own", field="trace", hint="Give --trace NAME=FILE for each.")
    reading: dict[str, Any] = {
        name: given.pop(name) for name in ("trace_block_size", "skip_bad_lines") if name in given
    }
    shares, traces = given.pop("model", ()), given.pop("trace", ())
    _merge_slo(values, given)
    if "health" in given:
        given["health"] = list(given["health"])
    values.update(given)
    run = SharedRun(values, shares=shares, traces=traces, config_file=config_file, reading=reading)
    run.open_outputs(**places)
    loaded = run.load()
    with _Progress(list(loaded.values())) as progress:
        run.run(loaded, progress)


def _merge_slo(values: dict[str, Any], given: dict[str, Any]) -> None:
    """What the command line says of the SLO wins."""
    slo = {name.removeprefix("slo_"): given.pop(name) for name in list(given) if name.startswith("slo_")}
    if slo:
        values["slo"] = {**values.get("slo", {}), **slo}


def _settings(
    given: dict[str, Any], read: dict[str, Any], config_file: Path | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings of the replay, and of its traffic, from what was `read` of the file and then the command line."""
    from kvarts.executor.cost import parse_cost
    from kvarts.sim.config import check_config

    values: dict[str, Any] = {}
    traffic: dict[str, Any] = {}
    for name in ("trace", "static_split", "health", "loans"):
        if name in given:
            raise ConfigError(
                "is for several models on one device", field=name, hint="Give --model NAME=MODEL for each of them."
            )
    if "model" in given:
        if len(given["model"]) > 1:
            raise ConfigError(
                "several models need names",
                field="model",
                hint="Each: --model NAME=MODEL and --trace NAME=FILE.",
            )
        given["model"] = given["model"][0]
    if config_file is not None:
        values, traffic = check_config(read, config_file)
    for name in ("trace_block_size", "skip_bad_lines"):
        if name in given:
            traffic[name] = given.pop(name)
    _merge_slo(values, given)
    offload = {name.removeprefix("offload_"): given.pop(name) for name in list(given) if name.startswith("offload_")}
    if offload:
        below = {**values.get("offload", {}), **offload}
        if not any(below.get(name) is not None for name in ("host_pages", "host_memory")):
            raise ConfigError(
                "says how, and not how much", field="offload", hint="Give --host-pages or --host-memory as well."
            )
        for pages, memory in (("host_pages", "host_memory"), ("disk_pages", "disk_memory")):
            if pages in offload and memory not in offload:
                below.pop(memory, None)
            elif memory in offload and pages not in offload:
                below.pop(pages, None)
        values["offload"] = below
    if "cost" in given:
        given["cost"] = parse_cost(given["cost"])
    if "concurrency" in given and "speedup" not in given:
        values.pop("speedup", None)
    values.update(given)
    return values, traffic


def _traffic(trace: Path | None, traffic: dict[str, Any], config_file: Path | None) -> Trace:
    """What is replayed: the trace named on the command line, or what the file describes, or the sample."""
    from kvarts.traffic.formats import load_trace
    from kvarts.traffic.mooncake import load_mooncake

    workload, named = traffic.pop("workload", None), traffic.pop("trace", None)
    if workload is not None and (trace is not None or named is not None):
        raise ConfigError("is given beside a trace", path=config_file, field="workload", hint="Keep one of them.")
    if workload is not None:
        made: Trace = workload.trace()
        return made
    if trace is None and named is not None:
        assert config_file is not None
        trace = config_file.parent / named
    if trace is not None:
        return load_trace(trace, **traffic)
    from importlib.resources import as_file, files

    click.echo(f"kvarts: replaying {SAMPLE_SOURCE}; give a TRACE to replay your own", err=True)
    with as_file(files("kvarts") / "data" / SAMPLE) as sample:
        return load_mooncake(sample)


class _Progress:
    """A bar on standard error, once a replay takes longer than a second and somebody watches."""

    def __init__(self, traces: Sequence[Trace]) -> None:
        self._bar: Any = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            known = [trace.requests for trace in traces]
            num_requests = sum(map(len, filter(None, known))) if None not in known else None
            self._bar = tqdm(total=num_requests, delay=1.0, unit=" requests", file=sys.stderr, leave=False)

    def __enter__(self) -> Callable[[int], object] | None:
        return None if self._bar is None else self._bar.update

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
