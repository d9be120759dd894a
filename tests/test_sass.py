"""The machine code of Volta's and Turing's kernels: where their products stand, and what `kernels-sm7x.json` says."""

from __future__ import annotations

import importlib.util
import json
import platform
import struct
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from flashqsa.attend_shape import Sm7xTile
from flashqsa.kernels.nvrtc import NvrtcNotFoundError, Source, compile_source, everything, nvrtc_for
from flashqsa.kernels.nvrtc.products import products_source
from flashqsa.kernels.nvrtc.worklist import worklist_kernel
from flashqsa.kernels.sm7x.attend import sm7x_kernel
from flashqsa.kernels.sm7x.merge import merge_kernel
from flashqsa.kernels.sm7x.score import ScoreVariant
from flashqsa.testing import sass
from flashqsa.testing.sass import Instruction

ROOT = Path(__file__).resolve().parent.parent
VOLTA, TURING, HOPPER = (7, 0), (7, 5), (9, 0)
LIMITS = {"sm_70": 96 << 10, "sm_75": 64 << 10}
"""Shared memory that a program may have, in bytes."""

PRODUCTS = {"sm_70": ("HMMA.884", 4), "sm_75": ("HMMA.1688", 1)}
"""The tensor cores' instruction, and how many of them 1,024 products and sums take."""


