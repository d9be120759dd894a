"""Reading paged caches: runs of rows, page look-up, and gathers of whole blocks into a kept FP32 buffer."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flashqsa.values import FP8, Rows

Ints = npt.NDArray[np.int64]

FP8_UNIT = 256.0
"""`Pool.read` returns FP8 numbers divided by this power of two, which callers fold into the scale."""


@dataclass(frozen=True)
class Run:
    """Rows `start .. stop` of one request, next to each other; `request` is -1 for padding."""

    start: int
    stop: int
    request: int


def request_runs(rows: Rows) -> list[Run]:
    """The call's rows cut into runs, in order.

    >>> request_runs(Rows.from_lengths([2, 1], [8, 4], pad_to=4))
    [Run(start=0, stop=2, request=0), Run(start=2, stop=3, request=1), Run(start=3, stop=4, request=-1)]
    """
    if rows.count == 0:
        return []
    request = np.where(rows.live.numpy(), rows.request.numpy(), -1)
    cuts = (np.flatnonzero(request[1:] != request[:-1]) + 1).tolist()
    starts = [0, *cuts]
    found = request[starts].tolist()
    return [Run(a, b, r) for a, b, r in zip(starts, [*cuts, rows.count], found, strict=True)]


def pages_of(page_table: Tensor, request: int | Ints, slot: Ints, page_slots: int) -> Ints:
    """The page id of each slot (a token, or a block) of a request; -1 on a hole."""
    table: npt.NDArray[np.int32] = page_table.numpy()
    pages: Ints = table[request, slot // page_slots].astype(np.int64)
    return pages


def raw_view(tensor: Tensor) -> Tensor:
    """The tensor in a dtype that can be indexed: FP8 as bytes, the rest as it is."""
    return tensor.detach().view(torch.uint8) if tensor.dtype == FP8 else tensor.detach()


class Buffer:
    """Kept memory that pools of one dtype are read into, in turn.

    elements  most elements of one read
    """

    def __init__(self, dtype: torch.dtype, elements: int) -> None:
        self.numbers = torch.empty(elements, dtype=torch.float32)
        stored = torch.uint8 if dtype == FP8 else dtype
        self.stored = self.numbers if dtype == torch.float32 else torch.empty(elements, dtype=stored)
        self.bits = torch.empty(elements, dtype=torch.int16) if dtype == FP8 else None

    def to_float(self, elements: int) -> Tensor:
        """The first elements that were stored, as FP32; FP8 divided by FP8_UNIT."""
        numbers = self.numbers[:elements]
        if self.bits is not None:
            _decode_fp8(self.stored[:elements], self.bits[:elements], numbers)
        elif self.stored is not self.numbers:
            numbers.copy_(self.stored[:elements])
        return numbers


class Pool:
    """A paged tensor that is read some blocks at a time, whatever its strides.

    tensor       [pages, page_slots, heads, dim], last stride 1; a slot is a token, or a block of an index cache
    block_slots  slots that are read together; divides page_slots

    Memory is read in windows of as many elements as lie together: a block's, where blocks have no gaps, else a slot's,
    else one head's. Windows start at multiples of the greatest common divisor of the page and block (or slot) strides,
    so that one strided view has a row for each, and `index_select` gathers them.
    """

    def __init__(self, tensor: Tensor, block_slots: int) -> None:
        pages, page_slots, heads, dim = tensor.shape
        # A stride means something only where its size is above 1.
        page_stride, slot_stride, head_stride = (
            tensor.stride(axis) if tensor.shape[axis] > 1 else 0 for axis in range(3)
        )
        self._joined = heads == 1 or head_stride == dim
        inner = heads * dim if self._joined else dim
        whole = block_slots == 1 or slot_stride == inner
        self._window = block_slots * inner if whole else inner
        step = slot_stride * block_slots
        unit = gcd(page_stride, step if whole else slot_stride) or 1
        self._page_units, self._block_units = page_stride // unit, step // unit
        self._slot_units = None if whole else np.arange(block_slots, dtype=np.int64) * (slot_stride // unit)
        # Rows of the view: from the first window to the one that ends the last slot of the last page.
        reach = (pages - 1) * page_stride + (page_slots - 1) * slot_stride + inner
        starts = max((reach - self._window) // unit + 1, 0) if pages else 0
        raw = raw_view(tensor)
        self._views = [
            raw.as_strided((starts, self._window), (unit, 1), raw.storage_offset() + head * head_stride)
            for head in range(1 if self._joined else heads)
        ]
        self._heads, self._dim, self._block_slots = heads, dim, block_slots

    def read(self, page: Ints, block_in_page: Ints, into: Buffer) -> Tensor:
        """Gathers blocks: [heads, slots, dim] FP32, a view of the buffer. FP8 comes back divided by FP8_UNIT."""
        ids = page * self._page_units + block_in_page * self._block_units
        if self._slot_units is not None:
            ids = (ids[:, None] + self._slot_units).reshape(-1)
        index = torch.from_numpy(ids)
        slots = page.shape[0] * self._block_slots
        used = slots * self._heads * self._dim
        stored = into.stored[:used].view(len(self._views), ids.shape[0], self._window)
        for view, part in zip(self._views, stored, strict=True):
            torch.index_select(view, 0, index, out=part)
        numbers = into.to_float(used)
        if self._joined:
            return numbers.view(slots, self._heads, self._dim).transpose(0, 1)
        return numbers.view(self._heads, slots, self._dim)


def _decode_fp8(raw: Tensor, bits: Tensor, out: Tensor) -> None:
    """E4M3 bytes to FP32 / FP8_UNIT: sign, 4 exponent and 3 mantissa bits are an FP16 number with a smaller bias.

    torch converts E4M3 one element at a time; this takes a tenth of the time.
    """
    bits.copy_(raw.view(torch.int8))
    bits.bitwise_left_shift_(7).bitwise_and_(-0x4001)
    out.copy_(bits.view(torch.float16))
    magnitude = raw.numpy() & 0x7F
    if magnitude.size and magnitude.max() == 0x7F:
        out.masked_fill_(torch.from_numpy(magnitude == 0x7F), float("nan"))
