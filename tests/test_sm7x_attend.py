"""The attention of Volta and Turing (`kernels/sm7x`) against the reference, over poisoned memory.

Without such a GPU its CUDA C++ runs on the CPU, tensor-core products by their layout formulas (`mma_emulator.hpp`), and
is compiled for both. On any newer NVIDIA GPU it runs as PTX of compute_70 and compute_75, which the driver compiles.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flashqsa import reference
from flashqsa.attend_shape import (
    AttendShape,
    HopperTile,
    Layout,
    Sm7xTile,
    Split,
    attend_shape,
    ranked_entries,
    sm7x_refusal,
)
from flashqsa.device import DeviceFacts, facts_of
from flashqsa.kernels.nvrtc import Kernel, NvrtcNotFoundError, compile_source
from flashqsa.kernels.nvrtc.sparse import AttendKernels, empty_partial, sparse_attention
from flashqsa.kernels.nvrtc.worklist import list_windows, worklist_kernel
from flashqsa.kernels.sm7x import attend as attend_module
from flashqsa.kernels.sm7x import merge as merge_module
from flashqsa.kernels.sm7x.attend import attend_sm7x, sm7x_kernel
from flashqsa.kernels.sm7x.merge import merge_kernel, merge_on
from flashqsa.testing import compare
from flashqsa.testing.cases import CASES, FP16, Case, named, spec_of
from flashqsa.testing.inputs import Inputs, build, fill_unwritten, filled, relocate, take_rows
from flashqsa.testing.selections import swap_one_block
from flashqsa.values import FP8, KvCache, QsaSpec, Rows, Selection
from tests import smxx_emulate
from tests.nvrtc_emulate import CXX, emulated_launches
from tests.smxx_lists import host_lists, poisoned_lists

ON_GPU = torch.cuda.is_available()
VOLTA, TURING = (7, 0), (7, 5)
GPUS = {VOLTA: DeviceFacts.named("v100"), TURING: DeviceFacts.named("rtx8000")}
both = pytest.mark.parametrize("capability", [VOLTA, TURING], ids=["volta", "turing"])


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Launches on the CPU run in the emulator."""
    if CXX is None:
        pytest.skip("no g++ here to compile the kernels for the CPU")
    with emulated_launches(tmp_path_factory.mktemp("sm7x")):
        yield


@cache
def virtual(kernel: Kernel) -> Kernel:
    """The kernel as PTX, for a GPU that is newer than it."""
    return replace(kernel, source=replace(kernel.source, virtual=True))


