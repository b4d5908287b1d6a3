"""Attention over pages in one kernel of Triton: a program reads what some queries of one sequence attend to.

The heads that share a KV head are rows of one matrix beside the queries of the same sequence. With a group of two heads
and two queries, a program for KV head 0 has the rows

    row     0       1       2       3
    query   0       0       1       1
    head    0       1       0       1

and reads the places [begin, end) of the sequence through its page table, a block at a time. Several programs may share
the places of one sequence (`num_splits`): each returns its own output and the logarithm of its sum of exponentials, and
the caller joins them.
"""

# ruff: noqa: N803
# Triton reads annotations of a kernel, and knows only its own; upper case are constants of a compiled kernel.

import triton
import triton.language as tl

__all__ = ["attend"]


LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
"""Exponentials are taken to the base 2, which GPUs compute."""


@triton.jit  # type: ignore[untyped-decorator]
def _read_block(
    most,
    total,
    read,
    at,
    own_end,
    asked,
    position,
    keys,
    values,
    table,
    kv_head,
    scaling,
    softcap,
    slot_stride,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    IS_MASKED: tl.constexpr,
    BLOCK_PLACES: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Return the largest score, the sum of exponentials and the weighted sum of values of each row, one block on."""
    place = at + tl.arange(0, BLOCK_PLACES)
    is_place = place < own_end
    page = tl.load(table + place // PAGE_SIZE, mask=is_place, other=0).to(tl.int64)
    slot = page * PAGE_SIZE + place % PAGE_SIZE
    dim = tl.arange(0, BLOCK_DIM)
    offsets = slot[:, None] * slot_stride + kv_head * HEAD_DIM + dim[None, :]
    if IS_MASKED or HEAD_DIM != BLOCK_DIM:
        is_read = is_place[:, None] & (dim < HEAD_DIM)[None, :]
        key = tl.load(keys + offsets, mask=is_read, other=0.0)
        value = tl.load(values + offsets, mask=is_read, other=0.0)
    else:
        key = tl.load(keys + offsets)
        value = tl.load(values + offsets)
    score = tl.dot(asked, tl.trans(key), input_precision="ieee") * scaling
    if HAS_CAP:
        # The hyperbolic tangent, by an exponential that cannot overflow.
        fallen = tl.exp(-2.0 * tl.abs(score) / softcap)
        size = softcap * (1.0 - fallen) / (1.0 + fallen)
        score = tl.where(score < 0.0, -size, size)
    score = score * LOG2_E
    if IS_MASKED:
        is_seen = is_place[None, :] & (place[None, :] <= position[:, None])
        if WINDOW > 0:
            is_seen = is_seen & (place[None, :] > position[:, None] - WINDOW)
        score = tl.where(is_seen, score, float("-inf"))
    new_most = tl.maximum(most, tl.max(score, axis=1))
    # Rows that have seen nothing yet have no largest score to subtract.
    shift = tl.where(new_most == float("-inf"), 0.0, new_most)
    weight = tl.exp2(score - shift[:, None])
    fade = tl.exp2(most - shift)
    total = total * fade + tl.sum(weight, axis=1)
    read = read * fade[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
    return new_most, total, read


@triton.jit(do_not_specialize=["num_tokens", "table_stride"])  # type: ignore[untyped-decorator]
def attend(
    out,
    log_sums,
    queries,
    keys,
    values,
    tables,
    firsts,
    counts,
    starts,
    rows,
    scaling,
    softcap,
    num_tokens,
    query_stride,
    slot_stride,
    table_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_PLACES: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Write the output of one block of queries, KV head and split.

    Block `b` has `counts[b]` queries from token `firsts[b]` of the batch on, at positions from `starts[b]` on of the
    sequence with row `rows[b]` of `tables`. `out` [splits, tokens, heads, HEAD_DIM], `log_sums` [splits, tokens,
    heads].
    """
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    first = tl.load(firsts + block)
    count = tl.load(counts + block)
    start = tl.load(starts + block)
    table = tables + tl.load(rows + block).to(tl.int64) * table_stride

    row = tl.arange(0, BLOCK_ROWS)
    query = row // GROUP
    head = kv_head * GROUP + row % GROUP
    is_row = query < count
    position = start + query
    dim = tl.arange(0, BLOCK_DIM)
    is_dim = dim < HEAD_DIM
    token = (first + query).to(tl.int64)
    asked = tl.load(
        queries + token[:, None] * query_stride + head[:, None] * HEAD_DIM + dim[None, :],
        mask=is_row[:, None] & is_dim[None, :],
        other=0.0,
    )

    end = start + count
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(0, start - WINDOW + 1) // BLOCK_PLACES * BLOCK_PLACES
    each = tl.cdiv(tl.cdiv(end - begin, BLOCK_PLACES), NUM_SPLITS) * BLOCK_PLACES
    own_begin = begin + split * each
    own_end = tl.minimum(own_begin + each, end)

    most = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    read = tl.zeros([BLOCK_ROWS, BLOCK_DIM], tl.float32)
    # Places that all queries see, in whole blocks, need no mask.
    open_end = own_begin
    if WINDOW == 0:
        open_end += tl.maximum(0, tl.minimum(start + 1, own_end) - own_begin) // BLOCK_PLACES * BLOCK_PLACES
    for at in range(own_begin, open_end, BLOCK_PLACES):
        most, total, read = _read_block(
            most, total, read, at, own_end, asked, position, keys, values, table, kv_head, scaling, softcap,
            slot_stride, HEAD_DIM, PAGE_SIZE, WINDOW, HAS_CAP, False, BLOCK_PLACES, BLOCK_DIM,
        )  # fmt: skip
    for at in range(open_end, own_end, BLOCK_PLACES):
        most, total, read = _read_block(
            most, total, read, at, own_end, asked, position, keys, values, table, kv_head, scaling, softcap,
            slot_stride, HEAD_DIM, PAGE_SIZE, WINDOW, HAS_CAP, True, BLOCK_PLACES, BLOCK_DIM,
        )  # fmt: skip

    is_any = total > 0.0
    read = read / tl.where(is_any, total, 1.0)[:, None]
    log_sum = tl.where(is_any, most * LN_2 + tl.log(tl.where(is_any, total, 1.0)), float("-inf"))
    place_out = (split * num_tokens + token) * NUM_HEADS + head
    tl.store(log_sums + place_out, log_sum, mask=is_row)
    tl.store(out + place_out[:, None] * HEAD_DIM + dim[None, :], read, mask=is_row[:, None] & is_dim[None, :])
