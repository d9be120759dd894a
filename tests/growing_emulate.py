"""The part of the CUDA driver that keeps addresses and memory apart, emulated in the memory of this process.

It refuses what the driver refuses: memory behind addresses that have some, unmapping half of what was mapped, freeing
addresses with memory behind them, sizes that are no granules.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from flashqsa import growing
from flashqsa.kernels.nvrtc import DriverError, mapping

GRANULE = 4096
RESERVED = 64 << 20
POISON = 0xFF
"""What fresh memory holds: NaN in every float dtype."""


class FakeDriver:
    """A device of `memory` bytes.

    ranges   of each reserved address: its memory in this process, bytes reserved, bytes with memory behind them
    readable bytes of each that may be read and written
    without  functions that fail; `failing` holds how many times more a function succeeds before it does
    """

    def __init__(self, memory: int = RESERVED) -> None:
        self.memory = memory
        self.created: dict[int, int] = {}
        self.ranges: dict[int, tuple[mmap.mmap, int, int]] = {}
        self.log: list[str] = []
        self.without: set[str] = set()
        self.failing: dict[str, int] = {}
        self.readable: dict[int, int] = {}

    @property
    def used(self) -> int:
        """Bytes of the device that are in use."""
        return sum(self.created.values()) + sum(backed for _, _, backed in self.ranges.values())

    def call(self, name: str, index: int, *arguments: Any, allowed: tuple[int, ...] = ()) -> int:
        """`driver.call` of this device."""
        assert index == 0
        self.log.append(name)
        self.failing = {key: left - (key == name) for key, left in self.failing.items()}
        if name in self.without or self.failing.get(name, 0) < 0:
            raise DriverError(f"{name}: CUDA_ERROR_NOT_SUPPORTED (801)")
        status: int = getattr(self, name)(*arguments)
        if status and status not in allowed:
            raise DriverError(f"{name}: {status}")
        return status

    def cuMemGetAllocationGranularity(self, found: Any, properties: Any, _flags: int) -> int:  # noqa: N802
        assert (properties._obj.type, properties._obj.location_type, properties._obj.location_id) == (1, 1, 0)
        found._obj.value = GRANULE
        return 0

    def cuMemAddressReserve(self, found: Any, size: Any, *_rest: Any) -> int:  # noqa: N802
        assert size.value % GRANULE == 0
        memory = mmap.mmap(-1, size.value)
        address = ctypes.addressof(ctypes.c_uint8.from_buffer(memory))
        self.ranges[address] = (memory, size.value, 0)
        self.readable[address] = 0
        found._obj.value = address
        return 0

    def cuMemCreate(self, found: Any, size: Any, *_rest: Any) -> int:  # noqa: N802
        assert size.value % GRANULE == 0
        if self.used + size.value > self.memory:
            return 2
        found._obj.value = max(self.created, default=0) + 1
        self.created[found._obj.value] = size.value
        return 0

    def cuMemMap(self, at: Any, size: Any, _offset: Any, memory: Any, _flags: Any) -> int:  # noqa: N802
        start = max(address for address in self.ranges if address <= at.value)
        held, reserved, backed = self.ranges[start]
        assert at.value == start + backed, "memory is put behind the addresses that follow"
        assert backed + size.value <= reserved
        assert self.created.get(memory.value) == size.value
        del self.created[memory.value]
        ctypes.memset(at.value, POISON, size.value)
        self.ranges[start] = (held, reserved, backed + size.value)
        return 0

    def cuMemRelease(self, memory: Any) -> int:  # noqa: N802
        self.created.pop(memory.value, None)
        return 0

    def cuMemSetAccess(self, at: Any, size: Any, access: Any, count: Any) -> int:  # noqa: N802
        assert (access._obj.location_type, access._obj.location_id, access._obj.flags, count.value) == (1, 0, 3, 1)
        start = max(address for address in self.ranges if address <= at.value)
        assert at.value == start + self.readable[start], "pieces become readable in order"
        self.readable[start] += size.value
        return 0

    def cuMemUnmap(self, at: Any, size: Any) -> int:  # noqa: N802
        start = max(address for address in self.ranges if address <= at.value)
        held, reserved, backed = self.ranges[start]
        assert at.value + size.value == start + backed, "what was mapped is unmapped from its end, or all of it"
        self.ranges[start] = (held, reserved, at.value - start)
        self.readable[start] = min(self.readable[start], at.value - start)
        return 0

    def cuMemAddressFree(self, address: Any, size: Any) -> int:  # noqa: N802
        _, reserved, backed = self.ranges.pop(address.value)
        assert (backed, reserved) == (0, size.value)
        return 0


@contextlib.contextmanager
def emulated(driver: FakeDriver) -> Iterator[FakeDriver]:
    """CPU tensors grow where they lie inside the `with` block, in the memory of a device that is emulated."""

    def bytes_of(mapped: mapping.Mapping, _device: torch.device) -> Tensor:
        described = mapped.__cuda_array_interface__
        assert driver.readable[mapped.address] >= mapped.backed_bytes
        buffer = (ctypes.c_uint8 * described["shape"][0]).from_address(described["data"][0])
        buffer.owner = mapped
        return torch.frombuffer(buffer, dtype=torch.uint8)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mapping, "call", driver.call)
        patch.setattr(growing, "_bytes_of", bytes_of)
        patch.setattr(growing, "ROOM_BYTES", RESERVED)
        patch.setattr(growing, "numbered", lambda _device: torch.device("cuda", 0))
        patch.setattr(growing, "can_grow", lambda _device: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(torch.cuda, "synchronize", lambda _index: driver.log.append("synchronize"))
        patch.setattr(torch.cuda, "empty_cache", lambda: driver.log.append("empty_cache"))
        mapping.granule_bytes.cache_clear()
        yield driver
        mapping.granule_bytes.cache_clear()
