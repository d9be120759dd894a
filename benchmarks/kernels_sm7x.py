"""What the compiler made of the kernels that Volta and Turing run: registers, spills, shared memory, main loops.

    python benchmarks/kernels_sm7x.py --json benchmarks/results/kernels-sm7x.json   # compiles them all and counts
    python benchmarks/kernels_sm7x.py --write   # puts tables of that file into docs/kernels/attend_sm7x.md

No GPU is needed: an NVRTC 12 (for sm_70), one of any version for sm_75, and the disassembler of Triton's wheel. Kernels
are those that `flashqsa build --arch "7.0;7.5"` compiles, and attention of heads of 64 and 128. The tables of times are
estimates from these counts and from data sheets: no Volta or Turing GPU was at hand.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashqsa import DeviceFacts, QsaSpec
from flashqsa.attend_shape import Sm7xTile, attend_shape, ranked_entries, worklist_bytes
from flashqsa.cli.build import read_log, sources_for
from flashqsa.config import sm7x_query_bytes
from flashqsa.kernels.nvrtc import Source, compile_source, nvrtc_for
from flashqsa.kernels.sm7x.attend import sm7x_kernel
from flashqsa.kernels.sm7x.merge import merge_kernel
from flashqsa.testing import sass

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "kernels-sm7x.json"
PAGE = HERE.parent / "docs" / "kernels" / "attend_sm7x.md"
COMMAND = "python benchmarks/kernels_sm7x.py --json benchmarks/results/kernels-sm7x.json"

CAPABILITIES = ((7, 0), (7, 5))
LOOP_COUNTS = ("HMMA", "LDS", "LDSM", "STS", "LDG", "STG", "BAR")
"""Instructions that are counted in main loops, by their names."""


def record(source: Source, capability: tuple[int, int]) -> list[dict[str, Any]]:
    """Facts of each kernel of a source. Raises NvrtcNotFoundError, CompileError, and what `disassemble` raises."""
    compiled = compile_source(source, capability)
    code = sass.disassemble(compiled.cubin)
    found = []
    for kernel, registers, static_bytes, spilled in read_log(compiled.log):
        loop = main_loop_of(code[kernel])
        found.append(
            {
                "arch": f"sm_{capability[0]}{capability[1]}",
                "source": source.name,
                "kernel": kernel,
                "variant": " ".join(f"{macro}={value}" for macro, value in source.defines),
                "registers": registers,
                "shared_bytes": static_bytes + dynamic_bytes(source, capability, kernel),
                "spilled_bytes": spilled,
                "instructions": len(code[kernel]),
                "local_memory": sass.count(code[kernel], *sass.LOCAL_MEMORY),
                "main_loop": loop,
            }
        )
    return found


def main_loop_of(code: tuple[sass.Instruction, ...]) -> dict[str, Any] | None:
    """Instructions of a kernel's loop of tensor-core products; None for a kernel that has no products."""
    if sass.count(code, "HMMA") == 0:
        return None
    loop = sass.main_loop(code)
    product = next(one.opcode for one in loop.code if one.name == "HMMA")
    return {
        "instructions": len(loop.code),
        "product": ".".join(product.split(".")[:2]),
        "products_outside": sass.count(code, "HMMA") - loop.count("HMMA"),
        "local_memory": loop.count(*sass.LOCAL_MEMORY),
        **{name: loop.count(name) for name in LOOP_COUNTS},
    }


def dynamic_bytes(source: Source, capability: tuple[int, int], kernel: str) -> int:
    """Shared memory that a launch asks for; of worklists the most, for a million tokens."""
    macros = dict(source.defines)
    if source.name == "attend.cu":
        return Sm7xTile(1, macros["D"], capability).shared_bytes
    if source.name == "score.cu":
        return sm7x_query_bytes(QsaSpec(index_heads=macros["HEADS"], index_dim=macros["DIM"]), macros["ROWS"])
    if source.name == "worklist.cu":
        return worklist_bytes(262_144, ranked_entries(capability))
    return write_bytes() if kernel == "flashqsa_pool_blocks" else 0


def write_bytes() -> int:
    """Of pooling: see `nvrtc.write`."""
    spec = QsaSpec()
    return 4 * (8 * spec.block_tokens + 4 * spec.index_dim)


def measure() -> dict[str, Any]:
    """Every kernel on both architectures."""
    kernels: list[dict[str, Any]] = []
    compilers = {}
    for capability in CAPABILITIES:
        library, arch = nvrtc_for(capability)
        compilers[arch] = f"{library.version[0]}.{library.version[1]}"
        for source in sources_of(capability):
            sys.stderr.write(f"{arch} {source.name} {' '.join(source.options)}\n")
            kernels += record(source, capability)
    kernels.sort(key=lambda k: (k["arch"], k["source"], k["kernel"], natural(k["variant"])))
    return {"command": COMMAND, "nvrtc": compilers, "kernels": kernels}


