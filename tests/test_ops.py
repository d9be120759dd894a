"""The torch.library operators: schemas, fakes and one graph under torch.compile."""

from __future__ import annotations

import pytest
import torch

import flashqsa
from flashqsa import capture, ops
from flashqsa.testing import compare
from flashqsa.values import FP8, IndexCache, KvCache, QsaSpec, Rows
from tests.nvrtc_emulate import same_memory
from tests.prepare_calls import arguments_of, operands_of

SPEC = QsaSpec(q_heads=6, kv_heads=2, head_dim=64, index_heads=2, index_dim=32, top_blocks=4)


def small_call(cache_dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    rows = Rows.from_lengths([3, 1, 0], [40, 23, 9], pad_to=6)
    table = torch.tensor([[4, 0, 2], [1, 5, 3], [6, 7, 8]], dtype=torch.int32)
    scale = torch.tensor([0.5, 2.0]) if cache_dtype == FP8 else None
    kv = KvCache(normal(9, 16, 2, 64).to(cache_dtype), normal(9, 16, 2, 64).to(cache_dtype), table, scale, scale)
    index = IndexCache(normal(9, 4, 32), table, raw_keys=normal(3, 48, 32))
    return normal(6, 2, 32), normal(6, 6, 64), normal(6, 6, 64), index, kv, rows


def select_operands(index_q, index, rows):
    return (
        index_q,
        index.keys,
        index.page_table,
        index.scale,
        rows.request,
        rows.position,
        rows.max_position,
        ops.pack_spec(SPEC),
    )


def attend_operands(q, kv, selection, rows, gate):
    cache = (kv.keys, kv.values, kv.page_table, kv.k_scale, kv.v_scale)
    place = (rows.request, rows.position, rows.max_position, ops.pack_spec(SPEC))
    return (q, *cache, selection.blocks, selection.count, *place, gate)


def qsa_operands(index_q, q, index, kv, rows, gate):
    caches = (index.keys, index.page_table, index.scale, kv.keys, kv.values, kv.page_table, kv.k_scale, kv.v_scale)
    return (index_q, q, *caches, rows.request, rows.position, rows.max_position, ops.pack_spec(SPEC), gate)


def write_operands(index, kv, rows):
    generator = torch.Generator().manual_seed(9)
    raw, weight = torch.randn(6, 32, generator=generator), torch.randn(32, generator=generator)
    cos, sin = torch.randn(2, 6, 16, generator=generator)
    place = (rows.request, rows.position, rows.max_position, ops.pack_spec(SPEC))
    index_part = (raw, index.keys, index.page_table, index.scale, index.raw_keys, *place, weight, cos, sin, 1e-6)
    new = torch.randn(2, 6, 2, 64, generator=generator)
    return index_part, (new[0], new[1], kv.keys, kv.values, kv.page_table, kv.k_scale, kv.v_scale, *place)


def test_spec_survives_packing():
    assert QsaSpec(*ops.pack_spec(SPEC)) == SPEC


@pytest.mark.parametrize("cache_dtype", [torch.float32, FP8])
def test_operators_return_what_the_calls_return(cache_dtype):
    index_q, q, gate, index, kv, rows = small_call(cache_dtype)
    selection = flashqsa.select_blocks(index_q, index, rows, SPEC)
    blocks, count = ops.select_blocks(*select_operands(index_q, index, rows))
    assert torch.equal(blocks, selection.blocks)
    assert torch.equal(count, selection.count)
    output, lse = flashqsa.sparse_attention(q, kv, selection, rows, SPEC, gate, return_lse=True)
    for found in (
        ops.sparse_attention(*attend_operands(q, kv, selection, rows, gate)),
        ops.qsa_attention(*qsa_operands(index_q, q, index, kv, rows, gate)),
    ):
        assert torch.equal(found[0], output)
        assert torch.equal(found[1], lse)


def test_runs_reach_the_calls():
    index_q, q, gate, index, kv, rows = small_call()
    select, both = select_operands(index_q, index, rows), qsa_operands(index_q, q, index, kv, rows, gate)
    for operator, operands in ((ops.select_blocks, select), (ops.qsa_attention, both)):
        noted: list[capture.Noted] = []
        with capture.listening(noted.append):
            wanted, found = operator(*operands), operator(*operands, ops.pack_runs(rows.runs))
            assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
            operator(*operands, [])
        runs = [call.rows.runs for call in noted]
        assert (runs[0], runs[len(runs) // 3], runs[-1]) == (None, rows.runs, ())
        with pytest.raises(flashqsa.InputError, match=r"rows\.runs: wanted requests below 3; got 5"):
            operator(*operands, [5, 0, 3, 39])
        for short in ([0, 0, 3], [0, 0, 3, 39, 1]):
            with pytest.raises(flashqsa.InputError, match=r"rows\.runs: wanted runs of four whole numbers; got \("):
                operator(*operands, short)
        torch.library.opcheck(
            operator, (*operands, ops.pack_runs(rows.runs)), test_utils=("test_schema", "test_faketensor")
        )


def test_schemas_and_fakes_hold():
    index_q, q, gate, index, kv, rows = small_call()
    selection = flashqsa.select_blocks(index_q, index, rows, SPEC)
    write_index, write_kv = write_operands(index, kv, rows)
    for operator, operands in (
        (ops.select_blocks, select_operands(index_q, index, rows)),
        (ops.sparse_attention, attend_operands(q, kv, selection, rows, gate)),
        (ops.qsa_attention, qsa_operands(index_q, q, index, kv, rows, None)),
        (ops.write_index_keys, write_index),
        (ops.write_kv, write_kv),
    ):
        torch.library.opcheck(operator, operands, test_utils=("test_schema", "test_faketensor"))


def test_one_graph_under_compile():
    index_q, q, gate, index, kv, rows = small_call()
    write_index, write_kv = write_operands(index, kv, rows)

    def step(index_q, q, gate):
        ops.write_index_keys(*write_index)
        ops.write_kv(*write_kv)
        return ops.qsa_attention(*qsa_operands(index_q, q, index, kv, rows, gate))[0]

    before = [t.clone() for t in (index.keys, index.raw_keys, kv.keys, kv.values)]
    wanted = step(index_q, q, gate)
    for tensor, kept in zip((index.keys, index.raw_keys, kv.keys, kv.values), before, strict=True):
        assert not torch.equal(tensor, kept)
        tensor.copy_(kept)
    found = torch.compile(step, backend="aot_eager", fullgraph=True)(index_q, q, gate)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("by_position", [False, True])
@pytest.mark.parametrize("cache_dtype", [torch.float32, FP8], ids=str)
def test_prepare_does_what_the_call_does(by_position, cache_dtype):
    ours, theirs = (arguments_of(by_position, cache_dtype) for _ in range(2))
    got, wanted = ops.prepare(*operands_of(ours)), flashqsa.prepare(**theirs)
    assert all(compare.same_bits(mine, other) for mine, other in zip(got, wanted, strict=True))
    assert same_memory(ours["kv_cache"].keys, theirs["kv_cache"].keys)
    if cache_dtype != FP8:
        # The checks compare what an operator writes, which torch cannot do in FP8.
        torch.library.opcheck(ops.prepare, operands_of(ours))


@pytest.mark.parametrize("by_position", [False, True])
def test_prepare_compiles_to_one_node_and_writes_the_caches(by_position):
    def step(*operands):
        q, index_q = ops.prepare(*operands)
        return q.flatten(1).sum(1) + index_q.flatten(1).sum(1)

    ours, theirs = arguments_of(by_position), arguments_of(by_position)
    torch._dynamo.reset()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(*operands_of(ours)), step(*operands_of(theirs)))
    for name in ("kv_cache", "index_cache"):
        assert same_memory(ours[name].keys, theirs[name].keys)
        assert bool(ours[name].keys.isfinite().any())
    if not by_position:
        assert same_memory(ours["projected"].first_angles, theirs["projected"].first_angles)
