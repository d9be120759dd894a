"""On an NVIDIA GPU: what the package knows of it, which routes it has, and that the reference runs there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flashqsa import (
    IndexCache,
    InputError,
    KvCache,
    NoRouteError,
    QsaSpec,
    Rows,
    choose_route,
    qsa_attention,
    select_blocks,
    sparse_attention,
    write_index_keys,
    write_kv,
)
from flashqsa.device import KNOWN_DEVICES, facts_of
from flashqsa.route import CANDIDATES, Call, Stage
from flashqsa.values import FP8
from tests.test_lint import loaded_by

pytestmark = pytest.mark.gpu

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SPEC = QsaSpec(q_heads=6, kv_heads=2, head_dim=64, index_dim=32, top_blocks=4)
TABLE = torch.tensor([[6, 0, 3, 1], [5, 2, -1, 4]], dtype=torch.int32)
"""Seven pages of 16 tokens for two requests; the second has a hole at its tokens 32..47."""


def call_on(device: torch.device, cache_dtype: torch.dtype) -> tuple[Tensor, Tensor, IndexCache, KvCache, Rows, Tensor]:
    """The same call on any device: a prefill of 24 rows, a decode row past a hole, and two rows of padding.

    Index queries and keys are small whole numbers, so that scores are exact and selections comparable by equality.
    """
    made = torch.Generator().manual_seed(0)
    scale = 0.5 if cache_dtype == FP8 else None
    q_dtype = torch.bfloat16 if cache_dtype == FP8 else cache_dtype

    def whole(*shape: int) -> Tensor:
        return torch.randint(-3, 4, shape, generator=made).float()

    rows = Rows.from_lengths([24, 1], [56, 61], pad_to=27, device=device)
    index_cache = IndexCache(whole(7, 4, 32).to(cache_dtype).to(device), TABLE.to(device), scale)
    pool = torch.randn(7, 2, 16, 2, 64, generator=made).to(cache_dtype).to(device)
    kv_cache = KvCache.interleaved(pool, TABLE.to(device), scale, scale)
    index_q = whole(27, 4, 32).to(q_dtype).to(device)
    q, gate = torch.randn(2, 27, 6, 64, generator=made).to(q_dtype).to(device)
    return index_q, q, index_cache, kv_cache, rows, gate


def test_facts_are_those_of_the_device() -> None:
    facts = facts_of(GPU)
    assert facts.kind == "cuda"
    assert facts.capability == torch.cuda.get_device_capability(GPU)
    assert facts.name == torch.cuda.get_device_name(GPU)
    assert facts.multiprocessors > 0
    assert facts.shared_memory_bytes >= 48 << 10
    assert facts.memory_bytes == torch.cuda.mem_get_info(GPU)[1]
    assert "reference" in facts.kernel_sets


def test_the_table_of_known_devices_agrees_with_the_driver() -> None:
    facts = facts_of(GPU)
    known = [device for device in KNOWN_DEVICES.values() if device.name in facts.name]
    if not known:
        pytest.skip(f"{facts.name} is not in KNOWN_DEVICES")
    assert (known[0].capability, known[0].shared_memory_bytes) == (facts.capability, facts.shared_memory_bytes)


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.float16, torch.bfloat16, FP8], ids=str)
def test_the_reference_agrees_with_itself_on_the_cpu(cache_dtype: torch.dtype) -> None:
    index_q, q, index_cache, kv_cache, rows, gate = call_on(GPU, cache_dtype)
    selection = select_blocks(index_q, index_cache, rows, SPEC, route="reference")
    output, lse = sparse_attention(q, kv_cache, selection, rows, SPEC, gate, True, route="reference")
    index_q, q, index_cache, kv_cache, rows, gate = call_on(CPU, cache_dtype)
    wanted = select_blocks(index_q, index_cache, rows, SPEC, route="reference")
    exact, exact_lse = sparse_attention(q, kv_cache, wanted, rows, SPEC, gate, True, route="reference")
    assert output.device == lse.device == selection.blocks.device == GPU
    assert torch.equal(selection.blocks.cpu(), wanted.blocks)
    assert torch.equal(selection.count.cpu(), wanted.count)
    # FP64 inside on both sides: only the rounding of a number between two neighbours may fall the other way.
    torch.testing.assert_close(output.cpu(), exact, rtol=2 * torch.finfo(exact.dtype).eps, atol=1e-6)
    torch.testing.assert_close(lse.cpu(), exact_lse, rtol=1e-6, atol=1e-6)
    assert not output[25:].any()


def test_writing_agrees_with_writing_on_the_cpu() -> None:
    written = []
    for device in (GPU, CPU):
        _, _, index_cache, kv_cache, rows, _ = call_on(device, torch.float32)
        made = torch.Generator().manual_seed(1)
        raw_keys, new = torch.randn(27, 32, generator=made), torch.randn(2, 27, 2, 64, generator=made)
        angles, weight = torch.rand(27, 8, generator=made), torch.rand(32, generator=made)
        index_cache = replace(index_cache, raw_keys=torch.zeros(2, 8, 32, device=device))
        write_kv(new[0].to(device), new[1].to(device), kv_cache, rows, SPEC)
        write_index_keys(
            raw_keys.to(device),
            index_cache,
            rows,
            SPEC,
            norm_weight=weight.to(device),
            cos=angles.cos().to(device),
            sin=angles.sin().to(device),
        )
        written.append((index_cache, kv_cache))
    (index_gpu, kv_gpu), (index_cpu, kv_cpu) = written
    assert torch.equal(kv_gpu.keys.cpu(), kv_cpu.keys)
    assert torch.equal(kv_gpu.values.cpu(), kv_cpu.values)
    torch.testing.assert_close(index_gpu.keys.cpu(), index_cpu.keys, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", ["select", "attend"])
def test_routes_match_the_compute_capability(stage: Stage) -> None:
    call = Call(SPEC, rows=27, requests=2, max_position=60, q_dtype=torch.float16, cache_dtype=torch.float16)
    facts = facts_of(GPU)
    if "smxx" in facts.kernel_sets:
        assert choose_route(stage, call, facts).route.kernel_set in ("smxx", "sm90")
        facts = replace(facts, kernel_sets=frozenset({"reference"}))
    with pytest.raises(NoRouteError) as refused:
        choose_route(stage, call, facts)
    assert all(f"{candidate.route}: " in str(refused.value) for candidate in CANDIDATES[stage])


def test_a_public_call_runs_or_says_that_it_has_no_route() -> None:
    index_q, q, index_cache, kv_cache, rows, gate = call_on(GPU, torch.float16)
    if "smxx" in facts_of(GPU).kernel_sets:
        assert qsa_attention(index_q, q, index_cache, kv_cache, rows, SPEC, gate).shape == q.shape  # type: ignore[union-attr]
        return
    with pytest.raises(NoRouteError, match=facts_of(GPU).arch):
        select_blocks(index_q, index_cache, rows, SPEC)
    with pytest.raises(NoRouteError, match=facts_of(GPU).arch):
        qsa_attention(index_q, q, index_cache, kv_cache, rows, SPEC, gate)


def test_arguments_on_two_devices_are_refused_by_name() -> None:
    index_q, q, index_cache, kv_cache, rows, gate = call_on(GPU, torch.float16)
    on_cpu = Rows(rows.request.cpu(), rows.position.cpu(), rows.max_position)
    with pytest.raises(InputError, match=r"rows\.request: wanted device cuda:0; got cpu"):
        qsa_attention(index_q, q, index_cache, kv_cache, on_cpu, SPEC, gate)


def test_importing_the_public_names_leaves_the_gpu_alone() -> None:
    assert "cuda" not in loaded_by("import torch\nbefore = set(sys.modules)\nfrom flashqsa import *")
    assert "cuda" in loaded_by("import torch\ntorch.zeros(1, device='cuda')")
