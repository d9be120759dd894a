"""Everything between a layer's projections and its attention: norms, rotary, and what the caches store of it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from flashqsa.kernels.cpu.write import write_index_keys, write_kv
from flashqsa.values import IndexCache, KvCache, Projected, QsaSpec, Rows

LANES = 32
"""Partial sums of a norm's squares: the lanes of a GPU's warp, so that both have the same bits."""


def prepare(
    projected: Projected, kv_cache: KvCache, index_cache: IndexCache, rows: Rows, spec: QsaSpec
) -> tuple[Tensor, Tensor]:
    """Norm and rotary of what the projections gave, and the caches' share of it stored: q and index_q, ready to use.

    Arguments, results and errors as of `kernels.nvrtc.prepare`. Pooled keys are those of `write_index_keys`, all other
    numbers those of a GPU, bit by bit.
    """
    ring = index_cache.raw_keys
    if ring is None:
        raise TypeError("an index cache without a ring of raw keys cannot be written")
    if rows.count == 0:
        return torch.empty_like(projected.q), torch.empty_like(projected.index_q)
    # A row past the bound that the call was sized for counts as padding.
    position = torch.where(rows.position <= rows.max_position, rows.position, -1)
    rows = Rows(rows.request, position, rows.max_position)
    cos, sin, eps = projected.cos.detach(), projected.sin.detach(), projected.eps
    if projected.first_angles is None:
        at = position.clamp(min=0).long()
        first = at - at % spec.block_tokens
        own, opening = (cos[at], sin[at]), (cos[first], sin[first])
    else:
        own = (cos, sin)
        opening = _opening_angles(cos, sin, projected.first_angles, rows, spec.block_tokens, ring.shape[1])
    write_kv(rotate(rms_norm(projected.keys, projected.k_norm, eps), *own), projected.values, kv_cache, rows)
    first_cos, first_sin = (torch.cat([angles, angles], dim=1) for angles in opening)
    weight = projected.index_k_norm
    write_index_keys(projected.raw_keys, index_cache, rows, spec, weight, first_cos, first_sin, eps)
    index_q = rotate(rms_norm(projected.index_q, projected.index_q_norm, eps), *own)
    return rotate(rms_norm(projected.q, projected.q_norm, eps), *own), index_q


def rms_norm(heads: Tensor, weight: Tensor, eps: float) -> Tensor:
    """heads / sqrt(mean(heads^2) + eps) * (1 + weight) over the last axis, in FP32, rounded once to their dtype.

    heads   [rows, heads, dim]
    weight  [dim]

    The formula is that of Transformers' Qwen4ExpTextRMSNorm; the order of the sum is `sum_of_squares`'.
    """
    numbers = heads.detach().to(torch.float32)
    mean = sum_of_squares(numbers) / numbers.shape[-1]
    # Not 1 / torch.sqrt, which MKL rounds wrongly now and then; both steps of torch.rsqrt round to nearest.
    normed = numbers * torch.rsqrt(mean + eps)
    return (normed * (1.0 + weight.detach().to(torch.float32))).to(heads.dtype)


def sum_of_squares(numbers: Tensor) -> Tensor:
    """Sums [..., 1] of the squares of FP32 numbers [..., dim], in the order of `shrink_of` in `nvrtc/shares.cuh`.

    A lane has `span` neighbouring numbers of every 32 * span and adds up their squares in ascending order; then lanes
    16, 8, 4, 2 and 1 apart are added.
    """
    dim = numbers.shape[-1]
    span = 8 if dim > 128 else 4 if dim > 64 else 2 if dim > 32 else 1
    squares = pad(numbers * numbers, (0, -dim % (LANES * span)))
    squares = squares.view(*numbers.shape[:-1], -1, LANES, span)
    lanes: Tensor = squares[..., 0, :, 0]
    for i in range(1, squares.shape[-3] * span):
        lanes = lanes + squares[..., i // span, :, i % span]
    while lanes.shape[-1] > 1:
        lanes = lanes[..., : lanes.shape[-1] // 2] + lanes[..., lanes.shape[-1] // 2 :]
    return lanes


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads [rows, heads, dim] of which dimensions j and j + half are rotated by angle j; the rest passes.

    cos, sin  [rows, half], rounded to the heads' dtype

    Both products and their sum round to that dtype, as in Transformers' `apply_rotary_pos_emb`.
    """
    half = cos.shape[1]
    cos, sin = cos[:, None].to(heads.dtype), sin[:, None].to(heads.dtype)
    low, high, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
    return torch.cat([low * cos + -high * sin, high * cos + low * sin, rest], dim=-1)


def _opening_angles(
    cos: Tensor, sin: Tensor, kept: Tensor, rows: Rows, block_tokens: int, ring_tokens: int
) -> tuple[Tensor, Tensor]:
    """cos and sin [rows, half] of the first token of the block each row is in; then keeps those of this call's rows.

    They are read before they are written, as the ring is. Zeros for padding.
    """
    live = np.flatnonzero(rows.live.numpy())
    position = rows.position.numpy()[live].astype(np.int64)
    request = rows.request.numpy()[live].astype(np.int64)
    into = position % block_tokens
    opener = np.arange(live.shape[0]) - into  # among the live rows, where its block began in this call
    safe = np.maximum(opener, 0)
    here = (opener >= 0) & (request[safe] == request) & (position[safe] == position - into)
    slot = position % ring_tokens // block_tokens
    found = torch.zeros((rows.count, 2, cos.shape[1]), dtype=cos.dtype)
    new = torch.stack((cos, sin), dim=1)
    found[live[here]] = new[live[safe[here]]]
    found[live[~here]] = kept[request[~here], slot[~here]]
    newest = np.full(kept.shape[0], -1, dtype=np.int64)
    np.maximum.at(newest, request, position)
    opens = np.flatnonzero((into == 0) & (position > newest[request] - ring_tokens))
    kept.index_put_((torch.from_numpy(request[opens]), torch.from_numpy(slot[opens])), new[live[opens]])
    return found[:, 0], found[:, 1]
