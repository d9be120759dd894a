"""Grouped-query attention of each group of rows over the union of its blocks, in FP32."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from flashqsa.kernels.cpu.paging import FP8_UNIT, Pool, fits_one_window, pages_of
from flashqsa.plan import AttendPlan
from flashqsa.values import FP8, KvCache, Partial, QsaSpec, Rows, Worklist


def attend(q: Tensor, kv_cache: KvCache, work: Worklist, rows: Rows, spec: QsaSpec, plan: AttendPlan) -> Partial:
    """Attention of every row over its entries of the worklist, up to the row's own position, in one part.

    q  [rows, q_heads, head_dim], any float dtype

    Logits, softmax and sums are FP32 whatever the storage dtypes; a union of more than a tile goes through an online
    softmax. A row without entries gets output 0 and lse -inf. Keys and values of tokens that no row of a group attends
    to never reach a product.
    """
    output = torch.empty((1, rows.count, spec.q_heads, spec.head_dim), dtype=torch.float32)
    lse = torch.empty((1, rows.count, spec.q_heads), dtype=torch.float32)
    if work.block.shape[0] == 0:
        return Partial(output.zero_(), lse.fill_(float("-inf")))
    stage = _Attend(q, kv_cache, work, rows, spec, plan)
    group_rows, group_entries = work.group_rows.tolist(), work.group_entries.tolist()
    for group in range(work.groups):
        start, stop = group_rows[group], group_rows[group + 1]
        first, last = group_entries[group], group_entries[group + 1]
        if first == last:
            output[0, start:stop] = 0.0
            lse[0, start:stop] = float("-inf")
        else:
            stage.group(start, stop, first, last, output[0, start:stop], lse[0, start:stop])
    return Partial(output, lse)


class _Attend:
    """One call's buffers and look-ups, kept from group to group."""

    def __init__(
        self, q: Tensor, kv_cache: KvCache, work: Worklist, rows: Rows, spec: QsaSpec, plan: AttendPlan
    ) -> None:
        self.spec = spec
        self.q = q.detach().view(rows.count, spec.kv_heads, spec.heads_per_kv_head, spec.head_dim)
        self.position = rows.position.numpy().astype(np.int64)
        self.block = work.block.numpy().astype(np.int64)
        self.mask = work.row_mask.numpy()
        entries = np.diff(work.group_entries.numpy())
        request = rows.request.numpy().astype(np.int64)[np.minimum(work.group_rows.numpy()[:-1], rows.count - 1)]
        self.page = pages_of(
            kv_cache.page_table, np.repeat(request, entries), self.block * spec.block_tokens, kv_cache.page_tokens
        )
        self.block_in_page = self.block % (kv_cache.page_tokens // spec.block_tokens)
        self.k_scale, self.v_scale = _scales(kv_cache, spec)
        most_rows = int(np.diff(work.group_rows.numpy()).max())
        self.tile = max(min(plan.config.tile_tokens // spec.block_tokens, int(entries.max())), 1)
        tokens = self.tile * spec.block_tokens
        if fits_one_window(kv_cache.keys, kv_cache.values):
            self.pools = [Pool((kv_cache.keys, kv_cache.values), spec.block_tokens, self.tile)]
        else:
            self.pools = [Pool((t,), spec.block_tokens, self.tile) for t in (kv_cache.keys, kv_cache.values)]
        self.queries = torch.empty(most_rows * spec.q_heads * spec.head_dim, dtype=torch.float32)
        self.products = torch.empty_like(self.queries)
        self.logits = torch.empty(most_rows * spec.q_heads * tokens, dtype=torch.float32)
        self.bias = torch.empty(most_rows * tokens, dtype=torch.float32)

    def group(self, start: int, stop: int, first: int, last: int, output: Tensor, lse: Tensor) -> None:
        """Attends rows `start .. stop` to the entries `first .. last`; writes output and lse of these rows."""
        spec, count = self.spec, stop - start
        kv_heads, share, dim = spec.kv_heads, spec.heads_per_kv_head, spec.head_dim
        shape = (kv_heads, count, share, dim)
        queries = self.queries[: count * spec.q_heads * dim].view(shape)
        torch.mul(self.q[start:stop].transpose(0, 1), self.k_scale, out=queries)
        products = self.products[: queries.numel()].view(shape)
        total = output.view(count, kv_heads, share, dim).transpose(0, 1)
        total_lse = lse.view(count, kv_heads, share).transpose(0, 1)
        for begin in range(first, last, self.tile):
            end = min(begin + self.tile, last)
            part_lse = self._tile(queries, products, start, stop, begin, end)
            if begin == first:
                total.copy_(products)
                total_lse.copy_(part_lse)
            else:
                _merge_tile(total, total_lse, products, part_lse)
        if self.v_scale is not None:
            total.mul_(self.v_scale)

    def _tile(self, queries: Tensor, products: Tensor, start: int, stop: int, begin: int, end: int) -> Tensor:
        """One tile's normalised output into `products`; returns its lse [kv_heads, rows, heads_per_kv_head]."""
        spec, count = self.spec, stop - start
        kv_heads, share = spec.kv_heads, spec.heads_per_kv_head
        page, block_in_page = self.page[begin:end], self.block_in_page[begin:end]
        keys, values = (part for pool in self.pools for part in pool.read(page, block_in_page))
        # Tokens after the group's last row are the end of the last, open block.
        past = (int(self.block[end - 1]) + 1) * spec.block_tokens - 1 - int(self.position[stop - 1])
        tokens = (end - begin) * spec.block_tokens - max(past, 0)
        keys, values = keys[:, :tokens], values[:, :tokens]
        bias, unattended, idle = self._bias(start, stop, begin, end, tokens)
        if unattended is not None:
            keys[:, unattended] = 0.0
            values[:, unattended] = 0.0
        logits = self.logits[: count * spec.q_heads * tokens].view(kv_heads, count * share, tokens)
        torch.bmm(queries.flatten(1, 2), keys.transpose(1, 2), out=logits)
        by_row = logits.view(kv_heads, count, share, tokens)
        if bias is not None:
            by_row.add_(bias)
        greatest = torch.amax(by_row, -1)
        torch.softmax(logits, -1, out=logits)
        # The greatest probability is 1 / sum of exp(logit - greatest).
        part_lse = greatest.sub_(torch.amax(by_row, -1).log_())
        torch.bmm(logits, values, out=products.flatten(1, 2))
        if idle is not None:
            part_lse[:, idle] = float("-inf")
            products[:, idle] = 0.0
        return part_lse

    def _bias(
        self, start: int, stop: int, begin: int, end: int, tokens: int
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """What keeps rows to their own tokens in a tile.

        Returns the bias of the logits ([rows, 1, tokens], 0 or -inf; None where every row attends to every token), the
        tokens that no row attends to, and the rows that attend to none (None where there is no such token or row).
        """
        count, block_tokens = stop - start, self.spec.block_tokens
        if count == 1:
            return None, None, None
        words = self.mask[begin:end]
        at = self.position[start:stop]
        # Blocks from here on may end after a row of the group.
        open_from = int(np.searchsorted(self.block[begin:end], (int(at[0]) + 1) // block_tokens))
        if open_from == end - begin and bool((words == words[0]).all()) and int(words[0]) == _ones(count):
            return None, None, None
        bits = np.unpackbits(words.astype("<i8").view(np.uint8).reshape(-1, 8), axis=1, bitorder="little")
        attends = np.ascontiguousarray(bits[:, :count].T).view(np.bool_)
        by_entry = np.where(attends, np.float32(0), np.float32(-np.inf))
        bias = self.bias[: count * (end - begin) * block_tokens].view(count, end - begin, block_tokens)
        bias.copy_(torch.from_numpy(by_entry)[:, :, None].expand_as(bias))
        flat = bias.view(count, -1)
        unattended: Tensor | None = None
        if open_from < end - begin:
            token = self.block[begin + open_from : end, None] * block_tokens + np.arange(block_tokens)
            late = token.reshape(-1) > at[:, None]
            tail = flat[:, open_from * block_tokens :].numpy()
            tail[late] = -np.inf
            nobody = np.flatnonzero(np.isneginf(tail).all(axis=0)) + open_from * block_tokens
            nobody = nobody[nobody < tokens]
            unattended = torch.from_numpy(nobody) if nobody.size else None
        idle: Tensor | None = None
        busy = attends.any(axis=1)
        if not busy.all():
            idle = torch.from_numpy(np.flatnonzero(~busy))
            flat[idle] = 0.0
        return flat[:, None, :tokens], unattended, idle


def _ones(count: int) -> int:
    """A 64-bit word with the lowest `count` bits set, as a signed number."""
    return (1 << count) - 1 if count < 64 else -1


def _merge_tile(total: Tensor, total_lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Adds a tile's normalised output to the output so far, each weighted by its share of the softmax sum."""
    both = torch.logaddexp(total_lse, part_lse)
    # A row that has seen nothing yet keeps output 0: exp(-inf - -inf) would be NaN.
    reference = both.masked_fill(both == float("-inf"), 0.0)
    total.mul_(torch.exp(total_lse - reference)[..., None])
    part.mul_(torch.exp(part_lse - reference)[..., None])
    total.add_(part)
    total_lse.copy_(both)


def _per_head(scale: float | Tensor) -> Tensor:
    """A scale as [kv_heads or 1, 1, 1, 1] FP32."""
    return torch.as_tensor(scale, dtype=torch.float32).reshape(-1, 1, 1, 1)


def _scales(kv_cache: KvCache, spec: QsaSpec) -> tuple[Tensor, Tensor | None]:
    """Factor of the queries (softmax scale and the keys' scale), and of the output (the values' scale; None for 1)."""
    if kv_cache.keys.dtype != FP8:
        return _per_head(spec.softmax_scale), None
    k_scale = _per_head(1.0 if kv_cache.k_scale is None else kv_cache.k_scale)
    v_scale = _per_head(1.0 if kv_cache.v_scale is None else kv_cache.v_scale)
    return k_scale * (spec.softmax_scale * FP8_UNIT), v_scale * FP8_UNIT
