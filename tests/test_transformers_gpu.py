"""A model of Transformers on an NVIDIA GPU with its sparse layers handed over: the tokens stock gives, repeatable."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from flashqsa import capture
from flashqsa.device import facts_of
from flashqsa.integrations.transformers import enable
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
