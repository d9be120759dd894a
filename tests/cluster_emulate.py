"""Kernels whose programs form clusters, on the CPU: compiled by g++ over `cluster_emulator.hpp`.

While `emulated_clusters` holds, `Kernel.launch` on CPU tensors runs the kernel there, from the packed parameters on.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from flashqsa.kernels.nvrtc import Kernel, Source
from tests.nvrtc_emulate import CXX, HERE, OUTCOMES

NVRTC_FOLDER = Source("").folder

CLUSTER_OUTCOMES = (
    *OUTCOMES,
    "a barrier that not every thread comes to",
    "another program's memory before it has surely begun",
    "another program's memory when it may have ended",
    "a program outside the cluster, or a copy that is not aligned",
)


def build_emulator(source: Source, kernel: str, folder: Path) -> ctypes.CDLL:
    """Compiles a source's kernel."""
    body, found = re.subn(
        r"(?m)^( +)extern __shared__ __align__\(\d+\) char dynamic\[\];",
        r"\1char* const dynamic = cluster_emulator::memory();",
        source.read(),
    )
    assert found == 1
    text = (
        f'#include "cluster_emulator.hpp"\n{body}\n'
        'extern "C" int emulate(int programs, int cluster, int threads, int shared_bytes, const char* packed,\n'
        f"                       long long bytes) {{\n    return cluster_emulator::launch({kernel}, programs, cluster,"
        " threads, shared_bytes, packed, bytes);\n}\n"
    )
    file = folder / f"{kernel}{'-'.join(str(value) for _, value in source.defines)}.cpp"
    file.write_text(text)
    options = ["-std=c++20", "-O1", "-w", "-ffp-contract=off", "-fno-strict-aliasing", "-shared", "-fPIC"]
    places = [f"-I{HERE}", f"-I{source.folder}", f"-I{NVRTC_FOLDER}", str(file), "-o", str(file.with_suffix(".so"))]
    compiler = subprocess.run(
        [str(CXX), *options, *source.options, *places], capture_output=True, text=True, check=False
    )
    assert compiler.returncode == 0, compiler.stderr
    return ctypes.CDLL(str(file.with_suffix(".so")))


@contextmanager
def emulated_clusters(folder: Path) -> Iterator[None]:
    """Launches on CPU tensors run in the emulator; those on a GPU as ever."""
    built: dict[Source, ctypes.CDLL] = {}
    on_gpu = Kernel.launch

    def launch(kernel: Kernel, device: torch.device, programs: int, *arguments: int | float) -> None:
        if device.type != "cpu":
            on_gpu(kernel, device, programs, *arguments)
            return
        if programs == 0:
            return
        if kernel.source not in built:
            built[kernel.source] = build_emulator(kernel.source, kernel.function, folder)
        packed = kernel.packing.pack(*arguments)
        sizes = (ctypes.c_int(number) for number in (programs, kernel.cluster, kernel.threads, kernel.shared_bytes))
        outcome = built[kernel.source].emulate(*sizes, packed, ctypes.c_longlong(len(packed)))
        assert outcome == 0, f"{kernel.function}: {CLUSTER_OUTCOMES[outcome]}"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Kernel, "launch", launch)
        yield
