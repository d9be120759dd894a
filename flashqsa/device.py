"""Facts about a device: the only place that asks a GPU for its properties.

`DeviceFacts` are plain values, so that a route can be asked for a GPU that is not there: `DeviceFacts.named("v100")`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from types import MappingProxyType

import torch


@dataclass(frozen=True)
class DeviceFacts:
    """What a route decision needs to know of a device.

    kind                "cpu" or "cuda"
    name                as the driver or the vendor calls it
    capability          CUDA compute capability, (major, minor); None on a CPU
    multiprocessors     streaming multiprocessors; on a CPU the threads torch uses
    shared_memory_bytes most shared memory one thread block may opt in to; 0 on a CPU
    memory_bytes        device memory; 0 where it was not asked
    kernel_sets         kernel sets of this package with an image for the device
    missing             (kernel set, what it needs and this machine lacks) of the sets that would have one

    >>> DeviceFacts.named("v100").capability, DeviceFacts.named("v100").shared_memory_bytes
    ((7, 0), 98304)
    """

    kind: str
    name: str
    capability: tuple[int, int] | None = None
    multiprocessors: int = 1
    shared_memory_bytes: int = 0
    memory_bytes: int = 0
    kernel_sets: frozenset[str] = frozenset()
    missing: tuple[tuple[str, str], ...] = ()

    @property
    def arch(self) -> str:
        """`sm_90` and the like; `cpu` for a CPU."""
        return "cpu" if self.capability is None else f"sm_{self.capability[0]}{self.capability[1]}"

    def without(self, reasons: Mapping[str, str]) -> DeviceFacts:
        """The same device where some kernel sets lack something: the reason by the name of the set.

        >>> facts = DeviceFacts.named("v100").without({"sm7x": "no NVRTC", "smxx": "no image, no matter"})
        >>> sorted(facts.kernel_sets), facts.missing
        (['reference'], (('sm7x', 'no NVRTC'),))
        """
        gone = tuple((name, reasons[name]) for name in sorted(self.kernel_sets & set(reasons)))
        return replace(self, kernel_sets=self.kernel_sets - set(reasons), missing=(*self.missing, *gone))

    @staticmethod
    def named(name: str) -> DeviceFacts:
        """Facts of a well-known GPU (or "cpu") from vendor data sheets, for asking about machines that are not here.

        Raises KeyError for a name that `KNOWN_DEVICES` lacks.
        """
        return KNOWN_DEVICES[name.lower().replace(" ", "").replace("_", "").replace("-", "")]


def kernel_sets_for(capability: tuple[int, int] | None) -> frozenset[str]:
    """Kernel sets of this package that have an image for a compute capability (None: a CPU).

    `sm7x` and `smxx` are compiled on the machine, the one for Volta and Turing (7.x), the other for Ampere (8.x) to
    Blackwell (12.x); `sm90` has instructions of 9.0 alone; `reference` is plain torch and runs anywhere.

    >>> sorted(kernel_sets_for((9, 0))), sorted(kernel_sets_for((12, 0)))
    (['reference', 'sm90', 'smxx'], ['reference', 'smxx'])
    >>> sorted(kernel_sets_for((7, 5)))
    ['reference', 'sm7x']
    """
    if capability is None:
        return frozenset({"cpu", "reference"})
    sets = {"reference"}
    if capability[0] == 7:
        sets.add("sm7x")
    if 8 <= capability[0] <= 12:
        sets.add("smxx")
    if capability == (9, 0):
        sets.add("sm90")
    return frozenset(sets)


NEEDS = MappingProxyType({"smxx": ("triton",), "sm90": ("triton",)})
"""Packages that a kernel set cannot do without."""


def missing_packages(sets: Iterable[str]) -> dict[str, str]:
    """Of some kernel sets, those whose packages are not all installed, and the first that each lacks."""
    found: dict[str, str] = {}
    for name in sets:
        lacks = next((package for package in NEEDS.get(name, ()) if find_spec(package) is None), None)
        if lacks is not None:
            found[name] = f"{lacks} is not installed"
    return found


def _gpu(name: str, capability: tuple[int, int], multiprocessors: int, shared_kib: int, memory_gib: int) -> DeviceFacts:
    return DeviceFacts(
        "cuda",
        name,
        capability,
        multiprocessors,
        shared_kib << 10,
        memory_gib << 30,
        kernel_sets_for(capability),
    )


# Shared memory: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability" (per block, opt-in).
KNOWN_DEVICES = MappingProxyType(
    {
        "cpu": DeviceFacts("cpu", "CPU", multiprocessors=1, kernel_sets=kernel_sets_for(None)),
        "v100": _gpu("Tesla V100", (7, 0), 80, 96, 32),
        "t4": _gpu("Tesla T4", (7, 5), 40, 64, 16),
        "rtx2080ti": _gpu("GeForce RTX 2080 Ti", (7, 5), 68, 64, 11),
        "rtx8000": _gpu("Quadro RTX 8000", (7, 5), 72, 64, 48),
        "a100": _gpu("A100", (8, 0), 108, 163, 80),
        "rtx3090": _gpu("GeForce RTX 3090", (8, 6), 82, 99, 24),
        "rtx4090": _gpu("GeForce RTX 4090", (8, 9), 128, 99, 24),
        "l40s": _gpu("L40S", (8, 9), 142, 99, 48),
        "h100": _gpu("H100", (9, 0), 132, 227, 80),
        "h200": _gpu("H200", (9, 0), 132, 227, 141),
        "b200": _gpu("B200", (10, 0), 148, 227, 180),
        "rtx5090": _gpu("GeForce RTX 5090", (12, 0), 170, 99, 32),
        "gb10": _gpu("GB10", (12, 1), 48, 99, 128),
    }
)


@cache
def facts_of(device: torch.device) -> DeviceFacts:
    """What a device that is here and the installed packages tell. Asked once per device and process.

    `machine.facts_here` adds what compilers tell, and is what routes are decided with. Raises RuntimeError or
    AssertionError (torch's own) when a CUDA device does not answer.
    """
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        capability = (found.major, found.minor)
        sets = kernel_sets_for(capability)
        return DeviceFacts(
            "cuda",
            found.name,
            capability,
            found.multi_processor_count,
            int(getattr(found, "shared_memory_per_block_optin", 0)),
            int(found.total_memory),
            sets,
        ).without(missing_packages(sets))
    sets = kernel_sets_for(None) if device.type == "cpu" else frozenset({"reference"})
    return DeviceFacts(device.type, device.type.upper(), None, torch.get_num_threads(), kernel_sets=sets)
