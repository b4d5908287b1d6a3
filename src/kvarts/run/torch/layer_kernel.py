"""The work between the matrices of a decoder layer, compiled by Numba, and the matrices if no library multiplies them.

Each layer runs in stages; a call runs some of them in a team of threads, with a barrier after each. Numbers are
float32, rounded wherever the code of transformers rounds them: after each of its operations. Only the order of sums
differs.
"""

# Numba compiles these functions, as in numba_kernel. Types are Numba's:
# mypy: disable-error-code="assignment, untyped-decorator"
from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import cfunc, njit, types

from kvarts.run.torch.compiled import (
    WORDS,
    call,
    exponential,
    float32s,
    like,
    load,
    near,
    real,
    store,
    take,
    team_size,
    thread_number,
    wait,
    words,
)

__all__ = ["layer_kernel"]

index = np.uint64
single = np.float32
# Only reductions may be reordered.
SUMS = {"reassoc", "contract", "nsz"}

# The stages of a layer, in order, and the multiplication of a single matrix.
(
    ADD_AND_NORM,
    PROJECT,
    ROTATE_AND_WRITE,
    ATTEND,
    PROJECT_BACK,
    ADD_AND_NORM_AGAIN,
    EXPAND,
    ACTIVATE,
    CONTRACT,
    MULTIPLY,
) = range(10)

# Layout of a call's work, a block of integers. Entries are addresses unless noted. `room`: a buffer of the step,
# [tokens, ...]; weights and pages have the model's number format.
(
    STEP,  # work that all layers share
    FIRST,  # the first stage, a number
    LAST,  # the last stage, a number
    NORM, NORM_EPSILON,  # the weight, and a float
    NORM_AGAIN, EPSILON_AGAIN,
    NORM_QUERY, EPSILON_QUERY,  # the weight of the norm of each head, 0 if there is none
    NORM_KEY, EPSILON_KEY,
    WEIGHTS,  # of the seven matrices [outputs, inputs]: query, key, value, output, gate, up, down
    BIASES,  # per matrix, 0 without bias
    WIDTHS, HEIGHTS,  # per matrix: inputs and outputs
    KEYS, VALUES,  # the pools
    ATTENTION, ATTENTION_WORK,  # a function, and its work
    HEADS, KV_HEADS, HEAD_DIM, HIDDEN_SIZE, INNER_SIZE,  # counts
    LAYER_SIZE,
) = range(25)  # fmt: skip
(
    BARRIER, THREAD_NUMBER, TEAM_SIZE,  # functions
    COUNTERS,  # rows of each matrix taken by threads
    TOKENS,  # a count
    DECODES,  # a count: decodes are the first tokens
    HIDDEN,  # room: the residual stream
    DELTA,  # room: the next addition to it
    IS_ADDED,  # a number: whether DELTA is to be added before the first norm
    NORMED,  # room
    QUERY, KEY, VALUE,  # room: outputs of the matrices
    QUERY_STRIDE, KEY_STRIDE, VALUE_STRIDE,  # numbers from one token to the next
    COS, SIN,  # room [tokens, head_dim]
    SLOTS,  # integers
    QUERIES,  # rotated, float32
    ATTENDED,  # room
    GATE, UP,  # room: UP is multiplied in place by the activation of GATE
    GATE_STRIDE, UP_STRIDE,  # numbers from one token to the next
    SOURCES,  # room, for each of the seven matrices: its input
) = range(26)  # fmt: skip
TARGETS = SOURCES + 7
"""Room, for each matrix: its output."""
STEP_SIZE = TARGETS + 7
NUM_COUNTERS = 7
COUNTER_BYTES = 64
"""Distance between counters, so that no two share a cache line."""

BLOCK = 1024
"""Elements of a row multiplied at a time: four such rows fit in the L1 cache."""
FEW_ROWS = 8


@njit(error_model="numpy")
def share_of(count: Any, thread: Any, num_threads: Any) -> Any:
    """Return a thread's part [first, last) of `count` items."""
    each = (count + num_threads - index(1)) // num_threads
    first = min(count, thread * each)
    return first, min(count, first + each)


# Norms -----------------------------------------------------------------------------------------------------


