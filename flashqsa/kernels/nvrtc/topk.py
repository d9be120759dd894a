"""Exact top-k on any NVIDIA GPU: launches the two kernels of `topk.cu`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from flashqsa.config import TopkConfig
from flashqsa.kernels.nvrtc.compiler import Source
from flashqsa.kernels.nvrtc.driver import Kernel
from flashqsa.values import MAX_TOP_BLOCKS, SEGMENT_BLOCKS, Scores, Selection

FLOATS_PER_VECTOR = 4
"""Scores are read 16 bytes at a time where rows allow it."""

MAXIMA_LOADS = 4
"""Vectors that a thread of `segment_maxima` reads."""


@dataclass(frozen=True)
class Variant:
    """What `topk.cu` is compiled for.

    threads         of a program
    segments        that a thread looks into: threads * segments holds the blocks to select
    maxima_vectors  vectors of segment maxima that a thread ranks at most
    resident        threads that should fit on a multiprocessor

    >>> variant_for(512, 46_000, TopkConfig((9, 0), threads=256, resident=1536))
    Variant(threads=256, segments=2, maxima_vectors=4, resident=1536)
    """

    threads: int
    segments: int
    maxima_vectors: int
    resident: int

    @property
    def source(self) -> Source:
        """The source, with this variant's macros."""
        macros = (
            ("THREADS", self.threads),
            ("SEGMENTS", self.segments),
            ("MAXIMA_VECTORS", self.maxima_vectors),
            ("RESIDENT", self.resident),
        )
        return Source("topk.cu", macros, headers=("topk.cuh", "ranking.cuh"))


def variant_for(top_blocks: int, width: int, config: TopkConfig) -> Variant:
    """The variant for rows of `width` blocks. Sizes are rounded up to powers of 2 and 4, so that few are compiled."""
    threads = config.threads
    segments = _power_of_two(-(-top_blocks // threads))
    vectors = _power_of_four(-(-width // (SEGMENT_BLOCKS * FLOATS_PER_VECTOR * threads)))
    # A thread that keeps more keys than this would spill them at full residency.
    crowded = segments * SEGMENT_BLOCKS > 32 or vectors * FLOATS_PER_VECTOR > 16
    return Variant(threads, segments, vectors, threads if crowded else config.resident)


def topk(scores: Scores, out: Selection, config: TopkConfig) -> None:
    """Writes each row's best blocks and their number into `out`, in place: see `reference.topk` for what is best.

    scores  of the rows of `out`; columns from `visible` on are not looked at; last stride 1
    out     [rows, top_blocks], at most MAX_TOP_BLOCKS; every entry is written; last stride 1

    -0.0 equals 0.0. NaN and -inf are never selected, so a row may get fewer than `top_blocks`. Segment maxima are taken
    from `scores` where it holds them. Raises CompileError, NvrtcNotFoundError, DriverError.
    """
    values, top_blocks = scores.values, out.blocks.shape[1]
    rows, width = values.shape
    if rows == 0 or top_blocks == 0:
        out.count.zero_()
        return
    if top_blocks > MAX_TOP_BLOCKS:
        raise ValueError(f"the top-k selects at most {MAX_TOP_BLOCKS} blocks, not {top_blocks}")
    kernels = _kernels(variant_for(top_blocks, width, config), config.capability)
    aligned = int(values.stride(0) % FLOATS_PER_VECTOR == 0 and values.data_ptr() % 16 == 0)
    maxima = scores.maxima
    if maxima is None:
        maxima = _find_maxima(scores, top_blocks, aligned, kernels)
    kernels.select.launch(
        values.device,
        rows,
        values.data_ptr(),
        values.stride(0),
        maxima.data_ptr(),
        maxima.stride(0),
        scores.visible.data_ptr(),
        out.blocks.data_ptr(),
        out.blocks.stride(0),
        out.count.data_ptr(),
        top_blocks,
        aligned,
    )


@dataclass(frozen=True)
class _Kernels:
    maxima: Kernel
    select: Kernel


@cache
def _kernels(variant: Variant, capability: tuple[int, int]) -> _Kernels:
    return _Kernels(
        Kernel(variant.source, "segment_maxima", "PqPPqii", capability, variant.threads),
        Kernel(variant.source, "select_rows", "PqPqPPqPii", capability, variant.threads),
    )


def _find_maxima(scores: Scores, top_blocks: int, aligned: int, kernels: _Kernels) -> Tensor:
    """Segment maxima of every row; of none where no row has more segments than it may select."""
    rows, width = scores.values.shape
    segments = -(-width // SEGMENT_BLOCKS)
    if segments <= top_blocks:
        return torch.empty((rows, 0), dtype=torch.float32, device=scores.values.device)
    stride = -(-segments // FLOATS_PER_VECTOR) * FLOATS_PER_VECTOR
    maxima = torch.empty((rows, stride), dtype=torch.float32, device=scores.values.device)
    slices = -(-width // (kernels.maxima.threads * FLOATS_PER_VECTOR * MAXIMA_LOADS))
    kernels.maxima.launch(
        maxima.device,
        rows * slices,
        scores.values.data_ptr(),
        scores.values.stride(0),
        scores.visible.data_ptr(),
        maxima.data_ptr(),
        stride,
        slices,
        aligned,
    )
    return maxima


def _power_of_two(number: int) -> int:
    """The smallest power of two that is no less than `number`."""
    exponent = max(number - 1, 0).bit_length()
    return 1 << exponent


def _power_of_four(number: int) -> int:
    """The smallest power of four from 4 on that is no less than `number`."""
    exponent = -(-max(number - 1, 0).bit_length() // 2)
    return 1 << 2 * max(exponent, 1)
