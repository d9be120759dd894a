"""Random Qwen4-Exp models that vLLM loads, and what Transformers' own implementation says of a text."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from flashqsa.cli.preset_folder import byte_tokenizer
from flashqsa.cli.presets import PRESETS, transformers_module

LAYER_TYPES = ["linear_attention"] * 3 + ["full_attention"]
BUDGET = 64
"""Tokens that a row selects."""


def write_model(folder: Path, **changed: Any) -> Path:
    """A folder with a model in BF16 and a tokenizer of bytes.

    The preset `tiny`, wider where vLLM asks for it: its kernel for linear layers on CPUs has heads of 128, and its
    loader wants the gate named. With eight index heads scores are hardly ever equal, so the selection is Transformers'
    too; a token for padding would be embedded as 0, and all its scores would be.
    """
    transformers = transformers_module()
    fields = PRESETS["tiny"].fields()
    fields |= {
        "hidden_size": 128,
        "head_dim": 64,
        "indexer_n_heads": 8,
        "indexer_head_dim": 32,
        "indexer_budget": BUDGET,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "output_gate_type": "silu",
        "layer_types": LAYER_TYPES,
        "pad_token_id": None,
        **changed,
    }
    torch.manual_seed(0)
    config = transformers.Qwen4ExpTextConfig(**fields)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def with_scales(folder: Path, source: Path, k_scale: float, v_scale: float) -> Path:
    """A copy of a model, whose checkpoint has scales for an FP8 cache of its sparse layer."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    weights = load_file(folder / "model.safetensors")
    layer = f"model.layers.{LAYER_TYPES.index('full_attention')}.self_attn"
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        weights[f"{layer}.{name}"] = torch.tensor(scale)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def with_drafts(folder: Path, source: Path) -> Path:
    """A copy of a model that has a layer for drafts: its sparse layer again, before which nothing is mixed."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config |= {"mtp_num_hidden_layers": 1, "index_share_for_mtp_iteration": True}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    weights = load_file(folder / "model.safetensors")
    width, streams = config["hidden_size"], config["hc_count"]
    sparse, mixer = f"model.layers.{LAYER_TYPES.index('full_attention')}.", "model.hyper_connection_mixer."
    made = {
        "mtp.fc_embedding.weight": torch.eye(width, dtype=torch.bfloat16),
        "mtp.fc_hidden.weight": torch.eye(width, dtype=torch.bfloat16),
        "mtp.pre_fc_norm_embedding.weight": torch.zeros(width, dtype=torch.bfloat16),
        "mtp.pre_fc_norm_hidden.weight": torch.zeros(streams * width, dtype=torch.bfloat16),
    }
    for name, weight in weights.items():
        if name.startswith(sparse):
            made[f"mtp.layers.0.{name.removeprefix(sparse)}"] = weight.clone()
        elif name.startswith(mixer):
            made[f"mtp.hyper_connection_mixer.{name.removeprefix(mixer)}"] = weight.clone()
    save_file({**weights, **made}, folder / "model.safetensors", {"format": "pt"})
    return folder


@cache
def reference_model(folder: Path, dtype: torch.dtype) -> Any:
    """Transformers' own model, without FlashQSA."""
    found = transformers_module().AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    return found.eval()


def log_probabilities(folder: Path, dtype: torch.dtype, tokens: list[int]) -> torch.Tensor:
    """[tokens - 1, vocabulary] FP32: Transformers' log-probabilities of every token but the first."""
    with torch.no_grad():
        logits: torch.Tensor = reference_model(folder, dtype)(torch.tensor([tokens])).logits[0, :-1]
    return logits.to(torch.float32).log_softmax(-1)
