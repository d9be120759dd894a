"""What of vLLM's settings this plugin serves, asked before a weight is loaded, and where its log lines go."""

from __future__ import annotations

import logging
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.triton_utils import HAS_TRITON

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
    """
    parallel, dtype = vllm_config.parallel_config, vllm_config.model_config.dtype
    if dtype not in DTYPES:
        raise UnsupportedSettingError("dtype", "float16, bfloat16 or float32", dtype)
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
    if (drafts := vllm_config.speculative_config) is not None:
        wanted = "none on a CPU, where vLLM's runner takes no drafts for this model"
        raise UnsupportedSettingError("speculative_config", wanted, drafts.method)


def check_device(device: torch.device, spec: QsaSpec, dtype: torch.dtype, fp8: tuple[bool, bool]) -> None:
    """Raises where no kernel of FlashQSA serves a device, or none of its kernels this model: with every reason.

    fp8  whether the KV cache and the index cache hold E4M3 numbers

    Raises UnsupportedSettingError for the device, NoRouteError for the model on it.
    """
    support = device_supported(device)
    if support.reason is not None or support.facts is None:
        raise UnsupportedSettingError("device", "one that FlashQSA has kernels for", f"{device}: {support.reason}")
    index_q = torch.float16 if fp8[1] else dtype
    call = Call(
        spec,
        1,
        1,
        # Past the budget, so that a step scores, selects and attends to a selection.
        2 * spec.budget,
        dtype,
        FP8 if fp8[0] else dtype,
        index_q,
        FP8 if fp8[1] else dtype,
        selection_given=True,
    )
    for stage in ("select", "attend"):
        choose_route(stage, call, support.facts)


def log_with_vllm() -> None:
    """Lets FlashQSA's log lines, each route's first use among them, go where vLLM's go and at vLLM's level.

    Nothing is changed where the logger `flashqsa` has a handler or a level of its own.
    """
    ours, vllms = logging.getLogger("flashqsa"), logging.getLogger("vllm")
    if ours.handlers or ours.level != logging.NOTSET or not vllms.handlers:
        return
    for handler in vllms.handlers:
        ours.addHandler(handler)
    ours.setLevel(vllms.level)
    ours.propagate = False
