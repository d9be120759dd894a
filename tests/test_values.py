"""The values: row builders, visible blocks and tails, token tables there and back, cache views, read-only use."""

from __future__ import annotations

import dataclasses
import doctest

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashqsa import reference, values
from flashqsa.testing import compare, nasty
from flashqsa.values import FP8, KvCache, QsaSpec, Rows, Scores, Selection

SPEC = QsaSpec()
PAD = (-1, -1)


def rows_at(*entries: tuple[int, int]) -> Rows:
    """Rows at (request, position)."""
    return Rows.from_tensors(torch.tensor([r for r, _ in entries]), torch.tensor([p for _, p in entries]))


def test_examples_in_docstrings_run() -> None:
    tried = doctest.testmod(values)
    assert tried.attempted > 15
    assert tried.failed == 0


# Specs.


def test_the_released_model() -> None:
    assert (SPEC.heads_per_kv_head, SPEC.budget, SPEC.selection_width) == (12, 2048, 2051)
    assert SPEC.softmax_scale == 256**-0.5
    assert SPEC.score_scale == pytest.approx(128**-0.5)


def test_values_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SPEC.top_blocks = 1  # type: ignore[misc]
    rows = Rows.from_lengths([1], [1])
    with pytest.raises(dataclasses.FrozenInstanceError):
        rows.max_position = 7  # type: ignore[misc]


@pytest.mark.parametrize(
    ("tokens", "blocks", "tail"),
    [(1, 0, 1), (3, 0, 3), (4, 1, 0), (7, 1, 3), (100, 25, 0), (2047, 511, 3), (842, 210, 2)],
)
def test_visible_blocks_and_tail_of_short_contexts(tokens: int, blocks: int, tail: int) -> None:
    assert (SPEC.visible_blocks(tokens - 1), SPEC.tail_tokens(tokens - 1)) == (blocks, tail)
    assert Rows.from_lengths([1], [tokens]).visible_blocks(SPEC).tolist() == [blocks]


@pytest.mark.parametrize(("tokens", "everything"), [(0, True), (2048, True), (2051, True), (2052, False)])
def test_the_budget_is_left_at_513_blocks(tokens: int, everything: bool) -> None:
    assert SPEC.selects_everything(tokens - 1) is everything


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_negative_positions_see_nothing(dtype: torch.dtype) -> None:
    rows = nasty.negative_positions(dtype)
    assert rows.position.dtype == rows.request.dtype == torch.int32
    assert rows.position.tolist() == [-1, -2, -5, 0, 2, 3, 4]
    assert rows.live.tolist() == [False] * 3 + [True] * 4
    assert rows.visible_tokens.tolist() == [0, 0, 0, 1, 3, 4, 5]
    assert rows.visible_blocks(SPEC).tolist() == [0, 0, 0, 0, 0, 1, 1]
    assert rows.visible_blocks(SPEC).dtype == torch.int32
    for position in (-1, -2, -5):
        assert (SPEC.visible_blocks(position), SPEC.tail_tokens(position)) == (0, 0)


# Rows.


def test_rows_of_ragged_requests() -> None:
    rows = Rows.from_lengths([2, 0, 3], [10, 99, 3], pad_to=7)
    assert rows.request.tolist() == [0, 0, 2, 2, 2, -1, -1]
    assert rows.position.tolist() == [8, 9, 0, 1, 2, -1, -1]
    assert rows.max_position == 9  # a request without rows does not count
    assert rows.count == 7
    assert rows.visible_tokens.tolist() == [9, 10, 1, 2, 3, 0, 0]


@st.composite
def ragged(draw: st.DrawFn) -> Rows:
    """Rows of requests, some without any, and padding after them."""
    lengths = draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=5))
    queries, contexts = [count for count, _ in lengths], [count + before for count, before in lengths]
    return Rows.from_lengths(queries, contexts, pad_to=sum(queries) + draw(st.integers(0, 3)))


