"""The sparse attention layer and the rotary embedding that stand in for the stock ones."""

from __future__ import annotations

import logging
import weakref
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache as once
from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen4_exp.modeling_qwen4_exp import (
    Qwen4ExpTextAttention,
    Qwen4ExpTextRMSNorm,
    Qwen4ExpTextRotaryEmbedding,
    apply_rotary_pos_emb,
)

from flashqsa import ops
from flashqsa.integrations.transformers.cache import paged_layer
from flashqsa.integrations.transformers.errors import CacheMismatchError
from flashqsa.integrations.transformers.handover import note_hand_over
from flashqsa.integrations.transformers.masks import NAME, register_masks, stock_mask, wants_attentions
from flashqsa.integrations.transformers.paged import PagedLayer
from flashqsa.integrations.transformers.passes import cached_positions, check_layers_agree, refusing
from flashqsa.integrations.transformers.store import NewTokens, PagedStore, Pooling, Queries, Reading
from flashqsa.integrations.transformers.versions import spec_of_config
from flashqsa.values import QsaSpec

STOCK_IMPLEMENTATIONS = (None, "sdpa")
"""`_attn_implementation` values that a model built while FlashQSA is on globally gives up for ours."""


logger = logging.getLogger("flashqsa")

live_layers: weakref.WeakSet[Any] = weakref.WeakSet()
"""Every `FlashQsaAttention` there is: the changes to Transformers that they need are kept while one lives."""


class FlashQsaRotaryEmbedding(Qwen4ExpTextRotaryEmbedding):  # type: ignore[misc]
    """The stock rotary embedding, but of the new tokens only.

    Stock computes the angles of the whole history in every pass, for the indexer. Our caches keep what they need of
    them. Where gradients are recorded the stock layer may run, and gets the whole history.
    """

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [batch, tokens, rotary_dim] in x's dtype: for the last `position_ids` [axes, batch, all]."""
        if not torch.is_grad_enabled():
            position_ids = position_ids[..., -x.shape[1] :]
        cos, sin = super().forward(x, position_ids)
        return cos, sin


