"""Sizes and routes of Hopper's fused indexer: what a shape holds, how rarely floors fail, which calls take it."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

pytest.importorskip("triton", reason="the kernel set takes merge from Triton's")

import flashqsa
from flashqsa import Call, DeviceFacts, IndexCache, InputError, NoRouteError, QsaSpec, Rows, choose_route
from flashqsa.__main__ import app
from flashqsa.kernels.sm90 import select
from flashqsa.plan import make_plan
from flashqsa.select_shape import (
    FLOOR_SIGMAS,
    FUSED_FROM_ROWS,
    FUSED_FROM_ROWS_PER_REQUEST,
    FUSED_FROM_SCORES,
    MOST_KEYS,
    MOST_SLICES,
    THREADS,
    TILE_BLOCKS,
    WINDOW_LINES,
    FusedShape,
    floor_rank,
    fused_refusal,
    fused_shape,
    sample_stride,
    scratch_floats,
)
from flashqsa.values import MAX_TOP_BLOCKS
from tests.sm90_select_emulate import sampled_blocks

BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
H200 = DeviceFacts.named("h200")
LIMIT = 128 << 20
MOST_BLOCKS = 1 << 18


# Sizes.

SPECS = st.builds(
    QsaSpec,
    index_heads=st.sampled_from([2, 4]),
    index_dim=st.sampled_from([64, 128]),
    top_blocks=st.integers(1, MAX_TOP_BLOCKS),
    block_tokens=st.sampled_from([4, 8]),
)
POSITIONS = st.one_of(st.integers(-1, 4 * MOST_BLOCKS - 1), st.integers(-1, 20_000))
ROWS = st.one_of(st.integers(0, 5000), st.integers(0, 70_000))


@settings(max_examples=300)
@given(spec=SPECS, rows=ROWS, max_position=POSITIONS, limit=st.integers(1 << 20, 1 << 30))
def test_a_shape_holds_what_it_is_for(spec: QsaSpec, rows: int, max_position: int, limit: int) -> None:
    if fused_refusal(spec, BF16, BF16, True, max_position, H200) is not None:
        return
    shape, width = fused_shape(spec, rows, max_position, H200, limit), max(spec.visible_blocks(max_position), 1)
    assert shape.window_rows * spec.index_heads == WINDOW_LINES
    assert shape.chunk_rows % shape.window_rows == 0
    assert shape.chunk_rows - shape.window_rows < max(rows, 1)
    assert 1 <= shape.slices <= min(MOST_SLICES, -(-width // TILE_BLOCKS))
    assert shape.stride & (shape.stride - 1) == 0
    # Samples: as many as the kernels draw, in whole vectors, and as many as are ranked.
    assert shape.samples >= width // shape.stride
    assert shape.samples % 4 == shape.sample_keys % 4 == shape.survivor_keys % 4 == 0
    assert shape.samples <= THREADS * shape.sample_keys
    # Survivors: all that are expected, and the usual ones in fewer registers.
    expected = shape.stride * shape.rank
    assert spec.top_blocks <= expected <= THREADS * shape.usual_keys
    assert shape.usual_keys <= shape.survivor_keys <= MOST_KEYS
    assert expected <= shape.slices * shape.capacity
    assert shape.capacity <= THREADS * shape.survivor_keys
    # Memory: what a pass needs, unless not even one window fits.
    rows_of_pass = min(max(rows, 1), shape.chunk_rows)
    assert shape.workspace_bytes(rows_of_pass, width) <= limit or shape.chunk_rows == shape.window_rows
    assert shape.room_bytes(rows_of_pass, width) >= min(shape.programs, rows_of_pass) * scratch_floats(width) * 4
    assert 1 <= shape.programs <= H200.multiprocessors
    # Of rows that fill a window the host's slices of the memory are what the kernels address.
    assert shape.room_bytes(rows_of_pass, width) >= rows_of_pass * shape.slices * shape.capacity * 8
    assert shape.room_bytes(rows_of_pass, width) >= rows_of_pass * shape.samples * 4


def test_the_scratch_is_what_the_kernels_address() -> None:
    shape = fused_shape(QsaSpec(), 1616, 183_999, H200, LIMIT)
    scratch = select._Scratch.of(shape, 1616, 46_000, torch.device("cpu"))
    assert scratch.room.numel() == shape.room_bytes(1616, 46_000)
    found = (scratch.floors, scratch.visible, scratch.failed, scratch.counts)
    assert [part.numel() for part in found] == [2 * 1616, 1616, 1617, 1616 * shape.slices]
    assert all(part.dtype == torch.int32 and part.data_ptr() % 4 == 0 for part in found)
    assert scratch.floors.data_ptr() % 8 == 0  # a floor is read at once
    numbers = scratch.room.numel() + 4 * sum(part.numel() for part in found)
    assert numbers <= shape.workspace_bytes(1616, 46_000) + 4


def log_binomial(n: int, k: int, p: float) -> float:
    choose = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    return choose + k * math.log(p) + (n - k) * math.log1p(-p)


def chance(n: int, p: float, least: int, most: int) -> float:
    """Of least to most successes in n trials."""
    return math.fsum(math.exp(log_binomial(n, k, p)) for k in range(max(least, 0), min(most, n) + 1))


@settings(max_examples=200)
@given(top_blocks=st.integers(1, MAX_TOP_BLOCKS), width=st.integers(1, MOST_BLOCKS))
def test_floors_rarely_fail(top_blocks: int, width: int) -> None:
    """Of scores in random order, by the binomial tail: each of the best blocks is in the sample by one in `stride`.

    Too few reach the floor where `rank` of the `top_blocks - 1` best are sampled; too many come where fewer than `rank`
    of as many as there is room for are.
    """
    stride = sample_stride(width)
    rank = floor_rank(top_blocks, stride)
    assert rank == min(
        r
        for r in range(1, 4 * (top_blocks // stride + 100))
        if stride * (r - FLOOR_SIGMAS * math.sqrt(r)) >= top_blocks
    )
    spec = QsaSpec(top_blocks=top_blocks)
    if fused_refusal(spec, BF16, BF16, True, 4 * width - 1, H200) is not None or width // stride <= rank:
        return
    assert chance(top_blocks - 1, 1 / stride, rank, top_blocks) < 1e-8
    shape = fused_shape(spec, 1616, 4 * width - 1, H200, LIMIT)
    room, usual = THREADS * shape.survivor_keys, THREADS * shape.usual_keys
    assert room >= width or chance(room, 1 / stride, 0, rank - 1) < 2e-5
    assert usual >= width or chance(usual, 1 / stride, 0, rank - 1) < 0.05


@pytest.mark.parametrize("width", [7250, 12_288, 46_000, 131_072, MOST_BLOCKS])
@pytest.mark.parametrize("rows", [64, 1616, 8192])
def test_floors_of_the_released_model_fail_for_less_than_a_row_in_100_000(rows: int, width: int) -> None:
    shape = fused_shape(QsaSpec(), rows, 4 * width - 1, H200, LIMIT)
    room = min(THREADS * shape.survivor_keys, shape.slices * shape.capacity)
    few = chance(511, 1 / shape.stride, shape.rank, 511)
    many = chance(room, 1 / shape.stride, 0, shape.rank - 1)
    # Of as many as there is room for, more in one program's tiles than its list holds.
    uneven = chance(room, 1 / shape.slices, shape.capacity + 1, room) if shape.slices > 1 else 0.0
    assert few + many + shape.slices * uneven < 1e-5


@pytest.mark.parametrize(("top_blocks", "width"), [(512, 46_000), (512, 12_288), (16, 30_000), (2048, 100_000)])
def test_random_rows_pass_their_floors(top_blocks: int, width: int) -> None:
    """400 rows of random scores, sampled as the kernels do: none lets too few or too many through, in any list."""
    shape = fused_shape(QsaSpec(top_blocks=top_blocks), 1616, 4 * width - 1, H200, LIMIT)
    random, blocks = np.random.default_rng(0), sampled_blocks(width // shape.stride, shape.stride)
    part = np.arange(width) // TILE_BLOCKS % shape.slices
    for _ in range(400):
        scores = random.random(width)
        floor = np.partition(scores[blocks], -shape.rank)[-shape.rank]
        through = scores >= floor
        assert top_blocks <= through.sum() <= THREADS * shape.survivor_keys
        assert np.bincount(part[through], minlength=shape.slices).max() <= shape.capacity


@pytest.mark.parametrize("period", [7, 61, 480, 488, 512, 976, 1000, 1952])
def test_no_period_of_the_scores_meets_the_same_blocks_again_and_again(period: int) -> None:
    width, drawn = 46_000, np.random.default_rng(period)
    stride = sample_stride(width)
    rank, sample = floor_rank(512, stride), sampled_blocks(width // stride, stride)
    for _ in range(20):
        pattern = drawn.standard_normal(period)
        scores = pattern[np.arange(width) % period] + 1e-3 * drawn.standard_normal(width)
        floor = np.sort(scores[sample])[-rank]
        assert 512 <= int((scores >= floor).sum()) <= 2048


@pytest.mark.parametrize(
    ("spec", "q_dtype", "cache_dtype", "aligned", "facts", "reason"),
    [
        (QsaSpec(), BF16, BF16, True, DeviceFacts.named("a100"), "made for sm_90, got sm_80"),
        (QsaSpec(), BF16, BF16, True, DeviceFacts.named("b200"), "made for sm_90, got sm_100"),
        (QsaSpec(index_heads=8), BF16, BF16, True, H200, "got 8 of 128"),
        (QsaSpec(index_heads=3), BF16, BF16, True, H200, "got 3 of 128"),
        (QsaSpec(index_dim=256), BF16, BF16, True, H200, "got 4 of 256"),
        (QsaSpec(), BF16, FP8, True, H200, "of one dtype, got torch.bfloat16 and torch.float8_e4m3fn"),
        (QsaSpec(), BF16, FP16, True, H200, "of one dtype, got torch.bfloat16 and torch.float16"),
        (QsaSpec(), torch.float32, torch.float32, True, H200, "got torch.float32 and torch.float32"),
        (QsaSpec(), BF16, BF16, False, H200, "do not begin at multiples of 16 bytes"),
    ],
)
def test_what_it_is_not_made_for_is_refused_by_name(
    spec: QsaSpec, q_dtype: Any, cache_dtype: Any, aligned: bool, facts: DeviceFacts, reason: str
) -> None:
    refusal = fused_refusal(spec, q_dtype, cache_dtype, aligned, 183_999, facts)
    assert refusal is not None
    assert reason in refusal


def test_what_would_leave_too_many_survivors_is_refused() -> None:
    refusal = fused_refusal(QsaSpec(top_blocks=2048), BF16, BF16, True, 8 * MOST_BLOCKS - 1, H200)
    assert refusal is not None
    assert re.search(r"2048 of 524288 blocks would leave \d+ survivors, room is for 8192", refusal)
    assert fused_refusal(QsaSpec(top_blocks=2048), BF16, BF16, True, 399_999, H200) is None


# Routes.

LONG = Call(QsaSpec(), 1616, 1, 183_999, BF16, BF16)
FEW_BLOCKS = (FUSED_FROM_SCORES - 1) // LONG.rows
"""The most that a row of such a call sees where scores in full are faster."""


@pytest.mark.parametrize("name", ["h100", "h200"])
def test_long_chunks_take_it_on_hopper(name: str) -> None:
    facts = DeviceFacts.named(name)
    fewest = replace(LONG, requests=LONG.rows // FUSED_FROM_ROWS_PER_REQUEST, max_position=4 * FEW_BLOCKS + 3)
    for call in (LONG, replace(LONG, q_dtype=FP16, cache_dtype=FP16), fewest):
        decision = choose_route("select", call, facts)
        assert str(decision.route) == "sm90:fused"
        assert decision.refused[0].reason.startswith("rows see up to")
        assert "smxx:plain" in map(str, decision.unused)
        plan = make_plan(call, facts)
        shape = plan.select.fused
        assert isinstance(shape, FusedShape)
        assert plan.select.chunk_rows == shape.chunk_rows
        rows, width = min(shape.chunk_rows, call.rows), plan.select.width_blocks
        assert plan.select.workspace_bytes == shape.workspace_bytes(rows, width)
        assert plan.select.workspace_bytes <= LIMIT
        assert choose_route("select", replace(call, batch_invariant=True), facts).route == decision.route


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rows": 64, "requests": 64}, f"scores in full are faster below {FUSED_FROM_ROWS} rows, got 64"),
        ({"rows": FUSED_FROM_ROWS - 1}, f"faster below {FUSED_FROM_ROWS} rows, got {FUSED_FROM_ROWS - 1}"),
        ({"requests": 1616}, f"faster below {FUSED_FROM_ROWS_PER_REQUEST} rows per request on average, got 1"),
        ({"max_position": 4 * FEW_BLOCKS + 2}, f"scores in full are faster below {FUSED_FROM_SCORES >> 20}M scores"),
        ({"cache_dtype": FP8}, "made for FP16 or BF16"),
        ({"q_dtype": torch.float32, "cache_dtype": torch.float32}, "made for FP16 or BF16"),
        ({"index_aligned": False}, "do not begin at multiples of 16 bytes"),
        ({"spec": QsaSpec(index_heads=8)}, "made for 2 or 4 index heads of 64 or 128, got 8 of 128"),
    ],
)
def test_other_calls_leave_it_with_the_reason(change: dict[str, Any], reason: str) -> None:
    decision = choose_route("select", replace(LONG, **change), H200)
    assert decision.route.kernel_set == "smxx"
    assert reason in {str(refusal.route): refusal.reason for refusal in decision.refused}["sm90:fused"]


def test_an_a100_has_no_image() -> None:
    decision = choose_route("select", LONG, DeviceFacts.named("a100"))
    assert decision.route.kernel_set == "smxx"
    reasons = {str(refusal.route): refusal.reason for refusal in decision.refused}
    assert reasons["sm90:fused"] == "the sm90 kernels have no image for A100 (sm_80)"


def test_pins() -> None:
    few = replace(LONG, rows=64, requests=64)
    for pin in ("sm90:fused", "fused", "sm90"):
        assert str(choose_route("select", few, H200, pin).route) == "sm90:fused"
    assert str(choose_route("select", LONG, H200, "smxx:plain").route) == "smxx:plain"
    assert choose_route("select", LONG, H200, "smxx").route.kernel_set == "smxx"
    with pytest.raises(NoRouteError, match="sm90:fused: made for FP16 or BF16"):
        choose_route("select", replace(LONG, cache_dtype=FP8), H200, "sm90:fused")


def test_explain_shows_it_for_a_gpu_that_is_not_here() -> None:
    asked = ["explain", "--rows", "1616", "--context", "184000", "--dtype", "bfloat16", "--device", "h100"]
    shown = CliRunner().invoke(app, asked)
    assert shown.exit_code == 0
    assert re.search(r"select\W+sm90:fused\W+taken", shown.stdout)


def test_a_plan_refuses_tensors_that_are_not_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (flashqsa.pipeline, flashqsa.plan):
        monkeypatch.setattr(module, "facts_here", lambda _: H200)
    rows = Rows.from_lengths([3000], [60_000])
    keys = torch.zeros(1, 1, 128, dtype=BF16).expand(15_000, 1, 128)
    cache = IndexCache(keys, torch.arange(15_000, dtype=torch.int32)[None])
    plan = flashqsa.plan_batch(rows, QsaSpec(), index_cache=cache)
    assert str(plan.select_decision.route) == "sm90:fused"
    odd = torch.zeros(3000, 4, 132, dtype=BF16)[..., 4:]
    message = "plan: wanted one whose route these tensors can take; got sm90:fused: index queries or keys do not begin"
    with pytest.raises(InputError, match=message):
        flashqsa.select_blocks(odd, cache, rows, QsaSpec(), plan=plan)
    with pytest.raises(NoRouteError, match="sm90:fused: index queries or keys do not begin at multiples of 16 bytes"):
        flashqsa.select_blocks(odd, cache, rows, QsaSpec(), route="sm90:fused")


def test_the_pages_name_the_limits() -> None:
    pages = [
        " ".join((Path(__file__).parents[1] / "docs" / name).read_text("utf-8").split())
        for name in ("kernels/select.md", "ROUTES.md")
    ]
    shape = fused_shape(QsaSpec(), 1616, 183_999, H200, LIMIT)
    for text in (
        f"from {FUSED_FROM_ROWS:,} rows on, {FUSED_FROM_ROWS_PER_REQUEST} or more to a request on average",
        f"{FUSED_FROM_SCORES >> 20}M scores",
        f"{shape.rank} of {46_000 // shape.stride:,} samples for 512 of 46,000",
        f"{shape.workspace_bytes(1616, 46_000) >> 20} MiB for 1,616 rows of 46,000 blocks",
    ):
        assert text in pages[0]
    assert f"from {FUSED_FROM_ROWS:,} rows on, with {FUSED_FROM_ROWS_PER_REQUEST} rows per request" in pages[1]
