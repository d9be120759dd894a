"""Who scores which rows on Volta and Turing: cuBLAS the long requests of a call, one by one, the paged scorer the rest.

A plan knows how many rows and requests a batch has, and holds what the memory allows. Which request brings how many
rows changes from step to step: `Rows.runs` says it, and each call is split by it, from host numbers alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashqsa.config import (
    SM7X_TILE,
    Product,
    Sm7xScoreConfig,
    product_bytes,
    product_columns,
    sm7x_paged_sizes,
    sm7x_prefers_products,
)
from flashqsa.tables import score_sm7x as table
from flashqsa.values import QsaSpec, Run

MOST_SLICES = 4
"""Slices that rows beside those of cuBLAS are cut into, for each that one of their runs reaches."""


@dataclass(frozen=True)
class Sm7xSplit:
    """Who scores which rows of a chunk on `sm7x`: each row is in one of both.

    products  rows that cuBLAS scores
    ranges    the others: neighbours, as start and stop, ascending
    pages     configuration of the paged scorer for them
    """

    products: tuple[Product, ...]
    ranges: tuple[tuple[int, int], ...]
    pages: Sm7xScoreConfig


def score_split(
    spec: QsaSpec,
    rows: int,
    requests: int,
    max_position: int,
    runs: tuple[Run, ...] | None,
    config: Sm7xScoreConfig,
) -> Sm7xSplit:
    """Who scores which rows of a chunk, from its own runs and the configuration of its plan. A few steps for a run.

    cuBLAS multiplies each run that it is faster for by itself, within the memory that `product_columns` bounds; all
    other rows share the paged scorer. Without runs cuBLAS takes all rows of a call of one request, and none of another.

    >>> from flashqsa.config import sm7x_score_config
    >>> from flashqsa.device import DeviceFacts
    >>> config = sm7x_score_config(QsaSpec(), 1623, 8, 28_999, DeviceFacts.named("rtx8000"), 128 << 20)
    >>> runs = (*(Run(i, i, i + 1, 3000) for i in range(7)), Run(7, 7, 1623, 28_999))
    >>> split = score_split(QsaSpec(), 1623, 8, 28_999, runs, config)
    >>> split.products, split.ranges, split.pages.window
    ((Product(request=7, start=7, stop=1623, width=7250, columns=2432),), ((0, 7),), 1)
    """
    width = max(spec.visible_blocks(max_position), 1)
    if runs is None and rows > 0 and requests == 1 and config.product_columns > 0:
        return Sm7xSplit((Product(0, 0, rows, width, config.product_columns),), (), config)
    products: list[Product] = []
    # Every run has a row: where runs are many and rows are few, none is long, and none is looked at.
    if runs and config.product_columns > 0 and rows - len(runs) + 1 >= table.PRODUCT_ROWS:
        held_bytes = config.product_columns * product_bytes(spec, rows)
        for run in [run for run in runs if run.stop - run.start >= table.PRODUCT_ROWS]:
            count, seen = run.stop - run.start, min(max(spec.visible_blocks(run.last_position), 1), width)
            if sm7x_prefers_products(count, seen):
                columns = product_columns(spec, count, seen, held_bytes)
                products.append(Product(run.request, run.start, run.stop, seen, columns))
    if not products or runs is None:
        return Sm7xSplit((), ((0, rows),) if rows > 0 else (), config)
    stops, starts = (0, *(product.stop for product in products)), (*(product.start for product in products), rows)
    ranges = tuple((start, stop) for start, stop in zip(stops, starts, strict=True) if start < stop)
    pages = config
    if ranges and config.programs > 0:
        taken = {product.start for product in products}
        reached = max((run.last_position for run in runs if run.start not in taken), default=-1)
        left, seen = len(runs) - len(products), min(max(spec.visible_blocks(reached), 1), width)
        pages = _left_over(spec, sum(stop - start for start, stop in ranges), max(left, 1), seen, width, config)
    return Sm7xSplit(tuple(products), ranges, pages)


def _left_over(
    spec: QsaSpec, rows: int, requests: int, seen: int, width: int, config: Sm7xScoreConfig
) -> Sm7xScoreConfig:
    """The paged scorer's configuration for rows left over by cuBLAS, whose runs see up to `seen` of `width` blocks."""
    sizes = sm7x_paged_sizes(spec, rows, requests, seen, config.programs)
    # A row outside every run may see all of `width`. Slices that no row reaches cost little, but not nothing.
    slices, unit = -(-seen // sizes["slice_blocks"]), sizes["strips"] * SM7X_TILE * sizes["warps"]
    sizes["slice_blocks"] = max(sizes["slice_blocks"], -(-width // (MOST_SLICES * slices * unit)) * unit)
    return Sm7xScoreConfig(config.capability, config.quad_pairs, **sizes)
