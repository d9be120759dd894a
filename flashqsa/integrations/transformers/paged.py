"""What the growing and the static cache layer share: the two states they have, and the calls that both answer alike.

Filled by FlashQSA a layer holds a `PagedStore`. Filled through the stock calls `update` and `update_indexer` it is what
the stock layer was, bit for bit. A call of the other kind turns one state into the other, so a sequence may change
hands.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flashqsa import check
from flashqsa.device import DeviceFacts
from flashqsa.integrations.transformers.errors import CacheMismatchError, MaskMismatchError
from flashqsa.integrations.transformers.store import NewTokens, PagedStore, Pooling, Queries, Reading
from flashqsa.machine import facts_here
from flashqsa.plan import STAGES
from flashqsa.route import Call, choose_route
from flashqsa.values import QsaSpec

DROP_CACHE = "a pass over it was not ended; drop it and begin a new one"

History = Callable[[int], tuple[Tensor, Tensor]]
"""Gives cos and sin [batch, n, rotary_dim] of the first n columns; called only where a stock cache is taken over."""


def _checks(device: torch.device) -> bool:
    """Whether masks are compared with what they were: not where it would synchronise, or while compiling."""
    return not torch.compiler.is_compiling() and check.wants_value_checks(None, device)


def require_routes(
    spec: QsaSpec, rows: int, requests: int, max_position: int, dtype: torch.dtype, kv_dtype: torch.dtype, device: Any
) -> None:
    """Raises NoRouteError where no route will serve a pass over a paged cache; host numbers alone are read.

    dtype     of queries, index queries and index keys
    kv_dtype  of stored keys and values
    """
    if device.type == "meta":
        return
    invariant = check.wants_batch_invariance(None)
    call = Call(spec, rows, requests, max_position, dtype, kv_dtype, dtype, dtype, batch_invariant=invariant)
    _find_routes(call, facts_here(device), check.check_pin(None))


@lru_cache(maxsize=64)
def _find_routes(call: Call, facts: DeviceFacts, pin: str | None) -> None:
    """Asks for both stages. The layers of a pass ask the same in turn."""
    for stage in STAGES:
        choose_route(stage, call, facts, pin)


class PagedLayer:
    """What the dynamic and the static layer share. `store` is None in the stock state."""

    store: PagedStore | None = None
    step_tokens: int | None = None
    """While steps of fixed shapes run (`Steps`): no request gets more tokens than this. Counts are then read and
    written on the device alone, masks are not compared, and every new column is a token."""

    spoilt = False
    """Whether a pass was refused when other layers of the cache had written, or a step began and has not ended; `reset`
    ends it."""
    surplus_positions: int | None = 0
    """Most positions that Transformers may keep beyond the columns held, as cropping and resetting leave them; None
    where that is not known (`passes.py`)."""

    _filled = False
    _hidden: Tensor | None = None
    _pooled_with: Tensor | None = None
    cumulative_length: Tensor
    indexer_cumulative_length: Tensor
    _keys: Tensor | None
    _values: Tensor | None
    _indexer_keys: Tensor | None
    is_initialized: bool
    is_croppable = True
    device: torch.device
    batch_size: int
    indexer_position_ids: Tensor | None

    # -- the stock attributes; of a store they are laid out anew each time they are read

    @property
    def keys(self) -> Tensor | None:
        """[batch, kv_heads, columns, head_dim], as the stock layer holds them."""
        return self._keys if self.store is None else self._in_columns()[0]

    @keys.setter
    def keys(self, value: Tensor | None) -> None:
        self._keys = value

    @property
    def values(self) -> Tensor | None:
        """[batch, kv_heads, columns, head_dim], as the stock layer holds them."""
        return self._values if self.store is None else self._in_columns()[1]

    @values.setter
    def values(self, value: Tensor | None) -> None:
        self._values = value

    @property
    def indexer_keys(self) -> Tensor | None:
        """[batch, columns, index_dim], raw, as the stock layer holds them."""
        return self._indexer_keys if self.store is None else self._in_columns()[2]

    @indexer_keys.setter
    def indexer_keys(self, value: Tensor | None) -> None:
        self._indexer_keys = value

    # -- what the two kinds do differently

    def _columns(self) -> int | Tensor:
        """Columns held; a tensor where reading it would synchronise or break a graph."""
        raise NotImplementedError

    def _set_columns(self, columns: int) -> None:
        raise NotImplementedError

    def _advance(self, count: int) -> None:
        raise NotImplementedError

    def _capacity(self, columns: int) -> tuple[int, int | None]:
        """Columns to make room for, and the fixed number of columns of a static layer."""
        raise NotImplementedError

    def _laid_out_columns(self) -> int:
        raise NotImplementedError

    def _bound(self, columns: int | Tensor, count: int) -> int:
        """Host bound on the positions of `count` new columns."""
        raise NotImplementedError

    def _stock_lengths(self) -> tuple[int, int]:
        """Columns of the stock K/V, and of the stock index keys."""
        raise NotImplementedError

    def _adopt_attributes(self, new: NewTokens) -> None:
        raise NotImplementedError

    # -- what is known without asking a GPU

    def columns_on_host(self) -> int | None:
        """Columns held, or None where a GPU would have to be asked."""
        columns = self._columns()
        return columns if isinstance(columns, int) else None

    def check_unspoilt(self) -> None:
        """CacheMismatchError where a pass was refused after other layers had written, or a step failed."""
        if self.spoilt and self.step_tokens is None:
            raise CacheMismatchError(
                f"cache: wanted one whose layers hold the same columns; got a torn one: {DROP_CACHE}"
            )

    # -- the calls of the FlashQSA layer

    def extend(
        self,
        new: NewTokens,
        padding_mask: Tensor | None,
        spec: QsaSpec,
        pooling: Pooling,
        history: History,
        kv_dtype: torch.dtype | None = None,
        queries: Queries | None = None,
    ) -> Reading:
        """Stores the columns of one pass and returns what attention reads.

        new           their `visible` is filled in here
        padding_mask  [batch, columns so far and new] bool, or None; missing columns count as padding, as in stock masks
        history       see `History`
        kv_dtype      that keys and values are stored in from the first pass on; None for their own
        queries       where norms and rotary are to be applied to them and to the new keys

        Raises CacheMismatchError when a stock cache that is taken over is torn, or does not fit the batch, or a static
        cache is full, or index keys were pooled for another layer; MaskMismatchError when the mask contradicts the one
        of an earlier pass; NoRouteError when nothing could read what would be written. What is held stays as it was
        then. The mask and the norm of the index keys are compared where FLASHQSA_CHECK_VALUES allows it, masks and
        routes never under torch.compile.
        """
        store = self.store
        if store is None:
            self._require_routes(new, spec, self._stock_lengths()[0] if self._filled else 0, kv_dtype)
            store = self._take_over(new, padding_mask, spec, pooling, history, kv_dtype)
        if store.batch != new.raw_keys.shape[0]:
            raise CacheMismatchError(f"cache: wanted {new.raw_keys.shape[0]} requests; got {store.batch}")
        if store.block_tokens != spec.block_tokens:
            raise CacheMismatchError(f"cache: wanted blocks of {spec.block_tokens} tokens; got {store.block_tokens}")
        if self.device != new.raw_keys.device:
            raise CacheMismatchError(f"cache: wanted one on {new.raw_keys.device}; got one on {self.device}")
        self.prefetch()
        self.thaw()
        count, columns = new.raw_keys.shape[1], self._columns()
        bound = self._bound(columns, count)
        self._require_routes(new, spec, columns, store.kv.dtype)
        if self.step_tokens is None and _checks(new.raw_keys.device):
            self._check_history(store, padding_mask, int(columns))
            self._check_pooling(pooling, int(columns))
        visible = None if padding_mask is None else self._new_columns(padding_mask, columns, count)
        if isinstance(columns, int) and not store.fixed:
            store.reserve(columns + count, columns)
        new = NewTokens(new.keys, new.values, new.raw_keys, new.cos, new.sin, visible)
        reading = store.append(new, columns, spec, pooling, bound, queries)
        self._advance(count)
        return reading

    def _require_routes(
        self, new: NewTokens, spec: QsaSpec, columns: int | Tensor, kv_dtype: torch.dtype | None
    ) -> None:
        """Raises NoRouteError where nothing serves the new columns, of which `columns` come before."""
        if torch.compiler.is_compiling() or self.step_tokens is not None:
            return  # `Steps` asks before its pass begins
        batch, count = new.raw_keys.shape[:2]
        bound, dtype = self._bound(columns, count), new.values.dtype
        require_routes(spec, batch * count, batch, bound, dtype, kv_dtype or dtype, new.raw_keys.device)

    def thaw(self) -> None:
        """Copies what was made in inference mode, which cannot be written outside it."""
        if self.store is not None and not torch.compiler.is_compiling():
            self.store.thaw()

    def _check_pooling(self, pooling: Pooling, columns: int) -> None:
        """Remembers the norm that the first block keys are made with; CacheMismatchError for another one later."""
        if columns == 0 or self._pooled_with is None:
            self._pooled_with = pooling.norm_weight.detach().clone()
        elif not torch.equal(self._pooled_with, pooling.norm_weight):
            raise CacheMismatchError("cache: wanted index keys pooled with this layer's norm; got another model's")

    def check_hidden(self, mask: Tensor) -> None:
        """MaskMismatchError when a stock mask [batch, 1, rows, columns] shows padding, which is not kept."""
        hidden = self._hidden_columns()
        if hidden is None or not _checks(mask.device):
            return
        shown = mask if mask.dtype == torch.bool else mask == 0
        width = min(hidden.shape[1], shown.shape[-1])
        if bool((shown[..., :width].any(dim=2).any(dim=1) & hidden[:, :width]).any()):
            raise MaskMismatchError("attention_mask: wanted padding to stay padding; got a mask that shows it")

    def _hidden_columns(self) -> Tensor | None:
        if self.store is None:
            return self._hidden
        return ~self.store.visible[:, : int(self._columns())]

    def _check_history(self, store: PagedStore, padding_mask: Tensor | None, columns: int) -> None:
        if padding_mask is None:
            agrees = columns == 0 or int(store.lengths.min()) == columns
        else:
            given = _widened(padding_mask, columns)[:, :columns]
            agrees = torch.equal(given, store.visible[:, :columns])
        if not agrees:
            got = "none" if padding_mask is None else "another one"
            raise MaskMismatchError(
                f"attention_mask: wanted the one under which the {columns} columns of the cache were written; got {got}"
            )

    def _new_columns(self, padding_mask: Tensor, columns: int | Tensor, count: int) -> Tensor:
        if isinstance(columns, int):
            return _widened(padding_mask, columns + count)[:, columns : columns + count]
        padding_mask = _widened(padding_mask, self._laid_out_columns())
        return padding_mask.index_select(1, columns + torch.arange(count, device=padding_mask.device))

    def _take_over(
        self,
        new: NewTokens,
        padding_mask: Tensor | None,
        spec: QsaSpec,
        pooling: Pooling,
        history: History,
        kv_dtype: torch.dtype | None,
    ) -> PagedStore:
        """A store for this layer, filled with what the stock calls left here."""
        held, indexed = self._stock_lengths() if self._filled else (0, 0)
        if held != indexed:
            raise CacheMismatchError(f"cache: wanted index keys for its {held} columns; got {indexed}")
        self._adopt_attributes(new)
        columns, fixed = self._capacity(held + new.raw_keys.shape[1])
        store = PagedStore(new, spec, columns, fixed, kv_dtype)
        if held:
            self._import(store, held, padding_mask, spec, pooling, history)
        self._keys = self._values = self._indexer_keys = self._hidden = self._pooled_with = None
        self._filled = False
        self.store = store
        self._set_columns(held)
        return store

    def _import(
        self,
        store: PagedStore,
        held: int,
        padding_mask: Tensor | None,
        spec: QsaSpec,
        pooling: Pooling,
        history: History,
    ) -> None:
        assert self._keys is not None
        assert self._values is not None
        assert self._indexer_keys is not None
        if self._keys.shape[0] != store.batch:
            raise CacheMismatchError(f"cache: wanted {store.batch} requests; got {self._keys.shape[0]}")
        visible = None if padding_mask is None else _widened(padding_mask, held)[:, :held]
        if self._hidden is not None:
            # Columns that the stock calls brought since then are all held.
            hidden = self._hidden[:, :held]
            if visible is None or bool((visible[:, : hidden.shape[1]] & hidden).any()):
                raise MaskMismatchError("attention_mask: wanted padding to stay padding; got a mask that shows it")
        cos, sin = history(held)
        old = NewTokens(
            self._keys[:, :, :held].transpose(1, 2),
            self._values[:, :, :held].transpose(1, 2),
            self._indexer_keys[:, :held],
            cos.expand(store.batch, -1, -1),
            sin.expand(store.batch, -1, -1),
            visible,
        )
        store.append(old, 0, spec, pooling, held - 1)

    def _in_columns(self) -> tuple[Tensor, Tensor, Tensor]:
        assert self.store is not None
        return self.store.in_columns(self._laid_out_columns())

    def _to_stock(self) -> None:
        """Lays a store out in columns, for the stock calls."""
        if self.store is None:
            return
        hidden = self._hidden_columns()
        keys, values, raw_keys = (stored.contiguous() for stored in self._in_columns())
        self._hidden = hidden if hidden is not None and bool(hidden.any()) else None
        self._filled = True
        self.store = None
        self._keys, self._values, self._indexer_keys = keys, values, raw_keys

    # -- the calls of Transformers that both kinds answer alike

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The stock call: appends columns [batch, kv_heads, new, head_dim], returns all of them."""
        self.check_unspoilt()
        self._to_stock()
        self._filled = True
        found: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)  # type: ignore[misc]
        return found

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """The stock call: appends raw index keys [batch, new, index_dim], returns all of them."""
        self._to_stock()
        self._filled = True
        found: Tensor = super().update_indexer(indexer_key_states)  # type: ignore[misc]
        return found

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The stock call, which comes before any layer runs: CacheMismatchError for a torn cache."""
        self.check_unspoilt()
        found: tuple[int, int] = super().get_mask_sizes(query_length)  # type: ignore[misc]
        return found

    def offload(self) -> None:
        """Moves the layer to the CPU."""
        if self.store is None:
            super().offload()  # type: ignore[misc]
        else:
            self.store.change(lambda stored: stored.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Moves the layer back to the device of the model."""
        if self.store is None:
            super().prefetch()  # type: ignore[misc]
        elif self.store.device != self.device:
            self.store.change(lambda stored: stored.to(self.device, non_blocking=True))

    def reset(self) -> None:
        """Forgets everything; keeps the memory."""
        self._hidden, self.spoilt = None, False
        self.leave_positions(self.columns_on_host())
        self.thaw()
        if self.store is None:
            super().reset()  # type: ignore[misc]
            self._filled = self._filled and max(self._stock_lengths()) > 0
            return
        self.store.reset()
        self._set_columns(0)
        if getattr(self, "indexer_position_ids", None) is not None:
            self.indexer_position_ids = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Request r becomes what request `beam_idx[r]` was."""
        if self.store is None:
            super().reorder_cache(beam_idx)  # type: ignore[misc]
            self._hidden = None if self._hidden is None else self._hidden[beam_idx.to(self._hidden.device)]
            return
        self._choose(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each request becomes `repeats` of it, next to each other."""
        if self.store is None:
            super().batch_repeat_interleave(repeats)  # type: ignore[misc]
            self._hidden = None if self._hidden is None else self._hidden.repeat_interleave(repeats, dim=0)
            return
        self._choose(torch.arange(self.store.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the requests `indices` (ids, or a bool for each)."""
        if self.store is None:
            super().batch_select_indices(indices)  # type: ignore[misc]
            self._hidden = None if self._hidden is None else self._hidden[indices]
            return
        self._choose(torch.arange(self.store.batch)[indices.cpu()])

    def _choose(self, order: Tensor) -> None:
        """Request r becomes what request `order[r]` was. Full pages are shared, so that little is copied."""
        assert self.store is not None
        self.prefetch()
        self.thaw()
        self.store.choose(order)
        positions = getattr(self, "indexer_position_ids", None)
        if positions is not None:
            self.indexer_position_ids = positions.index_select(1, order.to(positions.device))
        if hasattr(self, "batch_size"):
            self.batch_size = self.store.batch

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the last `-tokens_to_remove` columns; a positive number is how many to keep (the old meaning)."""
        held = int(self._columns())
        keep = min(held, tokens_to_remove) if tokens_to_remove > 0 else max(held + tokens_to_remove, 0)
        self.leave_positions(held - keep)
        self.thaw()
        if self.store is None:
            self._hidden = None if self._hidden is None else self._hidden[:, :keep]
            self._crop_stock(keep - held)
            self._filled = self._filled and max(self._stock_lengths()) > 0
            return
        if keep == held:
            return
        self.store.crop(keep, held)
        self._set_columns(keep)
        self._crop_positions(keep - held)

    def leave_positions(self, columns: int | None) -> None:
        """Notes that so many columns go, or do not come, whose positions Transformers may keep all the same."""
        if self.surplus_positions is None or columns is None:
            self.surplus_positions = None
        else:
            self.surplus_positions += columns

    def _crop_stock(self, change: int) -> None:
        raise NotImplementedError

    def _crop_positions(self, change: int) -> None:
        positions = getattr(self, "indexer_position_ids", None)
        if change and positions is not None:
            self.indexer_position_ids = positions[..., :change]


def _widened(mask: Tensor, columns: int) -> Tensor:
    """A padding mask of at least `columns` columns; those it lacked are padding."""
    missing = columns - mask.shape[1]
    return torch.nn.functional.pad(mask, (0, missing)) if missing > 0 else mask
