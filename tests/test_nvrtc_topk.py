"""The exact top-k of `topk.cu` on the CPU: its CUDA C++, compiled by g++, against a full sort."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashqsa import reference
from flashqsa.config import TopkConfig
from flashqsa.kernels.nvrtc.topk import topk
from flashqsa.testing import compare
from flashqsa.testing.nasty import NASTY_SCORES, NastyScores, scores_of
from flashqsa.values import SEGMENT_BLOCKS, Scores, Selection
from tests.nvrtc_emulate import CXX, emulated_launches

CONFIG = TopkConfig((9, 0), threads=256, resident=1536)


@pytest.fixture(scope="module", autouse=True)
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Launches on the CPU run in the emulator."""
    if CXX is None:
        pytest.skip("no g++ here to compile the kernels for the CPU")
    with emulated_launches(tmp_path_factory.mktemp("topk")):
        yield


def select(scores: Scores, top_blocks: int) -> Selection:
    """The kernel's selection, written over numbers that no selection holds."""
    rows = scores.visible.shape[0]
    out = Selection(torch.full((rows, top_blocks), -7, dtype=torch.int32), torch.full((rows,), -7, dtype=torch.int32))
    topk(scores, out, CONFIG)
    return out


# As many variants as there are sizes of segments and of maxima; these take every branch of one.
FEW = {512: 2}
"""Rows of each nasty kind, by the blocks to select."""


@pytest.mark.parametrize("nasty", [n for n in NASTY_SCORES if set(n.top_blocks) & set(FEW)], ids=str)
def test_nasty_scores_select_what_a_full_sort_does(nasty: NastyScores) -> None:
    scores = nasty.build()
    most = scores.visible.argsort(descending=True)[: FEW[512]]
    scores = Scores(scores.values[most], scores.visible[most])
    assert compare.same_selection(select(scores, 512), reference.topk(scores, 512)) is None


NUMBERS = st.one_of(st.floats(width=32), st.sampled_from([0.0, -0.0, 1.0, math.inf, -math.inf, math.nan, 2.0**-149]))


@settings(max_examples=25)
@given(st.lists(NUMBERS, min_size=1, max_size=30), st.integers(1, 700), st.integers(1, 24))
def test_drawn_scores_select_what_a_full_sort_does(numbers: list[float], length: int, top_blocks: int) -> None:
    """Rows that repeat what is drawn, so that equal scores stand in many segments; columns past them are poison."""
    row = torch.tensor(numbers).repeat(length // len(numbers) + 1)[:length]
    scores = scores_of(torch.stack([row, row.flip(0)]), [length, length - length // 3])
    assert compare.same_selection(select(scores, top_blocks), reference.topk(scores, top_blocks)) is None


@pytest.mark.parametrize("offset", [0, 1])
def test_the_scorers_maxima_are_used_and_rows_may_lie_anywhere(offset: int) -> None:
    generator = torch.Generator().manual_seed(offset)
    scores = scores_of(torch.rand(2, 9000, generator=generator), [9000, 8203], width=9024 + offset)
    values, segments = scores.values[:, offset:], 9024 // SEGMENT_BLOCKS
    scores = Scores(values, scores.visible - offset)
    shown = torch.where(torch.arange(values.shape[1]) < scores.visible[:, None], values, -math.inf)
    maxima = shown.nan_to_num(-math.inf, neginf=-math.inf).view(2, segments, SEGMENT_BLOCKS).amax(2)
    wanted = reference.topk(scores, 512)
    for given_maxima in (None, maxima):
        got = select(Scores(values, scores.visible, given_maxima), 512)
        assert compare.same_selection(got, wanted) is None
