"""Scores and selection in one pass: a tile of scores is ranked against each row's best so far, and forgotten."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flashqsa.config import FUSED_PIECE, FusedConfig
from flashqsa.kernels.cpu.paging import Ints, Run, request_runs
from flashqsa.kernels.cpu.score import (
    Tiles,
    block_pages,
    empty_selection,
    rows_that_take_all,
    score_scale,
    sum_heads,
    take_all,
)
from flashqsa.plan import SelectPlan
from flashqsa.values import IndexCache, QsaSpec, Rows, Selection

Floats = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]

NOTHING = np.int64(np.iinfo(np.int64).max)
"""A rank behind every block's: its low half, read as int32, is the -1 that follows a selection."""

DENSE = 0.25
"""Share of a tile's scores above which ranking all of them takes less time than listing the better ones."""


def select_fused(index_q: Tensor, index_cache: IndexCache, rows: Rows, spec: QsaSpec, plan: SelectPlan) -> Selection:
    """Each row's best blocks by score descending, then block id ascending; handed on in ascending order.

    index_q  [rows, index_heads, index_dim]

    Scores are those of `score` under the same plan, bit for bit, and so is the selection that `topk` makes of them. Of
    scores no more than a tile's lies in memory. Raises ValueError for a plan of another mode.
    """
    if not isinstance(plan.fused, FusedConfig):
        raise ValueError("wanted a plan of a CPU's mode fused")
    selection = empty_selection(rows, spec)
    best = Best(plan.chunk_rows, spec.top_blocks, plan.fused.tile_rows, plan.fused.tile_blocks + FUSED_PIECE)
    for start, stop in plan.chunks(rows.count):
        part = rows.slice(start, stop)
        _select_chunk(index_q[start:stop], index_cache, part, spec, plan, best, selection.slice(start, stop))
    return selection


def _select_chunk(
    index_q: Tensor, index_cache: IndexCache, rows: Rows, spec: QsaSpec, plan: SelectPlan, best: Best, out: Selection
) -> None:
    seen = rows.visible_blocks(spec).numpy().astype(np.int64)
    scale = score_scale(index_cache, spec)
    tiles: Tiles | None = None
    for run in request_runs(rows):
        if run.request < 0 or seen[run.stop - 1] == 0:
            continue
        few = rows_that_take_all(run, seen, spec)
        for begin in range(run.start, few, best.tile_rows):
            end = min(begin + best.tile_rows, few)
            pages = block_pages(index_cache, run.request, int(seen[end - 1]))
            take_all(pages, seen, Run(begin, end, run.request), out)
        if few == run.stop:
            continue
        tiles = tiles or Tiles(index_cache, rows.count, int(seen.max()), spec, plan)
        best.forget(few, run.stop)
        for tile in tiles.of(index_q, Run(few, run.stop, run.request), seen):
            scores = best.tile(tile.stop - tile.start, tile.products.shape[2])
            sum_heads(tile.products, scale, scores)
            if tile.holes.numel():
                scores.index_fill_(1, tile.holes, float("-inf"))
            best.add(tile.start, tile.first, seen[tile.start : tile.stop], scores)
        best.write(few, run.stop, out)


