"""The worklist kernel on the CPU: its CUDA C++ source, compiled by g++ over `emulator.hpp`."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

from flashqsa.attend_shape import LIST_PAD
from flashqsa.kernels.nvrtc import Source, worklist
from flashqsa.kernels.nvrtc.worklist import WindowLists
from flashqsa.values import KvCache, QsaSpec, Rows, Selection

HERE = Path(__file__).parent
THREADS = 64
CXX = shutil.which("g++")


def build_emulator(folder: Path) -> ctypes.CDLL:
    """Compiles the kernel. Raises CalledProcessError where g++ refuses it."""
    source = Source("worklist.cu").read()
    parameters = re.search(r"flashqsa_worklist\((.*?)\n\) \{", source, re.S)
    assert parameters is not None
    names = re.findall(r"(\w+),?\s*(?://.*)?$", parameters[1], re.M)
    body = source.replace("extern __shared__", "extern").replace("__shared__", "static")
    declared = re.sub(r"\s*//.*", "", parameters[1])
    text = f"""#include "emulator.hpp"
alignas(16) unsigned dynamic[1 << 16];
{body}
extern "C" void emulate(int windows, {declared}) {{
    block_size.x = {THREADS};
    for (block_index.x = 0; block_index.x < windows; ++block_index.x) {{
        emulator::run_block({THREADS}, [&] {{ flashqsa_worklist({", ".join(names)}); }});
    }}
}}
"""
    file, library = folder / "worklist.cpp", folder / "worklist.so"
    file.write_text(text)
    command = [str(CXX), "-std=c++20", "-O1", "-w", "-shared", "-fPIC", f"-I{HERE}", str(file), "-o", str(library)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return ctypes.CDLL(str(library))


def emulate(
    library: ctypes.CDLL,
    lists: WindowLists,
    selection: Selection | None,
    rows: Rows,
    spec: QsaSpec,
    cache: KvCache,
    ranked: int,
) -> None:
    """As `list_windows`, with `ranked` entries ranked at a time."""
    arguments = worklist.kernel_arguments(lists, selection, rows, spec, cache, ranked)
    kinds = {"P": ctypes.c_void_p, "q": ctypes.c_longlong, "i": ctypes.c_int}
    typed = [kinds[code](value) for code, value in zip(worklist.PARAMETERS, arguments, strict=True)]
    assert lists.capacity % LIST_PAD == 0
    library.emulate(ctypes.c_int(lists.windows), *typed)
