"""Events of hybrid models as vLLM publishes them: judged, and the reason why prompts are not found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from kvarts.doors.watch.metrics import EngineSample
from kvarts.doors.watch.sockets import Followed
from kvarts.doors.watch.watched import Watched, WatchVerdict

from builders.streams import removed, stored

FINE = 16
FULL, WINDOW, STATE = "full_attention", "sliding_window", "mamba"


def hashes_of(tokens: Sequence[int], size: int) -> list[int]:
    """vLLM's hash of a block stands for all tokens up to its end, at any size of blocks."""
    return [hash(tuple(tokens[:end])) & (2**63 - 1) for end in range(size, len(tokens) + 1, size)]


class Vllm:
    """What vLLM's block pool publishes for groups of layers: one event for each group and range of blocks of a request.

    A mask leaves blocks out: then the event has the tokens of the whole range, and the hashes of the others.
    """

    def __init__(self, *groups: tuple[str, int, int | None]) -> None:
        self.groups = groups

    def store(self, group: int, tokens: Sequence[int], *, first: int = 0, mask: Sequence[bool] | None = None) -> Any:
        """Store the blocks of a request from block `first` on, those of `mask` only."""
        kind, size, span = self.groups[group]
        hashes = hashes_of(tokens, size)
        new = hashes[first:]
        kept = [name for place, name in enumerate(new) if mask is None or mask[place]]
        return stored(
            kept, hashes[first - 1] if first else None, size=size,
            token_ids=tokens[first * size : (first + len(new)) * size], group_idx=group, kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=span,
        )  # fmt: skip

    def partial(self, group: int, tokens: Sequence[int]) -> Any:
        """Store an entry by a prefix that ends within a large block."""
        kind, _, _ = self.groups[group]
        fine = hashes_of(tokens, FINE)
        return stored([fine[-1]], fine[-2] if len(fine) > 1 else None, size=FINE, token_ids=tokens[-FINE:],
                      group_idx=group, kv_cache_spec_kind=kind)  # fmt: skip

    def remove(self, group: int, hashes: Sequence[int]) -> Any:
        return removed(hashes, group_idx=group)


def judged(*events: Any, sample: EngineSample | None = None) -> WatchVerdict:
    watched = Watched()
    watched.begin(is_complete=True)
    for seq, event in enumerate(events):
        watched.apply(seq, msgspec.msgpack.encode([float(seq), [event], 0]))
    return watched.verdict(Followed(), [], sample=sample)


def broken(verdict: WatchVerdict) -> dict[str, int]:
    return {result.rule: result.num_violations for result in verdict.rules if result.status == "violated"}


def prompt(seed: int, num_tokens: int) -> list[int]:
    return [seed * 100_000 + place for place in range(num_tokens)]


def test_groups_may_have_blocks_of_different_sizes_and_leave_blocks_out() -> None:
    engine = Vllm((FULL, 16, None), (WINDOW, 16, 32), (STATE, 64, None))
    tokens = prompt(1, 256)
    verdict = judged(
        engine.store(0, tokens),
        engine.store(1, tokens, mask=[False] * 14 + [True] * 2),
        engine.store(2, tokens, mask=[False, False, False, True]),
        engine.store(0, [*tokens, *prompt(2, 64)], first=16),
        engine.store(1, [*tokens, *prompt(2, 64)], first=16, mask=[False, False, True, True]),
        engine.store(2, [*tokens, *prompt(2, 64)], first=4),
        engine.store(1, prompt(3, 64), mask=[False] * 4),
        engine.partial(2, prompt(4, 32)),
        engine.store(2, prompt(4, 64)),
        engine.remove(1, hashes_of(tokens, 16)[-2:]),
    )
    assert (verdict.verdict, broken(verdict)) == ("ok", {})


def test_a_group_that_skips_its_parent_has_no_unknown_parent() -> None:
    engine = Vllm((FULL, 16, None), (STATE, 64, None))
    tokens = prompt(1, 256)
    masked = engine.store(1, tokens, first=2, mask=[False, True])
    assert broken(judged(engine.store(0, tokens), masked)) == {}


