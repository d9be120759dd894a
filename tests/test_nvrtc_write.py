"""Writing caches on any NVIDIA GPU, against the CPU kernels: emulated anywhere, run where there is a GPU."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flashqsa import reference
from flashqsa.kernels import cpu, nvrtc
from flashqsa.kernels.nvrtc import NvrtcNotFoundError, compile_source, write
from flashqsa.testing import compare, nasty
from flashqsa.testing.cases import Case, spec_of
from flashqsa.testing.inputs import filled, kv_pool, padded_rows
from flashqsa.values import FP8, IndexCache, KvCache, QsaSpec, Rows
from tests.nvrtc_emulate import MACHINES, Machine, copied, machine_named, same_memory, storage_of

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
SPEC = QsaSpec(index_dim=32, index_heads=1)
MOST = torch.iinfo(torch.int32).max
LONG_PADDING = 300
"""More rows than a warp looks at in one go (256)."""


@pytest.fixture(scope="module", params=MACHINES)
def machine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    with machine_named(request.param, tmp_path_factory.mktemp("nvrtc")) as found:
        yield found


# Keys and values.


def write_both(machine: Machine, keys: Tensor, values: Tensor, cache: KvCache, rows: Rows) -> KvCache:
    """Writes on a machine and with the CPU kernels; both must leave the same bytes in all of the pools' memory."""
    ours = machine.kv_cache(cache)
    new = copied(machine.device, keys, values)
    nvrtc.write_kv(new[0], new[1], ours, machine.rows(rows), machine.capability)
    cpu.write_kv(keys, values, cache, rows)
    assert same_memory(ours.keys, cache.keys)
    assert same_memory(ours.values, cache.values)
    return ours


@pytest.mark.parametrize("layout", ["interleaved", "packed", "apart", "wide-view"])
@pytest.mark.parametrize(
    ("dtype", "new_dtype"), [(d, d) for d in FLOATS] + [(FP8, d) for d in FLOATS], ids=lambda d: str(d)[6:]
)
def test_keys_and_values_go_where_the_cpu_kernels_put_them(
    layout: str, dtype: torch.dtype, new_dtype: torch.dtype, machine: Machine
) -> None:
    case = Case("write", (9, 5, 3), (40, 12, 7), spec_of(6, 2), padding=(0, 4, 9, 17), layout=layout, holes=((0, 2),))
    table = torch.tensor([[4, 1, -1], [0, 6, 6], [5, 2, 3]], dtype=torch.int32)
    rows = padded_rows(case)
    # One tensor holds a row's queries, keys and values, as projections make them.
    fused = torch.randn(rows.count, 10, 64, generator=torch.Generator().manual_seed(9)).mul(300).to(new_dtype)
    scale = torch.tensor([0.37, 2.0]) if dtype == FP8 else None
    cache = KvCache(*kv_pool(layout, (7, 16, 2, 64), dtype), table, scale, 1.7 if dtype == FP8 else None)
    before = storage_of(cache.keys).clone()
    write_both(machine, fused[:, 6:8], fused[:, 8:10], cache, rows)
    assert not torch.equal(storage_of(cache.keys), before)


