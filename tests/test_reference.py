"""The reference against numbers worked out by hand and loops in plain Python that share nothing with it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flashqsa import reference
from flashqsa.testing import compare, nasty
from flashqsa.testing.cases import Case, named, spec_of
from flashqsa.testing.inputs import Inputs, build, fill_unwritten, kv_pool, relocate, take_rows
from flashqsa.values import FP8, IndexCache, KvCache, Partial, QsaSpec, Rows, Scores, Selection

INF = float("inf")
NAN = float("nan")


def table_of(*requests: list[int]) -> Tensor:
    return torch.tensor(requests, dtype=torch.int32)


def ids(*rows: list[int], width: int) -> Selection:
    """A selection of the given blocks."""
    blocks = [row + [-1] * (width - len(row)) for row in rows]
    return Selection(
        torch.tensor(blocks, dtype=torch.int32), torch.tensor([len(row) for row in rows], dtype=torch.int32)
    )


# Block keys.


def test_a_key_by_hand() -> None:
    # Means 3 and -4; root mean square 5 / sqrt(2); weights 1 and 2; a quarter turn sends (a, b) to (-b, a).
    raw = torch.tensor([[2.0, -8.0], [4.0, 0.0]])
    weight, cos, sin = torch.tensor([0.0, 1.0]), torch.zeros(2), torch.ones(2)
    key = reference.pool_block_key(raw, weight, cos, sin, eps=0.0)
    unit = math.sqrt(2.0) / 5.0
    assert key.tolist() == pytest.approx([8.0 * unit, 3.0 * unit])


def test_dimensions_past_the_rotary_ones_pass() -> None:
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]])
    cos, sin = torch.tensor([0.6, 1.0, 0.6, 1.0]), torch.tensor([0.8, 0.0, 0.8, 0.0])
    # 1 and 3 rotate together, 2 and 4 do not turn, 5 and 6 are not rotary.
    assert reference.rotate(x, cos, sin)[0].tolist() == pytest.approx([0.6 - 2.4, 2.0, 1.8 + 0.8, 4.0, 5.0, 6.0])


def test_eps_keeps_a_key_of_zeros_finite() -> None:
    key = reference.pool_block_key(torch.zeros(4, 8), torch.ones(8), torch.ones(4), torch.zeros(4), eps=1e-6)
    assert key.tolist() == [0.0] * 8
    # With eps = 1 a key of ones is divided by sqrt(2).
    key = reference.pool_block_key(torch.ones(4, 8), torch.zeros(8), torch.ones(4), torch.zeros(4), eps=1.0)
    assert key.tolist() == pytest.approx([1 / math.sqrt(2)] * 8)


@pytest.mark.parametrize("seed", range(12))
def test_bf16_keys_round_after_each_step(seed: int) -> None:
    def bf16(x: float) -> float:
        return float(torch.tensor(x, dtype=torch.float64).bfloat16())

    generator = torch.Generator().manual_seed(seed)
    raw = torch.randn(4, 2, generator=generator).bfloat16()
    weight, cos, sin = torch.randn(3, 2, generator=generator).bfloat16()
    cos[1], sin[1] = cos[0], sin[0]
    key = reference.pool_block_key(raw, weight, cos, sin, eps=1e-6)
    mean = [bf16(sum(raw[:, j].tolist()) / 4) for j in range(2)]
    norm = math.sqrt((mean[0] ** 2 + mean[1] ** 2) / 2 + 1e-6)
    a, b = (bf16(mean[j] / norm * (1 + float(weight[j]))) for j in range(2))
    c, s = float(cos[0]), float(sin[0])
    # The rotary's products round before they are added, as in Transformers.
    assert key.tolist() == [bf16(bf16(a * c) + bf16(-b * s)), bf16(bf16(b * c) + bf16(a * s))]


# Scores.


def tiny_index_cache() -> tuple[IndexCache, QsaSpec]:
    """Five blocks of 2 dims on pages of 2, in reversed order; the middle page of the second request is a hole."""
    spec = QsaSpec(index_heads=2, index_dim=2, top_blocks=2)
    keys = torch.full((4, 2, 2), NAN)
    keys[3] = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    keys[1] = torch.tensor([[1.0, 1.0], [-1.0, 0.0]])
    keys[0, 0] = torch.tensor([2.0, -2.0])
    return IndexCache(keys, table_of([3, 1, 0], [3, -1, 0])), spec


def test_scores_by_hand() -> None:
    cache, spec = tiny_index_cache()
    q = torch.tensor([[[3.0, 1.0], [-2.0, 4.0]]])
    scores = reference.score(q, cache, Rows.from_lengths([1], [20]), spec)
    # Head 0: 3, 1, 4, -3, 4; head 1: -2, 4, 2, 2, -12; negatives count 0; both over sqrt(2).
    wanted = [x / math.sqrt(2) for x in (3.0, 5.0, 6.0, 2.0, 4.0)]
    assert scores.values[0].tolist() == pytest.approx(wanted, rel=1e-12)
    assert scores.values.dtype == torch.float64
    assert reference.select_blocks(q, cache, Rows.from_lengths([1], [20]), spec).blocks.tolist() == [[1, 2]]


def test_each_row_is_scored_over_what_it_sees() -> None:
    cache, spec = tiny_index_cache()
    rows = Rows.from_tensors(torch.tensor([0, 0, 1, -1, 0, 1]), torch.tensor([2, 8, 19, 19, -2, 19]))
    scores = reference.score(torch.ones(6, 2, 2), cache, rows, spec, torch.float32)
    assert scores.visible.tolist() == [0, 2, 5, 0, 0, 5]
    assert scores.values.dtype == torch.float32
    assert scores.values.shape == (6, 5)
    # Within the budget of 2 no product is made; a hole is -inf; what is not seen is not defined.
    assert scores.values[1, :2].tolist() == [0.0, 0.0]
    assert scores.values[2, :5].tolist() == pytest.approx([2 / math.sqrt(2)] * 2 + [-INF, -INF, 0.0])
    assert bool(
        scores.values[0].isnan().all() and scores.values[3].isnan().all() and scores.values[1, 2:].isnan().all()
    )


def test_keys_below_the_budget_are_not_read() -> None:
    cache = IndexCache(torch.full((1, 16, 2), NAN), table_of([0]))
    spec = QsaSpec(index_heads=2, index_dim=2, top_blocks=3)
    rows = Rows.from_lengths([2], [16])
    found = reference.select_blocks(torch.full((2, 2, 2), NAN), cache, rows, spec)
    assert found.blocks.tolist() == [[0, 1, 2], [-1, -1, -1]]  # the second row sees 4 blocks, all NaN
    assert found.count.tolist() == [3, 0]


def test_fp8_scores_carry_the_scale() -> None:
    cache, spec = tiny_index_cache()
    stored = IndexCache((cache.keys * 2).to(FP8), cache.page_table, 0.5)
    q, rows = torch.tensor([[[3.0, 1.0], [-2.0, 4.0]]]), Rows.from_lengths([1], [20])
    assert torch.equal(reference.score(q, stored, rows, spec).values, reference.score(q, cache, rows, spec).values)


def test_distinct_keys_on_reversed_pages_match_a_plain_product() -> None:
    # Each of 150 keys on 3 pages of 64 is distinct, so a dropped place in the page shows in all but one per page.
    spec = QsaSpec(top_blocks=4)
    generator = torch.Generator().manual_seed(1)
    keys = torch.randn(192, 128, generator=generator)
    cache = IndexCache(keys.view(3, 64, 128).flip(0).contiguous(), table_of([2, 1, 0]))
    q = torch.randn(1, 4, 128, generator=generator)
    scores = reference.score(q, cache, Rows.from_lengths([1], [600]), spec)
    wanted = (q[0].double() @ keys[:150].double().T).relu().sum(0) / math.sqrt(128)
    torch.testing.assert_close(scores.values[0], wanted)


def test_a_planted_block_wins_in_every_row() -> None:
    index_q, cache, rows, spec = nasty.planted_block()
    found = reference.select_blocks(index_q, cache, rows, spec)
    assert found.blocks.tolist() == [list(range(16))] * rows.count
    planted = nasty.planted_block(planted=3000)
    assert reference.select_blocks(*planted).blocks.tolist() == [[*range(15), 3000]] * rows.count


# Selection.


def sorted_selection(values: list[float], top_blocks: int) -> list[int]:
    """The best blocks by Python's own stable sort."""
    candidates = [(-value, block) for block, value in enumerate(values) if value == value and value != -INF]
    return sorted(block for _, block in sorted(candidates)[:top_blocks])


