"""Compiling the CUDA C++ sources of this package on the user's machine, once: a folder of cubins on disk.

Each entry of the cache is a folder that holds what went in (source, headers, options) and what came out (cubin, log),
so that a kernel can be read, disassembled and reported as it ran. Cubins are kept and not PTX: a PTX version ties a
kernel to drivers at least as new as the compiler.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from flashqsa import knobs
from flashqsa.kernels.nvrtc.library import VIRTUAL, Nvrtc, NvrtcNotFoundError, nvrtc_for

logger = logging.getLogger("flashqsa")

HERE = Path(__file__).parent

OPTIONS = ("--std=c++17", "--ptxas-options=-v")
"""Of every compilation. The second writes registers, shared memory and spills of each kernel to the log."""


class CompileError(RuntimeError):
    """NVRTC refused a source. The message holds the compiler's log; `log` holds it alone."""

    def __init__(self, message: str, log: str) -> None:
        self.message, self.log = message, log
        super().__init__(f"{message}\n{log}")

    def __reduce__(self) -> tuple[type[CompileError], tuple[str, str]]:
        # An exception is pickled as its class and what it prints, which is not what this class takes.
        return type(self), (self.message, self.log)


@dataclass(frozen=True)
class Source:
    """CUDA C++ to compile: a file of this package, or text that stands for one.

    name     of the file, `topk.cu`
    defines  (macro, value) pairs: what a variant of the kernel is made for
    text     the source itself, where it is not a file
    headers  names of the files that it includes, of its folder or else of this one
    suffix   of the architecture: "a" for instructions that this very architecture alone has (`sm_90a`)
    folder   where the file is: this one, or another kernel set's
    virtual  whether it becomes PTX of the virtual architecture (`compute_70`), which the driver of any newer device
             compiles as it loads it: how kernels of devices that are not here are checked

    >>> Source("topk.cu", (("THREADS", 256), ("SEGMENTS", 2))).options
    ('-DTHREADS=256', '-DSEGMENTS=2')
    """

    name: str
    defines: tuple[tuple[str, int], ...] = ()
    text: str | None = None
    headers: tuple[str, ...] = ()
    suffix: str = ""
    folder: Path = HERE
    virtual: bool = False

    @property
    def options(self) -> tuple[str, ...]:
        """The defines as compiler options."""
        return tuple(f"-D{macro}={value}" for macro, value in self.defines)

    def read(self) -> str:
        """The source's text."""
        return self.text if self.text is not None else (self.folder / self.name).read_text("utf-8")

    def header(self, name: str) -> Path:
        """Where a file is that it includes."""
        own = self.folder / name
        return own if own.exists() else HERE / name


@dataclass(frozen=True)
class Compiled:
    """A cubin, or PTX where the source asks for it, and the compiler's log (with the cubin's registers and spills).

    folder  where they are kept; None where the cache folder cannot be written
    """

    cubin: bytes
    log: str
    folder: Path | None


@cache
def compile_source(source: Source, capability: tuple[int, int]) -> Compiled:
    """The cubin of a source for a device: from this process, from the cache folder, or compiled now.

    Where no NVRTC here knows the device, an entry that another machine's made serves: `flashqsa build` fills a folder
    for machines without a compiler. Raises CompileError for a source NVRTC refuses, NvrtcNotFoundError where no NVRTC
    knows the device and no entry is kept.
    """
    try:
        library, arch = nvrtc_for(capability)
    except NvrtcNotFoundError:
        kept = _kept_for(source, capability)
        if kept is None:
            raise
        return kept
    wanted = _Wanted.of(source, arch)
    folder = cache_folder() / f"{wanted.name}-{_version_text(library.version)}"
    kept = _read_entry(folder)
    if kept is not None:
        return kept
    cubin, log = _compile(library, source, wanted)
    facts = {**wanted.facts, "nvrtc": list(library.version)}
    return Compiled(cubin, log, _write_entry(folder, facts, wanted.files, cubin, log))


