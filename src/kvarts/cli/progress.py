"""Progress on standard error, for what takes longer than a second."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

import click

__all__ = ["Progress"]


class Progress:
    """A bar where standard error is a terminal, else a line for work that is large. `update(n)`: `n` units are done.

    `large`: how many units of `total` are enough for that line.
    """

    def __init__(self, what: str, total: int, unit: str, *, large: int) -> None:
        self._bar: Any = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(
                total=total, desc=what, delay=1.0, unit=unit, unit_scale=True, miniters=1, file=sys.stderr, leave=False
            )
        elif total >= large:
            click.echo(f"kvarts: {what}, {total:,} {unit}", err=True)

    def update(self, num_done: int) -> None:
        """Note that more is done."""
        if self._bar is not None:
            self._bar.update(num_done)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()
