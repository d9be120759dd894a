"""Storing rows at vLLM's slots: slot s is row `s % page_tokens` of page `s // page_tokens`, and -1 is nowhere."""

from __future__ import annotations

import torch
from torch import Tensor

from flashqsa import pipeline
from flashqsa.integrations.vllm.errors import LayoutError
from flashqsa.integrations.vllm.layout import check_shape
from flashqsa.values import FP8, KvCache, QsaSpec, Rows


def at_slots(slots: Tensor, page_tokens: int) -> tuple[Rows, Tensor]:
    """Rows, and the page table for them, that write each row at its slot: every row is a request with one page,
    or with a hole.

    slots  [rows] of any integer dtype; negative for rows that are dropped

    >>> rows, page_table = at_slots(torch.tensor([37, -1, 5]), page_tokens=16)
    >>> rows.request.tolist(), rows.position.tolist(), page_table.tolist()
    ([0, 1, 2], [5, 15, 5], [[2], [-1], [0]])
    """
    page = torch.div(slots, page_tokens, rounding_mode="floor").clamp(min=-1).to(torch.int32)
    index = torch.arange(slots.shape[0], dtype=torch.int32, device=slots.device)
    position = (slots % page_tokens).to(torch.int32)
    return Rows(index, position, page_tokens - 1), page[:, None]


def store_kv(
    keys: Tensor, values: Tensor, pool: Tensor, slots: Tensor, k_scale: float = 1.0, v_scale: float = 1.0
) -> None:
    """Stores keys and values [rows, kv_heads, head_dim] in a pool [pages, page_tokens, kv_heads, 2 * head_dim].

    An E4M3 pool takes them divided by its scales, which are not looked at for others. Raises what `write_kv` raises.
    """
    if keys.shape[0] == 0:
        return
    rows, page_table = at_slots(slots, pool.shape[1])
    fp8 = pool.dtype == FP8
    cache = KvCache.packed(pool, page_table, k_scale if fp8 else None, v_scale if fp8 else None)
    # Rows of one request may stand anywhere, so blocks mean nothing here.
    spec = QsaSpec(q_heads=pool.shape[2], kv_heads=pool.shape[2], head_dim=keys.shape[2], block_tokens=1)
    pipeline.write_kv(keys, values, cache, rows, spec)


def qsa_store_cache_rows(cache: Tensor, slot_mapping: Tensor, rows: Tensor) -> None:
    """Stores rows of one head in a cache of vLLM's.

    cache         [pages, page_rows, 1, width], width even: floats, E4M3 without a scale, or int64
    slot_mapping  [rows] of any integer dtype; negative for rows that are dropped
    rows          [rows, width] or [rows, 1, width], in the cache's dtype, or any float for E4M3

    Raises LayoutError, and what `write_kv` raises.
    """
    rows = rows[:, 0] if rows.ndim == 3 and rows.shape[1] == 1 else rows
    check_shape("cache", cache, (None, None, 1, None))
    check_shape("rows", rows, (slot_mapping.shape[0], cache.shape[3]))
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    if cache.dtype == torch.int64 and rows.dtype == torch.int64:
        # Two FP32 numbers have the bits of one int64; they are moved, not computed with.
        cache, rows = cache.view(torch.float32), rows.view(torch.float32)
    if cache.shape[3] % 2:
        raise LayoutError("cache", "an even width", cache.shape[3])
    # The halves of a row are stored as if they were a key and its value.
    half = cache.shape[3] // 2
    store_kv(rows[:, None, :half], rows[:, None, half:], cache, slot_mapping)
