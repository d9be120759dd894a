"""The attention layer of vLLM's Qwen4-Exp, computed by FlashQSA.

Import `vllm.models.qwen4_exp.nvidia.model` before this module: vLLM's modules there import one another.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention.attention import set_default_quant_scales
from vllm.model_executor.layers.layernorm import GemmaRMSNorm
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.models.qwen3_vl import mrope_positions_factor
from vllm.models.qwen4_exp.nvidia.model import without_modelopt_fp4
from vllm.models.qwen4_exp.nvidia.qsa import (
    Qwen4ExpQSAAttention,
    Qwen4ExpQSAQKVIndexerLinear,
    qsa_kv_cache_dtype,
)
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
from vllm.v1.attention.backend import AttentionType

from flashqsa import pipeline
from flashqsa.integrations.vllm.backend import FlashQsaBackend, FlashQsaImpl, FlashQsaMetadata
from flashqsa.integrations.vllm.engine import FP8_NAMES, check_device, check_settings
from flashqsa.integrations.vllm.errors import UnsupportedSettingError
from flashqsa.integrations.vllm.functions import expand_qsa_block_indices, qsa_sparse_paged_attention
from flashqsa.integrations.vllm.indexer import FlashQsaIndexer, spec_of
from flashqsa.values import FP8, KvCache


class FlashQsaAttention(Qwen4ExpQSAAttention):
    """`Qwen4ExpQSAAttention` in FP16, BF16 or, on CPUs, FP32, on every device that FlashQSA has kernels for.

    The arguments are vLLM's. Raises UnsupportedSettingError, KnobError and NoRouteError before a weight is loaded.
    """

    supports_dcp = False

    def __init__(
        self,
        *,
        vllm_config: Any,
        config: Any,
        layer_id: int,
        quant_config: Any = None,
        reduce_results: bool = True,
        prefix: str = "",
    ) -> None:
        nn.Module.__init__(self)
        model_config, cache_config = vllm_config.model_config, vllm_config.cache_config
        self.kv_cache_dtype = qsa_kv_cache_dtype(cache_config, prefix)
        check_settings(vllm_config, config, quant_config, self.kv_cache_dtype)

        self.config, self.layer_id, self.hidden_size = config, int(layer_id), int(config.hidden_size)
        self.total_num_heads, self.total_num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        ranks = get_tensor_model_parallel_world_size()
        self.num_heads = share(self.total_num_heads, ranks, "num_attention_heads")
        # Where there are fewer KV heads than ranks, some ranks hold the same one.
        fewer = ranks > self.total_num_kv_heads and ranks % self.total_num_kv_heads == 0
        self.num_kv_heads = 1 if fewer else share(self.total_num_kv_heads, ranks, "num_key_value_heads")
        self.head_dim = int(config.head_dim or self.hidden_size // self.total_num_heads)
        self.q_size, self.kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.spec = spec_of(config, self.num_heads, self.num_kv_heads, self.head_dim)
        # Checkpoints hold a gate beside each query head, whatever a configuration says.
        self.attn_output_gate = True

        unquantized = without_modelopt_fp4(quant_config)
        qkv_proj = QKVParallelLinear(
            self.hidden_size,
            self.head_dim,
            2 * self.total_num_heads,
            self.total_num_kv_heads,
            bias=False,
            quant_config=unquantized,
            prefix=f"{prefix}.qkv_proj",
        )
        self.qkv_proj = qkv_proj
        self.o_proj = RowParallelLinear(
            self.total_num_heads * self.head_dim,
            self.hidden_size,
            bias=False,
            reduce_results=reduce_results,
            quant_config=quant_config,
            prefix=f"{prefix}.o_proj",
        )
        self.rotary_emb = get_rope(
            head_size=self.head_dim,
            max_position=config.max_position_embeddings,
            rope_parameters=config.rope_parameters,
            mrope_positions_factor=mrope_positions_factor(vllm_config),
        )
        if not getattr(self.rotary_emb, "is_neox_style", False):
            raise UnsupportedSettingError("rope_parameters", "halves that rotate together", self.rotary_emb)
        if (positions := self.rotary_emb.cos_sin_cache.shape[0]) < model_config.max_model_len:
            # vLLM allows it where VLLM_ALLOW_LONG_MAX_MODEL_LEN is set; kernels would read past the table.
            wanted = f"at most the {positions} positions that the model's rotary table has"
            raise UnsupportedSettingError("max_model_len", wanted, model_config.max_model_len)
        self.q_norm = GemmaRMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = GemmaRMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.indexer = FlashQsaIndexer(
            vllm_config=vllm_config,
            config=config,
            rotary_emb=self.rotary_emb,
            quant_config=quant_config,
            prefix=f"{prefix}.indexer",
        )
        # LoRA adapters know the projections apart only.
        self.fuse_indexer_projection = vllm_config.lora_config is None
        self.index_qk_size = self.indexer.index_qk_proj.output_size
        if self.fuse_indexer_projection:
            self.qkv_proj = Qwen4ExpQSAQKVIndexerLinear(qkv_proj, self.index_qk_size, unquantized)
            del self.indexer.index_qk_proj

        self.layer_name = f"{prefix}.attn"
        self.attn_type = AttentionType.DECODER
        self.kv_cache_torch_dtype = kv_cache_dtype_str_to_dtype(self.kv_cache_dtype, model_config)
        self.kv_sharing_target_layer_name = None
        self.kv_cache = torch.tensor([])
        set_default_quant_scales(self, register_buffer=True)
        fp8 = self.kv_cache_dtype in FP8_NAMES, self.indexer.index_dtype == FP8
        most_rows = vllm_config.scheduler_config.max_num_batched_tokens
        device = vllm_config.device_config.device
        check_device(device, self.spec, model_config.dtype, fp8, most_rows, model_config.max_model_len)
        self.attn_backend = FlashQsaBackend
        self.impl = FlashQsaImpl(
            self.num_heads, self.head_dim, self.spec.softmax_scale, self.num_kv_heads, self.kv_cache_dtype
        )
        # Steps of a draft model after its first use that step's selection again, which vLLM moves between rows.
        drafts, packed = vllm_config.speculative_config, None
        if drafts is not None and drafts.method == "mtp" and drafts.draft_model_config is model_config:
            packed = torch.zeros(most_rows, self.spec.budget + self.spec.block_tokens, dtype=torch.int32)
        self.register_buffer("topk_indices_buffer", packed, persistent=False)

        layers = vllm_config.compilation_config.static_forward_context
        if self.layer_name in layers:
            raise UnsupportedSettingError("prefix", "one layer of a name", self.layer_name)
        layers[self.layer_name] = self

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Takes over the scales of an FP8 cache that a checkpoint brought; vLLM calls it once weights are loaded."""
        del act_dtype
        self._k_scale_float, self._v_scale_float = float(self._k_scale), float(self._v_scale)

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        """[rows, hidden_size], this rank's part of it where results are reduced elsewhere.

        positions      [rows], or [3, rows] for multi-axis positions
        hidden_states  [rows, hidden_size]
        """
        qkv, _ = self.qkv_proj(hidden_states)
        if self.fuse_indexer_projection:
            qkv, index_qk = qkv.split([2 * (self.q_size + self.kv_size), self.index_qk_size], dim=-1)
        else:
            index_qk, _ = self.indexer.index_qk_proj(hidden_states)
        attended = qkv.new_empty(hidden_states.shape[0], self.num_heads, self.head_dim)
        self._attend(index_qk, qkv, positions, attended)
        output: Tensor = self.o_proj(attended.flatten(1))[0]
        return output

    @eager_break_during_capture
    def _attend(self, index_qk: Tensor, qkv: Tensor, positions: Tensor, output: Tensor) -> None:
        """Fills the caches, selects, attends, and writes output [rows, q_heads, head_dim]; 0 for rows past the step's.

        A pass without metadata, as vLLM makes to measure memory, touches no cache.
        """
        metadata = get_forward_context().attn_metadata
        metadata = metadata[0] if isinstance(metadata, list) else metadata
        if not isinstance(metadata, dict):
            output.zero_()
            if self.topk_indices_buffer is not None and not self.indexer.skip_topk:
                self.topk_indices_buffer[: output.shape[0]].zero_()
            return
        step: FlashQsaMetadata = metadata[self.layer_name]
        count = step.num_actual_tokens
        output[count:].zero_()
        if count == 0:
            return
        index_q, query, gate = self.indexer.prepare(
            self, index_qk[:count], qkv[:count], positions[..., :count], step.slot_mapping, metadata
        )
        if index_q.dtype == FP8:
            # Every E4M3 number is an FP16 number, which every GPU multiplies.
            index_q = index_q.to(torch.float16)
        cache = self._cache(step)
        if self.topk_indices_buffer is not None:
            self._attend_as_draft(index_q, query, gate, cache, step, metadata, output[:count])
            return
        attended = pipeline.qsa_attention(
            index_q, query, self.indexer.cache(metadata), cache, step.rows, self.spec, gate.view_as(query)
        )
        assert isinstance(attended, Tensor)
        output[:count].copy_(attended)

    def _cache(self, step: FlashQsaMetadata) -> KvCache:
        """The KV cache with a step's page table."""
        pages = self.kv_cache.transpose(1, 2)
        if self.kv_cache_dtype not in FP8_NAMES:
            return KvCache.packed(pages, step.block_table)
        return KvCache.packed(pages.view(FP8), step.block_table, self._k_scale_float, self._v_scale_float)

    def _attend_as_draft(
        self,
        index_q: Tensor,
        query: Tensor,
        gate: Tensor,
        cache: KvCache,
        step: FlashQsaMetadata,
        metadata: dict[str, Any],
        output: Tensor,
    ) -> None:
        """Attends to the packed selection that this step writes, or that an earlier one of the draft left."""
        assert self.topk_indices_buffer is not None
        packed, rows = self.topk_indices_buffer[: query.shape[0]], step.rows
        if not self.indexer.skip_topk:
            selection = pipeline.select_blocks(index_q, self.indexer.cache(metadata), rows, self.spec)
            expand_qsa_block_indices(
                selection.blocks,
                torch.where(rows.live, rows.position, -1),
                rows.visible_blocks(self.spec),
                self.spec.block_tokens,
                self.spec.budget,
                packed,
            )
        qsa_sparse_paged_attention(
            query,
            cache.keys,
            cache.values,
            packed,
            step.block_table,
            # A row of padding has nothing selected, and its request is not looked at.
            rows.request.clamp(min=0),
            False,
            output,
            self._k_scale_float,
            self._v_scale_float,
            output_gate=gate.view_as(query),
        )


def share(heads: int, ranks: int, name: str) -> int:
    """A rank's share of some heads, or UnsupportedSettingError where they do not go round."""
    if heads % ranks:
        raise UnsupportedSettingError(name, f"a multiple of the {ranks} tensor parallel ranks", heads)
    return int(heads) // ranks
