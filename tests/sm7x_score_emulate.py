"""The score kernels of sm7x on the CPU: their sources, variant by variant, compiled by g++ over an emulated warp.

While `emulated_scores` holds, `Kernel.launch` on CPU tensors runs there; torch multiplies in FP32 what cuBLAS would.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flashqsa.kernels.nvrtc import Kernel, Source
from tests.nvrtc_emulate import CXX, HERE, OUTCOMES

stage = import_module("flashqsa.kernels.sm7x.score")  # the package has a function of this name

BUILT: dict[Source, ctypes.CDLL] = {}
"""Compiled variants of this process: each takes g++ seconds."""


def build(source: Source, folder: Path) -> ctypes.CDLL:
    """Compiles a variant's kernels. Raises CalledProcessError where g++ refuses it."""
    kernels = re.findall(r"__global__ void __launch_bounds__\(.*?\) (\w+)\(", source.read())
    assert kernels
    cases = "".join(
        f'    if (!std::strcmp(name, "{kernel}"))'
        f" return emulator::launch({kernel}, programs, threads, shared_bytes, packed, bytes);\n"
        for kernel in kernels
    )
    text = (
        f'#include "sm7x_score_emulator.hpp"\n#include "{source.name}"\n'
        'extern "C" int emulate(const char* name, int programs, int threads, int shared_bytes, const char* packed,\n'
        f"                       long long bytes) {{\n{cases}    return emulator::unknown_kernel;\n}}\n"
    )
    file = folder / f"{len(BUILT)}-{source.name}.cpp"
    file.write_text(text)
    options = ["-std=c++20", "-O1", "-w", "-mf16c", "-ffp-contract=off", "-fno-strict-aliasing", "-shared", "-fPIC"]
    places = [f"-I{HERE}", f"-I{source.folder}", str(file), "-o", str(file.with_suffix(".so"))]
    subprocess.run([str(CXX), *options, *source.options, *places], check=True, capture_output=True)
    return ctypes.CDLL(str(file.with_suffix(".so")))


@contextmanager
def emulated_scores(folder: Path) -> Iterator[None]:
    """Launches of score kernels on CPU tensors run in the emulator."""
    on_gpu, multiply_on_gpu = Kernel.launch, stage.multiply

    def launch(kernel: Kernel, device: torch.device, programs: int, *arguments: int | float) -> None:
        if device.type != "cpu":
            on_gpu(kernel, device, programs, *arguments)
            return
        if programs == 0:
            return
        if kernel.source not in BUILT:
            BUILT[kernel.source] = build(kernel.source, folder)
        packed = kernel.packing.pack(*arguments)
        sizes = (ctypes.c_int(programs), ctypes.c_int(kernel.threads), ctypes.c_int(kernel.shared_bytes))
        function = kernel.function.encode()
        outcome = BUILT[kernel.source].emulate(function, *sizes, packed, ctypes.c_longlong(len(packed)))
        assert outcome == 0, f"{kernel.function}: {OUTCOMES[outcome]}"

    def multiply(lines: Tensor, keys: Tensor, out: Tensor) -> None:
        if out.device.type != "cpu":
            multiply_on_gpu(lines, keys, out)
            return
        assert out.is_contiguous()
        torch.mm(lines.float(), keys.float().t(), out=out)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Kernel, "launch", launch)
        patch.setattr(stage, "multiply", multiply)
        yield
