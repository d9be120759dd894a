"""The attend stage of `smxx` against the reference, over poisoned memory.

Without a GPU the Triton kernels are interpreted, in FP16 (the interpreter's BF16 products are wrong), on lists made in
plain Python. With one everything runs: the worklist kernel, Triton, Hopper's own kernel, capture in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels of smxx are written in Triton")

from flashqsa import reference
from flashqsa.attend_shape import (
    AttendShape,
    HopperTile,
    Layout,
    Split,
    TritonTile,
    attend_refusal,
    attend_shape,
    hopper_refusal,
)
from flashqsa.device import DeviceFacts
from flashqsa.kernels import sm90, smxx
from flashqsa.kernels.nvrtc.sparse import empty_partial, sparse_attention
from flashqsa.kernels.nvrtc.worklist import list_windows
from flashqsa.kernels.sm90.attend import attend_hopper
from flashqsa.kernels.smxx.attend import attend_triton
from flashqsa.kernels.smxx.merge import merge
from flashqsa.testing import compare
from flashqsa.testing.cases import CASES, Case, named, spec_of
from flashqsa.testing.inputs import PATTERNS, Inputs, build, fill_unwritten, relocate, take_rows
from flashqsa.testing.selections import swap_one_block
from flashqsa.values import FP8, KvCache, QsaSpec, Rows, Selection
from tests.smxx_lists import host_lists, poisoned_lists

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
FACTS = DeviceFacts.named("h200")
LIMIT = 128 << 20
FP16, FP32 = torch.float16, torch.float32

SERVED = tuple(case for case in CASES if case.rows)


def tolerance(exact: Tensor, dtype: torch.dtype, fp8: bool) -> Tensor:
    """What an output may err: 1e-2 in BF16, 2e-3 in FP16 and 1e-5 in FP32, and a unit in the last place of large ones.

    BF16 and FP32 queries meet an FP8 cache as FP16, which moves large logits: as BF16.
    """
    if fp8 and dtype != FP16:
        dtype = torch.bfloat16
    absolute, unit = {FP16: (2e-3, 2**-9), FP32: (1e-5, 2**-20)}.get(dtype, (1e-2, 2**-7))
    return absolute + unit * exact.abs()


def selection_of(inputs: Inputs) -> Selection:
    if inputs.selection is not None:
        return inputs.selection
    return reference.select_blocks(inputs.index_q, inputs.index_cache, inputs.rows, inputs.spec)


def expected(inputs: Inputs, selection: Selection | None) -> tuple[Tensor, Tensor]:
    """Output [rows, q_heads, head_dim] and lse [rows, q_heads] in FP64."""
    output, lse = reference.attend(inputs.q, inputs.kv_cache, selection, inputs.rows, inputs.spec)
    if inputs.gate is not None:
        output = output * torch.sigmoid(inputs.gate.double())
    return output, lse


def check(output: Tensor, lse: Tensor, wanted: tuple[Tensor, Tensor], fp8: bool = False) -> None:
    """Compares with what FP64 gives; with an FP8 cache logits err as FP16 queries do."""
    exact, exact_lse = wanted
    error = (output.double() - exact).abs()
    assert bool((error <= tolerance(exact, output.dtype, fp8)).all()), f"errs {float(error.max())}"
    empty = exact_lse == float("-inf")
    assert torch.equal(lse == float("-inf"), empty)
    assert bool((output[empty] == 0).all())
    limit = 5e-3 if fp8 and output.dtype == FP32 else 1e-4 if output.dtype == FP32 else 2e-3
    assert bool(((lse.double() - exact_lse)[~empty].abs() < limit).all())


def run(
    inputs: Inputs, selection: Selection | None, tile: TritonTile | HopperTile, whole: int, parts: int, inside: bool
) -> tuple[Tensor, Tensor]:
    """Output and lse over NaN, from lists over poison: the worklist kernel's on a GPU, plain Python's elsewhere."""
    rows, spec, cache = inputs.rows, inputs.spec, inputs.kv_cache
    counters = spec.kv_heads * tile.counters
    if ON_GPU:
        lists = poisoned_lists(rows, spec, cache, tile.group_rows, counters)
        list_windows(lists, selection, rows, spec, cache, FACTS.capability or (0, 0))
    else:
        lists = host_lists(selection, rows, spec, cache, tile.group_rows, counters)
    units = lists.windows * spec.kv_heads
    split = Split(units, min(whole, units), parts, inside)
    partial = empty_partial(split, tile.group_rows, rows.count, spec, inputs.q.device)
    if partial is not None:
        partial.output.fill_(float("nan"))
        partial.lse.fill_(float("nan"))
    output = torch.full_like(inputs.q, float("nan"))
    lse = torch.full(output.shape[:2], float("nan"), device=output.device)
    arguments = (inputs.q, cache, lists, rows, spec)
    results = (split, inputs.gate, output, lse, partial)
    if isinstance(tile, HopperTile):
        attend_hopper(*arguments, tile, *results)
    else:
        attend_triton(*arguments, tile, *results)
    if partial is not None and not inside:
        merge(partial, inputs.gate, output, lse)
    return output, lse


def triton_tile(group_rows: int, spec: QsaSpec, tokens: int = 16) -> TritonTile:
    lines = max(16, 1 << (group_rows * spec.heads_per_kv_head - 1).bit_length())
    return TritonTile(group_rows, lines, tokens, 4, 2, 1)


WHOLE = 1 << 20
SPLITS = {"whole": (WHOLE, 1, True), "some-inside": (1, 3, True), "all-apart": (0, 2, False)}
FEW = (
    # name, first row, last row, rows of a window, split
    ("hole-under-the-tail", 0, 9, 4, "whole"),
    ("hole-under-the-tail", 0, 9, 3, "some-inside"),
    ("padding-first-middle-last", 0, 13, 4, "some-inside"),
    ("padding-first-middle-last", 3, 8, 1, "all-apart"),
    ("contexts-of-1-to-3-and-5", 0, 8, 8, "whole"),
    ("chunks-at-840-to-843", 4, 9, 5, "whole"),
    ("prefill-fp8-head-scales", 40, 46, 2, "some-inside"),
    ("prefill-24-heads-on-1", 30, 34, 2, "whole"),
    ("pages-of-784", 9, 15, 3, "all-apart"),
    ("verify-1-to-12", 20, 30, 4, "whole"),
    ("disjoint", 12, 20, 8, "whole"),
    ("near", 8, 18, 10, "all-apart"),
)


@pytest.mark.parametrize(("name", "first", "last", "group_rows", "split"), FEW, ids=lambda value: str(value))
def test_attention_equals_the_reference(name: str, first: int, last: int, group_rows: int, split: str) -> None:
    inputs = take_rows(build(named(name), DEVICE), first, last)
    selection = selection_of(inputs)
    output, lse = run(inputs, selection, triton_tile(group_rows, inputs.spec), *SPLITS[split])
    check(output, lse, expected(inputs, selection))


def test_below_the_budget_it_is_causal_attention() -> None:
    inputs = take_rows(build(named("1700-tokens-model"), DEVICE), 3, 5)
    listed = run(inputs, selection_of(inputs), triton_tile(2, inputs.spec, 64), *SPLITS["whole"])
    dense = run(inputs, None, triton_tile(2, inputs.spec, 64), *SPLITS["whole"])
    assert compare.same_bits(listed[0], dense[0])
    check(*dense, expected(inputs, None))


def test_every_row_keeps_to_its_own_blocks() -> None:
    """A union used as everybody's selection, or one wrong block, moves a peaked softmax far."""
    inputs = take_rows(build(named("disjoint"), DEVICE), 12, 20)
    selection = selection_of(inputs)
    output, _ = run(inputs, selection, triton_tile(8, inputs.spec), *SPLITS["whole"])
    swapped, _ = expected(inputs, swap_one_block(selection, inputs.rows, inputs.spec))
    error = (output.double() - swapped).abs().amax(dim=(1, 2))
    assert float(error.max()) > 0.5


