"""`flashqsa bench`: its cases, inputs and counts, what it reports, and that a wrong result gets no time."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from flashqsa import pipeline, reference
from flashqsa.__main__ import app
from flashqsa.cli import bench as bench_command
from flashqsa.cli import bench_cases, bench_counts, bench_inputs, bench_measures, bench_report, bench_timing
from flashqsa.cli.bench_cases import KINDS, TAKES, BenchCase, Wanted, asked_cases, cases_of
from flashqsa.testing.accuracy import has_scores, own_sort_failure
from flashqsa.testing.selections import locality_of, swap_one_block
from flashqsa.values import FP8, QsaSpec, Rows, Selection

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
SPEC = QsaSpec(6, 2, 16, top_blocks=8)
SMALL = ["--device", "cpu", "--calls", "2", "--head-dim", "16", "--top-blocks", "8", "--heads", "6/2"]
TINY = {
    "attention": ["attention", *SMALL, "--rows", "20", "--regime", "mid", "--dtype", "fp32", "--context", "301"],
    "indexer": ["indexer", *SMALL[:4], "--top-blocks", "8", "--rows", "20", "--context", "301", "--dtype", "fp32"],
    "decode": ["decode", *SMALL, "--batch", "3", "--rows-per-request", "2", "--context", "301"],
    "pipeline": ["pipeline", *SMALL, "--rows", "20", "--context", "301", "--dtype", "fp16"],
}


@pytest.fixture(autouse=True)
def small_roofs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Roofs of a moment: no test here reads what they are, only that they are measured and used."""
    monkeypatch.setitem(bench_timing.COPY_BYTES, "cpu", 1 << 16)
    monkeypatch.setitem(bench_timing.MATMUL_SIZE, "cpu", 32)
    monkeypatch.setattr(bench_timing, "FLUSH_BYTES", 1 << 16)


