"""The shared test tools: the case list, poisoned inputs, locality as measured, and comparisons that notice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashqsa import pipeline, reference
from flashqsa.testing import compare, nasty
from flashqsa.testing.cases import CASES, Case, named, spec_of
from flashqsa.testing.inputs import (
    PATTERNS,
    Inputs,
    build,
    fill_unwritten,
    filled,
    kv_pool,
    place_pages,
    relocate,
)
from flashqsa.testing.selections import (
    DEPTHS,
    DISJOINT_ROWS,
    MISS_RATES,
    locality_of,
    select_locally,
    swap_one_block,
)
from flashqsa.testing.verify import verify_case
from flashqsa.values import FP8, KvCache, QsaSpec, Rows, Scores, Selection

# Cases.


def test_case_names_are_unique_and_lead_to_their_case() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert named("decode-33").rows == 35
    with pytest.raises(KeyError, match="decode-33"):
        named("decode-34")


def test_the_case_list_covers_what_must_work() -> None:
    heads = {(case.spec.q_heads, case.spec.kv_heads) for case in CASES}
    assert {(24, 2), (12, 1), (6, 1), (24, 1), (3, 1), (32, 1)} <= heads
    assert {64, 128, 256} <= {case.spec.head_dim for case in CASES}
    assert {torch.float32, torch.float16, torch.bfloat16, FP8} <= {case.cache_dtype for case in CASES}
    assert {4, 16, 64, 204, 784, 816, 1616} <= {case.page_tokens for case in CASES}
    assert {1, 2, 3, 4, 5, 6, 7, 8, 9, 12} <= {rows for case in CASES for rows in case.query_lengths}
    assert {1, 16, 33} <= {len(case.query_lengths) for case in CASES if set(case.query_lengths) == {1}}
    assert {case.layout for case in CASES} == {"interleaved", "packed", "apart", "wide-view"}
    assert {case.order for case in CASES} == {"identity", "reversed", "random"}
    assert {case.regime for case in CASES} == {"scored", "near", "mid", "far", "equal", "disjoint"}
    assert sum(1 for case in CASES if "smoke" in case.tags) >= 5
    for case in CASES:
        assert case.cache_dtype in (case.q_dtype, FP8)
        assert all(0 <= before <= sum(case.query_lengths) for before in case.padding)
        assert not case.holes or case.page_tokens == 4 * case.index_page_blocks


def test_the_tie_zone_holds_ties_at_the_cut() -> None:
    for name in ("tie-zone", "tie-zone-model"):
        inputs = build(named(name))
        scores = reference.score(inputs.index_q, inputs.index_cache, inputs.rows, inputs.spec)
        tied = 0
        for row, visible in enumerate(scores.visible.tolist()):
            ranked = scores.values[row, :visible].sort(descending=True).values
            top = inputs.spec.top_blocks
            tied += int(visible > top and bool(ranked[top - 1] == ranked[top]))
        assert tied > inputs.rows.count // 2


# Inputs.


@pytest.mark.parametrize("name", ["prefill-fp8-head-scales", "padding-first-middle-last", "holes", "pages-of-1616"])
def test_inputs_are_the_same_each_time_and_poisoned_where_nothing_was_written(name: str) -> None:
    case = named(name)
    inputs, again = build(case), build(case)
    cache = inputs.kv_cache
    assert compare.same_bits(cache.keys, again.kv_cache.keys)
    assert compare.same_bits(inputs.index_q, again.index_q)
    written = sum(
        min(case.page_tokens, tokens - case.page_tokens * page)
        for request, tokens in enumerate(case.context_lengths)
        for page in range(-(-tokens // case.page_tokens))
        if (request, page) not in case.holes
    )
    for pool in (cache.keys, cache.values):
        sound = ~pool.float().isnan().flatten(2).any(dim=2)
        assert int(sound.sum()) == written
    blocks = sum(
        (request, block // case.index_page_blocks) not in case.holes
        for request, tokens in enumerate(case.context_lengths)
        for block in range(tokens // 4)
    )
    assert int((~inputs.index_cache.keys.float().isnan().any(dim=2)).sum()) == blocks
    assert inputs.rows.count == case.rows
    assert int((~inputs.rows.live).sum()) == len(case.padding)


def test_padding_comes_in_both_kinds() -> None:
    rows = build(named("padding-first-middle-last")).rows
    padding = [(int(rows.request[row]), int(rows.position[row])) for row in range(22) if not bool(rows.live[row])]
    assert set(padding) == {(-1, -1), (0, -2)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, FP8], ids=str)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns(pattern: str, dtype: torch.dtype) -> None:
    numbers = filled((3, 40), dtype, "cpu", pattern).float()
    if pattern == "nan":
        assert numbers.isnan().all()
    elif pattern == "zeros":
        assert not numbers.any()
    elif pattern == "large":
        assert torch.equal(
            numbers, torch.full_like(numbers, 448.0 if dtype == FP8 else float(torch.tensor(1e4).to(dtype)))
        )
    elif pattern == "infinity":
        assert not numbers.isfinite().any()
    else:
        assert numbers.unique().numel() > 20


@pytest.mark.parametrize("layout", ["interleaved", "packed", "apart", "wide-view"])
def test_layouts_have_the_strides_they_are_for(layout: str) -> None:
    keys, values = kv_pool(layout, (3, 8, 2, 16), torch.float16)
    assert keys.shape == values.shape == (3, 8, 2, 16)
    assert keys.stride() == values.stride()
    assert keys.stride(-1) == 1
    dense = keys.stride(1) == 2 * 16 and keys.stride(0) == 8 * 2 * 16
    assert dense == (layout == "apart")
    if layout == "wide-view":
        assert keys.stride(0) != 8 * keys.stride(1)
        assert keys.stride(1) != 2 * keys.stride(2)
    keys.fill_(1.0)
    assert values.isnan().all()


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="wanted interleaved"):
        kv_pool("sideways", (1, 4, 1, 4), torch.float32)
    with pytest.raises(ValueError, match="wanted identity"):
        place_pages("sorted", 1, 2, torch.Generator())
    with pytest.raises(KeyError):
        filled((4,), torch.float32, "cpu", "ones")
    with pytest.raises(KeyError):
        select_locally(Rows.from_lengths([2], [900]), QsaSpec(top_blocks=4), "random")


def logical(inputs: Inputs) -> list[Tensor]:
    """Keys, values and index keys of every request in logical order, as bytes."""
    found = []
    for table, pools in (
        (inputs.kv_cache.page_table, (inputs.kv_cache.keys, inputs.kv_cache.values)),
        (inputs.index_cache.page_table, (inputs.index_cache.keys,)),
    ):
        per_page = pools[0].shape[1]
        for request, tokens in enumerate(inputs.case.context_lengths):
            entries = tokens if pools[0].ndim == 4 else tokens // inputs.spec.block_tokens
            for entry in range(entries):
                page = int(table[request, entry // per_page])
                found += [pool[page, entry % per_page].contiguous() for pool in pools if page >= 0]
    return found


@pytest.mark.parametrize("name", ["padding-fp8", "hole-under-the-tail", "requests-without-rows"])
def test_disturbed_inputs_hold_the_same_logical_caches(name: str) -> None:
    inputs = build(named(name))
    wanted = logical(inputs)
    moved = relocate(inputs, "reversed")
    assert not torch.equal(moved.kv_cache.page_table, inputs.kv_cache.page_table)
    others = [moved, relocate(inputs, "random", 3), *(fill_unwritten(inputs, pattern) for pattern in PATTERNS)]
    for other in others:
        assert other.kv_cache.keys.stride() == inputs.kv_cache.keys.stride()
        assert all(compare.same_bits(a, b) for a, b in zip(logical(other), wanted, strict=True))
    assert not compare.same_bits(others[-1].kv_cache.keys, inputs.kv_cache.keys)


def test_page_0_is_free_under_the_reversed_order() -> None:
    inputs = build(named("pages-of-784"))
    assert (inputs.kv_cache.page_table > 0).logical_or(inputs.kv_cache.page_table == -1).all()
    assert inputs.kv_cache.keys[0].isnan().all()


# Nasty scores.


def visible(scores: Scores, row: int = 0) -> Tensor:
    return scores.values[row, : int(scores.visible[row])]


def test_poison_stands_past_every_row() -> None:
    for scores in nasty.NASTY_SCORES:
        built = scores.build()
        assert built.values.dtype == torch.float32
        assert built.visible.dtype == torch.int32
        assert int(built.visible.max()) < built.values.shape[1]
        for row in (0, built.values.shape[0] - 1):
            past = built.values[row, int(built.visible[row]) :]
            assert (past.isnan() | (past == float("inf"))).all()


def test_what_the_nasty_scores_claim() -> None:
    by_name = {scores.name: scores for scores in nasty.NASTY_SCORES}
    assert len(by_name) == len(nasty.NASTY_SCORES)

    def top(name: str) -> Selection:
        return reference.topk(by_name[name].build(), 512)

    assert top("plateau-4097").blocks[1].tolist() == list(range(512))
    assert top("infinite-floor").count.tolist() == [200] * 5
    assert top("one-nan").count.tolist() == [512, 512, 400, 0]
    assert top("short-rows").count.tolist() == [0, 0, 1, 1, 25, 511, 0]
    assert top("staggered-windows").count.tolist() == [50, 100, 131, 0, 67]
    assert top("signed-zeros").blocks[0].tolist() == [*range(50), *range(150, 612)]
    assert visible(nasty.fp16_twins()).half().unique().numel() == 101
    one_bin = visible(nasty.one_bin_overflow(16385, 1))
    assert one_bin.unique().numel() == 16385
    assert float(one_bin.min()) == 1.0
    assert float(one_bin.max()) < 1.245
    assert visible(nasty.beyond_fp16(1001, 1)).half().unique().tolist() == [float("inf")]
    assert int((visible(nasty.below_fp16(1001, 1)) > -65504).sum()) == 100
    assert float(visible(nasty.subnormals()).max()) < torch.finfo(torch.float32).tiny
    exact = visible(nasty.exact_bin_total(512, 200))
    assert (int((exact >= 4).sum()), int(((exact >= 1) & (exact < 4)).sum())) == (200, 312)


@pytest.mark.parametrize(
    ("blocks", "least", "most"), [(513, 0.95, 1.0), (530, 0.95, 1.0), (546, 0.2, 0.9), (560, 0.0, 0.1)]
)
def test_ties_at_zero_end_where_they_do_in_nature(blocks: int, least: float, most: float) -> None:
    values = nasty.ties_at_zero(blocks).values[:, :blocks]
    share = float((values.sort(dim=1, descending=True).values[:, 511] == 0).float().mean())
    assert least <= share <= most


# Locality.

UNIONS = {
    "near": {2: 1.05, 4: 1.15, 5: 1.20, 8: 1.32, 10: 1.39, 16: 1.54},
    "mid": {2: 1.16, 4: 1.43, 5: 1.54, 8: 1.83, 10: 1.97, 16: 2.30},
    "far": {2: 1.33, 4: 1.84, 5: 2.03, 8: 2.49, 10: 2.75, 16: 3.37},
}
"""Unions of neighbouring rows' blocks as multiples of one selection, published for these regimes."""

