"""Tensors on a GPU that get longer without a copy, for the pools of caches whose length nobody knows beforehand."""

from __future__ import annotations

import logging
import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from flashqsa import knobs
from flashqsa.kernels.nvrtc import DriverError, mapping
from flashqsa.machine import numbered

logger = logging.getLogger("flashqsa")

capturing = mapping.capturing

ROOM_TIMES, ROOM_BYTES = 16, 4 << 30
"""Addresses that a pool reserves: so many times what it begins with, and at least so many bytes. A process has 128 TiB,
for 32,768 pools of the least."""


class GrowingPool:
    """A tensor [entries, *entry_shape] on a GPU, as long as its users have asked for so far.

    Longer ones begin at the same address: what shorter ones hold is in them, and kernels in flight and CUDA graphs that
    use a shorter one are undisturbed. Memory comes from the driver, not from torch: torch's statistics and its limit
    leave it out (`held_bytes`), and it cannot be handed to another process. Copies, and what is read from a file, have
    memory of their own.

    Raises DriverError, and OSError where there is no driver; `can_grow` tells beforehand.
    """

    def __init__(self, entry_shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.entry_shape, self.dtype, self.device = entry_shape, dtype, numbered(device)
        self._mapping: mapping.Mapping | None = None

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry."""
        return math.prod(self.entry_shape) * self.dtype.itemsize

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def reaches(self, tensor: Tensor, entries: int) -> bool:
        """Whether a tensor is one of this pool's, and can get as long as `entries` where it lies."""
        found = self._mapping
        return found is not None and tensor.data_ptr() == found.address and entries * self.entry_bytes <= found.reserved

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def tensor(self, entries: int) -> Tensor:
        """The first `entries`, at least one; those that no shorter tensor had are undefined.

        Raises torch.OutOfMemoryError, and DriverError for more than the addresses that the first one reserved.
        """
        count = entries * self.entry_bytes
        if self._mapping is None:
            room = max(ROOM_TIMES * count, ROOM_BYTES)
            self._mapping = mapping.Mapping(int(self.device.index), room)
        self._mapping.back(count)
        # A tensor that is made in inference mode could not be written outside it.
        with torch.inference_mode(False):
            return _bytes_of(self._mapping, self.device)[:count].view(self.dtype).view(entries, *self.entry_shape)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy starts without memory: two pools cannot own one range of addresses.
        return type(self), (self.entry_shape, self.dtype, self.device)


def _bytes_of(mapped: mapping.Mapping, device: torch.device) -> Tensor:
    """The backed bytes of a mapping, which they keep alive."""
    return torch.as_tensor(mapped, device=device)


def new_pool(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, GrowingPool] | None:
    """An undefined tensor, and the pool in which it grows where it lies; None where there is no such memory.

    Raises torch.OutOfMemoryError.
    """
    # What is compiled is traced with tensors that lie nowhere.
    if torch.compiler.is_compiling() or not can_grow(device):
        return None
    pool = GrowingPool(shape[1:], dtype, device)
    try:
        return pool.tensor(shape[0]), pool
    except DriverError as error:
        _tell(device, str(error))
        return None


def can_grow(device: torch.device) -> bool:
    """Whether a device's tensors can get longer without a copy; said once in the log where a GPU's cannot."""
    asked = device.type == "cuda" and torch.cuda.is_available() and knobs.GROWING_POOLS.read() != "0"
    return asked and _can_grow(numbered(device))


@cache
def _can_grow(device: torch.device) -> bool:
    probe = GrowingPool((1,), torch.uint8, device)
    try:
        probe.tensor(1).zero_()
    except (DriverError, OSError) as error:
        _tell(device, str(error))
        return False
    return True


@cache
def _tell(device: torch.device, reason: str) -> None:
    logger.warning("%s: pools that grow are copied: %s", device, reason)


def held_bytes(device: torch.device) -> int:
    """Memory that such tensors hold on a GPU now."""
    return mapping.held_bytes(int(numbered(device).index))


def most_bytes(device: torch.device) -> int:
    """The most memory that they held there since `reset_most_bytes`."""
    return mapping.most_bytes(int(numbered(device).index))


def reset_most_bytes(device: torch.device) -> None:
    """Starts that most afresh."""
    mapping.reset_most_bytes(int(numbered(device).index))
