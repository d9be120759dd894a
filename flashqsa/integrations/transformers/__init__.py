"""FlashQSA in Hugging Face Transformers: one call puts it in place of the stock sparse layers of a Qwen4-Exp model.

    from flashqsa.integrations.transformers import enable

    model = AutoModelForCausalLM.from_pretrained(path)
    enable(model)

`docs/TRANSFORMERS.md` says what changes, what is left to the stock layer, and how to see which. Importing this module
loads neither torch nor Transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from flashqsa.integrations.transformers.errors import (
    CacheMismatchError,
    MaskMismatchError,
    UnsupportedModelError,
    UnsupportedTransformersError,
)

if TYPE_CHECKING:
    from flashqsa.integrations.transformers.cache import FlashQsaLayer, FlashQsaStaticLayer, reserve
    from flashqsa.integrations.transformers.handover import hand_overs
    from flashqsa.integrations.transformers.layer import FlashQsaAttention
    from flashqsa.integrations.transformers.lookup import PromptLookup
    from flashqsa.integrations.transformers.ranks import spec_here, spec_on_rank, tensor_parallel_plan
    from flashqsa.integrations.transformers.report import LayerRoute, route_report, spec_of
    from flashqsa.integrations.transformers.steps import MAX_ROWS, StepDone, Steps
    from flashqsa.integrations.transformers.switch import (
        disable,
        disable_globally,
        enable,
        enable_globally,
        is_enabled,
        qsa_layers,
    )
    from flashqsa.integrations.transformers.versions import portable_config, sparse_layer_ids, spec_of_config

_HOMES = {
    "FlashQsaAttention": "layer",
    "FlashQsaLayer": "cache",
    "FlashQsaStaticLayer": "cache",
    "LayerRoute": "report",
    "MAX_ROWS": "steps",
    "PromptLookup": "lookup",
    "StepDone": "steps",
    "Steps": "steps",
    "disable": "switch",
    "disable_globally": "switch",
    "enable": "switch",
    "enable_globally": "switch",
    "hand_overs": "handover",
    "is_enabled": "switch",
    "portable_config": "versions",
    "qsa_layers": "switch",
    "reserve": "cache",
    "route_report": "report",
    "sparse_layer_ids": "versions",
    "spec_here": "ranks",
    "spec_of": "report",
    "spec_of_config": "versions",
    "spec_on_rank": "ranks",
    "tensor_parallel_plan": "ranks",
}
_WITHOUT_TRANSFORMERS = ("handover", "lookup", "versions")

__all__ = [
    "MAX_ROWS",
    "CacheMismatchError",
    "FlashQsaAttention",
    "FlashQsaLayer",
    "FlashQsaStaticLayer",
    "LayerRoute",
    "MaskMismatchError",
    "PromptLookup",
    "StepDone",
    "Steps",
    "UnsupportedModelError",
    "UnsupportedTransformersError",
    "disable",
    "disable_globally",
    "enable",
    "enable_globally",
    "hand_overs",
    "is_enabled",
    "portable_config",
    "qsa_layers",
    "reserve",
    "route_report",
    "sparse_layer_ids",
    "spec_here",
    "spec_of",
    "spec_of_config",
    "spec_on_rank",
    "tensor_parallel_plan",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES[name]
    if home not in _WITHOUT_TRANSFORMERS:
        # Before the file that imports Transformers, so that an unsupported release is refused by name.
        versions = import_module(f"{__name__}.versions")
        versions.require_transformers()
    return getattr(import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
