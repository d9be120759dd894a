"""The score stage of sm7x: paged and through cuBLAS, Volta's products and Turing's, against the reference.

Without a GPU the kernels run on the CPU, on emulated warps (`sm7x_score_emulate.py`). On a GPU of any kind they are
compiled for it with either kind of product, and as PTX of compute_70 and compute_75, which its driver compiles.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the comparison of scores stands in a test of Triton's")

from flashqsa import reference
from flashqsa.config import (
    SM7X_SHARED_BYTES,
    Sm7xScoreConfig,
    sm7x_query_bytes,
    sm7x_resident,
    sm7x_score_bytes,
    sm7x_score_chunk_rows,
    sm7x_score_config,
    sm7x_score_refusal,
    topk_config,
)
from flashqsa.device import DeviceFacts, facts_of
from flashqsa.kernels.nvrtc import NvrtcNotFoundError, Source, compile_source, empty_selection, products
from flashqsa.kernels.nvrtc.products import products_source
from flashqsa.kernels.nvrtc.topk import topk
from flashqsa.kernels.sm7x.score import ScoreVariant, score
from flashqsa.tables.score_sm7x import TILES
from flashqsa.testing import compare
from flashqsa.testing.cases import CASES, Case, named, spec_of
from flashqsa.testing.inputs import Inputs, build, fill_unwritten, relocate, take_rows
from flashqsa.values import FP8, IndexCache, QsaSpec, Rows, Scores
from tests.sm7x_score_emulate import (
    KINDS,
    TURING,
    VOLTA,
    Machine,
    machine_named,
)
from tests.test_smxx_score import failure

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
GPUS = ("v100", "t4", "rtx2080ti", "rtx8000")
ANY = (0, 0)
"""Stands for the capability of the machine in `WINDOWS`."""

WINDOWS = (
    Sm7xScoreConfig(ANY, True, rows=1, window=1, strips=1, warps=4, resident=4, slice_blocks=64, runs=1),
    Sm7xScoreConfig(ANY, True, rows=4, window=3, strips=1, warps=4, resident=4, slice_blocks=1 << 20, runs=3),
    Sm7xScoreConfig(ANY, True, rows=8, window=5, strips=2, warps=4, resident=3, slice_blocks=96, runs=1),
    Sm7xScoreConfig(ANY, True, rows=16, window=16, strips=2, warps=4, resident=2, slice_blocks=128, runs=2),
)
"""Windows of every kind: full and not, a line of heads and a tile of one head; slices, runs."""

PRODUCTS = replace(WINDOWS[3], product_columns=128)
"""cuBLAS, piece by piece."""

NAMES = (
    "prefill",
    "prefill-k-1",
    "prefill-normal-scores",
    "prefill-normal-scores-fp8",
    "prefill-fp8-fp32-queries",
    "chunks-at-840-to-843",
    "index-pages-of-3-blocks",
    "pages-of-784",
    "decode-33",
    "verify-1-to-12",
    "requests-without-rows",
    "no-rows",
    "no-requests",
    "only-padding",
    "padding-first-middle-last",
    "contexts-of-1-to-3-and-5",
    "holes",
    "nothing-but-holes",
    "holes-below-budget",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the emulated kernels: each is compiled once."""
    return tmp_path_factory.mktemp("sm7x")


@pytest.fixture(params=KINDS)
def machine(request: pytest.FixtureRequest, folder: Path) -> Iterator[Machine]:
    """The emulator, or the GPU that is here, with Volta's products or Turing's."""
    with machine_named(str(request.param), folder) as found:
        yield found


@pytest.mark.parametrize("name", NAMES)
def test_scores_are_the_reference_s(name: str, machine: Machine) -> None:
    inputs = machine.build(named(name))
    config = WINDOWS[1 if inputs.rows.count <= 8 else 2 if inputs.index_cache.keys.dtype == FP8 else 3]
    assert failure(machine.scores(inputs, config), inputs) is None


