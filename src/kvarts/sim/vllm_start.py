"""`--engine vllm==0.32`: a replay with the settings, blocks and KV groups with which that version of vLLM starts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

from kvarts.base.errors import ConfigError

if TYPE_CHECKING:
    from kvarts.core.kv.groups import PartGroup
    from kvarts.cost.vllm.planning import Plan, PlanGroup
    from kvarts.cost.vllm.start import Start

__all__ = ["VERSIONS", "VllmStart", "start_facts"]

VERSIONS: dict[str, Literal["0.32", "0.33"]] = {"vllm==0.32": "0.32", "vllm==0.33": "0.33"}
"""Engines that start as a version of vLLM does."""
LAYERS = {"mla": "latent", "window_mla": "window"}
"""Kinds of layers by the kinds of their specs, where the names differ."""


class VllmStart(msgspec.Struct, frozen=True):
    """A start of vLLM: `num_blocks`, of which one stands for blocks that are not there, and the lines of its log."""

    num_blocks: int
    lines: tuple[str, ...]


def start_facts(
    start: Start, plan: Plan, *, available_bytes: int | None, has_prefix_caching: bool, device: str
) -> dict[str, Any]:
    """Return the fields of a replay that a start decides.

    Raise ConfigError with vLLM's refusal, and for what a replay does not have: blocks of several sizes, states that are
    exported inside chunks.
    """
    if plan.refusal is not None or plan.num_blocks is None:
        change = "a larger device, or fewer sequences" if plan.longest is None else f"max_model_len {plan.longest}"
        raise ConfigError(f"does not start on {device}: {plan.refusal}", field="engine", hint=f"Give {change}.")
    sizes = sorted({group.block_size for group in plan.groups})
    if len(sizes) > 1:
        raise ConfigError(
            f"has blocks of {', '.join(map(str, sizes))} tokens for this model, and a replay has one size",
            field="engine",
            hint="Leave it out.",
        )
    specs = {name: spec for stage in start.specs for name, spec in stage.items()}
    if has_prefix_caching and any(spec.num_checkpoints for spec in specs.values()):
        raise ConfigError(
            "saves states inside chunks for this model, which a replay does not",
            field="engine",
            hint="For gated delta nets, vllm==0.32 does not.",
        )
    groups = [_group(group, plan, specs[group.layers[0]].chunk) for group in plan.groups]
    is_whole = all(group.layer.kind in ("full", "latent") for group in groups) and len(groups) == 1
    facts: dict[str, Any] = {
        "page_size": sizes[0],
        "max_num_batched_tokens": start.max_num_batched_tokens,
        "max_num_seqs": start.max_num_seqs,
        "num_pages": max(1, (plan.num_blocks - 1) // len(groups)),
        "groups": () if is_whole else tuple(groups),
        "start": VllmStart(plan.num_blocks, tuple(start.lines(plan, available_bytes))),
    }
    if not is_whole and has_prefix_caching:
        facts["prefix_cache_retention_interval"] = 0
        if any(group.layer.kind == "state" for group in groups):
            facts["mamba_cache_mode"] = "align"
    return facts


def _group(group: PlanGroup, plan: Plan, chunk: int | None) -> PartGroup:
    from kvarts.core.kv.groups import PartGroup
    from kvarts.core.kv.layers import KvLayer

    assert plan.block_bytes is not None
    kinds = set(group.kinds)
    kind = next((each for each in ("full", "mla", "state", "chunk", "window", "window_mla") if each in kinds), "full")
    span = group.window if kind.startswith("window") else chunk if kind == "chunk" else None
    layer: Any = {"kind": LAYERS.get(kind, kind), "span": span}
    if kind == "state":
        layer["state_bytes"] = plan.block_bytes
    else:
        layer |= {"num_heads": 1, "head_numbers": 1}
    return PartGroup(KvLayer(**layer), part_bytes=plan.block_bytes, num_layers=len(group.layers))
