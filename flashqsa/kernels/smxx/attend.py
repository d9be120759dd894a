"""Grouped-query attention of windows of rows, each over the union of its rows' blocks: one gather serves a window.

A unit is one window and one KV head. Its query lines (rows times query heads of the KV head) stand in one tile of a
program, which walks the window's list (`worklist.WindowLists`) with an online softmax; a token's mask decides which
lines see it. The same kernel serves every mode: `grouped` windows of several rows, `xqa` windows of one, `splitk` units
cut into parts, `dense` lists of all visible blocks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashqsa.attend_shape import AttendTile, Split, TritonTile
from flashqsa.kernels.nvrtc.worklist import WindowLists
from flashqsa.kernels.smxx.merge import LN_2, finish_rows, merged_parts
from flashqsa.values import FP8, KvCache, Partial, QsaSpec, Rows

LOG2_E = 1.4426950408889634


@triton.jit
def _load_tile(base, place, unit, bits):
    """A tile [N, D] of keys or values; tokens that no row attends to are not read and are 0."""
    at = place.to(tl.uint32, bitcast=True).to(tl.int64) * unit
    return tl.load(base + at[:, None], mask=(bits != 0)[:, None], other=0.0)


@triton.jit
def _unpack_fp8(words, N: tl.constexpr, D: tl.constexpr, NATIVE: tl.constexpr):
    """Words of four E4M3 numbers, [N, D / 4] int32, as [N, D] fp16: exact, since FP16 holds every E4M3 number.

    Without the conversion of sm_89 and newer a number's bits are moved to FP16's places, where they mean 2^-8 of it,
    and multiplied by 2^8; a NaN then comes out as 480.
    """
    if NATIVE:
        a, b, c, d = tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            .reg .b32 first, second;
            mov.b32 {low, high}, $4;
            cvt.rn.f16x2.e4m3x2 first, low;
            cvt.rn.f16x2.e4m3x2 second, high;
            mov.b32 {$0, $1}, first;
            mov.b32 {$2, $3}, second;
            }""",
            "=h,=h,=h,=h,r",
            [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=1,
        )
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            """{
            .reg .b32 first, second, sign, rest;
            prmt.b32 first, $4, 0, 0x1404;
            prmt.b32 second, $4, 0, 0x3424;
            and.b32 sign, first, 0x80008000;
            shr.b32 rest, first, 1;
            lop3.b32 first, rest, 0x3f803f80, sign, 0xea;
            and.b32 sign, second, 0x80008000;
            shr.b32 rest, second, 1;
            lop3.b32 second, rest, 0x3f803f80, sign, 0xea;
            mov.b32 rest, 0x5c005c00;
            mul.f16x2 first, first, rest;
            mul.f16x2 second, second, rest;
            mov.b32 {$0, $1}, first;
            mov.b32 {$2, $3}, second;
            }""",
            "=h,=h,=h,=h,r",
            [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=1,
        )
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [N, D])


