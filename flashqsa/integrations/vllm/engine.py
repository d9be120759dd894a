"""What of vLLM's settings, and of FlashQSA's own, this plugin serves, asked before a weight is loaded."""

from __future__ import annotations

from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.triton_utils import HAS_TRITON

from flashqsa import knobs
from flashqsa.check import check_pin
from flashqsa.integrations.vllm.errors import UnsupportedSettingError
from flashqsa.route import Call, choose_route
from flashqsa.support import device_supported
from flashqsa.values import FP8, QsaSpec

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
FP8_NAMES = ("fp8", "fp8_e4m3")
"""vLLM's names for a cache of E4M3 numbers, which it allocates as bytes."""

TRITON_CAPABILITY = 80
"""Compute capability from which on vLLM's Triton kernels for this model are used: before it Triton has no tensor cores
and vLLM never ran them."""


def triton_serves() -> bool:
    """Whether vLLM's Triton kernels for this model are used here."""
    return bool(HAS_TRITON and current_platform.is_cuda() and current_platform.has_device_capability(TRITON_CAPABILITY))


def check_settings(vllm_config: Any, config: Any, quant_config: Any, kv_cache_dtype: str) -> None:
    """Raises UnsupportedSettingError, by name, for what these layers do not compute.

    vllm_config, config, quant_config  vLLM's, the text model's, and the weights'
    kv_cache_dtype                     vLLM's name of this layer's

    Raises KnobError for a variable of FlashQSA's that would else be refused in a step, while requests wait.
    """
    for knob in knobs.KNOBS:
        knob.read()
    check_pin(None)
    parallel, dtype = vllm_config.parallel_config, vllm_config.model_config.dtype
    if dtype not in DTYPES:
        raise UnsupportedSettingError("dtype", "float16, bfloat16 or float32", dtype)
    if dtype == torch.float32 and not current_platform.is_cpu():
        raise UnsupportedSettingError("dtype", "float16 or bfloat16 on a GPU, as vLLM's linear layers do", dtype)
    if kv_cache_dtype not in ("auto", *FP8_NAMES) and kv_cache_dtype != str(dtype).removeprefix("torch."):
        raise UnsupportedSettingError("kv_cache_dtype", "auto, the model's dtype, fp8 or fp8_e4m3", kv_cache_dtype)
    if getattr(quant_config, "kv_cache_scheme", None) is not None:
        raise UnsupportedSettingError("quantization", "weights without a scheme for the KV cache", quant_config)
    for name in ("prefill_context_parallel_size", "decode_context_parallel_size"):
        if (size := getattr(parallel, name)) > 1:
            raise UnsupportedSettingError(name, "1: a rank needs all tokens of its requests", size)
    if getattr(config, "dual_chunk_attention_config", None) is not None:
        raise UnsupportedSettingError("dual_chunk_attention_config", "none", config.dual_chunk_attention_config)
    if not getattr(config, "is_causal", True):
        raise UnsupportedSettingError("is_causal", "a causal decoder", False)
    if current_platform.is_cpu():
        check_cpu_settings(vllm_config, config)


def check_cpu_settings(vllm_config: Any, config: Any) -> None:
    """Raises UnsupportedSettingError, by name, for what vLLM itself cannot do with this model on a CPU.

    vLLM 0.32.0 fails with each of these in code of its own, some in its first step.
    """
    if found := list(getattr(config, "ple_layer_ids", None) or []):
        raise UnsupportedSettingError("ple_layer_ids", "none on a CPU, where vLLM has no n-gram embeddings", found)
    if (ranks := vllm_config.parallel_config.pipeline_parallel_size) > 1:
        wanted = "1 on a CPU, where vLLM gives later ranks of a model that is not compiled no input"
        raise UnsupportedSettingError("pipeline_parallel_size", wanted, ranks)
    if vllm_config.lora_config is not None:
        raise UnsupportedSettingError(
            "enable_lora", "False on a CPU, where vLLM's linear layers take no adapters", True
        )
    if (drafts := vllm_config.speculative_config) is not None:
        wanted = "none on a CPU, where vLLM's runner takes no drafts for this model"
        raise UnsupportedSettingError("speculative_config", wanted, drafts.method)


def check_device(
    device: torch.device, spec: QsaSpec, dtype: torch.dtype, fp8: tuple[bool, bool], most_rows: int, most_tokens: int
) -> None:
    """Raises where no kernel of FlashQSA serves a device, or none of its kernels this model: with every reason.

    fp8          whether the KV cache and the index cache hold E4M3 numbers
    most_rows    of a step
    most_tokens  of a request

    Raises UnsupportedSettingError for the device, NoRouteError for the model on it: also where FLASHQSA_ROUTE pins a
    route that serves prefill alone, or decode alone.
    """
    support = device_supported(device)
    if support.reason is not None or support.facts is None:
        raise UnsupportedSettingError("device", "one that FlashQSA has kernels for", f"{device}: {support.reason}")
    # Past the budget where requests get there, so that a step scores, selects and attends to a selection.
    position = min(2 * spec.budget, most_tokens - 1)
    for rows in (1, most_rows):
        call = Call(
            spec,
            rows,
            1,
            position,
            dtype,
            FP8 if fp8[0] else dtype,
            torch.float16 if fp8[1] else dtype,
            FP8 if fp8[1] else dtype,
            selection_given=not spec.selects_everything(position),
        )
        for stage in ("select", "attend"):
            choose_route(stage, call, support.facts, check_pin(None))
