"""Each stage of the CPU kernels against the reference: scores, selections, worklists, attention, merge and writes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flashqsa import pipeline, reference
from flashqsa.config import AttendConfig, GroupCost
from flashqsa.kernels import cpu
from flashqsa.kernels.cpu.paging import FP8_UNIT, Buffer, Pool, request_runs
from flashqsa.kernels.cpu.worklist import choose_groups
from flashqsa.plan import AttendPlan
from flashqsa.testing import compare, nasty
from flashqsa.testing.cases import CASES, Case, named, spec_of
from flashqsa.testing.inputs import PATTERNS, Inputs, build, fill_unwritten, kv_pool, padded_rows
from flashqsa.testing.selections import REGIMES, select_locally
from flashqsa.values import FP8, IndexCache, KvCache, Partial, QsaSpec, Rows, Selection, Worklist

INF = float("inf")
LAYOUTS = ("interleaved", "packed", "apart", "wide-view", "heads-first", "padded-pages")
DTYPES = (torch.float32, torch.float16, torch.bfloat16, FP8)
FREE = GroupCost(group_us=0.0, gather_ns=0.0, product_ns=0.0)
SMALL_CASES = [
    case for case in CASES if case.rows and case.tokens < 1000 and case.spec.top_blocks <= 64 and case.context_lengths
]


def by_name(cases: list[Case]) -> list[object]:
    return [pytest.param(case, id=case.name) for case in cases]


def attend_plan(inputs: Inputs, **changes: object) -> AttendPlan:
    """The plan of a call's attention, with other fields of its configuration."""
    plan = pipeline.plan_batch(inputs.rows, inputs.spec, kv_cache=inputs.kv_cache, q_dtype=inputs.q.dtype).attend
    return replace(plan, config=replace(plan.config, **changes))  # type: ignore[arg-type]


def selection_of(inputs: Inputs) -> Selection:
    if inputs.selection is not None:
        return inputs.selection
    return reference.select_blocks(inputs.index_q, inputs.index_cache, inputs.rows, inputs.spec)


@dataclass(frozen=True)
class Known:
    """A case's inputs and what the reference makes of them: its selection, and the attention in FP64 and in FP32."""

    inputs: Inputs
    selection: Selection
    reads: Worklist
    exact: Tensor
    exact_lse: Tensor
    low: Tensor
    low_lse: Tensor


@cache
def known(case: Case) -> Known:
    inputs = build(case)
    selection = selection_of(inputs)
    arguments = (inputs.q, inputs.kv_cache, selection, inputs.rows, inputs.spec)
    exact, exact_lse = reference.attend(*arguments)
    if inputs.gate is not None:
        exact = exact * torch.sigmoid(inputs.gate.double())
    low, low_lse = reference.sparse_attention(*arguments, inputs.gate, precision=torch.float32)
    work = reference.worklist(selection, inputs.rows, inputs.spec, 64)
    reads = without_holes(work, inputs.rows, inputs.spec, inputs.kv_cache)
    return Known(inputs, selection, reads, exact, exact_lse, low, low_lse)


def without_holes(work: Worklist, rows: Rows, spec: QsaSpec, cache: KvCache) -> Worklist:
    """A worklist without the entries whose block is on a hole of the KV cache."""
    bounds, entries = work.group_rows.tolist(), work.group_entries.tolist()
    blocks, masks, ends = [], [], [0]
    for group in range(work.groups):
        for entry in range(entries[group], entries[group + 1]):
            page = int(work.block[entry]) * spec.block_tokens // cache.page_tokens
            if int(cache.page_table[int(rows.request[bounds[group]]), page]) >= 0:
                blocks.append(int(work.block[entry]))
                masks.append(int(work.row_mask[entry]))
        ends.append(len(blocks))
    return Worklist(
        work.group_rows, torch.tensor(ends), torch.tensor(blocks, dtype=torch.int32), torch.tensor(masks).long()
    )


# Runs of rows.


def test_runs_cut_at_requests_and_padding() -> None:
    rows = padded_rows(named("padding-first-middle-last"))
    runs = request_runs(rows)
    assert [(run.stop - run.start, run.request) for run in runs] == [
        (2, -1),
        (4, 0),
        (1, -1),
        (5, 0),
        (1, -1),
        (8, 1),
        (1, -1),
    ]
    assert request_runs(rows.slice(0, 0)) == []


# Reading pools.


