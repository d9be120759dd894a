"""Merging parts of rows on GPUs of compute capability 7.x: `merge.cu`."""

from __future__ import annotations

import functools
from functools import cache
from pathlib import Path

from torch import Tensor

from flashqsa.kernels.nvrtc import Kernel, Source
from flashqsa.kernels.nvrtc.sparse import MergeLaunch
from flashqsa.values import Partial

PARAMETERS = "P" * 5 + "q" * 5 + "ii"
"""Parameter types of `flashqsa_merge_sm7x`."""

THREADS = 256
"""Of a program, which merges a query head with each of its warps."""


def merge(
    partial: Partial, gate: Tensor | None, out: Tensor, lse: Tensor | None, *, capability: tuple[int, int]
) -> None:
    """Merges parts of whole rows, always in their order.

    partial     [parts, rows, q_heads, head_dim] and [parts, rows, q_heads] FP32, contiguous
    gate, out   [rows, q_heads, head_dim] FP16
    lse         [rows, q_heads] FP32, natural, or None
    capability  of the device
    """
    parts, rows, q_heads, head_dim = partial.output.shape
    heads, heads_per_program = rows * q_heads, THREADS // 32
    merge_kernel(capability, head_dim).launch(
        out.device,
        -(-heads // heads_per_program),
        partial.output.data_ptr(),
        partial.lse.data_ptr(),
        0 if gate is None else gate.data_ptr(),
        out.data_ptr(),
        0 if lse is None else lse.data_ptr(),
        *((0, 0) if gate is None else (stride * gate.element_size() for stride in gate.stride()[:2])),
        *(stride * out.element_size() for stride in out.stride()[:2]),
        heads,
        q_heads,
        parts,
    )


@cache
def merge_on(capability: tuple[int, int]) -> MergeLaunch:
    """`merge` for devices of one compute capability, as `sparse.AttendKernels` takes it."""
    return functools.partial(merge, capability=capability)


@cache
def merge_kernel(capability: tuple[int, int], head_dim: int) -> Kernel:
    """The kernel of a device, for heads of 64, 128 or 256."""
    defines = (("TURING", int(capability >= (7, 5))), ("D", head_dim))
    source = Source("merge.cu", defines, headers=("mma.cuh",), folder=Path(__file__).parent)
    return Kernel(source, "flashqsa_merge_sm7x", PARAMETERS, capability, THREADS)
