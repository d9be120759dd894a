"""The whole attend stage: worklist, attention and merge, in as few launches as they take (two, or three)."""

from __future__ import annotations

import torch
from torch import Tensor

from flashqsa.config import AttendShape, HopperTile, Split
from flashqsa.kernels.smxx.attend import attend_triton
from flashqsa.kernels.smxx.hopper import attend_hopper
from flashqsa.kernels.smxx.merge import merge
from flashqsa.kernels.smxx.worklist import empty_lists, list_windows
from flashqsa.values import KvCache, Partial, QsaSpec, Rows, Selection


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
) -> tuple[Tensor, Tensor | None]:
    """Gated attention of every row over its selected blocks and its tail; over all it sees without a selection.

    q, gate      [rows, q_heads, head_dim] FP16 or BF16 in the cache's dtype; any float with an FP8 cache
    shape        from `config.attend_shape`, for these rows; Hopper's own tile only where `hopper_refusal` has no reason
    capability   of the device
    limit_bytes  for the worklists: rows are taken in chunks of whole windows where they need more

    Returns output [rows, q_heads, head_dim] in q's dtype, and lse [rows, q_heads] FP32 or None. Nothing waits for the
    device, and every size follows from host numbers, so the call may be captured in a CUDA graph once it has run.
    """
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if return_lse else None
    step = shape.chunk_rows(spec, limit_bytes)
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
) -> None:
    tile, split = shape.tile, shape.split(rows.count, spec)
    counters = spec.kv_heads * (tile.consumers if isinstance(tile, HopperTile) else 1)
    lists = empty_lists(rows, spec, kv_cache, tile.group_rows, shape.capacity, counters)
    list_windows(lists, selection, rows, spec, kv_cache, capability)
    partial = empty_partial(split, tile.group_rows, rows.count, spec, q.device)
    if isinstance(tile, HopperTile):
        attend_hopper(q, kv_cache, lists, rows, spec, tile, split, gate, out, lse, partial)
    else:
        attend_triton(q, kv_cache, lists, rows, spec, tile, split, gate, out, lse, partial)
    if partial is not None and not split.inside:
        merge(partial, gate, out, lse)
