"""Texts and log-probabilities of vLLM's engine with FlashQSA's layers, against Transformers' own implementation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.vllm.engine import Answer, Output, generate, on_gpu, prompt_of
from tests.vllm.models import BUDGET, log_probabilities, with_scales, write_model

pytestmark = pytest.mark.vllm

# Below the budget, where every row sees what it may select, on its edge, past it, and far past it.
PROMPTS = [prompt_of(length, seed=length) for length in (20, BUDGET, 130, 700)]
WHOLE, CHUNKS = 1024, 96
"""Rows of a step: all prompts, and less than the longer ones, which are prefilled beside rows that decode."""


EXACT = "float16" if on_gpu() else "float32"
"""Whose roundings a comparison between two runs may have: vLLM's linear layers take no FP32 on a GPU."""
on_a_cpu = pytest.mark.skipif(on_gpu(), reason="vLLM's linear layers take no FP32 on a GPU")


def differences(folder: Path, dtype: torch.dtype, output: Output) -> torch.Tensor:
    """Absolute differences of an output's log-probabilities from Transformers': of the text, or of its end."""
    tokens, found = output.prompt + output.tokens, torch.tensor(output.log_probabilities)
    wanted = log_probabilities(folder, dtype, tokens).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    assert found.numel() in (wanted.numel(), len(output.tokens))
    return (found - wanted[-found.numel() :]).abs()


def is_greedy(folder: Path, dtype: torch.dtype, output: Output) -> bool:
    """Whether each generated token is Transformers' best, or so near to it that the two may well differ in which is."""
    found = log_probabilities(folder, dtype, output.prompt + output.tokens)[len(output.prompt) - 1 :]
    chosen = found.gather(1, torch.tensor(output.tokens)[:, None])[:, 0]
    # Both tokens may be off, by as much as this output is anywhere.
    return bool((found.max(-1).values - chosen <= 2 * differences(folder, dtype, output).max()).all())


def run(folder: Path, dtype: str, rows: int) -> Answer:
    return generate(
        folder, [PROMPTS], dtype=dtype, max_num_batched_tokens=rows, variables={"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    )


@on_a_cpu
@pytest.mark.parametrize("rows", [WHOLE, CHUNKS])
def test_log_probabilities_are_transformers_in_fp32(loud_model: Path, rows: int) -> None:
    for output in run(loud_model, "float32", rows).rounds[0]:
        assert float(differences(loud_model, torch.float32, output).max()) < 1e-4
        assert is_greedy(loud_model, torch.float32, output)


@pytest.mark.parametrize("rows", [WHOLE, CHUNKS])
@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 3e-3), ("float16", 1e-3)])
def test_log_probabilities_are_close_to_transformers(model: Path, dtype: str, most: float, rows: int) -> None:
    answer = run(model, dtype, rows)
    for output in answer.rounds[0]:
        assert float(differences(model, getattr(torch, dtype), output).mean()) < most
        assert is_greedy(model, getattr(torch, dtype), output)


