"""The bytes of pages: as arrays, copied between arrays and files for an executor, and recorded slot by slot.

Transfers are queued with a step and carried out when the caller has time: in a thread, between steps, or all at once.
Each transfer names its source and target; nothing is decided here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Protocol, cast

import msgspec
import numpy as np
import numpy.typing as npt

from kvarts.base.clock import Clock
from kvarts.core.kv.transfer import Direction, Move, Transfer, TransferReport

if TYPE_CHECKING:
    from kvarts.run.flat_batch import StateBatch

__all__ = ["NoPageBytes", "PageBytes", "PageCopier", "PageSlots", "PageStore"]

Array = npt.NDArray[Any]


class PageStore(Protocol):
    """Pages by their keys, in storage that outlives the process."""

    def write(self, key: bytes, payload: bytes) -> bool:
        """Store a page, whole or not at all. Return False if it was not stored."""

    def read(self, key: bytes) -> bytes | None:
        """Return the bytes of a page; None if it is missing or corrupt."""

    def delete(self, key: bytes) -> None:
        """Remove a page if it is stored."""


class PageCopier:
    """Copies pages of `device` arrays, each of shape [num_pages, ...], to `num_host_pages` pages of memory and back.

    `files`: the pages of the tier below host memory. `clock`: measures the duration of each transfer in its report.
    """

    def __init__(
        self,
        device: Sequence[Array],
        *,
        num_host_pages: int,
        files: PageStore | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._clock = clock
        self._device = list(device)
        self._host = [np.empty((num_host_pages, *array.shape[1:]), array.dtype) for array in device]
        self._files = files
        self._queue: deque[Transfer] = deque()

    def begin(self, transfers: Sequence[Transfer]) -> None:
        """Queue the transfers that a step begins."""
        self._queue.extend(transfers)

    def run(self, limit: int | None = None) -> list[TransferReport]:
        """Carry out at most `limit` queued transfers in order, all by default. Return one report per transfer."""
        reports: list[TransferReport] = []
        while self._queue and (limit is None or len(reports) < limit):
            start_ns = 0 if self._clock is None else self._clock.now_ns()
            report = self._carry_out(self._queue.popleft())
            if self._clock is not None:
                report = msgspec.structs.replace(report, duration_ns=self._clock.now_ns() - start_ns)
            reports.append(report)
        return reports

    def _carry_out(self, transfer: Transfer) -> TransferReport:
        if self._files is not None:
            for key in transfer.dropped_keys:
                self._files.delete(key)
        num_good = 0
        for move in transfer.moves:
            num_moved = self._move(transfer.direction, move)
            num_good += num_moved
            if num_moved < len(move.source_ids):
                return TransferReport(transfer.transfer_id, num_good_pages=num_good)
        return TransferReport(transfer.transfer_id)

    def _move(self, direction: Direction, move: Move) -> int:
        """Return the number of pages copied; copying stops at the first page that fails."""
        if direction is Direction.SPILL:
            return self._write_files(move)
        if direction is Direction.LOAD and move.source_ids and isinstance(move.source_ids[0], bytes):
            return self._read_files(move)
        sources, targets = (self._device, self._host)
        if direction is Direction.LOAD:
            sources, targets = targets, sources
        source_ids, target_ids = _ids(move.source_ids), _ids(move.target_ids)
        for source, target in zip(sources, targets, strict=True):
            target[target_ids] = source[source_ids]
        return len(move.source_ids)

    def _write_files(self, move: Move) -> int:
        """Write a file for each run of places with the same key."""
        assert self._files is not None
        count = 0
        for key, slots in _by_key(move.target_ids, move.source_ids):
            payload = b"".join(array[slot].tobytes() for slot in slots for array in self._host)
            if not self._files.write(key, payload):
                break
            count += len(slots)
        return count

    def _read_files(self, move: Move) -> int:
        assert self._files is not None
        count = 0
        for key, pages in _by_key(move.source_ids, move.target_ids):
            payload = self._files.read(key)
            if payload is None or len(payload) != sum(array[page].nbytes for page in pages for array in self._device):
                break
            offset = 0
            for page in pages:
                for array in self._device:
                    size = array[page].nbytes
                    array[page] = np.frombuffer(payload, array.dtype, size // array.itemsize, offset).reshape(
                        array.shape[1:]
                    )
                    offset += size
            count += len(pages)
        return count


def _by_key(keys: Sequence[object], pages: Sequence[object]) -> list[tuple[bytes, list[int]]]:
    """Return each key with its pages, which follow each other."""
    pairs = zip(cast(Sequence[bytes], keys), cast(Sequence[int], pages), strict=True)
    return [(key, [page for _, page in of_key]) for key, of_key in groupby(pairs, itemgetter(0))]


def _ids(ids: Sequence[object]) -> npt.NDArray[np.int64]:
    return np.array(ids, np.int64)


class PageBytes(Protocol):
    """The KV of pages, between steps. Both methods copy."""

    def read_pages(self, page_ids: Sequence[int]) -> Mapping[str, npt.NDArray[Any]]:
        """Return everything that the pages hold, as arrays by name; the first axis of each array is the pages."""

    def write_pages(self, page_ids: Sequence[int], arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Write arrays that `read_pages` returned for the same number of pages."""