@triton.jit(do_not_specialize=["rows", "whole", "parts", "capacity", "first_part_row", "part_rows"])
def attend_kernel(
    q,
    keys,
    values,
    k_scale,
    v_scale,
    gate,
    out,
    lse_out,
    places,
    value_places,
    token_masks,
    entries,
    done,
    part_out,
    part_lse,
    rows,
    whole,
    parts,
    capacity,
    scale,
    unit_elements,
    q_row_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    gate_row_stride,
    gate_head_stride,
    out_row_stride,
    out_head_stride,
    first_part_row,
    part_rows,
    KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    STAGES: tl.constexpr,
    SAME_PLACES: tl.constexpr,
    FP8_CACHE: tl.constexpr,
    WORDS: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    NORMALISE_Q: tl.constexpr,
    HEAD_SCALES: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_LSE: tl.constexpr,
    CUT: tl.constexpr,
    MERGE: tl.constexpr,
):
    """One program: a unit, or a part of one. See `attend` for what the arguments are."""
    program = tl.program_id(0)
    this_unit = program
    part = 0
    if CUT:
        if program >= whole:
            this_unit = whole + (program - whole) // parts
            part = (program - whole) % parts
    window = this_unit // KV_HEADS
    kv_head = (this_unit % KV_HEADS).to(tl.int64)
    NB: tl.constexpr = N // BLOCK_TOKENS
    tiles = (tl.load(entries + window) + NB - 1) // NB
    first = 0
    last = tiles
    if CUT:
        if program >= whole:
            first = tiles * part // parts
            last = tiles * (part + 1) // parts

    line = tl.arange(0, M)
    dims = tl.arange(0, D)
    token = tl.arange(0, N)
    in_window = line // HEADS
    in_block = token % BLOCK_TOKENS
    row = window * GROUP_ROWS + in_window
    there = (in_window < GROUP_ROWS) & (row < rows)
    row_bit = tl.where(there, 1 << in_window, 0)
    row = row.to(tl.int64)
    head = kv_head * HEADS + line % HEADS
    query = tl.load(
        q + (row * q_row_stride + head * q_head_stride)[:, None] + dims[None, :], mask=there[:, None], other=0.0
    )
    line_scale = tl.full([M], 1.0, tl.float32) * scale
    if FP8_CACHE:
        if HEAD_SCALES:
            line_scale *= tl.load(k_scale + kv_head)
        if NORMALISE_Q:
            # A power of two per line brings any query into FP16's range; it comes back in the scale, exactly. It is at
            # least 2^-60: a scale of 0 would turn masked logits into NaN.
            largest = tl.max(tl.abs(query.to(tl.float32)), 1)
            exponent = tl.minimum(tl.maximum(largest.to(tl.int32, bitcast=True) & 0x7F800000, 67 << 23), 253 << 23)
            line_scale *= exponent.to(tl.float32, bitcast=True)
            query = query.to(tl.float32) * ((254 << 23) - exponent).to(tl.float32, bitcast=True)[:, None]
        query = query.to(tl.float16)

    list_at = window.to(tl.int64) * capacity
    place_at = places + list_at + token // BLOCK_TOKENS
    if not SAME_PLACES:
        value_place_at = value_places + list_at + token // BLOCK_TOKENS
    mask_at = token_masks + list_at * BLOCK_TOKENS + token
    stored = tl.arange(0, D // 4 if WORDS else D)
    key_base = keys + kv_head * k_head_stride + (in_block.to(tl.int64) * k_token_stride)[:, None] + stored[None, :]
    value_base = values + kv_head * v_head_stride + (in_block.to(tl.int64) * v_token_stride)[:, None] + stored[None, :]

    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    # Places and masks are fetched a tile ahead of the keys and values they lead to.
    place = tl.load(place_at + first * NB)
    value_place = place
    if not SAME_PLACES:
        value_place = tl.load(value_place_at + first * NB)
    bits = tl.load(mask_at + first * N)
    for tile in tl.range(first, last, num_stages=STAGES):
        key = _load_tile(key_base, place, unit_elements, bits)
        value = _load_tile(value_base, value_place, unit_elements, bits)
        seen = bits
        place = tl.load(place_at + (tile + 1) * NB)
        value_place = place
        if not SAME_PLACES:
            value_place = tl.load(value_place_at + (tile + 1) * NB)
        bits = tl.load(mask_at + (tile + 1) * N)
        if WORDS:
            key = _unpack_fp8(key, N, D, NATIVE_FP8)
            value = _unpack_fp8(value, N, D, NATIVE_FP8)
        elif FP8_CACHE:
            key = key.to(tl.float16)
            value = value.to(tl.float16)
        logits = tl.dot(query, tl.trans(key), input_precision="ieee")  # [M, N]
        logits = tl.where((seen[None, :] & row_bit[:, None]) != 0, logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 1) * line_scale)
        # A line that has seen nothing keeps weight 0: -inf - -inf would be NaN.
        reference = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.math.exp2(logits * line_scale[:, None] - reference[:, None])
        fade = tl.math.exp2(top - reference)
        total = total * fade + tl.sum(weight, 1)
        acc = tl.dot(weight.to(value.dtype), value, acc * fade[:, None], input_precision="ieee")
        top = new_top

    factor = 1.0 / tl.where(total == 0.0, 1.0, total)
    if FP8_CACHE:
        if HEAD_SCALES:
            factor *= tl.load(v_scale + kv_head)
        else:
            factor *= v_scale
    acc = acc * factor[:, None]
    lse = (top + tl.math.log2(total)) * LN_2
    if CUT:
        if program >= whole:
            head_at = (row - first_part_row) * (KV_HEADS * HEADS) + head
            part_heads = part_rows.to(tl.int64) * (KV_HEADS * HEADS)
            part_at = part * part_heads + head_at
            tl.store(part_out + part_at[:, None] * D + dims[None, :], acc, mask=there[:, None])
            tl.store(part_lse + part_at, lse, mask=there)
            ended = 0
            if MERGE:
                # Every thread's stores come before the count, and the others' count before the reads below.
                tl.debug_barrier()
                ended = tl.atomic_add(done + this_unit, 1, sem="acq_rel") + 1
                if ended == parts:
                    acc, lse = merged_parts(part_out, part_lse, head_at, part_heads, parts, there, dims, M, D)
            there = there & (ended == parts)
    finish_rows(
        acc,
        lse,
        out,
        gate,
        lse_out,
        row * out_row_stride + head * out_head_stride,
        row * gate_row_stride + head * gate_head_stride,
        row * (KV_HEADS * HEADS) + head,
        there,
        dims,
        HAS_GATE,
        HAS_LSE,
    )


