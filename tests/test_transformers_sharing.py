"""Models and caches that leave the place they were made in: other processes, other models, configs used again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, DynamicCache

from flashqsa.integrations.transformers import CacheMismatchError, UnsupportedModelError, enable, is_enabled
from tests.transformers_tiny import (
    logits,
    one_thread,  # noqa: F401
    tiny_model,
    tokens,
    twin,
)

pytestmark = pytest.mark.usefixtures("one_thread")

ELSEWHERE = """
import sys, torch
torch.set_num_threads(1)
model = torch.load(sys.argv[1], weights_only=False)
ids = torch.arange(3, 90)[None]
mask = torch.ones_like(ids)
mask[:, :10] = 0
with torch.no_grad():
    padded = model(ids, attention_mask=mask).logits[:, 10:]
    print(float((padded - model(ids[:, 10:]).logits).abs().max()))
"""


def test_a_model_loaded_in_another_process_keeps_to_the_padding_mask(tmp_path: Path) -> None:
    torch.save(enable(tiny_model()), tmp_path / "model.pt")
    command = [sys.executable, "-c", ELSEWHERE, str(tmp_path / "model.pt")]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent)
    assert float(done.stdout) < 1e-5


def test_the_config_of_an_enabled_model_builds_stock_models() -> None:
    model = enable(tiny_model())
    for other in (type(model)(model.config), AutoModelForCausalLM.from_config(model.config)):
        assert not is_enabled(other)
        other.eval()
        other.load_state_dict(model.state_dict())
        ids = tokens(1, 40)
        assert (logits(other, ids) - logits(model, ids)).abs().max() < 1e-5


@pytest.mark.parametrize("difference", ["block", "norm"])
def test_a_cache_pooled_for_another_model_is_refused(difference: str) -> None:
    model = enable(tiny_model())
    changes = {"indexer_compress_ratio": 8} if difference == "block" else {}
    other = tiny_model(**changes)
    other.load_state_dict(model.state_dict())
    if difference == "norm":
        for name, weight in other.named_parameters():
            if name.endswith("indexer.k_layernorm.weight"):
                weight.data.add_(0.5)
    enable(other)
    cache = DynamicCache(config=model.config)
    ids = tokens(1, 60)
    logits(model, ids[:, :50], past_key_values=cache)
    with pytest.raises(CacheMismatchError, match={"block": "blocks of 8 tokens; got 4", "norm": "norm"}[difference]):
        logits(other, ids[:, 50:], past_key_values=cache)


def test_a_cache_may_go_on_with_a_twin() -> None:
    model = enable(tiny_model())
    other = enable(twin(model))
    ids = tokens(1, 60)
    cache = DynamicCache(config=model.config)
    logits(model, ids[:, :50], past_key_values=cache)
    assert (logits(other, ids[:, 50:], past_key_values=cache) - logits(model, ids)[:, 50:]).abs().max() < 1e-5


def test_enabling_nothing_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="got NoneType"):
        enable(None)  # type: ignore[type-var]
