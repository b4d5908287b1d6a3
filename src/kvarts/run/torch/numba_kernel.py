"""Attention of decodes over pages in place, compiled by Numba for the CPU it runs on.

One pass over the keys of a sequence and one over its values, page by page and head by head, in memory order: every byte
of KV is read once, and nothing is copied. Arithmetic is in float32; the output is rounded to the number format of the
pages.
"""

# Numba compiles these functions; plain loops over numbers suit it. Indices are unsigned and arrays flat, so that the
# compiled index arithmetic is exactly that of the source. Types are Numba's:
# mypy: disable-error-code="assignment, untyped-decorator"
from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import cfunc, njit, types

from kvarts.run.torch.compiled import WORDS, exponential, float32s, like, load, near, store, take, words

__all__ = ["NO_SINK", "SIZE", "STEP_SIZE", "decode_kernel"]

NO_SINK = np.float32(-1e30)
"""The score for a head without a sink: so low that it takes no share."""
BLOCK = 4
"""Number of values added at a time."""

index = np.uint64
real = np.float32
# Only reductions may be reordered.
SUMS = {"reassoc", "contract", "nsz"}

# Layout of a call's work, a block of integers; all but counts are addresses.
(
    KEYS,  # a pool of [pages, page_size, kv_heads, head_dim]
    VALUES,
    KV_HEADS,  # a count
    FLOATS,  # scaling, softcap or 0, then for each head the score of its sink or NO_SINK
    QUERIES,  # [sequences, kv_heads, heads_each, head_dim], float32
    OUT,  # of the same shape, float32
    STEP,  # the work that all layers of one window share:
    SIZE,
) = range(8)
(
    COUNT,  # of sequences
    PARTS,  # a count: work items per sequence, each with some of its heads
    COUNTER,  # the next work item
    ORDER,  # of sequences: the longest first
    TABLES,  # [sequences, WIDTH]: page ids
    WIDTH,
    BEGINS,  # per sequence: the places [begin, end) attended to,
    ENDS,
    SINK_BEGINS,  # and the places of its sink, read before them
    SINK_ENDS,
    STEP_SIZE,
) = range(11)


@njit(fastmath=True, error_model="numpy")
def largest_of(scores: Any, first: Any, count: Any, largest: Any) -> Any:
    """Return the largest of some scores."""
    for place in range(first, first + count):
        largest = max(largest, scores[place])
    return largest


@njit(fastmath=SUMS, error_model="numpy")
def softmax(scores: Any, first: Any, count: Any, softcap: Any, sink: Any) -> None:
    """Apply softmax to `count` scores from `first` on, in place; the sink takes its share without a place."""
    if softcap > real(0):
        for place in range(first, first + count):
            scores[place] = softcap * np.tanh(scores[place] / softcap)
    largest = largest_of(scores, first, count, sink)
    total = exponential(sink - largest)
    for place in range(first, first + count):
        scores[place] = exponential(scores[place] - largest)
        total += scores[place]
    share = real(1) / total
    for place in range(first, first + count):
        scores[place] *= share


@njit(fastmath=SUMS, error_model="numpy", inline="always")
def score_token(
    query: Any, keys: Any, at: Any, scores: Any, place: Any, count: Any, own: Any, each: Any, dim: Any
) -> None:
    """Write the scores of the token whose keys are at `at`: that of each query of `own` KV heads, at `place`."""
    one, two = index(1), index(2)
    for kv in range(own):
        key = at + kv * dim
        row = kv * each
        # Two at a time of the heads that share these keys.
        while row + one < (kv + one) * each:
            one_score, other_score = real(0), real(0)
            for d in range(dim):
                number = load(keys, key + d)
                one_score += query[row * dim + d] * number
                other_score += query[(row + one) * dim + d] * number
            scores[row * count + place] = one_score
            scores[(row + one) * count + place] = other_score
            row += two
        if row < (kv + one) * each:
            one_score = real(0)
            for d in range(dim):
                one_score += query[row * dim + d] * load(keys, key + d)
            scores[row * count + place] = one_score


@njit(fastmath=SUMS, error_model="numpy", inline="always")
def add_block(
    total: Any, values: Any, at: Any, stride: Any, scores: Any, place: Any, count: Any, rows: Any, each: Any, dim: Any
) -> None:
    """Add to `total` the values of BLOCK tokens from `at` on, weighted by the scores from `place` on."""
    one, two, three = index(1), index(2), index(3)
    for row in range(rows):
        value = at + row // each * dim
        score = row * count + place
        w0, w1, w2, w3 = scores[score], scores[score + one], scores[score + two], scores[score + three]
        for d in range(dim):
            total[row * dim + d] += (
                w0 * load(values, value + d)
                + w1 * load(values, value + stride + d)
                + w2 * load(values, value + two * stride + d)
                + w3 * load(values, value + three * stride + d)
            )