@pytest.fixture
def as_ptx(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches take the PTX of their kernels. Skips where no NVRTC knows the test's architecture."""
    capability = request.node.callspec.params["capability"]
    try:
        compile_source(virtual(merge_kernel(capability, 64)).source, capability)
    except NvrtcNotFoundError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(attend_module, "sm7x_kernel", lambda *given: virtual(sm7x_kernel(*given)))
    monkeypatch.setattr(merge_module, "merge_kernel", lambda *given: virtual(merge_kernel(*given)))


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


def check(got: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    """Outputs err 2e-3 and a unit in the last place of large ones, as `smxx` in FP16; lse 2e-3."""
    (output, lse), (exact, exact_lse) = got, wanted
    error = (output.double() - exact).abs()
    assert bool((error <= 2e-3 + 2**-9 * exact.abs()).all()), f"errs {float(error.max())}"
    empty = exact_lse == float("-inf")
    assert torch.equal(lse == float("-inf"), empty)
    assert bool((output[empty] == 0).all())
    assert bool(((lse.double() - exact_lse)[~empty].abs() < 2e-3).all())


def same(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> bool:
    return compare.same_bits(first[0], second[0]) and compare.same_bits(first[1], second[1])


def run(
    inputs: Inputs,
    selection: Selection | None,
    capability: tuple[int, int],
    group_rows: int,
    whole: int = 1 << 20,
    parts: int = 1,
    inside: bool = True,
) -> tuple[Tensor, Tensor]:
    """Output and lse over NaN, from lists over poison: plain Python's on the CPU, the worklist kernel's on a GPU."""
    rows, spec, caches = inputs.rows, inputs.spec, inputs.kv_cache
    tile = Sm7xTile(group_rows, spec.head_dim, capability)
    if inputs.q.is_cuda:
        lists = poisoned_lists(rows, spec, caches, group_rows, spec.kv_heads)
        list_windows(lists, selection, rows, spec, caches, facts_of(inputs.q.device).capability or (0, 0))
    else:
        lists = host_lists(selection, rows, spec, caches, group_rows, spec.kv_heads)
    units = lists.windows * spec.kv_heads
    split = Split(units, min(whole, units), parts, inside)
    partial = empty_partial(split, group_rows, rows.count, spec, inputs.q.device)
    if partial is not None:
        partial.output.fill_(float("nan"))
        partial.lse.fill_(float("nan"))
    output = torch.full_like(inputs.q, float("nan"))
    lse = torch.full(output.shape[:2], float("nan"), device=output.device)
    attend_sm7x(inputs.q, caches, lists, rows, spec, tile, split, inputs.gate, output, lse, partial)
    if partial is not None and not inside:
        merge_on(capability)(partial, inputs.gate, output, lse)
    return output, lse


SPLITS: dict[str, tuple[int, int, bool]] = {
    "whole": (1 << 20, 1, True),
    "some-inside": (1, 3, True),
    "all-apart": (0, 9, False),
}
OWN_CASES = (
    Case("heads-of-128", (6,), (70,), spec_of(24, 2, 128), FP16, FP16, layout="packed"),
    Case("heads-of-128-fp8", (5,), (70,), spec_of(12, 1, 128), FP16, FP8, gate=False),
    Case("heads-of-256-3-on-1", (6,), (50,), spec_of(3, 1, 256), FP16, FP16, page_tokens=784),
    Case("equal-12-on-1", (10,), (200,), spec_of(12, 1), FP16, FP16, regime="equal"),
)
FEW = (
    # name, first row, last row, rows of a window, split
    ("hole-under-the-tail", 0, 9, 4, "whole"),
    ("hole-under-the-tail", 0, 9, 3, "some-inside"),
    ("padding-first-middle-last", 0, 13, 4, "some-inside"),
    ("padding-first-middle-last", 3, 8, 1, "all-apart"),
    ("contexts-of-1-to-3-and-5", 0, 8, 8, "whole"),
    ("chunks-at-840-to-843", 4, 15, 6, "whole"),
    ("prefill-fp8-head-scales", 40, 49, 4, "some-inside"),
    ("prefill-normal-scores-fp8", 20, 28, 8, "all-apart"),
    ("prefill-24-heads-on-1", 29, 36, 5, "whole"),
    ("decode-16", 2, 14, 1, "whole"),
    ("pages-of-784", 9, 15, 3, "all-apart"),
    ("verify-1-to-12", 20, 30, 4, "whole"),
    ("disjoint", 10, 18, 8, "whole"),
    ("near", 4, 24, 20, "some-inside"),
    ("equal-12-on-1", 0, 10, 10, "whole"),
    ("heads-of-128", 0, 6, 6, "some-inside"),
    ("heads-of-128-fp8", 0, 5, 3, "whole"),
    ("heads-of-256-3-on-1", 0, 6, 6, "all-apart"),
    ("verify-model", 3, 4, 1, "some-inside"),
)


def case_named(name: str) -> Case:
    return next((case for case in OWN_CASES if case.name == name), None) or named(name)


@both
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(("name", "first", "last", "group_rows", "split"), FEW, ids=lambda value: str(value))
def test_attention_equals_the_reference(
    name: str, first: int, last: int, group_rows: int, split: str, capability: tuple[int, int]
) -> None:
    inputs = take_rows(build(case_named(name)), first, last)
    selection = selection_of(inputs)
    check(run(inputs, selection, capability, group_rows, *SPLITS[split]), expected(inputs, selection))


@both
@pytest.mark.usefixtures("emulated")
def test_below_the_budget_it_is_causal_attention(capability: tuple[int, int]) -> None:
    inputs = build(replace(named("contexts-of-1-to-3-and-5"), query_lengths=(3,), context_lengths=(33,)))
    dense = run(inputs, None, capability, 3)
    assert same(run(inputs, selection_of(inputs), capability, 3), dense)
    check(dense, expected(inputs, None))


@both
@pytest.mark.usefixtures("emulated")
def test_every_row_keeps_to_its_own_blocks(capability: tuple[int, int]) -> None:
    """A union used as everybody's selection, or one wrong block, moves a peaked softmax far."""
    inputs = take_rows(build(named("disjoint")), 12, 17)
    selection = selection_of(inputs)
    output, _ = run(inputs, selection, capability, 5)
    swapped, _ = expected(inputs, swap_one_block(selection, inputs.rows, inputs.spec))
    assert float((output.double() - swapped).abs().max()) > 0.5


@both
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("name", ["hole-under-the-tail", "prefill-fp8-head-scales"])
def test_nothing_but_what_is_attended_matters(name: str, capability: tuple[int, int]) -> None:
    """Repeats, other places of pages and other bytes in memory that nobody wrote give the same bits."""
    inputs = take_rows(build(named(name)), 2, 7)
    selection = selection_of(inputs)
    first = run(inputs, selection, capability, 2, *SPLITS["some-inside"])
    for other in (inputs, relocate(inputs, "reversed"), fill_unwritten(inputs, "infinity")):
        assert same(run(other, selection, capability, 2, *SPLITS["some-inside"]), first)


def shape_of(case: Case, capability: tuple[int, int], alone: bool = False) -> AttendShape:
    arguments = (case.spec, case.rows, len(case.context_lengths), max(case.context_lengths) - 1, GPUS[capability])
    size = case.cache_dtype.itemsize
    return attend_shape(*arguments, cache_bytes=size, sm7x=True, alone=alone, cuts=not alone)


def attend(
    inputs: Inputs, selection: Selection | None, shape: AttendShape, capability: tuple[int, int], limit: int = 128 << 20
) -> tuple[Tensor, Tensor]:
    """The whole stage: worklist, attention, merge."""
    arguments = (inputs.q, inputs.kv_cache, selection, inputs.rows, inputs.spec, inputs.gate)
    kernels = AttendKernels(attend_sm7x, merge_on(capability))
    here = facts_of(inputs.q.device).capability or capability
    output, lse = sparse_attention(*arguments, True, shape, here, limit, kernels)
    assert lse is not None
    return output, lse


@both
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("name", ["padding-first-middle-last", "hole-under-the-tail", "decode-16", "disjoint"])
def test_the_whole_stage_equals_the_reference(name: str, capability: tuple[int, int]) -> None:
    """Worklist, attention and merge as they are launched on a GPU; at once, row by row, and in chunks of rows."""
    case = named(name)
    inputs = build(case)
    selection = selection_of(inputs)
    wanted = expected(inputs, selection)
    shape = shape_of(case, capability)
    check(attend(inputs, selection, shape, capability), wanted)
    chunk = shape.window_bytes(case.spec)
    assert shape.chunk_rows(case.spec, chunk) < case.rows
    check(attend(inputs, selection, shape, capability, chunk), wanted)
    check(attend(inputs, selection, shape_of(case, capability, alone=True), capability), wanted)


def with_other_value_strides(inputs: Inputs) -> Inputs:
    """The same cache, values in a pool of longer pages with NaN at their ends."""
    values = inputs.kv_cache.values
    pages, tokens, heads, dims = values.shape
    pool = filled((pages, tokens + 4, heads, dims), values.dtype, values.device, "nan")
    pool[:, :tokens] = values
    return replace(inputs, kv_cache=replace(inputs.kv_cache, values=pool[:, :tokens]))


@both
@pytest.mark.usefixtures("emulated")
def test_values_may_lie_otherwise_than_keys(capability: tuple[int, int]) -> None:
    inputs = take_rows(build(named("hole-under-the-tail")), 1, 8)
    selection = selection_of(inputs)
    other = with_other_value_strides(inputs)
    assert host_lists(selection, other.rows, other.spec, other.kv_cache, 4).value_places is not None
    assert same(run(other, selection, capability, 4), run(inputs, selection, capability, 4))


@both
@pytest.mark.usefixtures("emulated")
def test_a_row_alone_in_its_window_keeps_its_bits_in_any_batch(capability: tuple[int, int]) -> None:
    inputs = build(case_named("equal-12-on-1"))
    selection = selection_of(inputs)
    together = run(inputs, selection, capability, 1)
    for start, stop in ((0, 1), (3, 6), (9, 10)):
        part = run(take_rows(inputs, start, stop), selection.slice(start, stop), capability, 1)
        assert same(part, (together[0][start:stop], together[1][start:stop]))


@both
@pytest.mark.usefixtures("emulated")
def test_merging_inside_and_apart_agree(capability: tuple[int, int]) -> None:
    """The same parts, merged by the one that ends last or by the kernel of their own: a unit in the last place."""
    inputs = take_rows(build(named("near")), 6, 12)
    selection = selection_of(inputs)
    inside, apart = (run(inputs, selection, capability, 3, 0, 4, merged) for merged in (True, False))
    assert bool(((inside[0].double() - apart[0].double()).abs() <= 2**-10 * (1e-2 + apart[0].double().abs())).all())
    assert bool(((inside[1] - apart[1]).abs() < 1e-5).all())


@both
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(("whole", "inside"), [(1, True), (0, True), (0, False)], ids=["whole", "inside", "apart"])
def test_a_row_of_nan_stays_nan(whole: int, inside: bool, capability: tuple[int, int]) -> None:
    """Every logit of the first head is NaN: its parts' lse are NaN or, where a part sees nothing, -inf."""
    inputs = build(Case("nan-row", (1,), (700,), spec_of(12, 1, top_blocks=32), FP16, FP16))
    selection = selection_of(inputs)
    exact = run(inputs, selection, capability, 1, whole, 12, inside)
    inputs.q[0, 0] = float("nan")
    output, lse = run(inputs, selection, capability, 1, whole, 12, inside)
    assert bool(output[0, 0].isnan().all())
    assert bool(lse[0, 0].isnan())
    assert same((output[:, 1:], lse[:, 1:]), (exact[0][:, 1:], exact[1][:, 1:]))


@both
@pytest.mark.usefixtures("emulated")
def test_every_fp8_number_becomes_itself(capability: tuple[int, int]) -> None:
    """A row that sees one token has that token's value: all 256 codes, subnormal ones and both NaN among them."""
    spec = spec_of(3, 1, head_dim=256)
    codes = torch.arange(256, dtype=torch.uint8).view(FP8)
    pool = torch.zeros(1, 2, 4, 1, 256, dtype=torch.uint8).view(FP8)
    pool[0, 1, 0, 0] = codes
    cache_ = KvCache.interleaved(pool, torch.zeros(1, 1, dtype=torch.int32), 1.0, 1.0)
    inputs = replace(
        build(Case("codes", (1,), (1,), spec, FP16, FP8, gate=False)),
        kv_cache=cache_,
        rows=Rows.from_lengths([1], [1]),
    )
    output, _ = run(inputs, None, capability, 1)
    for head in range(3):
        assert torch.equal(output[0, head].nan_to_num(nan=1e4), codes.to(FP16).nan_to_num(nan=1e4))


@pytest.mark.skipif(CXX is None, reason="no g++ here to compile the kernel for the CPU")
def test_lists_do_not_depend_on_how_many_entries_are_ranked_at_a_time(tmp_path: Path) -> None:
    """4,104 entries: three passes on Volta, five on Turing."""
    inputs = build(named("disjoint-model-512"))
    rows, spec, caches = inputs.rows, inputs.spec, inputs.kv_cache
    library = smxx_emulate.build_emulator(tmp_path)
    lists = [poisoned_lists(rows, spec, caches, 8) for _ in GPUS]
    for got, capability in zip(lists, GPUS, strict=True):
        assert ranked_entries(capability) < got.capacity / 2
        smxx_emulate.emulate(library, got, selection_of(inputs), rows, spec, caches, ranked_entries(capability))
    assert int(lists[0].entries[0]) > 4096
    for name in ("places", "token_masks", "entries"):
        assert torch.equal(getattr(lists[0], name), getattr(lists[1], name))


@both
def test_the_worklist_of_a_million_tokens_fits(capability: tuple[int, int]) -> None:
    kernel = worklist_kernel(capability, 262_144, ranked_entries(capability))
    row_arrays = 3 * 32 * 4
    assert kernel.shared_bytes + row_arrays <= GPUS[capability].shared_memory_bytes


REFUSED = (
    ({"q_dtype": torch.bfloat16, "cache_dtype": torch.bfloat16}, "sm_75 has no BF16 tensor cores"),
    ({"q_dtype": torch.bfloat16, "cache_dtype": FP8}, "sm_75 has no BF16 tensor cores"),
    ({"q_dtype": torch.float32, "cache_dtype": torch.float32}, "sm_75 has no FP32 tensor cores"),
    ({"spec": QsaSpec(head_dim=96)}, "heads of 64, 128 or 256"),
    ({"spec": QsaSpec(block_tokens=8)}, "blocks of 4 tokens, got 256 and 8"),
    ({"layout": Layout(alignment_bytes=8)}, "multiples of 16 bytes, got multiples of 8"),
    ({"layout": Layout(last_place=1 << 31)}, "more than 32 bits address"),
    ({"facts": DeviceFacts.named("h200")}, "made for sm_70 to sm_75, got sm_90"),
    ({"facts": DeviceFacts.named("cpu")}, "got cpu"),
    ({"facts": replace(GPUS[VOLTA], shared_memory_bytes=64 << 10)}, "needs 98304 bytes"),
)


@pytest.mark.parametrize(("changes", "reason"), REFUSED)
def test_what_it_refuses(changes: dict[str, object], reason: str) -> None:
    call = {"spec": QsaSpec(), "q_dtype": FP16, "cache_dtype": FP16, "layout": Layout(), "facts": GPUS[TURING]}
    assert sm7x_refusal(**call) is None  # type: ignore[arg-type]
    assert reason in str(sm7x_refusal(**{**call, **changes}))  # type: ignore[arg-type]


@both
@pytest.mark.parametrize(
    ("heads", "rows", "held"),
    [((24, 2), 1616, 10), ((24, 1), 1616, 5), ((6, 1), 1616, 21), ((3, 1), 1616, 32), ((32, 1), 9, 3), ((12, 1), 4, 4)],
)
def test_windows_fill_the_lines(heads: tuple[int, int], rows: int, held: int, capability: tuple[int, int]) -> None:
    spec = QsaSpec(*heads)
    tile: object = attend_shape(spec, rows, 1, 37_999, GPUS[capability], sm7x=True).tile
    assert tile == Sm7xTile(held, 256, capability)
    assert attend_shape(spec, rows, 1, 37_999, GPUS[capability], sm7x=True, alone=True).tile.group_rows == 1
    with pytest.raises(ValueError, match="lines do not hold"):
        sm7x_kernel(Sm7xTile(129 // heads[0] * heads[1] + 32, 256, capability), spec.heads_per_kv_head, False)


def test_a_tile_of_another_kernel_is_no_tile() -> None:
    inputs = build(named("near"))
    lists = host_lists(selection_of(inputs), inputs.rows, inputs.spec, inputs.kv_cache, 10)
    arguments = (inputs.q, inputs.kv_cache, lists, inputs.rows, inputs.spec)
    with pytest.raises(TypeError, match="wanted an Sm7xTile"):
        attend_sm7x(*arguments, HopperTile(10, 2, 2), Split(3, 3), None, inputs.q, None, None)


VARIANTS = [(64, 6, False), (64, 12, True), (128, 12, False), (256, 12, False), (256, 12, True), (256, 1, False)]


def built(kernel: Kernel) -> tuple[str, bytes]:
    """Log and cubin."""
    try:
        compiled = compile_source(kernel.source, kernel.capability)
    except NvrtcNotFoundError as error:
        pytest.skip(str(error))
    return compiled.log, compiled.cubin


@both
@pytest.mark.parametrize(("head_dim", "heads", "fp8"), VARIANTS)
def test_it_compiles_without_spills_and_fits(
    head_dim: int, heads: int, fp8: bool, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FLASHQSA_CACHE_DIR", str(tmp_path))
    tile = Sm7xTile(min(128 // heads, 32), head_dim, capability)
    kernel = sm7x_kernel(tile, heads, fp8)
    assert kernel.shared_bytes <= GPUS[capability].shared_memory_bytes
    for log, _ in (built(kernel), built(merge_kernel(capability, head_dim))):
        assert re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", log) == [("0", "0")]
        # What is declared in the source would come on top of what the launch asks for, which on Turing is all there is.
        assert "smem" not in log


@both
def test_a_virtual_source_becomes_ptx(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FLASHQSA_CACHE_DIR", str(tmp_path))
    _, text = built(virtual(merge_kernel(capability, 64)))
    assert f".target sm_{capability[0]}{capability[1]}".encode() in text
    assert text.endswith(b"\0")
    assert built(merge_kernel(capability, 64))[1].startswith(b"\x7fELF")


SERVED = [
    case
    for case in (*CASES, *OWN_CASES)
    if case.rows and sm7x_refusal(case.spec, case.q_dtype, case.cache_dtype, Layout(), GPUS[TURING]) is None
]


@both
@pytest.mark.gpu
@pytest.mark.usefixtures("as_ptx")
@pytest.mark.parametrize("case", SERVED, ids=lambda case: case.name)
def test_every_case_on_a_gpu(case: Case, capability: tuple[int, int]) -> None:
    host = build(case)
    selection = selection_of(host)
    output, lse = expected(host, selection)
    wanted = (output.to("cuda"), lse.to("cuda"))
    inputs = build(case, "cuda")
    layout = Layout.of(inputs.kv_cache, case.spec, inputs.q, inputs.gate)
    assert sm7x_refusal(case.spec, case.q_dtype, case.cache_dtype, layout, GPUS[capability]) is None
    chosen = Selection(selection.blocks.to("cuda"), selection.count.to("cuda"))
    for alone in (False, True):
        shape = shape_of(case, capability, alone)
        first = attend(inputs, chosen, shape, capability)
        check(first, wanted)
        moved = (relocate(inputs, "reversed"), fill_unwritten(inputs, "infinity"), with_other_value_strides(inputs))
        for other in (inputs, *moved):
            assert same(attend(other, chosen, shape, capability), first)


@both
@pytest.mark.gpu
@pytest.mark.usefixtures("as_ptx")
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", ["near", "verify-model", "padding-first-middle-last", "heads-of-256-3-on-1"])
def test_every_split_on_a_gpu(name: str, split: str, capability: tuple[int, int]) -> None:
    inputs = build(case_named(name), "cuda")
    selection = selection_of(inputs)
    check(run(inputs, selection, capability, 4, *SPLITS[split]), expected(inputs, selection))


@both
@pytest.mark.gpu
@pytest.mark.usefixtures("as_ptx")
def test_a_captured_call_follows_its_inputs(capability: tuple[int, int]) -> None:
    case = named("verify-model")
    inputs = build(case, "cuda")
    selection, shape = selection_of(inputs), shape_of(case, capability)
    attend(inputs, selection, shape, capability)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend(inputs, selection, shape, capability)
    for _ in range(2):
        inputs.q.mul_(-0.5)
        graph.replay()
        assert same(captured, attend(inputs, selection, shape, capability))


@both
@pytest.mark.gpu
@pytest.mark.usefixtures("as_ptx")
def test_pools_beyond_2_31_elements(capability: tuple[int, int]) -> None:
    spec = QsaSpec(q_heads=12, kv_heads=1)
    pages = (1 << 31) // (2 * 16 * 256) + 3
    pool = torch.empty(pages, 2, 16, 1, 256, dtype=FP16, device="cuda")
    pool[pages - 1].normal_()
    pool[1].copy_(pool[pages - 1])
    pool[0].fill_(float("nan"))
    inputs = build(Case("far-pages", (6,), (16,), spec, FP16, FP16), "cuda")
    found = []
    for page in (pages - 1, 1):
        table = torch.tensor([[page]], dtype=torch.int32, device="cuda")
        found.append(run(replace(inputs, kv_cache=KvCache.interleaved(pool, table)), None, capability, 6))
    assert bool(found[0][0].isfinite().all())
    assert same(found[0], found[1])
