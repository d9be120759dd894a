"""The mask and attention functions that Transformers finds under the name `qsa`.

A model whose `_attn_implementation` is `qsa` gets its masks from `flashqsa_mask`: the 2-D padding mask, or None,
where the pattern is plain causal, so that no [rows, keys] mask is ever built; and the stock 4-D mask for every other
pattern, which tells the layer to leave the call to the stock layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, sdpa_mask
from transformers.models.qwen4_exp.modeling_qwen4_exp import eager_attention_forward

NAME = "qsa"
"""The `_attn_implementation` under which the functions of this file are registered.

Not `flashqsa`: Transformers takes every name with `flash` in it for FlashAttention (`is_flash_attention_requested`).
"""


def flashqsa_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """None, or [batch, columns] bool, True for a token and False for padding: or the stock [batch, 1, rows, columns].

    `mask_function` is the pattern; `attention_mask` the 2-D mask as the caller gave it, which covers the columns seen
    so far and is filled up to `kv_length` with padding, as stock masks are.
    """
    if mask_function is not causal_mask_function or kv_offset:
        kwargs["allow_is_causal_skip"] = kwargs["allow_is_bidirectional_skip"] = False
        return stock_mask(
            batch_size, q_length, kv_length, q_offset, attention_mask, kv_offset, mask_function=mask_function, **kwargs
        )
    if attention_mask is None:
        return None
    missing = kv_length - attention_mask.shape[-1]
    return torch.nn.functional.pad(attention_mask, (0, missing)) if missing > 0 else attention_mask


def stock_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    attention_mask: Tensor | None,
    kv_offset: int = 0,
    **kwargs: Any,
) -> Tensor:
    """The [batch, 1, rows, columns] bool mask that the stock layer needs, never skipped."""
    mask: Tensor = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        attention_mask=attention_mask,
        **{"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False, **kwargs},
    )
    return mask


def flashqsa_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """What the stock layer runs when a call is left to it: SDPA, or the eager function where weights are asked for."""
    if wants_attentions(module, kwargs):
        if attention_mask is not None and attention_mask.dtype == torch.bool:
            lowest = torch.finfo(query.dtype).min
            attention_mask = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill(~attention_mask, lowest)
        result = eager_attention_forward(module, query, key, value, attention_mask, **kwargs)
    else:
        result = AttentionInterface()["sdpa"](module, query, key, value, attention_mask, **kwargs)
    output, weights = result
    return output, weights


def wants_attentions(module: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call asked for attention weights, which no sparse route has."""
    wanted = kwargs.get("output_attentions")
    return bool(module.config.output_attentions if wanted is None else wanted)


def register_masks() -> None:
    """Makes the functions of this file known to Transformers. May be called again."""
    AttentionInterface.register(NAME, flashqsa_attention)
    AttentionMaskInterface.register(NAME, flashqsa_mask)
