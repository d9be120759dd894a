"""Where a token or a block of a request lies in a paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from flashqsa.values import FP8, IndexCache, KvCache


def locate(page_table: Tensor, request: int, entries: Tensor, per_page: int) -> tuple[Tensor, Tensor]:
    """The page and the place within it of a request's entries (tokens or blocks).

    page_table  [requests, table_pages] int32
    entries     [n] int64 logical ids; `per_page` of them share a page

    Returns page [n] int64 (-1 on a hole) and place [n] int64.

    >>> locate(torch.tensor([[5, -1]]), 0, torch.tensor([0, 3, 4]), per_page=4)
    (tensor([ 5,  5, -1]), tensor([0, 3, 0]))
    """
    return page_table[request].long()[entries // per_page], entries % per_page


def read_index_keys(cache: IndexCache, request: int, blocks: int, precision: torch.dtype) -> tuple[Tensor, Tensor]:
    """The first `blocks` block keys of a request.

    Returns keys [blocks, index_dim] in `precision`, 0 on a hole, and present [blocks] bool, False on a hole.
    """
    page, place = locate(cache.page_table, request, torch.arange(blocks, device=cache.keys.device), cache.page_blocks)
    present = page >= 0
    keys = torch.zeros(blocks, cache.keys.shape[2], dtype=precision, device=cache.keys.device)
    keys[present] = _numbers(cache.keys[page[present], place[present]], cache.scale, precision)
    return keys, present


def read_kv(cache: KvCache, request: int, tokens: Tensor, precision: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values [present tokens, kv_heads, head_dim] of a request's tokens [n] int64, without those on a hole."""
    page, place = locate(cache.page_table, request, tokens, cache.page_tokens)
    present = page >= 0
    page, place = page[present], place[present]
    keys = _numbers(cache.keys[page, place], cache.k_scale, precision)
    return keys, _numbers(cache.values[page, place], cache.v_scale, precision)


def _numbers(stored: Tensor, scale: float | Tensor | None, precision: torch.dtype) -> Tensor:
    """Stored numbers in `precision`, times the scale of an FP8 cache; a [kv_heads] one along the last axis but one."""
    numbers = stored.to(precision)
    if isinstance(scale, Tensor):
        return numbers * scale.to(precision)[:, None]
    return numbers if scale is None else numbers * scale


def stored(numbers: Tensor, scale: float | Tensor | None, dtype: torch.dtype) -> Tensor:
    """Numbers as a cache of `dtype` stores them: rounded, and for FP8 first divided by the scale in FP32 and clamped.

    numbers  [..., dim]; a [kv_heads] scale belongs to the last axis but one
    """
    if dtype != FP8:
        return numbers.to(dtype)
    divisor = scale.float()[:, None] if isinstance(scale, Tensor) else torch.tensor(scale, device=numbers.device)
    return (numbers.float() / divisor).clamp(-448.0, 448.0).to(FP8)
