"""Tensors on a GPU that get longer without a copy, for the pools of caches whose length nobody knows beforehand."""

from __future__ import annotations

import logging
import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from flashqsa.kernels.nvrtc import DriverError, mapping
from flashqsa.machine import facts_here, numbered

logger = logging.getLogger("flashqsa")


class GrowingPool:
    """A tensor [entries, *entry_shape] on a GPU, as long as its users have asked for so far.

    Longer ones begin at the same address: what shorter ones hold is in them, and kernels in flight and CUDA graphs that
    use a shorter one are undisturbed. Memory comes from the driver, not from torch: torch's statistics leave it out
    (`held_bytes`). Copies, and what is read from a file, have memory of their own.

    Raises DriverError; `can_grow` tells beforehand where there are no such pools.
    """

    def __init__(self, entry_shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.entry_shape, self.dtype, self.device = entry_shape, dtype, numbered(device)
        self._mapping: mapping.Mapping | None = None

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry."""
        return math.prod(self.entry_shape) * self.dtype.itemsize

    def begins(self, tensor: Tensor) -> bool:
        """Whether a tensor is one of this pool's."""
        return self._mapping is not None and tensor.data_ptr() == self._mapping.address

    def tensor(self, entries: int) -> Tensor:
        """The first `entries`, at least one; those that no shorter tensor had are undefined.

        Raises torch.OutOfMemoryError.
        """
        count = entries * self.entry_bytes
        if self._mapping is None:
            # As many addresses as the device has memory: more can never be wanted of one pool.
            self._mapping = mapping.Mapping(int(self.device.index), facts_here(self.device).memory_bytes)
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


def can_grow(device: torch.device) -> bool:
    """Whether a device's tensors can get longer without a copy; said once in the log where a GPU's cannot."""
    return device.type == "cuda" and torch.cuda.is_available() and _can_grow(numbered(device))


@cache
def _can_grow(device: torch.device) -> bool:
    probe = GrowingPool((1,), torch.uint8, device)
    try:
        probe.tensor(1).zero_()
    except DriverError as error:
        logger.warning("%s: pools that grow are copied: %s", device, str(error))
        return False
    return True


def held_bytes(device: torch.device) -> int:
    """Memory that such tensors hold on a GPU now."""
    return mapping.held_bytes(int(numbered(device).index))


def most_bytes(device: torch.device) -> int:
    """The most memory that they held there since `reset_most_bytes`."""
    return mapping.most_bytes(int(numbered(device).index))


def reset_most_bytes(device: torch.device) -> None:
    """Starts that most afresh."""
    mapping.reset_most_bytes(int(numbered(device).index))