def test_keys_and_values_may_lie_each_in_their_own_way(machine: Machine) -> None:
    cache = KvCache(
        filled((5, 3, 9, 40), torch.bfloat16, "cpu", "nan")[:, :2, :8, :32].transpose(1, 2),
        filled((4, 8, 70), torch.bfloat16, "cpu", "nan")[:, :, :64].view(4, 8, 2, 32),
        torch.tensor([[3, 1]], dtype=torch.int32),
    )
    new = torch.randn(2, 5, 999, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    keys, values = new[0].as_strided((5, 2, 32), (80, 40, 1)), new[1].as_strided((5, 2, 32), (32, 500, 1), 1000)
    write_both(machine, keys, values, cache, Rows.from_lengths([5], [13]))


@pytest.mark.parametrize(
    ("heads", "head_dim", "offset", "chunks"),
    [
        (1, 64, 0, {torch.float32: 4, torch.float16: 8, FP8: 8}),
        (3, 12, 0, {torch.float32: 4, torch.float16: 4, FP8: 1}),
        (2, 6, 0, {torch.float32: 2, torch.float16: 2, FP8: 1}),
        (2, 64, 1, {torch.float32: 1, torch.float16: 1, FP8: 1}),
        (2, 64, 4, {torch.float32: 4, torch.float16: 4, FP8: 1}),
        (31, 72, 0, {torch.float32: 4, torch.float16: 8, FP8: 8}),
        (1, 1, 0, {torch.float32: 1, torch.float16: 1, FP8: 1}),
        (1, 2048, 0, {torch.float32: 4, torch.float16: 8, FP8: 8}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, FP8], ids=str)
def test_any_size_and_alignment_is_written_with_the_widest_stores_it_allows(
    dtype: torch.dtype, heads: int, head_dim: int, offset: int, chunks: dict[torch.dtype, int], machine: Machine
) -> None:
    shape = (3, 4, heads, head_dim)
    rows = Rows.from_lengths([5], [11], pad_to=6)
    pools = filled((2, 3 * 4 * heads * head_dim + 16), dtype, "cpu", "nan")
    pools = pools[:, offset : offset + 3 * 4 * heads * head_dim]
    scale = 0.3 if dtype == FP8 else None
    table = torch.tensor([[2, 0, 1]], dtype=torch.int32)
    cache = KvCache(pools[0].view(shape), pools[1].view(shape), table, scale, scale)
    new = torch.randn(2, rows.count, heads, head_dim, generator=torch.Generator().manual_seed(heads))
    new = new.to(torch.float32 if dtype == FP8 else dtype)
    if offset == 0:
        assert write._chunk(new[0], new[1], cache) == chunks[dtype]
    write_both(machine, new[0], new[1], cache, rows)


@pytest.mark.parametrize(
    ("what", "offset", "chunk"),
    [("keys", 4, 4), ("values", 2, 2), ("pool", 1, 1), ("pool", 8, 8), ("rows", 0, 8), ("one row", 0, 8)],
)
def test_every_address_counts_for_how_much_is_moved_at_a_time(what: str, offset: int, chunk: int) -> None:
    def at(name: str, *shape: int) -> Tensor:
        # 4-byte and longer alignment of fresh memory is torch's: 64 bytes.
        start = offset if name == what else 0
        size = int(torch.tensor(shape).prod())
        return torch.zeros(size + 16, dtype=torch.float16)[start : start + size].view(shape)

    pool = at("pool", 2, 4, 2, 64)
    table = torch.zeros(1, 2, dtype=torch.int32)
    cache = KvCache(pool, pool, table)
    keys, values = at("keys", 3, 2, 64), at("values", 3, 2, 64)
    if what == "rows":
        keys = torch.zeros(3, 136, dtype=torch.float16)[:, :128].view(3, 2, 64)
    if what == "one row":  # its stride means nothing
        keys, values = keys[:1].as_strided((1, 2, 64), (3, 64, 1)), values[:1]
    assert write._chunk(keys, values, cache) == chunk
    if what == "rows":
        assert write._chunk(torch.zeros(3, 2, 65, dtype=torch.float16)[..., :64], values, cache) == 1


def fp32_around_every_fp8_number() -> Tensor:
    """Each E4M3 number, each number halfway between two, their FP32 neighbours, and what is out of range."""
    held = torch.arange(0x7F, dtype=torch.uint8).view(FP8).float()
    points = torch.cat([held, (held[1:] + held[:-1]) / 2, torch.tensor([464.0, 480.0, 1e30, float("inf")])])
    bits = points.view(torch.int32)
    near = torch.cat([bits, bits + 1, (bits - 1).clamp(min=0)])
    numbers = near.to(torch.int32).view(torch.float32)
    return torch.cat([numbers, -numbers, torch.tensor([float("nan"), -float("nan"), 2.0**-149, -(2.0**-149)])])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.5, 0.3, 1e-6, 2.0**100, 777.7])