class Best:
    """The best blocks of a chunk's rows among those met so far, and some that may still fall out.

    rows         of a chunk
    top          blocks a row selects
    tile_rows    most rows of a tile
    tile_blocks  most blocks of a tile

    A block is held as one 64-bit number, its rank: the score's bits, inverted, above the block's id. Scores are never
    negative, so ranks ascend from the best block to the worst, equal scores by id, and no two are equal; ranks from 0
    on belong to -inf and to no block at all. A row has room for its selection and a tile; when that is full, all but
    the `top` lowest ranks are dropped (`_cut`), and only blocks that score above the worst of them are held from then
    on. Blocks come in ascending order, so one that scores the same as the worst comes after it, and goes.
    """

    def __init__(self, rows: int, top: int, tile_rows: int, tile_blocks: int) -> None:
        self.top, self.tile_rows = top, tile_rows
        self.ranks = np.empty((rows, top + tile_blocks), dtype=np.int64)
        self.held = np.zeros(rows, dtype=np.int64)
        self.worst = np.empty((rows, 1), dtype=np.float32)
        self.scores = torch.empty(tile_rows * tile_blocks, dtype=torch.float32)
        self.better = np.empty(tile_rows * tile_blocks, dtype=np.bool_)

    def forget(self, start: int, stop: int) -> None:
        """Makes rows hold nothing."""
        self.ranks[start:stop] = NOTHING
        self.held[start:stop] = 0
        self.worst[start:stop] = -np.inf

    def tile(self, rows: int, blocks: int) -> Tensor:
        """Memory for a tile's scores [rows, blocks] FP32."""
        return self.scores[: rows * blocks].view(rows, blocks)

    def add(self, start: int, first: int, seen: Ints, scores: Tensor) -> None:
        """Ranks blocks `first .. first + blocks` of some rows, from row `start` on; those beyond what a row sees do not
        count, nor do NaN and -inf.

        seen    [rows of the tile], ascending
        scores  [rows of the tile, blocks], overwritten
        """
        rows, blocks = scores.shape
        values, stop = scores.numpy(), start + rows
        if seen[0] < first + blocks:
            open_from = max(int(seen[0]) - first, 0)
            beyond = np.arange(first + open_from, first + blocks) >= seen[:, None]
            values[:, open_from:][beyond] = -np.inf
        better = np.greater(values, self.worst[start:stop], out=self.better[: rows * blocks].reshape(rows, blocks))
        count = np.count_nonzero(better)
        if count > DENSE * better.size:
            self._add_all(start, first, values)
        elif count:
            self._add_some(start, first, values, better)

    def _add_all(self, start: int, first: int, scores: Floats) -> None:
        """Holds a whole tile until the cut that follows: those that are not better take no better one's place."""
        rows, blocks = scores.shape
        stop = start + rows
        at = int(self.held[start:stop].max())
        if at + blocks > self.ranks.shape[1]:
            self._cut(start, stop)
            at = self.top
        np.fmax(scores, -np.inf, out=scores)
        rank_into(self.ranks[start:stop, at : at + blocks], scores, np.arange(first, first + blocks, dtype=np.int32))
        self.held[start:stop] = at + blocks
        self._cut(start, stop)

    def _add_some(self, start: int, first: int, scores: Floats, better: Flags) -> None:
        """Holds the better blocks of a tile."""
        rows, blocks = scores.shape
        stop, room = start + rows, self.ranks.shape[1]
        at = np.flatnonzero(better)
        ends = np.searchsorted(at, np.arange(1, rows + 1) * blocks)
        found = np.diff(ends, prepend=0)
        held = self.held[start:stop]
        if int((held + found).max()) > room:
            self._cut(start, stop)
        row = np.arange(rows)
        ranks = np.empty(at.size, dtype=np.int64)
        ids: Ints = np.repeat(first - row * blocks, found) + at
        rank_into(ranks, scores.reshape(-1).take(at), ids)
        # `at` ascends, so a row's blocks follow each other: they go where the row's ranks end.
        into = np.repeat((start + row) * room + held - (ends - found), found)
        into += np.arange(at.size)
        self.ranks.reshape(-1)[into] = ranks
        held += found

    def _cut(self, start: int, stop: int) -> None:
        """Drops all but the best `top` blocks of rows, at most a tile's."""
        held = self.held[start:stop]
        most = int(held.max())
        if most <= self.top:
            return
        ranks = self.ranks[start:stop, :most]
        # What this leaves behind the best of a row is worse than each of them, or nothing: it may lie there.
        ranks.partition(self.top - 1, axis=1)
        np.minimum(held, self.top, out=held)
        worst = ranks[:, self.top - 1]
        self.worst[start:stop, 0] = np.where(worst < 0, scores_of(worst), -np.inf)

    def write(self, start: int, stop: int, out: Selection) -> None:
        """Hands on the selection of rows in ascending order of ids."""
        for begin in range(start, stop, self.tile_rows):
            end = min(begin + self.tile_rows, stop)
            self._cut(begin, end)
            ranks = self.ranks[begin:end, : self.top]
            ranks[ranks >= 0] = NOTHING
            ids = ranks.astype(np.uint32)
            ids.sort(axis=1)
            blocks = ids.view(np.int32)
            out.blocks.numpy()[begin:end] = blocks
            out.count.numpy()[begin:end] = np.count_nonzero(blocks >= 0, axis=1)


def rank_into(ranks: Ints, scores: Floats, blocks: npt.NDArray[np.integer[Any]]) -> None:
    """Writes the ranks of blocks with these scores, which are overwritten: ascending where scores descend.

    >>> ranks = np.empty(4, dtype=np.int64)
    >>> rank_into(ranks, np.float32([2.0, 0.0, -0.0, -np.inf]), np.array([7, 5, 6, 0]))
    >>> ranks.argsort().tolist(), (ranks < 0).tolist(), scores_of(ranks[:2]).tolist()
    ([0, 1, 2, 3], [True, True, True, False], [2.0, 0.0])
    """
    # -0.0 + 0.0 is 0.0, whose bits are those of no other number.
    scores += np.float32(0)
    bits = scores.view(np.int32)
    halves = ranks.view(np.int32).reshape(*ranks.shape, 2)
    low, high = (0, 1) if sys.byteorder == "little" else (1, 0)
    np.invert(bits, out=halves[..., high])
    halves[..., low] = blocks


def scores_of(ranks: Ints) -> Floats:
    """The scores that ranks below 0 were made of."""
    return (~(ranks >> 32).astype(np.int32)).view(np.float32)
