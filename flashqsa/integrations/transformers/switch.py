"""Turning FlashQSA on and off: for one model, or for every model that Transformers builds from now on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.qwen4_exp import modeling_qwen4_exp as modeling
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextAttention, Qwen4ExpTextRotaryEmbedding

from flashqsa.integrations.transformers.cache import register_cache_layers, unregister_cache_layers
from flashqsa.integrations.transformers.errors import UnsupportedModelError
from flashqsa.integrations.transformers.layer import (
    FlashQsaAttention,
    FlashQsaRotaryEmbedding,
    full_mask,
    live_layers,
)
from flashqsa.integrations.transformers.masks import NAME, register_masks
from flashqsa.integrations.transformers.versions import MODEL_TYPES, spec_of_config
from flashqsa.values import FP8

Model = TypeVar("Model", bound=nn.Module)

_stock_forward: Callable[..., Any] = Qwen4ExpTextAttention.forward


def _any_mask_forward(
    self: Any,
    hidden_states: Any,
    position_embeddings: Any,
    attention_mask: Any = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> Any:
    """The stock layer's forward, which also takes the masks that `flashqsa_mask` makes.

    A stock model that shares its config object with one of ours is handed such masks.
    """
    cache = kwargs.pop("cache", past_key_values)
    mask = full_mask(hidden_states, attention_mask, cache, self.layer_idx)
    return _stock_forward(self, hidden_states, position_embeddings, mask, cache, **kwargs)


def register() -> None:
    """Makes Transformers know what our layers need: masks, cache layers, and masks that stock layers can read too."""
    register_masks()
    register_cache_layers()
    Qwen4ExpTextAttention.forward = _any_mask_forward


def _unregister() -> None:
    """Leaves Transformers as it was, once no layer of ours is left; only the functions named `qsa` stay."""
    if not live_layers and modeling.Qwen4ExpTextAttention is Qwen4ExpTextAttention:
        unregister_cache_layers()
        Qwen4ExpTextAttention.forward = _stock_forward


def qsa_layers(model: nn.Module) -> dict[str, Any]:
    """A model's sparse layers by name, stock or ours, in order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Qwen4ExpTextAttention)}


def _rotary_embeddings(model: nn.Module) -> Iterator[nn.Module]:
    yield from (module for module in model.modules() if isinstance(module, Qwen4ExpTextRotaryEmbedding))


def _set_implementation(model: nn.Module, value: str, instead_of: str | None = None) -> None:
    """Sets `_attn_implementation` of a model's configs, but not of its vision part.

    A config that holds a text config is set too: 5.16 makes the masks of its static caches by that one.
    """
    found: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, (PreTrainedModel, Qwen4ExpTextAttention)):
            for config in (module.config, module.config.get_text_config()):
                if config.model_type in MODEL_TYPES:
                    found[id(config)] = config
    for config in found.values():
        if instead_of in (None, config._attn_implementation):
            held = "text_config" in config.sub_configs
            config._attn_implementation = {"": value, "text_config": value} if held else value


def _check(model: nn.Module) -> dict[str, Any]:
    """The model's sparse layers, or UnsupportedModelError, before anything is changed."""
    layers = qsa_layers(model) if isinstance(model, nn.Module) else {}
    if not layers:
        raise UnsupportedModelError(f"model: wanted one with Qwen4-Exp sparse layers; got {type(model).__name__}")
    for name, layer in layers.items():
        if type(layer) not in (Qwen4ExpTextAttention, FlashQsaAttention):
            kind = type(layer).__name__
            raise UnsupportedModelError(f"model.{name}: wanted a Qwen4ExpTextAttention; got its subclass {kind}")
        if "forward" in vars(layer) and "_old_forward" not in vars(layer):
            raise UnsupportedModelError(f"model.{name}: wanted the stock forward; got one set on the instance")
        spec_of_config(layer.config)
        devices = sorted({str(weight.device) for weight in layer.parameters()})
        # accelerate's hooks bring weights to where they are used.
        if len(devices) > 1 and not any(hasattr(module, "_hf_hook") for module in layer.modules()):
            raise UnsupportedModelError(f"model.{name}: wanted all weights on one device; got {', '.join(devices)}")
    return layers


def _become(module: nn.Module, kind: type[nn.Module]) -> None:
    module.__class__ = kind
    # accelerate's hooks keep the method they wrap on the instance.
    if "_old_forward" in vars(module):
        module.__dict__["_old_forward"] = MethodType(kind.forward, module)


def enable(model: Model, *, kv_dtype: torch.dtype | None = None) -> Model:
    """Runs a model's sparse layers through FlashQSA. Returns the model, changed in place; again is harmless.

    Takes a `Qwen4ExpForCausalLM`, a `Qwen4ExpForConditionalGeneration`, or any module that holds one, on any device.
    `kv_dtype` is what caches that are begun from now on store keys and values in: `torch.float8_e4m3fn`, or None for
    the model's own dtype. Raises UnsupportedModelError, before anything is changed; ValueError for another `kv_dtype`.
    """
    layers = _check(model)
    if kv_dtype not in (None, FP8):
        raise ValueError(f"kv_dtype: wanted {FP8} or None; got {kv_dtype}")
    register()
    for layer in layers.values():
        if type(layer) is Qwen4ExpTextAttention:
            layer.__dict__["stock_attn_implementation"] = layer.config._attn_implementation
            _become(layer, FlashQsaAttention)
        live_layers.add(layer)
        layer.kv_dtype = kv_dtype
    for rotary in _rotary_embeddings(model):
        if type(rotary) is Qwen4ExpTextRotaryEmbedding:
            _become(rotary, FlashQsaRotaryEmbedding)
    _set_implementation(model, NAME)
    return model


def disable(model: Model) -> Model:
    """Gives a model its stock layers back. Returns the model, changed in place. Its caches stay usable."""
    previous = "sdpa"
    for layer in qsa_layers(model).values():
        if type(layer) is FlashQsaAttention:
            previous = layer.stock_attn_implementation or previous
            layer.__dict__.pop("stock_attn_implementation", None)
            layer.__dict__.pop("kv_dtype", None)
            _become(layer, Qwen4ExpTextAttention)
        live_layers.discard(layer)
    for rotary in _rotary_embeddings(model):
        if type(rotary) is FlashQsaRotaryEmbedding:
            _become(rotary, Qwen4ExpTextRotaryEmbedding)
    _set_implementation(model, previous, instead_of=NAME)
    _unregister()
    return model


def enable_globally() -> None:
    """Lets every Qwen4-Exp model that Transformers builds from now on run through FlashQSA; again is harmless.

    Works for `from_pretrained`, `from_config` and `transformers serve`. Models that exist stay as they are. A model
    that is built with another `attn_implementation` than the default keeps it, and its layers run stock.
    """
    register()
    modeling.Qwen4ExpTextAttention = FlashQsaAttention
    modeling.Qwen4ExpTextRotaryEmbedding = FlashQsaRotaryEmbedding


def disable_globally() -> None:
    """Undoes `enable_globally` for models that are built from now on; those that exist stay as they are."""
    modeling.Qwen4ExpTextAttention = Qwen4ExpTextAttention
    modeling.Qwen4ExpTextRotaryEmbedding = Qwen4ExpTextRotaryEmbedding
    _unregister()


def is_enabled(model: nn.Module) -> bool:
    """Whether a model has sparse layers, and all of them are ours."""
    layers = qsa_layers(model).values()
    return bool(layers) and all(isinstance(layer, FlashQsaAttention) for layer in layers)