@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "unaligned"])
def test_every_rounding_to_fp8_is_the_cpu_s(dtype: torch.dtype, scale: float, aligned: bool, machine: Machine) -> None:
    if dtype == torch.float32:
        numbers = fp32_around_every_fp8_number() * (scale if scale < 1e30 else 1.0)
    else:
        numbers = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    tokens = -(-numbers.numel() // 256)
    padded = torch.zeros(tokens * 256, dtype=dtype)
    padded[: numbers.numel()] = numbers
    keys = padded.view(tokens, 2, 128)
    if not aligned:
        keys = torch.cat([keys, keys[..., :1]], dim=2)[..., :128]
    page_tokens = -(-tokens // 4) * 4
    pools = kv_pool("apart", (1, page_tokens, 2, 128), FP8)
    cache = KvCache(*pools, torch.zeros(1, 1, dtype=torch.int32), scale, torch.tensor([scale, 1.0]))
    write_both(machine, keys, keys.flip(0).contiguous(), cache, Rows.from_lengths([tokens], [tokens]))


def test_keys_and_values_that_no_call_may_have_are_passed_over(machine: Machine) -> None:
    pool = filled((4, 2, 8, 2, 16), torch.float16, "cpu", "nan")
    table = torch.tensor([[0, 7, -5], [1, 2, 3]], dtype=torch.int32)
    cache = machine.kv_cache(KvCache.interleaved(pool, table))
    # A good row; pages out of range; positions past the table; requests out of range; padding with other numbers.
    request = torch.tensor([0, 0, 0, 0, 1, 1, 2, MOST, -1, -7, 1, 1], dtype=torch.int32)
    position = torch.tensor([3, 9, 17, 25, 24, MOST, 0, 0, 5, MOST, -1, -MOST], dtype=torch.int32)
    new = torch.ones(2, 12, 2, 16, dtype=torch.float16, device=machine.device)
    nvrtc.write_kv(new[0], new[1], cache, machine.rows(Rows(request, position, 25)), machine.capability)
    pool[0, :, 3] = 1.0
    assert torch.equal(storage_of(cache.keys), storage_of(pool))


FAR_STRIDE, FAR_PAGE = 1_638_400, 1311


def test_a_page_past_2_to_the_31_elements_is_written_like_any_other(machine: Machine) -> None:
    elements = (FAR_PAGE + 1) * FAR_STRIDE
    if machine.device.type == "cuda" and torch.cuda.mem_get_info(machine.device)[0] < 2 * elements:
        pytest.skip(f"wanted {2 * elements} bytes of free memory")
    # On the CPU the pages that are not touched are address space alone.
    pool = torch.empty(elements, dtype=torch.uint8, device=machine.device).view(FP8)
    strides = (FAR_STRIDE, 512, 256, 1)
    keys = pool.as_strided((FAR_PAGE + 1, 16, 2, 256), strides)
    values = pool.as_strided((FAR_PAGE + 1, 16, 2, 256), strides, 16 * 512)
    blocks = pool.as_strided((FAR_PAGE + 1, 4, 128), (FAR_STRIDE, 128, 1), 32 * 512)
    rows = machine.rows(Rows.from_lengths([16], [16]))
    new = torch.randn(2, 16, 2, 256, generator=torch.Generator().manual_seed(2)).to(machine.device)
    raw = nasty.raw_keys((16,), QsaSpec())
    index = [t.to(machine.device) for t in (raw.keys[0], raw.norm_weight, raw.cos[0], raw.sin[0])]
    for page in (FAR_PAGE, 0):
        table = torch.tensor([[page]], dtype=torch.int32, device=machine.device)
        kv_cache = KvCache(keys, values, table, 0.5, 2.0)
        nvrtc.write_kv(new[0], new[1], kv_cache, rows, machine.capability)
        ring = torch.empty(1, 4, 128, device=machine.device)
        index_cache = IndexCache(blocks, table, 0.5, ring)
        nvrtc.write_index_keys(
            index[0], index_cache, rows, QsaSpec(), index[1], index[2], index[3], 1e-6, machine.capability
        )
    assert compare.same_bits(keys[FAR_PAGE], keys[0])
    assert compare.same_bits(values[FAR_PAGE], values[0])
    assert compare.same_bits(blocks[FAR_PAGE], blocks[0])
    assert compare.same_bits(keys[0].cpu(), (new[0].cpu() / 0.5).clamp(-448, 448).to(FP8))


# Index keys.


@dataclass(frozen=True)
class IndexCall:
    """Rows of a call and their raw keys; padding's are NaN."""

    rows: Rows
    raw_keys: Tensor
    cos: Tensor
    sin: Tensor


def index_call(raw: nasty.RawKeys, pieces: list[tuple[int, int, int]], gaps: dict[int, int]) -> IndexCall:
    """A call of pieces (request, first token, end), with `gaps[i]` rows of padding before its i-th live row."""
    request: list[int] = []
    position: list[int] = []
    numbers: list[tuple[Tensor, Tensor, Tensor]] = []
    nothing = tuple(torch.full_like(t[0][:1], float("nan")) for t in (raw.keys, raw.cos, raw.sin))
    tokens = [(owner, token) for owner, start, stop in pieces for token in range(start, stop)]
    for live, (owner, token) in enumerate([*tokens, (-1, -1)]):
        for index in range(gaps.get(live, 0)):
            # Either sign alone marks padding; the other number is one that would change the result.
            request.append(owner if index % 2 else -1)
            position.append(-5 if index % 2 else max(token - 1, 0))
            numbers.append(nothing)  # type: ignore[arg-type]
        if owner >= 0:
            request.append(owner)
            position.append(token)
            numbers.append(tuple(t[owner][token : token + 1] for t in (raw.keys, raw.cos, raw.sin)))  # type: ignore[arg-type]
    rows = Rows.from_tensors(torch.tensor(request), torch.tensor(position), max(t for _, t in tokens))
    keys, cos, sin = (torch.cat(parts) for parts in zip(*numbers, strict=True))
    return IndexCall(rows, keys, cos, sin)


def whole_keys(tokens: tuple[int, ...], spec: QsaSpec, dtype: torch.dtype, rotary_dim: int) -> nasty.RawKeys:
    """Raw keys whose means are whole numbers or quarters: the norm's squares then add up exactly, in any order."""
    raw = nasty.raw_keys(tokens, spec, dtype, rotary_dim)
    unit = 1 if spec.block_tokens in (1, 2, 4) else spec.block_tokens
    generator = torch.Generator().manual_seed(7)
    keys = tuple((torch.randint(-8, 9, k.shape, generator=generator) * unit).to(dtype) for k in raw.keys)
    return replace(raw, keys=keys)


def run_index_call(machine: Machine, call: IndexCall, ours: IndexCache, raw: nasty.RawKeys, spec: QsaSpec) -> None:
    given = copied(machine.device, call.raw_keys, raw.norm_weight, call.cos, call.sin)
    rows = machine.rows(call.rows)
    nvrtc.write_index_keys(given[0], ours, rows, spec, given[1], given[2], given[3], 1e-6, machine.capability)


def index_both(
    machine: Machine, calls: list[IndexCall], cache: IndexCache, raw: nasty.RawKeys, spec: QsaSpec
) -> IndexCache:
    """Makes calls on a machine and with the CPU kernels; each must leave the same bytes in all of the memory."""
    assert cache.raw_keys is not None
    ours = machine.index_cache(cache)
    assert ours.raw_keys is not None
    for call in calls:
        run_index_call(machine, call, ours, raw, spec)
        cpu.write_index_keys(call.raw_keys, cache, call.rows, spec, raw.norm_weight, call.cos, call.sin, 1e-6)
        assert same_memory(ours.raw_keys, cache.raw_keys)
        assert same_memory(ours.keys, cache.keys)
    return cache


def random_calls(raw: nasty.RawKeys, seed: int, most: int, padding: bool = True) -> list[IndexCall]:
    """Calls that bring up to `most` tokens of each request at a time, requests in any order, padding anywhere."""
    generator = torch.Generator().manual_seed(seed)

    def upto(limit: int) -> int:
        return int(torch.randint(0, limit + 1, (), generator=generator))

    tokens, calls = [keys.shape[0] for keys in raw.keys], []
    done = [0] * len(tokens)
    while done != tokens:
        pieces = []
        for owner in torch.randperm(len(tokens), generator=generator).tolist():
            step = min(upto(most), tokens[owner] - done[owner])
            pieces += [(owner, done[owner], done[owner] + step)] if step else []
            done[owner] += step
        rows = sum(stop - start for _, start, stop in pieces)
        gaps = {upto(rows): upto(3) for _ in range(3)} if padding else {}
        calls += [index_call(raw, pieces, gaps)] if pieces else []
    return calls


@pytest.mark.parametrize("ring_tokens", [4, 8, 12])
@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [*((d, d) for d in FLOATS), (torch.bfloat16, FP8), (torch.float32, FP8), (torch.float16, torch.float32)],
    ids=lambda d: str(d)[6:],
)
def test_any_calls_leave_the_same_bytes_as_the_cpu_kernels(
    dtype: torch.dtype, cache_dtype: torch.dtype, ring_tokens: int, machine: Machine
) -> None:
    tokens = (37, 0, 12, 21)
    raw = whole_keys(tokens, SPEC, dtype, rotary_dim=16)
    cache = nasty.empty_index_cache(tokens, SPEC, cache_dtype, dtype, 3, ring_tokens)
    cache.page_table[0, 1] = -1
    index_both(machine, random_calls(raw, ring_tokens, most=11), cache, raw, SPEC)
    written = ~cache.keys.float().isnan().any(dim=-1)
    assert int(written.sum()) == (9 - 3) + 3 + 5


@pytest.mark.parametrize("prefix", [840, 841, 842, 843])
@pytest.mark.parametrize("extend", [1, 2, 3, 6])
def test_a_block_that_straddles_two_calls_is_pooled_from_all_its_keys(
    prefix: int, extend: int, machine: Machine
) -> None:
    spec, tokens = QsaSpec(), (prefix + extend, 13)
    raw = whole_keys(tokens, spec, torch.bfloat16, rotary_dim=64)
    cache = nasty.empty_index_cache(tokens, spec, torch.bfloat16, torch.bfloat16)
    first = index_call(raw, [(0, 0, prefix), (1, 0, 10)], {})
    cpu.write_index_keys(first.raw_keys, cache, first.rows, spec, raw.norm_weight, first.cos, first.sin, 1e-6)
    second = index_call(raw, [(1, 10, 13), (0, prefix, prefix + extend)], {3: 2, 4: 1})
    cache = index_both(machine, [second], cache, raw, spec)
    blocks = cache.keys[cache.page_table[0].long()].flatten(0, 1)[: (prefix + extend) // 4]
    assert bool(blocks.isfinite().all())


@pytest.mark.parametrize(
    "where", [{0: LONG_PADDING}, {3: LONG_PADDING}, {6: LONG_PADDING}, {11: LONG_PADDING}, {2: 700}]
)
@pytest.mark.parametrize("start", [0, 2])
def test_any_number_of_rows_of_padding_may_stand_anywhere(where: dict[int, int], start: int, machine: Machine) -> None:
    # Live rows 0 to 5 are of request 1, 6 to 10 of request 0.
    raw = whole_keys((8, 8), SPEC, torch.float32, rotary_dim=8)
    cache = nasty.empty_index_cache((8, 8), SPEC, page_blocks=1)
    before = [index_call(raw, [(0, 0, start), (1, 0, start)], {})] if start else []
    calls = [*before, index_call(raw, [(1, start, start + 6), (0, start, start + 5)], where)]
    index_both(machine, calls, cache, raw, SPEC)


def test_tokens_that_are_taken_back_leave_no_trace(machine: Machine) -> None:
    raw = whole_keys((22, 22), SPEC, torch.float32, rotary_dim=16)
    other = replace(raw, keys=(torch.cat([raw.keys[0][:15], raw.keys[1][15:]]), raw.keys[1]))
    cache = nasty.empty_index_cache((22, 22), SPEC, page_blocks=2, ring_tokens=8)
    calls = [
        index_call(raw, [(0, 0, 18)], {}),
        index_call(other, [(0, 15, 16)], {}),
        index_call(other, [(0, 16, 22)], {}),
    ]
    index_both(machine, calls, cache, raw, SPEC)


@pytest.mark.parametrize(
    ("block_tokens", "index_dim", "rotary_dim"),
    [(1, 32, 16), (2, 128, 128), (3, 40, 2), (8, 20, 6), (5, 200, 130), (40, 64, 64), (4, 300, 256), (4, 2, 2)],
)
def test_any_sizes(block_tokens: int, index_dim: int, rotary_dim: int, machine: Machine) -> None:
    spec = QsaSpec(index_heads=1, index_dim=index_dim, block_tokens=block_tokens)
    tokens = (2 * block_tokens + 1, 3 * block_tokens)
    raw = whole_keys(tokens, spec, torch.float16, rotary_dim)
    cache = nasty.empty_index_cache(tokens, spec, torch.float16, torch.float16, 2, 2 * block_tokens)
    calls = random_calls(raw, block_tokens, most=block_tokens + 2)
    index_both(machine, calls, cache, raw, spec)
    assert int(cache.keys.isfinite().all(dim=-1).sum()) == sum(count // block_tokens for count in tokens)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("weight_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("angle_dtype", FLOATS, ids=str)
def test_any_dtypes_and_strides(
    dtype: torch.dtype, weight_dtype: torch.dtype, angle_dtype: torch.dtype, machine: Machine
) -> None:
    tokens = (9, 7)
    raw = whole_keys(tokens, SPEC, dtype, rotary_dim=16)
    plain = index_call(raw, [(1, 0, 7), (0, 0, 9)], {4: 1})
    raw = replace(raw, norm_weight=raw.norm_weight.to(weight_dtype))
    wide = filled((plain.rows.count, 100), angle_dtype, "cpu", "infinity")
    wide[:, 3:19], wide[:, 50:66] = plain.cos.to(angle_dtype), plain.sin.to(angle_dtype)
    sin = torch.cat([wide, wide], dim=1)[:, 50:66]
    fused = filled((plain.rows.count, 75), dtype, "cpu", "infinity")
    fused[:, 41:73] = plain.raw_keys
    call = IndexCall(plain.rows, fused[:, 41:73], wide[:, 3:19], sin)
    cache = nasty.empty_index_cache(tokens, SPEC, dtype, dtype, 2)
    pool = filled((5, 4, 71), torch.float16, "cpu", "large")
    ring = filled((3, 9, 50), dtype, "cpu", "nan")
    cache = IndexCache(pool[:, 1:3, 5:37], cache.page_table, None, ring[:2, 1:9:2, 7:39])
    index_both(machine, [call], cache, raw, SPEC)


@pytest.mark.parametrize("cache_dtype", [*FLOATS, FP8], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_numbers_of_any_size_are_rounded_as_the_cpu_kernels_round_them(
    dtype: torch.dtype, cache_dtype: torch.dtype, machine: Machine
) -> None:
    # Weights make of a key numbers from below the smallest FP16 number to beyond the largest; two dimensions rotate.
    spec, tokens = QsaSpec(index_dim=128), (24,)
    raw = whole_keys(tokens, spec, dtype, rotary_dim=2)
    weight = 2.0 ** (torch.arange(128) % 43 - 25.0) * (1 + torch.arange(128) / 128) - 1.0
    weight[:2] = 0.5
    cache = nasty.empty_index_cache(tokens, spec, cache_dtype, dtype)
    cache = index_both(machine, [index_call(raw, [(0, 0, 24)], {})], cache, replace(raw, norm_weight=weight), spec)
    keys = cache.keys[int(cache.page_table[0, 0]), :6].float().abs()
    if cache_dtype != FP8:
        tiny = torch.finfo(cache_dtype).tiny if cache_dtype == torch.float16 else 1e-6
        assert bool(((keys > 0) & (keys < tiny)).any())
        assert bool((keys > 60_000).any())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_keys_of_any_numbers_are_near_those_of_the_cpu_kernels(dtype: torch.dtype, machine: Machine) -> None:
    spec, tokens = QsaSpec(), (61, 18)
    raw = nasty.raw_keys(tokens, spec, dtype)
    cache = nasty.empty_index_cache(tokens, spec, dtype, dtype)
    whole = index_call(raw, [(0, 0, 61), (1, 0, 18)], {})
    ours = machine.index_cache(cache)
    run_index_call(machine, whole, ours, raw, spec)
    pieces = machine.index_cache(cache)
    for call in random_calls(raw, 3, most=7):
        run_index_call(machine, call, pieces, raw, spec)
    assert same_memory(pieces.keys, ours.keys), "keys depend on how the tokens came"
    cpu.write_index_keys(whole.raw_keys, cache, whole.rows, spec, raw.norm_weight, whole.cos, whole.sin, 1e-6)
    held = cache.keys.isfinite()
    assert torch.equal(ours.keys.cpu().isfinite(), held)
    got, wanted = ours.keys.cpu()[held].float(), cache.keys[held].float()
    if dtype == torch.float32:
        # Both sum the squares in FP32, in other orders.
        exact = nasty.empty_index_cache(tokens, spec, torch.float64, torch.float64)
        numbers = [t.double() for t in (whole.raw_keys, raw.norm_weight, whole.cos, whole.sin)]
        reference.write_index_keys(numbers[0], exact, whole.rows, spec, numbers[1], numbers[2], numbers[3], 1e-6)
        error, usual = ((keys.double() - exact.keys[held]).abs().max() for keys in (got, wanted))
        assert float(error) <= compare.TOLERANCE_MULTIPLE * float(usual)
        return
    # The sum's last bit decides a rounding now and then, and that of the norm those of two products and their sum.
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(got, wanted, rtol=2 * unit, atol=4 * unit)
    assert float((got == wanted).float().mean()) > 0.99


def test_index_keys_that_no_call_may_have_are_passed_over(machine: Machine) -> None:
    table = torch.tensor([[0, 7, -5], [1, 2, 3]], dtype=torch.int32)
    pool = filled((4, 2, 32), torch.float16, "cpu", "nan")
    ring = torch.zeros(4, 4, 32, dtype=torch.float16)[1:3]
    cache = machine.index_cache(IndexCache(pool, table, None, ring))
    request = torch.tensor([0, 0, 0, 0, 1, 1, 2, MOST, -1, -7, 1, 1], dtype=torch.int32)
    position = torch.tensor([3, 11, 19, 27, 27, MOST, 3, 7, 3, MOST, -1, -MOST], dtype=torch.int32)
    raw, angles = torch.ones(12, 32).half().to(machine.device), torch.ones(12, 8, device=machine.device)
    rows = machine.rows(Rows(request, position, 27))
    nvrtc.write_index_keys(raw, cache, rows, SPEC, raw[0], angles, angles, 1e-6, machine.capability)
    assert (~cache.keys.isnan()).all(dim=-1).nonzero().tolist() == [[0, 0]]
    assert cache.raw_keys is not None
    outside = torch.cat([storage_of(cache.raw_keys)[:256], storage_of(cache.raw_keys)[-256:]])
    assert not bool(outside.any())


def test_nothing_to_write_is_no_launch(machine: Machine) -> None:
    rows = machine.rows(Rows.from_lengths([], []))
    cache = machine.kv_cache(KvCache.interleaved(torch.zeros(1, 2, 4, 1, 8), torch.zeros(0, 1, dtype=torch.int32)))
    nothing = torch.zeros(0, 1, 8, device=machine.device)
    nvrtc.write_kv(nothing, nothing, cache, rows, machine.capability)
    assert not bool(storage_of(cache.keys).any())


def test_a_cache_without_a_ring_is_refused() -> None:
    raw = nasty.raw_keys((4,), SPEC)
    cache = replace(nasty.empty_index_cache((4,), SPEC), raw_keys=None)
    call = index_call(raw, [(0, 0, 4)], {})
    with pytest.raises(TypeError, match="without a ring"):
        nvrtc.write_index_keys(call.raw_keys, cache, call.rows, SPEC, raw.norm_weight, call.cos, call.sin, 1e-6, (7, 0))


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, FP8], ids=str)
def test_a_graph_writes_what_its_rows_say_when_it_is_replayed(cache_dtype: torch.dtype, tmp_path: Path) -> None:
    spec, tokens, count = QsaSpec(), (40, 40, 40), 12
    raw = whole_keys(tokens, spec, torch.bfloat16, rotary_dim=64)
    index_cache = nasty.empty_index_cache(tokens, spec, cache_dtype, torch.bfloat16, page_blocks=2)
    scale = 0.5 if cache_dtype == FP8 else None
    table = torch.randperm(15, generator=torch.Generator().manual_seed(1)).view(3, 5).to(torch.int32)
    kv_cache = KvCache(*kv_pool("interleaved", (15, 8, 2, 256), cache_dtype), table, scale, scale)
    generator = torch.Generator().manual_seed(2)
    replayed = (
        ([(2, 0, 5), (0, 0, 3), (1, 0, 1)], {0: 3}),
        ([(0, 3, 13)], {5: 2}),
        ([(1, 1, 4), (2, 5, 8), (0, 13, 17)], {10: 2}),
        ([(1, 4, 5)], {0: 4, 1: 7}),
    )
    calls = [index_call(raw, pieces, gaps) for pieces, gaps in replayed]
    assert all(call.rows.count == count for call in calls)
    new = [torch.randn(2, count, 2, 256, generator=generator).to(torch.bfloat16) for _ in calls]
    with machine_named("gpu", tmp_path) as machine:
        ours, our_kv = machine.index_cache(index_cache), machine.kv_cache(kv_cache)
        # Padding alone: the warm-up writes nothing.
        request = torch.full((count,), -1, dtype=torch.int32, device=machine.device)
        rows = Rows(request, request.clone(), 39)
        held = [t.to(machine.device).clone() for t in (calls[0].raw_keys, calls[0].cos, calls[0].sin, new[0])]
        weight = raw.norm_weight.to(machine.device)

        def step() -> None:
            nvrtc.write_kv(held[3][0], held[3][1], our_kv, rows, machine.capability)
            nvrtc.write_index_keys(held[0], ours, rows, spec, weight, held[1], held[2], 1e-6, machine.capability)

        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for call, keys_values in zip(calls, new, strict=True):
            rows.request.copy_(call.rows.request)
            rows.position.copy_(call.rows.position)
            for tensor, numbers in zip(held, (call.raw_keys, call.cos, call.sin, keys_values), strict=True):
                tensor.copy_(numbers)
            graph.replay()
            torch.cuda.synchronize()
            cpu.write_kv(keys_values[0], keys_values[1], kv_cache, call.rows)
            cpu.write_index_keys(call.raw_keys, index_cache, call.rows, spec, raw.norm_weight, call.cos, call.sin, 1e-6)
            assert same_memory(our_kv.keys, kv_cache.keys)
            assert same_memory(ours.keys, index_cache.keys)
            assert ours.raw_keys is not None
            assert index_cache.raw_keys is not None
            assert same_memory(ours.raw_keys, index_cache.raw_keys)


# Compiled for every GPU.


@pytest.mark.parametrize("capability", [(7, 0), (7, 5), (8, 0), (9, 0), (12, 0)], ids=str)
def test_the_kernels_compile(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLASHQSA_CACHE_DIR", str(tmp_path))
    compile_source.cache_clear()
    try:
        found = compile_source(write.SOURCE, capability)
    except NvrtcNotFoundError as error:
        pytest.skip(str(error))
    finally:
        compile_source.cache_clear()
    names = re.findall(r"Compiling entry function '(\w+)'", found.log)
    assert sorted(names) == ["flashqsa_pool_blocks", "flashqsa_write_kv", "flashqsa_write_ring"]
    assert set(re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", found.log)) == {"0"}
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", found.log)]
    assert max(registers) <= 64, "fewer than 1,024 threads fit on a multiprocessor"
