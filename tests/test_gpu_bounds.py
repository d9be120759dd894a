"""What GPU calls may not do with numbers past their bounds, and what their plans keep to."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="scores of smxx are written in Triton")

from flashqsa import Call, DeviceFacts, KvCache, NoRouteError, QsaSpec, Rows, choose_route
from flashqsa.attend_shape import Layout, list_capacity
from flashqsa.kernels.nvrtc.worklist import worklist_kernel
from flashqsa.kernels.smxx import attend as smxx_attend
from flashqsa.plan import make_plan
from flashqsa.testing import compare
from flashqsa.testing.cases import Case, spec_of
from flashqsa.testing.inputs import Inputs, build
from flashqsa.values import FP8
from tests import smxx_emulate
from tests.smxx_lists import poisoned_lists
from tests.test_smxx_score import DEVICE, FP16, WINDOWS, poisoned_scores

H200 = DeviceFacts.named("h200")
HALF = torch.float16
GPUS = ("v100", "rtx8000", "a100", "rtx4090", "h200", "rtx5090")


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if smxx_emulate.CXX is None:
        pytest.skip("no g++ here to compile the kernel for the CPU")
    return smxx_emulate.build_emulator(tmp_path_factory.mktemp("worklist"))


BAD_ROWS = (2**31 - 1, 2**31 - 2, 1 << 20, 64)
"""Positions past a bound of 60, of which the last lies in the block after it."""


@pytest.mark.parametrize("bad", BAD_ROWS)
@pytest.mark.parametrize("group_rows", [1, 4])
def test_worklists_leave_out_rows_past_the_bound(bad: int, group_rows: int, emulator: ctypes.CDLL) -> None:
    spec = QsaSpec(q_heads=1, kv_heads=1, head_dim=16, top_blocks=4)
    pool, table = torch.zeros(4, 2, 16, 1, 16, dtype=HALF), torch.arange(4, dtype=torch.int32)[None]
    cache = KvCache.interleaved(pool, table)
    request = torch.zeros(4, dtype=torch.int32)
    rows = Rows(request, torch.tensor([3, 60, bad, bad], dtype=torch.int32), 60)
    plain = Rows(torch.tensor([0, 0, -1, -1], dtype=torch.int32), rows.position, 60)
    found = []
    for given in (rows, plain, replace(rows, request=torch.tensor([0, 0, 7, 1], dtype=torch.int32))):
        lists = poisoned_lists(given, spec, cache, group_rows)
        smxx_emulate.emulate(emulator, lists, None, given, spec, cache, 32)
        found.append(lists)
    for other in found[1:]:
        assert torch.equal(found[0].entries, other.entries)
        assert torch.equal(found[0].token_masks, other.token_masks)
        assert torch.equal(found[0].places, other.places)


def test_worklists_take_pages_past_the_cache_for_holes(emulator: ctypes.CDLL) -> None:
    spec = QsaSpec(q_heads=1, kv_heads=1, head_dim=16, top_blocks=4)
    rows = Rows.from_lengths([2], [30])
    found = []
    for page in (-1, 4, 2**31 - 1):
        table = torch.tensor([[0, page]], dtype=torch.int32)
        cache = KvCache.interleaved(torch.zeros(4, 2, 16, 1, 16, dtype=HALF), table)
        lists = poisoned_lists(rows, spec, cache, 2)
        smxx_emulate.emulate(emulator, lists, None, rows, spec, cache, 32)
        found.append(lists)
    assert int(found[0].entries[0]) == 8
    for other in found[1:]:
        assert torch.equal(found[0].token_masks, other.token_masks)
        assert torch.equal(found[0].places, other.places)


def scored(inputs: Inputs, rows: Rows, monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Tensor, torch.Tensor]:
    found = poisoned_scores(replace(inputs, rows=rows), WINDOWS[1], monkeypatch)
    return found.values.cpu(), found.visible.cpu()


def test_scores_leave_out_rows_past_the_bound_and_pages_past_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = build(Case("bound", (4,), (60,), spec_of(3, 1, top_blocks=4), FP16, FP16), DEVICE)
    request, position, bound = inputs.rows.request, inputs.rows.position, inputs.rows.max_position
    wanted, seen = scored(inputs, Rows(torch.where(position > 57, -1, request), position, bound), monkeypatch)
    for bad in BAD_ROWS:
        values, visible = scored(
            inputs, Rows(request, torch.where(position > 57, bad, position).to(torch.int32), bound), monkeypatch
        )
        assert compare.same_bits(values, wanted)
        assert torch.equal(visible, seen)
    table = inputs.index_cache.page_table
    hole = replace(
        inputs, index_cache=replace(inputs.index_cache, page_table=table.index_fill(1, table.new_zeros(1).long(), -1))
    )
    past = replace(
        inputs,
        index_cache=replace(inputs.index_cache, page_table=table.index_fill(1, table.new_zeros(1).long(), 1 << 30)),
    )
    assert compare.same_bits(scored(hole, inputs.rows, monkeypatch)[0], scored(past, inputs.rows, monkeypatch)[0])


def test_a_growing_bound_does_not_load_a_kernel_at_each_step() -> None:
    spec = QsaSpec()
    kernels = {
        worklist_kernel((9, 0), position // 4 + 1, min(2048, list_capacity(spec, rows, 64, position))).shared_bytes
        for position in range(0, 1 << 20, 97)
        for rows in (1, 4, 10)
    }
    assert len(kernels) <= 40


@pytest.mark.parametrize("name", GPUS)
def test_rows_longer_than_the_exact_top_k_ranks_are_refused(name: str) -> None:
    facts = DeviceFacts.named(name)
    longest = Call(QsaSpec(), 16, 1, (1 << 20) - 1, HALF, HALF)
    assert choose_route("select", longest, facts).route.mode == "plain"
    with pytest.raises(NoRouteError, match="rows of 524288 blocks: the exact top-k ranks at most 262144"):
        choose_route("select", replace(longest, spec=QsaSpec(block_tokens=2)), facts)


def test_worklists_that_do_not_fit_a_device_are_refused() -> None:
    call = Call(QsaSpec(block_tokens=1), 16, 1, (1 << 20) - 1, HALF, HALF, selection_given=True)
    with pytest.raises(NoRouteError, match="worklists of 1048576 blocks need 217616 bytes of shared memory"):
        choose_route("attend", call, DeviceFacts.named("rtx4090"))
    assert choose_route("attend", call, H200).route.kernel_set == "smxx"
    for name in GPUS:
        whole = replace(call, spec=QsaSpec())
        assert choose_route("attend", whole, DeviceFacts.named(name)).route.mode == "splitk"


@pytest.mark.parametrize("mib", [1, 16, 128])
def test_attention_keeps_to_the_workspace_limit(mib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHQSA_WORKSPACE_MIB", str(mib))
    for heads in ((24, 2), (9, 1), (64, 8)):
        spec = QsaSpec(q_heads=heads[0], kv_heads=heads[1])
        for rows, requests, bound in ((1, 1, 32_767), (65_537, 3, 100), (8925, 1, 37_999), (8634, 1, 37_999)):
            call = Call(spec, rows, requests, bound, HALF, HALF, selection_given=True)
            for name in GPUS:
                assert make_plan(call, DeviceFacts.named(name)).attend.workspace_bytes <= mib << 20


def test_units_that_32_bits_do_not_hold_are_left_to_triton() -> None:
    call = Call(QsaSpec(), 1616, 1, 9999, HALF, HALF, layout=Layout(unit_bytes=1 << 32), selection_given=True)
    decision = choose_route("attend", call, H200)
    assert str(decision.route) == "smxx:grouped"
    assert any("more than 32 bits address" in refusal.reason for refusal in decision.refused)


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, torch.float32])
def test_a_scale_beside_a_tensor_is_fp32_whatever_torchs_default(default: torch.dtype) -> None:
    pool = torch.zeros(1, 2, 4, 2, 16, dtype=torch.float32).to(FP8)
    cache = KvCache.interleaved(pool, torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0.5, 2.0]), 0.3)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(default)
        k_scale, v_scale = smxx_attend._scales(cache, QsaSpec(q_heads=2, kv_heads=2, head_dim=16))
    finally:
        torch.set_default_dtype(before)
    assert isinstance(k_scale, torch.Tensor)
    assert isinstance(v_scale, torch.Tensor)
    assert v_scale.dtype == torch.float32
    assert v_scale.tolist() == pytest.approx([0.3, 0.3], abs=1e-7)
