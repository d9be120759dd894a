"""Figures of a selection: each equals what plain loops over sets count."""

from __future__ import annotations

import json
from itertools import combinations, pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from flashqsa import pipeline
from flashqsa.__main__ import app
from flashqsa.cli import stats
from flashqsa.testing.cases import Case, spec_of
from flashqsa.testing.inputs import build
from flashqsa.testing.selections import locality_of
from flashqsa.values import QsaSpec, Rows, Selection

SPEC = QsaSpec(q_heads=2, kv_heads=1, head_dim=16, index_heads=2, index_dim=16, top_blocks=6)


def random_call(lengths: list[tuple[int, int]], padding: int, seed: int) -> tuple[Selection, Rows]:
    """Rows of requests (queries, context), and a random valid selection with some blocks left out of a few rows."""
    generator = torch.Generator().manual_seed(seed)
    queries, contexts = [min(q, c) for q, c in lengths], [c for _, c in lengths]
    rows = Rows.from_lengths(queries, contexts, pad_to=sum(queries) + padding)
    blocks = torch.full((rows.count, SPEC.top_blocks), -1, dtype=torch.int32)
    count = torch.zeros(rows.count, dtype=torch.int32)
    for row, visible in enumerate(rows.visible_blocks(SPEC).tolist()):
        held = min(visible, SPEC.top_blocks - int(torch.randint(0, 2, (1,), generator=generator)) * (seed % 3))
        chosen = torch.randperm(visible, generator=generator)[:held].sort().values
        blocks[row, :held], count[row] = chosen.to(torch.int32), held
    return Selection(blocks, count), rows


calls = st.builds(
    random_call,
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 140)), min_size=1, max_size=4),
    st.integers(0, 2),
    st.integers(0, 10_000),
)


def chosen_sets(selection: Selection, rows: Rows) -> list[tuple[int, int, set[int]] | None]:
    """Request, position and blocks of each row that chooses; None for the others."""
    found: list[tuple[int, int, set[int]] | None] = []
    for row in range(rows.count):
        request, position = int(rows.request[row]), int(rows.position[row])
        if request < 0 or SPEC.visible_blocks(position) <= SPEC.top_blocks:
            found.append(None)
        else:
            found.append((request, position, set(selection.blocks[row, : int(selection.count[row])].tolist())))
    return found


def runs_of(sets: list[tuple[int, int, set[int]] | None]) -> list[list[set[int]]]:
    """Runs of neighbouring tokens of one request that stand next to each other."""
    runs: list[list[set[int]]] = []
    before: tuple[int, int] | None = None
    for entry in sets:
        if entry is None:
            before = None
            continue
        if before != (entry[0], entry[1] - 1):
            runs.append([])
        runs[-1].append(entry[2])
        before = (entry[0], entry[1])
    return runs


@settings(max_examples=40)
@given(calls)
def test_overlap_and_unions_equal_set_arithmetic(call: tuple[Selection, Rows]) -> None:
    selection, rows = call
    runs = runs_of(chosen_sets(selection, rows))
    overlaps = [len(a & b) / len(a | b) if a | b else 0.0 for run in runs for a, b in pairwise(run)]
    found = stats.jaccard(selection, rows, SPEC)
    assert found == (pytest.approx(sum(overlaps) / len(overlaps)) if overlaps else None)
    for size in stats.GROUP_ROWS:
        groups = [run[at : at + size] for run in runs for at in range(0, len(run) - size + 1, size)]
        union = sum(len(set().union(*group)) for group in groups)
        held = sum(len(row) for group in groups for row in group) / size
        wanted = pytest.approx(union / held) if held else None
        assert stats.union_of_groups(selection, rows, SPEC, size) == wanted


