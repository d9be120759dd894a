"""Bytes and FLOPs of a call, and what its rows share: counted from the selection that occurred."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashqsa.cli.bench_cases import BenchCase
from flashqsa.values import Rows, Selection

GROUP_ROWS = (2, 4, 5, 8, 10, 16)
"""Sizes of groups whose union is reported."""

USEFUL_GROUP_ROWS = 8
"""Rows (or all of a request, where it has fewer) that share a gather in the count of useful bytes."""

ENTRY_BYTES = 12
"""A worklist entry: an int32 block and 64 bits of rows."""


@dataclass(frozen=True)
class Counts:
    """What a call has to do at least.

    flops        of its products: two per multiplication and addition
    bytes        name -> bytes; `useful` is what the share of the copy roof is taken of
    union        group size -> mean union of full groups of neighbours, as a multiple of one row's selection
    group_gather group size -> bytes of keys and values that such groups gather
    """

    flops: int
    bytes: dict[str, int]
    union: dict[int, float]
    group_gather: dict[int, int]


@dataclass(frozen=True)
class _Union:
    """Entries and tokens that groups read, and full groups' blocks as a multiple of one row's."""

    entries: int
    tokens: int
    ratio: float | None


def attended_tokens(case: BenchCase, selection: Selection, rows: Rows) -> Tensor:
    """[rows] int64, tokens each row attends to."""
    tail = rows.visible_tokens.long() % case.spec.block_tokens
    return selection.count.long() * case.spec.block_tokens + tail


def union_of(case: BenchCase, selection: Selection, rows: Rows, group_rows: int) -> _Union:
    """What groups of `group_rows` neighbours of one request read; the last group of a request may be smaller.

    A block counts once in a group, with the most tokens that any of its rows reads of it: the tail of one row may be
    part of a block that another selects.
    """
    device, spec = rows.request.device, case.spec
    width, per_block = spec.visible_blocks(rows.max_position) + 1, spec.block_tokens
    row = torch.arange(rows.count, device=device)
    place, per_request = row % case.rows_per_request, -(-case.rows_per_request // group_rows)
    group = row // case.rows_per_request * per_request + place // group_rows
    whole = (place // group_rows + 1) * group_rows <= case.rows_per_request
    chosen = torch.arange(selection.blocks.shape[1], device=device) < selection.count[:, None]
    # A key holds group, block and, in its last place, tokens left out: the first of equal blocks reads the most.
    keys = (group[:, None] * width + selection.blocks.long())[chosen] * (per_block + 1)
    visible = rows.visible_tokens.long()
    tail = visible % per_block
    open_keys = (group * width + visible // per_block) * (per_block + 1) + per_block - tail
    keys = torch.cat([keys, open_keys[tail > 0]]).sort().values
    first = torch.ones_like(keys, dtype=torch.bool)
    first[1:] = keys[1:] // (per_block + 1) != keys[:-1] // (per_block + 1)
    kept = keys[first]
    read = per_block - kept % (per_block + 1)
    whole_groups = torch.zeros(case.requests * per_request, dtype=torch.bool, device=device)
    whole_groups[group[whole]] = True
    selected = int(((read == per_block) & whole_groups[kept // (per_block + 1) // width]).sum())
    one_row = float(selection.count[whole].double().sum()) / group_rows
    return _Union(int(kept.numel()), int(read.sum()), selected / one_row if one_row else None)


def attention_counts(case: BenchCase, selection: Selection, rows: Rows) -> Counts:
    """Of the attend stage: gathers, queries, gate and output, the selection and a worklist written and read once."""
    spec = case.spec
    token_bytes = 2 * spec.kv_heads * spec.head_dim * case.dtype.itemsize
    tokens = int(attended_tokens(case, selection, rows).sum())
    own = min(USEFUL_GROUP_ROWS, case.rows_per_request)
    unions = {size: union_of(case, selection, rows, size) for size in sorted({*GROUP_ROWS, own, case.rows_per_request})}
    heads = 3 if case.gate else 2
    found = {
        "gather_per_row": tokens * token_bytes,
        "gather_of_groups": unions[own].tokens * token_bytes,
        "gather_distinct": unions[case.rows_per_request].tokens * token_bytes,
        "q_gate_output": heads * rows.count * spec.q_heads * spec.head_dim * case.q_dtype.itemsize,
        "selection": rows.count * (spec.top_blocks + 1) * 4,
        "worklist": 2 * unions[own].entries * ENTRY_BYTES,
    }
    found["useful"] = sum(found[name] for name in ("gather_of_groups", "q_gate_output", "selection", "worklist"))
    found["without_sharing"] = sum(found[name] for name in ("gather_per_row", "q_gate_output", "selection"))
    shown = {size: union.ratio for size, union in unions.items() if size in GROUP_ROWS}
    return Counts(
        4 * tokens * spec.q_heads * spec.head_dim,
        found,
        {size: ratio for size, ratio in shown.items() if ratio is not None},
        {size: union.tokens * token_bytes for size, union in unions.items() if size in (*GROUP_ROWS, own)},
    )


def selection_counts(case: BenchCase, rows: Rows) -> Counts:
    """Of the select stage: index queries, each request's visible keys once, the selection. Scores are not counted as
    useful bytes; `scores` is what they take where they are all kept.
    """
    spec = case.spec
    visible = rows.visible_blocks(spec).long()
    scored = int(visible[visible > spec.top_blocks].sum())
    found = {
        "index_q": rows.count * spec.index_heads * spec.index_dim * case.q_dtype.itemsize,
        "keys": case.requests * spec.visible_blocks(rows.max_position) * spec.index_dim * case.dtype.itemsize,
        "selection": rows.count * (spec.top_blocks + 1) * 4,
    }
    found["useful"] = sum(found.values())
    found["scores"] = scored * 4
    return Counts(2 * scored * spec.index_heads * spec.index_dim, found, {}, {})


def both_counts(selection: Counts, attention: Counts) -> Counts:
    """Of select and attend, one after the other."""
    names = dict.fromkeys((*selection.bytes, *attention.bytes))
    added = {name: selection.bytes.get(name, 0) + attention.bytes.get(name, 0) for name in names}
    return Counts(selection.flops + attention.flops, added, attention.union, attention.group_gather)
