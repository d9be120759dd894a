"""Hopper's fused indexer without a GPU: its rankings and its host code run on the CPU, its sources are compiled."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="the kernel set takes merge from Triton's")

import flashqsa
from flashqsa import Call, DeviceFacts, IndexCache, QsaSpec, Rows, reference
from flashqsa.kernels.nvrtc import Kernel, NvrtcNotFoundError, compile_source
from flashqsa.kernels.sm90 import select
from flashqsa.kernels.sm90.select import FusedKernels, fused_kernels
from flashqsa.plan import make_plan
from flashqsa.select_shape import THREADS, TILE_BLOCKS, FusedShape, fused_shape
from flashqsa.testing import compare, sass
from flashqsa.testing.cases import Case, spec_of
from flashqsa.testing.inputs import build
from flashqsa.testing.nasty import NASTY_SCORES, NastyScores, scores_of
from flashqsa.values import Scores, Selection
from tests.nvrtc_emulate import CXX
from tests.sm90_select_emulate import (
    Emulator,
    Twins,
    blocks_sampled,
    emulated_select,
    from_matrix,
    from_memory,
    members,
    sampled_blocks,
    sorted_out,
)

BF16, FP16 = torch.bfloat16, torch.float16
H200 = DeviceFacts.named("h200")
LIMIT = 128 << 20
MOST_BLOCKS = 1 << 18
LEGAL = [(2, 64), (2, 128), (4, 64), (4, 128)]
"""Index heads and dims that the kernels are made for."""


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    if CXX is None:
        pytest.skip("no g++ here to compile the kernels for the CPU")
    with emulated_select(tmp_path_factory.mktemp("sm90")) as found:
        yield found


def shape_of(
    rank: int = 6,
    stride: int = 4,
    slices: int = 3,
    capacity: int = 512,
    chunk_rows: int = 64,
    samples: int = 1024,
    sample_keys: int = 4,
    survivor_keys: int = 4,
    usual_keys: int = 1,
) -> FusedShape:
    """A shape whose rankings are compiled once for many tests."""
    return FusedShape(
        64, chunk_rows, slices, stride, rank, samples, capacity, sample_keys, survivor_keys, usual_keys, 5
    )


def select_scores(
    emulator: Emulator, scores: Scores, top_blocks: int, shape: FusedShape, page_blocks: int = 16, bound: int = 0
) -> tuple[Selection, Twins]:
    """What the indexer selects of given scores, -inf on holes of whole pages: each row is a request of its own.

    bound  on positions, where it is another than the longest row's
    """
    rows, seen = scores.visible.shape[0], scores.visible.tolist()
    spec = QsaSpec(top_blocks=top_blocks)
    pages = -(-max(*seen, 1) // page_blocks)
    table = torch.arange(pages, dtype=torch.int32).repeat(rows, 1)
    for row, visible in enumerate(seen):
        gone = scores.values[row, :visible] == -math.inf
        for page in range(-(-visible // page_blocks)):
            if bool(gone[page * page_blocks : (page + 1) * page_blocks].all()):
                table[row, page] = -1 - row % 2 * 7  # any negative number is a hole
    # Every number of tail tokens; a row that sees no block is padding, or has 3 tokens at most.
    position = torch.tensor([4 * visible - 1 + row % 4 for row, visible in enumerate(seen)], dtype=torch.int32)
    given = Rows(torch.arange(rows, dtype=torch.int32), position, bound or max(int(position.max()), 0))
    keys = torch.zeros(1, dtype=FP16).expand(pages, page_blocks, spec.index_dim)
    index_q = torch.zeros(1, dtype=FP16).expand(rows, spec.index_heads, spec.index_dim)
    return emulator.select(index_q, IndexCache(keys, table), given, spec, shape, from_matrix(scores.values.numpy()))


def check(got: Selection, twins: Twins, scores: Scores, top_blocks: int) -> None:
    """The selection is the full sort's, floors keep their rule, and rows were done again where they had to be."""
    assert twins.wrong == []
    assert sorted(twins.failed) == twins.must_fail
    assert compare.same_selection(got, sorted_out(scores, top_blocks)) is None


# Rankings on the CPU: floors and survivors, with a full sort as the measure.

