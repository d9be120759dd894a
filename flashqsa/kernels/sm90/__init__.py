"""Attention and the fused indexer for GPUs of compute capability 9.0 (Hopper), in CUDA C++ with `wgmma`.

The folder has an attention kernel and an indexer of its own and borrows the rest:

worklist, chunks, rankings  `kernels.nvrtc`, as every NVIDIA GPU
merge                       `kernels.smxx`
score                       `kernels.smxx`, for whoever asks for the scores that the fused indexer does not keep

Why it is worth a folder: on an H200 it attends 1,616 rows of 24/2 heads in 350 and 455 us mid and far, Triton's kernel
in 439 and 574 (`docs/kernels/attend.md`), and selects for long chunks without a score matrix in less time than scores
and top-k take (`docs/kernels/select.md`). Other selections and writing are `kernels.smxx`'s.
"""

from __future__ import annotations

from torch import Tensor

from flashqsa.kernels.nvrtc import sparse
from flashqsa.kernels.sm90.attend import attend_hopper
from flashqsa.kernels.sm90.decode import select_decode
from flashqsa.kernels.sm90.select import select_chunks
from flashqsa.kernels.smxx import score
from flashqsa.kernels.smxx.merge import merge
from flashqsa.plan import AttendPlan, SelectPlan
from flashqsa.select_shape import DecodeShape
from flashqsa.values import IndexCache, KvCache, QsaSpec, Rows, Selection

KERNELS = sparse.AttendKernels(attend_hopper, merge)


def select_fused(index_q: Tensor, index_cache: IndexCache, rows: Rows, spec: QsaSpec, plan: SelectPlan) -> Selection:
    """Each row's best blocks without a score matrix: by chunks of rows, or in one launch for few; see their files."""
    if isinstance(plan.fused, DecodeShape):
        return select_decode(index_q, index_cache, rows, spec, plan.fused)
    return select_chunks(index_q, index_cache, rows, spec, plan)


def sparse_attention(
    q: Tensor,
    kv_cache: KvCache,
    selection: Selection | None,
    rows: Rows,
    spec: QsaSpec,
    gate: Tensor | None,
    return_lse: bool,
    plan: AttendPlan,
) -> tuple[Tensor, Tensor | None]:
    """Worklist, attention and merge: see `nvrtc.sparse.sparse_attention`."""
    shape, capability = plan.gpu()
    return sparse.sparse_attention(
        q, kv_cache, selection, rows, spec, gate, return_lse, shape, capability, plan.limit_bytes, KERNELS
    )


__all__ = ["score", "select_fused", "sparse_attention"]
