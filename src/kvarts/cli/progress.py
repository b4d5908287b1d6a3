"""Progress on standard error: nothing is silent for longer than two seconds."""

from __future__ import annotations

import sys
from time import monotonic
from types import TracebackType
from typing import Any

import click

__all__ = ["Progress"]

SILENT_S = 2.0
EVERY_S = 10.0


class Progress:
    """A bar where standard error is a terminal, else a line after two seconds, and one every ten seconds then.

    `update(n)`: `n` units are done. `total`: of them; None where that is not known. `large`: how many units of `total`
    are enough for a line at once.
    """

    def __init__(self, what: str, total: int | None, unit: str, *, large: int | None = None) -> None:
        self._what = what
        self._total = total
        self._unit = unit
        self._num_done = 0
        self._bar: Any = None
        self._tell_at = monotonic() + SILENT_S
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(
                total=total, desc=what, delay=1.0, unit=f" {unit}", unit_scale=True, miniters=1, file=sys.stderr,
                leave=False,
            )  # fmt: skip
        elif large is not None and total is not None and total >= large:
            click.echo(f"kvarts: {what}, {total:,} {unit}", err=True)

    def update(self, num_done: int = 1) -> None:
        """Note that more is done."""
        if self._bar is not None:
            self._bar.update(num_done)
            return
        self._num_done += num_done
        now = monotonic()
        if now >= self._tell_at:
            self._tell_at = now + EVERY_S
            of_all = "" if self._total is None else f" of {self._total:,}"
            click.echo(f"kvarts: {self._what}: {self._num_done:,}{of_all} {self._unit}", err=True)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