PALETTE = [0.0, -0.0, 0.25, 0.25, 1.0, 1.5, 2.0**-149, 3e38, math.inf, math.nan, -math.inf]


@st.composite
def drawn_scores(draw: st.DrawFn) -> Scores:
    """Rows of up to 300 blocks: all apart, of few values, of one, and with much that is no number."""
    rows, seed = draw(st.integers(1, 2)), draw(st.integers(0, 1 << 16))
    width = draw(st.integers(1, 300))
    random = np.random.default_rng(seed)
    values = np.empty((rows, width), np.float32)
    for row in range(rows):
        kind = draw(st.sampled_from(["apart", "few", "one", "gaps", "rising", "falling"]))
        if kind == "few":
            chosen = draw(st.lists(st.sampled_from(PALETTE), min_size=1, max_size=4))
            values[row] = random.choice(np.array(chosen, np.float32), width)
        elif kind == "one":
            values[row] = draw(st.sampled_from(PALETTE))
        else:
            values[row] = random.permutation(width) / 7
            if kind == "gaps":
                gone = random.random(width) < draw(st.sampled_from([0.1, 0.6, 0.95]))
                values[row, gone] = random.choice(np.array([math.nan, 0.0, math.inf], np.float32), int(gone.sum()))
            elif kind != "apart":
                values[row] = np.sort(values[row])[:: 1 if kind == "rising" else -1]
    visible = [draw(st.integers(max(width - 40, 0), width)) for _ in range(rows)]
    return scores_of(torch.from_numpy(values), visible)


@settings(max_examples=50)
@given(
    scores=drawn_scores(),
    top_blocks=st.sampled_from([1, 5, 16, 64]),
    rank=st.integers(1, 40),
    stride=st.sampled_from([1, 2, 4, 8]),
    slices=st.sampled_from([2, 3, 8]),
    capacity=st.sampled_from([64, 1024]),
)
def test_drawn_scores_select_what_a_full_sort_does(
    emulator: Emulator, scores: Scores, top_blocks: int, rank: int, stride: int, slices: int, capacity: int
) -> None:
    shape = shape_of(rank, stride, slices, capacity)
    got, twins = select_scores(emulator, scores, top_blocks, shape)
    check(got, twins, scores, top_blocks)


ENOUGH = [nasty for nasty in NASTY_SCORES if nasty.name not in ("many-rows", "one-bin-16384", "long-row-65536")]


@pytest.mark.parametrize("nasty", ENOUGH, ids=str)
def test_nasty_scores_select_what_a_full_sort_does(emulator: Emulator, nasty: NastyScores) -> None:
    scores = nasty.build()
    most = scores.visible.argsort(descending=True)[:2]
    scores = Scores(scores.values[most], scores.visible[most])
    top_blocks = min(nasty.top_blocks[-1], 512)
    wanted = fused_shape(QsaSpec(top_blocks=top_blocks), 2, 4 * int(scores.visible.max()) + 3, H200, LIMIT)
    # Rankings that serve rows of any length, so that few are compiled; ranks, strides and room are the row's own.
    shape = replace(wanted, slices=3, sample_keys=16, survivor_keys=8, usual_keys=6)
    got, twins = select_scores(emulator, scores, top_blocks, shape)
    check(got, twins, scores, top_blocks)


def ramp(*visible: int, width: int = 0) -> Scores:
    """Rows whose scores are all apart and in no order."""
    generator = torch.Generator().manual_seed(len(visible))
    longest = max(*visible, width)
    values = torch.stack([torch.randperm(longest, generator=generator) for _ in visible]).float()
    return scores_of(values, list(visible))


def test_rows_around_the_ranks_boundary(emulator: Emulator) -> None:
    """With a stride of 4 and rank 6, a row of 28 blocks is the first whose sample tells; of shorter ones all go on."""
    shape = shape_of(rank=6, stride=4)
    assert [blocks_sampled(seen, 5, 6, 4) for seen in (5, 23, 24, 27, 28, 31, 32)] == [0, 0, 0, 0, 7, 7, 8]
    scores = ramp(5, 6, 23, 24, 27, 28, 31, 32, 200)
    got, twins = select_scores(emulator, scores, 5, shape)
    check(got, twins, scores, 5)
    assert twins.failed == []


