"""Cache layers that Transformers' own caches are made of while FlashQSA is on.

They stand in for `DynamicIndexedLayer` and `StaticIndexedLayer`, which other models share; `paged.py` has what the two
share.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    STATIC_LAYER_TYPE_MAPPING,
    DynamicIndexedLayer,
    StaticIndexedLayer,
)

from flashqsa.integrations.transformers.errors import CacheMismatchError
from flashqsa.integrations.transformers.paged import History, PagedLayer
from flashqsa.integrations.transformers.store import NewTokens, PagedStore, Pooling
from flashqsa.values import QsaSpec

QSA_CACHE_TYPES = ("indexed_attention", "qwen_sparse_attention")
"""Names under which the supported releases look up the cache layer of a QSA layer."""


class FlashQsaLayer(PagedLayer, DynamicIndexedLayer):  # type: ignore[misc]
    """The growing cache layer of a QSA layer (in a `DynamicCache`)."""

    reserved_columns = 0
    """Columns that there is room for from the first pass on (see `reserve`)."""

    _count = 0

    def reserve(self, columns: int) -> None:
        """Makes room for so many columns now, or where nothing is held yet with the first pass."""
        self.reserved_columns = max(columns, self.reserved_columns)
        if self.store is not None:
            self.thaw()
            self.store.reserve(columns, self._count)

    def _columns(self) -> int:
        return self.get_seq_length()

    def _set_columns(self, columns: int) -> None:
        self._count = columns

    def _advance(self, count: int) -> None:
        self._count += count

    def _capacity(self, columns: int) -> tuple[int, int | None]:
        return max(columns, self.reserved_columns), None

    def _laid_out_columns(self) -> int:
        return self._count

    def _bound(self, columns: int | Tensor, count: int) -> int:
        assert isinstance(columns, int)
        return columns + count - 1

    def _stock_lengths(self) -> tuple[int, int]:
        keys, indexer_keys = self._keys, self._indexer_keys
        held = 0 if keys is None or not keys.numel() else keys.shape[-2]
        return held, 0 if indexer_keys is None or not indexer_keys.numel() else indexer_keys.shape[1]

    def _adopt_attributes(self, new: NewTokens) -> None:
        self.device = self.indexer_device = new.raw_keys.device
        self.dtype, self.indexer_dtype = new.keys.dtype, new.raw_keys.dtype
        self.is_initialized = self.is_indexer_initialized = True

    def _crop_stock(self, change: int) -> None:
        if change:
            super(PagedLayer, self).crop(change)

    def get_seq_length(self) -> int:
        """Columns held."""
        return self._count if self.store is not None else int(super().get_seq_length())


class FlashQsaStaticLayer(PagedLayer, StaticIndexedLayer):  # type: ignore[misc]
    """The cache layer of a QSA layer that has its full size from the start (in a `StaticCache`)."""

    known_columns: int | None = None
    """Columns held, as far as the host knows without asking a GPU: None after compiled code has counted."""

    def _columns(self) -> int | Tensor:
        if not self.is_initialized:
            return 0
        length: Tensor = self.cumulative_length
        if torch.compiler.is_compiling() or self.step_tokens is not None:
            return length
        if length.device.type == "cpu":
            return int(length)
        return length if self.known_columns is None else self.known_columns

    def thaw(self) -> None:
        """Copies what was made in inference mode, which cannot be written outside it."""
        super().thaw()
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
            return
        for name in ("cumulative_length", "indexer_cumulative_length"):
            length: Tensor | None = getattr(self, name, None)
            if length is not None and length.is_inference():
                setattr(self, name, length.clone())

    def _set_columns(self, columns: int) -> None:
        # In place: compiled code holds on to the tensor.
        self.cumulative_length.fill_(columns)
        self.known_columns = columns

    def _advance(self, count: int) -> None:
        self.cumulative_length.add_(count)
        if torch.compiler.is_compiling():
            self.known_columns = None
        elif self.step_tokens is None and self.known_columns is not None:
            self.known_columns += count

    def host_columns(self) -> int:
        """Columns held, asked of the device where the host does not know."""
        return int(self._columns())

    def take_back(self, kept: Tensor, rows: int) -> None:
        """Of the last `rows` columns, each request keeps its first `kept` [batch], one at least; on the device alone.

        Columns after the longest are free again, those of a shorter request become padding. `known_columns` is the
        caller's to set.
        """
        assert self.store is not None
        self.store.take_back(kept, rows, self.cumulative_length)
        self.cumulative_length.add_(kept.max() - rows)

    def last_position(self, tokens: int) -> int:
        """Host bound on positions while no request has more than so many tokens."""
        return min(tokens, int(self.max_cache_len)) - 1

    def _capacity(self, columns: int) -> tuple[int, int | None]:
        if columns > self.max_cache_len:
            raise CacheMismatchError(
                f"cache: wanted room for {columns} columns; got max_cache_len {self.max_cache_len}"
            )
        return self.max_cache_len, self.max_cache_len

    def _laid_out_columns(self) -> int:
        return int(self.max_cache_len)

    def _bound(self, columns: int | Tensor, count: int) -> int:
        if self.step_tokens is not None:
            return self.last_position(self.step_tokens)
        if not isinstance(columns, int):
            # A bound that no step changes, so that nothing is compiled twice.
            return int(self.max_cache_len) - 1
        self._capacity(columns + count)
        return columns + count - 1

    def _stock_lengths(self) -> tuple[int, int]:
        held = int(self.cumulative_length) if self._keys is not None else 0
        return held, int(self.indexer_cumulative_length) if self._indexer_keys is not None else 0

    def _adopt_attributes(self, new: NewTokens) -> None:
        self.device = self.indexer_device = new.raw_keys.device
        self.dtype, self.indexer_dtype = new.keys.dtype, new.raw_keys.dtype
        self.batch_size, _, self.num_heads, self.k_head_dim = new.keys.shape
        self.v_head_dim = new.values.shape[-1]
        self.cumulative_length = self.cumulative_length.to(self.device)
        self.is_initialized = self.is_indexer_initialized = True

    def _take_over(
        self,
        new: NewTokens,
        padding_mask: Tensor | None,
        spec: QsaSpec,
        pooling: Pooling,
        history: History,
        kv_dtype: torch.dtype | None,
    ) -> PagedStore:
        store = super()._take_over(new, padding_mask, spec, pooling, history, kv_dtype)
        if not torch.compiler.is_compiling():
            store.mark_static()
            torch._dynamo.mark_static_address(self.cumulative_length)
        return store

    def _to_stock(self) -> None:
        if self.store is not None:
            super()._to_stock()
            self.indexer_cumulative_length = self.cumulative_length.clone()
            self.known_columns = None

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The stock call, which comes before any layer runs: CacheMismatchError where new columns have no room."""
        columns = 0 if not self._filled else None
        if self.store is not None:
            columns = self.known_columns
        if columns is not None and self.step_tokens is None and not torch.compiler.is_compiling():
            try:
                self._capacity(columns + query_length)
            except CacheMismatchError:
                self.leave_positions(query_length)
                raise
        found: tuple[int, int] = super().get_mask_sizes(query_length)
        return found

    def _crop_stock(self, change: int) -> None:
        # The stock static layer has no `crop` before 5.24, and leaves the positions as they are.
        self.cumulative_length.add_(change)
        if self._indexer_keys is not None:
            self.indexer_cumulative_length.add_(change)
        self._crop_positions(change)


