"""Calls of a size or kind that only a GPU meets: long rows, many rows, far pages, mixed batches, several devices.

Memory is made on the device, so that none of it waits for the host.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import flashqsa
from flashqsa import IndexCache, KvCache, QsaSpec, Rows, Selection
from flashqsa.testing import compare, nasty
from flashqsa.testing.calls import attention_failures, pick_rows, product_dtype, selection_failure
from flashqsa.testing.cases import BF16, FP16, FP32, Case
from flashqsa.testing.inputs import build, relocate, take_rows
from flashqsa.values import FP8
from tests.both_devices import on_host, poisoned_memory

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


def random(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE, dtype=FP32).to(dtype)


def whole_numbers(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> Tensor:
    """Numbers from -2 to 2, whose products and sums are exact in FP32: a selection does not depend on their order."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator, device=DEVICE).to(dtype)


def shuffled_table(requests: int, pages: int, seed: int = 0) -> Tensor:
    """A page table of requests that share all their pages, in random order."""
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(seed))
    return order.to(torch.int32).repeat(requests, 1).to(DEVICE)


# Long rows and many of them.


@pytest.mark.parametrize("blocks", [24_281, 24_520, 32_768, 65_535, 65_536])
@pytest.mark.parametrize("planted", [10, 24_000])
def test_a_planted_block_wins_however_long_the_row(planted: int, blocks: int) -> None:
    """Stands for a row that must fit shared memory (from 24,281 blocks on), and for grids that end at 65,535."""
    index_q, cache, rows, spec = nasty.planted_block(5, blocks, planted, 8, BF16, DEVICE)
    with poisoned_memory():
        found = flashqsa.select_blocks(index_q, cache, rows, spec)
    assert found.blocks.tolist() == [[*range(7), planted]] * 5