@given(ragged(), st.data())
def test_runs_say_what_the_tensors_say(rows: Rows, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, rows.count))
    stop = data.draw(st.integers(start, rows.count))
    for part in (rows, rows.slice(start, stop), rows.slice(start, rows.count + 5)):
        assert part.runs is not None
        assert part.run_fault is None
        owners = [-1] * part.count
        for run in part.runs:
            assert run.start < run.stop
            owners[run.start : run.stop] = [run.request] * (run.stop - run.start)
            assert run.last_position == int(part.position[run.stop - 1])
        assert owners == part.request.tolist()
        assert part.highest_request == max(owners, default=-1)


def test_runs_are_kept_through_tensors() -> None:
    rows = Rows.from_lengths([2, 0, 3], [10, 99, 3], pad_to=7)
    assert rows.runs == ((0, 0, 2, 9), (2, 2, 5, 2))
    again = Rows.from_tensors(rows.request.long(), rows.position, runs=list(rows.runs))
    assert again.runs == rows.runs
    plain = Rows.from_tensors(rows.request, rows.position)
    assert (plain.runs, plain.slice(1, 4).runs, plain.highest_request) == (None, None, -1)


@pytest.mark.parametrize(("queries", "contexts"), [([], []), ([0, 0], [5, 9])])
def test_no_rows(queries: list[int], contexts: list[int]) -> None:
    rows = Rows.from_lengths(queries, contexts)
    assert (rows.count, rows.max_position) == (0, -1)
    assert rows.request.dtype == torch.int32
    assert rows.runs == ()
    assert Rows.from_lengths(queries, contexts, pad_to=2).live.tolist() == [False, False]


def test_lengths_must_pair() -> None:
    with pytest.raises(ValueError, match="as many contexts as queries; got 2, 1"):
        Rows.from_lengths([1, 2], [5])


@pytest.mark.parametrize(("queries", "context"), [(5, 3), (-1, 3)])
def test_a_request_has_no_more_queries_than_tokens(queries: int, context: int) -> None:
    with pytest.raises(ValueError, match="0 <= queries <= context"):
        Rows.from_lengths([1, queries], [1, context])


def test_metadata_of_other_dtypes_is_refused_or_kept_out_of_range() -> None:
    whole = torch.tensor([0])
    for other in (torch.tensor([3.9]), torch.tensor([True])):
        with pytest.raises(ValueError, match="position: wanted an integer dtype"):
            Rows.from_tensors(whole, other)
        with pytest.raises(ValueError, match="request: wanted an integer dtype"):
            Rows.from_tensors(other, whole)
    # 2^32 + 3 must not come round as position 3.
    assert Rows.from_tensors(whole, torch.tensor([2**32 + 3]), 5).position.tolist() == [2**31 - 1]


def test_token_tables_may_be_wide_repeated_and_out_of_order() -> None:
    spec = QsaSpec(top_blocks=3)
    rows = Rows.from_lengths([1], [26])  # six blocks and a tail of two
    wide = torch.full((1, 64), -1)
    wide[0, 40:44] = torch.tensor([9, 8, 11, 10])
    wide[0, 3:8] = torch.tensor([0, 1, 2, 3, 0])
    wide[0, 60:62] = torch.tensor([24, 25])
    found = Selection.from_token_table(wide, rows, spec)
    assert (found.blocks.tolist(), found.count.tolist()) == ([[0, 2, -1]], [2])
    counted = torch.cat([wide, torch.tensor([[8]])], dim=1)
    found = Selection.from_token_table(counted, rows, spec, count_column=True)
    assert (found.blocks.tolist(), found.count.tolist()) == ([[0, -1, -1]], [1])
    # One block too many is not dropped in silence.
    four = torch.arange(16)[None]
    assert Selection.from_token_table(four, rows, spec).count.tolist() == [4]


def test_padding_to_fewer_rows_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="pad_to: wanted at least the 3 rows; got 2"):
        Rows.from_lengths([3], [3], pad_to=2)


def test_verify_rows_of_both_input_kinds() -> None:
    # Requests of 11 and 21 tokens, each with 4 draft tokens: as lengths, and as an engine's own int64 tensors.
    rows = Rows.from_lengths([4, 4], [11 + 4, 21 + 4])
    own = Rows.from_tensors(torch.tensor([0] * 4 + [1] * 4), torch.tensor([11, 12, 13, 14, 21, 22, 23, 24]))
    assert rows.max_position + 1 == own.max_position + 1 == 25
    assert torch.equal(rows.request, own.request)
    assert torch.equal(rows.position, own.position)
    assert rows.visible_blocks(SPEC).tolist() == [3, 3, 3, 3, 5, 5, 6, 6]


