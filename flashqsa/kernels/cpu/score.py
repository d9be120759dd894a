"""Index scores of a chunk of rows, and the selections that need none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flashqsa.config import FUSED_PIECE, FusedConfig
from flashqsa.kernels.cpu.paging import FP8_UNIT, Buffer, Ints, Pool, Run, pages_of, request_runs
from flashqsa.plan import SelectPlan
from flashqsa.values import FP8, IndexCache, QsaSpec, Rows, Scores, Selection

TILE_ROWS = 64
"""Rows scored at a time against a tile of keys."""

TILE_PRODUCTS = 1 << 18
"""Products of a tile's rows, heads and keys: 1 MiB, so that the passes over them stay in cache."""

TILE_BLOCKS = 2048
"""Most index keys gathered at a time: 1 MiB of 128 FP32 dims."""


def empty_selection(rows: Rows, spec: QsaSpec) -> Selection:
    """A selection of nothing, for `topk` to write into."""
    blocks = torch.full((rows.count, spec.top_blocks), -1, dtype=torch.int32)
    return Selection(blocks, torch.zeros(rows.count, dtype=torch.int32))


def select_everything(index_cache: IndexCache, rows: Rows, spec: QsaSpec, _plan: SelectPlan | None = None) -> Selection:
    """Every visible block that is not on a hole; for calls where no row sees more than `top_blocks` of them."""
    selection = empty_selection(rows, spec)
    visible = rows.visible_blocks(spec).numpy().astype(np.int64)
    for run in request_runs(rows):
        if run.request >= 0 and (most := int(visible[run.start : run.stop].max())) > 0:
            take_all(block_pages(index_cache, run.request, most), visible, run, selection)
    return selection


def take_all(pages: Ints, seen: Ints, run: Run, out: Selection) -> None:
    """Selects, for rows of one request, every visible block that is not on a hole; `out` holds nothing there yet.

    pages  of the request's blocks, as many as any of the rows sees
    seen   [rows of out], visible blocks
    """
    present = np.flatnonzero(pages >= 0)
    held = np.searchsorted(present, seen[run.start : run.stop])
    out.count.numpy()[run.start : run.stop] = held
    columns = present.shape[0]
    chosen = np.where(np.arange(columns) < held[:, None], present, -1)
    out.blocks.numpy()[run.start : run.stop, :columns] = chosen


def score(
    index_q: Tensor, index_cache: IndexCache, rows: Rows, spec: QsaSpec, plan: SelectPlan | None = None
) -> Scores:
    """Scores of each row's visible blocks: index_dim^(-1/2) * sum over heads of relu(<index_q, key>), in FP32.

    index_q  [rows, index_heads, index_dim], a chunk of a call's rows

    Returns scores as wide as the most blocks any of these rows sees. A block on a hole scores -inf. A row that sees no
    more than `top_blocks` blocks takes them all, so its scores are 0 without a product.

    A plan that is batch invariant has each row scored alone: the shape of a product decides its bits. A plan of the
    mode `fused` has the products that `select_fused` makes of the same rows.
    """
    visible = rows.visible_blocks(spec)
    seen = visible.numpy().astype(np.int64)
    values = torch.empty((rows.count, int(seen.max(initial=0))), dtype=torch.float32)
    scale = score_scale(index_cache, spec)
    tiles: Tiles | None = None
    for run in request_runs(rows):
        if run.request < 0:
            continue
        few = rows_that_take_all(run, seen, spec)
        pages = block_pages(index_cache, run.request, int(seen[run.stop - 1]))
        if few > run.start:
            values[run.start : few, : seen[few - 1]] = 0.0
        if few < run.stop:
            tiles = tiles or Tiles(index_cache, rows.count, values.shape[1], spec, plan)
            for tile in tiles.of(index_q, Run(few, run.stop, run.request), seen):
                width = tile.products.shape[2]
                sum_heads(tile.products, scale, values[tile.start : tile.stop, tile.first : tile.first + width])
        holes = torch.from_numpy(np.flatnonzero(pages < 0))
        if holes.numel():
            values[run.start : run.stop].index_fill_(1, holes, float("-inf"))
    return Scores(values, visible)


def score_scale(index_cache: IndexCache, spec: QsaSpec) -> float:
    """What a sum over heads of the products of `Tiles` is multiplied by."""
    if index_cache.keys.dtype != FP8:
        return spec.score_scale
    return spec.score_scale * FP8_UNIT * (1.0 if index_cache.scale is None else index_cache.scale)


def rows_that_take_all(run: Run, seen: Ints, spec: QsaSpec) -> int:
    """The first row of a run that sees more blocks than it may select: positions ascend, so the others come first."""
    return run.start + int(np.searchsorted(seen[run.start : run.stop], spec.top_blocks, side="right"))


