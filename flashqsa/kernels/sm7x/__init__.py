"""Kernels for GPUs of compute capability 7.0 (Volta) and 7.5 (Turing), in CUDA C++: Triton has no tensor cores there.

Scores, attention and merge are this folder's; exact top-k, worklist and writing are shared by every NVIDIA GPU
(`kernels.nvrtc`). Nothing here imports Triton. What was compiled, emulated and run, and what was not, is in
`docs/ROUTES.md`.
"""

from __future__ import annotations

from functools import cache

from torch import Tensor

from flashqsa.config import Sm7xScoreConfig
from flashqsa.kernels.nvrtc import sparse
from flashqsa.kernels.nvrtc import topk as nvrtc_topk
from flashqsa.kernels.nvrtc.everything import empty_selection
from flashqsa.kernels.nvrtc.everything import select_everything as nvrtc_everything
from flashqsa.kernels.nvrtc.write import write_index_keys, write_kv
from flashqsa.kernels.sm7x import score as score_stage
from flashqsa.kernels.sm7x.attend import attend_sm7x
from flashqsa.kernels.sm7x.merge import merge_on
from flashqsa.plan import AttendPlan, SelectPlan
from flashqsa.values import IndexCache, KvCache, QsaSpec, Rows, Scores, Selection


def select_everything(index_cache: IndexCache, rows: Rows, spec: QsaSpec, plan: SelectPlan) -> Selection:
    """Every visible block that is not on a hole; for calls where no row sees more than `top_blocks` of them."""
    if plan.capability is None:
        raise ValueError("a plan for a CPU has no compute capability")
    return nvrtc_everything(index_cache, rows, spec, plan.capability)


def score(index_q: Tensor, index_cache: IndexCache, rows: Rows, spec: QsaSpec, plan: SelectPlan) -> Scores:
    """Scores of a chunk of rows: see `score.score`."""
    config = plan.chunk_config(rows.count).score
    if not isinstance(config, Sm7xScoreConfig):
        raise TypeError(f"wanted an Sm7xScoreConfig, got {config}")
    return score_stage.score(index_q, index_cache, rows, spec, config)


def topk(scores: Scores, out: Selection, plan: SelectPlan) -> None:
    """Writes a chunk's best blocks into `out`: see `nvrtc.topk.topk`."""
    nvrtc_topk.topk(scores, out, plan.chunk_config(scores.values.shape[0]).topk)


@cache
def kernels_for(capability: tuple[int, int]) -> sparse.AttendKernels:
    """The attention and merge kernels of a compute capability."""
    return sparse.AttendKernels(attend_sm7x, merge_on(capability))


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
    kernels = kernels_for(capability)
    return sparse.sparse_attention(
        q, kv_cache, selection, rows, spec, gate, return_lse, shape, capability, plan.limit_bytes, kernels
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
