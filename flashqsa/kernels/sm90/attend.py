"""The attention kernel of compute capability 9.0, in CUDA C++: `attend.cu`. Same lists as Triton's, same results."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from flashqsa.attend_shape import MAX_WINDOW_ROWS, AttendTile, HopperTile, Split
from flashqsa.kernels.nvrtc import Kernel, Source
from flashqsa.kernels.nvrtc.worklist import WindowLists
from flashqsa.values import FP8, KvCache, Partial, QsaSpec, Rows

CAPABILITY = (9, 0)

PARAMETERS = "P" * 15 + "q" * 11 + "i" * 9 + "ff" + "0q"
"""Members of the kernel's `Arguments`."""

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
    keys, values = kv_cache.keys, kv_cache.values
    fp8 = keys.dtype == FP8
    k_scale = kv_cache.k_scale if kv_cache.k_scale is not None else 1.0
    v_scale = kv_cache.v_scale if kv_cache.v_scale is not None else 1.0
    first_part_row = split.whole // spec.kv_heads * lists.group_rows
    gate_strides = (0, 0) if gate is None else gate.stride()[:2]

    def size(tensor: Tensor) -> int:
        return tensor.element_size()

    kernel = hopper_kernel(tile, spec.heads_per_kv_head, q.dtype == torch.bfloat16, fp8)
    kernel.launch(
        q.device,
        split.programs,
        q.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        k_scale.data_ptr() if isinstance(k_scale, Tensor) else 0,
        v_scale.data_ptr() if isinstance(v_scale, Tensor) else 0,
        0 if gate is None else gate.data_ptr(),
        out.data_ptr(),
        0 if lse is None else lse.data_ptr(),
        lists.places.data_ptr(),
        0 if lists.value_places is None else lists.value_places.data_ptr(),
        lists.token_masks.data_ptr(),
        lists.entries.data_ptr(),
        lists.done.data_ptr(),
        0 if partial is None else partial.output.data_ptr(),
        0 if partial is None else partial.lse.data_ptr(),
        lists.unit * size(keys),
        *(stride * size(q) for stride in q.stride()[:2]),
        *(stride * size(keys) for stride in keys.stride()[1:3]),
        *(stride * size(values) for stride in values.stride()[1:3]),
        *(stride * size(q) for stride in gate_strides),
        *(stride * size(out) for stride in out.stride()[:2]),
        rows.count,
        spec.kv_heads,
        lists.group_rows,
        lists.capacity,
        split.whole,
        split.parts,
        first_part_row,
        rows.count - first_part_row,
        int(split.inside),
        spec.softmax_scale * math.log2(math.e) * (1.0 if isinstance(k_scale, Tensor) else k_scale),
        1.0 if isinstance(v_scale, Tensor) else v_scale,
    )


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
        PARAMETERS,
        CAPABILITY,
        128 * (1 + tile.consumers),
        tile.shared_bytes,
    )
