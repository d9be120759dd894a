"""Batches as vLLM 0.32 lays them out, made of the inputs of a `Case`, and the functions called as vLLM calls them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flashqsa.integrations.vllm.functions import (
    expand_qsa_block_indices,
    qsa_select_paged_decode,
    qsa_select_paged_prefill,
    qsa_sparse_paged_attention,
)
from flashqsa.testing.cases import Case
from flashqsa.testing.inputs import Inputs, build
from flashqsa.values import FP8, IndexCache, KvCache, QsaSpec, Rows
from tests.both_devices import poisoned_memory


@dataclass(frozen=True)
class Batch:
    """One step of vLLM's: requests that decode stand first, with `decode_rows` rows each; padding stands last.

    inputs      whose rows are the batch's, padding and all
    decodes     requests that decode
    block_table, index_table  [requests, table_pages] int32, 0 where a request has no page
    token_to_req, logical_positions, visible_blocks, query_start_loc  as vLLM's metadata builder makes them
    """

    inputs: Inputs
    decodes: int
    decode_rows: int
    block_table: Tensor
    index_table: Tensor
    token_to_req: Tensor
    logical_positions: Tensor
    visible_blocks: Tensor
    query_start_loc: Tensor

    @property
    def spec(self) -> QsaSpec:
        return self.inputs.spec

    @property
    def rows(self) -> Rows:
        return self.inputs.rows

    @property
    def index_keys(self) -> Tensor:
        """[pages, page_blocks, 1, index_dim]."""
        return self.inputs.index_cache.keys[:, :, None]

    def packed(self) -> Tensor:
        """Memory for a packed selection, full of what an earlier step may have left."""
        shape = (self.rows.count, self.spec.budget + self.spec.block_tokens)
        return torch.full(shape, 77, dtype=torch.int32, device=self.rows.request.device)


def batch_of(case: Case, decodes: int, device: str, padding: int = 0) -> Batch:
    """The batch of a case whose first `decodes` requests decode, with `padding` rows after the last.

    In a batch of decodes alone, padding is that of a graph: whole requests without tokens, whose pages are all 0.
    """
    lengths = case.query_lengths
    decode_rows = lengths[0] if decodes else 0
    assert all(length == decode_rows for length in lengths[:decodes])
    uniform = decodes == len(lengths)
    assert not uniform or padding % max(decode_rows, 1) == 0
    inputs = build(replace(case, layout="packed", padding=(sum(lengths),) * padding), device)
    if inputs.kv_cache.keys.dtype == FP8:
        # vLLM's pooled keys have no scale.
        inputs = replace(inputs, index_cache=replace(inputs.index_cache, scale=1.0))
    more = padding // decode_rows if uniform and decode_rows else 0
    starts = torch.tensor([0, *lengths] + [0] * more).cumsum(0)
    live = inputs.rows.live
    position = torch.where(live, inputs.rows.position, -1).long()

    def table(cache: KvCache | IndexCache) -> Tensor:
        return torch.nn.functional.pad(cache.page_table.clamp(min=0), (0, 0, 0, more))

    return Batch(
        inputs,
        decodes + more,
        decode_rows,
        table(inputs.kv_cache),
        table(inputs.index_cache),
        torch.where(live, inputs.rows.request, 0),
        position,
        ((position + 1) // case.spec.block_tokens).int(),
        starts.int().to(device),
    )


def select(batch: Batch) -> Tensor:
    """The packed selection of a batch: leading decodes, then prefills, then both expanded, as vLLM's indexer does."""
    spec, index_q = batch.spec, batch.inputs.index_q
    if batch.index_keys.dtype == FP8:
        index_q = index_q.to(FP8)
    split = batch.decodes * batch.decode_rows
    blocks = torch.full((batch.rows.count, spec.top_blocks), -77, dtype=torch.int32, device=index_q.device)
    packed = batch.packed()
    with poisoned_memory():
        if split:
            qsa_select_paged_decode(
                index_q[:split],
                batch.index_keys,
                batch.index_table[: batch.decodes],
                batch.visible_blocks[:split],
                spec.budget,
                spec.block_tokens,
                batch.decode_rows,
                blocks[:split],
            )
        if split < batch.rows.count:
            qsa_select_paged_prefill(
                index_q[split:],
                batch.index_keys,
                batch.index_table[batch.decodes :],
                batch.query_start_loc[batch.decodes :],
                batch.visible_blocks[split:],
                spec.budget,
                spec.block_tokens,
                max(batch.inputs.case.query_lengths),
                blocks[split:],
                max(batch.inputs.case.context_lengths),
            )
        position, visible = batch.logical_positions, batch.visible_blocks
        expand_qsa_block_indices(blocks, position, visible, spec.block_tokens, spec.budget, packed)
    return packed


def attend(batch: Batch, packed: Tensor) -> Tensor:
    """The output of a batch over a packed selection, written to memory that is wider than the batch."""
    inputs = batch.inputs
    out = torch.full((batch.rows.count + 3, *inputs.q.shape[1:]), float("nan"), dtype=inputs.q.dtype).to(packed.device)
    with poisoned_memory():
        found = attend_into(batch, packed, out[: batch.rows.count])
    assert found.data_ptr() == out.data_ptr()
    assert bool(out[batch.rows.count :].isnan().all())
    return found


def attend_into(batch: Batch, packed: Tensor, out: Tensor | None) -> Tensor:
    """The attention call of a batch, as vLLM's layer makes it."""
    inputs, cache = batch.inputs, batch.inputs.kv_cache
    assert inputs.gate is not None
    assert not isinstance(cache.k_scale, Tensor)
    assert not isinstance(cache.v_scale, Tensor)
    return qsa_sparse_paged_attention(
        inputs.q,
        cache.keys,
        cache.values,
        packed,
        batch.block_table,
        batch.token_to_req,
        batch.decodes == 0,
        out,
        1.0 if cache.k_scale is None else cache.k_scale,
        1.0 if cache.v_scale is None else cache.v_scale,
        output_gate=inputs.gate.flatten(1),
    )
