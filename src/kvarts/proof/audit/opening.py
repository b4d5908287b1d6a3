"""Opens the audit of an engine, or says which part of the engine it does not follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from kvarts.base.errors import ConfigError
from kvarts.core.build import Audit, Planning, PreparedTiers, Storage
from kvarts.core.config import EngineConfig
from kvarts.core.kv.cache import Memory
from kvarts.core.kv.eviction import LruOrder

if TYPE_CHECKING:
    from kvarts.core.event_log import EventReader
    from kvarts.core.kv.groups import GroupMemory
    from kvarts.proof.audit.ledger import LedgerGroup
    from kvarts.proof.audit.tiers import OrderWatch

__all__ = ["AuditOpening", "audit_of", "not_followed", "not_followed_in_handoffs", "open_audit"]


def not_followed(config: EngineConfig, storage: Storage, planning: Planning) -> str:
    """Return the part of an engine that the ledger does not follow; empty if it follows all of them."""
    if storage.cache is not None:
        return "a device that models share"
    if planning.num_draft_slots:
        return "drafts before prompts"
    if planning.speculation is not None:
        return "room for drafts in virtual time"
    if planning.batches is not None and planning.batches.window:
        return "KV of sliding windows in a pool of its own"
    if planning.batches is not None and planning.batches.slots:
        return "states in slots of SGLang's tree"
    if not planning.hands_over:
        return ""
    return not_followed_in_handoffs(
        config,
        has_groups=storage.memory is not None,
        has_tiers=storage.tiers is not None,
        plans_ahead=planning.plans_ahead,
    )


def not_followed_in_handoffs(config: EngineConfig, *, has_groups: bool, has_tiers: bool, plans_ahead: bool) -> str:
    """Return the part that the ledger does not follow where engines hand requests over; empty if there is none.

    It follows whole pages without tiers, of engines that plan one step after the other.
    """
    parts = {
        "KV groups": has_groups,
        "tiers below the device": has_tiers,
        "the profile 'mocker'": config.profile != "default",
        "steps that are planned ahead": plans_ahead,
    }
    return next((f"requests that engines hand over, with {words}" for words, is_used in parts.items() if is_used), "")


def audit_of(asked: bool | Literal["laws"]) -> Audit:
    """Return what `build_engine` takes for an audit that a user asked for."""
    return open_audit if asked is True else asked or None


def open_audit(config: EngineConfig, storage: Storage, planning: Planning) -> AuditOpening:
    """Open the audit of an engine. Raise ConfigError for a part of it that the ledger does not follow."""
    if unknown := not_followed(config, storage, planning):
        raise ConfigError(
            f"has a ledger that does not follow {unknown}",
            field="audit",
            hint='Leave it out; in Python, audit="laws" asserts laws of the engine\'s own counts after each step.',
        )
    return AuditOpening(config, storage, planning)


class AuditOpening:
    """The audit of an engine that is about to be built."""

    def __init__(self, config: EngineConfig, storage: Storage, planning: Planning) -> None:
        self._config, self._memory, self._planning = config, storage.memory, planning
        self._is_lru = storage.make_order is LruOrder
        self._watch: OrderWatch | None = None
        self._host = storage.host
        if not self._is_lru:
            from kvarts.proof.audit.tiers import OrderWatch

            self._watch = OrderWatch(storage.make_order)
        self.make_order = storage.make_order if self._watch is None else self._watch.make

    def open(
        self, num_blocks: int | None, below: PreparedTiers | None, *, account: Callable[[], Memory]
    ) -> EventReader:
        """Return the auditor. `account`: returns the engine's cache, once it has one."""
        batches = self._planning.batches
        if batches is not None:
            from kvarts.proof.audit.batches import BatchAuditor

            num_pages, has_host = self._config.num_pages, self._host is not None
            return BatchAuditor(
                num_pages, self._config.page_size, overlaps=batches.overlaps, has_host=has_host, account=account
            )
        from kvarts.proof.audit.auditor import Auditor  # which engines without an audit do not import
        from kvarts.proof.audit.facts import EngineRules
        from kvarts.proof.audit.tiers import TierRules

        config, memory = self._config, self._memory
        tiers = TierRules(names=())
        if below is not None:
            tiers = TierRules(
                below.tier_names,
                num_safe=below.num_safe_tiers,
                stores_go_first=memory is not None and below.is_lazy,
                full_prompt_hits=below.full_prompt_hits,
                loads_have_turns=below.load_kv == "async",
            )
        return Auditor(
            config.num_pages if memory is None or num_blocks is None else num_blocks,
            config.page_size,
            groups=() if memory is None else _groups(memory),
            keeps_all=memory is None or memory.keeps == "all",
            is_lru=self._is_lru,
            watch=self._watch,
            tiers=tiers,
            rules=EngineRules(
                at_branches=config.snapshots == "branches",
                plans_ahead=self._planning.plans_ahead,
                finds_prefixes=self._planning.finds_prefixes,
                ends_steps=self._planning.ends_steps,
            ),
            account=account,
        )


def _groups(memory: GroupMemory) -> tuple[LedgerGroup, ...]:
    from kvarts.proof.audit.ledger import LedgerGroup

    make: Any = LedgerGroup  # layers that share the KV of others, or have none, are in no group
    return tuple(
        make(
            group.layer.kind,
            group.part_bytes // memory.block_bytes,
            group.layer.span,
            group.layer.sink,
            memory.aligns and group.has_states_by_page,
            memory.retention_interval if group.layer.kind in ("window", "state") else None,
            memory.saves_inside,
            group.block_pages,
        )
        for group in memory.groups
    )
