"""Whether the layers of a cache hold the same columns: a pass that failed part-way leaves them torn.

Transformers puts a pass's positions in the cache first, then each layer adds its columns. What stopped in between is
noticed by the next pass, from numbers that the host has.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from flashqsa.integrations.transformers.errors import CacheMismatchError, MaskMismatchError
from flashqsa.integrations.transformers.paged import DROP_CACHE, PagedLayer
from flashqsa.route import NoRouteError


def cached_positions(cache: Any) -> Tensor | None:
    """Positions [axes, batch, columns] that the stock model keeps: on the cache, or (5.23) on an indexed layer."""
    held = getattr(cache, "position_ids", None)
    if held is None:
        kept = (getattr(layer, "indexer_position_ids", None) for layer in getattr(cache, "layers", ()))
        held = next((ids for ids in kept if ids is not None), None)
    return held


def set_positions(cache: Any, positions: Tensor | None) -> Tensor | None:
    """Replaces the positions that Transformers keeps of a cache's columns; returns what they were.

    Until 5.22 they are an attribute of the cache, which must be absent to be begun anew; then one of an indexed layer.
    """
    before = cached_positions(cache)
    holder = next((layer for layer in cache.layers if getattr(layer, "indexer_position_ids", None) is not None), None)
    if holder is None and not hasattr(cache, "position_ids"):
        holder = next((layer for layer in cache.layers if hasattr(layer, "indexer_position_ids")), None)
    if holder is not None:
        holder.indexer_position_ids = positions
    elif positions is not None:
        cache.position_ids = positions
    elif hasattr(cache, "position_ids"):
        del cache.position_ids
    return before


def check_layers_agree(cache: Any, held: PagedLayer, tokens: int) -> None:
    """CacheMismatchError where an earlier pass over a cache stopped part-way, as far as the host can tell.

    held    the layer that is about to run a pass of `tokens` columns

    Before the first sparse layer runs all of them hold the same columns; each later one lacks those that the first has
    taken in. The positions that Transformers keeps are as many as the columns with the new ones, but for what cropping,
    resetting and refusals before any layer left behind. Layers that are called by themselves, without positions, are
    not compared.
    """
    held.check_unspoilt()
    positions, own = cached_positions(cache), held.columns_on_host()
    if positions is None or own is None:
        return
    sparse = {index: layer for index, layer in enumerate(cache.layers) if isinstance(layer, PagedLayer)}
    first = next(iter(sparse))
    others, wanted = sparse, own
    if sparse[first] is not held:
        others, wanted = {first: sparse[first]}, own + tokens
    for index, layer in others.items():
        found = layer.columns_on_host()
        if found not in (None, wanted):
            raise CacheMismatchError(f"cache: wanted {wanted} columns in layer {index}; got {found}: {DROP_CACHE}")
    if sparse[first] is not held:
        return
    surplus = max(positions.shape[-1] - own - tokens, 0)
    if held.surplus_positions is not None and surplus > held.surplus_positions:
        wanted, got = own + tokens + held.surplus_positions, positions.shape[-1]
        raise CacheMismatchError(f"cache: wanted positions of {wanted} columns; got {got}: {DROP_CACHE}")
    held.surplus_positions = surplus


@contextlib.contextmanager
def refusing(cache: Any, held: PagedLayer, layer_idx: int, tokens: int) -> Iterator[None]:
    """A layer's part of a pass that may be refused inside the `with` block, before the layer has written anything.

    Where no layer came before, the cache is left as it was: the positions of the pass are taken back. Else those have
    written, and no later pass may use the cache.
    """
    try:
        yield
    except (CacheMismatchError, MaskMismatchError, NoRouteError):
        positions, own = cached_positions(cache), held.columns_on_host()
        if positions is not None and layer_idx > 0:
            for layer in cache.layers:
                if isinstance(layer, PagedLayer):
                    layer.spoilt = True
        elif positions is not None and own is not None and positions.shape[-1] == own + tokens:
            set_positions(cache, positions[..., :own] if own else None)
        raise
