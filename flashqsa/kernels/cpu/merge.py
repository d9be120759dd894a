"""The last stage: parts of a row put together, the one rounding, and the gate."""

from __future__ import annotations

import torch
from torch import Tensor

from flashqsa.values import Partial

CHUNK_ELEMENTS = 1 << 18
"""Elements gated at a time: 1 MiB of FP32 scratch."""


def merge(partial: Partial, gate: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Output [rows, q_heads, head_dim] in `dtype` and lse [rows, q_heads] FP32.

    gate  [rows, q_heads, head_dim]: the rounded output is multiplied by its sigmoid in FP32 and rounded once more

    The CPU set attends in one part. An FP32 result takes over the partial's memory.
    """
    output = partial.output[0]
    if dtype != torch.float32:
        output = output.to(dtype)
    if gate is not None:
        step = max(CHUNK_ELEMENTS // max(output[:1].numel(), 1), 1)
        for start in range(0, output.shape[0], step):
            part = output[start : start + step]
            weight = torch.sigmoid(gate[start : start + step].detach().to(torch.float32))
            part.copy_(weight.mul_(part))
    return output, partial.lse[0]
