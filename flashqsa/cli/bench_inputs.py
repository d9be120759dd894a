"""Tensors of a `BenchCase`, made on the device: contents of unit variance, pages in random order, NaN in between."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from flashqsa.cli.bench_cases import BenchCase
from flashqsa.testing.inputs import INDEX_SCALE, K_SCALE, SPARE_PAGES, V_SCALE
from flashqsa.testing.selections import select_locally
from flashqsa.values import FP8, IndexCache, KvCache, Rows, Selection

PART_ELEMENTS = 1 << 26
"""Numbers of an FP8 pool that are made at a time, in FP16."""

WALKS = {"near": 0.9975, "mid": 0.955, "far": 0.92, "equal": 1.0}
"""Correlation of a row's index queries with the row's before. It gives neighbours' Jaccard of 0.90 at 24k tokens, 0.73
at 7.5k and 0.50 at 38k, as measured on the real model; at other lengths less or more, so what occurred is reported."""


@dataclass(frozen=True)
class Workload:
    """The tensors of one case; None for what its kind does not read.

    index_q   [rows, index_heads, index_dim]
    q, gate   [rows, q_heads, head_dim]
    selection given, for the attention of a case that does not take it from the scores
    """

    case: BenchCase
    rows: Rows
    index_q: Tensor | None
    index_cache: IndexCache | None
    q: Tensor | None
    kv_cache: KvCache | None
    gate: Tensor | None
    selection: Selection | None


@dataclass
class Selections:
    """Selections made so far: cases that differ in heads or dtype share them."""

    made: dict[tuple[object, ...], Selection] = field(default_factory=dict)

    def of(self, case: BenchCase, rows: Rows, seed: int) -> Selection:
        """The selection of a case, made once."""
        key = (case.requests, case.rows_per_request, case.context, case.regime, case.spec.top_blocks, seed)
        if key not in self.made:
            self.made[key] = select_locally(rows, case.spec, case.regime, seed)
        return self.made[key]


def build_workload(case: BenchCase, device: torch.device, seed: int, selections: Selections) -> Workload:
    """The tensors of a case; the same for the same device, torch and seed."""
    generator = torch.Generator(device).manual_seed(seed)
    lengths = [case.rows_per_request] * case.requests, [case.context] * case.requests
    rows, spec = Rows.from_lengths(*lengths, device=device), case.spec
    index_q = index_cache = q = kv_cache = gate = selection = None
    if "selection" in case.measures:
        index_q = _walked_queries(case, seed).to(device, case.q_dtype)
        index_cache = _index_cache(case, device, generator)
    if "attention" in case.measures:
        heads = (case.rows, spec.q_heads, spec.head_dim)
        q = torch.randn(heads, dtype=case.q_dtype, device=device, generator=generator)
        if case.gate:
            gate = torch.randn(heads, dtype=case.q_dtype, device=device, generator=generator)
        kv_cache = _kv_cache(case, device, generator)
    if case.kind in ("attention", "decode"):
        selection = selections.of(case, rows, seed)
    return Workload(case, rows, index_q, index_cache, q, kv_cache, gate, selection)


def free_bytes(device: torch.device) -> int | None:
    """Memory that a case may take now; None where the system does not say."""
    if device.type == "cuda":
        # What torch keeps for itself without using it is free to us too.
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)


def _walked_queries(case: BenchCase, seed: int) -> Tensor:
    """Index queries [rows, index_heads, index_dim] FP32 on the CPU: each request's walk at random, of unit variance."""
    generator = torch.Generator().manual_seed(seed)
    spec, kept = case.spec, WALKS[case.regime]
    fresh = torch.randn((case.rows_per_request, case.requests, spec.index_heads, spec.index_dim), generator=generator)
    for row in range(1, case.rows_per_request):
        fresh[row].mul_((1.0 - kept * kept) ** 0.5).add_(fresh[row - 1], alpha=kept)
    return fresh.transpose(0, 1).reshape(case.rows, spec.index_heads, spec.index_dim)


def _placed(
    requests: int, entries: int, per_page: int, device: torch.device, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """A page table [requests, table_pages] int32 in random order, and the ids of the pages that no request uses."""
    width = max(-(-entries // per_page), 1)
    order = torch.randperm(requests * width + SPARE_PAGES, device=device, generator=generator)
    table = order[: requests * width].view(requests, width).to(torch.int32)
    return table, order[requests * width :]


def _filled(shape: tuple[int, ...], case: BenchCase, scales: tuple[float, ...], generator: torch.Generator) -> Tensor:
    """A pool [pages, ...] of normal numbers, in FP8 divided by a scale for each entry of axis 1 (one: for all)."""
    device = generator.device
    if case.dtype != FP8:
        return torch.empty(shape, dtype=case.dtype, device=device).normal_(generator=generator)
    pool = torch.empty(shape, dtype=FP8, device=device)
    divisor = torch.tensor(scales, dtype=torch.float16, device=device).view(-1, *(1,) * (len(shape) - 2))
    step = max(PART_ELEMENTS // max(pool[0].numel(), 1), 1)
    for start in range(0, shape[0], step):
        part = pool[start : start + step]
        numbers = torch.randn(part.shape, dtype=torch.float16, device=device, generator=generator)
        part.copy_((numbers / divisor).clamp(-448.0, 448.0))
    return pool


def _forget(pool: Tensor, table: Tensor, spare: Tensor, entries: int, per_page: int, axis: int) -> None:
    """NaN wherever no entry of a request lies: spare pages, and the ends of last pages."""
    memory = pool.view(torch.uint8) if pool.dtype == FP8 else pool
    nothing = 0x7F if pool.dtype == FP8 else float("nan")
    memory[spare] = nothing
    left = entries - (table.shape[1] - 1) * per_page
    memory.movedim(axis, 1)[table[:, -1].long(), left:] = nothing


def _kv_cache(case: BenchCase, device: torch.device, generator: torch.Generator) -> KvCache:
    """Keys and values interleaved: [pages, 2, page_tokens, kv_heads, head_dim]."""
    table, spare = _placed(case.requests, case.context, case.page_tokens, device, generator)
    pages = table.numel() + SPARE_PAGES
    shape = (pages, 2, case.page_tokens, case.spec.kv_heads, case.spec.head_dim)
    pool = _filled(shape, case, (K_SCALE, V_SCALE), generator)
    _forget(pool, table, spare, case.context, case.page_tokens, axis=2)
    scales = (K_SCALE, V_SCALE) if case.dtype == FP8 else (None, None)
    return KvCache.interleaved(pool, table, *scales)


def _index_cache(case: BenchCase, device: torch.device, generator: torch.Generator) -> IndexCache:
    blocks, per_page = case.context // case.spec.block_tokens, case.page_tokens // case.spec.block_tokens
    table, spare = _placed(case.requests, blocks, per_page, device, generator)
    shape = (table.numel() + SPARE_PAGES, per_page, case.spec.index_dim)
    pool = _filled(shape, case, (INDEX_SCALE,), generator)
    _forget(pool, table, spare, blocks, per_page, axis=1)
    return IndexCache(pool, table, INDEX_SCALE if case.dtype == FP8 else None)