JACCARD = {"near": 0.90, "mid": 0.73, "far": 0.50}


@pytest.mark.parametrize(("regime", "context"), [("near", 3800), ("mid", 7500), ("far", 38000)])
def test_regimes_have_the_locality_they_are_named_for(regime: str, context: int) -> None:
    spec, rows = QsaSpec(), Rows.from_lengths([320], [context])
    selection = select_locally(rows, spec, regime)
    assert selection.count.tolist() == [512] * 320
    found = locality_of(selection, rows, spec)
    for depth, wanted, got in zip(DEPTHS, MISS_RATES[regime], found.miss_rates, strict=False):
        # The measuring stack starts empty, so the deepest rates are somewhat high over a few hundred rows.
        assert got == pytest.approx(wanted, abs=0.01 if depth < 8 else 0.02)
    assert found.jaccard == pytest.approx(JACCARD[regime], abs=0.02)
    assert found.unions == pytest.approx(UNIONS[regime], rel=0.03)


def test_equal_and_disjoint_selections() -> None:
    spec = QsaSpec(top_blocks=64)
    rows = Rows.from_lengths([20, 18], [5000, 4000], pad_to=40)
    equal = locality_of(select_locally(rows, spec, "equal"), rows, spec)
    assert (equal.jaccard, equal.unions[8], set(equal.miss_rates)) == (1.0, 1.0, {0.0})
    selection = select_locally(rows, spec, "disjoint")
    disjoint = locality_of(selection, rows, spec)
    assert (disjoint.jaccard, disjoint.unions[2], disjoint.unions[8]) == (0.0, 2.0, 8.0)
    window = selection.blocks[:DISJOINT_ROWS].flatten()
    assert window.unique().numel() == 8 * 64
    assert selection.count.tolist() == [64] * 38 + [0, 0]