@njit(fastmath=SUMS, error_model="numpy")
def sum_of_squares(numbers: Any, first: Any, count: Any) -> Any:
    """Return the sum of the squares of some numbers."""
    total = single(0)
    for d in range(count):
        number = load(numbers, first + d)
        total += number * number
    return total


@njit(error_model="numpy")
def normalize(numbers: Any, first: Any, count: Any, weight: Any, epsilon: Any, out: Any, out_first: Any) -> None:
    """Write numbers divided by their root mean square, times `weight` (RMSNorm)."""
    mean = sum_of_squares(numbers, first, count) / single(count)
    scale = single(1) / np.sqrt(mean + epsilon)
    for d in range(count):
        scaled = near(weight, load(numbers, first + d) * scale)
        store(out, out_first + d, near(weight, load(weight, d) * scaled))


@njit(error_model="numpy")
def add(numbers: Any, first: Any, more: Any, count: Any, storage: Any) -> None:
    """Add `more` to `numbers` in place."""
    for d in range(count):
        store(numbers, first + d, near(storage, load(numbers, first + d) + load(more, first + d)))


@njit(error_model="numpy")
def add_and_norm(
    work: Any, step: Any, weight: Any, epsilon: Any, room: Any, is_added: Any, thread: Any, num: Any
) -> None:
    size = index(work[HIDDEN_SIZE])
    hidden, delta, normed = like(room, step[HIDDEN]), like(room, step[DELTA]), like(room, step[NORMED])
    first, last = share_of(index(step[TOKENS]), thread, num)
    for token in range(first, last):
        if is_added:
            add(hidden, token * size, delta, size, weight)
        normalize(hidden, token * size, size, weight, epsilon, normed, token * size)


# Heads -----------------------------------------------------------------------------------------------------


@njit(error_model="numpy")
def rotate(
    numbers: Any, first: Any, dim: Any, cos: Any, sin: Any, at: Any, storage: Any, out: Any, out_first: Any
) -> None:
    """Write a head rotated by its position; the position's cosines and sines start at `at`."""
    half = dim // index(2)
    for d in range(half):
        one, other = load(numbers, first + d), load(numbers, first + half + d)
        turned = near(storage, one * load(cos, at + d))
        across = near(storage, -other * load(sin, at + d))
        store(out, out_first + d, near(storage, turned + across))
    for d in range(half):
        one, other = load(numbers, first + half + d), load(numbers, first + d)
        turned = near(storage, one * load(cos, at + half + d))
        across = near(storage, other * load(sin, at + half + d))
        store(out, out_first + half + d, near(storage, turned + across))


@njit(error_model="numpy")
def rotate_and_write(work: Any, step: Any, storage: Any, room: Any, thread: Any, num: Any) -> None:
    heads, kv_heads, dim = index(work[HEADS]), index(work[KV_HEADS]), index(work[HEAD_DIM])
    query, key, value = like(room, step[QUERY]), like(room, step[KEY]), like(room, step[VALUE])
    cos, sin, slots = like(room, step[COS]), like(room, step[SIN]), words(step[SLOTS])
    strides = index(step[QUERY_STRIDE]), index(step[KEY_STRIDE]), index(step[VALUE_STRIDE])
    queries, keys, values = float32s(step[QUERIES]), like(storage, work[KEYS]), like(storage, work[VALUES])
    norm_query, norm_key = like(storage, work[NORM_QUERY]), like(storage, work[NORM_KEY])
    normed = np.empty(dim, np.float32)
    normed_at = float32s(normed.ctypes.data)
    each = heads + index(2) * kv_heads
    first, last = share_of(index(step[TOKENS]) * each, thread, num)
    nothing = index(0)
    for item in range(first, last):
        token, head = item // each, item % each
        at = token * dim
        if head < heads:
            place, target = token * strides[0] + head * dim, (token * heads + head) * dim
            if work[NORM_QUERY] != 0:
                normalize(query, place, dim, norm_query, real(work[EPSILON_QUERY]), normed_at, nothing)
                rotate(normed_at, nothing, dim, cos, sin, at, storage, queries, target)
            else:
                rotate(query, place, dim, cos, sin, at, storage, queries, target)
            continue
        head -= heads
        is_key = head < kv_heads
        if not is_key:
            head -= kv_heads
        place = token * (strides[1] if is_key else strides[2]) + head * dim
        target = (index(slots[token]) * kv_heads + head) * dim
        if not is_key:
            for d in range(dim):
                store(values, target + d, load(value, place + d))
        elif work[NORM_KEY] != 0:
            normalize(key, place, dim, norm_key, real(work[EPSILON_KEY]), normed_at, nothing)
            rotate(normed_at, nothing, dim, cos, sin, at, storage, keys, target)
        else:
            rotate(key, place, dim, cos, sin, at, storage, keys, target)


