"""Kernels for machines without a GPU: vectorised torch and numpy, FP32 arithmetic whatever the storage dtype.

`sparse_attention` is `worklist`, `attend` and `merge` in turn.
"""

from flashqsa.kernels.cpu.attend import attend
from flashqsa.kernels.cpu.merge import merge
from flashqsa.kernels.cpu.prepare import prepare
from flashqsa.kernels.cpu.score import empty_selection, score, select_everything
from flashqsa.kernels.cpu.select import select_fused
from flashqsa.kernels.cpu.sparse import sparse_attention
from flashqsa.kernels.cpu.topk import topk
from flashqsa.kernels.cpu.worklist import worklist
from flashqsa.kernels.cpu.write import write_index_keys, write_kv

__all__ = [
    "attend",
    "empty_selection",
    "merge",
    "prepare",
    "score",
    "select_everything",
    "select_fused",
    "sparse_attention",
    "topk",
    "worklist",
    "write_index_keys",
    "write_kv",
]
