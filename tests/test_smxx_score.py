"""The Triton score stage: against the reference, over poisoned memory. Interpreted where there is no GPU.

The interpreter is right for FP16 and FP32 only (its BF16 products are wrong), so other queries need a GPU.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="the kernels of smxx are written in Triton")

from flashqsa import reference
from flashqsa.config import ScoreConfig
from flashqsa.kernels.smxx.score import score
from flashqsa.testing import compare
from flashqsa.testing.cases import CASES, Case, named, spec_of
from flashqsa.testing.inputs import Inputs, build, fill_unwritten, relocate, take_rows
from flashqsa.values import SEGMENT_BLOCKS, IndexCache, QsaSpec, Rows, Scores

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
FP16, FP32 = torch.float16, torch.float32

WINDOWS = (
    ScoreConfig(1, 1, 64, 3, 1, warps=4, stages=2, decode_fp8=not ON_GPU),
    ScoreConfig(4, 4, 32, 1, 3, warps=4, stages=1, decode_fp8=True),
    ScoreConfig(8, 5, 64, 2, 1, warps=4, stages=3, decode_fp8=not ON_GPU),
    ScoreConfig(32, 32, 128, 1, 2, warps=4, stages=2, decode_fp8=not ON_GPU),
)
"""Windows of every kind: padded heads, a tile that is full, one that is not, two heads in one thread; slices, runs."""

NAMES = (
    "prefill",
    "prefill-k-1",
    "prefill-normal-scores",
    "prefill-normal-scores-fp8",
    "prefill-fp8-fp32-queries",
    "chunks-at-840-to-843",
    "index-pages-of-3-blocks",
    "verify-1-to-12",
    "requests-without-rows",
    "no-rows",
    "no-requests",
    "only-padding",
    "contexts-of-1-to-3-and-5",
    "holes",
    "nothing-but-holes",
    "holes-below-budget",
)


def windows_for(inputs: Inputs) -> tuple[ScoreConfig, ...]:
    """The windows to try: small ones for FP32 queries, of which Triton compiles large tiles for a minute."""
    return WINDOWS[:2] if inputs.index_q.dtype == FP32 else WINDOWS


def poisoned_scores(inputs: Inputs, config: ScoreConfig, monkeypatch: pytest.MonkeyPatch) -> Scores:
    """Scores written over NaN."""
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", poisoned_empty)
        return score(inputs.index_q, inputs.index_cache, inputs.rows, inputs.spec, config)


def poisoned_empty(*size: int | tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    fill = float("nan") if dtype.is_floating_point else -77
    return torch.full(size[0] if isinstance(size[0], tuple) else size, fill, dtype=dtype, device=device)  # type: ignore[arg-type]


def on_cpu(inputs: Inputs) -> Inputs:
    cache = inputs.index_cache
    rows = Rows(inputs.rows.request.cpu(), inputs.rows.position.cpu(), inputs.rows.max_position)
    moved = IndexCache(cache.keys.cpu(), cache.page_table.cpu(), cache.scale)
    return replace(inputs, index_q=inputs.index_q.cpu(), index_cache=moved, rows=rows)


def failure(got: Scores, inputs: Inputs) -> str | None:
    """What is wrong with scores written over NaN, or None."""
    plain = on_cpu(inputs)
    arguments = (plain.index_q, plain.index_cache, plain.rows, plain.spec)
    exact = reference.score(*arguments)
    low = reference.score(*arguments, precision=FP32)
    maxima = None if got.maxima is None else got.maxima.cpu()
    got = Scores(got.values.cpu(), got.visible.cpu(), maxima)
    for row, visible in enumerate(got.visible.tolist()):
        if not bool(got.values[row, visible:].isnan().all()):
            return f"row {row}: written past its {visible} blocks"
        if maxima is not None and visible > SEGMENT_BLOCKS * plain.spec.top_blocks:
            wanted = segment_maxima(got.values[row, :visible])
            if not torch.equal(maxima[row, : wanted.numel()], wanted):
                return f"row {row}: other segment maxima"
            if not bool(maxima[row, wanted.numel() :].isnan().all()):
                return f"row {row}: maxima written past its {visible} blocks"
    return compare.scores_within_tolerance(got, exact, compare.score_tolerance(low, exact))


def segment_maxima(values: torch.Tensor) -> torch.Tensor:
    padding = -values.numel() % SEGMENT_BLOCKS
    values = torch.where(values.isnan(), float("-inf"), values)
    return torch.nn.functional.pad(values, (0, padding), value=float("-inf")).view(-1, SEGMENT_BLOCKS).amax(dim=1)


@pytest.mark.parametrize("name", NAMES)
def test_scores_are_the_reference_s(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = build(named(name), DEVICE)
    config = windows_for(inputs)[1] if ON_GPU or inputs.rows.count <= 8 else WINDOWS[2]
    assert failure(poisoned_scores(inputs, config, monkeypatch), inputs) is None


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_under_every_window(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = build(case, DEVICE)
    for config in windows_for(inputs):
        assert failure(poisoned_scores(inputs, config, monkeypatch), inputs) is None, config


@pytest.mark.parametrize("config", WINDOWS, ids=lambda config: f"{config.rows}-rows")
def test_windows_of_several_requests(config: ScoreConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    # 40 rows of one request, then one each of three: windows straddle requests, and rows see 9 to 125 blocks.
    inputs = build(replace(named("prefill-and-decode"), q_dtype=FP16, cache_dtype=FP16, exact_scores=False), DEVICE)
    assert failure(poisoned_scores(inputs, config, monkeypatch), inputs) is None


@pytest.mark.parametrize("config", [WINDOWS[0], WINDOWS[3]], ids=lambda config: f"{config.rows}-rows")
def test_segment_maxima(config: ScoreConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    # 3 blocks selected of up to 131: segments outnumber them, so their maxima are written.
    case = Case("maxima", (3, 2), (524, 300), spec_of(6, 1, top_blocks=3), FP16, FP16, holes=((0, 1),), padding=(0,))
    inputs = build(case, DEVICE)
    got = poisoned_scores(inputs, config, monkeypatch)
    assert got.maxima is not None
    assert failure(got, inputs) is None


def test_no_maxima_where_every_segment_is_looked_into() -> None:
    inputs = build(named("prefill"), DEVICE)
    assert score(inputs.index_q, inputs.index_cache, inputs.rows, inputs.spec, WINDOWS[1]).maxima is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_odd_keys_stay_where_they_are(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = build(Case("odd-key", (4,), (160,), spec_of(6, 1), FP32, FP32, order="identity"), DEVICE)
    inputs.index_cache.keys[3, 2, 5] = value
    for config in WINDOWS[:2]:
        got = poisoned_scores(inputs, config, monkeypatch)
        assert failure(got, inputs) is None, config
        assert bool(got.values[:, :14].isfinite().all())


def test_three_index_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = QsaSpec(q_heads=6, kv_heads=1, head_dim=64, index_heads=3, index_dim=64, top_blocks=8)
    inputs = build(Case("three-heads", (9,), (200,), spec, FP16, FP16, exact_scores=False), DEVICE)
    inputs.index_cache.keys[inputs.index_cache.page_table[0, 1], 0, 7] = float("inf")
    for config in WINDOWS[1:3]:
        assert failure(poisoned_scores(inputs, config, monkeypatch), inputs) is None, config


def test_same_bits_wherever_pages_lie_and_whatever_they_hold_besides() -> None:
    case = replace(named("prefill-normal-scores"), query_lengths=(20,), q_dtype=FP16, cache_dtype=FP16)
    inputs, config = build(case, DEVICE), WINDOWS[2]
    first = visible_bits(inputs, config)
    others = (inputs, relocate(inputs, "reversed"), relocate(inputs, "random"), fill_unwritten(inputs, "fp32-bytes"))
    for other in others:
        assert compare.same_bits(visible_bits(other, config), first)


def visible_bits(inputs: Inputs, config: ScoreConfig) -> torch.Tensor:
    """All visible scores of a call, in one row."""
    got = score(inputs.index_q, inputs.index_cache, inputs.rows, inputs.spec, config)
    seen = torch.arange(got.values.shape[1], device=got.values.device) < got.visible[:, None]
    return got.values[seen]


def test_a_row_scores_the_same_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = build(replace(named("requests-of-3-8-13"), q_dtype=FP16, cache_dtype=FP16, exact_scores=True), DEVICE)
    whole = poisoned_scores(inputs, WINDOWS[2], monkeypatch)
    for row in range(0, inputs.rows.count, 5):
        alone = poisoned_scores(take_rows(inputs, row, row + 1), WINDOWS[0], monkeypatch)
        seen = int(alone.visible[0])
        assert torch.equal(alone.values[0, :seen], whole.values[row, :seen])


def test_keys_of_a_wider_view(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = build(named("pages-in-order"), DEVICE)
    cache = inputs.index_cache
    pages, blocks, dim = cache.keys.shape
    pool = torch.full((pages, blocks + 1, dim + 16), float("nan"), dtype=cache.keys.dtype, device=DEVICE)
    pool[:, :blocks, :dim] = cache.keys
    queries = torch.full((inputs.rows.count, 5, dim + 8), float("nan"), dtype=inputs.index_q.dtype, device=DEVICE)
    queries[:, :4, :dim] = inputs.index_q
    viewed = replace(inputs, index_q=queries[:, :4, :dim], index_cache=replace(cache, keys=pool[:, :blocks, :dim]))
    assert failure(poisoned_scores(viewed, WINDOWS[1], monkeypatch), viewed) is None


@pytest.mark.gpu
def test_a_pool_of_more_than_2_to_the_31_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = build(Case("far-pages", (6,), (600,), spec_of(6, 1), torch.bfloat16, torch.bfloat16), DEVICE)
    cache, stride = inputs.index_cache, 80_000_000
    pages, blocks, dim = cache.keys.shape
    far = torch.empty((pages - 1) * stride + blocks * dim, dtype=torch.bfloat16, device=DEVICE)
    keys = far.as_strided((pages, blocks, dim), (stride, dim, 1))
    keys.copy_(cache.keys)
    assert (pages - 1) * stride > 1 << 31
    moved = replace(inputs, index_cache=replace(cache, keys=keys))
    got = poisoned_scores(moved, WINDOWS[2], monkeypatch)
    near = poisoned_scores(inputs, WINDOWS[2], monkeypatch)
    assert compare.same_bits(got.values, near.values)
