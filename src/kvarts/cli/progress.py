"""Progress on standard error: no command is silent for longer than two seconds."""

from __future__ import annotations

import sys
from contextlib import suppress
from threading import Event, Thread
from time import monotonic
from types import TracebackType

import click

__all__ = ["Progress"]

SILENT_S = 2.0
EVERY_S = 10.0
BAR_AFTER_S, BAR_EVERY_S = 1.0, 0.2


class Progress:
    """A bar if standard error is a terminal, else a line after two seconds and then every ten seconds.

    `what`: the work, such as "reading trace.jsonl". `update(n)`: `n` more units are done. `total`: number of units;
    None if not known. Without a `unit`, lines have the seconds so far. `large`: the `total` from which a line is
    written at once. A thread writes, so that progress does not depend on the time of a unit.
    """

    def __init__(self, what: str, total: int | None = None, unit: str = "", *, large: int | None = None) -> None:
        self._what = what
        self._total = total
        self._unit = unit
        self._num_done = 0
        self._begun_s = monotonic()
        self._ended = Event()
        is_terminal = sys.stderr.isatty()
        if not is_terminal and large is not None and total is not None and total >= large:
            click.echo(f"kvarts: {what}, {total:,} {unit}", err=True)
        self._thread = Thread(target=self._draw if is_terminal else self._tell, daemon=True)
        self._thread.start()

    def update(self, num_done: int = 1) -> None:
        """Count more units as done."""
        self._num_done += num_done

    def reach(self, num_done: int, total: int) -> None:
        """Set the number of units that are done, and their total."""
        self._num_done, self._total = num_done, total

    def close(self) -> None:
        """Stop, and remove the bar."""
        self._ended.set()
        self._thread.join()

    def _tell(self) -> None:
        wait_s = SILENT_S
        while not self._ended.wait(wait_s):
            wait_s = EVERY_S
            of_all = "" if self._total is None else f" of {self._total:,}"
            done = f"{self._num_done:,}{of_all} {self._unit}" if self._unit else f"{monotonic() - self._begun_s:.0f} s"
            with suppress(OSError, ValueError):  # narration that cannot be written is dropped
                click.echo(f"kvarts: {self._what}: {done}", err=True)

    def _draw(self) -> None:
        if self._ended.wait(BAR_AFTER_S):
            return
        from tqdm import tqdm

        # Without a unit, the bar is the description and the elapsed time.
        form = None if self._unit else "{desc}: {elapsed}"
        with tqdm(total=self._total, desc=self._what, unit=f" {self._unit}", unit_scale=True, file=sys.stderr,
                  leave=False, miniters=0, bar_format=form) as bar:  # fmt: skip
            is_over = False
            while not is_over:
                bar.total = self._total
                bar.update(self._num_done - bar.n)
                bar.refresh()
                is_over = self._ended.wait(BAR_EVERY_S)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
