"""The indexer of vLLM's Qwen4-Exp layers: its weights, its side caches, and the step that fills all caches.

Import `vllm.models.qwen4_exp.nvidia.model` before this module: vLLM's modules there import one another.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.layernorm import GemmaRMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.models.qwen4_exp.nvidia.indexer_qsa import _supports_fused_pre_indexer
from vllm.models.qwen4_exp.nvidia.ops.qsa_prepare import qsa_prepare as stock_prepare

from flashqsa.integrations.vllm.backend import PooledKeyCache, RawKeyCache
from flashqsa.integrations.vllm.engine import FP8_NAMES, triton_serves
from flashqsa.integrations.vllm.errors import UnsupportedSettingError
from flashqsa.integrations.vllm.prepare import qsa_prepare
from flashqsa.values import FP8, IndexCache, QsaSpec


class FlashQsaIndexer(nn.Module):
    """Weights and caches under vLLM's names, so that its loader and its cache manager find them.

    vllm_config, config, quant_config  vLLM's, the text model's, and the weights'
    rotary_emb                         of the attention layer
    prefix                             of the checkpoint's indexer, as `model.layers.3.self_attn.indexer`

    Raises UnsupportedSettingError.
    """

    def __init__(self, *, vllm_config: Any, config: Any, rotary_emb: Any, quant_config: Any, prefix: str) -> None:
        super().__init__()
        if (heads := int(config.indexer_kv_heads)) != 1:
            raise UnsupportedSettingError("indexer_kv_heads", "1", heads)
        self.heads, self.dim = int(config.indexer_n_heads), int(config.indexer_head_dim)
        self.rotary_emb = rotary_emb
        # A draft step that has selected is told to keep its selection for the steps after it.
        self.skip_topk = False
        width = (self.heads + 1) * self.dim
        self.index_qk_proj = ReplicatedLinear(
            int(config.hidden_size), width, bias=False, quant_config=quant_config, prefix=f"{prefix}.index_qk_proj"
        )
        self.q_layernorm = GemmaRMSNorm(self.dim, eps=float(config.rms_norm_eps))
        self.k_layernorm = GemmaRMSNorm(self.dim, eps=float(config.rms_norm_eps))
        dtype = vllm_config.model_config.dtype
        # vLLM's "bf16" means no quantisation: the model's own dtype.
        kind = vllm_config.attention_config.resolve_indexer_kv_dtype("bf16")
        if kind not in ("bf16", "fp8"):
            raise UnsupportedSettingError("indexer_kv_dtype", "auto, bf16 or fp8", kind)
        self.index_dtype: torch.dtype = FP8 if kind == "fp8" else dtype
        self.block_tokens = int(config.indexer_compress_ratio)
        shared: dict[str, Any] = {
            "head_size": self.dim,
            "cache_config": vllm_config.cache_config,
            "compress_ratio": self.block_tokens,
            "vllm_config": vllm_config,
        }
        self.raw_key_cache = RawKeyCache(
            dtype=dtype,
            cache_rope_positions=vllm_config.model_config.uses_mrope,
            prefix=f"{prefix}.raw_key_cache",
            **shared,
        )
        self.compressed_key_cache = PooledKeyCache(
            dtype=self.index_dtype, prefix=f"{prefix}.compressed_key_cache", **shared
        )
        # vLLM's one-launch kernel is faster than the same in torch, where it runs: BF16, and the released geometry.
        stock = dtype == torch.bfloat16 and triton_serves()
        self._prepare = (
            stock_prepare if stock and _supports_fused_pre_indexer(rotary_emb, self.dim, 1, self.block_tokens) else None
        )

    def prepare(
        self, attention: Any, index_qk: Tensor, qkv: Tensor, positions: Tensor, slots: Tensor, metadata: dict[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Fills the three caches with a step's rows: index queries, queries and gates, normalised and rotated.

        attention  the layer, whose KV cache and norms are used
        index_qk   [rows, (heads + 1) * dim], and qkv [rows, 2 * (q_heads + kv_heads) * head_dim]: projections
        positions  [rows], or [3, rows] for multi-axis positions
        slots      [rows] int64 of the KV cache
        metadata   of the step, by layer

        Returns [rows, heads, dim] in the index cache's dtype, and two of [rows, q_heads, head_dim].
        """
        raw = metadata[self.raw_key_cache.prefix]
        pooled = metadata[self.compressed_key_cache.prefix]
        split = self.heads * self.dim
        index_q = index_qk.new_empty(index_qk.shape[0], self.heads, self.dim, dtype=self.index_dtype)
        has_axes = self.raw_key_cache.rope_position_cache is not None
        pages = attention.kv_cache.transpose(1, 2)
        query, gate = (self._prepare or qsa_prepare)(
            index_qk[:, :split],
            index_qk[:, split:],
            positions,
            self.rotary_emb.cos_sin_cache,
            self.q_layernorm.weight,
            self.k_layernorm.weight,
            self.q_layernorm.variance_epsilon,
            index_q,
            self.raw_key_cache.kv_cache,
            raw.slot_mapping,
            raw.block_table,
            raw.query_start_loc,
            raw.logical_positions,
            self.compressed_key_cache.kv_cache,
            pooled.slot_mapping,
            pooled.k_work_metadata,
            compress_ratio=self.block_tokens,
            mrope_section=getattr(self.rotary_emb, "mrope_section", None),
            rope_pos_offset=self.raw_key_cache.rope_position_offset if has_axes else None,
            main_qkv=qkv,
            main_q_norm_weight=attention.q_norm.weight,
            main_k_norm_weight=attention.k_norm.weight,
            main_eps=attention.q_norm.variance_epsilon,
            main_kv_cache=pages.view(FP8) if attention.kv_cache_dtype in FP8_NAMES else pages,
            main_slot_mapping=slots,
            main_k_scale=attention._k_scale_float,
            main_v_scale=attention._v_scale_float,
        )
        return index_q, query, gate

    def cache(self, metadata: dict[str, Any]) -> IndexCache:
        """The pooled keys with a step's page table."""
        table = metadata[self.compressed_key_cache.prefix].block_table
        return IndexCache(self.compressed_key_cache.kv_cache[:, :, 0], table, 1.0 if self.index_dtype == FP8 else None)


def spec_of(config: Any, q_heads: int, kv_heads: int, head_dim: int) -> QsaSpec:
    """The geometry of a rank's share of a layer."""
    return QsaSpec(
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        index_heads=int(config.indexer_n_heads),
        index_dim=int(config.indexer_head_dim),
        block_tokens=int(config.indexer_compress_ratio),
        top_blocks=int(config.indexer_budget) // int(config.indexer_compress_ratio),
    )
