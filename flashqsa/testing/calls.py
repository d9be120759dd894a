"""The verdict on results of one call that came from anywhere, a capture for one: no `Case` stands behind it."""

from __future__ import annotations

import torch
from torch import Tensor

from flashqsa import reference
from flashqsa.testing import compare
from flashqsa.values import FP8, IndexCache, KvCache, QsaSpec, Rows, Selection


def pick_rows(rows: Rows, most: int) -> Tensor:
    """[picked] int64, at most `most` rows, evenly spaced from the first to the last; all of them for 0.

    >>> pick_rows(Rows.from_lengths([9], [9]), 3).tolist()
    [0, 4, 8]
    """
    if most == 0 or rows.count <= most:
        return torch.arange(rows.count, device=rows.request.device)
    return torch.linspace(0, rows.count - 1, most, device=rows.request.device).round().long()


def selection_failure(
    got: Selection, index_q: Tensor, index_cache: IndexCache, rows: Rows, spec: QsaSpec, picked: Tensor
) -> str | None:
    """Whether the picked rows of a selection may come from FP32 scores; None, or what differs.

    Blocks may differ from the exact selection only within what FP32 scores err, at the cut. Row numbers in the text
    count the picked rows.
    """
    few = Rows(rows.request[picked], rows.position[picked], rows.max_position)
    arguments = (index_q[picked], index_cache, few, spec)
    exact = reference.score(*arguments)
    low = reference.score(*arguments, precision=torch.float32)
    part = Selection(got.blocks[picked], got.count[picked])
    tolerance = compare.score_tolerance(low, exact)
    return compare.selection_within_tolerance(part, exact, spec.top_blocks, tolerance)


def product_dtype(kernel_set: str, cache_dtype: torch.dtype) -> torch.dtype | None:
    """What a kernel set's products take queries and probabilities as; None for FP32, which rounds nothing.

    >>> product_dtype("cpu", torch.float16), product_dtype("smxx", FP8)
    (None, torch.float16)
    """
    if kernel_set in ("cpu", "reference") or cache_dtype == torch.float32:
        return None
    return torch.float16 if cache_dtype == FP8 else cache_dtype


def attention_failures(
    got: Tensor,
    got_lse: Tensor,
    q: Tensor,
    kv_cache: KvCache,
    selection: Selection | None,
    rows: Rows,
    spec: QsaSpec,
    gate: Tensor | None,
    picked: Tensor,
    rounding: torch.dtype | None = None,
) -> tuple[list[str], float]:
    """What is wrong with the picked rows of an attention, and the largest error as a share of what is allowed.

    got, got_lse  [rows, q_heads, head_dim] in q's dtype, [rows, q_heads] FP32
    rounding      what the route's products round to (`product_dtype`); what the reference errs with the same rounding
                  decides what is allowed
    """
    few = Rows(rows.request[picked], rows.position[picked], rows.max_position)
    chosen = None if selection is None else Selection(selection.blocks[picked], selection.count[picked])
    part_gate = None if gate is None else gate[picked]
    exact, lse = reference.attend(q[picked], kv_cache, chosen, few, spec)
    if part_gate is not None:
        exact = exact * torch.sigmoid(part_gate.double())
    low, low_lse = reference.sparse_attention(
        q[picked], kv_cache, chosen, few, spec, part_gate, torch.float32, rounding
    )
    found = (
        compare.attention_within_tolerance(got[picked], low, exact),
        compare.lse_within_tolerance(got_lse[picked], lse, low_lse),
    )
    allowed = compare.attention_tolerance(low, exact)
    error = compare.attention_error(got[picked], exact)[allowed > 0] / allowed[allowed > 0]
    return [failure for failure in found if failure is not None], float(error.max()) if error.numel() else 0.0