def invoke(*arguments: str) -> Any:
    """Runs `flashqsa bench`; an exception that is no exit is raised here."""
    result = CliRunner().invoke(app, ["bench", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def measured(tmp_path: Path, *arguments: str, exit_code: int = 0) -> dict[str, Any]:
    """The JSON of a run."""
    target = tmp_path / "bench.json"
    result = invoke(*arguments, "--json", str(target))
    assert result.exit_code == exit_code, result.output
    content = json.loads(target.read_text())
    assert isinstance(content, dict)
    return content


# Cases.


def test_the_targets_are_the_list() -> None:
    assert [str(case) for case in asked_cases("all", "targets", Wanted())] == [
        "attention 1616 rows near, 24,240 tokens, 24/2, bfloat16",
        "attention 1616 rows mid, 7,500 tokens, 24/2, bfloat16",
        "attention 1616 rows far, 38,000 tokens, 24/2, bfloat16",
        "attention 1616 rows mid, 7,500 tokens, 12/1, bfloat16",
        "attention 1616 rows mid, 7,500 tokens, 6/1, bfloat16",
        "attention 8192 rows mid, 14,076 tokens, 24/2, bfloat16",
        "attention 8192 rows far, 38,000 tokens, 24/2, bfloat16",
        "attention 1616 rows far, 38,000 tokens, 24/2, float8_e4m3fn",
        "indexer 1616 rows, 184,000 tokens, bfloat16",
        "decode 64 x 1 rows, 32,768 tokens, 24/2, bfloat16",
        "decode 64 x 4 rows sharing, 32,768 tokens, 24/2, bfloat16",
        "decode 1 x 1 rows, 32,768 tokens, 24/2, bfloat16",
        "decode 16 x 1 rows, 32,768 tokens, 24/2, bfloat16",
    ]


def test_the_full_list_is_every_default() -> None:
    full = asked_cases("all", "full", Wanted())
    counts = {kind: sum(case.kind == kind for case in full) for kind in KINDS}
    assert counts == {"attention": 2 * 3 * 5 * 3, "indexer": 3 * 4, "decode": 3 * 3 * 2, "pipeline": 2 * 2}
    assert not any(case.every_route for case in full)
    assert len(set(full)) == len(full)
    assert {case.context for case in full if case.kind == "indexer"} == {29_000, 150_000, 184_000, 1_000_000}
    assert [case for case in full if case.kind == "decode"] == asked_cases("decode", None, Wanted())


def test_options_make_every_combination_and_nothing_else() -> None:
    wanted = Wanted("8,16", "6/1,12/2", "near,equal", "fp16", "4k", page_tokens="16,64", gate=False, top_blocks=64)
    found = cases_of("attention", wanted)
    assert len(found) == 2 * 2 * 2 * 2
    assert {(c.rows, c.spec.q_heads, c.regime, c.page_tokens) for c in found} == {
        (rows, heads, regime, page)
        for rows in (8, 16)
        for heads in (6, 12)
        for regime in ("near", "equal")
        for page in (16, 64)
    }
    assert {(c.context, c.dtype, c.gate, c.spec.top_blocks) for c in found} == {(4000, torch.float16, False, 64)}
    shared = cases_of("decode", Wanted(batch="2", rows_per_request="4", context="4k"))
    apart = cases_of("decode", Wanted(batch="2", rows_per_request="4", context="4k", share=False))
    assert ([case.regime for case in shared], [case.regime for case in apart]) == (["equal"], ["far"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dance"], "wanted attention, indexer, decode, pipeline or all; got 'dance'"),
        (["all"], "wanted --suite"),
        (["attention", "--suite", "slow"], "wanted one of smoke, targets, sweep, full; got 'slow'"),
        (["attention", "--suite", "smoke", "--rows", "8"], "--rows: a suite has its own"),
        (["pipeline", "--suite", "targets"], "has no pipeline case"),
        (["attention", "--regime", "close"], "--regime: wanted one of near, mid, far, equal, disjoint; got 'close'"),
        (["pipeline", "--regime", "disjoint"], "--regime: wanted one of near, mid, far, equal; got 'disjoint'"),
        (["attention", "--rows", "9000", "--context", "7.5k"], "--rows: wanted at most the 7500 tokens"),
        (["decode", "--rows-per-request", "5", "--context", "4"], "--rows-per-request: wanted at most the 4 tokens"),
        (["attention", "--rows", "0"], "--rows: wanted whole numbers"),
        (["attention", "--rows", "1.5"], "--rows: wanted whole numbers"),
        (["attention", "--context", "2M"], "--context: wanted at most 1048576 tokens"),
        (["attention", "--heads", "24"], "--heads: wanted query heads/KV heads"),
        (["attention", "--heads", "24/5"], "heads"),
        (["attention", "--dtype", "int8"], "dtype: wanted one of"),
        (["attention", "--page-tokens", "6"], "--page-tokens: wanted multiples of 4; got 6"),
        (["attention", "--top-blocks", "0"], "--top-blocks: wanted at least 1"),
        (["attention", "--batch", "3"], "--batch: not an option of bench attention"),
        (["indexer", "--gate"], "--gate: not an option of bench indexer"),
        (["decode", "--every-route"], "--every-route: not an option of bench decode"),
        (
            ["indexer", "--every-route", "--route", "plain"],
            "--route plain: some of these cases take each route in turn",
        ),
        (["indexer", "--suite", "sweep", "--every-route"], "--every-route: a suite has its own"),
        (["decode", "--regime", "far"], "--regime: not an option of bench decode"),
        (["attention", "--calls", "0"], "--calls: wanted at least 1"),
        (["attention", "--graph", "maybe"], "--graph: wanted one of auto, on, off"),
        (["attention", "--device", "cpu", "--graph", "on"], "a CPU has no CUDA graphs"),
        (["attention", "--device", "tpu"], "--device"),
        (["attention", "--route", "fast"], "route"),
        (["attention", "--plot", "no/such/folder/a.png"], "not a file in an existing folder"),
        (["attention", "--peer", "no-such.py"], "--peer no-such.py: not a file"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_the_options_of_a_kind_are_options_of_the_command() -> None:
    import typer.main

    command = typer.main.get_command(app).commands["bench"]  # type: ignore[attr-defined]
    names = {parameter.name for parameter in command.params}
    assert set().union(*TAKES.values()) <= names
    assert all(parameter.help for parameter in command.params if parameter.name != "help")


# Inputs.


def built(kind: str, dtype: torch.dtype = torch.float32, **changes: Any) -> bench_inputs.Workload:
    fields: dict[str, Any] = {"requests": 1, "rows_per_request": 12, "context": 301, "regime": "far"}
    case = BenchCase(kind, spec=SPEC, dtype=dtype, **{**fields, **changes})
    return bench_inputs.build_workload(case, CPU, 0, bench_inputs.Selections())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8], ids=str)
def test_memory_that_no_request_wrote_is_nan_and_the_rest_is_of_unit_variance(dtype: torch.dtype) -> None:
    work = built("decode", dtype, requests=3)
    kv_cache, index_cache = work.kv_cache, work.index_cache
    assert kv_cache is not None
    assert index_cache is not None
    for pool, table, entries, per_page, scale in (
        (kv_cache.keys, kv_cache.page_table, 301, 16, kv_cache.k_scale),
        (kv_cache.values, kv_cache.page_table, 301, 16, kv_cache.v_scale),
        (index_cache.keys, index_cache.page_table, 75, 4, index_cache.scale),
    ):
        held = table.flatten().tolist()
        assert len(set(held)) == len(held) == 3 * -(-entries // per_page)
        assert held != sorted(held)
        written = torch.zeros(pool.shape[:2], dtype=torch.bool)
        ids = torch.arange(entries)
        written[table.long()[:, ids // per_page], (ids % per_page).expand(3, -1)] = True
        assert bool(pool[~written].float().isnan().all())
        assert int((~written).sum()) > 0
        numbers = pool[written].float() * (1.0 if scale is None else scale)
        assert float(numbers.std()) == pytest.approx(1.0, abs=0.05)
        assert bool(numbers.isfinite().all())


def test_inputs_are_the_same_for_the_same_seed_and_selections_are_made_once() -> None:
    selections = bench_inputs.Selections()
    case = BenchCase("decode", 2, 3, 301, SPEC, torch.float16, "equal")
    first, again = (bench_inputs.build_workload(case, CPU, 5, selections) for _ in range(2))
    other = bench_inputs.build_workload(case, CPU, 6, selections)
    for one, two, three in ((first.q, again.q, other.q), (first.index_q, again.index_q, other.index_q)):
        assert one is not None
        assert two is not None
        assert three is not None
        assert torch.equal(one, two)
        assert not torch.equal(one, three)
    assert first.selection is again.selection
    assert first.index_q is not None
    # Rows that share a selection ask the index the same.
    assert torch.equal(first.index_q.view(2, 3, 4, 128), first.index_q.view(2, 3, 4, 128)[:, :1].expand(2, 3, 4, 128))


@pytest.mark.parametrize(
    ("regime", "context", "jaccard"), [("near", 24_240, 0.9), ("mid", 7_500, 0.73), ("far", 38_000, 0.5)]
)
def test_walking_queries_select_with_the_overlap_of_their_regime(regime: str, context: int, jaccard: float) -> None:
    case = BenchCase("pipeline", 1, 24, context, QsaSpec(1, 1, 16), torch.float32, regime)
    work = bench_inputs.build_workload(case, CPU, 0, bench_inputs.Selections())
    assert work.index_q is not None
    assert work.index_cache is not None
    selection = pipeline.select_blocks(work.index_q, work.index_cache, work.rows, case.spec)
    assert locality_of(selection, work.rows, case.spec).jaccard == pytest.approx(jaccard, abs=0.04)


def test_free_memory_is_known_here_or_nowhere() -> None:
    free = bench_inputs.free_bytes(CPU)
    assert free is None or free > 1 << 20


# Counts.


@pytest.mark.parametrize("group_rows", [1, 2, 5, 8, 16])
@pytest.mark.parametrize("regime", ["far", "equal", "disjoint"])
def test_unions_are_what_sets_of_tokens_hold(group_rows: int, regime: str) -> None:
    case = BenchCase("attention", 3, 13, 150, SPEC, torch.float32, regime)
    rows = Rows.from_lengths([13] * 3, [150] * 3)
    selection = bench_inputs.Selections().of(case, rows, 0)
    tokens = reference.expand(selection, rows, SPEC)
    blocks = [set(selection.blocks[row, : int(selection.count[row])].tolist()) for row in range(rows.count)]
    groups = [
        range(first + start, min(first + start + group_rows, first + 13))
        for first in (0, 13, 26)
        for start in range(0, 13, group_rows)
    ]
    read = [{token // 4 for row in group for token in tokens[row]} for group in groups]
    union = bench_counts.union_of(case, selection, rows, group_rows)
    assert union.entries == sum(map(len, read))
    assert union.tokens == sum(len({token for row in group for token in tokens[row]}) for group in groups)
    full = [group for group in groups if len(group) == group_rows]
    if not full:
        assert union.ratio is None
        return
    wanted = sum(len(set().union(*(blocks[row] for row in group))) for group in full) / len(full) / SPEC.top_blocks
    assert union.ratio == pytest.approx(wanted)


def test_the_counts_of_a_call_are_those_of_its_tokens() -> None:
    case = BenchCase("attention", 2, 5, 150, SPEC, torch.float16, "far", gate=False)
    rows = Rows.from_lengths([5, 5], [150, 150])
    selection = bench_inputs.Selections().of(case, rows, 0)
    tokens = [set(row) for row in reference.expand(selection, rows, SPEC)]
    per_token = 2 * 2 * 16 * 2
    counts = bench_counts.attention_counts(case, selection, rows)
    assert counts.flops == 4 * sum(map(len, tokens)) * 6 * 16
    assert counts.bytes["gather_per_row"] == sum(map(len, tokens)) * per_token
    distinct = len(set().union(*tokens[:5])) + len(set().union(*tokens[5:]))
    assert counts.bytes["gather_distinct"] == counts.bytes["gather_of_groups"] == distinct * per_token
    assert counts.bytes["q_gate_output"] == 2 * 10 * 6 * 16 * 2
    parts = ("gather_of_groups", "q_gate_output", "selection", "worklist")
    assert counts.bytes["useful"] == sum(counts.bytes[name] for name in parts)
    assert set(counts.union) == {2, 4, 5}
    few = QsaSpec(6, 2, 16, top_blocks=37)
    scored = bench_counts.selection_counts(
        BenchCase("indexer", 1, 9, 157, few, torch.float16, "far"), Rows.from_lengths([9], [157])
    )
    # Positions 148..156 see 37, 37, 37 and then 38 (three rows: 151..154 see 38), 39 blocks: only those are scored.
    visible = [(position + 1) // 4 for position in range(148, 157)]
    assert scored.flops == 2 * 4 * 128 * sum(seen for seen in visible if seen > 37)
    assert scored.bytes["keys"] == 39 * 128 * 2


def test_the_floor_of_the_model_is_the_published_one() -> None:
    case = cases_of("attention", Wanted("1616", "24/2", "equal", "bf16"))[0]
    rows = Rows.from_lengths([1616], [case.context])
    counts = bench_counts.attention_counts(case, bench_inputs.Selections().of(case, rows, 0), rows)
    assert counts.flops / 765e12 == pytest.approx(0.107e-3, rel=0.01)
    index = cases_of("indexer", Wanted(rows="1616", context="184k"))[0]
    scored = bench_counts.selection_counts(index, Rows.from_lengths([1616], [184_000]))
    assert scored.flops / 765e12 == pytest.approx(0.1e-3, rel=0.01)


def test_a_selection_is_held_against_a_full_sort_of_the_routes_own_scores() -> None:
    work, picked = built("indexer", rows_per_request=70), torch.tensor([0, 33, 34, 69])
    assert work.index_q is not None
    assert work.index_cache is not None
    call = (work.index_q, work.index_cache, work.rows, SPEC)
    plan = pipeline.plan_batch(work.rows, SPEC, index_cache=work.index_cache, selection_given=False)
    plan = replace(plan, select=replace(plan.select, chunk_rows=16))
    got = pipeline.select_blocks(*call, plan=plan)
    assert has_scores(plan)
    assert own_sort_failure(got, *call, plan, picked) is None
    wrong = swap_one_block(got, work.rows, SPEC)
    mixed = Selection(got.blocks.clone(), got.count)
    mixed.blocks[34] = wrong.blocks[34]
    assert "of the rows [33, 34], row 1: selects" in str(own_sort_failure(mixed, *call, plan, picked))
    mixed.blocks[34] = got.blocks[34].flip(0)
    assert "another order" in str(own_sort_failure(mixed, *call, plan, picked))
    everything = pipeline.plan_batch(
        Rows.from_lengths([4], [30]), SPEC, index_cache=work.index_cache, selection_given=False
    )
    assert not has_scores(everything)
    with pytest.raises(ValueError, match="no scores of its own"):
        own_sort_failure(got, *call, everything, picked)


# Timing.


def test_calls_are_timed_in_turn_after_a_warm_up() -> None:
    order: list[str] = []
    calls = [lambda: order.append("ours"), lambda: order.append("peer")]
    found = bench_timing.time_calls(calls, CPU, bench_timing.Manner(3, cold=True))
    assert order == ["ours", "peer"] * 4
    assert [times.calls for times in found] == [3, 3]
    assert all(0 < times.min_us <= times.q1_us <= times.median_us <= times.q3_us for times in found)


@pytest.mark.parametrize(
    ("device", "manner", "words"),
    [
        ("cpu", bench_timing.Manner(5), "median of 5 calls after 1, perf_counter; back to back over the same inputs"),
        ("cpu", bench_timing.Manner(5, cold=True), "flushed before each"),
        ("cuda", bench_timing.Manner(20), "median of 20 calls after 3, CUDA events"),
        ("cuda", bench_timing.Manner(20, graphs=True), "graph of 20 calls each, divided by 20"),
        ("cuda", bench_timing.Manner(20, cold=True, graphs=True), "launch of the graph included"),
    ],
)
def test_the_report_says_how_it_was_timed(device: str, manner: bench_timing.Manner, words: str) -> None:
    assert words in manner.text(torch.device(device))


# Runs.


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_verifies_times_and_tells(kind: str, tmp_path: Path) -> None:
    content = measured(tmp_path, *TINY[kind])
    assert set(content) == {
        "schema", "device", "driver", "cuda", "versions", "commit", "command", "seed", "roofs", "complete", "cases"
    }  # fmt: skip
    assert content["complete"] is True
    assert {"torch", "triton", "flashqsa", "nvidia-cuda-nvrtc", "python"} <= set(content["versions"])
    assert content["device"]["kind"] == "cpu"
    assert content["roofs"]["copy_bytes_per_s"] > 0
    assert set(content["roofs"]["matmul_flops_per_s"]) == {"float32"}
    (case,) = content["cases"]
    assert (case["status"], case["reason"], case["kind"], case["context"]) == ("timed", None, kind, 301)
    assert tuple(case["measures"]) == bench_cases.MEASURES[kind]
    for name, told in case["measures"].items():
        times, rates = told["times"], told["rates"]
        assert 0 < times["min_us"] <= times["q1_us"] <= times["median_us"] <= times["q3_us"]
        assert times["calls"] == 2
        assert told["verified"]["passed"] is True
        assert told["verified"]["rows"] == case["rows"]
        assert rates["flops_per_s"] == pytest.approx(told["flops"] / times["median_us"] * 1e6)
        product = content["roofs"]["matmul_flops_per_s"]["float32"]
        assert rates["of_matmul_roof"] == pytest.approx(rates["flops_per_s"] / product)
        assert rates["of_floor"] == pytest.approx(max(rates["of_matmul_roof"], rates["of_copy_roof"]))
        assert told["routes"]
        assert told["peak_bytes"] > 0
        assert told["peer"] is None
        if name == "selection":
            assert "full sort of the route's own scores" in told["verified"]["method"]
        else:
            error, limit = told["verified"]["max_error"], told["verified"]["limit"]
            assert 0 < error <= limit == {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}[case["q_dtype"]]
            assert told["workspace_bytes"] > 0
            assert told["union"]["2"] >= 1.0
    together = case["measures"].get("together")
    assert (case["shares"] is None) == (together is None)
    if together is not None:
        share = case["measures"]["selection"]["times"]["median_us"] / together["times"]["median_us"]
        assert case["shares"]["selection"] == pytest.approx(share)


def test_the_smoke_suite_runs_here(tmp_path: Path) -> None:
    content = measured(
        tmp_path, "attention", "--suite", "smoke", "--device", "cpu", "--calls", "1", "--check-rows", "4"
    )
    assert [(case["dtype"], case["status"]) for case in content["cases"]] == [
        ("bfloat16", "timed"),
        ("float8_e4m3fn", "timed"),
    ]


def test_the_table_names_what_was_measured_and_the_json_can_go_to_standard_output() -> None:
    result = invoke(*TINY["attention"])
    assert result.exit_code == 0
    for words in ("attention 20 rows mid", "union of 8", "of matmul", "CPU, measured: copy"):
        assert words in result.stdout
    assert "case 1 of 1: attention 20 rows mid, 301 tokens, 6/2, float32; inputs 0 MiB" in result.stderr
    told = json.loads(invoke(*TINY["attention"], "--json", "-").stdout)
    assert told["cases"][0]["status"] == "timed"


def broken(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A public call with a fault."""
    calls = [0]

    def wrong(*arguments: Any, **options: Any) -> Any:
        found = function(*arguments, **options)
        calls[0] += 1
        if what == "a swapped block":
            return swap_one_block(found, arguments[2], arguments[3])
        if what == "an offset":
            return found + 0.01
        if what == "a NaN":
            found[-1, 0, 0] = float("nan")
        if what == "another bit at a second call" and isinstance(found, Tensor):
            found[0, 0, 0] += calls[0] * 1e-6
        return found

    return wrong


@pytest.mark.parametrize(
    ("kind", "function", "what", "reason"),
    [
        ("attention", "sparse_attention", "an offset", "attention: largest error 0.01"),
        ("attention", "sparse_attention", "a NaN", "attention: largest error inf"),
        ("attention", "sparse_attention", "another bit at a second call", "a second call gave other bits"),
        ("indexer", "select_blocks", "a swapped block", "selection: row 0: "),
        ("pipeline", "qsa_attention", "an offset", "together: largest error 0.01"),
    ],
)
def test_a_wrong_result_gets_no_time(
    kind: str, function: str, what: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, function, broken(what, getattr(pipeline, function)))
    monkeypatch.setattr(bench_command, "time_calls", lambda *_: pytest.fail("a wrong result was timed"))
    arguments = ["fp32" if word == "fp16" else word for word in TINY[kind]]
    content = measured(tmp_path, *arguments, exit_code=1)
    (case,) = content["cases"]
    assert case["status"] == "failed"
    assert reason in case["reason"]
    assert all(told["times"] is None and told["rates"] is None for told in case["measures"].values())


def test_a_selection_within_tolerance_that_is_not_a_full_sort_gets_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_measures, "selection_failure", lambda *_: None)
    monkeypatch.setattr(pipeline, "select_blocks", broken("a swapped block", pipeline.select_blocks))
    (case,) = measured(tmp_path, *TINY["indexer"], exit_code=1)["cases"]
    assert case["reason"].endswith("(full sort of the route's own scores)")


def test_a_case_that_does_not_fit_is_skipped_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_command, "free_bytes", lambda _: 1 << 20)
    (case,) = measured(tmp_path, *TINY["attention"], exit_code=1)["cases"]
    assert (case["status"], case["measures"]) == ("skipped", {})
    assert re.fullmatch(r"needs 512 MiB of memory, 1 MiB are free", case["reason"])

    def no_memory(*arguments: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nmore")

    monkeypatch.undo()
    monkeypatch.setattr(bench_command, "build_workload", no_memory)
    result = invoke(*TINY["attention"])
    assert result.exit_code == 1
    assert "skipped: attention 20 rows mid" in result.stdout
    assert "out of device memory: CUDA out of memory. Tried to allocate 9 GiB." in result.stdout


def test_a_case_without_a_route_is_skipped_and_the_others_run(tmp_path: Path) -> None:
    content = measured(tmp_path, *TINY["decode"], "--rows-per-request", "1,2", "--route", "grouped", exit_code=1)
    first, second = content["cases"]
    assert (first["status"], second["status"]) == ("skipped", "timed")
    assert "no more rows than requests" in first["reason"]


def test_a_run_that_is_cut_short_keeps_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, whole = tmp_path / "bench.json", bench_command.run_case

    def second_dies(case: BenchCase, run: Any) -> Any:
        if case.regime == "far":
            raise KeyboardInterrupt
        return whole(case, run)

    monkeypatch.setattr(bench_command, "run_case", second_dies)
    CliRunner().invoke(app, ["bench", *TINY["attention"], "--regime", "mid,far", "--json", str(target)])
    content = json.loads(target.read_text())
    assert (content["complete"], len(content["cases"])) == (False, 1)


def test_the_plot_is_made_or_refused_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "bench.png"
    result = invoke(*TINY["decode"], "--plot", str(plot), "--rows-per-request", "8")
    assert result.exit_code == 0, result.output
    assert plot.read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr("flashqsa.cli.stats.find_spec", lambda _: None)
    monkeypatch.setattr(bench_command, "measure_roofs", lambda *_: pytest.fail("the run began"))
    result = invoke(*TINY["decode"], "--plot", str(plot))
    assert result.exit_code == 2
    assert "pip install 'flashqsa[plot]'" in result.stderr


# The machine.


def test_the_machine_is_told_with_what_is_absent_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/some/where/flashqsa", "bench", "attention", "--peer", "a b.py"])
    monkeypatch.setenv("PATH", str(tmp_path))
    told = bench_report.machine(CPU)
    assert told["command"] == "flashqsa bench attention --peer 'a b.py'"
    assert (told["driver"], told["commit"]) == (None, None)
    assert told["versions"]["torch"] == torch.__version__


def test_the_commit_is_that_of_this_checkout_and_of_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    if head.returncode == 0:
        found = bench_report.commit()
        assert found is not None
        assert found["id"] == head.stdout.strip()
    monkeypatch.setattr(bench_report, "PACKAGE", tmp_path)
    assert bench_report.commit() is None


def test_a_program_that_hangs_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_report, "ASK_SECONDS", 0.2)
    assert bench_report._asked(sys.executable, "-c", "import time; time.sleep(30)") is None


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_the_smoke_suite_runs_on_a_gpu(kind: str, tmp_path: Path) -> None:
    content = measured(tmp_path, kind, "--suite", "smoke", "--device", "cuda")
    assert content["device"]["kind"] == "cuda"
    for case in content["cases"]:
        assert case["status"] == "timed", case["reason"]
        # Steps are replayed by default, chunks are launched call by call.
        replayed = kind == "decode" or (kind == "indexer" and case["rows_per_request"] <= bench_command.STEP_ROWS)
        assert ("CUDA graph of 20 calls" in case["timing"]) == replayed
        for told in case["measures"].values():
            assert told["times"]["calls"] == 20
            assert (told["times"]["host_us"] is None) == replayed
            assert told["extra_bytes"] > 0
            assert told["peak_bytes"] > told["extra_bytes"]


@pytest.mark.gpu
@pytest.mark.parametrize("options", [["--cold"], ["--graph", "on"], ["--graph", "on", "--cold"]], ids=" ".join)
def test_every_manner_of_timing_works_on_a_gpu(options: list[str], tmp_path: Path) -> None:
    (case,) = measured(tmp_path, "attention", "--rows", "64", "--context", "4k", "--heads", "24/2", "--regime", "far",
                       "--dtype", "bf16", "--device", "cuda", *options)["cases"]  # fmt: skip
    assert case["status"] == "timed", case["reason"]


@pytest.mark.gpu
def test_a_replay_that_gives_other_bits_gets_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = pipeline.sparse_attention

    def unlike_a_capture(*arguments: Any, **options: Any) -> Any:
        found = whole(*arguments, **options)
        assert isinstance(found, Tensor)
        return found + 1 if torch.cuda.is_current_stream_capturing() else found

    monkeypatch.setattr(pipeline, "sparse_attention", unlike_a_capture)
    arguments = ["decode", "--batch", "4", "--rows-per-request", "1", "--context", "4k", "--device", "cuda"]
    (case,) = measured(tmp_path, *arguments, exit_code=1)["cases"]
    assert case["reason"] == "attention: a replay of its CUDA graph gave other bits"
    assert all(told["times"] is None for told in case["measures"].values())
