"""`flashqsa stats`: how much rows share, what ties, what is read, and how far back it lies.

Only rows that choose count: those that see more blocks than they may select. A row that takes all it sees tells nothing
of a model's locality.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashqsa.cli.show import OK, Screen, UserError, versions, write_json
from flashqsa.pipeline import KERNEL_SETS
from flashqsa.values import IndexCache, QsaSpec, Rows, Selection

GROUP_ROWS = (2, 4, 8, 16)
DISTANCE_EDGES = (0, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576)
"""Tokens from a row's position back to a selected block's last token, as band edges."""

PLOT_SUFFIXES = (".png", ".svg", ".pdf")
NO_MATPLOTLIB = "--plot needs matplotlib: pip install 'flashqsa[plot]'"

SCORE_ROWS = 256
"""Rows scored at a time: 64 MiB of scores at 65,536 blocks."""


@dataclass(frozen=True)
class Ties:
    """What happens at the cut, the score of the last block that a row takes.

    rows            rows with a block outside the selection that scores exactly what the cut scores
    rows_at_zero    such rows whose cut is 0: fewer blocks than the budget had a positive head product
    blocks_per_row  mean number of blocks at the cut, in and out, in such rows
    """

    rows: int
    rows_at_zero: int
    blocks_per_row: float


@dataclass(frozen=True)
class Stats:
    """Figures of one selection.

    rows, choosing       rows of the call, and those that see more blocks than they may select
    jaccard              mean of |A & B| / |A | B| over choosing rows and the choosing row before each; None without one
    union                group size -> mean union of a full group, as a multiple of its rows' mean selection
    pages_per_row        mean distinct pages a choosing row reads, its tail's included
    pages_read           distinct pages that any choosing row reads
    pages_visible        distinct pages that any choosing row sees
    distance             share of selected blocks in each band between two entries of DISTANCE_EDGES
    ties                 None where the call has no scores
    """

    rows: int
    choosing: int
    page_tokens: int
    jaccard: float | None
    union: dict[int, float]
    pages_per_row: float
    pages_read: int
    pages_visible: int
    distance: tuple[float, ...]
    ties: Ties | None


@dataclass(frozen=True)
class _Entries:
    """Every selected block of every choosing row, row by row and ascending within a row.

    row, block  [entries] int64
    kept        [kept] int64, the choosing rows
    counts      [kept] int64, blocks that each selects
    width       more than any block id
    """

    row: Tensor
    block: Tensor
    kept: Tensor
    counts: Tensor
    width: int


def choosing_rows(rows: Rows, spec: QsaSpec) -> Tensor:
    """[rows] bool, the rows that see more blocks than they may select."""
    return rows.visible_blocks(spec) > spec.top_blocks


def _entries(selection: Selection, rows: Rows, spec: QsaSpec) -> _Entries:
    choosing = choosing_rows(rows, spec)
    column = torch.arange(selection.blocks.shape[1], device=selection.blocks.device)
    chosen = (column < selection.count[:, None]) & choosing[:, None]
    row, place = chosen.nonzero(as_tuple=True)
    kept = choosing.nonzero().flatten()
    width = spec.visible_blocks(rows.max_position) + 1
    return _Entries(row, selection.blocks[row, place].long(), kept, selection.count[kept].long(), width)


def _neighbours(rows: Rows, spec: QsaSpec) -> Tensor:
    """[rows] bool, whether the row before is the same request's token before, and both choose."""
    choosing = choosing_rows(rows, spec)
    near = torch.zeros_like(choosing)
    near[1:] = (rows.request[1:] == rows.request[:-1]) & (rows.position[1:] == rows.position[:-1] + 1)
    near[1:] &= choosing[1:] & choosing[:-1]
    return near


def jaccard(selection: Selection, rows: Rows, spec: QsaSpec) -> float | None:
    """Mean Jaccard overlap of a choosing row with the choosing row before it; None where no two stand together."""
    near = _neighbours(rows, spec)
    if not bool(near.any()):
        return None
    entries = _entries(selection, rows, spec)
    keys = entries.row * entries.width + entries.block
    before = keys - entries.width
    place = torch.searchsorted(keys, before).clamp_max(keys.numel() - 1)
    shared = torch.zeros(rows.count, dtype=torch.int64).index_add_(0, entries.row, (keys[place] == before).long())
    count = selection.count.long()
    both = shared[1:] / (count[1:] + count[:-1] - shared[1:]).clamp_min(1)
    return float(both[near[1:]].double().mean())


