"""The stages of a bench case: what is called, how its result is judged, and what it has to do at least."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flashqsa import pipeline
from flashqsa.cli.bench_counts import Counts, attention_counts, both_counts, selection_counts
from flashqsa.cli.bench_inputs import Workload
from flashqsa.cli.bench_peer import Peer, as_selection
from flashqsa.cli.bench_report import Verdict
from flashqsa.plan import Plan
from flashqsa.route import SELECT_CANDIDATES, route_refusal
from flashqsa.testing.accuracy import has_scores, largest_error, own_sort_failure
from flashqsa.testing.calls import pick_rows, selection_failure
from flashqsa.values import Selection

LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""What an attention's output may differ from FP64 on contents of unit variance, by its dtype."""

ALL_ROWS = 64
"""A case of no more rows is compared in all of them."""

TWO_STEPS = "FP64 scores: other blocks only within what FP32 scores err, at the cut"


@dataclass(frozen=True)
class Setup:
    """What the measures of all cases share.

    route       pinned, or None
    check_rows  rows that are compared, of a case with more than ALL_ROWS
    """

    device: torch.device
    peer: Peer | None
    route: str | None
    check_rows: int


@dataclass(frozen=True)
class Measure:
    """One stage of a case: a call, how its result is judged, and a peer's call for the same."""

    name: str
    call: Callable[[], Any]
    judge: Callable[[Any], Verdict]
    counts: Counts
    routes: tuple[str, ...]
    workspace_bytes: int
    peer_call: Callable[[], Any] | None
    peer_judge: Callable[[Any], Verdict]


def measures_of(work: Workload, setup: Setup) -> list[Measure]:
    """The stages of a case, with their plans made."""
    case, names = work.case, work.case.measures
    found: list[Measure] = []
    chosen = work.selection
    pick = pick_rows(work.rows, 0 if case.rows <= ALL_ROWS else setup.check_rows)
    if "selection" in names:
        routes = _serving(_select_plan(work, None)) if case.every_route else [setup.route]
        for index, route in enumerate(routes):
            # The peer is timed once, in turn with all routes.
            stage = _selection_measure(work, setup if index == 0 else replace(setup, peer=None), pick, route)
            found.append(replace(stage, name=f"{stage.name} {route}") if case.every_route else stage)
        if case.kind == "pipeline":
            chosen = found[0].call()
    if "attention" in names:
        assert chosen is not None
        found.append(_attention_measure(work, chosen, setup, pick))
    if "together" in names:
        found.append(_together_measure(work, setup, pick))
    return found


def _serving(plan: Plan) -> list[str]:
    """Names of the routes that can serve a plan's selection, the one that it takes first; the reference is for checking
    and is not among them.
    """
    taken = plan.select_decision.route
    able = [c.route for c in SELECT_CANDIDATES if route_refusal(c.route, plan.call, plan.facts) is None]
    return [str(route) for route in dict.fromkeys((taken, *able)) if route.mode != "reference"]


def _select_plan(work: Workload, pin: str | None) -> Plan:
    case = work.case
    return pipeline.plan_batch(
        work.rows, case.spec, index_cache=work.index_cache, q_dtype=case.q_dtype, selection_given=False, route=pin
    )


def _selection_measure(work: Workload, setup: Setup, pick: Tensor, pin: str | None) -> Measure:
    case, rows, spec, index_q, index_cache = work.case, work.rows, work.case.spec, work.index_q, work.index_cache
    assert index_q is not None
    assert index_cache is not None
    plan = _select_plan(work, pin)

    def judge(got: Any) -> Verdict:
        assert isinstance(got, Selection)
        failure = selection_failure(got, index_q, index_cache, rows, spec, pick)
        method = TWO_STEPS
        if has_scores(plan):
            method = f"full sort of the route's own scores: equal; {method}"
            failure = failure or own_sort_failure(got, index_q, index_cache, rows, spec, plan, pick)
        return Verdict(failure, pick.numel(), method)

    def judge_peer(got: Any) -> Verdict:
        method = TWO_STEPS
        selection = as_selection(got, spec)
        if isinstance(selection, str):
            return Verdict(selection, 0, method)
        if selection.blocks.shape != (rows.count, spec.top_blocks) or selection.blocks.device != setup.device:
            place = f"{list(selection.blocks.shape)} on {selection.blocks.device}"
            return Verdict(f"wanted {[rows.count, spec.top_blocks]} on {setup.device}; got {place}", 0, method)
        failure = selection_failure(selection, index_q, index_cache, rows, spec, pick)
        return Verdict(failure, pick.numel(), method)

    return Measure(
        "selection",
        lambda: pipeline.select_blocks(index_q, index_cache, rows, spec, plan=plan),
        judge,
        selection_counts(case, rows),
        tuple(plan.select_decision.lines()),
        plan.select.workspace_bytes,
        setup.peer.call("selection", work, None) if setup.peer else None,
        judge_peer,
    )