class FlashQsaAttention(Qwen4ExpTextAttention):  # type: ignore[misc]
    """The stock sparse layer with its indexer and its attention replaced; parameters and submodules are the stock ones.

    Built by Transformers while FlashQSA is on globally, or made of a stock layer by `enable`. A call that FlashQSA does
    not serve is left to the stock layer, and the reason logged: see `hand_overs`.
    """

    kv_dtype: torch.dtype | None = None
    """What keys and values are stored in: FP8-E4M3, or None for the dtype they are computed in."""

    prepare_at_once: bool | None = None
    """Whether norms, rotary and writing are one step (`flashqsa.prepare`). None: on a GPU they are, on a CPU, where
    that is slower, they are not. A pass that `step_by_step_reason` speaks against takes them one by one anyway."""

    stock_attn_implementation: str | None = "sdpa"
    """What the config's `_attn_implementation` was before this layer changed it."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        spec_of_config(config)
        live_layers.add(self)
        self.stock_attn_implementation = config._attn_implementation
        if config._attn_implementation in STOCK_IMPLEMENTATIONS:
            register_masks()
            config._attn_implementation = NAME

    def __setstate__(self, state: dict[str, Any]) -> None:
        from flashqsa.integrations.transformers.switch import register  # imports this file

        super().__setstate__(state)
        live_layers.add(self)
        # A layer that comes from another process finds Transformers as it was.
        register()

    @property
    def qsa_spec(self) -> QsaSpec:
        """The layer's shape, with all its heads."""
        return QsaSpec(
            q_heads=self.config.num_attention_heads,
            kv_heads=self.config.num_key_value_heads,
            head_dim=self.head_dim,
            index_heads=self.indexer.index_n_heads,
            index_dim=self.indexer.index_head_dim,
            block_tokens=self.indexer.compress_ratio,
            top_blocks=self.indexer.block_topk,
        )

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """One pass of the layer.

        hidden_states        [batch, tokens, hidden_size]
        position_embeddings  cos and sin [batch, tokens or all columns, rotary_dim]; the last rows are the new tokens
        attention_mask       None, or [batch, columns] for padding (see `flashqsa_mask`); a 4-D mask calls for stock
        past_key_values      a Cache or None; named `cache` from 5.24 on

        Returns [batch, tokens, hidden_size], and None for the weights unless the stock layer ran.
        """
        cache = kwargs.pop("cache", past_key_values)
        held = None if cache is None else paged_layer(cache, self.layer_idx)
        if held is not None and not torch.compiler.is_compiling() and held.step_tokens is None:
            check_layers_agree(cache, held, hidden_states.shape[1])
        reason = self._hand_over_reason(hidden_states, attention_mask, cache, held, kwargs)
        if reason is not None:
            note_hand_over(reason)
            return self._stock(hidden_states, position_embeddings, attention_mask, cache, held, kwargs)

        batch, tokens = hidden_states.shape[:2]
        cos, sin = (angles[:, -tokens:].expand(batch, -1, -1) for angles in position_embeddings)
        index_q, raw_keys = self._project_index(hidden_states)
        q, gate = self.q_proj(hidden_states).view(batch, tokens, -1, 2 * self.head_dim).chunk(2, dim=-1)
        keys = self.k_proj(hidden_states).view(batch, tokens, -1, self.head_dim)
        values = self.v_proj(hidden_states).view(batch, tokens, -1, self.head_dim)
        queries = None
        if self._at_once((q, keys, values, index_q, raw_keys), cos, held):
            norms = (self.q_norm.weight, self.k_norm.weight, self.indexer.q_layernorm.weight)
            queries = Queries(q, index_q, *norms)
        else:
            index_q = apply_rotary_pos_emb(self.indexer.q_layernorm(index_q), cos=cos, sin=sin, unsqueeze_dim=2)
            q, keys = apply_rotary_pos_emb(self.q_norm(q), self.k_norm(keys), cos, sin, unsqueeze_dim=2)
        # Under autocast the rotary embedding promotes; everywhere else these do nothing.
        new = NewTokens(keys.to(values.dtype), values, raw_keys, cos, sin)
        q, gate, index_q = q.to(values.dtype), gate.to(values.dtype), index_q.to(raw_keys.dtype)
        spec = self.spec_of_heads(q.shape[2], keys.shape[2])
        reading = self._store(new, queries, attention_mask, cache, held, spec, position_embeddings, hidden_states)
        output, _ = ops.qsa_attention(
            index_q.flatten(0, 1) if reading.index_q is None else reading.index_q,
            q.flatten(0, 1) if reading.q is None else reading.q,
            reading.index_keys,
            reading.page_table,
            None,
            reading.keys,
            reading.values,
            reading.page_table,
            reading.kv_scale,
            reading.kv_scale,
            reading.request,
            reading.position,
            reading.max_position,
            ops.pack_spec(spec),
            gate.flatten(0, 1),
        )
        if held is not None:
            _offload(cache, self.layer_idx)
        return self.o_proj(output.view(batch, tokens, -1)), None

    def _project_index(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Index queries [batch, tokens, index_heads, index_dim], and raw index keys [batch, tokens, index_dim]."""
        heads, dim = self.indexer.index_n_heads, self.indexer.index_head_dim
        q, raw_keys = self.indexer.index_qk_proj(hidden_states).split([heads * dim, dim], dim=-1)
        return q.unflatten(-1, (heads, dim)), raw_keys

    def _at_once(self, projected: tuple[Tensor, ...], cos: Tensor, held: PagedLayer | None) -> bool:
        """Whether this pass prepares in one step; where a GPU might have and does not, the reason is logged once."""
        wanted = self.prepare_at_once
        if not (cos.is_cuda if wanted is None else wanted):
            return False
        reason = self.step_by_step_reason(projected, cos, held)
        if reason is not None and not torch.compiler.is_compiling():
            _log_step_by_step(reason)
        return reason is None

    def step_by_step_reason(
        self, projected: tuple[Tensor, ...], cos: Tensor, held: PagedLayer | None = None
    ) -> str | None:
        """Why norms, rotary and writing of a pass cannot be one step with the same numbers, or None.

        projected  queries, keys, values, index queries and raw index keys
        held       the cache layer that the pass writes
        """
        if any(part.dtype != cos.dtype for part in projected):
            return "projections and rotary angles are not of one dtype, as under autocast"
        if held is not None and held.store is not None and held.store.block_rotary.dtype != cos.dtype:
            return "the cache holds rotary angles of another dtype"
        norms = (self.q_norm, self.k_norm, self.indexer.q_layernorm, self.indexer.k_layernorm)
        if any(norm.eps != norms[0].eps or norm.weight.dtype != norms[0].weight.dtype for norm in norms):
            return "norms differ in their epsilon or dtype"
        # The index keys' norm is never called: `_index_norm` reads it.
        for norm in norms[:3]:
            if type(norm) is not Qwen4ExpTextRMSNorm or getattr(norm, "group_size", None) is not None:
                return f"a norm is {type(norm).__name__}"
            if norm._forward_hooks or norm._forward_pre_hooks:
                return "a norm has hooks, which want to be called"
            if norm.weight.device != cos.device:
                return "weights of norms are offloaded, or on another device"
            # accelerate's wrappers bring inputs to the weight, which is here, and call the class's own method.
            if "forward" in norm.__dict__ and "_old_forward" not in norm.__dict__:
                return "a norm has a forward of its own"
        return None

    def spec_of_heads(self, q_heads: int, kv_heads: int) -> QsaSpec:
        """The spec with so many heads, as they are on this rank: tensor parallelism splits them."""
        spec = self.qsa_spec
        if (q_heads, kv_heads) == (spec.q_heads, spec.kv_heads):
            return spec
        return replace(spec, q_heads=q_heads, kv_heads=kv_heads)

    def _store(
        self,
        new: NewTokens,
        queries: Queries | None,
        attention_mask: Tensor | None,
        cache: Any,
        held: PagedLayer | None,
        spec: QsaSpec,
        position_embeddings: tuple[Tensor, Tensor],
        hidden_states: Tensor,
    ) -> Reading:
        """Stores the new tokens, in the cache or for this call only, and returns what attention reads."""
        padding_mask = None if attention_mask is None else attention_mask.to(hidden_states.device, torch.bool)
        pooling = Pooling(self._index_norm(), self.indexer.k_layernorm.eps)
        tokens = hidden_states.shape[1]
        if held is None:
            visible = None if padding_mask is None else padding_mask[:, -tokens:]
            new = NewTokens(new.keys, new.values, new.raw_keys, new.cos, new.sin, visible)
            # As long as it ever gets.
            store = PagedStore(new, spec, tokens, tokens, self.kv_dtype)
            return store.append(new, 0, spec, pooling, tokens - 1, queries)

        def history(columns: int) -> tuple[Tensor, Tensor]:
            cos, sin = self._all_angles(hidden_states, position_embeddings, cache, columns + tokens)
            return cos[:, :columns], sin[:, :columns]

        _fetch(cache, self.layer_idx, hidden_states.device)
        with self._refusing(cache, held, tokens):
            return held.extend(new, padding_mask, spec, pooling, history, self.kv_dtype, queries)

    def _refusing(self, cache: Any, held: PagedLayer, tokens: int) -> AbstractContextManager[None]:
        """See `passes.refusing`; nothing while compiling."""
        return nullcontext() if torch.compiler.is_compiling() else refusing(cache, held, self.layer_idx, tokens)

    def _index_norm(self) -> Tensor:
        """The weight of the index keys' norm. It is read, not called: accelerate brings offloaded ones for calls."""
        norm = self.indexer.k_layernorm
        weight: Tensor = norm.weight
        if not weight.is_meta:
            return weight
        hook = norm._hf_hook
        brought: Tensor = hook.weights_map["weight"].to(hook.execution_device)
        return brought

    def _hand_over_reason(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        cache: Any,
        held: PagedLayer | None,
        kwargs: dict[str, Any],
    ) -> str | None:
        """Why a call is left to the stock layer, or None."""
        if attention_mask is not None and attention_mask.ndim != 2:
            if self.config._attn_implementation != NAME:
                return f"attn_implementation is {self.config._attn_implementation!r}, which builds full masks"
            return "the mask is not plain causal: packed sequences, or a custom mask"
        if torch.is_grad_enabled() and (
            hidden_states.requires_grad or any(weight.requires_grad for weight in self.parameters())
        ):
            return "gradients are recorded (wrap inference in torch.no_grad())"
        norm = self.indexer.k_layernorm
        if norm.weight.is_meta and getattr(getattr(norm, "_hf_hook", None), "weights_map", None) is None:
            return "weights are offloaded by other means than accelerate's"
        if self.training and self.attention_dropout:
            return "attention dropout is on (call model.eval() for inference)"
        if wants_attentions(self, kwargs):
            return "attention weights are asked for"
        if cache is not None and held is None:
            layers = getattr(cache, "layers", ())
            kind = type(layers[self.layer_idx]).__name__ if self.layer_idx < len(layers) else "missing"
            return f"the cache layer is {kind}, not an indexed one"
        return None

    def _stock(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None,
        cache: Any,
        held: PagedLayer | None,
        kwargs: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None]:
        """The stock layer's forward, given the full mask and the angles of the whole history that it needs."""
        mask = full_mask(hidden_states, attention_mask, cache, self.layer_idx)
        if held is not None:
            with self._refusing(cache, held, hidden_states.shape[1]):
                held.check_hidden(mask)
                columns = int(cache.get_seq_length(self.layer_idx)) + hidden_states.shape[1]
                position_embeddings = self._all_angles(hidden_states, position_embeddings, cache, columns)
        # The fourth argument by its place: it was renamed.
        output, weights = super().forward(hidden_states, position_embeddings, mask, cache, **kwargs)
        return output, weights

    def _all_angles(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], cache: Any, columns: int
    ) -> tuple[Tensor, Tensor]:
        """cos and sin of `columns` columns at least, recomputed from the cache's positions where they are cut short."""
        if position_embeddings[0].shape[1] >= columns:
            return position_embeddings
        positions = cached_positions(cache)
        if positions is None or positions.shape[-1] < columns:
            got = position_embeddings[0].shape[1] if positions is None else positions.shape[-1]
            raise CacheMismatchError(f"position_embeddings: wanted all {columns} columns; got {got}")
        rotary = Qwen4ExpTextRotaryEmbedding(self.config).to(hidden_states.device)
        cos, sin = rotary(hidden_states, positions.to(hidden_states.device))
        return cos, sin


