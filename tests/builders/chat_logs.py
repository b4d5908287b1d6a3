"""A folder of request logs, as a chat application writes them: one line per request, with the body and the response."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random

__all__ = ["write_chat_logs"]

BEGIN = datetime(2026, 11, 2, 9, tzinfo=UTC)
NUM_CHATS, MOST_TURNS, SPREAD_S = 90, 5, 600
WORDS = """
the boat hull mast keel oar rope sail deck wood varnish oil coat dry wet repair build page part price list order screw
plank larch oak pine stern bow wind lake river water winter summer spring day week month shop yard tool saw plane ask
answer give take hold store paint sand clean cut bend glue join seal
"""


def _text(random: Random, num_words: int) -> str:
    return " ".join(random.choices(WORDS.split(), k=num_words))


def write_chat_logs(folder: Path) -> None:
    """Write two files of requests: their system prompts begin with the time to the second."""
    random = Random(68)
    handbook = "\n".join(_text(random, 60) for _ in range(30))
    rows = []
    for _ in range(NUM_CHATS):
        at = BEGIN + timedelta(seconds=random.uniform(0, SPREAD_S))
        messages: list[dict[str, str]] = []
        for _ in range(random.randint(1, MOST_TURNS)):
            messages.append({"role": "user", "content": _text(random, random.randint(8, 60))})
            answer = {"role": "assistant", "content": _text(random, random.randint(40, 200))}
            system = (
                f"You are the clerk of a boatyard. It is {at:%Y-%m-%d %H:%M:%S}.\nAnswer by the handbook:\n{handbook}"
            )
            body = {"model": "clerk", "messages": [{"role": "system", "content": system}, *messages]}
            rows.append({"time": at.isoformat(timespec="milliseconds"), "request": body,
                         "response": {"choices": [{"message": answer}]}})  # fmt: skip
            messages.append(answer)
            at += timedelta(seconds=random.uniform(10, 90))
    rows.sort(key=lambda row: str(row["time"]))
    folder.mkdir(parents=True)
    for name, part in (("web-1.jsonl", rows[::2]), ("web-2.jsonl", rows[1::2])):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in part))
