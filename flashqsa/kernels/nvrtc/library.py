"""The NVRTC libraries of this machine: which there are, and what each can compile for.

An application may have several: torch brings one, a toolkit another, and Volta needs version 12 where the rest of the
machine runs on 13. They are opened through ctypes, since the bindings on PyPI open one major version per process.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

from flashqsa import knobs

PACKAGE_FOLDERS = ("cu*/lib", "cuda_nvrtc/lib")
"""Where NVIDIA's wheels keep NVRTC below their namespace package `nvidia`: CUDA 13 and newer, CUDA 12."""

TOOLKIT_FOLDERS = ("cuda/lib64", "cuda-*/lib64")
"""Where a toolkit keeps it below /usr/local."""

LOADER_NAMES = ("libnvrtc.so.13", "libnvrtc.so.12")
"""Names to ask the dynamic loader for: a toolkit elsewhere on its search path."""

SUCCESS = 0

VIRTUAL = "compute_"
"""What the names of virtual architectures begin with; those of real ones with `sm_`."""


class NvrtcNotFoundError(RuntimeError):
    """No NVRTC of this machine compiles for the device; the message says what was found and what to install."""


@dataclass(frozen=True)
class Nvrtc:
    """One NVRTC library, opened.

    path     its file, or the name the dynamic loader knows it by
    version  (major, minor)
    archs    compute capabilities it compiles for, as 10 * major + minor
    """

    path: str
    version: tuple[int, int]
    archs: frozenset[int]
    handle: ctypes.CDLL = field(repr=False, compare=False)

    def compile(
        self, name: str, source: str, headers: Sequence[tuple[str, str]], options: Sequence[str]
    ) -> tuple[bytes | None, str]:
        """Compiles one CUDA C++ source.

        headers  (name, text) of the files it may include
        options  of NVRTC; they name the architecture

        Returns the cubin, of a virtual architecture the PTX, or None where the source has errors, and the log.
        """
        program, count = ctypes.c_void_p(), len(headers)
        texts = (ctypes.c_char_p * count)(*(text.encode() for _, text in headers))
        names = (ctypes.c_char_p * count)(*(header.encode() for header, _ in headers))
        created = ctypes.byref(program)
        self._call("nvrtcCreateProgram", created, source.encode(), name.encode(), count, texts, names)
        try:
            given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            compiled = self.handle.nvrtcCompileProgram(program, len(options), given) == SUCCESS
            log = self._bytes("nvrtcGetProgramLog", program).rstrip(b"\0").decode(errors="replace").strip()
            virtual = f"--gpu-architecture={VIRTUAL}"
            made = "nvrtcGetPTX" if any(option.startswith(virtual) for option in options) else "nvrtcGetCUBIN"
            return (self._bytes(made, program) if compiled else None), log
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))

    def _bytes(self, getter: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"{getter}Size", program, ctypes.byref(size))
        content = ctypes.create_string_buffer(size.value)
        self._call(getter, program, content)
        return content.raw

    def _call(self, function: str, *arguments: object) -> None:
        status = getattr(self.handle, function)(*arguments)
        if status != SUCCESS:
            raise RuntimeError(f"{self.path}: {function} returned {_error_text(self.handle, status)}")


def nvrtc_for(capability: tuple[int, int]) -> tuple[Nvrtc, str]:
    """The library to compile with for a device, and the architecture to name (`sm_90`).

    Of the libraries that know the device, one of the major version of torch's own CUDA is preferred, since the driver
    is known to run that; then the newest. An architecture that none knows takes an older one of the same major version,
    whose cubins it runs (CUDA C++ Programming Guide, "Binary Compatibility").

    Raises NvrtcNotFoundError.
    """
    major, minor = capability
    libraries = installed()
    for lower in range(minor, -1, -1):
        able = [library for library in libraries if 10 * major + lower in library.archs]
        if able:
            own = _torch_cuda_major()
            return max(able, key=lambda library: (library.version[0] == own, library.version)), f"sm_{major}{lower}"
    raise NvrtcNotFoundError(f"no NVRTC here compiles for sm_{major}{minor}; {_what_to_do(capability, libraries)}")


