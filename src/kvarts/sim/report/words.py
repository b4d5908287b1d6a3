"""Results of a run in words and units: the same in a terminal and on the page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvarts.base.units import as_duration as duration
from kvarts.base.units import as_hits, as_memory, parse_bytes
from kvarts.base.units import as_number as number
from kvarts.base.units import as_percent as percent

if TYPE_CHECKING:
    from kvarts.sim.report.run_directory import RunReport, Spread

__all__ = [
    "LATENCIES",
    "LIMITS",
    "NAME_ONE",
    "UNCERTAIN",
    "UNMEASURED",
    "count",
    "duration",
    "facts",
    "in_memory",
    "memory_unit",
    "number",
]
__all__ += ["opening", "page_bytes_of", "percent", "plus_minus", "wrapped"]

LATENCIES = {"TTFT": "ttft_ms", "ITL": "itl_ms", "TPOT": "tpot_ms", "E2E": "e2e_ms", "queue time": "queue_ms"}
LIMITS = {
    "nothing": "nothing: requests were admitted as they came",
    "compute": "compute: waiting requests found the step's token budget spent",
    "kv_pages": "KV pages: waiting requests did not fit next to those running",
    "sequence_cap": "sequence cap: as many requests ran as may run at once",
    "transfers": "transfers: waiting requests found loads under way, most of them on",
}


def facts(report: RunReport) -> list[tuple[str, str]]:
    """Return the names and values of a short table. Values missing in the report are left out, or `-`."""
    from kvarts.sim.report.run_directory import Spread

    ended = f"{count(report.num_completed)} completed, {count(report.num_rejected)} rejected"
    if report.num_failed:
        ended += f", {count(report.num_failed)} failed"
    if report.num_cancelled:
        ended += f", {count(report.num_cancelled)} cancelled"
    of_pools = _pools_that_differ(report.config)
    *placed, memory = [*of_pools, ""] if of_pools else opening(report.config) or [""]
    out = [("replayed on", "; ".join(line.strip() for line in placed))] if placed else []
    out += [("memory", memory)] if memory else []
    out.append(("requests", ended))
    if report.cancelled is not None:
        wasted = report.cancelled
        tokens = f"{count(wasted.prompt_tokens)} prompt and {count(wasted.output_tokens)} output tokens"
        out.append(("wasted", f"{tokens} of cancelled requests; {count(wasted.num_retries)} were sent again"))
    if report.duration_ms is not None:
        out.append(("duration", f"{duration(report.duration_ms)} in {count(report.num_steps)} steps"))
    if report.request_throughput_per_s is not None:
        tokens = (
            f"{number(report.input_throughput_tokens_per_s)} in and {number(report.output_throughput_tokens_per_s)}"
        )
        out.append(("throughput", f"{number(report.request_throughput_per_s)} requests/s, {tokens} out tokens/s"))
    if report.goodput is not None:
        good = f"{number(report.goodput.requests_per_s)} requests/s, {percent(report.goodput.ratio)} of all"
        out.append(("goodput", good))
    for name, field in LATENCIES.items():
        spread: Spread | None = getattr(report, field)
        if spread is not None and spread.p50 is not None:
            unsure = (report.uncertainty or {}).get(field, Spread())
            values = {"p50": (spread.p50, unsure.p50), "p90": (spread.p90, unsure.p90), "p99": (spread.p99, unsure.p99)}
            out.append(
                (name, ", ".join(f"{p} {plus_minus(*each)}" for p, each in values.items() if each[0] is not None))
            )
    if report.uncertainty is not None:
        out.append(UNCERTAIN if report.uncertainty else UNMEASURED)
    evicted = "" if report.num_evicted_pages is None else f", {count(report.num_evicted_pages)} evicted"
    out += [
        (
            f"KV {memory_unit(report)}",
            f"peak {percent(report.peak_used_pct)} used, mean {percent(report.mean_used_pct)}{evicted}",
        ),
        ("prefix hits", _hits(report)),
    ]
    tiers = report.prefix_hit_ratio_by_tier
    if len(tiers) > 1:
        out.append(("hits by tier", ", ".join(f"{tier} {as_hits(ratio)}" for tier, ratio in tiers.items())))
    if report.transfers is not None:
        moved = (f"{way.replace('_', ' ')} {_bytes(num_bytes)}" for way, num_bytes in report.transfers.bytes.items())
        out.append(("transfers", ", ".join(moved)))
    lost = (
        "" if report.num_recomputed_tokens is None else f", {count(report.num_recomputed_tokens)} tokens computed again"
    )
    out.append(("preempted", f"{count(report.num_preemptions)} times{lost}"))
    limited = report.limited_by
    if limited is not None:
        share = limited.share_of_waiting.get(limited.cause)
        of_waiting = "" if share is None else f" ({percent(share)} of the time spent waiting)"
        lane = f" {limited.lane}" if limited.cause == "transfers" else ""
        out.append(("limited by", LIMITS.get(limited.cause, limited.cause.replace("_", " ")) + lane + of_waiting))
    if report.advice is not None:
        out.append(("try next", f"{report.advice}."))
    return out


def _hits(report: RunReport) -> str:
    if report.prefix_hit_ratio is None and report.num_input_tokens:
        from kvarts.sim.traffic.trace import NO_PREFIXES

        return NO_PREFIXES.removeprefix("hits are ")
    return f"{percent(report.prefix_hit_ratio)} of prompt tokens"


def plus_minus(ms: float | None, unsure_ms: float | None) -> str:
    """Return a latency, with one standard deviation if known."""
    return duration(ms) + ("" if unsure_ms is None else f" ± {duration(unsure_ms)}")


def memory_unit(report: RunReport) -> str:
    """Return the unit of KV memory of a run: pages, or blocks if KV groups are counted."""
    return "blocks" if report.config.get("kv_groups", "off") != "off" else "pages"


RULES = {"default": "rules of vLLM", "mocker": "rules of Dynamo's mocker"}
ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "tensorrt-llm": "TensorRT-LLM", "trtllm": "TensorRT-LLM"}
WITH_RULES = {"sglang": "SGLang 0.5.23"}
"""Engines whose scheduler decides, not vLLM's, with the version that is followed."""
WIDTH = 80
BLANKS = dict.fromkeys(b"\n\v\f\r", " ")
"""Characters, by number, that count as spaces."""
COSTS = {"polynomial": "polynomial, of Dynamo's mocker"}
UNMEASURED = "uncertain", "unmeasured: no published measurement is of such a device"
"""The line in place of the one that explains ±, where nothing like the replay was measured."""
UNCERTAIN = "uncertain", "± is one standard deviation, from how far step times may be off"
"""The name and the text of the line that explains ±."""
NAME_ONE = "name yours: --model llama-3.1-8b --device h100-80gb"


