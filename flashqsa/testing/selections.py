"""Selections with the locality of real prompts, and what locality a selection has.

A row's selection keeps most of the row before it. `select_locally` keeps an LRU stack of each request's blocks,
replaces a share of the row's blocks, and draws the newcomers from bands of the stack, so that the share of a row's
blocks that are not among the last-used N comes out as measured on the real model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from flashqsa.values import QsaSpec, Rows, Selection

MISS_RATES: dict[str, tuple[float, ...]] = {
    "near": (0.06, 0.005),
    "mid": (0.16, 0.06, 0.02),
    "far": (0.336, 0.166, 0.103, 0.071, 0.024),
}
"""Share of a row's blocks not among the last-used N, for N of 1, 2, 3, 4 and 8 selections. `near` was measured on
contexts up to 3.8k tokens, `mid` at about 7.5k, `far` from 38k on, with 512 blocks per row."""

DEPTHS = (1, 2, 3, 4, 8)
"""The stack depths of `MISS_RATES`, in selections."""

REGIMES = (*MISS_RATES, "equal", "disjoint")

DISJOINT_ROWS = 8
"""Neighbouring rows that share no block in the `disjoint` regime."""


@dataclass(frozen=True)
class Locality:
    """What neighbouring rows of a selection share.

    miss_rates  share of a row's blocks not among the last-used N, for N of `DEPTHS` selections
    jaccard     mean of |A and B| / |A or B| over neighbouring rows of a request
    unions      group size -> mean union of a group's blocks, as a multiple of one row's
    """

    miss_rates: tuple[float, ...]
    jaccard: float
    unions: dict[int, float]


class _Stack:
    """A request's blocks, most recently used first; blocks never used come last, in random order."""

    def __init__(self, blocks: int, generator: np.random.Generator) -> None:
        self.order: NDArray[np.int64] = generator.permutation(blocks)

    def use(self, chosen: NDArray[np.int64]) -> None:
        rest = self.order[~np.isin(self.order, chosen)]
        self.order = np.concatenate([chosen, rest])


def select_locally(rows: Rows, spec: QsaSpec, regime: str, seed: int = 0) -> Selection:
    """A selection whose neighbouring rows share as much as `regime` says: one of `REGIMES`.

    `equal`: all rows of a request select the same blocks. `disjoint`: 8 neighbouring rows share none, as far as there
    are blocks. A row that sees no more than `spec.top_blocks` blocks selects them all. Raises KeyError for another
    regime.
    """
    request, visible = rows.request.tolist(), rows.visible_blocks(spec).tolist()
    blocks = np.full((rows.count, spec.top_blocks), -1, dtype=np.int32)
    count = np.zeros(rows.count, dtype=np.int32)
    owners = sorted({owner for owner, seen in zip(request, visible, strict=True) if seen > 0})
    for owner in owners:
        own = [row for row in range(rows.count) if request[row] == owner and visible[row] > 0]
        generator = np.random.default_rng([seed, owner])
        for row, chosen in zip(own, _request(own, visible, spec.top_blocks, regime, generator), strict=True):
            blocks[row, : chosen.size] = np.sort(chosen)
            count[row] = chosen.size
    device = rows.request.device
    return Selection(torch.from_numpy(blocks).to(device), torch.from_numpy(count).to(device))


def _request(
    own: list[int], visible: list[int], top_blocks: int, regime: str, generator: np.random.Generator
) -> list[NDArray[np.int64]]:
    """The blocks of each row of one request."""
    full = [row for row in own if visible[row] > top_blocks]
    everything = [np.arange(visible[row]) for row in own if visible[row] <= top_blocks]
    if not full:
        return everything
    # Blocks that all of the request's full rows see, so that any of these rows may select any of them.
    common = visible[full[0]]
    if regime == "equal":
        shared = generator.permutation(common)[:top_blocks]
        return everything + [shared] * len(full)
    if regime == "disjoint":
        return everything + _disjoint(len(full), common, top_blocks, generator)
    rates = MISS_RATES[regime]
    stack = _Stack(visible[full[-1]], generator)
    stack.use(generator.permutation(common)[:top_blocks])
    found = []
    for row in full:
        chosen = _next_row(stack.order, visible[row], top_blocks, rates, generator)
        stack.use(chosen)
        found.append(chosen)
    return everything + found


