"""Comparisons: exact where the contract is exact, and otherwise against what the reference itself errs.

Each returns None, or one line that says what differs first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashqsa.reference import topk
from flashqsa.values import QsaSpec, Rows, Scores, Selection, Worklist

TOLERANCE_MULTIPLE = 4.0
"""How much more than the reference in FP32 a kernel may err: sums in another order err by about as much again."""


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits; equal NaNs are the same, 0.0 and -0.0 are not."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b)))


def same_selection(got: Selection, wanted: Selection) -> str | None:
    """Whether two selections are equal in counts and in every entry of `blocks`, the -1 ones too.

    >>> row = torch.tensor([[0, 2, -1]], dtype=torch.int32), torch.tensor([[1, 2, -1]], dtype=torch.int32)
    >>> two = torch.tensor([2], dtype=torch.int32)
    >>> same_selection(Selection(row[0], two), Selection(row[1], two))
    'row 0: selects [0] and leaves out [1], of 2 blocks'
    """
    if got.blocks.shape != wanted.blocks.shape or got.count.shape != wanted.count.shape:
        return f"shapes {list(got.blocks.shape)}, {list(got.count.shape)} instead of {list(wanted.blocks.shape)}"
    if got.blocks.dtype != wanted.blocks.dtype or got.count.dtype != wanted.count.dtype:
        return f"dtypes {got.blocks.dtype}, {got.count.dtype} instead of {wanted.blocks.dtype}"
    differs = ((got.blocks != wanted.blocks).any(dim=1) | (got.count != wanted.count)).nonzero().flatten()
    if not differs.numel():
        return None
    row = int(differs[0])
    ours, theirs = _held(got, row), _held(wanted, row)
    if len(ours) != len(theirs):
        return f"row {row}: {len(ours)} blocks instead of {len(theirs)} ({differs.numel()} rows differ)"
    extra, lacking = sorted(set(ours) - set(theirs)), sorted(set(theirs) - set(ours))
    if not extra and not lacking:
        return f"row {row}: the right blocks in another order, or other entries after them"
    return f"row {row}: selects {extra[:8]} and leaves out {lacking[:8]}, of {len(theirs)} blocks"


def scores_within_tolerance(got: Scores, exact: Scores, tolerance: float) -> str | None:
    """Whether every visible score is within `tolerance` of the exact one, -inf where that is -inf, NaN where NaN."""
    if not torch.equal(got.visible.cpu(), exact.visible.cpu()):
        return "other numbers of visible blocks"
    for row, visible in enumerate(exact.visible.tolist()):
        ours, theirs = got.values[row, :visible].double(), exact.values[row, :visible].double()
        finite = theirs.isfinite()
        odd = ~finite & ~((ours == theirs) | (ours.isnan() & theirs.isnan()))
        bad = (odd | (finite & ~((ours - theirs).abs() <= tolerance))).nonzero().flatten()
        if bad.numel():
            block = int(bad[0])
            return f"row {row} block {block}: {float(ours[block])} instead of {float(theirs[block])} +- {tolerance:.3g}"
    return None


def score_tolerance(low: Scores, exact: Scores, multiple: float = TOLERANCE_MULTIPLE) -> float:
    """`multiple` times what the reference in FP32 errs, and one FP32 unit of the largest score."""
    worst = largest = 0.0
    for row, visible in enumerate(exact.visible.tolist()):
        theirs = exact.values[row, :visible].double()
        finite = theirs.isfinite()
        if bool(finite.any()):
            error = (low.values[row, :visible].double() - theirs)[finite].abs().max()
            worst, largest = max(worst, float(error)), max(largest, float(theirs[finite].abs().max()))
    return multiple * worst + torch.finfo(torch.float32).eps * largest


def selection_within_tolerance(got: Selection, exact: Scores, top_blocks: int, tolerance: float) -> str | None:
    """Whether a selection may come from scores within `tolerance` of the exact ones.

    Counts must be equal, entries ascending; each block on which it differs from the exact selection must score within
    twice the tolerance of the score at the cut (the block that went in and the one that went out may err apart).
    """
    wanted = topk(exact, top_blocks)
    if got.blocks.shape != wanted.blocks.shape:
        return f"shape {list(got.blocks.shape)} instead of {list(wanted.blocks.shape)}"
    for row, visible in enumerate(exact.visible.tolist()):
        ours, theirs = _held(got, row), _held(wanted, row)
        if len(ours) != len(theirs):
            return f"row {row}: {len(ours)} blocks instead of {len(theirs)}"
        if sorted(set(ours)) != ours or (ours and not 0 <= ours[0] <= ours[-1] < visible):
            return f"row {row}: blocks repeat, do not ascend or are not visible"
        if bool((got.blocks[row, len(ours) :] != -1).any()):
            return f"row {row}: entries other than -1 after the {len(ours)} blocks"
        scores = exact.values[row].double()
        cut = float(scores[theirs].min()) if theirs else 0.0
        for block in sorted(set(ours) ^ set(theirs)):
            if not abs(float(scores[block]) - cut) <= 2 * tolerance:
                verb = "selects" if block in ours else "leaves out"
                return f"row {row}: {verb} block {block} of score {float(scores[block])}, the cut is at {cut}"
    return None


def attention_error(got: Tensor, exact: Tensor) -> Tensor:
    """Largest error of each row and head: got, exact [rows, q_heads, head_dim] -> [rows, q_heads] FP64, inf for NaN."""
    error = (got.double() - exact.double()).abs().amax(dim=-1)
    return torch.where(error.isnan(), float("inf"), error)


def attention_tolerance(low: Tensor, exact: Tensor, multiple: float = TOLERANCE_MULTIPLE) -> Tensor:
    """What each row and head may err: `multiple` times what the reference errs in FP32, rounded to the output's dtype.

    low, exact  [rows, q_heads, head_dim], the reference in the output's dtype and in FP64

    Errors are taken relative to a head's largest value, and the reference's worst counts for all heads: that of one
    head is partly luck. A unit of FP32 is added. Returns [rows, q_heads] FP64, 0 where nothing is attended to.
    """
    largest = exact.double().abs().amax(dim=-1)
    seen = largest > 0
    worst = float((attention_error(low, exact)[seen] / largest[seen]).max()) if bool(seen.any()) else 0.0
    return (multiple * worst + torch.finfo(torch.float32).eps) * largest


def attention_within_tolerance(
    got: Tensor, low: Tensor, exact: Tensor, multiple: float = TOLERANCE_MULTIPLE
) -> str | None:
    """Whether every row and head errs no more than `attention_tolerance` allows."""
    if got.shape != exact.shape or got.dtype != low.dtype:
        return f"{got.dtype} {list(got.shape)} instead of {low.dtype} {list(exact.shape)}"
    error, allowed = attention_error(got, exact), attention_tolerance(low, exact, multiple)
    bad = (error > allowed).nonzero()
    if not bad.numel():
        return None
    row, head = (int(index) for index in bad[0])
    return (
        f"row {row} head {head}: error {float(error[row, head]):.3g}, allowed {float(allowed[row, head]):.3g} "
        f"({bad.shape[0]} of {error.numel()} rows x heads)"
    )


def lse_within_tolerance(got: Tensor, exact: Tensor, low: Tensor, multiple: float = TOLERANCE_MULTIPLE) -> str | None:
    """Whether lse [rows, q_heads] is FP32, -inf exactly where it must be, and elsewhere errs little.

    Allowed is `multiple` times the reference's largest error in FP32, and one FP32 unit of the largest lse (or of 1).
    """
    if got.shape != exact.shape or got.dtype != torch.float32:
        return f"lse is {got.dtype} {list(got.shape)}"
    empty = exact == float("-inf")
    if not torch.equal(got == float("-inf"), empty):
        return "lse is -inf in other rows than those that see nothing"
    ours, theirs, rounded = got.double()[~empty], exact.double()[~empty], low.double()[~empty]
    if not theirs.numel():
        return None
    unit = torch.finfo(torch.float32).eps * max(float(theirs.abs().max()), 1.0)
    allowed = multiple * float((rounded - theirs).abs().max()) + unit
    worst = float((ours - theirs).abs().max())
    return None if worst <= allowed else f"lse errs {worst:.3g}, allowed {allowed:.3g}"


def same_reads(work: Worklist, wanted: Worklist, rows: Rows, spec: QsaSpec) -> str | None:
    """Whether a worklist, however grouped, has every row read the blocks it reads in `wanted`, in valid groups.

    A valid group holds rows of one request (besides padding), its entries ascend, and each entry has a reader.
    """
    ours, theirs = row_reads(work), row_reads(wanted)
    for row in range(rows.count):
        if ours.get(row, []) != theirs.get(row, []):
            return f"row {row}: reads {ours.get(row, [])[:8]}... instead of {theirs.get(row, [])[:8]}..."
    bounds, entries = work.group_rows.tolist(), work.group_entries.tolist()
    blocks, masks = work.block.tolist(), work.row_mask.tolist()
    for group in range(work.groups):
        members = slice(bounds[group], bounds[group + 1])
        live = rows.live[members]
        if len(set(rows.request[members][live].tolist())) > 1:
            return f"group {group}: rows of several requests"
        own = blocks[entries[group] : entries[group + 1]]
        if own != sorted(set(own)):
            return f"group {group}: entries do not ascend"
        if 0 in masks[entries[group] : entries[group + 1]]:
            return f"group {group}: an entry that no row reads"
        if own and own[-1] > spec.visible_blocks(rows.max_position):
            return f"group {group}: block {own[-1]} lies past every row"
    return None


def row_reads(work: Worklist) -> dict[int, list[int]]:
    """Row -> the blocks that a worklist has it read, in the order of its entries; rows that read nothing are absent."""
    bounds, entries = work.group_rows.tolist(), work.group_entries.tolist()
    blocks, masks = work.block.tolist(), work.row_mask.tolist()
    reads: dict[int, list[int]] = {}
    for group in range(work.groups):
        for entry in range(entries[group], entries[group + 1]):
            for bit in range(64):
                if masks[entry] >> bit & 1:
                    reads.setdefault(bounds[group] + bit, []).append(blocks[entry])
    return reads


def _held(selection: Selection, row: int) -> list[int]:
    return [int(block) for block in selection.blocks[row, : int(selection.count[row])]]
