"""`python -m kvarts` and the script `kvarts`: runs one command and ends the process with its exit code."""

from __future__ import annotations

import gc
import os
import signal

__all__ = ["run"]


def run() -> None:
    """Run the command of `sys.argv`, and end the process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) not in (signal.SIG_IGN, None):
            signal.signal(number, _end_at_once)
    # OpenBLAS, NumPy's linear algebra, would start a thread per core on import, and all of them would stay idle.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # A command creates many objects that live until it ends, mostly during imports, and few reference cycles.
    gc.disable()
    # The slow imports are here: before any output exists, an interrupted process has nothing to clean up.
    from kvarts.cli.main import run_main

    run_main()


def _end_at_once(number: int, _: object) -> None:
    try:
        os.write(2, b"kvarts: interrupted\n" if number == signal.SIGINT else b"kvarts: terminated\n")
    finally:
        os._exit(128 + number)


if __name__ == "__main__":
    run()
