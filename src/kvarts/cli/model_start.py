"""`kvarts model show --engine vllm`: the lines that vLLM prints when it starts, and its plan as JSON."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvarts.base.errors import ConfigError, InputError
from kvarts.base.files import read_text
from kvarts.base.limits import DRAFT_METHODS
from kvarts.base.units import parse_bytes
from kvarts.cli.options import GroupedOption, KeyOption

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvarts.cost.hardware.device import Device
    from kvarts.cost.hardware.geometry import Geometry
    from kvarts.cost.vllm.planning import Plan, PlanGroup
    from kvarts.cost.vllm.start import Available, Start
    from kvarts.sim.hardware import DeviceSettings

__all__ = ["START_OPTIONS", "Started", "started"]

KINDS = {
    "full": "full_attention",
    "mla": "mla_attention",
    "window": "sliding_window",
    "window_mla": "sliding_window_mla",
    "chunk": "chunked_local_attention",
    "state": "mamba",
}
"""Names of kinds of layers, as vLLM's KVCacheSpecKind has them."""


def _option(name: str, text: str, **attributes: Any) -> GroupedOption:
    return GroupedOption([name], group="vLLM", help=text, **attributes)


def _key(name: str, text: str, **attributes: Any) -> KeyOption:
    return KeyOption([name], group="vLLM", help=text, **attributes)


START_OPTIONS = (
    _option(
        "--engine",
        "Print what this version prints as it starts: vllm (0.33), vllm==0.32, none. [none; vllm if layers keep less]",
        metavar="NAME",
    ),
    _option(
        "--available-kv-memory",
        "Bytes for KV on each device, as vLLM logs them: 44.1GiB, or the log itself. [an interval, from the device]",
        metavar="SIZE|@LOG",
        key="available_kv_memory",
    ),
    _key(
        "--max-model-len",
        "Longest sequence, or -1 for the longest that fits. [that of the model]",
        metavar="TOKENS",
        type=int,
    ),
    _key(
        "--speculative-tokens",
        "Tokens drafted by the model's own layers, such as MTP. [0]",
        metavar="N",
        type=click.IntRange(min=1),
    ),
    _key(
        "--speculative-method",
        "What drafts: mtp, eagle or eagle3, which are layers with KV, or ngram. [mtp]",
        metavar="NAME",
        type=click.Choice(DRAFT_METHODS),
    ),
    _key("--no-prefix-caching", "Without the prefix cache: states are kept whole.", is_flag=True),
    _key("--no-async-scheduling", "Plan each step after the one before it has ended.", is_flag=True),
    _key("--no-chunked-prefill", "Prompts in one step, which then has as many tokens as the longest.", is_flag=True),
    _key(
        "--pages",
        "vLLM's --num-gpu-blocks-override: blocks, whatever the memory is.",
        metavar="N",
        type=click.IntRange(min=1),
    ),
    _key(
        "--decode-context-parallel-size",
        "Devices that share the tokens of a request. [1]",
        metavar="N",
        type=click.IntRange(min=1),
    ),
    _key("--disable-hybrid-kv-cache-manager", "Windows and chunks keep all tokens.", is_flag=True),
    _key("--enforce-eager", "No CUDA graphs, which need a block of states for each sequence.", is_flag=True),
    _key(
        "--performance-mode",
        "throughput doubles the tokens of a step and the sequences.",
        metavar="NAME",
        type=click.Choice(["balanced", "interactivity", "throughput"]),
    ),
    _key("--mamba-ssm-cache-dtype", "Number format of recurrent states. [that of the model]", metavar="NAME"),
)
"""Options of `model show` that need --engine, and --engine."""


class Started:
    """A start of vLLM with its plan: of the given memory, or of the least and the most that the device leaves."""

    def __init__(self, start: Start, available: Available) -> None:
        self.start = start
        self.available = available
        self.plans: list[Plan] = [start.plan(size) for size in dict.fromkeys((available.least, available.most))]

    def rows(self) -> list[tuple[str, str]]:
        """Return the rows of the table: the settings, the memory with its parts, and vLLM's lines."""
        start, available = self.start, self.available
        text = f"{start.block_size} tokens, {start.max_num_batched_tokens:,} tokens a step of {start.max_num_seqs:,} "
        rows = [("vLLM", f"{start.version}: blocks of {text}sequences, KV in {start.kv_dtype}")]
        rows += [("for KV" if not index else "", line) for index, line in enumerate(available.lines())]
        for index, plan in enumerate(self.plans):
            size = (available.least, available.most)[index]
            title = "" if len(self.plans) == 1 else ("at least", "at most")[index]
            if plan.num_blocks is not None:
                layers = ", ".join(f"{len(group.layers)} {_kind(group)} of {group.block_size}" for group in plan.groups)
                rows.append((title or "plan", f"{plan.num_blocks:,} blocks; groups: {layers}"))
                title = ""
            rows += [(title if not place else "", line) for place, line in enumerate(start.lines(plan, size))]
            if plan.refusal is not None:
                rows.append(("", self._what_to_change(plan)))
        return rows

    def _what_to_change(self, plan: Plan) -> str:
        if self.start.longest is not None:
            return f"Give --max-model-len {self.start.longest}, or less."
        if self.start.refusal is not None and "num_groups" in self.start.refusal:
            return "Give --tensor-parallel a divisor of the groups of states."
        if self.start.refusal is not None and "context-parallel" in self.start.refusal:
            return "Leave out --decode-context-parallel-size, or give a divisor of the devices per KV head."
        if self.start.refusal is not None:
            return "Give a device of a later generation, or another --kv-dtype if vLLM asks for it."
        if plan.num_blocks is not None:
            return f"Give --max-seqs {plan.num_blocks}."
        if plan.longest:
            return f"Give --max-model-len {plan.longest}, or -1 for the longest that fits."
        return "Give more devices (--tensor-parallel), a larger one, or a larger share (--memory-fraction)."

    def values(self) -> dict[str, Any]:
        """Return the object `vllm` of the JSON. With an interval, its figures are those of the least memory."""
        values = _values(self.start, self.plans[0])
        values["available_kv_memory"] = self.available.values()
        if len(self.plans) > 1:
            values["at_most"] = {
                key: value for key, value in _values(self.start, self.plans[1]).items() if key not in ("version",)
            }
        return values


