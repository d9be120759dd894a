"""Volta and Turing: long requests of a batch by cuBLAS, the rest by the paged scorer, in one matrix of scores.

Who takes which row is checked over drawn batches, row by row. What both make of a batch is compared with the reference:
on emulated warps without a GPU, and on a GPU of any kind as `test_sm7x_score.py` does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton", reason="the comparison of scores stands in a test of Triton's")

from flashqsa import reference
from flashqsa.config import (
    SM7X_SHARED_BYTES,
    Sm7xScoreConfig,
    product_bytes,
    sm7x_query_bytes,
    sm7x_score_bytes,
    sm7x_score_chunk_rows,
    sm7x_score_config,
    topk_config,
)
from flashqsa.device import DeviceFacts, facts_of
from flashqsa.kernels.nvrtc import empty_selection, products
from flashqsa.kernels.nvrtc.topk import topk
from flashqsa.kernels.sm7x.score import RANGES, score
from flashqsa.plan import make_plan
from flashqsa.route import Call
from flashqsa.score_split import Sm7xSplit, score_split
from flashqsa.tables import score_sm7x as table
from flashqsa.tables.products import PRODUCT_COLUMNS
from flashqsa.testing import compare
from flashqsa.testing.cases import Case, spec_of
from flashqsa.testing.inputs import Inputs, relocate, take_rows
from flashqsa.values import FP8, QsaSpec, Rows, Run, Scores, Selection
from tests.sm7x_score_emulate import KINDS, Machine, machine_named
from tests.test_smxx_score import failure

FP16 = torch.float16
RTX8000 = DeviceFacts.named("rtx8000")
LIMITS = (1 << 20, 16 << 20, 128 << 20)

TILE = Sm7xScoreConfig(
    (7, 5), False, rows=16, window=16, strips=2, warps=4, resident=2, slice_blocks=128, runs=2, product_columns=128
)
"""Windows that straddle requests, beside cuBLAS; the same for the rows that it leaves over."""

CHOSEN = replace(TILE, programs=24)
"""As `TILE`, with windows of their own for the rows that cuBLAS leaves over."""


def runs_of(rows: Rows) -> tuple[Run, ...]:
    """Runs of live rows, read from the tensors."""
    found: list[Run] = []
    for row, (request, position) in enumerate(zip(rows.request.tolist(), rows.position.tolist(), strict=True)):
        if request < 0 or position < 0:
            continue
        last = found[-1] if found else None
        if last is not None and last.stop == row and last.request == request:
            found[-1] = Run(request, last.start, row + 1, position)
        else:
            found.append(Run(request, row, row + 1, position))
    return tuple(found)


def with_runs(inputs: Inputs) -> Inputs:
    return replace(inputs, rows=replace(inputs.rows, runs=runs_of(inputs.rows)))


def split_of(rows: Rows, requests: int, spec: QsaSpec, config: Sm7xScoreConfig) -> Sm7xSplit:
    return score_split(spec, rows.count, requests, rows.max_position, rows.runs, config)


# Who takes which row.


@st.composite
def batches(draw: st.DrawFn) -> tuple[Rows, int]:
    """Rows of ragged requests, padding between and after them and within them, and how many requests there are."""
    request: list[int] = []
    position: list[int] = []
    queries = st.one_of(st.integers(0, 3), st.integers(60, 70), st.integers(0, 400))
    tokens = st.one_of(st.integers(0, 300), st.sampled_from([16_383, 65_500, 65_535]), st.integers(0, 500_000))
    lengths = draw(st.lists(st.tuples(queries, tokens, st.integers(0, 3)), max_size=6))
    lengths += lengths[-1:] * draw(st.integers(0, 3))
    for index, (count, before, padding) in enumerate(lengths):
        hole = draw(st.integers(0, count)) if draw(st.integers(0, 4)) == 0 else count
        for row in range(count):
            if row == hole:
                request.append(-1)
                position.append(before)
            request.append(index)
            position.append(before + row)
        request += [index if row % 2 else -1 for row in range(padding)]
        position += [-2] * padding
    rows = Rows.from_tensors(torch.tensor(request, dtype=torch.int32), torch.tensor(position, dtype=torch.int32))
    highest = max([p for r, p in zip(request, position, strict=True) if r >= 0], default=-1)
    return replace(rows, max_position=max(highest, -1) + draw(st.integers(0, 9)), runs=runs_of(rows)), len(lengths)


@given(batches(), st.sampled_from(LIMITS), st.integers(0, 3))
def test_every_row_is_scored_once_and_long_runs_by_cublas(batch: tuple[Rows, int], limit: int, heads: int) -> None:
    (rows, requests), spec = batch, QsaSpec(index_heads=(4, 1, 8, 32)[heads])
    chunk = sm7x_score_chunk_rows(spec, rows.count, rows.max_position, limit)
    for first in range(0, rows.count, chunk):
        part = rows.slice(first, min(first + chunk, rows.count))
        config = sm7x_score_config(spec, part.count, requests, rows.max_position, RTX8000, limit)
        split = split_of(part, requests, spec, config)
        scored = [0] * part.count
        for product in split.products:
            for row in range(product.start, product.stop):
                scored[row] += 1
        assert not any(scored) or max(scored) == 1
        wanted = [False] * part.count
        widths = {}
        for run in runs_of(part):
            count, width = run.stop - run.start, max((run.last_position + 1) // 4, 1)
            if count >= table.PRODUCT_ROWS and count * width >= table.PRODUCT_SCORES:
                wanted[run.start : run.stop] = [True] * count
                widths[run.start, run.stop] = (run.request, width)
        assert [bool(times) for times in scored] == wanted
        assert {(p.start, p.stop): (p.request, p.width) for p in split.products} == widths
        left = [row for start, stop in split.ranges for row in range(start, stop)]
        assert left == [row for row in range(part.count) if not wanted[row]]
        assert all(a[1] < b[0] for a, b in pairwise(split.ranges))
        planned = sm7x_score_bytes(spec, config, part.count, part.max_position)
        scores = sm7x_score_bytes(spec, replace(config, product_columns=0), part.count, part.max_position)
        for product in split.products:
            assert product.columns % PRODUCT_COLUMNS == 0
            taken = product.columns * product_bytes(spec, product.stop - product.start)
            assert 0 < taken <= planned - scores
        assert (split.pages == config) or split.products
        assert_legal(split, spec, part)


def assert_legal(split: Sm7xSplit, spec: QsaSpec, rows: Rows) -> None:
    """Whether the paged scorer's programs cover what is left over, without many more than have work."""
    pages, width = split.pages, max(spec.visible_blocks(rows.max_position), 1)
    assert 1 <= pages.window <= pages.rows
    assert sm7x_query_bytes(spec, pages.rows) <= SM7X_SHARED_BYTES
    assert pages.slice_blocks % pages.strip_blocks == 0
    assert pages.slice_blocks * -(-width // pages.slice_blocks) >= width
    if split.products and split.ranges:
        windows = sum(-(-(stop - start) // pages.window) for start, stop in split.ranges)
        slices = -(-width // pages.slice_blocks)
        assert windows * slices <= 4 * (RTX8000.multiprocessors * table.PROGRAMS + windows) + windows


@given(batches(), st.sampled_from(LIMITS))
def test_a_plan_knows_how_many_rows_cublas_scores(batch: tuple[Rows, int], limit: int) -> None:
    (rows, requests), spec = batch, QsaSpec()
    call = Call(spec, rows.count, requests, rows.max_position, FP16, FP16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHQSA_WORKSPACE_MIB", str(limit >> 20))
        plan = make_plan(call, RTX8000).select
        alone = make_plan(replace(call, batch_invariant=True), RTX8000).select
    found = 0
    for start, stop in plan.chunks(rows.count):
        for run in rows.slice(start, stop).runs or ():
            count = run.stop - run.start
            if count >= table.PRODUCT_ROWS and count * ((run.last_position + 1) // 4) >= table.PRODUCT_SCORES:
                found += count
    assert plan.product_rows(rows, requests, spec) == (0 if call.selects_everything else found)
    assert alone.product_rows(rows, requests, spec) == 0
    assert alone.fewest_product_rows is None


@pytest.mark.parametrize(("rows", "tokens"), [(3230, 19_580), (1616, 184_000), (1617, 29_000)])
@pytest.mark.parametrize("gpu", ["v100", "rtx8000"])
def test_a_plan_has_room_for_its_last_chunk(gpu: str, rows: int, tokens: int) -> None:
    """Of fewer rows cuBLAS takes more columns at a time, and both together may be more bytes."""
    spec = QsaSpec()
    plan = make_plan(Call(spec, rows, 1, tokens - 1, FP16, FP16), DeviceFacts.named(gpu)).select
    needed = []
    for start, stop in plan.chunks(rows):
        config = plan.chunk_config(stop - start).score
        assert isinstance(config, Sm7xScoreConfig)
        needed.append(sm7x_score_bytes(spec, config, stop - start, tokens - 1))
    assert plan.workspace_bytes == max(needed) <= 128 << 20


@pytest.mark.parametrize(
    ("rows", "tokens", "taken"),
    [(64, 65_536, True), (63, 65_536, False), (64, 65_535, False), (65, 65_535, True), (63, 1 << 20, False)],
)
def test_a_run_is_long_from_these_rows_and_scores_on(rows: int, tokens: int, taken: bool) -> None:
    # 64 rows of 16,384 blocks are 2^20 scores. Its neighbours change nothing, in whatever order.
    for lengths in ([rows, 5, 5], [5, rows, 5], [1, 1, rows], [rows, rows, 5]):
        batch = Rows.from_lengths(lengths, [tokens if count == rows else 9000 for count in lengths])
        config = sm7x_score_config(QsaSpec(), batch.count, 3, batch.max_position, RTX8000, 128 << 20)
        products = split_of(batch, 3, QsaSpec(), config).products
        assert [p.stop - p.start for p in products] == [rows] * (lengths.count(rows) if taken else 0)


def test_equal_requests_are_multiplied_one_by_one() -> None:
    rows = Rows.from_lengths([200] * 5, [40_000] * 5)
    split = split_of(rows, 5, QsaSpec(), sm7x_score_config(QsaSpec(), 1000, 5, rows.max_position, RTX8000, 128 << 20))
    assert [(p.request, p.start, p.stop) for p in split.products] == [(i, 200 * i, 200 * i + 200) for i in range(5)]
    assert len({(p.width, p.columns) for p in split.products}) == 1
    assert split.ranges == ()


def test_decode_rows_beside_a_prefill_get_windows_of_their_own() -> None:
    # Seven rows of 30,000 tokens beside 1,616 rows: in windows of 16 they would keep a few programs busy.
    rows = Rows.from_lengths([*[1] * 7, 1616], [*[30_000] * 7, 184_000])
    config = sm7x_score_config(QsaSpec(), 343, 8, rows.max_position, RTX8000, 128 << 20)
    part = rows.slice(0, 343)
    pages = split_of(part, 8, QsaSpec(), config).pages
    assert (pages.rows, pages.window, pages.runs) == (1, 1, 1)
    assert 7 * -(-7500 // pages.slice_blocks) > 144
    assert config.rows == 16


def test_without_runs_a_call_of_one_request_is_cublas_s() -> None:
    spec, config = QsaSpec(), sm7x_score_config(QsaSpec(), 200, 1, 39_999, RTX8000, 128 << 20)
    (product,) = score_split(spec, 200, 1, 39_999, None, config).products
    assert (product.request, product.start, product.stop, product.width) == (0, 0, 200, 10_000)
    assert product.columns == config.product_columns
    for requests, runs in ((2, None), (0, None), (1, ())):
        split = score_split(spec, 200, requests, 39_999, runs, config)
        assert (split.products, split.ranges, split.pages) == ((), ((0, 200),), config)
    assert score_split(spec, 0, 1, -1, None, config).ranges == ()


def test_batch_invariance_leaves_all_rows_to_the_paged_scorer() -> None:
    rows = Rows.from_lengths([300, 1, 300], [40_000] * 3)
    config = sm7x_score_config(QsaSpec(), 601, 3, rows.max_position, RTX8000, 128 << 20, batch_invariant=True)
    split = split_of(rows, 3, QsaSpec(), config)
    assert (split.products, split.ranges, split.pages) == ((), ((0, 601),), config)


# What both make of a batch.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the emulated kernels: each is compiled once."""
    return tmp_path_factory.mktemp("sm7x")


@pytest.fixture(params=KINDS)
def machine(request: pytest.FixtureRequest, folder: Path) -> Iterator[Machine]:
    """The emulator, or the GPU that is here, with Volta's products or Turing's."""
    with machine_named(str(request.param), folder) as found:
        yield found


@pytest.fixture
def multiplied(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> list[int]:
    """Rows of four heads of each product that was asked for; requests are long from 6 rows on."""
    monkeypatch.setattr(table, "PRODUCT_ROWS", 6)
    monkeypatch.setattr(table, "PRODUCT_SCORES", 6)
    asked: list[int] = []
    multiply = products.multiply

    def counting(lines: torch.Tensor, keys: torch.Tensor, out: torch.Tensor) -> None:
        asked.append(lines.shape[0] // 4)
        multiply(lines, keys, out)

    monkeypatch.setattr(products, "multiply", counting)
    return asked


MIXED = Case(
    "mixed",
    (2, 20, 1, 0, 7, 5, 9),
    (200, 700, 150, 50, 44, 612, 9),
    spec_of(6, 1, top_blocks=8),
    FP16,
    FP16,
    padding=(0, 2, 2, 23, 44, 44),
    order="random",
    holes=((1, 2), (5, 4)),
)
"""Long and short requests, of more and of fewer blocks than are selected; padding before, between and after them."""

CASES = (
    MIXED,
    replace(MIXED, name="mixed-fp8", cache_dtype=FP8, exact_scores=False),
    # More ranges between long requests than one launch takes.
    Case("fence", (1, 6) * 6 + (3,), (90, 130) * 6 + (70,), spec_of(6, 1, top_blocks=4), FP16, FP16),
    Case("long-only", (8, 12), (600, 80), spec_of(6, 1, top_blocks=2), FP16, FP8, order="reversed"),
    # Row 3 is padding: two runs of request 0, one long and one short.
    Case("cut-run", (12, 2), (100, 60), spec_of(6, 1, top_blocks=8), FP16, FP16, padding=(3,)),
)
LONG_ROWS = {
    "mixed": [20, 7, 9],
    "mixed-fp8": [20, 7, 9],
    "fence": [6] * 6,
    "long-only": [8, 12],
    "cut-run": [9],
}


@pytest.mark.parametrize("config", [TILE, CHOSEN], ids=["one-tile", "own-tile"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_long_and_short_requests(case: Case, config: Sm7xScoreConfig, machine: Machine, multiplied: list[int]) -> None:
    inputs = with_runs(machine.build(case))
    got = machine.scores(inputs, config)
    assert failure(got, inputs) is None
    assert list(dict.fromkeys(multiplied)) == list(dict.fromkeys(LONG_ROWS[case.name]))
    split = split_of(inputs.rows, inputs.index_cache.requests, inputs.spec, config)
    assert [p.stop - p.start for p in split.products] == LONG_ROWS[case.name]
    assert (len(split.ranges) > RANGES) == (case.name == "fence")
    again = machine.scores(inputs, config)
    assert compare.same_bits(again.values, got.values)
    moved = machine.scores(relocate(inputs, "reversed"), config)
    assert compare.same_bits(moved.values, got.values)


@pytest.mark.parametrize("bounds", [(0, 11, 24, 51), (0, 30, 51)], ids=str)
def test_chunks_of_rows_cut_runs(bounds: tuple[int, ...], machine: Machine, multiplied: list[int]) -> None:
    inputs = with_runs(machine.build(MIXED))
    assert inputs.rows.count <= bounds[-1]
    for start, stop in pairwise(bounds):
        part = take_rows(inputs, start, min(stop, inputs.rows.count))
        assert failure(machine.scores(part, CHOSEN), part) is None
    assert len(set(multiplied)) >= 2


@pytest.mark.parametrize("case", [MIXED, CASES[2], CASES[3], CASES[4]], ids=lambda case: case.name)
def test_selections_are_those_of_the_paged_scorer_s_scores(case: Case, machine: Machine, multiplied: list[int]) -> None:
    # Whole numbers: every sum is exact, so scores agree in every bit and a full sort of either selects the same.
    inputs = machine.build(case)
    spec = inputs.spec
    paged = machine.scores(inputs, TILE)
    assert multiplied == []
    wanted = reference.topk(Scores(paged.values.cpu(), paged.visible.cpu()), spec.top_blocks)
    got = machine.scores(with_runs(inputs), CHOSEN)
    assert multiplied != []
    selected = reference.topk(Scores(got.values.cpu(), got.visible.cpu()), spec.top_blocks)
    assert compare.same_selection(selected, wanted) is None
    if machine.device != "cpu":
        chosen = empty_selection(inputs.rows, spec)
        topk(got, chosen, topk_config(spec, inputs.rows.count, facts_of(torch.device("cuda", 0))))
        on_cpu = Selection(chosen.blocks.cpu(), chosen.count.cpu())
        assert compare.same_selection(on_cpu, wanted) is None


def test_tensors_that_break_the_promise_of_their_runs(machine: Machine, multiplied: list[int]) -> None:
    # Rows 0 to 19 are request 0's, the next two request 1's, the last is padding.
    case = Case("broken", (20, 2), (200, 160), spec_of(6, 1, top_blocks=8), FP16, FP16, padding=(22,), order="random")
    inputs = with_runs(machine.build(case))
    right = machine.scores(inputs, CHOSEN)
    request, position = inputs.rows.request.clone(), inputs.rows.position.clone()
    request[3], position[4] = -1, -7  # padding in a run
    request[5], request[6] = 1, 999  # another request's rows, one of them of none
    position[7], position[8] = 10_000_000, 2**31 - 1  # past the bound of run and call
    request[20] = 0  # another request's row in a run that the paged scorer takes: what it is
    request[22], position[22] = 1, 159  # a live row outside every run
    broken = replace(inputs, rows=replace(inputs.rows, request=request, position=position))
    got = machine.scores(broken, CHOSEN)
    # Row 7 sees what its run's bound allows: 200 tokens, 50 blocks.
    assert got.visible.tolist() == [*right.visible.tolist()[:3], 0, 0, 0, 0, 50, 50, *right.visible.tolist()[9:22], 40]
    for row in (3, 4, 5, 6):
        assert bool(got.values[row].isnan().all())
    for row in (0, 1, 2, *range(9, 20), 21):
        assert compare.same_bits(got.values[row], right.values[row])
    for row in (7, 8):
        assert bool(got.values[row, :50].isfinite().all())
        assert bool(got.values[row, 50:].isnan().all())
    plain = replace(broken, rows=replace(broken.rows, runs=None))
    for row in (20, 22):
        assert compare.same_bits(got.values[row], machine.scores(plain, CHOSEN).values[row])


def test_a_row_sees_no_further_than_its_run_s_bound(machine: Machine, multiplied: list[int]) -> None:
    # The bound of the first run is lower than its rows' positions; the call's is not.
    case = Case("low", (20, 8), (200, 400), spec_of(6, 1, top_blocks=8), FP16, FP16)
    inputs = with_runs(machine.build(case))
    first, second = inputs.rows.runs or ()
    low = replace(inputs, rows=replace(inputs.rows, runs=(first._replace(last_position=119), second)))
    got, right = machine.scores(low, CHOSEN), machine.scores(inputs, CHOSEN)
    assert got.visible.tolist() == [30] * 20 + right.visible.tolist()[20:]
    assert compare.same_bits(got.values[20:], right.values[20:])
    for row in range(20):
        assert compare.same_bits(got.values[row, :30], right.values[row, :30])
        assert bool(got.values[row, 30:].isnan().all())


@pytest.mark.gpu
@pytest.mark.parametrize("machine", KINDS[2:], indirect=True)
@pytest.mark.parametrize("dtype", [FP16, FP8], ids=["fp16", "fp8"])
def test_a_long_batch_twice_and_through_the_top_k(machine: Machine, dtype: torch.dtype) -> None:
    spec = QsaSpec(top_blocks=64)
    lengths = (1, 200, 4, 160, 1), (9000, 24_000, 30_000, 28_000, 300)
    inputs = with_runs(machine.build(Case("batch", *lengths, spec, FP16, dtype, padding=(5,), exact_scores=False)))
    config = sm7x_score_config(spec, inputs.rows.count, 5, inputs.rows.max_position, RTX8000, 1 << 27)
    split = split_of(inputs.rows, 5, spec, config)
    assert [p.stop - p.start for p in split.products] == [196, 160]  # of 200 rows, padding cuts off 4
    got = machine.scores(inputs, config)
    assert failure(got, inputs) is None
    again = machine.scores(inputs, config)
    assert compare.same_bits(got.values, again.values)
    assert got.maxima is not None
    assert again.maxima is not None
    assert compare.same_bits(got.maxima, again.maxima)
    chosen = empty_selection(inputs.rows, spec)
    topk(got, chosen, topk_config(spec, inputs.rows.count, facts_of(torch.device("cuda", 0))))
    wanted = reference.topk(Scores(got.values.cpu(), got.visible.cpu()), spec.top_blocks)
    assert compare.same_selection(Selection(chosen.blocks.cpu(), chosen.count.cpu()), wanted) is None


@pytest.mark.gpu
@pytest.mark.parametrize("machine", KINDS[2:4], indirect=True)
def test_a_graph_replays_both_scorers_for_other_rows(machine: Machine) -> None:
    # Captured for one batch, replayed for shorter contexts and with a row of padding: runs bound what may come.
    case = Case("graph", (3, 100, 1), (900, 45_000, 700), QsaSpec(top_blocks=64), FP16, FP16, exact_scores=False)
    inputs = with_runs(machine.build(case))
    facts = replace(RTX8000, capability=machine.capability)
    config = sm7x_score_config(inputs.spec, 104, 3, inputs.rows.max_position, facts, 1 << 27)
    config = replace(config, quad_pairs=machine.quad_pairs)
    arguments = (inputs.index_q, inputs.index_cache, inputs.rows, inputs.spec, config)
    assert split_of(inputs.rows, 3, inputs.spec, config).products != ()
    score(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = score(*arguments)
    for back in (0, 1, 300):
        inputs.rows.position.sub_(back)
        if back == 300:
            inputs.rows.request[50] = -1
        graph.replay()
        wanted = score(*arguments)
        torch.cuda.synchronize()
        assert torch.equal(got.visible, wanted.visible)
        assert int(got.visible[50]) > 0 or back == 300
        seen = torch.arange(got.values.shape[1], device="cuda") < got.visible[:, None]
        assert compare.same_bits(got.values[seen], wanted.values[seen])
