"""The exact top-k on a GPU: compared exactly with a full sort, on every score that broke others, under CUDA graphs."""

from __future__ import annotations

import pytest
import torch

from flashqsa import reference
from flashqsa.config import TopkConfig, score_config, topk_config
from flashqsa.device import facts_of
from flashqsa.kernels.nvrtc.topk import topk
from flashqsa.testing import compare
from flashqsa.testing.cases import Case
from flashqsa.testing.inputs import build
from flashqsa.testing.nasty import NASTY_SCORES, NastyScores, long_row, scores_of, tie_plateau
from flashqsa.values import MAX_TOP_BLOCKS, SEGMENT_BLOCKS, QsaSpec, Scores, Selection

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)


def configs() -> list[TopkConfig]:
    capability = facts_of(DEVICE).capability
    assert capability is not None
    return [TopkConfig(capability, 256, 1536), TopkConfig(capability, 512, 512)]


def poisoned(rows: int, top_blocks: int) -> Selection:
    blocks = torch.full((rows, top_blocks), -77, dtype=torch.int32, device=DEVICE)
    return Selection(blocks, torch.full((rows,), -77, dtype=torch.int32, device=DEVICE))


def on_device(scores: Scores) -> Scores:
    return Scores(scores.values.to(DEVICE), scores.visible.to(DEVICE))


def run(scores: Scores, top_blocks: int, config: TopkConfig) -> Selection:
    out = poisoned(scores.values.shape[0], top_blocks)
    topk(scores, out, config)
    return Selection(out.blocks.cpu(), out.count.cpu())


def sorted_out(scores: Scores, top_blocks: int) -> Selection:
    """The reference's selection, by one sort over all rows where they are many."""
    values, visible = scores.values, scores.visible
    seen = torch.arange(values.shape[1]) < visible[:, None]
    ranked = torch.where(seen & ~values.isnan(), values, float("-inf")) + 0.0
    order = torch.sort(ranked, dim=1, descending=True, stable=True)
    width = min(top_blocks, values.shape[1])
    chosen = torch.where(order.values[:, :width] > float("-inf"), order.indices[:, :width], values.shape[1])
    chosen = chosen.sort(dim=1).values
    blocks = torch.full((values.shape[0], top_blocks), -1, dtype=torch.int32)
    blocks[:, :width] = torch.where(chosen < values.shape[1], chosen, -1).to(torch.int32)
    return Selection(blocks, (blocks >= 0).sum(dim=1, dtype=torch.int32))


@pytest.mark.parametrize("nasty", NASTY_SCORES, ids=str)
def test_nasty_scores(nasty: NastyScores) -> None:
    scores = nasty.build()
    for top_blocks in nasty.top_blocks:
        results = [run(on_device(scores), top_blocks, config) for config in configs()]
        wanted = sorted_out(scores, top_blocks)
        assert [compare.same_selection(got, wanted) for got in results] == [None, None], top_blocks


def test_one_sort_over_all_rows_is_the_reference() -> None:
    for nasty in NASTY_SCORES[:20]:
        scores = nasty.build()
        few = Scores(scores.values[:3], scores.visible[:3])
        assert compare.same_selection(sorted_out(few, 512), reference.topk(few, 512)) is None


@pytest.mark.parametrize("blocks", [131_072, 262_143, 262_144])
@pytest.mark.parametrize("top_blocks", [512, 2048])
def test_rows_of_a_million_tokens(blocks: int, top_blocks: int) -> None:
    for scores in (long_row(blocks), tie_plateau(blocks)):
        results = [run(on_device(scores), top_blocks, config) for config in configs()]
        wanted = sorted_out(scores, top_blocks)
        assert [compare.same_selection(got, wanted) for got in results] == [None, None]


