"""The transfers between one device and the tiers below it, from their beginning to their end.

`Offloader` decides when they begin, and a `Layout` chooses their pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import ClassVar, Final, cast

from mypy_extensions import mypyc_attr

from kvarts.core.content import Content
from kvarts.core.kv.pool import PageId
from kvarts.core.kv.transfer import Direction, Loaded, Move, Transfer, TransferReport
from kvarts.core.tiers.channel import Channel
from kvarts.core.tiers.weigher import Weigher

__all__ = ["ALL", "NEVER_NS", "Copies", "Loading", "Transfers", "UnderWay"]

ALL = 1 << 62


class OffloadCounts:
    """Counts of transfers that ended, and of their faults."""

    FIELDS: ClassVar[tuple[str, ...]] = (
        "num_stores",
        "num_loads",
        "num_failed",
        "num_late",
        "num_given_up",
        "num_stray_reports",
        "num_pages_without_room",
    )
    __slots__ = FIELDS

    def __init__(self) -> None:
        self.num_stores = 0
        self.num_loads = 0
        self.num_failed = 0
        self.num_late = 0
        """Failed transfers that were not reported before their deadline."""
        self.num_given_up = 0
        """Failed stores that ended early because requests wanted the pages that they held."""
        self.num_stray_reports = 0
        """Reports that were late, repeated, or about an unknown transfer."""
        self.num_pages_without_room = 0
        """Pages that were to be stored and found no room."""

    def by_name(self) -> dict[str, int]:
        """Return the counts by their names."""
        return {name: getattr(self, name) for name in self.FIELDS}


Read = tuple[int, int, tuple[PageId | bytes, ...], tuple[PageId | bytes, ...]]
"""The place of a tier, the number of blocks to read from it, and the ids of these and of the device's."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Copies:
    """The `num_blocks` blocks that a store or a spill to the tier at `target` copies. Layouts add the pins.

    `source_ids` and `target_ids`: the ids of the blocks, if an executor copies them. `runs`: contents, each with
    its first page and the page after its last, and `groups`: the group of each, with KV groups. `request`: that of
    a load.
    """

    __slots__ = ("groups", "num_blocks", "request", "runs", "source_ids", "target", "target_ids")

    def __init__(self, target: int = -1, request: int = -1) -> None:
        self.target = target
        self.num_blocks = 0
        self.request = request
        self.source_ids: list[PageId | bytes] = []
        self.target_ids: list[PageId | bytes] = []
        self.runs: list[tuple[Content, int, int]] = []
        self.groups: list[int] = []


@mypyc_attr(allow_interpreted_subclasses=True)
class Loading(Copies):
    """The copies of a load for `request`, whose pages from `start` on it fills, `by_tier` from each tier.

    `displaced`: the store of pages that it overwrites, if there is one.
    """

    __slots__ = ("by_tier", "displaced", "reads", "start")

    def __init__(self, request: int, start: int, by_tier: tuple[int, ...] = ()) -> None:
        super().__init__(request=request)
        self.start = start
        self.by_tier = by_tier
        self.displaced: Copies | None = None
        self.reads: list[Read] = []


class UnderWay:
    """A running transfer of `num_pages` blocks, over `lanes`: the channels, with the bytes that they carry.

    `waiting_for`: workers that have not reported it.
    """

    __slots__ = (
        "begin_ns",
        "copies",
        "deadline_ns",
        "direction",
        "duration_ns",
        "end_ns",
        "is_early",
        "is_given_up",
        "lane",
        "lanes",
        "least_ns",
        "num_good_pages",
        "num_pages",
        "since_ns",
        "waiting_for",
    )

    def __init__(
        self,
        direction: Direction,
        waiting_for: set[int],
        copies: Copies,
        lanes: tuple[tuple[Channel, int], ...],
    ) -> None:
        self.direction = direction
        self.num_pages = copies.num_blocks
        self.waiting_for = waiting_for
        self.copies = copies
        self.lanes = lanes
        self.num_good_pages = ALL
        self.is_given_up = False
        self.is_early = False
        """Whether its request may compute while later layers are loaded; such a load does not fail."""
        self.end_ns = ALL
        """When it ends, in virtual time."""
        self.deadline_ns = ALL
        self.least_ns = 0
        """The earliest time at which a load can end, as far as is known."""
        self.lane = ""
        """The channel that a load waits for."""
        self.begin_ns = 0
        self.duration_ns = 0
        """The duration that an executor reports: that of its slowest worker."""
        self.since_ns: list[int] = []
        """For each request that waits for a load, the start of its wait."""


