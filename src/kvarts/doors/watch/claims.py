"""Judges the claims of KV events by comparison with earlier claims only."""

from __future__ import annotations

from collections.abc import Container, Sequence
from types import MappingProxyType
from typing import Literal

import msgspec

from kvarts.doors.watch.copies import Copies, Key
from kvarts.doors.watch.decoding import DEFAULT_MEDIUM, BlockHash, Removed, Stored

__all__ = ["KEEP_ALL", "RULES", "Block", "BrokenClaim", "ClaimResult", "Claims"]

RULES = MappingProxyType(
    {
        "schema": "every batch is one of KV events",
        "sequence": "no batch is missing",
        "stored_twice": "without copies, what is stored is not stored in that medium already",
        "never_stored": "what is removed is stored in that medium",
        "parent_unknown": "what blocks follow is stored somewhere",
        "tokens": "blocks have the tokens that they should, and always the same number",
        "content": "a hash has one parent and one set of tokens",
        "pool": "no more blocks than the pool has",
        "limits": "no message is longer, and no more blocks are stored, than a watch takes",
    }
)

MAX_LISTED = 1000
"""Violations listed per rule; all are counted."""

MAX_BLOCKS = 1 << 19
"""Blocks tracked at once, in all media: a publisher may claim any number."""
MAX_PARTS = 64
"""Pairs of a medium and a group of layers that are tracked."""

Block = int
"""Hash of the claims about a block: its parent, and its tokens, which are too few if the event has too few."""
KEEP_ALL = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
"""vLLM's kinds of groups that keep every block."""
UNPLACED: Block = 0
"""The block of a sparse event, whose parent and tokens are not known."""


class BrokenClaim(msgspec.Struct, frozen=True, gc=False):
    """One violation, in batch `seq`."""

    rule: str
    seq: int
    what: str


class ClaimResult(msgspec.Struct, frozen=True, gc=False):
    """Status of one rule. `why` is the reason of a status other than ok and violated."""

    rule: str
    status: Literal["ok", "violated", "inconclusive", "not_run"]
    num_violations: int = 0
    why: str | None = None