@pytest.mark.gpu
@pytest.mark.parametrize("machine", KINDS[2:], indirect=True)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_under_every_window(case: Case, machine: Machine) -> None:
    inputs = machine.build(case)
    for config in (*WINDOWS, PRODUCTS):
        assert failure(machine.scores(inputs, config), inputs) is None, config


@pytest.mark.parametrize("config", WINDOWS, ids=lambda config: f"{config.rows}-rows")
def test_windows_of_several_requests(config: Sm7xScoreConfig, machine: Machine) -> None:
    # 40 rows of one request, then one each of three: windows straddle requests, and rows see 9 to 125 blocks.
    inputs = machine.build(replace(named("prefill-and-decode"), exact_scores=False))
    assert failure(machine.scores(inputs, config), inputs) is None


@pytest.mark.parametrize("config", [WINDOWS[0], WINDOWS[3]], ids=lambda config: f"{config.rows}-rows")
def test_segment_maxima(config: Sm7xScoreConfig, machine: Machine) -> None:
    # 3 blocks selected of up to 131: segments outnumber them, so their maxima are written.
    case = Case("maxima", (3, 2), (524, 300), spec_of(6, 1, top_blocks=3), FP16, FP16, holes=((0, 1),), padding=(0,))
    inputs = machine.build(case)
    got = machine.scores(inputs, config)
    assert got.maxima is not None
    assert failure(got, inputs) is None


def test_no_maxima_where_every_segment_is_looked_into(machine: Machine) -> None:
    assert machine.scores(machine.build(named("prefill")), WINDOWS[3]).maxima is None


LONG = (
    named("prefill-normal-scores"),
    named("prefill-normal-scores-fp8"),
    named("index-pages-of-3-blocks"),
    named("holes"),
    Case(
        "holes-of-3-blocks", (24,), (300,), spec_of(6, 1), FP16, FP16, page_tokens=12, holes=((0, 1), (0, 4), (0, 20))
    ),
    Case("maxima", (40,), (1300,), spec_of(6, 1, top_blocks=3), FP16, FP16, holes=((0, 1), (0, 30)), padding=(0, 7)),
    Case("below-and-above", (30,), (90,), spec_of(6, 1, top_blocks=16), FP16, FP8, exact_scores=False),
    Case("only-padding", (0,), (20,), spec_of(6, 1), FP16, FP16, padding=(0, 0, 0)),
)
"""Calls of one request."""


@pytest.mark.parametrize("case", LONG, ids=lambda case: case.name)
def test_products_of_one_request(case: Case, machine: Machine) -> None:
    inputs = machine.build(case)
    got = machine.scores(inputs, PRODUCTS)
    assert failure(got, inputs) is None
    wide = machine.scores(inputs, replace(PRODUCTS, product_columns=384))
    assert failure(wide, inputs) is None