@pytest.mark.parametrize("order", ["ascending", "descending", "clustered"])
def test_orders_of_scores(order: str) -> None:
    ramp = torch.arange(40_000).float()
    values = {
        "ascending": ramp,
        "descending": ramp.flip(0),
        "clustered": (ramp % 4096) + torch.where(ramp // 64 % 37 == 5, 1e6, 0.0),
    }[order]
    scores = scores_of(values.repeat(3, 1), [40_000, 39_999, 20_017])
    wanted = sorted_out(scores, 512)
    assert [compare.same_selection(run(on_device(scores), 512, config), wanted) for config in configs()] == [None, None]


def test_the_scorer_s_maxima_are_used() -> None:
    scores = scores_of(torch.rand(4, 20_000), [20_000, 9_000, 700, 0], width=20_000)
    segments = 20_000 // SEGMENT_BLOCKS
    shown = torch.where(torch.arange(20_000) < scores.visible[:, None], scores.values, float("-inf"))
    maxima = shown.nan_to_num(float("-inf"), posinf=float("inf"), neginf=float("-inf")).view(4, segments, -1).amax(2)
    segment = torch.arange(segments) * SEGMENT_BLOCKS
    maxima[segment >= scores.visible[:, None]] = float("nan")
    given_maxima = torch.full((4, segments + 2), float("inf"))
    given_maxima[:, :segments] = maxima
    whole = on_device(scores)
    got = run(Scores(whole.values, whole.visible, given_maxima.to(DEVICE)), 512, configs()[0])
    assert compare.same_selection(got, sorted_out(scores, 512)) is None


@pytest.mark.parametrize("offset", [0, 1, 2, 3])
def test_rows_at_any_address(offset: int) -> None:
    scores = scores_of(torch.rand(5, 9_001), [9_001, 9_000, 8_999, 17, 0])
    buffer = torch.full((5, 9_100 + offset), float("inf"), device=DEVICE)
    view = buffer[:, offset : offset + scores.values.shape[1]]
    view.copy_(scores.values)
    got = run(Scores(view, scores.visible.to(DEVICE)), 512, configs()[0])
    assert compare.same_selection(got, sorted_out(scores, 512)) is None


def test_writes_nothing_but_its_rows() -> None:
    scores = on_device(scores_of(torch.rand(3, 1000)))
    blocks = torch.full((5, 600), -77, dtype=torch.int32, device=DEVICE)
    count = torch.full((5,), -77, dtype=torch.int32, device=DEVICE)
    topk(scores, Selection(blocks[1:4, 40:552], count[1:4]), configs()[0])
    wanted = sorted_out(Scores(scores.values.cpu(), scores.visible.cpu()), 512)
    assert torch.equal(blocks[1:4, 40:552].cpu(), wanted.blocks)
    blocks[1:4, 40:552] = -77
    count[1:4] = -77
    assert bool((blocks == -77).all())
    assert bool((count == -77).all())


def test_no_rows() -> None:
    empty = Scores(torch.empty(0, 700, device=DEVICE), torch.empty(0, dtype=torch.int32, device=DEVICE))
    assert run(empty, 512, configs()[0]).count.numel() == 0


def test_more_blocks_than_can_be_selected() -> None:
    with pytest.raises(ValueError, match=f"at most {MAX_TOP_BLOCKS}"):
        run(on_device(scores_of(torch.rand(1, 4000))), MAX_TOP_BLOCKS + 1, configs()[0])


def test_same_bits_on_every_call_and_in_any_company() -> None:
    scores = scores_of((torch.randn(200, 12_000) * 100).round() / 100)
    whole = on_device(scores)
    first = run(whole, 512, configs()[0])
    for _ in range(10):
        again = run(whole, 512, configs()[0])
        assert torch.equal(again.blocks, first.blocks)
    for rows in (1, 7, 64):
        part = run(
            Scores(whole.values[:rows], whole.visible[:rows]), 512, topk_config(QsaSpec(), rows, facts_of(DEVICE))
        )
        assert torch.equal(part.blocks, first.blocks[:rows])


@pytest.mark.parametrize("blocks", [1_000, 60_000])
def test_replay_of_a_cuda_graph(blocks: int) -> None:
    first, second = (on_device(scores_of(torch.rand(5, blocks), [blocks, 3, 0, blocks // 2, 513])) for _ in range(2))
    values, visible = first.values.clone(), first.visible.clone()
    out, config = poisoned(5, 512), topk_config(QsaSpec(), 5, facts_of(DEVICE))
    topk(Scores(values, visible), out, config)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        topk(Scores(values, visible), out, config)
    for scores in (second, first):
        values.copy_(scores.values)
        visible.copy_(scores.visible.flip(0))
        out.blocks.fill_(-77)
        out.count.fill_(-77)
        graph.replay()
        wanted = sorted_out(Scores(values.cpu(), visible.cpu()), 512)
        assert compare.same_selection(Selection(out.blocks.cpu(), out.count.cpu()), wanted) is None


def test_replay_of_score_and_top_k() -> None:
    pytest.importorskip("triton")
    from flashqsa.kernels.smxx.score import score

    spec, facts = QsaSpec(top_blocks=16), facts_of(DEVICE)
    case = Case("replayed", (3, 1, 5), (900, 4000, 250), spec, torch.bfloat16, torch.bfloat16, padding=(2,))
    inputs = build(case, DEVICE)
    rows, out = inputs.rows, poisoned(inputs.rows.count, 16)
    config = score_config(spec, rows.count, 3, rows.max_position, 2, facts)

    def select() -> None:
        topk(score(inputs.index_q, inputs.index_cache, rows, spec, config), out, topk_config(spec, rows.count, facts))

    select()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        select()
    for back in (0, 1, 30):
        rows.position.sub_(back)
        inputs.index_q.copy_(inputs.index_q.flip(0))
        out.blocks.fill_(-77)
        graph.replay()
        replayed = Selection(out.blocks.clone(), out.count.clone())
        select()
        assert compare.same_selection(replayed, out) is None
        assert int(out.count.max()) == 16


def test_runs_on_the_current_stream() -> None:
    scores = scores_of(torch.rand(64, 30_000))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        values = torch.zeros(64, 30_003, device=DEVICE)
        torch.cuda._sleep(20_000_000)
        values.copy_(scores.values.to(DEVICE))
        out = poisoned(64, 512)
        topk(Scores(values, scores.visible.to(DEVICE)), out, configs()[0])
    stream.synchronize()
    wanted = sorted_out(scores, 512)
    assert compare.same_selection(Selection(out.blocks.cpu(), out.count.cpu()), wanted) is None
