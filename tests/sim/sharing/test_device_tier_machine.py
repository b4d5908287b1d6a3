"""Two models with KV groups on one device, each with tiers below it, against naive models that share their bytes."""

from __future__ import annotations

from typing import Any, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from kvarts.core.kv.groups import GroupMemory, PartGroup, Retention
from kvarts.sim.sharing.memory import DeviceMemory, DevicePart, Others, open_grouped_part

from builders.tiered_machine import Holder, TieredMachine, part_groups, prompts
from oracles.naive_device_tiers import NaiveSharedBytes, NaiveTieredModel
from oracles.naive_group_tier import NaiveTieredGroups

pytestmark = pytest.mark.laws

NAMES = ("chat", "code")


class NobodyElse:
    """The device as its parts see it: no request of another model is preempted, and nothing is kept for others."""

    def kept_for_others(self, model: str) -> int:
        return 0

    def preempt_for(self, *_: Any, **__: Any) -> bool:
        return False


class DeviceMachine(TieredMachine):
    """All rules act on one of the models, whose parts may evict those of the other. Decodes compute step by step."""

    @initialize(
        groups=st.lists(
            st.tuples(
                part_groups(("full", "full", "window", "latent", "chunk")),
                st.lists(part_groups(("full", "window", "chunk", "state", "state")), max_size=2),
            ),
            min_size=len(NAMES),
            max_size=len(NAMES),
        ),
        page_size=st.integers(1, 3),
        num_bytes=st.sampled_from([16, 25, 40, 81]),
        guarantees=st.tuples(st.sampled_from([0, 0, 4, 8]), st.sampled_from([0, 0, 4, 8])),
        sizes=st.lists(st.sampled_from([[3], [10], [40], [10, 40]]), min_size=len(NAMES), max_size=len(NAMES)),
        limit=st.sampled_from([1, 4, 100]),
        keeps=st.sampled_from(["all", "tails"]),
        aligns=st.booleans(),
    )
    def build(
        self,
        groups: list[tuple[PartGroup, list[PartGroup]]],
        page_size: int,
        num_bytes: int,
        guarantees: tuple[int, int],
        sizes: list[list[int]],
        limit: int,
        keeps: Retention,
        aligns: bool,
    ) -> None:
        self.num_owners = 0
        self.tokens_of = {}
        self.served = []
        self.device = DeviceMemory(num_bytes)
        self.naive_device = NaiveSharedBytes(num_bytes)
        of_all = set(self.__dict__)
        self.models: list[dict[str, Any]] = []
        for number, (first, others) in enumerate(groups):
            self.name, self.guarantee = NAMES[number], guarantees[number]
            memory = GroupMemory((first, *others), keeps, aligns=aligns)
            self.open_engine(memory, page_size, num_bytes // memory.block_bytes, sizes[number], limit)
            self.fields = set(self.__dict__) - of_all - {"models", "fields"}
            self.models.append({name: getattr(self, name) for name in self.fields})
        self.number = len(NAMES) - 1

    def join_device(self) -> None:
        """Let the cache take its memory from the device."""
        others = cast("Others", NobodyElse())
        self.part: DevicePart = open_grouped_part(
            self.name, self.device, others, self.cache, guaranteed_bytes=self.guarantee
        )

    def open_model(self, *of_groups: Any, **options: Any) -> NaiveTieredGroups:
        """Return a naive model that shares the naive device."""
        options |= {"device": self.naive_device, "block_bytes": self.block_bytes, "guaranteed": self.guarantee}
        return NaiveTieredModel(*of_groups, **options)

    @rule(number=st.integers(0, len(NAMES) - 1))
    def switch(self, number: int) -> None:
        """Let the next rules act on another model."""
        self.models[self.number] = {name: getattr(self, name) for name in self.fields}
        self.__dict__.update(self.models[number])
        self.number = number
        self.part.refresh()

    @rule(tokens=prompts())
    def serve_both(self, tokens: list[int]) -> None:
        """The other model computes and stores a prompt, for which this one may lose what it has cached."""
        before = self.number
        self.switch(1 - before)
        self.serve(tokens)
        self.switch(before)
        self.served.pop()

    # Decodes ---------------------------------------------------------------------------------------------

    def computing(self) -> list[Holder]:
        return [holder for holder in self.holders if holder.num_known is None]

    def decoding(self) -> list[Holder]:
        return [holder for holder in self.holders if holder.num_known is not None]

    def begin_decoding(self, holder: Holder) -> None:
        holder.num_known = len(holder.sequence.tokens)
        self.tokens_of[holder.content.owner] = holder.sequence.tokens
        self.model.settle(holder.sequence)
        self.parts.free_skipped(holder.table, holder.sequence.num_tokens)
        self.cache.count()

    def decode_steps(self, most_steps: int) -> None:
        """What other models do between steps is not known: each is computed alone."""
        for _ in range(most_steps):
            decoding = self.decoding()
            if sum(self.model.missing(holder.sequence, 1) for holder in decoding) > self.model.free_bytes():
                return
            for holder in decoding:
                sequence = holder.sequence
                if len(sequence.tokens) == sequence.num_tokens:
                    self.num_owners += 1
                    sequence.tokens.append(self.model.first_private + self.num_owners)  # nobody else has it
                self.model.grow(sequence, 1, False)
                self.grow(holder.table, sequence.num_tokens, False)
                self.model.note(sequence, is_end=False, num_known=holder.num_known)
            for holder in decoding:
                self.model.settle(holder.sequence)
                self.parts.free_skipped(holder.table, holder.sequence.num_tokens)
            self.cache.count()

    # Laws -------------------------------------------------------------------------------------------------

    def agrees_on_memory(self) -> None:
        self.device.check()
        assert self.parts.empty_bytes == 0, "what is empty goes back"
        naive = self.naive_device
        assert self.device.num_empty_bytes == naive.empty
        assert self.device.num_free_bytes == naive.free
        assert self.part.pool.num_taken * self.block_bytes == cast("NaiveTieredModel", self.model).held
        for model, part in zip(naive.models, self.device.parts.values(), strict=True):
            assert (part.cache.num_cached * part.page_bytes, part.cache.num_evicted * part.page_bytes) == (
                model.evictable,
                sum(model.groups[group][1] for group, _ in model.evicted),
            )

    def teardown(self) -> None:
        if not hasattr(self, "device"):
            return
        for number in range(len(NAMES)):
            self.switch(number)
            super().teardown()


TestDeviceTiers = DeviceMachine.TestCase
TestDeviceTiers.settings = settings(stateful_step_count=40)
