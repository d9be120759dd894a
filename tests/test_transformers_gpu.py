"""A model of Transformers on an NVIDIA GPU with its sparse layers handed over: the tokens stock gives, repeatable."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from transformers import StaticCache

from flashqsa import capture
from flashqsa.device import facts_of
from flashqsa.integrations.transformers import Steps, enable
from flashqsa.testing import compare
from tests.test_transformers_layer import at_once
from tests.test_transformers_prepare import (
    ONE_STEP,
    STEP_BY_STEP,
    Operators,
    cache_of,
    passes,
    whole_layer,
)
from tests.transformers_tiny import padding, tiny_model, tokens, twin

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
NEW, LENGTH = 10, 70

if torch.cuda.is_available() and "smxx" not in facts_of(GPU).kernel_sets:
    pytest.skip("the routes of smxx are for compute capability 8.0 and newer", allow_module_level=True)


@pytest.mark.parametrize("way", [{}, {"prefill_chunk_size": 17}], ids=["plain", "chunked prefill"])
def test_greedy_tokens_equal_stock_in_fp32(way: dict[str, int]) -> None:
    stock = tiny_model(2)
    ours = enable(twin(stock).to(GPU))
    stock = stock.to(GPU)
    ids, mask = tokens(3, LENGTH).to(GPU), padding(3, LENGTH, {1: slice(0, 3), 2: slice(0, 25)}).to(GPU)
    asked = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False}
    wanted = stock.generate(ids, **asked)
    routes: set[str] = set()
    with capture.listening(lambda call: routes.add(str(call.plan.attend_decision.route))):
        found = ours.generate(ids, **asked, **way)
    assert torch.equal(found, wanted)
    assert routes
    assert all(route.startswith("smxx:") for route in routes)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_types_repeat_themselves_and_stay_near_stock(dtype: torch.dtype) -> None:
    stock = tiny_model(2).to(dtype)
    ours = enable(twin(stock).to(GPU))
    stock = stock.to(GPU)
    ids = tokens(2, LENGTH).to(GPU)
    with torch.no_grad():
        wanted = stock(ids).logits.float()
        first, again = (ours(ids, use_cache=True).logits.float() for _ in range(2))
    assert torch.equal(first, again)
    assert bool(first.isfinite().all())
    # A near tie at the cut may choose another block in half precision: most rows agree closely, all roughly.
    difference = (first - wanted).abs().amax(dim=-1)
    assert float(difference.median()) < 0.1 * float(wanted.std())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["none", "dynamic", "static"])
def test_norms_rotary_and_writing_are_one_launch_with_the_numbers_of_many(kind: str, dtype: torch.dtype) -> None:
    model, layer, rotary = whole_layer(dtype)
    model.to(GPU)
    mask = padding(2, 90, {0: slice(0, 7)}).bool().to(GPU)
    found = []
    for whether, names in ((False, STEP_BY_STEP), (None, ONE_STEP), (None, ONE_STEP)):
        cache = cache_of(at_once(model, whether), kind)
        with Operators() as seen:
            found.append(passes(layer, rotary, cache, mask, dtype))
        assert seen.names == names * (1 if cache is None else 4)
    apart, together, again = found
    for first, second in zip(together, again, strict=True):
        assert compare.same_bits(first, second)
    # torch's root on a GPU may be off by its last bit. Keys and outputs follow it, and so may a choice at the cut.
    unit = torch.finfo(dtype).eps
    for want, got in zip(apart, together, strict=True):
        far = (got - want).abs() > 4 * unit * want.abs() + 8 * unit * want.abs().max()
        assert float(far.any(dim=-1).float().mean()) < 0.05
    # Values, raw keys and pooled keys are stored as ever.
    assert len(apart) == len(together) == (1 if kind == "none" else 9)
    for want, got in zip(apart[5:], together[5:], strict=True):
        assert compare.same_bits(got, want)


def test_a_graph_of_a_step_prepares_at_once_and_gives_the_tokens_of_stock() -> None:
    stock = tiny_model(3)
    ours = enable(twin(stock).to(GPU))
    stock = stock.to(GPU)
    ids = tokens(2, LENGTH).to(GPU)
    wanted = stock.generate(ids, max_new_tokens=NEW, do_sample=False)[:, LENGTH:]
    cache = StaticCache(config=ours.config, max_cache_len=LENGTH + NEW)
    with torch.no_grad():
        last = ours(ids, past_key_values=cache).logits[:, -1].argmax(-1)
    steps, found = Steps(ours, cache, last), [last.tolist()]
    with Operators() as seen:
        for _ in range(NEW - 1):
            found.append([tokens_of[0] for tokens_of in steps.step()])
    assert [done.how for done in steps.done] == ["called", "captured"] + ["replayed"] * (NEW - 3)
    # Two layers, called once and captured once: what is replayed runs no operator.
    assert seen.names == ONE_STEP * 4
    assert [list(text) for text in zip(*found, strict=True)] == wanted.tolist()
