"""The attention kernel of compute capability 9.0, in CUDA C++: `attend.cu`. Same lists as Triton's, same results."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from flashqsa.attend_shape import MAX_WINDOW_ROWS, AttendTile, HopperTile, Split
from flashqsa.kernels.nvrtc import Kernel, Source, attend
from flashqsa.kernels.nvrtc.worklist import WindowLists
from flashqsa.values import FP8, KvCache, Partial, QsaSpec, Rows

CAPABILITY = (9, 0)

CONSUMER_REGISTERS = {torch.float16: (56, 224), FP8: (88, 208)}
"""Registers of a producer and of a consumer thread, where three warp groups share a multiprocessor's 65,536."""


def attend_hopper(
    q: Tensor,
    kv_cache: KvCache,
    lists: WindowLists,
    rows: Rows,
    spec: QsaSpec,
    tile: AttendTile,
    split: Split,
    gate: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    partial: Partial | None,
) -> None:
    """As `smxx.attend.attend_triton`, for calls that `attend_shape.hopper_refusal` has nothing against.

    Raises TypeError for a tile of Triton's.
    """
    if not isinstance(tile, HopperTile):
        raise TypeError(f"wanted a HopperTile, got {tile}")
    kernel = hopper_kernel(tile, spec.heads_per_kv_head, q.dtype == torch.bfloat16, kv_cache.keys.dtype == FP8)
    arguments = attend.arguments(q, kv_cache, lists, rows, spec, split, gate, out, lse, partial)
    kernel.launch(q.device, split.programs, *arguments)


@cache
def hopper_kernel(tile: HopperTile, heads: int, bf16: bool, fp8: bool) -> Kernel:
    """The kernel of a tile, for `heads` query heads per KV head.

    Raises ValueError for a window that the tile's consumers do not hold.
    """
    if tile.group_rows > min(tile.consumers * (HopperTile.LINES // heads), MAX_WINDOW_ROWS):
        raise ValueError(f"{tile.consumers} consumers do not hold {tile.group_rows} rows of {heads} heads")
    producer, consumer = CONSUMER_REGISTERS[FP8 if fp8 else torch.float16]
    defines = (
        ("CONSUMERS", tile.consumers),
        ("STAGES", tile.stages),
        ("HEADS", heads),
        ("BF16", int(bf16)),
        ("FP8", int(fp8)),
        ("PRODUCER_REGISTERS", producer),
        ("CONSUMER_REGISTERS", consumer),
    )
    return Kernel(
        Source("attend.cu", defines, headers=("hopper.cuh",), suffix="a", folder=Path(__file__).parent),
        "flashqsa_attend_sm90",
        attend.PARAMETERS,
        CAPABILITY,
        128 * (1 + tile.consumers),
        tile.shared_bytes,
    )
