"""Tensor parallelism: how the heads of sparse layers are split over ranks, in the terms of Transformers' own plans.

Transformers' plan of this model leaves every head of its sparse layers on every rank. The plan made here gives each
rank its share of query heads, and the KV heads that they read; the indexer stays whole everywhere, because one
selection serves all heads: every rank scores the same blocks from the same numbers, and selects the same.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer

from flashqsa.integrations.transformers.errors import UnsupportedModelError
from flashqsa.integrations.transformers.switch import qsa_layers
from flashqsa.integrations.transformers.versions import spec_of_config
from flashqsa.values import QsaSpec


def spec_on_rank(spec: QsaSpec, ranks: int) -> QsaSpec:
    """The heads that each of so many ranks has of a layer; one KV head serves several ranks where there are more.

    Raises UnsupportedModelError where heads cannot be shared out evenly, and for anything but a whole number.

    >>> half = spec_on_rank(QsaSpec(q_heads=24, kv_heads=2), 2)
    >>> quarter = spec_on_rank(QsaSpec(q_heads=24, kv_heads=2), 4)
    >>> (half.q_heads, half.kv_heads), (quarter.q_heads, quarter.kv_heads)
    ((12, 1), (6, 1))
    """
    if not isinstance(ranks, int) or isinstance(ranks, bool):
        raise UnsupportedModelError(f"ranks: wanted a whole number; got {ranks!r}")
    if ranks < 1 or spec.q_heads % ranks:
        raise UnsupportedModelError(f"ranks: wanted a divisor of {spec.q_heads} query heads; got {ranks}")
    if spec.kv_heads % ranks and ranks % spec.kv_heads:
        raise UnsupportedModelError(
            f"ranks: wanted a divisor or a multiple of {spec.kv_heads} KV heads, so that the query heads of a rank "
            f"read whole KV heads; got {ranks}"
        )
    return replace(spec, q_heads=spec.q_heads // ranks, kv_heads=max(spec.kv_heads // ranks, 1))


def spec_here(layer: nn.Module) -> QsaSpec:
    """A sparse layer's shape with the heads that its weights hold in this process: all of them without ranks."""
    spec = spec_of_config(layer.config)
    weight: Any = layer.get_parameter("q_proj.weight")
    held = getattr(weight, "_local_tensor", weight).shape[0]
    # The query projection has the gate too, head by head.
    return spec_on_rank(spec, spec.q_heads * 2 * spec.head_dim // held)


def tensor_parallel_plan(config: Any, ranks: int, model_class: Any = AutoModelForCausalLM) -> dict[str, str]:
    """The plan that splits a model with QSA layers over `ranks` ranks, for `DistributedConfig(tp_plan=...)`.

    config       the model's, as `AutoConfig.from_pretrained` gives it
    model_class  what the model is loaded with

    It is Transformers' plan of the model, in which the sparse layers' query heads are split, their KV heads too (or
    given to several ranks each, where there are more ranks), the output projection adds up over ranks, and the indexer
    is whole on each. The other layers are split as Transformers does it. Every process must ask for it: it may register
    a parallel style of this file. Builds the model without memory, and nothing is loaded.

    Raises UnsupportedModelError where the model has no QSA layer, or its heads cannot be shared out evenly.
    """
    spec = spec_of_config(config)
    own = spec_on_rank(spec, ranks)
    build = getattr(model_class, "from_config", None) or model_class._from_config
    with torch.device("meta"):
        model = build(config)
    names = {_wildcards(name) for name, _ in (*model.named_modules(), *model.named_parameters())}
    # A rule that names nothing makes Transformers warn.
    plan = {name: style for name, style in model.tp_plan.items() if name in names}
    kv_style, layer_style = "colwise", None
    if own.kv_heads * ranks > spec.kv_heads:
        kv_style, layer_style = f"qsa_kv_head_of_{spec.kv_heads}", f"qsa_{own.heads_per_kv_head}_heads_per_kv_head"
        ALL_PARALLEL_STYLES.register(kv_style, _OneKvHead(spec.kv_heads))
        ALL_PARALLEL_STYLES.register(layer_style, _HeadsPerKvHead(own.heads_per_kv_head))
    for layer in {_wildcards(name) for name in qsa_layers(model)}:
        plan[f"{layer}.q_proj"] = "colwise"
        plan[f"{layer}.k_proj"] = plan[f"{layer}.v_proj"] = kv_style
        plan[f"{layer}.o_proj"] = "rowwise"
        if layer_style is not None:
            plan[layer] = layer_style
        # Newer releases add a plan to their own, so the rule has to be replaced; older ones have no name for "whole".
        indexer = f"{layer}.indexer.index_qk_proj"
        if "replicate" in ALL_PARALLEL_STYLES:
            plan[indexer] = "replicate"
        else:
            plan.pop(indexer, None)
    return plan


def _wildcards(name: str) -> str:
    """A module's name as plans write it, with `*` for the numbers of layers."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


class _OneKvHead(TensorParallelLayer):  # type: ignore[misc]
    """For a projection to KV heads of which each serves several ranks: it is whole on every rank, which keeps one."""

    def __init__(self, kv_heads: int) -> None:
        self.kv_heads = kv_heads

    def transform_output_post_forward(self, module: nn.Module, output: Tensor, mesh: Any) -> Tensor:
        """The rank's own head [..., head_dim] of all of them [..., kv_heads * head_dim]."""
        del module
        heads = output.chunk(self.kv_heads, dim=-1)
        own: int = mesh.get_local_rank() * self.kv_heads // mesh.size()
        return heads[own]


class _HeadsPerKvHead(TensorParallelLayer):  # type: ignore[misc]
    """Tells a stock sparse layer how many of its query heads read one KV head here: calls may be left to it."""

    def __init__(self, heads: int) -> None:
        self.heads = heads

    def install_forward(self, module: Any, mesh: Any) -> Any:
        """Sets the number, and leaves the forward as it is."""
        del mesh
        module.num_key_value_groups = self.heads
        return module
