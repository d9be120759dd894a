"""Block keys and the scores that the index queries give them."""

from __future__ import annotations

import torch
from torch import Tensor

from flashqsa.reference.paging import read_index_keys
from flashqsa.values import IndexCache, QsaSpec, Rows, Scores


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * (1 + weight) over the last axis, in x's own precision and without rounding.

    >>> rms_norm(torch.tensor([3.0, -3.0]), torch.tensor([0.0, 1.0]), eps=0.0)
    tensor([ 1., -2.])
    """
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps) * (1 + weight)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of the first `rotary_dim` dimensions of x [..., dim], in x's own precision; the others pass.

    cos, sin  [..., rotary_dim]; dimensions j and j + rotary_dim / 2 rotate together (NeoX halves)

    >>> quarter = torch.tensor([0.0, 0.0]), torch.tensor([1.0, 1.0])
    >>> rotate(torch.tensor([1.0, 2.0, 3.0]), *quarter)
    tensor([-2.,  1.,  3.])
    """
    rotary_dim = cos.shape[-1]
    half = rotary_dim // 2
    turned = torch.cat([-x[..., half:rotary_dim], x[..., :half]], dim=-1)
    return torch.cat([x[..., :rotary_dim] * cos + turned * sin, x[..., rotary_dim:]], dim=-1)


def pool_block_key(raw: Tensor, norm_weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """The key of a block from the raw keys of its tokens: mean, then norm, then rotary, each rounded to raw's dtype.

    raw          [..., block_tokens, index_dim]
    norm_weight  [index_dim]
    cos, sin     [..., rotary_dim], rotary angles of the block's first token

    Returns [..., index_dim] in raw's dtype. Mean and norm are worked out in FP64; the rotary in raw's dtype, so that
    its two products round before they are added, as in Transformers' `Qwen4ExpTextQSAIndexer`.
    """
    mean = raw.double().mean(dim=-2).to(raw.dtype)
    normed = rms_norm(mean.double(), norm_weight.double(), eps).to(raw.dtype)
    return rotate(normed, cos.to(raw.dtype), sin.to(raw.dtype))


def score(
    index_q: Tensor,
    index_cache: IndexCache,
    rows: Rows,
    spec: QsaSpec,
    precision: torch.dtype = torch.float64,
) -> Scores:
    """Scores of each row's visible blocks: index_dim^(-1/2) * sum over heads of relu(<index_q[row, head], key[block]>).

    index_q  [rows, index_heads, index_dim]

    Blocks on a hole score -inf. A row that sees no more than `spec.top_blocks` blocks takes them all, whatever their
    keys, so its other blocks score 0. Returns values [rows, most visible blocks] in `precision`, NaN where a row sees
    no block.
    """
    visible = rows.visible_blocks(spec)
    width = max(spec.visible_blocks(rows.max_position), 1)
    values = torch.full((rows.count, width), float("nan"), dtype=precision, device=index_q.device)
    for row in range(rows.count):
        blocks = int(visible[row])
        if blocks == 0:
            continue
        keys, present = read_index_keys(index_cache, int(rows.request[row]), blocks, precision)
        if blocks <= spec.top_blocks:
            found = torch.zeros(blocks, dtype=precision, device=index_q.device)
        else:
            products = index_q[row].to(precision) @ keys.T  # [index_heads, blocks]
            found = torch.relu(products).sum(dim=0) * spec.score_scale
        values[row, :blocks] = torch.where(present, found, float("-inf"))
    return Scores(values, visible)
