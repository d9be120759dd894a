"""What is correct: every stage in plain torch, row by row, in FP64 where the formula leaves it free.

Slow on purpose. It serves as the yardstick of tests and of `flashqsa verify`, and as the route `reference`, which runs
only when pinned. It works on CPU and CUDA tensors alike.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashqsa.reference.attend import attend, attend_tokens, gated, merge, split
from flashqsa.reference.expand import expand, row_blocks, row_tokens
from flashqsa.reference.score import pool_block_key, rms_norm, rotate, score
from flashqsa.reference.topk import topk
from flashqsa.reference.worklist import groups_of, worklist
from flashqsa.reference.write import write_index_keys, write_kv
from flashqsa.values import IndexCache, KvCache, QsaSpec, Rows, Scores, Selection


def select_blocks(index_q: Tensor, index_cache: IndexCache, rows: Rows, spec: QsaSpec) -> Selection:
    """The selection by FP64 scores rounded once to FP32: a score is an FP32 number, and equal ones are ties.

    index_q  [rows, index_heads, index_dim]
    """
    scores = score(index_q, index_cache, rows, spec)
    return topk(Scores(scores.values.float(), scores.visible), spec.top_blocks)


def sparse_attention(
    q: Tensor,
    kv_cache: KvCache,
    selection: Selection | None,
    rows: Rows,
    spec: QsaSpec,
    gate: Tensor | None = None,
    precision: torch.dtype = torch.float64,
    rounding: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Output [rows, q_heads, head_dim] in q's dtype and lse [rows, q_heads] FP32; worked out in `precision`.

    rounding  what queries and probabilities are rounded to, as by tensor cores (`attend_tokens`)
    """
    output, lse = attend(q, kv_cache, selection, rows, spec, precision, rounding)
    return gated(output, gate, q.dtype), lse.float()


__all__ = [
    "attend",
    "attend_tokens",
    "expand",
    "gated",
    "groups_of",
    "merge",
    "pool_block_key",
    "rms_norm",
    "rotate",
    "row_blocks",
    "row_tokens",
    "score",
    "select_blocks",
    "sparse_attention",
    "split",
    "topk",
    "worklist",
    "write_index_keys",
    "write_kv",
]
