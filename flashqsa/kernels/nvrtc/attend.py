"""How the attention kernels in CUDA C++ take a call: one order of arguments for `sm7x` and `sm90`."""

from __future__ import annotations

import math

from torch import Tensor

from flashqsa.attend_shape import Split
from flashqsa.kernels.nvrtc.worklist import WindowLists
from flashqsa.kernels.nvrtc.write import scale_arguments
from flashqsa.values import KvCache, Partial, QsaSpec, Rows

PARAMETERS = "P" * 15 + "q" * 11 + "i" * 9 + "ff" + "0q"
"""Types of the members of the kernels' `Arguments`, as `Kernel` takes them; it ends at a multiple of 8 bytes."""


def arguments(
    q: Tensor,
    kv_cache: KvCache,
    lists: WindowLists,
    rows: Rows,
    spec: QsaSpec,
    split: Split,
    gate: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    partial: Partial | None,
) -> tuple[int | float, ...]:
    """Values of the members of `Arguments`, in order. Strides are in bytes; a pointer that is not needed is 0.

    Scales per KV head are passed by their address, and 1 beside them; the softmax scale goes into that of the keys, and
    log2(e) too, since the kernels take powers of two.
    """
    keys, values = kv_cache.keys, kv_cache.values
    k_scales, k_scale = scale_arguments(kv_cache.k_scale)
    v_scales, v_scale = scale_arguments(kv_cache.v_scale)
    first_part_row = split.whole // spec.kv_heads * lists.group_rows
    return (
        q.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        k_scales,
        v_scales,
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
        lists.unit * keys.element_size(),
        *_strides_bytes(q, 0, 1),
        *_strides_bytes(keys, 1, 2),
        *_strides_bytes(values, 1, 2),
        *((0, 0) if gate is None else _strides_bytes(gate, 0, 1)),
        *_strides_bytes(out, 0, 1),
        rows.count,
        spec.kv_heads,
        lists.group_rows,
        lists.capacity,
        split.whole,
        split.parts,
        first_part_row,
        rows.count - first_part_row,
        int(split.inside),
        spec.softmax_scale * math.log2(math.e) * k_scale,
        v_scale,
    )


def _strides_bytes(tensor: Tensor, *axes: int) -> tuple[int, ...]:
    return tuple(tensor.stride(axis) * tensor.element_size() for axis in axes)
