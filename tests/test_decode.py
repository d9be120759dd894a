"""The one-launch selection of few rows on Hopper: emulated, compiled for sm_90, and on the GPU that is here."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flashqsa import IndexCache, QsaSpec, Rows, reference, select_blocks
from flashqsa.device import DeviceFacts, facts_of
from flashqsa.kernels.nvrtc import Kernel, NvrtcNotFoundError, Source, compile_source, driver
from flashqsa.kernels.nvrtc.library import nvrtc_for
from flashqsa.kernels.sm90.decode import FOLDER, decode_kernel, select_decode
from flashqsa.select_shape import DECODE_TILE, DecodeShape, decode_refusal, decode_shape
from flashqsa.testing import compare
from flashqsa.testing.nasty import NASTY_SCORES, NastyScores
from flashqsa.values import Scores, Selection
from tests.both_devices import poisoned_memory
from tests.cluster_emulate import CLUSTER_OUTCOMES, build_emulator, emulated_clusters
from tests.nvrtc_emulate import CXX

HOPPER, H200 = (9, 0), DeviceFacts.named("h200")
BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture(scope="module", params=["emulated", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[torch.device]:
    """Where the kernel runs. The emulated one is slow: some 5,000 blocks a second."""
    if request.param == "gpu":
        found = torch.device("cuda", 0)
        if facts_of(found).capability != HOPPER:
            pytest.skip("the kernel is made for sm_90")
        yield found
        return
    if CXX is None:
        pytest.skip("no g++ here to compile the kernels for the CPU")
    with emulated_clusters(tmp_path_factory.mktemp("decode")):
        yield torch.device("cpu")


@dataclass(frozen=True)
class Call:
    """The arguments of a selection, on the CPU."""

    index_q: Tensor
    cache: IndexCache
    rows: Rows
    spec: QsaSpec

    def shape(self, cluster: int, stages: int = 2, threads: int = 256) -> DecodeShape:
        width = max(self.spec.visible_blocks(self.rows.max_position), 1)
        return DecodeShape(cluster, threads, stages, 1, -(-width // (cluster * DECODE_TILE)) * DECODE_TILE)

    def select(self, device: torch.device, shape: DecodeShape) -> Selection:
        """The kernel's selection, written over poison, on the CPU."""
        q, keys, table = self.index_q, self.cache.keys, self.cache.page_table
        cache = IndexCache(keys.to(device), table.to(device))
        rows = Rows(self.rows.request.to(device), self.rows.position.to(device), self.rows.max_position)
        with poisoned_memory():
            got = select_decode(q.to(device), cache, rows, self.spec, shape)
        return Selection(got.blocks.cpu(), got.count.cpu())

    def wanted(self) -> Selection:
        """What the reference selects from the same numbers in FP32."""
        cache = IndexCache(self.cache.keys.float(), self.cache.page_table)
        scores = reference.score(self.index_q.float(), cache, self.rows, self.spec)
        everything = (scores.visible <= self.spec.top_blocks)[:, None] & (scores.values > float("-inf"))
        return reference.topk(Scores(torch.where(everything, 0.0, scores.values), scores.visible), self.spec.top_blocks)