def paged_layer(cache: Any, layer_idx: int) -> PagedLayer | None:
    """The cache layer of a QSA layer; a stock one is replaced by one of ours. None for a layer of another kind."""
    layers: Any = getattr(cache, "layers", ())
    layer = layers[layer_idx] if layer_idx < len(layers) else None
    if isinstance(layer, PagedLayer):
        return layer
    kinds = {DynamicIndexedLayer: FlashQsaLayer, StaticIndexedLayer: FlashQsaStaticLayer}
    if layer is None or type(layer) not in kinds:
        return None
    kind = kinds[type(layer)]
    ours: PagedLayer = kind.__new__(kind)
    held = dict(vars(layer))
    for name in ("keys", "values", "indexer_keys"):
        held[f"_{name}"] = held.pop(name, None)
    vars(ours).update(held)
    ours._filled = ours.is_initialized or ours._indexer_keys is not None
    ours.surplus_positions = None
    layers[layer_idx] = ours
    return ours


def reserve(cache: Any, columns: int) -> None:
    """Gives the growing layers of a cache room for so many columns, so that nothing is copied until they are filled.

    cache    a `DynamicCache` that was made while FlashQSA was on, empty or in use; static layers stay as they are
    columns  of each request: tokens, and padding

    Raises ValueError for what is no number of columns.
    """
    if not isinstance(columns, int) or isinstance(columns, bool) or columns < 1:
        raise ValueError(f"columns: wanted a whole number from 1 on; got {columns!r}")
    for layer in cache.layers:
        if isinstance(layer, FlashQsaLayer):
            layer.reserve(columns)


def register_cache_layers() -> None:
    """Lets new caches be made of the layers of this file wherever they would be made of the stock ones."""
    for name in QSA_CACHE_TYPES:
        if DYNAMIC_LAYER_TYPE_MAPPING.get(name) is DynamicIndexedLayer:
            DYNAMIC_LAYER_TYPE_MAPPING[name] = FlashQsaLayer
        if STATIC_LAYER_TYPE_MAPPING.get(name) is StaticIndexedLayer:
            STATIC_LAYER_TYPE_MAPPING[name] = FlashQsaStaticLayer


def unregister_cache_layers() -> None:
    """Undoes `register_cache_layers`. Caches that are in use stay as they are."""
    for name in QSA_CACHE_TYPES:
        if DYNAMIC_LAYER_TYPE_MAPPING.get(name) is FlashQsaLayer:
            DYNAMIC_LAYER_TYPE_MAPPING[name] = DynamicIndexedLayer
        if STATIC_LAYER_TYPE_MAPPING.get(name) is FlashQsaStaticLayer:
            STATIC_LAYER_TYPE_MAPPING[name] = StaticIndexedLayer
