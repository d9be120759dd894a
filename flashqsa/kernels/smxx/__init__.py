"""Kernels for GPUs of compute capability 8.0 and newer: scores, attention and merge in Triton, or scores by cuBLAS.

Exact top-k, worklist and writing are CUDA C++ that every NVIDIA GPU shares (`kernels.nvrtc`). Every launch follows from
host numbers and none waits for the device, so calls may be captured in a CUDA graph once they have run: the first one
compiles. What was run and timed on which GPU is in `docs/ROUTES.md`.
"""

from __future__ import annotations

from torch import Tensor

from flashqsa.config import ScoreConfig
from flashqsa.kernels.nvrtc import products, sparse
from flashqsa.kernels.nvrtc import topk as nvrtc_topk
from flashqsa.kernels.nvrtc.everything import empty_selection
from flashqsa.kernels.nvrtc.everything import select_everything as nvrtc_everything
from flashqsa.kernels.nvrtc.write import write_index_keys, write_kv
from flashqsa.kernels.smxx import score as paged_score
from flashqsa.kernels.smxx.attend import attend_triton
from flashqsa.kernels.smxx.merge import merge
from flashqsa.plan import AttendPlan, SelectPlan
from flashqsa.product_shape import ProductConfig
from flashqsa.values import IndexCache, KvCache, QsaSpec, Rows, Scores, Selection

KERNELS = sparse.AttendKernels(attend_triton, merge)


def select_everything(index_cache: IndexCache, rows: Rows, spec: QsaSpec, plan: SelectPlan) -> Selection:
    """Every visible block that is not on a hole; for calls where no row sees more than `top_blocks` of them."""
    if plan.capability is None:
        raise ValueError("a plan for a CPU has no compute capability")
    return nvrtc_everything(index_cache, rows, spec, plan.capability)


def score(index_q: Tensor, index_cache: IndexCache, rows: Rows, spec: QsaSpec, plan: SelectPlan) -> Scores:
    """Scores of a chunk of rows: see `score.score`, and `nvrtc.products.score_request` in the mode `cublas`."""
    config = plan.chunk_config(rows.count).score
    if isinstance(config, ProductConfig):
        return products.score_request(index_q, index_cache, rows, spec, config.capability, config.columns)
    if not isinstance(config, ScoreConfig):
        raise TypeError(f"wanted a ScoreConfig, got {config}")
    return paged_score.score(index_q, index_cache, rows, spec, config)


def topk(scores: Scores, out: Selection, plan: SelectPlan) -> None:
    """Writes a chunk's best blocks into `out`: see `nvrtc.topk.topk`."""
    nvrtc_topk.topk(scores, out, plan.chunk_config(scores.values.shape[0]).topk)


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


__all__ = [
    "empty_selection",
    "score",
    "select_everything",
    "sparse_attention",
    "topk",
    "write_index_keys",
    "write_kv",
]
