"""QSA functions with vLLM 0.32's signatures: its metadata become `Rows` and caches, and the public calls do the work.

`visible_blocks` counts a row's complete blocks. vLLM's *packed selection* is a token table [rows, token_topk +
compress_ratio] int32: the tokens of a row's blocks, its tail, then -1, and in the last column how many tokens there
are. Expansion writes it where it lies, and attention reads it there.

No page table or cache is copied. No function reads a tensor on the host, so a CUDA graph can hold each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashqsa import pipeline
from flashqsa.integrations.vllm.errors import LayoutError
from flashqsa.integrations.vllm.layout import check_shape, top_blocks_of
from flashqsa.values import FP8, MAX_TOKENS, IndexCache, KvCache, QsaSpec, Rows, Selection

BLOCK_TOKENS = 4
"""Tokens per block of a packed selection: vLLM's attention call does not say, and every model so far has 4."""


def qsa_select_paged_decode(
    q: Tensor,
    k_cache: Tensor,
    page_table: Tensor,
    visible_blocks: Tensor,
    token_topk: int,
    compress_ratio: int,
    decode_query_len: int,
    block_indices: Tensor,
) -> None:
    """Selects the blocks of requests that have `decode_query_len` rows each: tokens that follow one another.

    q               [requests * decode_query_len, index_heads, index_dim], request by request, in the cache's dtype
    k_cache         [pages, page_blocks, 1, index_dim] of pooled keys; an E4M3 cache has no scale
    page_table      [requests, table_pages] int32
    visible_blocks  [rows] int32; 0 for padding
    block_indices   [rows, token_topk / compress_ratio] int32, written: ascending block ids, then -1

    Raises LayoutError, and what `select_blocks` raises.
    """
    rows = q.shape[0]
    if decode_query_len < 1 or rows != page_table.shape[0] * decode_query_len:
        wanted = f"{page_table.shape[0]} requests of {decode_query_len} rows, at least 1"
        raise LayoutError("q", wanted, f"{rows} rows")
    if rows == 0:
        return
    request = torch.arange(rows, dtype=torch.int32, device=q.device) // decode_query_len
    _select(q, k_cache, page_table, request, visible_blocks, token_topk, compress_ratio, block_indices, MAX_TOKENS)


def qsa_select_paged_prefill(
    q: Tensor,
    k_cache: Tensor,
    page_table: Tensor,
    query_start_loc: Tensor,
    visible_blocks: Tensor,
    token_topk: int,
    compress_ratio: int,
    max_query_len: int,
    block_indices: Tensor,
    max_seq_len: int,
) -> None:
    """Selects the blocks of requests with any number of rows each.

    query_start_loc  [requests + 1] int32, the first row of each request and the end of the last; counted from the first
                     entry, since it may be part of a longer table
    max_seq_len      host bound on the tokens of a request

    The other arguments and errors are those of `qsa_select_paged_decode`. Rows past the end are padding.
    """
    del max_query_len  # a plan needs no bound on it
    rows, requests = q.shape[0], page_table.shape[0]
    if query_start_loc.shape != (requests + 1,):
        raise LayoutError("query_start_loc", f"{requests + 1} entries for {requests} requests", query_start_loc.shape)
    if rows == 0:
        return
    at = torch.arange(rows, dtype=query_start_loc.dtype, device=q.device) + query_start_loc[0]
    request = torch.searchsorted(query_start_loc[1:], at, right=True, out_int32=True)
    request = torch.where(request < requests, request, -1)
    _select(q, k_cache, page_table, request, visible_blocks, token_topk, compress_ratio, block_indices, max_seq_len)


def _select(
    q: Tensor,
    k_cache: Tensor,
    page_table: Tensor,
    request: Tensor,
    visible_blocks: Tensor,
    token_topk: int,
    compress_ratio: int,
    block_indices: Tensor,
    most_tokens: int,
) -> None:
    spec = QsaSpec(
        index_heads=q.shape[1],
        index_dim=q.shape[2],
        block_tokens=compress_ratio,
        top_blocks=top_blocks_of(token_topk, compress_ratio),
    )
    check_shape("k_cache", k_cache, (None, None, 1, spec.index_dim))
    check_shape("visible_blocks", visible_blocks, (q.shape[0],))
    check_shape("block_indices", block_indices, (q.shape[0], spec.top_blocks))
    fp8 = k_cache.dtype == FP8
    cache = IndexCache(k_cache[:, :, 0], page_table, 1.0 if fp8 else None)
    # The last block that a table has room for may have a tail behind it, which needs no key.
    most = min(most_tokens, cache.capacity_blocks * compress_ratio + compress_ratio - 1, MAX_TOKENS)
    rows = Rows(request, positions_of(request, visible_blocks, compress_ratio), most - 1)
    # Every E4M3 number is an FP16 number, which every GPU multiplies.
    selection = pipeline.select_blocks(q.to(torch.float16) if q.dtype == FP8 else q, cache, rows, spec)
    block_indices.copy_(selection.blocks)