@pytest.mark.parametrize("regime", ["near", "mid", "far", "equal", "disjoint"])
def test_given_selections_are_legal(regime: str) -> None:
    # Rows below, at and just above the budget, several requests, padding between them.
    spec = QsaSpec(top_blocks=16)
    request = torch.tensor([0] * 40 + [-1] + [1] * 5 + [2])
    position = torch.tensor([*range(40, 80), 99, *range(400, 405), 3])
    rows = Rows.from_tensors(request, position)
    selection = select_locally(rows, spec, regime, seed=4)
    blocks, seen = selection.blocks, rows.visible_blocks(spec)
    assert torch.equal(selection.count, seen.clamp(max=16))
    for row, count in enumerate(selection.count.tolist()):
        own = blocks[row, :count].tolist()
        assert own == sorted(set(own))
        assert not own or (own[0] >= 0 and own[-1] < int(seen[row]))
        assert set(blocks[row, count:].tolist()) <= {-1}
    assert compare.same_selection(select_locally(rows, spec, regime, seed=4), selection) is None


def test_locality_of_rows_that_tell_nothing() -> None:
    rows = Rows.from_lengths([3], [30])
    selection = select_locally(rows, QsaSpec(), "near")
    found = locality_of(selection, rows, QsaSpec())
    assert found.jaccard != found.jaccard
    assert found.unions == {}