@pytest.mark.parametrize("pattern", PATTERNS if ON_GPU else ("infinity", "fp32-bytes"))
def test_memory_nobody_wrote_changes_nothing(pattern: str) -> None:
    inputs = take_rows(build(named("hole-under-the-tail"), DEVICE), 1, 7)
    selection, tile = selection_of(inputs), triton_tile(3, inputs.spec)
    first = run(inputs, selection, tile, *SPLITS["some-inside"])
    again = run(fill_unwritten(inputs, pattern), selection, tile, *SPLITS["some-inside"])
    assert compare.same_bits(first[0], again[0])
    assert compare.same_bits(first[1], again[1])


@pytest.mark.parametrize("order", ["identity", "reversed"])
def test_where_pages_lie_changes_nothing(order: str) -> None:
    inputs = take_rows(build(named("hole-under-the-tail"), DEVICE), 0, 7)
    selection, tile = selection_of(inputs), triton_tile(4, inputs.spec)
    first = run(inputs, selection, tile, *SPLITS["all-apart"])
    moved = run(relocate(inputs, order), selection, tile, *SPLITS["all-apart"])
    assert compare.same_bits(first[0], moved[0])
    assert compare.same_bits(first[1], moved[1])


def test_queries_beyond_fp16_meet_an_fp8_cache() -> None:
    """Powers of two taken out of FP32 queries: huge, tiny and zero lines give finite results and the right winner."""
    spec = spec_of(2, 1, head_dim=16)
    rows = Rows.from_lengths([3], [6], device=DEVICE)
    pool = torch.randn(1, 2, 8, 1, 16, generator=torch.Generator().manual_seed(0)).to(FP8).to(DEVICE)
    cache = KvCache.interleaved(pool, torch.zeros(1, 1, dtype=torch.int32, device=DEVICE), 0.5, 2.0)
    q = torch.randn(3, 2, 16, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    q = q * torch.tensor([1e30, 1e-30, 0.0], device=DEVICE)[:, None, None]
    inputs = replace(build(Case("wide", (3,), (6,), spec), DEVICE), q=q, gate=None, rows=rows, kv_cache=cache)
    output, lse = run(inputs, None, triton_tile(3, spec), *SPLITS["whole"])
    exact, _ = expected(inputs, None)
    assert bool(output.isfinite().all())
    assert float((output.double() - exact).abs().max()) < 2e-3 * float(exact.abs().max())
    assert float((lse[1] - torch.tensor(5.0).log().to(DEVICE)).abs().max()) < 1e-5


def shapes(case: Case) -> list[AttendShape]:
    """Launches that a case can take on an H200, whole and row by row: Hopper's own, where it can, and Triton's."""
    arguments = (case.spec, case.rows, len(case.context_lengths), max(case.context_lengths) - 1, FACTS)
    size = case.cache_dtype.itemsize
    kernels = [False]
    if hopper_refusal(case.spec, case.q_dtype, case.cache_dtype, Layout(), FACTS) is None:
        kernels.append(True)
    return [
        attend_shape(*arguments, cache_bytes=size, hopper=hopper, alone=alone, cuts=not alone)
        for hopper in kernels
        for alone in (False, True)
    ]


def attend(inputs: Inputs, selection: Selection | None, shape: AttendShape) -> tuple[Tensor, Tensor]:
    arguments = (inputs.q, inputs.kv_cache, selection, inputs.rows, inputs.spec, inputs.gate)
    kernels = sm90.KERNELS if isinstance(shape.tile, HopperTile) else smxx.KERNELS
    output, lse = sparse_attention(*arguments, True, shape, FACTS.capability or (0, 0), LIMIT, kernels)
    assert lse is not None
    return output, lse


@pytest.mark.gpu
@pytest.mark.parametrize("case", SERVED, ids=lambda case: case.name)
def test_every_case_on_the_gpu(case: Case) -> None:
    host = build(case)
    selection = selection_of(host)
    wanted = tuple(tensor.to(DEVICE) for tensor in expected(host, selection))
    inputs = build(case, DEVICE)
    chosen = Selection(selection.blocks.to(DEVICE), selection.count.to(DEVICE))
    layout = Layout.of(inputs.kv_cache, case.spec, inputs.q, inputs.gate)
    assert attend_refusal(case.spec, case.cache_dtype, layout, FACTS) is None
    for shape in shapes(case):
        if isinstance(shape.tile, HopperTile) and layout.alignment_bytes < 16:
            continue
        first = attend(inputs, chosen, shape)
        check(*first, (wanted[0], wanted[1]), case.cache_dtype == FP8)
        for other in (inputs, relocate(inputs, "reversed"), fill_unwritten(inputs, "infinity")):
            again = attend(other, chosen, shape)
            assert compare.same_bits(first[0], again[0])
            assert compare.same_bits(first[1], again[1])


HOPPER = (
    ("prefill-head-dim-256", HopperTile(5, 1, 3)),
    ("prefill-head-dim-256", HopperTile(10, 2, 2)),
    ("verify-model", HopperTile(5, 1, 3)),
    ("verify-model", HopperTile(4, 1, 3)),
    ("decode-1-model", HopperTile(1, 1, 3)),
    ("1700-tokens-model", HopperTile(10, 2, 2)),
)


@pytest.mark.gpu
@pytest.mark.skipif(ON_GPU and torch.cuda.get_device_capability() != (9, 0), reason="made for compute capability 9.0")
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(("name", "tile"), HOPPER, ids=lambda value: str(value))
def test_hoppers_own_kernel(name: str, tile: HopperTile, split: str) -> None:
    inputs = build(named(name), DEVICE)
    layout = Layout.of(inputs.kv_cache, inputs.spec, inputs.q, inputs.gate)
    assert hopper_refusal(inputs.spec, inputs.q.dtype, inputs.kv_cache.keys.dtype, layout, FACTS) is None
    selection = selection_of(inputs)
    check(*run(inputs, selection, tile, *SPLITS[split]), expected(inputs, selection))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["verify-model", "decode-16", "padding-first-middle-last", "mid"])
