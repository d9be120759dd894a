"""The sources of this folder that a plan may ask NVRTC for: what `flashqsa build` compiles ahead."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from flashqsa.attend_shape import HopperTile
from flashqsa.kernels.nvrtc import Source
from flashqsa.kernels.sm90.attend import hopper_kernel
from flashqsa.kernels.sm90.select import fused_kernels
from flashqsa.plan import Plan
from flashqsa.select_shape import FusedShape
from flashqsa.values import FP8


def sources(plan: Plan) -> Iterator[Source]:
    """The sources of attention and of the fused indexer, where the plan's stages are this folder's."""
    call, shape, fused = plan.call, plan.attend.shape, plan.select.fused
    if shape is not None and isinstance(shape.tile, HopperTile):
        bf16, fp8 = call.q_dtype == torch.bfloat16, call.cache_dtype == FP8
        yield hopper_kernel(shape.tile, call.spec.heads_per_kv_head, bf16, fp8).source
    if isinstance(fused, FusedShape):
        bf16 = (call.index_q_dtype or call.q_dtype) == torch.bfloat16
        kernels = fused_kernels(call.spec, fused, plan.select.width_blocks, bf16)
        yield from (kernel.source for kernel in kernels.all)