# The activation --------------------------------------------------------------------------------------------


@njit(error_model="numpy")
def activate(work: Any, step: Any, storage: Any, room: Any, thread: Any, num: Any) -> None:
    gate, up = like(room, step[GATE]), like(room, step[UP])
    gate_stride, up_stride = index(step[GATE_STRIDE]), index(step[UP_STRIDE])
    inner = index(work[INNER_SIZE])
    first, last = share_of(index(step[TOKENS]) * inner, thread, num)
    while first < last:
        token, at = first // inner, first % inner
        count = min(inner - at, last - first)
        gate_at, up_at = token * gate_stride + at, token * up_stride + at
        # One loop without branches, with an output that overlaps no input: such loops are vectorized.
        for d in range(count):
            number = load(gate, gate_at + d)
            opened = near(storage, number / (single(1) + exponential(-number)))
            store(up, up_at + d, near(storage, opened * load(up, up_at + d)))
        first += count


# Matrices --------------------------------------------------------------------------------------------------


@njit(fastmath=SUMS, error_model="numpy")
def two_by_four(weight: Any, row: Any, width: Any, rows: Any, at: Any, stride: Any, count: Any) -> Any:
    """Return the products of two rows of a matrix and four tokens."""
    one, two, three = stride, index(2) * stride, index(3) * stride
    a0, a1, a2, a3 = single(0), single(0), single(0), single(0)
    b0, b1, b2, b3 = single(0), single(0), single(0), single(0)
    for d in range(count):
        a, b = load(weight, row + d), load(weight, row + width + d)
        x0, x1 = load(rows, at + d), load(rows, at + one + d)
        x2, x3 = load(rows, at + two + d), load(rows, at + three + d)
        a0 += a * x0
        a1 += a * x1
        a2 += a * x2
        a3 += a * x3
        b0 += b * x0
        b1 += b * x1
        b2 += b * x2
        b3 += b * x3
    return a0, a1, a2, a3, b0, b1, b2, b3


@njit(fastmath=SUMS, error_model="numpy")
def four_by_one(weight: Any, row: Any, width: Any, rows: Any, at: Any, count: Any) -> Any:
    """Return the products of four rows of a matrix and one token."""
    a0, a1, a2, a3 = single(0), single(0), single(0), single(0)
    for d in range(count):
        x = load(rows, at + d)
        a0 += load(weight, row + d) * x
        a1 += load(weight, row + width + d) * x
        a2 += load(weight, row + index(2) * width + d) * x
        a3 += load(weight, row + index(3) * width + d) * x
    return a0, a1, a2, a3


@njit(fastmath=SUMS, error_model="numpy")
def one_by_one(weight: Any, row: Any, rows: Any, at: Any, count: Any) -> Any:
    """Return the product of a row of a matrix and one token."""
    total = single(0)
    for d in range(count):
        total += load(weight, row + d) * load(rows, at + d)
    return total