class NoPageBytes:
    """The PageBytes of an executor that computes no keys and values."""

    def read_pages(self, page_ids: Sequence[int]) -> Mapping[str, npt.NDArray[Any]]:
        """Return nothing."""
        return {}

    def write_pages(self, page_ids: Sequence[int], arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Do nothing."""


FIRST_ROWS = 1 << 16
"""Pages that have a row of their own before a larger array is made. Zeros take no memory before they are written."""


class PageSlots:
    """Owner of the position of the token that each slot holds; -1 for a slot that was never written.

    A block of a state has one position for all its slots. Plans name the first block of a state that is kept by page,
    and only that one has positions: the others are taken and released with it. Pages have a row from their first token
    on, as there can be far more of them than a mock ever fills.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        # All positions are kept plus one; row 0 is that of pages without tokens.
        self._after = np.zeros((min(num_pages + 1, FIRST_ROWS), page_size), np.int64)
        self._num_rows = 1
        self._row_of = np.zeros(num_pages, np.int64)
        self._after_state = np.zeros(num_pages, np.int64)
        self._has_states = False
        self._page_size = page_size

    def _rows(self, pages: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the rows of pages, which may be new."""
        rows = self._row_of[pages]
        if not rows.all():
            new = np.unique(pages[rows == 0])
            self._row_of[new] = np.arange(self._num_rows, self._num_rows + len(new))
            self._num_rows += len(new)
            if self._num_rows > len(self._after):
                grown = np.zeros((max(self._num_rows, 2 * len(self._after)), self._page_size), np.int64)
                grown[: len(self._after)] = self._after
                self._after = grown
            rows = self._row_of[pages]
        return rows

    def write(self, slots: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> None:
        """Record that tokens at `positions` were written to `slots`, of the same shape."""
        pages, places = np.divmod(slots, self._page_size)
        rows = self._rows(pages)  # may replace the array
        self._after[rows, places] = positions + 1
        if self._has_states:
            self._after_state[pages] = 0

    def write_states(self, batch: StateBatch, positions: npt.NDArray[np.int64]) -> None:
        """Record the last token of each state that a step wrote, for all slots of its blocks.

        `positions` [tokens]: those of the tokens of the step.
        """
        self._has_states = True
        num_decodes = len(batch.blocks)
        if num_decodes:
            self._after_state[batch.blocks] = positions[:num_decodes, None] + 1
        for chunk in batch.chunks:
            _, blocks = chunk.leaves[-1]
            self._after_state[blocks] = positions[chunk.last - 1] + 1

    def copy_page(self, source: int, target: int) -> None:
        """Record that a page was copied."""
        if self._has_states and (self._after_state[source] or self._after_state[target]):
            self._after_state[target] = self._after_state[source]
            if self._after_state[source]:
                return
        if self._row_of[source] or self._row_of[target]:
            rows = self._rows(np.array([target, source], np.int64))
            self._after[rows[0]] = self._after[rows[1]]

    def restore(self, page_ids: Sequence[int], positions: npt.NDArray[np.int64]) -> None:
        """Record that pages were written whole. `positions` [pages, page_size]."""
        ids = np.array(page_ids, np.int64)
        is_state = (positions == positions[:, :1]).all(axis=1) & (positions[:, 0] >= 0)
        self._has_states |= bool(is_state.any())
        self._after_state[ids] = np.where(is_state, positions[:, 0] + 1, 0)
        rows = self._rows(ids[~is_state])
        self._after[rows] = positions[~is_state] + 1

    def positions(self, page_ids: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return the positions of the tokens in pages, of shape [pages, page_size]."""
        ids = np.array(page_ids, np.int64)
        after_state = self._after_state[ids]
        found: npt.NDArray[np.int64] = np.where(
            after_state[:, None] > 0, after_state[:, None], self._after[self._row_of[ids]]
        )
        return found - 1

    def are_state_after(self, page_ids: Sequence[int], position: int) -> bool:
        """Return whether blocks are those of the state after the token at `position`."""
        return bool((self._after_state[np.array(page_ids, np.int64)] == position + 1).all())