@pytest.mark.parametrize("scores", [s for s in nasty.NASTY_SCORES if s.name != "many-rows"], ids=str)
def test_nasty_scores_against_a_plain_sort(scores: nasty.NastyScores) -> None:
    built = scores.build()
    for top_blocks in scores.top_blocks:
        found = reference.topk(built, top_blocks)
        assert found.blocks.dtype == found.count.dtype == torch.int32
        for row in {0, 1, built.values.shape[0] // 2, built.values.shape[0] - 1} & set(range(built.values.shape[0])):
            wanted = sorted_selection(built.values[row, : int(built.visible[row])].tolist(), top_blocks)
            assert int(found.count[row]) == len(wanted)
            assert found.blocks[row].tolist() == wanted + [-1] * (top_blocks - len(wanted))


def test_more_rows_than_a_grid_has() -> None:
    built = nasty.many_rows()
    found = reference.topk(built, 5)
    assert found.count.unique().tolist() == [5]
    for row in (0, 65535, 65536):
        assert found.blocks[row].tolist() == sorted_selection(built.values[row, :12].tolist(), 5)


def test_garbage_past_the_prefix_changes_nothing() -> None:
    poisoned = nasty.garbage_past_prefix()
    clean = torch.zeros_like(poisoned.values)
    for row, visible in enumerate(poisoned.visible.tolist()):
        clean[row, :visible] = poisoned.values[row, :visible]
    before = poisoned.values.clone()
    assert (
        compare.same_selection(reference.topk(poisoned, 512), reference.topk(Scores(clean, poisoned.visible), 512))
        is None
    )
    assert compare.same_bits(before, poisoned.values)


@given(
    st.lists(st.lists(st.sampled_from([0.0, -0.0, 0.5, 1.0, 2.0, -3.0, INF, -INF, NAN]), max_size=12), max_size=4),
    st.integers(1, 14),
)
@settings(max_examples=40)
def test_any_scores_against_a_plain_sort(lists: list[list[float]], top_blocks: int) -> None:
    values = torch.full((len(lists), 13), 9.0)
    for row, own in enumerate(lists):
        values[row, : len(own)] = torch.tensor(own)
    visible = torch.tensor([len(own) for own in lists], dtype=torch.int32)
    found = reference.topk(Scores(values, visible), top_blocks)
    for row, own in enumerate(lists):
        assert found.blocks[row, : int(found.count[row])].tolist() == sorted_selection(own, top_blocks)


# Attention.


def plain_attention(
    q: list[float], keys: list[list[float]], values: list[list[float]], scale: float
) -> tuple[list[float], float]:
    """Softmax attention of one head in Python numbers."""
    if not keys:
        return [0.0] * len(q), -INF
    logits = [scale * sum(a * b for a, b in zip(q, key, strict=True)) for key in keys]
    top = max(logits)
    weights = [math.exp(logit - top) for logit in logits]
    total = sum(weights)
    output = [sum(w * v[j] for w, v in zip(weights, values, strict=True)) / total for j in range(len(q))]
    return output, top + math.log(total)


def test_attention_by_hand() -> None:
    # Two KV heads with two query heads each. Logits over sqrt(4) = 2: equal for head 0, ln 3 apart for head 1.
    spec = QsaSpec(q_heads=4, kv_heads=2, head_dim=4, top_blocks=1)
    keys, values = kv_pool("apart", (1, 4, 2, 4), torch.float32)
    keys[0, :2], values[0, :2] = 0.0, 0.0
    keys[0, 0, 0, 0], keys[0, 1, 1, 0] = 1.0, 1.0
    values[0, 0, :, 0], values[0, 1, :, 1] = 1.0, 1.0
    q = torch.zeros(1, 4, 4)
    q[0, 1, 0] = 2 * math.log(3.0)  # on KV head 0: the first token weighs 3 times the second
    q[0, 2, 0] = 2 * math.log(7.0)  # on KV head 1: the second weighs 7 times the first
    cache = KvCache(keys, values, table_of([0]))
    output, lse = reference.attend(q, cache, None, Rows.from_lengths([1], [2]), spec)
    assert output[0, :, :2].flatten().tolist() == pytest.approx([0.5, 0.5, 0.75, 0.25, 0.125, 0.875, 0.5, 0.5])
    assert lse[0].tolist() == pytest.approx([math.log(2), math.log(4), math.log(8), math.log(2)])


def plain_outcome(inputs: Inputs, selection: Selection) -> tuple[list[list[list[float]]], list[list[float]]]:
    """Every row and head by loops over logical tokens, found through page tables by Python's own integers."""
    cache, spec, scale = inputs.kv_cache, inputs.spec, inputs.spec.head_dim**-0.5
    outputs, lses = [], []
    for row in range(inputs.rows.count):
        request, position = int(inputs.rows.request[row]), int(inputs.rows.position[row])
        tokens: list[int] = []
        if request >= 0 and position >= 0:
            chosen = set(selection.blocks[row, : int(selection.count[row])].tolist())
            closed = (position + 1) // 4 * 4
            tokens = [token for token in range(position + 1) if token >= closed or token // 4 in chosen]
        places = [(int(cache.page_table[request, t // cache.page_tokens]), t % cache.page_tokens) for t in tokens]
        places = [(page, place) for page, place in places if page >= 0]
        row_output, row_lse = [], []
        for head in range(spec.q_heads):
            kv_head = head // (spec.q_heads // spec.kv_heads)
            k_scale, v_scale = (
                1.0 if s is None else s if isinstance(s, float) else float(s[kv_head])
                for s in (cache.k_scale, cache.v_scale)
            )
            keys = [[float(x) * k_scale for x in cache.keys[page, place, kv_head].double()] for page, place in places]
            values = [
                [float(x) * v_scale for x in cache.values[page, place, kv_head].double()] for page, place in places
            ]
            output, lse = plain_attention(inputs.q[row, head].double().tolist(), keys, values, scale)
            row_output.append(output)
            row_lse.append(lse)
        outputs.append(row_output)
        lses.append(row_lse)
    return outputs, lses


SMALL = spec_of(4, 2, head_dim=4, top_blocks=2)
LOOPED = [
    Case("rows-of-two-requests", (3, 2), (27, 13), SMALL, padding=(0, 3, 5)),
    Case("a-hole", (4,), (30,), SMALL, page_tokens=8, holes=((0, 1), (0, 3))),
    Case("fp8-scales-per-head", (3,), (22,), SMALL, torch.float16, FP8, head_scales=True, layout="wide-view"),
    Case("bf16-packed", (3,), (22,), SMALL, torch.bfloat16, torch.bfloat16, 12, layout="packed"),
]


@pytest.mark.parametrize("case", LOOPED, ids=lambda case: case.name)
def test_attention_against_plain_loops(case: Case) -> None:
    inputs = build(case)
    selection = reference.select_blocks(inputs.index_q, inputs.index_cache, inputs.rows, inputs.spec)
    output, lse = reference.attend(inputs.q, inputs.kv_cache, selection, inputs.rows, inputs.spec)
    wanted, wanted_lse = plain_outcome(inputs, selection)
    torch.testing.assert_close(output, torch.tensor(wanted, dtype=torch.float64), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(lse, torch.tensor(wanted_lse, dtype=torch.float64), rtol=1e-10, atol=1e-12)


def test_the_gate_multiplies_the_rounded_output() -> None:
    generator = torch.Generator().manual_seed(0)
    output = torch.randn(4, 3, 8, generator=generator, dtype=torch.float64)
    gate = torch.randn(4, 3, 8, generator=generator).bfloat16()
    got = reference.gated(output, gate, torch.bfloat16)
    assert got.dtype == torch.bfloat16
    for value, factor, found in zip(output.flatten(), gate.flatten(), got.flatten(), strict=True):
        wanted = float(value.bfloat16()) / (1 + math.exp(-float(factor)))
        assert float(found) == float(torch.tensor(wanted).bfloat16())
    once = (output * torch.sigmoid(gate.double())).bfloat16()
    assert not torch.equal(got, once)  # rounding twice is not rounding once
    assert torch.equal(reference.gated(output, None, torch.float64), output)


def test_rows_that_see_nothing() -> None:
    for name in ("only-padding", "nothing-but-holes"):
        inputs = build(named(name))
        selection = reference.select_blocks(inputs.index_q, inputs.index_cache, inputs.rows, inputs.spec)
        output, lse = reference.sparse_attention(
            inputs.q, inputs.kv_cache, selection, inputs.rows, inputs.spec, inputs.gate
        )
        sees = torch.tensor([bool(tokens) for tokens in reference.expand(selection, inputs.rows, inputs.spec)])
        if name == "only-padding":
            assert not sees.any()
        # Rows 0..2 of the holes' case: every token but those of the request's last, present, page.
        empty = (lse == -INF).all(dim=1)
        assert empty.any()
        assert not output[empty].any()
        assert not output.isnan().any()


@given(st.integers(1, 9), st.booleans(), st.integers(0, 3))
@settings(max_examples=20)
def test_parts_merge_to_the_whole(parts: int, with_gate: bool, seed: int) -> None:
    inputs = build(replace(LOOPED[0], seed=seed))
    gate = inputs.gate if with_gate else None
    selection = reference.select_blocks(inputs.index_q, inputs.index_cache, inputs.rows, inputs.spec)
    arguments = (inputs.q, inputs.kv_cache, selection, inputs.rows, inputs.spec)
    whole, lse = reference.attend(*arguments)
    partial = reference.split(*arguments, parts)
    assert partial.parts == parts
    merged, merged_lse = reference.merge(partial, gate, torch.float64)
    wanted = whole if gate is None else (whole.float() * torch.sigmoid(gate)).double()
    torch.testing.assert_close(merged, wanted, rtol=1e-6 if with_gate else 1e-12, atol=1e-12)
    torch.testing.assert_close(merged_lse, lse.float())
    assert not merged.isnan().any()


def test_a_part_that_sees_nothing_weighs_nothing() -> None:
    output = torch.tensor([[[[1.0, 2.0]]], [[[9.0, 9.0]]]])
    partial = Partial(output, torch.tensor([[[0.5]], [[-INF]]]))
    merged, lse = reference.merge(partial, None, torch.float32)
    assert (merged.tolist(), lse.tolist()) == ([[[1.0, 2.0]]], [[0.5]])
    nothing = Partial(torch.zeros(2, 1, 1, 2), torch.full((2, 1, 1), -INF))
    merged, lse = reference.merge(nothing, torch.zeros(1, 1, 2), torch.float16)
    assert (merged.tolist(), lse.tolist()) == ([[[0.0, 0.0]]], [[-INF]])


@pytest.mark.parametrize("name", ["100-tokens-model", "first-tokens-of-a-request", "contexts-of-1-to-3"])
def test_below_the_budget_the_selection_is_dense(name: str) -> None:
    inputs = build(named(name))
    selection = reference.select_blocks(inputs.index_q, inputs.index_cache, inputs.rows, inputs.spec)
    sparse = reference.attend(inputs.q, inputs.kv_cache, selection, inputs.rows, inputs.spec)
    dense = reference.attend(inputs.q, inputs.kv_cache, None, inputs.rows, inputs.spec)
    assert all(compare.same_bits(a, b) for a, b in zip(sparse, dense, strict=True))


def test_tiny_weights_count_together() -> None:
    q, cache, rows, spec = nasty.tiny_weights()
    output, lse = reference.attend(q, cache, reference.select_blocks(q, no_index(), rows, spec), rows, spec)
    others = 2047 * math.exp(-7.0)
    assert output[0, 0].tolist() == pytest.approx([(others - 1) / (others + 1)] * 64)
    assert float(lse) == pytest.approx(math.log(1 + others))


def no_index() -> IndexCache:
    """An index cache that no row within the budget reads."""
    return IndexCache(torch.full((1, 512, 128), NAN), table_of([0]))


def test_a_page_past_2_31_elements_is_read() -> None:
    spec = QsaSpec(top_blocks=4)
    near, far = nasty.far_page()
    generator = torch.Generator().manual_seed(2)
    numbers = torch.randn(2, 16, 2, 256, generator=generator).to(FP8)
    q, rows = torch.randn(1, 24, 256, generator=generator), Rows.from_lengths([1], [16])
    found = []
    for page in (0, near.shape[0] - 1):
        near[page], far[page] = numbers[0], numbers[1]
        found.append(reference.attend(q, KvCache(near, far, table_of([page]), 1.0, 1.0), None, rows, spec)[0])
    assert (near.shape[0] - 1) * near.stride(0) > 2**31
    assert compare.same_bits(*found)


@pytest.mark.parametrize("name", ["decode-16-fp8", "padding-first-middle-last", "holes", "verify-5"])
def test_placement_and_neighbours_do_not_matter(name: str) -> None:
    inputs = build(named(name))

    def outcome(of: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        selection = reference.select_blocks(of.index_q, of.index_cache, of.rows, of.spec)
        return selection.blocks, *reference.sparse_attention(of.q, of.kv_cache, selection, of.rows, of.spec, of.gate)

    wanted = outcome(inputs)
    for other in (relocate(inputs, "reversed"), relocate(inputs, "random"), fill_unwritten(inputs, "infinity")):
        assert all(compare.same_bits(a, b) for a, b in zip(outcome(other), wanted, strict=True))
    for row in range(0, inputs.rows.count, 5):
        alone = outcome(take_rows(inputs, row, row + 1))
        assert all(compare.same_bits(a[0], b[row]) for a, b in zip(alone, wanted, strict=True))


# Worklists.


@st.composite
def batches(draw: st.DrawFn) -> tuple[Selection, Rows, QsaSpec]:
    """Rows of a few requests, padding among them, with selections of visible blocks."""
    spec = QsaSpec(top_blocks=draw(st.integers(1, 5)))
    entries: list[tuple[int, int]] = []
    for owner in range(draw(st.integers(0, 3))):
        first = draw(st.integers(0, 40))
        entries += [(owner, first + row) for row in range(draw(st.integers(0, 9)))]
        entries += [(-1, -1)] * draw(st.integers(0, 2))
    request, position = [e[0] for e in entries], [e[1] for e in entries]
    rows = Rows.from_tensors(torch.tensor(request, dtype=torch.int64), torch.tensor(position, dtype=torch.int64))
    chosen = []
    for visible in rows.visible_blocks(spec).tolist():
        ids_there = st.sets(st.integers(0, max(visible - 1, 0)), max_size=min(visible, spec.top_blocks))
        chosen.append(sorted(draw(ids_there)) if visible else [])
    if not chosen:
        return (
            Selection(torch.empty(0, spec.top_blocks, dtype=torch.int32), torch.empty(0, dtype=torch.int32)),
            rows,
            spec,
        )
    return ids(*chosen, width=spec.top_blocks), rows, spec


@given(batches(), st.sampled_from([1, 2, 3, 8, 64]), st.booleans())
@settings(max_examples=40)
def test_a_worklist_by_its_definition(batch: tuple[Selection, Rows, QsaSpec], group_rows: int, dense: bool) -> None:
    selection, rows, spec = batch
    given_selection = None if dense else selection
    work = reference.worklist(given_selection, rows, spec, group_rows)
    bounds, entries = work.group_rows.tolist(), work.group_entries.tolist()
    assert (bounds[0], bounds[-1], entries[0], entries[-1]) == (0, rows.count, 0, work.block.shape[0])
    reads = compare.row_reads(work)
    for row, tokens in enumerate(reference.expand(given_selection, rows, spec)):
        assert reads.get(row, []) == sorted({token // 4 for token in tokens})
    for group in range(work.groups):
        members = range(bounds[group], bounds[group + 1])
        assert 1 <= len(members) <= group_rows
        owners = {int(rows.request[row]) if bool(rows.live[row]) else -1 for row in members}
        assert len(owners) == 1
        own = work.block[entries[group] : entries[group + 1]].tolist()
        assert own == sorted({block for row in members for block in reads.get(row, [])})
        # A group is as large as may be: the next row is another request's, or would be one too many.
        if group + 1 < work.groups and len(members) < group_rows:
            after = bounds[group + 1]
            assert (int(rows.request[after]) if bool(rows.live[after]) else -1) not in owners
    assert compare.same_reads(work, reference.worklist(given_selection, rows, spec, 1), rows, spec) is None


def test_the_64th_row_of_a_group_is_the_sign_bit() -> None:
    rows = Rows.from_lengths([64], [67])
    work = reference.worklist(ids(*([0] for _ in range(64)), width=2), rows, QsaSpec(top_blocks=2), 64)
    assert work.groups == 1
    assert work.row_mask[0] == -1  # all 64 rows
    assert work.row_mask[-1] == (1 << 60 | 1 << 61 | 1 << 62 | 1 << 63) - (1 << 64) or work.row_mask[-1] < 0
    assert compare.row_reads(work)[63] == [0, 16]


def test_a_group_that_has_tails_only() -> None:
    work = reference.worklist(None, Rows.from_lengths([3], [3]), QsaSpec(), 8)
    assert (work.group_rows.tolist(), work.block.tolist(), work.row_mask.tolist()) == ([0, 3], [0], [0b111])
    nothing = reference.worklist(None, Rows.from_lengths([0], [9], pad_to=2), QsaSpec(), 8)
    assert (nothing.group_rows.tolist(), nothing.group_entries.tolist()) == ([0, 2], [0, 0])


# Writing.


def written(
    tokens: tuple[int, ...],
    pieces: list[list[int]],
    spec: QsaSpec,
    cache_dtype: torch.dtype = torch.float32,
    raw_dtype: torch.dtype = torch.float32,
    ring_tokens: int = 4,
    rope_positions: tuple[Tensor, ...] | None = None,
) -> IndexCache:
    """An index cache after raw keys were written in pieces: `pieces[r]` are where request r's calls end."""
    raw = nasty.raw_keys(tokens, spec, raw_dtype, rope_positions=rope_positions)
    cache = nasty.empty_index_cache(tokens, spec, cache_dtype, raw_dtype, ring_tokens=ring_tokens)
    starts = [0] * len(tokens)
    for call in range(max(len(own) for own in pieces)):
        stops = [own[min(call, len(own) - 1)] for own in pieces]
        rows = Rows.from_lengths([b - a for a, b in zip(starts, stops, strict=True)], stops, pad_to=sum(stops))
        part = [
            torch.cat([t[a:b] for t, a, b in zip(ts, starts, stops, strict=True)])
            for ts in (raw.keys, raw.cos, raw.sin)
        ]
        padded = [torch.cat([p, torch.full((rows.count - p.shape[0], p.shape[1]), NAN, dtype=p.dtype)]) for p in part]
        keys, cos, sin = padded
        reference.write_index_keys(keys, cache, rows, spec, raw.norm_weight, cos, sin, 1e-6)
        starts = stops
    return cache


@pytest.mark.parametrize("ring_tokens", [4, 8, 12])
@pytest.mark.parametrize("raw_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_prefixes_of_any_remainder_pool_as_one_call_does(raw_dtype: torch.dtype, ring_tokens: int) -> None:
    spec, tokens = QsaSpec(), (46, 47, 48, 49)
    whole = written(tokens, [[n] for n in tokens], spec, raw_dtype, raw_dtype, ring_tokens)
    # Prefixes of 40 to 43 tokens, then one more, then the rest; and one request written token by token.
    pieces = [[40, 41, 46], [41, 42, 47], [42, 43, 48], list(range(1, 50))]
    parts = written(tokens, pieces, spec, raw_dtype, raw_dtype, ring_tokens)
    assert compare.same_bits(whole.keys, parts.keys)
    ring = whole.raw_keys
    assert ring is not None
    assert parts.raw_keys is not None
    assert compare.same_bits(ring, parts.raw_keys)
    complete = sum(n // 4 for n in tokens)
    assert int((~whole.keys.isnan()).all(dim=-1).sum()) == complete


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_fewer_tokens_than_a_block_write_no_key(tokens: int) -> None:
    cache = written((tokens,), [[tokens]], QsaSpec())
    assert cache.keys.isnan().all()
    assert cache.raw_keys is not None
    assert cache.raw_keys[0, :tokens].isfinite().all()
    assert cache.raw_keys[0, tokens:].isnan().all()


def test_keys_are_pooled_over_tokens_whatever_their_rotary_positions() -> None:
    positions = nasty.image_positions()
    spec, raw = QsaSpec(), nasty.raw_keys((320,), QsaSpec(), rope_positions=(positions,))
    cache = written((320,), [[7, 160, 320]], spec, rope_positions=(positions,))
    scores_read = reference.score(
        torch.ones(1, 4, 128), cache, Rows.from_lengths([1], [320]), replace(spec, top_blocks=1)
    )
    assert int(scores_read.visible) == 80
    assert scores_read.values.isfinite().all()
    for block in (0, 2, 3, 40, 79):
        tokens = slice(4 * block, 4 * block + 4)
        own = reference.pool_block_key(
            raw.keys[0][tokens], raw.norm_weight, raw.cos[0][4 * block], raw.sin[0][4 * block], 1e-6
        )
        page, place = int(cache.page_table[0, block // 16]), block % 16
        assert compare.same_bits(cache.keys[page, place], own)


def test_fp8_index_keys_are_divided_clamped_and_rounded() -> None:
    cache = written((16,), [[16]], QsaSpec(), FP8)
    plain = written((16,), [[16]], QsaSpec())
    page = int(cache.page_table[0, 0])
    stored, exact = cache.keys[page, :4].float() * 0.5, plain.keys[page, :4]
    assert bool(((stored - exact).abs() <= exact.abs() * 2**-4 + 2**-11).all())


def test_writes_to_holes_and_padding_are_dropped() -> None:
    spec = spec_of(2, 2, head_dim=4)
    keys, values = kv_pool("interleaved", (3, 4, 2, 4), torch.float32)
    cache = KvCache(keys, values, table_of([1, -1, 2]))
    rows = Rows.from_tensors(torch.tensor([0, 0, 0, -1, 0]), torch.tensor([3, 4, 8, 9, -1]))
    new = torch.arange(5.0)[:, None, None].expand(5, 2, 4).contiguous()
    reference.write_kv(new, new + 10, cache, rows)
    assert keys[1, 3].unique().tolist() == [0.0]
    assert values[2, 0].unique().tolist() == [12.0]
    assert int(keys.isfinite().sum()) == int(values.isfinite().sum()) == 2 * 2 * 4
    assert spec.kv_heads == 2


@pytest.mark.parametrize("per_head", [False, True])
def test_every_e4m3_number_survives_a_scale_that_is_a_power_of_two(per_head: bool) -> None:
    numbers = nasty.e4m3_extremes(kv_heads=2, head_dim=8)
    tokens = numbers.shape[0]
    factor = torch.tensor([0.5, 4.0]) if per_head else torch.tensor([0.5, 0.5])
    keys, values = kv_pool("packed", (1, 16, 2, 8), FP8)
    cache = KvCache(keys, values, table_of([0]), factor if per_head else 0.5, factor if per_head else 0.5)
    scaled = numbers * factor[:, None]
    reference.write_kv(scaled, scaled * 1e4, cache, Rows.from_lengths([tokens], [tokens]))
    assert torch.equal(keys[0, :tokens].float(), numbers)
    assert float(values[0, :tokens].float().abs().max()) == 448.0
    assert torch.equal(values[0, :tokens].float().sign(), numbers.sign())
    infinite = torch.full_like(scaled[:1], -INF)
    reference.write_kv(infinite, infinite, replace(cache, keys=values), Rows.from_lengths([1], [16]))
    assert values[0, 15].float().unique().tolist() == [-448.0]
    q = torch.zeros(1, 2, 8, dtype=torch.float64)
    # A query of zeros weighs all tokens alike, so the output is the mean of the dequantised values.
    mean, _ = reference.attend(q, replace(cache, values=keys), None, Rows.from_lengths([1], [tokens]), spec_of(2, 2, 8))
    torch.testing.assert_close(mean[0], scaled.double().mean(dim=0))
