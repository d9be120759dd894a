"""The CPU's fused selection: exact on any scores, the same scores as `score`, and memory that no context enlarges."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import flashqsa
from flashqsa import Call, DeviceFacts, QsaSpec, pipeline, reference
from flashqsa.config import FusedConfig, fused_row_bytes, fused_tile_bytes
from flashqsa.kernels import cpu
from flashqsa.kernels.cpu.score import empty_selection
from flashqsa.kernels.cpu.select import Best
from flashqsa.plan import Plan, SelectPlan, make_plan, plan_select
from flashqsa.route import choose_route
from flashqsa.testing import compare, nasty
from flashqsa.testing.accuracy import own_sort_failure
from flashqsa.testing.calls import pick_rows
from flashqsa.testing.cases import CASES, Case, named, spec_of
from flashqsa.testing.inputs import Inputs, build, take_rows
from flashqsa.testing.nasty import NASTY_SCORES, NastyScores
from flashqsa.testing.verify import verify_case
from flashqsa.values import FP8, IndexCache, Rows, Scores, Selection

CPU = DeviceFacts.named("cpu")
SPEC = QsaSpec()
PIN = "cpu:fused"


def fused_plan(rows: Rows, spec: QsaSpec, index_cache: IndexCache, **how: object) -> Plan:
    return pipeline.plan_batch(rows, spec, index_cache=index_cache, route=PIN, **how)  # type: ignore[arg-type]


def tiled(plan: Plan, chunk_rows: int, tile_rows: int, tile_blocks: int) -> Plan:
    """The same plan with other sizes."""
    sizes = replace(plan.select, chunk_rows=chunk_rows, fused=FusedConfig(tile_rows, tile_blocks))
    return replace(plan, select=sizes)


def select(inputs: Inputs, plan: Plan) -> Selection:
    return pipeline.select_blocks(inputs.index_q, inputs.index_cache, inputs.rows, inputs.spec, plan=plan)


# Ranking.


def ranked(scores: Scores, top: int, tile_rows: int, tile_blocks: int) -> Selection:
    """The selection of scores that come in tiles; rows must ascend in what they see, and must see something."""
    rows, seen = scores.visible.shape[0], scores.visible.numpy().astype("int64")
    best = Best(rows, top, tile_rows, tile_blocks)
    best.forget(0, rows)
    for first in range(0, int(seen.max(initial=0)), tile_blocks):
        row = int((seen <= first).sum())
        for start in range(row, rows, tile_rows):
            stop = min(start + tile_rows, rows)
            blocks = min(tile_blocks, int(seen[stop - 1]) - first)
            tile = best.tile(stop - start, blocks)
            tile.copy_(scores.values[start:stop, first : first + blocks])
            best.add(start, first, seen[start:stop], tile)
    out = Selection(torch.full((rows, top), -7, dtype=torch.int32), torch.full((rows,), -7, dtype=torch.int32))
    best.write(0, rows, out)
    return out


def in_order(scores: Scores) -> Scores:
    """The same rows, ascending in what they see, as the rows of a request are."""
    order = scores.visible.argsort(stable=True)
    return Scores(scores.values[order], scores.visible[order])


def never_negative(scores: Scores) -> bool:
    """Whether these may be index scores, holes included: sums of relus are not negative."""
    seen = torch.arange(scores.values.shape[1]) < scores.visible[:, None]
    values = scores.values[seen]
    return not bool(((values < 0) & (values > -float("inf"))).any())


INDEX_SCORES = [entry for entry in NASTY_SCORES if entry.name != "many-rows" and never_negative(entry.build())]


def test_most_nasty_scores_may_be_index_scores() -> None:
    names = {entry.name for entry in INDEX_SCORES}
    wanted = {"plateau-of-zeros", "one-nan", "positive-infinities", "subnormals", "beyond-fp16"}
    assert wanted | {"crowded-bin-4097-of-32768", "ties-at-zero-530", "short-rows", "long-row-65536"} <= names


@pytest.mark.parametrize("entry", INDEX_SCORES, ids=str)
@pytest.mark.parametrize("tile_blocks", [1024, 300])
def test_nasty_scores_in_tiles_are_a_full_sort(entry: NastyScores, tile_blocks: int) -> None:
    scores = in_order(entry.build())
    for top in entry.top_blocks:
        got = ranked(scores, top, 16, tile_blocks)
        assert compare.same_selection(got, reference.topk(scores, top)) is None


SCORE = st.sampled_from([0.0, -0.0, 1e-45, 1e-38, 0.25, 0.5, 1.0, 1.0 + 2.0**-23, 3e38, float("inf"), float("nan")])
ABSENT = st.sampled_from([0.0, 1.0, -float("inf")])


@given(
    st.lists(st.tuples(st.lists(st.one_of(SCORE, ABSENT), min_size=1, max_size=70), st.integers(0, 3)), min_size=1,
             max_size=6),
    st.integers(1, 40), st.integers(1, 5), st.integers(1, 23),
)  # fmt: skip
@settings(max_examples=150)
def test_scores_in_any_tiles_are_a_full_sort(
    rows: list[tuple[list[float], int]], top: int, tile_rows: int, tile_blocks: int
) -> None:
    # A row's list is repeated, so that ties come late and the cut falls among them.
    lists = sorted((values * (times + 1) for values, times in rows), key=len)
    width = max(map(len, lists))
    values = torch.tensor([row + [float("nan")] * (width - len(row)) for row in lists])
    scores = Scores(values, torch.tensor([len(row) for row in lists], dtype=torch.int32))
    assert compare.same_selection(ranked(scores, top, tile_rows, tile_blocks), reference.topk(scores, top)) is None


def test_a_row_that_holds_nothing_yet_loses_no_zero_to_a_cut() -> None:
    # Four rows see NaN while a fifth fills its room, so that all five are cut; then each meets scores of 0.
    nan, zeros = float("nan"), [0.0] * 4
    rows = [[nan] * 16 + zeros + zeros] * 4 + [[float(i % 7) for i in range(16)] + zeros + zeros]
    scores = Scores(torch.tensor(rows), torch.full((5,), 24, dtype=torch.int32))
    got = ranked(scores, 8, 5, 4)
    assert got.blocks[0].tolist() == [16, 17, 18, 19, 20, 21, 22, 23]
    assert compare.same_selection(got, reference.topk(scores, 8)) is None


# Whole calls.


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES if case.regime == "scored"])
def test_every_case_is_right(case: Case) -> None:
    result = verify_case(case, route=PIN)
    assert result.refused is None or "cpu:grouped" not in result.refused
    assert result.failures == ()


def finite(entry: NastyScores) -> bool:
    scores = entry.build()
    seen = torch.arange(scores.values.shape[1]) < scores.visible[:, None]
    return (
        scores.visible.shape[0] <= 64 and bool(scores.values[seen].isfinite().all()) and int(scores.visible.min()) > 0
    )


@pytest.mark.parametrize("entry", [entry for entry in INDEX_SCORES if finite(entry)], ids=str)
def test_nasty_scores_from_queries_and_keys_are_a_full_sort(entry: NastyScores) -> None:
    scores = entry.build()
    for top in entry.top_blocks:
        call = nasty.call_of_scores(scores, top)
        arguments = (call.index_q, call.index_cache, call.rows, call.spec)
        got = pipeline.select_blocks(*arguments, route=PIN)
        assert compare.same_selection(got, reference.topk(scores, top)) is None


@given(
    st.integers(1, 40), st.integers(60, 900), st.sampled_from([1, 5, 16, 40]), st.sampled_from([1, 3, 16, 24, 97]),
    st.lists(st.integers(0, 20), max_size=3), st.sampled_from([torch.float32, torch.bfloat16, FP8]),
    st.tuples(st.integers(1, 50), st.sampled_from([1, 2, 8, 64]), st.sampled_from([1, 7, 64, 200])), st.integers(0, 9),
)  # fmt: skip
@settings(max_examples=60)
def test_any_call_in_any_tiles_equals_the_reference(
    rows: int,
    context: int,
    top: int,
    page_blocks: int,
    holes: list[int],
    dtype: torch.dtype,
    sizes: tuple[int, int, int],
    seed: int,
) -> None:
    spec = spec_of(6, 1, top_blocks=top)
    tokens, pages = page_blocks * spec.block_tokens, -(-context // (page_blocks * spec.block_tokens))
    q_dtype = torch.bfloat16 if dtype == FP8 else dtype
    case = Case("drawn", (min(rows, context), 2), (context, 61), spec, q_dtype, dtype, tokens, padding=(0, 3),
                holes=tuple({(0, hole % pages) for hole in holes}), seed=seed)  # fmt: skip
    inputs = build(case)
    plan = tiled(fused_plan(inputs.rows, spec, inputs.index_cache, q_dtype=q_dtype), *sizes)
    arguments = (inputs.index_q, inputs.index_cache, inputs.rows, spec)
    assert compare.same_selection(select(inputs, plan), reference.select_blocks(*arguments)) is None


def nan_keys(inputs: Inputs) -> Inputs:
    """A seventh of the keys NaN and one infinite: blocks that are never selected, and one that always is."""
    keys = inputs.index_cache.keys.clone()
    flat = keys.view(-1, keys.shape[2])
    flat[::7] = float("nan")
    flat[3] = float("inf")
    return replace(inputs, index_cache=replace(inputs.index_cache, keys=keys))


@pytest.mark.parametrize("disturb", [lambda inputs: inputs, nan_keys], ids=["normal", "nan-keys"])
@pytest.mark.parametrize("sizes", [(512, 64, 1024), (50, 16, 128), (7, 3, 33)], ids=str)
def test_the_selection_is_a_full_sort_of_its_own_scores(
    disturb: Callable[[Inputs], Inputs], sizes: tuple[int, int, int]
) -> None:
    case = Case(
        "long", (200, 1, 33), (9000, 700, 2000), spec_of(6, 1, top_blocks=100), padding=(5,), exact_scores=False
    )
    inputs = disturb(build(case))
    plan = tiled(fused_plan(inputs.rows, inputs.spec, inputs.index_cache), *sizes)
    arguments = (inputs.index_q, inputs.index_cache, inputs.rows, inputs.spec)
    assert own_sort_failure(select(inputs, plan), *arguments, plan, pick_rows(inputs.rows, 0)) is None


def test_both_modes_score_with_the_same_bits_where_their_chunks_are_the_same() -> None:
    case = Case("one-chunk", (100, 3), (12000, 5000), spec_of(6, 1, top_blocks=64), exact_scores=False)
    inputs = build(case)
    arguments = (inputs.index_q, inputs.index_cache, inputs.rows, inputs.spec)
    plans = [pipeline.plan_batch(inputs.rows, inputs.spec, index_cache=inputs.index_cache, route=f"cpu:{mode}")
             for mode in ("fused", "plain")]  # fmt: skip
    assert [plan.select.chunk_rows for plan in plans] == [103, 103]
    fused, plain = (cpu.score(*arguments, plan.select) for plan in plans)
    for row, seen in enumerate(fused.visible.tolist()):
        assert compare.same_bits(fused.values[row, :seen], plain.values[row, :seen])
    assert compare.same_selection(*(select(inputs, plan) for plan in plans)) is None


def test_a_row_keeps_its_bits_in_any_company() -> None:
    case = Case("mixed", (3, 90, 1, 9), (600, 1900, 333, 9100), spec_of(12, 2, top_blocks=16), exact_scores=False)
    inputs = build(case)

    def found(part: Inputs) -> tuple[Selection, Tensor]:
        plan = fused_plan(part.rows, part.spec, part.index_cache, batch_invariant=True)
        scores = cpu.score(part.index_q, part.index_cache, part.rows, part.spec, plan.select)
        return select(part, plan), scores.values

    together, values = found(inputs)
    visible = inputs.rows.visible_blocks(inputs.spec).tolist()
    for start, stop in ((0, 1), (2, 3), (0, 3), (3, 93), (17, 18), (20, 33), (93, 94), (90, 103), (102, 103)):
        alone, own = found(take_rows(inputs, start, stop))
        assert compare.same_selection(alone, together.slice(start, stop)) is None
        for row in range(stop - start):
            seen = visible[start + row]
            assert compare.same_bits(own[row, :seen], values[start + row, :seen])


def test_a_plan_of_another_mode_is_refused() -> None:
    inputs = build(named("prefill"))
    plan = pipeline.plan_batch(inputs.rows, inputs.spec, index_cache=inputs.index_cache, route="cpu:plain")
    with pytest.raises(ValueError, match="wanted a plan of a CPU's mode fused"):
        cpu.select_fused(inputs.index_q, inputs.index_cache, inputs.rows, inputs.spec, plan.select)


# Memory.


def allocated(work: Callable[[], object], trace: Path) -> int:
    """Most bytes that numpy and torch held at once during a call, added up as if both were at their most together."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        # Inside: torch imports a part of itself when it begins to profile.
        tracemalloc.start()
        kept = work()
        ours = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    profile.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    changes = [event["args"] for event in sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"])]
    held = changes[0]["Total Allocated"] - changes[0]["Bytes"]
    del kept
    return ours + int(max(change["Total Allocated"] for change in changes) - held)


def long_call(context: int, rows: int, dtype: torch.dtype) -> tuple[Tensor, IndexCache, Rows, QsaSpec]:
    """A chunk that ends a long request, whose pages are all the same one: the keys themselves take no room."""
    spec = QsaSpec(top_blocks=64)
    generator = torch.Generator().manual_seed(context)
    keys = torch.randn(1, 64, spec.index_dim, generator=generator).to(dtype)
    table = torch.zeros(1, -(-context // 256), dtype=torch.int32)
    index_q = torch.randn(rows, spec.index_heads, spec.index_dim, generator=generator)
    index_q = index_q if dtype == FP8 else index_q.to(dtype)
    return index_q, IndexCache(keys, table, 0.5 if dtype == FP8 else None), Rows.from_lengths([rows], [context]), spec


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8], ids=str)
@pytest.mark.parametrize(("mib", "context", "rows"), [(1, 1 << 20, 2), (2, 100_000, 70), (8, 20_000, 600)])
def test_a_call_holds_no_more_than_its_plan_says(
    mib: int, context: int, rows: int, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHQSA_WORKSPACE_MIB", str(mib))
    call = long_call(context, rows, dtype)
    plan = fused_plan(call[2], call[3], call[1], q_dtype=call[0].dtype)
    assert plan.select.workspace_bytes <= mib << 20
    # What is handed back, and some words per row: positions, visible blocks.
    besides = rows * (4 * call[3].top_blocks + 100) + 20_000

    def held(chosen: Plan) -> int:
        trace = tmp_path / f"{chosen.select_decision.route.mode}.json"
        return allocated(lambda: pipeline.select_blocks(*call, plan=chosen, check_values=False), trace)

    assert plan.select.workspace_bytes / 4 <= held(plan) <= plan.select.workspace_bytes + besides
    # The same measure of the mode that keeps scores: it sees what is held.
    plain = pipeline.plan_batch(call[2], call[3], index_cache=call[1], q_dtype=call[0].dtype, route="cpu:plain")
    assert held(plain) >= plain.select.chunk_rows * plain.select.width_blocks * 4


CALLS = st.builds(
    Call,
    spec=st.sampled_from([SPEC, QsaSpec(top_blocks=2048), QsaSpec(index_heads=8, index_dim=64, top_blocks=8)]),
    rows=st.integers(0, 70_000),
    requests=st.integers(0, 300),
    max_position=st.sampled_from([-1, 99, 2051, 262_143, (1 << 20) - 1]),
    batch_invariant=st.booleans(),
)


def sizes_of(call: Call, limit: int) -> SelectPlan:
    return plan_select(call, choose_route("select", call, CPU, PIN), CPU, limit)


@given(CALLS, st.integers(1 << 20, 256 << 20))
@settings(max_examples=80)
def test_plans_fit_the_workspace_whatever_the_context(call: Call, limit: int) -> None:
    plan = sizes_of(call, limit)
    assert isinstance(plan.fused, FusedConfig)
    spec, row_bytes = call.spec, fused_row_bytes(call.spec, plan.fused)
    assert plan.workspace_bytes == fused_tile_bytes(spec, plan.fused) + plan.chunk_rows * row_bytes
    assert plan.workspace_bytes <= limit
    assert 1 <= plan.chunk_rows <= max(call.rows, 1)
    assert plan.fused.tile_rows == 1 or not call.batch_invariant
    longest = sizes_of(replace(call, max_position=(1 << 20) - 1), limit)
    assert isinstance(longest.fused, FusedConfig)
    assert (longest.chunk_rows, longest.workspace_bytes) == (plan.chunk_rows, plan.workspace_bytes) or (
        plan.width_blocks < longest.fused.tile_blocks
    )
    if call.batch_invariant:
        # The tile decides a score's bits: it may depend on nothing but the layer and the limit.
        assert plan.fused == sizes_of(replace(call, rows=5, max_position=700), limit).fused


def test_a_limit_that_no_tile_keeps_is_passed_by_the_smallest() -> None:
    plan = sizes_of(Call(SPEC, rows=64, requests=1, max_position=99_999), 1000)
    assert (plan.fused, plan.chunk_rows) == (FusedConfig(1, 1), 1)


# The route.

LONG = Call(SPEC, rows=1616, requests=1, max_position=183_999)


@pytest.mark.parametrize(
    ("call", "mode", "reason"),
    [
        (LONG, "fused", None),
        (replace(LONG, rows=64), "fused", None),
        (replace(LONG, rows=640, requests=10), "fused", None),
        (replace(LONG, max_position=32_767), "fused", None),
        (replace(LONG, max_position=32_766), "plain", "below 8192 blocks a row, got 8191"),
        (replace(LONG, rows=63), "plain", "below 64 rows per request, got 63"),
        (replace(LONG, rows=64, requests=64), "plain", "below 64 rows per request, got 1"),
        (replace(LONG, batch_invariant=True), "plain", "a row at a time"),
        (replace(LONG, max_position=2050), "everything", None),
    ],
)
def test_the_faster_mode_is_taken_and_the_other_says_why(call: Call, mode: str, reason: str | None) -> None:
    decision = choose_route("select", call, CPU)
    assert str(decision.route) == f"cpu:{mode}"
    refused = {str(refusal.route): refusal.reason for refusal in decision.refused}
    if reason is not None:
        assert reason in refused["cpu:fused"]
        assert any(reason in line and "cpu:fused" in line for line in decision.lines())
    if mode == "fused":
        assert "cpu:plain" in map(str, decision.unused)
    # A pin gets what it names.
    for pinned in ("fused", "plain"):
        assert choose_route("select", call, CPU, pinned).route.mode == pinned


def test_a_plan_tells_what_the_mode_saves() -> None:
    fused, plain = (make_plan(LONG, CPU, f"cpu:{mode}").select for mode in ("fused", "plain"))
    assert (fused.fused, fused.chunk_rows, plain.fused) == (FusedConfig(64, 1024), 512, None)
    assert fused.workspace_bytes < 16 << 20 < 100 << 20 < plain.workspace_bytes


def test_a_long_chunk_takes_the_mode_by_itself() -> None:
    call = long_call(40_000, 64, torch.float32)
    plan = flashqsa.plan_batch(call[2], call[3], index_cache=call[1])
    assert str(plan.select_decision.route) == PIN
    got = flashqsa.select_blocks(*call)
    assert own_sort_failure(got, *call, plan, pick_rows(call[2], 0)) is None
    # Every page is the same one: equal keys far apart, of which the first 64 blocks hold the best.
    assert compare.same_selection(got, flashqsa.select_blocks(*call, route="plain")) is None


def test_a_call_without_rows_selects_nothing() -> None:
    inputs = build(named("no-rows"))
    got = pipeline.select_blocks(inputs.index_q, inputs.index_cache, inputs.rows, inputs.spec, route=PIN)
    assert compare.same_selection(got, empty_selection(inputs.rows, inputs.spec)) is None
