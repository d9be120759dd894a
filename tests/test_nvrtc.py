"""Compiling CUDA C++ on the user's machine: which NVRTC, the cache of cubins, errors, and the kernels it is for."""

from __future__ import annotations

import copy
import os
import pickle
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from flashqsa.config import TopkConfig
from flashqsa.kernels.nvrtc import CompileError, NvrtcNotFoundError, Source, compile_source, compiler, library
from flashqsa.kernels.nvrtc.library import Nvrtc, nvrtc_for
from flashqsa.kernels.nvrtc.topk import variant_for

TURING, VOLTA, HOPPER = (7, 5), (7, 0), (9, 0)


class FakeNvrtc(Nvrtc):
    """A compiler that returns what it was given, and counts."""

    compiled: ClassVar[list[tuple[str, ...]]] = []

    def compile(  # type: ignore[override]
        self, name: str, source: str, _headers: tuple[tuple[str, str], ...], options: tuple[str, ...]
    ) -> tuple[bytes | None, str]:
        self.compiled.append(tuple(options))
        return (None, f"{name}(3): error: made up") if "error" in source else (source.encode(), "a log")


def fake(major: int, minor: int, *archs: int) -> FakeNvrtc:
    return FakeNvrtc(f"libnvrtc.so.{major}", (major, minor), frozenset(archs), None)  # type: ignore[arg-type]


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[FakeNvrtc]]:
    """The libraries that are found, to be filled by the test; an empty cache folder."""
    libraries: list[FakeNvrtc] = [fake(13, 0, 75, 80, 90, 120)]
    FakeNvrtc.compiled = []
    monkeypatch.setattr(library, "installed", lambda: tuple(libraries))
    monkeypatch.setenv("FLASHQSA_CACHE_DIR", str(tmp_path / "cache"))
    compile_source.cache_clear()
    yield libraries
    compile_source.cache_clear()


def entries(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "nvrtc").iterdir())


def test_import_needs_neither_a_gpu_nor_nvrtc() -> None:
    program = (
        "import sys, ctypes\n"
        "def refuse(*arguments, **options): raise AssertionError('opened a library')\n"
        "import torch\n"
        "ctypes.CDLL.__init__ = refuse\n"
        "import flashqsa.kernels.nvrtc, flashqsa.kernels.nvrtc.topk\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_library_that_knows_the_device_is_taken(fakes: list[FakeNvrtc], monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = fake(12, 6, 70, 75, 80, 90), fake(13, 0, 75, 80, 90, 120)
    fakes[:] = [old, new]
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert nvrtc_for(VOLTA) == (old, "sm_70")
    assert nvrtc_for(HOPPER) == (new, "sm_90")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert nvrtc_for(HOPPER) == (old, "sm_90")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert nvrtc_for(HOPPER) == (new, "sm_90")
    assert nvrtc_for((12, 1)) == (new, "sm_120")


def test_a_device_that_no_library_knows(fakes: list[FakeNvrtc]) -> None:
    with pytest.raises(NvrtcNotFoundError, match=r"sm_70; found: libnvrtc.so.13 \(13.0, sm_75 to sm_120\).*cu12==12.6"):
        nvrtc_for(VOLTA)
    fakes.clear()
    with pytest.raises(NvrtcNotFoundError, match=r"sm_90; found: none\. Install .* FLASHQSA_NVRTC"):
        nvrtc_for(HOPPER)


def test_an_entry_holds_source_log_and_cubin(fakes: list[FakeNvrtc], tmp_path: Path) -> None:
    found = compile_source(Source("a.cu", (("WIDTH", 4),), text="one"), HOPPER)
    assert (found.cubin, found.log) == (b"one", "a log")
    (folder,) = entries(tmp_path)
    assert found.folder == folder
    assert {path.name for path in folder.iterdir()} == {"a.cu", "kernel.cubin", "log.txt", "facts.json"}
    assert (folder / "a.cu").read_text() == "one"
    assert "--gpu-architecture=sm_90" in FakeNvrtc.compiled[0]
    assert "-DWIDTH=4" in FakeNvrtc.compiled[0]


@pytest.mark.skipif(os.name != "posix", reason="modes of files are POSIX's")
@pytest.mark.parametrize("mask", [0o022, 0o077, 0o027])
def test_an_entry_has_the_mode_that_the_umask_leaves(mask: int, fakes: list[FakeNvrtc], tmp_path: Path) -> None:
    """A folder that one user fills, as while an image is built, is read by another."""
    before = os.umask(mask)
    try:
        found = compile_source(Source("a.cu", text="one"), HOPPER)
        (found.folder / "log.txt").unlink()  # type: ignore[operator]
        compile_source.cache_clear()
        assert compile_source(Source("a.cu", text="one"), HOPPER).folder == found.folder
    finally:
        os.umask(before)
    (folder,) = entries(tmp_path)
    assert folder.stat().st_mode & 0o777 == 0o777 & ~mask
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o666 & ~mask}


