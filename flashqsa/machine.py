"""What this machine lacks for a device: `device.py` reads the device, this looks for what its kernels are made with.

Looking for NVRTC opens libraries, so it is done for CUDA devices alone, when one is first asked about, and once per
process and compute capability.
"""

from __future__ import annotations

import logging
from functools import cache

import torch

from flashqsa.device import DeviceFacts, facts_of, missing_packages

logger = logging.getLogger("flashqsa")

COMPILED_SETS = frozenset({"sm7x", "smxx", "sm90"})
"""Kernel sets that launch CUDA C++ which NVRTC compiles: `smxx` too, for its top-k, worklists and writes."""

CURRENT = torch.device("cuda")


def facts_here(device: torch.device) -> DeviceFacts:
    """Facts of a device that is here, less the kernel sets that this machine has no package or compiler for.

    Asked once per device and process. A CUDA device that is left without kernels is logged once, as a warning with its
    index and the reason; `missing` holds the reasons. Raises RuntimeError or AssertionError (torch's own) when a CUDA
    device does not answer.
    """
    return _facts_here(numbered(device))


def numbered(device: torch.device) -> torch.device:
    """A device with its number: the current CUDA device's, which changes, where it has none."""
    return torch.device("cuda", torch.cuda.current_device()) if device == CURRENT else device


@cache
def _facts_here(device: torch.device) -> DeviceFacts:
    facts = on_this_machine(facts_of(device))
    if device.type == "cuda" and not gpu_sets(facts):
        log_refusal(device, facts, why_no_kernels(facts))
    return facts


def on_this_machine(facts: DeviceFacts) -> DeviceFacts:
    """Facts of a device, of this machine or of another's, less the kernel sets that nothing here can make.

    CPU facts come back as they are; facts of a CUDA device with kernels make this look for NVRTC.
    """
    if facts.capability is None:
        return facts
    facts = facts.without(missing_packages(facts.kernel_sets))
    if facts.kernel_sets & COMPILED_SETS:
        able, words = maker_of(facts.capability)
        if not able:
            return facts.without(dict.fromkeys(COMPILED_SETS, words))
    return facts


@cache
def maker_of(capability: tuple[int, int]) -> tuple[bool, str]:
    """Whether CUDA C++ kernels for a compute capability can be had here, and what makes them, or what lacks."""
    from flashqsa.kernels.nvrtc import NvrtcNotFoundError, released

    try:
        return True, released.made_by(capability)
    except NvrtcNotFoundError as error:
        return False, str(error)


def gpu_sets(facts: DeviceFacts) -> frozenset[str]:
    """The kernel sets of a device without the reference, which is for checking."""
    return facts.kernel_sets - {"reference"}


def why_no_kernels(facts: DeviceFacts) -> str:
    """What a device that has no kernels lacks."""
    reasons = dict.fromkeys(reason for _, reason in facts.missing)
    return "; ".join(reasons) or f"no kernels are made for {facts.arch if facts.kind == 'cuda' else facts.kind}"


@cache
def log_refusal(device: torch.device, facts: DeviceFacts, reason: str) -> None:
    """Logs, once per process, why a device has no kernels."""
    logger.warning("%s (%s, %s) has no kernels here: %s", device, facts.name, facts.arch, reason)
