"""Index scores of a chunk of rows, and the selections that need none."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from flashqsa.kernels.cpu.paging import FP8_UNIT, Buffer, Ints, Pool, Run, pages_of, request_runs
from flashqsa.plan import SelectPlan
from flashqsa.values import FP8, IndexCache, QsaSpec, Rows, Scores, Selection

TILE_ROWS = 64
"""Rows scored at a time against a tile of keys."""

TILE_PRODUCTS = 1 << 18
"""Products of a tile's rows, heads and keys: 1 MiB, so that the passes over them stay in cache."""

TILE_BLOCKS = 2048
"""Most index keys gathered at a time: 1 MiB of 128 FP32 dims."""

PIECE_BLOCKS = 64
"""Most index keys copied as one piece of a page."""


def empty_selection(rows: Rows, spec: QsaSpec) -> Selection:
    """A selection of nothing, for `topk` to write into."""
    blocks = torch.full((rows.count, spec.top_blocks), -1, dtype=torch.int32)
    return Selection(blocks, torch.zeros(rows.count, dtype=torch.int32))


def select_everything(index_cache: IndexCache, rows: Rows, spec: QsaSpec, _plan: SelectPlan | None = None) -> Selection:
    """Every visible block that is not on a hole; for calls where no row sees more than `top_blocks` of them."""
    selection = empty_selection(rows, spec)
    blocks, count = selection.blocks.numpy(), selection.count.numpy()
    visible = rows.visible_blocks(spec).numpy()
    for run in request_runs(rows):
        most = int(visible[run.start : run.stop].max(initial=0))
        if run.request < 0 or most == 0:
            continue
        present = np.flatnonzero(_pages(index_cache, run.request, most) >= 0)
        held = np.searchsorted(present, visible[run.start : run.stop])
        count[run.start : run.stop] = held
        columns = present.shape[0]
        blocks[run.start : run.stop, :columns] = np.where(np.arange(columns) < held[:, None], present, -1)
    return selection


def score(
    index_q: Tensor, index_cache: IndexCache, rows: Rows, spec: QsaSpec, plan: SelectPlan | None = None
) -> Scores:
    """Scores of each row's visible blocks: index_dim^(-1/2) * sum over heads of relu(<index_q, key>), in FP32.

    index_q  [rows, index_heads, index_dim], a chunk of a call's rows

    Returns scores as wide as the most blocks any of these rows sees. A block on a hole scores -inf. A row that sees no
    more than `top_blocks` blocks takes them all, so its scores are 0 without a product.

    A plan that is batch invariant has each row scored alone: the shape of a product decides its bits.
    """
    visible = rows.visible_blocks(spec)
    seen = visible.numpy().astype(np.int64)
    values = torch.empty((rows.count, int(seen.max(initial=0))), dtype=torch.float32)
    scale = spec.score_scale
    if index_cache.keys.dtype == FP8:
        scale *= FP8_UNIT * (1.0 if index_cache.scale is None else index_cache.scale)
    keys: _Keys | None = None
    most_rows = 1 if plan is not None and plan.batch_invariant else rows.count
    for run in request_runs(rows):
        if run.request < 0:
            continue
        # Positions ascend within a run, so the rows that take everything come first.
        few = run.start + int(np.searchsorted(seen[run.start : run.stop], spec.top_blocks, side="right"))
        pages = _pages(index_cache, run.request, int(seen[run.stop - 1]))
        if few > run.start:
            values[run.start : few, : seen[few - 1]] = 0.0
        if few < run.stop:
            keys = keys or _Keys(index_cache, min(most_rows, TILE_ROWS) * spec.index_heads, values.shape[1])
            for start in range(few, run.stop, most_rows):
                part = Run(start, min(start + most_rows, run.stop), run.request)
                _score_run(index_q, keys, pages[: seen[part.stop - 1]], part, seen, values, spec, scale)
        holes = torch.from_numpy(np.flatnonzero(pages < 0))
        if holes.numel():
            values[run.start : run.stop].index_fill_(1, holes, float("-inf"))
    return Scores(values, visible)


def _pages(index_cache: IndexCache, request: int, blocks: int) -> Ints:
    """Page of each of a request's first blocks; -1 on a hole."""
    return pages_of(index_cache.page_table, request, np.arange(blocks), index_cache.page_blocks)


class _Keys:
    """Index keys of a call, read a tile of consecutive blocks of one request at a time.

    lines   rows * index_heads that meet a tile at once: with few of them the tile is larger
    width   most blocks that a row sees
    """

    def __init__(self, index_cache: IndexCache, lines: int, width: int) -> None:
        self.page_blocks = index_cache.page_blocks
        # The largest divisor of a page that a piece may have: pieces are read whole.
        sizes = range(min(self.page_blocks, PIECE_BLOCKS), 0, -1)
        self.piece = next(size for size in sizes if self.page_blocks % size == 0)
        most = min(TILE_BLOCKS, max(TILE_PRODUCTS // lines, 1), width)
        self.tile = -(-most // self.piece) * self.piece
        self.pool = Pool(index_cache.keys.unsqueeze(2), self.piece)
        self.buffer = Buffer(index_cache.keys.dtype, self.tile * index_cache.keys.shape[2])

    def read(self, pages: Ints, first: int) -> Tensor | None:
        """Keys [blocks, index_dim] of the tile from block `first` on; None where it is all holes.

        pages  of the request's blocks, -1 on a hole: a key on a hole is another block's
        """
        starts = np.arange(first, min(first + self.tile, pages.shape[0]), self.piece)
        page = pages[starts]
        held = page >= 0
        if not held.any():
            return None
        page = np.where(held, page, page[held][0])
        return self.pool.read(page, starts % self.page_blocks // self.piece, self.buffer)[0]


def _score_run(
    index_q: Tensor,
    keys: _Keys,
    pages: Ints,
    run: Run,
    seen: Ints,
    values: Tensor,
    spec: QsaSpec,
    scale: float,
) -> None:
    """Scores rows of one request that see more blocks than they may select; columns on holes are left undefined."""
    heads = spec.index_heads
    queries = index_q[run.start : run.stop].detach().to(torch.float32).reshape(-1, spec.index_dim)
    products = torch.empty(min(TILE_ROWS, run.stop - run.start) * heads * keys.tile, dtype=torch.float32)
    for first in range(0, pages.shape[0], keys.tile):
        tile = keys.read(pages, first)
        if tile is None:
            continue
        row = run.start + int(np.searchsorted(seen[run.start : run.stop], first, side="right"))
        for begin in range(row, run.stop, TILE_ROWS):
            end = min(begin + TILE_ROWS, run.stop)
            blocks = min(tile.shape[0], int(seen[end - 1]) - first)
            count = (end - begin) * heads
            part = products[: count * blocks].view(count, blocks)
            lines = queries[(begin - run.start) * heads : (end - run.start) * heads]
            torch.mm(lines, tile[:blocks].T, out=part)
            by_head = part.relu_().view(end - begin, heads, blocks).unbind(1)
            total = values[begin:end, first : first + blocks]
            total.copy_(by_head[0])
            for head in by_head[1:]:
                total.add_(head)
            total.mul_(scale)
