"""Configurations for GPUs of compute capability 8.0 and newer; the top-k's for all NVIDIA GPUs.

Measured on one H200 (torch 2.11+cu130, Triton 3.6) in BF16 with pages of 16 tokens: the tile of 32 rows on 1,616 rows x
46,000 blocks, the others on 1 to 64 requests of 32,768 tokens, 20 calls in one CUDA graph. Other GPUs take the same
where they can; on them nothing was timed.
"""

from __future__ import annotations

from typing import TypedDict


class ScoreTile(TypedDict):
    """A tile of the score stage: the fields of `config.ScoreConfig` that do not depend on the call.

    columns_few  columns where the larger tile would leave multiprocessors without work
    programs     programs wanted per multiprocessor
    """

    rows: int
    columns: int
    columns_few: int
    warps: int
    stages: int
    programs: int


_FEW_ROWS: tuple[ScoreTile, ...] = (
    {"rows": 1, "columns": 128, "columns_few": 64, "warps": 4, "stages": 2, "programs": 4},
    {"rows": 4, "columns": 128, "columns_few": 64, "warps": 4, "stages": 2, "programs": 4},
    {"rows": 8, "columns": 128, "columns_few": 64, "warps": 4, "stages": 2, "programs": 2},
)

_WGMMA: tuple[ScoreTile, ...] = (
    *_FEW_ROWS,
    {"rows": 32, "columns": 128, "columns_few": 64, "warps": 4, "stages": 2, "programs": 2},
)

_MMA: tuple[ScoreTile, ...] = (
    *_FEW_ROWS,
    # With 128 columns the products do not fit a thread's registers: mma.sync also keeps its operands there.
    {"rows": 32, "columns": 64, "columns_few": 64, "warps": 4, "stages": 3, "programs": 2},
)

_FP32: tuple[ScoreTile, ...] = (
    # No tensor cores: larger tiles spill, and take Triton a minute to compile.
    {"rows": 1, "columns": 64, "columns_few": 32, "warps": 4, "stages": 2, "programs": 4},
    {"rows": 4, "columns": 32, "columns_few": 32, "warps": 4, "stages": 2, "programs": 8},
)


def score_tiles(capability: tuple[int, int], q_bytes: int) -> tuple[ScoreTile, ...]:
    """Tiles by rows: the first that holds a request's rows is to be taken, the last where none does."""
    if q_bytes == 4:
        return _FP32
    return _WGMMA if capability[0] in (9, 10) else _MMA


MAX_RUNS = 8
"""Requests of a score window that have a program each: one without work holds its place for about a microsecond."""

TOPK_MANY, TOPK_FEW = 256, 512
"""Threads of a top-k program: 256 where rows outnumber multiprocessors; 512, which shortens a row's way, where not."""
