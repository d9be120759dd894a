"""Each stage of the CPU kernels against the reference: scores, selections, worklists, attention, merge and writes."""

from __future__ import annotations

import itertools
from dataclasses import replace

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


def stored_bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor's elements, wherever they lie."""
    return tensor.contiguous().view(torch.uint8).clone()


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


@pytest.mark.parametrize("case", by_name([c for c in CASES if c.spec.selects_everything(max(c.context_lengths) - 1)]
    if all(c.context_lengths for c in CASES) else [c for c in CASES if c.context_lengths and c.spec.selects_everything(max(c.context_lengths) - 1)]))
def test_everything_is_selected_below_the_budget(case: Case) -> None:
    inputs = build(case)
    got = cpu.select_everything(inputs.index_cache, inputs.rows, inputs.spec)
    assert compare.same_selection(got, selection_of(inputs)) is None
