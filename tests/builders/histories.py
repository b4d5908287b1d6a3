"""Stored sessions for tests, and a process that writes them as fast as it can until it is killed.

What the process does to a session is a function of the session and of how many operations there were before, so a
parent that knows how many were acknowledged knows what must be on disk.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from random import Random
from typing import Any

from kvarts.run.sessions.history import Histories
from kvarts.run.sessions.values import SessionSettings, StoredSession, Usage


def stored(number: int, *, length: int = 0, **changes: Any) -> StoredSession:
    """A session with the id `number`."""
    values: dict[str, Any] = {
        "session_id": f"{number:032x}",
        "owner": "alice",
        "settings": SessionSettings(),
        "created_s": 1000.0 + number,
        "usage": Usage(last_used_s=1000.0),
        "length": length,
        **changes,
    }
    return StoredSession(**values)


def operation(seed: int, number: int, count: int, length: int) -> tuple[str, list[int] | int]:
    """What is done to session `number` of `length` tokens after `count` operations: tokens to append, or a length."""
    random = Random(f"{seed} {number} {count}")
    if length and random.random() < 0.2:
        return "truncate", random.randrange(length)
    longest = random.choice((1, 4, 400))
    return "append", [random.randrange(2**32) for _ in range(random.randint(1, longest))]


def history_after(seed: int, number: int, count: int) -> list[int]:
    """The tokens of session `number` after `count` operations."""
    tokens: list[int] = []
    for index in range(count):
        kind, value = operation(seed, number, index, len(tokens))
        if kind == "append":
            assert isinstance(value, list)
            tokens += value
        else:
            assert isinstance(value, int)
            del tokens[value:]
    return tokens


def write_until_killed(directory: Path, seed: int, counts: list[int]) -> None:
    """Go on with every session from its number of operations; print `session number` after each acknowledgement."""
    histories = Histories(directory)
    known = {session.session_id: session.length for session in histories.load()}

    def go_on(number: int, count: int, length: int) -> None:
        session_id = f"{number:032x}"
        kind, value = operation(seed, number, count, length)
        if kind == "append":
            future = histories.append(session_id, length, value)  # type: ignore[arg-type]
        else:
            future = histories.truncate(session_id, value)  # type: ignore[arg-type]

        def acknowledged(done: Any) -> None:
            os.write(1, f"{number} {count + 1}\n".encode())
            go_on(number, count + 1, done.result())

        future.add_done_callback(acknowledged)

    for number, count in enumerate(counts):
        session_id = f"{number:032x}"
        if session_id not in known:
            histories.create(stored(number)).result()
        go_on(number, count, known.get(session_id, 0))
    sys.stdin.read()  # the thread of the histories does the rest


if __name__ == "__main__":
    write_until_killed(Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
