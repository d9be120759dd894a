"""Selections that others got wrong, on a CPU and on a GPU: by the top-k on given scores, and by `select_blocks`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

import flashqsa
from flashqsa import IndexCache, QsaSpec, Rows, reference
from flashqsa.plan import SelectPlan
from flashqsa.testing import compare, nasty
from flashqsa.testing.cases import FP32, Case
from flashqsa.testing.inputs import build, relocate, take_rows
from flashqsa.values import Scores, Selection
from tests.both_devices import DEVICES, on_host, plant, poisoned_memory, rank, select

INF = float("inf")


def snug(scores: Scores) -> Scores:
    """The same scores in memory that ends with the longest row: what is read past it belongs to nobody."""
    return Scores(scores.values[:, : int(scores.visible.max())].clone(), scores.visible)


def check(scores: Scores, top_blocks: int, device: str) -> Selection:
    """The device's selection of given scores; it must be the full sort's, whatever lies past the rows."""
    got = rank(scores, top_blocks, device)
    assert compare.same_selection(got, reference.topk(scores, top_blocks)) is None
    assert compare.same_selection(rank(snug(scores), top_blocks, device), got) is None
    return got


def check_call(scores: Scores, top_blocks: int, device: str) -> Selection:
    """The selection of a public call whose index scores are the given ones, over poisoned memory."""
    call = nasty.call_of_scores(scores, top_blocks, device)
    with poisoned_memory():
        got = on_host(flashqsa.select_blocks(call.index_q, call.index_cache, call.rows, call.spec))
    assert compare.same_selection(got, reference.topk(scores, top_blocks)) is None
    return got


def best_ids(values: Tensor, top_blocks: int) -> list[int]:
    """Ids of the best of one row's finite scores, ascending, by Python's sort."""
    return sorted(sorted(range(values.numel()), key=lambda block: (-float(values[block]), block))[:top_blocks])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("top_blocks", [512, 1024, 2048])
@pytest.mark.parametrize("length", [16_384, 16_385])
def test_a_row_whose_scores_share_one_bin_keeps_its_best(length: int, top_blocks: int, device: str) -> None:
    """Stands for candidates dropped when the threshold's bin outgrows a buffer of fixed size."""
    scores = nasty.one_bin_overflow(length, 33)
    got = check(scores, top_blocks, device)
    assert got.blocks[32].tolist() == best_ids(scores.values[32, :length], top_blocks)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("held", "length"), [(3709, 3709), (4097, 4097), (3709, 8192), (4097, 32_768)])
def test_a_crowded_bin_of_a_longer_row_keeps_its_best(held: int, length: int, device: str) -> None:
    """Stands for smaller buffers of candidates, for rows of another length."""
    check(nasty.crowded_bin(held, length), 512, device)


