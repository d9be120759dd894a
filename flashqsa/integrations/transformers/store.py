"""What the caches of this integration hold for one layer: paged keys, values and index keys of visible tokens.

Transformers counts columns: every token of every forward pass, padding too. The store counts each request's visible
tokens, because that is what blocks are made of: token t of a request is its (t + 1)-th visible column, and padding is
not stored. `visible` keeps which column was which, so that a request can be laid out in columns again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flashqsa import ops
from flashqsa.growing import GrowingPool, new_pool
from flashqsa.integrations.transformers.pages import Ids, PageBook
from flashqsa.values import FP8, QsaSpec

PAGE_TOKENS = 64
"""Tokens per page, rounded up to whole blocks."""

GROWTH = 4
"""What is full grows by a quarter: at most a fifth lies idle. Pages and raw keys on a GPU grow where they lie; other
things are copied then, a token 4 times in all on average."""

MIN_GROWTH_TOKENS = 256


@dataclass(frozen=True)
class Pooling:
    """How block keys are made: `norm_weight` [index_dim] and `eps` of the RMS norm (see `write_index_keys`)."""

    norm_weight: Tensor
    eps: float


@dataclass(frozen=True)
class NewTokens:
    """One forward pass's columns of one layer, as the projections, norms and rotary embedding left them.

    keys, values  [batch, columns, kv_heads, head_dim], keys normalised and rotated unless `Queries` come with them
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
class Queries:
    """Queries of a pass's columns that still need norm and rotary, as its keys then do: `prepare` does it all at once.

    q, index_q                    [batch, columns, q_heads, head_dim], [batch, columns, index_heads, index_dim]
    q_norm, k_norm, index_q_norm  [head_dim] or [index_dim], weights of norms whose epsilon is that of `Pooling`
    """

    q: Tensor
    index_q: Tensor
    q_norm: Tensor
    k_norm: Tensor
    index_q_norm: Tensor


@dataclass(frozen=True)
class Reading:
    """What attention reads after the columns of a pass are stored, in the form the operators take.

    index_keys, keys, values  pools [pages, ...]
    kv_scale                  [kv_heads] FP32, what stored FP8 keys and values are multiplied by; None for other dtypes
    page_table                [batch, pages per request] int32, of both caches
    request, position         [batch * columns] int32, as in `Rows`; position -1 for padding
    max_position              host bound on `position`
    q, index_q                [batch * columns, heads, dim] normalised and rotated; None where no `Queries` came
    """

    index_keys: Tensor
    keys: Tensor
    values: Tensor
    kv_scale: Tensor | None
    page_table: Tensor
    request: Tensor
    position: Tensor
    max_position: int
    q: Tensor | None = None
    index_q: Tensor | None = None