def block_pages(index_cache: IndexCache, request: int, stop: int, start: int = 0) -> Ints:
    """Page of each of a request's blocks `start .. stop`; -1 on a hole."""
    return pages_of(index_cache.page_table, request, np.arange(start, stop), index_cache.page_blocks)


def sum_heads(products: Tensor, scale: float, out: Tensor) -> None:
    """Scores [rows, blocks] of products [rows, index_heads, blocks]: their sum over heads, in order, times `scale`."""
    by_head = products.unbind(1)
    out.copy_(by_head[0])
    for head in by_head[1:]:
        out.add_(head)
    out.mul_(scale)


@dataclass(frozen=True)
class Tile:
    """Rows `start .. stop`, all of one request, against the blocks of a tile, from `first` on, that the last row sees.

    products  [rows, index_heads, blocks] FP32, relu(<index_q, key>) without scale, until the next tile is asked for;
              of columns on holes undefined
    holes     [n] int64, the columns that are on holes
    """

    start: int
    stop: int
    first: int
    products: Tensor
    holes: Tensor


class Tiles:
    """What is multiplied at once: its sizes and its memory, which all requests of a chunk share.

    rows   of the chunk
    width  most blocks that a row of it sees
    """

    def __init__(
        self, index_cache: IndexCache, rows: int, width: int, spec: QsaSpec, plan: SelectPlan | None = None
    ) -> None:
        self.spec = spec
        # Rows that are taken through all their keys before the next ones.
        self.together = 1 if plan is not None and plan.batch_invariant else rows
        if plan is not None and isinstance(plan.fused, FusedConfig):
            self.rows, most = plan.fused.tile_rows, plan.fused.tile_blocks
        else:
            self.rows = min(self.together, TILE_ROWS)
            most = min(TILE_BLOCKS, max(TILE_PRODUCTS // (self.rows * spec.index_heads), 1), width)
        self.index_cache = index_cache
        page_blocks = index_cache.page_blocks
        # The largest divisor of a page that a piece may have: pieces are read whole.
        self.piece = next(size for size in range(min(page_blocks, FUSED_PIECE), 0, -1) if page_blocks % size == 0)
        self.blocks = -(-most // self.piece) * self.piece
        self.pool = Pool(index_cache.keys.unsqueeze(2), self.piece)
        self.buffer = Buffer(index_cache.keys.dtype, self.blocks * index_cache.keys.shape[2])
        self.products = torch.empty(min(self.rows, rows) * spec.index_heads * self.blocks, dtype=torch.float32)

    def of(self, index_q: Tensor, run: Run, seen: Ints) -> Iterator[Tile]:
        """The tiles of a run, in ascending order of blocks for each row; none where all blocks are holes.

        seen  [rows], visible blocks of each row
        """
        for start in range(run.start, run.stop, self.together):
            stop = min(start + self.together, run.stop)
            queries = index_q[start:stop].detach().to(torch.float32).reshape(-1, self.spec.index_dim)
            yield from self._of_rows(queries, Run(start, stop, run.request), seen)

    def _of_rows(self, queries: Tensor, run: Run, seen: Ints) -> Iterator[Tile]:
        heads, most = self.spec.index_heads, int(seen[run.stop - 1])
        for first in range(0, most, self.blocks):
            pages = block_pages(self.index_cache, run.request, min(first + self.blocks, most), first)
            holes = np.flatnonzero(pages < 0)
            if holes.size == pages.size:
                continue
            keys = self._keys(pages, first)
            row = run.start + int(np.searchsorted(seen[run.start : run.stop], first, side="right"))
            for begin in range(row, run.stop, self.rows):
                end = min(begin + self.rows, run.stop)
                blocks = min(keys.shape[0], int(seen[end - 1]) - first)
                lines = queries[(begin - run.start) * heads : (end - run.start) * heads]
                products = self.products[: lines.shape[0] * blocks].view(-1, blocks)
                torch.mm(lines, keys[:blocks].T, out=products)
                absent = torch.from_numpy(holes[: np.searchsorted(holes, blocks)])
                yield Tile(begin, end, first, products.relu_().view(end - begin, heads, blocks), absent)

    def _keys(self, pages: Ints, first: int) -> Tensor:
        """Keys [blocks or a few more, index_dim] of the tile from block `first` on, of which not all are on holes.

        pages  of the tile's blocks, -1 on a hole: a key on a hole is another block's
        """
        page = pages[:: self.piece]
        held = page >= 0
        page = np.where(held, page, page[held][0])
        starts = np.arange(first, first + pages.shape[0], self.piece)
        return self.pool.read(page, starts % self.index_cache.page_blocks // self.piece, self.buffer)[0]
