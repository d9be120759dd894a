"""Attention over the whole from attention over parts: for a context whose keys and values lie in several places."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flashqsa import check, reference
from flashqsa.machine import facts_here
from flashqsa.pipeline import kernel_set
from flashqsa.values import Partial

TRITON_SET = "smxx"
"""The kernel set whose merge takes parts of any float type and of any number, in one launch."""


@torch.no_grad()
def merge_lse(
    outputs: Tensor | Sequence[Tensor], lses: Tensor | Sequence[Tensor], gate: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of rows over everything, from their attention over parts that share no token.

    outputs  [parts, rows, q_heads, head_dim], or one [rows, q_heads, head_dim] for each part: what `sparse_attention`
             gives without a gate; FP32, FP16 or BF16
    lses     [parts, rows, q_heads] FP32, or one [rows, q_heads] for each part: the natural log-sum-exp that
             `return_lse=True` adds; -inf where a part sees nothing of a row, whose output there is 0
    gate     [rows, q_heads, head_dim] before its sigmoid, any float: multiplies the merged, rounded output in FP32

    With lse = log sum_p exp(lse_p), the output is sum_p exp(lse_p - lse) * output_p: the softmax over the union of
    tokens, split by where they lie (the rescaling of online softmax: Milakov and Gimelshein, arXiv:1805.02867).
    Returns it [rows, q_heads, head_dim] in the outputs' dtype, worked out in FP32 and rounded once (with a gate, once
    more), and lse [rows, q_heads] FP32: 0 and -inf for a row that no part sees, NaN where an lse is. Parts are added
    in their order, so processes that hold the same parts in the same order get the same bits. No gradient is recorded.

    In context parallel every process has the index keys of the whole context, a page table with holes (-1) where
    another has the keys and values, and so the same selection; what is merged was gathered from all of them. Parts in
    half precision have been rounded once before.

    Raises InputError.

    >>> outputs = torch.stack([torch.zeros(1, 1, 2), torch.ones(1, 1, 2)])
    >>> output, lse = merge_lse(outputs, torch.tensor([[[0.0]], [[0.0]]]))
    >>> output.tolist(), round(lse.item(), 4)
    ([[[0.5, 0.5]]], 0.6931)
    """
    outputs, lses = check.check_parts(outputs, lses, gate)
    head_dim = outputs.shape[-1]
    if TRITON_SET not in facts_here(outputs.device).kernel_sets or head_dim & (head_dim - 1):
        return _merge_in_torch(outputs, lses, gate)
    output, lse = torch.empty_like(outputs[0]), torch.empty_like(lses[0])
    with torch.cuda.device_of(output):  # type: ignore[no-untyped-call]
        kernel_set(TRITON_SET).merge(Partial(outputs, lses), gate, output, lse)
    return output, lse


def _merge_in_torch(outputs: Tensor, lses: Tensor, gate: Tensor | None) -> tuple[Tensor, Tensor]:
    lse = torch.logsumexp(lses, dim=0)
    # Weights that sum to 1 whatever lse was rounded to: at 50 half a unit of its last place is 2e-6.
    # A NaN of one part is a NaN of the whole; 0 / 0 of a row that no part sees is not.
    weights = torch.where(lse == float("-inf"), 0.0, torch.softmax(lses, dim=0))
    whole = torch.zeros(outputs.shape[1:], dtype=torch.float32, device=outputs.device)
    for weight, output in zip(weights, outputs, strict=True):
        whole.addcmul_(output.float(), weight[..., None])
    return reference.gated(whole, gate, outputs.dtype), lse
