"""Inputs of calls: honest ones built from a `Case`, and ways to disturb them that must change nothing.

Every pool is filled with NaN (FP8: byte 0x7F) wherever no token or block of a request was written, so that a kernel
which multiplies what it should not have read shows it. Nasty scores are in `nasty.py`, given selections in
`selections.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flashqsa.reference.paging import stored
from flashqsa.testing.cases import Case
from flashqsa.testing.selections import select_locally
from flashqsa.values import FP8, IndexCache, KvCache, QsaSpec, Rows, Selection

SPARE_PAGES = 2
"""Pages of each pool that no request uses."""

INDEX_SCALE, K_SCALE, V_SCALE = 0.5, 0.5, 2.0
"""Scales of FP8 caches. The index cache's is a power of two, so that exact scores stay exact."""

PATTERNS = ("nan", "zeros", "large", "infinity", "fp32-bytes")
"""What `filled` can fill memory with."""


@dataclass(frozen=True)
class Inputs:
    """The tensors of one call.

    index_q    [rows, index_heads, index_dim] in case.q_dtype
    q          [rows, q_heads, head_dim] in case.q_dtype
    gate       as q, or None
    selection  given, or None where it comes from the scores
    """

    case: Case
    index_q: Tensor
    q: Tensor
    gate: Tensor | None
    index_cache: IndexCache
    kv_cache: KvCache
    rows: Rows
    spec: QsaSpec
    selection: Selection | None


def build(case: Case, device: torch.device | str = "cpu") -> Inputs:
    """The inputs of a case; the same on every device, call and machine with the same torch."""
    generator = torch.Generator().manual_seed(case.seed)
    spec = case.spec
    rows = padded_rows(case, device)
    heads = (rows.count, spec.q_heads, spec.head_dim)
    index_q = _index_numbers((rows.count, spec.index_heads, spec.index_dim), case, generator)
    q = torch.randn(heads, generator=generator) * case.peak
    gate = torch.randn(heads, generator=generator) if case.gate else None
    selection = None if case.regime == "scored" else select_locally(rows, spec, case.regime, case.seed)
    return Inputs(
        case,
        index_q.to(device, case.q_dtype),
        q.to(device, case.q_dtype),
        None if gate is None else gate.to(device, case.q_dtype),
        _build_index_cache(case, generator, device),
        _build_kv_cache(case, generator, device),
        rows,
        spec,
        selection,
    )


def padded_rows(case: Case, device: torch.device | str = "cpu") -> Rows:
    """The rows of a case, with its padding; padding's position is negative or its request is, in turn."""
    plain = Rows.from_lengths(case.query_lengths, case.context_lengths)
    request: list[int] = []
    position: list[int] = []
    for row in range(plain.count + 1):
        for _ in range(case.padding.count(row)):
            # Either sign alone marks padding; -2 is where truncating and flooring division by 4 differ.
            by_request = len(request) % 2 == 0
            request.append(-1 if by_request or not case.query_lengths else 0)
            position.append(-1 if by_request else -2)
        if row < plain.count:
            request.append(int(plain.request[row]))
            position.append(int(plain.position[row]))
    return Rows.from_tensors(
        torch.tensor(request, dtype=torch.int32, device=device),
        torch.tensor(position, dtype=torch.int32, device=device),
        plain.max_position,
    )


