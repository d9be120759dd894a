"""The worklist kernel: against lists made in plain Python on a GPU, and compiled for every GPU anywhere."""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the kernels of smxx are written in Triton")

from flashqsa import reference
from flashqsa.attend_shape import (
    LIST_PAD,
    PLACES,
    RANKED_ENTRIES,
    HopperTile,
    Layout,
    attend_refusal,
    hopper_refusal,
    list_capacity,
    place_unit,
)
from flashqsa.device import DeviceFacts, facts_of
from flashqsa.kernels.nvrtc import NvrtcNotFoundError, compile_source
from flashqsa.kernels.nvrtc.worklist import WindowLists, list_windows, worklist_kernel
from flashqsa.kernels.sm90.attend import hopper_kernel
from flashqsa.testing.cases import CASES, Case, named, spec_of
from flashqsa.testing.inputs import build
from flashqsa.testing.selections import select_locally
from flashqsa.values import FP8, KvCache, QsaSpec, Rows, Selection
from tests.smxx_emulate import CXX, build_emulator, emulate
from tests.smxx_lists import host_lists, poisoned_lists

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GROUP_ROWS = (1, 4, 10, 32)

LISTED = tuple(case for case in CASES if case.rows and case.tokens <= 5000)
"""Cases whose lists plain Python makes quickly; every layout, placement, hole and mixture is among them."""


EMULATED = (
    "prefill-k-1",
    "chunk-at-842",
    "pages-of-784",
    "pages-of-816",
    "verify-5",
    "requests-of-3-8-13",
    "requests-without-rows",
    "only-padding",
    "padding-first-middle-last",
    "contexts-of-1-to-3-and-5",
    "hole-under-the-tail",
    "nothing-but-holes",
    "holes-below-budget",
    "disjoint",
)
"""Cases for the emulator: every layout and kind of hole, padding and mixture, few rows each."""


