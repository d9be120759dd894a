"""vLLM's gated residual for Qwen4-Exp in any dtype and on any device.

vLLM's own keeps its weights in BF16 whatever the model's dtype, and has its element-wise steps as Triton kernels.

Import `vllm.models.qwen4_exp.nvidia.model` before this module: vLLM's modules there import one another.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from vllm.models.qwen4_exp.nvidia.hyperconnection import GatedResidual, HyperConnectionConfig

from flashqsa.integrations.vllm import plain
from flashqsa.integrations.vllm.engine import triton_serves


class FlashGatedResidual(GatedResidual):
    """`GatedResidual` with weights in the model's dtype, and plain torch where Triton does not run.

    The arguments are vLLM's; `config.params_dtype` is not looked at.
    """

    def __init__(self, config: HyperConnectionConfig, use_combine: bool = True, prefix: str = "") -> None:
        # vLLM builds a model with the model's dtype as torch's default.
        super().__init__(replace(config, params_dtype=torch.get_default_dtype()), use_combine, prefix)
        self.uses_triton = triton_serves()

    def mix(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """The streams as they are, the block's input, and the injection before its sigmoid."""
        if self.uses_triton:
            found: tuple[Tensor, Tensor, Tensor | None] = super().mix(hidden_states)
            return found
        config = self.config
        normed = plain.grouped_norm(hidden_states, self.hc_norm.weight, config.rms_norm_eps, self.hc_count)
        if self.use_combine:
            both = self.input_mix_weight_down_block_inject(normed)
            down, injection = both[..., : self.lora_rank], both[..., self.lora_rank : self.lora_rank + self.hc_count]
        else:
            down, injection = self.input_mix_weight_down(normed), None
        gate = self.input_mix_weight_up(plain.scaled_silu(down, self.hc_count))
        return hidden_states, plain.gated_mean(normed, gate, self.hc_count), injection

    def combine_and_mix(
        self, hidden_states: Tensor, prev_block_output: Tensor, prev_injection: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """`combine`, then `mix`."""
        if self.uses_triton:
            found: tuple[Tensor, Tensor, Tensor | None]
            found = super().combine_and_mix(hidden_states, prev_block_output, prev_injection)
            return found
        return self.mix(self.combine(hidden_states, prev_block_output, prev_injection))

    def combine(self, hidden_states: Tensor, block_output: Tensor, injection: Tensor | None) -> Tensor:
        """The streams with a block's output in them."""
        if self.uses_triton:
            found: Tensor = super().combine(hidden_states, block_output, injection)
            return found
        return plain.inject(hidden_states, block_output, injection, self.hc_count)
