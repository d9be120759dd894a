"""Device memory that grows where it lies: a range of addresses, of which the first bytes are backed by memory.

The driver keeps addresses and memory apart (cuMemAddressReserve, cuMemCreate, cuMemMap): more memory can be put behind
the addresses that follow, and what is there already stays as it is. An address range costs nothing but itself.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import Counter
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


_held: Counter[int] = Counter()
_most: Counter[int] = Counter()
_waiting: list[tuple[int, int, int, int]] = []


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
    device is waited for, and all is given back. Raises DriverError.
    """

    def __init__(self, index: int, reserved: int) -> None:
        self.index, self.granule = index, granule_bytes(index)
        self.reserved = -(-reserved // self.granule) * self.granule
        self.backed_bytes = 0
        give_back_waiting()
        found = Address()
        call("cuMemAddressReserve", index, ctypes.byref(found), _size(self.reserved), _size(0), Address(0), Address(0))
        self.address = int(found.value)
        self._state = [self.backed_bytes]
        end = weakref.finalize(self, _give_back, index, self.address, self.reserved, self._state)
        # At the process's end the driver takes everything back.
        end.atexit = False

    def back(self, wanted: int) -> None:
        """Puts memory behind the first `wanted` bytes, as far as there is none yet; what is held stays where it is.

        Raises torch.OutOfMemoryError, and DriverError for more than was reserved.
        """
        more = -(-(wanted - self.backed_bytes) // self.granule) * self.granule
        if more <= 0:
            return
        if self.backed_bytes + more > self.reserved:
            raise DriverError(f"memory behind {wanted:,} bytes: only {self.reserved:,} bytes of addresses are reserved")
        at, index = Address(self.address + self.backed_bytes), self.index
        memory = self._memory(more)
        try:
            call("cuMemMap", index, at, _size(more), _size(0), memory, Address(0))
        finally:
            # What is mapped is kept until it is unmapped.
            call("cuMemRelease", index, memory)
        self.backed_bytes += more
        self._state[0] = self.backed_bytes
        _held[index] += more
        _most[index] = max(_most[index], _held[index])
        access = _Access(ON_DEVICE, index, READ_AND_WRITE)
        call("cuMemSetAccess", index, at, _size(more), ctypes.byref(access), _size(1))

    def _memory(self, count: int) -> Address:
        """The driver's handle of so many bytes of the device's memory."""
        found, properties = Address(), _properties(self.index)
        for last in (False, True):
            arguments = (ctypes.byref(found), _size(count), ctypes.byref(properties), Address(0))
            if call("cuMemCreate", self.index, *arguments, allowed=(OUT_OF_MEMORY,)) != OUT_OF_MEMORY:
                break
            if last:
                held = f"a pool that holds {self.backed_bytes:,}"
                raise torch.OutOfMemoryError(f"CUDA out of memory: {count:,} more bytes for {held}")
            # torch keeps what tensors gave back to it.
            torch.cuda.empty_cache()
        return found

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The backed bytes, as libraries hand arrays to each other (version 3)."""
        return {"shape": (self.backed_bytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}


def _give_back(index: int, address: int, reserved: int, state: list[int]) -> None:
    _waiting.append((index, address, reserved, state[0]))
    give_back_waiting()


def give_back_waiting() -> None:
    """Gives back the memory of ranges that nobody uses; not while a graph is captured, which it would break."""
    while _waiting and not torch.cuda.is_current_stream_capturing():
        index, address, reserved, backed = _waiting.pop()
        # Kernels in flight may still read it.
        torch.cuda.synchronize(index)
        if backed:
            call("cuMemUnmap", index, Address(address), _size(backed))
            _held[index] -= backed
        call("cuMemAddressFree", index, Address(address), _size(reserved))


def _properties(index: int) -> _Properties:
    return _Properties(PINNED, 0, ON_DEVICE, index)


def _size(count: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(count)