def _what_to_do(capability: tuple[int, int], libraries: Sequence[Nvrtc]) -> str:
    found = "; ".join(f"{library.path} ({_version_text(library)})" for library in libraries)
    named = knobs.NVRTC.read()
    if named:
        # Nothing else is tried then: what one might install would not be found.
        what = found or f"{named!r}, which does not open as an NVRTC"
        return f"{knobs.NVRTC.name} names {what}. Name another, or unset it."
    wheel = "nvidia-cuda-nvrtc-cu12==12.6.77" if capability < (7, 5) else "nvidia-cuda-nvrtc"
    return f"found: {found or 'none'}. Install {wheel}, or name a library in {knobs.NVRTC.name}."


@cache
def installed() -> tuple[Nvrtc, ...]:
    """Every NVRTC library that can be opened here, each version once. Looked for once per process."""
    found: dict[tuple[int, int], Nvrtc] = {}
    for path in _candidates():
        library = open_library(path)
        if library is not None:
            found.setdefault(library.version, library)
    return tuple(found.values())


def open_library(path: str) -> Nvrtc | None:
    """Opens the library of a file, or of a name the dynamic loader knows; None where there is none that answers."""
    try:
        for builtins in _builtins_beside(path):
            # NVRTC opens its builtins by bare name and, in a folder of its own, finds them only when they are loaded.
            ctypes.CDLL(builtins, mode=ctypes.RTLD_GLOBAL)
        handle = ctypes.CDLL(path)
        asked = _version_and_archs(handle)
    except (OSError, AttributeError):  # no library, another library, or an NVRTC before 11.2
        return None
    return None if asked is None else Nvrtc(path, *asked, handle)


def _version_and_archs(handle: ctypes.CDLL) -> tuple[tuple[int, int], frozenset[int]] | None:
    """What a library says of itself. Raises AttributeError where it lacks a function of NVRTC's."""
    handle.nvrtcGetErrorString.restype = ctypes.c_char_p
    major, minor, count = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    if handle.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)) != SUCCESS:
        return None
    if handle.nvrtcGetNumSupportedArchs(ctypes.byref(count)) != SUCCESS:
        return None
    archs = (ctypes.c_int * count.value)()
    if handle.nvrtcGetSupportedArchs(archs) != SUCCESS:
        return None
    return (major.value, minor.value), frozenset(archs)


def _candidates() -> Iterator[str]:
    """Files and names to try, those most likely torch's own first."""
    named = knobs.NVRTC.read()
    if named:
        yield named
        return
    spec = find_spec("nvidia")
    for top in spec.submodule_search_locations or () if spec else ():
        yield from _libraries_in(Path(top), PACKAGE_FOLDERS)
    yield from LOADER_NAMES
    yield from _libraries_in(Path("/usr/local"), TOOLKIT_FOLDERS)


def _libraries_in(top: Path, folders: Sequence[str]) -> Iterator[str]:
    for folder in folders:
        for path in sorted(top.glob(f"{folder}/libnvrtc.so.*")):
            if re.fullmatch(r"libnvrtc\.so\.\d+", path.name):
                yield str(path)


def _builtins_beside(path: str) -> list[str]:
    if "/" not in path:
        return []
    major = path.rpartition(".")[2]
    beside = sorted(Path(path).parent.glob(f"libnvrtc-builtins.so.{major}.*"))
    return [str(file) for file in beside if re.fullmatch(r"libnvrtc-builtins\.so\.\d+\.\d+", file.name)]


def _torch_cuda_major() -> int | None:
    return int(torch.version.cuda.partition(".")[0]) if torch.version.cuda else None


def _version_text(library: Nvrtc) -> str:
    return f"{library.version[0]}.{library.version[1]}, sm_{min(library.archs)} to sm_{max(library.archs)}"


def _error_text(handle: ctypes.CDLL, status: int) -> str:
    return str(handle.nvrtcGetErrorString(status).decode())
