"""`--engine vllm`: a replay with the settings, blocks and KV groups with which a version of vLLM starts."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from kvarts.base.errors import ConfigError
from kvarts.base.settings import SettingError

if TYPE_CHECKING:
    from kvarts.core.kv.groups import PartGroup
    from kvarts.core.sched.foreseen_drafts import Speculation
    from kvarts.cost.vllm.planning import Plan, PlanGroup
    from kvarts.cost.vllm.start import Start

__all__ = [
    "NEWEST",
    "VERSIONS",
    "StartDrafts",
    "StartRefusedError",
    "VersionRules",
    "VllmStart",
    "rules_of",
    "start_facts",
]

VERSIONS: dict[str, Literal["0.32", "0.33"]] = {"vllm==0.32": "0.32", "vllm==0.33": "0.33"}
"""Engines that start as a version of vLLM does."""
NEWEST = "vllm==0.33"
"""The version that `vllm` means, where the replay has all that it starts with."""
MASK = (1 << 64) - 1
LAYERS = {"mla": "latent", "window_mla": "window"}
"""Kinds of layers by the kinds of their specs, where the names differ."""


class VersionRules(NamedTuple):
    """Rules of the scheduler that versions do not share; the defaults are those of 0.32.

    `ends_steps`: see Preemptor. `renames_states`: see GroupMemory.
    """

    ends_steps: bool = True
    renames_states: bool = True


RULES = {"vllm==0.33": VersionRules(ends_steps=False, renames_states=False)}
"""By the name of an engine, those that are not the defaults."""


def rules_of(engine: str) -> VersionRules:
    """Return the rules of the engine with this name."""
    return RULES.get(engine, VersionRules())


class StartRefusedError(SettingError):
    """A refusal by vLLM itself, in its words, or no memory left for it."""


class StartDrafts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Drafts of a start: `num_drafts` tokens after each decode, by `method`.

    `rates`: for each of them, the probability that it and all before it are right. `most_tokens`: of a request.
    """

    num_drafts: int
    method: str
    rates: tuple[float, ...]
    most_tokens: int
    version: str

    @property
    def has_layers(self) -> bool:
        """Whether layers with KV draft."""
        return self.method != "ngram"

    @property
    def drops_last(self) -> bool:
        """Whether requests compute the last page again that the layers with all tokens have, as in 0.32."""
        return self.has_layers and self.version == "0.32"

    def speculation(self) -> Speculation:
        """Return them as an engine in virtual time drafts."""
        from kvarts.core.sched.foreseen_drafts import Speculation

        is_old = self.version == "0.32"
        return Speculation(
            num_drafts=self.num_drafts,
            num_slots=self.num_drafts if self.has_layers else 0,
            most_tokens=self.most_tokens,
            accepts=self.num_accepted,
            lookahead=int(self.has_layers and not is_old),
            drops_last=self.drops_last,
            names_at_ends=not is_old,
        )

    def num_accepted(self, request: int, num_generated: int) -> int:
        """Return how many tokens of a draft are right: the same in each replay, wherever the request runs."""
        drawn = _mixed((request << 24) + num_generated) / 2.0**64
        return sum(rate > drawn for rate in self.rates)


def _mixed(number: int) -> int:
    """Return 64 bits that depend on all bits of `number` (SplitMix64)."""
    mixed = (number + 1) * 0x9E3779B97F4A7C15 & MASK
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & MASK
    return mixed ^ (mixed >> 31)


class VllmStart(msgspec.Struct, frozen=True):
    """A start of vLLM: `num_blocks`, its null block included, and the lines of its log.

    `saves_states_inside`: prefill saves states inside chunks. `drafts`: None without any. `max_model_len`: the most
    tokens of a prompt and its answer.
    """

    num_blocks: int
    lines: tuple[str, ...]
    max_model_len: int
    saves_states_inside: bool = False
    drafts: StartDrafts | None = None

    def num_pages(self, groups: Sequence[PartGroup]) -> int:
        """Return the whole pages, each with its part of a block in every group, that the blocks hold."""
        if not groups:
            return max(1, self.num_blocks - 1)
        block_bytes = groups[0].part_bytes * groups[0].block_pages
        return max(1, (self.num_blocks - 1) * block_bytes // sum(group.part_bytes for group in groups))


def start_facts(
    start: Start,
    plan: Plan,
    *,
    available_bytes: int | None,
    has_prefix_caching: bool,
    device: str,
    drafts: StartDrafts | None = None,
) -> dict[str, Any]:
    """Return the fields of a replay that a start decides.

    Raise StartRefusedError with vLLM's refusal, and ConfigError for blocks of several sizes that replays do not
    support.
    """
    if plan.refusal is not None or plan.num_blocks is None:
        change = f"{{max_model_len}} {plan.longest}"
        if plan.longest is None:
            change = "a larger device" if plan.num_blocks is None else f"{{max_num_seqs}} {plan.num_blocks}"
        refusal = plan.refusal or ""
        raise StartRefusedError(f"does not start on {device}: {refusal.rstrip('.')}", "engine", hint=f"Give {change}.")
    sizes = {group.block_size for group in plan.groups if has_prefix_caching or "state" not in group.kinds}
    page_size = gcd(*sizes)
    groups = [
        _group(group, plan, group.block_size // page_size if group.block_size in sizes else 1) for group in plan.groups
    ]
    is_whole = all(group.layer.kind in ("full", "latent") for group in groups) and len(groups) == 1
    facts: dict[str, Any] = {
        "page_size": page_size,
        "max_num_batched_tokens": start.max_num_batched_tokens,
        "max_num_seqs": start.max_num_seqs,
        "groups": () if is_whole else tuple(groups),
        "start": VllmStart(
            plan.num_blocks,
            tuple(start.lines(plan, available_bytes)),
            plan.max_model_len or start.max_model_len,
            has_prefix_caching and any(spec.num_checkpoints for stage in start.specs for spec in stage.values()),
            drafts,
        ),
    }
    facts["num_pages"] = facts["start"].num_pages(facts["groups"])
    if not is_whole and has_prefix_caching:
        facts["prefix_cache_retention_interval"] = 0
        if any(group.layer.kind == "state" for group in groups):
            facts["mamba_cache_mode"] = "align"
    return facts


def _group(group: PlanGroup, plan: Plan, num_pages: int) -> PartGroup:
    from kvarts.core.kv.groups import PartGroup
    from kvarts.core.kv.layers import KvLayer

    assert plan.block_bytes is not None
    kinds = set(group.kinds)
    kind = next((each for each in ("full", "mla", "state", "chunk", "window", "window_mla") if each in kinds), "full")
    span = group.window if kind.startswith("window") else group.chunk if kind == "chunk" else None
    layer: Any = {"kind": LAYERS.get(kind, kind), "span": span}
    if kind == "state":
        layer["state_bytes"] = plan.block_bytes
    else:
        layer |= {"num_heads": 1, "head_numbers": 1}
    if plan.block_bytes % num_pages:
        what = f"has blocks of {plan.block_bytes:,} bytes, which pages do not divide into {num_pages}"
        raise ConfigError(what, field="engine", hint="Leave it out.")
    part_bytes = plan.block_bytes // num_pages
    return PartGroup(KvLayer(**layer), part_bytes, len(group.layers), num_pages, is_latent=kind == "window_mla")