def whole_numbers(*shape: int, seed: int = 0) -> Tensor:
    """-3 to 3: products and sums of them are exact, and ties many."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


def call_of(
    contexts: list[int],
    queries: list[int] | None = None,
    spec: QsaSpec | None = None,
    dtype: torch.dtype = BF16,
    page_blocks: int = 4,
    holes: int = 0,
    pad_to: int | None = None,
) -> Call:
    """Requests of whole numbers, their pages in drawn order, some of them holes. Pages that none has hold NaN."""
    spec = spec or QsaSpec(top_blocks=64)
    rows = Rows.from_lengths(queries or [1] * len(contexts), contexts, pad_to=pad_to)
    width = max(max(contexts) // spec.block_tokens, 1)
    pages, drawn = -(-width // page_blocks), torch.Generator().manual_seed(len(contexts))
    table = torch.randperm(pages * len(contexts), generator=drawn).to(torch.int32).view(len(contexts), pages) + 1
    keys = torch.full((pages * len(contexts) + 1, page_blocks, spec.index_dim), float("nan"))
    keys[1:] = whole_numbers(*keys[1:].shape, seed=1)
    for request in range(len(contexts)):
        table[request, torch.randperm(pages, generator=drawn)[:holes]] = -1
    index_q = whole_numbers(rows.count, spec.index_heads, spec.index_dim)
    return Call(index_q.to(dtype), IndexCache(keys.to(dtype), table), rows, spec)


@pytest.mark.parametrize(("cluster", "threads", "stages"), [(1, 256, 4), (2, 512, 2), (4, 256, 3), (8, 256, 2)])
def test_each_size_of_cluster_selects_what_a_sort_does(
    device: torch.device, cluster: int, threads: int, stages: int
) -> None:
    # The last rows see the fewest blocks that are ranked, as many as they may select, some, and one.
    call = call_of([9001, 2700, 66 * 4, 64 * 4 + 3, 100, 4], holes=5)
    shape = call.shape(cluster, stages, threads)
    assert compare.same_selection(call.select(device, shape), call.wanted()) is None


def test_the_largest_cluster_has_more_programs_than_a_program_has_warps(device: torch.device) -> None:
    call = call_of([5000])
    assert compare.same_selection(call.select(device, call.shape(16)), call.wanted()) is None


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("dim", [64, 128])
def test_each_kind_of_index(device: torch.device, dtype: torch.dtype, heads: int, dim: int) -> None:
    spec = QsaSpec(index_heads=heads, index_dim=dim, top_blocks=100)
    call = call_of([3999, 1234], spec=spec, dtype=dtype, page_blocks=28)
    assert compare.same_selection(call.select(device, call.shape(2)), call.wanted()) is None


def test_rows_of_one_request_and_padding(device: torch.device) -> None:
    call = call_of([1200, 50, 900, 2000], queries=[3, 0, 2, 1], pad_to=8)
    call.rows.position[1] = call.rows.request[3] = -1
    wanted = call.wanted()
    assert wanted.count.tolist() == [64, 0, 64, 0, 64, 64, 0, 0]
    call.rows.request[3] = 4  # past the last request, which no call may have
    assert compare.same_selection(call.select(device, call.shape(2)), wanted) is None


def test_no_rows(device: torch.device) -> None:
    call = call_of([1200], queries=[0])
    assert call.select(device, call.shape(2)).blocks.shape == (0, 64)


def test_tensors_with_gaps(device: torch.device) -> None:
    call = call_of([3000, 1700], page_blocks=12)
    q = torch.full((2, 6, 160), float("nan"), dtype=BF16)
    q[:, 1:5, 16:144] = call.index_q
    pages, places, dim = call.cache.keys.shape
    pool = torch.full((pages, 3, places, dim + 8), float("nan"), dtype=BF16)
    pool[:, 1, :, :dim] = call.cache.keys
    table = torch.full((2, call.cache.page_table.shape[1] + 5), 1 << 30, dtype=torch.int32)
    table[:, :-5] = call.cache.page_table
    cache = IndexCache(pool.to(device)[:, 1, :, :dim], table.to(device)[:, :-5])
    rows = Rows(call.rows.request.to(device), call.rows.position.to(device), call.rows.max_position)
    got = select_decode(q.to(device)[:, 1:5, 16:144], cache, rows, call.spec, call.shape(2))
    assert compare.same_selection(Selection(got.blocks.cpu(), got.count.cpu()), call.wanted()) is None


def test_blocks_on_holes_are_left_out_where_nothing_scores_more(device: torch.device) -> None:
    call = call_of([3000], holes=120)
    call.cache.keys[1:] = 0.0
    assert compare.same_selection(call.select(device, call.shape(4)), call.wanted()) is None
    # One block fewer than may be selected is left.
    few = call_of([1200], spec=QsaSpec(top_blocks=256), holes=11)
    wanted = few.wanted()
    assert wanted.count.tolist() == [256]
    assert compare.same_selection(few.select(device, few.shape(4)), wanted) is None
    fewer = call_of([1200], spec=QsaSpec(top_blocks=257), holes=11)
    assert fewer.wanted().count.tolist() == [256]
    assert compare.same_selection(fewer.select(device, fewer.shape(4)), fewer.wanted()) is None


@pytest.mark.parametrize(
    ("products", "wins"),
    [((1 << 24, 1, 0, 1), True), ((1 << 24, 0, 1, 1), False), ((1, 1 << 24, 1, 0), True), ((1, 1 << 24, 0, 1), False)],
)
def test_heads_are_summed_in_the_scorer_s_order(device: torch.device, products: tuple[int, ...], wins: bool) -> None:
    """(0 + 2) + (1 + 3): two ones make themselves felt beside 2^24 where they are summed first."""
    spec = QsaSpec(top_blocks=1)
    call = call_of([400], spec=spec)
    call.index_q.copy_(torch.eye(4, 128)[None])
    call.cache.keys.zero_()
    call.cache.page_table.copy_(torch.arange(25)[None])
    call.cache.keys[2, 1, :4] = torch.tensor(products, dtype=BF16)
    call.cache.keys[1, 3, products.index(1 << 24)] = 1 << 24
    assert call.select(device, call.shape(2)).blocks.tolist() == [[9 if wins else 7]]


def test_pages_out_of_bounds_count_as_holes(device: torch.device) -> None:
    call = call_of([3000])
    table = call.cache.page_table
    table[0, :40:2] = -1
    wanted = call.wanted()
    table[0, :40:4], table[0, 2:40:4] = call.cache.keys.shape[0], -7
    assert compare.same_selection(call.select(device, call.shape(4)), wanted) is None
    # A table of fewer pages than the row sees: what it does not list is a hole.
    short = IndexCache(call.cache.keys, table[:, :100].clone())
    listed = Call(
        call.index_q, short, Rows(call.rows.request, torch.tensor([1599], dtype=torch.int32), 1599), call.spec
    )
    got = Call(call.index_q, short, call.rows, call.spec).select(device, call.shape(4))
    assert compare.same_selection(got, listed.select(device, listed.shape(4))) is None


NASTY = [
    pytest.param(nasty_scores, top_blocks, id=f"{nasty_scores}-k{top_blocks}")
    for nasty_scores in NASTY_SCORES
    for top_blocks in nasty_scores.top_blocks[:2]
]

SHORT = {
    *("one-bin-3709", "crowded-bin-3709-of-8192", "fp16-twins", "exact-bin-total", "near-ties", "plateau-513"),
    *("plateau-of-zeros", "quantised-ties-512", "ties-at-zero-546", "beyond-fp16", "below-fp16", "one-nan"),
    *("positive-infinities", "signed-zeros", "subnormals", "short-rows", "staggered-windows"),
}
"""Those that the emulator is given."""


def call_of_scores(scores: Scores, top_blocks: int) -> tuple[Call, Selection]:
    """A call whose scores are as near to the given ones as relu and three BF16 numbers each allow; what it selects.

    A key holds a score's three parts, of 8 bits each; a query picks them, in each of four heads.
    """
    values = torch.where(scores.values > 0, scores.values, torch.where(scores.values.isnan(), scores.values, 0.0))
    parts, rest = [], values.clone()
    for _ in range(3):
        part = torch.where(rest.isfinite(), (rest.view(torch.int32) & -65536).view(torch.float32), rest)
        parts.append(part)
        rest = torch.where(rest.isfinite(), rest - part, 0.0)
    rows, width = values.shape
    spec = QsaSpec(index_heads=4, index_dim=64, top_blocks=top_blocks)
    pages = -(-width // 4)
    keys = torch.zeros(rows, pages * 4, 64)
    keys[:, :width, 5], keys[:, :width, 20], keys[:, :width, 63] = parts
    index_q = torch.zeros(rows, 4, 64)
    index_q[:, :, [5, 20, 63]] = 2.0
    table = torch.arange(rows * pages, dtype=torch.int32).view(rows, pages).flip(1)
    pool = keys.view(rows, pages, 4, 64).flip(1).reshape(-1, 4, 64)
    position = scores.visible * spec.block_tokens - 1
    live = Rows(torch.arange(rows, dtype=torch.int32), position.to(torch.int32), int(position.max()))
    head = 2 * (parts[0].double() + parts[1].double() + parts[2].double()).float()
    wanted = ((head + head) + (head + head)) * spec.score_scale
    wanted = torch.where((scores.visible <= top_blocks)[:, None], 0.0, wanted)
    call = Call(index_q.to(BF16), IndexCache(pool.to(BF16), table), live, spec)
    return call, reference.topk(Scores(wanted, scores.visible), top_blocks)


@pytest.mark.parametrize(("nasty_scores", "top_blocks"), NASTY)
def test_nasty_scores(device: torch.device, nasty_scores: NastyScores, top_blocks: int) -> None:
    if device.type == "cpu" and nasty_scores.name not in SHORT:
        pytest.skip("too many blocks for the emulator")
    scores = nasty_scores.build()
    few = 2 if device.type == "cpu" and nasty_scores.name != "short-rows" else 16
    call, wanted = call_of_scores(Scores(scores.values[:few], scores.visible[:few]), top_blocks)
    for cluster in (4,) if device.type == "cpu" else (1, 8, 16):
        shape = call.shape(cluster)
        if shape.shared_bytes(call.spec) <= H200.shared_memory_bytes:
            assert compare.same_selection(call.select(device, shape), wanted) is None


@pytest.mark.parametrize("offset", [0, 40, 3000])
def test_a_few_best_far_above_the_rest(device: torch.device, offset: int) -> None:
    """The first histogram covers the best alone: the cut lies below, in a second one, or a third."""
    made = torch.Generator().manual_seed(offset)
    values = torch.rand(2, 2500, generator=made) * 1e-3 + torch.randint(0, 3, (2, 2500), generator=made) * 1e-9
    values[:, offset : offset + 30] = 1e6
    scores = Scores(values, torch.tensor([2500, 2031], dtype=torch.int32))
    call, wanted = call_of_scores(scores, 512)
    assert compare.same_selection(call.select(device, call.shape(4)), wanted) is None


@pytest.mark.parametrize("equal", [1, 300, 700])
def test_the_cut_lies_in_a_crowd_within_a_crowd(device: torch.device, equal: int) -> None:
    """Each histogram leaves too many at the cut to rank, until bins are single keys, of which `equal` are the same."""
    made = torch.Generator().manual_seed(equal)
    crowd, inner = torch.randint(0, 1 << 13, (1200,), generator=made), torch.randint(4000, 4004, (700,), generator=made)
    inner[:equal] = 4002
    bits = torch.cat([crowd, inner])[torch.randperm(1900, generator=made)] + (1 << 29)
    values = bits.to(torch.int32).view(torch.float32).repeat(2, 1)
    values[0, 500], values[1] = 4 * values[0, 0], values[0].flip(0)
    scores = Scores(values, torch.tensor([1900, 1871], dtype=torch.int32))
    call, wanted = call_of_scores(scores, 900)
    assert compare.same_selection(call.select(device, call.shape(8)), wanted) is None


# Shapes, and what may not be served.


@pytest.mark.parametrize("context", [4, 2048, 32_768, 131_072, 1_048_576])
@pytest.mark.parametrize("rows", [1, 4, 9, 16, 64, 300])
@pytest.mark.parametrize("spec", [QsaSpec(), QsaSpec(index_heads=2, index_dim=64)], ids=["4x128", "2x64"])
def test_a_shape_fits_and_holds_the_longest_row(context: int, rows: int, spec: QsaSpec) -> None:
    shape = decode_shape(spec, rows, context - 1, H200)
    assert shape.shared_bytes(spec) <= H200.shared_memory_bytes
    assert shape.cluster * shape.share_blocks >= context // 4
    assert shape.share_blocks % DECODE_TILE == 0
    if rows <= 16 and context < 1_048_576:
        assert rows * shape.cluster <= 128, "rows wait for one another"


def test_what_is_refused() -> None:
    def why(spec: QsaSpec, q: torch.dtype = BF16, cache: torch.dtype = BF16, aligned: bool = True) -> str | None:
        return decode_refusal(spec, q, cache, aligned, 131_071, H200)

    assert why(QsaSpec()) is None
    assert "2 or 4 index heads" in str(why(QsaSpec(index_heads=1)))
    assert "of 64 or 128" in str(why(QsaSpec(index_dim=256)))
    assert "one dtype" in str(why(QsaSpec(), FP16))
    assert "multiples of 16" in str(why(QsaSpec(), aligned=False))
    assert "sm_90" in str(decode_refusal(QsaSpec(), BF16, BF16, True, 131_071, DeviceFacts.named("a100")))


# What a GPU would be handed.


@pytest.mark.parametrize(
    ("spec", "rows", "context", "bf16"),
    [
        (QsaSpec(), 1, 131_072, True),
        (QsaSpec(), 16, 131_072, True),
        (QsaSpec(), 16, 1_048_576, False),
        (QsaSpec(), 128, 131_072, True),
        (QsaSpec(index_heads=2, index_dim=64), 64, 32_768, True),
    ],
)
def test_the_kernel_compiles_without_spills(
    spec: QsaSpec, rows: int, context: int, bf16: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        nvrtc_for(HOPPER)
    except NvrtcNotFoundError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("FLASHQSA_CACHE_DIR", str(tmp_path))
    compile_source.cache_clear()
    shape = decode_shape(spec, rows, context - 1, H200)
    log = compile_source(decode_kernel(spec, shape, bf16).source, HOPPER).log
    compile_source.cache_clear()
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in log
    registers = re.search(r"Used (\d+) registers", log)
    assert registers is not None
    assert int(registers[1]) * shape.threads * shape.resident <= 65536
    assert "smem" not in log, "all shared memory is what the launch asks for"
    assert "warning" not in log


def test_a_launch_of_clusters_is_laid_out_as_the_driver_has_it() -> None:
    """Offsets and sizes of CUlaunchConfig and CUlaunchAttribute in cuda.h of CUDA 12 and 13, on 64-bit Linux."""
    assert (ctypes.sizeof(driver._Config), ctypes.sizeof(driver._Attribute)) == (56, 72)
    fields = ("grid_x", "block_x", "shared_bytes", "stream", "attributes", "attribute_count")
    assert [getattr(driver._Config, field).offset for field in fields] == [0, 12, 24, 32, 40, 48]
    assert driver._Attribute.dims.offset == 8
    kernel = Kernel(Source("decode.cu"), "f", "P", HOPPER, threads=256, shared_bytes=1000, cluster=8)
    config = driver._cluster_launch(kernel, 64, 0x1234)
    assert (config.grid_x, config.block_x, config.shared_bytes, config.stream) == (64, 256, 1000, 0x1234)
    assert (config.attribute_count, config.attributes[0].id, list(config.attributes[0].dims)) == (1, 4, [8, 1, 1])


BROKEN = {
    "cluster_arrive(); if (rank_in_cluster() == 0) { cluster_arrive(); } cluster_wait();": 4,
    "if (rank_in_cluster() == 0) { cluster_arrive(); cluster_wait(); }": 4,
    "store_at((u32*)dynamic, 1 - rank_in_cluster(), 1u); cluster_arrive(); cluster_wait();": 5,
    "cluster_arrive(); cluster_wait(); if (rank_in_cluster() == 0) { __syncthreads(); __syncthreads();"
    " *a.to = load_at((u32*)dynamic, 1); }": 6,
    "cluster_arrive(); cluster_wait(); load_at((u32*)dynamic, 2);": 7,
    "((u32*)dynamic)[threadIdx.x] = 1;": 3,
}


@pytest.mark.skipif(CXX is None, reason="no g++ here to compile the kernels for the CPU")
@pytest.mark.parametrize(("body", "outcome"), BROKEN.items(), ids=range(len(BROKEN)))
def test_the_emulator_catches_what_a_gpu_would_not_forgive(body: str, outcome: int, tmp_path: Path) -> None:
    text = (
        '#include "cluster.cuh"\nstruct Arguments { u32* to; };\n'
        'extern "C" __global__ void __launch_bounds__(64) broken(const __grid_constant__ Arguments a) {\n'
        f"    extern __shared__ __align__(128) char dynamic[];\n    {body}\n}}\n"
    )
    source = Source("broken.cu", text=text, folder=FOLDER)
    library = build_emulator(source, "broken", tmp_path)
    to = ctypes.c_uint()
    packed = ctypes.addressof(to).to_bytes(8, "little")
    assert CLUSTER_OUTCOMES[library.emulate(2, 2, 64, 64, packed, ctypes.c_longlong(8))] == CLUSTER_OUTCOMES[outcome]


# On an H200: against the two launches that it replaces, which score with the same products.


@pytest.fixture
def hopper() -> torch.device:
    found = torch.device("cuda", 0)
    if facts_of(found).capability != HOPPER:
        pytest.skip("the kernel is made for sm_90")
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize(
    ("heads", "dim", "requests", "context"),
    [(4, 128, 1, 32_768), (4, 128, 16, 131_072), (4, 128, 3, 1_048_576), (4, 64, 8, 50_001), (2, 128, 8, 50_001)],
)
def test_drawn_numbers_select_what_the_plain_route_does(
    hopper: torch.device, dtype: torch.dtype, heads: int, dim: int, requests: int, context: int
) -> None:
    spec = QsaSpec(index_heads=heads, index_dim=dim)
    rows = Rows.from_lengths([1] * requests, [context - 1000 * i for i in range(requests)], device=hopper)
    pages = -(-context // 16)
    table = torch.randperm(pages * requests, device=hopper).to(torch.int32).view(requests, pages)
    cache = IndexCache(torch.randn(pages * requests, 4, dim, device=hopper).to(dtype), table)
    index_q = torch.randn(requests, heads, dim, device=hopper).to(dtype)
    facts = facts_of(hopper)
    wanted = select_blocks(index_q, cache, rows, spec, route="smxx:plain")
    shape = decode_shape(spec, requests, rows.max_position, facts)
    assert decode_refusal(spec, dtype, dtype, True, rows.max_position, facts) is None
    for _ in range(2):
        assert compare.same_selection(select_decode(index_q, cache, rows, spec, shape), wanted) is None


@pytest.mark.gpu
def test_a_captured_call_selects_from_what_lies_there_at_each_replay(hopper: torch.device) -> None:
    call = call_of([9000, 2700, 700])
    rows = Rows(call.rows.request.to(hopper), call.rows.position.to(hopper), call.rows.max_position)
    cache = IndexCache(call.cache.keys.to(hopper), call.cache.page_table.to(hopper))
    index_q, shape = call.index_q.to(hopper), call.shape(8)
    select_decode(index_q, cache, rows, call.spec, shape)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = select_decode(index_q, cache, rows, call.spec, shape)
    for change in range(3):
        index_q.copy_(whole_numbers(*index_q.shape, seed=change))
        rows.position.sub_(97)
        moved = Rows(call.rows.request, rows.position.cpu(), call.rows.max_position)
        graph.replay()
        torch.cuda.synchronize()
        wanted = Call(index_q.cpu(), call.cache, moved, call.spec).wanted()
        assert compare.same_selection(Selection(got.blocks.cpu(), got.count.cpu()), wanted) is None