@once
def _log_step_by_step(reason: str) -> None:
    """Logs, once per process, why norms, rotary and writing are not one step."""
    logger.info("norms, rotary and writing are done step by step: %s", reason)


def full_mask(hidden_states: Tensor, attention_mask: Tensor | None, cache: Any, layer_idx: int) -> Tensor:
    """A mask the stock layer can work with: a 4-D one as it came, else [batch, 1, rows, columns] bool."""
    if attention_mask is not None and attention_mask.ndim != 2:
        return attention_mask
    batch, tokens = hidden_states.shape[:2]
    padding = None if attention_mask is None else attention_mask.to(hidden_states.device, torch.bool)
    length, offset, start = tokens if padding is None else padding.shape[1], 0, 0
    if cache is not None:
        length, offset = cache.get_mask_sizes(tokens, layer_idx)
        start = cache.get_seq_length(layer_idx)
    return stock_mask(batch, tokens, length, start, padding, offset, device=hidden_states.device)


def _fetch(cache: Any, layer_idx: int, device: torch.device) -> None:
    """Does for an offloading cache what its own `update` does before a layer is used."""
    if getattr(cache, "offloading", False):
        if device.type == "cuda":
            torch.cuda.default_stream(device).wait_stream(cache.prefetch_stream)
        cache.prefetch(layer_idx + 1, cache.only_non_sliding)


def _offload(cache: Any, layer_idx: int) -> None:
    """Does for an offloading cache what its own `update` does after a layer is used."""
    if getattr(cache, "offloading", False):
        cache.offload(layer_idx, cache.only_non_sliding)