@pytest.mark.parametrize("planted", [10, 50_000])
@pytest.mark.parametrize(("rows", "mib"), [(8192, 128), (8192, 4096), (32_800, 12_288)])
def test_a_planted_block_wins_in_every_row_of_a_very_large_call(
    rows: int, mib: int, planted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stands for score tensors of 2^31 elements and more, whose head sum came out as 0: the last k were selected."""
    monkeypatch.setenv("FLASHQSA_WORKSPACE_MIB", str(mib))
    index_q, cache, live, spec = nasty.planted_block(rows, 65_536, planted, 8, BF16, DEVICE)
    plan = flashqsa.plan_batch(live, spec, index_cache=cache)
    if rows > 8192:
        assert plan.select.chunk_rows * plan.select.width_blocks > 1 << 31
    with poisoned_memory():
        found = flashqsa.select_blocks(index_q, cache, live, spec, plan=plan)
    wanted = torch.tensor([*range(7), planted], dtype=torch.int32, device=DEVICE)
    assert torch.equal(found.blocks, wanted.expand_as(found.blocks))
    assert bool((found.count == 8).all())


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_more_rows_than_a_grid_s_second_axis_has(dtype: torch.dtype) -> None:
    """Stands for launches that end at 65,535 rows: a prompt of 65,540 tokens is written, selected and attended to."""
    tokens, page_tokens = 65_540, 64
    spec = QsaSpec(q_heads=2, kv_heads=1, head_dim=64, index_heads=2, index_dim=32, top_blocks=4)
    pages = -(-tokens // page_tokens)
    table = shuffled_table(1, pages)
    pool = torch.full((pages, 2, page_tokens, 1, 64), float("nan"), dtype=dtype, device=DEVICE)
    cache = KvCache.interleaved(pool, table)
    keys = torch.full((pages, page_tokens // 4, 32), float("nan"), dtype=dtype, device=DEVICE)
    ring = torch.full((1, 4, 32), float("nan"), dtype=dtype, device=DEVICE)
    index = IndexCache(keys, table, raw_keys=ring)
    rows = Rows.from_lengths([tokens], [tokens], device=DEVICE)
    new = random(2, tokens, 1, 64, seed=1, dtype=dtype)
    flashqsa.write_kv(new[0], new[1], cache, rows, spec)
    angle = torch.zeros(tokens, 8, dtype=dtype, device=DEVICE)
    raw, weight = random(tokens, 32, seed=2, dtype=dtype), torch.zeros(32, dtype=dtype, device=DEVICE)
    flashqsa.write_index_keys(raw, index, rows, spec, norm_weight=weight, cos=angle + 1, sin=angle)
    assert torch.equal(pool[table[0].long(), 0].flatten(0, 1)[:tokens], new[0])
    assert torch.equal(pool[table[0].long(), 1].flatten(0, 1)[:tokens], new[1])
    assert bool(keys[table[0].long()].flatten(0, 1)[: tokens // 4].isfinite().all())
    index_q, q = random(tokens, 2, 32, seed=3, dtype=dtype), random(tokens, 2, 64, seed=4, dtype=dtype)
    with poisoned_memory():
        selection = flashqsa.select_blocks(index_q, index, rows, spec)
        output, lse = flashqsa.sparse_attention(q, cache, selection, rows, spec, return_lse=True)
    assert bool(output.isfinite().all())
    picked = pick_rows(rows, 40)
    assert selection_failure(selection, index_q, index, rows, spec, picked) is None
    rounding = product_dtype("smxx", dtype)
    wrong, _ = attention_failures(output, lse, q, cache, selection, rows, spec, None, picked, rounding)
    assert wrong == []


# Far pages.


@pytest.mark.parametrize(
    ("page_stride", "page"),
    [(1_540_096, 1395), (1_638_400, 1311), (32_768, 65_536), (1_039_680, 2066), (1_039_680, 4132)],
)
@pytest.mark.parametrize("q_dtype", [BF16, FP32], ids=str)
def test_a_page_past_2_to_the_31_elements_is_like_any_other(q_dtype: torch.dtype, page_stride: int, page: int) -> None:
    """Stands for a page id times a page stride in 32 bits: a crash, or NaN from finite inputs."""
    spec = QsaSpec()
    keys, values = nasty.far_page(page_stride, page, device=DEVICE)
    assert page * page_stride > (1 << 31) - page_stride
    rows = Rows.from_lengths([16], [16], device=DEVICE)
    new, q = random(2, 16, 2, 256, seed=2, dtype=q_dtype), random(16, 24, 256, seed=3, dtype=q_dtype)
    found = []
    for at in (page, 0):
        cache = KvCache(keys, values, torch.tensor([[at]], dtype=torch.int32, device=DEVICE), 0.5, 2.0)
        flashqsa.write_kv(new[0], new[1], cache, rows, spec)
        found.append(flashqsa.sparse_attention(q, cache, None, rows, spec, return_lse=True))
        assert torch.equal(keys[at].float(), (new[0].float() / 0.5).clamp(-448, 448).to(FP8).float())
    assert compare.same_bits(found[0][0], found[1][0])
    assert compare.same_bits(found[0][1], found[1][1])
    assert bool(found[0][0].isfinite().all())


def test_an_index_page_past_2_to_the_31_elements_is_like_any_other() -> None:
    """Stands for the same product in the scores, and in the writing of pooled keys."""
    spec, page_stride, page = QsaSpec(top_blocks=2), 65_536, 32_768
    pool = torch.empty((page + 1) * page_stride, dtype=torch.uint8, device=DEVICE).view(FP8)
    keys = pool.as_strided((page + 1, 16, 128), (page_stride, 128, 1))
    raw = nasty.raw_keys((64,), spec, BF16)
    rows, last = Rows.from_lengths([64], [64], device=DEVICE), Rows.from_lengths([9], [64], device=DEVICE)
    index_q = random(9, 4, 128)
    found: list[Selection] = []
    for at in (page, 0):
        table = torch.tensor([[at]], dtype=torch.int32, device=DEVICE)
        ring = torch.full((1, 4, 128), float("nan"), dtype=BF16, device=DEVICE)
        cache = IndexCache(keys, table, 0.5, ring)
        weight, cos, sin = (part.to(DEVICE) for part in (raw.norm_weight, raw.cos[0], raw.sin[0]))
        flashqsa.write_index_keys(raw.keys[0].to(DEVICE), cache, rows, spec, norm_weight=weight, cos=cos, sin=sin)
        found.append(on_host(flashqsa.select_blocks(index_q, cache, last, spec)))
    assert torch.equal(keys[page].view(torch.uint8), keys[0].view(torch.uint8))
    assert compare.same_selection(found[0], found[1]) is None
    assert bool((found[0].count == 2).all())


# Long decodes and mixed batches.


@pytest.mark.parametrize("cache_dtype", [BF16, FP8], ids=str)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_decode_past_120_000_tokens_is_right(rows: int, cache_dtype: torch.dtype) -> None:
    """Stands for a kernel of a device's family that is silently wrong on the device, at lengths no test reached."""
    spec, tokens, page_tokens = QsaSpec(q_heads=12, kv_heads=1), 131_075, 784
    pages = -(-tokens // page_tokens)
    table = shuffled_table(1, pages)
    scale = 0.5 if cache_dtype == FP8 else None
    pool = random(pages, 2, page_tokens, 1, 256, seed=1, dtype=cache_dtype)
    cache = KvCache.interleaved(pool, table, scale, scale)
    index = IndexCache(random(pages, page_tokens // 4, 128, seed=2, dtype=cache_dtype), table, scale)
    live = Rows.from_lengths([rows], [tokens], device=DEVICE)
    index_q, q = random(rows, 4, 128, seed=3), random(rows, 12, 256, seed=4) * 2
    with poisoned_memory():
        selection = flashqsa.select_blocks(index_q, index, live, spec)
        output, lse = flashqsa.sparse_attention(q, cache, selection, live, spec, return_lse=True)
    picked = pick_rows(live, 0)
    assert selection_failure(selection, index_q, index, live, spec, picked) is None
    rounding = product_dtype("smxx", cache_dtype)
    wrong, _ = attention_failures(output, lse, q, cache, selection, live, spec, None, picked, rounding)
    assert wrong == []


@pytest.mark.parametrize("prefill_first", [True, False])
def test_a_mixed_batch_gives_each_part_what_it_gets_apart(prefill_first: bool) -> None:
    """Stands for a decode row that the prefill's scorer or grid serves, and the other way round."""
    spec, page_tokens, tokens = QsaSpec(q_heads=12, kv_heads=1), 64, 200_000
    pages = -(-tokens // page_tokens)
    queries = [2048, *[1] * 7] if prefill_first else [*[1] * 7, 2048]
    contexts = [tokens - 1000 * request for request in range(8)]
    table = torch.stack([shuffled_table(1, pages, seed)[0] for seed in range(8)])
    cache = KvCache.interleaved(random(pages, 2, page_tokens, 1, 256, seed=1), table)
    index = IndexCache(whole_numbers(pages, page_tokens // 4, 128, seed=2), table)
    rows = Rows.from_lengths(queries, contexts, device=DEVICE)
    index_q, q = whole_numbers(rows.count, 4, 128, seed=3), random(rows.count, 12, 256, seed=4) * 2

    def parts(first: int, last: int, start: int, stop: int) -> tuple[Selection, Tensor, Tensor]:
        """Requests first to last, whose rows are start to stop, as a call of their own."""
        few = Rows.from_lengths(queries[first:last], contexts[first:last], device=DEVICE)
        own_index = IndexCache(index.keys, table[first:last])
        own_cache = KvCache(cache.keys, cache.values, table[first:last])
        with poisoned_memory():
            found = flashqsa.select_blocks(index_q[start:stop], own_index, few, spec)
            arguments = (q[start:stop], own_cache, found, few, spec)
            output, lse = flashqsa.sparse_attention(*arguments, return_lse=True)
        return found, output, lse

    selection, output, lse = parts(0, 8, 0, rows.count)
    rows_cut, request_cut = (2048, 1) if prefill_first else (7, 7)
    apart = parts(0, request_cut, 0, rows_cut), parts(request_cut, 8, rows_cut, rows.count)
    blocks, count = (torch.cat([getattr(part[0], name) for part in apart]) for name in ("blocks", "count"))
    assert compare.same_selection(on_host(selection), on_host(Selection(blocks, count))) is None
    torch.testing.assert_close(output, torch.cat([part[1] for part in apart]), rtol=2**-6, atol=2**-8)
    torch.testing.assert_close(lse, torch.cat([part[2] for part in apart]), rtol=0, atol=2e-3)
    picked = pick_rows(rows, 30)
    wrong, _ = attention_failures(output, lse, q, cache, selection, rows, spec, None, picked, BF16)
    assert wrong == []


# Several devices and placements.


def test_ranks_agree_on_every_block_whatever_else_they_do() -> None:
    """Stands for tensor-parallel ranks that pick other sets, from other page layouts and batch neighbours."""
    case = Case(
        "ranks", (5, 40, 1), (2300, 2140, 3000), QsaSpec(q_heads=2, kv_heads=1, head_dim=64), BF16, BF16, 64, gate=False
    )
    devices = [f"cuda:{index}" for index in range(min(torch.cuda.device_count(), 2))]
    found: list[Selection] = []
    for rank, device in enumerate(devices * 2):
        inputs = build(case, device)
        if rank:
            inputs = relocate(inputs, ("identity", "reversed", "random")[rank % 3], seed=rank)
        arguments = (inputs.index_cache, inputs.rows, inputs.spec)
        found.append(on_host(flashqsa.select_blocks(inputs.index_q, *arguments)))
        few = take_rows(inputs, 3, 30)
        part = on_host(flashqsa.select_blocks(few.index_q, few.index_cache, few.rows, few.spec))
        assert compare.same_selection(part, found[0].slice(3, 30)) is None
    assert [compare.same_selection(other, found[0]) for other in found] == [None] * len(found)


@pytest.mark.parametrize("batch", [1, 2, 33])
def test_odd_numbers_of_verify_rows_of_the_released_model(batch: int) -> None:
    """Stands for 3 rows per request, an illegal access or an assertion where 1 and 2 were right."""
    spec, tokens, page_tokens = QsaSpec(), 3000, 64
    pages = -(-tokens // page_tokens)
    table = torch.stack([shuffled_table(1, pages, seed)[0] for seed in range(batch)])
    cache = KvCache.interleaved(random(pages, 2, page_tokens, 2, 256, seed=1), table)
    index = IndexCache(whole_numbers(pages, page_tokens // 4, 128, seed=2), table)
    for rows in range(1, 9):
        contexts = [tokens - 3 * request for request in range(batch)]
        live = Rows.from_lengths([rows] * batch, contexts, device=DEVICE)
        index_q, q = whole_numbers(live.count, 4, 128, seed=rows), random(live.count, 24, 256, seed=rows)
        with poisoned_memory():
            selection = flashqsa.select_blocks(index_q, index, live, spec)
            output, lse = flashqsa.sparse_attention(q, cache, selection, live, spec, return_lse=True)
        picked = pick_rows(live, 9)
        assert selection_failure(selection, index_q, index, live, spec, picked) is None
        wrong, _ = attention_failures(output, lse, q, cache, selection, live, spec, None, picked, BF16)
        assert wrong == []
        for row in {0, rows - 1, live.count // 2, live.count - 1}:
            few, alone, chosen = slice(row, row + 1), live.slice(row, row + 1), selection.slice(row, row + 1)
            again = flashqsa.select_blocks(index_q[few], index, alone, spec)
            assert compare.same_selection(on_host(again), on_host(chosen)) is None
            single = flashqsa.sparse_attention(q[few], cache, chosen, alone, spec)
            assert isinstance(single, Tensor)
            torch.testing.assert_close(single, output[few], rtol=2**-6, atol=2**-8)
