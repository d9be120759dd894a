"""Another implementation beside ours: what `flashqsa bench --peer` takes, times, and finds wrong."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flashqsa.cli import bench as bench_command
from flashqsa.cli import bench_peer
from flashqsa.cli.show import UserError
from tests.test_bench import ROOT, TINY, invoke, measured, small_roofs

__all__ = ["small_roofs"]  # a fixture that every test here runs under

GOOD_PEER = """
import flashqsa

def attention(q, kv_cache, selection, rows, spec, gate):
    return flashqsa.sparse_attention(q, kv_cache, selection, rows, spec, gate, route="xqa")

def make_indexer(index_q, index_cache, rows, spec):
    def call():
        chosen = flashqsa.select_blocks(index_q, index_cache, rows, spec)
        return chosen.blocks.flip(1)
    return call
"""


def peer_file(tmp_path: Path, source: str) -> str:
    path = tmp_path / "rival.py"
    path.write_text(source)
    return str(path)


def test_a_right_peer_is_timed_beside(tmp_path: Path) -> None:
    content = measured(tmp_path, *TINY["decode"], "--peer", peer_file(tmp_path, GOOD_PEER))
    told = content["cases"][0]["measures"]
    for name in ("attention", "selection"):
        peer = told[name]["peer"]
        assert peer["name"] == "rival"
        assert peer["verified"]["passed"] is True
        assert peer["ratio"] == pytest.approx(peer["times"]["median_us"] / told[name]["times"]["median_us"])
    assert 0 < told["attention"]["peer"]["verified"]["max_error"] <= 1e-2
    assert told["together"]["peer"] is None
    assert "rival" not in sys.modules


@pytest.mark.parametrize(
    ("body", "failure"),
    [
        ("out + 0.01", "largest error 0.01"),
        ("out[:-1]", "wanted torch.float32 [20, 6, 16] on cpu; got torch.float32 [19, 6, 16]"),
        ("out.double()", "got torch.float64"),
        ("None", "got NoneType"),
    ],
)
def test_a_wrong_peer_gets_no_time_and_ours_does(body: str, failure: str, tmp_path: Path) -> None:
    source = GOOD_PEER.replace('gate, route="xqa")', f"gate)\n    return {body}").replace(
        "return flashqsa.sparse", "out = flashqsa.sparse"
    )
    target = tmp_path / "bench.json"
    result = invoke(*TINY["attention"], "--peer", peer_file(tmp_path, source), "--json", str(target))
    assert result.exit_code == 1
    told = json.loads(target.read_text())["cases"][0]["measures"]["attention"]
    assert told["times"]["median_us"] > 0
    assert (told["peer"]["times"], told["peer"]["ratio"], told["peer"]["verified"]["passed"]) == (None, None, False)
    assert failure in told["peer"]["verified"]["failure"]
    assert "peer rival is wrong" in result.stdout


@pytest.mark.parametrize(
    ("body", "failure"),
    [
        ("chosen.blocks.float()", "wanted a Selection or whole block ids [rows, width]; got torch.float32"),
        ("chosen", None),
        ("flashqsa.Selection(chosen.blocks[:-1], chosen.count[:-1])", "wanted [20, 8] on cpu; got [19, 8]"),
        ("chosen.blocks.repeat(1, 2)", "a row selects 16 blocks, of 8"),
        ("chosen.blocks[:, :7]", "7 blocks instead of 8"),
        ("chosen.blocks.clamp(max=int(chosen.blocks[0, -2]))", "row "),
    ],
)
def test_a_peers_selection_is_judged_as_a_set(body: str, failure: str | None, tmp_path: Path) -> None:
    source = GOOD_PEER.replace("chosen.blocks.flip(1)", body)
    content = measured(
        tmp_path, *TINY["indexer"], "--peer", peer_file(tmp_path, source), exit_code=0 if failure is None else 1
    )
    peer = content["cases"][0]["measures"]["selection"]["peer"]
    if failure is None:
        assert peer["verified"]["passed"] is True
        assert peer["ratio"] > 0
    else:
        assert failure in peer["verified"]["failure"]
        assert peer["times"] is None


def test_a_peer_that_changes_our_tensors_is_noticed(tmp_path: Path) -> None:
    source = GOOD_PEER.replace("    return flashqsa.sparse", "    q.mul_(1.5)\n    return flashqsa.sparse")
    (case,) = measured(tmp_path, *TINY["attention"], "--peer", peer_file(tmp_path, source), exit_code=1)["cases"]
    assert case["status"] == "failed"
    assert "a second call gave other bits" in case["reason"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def attention(:", "SyntaxError"),
        ("import no_such_module_at_all", "ModuleNotFoundError: No module named 'no_such_module_at_all'"),
        ("def indexer(*given): ...", "defines no function make_attention or attention"),
        ("attention = 3", "defines no function make_attention or attention"),
    ],
)
def test_a_bad_peer_is_refused_before_anything_is_timed(
    source: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_command, "measure_roofs", lambda *_: pytest.fail("the run began"))
    result = invoke(*TINY["attention"], "--peer", peer_file(tmp_path, source))
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_factory_that_makes_no_function_is_refused(tmp_path: Path) -> None:
    source = "def make_attention(*given):\n    return 3\n"
    result = invoke(*TINY["attention"], "--peer", peer_file(tmp_path, source))
    assert result.exit_code == 2
    assert "make_attention returned int; wanted a function" in result.stderr
    with pytest.raises(UserError, match="wanted a Python file"):
        bench_peer.load_peer(ROOT / "README.md", {"attention"})


def test_the_example_of_the_page_is_a_right_peer(tmp_path: Path) -> None:
    page = (ROOT / "docs/BENCH.md").read_text("utf-8")
    (source,) = re.findall(r"^```python\n(.*?)^```", page, flags=re.M | re.S)
    for kind in ("attention", "decode"):
        content = measured(tmp_path, *TINY[kind], "--peer", peer_file(tmp_path, source))
        told = content["cases"][0]["measures"]
        assert all(told[name]["peer"]["verified"]["passed"] for name in told if name != "together")


@pytest.mark.gpu
def test_a_peer_is_replayed_from_a_graph_beside_ours(tmp_path: Path) -> None:
    source = GOOD_PEER.replace(', route="xqa"', "")
    path = peer_file(tmp_path, source)
    arguments = ["decode", "--batch", "4", "--rows-per-request", "4", "--context", "4k", "--device", "cuda"]
    told = measured(tmp_path, *arguments, "--peer", path)["cases"][0]["measures"]
    assert told["attention"]["peer"]["ratio"] > 0
    waiting = "import torch\n" + source.replace(
        "    return flashqsa.sparse", "    q.sum().item()\n    return flashqsa.sparse"
    )
    # In a process of its own: a capture that failed can leave torch's generators and allocator in its middle.
    command = [sys.executable, "-m", "flashqsa", "bench", *arguments, "--peer", peer_file(tmp_path, waiting)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2, result.stderr
    assert "cannot be captured in a CUDA graph" in result.stderr
