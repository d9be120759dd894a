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
