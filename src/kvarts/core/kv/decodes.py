"""Decodes of a cache with KV groups: which of them take a page, and which release one, in which steps.

Each decode computes one token per step. So in the steps of one *slot*, out of page_size, the same decodes begin a page,
and the same windows pass one. The releases of a decode are a Stream as long as they are regular: all parts that the
window passes are listed, or none. Other releases are *odd*: each is due in one step, and is handled individually.

Decodes that hold the same parts stay in the order in which their windows pass them. The last one lists them, with a
stream as if the others were not there; the streams of the others are *silent*: they list and count nothing, and give up
their holds when someone examines the parts. A sequence that holds such parts and does not decode may pass them at any
time. While it does, the releases of a decode that it may come after are odd.

An example: one decode from position 0 on, pages of 4 tokens, a window of 4 tokens, so the token at position 7 is the
first that does not attend to page 0:

    step            0 1 2 3 | 4 5 6 7 | 8 9 10 11
    begins a page   *         *         *            slot 0: pages 0, 1, 2
    passes a page                 *         *        slot 2: page 0 after step 6, page 1 after step 10

The first release is odd: in step 0 the window is not full until more than a page of steps later. From then on it is a
stream in slot 2, and the releases of any number of steps are sums over `num_listed` and `num_emptied` by slot.

So many steps are done at once, in a *leap*: the sums determine how far the memory reaches. Parts are listed in the
order of release, and evicted in the order of the list: step by step or at once, the same parts are evicted. The same
decode, alone in a memory of three pages, does 13 steps at once:

    step        0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12
    taken       1         1         1           1
    released                  1         1
    free after  2         1   2     1   2       1      empty, or listed and not evicted yet

Only the fourth page, in step 12, finds no empty memory: page 0, listed after step 6, is evicted for it, as it would be
step by step. No step lacks memory, so the leap is not cut. Had nothing been released, three pages would last
for 12 steps, and the leap would end there. Only the order of the list says which part is evicted, so it is enough to
evict the sum at the end.

With a lag of a step, as of plans that are made ahead, each of these releases is a step later: step 4 is the first after
which page 0 is released. What the last chunk of a prompt attended to is released when its step has been read, so the
first release of a decode may be an odd one in its first step. A page is named in the step after the one that fills it.

If a reader receives events of parts, they are emitted step by step: which page is full in a step, and which page a
window passes after it, follow from the slot. Then only regular releases whose parts are listed are streams; all others
are odd. The pages of a decode that no other sequence can find are named later, several at once: when parts of them are
evicted, or released otherwise, or when the decode ends.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import TypeVar

from kvarts.core.events import StepEnded, StepStarted
from kvarts.core.kv.account import RunAccount, RunEvents
from kvarts.core.kv.group_needs import FirstSeen
from kvarts.core.kv.groups import GroupMemory
from kvarts.core.kv.runs import ENDED, NEVER, PartRun, RunTable, Span, Stream, Turns

__all__ = ["Decodes"]

T = TypeVar("T")


class RunLeap:
    """The outcome of steps. `taken`: pages taken, per step.

    For each group with windows or chunks, and each step: `listed` parts are released at its end and can be found,
    `emptied` parts become empty; `emptied` is empty if all released parts can be found. `evicted`: a group and a number
    of parts, repeated, in the order of the list.
    """

    __slots__ = ("emptied", "evicted", "listed", "taken")

    def __init__(self, taken: list[int], listed: list[list[int]], emptied: list[list[int]], evicted: list[int]) -> None:
        self.taken = taken
        self.listed = listed
        self.emptied = emptied
        self.evicted = evicted

    def add(self, other: RunLeap) -> None:
        """Add the steps of `other`, which follow."""
        self.taken += other.taken
        for mine, others in zip(self.listed + self.emptied, other.listed + other.emptied, strict=True):
            mine.extend(others)
        self.evicted += other.evicted


class Decodes:
    """Owner of the decode fields of block tables, and of `step`, the next step to do.

    By slot: `num_due` decodes begin a page; `listing` contains the streams that list a part, in the order of admission;
    `given_bytes` are released by these and by streams whose parts become empty at once; `filling` contains the decodes
    that fill a page that others may find, and `emitting` those that fill any, if there are events. By group and slot:
    `num_listed` and `num_emptied` parts are released by such streams. `sparse`: by group, whether it retains some parts
    only, none of decodes. `lag`: 1 if the next step is planned while one runs; a page is then findable, and passed by a
    window, a step later.
    """

    def __init__(
        self, memory: GroupMemory, page_size: int, account: RunAccount, sparse: Sequence[bool] = (), *, lag: int = 0
    ) -> None:
        groups = memory.groups
        self._lag = lag
        self.page_size = page_size
        self.step = 0
        self.num_due = [0] * page_size
        self.num_decoding = 0
        self.listing: list[list[Stream]] = [[] for _ in range(page_size)]
        self.given_bytes = [0] * page_size
        self._emptied_bytes = [0] * page_size
        """Those of `given_bytes` that become empty at once."""
        self.num_listed = [[0] * page_size for _ in groups]
        self.num_emptied = [[0] * page_size for _ in groups]
        self.filling: list[list[RunTable]] = [[] for _ in range(page_size)]
        self.num_filling = 0
        self.emitting: list[list[RunTable]] = [[] for _ in range(page_size)]
        self._account = account
        self._events = account.events
        self._num_emitted = 0
        """The number of steps of the leap whose events are emitted."""
        self._first_step = 0
        self._starts_ns: Sequence[int] = ()
        """The number of its first step, and when its steps start."""
        sparse = sparse or [False] * len(groups)
        self._found = [index for index, group in enumerate(groups) if not (group.is_state or sparse[index])]
        self._last_turns = Turns()
        self._keeps = [memory.keeps == "all" and not is_sparse for is_sparse in sparse]
        """By group, whether parts that decodes fill and release are listed."""
        self.bounded = [index for index, group in enumerate(groups) if group.is_bounded]
        self.keeps_all = all(self._keeps[index] for index in self.bounded)
        """Whether all released parts are listed."""
        self._orders = any(sparse)
        """Whether the turns of a step matter if it takes parts that are not empty, after some became empty."""
        self._is_own_turn = [
            group.layer.kind != "chunk" and ((group.layer.span or 1) - 1 + lag) % page_size == 0 for group in groups
        ]
        """By group, whether a decode that releases a page begins one in the next step: it takes more at that turn."""
        self._emptying: list[list[Stream]] = [[] for _ in range(page_size)]
        """By slot, the streams of other groups whose parts become empty, if turns matter."""
        self._given_at: list[tuple[int, int]] = []
        """What became empty after the last step other than by regular releases of these groups: the admission of the
        decode, and the bytes."""
        self._is_out_of_turn = False
        """Whether any of them is more than its decode takes at that turn."""
        self.num_silent = 0
        """The number of silent streams that continue."""
        self._lags = [FirstSeen(group.layer, page_size).lag + lag for group in groups]
        """How many tokens the next one is beyond the first of which no page is released before its step."""
        self._is_chunk = [group.layer.kind == "chunk" for group in groups]
        self._lengths = [group.layer.span or 1 for group in groups]
        self._sinks = [-(-group.layer.sink // page_size) for group in groups]
        self._odd: dict[int, list[tuple[int, int, RunTable]]] = {}
        self._odd_steps: list[int] = []
        """The keys of `_odd`, as a heap."""

    def start(self, table: RunTable, admission: int, *, is_settled: bool = True) -> None:
        """Let a sequence compute one token per step from now on, in the order of `admission`.

        Its pages are taken by `take_pages`, and parts that no later token attends to are released at the ends of steps,
        once the sequence is settled.
        """
        page_size, base = self.page_size, table.num_tokens - self.step
        table.is_decoding = True
        table.base = base
        table.admission = admission
        self.num_decoding += 1
        self.num_due[-base % page_size] = self.num_due[-base % page_size] + 1
        if table.content.num_known_pages > table.num_named:
            self.num_filling += 1
            insort(self.filling[(self._lag - 1 - base) % page_size], table, key=_admission)
            table.fills_known = True
        if self._events is not None:
            insort(self.emitting[(-1 - base) % page_size], table, key=_admission)
        if is_settled:
            self.begin(table)

    def leave(self, table: RunTable, *, keeps_parts: bool = False) -> list[tuple[RunTable, int]]:
        """Remove a block table that ended or is preempted, and bring its releases before this step up to date.

        Return the block tables with silent streams that ended for it, and their groups: `begin_group` follows for each,
        once it has released everything. `keeps_parts`: it stays, and releases nothing at the ends of steps.
        """
        page_size, base = self.page_size, table.base
        self.num_decoding -= 1
        self.num_due[-base % page_size] = self.num_due[-base % page_size] - 1
        filling = self.filling[(self._lag - 1 - base) % page_size]
        if self.num_filling and table in filling:
            self.num_filling -= 1
            filling.remove(table)
            table.fills_known = False
        if self._events is not None:
            self.emitting[(-1 - base) % page_size].remove(table)
        self.stop_all(table)
        ended: list[tuple[RunTable, int]] = []
        if self.num_silent or keeps_parts:
            for index in self.bounded:
                if self.num_silent:
                    self.catch_up_others(table, index)
                for run in tuple(table.held[index]):
                    if keeps_parts:
                        self.disturb(run, stops=True)
                        continue
                    for other in tuple(run.holders):
                        stream = other.streams[index]
                        if stream is not None and stream.is_silent:
                            self.stop(other, index)
                            ended.append((other, index))
        table.is_decoding = False
        table.num_tokens = base + self.step
        return ended

    # Streams ----------------------------------------------------------------------------------------------

    def begin(self, table: RunTable) -> None:
        """Start the releases of a settled block table with the next step."""
        for index in self.bounded:
            self.begin_group(table, index)

    def begin_group(self, table: RunTable, index: int) -> None:
        """Start the releases of a group with the next step, as a stream if they are regular."""
        step, base, length = self.step, table.base, self._lengths[index]
        page_size, sink = self.page_size, self._sinks[index]
        if self._is_chunk[index]:
            position = base + step - self._lag
            first = position // length * length
            is_late = self._lag and self._is_late(table, index, first // page_size)
            self._expect(table, index, step if is_late else first + length - 1 + self._lag - base)
            return
        lag = self._lags[index]
        page = (base + step - lag) // page_size if base + step > lag else 0
        if page < sink:
            page = sink
        if self._lag and self._is_late(table, index, page):
            self._expect(table, index, step)
            return
        first_step = self._last_step(table, index, page)
        if first_step - step >= page_size:
            self._expect(table, index, first_step)  # the window is not full yet
            return
        if sink and table.first_open[index] < sink:
            self._expect(table, index, first_step)
            return
        keeps, is_silent, end, is_whole = self._keeps[index], False, 0, True
        emits = self._events is not None
        if emits and not keeps:
            self._expect(table, index, first_step)
            return
        for run in table.held[index]:
            if run.end <= sink:
                continue
            is_later = False if len(run.holders) == 1 else self._is_passed_later(run, table)
            is_odd = is_later is None or (emits and (is_later or not run.is_kept))
            if run.start < sink or is_odd or (end and (run.is_kept != keeps or is_later != is_silent)):
                is_whole = False
                break
            keeps, is_silent, end = run.is_kept, is_later is True, run.end
            if run.span is not None:
                run.span.is_moving = True
        if not is_whole and end <= page + 1:
            self._expect(table, index, first_step)
            return
        slot = first_step % page_size
        stream = table.streams[index] = Stream(table, index, page, slot, keeps=keeps, is_silent=is_silent)
        stream.begun = step
        if is_silent:
            self.num_silent += 1
        else:
            self.given_bytes[slot] = self.given_bytes[slot] + self._account.part_bytes[index]
            if keeps:
                _insert(self.listing[slot], stream)
                self.num_listed[index][slot] = self.num_listed[index][slot] + 1
            else:
                self.num_emptied[index][slot] = self.num_emptied[index][slot] + 1
                self._emptied_bytes[slot] = self._emptied_bytes[slot] + self._account.part_bytes[index]
                if self._orders and not self._is_own_turn[index]:
                    self._emptying[slot].append(stream)
        if is_silent or not is_whole or (keeps and not self._keeps[index]):
            # Pages from there on are released in another way: generated parts are not kept, for example.
            self._expect(table, index, self._last_step(table, index, end - 1))

    def _is_late(self, table: RunTable, index: int, page: int) -> bool:
        """Return whether a group has parts before `page` after its sink: those of a chunk that was just computed."""
        sink = self._sinks[index]
        for run in table.held[index]:
            if run.end > sink:
                return max(run.start, sink) < page
        return max(table.first_open[index], sink) < page

    def _is_passed_later(self, run: PartRun, table: RunTable) -> bool | None:
        """Return whether another decode certainly passes the pages of `run` later than `table`; None if one may.

        If all others pass them earlier, they do not hold these pages when `table` passes them.
        """
        index, base, is_certain = run.group, table.base, True
        for other in run.holders:
            if other is table:
                continue
            odd_step = other.odd_steps[index]
            is_settled = other.streams[index] is not None or odd_step >= 0
            if self._lag and odd_step == self.step:
                is_settled = False  # its last chunk may have been computed in the step before
            if not (other.is_decoding and is_settled) or other.base == base:
                is_certain = False
            elif other.base < base:
                return True
        return False if is_certain else None

    def stop_all(self, table: RunTable) -> None:
        """End the releases of all groups."""
        for index in self.bounded:
            self.stop(table, index)

    def stop(self, table: RunTable, index: int) -> None:
        """End the stream of a group, or cancel its expected odd release."""
        table.odd_steps[index] = -1
        stream = table.streams[index]
        if stream is None:
            return
        self.catch_up(stream)
        if self._events is not None and table.given:
            self._account.name_emitted(table)
        table.streams[index] = None
        stream.table = ENDED
        if stream.is_silent:
            self.num_silent -= 1
            stream.last = stream.high
            return
        slot = stream.slot
        self.given_bytes[slot] = self.given_bytes[slot] - self._account.part_bytes[index]
        if stream.keeps:
            self.listing[slot].remove(stream)
            self.num_listed[index][slot] = self.num_listed[index][slot] - 1
        else:
            self.num_emptied[index][slot] = self.num_emptied[index][slot] - 1
            self._emptied_bytes[slot] = self._emptied_bytes[slot] - self._account.part_bytes[index]
            if self._orders and not self._is_own_turn[index]:
                self._emptying[slot].remove(stream)
        stream.last = stream.high
        stream.set_gate()

    def disturb(self, run: PartRun, *, stops: bool = False) -> None:
        """Make the releases of `run` odd for its holders, because another sequence begins to hold it.

        If a holder `stops` instead, which others may have relied on, silent ones are odd as well.
        """
        index = run.group
        for table in run.holders.copy():
            stream = table.streams[index]
            if stream is not None and (stops or not stream.is_silent):
                self.stop(table, index)
                self._expect(table, index, self._last_step(table, index, stream.last))

    def _last_step(self, table: RunTable, index: int, page: int) -> int:
        """Return the step with the last token that attends to `page`, in a group with windows."""
        return (page + 1) * self.page_size + self._lengths[index] - 2 + self._lag - table.base

    def _expect(self, table: RunTable, index: int, step: int) -> None:
        table.odd_steps[index] = step
        odd = self._odd.get(step)
        if odd is None:
            odd = self._odd[step] = []
            heappush(self._odd_steps, step)
        odd.append((table.admission, index, table))

    def steps_to_odd(self, most_steps: int) -> int:
        """Return the number of steps, at most `most_steps`, to the end of the first that may have an odd release."""
        odd_steps = self._odd_steps
        return min(most_steps, odd_steps[0] - self.step + 1) if odd_steps else most_steps

    @property
    def is_odd(self) -> bool:
        """Whether there may be an odd release at the end of this step."""
        return bool(self._odd_steps) and self._odd_steps[0] == self.step

    def steps_to_filling(self, most_steps: int) -> int:
        """Return how many of the next `most_steps` steps precede one in which a page is filled that others may find.

        -1 if there is no such step.
        """
        for offset in range(min(most_steps, self.page_size)):
            if self.filling[(self.step + offset) % self.page_size]:
                return offset
        return -1

    def odd_now(self) -> list[tuple[int, int, RunTable]]:
        """Return and remove the odd releases at the end of this step, by admission and group."""
        if not self._odd_steps or self._odd_steps[0] > self.step:
            return []
        odd = self._odd.pop(heappop(self._odd_steps))
        found: list[tuple[int, int, RunTable]] = []
        for admission, index, table in odd:
            if table.odd_steps[index] == self.step and table.is_decoding and table.admission == admission:
                self.stop(table, index)
                found.append((admission, index, table))
        if len(found) > 1:
            found.sort(key=_place)
        return found

    def fill_pages(self, first: int = -1, end: int = NEVER) -> None:
        """Make the pages findable that decodes fill in this step and that others may find.

        With events, emit those of all pages that decodes fill, of the admissions from `first` up to `end`. With a lag,
        publish those that decodes of these admissions have filled in the last step.
        """
        events, account, slot = self._events, self._account, self.step % self.page_size
        if events is None:
            if self._lag:
                for table in self.filling[slot]:
                    if first <= table.admission < end:
                        account.publish_to(table, (table.base + self.step) // self.page_size)
                return
            for table in self.filling[slot] if first < 0 else ():
                account.publish_to(table, (table.base + self.step + 1) // self.page_size)
            return
        for table in self.emitting[slot]:
            if first <= table.admission < end:
                num_full = (table.base + self.step + 1) // self.page_size
                if table.fills_known:
                    account.publish_to(table, num_full)
                else:
                    events.filled(table.content, self._found, num_full - 1)
                table.num_emitted = num_full

    def _list(self, streams: Sequence[Stream]) -> None:
        """List the page that the window of each of `streams` passes at the end of this step, and emit its release."""
        events = self._events
        if events is not None:
            num_done = self.step + 2
            for stream in streams:
                table, index = stream.table, stream.group
                page = (table.base + num_done - self._lengths[index]) // self.page_size - 1
                events.given_back(table.content, index, page, page + 1)
        self._turns().streams += streams

    def end_step(self) -> None:
        """Let decodes release the parts that none of their later tokens attends to, in the order of admission."""
        if not self.bounded:
            self.step += 1
            return
        slot = self.step % self.page_size
        odd = self.odd_now() if self._odd_steps and self._odd_steps[0] <= self.step else []
        listing = self.listing[slot]
        if self._orders:
            self._note_turns(slot)
        if not odd:
            if listing:
                self._list(listing)
        else:
            place = 0
            for admission, index, table in odd:
                start = place
                while place < len(listing) and (listing[place].admission, listing[place].group) < (admission, index):
                    place += 1
                if place > start:
                    self._list(listing[start:place])
                self._account.name_emitted(table)
                empty_bytes = self._account.empty_bytes
                self._account.free_skipped_in(table, index, table.base + self.step + 1 - self._lag)
                if self._orders and (given_bytes := self._account.empty_bytes - empty_bytes):
                    self._given_at.append((admission, given_bytes))
                    begins_page = (table.base + self.step + 1) % self.page_size == 0
                    if not begins_page or given_bytes > self._account.part_bytes[index]:
                        self._is_out_of_turn = True
            if place < len(listing):
                self._list(listing[place:])
        if self.given_bytes[slot]:
            for index in self.bounded:
                if count := self.num_listed[index][slot]:
                    self._account.note_cached(index, count)
                if count := self.num_emptied[index][slot]:
                    self._account.note_empty(index, count)
        self.step += 1
        for _, index, table in odd:
            self.begin_group(table, index)

    # Turns -------------------------------------------------------------------------------------------------

    def _note_turns(self, slot: int) -> None:
        """Begin the turns of the step that ends, after which streams of `slot` release."""
        part_bytes = self._account.part_bytes
        self._given_at = [(stream.admission, part_bytes[stream.group]) for stream in self._emptying[slot]]
        self._is_out_of_turn = bool(self._given_at)

    def note_turn(self, admission: int, num_bytes: int) -> None:
        """Record what became empty at the turn of a sequence that is about to start, after the step that ended."""
        if num_bytes and self._orders:
            self._given_at.append((admission, num_bytes))
            self._is_out_of_turn = True

    def needs_turns(self, num_due: int) -> bool:
        """Return whether turns matter to the next step, in which `num_due` decodes begin a page."""
        if not self._is_out_of_turn:
            return False
        empty_bytes = self._account.empty_bytes - sum([given_bytes for _, given_bytes in self._given_at])
        return num_due * self._account.page_bytes > empty_bytes

    def make_room_in_turns(self, tables: Sequence[RunTable]) -> None:
        """Let so much be empty that `tables` can take a page each, as if each took it at its turn."""
        num_bytes = self.bytes_in_turns(tables)
        if num_bytes > self._account.empty_bytes:
            self._account.evict(num_bytes)

    def bytes_in_turns(self, tables: Sequence[RunTable]) -> int:
        """Return how many bytes must be empty now, if `tables` take a page each in the next step, at their turns.

        They are all that do, in the order of admission. A decode can use what became empty at its own turn, and at
        earlier ones. Regular releases of groups in `_is_own_turn` are at the turns of `tables`, each of which takes
        more.
        """
        turns, account = sorted(self._given_at), self._account
        slot, page_bytes = (self.step - 1) % self.page_size, account.page_bytes
        released_bytes = 0
        owns: list[int] = []
        for table in tables:
            own_bytes = 0
            for index in self.bounded:
                stream = table.streams[index]
                if stream is None or stream.keeps or stream.is_silent or stream.slot != slot:
                    continue
                if self._is_own_turn[index] and stream.begun < self.step:
                    own_bytes += account.part_bytes[index]
            owns.append(own_bytes)
            released_bytes += own_bytes
        released_bytes += sum([given_bytes for _, given_bytes in turns])
        # All that is taken up to a turn, and released after it, must be empty now.
        most_bytes = len(tables) * page_bytes
        place = taken_bytes = 0
        for admission, given_bytes in turns:
            while place < len(tables) and tables[place].admission < admission:
                taken_bytes += page_bytes
                released_bytes -= owns[place]
                place += 1
            most_bytes = max(most_bytes, taken_bytes + released_bytes)
            released_bytes -= given_bytes
        return most_bytes

    def _has_own_turns(self) -> bool:
        """Return whether all odd releases of this step are at turns at which their decodes take more in the next."""
        for admission, index, table in self._odd[self.step]:
            if table.odd_steps[index] != self.step or not table.is_decoding or table.admission != admission:
                continue
            if (table.base + self.step + 1) % self.page_size:
                return False
            stream, held = table.streams[index], table.held[index]
            if stream is not None:
                self.catch_up(stream)
            first = held[0].start if held else table.first_open[index]
            position, lag = table.base + self.step + 1 - self._lag, self._lags[index] - self._lag
            if self._is_chunk[index] or (position - lag) // self.page_size - max(first, self._sinks[index]) > 1:
                return False
        return True

    def defer_skipped(self, tables: Sequence[RunTable]) -> None:
        """End the step; `tables`, all decodes that would release something, do so when they are settled."""
        for table in tables:
            self.stop_all(table)
        self.odd_now()  # drops the expected odd releases of `tables`
        self.step += 1

    def pass_steps(self, num_steps: int) -> None:
        """List the releases of decodes in steps without odd releases; the caller counts them."""
        if num_steps:
            given: list[Stream] = []
            for listing in _turned(self.listing, self.step % self.page_size, num_steps):
                given += listing
            if given:
                self._turns().streams += given
            self.step += num_steps

    def _turns(self) -> Turns:
        """Return the youngest entry of the list; turns can be added to it."""
        turns = self._last_turns
        account = self._account
        if turns is not account.lru.older or account.shared is not None:
            turns = self._last_turns = Turns()
            account.append(turns)
        return turns

    # Leaps ---------------------------------------------------------------------------------------------------

    def leap(self, most_steps: int, wanted_bytes: int, first_step: int = 0, starts_ns: Sequence[int] = ()) -> RunLeap:
        """Do up to `most_steps` steps; the first fits. The last is under way, and `end_step` must follow.

        It is one after which decodes lack memory before they release any; or, if a request waits for `wanted_bytes`,
        one after which these may be free when decodes have taken their pages, or a page becomes findable that the
        request may find. `first_step`, `starts_ns`: the numbers and times of the steps in events, as of Cache.leap.
        """
        account = self._account
        assert account.shared is None, "what other models do between steps is not known"
        self._num_emitted, self._first_step, self._starts_ns = 0, first_step, starts_ns
        done = self._do(self.steps_to_odd(most_steps), wanted_bytes)
        while len(done.taken) < most_steps and self.is_odd:
            if account.wants is not None and account.wants.has_work:
                break
            slot = (self.step + 1) % self.page_size
            kept_bytes = account.promised_bytes + self.num_due[slot] * account.page_bytes
            if kept_bytes > account.free_bytes:
                break
            is_full = self._orders and self.num_due[slot] * account.page_bytes > account.empty_bytes
            if is_full and (self._emptying[self.step % self.page_size] or not self._has_own_turns()):
                break
            # A waiting request may be given up before the releases that are enough for it, so these end the leap.
            most_bytes = account.free_bytes - kept_bytes + self._most_released()
            if wanted_bytes and (wanted_bytes <= most_bytes or self.filling[slot]):
                break
            self._end_odd(done)
            done.add(self._do(self.steps_to_odd(most_steps - len(done.taken)), wanted_bytes))
        return done

    def _most_released(self) -> int:
        """Return an upper bound of the bytes that are released at the end of this step, which is odd."""
        num_bytes = self.given_bytes[self.step % self.page_size]
        for _, index, table in self._odd[self.step]:
            stream = table.streams[index]
            if stream is not None:
                self.catch_up(stream)
            held = table.held[index]
            first = held[0].start if held else table.first_open[index]
            num_pages = (table.base + self.step) // self.page_size + 1 - first
            num_bytes += max(0, num_pages) * self._account.part_bytes[index]
        return num_bytes

    def _end_odd(self, done: RunLeap) -> None:
        """End the last step of `done`, which is odd."""
        account = self._account
        before = [(account.num_used[index], account.num_cached[index]) for index in self.bounded]
        if self._events is not None:
            self._events.emit(StepEnded(self._first_step + self._num_emitted - 1, self._starts_ns[self._num_emitted]))
        self.end_step()
        for place, index in enumerate(self.bounded):
            num_used, num_cached = before[place]
            num_listed = account.num_cached[index] - num_cached
            done.listed[place][-1] = num_listed
            if done.emptied:
                done.emptied[place][-1] = num_used - account.num_used[index] - num_listed

    def _do(self, most_steps: int, wanted_bytes: int) -> RunLeap:
        """Do the same in steps before an odd one, or up to it; its odd releases are left to the caller."""
        account, page_size = self._account, self.page_size
        slot = self.step % page_size
        num_steps = self._num_certain(slot, most_steps, wanted_bytes)
        taken = _turned(self.num_due, slot, num_steps)
        bounded = self.bounded
        listed, num_listed = _of_groups(self.num_listed, bounded, slot, num_steps)
        emptied, num_emptied = _of_groups(self.num_emptied, () if self.keeps_all else bounded, slot, num_steps)
        num_ended = num_steps - 1
        if self._events is not None:
            return RunLeap(taken, listed, emptied, self._pass_telling(taken, self._events))
        if self.num_filling:
            self._pass_and_fill(num_steps)
        else:
            self.pass_steps(num_ended)
        missing_bytes = self._missing_bytes(taken, slot, any(num_emptied))
        for place, index in enumerate(bounded):
            if num_listed[place] and (count := num_listed[place] - listed[place][num_ended]):
                account.note_cached(index, count)
        evicted: list[int] = []
        if missing_bytes > 0:
            account.evict_to(account.empty_bytes + missing_bytes, evicted)
        account.note_pages_taken(sum(taken))
        for place, of_group in enumerate(emptied):
            if num_emptied[place] and (count := num_emptied[place] - of_group[num_ended]):
                account.note_empty(bounded[place], count)
        return RunLeap(taken, listed, emptied, evicted)

    def _pass_and_fill(self, num_steps: int) -> None:
        """Let all but the last of `num_steps` steps pass, and publish the pages that decodes fill in each."""
        while num_steps:
            num_before = self.steps_to_filling(num_steps)
            if num_before < 0:
                break
            self.pass_steps(num_before)
            self.fill_pages()
            num_steps -= num_before
            if num_steps == 1:
                return
            self.pass_steps(1)
            num_steps -= 1
        self.pass_steps(num_steps - 1)

    def _pass_telling(self, taken: Sequence[int], events: RunEvents) -> list[int]:
        """Let all but the last of steps pass that take so many pages each; return the evictions, as RunLeap has them.

        Events are emitted in the order of steps. Steps without events may be omitted, except the last.
        """
        account, page_size, bounded, page_bytes = self._account, self.page_size, self.bounded, self._account.page_bytes
        emit, listing, emitting, offset = events.emit, self.listing, self.emitting, self._num_emitted
        first_step, starts_ns = self._first_step, self._starts_ns
        last = offset + len(taken) - 1
        evicted: list[int] = []
        account.begin_evictions(evicted)
        for num_due in taken:
            slot = self.step % page_size
            if num_due or offset == last or emitting[slot]:
                emit(StepStarted(first_step + offset, starts_ns[offset]))
                if num_due * page_bytes <= account.empty_bytes:
                    account.note_pages_taken(num_due)
                else:
                    for _ in range(num_due):
                        if page_bytes > account.empty_bytes:
                            account.evict(page_bytes)
                        account.note_pages_taken(1)
                if emitting[slot]:
                    self.fill_pages()
            if offset == last:
                break
            passed = listing[slot]
            if passed:
                emit(StepEnded(first_step + offset, starts_ns[offset + 1]))
                self._list(passed)
                for index in bounded:
                    if count := self.num_listed[index][slot]:
                        account.note_cached(index, count)
            self.step += 1
            offset += 1
        account.end_evictions()
        self._num_emitted = last + 1
        return evicted

    def _num_certain(self, slot: int, num_steps: int, wanted_bytes: int) -> int:
        """Return after how many of the next `num_steps` steps the leap ends."""
        account, page_size, page_bytes = self._account, self.page_size, self._account.page_bytes
        if self.num_filling and (wanted_bytes or account.wants is not None):
            num_filled = self.steps_to_filling(num_steps)
            if num_filled >= 0:
                # The waiting request may find a filled page; and the page is stored below in the step after that.
                num_steps = num_filled if wanted_bytes else num_filled + 1
        num_due, given_bytes = self.num_due, self.given_bytes
        left_bytes = account.free_bytes - account.promised_bytes - num_due[slot] * page_bytes
        most_bytes = (num_steps // page_size + 1) * self.num_decoding * page_bytes
        if not wanted_bytes and most_bytes <= (account.empty_bytes if self._orders else left_bytes):
            return num_steps
        if self._orders and any(self._emptying):
            num_steps = self._num_in_order(slot, num_steps)
        for step in range(1, num_steps):
            back_bytes = given_bytes[slot]
            slot += 1
            if slot == page_size:
                slot = 0
            left_bytes -= num_due[slot] * page_bytes
            if left_bytes < 0:
                return step
            left_bytes += back_bytes
            if wanted_bytes and wanted_bytes <= left_bytes:
                return step
        return num_steps

    def _num_in_order(self, slot: int, num_steps: int) -> int:
        """Return how many of `num_steps` steps pass before one that takes parts which are not empty before releases."""
        page_bytes = self._account.page_bytes
        empty_bytes = self._account.empty_bytes - self.num_due[slot] * page_bytes
        for step in range(1, num_steps):
            emptied_bytes, emptying = self._emptied_bytes[slot], self._emptying[slot]
            slot = slot + 1 if slot + 1 < self.page_size else 0
            taken_bytes = self.num_due[slot] * page_bytes
            if emptying and taken_bytes > max(0, empty_bytes):
                return step
            empty_bytes = max(0, empty_bytes) + emptied_bytes - taken_bytes
        return num_steps

    def _missing_bytes(self, taken: list[int], slot: int, has_emptied: bool) -> int:
        """Return the bytes to evict: the most by which bytes taken up to a step exceed those empty before.

        `slot`: of the first step. `has_emptied`: whether parts become empty after any of the steps.
        """
        account, page_bytes = self._account, self._account.page_bytes
        missing_bytes = sum(taken) * page_bytes - account.empty_bytes
        if missing_bytes <= 0 or not has_emptied:
            return missing_bytes
        emptied_bytes, page_size = self._emptied_bytes, self.page_size
        most = missing_bytes = -account.empty_bytes
        for num_pages in taken:
            if num_pages:
                missing_bytes += num_pages * page_bytes
                if missing_bytes > most:
                    most = missing_bytes
            missing_bytes -= emptied_bytes[slot]
            slot = slot + 1 if slot + 1 < page_size else 0
        return most

    # Catching up --------------------------------------------------------------------------------------------

    def catch_up(self, stream: Stream) -> None:
        """Bring the runs of `stream`, and of its block table, up to date with the last step."""
        if stream.seen == self.step:
            return
        stream.seen = self.step
        table, index = stream.table, stream.group
        position, lag = table.base + self.step, self._lags[index]
        page = (position - lag) // self.page_size if position > lag else 0
        at = stream.high
        if page <= at:
            return
        held, sink = table.held[index], self._sinks[index]
        place = 0
        while sink and place < len(held) and held[place].end <= sink:
            place += 1
        if stream.is_silent:
            stream.high = page
            while place < len(held) and held[place].start < page:
                passed = held[place]
                if passed.end > page:
                    passed = passed.split(page)
                del held[place]
                passed.holders.remove(table)
                passed.is_passed = True
            return
        while at < page and place < len(held):
            run = held[place]
            end = run.end
            if end <= page:
                del held[place]
                holders = run.holders
                if len(holders) > 1:  # silent streams, which have passed it as well
                    for other in holders:
                        if other is not table:
                            other.held[index].remove(run)
                holders.clear()
            else:
                end = page
                run.start = page
            self._give(stream, run, at, end)
            at = end
        if at < page:
            table.first_open[index] = page
            self._give(stream, None, at, page)
        stream.high = page
        stream.set_gate()

    def end_holds(self, run: PartRun, table: RunTable, page: int) -> None:
        """Let silent streams give up pages of `run` before `page`, which `table` is about to release.

        The run is split at `page` if it reaches beyond. Streams that have not passed all these pages hold them on.
        """
        index = run.group
        first_base = page * self.page_size + self._lags[index] - self.step
        for other in run.holders.copy():
            if other.base < first_base or other is table:
                continue
            stream = other.streams[index]
            if stream is None or not stream.is_silent:
                continue
            if run.end > page:
                run = run.split(page)
            other.held[index].remove(run)
            run.holders.remove(other)
            run.is_passed = True

    def catch_up_others(self, table: RunTable, index: int) -> None:
        """Bring silent streams up to date that hold pages with `table`."""
        for run in tuple(table.held[index]):
            if len(run.holders) > 1:
                for other in run.holders.copy():
                    stream = other.streams[index]
                    if stream is not None and stream.is_silent and other is not table:
                        self.catch_up(stream)

    def _give(self, stream: Stream, run: PartRun | None, start: int, end: int) -> None:
        """Move pages [start, end) of `run` to `stream`; if they reach its end, nothing holds the run any more.

        `run`: None for pages that cannot be found.
        """
        runs, low = stream.runs, stream.low
        span = None if run is None else run.span
        is_left = run is not None and end < run.end
        if not stream.keeps or end <= low:
            if run is not None and not is_left:
                run.forget()
            return
        last = runs[-1] if runs else None
        if last is not None and last.span is span and last.end == start and (run is None or last.precedes(run)):
            last.end = end
            if run is not None and not is_left:
                run.forget()
            return
        if start < low:
            start = low
        if span is not None:
            span.is_moving = True
        if run is not None and not is_left:
            run.start = start
            stream.add(run)
            return
        piece = PartRun(stream.group, span, start, end, [], is_kept=True)
        if run is None:
            stream.table.given.append(piece)
        elif span is not None:
            siblings = span.parts[stream.group]
            siblings.insert(siblings.index(run), piece)
        stream.add(piece)

    def look(self, span: Span) -> None:
        """Bring the runs of `span` up to date with the last step; only silent streams may hold what they passed.

        Another decode holds that as well.
        """
        is_moving = False
        late: list[Stream] = []
        for index in self.bounded:
            for run in span.parts[index]:
                for table in run.holders:
                    stream = table.streams[index]
                    if stream is not None:
                        is_moving = True
                        if stream.seen != self.step and not stream.is_silent:
                            late.append(stream)
        for stream in late:
            self.catch_up(stream)
        for index in self.bounded:
            for run in tuple(span.parts[index]):
                of_run = run.stream
                if of_run is not None:
                    if of_run.trim(run):
                        is_moving = True
                    else:
                        of_run.drop(run)
        span.is_moving = is_moving


def _turned(by_slot: list[T], slot: int, num_steps: int) -> list[T]:
    """Return the entries of `by_slot` for `num_steps` steps, starting with slot `slot`."""
    size = len(by_slot)
    last = slot + num_steps
    if last <= size:
        return by_slot[slot:last]
    turns = by_slot[slot:] + by_slot * ((last - size) // size)
    return turns + by_slot[: num_steps - len(turns)]


def _of_groups(
    by_group: list[list[int]], groups: Sequence[int], slot: int, num_steps: int
) -> tuple[list[list[int]], list[int]]:
    """Return the entries of `by_group` for `num_steps` steps, as `_turned` does for each of `groups`, and their sums.

    Of groups that have as many tokens in their windows, usually all entries are equal.
    """
    every: list[list[int]] = []
    sums: list[int] = []
    before: list[int] | None = None
    for index in groups:
        by_slot = by_group[index]
        if before is not None and by_slot == before:
            every.append(every[-1].copy())
            sums.append(sums[-1])
        else:
            before = by_slot
            entries = _turned(by_slot, slot, num_steps)
            every.append(entries)
            sums.append(sum(entries))
    return every, sums


def _admission(table: RunTable) -> int:
    return table.admission


def _insert(streams: list[Stream], stream: Stream) -> None:
    """Insert `stream` into `streams`, in the order of admission, then group; usually it is one of the last."""
    admission, group = stream.admission, stream.group
    place = len(streams)
    while place:
        before = streams[place - 1]
        if before.admission < admission or (before.admission == admission and before.group < group):
            break
        place -= 1
    if place == len(streams):
        streams.append(stream)
    else:
        streams.insert(place, stream)


def _place(odd: tuple[int, int, RunTable]) -> tuple[int, int]:
    return odd[0], odd[1]
