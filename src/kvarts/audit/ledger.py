"""A page ledger: KV blocks by hash, moved by six signals. A second bookkeeping, on purpose a block at a time.

A block is *active* while it is held, which is counted, and *inactive*, in order of use, while it is not and can still
be found. Both together never exceed the capacity; an inactive block is evicted, the least recently used first, where a
new one needs its place.

* `use`: holds blocks, found or new; all of them or none.
* `deref`: drops one hold of each, from the last block to the first. A full block that is no longer held becomes
  inactive; a partial one is gone, since it could not be found.
* `destroy`: forgets blocks that nothing else holds.
* `promote`: a partial block, known by its uuid, is full now and known by its hash from now on.
* `keep`: full blocks are being copied elsewhere: they are not evicted, and keep their place, until `unkeep`.
* `lose`: kept blocks that nothing holds cannot be found any more; they have their room until `free_lost`.

It shares no code with the engine. `Auditor` checks one against the other; a test of another router or engine can do the
same.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from uuid import UUID

from kvarts.audit.signals import (
    Block,
    BlockInUseError,
    BlocksRemoved,
    BlocksStored,
    Deref,
    Destroy,
    FullBlock,
    Keep,
    LedgerError,
    LedgerEvent,
    NotUniqueError,
    PartialBlock,
    PrefillCost,
    Promote,
    Signal,
    Unkeep,
    UnknownBlockError,
    Use,
)
from kvarts.limits import MOST_PAGES, check_whole

__all__ = ["PageLedger"]


class PageLedger:
    """Owner of the two pools. `sink` is a function that receives events, numbered from 0 without a gap.

    `choose`: which of the blocks that can be evicted goes next; it gets them with the least recently used first, which
    is what goes if it is left out. What it raises, or a LedgerError for an answer that is none of them, ends a `use`,
    and the ledger is as it was. An error that `sink` raises becomes a warning, counted in `num_failed_events`: the
    ledger goes on. Raises ConfigError for a capacity or a block size that is no whole number from 1.
    """

    def __init__(
        self,
        capacity: int,
        block_size: int,
        *,
        sink: Callable[[LedgerEvent], object] | None = None,
        choose: Callable[[Iterator[FullBlock]], FullBlock] = next,
    ) -> None:
        check_whole(capacity, "capacity", most=MOST_PAGES)
        check_whole(block_size, "block_size")
        self.capacity = capacity
        self.block_size = block_size
        self.num_events = 0
        self.num_failed_events = 0
        self._sink = sink
        self._choose = choose
        self._kept: dict[Block, int] = {}
        self._num_kept_inactive = 0
        self.num_lost = 0
        """Blocks that cannot be found any more, and still have their room."""
        self._active: dict[Block, int] = {}
        self._inactive: OrderedDict[FullBlock, None] = OrderedDict()  # the least recently used first

    # Questions --------------------------------------------------------------------------------------------

    @property
    def num_active(self) -> int:
        """Blocks that are held."""
        return len(self._active)

    @property
    def num_inactive(self) -> int:
        """Blocks that are not held and can be found."""
        return len(self._inactive)

    @property
    def num_used(self) -> int:
        """Blocks that are held or kept, or lost and not yet free."""
        return len(self._active) + self._num_kept_inactive + self.num_lost

    @property
    def num_evictable(self) -> int:
        """Blocks that are inactive and not kept."""
        return len(self._inactive) - self._num_kept_inactive

    def evictable(self) -> Iterator[FullBlock]:
        """Return every block that is inactive and not kept, the least recently used first."""
        return (block for block in self._inactive if block not in self._kept)

    @property
    def num_free(self) -> int:
        """Blocks that `use` could make room for."""
        return self.capacity - self.num_used

    def refs(self, block: Block) -> int:
        """Return how often `block` is held; 0 if it is inactive or unknown."""
        return self._active.get(block, 0)

    def is_resident(self, block: Block) -> bool:
        """Return whether `block` is active or inactive."""
        return block in self._active or block in self._inactive

    def is_evictable(self, block: FullBlock) -> bool:
        """Whether `block` is inactive and not kept."""
        return block in self._inactive and block not in self._kept

    @property
    def active(self) -> dict[Block, int]:
        """Every active block and how often it is held: a copy."""
        return dict(self._active)

    @property
    def inactive(self) -> list[FullBlock]:
        """Every inactive block, the next to be evicted first: a copy."""
        return list(self._inactive)

    def probe_new_blocks(self, blocks: Sequence[Block]) -> int:
        """Return how many different ones of `blocks` are not resident."""
        return sum(not self.is_resident(block) for block in dict.fromkeys(blocks))

    def prefill_cost(self, blocks: Sequence[Block], num_tokens: int) -> PrefillCost:
        """Return what a prompt of `num_tokens` tokens in `blocks` would cost. What is found ends at the first miss."""
        num_found = 0
        for block in blocks:
            if not self.is_resident(block):
                break
            num_found += 1
        # The last block may be partial: what is found is never more than there is.
        return PrefillCost(len(blocks) - num_found, num_tokens - min(num_found * self.block_size, num_tokens))

    # Signals ----------------------------------------------------------------------------------------------

    def process(self, signal: Signal) -> bool:
        """Carry out a signal. Return False if it was a `Use` without room; then nothing has changed.

        Raise LedgerError for what is no signal.
        """
        if isinstance(signal, Use):
            return self.use(signal.blocks, parent_hash=signal.parent_hash)
        if isinstance(signal, Promote):
            self.promote(signal.uuid, signal.block, parent_hash=signal.parent_hash)
        elif isinstance(signal, Deref):
            self.deref(signal.blocks)
        elif isinstance(signal, Keep):
            self.keep(signal.blocks)
        elif isinstance(signal, Unkeep):
            self.unkeep(signal.blocks)
        elif isinstance(signal, Destroy):
            self.destroy(signal.blocks)
        else:
            raise LedgerError(f"{type(signal).__name__} is no signal", field="process")
        return True

    def use(self, blocks: Sequence[Block], *, parent_hash: int | bytes | None = None) -> bool:
        """Hold `blocks`, in order, once for each time they are named; new ones evict what is needed.

        Return False, and change nothing, if there is no room for all of them.
        """
        active, inactive, kept = self._active, self._inactive, self._kept
        different = dict.fromkeys(blocks)
        # What is kept is in use already, held or not.
        num_unused = sum(block not in active and block not in kept for block in different)
        if self.num_used + num_unused > self.capacity:
            return False
        new = [block for block in different if not self.is_resident(block)]
        num_too_many = len(active) + len(inactive) + len(new) + self.num_lost - self.capacity
        # What is found is never evicted for its own sequel. Choosing may fail, so it comes before any change.
        evicted = self._chosen(num_too_many, set(different)) if num_too_many > 0 else []
        for victim in evicted:
            del inactive[victim]
        for block in blocks:
            if isinstance(block, FullBlock) and block in inactive:
                del inactive[block]
                self._num_kept_inactive -= block in kept
            active[block] = active.get(block, 0) + 1
        self._removed(evicted)
        if new:
            self._stored_among(blocks, set(new), parent_hash)
        return True

    def deref(self, blocks: Sequence[Block]) -> None:
        """Drop one hold of each, the last block first. Raise UnknownBlockError for what is not held as often."""
        active = self._active
        counts: dict[Block, int] = {}
        for block in blocks:
            counts[block] = counts.get(block, 0) + 1
        for block, count in counts.items():
            if active.get(block, 0) < count:
                raise UnknownBlockError(
                    f"is held {active.get(block, 0)} times and cannot be dropped {count} times", field=_name(block)
                )
        for block in reversed(blocks):
            if active[block] > 1:
                active[block] -= 1
                continue
            del active[block]
            if isinstance(block, FullBlock):
                self._inactive[block] = None
                self._num_kept_inactive += block in self._kept

    def destroy(self, blocks: Sequence[Block]) -> None:
        """Forget `blocks`, the last first: inactive ones, or held by the caller alone.

        Raise UnknownBlockError for what is not there, BlockInUseError for what is held more than once, or kept.
        """
        if len(dict.fromkeys(blocks)) < len(blocks):
            raise UnknownBlockError("names a block twice: it can be destroyed once", field="destroy")
        for block in blocks:
            if not self.is_resident(block):
                raise UnknownBlockError("is not there", field=_name(block))
            if self.refs(block) > 1:
                raise BlockInUseError(f"is held {self.refs(block)} times", field=_name(block))
            if block in self._kept:
                raise BlockInUseError("is kept", field=_name(block))
        removed = []
        for block in reversed(blocks):
            self._active.pop(block, None)
            if isinstance(block, FullBlock):
                self._inactive.pop(block, None)
                removed.append(block)
        self._removed(removed)

    def promote(self, uuid: UUID, block: FullBlock, *, parent_hash: int | bytes | None = None) -> None:
        """Turn the partial block `uuid` into `block`. If that is resident already, both are one from now on.

        Raise UnknownBlockError for a uuid that is not held, NotUniqueError for one held more than once.
        """
        partial = PartialBlock(uuid)
        refs = self.refs(partial)
        if not refs:
            raise UnknownBlockError("is not there", field=_name(partial))
        if refs > 1:
            raise NotUniqueError(f"is held {refs} times and cannot become a full block", field=_name(partial))
        del self._active[partial]
        is_new = not self.is_resident(block)
        if block in self._inactive:
            del self._inactive[block]
            self._num_kept_inactive -= block in self._kept
        self._active[block] = self.refs(block) + 1
        if is_new:
            self._stored([block], parent_hash)

    def keep(self, blocks: Sequence[FullBlock]) -> None:
        """Keep `blocks` from being evicted, once for each time they are named.

        Raise UnknownBlockError for what is not there.
        """
        for block in blocks:
            if not self.is_resident(block):
                raise UnknownBlockError("is not there and cannot be kept", field=_name(block))
        for block in blocks:
            if block not in self._kept:
                self._num_kept_inactive += block in self._inactive
            self._kept[block] = self._kept.get(block, 0) + 1

    def unkeep(self, blocks: Sequence[FullBlock]) -> None:
        """End one `keep` of each of `blocks`. Raise UnknownBlockError for what is not kept as often."""
        kept = self._kept
        for block in dict.fromkeys(blocks):
            if kept.get(block, 0) < blocks.count(block):
                raise UnknownBlockError(f"is kept {kept.get(block, 0)} times", field=_name(block))
        for block in blocks:
            kept[block] -= 1
            if not kept[block]:
                del kept[block]
                self._num_kept_inactive -= block in self._inactive

    def clear(self) -> None:
        """Evict every inactive block that is not kept, one after the other: what was chosen decides what is next."""
        while len(self._inactive) > self._num_kept_inactive:
            (block,) = self._chosen(1, set())
            del self._inactive[block]
            self._removed([block])

    def lose(self, blocks: Sequence[FullBlock]) -> None:
        """Forget kept blocks, and end all that keeps them; their room is free after `free_lost`.

        Raise UnknownBlockError for what is not kept or is held.
        """
        for block in blocks:
            if block not in self._inactive or block not in self._kept:
                raise UnknownBlockError("is not kept, or is held as well", field=_name(block))
        for block in blocks:
            del self._inactive[block]
            del self._kept[block]
        self._num_kept_inactive -= len(blocks)
        self.num_lost += len(blocks)

    def free_lost(self, count: int) -> None:
        """Free the room of `count` lost blocks."""
        self.num_lost -= count

    def _chosen(self, count: int, needed: set[Block]) -> list[FullBlock]:
        """Return which `count` blocks are evicted, none of them `needed`. Raise LedgerError for a wrong choice."""
        kept = self._kept
        candidates = (block for block in self._inactive if block not in kept and block not in needed)
        if self._choose is next:
            return list(islice(candidates, count))
        if count == 1:
            block = self._choose(candidates)
            if not isinstance(block, FullBlock) or not self.is_evictable(block) or block in needed:
                raise LedgerError(f"chose {block!r:.60}, which cannot be evicted", field="choose")
            return [block]
        left = dict.fromkeys(candidates)
        chosen = []
        for _ in range(count):
            block = self._choose(iter(tuple(left)))
            if not isinstance(block, FullBlock) or block not in left:
                raise LedgerError(f"chose {block!r:.60}, which cannot be evicted", field="choose")
            del left[block]
            chosen.append(block)
        return chosen

    # Events -----------------------------------------------------------------------------------------------

    def _stored_among(self, blocks: Sequence[Block], new: set[Block], parent_hash: int | bytes | None) -> None:
        """Return the events for the full ones of `new`, a run at a time."""
        run: list[FullBlock] = []
        run_parent = before = parent_hash
        for block in blocks:
            if isinstance(block, FullBlock) and block in new:
                new.discard(block)
                if not run:
                    run_parent = before
                run.append(block)
            elif run:
                self._stored(run, run_parent)
                run = []
            if isinstance(block, FullBlock):
                before = block.block_hash
        if run:
            self._stored(run, run_parent)

    def _stored(self, blocks: list[FullBlock], parent_hash: int | bytes | None) -> None:
        self._emit(
            BlocksStored(
                self.num_events,
                parent_hash,
                tuple(block.block_hash for block in blocks),
                tuple(block.tokens_hash for block in blocks),
            )
        )

    def _removed(self, blocks: list[FullBlock]) -> None:
        if blocks:
            self._emit(BlocksRemoved(self.num_events, tuple(block.block_hash for block in blocks)))

    def _emit(self, event: LedgerEvent) -> None:
        self.num_events += 1
        if self._sink is None:
            return
        try:
            self._sink(event)
        except Exception as error:
            self.num_failed_events += 1
            warnings.warn(f"event {event.event_id} did not reach its sink: {error!r}", RuntimeWarning, stacklevel=4)


def _name(block: Block) -> str:
    if isinstance(block, PartialBlock):
        return f"partial block {block.uuid}"
    value = block.block_hash
    return f"block {value.hex() if isinstance(value, bytes) else value}"
