"""Attention of decodes over pages that stay where they are, compiled by Numba for the CPU it runs on.

One pass over the keys of a sequence and one over its values, page by page and head by head, in the order in which they
lie in memory: every byte of KV is read once, and none is written. Arithmetic is in 32 bits.
"""

# Numba compiles these functions: loops over numbers are what it is for. Indices are unsigned, so that none is taken for
# one from the end, and arrays flat, so that what is computed for an index is what is written here. Types are Numba's:
# mypy: disable-error-code="assignment, untyped-decorator"
from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import njit, prange, types
from numba.extending import intrinsic

__all__ = ["NO_SINK", "decode_kernel"]

NO_SINK = np.float32(-1e30)
"""The score of the sink of a head that has none: so low that it takes no share."""
BLOCK = 4
"""Values that are added at a time."""

index = np.uint64
real = np.float32


@intrinsic
def widen(typing_context: Any, number: Any) -> Any:
    """Return a number in 32 bits: a float32 as it is, a bfloat16, which comes as its 16 bits, as the upper half."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        from llvmlite import ir

        if number == types.float32:
            return arguments[0]
        word = builder.zext(arguments[0], ir.IntType(32))
        return builder.bitcast(builder.shl(word, ir.Constant(ir.IntType(32), 16)), ir.FloatType())

    return types.float32(number), generate


@njit(fastmath=True, inline="always", error_model="numpy")
def softmax(scores: Any, first: Any, count: Any, softcap: Any, sink: Any) -> None:
    """Apply softmax to `count` scores from `first` on, in place; the sink takes its share, and has no place."""
    if softcap > real(0):
        for place in range(first, first + count):
            scores[place] = softcap * np.tanh(scores[place] / softcap)
    largest = sink
    for place in range(first, first + count):
        largest = max(largest, scores[place])
    total = np.exp(sink - largest)
    for place in range(first, first + count):
        scores[place] = np.exp(scores[place] - largest)
        total += scores[place]
    for place in range(first, first + count):
        scores[place] /= total


@cache
def decode_kernel(head_dim: int, heads_each: int, page_size: int) -> Callable[..., None]:
    """Return a kernel for heads of `head_dim` numbers, `heads_each` to a KV head.

    Sizes that are known make loops of a known length. Arguments of the kernel: `queries` and `out`, flat float32 of
    [sequences, kv_heads, heads_each, head_dim]; `keys` and `values`, flat pools of [pages, page_size, kv_heads,
    head_dim], a bfloat16 as its bits in uint16; the number of `kv_heads`, and in how many `parts` they are worked on;
    `tables` [sequences, pages]; the places [begin, end) that each sequence sees, and the places [sink_begin, sink_end)
    before these; `scaling`; `softcap`, 0 for none; `sinks` [heads], the scores of attention sinks, NO_SINK for none.
    """
    # Nothing but numbers: what is compiled is kept on disk, by their values.
    dim, each, size = index(head_dim), index(heads_each), index(page_size)
    one, two, three, block = index(1), index(2), index(3), index(BLOCK)

    @njit(parallel=True, fastmath=True, error_model="numpy", cache=True)
    def kernel(
        queries: Any,
        keys: Any,
        values: Any,
        kv_heads: Any,
        parts: Any,
        tables: Any,
        begins: Any,
        ends: Any,
        sink_begins: Any,
        sink_ends: Any,
        scaling: Any,
        softcap: Any,
        sinks: Any,
        out: Any,
    ) -> None:
        for item in prange(len(begins) * parts):
            sequence, part = index(item) // index(parts), index(item) % index(parts)
            step = index(kv_heads) * dim
            own = index(kv_heads) // index(parts)
            head = part * own
            begin, end = index(begins[sequence]), index(ends[sequence])
            # The places of the sink come first, then those from `begin` on.
            first_place, first_limit = index(sink_begins[sequence]), index(sink_ends[sequence])
            count, rows = end - begin + first_limit - first_place, own * each
            if first_place == first_limit:
                first_place, first_limit = begin, end
            first = (sequence * index(kv_heads) + head) * each
            query = np.empty(rows * dim, np.float32)
            for d in range(rows * dim):
                query[d] = queries[first * dim + d] * scaling
            scores = np.empty(rows * count, np.float32)
            total = np.zeros(rows * dim, np.float32)

            place, limit, seen = first_place, first_limit, index(0)
            while seen < count:
                offset = place % size
                num = min(size - offset, limit - place)
                at = ((index(tables[sequence, place // size]) * size + offset) * index(kv_heads) + head) * dim
                for token in range(num):
                    score = seen + token
                    for kv in range(own):
                        key = at + kv * dim
                        row = kv * each
                        # Two heads at a time, of those that share these keys.
                        while row + one < (kv + one) * each:
                            one_score, other_score = real(0), real(0)
                            for d in range(dim):
                                number = widen(keys[key + d])
                                one_score += query[row * dim + d] * number
                                other_score += query[(row + one) * dim + d] * number
                            scores[row * count + score] = one_score
                            scores[(row + one) * count + score] = other_score
                            row += two
                        if row < (kv + one) * each:
                            one_score = real(0)
                            for d in range(dim):
                                one_score += query[row * dim + d] * widen(keys[key + d])
                            scores[row * count + score] = one_score
                    at += step
                place += num
                seen += num
                if place == limit:
                    place, limit = begin, end

            for row in range(rows):
                softmax(scores, row * count, count, softcap, sinks[first % (index(kv_heads) * each) + row])

            place, limit, seen = first_place, first_limit, index(0)
            while seen < count:
                offset = place % size
                num = min(size - offset, limit - place)
                at = ((index(tables[sequence, place // size]) * size + offset) * index(kv_heads) + head) * dim
                token = index(0)
                while token + block <= num:
                    for row in range(rows):
                        value = at + row // each * dim
                        score = row * count + seen + token
                        w0, w1, w2, w3 = scores[score], scores[score + one], scores[score + two], scores[score + three]
                        for d in range(dim):
                            total[row * dim + d] += (
                                w0 * widen(values[value + d])
                                + w1 * widen(values[value + step + d])
                                + w2 * widen(values[value + two * step + d])
                                + w3 * widen(values[value + three * step + d])
                            )
                    at += block * step
                    token += block
                while token < num:
                    for row in range(rows):
                        value = at + row // each * dim
                        weight = scores[row * count + seen + token]
                        for d in range(dim):
                            total[row * dim + d] += weight * widen(values[value + d])
                    at += step
                    token += one
                place += num
                seen += num
                if place == limit:
                    place, limit = begin, end

            for d in range(rows * dim):
                out[first * dim + d] = total[d]

    compiled: Callable[..., None] = kernel
    return compiled
