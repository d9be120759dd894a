"""Compiles the Triton attention kernel for GPUs that are not here, as `attend_triton` would launch it.

Runs as a process of its own (`python -m tests.smxx_attend_compile sm_90 ...`, or without names for all), since an
interpreted kernel cannot be compiled and the interpreter is chosen when kernels are defined. Writes one JSON object:
architecture, lines of the tile and type of the cache to the bytes of shared memory and of the stack, registers, and the
kinds of products.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from flashqsa.attend_shape import TritonTile, attend_shape
from flashqsa.device import DeviceFacts
from flashqsa.kernels.smxx.attend import attend_kernel
from flashqsa.values import QsaSpec

GPUS = {"sm_80": "a100", "sm_86": "rtx3090", "sm_89": "rtx4090", "sm_90": "h200", "sm_100": "b200", "sm_120": "rtx5090"}
PRODUCTS = ("wgmma.mma_async", "mma.sync", "tcgen05.mma")
POINTERS = {
    **dict.fromkeys(("places", "token_masks", "entries", "done"), "*i32"),
    **dict.fromkeys(("lse_out", "part_out", "part_lse"), "*fp32"),
}
CALLS = {
    "sm_80": ((1616, 1, 1),),
    "sm_90": ((1616, 1, 2), (64, 64, 2), (1616, 1, 4)),
    "sm_120": ((1616, 1, 2),),
}
"""Rows, requests and bytes of the cache's numbers: what the tests compile for an architecture; others take sm_90's."""

UNSPECIALISED = {"rows", "whole", "parts", "capacity", "first_part_row", "part_rows", "scale", "v_scale"}


NAMES = {1: "fp8", 2: "bf16", 4: "fp32"}


def compile_for(arch: str, tile: TritonTile, spec: QsaSpec, cache_bytes: int, cut: bool) -> CompiledKernel:
    """The kernel for BF16 queries (FP32 with an FP32 cache), a gate, and keys and values with the same strides."""
    fp8 = cache_bytes == 1
    constants: dict[str, object] = {
        "KV_HEADS": spec.kv_heads,
        "HEADS": spec.heads_per_kv_head,
        "D": spec.head_dim,
        "GROUP_ROWS": tile.group_rows,
        "BLOCK_TOKENS": spec.block_tokens,
        "M": tile.lines,
        "N": tile.tokens,
        "STAGES": tile.stages,
        "SAME_PLACES": True,
        "FP8_CACHE": fp8,
        "WORDS": fp8,
        "NATIVE_FP8": tile.native_fp8,
        "NORMALISE_Q": fp8,
        "HEAD_SCALES": False,
        "HAS_GATE": True,
        "HAS_LSE": True,
        "CUT": cut,
        "MERGE": cut,
        "k_scale": None,
        "value_places": None,
    }
    queries = "*fp32" if cache_bytes == 4 else "*bf16"
    cache = "*i32" if fp8 else queries
    types = {**POINTERS, **dict.fromkeys(("q", "gate", "out"), queries), **dict.fromkeys(("keys", "values"), cache)}
    types.update(scale="fp32", v_scale="fp32")
    names = attend_kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    divisible = [name for name in names if name not in constants and name not in UNSPECIALISED]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in divisible}
    source = ASTSource(
        fn=attend_kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs=attributes,
    )
    target = GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    return triton.compile(source, target=target, options={"num_warps": tile.warps, "num_stages": tile.stages})


def resources(compiled: CompiledKernel) -> dict[str, int]:
    """Registers of a thread and bytes of its stack, from the cubin."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run([str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    return {"registers": int(found[1]), "stack": int(found[2])}


def main() -> None:
    found = {}
    for arch in sys.argv[1:] or GPUS:
        facts = DeviceFacts.named(GPUS[arch])
        for rows, requests, cache_bytes in CALLS.get(arch, CALLS["sm_90"]):
            shape = attend_shape(QsaSpec(), rows, requests, 37_999, facts, cache_bytes=cache_bytes)
            assert isinstance(shape.tile, TritonTile)
            compiled = compile_for(arch, shape.tile, QsaSpec(), cache_bytes, cut=False)
            found[f"{arch} {shape.tile.lines} {NAMES[cache_bytes]}"] = {
                "shared": compiled.metadata.shared,
                "products": [kind for kind in PRODUCTS if kind in compiled.asm["ptx"]],
                **resources(compiled),
            }
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
