"""Merging attention over parts of a context: the formula, what is refused, and processes with half a context each."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import flashqsa
from flashqsa import InputError, merge_lse, reference
from flashqsa.pipeline import kernel_set
from flashqsa.testing import compare
from flashqsa.testing.calls import attention_failures, pick_rows, product_dtype
from flashqsa.testing.cases import BF16, FP16, FP32, Case, spec_of
from flashqsa.testing.inputs import Inputs, build
from flashqsa.values import KvCache, Partial, Selection
from tests.both_devices import DEVICES, attend, kernels_of, select
from tests.on_ranks import on_ranks, two_gpus

SPLITS = ("halves", "in turn")
"""How two processes share the pages of a context."""

CASES = {
    "fp32": Case("context-parallel", (40, 1, 3), (300, 130, 9), spec_of(6, 2), padding=(0, 7), exact_scores=False),
    "fp16": Case("context-parallel-fp16", (24, 2), (400, 64), spec_of(12, 1), FP16, FP16, exact_scores=False),
    "bf16": Case("context-parallel-bf16", (30,), (260,), spec_of(24, 2), BF16, BF16, 4, gate=False),
    "fp32-dense": Case("context-parallel-dense", (20,), (20,), spec_of(6, 1), page_tokens=4),
}


def part_of(cache: KvCache, split: str, part: int) -> KvCache:
    """The cache with holes in the place of the pages that another of the two processes has."""
    pages = torch.arange(cache.page_table.shape[1], device=cache.page_table.device)
    owner = pages % 2 if split == "in turn" else (2 * pages) // len(pages)
    return replace(cache, page_table=torch.where(owner == part, cache.page_table, -1))


def failures(inputs: Inputs, selection: Selection, output: Tensor, lse: Tensor, device: str) -> list[str]:
    """What the reference, which has the whole context, has against a merged output."""
    rounding = product_dtype(kernels_of(device), inputs.kv_cache.keys.dtype)
    everything = (inputs.q, inputs.kv_cache, selection, inputs.rows, inputs.spec, inputs.gate)
    return attention_failures(output, lse, *everything, pick_rows(inputs.rows, 0), rounding)[0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 48])
def test_parts_are_weighted_by_their_lse(device: str, dtype: torch.dtype, head_dim: int) -> None:
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(3, 50, 6, head_dim, generator=generator).to(dtype)
    lses = torch.randn(3, 50, 6, generator=generator) * 20
    gate = torch.randn(50, 6, head_dim, generator=generator).to(dtype)
    # The first rows are not seen by one part, by two, by any.
    for row, unseen in enumerate(([0], [1, 2], [0, 1, 2])):
        outputs[unseen, row], lses[unseen, row] = 0.0, float("-inf")
    output, lse = (found.cpu() for found in merge_lse(outputs.to(device), lses.to(device), gate.to(device)))
    assert (output.dtype, lse.dtype) == (dtype, FP32)
    weights = torch.softmax(lses.double(), dim=0).nan_to_num(0.0)
    exact = (weights[..., None] * outputs.double()).sum(0)
    gated = exact * torch.sigmoid(gate.double())
    low = reference.gated(exact.float(), gate, dtype)
    assert compare.attention_within_tolerance(output, low, gated) is None
    wanted = torch.logsumexp(lses.double(), dim=0)
    assert compare.lse_within_tolerance(lse, wanted, wanted.float()) is None
    assert bool((output[2] == 0).all())
    assert bool((lse[2] == float("-inf")).all())


@pytest.mark.parametrize("device", DEVICES)
def test_a_part_of_nan_is_not_left_out(device: str) -> None:
    outputs = torch.ones(2, 3, 1, 64, device=device)
    lses = torch.tensor([[[0.0], [float("nan")], [float("-inf")]], [[1.0], [0.0], [float("nan")]]], device=device)
    output, lse = merge_lse(outputs, lses)
    assert bool(output[0].isfinite().all())
    assert bool(output[1:].isnan().all())
    assert lse.isnan().flatten().tolist() == [False, True, True]


@pytest.mark.parametrize("device", DEVICES)
def test_a_list_of_parts_is_a_stack_of_them_and_one_part_is_itself(device: str) -> None:
    outputs, lses = torch.randn(2, 5, 3, 64, device=device).to(BF16), torch.randn(2, 5, 3, device=device)
    whole = merge_lse(outputs, lses)
    listed = merge_lse(list(outputs.transpose(1, 2).contiguous().transpose(1, 2)), tuple(lses))
    assert all(compare.same_bits(a, b) for a, b in zip(whole, listed, strict=True))
    output, lse = merge_lse(outputs[:1], lses[:1])
    assert compare.same_bits(output, outputs[0])
    assert bool((lse - lses[0]).abs().max() < 1e-6)
    empty = merge_lse(outputs[:, :0], lses[:, :0])
    assert [list(found.shape) for found in empty] == [[0, 3, 64], [0, 3]]


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU `merge_lse` takes this kernel")
def test_the_kernel_of_gpus_takes_parts_as_they_come_in_its_interpreter() -> None:
    pytest.importorskip("triton")
    # FP16 alone: the interpreter computes BF16 wrongly.
    outputs, lses = torch.randn(3, 7, 3, 64).to(FP16), torch.randn(3, 7, 3)
    outputs[1:, 2], lses[1:, 2] = 0.0, float("-inf")
    gate = torch.randn(7, 3, 64).to(FP16)
    output, lse = torch.full_like(outputs[0], float("nan")), torch.full_like(lses[0], float("nan"))
    kernel_set("smxx").merge(Partial(outputs, lses), gate, output, lse)
    wanted, wanted_lse = merge_lse(outputs, lses, gate)
    assert float((output.float() - wanted.float()).abs().max()) <= torch.finfo(FP16).eps * float(wanted.abs().max())
    assert float((lse - wanted_lse).abs().max()) < 1e-6


OUTPUTS, LSES = torch.zeros(2, 5, 3, 64), torch.zeros(2, 5, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((OUTPUTS[0], LSES), "outputs: wanted 4 dimensions"),
        ((OUTPUTS.double(), LSES), "outputs: wanted dtype float32"),
        ((OUTPUTS[:0], LSES[:0]), "outputs: wanted at least one part"),
        (([], LSES), "outputs: wanted at least one part"),
        (("parts", LSES), "outputs: wanted a tensor, or a list"),
        (([OUTPUTS[0], OUTPUTS[1, :4]], LSES), "outputs: wanted parts of one shape"),
        (([OUTPUTS[0], OUTPUTS[1].half()], LSES), "outputs: wanted parts of one dtype"),
        ((OUTPUTS, LSES[:, :4]), "lses: wanted shape [parts, rows, q_heads] = [2, 5, 3]"),
        ((OUTPUTS, LSES.half()), "lses: wanted dtype float32"),
        ((OUTPUTS, LSES.to("meta")), "lses: wanted device cpu"),
        ((OUTPUTS, LSES, OUTPUTS), "gate: wanted 3 dimensions"),
        ((OUTPUTS, LSES, OUTPUTS[0, :4]), "gate: wanted shape"),
    ],
    ids=str,
)
def test_what_is_no_part_is_refused_by_name(arguments: Any, message: str) -> None:
    with pytest.raises(InputError) as raised:
        merge_lse(*arguments)
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("device", DEVICES)
def test_halves_of_a_context_merge_to_the_whole(device: str, name: str, split: str) -> None:
    inputs = build(CASES[name], device)
    selection = select(inputs)
    apart = replace(inputs, gate=None)
    parts = [attend(replace(apart, kv_cache=part_of(inputs.kv_cache, split, part)), selection) for part in range(2)]
    output, lse = merge_lse([part[0] for part in parts], [part[1] for part in parts], inputs.gate)
    assert all(bool((part_lse < lse).any()) for _, part_lse in parts), "each part lacks tokens of some row"
    assert failures(inputs, selection, output, lse, device) == []


def half_a_context(device: torch.device, name: str, split: str) -> dict[str, Any]:
    """What one of two processes selects and attends to, and the merge of both."""
    inputs = build(CASES[name], device)
    selection = flashqsa.select_blocks(inputs.index_q, inputs.index_cache, inputs.rows, inputs.spec)
    own = part_of(inputs.kv_cache, split, dist.get_rank())
    # What another process has must not matter here.
    there = own.page_table[own.page_table >= 0].unique().long()
    elsewhere = torch.ones(own.keys.shape[0], dtype=torch.bool, device=device).index_fill_(0, there, False)
    own.keys[elsewhere] = own.values[elsewhere] = float("nan")
    output, lse = flashqsa.sparse_attention(inputs.q, own, selection, inputs.rows, inputs.spec, return_lse=True)
    outputs = [torch.empty_like(output) for _ in range(2)]
    lses = [torch.empty_like(lse) for _ in range(2)]
    dist.all_gather(outputs, output)
    dist.all_gather(lses, lse)
    merged, merged_lse = merge_lse(outputs, lses, inputs.gate)
    blocks = selection.blocks.cpu().contiguous().numpy().tobytes()
    return {
        "selection": hashlib.sha256(blocks).hexdigest(),
        "seen": int((lse > float("-inf")).sum()),
        "output": merged.cpu(),
        "lse": merged_lse.cpu(),
    }


@pytest.mark.skipif(sys.platform == "win32", reason="gloo has no file store there")
@pytest.mark.parametrize(
    ("device", "ways"),
    [
        ("cpu", [("fp32", "halves"), ("bf16", "in turn")]),
        pytest.param(
            "cuda", [("fp16", "halves"), ("bf16", "in turn")], marks=[pytest.mark.gpu, two_gpus], id="two GPUs"
        ),
    ],
)
def test_two_processes_with_half_a_context_each_agree_with_one(
    device: str, ways: list[tuple[str, str]], tmp_path: Path
) -> None:
    for index, (name, split) in enumerate(ways):
        (folder := tmp_path / str(index)).mkdir()
        one, two = on_ranks(half_a_context, 2, folder, device, name, split)
        assert one["selection"] == two["selection"]
        assert compare.same_bits(one["output"], two["output"])
        assert compare.same_bits(one["lse"], two["lse"])
        inputs = build(CASES[name], device)
        selection = select(inputs)
        assert hashlib.sha256(selection.blocks.cpu().numpy().tobytes()).hexdigest() == one["selection"]
        alone, alone_lse = attend(inputs, selection)
        seen = int((alone_lse > float("-inf")).sum())
        fewest = min(one["seen"], two["seen"])
        assert 0 < fewest <= seen <= one["seen"] + two["seen"]
        # The first rows see nothing of the later half; of pages in turn all rows see some.
        assert (fewest < seen) == (split == "halves")
        merged, lse = one["output"].to(device), one["lse"].to(device)
        assert failures(inputs, selection, merged, lse, device) == []
        # And near what one process makes of it: both are within the same tolerance of what is exact.
        assert failures(inputs, selection, alone, alone_lse, device) == []