def test_a_plateau_is_cut_by_ids(emulator: Emulator) -> None:
    """Equal scores let no more through than others: rank 6 of one in 4 is 24 blocks, give or take a stride."""
    scores = scores_of(torch.full((2, 600), 0.5), [600, 300])
    got, twins = select_scores(emulator, scores, 16, shape_of(rank=6, stride=4, capacity=64, slices=1))
    check(got, twins, scores, 16)
    assert twins.failed == []
    assert got.blocks.tolist() == [list(range(16))] * 2


def test_rows_fail_where_too_few_come_too_many_or_a_list_runs_over(emulator: Emulator) -> None:
    blocks = sampled_blocks(400, 4)
    values = ramp(1600, 1600, 1600, 1600).values[:, :1600]
    values[0, blocks] += 5000.0  # the sample is the best: no other block reaches its floor
    values[1, blocks] = 0.0  # and the worst: every block does, more than a program ranks
    clustered = torch.arange(1600) // TILE_BLOCKS % 3 == 1
    values[2] = torch.where(clustered, values[2] + 5000.0, values[2])  # one program's tiles have all of the best
    scores = scores_of(values)
    got, twins = select_scores(emulator, scores, 64, shape_of(rank=30, stride=4, capacity=64))
    check(got, twins, scores, 64)
    assert sorted(twins.failed) == [0, 1, 2]
    got, twins = select_scores(emulator, scores, 64, shape_of(rank=30, stride=4, capacity=1024))
    check(got, twins, scores, 64)
    assert sorted(twins.failed) == [0, 1]


def test_too_few_numbers_are_selected_all_and_nothing_fails(emulator: Emulator) -> None:
    values = torch.full((3, 400), math.nan)
    values[0, 7::40] = 1.0
    values[1, 48:64] = -math.inf
    values[2] = -math.inf
    scores = scores_of(values, [400] * 3)
    got, twins = select_scores(emulator, scores, 16, shape_of())
    check(got, twins, scores, 16)
    assert got.count.tolist() == [10, 0, 0]
    assert twins.failed == []


def test_rows_below_the_budget_take_all_but_holes_and_score_nothing(emulator: Emulator) -> None:
    scores = ramp(64, 63, 33, 1, 0, 65)
    scores.values[0, 16:32] = -math.inf
    scores.values[1, 0:16] = -math.inf
    scores.values[1, 40] = math.nan  # of a row whose scores nobody looks at
    scores.values[5, 48:64] = -math.inf
    got, twins = select_scores(emulator, scores, 64, shape_of())
    check(got, twins, scores, 64)
    assert got.count.tolist() == [48, 47, 33, 1, 0, 49]


