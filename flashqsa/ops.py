"""The public calls as torch.library operators, so that torch.compile and CUDA graphs see each as one node.

An operator takes the fields of the values as flat arguments and rebuilds the values inside. `max_position` and `runs`
(from `pack_runs`; None where runs are not known) are host numbers: under torch.compile pass a bound that does not
change from call to call (the cache's capacity) and no runs that do, or every new one compiles again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flashqsa import pipeline
from flashqsa.values import IndexCache, KvCache, Projected, QsaSpec, Rows, Run, Selection


def pack_spec(spec: QsaSpec) -> list[int]:
    """A spec as the list of whole numbers that an operator schema can carry; `QsaSpec(*numbers)` is the way back."""
    return [
        spec.q_heads,
        spec.kv_heads,
        spec.head_dim,
        spec.index_heads,
        spec.index_dim,
        spec.block_tokens,
        spec.top_blocks,
    ]


def pack_runs(runs: Sequence[Run] | None) -> list[int] | None:
    """Runs of rows as the list of whole numbers that an operator schema can carry: four a run.

    >>> pack_runs(Rows.from_lengths([2, 1], [9, 4]).runs)
    [0, 0, 2, 8, 1, 2, 3, 3]
    """
    return None if runs is None else [number for run in runs for number in run]


def _rows(request: Tensor, position: Tensor, max_position: int, runs: Sequence[int] | None) -> Rows:
    if runs is None:
        return Rows(request, position, max_position)
    fours = [runs[i : i + 4] for i in range(0, len(runs), 4)]
    # Three numbers are no run: they are left as they came, for the call to refuse them by name.
    packed = tuple(Run(*four) if len(four) == 4 else tuple(four) for four in fours)
    return Rows(request, position, max_position, packed)  # type: ignore[arg-type]


def _scale(value: Tensor | None, spec: QsaSpec) -> float | Tensor | None:
    """A scale operand: one entry stands for the whole tensor, more for one per KV head.

    On a GPU one entry is repeated for every head: reading it would wait for the device.
    """
    if value is None or value.numel() == spec.kv_heads:
        return value
    return value.reshape(-1).repeat(spec.kv_heads) if value.is_cuda else float(value)


@torch.library.custom_op("flashqsa::select_blocks", mutates_args=())
def select_blocks(
    index_q: Tensor,
    index_keys: Tensor,
    index_page_table: Tensor,
    index_scale: float | None,
    request: Tensor,
    position: Tensor,
    max_position: int,
    spec: Sequence[int],
    runs: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """`pipeline.select_blocks`; returns the selection's `blocks` and `count`."""
    selection = pipeline.select_blocks(
        index_q,
        IndexCache(index_keys, index_page_table, index_scale),
        _rows(request, position, max_position, runs),
        QsaSpec(*spec),
    )
    return selection.blocks, selection.count