def same_lists(got: WindowLists, wanted: WindowLists) -> str | None:
    """Whether two lists say the same, up to the entries that fill up the last tile; the rest must still be poison."""
    got_entries, entries = got.entries.tolist(), wanted.entries.tolist()
    if got_entries != entries:
        return f"entries {got_entries} instead of {entries}"
    if bool(got.done.any()):
        return "counters that are not 0"
    pairs = [("places", got.places, wanted.places), ("masks", got.token_masks, wanted.token_masks)]
    if got.value_places is not None and wanted.value_places is not None:
        pairs.append(("value places", got.value_places, wanted.value_places))
    for name, ours, theirs in pairs:
        ours, theirs = ours.cpu(), theirs.cpu()
        for window, count in enumerate(entries):
            end = -(-count // LIST_PAD) * LIST_PAD
            if not torch.equal(ours[window, :end], theirs[window, :end]):
                return f"window {window}: other {name}"
            if bool((ours[window, end:] != -1).any()):
                return f"window {window}: {name} written past entry {end}"
    return None


def listed(selection: Selection | None, rows: Rows, spec: QsaSpec, cache: KvCache, group_rows: int) -> WindowLists:
    lists = poisoned_lists(rows, spec, cache, group_rows, counters=3)
    capability = facts_of(rows.request.device).capability
    assert capability is not None
    list_windows(lists, selection, rows, spec, cache, capability)
    return lists


def paged(pool: torch.Tensor, table: torch.Tensor) -> tuple[KvCache, KvCache]:
    """The same cache on the CPU and on the GPU."""
    return KvCache.interleaved(pool, table), KvCache.interleaved(pool.to(DEVICE), table.to(DEVICE))


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("FLASHQSA_CACHE_DIR", str(tmp_path))
    compile_source.cache_clear()
    yield
    compile_source.cache_clear()


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if CXX is None:
        pytest.skip("no g++ here to compile the kernel for the CPU")
    return build_emulator(tmp_path_factory.mktemp("worklist"))


@pytest.mark.parametrize("name", EMULATED)
def test_the_emulated_kernel_equals_plain_python(name: str, emulator: ctypes.CDLL) -> None:
    case = named(name)
    inputs = build(case)
    selection = inputs.selection
    if selection is None:
        selection = reference.select_blocks(inputs.index_q, inputs.index_cache, inputs.rows, inputs.spec)
    for group_rows, ranked in ((1, 64), (5, 7), (32, 4096)):
        got = poisoned_lists(inputs.rows, case.spec, inputs.kv_cache, group_rows, counters=3)
        emulate(emulator, got, selection, inputs.rows, case.spec, inputs.kv_cache, ranked)
        wanted = host_lists(selection, inputs.rows, case.spec, inputs.kv_cache, group_rows, 3)
        difference = same_lists(got, wanted)
        assert difference is None, f"{group_rows} rows: {difference}"


def test_the_emulated_kernel_lists_all_that_is_visible(emulator: ctypes.CDLL) -> None:
    inputs = build(named("100-tokens-model"))
    got = poisoned_lists(inputs.rows, inputs.spec, inputs.kv_cache, 6, counters=2)
    emulate(emulator, got, None, inputs.rows, inputs.spec, inputs.kv_cache, 128)
    assert same_lists(got, host_lists(None, inputs.rows, inputs.spec, inputs.kv_cache, 6, 2)) is None


def test_padding_between_rows_does_not_list_a_request_twice(emulator: ctypes.CDLL) -> None:
    """The capacity of a window counts requests: a run that padding cut in two would not fit."""
    spec = spec_of(6, 1, top_blocks=8)
    request = torch.tensor([-1, 0, -1, 0, 0, -1, 0, -1], dtype=torch.int32)
    # What stands beside a -1 is anything, here positions past those of the rows after it.
    rows = Rows(request, torch.tensor([-1, 19, -2, 20, 21, 900, 22, 30], dtype=torch.int32), 22)
    cache = KvCache.interleaved(torch.empty(2, 2, 16, 1, 8), torch.tensor([[1, 0]], dtype=torch.int32))
    got = poisoned_lists(rows, spec, cache, 8)
    emulate(emulator, got, None, rows, spec, cache, 64)
    assert same_lists(got, host_lists(None, rows, spec, cache, 8)) is None
    assert got.entries.tolist() == [6]


@pytest.mark.gpu
@pytest.mark.parametrize("case", LISTED, ids=lambda case: case.name)
def test_lists_equal_plain_python(case: Case) -> None:
    host, device = build(case), build(case, DEVICE)
    selection = host.selection
    if selection is None:
        selection = reference.select_blocks(host.index_q, host.index_cache, host.rows, host.spec)
    chosen = Selection(selection.blocks.to(DEVICE), selection.count.to(DEVICE))
    for group_rows in GROUP_ROWS:
        got = listed(chosen, device.rows, case.spec, device.kv_cache, group_rows)
        difference = same_lists(got, host_lists(selection, host.rows, case.spec, host.kv_cache, group_rows, 3))
        assert difference is None, f"{group_rows} rows: {difference}"
        again = listed(chosen, device.rows, case.spec, device.kv_cache, group_rows)
        assert same_lists(again, got) is None


@pytest.mark.gpu
def test_a_window_that_shares_nothing_is_listed_whole() -> None:
    """8 rows of 512 blocks each: more than are ranked at a time."""
    spec = QsaSpec()
    rows = Rows.from_lengths([9], [20_001])
    selection = select_locally(rows, spec, "disjoint")
    pages = torch.randperm(1252, generator=torch.Generator().manual_seed(0)).to(torch.int32)
    cache, on_gpu = paged(torch.empty(1252, 2, 16, 1, 8), pages[None, :1251])
    wanted = host_lists(selection, rows, spec, cache, 8, 3)
    assert int(wanted.entries[0]) > 2 * RANKED_ENTRIES - 8
    chosen = Selection(selection.blocks.to(DEVICE), selection.count.to(DEVICE))
    got = listed(chosen, Rows(rows.request.to(DEVICE), rows.position.to(DEVICE), 20_000), spec, on_gpu, 8)
    assert same_lists(got, wanted) is None


@pytest.mark.gpu
def test_a_request_of_a_million_tokens() -> None:
    """Blocks up to 262,143, at both ends of the bitmap's words and groups of words."""
    spec = spec_of(6, 1, top_blocks=8)
    rows = Rows.from_lengths([3], [1_048_575])
    blocks = [[0, 31, 32, 1023, 1024, 131_071, 262_141, 262_142], [1, 31, 33, 1023, 1025, 131_072, 262_100, 262_142]]
    selection = Selection(
        torch.tensor([*blocks, blocks[0]], dtype=torch.int32), torch.tensor([8, 8, 7], dtype=torch.int32)
    )
    cache, on_gpu = paged(torch.empty(2, 2, 64, 1, 8), torch.zeros(1, 16_384, dtype=torch.int32))
    chosen = Selection(selection.blocks.to(DEVICE), selection.count.to(DEVICE))
    moved_rows = Rows(rows.request.to(DEVICE), rows.position.to(DEVICE), rows.max_position)
    got = listed(chosen, moved_rows, spec, on_gpu, 3)
    assert same_lists(got, host_lists(selection, rows, spec, cache, 3, 3)) is None


@pytest.mark.gpu
def test_bad_ids_are_left_out() -> None:
    """Ids that no row sees, and negative ones, are entries that nobody reads or no entries at all."""
    spec = spec_of(6, 1, top_blocks=4)
    rows = Rows.from_lengths([2], [40], device=DEVICE)
    table = torch.tensor([[2, 0, 1]], dtype=torch.int32, device=DEVICE)
    cache = KvCache.interleaved(torch.empty(3, 2, 16, 1, 8, device=DEVICE), table)
    blocks = torch.tensor([[-7, 2, 5, 1 << 30], [3, 2_000, -1, -1]], dtype=torch.int32, device=DEVICE)
    chosen = Selection(blocks, torch.tensor([4, 2], dtype=torch.int32, device=DEVICE))
    page, block = 2 * 16 * 8, 4 * 8
    # Blocks 2, 5 and 3, and the open block 9 of the row at position 38.
    wanted = {2 * page + 2 * block, block, 2 * page + 3 * block, page + block}
    for group_rows in (1, 2):
        lists = listed(chosen, rows, spec, cache, group_rows)
        read: set[int] = set()
        for window, count in enumerate(lists.entries.tolist()):
            attended = lists.token_masks[window, :count].any(dim=1)
            read |= {place * lists.unit for place in lists.places[window, :count][attended].tolist()}
        assert read == wanted


GPUS = ("v100", "t4", "a100", "h200", "rtx5090")


@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize("gpu", GPUS)
def test_the_kernel_compiles_and_fits(gpu: str) -> None:
    facts = DeviceFacts.named(gpu)
    assert facts.capability is not None
    kernel = worklist_kernel(facts.capability, 262_144, min(RANKED_ENTRIES, 1024))
    assert kernel.shared_bytes + 1024 <= facts.shared_memory_bytes
    try:
        compiled = compile_source(kernel.source, facts.capability)
    except NvrtcNotFoundError as error:
        pytest.skip(str(error))
    (spilled,) = re.findall(r"(\d+) bytes spill stores", compiled.log)
    (registers,) = re.findall(r"Used (\d+) registers", compiled.log)
    # Three programs per multiprocessor leave a thread 40 registers; Turing holds two.
    assert (int(spilled), int(registers) <= (64 if facts.capability == (7, 5) else 40)) == (0, True)
    assert compiled.cubin


HOPPER = (
    (HopperTile(10, 2, 2), 12, True, False),
    (HopperTile(5, 1, 3), 12, True, True),
    (HopperTile(32, 1, 3), 1, False, False),
)


@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize(("tile", "heads", "bf16", "fp8"), HOPPER, ids=lambda value: str(value))
def test_hoppers_attention_compiles_and_fits(tile: HopperTile, heads: int, bf16: bool, fp8: bool) -> None:
    kernel = hopper_kernel(tile, heads, bf16, fp8)
    assert kernel.shared_bytes + 1024 <= DeviceFacts.named("h200").shared_memory_bytes
    try:
        compiled = compile_source(kernel.source, kernel.capability)
    except NvrtcNotFoundError as error:
        pytest.skip(str(error))
    assert "serialized" not in compiled.log
    spilled = [
        int(line.split(" bytes spill stores")[0].split()[-1]) for line in compiled.log.splitlines() if "spill" in line
    ]
    assert spilled
    # Where three warp groups share the registers, the producers keep two words of theirs in local memory.
    assert max(spilled) <= (8 if tile.consumers == 2 else 0)


def test_windows_that_no_consumer_holds_are_refused() -> None:
    with pytest.raises(ValueError, match="do not hold 11 rows of 12 heads"):
        hopper_kernel(HopperTile(11, 2, 2), 12, True, False)


def test_units_divide_every_offset() -> None:
    spec = QsaSpec()
    pool = torch.empty(3, 2, 16, 2, 256, dtype=torch.bfloat16)
    cache = KvCache.interleaved(pool, torch.zeros(1, 1, dtype=torch.int32))
    assert place_unit(cache, spec) == 2048
    packed = KvCache.packed(torch.empty(3, 784, 1, 512), torch.zeros(1, 1, dtype=torch.int32))
    assert place_unit(packed, spec) == math.gcd(784 * 512, 4 * 512)
    assert Layout.of(cache, spec).last_place < PLACES


def test_pools_past_32_bits_of_units_are_refused() -> None:
    spec = QsaSpec(kv_heads=1, q_heads=1, head_dim=16)
    pool = torch.empty_strided((1 << 20, 4, 1, 16), (1 << 18, 17, 16, 1), dtype=FP8, device="meta")
    cache = KvCache(pool, pool, torch.zeros(1, 1, dtype=torch.int32))
    layout = Layout.of(cache, spec)
    assert layout.last_place == ((1 << 20) - 1 << 18) // 4 + 51 // 4
    assert "more than 32 bits address" in str(attend_refusal(spec, FP8, layout, DeviceFacts.named("a100")))


def test_hopper_refuses_what_its_copies_cannot_address() -> None:
    spec = QsaSpec(q_heads=12, kv_heads=1)
    q, table = torch.empty(2, 12, 256, dtype=torch.bfloat16), torch.zeros(1, 1, dtype=torch.int32)
    for elements, word in ((256, None), (257, "16 bytes"), (1 << 29, "32 bits")):
        pool = torch.empty_strided((2, 4, 1, 256), (4 * elements, elements, 256, 1), dtype=q.dtype, device="meta")
        layout = Layout.of(KvCache(pool, pool, table), spec, q)
        reason = hopper_refusal(spec, q.dtype, q.dtype, layout, DeviceFacts.named("h200"))
        assert reason is None if word is None else word in str(reason)


@pytest.mark.parametrize("group_rows", [1, 5, 32])
def test_capacity_holds_the_worst_case(group_rows: int) -> None:
    spec = QsaSpec()
    assert list_capacity(spec, group_rows, 64, 100_000) >= group_rows * 513
    assert list_capacity(spec, group_rows, 1, 2047) >= 513
    assert list_capacity(spec, group_rows, 64, 99) >= group_rows * 26
    assert list_capacity(spec, group_rows, 1, -1) == LIST_PAD
