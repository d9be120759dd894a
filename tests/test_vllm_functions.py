"""QSA functions with vLLM's signatures, on batches as vLLM lays them out, against the reference. vLLM is not needed."""

from __future__ import annotations

import inspect
import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flashqsa import reference
from flashqsa.check import InputError
from flashqsa.integrations import vllm
from flashqsa.integrations.vllm.functions import (
    expand_qsa_block_indices,
    positions_in_table,
    positions_of,
    qsa_select_paged_decode,
    qsa_select_paged_prefill,
    qsa_sparse_paged_attention,
    selection_of_table,
)
from flashqsa.testing import compare
from flashqsa.testing.calls import attention_failures, product_dtype
from flashqsa.testing.cases import BF16, FP16, Case, spec_of
from flashqsa.testing.inputs import Inputs, relocate
from flashqsa.values import FP8, QsaSpec, Rows, Selection
from tests.both_devices import DEVICES, kernels_of
from tests.vllm_batches import Batch, attend, attend_into, batch_of, select

RANK = spec_of(6, 1)

# Name -> case, requests that decode, padding rows after the last.
BATCHES: dict[str, tuple[Case, int, int]] = {
    "prefill": (Case("prefill", (70,), (70,), RANK), 0, 0),
    "prefill-and-decode": (Case("mixed", (1, 1, 1, 40, 9), (500, 37, 211, 40, 64), RANK, FP16, FP16), 3, 0),
    "verify-and-prefill": (Case("verify", (3, 3, 30), (131, 64, 90), RANK, BF16, BF16), 2, 0),
    "chunked-prefill": (Case("chunks", (6, 7, 5, 1), (846, 848, 847, 844), spec_of(6, 1, top_blocks=64)), 0, 0),
    "draft-rows": (Case("draft", (4,) * 5, (90, 91, 92, 93, 5), RANK, FP16, FP16, 64), 5, 0),
    "padded-decode-graph": (Case("graph", (1,) * 5, (400, 37, 5, 3, 211), RANK, FP16, FP16), 5, 3),
    "padded-verify-graph": (Case("graph", (5, 5), (64, 131), RANK), 2, 10),
    "padding-after-prefill": (Case("padding", (1, 20), (100, 47), RANK), 1, 4),
    "fp8": (Case("fp8", (1, 1, 24), (300, 47, 120), RANK, BF16, FP8, 64), 2, 0),
    "pages-of-784": (Case("784", (1, 12, 9), (900, 1800, 900), RANK, FP16, FP16, 784, order="reversed"), 1, 0),
    "two-kv-heads": (Case("heads", (1, 33), (260, 300), spec_of(24, 2)), 1, 0),
    "below-budget": (Case("short", (1, 1, 12), (30, 3, 30), RANK, page_tokens=64), 2, 0),
    "released-model": (Case("model", (1, 1, 3), (4099, 2051, 2100), QsaSpec(), BF16, BF16, 784), 2, 0),
}
each_batch = pytest.mark.parametrize("name", BATCHES)
each_device = pytest.mark.parametrize("device", DEVICES)

ARGUMENTS = {
    "qsa_sparse_paged_attention": "q k_cache v_cache logical_indices block_table token_to_req use_prefill_config out "
    "k_scale v_scale output_gate",
    "qsa_select_paged_prefill": "q k_cache page_table query_start_loc visible_blocks token_topk compress_ratio "
    "max_query_len block_indices max_seq_len",
    "qsa_select_paged_decode": "q k_cache page_table visible_blocks token_topk compress_ratio decode_query_len "
    "block_indices",
    "expand_qsa_block_indices": "block_indices query_positions visible_blocks compress_ratio token_topk out",
    "qsa_store_cache_rows": "cache slot_mapping rows",
    "qsa_compress_groups_with_ratio": "raw_keys raw_positions compressor_state_cache compressor_state_block_table "
    "token_to_req query_start_loc logical_positions compressed_slots compress_ratio rope_cache",
    "qsa_prepare": "q k positions cos_sin_cache q_norm_weight k_norm_weight eps q_out state_cache state_slots "
    "state_block_table query_start_loc logical_positions compressed_cache compressed_slots k_work_metadata "
    "compress_ratio mrope_section rope_pos_offset main_qkv main_q_norm_weight main_k_norm_weight main_eps "
    "main_kv_cache main_slot_mapping main_k_scale main_v_scale",
}
"""Arguments of vLLM 0.32.0's functions, in order."""


def wanted_selection(batch: Batch) -> Selection:
    inputs = batch.inputs
    index_q = inputs.index_q.to(FP8).to(FP16) if batch.index_keys.dtype == FP8 else inputs.index_q
    return reference.select_blocks(index_q, inputs.index_cache, inputs.rows, inputs.spec)


