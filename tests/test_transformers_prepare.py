"""A layer whose norms, rotary and writing are one step: the bits of many steps, or many steps and the reason."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers")

from transformers import DynamicCache, StaticCache
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextRMSNorm

from flashqsa import knobs, pipeline
from flashqsa.integrations.transformers import FlashQsaAttention, Steps, disable, enable
from flashqsa.integrations.transformers import layer as layer_module
from flashqsa.kernels import nvrtc
from flashqsa.kernels.nvrtc import Kernel
from flashqsa.testing import compare
from flashqsa.values import FP8
from tests.nvrtc_emulate import machine_named
from tests.test_transformers_layer import LOGITS, at_once, one_layer
from tests.transformers_tiny import (
    logits,
    one_thread,  # noqa: F401
    padding,
    tiny_model,
    tokens,
    twin,
)


class Operators(TorchDispatchMode):
    """Notes FlashQSA's operators, in the order they run in."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func.name().partition("::")
        self.names += [name] if namespace == "flashqsa" else []
        return func(*args, **(kwargs or {}))


STEP_BY_STEP, ONE_STEP = ["write_kv", "write_index_keys", "qsa_attention"], ["prepare", "qsa_attention"]


def whole_layer(dtype: torch.dtype) -> tuple[Any, FlashQsaAttention, Any]:
    """One layer whose projections give whole numbers, so that no order of a sum can be told from another."""
    model, layer, rotary = one_layer()
    generator = torch.Generator().manual_seed(6)
    layer.to(dtype)
    with torch.no_grad():
        for part in (layer.q_proj, layer.k_proj, layer.v_proj, layer.indexer.index_qk_proj):
            part.weight.copy_(torch.randint(-1, 2, part.weight.shape, generator=generator))
    return model, layer, rotary


