"""Attention that others got wrong, through the public calls on a CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import flashqsa
from flashqsa import KvCache, QsaSpec, Rows
from flashqsa.device import facts_of
from flashqsa.kernels import cpu
from flashqsa.route import CANDIDATES
from flashqsa.testing import compare, nasty
from flashqsa.testing.cases import FP32, Case, named, spec_of
from flashqsa.testing.inputs import Inputs, build, fill_unwritten, relocate, take_rows
from flashqsa.testing.selections import swap_one_block
from flashqsa.values import Selection
from tests.both_devices import DEVICES, LAYERS, SPARSE_ROUTES, attend, failures, kernels_of, on_host, plant, select

INF = float("inf")


def layer_case(layer: str, name: str, queries: tuple[int, ...], contexts: tuple[int, ...], **more: Any) -> Case:
    """A case of one of `LAYERS`."""
    spec, q_dtype, cache_dtype = LAYERS[layer]
    return Case(name, queries, contexts, spec, q_dtype, cache_dtype, **more)


def assert_same_bits(got: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    assert compare.same_bits(got[0], wanted[0]), "output"
    assert compare.same_bits(got[1], wanted[1]), "lse"


def assert_right(inputs: Inputs, selection: Selection | None, found: tuple[Tensor, Tensor], device: str) -> None:
    assert failures(inputs, selection, found, kernels_of(device)) == []


def causal(inputs: Inputs) -> Tensor:
    """Dense causal attention [rows, q_heads, head_dim] in FP64, from whole keys and one masked softmax per request."""
    cache, rows, spec = inputs.kv_cache, inputs.rows, inputs.spec
    output = torch.zeros(inputs.q.shape, dtype=torch.float64)
    for request in range(cache.requests):
        own = (rows.request == request).cpu() & rows.live.cpu()
        pages = cache.page_table[request].long()
        keys, values = (
            pool[pages].flatten(0, 1).double().cpu().repeat_interleave(spec.heads_per_kv_head, 1)
            for pool in (cache.keys, cache.values)
        )
        logits = torch.einsum("rhd,thd->rht", inputs.q.cpu()[own].double(), keys.nan_to_num()) * spec.softmax_scale
        seen = torch.arange(keys.shape[0]) <= rows.position.cpu()[own][:, None]
        weights = torch.where(seen[:, None], logits, -INF).softmax(dim=-1)
        output[own] = torch.einsum("rht,thd->rhd", weights, values.nan_to_num())
    return output


def near_causal(inputs: Inputs, output: Tensor) -> None:
    unit = torch.finfo(output.dtype).eps
    torch.testing.assert_close(output.cpu().double(), causal(inputs), rtol=4 * unit, atol=max(3e-5, 4 * unit))


# Little to do.


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layer", ["fp32-64", "bf16-256"])
@pytest.mark.parametrize("contexts", [(1, 2, 3, 3) * 8, (1, 2, 3, 5) * 8], ids=["no block", "some with one"])
def test_requests_without_a_block_attend_to_their_tails(contexts: tuple[int, ...], layer: str, device: str) -> None:
    """Stands for a schedule over no blocks at all, which reads the length after the last request's."""
    case = layer_case(layer, "tails", (1,) * 32, contexts, page_tokens=8, order="reversed", gate=False)
    inputs = build(case, device)
    assert inputs.kv_cache.page_table.shape == (32, 1)
    selection = select(inputs)
    assert selection.count.tolist() == [tokens // 4 for tokens in contexts]
    assert selection.blocks.max(dim=1).values.tolist() == [0 if tokens > 3 else -1 for tokens in contexts]
    arguments = (inputs.index_q, inputs.q, inputs.index_cache, inputs.kv_cache, inputs.rows, inputs.spec)
    joined = flashqsa.qsa_attention(*arguments)
    assert isinstance(joined, Tensor)
    near_causal(inputs, joined)
    for pin in (None, "xqa"):
        near_causal(inputs, attend(inputs, selection, route=pin)[0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["no-requests", "no-rows", "only-padding"])
def test_no_work_at_all_is_an_empty_result(name: str, device: str) -> None:
    """Stands for a batch of 0 and for launches of no program."""
    inputs = build(named(name), device)
    selection = select(inputs)
    output, lse = attend(inputs, selection)
    rows = inputs.rows.count
    assert selection.blocks.tolist() == [[-1] * inputs.spec.top_blocks] * rows
    assert (output.shape, lse.shape) == (inputs.q.shape, inputs.q.shape[:2])
    assert not bool(output.any())
    assert bool((lse == -INF).all())


@pytest.mark.parametrize("device", DEVICES)
def test_requests_without_rows_are_passed_over(device: str) -> None:
    """Stands for a request with no query rows in front of, among and behind others."""
    inputs = build(named("requests-without-rows"), device)
    selection = select(inputs)
    few = build(named("requests-without-rows"), device)
    kept = [1, 3]
    alone = replace(
        few,
        rows=Rows.from_lengths([4, 1], [60, 70], device=device),
        index_cache=replace(few.index_cache, page_table=few.index_cache.page_table[kept]),
        kv_cache=replace(few.kv_cache, page_table=few.kv_cache.page_table[kept]),
    )
    assert compare.same_selection(select(alone), selection) is None
    assert_right(inputs, selection, attend(inputs, selection), device)
    assert_right(alone, selection, attend(alone, selection), device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layer", ["fp16-64", "bf16-256"])
@pytest.mark.parametrize("tokens", [1, 3, 4, 7, 100, 1700, 2047])
@pytest.mark.parametrize("rows", [1, 20])
def test_below_the_budget_the_sparse_result_is_the_dense_one(rows: int, tokens: int, layer: str, device: str) -> None:
    """Stands for splits counted from the constant cap (29) and not from the context (7)."""
    rows = min(rows, tokens)
    case = layer_case(layer, "budget", (rows,), (tokens,), order="reversed", gate=False, peak=1.0)
    spec = replace(case.spec, top_blocks=512, kv_heads=1, q_heads=case.spec.heads_per_kv_head)
    inputs = build(replace(case, spec=spec), device)
    selection = select(inputs)
    for row, count in enumerate(on_host(selection).count.tolist()):
        assert count == (tokens - rows + row + 1) // 4
        assert selection.blocks[row].tolist() == [*range(count)] + [-1] * (512 - count)
    plans = [
        flashqsa.plan_batch(inputs.rows, inputs.spec, kv_cache=inputs.kv_cache, selection_given=given)
        for given in (True, False)
    ]
    sparse, dense = (attend(inputs, chosen, plan=p) for chosen, p in zip((selection, None), plans, strict=True))
    assert plans[1].attend_decision.route.mode == "dense"
    near_causal(inputs, sparse[0])
    near_causal(inputs, dense[0])
    if device == "cuda" and plans[0].attend_decision.route.kernel_set == plans[1].attend_decision.route.kernel_set:
        assert plans[0].attend.shape == plans[1].attend.shape
        assert_same_bits(sparse, dense)


# Memory that nobody wrote.


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layer", LAYERS)
def test_what_page_0_holds_changes_no_bit(layer: str, device: str) -> None:
    """Stands for a group whose entries are filled up with page 0, whose NaN survives a weight of 0."""
    # 8 rows whose union is 5 blocks, no multiple of any tile; pages stand from the last one back, page 0 is nobody's.
    inputs = build(layer_case(layer, "page-0", (8,), (18,), page_tokens=4, order="reversed"), device)
    assert not bool((inputs.kv_cache.page_table == 0).any())
    clean = fill_unwritten(inputs, "zeros")
    selection = select(clean)
    for chosen, pin in ((None, None), *((selection, pin) for pin in SPARSE_ROUTES)):
        wanted = attend(clean, chosen, route=pin)
        assert_right(clean, chosen, wanted, device)
        for pattern in ("nan", "infinity", "large", "fp32-bytes"):
            assert_same_bits(attend(fill_unwritten(inputs, pattern), chosen, route=pin), wanted)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layer", LAYERS)
def test_what_the_unused_half_of_a_page_holds_changes_no_bit(layer: str, device: str) -> None:
    """Stands for garbage past a sequence's end that moves an output by an ulp, and for bytes of a recycled page."""
    case = layer_case(layer, "half-full", (11, 1), (168, 72), page_tokens=16, order="reversed", exact_scores=False)
    inputs = build(case, device)
    clean = fill_unwritten(inputs, "zeros")
    selection = select(clean)
    for pin in SPARSE_ROUTES:
        wanted = attend(clean, selection, route=pin)
        assert_right(clean, selection, wanted, device)
        for pattern in ("large", "nan", "infinity", "fp32-bytes"):
            other = fill_unwritten(inputs, pattern)
            assert compare.same_selection(select(other), selection) is None
            assert_same_bits(attend(other, selection, route=pin), wanted)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layer", LAYERS)
def test_where_pages_lie_changes_no_bit(layer: str, device: str) -> None:
    """Stands for sums in the order of physical pages; groups of 8 rows and remainders of 3."""
    inputs = build(layer_case(layer, "placed", (19, 11), (211, 163), exact_scores=False), device)
    selection = select(inputs)
    for pin in SPARSE_ROUTES:
        wanted = attend(inputs, selection, route=pin)
        assert_right(inputs, selection, wanted, device)
        for order in ("identity", "reversed", "random"):
            moved = relocate(inputs, order, seed=11)
            assert compare.same_selection(select(moved), selection) is None
            assert_same_bits(attend(moved, selection, route=pin), wanted)


# Rows and groups.


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layer", LAYERS)
def test_a_row_that_selects_nothing_is_zero_and_its_neighbours_are_not(layer: str, device: str) -> None:
    """Stands for a skipped row whose output stays as it was, and for a read of index -1, before the list."""
    # The first, the middle and the last of 9 rows close a block, have no tail, and are given no block.
    inputs = build(layer_case(layer, "nothing", (9,), (12,), gate=False), device)
    whole = select(inputs)
    empty = torch.tensor([0, 4, 8], device=device)
    # Rows before and after the list name block 0: who reads them attends to it.
    blocks = torch.zeros(11, inputs.spec.top_blocks, dtype=torch.int32, device=device)
    count = torch.ones(11, dtype=torch.int32, device=device)
    blocks[1:10], count[1:10] = whole.blocks, whole.count
    blocks[1 + empty], count[1 + empty] = -1, 0
    given = Selection(blocks[1:10], count[1:10])
    for pin in SPARSE_ROUTES:
        output, lse = attend(inputs, given, route=pin)
        assert not bool(output[empty].any())
        assert (lse == -INF).any(dim=1).nonzero().flatten().tolist() == empty.tolist()
        assert bool((lse[empty] == -INF).all())
        assert_right(inputs, given, (output, lse), device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("layout", ["wide-view", "packed"])
def test_every_row_of_a_packed_batch_is_what_it_is_alone(layout: str, layer: str, device: str) -> None:
    """Stands for tiles that straddle requests, groups led by padding or of tails only, and strides that are assumed."""
    # Requests of 3, 8 and 13 rows; the first sees tails only. Padding leads the batch, a group, and ends the batch.
    case = layer_case(
        layer, "packed", (3, 8, 13), (3, 58, 113), page_tokens=16, layout=layout, padding=(0, 3, 3, 11, 24)
    )
    inputs = build(case, device)
    padding = ~inputs.rows.live
    inputs.q[padding] = 0
    assert int(padding.sum()) == 5
    selection = select(inputs)
    for pin in SPARSE_ROUTES:
        output, lse = attend(inputs, selection, route=pin)
        assert not bool(output[padding].any())
        assert bool((lse[padding] == -INF).all())
        assert_right(inputs, selection, (output, lse), device)
    together = attend(inputs, selection, batch_invariant=True)
    for row in range(inputs.rows.count):
        alone = take_rows(inputs, row, row + 1)
        assert compare.same_selection(select(alone), selection.slice(row, row + 1)) is None
        found = attend(alone, selection.slice(row, row + 1), batch_invariant=True)
        assert_same_bits(found, (together[0][row : row + 1], together[1][row : row + 1]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layer", LAYERS)
def test_the_route_that_runs_and_what_spoke_against_others_is_told(layer: str, device: str) -> None:
    """Stands for a guard on a layout that falls back in silence."""
    inputs = build(layer_case(layer, "told", (24,), (113,), layout="wide-view"), device)
    plan = flashqsa.plan_batch(inputs.rows, inputs.spec, kv_cache=inputs.kv_cache, index_cache=inputs.index_cache)
    for decision in (plan.select_decision, plan.attend_decision):
        chosen = decision.route
        assert chosen.kernel_set in facts_of(inputs.q.device).kernel_sets - {"reference"}
        told = {str(refusal.route) for refusal in decision.refused} | {str(route) for route in decision.unused}
        assert told | {str(chosen)} == {str(candidate.route) for candidate in CANDIDATES[chosen.stage]}
        assert str(decision).startswith(f"{chosen.stage}: {chosen}\n")
    assert plan.attend_decision.route.mode == "grouped"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layer", ["fp16-64", "bf16-256"])
@pytest.mark.parametrize("requests", [1, 2, 33])
def test_any_number_of_verify_rows_is_served(requests: int, layer: str, device: str) -> None:
    """Stands for odd numbers of rows per request: 3 was an illegal access where 1 and 2 were right."""
    spec, q_dtype, cache_dtype = LAYERS[layer]
    spec = replace(spec, kv_heads=1, q_heads=spec.heads_per_kv_head)
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12):
        # Contexts end at every place of a block, so rows cross none to three block ends.
        contexts = tuple(37 + request + rows for request in range(requests))
        inputs = build(Case("verify", (rows,) * requests, contexts, spec, q_dtype, cache_dtype), device)
        selection = select(inputs)
        found = attend(inputs, selection)
        assert failures(inputs, selection, found, kernels_of(device), most_rows=60) == []
        together = attend(inputs, selection, batch_invariant=True)
        for row in {0, rows - 1, inputs.rows.count // 2, inputs.rows.count - 1}:
            alone = take_rows(inputs, row, row + 1)
            assert compare.same_selection(select(alone), selection.slice(row, row + 1)) is None
            got = attend(alone, selection.slice(row, row + 1), batch_invariant=True)
            assert_same_bits(got, (together[0][row : row + 1], together[1][row : row + 1]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_negative_positions_are_inert(dtype: torch.dtype, device: str) -> None:
    """Stands for padded rows of which truncating and flooring division make different block counts."""
    plain = nasty.negative_positions(dtype)
    rows = Rows(plain.request.to(device), plain.position.to(device), plain.max_position)
    inputs = replace(build(Case("negative", (7,), (7,), spec_of(6, 1)), device), rows=rows)
    selection = select(inputs)
    assert selection.count.tolist() == [0, 0, 0, 0, 0, 1, 1]
    for pin in SPARSE_ROUTES:
        output, lse = attend(inputs, selection, route=pin)
        assert not bool(output[:3].any())
        assert bool((lse[:3] == -INF).all())
        assert bool(lse[3:].isfinite().all())
        assert_right(inputs, selection, (output, lse), device)


# Unions.


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layer", LAYERS)
def test_rows_that_share_no_block_attend_each_to_its_own(layer: str, device: str) -> None:
    """Stands for a union that is everybody's selection, or that is cut off where a list is full."""
    spec, q_dtype, cache_dtype = LAYERS[layer]
    spec = replace(spec, top_blocks=512)
    peaks = nasty.disjoint_peaks(spec, q_dtype, cache_dtype, device)
    arguments = (peaks.rows, spec)
    for pin in SPARSE_ROUTES:
        output = flashqsa.sparse_attention(peaks.q, peaks.cache, peaks.selection, *arguments, route=pin)
        assert isinstance(output, Tensor)
        torch.testing.assert_close(output.float(), torch.ones_like(output).float(), rtol=0, atol=6e-3)
        for row in range(8):
            # One block of one row: the peak goes, the decoy comes, and only this row moves, from 1 to -1.
            blocks = peaks.selection.blocks.clone()
            kept = [block for block in blocks[row].tolist() if block != peaks.peaks[row]]
            blocks[row] = torch.tensor(sorted([*kept, peaks.decoys[row]]), dtype=torch.int32, device=device)
            swapped = Selection(blocks, peaks.selection.count)
            moved = flashqsa.sparse_attention(peaks.q, peaks.cache, swapped, *arguments, route=pin)
            assert isinstance(moved, Tensor)
            sign = torch.ones(8, 1, 1, device=device)
            sign[row] = -1.0
            torch.testing.assert_close(moved.float(), sign.expand_as(moved), rtol=0, atol=6e-3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["disjoint", "disjoint-model-512"])
def test_each_block_of_a_row_counts_and_no_other(name: str, device: str) -> None:
    """Stands for single entries of a union that go to the wrong row: a flat softmax shows every one of them."""
    case = replace(named(name), peak=0.25, q_dtype=FP32, cache_dtype=FP32, gate=False)
    inputs = build(case, device)
    assert inputs.selection is not None
    near = swap_one_block(inputs.selection, inputs.rows, inputs.spec)
    for pin in SPARSE_ROUTES:
        found = attend(inputs, inputs.selection, route=pin)
        assert_right(inputs, inputs.selection, found, device)
        moved = (attend(inputs, near, route=pin)[0] - found[0]).abs().amax(dim=(1, 2))
        assert float(moved.min()) > 5e-4


# The tests above find what they stand for.


def adds(what: Callable[[KvCache, Rows], Tensor]) -> Callable[..., object]:
    """Attention plus something that must not matter."""

    def attention(q: Tensor, cache: KvCache, selection: Selection | None, rows: Rows, *rest: Any) -> object:
        output, lse = cpu.sparse_attention(q, cache, selection, rows, *rest)
        return output + what(cache, rows).to(output.dtype), lse

    return attention


def shares_the_union(q: Tensor, cache: KvCache, selection: Selection, *rest: Any) -> object:
    """Every row attends to what any row selects."""
    union = selection.blocks[selection.blocks >= 0].unique().to(torch.int32)
    everybody = Selection(union.repeat(selection.rows, 1), torch.full_like(selection.count, union.numel()))
    return cpu.sparse_attention(q, cache, everybody, *rest)


def cuts_lists_off(q: Tensor, cache: KvCache, selection: Selection, *rest: Any) -> object:
    """Entries past the 4,000th of the union are lost."""
    last = selection.blocks[selection.blocks >= 0].unique()[:4000].max()
    return cpu.sparse_attention(q, cache, Selection(selection.blocks, (selection.blocks <= last).sum(1).int()), *rest)


def takes_the_next_row_s_block(q: Tensor, cache: KvCache, selection: Selection, rows: Rows, spec: QsaSpec, *rest: Any):
    return cpu.sparse_attention(q, cache, swap_one_block(selection, rows, spec), rows, spec, *rest)


def attends_uniformly_in_padding(q: Tensor, cache: KvCache, selection: Selection, rows: Rows, *rest: Any) -> object:
    output, lse = cpu.sparse_attention(q, cache, selection, rows, *rest)
    output[~rows.live] = 0.25
    return output, lse


def leaves_empty_rows(q: Tensor, cache: KvCache, selection: Selection, rows: Rows, *rest: Any) -> object:
    output, lse = cpu.sparse_attention(q, cache, selection, rows, *rest)
    output[(lse == -INF).all(dim=1)] = float("nan")
    return output, lse


def reads_before_the_list(q: Tensor, cache: KvCache, selection: Selection, *rest: Any) -> object:
    """A row without entries takes what stands in memory before its own."""
    blocks, count = selection.blocks.clone(), selection.count.clone()
    before = selection.blocks.as_strided(blocks.shape, selection.blocks.stride(), selection.blocks.storage_offset() - 1)
    for row in (count == 0).nonzero().flatten().tolist():
        if int(before[row, 0]) >= 0:
            blocks[row, 0], count[row] = before[row, 0], 1
    return cpu.sparse_attention(q, cache, Selection(blocks, count), *rest)


def straddles_requests(q: Tensor, cache: KvCache, selection: Selection, rows: Rows, *rest: Any) -> object:
    """Rows of a group take its first row's request."""
    first = rows.request[torch.arange(rows.count) // 8 * 8]
    request = torch.where(rows.live & (first >= 0), first, rows.request)
    return cpu.sparse_attention(q, cache, selection, Rows(request, rows.position, rows.max_position), *rest)


def forgets_the_tail(q: Tensor, cache: KvCache, selection: Selection, rows: Rows, spec: QsaSpec, *rest: Any) -> object:
    whole = (rows.position + 1) // 4 * 4 - 1
    return cpu.sparse_attention(q, cache, selection, Rows(rows.request, whole, rows.max_position), spec, *rest)


FAULTS: dict[str, tuple[Callable[..., object], Callable[[str], None]]] = {
    "page 0": (
        adds(lambda cache, _: 0.0 * cache.values[0].float().sum()),
        partial(test_what_page_0_holds_changes_no_bit, "fp8-256"),
    ),
    "the unused half": (
        adds(lambda cache, _: 1e-2 * cache.values[int(cache.page_table[0, 10]), 15].float().mean()),
        partial(test_what_the_unused_half_of_a_page_holds_changes_no_bit, "fp16-64"),
    ),
    "physical ids": (
        adds(lambda cache, _: 1e-2 * cache.page_table[0, 3].float()),
        partial(test_where_pages_lie_changes_no_bit, "bf16-256"),
    ),
    "the union": (shares_the_union, partial(test_rows_that_share_no_block_attend_each_to_its_own, "fp16-64")),
    "a list cut off": (cuts_lists_off, partial(test_rows_that_share_no_block_attend_each_to_its_own, "fp16-64")),
    "one wrong block": (takes_the_next_row_s_block, partial(test_each_block_of_a_row_counts_and_no_other, "disjoint")),
    "padding attends": (
        attends_uniformly_in_padding,
        partial(test_every_row_of_a_packed_batch_is_what_it_is_alone, "packed", "fp16-64"),
    ),
    "a skipped row": (
        leaves_empty_rows,
        partial(test_a_row_that_selects_nothing_is_zero_and_its_neighbours_are_not, "fp16-64"),
    ),
    "before the list": (
        reads_before_the_list,
        partial(test_a_row_that_selects_nothing_is_zero_and_its_neighbours_are_not, "fp16-64"),
    ),
    "two requests in a group": (
        straddles_requests,
        partial(test_every_row_of_a_packed_batch_is_what_it_is_alone, "wide-view", "fp16-64"),
    ),
    "no tail": (
        forgets_the_tail,
        partial(test_requests_without_a_block_attend_to_their_tails, (1, 2, 3, 3) * 8, "fp32-64"),
    ),
    "no tail below the budget": (
        forgets_the_tail,
        partial(test_below_the_budget_the_sparse_result_is_the_dense_one, 20, 100, "fp16-64"),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong, test = FAULTS[fault]
    test("cpu")
    plant(monkeypatch, sparse_attention=wrong)
    with pytest.raises(AssertionError):
        test("cpu")