def test_rows_from_tensors_keep_a_given_bound() -> None:
    request, position = torch.zeros(2, dtype=torch.int64), torch.tensor([3, 4])
    assert Rows.from_tensors(request, position, max_position=900).max_position == 900
    assert Rows.from_tensors(request, position).max_position == 4
    assert Rows.from_tensors(request, torch.tensor([-7, -2])).max_position == -1
    assert Rows.from_tensors(request[:0], position[:0]).max_position == -1


@pytest.mark.parametrize("count", [1, 3, 4, 5, 8, 9, 12])
@pytest.mark.parametrize("start", range(8))
def test_any_number_of_verify_rows_crosses_blocks_rightly(count: int, start: int) -> None:
    rows = Rows.from_lengths([count], [start + count])
    blocks = rows.visible_blocks(SPEC).tolist()
    for index in range(count):
        seen = start + index + 1
        assert blocks[index] * 4 + SPEC.tail_tokens(start + index) == seen
        assert 0 <= SPEC.tail_tokens(start + index) <= 3
    assert blocks[-1] - blocks[0] in range((count - 1) // 4, (count + 2) // 4 + 1)


def test_a_slice_of_rows_and_of_a_selection() -> None:
    rows = Rows.from_lengths([5], [9])
    part = rows.slice(1, 3)
    assert (part.position.tolist(), part.max_position) == ([5, 6], 8)
    selection = Selection(torch.arange(10, dtype=torch.int32).view(5, 2), torch.full((5,), 2, dtype=torch.int32))
    selection.slice(1, 3).blocks.fill_(-1)
    assert selection.blocks.tolist() == [[0, 1], [-1, -1], [-1, -1], [6, 7], [8, 9]]


# Token tables.


@st.composite
def selections(draw: st.DrawFn) -> tuple[Selection, Rows, QsaSpec]:
    """A selection for rows of up to three requests, padding among them."""
    spec = QsaSpec(block_tokens=draw(st.sampled_from([1, 2, 4, 8])), top_blocks=draw(st.integers(1, 9)))
    entries: list[tuple[int, int]] = []
    for request in range(draw(st.integers(0, 3))):
        position = draw(st.integers(0, 70))
        for _ in range(draw(st.integers(0, 4))):
            entries += [PAD] * draw(st.integers(0, 1))
            entries.append((request, position))
            position += draw(st.integers(1, 5))
    rows = rows_at(*entries) if entries else Rows.from_lengths([], [])
    chosen: list[list[int]] = []
    for visible in rows.visible_blocks(spec).tolist():
        most = min(visible, spec.top_blocks)
        chosen.append(sorted(draw(st.sets(st.integers(0, max(visible - 1, 0)), max_size=most))) if most else [])
    blocks = torch.full((rows.count, spec.top_blocks), -1, dtype=torch.int32)
    for row, own in enumerate(chosen):
        blocks[row, : len(own)] = torch.tensor(own, dtype=torch.int32)
    return Selection(blocks, torch.tensor([len(own) for own in chosen], dtype=torch.int32)), rows, spec


@given(selections(), st.booleans())
@settings(max_examples=40)
def test_token_tables_hold_each_rows_tokens_and_lead_back(
    given_selection: tuple[Selection, Rows, QsaSpec], count_column: bool
) -> None:
    selection, rows, spec = given_selection
    table = selection.to_token_table(rows, spec, count_column=count_column)
    assert table.dtype == torch.int32
    assert table.shape == (rows.count, spec.selection_width + count_column)
    assert table.is_contiguous()
    for row, tokens in enumerate(reference.expand(selection, rows, spec)):
        assert table[row, : len(tokens)].tolist() == tokens
        assert set(table[row, len(tokens) : spec.selection_width].tolist()) <= {-1}
        if count_column:
            assert int(table[row, -1]) == len(tokens)
    back = Selection.from_token_table(table, rows, spec, count_column=count_column)
    assert compare.same_selection(back, selection) is None


@given(selections(), st.integers(0, 1000))
@settings(max_examples=30)
def test_a_table_in_any_order_with_holes_anywhere_leads_back(
    given_selection: tuple[Selection, Rows, QsaSpec], seed: int
) -> None:
    selection, rows, spec = given_selection
    table = selection.to_token_table(rows, spec)
    generator = torch.Generator().manual_seed(seed)
    for row in range(rows.count):
        table[row] = table[row, torch.randperm(table.shape[1], generator=generator)]
    assert compare.same_selection(Selection.from_token_table(table, rows, spec), selection) is None


@given(selections())
@settings(max_examples=20)
def test_entries_past_the_count_column_are_not_looked_at(given_selection: tuple[Selection, Rows, QsaSpec]) -> None:
    selection, rows, spec = given_selection
    table = selection.to_token_table(rows, spec, count_column=True)
    past = torch.arange(spec.selection_width) >= table[:, -1:]
    table[:, :-1][past] = 0
    back = Selection.from_token_table(table, rows, spec, count_column=True)
    assert compare.same_selection(back, selection) is None


@given(selections())
@settings(max_examples=20)
def test_a_table_does_not_read_blocks_past_the_count(given_selection: tuple[Selection, Rows, QsaSpec]) -> None:
    selection, rows, spec = given_selection
    past = torch.arange(spec.top_blocks) >= selection.count[:, None]
    dirty = Selection(torch.where(past, 1_000_000, selection.blocks).to(torch.int32), selection.count)
    assert torch.equal(dirty.to_token_table(rows, spec), selection.to_token_table(rows, spec))


def test_a_full_selection_and_tail_fill_the_width() -> None:
    # Ranking the 2,400 token copies of 600 block scores would cut inside a block; blocks are ranked, then expanded.
    scores = nasty.distinct_blocks_with_tail(600)
    rows = Rows.from_lengths([1], [2403])
    selection = reference.topk(scores, 512)
    table = selection.to_token_table(rows, SPEC, count_column=True)
    tokens = table[0, :-1].tolist()
    assert table[0, -1] == len(set(tokens)) == 2051
    assert tokens[-3:] == [2400, 2401, 2402]
    assert all(token // 4 * 4 + offset in set(tokens) for token in tokens[:-3] for offset in range(4))


def test_a_table_of_fewer_tokens_than_the_budget_leads_back() -> None:
    rows = Rows.from_lengths([1], [100])
    table = torch.full((1, 20), -1, dtype=torch.int32)
    table[0, :8] = torch.tensor([96, 97, 98, 99, 8, 9, 10, 11])
    found = Selection.from_token_table(table, rows, QsaSpec(top_blocks=512))
    assert (found.blocks.shape, found.count.tolist()) == ((1, 512), [2])
    assert found.blocks[0, :3].tolist() == [2, 24, -1]


# Caches and other values.


def test_cache_views_share_their_pool() -> None:
    table = torch.zeros(1, 1, dtype=torch.int32)
    pool = torch.arange(2 * 2 * 4 * 3 * 8, dtype=torch.float32).view(2, 2, 4, 3, 8)
    cache = KvCache.interleaved(pool, table)
    assert (cache.page_tokens, cache.requests, cache.capacity_tokens) == (4, 1, 4)
    cache.values[1, 2, 0, 5] = -1.0
    assert pool[1, 1, 2, 0, 5] == -1.0
    packed = KvCache.packed(pool.view(2, 8, 3, 8), table)
    assert packed.keys.shape == packed.values.shape == (2, 8, 3, 4)
    packed.values[0, 1, 2, 3] = -2.0
    assert pool.view(2, 8, 3, 8)[0, 1, 2, 7] == -2.0


def test_values_print_shapes_not_numbers() -> None:
    cache = KvCache.interleaved(torch.zeros(2, 2, 4, 3, 8).to(FP8), torch.zeros(1, 5, dtype=torch.int32), 1.0, 1.0)
    assert repr(cache) == "KvCache(keys=float8_e4m3fn[2, 4, 3, 8], page_table=int32[1, 5])"
    assert repr(Rows.from_lengths([2], [9])) == "Rows(2 rows, max_position=8, device=cpu)"
    assert len(repr(reference.topk(Scores(torch.zeros(3, 4), torch.full((3,), 4, dtype=torch.int32)), 4))) < 60