def opening(config: Mapping[str, Any]) -> list[str]:
    """Return the setup of a run from its configuration: model, device, engine rules, cost model and memory.

    Of each pool, if workers differ. Each line has at most 80 characters, unless names are long. Empty without a
    configuration.
    """
    if not config:
        return []
    if of_pools := _pools_that_differ(config):
        return [line for text in of_pools for line in wrapped(text, rest="  ")]
    lines = _placed(config)
    if len(whole := "; ".join(lines)) <= WIDTH:
        lines = [whole]
    if lines[0].startswith("No --model:"):
        lines.append(f"  {NAME_ONE}")
    if "pages" in config:
        lines.append(_memory(config))
    for text in (config.get("start") or {}).get("lines", ()):
        lines += wrapped(text, rest="  ")
    if config.get("not_started"):
        lines += wrapped(f"Not as vLLM 0.33 starts: {config['not_started']}.", rest="  ")
    return lines


def _pools_that_differ(config: Mapping[str, Any]) -> list[str]:
    """Return the rules and the setup of each pool of a fleet; empty if all its workers are alike."""
    pools = [pool for pool in config.get("pools") or [] if "pages" in pool]
    setups = [[*_placed(pool), _memory({**pool, "replicas": 1})] for pool in pools]
    if all(setup == setups[0] for setup in setups):
        return []
    rules = {setup[1] for setup in setups}
    of_pools = [f"{pool['name']}: {_placed(pool)[0]}, {_memory(pool)}" for pool in pools]
    return [*rules, *of_pools] if len(rules) == 1 else of_pools


def _placed(config: Mapping[str, Any]) -> list[str]:
    """Return model and device, then engine rules and cost model."""
    cost = config.get("cost")
    of_cost: Mapping[str, Any] = cost if isinstance(cost, Mapping) else {}
    kind = of_cost.get("model") or ("callable" if cost is None else str(cost))
    model, device = config.get("model") or of_cost.get("llm"), config.get("device") or of_cost.get("device")
    rules = RULES.get(config.get("profile", ""), f"rules of {config.get('profile', 'vLLM')}")
    engine = config.get("engine", "none")
    name, _, version = engine.partition("==")
    of_engine = f"{ENGINES.get(name, name)} {version}".rstrip()
    if name in WITH_RULES:
        rules = (
            f"rules of {WITH_RULES[name]}, defaults of {of_engine}" if version else f"rules and defaults of {of_engine}"
        )
    elif engine != "none":
        rules += f", defaults of {of_engine}"
    times = f"step times: {COSTS.get(kind, kind)}"
    if version and of_cost.get("scale") is not None:
        from kvarts.cost.roofline_settings import shipped_constants

        times += "" if shipped_constants().has_measured(engine) else f" ({of_engine} unmeasured)"
    if model is not None and device is not None:
        return [f"{_stored(model, of_cost)} on {_devices(device, of_cost)}", f"{rules}; {times}"]
    if kind == "polynomial" and config.get("profile") != "mocker":
        return [f"No --model: generic step times ({COSTS[kind]})", rules]
    return ["No --model", f"{rules}; {times}"]


