"""Scores of one request by cuBLAS from compute capability 8.0 on: kernels, sizes, route, and whole selections.

Without a GPU the kernels run on the CPU, compiled by g++ over an emulator, and torch multiplies in FP32 what cuBLAS
would. What Volta and Turing make of the same kernels is in `test_sm7x_score.py` and `test_sm7x_split.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="the kernel set of this route, and the comparison of scores, want Triton")

from flashqsa import pipeline, reference
from flashqsa.cli import bench_measures
from flashqsa.cli import build as build_command
from flashqsa.device import KNOWN_DEVICES, DeviceFacts, facts_of
from flashqsa.kernels.nvrtc import Kernel, NvrtcNotFoundError, Source, compile_source, products
from flashqsa.kernels.nvrtc.products import products_source, score_request
from flashqsa.plan import Plan, SelectPlan, make_plan
from flashqsa.product_shape import ProductConfig, product_config, product_loses, product_refusal
from flashqsa.route import Call, NoRouteError, choose_route
from flashqsa.tables import products as table
from flashqsa.testing import compare
from flashqsa.testing.accuracy import own_sort_failure
from flashqsa.testing.cases import Case, named, spec_of
from flashqsa.testing.inputs import Inputs, build, fill_unwritten, relocate
from flashqsa.values import FP8, SEGMENT_BLOCKS, IndexCache, QsaSpec, Rows, Scores, Selection
from tests.both_devices import poisoned_memory
from tests.nvrtc_emulate import CXX, emulated_launches
from tests.sm7x_score_emulate import emulated_scores
from tests.test_smxx_score import failure

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
DTYPES = {"fp16": (FP16, FP16), "bf16": (BF16, BF16), "fp16-fp8": (FP16, FP8), "bf16-fp8": (BF16, FP8)}
H200 = DeviceFacts.named("h200")
GPUS = [facts for facts in KNOWN_DEVICES.values() if "smxx" in facts.kernel_sets]
COLUMNS = 128


@contextmanager
def emulated(folder: Path) -> Iterator[None]:
    """Launches on CPU tensors run in an emulator: those of `products.cu` in that with vectors of floats."""
    with emulated_launches(folder):
        launch_others = Kernel.launch
        with emulated_scores(folder):
            launch_products = Kernel.launch

            def launch(kernel: Kernel, device: torch.device, programs: int, *arguments: int | float) -> None:
                mine = kernel.source.name == "products.cu"
                (launch_products if mine else launch_others)(kernel, device, programs, *arguments)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Kernel, "launch", launch)
                yield


@dataclass(frozen=True)
class Machine:
    """Where kernels run, and what plans are made for."""

    device: str
    facts: DeviceFacts

    @property
    def capability(self) -> tuple[int, int]:
        assert self.facts.capability is not None
        return self.facts.capability

    def build(self, case: Case, kind: str) -> Inputs:
        """A case in dtypes of `DTYPES`."""
        q_dtype, cache_dtype = DTYPES[kind]
        return build(replace(case, q_dtype=q_dtype, cache_dtype=cache_dtype), self.device)

    def scores(self, inputs: Inputs, columns: int = COLUMNS) -> Scores:
        """Scores written over NaN."""
        with poisoned_memory():
            return score_request(inputs.index_q, inputs.index_cache, inputs.rows, inputs.spec, self.capability, columns)

    def plan(self, inputs: Inputs) -> Plan:
        """A plan that scores by cuBLAS."""
        cache = inputs.index_cache
        call = Call(
            inputs.spec,
            inputs.rows.count,
            cache.requests,
            inputs.rows.max_position,
            index_q_dtype=inputs.index_q.dtype,
            index_cache_dtype=cache.keys.dtype,
        )
        return make_plan(call, self.facts, "smxx:cublas", stages=("select",))

    def select(self, inputs: Inputs, plan: Plan) -> Selection:
        """What `select_blocks` makes of a checked call, over NaN."""
        with poisoned_memory():
            found = pipeline._select(inputs.index_q, inputs.index_cache, inputs.rows, inputs.spec, plan)
        return Selection(found.blocks.cpu(), found.count.cpu())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the emulated kernels: each is compiled once."""
    return tmp_path_factory.mktemp("products")


