"""Attention of each row over its own tokens, whole or in parts, and the merge of parts."""

from __future__ import annotations

import torch
from torch import Tensor

from flashqsa.reference.expand import row_tokens
from flashqsa.reference.paging import read_kv
from flashqsa.values import KvCache, Partial, QsaSpec, Rows, Selection


def attend_tokens(
    q: Tensor, keys: Tensor, values: Tensor, spec: QsaSpec, rounding: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Softmax attention of one row over given tokens; query head h reads KV head h // heads_per_kv_head.

    q             [q_heads, head_dim]
    keys, values  [tokens, kv_heads, head_dim], in q's dtype
    rounding      what products of tensor cores take: queries are rounded to it, each head at its own power of two, and
                  probabilities, relative to a head's largest; None to round nothing

    Returns output [q_heads, head_dim] and lse [q_heads]; 0 and -inf without tokens.
    """
    if keys.shape[0] == 0:
        return torch.zeros_like(q), torch.full_like(q[:, 0], float("-inf"))
    if rounding is not None:
        q = _rounded(q, rounding)
    grouped = q.view(spec.kv_heads, spec.heads_per_kv_head, spec.head_dim)
    logits = torch.einsum("hgd,thd->hgt", grouped, keys) * spec.softmax_scale
    lse = torch.logsumexp(logits, dim=-1)
    if rounding is None:
        output = torch.einsum("hgt,thd->hgd", torch.exp(logits - lse[..., None]), values)
    else:
        weights = torch.exp(logits - logits.amax(dim=-1, keepdim=True))
        output = torch.einsum("hgt,thd->hgd", weights.to(rounding).to(q.dtype), values)
        output = output / weights.sum(dim=-1, keepdim=True)
    return output.reshape(q.shape), lse.reshape(-1)


def _rounded(q: Tensor, dtype: torch.dtype) -> Tensor:
    """Each head [head_dim] of q rounded to a dtype, at the power of two of its largest number."""
    exponent = torch.frexp(q.abs().amax(dim=-1, keepdim=True)).exponent
    return torch.ldexp(torch.ldexp(q, -exponent).to(dtype).to(q.dtype), exponent)


def attend(
    q: Tensor,
    kv_cache: KvCache,
    selection: Selection | None,
    rows: Rows,
    spec: QsaSpec,
    precision: torch.dtype = torch.float64,
    rounding: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of each row over its selected blocks and its tail; over all it sees (dense) without a selection.

    q         [rows, q_heads, head_dim]
    rounding  as in `attend_tokens`

    Tokens on a hole are left out. Returns output [rows, q_heads, head_dim] and lse [rows, q_heads] in `precision`.
    """
    part = split(q, kv_cache, selection, rows, spec, 1, precision, rounding)
    return part.output[0], part.lse[0]


def split(
    q: Tensor,
    kv_cache: KvCache,
    selection: Selection | None,
    rows: Rows,
    spec: QsaSpec,
    parts: int,
    precision: torch.dtype = torch.float64,
    rounding: torch.dtype | None = None,
) -> Partial:
    """As `attend`, with each row's token list cut into `parts` runs of nearly equal length that do not see each other.

    Returns output [parts, rows, q_heads, head_dim] and lse [parts, rows, q_heads] in `precision`.
    """
    output = torch.zeros(parts, *q.shape, dtype=precision, device=q.device)
    lse = torch.full(output.shape[:-1], float("-inf"), dtype=precision, device=q.device)
    for row in range(rows.count):
        tokens = torch.tensor(row_tokens(selection, rows, spec, row), dtype=torch.int64, device=q.device)
        for part, run in enumerate(tokens.tensor_split(parts)):
            if run.numel():
                keys, values = read_kv(kv_cache, int(rows.request[row]), run, precision)
                output[part, row], lse[part, row] = attend_tokens(q[row].to(precision), keys, values, spec, rounding)
    return Partial(output, lse)


def merge(partial: Partial, gate: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Attention over the whole from attention over parts, weighted by exp(lse of the part - lse of the whole).

    gate  [rows, q_heads, head_dim] before its sigmoid, or None

    Returns output [rows, q_heads, head_dim] in `dtype` (see `gated`) and lse [rows, q_heads] FP32.
    """
    whole = torch.logsumexp(partial.lse, dim=0)  # [rows, q_heads]; -inf where no part sees anything
    sees = whole > float("-inf")
    weight = torch.where(sees, torch.exp(partial.lse - torch.where(sees, whole, 0.0)), 0.0)
    output = (weight[..., None] * partial.output).sum(dim=0)
    return gated(output, gate, dtype), whole.float()


def gated(output: Tensor, gate: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Output rounded to `dtype`; with a gate the rounded output times sigmoid(gate) in FP32, rounded once more."""
    rounded = output.to(dtype)
    return rounded if gate is None else (rounded.float() * torch.sigmoid(gate.float())).to(dtype)
