"""Writing caches: pooled index keys, the ring of raw keys, and keys and values."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from flashqsa.kernels.cpu.paging import pages_of, raw_view
from flashqsa.values import FP8, IndexCache, KvCache, QsaSpec, Rows

FP8_MAX = 448.0
"""Largest finite E4M3 number."""


def write_kv(keys: Tensor, values: Tensor, kv_cache: KvCache, rows: Rows) -> None:
    """Stores keys and values [rows, kv_heads, head_dim] at their rows' positions; padding and holes are dropped."""
    live = np.flatnonzero(rows.live.numpy())
    position = rows.position.numpy()[live].astype(np.int64)
    request = rows.request.numpy()[live].astype(np.int64)
    page = pages_of(kv_cache.page_table, request, position, kv_cache.page_tokens)
    held = page >= 0
    taken = torch.from_numpy(live[held]) if not held.all() or live.shape[0] < rows.count else None
    where = (torch.from_numpy(page[held]), torch.from_numpy(position[held] % kv_cache.page_tokens))
    for new, pool, scale in (
        (keys, kv_cache.keys, kv_cache.k_scale),
        (values, kv_cache.values, kv_cache.v_scale),
    ):
        stored = new.detach() if taken is None else new.detach().index_select(0, taken)
        raw_view(pool).index_put_(where, raw_view(_to_storage(stored, pool.dtype, scale)))


def _to_storage(new: Tensor, dtype: torch.dtype, scale: float | Tensor | None) -> Tensor:
    """Numbers in a cache's dtype; for FP8 divided by the scale ([kv_heads] along the second last axis) and clamped."""
    if dtype != FP8:
        return new.to(dtype)
    divisor = torch.as_tensor(1.0 if scale is None else scale, dtype=torch.float32).detach()
    if divisor.ndim:
        divisor = divisor[:, None]
    return (new.to(torch.float32) / divisor).clamp_(-FP8_MAX, FP8_MAX).to(FP8)


def write_index_keys(
    raw_keys: Tensor,
    index_cache: IndexCache,
    rows: Rows,
    spec: QsaSpec,
    norm_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> None:
    """Pools and stores the blocks that these rows close, then keeps the newest raw keys in the ring.

    Arguments as in `pipeline.write_index_keys`. Raw keys of a closed block come from this call's rows where these are
    the tokens before the closing row, else from the ring, which is read before it is written.
    """
    ring = index_cache.raw_keys
    if ring is None:
        raise TypeError("an index cache without a ring of raw keys cannot be written")
    raw_keys, block_tokens = raw_keys.detach(), spec.block_tokens
    # Padding may stand between the rows of a request, so tokens are neighbours among the live rows.
    live = np.flatnonzero(rows.live.numpy())
    position = rows.position.numpy()[live].astype(np.int64)
    request = rows.request.numpy()[live].astype(np.int64)
    closing = np.flatnonzero((position + 1) % block_tokens == 0)
    if closing.size:
        block = position[closing] // block_tokens
        page = pages_of(index_cache.page_table, request[closing], block, index_cache.page_blocks)
        closing, block, page = closing[page >= 0], block[page >= 0], page[page >= 0]
    if closing.size:
        gathered = _raw_blocks(raw_keys, ring, closing, position, request, live, block_tokens)
        at = torch.from_numpy(live[closing])
        pooled = _pool(gathered, norm_weight, cos.detach()[at], sin.detach()[at], eps)
        where = (torch.from_numpy(page), torch.from_numpy(block % index_cache.page_blocks))
        stored = _to_storage(pooled, index_cache.keys.dtype, index_cache.scale)
        raw_view(index_cache.keys).index_put_(where, raw_view(stored))
    _write_ring(raw_keys, ring, live, position, request)


def _raw_blocks(
    raw_keys: Tensor,
    ring: Tensor,
    closing: np.ndarray,
    position: np.ndarray,
    request: np.ndarray,
    live: np.ndarray,
    block_tokens: int,
) -> Tensor:
    """Raw keys of the blocks that live rows close: [blocks, block_tokens, index_dim].

    live  the live rows; `position`, `request` and `closing` count among them
    """
    back = np.arange(block_tokens - 1, -1, -1)
    row = closing[:, None] - back
    token = position[closing, None] - back
    safe = np.maximum(row, 0)
    here = (row >= 0) & (request[safe] == request[closing, None]) & (position[safe] == token)
    gathered = raw_keys[torch.from_numpy(live[safe])]
    if not here.all():
        blocks, tokens = np.nonzero(~here)
        owner = torch.from_numpy(request[closing[blocks]])
        slot = torch.from_numpy(token[blocks, tokens] % ring.shape[1])
        gathered[torch.from_numpy(blocks), torch.from_numpy(tokens)] = ring[owner, slot]
    return gathered


def _pool(gathered: Tensor, norm_weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """rope(rms(round(mean in FP32))), each rounded to the raw keys' dtype: [blocks, index_dim].

    The order of roundings is that of Transformers' Qwen4ExpTextQSAIndexer: the rotary products and their sum round to
    the raw keys' dtype one by one.
    """
    dtype = gathered.dtype
    mean = gathered.to(torch.float32).mean(dim=1).to(dtype).to(torch.float32)
    normed = mean * torch.rsqrt(mean.pow(2).mean(-1, keepdim=True) + eps)
    key = (normed * (1.0 + norm_weight.detach().to(torch.float32))).to(dtype)
    half = cos.shape[1] // 2
    cos, sin = cos.to(dtype), sin.to(dtype)
    turned = key[:, : 2 * half]
    crossed = torch.cat([-turned[:, half:], turned[:, :half]], dim=1)
    key[:, : 2 * half] = turned * cos + crossed * sin
    return key


def _write_ring(raw_keys: Tensor, ring: Tensor, live: np.ndarray, position: np.ndarray, request: np.ndarray) -> None:
    """Token t goes to slot t % ring_tokens; of a request's rows only the newest ring_tokens are written."""
    newest = np.full(ring.shape[0], -1, dtype=np.int64)
    np.maximum.at(newest, request, position)
    kept = np.flatnonzero(position > newest[request] - ring.shape[1])
    where = (torch.from_numpy(request[kept]), torch.from_numpy(position[kept] % ring.shape[1]))
    ring.index_put_(where, raw_keys[torch.from_numpy(live[kept])])