NEVER_NS: Final = (1 << 62) - 1


class Transfers:
    """Owner of every running transfer, of the transfers that executors are to begin, and of loads that ended.

    `lanes`: the channels from which a request may wait for a load. `weigher`: receives the results of loads. Other
    arguments are as in Offloader.
    """

    def __init__(
        self,
        lanes: Iterable[Channel],
        weigher: Weigher,
        *,
        deadline_ns: int,
        workers: int,
        fail_every: int,
        with_page_ids: bool,
    ) -> None:
        self._with_page_ids = with_page_ids
        self._weigher = weigher
        self._deadline_ns = deadline_ns
        self._num_workers = workers
        self._fail_every = fail_every
        self.fails: Callable[[int], bool] | None = None
        """Returns whether a transfer fails on purpose, by its number from 1; in addition to `fail_every`."""
        self.counts = OffloadCounts()
        self._under_way: dict[int, UnderWay] = {}
        self.num_transfers = 0
        """Transfers begun so far; also the number of the next."""
        self._given_up: dict[int, set[int]] = {}
        """Workers that have not reported a store that was given up, by its number."""
        self._due: list[tuple[int, int, bool]] = []
        """As a heap: when transfers end, and before that, when requests can compute on; number; whether it ends."""
        self._waited_ns = {lane.name: 0 for lane in lanes}
        self._planned: list[Transfer] = []
        self._loaded: list[Loaded] = []
        self._now_ns = 0
        self._used: list[int] = []
        """The loads under way whose pages the planned step uses."""

    # Interface of the scheduler ---------------------------------------------------------------------------

    def use_early(self, transfer: int) -> None:
        """Record that the planned step uses the pages of a load under way: no request waits for it any longer."""
        self._count_waits(self._under_way[transfer])
        self._under_way[transfer].is_early = True
        self._used.append(transfer)

    def step_ns(self, now_ns: int, duration_ns: int) -> int:
        """Return the duration of the planned step, which starts at `now_ns` and would take `duration_ns` alone.

        Its last layer is computed after the last layers of the loads that it uses.
        """
        if not self._used:
            return duration_ns
        end_ns = max(self._under_way[transfer].end_ns for transfer in self._used)
        return max(duration_ns, end_ns - now_ns - (-duration_ns // self._weigher.num_layers))

    def measure(self, num_tokens: int, num_decodes: int, duration_ns: int) -> None:
        """Record how long a step of a real executor took, without transfers; `num_tokens`: tokens of prompts."""
        self._weigher.measure(num_tokens, num_decodes, duration_ns)

    def follow(self, transfer: int) -> None:
        """Note that one more request waits for a running load."""
        self._under_way[transfer].since_ns.append(self._now_ns)

    def take_planned(self) -> tuple[Transfer, ...]:
        """Return the transfers that an executor has to begin with this step."""
        planned = tuple(self._planned)
        self._planned.clear()
        return planned

    def take_loaded(self) -> list[Loaded]:
        """Return the loads that ended since the last call, in that order."""
        loaded = self._loaded
        self._loaded = []
        return loaded

    # What stores hold -------------------------------------------------------------------------------------

    def num_lent(self) -> int:
        """Return the blocks of the device that stores hold and no request does."""
        return sum(map(self._num_idle_of, self._under_way.values()))

    def return_lent(self, count: int) -> None:
        """Give stores up, the youngest first, until at least `count` of these blocks are free."""
        is_last = True
        for transfer_id, under_way in reversed(list(self._under_way.items())):
            if count <= 0:
                return
            if under_way.direction is not Direction.STORE:
                continue
            num_idle = self._num_idle_of(under_way)
            if not num_idle:
                is_last = False
                continue
            count -= num_idle
            del self._under_way[transfer_id]
            if self._with_page_ids:
                self._given_up[transfer_id] = under_way.waiting_for
            else:
                self._due = [due for due in self._due if due[1] != transfer_id]
                heapify(self._due)
            for lane, num_bytes in under_way.lanes if is_last else ():
                lane.withdraw(self._now_ns, num_bytes)
            self.counts.num_given_up += 1
            under_way.num_good_pages, under_way.is_given_up = 0, True
            self._end(transfer_id, under_way)

    def _num_idle_of(self, under_way: UnderWay) -> int:
        """Return the blocks of the device that a store holds and no request does; 0 for another transfer."""
        raise NotImplementedError

    # Interface of the engine ------------------------------------------------------------------------------

    @property
    def is_due(self) -> bool:
        """Whether a store or a spill is due, independent of later changes on the device."""
        raise NotImplementedError

    @property
    def has_work(self) -> bool:
        """Whether a transfer is running or about to begin, or a load has ended and was not taken."""
        return bool(self._under_way or self._loaded or self.is_due)

    @property
    def has_loaded(self) -> bool:
        """Whether a load has ended and was not taken."""
        return bool(self._loaded)

    @property
    def next_ns(self) -> int:
        """The end of the next transfer to end, in virtual time; NEVER_NS without one."""
        return self._due[0][0] if self._due else NEVER_NS

    def advance_to(self, now_ns: int) -> bool:
        """End the transfers that are due by `now_ns`; return whether there were any."""
        due = self._due
        if not due or due[0][0] > now_ns:
            return False
        self._now_ns = now_ns
        while due and due[0][0] <= now_ns:
            _, transfer_id, is_end = heappop(due)
            if not is_end:
                self._begin_early(transfer_id, now_ns)
                continue
            under_way = self._under_way.pop(transfer_id)
            if not under_way.is_early and self._is_to_fail(transfer_id):
                under_way.num_good_pages = 0
            self._end(transfer_id, under_way)
        return True

    def _begin_early(self, transfer: int, now_ns: int) -> None:
        """Let the request of a load compute on."""
        under_way = self._under_way.get(transfer)
        if under_way is None or self._is_to_fail(transfer):
            return
        if under_way.end_ns <= now_ns:
            return
        under_way.is_early = True
        loading = cast(Loading, under_way.copies)
        end = loading.start + sum(loading.by_tier)
        self._loaded.append(Loaded(loading.request, end, loading.by_tier, is_under_way=True))

    def _is_to_fail(self, transfer: int) -> bool:
        fail_every, number = self._fail_every, transfer + 1
        return bool((fail_every and number % fail_every == 0) or (self.fails and self.fails(number)))

    def ends(self, transfer: int, end_ns: int) -> None:
        """Record that `transfer`, the end of which was not known when it began, ends at `end_ns`."""
        heappush(self._due, (max(end_ns, self._under_way[transfer].least_ns), transfer, True))

    def fails_last(self, transfer: int, end_ns: int) -> None:
        """Record that the pages of a load from the last tier do not arrive; pages from other tiers do."""
        under_way = self._under_way[transfer]
        under_way.num_good_pages = sum(cast(Loading, under_way.copies).by_tier[:-1])
        self.ends(transfer, end_ns)

    def abort(self, now_ns: int) -> None:
        """End all running transfers as failed: in virtual time, the machine with both ends is gone."""
        self._now_ns = now_ns
        self._due.clear()
        under_way, self._under_way = self._under_way, {}
        for transfer_id, each in under_way.items():
            each.num_good_pages = 0
            self._end(transfer_id, each)

    def expire(self, now_ns: int) -> None:
        """End the transfers that were not reported before their deadline, as failed."""
        if not self._with_page_ids:
            return
        self._now_ns = now_ns
        while self._under_way:
            transfer_id, under_way = next(iter(self._under_way.items()))
            if under_way.deadline_ns > now_ns:
                return  # later transfers have later deadlines
            del self._under_way[transfer_id]
            self.counts.num_late += 1
            under_way.num_good_pages = 0
            self._end(transfer_id, under_way)

    def report(self, reports: Sequence[TransferReport], now_ns: int) -> None:
        """Process the workers' reports at `now_ns`, in any order, over any number of steps."""
        self._now_ns = now_ns
        for report in reports:
            self._report(report)

    # Internals --------------------------------------------------------------------------------------------

    def _workers(self) -> set[int]:
        return {0} if self._num_workers == 1 else set(range(self._num_workers))

    def _submit(
        self,
        under_way: UnderWay,
        end_ns: int,
        moves: list[Move],
        dropped_keys: tuple[bytes, ...] = (),
        early_ns: int = NEVER_NS,
    ) -> int:
        """Begin a transfer that should end at `end_ns`; return its number. An executor carries out `moves`.

        With NEVER_NS, `ends` must follow. `early_ns`: when the request of a load can compute on, if that is before.
        """
        transfer_id = self.num_transfers
        self.num_transfers += 1
        self._under_way[transfer_id] = under_way
        under_way.begin_ns = self._now_ns
        if self._with_page_ids:
            under_way.deadline_ns = self._now_ns + self._deadline_ns
            self._planned.append(
                Transfer(transfer_id, under_way.direction, tuple(moves), under_way.num_pages, dropped_keys)
            )
        elif end_ns < NEVER_NS:
            under_way.end_ns = end_ns
            heappush(self._due, (end_ns, transfer_id, True))
            if (
                early_ns < end_ns
                and self._weigher.num_layers > 1
                and all(lane.can_be_awaited for lane, _ in under_way.lanes)
            ):
                heappush(self._due, (early_ns, transfer_id, False))
        return transfer_id

    def _report(self, report: TransferReport) -> None:
        under_way = self._under_way.get(report.transfer_id)
        if under_way is None and report.worker in (workers := self._given_up.get(report.transfer_id, set())):
            workers.remove(report.worker)
            if not workers:
                del self._given_up[report.transfer_id]
            return
        if under_way is None or report.worker not in under_way.waiting_for:
            self.counts.num_stray_reports += 1
            return
        under_way.waiting_for.remove(report.worker)
        under_way.duration_ns = max(under_way.duration_ns, report.duration_ns)
        if report.num_good_pages is not None:
            under_way.num_good_pages = min(under_way.num_good_pages, max(0, report.num_good_pages))
        if not under_way.waiting_for:
            del self._under_way[report.transfer_id]
            self._end(report.transfer_id, under_way)

    def _end(self, transfer_id: int, under_way: UnderWay) -> None:
        """End a transfer: record its duration, and settle its pages."""
        duration_ns = under_way.duration_ns or self._now_ns - under_way.begin_ns
        is_measured = len(under_way.lanes) == 1 and under_way.num_good_pages >= under_way.num_pages
        for lane, num_bytes in under_way.lanes:
            lane.ended(num_bytes, duration_ns if is_measured else None)
        self._settle(transfer_id, under_way)

    def _settle(self, transfer_id: int, under_way: UnderWay) -> None:
        """Publish the pages of a transfer that has ended, or roll it back."""
        raise NotImplementedError

    def _count_store(self, under_way: UnderWay) -> bool:
        """Count a store or spill that has ended; return whether it succeeded."""
        is_stored = under_way.num_good_pages >= under_way.num_pages
        self.counts.num_stores += 1
        self.counts.num_failed += not is_stored
        return is_stored

    def _count_load(self, under_way: UnderWay, *, is_whole: bool) -> None:
        """Count a load that has ended, and how long requests waited for it."""
        assert under_way.direction is Direction.LOAD
        self._count_waits(under_way)
        self.counts.num_loads += 1
        self.counts.num_failed += not is_whole
        self._weigher.loaded(is_whole=is_whole)

    def _count_waits(self, under_way: UnderWay) -> None:
        """Count how long requests have waited for a load; they wait no longer."""
        if under_way.lane:
            self._waited_ns[under_way.lane] += len(under_way.since_ns) * self._now_ns - sum(under_way.since_ns)
            under_way.since_ns = []