def test_padding_and_rows_past_the_bound_see_nothing(emulator: Emulator) -> None:
    spec, rows = QsaSpec(top_blocks=8), 9
    request = torch.tensor([0, -1, 1, 0, 2, 1, -7, 0, 1], dtype=torch.int32)
    position = torch.tensor([799, 700, -1, 800, 500, 799, -5, 2, 1 << 30], dtype=torch.int32)
    live = [True, False, False, False, False, True, False, True, False]
    values = ramp(*[200] * rows).values
    table = torch.arange(13, dtype=torch.int32).repeat(2, 1)
    keys = torch.zeros(1, dtype=FP16).expand(13, 16, 128)
    index_q = torch.zeros(1, dtype=FP16).expand(rows, 4, 128)
    arguments = (index_q, IndexCache(keys, table), Rows(request, position, 799), spec, shape_of())
    got, twins = emulator.select(*arguments, from_matrix(values.numpy()))
    visible = [(at + 1) // 4 if there else 0 for at, there in zip(position.tolist(), live, strict=True)]
    scores = Scores(values, torch.tensor(visible, dtype=torch.int32))
    check(got, twins, scores, 8)
    assert got.count.tolist() == [8, 0, 0, 0, 0, 8, 0, 0, 0]


@pytest.mark.parametrize("chunk_rows", [1, 3, 64])
def test_chunks_share_their_memory(emulator: Emulator, chunk_rows: int) -> None:
    scores = ramp(300, 16, 0, 299, 40, 15, 120)
    scores.values[3, sampled_blocks(74, 4)] += 5000.0
    got, twins = select_scores(emulator, scores, 16, shape_of(rank=12, chunk_rows=chunk_rows))
    check(got, twins, scores, 16)
    assert twins.failed == [3]


def test_a_bound_far_past_the_rows_changes_nothing(emulator: Emulator) -> None:
    scores = ramp(300, 30, 0)
    got, twins = select_scores(emulator, scores, 16, shape_of(), bound=(1 << 20) - 1)
    check(got, twins, scores, 16)


def test_more_blocks_than_usual(emulator: Emulator) -> None:
    """Rows with more survivors than most are ranked in more registers; both rankings see ties at the cut."""
    values = (ramp(1200, 1200).values / 8).round()[:, :1200]
    for rank, ranked in ((40, 1), (120, 2)):
        scores = scores_of(values, [1200, 1190])
        got, twins = select_scores(emulator, scores, 64, shape_of(rank=rank, stride=4, capacity=1024))
        check(got, twins, scores, 64)
        assert -(-rank * 4 // THREADS) == ranked
        assert twins.failed == []


# The public call, on memory that twins of the tensor-core kernels read.

CALLS = [
    Case("one-request", (9,), (1000,), spec_of(6, 1, top_blocks=8), FP16, FP16, page_tokens=64),
    Case(
        "requests-mixed",
        (1, 0, 5, 3, 2),
        (900, 500, 777, 30, 31),
        spec_of(6, 1, top_blocks=8),
        FP16,
        FP16,
        page_tokens=12,
        padding=(0, 4),
        holes=((2, 3), (0, 0)),
    ),
    Case("two-heads", (7,), (700,), replace(spec_of(6, 1), index_heads=2, index_dim=64), FP16, FP16, order="reversed"),
]


@pytest.mark.parametrize("case", CALLS, ids=lambda case: case.name)
def test_a_public_call_selects_what_the_reference_does(
    emulator: Emulator, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Index scores are whole numbers, so equal to the last bit whoever adds them up, and ties are many."""
    for module in (flashqsa.pipeline, flashqsa.plan):
        monkeypatch.setattr(module, "facts_here", lambda _: H200)
    inputs = build(case)
    wide = torch.zeros(inputs.rows.count, inputs.spec.index_heads + 1, inputs.spec.index_dim + 8, dtype=FP16)
    index_q = wide[:, 1:, : inputs.spec.index_dim].copy_(inputs.index_q)
    arguments = (index_q, inputs.index_cache, inputs.rows, inputs.spec)
    plan = make_plan(
        Call(inputs.spec, inputs.rows.count, inputs.index_cache.requests, inputs.rows.max_position, FP16, FP16),
        H200,
        "sm90:fused",
        ("select",),
    )
    few = shape_of(rank=8, stride=4, samples=plan.select.fused.samples * 2, chunk_rows=5)  # type: ignore[union-attr]
    plan = replace(plan, select=replace(plan.select, fused=replace(few, window_rows=256 // inputs.spec.index_heads)))
    emulator.twins = twins = Twins(from_memory, inputs.rows.request.data_ptr(), 4 * THREADS)
    got = flashqsa.select_blocks(*arguments, plan=plan)
    assert twins.wrong == []
    assert sorted(twins.failed) == twins.must_fail
    assert compare.same_selection(got, reference.select_blocks(*arguments)) is None
    assert int(got.count.max()) == inputs.spec.top_blocks


def test_parameters_are_what_the_sources_take() -> None:
    """Each member of `Arguments` has its type's code, and the host packs as many."""
    kernels = kernels_for(4, 128)
    assert "".join(members(kernels.score.source).values()) == select.SCORE_PARAMETERS.removesuffix("0q")
    assert "".join(members(kernels.rescore.source).values()) == select.RESCORE_PARAMETERS.removesuffix("0q")


def test_an_empty_call_and_another_plan(emulator: Emulator) -> None:
    empty = torch.empty(0, dtype=torch.int32)
    cache = IndexCache(torch.zeros(1, 4, 128, dtype=FP16), torch.zeros(1, 1, dtype=torch.int32))
    arguments = (torch.zeros(0, 4, 128, dtype=FP16), cache, Rows(empty, empty, -1), QsaSpec())
    plan = make_plan(Call(QsaSpec(), 1616, 1, 183_999, BF16, BF16), H200)
    assert select.select_chunks(*arguments, plan.select).blocks.shape == (0, 512)
    with pytest.raises(TypeError, match="wanted a plan with a FusedShape, got None"):
        select.select_chunks(*arguments, make_plan(plan.call, H200, "smxx").select)


# What the sources compile to.


def kernels_for(
    heads: int, dim: int, bf16: bool = True, top_blocks: int = 512, width: int = 46_000, rows: int = 1616
) -> FusedKernels:
    spec = QsaSpec(index_heads=heads, index_dim=dim, top_blocks=top_blocks)
    return fused_kernels(spec, fused_shape(spec, rows, 4 * width - 1, H200, LIMIT), width, bf16)


def test_registers_are_given_up_before_they_are_taken() -> None:
    """A program begins with 96 registers a thread; where more are taken than were given up, it waits for ever."""
    producers, consumers = 128, select.SCORE_THREADS - 128
    begin = 65_536 // select.SCORE_THREADS // 8 * 8
    given = producers * (begin - select.PRODUCER_REGISTERS)
    assert given >= consumers * (select.CONSUMER_REGISTERS - begin) > 0
    for registers in (select.PRODUCER_REGISTERS, select.CONSUMER_REGISTERS):
        assert registers % 8 == 0
        assert 24 <= registers <= 256
    assert begin == 96


@pytest.fixture(scope="module")
def cubins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHQSA_CACHE_DIR", str(tmp_path_factory.mktemp("cubins")))
        compile_source.cache_clear()
        yield
    compile_source.cache_clear()


def hold(kernel: Kernel) -> tuple[str, bytes]:
    """A kernel fits a multiprocessor: shared memory, what is declared with what is asked for, and registers.

    Returns what the compiler said of it, and the cubin.
    """
    try:
        found = compile_source(kernel.source, kernel.capability)
    except NvrtcNotFoundError as error:
        pytest.skip(str(error))
    pattern = rf"Compiling entry function '{kernel.function}'.*?(?=Compiling entry|\Z)"
    (log,) = re.findall(pattern, found.log, flags=re.S)
    static = sum(map(int, re.findall(r"(\d+) bytes smem", log)))
    assert static + kernel.shared_bytes <= H200.shared_memory_bytes, kernel
    (registers,) = map(int, re.findall(r"Used (\d+) registers", log))
    assert registers * kernel.threads <= 65_536, kernel
    return log, found.cubin


@pytest.mark.usefixtures("cubins")
@pytest.mark.parametrize(("heads", "dim"), LEGAL)
def test_products_compile_to_wgmma_and_fit(heads: int, dim: int) -> None:
    kernels = kernels_for(heads, dim, bf16=heads == 4)
    for kernel in (kernels.sample, kernels.score, kernels.rescore):
        log, cubin = hold(kernel)
        try:
            code = sass.disassemble(cubin)[kernel.function]
        except sass.NoDisassemblerError as error:
            pytest.skip(str(error))
        assert sass.count(code, "HGMMA") % (dim // 16) == 0
        assert sass.count(code, "HGMMA") >= dim // 16
        spilled, local = re.findall(r"(\d+) bytes spill stores", log), sass.count(code, *sass.LOCAL_MEMORY)
        if kernel.function == "flashqsa_score_sm90" and (heads, dim) != (4, 128):
            # Two registers at most, of shapes other than the released model's.
            assert int(spilled[0]) <= 8, kernel
        else:
            assert (spilled, local) == (["0"], 0), kernel


@pytest.mark.usefixtures("cubins")
@pytest.mark.parametrize(("top_blocks", "width"), [(512, MOST_BLOCKS), (2048, 100_000)])
def test_rankings_of_any_length_compile_and_fit(top_blocks: int, width: int) -> None:
    kernels = kernels_for(2, 64, top_blocks=top_blocks, width=width)
    for kernel in (kernels.floors, kernels.select, kernels.rescore):
        hold(kernel)
