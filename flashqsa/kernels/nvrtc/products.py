"""Index scores of long requests by cuBLAS, on any NVIDIA GPU: launches the kernels of `products.cu` around its product.

The keys of a request are gathered piece by piece, cuBLAS multiplies its rows and heads with them, and one more kernel
makes scores and segment maxima of the products. Nothing waits for the device, and every size follows from host numbers.

cuBLAS returns the same bits for the same call: its documentation promises that for one library version, one kind of
GPU and one stream at a time ("Results Reproducibility"), since atomics are off unless asked for, and torch keeps a
workspace per handle and stream. Shapes of the products follow from the plan, so a call repeated takes the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from flashqsa.config import Product
from flashqsa.kernels.nvrtc.compiler import Source
from flashqsa.kernels.nvrtc.driver import Kernel
from flashqsa.values import FP8, SEGMENT_BLOCKS, IndexCache, QsaSpec, Rows, Scores

E4M3_UNIT = 256.0
"""What E4M3 numbers are divided by when their bits become FP16's: the difference of the exponents' biases is 8."""

VECTOR = 8
"""Numbers that are loaded at a time where keys allow it."""

THREADS = 256
"""Of a program of `products.cu`."""

FINISH_COLUMNS = 4 * THREADS
"""Scores of a row that a program of `flashqsa_finish_scores` makes."""

GATHER_PARAMETERS = "PPqqP" + "i" * 3 + "4x" + "i" * 3 + "0q"
"""Members of `Gather` of `products.cu`; the struct of pages ends at a multiple of 8 bytes."""

FINISH_PARAMETERS = "P" * 6 + "qqqP" + "i" * 3 + "4x" + "f" + "i" * 8 + "0q"
"""Members of `Finish` of `products.cu`."""


def products_source(e4m3: bool, aligned: bool, bf16: bool = False) -> Source:
    """`products.cu` for a kind of keys.

    e4m3     whether they are FP8; FP16 and BF16 are copied as they are, by the same kernels
    aligned  whether 8 of their numbers can be loaded at a time
    bf16     whether FP8 becomes BF16, and not FP16

    >>> products_source(e4m3=True, aligned=True, bf16=True).options
    ('-DE4M3=1', '-DALIGNED=1', '-DBF16=1')
    """
    defines = (("E4M3", int(e4m3)), ("ALIGNED", int(aligned)))
    return Source("products.cu", (*defines, ("BF16", 1)) if e4m3 and bf16 else defines)


def empty_scores(rows: Rows, spec: QsaSpec) -> Scores:
    """Memory for scores of a chunk of rows, whole segments of them, and for segment maxima where the top-k has use."""
    device = rows.request.device
    segments = -(-max(spec.visible_blocks(rows.max_position), 1) // SEGMENT_BLOCKS)
    values = torch.empty((rows.count, segments * SEGMENT_BLOCKS), dtype=torch.float32, device=device)
    ranks_segments = segments > spec.top_blocks
    maxima_stride = -(-segments // 4) * 4 if ranks_segments else 0
    maxima = torch.empty((rows.count, maxima_stride), dtype=torch.float32, device=device)
    visible = torch.empty(rows.count, dtype=torch.int32, device=device)
    return Scores(values, visible, maxima if ranks_segments else None)


def score_request(
    index_q: Tensor, index_cache: IndexCache, rows: Rows, spec: QsaSpec, capability: tuple[int, int], columns: int
) -> Scores:
    """Scores of rows of one request: index_dim^(-1/2) * sum over heads of relu(<index_q, key>), in FP32.

    index_q     [rows, index_heads, index_dim] FP16 or BF16, any strides, last one 1; a chunk of a call's rows
    capability  compute capability of the device
    columns     blocks whose products are made at a time, a multiple of 16

    The cache's keys are of the queries' dtype, or FP8-E4M3, whose scale is folded into the result. A block on a hole
    scores -inf. Rows that see no more than `top_blocks` blocks take them all, so they score 0 there. Columns that a row
    does not see are not written. A row that is padding or of another request than 0 sees nothing, and one past
    `max_position` no further than that. The result holds segment maxima where the top-k can use them.

    Raises TypeError for other dtypes, and CompileError, NvrtcNotFoundError, DriverError.
    """
    keys = index_cache.keys
    if index_q.dtype not in (torch.float16, torch.bfloat16) or keys.dtype not in (index_q.dtype, FP8):
        raise TypeError(f"wanted FP16 or BF16 queries, keys alike or FP8, got {index_q.dtype} and {keys.dtype}")
    whole = empty_scores(rows, spec)
    width = max(spec.visible_blocks(rows.max_position), 1)
    if rows.count:
        part = Product(0, 0, rows.count, width, columns)
        score_products(index_q, index_cache, rows, spec, (part,), capability, whole)
    return Scores(whole.values[:, :width], whole.visible, whole.maxima)


def score_products(
    index_q: Tensor,
    index_cache: IndexCache,
    rows: Rows,
    spec: QsaSpec,
    parts: Sequence[Product],
    capability: tuple[int, int],
    out: Scores,
) -> None:
    """Gather, product and scores, part by part, piece by piece of the part's blocks, into `out` (`empty_scores`)."""
    keys = index_cache.keys
    source = products_source(keys.dtype == FP8, is_aligned(keys), index_q.dtype == torch.bfloat16)
    kernels = _kernels(source, capability)
    for part in parts:
        _score_part(index_q, index_cache, rows, spec, part, kernels, out)


