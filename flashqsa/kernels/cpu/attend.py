"""Grouped-query attention of each group of rows over the union of its blocks, in FP32."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flashqsa.kernels.cpu.paging import FP8_UNIT, Buffer, Ints, Pool, pages_of
from flashqsa.plan import AttendPlan
from flashqsa.values import FP8, KvCache, Partial, QsaSpec, Rows, Worklist


def attend(q: Tensor, kv_cache: KvCache, work: Worklist, rows: Rows, spec: QsaSpec, plan: AttendPlan) -> Partial:
    """Attention of every row over its entries of the worklist, up to the row's own position, in one part.

    q  [rows, q_heads, head_dim], any float dtype

    Logits, softmax and sums are FP32 whatever the storage dtypes. A row without entries gets output 0 and lse -inf.
    Keys and values of tokens that no row of a group attends to never reach a product; of tokens that some row attends
    to, numbers that are not finite may spread to the group's other rows.
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


@dataclass(frozen=True)
class _Bounds:
    """What keeps a group's rows to their own tokens in a span of its union.

    bias        [rows, 1, tokens] FP32, 0 or -inf, added to the logits; None where every row attends to every token
    unattended  tokens of the span that no row attends to, ascending
    idle        [n] int64, rows that attend to no token of the span; None where there is none
    """

    bias: Tensor | None = None
    unattended: tuple[int, ...] = ()
    idle: Tensor | None = None


