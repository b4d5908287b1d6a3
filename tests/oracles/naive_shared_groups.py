"""A naive model with KV groups on a shared device: part by part, and a part block by block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import gcd

from kvarts.core.kv.layers import KvLayer

from oracles.naive import NaiveRequest, polynomial_ns
from oracles.naive_group_engine import CountingGroups, NaiveGroupEngine
from oracles.naive_grouped import NaivePart, has_state, is_bounded
from oracles.naive_shared import NaiveDevice, NaiveTenant

__all__ = ["NaiveGroupTenant"]


class GroupsOnDevice(CountingGroups):
    """Parts of one model of a device. Below 0, `empty_bytes` is what these take of its memory."""

    tenant: NaiveGroupTenant

    def free_bytes(self) -> int:
        return self.tenant.device.free

    def take(self, group: int) -> NaivePart:
        layer, part_bytes = self.groups[group]
        for _ in range(part_bytes // self.tenant.page_bytes):
            self.tenant.device.make_room(self.tenant)
            self.empty_bytes -= self.tenant.page_bytes
        return NaivePart(group, is_kept=self.keeps_all or not is_bounded(layer))

    def release(self, part: NaivePart, *, is_passed: bool = False) -> None:
        super().release(part, is_passed=is_passed)
        if part.refs == 0:
            self.tenant.num_released += 1
            self.tenant.device.num_releases += 1
            self.tenant.part_released_at[part] = self.tenant.device.num_releases


class NaiveGroupTenant(NaiveTenant, NaiveGroupEngine):
    """Its pages are blocks: the largest size that divides every part."""

    settles_late = False

    def __init__(
        self,
        device: NaiveDevice,
        groups: Sequence[tuple[KvLayer, int]],
        *,
        keeps_all: bool,
        guaranteed: int,
        weight: int,
        floor: int,
        ceiling: int | None,
        page_size: int,
        max_num_seqs: int,
    ) -> None:
        whole_page = sum(part_bytes for layer, part_bytes in groups if not has_state(layer))
        NaiveGroupEngine.__init__(
            self,
            groups,
            keeps_all=keeps_all,
            num_pages=device.num_bytes // whole_page,
            page_size=page_size,
            max_num_batched_tokens=device.total_tokens,
            max_num_seqs=max_num_seqs,
            cost=polynomial_ns,
        )
        self.groups = GroupsOnDevice(self.layers, page_size, 0, keeps_all=keeps_all)
        self.groups.tenant = self
        self.part_released_at: dict[NaivePart, int] = {}
        self.total_bytes = device.num_bytes
        self.join(device, gcd(*(part_bytes for _, part_bytes in groups)), guaranteed, weight, floor, ceiling)

    # Memory -----------------------------------------------------------------------------------------------

    @property
    def held(self) -> int:
        return -self.groups.empty_bytes

    @property
    def used_bytes(self) -> int:
        return self.held - sum(self.groups.bytes_of(part) for part in self.groups.released)

    @property
    def has_cached(self) -> bool:
        return bool(self.groups.released)

    def oldest_release(self) -> int:
        return self.part_released_at[self.groups.released[0]]

    def evict(self) -> None:
        part = self.groups.released.pop(0)
        assert part.name is not None
        self.groups.lose(part)
        self.groups.evicted.append((part.group, part.name))
        self.groups.empty_bytes += self.groups.bytes_of(part)

    def most_new(self) -> int:
        return self.device.total_tokens  # whatever its budget in this turn

    def most_bytes(self, request: NaiveRequest) -> int:
        return NaiveGroupEngine.most_bytes(self, request)

    def release(self, request: NaiveRequest) -> None:
        NaiveGroupEngine.release(self, request)

    # Other models -----------------------------------------------------------------------------------------

    def fits(self, head: NaiveRequest, num_bytes: int) -> bool:
        return super().fits(head, num_bytes // self.page_bytes)

    def others_preempt_for(self, request: NaiveRequest, num_bytes: int) -> bool:
        return super().others_preempt_for(request, num_bytes // self.page_bytes)

    def parts_of(self, request: NaiveRequest) -> list[NaivePart]:
        sequence = self.sequences[request.seq]
        return [part for parts in sequence.parts for part in parts.values()] + list(sequence.states.values())

    def bytes_of(self, parts: Sequence[NaivePart]) -> int:
        return sum(self.groups.bytes_of(part) for part in parts)

    def freed_by(self, victims: list[NaiveRequest]) -> int:
        holds = Counter(part for victim in victims for part in self.parts_of(victim))
        return self.bytes_of([part for part, count in holds.items() if part.refs == count])

    def rest_of(self, request: NaiveRequest) -> int:
        """The most that is needed for the rest, beside what it has."""
        return max(0, self.most_of(request.known) - self.bytes_of(self.parts_of(request)))

    def whole_of(self, request: NaiveRequest) -> int:
        return self.most_of(request.known)
