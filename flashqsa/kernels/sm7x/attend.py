"""The attention kernel of compute capability 7.x, in CUDA C++: `attend.cu`. Same lists as the others', same results."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from torch import Tensor

from flashqsa.attend_shape import MAX_WINDOW_ROWS, AttendTile, Sm7xTile, Split
from flashqsa.kernels.nvrtc import Kernel, Source, attend
from flashqsa.kernels.nvrtc.worklist import WindowLists
from flashqsa.values import FP8, KvCache, Partial, QsaSpec, Rows

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
    kernel = sm7x_kernel(tile, spec.heads_per_kv_head, kv_cache.keys.dtype == FP8)
    arguments = attend.arguments(q, kv_cache, lists, rows, spec, split, gate, out, lse, partial)
    kernel.launch(q.device, split.programs, *arguments)


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
    return Kernel(source, "flashqsa_attend_sm7x", attend.PARAMETERS, tile.capability, THREADS, tile.shared_bytes)
