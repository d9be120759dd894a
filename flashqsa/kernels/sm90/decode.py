"""Selection of few rows in one launch on compute capability 9.0: `decode.cu`, a cluster of programs for each row."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from flashqsa.kernels.nvrtc import Kernel, Source
from flashqsa.kernels.nvrtc.everything import empty_selection
from flashqsa.select_shape import DecodeShape
from flashqsa.values import IndexCache, QsaSpec, Rows, Selection

FOLDER = Path(__file__).parent

CAPABILITY = (9, 0)

PARAMETERS = "P" * 7 + "q" * 7 + "i" * 7 + "f" + "0q"
"""Members of `Arguments` of `decode.cu`."""

PAGE_SHIFT = 40
"""Bits of the fixed-point number that blocks are divided by the page size with."""


def select_decode(index_q: Tensor, index_cache: IndexCache, rows: Rows, spec: QsaSpec, shape: DecodeShape) -> Selection:
    """Each row's best blocks: what `score` and `topk` of one row select. See `pipeline.select_blocks`.

    index_q  [rows, index_heads, index_dim] FP16 or BF16, as the cache's keys

    For calls that `select_shape.decode_refusal` has nothing against. Scores are those of `smxx`'s scorer of one row,
    bit for bit, and never lie in memory. Raises CompileError, NvrtcNotFoundError, DriverError.
    """
    selection = empty_selection(rows, spec)
    keys, table, q_bytes = index_cache.keys, index_cache.page_table, index_q.element_size()
    kernel = decode_kernel(spec, shape, index_q.dtype == torch.bfloat16)
    kernel.launch(
        index_q.device,
        rows.count * shape.cluster,
        index_q.data_ptr(),
        keys.data_ptr(),
        table.data_ptr(),
        rows.request.data_ptr(),
        rows.position.data_ptr(),
        selection.blocks.data_ptr(),
        selection.count.data_ptr(),
        *(stride * q_bytes for stride in index_q.stride()[:2]),
        *(stride * q_bytes for stride in keys.stride()[:2]),
        table.stride(0),
        selection.blocks.stride(0),
        -(-(1 << PAGE_SHIFT) // index_cache.page_blocks),
        index_cache.requests,
        rows.max_position,
        table.shape[1],
        keys.shape[0],
        index_cache.page_blocks,
        spec.block_tokens,
        spec.top_blocks,
        spec.score_scale * (index_cache.scale or 1.0),
    )
    return selection


@cache
def decode_kernel(spec: QsaSpec, shape: DecodeShape, bf16: bool) -> Kernel:
    """The kernel of a shape; those that differ in shared memory alone share what is compiled."""
    defines = (
        ("HEADS", spec.index_heads),
        ("DIM", spec.index_dim),
        ("PAGE_SHIFT", PAGE_SHIFT),
        ("BF16", int(bf16)),
        ("CLUSTER", shape.cluster),
        ("THREADS", shape.threads),
        ("RESIDENT", shape.resident),
        ("STAGES", shape.stages),
        ("TABLE_BYTES", shape.table_bytes),
    )
    source = Source("decode.cu", defines, headers=("cluster.cuh", "ranking.cuh", "sampling.cuh"), folder=FOLDER)
    shared_bytes = shape.shared_bytes(spec)
    return Kernel(source, "flashqsa_decode_sm90", PARAMETERS, CAPABILITY, shape.threads, shared_bytes, shape.cluster)
