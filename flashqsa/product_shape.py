"""How cuBLAS scores one request on compute capability 8.0 and newer: what it can serve, where it is faster, sizes.

Keys of a piece of the request's blocks are gathered, cuBLAS multiplies all rows and heads of a chunk with them, and
scores are made of the products (`kernels/nvrtc/products.cu`). Scores of a chunk take half of the workspace; the keys of
a piece and its products, 4 bytes for each head of a row and a block, take the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashqsa.config import even_chunk_rows, product_bytes, product_columns, score_row_bytes
from flashqsa.device import DeviceFacts
from flashqsa.tables import products as table
from flashqsa.values import FP8, QsaSpec

SMALLEST_WORKSPACE_BYTES = 1 << 20
"""The least that FLASHQSA_WORKSPACE_MIB may say."""

VECTOR = 8
"""Numbers of a key that are gathered at a time, and that cuBLAS's tensor-core kernels want rows to be multiples of."""


@dataclass(frozen=True)
class ProductConfig:
    """How cuBLAS scores a chunk of one request's rows.

    capability  compute capability of the device that the kernels beside cuBLAS are compiled for
    columns     blocks whose products with all rows of the chunk are made at a time
    """

    capability: tuple[int, int]
    columns: int


def product_refusal(
    spec: QsaSpec,
    q_dtype: torch.dtype,
    cache_dtype: torch.dtype,
    requests: int,
    batch_invariant: bool,
    facts: DeviceFacts,
) -> str | None:
    """Why cuBLAS cannot score a call on compute capability 8.0 and newer, or None when it can.

    >>> a100 = DeviceFacts.named("a100")
    >>> product_refusal(QsaSpec(), torch.bfloat16, FP8, 1, False, a100)
    >>> product_refusal(QsaSpec(), torch.bfloat16, FP8, 3, False, a100)
    'made for one request, got 3'
    >>> product_refusal(QsaSpec(), torch.float32, torch.float32, 1, False, a100)
    'made for FP16 or BF16 index queries, got torch.float32'
    """
    if facts.capability is None or facts.capability < (8, 0):
        return f"made for sm_80 and newer, got {facts.arch}"
    if q_dtype not in (torch.float16, torch.bfloat16):
        return f"made for FP16 or BF16 index queries, got {q_dtype}"
    if cache_dtype not in (q_dtype, FP8):
        return f"made for index keys in the queries' dtype or FP8, got {q_dtype} and {cache_dtype}"
    if requests != 1:
        return f"made for one request, got {requests}"
    if batch_invariant:
        return "batch_invariant: cuBLAS chooses kernels by the shape of a product"
    if spec.index_dim % VECTOR:
        return f"index_dim must be a multiple of {VECTOR}, got {spec.index_dim}"
    least = table.PRODUCT_COLUMNS * product_bytes(spec, 1)
    if least > SMALLEST_WORKSPACE_BYTES // 2:
        return (
            f"{table.PRODUCT_COLUMNS} keys and their products with one row take {least} bytes, half of the "
            f"smallest workspace is {SMALLEST_WORKSPACE_BYTES // 2}"
        )
    return None


def product_loses(spec: QsaSpec, rows: int, max_position: int, facts: DeviceFacts) -> str | None:
    """Why a call should be scored page by page instead, or None where cuBLAS was the faster one.

    >>> product_loses(QsaSpec(), 1616, 183_999, DeviceFacts.named("a100"))
    'not timed on sm_80 against scores page by page'
    >>> found = product_loses(QsaSpec(), 1616, 183_999, DeviceFacts.named("h200"))
    >>> found.partition(" (")[0]
    "cuBLAS's product alone took 457 us, scores page by page and their top-k 349"
    """
    timed, blocks = table.TIMED.get(facts.capability or (0, 0)), spec.visible_blocks(max_position)
    if timed is None:
        return f"not timed on {facts.arch} against scores page by page"
    reached = [shape for shape in timed["shapes"] if shape["rows"] <= rows and shape["blocks"] <= blocks]
    if not reached:
        return f"{rows} rows x {blocks} blocks: smaller than what was timed against scores page by page"
    largest = max(reached, key=lambda shape: shape["rows"] * shape["blocks"])
    if largest["cublas_us"] < largest["plain_us"]:
        return None
    return (
        f"{timed['what']} took {largest['cublas_us']:.0f} us, scores page by page and their top-k "
        f"{largest['plain_us']:.0f} ({largest['rows']} rows x {largest['blocks']} blocks, {timed['where']})"
    )


def product_chunk_rows(spec: QsaSpec, rows: int, max_position: int, limit_bytes: int) -> int:
    """Rows to score at a time: their scores fit half of a limit, and the products of 128 blocks with them the other.

    >>> product_chunk_rows(QsaSpec(), 1616, 183_999, 128 << 20)
    341
    """
    half, key_bytes = limit_bytes // 2, product_bytes(spec, 0)
    by_products = (half // table.PRODUCT_COLUMNS - key_bytes) // (product_bytes(spec, 1) - key_bytes)
    return even_chunk_rows(rows, min(half // _row_bytes(spec, max_position), by_products))


def product_config(spec: QsaSpec, rows: int, max_position: int, facts: DeviceFacts, limit_bytes: int) -> ProductConfig:
    """Sizes for a chunk of rows. Raises ValueError for a CPU.

    >>> product_config(QsaSpec(), 341, 183_999, DeviceFacts.named("h200"), 128 << 20)
    ProductConfig(capability=(9, 0), columns=11520)
    """
    if facts.capability is None:
        raise ValueError(f"no score configuration is made for {facts.arch}")
    width = max(spec.visible_blocks(max_position), 1)
    return ProductConfig(facts.capability, product_columns(spec, rows, width, limit_bytes // 2))


def product_workspace_bytes(spec: QsaSpec, config: ProductConfig, rows: int, max_position: int) -> int:
    """Bytes of a chunk: scores, segment maxima, queries that had to be copied, a piece's keys and products."""
    return rows * _row_bytes(spec, max_position) + config.columns * product_bytes(spec, rows)


def _row_bytes(spec: QsaSpec, max_position: int) -> int:
    """Of a row: its scores, and its queries, which are copied where they lie apart."""
    return score_row_bytes(spec, max_position) + 2 * spec.index_heads * spec.index_dim
