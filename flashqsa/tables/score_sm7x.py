"""Configurations of the score stage for compute capability 7.0 (Volta) and 7.5 (Turing).

No such GPU was at hand: nothing here was timed. The tiles follow from registers and shared memory (no kernel of the
released shape spills), the limits of cuBLAS from an estimate ("What scores cost" in docs/kernels/attend_sm7x.md):

- cuBLAS moves 36 bytes for each row and block and the paged scorer 4, so that on paper the paged one is faster at every
  size: 0.1 against 0.6 ms for 1,616 rows of 29,000 tokens on a Quadro RTX 8000, 0.6 against 4.0 ms for 184,000.
- What cuBLAS takes is sure to within its launches, since memory alone limits it. The paged scorer has to reach 15 % of
  the tensor cores' rate on an RTX 8000 and 20 % on a V100 to be as fast, which its machine code allows and no such GPU
  has shown. Long requests go to cuBLAS until one has, short ones to the paged scorer, which has one launch.

Whoever has such a GPU decides it with two runs of `flashqsa bench indexer --dtype fp16`, the second with
`PRODUCT_ROWS` out of reach.
"""

from __future__ import annotations

from typing import TypedDict


class ScoreTile(TypedDict):
    """A tile of the paged scorer.

    rows    rows of a window: 1, 2, 4, 8 or 16
    strips  tiles of 16 blocks that a warp scores at a time
    """

    rows: int
    strips: int


TILES: tuple[ScoreTile, ...] = (
    {"rows": 1, "strips": 1},
    {"rows": 4, "strips": 1},
    {"rows": 8, "strips": 2},
    # Rows of a head fill a tile of 16 lines. With two strips, queries are read from shared memory half as often.
    {"rows": 16, "strips": 2},
)
"""By rows: the first that holds a request's rows is to be taken, the last that fits where none does."""

WARPS = 4
"""Of a program of the paged scorer."""

PROGRAMS = 4
"""Programs wanted per multiprocessor: twice what it holds at a time, so that uneven ones fill up."""

MAX_RUNS = 8
"""Requests of a window that have a program each."""

PRODUCT_ROWS = 64
"""Fewest rows for which cuBLAS scores: 256 lines with 4 heads, two of its tiles."""

PRODUCT_SCORES = 1 << 20
"""Fewest scores for which cuBLAS scores: fewer take less time than its three launches and their tails."""
