"""The public calls on an NVIDIA GPU of compute capability 8.0 and newer: right, repeatable, capturable."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import flashqsa
from flashqsa import InputError, NoRouteError, QsaSpec, Rows, Selection, ops
from flashqsa.device import facts_of
from flashqsa.route import CANDIDATES
from flashqsa.testing import compare
from flashqsa.testing.cases import CASES, Case, named, spec_of
from flashqsa.testing.inputs import Inputs, build
from flashqsa.testing.verify import verify_case
from flashqsa.values import FP8

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
BF16, FP16 = torch.bfloat16, torch.float16
HERE = facts_of(GPU).kernel_sets if torch.cuda.is_available() else frozenset()

if torch.cuda.is_available() and "smxx" not in HERE:
    pytest.skip("the routes of smxx are for compute capability 8.0 and newer", allow_module_level=True)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_passes(case: Case) -> None:
    result = verify_case(case, "cuda")
    assert result.passed, str(result)
    assert all(route.startswith(("smxx:", "sm90:")) for route in result.routes)


PINNED = (
    "prefill-head-dim-256",
    "verify-model",
    "decode-16-fp8",
    "mid",
    "padding-first-middle-last",
    "1700-tokens-model",
)
PINS = sorted({str(c.route) for c in CANDIDATES["attend"] if c.route.kernel_set in HERE})


@pytest.mark.parametrize("pin", PINS)
@pytest.mark.parametrize("name", PINNED)
def test_a_pinned_route_is_right_or_refuses(name: str, pin: str) -> None:
    result = verify_case(named(name), "cuda", pin)
    if result.refused is not None:
        assert f"{pin}: " in result.refused
        return
    assert result.routes[1] == pin
    assert result.passed, str(result)


@pytest.mark.parametrize("pin", PINS)
@pytest.mark.parametrize("rows", [1, 40])
def test_a_query_of_nan_stays_nan(rows: int, pin: str) -> None:
    """In its own row and head, whole or cut into parts; -inf and 0 would read as a row that sees nothing."""
    spec = QsaSpec(q_heads=12, kv_heads=1)
    inputs = build(Case("nan", (rows,), (9001,), spec, FP16, FP16, regime="far", gate=False), "cuda")
    arguments = (inputs.kv_cache, inputs.selection, inputs.rows, spec, None, True)
    try:
        exact = flashqsa.sparse_attention(inputs.q, *arguments, route=pin)
    except NoRouteError as refused:
        if f"{pin}: " not in str(refused):
            raise
        return
    inputs.q[0, 0] = float("nan")
    output, lse = flashqsa.sparse_attention(inputs.q, *arguments, route=pin)
    assert bool(output[0, 0].isnan().all())
    assert bool(lse[0, 0].isnan())
    output[0, 0], lse[0, 0] = exact[0][0, 0], exact[1][0, 0]
    assert compare.same_bits(output, exact[0])
    assert compare.same_bits(lse, exact[1])


@contextmanager
def no_host_sync() -> Iterator[None]:
    """Raises where torch would wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def halves(inputs: Inputs, plan: flashqsa.Plan) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Selected blocks and their number, output and lse."""
    arguments = (inputs.index_q, inputs.index_cache, inputs.rows, inputs.spec)
    selection = inputs.selection or flashqsa.select_blocks(*arguments, plan=plan)
    output, lse = flashqsa.sparse_attention(
        inputs.q, inputs.kv_cache, selection, inputs.rows, inputs.spec, inputs.gate, True, plan=plan
    )
    return selection.blocks, selection.count, output, lse


def plan_of(inputs: Inputs, **how: object) -> flashqsa.Plan:
    arguments = {"index_cache": inputs.index_cache, "kv_cache": inputs.kv_cache, "q_dtype": inputs.q.dtype, **how}
    return flashqsa.plan_batch(inputs.rows, inputs.spec, **arguments)  # type: ignore[arg-type]


CAPTURED = (
    "decode-16",
    "decode-16-fp8",
    "verify-5",
    "prefill",
    "padding-first-middle-last",
    "far",
    "1700-tokens-model",
)


@pytest.mark.parametrize("name", CAPTURED)
@pytest.mark.parametrize("invariant", [False, True])
def test_a_captured_step_follows_its_inputs(name: str, invariant: bool) -> None:
    inputs = build(named(name), "cuda")
    plan = plan_of(inputs, batch_invariant=invariant)
    halves(inputs, plan)
    with no_host_sync():
        halves(inputs, plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = halves(inputs, plan)
    for step in range(3):
        inputs.q.mul_(-0.5)
        inputs.index_q.copy_(inputs.index_q.roll(1, 0))
        if step == 2:
            # Rows turn to padding, as a decode step does when requests end.
            inputs.rows.request[inputs.rows.count // 2 :] = -1
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        graph.replay()
        torch.cuda.synchronize()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        eager = halves(inputs, plan)
        assert all(compare.same_bits(a, b) for a, b in zip(captured, eager, strict=True))
    assert not captured[2][inputs.rows.count // 2 :].any()


def poison_memory(gigabytes: int = 2) -> None:
    """Fills memory that the allocator will hand out again with bytes that are NaN in every dtype."""
    torch.cuda.empty_cache()
    blocks = [torch.full((size,), 0xFF, dtype=torch.uint8, device=GPU) for size in (1 << 30,) * gigabytes]
    blocks += [torch.full((size,), 0xFF, dtype=torch.uint8, device=GPU) for size in (1 << 10, 1 << 16, 1 << 19) * 64]
    del blocks


@pytest.mark.parametrize(
    "name", ["prefill", "decode-16", "far", "verify-model", "padding-first-middle-last", "prefill-k-1"]
)
def test_workspaces_may_hold_anything(name: str) -> None:
    inputs = build(named(name), "cuda")
    plan = plan_of(inputs)
    torch.cuda.empty_cache()
    first = halves(inputs, plan)
    poison_memory()
    again = halves(inputs, plan)
    assert all(compare.same_bits(a, b) for a, b in zip(first, again, strict=True))


def test_a_small_workspace_changes_no_bit_of_a_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("long", (300, 5), (120_000, 80_000), spec_of(2, 1, head_dim=64), BF16, BF16, page_tokens=64, gate=False)
    inputs = build(replace(case, exact_scores=False), "cuda")
    wanted = flashqsa.select_blocks(inputs.index_q, inputs.index_cache, inputs.rows, inputs.spec)
    monkeypatch.setenv("FLASHQSA_WORKSPACE_MIB", "4")
    plan = plan_of(inputs)
    assert plan.select.workspace_bytes <= 4 << 20
    assert len(list(plan.select.chunks(inputs.rows.count))) > 3
    got = flashqsa.select_blocks(inputs.index_q, inputs.index_cache, inputs.rows, inputs.spec)
    # Both plans score 32 rows a tile, so not even last bits differ.
    assert compare.same_selection(got, wanted) is None


@pytest.mark.parametrize("cache_dtype", [torch.float32, FP16, BF16, FP8], ids=str)
def test_writing_then_reading_is_as_on_the_cpu(cache_dtype: torch.dtype) -> None:
    """A prompt in two chunks and a decode step, written through the public calls on both devices."""
    found = []
    spec = QsaSpec(q_heads=4, kv_heads=2, head_dim=32, index_dim=32, top_blocks=4)
    for device in ("cuda", "cpu"):
        made = torch.Generator().manual_seed(3)
        q_dtype = BF16 if cache_dtype == FP8 else cache_dtype
        scale = 0.25 if cache_dtype == FP8 else None
        table = torch.tensor([[3, 0, 5, 1], [2, 6, -1, 4]], dtype=torch.int32, device=device)
        index = flashqsa.IndexCache(
            torch.zeros(7, 4, 32, device=device).to(cache_dtype),
            table,
            scale,
            torch.zeros(2, 8, 32, dtype=q_dtype, device=device),
        )
        pool = torch.zeros(7, 2, 16, 2, 32, device=device).to(cache_dtype)
        cache = flashqsa.KvCache.interleaved(pool, table, scale, scale)
        weight = (torch.rand(32, generator=made) - 0.5).to(q_dtype).to(device)
        for queries, contexts in (((30, 9), (30, 9)), ((11, 14), (41, 23)), ((1, 1), (42, 24))):
            rows = Rows.from_lengths(queries, contexts, pad_to=sum(queries) + 2, device=device)
            raw = torch.randn(rows.count, 32, generator=made).to(q_dtype).to(device)
            new = torch.randn(2, rows.count, 2, 32, generator=made).to(q_dtype).to(device)
            angle = torch.rand(rows.count, 8, generator=made).to(device)
            flashqsa.write_kv(new[0], new[1], cache, rows, spec)
            flashqsa.write_index_keys(
                raw, index, rows, spec, norm_weight=weight, cos=angle.cos().to(q_dtype), sin=angle.sin().to(q_dtype)
            )
        found.append((index, pool))
    (index_gpu, pool_gpu), (index_cpu, pool_cpu) = found
    assert compare.same_bits(pool_gpu.cpu().view(torch.uint8), pool_cpu.view(torch.uint8))
    assert index_gpu.raw_keys is not None
    assert index_cpu.raw_keys is not None
    assert compare.same_bits(index_gpu.raw_keys.cpu(), index_cpu.raw_keys)
    # The sum of squares is taken in another order, so a key may round to the neighbouring number.
    unit = {torch.float32: 1e-6, FP16: 2**-10, BF16: 2**-7, FP8: 2**-3}[cache_dtype]
    torch.testing.assert_close(index_gpu.keys.cpu().float(), index_cpu.keys.float(), rtol=unit, atol=1e-6)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_code_sees_one_operator_per_call(mode: str) -> None:
    inputs = build(named("decode-16"), "cuda")
    cache, index, rows = inputs.kv_cache, inputs.index_cache, inputs.rows
    spec = ops.pack_spec(inputs.spec)

    def step(index_q: Tensor, q: Tensor, gate: Tensor) -> Tensor:
        output, _ = torch.ops.flashqsa.qsa_attention(
            index_q * 1.0, q * 1.0, index.keys, index.page_table, index.scale, cache.keys, cache.values,
            cache.page_table, None, None, rows.request, rows.position, rows.max_position, spec, gate,
        )  # fmt: skip
        doubled: Tensor = output * 2.0
        return doubled

    assert inputs.gate is not None
    compiled = torch.compile(step, fullgraph=True, mode=mode)
    for scale in (1.0, -1.0, 0.5):
        arguments = (inputs.index_q, inputs.q * scale, inputs.gate)
        with torch.no_grad():
            wanted = step(*arguments)
            got = compiled(*arguments)
        assert compare.same_bits(got, wanted)


@pytest.mark.parametrize("name", ["select_blocks", "sparse_attention", "qsa_attention", "write_kv", "write_index_keys"])
def test_operators_pass_torchs_own_check(name: str) -> None:
    inputs = build(named("verify-5"), "cuda")
    cache, index, rows = inputs.kv_cache, inputs.index_cache, inputs.rows
    spec = ops.pack_spec(inputs.spec)
    where = (rows.request, rows.position, rows.max_position, spec)
    chosen = flashqsa.select_blocks(inputs.index_q, index, rows, inputs.spec)
    paged = (cache.keys, cache.values, cache.page_table, None, None)
    raw = inputs.index_q[:, 0].contiguous()
    ring = torch.zeros(index.requests, 8, raw.shape[1], dtype=raw.dtype, device=GPU)
    angle = torch.rand(rows.count, 8, device=GPU).to(raw.dtype)
    new = torch.randn(2, rows.count, inputs.spec.kv_heads, inputs.spec.head_dim, device=GPU).to(cache.keys.dtype)
    arguments = {
        "select_blocks": (inputs.index_q, index.keys, index.page_table, index.scale, *where),
        "sparse_attention": (inputs.q, *paged, chosen.blocks, chosen.count, *where, inputs.gate),
        "qsa_attention": (
            inputs.index_q, inputs.q, index.keys, index.page_table, index.scale, *paged, *where, inputs.gate
        ),
        "write_kv": (new[0], new[1], *paged, *where),
        "write_index_keys": (
            raw, index.keys, index.page_table, index.scale, ring, *where, torch.zeros_like(raw[0]), angle, angle, 1e-6
        ),
    }[name]  # fmt: skip
    torch.library.opcheck(getattr(torch.ops.flashqsa, name).default, arguments)


def test_what_no_gpu_route_serves_says_why() -> None:
    spec = QsaSpec(q_heads=2, kv_heads=1, head_dim=96, index_dim=32, top_blocks=4)
    rows = Rows.from_lengths([5], [40], device=GPU)
    pool = torch.zeros(3, 2, 16, 1, 96, dtype=FP16, device=GPU)
    cache = flashqsa.KvCache.interleaved(pool, torch.tensor([[0, 1, 2]], dtype=torch.int32, device=GPU))
    q = torch.zeros(5, 2, 96, dtype=FP16, device=GPU)
    selection = Selection(
        torch.full((5, 4), -1, dtype=torch.int32, device=GPU), torch.zeros(5, dtype=torch.int32, device=GPU)
    )
    with pytest.raises(NoRouteError, match="head_dim must be a power of two from 16 to 256, got 96") as caught:
        flashqsa.sparse_attention(q, cache, selection, rows, spec)
    assert len(caught.value.refused) == len(CANDIDATES["attend"])


def test_a_plan_for_aligned_heads_refuses_others() -> None:
    if "sm90" not in HERE:
        pytest.skip("only Hopper's own kernel minds")
    inputs = build(named("prefill-head-dim-256"), "cuda")
    plan = plan_of(inputs)
    assert plan.attend_decision.route.kernel_set == "sm90"
    wide = torch.zeros(*inputs.q.shape[:2], inputs.spec.head_dim + 4, dtype=inputs.q.dtype, device=GPU)
    odd = wide[..., : inputs.spec.head_dim].copy_(inputs.q)
    selection = flashqsa.select_blocks(inputs.index_q, inputs.index_cache, inputs.rows, inputs.spec)
    rest = (inputs.kv_cache, selection, inputs.rows, inputs.spec, inputs.gate)
    with pytest.raises(InputError, match=r"plan: wanted one whose route these tensors can take; got sm90:.*16 bytes"):
        flashqsa.sparse_attention(odd, *rest, plan=plan)
    right = flashqsa.sparse_attention(inputs.q, *rest)
    other = flashqsa.sparse_attention(odd, *rest)
    assert isinstance(right, Tensor)
    assert isinstance(other, Tensor)
    assert float((right.float() - other.float()).abs().max()) < 2e-2


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU")
def test_calls_run_where_their_tensors_are() -> None:
    results = []
    for device in ("cuda:0", "cuda:1"):
        inputs = build(named("verify-model"), device)
        results.append([part.cpu() for part in halves(inputs, plan_of(inputs))])
    assert torch.cuda.current_device() == 0
    assert all(compare.same_bits(a, b) for a, b in zip(*results, strict=True))
