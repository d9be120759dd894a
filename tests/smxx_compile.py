"""Compiles the Triton score kernel for GPUs that are not here, as `score` would launch it, and prints what came out.

Runs as a process of its own (`python -m tests.smxx_compile sm_90 ...`, or without names for all), since an interpreted
kernel cannot be compiled and the interpreter is chosen when kernels are defined. Prints one JSON object: architecture
and rows of the tile to the bytes of shared memory and the kinds of matrix products in the PTX.
"""

from __future__ import annotations

import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from flashqsa.config import ScoreConfig, score_config
from flashqsa.device import DeviceFacts
from flashqsa.kernels.smxx.score import score_kernel
from flashqsa.values import QsaSpec

GPUS = {"sm_80": "a100", "sm_86": "rtx3090", "sm_89": "rtx4090", "sm_90": "h200", "sm_100": "b200", "sm_120": "rtx5090"}
PRODUCTS = ("wgmma.mma_async", "mma.sync", "tcgen05.mma")
POINTERS = {"index_q": "*bf16", "page_table": "*i32", "request": "*i32", "position": "*i32", "visible": "*i32"}
DIVISIBLE = {
    "index_q",
    "keys",
    "q_row_stride",
    "q_head_stride",
    "page_stride",
    "place_stride",
    "values",
    "values_stride",
}


def compile_for(arch: str, config: ScoreConfig, spec: QsaSpec, keys: str) -> triton.compiler.CompiledKernel:
    """The kernel for queries in BF16 and keys of a Triton type, 4 blocks per page."""
    constants = {
        "BLOCK_TOKENS": spec.block_tokens,
        "TOP_BLOCKS": spec.top_blocks,
        "PAGE_BLOCKS": 4,
        "DIM": spec.index_dim,
        "ROWS": config.rows,
        "HEADS": spec.index_heads,
        "PADDED_HEADS": max(spec.index_heads, 16 // config.rows),
        "LOW_HEADS": 2 if 2 * config.rows == 16 * config.warps else 1,
        "COLUMNS": config.columns,
        "STAGES": config.stages,
        "SEGMENT": 16,
        "MAXIMA": True,
        "DECODE_FP8": keys == "*u8",
    }
    types = {**POINTERS, "keys": keys, "values": "*fp32", "maxima": "*fp32", "scale": "fp32"}
    names = score_kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in DIVISIBLE | {"slice_blocks"}}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=score_kernel, signature=signature, constexprs=values, attrs=attributes)
    target = GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    return triton.compile(source, target=target, options={"num_warps": config.warps, "num_stages": config.stages})


CALLS = {
    "sm_80": ((256, 64, "*fp8e4nv"),),
    "sm_90": ((1616, 1, "*bf16"),),
    "sm_120": ((64, 64, "*bf16"),),
}
"""Rows, requests and Triton's type of keys: what the tests compile for an architecture; others take all of them."""


def main() -> None:
    spec, found = QsaSpec(), {}
    for arch in sys.argv[1:] or GPUS:
        facts = DeviceFacts.named(GPUS[arch])
        for rows, requests, keys in CALLS.get(arch, [call for calls in CALLS.values() for call in calls]):
            config = score_config(spec, rows, requests, 131_071, 2, facts)
            compiled = compile_for(arch, config, spec, "*u8" if config.decode_fp8 and "fp8" in keys else keys)
            found[f"{arch} {config.rows}"] = {
                "shared": compiled.metadata.shared,
                "products": [kind for kind in PRODUCTS if kind in compiled.asm["ptx"]],
                "cubin": len(compiled.asm["cubin"]),
            }
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
