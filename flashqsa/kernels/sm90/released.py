"""The sources of this folder that a plan may ask NVRTC for: what `flashqsa build` compiles ahead."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from flashqsa.attend_shape import HopperTile
from flashqsa.kernels.nvrtc import Source
from flashqsa.kernels.sm90.attend import hopper_kernel
from flashqsa.plan import Plan
from flashqsa.values import FP8


def sources(plan: Plan) -> Iterator[Source]:
    """The source of attention, where the plan's tile is this folder's."""
    call, shape = plan.call, plan.attend.shape
    if shape is not None and isinstance(shape.tile, HopperTile):
        bf16, fp8 = call.q_dtype == torch.bfloat16, call.cache_dtype == FP8
        yield hopper_kernel(shape.tile, call.spec.heads_per_kv_head, bf16, fp8).source
