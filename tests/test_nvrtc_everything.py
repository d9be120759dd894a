"""Selections of rows that take every visible block, on any NVIDIA GPU: emulated anywhere, run where there is a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from flashqsa import reference
from flashqsa.config import TopkConfig
from flashqsa.kernels import cpu, nvrtc
from flashqsa.kernels.nvrtc import NvrtcNotFoundError, Source, compile_source, everything
from flashqsa.kernels.nvrtc.topk import topk
from flashqsa.testing import compare, nasty
from flashqsa.testing.cases import CASES, Case, named
from flashqsa.testing.inputs import build
from flashqsa.values import IndexCache, QsaSpec, Rows, Scores, Selection
from tests.nvrtc_emulate import MACHINES, Machine, copied, machine_named

POISON = 1_234_567
MOST = torch.iinfo(torch.int32).max


@pytest.fixture(scope="module", params=MACHINES)
def machine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    with machine_named(request.param, tmp_path_factory.mktemp("nvrtc")) as found:
        yield found


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Selections are made in memory that holds another number everywhere."""
    plain = everything.empty_selection

    def poisoned(rows: Rows, spec: QsaSpec) -> Selection:
        selection = plain(rows, spec)
        return Selection(selection.blocks.fill_(POISON), selection.count.fill_(POISON))

    monkeypatch.setattr(everything, "empty_selection", poisoned)


def select(machine: Machine, table: torch.Tensor, page_blocks: int, pages: int, rows: Rows, spec: QsaSpec) -> Selection:
    """Over a cache whose keys are not there to be read: they are views of one number."""
    keys = torch.zeros(1, device=machine.device).expand(pages, page_blocks, spec.index_dim)
    cache = IndexCache(keys, copied(machine.device, table)[0])
    found = nvrtc.select_everything(cache, machine.rows(rows), spec, machine.capability)
    assert found.blocks.device.type == found.count.device.type == machine.device.type
    return Selection(found.blocks.cpu(), found.count.cpu())


BELOW_BUDGET = [c for c in CASES if c.rows and c.spec.selects_everything(max(c.context_lengths) - 1)]


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("case", BELOW_BUDGET, ids=lambda case: case.name)
def test_the_cases_below_the_budget(case: Case, machine: Machine) -> None:
    inputs = build(case)
    cache = inputs.index_cache
    got = select(machine, cache.page_table, cache.page_blocks, cache.keys.shape[0], inputs.rows, inputs.spec)
    assert compare.same_selection(got, cpu.select_everything(cache, inputs.rows, inputs.spec)) is None


def test_the_cases_have_holes_and_padding() -> None:
    assert any(case.holes for case in BELOW_BUDGET)
    assert any(case.padding for case in BELOW_BUDGET)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("page_blocks", [1, 3, 16, 700])