@cache
def decode_kernel(is_bfloat16: bool, head_dim: int, heads_each: int, page_size: int) -> int:
    """Return the address of a function for a team of threads, for heads of `head_dim` elements, `heads_each` per KV
    head, and pages of float32 or bfloat16, the latter as bits.

    Sizes known at compile time give loops of constant length.
    """
    # Only integers: Numba's cache on disk is keyed by the values of the closure.
    dim, each, size, source = index(head_dim), index(heads_each), index(page_size), index(WORDS)
    zero, one, two, block = index(0), index(1), index(2), index(BLOCK)

    def kernel(work: Any, storage: Any) -> None:
        """Attend for all tokens that no other thread takes. `storage` serves only for its type."""
        if source == zero:
            return
        step = words(work[STEP])
        keys, values = like(storage, work[KEYS]), like(storage, work[VALUES])
        begins, ends, tables = words(step[BEGINS]), words(step[ENDS]), words(step[TABLES])
        sink_begins, sink_ends = words(step[SINK_BEGINS]), words(step[SINK_ENDS])
        floats, queries, out = float32s(work[FLOATS]), float32s(work[QUERIES]), float32s(work[OUT])
        kv_heads, parts = index(work[KV_HEADS]), index(step[PARTS])
        order, counter = words(step[ORDER]), words(step[COUNTER])
        items = index(step[COUNT]) * parts
        while True:
            item = index(take(counter, zero))
            if item >= items:
                break
            sequence, part = index(order[item // parts]), item % parts
            table = sequence * index(step[WIDTH])
            stride = kv_heads * dim
            own = kv_heads // parts
            head = part * own
            begin, end = index(begins[sequence]), index(ends[sequence])
            # The places of the sink come first, then those from `begin` on.
            first_place, first_limit = index(sink_begins[sequence]), index(sink_ends[sequence])
            count, rows = end - begin + first_limit - first_place, own * each
            if first_place == first_limit:
                first_place, first_limit = begin, end
            first = (sequence * kv_heads + head) * each
            query = np.empty(rows * dim, np.float32)
            for d in range(rows * dim):
                query[d] = queries[first * dim + d] * floats[0]
            scores = np.empty(rows * count, np.float32)
            total = np.zeros(rows * dim, np.float32)

            place, limit, seen = first_place, first_limit, index(0)
            while seen < count:
                offset = place % size
                num = min(size - offset, limit - place)
                at = ((index(tables[table + place // size]) * size + offset) * kv_heads + head) * dim
                for token in range(num):
                    score_token(query, keys, at, scores, seen + token, count, own, each, dim)
                    at += stride
                place += num
                seen += num
                if place == limit:
                    place, limit = begin, end

            for row in range(rows):
                softmax(scores, row * count, count, floats[1], floats[two + head * each + row])

            place, limit, seen = first_place, first_limit, index(0)
            while seen < count:
                offset = place % size
                num = min(size - offset, limit - place)
                at = ((index(tables[table + place // size]) * size + offset) * kv_heads + head) * dim
                token = index(0)
                while token + block <= num:
                    add_block(total, values, at, stride, scores, seen + token, count, rows, each, dim)
                    at += block * stride
                    token += block
                while token < num:
                    for row in range(rows):
                        value = at + row // each * dim
                        weight = scores[row * count + seen + token]
                        for d in range(dim):
                            total[row * dim + d] += weight * load(values, value + d)
                    at += stride
                    token += one
                place += num
                seen += num
                if place == limit:
                    place, limit = begin, end

            for d in range(rows * dim):
                store(out, first * dim + d, near(keys, total[d]))

    # The name must differ per variant, since Numba's cache looks functions up by name across processes.
    kernel.__qualname__ = f"decode_{'bfloat16' if is_bfloat16 else 'float32'}_{head_dim}_{heads_each}_{page_size}"
    pages = types.CPointer(types.uint16 if is_bfloat16 else types.float32)
    signature = types.void(types.CPointer(types.int64), pages)
    address: int = cfunc(signature, fastmath=SUMS, error_model="numpy", cache=True)(kernel).address
    return address