@pytest.fixture(params=["emulated", pytest.param("gpu", marks=pytest.mark.gpu)])
def machine(request: pytest.FixtureRequest, folder: Path) -> Iterator[Machine]:
    """The emulator with the plans of an A100, or the GPU that is here."""
    if request.param == "gpu":
        facts = facts_of(torch.device("cuda", 0))
        if "smxx" not in facts.kernel_sets:
            pytest.skip("the route is for compute capability 8.0 and newer")
        yield Machine("cuda", facts)
        return
    if CXX is None:
        pytest.skip("no g++ here to compile the kernels for the CPU")
    with emulated(folder):
        yield Machine("cpu", DeviceFacts.named("a100"))


ONE_REQUEST = (
    named("prefill-normal-scores"),
    named("index-pages-of-3-blocks"),
    named("holes"),
    named("only-padding"),
    Case("pages-of-784", (5,), (1800,), spec_of(6, 1), page_tokens=784, order="reversed"),
    Case("holes-of-3-blocks", (24,), (300,), spec_of(6, 1), page_tokens=12, holes=((0, 1), (0, 4), (0, 20))),
    Case("maxima", (40,), (1300,), spec_of(6, 1, top_blocks=3), holes=((0, 1), (0, 30)), padding=(0, 7)),
    Case("below-and-above", (30,), (90,), spec_of(6, 1, top_blocks=16), exact_scores=False),
    Case("one-row", (1,), (777,), spec_of(6, 1, top_blocks=16), exact_scores=False),
)


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("case", ONE_REQUEST, ids=lambda case: case.name)
def test_scores_are_the_reference_s(case: Case, kind: str, machine: Machine) -> None:
    inputs = machine.build(case, kind)
    got = machine.scores(inputs)
    assert failure(got, inputs) is None
    assert (got.maxima is not None) == (-(-got.values.shape[1] // SEGMENT_BLOCKS) > inputs.spec.top_blocks)
    if case.name == "maxima":
        assert failure(machine.scores(inputs, 384), inputs) is None


def test_no_rows_are_no_scores(machine: Machine) -> None:
    inputs = machine.build(Case("no-rows", (0,), (50,), spec_of(6, 1)), "bf16")
    assert machine.scores(inputs).visible.tolist() == []


@pytest.mark.parametrize("kind", ["fp16-fp8", "bf16-fp8"])
def test_every_fp8_number(kind: str, machine: Machine) -> None:
    # Row i asks for dimension i of two keys that hold every code but the two of NaN, with either sign.
    spec = QsaSpec(q_heads=1, kv_heads=1, head_dim=64, index_heads=4, index_dim=128, top_blocks=8)
    inputs = machine.build(Case("codes", (64,), (164,), spec, order="identity"), kind)
    codes = torch.arange(256, dtype=torch.uint8, device=machine.device)
    codes[[0x7F, 0xFF]] = 0
    inputs.index_cache.keys[0, :2] = codes.view(2, 128).view(FP8)
    queries = torch.zeros_like(inputs.index_q)
    for row in range(64):
        queries[row, 0, row], queries[row, 1, row + 64] = 1, 1
        queries[row, 2, row], queries[row, 3, row + 64] = -1, -1
    inputs = replace(inputs, index_q=queries)
    got = machine.scores(inputs)
    on_cpu = replace(
        inputs.index_cache, keys=inputs.index_cache.keys.cpu(), page_table=inputs.index_cache.page_table.cpu()
    )
    rows = Rows(inputs.rows.request.cpu(), inputs.rows.position.cpu(), inputs.rows.max_position)
    wanted = reference.score(queries.cpu(), on_cpu, rows, spec, precision=FP32)
    assert torch.equal(got.values[:, :2].cpu(), wanted.values[:, :2])
    assert len(got.values[:, :2].unique()) == 64
    codes[5] = 0x7F
    inputs.index_cache.keys[0, :1] = codes.view(2, 128)[:1].view(FP8)
    got = machine.scores(inputs)
    assert bool(got.values[:, 0].isnan().all())
    assert torch.equal(got.values[:, 1].cpu(), wanted.values[:, 1])


@pytest.mark.parametrize(("more", "kind"), [(16, "bf16"), (3, "bf16"), (5, "bf16-fp8"), (8, "fp16-fp8")])
def test_views_of_wider_memory(more: int, kind: str, machine: Machine) -> None:
    inputs = machine.build(named("pages-in-order"), kind)
    cache, q_dtype = inputs.index_cache, inputs.index_q.dtype
    pages, blocks, dim = cache.keys.shape
    pool = torch.full((pages, blocks + 1, dim + more), float("nan"), device=machine.device).to(cache.keys.dtype)
    pool[:, :blocks, :dim] = cache.keys
    queries = torch.full((inputs.rows.count, 5, dim + more), float("nan"), dtype=q_dtype, device=machine.device)
    queries[:, :4, :dim] = inputs.index_q
    viewed = replace(inputs, index_q=queries[:, :4, :dim], index_cache=replace(cache, keys=pool[:, :blocks, :dim]))
    assert products.is_aligned(viewed.index_cache.keys) == (more % 8 == 0)
    assert failure(machine.scores(viewed), viewed) is None


def test_queries_that_autograd_follows(machine: Machine) -> None:
    inputs = machine.build(named("pages-in-order"), "bf16")
    wanted = machine.scores(inputs)
    got = machine.scores(replace(inputs, index_q=inputs.index_q.clone().requires_grad_()))
    assert not got.values.requires_grad
    assert compare.same_bits(got.values, wanted.values)


@pytest.mark.parametrize("kind", ["bf16", "fp16-fp8"])
def test_same_bits_wherever_pages_lie_and_whatever_they_hold_besides(kind: str, machine: Machine) -> None:
    inputs = machine.build(replace(named("prefill-normal-scores"), query_lengths=(20,)), kind)
    first = machine.scores(inputs)
    for other in (
        inputs,
        relocate(inputs, "reversed"),
        relocate(inputs, "random"),
        fill_unwritten(inputs, "fp32-bytes"),
    ):
        assert compare.same_bits(machine.scores(other).values, first.values)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_odd_keys_stay_where_they_are(value: float, machine: Machine) -> None:
    inputs = machine.build(Case("odd-key", (4,), (160,), spec_of(6, 1), order="identity"), "bf16")
    inputs.index_cache.keys[3, 2, 5] = value
    got = machine.scores(inputs)
    assert failure(got, inputs) is None
    assert bool(got.values[:, :14].isfinite().all())


@pytest.mark.parametrize(("q_dtype", "cache_dtype"), [(FP32, FP32), (FP32, FP8), (FP16, BF16)])
def test_other_dtypes_are_no_call(q_dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    inputs = build(replace(named("prefill-k-1"), q_dtype=q_dtype, cache_dtype=cache_dtype))
    with pytest.raises(TypeError, match="wanted FP16 or BF16 queries, keys alike or FP8"):
        score_request(inputs.index_q, inputs.index_cache, inputs.rows, inputs.spec, (8, 0), 128)


# Whole selections, through a plan.


SELECTED = (
    Case("long", (70,), (1900,), spec_of(6, 1, top_blocks=24), padding=(0, 9), holes=((0, 5),), exact_scores=False),
    Case("more-than-segments", (9,), (900,), spec_of(6, 1, top_blocks=5), exact_scores=False),
)


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("case", SELECTED, ids=lambda case: case.name)
def test_selections_are_a_full_sort_of_the_scores(
    case: Case, kind: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = machine.build(case, kind)
    monkeypatch.setenv("FLASHQSA_WORKSPACE_MIB", "1")
    plan = machine.plan(inputs)
    config = plan.select.chunk_config(plan.select.chunk_rows).score
    assert isinstance(config, ProductConfig)
    assert plan.select.product_rows(inputs.rows, 1, inputs.spec) == inputs.rows.count
    got = machine.select(inputs, plan)
    wanted = Selection(torch.empty_like(got.blocks), torch.empty_like(got.count))
    for start, stop in plan.select.chunks(inputs.rows.count):
        part = inputs.rows.slice(start, stop)
        scores = machine.scores(replace(inputs, index_q=inputs.index_q[start:stop], rows=part), config.columns)
        ranked = reference.topk(Scores(scores.values.cpu(), scores.visible.cpu()), inputs.spec.top_blocks)
        wanted.blocks[start:stop], wanted.count[start:stop] = ranked.blocks, ranked.count
    assert compare.same_selection(got, wanted) is None
    assert int(got.count.max()) == inputs.spec.top_blocks


def test_a_small_workspace_makes_chunks_and_pieces_of_the_same_selection(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whole numbers: every sum is exact, so the scores of all routes agree in every bit.
    inputs = machine.build(Case("exact", (100,), (9000,), spec_of(6, 1, top_blocks=16), page_tokens=64), "bf16")
    multiplied: list[tuple[int, int]] = []
    multiply = products.multiply

    def counted(lines: Tensor, keys: Tensor, out: Tensor) -> None:
        multiplied.append((lines.shape[0], keys.shape[0]))
        multiply(lines, keys, out)

    monkeypatch.setattr(products, "multiply", counted)
    monkeypatch.setenv("FLASHQSA_WORKSPACE_MIB", "1")
    plan = machine.plan(inputs)
    got = machine.select(inputs, plan)
    assert len(list(plan.select.chunks(inputs.rows.count))) > 1
    assert len(multiplied) > 2 * len(list(plan.select.chunks(inputs.rows.count)))
    assert {columns % 128 for _, columns in multiplied} == {0}
    wanted = reference.select_blocks(
        inputs.index_q.cpu(),
        IndexCache(inputs.index_cache.keys.cpu(), inputs.index_cache.page_table.cpu()),
        Rows(inputs.rows.request.cpu(), inputs.rows.position.cpu(), inputs.rows.max_position),
        inputs.spec,
    )
    assert compare.same_selection(got, wanted) is None


def test_no_more_memory_is_taken_than_planned(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    if machine.device != "cpu":
        pytest.skip("counted where torch.empty is poisoned")
    inputs = machine.build(Case("taken", (130,), (3000,), spec_of(6, 1, top_blocks=16), page_tokens=64), "bf16")
    # Heads lie apart, so queries are copied.
    apart = torch.empty((4, inputs.rows.count, 128), dtype=BF16)
    apart.copy_(inputs.index_q.transpose(0, 1))
    inputs = replace(inputs, index_q=apart.transpose(0, 1))
    monkeypatch.setenv("FLASHQSA_WORKSPACE_MIB", "2")
    plan = machine.plan(inputs).select
    (start, stop), *_ = plan.chunks(inputs.rows.count)
    part = replace(inputs, index_q=inputs.index_q[start:stop], rows=inputs.rows.slice(start, stop))
    config = plan.chunk_config(stop - start).score
    assert isinstance(config, ProductConfig)
    taken: list[int] = []
    make = torch.empty

    def counted(*size: Any, **options: Any) -> Tensor:
        tensor: Tensor = make(*size, **options)
        taken.append(tensor.numel() * tensor.element_size())
        return tensor

    monkeypatch.setattr(torch, "empty", counted)
    machine.scores(part, config.columns)
    copied = part.index_q.numel() * 2
    # Beside it a number for each row, that of its visible blocks.
    assert 0 <= plan.workspace_bytes + 4 * (stop - start) - sum(taken) - copied < 1 << 10
    assert plan.workspace_bytes <= 2 << 20


# Sizes.


@given(
    st.integers(1, 70_000),
    st.integers(2052, (1 << 20) - 1),
    st.sampled_from([1, 3, 4, 32, 64]),
    st.sampled_from([8, 64, 128, 256]),
    st.sampled_from([1, 2, 16, 128, 1024]),
)
def test_sizes_fit_the_workspace_and_cover_the_call(
    rows: int, max_position: int, heads: int, dim: int, mebibytes: int
) -> None:
    spec, limit = QsaSpec(index_heads=heads, index_dim=dim), mebibytes << 20
    call = Call(spec, rows, 1, max_position, BF16, BF16)
    if product_refusal(spec, BF16, BF16, 1, False, H200) is not None:
        assert heads * dim > 4 * 128
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHQSA_WORKSPACE_MIB", str(mebibytes))
        plan: SelectPlan = make_plan(call, H200, "cublas", stages=("select",)).select
    assert 1 <= plan.chunk_rows <= rows
    for config, held in ((plan.whole, plan.chunk_rows), (plan.last, rows % plan.chunk_rows or plan.chunk_rows)):
        assert config is not None
        assert isinstance(config.score, ProductConfig)
        columns = config.score.columns
        assert columns % table.PRODUCT_COLUMNS == 0
        assert 128 <= columns < plan.width_blocks + 128
        piece = columns * (2 * dim + 4 * heads * held)
        assert piece <= limit // 2
        assert plan.workspace_bytes >= piece + 4 * held * plan.width_blocks
    assert plan.workspace_bytes <= limit or plan.chunk_rows == 1
    assert plan.capability == (9, 0)


def test_a_cpu_has_no_sizes() -> None:
    with pytest.raises(ValueError, match="no score configuration is made for cpu"):
        product_config(QsaSpec(), 64, 9999, DeviceFacts.named("cpu"), 1 << 27)


# The route.


LONG = Call(QsaSpec(), 1616, 1, 183_999, BF16, BF16)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (replace(LONG, requests=2), "made for one request, got 2"),
        (replace(LONG, requests=0, rows=0), "made for one request, got 0"),
        (replace(LONG, q_dtype=FP32, cache_dtype=FP32), "made for FP16 or BF16 index queries, got torch.float32"),
        (replace(LONG, index_q_dtype=FP32, index_cache_dtype=FP8), "FP16 or BF16 index queries, got torch.float32"),
        (replace(LONG, index_q_dtype=FP16), "in the queries' dtype or FP8, got torch.float16 and torch.bfloat16"),
        (replace(LONG, batch_invariant=True), "batch_invariant: cuBLAS chooses kernels by the shape"),
        (replace(LONG, spec=QsaSpec(index_dim=100)), "index_dim must be a multiple of 8, got 100"),
        (
            replace(LONG, spec=QsaSpec(index_heads=64, index_dim=2048)),
            "keys and their products with one row take 557056",
        ),
        (replace(LONG, max_position=1 << 21), "rows of 524288 blocks: the exact top-k ranks at most 262144"),
    ],
)
def test_refusals_say_why(call: Call, reason: str) -> None:
    with pytest.raises(NoRouteError, match=re.escape(reason)):
        choose_route("select", call, H200, "smxx:cublas")


def test_volta_has_no_such_route() -> None:
    for name in ("rtx8000", "cpu"):
        with pytest.raises(NoRouteError, match="smxx:cublas: the smxx kernels have no image"):
            choose_route("select", replace(LONG, q_dtype=FP16, cache_dtype=FP16), DeviceFacts.named(name), "cublas")
        assert product_refusal(QsaSpec(), FP16, FP16, 1, False, DeviceFacts.named(name)) is not None


@pytest.mark.parametrize("facts", GPUS, ids=lambda facts: facts.name)
@pytest.mark.parametrize("kind", DTYPES)
def test_a_pin_takes_it_where_it_is_passed_over(facts: DeviceFacts, kind: str) -> None:
    q_dtype, cache_dtype = DTYPES[kind]
    call = replace(LONG, q_dtype=q_dtype, cache_dtype=cache_dtype)
    for pin in ("cublas", "smxx:cublas"):
        assert str(choose_route("select", call, facts, pin).route) == "smxx:cublas"
    free = choose_route("select", call, facts)
    assert free.route.mode in ("plain", "fused")
    refused = {str(refusal.route): refusal.reason for refusal in free.refused}
    if free.route.mode == "fused":
        assert "smxx:cublas" in map(str, free.unused)
    else:
        timed = "cuBLAS's product alone took 457 us" if facts.capability == (9, 0) else f"not timed on {facts.arch}"
        assert refused["smxx:cublas"].startswith(timed)
    assert str(make_plan(call, facts, "smxx").attend_decision.route) == "smxx:grouped"


def test_where_it_was_faster_it_comes_before_scores_page_by_page(monkeypatch: pytest.MonkeyPatch) -> None:
    def shape(rows: int, blocks: int, cublas_us: float) -> table.Shape:
        return {"rows": rows, "blocks": blocks, "cublas_us": cublas_us, "plain_us": 100.0}

    shapes = (shape(512, 8000, 120.0), shape(1024, 8000, 90.0), shape(1024, 32_000, 80.0), shape(4096, 10_000, 101.0))
    monkeypatch.setitem(table.TIMED, (8, 0), {"where": "somewhere", "what": "cuBLAS", "shapes": shapes})
    a100, other = DeviceFacts.named("a100"), DeviceFacts.named("rtx3090")

    def taken(rows: int, blocks: int, facts: DeviceFacts = a100, **how: Any) -> str:
        call = replace(LONG, rows=rows, max_position=4 * blocks - 1, **how)
        return str(choose_route("select", call, facts).route)

    assert taken(1024, 8000) == taken(2000, 60_000) == taken(1024, 8001) == "smxx:cublas"
    assert taken(1023, 8000) == taken(1024, 7999) == taken(100, 100_000) == "smxx:plain"
    # The largest shape that a call reaches decides, whatever smaller ones say.
    assert taken(4096, 9999) == taken(4095, 40_000) == "smxx:cublas"
    assert taken(4096, 10_000) == taken(9000, 60_000) == "smxx:plain"
    assert taken(1024, 8000, other) == "smxx:plain"
    assert taken(1024, 8000, requests=3) == taken(1024, 8000, batch_invariant=True) == "smxx:plain"
    assert taken(1024, 500) == "smxx:everything"
    plan = make_plan(replace(LONG, rows=1024), a100)
    assert isinstance(plan.select.whole and plan.select.whole.score, ProductConfig)
    assert "smaller than what was timed" in str(product_loses(QsaSpec(), 16, 183_999, a100))


def test_the_table_s_lines_are_whole() -> None:
    for capability, timed in table.TIMED.items():
        assert capability in {facts.capability for facts in GPUS}
        assert re.search(r"20\d\d-\d\d$", timed["where"])
        assert timed["shapes"]
        for shape in timed["shapes"]:
            assert min(shape["rows"], shape["blocks"], shape["cublas_us"], shape["plain_us"]) > 0


@pytest.mark.parametrize(("rows", "requests"), [(1616, 1), (64, 64)])
def test_the_sweep_lists_it(rows: int, requests: int) -> None:
    call = replace(LONG, rows=rows, requests=requests)
    for facts in (H200, DeviceFacts.named("a100")):
        routes = bench_measures._serving(make_plan(call, facts, stages=("select",)))
        assert ("smxx:cublas" in routes) == (requests == 1)
        assert "smxx:plain" in routes


# What is compiled.


@cache
def built(capability: tuple[int, int]) -> set[Source]:
    """What `flashqsa build` compiles: found by thousands of plans."""
    return set(build_command.sources_for(capability))


@pytest.mark.parametrize("facts", [facts for facts in GPUS if facts.name in ("A100", "H200")], ids=lambda f: f.name)
@pytest.mark.parametrize("kind", DTYPES)
def test_build_has_what_a_pin_asks_for(facts: DeviceFacts, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[Source] = set()
    monkeypatch.setattr(Kernel, "launch", lambda kernel, *_: asked.add(kernel.source))
    monkeypatch.setattr(products, "multiply", lambda *_: None)
    machine = Machine("cpu", facts)
    inputs = machine.build(Case("long", (70,), (9000,), QsaSpec(), page_tokens=64), kind)
    machine.select(inputs, machine.plan(inputs))
    assert {source.name for source in asked} == {"products.cu", "topk.cu"}
    assert asked <= built(machine.capability)


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("FLASHQSA_CACHE_DIR", str(tmp_path))
    compile_source.cache_clear()
    yield
    compile_source.cache_clear()


@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (12, 0)], ids=["sm_80", "sm_90", "sm_120"])
@pytest.mark.parametrize("aligned", [True, False])
def test_the_kernels_compile(capability: tuple[int, int], aligned: bool) -> None:
    assert products_source(False, aligned, bf16=True) == products_source(False, aligned)
    for e4m3, bf16 in ((False, False), (True, False), (True, True)):
        try:
            found = compile_source(products_source(e4m3, aligned, bf16), capability)
        except NvrtcNotFoundError as error:
            pytest.skip(str(error))
        assert found.cubin.startswith(b"\x7fELF")
        functions = sorted(re.findall(r"Compiling entry function '(\w+)'", found.log))
        assert functions == ["flashqsa_finish_scores", "flashqsa_gather_keys"]
        assert re.findall(r"(\d+) bytes spill stores", found.log) == ["0", "0"]


# On a GPU alone.


@pytest.mark.gpu
@pytest.mark.parametrize("machine", ["gpu"], indirect=True)
@pytest.mark.parametrize("kind", DTYPES)
def test_a_long_request_twice_and_through_the_top_k(kind: str, machine: Machine) -> None:
    spec = QsaSpec(top_blocks=64)
    inputs = machine.build(Case("long", (200,), (60_000,), spec, padding=(5,), exact_scores=False), kind)
    for columns in (1024, 5120, 15_104):
        got, again = machine.scores(inputs, columns), machine.scores(inputs, columns)
        assert failure(got, inputs) is None
        assert compare.same_bits(got.values, again.values)
    plan = machine.plan(inputs)
    chosen = pipeline.select_blocks(inputs.index_q, inputs.index_cache, inputs.rows, spec, route="smxx:cublas")
    picked = torch.arange(inputs.rows.count, device="cuda")
    call = (inputs.index_q, inputs.index_cache, inputs.rows, spec)
    assert own_sort_failure(chosen, *call, plan, picked) is None
    assert (
        compare.same_selection(machine.select(inputs, plan), Selection(chosen.blocks.cpu(), chosen.count.cpu())) is None
    )


@pytest.mark.gpu
@pytest.mark.parametrize("machine", ["gpu"], indirect=True)
@pytest.mark.parametrize("kind", ["bf16", "bf16-fp8"])
def test_a_graph_replays_it_for_other_rows(kind: str, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = machine.build(Case("graph", (100,), (30_000,), QsaSpec(top_blocks=64), exact_scores=False), kind)
    monkeypatch.setenv("FLASHQSA_WORKSPACE_MIB", "4")
    plan = machine.plan(inputs)
    assert len(list(plan.select.chunks(100))) > 1
    call = (inputs.index_q, inputs.index_cache, inputs.rows, inputs.spec)
    pipeline.select_blocks(*call, route="smxx:cublas")
    torch.cuda.set_sync_debug_mode("error")
    try:
        pipeline.select_blocks(*call, route="smxx:cublas")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = pipeline.select_blocks(*call, route="smxx:cublas")
    for back in (0, 1, 300):
        inputs.rows.position.sub_(back)
        if back == 300:
            inputs.rows.request[50] = -1
        graph.replay()
        wanted = pipeline.select_blocks(*call, route="smxx:cublas")
        torch.cuda.synchronize()
        assert compare.same_selection(got, wanted) is None
    assert int(got.count[50]) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("machine", ["gpu"], indirect=True)
def test_a_pool_of_more_than_2_to_the_31_elements(machine: Machine) -> None:
    inputs = machine.build(Case("far-pages", (6,), (600,), spec_of(6, 1)), "bf16")
    cache, stride = inputs.index_cache, 80_000_000
    pages, blocks, dim = cache.keys.shape
    far = torch.empty((pages - 1) * stride + blocks * dim, dtype=BF16, device="cuda")
    keys = far.as_strided((pages, blocks, dim), (stride, dim, 1))
    keys.copy_(cache.keys)
    assert (pages - 1) * stride > 1 << 31
    moved = machine.scores(replace(inputs, index_cache=replace(cache, keys=keys)))
    assert compare.same_bits(moved.values, machine.scores(inputs).values)