@pytest.mark.parametrize("top_blocks", [1, 33, 512, 700])
def test_any_holes(top_blocks: int, page_blocks: int, machine: Machine) -> None:
    spec = QsaSpec(top_blocks=top_blocks, index_dim=8)
    generator = torch.Generator().manual_seed(top_blocks + page_blocks)
    pages = -(-top_blocks // page_blocks)
    table = torch.randint(0, 2, (3, pages + 1), generator=generator, dtype=torch.int32) - 1
    table[2] = 0
    # Rows that see everything, rows around the 256 blocks a warp looks at in one go, and the first few.
    seen = [n for n in (0, 1, 2, 31, 32, 33, 255, 256, 257, top_blocks - 1, top_blocks) if 0 <= n <= top_blocks]
    positions = sorted(
        {max(4 * n + offset, 0) for n in seen for offset in (-1, 0, 2) if 4 * n + offset < 4 * top_blocks}
    )
    request = torch.arange(3, dtype=torch.int32).repeat_interleave(len(positions) + 1)
    position = torch.tensor([*positions, -1] * 3, dtype=torch.int32)
    rows = Rows(request, position, 4 * top_blocks - 1)
    got = select(machine, table, page_blocks, 1, rows, spec)
    wanted = cpu.select_everything(IndexCache(torch.empty(1, page_blocks, 8), table), rows, spec)
    assert compare.same_selection(got, wanted) is None
    assert int(wanted.count.max()) == top_blocks


@pytest.mark.usefixtures("poisoned_memory")
def test_what_no_call_may_have_is_passed_over(machine: Machine) -> None:
    spec = QsaSpec(top_blocks=9)
    table = torch.tensor([[0, 7, -5], [1, 2, 3]], dtype=torch.int32)
    request = torch.tensor([0, 1, 1, 2, MOST, -1, -7, 1, 1], dtype=torch.int32)
    position = torch.tensor([27, MOST, MOST - 1, 11, 11, 11, MOST, -1, -MOST], dtype=torch.int32)
    got = select(machine, table, 2, 4, Rows(request, position, 27), spec)
    assert got.count.tolist() == [2, 6, 6, 0, 0, 0, 0, 0, 0]
    assert got.blocks[:2].tolist() == [[0, 1] + [-1] * 7, [0, 1, 2, 3, 4, 5, -1, -1, -1]]
    assert bool((got.blocks[3:] == -1).all())


def test_no_rows_and_no_pages(machine: Machine) -> None:
    spec = QsaSpec(top_blocks=3)
    nobody = select(machine, torch.zeros(0, 0, dtype=torch.int32), 4, 0, Rows.from_lengths([], []), spec)
    assert nobody.blocks.shape == (0, 3)
    nothing = select(machine, torch.zeros(1, 0, dtype=torch.int32), 4, 0, Rows.from_lengths([2], [9]), spec)
    assert nothing.count.tolist() == [0, 0]
    assert nothing.blocks.tolist() == [[-1] * 3] * 2


def test_an_empty_selection_is_memory_for_every_row() -> None:
    rows, spec = Rows.from_lengths([2, 1], [9, 4], pad_to=5), QsaSpec(top_blocks=7)
    selection = nvrtc.empty_selection(rows, spec)
    assert (selection.blocks.shape, selection.count.shape) == ((5, 7), (5,))
    assert selection.blocks.dtype == selection.count.dtype == torch.int32
    assert selection.blocks.stride() == (7, 1)


# On a GPU.


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("top_blocks", [1, 37, 512, 1000])
@pytest.mark.parametrize(
    "build_scores", [nasty.short_rows, nasty.one_nan, nasty.staggered_windows, nasty.quantised_ties]
)
def test_the_top_k_writes_every_entry_of_an_empty_selection(
    build_scores: Callable[[], Scores], top_blocks: int, tmp_path: Path
) -> None:
    scores = build_scores()
    rows = Rows.from_lengths([scores.values.shape[0]], [scores.values.shape[0]])
    with machine_named("gpu", tmp_path) as machine:
        selection = everything.empty_selection(machine.rows(rows), QsaSpec(top_blocks=top_blocks))
        assert bool((selection.blocks == POISON).all())
        given = Scores(scores.values.to(machine.device), scores.visible.to(machine.device))
        topk(given, selection, TopkConfig(machine.capability, 256, 1024))
    got = Selection(selection.blocks.cpu(), selection.count.cpu())
    assert compare.same_selection(got, reference.topk(scores, top_blocks)) is None


@pytest.mark.gpu
def test_a_graph_selects_what_its_rows_say_when_it_is_replayed(tmp_path: Path) -> None:
    inputs = build(named("holes-below-budget"))
    cache, rows, spec = inputs.index_cache, inputs.rows, inputs.spec
    with machine_named("gpu", tmp_path) as machine:
        ours, held = machine.index_cache(cache), machine.rows(rows)
        nvrtc.select_everything(ours, held, spec, machine.capability)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = nvrtc.select_everything(ours, held, spec, machine.capability)
        for shift in (0, 1, 5, 100_000):
            position = (rows.position - shift).clamp(min=-1)
            held.position.copy_(position)
            found.blocks.fill_(POISON)
            graph.replay()
            got = Selection(found.blocks.cpu(), found.count.cpu())
            wanted = cpu.select_everything(cache, Rows(rows.request, position, rows.max_position), spec)
            assert compare.same_selection(got, wanted) is None


# Compiled for every GPU.


@pytest.mark.parametrize("capability", [(7, 0), (7, 5), (8, 0), (9, 0), (12, 0)], ids=str)
def test_the_kernel_compiles(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLASHQSA_CACHE_DIR", str(tmp_path))
    compile_source.cache_clear()
    try:
        found = compile_source(Source("everything.cu", headers=("paging.cuh",)), capability)
    except NvrtcNotFoundError as error:
        pytest.skip(str(error))
    finally:
        compile_source.cache_clear()
    assert re.findall(r"Compiling entry function '(\w+)'", found.log) == ["flashqsa_select_everything"]
    assert set(re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", found.log)) == {"0"}
