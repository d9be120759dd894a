"""Scores by cuBLAS: how wide products are, and where they were timed against scores page by page (`smxx:plain`).

A call takes cuBLAS where the largest timed shape that it reaches, in rows and in blocks, was faster by cuBLAS. A GPU
that has no entry keeps `plain`, and so does a call smaller than every shape. `flashqsa bench indexer --every-route`
times both in turn, and gives what belongs here.
"""

from __future__ import annotations

from typing import TypedDict

PRODUCT_COLUMNS = 128
"""Products are taken for a multiple of so many blocks: cuBLAS has tiles of 64 to 256."""


class Shape(TypedDict):
    """One request's rows by both, top-k included, in microseconds; `blocks` that the last row sees."""

    rows: int
    blocks: int
    cublas_us: float
    plain_us: float


class Timed(TypedDict):
    """What a kind of GPU took.

    where  GPU and month
    what   of cuBLAS was timed, in words: the route, or a part of it, which it cannot be faster than
    """

    where: str
    what: str
    shapes: tuple[Shape, ...]


TIMED: dict[tuple[int, int], Timed] = {
    # torch 2.11+cu130, Triton 3.6, 4 index heads of 128. The product is FP16's with FP32 results, all blocks at once:
    # gather and scores come on top. `plain` is BF16 in chunks of 128 MiB (docs/kernels/select.md).
    (9, 0): {
        "where": "on an H200, 2026-11",
        "what": "cuBLAS's product alone",
        "shapes": (
            {"rows": 1616, "blocks": 7_250, "cublas_us": 105.0, "plain_us": 96.0},
            {"rows": 1616, "blocks": 37_500, "cublas_us": 579.0, "plain_us": 292.0},
            {"rows": 1616, "blocks": 46_000, "cublas_us": 457.0, "plain_us": 349.0},
        ),
    },
}
"""By compute capability."""