class PagedStore:
    """Visible tokens of a batch of requests, in the order they came.

    kv            [pages, 2, page_tokens, kv_heads, head_dim], keys at 0, values at 1; FP8 where that was asked for
    index_keys    [pages, page_blocks, index_dim], the key of each complete block
    page_table    [batch, pages per request] int32, of both pools; `book` is its master on the host
    raw_keys      [batch, capacity, index_dim], so that any number of tokens can be taken back
    block_rotary  [batch, capacity / block_tokens + 1, 2, rotary_dim / 2]: cos and sin at each block's first token, kept
                  from when it came, since a later pass need not know them; the last entry takes what is to be dropped
    visible       [batch, max_columns] bool, the columns that are tokens
    lengths       [batch] int32, visible tokens so far
    kv_scale      [kv_heads] FP32 of ones for FP8: keys are normalised, values projected from what is

    A request takes a page when it needs one, and nothing that is stored moves then. What is full gets longer by a
    quarter: on a GPU pools and raw keys do so where they lie (`GrowingPool`), the rest in a copy. Requests that were
    one share pages (`PageBook`). Memory that was never written stays undefined. `max_columns` is fixed for a static
    cache, else the capacity.
    """

    def __init__(
        self,
        first: NewTokens,
        spec: QsaSpec,
        columns: int,
        max_columns: int | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        batch, device = first.raw_keys.shape[0], first.raw_keys.device
        self.block_tokens = spec.block_tokens
        self.page_tokens = -(-PAGE_TOKENS // spec.block_tokens) * spec.block_tokens
        self.fixed = max_columns is not None
        self.dtype = first.keys.dtype
        each = self._pages_for(columns)
        capacity = each * self.page_tokens
        blocks, page_blocks = capacity // spec.block_tokens, self.page_tokens // spec.block_tokens
        self.book = PageBook(batch, each, batch * each)
        shape = (batch * each, 2, self.page_tokens, *first.keys.shape[2:])
        self._growing: dict[str, GrowingPool] = {}
        self.kv = self._new_pool("kv", shape, kv_dtype or self.dtype, device)
        self.kv_scale = torch.ones(shape[3], dtype=torch.float32, device=device) if self.kv.dtype == FP8 else None
        shape = (batch * each, page_blocks, first.raw_keys.shape[2])
        self.index_keys = self._new_pool("index_keys", shape, first.raw_keys.dtype, device)
        self.raw_keys = self._new_raw_keys(batch, capacity, first.raw_keys)
        self.block_rotary = first.cos.new_empty((batch, blocks + 1, 2, first.cos.shape[2] // 2))
        self.visible = torch.zeros((batch, max_columns or capacity), dtype=torch.bool, device=device)
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        self.page_table = torch.from_numpy(self.book.rows.copy()).to(device)

    @property
    def batch(self) -> int:
        """Requests."""
        return self.raw_keys.shape[0]

    @property
    def device(self) -> torch.device:
        """Where everything lies."""
        return self.kv.device

    @property
    def capacity(self) -> int:
        """Tokens each request can hold."""
        return self.raw_keys.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        held = [getattr(self, name) for name in (*self._POOLS, *self._BY_REQUEST, "page_table", "kv_scale")]
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    _POOLS = ("kv", "index_keys")
    _BY_REQUEST = ("raw_keys", "block_rotary", "visible", "lengths")

    def _pages_for(self, tokens: int) -> int:
        return max(-(-tokens // self.page_tokens), 1)

    def reserve(self, columns: int, used: int) -> None:
        """Makes room for `columns` columns, of which the first `used` are filled. Amortised: copies seldom."""
        if columns > self.capacity:
            step = max(self.capacity // GROWTH, MIN_GROWTH_TOKENS)
            capacity = self._pages_for(max(columns, self.capacity + step)) * self.page_tokens
            opened = min(-(-used // self.block_tokens), self.block_rotary.shape[1] - 1)
            self.block_rotary = _longer(self.block_rotary, capacity // self.block_tokens + 1, opened)
            self.visible = _longer(self.visible, capacity, used, fill=False)
            # What tells the capacity comes last: where memory runs out before, the next call does it all again.
            self._add_raw_keys(capacity, used)
        each = self.capacity // self.page_tokens
        if each > self.book.rows.shape[1]:
            self._add_pages(self.book.missing(each))
            self.book.widen(each)
            self._bring_table()

    def _new_pool(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A pool of undefined pages, which gets longer where it lies if that can be."""
        made = None if self.fixed else new_pool(shape, dtype, device)
        if made is None:
            return torch.empty(shape, dtype=dtype, device=device)
        tensor, self._growing[name] = made
        return tensor

    def _new_raw_keys(self, batch: int, capacity: int, like: Tensor) -> Tensor:
        """Undefined raw keys [batch, capacity, index_dim]; where they can get longer, a token's lie side by side."""
        made = None if self.fixed else new_pool((capacity, batch, like.shape[2]), like.dtype, like.device)
        if made is None:
            return like.new_empty((batch, capacity, like.shape[2]))
        tensor, self._growing["raw_keys"] = made
        return tensor.transpose(0, 1)

    def _add_raw_keys(self, capacity: int, used: int) -> None:
        """Makes room for the raw keys of `capacity` tokens a request; the first `used` stay, copied where they must."""
        old, pool = self.raw_keys, self._growing.get("raw_keys")
        if pool is not None and pool.reaches(old, capacity):
            self.raw_keys = pool.tensor(capacity).transpose(0, 1)
        else:
            self.raw_keys = self._new_raw_keys(old.shape[0], capacity, old)
            self.raw_keys[:, :used] = old[:, :used]

    def _add_pages(self, count: int) -> None:
        """Makes the pools longer by so many pages; what they hold is copied where it cannot stay.

        Where memory runs out some pools may be longer than the book says, and nothing is lost.
        """
        if not count:
            return
        pages = self.book.pages + count
        for name in self._POOLS:
            old: Tensor = getattr(self, name)
            pool = self._growing.get(name)
            if pool is not None and pool.reaches(old, pages):
                new = pool.tensor(pages)
            else:
                new = self._new_pool(name, (pages, *old.shape[1:]), old.dtype, old.device)
                _bytes(new)[: old.shape[0]] = _bytes(old)
            setattr(self, name, new)
        self.book.pages = pages

    def _bring_table(self) -> None:
        """Brings the book's rows to the device: in place where the shape stays, as graphs hold on to it."""
        rows = torch.from_numpy(self.book.rows.copy())
        if rows.shape == self.page_table.shape:
            self.page_table.copy_(rows)
        else:
            self.page_table = rows.to(self.device)

    def thaw(self) -> None:
        """Copies tensors that were made in inference mode, which cannot be written outside it."""
        if not torch.is_inference_mode_enabled():
            # One by one: some may have been made anew in inference mode, and the others before.
            self.change(lambda stored: stored.clone() if stored.is_inference() else stored)

    def append(
        self,
        new: NewTokens,
        columns: int | Tensor,
        spec: QsaSpec,
        pooling: Pooling,
        max_position: int,
        queries: Queries | None = None,
    ) -> Reading:
        """Stores a pass's columns after the first `columns` (a 0-dim tensor for a static cache); there must be room.

        With `queries`, norms and rotary are applied to them and to the keys, and they are in what is returned.
        """
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
        reading = self.reading(request, position.flatten(), max_position)
        if queries is None:
            self._write(new, position, reading, spec, pooling)
        else:
            reading = self._prepare(new, queries, reading, spec, pooling)
        self.lengths.add_(added)
        return reading

    def _prepare(self, new: NewTokens, queries: Queries, reading: Reading, spec: QsaSpec, pooling: Pooling) -> Reading:
        """Norms, rotary and writing in one step; `reading` with the queries that come out of it."""
        half = self.block_rotary.shape[3]
        q, index_q = ops.prepare(
            queries.q.flatten(0, 1),
            new.keys.flatten(0, 1),
            new.values.flatten(0, 1),
            queries.index_q.flatten(0, 1),
            new.raw_keys.flatten(0, 1),
            queries.q_norm,
            queries.k_norm,
            queries.index_q_norm,
            pooling.norm_weight,
            new.cos[..., :half].flatten(0, 1),
            new.sin[..., :half].flatten(0, 1),
            self.block_rotary[:, :-1],
            pooling.eps,
            reading.keys,
            reading.values,
            self.page_table,
            self.kv_scale,
            self.kv_scale,
            reading.index_keys,
            self.page_table,
            None,
            self.raw_keys,
            reading.request,
            reading.position,
            reading.max_position,
            ops.pack_spec(spec),
        )
        return replace(reading, q=q, index_q=index_q)

    def _write(self, new: NewTokens, position: Tensor, reading: Reading, spec: QsaSpec, pooling: Pooling) -> None:
        """Writes what is normalised and rotated already; `position` [batch, columns]."""
        cos, sin = self._block_angles(new, position).unbind(1)
        place = (reading.request, reading.position, reading.max_position, ops.pack_spec(spec))
        ops.write_kv(
            new.keys.flatten(0, 1),
            new.values.flatten(0, 1),
            reading.keys,
            reading.values,
            self.page_table,
            self.kv_scale,
            self.kv_scale,
            *place,
        )
        ops.write_index_keys(
            new.raw_keys.flatten(0, 1),
            reading.index_keys,
            self.page_table,
            None,
            self.raw_keys,
            *place,
            pooling.norm_weight,
            cos,
            sin,
            pooling.eps,
        )

    def _block_angles(self, new: NewTokens, position: Tensor) -> Tensor:
        """cos and sin [batch * columns, 2, rotary_dim] at the first token of each column's block."""
        place = position.clamp(min=0)
        block = torch.div(place, self.block_tokens, rounding_mode="floor").long()
        opens = (position >= 0) & (place % self.block_tokens == 0)
        slot = torch.where(opens, block, self.block_rotary.shape[1] - 1)
        request = torch.arange(position.shape[0], device=position.device)[:, None]
        # One number stands for both dimensions of a pair.
        half = self.block_rotary.shape[3]
        opening = torch.stack((new.cos[..., :half], new.sin[..., :half]), dim=2)
        # Autocast may begin or end between passes, and angles with it change their dtype.
        self.block_rotary[request, slot] = opening.to(self.block_rotary.dtype)
        return self.block_rotary[request, block].flatten(0, 1).repeat(1, 1, 2)

    def reading(self, request: Tensor, position: Tensor, max_position: int) -> Reading:
        """The pools, for rows at `position` of `request`."""
        keys, values = self.kv.unbind(1)
        return Reading(self.index_keys, keys, values, self.kv_scale, self.page_table, request, position, max_position)

    def mark_static(self) -> None:
        """Tells torch.compile that the tensors stay where they are, as the stock static layer does with its own."""
        for name in (*self._POOLS, *self._BY_REQUEST, "page_table"):
            torch._dynamo.mark_static_address(getattr(self, name))

    def crop(self, keep: int, columns: int) -> None:
        """Forgets columns `keep .. columns`. Blocks that are cut open are pooled again when they fill up."""
        gone = self.visible[:, keep:columns]
        self.lengths.sub_(gone.sum(1, dtype=torch.int32))
        gone.zero_()
        self._part()

    def take_back(self, kept: Tensor, rows: int, columns: Tensor) -> None:
        """Keeps the first `kept` [batch] of the last `rows` of `columns` (0-dim) columns, all of them tokens."""
        steps = torch.arange(rows, device=kept.device)
        self.visible.index_copy_(1, columns - rows + steps, steps < kept[:, None])
        self.lengths.add_(kept - rows)

    def reset(self) -> None:
        """Forgets everything; keeps the memory."""
        self.lengths.zero_()
        self.visible.zero_()
        if self.book.shares:
            self._add_pages(max(self.book.rows.size - self.book.pages, 0))
            self.book.begin_anew()
            self._bring_table()

    def change(self, function: Callable[[Tensor], Tensor]) -> None:
        """Replaces every tensor by a function of it that copies or moves it; the pages stay whose they are."""
        for name in (*self._POOLS, *self._BY_REQUEST, "page_table", "kv_scale"):
            old: Tensor | None = getattr(self, name)
            if old is not None:
                setattr(self, name, function(old))
        self._let_go()

    def _let_go(self) -> None:
        """Gives back the memory of pools whose tensors lie elsewhere now."""
        self._growing = {name: pool for name, pool in self._growing.items() if pool.reaches(getattr(self, name), 1)}

    def choose(self, order: Tensor) -> None:
        """Request r becomes what request `order[r]` was: the device is read, full pages are shared, not copied.

        A store of fixed size is written in place, as long as the batch stays: compiled code and CUDA graphs hold on to
        its addresses.
        """
        order = order.to(self.device)
        sources, lengths = order.tolist(), self.lengths.tolist()
        full = [length // self.page_tokens for length in lengths]
        before = self.book.rows
        lacking = self.book.choose(sources, full)
        if lacking:
            self._add_pages(lacking)
            self.book.choose(sources, full)
        self._copy_open_pages(before[sources], [lengths[source] for source in sources])
        for name in self._BY_REQUEST:
            old: Tensor = getattr(self, name)
            new = old.index_select(0, order)
            if self.fixed and new.shape == old.shape and not old.is_inference():
                old.copy_(new)
            else:
                setattr(self, name, new)
        self._let_go()
        self._bring_table()

    def _part(self) -> None:
        """Gives each request pages of its own from the one on that it writes next."""
        if not self.book.shares:
            return
        lengths = self.lengths.tolist()
        full = [length // self.page_tokens for length in lengths]
        lacking, before = self.book.part(full)
        if lacking:
            self._add_pages(lacking)
            _, before = self.book.part(full)
        self._copy_open_pages(before, lengths)
        self._bring_table()

    def _copy_open_pages(self, before: Ids, lengths: Sequence[int]) -> None:
        """Copies the page that each request is in the middle of, where it has another one now."""
        pairs = []
        for request, length in enumerate(lengths):
            place = length // self.page_tokens
            if length % self.page_tokens and before[request, place] != self.book.rows[request, place]:
                pairs.append((int(before[request, place]), int(self.book.rows[request, place])))
        if pairs:
            old, new = torch.tensor(pairs, device=self.device).unbind(1)
            for name in self._POOLS:
                pool = _bytes(getattr(self, name))
                pool[new] = pool[old]

    def in_columns(self, columns: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values [batch, kv_heads, columns, head_dim] and raw keys [batch, columns, index_dim].

        As stock caches hold them; zeros where a column is padding.
        """
        visible = self.visible[:, :columns]
        place = (visible.cumsum(1) - 1).clamp(min=0)
        request = torch.arange(self.batch, device=place.device)[:, None]
        page = self.page_table[request, (place // self.page_tokens).clamp(max=self.page_table.shape[1] - 1)].long()
        slot = place % self.page_tokens

        def laid_out(found: Tensor) -> Tensor:
            shown = visible.view(*visible.shape, *(1,) * (found.ndim - 2))
            return torch.where(shown, found, found.new_zeros(()))

        def stored(half: int) -> Tensor:
            found = _bytes(self.kv)[page, half, slot].view(self.kv.dtype).to(self.dtype)
            return laid_out(found).transpose(1, 2)

        return stored(0), stored(1), laid_out(self.raw_keys[request, place])


def _bytes(tensor: Tensor) -> Tensor:
    """A tensor in a dtype that torch can index and copy: FP8 as bytes, others as they are."""
    return tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor


def _longer(old: Tensor, size: int, used: int, fill: bool | None = None) -> Tensor:
    """A tensor of `size` along axis 1 that begins with the first `used` of another's; the rest undefined, or filled."""
    shape = (old.shape[0], size, *old.shape[2:])
    new = old.new_empty(shape) if fill is None else old.new_full(shape, fill)
    new[:, :used] = old[:, :used]
    return new