def _kind(group: PlanGroup) -> str:
    return "+".join(KINDS.get(kind, kind) for kind in group.kinds)


def _values(start: Start, plan: Plan) -> dict[str, Any]:
    return {
        "version": start.version,
        "block_size": min((group.block_size for group in plan.groups), default=start.block_size),
        "num_blocks": plan.num_blocks,
        "kv_cache_tokens": plan.kv_cache_tokens,
        "max_concurrency": plan.max_concurrency,
        "max_model_len": plan.max_model_len or start.max_model_len,
        "max_num_batched_tokens": start.max_num_batched_tokens,
        "max_num_seqs": start.max_num_seqs,
        "groups": [
            {
                "kind": _kind(group),
                "layers": len(group.layers),
                "block_size": group.block_size,
                "window": group.window,
                "blocks_per_request": group.blocks_per_request,
            }
            for group in plan.groups
        ],
        "refusal": plan.refusal,
    }


def started(
    geometry: Geometry, device: Device | None, on: DeviceSettings, settings: Mapping[str, Any], kv_dtype: str | None
) -> Started | None:
    """Return the start that the options ask for, or None.

    Without --engine, models with layers that keep less on a device start as vLLM's newest version, unless a page size
    is given. Raise ConfigError for options of a start without one, and for --engine without a device.
    """
    asked = {name: settings[name] for name in _names() if settings[name] not in (None, False)}
    is_default = device is not None and geometry.keeps_less and settings["set_page_size"] is None
    engine = asked.pop("engine", "vllm" if is_default else "none")
    if engine == "none":
        if asked:
            raise ConfigError("needs --engine vllm", field=f"--{next(iter(asked)).replace('_', '-')}")
        return None
    if device is None:
        raise ConfigError("needs a device", field="--engine", hint="Give --device h100.")
    from kvarts.cost.vllm.start import Available, StartSettings, available_bytes, parse_engine, start

    wanted = StartSettings(
        version=parse_engine(engine),
        tensor_parallel=on.tensor_parallel,
        data_parallel=on.data_parallel,
        pipeline_parallel=on.pipeline_parallel,
        max_model_len=settings["max_model_len"],
        max_num_batched_tokens=settings["set_max_batched_tokens"],
        max_num_seqs=settings["set_max_seqs"],
        kv_dtype=kv_dtype,
        block_size=settings["set_page_size"],
        memory_fraction=0.92 if settings["set_memory_fraction"] is None else on.memory_fraction,
        num_drafts=settings["speculative_tokens"] or 0,
        has_draft_layers=settings["speculative_method"] != "ngram",
        has_prefix_caching=not settings["no_prefix_caching"],
        has_async_scheduling=not settings["no_async_scheduling"],
        has_chunked_prefill=not settings["no_chunked_prefill"],
        has_hybrid_manager=not settings["disable_hybrid_kv_cache_manager"],
        has_full_graphs=not settings["enforce_eager"],
        is_throughput=settings["performance_mode"] == "throughput",
        context_parallel=settings["decode_context_parallel_size"] or 1,
        num_blocks_override=settings["pages"],
        ssm_dtype=settings["mamba_ssm_cache_dtype"],
    )
    decided = start(geometry, device, wanted)
    if (given := settings["available_kv_memory"]) is None:
        return Started(decided, available_bytes(geometry, device, wanted, decided))
    return Started(decided, Available.exactly(_bytes_given(given)))


_LOGGED = re.compile(r"Available KV cache memory: ([0-9.]+ ?[KMGT]iB)")


def _bytes_given(text: str) -> int:
    """Return the bytes of a size, of vLLM's line with it, or of the log file that `text` names with `@`.

    A log has a line of each device: the least counts. Raise ConfigError, MissingFileError or InputError.
    """
    field = "--available-kv-memory"
    if text.startswith("@"):
        path = Path(text[1:])
        logged = _LOGGED.findall(read_text(path, hint=f"Check the path of {field}."))
        if not logged:
            raise InputError(
                "has no line 'Available KV cache memory: N GiB'",
                path=path,
                hint="Give the size instead, or another log.",
            )
        return min(parse_bytes(size) for size in logged)
    line = _LOGGED.search(text)
    try:
        return parse_bytes(text if line is None else line[1])
    except ConfigError as error:
        raise ConfigError(error.what, field=field, hint=error.hint) from error


def _names() -> list[str]:
    return [option.name or "" for option in START_OPTIONS]


def start_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Take the options of a start out of `settings`, and return them."""
    return {name: settings.pop(name) for name in _names()}