def sources_of(capability: tuple[int, int]) -> list[Source]:
    """What the released shapes ask for, then the other head dims."""
    tiles = [Sm7xTile(10, head_dim, capability) for head_dim in (64, 128)]
    attention = (sm7x_kernel(tile, 12, fp8).source for tile in tiles for fp8 in (False, True))
    # What comes before attention has bounds of its own (tests/test_prepare.py): into FP8 it sets a few registers aside.
    shared = [source for source in sources_for(capability) if source.name != "prepare.cu"]
    return [*shared, *attention, *(merge_kernel(capability, tile.head_dim).source for tile in tiles)]


def natural(text: str) -> list[int]:
    """The numbers of a text, to sort by."""
    return [int(number) for number in re.findall(r"\d+", text)]


def kernels_table(found: dict[str, Any]) -> list[str]:
    """Every kernel in a line, both architectures side by side."""
    by_line: dict[tuple[str, str, str], dict[str, dict[str, Any]]] = {}
    for k in found["kernels"]:
        by_line.setdefault((k["source"], k["kernel"], shown_variant(k["variant"])), {})[k["arch"]] = k
    archs = list(found["nvrtc"])
    lines = [
        "| kernel | variant | " + " | ".join(f"{arch}: registers, shared, spilled bytes" for arch in archs) + " |",
        "|---|---|" + "---|" * len(archs),
    ]
    for (_, kernel, variant), sides in sorted(by_line.items(), key=lambda item: (*item[0][:2], natural(item[0][2]))):
        cells = [
            f"{k['registers']}, {k['shared_bytes']:,}, {k['spilled_bytes']}" if (k := sides.get(arch)) else ""
            for arch in archs
        ]
        lines.append(f"| `{kernel}` | {variant} | {' | '.join(cells)} |")
    return lines


def shown_variant(variant: str) -> str:
    """A variant's macros without those that follow from the architecture."""
    hidden = ("TURING", "QUAD_PAIRS", "KEPT", "ALIGNED", "WARPS", "RESIDENT")
    kept = (word.split("=") for word in variant.split() if word.split("=")[0] not in hidden)
    return ", ".join(f"{macro.lower()} {value}" for macro, value in kept)


@dataclass(frozen=True)
class Machine:
    """A GPU as its data sheet and the programming guide have it.

    name           in `KNOWN_DEVICES`
    title          for tables
    clock_ghz      boost clock that the peak rate is given for
    bandwidth_gbs  of memory, GB/s
    product_clocks  of a tensor core for one of its instructions, FP32 accumulators
    shared_width   bytes that shared memory moves a clock on a multiprocessor
    """

    name: str
    title: str
    clock_ghz: float
    bandwidth_gbs: float
    product_clocks: int
    shared_width: int


# Volta: 125 TFLOP/s at 1.53 GHz on 80 multiprocessors are 512 products and sums a clock on each, 128 for each of its
# four schedulers: 2 clocks for an HMMA.884 step of 256. Turing: 130.5 at 1.77 GHz on 72, 8 for an HMMA.1688 of 1,024.
# (NVIDIA, "Tesla V100 GPU Architecture" and "NVIDIA Turing GPU Architecture", 2017 and 2018.)
V100 = Machine("v100", "V100", 1.53, 900, 2, 128)
RTX_8000 = Machine("rtx8000", "Quadro RTX 8000", 1.77, 672, 8, 64)

SCHEDULERS = 4
ATTEND_WARPS = 8
ATTEND_ROWS = 1616
UNIONS = {"near": 1.39, "mid": 1.97, "far": 2.75}
"""Blocks of a window of 10 rows, as multiples of one row's selection, by how much neighbours share."""

PUBLISHED = {
    ("v100", (24, 2)): (14.06, 18.66),
    ("v100", (12, 1)): (7.10, 9.38),
    ("rtx8000", (24, 2)): (12.26, 16.37),
    ("rtx8000", (12, 1)): (6.20, 8.25),
}
"""Milliseconds that were published of native grouped kernels for such a chunk, over the real model's selections."""

SLACK = 1.5
"""What an estimate is of its bound: barriers, softmax and latency, with two warps to a scheduler. A guess."""


def shared_clocks(loop: dict[str, Any], machine: Machine) -> int:
    """Clocks of shared memory for one turn of a warp: 512 bytes for each load or store of 16 bytes a lane."""
    return (loop["LDS"] + loop["LDSM"] + loop["STS"]) * 512 // machine.shared_width