def test_an_entry_is_compiled_once(fakes: list[FakeNvrtc], tmp_path: Path) -> None:
    source = Source("a.cu", text="one")
    compile_source(source, HOPPER)
    compile_source(source, HOPPER)
    compile_source.cache_clear()
    assert compile_source(source, HOPPER).cubin == b"one"
    assert len(FakeNvrtc.compiled) == len(entries(tmp_path)) == 1


def test_whatever_goes_in_is_part_of_the_key(fakes: list[FakeNvrtc], tmp_path: Path) -> None:
    compile_source(Source("a.cu", text="one"), HOPPER)
    compile_source(Source("a.cu", text="two"), HOPPER)
    compile_source(Source("a.cu", (("WIDTH", 4),), text="one"), HOPPER)
    compile_source(Source("a.cu", text="one", headers=("topk.cu",)), HOPPER)
    compile_source(Source("a.cu", text="one"), TURING)
    compile_source.cache_clear()
    fakes[:] = [fake(13, 1, 75, 90)]
    compile_source(Source("a.cu", text="one"), HOPPER)
    assert len(FakeNvrtc.compiled) == len(entries(tmp_path)) == 6


@pytest.mark.parametrize("harm", ["cubin", "facts", "missing"])
def test_a_broken_entry_is_made_again(harm: str, fakes: list[FakeNvrtc], tmp_path: Path) -> None:
    source = Source("a.cu", text="one")
    folder = compile_source(source, HOPPER).folder
    assert folder is not None
    if harm == "cubin":
        (folder / "kernel.cubin").write_bytes(b"on")
    elif harm == "facts":
        (folder / "facts.json").write_text("{")
    else:
        (folder / "log.txt").unlink()
    for _ in range(2):
        compile_source.cache_clear()
        assert compile_source(source, HOPPER).cubin == b"one"
    assert len(FakeNvrtc.compiled) == 2
    assert entries(tmp_path) == [folder]


def test_an_entry_of_another_process_is_kept(fakes: list[FakeNvrtc], tmp_path: Path) -> None:
    source = Source("a.cu", text="one")
    folder = compile_source(source, HOPPER).folder
    assert folder is not None
    before = (folder / "kernel.cubin").stat().st_ino
    facts = {"name": "a.cu"}
    assert compiler._write_entry(folder, facts, [("a.cu", "one")], b"one", "a log") == folder
    assert (folder / "kernel.cubin").stat().st_ino == before
    assert entries(tmp_path) == [folder]


