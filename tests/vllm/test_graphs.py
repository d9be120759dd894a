"""What vLLM does on GPUs alone: decode and verify steps in CUDA graphs, guesses and drafts; they change no token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flashqsa.cli.presets import PRESETS
from tests.vllm.engine import Answer, generate, on_gpu, prompt_of
from tests.vllm.models import with_drafts, write_model
from tests.vllm.test_generate import PROMPTS, WHOLE, differences, is_greedy

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(not on_gpu(), reason="this vLLM has no GPU")]

NEW = 40
# One text that repeats itself, so that guesses from it hold, beside others of which none do.
REPEATED = prompt_of(40, seed=3) * 4
GUESSES = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}


def run(folder: Path, dtype: str, **arguments: Any) -> Answer:
    return generate(
        folder,
        [[*PROMPTS[:3], REPEATED]],
        sampling={"max_tokens": NEW, "ignore_eos": True},
        dtype=dtype,
        max_num_batched_tokens=WHOLE,
        variables={"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        **arguments,
    )


def graphs(mode: str) -> dict[str, Any]:
    """Arguments of an engine whose steps are captured, and not compiled."""
    return {"enforce_eager": False, "compilation_config": {"mode": 0, "cudagraph_mode": mode}}


@pytest.mark.parametrize("mode", ["FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
def test_graphs_change_no_token(model: Path, mode: str) -> None:
    eager, captured = (run(model, "float16", **how) for how in ({}, graphs(mode)))
    assert "Graph capturing finished" not in eager.log
    assert "Graph capturing finished" in captured.log
    for one, other in zip(eager.rounds[0], captured.rounds[0], strict=True):
        assert one.tokens == other.tokens
        assert float(differences(model, torch.float16, other).mean()) < 1e-3


@pytest.mark.parametrize("how", [{}, graphs("FULL_DECODE_ONLY")], ids=["eager", "graphs"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_guesses_change_no_token_but_ties(model: Path, dtype: str, how: dict[str, Any]) -> None:
    for output in run(model, dtype, speculative_config=GUESSES, **how).rounds[0]:
        assert float(differences(model, getattr(torch, dtype), output).mean()) < 3e-3
        assert is_greedy(model, getattr(torch, dtype), output)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_released_heads_on_their_own_routes(dtype: str, tmp_path: Path) -> None:
    # Past the budget of 2,048 tokens: what is not selected is seen to be missing.
    geometry = PRESETS["demo"].geometry
    folder = write_model(tmp_path, initializer_range=0.03, **geometry)
    prompts = [prompt_of(length, seed=length) for length in (1500, 2900)]
    answer = generate(
        folder,
        [prompts],
        sampling={},
        dtype=dtype,
        max_model_len=4096,
        max_num_batched_tokens=1024,
        variables={"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        **graphs("FULL_DECODE_ONLY"),
    )
    assert "select takes " in answer.log
    assert "attend takes " in answer.log
    for output in answer.rounds[0]:
        assert float(differences(folder, getattr(torch, dtype), output).mean()) < 3e-3
        assert is_greedy(folder, getattr(torch, dtype), output)
    if torch.cuda.get_device_capability() == (9, 0):
        assert "attend takes sm90:" in answer.log


@pytest.mark.parametrize("how", [{}, graphs("FULL_DECODE_ONLY")], ids=["eager", "graphs"])
def test_a_draft_layer_changes_no_token_but_ties(model: Path, tmp_path: Path, how: dict[str, Any]) -> None:
    folder = with_drafts(tmp_path, model)
    drafts = {"method": "mtp", "num_speculative_tokens": 3}
    for output in run(folder, "bfloat16", speculative_config=drafts, **how).rounds[0]:
        assert float(differences(model, torch.bfloat16, output).mean()) < 3e-3
        assert is_greedy(model, torch.bfloat16, output)
