"""The body of a timeline, made by hand."""

from __future__ import annotations

from typing import Any

TOTAL = 100

Body = dict[str, Any]


def good() -> Body:
    """Five bursts of work on 100 blocks, with a rest after each, and preemption in the third; made by hand."""
    rows: list[Body] = []
    used = t_ms = 0

    def row(now_used: int, active: int, allocated: int, freed: int, **more: Any) -> None:
        nonlocal used, t_ms
        assert now_used == used + allocated - freed
        used = now_used
        step = len(rows) - sum(not r["active_seqs"] for r in rows) - (0 if active else 1)
        rows.append(
            {
                "step": step,
                "t_ms": t_ms,
                "used_blocks": used,
                "free_blocks": TOTAL - used,
                "used_pct": used / TOTAL,
                "active_seqs": active,
                "preempted_seqs": 0,
                "cached_blocks": (TOTAL - used) // 2,
                "allocated": allocated,
                "freed": freed,
                "waiting": 0,
                **more,
            }
        )
        t_ms += 10

    for burst in range(5):
        row(40, 2, 40, 0)
        row(70, 3, 30, 0)
        if burst == 2:
            row(98, 4, 28, 0)
            asked = [{"request": "7", "blocks": 5, "free_blocks": 2, "victim": "9", "lost_tokens": 64}]
            row(98, 3, 3, 3, preempted_seqs=1, asked=asked, waiting=1)
            row(70, 3, 0, 28)
        row(60, 2, 10, 20)
        row(0, 0, 0, 60)
    return {
        "timeline": rows,
        "block_size_tokens": 16,
        "total_blocks": TOTAL,
        "initial_used_blocks": 0,
        "peak_used_pct": 0.98,
        "preemption_count": 1,
    }


def series(used: list[int]) -> Body:
    rows = [
        {
            "step": step,
            "t_ms": float(step),
            "used_blocks": value,
            "free_blocks": 10_000 - value,
            "used_pct": value / 10_000,
            "active_seqs": 1,
            "preempted_seqs": 0,
        }
        for step, value in enumerate(used)
    ]
    peak = max(used, default=0) / 10_000
    return {
        "timeline": rows,
        "block_size_tokens": 1,
        "total_blocks": 10_000,
        "peak_used_pct": peak,
        "preemption_count": 0,
    }
