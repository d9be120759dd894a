"""Selections of rows that see no more blocks than they may select, on any NVIDIA GPU: launches `everything.cu`."""

from __future__ import annotations

from functools import cache

import torch

from flashqsa.kernels.nvrtc.compiler import Source
from flashqsa.kernels.nvrtc.driver import Kernel
from flashqsa.values import IndexCache, QsaSpec, Rows, Selection

THREADS = 128
"""Of a program, which has a warp per row."""

PROGRAM_ROWS = THREADS // 32


def empty_selection(rows: Rows, spec: QsaSpec) -> Selection:
    """Memory for a selection, for `topk` to write into: it writes every entry of every row, of padding too."""
    device = rows.request.device
    blocks = torch.empty((rows.count, spec.top_blocks), dtype=torch.int32, device=device)
    return Selection(blocks, torch.empty(rows.count, dtype=torch.int32, device=device))


def select_everything(index_cache: IndexCache, rows: Rows, spec: QsaSpec, capability: tuple[int, int]) -> Selection:
    """Every visible block that is not on a hole, in one launch; for calls where no row sees more than `top_blocks`.

    Keys are not read. Raises CompileError, NvrtcNotFoundError, DriverError.
    """
    selection = empty_selection(rows, spec)
    table = index_cache.page_table
    _kernel(capability).launch(
        table.device,
        -(-rows.count // PROGRAM_ROWS),
        rows.request.data_ptr(),
        rows.position.data_ptr(),
        table.data_ptr(),
        selection.blocks.data_ptr(),
        selection.count.data_ptr(),
        table.stride(0),
        selection.blocks.stride(0),
        rows.count,
        index_cache.requests,
        table.shape[1],
        index_cache.keys.shape[0],
        index_cache.page_blocks,
        spec.block_tokens,
        spec.top_blocks,
    )
    return selection


@cache
def _kernel(capability: tuple[int, int]) -> Kernel:
    source = Source("everything.cu", headers=("paging.cuh",))
    return Kernel(source, "flashqsa_select_everything", "PPPPPqq" + "i" * 7, capability, THREADS)