def attention_faults(inputs: Inputs, selection: Selection, rows: Rows, output: Tensor, device: str) -> list[str]:
    """What the reference has against an output; lse is not asked for."""
    _, lse = reference.sparse_attention(inputs.q, inputs.kv_cache, selection, rows, inputs.spec, inputs.gate)
    return attention_failures(
        output,
        lse,
        inputs.q,
        inputs.kv_cache,
        selection,
        rows,
        inputs.spec,
        inputs.gate,
        torch.arange(rows.count, device=output.device),
        product_dtype(kernels_of(device), inputs.kv_cache.keys.dtype),
    )[0]


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_are_vllms(name: str) -> None:
    parameters = inspect.signature(getattr(vllm, name)).parameters
    wanted = ARGUMENTS[name].split()
    assert list(parameters)[: len(wanted)] == wanted
    assert all(parameters[more].default is not inspect.Parameter.empty for more in list(parameters)[len(wanted) :])


@each_device
@each_batch
def test_the_packed_selection_is_the_references(name: str, device: str) -> None:
    batch = batch_of(BATCHES[name][0], BATCHES[name][1], device, BATCHES[name][2])
    packed = select(batch)
    wanted = wanted_selection(batch)
    assert torch.equal(packed, wanted.to_token_table(batch.rows, batch.spec, count_column=True))
    read = selection_of_table(packed, batch.spec.block_tokens)
    assert compare.same_selection(read, wanted) is None
    assert torch.equal(packed, select(batch))


@each_device
@each_batch
def test_attention_reads_the_packed_selection_where_it_lies(name: str, device: str) -> None:
    batch = batch_of(BATCHES[name][0], BATCHES[name][1], device, BATCHES[name][2])
    selection = wanted_selection(batch)
    wide = torch.full((batch.rows.count + 2, batch.packed().shape[1]), 99, dtype=torch.int32, device=device)
    packed = wide[1:-1]
    packed.copy_(selection.to_token_table(batch.rows, batch.spec, count_column=True))
    before = wide.clone()
    output = attend(batch, packed)
    assert torch.equal(wide, before)
    assert attention_faults(batch.inputs, selection, batch.rows, output, device) == []
    assert bool((output[~batch.rows.live] == 0).all())


@each_device
def test_where_pages_lie_changes_no_bit(device: str) -> None:
    batch = batch_of(BATCHES["prefill-and-decode"][0], 3, device)
    moved = relocate(batch.inputs, "reversed")
    tables = moved.kv_cache.page_table.clamp(min=0), moved.index_cache.page_table.clamp(min=0)
    other = replace(batch, inputs=moved, block_table=tables[0], index_table=tables[1])
    packed = select(batch)
    assert torch.equal(packed, select(other))
    assert compare.same_bits(attend(batch, packed), attend(other, packed))


@each_device
def test_requests_with_a_cached_prefix_share_its_pages(device: str) -> None:
    # Two requests of the same 64 tokens in front, of which the second finds four pages in the cache.
    case = Case("prefix", (40, 26), (104, 90), RANK, FP16, FP16)
    batch = batch_of(case, 0, device)
    caches = batch.inputs.kv_cache, batch.inputs.index_cache
    for table in (batch.block_table, batch.index_table, *(cache.page_table for cache in caches)):
        table[1, :4] = table[0, :4]
    packed = select(batch)
    selection = wanted_selection(batch)
    assert torch.equal(packed, selection.to_token_table(batch.rows, batch.spec, count_column=True))
    assert attention_faults(batch.inputs, selection, batch.rows, attend(batch, packed), device) == []


@each_device
@pytest.mark.parametrize("context", [100, 101, 102, 103])
def test_a_later_draft_step_attends_to_what_an_earlier_row_selected(context: int, device: str) -> None:
    # Of a request's three verify rows the middle one goes on: its packed row is moved, and used in later steps.
    batch = batch_of(Case("reuse", (3, 3), (context, context + 31), RANK, FP16, FP16), 2, device)
    kept = torch.tensor([1, 4], device=device)
    inputs = batch.inputs
    packed = select(batch)[kept].contiguous()
    wanted = wanted_selection(batch)
    frozen = Rows(inputs.rows.request[kept], inputs.rows.position[kept], inputs.rows.max_position)
    assert inputs.gate is not None
    later = replace(inputs, q=inputs.q[kept], gate=inputs.gate[kept], rows=frozen)
    step = replace(batch, inputs=later, token_to_req=inputs.rows.request[kept])
    selection = Selection(wanted.blocks[kept], wanted.count[kept])
    assert attention_faults(later, selection, frozen, attend(step, packed), device) == []


