"""Writing new keys and values to the caches, token by token."""

from __future__ import annotations

import torch
from torch import Tensor

from flashqsa.reference.paging import locate, stored
from flashqsa.reference.score import pool_block_key
from flashqsa.values import IndexCache, KvCache, QsaSpec, Rows


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
    """Stores each row's raw key in the ring; a row that closes a block pools the ring's last keys into the block's key.

    raw_keys     [rows, index_dim] in the ring's dtype
    norm_weight  [index_dim]
    cos, sin     [rows, rotary_dim], rotary angles of the first token of the block the row is in

    Padding is dropped, and so is the key of a block on a hole. Writes in place.
    """
    ring = index_cache.raw_keys
    if ring is None:
        raise ValueError("write_index_keys needs an index cache with raw_keys")
    for row in range(rows.count):
        request, position = int(rows.request[row]), int(rows.position[row])
        if request < 0 or position < 0:
            continue
        ring[request, position % ring.shape[1]] = raw_keys[row]
        if (position + 1) % spec.block_tokens:
            continue
        tokens = torch.arange(position + 1 - spec.block_tokens, position + 1, device=ring.device)
        key = pool_block_key(ring[request, tokens % ring.shape[1]], norm_weight, cos[row], sin[row], eps)
        page, place = locate(index_cache.page_table, request, tokens[:1] // spec.block_tokens, index_cache.page_blocks)
        if int(page) >= 0:
            index_cache.keys[page, place] = stored(key[None], index_cache.scale, index_cache.keys.dtype)


def write_kv(keys: Tensor, values: Tensor, kv_cache: KvCache, rows: Rows) -> None:
    """Stores each row's key and value at its position; padding and rows on a hole are dropped.

    keys, values  [rows, kv_heads, head_dim]
    """
    for row in range(rows.count):
        request, position = int(rows.request[row]), rows.position[row : row + 1].long()
        if request < 0 or int(position) < 0:
            continue
        page, place = locate(kv_cache.page_table, request, position, kv_cache.page_tokens)
        if int(page) >= 0:
            kv_cache.keys[page, place] = stored(keys[row : row + 1], kv_cache.k_scale, kv_cache.keys.dtype)
            kv_cache.values[page, place] = stored(values[row : row + 1], kv_cache.v_scale, kv_cache.values.dtype)
