"""How far results of one call lie from FP64, and whether a selection is a full sort of the route's own scores."""

from __future__ import annotations

import torch
from torch import Tensor

from flashqsa import pipeline, reference
from flashqsa.plan import Plan
from flashqsa.testing import compare
from flashqsa.values import IndexCache, KvCache, QsaSpec, Rows, Scores, Selection


def largest_error(
    got: Tensor,
    q: Tensor,
    kv_cache: KvCache,
    selection: Selection,
    rows: Rows,
    spec: QsaSpec,
    gate: Tensor | None,
    picked: Tensor,
) -> float:
    """Largest absolute difference of the picked rows of an attention from FP64 on the same selection; inf for NaN.

    got     [rows, q_heads, head_dim]
    picked  [n] int64 row numbers
    """
    few = Rows(rows.request[picked], rows.position[picked], rows.max_position)
    exact, _ = reference.attend(
        q[picked], kv_cache, Selection(selection.blocks[picked], selection.count[picked]), few, spec
    )
    if gate is not None:
        exact = exact * torch.sigmoid(gate[picked].double())
    error = compare.attention_error(got[picked], exact)
    return float(error.max()) if error.numel() else 0.0


def own_sort_failure(
    got: Selection, index_q: Tensor, index_cache: IndexCache, rows: Rows, spec: QsaSpec, plan: Plan, picked: Tensor
) -> str | None:
    """Whether the picked rows equal a full sort of the scores that the plan's route makes of the whole call.

    Scores are made again, in the call's own chunks: what shares a launch may move a score's last bit. None, or what
    differs. Raises ValueError for a route without scores (`has_scores`).
    """
    if not has_scores(plan):
        raise ValueError(f"route {plan.select_decision.route} has no scores of its own")
    kernels = pipeline.kernel_set(plan.select_decision.route.kernel_set)
    for start, stop in plan.select.chunks(rows.count):
        mine = picked[(picked >= start) & (picked < stop)]
        if not mine.numel():
            continue
        scores = kernels.score(index_q[start:stop], index_cache, rows.slice(start, stop), spec, plan.select)
        wanted = reference.topk(Scores(scores.values[mine - start], scores.visible[mine - start]), spec.top_blocks)
        failure = compare.same_selection(Selection(got.blocks[mine], got.count[mine]), wanted)
        if failure is not None:
            return f"of the rows {mine.tolist()}, {failure} (full sort of the route's own scores)"
    return None


def has_scores(plan: Plan) -> bool:
    """Whether the plan's route makes scores that can be asked for: not where everything is selected."""
    return plan.select_decision.route.mode not in ("everything", "reference")