def test_a_captured_call_follows_its_inputs(name: str) -> None:
    case = named(name)
    inputs = build(case, DEVICE)
    selection = selection_of(inputs)
    for shape in shapes(case):
        attend(inputs, selection, shape)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output, lse = attend(inputs, selection, shape)
        for step in range(3):
            inputs.q.mul_(-0.5)
            inputs.kv_cache.page_table.copy_(
                inputs.kv_cache.page_table.flip(1) if step == 2 else inputs.kv_cache.page_table
            )
            graph.replay()
            eager = attend(inputs, selection, shape)
            assert compare.same_bits(output, eager[0])
            assert compare.same_bits(lse, eager[1])


@pytest.mark.gpu
def test_a_row_keeps_its_bits_in_any_batch() -> None:
    case = named("mid")
    inputs = build(case, DEVICE)
    selection = selection_of(inputs)
    shape = attend_shape(case.spec, case.rows, 1, inputs.rows.max_position, FACTS, alone=True, cuts=False)
    together = attend(inputs, selection, shape)
    for start, stop in ((0, 1), (5, 12), (23, 24)):
        part = take_rows(inputs, start, stop)
        alone = attend(part, selection.slice(start, stop), shape)
        assert compare.same_bits(alone[0], together[0][start:stop])
        assert compare.same_bits(alone[1], together[1][start:stop])


