"""The routes and plans of GPUs, which need not be here: facts stand for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from flashqsa import Call, DeviceFacts, NoRouteError, choose_route
from flashqsa.attend_shape import Layout, Sm7xTile
from flashqsa.plan import make_plan
from tests.test_route_plan import DECODE, PREFILL, SHORT, SPEC, modes

HALF: dict[str, Any] = {"q_dtype": torch.bfloat16, "cache_dtype": torch.bfloat16}
FP8_CACHE: dict[str, Any] = {"q_dtype": torch.float16, "cache_dtype": torch.float8_e4m3fn}
VERIFY = replace(DECODE, rows=64)


@pytest.mark.parametrize(
    ("call", "hopper", "others"),
    [
        (replace(PREFILL, **HALF), "sm90:grouped", "smxx:grouped"),
        (replace(PREFILL, **FP8_CACHE), "sm90:grouped", "smxx:grouped"),
        (replace(PREFILL, **FP8_CACHE, index_q_dtype=torch.float32), "sm90:grouped", "smxx:grouped"),
        (PREFILL, "smxx:grouped", "smxx:grouped"),  # FP32
        (replace(PREFILL, **HALF, layout=Layout(alignment_bytes=8)), "smxx:grouped", "smxx:grouped"),
        (replace(PREFILL, **HALF, layout=Layout(token_bytes=1 << 30)), "smxx:grouped", "smxx:grouped"),
        (replace(PREFILL, **HALF, spec=replace(SPEC, head_dim=128)), "smxx:grouped", "smxx:grouped"),
        (replace(PREFILL, **HALF, batch_invariant=True), "sm90:xqa", "smxx:xqa"),
        (replace(DECODE, **HALF, batch_invariant=True), "sm90:xqa", "smxx:xqa"),
        (replace(PREFILL, batch_invariant=True), "smxx:xqa", "smxx:xqa"),  # FP32
        (replace(PREFILL, **FP8_CACHE, batch_invariant=True), "sm90:xqa", "smxx:xqa"),
        (replace(DECODE, **HALF), "smxx:splitk", "smxx:splitk"),
        (replace(DECODE, **FP8_CACHE), "sm90:splitk", "smxx:splitk"),
        (replace(DECODE, **HALF, spec=replace(SPEC, kv_heads=1)), "sm90:splitk", "smxx:splitk"),  # 24 heads
        (replace(VERIFY, **HALF), "sm90:splitk", "smxx:splitk"),
        (replace(PREFILL, **HALF, rows=16), "sm90:splitk", "smxx:splitk"),
        (replace(PREFILL, **HALF, rows=17), "sm90:grouped", "smxx:grouped"),
        (replace(SHORT, **HALF), "sm90:dense", "smxx:dense"),
        (replace(SHORT, **HALF, selection_given=True), "sm90:grouped", "smxx:grouped"),
        (replace(DECODE, **HALF, max_position=9), "smxx:dense", "smxx:dense"),
    ],
)
def test_the_routes_of_gpus(call: Call, hopper: str, others: str) -> None:
    for name in ("a100", "rtx3090", "rtx4090", "l40s", "h100", "h200", "b200", "rtx5090", "gb10"):
        facts = DeviceFacts.named(name)
        selects = "smxx:everything" if call.selects_everything else "smxx:plain"
        one_each = call.rows == call.requests and call.q_dtype == torch.bfloat16 and not call.batch_invariant
        if facts.capability == (9, 0) and one_each and not call.selects_everything:
            selects = "sm90:fused"
        assert modes(call, facts) == (selects, hopper if facts.capability == (9, 0) else others)


FP16: dict[str, Any] = {"q_dtype": torch.float16, "cache_dtype": torch.float16}


@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        (replace(PREFILL, **FP16), ("sm7x:plain", "sm7x:grouped")),
        (replace(PREFILL, **FP8_CACHE), ("sm7x:plain", "sm7x:grouped")),
        (replace(DECODE, **FP16), ("sm7x:plain", "sm7x:splitk")),
        (replace(VERIFY, **FP16), ("sm7x:plain", "sm7x:splitk")),
        (replace(SHORT, **FP16), ("sm7x:everything", "sm7x:dense")),
        (replace(PREFILL, **FP16, batch_invariant=True), ("sm7x:plain", "sm7x:xqa")),
    ],
)
def test_the_routes_of_volta_and_turing(call: Call, wanted: tuple[str, str]) -> None:
    for name in ("v100", "t4", "rtx2080ti", "rtx8000"):
        facts = DeviceFacts.named(name)
        assert modes(call, facts) == wanted
        plan = make_plan(call, facts)
        shape, capability = plan.attend.gpu()
        assert capability == facts.capability
        assert isinstance(shape.tile, Sm7xTile)
        assert shape.tile.shared_bytes <= facts.shared_memory_bytes
        assert plan.select.workspace_bytes <= 128 << 20


@pytest.mark.parametrize(
    ("call", "stage", "reason"),
    [
        (replace(PREFILL, **HALF), "attend", "sm_70 has no BF16 tensor cores"),
        (replace(PREFILL, **HALF), "select", "BF16 index queries: sm_70 has no tensor cores for BF16, use FP16"),
        (PREFILL, "attend", "got float32 and float32"),
        (replace(PREFILL, **FP16, spec=replace(SPEC, head_dim=96)), "attend", "made for heads of 64, 128 or 256"),
        (replace(PREFILL, **FP16, layout=Layout(alignment_bytes=8)), "attend", "16 bytes, got multiples of 8"),
    ],
)
def test_volta_refuses_by_name(call: Call, stage: Any, reason: str) -> None:
    with pytest.raises(NoRouteError, match=reason):
        choose_route(stage, call, DeviceFacts.named("v100"))


def test_each_device_of_a_mixed_machine_asks_its_own_routes() -> None:
    """A V100 and a Quadro RTX 8000 in one machine, and an H200 beside: FP16 runs on all, BF16 on the new one alone."""
    call = replace(PREFILL, **FP16)
    found = {name: modes(call, DeviceFacts.named(name))[1] for name in ("v100", "rtx8000", "h200")}
    assert found == {"v100": "sm7x:grouped", "rtx8000": "sm7x:grouped", "h200": "sm90:grouped"}
    tiles = {name: make_plan(call, DeviceFacts.named(name)).attend.gpu()[0].tile for name in ("v100", "rtx8000")}
    assert tiles["v100"] != tiles["rtx8000"]
    with pytest.raises(NoRouteError):
        make_plan(replace(PREFILL, **HALF), DeviceFacts.named("rtx8000"))
    # Half of Turing's shared memory: what a device lacks is its own reason.
    small = replace(DeviceFacts.named("t4"), shared_memory_bytes=48 << 10)
    with pytest.raises(NoRouteError, match="a program needs 65536 bytes of shared memory, the device has 49152"):
        choose_route("attend", call, small)


@pytest.mark.parametrize(
    ("call", "pin", "reason"),
    [
        (replace(PREFILL, **HALF, layout=Layout(alignment_bytes=4)), "sm90", "16 bytes, got multiples of 4"),
        (PREFILL, "sm90:grouped", "got float32 and float32"),
        (replace(PREFILL, **HALF), "splitk", "1616 rows per request on average: made for at most 16"),
        (replace(PREFILL, **HALF, batch_invariant=True), "grouped", "batch_invariant"),
        (replace(SHORT, **HALF, batch_invariant=True), "dense", "batch_invariant"),
        (replace(PREFILL, **HALF, layout=Layout(last_place=1 << 31)), "smxx", "more than 32 bits address"),
        (replace(PREFILL, **HALF, spec=replace(SPEC, head_dim=96)), "smxx:xqa", "head_dim must be a power of two"),
        (replace(PREFILL, **HALF, spec=replace(SPEC, index_dim=96)), "plain", "index_dim must be a power of two"),
        (replace(PREFILL, **HALF), "cpu:xqa", "the cpu kernels have no image for H200"),
    ],
)
def test_a_route_of_gpus_that_cannot_serve_says_why(call: Call, pin: str, reason: str) -> None:
    with pytest.raises(NoRouteError, match=reason):
        make_plan(call, DeviceFacts.named("h200"), pin)


def test_a_pin_takes_what_would_be_passed_over() -> None:
    decode = replace(DECODE, **HALF)
    h200 = DeviceFacts.named("h200")
    assert modes(decode, h200, "sm90") == ("sm90:fused", "sm90:splitk")
    refused = {str(r.route): r.reason for r in choose_route("attend", decode, h200).refused}
    assert "faster in smxx" in refused["sm90:splitk"]


def test_what_a_machine_lacks_is_the_reason() -> None:
    facts = replace(
        DeviceFacts.named("a100"), kernel_sets=frozenset({"reference"}), missing=(("smxx", "triton is not installed"),)
    )
    with pytest.raises(NoRouteError, match="smxx:grouped: triton is not installed"):
        choose_route("attend", replace(PREFILL, **HALF), facts)


def test_one_stage_without_a_route_leaves_the_other_its_plan() -> None:
    call = replace(PREFILL, **HALF, spec=replace(SPEC, head_dim=96))
    plan = make_plan(call, DeviceFacts.named("h200"), stages=("select",))
    assert str(plan.select_decision.route) == "smxx:plain"
    with pytest.raises(NoRouteError, match="head_dim must be a power of two"):
        _ = plan.attend_decision
    with pytest.raises(NoRouteError):
        make_plan(call, DeviceFacts.named("h200"))


def test_a_gpus_workspace_is_what_its_stages_take() -> None:
    for rows, max_position in ((1616, 183_999), (8192, 131_071), (1616, (1 << 20) - 1), (64, 32_767)):
        for heads in ((24, 2), (12, 1), (6, 1)):
            spec = replace(SPEC, q_heads=heads[0], kv_heads=heads[1])
            plan = make_plan(Call(spec, rows, 1, max_position, **HALF, selection_given=True), DeviceFacts.named("h200"))
            assert plan.select.workspace_bytes <= 128 << 20
            chunks = list(plan.select.chunks(rows))
            assert chunks[-1][1] == rows
            if plan.select.fused is None:
                assert all(plan.select.chunk_config(stop - start).topk.capability == (9, 0) for start, stop in chunks)
            shape, _ = plan.attend.gpu()
            lists = min(shape.chunk_rows(spec, 128 << 20), rows) / shape.tile.group_rows * shape.window_bytes(spec)
            assert lists <= 128 << 20
            assert plan.attend.workspace_bytes >= lists
