"""Writing caches with the CPU kernels: keys and values, pooled index keys, and the ring of raw keys."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flashqsa import reference
from flashqsa.kernels import cpu
from flashqsa.testing import compare, nasty
from flashqsa.testing.cases import Case, spec_of
from flashqsa.testing.inputs import kv_pool, padded_rows
from flashqsa.values import FP8, IndexCache, KvCache, QsaSpec, Rows


def stored_bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor's elements, wherever they lie."""
    return tensor.contiguous().view(torch.uint8).clone()


# Writing keys and values.


@pytest.mark.parametrize("layout", ["interleaved", "packed", "apart", "wide-view"])
@pytest.mark.parametrize(
    ("dtype", "new_dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (FP8, torch.float32), (FP8, torch.bfloat16)],
    ids=str,
)
def test_keys_and_values_are_written_where_they_belong_and_nowhere_else(
    layout: str, dtype: torch.dtype, new_dtype: torch.dtype
) -> None:
    case = Case("write", (9, 5, 3), (40, 12, 7), spec_of(6, 2), padding=(0, 9, 17), layout=layout, holes=((0, 2),))
    rows = padded_rows(case)
    table = torch.tensor([[4, 1, -1], [0, 6, 6], [5, 2, 3]], dtype=torch.int32)
    generator = torch.Generator().manual_seed(9)
    new = (torch.randn(2, rows.count, 2, 64, generator=generator) * 300).to(new_dtype)
    scale = torch.tensor([0.5, 2.0]) if dtype == FP8 else None
    caches = []
    for _ in range(2):
        keys, values = kv_pool(layout, (7, 16, 2, 64), dtype)
        caches.append(KvCache(keys, values, table, scale, 1.5 if dtype == FP8 else None))
    cpu.write_kv(new[0], new[1], caches[0], rows)
    reference.write_kv(new[0], new[1], caches[1], rows)
    for got, wanted in ((caches[0].keys, caches[1].keys), (caches[0].values, caches[1].values)):
        assert torch.equal(stored_bits(got), stored_bits(wanted))
    written = ~caches[0].keys.float().isnan().all(dim=-1).all(dim=-1)
    # Tokens 31..39 of request 0 of which those from 32 on are on the hole, 7..11 of request 1, 4..6 of request 2.
    assert int(written.sum()) == 1 + 5 + 3


def test_fp8_numbers_are_stored_exactly_and_large_ones_clamped() -> None:
    extremes = nasty.e4m3_extremes()
    count = extremes.shape[0]
    keys, values = kv_pool("apart", (1, -(-count // 4) * 4, 1, 64), FP8)
    cache = KvCache(keys, values, torch.zeros(1, 1, dtype=torch.int32), 0.5, 4.0)
    rows = Rows.from_lengths([count], [count])
    cpu.write_kv(extremes * 0.5, extremes * 4000, cache, rows)
    assert torch.equal(keys[0, :count].float(), extremes)
    assert torch.equal(values[0, :count].float(), (extremes * 1000).clamp(-448, 448).to(FP8).float())


# Writing index keys.

POOL_SPEC = QsaSpec(index_dim=32, index_heads=1)


def written_in_calls(
    raw: nasty.RawKeys, splits: list[list[tuple[int, int, int]]], cache: IndexCache, spec: QsaSpec, padding: bool
) -> IndexCache:
    """Writes raw keys in calls of (request, first token, end) pieces."""
    for pieces in splits:
        request, position, keys, cos, sin = [], [], [], [], []
        for owner, start, stop in pieces:
            if padding:
                request.append(torch.tensor([-1, owner]))
                position.append(torch.tensor([start, -3]))
                keys.append(torch.full((2, spec.index_dim), float("nan"), dtype=raw.keys[owner].dtype))
                cos.append(raw.cos[owner][:1].expand(2, -1))
                sin.append(raw.sin[owner][:1].expand(2, -1))
            request.append(torch.full((stop - start,), owner))
            position.append(torch.arange(start, stop))
            keys.append(raw.keys[owner][start:stop])
            cos.append(raw.cos[owner][start:stop])
            sin.append(raw.sin[owner][start:stop])
        rows = Rows.from_tensors(torch.cat(request), torch.cat(position))
        arguments = (torch.cat(keys), cache, rows, spec, raw.norm_weight, torch.cat(cos), torch.cat(sin), 1e-6)
        cpu.write_index_keys(*arguments)
    return cache


def in_one_call(raw: nasty.RawKeys) -> list[list[tuple[int, int, int]]]:
    return [[(owner, 0, keys.shape[0]) for owner, keys in enumerate(raw.keys)]]


def assert_same_index_cache(got: IndexCache, wanted: IndexCache) -> None:
    assert torch.equal(stored_bits(got.keys), stored_bits(wanted.keys))
    assert got.raw_keys is not None
    assert wanted.raw_keys is not None
    assert torch.equal(stored_bits(got.raw_keys), stored_bits(wanted.raw_keys))


@settings(max_examples=40)
@given(st.data())
def test_any_split_into_calls_writes_the_same_bits(data: st.DataObject) -> None:
    tokens = tuple(data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=3)))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    cache_dtype = data.draw(st.sampled_from([dtype, FP8]))
    ring, page_blocks = data.draw(st.sampled_from([4, 8, 12])), data.draw(st.integers(1, 5))
    raw = nasty.raw_keys(tokens, POOL_SPEC, dtype, rotary_dim=16)
    make = [nasty.empty_index_cache(tokens, POOL_SPEC, cache_dtype, dtype, page_blocks, ring) for _ in range(2)]
    wanted = written_in_calls(raw, in_one_call(raw), make[0], POOL_SPEC, padding=False)
    splits, done = [], [0] * len(tokens)
    while done != list(tokens):
        pieces = []
        for owner, count in enumerate(tokens):
            step = data.draw(st.integers(0, min(count - done[owner], 9)))
            pieces += [(owner, done[owner], done[owner] + step)] if step else []
            done[owner] += step
        splits.append(pieces)
    got = written_in_calls(raw, [s for s in splits if s], make[1], POOL_SPEC, padding=data.draw(st.booleans()))
    assert_same_index_cache(got, wanted)


@pytest.mark.parametrize("prefix", [840, 841, 842, 843])
@pytest.mark.parametrize("extend", [1, 6])
def test_a_block_that_straddles_two_calls_is_pooled_from_all_its_keys(prefix: int, extend: int) -> None:
    spec = QsaSpec()
    tokens = (prefix + extend, 13)
    raw = nasty.raw_keys(tokens, spec)
    caches = [nasty.empty_index_cache(tokens, spec) for _ in range(2)]
    splits = [[(0, 0, prefix), (1, 0, 10)], [(1, 10, 13), (0, prefix, prefix + extend)]]
    got = written_in_calls(raw, splits, caches[0], spec, padding=True)
    assert_same_index_cache(got, written_in_calls(raw, in_one_call(raw), caches[1], spec, padding=False))


@pytest.mark.parametrize("extend", [1, 2, 3])
def test_too_few_tokens_for_a_block_write_no_block(extend: int) -> None:
    spec = QsaSpec()
    tokens = (extend, 4)
    raw = nasty.raw_keys(tokens, spec)
    cache = written_in_calls(raw, in_one_call(raw), nasty.empty_index_cache(tokens, spec), spec, padding=True)
    assert cache.raw_keys is not None
    assert torch.equal(cache.raw_keys[0, :extend], raw.keys[0])
    assert bool(cache.raw_keys[0, extend:].isnan().all())
    page = int(cache.page_table[1, 0])
    wanted = reference.pool_block_key(raw.keys[1], raw.norm_weight, raw.cos[1][3], raw.sin[1][3], 1e-6)
    torch.testing.assert_close(cache.keys[page, 0], wanted)
    rest = cache.keys.clone()
    rest[page, 0] = float("nan")
    assert bool(rest.isnan().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cache_dtype", [None, FP8], ids=str)
def test_index_keys_are_those_of_the_reference(dtype: torch.dtype, cache_dtype: torch.dtype | None) -> None:
    spec = QsaSpec()
    tokens = (61, 0, 18)
    raw = nasty.raw_keys(tokens, spec, dtype)
    caches = [nasty.empty_index_cache(tokens, spec, cache_dtype or dtype, dtype, page_blocks=3) for _ in range(2)]
    got = written_in_calls(raw, in_one_call(raw), caches[0], spec, padding=False)
    rows = Rows.from_lengths(tokens, tokens)
    reference.write_index_keys(
        torch.cat(raw.keys), caches[1], rows, spec, raw.norm_weight, torch.cat(raw.cos), torch.cat(raw.sin), 1e-6
    )
    assert_same_ring_and_near_keys(got, caches[1], dtype)


def assert_same_ring_and_near_keys(got: IndexCache, wanted: IndexCache, dtype: torch.dtype) -> None:
    assert got.raw_keys is not None
    assert wanted.raw_keys is not None
    assert torch.equal(stored_bits(got.raw_keys), stored_bits(wanted.raw_keys))
    # The reference rounds FP64 results: another rounding of a step moves a number by a unit of its dtype or two.
    loosest = FP8 if got.keys.dtype == FP8 else dtype
    unit = torch.finfo(loosest).eps
    torch.testing.assert_close(got.keys.float(), wanted.keys.float(), rtol=2 * unit, atol=4 * unit, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pooling_rounds_as_transformers_does(dtype: torch.dtype) -> None:
    modeling = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp")
    spec = QsaSpec()
    raw = nasty.raw_keys((64,), spec, dtype)
    cache = written_in_calls(raw, in_one_call(raw), nasty.empty_index_cache((64,), spec, dtype, dtype), spec, False)
    norm = modeling.Qwen4ExpTextRMSNorm(spec.index_dim, eps=1e-6).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(raw.norm_weight)
        mean = raw.keys[0].view(16, 4, spec.index_dim).float().mean(dim=1).to(dtype)
        rotated = modeling.apply_rotary_pos_emb(
            norm(mean)[:, None], cos=raw.cos[0][::4], sin=raw.sin[0][::4], unsqueeze_dim=1
        )
    assert compare.same_bits(cache.keys[cache.page_table[0].long()].flatten(0, 1), rotated[:, 0])


def test_a_block_on_a_hole_is_dropped_and_its_raw_keys_are_kept() -> None:
    raw = nasty.raw_keys((14,), POOL_SPEC, rotary_dim=16)
    cache = nasty.empty_index_cache((14,), POOL_SPEC, page_blocks=1)
    pages = cache.page_table[0].clone()
    cache.page_table[0, 1] = -1
    written_in_calls(raw, [[(0, 0, 6)], [(0, 6, 14)]], cache, POOL_SPEC, padding=False)
    assert bool(cache.keys[int(pages[1])].isnan().all())
    assert bool(cache.keys[[int(pages[0]), int(pages[2])]].isfinite().all())
    assert cache.raw_keys is not None
    assert torch.equal(cache.raw_keys[0], raw.keys[0][[12, 13, 10, 11]])


def test_tokens_that_are_taken_back_leave_no_trace() -> None:
    # A ring of 8 lets the last 5 tokens be taken back: 3 draft tokens go, others come in their place.
    raw = nasty.raw_keys((22, 22), POOL_SPEC, rotary_dim=16)
    cache = nasty.empty_index_cache((22,), POOL_SPEC, page_blocks=2, ring_tokens=8)
    first = nasty.RawKeys(raw.keys[:1], raw.norm_weight, raw.cos[:1], raw.sin[:1])
    written_in_calls(first, [[(0, 0, 18)]], cache, POOL_SPEC, padding=False)
    other = torch.cat([raw.keys[0][:15], raw.keys[1][15:]])
    second = nasty.RawKeys((other,), raw.norm_weight, raw.cos[:1], raw.sin[:1])
    written_in_calls(second, [[(0, 15, 16)], [(0, 16, 22)]], cache, POOL_SPEC, padding=False)
    fresh = nasty.empty_index_cache((22,), POOL_SPEC, page_blocks=2, ring_tokens=8)
    assert_same_index_cache(cache, written_in_calls(second, [[(0, 0, 22)]], fresh, POOL_SPEC, padding=False))
