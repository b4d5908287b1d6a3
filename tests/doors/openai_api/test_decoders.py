"""The first requests may come in several threads at once."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("httptools", reason="needs kvarts[serve]")

FIRST = """
import sys, threading, time
from kvarts.doors.openai.bodies import CompletionBody, parsed

def run(place):
    together.wait()
    time.sleep(place * 0.0003)
    for _ in range(20):
        parsed(b'{"prompt": "a", "stream_options": {"include_usage": true}}', CompletionBody)

sys.setswitchinterval(1e-6)
together = threading.Barrier(16)
threads = [threading.Thread(target=run, args=(place,)) for place in range(16)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


@pytest.mark.slow
def test_the_first_bodies_in_many_threads_end_no_process() -> None:
    """A type that one thread prepares was used by another: one process in four ended by signal 11."""
    running = [subprocess.Popen([sys.executable, "-c", FIRST]) for _ in range(8)]
    assert [process.wait(60) for process in running] == [0] * 8