@settings(max_examples=40)
@given(calls, st.sampled_from([4, 8, 16, 64]))
def test_pages_and_distances_equal_counting(call: tuple[Selection, Rows], page_tokens: int) -> None:
    selection, rows = call
    per_row: list[int] = []
    read: set[tuple[int, int]] = set()
    seen: dict[int, int] = {}
    distances: list[int] = []
    for entry in chosen_sets(selection, rows):
        if entry is None:
            continue
        request, position, blocks = entry
        tokens = {token for block in blocks for token in range(4 * block, 4 * block + 4)}
        tokens |= set(range(4 * SPEC.visible_blocks(position), position + 1))
        pages = {token // page_tokens for token in tokens}
        per_row.append(len(pages))
        read |= {(request, page) for page in pages}
        seen[request] = max(seen.get(request, 0), position // page_tokens + 1)
        distances += [position - (4 * block + 3) for block in blocks]
    mean = sum(per_row) / len(per_row) if per_row else 0.0
    found, touched, visible = stats.pages_touched(selection, rows, SPEC, page_tokens)
    assert found == pytest.approx(mean)
    assert (touched, visible) == (len(read), sum(seen.values()))
    shares = [
        sum(low <= distance < high for distance in distances) / max(len(distances), 1)
        for low, high in pairwise(stats.DISTANCE_EDGES)
    ]
    assert stats.distance_profile(selection, rows, SPEC) == pytest.approx(tuple(shares))


@pytest.mark.parametrize(
    ("lengths", "zero_keys"), [(((90,), (90,)), False), (((30, 3), (80, 37)), False), (((60,), (60,)), True)]
)
def test_ties_equal_counting(lengths: tuple[tuple[int, ...], tuple[int, ...]], zero_keys: bool) -> None:
    inputs = build(Case("ties", *lengths, spec_of(6, 1, top_blocks=6), padding=(0,)))
    if zero_keys:
        inputs.index_cache.keys.zero_()
    scores = pipeline.KERNEL_SETS["cpu"].score(inputs.index_q, inputs.index_cache, inputs.rows, inputs.spec)
    tied = at_zero = blocks = 0
    for row, visible in enumerate(inputs.rows.visible_blocks(inputs.spec).tolist()):
        if visible <= inputs.spec.top_blocks:
            continue
        values = sorted(scores.values[row, :visible].tolist(), reverse=True)
        cut = values[inputs.spec.top_blocks - 1]
        if values[inputs.spec.top_blocks] == cut:
            tied += 1
            at_zero += cut == 0
            blocks += values.count(cut)
    assert tied > 0
    found = stats.ties_at_cut(inputs.index_q, inputs.index_cache, inputs.rows, inputs.spec)
    assert (found.rows, found.rows_at_zero) == (tied, at_zero)
    assert found.blocks_per_row == pytest.approx(blocks / tied)
    assert (found.rows_at_zero == found.rows) or not zero_keys


def test_scores_that_are_no_numbers_do_not_tie() -> None:
    inputs = build(Case("nan", (40,), (40,), spec_of(6, 1, top_blocks=2), exact_scores=False))
    inputs.index_cache.keys[int(inputs.index_cache.page_table[0, 0])] = float("nan")
    found = stats.ties_at_cut(inputs.index_q, inputs.index_cache, inputs.rows, inputs.spec)
    assert found.rows == 0


def test_equal_and_disjoint_rows_are_the_extremes() -> None:
    rows = Rows.from_lengths([16], [400])
    count = torch.full((16,), 6, dtype=torch.int32)
    equal = Selection(torch.arange(6, dtype=torch.int32).repeat(16, 1), count)
    apart = Selection(torch.arange(96, dtype=torch.int32).view(16, 6), count)
    for selection, overlap, unions in ((equal, 1.0, [1, 1, 1, 1]), (apart, 0.0, [2, 4, 8, 16])):
        found = stats.stats_of(selection, rows, SPEC, 64)
        assert found.jaccard == overlap
        assert list(found.union.values()) == unions


def test_figures_agree_with_the_generator_s_own() -> None:
    spec = QsaSpec(q_heads=2, kv_heads=1, head_dim=16, top_blocks=32)
    case = Case("far", (64,), (2000,), spec, regime="far")
    inputs = build(case)
    assert inputs.selection is not None
    wanted = locality_of(inputs.selection, inputs.rows, spec)
    assert stats.jaccard(inputs.selection, inputs.rows, spec) == pytest.approx(wanted.jaccard)
    for size in stats.GROUP_ROWS:
        found = stats.union_of_groups(inputs.selection, inputs.rows, spec, size)
        assert found == pytest.approx(wanted.unions[size])


def test_rows_that_take_all_they_see_tell_nothing() -> None:
    selection, rows = random_call([(20, 24)], 1, 0)
    found = stats.stats_of(selection, rows, SPEC, 64)
    assert (found.choosing, found.jaccard, found.union, found.pages_read) == (0, None, {}, 0)
    assert not any(found.distance)


def test_the_command_shows_writes_and_plots(tmp_path: Path) -> None:
    plot, target = tmp_path / "stats.png", tmp_path / "stats.json"
    result = CliRunner().invoke(app, ["stats", "--case", "prefill", "--plot", str(plot), "--json", str(target)])
    assert result.exit_code == 0, result.output
    assert plot.read_bytes().startswith(b"\x89PNG")
    told = json.loads(target.read_text())
    assert (told["rows"], told["source"]) == (96, "case prefill")
    assert told["choosing"] == 96 - (8 * 4 + 3)
    assert set(told["union"]) == {"2", "4", "8", "16"}
    assert sum(told["distance"].values()) == pytest.approx(1.0)
    assert told["ties"]["rows"] > 0
    assert f"{told['jaccard']:.3f}" in result.stdout
    unions = [told["union"][str(size)] for size in stats.GROUP_ROWS]
    assert all(a < b for a, b in combinations(unions, 2))


def test_without_matplotlib_the_plot_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    result = CliRunner().invoke(app, ["stats", "--case", "prefill", "--plot", str(tmp_path / "stats.png")])
    assert result.exit_code == 2
    assert "pip install 'flashqsa[plot]'" in result.stderr


def test_a_capture_gives_the_figures_of_the_call(tmp_path: Path) -> None:
    runner = CliRunner()
    assert runner.invoke(app, ["capture", str(tmp_path), "--case", "prefill"]).exit_code == 0
    told = {}
    for name in ("select_blocks", "sparse_attention"):
        result = runner.invoke(app, ["stats", str(tmp_path / name), "--page-tokens", "32", "--json", "-"])
        assert result.exit_code == 0, result.output
        told[name] = json.loads(result.stdout)
    direct = json.loads(runner.invoke(app, ["stats", "--case", "prefill", "--page-tokens", "32", "--json", "-"]).stdout)
    assert told["sparse_attention"].pop("ties") is None
    same = {key: value for key, value in direct.items() if key not in ("source", "ties")}
    assert {key: told["select_blocks"][key] for key in same} == same
    assert {key: told["sparse_attention"][key] for key in same} == same
    assert told["select_blocks"]["ties"] == direct["ties"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--case", "no-such-case"], "no case is called"),
        (["--case", "prefill", "--preset", "tiny"], "got both"),
        (["--case", "prefill", "--page-tokens", "6"], "wanted a multiple of 4"),
        (["--case", "prefill", "--plot", "no/such/folder/a.png"], "not a file in an existing folder"),
        (["--case", "prefill", "--plot", "a.txt"], "wanted a name that ends in .png"),
        (["no-such-folder"], "holds no capture"),
        (["no-such-folder", "--preset", "tiny"], "got both"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["stats", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