@pytest.mark.parametrize(
    ("event", "rule"),
    [
        (stored([1], token_ids=[1] * 32, size=16, group_idx=0, kv_cache_spec_kind=FULL), "tokens"),
        (stored([1], token_ids=[1] * 33, size=16, group_idx=1, kv_cache_spec_kind=STATE), "tokens"),
        (stored([1, 2], token_ids=[1] * 16, size=16, group_idx=1, kv_cache_spec_kind=STATE), "tokens"),
    ],
)
def test_tokens_that_no_group_has_are_still_a_violation(event: Any, rule: str) -> None:
    assert broken(judged(event)) == {rule: 1}


def test_a_group_without_its_last_state_explains_that_nothing_is_found() -> None:
    engine = Vllm((FULL, 16, None), (STATE, 64, None))
    tokens = prompt(1, 256)
    sample = EngineSample(num_queried_tokens=512, num_hit_tokens=0)
    verdict = judged(engine.store(0, tokens), sample=sample)
    assert verdict.hits is not None and verdict.hits.hit_share == 0.0
    verdict = judged(
        engine.store(0, tokens),
        engine.store(1, tokens, mask=[False, False, False, True]),
        engine.remove(1, hashes_of(tokens, 64)[-1:]),
        sample=sample,
    )
    hits = verdict.hits
    assert hits is not None
    assert (hits.stored_tokens, hits.resumable_tokens) == (256, 0)
    assert [(group.group, group.num_stored, group.num_there, group.resumable_tokens) for group in hits.groups] == [
        (0, 16, 16, 256), (1, 1, 0, 0),
    ]  # fmt: skip
    assert hits.why == (
        "prompts that repeat all of it could resume from 0 of 256 tokens: group 1 (mamba, blocks of 64 tokens) has "
        "none of the blocks that they would need"
    )
    assert f"  prompts found 0.0% of 512 tokens; {hits.why}" in verdict.to_text()


def test_a_hit_ends_where_every_group_can_resume() -> None:
    engine = Vllm((FULL, 16, None), (WINDOW, 16, 33), (STATE, 64, None))
    one, two = prompt(1, 256), prompt(2, 160)
    verdict = judged(
        engine.store(0, one), engine.store(1, one), engine.store(2, one, mask=[False, True, False, True]),
        engine.store(0, two), engine.store(1, two, mask=[False] * 8 + [True] * 2), engine.store(2, two[:128]),
        engine.remove(1, hashes_of(one, 16)[14:15]),
    )  # fmt: skip
    hits = verdict.hits
    assert hits is not None
    # Of `one`, the state at 256 and at 128 are there, and the window has its last two blocks only at 128. Of `two`, the
    # states are at 64 and 128, where the window has nothing.
    assert (hits.stored_tokens, hits.resumable_tokens) == (416, 128)
    assert [group.resumable_tokens for group in hits.groups] == [416, 224 + 160, 256 + 128]
    assert "group 1" in hits.why or "group 2" in hits.why


def test_a_group_that_never_stores_is_named() -> None:
    engine = Vllm((FULL, 16, None), (STATE, 64, None), (WINDOW, 16, 32))
    tokens = prompt(1, 64)
    hits = judged(engine.store(0, tokens), engine.store(2, tokens)).hits
    assert hits is not None
    assert hits.why == "group 1 has stored no block, and a hit needs blocks of every group"


def test_one_group_of_full_attention_needs_no_explanation() -> None:
    engine = Vllm((FULL, 16, None))
    verdict = judged(engine.store(0, prompt(1, 64)), sample=EngineSample(num_queried_tokens=10, num_hit_tokens=5))
    assert verdict.hits is not None and verdict.hits.why == ""
    assert "  prompts found 50.0% of 10 tokens\n" in verdict.to_text()


def test_without_events_of_blocks_there_is_no_explanation() -> None:
    assert judged(removed([])).hits is None


def test_blocks_of_two_groups_that_share_a_hash_are_not_stored_again() -> None:
    engine = Vllm((FULL, 16, None), (WINDOW, 16, 32))
    tokens = prompt(1, 64)
    events = [engine.store(0, tokens), engine.remove(0, hashes_of(tokens, 16)[-1:]), engine.store(1, tokens)]
    assert judged(*events).num_stored_again == 0
    assert judged(*events, engine.store(0, tokens, first=3)).num_stored_again == 1
