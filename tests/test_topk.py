"""Exact top-k of the CPU kernels: every nasty kind of scores by name, and drawn ones, against a full stable sort."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flashqsa import pipeline, reference
from flashqsa.kernels import cpu
from flashqsa.testing import compare, nasty
from flashqsa.testing.nasty import NASTY_SCORES, NastyScores
from flashqsa.values import QsaSpec, Rows, Scores, Selection

NASTY_CALLS = [
    pytest.param(nasty_scores, top_blocks, id=f"{nasty_scores}-k{top_blocks}")
    for nasty_scores in NASTY_SCORES
    for top_blocks in nasty_scores.top_blocks
]


def select(scores: Scores, top_blocks: int) -> Selection:
    """The kernel's selection, written over numbers that no selection holds."""
    rows = scores.visible.shape[0]
    out = Selection(torch.full((rows, top_blocks), -7, dtype=torch.int32), torch.full((rows,), -7, dtype=torch.int32))
    cpu.topk(scores, out)
    return out


def sorted_by_hand(values: list[float], top_blocks: int) -> list[int]:
    """Ids of the best of one row's visible scores, by a full sort of Python numbers."""
    held = [(-score, block) for block, score in enumerate(values) if not math.isnan(score) and score != -math.inf]
    return sorted(block for _, block in sorted(held)[:top_blocks])


def bits(values: Tensor) -> Tensor:
    return values.view(torch.int32).clone()


@pytest.mark.parametrize(("nasty_scores", "top_blocks"), NASTY_CALLS)
def test_nasty_scores_select_what_a_full_sort_does(nasty_scores: NastyScores, top_blocks: int) -> None:
    scores = nasty_scores.build()
    before = bits(scores.values)
    got = select(scores, top_blocks)
    assert torch.equal(before, scores.values.view(torch.int32)), "the scores were written to"
    assert compare.same_selection(got, reference.topk(scores, top_blocks)) is None
    for row in {0, scores.visible.shape[0] // 2, scores.visible.shape[0] - 1}:
        seen = scores.values[row, : int(scores.visible[row])].tolist()
        assert got.blocks[row, : int(got.count[row])].tolist() == sorted_by_hand(seen, top_blocks)


@settings(max_examples=60)
@given(
    st.lists(
        st.lists(
            st.one_of(
                st.floats(width=32),
                st.sampled_from([0.0, -0.0, 1.0, math.inf, -math.inf, math.nan, 2.0**-149, 2.0**-126, 3e38]),
            ),
            max_size=40,
        ),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 24),
    st.sampled_from([math.nan, math.inf, 3e38]),
)
def test_drawn_scores_select_what_a_full_sort_does(rows: list[list[float]], top_blocks: int, poison: float) -> None:
    width = max(len(row) for row in rows) + 2
    values = torch.full((len(rows), width), poison)
    for index, row in enumerate(rows):
        values[index, : len(row)] = torch.tensor(row, dtype=torch.float32)
    scores = Scores(values, torch.tensor([len(row) for row in rows], dtype=torch.int32))
    got = select(scores, top_blocks)
    for index, row in enumerate(rows):
        wanted = sorted_by_hand([float(np.float32(score)) for score in row], top_blocks)
        assert got.count[index] == len(wanted)
        assert got.blocks[index].tolist() == wanted + [-1] * (top_blocks - len(wanted))


@pytest.mark.parametrize("visible", [480, 512, 768, 1342, 8448])
@pytest.mark.parametrize("rows", [64, 192])
def test_ties_fall_the_same_on_every_call_width_and_row_count(visible: int, rows: int) -> None:
    narrow = nasty.quantised_ties(visible, rows)
    wide = nasty.quantised_ties(visible, rows, width=visible + 4099)
    first = select(wide, 512)
    for again in (select(wide, 512), select(narrow, 512)):
        assert compare.same_selection(again, first) is None
    for start, stop in ((0, 1), (1, 34), (34, rows)):
        part = Scores(wide.values[start:stop], wide.visible[start:stop])
        assert compare.same_selection(select(part, 512), first.slice(start, stop)) is None


def test_what_lies_past_a_row_changes_nothing() -> None:
    poisoned = nasty.garbage_past_prefix()
    clean = torch.zeros_like(poisoned.values)
    for row, visible in enumerate(poisoned.visible.tolist()):
        clean[row, :visible] = poisoned.values[row, :visible]
    before = bits(poisoned.values)
    got = select(poisoned, 512)
    assert got.count.tolist() == [5, 512, 512]
    assert compare.same_selection(got, select(Scores(clean, poisoned.visible), 512)) is None
    assert torch.equal(before, poisoned.values.view(torch.int32))


def test_a_selection_is_written_in_place_and_only_where_it_is_asked() -> None:
    whole = Selection(torch.full((6, 8), -7, dtype=torch.int32), torch.full((6,), -7, dtype=torch.int32))
    cpu.topk(nasty.scores_of(torch.arange(20.0).repeat(2, 1)), whole.slice(2, 4))
    assert whole.count.tolist() == [-7, -7, 8, 8, -7, -7]
    assert whole.blocks[2:4].tolist() == [list(range(12, 20))] * 2
    assert bool((whole.blocks[[0, 1, 4, 5]] == -7).all())


def test_blocks_are_ranked_and_then_expanded() -> None:
    # 600 blocks and a tail of 3: ranking copies of a score per token would cut inside a block of 4.
    spec = QsaSpec()
    scores = nasty.distinct_blocks_with_tail()
    rows = Rows.from_lengths([1], [4 * 600 + 3])
    got = select(scores, spec.top_blocks)
    tokens = got.to_token_table(rows, spec, count_column=True)[0].tolist()
    assert tokens[-1] == spec.selection_width == 2051
    assert tokens[2048:2051] == [2400, 2401, 2402]
    chosen = got.blocks[0].tolist()
    assert tokens[:2048] == [4 * block + offset for block in chosen for offset in range(4)]


def test_short_rows_take_every_block_they_see() -> None:
    got = select(nasty.short_rows(), 512)
    assert got.count.tolist() == [0, 0, 1, 1, 25, 511, 0]
    assert got.blocks[5].tolist() == [*range(511), -1]
    assert got.blocks[6].tolist() == [-1] * 512


def test_no_rows_and_no_columns() -> None:
    got = select(Scores(torch.empty(0, 9), torch.empty(0, dtype=torch.int32)), 4)
    assert got.blocks.shape == (0, 4)
    got = select(Scores(torch.empty(3, 0), torch.zeros(3, dtype=torch.int32)), 4)
    assert got.count.tolist() == [0, 0, 0]
    assert got.blocks.tolist() == [[-1] * 4] * 3


@pytest.mark.parametrize(("planted", "wanted"), [(10, [*range(16)]), (4000, [*range(15), 4000])])
def test_a_planted_block_wins_in_every_row(planted: int, wanted: list[int]) -> None:
    index_q, cache, rows, spec = nasty.planted_block(rows=8, planted=planted)
    assert pipeline.select_blocks(index_q, cache, rows, spec).blocks.tolist() == [wanted] * 8
