"""What each group of rows has to read, from plain sets."""

from __future__ import annotations

import torch

from flashqsa.reference.expand import row_blocks
from flashqsa.values import QsaSpec, Rows, Selection, Worklist


def groups_of(rows: Rows, group_rows: int) -> list[tuple[int, int]]:
    """Row ranges of at most `group_rows` consecutive rows that belong to one request, or are all padding.

    >>> request, position = torch.tensor([0, 0, 0, -1, 1]), torch.tensor([5, 6, 7, -1, 3])
    >>> groups_of(Rows.from_tensors(request, position), group_rows=2)
    [(0, 2), (2, 3), (3, 4), (4, 5)]
    """
    live = rows.live.tolist()
    owner = [request if alive else -1 for request, alive in zip(rows.request.tolist(), live, strict=True)]
    starts: list[int] = []
    for row in range(rows.count):
        if not starts or owner[row] != owner[row - 1] or row - starts[-1] == group_rows:
            starts.append(row)
    return list(zip(starts, [*starts, rows.count][1:], strict=True))


def worklist(selection: Selection | None, rows: Rows, spec: QsaSpec, group_rows: int) -> Worklist:
    """The union of each group's blocks and tails, ascending, with a bit per row that attends to them.

    Without a selection every visible block is read. A group of padding reads nothing.
    """
    ranges = groups_of(rows, group_rows)
    entries, blocks, masks = [0], [], []
    for start, stop in ranges:
        mask_of: dict[int, int] = {}
        for row in range(start, stop):
            position = int(rows.position[row])
            reads = row_blocks(selection, rows, spec, row)
            if bool(rows.live[row]) and spec.tail_tokens(position):
                reads = [*reads, spec.visible_blocks(position)]
            for block in reads:
                mask_of[block] = mask_of.get(block, 0) | 1 << (row - start)
        for block in sorted(mask_of):
            blocks.append(block)
            masks.append(_as_int64(mask_of[block]))
        entries.append(len(blocks))
    device = rows.request.device
    return Worklist(
        torch.tensor([0, *(stop for _, stop in ranges)]),
        torch.tensor(entries),
        torch.tensor(blocks, dtype=torch.int32, device=device),
        torch.tensor(masks, dtype=torch.int64, device=device),
    )


def _as_int64(bits: int) -> int:
    """64 bits as the signed number that holds them."""
    return bits - (1 << 64) if bits >> 63 else bits