@pytest.mark.parametrize("device", DEVICES)
def test_a_call_whose_scores_share_one_bin_keeps_its_best(device: str) -> None:
    """Stands for dropped candidates, seen from outside: no -1, no id twice, larger scores missing."""
    check_call(nasty.one_bin_overflow(16_385, 33), 512, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", [check, check_call])
def test_scores_that_only_fp32_tells_apart_are_no_ties(how: Callable[..., Selection], device: str) -> None:
    """Stands for a tie buffer whose key is the score cut to 16 bits, which keeps what came first."""
    scores = nasty.fp16_twins()
    got = how(scores, 512, device)
    for row in range(3):
        values = scores.values[row, :4196]
        chosen = values[got.blocks[row].long()]
        assert sorted(chosen[chosen >= 2].tolist()) == [2.0 + i for i in range(100)]
        assert sorted(chosen[chosen < 2].tolist()) == [1 + i * 2.0**-23 for i in range(4096 - 412, 4096)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("top_blocks", [511, 512, 513])
def test_a_bin_that_holds_just_what_is_missing_goes_in_whole(top_blocks: int, device: str) -> None:
    """Stands for a threshold that is never found where a bin's total equals what is still needed."""
    got = check(nasty.exact_bin_total(), top_blocks, device)
    assert got.count.tolist() == [top_blocks] * 4


@pytest.mark.parametrize("device", DEVICES)
def test_near_ties_are_told_apart_to_the_last_bit(device: str) -> None:
    """Stands for a last round that takes a stale counter's word: 286 of 512 ids wrong."""
    scores = nasty.near_ties()
    got = check(scores, 512, device)
    assert got.blocks[1].tolist() == best_ids(scores.values[1, :9407], 512)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("length", [513, 4097, 65_536])
@pytest.mark.parametrize("value", [0.75, 0.0])
def test_a_row_of_one_value_selects_the_lowest_ids(value: float, length: int, device: str) -> None:
    """Stands for a buffer of equals that is written past its end."""
    assert check(nasty.tie_plateau(length, value), 512, device).blocks.tolist() == [list(range(512))] * 2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("visible", [480, 512, 768, 1342, 8448])
def test_ties_at_the_cut_fall_the_same_in_every_call_and_company(visible: int, device: str) -> None:
    """Stands for an order, or a set, of equals that is the order of arrival: greedy output does not repeat."""
    scores = nasty.quantised_ties(visible, rows=512, width=65_536)
    wanted = reference.topk(Scores(scores.values[:, :visible], scores.visible), 512)
    buffer = scores.values.to(device)
    for rows in (64, 192, 512, *(512,) * 7):
        got = rank(Scores(buffer[:rows], scores.visible[:rows]), 512, device)
        assert compare.same_selection(got, wanted.slice(0, rows)) is None
    for start, stop in ((0, 1), (1, 34), (500, 512)):
        got = rank(Scores(buffer[start:stop, : visible + 1], scores.visible[start:stop]), 512, device)
        assert compare.same_selection(got, wanted.slice(start, stop)) is None


@pytest.mark.parametrize("device", DEVICES)
def test_ties_at_the_cut_of_a_call_go_to_the_lowest_ids(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands for members at the cut that depend on how rows are cut into launches."""
    scores = nasty.quantised_ties(1342, rows=200)
    scores.values.abs_()
    wanted = check_call(scores, 512, device)
    monkeypatch.setenv("FLASHQSA_WORKSPACE_MIB", "1")
    assert compare.same_selection(check_call(scores, 512, device), wanted) is None


@pytest.mark.parametrize("device", DEVICES)
def test_just_above_the_budget_the_cut_lies_among_zeros_and_the_lowest_ids_win(device: str) -> None:
    """Stands for natural ties: a block whose products are all negative scores 0, and right above k many do."""
    spec = QsaSpec(q_heads=1, kv_heads=1, head_dim=16)
    inputs = build(Case("zeros-at-the-cut", (80,), (2132,), spec, page_tokens=64, gate=False), device)
    host = build(inputs.case)
    exact = reference.score(host.index_q, host.index_cache, host.rows, spec)
    wanted = reference.topk(exact, 512)
    at_the_cut = [float(exact.values[row, wanted.blocks[row].long()].min()) for row in range(80)]
    assert sum(cut == 0.0 for cut in at_the_cut) > 60
    for other in (inputs, inputs, relocate(inputs, "identity"), relocate(inputs, "random")):
        assert compare.same_selection(on_host(select(other)), wanted) is None
    for start, stop in ((0, 1), (1, 18), (18, 80)):
        got = on_host(select(take_rows(inputs, start, stop)))
        assert compare.same_selection(got, wanted.slice(start, stop)) is None


@pytest.mark.parametrize("device", DEVICES)
def test_scores_beyond_fp16_are_ranked_in_fp32(device: str) -> None:
    """Stands for scores that collapse to one infinity, the value of lanes that fill a tile, in 149 rows of 1,001."""
    scores = nasty.beyond_fp16()
    assert check(scores, 512, device).count.tolist() == [512] * 149
    check_call(scores, 512, device)


@pytest.mark.parametrize("device", DEVICES)
def test_lanes_past_a_row_are_no_candidates(device: str) -> None:
    """Stands for fill lanes that count where fewer than k scores lie above the least FP16 number."""
    got = check(nasty.below_fp16(), 512, device)
    assert int(got.blocks.max()) < 1001
    assert got.count.tolist() == [512] * 149


@pytest.mark.parametrize("device", DEVICES)
def test_minus_infinity_is_never_selected_and_nothing_takes_its_place(device: str) -> None:
    """Stands for empty slots that are filled with the lowest number and win over real scores."""
    scores = nasty.infinite_floor()
    got = check(scores, 512, device)
    assert got.count.tolist() == [200] * 5
    for row in range(5):
        finite = scores.values[row, :600].isfinite().nonzero().flatten().tolist()
        assert got.blocks[row].tolist() == finite + [-1] * 312


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("top_blocks", [512, 599, 600])
def test_a_score_of_nan_is_never_selected(top_blocks: int, device: str) -> None:
    """Stands for NaN that ranks anywhere: first, last, or by its sign."""
    scores = nasty.one_nan()
    got = check(scores, top_blocks, device)
    assert got.count.tolist() == [min(top_blocks, 599), min(top_blocks, 599), 400, 0]
    for row in range(4):
        chosen = got.blocks[row, : int(got.count[row])].long()
        assert not bool(scores.values[row, chosen].isnan().any())


@pytest.mark.parametrize("device", DEVICES)
def test_a_block_whose_key_is_nan_is_never_selected(device: str) -> None:
    """Stands for NaN in a cache that becomes a random id, or takes others with it."""
    scores = nasty.scores_of(torch.arange(600.0).flip(0).repeat(3, 1))
    call = nasty.call_of_scores(scores, 512, device)
    keys = call.index_cache.keys.flip(0).flatten(0, 1)
    keys[[7, 100, 599]] = float("nan")
    pool = keys.view_as(call.index_cache.keys).flip(0).contiguous()
    cache = IndexCache(pool, call.index_cache.page_table)
    got = on_host(flashqsa.select_blocks(call.index_q, cache, call.rows, call.spec))
    assert got.blocks.tolist() == [[block for block in range(514) if block not in (7, 100)]] * 3


@pytest.mark.parametrize("device", DEVICES)
def test_what_lies_past_a_row_s_blocks_counts_for_nothing(device: str) -> None:
    """Stands for selectors that look beyond the visible prefix of a buffer that nobody cleared."""
    poisoned = nasty.garbage_past_prefix()
    seen = torch.arange(poisoned.values.shape[1]) < poisoned.visible[:, None]
    got = rank(poisoned, 512, device)
    assert got.count.tolist() == [5, 512, 512]
    clean = Scores(torch.where(seen, poisoned.values, 0.0), poisoned.visible)
    assert compare.same_selection(got, rank(clean, 512, device)) is None
    assert compare.same_selection(got, reference.topk(clean, 512)) is None
    check_call(poisoned, 512, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("length", [24_281, 24_520, 32_768, 65_535, 65_536])
def test_a_long_row_is_ranked_whole(length: int, device: str) -> None:
    """Stands for selectors that must hold a row in shared memory, and for grids that end at 65,535."""
    scores = nasty.long_row(length)
    check(scores, 512, device)
    check_call(scores, 512, device)


@pytest.mark.parametrize("device", DEVICES)
def test_blocks_are_ranked_and_then_expanded(device: str) -> None:
    """Stands for ranking a copy of a block's score per token, where a width of 2,051 cuts inside a block."""
    got = check(nasty.distinct_blocks_with_tail(), 512, device)
    rows = Rows.from_lengths([1], [2403])
    tokens = got.to_token_table(rows, QsaSpec(), count_column=True)[0].tolist()
    assert tokens[-1] == 2051
    assert tokens[2048:2051] == [2400, 2401, 2402]
    assert tokens[:2048] == [4 * block + offset for block in got.blocks[0].tolist() for offset in range(4)]


@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_see_fewer_blocks_than_k_take_them_all(device: str) -> None:
    """Stands for 'k out of range' at 1, 3, 4, 7, 100 and 2,047 tokens."""
    got = check(nasty.short_rows(), 512, device)
    assert got.count.tolist() == [0, 0, 1, 1, 25, 511, 0]
    rows = Rows.from_lengths([1] * 6, [1, 3, 4, 7, 100, 2047], device=device)
    table = torch.arange(6, dtype=torch.int32, device=device)[:, None]
    cache = IndexCache(torch.full((6, 511, 128), float("nan"), device=device), table)
    index_q = torch.ones(6, 4, 128, dtype=FP32, device=device)
    public = on_host(flashqsa.select_blocks(index_q, cache, rows, QsaSpec()))
    assert compare.same_selection(public, got.slice(0, 6)) is None


# The tests above find what they stand for.


def ranked_by(key: Callable[[Tensor], Tensor], highest: bool = False, lanes: int = 0) -> Callable[..., None]:
    """A top-k that ranks by a key of each row, finds the highest ids among equals, or looks at lanes past the row."""

    def topk(scores: Scores, out: Selection, _plan: SelectPlan) -> None:
        out.blocks.fill_(-1)
        for row, visible in enumerate(scores.visible.tolist()):
            keys = key(scores.values[row, : min(visible + lanes, scores.values.shape[1])])
            order = torch.sort(keys.flip(0) if highest else keys, descending=True, stable=True)
            ids = keys.numel() - 1 - order.indices if highest else order.indices
            chosen = ids[order.values > -INF][: out.blocks.shape[1]].sort().values
            out.blocks[row, : chosen.numel()] = chosen.to(torch.int32)
            out.count[row] = chosen.numel()

    return topk


def first_of_a_bin(limit: int, values: Tensor) -> Tensor:
    """Scores of which the threshold's bin, of 11 bits, keeps no more than came first."""
    bins = values.view(torch.int32) >> 21
    last = bins[values.argsort(descending=True)[min(511, values.numel() - 1)]]
    held = (bins == last).nonzero().flatten()[limit:]
    return values.index_fill(0, held, -INF)


def without_a_full_bin(values: Tensor) -> Tensor:
    """Scores without the smallest bin, of 11 bits, whose members end exactly at 512."""
    for bound in (values.view(torch.int32) >> 21).unique():
        above = values.view(torch.int32) >> 21 >= bound
        if int(above.sum()) == 512:
            return torch.where(values.view(torch.int32) >> 21 == bound, -INF, values)
    return values


def no_nan(values: Tensor) -> Tensor:
    return values.nan_to_num(-INF, posinf=INF, neginf=-INF)


FAULTS: dict[str, tuple[Callable[..., None], Callable[[str], None]]] = {
    "4,096 candidates": (
        ranked_by(partial(first_of_a_bin, 4096)),
        partial(test_a_row_whose_scores_share_one_bin_keeps_its_best, 16_385, 512),
    ),
    "4,096 candidates of a call": (
        ranked_by(partial(first_of_a_bin, 4096)),
        test_a_call_whose_scores_share_one_bin_keeps_its_best,
    ),
    "3,708 candidates": (
        ranked_by(partial(first_of_a_bin, 3708)),
        partial(test_a_crowded_bin_of_a_longer_row_keeps_its_best, 3709, 8192),
    ),
    "16-bit keys": (
        ranked_by(lambda values: values.half().float()),
        partial(test_scores_that_only_fp32_tells_apart_are_no_ties, check),
    ),
    "16-bit keys beyond FP16": (
        ranked_by(lambda values: values.half().float()),
        test_scores_beyond_fp16_are_ranked_in_fp32,
    ),
    "a full bin": (
        ranked_by(without_a_full_bin),
        partial(test_a_bin_that_holds_just_what_is_missing_goes_in_whole, 512),
    ),
    "coarse last round": (
        ranked_by(lambda values: (values.view(torch.int32) >> 8).float()),
        test_near_ties_are_told_apart_to_the_last_bit,
    ),
    "highest ids": (
        ranked_by(no_nan, highest=True),
        partial(test_a_row_of_one_value_selects_the_lowest_ids, 0.0, 513),
    ),
    "highest ids at the cut": (
        ranked_by(no_nan, highest=True),
        partial(test_ties_at_the_cut_fall_the_same_in_every_call_and_company, 768),
    ),
    "highest zeros": (
        ranked_by(no_nan, highest=True),
        test_just_above_the_budget_the_cut_lies_among_zeros_and_the_lowest_ids_win,
    ),
    "fill lanes": (ranked_by(no_nan, lanes=3), test_lanes_past_a_row_are_no_candidates),
    "minus infinity": (
        ranked_by(lambda values: values.nan_to_num(-3e38, posinf=3e38, neginf=-3e38)),
        test_minus_infinity_is_never_selected_and_nothing_takes_its_place,
    ),
    "NaN first": (
        ranked_by(lambda values: values.nan_to_num(INF, neginf=-INF)),
        partial(test_a_score_of_nan_is_never_selected, 512),
    ),
    "NaN key first": (
        ranked_by(lambda values: values.nan_to_num(INF, neginf=-INF)),
        test_a_block_whose_key_is_nan_is_never_selected,
    ),
    "the whole buffer": (ranked_by(no_nan, lanes=1 << 20), test_what_lies_past_a_row_s_blocks_counts_for_nothing),
    "half a long row": (
        ranked_by(lambda values: no_nan(values)[:32_768]),
        partial(test_a_long_row_is_ranked_whole, 65_535),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong, test = FAULTS[fault]
    plant(monkeypatch, topk=wrong)
    with pytest.raises(AssertionError):
        test("cpu")


def test_the_plain_sort_that_faults_are_made_from_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, topk=ranked_by(no_nan))
    for test in (
        partial(test_a_crowded_bin_of_a_longer_row_keeps_its_best, 3709, 8192),
        partial(test_a_bin_that_holds_just_what_is_missing_goes_in_whole, 512),
        test_near_ties_are_told_apart_to_the_last_bit,
        test_lanes_past_a_row_are_no_candidates,
        test_minus_infinity_is_never_selected_and_nothing_takes_its_place,
        partial(test_a_score_of_nan_is_never_selected, 512),
        test_what_lies_past_a_row_s_blocks_counts_for_nothing,
    ):
        test("cpu")
