"""The sources of this folder that a plan may ask NVRTC for: what `flashqsa build` compiles ahead."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch

from flashqsa.attend_shape import HopperTile
from flashqsa.kernels.nvrtc import Source
from flashqsa.kernels.sm90.attend import hopper_kernel
from flashqsa.kernels.sm90.decode import decode_kernel
from flashqsa.kernels.sm90.select import fused_kernels
from flashqsa.plan import Plan
from flashqsa.select_shape import DECODE_SIZES, DecodeShape, FusedShape, decode_shape, fused_shape
from flashqsa.values import FP8

FUSED_BLOCKS = tuple(1 << power for power in range(11, 19))
"""Blocks of rows that the fused indexer is compiled for: up to 1,048,576 tokens in blocks of 4."""

FUSED_ROWS = (1024, 1616, 4096, 8192, 65_536)
"""Rows, likewise: whether one program or several score a window decides over a kernel."""

FUSED_LIMIT = 128 << 20
"""Bytes of workspace, likewise."""


def sources(plan: Plan) -> Iterator[Source]:
    """The sources of attention and of the fused indexer, where the plan's stages are this folder's."""
    call, shape, fused = plan.call, plan.attend.shape, plan.select.fused
    if shape is not None and isinstance(shape.tile, HopperTile):
        bf16, fp8 = call.q_dtype == torch.bfloat16, call.cache_dtype == FP8
        yield hopper_kernel(shape.tile, call.spec.heads_per_kv_head, bf16, fp8).source
    if isinstance(fused, DecodeShape):
        for rows, *_ in DECODE_SIZES:
            few = decode_shape(call.spec, rows, call.max_position, plan.facts)
            yield decode_kernel(call.spec, few, (call.index_q_dtype or call.q_dtype) == torch.bfloat16).source
    if isinstance(fused, FusedShape):
        bf16 = (call.index_q_dtype or call.q_dtype) == torch.bfloat16
        # Lengths between those of the plans come up too, and few kernels serve them all.
        for blocks, rows in product(FUSED_BLOCKS, FUSED_ROWS):
            shape_there = fused_shape(call.spec, rows, blocks * call.spec.block_tokens - 1, plan.facts, FUSED_LIMIT)
            kernels = fused_kernels(call.spec, shape_there, blocks, bf16)
            yield from (kernel.source for kernel in kernels.all)
