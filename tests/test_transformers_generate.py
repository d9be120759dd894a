"""`generate` with FlashQSA gives the tokens that stock gives, however it is asked to go about it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from flashqsa.integrations.transformers import enable, hand_overs
from tests.transformers_tiny import (
    one_thread,  # noqa: F401
    padding,
    tiny_model,
    tokens,
    twin,
)

NEW = 10
LENGTH = 70


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    stock = tiny_model(2)
    return stock, enable(twin(stock))


@pytest.fixture(scope="module")
def prompt() -> tuple[Tensor, Tensor]:
    """Three requests of 70, 67 and 45 tokens, padded on the left."""
    return tokens(3, LENGTH), padding(3, LENGTH, {1: slice(0, 3), 2: slice(0, 25)})


@pytest.fixture(scope="module")
def greedy(models: tuple[Any, Any], prompt: tuple[Tensor, Tensor]) -> Tensor:
    ids, mask = prompt
    found: Tensor = models[0].generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
    assert found.shape == (3, LENGTH + NEW)
    return found


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunked prefill": {"prefill_chunk_size": 17},
    "static cache": {"cache_implementation": "static"},
    "static cache, chunked prefill": {"cache_implementation": "static", "prefill_chunk_size": 32},
    "no cache": {"use_cache": False},
}


@pytest.mark.parametrize("way", WAYS)
def test_greedy_tokens_equal_stock(
    models: tuple[Any, Any], prompt: tuple[Tensor, Tensor], greedy: Tensor, way: str
) -> None:
    ids, mask = prompt
    before = hand_overs()
    found = models[1].generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, **WAYS[way])
    assert torch.equal(found, greedy)
    assert hand_overs() == before


def test_beams_equal_stock(models: tuple[Any, Any], prompt: tuple[Tensor, Tensor]) -> None:
    ids, mask = prompt
    asked = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False, "num_beams": 3}
    want, got = (model.generate(ids, **asked, return_dict_in_generate=True, output_scores=True) for model in models)
    assert torch.equal(got.sequences, want.sequences)
    assert (got.sequences_scores - want.sequences_scores).abs().max() <= 1e-4
    # Beams that were all the same would not tell whether the caches followed them.
    assert int(want.beam_indices[:, :NEW].unique().numel()) > 3


def test_samples_equal_stock(models: tuple[Any, Any], prompt: tuple[Tensor, Tensor]) -> None:
    ids, mask = prompt
    found = []
    for model in models:
        torch.manual_seed(5)
        found.append(model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=True, top_k=0))
    assert torch.equal(*found)


def test_several_samples_per_prompt_equal_stock(models: tuple[Any, Any], prompt: tuple[Tensor, Tensor]) -> None:
    ids, _ = prompt
    found = []
    for model in models:
        torch.manual_seed(6)
        found.append(model.generate(ids[:1], max_new_tokens=NEW, do_sample=True, num_return_sequences=3))
    assert torch.equal(*found)
    assert len({tuple(row) for row in found[0].tolist()}) == 3


def test_a_cache_is_taken_up_again(models: tuple[Any, Any], prompt: tuple[Tensor, Tensor]) -> None:
    """A second question after an answer: the cache of the first `generate` goes on."""
    ids = prompt[0][:1]
    found = []
    for model in models:
        first = model.generate(ids, max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True)
        longer = torch.cat([first.sequences, tokens(1, 15, seed=8)], 1)
        found.append(model.generate(longer, max_new_tokens=NEW, do_sample=False, past_key_values=first.past_key_values))
    assert torch.equal(*found)
