"""Everything between a layer's projections and its attention, in one launch of `prepare.cu` on any NVIDIA GPU."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from flashqsa.kernels.nvrtc.compiler import Source
from flashqsa.kernels.nvrtc.driver import Kernel
from flashqsa.kernels.nvrtc.write import KINDS, scale_arguments
from flashqsa.values import FP8, IndexCache, KvCache, Projected, QsaSpec, Rows

WARPS = 8
"""Of a program: `WARPS` of `prepare.cu`."""

FEW_ROWS = 128
"""Up to here a GPU has room for a warp per head: some 30 of a row, of 4,000 and more that run at a time."""

RELEASED_ROTARY_DIM = 64
"""Dimensions of a head that rotate in the released model."""

VECTOR_BYTES = 16
"""Most bytes of one load or store."""

PARAMETERS = "".join(
    (
        "Pqq" * 5,  # q, keys, values, index_q, raw_keys: New
        "PP" + "PPPP",  # results, norm weights
        "PqqqPfi" * 3,  # key_pool, value_pool, index_pool: Pool
        "Pqii" * 2,  # kv_table, index_table: PageTable
        "Pqqii",  # Ring
        "PPqqPqqq",  # Angles
        "PPiiii",  # Batch
        "fiiii",
    )
)
"""Of `flashqsa_prepare`, as `Kernel.parameters`."""


def prepare(
    projected: Projected,
    kv_cache: KvCache,
    index_cache: IndexCache,
    rows: Rows,
    spec: QsaSpec,
    capability: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """Norm and rotary of what the projections gave, and the caches' share of it stored: q and index_q, ready to use.

    projected  its dtype is that of the ring and of the caches, where these are not FP8

    All strides are free but the last, which is 1: a gate from the same projection as q is a view beside it. Returns q
    [rows, q_heads, head_dim] and index_q [rows, index_heads, index_dim] in fresh memory without gaps; what they hold
    for padding is undefined. Nothing is stored for padding, for rows past `max_position`, or on holes (of which the
    ring has none). Rows of one request must be consecutive tokens next to each other; padding may stand between them.

    One launch, sized by host numbers alone; its first call on a device compiles and loads the kernel, which a CUDA
    graph's capture does not allow. Numbers are those of `kernels.cpu.prepare` bit by bit, but pooled keys, which are
    those of `nvrtc.write_index_keys`. Formulas and roundings are those of Transformers' Qwen4ExpTextRMSNorm,
    apply_rotary_pos_emb and Qwen4ExpTextQSAIndexer. Raises TypeError for a cache without a ring, and CompileError,
    NvrtcNotFoundError, DriverError.
    """
    ring = index_cache.raw_keys
    if ring is None:
        raise TypeError("an index cache without a ring of raw keys cannot be written")
    q, keys, values, index_q = projected.q, projected.keys, projected.values, projected.index_q
    raw_keys, cos, sin, first_angles = projected.raw_keys, projected.cos, projected.sin, projected.first_angles
    q_norm, k_norm, index_q_norm = projected.q_norm, projected.k_norm, projected.index_q_norm
    q_heads, head_dim = q.shape[1:]
    kv_heads, index_heads, index_dim = keys.shape[1], index_q.shape[1], spec.index_dim
    variant = Variant(
        q.dtype,
        kv_cache.keys.dtype == FP8,
        index_cache.keys.dtype == FP8,
        q_norm.dtype,
        cos.dtype,
        head_dim,
        index_dim,
        2 * cos.shape[1],
        spec.block_tokens,
        _is_wide(
            (head_dim, (q, keys, values, kv_cache.keys, kv_cache.values, q_norm, k_norm)),
            (index_dim, (index_q, index_q_norm)),
        ),
    )
    q_to = torch.empty((rows.count, q_heads, head_dim), dtype=q.dtype, device=q.device)
    index_q_to = torch.empty((rows.count, index_heads, index_dim), dtype=q.dtype, device=q.device)
    heads = warp_heads(rows.count)
    parts = 1 + 2 * -(-kv_heads // heads) + -(-index_heads // heads) + -(-q_heads // heads)
    kv_table, index_table = kv_cache.page_table, index_cache.page_table
    index_scale = 1.0 if index_cache.scale is None else index_cache.scale
    kept = (0, 0, 0, 0) if first_angles is None else (first_angles.data_ptr(), *strides_bytes(first_angles)[:3])
    prepare_kernel(capability, variant).launch(
        q.device,
        -(-rows.count * parts // WARPS),
        q.data_ptr(),
        *strides_bytes(q)[:2],
        keys.data_ptr(),
        *strides_bytes(keys)[:2],
        values.data_ptr(),
        *strides_bytes(values)[:2],
        index_q.data_ptr(),
        *strides_bytes(index_q)[:2],
        raw_keys.data_ptr(),
        strides_bytes(raw_keys)[0],
        0,
        q_to.data_ptr(),
        index_q_to.data_ptr(),
        q_norm.data_ptr(),
        k_norm.data_ptr(),
        index_q_norm.data_ptr(),
        projected.index_k_norm.data_ptr(),
        kv_cache.keys.data_ptr(),
        *strides_bytes(kv_cache.keys)[:3],
        *scale_arguments(kv_cache.k_scale),
        kv_cache.page_tokens,
        kv_cache.values.data_ptr(),
        *strides_bytes(kv_cache.values)[:3],
        *scale_arguments(kv_cache.v_scale),
        kv_cache.page_tokens,
        index_cache.keys.data_ptr(),
        *strides_bytes(index_cache.keys)[:2],
        0,
        0,
        index_scale,
        index_cache.page_blocks,
        kv_table.data_ptr(),
        kv_table.stride(0),
        kv_table.shape[1],
        kv_cache.keys.shape[0],
        index_table.data_ptr(),
        index_table.stride(0),
        index_table.shape[1],
        index_cache.keys.shape[0],
        ring.data_ptr(),
        *strides_bytes(ring)[:2],
        ring.shape[1],
        rows.max_position >= ring.shape[1],
        cos.data_ptr(),
        sin.data_ptr(),
        strides_bytes(cos)[0],
        strides_bytes(sin)[0],
        *kept,
        rows.request.data_ptr(),
        rows.position.data_ptr(),
        rows.count,
        min(kv_cache.requests, index_cache.requests),
        rows.max_position,
        0,
        projected.eps,
        q_heads,
        kv_heads,
        index_heads,
        heads,
    )
    return q_to, index_q_to


def warp_heads(rows: int) -> int:
    """Heads that a warp takes one after the other, with the same weights and angles; one where there are few rows."""
    return 4 if rows > FEW_ROWS else 1


def span_of(dim: int) -> int:
    """Neighbouring numbers of a head that a thread holds: `Share<DIM>::SPAN` of `shares.cuh`."""
    return 8 if dim > 128 else 4 if dim > 64 else 2 if dim > 32 else 1


class Variant(NamedTuple):
    """What a kernel is compiled for: one model's layers, whatever their heads and whatever the call.

    dtype                      of what is projected, of the ring and of caches that are not FP8
    kv_fp8, index_fp8          whether a cache is
    weight_dtype, angle_dtype  of norm weights, and of cos and sin
    wide                       whether numbers are moved in vectors
    """

    dtype: torch.dtype
    kv_fp8: bool
    index_fp8: bool
    weight_dtype: torch.dtype
    angle_dtype: torch.dtype
    head_dim: int
    index_dim: int
    rotary_dim: int
    block_tokens: int
    wide: bool


def prepare_source(variant: Variant) -> Source:
    """The source of one model's layers, the same for every GPU."""
    kind, fp8 = KINDS[variant.dtype], KINDS[FP8]
    defines = (
        ("NEW_KIND", kind),
        ("KV_KIND", fp8 if variant.kv_fp8 else kind),
        ("INDEX_KIND", fp8 if variant.index_fp8 else kind),
        ("WEIGHT_KIND", KINDS[variant.weight_dtype]),
        ("ANGLE_KIND", KINDS[variant.angle_dtype]),
        ("HEAD_DIM", variant.head_dim),
        ("INDEX_DIM", variant.index_dim),
        ("ROTARY_DIM", variant.rotary_dim),
        ("BLOCK_TOKENS", variant.block_tokens),
        ("WIDE", int(variant.wide)),
    )
    return Source("prepare.cu", defines, headers=("numbers.cuh", "paging.cuh", "shares.cuh"))


