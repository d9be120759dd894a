"""The parts of vLLM's model in plain torch: against Transformers' own, and against the same row by row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flashqsa.integrations.vllm import plain
from flashqsa.values import Rows

HEADS, KEY_DIM, VALUE_DIM = 3, 16, 8


def written(starts: list[int], lengths: list[int], rows: int) -> tuple[list[int], list[int]]:
    request, position = torch.full((2, rows), -77, dtype=torch.int32)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    plain.write_rows(torch.tensor(starts, dtype=torch.int32), seq_lens, request, position)
    return request.tolist(), position.tolist()


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40)), min_size=1, max_size=5), st.integers(0, 4), st.booleans()
)
def test_rows_are_those_of_the_lengths(pieces: list[tuple[int, int]], padding: int, more: bool) -> None:
    queries, contexts = [rows for rows, _ in pieces], [before + rows for rows, before in pieces]
    count = sum(queries) + padding
    wanted = Rows.from_lengths(queries, contexts, pad_to=count)
    starts = torch.tensor([0, *queries]).cumsum(0).tolist()
    if more:  # a request without rows, as fills up a step for a graph
        starts, contexts = [*starts, starts[-1]], [*contexts, 0]
    assert written(starts, contexts, count) == (wanted.request.tolist(), wanted.position.tolist())


def test_rows_of_a_request_without_tokens_are_padding() -> None:
    # A graph of three requests with two rows each, of which the last is not there.
    assert written([0, 2, 4, 6], [9, 2, 0], 6) == ([0, 0, 1, 1, -1, -1], [7, 8, 0, 1, -1, -1])


def gated_residual(dtype: torch.dtype, streams: int, width: int) -> Any:
    """Transformers' own, with weights that are not 0."""
    modeling = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp")
    config = modeling.Qwen4ExpTextConfig(hidden_size=width, hc_count=streams, hc_lowrank=8, ple_layer_ids=[])
    module = modeling.Qwen4ExpTextGatedResidual(config)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("streams", [2, 4])
def test_the_gated_residual_is_transformers(dtype: torch.dtype, streams: int) -> None:
    torch.manual_seed(streams)
    module = gated_residual(dtype, streams, 24)
    hyper, output = torch.randn(7, streams * 24, dtype=dtype), torch.randn(7, 24, dtype=dtype)
    with torch.no_grad():
        wanted, _, injection = module(hyper)
        normed = plain.grouped_norm(hyper, module.hc_norm.weight, 1e-6, streams)
        gate = module.input_mix_weight_up(plain.scaled_silu(module.input_mix_weight_down(normed), streams))
        assert torch.equal(plain.gated_mean(normed, gate, streams), wanted)
        logits = module.block_inject_weight(normed)
        combined = hyper + (output[:, None] * injection[..., None]).flatten(1)
    assert torch.equal(plain.inject(hyper, output, logits, streams), combined)
    assert torch.equal(plain.inject(hyper, output, None, streams), hyper + output.repeat(1, streams))


def test_a_norm_may_have_one_weight_for_all_parts() -> None:
    torch.manual_seed(0)
    streams, weight = torch.randn(5, 24), torch.randn(8)
    each = plain.grouped_norm(streams, weight.repeat(3), 1e-6, 3)
    assert torch.equal(plain.grouped_norm(streams, weight, 1e-6, 3), each)


Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""Query, key, value, decay, strength and state of `delta_rule`."""


def delta_inputs(rows: int) -> Inputs:
    generator = torch.Generator().manual_seed(rows)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    decay, strength = plain.delta_gates(normal(rows, HEADS), normal(rows, HEADS), normal(HEADS), normal(HEADS))
    q, k, v = normal(rows, HEADS, KEY_DIM), normal(rows, HEADS, KEY_DIM), normal(rows, HEADS, VALUE_DIM)
    return q, k, v, decay, strength, normal(HEADS, KEY_DIM, VALUE_DIM)


def row_by_row(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """The gated delta rule as its formula has it, in FP64."""
    q, k, v, decay, strength, state = (x.double() for x in inputs)
    q, k = (x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    outputs = []
    for row in range(q.shape[0]):
        state = decay[row].exp()[:, None, None] * state
        update = strength[row][:, None] * (v[row] - torch.einsum("hk,hkv->hv", k[row], state))
        state = state + k[row][..., None] * update[:, None]
        outputs.append(torch.einsum("hk,hkv->hv", q[row], state) / q.shape[-1] ** 0.5)
    return torch.stack(outputs), state


@pytest.mark.parametrize("rows", [1, 2, 63, 64, 65, 200])
def test_the_delta_rule_is_that_of_single_rows(rows: int) -> None:
    inputs = delta_inputs(rows)
    for found, wanted in zip(plain.delta_rule(*inputs), row_by_row(inputs), strict=True):
        assert torch.allclose(found.double(), wanted, rtol=1e-5, atol=1e-5)


@given(st.integers(1, 99))
def test_the_delta_rule_goes_on_from_its_state(cut: int) -> None:
    q, k, v, decay, strength, state = delta_inputs(100)
    whole, after = plain.delta_rule(q, k, v, decay, strength, state)
    first, middle = plain.delta_rule(q[:cut], k[:cut], v[:cut], decay[:cut], strength[:cut], state)
    second, end = plain.delta_rule(q[cut:], k[cut:], v[cut:], decay[cut:], strength[cut:], middle)
    assert torch.allclose(torch.cat([first, second]), whole, rtol=1e-5, atol=1e-5)
    assert torch.allclose(end, after, rtol=1e-5, atol=1e-5)


def test_a_strong_decay_makes_no_nan() -> None:
    q, k, v, decay, strength, state = delta_inputs(64)
    inputs = (q, k, v, torch.full_like(decay, -50.0), strength, state)
    for found, wanted in zip(plain.delta_rule(*inputs), row_by_row(inputs), strict=True):
        assert torch.allclose(found.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rows", [1, 2, 9])
def test_a_convolution_goes_on_from_the_rows_before(rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    inputs, weight, bias = torch.randn(rows + 5, 6).to(dtype), torch.randn(6, 4).to(dtype), torch.randn(6).to(dtype)
    nothing = torch.zeros(6, 3, dtype=dtype)
    whole, end = plain.causal_conv(inputs, weight, bias, nothing)
    _, kept = plain.causal_conv(inputs[:5], weight, bias, nothing)
    later, kept = plain.causal_conv(inputs[5:], weight, bias, kept)
    assert torch.allclose(later, whole[5:], rtol=1e-3, atol=1e-6)
    assert torch.equal(kept, end)
    assert torch.equal(end, inputs[-3:].t())
    last = sum(inputs[-1 - back].float() * weight[:, 3 - back].float() for back in range(4)) + bias.float()
    assert torch.allclose(whole[-1], torch.nn.functional.silu(last.to(dtype)), rtol=1e-3, atol=1e-6)
