"""The Triton score stage compiled ahead of time: it fits each GPU, and its products run on tensor cores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from flashqsa.config import score_chunk_rows, score_config, score_refusal, score_row_bytes
from flashqsa.device import KNOWN_DEVICES, DeviceFacts
from flashqsa.values import QsaSpec

ROOT = Path(__file__).resolve().parent.parent
SHARED_BYTES = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_120": 99 << 10}
COMPILED_ROWS = {"sm_80": 4, "sm_90": 32, "sm_120": 1}


@pytest.mark.skipif(find_spec("triton") is None, reason="the kernels of smxx are written in Triton")
@pytest.mark.parametrize("arch", SHARED_BYTES)
def test_the_score_kernel_compiles(arch: str, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-m", "tests.smxx_compile", arch]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert set(found) == {f"{arch} {COMPILED_ROWS[arch]}"}
    for name, kernel in found.items():
        assert kernel["shared"] <= SHARED_BYTES[arch], name
        assert kernel["cubin"] > 0
        wanted = "wgmma.mma_async" if name == "sm_90 32" else "mma.sync"
        assert wanted in kernel["products"], name


GPUS = [facts for facts in KNOWN_DEVICES.values() if facts.capability is not None and facts.capability >= (8, 0)]


@pytest.mark.parametrize("facts", GPUS, ids=lambda facts: facts.name)
def test_the_model_is_scored_on_every_gpu(facts: DeviceFacts) -> None:
    for q_bytes in (2, 4):
        assert score_refusal(QsaSpec(), q_bytes, facts) is None


@pytest.mark.parametrize("rows", [1, 3, 31, 1616, 8192, 65536])
@pytest.mark.parametrize("requests", [1, 3, 64])
@pytest.mark.parametrize("max_position", [0, 3, 2051, 32767, 1_048_575])
def test_a_configuration_covers_its_call(rows: int, requests: int, max_position: int) -> None:
    spec, facts = QsaSpec(), DeviceFacts.named("h200")
    config = score_config(spec, rows, requests, max_position, 2, facts)
    assert 1 <= config.window <= config.rows
    width = max(spec.visible_blocks(max_position), 1)
    assert 1 <= config.slices <= -(-width // config.columns)
    assert config.slices <= 65535, "slices lie on a grid's second axis"


@pytest.mark.parametrize("max_position", [2051, 183_999, 1_048_575])
def test_chunks_fit_the_workspace_and_are_even(max_position: int) -> None:
    spec, limit = QsaSpec(), 128 << 20
    for rows in (1, 500, 1616, 8192):
        chunk = score_chunk_rows(spec, rows, max_position, limit)
        assert chunk * score_row_bytes(spec, max_position) <= limit
        chunks = -(-rows // chunk)
        assert chunks <= -(-rows // max(limit // score_row_bytes(spec, max_position) - 31, 1))
        assert chunks == 1 or rows - (chunks - 1) * chunk > 0
    assert score_chunk_rows(spec, 10, 1_048_575, 1) == 1


def test_five_verify_rows_have_a_window_of_their_own() -> None:
    config = score_config(QsaSpec(), 5 * 64, 64, 32_767, 2, DeviceFacts.named("h200"))
    assert (config.rows, config.window) == (8, 5)


def test_refusals_say_why() -> None:
    spec = QsaSpec(index_heads=64)
    assert "sm_75" in str(score_refusal(QsaSpec(), 2, DeviceFacts.named("t4")))
    assert "cpu" in str(score_refusal(QsaSpec(), 2, DeviceFacts.named("cpu")))
    assert "shared memory" in str(score_refusal(spec, 2, DeviceFacts.named("rtx4090")))
    assert "got 100" in str(score_refusal(QsaSpec(index_dim=100), 2, DeviceFacts.named("a100")))
