"""What tests share that run on a CPU and on a GPU: the devices, their top-k on given scores, memory full of poison."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import flashqsa
from flashqsa import pipeline
from flashqsa.device import facts_of
from flashqsa.plan import plan_select
from flashqsa.route import Call, choose_route
from flashqsa.testing.calls import attention_failures, pick_rows, product_dtype
from flashqsa.testing.cases import BF16, FP16, FP32, spec_of
from flashqsa.testing.inputs import Inputs
from flashqsa.testing.nasty import RawKeys
from flashqsa.values import FP8, IndexCache, QsaSpec, Rows, Scores, Selection

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

LAYERS: dict[str, tuple[QsaSpec, torch.dtype, torch.dtype]] = {
    "fp32-64": (spec_of(6, 2, 64), FP32, FP32),
    "fp16-64": (spec_of(6, 1, 64), FP16, FP16),
    "bf16-256": (spec_of(24, 2, 256), BF16, BF16),
    "fp8-256": (spec_of(24, 2, 256), BF16, FP8),
}
"""Layers, with the dtypes of queries and caches, that between them take every attention kernel of an H200."""

SPARSE_ROUTES = (None, "grouped", "xqa")
"""The route that is chosen, then pins that every kernel set has."""

WORKSPACE_BYTES = 1 << 30


def rank(scores: Scores, top_blocks: int, device: str) -> Selection:
    """The selection that a device's own top-k makes of given scores, written over numbers that no selection holds."""
    values, visible = scores.values.to(device), scores.visible.to(device)
    rows, width = values.shape
    facts = facts_of(values.device)
    call = Call(QsaSpec(top_blocks=top_blocks), rows, requests=1, max_position=width * 4 - 1)
    chosen = choose_route("select", call, facts, "plain")
    plan = plan_select(call, chosen, facts, WORKSPACE_BYTES)
    kernels = pipeline.kernel_set(chosen.route.kernel_set)
    blocks = torch.full((rows, top_blocks), -77, dtype=torch.int32, device=device)
    out = Selection(blocks, torch.full((rows,), -77, dtype=torch.int32, device=device))
    before = values.view(torch.int32).clone()
    for start, stop in plan.chunks(rows):
        kernels.topk(Scores(values[start:stop], visible[start:stop]), out.slice(start, stop), plan)
    assert torch.equal(before, values.view(torch.int32)), "scores were written to"
    return on_host(out)


def on_host(selection: Selection) -> Selection:
    """The selection on the CPU."""
    return Selection(selection.blocks.cpu(), selection.count.cpu())


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fills memory that torch hands out uninitialised: NaN in floats, -77 in whole numbers."""

    def poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*arguments: Any, **options: Any) -> Tensor:
            tensor = make(*arguments, **options)
            if tensor.dtype == FP8:
                tensor.view(torch.uint8).fill_(0x7F)
            elif tensor.dtype.is_floating_point:
                tensor.fill_(float("nan"))
            elif tensor.dtype in (torch.int32, torch.int64):
                tensor.fill_(-77)
            return tensor

        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", poisoned(torch.empty))
        patch.setattr(torch, "empty_like", poisoned(torch.empty_like))
        yield


def select(inputs: Inputs, **options: Any) -> Selection:
    """The inputs' own selection, or that of `select_blocks`."""
    if inputs.selection is not None:
        return inputs.selection
    return flashqsa.select_blocks(inputs.index_q, inputs.index_cache, inputs.rows, inputs.spec, **options)


def attend(inputs: Inputs, selection: Selection | None, **options: Any) -> tuple[Tensor, Tensor]:
    """Output and lse of `sparse_attention`, written over poison."""
    arguments = (inputs.q, inputs.kv_cache, selection, inputs.rows, inputs.spec, inputs.gate)
    with poisoned_memory():
        output, lse = flashqsa.sparse_attention(*arguments, return_lse=True, **options)
    return output, lse


def failures(
    inputs: Inputs, selection: Selection | None, found: tuple[Tensor, Tensor], kernel_set: str, most_rows: int = 0
) -> list[str]:
    """What the reference has against an output and its lse, of at most so many rows (0: of all)."""
    return attention_failures(
        *found,
        inputs.q,
        inputs.kv_cache,
        selection,
        inputs.rows,
        inputs.spec,
        inputs.gate,
        pick_rows(inputs.rows, most_rows),
        product_dtype(kernel_set, inputs.kv_cache.keys.dtype),
    )[0]


def kernels_of(device: str) -> str:
    """The kernel set whose products round as those of any that serves a device."""
    return "cpu" if device == "cpu" else "smxx"


Piece = tuple[int, int, int]
"""Request, first token, and the token after the last."""


def write_pieces(raw: RawKeys, pieces: list[Piece], cache: IndexCache, spec: QsaSpec, padding: bool = False) -> None:
    """Writes pieces of raw keys in one call of `write_index_keys`; rows of padding stand before and after each piece.

    The tensors are no longer than the rows are many.
    """
    request, position, keys, cos, sin = [], [], [], [], []
    for owner, start, stop in pieces:
        before, after = ([(-1, start)], [(owner, -3)]) if padding else ([], [])
        live = [(owner, token) for token in range(start, stop)]
        for row_owner, token in (*before, *live, *after):
            there = row_owner >= 0 and token >= 0
            request.append(row_owner)
            position.append(token)
            keys.append(raw.keys[owner][token] if there else torch.full_like(raw.keys[owner][0], float("nan")))
            cos.append(raw.cos[owner][max(token, 0)])
            sin.append(raw.sin[owner][max(token, 0)])
    device = cache.keys.device
    rows = Rows.from_tensors(torch.tensor(request, device=device), torch.tensor(position, device=device))
    flashqsa.write_index_keys(
        torch.stack(keys).to(device),
        cache,
        rows,
        spec,
        norm_weight=raw.norm_weight.to(device),
        cos=torch.stack(cos).to(device),
        sin=torch.stack(sin).to(device),
    )


def plant(monkeypatch: pytest.MonkeyPatch, **kernels: Callable[..., Any]) -> None:
    """Puts wrong kernels in the place of the CPU's, for tests of tests."""
    right = pipeline.KERNEL_SETS["cpu"]
    monkeypatch.setitem(pipeline.KERNEL_SETS, "cpu", SimpleNamespace(**{**vars(right), **kernels}))