@dataclass(frozen=True)
class _Wanted:
    """All that goes into a compilation, but for the compiler.

    facts  what an entry says of it
    files  (name, text) of the source, then of its headers
    """

    facts: Mapping[str, object]
    files: tuple[tuple[str, str], ...]
    options: tuple[str, ...]

    @staticmethod
    def of(source: Source, arch: str) -> _Wanted:
        arch += source.suffix
        if source.virtual:
            arch = arch.replace("sm_", VIRTUAL)
        headers = ((header, source.header(header).read_text("utf-8")) for header in source.headers)
        options = (f"--gpu-architecture={arch}", *OPTIONS, *source.options)
        facts = {"name": source.name, "options": list(options), "arch": arch}
        return _Wanted(facts, ((source.name, source.read()), *headers), options)

    @property
    def name(self) -> str:
        """What names of entries begin with, whichever compiler made them: its version follows."""
        return f"{Path(str(self.facts['name'])).stem}-{self.facts['arch']}-{_key(self.facts, self.files)}"


def is_kept(source: Source, capability: tuple[int, int]) -> bool:
    """Whether the cache folder holds a source compiled for a device, by whichever compiler."""
    return _kept_for(source, capability) is not None


def _kept_for(source: Source, capability: tuple[int, int]) -> Compiled | None:
    """The entry that the newest compiler made of a source for a device, or for an older one of its major version."""
    major, minor = capability
    for lower in range(minor, -1, -1):
        wanted = _Wanted.of(source, f"sm_{major}{lower}")
        made = cache_folder().glob(f"{wanted.name}-*")
        for folder in sorted(
            (f for f in made if _version_of(f) is not None), key=lambda f: _version_of(f) or (), reverse=True
        ):
            kept = _read_entry(folder)
            if kept is not None:
                return kept
    return None


def _version_text(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _version_of(folder: Path) -> tuple[int, ...] | None:
    """The compiler's version in the name of an entry; None for a folder that is not finished."""
    version = folder.name.rpartition("-")[2].split(".")
    return tuple(map(int, version)) if len(version) == 2 and all(part.isdecimal() for part in version) else None


def cache_folder() -> Path:
    """Where cubins are kept: FLASHQSA_CACHE_DIR, or `flashqsa` in the user's cache folder."""
    return knobs.cache_folder() / "nvrtc"


def _compile(library: Nvrtc, source: Source, wanted: _Wanted) -> tuple[bytes, str]:
    (_, text), *headers = wanted.files
    cubin, log = library.compile(source.name, text, headers, wanted.options)
    if cubin is None:
        version, options = _version_text(library.version), " ".join(wanted.options)
        raise CompileError(f"NVRTC {version} ({library.path}) refused {source.name}, options {options}:", log)
    return cubin, log


def _key(facts: Mapping[str, object], files: Sequence[tuple[str, str]]) -> str:
    digest = hashlib.sha256(json.dumps([facts, files], sort_keys=True).encode())
    return digest.hexdigest()[:32]


def _read_entry(folder: Path) -> Compiled | None:
    """An entry of the cache, or None where there is none that is whole."""
    try:
        facts = json.loads((folder / "facts.json").read_text("utf-8"))
        cubin = (folder / "kernel.cubin").read_bytes()
        log = (folder / "log.txt").read_text("utf-8")
    except (OSError, ValueError):
        return None
    whole = isinstance(facts, dict) and facts.get("cubin_sha256") == hashlib.sha256(cubin).hexdigest()
    return Compiled(cubin, log, folder) if whole else None


def _write_entry(
    folder: Path, facts: Mapping[str, object], files: Sequence[tuple[str, str]], cubin: bytes, log: str
) -> Path | None:
    """Writes an entry beside its place and moves it there in one step; None where the folder cannot be written.

    Processes may race for an entry: one wins, and what the others made is the same.
    """
    facts = {**facts, "cubin_sha256": hashlib.sha256(cubin).hexdigest()}
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
        try:
            # `mkdtemp` lets nobody else in, whatever the umask: the entry is a folder of its own in there.
            new = aside / folder.name
            new.mkdir()
            for name, text in [*files, ("log.txt", log), ("facts.json", json.dumps(facts, indent=2))]:
                (new / name).write_text(text, "utf-8")
            (new / "kernel.cubin").write_bytes(cubin)
            _move(new, folder)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        logger.warning("cubins are not kept: %s", error)
        return None
    return folder


def _move(new: Path, folder: Path) -> None:
    """Renames a finished entry to its place. A broken entry that stands there is moved away first."""
    try:
        os.rename(new, folder)
        return
    except OSError:
        if _read_entry(folder) is not None:
            return
    aside = Path(tempfile.mkdtemp(prefix=f"{folder.name}.broken.", dir=folder.parent))
    try:
        os.rename(folder, aside / folder.name)
        os.rename(new, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
