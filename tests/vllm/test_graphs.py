"""What vLLM does on GPUs alone: decode and verify steps in CUDA graphs, and guesses; they change no token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.vllm.engine import Answer, generate, on_gpu, prompt_of
from tests.vllm.test_generate import PROMPTS, WHOLE, differences, is_greedy

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(not on_gpu(), reason="this vLLM has no GPU")]

NEW = 40
# One text that repeats itself, so that guesses from it hold, beside others of which none do.
REPEATED = prompt_of(40, seed=3) * 4
GUESSES = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}


def run(folder: Path, dtype: str, **arguments: Any) -> Answer:
    return generate(
        folder,
        [[*PROMPTS[1:3], REPEATED]],
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
def test_graphs_change_no_token(loud_model: Path, mode: str) -> None:
    eager, captured = (run(loud_model, "float32", **how).rounds[0] for how in ({}, graphs(mode)))
    for one, other in zip(eager, captured, strict=True):
        assert one.tokens == other.tokens
        assert float(differences(loud_model, torch.float32, other).max()) < 1e-4


@pytest.mark.parametrize("how", [{}, graphs("FULL_DECODE_ONLY")], ids=["eager", "graphs"])
def test_guesses_change_no_token(loud_model: Path, how: dict[str, Any]) -> None:
    plain = run(loud_model, "float32").rounds[0]
    guessed = run(loud_model, "float32", speculative_config=GUESSES, **how).rounds[0]
    for one, other in zip(plain, guessed, strict=True):
        assert one.tokens == other.tokens


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_graphs_and_guesses_stay_near_transformers(model: Path, dtype: str) -> None:
    for output in run(model, dtype, speculative_config=GUESSES, **graphs("FULL_DECODE_ONLY")).rounds[0]:
        assert float(differences(model, getattr(torch, dtype), output).mean()) < 3e-3
        assert is_greedy(model, getattr(torch, dtype), output)
