"""CUDA C++ compiled with NVRTC on the user's machine, and the kernels that every NVIDIA GPU shares.

Importing this needs neither a GPU nor NVRTC: both are looked for at a kernel's first launch.
"""

from flashqsa.kernels.nvrtc.compiler import Compiled, CompileError, Source, compile_source
from flashqsa.kernels.nvrtc.driver import DriverError, Kernel
from flashqsa.kernels.nvrtc.everything import empty_selection, select_everything
from flashqsa.kernels.nvrtc.library import Nvrtc, NvrtcNotFoundError, nvrtc_for
from flashqsa.kernels.nvrtc.prepare import prepare
from flashqsa.kernels.nvrtc.write import write_index_keys, write_kv

__all__ = [
    "CompileError",
    "Compiled",
    "DriverError",
    "Kernel",
    "Nvrtc",
    "NvrtcNotFoundError",
    "Source",
    "compile_source",
    "empty_selection",
    "nvrtc_for",
    "prepare",
    "select_everything",
    "write_index_keys",
    "write_kv",
]
