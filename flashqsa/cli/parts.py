"""Which code ran each part of a model: a figure of a whole model means little without it."""

from __future__ import annotations

import sys
from typing import Any

import torch

PACKAGES = {
    "linear attention": ("fla.ops.gated_delta_rule", "flash-linear-attention"),
    "its convolution": ("causal_conv1d", "causal-conv1d"),
}
"""Parts for which Transformers takes a package where one is installed: the module's name, and the package's."""

FALLBACK = "Transformers' own torch code, much slower than"


def parts_of(model: Any) -> dict[str, str]:
    """Each part of a Qwen4-Exp model, and what runs it where FlashQSA is on.

    Transformers imports the packages with the model's file, and falls back where that fails: so an import tells.
    """
    found = {"sparse layers": "FlashQSA"}
    for part, (module, package) in PACKAGES.items():
        found[part] = package if module in sys.modules else f"{FALLBACK} {package}, which was not found"
    config = model.config.get_text_config()
    experts = str(getattr(config, "_experts_implementation", None) or "eager")
    found["experts"] = f"{experts} of Transformers"
    if model.device.type == "cuda" and model.dtype != torch.bfloat16:
        found["experts"] += "; batched_mm in decode steps"
    if not getattr(config, "ple_layer_ids", None):
        found["n-gram embeddings"] = "none in this model"
    return found