@given(st.data())
def test_rows_find_back_where_they_stand(data: st.DataObject) -> None:
    spec = QsaSpec(top_blocks=5, block_tokens=data.draw(st.sampled_from([2, 3, 4, 8])))
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    contexts = [length + data.draw(st.integers(0, 90)) for length in lengths]
    rows = Rows.from_lengths(lengths, contexts, pad_to=sum(lengths) + data.draw(st.integers(0, 3)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    picks = [
        sorted(torch.randperm(seen, generator=generator)[: spec.top_blocks].tolist())
        for seen in rows.visible_blocks(spec).tolist()
    ]
    blocks = torch.tensor([pick + [-1] * (5 - len(pick)) for pick in picks], dtype=torch.int32)
    chosen = Selection(blocks, torch.tensor([len(pick) for pick in picks], dtype=torch.int32))
    packed = chosen.to_token_table(rows, spec, count_column=True)
    token_to_req = torch.where(rows.live, rows.request, 0)
    found = positions_in_table(packed, token_to_req, spec.block_tokens).tolist()
    for row, (request, position) in enumerate(zip(rows.request.tolist(), rows.position.tolist(), strict=True)):
        closes = request >= 0 and (position + 1) % spec.block_tokens == 0
        alone = request >= 0 and lengths[request] == 1
        assert found[row] == (
            picks[row][-1] * spec.block_tokens + spec.block_tokens - 1 if closes and alone else position
        )
    assert compare.same_selection(selection_of_table(packed, spec.block_tokens), chosen) is None


@given(
    st.lists(st.tuples(st.integers(0, 90), st.integers(1, 15)), min_size=1, max_size=4), st.sampled_from([1, 2, 4, 8])
)
def test_positions_made_of_visible_blocks_see_as_many_and_ascend(pieces: list[tuple[int, int]], tokens: int) -> None:
    rows = Rows.from_lengths([rows for _, rows in pieces], [before + rows for before, rows in pieces])
    spec = QsaSpec(block_tokens=tokens)
    found = positions_of(rows.request, rows.visible_blocks(spec), tokens)
    made = Rows(rows.request, found, rows.max_position)
    assert torch.equal(made.visible_blocks(spec), rows.visible_blocks(spec))
    assert bool((found <= rows.position).all())
    beside = (rows.request[1:] == rows.request[:-1]) & (found[:-1] >= 0)
    assert bool((found[1:] > found[:-1])[beside].all())


def test_expansion_reads_no_entry_past_the_visible_blocks() -> None:
    blocks = torch.tensor([[0, 2, 99, 98], [5, 1, -1, 7]], dtype=torch.int32)
    out = torch.full((2, 20), 77, dtype=torch.int32)
    position, visible = torch.tensor([9, 27]), torch.tensor([2, 2], dtype=torch.int32)
    expand_qsa_block_indices(blocks, position, visible, 4, 16, out)
    assert out.tolist() == [
        [0, 1, 2, 3, 8, 9, 10, 11, 8, 9, *[-1] * 9, 10],
        [20, 21, 22, 23, 4, 5, 6, 7, *[-1] * 11, 8],
    ]


def test_rows_past_the_last_request_are_padding_whatever_they_are_said_to_see() -> None:
    case, decodes, padding = BATCHES["padding-after-prefill"]
    batch = batch_of(case, decodes, "cpu", padding)
    wanted = select(batch)
    batch.visible_blocks[-padding:] = 2
    blocks = torch.full((batch.rows.count - 1, 8), -77, dtype=torch.int32)
    split, seen = batch.decodes, batch.visible_blocks[1:]
    starts = batch.query_start_loc[split:]
    qsa_select_paged_prefill(
        batch.inputs.index_q[1:], batch.index_keys, batch.index_table[split:], starts, seen, 32, 4, 20, blocks, 100
    )
    assert bool((blocks[-padding:] == -1).all())
    assert compare.same_bits(blocks[:-padding], selection_of_table(wanted, 4).blocks[1:-padding])


def test_rows_that_nobody_wrote_yet_are_read_within_bounds() -> None:
    batch = batch_of(BATCHES["padded-decode-graph"][0], 5, "cpu")
    packed = select(batch)
    packed[2, -1], packed[3, -1] = 1 << 30, -5
    found = positions_in_table(packed, batch.token_to_req, 4)
    assert found[3] == -1
    assert torch.equal(found[:2], positions_in_table(packed[:2], batch.token_to_req[:2], 4))
    assert int(selection_of_table(packed, 4).count.max()) <= batch.spec.top_blocks


def test_output_is_fresh_where_none_is_given() -> None:
    batch = batch_of(BATCHES["draft-rows"][0], 5, "cpu")
    packed = select(batch)
    assert compare.same_bits(attend_into(batch, packed, None), attend(batch, packed))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["padded-decode-graph", "padded-verify-graph"])
def test_a_uniform_batch_is_replayed_in_a_graph(name: str) -> None:
    case, decodes, padding = BATCHES[name]
    batch = batch_of(case, decodes, "cuda", padding)
    packed, out = batch.packed(), torch.empty_like(batch.inputs.q)

    def step() -> None:
        packed.copy_(select(batch))
        attend_into(batch, packed, out)

    step()  # kernels are compiled before a capture
    wanted = packed.clone(), out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    packed.fill_(99)
    out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(packed, wanted[0])
    assert compare.same_bits(out, wanted[1])
    # In the next step the last request of these is gone, and its rows are padding.
    gone = batch.decode_rows * (len(case.query_lengths) - 1)
    batch.visible_blocks[gone:] = 0
    batch.logical_positions[gone:] = -1
    batch.token_to_req[gone:] = 0
    graph.replay()
    assert torch.equal(packed[:gone], wanted[0][:gone])
    assert bool((packed[gone:, -1] == 0).all())
    assert compare.same_bits(out[:gone], wanted[1][:gone])
    assert bool((out[gone:] == 0).all())


def test_a_batch_without_rows_is_served() -> None:
    q = torch.zeros(0, 6, 64)
    pages, table = torch.zeros(1, 16, 1, 64), torch.zeros(0, 1, dtype=torch.int32)
    empty, packed = torch.zeros(0, dtype=torch.int32), torch.zeros(0, 36, dtype=torch.int32)
    assert qsa_sparse_paged_attention(q, pages, pages, packed, table, empty, True, output_gate=q).shape == q.shape
    blocks = torch.zeros(0, 8, dtype=torch.int32)
    expand_qsa_block_indices(blocks, empty, empty, 4, 32, packed)
    index_q, keys = torch.zeros(0, 4, 128), torch.zeros(1, 4, 1, 128)
    qsa_select_paged_decode(index_q, keys, table, empty, 32, 4, 1, blocks)
    starts = torch.zeros(1, dtype=torch.int32)
    qsa_select_paged_prefill(index_q, keys, table, starts, empty, 32, 4, 0, blocks, 0)


def test_layouts_that_are_not_vllms_are_refused_by_name() -> None:
    batch = batch_of(BATCHES["draft-rows"][0], 5, "cpu")
    packed, inputs = select(batch), batch.inputs
    seen, position = batch.visible_blocks, batch.logical_positions
    blocks = torch.zeros(20, 8, dtype=torch.int32)
    with pytest.raises(vllm.LayoutError, match="q: wanted 5 requests of 3 rows"):
        qsa_select_paged_decode(inputs.index_q, batch.index_keys, batch.index_table, seen, 32, 4, 3, blocks)
    with pytest.raises(vllm.LayoutError, match="k_cache: wanted shape"):
        qsa_select_paged_decode(inputs.index_q, batch.index_keys[:, :, 0], batch.index_table, seen, 32, 4, 4, blocks)
    starts = batch.query_start_loc[1:]
    with pytest.raises(vllm.LayoutError, match="query_start_loc"):
        qsa_select_paged_prefill(
            inputs.index_q, batch.index_keys, batch.index_table, starts, seen, 32, 4, 4, blocks, 99
        )
    with pytest.raises(vllm.LayoutError, match="token_topk: wanted a multiple of compress_ratio = 4"):
        expand_qsa_block_indices(blocks, position, seen, 4, 30, packed)
    with pytest.raises(vllm.LayoutError, match="compress_ratio: wanted 4"):
        expand_qsa_block_indices(blocks, position, seen, 8, 32, packed)
    with pytest.raises(vllm.LayoutError, match=r"out: wanted shape \[20, 36\]"):
        expand_qsa_block_indices(blocks, position, seen, 4, 32, packed[:, :-1])
    with pytest.raises(vllm.LayoutError, match="out: wanted int32"):
        expand_qsa_block_indices(blocks, position, seen, 4, 32, packed.long())
    with pytest.raises(vllm.LayoutError, match="logical_indices: wanted columns for whole blocks"):
        attend(batch, packed[:, :-1])
    with pytest.raises(InputError, match="q: wanted dtype"):
        attend(replace(batch, inputs=replace(inputs, q=inputs.q.float())), packed)
    # vLLM's own expansion may hand on blocks in any order, ours does not.
    packed[7, :8] = torch.tensor([8, 9, 10, 11, 0, 1, 2, 3])
    with pytest.raises(InputError, match="ascending block ids"):
        attend(batch, packed)


def test_a_refusal_survives_its_way_between_processes() -> None:
    error = vllm.LayoutError("q", "5 rows", 3)
    assert str(pickle.loads(pickle.dumps(error))) == str(error) == "q: wanted 5 rows; got 3"
