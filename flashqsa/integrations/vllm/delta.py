"""vLLM's gated delta-net for Qwen4-Exp on CPUs, in the dtypes and with the heads that vLLM's own does not take.

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
from vllm.utils.torch_utils import _encode_layer_name

from flashqsa.integrations.vllm import plain
from flashqsa.integrations.vllm.engine import check_cpu_settings

KERNEL_HEADS = (64, 128)
"""Widths of heads, as wide for keys as for values, that vLLM 0.32.0's kernel for CPUs takes. It takes BF16 only."""


class FlashGatedDeltaNet(QwenGatedDeltaNetAttention):
    """`QwenGatedDeltaNetAttention`; in plain torch on a CPU for dtypes and heads that vLLM's kernel does not take.

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
        served = self.head_k_dim == self.head_v_dim and self.head_k_dim in KERNEL_HEADS
        if current_platform.is_cpu() and not (served and vllm_config.model_config.dtype == torch.bfloat16):
            self._forward_method = self.forward_plain

    def forward_cpu(self, hidden_states: Tensor) -> Tensor:
        """[rows, hidden_size] by vLLM's kernel, of a step of one row too."""
        found: Tensor
        if hidden_states.shape[0] == 1:
            mixed, z, b, a, output = self._project(hidden_states)
            # vLLM's convolution looks at the stride between rows, which a single row has from the wider one it is of.
            mixed = mixed.clone(memory_format=torch.contiguous_format)
            torch.ops.vllm.cpu_gdn_attention_core(mixed, b, a, output, _encode_layer_name(self.prefix))
            found = self._output_projection(output, z)
        else:
            found = super().forward_cpu(hidden_states)
        return found

    def forward_plain(self, hidden_states: Tensor) -> Tensor:
        """[rows, hidden_size], this rank's part of it where results are reduced elsewhere."""
        mixed, z, b, a, output = self._project(hidden_states)
        metadata = get_forward_context().attn_metadata
        if isinstance(metadata, dict):
            self._mix(mixed, a, b, metadata[self.prefix], output)
        found: Tensor = self._output_projection(output, z)
        return found

    def _project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Query, key and value in one [rows, width]; z [rows, heads, value_dim]; b and a [rows, heads]; zeros as z."""
        qkvz, _ = self.in_proj_qkvz(hidden_states)
        ba, _ = self.in_proj_ba(hidden_states)
        z_width = self.value_dim // self.tp_size
        mixed, z = qkvz.split([qkvz.shape[1] - z_width, z_width], dim=-1)
        b, a = ba.chunk(2, dim=-1)
        z = z.reshape(z.shape[0], -1, self.head_v_dim)
        return mixed, z, b, a, torch.zeros_like(z)

    def _mix(self, mixed: Tensor, a: Tensor, b: Tensor, step: Any, output: Tensor) -> None:
        """Writes output [rows, heads, value_dim] of a step's rows, of which those that decode stand first."""
        pool, states = self.kv_cache
        tails = pool if is_conv_state_dim_first() else pool.transpose(-1, -2)
        # vLLM packs the weight for its own kernel in BF16, and keeps it as it was beside that.
        weight = getattr(self.conv1d, "_cpu_unpacked_conv_weight", self.conv1d.weight).flatten(1)
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
