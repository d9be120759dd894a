"""Where the score kernels of sm7x run: on the CPU, compiled by g++ over an emulated warp, or on the GPU that is here.

While `emulated_scores` holds, `Kernel.launch` on CPU tensors runs there; torch multiplies in FP32 what cuBLAS would.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flashqsa.config import Sm7xScoreConfig
from flashqsa.device import facts_of
from flashqsa.kernels.nvrtc import Kernel, NvrtcNotFoundError, Source, compile_source, products
from flashqsa.kernels.nvrtc.products import products_source
from flashqsa.kernels.sm7x.score import ScoreVariant, score
from flashqsa.testing.cases import Case
from flashqsa.testing.inputs import Inputs, build
from flashqsa.values import FP8, Scores
from tests.both_devices import poisoned_memory
from tests.nvrtc_emulate import CXX, HERE, OUTCOMES

stage = import_module("flashqsa.kernels.sm7x.score")  # the package has a function of this name

VOLTA, TURING = (7, 0), (7, 5)

BUILT: dict[Source, ctypes.CDLL] = {}
"""Compiled variants of this process: each takes g++ seconds."""


def compiled(source: Source, folder: Path) -> ctypes.CDLL:
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
    on_gpu, multiply_on_gpu = Kernel.launch, products.multiply

    def launch(kernel: Kernel, device: torch.device, programs: int, *arguments: int | float) -> None:
        if device.type != "cpu":
            on_gpu(kernel, device, programs, *arguments)
            return
        if programs == 0:
            return
        if kernel.source not in BUILT:
            BUILT[kernel.source] = compiled(kernel.source, folder)
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
        patch.setattr(products, "multiply", multiply)
        yield


@dataclass(frozen=True)
class Machine:
    """Where kernels run, what they are compiled for, and with which kind of product."""

    device: str
    capability: tuple[int, int]
    quad_pairs: bool

    def scores(self, inputs: Inputs, config: Sm7xScoreConfig) -> Scores:
        """Scores written over NaN."""
        config = replace(config, capability=self.capability, quad_pairs=self.quad_pairs)
        with poisoned_memory():
            return score(inputs.index_q, inputs.index_cache, inputs.rows, inputs.spec, config)

    def build(self, case: Case) -> Inputs:
        """Inputs of a case in dtypes that the stage takes."""
        cache_dtype = FP8 if case.cache_dtype == FP8 else torch.float16
        return build(replace(case, q_dtype=torch.float16, cache_dtype=cache_dtype), self.device)


@contextmanager
def as_ptx() -> Iterator[None]:
    """Kernels are compiled to PTX of the virtual architecture of their capability."""
    plain, plain_products = vars(ScoreVariant)["source"].fget, products_source
    stage._score_kernel.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScoreVariant, "source", property(lambda variant: replace(plain(variant), virtual=True)))
        patch.setattr(products, "products_source", lambda *kind: replace(plain_products(*kind), virtual=True))
        yield
    stage._score_kernel.cache_clear()


KINDS = [
    "volta",
    "turing",
    *(
        pytest.param(f"{kind}-{how}", marks=pytest.mark.gpu)
        for kind in ("volta", "turing")
        for how in ("native", "ptx")
    ),
]


@contextmanager
def machine_named(name: str, folder: Path) -> Iterator[Machine]:
    """One of `KINDS`: the emulator, or the GPU that is here, with Volta's products or Turing's."""
    kind, _, how = name.partition("-")
    volta = kind == "volta"
    if how == "native":
        capability = facts_of(torch.device("cuda", 0)).capability
        assert capability is not None
        yield Machine("cuda", capability, volta)
    elif how == "ptx":
        capability = VOLTA if volta else TURING
        try:
            compile_source(replace(products_source(e4m3=False, aligned=True), virtual=True), capability)
        except NvrtcNotFoundError as error:
            pytest.skip(str(error))
        with as_ptx():
            yield Machine("cuda", capability, volta)
    else:
        if CXX is None:
            pytest.skip("no g++ here to compile the kernels for the CPU")
        with emulated_scores(folder):
            yield Machine("cpu", VOLTA if volta else TURING, volta)
