"""Writing caches on any NVIDIA GPU: launches the kernels of `write.cu`. No launch waits for the device or allocates."""

from __future__ import annotations

from functools import cache
from types import MappingProxyType

import torch
from torch import Tensor

from flashqsa.kernels.nvrtc.compiler import Source
from flashqsa.kernels.nvrtc.driver import Kernel
from flashqsa.values import FP8, IndexCache, KvCache, QsaSpec, Rows

SOURCE = Source("write.cu", headers=("numbers.cuh", "paging.cuh"))

KINDS = MappingProxyType({torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, FP8: 3})
"""Codes of dtypes: `Kind` of `numbers.cuh`."""

KV_THREADS = 256
"""Of a program of `flashqsa_write_kv`, which moves so many vectors, or one row's keys or values."""

ROW_THREADS = 128
"""Of a program of the other kernels, which have a warp per row."""

PROGRAM_ROWS = ROW_THREADS // 32

VECTOR_BYTES = 16
"""Most bytes of one load or store."""

CHUNKS = MappingProxyType({1: (8, 1), 2: (8, 4, 2, 1), 4: (4, 2, 1)})
"""Numbers that a thread may move at a time, by the bytes that one of them is stored in."""


def write_kv(keys: Tensor, values: Tensor, kv_cache: KvCache, rows: Rows, capability: tuple[int, int]) -> None:
    """Stores keys and values at their rows' positions, in one launch; padding and rows on a hole are dropped.

    keys, values  [rows, kv_heads, head_dim] in the cache's dtype, whose bits are kept, or FP32, FP16 or BF16 for an FP8
                  cache: divided by the scale in FP32, clamped to +-448 and rounded to nearest even. Last stride 1.

    No two rows may stand at the same position of a request. Raises CompileError, NvrtcNotFoundError, DriverError.
    """
    count, heads, head_dim = keys.shape
    pool = kv_cache.keys
    chunk = _chunk(keys, values, kv_cache)
    vectors = head_dim // chunk
    program_rows = max(KV_THREADS // (heads * vectors), 1)
    k_scales, k_scale = scale_arguments(kv_cache.k_scale)
    v_scales, v_scale = scale_arguments(kv_cache.v_scale)
    _kv_kernel(capability).launch(
        keys.device,
        2 * -(-count // program_rows),
        keys.data_ptr(),
        values.data_ptr(),
        pool.data_ptr(),
        kv_cache.values.data_ptr(),
        k_scales,
        v_scales,
        rows.request.data_ptr(),
        rows.position.data_ptr(),
        kv_cache.page_table.data_ptr(),
        *_strides_bytes(keys)[:2],
        *_strides_bytes(values)[:2],
        *_strides_bytes(pool)[:3],
        *_strides_bytes(kv_cache.values)[:3],
        kv_cache.page_table.stride(0),
        k_scale,
        v_scale,
        count,
        kv_cache.requests,
        kv_cache.page_table.shape[1],
        pool.shape[0],
        kv_cache.page_tokens,
        heads,
        vectors,
        program_rows,
        -1 if keys.dtype == pool.dtype else KINDS[keys.dtype],
        keys.element_size(),
        chunk,
    )


def write_index_keys(
    raw_keys: Tensor,
    index_cache: IndexCache,
    rows: Rows,
    spec: QsaSpec,
    norm_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    capability: tuple[int, int],
) -> None:
    """Pools and stores the blocks that these rows close, then keeps the newest raw keys in the ring: two launches.

    raw_keys     [rows, index_dim] in the ring's dtype (FP32, FP16 or BF16)
    norm_weight  [index_dim] FP32, FP16 or BF16
    cos, sin     [rows, rotary_dim] in one of these, of the first token of the block a row is in; rotary_dim is even

    Every step is rounded as the CPU kernels round it. Only the order in which the norm's squares are summed is its own
    (`write.cu` gives it), the same for every block, so that a key depends on nothing but its raw keys. Rows of one
    request must be consecutive tokens next to each other; padding may stand between them. Raises TypeError for a cache
    without a ring, and CompileError, NvrtcNotFoundError, DriverError.
    """
    ring = index_cache.raw_keys
    if ring is None:
        raise TypeError("an index cache without a ring of raw keys cannot be written")
    keys, table = index_cache.keys, index_cache.page_table
    programs = -(-rows.count // PROGRAM_ROWS)
    ring_strides = _strides_bytes(ring)[:2]
    _pool_kernel(capability, spec.block_tokens, spec.index_dim).launch(
        raw_keys.device,
        programs,
        raw_keys.data_ptr(),
        ring.data_ptr(),
        keys.data_ptr(),
        norm_weight.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        rows.request.data_ptr(),
        rows.position.data_ptr(),
        table.data_ptr(),
        _strides_bytes(raw_keys)[0],
        *ring_strides,
        *_strides_bytes(keys)[:2],
        _strides_bytes(cos)[0],
        _strides_bytes(sin)[0],
        table.stride(0),
        eps,
        1.0 if index_cache.scale is None else index_cache.scale,
        rows.count,
        index_cache.requests,
        table.shape[1],
        keys.shape[0],
        index_cache.page_blocks,
        ring.shape[1],
        spec.block_tokens,
        spec.index_dim,
        cos.shape[1],
        KINDS[raw_keys.dtype],
        KINDS[keys.dtype],
        KINDS[norm_weight.dtype],
        KINDS[cos.dtype],
    )
    _ring_kernel(capability).launch(
        raw_keys.device,
        programs,
        raw_keys.data_ptr(),
        ring.data_ptr(),
        rows.request.data_ptr(),
        rows.position.data_ptr(),
        _strides_bytes(raw_keys)[0],
        *ring_strides,
        rows.count,
        index_cache.requests,
        ring.shape[1],
        spec.index_dim,
        raw_keys.element_size(),
    )


@cache
def _kv_kernel(capability: tuple[int, int]) -> Kernel:
    return Kernel(SOURCE, "flashqsa_write_kv", "P" * 9 + "q" * 11 + "ff" + "i" * 11, capability, KV_THREADS)


@cache
def _pool_kernel(capability: tuple[int, int], block_tokens: int, index_dim: int) -> Kernel:
    """Pools blocks: a warp keeps 8 bytes for each of a block's raw keys and 4 for each dimension of its key."""
    shared_bytes = PROGRAM_ROWS * (8 * block_tokens + 4 * index_dim)
    parameters = "P" * 9 + "q" * 8 + "ff" + "i" * 13
    return Kernel(SOURCE, "flashqsa_pool_blocks", parameters, capability, ROW_THREADS, shared_bytes)


@cache
def _ring_kernel(capability: tuple[int, int]) -> Kernel:
    return Kernel(SOURCE, "flashqsa_write_ring", "PPPP" + "qqq" + "i" * 5, capability, ROW_THREADS)


def _strides_bytes(tensor: Tensor) -> tuple[int, ...]:
    """Bytes from one index to the next along each axis; 0 where there is one index, whose stride means nothing."""
    size = tensor.element_size()
    return tuple(
        stride * size if length > 1 else 0 for stride, length in zip(tensor.stride(), tensor.shape, strict=True)
    )


def _chunk(keys: Tensor, values: Tensor, kv_cache: KvCache) -> int:
    """Numbers that a thread moves at a time: as many as head_dim and every address allow."""
    units: list[tuple[int, int]] = []  # bytes of an element, and addresses or strides
    for tensor in (keys, values, kv_cache.keys, kv_cache.values):
        units += [(tensor.element_size(), at) for at in (tensor.data_ptr(), *_strides_bytes(tensor)[:-1])]

    def allowed(chunk: int) -> bool:
        return keys.shape[2] % chunk == 0 and all(at % min(chunk * size, VECTOR_BYTES) == 0 for size, at in units)

    return next(chunk for chunk in CHUNKS[kv_cache.keys.element_size()] if chunk == 1 or allowed(chunk))


def scale_arguments(scale: float | Tensor | None) -> tuple[int, float]:
    """The address of scales [kv_heads] FP32 and 1, or 0 and the scale of all heads."""
    if isinstance(scale, Tensor):
        return scale.data_ptr(), 1.0
    return 0, 1.0 if scale is None else float(scale)
