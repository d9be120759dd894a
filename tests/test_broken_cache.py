"""Pooled keys, pages and score windows that others got wrong, through the public calls on a CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

import flashqsa
from flashqsa import IndexCache, InputError, KvCache, QsaSpec, Rows, pipeline, reference
from flashqsa.kernels import cpu
from flashqsa.plan import SelectPlan
from flashqsa.testing import compare, nasty
from flashqsa.testing.calls import attention_failures, pick_rows, product_dtype
from flashqsa.testing.cases import BF16, FP16, FP32, Case, spec_of
from flashqsa.testing.verify import verify_case
from flashqsa.values import FP8, Scores
from tests.both_devices import DEVICES, Piece, kernels_of, on_host, plant, poisoned_memory, write_pieces

SPEC = QsaSpec()


def stored_bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def assert_same_index_cache(got: IndexCache, wanted: IndexCache) -> None:
    """Both hold the same bytes, in pages and in rings, written or not."""
    assert got.raw_keys is not None
    assert wanted.raw_keys is not None
    assert torch.equal(stored_bits(got.keys), stored_bits(wanted.keys))
    assert torch.equal(stored_bits(got.raw_keys), stored_bits(wanted.raw_keys))


def key_of(cache: IndexCache, request: int, block: int) -> Tensor:
    """A request's stored block key, on the CPU."""
    page = int(cache.page_table[request, block // cache.page_blocks])
    return cache.keys[page, block % cache.page_blocks].cpu()


# Pooling.

EXTENDED: dict[str, list[tuple[int, int]]] = {
    "842 and 6": [(842, 6)],
    "every remainder": [(840, 6), (841, 7), (842, 5), (843, 4)],
    "decode rows in a prefill": [(841, 1), (0, 65), (842, 1), (843, 1)],
}
"""Tokens that an earlier call wrote, and those that a call adds."""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("name", EXTENDED)
def test_a_block_that_began_in_an_earlier_call_is_pooled_from_all_its_keys(
    name: str, dtype: torch.dtype, device: str
) -> None:
    """Stands for prefixes that are no multiple of a block: an assertion, or a mean of the new keys alone."""
    tokens = tuple(prefix + extend for prefix, extend in EXTENDED[name])
    raw = nasty.raw_keys(tokens, SPEC, dtype)
    got, wanted = (nasty.empty_index_cache(tokens, SPEC, dtype, dtype, device=device) for _ in range(2))
    parts: list[list[Piece]] = [[], []]
    for request, (prefix, extend) in enumerate(EXTENDED[name]):
        parts[0] += [(request, 0, prefix)] if prefix else []
        parts[1] += [(request, prefix, prefix + extend)]
    write_pieces(raw, parts[0], got, SPEC)
    write_pieces(raw, parts[1], got, SPEC, padding=True)
    write_pieces(raw, [(request, 0, count) for request, count in enumerate(tokens)], wanted, SPEC)
    assert_same_index_cache(got, wanted)
    unit = torch.finfo(dtype).eps
    for request, (prefix, _) in enumerate(EXTENDED[name]):
        block = prefix // 4
        if (block + 1) * 4 > tokens[request]:
            continue
        first = slice(block * 4, block * 4 + 4)
        angles = raw.cos[request][block * 4], raw.sin[request][block * 4]
        exact = reference.pool_block_key(raw.keys[request][first], raw.norm_weight, *angles, 1e-6)
        torch.testing.assert_close(key_of(got, request, block), exact, rtol=2 * unit, atol=4 * unit)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("extend", [1, 2, 3])
@pytest.mark.parametrize("padding", [False, True])
def test_fewer_tokens_than_a_block_write_no_block(padding: bool, extend: int, device: str) -> None:
    """Stands for a plan entry that is filled up to a whole block and reads past the new keys; one token is enough."""
    raw = nasty.raw_keys((extend,), SPEC)
    cache = nasty.empty_index_cache((extend,), SPEC, page_blocks=1, device=device)
    write_pieces(raw, [(0, 0, extend)], cache, SPEC, padding)
    assert cache.raw_keys is not None
    assert bool(cache.keys.isnan().all())
    assert torch.equal(cache.raw_keys[0, :extend].cpu(), raw.keys[0])
    assert bool(cache.raw_keys[0, extend:].isnan().all())


@pytest.mark.parametrize("device", DEVICES)
def test_rows_after_the_last_key_are_not_read(device: str) -> None:
    """Stands for padded entries that expand to keys behind the tensor, here NaN, and end up in a block's mean."""
    tokens = (4, 3)
    raw = nasty.raw_keys(tokens, SPEC)
    alone, padded, behind = (nasty.empty_index_cache(tokens, SPEC, page_blocks=1, device=device) for _ in range(3))
    pieces = [(0, 0, 4), (1, 0, 3)]
    write_pieces(raw, pieces, alone, SPEC)
    write_pieces(raw, pieces, padded, SPEC, padding=True)
    assert_same_index_cache(padded, alone)
    exact = reference.pool_block_key(raw.keys[0], raw.norm_weight, raw.cos[0][0], raw.sin[0][0], 1e-6)
    torch.testing.assert_close(key_of(alone, 0, 0), exact, rtol=1e-6, atol=1e-6)
    # The same rows in the middle of a buffer that is NaN around them.
    buffers = [torch.full((15, width), float("nan"), device=device) for width in (128, 64, 64)]
    whole = (torch.cat(raw.keys), torch.cat(raw.cos), torch.cat(raw.sin))
    keys, cos, sin = (buffer[4:11].copy_(rows) for buffer, rows in zip(buffers, whole, strict=True))
    rows = Rows.from_lengths(tokens, tokens, device=device)
    flashqsa.write_index_keys(keys, behind, rows, SPEC, norm_weight=raw.norm_weight.to(device), cos=cos, sin=sin)
    assert_same_index_cache(behind, alone)


@pytest.mark.parametrize("device", DEVICES)
def test_tokens_of_one_rotary_position_make_blocks_like_any_others(device: str) -> None:
    """Stands for blocks cut by position: 299 of an image's 300 tokens in one block."""
    positions = nasty.image_positions()
    tokens = positions.numel()
    raw = nasty.raw_keys((tokens,), SPEC, rope_positions=(positions,))
    cache = nasty.empty_index_cache((tokens,), SPEC, device=device)
    write_pieces(raw, [(0, 0, 131), (0, 131, tokens)], cache, SPEC)
    found = torch.stack([key_of(cache, 0, block) for block in range(tokens // 4)])
    wanted = reference.pool_block_key(
        raw.keys[0].view(-1, 4, 128), raw.norm_weight, raw.cos[0][::4], raw.sin[0][::4], 1e-6
    )
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_no_block_holds_tokens_of_two_requests(device: str) -> None:
    """Stands for blocks cut from a shared cache, whose tokens are of interleaved sequences."""
    tokens = (13, 13)
    raw = nasty.raw_keys(tokens, SPEC)
    got, wanted = (nasty.empty_index_cache(tokens, SPEC, page_blocks=2, device=device) for _ in range(2))
    for token in range(13):
        write_pieces(raw, [(token % 2, token, token + 1), (1 - token % 2, token, token + 1)], got, SPEC)
    for request in (0, 1):
        write_pieces(raw, [(request, 0, 13)], wanted, SPEC)
    assert_same_index_cache(got, wanted)
    assert int(got.keys.isfinite().all(dim=-1).sum()) == 6


# Pages.


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page_tokens", [16, 64, 784, 816, 832, 1568, 1600, 1616, 3008])
def test_pages_of_any_multiple_of_a_block_are_served(page_tokens: int, device: str) -> None:
    """Stands for page sizes taken for a power of two, or for that of another cache."""
    contexts = (page_tokens + 5, 2 * page_tokens - 1)
    case = Case("pages", (3, 2), contexts, spec_of(6, 1, top_blocks=24), FP16, FP16, page_tokens, order="reversed")
    result = verify_case(case, device)
    assert result.passed, str(result)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page_tokens", [16, 784])
@pytest.mark.parametrize("ring_tokens", [4, 8])
def test_the_ring_s_size_is_not_the_pages(ring_tokens: int, page_tokens: int, device: str) -> None:
    """Stands for a resume that takes the block size of the raw keys' ring for that of the pages."""
    tokens, spec = (page_tokens + 9,), spec_of(6, 1, top_blocks=4)
    raw = nasty.raw_keys(tokens, spec)
    options = {"page_blocks": page_tokens // 4, "ring_tokens": ring_tokens, "device": device}
    got, wanted = (nasty.empty_index_cache(tokens, spec, **options) for _ in range(2))  # type: ignore[arg-type]
    write_pieces(raw, [(0, 0, page_tokens - 2)], got, spec)
    write_pieces(raw, [(0, page_tokens - 2, tokens[0])], got, spec)
    write_pieces(raw, [(0, 0, tokens[0])], wanted, spec)
    assert_same_index_cache(got, wanted)
    index_q = torch.randn(5, 4, 128, generator=torch.Generator().manual_seed(2))
    rows = Rows.from_lengths([5], list(tokens))
    chosen = on_host(flashqsa.select_blocks(index_q.to(device), got, moved(rows, device), spec))
    plain = IndexCache(got.keys.cpu(), got.page_table.cpu())
    exact, low = (reference.score(index_q, plain, rows, spec, precision) for precision in (torch.float64, FP32))
    tolerance = compare.score_tolerance(low, exact)
    assert compare.selection_within_tolerance(chosen, exact, 4, tolerance) is None


def moved(rows: Rows, device: str) -> Rows:
    return Rows(rows.request.to(device), rows.position.to(device), rows.max_position)


@pytest.mark.parametrize("device", DEVICES)
def test_pages_that_cut_a_block_are_refused_by_name(device: str) -> None:
    """Stands for a page size of 6, which no block fits."""
    pool = torch.zeros(2, 2, 6, 1, 64, device=device)
    cache = KvCache.interleaved(pool, torch.zeros(1, 2, dtype=torch.int32, device=device))
    rows = Rows.from_lengths([1], [8], device=device)
    with pytest.raises(InputError, match="a page size that is a multiple of 4 tokens; got 6"):
        flashqsa.sparse_attention(torch.zeros(1, 6, 64, device=device), cache, None, rows, spec_of(6, 1))


def whole_numbers(*shape: int, seed: int = 0) -> Tensor:
    """Numbers from -3 to 3, whose products and sums are exact in FP32."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


def kernel_scores(index_q: Tensor, cache: IndexCache, rows: Rows, spec: QsaSpec) -> Scores:
    """Scores as the device's own kernel writes them over NaN."""
    plan = flashqsa.plan_batch(rows, spec, index_cache=cache)
    kernels = pipeline.kernel_set(plan.select_decision.route.kernel_set)
    with poisoned_memory():
        found = kernels.score(index_q, cache, rows, spec, plan.select)
    return Scores(found.values.cpu(), found.visible.cpu())


@pytest.mark.parametrize("device", DEVICES)
def test_every_key_of_every_page_is_scored(device: str) -> None:
    """Stands for a dropped in-page offset, which scores the first of 64 keys 64 times: 5,968 of 6,000 wrong."""
    spec = QsaSpec(top_blocks=75)
    keys = whole_numbers(150, 128)
    assert keys.unique(dim=0).shape[0] == 150
    pool = torch.full((3, 64, 128), float("nan"))
    for block in range(150):
        pool[2 - block // 64, block % 64] = keys[block]
    cache = IndexCache(pool.to(device), torch.tensor([[2, 1, 0]], dtype=torch.int32, device=device))
    index_q, rows = whole_numbers(1, 4, 128, seed=1), Rows.from_lengths([1], [600], device=device)
    dense = torch.relu(index_q[0] @ keys.T).sum(dim=0) * spec.score_scale
    found = kernel_scores(index_q.to(device), cache, rows, spec)
    torch.testing.assert_close(found.values[0, :150], dense, rtol=1e-6, atol=0)
    chosen = on_host(flashqsa.select_blocks(index_q.to(device), cache, rows, spec))
    assert chosen.blocks[0].tolist() == sorted(dense.argsort(descending=True, stable=True)[:75].tolist())


STARTS, ENDS = (0, 37, 90), (50, 100, 131)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_staggered_windows_keep_to_them(device: str) -> None:
    """Stands for a last tile that writes stray scores past a row's window, reads past the keys, or fills padding."""
    spec = QsaSpec(top_blocks=7)
    keys = whole_numbers(131, 128, seed=3)
    # One block per page: request r's window of the 131 keys, and no entry more.
    table = torch.full((3, 63), -1, dtype=torch.int32)
    for request, (start, end) in enumerate(zip(STARTS, ENDS, strict=True)):
        table[request, : end - start] = torch.arange(start, end, dtype=torch.int32)
    cache = IndexCache(keys[:, None].contiguous().to(device), table.to(device))
    lengths = [4 * (end - start) for start, end in zip(STARTS, ENDS, strict=True)]
    rows = Rows.from_lengths([3, 1, 5], lengths, pad_to=11, device=device)
    index_q = whole_numbers(11, 4, 128, seed=4)
    found = kernel_scores(index_q.to(device), cache, rows, spec)
    visible = rows.visible_blocks(spec).tolist()
    assert found.visible.tolist() == visible == [49, 49, 50, 63, 40, 40, 40, 40, 41, 0, 0]
    starts, ends = [*STARTS[:1] * 3, STARTS[1], *STARTS[2:] * 5, 0, 0], [*ENDS[:1] * 3, ENDS[1], *ENDS[2:] * 5, 0, 0]
    for row, seen in enumerate(visible):
        dense = torch.relu(index_q[row] @ keys[starts[row] : starts[row] + seen].T).sum(dim=0) * spec.score_scale
        torch.testing.assert_close(found.values[row, :seen], dense, rtol=1e-6, atol=0)
        # A CPU scores rows of one request together, over what the last of them sees.
        end = seen if device == "cuda" else ends[row] - starts[row]
        assert bool(found.values[row, end:].isnan().all()), f"row {row} is written past its window"
    chosen = on_host(flashqsa.select_blocks(index_q.to(device), cache, rows, spec))
    plain = IndexCache(cache.keys.cpu(), cache.page_table.cpu())
    wanted = reference.select_blocks(index_q, plain, moved(rows, "cpu"), spec)
    assert compare.same_selection(chosen, wanted) is None
    assert chosen.blocks[9:].tolist() == [[-1] * 7] * 2


# FP8.


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("head_dim", [64, 256])
def test_every_e4m3_number_comes_back_as_it_was(head_dim: int, device: str) -> None:
    """Stands for lost subnormals, a maximum of 240 or 448 off by a step, and scales that are applied twice."""
    spec = QsaSpec(q_heads=8, kv_heads=2, head_dim=head_dim, top_blocks=4)
    numbers = nasty.e4m3_extremes(2, head_dim)
    requests = numbers.shape[0]
    pool = torch.empty(requests, 2, 4, 2, head_dim, dtype=torch.uint8, device=device).fill_(0x7F).view(FP8)
    table = torch.arange(requests - 1, -1, -1, dtype=torch.int32, device=device)[:, None]
    scale = torch.tensor([2.0, 0.25])
    cache = KvCache.interleaved(pool, table, 0.5, scale.to(device))
    rows = Rows.from_lengths([1] * requests, [1] * requests, device=device)
    values = numbers * scale[:, None]
    flashqsa.write_kv((numbers * 0.5).to(device), values.to(device), cache, rows, spec)
    assert torch.equal(pool.flip(0)[:, 0, 0].float().cpu(), numbers)
    assert torch.equal(pool.flip(0)[:, 1, 0].float().cpu(), numbers)
    assert bool((pool.view(torch.uint8)[:, :, 1:] == 0x7F).all())
    # A row that sees one token gets its value, whatever its query; BF16 holds every E4M3 number.
    for dtype in (FP32, BF16):
        q = torch.ones(requests, 8, head_dim, dtype=dtype, device=device)
        output = flashqsa.sparse_attention(q, cache, None, rows, spec)
        assert isinstance(output, Tensor)
        assert torch.equal(output.float().cpu(), values.repeat_interleave(4, dim=1))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("head_dim", [64, 256])
def test_small_weights_that_hold_most_of_the_mass_count(head_dim: int, device: str) -> None:
    """Stands for probabilities that are rounded to FP8, the dtype of the values."""
    q, cache, rows, spec = nasty.tiny_weights(head_dim=head_dim, device=device)
    rest = 2047 * torch.exp(torch.tensor(-7.0, dtype=torch.float64))
    for dtype, unit in ((FP32, 1e-5 if device == "cpu" else 2e-3), (BF16, 4e-3)):
        output, lse = flashqsa.sparse_attention(q.to(dtype), cache, None, rows, spec, return_lse=True)
        wanted = torch.full((1, 1, head_dim), float((rest - 1) / (rest + 1)), dtype=torch.float64)
        torch.testing.assert_close(output.cpu().double(), wanted, rtol=0, atol=unit)
        torch.testing.assert_close(lse.cpu().double(), torch.log1p(rest).expand(1, 1), rtol=0, atol=unit)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("q_dtype", [FP32, FP16, BF16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 256])
def test_a_later_chunk_reads_the_fp8_cache_that_the_first_one_wrote(
    head_dim: int, q_dtype: torch.dtype, device: str
) -> None:
    """Stands for a first chunk that passes on its own keys and a second that fails on the cache's."""
    spec = spec_of(6, 2, head_dim, top_blocks=32)
    generator = torch.Generator().manual_seed(12)
    keys, values = torch.randn(2, 104, 2, head_dim, generator=generator).to(q_dtype)
    q = (torch.randn(104, 6, head_dim, generator=generator) * 3).to(q_dtype)
    pool = torch.empty(7, 2, 16, 2, head_dim, dtype=torch.uint8, device=device).fill_(0x7F).view(FP8)
    table = torch.tensor([[5, 2, 0, 1, 6, 3, 4]], dtype=torch.int32, device=device)
    k_scale, v_scale = (torch.tensor(scales, device=device) for scales in ([0.5, 0.25], [2.0, 1.5]))
    cache = KvCache.interleaved(pool, table, k_scale, v_scale)
    for start, stop in ((0, 40), (40, 104)):
        rows = Rows.from_lengths([stop - start], [stop], device=device)
        new = slice(start, stop)
        flashqsa.write_kv(keys[new].to(device), values[new].to(device), cache, rows, spec)
        output, lse = flashqsa.sparse_attention(q[new].to(device), cache, None, rows, spec, return_lse=True)
        rounding = product_dtype(kernels_of(device), FP8)
        picked = pick_rows(rows, 0)
        wrong, _ = attention_failures(output, lse, q[new].to(device), cache, None, rows, spec, None, picked, rounding)
        assert wrong == []
    for number, scales, new_numbers in ((0, k_scale, keys), (1, v_scale, values)):
        stored = pool[:, number][table[0].long()].flatten(0, 1)[:104].cpu()
        wanted = (new_numbers.float() / scales.cpu()[:, None]).clamp(-448, 448).to(FP8)
        assert torch.equal(stored_bits(stored), stored_bits(wanted))


# The tests above find what they stand for.


def forgets_earlier_calls(*arguments: object) -> None:
    cache = arguments[1]
    assert isinstance(cache, IndexCache)
    assert cache.raw_keys is not None
    cache.raw_keys.zero_()
    cpu.write_index_keys(*arguments)  # type: ignore[arg-type]


def fills_a_block_up(raw: Tensor, cache: IndexCache, rows: Rows, spec: QsaSpec, *rest: object) -> None:
    cpu.write_index_keys(raw, cache, rows, spec, *rest)  # type: ignore[arg-type]
    for request, at in zip(rows.request[rows.live].tolist(), rows.position[rows.live].tolist(), strict=True):
        page = int(cache.page_table[request, at // 4 // cache.page_blocks])
        if at % 4 < 3:
            cache.keys[page, at // 4 % cache.page_blocks] = raw[-1]


def reads_behind_the_rows(raw: Tensor, cache: IndexCache, *rest: object) -> None:
    behind = raw.as_strided((raw.shape[0] + 1, raw.shape[1]), raw.stride()) if raw.storage_offset() else raw
    cpu.write_index_keys(raw + 0.0 * behind[-1], cache, *rest)  # type: ignore[arg-type]


def scores_the_first_key_of_a_page(index_q: Tensor, cache: IndexCache, *rest: object) -> Scores:
    first = cache.keys[:, :1].expand(-1, cache.page_blocks, -1)
    return cpu.score(index_q, replace(cache, keys=first), *rest)  # type: ignore[arg-type]


def gives_padding_the_last_window(index_q: Tensor, cache: IndexCache, rows: Rows, spec: QsaSpec, plan: SelectPlan):
    scores = cpu.score(index_q, cache, rows, spec, plan)
    scores.values[~rows.live] = 1.0
    return Scores(scores.values, torch.where(rows.live, scores.visible, scores.visible[8]))


def scores_whole_tiles(index_q: Tensor, cache: IndexCache, rows: Rows, spec: QsaSpec, plan: SelectPlan) -> Scores:
    scores = cpu.score(index_q, cache, rows, spec, plan)
    return Scores(scores.values.nan_to_num(0.0), scores.visible)


def weighs_in_fp8(q: Tensor, cache: KvCache, *rest: object) -> object:
    scales = [float(scale or 1.0) for scale in (cache.k_scale, cache.v_scale)]
    keys, rows = (x.float().flatten(0, 1)[:, 0] * s for x, s in zip((cache.keys, cache.values), scales, strict=True))
    logits = keys @ q[0, 0].float() / q.shape[-1] ** 0.5
    weights = (logits - logits.max()).exp().to(FP8).float()
    return ((weights @ rows) / weights.sum()).expand(q.shape).to(q.dtype), torch.logsumexp(logits, 0).expand(1, 1)


def flushes_subnormals(q: Tensor, cache: KvCache, *rest: object) -> object:
    values = torch.where(cache.values.float().abs() < 2.0**-6, 0.0, cache.values.float()).to(FP8)
    return cpu.sparse_attention(q, replace(cache, values=values), *rest)  # type: ignore[arg-type]


FAULTS: dict[str, tuple[dict[str, Callable[..., object]], Callable[[str], None]]] = {
    "earlier keys forgotten": (
        {"write_index_keys": forgets_earlier_calls},
        partial(test_a_block_that_began_in_an_earlier_call_is_pooled_from_all_its_keys, "842 and 6", FP32),
    ),
    "a block filled up": (
        {"write_index_keys": fills_a_block_up},
        partial(test_fewer_tokens_than_a_block_write_no_block, False, 1),
    ),
    "rows behind": ({"write_index_keys": reads_behind_the_rows}, test_rows_after_the_last_key_are_not_read),
    "in-page offset": ({"score": scores_the_first_key_of_a_page}, test_every_key_of_every_page_is_scored),
    "padding's window": ({"score": gives_padding_the_last_window}, test_rows_of_staggered_windows_keep_to_them),
    "whole tiles": ({"score": scores_whole_tiles}, test_rows_of_staggered_windows_keep_to_them),
    "weights in FP8": (
        {"sparse_attention": weighs_in_fp8},
        partial(test_small_weights_that_hold_most_of_the_mass_count, 64),
    ),
    "no subnormals": (
        {"sparse_attention": flushes_subnormals},
        partial(test_every_e4m3_number_comes_back_as_it_was, 64),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong, test = FAULTS[fault]
    test("cpu")
    plant(monkeypatch, **wrong)
    with pytest.raises(AssertionError):
        test("cpu")
