"""A naive plan: one request of the maximum length, step by step, and the pool that has room for it.

Shares no code with `kvarts.cost.vllm.planning`. A request is prefilled in steps of the most tokens that may be in
flight; a layer keeps the blocks with tokens that the step or later ones see.
"""

from __future__ import annotations

from kvarts.cost.vllm.planning import LayerSpec, PlanSettings


def most_blocks(spec: LayerSpec, length: int, settings: PlanSettings) -> int:
    """Return the most blocks of a layer with tokens that a request of `length` tokens keeps at any step."""
    most, done = 0, 0
    while done < length:
        end = min(length, done + settings.tokens_in_flight)
        first = 0
        if spec.window is not None:
            first = max(0, done - (spec.window - 1) - settings.num_retained)
        elif spec.chunk is not None:
            first = done - done % spec.chunk
        most = max(most, len({token // spec.block_size for token in (*range(first, end, spec.block_size), end - 1)}))
        done = end
    return most


def longest_length(most: int, block_bytes: int, memory_bytes: int, blocks_of: dict[int, int]) -> int:
    """Return the longest of the lengths up to `most` whose blocks fit, one after the other; 0 for none.

    `blocks_of`: blocks of a request by its length.
    """
    fitting = [length for length in range(1, most + 1) if block_bytes * blocks_of[length] <= memory_bytes]
    return max(fitting, default=0)
