"""Exact top-k: score descending, block id ascending among equals, handed on in ascending order."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flashqsa.plan import SelectPlan
from flashqsa.values import Scores, Selection

TILE_SCORES = 1 << 20
"""Scores ranked at a time: 4 MiB of scratch, which stays in cache."""


def topk(scores: Scores, out: Selection, _plan: SelectPlan | None = None) -> None:
    """Writes each row's best blocks and their number into `out`, in place.

    scores  of the rows of `out`; columns from `visible` on are not looked at
    out     [rows, top_blocks]; every entry is written

    -0.0 equals 0.0. NaN and -inf are never selected, so a row may get fewer than `top_blocks`.
    """
    values, visible = scores.values.numpy(), scores.visible.numpy()
    blocks, count = out.blocks.numpy(), out.count.numpy()
    start = 0
    while start < visible.shape[0]:
        # Rows are taken together while their rectangle fits, at least one.
        width = np.maximum.accumulate(visible[start : start + 4096]).astype(np.int64)
        fits = width * np.arange(1, width.shape[0] + 1) <= TILE_SCORES
        stop = start + max(int(fits.sum()), 1)
        _topk_tile(values[start:stop], visible[start:stop], blocks[start:stop], count[start:stop])
        start = stop


def _topk_tile(
    values: npt.NDArray[np.float32],
    visible: npt.NDArray[np.int32],
    blocks: npt.NDArray[np.int32],
    count: npt.NDArray[np.int32],
) -> None:
    top = blocks.shape[1]
    width = int(visible.max(initial=0))
    blocks.fill(-1)
    count.fill(0)
    if width == 0:
        return
    ranked = values[:, :width].copy()
    ranked[np.arange(width) >= visible[:, None]] = -np.inf
    ranked[np.isnan(ranked)] = -np.inf
    if width > top:
        cut = np.partition(ranked, width - top, axis=1)[:, width - top, None]
    else:
        cut = np.full((visible.shape[0], 1), -np.inf, dtype=np.float32)
    chosen = ranked >= cut
    # Where the cut is -inf every finite score is in, and nothing else.
    chosen &= ranked > -np.inf
    number = np.count_nonzero(chosen, axis=1)
    for row in np.flatnonzero(number > top):
        # Ties at the cut: the lowest ids among the equals fill what the greater ones leave.
        ties = np.flatnonzero(ranked[row] == cut[row])
        chosen[row, ties[ties.shape[0] - (int(number[row]) - top) :]] = False
    np.minimum(number, top, out=number)
    count[:] = number
    where = np.flatnonzero(chosen)
    column = where % width
    into = np.arange(top) < number[:, None]
    blocks[into] = column