def pool_tensor(layout: str, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Tensor:
    """A poisoned pool [pages, page_slots, heads, dim] in a layout of `kv_pool`, or in one of two odder ones."""
    pages, slots, heads, dim = shape
    if layout == "heads-first":
        return kv_pool("apart", (pages, heads, slots, dim), dtype)[0].transpose(1, 2)
    if layout == "padded-pages":
        flat = kv_pool("apart", (pages, 1, 1, slots * heads * dim + 7), dtype)[0]
        return flat.view(pages, -1)[:, : slots * heads * dim].view(shape)
    return kv_pool(layout, shape, dtype)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("slots", "block_slots"), [(12, 4), (4, 4), (1, 1), (6, 3), (5, 1)])
@pytest.mark.parametrize("heads", [1, 3])
def test_a_pool_reads_blocks_from_any_strides(
    layout: str, dtype: torch.dtype, slots: int, block_slots: int, heads: int
) -> None:
    dim, pages = 16, 5
    pool = pool_tensor(layout, (pages, slots, heads, dim), dtype)
    numbers = torch.randn(pages, slots, heads, dim, generator=torch.Generator().manual_seed(1)).to(dtype)
    pool.copy_(numbers)
    blocks = slots // block_slots
    page = np.array([4, 0, 2, 4, 3], dtype=np.int64)
    block = np.array([0, blocks - 1, 0, blocks - 1, blocks // 2], dtype=np.int64)
    got = Pool(pool, block_slots).read(page, block, Buffer(dtype, 6 * block_slots * heads * dim))
    unit = FP8_UNIT if dtype == FP8 else 1.0
    wanted = [numbers.float()[p, b * block_slots : (b + 1) * block_slots] for p, b in zip(page, block, strict=True)]
    assert got.dtype == torch.float32
    assert torch.equal(got * unit, torch.cat(wanted).transpose(0, 1))


def test_every_fp8_byte_is_read_as_its_number() -> None:
    pool = torch.arange(256, dtype=torch.uint8).view(FP8).view(1, 256, 1, 1)
    got = Pool(pool, 4).read(np.zeros(64, np.int64), np.arange(64), Buffer(FP8, 256)).view(-1) * FP8_UNIT
    assert compare.same_bits(got.nan_to_num(1e9), pool.float().view(-1).nan_to_num(1e9))


@pytest.mark.parametrize(
    ("page_stride", "page"), [(1_540_096, 1395), (1_638_400, 1311), (32_768, 65_536), (1_039_680, 4132)]
)
def test_a_page_past_2_to_the_31_elements_reads_and_writes_like_any_other(page_stride: int, page: int) -> None:
    spec = QsaSpec()
    keys, values = nasty.far_page(page_stride, page)
    rows = Rows.from_lengths([16], [16])
    new = torch.randn(2, 16, 2, 256, generator=torch.Generator().manual_seed(2))
    q = torch.randn(16, 24, 256, generator=torch.Generator().manual_seed(3))
    outputs = []
    for at in (page, 0):
        cache = KvCache(keys, values, torch.tensor([[at]], dtype=torch.int32), 0.5, 2.0)
        pipeline.write_kv(new[0], new[1], cache, rows, spec)
        output, lse = pipeline.sparse_attention(q, cache, None, rows, spec, return_lse=True)
        outputs.append((output, lse))
    assert compare.same_bits(outputs[0][0], outputs[1][0])
    assert compare.same_bits(outputs[0][1], outputs[1][1])
    assert bool(outputs[0][0].isfinite().all())
    assert float(outputs[0][0].abs().max()) > 0.1


def test_an_index_page_past_2_to_the_31_elements_scores_like_any_other() -> None:
    spec = QsaSpec(top_blocks=2)
    page_stride, page = 65_536, 32_768
    pool = torch.empty((page + 1) * page_stride, dtype=torch.uint8).view(FP8)
    keys = pool.as_strided((page + 1, 16, 128), (page_stride, 128, 1))
    numbers = torch.randint(-2, 3, (16, 128), generator=torch.Generator().manual_seed(4)).to(FP8)
    index_q = torch.randint(-2, 3, (3, 4, 128), generator=torch.Generator().manual_seed(5)).float()
    rows = Rows.from_lengths([3], [64])
    found = []
    for at in (page, 0):
        keys[at] = numbers
        cache = IndexCache(keys, torch.tensor([[at]], dtype=torch.int32), 1.0)
        found.append(cpu.score(index_q, cache, rows, spec).values)
    assert torch.equal(found[0], found[1])
    exact = (index_q.double() @ numbers.double().T).relu().sum(1)[:, :15] / 128**0.5
    torch.testing.assert_close(found[0][:, :15], exact.float())


def test_a_cache_without_pages_is_all_holes() -> None:
    spec = spec_of(6, 2, top_blocks=4)
    rows = Rows.from_lengths([3, 1], [40, 5])
    table = torch.full((2, 3), -1, dtype=torch.int32)
    index_cache = IndexCache(torch.empty(0, 4, 128), table)
    kv_cache = KvCache.interleaved(torch.empty(0, 2, 16, 2, 64), table)
    index_q, q = torch.ones(4, 4, 128), torch.ones(4, 6, 64)
    selection = pipeline.select_blocks(index_q, index_cache, rows, spec)
    assert selection.count.tolist() == [0] * 4
    output, lse = pipeline.sparse_attention(q, kv_cache, selection, rows, spec, return_lse=True)
    assert bool((output == 0).all())
    assert bool((lse == -INF).all())
    # Writing to holes drops everything.
    pipeline.write_kv(torch.ones(4, 2, 64), torch.ones(4, 2, 64), kv_cache, rows, spec)


# Scores and the selections that need none.


@pytest.mark.parametrize("case", by_name([case for case in CASES if case.regime == "scored" and case.rows]))
def test_scores_err_no_more_than_the_reference_in_fp32(case: Case) -> None:
    inputs = build(case)
    arguments = (inputs.index_q, inputs.index_cache, inputs.rows, inputs.spec)
    got = cpu.score(*arguments)
    exact = reference.score(*arguments)
    low = reference.score(*arguments, precision=torch.float32)
    assert got.values.dtype == torch.float32
    assert got.values.shape[1] == int(exact.visible.max())
    assert compare.scores_within_tolerance(got, exact, compare.score_tolerance(low, exact)) is None


@pytest.mark.parametrize("step", [1, 3, 7, 64])
@pytest.mark.parametrize("name", ["prefill", "chunks-at-840-to-843", "padding-fp8", "holes", "decode-33"])
def test_scores_are_the_same_in_any_chunks(name: str, step: int) -> None:
    inputs = build(named(name))
    rows, spec = inputs.rows, inputs.spec
    whole = cpu.score(inputs.index_q, inputs.index_cache, rows, spec)
    for start in range(0, rows.count, step):
        part = rows.slice(start, start + step)
        got = cpu.score(inputs.index_q[start : start + step], inputs.index_cache, part, spec)
        assert got.values.shape == (part.count, int(part.visible_blocks(spec).max()))
        for row, visible in enumerate(got.visible.tolist()):
            assert torch.equal(got.values[row, :visible], whole.values[start + row, :visible])


def test_keys_that_no_row_needs_are_not_scored() -> None:
    # Below the budget every key is NaN, and so is what is stored past the visible blocks.
    spec = QsaSpec(index_heads=2, index_dim=8, top_blocks=4)
    keys = torch.full((2, 4, 8), float("nan"))
    keys[1, 0] = 1.0
    cache = IndexCache(keys, torch.tensor([[0, 1]], dtype=torch.int32))
    scores = cpu.score(torch.ones(5, 2, 8), cache, Rows.from_lengths([5], [20]), spec)
    assert scores.visible.tolist() == [4, 4, 4, 4, 5]
    assert scores.values[:4, :4].tolist() == [[0.0] * 4] * 4
    assert bool(scores.values[4, :4].isnan().all())
    assert float(scores.values[4, 4]) == pytest.approx(16 / 8**0.5)
    selection = cpu.empty_selection(Rows.from_lengths([5], [20]), spec)
    cpu.topk(scores, selection)
    assert selection.blocks.tolist() == [[0, 1, 2, 3]] * 4 + [[4, -1, -1, -1]]


def below_budget() -> list[Case]:
    return [c for c in CASES if c.rows and c.spec.selects_everything(max(c.context_lengths) - 1)]


@pytest.mark.parametrize("case", by_name(below_budget()))
def test_everything_is_selected_below_the_budget(case: Case) -> None:
    inputs = build(case)
    got = cpu.select_everything(inputs.index_cache, inputs.rows, inputs.spec)
    assert compare.same_selection(got, selection_of(inputs)) is None


# Worklists.


@pytest.mark.parametrize("case", by_name(SMALL_CASES))
def test_every_row_reads_its_blocks_and_its_tail(case: Case) -> None:
    inputs, selection = known(case).inputs, known(case).selection
    rows = inputs.rows
    for group_rows in ((1,), (5,), (8,), (64,), (1, 2, 4, 8, 16, 32, 64), (3, 6, 30)):
        plan = attend_plan(inputs, group_rows=group_rows)
        got = cpu.worklist(selection, rows, inputs.spec, inputs.kv_cache, plan)
        assert compare.same_reads(got, known(case).reads, rows, inputs.spec) is None
        assert got.group_rows[0] == 0
        assert got.group_rows[-1] == rows.count
        sizes = got.group_rows.diff()
        assert bool((sizes > 0).all())
        assert int(sizes.max()) <= group_rows[-1]
    plan = attend_plan(inputs)
    got = cpu.worklist(selection, rows, inputs.spec, inputs.kv_cache, plan)
    assert int(got.group_entries.diff().max()) <= plan.max_entries


@pytest.mark.parametrize("case", by_name(SMALL_CASES[::3]))
def test_without_a_selection_every_visible_block_is_read(case: Case) -> None:
    inputs = build(case)
    rows, spec = inputs.rows, inputs.spec
    wanted = without_holes(reference.worklist(None, rows, spec, 64), rows, spec, inputs.kv_cache)
    got = cpu.worklist(None, rows, spec, inputs.kv_cache, attend_plan(inputs))
    assert compare.same_reads(got, wanted, rows, spec) is None


def test_entries_past_the_count_are_not_read() -> None:
    spec, rows = spec_of(6, 1, top_blocks=4), Rows.from_lengths([3], [42])
    blocks = torch.tensor([[0, 3, 99, -5], [2, -1, -1, -1], [7, 8, 9, 1 << 30]], dtype=torch.int32)
    inputs = build(Case("count", (3,), (42,), spec))
    selection = Selection(blocks, torch.tensor([2, 0, 3], dtype=torch.int32))
    got = cpu.worklist(selection, rows, spec, inputs.kv_cache, attend_plan(inputs, group_rows=(4,)))
    # Row 0 closes block 9 and has no tail; rows 1 and 2 stand in block 10.
    assert compare.row_reads(got) == {0: [0, 3], 1: [10], 2: [7, 8, 9, 10]}


def test_rows_that_share_nothing_lose_nothing() -> None:
    inputs = build(named("disjoint-model-512"))
    plan = attend_plan(inputs, group_rows=(8,))
    work = cpu.worklist(inputs.selection, inputs.rows, inputs.spec, inputs.kv_cache, plan)
    assert work.groups == 1
    # The rows' 7 tails (one row closes a block) lie in 2 blocks.
    assert work.block.shape[0] == 8 * 512 + len({position // 4 for position in range(16492, 16500) if position % 4 < 3})
    assert work.block.shape[0] <= plan.max_entries


def cut_cost(mask: np.ndarray, cuts: list[tuple[int, int]], count: int, cost: GroupCost) -> float:
    """What a cut of a window into groups costs, from plain numbers."""
    total = 0.0
    for first, size in cuts:
        rows = min(size, count - first)
        union = sum(bool(int(word) >> first & (1 << rows) - 1) for word in mask)
        total += cost.of(rows, union * 4, 6 * 64, 64)
    return total


def all_cuts(first: int, stop: int, sizes: tuple[int, ...]) -> list[list[tuple[int, int]]]:
    """Every way to cut rows into nested, aligned groups."""
    size = sizes[-1]
    whole = [[(first, size)]]
    if len(sizes) == 1:
        return whole
    parts = [all_cuts(start, stop, sizes[:-1]) for start in range(first, min(first + size, stop), sizes[-2])]
    return whole + [list(itertools.chain(*chosen)) for chosen in itertools.product(*parts)]


@settings(max_examples=40)
@given(st.data())
def test_the_cheapest_cut_is_chosen(data: st.DataObject) -> None:
    sizes = data.draw(st.sampled_from([(1, 2, 4, 8), (2, 8), (1, 3, 6), (1, 8), (4,)]))
    count = data.draw(st.integers(1, sizes[-1]))
    bits = data.draw(st.lists(st.integers(1, 2**count - 1), min_size=1, max_size=30))
    cost = GroupCost(*(data.draw(st.floats(0.0, limit)) for limit in (20.0, 50.0, 5.0)))
    mask = np.array(bits, dtype=np.uint64)
    config = AttendConfig(sizes, 4096, 65536, cost)
    cuts = choose_groups(mask, count, config, spec_of(6, 1))
    assert [first for first, _ in cuts] == list(itertools.accumulate((size for _, size in cuts[:-1]), initial=0))
    best = min(cut_cost(mask, cut, count, cost) for cut in all_cuts(0, count, sizes))
    assert cut_cost(mask, cuts, count, cost) == pytest.approx(best, rel=1e-9, abs=1e-9)


def test_rows_that_share_much_go_together_and_rows_that_share_nothing_go_alone() -> None:
    spec, rows = QsaSpec(), Rows.from_lengths([64], [20000])
    cache = KvCache.interleaved(torch.zeros(1, 2, 20000, 2, 256, dtype=FP8), torch.zeros(1, 1).int(), 1.0, 1.0)
    plan = pipeline.plan_batch(rows, spec, kv_cache=cache).attend
    mean = {
        regime: rows.count / cpu.worklist(select_locally(rows, spec, regime), rows, spec, cache, plan).groups
        for regime in ("equal", "near", "far", "disjoint")
    }
    assert mean["equal"] == 64
    assert mean["disjoint"] == 1
    assert mean["equal"] > mean["near"] > mean["far"] >= 1


# Attention.


@pytest.mark.parametrize("case", by_name(SMALL_CASES[::2]))
def test_attention_is_right_for_every_group_tile_and_softmax_size(case: Case) -> None:
    wanted = known(case)
    inputs = wanted.inputs
    changes: list[dict[str, object]] = [
        {"group_rows": (1,)},
        {"group_rows": (8,)},
        {"group_rows": (64,)},
        {"group_rows": (8,), "tile_tokens": 12},
        {"group_rows": (8,), "row_tokens": 64},
        {"group_rows": (64,), "tile_tokens": 8, "row_tokens": 1024},
        {"cost": FREE},
    ]
    for changed in changes:
        plan = attend_plan(inputs, **changed)
        work = cpu.worklist(wanted.selection, inputs.rows, inputs.spec, inputs.kv_cache, plan)
        partial = cpu.attend(inputs.q, inputs.kv_cache, work, inputs.rows, inputs.spec, plan)
        output, lse = cpu.merge(partial, inputs.gate, inputs.q.dtype)
        assert partial.parts == 1
        assert compare.attention_within_tolerance(output, wanted.low, wanted.exact) is None, changed
        assert compare.lse_within_tolerance(lse, wanted.exact_lse, wanted.low_lse) is None, changed


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("name", ["padding-first-middle-last", "prefill-fp8", "pages-of-816", "hole-under-the-tail"])
def test_recycled_bytes_change_nothing(name: str, pattern: str) -> None:
    inputs = build(named(name))
    found = []
    for disturbed in (inputs, fill_unwritten(inputs, pattern)):
        plan = attend_plan(disturbed, group_rows=(8,))
        arguments = (selection_of(inputs), disturbed.rows, disturbed.spec, disturbed.kv_cache, plan)
        partial = cpu.attend(
            disturbed.q, disturbed.kv_cache, cpu.worklist(*arguments), disturbed.rows, disturbed.spec, plan
        )
        found.append(partial)
    assert compare.same_bits(found[0].output, found[1].output)
    assert compare.same_bits(found[0].lse, found[1].lse)
    assert bool(found[0].output.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, FP8], ids=str)
def test_what_no_row_of_a_group_attends_to_may_hold_anything(dtype: torch.dtype) -> None:
    # Rows at 13, 14 and 30 of one group; tokens 15 and 20..27 belong to nobody's selection, nor does page 0.
    spec = spec_of(6, 2, 16, top_blocks=2)
    rows = Rows.from_tensors(torch.zeros(3, dtype=torch.int32), torch.tensor([13, 14, 30]))
    selection = Selection(
        torch.tensor([[0, 2], [1, -1], [0, 4]], dtype=torch.int32), torch.tensor([2, 1, 2], dtype=torch.int32)
    )
    numbers = torch.randn(2, 8, 4, 2, 16, generator=torch.Generator().manual_seed(6))
    q = torch.randn(3, 6, 16, generator=torch.Generator().manual_seed(7))
    dead = torch.tensor([15, *range(20, 28), 31])
    found = []
    for poison in (0.0, float("nan"), INF):
        filled = numbers.clone().view(2, 32, 2, 16)
        filled[:, dead] = poison
        pool = torch.full((2, 9, 4, 2, 16), poison)
        pool[:, 1:] = filled.view(2, 8, 4, 2, 16)
        pool = pool.to(dtype)
        scale = 1.0 if dtype == FP8 else None
        cache = KvCache(pool[0], pool[1], torch.arange(1, 9, dtype=torch.int32)[None], scale, scale)
        plan = replace(
            pipeline.plan_batch(rows, spec, kv_cache=cache).attend,
            config=AttendConfig((4,), 4096, 65536, FREE),
        )
        work = cpu.worklist(selection, rows, spec, cache, plan)
        assert work.groups == 1
        found.append(cpu.attend(q, cache, work, rows, spec, plan))
    for other in found[1:]:
        assert compare.same_bits(found[0].output, other.output)
        assert compare.same_bits(found[0].lse, other.lse)


@pytest.mark.parametrize("group_rows", [1, 4, 8])
def test_rows_that_select_nothing_are_zero_and_their_neighbours_are_not(group_rows: int) -> None:
    # Rows 0, 3 and 7 close a block, so without a selection they see nothing at all.
    inputs = build(Case("empty", (8,), (40,), spec_of(6, 1), gate=False))
    rows = Rows.from_tensors(torch.zeros(8, dtype=torch.int32), torch.tensor([3, 4, 6, 11, 12, 20, 21, 23]))
    selection = select_locally(rows, inputs.spec, "equal")
    empty = torch.tensor([0, 3, 7])
    selection.blocks[empty], selection.count[empty] = -1, 0
    plan = attend_plan(inputs, group_rows=(group_rows,))
    work = cpu.worklist(selection, rows, inputs.spec, inputs.kv_cache, plan)
    partial = cpu.attend(inputs.q, inputs.kv_cache, work, rows, inputs.spec, plan)
    assert bool((partial.output[0, empty] == 0).all())
    assert bool((partial.lse[0, empty] == -INF).all())
    busy = [row for row in range(8) if row not in empty.tolist()]
    exact, _ = reference.attend(inputs.q, inputs.kv_cache, selection, rows, inputs.spec)
    torch.testing.assert_close(partial.output[0, busy].double(), exact[busy], rtol=1e-5, atol=1e-5)
    assert float(partial.output[0, busy].abs().amax(dim=(1, 2)).min()) > 0


def test_requests_in_another_order_give_the_same_bits() -> None:
    inputs = build(named("requests-of-3-8-13"))
    bounds, order = [(0, 3), (3, 11), (11, 24)], [2, 0, 1]
    taken = torch.cat([torch.arange(*bounds[request]) for request in order])
    rows = Rows(inputs.rows.request[taken], inputs.rows.position[taken], inputs.rows.max_position)
    selection = selection_of(inputs)
    moved = Selection(selection.blocks[taken], selection.count[taken])
    plan = attend_plan(inputs)
    found = []
    for chosen, of_rows, q in ((selection, inputs.rows, inputs.q), (moved, rows, inputs.q[taken])):
        work = cpu.worklist(chosen, of_rows, inputs.spec, inputs.kv_cache, plan)
        found.append(cpu.attend(q, inputs.kv_cache, work, of_rows, inputs.spec, plan))
    assert compare.same_bits(found[0].output[:, taken], found[1].output)
    assert compare.same_bits(found[0].lse[:, taken], found[1].lse)


def test_regimes_of_selections_are_all_served() -> None:
    inputs = build(Case("regimes", (20,), (400,), spec_of(6, 1), peak=8.0, gate=False))
    for regime in REGIMES:
        selection = select_locally(inputs.rows, inputs.spec, regime)
        plan = attend_plan(inputs)
        work = cpu.worklist(selection, inputs.rows, inputs.spec, inputs.kv_cache, plan)
        output = cpu.attend(inputs.q, inputs.kv_cache, work, inputs.rows, inputs.spec, plan).output[0]
        exact, _ = reference.attend(inputs.q, inputs.kv_cache, selection, inputs.rows, inputs.spec)
        torch.testing.assert_close(output.double(), exact, rtol=1e-4, atol=1e-4)


# Merge.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_output_rounds_once_and_once_more_for_the_gate(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(8)
    output = torch.randn(1, 700, 24, 64, generator=generator)
    lse = torch.randn(1, 700, 24, generator=generator)
    gate = torch.randn(700, 24, 64, generator=generator).to(dtype)
    wanted = output[0].to(dtype)
    plain, plain_lse = cpu.merge(Partial(output.clone(), lse), None, dtype)
    assert compare.same_bits(plain, wanted)
    assert compare.same_bits(plain_lse, lse[0])
    gated, _ = cpu.merge(Partial(output.clone(), lse), gate, dtype)
    assert compare.same_bits(gated, (torch.sigmoid(gate.float()) * wanted.float()).to(dtype))