def load_script() -> Any:
    """`benchmarks/kernels_sm7x.py` as a module; benchmarks are no package."""
    spec = importlib.util.spec_from_file_location("kernels_sm7x", ROOT / "benchmarks" / "kernels_sm7x.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


script = load_script()
RECORDED = json.loads(script.RESULTS.read_text("utf-8"))


@pytest.fixture(autouse=True, scope="module")
def one_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A folder of cubins of this file's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHQSA_CACHE_DIR", str(tmp_path_factory.mktemp("cubins")))
        compile_source.cache_clear()
        yield
    compile_source.cache_clear()


def capability_of(arch: str) -> tuple[int, int]:
    return int(arch[3]), int(arch[4])


def source_of(kernel: dict[str, Any]) -> Source | None:
    """What a recorded kernel is compiled from; None for those that are not compiled here again, for their time."""
    macros = {macro: int(value) for macro, _, value in (word.partition("=") for word in kernel["variant"].split())}
    capability = capability_of(kernel["arch"])
    match kernel["source"]:
        case "attend.cu" if (macros["HEADS"], macros["D"]) in ((12, 128), (12, 256)):
            return sm7x_kernel(Sm7xTile(10, macros["D"], capability), macros["HEADS"], bool(macros["FP8"])).source
        case "score.cu":
            return ScoreVariant(**{macro.lower(): value for macro, value in macros.items()}).source  # type: ignore[arg-type]
        case "products.cu":
            return products_source(bool(macros["E4M3"]), bool(macros["ALIGNED"]))
        case "worklist.cu":
            return worklist_kernel(capability, 1, 1).source
        case "everything.cu":
            return everything._kernel(capability).source
        case "merge.cu":
            return merge_kernel(capability, macros["D"]).source
    return None


def found_again(source: Source, capability: tuple[int, int]) -> list[dict[str, Any]]:
    """What `benchmarks/kernels_sm7x.py` would record of a source now."""
    try:
        found: list[dict[str, Any]] = script.record(source, capability)
    except (NvrtcNotFoundError, sass.NoDisassemblerError) as error:
        pytest.skip(str(error))
    return found


def expected_products(kernel: dict[str, Any]) -> int:
    """Products of 1,024 numbers in a turn of the main loop: lines x tokens or blocks x dimensions."""
    macros = {macro: int(value) for macro, _, value in (word.partition("=") for word in kernel["variant"].split())}
    if kernel["source"] == "attend.cu":
        return 2 * 16 * 32 * macros["D"] // 1024
    lines = -(-macros["ROWS"] * macros["HEADS"] // 16) * 16
    return lines * 16 * macros["STRIPS"] * macros["DIM"] // 1024


WITH_PRODUCTS = [kernel for kernel in RECORDED["kernels"] if kernel["main_loop"] is not None]
SOURCES = {
    f"{kernel['arch']} {source.name} {' '.join(source.options)}": (source, kernel["arch"])
    for kernel in RECORDED["kernels"]
    if (source := source_of(kernel)) is not None
}


@pytest.mark.parametrize("name", SOURCES)
def test_the_code_is_what_was_recorded(name: str) -> None:
    """Where the compiler is another version its numbers may differ, but products stay where they are."""
    source, arch = SOURCES[name]
    capability = capability_of(arch)
    found = found_again(source, capability)
    for kernel in found:
        hold(kernel)
    library, _ = nvrtc_for(capability)
    if RECORDED["nvrtc"][arch] == f"{library.version[0]}.{library.version[1]}":
        variant = found[0]["variant"]
        recorded = [
            k for k in RECORDED["kernels"] if (k["arch"], k["source"], k["variant"]) == (arch, source.name, variant)
        ]
        ordered = sorted(found, key=lambda kernel: str(kernel["kernel"]))
        assert ordered == recorded, f"kernels changed: {script.COMMAND} --write"


def hold(kernel: dict[str, Any]) -> None:
    """What holds of every kernel; the top-k, for one, has no products and may spill."""
    assert kernel["shared_bytes"] <= LIMITS[kernel["arch"]], kernel
    if kernel["source"] != "topk.cu":
        assert (kernel["spilled_bytes"], kernel["local_memory"]) == (0, 0), kernel
    loop = kernel["main_loop"]
    if loop is not None:
        product, steps = PRODUCTS[kernel["arch"]]
        assert (loop["product"], loop["HMMA"]) == (product, steps * expected_products(kernel)), kernel
        assert (loop["products_outside"], loop["local_memory"]) == (0, 0), kernel
        assert (loop["LDSM"] > 0) == (kernel["arch"] == "sm_75" and kernel["source"] == "attend.cu")


@pytest.mark.parametrize("arch", LIMITS)
def test_every_recorded_kernel_holds(arch: str) -> None:
    kernels = [kernel for kernel in RECORDED["kernels"] if kernel["arch"] == arch]
    assert {kernel["source"] for kernel in kernels if kernel["main_loop"]} == {"attend.cu", "score.cu"}
    assert len(kernels) > 30
    for kernel in kernels:
        hold(kernel)
        assert 0 < kernel["registers"] <= 255


def test_the_page_has_the_tables_of_the_results() -> None:
    page = script.PAGE.read_text("utf-8")
    assert script.page_with_tables(page, RECORDED) == page, "run python benchmarks/kernels_sm7x.py --write"
    with pytest.raises(ValueError, match="no markers for kernels"):
        script.page_with_tables("", RECORDED)


def test_the_estimate_lays_programs_as_a_plan_cuts_them() -> None:
    """162 windows on 80 multiprocessors: two each, then 16 parts, an eighth each, of the last two."""
    bound, memory = script.attend_bound(RECORDED, script.V100, (12, 1), 1.0)
    tiles = 65  # 512 blocks and 3 open ones, 8 to a tile
    clocks = max(script.tile_clocks(script.attend_loop(RECORDED, VOLTA), script.V100).values())
    assert bound == pytest.approx((2 * tiles + 9) * clocks / 1.53e9 * 1e3)
    assert memory == pytest.approx((160 * tiles + 16 * 9) * (32 << 10) / 900e9 * 1e3)


# The disassembler itself.

LISTING = """
.text.first:
.L_x_0:
        /*0000*/                   HMMA.884.F32.F32.STEP0 R8, R26.reuse.COL, R16.COL, R8 ;
.L_x_1:
        /*0010*/                   HMMA.884.F32.F32.STEP1 R8, R26.reuse.COL, R16.COL, R8 ;
        /*0020*/              @!P0 LDL R2, [R1+0x4] ;
        /*0030*/               @P1 BRA `(.L_x_1) ;
        /*0040*/                   BRA `(.L_x_2) ;
        /*0050*/              @UP0 BRA.U `(.L_x_0) ;
.L_x_2:
        /*0060*/                   EXIT ;
"""


def test_loops_are_backward_jumps() -> None:
    ((name, text),) = sass._sections(LISTING)
    code = sass._instructions(text)
    assert name == "first"
    assert [one.opcode for one in code][2:] == ["LDL", "BRA", "BRA", "BRA.U", "EXIT"]
    assert [one.target for one in code] == [None, None, None, 0x10, 0x60, 0x0, None]
    assert [(loop.start, loop.stop, len(loop.code)) for loop in sass.loops(code)] == [(0x10, 0x30, 3), (0, 0x50, 6)]
    main = sass.main_loop(code)
    assert (main.start, main.count("HMMA"), main.count("HMMA.884"), main.count("HMMA.16")) == (0, 2, 2, 0)
    assert main.count(*sass.LOCAL_MEMORY) == 1
    assert sass.kinds(code) == {"BRA": 3, "HMMA": 2, "LDL": 1, "EXIT": 1}
    with pytest.raises(ValueError, match="no loop has a tensor-core instruction"):
        sass.main_loop((Instruction(0, "HMMA.884"), Instruction(16, "BRA", 16), Instruction(32, "BRA", 16)))


def test_only_sm_70_is_relabelled() -> None:
    def labelled(arch: int) -> bytes:
        return bytes(sass.FLAGS_AT) + struct.pack("<I", 0x0500 | arch << 16 | arch) + b"code"

    assert sass._for_newer_tools(labelled(70)) == labelled(75)
    assert sass._for_newer_tools(labelled(75)) == labelled(75)
    assert sass._for_newer_tools(labelled(90)) == labelled(90)


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64" or find_spec("hypothesis") is None,
    reason="the dev extra, where it is installed, brings a disassembler on x86-64 Linux only",
)
@pytest.mark.parametrize("capability", [VOLTA, TURING, HOPPER], ids=["sm_70", "sm_75", "sm_90"])
def test_local_memory_in_a_loop_is_seen(capability: tuple[int, int]) -> None:
    """An array that is indexed at run time lies in local memory; this one's loop has no products."""
    text = """
extern "C" __global__ void sort(int* x, int n) {
    int kept[64];
    for (int i = 0; i < n; ++i) kept[x[i] & 63] = i + kept[x[i + 1] & 63];
    x[threadIdx.x] = kept[threadIdx.x & 63];
}"""
    (code,) = sass.disassemble(compile_source(Source("sort.cu", text=text), capability).cubin).values()
    assert any(loop.count("LDL") and loop.count("STL") for loop in sass.loops(code))
    with pytest.raises(ValueError, match="no loop"):
        sass.main_loop(code)
    with pytest.raises(sass.DisassemblyError):
        sass.disassemble(b"\0" * 256)
