"""Index scores for Volta and Turing: a paged scorer on tensor cores, and cuBLAS for one long request.

The paged scorer (`score.cu`) serves every call. Where one request brings rows enough, its keys are gathered piece by
piece, cuBLAS multiplies all rows and heads with them, and one more kernel makes scores of the products
(`score_products.cu`).

cuBLAS returns the same bits for the same call: its documentation promises that for one library version, one kind of
GPU and one stream at a time ("Results Reproducibility"), since atomics are off unless asked for, and torch keeps a
workspace per handle and stream. Shapes of the products follow from the plan, so a call repeated takes the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from flashqsa.config import SM7X_SHARED_BYTES, Sm7xScoreConfig, sm7x_query_bytes
from flashqsa.kernels.nvrtc import Kernel, Source
from flashqsa.values import FP8, SEGMENT_BLOCKS, IndexCache, QsaSpec, Rows, Scores

FOLDER = Path(__file__).parent

E4M3_UNIT = 256.0
"""What E4M3 numbers are divided by when their bits become FP16's: the difference of the exponents' biases is 8."""

VECTOR = 8
"""Numbers that are loaded at a time where queries and keys allow it."""

PRODUCT_THREADS = 256
"""Of a program of `score_products.cu`."""

FINISH_COLUMNS = 4 * PRODUCT_THREADS
"""Scores of a row that a program of `flashqsa_finish_scores` makes."""

SCORE_PARAMETERS = "P" * 8 + "q" * 7 + "f" + "i" * 12 + "0q"
"""Members of `Arguments` of `score.cu`."""

GATHER_PARAMETERS = "PPqqP" + "i" * 3 + "4x" + "i" * 3 + "0q"
"""Members of `Gather` of `score_products.cu`; the struct of pages ends at a multiple of 8 bytes."""

FINISH_PARAMETERS = "P" * 6 + "qqqP" + "i" * 3 + "4x" + "f" + "i" * 7 + "0q"
"""Members of `Finish` of `score_products.cu`."""


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


def products_source(e4m3: bool, aligned: bool) -> Source:
    """`score_products.cu` for a kind of keys."""
    return Source("score_products.cu", (("E4M3", int(e4m3)), ("ALIGNED", int(aligned))), folder=FOLDER)


def score(index_q: Tensor, index_cache: IndexCache, rows: Rows, spec: QsaSpec, config: Sm7xScoreConfig) -> Scores:
    """Scores of each row's visible blocks: index_dim^(-1/2) * sum over heads of relu(<index_q, key>), in FP32.

    index_q  [rows, index_heads, index_dim] FP16, any strides, last one 1; a chunk of a call's rows

    The cache's keys are FP16 or FP8-E4M3, whose scale is folded into the result. A block on a hole scores -inf. Rows
    that see no more than `top_blocks` blocks take them all, so they score 0 there. Columns that a row does not see are
    not written. The result holds segment maxima where the top-k can use them. Nothing waits for the device, and every
    size follows from host numbers. `config` is from `config.sm7x_score_config`, for a call that `sm7x_score_refusal`
    has nothing against. Raises TypeError for other dtypes, and CompileError, NvrtcNotFoundError, DriverError.
    """
    keys = index_cache.keys
    if index_q.dtype != torch.float16 or keys.dtype not in (torch.float16, FP8):
        raise TypeError(f"wanted FP16 queries and FP16 or FP8 keys, got {index_q.dtype} and {keys.dtype}")
    device = index_q.device
    width = max(spec.visible_blocks(rows.max_position), 1)
    segments = -(-width // SEGMENT_BLOCKS)
    values = torch.empty((rows.count, segments * SEGMENT_BLOCKS), dtype=torch.float32, device=device)
    ranks_segments = segments > spec.top_blocks
    maxima_stride = -(-segments // 4) * 4 if ranks_segments else 0
    maxima = torch.empty((rows.count, maxima_stride), dtype=torch.float32, device=device)
    visible = torch.empty(rows.count, dtype=torch.int32, device=device)
    whole = Scores(values, visible, maxima if ranks_segments else None)
    if rows.count > 0 and config.product_columns > 0 and index_cache.requests == 1:
        _score_products(index_q, index_cache, rows, spec, config, whole, width)
    elif rows.count > 0:
        _score_pages(index_q, index_cache, rows, spec, config, whole, width)
    return Scores(values[:, :width], visible, whole.maxima)


def _score_pages(
    index_q: Tensor,
    index_cache: IndexCache,
    rows: Rows,
    spec: QsaSpec,
    config: Sm7xScoreConfig,
    out: Scores,
    width: int,
) -> None:
    """One launch of the paged scorer."""
    keys, table = index_cache.keys, index_cache.page_table
    e4m3 = keys.dtype == FP8
    windows, slices = -(-rows.count // config.window), -(-width // config.slice_blocks)
    _score_kernel(variant_for(spec, config, e4m3, _aligned(index_q, keys)), config.capability).launch(
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
        _scale(index_cache, spec),
        rows.count,
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
    )


def _score_products(
    index_q: Tensor,
    index_cache: IndexCache,
    rows: Rows,
    spec: QsaSpec,
    config: Sm7xScoreConfig,
    out: Scores,
    width: int,
) -> None:
    """Gather, product and scores, piece by piece of the one request's blocks."""
    keys, table, heads, dim = index_cache.keys, index_cache.page_table, spec.index_heads, spec.index_dim
    device, e4m3, columns = index_q.device, keys.dtype == FP8, config.product_columns
    kernels = _product_kernels(products_source(e4m3, _aligned(index_q, keys)), config.capability)
    lines = index_q.reshape(rows.count * heads, dim)
    gathered = torch.empty((columns, dim), dtype=torch.float16, device=device)
    products = torch.empty((lines.shape[0], columns), dtype=torch.float32, device=device)
    pages = (table.data_ptr(), table.shape[1], keys.shape[0], index_cache.page_blocks)
    for first in range(0, width, columns):
        kernels.gather.launch(
            device,
            -(-columns * (dim // VECTOR) // PRODUCT_THREADS),
            keys.data_ptr(),
            gathered.data_ptr(),
            keys.stride(0),
            keys.stride(1),
            *pages,
            first,
            columns,
            dim,
        )
        multiply(lines, gathered, products)
        parts = -(-min(columns, width - first) // FINISH_COLUMNS)
        kernels.finish.launch(
            device,
            rows.count * parts,
            products.data_ptr(),
            rows.request.data_ptr(),
            rows.position.data_ptr(),
            out.values.data_ptr(),
            0 if out.maxima is None else out.maxima.data_ptr(),
            out.visible.data_ptr(),
            columns,
            out.values.stride(0),
            0 if out.maxima is None else out.maxima.stride(0),
            *pages,
            _scale(index_cache, spec),
            first,
            columns,
            parts,
            heads,
            spec.block_tokens,
            spec.top_blocks,
            width,
        )


def multiply(lines: Tensor, keys: Tensor, out: Tensor) -> None:
    """lines [n, dim] times keys [columns, dim], both FP16, into out [n, columns] FP32: one cuBLAS call.

    `out_dtype` keeps the FP32 sums of the tensor cores: torch 2.8 and newer have it, on CUDA.
    """
    torch.mm(lines, keys.t(), out_dtype=torch.float32, out=out)


@dataclass(frozen=True)
class _ProductKernels:
    gather: Kernel
    finish: Kernel


@cache
def _score_kernel(variant: ScoreVariant, capability: tuple[int, int]) -> Kernel:
    if variant.shared_bytes > SM7X_SHARED_BYTES:
        raise ValueError(f"{variant.rows} rows of {variant.heads} heads of {variant.dim} do not fit shared memory")
    threads = 32 * variant.warps
    return Kernel(variant.source, "flashqsa_score_sm7x", SCORE_PARAMETERS, capability, threads, variant.shared_bytes)


@cache
def _product_kernels(source: Source, capability: tuple[int, int]) -> _ProductKernels:
    return _ProductKernels(
        Kernel(source, "flashqsa_gather_keys", GATHER_PARAMETERS, capability, PRODUCT_THREADS),
        Kernel(source, "flashqsa_finish_scores", FINISH_PARAMETERS, capability, PRODUCT_THREADS),
    )


def _scale(index_cache: IndexCache, spec: QsaSpec) -> float:
    """What the sums of the kernels' products are multiplied by."""
    stored = E4M3_UNIT if index_cache.keys.dtype == FP8 else 1.0
    return spec.score_scale * (index_cache.scale or 1.0) * stored


def _aligned(index_q: Tensor, keys: Tensor) -> bool:
    """Whether every 8 numbers from a multiple of 8 on can be loaded at a time."""
    return all(
        tensor.data_ptr() % (VECTOR * tensor.element_size()) == 0
        and all(
            stride % VECTOR == 0
            for stride, length in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True)
            if length > 1
        )
        for tensor in (index_q, keys)
    )