class Claims:
    """Owner of the stored blocks, by medium, as events claim them, and of the violations in these claims.

    `total_blocks`: blocks of the device, if known. `allows_copies`: a stored block may be stored again, with its parent
    and its tokens; it is removed with its last copy. A claim that is right only if a store was a copy which may have
    been a report counts as doubtful. If the initial contents are unknown, a claim that these could explain is counted
    as unjudged instead of as a violation.

    Blocks beyond `max_blocks` are not tracked; they count as unjudged under `limits`.
    """

    def __init__(
        self, *, total_blocks: int | None = None, allows_copies: bool = True, max_blocks: int = MAX_BLOCKS
    ) -> None:
        self.total_blocks = total_blocks
        self._max_blocks = max_blocks
        self._num_known = 0
        """Blocks in all media and groups."""
        self._allows_copies = allows_copies
        self.media: dict[Key, dict[BlockHash, Block]] = {}
        self.copies = Copies(max_blocks)
        self.block_size: int | None = None
        """Of the first group."""
        self._sizes: dict[int, int] = {}
        """The block size of each group."""
        self._sparse: set[int] = set()
        """Groups that do not keep all blocks of a prefix."""
        self.violations: dict[str, list[BrokenClaim]] = {rule: [] for rule in RULES}
        self.num_violations = dict.fromkeys(RULES, 0)
        self.num_unjudged = dict.fromkeys(RULES, 0)
        self.num_doubtful = dict.fromkeys(RULES, 0)
        self.is_complete = True
        """Whether all stored blocks are known."""
        self.num_refused = 0
        """Messages that were too long."""
        self.num_left_out = 0
        """Blocks that were not tracked because of the limits."""
        self.most_blocks = 0
        """Peak number of blocks on the device so far."""

    def begin(self, *, is_complete: bool) -> None:
        """Forget the stored blocks: nothing is stored if `is_complete`; otherwise the contents are unknown."""
        self._forget()
        self.block_size = None
        self._sizes.clear()
        self._sparse.clear()
        self.is_complete = is_complete

    def clear(self) -> None:
        """Process the claim that nothing is stored any more."""
        self._forget()
        self.is_complete = True

    def store(self, seq: int, event: Stored) -> list[BlockHash]:
        """Process the claim that blocks are stored; return those that were not stored before."""
        key = event.medium, event.group
        if key not in self.media and len(self.media) >= MAX_PARTS:
            self._leave_out(len(event.hashes))
            return []
        there = self.media.setdefault(key, {})
        self._check_tokens(seq, event)
        parent = event.parent
        is_sparse = event.is_sparse
        if is_sparse:
            self._sparse.add(event.group)
        if parent is not None and event.group not in self._sparse and not self._is_anywhere(parent, event.group):
            if self.copies.is_possible((key, parent)):
                self.num_doubtful["parent_unknown"] += 1
            else:
                self._judge("parent_unknown", seq, f"{brief(event.hashes[:1])} follows {brief([parent])}")
        may_be_report = self._may_be_report(event, there)
        size = event.block_size
        new = []
        for place, name in enumerate(event.hashes):
            tokens = event.token_ids[place * size : (place + 1) * size]
            block = UNPLACED if is_sparse else hash((parent, tuple(tokens))) or 1
            parent = name
            known = there.get(name)
            if known is None:
                if self._num_known >= self._max_blocks:
                    self._leave_out(len(event.hashes) - place)
                    break
                self._compare(seq, name, block, event.group)
                there[name] = block
                self._num_known += 1
                self.copies.store((key, name))
                new.append(name)
                continue
            if known != block and UNPLACED not in (known, block):
                self.add("content", seq, f"{brief([name])} has another parent or other tokens than before")
            if self._allows_copies:
                self.copies.store_again((key, name), may_be_report=may_be_report)
            else:
                self.add("stored_twice", seq, f"{brief([name])} is stored in {event.medium} already")
        self._count(seq)
        return new

    def remove(self, seq: int, event: Removed) -> list[BlockHash]:
        """Process the claim that blocks are removed; return those that are not stored any more."""
        key = event.medium, event.group
        there = self.media.get(key, {})
        gone = []
        for name in event.hashes:
            if name in there:
                if self.copies.remove((key, name)):
                    del there[name]
                    self._num_known -= 1
                    gone.append(name)
            elif self.copies.remove_possible((key, name)):
                self.num_doubtful["never_stored"] += 1
            else:
                self._judge("never_stored", seq, f"{brief([name])} is not stored in {event.medium}")
        if self.copies.num_forgotten:
            self.is_complete = False
        return gone

    def refuse(self) -> None:
        """Record a message that was too long to be read: the contents are unknown from here on."""
        self.begin(is_complete=False)
        self.num_refused += 1
        self.num_unjudged["limits"] += 1

    def add(self, rule: str, seq: int, what: str) -> None:
        """Add a violation."""
        self.num_violations[rule] += 1
        if len(self.violations[rule]) < MAX_LISTED:
            self.violations[rule].append(BrokenClaim(rule, seq, what))

    def num_blocks(self, medium: str | None = None) -> int:
        """Return the number of blocks stored in one medium or in all; with groups, that of the largest group."""
        if medium is None:
            return sum(self.num_blocks(name) for name in {name for name, _ in self.media})
        return max((len(there) for (name, _), there in self.media.items() if name == medium), default=0)

    def results(self) -> list[ClaimResult]:
        """Return the status of each rule."""
        return [self._result(rule) for rule in RULES]

    def _result(self, rule: str) -> ClaimResult:
        if self.num_violations[rule]:
            return ClaimResult(rule, "violated", self.num_violations[rule])
        if rule == "limits" and self.num_unjudged[rule]:
            why = (
                f"{self.num_refused:,} messages were too long, and {self.num_left_out:,} blocks more than the "
                f"{self._max_blocks:,} that are kept"
            )
            return ClaimResult(rule, "inconclusive", why=why)
        if self.num_doubtful[rule]:
            why = (
                f"{self.num_doubtful[rule]:,} claims are right if blocks that were stored again had copies, and wrong "
                "if these were reports of vLLM (kv_cache_report_mode full), or prefixes of SGLang with different "
                "extra_key, which look the same"
            )
            return ClaimResult(rule, "inconclusive", why=why)
        if self.num_unjudged[rule]:
            why = f"{self.num_unjudged[rule]:,} claims are about what was there before, which is not known"
            return ClaimResult(rule, "inconclusive", why=why)
        if rule == "stored_twice" and self._allows_copies:
            return ClaimResult(rule, "not_run", why="a block may have copies")
        if rule == "pool" and self.total_blocks is None:
            return ClaimResult(rule, "not_run", why="the number of blocks is not known")
        return ClaimResult(rule, "ok")

    def _judge(self, rule: str, seq: int, what: str) -> None:
        if self.is_complete:
            self.add(rule, seq, what)
        else:
            self.num_unjudged[rule] += 1

    def _leave_out(self, num_blocks: int) -> None:
        self.num_left_out += num_blocks
        self.num_unjudged["limits"] += num_blocks
        self.is_complete = False

    def _forget(self) -> None:
        self.media.clear()
        self.copies.forget()
        self._num_known = 0

    def _check_tokens(self, seq: int, event: Stored) -> None:
        """Check the tokens of an event.

        The groups of a hybrid model have blocks of different sizes, and its large blocks can also be stored by a
        shorter prefix, which ends within them.
        """
        size, known = event.block_size, self._sizes.get(event.group)
        is_of_groups = len(self._sizes) > 1 or event.group > 0
        if size < 1 or not (len(event.token_ids) == size * len(event.hashes) or (event.is_sparse and _may_skip(event))):
            what = f"{len(event.hashes)} blocks of {size} tokens have {len(event.token_ids)}"
            self.add("tokens", seq, what)
        elif known is None or known == size or (is_of_groups and (known % size == 0 or size % known == 0)):
            self._sizes[event.group] = max(size, known or 0)
            if self.block_size is None:
                self.block_size = size
        else:
            self.add("tokens", seq, f"a block has {size} tokens, and had {known} before")

    def _compare(self, seq: int, name: BlockHash, block: Block, group: int) -> None:
        """Compare a block with the same block in other media."""
        for (_, other), there in self.media.items():
            known = there.get(name) if other == group else None
            if known is not None and known != block and UNPLACED not in (known, block):
                self.add("content", seq, f"{brief([name])} has another parent or other tokens than in another medium")

    def _is_anywhere(self, name: BlockHash, group: int) -> bool:
        return any(name in there for (_, other), there in self.media.items() if other == group)

    def _may_be_report(self, event: Stored, there: Container[BlockHash]) -> bool:
        """Return whether an event may be a report: all its blocks are or may be stored, from the first of a prompt on.

        Copies are stored like this for a prompt of one block, and for one whose request looks for no cached blocks.
        """
        if event.parent is not None or event.medium != DEFAULT_MEDIUM:
            return False
        key = event.medium, event.group
        if not event.hashes or not all(name in there or self.copies.is_possible((key, name)) for name in event.hashes):
            return False
        self.copies.has_reports |= len(event.hashes) > 1
        return True

    def _count(self, seq: int) -> None:
        """Compare the blocks on the device that are certainly there with its size."""
        uncertain = self.copies.num_uncertain
        parts = ((key, there) for key, there in self.media.items() if key[0] == DEFAULT_MEDIUM)
        num_blocks = max((len(there) - uncertain[key] for key, there in parts), default=0)
        if num_blocks > self.most_blocks:
            self.most_blocks = num_blocks
            if self.total_blocks is not None and num_blocks > self.total_blocks:
                self.add("pool", seq, f"{num_blocks:,} blocks are stored in a pool of {self.total_blocks:,}")


def _may_skip(event: Stored) -> bool:
    """Return whether a group with the layers of `event` may keep some blocks of a prefix only."""
    return event.kind not in KEEP_ALL if event.kind is not None else event.group > 0


def brief(names: Sequence[BlockHash]) -> str:
    """Return a text of hashes, for a message."""
    return ", ".join(f"block {name.hex() if isinstance(name, bytes) else name}" for name in names) or "nothing"