# Comparisons, each with what it must notice.


def pair(*rows: list[int], width: int = 3) -> Selection:
    blocks = [row + [-1] * (width - len(row)) for row in rows]
    count = torch.tensor([len(row) for row in rows], dtype=torch.int32)
    return Selection(torch.tensor(blocks, dtype=torch.int32), count)


def test_same_bits() -> None:
    nan = torch.tensor([float("nan"), 0.0])
    assert compare.same_bits(nan, nan.clone())
    assert not compare.same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not compare.same_bits(nan, nan.double())
    assert not compare.same_bits(nan, nan[:1])
    assert compare.same_bits(torch.empty(0, 3), torch.empty(0, 3))
    assert compare.same_bits(nan.to(FP8), nan.to(FP8))
    assert compare.same_bits(torch.arange(8)[::2], torch.tensor([0, 2, 4, 6]))
    assert compare.same_bits(torch.tensor(3), torch.tensor(3))


def test_selections_that_differ() -> None:
    wanted = pair([0, 2], [1])
    assert compare.same_selection(pair([0, 2], [1]), wanted) is None
    for other, text in (
        (pair([0, 2], [2]), "row 1: selects [2] and leaves out [1], of 1 blocks"),
        (pair([0, 2, 4], [1]), "row 0: 3 blocks instead of 2 (1 rows differ)"),
        (pair([2, 0], [1]), "row 0: the right blocks in another order, or other entries after them"),
        (Selection(pair([0, 2, 1], [1]).blocks, wanted.count), "another order, or other entries after them"),
        (pair([0, 2]), "shapes [1, 3]"),
        (Selection(wanted.blocks.long(), wanted.count), "dtypes torch.int64"),
    ):
        assert text in (compare.same_selection(other, wanted) or "")


