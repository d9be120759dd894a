"""`flashqsa bench indexer --every-route`: each route that can serve a case, verified, then timed in turn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from flashqsa import pipeline
from flashqsa.cli import bench as bench_command
from flashqsa.cli import bench_cases, bench_inputs, bench_measures, bench_timing
from flashqsa.cli.bench_cases import Wanted, asked_cases
from flashqsa.testing.selections import swap_one_block
from tests.test_bench import CPU, invoke, measured, small_roofs

__all__ = ["small_roofs"]  # a fixture that every test here runs under

TINY = ["indexer", "--device", "cpu", "--calls", "2", "--top-blocks", "8", "--context", "301", "--dtype", "fp32"]


def test_the_sweep_is_the_indexer_by_every_route() -> None:
    sweep = asked_cases("indexer", "sweep", Wanted())
    assert sweep == asked_cases("all", "sweep", Wanted())
    assert all(case.kind == "indexer" and case.every_route for case in sweep)
    chunks = {(case.rows, case.context) for case in sweep if case.requests == 1 and case.rows > 1}
    steps = {(case.requests, case.context) for case in sweep if case.rows_per_request == 1}
    assert chunks == {(rows, n) for rows in (64, 1616, 8192) for n in (29_000, 150_000, 184_000, 1_000_000)}
    assert steps == {(requests, n) for requests in (1, 16, 64) for n in (32_768, 131_072, 1_000_000)}
    assert len(sweep) == len(chunks) + len(steps)
    assert str(sweep[-1]) == "indexer 64 x 1 rows, 1,000,000 tokens, bfloat16"


@pytest.mark.parametrize(
    ("arguments", "first"), [(["--rows", "20"], "plain"), (["--rows", "2", "--batch", "3"], "plain")], ids=str
)
def test_every_route_of_the_indexer_is_verified_and_timed_in_turn(
    arguments: list[str], first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together: list[int] = []

    def counted(calls: Sequence[bench_timing.Call], *how: Any) -> list[bench_timing.Times]:
        together.append(len(calls))
        return bench_timing.time_calls(calls, *how)

    monkeypatch.setattr(bench_command, "time_calls", counted)
    call = [*TINY, "--every-route", *arguments]
    content = measured(tmp_path, *call)
    (case,) = content["cases"]
    assert (case["status"], case["reason"], case["every_route"]) == ("timed", None, True)
    names = [f"selection cpu:{first}", "selection cpu:fused"]
    assert list(case["measures"]) == names
    assert together == [2]
    for name, told in case["measures"].items():
        assert told["verified"]["passed"] is True
        assert told["verified"]["rows"] == case["rows"]
        assert "full sort of the route's own scores" in told["verified"]["method"]
        assert told["routes"][0] == f"select: {name.split()[1]}"
        assert case["of_taken"][name] == pytest.approx(
            told["times"]["median_us"] / case["measures"][names[0]]["times"]["median_us"]
        )
    result = invoke(*call)
    assert "cpu:fused" in result.stdout
    assert "routes, timed in turn" in result.stdout


def test_the_first_of_every_route_is_the_one_that_is_taken_and_a_peer_comes_once(tmp_path: Path) -> None:
    peer = tmp_path / "peer.py"
    peer.write_text(
        "from flashqsa import reference\n"
        "def indexer(index_q, index_cache, rows, spec):\n"
        "    return reference.select_blocks(index_q, index_cache, rows, spec)\n"
    )
    (case,) = measured(tmp_path, "indexer", "--device", "cpu", "--calls", "1", "--rows", "64", "--context", "33k",
                       "--check-rows", "2", "--every-route", "--peer", str(peer))["cases"]  # fmt: skip
    assert list(case["measures"]) == ["selection cpu:fused", "selection cpu:plain"]
    assert [told["peer"] is None for told in case["measures"].values()] == [False, True]
    assert case["measures"]["selection cpu:fused"]["peer"]["ratio"] > 0
    below = bench_cases.cases_of("indexer", Wanted(rows="8", context="2k", every_route=True))[0]
    work = bench_inputs.build_workload(below, CPU, 0, bench_inputs.Selections())
    found = bench_measures.measures_of(work, bench_measures.Setup(CPU, None, None, 4))
    assert [measure.name.split()[1] for measure in found] == ["cpu:everything", "cpu:fused", "cpu:plain"]


def test_a_wrong_route_leaves_no_route_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = pipeline.kernel_set("cpu").select_fused
    monkeypatch.setattr(
        pipeline.kernel_set("cpu"), "select_fused", lambda *call: swap_one_block(whole(*call), call[2], call[3])
    )
    (case,) = measured(tmp_path, *TINY, "--rows", "20", "--every-route", exit_code=1)["cases"]
    assert case["status"] == "failed"
    assert case["reason"].startswith("selection cpu:fused: row 0: ")
    assert (case["of_taken"], [told["times"] for told in case["measures"].values()]) == (None, [None, None])


def test_memory_beyond_what_was_held_is_told_on_a_cpu_too() -> None:
    kept = torch.ones(1 << 18)
    _, memory = bench_command._with_memory(lambda: torch.ones(12 << 20).sum() + kept.sum(), CPU)
    if memory.extra_bytes is None:
        pytest.skip("this system does not tell it")
    assert 40 << 20 < memory.extra_bytes < 120 << 20
    assert memory.peak_bytes > memory.extra_bytes
