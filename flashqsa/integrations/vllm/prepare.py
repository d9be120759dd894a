"""What vLLM does before it selects, in plain torch on any device: norms, rotary, and pooling from its ring of raw keys.

The formulas and their roundings are those of Transformers' Qwen4Exp (`Qwen4ExpTextRMSNorm`, `apply_rotary_pos_emb`,
`Qwen4ExpTextQSAIndexer`). What is stored goes through `write_kv`. `write_index_keys` cannot serve here: it finds a ring
by its request, and vLLM by a table of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashqsa.integrations.vllm.errors import LayoutError
from flashqsa.integrations.vllm.layout import check_shape
from flashqsa.integrations.vllm.store import qsa_store_cache_rows, store_kv
from flashqsa.values import FP8

AXES = 3
"""Axes of a multi-axis position: time, height, width."""

FP8_MAX = 448.0
"""Largest finite E4M3 number."""


def qsa_compress_groups_with_ratio(
    raw_keys: Tensor,
    raw_positions: Tensor,
    compressor_state_cache: Tensor,
    compressor_state_block_table: Tensor,
    token_to_req: Tensor,
    query_start_loc: Tensor,
    logical_positions: Tensor,
    compressed_slots: Tensor,
    compress_ratio: int,
    rope_cache: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Means of the raw keys of the blocks that rows close, before norm and rotary, and where the blocks begin.

    raw_keys                      [rows, 1, index_dim]
    raw_positions                 [rows, 1, 3] int64, rotary positions of this call's tokens
    compressor_state_cache        [state_blocks, ring_tokens, 1, index_dim], raw keys of earlier calls: token t of a
                                  request at `t % ring_tokens` of its state block
    compressor_state_block_table  [requests, any] int32, the state block of each request in its first column
    token_to_req                  [rows] int32
    query_start_loc               [requests + 1], the first row of each request and the end of the last
    logical_positions             [rows], negative for padding
    compressed_slots              [rows], negative where a row closes no block
    rope_cache                    [state_blocks, ring_tokens, 1, 3] int64, rotary positions as the ring has raw keys;
                                  None where they are the tokens' own positions

    Returns [rows, 1, index_dim] in the raw keys' dtype, the mean rounded once, and [rows, 3] int64; 0 where no block is
    closed. Raises LayoutError.
    """
    rows, requests = token_to_req.shape[0], query_start_loc.shape[0] - 1
    index_dim, ring_tokens = raw_keys.shape[-1], compressor_state_cache.shape[1]
    check_shape("raw_keys", raw_keys, (rows, 1, index_dim))
    check_shape("raw_positions", raw_positions, (rows, 1, AXES))
    check_shape("compressor_state_cache", compressor_state_cache, (None, ring_tokens, 1, index_dim))
    if ring_tokens < compress_ratio:
        raise LayoutError("compressor_state_cache", f"rings of {compress_ratio} tokens or more", ring_tokens)
    if rows == 0 or requests == 0:
        return torch.zeros_like(raw_keys), raw_positions.new_zeros((rows, AXES))
    index = torch.arange(rows, device=raw_keys.device)
    request = token_to_req.clamp(0, requests - 1).long()
    start, stop = query_start_loc[request], query_start_loc[request + 1]
    closes = (token_to_req == request) & (index >= start) & (index < stop)
    closes &= (compressed_slots >= 0) & (logical_positions >= compress_ratio - 1)
    back = torch.arange(compress_ratio - 1, -1, -1, device=raw_keys.device)
    source = index[:, None] - back
    here = source >= start[:, None]
    place = (logical_positions[:, None] - back) % ring_tokens
    state = compressor_state_block_table[request, 0].long()
    there = (state >= 0) & (state < compressor_state_cache.shape[0])
    ring = (torch.where(there, state, 0)[:, None], place)

    def members(new: Tensor, kept: Tensor) -> Tensor:
        """[rows, compress_ratio, width]: of this call's tokens, else of the ring; 0 where neither has them."""
        held = torch.where(there[:, None, None], kept[:, :, 0][ring], 0)
        return torch.where(here[..., None], new[:, 0][source.clamp(min=0)], held)

    pooled = members(raw_keys, compressor_state_cache).to(torch.float32).mean(dim=1).to(raw_keys.dtype)
    if rope_cache is None:
        first = (logical_positions - (compress_ratio - 1)).long()[:, None].expand(-1, AXES)
    else:
        first = members(raw_positions, rope_cache)[:, 0]
    return torch.where(closes[:, None], pooled, 0)[:, None], torch.where(closes[:, None], first, 0)