def positions_of(request: Tensor, visible_blocks: Tensor, block_tokens: int) -> Tensor:
    """Ascending positions [rows] int32 at which rows see so many complete blocks; -1 where they see none.

    request, visible_blocks  [rows] int32; rows of one request are consecutive tokens

    vLLM does not hand positions to its selection, and a selection needs no more of them than what they see.

    >>> positions_of(torch.tensor([0, 0, 0, 1], dtype=torch.int32), torch.tensor([2, 2, 3, 0], dtype=torch.int32), 4)
    tensor([ 7,  8, 11, -1], dtype=torch.int32)
    """
    index = torch.arange(request.shape[0], dtype=torch.int32, device=request.device)
    opens = torch.ones_like(request, dtype=torch.bool)
    opens[1:] = (request[1:] != request[:-1]) | (visible_blocks[1:] != visible_blocks[:-1])
    first = torch.where(opens, index, 0).cummax(0).values
    # No more than a block's tokens see the same blocks.
    after = (index - first).clamp(max=block_tokens - 1)
    seen = visible_blocks.to(torch.int32)
    return torch.where(seen > 0, seen * block_tokens - 1 + after, -1)


def expand_qsa_block_indices(
    block_indices: Tensor,
    query_positions: Tensor,
    visible_blocks: Tensor,
    compress_ratio: int,
    token_topk: int,
    out: Tensor,
) -> None:
    """Writes the packed selection of some rows: the tokens of their blocks, their tails, -1, and the counts.

    block_indices    [rows, token_topk / compress_ratio] int32, the blocks first, then anything that is negative
    query_positions  [rows] of any integer dtype; negative for padding
    visible_blocks   [rows] int32; entries past so many are not looked at
    out              [rows, token_topk + compress_ratio] int32, last stride 1

    Raises LayoutError, for another compress_ratio than BLOCK_TOKENS too: attention would take it for that.
    """
    if compress_ratio != BLOCK_TOKENS:
        raise LayoutError("compress_ratio", f"{BLOCK_TOKENS}, as attention reads the selection", compress_ratio)
    rows, top_blocks = query_positions.shape[0], top_blocks_of(token_topk, compress_ratio)
    check_shape("block_indices", block_indices, (rows, top_blocks))
    check_shape("visible_blocks", visible_blocks, (rows,))
    check_shape("out", out, (rows, token_topk + compress_ratio))
    if out.dtype != torch.int32 or out.stride(1) != 1:
        raise LayoutError("out", "int32 with a last stride of 1", f"{out.dtype} with strides {out.stride()}")
    column = torch.arange(top_blocks, dtype=torch.int32, device=out.device)
    offset = torch.arange(compress_ratio, dtype=torch.int32, device=out.device)
    chosen = (column < visible_blocks[:, None]) & (block_indices >= 0)
    held = chosen.sum(dim=1, dtype=torch.int32) * compress_ratio
    tokens = out[:, :token_topk].view(rows, top_blocks, compress_ratio)
    first = torch.where(chosen, block_indices * compress_ratio, -compress_ratio)
    torch.add(first[..., None], offset, out=tokens)
    tokens.clamp_(min=-1)
    out[:, token_topk:] = -1
    seen = (query_positions + 1).clamp(min=0).to(torch.int32)
    tail = seen % compress_ratio
    # Offsets past the tail land in the column of counts, which is written after them.
    place = torch.where(offset < tail[:, None], held[:, None] + offset, token_topk + compress_ratio - 1)
    out.scatter_(1, place.long(), (seen - tail)[:, None] + offset)
    out[:, -1] = held + tail