def tile_clocks(loop: dict[str, Any], machine: Machine) -> dict[str, int]:
    """Clocks that a tile of a full program takes of each part of a multiprocessor."""
    warps = ATTEND_WARPS // SCHEDULERS
    return {
        "shared memory": ATTEND_WARPS * shared_clocks(loop, machine),
        "tensor cores": warps * loop["HMMA"] * machine.product_clocks,
        "issue slots": warps * loop["instructions"],
    }


def attend_loop(found: dict[str, Any], capability: tuple[int, int], fp8: bool = False) -> dict[str, Any]:
    """The main loop of 12 heads of 256."""
    arch = f"sm_{capability[0]}{capability[1]}"
    wanted = f"D=256 HEADS=12 FP8={int(fp8)}"
    return next(
        k["main_loop"]
        for k in found["kernels"]
        if (k["arch"], k["source"]) == (arch, "attend.cu") and wanted in k["variant"]
    )


def attend_bound(found: dict[str, Any], machine: Machine, heads: tuple[int, int], union: float) -> tuple[float, float]:
    """Milliseconds of the busiest part of a multiprocessor, and of memory if no tile were found in L2.

    Programs are laid on multiprocessors in the order they are launched in, as a plan cuts them.
    """
    facts, spec = DeviceFacts.named(machine.name), QsaSpec(*heads)
    assert facts.capability is not None
    shape = attend_shape(spec, ATTEND_ROWS, 1, 37_999, facts, sm7x=True)
    split = shape.split(ATTEND_ROWS, spec)
    blocks = math.ceil(union * spec.top_blocks) + 3
    tiles = math.ceil(blocks / (shape.tile.tokens // spec.block_tokens))
    programs = [tiles] * split.whole + [math.ceil(tiles / split.parts)] * (split.programs - split.whole)
    busy = [0] * facts.multiprocessors
    for program in programs:
        heapq.heappush(busy, heapq.heappop(busy) + program)
    clocks = max(tile_clocks(attend_loop(found, facts.capability), machine).values())
    tile_bytes = 2 * shape.tile.tokens * spec.head_dim * 2
    memory_ms = sum(programs) * tile_bytes / machine.bandwidth_gbs * 1e-6
    return max(busy) * clocks / machine.clock_ghz * 1e-6, memory_ms


def clocks_table(found: dict[str, Any]) -> list[str]:
    """Counts of the loop over tiles, and the clocks that they take."""
    loops = [attend_loop(found, capability) for capability in CAPABILITIES]
    clocks = [tile_clocks(loop, machine) for loop, machine in zip(loops, (V100, RTX_8000), strict=True)]
    rows = [
        ("instructions of a warp", [f"{loop['instructions']:,}" for loop in loops]),
        ("of them on tensor cores", [f"{loop['HMMA']:,} {loop['product']}" for loop in loops]),
        ("loads from shared memory", [f"{loop['LDS'] + loop['LDSM']}" for loop in loops]),
        ("stores to it / loads from memory", [f"{loop['STS']} / {loop['LDG']}" for loop in loops]),
        ("with an FP8 cache, instructions", [f"{attend_loop(found, c, True)['instructions']:,}" for c in CAPABILITIES]),
    ]
    for part in clocks[0]:
        rows.append((f"clocks of {part}, 8 warps", [f"{found_clocks[part]:,}" for found_clocks in clocks]))
    lines = ["| a tile of 32 tokens, 128 lines | sm_70 | sm_75 |", "|---|---|---|"]
    return [*lines, *(f"| {what} | {' | '.join(cells)} |" for what, cells in rows)]


def attend_table(found: dict[str, Any]) -> list[str]:
    """Estimates of a chunk of rows on each GPU, beside what was published."""
    regimes = list(UNIONS)
    lines = [
        f"| ms | {' | '.join(f'{regime}: bound, estimate (memory)' for regime in regimes)} | published |",
        "|---|" + "---|" * (len(regimes) + 1),
    ]
    for machine in (V100, RTX_8000):
        for heads in ((24, 2), (12, 1)):
            cells = []
            for regime in regimes:
                bound, memory = attend_bound(found, machine, heads, UNIONS[regime])
                cells.append(f"{bound:.2f}, {SLACK * bound:.1f} ({memory:.2f})")
            low, high = PUBLISHED[machine.name, heads]
            name = f"{machine.title}, {heads[0]}/{heads[1]}"
            lines.append(f"| {name} | {' | '.join(cells)} | {low:.2f} to {high:.2f} |")
    return lines


SCORE_ROWS = 16
SCORE_BLOCKS = 32
"""Of a turn of the paged scorer's loop, in its tile of most rows."""

SCORE_WARPS = 8
"""Of two programs, which is what a multiprocessor holds of that tile."""

SCORE_CONTEXTS = (29_000, 184_000)
SCORE_PUBLISHED = {29_000: "2.28", 184_000: "10.86"}
"""Milliseconds, on an RTX 8000, of another implementation's cuBLAS scorer with an exact top-k."""


def paged_bound(found: dict[str, Any], machine: Machine, context: int) -> tuple[float, float]:
    """Milliseconds of multiprocessors, and of memory, of the paged scorer for the last 1,616 rows of a context.

    Keys are read from memory once: windows that run together go through the same slice of them.
    """
    facts, spec = DeviceFacts.named(machine.name), QsaSpec()
    arch = facts.arch
    loop = next(
        k["main_loop"]
        for k in found["kernels"]
        if (k["arch"], k["source"]) == (arch, "score.cu")
        and {f"ROWS={SCORE_ROWS}", "E4M3=0"} <= set(k["variant"].split())
    )
    firsts = range(context - ATTEND_ROWS, context, SCORE_ROWS)
    turns = sum(math.ceil(spec.visible_blocks(first + SCORE_ROWS - 1) / SCORE_BLOCKS) for first in firsts)
    warps = SCORE_WARPS // SCHEDULERS
    busiest = max(
        warps * loop["HMMA"] * machine.product_clocks,
        warps * loop["instructions"],
        SCORE_WARPS * shared_clocks(loop, machine),
    )
    multiprocessor_ms = turns / SCORE_WARPS / facts.multiprocessors * busiest / machine.clock_ghz * 1e-6
    scores, keys = 4 * turns * SCORE_ROWS * SCORE_BLOCKS, 2 * spec.index_dim * context // spec.block_tokens
    return multiprocessor_ms, (scores + keys) / machine.bandwidth_gbs * 1e-6


def cublas_bound(machine: Machine, context: int) -> float:
    """Milliseconds of memory, or of tensor cores where they take longer, of the products and of their sums.

    A score per head is written in FP32 and read again; the sums are written. Gathering keys is left out.
    """
    facts, spec = DeviceFacts.named(machine.name), QsaSpec()
    pairs = ATTEND_ROWS * (context // spec.block_tokens)
    products_ms = 4 * spec.index_heads * pairs / machine.bandwidth_gbs * 1e-6
    clocks = {2: 256 / 2, 8: 1024 / 8}[machine.product_clocks]  # products and sums a clock of a scheduler
    peak = facts.multiprocessors * SCHEDULERS * clocks * machine.clock_ghz * 1e9
    flops_ms = pairs * spec.index_heads * spec.index_dim / peak * 1e3
    sums_ms = (4 * spec.index_heads + 4) * pairs / machine.bandwidth_gbs * 1e-6
    return max(products_ms, flops_ms) + sums_ms


def score_table(found: dict[str, Any]) -> list[str]:
    """Estimates of either scorer."""
    lines = [
        "| ms, 1,616 rows | tokens | paged: multiprocessors, memory | cuBLAS | paged is as slow at | published |",
        "|---|---|---|---|---|---|",
    ]
    for machine in (V100, RTX_8000):
        for context in SCORE_CONTEXTS:
            compute, memory = paged_bound(found, machine, context)
            other = cublas_bound(machine, context)
            share = f"{100 * compute / other:.0f} % of its rate"
            published = SCORE_PUBLISHED[context] if machine is RTX_8000 else ""
            cells = (machine.title, f"{context:,}", f"{compute:.2f}, {memory:.2f}", f"{other:.2f}", share, published)
            lines.append(f"| {' | '.join(cells)} |")
    return lines


SECTIONS = {
    "kernels": kernels_table,
    "clocks": clocks_table,
    "attention": attend_table,
    "scores": score_table,
}


def page_with_tables(page: str, found: dict[str, Any]) -> str:
    """The page with every table between its markers. Raises ValueError where a marker is missing."""
    for name, table in SECTIONS.items():
        begin, end = (f"<!-- {word}: benchmarks/kernels_sm7x.py {name} -->" for word in ("begin", "end"))
        head, found_begin, rest = page.partition(begin)
        _, found_end, tail = rest.partition(end)
        if not found_begin or not found_end:
            raise ValueError(f"no markers for {name}")
        page = "\n".join([head + begin, "", *table(found), "", end + tail])
    return page


def main() -> None:
    """Reads the arguments and does as they say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="compile, count, and write what was found here")
    parser.add_argument("--write", action="store_true", help=f"put the tables of {RESULTS.name} into {PAGE.name}")
    arguments = parser.parse_args()
    if arguments.json:
        arguments.json.write_text(json.dumps(measure(), indent=1) + "\n", "utf-8")
    found = json.loads((arguments.json or RESULTS).read_text("utf-8"))
    if arguments.write:
        PAGE.write_text(page_with_tables(PAGE.read_text("utf-8"), found), "utf-8")
    else:
        sys.stdout.write("\n\n".join("\n".join(table(found)) for table in SECTIONS.values()) + "\n")


if __name__ == "__main__":
    main()