def _disjoint(rows: int, blocks: int, top_blocks: int, generator: np.random.Generator) -> list[NDArray[np.int64]]:
    sharers = min(DISJOINT_ROWS, blocks // top_blocks)
    order = generator.permutation(blocks)
    return [order[(row % sharers) * top_blocks : (row % sharers + 1) * top_blocks] for row in range(rows)]


def _next_row(
    order: NDArray[np.int64],
    visible: int,
    top_blocks: int,
    rates: tuple[float, ...],
    generator: np.random.Generator,
) -> NDArray[np.int64]:
    """A row's blocks: most of the last row's, and newcomers from each band of the stack below it."""
    order = order[order < visible]
    newcomers: list[NDArray[np.int64]] = []
    missing = 0
    edges = [depth * top_blocks for depth in DEPTHS[: len(rates)]] + [order.size]
    below = [*rates[1:], 0.0]
    for index, (rate, deeper) in enumerate(zip(rates, below, strict=True)):
        band = order[edges[index] : edges[index + 1]]
        wanted = missing + int((rate - deeper) * top_blocks + generator.random())
        taken = generator.permutation(band)[:wanted]
        missing = wanted - taken.size  # a short stack has no deeper bands: what they lack is not replaced
        newcomers.append(taken)
    fresh = np.concatenate(newcomers)
    return np.concatenate([generator.permutation(order[:top_blocks])[: top_blocks - fresh.size], fresh])


def locality_of(
    selection: Selection, rows: Rows, spec: QsaSpec, group_rows: tuple[int, ...] = (2, 4, 5, 8, 10, 16)
) -> Locality:
    """The locality of the rows that select `spec.top_blocks` blocks and whose neighbour before them does so too.

    A row that selects everything it sees, the first such row of a request, and padding tell nothing. Group sizes with
    no full group are left out; so is everything (NaN, no unions) when no row counts.
    """
    runs = _runs(selection, rows, spec)
    misses: list[list[float]] = []
    jaccards: list[float] = []
    for run in runs:
        stack: list[int] = []
        for index, chosen in enumerate(run):
            if index:
                misses.append([len(chosen.difference(stack[: d * spec.top_blocks])) / len(chosen) for d in DEPTHS])
                jaccards.append(len(chosen & run[index - 1]) / len(chosen | run[index - 1]))
            stack = sorted(chosen) + [block for block in stack if block not in chosen]
    unions: dict[int, float] = {}
    for size in group_rows:
        groups = [run[start : start + size] for run in runs for start in range(0, len(run) - size + 1, size)]
        if groups:
            unions[size] = float(np.mean([len(set().union(*group)) for group in groups])) / spec.top_blocks
    if not misses:
        return Locality((float("nan"),) * len(DEPTHS), float("nan"), unions)
    return Locality(tuple(np.mean(misses, axis=0).tolist()), float(np.mean(jaccards)), unions)


def _runs(selection: Selection, rows: Rows, spec: QsaSpec) -> list[list[set[int]]]:
    """The selections of consecutive rows of one request that select `spec.top_blocks` blocks each."""
    blocks, count, request = selection.blocks.tolist(), selection.count.tolist(), rows.request.tolist()
    live = rows.live.tolist()
    runs: list[list[set[int]]] = []
    before = -1
    for row in range(rows.count):
        if not live[row] or count[row] < spec.top_blocks:
            before = -1
            continue
        if request[row] != before:
            runs.append([])
        runs[-1].append(set(blocks[row]))
        before = request[row]
    return runs


def swap_one_block(selection: Selection, rows: Rows, spec: QsaSpec) -> Selection:
    """A near miss for negative controls: each row that leaves a visible block out has its first block swapped for one.

    A comparison that does not notice it cannot tell whose selection a row attended to.
    """
    blocks, visible = selection.blocks.clone(), rows.visible_blocks(spec).tolist()
    for row, chosen in enumerate(selection.count.tolist()):
        held = set(blocks[row, :chosen].tolist())
        free = next((block for block in range(visible[row]) if block not in held), None)
        if chosen and free is not None:
            swapped = sorted([*sorted(held)[1:], free])
            blocks[row, :chosen] = torch.tensor(swapped, dtype=torch.int32, device=blocks.device)
    return Selection(blocks, selection.count)