def test_selections_within_tolerance() -> None:
    exact = Scores(torch.tensor([[5.0, 1.0, 1.0001, 0.5, 9.0]]).double(), torch.tensor([4], dtype=torch.int32))

    def verdict(*own: int, tolerance: float = 1e-4) -> str | None:
        return compare.selection_within_tolerance(pair(list(own), width=2), exact, 2, tolerance)

    assert verdict(0, 2) is None
    assert verdict(0, 1) is None  # the cut is at 1.0001, block 1 scores within 2e-4 of it
    assert "selects block 1 of score 1.0" in (verdict(0, 1, tolerance=4e-5) or "")
    assert "selects block 3" in (verdict(0, 3) or "")
    assert "leaves out block 0" in (verdict(1, 2) or "")
    assert "not visible" in (verdict(0, 4) or "")
    assert "do not ascend" in (verdict(2, 0) or "")
    assert "1 blocks instead of 2" in (verdict(0) or "")
    dirty = Selection(torch.tensor([[0, 2, 7]], dtype=torch.int32), torch.tensor([2], dtype=torch.int32))
    few = Scores(exact.values, torch.tensor([3], dtype=torch.int32))
    assert compare.selection_within_tolerance(pair([0, 1, 2]), few, 3, 0.0) is None
    assert "2 blocks instead of 3" in (compare.selection_within_tolerance(dirty, few, 3, 0.0) or "")
    holes = Scores(torch.tensor([[5.0, float("-inf"), 1.0]]).double(), torch.tensor([3], dtype=torch.int32))
    assert "entries other than -1" in (compare.selection_within_tolerance(dirty, holes, 3, 0.0) or "")


def test_scores_within_tolerance() -> None:
    def scores(*values: float, seen: int = 3) -> Scores:
        return Scores(torch.tensor([values]), torch.tensor([seen], dtype=torch.int32))

    inf, nan = float("inf"), float("nan")
    exact = scores(1.0, -inf, nan, 7.0)
    assert compare.scores_within_tolerance(scores(1.001, -inf, nan, nan), exact, 0.01) is None
    assert "block 0" in (compare.scores_within_tolerance(scores(1.1, -inf, nan), exact, 0.01) or "")
    assert "block 0" in (compare.scores_within_tolerance(scores(nan, -inf, nan), exact, 0.01) or "")
    assert "block 1" in (compare.scores_within_tolerance(scores(1.0, -1e30, nan), exact, 0.01) or "")
    assert "block 2" in (compare.scores_within_tolerance(scores(1.0, -inf, 0.0), exact, 0.01) or "")
    assert "visible" in (compare.scores_within_tolerance(scores(1.0, seen=1), exact, 0.01) or "")
    assert compare.score_tolerance(scores(1.5, -inf, nan), exact) == pytest.approx(2.0)


def outcome_of(inputs: Inputs, selection: Selection) -> tuple[Tensor, Tensor, Tensor]:
    """The reference's output in FP64, in FP32 rounded to q's dtype, and its lse."""
    arguments = (inputs.q, inputs.kv_cache, selection, inputs.rows, inputs.spec)
    exact, lse = reference.attend(*arguments)
    return exact, reference.sparse_attention(*arguments, precision=torch.float32)[0], lse


