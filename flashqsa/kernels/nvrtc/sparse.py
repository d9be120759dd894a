"""The whole attend stage of a GPU: worklist, attention and merge, in as few launches as they take (two, or three).

The kernels of attention and merge are the caller's; the worklist is shared by all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from flashqsa.attend_shape import AttendShape, AttendTile, Split
from flashqsa.kernels.nvrtc.worklist import WindowLists, empty_lists, list_windows
from flashqsa.values import KvCache, Partial, QsaSpec, Rows, Selection


class AttendLaunch(Protocol):
    """The launcher of an attention kernel, such as `smxx.attend.attend_triton`."""

    def __call__(
        self,
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
        """Attends: writes `out` and `lse`, and what is merged apart into `partial`."""


class MergeLaunch(Protocol):
    """The launcher of a merge kernel, such as `smxx.merge.merge`."""

    def __call__(self, partial: Partial, gate: Tensor | None, out: Tensor, lse: Tensor | None) -> None:
        """Merges the parts of whole rows into `out`, gated, and `lse`."""


@dataclass(frozen=True)
class AttendKernels:
    """What a kernel set brings to this stage."""

    attend: AttendLaunch
    merge: MergeLaunch


def sparse_attention(
    q: Tensor,
    kv_cache: KvCache,
    selection: Selection | None,
    rows: Rows,
    spec: QsaSpec,
    gate: Tensor | None,
    return_lse: bool,
    shape: AttendShape,
    capability: tuple[int, int],
    limit_bytes: int,
    kernels: AttendKernels,
) -> tuple[Tensor, Tensor | None]:
    """Gated attention of every row over its selected blocks and its tail; over all it sees without a selection.

    q, gate      [rows, q_heads, head_dim] in the cache's dtype; any float with an FP8 cache
    shape        from `attend_shape.attend_shape`, for these rows and kernels
    capability   of the device
    limit_bytes  for the worklists: rows are taken in chunks of whole windows where they need more

    Returns output [rows, q_heads, head_dim] in q's dtype, and lse [rows, q_heads] FP32 or None. Nothing waits for the
    device, and every size follows from host numbers, so the call may be captured in a CUDA graph once it has run.
    """
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if return_lse else None
    step = shape.chunk_rows(spec, limit_bytes)
    with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]
        if 0 < rows.count <= step:
            _attend_rows(q, kv_cache, selection, rows, spec, gate, out, lse, shape, capability, kernels)
            return out, lse
        for start in range(0, rows.count, step):
            part = slice(start, min(start + step, rows.count))
            _attend_rows(
                q[part],
                kv_cache,
                None if selection is None else selection.slice(part.start, part.stop),
                rows.slice(part.start, part.stop),
                spec,
                None if gate is None else gate[part],
                out[part],
                None if lse is None else lse[part],
                shape,
                capability,
                kernels,
            )
    return out, lse


def empty_partial(split: Split, group_rows: int, rows: int, spec: QsaSpec, device: torch.device) -> Partial | None:
    """Memory for the parts of the rows that have cut units; None where nothing is cut."""
    if split.cut == 0:
        return None
    part_rows = rows - split.whole // spec.kv_heads * group_rows
    output = torch.empty((split.parts, part_rows, spec.q_heads, spec.head_dim), dtype=torch.float32, device=device)
    return Partial(output, torch.empty(output.shape[:-1], dtype=torch.float32, device=device))


def _attend_rows(
    q: Tensor,
    kv_cache: KvCache,
    selection: Selection | None,
    rows: Rows,
    spec: QsaSpec,
    gate: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    shape: AttendShape,
    capability: tuple[int, int],
    kernels: AttendKernels,
) -> None:
    tile, split = shape.tile, shape.split(rows.count, spec)
    lists = empty_lists(rows, spec, kv_cache, tile.group_rows, shape.capacity, spec.kv_heads * tile.counters)
    list_windows(lists, selection, rows, spec, kv_cache, capability)
    partial = empty_partial(split, tile.group_rows, rows.count, spec, q.device)
    kernels.attend(q, kv_cache, lists, rows, spec, tile, split, gate, out, lse, partial)
    if partial is not None and not split.inside:
        kernels.merge(partial, gate, out, lse)