def filled(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str, pattern: str) -> Tensor:
    """Memory as a cache may find it: `nan`, `zeros`, `large` (1e4, in FP8 448), `infinity` (in FP8 the negative NaN),
    or `fp32-bytes`, the bytes of normal FP32 numbers read as `dtype`.
    """
    tensor = torch.empty(shape, dtype=dtype, device=device)
    if pattern == "fp32-bytes":
        numbers = torch.randn(tensor.numel() * tensor.element_size() // 4 + 1, generator=torch.Generator())
        tensor.view(torch.uint8).view(-1).copy_(numbers.view(torch.uint8)[: tensor.numel() * tensor.element_size()])
    elif dtype == FP8:
        tensor.view(torch.uint8).fill_({"nan": 0x7F, "zeros": 0x00, "large": 0x7E, "infinity": 0xFF}[pattern])
    else:
        tensor.fill_({"nan": float("nan"), "zeros": 0.0, "large": 1e4, "infinity": float("inf")}[pattern])
    return tensor


def kv_pool(
    layout: str,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    pattern: str = "nan",
) -> tuple[Tensor, Tensor]:
    """Keys and values [pages, page_tokens, kv_heads, head_dim] of a KV pool in one of the layouts of `Case`."""
    pages, page_tokens, kv_heads, head_dim = shape
    if layout == "interleaved":
        pool = filled((pages, 2, page_tokens, kv_heads, head_dim), dtype, device, pattern)
        return pool[:, 0], pool[:, 1]
    if layout == "packed":
        pool = filled((pages, page_tokens, kv_heads, 2 * head_dim), dtype, device, pattern)
        return pool[..., :head_dim], pool[..., head_dim:]
    if layout == "apart":
        return filled(shape, dtype, device, pattern), filled(shape, dtype, device, pattern)
    if layout == "wide-view":
        # Page, token and head strides each exceed what lies between them; 16 elements keep vector loads aligned.
        pool = filled((pages, page_tokens + 2, kv_heads + 1, 2 * head_dim + 32), dtype, device, pattern)
        view = pool[:, :page_tokens, :kv_heads]
        return view[..., :head_dim], view[..., head_dim + 16 : 2 * head_dim + 16]
    raise ValueError(f"layout: wanted interleaved, packed, apart or wide-view; got {layout!r}")


def place_pages(order: str, count: int, pages: int, generator: torch.Generator) -> list[int]:
    """Physical ids of `count` logical pages in a pool of `pages`: first on, last back, or at random."""
    if order == "identity":
        return list(range(count))
    if order == "reversed":
        return list(range(pages - 1, pages - 1 - count, -1))
    if order == "random":
        return [int(page) for page in torch.randperm(pages, generator=generator)[:count]]
    raise ValueError(f"order: wanted identity, reversed or random; got {order!r}")


def relocate(inputs: Inputs, order: str, seed: int = 1) -> Inputs:
    """The same logical caches with their pages elsewhere. Every result must be the same, bit for bit."""
    case, generator = inputs.case, torch.Generator().manual_seed(seed)
    moved: list[tuple[Tensor, list[tuple[int, int]], list[int]]] = []
    for old, counts in (
        (inputs.index_cache.page_table, _page_counts(case, "index")),
        (inputs.kv_cache.page_table, _page_counts(case, "kv")),
    ):
        entries = _used_entries(case, counts)
        pages = len(entries) + SPARE_PAGES
        table, places = old.clone(), place_pages(order, len(entries), pages, generator)
        for (request, index), page in zip(entries, places, strict=True):
            table[request, index] = page
        moved.append((table, entries, places))
    index_keys = _moved(inputs.index_cache.keys, inputs.index_cache.page_table, *moved[0][1:], _index_pool(inputs))
    keys, values = _kv_pool_like(inputs, "nan")
    keys = _moved(inputs.kv_cache.keys, inputs.kv_cache.page_table, *moved[1][1:], keys)
    values = _moved(inputs.kv_cache.values, inputs.kv_cache.page_table, *moved[1][1:], values)
    return replace(
        inputs,
        index_cache=replace(inputs.index_cache, keys=index_keys, page_table=moved[0][0]),
        kv_cache=replace(inputs.kv_cache, keys=keys, values=values, page_table=moved[1][0]),
    )


def fill_unwritten(inputs: Inputs, pattern: str) -> Inputs:
    """The same logical caches where memory that no request wrote holds another of `PATTERNS`: page 0 where it is free,
    the rest of half-full pages, the gaps of views. Every result must be the same, bit for bit.
    """
    case = inputs.case
    index_keys = _index_pool(inputs, pattern)
    keys, values = _kv_pool_like(inputs, pattern)
    for request, tokens in enumerate(case.context_lengths):
        blocks = torch.arange(tokens // case.spec.block_tokens)
        page, place = _slots(inputs.index_cache.page_table, request, blocks, case.index_page_blocks)
        index_keys[page, place] = inputs.index_cache.keys[page, place]
        page, place = _slots(inputs.kv_cache.page_table, request, torch.arange(tokens), case.page_tokens)
        keys[page, place] = inputs.kv_cache.keys[page, place]
        values[page, place] = inputs.kv_cache.values[page, place]
    return replace(
        inputs,
        index_cache=replace(inputs.index_cache, keys=index_keys),
        kv_cache=replace(inputs.kv_cache, keys=keys, values=values),
    )


def take_rows(inputs: Inputs, start: int, stop: int) -> Inputs:
    """A call of some of the rows alone, over the same caches. Each row's result must stay the same within tolerance."""
    return replace(
        inputs,
        index_q=inputs.index_q[start:stop],
        q=inputs.q[start:stop],
        gate=None if inputs.gate is None else inputs.gate[start:stop],
        rows=inputs.rows.slice(start, stop),
        selection=None if inputs.selection is None else inputs.selection.slice(start, stop),
    )


def _index_numbers(shape: tuple[int, ...], case: Case, generator: torch.Generator) -> Tensor:
    """Numbers of index queries and keys; whole ones from -2 to 2 keep every sum of 4 x 128 products exact in FP32."""
    if case.exact_scores:
        return torch.randint(-2, 3, shape, generator=generator).float()
    return torch.randn(shape, generator=generator)


def _page_counts(case: Case, cache: str) -> list[int]:
    """Pages that each request fills, wholly or in part."""
    if cache == "kv":
        return [-(-tokens // case.page_tokens) for tokens in case.context_lengths]
    return [-(-(tokens // case.spec.block_tokens) // case.index_page_blocks) for tokens in case.context_lengths]


def _used_entries(case: Case, counts: list[int]) -> list[tuple[int, int]]:
    """(request, page-table column) of every page that is there."""
    entries = [(request, index) for request, count in enumerate(counts) for index in range(count)]
    return [entry for entry in entries if entry not in case.holes]


def _page_table(case: Case, counts: list[int], generator: torch.Generator) -> tuple[Tensor, int]:
    """A page table [requests, most pages of a request] and the pages its pool needs.

    Entries past a request's pages are never read: they are -1, or ids of any page under the "random" order.
    """
    width = max([*counts, 1])
    entries = _used_entries(case, counts)
    pages = len(entries) + SPARE_PAGES
    table = torch.full((len(counts), width), -1, dtype=torch.int32)
    if case.order == "random":
        table.random_(0, pages, generator=generator)
    for request, index in case.holes:
        if index < counts[request]:
            table[request, index] = -1
    for (request, index), page in zip(entries, place_pages(case.order, len(entries), pages, generator), strict=True):
        table[request, index] = page
    return table, pages


def _slots(table: Tensor, request: int, entries: Tensor, per_page: int) -> tuple[Tensor, Tensor]:
    """Page and place of a request's tokens or blocks that are not on a hole."""
    entries = entries.to(table.device)
    page = table[request].long()[entries // per_page]
    return page[page >= 0], (entries % per_page)[page >= 0]


def _build_index_cache(case: Case, generator: torch.Generator, device: torch.device | str) -> IndexCache:
    spec, dtype = case.spec, case.cache_dtype
    table, pages = _page_table(case, _page_counts(case, "index"), generator)
    scale = INDEX_SCALE if dtype == FP8 else None
    pool = filled((pages, case.index_page_blocks, spec.index_dim), dtype, device, "nan")
    for request, tokens in enumerate(case.context_lengths):
        keys = _index_numbers((tokens // spec.block_tokens, spec.index_dim), case, generator) * (scale or 1.0)
        blocks = torch.arange(keys.shape[0])
        there = table[request].long()[blocks // case.index_page_blocks] >= 0
        page, place = _slots(table, request, blocks, case.index_page_blocks)
        pool[page.to(device), place.to(device)] = stored(keys[there], scale, dtype).to(device)
    return IndexCache(pool, table.to(device), scale)


def _build_kv_cache(case: Case, generator: torch.Generator, device: torch.device | str) -> KvCache:
    spec, dtype = case.spec, case.cache_dtype
    table, pages = _page_table(case, _page_counts(case, "kv"), generator)
    k_scale: float | Tensor | None = None
    v_scale: float | Tensor | None = None
    if dtype == FP8:
        k_scale, v_scale = K_SCALE, V_SCALE
    if dtype == FP8 and case.head_scales:
        heads = 1.0 + torch.arange(spec.kv_heads) / 3
        k_scale, v_scale = K_SCALE * heads, V_SCALE / heads
    keys, values = kv_pool(case.layout, (pages, case.page_tokens, spec.kv_heads, spec.head_dim), dtype, device)
    for request, tokens in enumerate(case.context_lengths):
        new = torch.randn((2, tokens, spec.kv_heads, spec.head_dim), generator=generator)
        ids = torch.arange(tokens)
        there = table[request].long()[ids // case.page_tokens] >= 0
        page, place = (entry.to(device) for entry in _slots(table, request, ids, case.page_tokens))
        keys[page, place] = stored(new[0][there], k_scale, dtype).to(device)
        values[page, place] = stored(new[1][there], v_scale, dtype).to(device)
    k_scale, v_scale = (s.to(device) if isinstance(s, Tensor) else s for s in (k_scale, v_scale))
    return KvCache(keys, values, table.to(device), k_scale, v_scale)


def _moved(old: Tensor, table: Tensor, entries: list[tuple[int, int]], places: list[int], pool: Tensor) -> Tensor:
    """`pool` with the pages of `old` copied to their new places."""
    for (request, index), page in zip(entries, places, strict=True):
        pool[page] = old[int(table[request, index])]
    return pool


def _index_pool(inputs: Inputs, pattern: str = "nan") -> Tensor:
    keys = inputs.index_cache.keys
    return filled(tuple(keys.shape), keys.dtype, keys.device, pattern)


def _kv_pool_like(inputs: Inputs, pattern: str) -> tuple[Tensor, Tensor]:
    keys = inputs.kv_cache.keys
    pages, page_tokens, kv_heads, head_dim = keys.shape
    return kv_pool(inputs.case.layout, (pages, page_tokens, kv_heads, head_dim), keys.dtype, keys.device, pattern)
