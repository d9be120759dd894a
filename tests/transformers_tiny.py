"""Tiny Qwen4-Exp models for the Transformers tests, and what the stock sparse layer chose in them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen4ExpForCausalLM, Qwen4ExpTextConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import (
    Qwen4ExpTextAttention,
    Qwen4ExpTextQSAIndexer,
    apply_rotary_pos_emb,
)

VOCABULARY = 256


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """For modules that import it: one thread, since tensors this small only lose time between two."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny_config(**changes: Any) -> Qwen4ExpTextConfig:
    """A config of one linear and two sparse layers: 4 query heads on 2 KV heads, budget 32 tokens in blocks of 4.

    Eight index heads, where the released model has 4: a block scores exactly 0 once in 256 times instead of once in 16,
    so that few rows have a tie at the cut.
    """
    fields: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 8192,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "hc_count": 2,
        "hc_lowrank": 16,
        "indexer_n_heads": 8,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 32,
        "indexer_budget": 32,
        "indexer_compress_ratio": 4,
        "layer_types": ["linear_attention", "full_attention", "full_attention"],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [3, 3, 2],
        },
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return Qwen4ExpTextConfig(**{**fields, **changes})


def spread_weights(model: torch.nn.Module) -> None:
    """Norm weights that are not all the same, and projections wide enough that attention has something to choose."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.normal_(0.0, 0.2)
            elif "self_attn" in name and "proj.weight" in name:
                weight.normal_(0.0, 0.25)


def tiny_model(seed: int = 0, **changes: Any) -> Qwen4ExpForCausalLM:
    """A stock FP32 model in eval mode."""
    torch.manual_seed(seed)
    model = Qwen4ExpForCausalLM(tiny_config(**changes)).eval()
    spread_weights(model)
    model.generation_config.eos_token_id = None
    return model


def reloaded(model: Any, folder: Path, dtype: torch.dtype) -> Any:
    """The model in another dtype, through a checkpoint: `model.to` would round the rotary frequencies too."""
    model.save_pretrained(folder)
    again = type(model).from_pretrained(folder, dtype=dtype).eval()
    again.generation_config.eos_token_id = None
    return again


def twin(model: Any) -> Any:
    """A copy that shares nothing."""
    return copy.deepcopy(model)


def logits(model: Any, ids: Tensor, **kwargs: Any) -> Tensor:
    """[batch, tokens, vocabulary], without gradients."""
    with torch.no_grad():
        found: Tensor = model(ids, **kwargs).logits
    return found


def padding(batch: int, length: int, hidden: dict[int, Any]) -> Tensor:
    """[batch, length] int64 mask, 0 where `hidden` says: a slice of columns, or a list of them, for each request."""
    mask = torch.ones(batch, length, dtype=torch.int64)
    for request, columns in hidden.items():
        mask[request, columns] = 0
    return mask


def tokens(batch: int, length: int, seed: int = 1) -> Tensor:
    """[batch, length] int64 token ids that are no special ones."""
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


@dataclass
class Choice:
    """What one stock sparse layer saw and chose in one pass.

    scores   [batch, rows, blocks] FP32, -inf where a row does not see the block complete
    visible  [batch, rows] complete blocks
    chosen   [batch, rows, columns] bool, the columns stock attends to
    mask     [batch, rows, columns] bool, the columns it may see
    """

    scores: Tensor
    visible: Tensor
    chosen: Tensor
    mask: Tensor

    def tied(self, top_blocks: int) -> Tensor:
        """[batch, rows] bool: the last block that is taken scores as much as the first one that is not."""
        blocks = self.scores.shape[-1]
        if blocks <= top_blocks:
            return torch.zeros_like(self.visible, dtype=torch.bool)
        ranked = self.scores.sort(dim=-1, descending=True).values
        return (self.visible > top_blocks) & (ranked[..., top_blocks - 1] == ranked[..., top_blocks])


def stock_scores(
    indexer: Qwen4ExpTextQSAIndexer, hidden_states: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Scores and numbers of complete blocks as in `Choice`, by the stock formulas, of a pass without a cache."""
    batch, rows, _ = hidden_states.shape
    dim, ratio = indexer.index_head_dim, indexer.compress_ratio
    q, raw = indexer.index_qk_proj(hidden_states).split([indexer.index_n_heads * dim, dim], dim=-1)
    q = indexer.q_layernorm(q.reshape(batch, rows, -1, dim))
    cos, sin = angles
    q = apply_rotary_pos_emb(q, cos=cos[:, -rows:], sin=sin[:, -rows:], unsqueeze_dim=2)
    visible = mask.sum(-1) // ratio
    scores = torch.full((batch, rows, max(int(visible.max()), 1)), float("-inf"))
    for b in range(batch):
        columns = mask[b, -1].nonzero().flatten()
        count = columns.numel() // ratio
        if not count:
            continue
        members = columns[: count * ratio].view(count, ratio)
        pooled = indexer.k_layernorm(raw[b][members].float().mean(1).to(raw.dtype))
        starts = members[:, 0]
        keys = apply_rotary_pos_emb(pooled[:, None], cos=cos[b, starts], sin=sin[b, starts])[:, 0]
        found = torch.relu(torch.einsum("rhd,bd->rhb", q[b].float(), keys.float())).sum(1) / dim**0.5
        seen = torch.arange(count) < visible[b][:, None]
        scores[b, :, :count] = torch.where(seen, found, float("-inf"))
    return scores, visible


@contextmanager
def watching(model: torch.nn.Module) -> Iterator[list[Choice]]:
    """Collects a `Choice` for each stock sparse layer that runs without a cache and under a causal mask, in order."""
    found: list[Choice] = []

    def hook(indexer: Any, args: tuple[Any, ...], selected: Tensor) -> None:
        hidden_states, angles, mask = args[:3]
        seen = (mask if mask.dtype == torch.bool else mask == 0)[:, 0]
        scores, visible = stock_scores(indexer, hidden_states, angles, seen)
        chosen = (selected if selected.dtype == torch.bool else selected == 0)[:, 0]
        found.append(Choice(scores, visible, chosen, seen))

    layers = [module for module in model.modules() if isinstance(module, Qwen4ExpTextAttention)]
    handles = [layer.indexer.register_forward_hook(hook) for layer in layers]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
