"""The README's table of GPU times is the one that `benchmarks/table.py` makes of the committed results."""

from __future__ import annotations

import copy
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from flashqsa.cli.bench_cases import Wanted, asked_cases

ROOT = Path(__file__).resolve().parent.parent


def load_script() -> Any:
    """`benchmarks/table.py` as a module; benchmarks are no package."""
    spec = importlib.util.spec_from_file_location("benchmarks_table", ROOT / "benchmarks" / "table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


script = load_script()


def measured(name: str, stage: str, us: float, *, graph: bool = False, host_us: float | None = None) -> dict[str, Any]:
    """A case of a results file, as far as the table reads it."""
    timing = "median of 20 replays of a CUDA graph of 20 calls each" if graph else "median of 20 calls after 3"
    spec = {"q_heads": 24, "kv_heads": 2}
    return {
        "name": name,
        "status": "timed",
        "reason": None,
        "kind": name.split()[0],
        "rows": 1616,
        "requests": 1,
        "rows_per_request": 1,
        "context": 38_000,
        "regime": "far",
        "spec": spec,
        "dtype": "bfloat16",
        "timing": timing,
        "measures": {stage: {"times": {"median_us": us, "host_us": host_us}}},
    }


def run(*cases: dict[str, Any], device: str = "NVIDIA H200") -> dict[str, Any]:
    """A results file."""
    return {
        "device": {"name": device},
        "driver": "580.1",
        "versions": {"torch": "2.11", "triton": "3.6", "nvidia-cuda-nvrtc": "13.0.88", "nvidia-cuda-nvrtc-cu12": None},
        "commit": {"id": "0123456789abcdef", "dirty": False},
        "roofs": {"copy_bytes_per_s": 4.2e12, "matmul_flops_per_s": {"bfloat16": 8e14}},
        "complete": True,
        "cases": list(cases),
    }


FAR = "attention 1616 rows far, 38,000 tokens, 24/2, bfloat16"
DECODE = "decode 1 x 1 rows, 32,768 tokens, 24/2, bfloat16"


def cells(block: str) -> list[list[str]]:
    """The body of a table in Markdown."""
    lines = [line for line in block.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_readme_has_the_table_that_the_script_prints() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    block = script.table(script.load(script.BY_CALL), script.load(script.BY_GRAPH))
    held = text.partition(script.BEGIN)[2].partition(script.END)[0]
    assert held.strip("\n") == block
    assert script.put(text, block) == text
    assert f"]({script.PLOT.relative_to(ROOT).as_posix()})" in text
    assert script.PLOT.is_file()


def test_every_peer_belongs_to_a_case_of_the_suite_and_has_a_row() -> None:
    stages = {(str(case), stage) for case in asked_cases("all", "targets", Wanted()) for stage in case.measures}
    assert set(script.PEERS) <= stages
    found = script.rows_of(script.load(script.BY_CALL), script.load(script.BY_GRAPH))
    assert {(row.case["name"], row.stage) for row in found} == stages


def test_times_go_to_the_column_that_they_were_taken_in() -> None:
    by_call = run(measured(FAR, "attention", 500.0, host_us=470.0), measured(DECODE, "attention", 15.2, graph=True))
    by_graph = run(measured(FAR, "attention", 424.0, graph=True))
    far, decode = cells(script.table(by_call, by_graph))
    title = "1616 rows far, 38,000 tokens, 24/2, BF16"
    assert far == [title, "attention", "1.06 to 1.15 ms", "500 us *", "424 us", "2.5"]
    assert decode[2:] == ["7.6 us", "-", "15.2 us", "0.50"]
    only_called = cells(script.table(by_call, run()))
    assert only_called[0][3:] == ["500 us *", "-", "2.1"]


def test_a_gpu_that_did_not_wait_has_no_star_and_a_peer_that_did_less_no_ratio() -> None:
    by_call = run(measured(FAR, "attention", 500.0, host_us=100.0), measured(DECODE, "selection", 9.0, graph=True))
    far, decode = cells(script.table(by_call, run()))
    assert far[3] == "500 us"
    assert decode[1:] == ["scores and top-k", "3.1 us, scores alone", "-", "9.0 us", "-"]


def test_the_machine_and_the_commits_are_named() -> None:
    first, second = run(measured(FAR, "attention", 1.0)), run()
    line = script.table(first, second).splitlines()[0]
    assert "One NVIDIA H200, driver 580.1, torch 2.11, Triton 3.6, NVRTC 13.0.88; commit 01234567;" in line
    assert "copy 4.20 TB/s, bfloat16 product 800 TFLOP/s" in line
    second["commit"] = {"id": "fedcba9876543210", "dirty": True}
    assert "commit 01234567 and fedcba98 with changes;" in script.table(first, second)


def test_results_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(ValueError, match="two devices: NVIDIA H200 and NVIDIA H100"):
        script.table(run(), run(device="NVIDIA H100"))
    with pytest.raises(ValueError, match="no <!-- begin"):
        script.put("# A page", "block")


@pytest.mark.parametrize(
    ("change", "message"),
    [({"complete": False}, "cut short"), ({"status": "failed", "reason": "rows differ"}, "rows differ")],
    ids=["cut short", "failed"],
)
def test_results_that_do_not_hold_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    broken = copy.deepcopy(run(measured(FAR, "attention", 1.0)))
    (broken if "complete" in change else broken["cases"][0]).update(change)
    path = tmp_path / "results.json"
    path.write_text(json.dumps(broken))
    with pytest.raises(ValueError, match=message):
        script.load(path)


def test_the_plot_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.png"
    script.draw(script.load(script.BY_CALL), script.load(script.BY_GRAPH), path)
    assert path.read_bytes().startswith(b"\x89PNG")
    only_prefill = run(measured(FAR, "attention", 500.0))
    script.draw(only_prefill, run(), path)


@pytest.mark.parametrize(
    ("us", "text"), [(None, "-"), (7.64, "7.6 us"), (99.94, "99.9 us"), (453.7, "454 us"), (2123.8, "2.12 ms")]
)
def test_times_are_short(us: float | None, text: str) -> None:
    assert script.time_text(us) == text
