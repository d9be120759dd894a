"""Refusals by name of tensors that are not laid out as vLLM lays them out."""

from __future__ import annotations

from torch import Tensor

from flashqsa.integrations.vllm.errors import LayoutError


def check_shape(argument: str, tensor: Tensor, wanted: tuple[int | None, ...]) -> None:
    """Raises LayoutError for a tensor of another shape; None stands for any size."""
    shape = tuple(tensor.shape)
    if len(shape) != len(wanted) or any(w not in (None, s) for w, s in zip(wanted, shape, strict=True)):
        sizes = ", ".join("any" if size is None else str(size) for size in wanted)
        raise LayoutError(argument, f"shape [{sizes}]", list(shape))


def top_blocks_of(token_topk: int, compress_ratio: int) -> int:
    """Blocks in a full selection, or LayoutError where tokens do not make whole blocks."""
    if compress_ratio < 1 or token_topk < compress_ratio or token_topk % compress_ratio:
        raise LayoutError("token_topk", f"a multiple of compress_ratio = {compress_ratio}, at least 1", token_topk)
    return token_topk // compress_ratio