@select_blocks.register_fake
def _(index_q: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    request, spec = rest[3], rest[6]
    assert isinstance(request, Tensor)
    assert isinstance(spec, Sequence)
    return request.new_empty((index_q.shape[0], QsaSpec(*spec).top_blocks)), request.new_empty((index_q.shape[0],))


@torch.library.custom_op("flashqsa::sparse_attention", mutates_args=())
def sparse_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    blocks: Tensor,
    count: Tensor,
    request: Tensor,
    position: Tensor,
    max_position: int,
    spec: Sequence[int],
    gate: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`pipeline.sparse_attention`; returns output and lse."""
    output, lse = pipeline.sparse_attention(
        q,
        KvCache(keys, values, page_table, _scale(k_scale, QsaSpec(*spec)), _scale(v_scale, QsaSpec(*spec))),
        Selection(blocks, count),
        Rows(request, position, max_position),
        QsaSpec(*spec),
        gate,
        return_lse=True,
    )
    return output, lse


@sparse_attention.register_fake
def _(q: Tensor, *_rest: object) -> tuple[Tensor, Tensor]:
    return _attention_outputs(q)


@torch.library.custom_op("flashqsa::qsa_attention", mutates_args=())
def qsa_attention(
    index_q: Tensor,
    q: Tensor,
    index_keys: Tensor,
    index_page_table: Tensor,
    index_scale: float | None,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    request: Tensor,
    position: Tensor,
    max_position: int,
    spec: Sequence[int],
    gate: Tensor | None,
    runs: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """`pipeline.qsa_attention`; returns output and lse."""
    output, lse = pipeline.qsa_attention(
        index_q,
        q,
        IndexCache(index_keys, index_page_table, index_scale),
        KvCache(keys, values, page_table, _scale(k_scale, QsaSpec(*spec)), _scale(v_scale, QsaSpec(*spec))),
        _rows(request, position, max_position, runs),
        QsaSpec(*spec),
        gate,
        return_lse=True,
    )
    return output, lse


@qsa_attention.register_fake
def _(_index_q: Tensor, q: Tensor, *_rest: object) -> tuple[Tensor, Tensor]:
    return _attention_outputs(q)


def _attention_outputs(q: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


@torch.library.custom_op("flashqsa::write_index_keys", mutates_args=("index_keys", "raw_ring"))
def write_index_keys(
    raw_keys: Tensor,
    index_keys: Tensor,
    index_page_table: Tensor,
    index_scale: float | None,
    raw_ring: Tensor,
    request: Tensor,
    position: Tensor,
    max_position: int,
    spec: Sequence[int],
    norm_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> None:
    """`pipeline.write_index_keys`; `raw_ring` is `IndexCache.raw_keys`."""
    pipeline.write_index_keys(
        raw_keys,
        IndexCache(index_keys, index_page_table, index_scale, raw_ring),
        Rows(request, position, max_position),
        QsaSpec(*spec),
        norm_weight=norm_weight,
        cos=cos,
        sin=sin,
        eps=eps,
    )


@torch.library.custom_op("flashqsa::write_kv", mutates_args=("keys", "values"))
def write_kv(
    new_keys: Tensor,
    new_values: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    request: Tensor,
    position: Tensor,
    max_position: int,
    spec: Sequence[int],
) -> None:
    """`pipeline.write_kv`."""
    pipeline.write_kv(
        new_keys,
        new_values,
        KvCache(keys, values, page_table, _scale(k_scale, QsaSpec(*spec)), _scale(v_scale, QsaSpec(*spec))),
        Rows(request, position, max_position),
        QsaSpec(*spec),
    )


@torch.library.custom_op("flashqsa::prepare", mutates_args=("first_angles", "keys", "values", "index_keys", "raw_ring"))
def prepare(
    q: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    index_q: Tensor,
    raw_keys: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    index_q_norm: Tensor,
    index_k_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    first_angles: Tensor | None,
    eps: float,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    index_keys: Tensor,
    index_page_table: Tensor,
    index_scale: float | None,
    raw_ring: Tensor,
    request: Tensor,
    position: Tensor,
    max_position: int,
    spec: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """`pipeline.prepare`: the fields of `Projected`, then of the caches; returns q and index_q."""
    norms = (q_norm, k_norm, index_q_norm, index_k_norm)
    return pipeline.prepare(
        Projected(q, new_keys, new_values, index_q, raw_keys, *norms, cos, sin, first_angles, eps),
        KvCache(keys, values, page_table, _scale(k_scale, QsaSpec(*spec)), _scale(v_scale, QsaSpec(*spec))),
        IndexCache(index_keys, index_page_table, index_scale, raw_ring),
        Rows(request, position, max_position),
        QsaSpec(*spec),
    )


@prepare.register_fake
def _(q: Tensor, _keys: Tensor, _values: Tensor, index_q: Tensor, *_rest: object) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), index_q.new_empty(index_q.shape)
