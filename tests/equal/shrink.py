"""Smaller workloads that differ as well, and how they are printed."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from equal.compare import Difference
from equal.workload import Workload


def shrunk(workload: Workload, compare: Callable[[Workload], Difference | None]) -> tuple[Workload, Difference]:
    """Return a smaller workload that differs as well, and where. Requests are left out, in blocks of halving size."""
    found = compare(workload)
    assert found is not None
    size = len(workload.asks)
    while size:
        for start in range(0, len(workload.asks), size):
            asks = workload.asks[:start] + workload.asks[start + size :]
            smaller = msgspec.structs.replace(workload, asks=asks)
            difference = compare(smaller) if asks else None
            if difference is not None and difference.of_vllm_alone is None:
                workload, found = smaller, difference
                break
        else:
            size //= 2
    return workload, found


def describe(workload: Workload, difference: Difference) -> str:
    """Return a workload and where it differs, in words and numbers."""
    lines = []
    lines.append(
        f"  {len(workload.asks)} requests, pages of {workload.page_size}, {workload.num_pages} pages, "
        f"{workload.max_num_batched_tokens} tokens, {workload.max_num_seqs} sequences, groups {workload.groups}"
    )
    for index, ask in enumerate(workload.asks):
        lines.append(
            f"  {index}: step {ask.step}, prompt {len(ask.prompt)}, output {len(ask.output)}, priority {ask.priority}"
        )
    lines.append(f"  step {difference.step} differs in {', '.join(difference.fields())}")
    for name, side in (("kvarts", difference.kvarts), ("vLLM", difference.vllm)):
        if side is not None:
            said = {field: getattr(side, field) for field in ("tokens", "admitted", "preempted", "num_free", "ended")}
            short = [f"{group}:{key[:8]}" for group, key in side.removed]
            lines.append(f"  {name:<7}{said}, removed {short}, {len(side.stored)} stored")
    return "\n".join(lines)