@pytest.mark.parametrize("name", ["disjoint", "far", "prefill-and-decode"])
def test_one_swapped_block_per_row_is_noticed(name: str) -> None:
    # Mass on few tokens and no ties between blocks: a block more or less must show in almost every row.
    inputs = build(replace(named(name), peak=6.0))
    selection = inputs.selection or reference.select_blocks(
        inputs.index_q, inputs.index_cache, inputs.rows, inputs.spec
    )
    exact, low, _ = outcome_of(inputs, selection)
    assert compare.attention_within_tolerance(low, low, exact) is None
    swapped = swap_one_block(selection, inputs.rows, inputs.spec)
    moved = (swapped.blocks != selection.blocks).any(dim=1)
    assert moved.any()
    _, wrong, _ = outcome_of(inputs, swapped)
    noticed = (compare.attention_error(wrong, exact) > compare.attention_tolerance(low, exact)).any(dim=1)
    assert not noticed[~moved].any()
    assert float(noticed[moved].float().mean()) > 0.9


def test_attention_that_differs() -> None:
    exact = torch.tensor([[[1.0, -2.0], [0.0, 0.0]]], dtype=torch.float64)
    low = exact.float() + torch.tensor([[[1e-7, 0.0], [0.0, 0.0]]])
    assert compare.attention_within_tolerance(exact.float(), low, exact) is None
    spoiled = exact.float().clone()
    spoiled[0, 0, 1] += 1e-5
    assert "row 0 head 0" in (compare.attention_within_tolerance(spoiled, low, exact) or "")
    spoiled[0, 0, 1] = float("nan")
    assert "error inf" in (compare.attention_within_tolerance(spoiled, low, exact) or "")
    empty = exact.float().clone()
    empty[0, 1, 0] = 1e-30  # where nothing is attended to the output is 0, not nearly 0
    assert "row 0 head 1" in (compare.attention_within_tolerance(empty, low, exact) or "")
    assert "float64" in (compare.attention_within_tolerance(exact, low, exact) or "")
    assert compare.attention_within_tolerance(exact[:0].float(), low[:0], exact[:0]) is None


def test_lse_that_differs() -> None:
    inf = float("inf")
    exact = torch.tensor([[3.0, -inf]], dtype=torch.float64)
    low = exact.float()
    assert compare.lse_within_tolerance(low, exact, low) is None
    assert "errs" in (compare.lse_within_tolerance(torch.tensor([[3.0001, -inf]]), exact, low) or "")
    assert "errs" in (compare.lse_within_tolerance(torch.tensor([[float("nan"), -inf]]), exact, low) or "")
    assert "-inf" in (compare.lse_within_tolerance(torch.tensor([[3.0, 0.0]]), exact, low) or "")
    assert "float64" in (compare.lse_within_tolerance(exact, exact, low) or "")


def test_worklists_that_differ() -> None:
    rows, spec = Rows.from_lengths([2, 1], [13, 9]), QsaSpec(top_blocks=1)
    wanted = reference.worklist(pair([0], [2], [1], width=1), rows, spec, 1)
    good = reference.worklist(pair([0], [2], [1], width=1), rows, spec, 8)
    assert compare.same_reads(good, wanted, rows, spec) is None
    other = reference.worklist(pair([0], [1], [1], width=1), rows, spec, 8)
    assert "row 1" in (compare.same_reads(other, wanted, rows, spec) or "")
    idle = replace(good, row_mask=good.row_mask.index_fill(0, torch.tensor([1]), 0))
    assert compare.same_reads(idle, wanted, rows, spec) is not None
    joined = replace(good, group_rows=torch.tensor([0, 3]), group_entries=torch.tensor([0, good.block.shape[0]]))
    assert compare.same_reads(joined, wanted, rows, spec) is not None


# The verdict.


@pytest.mark.parametrize("case", [case for case in CASES if "smoke" in case.tags], ids=lambda case: case.name)
def test_smoke_cases_are_right(case: Case) -> None:
    result = verify_case(case)
    assert result.passed, str(result)
    assert len(result.routes) == 2


