"""The attention kernel of compute capability 7.x, in CUDA C++: `attend.cu`. Same lists as the others', same results."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

from torch import Tensor

from flashqsa.attend_shape import MAX_WINDOW_ROWS, AttendTile, Sm7xTile, Split
from flashqsa.kernels.nvrtc import Kernel, Source
from flashqsa.kernels.nvrtc.worklist import WindowLists
from flashqsa.values import FP8, KvCache, Partial, QsaSpec, Rows

PARAMETERS = "P" * 15 + "q" * 11 + "i" * 9 + "ff" + "0q"
"""Members of the kernel's `Arguments`."""

THREADS = 256
"""Of a program: 8 warps of 16 query lines each."""


def attend_sm7x(
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
    """Attention of every row over the tokens that its window's list gives it.

    q, gate, out  [rows, q_heads, head_dim] FP16
    lse           [rows, q_heads] FP32, natural, or None
    partial       from `sparse.empty_partial`: where cut units leave their parts

    For calls that `attend_shape.sm7x_refusal` has nothing against. Writes `out` and, where asked for, `lse` of the rows
    whose units are not cut, or are merged inside. Logits, softmax and sums are FP32, probabilities FP16. A row that
    sees nothing gets output 0 and lse -inf. Raises TypeError for a tile of another kernel.
    """
    if not isinstance(tile, Sm7xTile):
        raise TypeError(f"wanted an Sm7xTile, got {tile}")
    keys, values = kv_cache.keys, kv_cache.values
    k_scale = kv_cache.k_scale if kv_cache.k_scale is not None else 1.0
    v_scale = kv_cache.v_scale if kv_cache.v_scale is not None else 1.0
    first_part_row = split.whole // spec.kv_heads * lists.group_rows
    gate_strides = (0, 0) if gate is None else gate.stride()[:2]

    def size(tensor: Tensor) -> int:
        return tensor.element_size()

    kernel = sm7x_kernel(tile, spec.heads_per_kv_head, keys.dtype == FP8)
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
def sm7x_kernel(tile: Sm7xTile, heads: int, fp8: bool) -> Kernel:
    """The kernel of a tile, for `heads` query heads per KV head.

    Raises ValueError for a window that the tile does not hold.
    """
    if tile.group_rows > min(Sm7xTile.LINES // heads, MAX_WINDOW_ROWS):
        raise ValueError(f"{Sm7xTile.LINES} lines do not hold {tile.group_rows} rows of {heads} heads")
    defines = (
        ("TURING", int(tile.turing)),
        ("D", tile.head_dim),
        ("HEADS", heads),
        ("FP8", int(fp8)),
        ("KEPT", tile.kept_groups),
    )
    source = Source("attend.cu", defines, headers=("mma.cuh",), folder=Path(__file__).parent)
    return Kernel(source, "flashqsa_attend_sm7x", PARAMETERS, tile.capability, THREADS, tile.shared_bytes)
