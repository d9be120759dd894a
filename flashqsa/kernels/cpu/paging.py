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

MAX_WASTE = 1.25
"""Most elements a window may hold per element that is wanted: beyond that, a window per head costs less."""

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


def fits_one_window(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors [pages, slots, heads, dim] lie so close that one window per slot holds both.

    True for keys and values side by side in the last axis, or one after the other in a token.
    """
    if first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr() or first.stride() != second.stride():
        return False
    _, _, heads, dim = first.shape
    span = (heads - 1) * first.stride(2) + abs(int(second.storage_offset()) - int(first.storage_offset())) + dim
    return span <= MAX_WASTE * 2 * heads * dim


class Pool:
    """Paged tensors that are read some blocks at a time, whatever their strides.

    tensors       one tensor [pages, page_slots, heads, dim], or two for which `fits_one_window` holds
    block_slots   slots that are read together; divides page_slots
    blocks        most blocks of one `read`: sets the size of the kept buffer

    Memory is read in windows: as many consecutive elements as hold one block (or one slot, or one head of it, where
    blocks have gaps). Windows start at multiples of the greatest common divisor of the strides that lead to them, so
    one strided view has a row for each, and `index_select` gathers them from dense pools and from views of wider ones.
    """

    def __init__(self, tensors: tuple[Tensor, ...], block_slots: int, blocks: int) -> None:
        base = min(tensors, key=lambda tensor: tensor.storage_offset())
        pages, page_slots, heads, dim = base.shape
        # A stride is only meaningful where its size is above 1.
        page_stride, slot_stride, head_stride = (base.stride(axis) if base.shape[axis] > 1 else 0 for axis in range(3))
        self.heads, self.dim = heads, dim
        self._members = [tensor.storage_offset() - base.storage_offset() for tensor in tensors]
        reach = max(self._members) + dim
        joined = (heads - 1) * head_stride + reach
        whole_slot = joined <= MAX_WASTE * len(tensors) * heads * dim
        self._span = joined if whole_slot else reach
        dense = block_slots == 1 or slot_stride == self._span
        window = block_slots * self._span if dense else self._span
        unit = gcd(page_stride, slot_stride * block_slots if dense else slot_stride) or 1
        self._page_units, self._block_units = page_stride // unit, slot_stride * block_slots // unit
        self._slot_units = None if dense else np.arange(block_slots, dtype=np.int64) * (slot_stride // unit)
        # From the first element of a window row to the last element of the last one.
        extent = (pages - 1) * page_stride + (page_slots - 1) * slot_stride + self._span
        starts = max((extent - window) // unit + 1, 0) if pages else 0
        raw = raw_view(base)
        self._windows = [
            raw.as_strided((starts, window), (unit, 1), raw.storage_offset() + head * head_stride)
            for head in range(1 if whole_slot else heads)
        ]
        self._slots = blocks * block_slots
        shape = (len(self._windows), self._slots * self._span)
        self._buffer = torch.empty(shape, dtype=torch.float32)
        self._raw = self._buffer if raw.dtype == torch.float32 else torch.empty(shape, dtype=raw.dtype)
        self._bits = torch.empty(shape[1], dtype=torch.int16) if raw.dtype == torch.uint8 else None
        head_pitch = head_stride if whole_slot else shape[1]
        self._strides = (head_pitch, self._span, 1)
        self._block_slots, self._window = block_slots, window

    def read(self, page: Ints, block_in_page: Ints) -> list[Tensor]:
        """Gathers blocks: each tensor's part as [heads, slots, dim] FP32, views that the next call overwrites."""
        ids = page * self._page_units + block_in_page * self._block_units
        if self._slot_units is not None:
            ids = (ids[:, None] + self._slot_units).reshape(-1)
        index = torch.from_numpy(ids)
        used = ids.shape[0] * self._window
        for windows, raw, buffer in zip(self._windows, self._raw, self._buffer, strict=True):
            torch.index_select(windows, 0, index, out=raw[:used].view(-1, self._window))
            if self._bits is not None:
                _decode_fp8(raw[:used], self._bits[:used], buffer[:used])
            elif raw.dtype != torch.float32:
                buffer[:used].copy_(raw[:used])
        shape = (self.heads, page.shape[0] * self._block_slots, self.dim)
        return [self._buffer.as_strided(shape, self._strides, offset) for offset in self._members]


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