def _attention_measure(work: Workload, chosen: Selection, setup: Setup, pick: Tensor) -> Measure:
    case, rows, spec, q, kv_cache, gate = work.case, work.rows, work.case.spec, work.q, work.kv_cache, work.gate
    assert q is not None
    assert kv_cache is not None
    plan = pipeline.plan_batch(rows, spec, kv_cache=kv_cache, q_dtype=case.q_dtype, route=setup.route)
    judge = _attention_judge(work, lambda: chosen, pick)
    return Measure(
        "attention",
        lambda: pipeline.sparse_attention(q, kv_cache, chosen, rows, spec, gate, plan=plan),
        judge,
        attention_counts(case, chosen, rows),
        tuple(plan.attend_decision.lines()),
        plan.attend.workspace_bytes,
        setup.peer.call("attention", work, chosen) if setup.peer else None,
        judge,
    )


def _together_measure(work: Workload, setup: Setup, pick: Tensor) -> Measure:
    case, rows, spec, gate = work.case, work.rows, work.case.spec, work.gate
    index_q, index_cache, q, kv_cache = work.index_q, work.index_cache, work.q, work.kv_cache
    assert index_q is not None
    assert index_cache is not None
    assert q is not None
    assert kv_cache is not None
    plan = pipeline.plan_batch(
        rows,
        spec,
        index_cache=index_cache,
        kv_cache=kv_cache,
        q_dtype=case.q_dtype,
        selection_given=False,
        route=setup.route,
    )
    # The selection that qsa_attention makes and does not hand back: selections repeat bit by bit.
    chosen = pipeline.select_blocks(index_q, index_cache, rows, spec, plan=plan)
    judge = _attention_judge(work, lambda: chosen, pick)
    return Measure(
        "together",
        lambda: pipeline.qsa_attention(index_q, q, index_cache, kv_cache, rows, spec, gate, plan=plan),
        judge,
        both_counts(selection_counts(case, rows), attention_counts(case, chosen, rows)),
        (*plan.select_decision.lines(), *plan.attend_decision.lines()),
        plan.workspace_bytes,
        None,
        judge,
    )


def _attention_judge(work: Workload, chosen: Callable[[], Selection], pick: Tensor) -> Callable[[Any], Verdict]:
    """How an attention's output is judged: against FP64 on the same selection."""

    def judge(got: Any) -> Verdict:
        q, kv_cache, rows = work.q, work.kv_cache, work.rows
        assert q is not None
        assert kv_cache is not None
        method, limit = "FP64 reference on the same selection", LIMITS[work.case.q_dtype]
        if not isinstance(got, Tensor) or (got.shape, got.dtype, got.device) != (q.shape, q.dtype, q.device):
            kind = f"{got.dtype} {list(got.shape)} on {got.device}" if isinstance(got, Tensor) else type(got).__name__
            return Verdict(f"wanted {q.dtype} {list(q.shape)} on {q.device}; got {kind}", 0, method, None, limit)
        error = largest_error(got, q, kv_cache, chosen(), rows, work.case.spec, work.gate, pick)
        failure = None if error <= limit else f"largest error {error:.3g}, limit {limit:g}"
        return Verdict(failure, pick.numel(), method, error, limit)

    return judge
