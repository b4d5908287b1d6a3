"""Whole processes, timed from start to end, with their peak memory."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Cost", "environment", "kvarts_command", "median_of", "run", "tree_mebibytes"]


@dataclass
class Cost:
    """What one process took."""

    seconds: float
    mebibytes: float
    cpu_seconds: float


def run(command: list[str]) -> Cost:
    """Runs `command` without its output, and asks the system what it took. Exits if it fails."""
    start = time.perf_counter()
    pid = os.posix_spawn(
        command[0],
        command,
        environment(),
        file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)],
    )
    _, status, usage = os.wait4(pid, 0)
    seconds = time.perf_counter() - start
    if status:
        sys.exit(f"{' '.join(command)} failed")
    return Cost(seconds, usage.ru_maxrss / 1024, usage.ru_utime + usage.ru_stime)


def tree_mebibytes(pid: int) -> float:
    """Return the memory of all processes below `pid` at this moment; 0 where there is no /proc."""
    total = 0.0
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, listed.read_text().split()):
                total += tree_mebibytes(child)
                pages = int(Path(f"/proc/{child}/statm").read_text().split()[1])
                total += pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)
    return total


def environment() -> dict[str, str]:
    """That of this process, but Python keeps the bytecode of a checkout, as pip does when it installs a package."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def median_of(costs: Sequence[Cost]) -> Cost:
    """Median times, and the largest memory."""
    return Cost(
        statistics.median(cost.seconds for cost in costs),
        max(cost.mebibytes for cost in costs),
        statistics.median(cost.cpu_seconds for cost in costs),
    )


def kvarts_command(*arguments: object) -> list[str]:
    """The installed script beside this Python."""
    return [str(Path(sys.executable).with_name("kvarts")), *map(str, arguments)]
