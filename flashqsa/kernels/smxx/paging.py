"""Where blocks of a paged index cache lie, inside a kernel."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_blocks(table, block, wanted, pages, PAGE_BLOCKS: tl.constexpr):
    """The page and the place within it of a request's blocks.

    table   pointer to the request's row of the page table, int32
    block   [n] int32 logical ids; the table is read only where `wanted` [n] holds
    pages   of the cache: ids past them count as holes

    Returns page [n] int32, -1 on a hole and where not wanted, and place [n] int32.
    """
    page = tl.load(table + block // PAGE_BLOCKS, mask=wanted, other=-1)
    return tl.where(page < pages, page, -1), block % PAGE_BLOCKS


@triton.jit
def load_keys(keys, page, place, page_stride, place_stride, DIM: tl.constexpr):
    """Index keys [n, DIM] of places in a pool, in its dtype; zeros where `page` is -1, of which nothing is read.

    keys    pointer to a pool [pages, page_blocks, DIM] whose last stride is 1; a pool may exceed 2^31 elements
    """
    start = page.to(tl.int64) * page_stride + place.to(tl.int64) * place_stride
    dim = tl.arange(0, DIM)
    return tl.load(keys + start[:, None] + dim[None, :], mask=(page >= 0)[:, None], other=0.0)


@triton.jit
def decode_e4m3(byte):
    """The numbers that E4M3 bytes (uint8) stand for, as FP16, exactly.

    Sign, 4 exponent and 3 mantissa bits are an FP16 number whose exponent is too small by 8; 0x7F and 0xFF are NaN.
    """
    bits = byte.to(tl.uint16)
    number = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), number).to(tl.float16)
