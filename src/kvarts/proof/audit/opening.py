"""Opens the audit of an engine, or says which part of the engine it does not follow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from kvarts.base.errors import ConfigError
from kvarts.core.build import Audit
from kvarts.core.config import EngineConfig
from kvarts.core.kv.cache import Memory
from kvarts.core.kv.eviction import EvictionOrder, LruOrder

if TYPE_CHECKING:
    from kvarts.core.kv.groups import GroupMemory
    from kvarts.core.kv.transfer import LoadKv
    from kvarts.proof.audit.auditor import Auditor
    from kvarts.proof.audit.ledger import LedgerGroup
    from kvarts.proof.audit.tiers import OrderWatch

__all__ = ["AuditOpening", "audit_of", "not_followed", "open_audit"]


def not_followed(
    config: EngineConfig,
    *,
    has_groups: bool,
    has_tiers: bool,
    plans_ahead: bool,
    hands_over: bool = False,
    shares_device: bool = False,
    drafts_first: bool = False,
) -> str:
    """Return the part of an engine that the ledger does not follow; empty if it follows all of them."""
    if shares_device:
        return "a device that models share"
    if drafts_first:
        return "drafts before prompts"
    if not hands_over:
        return ""
    # The ledger follows handoffs of whole pages without tiers, of engines that plan one step after the other.
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


def open_audit(
    config: EngineConfig,
    make_order: Callable[[], EvictionOrder],
    *,
    has_groups: bool,
    has_tiers: bool,
    plans_ahead: bool,
    hands_over: bool,
    shares_device: bool,
    drafts_first: bool,
) -> AuditOpening:
    """Open the audit of an engine with these parts. Raise ConfigError for one that the ledger does not follow."""
    unknown = not_followed(
        config,
        has_groups=has_groups,
        has_tiers=has_tiers,
        plans_ahead=plans_ahead,
        hands_over=hands_over,
        shares_device=shares_device,
        drafts_first=drafts_first,
    )
    if unknown:
        raise ConfigError(
            f"has a ledger that does not follow {unknown}",
            field="audit",
            hint='Leave it out, or set audit="laws" to assert laws of the engine\'s own counts after each step.',
        )
    return AuditOpening(make_order)


class AuditedTiers(Protocol):
    """What an audit must know of the tiers below an engine: fields of PreparedTiers in `build.py`."""

    evicts_safe_first: bool
    full_prompt_hits: bool
    is_lazy: bool
    load_kv: LoadKv
    tier_names: Sequence[str]


class AuditOpening:
    """Audit of an engine that is about to be built. `make_order` makes its eviction order, watched where needed."""

    def __init__(self, make_order: Callable[[], EvictionOrder]) -> None:
        self._is_lru = make_order is LruOrder
        self._watch: OrderWatch | None = None
        if not self._is_lru:
            from kvarts.proof.audit.tiers import OrderWatch

            self._watch = OrderWatch(make_order)
        self.make_order = make_order if self._watch is None else self._watch.make

    def open(
        self,
        config: EngineConfig,
        memory: GroupMemory | None,
        num_blocks: int | None,
        below: AuditedTiers | None,
        *,
        plans_ahead: bool,
        finds_prefixes: bool,
        account: Callable[[], Memory],
    ) -> Auditor:
        """Return the auditor. Arguments are those of build_engine; `account`: returns its cache, once it has one."""
        from kvarts.proof.audit.auditor import Auditor  # which engines without an audit do not import

        return Auditor(
            config.num_pages if memory is None or num_blocks is None else num_blocks,
            config.page_size,
            groups=() if memory is None else _groups(memory),
            keeps_all=memory is None or memory.keeps == "all",
            safe_first=below is not None and below.evicts_safe_first,
            stores_go_first=memory is not None and below is not None and below.is_lazy,
            is_lru=self._is_lru,
            watch=self._watch,
            tiers=_names(below),
            full_prompt_hits=below is not None and below.full_prompt_hits,
            loads_have_turns=below is not None and below.load_kv == "async",
            at_branches=config.snapshots == "branches",
            plans_ahead=plans_ahead,
            finds_prefixes=finds_prefixes,
            account=account,
        )


def _names(below: AuditedTiers | None) -> Sequence[str]:
    return () if below is None else below.tier_names


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
        )
        for group in memory.groups
    )