@pytest.mark.parametrize("width", [128, 32], ids=["kernel", "plain"])
def test_bf16_steps_of_one_row_and_heads_that_vllm_has_no_kernel_for(tmp_path: Path, width: int) -> None:
    heads = {"linear_key_head_dim": width, "linear_value_head_dim": width}
    folder = write_model(tmp_path, initializer_range=0.03, **heads)
    # Alone, so that a step has the one row of a prompt, or the last of one that is chunked, and no other.
    rounds = [[prompt_of(length, seed=length)] for length in (1, CHUNKS + 1)]
    answer = generate(
        folder,
        [*rounds, PROMPTS],
        dtype="bfloat16",
        max_num_batched_tokens=CHUNKS,
        variables={"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    )
    for output in [output for outputs in answer.rounds for output in outputs]:
        assert float(differences(folder, torch.bfloat16, output).mean()) < 3e-3
        assert is_greedy(folder, torch.bfloat16, output)


def test_the_comparison_sees_one_token_that_is_another(loud_model: Path) -> None:
    output = run(loud_model, EXACT, WHOLE).rounds[0][3]
    moved = Output([(output.prompt[0] + 1) % 256, *output.prompt[1:]], output.tokens, output.log_probabilities, 0)
    assert float(differences(loud_model, getattr(torch, EXACT), moved)[1:].max()) > 1e-2


def test_the_log_names_each_route_once_and_why_others_were_refused(model: Path) -> None:
    lines = [line for line in run(model, "bfloat16", CHUNKS).log.splitlines() if "] " in line]
    said = [line.partition("] ")[2] for line in lines]
    routes = [line for line in said if line.startswith(("select takes", "attend takes"))]
    taken = {" ".join(line.split()[:3]) for line in routes}
    assert len(taken) == len(routes)
    if on_gpu():
        assert {line.partition(" takes ")[0] for line in taken} == {"select", "attend"}
        assert not any(":" not in line or " cpu:" in line for line in taken)
        assert any(line.startswith("attend refuses ") and " on cuda" in line for line in said)
    else:
        assert {"select takes cpu:plain", "attend takes cpu:grouped"} <= taken
        assert any(line.startswith("attend refuses cpu:dense on cpu") for line in said)
    classes = "Qwen4ExpQSAAttention, GatedResidual, QwenGatedDeltaNetAttention"
    assert said.count(f"FlashQSA serves {classes} of vllm.models.qwen4_exp.nvidia.model") == 1


def with_fp8(folder: Path) -> list[Output]:
    return generate(
        folder,
        [PROMPTS],
        dtype="float16",
        max_num_batched_tokens=WHOLE,
        kv_cache_dtype="fp8",
        variables={"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    ).rounds[0]


def test_an_fp8_cache_changes_log_probabilities_by_its_roundings(model: Path, tmp_path: Path) -> None:
    plain, stored = run(model, "float16", WHOLE).rounds[0], with_fp8(model)
    # Keys that are stored as if no number were above 448 * 1e-4: the checkpoint's scales are used, or nothing changes.
    clamped = with_fp8(with_scales(tmp_path, model, 1e-4, 1.0))
    for whole, kept, cut in zip(plain, stored, clamped, strict=True):
        apart = float(differences(model, torch.float16, kept).mean())
        assert float(differences(model, torch.float16, whole).mean()) < apart < 1e-2
        assert apart < float(differences(model, torch.float16, cut).mean())


def after_a_prefix(folder: Path, dtype: str, on: bool) -> list[Output]:
    """Outputs of a second round whose prompts begin as the first's, with the cache of prefixes on or off."""
    shared = prompt_of(1400, seed=1)
    # As long as makes whole pages, which are as long as a linear layer's state is large.
    rounds = [[shared], [[*shared[:1380], *prompt_of(60, seed=2)], [*shared, 7]]]
    return generate(
        folder,
        rounds,
        sampling={},
        dtype=dtype,
        max_num_batched_tokens=WHOLE,
        enable_prefix_caching=on,
        variables={"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    ).rounds[1]


@on_a_cpu
def test_prefixes_in_the_cache_change_no_text(loud_model: Path) -> None:
    cached, computed = (after_a_prefix(loud_model, "float32", on) for on in (True, False))
    for found, made in zip(cached, computed, strict=True):
        assert found.cached > BUDGET
        assert made.cached == 0
        assert found.tokens == made.tokens
        assert float(differences(loud_model, torch.float32, found).max()) < 1e-4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_prefixes_in_the_cache_leave_half_precision_as_close_to_transformers(model: Path, dtype: str) -> None:
    for output in after_a_prefix(model, dtype, True):
        assert output.cached > BUDGET
        assert float(differences(model, getattr(torch, dtype), output).mean()) < 3e-3
        assert is_greedy(model, getattr(torch, dtype), output)