def _score_part(
    index_q: Tensor,
    index_cache: IndexCache,
    rows: Rows,
    spec: QsaSpec,
    part: Product,
    kernels: _Kernels,
    out: Scores,
) -> None:
    keys, table, heads, dim = index_cache.keys, index_cache.page_table, spec.index_heads, spec.index_dim
    device, columns, width, count = index_q.device, part.columns, part.width, part.stop - part.start
    # Products are written to given memory, which autograd allows of no tensor that it follows.
    lines = index_q.detach()[part.start : part.stop].reshape(count * heads, dim)
    # Memory is asked for part by part: torch hands the next what the last had, and the most that one takes is planned.
    gathered = torch.empty((columns, dim), dtype=index_q.dtype, device=device)
    products = torch.empty((lines.shape[0], columns), dtype=torch.float32, device=device)
    pages = (_from(table, part.request), table.shape[1], keys.shape[0], index_cache.page_blocks)
    for first in range(0, width, columns):
        kernels.gather.launch(
            device,
            -(-columns * (dim // VECTOR) // THREADS),
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
        programs = -(-min(columns, width - first) // FINISH_COLUMNS)
        kernels.finish.launch(
            device,
            count * programs,
            products.data_ptr(),
            _from(rows.request, part.start),
            _from(rows.position, part.start),
            _from(out.values, part.start),
            0 if out.maxima is None else _from(out.maxima, part.start),
            _from(out.visible, part.start),
            columns,
            out.values.stride(0),
            0 if out.maxima is None else out.maxima.stride(0),
            *pages,
            score_scale(index_q, index_cache, spec),
            part.request,
            first,
            columns,
            programs,
            heads,
            spec.block_tokens,
            spec.top_blocks,
            width,
        )


def _from(tensor: Tensor, row: int) -> int:
    """Address of a row: views cost more time than this does."""
    return tensor.data_ptr() + row * tensor.stride(0) * tensor.element_size()


def multiply(lines: Tensor, keys: Tensor, out: Tensor) -> None:
    """lines [n, dim] times keys [columns, dim], both FP16 or BF16, into out [n, columns] FP32: one cuBLAS call.

    `out_dtype` keeps the FP32 sums of the tensor cores: torch 2.8 and newer have it, on CUDA.
    """
    torch.mm(lines, keys.t(), out_dtype=torch.float32, out=out)


@dataclass(frozen=True)
class _Kernels:
    gather: Kernel
    finish: Kernel


@cache
def _kernels(source: Source, capability: tuple[int, int]) -> _Kernels:
    return _Kernels(
        Kernel(source, "flashqsa_gather_keys", GATHER_PARAMETERS, capability, THREADS),
        Kernel(source, "flashqsa_finish_scores", FINISH_PARAMETERS, capability, THREADS),
    )


def score_scale(index_q: Tensor, index_cache: IndexCache, spec: QsaSpec) -> float:
    """What the sums of products are multiplied by, of FP8 keys that were taken as FP16 their unit too."""
    in_fp16 = index_cache.keys.dtype == FP8 and index_q.dtype == torch.float16
    return spec.score_scale * (index_cache.scale or 1.0) * (E4M3_UNIT if in_fp16 else 1.0)


def is_aligned(*tensors: Tensor) -> bool:
    """Whether every 8 numbers from a multiple of 8 on can be loaded at a time."""
    return all(
        tensor.data_ptr() % (VECTOR * tensor.element_size()) == 0
        and all(
            stride % VECTOR == 0
            for stride, length in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True)
            if length > 1
        )
        for tensor in tensors
    )
