"""What the caches of this integration hold for one layer: paged keys, values and index keys of visible tokens.

Transformers counts columns: every token of every forward pass, padding too. The store counts each request's visible
tokens, because that is what blocks are made of: token t of a request is its (t + 1)-th visible column, and padding is
not stored. `visible` keeps which column was which, so that a request can be laid out in columns again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flashqsa import ops
from flashqsa.values import QsaSpec

PAGE_TOKENS = 64
"""Tokens per page, rounded up to whole blocks. Pages of a request lie one after the other."""

GROWTH = 4
"""A full store grows by a quarter: a token is copied 4 times in all on average, and at most a fifth lies idle."""

MIN_GROWTH_TOKENS = 256


@dataclass(frozen=True)
class Pooling:
    """How block keys are made: `norm_weight` [index_dim] and `eps` of the RMS norm (see `write_index_keys`)."""

    norm_weight: Tensor
    eps: float


@dataclass(frozen=True)
class NewTokens:
    """One forward pass's columns of one layer, as the projections, norms and rotary embedding left them.

    keys, values  [batch, columns, kv_heads, head_dim], keys normalised and rotated
    raw_keys      [batch, columns, index_dim], before pooling
    cos, sin      [batch, columns, rotary_dim]
    visible       [batch, columns] bool, False for padding; None when every column is a token
    """

    keys: Tensor
    values: Tensor
    raw_keys: Tensor
    cos: Tensor
    sin: Tensor
    visible: Tensor | None = None


@dataclass(frozen=True)
class Reading:
    """What attention reads after the columns of a pass are stored, in the form the operators take.

    index_keys, keys, values  pools [pages, ...]
    page_table                [batch, pages per request] int32, of both caches
    request, position         [batch * columns] int32, as in `Rows`; position -1 for padding
    max_position              host bound on `position`
    """

    index_keys: Tensor
    keys: Tensor
    values: Tensor
    page_table: Tensor
    request: Tensor
    position: Tensor
    max_position: int


class PagedStore:
    """Visible tokens of a batch of requests, in the order they came.

    keys, values   [batch, capacity, kv_heads, head_dim]
    raw_keys       [batch, capacity, index_dim], so that any number of tokens can be taken back
    index_keys     [batch, capacity / block_tokens, index_dim], the key of each complete block
    block_rotary   [batch, capacity / block_tokens + 1, 2, rotary_dim]: cos and sin at each block's first token, kept
                   from when it came, since a later pass need not know them; the last entry takes what is to be dropped
    visible        [batch, max_columns] bool, the columns that are tokens
    lengths        [batch] int32, visible tokens so far
    page_table     [batch, capacity / page_tokens] int32

    Memory that was never written stays undefined. `max_columns` is fixed for a static cache, else the capacity.
    """

    def __init__(self, first: NewTokens, spec: QsaSpec, columns: int, max_columns: int | None = None) -> None:
        batch, device = first.raw_keys.shape[0], first.raw_keys.device
        self.block_tokens = spec.block_tokens
        self.page_tokens = -(-PAGE_TOKENS // spec.block_tokens) * spec.block_tokens
        self.fixed = max_columns is not None
        capacity = self._whole_pages(columns)
        blocks = capacity // spec.block_tokens
        self.keys = first.keys.new_empty((batch, capacity, *first.keys.shape[2:]))
        self.values = first.values.new_empty((batch, capacity, *first.values.shape[2:]))
        self.raw_keys = first.raw_keys.new_empty((batch, capacity, first.raw_keys.shape[2]))
        self.index_keys = first.raw_keys.new_empty((batch, blocks, first.raw_keys.shape[2]))
        self.block_rotary = first.cos.new_empty((batch, blocks + 1, 2, first.cos.shape[2]))
        self.visible = torch.zeros((batch, max_columns or capacity), dtype=torch.bool, device=device)
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        self.page_table = self._pages(batch, capacity, device)

    @property
    def batch(self) -> int:
        """Requests."""
        return self.keys.shape[0]

    @property
    def capacity(self) -> int:
        """Tokens each request can hold."""
        return self.keys.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(getattr(self, name).nbytes for name in (*self._BY_TOKEN, *self._BY_BLOCK, *self._OTHERS))

    _BY_TOKEN = ("keys", "values", "raw_keys")
    _BY_BLOCK = ("index_keys", "block_rotary")
    _OTHERS = ("visible", "lengths", "page_table")

    def _whole_pages(self, tokens: int) -> int:
        return max(-(-tokens // self.page_tokens), 1) * self.page_tokens

    def _pages(self, batch: int, capacity: int, device: torch.device) -> Tensor:
        each = capacity // self.page_tokens
        return torch.arange(batch * each, dtype=torch.int32, device=device).view(batch, each)

    def reserve(self, columns: int, used: int) -> None:
        """Makes room for `columns` columns, of which the first `used` are filled. Amortised: copies seldom."""
        if columns <= self.capacity:
            return
        step = max(self.capacity // GROWTH, MIN_GROWTH_TOKENS)
        capacity = self._whole_pages(max(columns, self.capacity + step))
        for name in self._BY_TOKEN:
            self._widen(name, capacity, used)
        blocks = capacity // self.block_tokens
        opened = min(-(-used // self.block_tokens), self.capacity // self.block_tokens)
        self._widen("index_keys", blocks, opened)
        self._widen("block_rotary", blocks + 1, opened)
        visible = self.visible.new_zeros((self.batch, capacity))
        visible[:, :used] = self.visible[:, :used]
        self.visible = visible
        self.page_table = self._pages(self.batch, capacity, self.keys.device)

    def _widen(self, name: str, size: int, used: int) -> None:
        old: Tensor = getattr(self, name)
        new = old.new_empty((old.shape[0], size, *old.shape[2:]))
        new[:, :used] = old[:, :used]
        setattr(self, name, new)

    def thaw(self) -> None:
        """Copies tensors that were made in inference mode, which cannot be written outside it."""
        if self.keys.is_inference() and not torch.is_inference_mode_enabled():
            self.change(torch.clone)

    def append(
        self, new: NewTokens, columns: int | Tensor, spec: QsaSpec, pooling: Pooling, max_position: int
    ) -> Reading:
        """Stores a pass's columns after the first `columns` (a 0-dim tensor for a static cache); there must be room."""
        batch, count = new.raw_keys.shape[:2]
        steps = torch.arange(count, dtype=torch.int32, device=new.raw_keys.device)
        if new.visible is None:
            position = self.lengths[:, None] + steps
            added: Tensor | int = count
        else:
            seen = new.visible.cumsum(1, dtype=torch.int32)
            position = torch.where(new.visible, self.lengths[:, None] + seen - 1, -1)
            added = seen[:, -1]
        if isinstance(columns, int):
            self.visible[:, columns : columns + count] = True if new.visible is None else new.visible
        else:
            every = torch.ones((batch, count), dtype=torch.bool, device=steps.device)
            self.visible.index_copy_(1, columns + steps.long(), every if new.visible is None else new.visible)
        request = torch.arange(batch, dtype=torch.int32, device=steps.device).repeat_interleave(count)
        cos, sin = self._block_angles(new, position).unbind(1)
        reading = self.reading(request, position.flatten(), max_position)
        numbers = ops.pack_spec(spec)
        ops.write_kv(
            new.keys.flatten(0, 1),
            new.values.flatten(0, 1),
            reading.keys,
            reading.values,
            self.page_table,
            None,
            None,
            request,
            reading.position,
            max_position,
            numbers,
        )
        ops.write_index_keys(
            new.raw_keys.flatten(0, 1),
            reading.index_keys,
            self.page_table,
            None,
            self.raw_keys,
            request,
            reading.position,
            max_position,
            numbers,
            pooling.norm_weight,
            cos,
            sin,
            pooling.eps,
        )
        self.lengths.add_(added)
        return reading

    def _block_angles(self, new: NewTokens, position: Tensor) -> Tensor:
        """cos and sin [batch * columns, 2, rotary_dim] at the first token of each column's block."""
        place = position.clamp(min=0)
        block = torch.div(place, self.block_tokens, rounding_mode="floor").long()
        opens = (position >= 0) & (place % self.block_tokens == 0)
        slot = torch.where(opens, block, self.block_rotary.shape[1] - 1)
        request = torch.arange(position.shape[0], device=position.device)[:, None]
        self.block_rotary[request, slot] = torch.stack((new.cos, new.sin), dim=2)
        return self.block_rotary[request, block].flatten(0, 1)

    def reading(self, request: Tensor, position: Tensor, max_position: int) -> Reading:
        """The pools, for rows at `position` of `request`."""
        batch, page, blocks = self.batch, self.page_tokens, self.page_tokens // self.block_tokens
        pages = self.capacity // page
        return Reading(
            self.index_keys.view(batch * pages, blocks, *self.index_keys.shape[2:]),
            self.keys.view(batch * pages, page, *self.keys.shape[2:]),
            self.values.view(batch * pages, page, *self.values.shape[2:]),
            self.page_table,
            request,
            position,
            max_position,
        )

    def mark_static(self) -> None:
        """Tells torch.compile that the tensors stay where they are, as the stock static layer does with its own."""
        for name in (*self._BY_TOKEN, *self._BY_BLOCK, *self._OTHERS):
            torch._dynamo.mark_static_address(getattr(self, name))

    def crop(self, keep: int, columns: int) -> None:
        """Forgets columns `keep .. columns`. Blocks that are cut open are pooled again when they fill up."""
        gone = self.visible[:, keep:columns]
        self.lengths.sub_(gone.sum(1, dtype=torch.int32))
        gone.zero_()

    def reset(self) -> None:
        """Forgets everything; keeps the memory."""
        self.lengths.zero_()
        self.visible.zero_()

    def change(self, function: Callable[[Tensor], Tensor]) -> None:
        """Replaces every tensor by a function of it that keeps, moves, repeats or chooses requests (axis 0).

        A store of fixed size is written in place, as long as the function keeps shapes and the device: compiled code
        and CUDA graphs hold on to its addresses.
        """
        for name in (*self._BY_TOKEN, *self._BY_BLOCK, "visible", "lengths"):
            old: Tensor = getattr(self, name)
            new = function(old)
            if self.fixed and new.shape == old.shape and new.device == old.device and not old.is_inference():
                old.copy_(new)
            else:
                setattr(self, name, new)
        if self.page_table.shape[0] != self.batch or self.page_table.device != self.keys.device:
            self.page_table = self._pages(self.batch, self.capacity, self.keys.device)

    def in_columns(self, columns: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values [batch, kv_heads, columns, head_dim] and raw keys [batch, columns, index_dim].

        As stock caches hold them; zeros where a column is padding.
        """
        visible = self.visible[:, :columns]
        place = (visible.cumsum(1) - 1).clamp(min=0)
        request = torch.arange(self.batch, device=place.device)[:, None]

        def laid_out(stored: Tensor) -> Tensor:
            shown = visible.view(*visible.shape, *(1,) * (stored.ndim - 2))
            return torch.where(shown, stored[request, place], stored.new_zeros(()))

        keys, values = (laid_out(stored).transpose(1, 2) for stored in (self.keys, self.values))
        return keys, values, laid_out(self.raw_keys)
