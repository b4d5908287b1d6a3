"""`python -m kvarts`, and the script `kvarts`: a process with one command, from its first moment to its exit code."""

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
    # NumPy's library of linear algebra starts a thread for each core when it is loaded, and none has anything to do.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # A command makes many objects that live to its end, imports most of all, and no cycles worth looking for.
    gc.disable()
    # All that takes time comes now: nothing is written yet that would have to be removed.
    from kvarts.cli.main import run_main

    run_main()


def _end_at_once(number: int, _: object) -> None:
    try:
        os.write(2, b"kvarts: interrupted\n" if number == signal.SIGINT else b"kvarts: terminated\n")
    finally:
        os._exit(128 + number)


if __name__ == "__main__":
    run()