class _Attend:
    """One call's buffers and look-ups, kept from group to group."""

    def __init__(
        self, q: Tensor, kv_cache: KvCache, work: Worklist, rows: Rows, spec: QsaSpec, plan: AttendPlan
    ) -> None:
        block_tokens = spec.block_tokens
        self.spec = spec
        self.q = q.detach().view(rows.count, spec.kv_heads, spec.heads_per_kv_head, spec.head_dim)
        self.position = rows.position.numpy().astype(np.int64)
        self.block, self.mask = work.block.numpy(), work.row_mask.numpy()
        sizes, entries = np.diff(work.group_rows.numpy()), np.diff(work.group_entries.numpy())
        self.request = rows.request.numpy()
        self.page_table, self.page_tokens = kv_cache.page_table, kv_cache.page_tokens
        self.k_factor, self.v_factor = _factors(kv_cache, spec)
        self.keys, self.values = (Pool(tensor, block_tokens) for tensor in (kv_cache.keys, kv_cache.values))
        self.tile = max(min(plan.config.tile_tokens // block_tokens, int(entries.max())), 1)
        self.row_blocks = plan.config.row_tokens // block_tokens
        self.buffer = Buffer(kv_cache.keys.dtype, self.tile * block_tokens * spec.kv_heads * spec.head_dim)
        most_rows = int(sizes.max())
        # Most logits per head of any group's softmax, whose spans end with whole blocks.
        logits = int((sizes * np.minimum(entries, np.maximum(self.row_blocks // sizes, 1))).max()) * block_tokens
        self.logits = torch.empty(spec.q_heads * logits, dtype=torch.float32)
        self.bias = torch.empty(logits, dtype=torch.float32)
        self.queries = torch.empty(most_rows * spec.q_heads * spec.head_dim, dtype=torch.float32)
        self.products = torch.empty_like(self.queries)

    def group(self, start: int, stop: int, first: int, last: int, output: Tensor, lse: Tensor) -> None:
        """Attends rows `start .. stop` to the entries `first .. last`; writes output and lse of these rows."""
        spec, count = self.spec, stop - start
        shape = (spec.kv_heads, count, spec.heads_per_kv_head, spec.head_dim)
        elements = count * spec.q_heads * spec.head_dim
        queries, products = self.queries[:elements].view(shape), self.products[:elements].view(shape)
        torch.mul(self.q[start:stop].transpose(0, 1), self.k_factor, out=queries)
        total = output.view(count, *shape[:1], *shape[2:]).transpose(0, 1)
        total_lse = lse.view(count, spec.kv_heads, spec.heads_per_kv_head).transpose(0, 1)
        span = max(self.row_blocks // count, 1)
        for begin in range(first, last, span):
            part_lse = self._span(queries, products, start, stop, begin, min(begin + span, last))
            if begin == first:
                total.copy_(products)
                total_lse.copy_(part_lse)
            else:
                _merge_span(total, total_lse, products, part_lse)
        if self.v_factor is not None:
            total.mul_(self.v_factor)

    def _span(self, queries: Tensor, products: Tensor, start: int, stop: int, begin: int, end: int) -> Tensor:
        """Attention over the entries `begin .. end`: the normalised output goes into `products`.

        Returns its lse [kv_heads, rows, heads_per_kv_head].
        """
        spec, count = self.spec, stop - start
        # Tokens after the group's last row are the end of the last, open block.
        past = (int(self.block[end - 1]) + 1) * spec.block_tokens - 1 - int(self.position[stop - 1])
        tokens = (end - begin) * spec.block_tokens - max(past, 0)
        bounds = self._bounds(start, stop, begin, end, tokens)
        place = self._place(int(self.request[start]), self.block[begin:end].astype(np.int64))
        lines, out = queries.flatten(1, 2), products.flatten(1, 2)
        logits = self.logits[: count * spec.q_heads * tokens].view(spec.kv_heads, -1, tokens)
        step = self.tile * spec.block_tokens
        for at in range(0, tokens, step):
            keys = self._tile(self.keys, place, at, min(at + step, tokens), bounds)
            torch.bmm(lines, keys.transpose(1, 2), out=logits[:, :, at : at + keys.shape[1]])
        by_row = logits.view(spec.kv_heads, count, -1, tokens)
        if bounds.bias is not None:
            by_row.add_(bounds.bias)
        greatest = torch.amax(by_row, -1)
        torch.softmax(logits, -1, out=logits)
        # The greatest probability is 1 / (sum of exp(logit - greatest logit)).
        part_lse = greatest.sub_(torch.amax(by_row, -1).log_())
        for at in range(0, tokens, step):
            values = self._tile(self.values, place, at, min(at + step, tokens), bounds)
            torch.baddbmm(out, logits[:, :, at : at + values.shape[1]], values, beta=float(at > 0), out=out)
        if bounds.idle is not None:
            part_lse[:, bounds.idle] = float("-inf")
            products[:, bounds.idle] = 0.0
        return part_lse

    def _place(self, request: int, block: Ints) -> tuple[Ints, Ints]:
        """Page of each block of a request, and which of the page's blocks it is."""
        page_blocks = self.page_tokens // self.spec.block_tokens
        return pages_of(self.page_table, request, block, page_blocks), block % page_blocks

    def _tile(self, pool: Pool, place: tuple[Ints, Ints], start: int, stop: int, bounds: _Bounds) -> Tensor:
        """Keys or values of tokens `start .. stop` of a span: [kv_heads, tokens, head_dim], 0 where unattended.

        place  page of each of the span's blocks, and which of the page's blocks it is
        """
        page, block_in_page = place
        first, last = start // self.spec.block_tokens, -(-stop // self.spec.block_tokens)
        found = pool.read(page[first:last], block_in_page[first:last], self.buffer)[:, : stop - start]
        for token in bounds.unattended:
            if start <= token < stop:
                found[:, token - start] = 0.0
        return found

    def _bounds(self, start: int, stop: int, begin: int, end: int, tokens: int) -> _Bounds:
        """What keeps rows `start .. stop` to their own tokens among the first `tokens` of entries `begin .. end`."""
        count, block_tokens = stop - start, self.spec.block_tokens
        if count == 1:
            return _Bounds()
        words, block, at = self.mask[begin:end], self.block[begin:end], self.position[start:stop]
        # Blocks from here on may end after a row of the group.
        open_from = int(np.searchsorted(block, (int(at[0]) + 1) // block_tokens))
        if open_from == end - begin and bool((words == _everyone(count)).all()):
            return _Bounds()
        # Little-endian words: bit i is bit i % 8 of byte i // 8.
        octets = words.astype("<i8").view(np.uint8).reshape(-1, 8)[:, : -(-count // 8)]
        bits = np.unpackbits(octets, axis=1, count=count, bitorder="little")
        attends = np.ascontiguousarray(bits.T).view(np.bool_)
        by_entry = torch.from_numpy(np.where(attends, np.float32(0), np.float32(-np.inf)))
        bias = self.bias[: count * (end - begin) * block_tokens].view(count, end - begin, block_tokens)
        bias.copy_(by_entry[:, :, None].expand_as(bias))
        flat = bias.view(count, -1)
        unattended: tuple[int, ...] = ()
        if open_from < end - begin:
            token = (block[open_from:, None] * np.int64(block_tokens) + np.arange(block_tokens)).reshape(-1)
            last_part = flat[:, open_from * block_tokens :].numpy()
            last_part[token > at[:, None]] = -np.inf
            nobody = np.flatnonzero(np.isneginf(last_part).all(axis=0)) + open_from * block_tokens
            unattended = tuple(nobody[nobody < tokens].tolist())
        idle: Tensor | None = None
        busy = attends.any(axis=1)
        if not busy.all():
            idle = torch.from_numpy(np.flatnonzero(~busy))
            flat[idle] = 0.0
        return _Bounds(flat[:, None, :tokens], unattended, idle)


def _everyone(count: int) -> int:
    """The word with a bit for each of `count` rows, as a signed 64-bit number."""
    return (1 << count) - 1 if count < 64 else -1


def _merge_span(total: Tensor, total_lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Adds a span's normalised output to the output so far, each weighted by its share of the softmax sum."""
    both = torch.logaddexp(total_lse, part_lse)
    # A row that has seen nothing yet keeps output 0: exp(-inf - -inf) would be NaN.
    reference = both.masked_fill(both == float("-inf"), 0.0)
    total.mul_(torch.exp(total_lse - reference)[..., None])
    part.mul_(torch.exp(part_lse - reference)[..., None])
    total.add_(part)
    total_lse.copy_(both)


def _factors(kv_cache: KvCache, spec: QsaSpec) -> tuple[Tensor, Tensor | None]:
    """What queries are multiplied by (softmax scale and the keys' scale), and outputs (the values' scale; None for 1).

    Each [kv_heads or 1, 1, 1, 1] FP32.
    """
    if kv_cache.keys.dtype != FP8:
        return torch.tensor(spec.softmax_scale, dtype=torch.float32).view(1, 1, 1, 1), None
    k_scale, v_scale = (
        torch.as_tensor(1.0 if scale is None else scale, dtype=torch.float32).detach().reshape(-1, 1, 1, 1)
        for scale in (kv_cache.k_scale, kv_cache.v_scale)
    )
    return k_scale * (spec.softmax_scale * FP8_UNIT), v_scale * FP8_UNIT