def attend_triton(
    q: Tensor,
    kv_cache: KvCache,
    lists: WindowLists,
    rows: Rows,
    spec: QsaSpec,
    tile: AttendTile,
    split: Split,
    gate: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    partial: Partial | None,
) -> None:
    """Attention of every row over the tokens that the lists give it.

    q, gate, out  [rows, q_heads, head_dim] FP16 or BF16 (FP32 too with an FP8 cache)
    lse           [rows, q_heads] FP32, natural, or None
    partial       from `empty_partial`: where cut units leave their parts

    Writes `out` and, where asked for, `lse` of the rows whose units are not cut, or are merged inside. Logits, softmax
    and sums are FP32. Probabilities are rounded to the values' dtype, with an FP8 cache to FP16, as the queries then
    are too. A row that sees nothing gets output 0 and lse -inf. Raises TypeError for a tile of another kernel.
    """
    if not isinstance(tile, TritonTile):
        raise TypeError(f"wanted a TritonTile, got {tile}")
    keys, values = kv_cache.keys, kv_cache.values
    fp8 = keys.dtype == FP8
    packed = 1
    if fp8 and tile.words and _in_words(keys) and _in_words(values):
        packed = 4
        keys, values = keys.view(torch.int32), values.view(torch.int32)
    k_scale, v_scale = _scales(kv_cache, spec)
    head_scales = isinstance(k_scale, Tensor)
    first_part_row = split.whole // spec.kv_heads * lists.group_rows
    attend_kernel[(split.programs,)](
        q,
        keys,
        values,
        k_scale if head_scales else None,
        v_scale,
        gate,
        out,
        lse,
        lists.places,
        lists.value_places,
        lists.token_masks,
        lists.entries,
        lists.done,
        None if partial is None else partial.output,
        None if partial is None else partial.lse,
        rows.count,
        split.whole,
        split.parts,
        lists.capacity,
        spec.softmax_scale * LOG2_E * (1.0 if isinstance(k_scale, Tensor) else k_scale),
        lists.unit // packed,
        *q.stride()[:2],
        *keys.stride()[1:3],
        *values.stride()[1:3],
        *((0, 0) if gate is None else gate.stride()[:2]),
        *out.stride()[:2],
        first_part_row,
        rows.count - first_part_row,
        KV_HEADS=spec.kv_heads,
        HEADS=spec.heads_per_kv_head,
        D=spec.head_dim,
        GROUP_ROWS=lists.group_rows,
        BLOCK_TOKENS=spec.block_tokens,
        M=tile.lines,
        N=tile.tokens,
        STAGES=tile.stages,
        SAME_PLACES=lists.value_places is None,
        FP8_CACHE=fp8,
        WORDS=packed == 4,
        NATIVE_FP8=tile.native_fp8,
        NORMALISE_Q=fp8 and q.dtype != torch.float16,
        HEAD_SCALES=head_scales,
        HAS_GATE=gate is not None,
        HAS_LSE=lse is not None,
        CUT=split.cut > 0,
        MERGE=split.cut > 0 and split.inside,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def _in_words(pool: Tensor) -> bool:
    """Whether every head of an FP8 pool begins at a multiple of four bytes."""
    return pool.data_ptr() % 4 == 0 and all(stride % 4 == 0 for stride in pool.stride()[:-1])


def _scales(kv_cache: KvCache, spec: QsaSpec) -> tuple[float | Tensor, float | Tensor]:
    """Scales of keys and values: two floats, or two tensors [kv_heads]."""
    k_scale = 1.0 if kv_cache.k_scale is None else kv_cache.k_scale
    v_scale = 1.0 if kv_cache.v_scale is None else kv_cache.v_scale
    if isinstance(k_scale, Tensor) or isinstance(v_scale, Tensor):
        device = kv_cache.keys.device
        made = [
            s if isinstance(s, Tensor) else torch.full((spec.kv_heads,), s, dtype=torch.float32, device=device)
            for s in (k_scale, v_scale)
        ]
        return made[0], made[1]
    return k_scale, v_scale
