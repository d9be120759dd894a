"""The last stage, as device functions of the attention kernel and as a kernel of its own.

A row's attention may be computed in parts. Each part leaves its normalised output and its natural log-sum-exp
(`values.Partial`); the whole is the sum of the parts weighted by exp(lse of the part - lse of the whole). Parts are
always added in their order, whoever adds them, so the result does not depend on which part ends last.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from flashqsa.values import Partial

HEADS_PER_PROGRAM = 4

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def finish_rows(
    value,  # [M, D] fp32, normalised
    lse,  # [M] fp32, natural
    out,
    gate,
    lse_out,
    out_at,  # [M] int64, element offset of each head's output
    gate_at,  # [M] int64
    lse_at,  # [M] int64
    there,  # [M] bool
    dims,  # [D]
    HAS_GATE: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """Rounds the output once, multiplies it by sigmoid(gate) in FP32, rounds once more, and stores it with the lse."""
    rounded = value.to(out.dtype.element_ty)
    at = dims[None, :]
    if HAS_GATE:
        raw = tl.load(gate + gate_at[:, None] + at, mask=there[:, None], other=0.0).to(tl.float32)
        rounded = (rounded.to(tl.float32) * tl.sigmoid(raw)).to(out.dtype.element_ty)
    tl.store(out + out_at[:, None] + at, rounded, mask=there[:, None])
    if HAS_LSE:
        tl.store(lse_out + lse_at, lse, mask=there)


@triton.jit
def merged_parts(
    part_out,
    part_lse,
    head_at,  # [M] int64, index of the row's head among the heads of one part
    part_heads,  # int64, heads of one part: rows * q_heads
    parts,
    there,  # [M] bool
    dims,  # [D]
    M: tl.constexpr,
    D: tl.constexpr,
):
    """The whole of `parts` parts: output [M, D] normalised, natural lse [M]; 0 and -inf where no part sees anything."""
    top = tl.full([M], float("-inf"), tl.float32)
    for part in range(parts):
        lse = tl.load(part_lse + part * part_heads + head_at, mask=there, other=float("-inf"), cache_modifier=".cg")
        top = tl.maximum(top, lse)
    reference = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([M], tl.float32)
    value = tl.zeros([M, D], tl.float32)
    for part in range(parts):
        at = part * part_heads + head_at
        lse = tl.load(part_lse + at, mask=there, other=float("-inf"), cache_modifier=".cg")
        weight = tl.math.exp2((lse - reference) * LOG2_E)
        part_value = tl.load(
            part_out + at[:, None] * D + dims[None, :], mask=there[:, None], other=0.0, cache_modifier=".cg"
        )
        total += weight
        value += weight[:, None] * part_value
    value = value / tl.where(total == 0.0, 1.0, total)[:, None]
    return value, top + tl.math.log2(total) * LN_2


@triton.jit(do_not_specialize=["heads", "parts"])
def merge_kernel(
    part_out,
    part_lse,
    out,
    gate,
    lse_out,
    heads,
    q_heads,
    parts,
    out_row_stride,
    out_head_stride,
    gate_row_stride,
    gate_head_stride,
    M: tl.constexpr,
    D: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """Merges the parts of M heads of consecutive rows: one program each."""
    at = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    dims = tl.arange(0, D)
    there = at < heads
    row, head = at // q_heads, at % q_heads
    value, lse = merged_parts(part_out, part_lse, at, heads.to(tl.int64), parts, there, dims, M, D)
    finish_rows(
        value,
        lse,
        out,
        gate,
        lse_out,
        row * out_row_stride + head * out_head_stride,
        row * gate_row_stride + head * gate_head_stride,
        at,
        there,
        dims,
        HAS_GATE,
        HAS_LSE,
    )


def merge(partial: Partial, gate: Tensor | None, out: Tensor, lse: Tensor | None) -> None:
    """Merges parts of whole rows: writes `out` [rows, q_heads, head_dim], gated, and `lse` [rows, q_heads] if given."""
    parts, rows, q_heads, head_dim = partial.output.shape
    heads = rows * q_heads
    merge_kernel[(triton.cdiv(heads, HEADS_PER_PROGRAM),)](
        partial.output,
        partial.lse,
        out,
        gate,
        lse,
        heads,
        q_heads,
        parts,
        *out.stride()[:2],
        *((0, 0) if gate is None else gate.stride()[:2]),
        M=HEADS_PER_PROGRAM,
        D=head_dim,
        HAS_GATE=gate is not None,
        HAS_LSE=lse is not None,
        num_warps=4,
    )
