"""Device memory that grows where it lies: a range of addresses, of which the first bytes are backed by memory.

The driver keeps addresses and memory apart (cuMemAddressReserve, cuMemCreate, cuMemMap): more memory can be put behind
the addresses that follow, and what is there already stays as it is. A range takes no memory by itself. A process has
128 TiB of addresses (48 bits, one of them the sign) for all its devices.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import weakref
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

from flashqsa.kernels.nvrtc.driver import DriverError, call

PINNED, ON_DEVICE, READ_AND_WRITE = 1, 1, 3
"""CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE."""

OUT_OF_MEMORY = 2
"""CUDA_ERROR_OUT_OF_MEMORY."""

Address = ctypes.c_uint64


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location_type", ctypes.c_int),
        ("location_id", ctypes.c_int),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_uint8 * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location_type", ctypes.c_int), ("location_id", ctypes.c_int), ("flags", ctypes.c_int))


class _Range:
    """A range as the driver knows it: it outlives the `Mapping`, which may end while nothing can be given back."""

    def __init__(self, index: int, address: int, reserved: int) -> None:
        self.index, self.address, self.reserved = index, address, reserved
        self.backed, self.process = 0, os.getpid()


_held: Counter[int] = Counter()
_most: Counter[int] = Counter()
_waiting: list[_Range] = []
_captures: list[None] = []


def held_bytes(index: int) -> int:
    """Memory of a device, by its number, that is behind addresses now; torch's statistics do not count it."""
    return _held[index]


def most_bytes(index: int) -> int:
    """The most of it since `reset_most_bytes`."""
    return max(_most[index], _held[index])


def reset_most_bytes(index: int) -> None:
    """Starts the most afresh."""
    _most[index] = _held[index]


@cache
def granule_bytes(index: int) -> int:
    """What memory behind addresses of a device comes in whole multiples of. Raises DriverError where there is none."""
    found = ctypes.c_size_t()
    call("cuMemGetAllocationGranularity", index, ctypes.byref(found), ctypes.byref(_properties(index)), 0)
    return found.value


class Mapping:
    """A range of addresses of one device, as long as it lives, with memory behind the first `backed_bytes` of it.

    index     the device's number
    reserved  bytes of addresses, rounded up to granules

    Tensors are made of it by `__cuda_array_interface__` (as bytes), and they keep it alive. When the last is gone the
    device is waited for, and all is given back. Raises DriverError, and OSError where there is no driver.
    """

    def __init__(self, index: int, reserved: int) -> None:
        self.index, self.granule = index, granule_bytes(index)
        self.reserved = -(-reserved // self.granule) * self.granule
        _give_back_what_can_be()
        found = Address()
        call("cuMemAddressReserve", index, ctypes.byref(found), _size(self.reserved), _size(0), Address(0), Address(0))
        self.address = int(found.value)
        self._range = _Range(index, self.address, self.reserved)
        end = weakref.finalize(self, _end, self._range)
        # At the process's end the driver takes everything back.
        end.atexit = False

    @property
    def backed_bytes(self) -> int:
        """Bytes with memory behind them."""
        return self._range.backed

    def back(self, wanted: int) -> None:
        """Puts memory behind the first `wanted` bytes, as far as there is none yet; what is held stays where it is.

        Raises torch.OutOfMemoryError, and DriverError for more than was reserved; nothing is changed then.
        """
        more = -(-(wanted - self.backed_bytes) // self.granule) * self.granule
        if more <= 0:
            return
        if self.backed_bytes + more > self.reserved:
            raise DriverError(f"memory behind {wanted:,} bytes: only {self.reserved:,} bytes of addresses are reserved")
        _give_back_what_can_be()
        index, at, memory, mapped = self.index, Address(self.address + self.backed_bytes), Address(), False
        try:
            self._create(memory, more)
            call("cuMemMap", index, at, _size(more), _size(0), memory, Address(0))
            mapped = True
            access = _Access(ON_DEVICE, index, READ_AND_WRITE)
            call("cuMemSetAccess", index, at, _size(more), ctypes.byref(access), _size(1))
            self._range.backed += more
            mapped = False
        finally:
            if mapped:
                call("cuMemUnmap", index, at, _size(more))
            if memory.value:
                # What is mapped is kept until it is unmapped.
                call("cuMemRelease", index, memory)
        _held[index] += more
        _most[index] = max(_most[index], _held[index])

    def _create(self, memory: Address, count: int) -> None:
        """Takes so many bytes of the device's memory; `memory` becomes the driver's handle of them."""
        properties = _properties(self.index)
        arguments = (ctypes.byref(memory), _size(count), ctypes.byref(properties), Address(0))
        if call("cuMemCreate", self.index, *arguments, allowed=(OUT_OF_MEMORY,)) != OUT_OF_MEMORY:
            return
        # torch keeps what tensors gave back to it.
        torch.cuda.empty_cache()
        if call("cuMemCreate", self.index, *arguments, allowed=(OUT_OF_MEMORY,)) == OUT_OF_MEMORY:
            held = f"a pool that holds {self.backed_bytes:,}"
            raise torch.OutOfMemoryError(f"CUDA out of memory: {count:,} more bytes for {held}")

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The backed bytes, as libraries hand arrays to each other (version 3)."""
        return {"shape": (self.backed_bytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Nothing is given back inside the `with` block, by any thread: waiting for a device would end a capture on it."""
    _captures.append(None)
    try:
        yield
    finally:
        _captures.pop()
        _give_back_what_can_be()


def _end(gone: _Range) -> None:
    """Gives back the memory of a range that nobody uses, now or later."""
    # A process that was forked has the numbers of its parent's ranges, but not the ranges.
    if gone.process == os.getpid():
        _waiting.append(gone)
        _give_back_what_can_be()


def _give_back_what_can_be() -> None:
    """Gives back what waits for it; what cannot be given back goes on waiting."""
    with contextlib.suppress(RuntimeError):
        while not (_captures or torch.cuda.is_current_stream_capturing()):
            try:
                gone = _waiting.pop()
            except IndexError:
                # A collection, or another thread, was faster.
                return
            given = False
            try:
                _give_back(gone)
                given = True
            finally:
                if not given:
                    _waiting.append(gone)


def _give_back(gone: _Range) -> None:
    # Kernels in flight may still read it.
    torch.cuda.synchronize(gone.index)
    if gone.backed:
        call("cuMemUnmap", gone.index, Address(gone.address), _size(gone.backed))
        _held[gone.index] -= gone.backed
        gone.backed = 0
    call("cuMemAddressFree", gone.index, Address(gone.address), _size(gone.reserved))


def _properties(index: int) -> _Properties:
    return _Properties(PINNED, 0, ON_DEVICE, index)


def _size(count: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(count)
