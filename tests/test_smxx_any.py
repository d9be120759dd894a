"""Properties of the stages of `smxx` over drawn inputs; apart, since GPU machines may lack hypothesis."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("hypothesis", reason="inputs are drawn by hypothesis")
pytest.importorskip("triton", reason="the kernels of smxx are written in Triton")

from hypothesis import given, settings
from hypothesis import strategies as st

from flashqsa.config import ScoreConfig
from flashqsa.testing import compare
from flashqsa.testing.cases import Case, spec_of
from flashqsa.testing.inputs import build
from flashqsa.testing.nasty import scores_of
from flashqsa.values import FP8
from tests.test_smxx_score import DEVICE, FP16, ON_GPU, WINDOWS, failure, poisoned_scores
from tests.test_smxx_topk import configs, on_device, run, sorted_out


@settings(max_examples=100 if ON_GPU else 8)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 150)), min_size=1, max_size=4),
    page_blocks=st.sampled_from([1, 3, 4, 17]),
    top_blocks=st.integers(1, 12),
    padding=st.lists(st.integers(0, 8), max_size=2),
    window=st.sampled_from(WINDOWS[:3]),
    fp8=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_scores_of_any_batch(
    lengths: list[tuple[int, int]],
    page_blocks: int,
    top_blocks: int,
    padding: list[int],
    window: ScoreConfig,
    fp8: bool,
    seed: int,
) -> None:
    queries = tuple(min(rows, context) for rows, context in lengths)
    case = Case(
        "any", queries, tuple(context for _, context in lengths), spec_of(3, 1, top_blocks=top_blocks),
        FP16, FP8 if fp8 else FP16, page_blocks * 4, padding=tuple(sorted(padding)), seed=seed,
    )  # fmt: skip
    inputs = build(case, DEVICE)
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert failure(poisoned_scores(inputs, window, monkeypatch), inputs) is None


@pytest.mark.gpu
@settings(max_examples=40)
@given(
    rows=st.integers(1, 5),
    length=st.integers(1, 5000),
    levels=st.sampled_from([1, 2, 7, 300, 100_000]),
    odd=st.sampled_from([None, float("nan"), float("inf"), float("-inf"), -0.0]),
    share=st.floats(0, 1),
    top_blocks=st.sampled_from([1, 2, 31, 256, 257, 512, 700, 1024, 2048]),
    seed=st.integers(0, 10_000),
)
def test_the_top_k_of_any_scores(
    rows: int, length: int, levels: int, odd: float | None, share: float, top_blocks: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-levels, levels + 1, (rows, length), generator=generator) / 64.0
    if odd is not None:
        values[torch.rand(rows, length, generator=generator) < share] = odd
    visible = torch.randint(0, length + 1, (rows,), generator=generator).tolist()
    scores = scores_of(values, visible)
    results = [run(on_device(scores), top_blocks, config) for config in configs()]
    wanted = sorted_out(scores, top_blocks)
    assert [compare.same_selection(got, wanted) for got in results] == [None, None]