def qsa_prepare(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    q_norm_weight: Tensor,
    k_norm_weight: Tensor,
    eps: float,
    q_out: Tensor,
    state_cache: Tensor,
    state_slots: Tensor,
    state_block_table: Tensor,
    query_start_loc: Tensor,
    logical_positions: Tensor,
    compressed_cache: Tensor,
    compressed_slots: Tensor,
    k_work_metadata: Tensor,
    *,
    compress_ratio: int,
    mrope_section: tuple[int, int, int] | None,
    rope_pos_offset: int | None,
    main_qkv: Tensor,
    main_q_norm_weight: Tensor,
    main_k_norm_weight: Tensor,
    main_eps: float,
    main_kv_cache: Tensor,
    main_slot_mapping: Tensor,
    main_k_scale: float,
    main_v_scale: float,
) -> tuple[Tensor, Tensor]:
    """Norms and rotary of all that the projections gave, and the caches' share of it stored: q and gate.

    q                  [rows, index_heads * index_dim], k [rows, index_dim]: index queries and raw keys
    positions          [rows], or [3, rows] for multi-axis positions
    cos_sin_cache      [positions, rotary_dim], cosines, then sines
    q_out              [rows, index_heads, index_dim], written: index queries
    state_cache        [state_blocks, ring_tokens, 1, width] of raw keys; with `rope_pos_offset` three int64 positions
                       follow them there, in the bytes from that column on
    state_slots, compressed_slots, main_slot_mapping  [rows], where a row is stored; negative for nowhere
    compressed_cache   [pages, page_blocks, 1, index_dim], E4M3 without a scale
    mrope_section      pairs of the three axes, interleaved; None where positions have one axis
    main_qkv           [rows, 2 * (q_heads + kv_heads) * head_dim]: a query and a gate per query head, keys, values
    main_kv_cache      [pages, page_tokens, kv_heads, 2 * head_dim]

    The rest as of `qsa_compress_groups_with_ratio`. `k_work_metadata` is the stock kernel's own and not looked at.
    Returns two of [rows, q_heads, head_dim]. Raises LayoutError, and what `write_kv` raises.
    """
    del k_work_metadata
    rows, index_heads, index_dim = q_out.shape
    kv_heads, head_dim = main_kv_cache.shape[2], main_kv_cache.shape[3] // 2
    q_heads = main_qkv.shape[1] // (2 * head_dim) - kv_heads
    check_shape("q", q, (rows, index_heads * index_dim))
    check_shape("k", k, (rows, index_dim))
    check_shape("main_qkv", main_qkv, (rows, 2 * (q_heads + kv_heads) * head_dim))
    if positions.ndim == 2 and not mrope_section:
        raise LayoutError("positions", "one axis without mrope_section", list(positions.shape))
    section = mrope_section or None
    own = angles_at(positions, cos_sin_cache, section)
    index_q = rotate(rms_norm(q.reshape(rows, index_heads, index_dim), q_norm_weight, eps), *own)
    q_out.copy_(index_q.clamp(-FP8_MAX, FP8_MAX) if q_out.dtype == FP8 else index_q)

    raw_ring, rope_ring = state_cache[..., :index_dim], None
    at = logical_positions.long()[:, None, None].expand(-1, 1, AXES)
    if rope_pos_offset is not None:
        rope_ring = state_cache[..., rope_pos_offset:].view(torch.int64)
        at = positions.expand(AXES, rows).t()[:, None].long()
    row = torch.arange(rows, dtype=query_start_loc.dtype, device=q.device)
    request = torch.searchsorted(query_start_loc[1:], row, right=True, out_int32=True)
    pooled, first = qsa_compress_groups_with_ratio(
        k[:, None],
        at,
        raw_ring,
        state_block_table,
        request,
        query_start_loc,
        logical_positions,
        compressed_slots,
        compress_ratio,
        rope_ring,
    )
    opening = angles_at(first.t() if section else first[:, 0], cos_sin_cache, section)
    qsa_store_cache_rows(compressed_cache, compressed_slots, rotate(rms_norm(pooled, k_norm_weight, eps), *opening))
    # The ring is read above, before this call's tokens go over it.
    qsa_store_cache_rows(raw_ring, state_slots, k)
    if rope_ring is not None:
        qsa_store_cache_rows(rope_ring, state_slots, at)

    heads = main_qkv.reshape(rows, -1, head_dim)
    query, gate = heads[:, 0 : 2 * q_heads : 2], heads[:, 1 : 2 * q_heads : 2]
    keys, values = heads[:, 2 * q_heads : -kv_heads], heads[:, -kv_heads:]
    keys = rotate(rms_norm(keys, main_k_norm_weight, main_eps), *own)
    store_kv(keys, values, main_kv_cache, main_slot_mapping, main_k_scale, main_v_scale)
    return rotate(rms_norm(query, main_q_norm_weight, main_eps), *own), gate.contiguous()


def rms_norm(heads: Tensor, weight: Tensor, eps: float) -> Tensor:
    """heads / sqrt(mean(heads^2) + eps) * (1 + weight) over the last axis, in FP32, rounded once to their dtype."""
    numbers = heads.to(torch.float32)
    normed = numbers * torch.rsqrt(numbers.pow(2).mean(-1, keepdim=True) + eps)
    return (normed * (1.0 + weight.to(torch.float32))).to(heads.dtype)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads [rows, heads, dim] of which dimensions j and j + half are rotated by angle j; the rest passes.

    cos, sin  [rows, half], rounded to the heads' dtype, as both products and their sum are
    """
    half = cos.shape[1]
    cos, sin = cos[:, None].to(heads.dtype), sin[:, None].to(heads.dtype)
    low, high, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
    return torch.cat([low * cos - high * sin, high * cos + low * sin, rest], dim=-1)


def angles_at(positions: Tensor, cos_sin_cache: Tensor, section: tuple[int, int, int] | None) -> tuple[Tensor, Tensor]:
    """cos and sin [rows, rotary_dim / 2] at positions [rows], or [3, rows].

    Of three axes, pair j takes height where j % 3 is 1 and j < 3 * section[1], width where it is 2 and j < 3 *
    section[2], and time elsewhere: the interleaved layout of Transformers' `apply_interleaved_mrope`.
    """
    angles = cos_sin_cache[positions]
    if positions.ndim == 2 and section is not None:
        pair = torch.arange(angles.shape[-1] // 2, device=angles.device).repeat(2)
        height = (pair % 3 == 1) & (pair < 3 * section[1])
        width = (pair % 3 == 2) & (pair < 3 * section[2])
        angles = torch.where(height, angles[1], torch.where(width, angles[2], angles[0]))
    cos, sin = angles.chunk(2, dim=-1)
    return cos, sin
