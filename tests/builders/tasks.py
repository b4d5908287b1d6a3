"""Tasks for other processes, which import this file: it imports little, since pytest and NumPy take half a second."""

from __future__ import annotations

import os

from kvarts.base.errors import InputError, KvartsError

__all__ = ["ends", "fails_at", "of_evens", "of_table", "process_of", "with_shared"]


def with_shared(shared: str, task: int) -> tuple[str, int]:
    return shared, task


def fails_at(_: str, task: tuple[int, KvartsError | None]) -> int:
    number, error = task
    if error is not None:
        raise error
    return number


def of_table(_: str, task: tuple[tuple[bool, ...], int]) -> bool:
    table, place = task
    return table[place]


def of_evens(_: str, place: int) -> bool:
    if place % 2:
        raise InputError(f"{place} is odd")
    return True


def ends(_: str, task: int) -> int:
    if task:
        os._exit(9)
    return task


def process_of(_: str, task: int) -> int:
    return os.getpid()
