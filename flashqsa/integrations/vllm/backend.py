"""FlashQSA as an attention backend of vLLM: what a step's metadata is, and who builds it.

Metadata tensors that a CUDA graph may read lie in memory that a builder keeps. No builder reads a tensor on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.models.qwen4_exp.common.qsa_cache import (
    QSACompressedKeyCache,
    QSAForwardMetadata,
    QSAKeyStateCache,
    QSAMetadataBuilder,
    QSAStateBackend,
)
from vllm.triton_utils import HAS_TRITON
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImplBase,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)

from flashqsa.integrations.vllm.engine import DTYPES, FP8_NAMES
from flashqsa.integrations.vllm.plain import requests_of_rows, write_rows
from flashqsa.values import Rows, Run

INT64_BYTES = 8


@dataclass
class FlashQsaMetadata(AttentionMetadata):
    """What attention layers of one step share.

    rows               of the step, padding included
    block_table        [requests, table_pages] int32, of the KV cache
    slot_mapping       [rows] int64, where each row's key and value go; negative for nowhere
    num_actual_tokens  rows of the step
    """

    rows: Rows
    block_table: Tensor
    slot_mapping: Tensor
    num_actual_tokens: int


class FlashQsaMetadataBuilder(AttentionMetadataBuilder[FlashQsaMetadata]):
    """Builds `FlashQsaMetadata` of vLLM's common metadata."""

    # A decode or verify step has as many rows of each request; only such steps are captured whole.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        most_rows = vllm_config.scheduler_config.max_num_batched_tokens
        self._request = torch.empty(most_rows, dtype=torch.int32, device=device)
        self._position = torch.empty(most_rows, dtype=torch.int32, device=device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FlashQsaMetadata:
        """The metadata of one step."""
        del common_prefix_len, fast_build
        common = common_attn_metadata
        count = common.num_actual_tokens
        request, position = self._request[:count], self._position[:count]
        write_rows(common.query_start_loc, common.seq_lens, request, position)
        table = common.block_table_tensor
        most = min(common.max_seq_len, table.shape[1] * self.kv_cache_spec.block_size)
        # In a graph, host numbers stay those of its capture: only steps that none holds say who their rows are.
        grows = common.max_query_len > (self.reorder_batch_threshold or 1)
        runs = runs_of(common, most) if grows else None
        return FlashQsaMetadata(Rows(request, position, most - 1, runs), table, common.slot_mapping[:count], count)


def runs_of(common: CommonAttentionMetadata, most_tokens: int) -> tuple[Run, ...] | None:
    """The step's rows in host numbers; None where the host has no bound on requests' lengths."""
    lengths = common.seq_lens_cpu_upper_bound
    if lengths is None:
        return None
    starts = common.query_start_loc_cpu.tolist()
    return tuple(
        Run(request, start, stop, min(int(tokens), most_tokens) - 1)
        for request, (start, stop, tokens) in enumerate(zip(starts[:-1], starts[1:], lengths.tolist(), strict=False))
        if start < stop <= common.num_actual_tokens and stop - start <= min(tokens, most_tokens)
    )


class FlashQsaImpl(AttentionImplBase[FlashQsaMetadata]):
    """What vLLM asks of an implementation; the layer itself computes."""

    is_sparse: ClassVar[bool] = True

    def __init__(self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, kv_cache_dtype: str) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads, kv_cache_dtype


class FlashQsaBackend(AttentionBackend):
    """The backend of the layers' KV cache: pages [page_tokens, kv_heads, 2 * head_dim], a key then a value."""

    supported_dtypes: ClassVar[list[torch.dtype]] = list(DTYPES)
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", *FP8_NAMES]

    @staticmethod
    def get_name() -> str:
        """Its name in vLLM's log."""
        return "FLASHQSA"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Pages of any multiple of 16 tokens."""
        del kv_cache_spec
        return [MultipleOf(16)]

    @staticmethod
    def get_impl_cls() -> type[FlashQsaImpl]:
        """The implementation."""
        return FlashQsaImpl

    @staticmethod
    def get_builder_cls() -> type[FlashQsaMetadataBuilder]:
        """Who builds a step's metadata."""
        return FlashQsaMetadataBuilder

    @classmethod
    def is_sparse(cls) -> bool:
        """Rows attend to a selection."""
        return True

    @classmethod
    def supports_kv_connector(cls) -> bool:
        """Connectors know nothing of the ring of raw keys."""
        return False


class SideMetadataBuilder(QSAMetadataBuilder):
    """vLLM's builder for the index caches; without Triton it gets the map from rows to requests made in torch."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> QSAForwardMetadata:
        """The metadata of one step."""
        common = common_attn_metadata
        if not HAS_TRITON and common._token_to_req_indices_cache is None:
            found = requests_of_rows(common.query_start_loc, common.num_actual_tokens)
            last = common.seq_lens.shape[0] - 1
            common._token_to_req_indices_cache = torch.where(found > last, 0, found)
        return super().build(common_prefix_len, common, fast_build)


class SideBackend(QSAStateBackend):
    """The backend of the index caches."""

    supported_dtypes: ClassVar[list[torch.dtype]] = list(DTYPES)
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", *FP8_NAMES]

    @staticmethod
    def get_builder_cls() -> type[SideMetadataBuilder]:
        """Who builds a step's metadata."""
        return SideMetadataBuilder


class RawKeyCache(QSAKeyStateCache):
    """vLLM's ring of raw keys, and of their positions where these have three axes, in any dtype."""

    def __init__(self, *, dtype: torch.dtype, **rest: Any) -> None:
        # vLLM counts the positions' bytes in numbers of two bytes each.
        self._BF16_PER_INT64 = INT64_BYTES // dtype.itemsize
        super().__init__(dtype=dtype, **rest)

    def get_attn_backend(self) -> type[AttentionBackend]:
        """`SideBackend`."""
        return SideBackend


class PooledKeyCache(QSACompressedKeyCache):
    """vLLM's cache of one pooled key a block, in any dtype."""

    def get_attn_backend(self) -> type[AttentionBackend]:
        """`SideBackend`."""
        return SideBackend
