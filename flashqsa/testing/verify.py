"""One case through the public calls, and the verdict on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flashqsa import pipeline, reference
from flashqsa.route import NoRouteError
from flashqsa.testing import compare
from flashqsa.testing.calls import attention_failures, pick_rows, product_dtype, selection_failure
from flashqsa.testing.cases import Case
from flashqsa.testing.inputs import Inputs, build, fill_unwritten, relocate
from flashqsa.values import Selection

DISTURBANCES: dict[str, Callable[[Inputs], Inputs]] = {
    "a second call": lambda inputs: inputs,
    "pages in reversed order": lambda inputs: relocate(inputs, "reversed"),
    "pages in random order": lambda inputs: relocate(inputs, "random", seed=7),
    "FP32 bytes where nothing was written": lambda inputs: fill_unwritten(inputs, "fp32-bytes"),
    "zeros where nothing was written": lambda inputs: fill_unwritten(inputs, "zeros"),
}
"""What must not change a bit of any result."""


@dataclass(frozen=True)
class CaseResult:
    """The verdict on one case.

    routes    the routes that ran, one per stage; empty where the call was refused
    refused   why no route serves the case, or None
    failures  what was wrong, a line each
    error     largest error of the attention, as a share of what is allowed; 0 where nothing was compared

    >>> from flashqsa.testing.cases import named
    >>> result = CaseResult(named("decode-1"), ("cpu:plain", "cpu:xqa"), None, (), 0.25)
    >>> result.passed, str(result)
    (True, 'decode-1 [cpu:plain, cpu:xqa]: right, error 0.25 of allowed')
    """

    case: Case
    routes: tuple[str, ...]
    refused: str | None
    failures: tuple[str, ...]
    error: float

    @property
    def passed(self) -> bool:
        """Whether the case ran and everything was right."""
        return self.refused is None and not self.failures

    def __str__(self) -> str:
        if self.refused is not None:
            return f"{self.case.name}: refused: {self.refused}"
        verdict = "; ".join(self.failures) if self.failures else f"right, error {self.error:.2f} of allowed"
        return f"{self.case.name} [{', '.join(self.routes)}]: {verdict}"


@dataclass(frozen=True)
class _Outcome:
    selection: Selection
    output: Tensor
    lse: Tensor

    def difference(self, other: _Outcome) -> str | None:
        """What of another outcome is not the same bit for bit."""
        if not compare.same_bits(self.selection.count, other.selection.count):
            return "selection.count"
        if not compare.same_bits(self.selection.blocks, other.selection.blocks):
            return "selection.blocks"
        if not compare.same_bits(self.output, other.output):
            return "output"
        return None if compare.same_bits(self.lse, other.lse) else "lse"

    def on_the_host(self) -> _Outcome:
        """The same in the CPU's memory."""
        selection = Selection(self.selection.blocks.cpu(), self.selection.count.cpu())
        return _Outcome(selection, self.output.cpu(), self.lse.cpu())


def verify_case(case: Case, device: torch.device | str = "cpu", route: str | None = None) -> CaseResult:
    """Runs a case and compares it with the reference, which runs after it.

    The selection must equal the reference's (exact scores), or differ only within tolerance of the cut (others); the
    attention on that selection must err no more than `compare.attention_tolerance`; `qsa_attention` must give the same
    as its two halves; and none of `DISTURBANCES` may change a bit. Without a route for the case, or for the pinned
    route, the result says so and nothing has run. The reference works on the CPU, row by row, whatever the device.
    """
    inputs = build(case, device)
    try:
        calls = _Calls(inputs, route)
    except NoRouteError as refusal:
        return CaseResult(case, (), str(refusal), (), 0.0)
    outcome = calls.run(inputs)
    failures: list[str | None] = []
    for name, disturb in DISTURBANCES.items():
        difference = outcome.difference(calls.run(disturb(inputs)))
        failures.append(None if difference is None else f"{difference} changes with {name}")
    if inputs.selection is None:
        difference = outcome.difference(calls.run_joined(inputs, outcome.selection))
        failures.append(None if difference is None else f"{difference} of qsa_attention is not that of its two halves")
    outcome = outcome.on_the_host()
    if inputs.q.device.type != "cpu":
        inputs = build(case)
    if inputs.selection is None:
        failures.append(_selection_failure(inputs, outcome.selection))
    rounding = product_dtype(calls.plan.attend_decision.route.kernel_set, inputs.kv_cache.keys.dtype)
    attention, error = _attention_failures(inputs, outcome, rounding)
    found = tuple(failure for failure in (*failures, *attention) if failure is not None)
    return CaseResult(case, calls.routes, None, found, error)


class _Calls:
    """The public calls under one plan."""

    def __init__(self, inputs: Inputs, route: str | None) -> None:
        self.plan = pipeline.plan_batch(
            inputs.rows,
            inputs.spec,
            index_cache=inputs.index_cache,
            kv_cache=inputs.kv_cache,
            q_dtype=inputs.case.q_dtype,
            route=route,
        )
        self.routes = (str(self.plan.select_decision.route), str(self.plan.attend_decision.route))

    def run(self, inputs: Inputs) -> _Outcome:
        """The two halves, one after the other; the first only where no selection is given."""
        selection, plan = inputs.selection, self.plan
        if selection is None:
            selection = pipeline.select_blocks(inputs.index_q, inputs.index_cache, inputs.rows, inputs.spec, plan=plan)
        output, lse = pipeline.sparse_attention(
            inputs.q, inputs.kv_cache, selection, inputs.rows, inputs.spec, inputs.gate, return_lse=True, plan=plan
        )
        return _Outcome(selection, output, lse)

    def run_joined(self, inputs: Inputs, selection: Selection) -> _Outcome:
        """`qsa_attention`; `selection` stands in for the one that it does not return."""
        output, lse = pipeline.qsa_attention(
            inputs.index_q,
            inputs.q,
            inputs.index_cache,
            inputs.kv_cache,
            inputs.rows,
            inputs.spec,
            inputs.gate,
            return_lse=True,
            plan=self.plan,
        )
        return _Outcome(selection, output, lse)


def _selection_failure(inputs: Inputs, got: Selection) -> str | None:
    arguments = (inputs.index_q, inputs.index_cache, inputs.rows, inputs.spec)
    if inputs.case.exact_scores:
        return compare.same_selection(got, reference.select_blocks(*arguments))
    return selection_failure(got, *arguments, pick_rows(inputs.rows, 0))


def _attention_failures(inputs: Inputs, outcome: _Outcome, rounding: torch.dtype | None) -> tuple[list[str], float]:
    """What is wrong with the attention on its own selection, and its largest error as a share of the allowed."""
    return attention_failures(
        outcome.output,
        outcome.lse,
        inputs.q,
        inputs.kv_cache,
        outcome.selection,
        inputs.rows,
        inputs.spec,
        inputs.gate,
        pick_rows(inputs.rows, 0),
        rounding,
    )
