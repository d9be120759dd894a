"""Whether this installation serves a device, asked before anything is built on it: `device_supported`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashqsa.check import check_device
from flashqsa.device import DeviceFacts
from flashqsa.machine import (
    COMPILED_SETS,
    facts_here,
    gpu_sets,
    log_refusal,
    maker_of,
    numbered,
    on_this_machine,
    why_no_kernels,
)
from flashqsa.route import CANDIDATES, Call, NoRouteError, choose_route
from flashqsa.values import QsaSpec

RELEASED = Call(QsaSpec(), 1, 1, QsaSpec().top_blocks * 8, torch.float16, torch.float16)
"""A decode step of the released model in FP16, which every kernel set takes, past the budget: it scores and selects."""


@dataclass(frozen=True)
class Support:
    """Whether kernels of this package serve a device; true where they do.

    device       as it was asked about
    facts        of the device, less what this machine cannot make; None where there is no such device
    kernel_sets  whose kernels can be had, in alphabetical order, without the reference
    made_by      what makes the kernels of CUDA C++: an NVRTC, or a folder of `flashqsa build`; None without any
    reason       why none serves it; None where one does. `route="reference"` runs all the same, in FP64, for checking

    >>> print(device_supported("cpu"))
    cpu: served by cpu
    >>> bool(device_supported("cpu")), device_supported("cpu").reason
    (True, None)
    """

    device: str
    facts: DeviceFacts | None
    kernel_sets: tuple[str, ...] = ()
    made_by: str | None = None
    reason: str | None = None

    def __bool__(self) -> bool:
        return self.reason is None

    def __str__(self) -> str:
        named = self.facts is None or self.facts.kind != "cuda"
        where = self.device if named or self.facts is None else f"{self.device} ({self.facts.name}, {self.facts.arch})"
        if self.reason is not None:
            return f"{where}: {self.reason}"
        return f"{where}: served by {', '.join(self.kernel_sets)}" + (f"; {self.made_by}" if self.made_by else "")


def device_supported(device: torch.device | str | int | DeviceFacts) -> Support:
    """Whether this installation has kernels for a device, can make them, and they fit its shared memory.

    device  one of torch's, its name ("cuda:1"), a CUDA device's number, or `DeviceFacts` or the name ("v100") of a
            device that need not be here: then it is asked whether this machine could serve one

    What is asked: an image for the compute capability; Triton, where the kernel set needs it; an NVRTC that compiles
    for it, or kernels that `flashqsa build` left in the cache folder; and room for the released model's tiles. A call
    of another shape or dtype may still be refused: `choose_route` says by what. Nothing is compiled or launched. The
    machine is looked at once per process; a CUDA device here that is refused is logged once, as a warning.

    Raises InputError for what names no device.
    """
    wanted = check_device(device)
    if isinstance(wanted, DeviceFacts):
        return _support(wanted.name, on_this_machine(wanted))
    if wanted.type == "cuda":
        here = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if here <= (wanted.index or 0):
            return Support(str(wanted), None, reason=f"torch {torch.__version__} sees {here} CUDA devices here")
        wanted = numbered(wanted)
    facts = facts_here(wanted)
    found = _support(str(wanted), facts)
    if facts.kind == "cuda" and found.reason is not None:
        log_refusal(wanted, facts, found.reason)
    return found


def _support(name: str, facts: DeviceFacts) -> Support:
    sets = tuple(sorted(gpu_sets(facts)))
    if not sets:
        return Support(name, facts, reason=why_no_kernels(facts))
    for stage in CANDIDATES:
        try:
            choose_route(stage, RELEASED, facts)
        except NoRouteError as error:
            # The last candidate of a kernel set serves every call that the others do, so its reason is the device's.
            own = {refused.route.kernel_set: refused.reason for refused in error.refused}
            reasons = dict.fromkeys(own[kernel_set] for kernel_set in sets if kernel_set in own)
            return Support(name, facts, sets, reason=f"{stage}: {'; '.join(reasons)}")
    compiled = facts.capability is not None and bool(facts.kernel_sets & COMPILED_SETS)
    made_by = maker_of(facts.capability)[1] if compiled and facts.capability is not None else None
    return Support(name, facts, sets, made_by)
