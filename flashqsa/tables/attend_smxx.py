"""Attention tiles for GPUs of compute capability 8.0 and newer.

Measured on one H200 (driver 580.159, torch 2.11+cu130, Triton 3.6, CUDA 13.0): 1,616 and 8,192 rows of the near, mid
and far regimes, 24/2, 12/1 and 6/1 heads of 256, BF16 and FP8 caches with pages of 16 tokens; decode of 64 requests of
32,768 tokens. Other GPUs take the same tiles, as far as they fit; those were compiled for them, not timed.
"""

from __future__ import annotations

from typing import TypedDict


class TritonEntry(TypedDict):
    """The fields of `config.TritonTile` that do not depend on the call.

    lines   of the tile: the entry serves windows that need no more
    tokens  for heads of 256; smaller heads take as many more
    """

    lines: int
    tokens: int
    warps: int
    stages: int
    resident: int


WGMMA: tuple[TritonEntry, ...] = (
    {"lines": 16, "tokens": 128, "warps": 8, "stages": 2, "resident": 1},
    {"lines": 32, "tokens": 64, "warps": 4, "stages": 2, "resident": 2},
    # Two programs of 64 lines keep a multiprocessor busier than one of 128: one's softmax hides the other's products.
    {"lines": 64, "tokens": 32, "warps": 4, "stages": 2, "resident": 2},
)
"""Compute capability 9.0."""

MMA: tuple[TritonEntry, ...] = (
    {"lines": 16, "tokens": 128, "warps": 8, "stages": 2, "resident": 1},
    {"lines": 16, "tokens": 64, "warps": 4, "stages": 2, "resident": 1},
    {"lines": 32, "tokens": 32, "warps": 4, "stages": 2, "resident": 1},
    # With 4 warps the queries, which mma.sync keeps in registers, push the output out of them.
    {"lines": 64, "tokens": 32, "warps": 8, "stages": 2, "resident": 1},
)
"""The others."""

FP32: tuple[TritonEntry, ...] = (
    {"lines": 16, "tokens": 32, "warps": 8, "stages": 2, "resident": 2},
    {"lines": 32, "tokens": 16, "warps": 8, "stages": 2, "resident": 2},
)
"""An FP32 cache, on any of them: plain FP32 products, for bits and not for speed."""

FP8_STAGES = 3
"""Tiles in flight of an FP8 cache with 64 lines on compute capability 9.0: they take half the shared memory."""

HOPPER_ROWS = 10
"""Rows of a prefill window that Hopper's own kernel gives two consumers where one does not hold them: at 1,616 rows of
24/2 heads 280, 351 and 456 us near, mid and far, against 321, 378 and 461 us for 5 rows and one consumer. An FP8 cache
stays with one: 699 against 834 us far."""

MOST_ROWS = 16
"""Most rows of a prefill window: larger unions grow as fast as the work that they share."""
