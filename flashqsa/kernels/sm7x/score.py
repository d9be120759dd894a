"""Index scores for Volta and Turing: each long request of a call by cuBLAS, the rest by a paged scorer.

The paged scorer (`score.cu`), on tensor cores, serves rows of any requests together. Where the host knows that one
request brings rows enough (`score_split`), cuBLAS multiplies its rows and heads with its keys (`nvrtc/products.py`),
into the same matrix of scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from flashqsa.config import SM7X_SHARED_BYTES, Sm7xScoreConfig, sm7x_query_bytes
from flashqsa.kernels.nvrtc import Kernel, Source
from flashqsa.kernels.nvrtc.products import empty_scores, is_aligned, score_products, score_scale
from flashqsa.score_split import score_split
from flashqsa.values import FP8, IndexCache, QsaSpec, Rows, Scores

FOLDER = Path(__file__).parent

RANGES = 4
"""Ranges of rows that a launch of the paged scorer takes: `RANGES` of `score.cu`."""

NO_RANGE = (0, 0, 2**31 - 1)
"""A range that holds no window: its first is never reached."""

SCORE_PARAMETERS = "P" * 8 + "q" * 7 + "f" + "i" * 11 + "iii" * RANGES + "0q"
"""Members of `Arguments` of `score.cu`."""


@dataclass(frozen=True)
class ScoreVariant:
    """What `score.cu` is compiled for: see its macros, and `Sm7xScoreConfig`.

    >>> variant = ScoreVariant(16, 4, 128, strips=2, warps=4, resident=2, e4m3=False, aligned=True, quad_pairs=True)
    >>> variant.source.options[:3], variant.shared_bytes
    (('-DROWS=16', '-DHEADS=4', '-DDIM=128'), 20480)
    """

    rows: int
    heads: int
    dim: int
    strips: int
    warps: int
    resident: int
    e4m3: bool
    aligned: bool
    quad_pairs: bool

    @property
    def source(self) -> Source:
        """The source, with this variant's macros."""
        macros = (
            ("ROWS", self.rows),
            ("HEADS", self.heads),
            ("DIM", self.dim),
            ("STRIPS", self.strips),
            ("WARPS", self.warps),
            ("RESIDENT", self.resident),
            ("E4M3", int(self.e4m3)),
            ("ALIGNED", int(self.aligned)),
            ("QUAD_PAIRS", int(self.quad_pairs)),
        )
        return Source("score.cu", macros, headers=("score_mma.cuh",), folder=FOLDER)

    @property
    def shared_bytes(self) -> int:
        """Of the queries of a program: the larger of what both kinds of products take."""
        return sm7x_query_bytes(QsaSpec(index_heads=self.heads, index_dim=self.dim), self.rows)


def variant_for(spec: QsaSpec, config: Sm7xScoreConfig, e4m3: bool, aligned: bool) -> ScoreVariant:
    """The variant of a configuration."""
    return ScoreVariant(
        config.rows,
        spec.index_heads,
        spec.index_dim,
        config.strips,
        config.warps,
        config.resident,
        e4m3,
        aligned,
        config.quad_pairs,
    )


def score(index_q: Tensor, index_cache: IndexCache, rows: Rows, spec: QsaSpec, config: Sm7xScoreConfig) -> Scores:
    """Scores of each row's visible blocks: index_dim^(-1/2) * sum over heads of relu(<index_q, key>), in FP32.

    index_q  [rows, index_heads, index_dim] FP16, any strides, last one 1; a chunk of a call's rows

    The cache's keys are FP16 or FP8-E4M3, whose scale is folded into the result. A block on a hole scores -inf. Rows
    that see no more than `top_blocks` blocks take them all, so they score 0 there. Columns that a row does not see are
    not written. The result holds segment maxima where the top-k can use them. Nothing waits for the device, and every
    size follows from host numbers. `config` is from `config.sm7x_score_config`, for a call that `sm7x_score_refusal`
    has nothing against. Raises TypeError for other dtypes, and CompileError, NvrtcNotFoundError, DriverError.

    The paged scorer goes by the row's own request and position. Where cuBLAS scores, a row that is padding or of
    another request than its run's sees nothing, and one past the run's bound no further than the bound.
    """
    keys = index_cache.keys
    if index_q.dtype != torch.float16 or keys.dtype not in (torch.float16, FP8):
        raise TypeError(f"wanted FP16 queries and FP16 or FP8 keys, got {index_q.dtype} and {keys.dtype}")
    width = max(spec.visible_blocks(rows.max_position), 1)
    whole = empty_scores(rows, spec)
    split = score_split(spec, rows.count, index_cache.requests, rows.max_position, rows.runs, config)
    if split.products:
        score_products(index_q, index_cache, rows, spec, split.products, config.capability, whole)
    for first in range(0, len(split.ranges), RANGES):
        ranges = split.ranges[first : first + RANGES]
        _score_pages(index_q, index_cache, rows, spec, split.pages, ranges, whole, width)
    return Scores(whole.values[:, :width], whole.visible, whole.maxima)


def _score_pages(
    index_q: Tensor,
    index_cache: IndexCache,
    rows: Rows,
    spec: QsaSpec,
    config: Sm7xScoreConfig,
    ranges: Sequence[tuple[int, int]],
    out: Scores,
    width: int,
) -> None:
    """One launch of the paged scorer, for up to RANGES ranges of rows."""
    keys, table = index_cache.keys, index_cache.page_table
    e4m3 = keys.dtype == FP8
    windows, slices = 0, -(-width // config.slice_blocks)
    packed: list[int] = []
    for start, stop in ranges:
        packed += (start, stop, windows)
        windows += -(-(stop - start) // config.window)
    packed += NO_RANGE * (RANGES - len(ranges))
    _score_kernel(variant_for(spec, config, e4m3, is_aligned(index_q, keys)), config.capability).launch(
        index_q.device,
        windows * config.runs * slices,
        index_q.data_ptr(),
        keys.data_ptr(),
        table.data_ptr(),
        rows.request.data_ptr(),
        rows.position.data_ptr(),
        out.values.data_ptr(),
        0 if out.maxima is None else out.maxima.data_ptr(),
        out.visible.data_ptr(),
        index_q.stride(0),
        index_q.stride(1),
        keys.stride(0),
        keys.stride(1),
        table.stride(0),
        out.values.stride(0),
        0 if out.maxima is None else out.maxima.stride(0),
        score_scale(index_q, index_cache, spec),
        config.window,
        windows,
        config.slice_blocks,
        config.runs,
        index_cache.requests,
        table.shape[1],
        keys.shape[0],
        index_cache.page_blocks,
        spec.block_tokens,
        spec.top_blocks,
        width,
        *packed,
    )


@cache
def _score_kernel(variant: ScoreVariant, capability: tuple[int, int]) -> Kernel:
    if variant.shared_bytes > SM7X_SHARED_BYTES:
        raise ValueError(f"{variant.rows} rows of {variant.heads} heads of {variant.dim} do not fit shared memory")
    threads = 32 * variant.warps
    return Kernel(variant.source, "flashqsa_score_sm7x", SCORE_PARAMETERS, capability, threads, variant.shared_bytes)
