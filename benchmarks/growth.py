"""What it costs a cache to grow: pools that get longer where they lie, beside pools that are copied.

    python benchmarks/growth.py --machine h200 [--tokens 250000] [--chunk 8192] [--layers 12]

Reserves room in the caches of all sparse layers of the released model, chunk by chunk and layer by layer as a prefill
does, and writes to every new page. Results go to benchmarks/results/growth-NAME.json: seconds (the device is waited for
after each chunk), the most memory that the caches took from the device, and what they hold at the end.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from flashqsa import growing
from flashqsa.cli.bench_report import machine
from flashqsa.integrations.transformers.store import NewTokens, PagedStore
from flashqsa.values import QsaSpec

HERE = Path(__file__).parent
SPEC = QsaSpec()
"""The released model's layer."""


def no_tokens(device: torch.device) -> NewTokens:
    """What tells a store its shapes."""

    def nothing(*shape: int) -> torch.Tensor:
        return torch.empty((1, 0, *shape), dtype=torch.bfloat16, device=device)

    heads = nothing(SPEC.kv_heads, SPEC.head_dim)
    return NewTokens(heads, heads, nothing(SPEC.index_dim), nothing(SPEC.index_dim), nothing(SPEC.index_dim))


def free_bytes(device: torch.device) -> int:
    """What the device has left, for anybody."""
    return int(torch.cuda.mem_get_info(device)[0])


def grow(device: torch.device, layers: int, tokens: int, chunk: int) -> dict[str, Any]:
    """Grows the caches to so many tokens."""
    torch.cuda.empty_cache()
    free = least = free_bytes(device)
    first = no_tokens(device)
    stores = [PagedStore(first, SPEC, chunk) for _ in range(layers)]
    seconds, slowest = 0.0, 0.0
    for held in range(chunk, tokens, chunk):
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        for store in stores:
            pages = store.kv.shape[0]
            store.reserve(held + chunk, held)
            store.kv[pages:].zero_()
            store.index_keys[pages:].zero_()
        torch.cuda.synchronize(device)
        taken = time.perf_counter() - started
        seconds, slowest = seconds + taken, max(slowest, taken)
        least = min(least, free_bytes(device))
    return {
        "seconds": seconds,
        "slowest_chunk_s": slowest,
        "most_taken_bytes": free - least,
        "held_bytes": sum(store.nbytes for store in stores),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", required=True, help="names the machine in the results")
    parser.add_argument("--tokens", type=int, default=250_000)
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--results", type=Path, default=HERE / "results", help="where the results go")
    wanted = parser.parse_args()
    device = torch.device("cuda", 0)
    if not growing.can_grow(device):
        parser.error("this GPU or its driver cannot keep addresses and memory apart (see the log)")
    asked = (device, wanted.layers, wanted.tokens, wanted.chunk)
    grow(device, wanted.layers, 4 * wanted.chunk, wanted.chunk)  # loads what torch loads at first use
    found = {"where they lie": grow(*asked)}
    with mock.patch.object(growing, "can_grow", return_value=False):
        found["copied"] = grow(*asked)
    names = ("tokens", "chunk", "layers")
    results = {name: getattr(wanted, name) for name in names} | {"pools": found, "machine": machine(device)}
    results["machine"]["command"] = f"python benchmarks/growth.py --machine {wanted.machine}"
    wanted.results.mkdir(exist_ok=True, parents=True)
    (wanted.results / f"growth-{wanted.machine}.json").write_text(json.dumps(results, indent=1) + "\n")
    sys.stdout.write(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
