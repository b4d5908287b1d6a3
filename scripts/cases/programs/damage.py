"""Write damaged copies of a timeline beside it, one for each way to damage it: damaged-WAY.json and some others.

python damage.py TIMELINE.json

It reads and writes JSON, and imports nothing of kvarts.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

Body = dict[str, Any]


def _set(place: float, name: str, change: Callable[[Any], Any]) -> Callable[[Body], None]:
    """Return a damage of one field of the row that is `place`, from 0 to 1, of the way through."""

    def damage(body: Body) -> None:
        rows = body["timeline"]
        row = rows[int(place * (len(rows) - 1))]
        row[name] = change(row.get(name))

    return damage


def _set_head(name: str, change: Callable[[Any], Any]) -> Callable[[Body], None]:
    def damage(body: Body) -> None:
        body[name] = change(body.get(name))

    return damage


def _drop(name: str) -> Callable[[Body], None]:
    def damage(body: Body) -> None:
        for row in body["timeline"][3:9]:
            row.pop(name, None)

    return damage


def _swap(body: Body) -> None:
    rows = body["timeline"]
    middle = len(rows) // 2
    rows[middle], rows[middle + 3] = rows[middle + 3], rows[middle]


def _preempt_with_room(body: Body) -> None:
    body["timeline"][0].pop("asked", None)
    body["timeline"][0]["preempted_seqs"] = 2
    body["preemption_count"] += 2


def _ask_for_little(body: Body) -> None:
    row = body["timeline"][1]
    row["preempted_seqs"] = 1
    row["asked"] = [{"request": "1", "blocks": 1, "free_blocks": row["free_blocks"], "victim": "2", "lost_tokens": 3}]
    body["preemption_count"] += 1


def _leak(body: Body) -> None:
    rest = next(row for row in reversed(body["timeline"]) if not row["active_seqs"])
    rest["used_blocks"] += 2
    rest["free_blocks"] -= 2
    rest["used_pct"] = rest["used_blocks"] / body["total_blocks"]
    rest["freed"] -= 2


def _cut(number: int) -> Callable[[Body], None]:
    def damage(body: Body) -> None:
        rows = body["timeline"]
        del rows[number:]
        body["peak_used_pct"] = max((row["used_pct"] for row in rows), default=0.0)
        body["preemption_count"] = sum(row["preempted_seqs"] for row in rows)

    return damage


def _all_zero(body: Body) -> None:
    for row in body["timeline"]:
        row.update(used_blocks=0, free_blocks=body["total_blocks"], used_pct=0.0, preempted_seqs=0)
        for name in ("asked", "allocated", "freed"):
            row.pop(name, None)
    body.update(peak_used_pct=0.0, preemption_count=0)


DAMAGES: dict[str, Callable[[Body], None]] = {
    "free": _set(0.3, "free_blocks", lambda value: value + 1),
    "used": _set(0.5, "used_blocks", lambda value: value + 1),
    "cached": _set(0.4, "cached_blocks", lambda _: 10**9),
    "pct": _set(0.6, "used_pct", lambda value: value + 1e-6),
    "time": _set(0.7, "t_ms", lambda _: 0.0),
    "flux": _set(0.5, "allocated", lambda value: value + 3),
    "negative": _set(0.2, "waiting", lambda _: -1),
    "text": _set(0.2, "used_blocks", str),
    "bool": _set(0.2, "waiting", lambda _: True),
    "peak": _set_head("peak_used_pct", lambda value: value / 2),
    "count": _set_head("preemption_count", lambda value: value + 7),
    "size": _set_head("block_size_tokens", lambda _: 0),
    "total": _set_head("total_blocks", lambda value: value + 1),
    "initial": _set_head("initial_used_blocks", lambda _: 5),
    "no-field": _drop("active_seqs"),
    "no-flux": _drop("freed"),
    "order": _swap,
    "preempt": _preempt_with_room,
    "ask": _ask_for_little,
    "leak": _leak,
    "rows-none": _cut(0),
    "rows-one": _cut(1),
    "rows-few": _cut(5),
    "zero": _all_zero,
}


def main() -> None:
    """Write all of them."""
    path = Path(sys.argv[1])
    whole = json.loads(path.read_text())
    for name, damage in DAMAGES.items():
        body = deepcopy(whole)
        damage(body)
        Path(f"damaged-{name}.json").write_text(json.dumps(body))
    text = path.read_bytes()
    Path("damaged-torn.json").write_bytes(text[: len(text) // 2])
    Path("damaged-list.json").write_text("[]")
    Path("damaged-packed.json.gz").write_bytes(gzip.compress(text, mtime=0)[:2000])
    rows = [json.dumps(row) for row in whole.pop("timeline")]
    totals = {name: whole.pop(name) for name in ("peak_used_pct", "preemption_count")}
    lines = [json.dumps(whole), *rows, json.dumps(totals)]
    Path("damaged-killed.jsonl").write_text("\n".join(lines[:-1])[:-9])
    Path("damaged-line.jsonl").write_text("\n".join([*lines[:40], "{oops", *lines[40:]]) + "\n")
    Path("damaged-not.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