def union_of_groups(selection: Selection, rows: Rows, spec: QsaSpec, group_rows: int) -> float | None:
    """Mean union of full groups of neighbours that choose, as a multiple of their mean selection; None without one."""
    entries = _entries(selection, rows, spec)
    if not entries.kept.numel():
        return None
    starts = ~_neighbours(rows, spec)[entries.kept]
    run = starts.long().cumsum(0) - 1  # which run of neighbours each choosing row is in
    first = starts.nonzero().flatten()
    place = torch.arange(run.numel()) - first[run]
    length = torch.bincount(run)
    full = place // group_rows < length[run] // group_rows
    group = torch.full((rows.count,), -1, dtype=torch.int64)
    group[entries.kept[full]] = (run * (int(length.max()) // group_rows + 1) + place // group_rows)[full]
    member = group[entries.row]
    keys = (member * entries.width + entries.block)[member >= 0]
    if not keys.numel():
        return None
    # Per group: entries of the union over entries of one row.
    return float(torch.unique(keys).numel() * group_rows / keys.numel())


def distance_profile(selection: Selection, rows: Rows, spec: QsaSpec) -> tuple[float, ...]:
    """Share of the choosing rows' blocks in each band of DISTANCE_EDGES."""
    entries = _entries(selection, rows, spec)
    last = entries.block * spec.block_tokens + spec.block_tokens - 1
    back = rows.position.long()[entries.row] - last
    band = torch.bucketize(back, torch.tensor(DISTANCE_EDGES[1:]), right=True)
    found = torch.bincount(band, minlength=len(DISTANCE_EDGES) - 1)
    return tuple((found.double() / max(back.numel(), 1)).tolist())


def pages_touched(selection: Selection, rows: Rows, spec: QsaSpec, page_tokens: int) -> tuple[float, int, int]:
    """Mean pages per choosing row, pages that any of them reads, and pages that any of them sees."""
    entries = _entries(selection, rows, spec)
    if not entries.kept.numel():
        return 0.0, 0, 0
    tail = (rows.visible_tokens % spec.block_tokens > 0)[entries.kept]
    own = entries.kept[tail]
    row = torch.cat([entries.row, own])
    page = torch.cat([entries.block * spec.block_tokens, rows.position.long()[own]]) // page_tokens
    width = rows.max_position // page_tokens + 1
    per_row = torch.unique(row * width + page).numel() / entries.kept.numel()
    request = rows.request.long()
    read = torch.unique(request[row] * width + page).numel()
    seen = torch.zeros(int(request.max()) + 1, dtype=torch.int64)
    seen.scatter_reduce_(0, request[entries.kept], rows.position.long()[entries.kept] // page_tokens + 1, "amax")
    return per_row, read, int(seen.sum())


def ties_at_cut(index_q: Tensor, index_cache: IndexCache, rows: Rows, spec: QsaSpec) -> Ties:
    """Ties at the cut of the choosing rows, from the CPU kernels' own scores of an index call."""
    tied = at_zero = blocks = 0
    choosing = choosing_rows(rows, spec)
    for start in range(0, rows.count, SCORE_ROWS):
        part = rows.slice(start, start + SCORE_ROWS)
        scores = KERNEL_SETS["cpu"].score(index_q[start : start + SCORE_ROWS], index_cache, part, spec)
        column = torch.arange(scores.values.shape[1])
        there = (column < scores.visible[:, None]) & ~scores.values.isnan()
        values = torch.where(there, scores.values, -torch.inf)
        values = values[choosing[start : start + SCORE_ROWS]]
        if not values.numel():
            continue
        cut = values.topk(spec.top_blocks, dim=1).values[:, -1]
        equal = (values == cut[:, None]) & (values > -torch.inf)
        outside = equal.sum(1) - (spec.top_blocks - (values > cut[:, None]).sum(1))
        tie = (outside > 0) & (cut > -torch.inf)
        tied += int(tie.sum())
        at_zero += int((tie & (cut == 0)).sum())
        blocks += int(equal[tie].sum())
    return Ties(tied, at_zero, blocks / tied if tied else 0.0)


def stats_of(selection: Selection, rows: Rows, spec: QsaSpec, page_tokens: int, ties: Ties | None = None) -> Stats:
    """Every figure of one selection."""
    unions = {size: union_of_groups(selection, rows, spec, size) for size in GROUP_ROWS}
    per_row, read, seen = pages_touched(selection, rows, spec, page_tokens)
    return Stats(
        rows=rows.count,
        choosing=int(choosing_rows(rows, spec).sum()),
        page_tokens=page_tokens,
        jaccard=jaccard(selection, rows, spec),
        union={size: union for size, union in unions.items() if union is not None},
        pages_per_row=per_row,
        pages_read=read,
        pages_visible=seen,
        distance=distance_profile(selection, rows, spec),
        ties=ties,
    )


def bands() -> list[str]:
    """Names of the distance bands."""
    return [f"{low:,}-{high - 1:,}" for low, high in pairwise(DISTANCE_EDGES)]


def show_stats(stats: Stats, source: str, screen: Screen) -> None:
    """The figures as tables."""
    rows: list[tuple[str, str]] = [
        ("rows", f"{stats.rows:,}"),
        ("rows that choose (see more than they may select)", f"{stats.choosing:,}"),
    ]
    if stats.jaccard is not None:
        rows.append(("neighbours' overlap (Jaccard)", f"{stats.jaccard:.3f}"))
    rows += [(f"union of {size} rows, in selections", f"{union:.3f}") for size, union in stats.union.items()]
    if stats.choosing:
        share = stats.pages_read / max(stats.pages_visible, 1)
        rows += [
            (f"pages of {stats.page_tokens} tokens read per row", f"{stats.pages_per_row:,.1f}"),
            ("pages read by any row, of those seen", f"{stats.pages_read:,} of {stats.pages_visible:,} ({share:.1%})"),
        ]
    if stats.ties is not None:
        at_zero = f"{stats.ties.rows_at_zero:,} of them at score 0"
        rows.append(("rows with a tie at the cut", f"{stats.ties.rows:,} ({at_zero})"))
        rows.append(("blocks at the cut in such a row", f"{stats.ties.blocks_per_row:,.1f}"))
    screen.table(f"selection of {source}", ("figure", "value"), rows)
    if not stats.choosing:
        screen.line("Every row selects all it sees, so there is nothing to compare.")
        return
    profile = [(band, f"{share:.1%}") for band, share in zip(bands(), stats.distance, strict=True) if share > 0]
    screen.table("how far back selected blocks lie", ("tokens back", "share"), profile)


def plot_stats(stats: Stats, source: str, path: Path) -> None:
    """Union by group size and distance profile as a PNG. Raises UserError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError(NO_MATPLOTLIB) from error
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    sizes: Sequence[int] = sorted(stats.union)
    left.plot([1, *sizes], [1.0, *(stats.union[size] for size in sizes)], marker="o", label="measured")
    left.plot([1, *sizes], [1.0, *map(float, sizes)], linestyle=":", color="grey", label="nothing shared")
    left.set(xlabel="rows of a group", ylabel="union, in selections", title="what a group reads", ylim=(0, None))
    left.legend()
    reached = [index for index, share in enumerate(stats.distance) if share > 0]
    shown = reached[-1] + 1 if reached else 1
    right.bar(bands()[:shown], stats.distance[:shown])
    right.set(xlabel="tokens back", ylabel="share of selected blocks", title="how far back")
    right.tick_params(axis="x", rotation=45)
    figure.suptitle(f"{source}: {stats.choosing:,} rows that choose")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise UserError(f"--plot {path}: cannot be written: {error}") from error


def report(stats: Stats, source: str, screen: Screen, json_target: str | None, plot: Path | None) -> int:
    """Tables, and JSON and a plot where asked."""
    show_stats(stats, source, screen)
    if plot is not None:
        plot_stats(stats, source, plot)
        screen.line(f"plot written to {plot}")
    write_json(json_target, as_json(stats, source))
    return OK


def as_json(stats: Stats, source: str) -> dict[str, Any]:
    """The figures as plain JSON values."""
    content = asdict(stats)
    content["union"] = {str(size): union for size, union in stats.union.items()}
    content["distance"] = dict(zip(bands(), stats.distance, strict=True))
    return {"source": source, "versions": versions(), **content}


def check_plot_target(path: Path | None) -> None:
    """Refuses a plot that could not be written, before the work is done that it is to show."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise UserError(f"--plot {path}: not a file in an existing folder")
    if path is not None and path.suffix.lower() not in PLOT_SUFFIXES:
        raise UserError(f"--plot {path}: wanted a name that ends in {' or '.join(PLOT_SUFFIXES)}")
    if path is not None and find_spec("matplotlib") is None:
        raise UserError(NO_MATPLOTLIB)
