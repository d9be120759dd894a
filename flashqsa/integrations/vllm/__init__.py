"""FlashQSA in vLLM: a plugin that puts layers of our own in vLLM's Qwen4-Exp models, and functions with its signatures.

vLLM finds the plugin by its entry point; nothing needs to be called. `docs/VLLM.md` says what is served, and what was
run. Importing this module loads neither torch nor vLLM.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from flashqsa.integrations.vllm.entry import SUPPORTED, register, require_vllm
from flashqsa.integrations.vllm.errors import LayoutError, UnsupportedSettingError, UnsupportedVllmError

if TYPE_CHECKING:
    from flashqsa.integrations.vllm.functions import (
        expand_qsa_block_indices,
        qsa_select_paged_decode,
        qsa_select_paged_prefill,
        qsa_sparse_paged_attention,
    )
    from flashqsa.integrations.vllm.prepare import qsa_compress_groups_with_ratio, qsa_prepare
    from flashqsa.integrations.vllm.store import qsa_store_cache_rows

_HOMES = {
    "expand_qsa_block_indices": "functions",
    "qsa_compress_groups_with_ratio": "prepare",
    "qsa_prepare": "prepare",
    "qsa_select_paged_decode": "functions",
    "qsa_select_paged_prefill": "functions",
    "qsa_sparse_paged_attention": "functions",
    "qsa_store_cache_rows": "store",
}

__all__ = [
    "SUPPORTED",
    "LayoutError",
    "UnsupportedSettingError",
    "UnsupportedVllmError",
    "expand_qsa_block_indices",
    "qsa_compress_groups_with_ratio",
    "qsa_prepare",
    "qsa_select_paged_decode",
    "qsa_select_paged_prefill",
    "qsa_sparse_paged_attention",
    "qsa_store_cache_rows",
    "register",
    "require_vllm",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
