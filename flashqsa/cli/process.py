"""This process: its memory, and an allocator and threads set up for large tensors on a shared machine."""

from __future__ import annotations

import contextlib
import ctypes
import platform
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from flashqsa import knobs

if TYPE_CHECKING:
    import torch

if sys.platform != "win32":
    import resource

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")

# Parameters of mallopt, from glibc's malloc.h.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
KEPT_BYTES = 1 << 30
LARGEST_MMAP_THRESHOLD = 32 << 20
"""What older glibc accepts at most: half of its largest heap."""


def keep_freed_memory() -> bool:
    """Tells glibc's malloc to keep freed memory instead of giving every large tensor's pages back to the system.

    By default an allocation above 128 KiB to 32 MiB is mapped afresh and its pages are faulted in one by one, which
    makes a forward pass on the CPU several times slower. The same can be had for any program by the environment
    variables MALLOC_MMAP_THRESHOLD_, MALLOC_TRIM_THRESHOLD_ and MALLOC_TOP_PAD_. Returns whether it took effect: other
    C libraries have no such parameters.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    most = (1 << 31) - 1
    mapped = mallopt(M_MMAP_THRESHOLD, KEPT_BYTES) or mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD)
    return bool(mapped and mallopt(M_TRIM_THRESHOLD, most) and mallopt(M_TOP_PAD, 64 << 20))


def give_back_freed_memory() -> bool:
    """Tells glibc's malloc to give the system what it keeps unused; returns whether there is such a call."""
    if platform.libc_ver()[0] != "glibc":
        return False
    ctypes.CDLL(None).malloc_trim(0)
    return True


def let_threads_sleep() -> None:
    """Has OpenMP's threads sleep while they wait for each other. Must come before torch is imported.

    By default they spin, and where other programs want the cores too, a spinning thread keeps the one it waits for from
    running: a prefill of 8,192 tokens took minutes instead of 20 s on two busy cores. A user's own OMP_WAIT_POLICY
    stays in force.
    """
    knobs.set_default("OMP_WAIT_POLICY", "PASSIVE")


@contextlib.contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """Has the signals to terminate and to hang up interrupt as control-C does, so that what was begun is ended.

    One that is ignored stays so: that is what `nohup` is for.
    """
    known = [signal.SIGTERM] if sys.platform == "win32" else [signal.SIGTERM, signal.SIGHUP]
    heeded = [each for each in known if signal.getsignal(each) != signal.SIG_IGN]
    before = {each: signal.signal(each, signal.default_int_handler) for each in heeded}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def resident_bytes() -> int:
    """Memory the process holds now; where the system does not say, the most it ever held."""
    found = _status("VmRSS")
    return _peak_ever() if found is None else found


def reset_peak() -> bool:
    """Starts the peak afresh, so that it tells of what follows; returns whether the system can (Linux)."""
    try:
        CLEAR_REFS.write_text("5")
    except OSError:
        return False
    return True


def peak_bytes() -> int:
    """The most memory held since `reset_peak`, or ever where that is not possible."""
    found = _status("VmHWM")
    return _peak_ever() if found is None else found


class MemoryMeter:
    """The most memory held from here on: a GPU's, as torch and growing pools take it, or this process's for a CPU.

    Where both take some, their most may have come at different times: together it is an upper bound.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            import torch

            from flashqsa import growing

            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            growing.reset_most_bytes(device)
            self.before = torch.cuda.memory_allocated(device) + growing.held_bytes(device)
        else:
            reset_peak()
            self.before = resident_bytes()

    def peak_extra_bytes(self) -> int:
        """The most beyond what was held at the start."""
        if self.device.type == "cuda":
            import torch

            from flashqsa import growing

            most = torch.cuda.max_memory_allocated(self.device) + growing.most_bytes(self.device)
            return max(most - self.before, 0)
        return max(peak_bytes() - self.before, 0)


def _status(field: str) -> int | None:
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:")), None)


def _peak_ever() -> int:
    if sys.platform == "win32":
        return 0
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Kilobytes on Linux, bytes on macOS.
    return used if sys.platform == "darwin" else used << 10