def test_several_requests_without_runs_are_not_cublas_s(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = machine.build(named("pages-of-784"))
    monkeypatch.setattr(products, "multiply", None)
    assert failure(machine.scores(inputs, PRODUCTS), inputs) is None


@pytest.mark.parametrize("config", [WINDOWS[2], PRODUCTS], ids=["pages", "products"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_odd_keys_stay_where_they_are(value: float, config: Sm7xScoreConfig, machine: Machine) -> None:
    inputs = machine.build(Case("odd-key", (4,), (160,), spec_of(6, 1), FP16, FP16, order="identity"))
    inputs.index_cache.keys[3, 2, 5] = value
    got = machine.scores(inputs, config)
    assert failure(got, inputs) is None
    assert bool(got.values[:, :14].isfinite().all())


@pytest.mark.parametrize("config", [WINDOWS[2], PRODUCTS], ids=["pages", "products"])
def test_every_fp8_number(config: Sm7xScoreConfig, machine: Machine) -> None:
    # Row i asks for dimension i of two keys that hold every code but the two of NaN, with either sign.
    spec = QsaSpec(q_heads=1, kv_heads=1, head_dim=64, index_heads=4, index_dim=128, top_blocks=8)
    inputs = machine.build(Case("codes", (64,), (164,), spec, FP16, FP8, order="identity"))
    codes = torch.arange(256, dtype=torch.uint8, device=machine.device)
    codes[[0x7F, 0xFF]] = 0
    inputs.index_cache.keys[0, :2] = codes.view(2, 128).view(FP8)
    queries = torch.zeros_like(inputs.index_q)
    for row in range(64):
        queries[row, 0, row], queries[row, 1, row + 64] = 1, 1
        queries[row, 2, row], queries[row, 3, row + 64] = -1, -1
    inputs = replace(inputs, index_q=queries)
    got = machine.scores(inputs, config)
    wanted = reference.score(inputs.index_q.cpu(), *to_cpu(inputs), spec, precision=FP32)
    assert torch.equal(got.values[:, :2].cpu(), wanted.values[:, :2])
    assert bool((got.values[:, :2] > 0).any())
    codes[5] = 0x7F
    inputs.index_cache.keys[0, :1] = codes.view(2, 128)[:1].view(FP8)
    got = machine.scores(inputs, config)
    assert bool(got.values[:, 0].isnan().all())
    assert torch.equal(got.values[:, 1].cpu(), wanted.values[:, 1])


def to_cpu(inputs: Inputs) -> tuple[IndexCache, Rows]:
    """Index cache and rows on the CPU."""
    cache, rows = inputs.index_cache, inputs.rows
    moved = replace(cache, keys=cache.keys.cpu(), page_table=cache.page_table.cpu())
    return moved, Rows(rows.request.cpu(), rows.position.cpu(), rows.max_position)


@pytest.mark.parametrize(("heads", "dim", "rows", "strips"), [(3, 48, 8, 2), (1, 16, 16, 2), (32, 64, 4, 1)])
def test_other_heads_and_dimensions(heads: int, dim: int, rows: int, strips: int, machine: Machine) -> None:
    spec = QsaSpec(q_heads=6, kv_heads=1, head_dim=64, index_heads=heads, index_dim=dim, top_blocks=8)
    inputs = machine.build(Case("heads", (9,), (200,), spec, FP16, FP16, exact_scores=False))
    inputs.index_cache.keys[inputs.index_cache.page_table[0, 1], 0, 7] = float("inf")
    assert sm7x_query_bytes(spec, rows) <= SM7X_SHARED_BYTES
    config = replace(WINDOWS[3], rows=rows, window=rows, strips=strips, resident=sm7x_resident(spec, rows, strips))
    assert failure(machine.scores(inputs, config), inputs) is None
    assert failure(machine.scores(inputs, PRODUCTS), inputs) is None


@pytest.mark.parametrize("config", [WINDOWS[1], PRODUCTS], ids=["pages", "products"])
@pytest.mark.parametrize(("more", "dtype"), [(16, FP16), (3, FP16), (5, FP8)])
def test_views_of_wider_memory(more: int, dtype: torch.dtype, config: Sm7xScoreConfig, machine: Machine) -> None:
    inputs = machine.build(replace(named("pages-in-order"), cache_dtype=dtype))
    cache = inputs.index_cache
    pages, blocks, dim = cache.keys.shape
    pool = torch.full((pages, blocks + 1, dim + more), float("nan"), device=machine.device).to(dtype)
    pool[:, :blocks, :dim] = cache.keys
    queries = torch.full((inputs.rows.count, 5, dim + more), float("nan"), dtype=FP16, device=machine.device)
    queries[:, :4, :dim] = inputs.index_q
    viewed = replace(inputs, index_q=queries[:, :4, :dim], index_cache=replace(cache, keys=pool[:, :blocks, :dim]))
    assert products.is_aligned(viewed.index_q, viewed.index_cache.keys) == (more == 16)
    assert failure(machine.scores(viewed, config), viewed) is None


@pytest.mark.parametrize("config", [WINDOWS[2], PRODUCTS], ids=["pages", "products"])
def test_same_bits_wherever_pages_lie_and_whatever_they_hold_besides(config: Sm7xScoreConfig, machine: Machine) -> None:
    inputs = machine.build(replace(named("prefill-normal-scores"), query_lengths=(20,)))
    first = visible_bits(machine, inputs, config)
    others = (inputs, relocate(inputs, "reversed"), relocate(inputs, "random"), fill_unwritten(inputs, "fp32-bytes"))
    for other in others:
        assert compare.same_bits(visible_bits(machine, other, config), first)


def visible_bits(machine: Machine, inputs: Inputs, config: Sm7xScoreConfig) -> torch.Tensor:
    """All visible scores of a call, in one row."""
    got = machine.scores(inputs, config)
    seen = torch.arange(got.values.shape[1], device=got.values.device) < got.visible[:, None]
    return got.values[seen]


def test_a_row_has_the_same_bits_alone_in_the_same_tile(machine: Machine) -> None:
    inputs = machine.build(replace(named("requests-of-3-8-13"), exact_scores=False))
    whole = machine.scores(inputs, WINDOWS[3])
    for row in range(0, inputs.rows.count, 7):
        alone = machine.scores(take_rows(inputs, row, row + 1), replace(WINDOWS[3], slice_blocks=32, runs=1))
        seen = int(alone.visible[0])
        assert compare.same_bits(alone.values[0, :seen], whole.values[row, :seen])


@pytest.mark.parametrize("config", [WINDOWS[3], PRODUCTS], ids=["pages", "products"])
def test_numbers_no_call_may_have_write_nothing_elsewhere(config: Sm7xScoreConfig, machine: Machine) -> None:
    # A position past the bound, a request and pages that are not there: neighbouring rows and NaN around stay.
    inputs = machine.build(Case("wrong", (20,), (200,), spec_of(6, 1, top_blocks=8), FP16, FP16, order="identity"))
    rows, table = inputs.rows, inputs.index_cache.page_table.clone()
    request, position = rows.request.clone(), rows.position.clone()
    position[3], request[5], request[6] = 10_000_000, 7, -5
    table[0, 2], table[0, 4] = inputs.index_cache.keys.shape[0], -9
    wrong = replace(
        inputs,
        rows=Rows(request, position, rows.max_position),
        index_cache=replace(inputs.index_cache, page_table=table),
    )
    got = machine.scores(wrong, config)
    assert got.visible.tolist()[3:7] == [50, 46, 0, 0]
    holes = torch.isneginf(got.values[3, :50]).nonzero().flatten().tolist()
    assert holes == [*range(8, 12), *range(16, 20)]
    assert bool(got.values[5:7].isnan().all())
    right = machine.scores(replace(inputs, index_cache=wrong.index_cache), config)
    for row in (0, 1, 2, 4, *range(7, 20)):
        assert compare.same_bits(got.values[row], right.values[row])


def test_other_dtypes_are_no_call() -> None:
    inputs = build(named("prefill-bf16"))
    with pytest.raises(TypeError, match=r"wanted FP16 queries .* got torch\.bfloat16 and torch\.bfloat16"):
        score(inputs.index_q, inputs.index_cache, inputs.rows, inputs.spec, WINDOWS[0])


@pytest.mark.gpu
@pytest.mark.parametrize("machine", KINDS[2:], indirect=True)
@pytest.mark.parametrize("dtype", [FP16, FP8], ids=["fp16", "fp8"])
def test_long_requests_the_same_twice_and_through_the_top_k(machine: Machine, dtype: torch.dtype) -> None:
    spec = QsaSpec(top_blocks=64)
    inputs = machine.build(Case("long", (260,), (20_000,), spec, FP16, dtype, exact_scores=False))
    facts = DeviceFacts.named("rtx8000")
    planned = sm7x_score_config(spec, 260, 1, inputs.rows.max_position, facts, 1 << 27)
    assert planned.product_columns > 0
    paged = replace(planned, product_columns=0)
    for config in (paged, replace(paged, product_columns=1024), replace(paged, product_columns=5120)):
        got = machine.scores(inputs, config)
        assert failure(got, inputs) is None
        again = machine.scores(inputs, config)
        assert compare.same_bits(got.values, again.values)
        assert got.maxima is not None
        assert again.maxima is not None
        assert compare.same_bits(got.maxima, again.maxima)
        chosen = empty_selection(inputs.rows, spec)
        device_facts = facts_of(torch.device("cuda", 0))
        topk(got, chosen, topk_config(spec, 260, device_facts))
        on_cpu = type(chosen)(chosen.blocks.cpu(), chosen.count.cpu())
        wanted = reference.topk(Scores(got.values.cpu(), got.visible.cpu()), spec.top_blocks)
        assert compare.same_selection(on_cpu, wanted) is None


@pytest.mark.gpu
@pytest.mark.parametrize("machine", KINDS[2:4], indirect=True)
def test_a_graph_replays_either_scorer(machine: Machine) -> None:
    inputs = machine.build(Case("graph", (100,), (5000,), QsaSpec(top_blocks=64), FP16, FP16, exact_scores=False))
    for config in (WINDOWS[3], replace(PRODUCTS, product_columns=512)):
        config = replace(config, capability=machine.capability, quad_pairs=machine.quad_pairs)
        arguments = (inputs.index_q, inputs.index_cache, inputs.rows, inputs.spec, config)
        wanted = score(*arguments)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = score(*arguments)
        graph.replay()
        torch.cuda.synchronize()
        seen = torch.arange(got.values.shape[1], device="cuda") < got.visible[:, None]
        assert compare.same_bits(got.values[seen], wanted.values[seen])


@pytest.mark.gpu
@pytest.mark.parametrize("machine", KINDS[2:4], indirect=True)
@pytest.mark.parametrize("config", [WINDOWS[2], PRODUCTS], ids=["pages", "products"])
def test_a_pool_of_more_than_2_to_the_31_elements(config: Sm7xScoreConfig, machine: Machine) -> None:
    inputs = machine.build(Case("far-pages", (6,), (600,), spec_of(6, 1), FP16, FP16))
    cache, stride = inputs.index_cache, 80_000_000
    pages, blocks, dim = cache.keys.shape
    far = torch.empty((pages - 1) * stride + blocks * dim, dtype=FP16, device="cuda")
    keys = far.as_strided((pages, blocks, dim), (stride, dim, 1))
    keys.copy_(cache.keys)
    assert (pages - 1) * stride > 1 << 31
    moved = machine.scores(replace(inputs, index_cache=replace(cache, keys=keys)), config)
    assert compare.same_bits(moved.values, machine.scores(inputs, config).values)


# What is legal and what is preferred.


@pytest.mark.parametrize(
    ("spec", "q_dtype", "cache_dtype", "gpu", "reason"),
    [
        (QsaSpec(), FP16, FP16, "t4", None),
        (QsaSpec(), FP16, FP8, "v100", None),
        (QsaSpec(index_heads=32, index_dim=256), FP16, FP16, "t4", None),
        (QsaSpec(), BF16, BF16, "v100", "BF16 index queries: sm_70 has no tensor cores for BF16"),
        (QsaSpec(), BF16, FP8, "t4", "BF16 index queries: sm_75"),
        (QsaSpec(), FP16, BF16, "t4", "BF16 an index cache: sm_75"),
        (QsaSpec(), FP32, FP32, "v100", "FP32 index queries: sm_70"),
        (QsaSpec(index_dim=24), FP16, FP16, "v100", "index_dim must be a multiple of 16 up to 256, got 24"),
        (QsaSpec(index_dim=272), FP16, FP16, "v100", "got 272"),
        (QsaSpec(index_heads=200), FP16, FP16, "v100", "200 index heads of 128 need 66560 bytes of shared memory"),
        (QsaSpec(), FP16, FP16, "a100", "made for sm_70 to sm_75, got sm_80"),
        (QsaSpec(), FP16, FP16, "cpu", "got cpu"),
    ],
)
def test_refusals_say_why(
    spec: QsaSpec, q_dtype: torch.dtype, cache_dtype: torch.dtype, gpu: str, reason: str | None
) -> None:
    found = sm7x_score_refusal(spec, q_dtype, cache_dtype, DeviceFacts.named(gpu))
    assert found is None if reason is None else found is not None and reason in found


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("invariant", [False, True])
def test_configurations_are_legal_and_cover_every_block(gpu: str, invariant: bool) -> None:
    facts, limit = DeviceFacts.named(gpu), 128 << 20
    for spec in (QsaSpec(), QsaSpec(index_heads=32), QsaSpec(index_heads=32, index_dim=256), QsaSpec(index_heads=1)):
        for rows, requests in ((0, 0), (1, 1), (1, 3), (64, 64), (320, 64), (1616, 1), (1616, 3), (8192, 1), (40, 7)):
            for position in (-1, 0, 3000, 183_999, (1 << 20) - 1):
                chunk = sm7x_score_chunk_rows(spec, rows, position, limit, invariant)
                config = sm7x_score_config(spec, chunk, requests, position, facts, limit, invariant)
                width = max(spec.visible_blocks(position), 1)
                assert 1 <= config.window <= config.rows
                assert config.rows in (1, 2, 4, 8, 16)
                assert sm7x_query_bytes(spec, config.rows) <= SM7X_SHARED_BYTES
                assert config.slice_blocks % config.strip_blocks == 0
                assert config.slice_blocks * -(-width // config.slice_blocks) >= width
                assert config.product_columns % 128 == 0
                assert config.quad_pairs == (gpu == "v100")
                needed = sm7x_score_bytes(spec, config, chunk, position)
                assert chunk == 1 or needed <= limit or config.product_columns == 128
                if invariant:
                    assert config.product_columns == 0
                    assert config.rows == sm7x_score_config(spec, 1, 1, 9, facts, limit, True).rows


def test_long_requests_take_cublas_and_short_ones_do_not() -> None:
    facts, limit = DeviceFacts.named("rtx8000"), 128 << 20

    def columns(rows: int, requests: int, tokens: int) -> int:
        return sm7x_score_config(QsaSpec(), rows, requests, tokens - 1, facts, limit).product_columns

    for requests in (1, 3):
        assert columns(1616, requests, 29_000) > 0
        assert columns(320, requests, 184_000) > 0
        assert columns(16, requests, 184_000) == 0
        assert columns(64, requests, 29_000) == 0


# From here on a real NVRTC compiles; without one for the architecture the test is skipped.


def compiled(source: Source, capability: tuple[int, int]) -> tuple[bytes, str]:
    try:
        found = compile_source(source, capability)
    except NvrtcNotFoundError as error:
        pytest.skip(str(error))
    return found.cubin, found.log


def variant_of(spec: QsaSpec, rows: int, strips: int, e4m3: bool, capability: tuple[int, int]) -> ScoreVariant:
    resident = sm7x_resident(spec, rows, strips)
    volta = capability < TURING
    return ScoreVariant(rows, spec.index_heads, spec.index_dim, strips, 4, resident, e4m3, True, volta)


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("FLASHQSA_CACHE_DIR", str(tmp_path))
    compile_source.cache_clear()
    yield
    compile_source.cache_clear()


@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize("capability", [VOLTA, TURING], ids=["sm_70", "sm_75"])
@pytest.mark.parametrize("e4m3", [False, True], ids=["fp16", "fp8"])
def test_no_variant_spills(capability: tuple[int, int], e4m3: bool) -> None:
    for spec in (QsaSpec(), QsaSpec(index_heads=16, index_dim=64), QsaSpec(index_heads=3, index_dim=256)):
        for tile in TILES:
            variant = variant_of(spec, tile["rows"], tile["strips"], e4m3, capability)
            if variant.shared_bytes > SM7X_SHARED_BYTES:
                continue
            _, log = compiled(variant.source, capability)
            assert re.findall(r"(\d+) bytes spill stores", log) == ["0"], (variant, log)
            (registers,) = re.findall(r"Used (\d+) registers", log)
            assert int(registers) * 128 * variant.resident <= 65536
    for aligned in (False, True):
        _, log = compiled(products_source(e4m3, aligned), capability)
        assert re.findall(r"(\d+) bytes spill stores", log) == ["0", "0"]