def test_a_folder_that_cannot_be_written(
    fakes: list[FakeNvrtc], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLASHQSA_CACHE_DIR", str(tmp_path / "file"))
    found = compile_source(Source("a.cu", text="one"), HOPPER)
    assert (found.cubin, found.folder) == (b"one", None)
    assert "cubins are not kept" in caplog.text


def test_the_compiler_s_log_is_in_the_exception(fakes: list[FakeNvrtc], tmp_path: Path) -> None:
    wanted = r"NVRTC 13\.0 .* refused a\.cu.*sm_90(.|\n)*a\.cu\(3\): error: made up"
    with pytest.raises(CompileError, match=wanted) as caught:
        compile_source(Source("a.cu", text="an error"), HOPPER)
    assert caught.value.log == "a.cu(3): error: made up"
    assert not (tmp_path / "cache").exists()
    for copied in (pickle.loads(pickle.dumps(caught.value)), copy.deepcopy(caught.value)):
        assert type(copied) is CompileError
        assert (str(copied), copied.log) == (str(caught.value), caught.value.log)


def test_without_a_named_folder_the_user_s_cache_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FLASHQSA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compiler.cache_folder() == tmp_path / "flashqsa" / "nvrtc"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert compiler.cache_folder() == tmp_path / ".cache" / "flashqsa" / "nvrtc"


def test_a_named_library_is_the_only_one_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLASHQSA_NVRTC", str(tmp_path / "libnvrtc.so.13"))
    assert list(library._candidates()) == [str(tmp_path / "libnvrtc.so.13")]
    assert library.open_library(str(tmp_path / "libnvrtc.so.13")) is None


def test_a_named_library_that_does_not_open_is_told_by_its_name(
    fakes: list[FakeNvrtc], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = str(tmp_path / "libnvrtc.so.13")
    monkeypatch.setenv("FLASHQSA_NVRTC", path)
    fakes.clear()
    with pytest.raises(NvrtcNotFoundError, match=r"no NVRTC here compiles for sm_90; ") as caught:
        nvrtc_for(HOPPER)
    assert f"FLASHQSA_NVRTC names {path!r}, which does not open as an NVRTC" in str(caught.value)
    assert "Install" not in str(caught.value)
    assert "none" not in str(caught.value)
    fakes.append(fake(13, 0, 75, 90))
    with pytest.raises(NvrtcNotFoundError, match=r"sm_70; FLASHQSA_NVRTC names .*\(13\.0, sm_75 to sm_90\).*unset it"):
        nvrtc_for(VOLTA)


# From here on a real NVRTC compiles; without one for the architecture the test is skipped.


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64" or find_spec("hypothesis") is None,
    reason="the dev extra, where it is installed, brings compilers for GPUs on x86-64 Linux only",
)
def test_no_compiler_is_missing_where_the_dev_extra_brings_them() -> None:
    assert find_spec("triton"), "install the dev extra again"
    for capability in (VOLTA, TURING, HOPPER, (12, 0)):
        nvrtc_for(capability)


def real(capability: tuple[int, int]) -> Nvrtc:
    try:
        return nvrtc_for(capability)[0]
    except NvrtcNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("FLASHQSA_CACHE_DIR", str(tmp_path))
    compile_source.cache_clear()
    yield
    compile_source.cache_clear()


@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize("capability", [VOLTA, TURING, (8, 0), HOPPER, (12, 0)], ids=str)
def test_the_top_k_compiles(capability: tuple[int, int]) -> None:
    real(capability)
    config = TopkConfig(capability, 256, 1024 if capability == TURING else 1536)
    found = compile_source(variant_for(512, 46_000, config).source, capability)
    assert found.cubin.startswith(b"\x7fELF")
    functions = re.findall(r"Compiling entry function '(\w+)' for 'sm_(\d+)a?'", found.log)
    assert sorted(name for name, _ in functions) == ["segment_maxima", "select_rows"]
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", found.log)]
    assert max(registers) * config.resident <= 65536, "fewer threads fit on a multiprocessor than the variant asks for"
    spilled = [int(count) for count in re.findall(r"(\d+) bytes spill stores", found.log)]
    assert max(spilled) <= 128
    shared = [int(count) for count in re.findall(r"(\d+) bytes smem", found.log)]
    assert max(shared, default=0) <= 48 << 10, "static shared memory ends at 48 KiB"


@pytest.mark.usefixtures("empty_cache")
def test_a_real_compiler_s_log() -> None:
    real(HOPPER)
    with pytest.raises(CompileError, match=r'bad\.cu\(2\): error: identifier "missing" is undefined'):
        compile_source(Source("bad.cu", text='extern "C" __global__ void f(int* x) {\n*x = missing; }'), HOPPER)


@pytest.mark.usefixtures("empty_cache")
def test_headers_are_found_by_name(tmp_path: Path) -> None:
    real(HOPPER)
    (tmp_path / "width.cuh").write_text("#define WIDTH 3\n")
    text = '#include "width.cuh"\nextern "C" __global__ void f(int* x) { *x = WIDTH; }'
    found = compile_source(Source("a.cu", text=text, headers=("width.cuh",), folder=tmp_path), HOPPER)
    assert found.cubin.startswith(b"\x7fELF")
    assert found.folder is not None
    assert (found.folder / "width.cuh").exists()


def test_variants_are_few() -> None:
    config = TopkConfig(HOPPER, 256, 1536)
    few = {variant_for(top, width, config) for top in (64, 256, 512) for width in range(1, 262_145, 997)}
    assert len(few) <= 6
    for top_blocks in (1, 512, 513, 2048):
        for width in (1, 16_384, 262_144):
            variant = variant_for(top_blocks, width, config)
            assert variant.threads * variant.segments >= top_blocks
            assert variant.threads * variant.maxima_vectors * 64 >= width
