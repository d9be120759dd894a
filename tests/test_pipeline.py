"""The public calls: every case against the reference, drawn ones too, and what must not change a result."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import flashqsa
from flashqsa import pipeline, reference
from flashqsa.testing import compare, nasty
from flashqsa.testing.cases import BF16, CASES, FP16, FP32, Case, named, spec_of
from flashqsa.testing.inputs import Inputs, build, fill_unwritten, relocate, take_rows
from flashqsa.testing.selections import swap_one_block
from flashqsa.testing.verify import verify_case
from flashqsa.values import FP8, IndexCache, KvCache, QsaSpec, Rows, Selection


def select(inputs: Inputs, **options: object) -> Selection:
    if inputs.selection is not None:
        return inputs.selection
    arguments = (inputs.index_q, inputs.index_cache, inputs.rows, inputs.spec)
    return pipeline.select_blocks(*arguments, **options)  # type: ignore[arg-type]


def attend(inputs: Inputs, selection: Selection | None, **options: object) -> tuple[Tensor, Tensor]:
    arguments = (inputs.q, inputs.kv_cache, selection, inputs.rows, inputs.spec, inputs.gate)
    found = pipeline.sparse_attention(*arguments, return_lse=True, **options)  # type: ignore[arg-type]
    assert isinstance(found, tuple)
    return found


def assert_same_bits(got: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    assert compare.same_bits(got[0], wanted[0]), "output"
    assert compare.same_bits(got[1], wanted[1]), "lse"


def assert_near(got: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    """Two ways through the same numbers: FP32 sums in another order, and an output rounded to its dtype."""
    unit = torch.finfo(got[0].dtype).eps
    torch.testing.assert_close(got[0], wanted[0], rtol=4 * unit, atol=max(2e-5, unit / 8))
    torch.testing.assert_close(got[1], wanted[1], rtol=1e-5, atol=2e-5)


# Every case, and drawn ones.


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
def test_every_case_is_right_and_repeats(case: Case) -> None:
    result = verify_case(case)
    assert result.passed, str(result)


@st.composite
def drawn_cases(draw: st.DrawFn) -> Case:
    contexts = tuple(draw(st.lists(st.integers(0, 130), min_size=1, max_size=4)))
    queries = tuple(draw(st.integers(0, min(tokens, 24))) for tokens in contexts)
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    spec = spec_of(
        kv_heads * draw(st.sampled_from([1, 3, 6])), kv_heads, draw(st.sampled_from([16, 64])), draw(st.integers(1, 20))
    )
    spec = replace(spec, block_tokens=draw(st.sampled_from([4, 4, 2, 8])), index_dim=16)
    cache_dtype = draw(st.sampled_from([FP32, FP16, BF16, FP8]))
    q_dtype = draw(st.sampled_from([FP32, FP16, BF16])) if cache_dtype == FP8 else cache_dtype
    page_tokens = spec.block_tokens * draw(st.integers(1, 9))
    pages = [-(-tokens // page_tokens) for tokens in contexts]
    there = [(request, page) for request, count in enumerate(pages) for page in range(count)]
    holes = tuple(draw(st.lists(st.sampled_from(there), max_size=3, unique=True))) if there else ()
    rows = sum(queries)
    return Case(
        "drawn",
        queries,
        contexts,
        spec,
        q_dtype,
        cache_dtype,
        page_tokens,
        0 if holes else draw(st.integers(0, 7)),
        tuple(draw(st.lists(st.integers(0, rows), max_size=3))),
        "scored",
        draw(st.sampled_from(["identity", "reversed", "random"])),
        draw(st.sampled_from(["interleaved", "packed", "apart", "wide-view"])),
        holes,
        draw(st.booleans()),
        head_scales=cache_dtype == FP8 and draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )


@settings(max_examples=40)
@given(drawn_cases())
def test_drawn_cases_are_right_and_repeat(case: Case) -> None:
    result = verify_case(case)
    assert result.passed, f"{result} {case}"


# What must not change a result.


@pytest.mark.parametrize("order", ["identity", "reversed", "random"])
def test_where_pages_lie_changes_no_bit(order: str) -> None:
    # 8-row groups and a remainder of 3, in two requests.
    inputs = build(Case("placed", (19, 11), (211, 163), spec_of(6, 1, top_blocks=16), BF16, BF16))
    selection = select(inputs)
    wanted = attend(inputs, selection)
    moved = relocate(inputs, order, seed=11)
    assert compare.same_selection(select(moved), selection) is None
    assert_same_bits(attend(moved, selection), wanted)


@pytest.mark.parametrize(("cache_dtype", "patterns"), [(FP8, ("nan", "infinity")), (FP16, ("nan", "infinity"))])
def test_what_page_0_holds_changes_no_bit(cache_dtype: torch.dtype, patterns: tuple[str, ...]) -> None:
    # A group of 8 rows whose union is 5 blocks; pages stand from the last one back, so page 0 is nobody's.
    case = Case("page-0", (8,), (18,), spec_of(6, 1), FP16, cache_dtype, page_tokens=4, order="reversed")
    inputs = build(case)
    assert not bool((inputs.kv_cache.page_table == 0).any())
    wanted = attend(fill_unwritten(inputs, "zeros"), None)
    assert bool(wanted[0].isfinite().all())
    for pattern in patterns:
        assert_same_bits(attend(fill_unwritten(inputs, pattern), None), wanted)


def test_requests_in_another_order_give_each_row_the_same() -> None:
    inputs = build(named("chunks-at-840-to-843"))
    selection = select(inputs)
    wanted = attend(inputs, selection)
    order = [3, 1, 0, 2]
    bounds = [0, 6, 13, 18, 19]
    taken = torch.cat([torch.arange(bounds[request], bounds[request + 1]) for request in order])
    new_id = torch.tensor([order.index(request) for request in range(4)])
    old = inputs.rows
    moved = replace(
        inputs,
        rows=Rows.from_tensors(new_id[old.request[taken].long()], old.position[taken], old.max_position),
        index_q=inputs.index_q[taken],
        q=inputs.q[taken],
        gate=None if inputs.gate is None else inputs.gate[taken],
        index_cache=replace(inputs.index_cache, page_table=inputs.index_cache.page_table[order]),
        kv_cache=replace(inputs.kv_cache, page_table=inputs.kv_cache.page_table[order]),
    )
    got = select(moved)
    assert compare.same_selection(got, Selection(selection.blocks[taken], selection.count[taken])) is None
    assert_same_bits(attend(moved, got), (wanted[0][taken], wanted[1][taken]))


@pytest.mark.parametrize("name", ["prefill", "prefill-and-decode", "padding-first-middle-last", "near", "holes"])
def test_every_row_is_what_it_is_alone(name: str) -> None:
    inputs = build(named(name))
    selection = select(inputs)
    wanted = attend(inputs, selection)
    for row in range(0, inputs.rows.count, 3):
        alone = take_rows(inputs, row, row + 1)
        got = select(alone)
        assert compare.same_selection(got, selection.slice(row, row + 1)) is None
        assert_near(attend(alone, got), (wanted[0][row : row + 1], wanted[1][row : row + 1]))


@pytest.mark.parametrize("name", ["prefill", "tie-zone-model", "verify-3-of-33", "padding-fp8", "far"])
def test_a_small_workspace_selects_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = build(named(name))
    selection = select(inputs)
    wanted = attend(inputs, selection)
    monkeypatch.setenv("FLASHQSA_WORKSPACE_MIB", "1")
    assert compare.same_selection(select(inputs), selection) is None
    assert_near(attend(inputs, selection), wanted)


def test_a_small_workspace_is_kept() -> None:
    spec = QsaSpec()
    rows = Rows.from_lengths([8192], [32768])
    cache = KvCache.interleaved(torch.zeros(1, 2, 32768, 2, 256, dtype=FP8), torch.zeros(1, 1).int(), 1.0, 1.0)
    for mib in (1, 16, 128):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FLASHQSA_WORKSPACE_MIB", str(mib))
            plan = pipeline.plan_batch(rows, spec, kv_cache=cache)
        assert plan.workspace_bytes <= mib << 20
        assert plan.attend.config.row_tokens >= plan.attend.config.group_rows[-1] * spec.block_tokens


def test_scores_of_one_chunk_lie_in_memory_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, rows = QsaSpec(), Rows.from_lengths([400], [2000])
    cache = IndexCache(torch.zeros(500, 1, 128), torch.arange(500, dtype=torch.int32)[None])
    monkeypatch.setenv("FLASHQSA_WORKSPACE_MIB", "1")
    made: list[weakref.ref[Tensor]] = []
    score = pipeline.kernel_set("cpu").score

    def watched(*arguments: Any) -> Any:
        assert [values for values in made if values() is not None] == []
        scores = score(*arguments)
        made.append(weakref.ref(scores.values))
        return scores

    monkeypatch.setattr(pipeline.kernel_set("cpu"), "score", watched)
    flashqsa.select_blocks(torch.zeros(400, 4, 128), cache, rows, spec, route="cpu:plain")
    assert len(made) > 1


def test_one_plan_serves_every_layer_of_a_batch() -> None:
    case = named("prefill-and-decode")
    first = build(case)
    plan = pipeline.plan_batch(first.rows, first.spec, index_cache=first.index_cache, kv_cache=first.kv_cache)
    for seed in (0, 1, 2):
        layer = build(replace(case, seed=seed))
        selection = select(layer, plan=plan)
        assert compare.same_selection(selection, select(layer)) is None
        assert_same_bits(attend(layer, selection, plan=plan), attend(layer, selection))


@pytest.mark.parametrize("name", ["prefill", "decode-16-fp8", "requests-without-rows"])
def test_every_route_gives_the_same_attention(name: str) -> None:
    inputs = build(named(name))
    selection = select(inputs)
    wanted = attend(inputs, selection, route="cpu:xqa")
    for route in ("cpu:grouped", "reference"):
        if route != "cpu:grouped" or inputs.rows.count > inputs.kv_cache.requests:
            assert_near(attend(inputs, selection, route=route), wanted)


def test_gradients_are_not_recorded_and_do_not_disturb() -> None:
    inputs = build(named("prefill"))
    selection = select(inputs)
    wanted = attend(inputs, selection)
    assert inputs.gate is not None
    asking = replace(inputs, q=inputs.q.clone().requires_grad_(), gate=inputs.gate.clone().requires_grad_())
    asking = replace(asking, index_q=inputs.index_q.clone().requires_grad_())
    assert compare.same_selection(select(asking), selection) is None
    got = attend(asking, selection)
    assert not got[0].requires_grad
    assert_same_bits(got, wanted)


# Below the budget.


@pytest.mark.parametrize("tokens", [1, 3, 4, 7, 100, 1700, 2047])
def test_below_the_budget_the_sparse_result_is_causal_attention(tokens: int) -> None:
    case = Case("dense", (min(tokens, 20),), (tokens,), QsaSpec(q_heads=6, kv_heads=1, head_dim=64), page_tokens=16)
    inputs = build(case)
    selection = select(inputs)
    visible = inputs.rows.visible_tokens.tolist()
    assert selection.count.tolist() == [seen // 4 for seen in visible]
    for row, count in enumerate(selection.count.tolist()):
        assert selection.blocks[row].tolist() == [*range(count)] + [-1] * (512 - count)
    causal, lse = reference.sparse_attention(
        inputs.q, inputs.kv_cache, None, inputs.rows, inputs.spec, inputs.gate, torch.float64
    )
    dense = attend(inputs, None, route="cpu:dense")
    assert_near(dense, (causal, lse))
    for route in ("cpu:xqa",) + (("cpu:grouped",) if inputs.rows.count > 1 else ()):
        assert_near(attend(inputs, selection, route=route), dense)


def test_a_selection_is_attended_as_given_below_the_budget_too() -> None:
    inputs = build(named("100-tokens-model"))
    chosen = select(inputs)
    kept = torch.where(chosen.count > 1, 1, chosen.count)
    blocks = torch.where(torch.arange(chosen.blocks.shape[1]) < kept[:, None], chosen.blocks, -1)
    fewer = flashqsa.Selection(blocks, kept.to(torch.int32))
    found = attend(inputs, fewer)
    wanted = reference.sparse_attention(
        inputs.q, inputs.kv_cache, fewer, inputs.rows, inputs.spec, inputs.gate, torch.float64
    )
    assert_near(found, wanted)
    assert not torch.equal(found[0], attend(inputs, None)[0])
    with pytest.raises(flashqsa.NoRouteError, match="cpu:dense: a selection is given"):
        attend(inputs, fewer, route="dense")


def test_a_dense_plan_is_not_for_a_given_selection() -> None:
    inputs = build(named("100-tokens-model"))
    plan = flashqsa.plan_batch(inputs.rows, inputs.spec, kv_cache=inputs.kv_cache, selection_given=False)
    assert plan.attend_decision.route.mode == "dense"
    flashqsa.sparse_attention(inputs.q, inputs.kv_cache, None, inputs.rows, inputs.spec, plan=plan)
    with pytest.raises(flashqsa.InputError, match="plan: wanted one made with selection_given=True"):
        flashqsa.sparse_attention(inputs.q, inputs.kv_cache, select(inputs), inputs.rows, inputs.spec, plan=plan)
    plan = flashqsa.plan_batch(inputs.rows, inputs.spec, kv_cache=inputs.kv_cache)
    assert plan.attend_decision.route.mode == "grouped"


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_negative_positions_are_inert(dtype: torch.dtype) -> None:
    rows = nasty.negative_positions(dtype)
    inputs = replace(build(Case("negative", (7,), (7,), spec_of(6, 1))), rows=rows)
    selection = select(inputs)
    assert selection.count.tolist() == [0, 0, 0, 0, 0, 1, 1]
    output, lse = attend(inputs, selection)
    assert bool((output[:3] == 0).all())
    assert bool((lse[:3] == -float("inf")).all())
    exact, _ = reference.sparse_attention(
        inputs.q, inputs.kv_cache, selection, rows, inputs.spec, inputs.gate, torch.float64
    )
    torch.testing.assert_close(output, exact, rtol=1e-5, atol=1e-5)
    assert float(output[3:].abs().amax(dim=(1, 2)).min()) > 0


# Blocks are consecutive tokens of one request.


def test_image_tokens_of_one_position_make_blocks_like_any_others() -> None:
    positions = nasty.image_positions()
    tokens = positions.numel()
    spec = QsaSpec(q_heads=6, kv_heads=1, head_dim=64, top_blocks=16)
    raw = nasty.raw_keys((tokens,), spec, rope_positions=(positions,))
    cache = nasty.empty_index_cache((tokens,), spec)
    rows = Rows.from_lengths([tokens], [tokens])
    pipeline.write_index_keys(
        raw.keys[0], cache, rows, spec, norm_weight=raw.norm_weight, cos=raw.cos[0], sin=raw.sin[0]
    )
    # Blocks 3 and 4 lie in the image: other raw keys under the same rotary angles.
    assert torch.equal(raw.cos[0][12], raw.cos[0][16])
    stored = cache.keys[cache.page_table[0].long()].flatten(0, 1)[: tokens // 4]
    assert bool(stored.isfinite().all())
    assert stored.unique(dim=0).shape[0] == tokens // 4
    index_q = torch.randn(tokens, 4, 128, generator=torch.Generator().manual_seed(1))
    got = pipeline.select_blocks(index_q, cache, rows, spec)
    exact = reference.score(index_q, cache, rows, spec)
    low = reference.score(index_q, cache, rows, spec, torch.float32)
    tolerance = compare.score_tolerance(low, exact)
    assert compare.selection_within_tolerance(got, exact, spec.top_blocks, tolerance) is None
    assert got.count.tolist() == [min((position + 1) // 4, 16) for position in range(tokens)]


def test_no_block_holds_tokens_of_two_requests() -> None:
    # Two requests whose tokens come in turn, one call each, on pages that alternate in one pool.
    spec = QsaSpec(q_heads=6, kv_heads=1, head_dim=64, top_blocks=4)
    tokens = (29, 29)
    raw = nasty.raw_keys(tokens, spec)
    caches = [nasty.empty_index_cache(tokens, spec, page_blocks=2, ring_tokens=4) for _ in range(2)]
    for token in range(29):
        for request in (0, 1):
            rows = Rows.from_tensors(torch.tensor([request]), torch.tensor([token]))
            step = slice(token, token + 1)
            pipeline.write_index_keys(
                raw.keys[request][step],
                caches[0],
                rows,
                spec,
                norm_weight=raw.norm_weight,
                cos=raw.cos[request][step],
                sin=raw.sin[request][step],
            )
    for request in (0, 1):
        rows = Rows.from_tensors(torch.full((29,), request), torch.arange(29))
        pipeline.write_index_keys(
            raw.keys[request],
            caches[1],
            rows,
            spec,
            norm_weight=raw.norm_weight,
            cos=raw.cos[request],
            sin=raw.sin[request],
        )
    assert compare.same_bits(caches[0].keys.nan_to_num(7.0), caches[1].keys.nan_to_num(7.0))
    assert int(caches[0].keys.isfinite().all(dim=-1).sum()) == 14


# Draft rows and unions.


@pytest.mark.parametrize("count", [1, 3, 4, 5, 8, 9, 12])
@pytest.mark.parametrize("last", [40, 41, 42, 43])
def test_any_number_of_verify_rows_at_any_position(count: int, last: int) -> None:
    inputs = build(Case("verify", (count, count), (last, last + 57), spec_of(6, 1, top_blocks=6), FP16, FP16))
    selection = select(inputs)
    assert compare.same_selection(selection, select_by_reference(inputs)) is None
    wanted = attend(inputs, selection)
    for row in range(inputs.rows.count):
        alone = attend(take_rows(inputs, row, row + 1), selection.slice(row, row + 1))
        assert_near(alone, (wanted[0][row : row + 1], wanted[1][row : row + 1]))


def select_by_reference(inputs: Inputs) -> Selection:
    return reference.select_blocks(inputs.index_q, inputs.index_cache, inputs.rows, inputs.spec)


@pytest.mark.parametrize("name", ["disjoint-model-512", "disjoint"])
def test_no_row_attends_to_another_rows_blocks(name: str) -> None:
    # A nearly flat softmax in FP32: each of a row's blocks moves its output by far more than rounding does.
    inputs = build(replace(named(name), peak=0.25, q_dtype=FP32, cache_dtype=FP32, gate=False))
    assert inputs.selection is not None
    exact, _ = reference.attend(inputs.q, inputs.kv_cache, inputs.selection, inputs.rows, inputs.spec)
    output, _ = attend(inputs, inputs.selection)
    error = (output.double() - exact).abs().amax(dim=(1, 2))
    swapped, _ = attend(inputs, swap_one_block(inputs.selection, inputs.rows, inputs.spec))
    moved = (swapped.double() - exact).abs().amax(dim=(1, 2))
    assert float(error.max()) < 1e-5
    assert float(moved.min()) > 50 * float(error.max())


# FP8 caches.


def test_small_weights_that_hold_most_of_the_mass_count() -> None:
    q, cache, rows, spec = nasty.tiny_weights()
    output, lse = attend_fp8(q, cache, rows, spec)
    rest = 2047 * torch.exp(torch.tensor(-7.0, dtype=torch.float64))
    wanted = float((rest - 1) / (rest + 1))
    torch.testing.assert_close(output, torch.full_like(output, wanted), rtol=0, atol=1e-5)
    torch.testing.assert_close(lse.double(), torch.log1p(rest).expand(1, 1), rtol=0, atol=1e-5)


def attend_fp8(q: Tensor, cache: KvCache, rows: Rows, spec: QsaSpec) -> tuple[Tensor, Tensor]:
    found = pipeline.sparse_attention(q, cache, None, rows, spec, return_lse=True)
    assert isinstance(found, tuple)
    return found


@pytest.mark.parametrize("per_head", [False, True])
def test_fp8_chunks_equal_attention_over_dequantised_numbers(per_head: bool) -> None:
    # Two chunks of 64, of which the second reads what the first wrote; values reach +-448 and the subnormals.
    spec = spec_of(6, 2, 64, top_blocks=32)
    k_scale: float | Tensor = torch.tensor([0.5, 0.25]) if per_head else 0.5
    v_scale: float | Tensor = torch.tensor([2.0, 1.5]) if per_head else 2.0
    generator = torch.Generator().manual_seed(12)
    keys, values = torch.randn(2, 128, 2, 64, generator=generator)
    values[:64] = nasty.e4m3_extremes(2, 64).repeat(64, 1, 1)[:64]
    pool = torch.empty(8, 2, 16, 2, 64).to(FP8)
    pool.view(torch.uint8).fill_(0x7F)
    table = torch.tensor([[5, 2, 7, 0, 1, 6, 3, 4]], dtype=torch.int32)
    cache = KvCache.interleaved(pool, table, k_scale, v_scale)
    q = torch.randn(128, 6, 64, generator=generator) * 4
    outputs = []
    for start in (0, 64):
        rows = Rows.from_lengths([64], [start + 64])
        pipeline.write_kv(keys[start : start + 64], values[start : start + 64], cache, rows, spec)
        outputs.append(pipeline.sparse_attention(q[start : start + 64], cache, None, rows, spec))
    plain_keys, plain_values = (
        (x / factor).clamp(-448, 448).to(FP8).double() * factor.double()
        for x, factor in (
            (keys, torch.as_tensor(k_scale).expand(2)[:, None]),
            (values, torch.as_tensor(v_scale).expand(2)[:, None]),
        )
    )
    plain = KvCache(plain_keys[None], plain_values[None], torch.zeros(1, 1).int())
    exact, _ = reference.attend(q, plain, None, Rows.from_lengths([128], [128]), spec)
    got = torch.cat([output for output in outputs if isinstance(output, Tensor)]).double()
    torch.testing.assert_close(got, exact, rtol=1e-5, atol=1e-5 * float(exact.abs().max()))