@cache
def prepare_kernel(capability: tuple[int, int], variant: Variant) -> Kernel:
    """The kernel of one model's layers."""
    source = prepare_source(variant)
    scratch = variant.rotary_dim + variant.index_dim + variant.block_tokens  # SCRATCH of prepare.cu
    return Kernel(source, "flashqsa_prepare", PARAMETERS, capability, 32 * WARPS, 4 * WARPS * scratch)


def sources(spec: QsaSpec, dtype: torch.dtype, cache_dtype: torch.dtype) -> Iterator[Source]:
    """What `flashqsa build` compiles ahead for layers of the released model's rotary, weights and angles in `dtype`.

    cache_dtype  of the KV cache; index keys may be FP8 where that is, and are in `dtype` otherwise

    >>> [source.name for source in sources(QsaSpec(), torch.float16, FP8)]
    ['prepare.cu', 'prepare.cu']
    """
    fp8 = cache_dtype == FP8
    for index_fp8 in sorted({False, fp8}):
        sizes = (spec.head_dim, spec.index_dim, RELEASED_ROTARY_DIM, spec.block_tokens)
        variant = Variant(dtype, fp8, index_fp8, dtype, dtype, *sizes, wide=True)
        yield prepare_source(variant)


def strides_bytes(tensor: Tensor) -> tuple[int, ...]:
    """Bytes from one index to the next along each axis; 0 where there is one index, whose stride means nothing."""
    size = tensor.element_size()
    return tuple(
        stride * size if length > 1 else 0 for stride, length in zip(tensor.stride(), tensor.shape, strict=True)
    )


def _is_wide(*heads: tuple[int, tuple[Tensor, ...]]) -> bool:
    """Whether every thread's share of a head, of a size, begins at an address that a vector may have."""
    for dim, tensors in heads:
        span = span_of(dim)
        if dim % span:
            return False
        for tensor in tensors:
            at = tensor.data_ptr()
            for stride in strides_bytes(tensor)[:-1]:
                at |= stride
            if at % min(span * tensor.element_size(), VECTOR_BYTES):
                return False
    return True