def test_normal_scores_are_judged_by_the_two_step_rule() -> None:
    result = verify_case(named("prefill-normal-scores-bf16"))
    assert result.passed, str(result)


def test_a_pinned_route_that_cannot_serve_is_reported() -> None:
    result = verify_case(named("decode-1"), route="dense")
    assert not result.passed
    assert result.failures == ()
    assert "rows see up to 194 blocks and select 8" in (result.refused or "")
    assert str(result).startswith("decode-1: refused: ")


KernelFunction = Callable[..., Any]


def swapped(kernels: ModuleType) -> dict[str, KernelFunction]:
    def topk(scores: Scores, out: Selection, *_plan: object) -> None:
        kernels.topk(scores, out)
        for row in range(out.rows):
            left_out = sorted(set(range(int(scores.visible[row]))) - set(out.blocks[row].tolist()))
            if left_out:
                own = sorted([left_out[0], *out.blocks[row, 1 : int(out.count[row])].tolist()])
                out.blocks[row, : len(own)] = torch.tensor(own, dtype=torch.int32)

    return {"topk": topk}


def highest_id_wins(kernels: ModuleType) -> dict[str, KernelFunction]:
    def topk(scores: Scores, out: Selection, *_plan: object) -> None:
        for row in range(out.rows):
            seen = int(scores.visible[row])
            turned = reference.topk(
                Scores(scores.values[row : row + 1, :seen].flip(1), scores.visible[row : row + 1]), 6
            )
            own = sorted(seen - 1 - block for block in turned.blocks[0].tolist() if block >= 0)
            out.blocks[row, : len(own)] = torch.tensor(own, dtype=torch.int32)
            out.count[row] = len(own)

    return {"topk": topk}


def off(kernels: ModuleType, output: float = 0.0, lse: float = 0.0, growing: float = 0.0) -> dict[str, KernelFunction]:
    calls: list[None] = []

    def attend(*arguments: Any) -> tuple[Tensor, Tensor]:
        calls.append(None)
        good, good_lse = kernels.sparse_attention(*arguments)
        good[3, 2, 5] += output + growing * len(calls)
        good_lse[3, 2] += lse
        return good, good_lse

    return {"sparse_attention": attend}


def reads(kernels: ModuleType, what: Callable[[KvCache], Tensor]) -> dict[str, KernelFunction]:
    """Adds something read from the cache that must not matter, times next to nothing."""

    def attend(q: Tensor, kv_cache: KvCache, *arguments: Any) -> tuple[Tensor, Tensor]:
        output, lse = kernels.sparse_attention(q, kv_cache, *arguments)
        return output + 1e-7 * what(kv_cache), lse

    return {"sparse_attention": attend}


FAULTS: dict[str, tuple[Callable[[ModuleType], dict[str, KernelFunction]], str]] = {
    "another block": (swapped, "selects ["),
    "ties to the highest id": (highest_id_wins, "selects ["),
    "an output element": (lambda kernels: off(kernels, output=1e-3), "row 3 head 2: error"),
    "an lse": (lambda kernels: off(kernels, lse=1e-3), "lse errs"),
    "a result per call": (lambda kernels: off(kernels, growing=1e-6), "changes with a second call"),
    "physical ids": (lambda kernels: reads(kernels, lambda cache: cache.page_table[0, 0]), "pages in reversed order"),
    "unwritten memory": (lambda kernels: reads(kernels, lambda cache: 0 * cache.keys.sum()), "error inf"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_verdict_finds_a_planted_fault(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("planted", (12,), (120,), spec_of(6, 1, top_blocks=6), peak=6.0, seed=1)
    assert verify_case(case).passed
    plant, line = FAULTS[fault]
    kernels = pipeline.KERNEL_SETS["cpu"]
    monkeypatch.setitem(pipeline.KERNEL_SETS, "cpu", SimpleNamespace(**{**vars(kernels), **plant(kernels)}))
    result = verify_case(case)
    assert not result.passed
    assert any(line in failure for failure in result.failures), result.failures
    assert line in str(result)
