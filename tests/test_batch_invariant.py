"""`batch_invariant=True`: a row gets the same bits whatever shares its launch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import flashqsa
from flashqsa import InputError, KnobError, Selection
from flashqsa.testing import compare
from flashqsa.testing.cases import Case, named, spec_of
from flashqsa.testing.inputs import Inputs, build, take_rows

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FP8 = torch.float8_e4m3fn

MIXED = Case(
    "mixed",
    (3, 40, 1, 9),
    (600, 900, 333, 2100),
    spec_of(12, 2, head_dim=64, top_blocks=16),
    page_tokens=16,
    order="random",
)
"""A verify step, a prefill chunk, a decode step and a short chunk, of contexts that differ."""


def outcome(inputs: Inputs, **how: object) -> tuple[Selection, Tensor, Tensor]:
    """Selection, output and lse of `qsa_attention`'s two halves, whose result must be its own."""
    arguments = (inputs.index_q, inputs.index_cache, inputs.rows, inputs.spec)
    selection = flashqsa.select_blocks(*arguments, **how)  # type: ignore[arg-type]
    rest = (inputs.rows, inputs.spec, inputs.gate, True)
    output, lse = flashqsa.sparse_attention(inputs.q, inputs.kv_cache, selection, *rest, **how)  # type: ignore[arg-type]
    joined, joined_lse = flashqsa.qsa_attention(
        inputs.index_q,
        inputs.q,
        inputs.index_cache,
        inputs.kv_cache,
        *rest,
        **how,  # type: ignore[arg-type]
    )
    assert compare.same_bits(output, joined)
    assert compare.same_bits(lse, joined_lse)
    return selection, output, lse


PARTS = ((0, 1), (2, 3), (0, 3), (3, 43), (17, 18), (20, 33), (43, 44), (40, 53), (52, 53))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtypes", [(FP32, FP32), (FP16, FP16), (BF16, BF16), (BF16, FP8)], ids=str)
def test_a_row_keeps_its_bits_in_any_company(device: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    inputs = build(replace(MIXED, q_dtype=dtypes[0], cache_dtype=dtypes[1], exact_scores=False), device)
    together = outcome(inputs, batch_invariant=True)
    for start, stop in PARTS:
        alone = outcome(take_rows(inputs, start, stop), batch_invariant=True)
        assert compare.same_selection(alone[0], together[0].slice(start, stop)) is None
        assert compare.same_bits(alone[1], together[1][start:stop])
        assert compare.same_bits(alone[2], together[2][start:stop])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_a_score_keeps_its_bits_in_any_company(device: str, dtype: torch.dtype) -> None:
    """Selections can agree by luck; the scores behind them may not differ in a bit."""
    from flashqsa import pipeline

    inputs = build(replace(MIXED, q_dtype=dtype, cache_dtype=dtype, exact_scores=False), device)

    def scores(part: Inputs) -> tuple[Tensor, Tensor]:
        plan = flashqsa.plan_batch(part.rows, part.spec, index_cache=part.index_cache, batch_invariant=True)
        kernels = pipeline.kernel_set(plan.select_decision.route.kernel_set)
        found = kernels.score(part.index_q, part.index_cache, part.rows, part.spec, plan.select)
        return found.values, found.visible

    whole, _ = scores(inputs)
    for start, stop in PARTS:
        few, visible = scores(take_rows(inputs, start, stop))
        for row, seen in enumerate(visible.tolist()):
            assert compare.same_bits(few[row, :seen], whole[start + row, :seen])


@pytest.mark.parametrize("device", DEVICES)
def test_how_far_others_see_changes_nothing(device: str) -> None:
    """Below the budget too, where a batch of short requests alone would be attended to densely."""
    case = Case("short", (5, 30), (50, 900), spec_of(6, 1, top_blocks=16), q_dtype=FP16, cache_dtype=FP16)
    inputs = build(case, device)
    together = outcome(inputs, batch_invariant=True)
    few = take_rows(inputs, 0, 5)
    short = replace(few, rows=replace(few.rows, max_position=49))
    alone = outcome(short, batch_invariant=True)
    assert compare.same_bits(alone[1], together[1][:5])
    assert compare.same_bits(alone[2], together[2][:5])


def test_the_knob_is_the_default_and_the_argument_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = build(named("prefill"))
    monkeypatch.setenv("FLASHQSA_BATCH_INVARIANT", "on")
    plan = flashqsa.plan_batch(inputs.rows, inputs.spec, kv_cache=inputs.kv_cache)
    assert plan.call.batch_invariant
    assert plan.attend_decision.route.mode == "xqa"
    wanted = outcome(inputs, batch_invariant=True)
    for how in ({}, {"plan": plan}):
        got = outcome(inputs, **how)
        assert compare.same_bits(got[1], wanted[1])
    off = flashqsa.plan_batch(inputs.rows, inputs.spec, kv_cache=inputs.kv_cache, batch_invariant=False)
    assert off.attend_decision.route.mode == "grouped"
    monkeypatch.setenv("FLASHQSA_BATCH_INVARIANT", "yes")
    with pytest.raises(KnobError, match="FLASHQSA_BATCH_INVARIANT: wanted one of on, off; got 'yes'"):
        outcome(inputs)


def test_a_plan_has_its_own() -> None:
    inputs = build(named("prefill"))
    plan = flashqsa.plan_batch(inputs.rows, inputs.spec, index_cache=inputs.index_cache)
    arguments = (inputs.index_q, inputs.index_cache, inputs.rows, inputs.spec)
    with pytest.raises(InputError, match="batch_invariant: wanted the plan's; got True"):
        flashqsa.select_blocks(*arguments, plan=plan, batch_invariant=True)
    flashqsa.select_blocks(*arguments, plan=plan, batch_invariant=False)
    with pytest.raises(InputError, match="batch_invariant: wanted True, False or None; got 'yes'"):
        flashqsa.select_blocks(*arguments, batch_invariant="yes")  # type: ignore[arg-type]
