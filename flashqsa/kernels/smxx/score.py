"""Index scores of a call's rows over a paged index cache: relu, head sum, scale and segment maxima in one kernel.

A program scores a window of consecutive rows against a slice of blocks, one request of the window after the other. Rows
and heads together are the lines of one matrix product with a tile of keys; the lines are ordered so that a thread holds
all heads of a row and a block, and the head sum stays in its registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashqsa.config import ScoreConfig
from flashqsa.kernels.smxx.paging import decode_e4m3, find_blocks, load_keys
from flashqsa.values import FP8, SEGMENT_BLOCKS, IndexCache, QsaSpec, Rows, Scores

MIN_LINES = 16
"""Fewest lines of a matrix product in Triton: windows of fewer are padded with heads of zeros."""


@triton.jit
def line_order(ROWS: tl.constexpr, PADDED_HEADS: tl.constexpr, LOW_HEADS: tl.constexpr):
    """Head [lines] and row [lines] of each line of the product, lines = PADDED_HEADS * ROWS.

    Eight neighbouring lines are rows of one head. LOW_HEADS of 2 puts two heads' eights next to each other, which the
    tensor cores' output layout gives to one thread; the other heads follow after all rows, likewise in one thread.
    """
    line = tl.arange(0, PADDED_HEADS * ROWS)
    if ROWS < 8:
        head, row = line // ROWS, line % ROWS
    else:
        eight = line // 8
        head = eight // (LOW_HEADS * (ROWS // 8)) * LOW_HEADS + eight % LOW_HEADS
        row = eight // LOW_HEADS % (ROWS // 8) * 8 + line % 8
    return head, row


@triton.jit
def load_lines(
    index_q,
    q_row_stride,
    q_head_stride,
    first_row,
    end_row,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    LOW_HEADS: tl.constexpr,
):
    """Queries [lines, DIM] of rows first_row to end_row, in `line_order`; zeros for lines past these rows and heads."""
    head, row = line_order(ROWS, PADDED_HEADS, LOW_HEADS)
    row += first_row
    start = row.to(tl.int64) * q_row_stride + head.to(tl.int64) * q_head_stride
    there = (row < end_row) & (head < HEADS)
    return tl.load(index_q + start[:, None] + tl.arange(0, DIM)[None, :], mask=there[:, None], other=0.0)


@triton.jit
def load_seen(request, position, row, there, requests, max_position, BLOCK_TOKENS: tl.constexpr):
    """Request [n] of rows, and how many blocks they see [n]: none where a row is padding or not `there`.

    Rows of no request, or past the bound on positions, count as padding: nothing is read or written for them.
    """
    owner = tl.load(request + row, mask=there, other=-1)
    at = tl.load(position + row, mask=there, other=-1)
    live = (owner >= 0) & (owner < requests) & (at >= 0) & (at <= max_position)
    return tl.where(live, owner, -1), tl.where(live, (at + 1) // BLOCK_TOKENS, 0)


@triton.jit
def lead_request(owner, waiting, row, end_row):
    """The request of the first row that waits; -1 where none does. owner, waiting, row [ROWS]."""
    lead = tl.min(tl.where(waiting, row, end_row), axis=0)
    return tl.max(tl.where(row == lead, owner, -1), axis=0)


@triton.jit
def sum_heads(
    products,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    LOW_HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sum over heads of relu(products): [lines, COLUMNS] in `line_order` to [ROWS, COLUMNS]. NaN stays NaN."""
    parts = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL)
    if ROWS < 8:
        parts = tl.reshape(parts, (PADDED_HEADS, ROWS, COLUMNS))
        if PADDED_HEADS != HEADS:
            # A padding head's product is 0 times a key, and NaN where that is infinite.
            parts = tl.where((tl.arange(0, PADDED_HEADS) < HEADS)[:, None, None], parts, 0.0)
        total = tl.sum(parts, axis=0)
    else:
        parts = tl.reshape(parts, (PADDED_HEADS // LOW_HEADS, ROWS // 8, LOW_HEADS, 8, COLUMNS))
        if PADDED_HEADS != HEADS:
            high = tl.arange(0, PADDED_HEADS // LOW_HEADS)[:, None] * LOW_HEADS
            real = high + tl.arange(0, LOW_HEADS)[None, :] < HEADS
            parts = tl.where(real[:, None, :, None, None], parts, 0.0)
        total = tl.reshape(tl.sum(tl.sum(parts, axis=2), axis=0), (ROWS, COLUMNS))
    return total


@triton.jit
def score_tile(
    q,
    keys,
    page,
    place,
    page_stride,
    place_stride,
    scale,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    LOW_HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DECODE_FP8: tl.constexpr,
):
    """Scores [ROWS, COLUMNS] of lines q [lines, DIM] for keys at page and place [COLUMNS]; -inf where page is -1."""
    key = load_keys(keys, page, place, page_stride, place_stride, DIM)
    if DECODE_FP8:
        key = decode_e4m3(key)
    products = tl.dot(q, tl.trans(key.to(q.dtype)), input_precision="ieee")
    found = sum_heads(products, ROWS, HEADS, PADDED_HEADS, LOW_HEADS, COLUMNS) * scale
    return tl.where((page >= 0)[None, :], found, float("-inf"))


@triton.jit
def store_visible(
    found,
    row_values,
    row_maxima,
    start,
    seen,
    mine,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SEGMENT: tl.constexpr,
    MAXIMA: tl.constexpr,
):
    """Stores those columns of a tile that the rows of `mine` see, and the largest score of each of their segments."""
    block = start + tl.arange(0, COLUMNS)
    shown = mine[:, None] & (block[None, :] < seen[:, None])
    tl.store(row_values + block[None, :], found, mask=shown)
    if MAXIMA:
        found = tl.where(shown, found, float("-inf"))
        largest = tl.max(tl.reshape(found, (ROWS, COLUMNS // SEGMENT, SEGMENT)), axis=2)
        begin = start + tl.arange(0, COLUMNS // SEGMENT) * SEGMENT
        shown_segment = mine[:, None] & (begin[None, :] < seen[:, None])
        tl.store(row_maxima + (begin // SEGMENT)[None, :], largest, mask=shown_segment)


@triton.jit
def score_run(
    q,
    keys,
    page_stride,
    place_stride,
    table,
    row_values,
    row_maxima,
    mine,
    seen,
    first,
    end,
    scale,
    pages,
    TOP_BLOCKS: tl.constexpr,
    PAGE_BLOCKS: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    LOW_HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    SEGMENT: tl.constexpr,
    MAXIMA: tl.constexpr,
    DECODE_FP8: tl.constexpr,
):
    """Scores the rows of `mine` [ROWS], all of one request, for blocks first to end, and stores what they see."""
    column = tl.arange(0, COLUMNS)
    most = tl.max(tl.where(mine, seen, 0), axis=0)
    least = tl.min(tl.where(mine, seen, most), axis=0)
    last = tl.minimum(end, most)
    if most <= TOP_BLOCKS:
        # Every row takes all it sees, for which 0 is as good a score as any.
        for start in range(first, last, COLUMNS):
            page, _ = find_blocks(table, start + column, start + column < last, pages, PAGE_BLOCKS)
            found = tl.where(page >= 0, 0.0, float("-inf"))[None, :] + tl.zeros((ROWS, COLUMNS), tl.float32)
            store_visible(found, row_values, row_maxima, start, seen, mine, ROWS, COLUMNS, SEGMENT, False)
    else:
        # Pages are looked up a tile ahead, so that loads of keys need not wait for them.
        page, place = find_blocks(table, first + column, first + column < last, pages, PAGE_BLOCKS)
        whole = first
        if ROWS >= 8:
            # Tiles that every row sees wholly need no mask on their columns, so their stores are 16 bytes wide.
            if least > TOP_BLOCKS:
                whole = first + tl.maximum(tl.minimum(least, last) - first, 0) // COLUMNS * COLUMNS
            for start in tl.range(first, whole, COLUMNS, num_stages=STAGES):
                here, here_place = page, place
                ahead = start + COLUMNS + column
                page, place = find_blocks(table, ahead, ahead < last, pages, PAGE_BLOCKS)
                found = score_tile(
                    q, keys, here, here_place, page_stride, place_stride, scale,
                    DIM, ROWS, HEADS, PADDED_HEADS, LOW_HEADS, COLUMNS, DECODE_FP8,
                )  # fmt: skip
                tl.store(row_values + (start + column)[None, :], found, mask=mine[:, None])
                if MAXIMA:
                    largest = tl.max(tl.reshape(found, (ROWS, COLUMNS // SEGMENT, SEGMENT)), axis=2)
                    segment = start // SEGMENT + tl.arange(0, COLUMNS // SEGMENT)
                    tl.store(row_maxima + segment[None, :], largest, mask=mine[:, None])
        for start in tl.range(whole, last, COLUMNS, num_stages=STAGES if ROWS < 8 else 1):
            here, here_place = page, place
            ahead = start + COLUMNS + column
            page, place = find_blocks(table, ahead, ahead < last, pages, PAGE_BLOCKS)
            found = score_tile(
                q, keys, here, here_place, page_stride, place_stride, scale,
                DIM, ROWS, HEADS, PADDED_HEADS, LOW_HEADS, COLUMNS, DECODE_FP8,
            )  # fmt: skip
            if ROWS > 1:
                found = tl.where((seen > TOP_BLOCKS)[:, None] | (found == float("-inf")), found, 0.0)
            store_visible(found, row_values, row_maxima, start, seen, mine, ROWS, COLUMNS, SEGMENT, MAXIMA)


@triton.jit(
    do_not_specialize=["row_count", "requests", "max_position", "pages", "window_rows", "table_stride", "maxima_stride"]
)
def score_kernel(
    index_q,
    q_row_stride,
    q_head_stride,
    keys,
    page_stride,
    place_stride,
    page_table,
    table_stride,
    request,
    position,
    values,
    values_stride,
    maxima,
    maxima_stride,
    visible,
    row_count,
    requests,
    max_position,
    pages,
    window_rows,
    scale,
    slice_blocks,
    BLOCK_TOKENS: tl.constexpr,
    TOP_BLOCKS: tl.constexpr,
    PAGE_BLOCKS: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    LOW_HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    SEGMENT: tl.constexpr,
    MAXIMA: tl.constexpr,
    DECODE_FP8: tl.constexpr,
):
    """Program (window, slice, run): rows window * window_rows on, blocks slice * slice_blocks (of COLUMNS) on.

    Of a window's runs, the rows of one request each, it scores the one of its number, and the last program all that are
    left: a window that holds many requests then takes no longer than others.
    """
    first_row = tl.program_id(0) * window_rows
    end_row = tl.minimum(first_row + window_rows, row_count)
    first = tl.program_id(1) * slice_blocks
    run = tl.program_id(2)
    row = first_row + tl.arange(0, ROWS)
    there = row < end_row
    owner, seen = load_seen(request, position, row, there, requests, max_position, BLOCK_TOKENS)
    if (first == 0) & (run == 0):
        tl.store(visible + row, seen, mask=there)
    waiting = seen > first
    if ROWS > 1:
        for _ in range(run):
            waiting = waiting & (owner != lead_request(owner, waiting, row, end_row))
    if tl.max(waiting.to(tl.int32), axis=0) == 0:
        return
    q = load_lines(index_q, q_row_stride, q_head_stride, first_row, end_row, DIM, ROWS, HEADS, PADDED_HEADS, LOW_HEADS)
    row_values = values + row.to(tl.int64)[:, None] * values_stride
    row_maxima = maxima + row.to(tl.int64)[:, None] * maxima_stride
    if ROWS == 1:
        table = page_table + tl.max(owner, axis=0).to(tl.int64) * table_stride
        score_run(
            q, keys, page_stride, place_stride, table, row_values, row_maxima, waiting, seen,
            first, first + slice_blocks, scale, pages, TOP_BLOCKS, PAGE_BLOCKS, DIM, ROWS, HEADS, PADDED_HEADS,
            LOW_HEADS, COLUMNS, STAGES, SEGMENT, MAXIMA, DECODE_FP8,
        )  # fmt: skip
    else:
        takes_the_rest = run == tl.num_programs(2) - 1
        while tl.max(waiting.to(tl.int32), axis=0) > 0:
            lead = lead_request(owner, waiting, row, end_row)
            table = page_table + lead.to(tl.int64) * table_stride
            score_run(
                q, keys, page_stride, place_stride, table, row_values, row_maxima, waiting & (owner == lead), seen,
                first, first + slice_blocks, scale, pages, TOP_BLOCKS, PAGE_BLOCKS, DIM, ROWS, HEADS, PADDED_HEADS,
                LOW_HEADS, COLUMNS, STAGES, SEGMENT, MAXIMA, DECODE_FP8,
            )  # fmt: skip
            waiting = waiting & (owner != lead) & takes_the_rest


def score(index_q: Tensor, index_cache: IndexCache, rows: Rows, spec: QsaSpec, config: ScoreConfig) -> Scores:
    """Scores of each row's visible blocks: index_dim^(-1/2) * sum over heads of relu(<index_q, key>), in FP32.

    index_q  [rows, index_heads, index_dim] FP32, FP16 or BF16, any strides, last one 1; a chunk of a call's rows

    Keys are taken in index_q's dtype, which holds E4M3 numbers exactly; an FP8 cache's scale is folded into the result.
    A block on a hole scores -inf. Rows that see no more than `top_blocks` blocks take them all, so they score 0 there.
    Columns that a row does not see are not written. The result holds segment maxima where the top-k can use them.
    """
    device = index_q.device
    width = max(spec.visible_blocks(rows.max_position), 1)
    segments = -(-width // SEGMENT_BLOCKS)
    maxima_stride = -(-segments // 4) * 4
    values = torch.empty((rows.count, segments * SEGMENT_BLOCKS), dtype=torch.float32, device=device)
    ranks_segments = segments > spec.top_blocks
    maxima = torch.empty((rows.count, maxima_stride if ranks_segments else 0), dtype=torch.float32, device=device)
    visible = torch.empty(rows.count, dtype=torch.int32, device=device)
    keys = index_cache.keys
    decode_fp8 = keys.dtype == FP8 and config.decode_fp8
    padded_heads = max(triton.next_power_of_2(spec.index_heads), MIN_LINES // config.rows)
    low_heads = 2 if padded_heads > 1 and 2 * config.rows == 16 * config.warps else 1
    slice_blocks = -(-width // (config.slices * config.columns)) * config.columns
    if rows.count == 0:
        return Scores(values[:, :width], visible)
    grid = (-(-rows.count // config.window), -(-width // slice_blocks), config.runs)
    with torch.cuda.device_of(index_q):
        score_kernel[grid](
            index_q,
            index_q.stride(0),
            index_q.stride(1),
            keys.view(torch.uint8) if decode_fp8 else keys,
            keys.stride(0),
            keys.stride(1),
            index_cache.page_table,
            index_cache.page_table.stride(0),
            rows.request,
            rows.position,
            values,
            values.stride(0),
            maxima,
            maxima_stride,
            visible,
            rows.count,
            index_cache.requests,
            rows.max_position,
            keys.shape[0],
            config.window,
            spec.score_scale * (index_cache.scale or 1.0),
            slice_blocks,
            BLOCK_TOKENS=spec.block_tokens,
            TOP_BLOCKS=spec.top_blocks,
            PAGE_BLOCKS=index_cache.page_blocks,
            DIM=spec.index_dim,
            ROWS=config.rows,
            HEADS=spec.index_heads,
            PADDED_HEADS=padded_heads,
            LOW_HEADS=low_heads,
            COLUMNS=config.columns,
            STAGES=config.stages,
            SEGMENT=SEGMENT_BLOCKS,
            MAXIMA=ranks_segments,
            DECODE_FP8=decode_fp8,
            num_warps=config.warps,
            num_stages=config.stages,
        )
    return Scores(values[:, :width], visible, maxima if ranks_segments else None)
