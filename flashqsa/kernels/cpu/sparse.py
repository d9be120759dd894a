"""The whole attend stage: worklist, attention, merge."""

from __future__ import annotations

from torch import Tensor

from flashqsa.kernels.cpu.attend import attend
from flashqsa.kernels.cpu.merge import merge
from flashqsa.kernels.cpu.worklist import worklist
from flashqsa.plan import AttendPlan
from flashqsa.values import KvCache, QsaSpec, Rows, Selection


def sparse_attention(
    q: Tensor,
    kv_cache: KvCache,
    selection: Selection | None,
    rows: Rows,
    spec: QsaSpec,
    gate: Tensor | None,
    return_lse: bool,  # noqa: ARG001 - the lse falls out of the softmax
    plan: AttendPlan,
) -> tuple[Tensor, Tensor]:
    """Gated attention of every row over its selected blocks and its tail; over all it sees without a selection.

    Returns output [rows, q_heads, head_dim] in q's dtype and lse [rows, q_heads] FP32.
    """
    work = worklist(selection, rows, spec, kv_cache, plan)
    return merge(attend(q, kv_cache, work, rows, spec, plan), gate, q.dtype)
