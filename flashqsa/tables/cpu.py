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


COST: CostEntry = {"group_us": 150.0, "gather_ns": 0.5, "product_ns": 0.06}

ATTEND: dict[str, AttendEntry] = {
    "dense": {"group_rows": (64,), "tile_tokens": 1024, "row_tokens": 65536},
    "grouped": {"group_rows": (1, 2, 4, 8, 16, 32, 64), "tile_tokens": 1024, "row_tokens": 65536},
    "xqa": {"group_rows": (1,), "tile_tokens": 1024, "row_tokens": 65536},
}
