"""CPU configurations."""

from __future__ import annotations

from typing import TypedDict


class CostEntry(TypedDict):
    """The fields of `config.GroupCost`."""

    group_us: float
    gather_ns: float
    product_ns: float


class AttendEntry(TypedDict):
    """The fields of `config.AttendConfig`, the cost apart."""

    group_rows: tuple[int, ...]
    tile_tokens: int
    row_tokens: int


# Fitted to groups of 1 to 64 rows over selections of the near, mid and far regimes: 24/2 heads of 256, FP32 cache of
# 32,768 tokens, 1 and 2 threads of a 2-vCPU AMD EPYC (AVX2), 2026-11: about 0.6 us per token of a union, and 0.27 us
# per token and row. Only the ratios matter; around the cheapest cut the cost is flat: a third more or less changes
# little.
COST: CostEntry = {"group_us": 100.0, "gather_ns": 1.2, "product_ns": 0.043}

# A tile of 4,096 tokens holds most unions whole (8 MiB of keys, then of values); smaller tiles gain nothing. 65,536
# logits per head (6 MiB for 24 heads) stay in the last-level cache and leave groups of up to 16 rows one softmax.
ATTEND: dict[str, AttendEntry] = {
    "dense": {"group_rows": (64,), "tile_tokens": 4096, "row_tokens": 65536},
    "grouped": {"group_rows": (1, 2, 4, 8, 16, 32, 64), "tile_tokens": 4096, "row_tokens": 65536},
    "xqa": {"group_rows": (1,), "tile_tokens": 4096, "row_tokens": 65536},
}


class FusedEntry(TypedDict):
    """A tile of the fused selection.

    tile_rows    most rows of a tile
    tile_blocks  most keys of a tile
    products     most products of a tile's rows, index heads and keys
    chunk_rows   rows that keys are read for at a time
    """

    tile_rows: int
    tile_blocks: int
    products: int
    chunk_rows: int


# 1 MiB of products, so that the passes over them stay in cache.
FUSED: FusedEntry = {"tile_rows": 64, "tile_blocks": 2048, "products": 1 << 18, "chunk_rows": 512}


class FusedFrom(TypedDict):
    """From which sizes on the fused selection is preferred to scores in full, where both can serve a call."""

    rows_per_request: int
    blocks: int


# Time of scores in full over that of the fused selection, medians taken in turn with 1 thread of a shared 2-vCPU Intel
# Xeon (AVX-512), BF16 keys, 2026-11-30 (benchmarks/results/indexer-*-xeon-2vcpu.json):
#     1 x 1, 16 x 1 rows   0.93, 0.83 at 32,768 tokens; 0.83, 0.82 at 131,072
#     64, 1,616 rows       1.04, 0.95 at 32,768 tokens; 1.04, 1.14 at 184,000
#     8,192 rows           0.96 at 32,768 tokens
# and with FP32 keys about 1.0 (0.9 to 1.05) for 32 rows, and for 64 to 1,616 rows at 8,192 and 16,384 tokens. Where the
# two take the same time the fused selection is preferred: it holds a sixth to a half of the memory.
FUSED_FROM: FusedFrom = {"rows_per_request": 64, "blocks": 8192}