def passes(layer: FlashQsaAttention, rotary: Any, cache: Any, mask: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """A layer's outputs over 90 columns in four passes, and what its cache then holds; without one, one pass."""
    generator = torch.Generator().manual_seed(8)
    hidden = torch.randint(-1, 2, (2, 90, 64), generator=generator).to(mask.device, dtype)
    # Positions of three axes that differ, as an image's do.
    positions = torch.stack([torch.arange(90), torch.arange(90) // 2, torch.arange(90) // 3])[:, None]
    positions = positions.expand(3, 2, -1).to(mask.device)
    found = []
    cuts = (0, 90) if cache is None else (0, 41, 42, 50, 90)
    with torch.no_grad():
        for start, stop in itertools.pairwise(cuts):
            angles = rotary(hidden[:, start:stop], positions[..., start:stop])
            found.append(layer(hidden[:, start:stop], angles, mask[:, :stop], cache)[0])
    if cache is not None:
        store = cache.layers[0].store
        pooled = store.index_keys[store.page_table.long()].flatten(1, 2)
        found += [*store.in_columns(90), pooled[0, : (90 - 7) // 4], pooled[1, : 90 // 4]]
    return found


def cache_of(model: Any, kind: str) -> Any:
    """An empty cache for `passes`, or none."""
    if kind == "static":
        return StaticCache(config=model.config, max_cache_len=120)
    return None if kind == "none" else DynamicCache(config=model.config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["none", "dynamic", "static", "fp8"])
def test_one_step_has_the_bits_of_many_where_sums_are_exact(kind: str, dtype: torch.dtype) -> None:
    model, layer, rotary = whole_layer(dtype)
    layer.kv_dtype = FP8 if kind == "fp8" else None
    mask = padding(2, 90, {0: slice(0, 7)}).bool()
    found = []
    for whether, names in ((False, STEP_BY_STEP), (True, ONE_STEP)):
        cache = cache_of(at_once(model, whether), kind)
        with Operators() as seen:
            found.append(passes(layer, rotary, cache, mask, dtype))
        assert seen.names == names * (1 if cache is None else 4)
    for apart, together in zip(*found, strict=True):
        assert bool(apart.float().isfinite().all())
        assert bool(apart.float().abs().max() > 0)
        assert compare.same_bits(together, apart)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["none", "dynamic", "static", "fp8"])
def test_a_gpus_kernel_takes_what_the_layer_gives_it(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, layer, rotary = whole_layer(dtype)
    layer.kv_dtype = FP8 if kind == "fp8" else None
    mask = padding(2, 90, {0: slice(0, 7)}).bool()
    wanted = passes(layer, rotary, cache_of(at_once(model), kind), mask, dtype)
    launched: list[str] = []
    with machine_named("emulated", tmp_path) as machine:
        emulated = Kernel.launch

        def launch(kernel: Kernel, device: torch.device, programs: int, *arguments: int | float) -> None:
            launched.append(kernel.function)
            emulated(kernel, device, programs, *arguments)

        monkeypatch.setattr(Kernel, "launch", launch)
        monkeypatch.setattr(pipeline, "_preparing_function", lambda _: (nvrtc.prepare, (machine.capability,)))
        found = passes(layer, rotary, cache_of(model, kind), mask, dtype)
    assert launched == ["flashqsa_prepare"] * (1 if kind == "none" else 4)
    for mine, other in zip(found, wanted, strict=True):
        assert compare.same_bits(mine, other)


def test_a_cpu_goes_step_by_step_unless_it_is_told_otherwise() -> None:
    model, _, _ = one_layer()
    for whether, names in ((None, STEP_BY_STEP), (True, ONE_STEP), (False, STEP_BY_STEP)):
        with Operators() as seen:
            logits(at_once(model, whether), tokens(1, 9), use_cache=False)
        assert seen.names == names


def test_a_cache_may_change_hands_between_one_step_and_many() -> None:
    """Stock, then both ways in turn: each goes on from what the others left."""
    stock, _, _ = one_layer()
    fast = at_once(enable(twin(stock)), None)
    disable(stock)
    enable(fast)
    ids = tokens(2, 70)
    want = logits(stock, ids)
    cache = DynamicCache(config=fast.config)
    got = [logits(stock, ids[:, :30], past_key_values=cache)]
    for start, stop, whether in ((30, 33, True), (33, 47, False), (47, 48, True), (48, 49, False), (49, 70, True)):
        got.append(logits(at_once(fast, whether), ids[:, start:stop], past_key_values=cache))
    assert (torch.cat(got, 1) - want).abs().max() <= LOGITS


class Scaled(Qwen4ExpTextRMSNorm):  # type: ignore[misc]
    """Another norm."""


def hooked(layer: FlashQsaAttention) -> None:
    layer.q_norm.register_forward_hook(lambda _module, _inputs, output: 2 * output)


def own_forward(layer: FlashQsaAttention) -> None:
    forward = layer.k_norm.forward
    layer.k_norm.forward = lambda x: 2 * forward(x)


def other_kind(layer: FlashQsaAttention) -> None:
    layer.indexer.q_layernorm.__class__ = Scaled


def other_epsilon(layer: FlashQsaAttention) -> None:
    layer.indexer.q_layernorm.eps = 1e-3


def other_dtype(layer: FlashQsaAttention) -> None:
    layer.q_norm.to(torch.bfloat16)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (hooked, "a norm has hooks, which want to be called"),
        (own_forward, "a norm has a forward of its own"),
        (other_kind, "a norm is Scaled"),
        (other_epsilon, "norms differ in their epsilon or dtype"),
        (other_dtype, "norms differ in their epsilon or dtype"),
    ],
)
def test_what_one_step_would_leave_out_goes_step_by_step_and_says_why(
    change: Callable[[FlashQsaAttention], None], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, layer, _ = one_layer()
    change(layer)
    ids = tokens(1, 40)
    want = logits(at_once(model, False), ids, use_cache=False)
    layer_module._log_step_by_step.cache_clear()
    with caplog.at_level(logging.INFO, "flashqsa"), Operators() as seen:
        got = [logits(at_once(model), ids, use_cache=False) for _ in range(2)]
    assert seen.names == STEP_BY_STEP * 2
    assert all(torch.equal(each, want) for each in got)
    assert [record.message for record in caplog.records if "step by step" in record.message] == [
        f"norms, rotary and writing are done step by step: {reason}"
    ]


def test_autocast_and_weights_that_are_elsewhere_go_step_by_step() -> None:
    model, layer, _ = one_layer()
    ids = tokens(1, 24)
    with torch.autocast("cpu", torch.bfloat16), Operators() as seen:
        want, got = (logits(at_once(model, whether), ids, use_cache=False) for whether in (False, True))
    assert seen.names == STEP_BY_STEP * 2
    assert torch.equal(got, want)
    part = torch.zeros(1, 1, 1, 1)
    assert layer.step_by_step_reason((part,) * 5, part) is None
    layer.k_norm.to("meta")
    assert layer.step_by_step_reason((part,) * 5, part) == "weights of norms are offloaded, or on another device"


def test_a_cache_with_angles_of_another_dtype_goes_step_by_step() -> None:
    model, layer, rotary = whole_layer(torch.bfloat16)
    at_once(model)
    cache = DynamicCache(config=model.config)
    hidden, positions = torch.ones(1, 8, 64, dtype=torch.bfloat16), torch.arange(8).expand(3, 1, -1)
    with torch.no_grad(), Operators() as seen:
        angles = rotary(hidden.float(), positions)
        layer(hidden, angles, None, cache)
        layer(hidden, tuple(each.bfloat16() for each in angles), None, cache)
    assert seen.names == STEP_BY_STEP * 2


def test_a_norm_that_accelerate_watches_over_is_read() -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    model, layer, _ = one_layer()
    ids = tokens(1, 40)
    want = logits(at_once(model), ids, use_cache=False)
    hooks.add_hook_to_module(layer.q_norm, hooks.AlignDevicesHook(execution_device="cpu"))
    with Operators() as seen:
        assert torch.equal(logits(model, ids, use_cache=False), want)
    assert seen.names == ONE_STEP


@pytest.mark.parametrize("rows", [1, 5])
def test_a_step_of_fixed_shapes_prepares_at_once_and_reads_nothing(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of step by step, and over tensors without numbers, where every read is an error."""
    model = enable(tiny_model(4))
    ids, texts, runs = tokens(2, 60), [], []
    for whether in (False, True):
        cache = StaticCache(config=model.config, max_cache_len=120)
        last = logits(at_once(model, whether), ids, past_key_values=cache)[:, -1].argmax(-1)
        runs.append(Steps(model, cache, last))
        with Operators() as seen:
            texts.append([runs[-1].step([[5] * (rows - 1)] * 2) for _ in range(8)])
        assert ("prepare" in seen.names) == whether
        assert ("write_kv" in seen.names) != whether
    assert texts[0] == texts[1]
    monkeypatch.setenv(knobs.CHECK_VALUES.name, "off")
    monkeypatch.setattr(model.config, "_experts_implementation", "batched_mm")
    with FakeTensorMode(allow_non_fake_inputs=True), Operators() as seen:
        runs[1]._pass(rows, 100)
    assert seen.names == ONE_STEP * 2