def wrapped(text: str, first: str = "", rest: str = "") -> list[str]:
    """Return `text` in lines of at most 80 characters that begin with `first` or `rest`; a number keeps its unit.

    Words are not broken, and one that consists of no-break spaces is kept. `textwrap`, which drops such words at the
    ends of lines, would otherwise do the same, but its import takes a fiftieth of a short replay's time.
    """
    lines: list[str] = []
    line, gap, has_word = first, 0, False
    for word in text.replace(" %", "\xa0%").expandtabs().translate(BLANKS).split(" "):
        if word:
            if len(line) + gap + len(word) <= WIDTH:
                line += " " * gap + word
            elif has_word:
                lines.append(line)
                line = rest + word
            else:
                line += word
            gap, has_word = 0, True
        gap += 1
    return [each.replace("\xa0", " ") for each in (*lines, line) if has_word]


def _stored(model: str, cost: Mapping[str, Any]) -> str:
    """Return a model with the number formats chosen for it: `qwen3-8b (weights fp8, KV fp8)`."""
    formats = {"weights": cost.get("weight_dtype"), "KV": cost.get("kv_dtype")}
    chosen = ", ".join(f"{what} {dtype}" for what, dtype in formats.items() if dtype)
    return f"{model} ({chosen})" if chosen else model


def _devices(device: str, cost: Mapping[str, Any]) -> str:
    count = 1
    for ways in ("tensor_parallel", "data_parallel", "pipeline_parallel"):
        count *= int(cost.get(ways) or 1)
    return device if count == 1 else f"{count} x {device}"


def _memory(config: Mapping[str, Any]) -> str:
    pages, replicas = config["pages"], config.get("replicas", 1)
    size = in_memory(pages, config)
    cost = config.get("cost")
    if size and isinstance(cost, Mapping) and _devices("", cost):
        size = f"{size[:-1]} on each)"
    text = f"{pages:,} pages of {config.get('page_size', 16)} tokens{size}"
    if replicas > 1:
        text = f"{replicas} replicas, each of {text}"
    offload = config.get("offload") or {}
    tiers: list[tuple[Any, Any, Any]] = [
        (name, offload.get(f"{name}_memory"), offload.get(f"{name}_pages")) for name in ("host", "disk")
    ]
    tiers += [(tier.get("name"), tier.get("size"), tier.get("pages")) for tier in offload.get("tiers") or ()]
    for name, of_tier, num_pages in tiers:
        if of_tier:
            text += f", {name} {as_memory(of_tier if isinstance(of_tier, int) else parse_bytes(of_tier))}"
        elif num_pages:
            text += f", {name} {num_pages:,} pages"
    window = 0 if config.get("disable_hybrid_swa_memory") else config.get("sliding_window_size")
    if window:
        num_tokens = pages * config.get("page_size", 16)
        num_pages = int(num_tokens * config.get("swa_full_tokens_ratio", 0.8)) // config.get("page_size", 16)
        text += f", {num_pages:,} for windows of {window:,} tokens"
    if config.get("max_mamba_cache_size"):
        text += f", {config['max_mamba_cache_size']:,} slots for states"
    storage = config.get("hicache_storage_backend")
    return f"{text}, and storage without a limit ({storage})" if storage else text


def page_bytes_of(config: Mapping[str, Any]) -> int | None:
    """Return the bytes of a page on each device; None if they are not known from a model."""
    if "page_bytes" in config:
        return int(config["page_bytes"])
    if "kv_bytes_per_token" not in config:
        return None
    return int(config["kv_bytes_per_token"]) * int(config["page_size"])


def in_memory(pages: float, config: Mapping[str, Any]) -> str:
    """Return the size of pages, such as ` (55.5 GiB)`; empty if the bytes of a page are not known."""
    page_bytes = page_bytes_of(config)
    return "" if page_bytes is None else f" ({as_memory(pages * page_bytes)})"


def count(value: int | None) -> str:
    """Return a whole number, or `-` for None."""
    return "-" if value is None else f"{value:,}"


def _bytes(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:,.0f} {unit}" if unit == "B" else f"{num_bytes:,.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.1f} TB"