@njit(error_model="numpy")
def multiply(weight: Any, bias: Any, rows: Any, out: Any, counter: Any, tokens: Any, width: Any, outputs: Any) -> None:
    """Write the products of `rows` [tokens, width] and a matrix [outputs, width], except rows that other threads
    take.
    """
    one, two, three, four = index(1), index(2), index(3), index(4)
    block = index(BLOCK)
    size = index(16) if tokens <= index(FEW_ROWS) else index(48)
    sums = np.empty(four * size, np.float32)
    while True:
        begin = index(take(counter, index(0))) * size
        if begin >= outputs:
            break
        end = min(outputs, begin + size)
        token = index(0)
        while token < tokens:
            many = token + four <= tokens
            num = four if many else one
            sums[:] = single(0)
            at = index(0)
            while at < width:
                count = min(block, width - at)
                row = begin
                x = token * width + at
                if many:
                    while row + two <= end:
                        a0, a1, a2, a3, b0, b1, b2, b3 = two_by_four(
                            weight, row * width + at, width, rows, x, width, count
                        )
                        place = (row - begin) * four
                        sums[place] += a0
                        sums[place + one] += a1
                        sums[place + two] += a2
                        sums[place + three] += a3
                        sums[place + four] += b0
                        sums[place + four + one] += b1
                        sums[place + four + two] += b2
                        sums[place + four + three] += b3
                        row += two
                else:
                    while row + four <= end:
                        a0, a1, a2, a3 = four_by_one(weight, row * width + at, width, rows, x, count)
                        place = (row - begin) * four
                        sums[place] += a0
                        sums[place + four] += a1
                        sums[place + two * four] += a2
                        sums[place + three * four] += a3
                        row += four
                while row < end:
                    for other in range(num):
                        sums[(row - begin) * four + other] += one_by_one(
                            weight, row * width + at, rows, x + other * width, count
                        )
                    row += one
                at += block
            for other in range(num):
                target = (token + other) * outputs
                for row in range(begin, end):
                    total = sums[(row - begin) * four + other]
                    if bias != 0:
                        total += load(like(weight, bias), row)
                    store(out, target + row, near(weight, total))
            token += num


# A layer ---------------------------------------------------------------------------------------------------


@cache
def layer_kernel(is_bfloat16: bool, is_room_32: bool) -> int:
    """Return the address of a function for a team of threads, for weights and pages of bfloat16 or float32.

    `is_room_32`: buffers are float32, as matrices compiled here require; otherwise they have the weights' format.
    """
    # Only integers: Numba's cache on disk is keyed by the values of the closure.
    source, nothing = np.int64(WORDS), np.int64(0)

    def kernel(work: Any, storage: Any, room: Any) -> None:
        """Run the stages from FIRST to LAST, as one thread of a team; `storage` and `room` serve only for their
        types.
        """
        if source == nothing:
            return
        step = words(work[STEP])
        thread, num = index(thread_number(step[THREAD_NUMBER])), index(team_size(step[TEAM_SIZE]))
        for stage in range(work[FIRST], work[LAST] + 1):
            # A function with one call site is compiled in one place only.
            if stage in (ADD_AND_NORM, ADD_AND_NORM_AGAIN):
                is_again = stage == ADD_AND_NORM_AGAIN
                weight = like(storage, work[NORM_AGAIN if is_again else NORM])
                epsilon = real(work[EPSILON_AGAIN if is_again else NORM_EPSILON])
                add_and_norm(work, step, weight, epsilon, room, is_again or step[IS_ADDED] != 0, thread, num)
            elif stage == ROTATE_AND_WRITE:
                rotate_and_write(work, step, storage, room, thread, num)
            elif stage == ATTEND:
                if step[DECODES] > 0:
                    call(work[ATTENTION], work[ATTENTION_WORK])
            elif stage == ACTIVATE:
                activate(work, step, storage, room, thread, num)
            else:
                first, last = 0, 3
                if stage == PROJECT_BACK:
                    first, last = 3, 4
                elif stage == EXPAND:
                    first, last = 4, 6
                elif stage == CONTRACT:
                    first, last = 6, 7
                elif stage == MULTIPLY:
                    first, last = 0, 1
                weights, biases = words(work[WEIGHTS]), words(work[BIASES])
                widths, heights = words(work[WIDTHS]), words(work[HEIGHTS])
                for number in range(first, last):
                    counter = words(step[COUNTERS] + np.int64(COUNTER_BYTES) * number)
                    rows, out = like(room, step[SOURCES + number]), like(room, step[TARGETS + number])
                    matrix, tokens = like(storage, weights[number]), index(step[TOKENS])
                    width, height = index(widths[number]), index(heights[number])
                    multiply(matrix, biases[number], rows, out, counter, tokens, width, height)
            if stage < work[LAST]:
                wait(step[BARRIER])

    of_weights, of_room = (types.uint16 if is_16 else types.float32 for is_16 in (is_bfloat16, not is_room_32))
    kernel.__qualname__ = f"layer_{of_weights}_{of_room}"
    signature = types.void(types.CPointer(types.int64), types.CPointer(of_weights), types.CPointer(of_room))
    address: int = cfunc(signature, error_model="numpy", cache=True)(kernel).address
    return address