@pytest.mark.gpu
@pytest.mark.parametrize("hopper", [True, False])
def test_pools_beyond_2_31_elements(hopper: bool) -> None:
    spec = QsaSpec(q_heads=12, kv_heads=1)
    rows = Rows.from_lengths([6], [16], device=DEVICE)
    pages = (1 << 31) // (2 * 16 * 256) + 3
    pool = torch.empty(pages, 2, 16, 1, 256, dtype=torch.bfloat16, device=DEVICE)
    pool[pages - 1].normal_()
    pool[1].copy_(pool[pages - 1])
    pool[0].fill_(float("nan"))
    q = torch.randn(6, 12, 256, device=DEVICE, dtype=torch.bfloat16)
    shape = attend_shape(spec, 6, 1, 15, FACTS, hopper=hopper)
    found = [
        sparse_attention(
            q,
            KvCache.interleaved(pool, torch.tensor([[page]], dtype=torch.int32, device=DEVICE)),
            None,
            rows,
            spec,
            None,
            False,
            shape,
            FACTS.capability or (0, 0),
            LIMIT,
            sm90.KERNELS if hopper else smxx.KERNELS,
        )[0]
        for page in (pages - 1, 1)
    ]
    assert bool(found[0].isfinite().all())
    assert compare.same_bits(found[0], found[1])


@pytest.mark.gpu
def test_rows_in_chunks_equal_rows_at_once() -> None:
    case = named("near")
    inputs = build(case, DEVICE)
    selection = selection_of(inputs)
    shape = attend_shape(case.spec, case.rows, 1, inputs.rows.max_position, FACTS)
    small = shape.capacity * 4 * 6 * 2
    assert shape.chunk_rows(case.spec, small) < case.rows
    arguments = (inputs.q, inputs.kv_cache, selection, inputs.rows, case.spec, inputs.gate, True)
    output, lse = sparse_attention(*arguments, shape, FACTS.capability or (0, 0), small, smxx.KERNELS)
    assert lse is not None
    check(output, lse, expected(inputs, selection))
