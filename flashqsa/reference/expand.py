"""The tokens and blocks a row attends to."""

from __future__ import annotations

from flashqsa.values import QsaSpec, Rows, Selection


def row_blocks(selection: Selection | None, rows: Rows, spec: QsaSpec, row: int) -> list[int]:
    """The complete blocks a row attends to, ascending; without a selection all it sees. None for padding."""
    position = int(rows.position[row])
    if int(rows.request[row]) < 0 or position < 0:
        return []
    if selection is None:
        return list(range(spec.visible_blocks(position)))
    return [int(block) for block in selection.blocks[row, : int(selection.count[row])]]


def row_tokens(selection: Selection | None, rows: Rows, spec: QsaSpec, row: int) -> list[int]:
    """The tokens a row attends to: those of its blocks, ascending, then its tail. None for padding.

    >>> rows = Rows.from_lengths([1], [14])
    >>> row_tokens(None, rows, QsaSpec(), 0) == list(range(14))
    True
    """
    position = int(rows.position[row])
    if int(rows.request[row]) < 0 or position < 0:
        return []
    tokens = [
        block * spec.block_tokens + offset
        for block in row_blocks(selection, rows, spec, row)
        for offset in range(spec.block_tokens)
    ]
    return tokens + list(range(position + 1 - spec.tail_tokens(position), position + 1))


def expand(selection: Selection | None, rows: Rows, spec: QsaSpec) -> list[list[int]]:
    """`row_tokens` of every row."""
    return [row_tokens(selection, rows, spec, row) for row in range(rows.count)]
