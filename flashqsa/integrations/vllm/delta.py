"""vLLM's gated delta-net for Qwen4-Exp on CPUs in FP16 and FP32, where vLLM's own takes BF16 only.

Import `vllm.models.qwen4_exp.nvidia.model` before this module: vLLM's modules there import one another.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.platforms import current_platform

from flashqsa.integrations.vllm import plain
from flashqsa.integrations.vllm.engine import check_cpu_settings


class FlashGatedDeltaNet(QwenGatedDeltaNetAttention):
    """`QwenGatedDeltaNetAttention`, in plain torch on a CPU in another dtype than BF16, and vLLM's own elsewhere.

    The arguments are vLLM's. Raises UnsupportedSettingError for what vLLM cannot do on a CPU, drafts among them.
    """

    def __init__(
        self,
        config: Any,
        vllm_config: Any,
        prefix: str = "",
        gqa_interleaved_layout: bool = False,
        reduce_results: bool = True,
    ) -> None:
        if current_platform.is_cpu():
            # The attention layers ask too, but a layer with n-gram embeddings may come before the first of them.
            check_cpu_settings(vllm_config, config)
        super().__init__(config, vllm_config, prefix, gqa_interleaved_layout, reduce_results)
        if current_platform.is_cpu() and vllm_config.model_config.dtype != torch.bfloat16:
            self._forward_method = self.forward_plain

    def forward_plain(self, hidden_states: Tensor) -> Tensor:
        """[rows, hidden_size], this rank's part of it where results are reduced elsewhere."""
        qkvz, _ = self.in_proj_qkvz(hidden_states)
        ba, _ = self.in_proj_ba(hidden_states)
        z_width = self.value_dim // self.tp_size
        mixed, z = qkvz.split([qkvz.shape[1] - z_width, z_width], dim=-1)
        b, a = ba.chunk(2, dim=-1)
        heads = self.num_v_heads // self.tp_size
        output = hidden_states.new_zeros(hidden_states.shape[0], heads, self.head_v_dim)
        metadata = get_forward_context().attn_metadata
        if isinstance(metadata, dict):
            self._mix(mixed, a, b, metadata[self.prefix], output)
        found: Tensor = self._output_projection(output, z.reshape(z.shape[0], -1, self.head_v_dim))
        return found

    def _mix(self, mixed: Tensor, a: Tensor, b: Tensor, step: Any, output: Tensor) -> None:
        """Writes output [rows, heads, value_dim] of a step's rows, of which those that decode stand first."""
        pool, states = self.kv_cache
        tails = pool if is_conv_state_dim_first() else pool.transpose(-1, -2)
        weight = self.conv1d.weight.flatten(1)
        decay, strength = plain.delta_gates(a, b, self.A_log, self.dt_bias)
        starts = step.non_spec_query_start_loc.tolist()
        slots = step.non_spec_state_indices_tensor.tolist()
        for request, (start, stop) in enumerate(pairwise(starts)):
            slot = slots[request]
            if start == stop or slot < 0:
                continue
            # vLLM keeps a state as [value_dim, key_dim].
            before, state = tails[slot], states[slot].transpose(-1, -2).to(torch.float32)
            if step.has_initial_state is not None and not bool(step.has_initial_state[request]):
                before, state = torch.zeros_like(before), torch.zeros_like(state)
            rows = slice(start, stop)
            turned, kept = plain.causal_conv(mixed[rows], weight, self.conv1d.bias, before)
            output[rows], state = plain.delta_rule(*self._heads(turned), decay[rows], strength[rows], state)
            tails[slot].copy_(kept)
            states[slot].copy_(state.transpose(-1, -2))

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value [rows, heads, dim]; key heads serve as many value heads as there are for each."""
        key_width, rows = self.key_dim // self.tp_size, mixed.shape[0]
        q, k, v = mixed.tensor_split([key_width, 2 * key_width], dim=-1)
        each = self.num_v_heads // self.num_k_heads
        q, k = (part.reshape(rows, -1, self.head_k_dim).repeat_interleave(each, dim=1) for part in (q, k))
        return q, k, v.reshape(rows, -1, self.head_v_dim)
