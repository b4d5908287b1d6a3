"""What a page ledger is told and tells: blocks, the signals that move them, its events and its errors."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

import msgspec

from kvarts.errors import KvartsError

__all__ = [
    "Block",
    "BlockInUseError",
    "BlocksRemoved",
    "BlocksStored",
    "Deref",
    "Destroy",
    "FullBlock",
    "Keep",
    "LedgerError",
    "LedgerEvent",
    "NotUniqueError",
    "PartialBlock",
    "PrefillCost",
    "Promote",
    "Signal",
    "Unkeep",
    "UnknownBlockError",
    "Use",
]


class FullBlock(msgspec.Struct, frozen=True):
    """A full block, by the hash of all tokens up to its end. `tokens_hash`: of its own tokens alone, for events."""

    block_hash: int | bytes
    tokens_hash: int | bytes | None = None

    def __hash__(self) -> int:
        return hash(self.block_hash)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FullBlock) and other.block_hash == self.block_hash


class PartialBlock(msgspec.Struct, frozen=True):
    """A block that is not full, with tokens that may still change."""

    uuid: UUID


Block = FullBlock | PartialBlock


class Use(msgspec.Struct, frozen=True):
    """Hold `blocks`, in order. The first follows the full block of hash `parent_hash`."""

    blocks: Sequence[Block]
    parent_hash: int | bytes | None = None


class Deref(msgspec.Struct, frozen=True):
    """Drop one hold of each of `blocks`."""

    blocks: Sequence[Block]


class Destroy(msgspec.Struct, frozen=True):
    """Forget `blocks`."""

    blocks: Sequence[Block]


class Promote(msgspec.Struct, frozen=True):
    """The partial block `uuid` is `block` now, and follows the full block of hash `parent_hash`."""

    uuid: UUID
    block: FullBlock
    parent_hash: int | bytes | None = None


class Keep(msgspec.Struct, frozen=True):
    """Do not evict `blocks`."""

    blocks: Sequence[FullBlock]


class Unkeep(msgspec.Struct, frozen=True):
    """End one `Keep` of each of `blocks`."""

    blocks: Sequence[FullBlock]


Signal = Use | Deref | Destroy | Promote | Keep | Unkeep


class BlocksStored(msgspec.Struct, frozen=True):
    """Full blocks can be found, one after the other, the first after `parent_hash`."""

    event_id: int
    parent_hash: int | bytes | None
    block_hashes: tuple[int | bytes, ...]
    tokens_hashes: tuple[int | bytes | None, ...]


class BlocksRemoved(msgspec.Struct, frozen=True):
    """Full blocks can no longer be found."""

    event_id: int
    block_hashes: tuple[int | bytes, ...]


LedgerEvent = BlocksStored | BlocksRemoved


class PrefillCost(msgspec.Struct, frozen=True):
    """What a prompt would cost: blocks and tokens that are not found."""

    new_blocks: int
    new_tokens: int


class LedgerError(KvartsError):
    """A signal that cannot be. The ledger is as it was before it."""


class UnknownBlockError(LedgerError):
    """A block that is not there, or is not held."""


class BlockInUseError(LedgerError):
    """A block that is held by others as well."""


class NotUniqueError(LedgerError):
    """A partial block that is held more than once, or a uuid that is in use already."""