def qsa_sparse_paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    logical_indices: Tensor,
    block_table: Tensor,
    token_to_req: Tensor,
    use_prefill_config: bool,
    out: Tensor | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    *,
    output_gate: Tensor,
) -> Tensor:
    """Gated attention of each row over its packed selection.

    q                  [rows, q_heads, head_dim]
    k_cache, v_cache   [pages, page_tokens, kv_heads, head_dim] in q's dtype, or E4M3 with its scales
    logical_indices    [rows, token_topk + BLOCK_TOKENS] int32, as `expand_qsa_block_indices` writes it: a row may be
                       used again later, or moved, and means the same blocks and tail
    block_table        [requests, table_pages] int32
    token_to_req       [rows] int32; that of a row whose count is 0 is not looked at
    out                as q, written and returned; fresh memory where it is None
    k_scale, v_scale   of an E4M3 cache; not looked at for others
    output_gate        as q, or with its heads flat, before its sigmoid

    A row with nothing selected gets 0. Raises LayoutError, and what `sparse_attention` raises.
    """
    del use_prefill_config  # a route is chosen from the batch itself
    rows, width = q.shape[0], logical_indices.shape[-1]
    check_shape("logical_indices", logical_indices, (rows, None))
    if width % BLOCK_TOKENS or width < 2 * BLOCK_TOKENS:
        wanted = f"columns for whole blocks of {BLOCK_TOKENS} tokens, at least one, a tail and a count"
        raise LayoutError("logical_indices", wanted, width)
    if out is not None:
        check_shape("out", out, tuple(q.shape))
    if rows == 0:
        return torch.empty_like(q) if out is None else out
    spec = QsaSpec(
        q_heads=q.shape[1],
        kv_heads=k_cache.shape[2],
        head_dim=q.shape[2],
        block_tokens=BLOCK_TOKENS,
        top_blocks=width // BLOCK_TOKENS - 1,
    )
    fp8 = k_cache.dtype == FP8
    cache = KvCache(k_cache, v_cache, block_table, k_scale if fp8 else None, v_scale if fp8 else None)
    most = min(cache.capacity_tokens, MAX_TOKENS)
    found = Rows(token_to_req, positions_in_table(logical_indices, token_to_req, BLOCK_TOKENS), most - 1)
    selection = selection_of_table(logical_indices, BLOCK_TOKENS)
    output = pipeline.sparse_attention(q, cache, selection, found, spec, output_gate.view_as(q))
    assert isinstance(output, Tensor)
    return output if out is None else out.copy_(output)


def selection_of_table(table: Tensor, block_tokens: int) -> Selection:
    """The blocks of a packed selection that `expand_qsa_block_indices` wrote: every block_tokens-th column is a block's
    first token. (`Selection.from_token_table` reads tables in any order, and sorts them for that.)
    """
    count = torch.div(_counts(table), block_tokens, rounding_mode="floor")
    blocks = torch.div(table[:, :-block_tokens:block_tokens], block_tokens, rounding_mode="floor")
    column = torch.arange(blocks.shape[1], dtype=torch.int32, device=table.device)
    return Selection(torch.where(column < count[:, None], blocks, -1), count)


def positions_in_table(table: Tensor, token_to_req: Tensor, block_tokens: int) -> Tensor:
    """Positions [rows] int32 of the rows of a packed selection; -1 for rows with nothing selected.

    A row with a tail stands at the table's last token. A row that closes a block has no tail: it stands between its
    neighbours of the same request, which have one; where it has no neighbour, the end of its last block is as good,
    since it sees no more than the table holds.
    """
    count = _counts(table)
    tail = count % block_tokens
    last = table.gather(1, (count - 1).clamp(min=0).long()[:, None])[:, 0]
    position = last.clone()
    beside = token_to_req[1:] == token_to_req[:-1]
    after = beside & (tail[1:] == 0) & (tail[:-1] == block_tokens - 1)
    before = beside & (tail[:-1] == 0) & (tail[1:] == 1)
    position[1:] = torch.where(after, last[:-1] + 1, position[1:])
    position[:-1] = torch.where(before, last[1:] - 1, position[:-1])
    return torch.where(count > 0, position, -1)


def _counts(table: Tensor) -> Tensor:
    """The column of counts; a row that nobody wrote yet may hold any number, of which no column is made."""
    return table[:, -1].clamp(0, table.shape[1] - 1)
