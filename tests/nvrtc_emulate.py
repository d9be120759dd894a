"""Kernels of nvrtc on the CPU: their CUDA C++ sources, compiled by g++ over `nvrtc_emulator.hpp`, and whole storages.

While `emulated_launches` holds, `Kernel.launch` on CPU tensors runs the kernel there, so that the host code that every
GPU runs is tested with it, down to the packed parameters.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flashqsa.device import facts_of
from flashqsa.kernels.nvrtc import Kernel, Source
from flashqsa.values import IndexCache, KvCache, Rows

HERE = Path(__file__).parent
CXX = shutil.which("g++")
OUTCOMES = ("done", "no such kernel", "other parameters than the kernel has", "shared memory past what was asked for")


def build_emulator(source: Source, folder: Path) -> ctypes.CDLL:
    """Compiles a source's kernels. Raises CalledProcessError where g++ refuses it."""
    kernels = re.findall(r"__global__ void __launch_bounds__\(.*?\) (\w+)\(", source.read())
    assert kernels
    needs = {"mma.cuh": "mma_emulator.hpp", "ranking.cuh": "ranking_emulator.hpp"}
    emulator = next((needs[header] for header in source.headers if header in needs), "nvrtc_emulator.hpp")
    # One block runs at a time: what its threads share may be static, or the array that all kernels have.
    body = re.sub(
        r"(?m)^( +)extern __shared__ (\w+) dynamic\[\];", r"\1\2* const dynamic = (\2*)::dynamic;", source.read()
    )
    body = re.sub(r"(?m)^( +)__shared__", r"\1static", body)
    text = "\n".join(
        [
            f'#include "{emulator}"',
            body,
            'extern "C" int emulate(const char* name, int programs, int threads, int shared_bytes, const char* packed,',
            "                       long long bytes) {",
            *(
                f'    if (!std::strcmp(name, "{kernel}"))'
                f" return emulator::launch({kernel}, programs, threads, shared_bytes, packed, bytes);"
                for kernel in kernels
            ),
            "    return emulator::unknown_kernel;",
            "}",
        ]
    )
    variant = "-".join([source.name, *(f"{macro}{value}" for macro, value in source.defines)])
    file, library = folder / f"{variant}.cpp", folder / f"{variant}.so"
    file.write_text(text)
    includes = [f"-I{HERE}", f"-I{source.folder}"]
    # Each operation rounds for itself, as the kernels' intrinsics do.
    options = ["-std=c++20", "-O1", "-w", "-ffp-contract=off", "-fno-strict-aliasing", "-shared", "-fPIC"]
    options += source.options
    subprocess.run([str(CXX), *options, *includes, str(file), "-o", str(library)], check=True, capture_output=True)
    return ctypes.CDLL(str(library))


@contextmanager
def emulated_launches(folder: Path) -> Iterator[None]:
    """Launches on CPU tensors run in the emulator; those on a GPU as ever."""
    built: dict[Source, ctypes.CDLL] = {}
    on_gpu = Kernel.launch

    def launch(kernel: Kernel, device: torch.device, programs: int, *arguments: int | float) -> None:
        if device.type != "cpu":
            on_gpu(kernel, device, programs, *arguments)
            return
        if programs == 0:
            return
        source = kernel.source
        if source not in built:
            built[source] = build_emulator(source, folder)
        packed = kernel.packing.pack(*arguments)
        sizes = (ctypes.c_int(programs), ctypes.c_int(kernel.threads), ctypes.c_int(kernel.shared_bytes))
        outcome = built[source].emulate(kernel.function.encode(), *sizes, packed, ctypes.c_longlong(len(packed)))
        assert outcome == 0, f"{kernel.function}: {OUTCOMES[outcome]}"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Kernel, "launch", launch)
        yield


def storage_of(tensor: Tensor) -> Tensor:
    """Every byte of the memory that a view is a view of, on the CPU."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage()).cpu()


def copied(device: torch.device | str, *tensors: Tensor) -> list[Tensor]:
    """The same views of copies of their whole memory: strides, offsets, gaps and what they share are kept."""
    memory: dict[int, Tensor] = {}
    views = []
    for tensor in tensors:
        home = tensor.untyped_storage().data_ptr()
        if home not in memory:
            memory[home] = storage_of(tensor).clone().to(device)
        whole = memory[home].view(tensor.dtype)
        views.append(whole.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset()))
    return views


def same_memory(got: Tensor, wanted: Tensor) -> bool:
    """Whether two views have the same memory, byte by byte, their gaps too."""
    return got.stride() == wanted.stride() and torch.equal(storage_of(got), storage_of(wanted))


@dataclass(frozen=True)
class Machine:
    """Where kernels run: the emulator, or the GPU that is here."""

    device: torch.device
    capability: tuple[int, int]

    def rows(self, rows: Rows) -> Rows:
        return Rows(rows.request.to(self.device), rows.position.to(self.device), rows.max_position)

    def kv_cache(self, cache: KvCache) -> KvCache:
        """A copy, memory and all."""
        keys, values, table = copied(self.device, cache.keys, cache.values, cache.page_table)
        k_scale, v_scale = (s.to(self.device) if isinstance(s, Tensor) else s for s in (cache.k_scale, cache.v_scale))
        return KvCache(keys, values, table, k_scale, v_scale)

    def index_cache(self, cache: IndexCache) -> IndexCache:
        """A copy, memory and all."""
        keys, table = copied(self.device, cache.keys, cache.page_table)
        ring = None if cache.raw_keys is None else copied(self.device, cache.raw_keys)[0]
        return IndexCache(keys, table, cache.scale, ring)


MACHINES = ["emulated", pytest.param("gpu", marks=pytest.mark.gpu)]


@contextmanager
def machine_named(name: str, folder: Path) -> Iterator[Machine]:
    """One of `MACHINES`; skips the test where g++ is wanted and not there."""
    if name == "gpu":
        device = torch.device("cuda", 0)
        capability = facts_of(device).capability
        assert capability is not None
        yield Machine(device, capability)
        return
    if CXX is None:
        pytest.skip("no g++ here to compile the kernels for the CPU")
    with emulated_launches(folder):
        yield Machine(torch.device("cpu"), (7, 0))
