"""The values every stage hands to the next: what was asked, and what was found.

Read this file first. Each value is frozen and holds tensors beside host numbers; nothing here validates
(`check.py` does), launches, or imports another file of this package. Dimensions are named in brackets:

    rows            query tokens of this call, of all requests
    requests        sequences of this call
    pages           physical pages of a cache, in any order
    page_tokens     tokens per page of a KV cache
    page_blocks     blocks per page of an index cache
    table_pages     page-table entries per request

A row that stands at position p of its request sees tokens 0..p: floor((p + 1) / block_tokens) complete blocks, and a
tail of the (p + 1) mod block_tokens tokens after them. A row with request -1 or a negative position is padding: it sees
nothing, selects nothing, and gets output 0 and lse -inf.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

MAX_TOP_BLOCKS = 2048
"""Largest number of blocks a row can select: the largest budget any engine offers (8,192 tokens of 4-token blocks)."""

MAX_TOKENS = 1 << 20
"""Longest request, in tokens: 262,144 blocks of 4, the range the exact top-k is built for."""

SEGMENT_BLOCKS = 16
"""Neighbouring blocks whose largest score stands for them when blocks are selected."""

MAX_HEADS_PER_KV_HEAD = 32
"""Largest number of query heads that share one KV head."""

FP8 = torch.float8_e4m3fn
"""The one FP8 storage type of the caches (E4M3 without infinities, NaN is 0x7F and 0xFF)."""


def _describe(tensor: Tensor | None) -> str:
    if tensor is None:
        return "none"
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


@dataclass(frozen=True)
class QsaSpec:
    """The shape of one sparse attention layer, as one rank sees it.

    The defaults are the released model's (Qwen3.8-Flash-Next): 24 query heads on 2 KV heads of 256, four index heads
    of 128, and a budget of 2,048 tokens in blocks of 4.

    >>> spec = QsaSpec()
    >>> spec.budget, spec.selection_width, spec.heads_per_kv_head
    (2048, 2051, 12)
    >>> spec.softmax_scale, round(spec.score_scale, 6)
    (0.0625, 0.088388)
    >>> spec.visible_blocks(841), spec.tail_tokens(841)    # position 841 sees 842 tokens
    (210, 2)
    """

    q_heads: int = 24
    kv_heads: int = 2
    head_dim: int = 256
    index_heads: int = 4
    index_dim: int = 128
    block_tokens: int = 4
    top_blocks: int = 512

    @property
    def budget(self) -> int:
        """Tokens in a full selection, without the tail."""
        return self.top_blocks * self.block_tokens

    @property
    def selection_width(self) -> int:
        """Most tokens a row attends to: the budget and the longest tail."""
        return self.budget + self.block_tokens - 1

    @property
    def heads_per_kv_head(self) -> int:
        """Query heads that share one KV head."""
        return self.q_heads // self.kv_heads

    @property
    def softmax_scale(self) -> float:
        """head_dim^(-1/2), applied to the attention logits."""
        return 1.0 / math.sqrt(self.head_dim)

    @property
    def score_scale(self) -> float:
        """index_dim^(-1/2), applied to the head sum of the index scores."""
        return 1.0 / math.sqrt(self.index_dim)

    def visible_blocks(self, position: int) -> int:
        """Complete blocks that a row at `position` sees; 0 for a negative position."""
        return max(position + 1, 0) // self.block_tokens

    def tail_tokens(self, position: int) -> int:
        """Tokens after the last complete block that a row at `position` sees; 0 for a negative position."""
        return max(position + 1, 0) % self.block_tokens

    def selects_everything(self, max_position: int) -> bool:
        """Whether no row up to `max_position` can see more blocks than it may select."""
        return self.visible_blocks(max_position) <= self.top_blocks


class Run(NamedTuple):
    """Neighbouring rows of one request, in host numbers.

    request        of every row
    start, stop    the rows; `stop` is the one after the last
    last_position  host bound on the last row's position. Positions ascend, so the row n before it stands at
                   last_position - n or before.

    Rows 2, 3 and 4 are tokens 5, 6 and 7 of request 0; the first two of them reach token 6.

    >>> Run(request=0, start=2, stop=5, last_position=7).within(2, 4)
    Run(request=0, start=0, stop=2, last_position=6)
    """

    request: int
    start: int
    stop: int
    last_position: int

    def within(self, start: int, stop: int) -> Run:
        """What the run has of the rows start to stop, counted from `start`; they must share a row."""
        last = min(self.stop, stop)
        return Run(self.request, max(self.start, start) - start, last - start, self.last_position - (self.stop - last))


@dataclass(frozen=True)
class Rows:
    """Which query token each row is: its request and its position there.

    request       [rows] int32, index into the caches' page tables; -1 marks padding
    position      [rows] int32, index of the token in its request, from 0; negative marks padding
    max_position  host bound on every position (-1 where there is no row): plans are sized from it without a device sync
    runs          the live rows, request by request, in host numbers and in order; None where the host does not know
                  them. Padding between a request's rows makes two runs of them.

    Rows of one request stand next to each other in ascending position; requests may come in any order.

    `runs` may change which kernel serves a row, and with that the last bits of its scores. It is a promise, as
    `max_position` is. Where the tensors break it nothing is read or written out of place: a padding row in a run sees
    nothing; a row of another request than its run's is served as what it is, or sees nothing; a row past its run's
    bound may see no further than the bound. A row outside every run is served as what it is.

    Two requests in one call: the first prefills tokens 5..7 of 8, the second decodes its token 3, one row is padding.

    >>> rows = Rows.from_lengths(query_lengths=[3, 1], context_lengths=[8, 4], pad_to=5)
    >>> rows.request.tolist(), rows.position.tolist()
    ([0, 0, 0, 1, -1], [5, 6, 7, 3, -1])
    >>> rows.max_position, rows.visible_blocks(QsaSpec()).tolist()
    (7, [1, 1, 2, 1, 0])
    >>> rows.runs
    (Run(request=0, start=0, stop=3, last_position=7), Run(request=1, start=3, stop=4, last_position=3))
    """

    request: Tensor
    position: Tensor
    max_position: int
    runs: tuple[Run, ...] | None = None

    @staticmethod
    def from_lengths(
        query_lengths: Sequence[int],
        context_lengths: Sequence[int],
        *,
        pad_to: int | None = None,
        device: torch.device | str = "cpu",
    ) -> Rows:
        """Rows of requests whose last `query_lengths[r]` of `context_lengths[r]` tokens are the queries.

        `pad_to` appends padding up to that many rows. A request may have zero rows. Raises ValueError for lengths that
        do not pair up, more queries than tokens, or more rows than `pad_to`.
        """
        if len(query_lengths) != len(context_lengths):
            raise ValueError(f"wanted as many contexts as queries; got {len(query_lengths)}, {len(context_lengths)}")
        if any(not 0 <= q <= c for q, c in zip(query_lengths, context_lengths, strict=True)):
            pairs = list(zip(query_lengths, context_lengths, strict=True))
            raise ValueError(f"wanted 0 <= queries <= context tokens in each request; got {pairs}")
        if pad_to is not None and pad_to < sum(query_lengths):
            raise ValueError(f"pad_to: wanted at least the {sum(query_lengths)} rows; got {pad_to}")
        request: list[Tensor] = []
        position: list[Tensor] = []
        runs: list[Run] = []
        start = 0
        for index, (queries, context) in enumerate(zip(query_lengths, context_lengths, strict=True)):
            request.append(torch.full((queries,), index, dtype=torch.int32))
            position.append(torch.arange(context - queries, context, dtype=torch.int32))
            if queries > 0:
                runs.append(Run(index, start, start + queries, context - 1))
                start += queries
        padding = 0 if pad_to is None else pad_to - sum(query_lengths)
        for parts in (request, position):
            parts.append(torch.full((padding,), -1, dtype=torch.int32))
        reached = [c for q, c in zip(query_lengths, context_lengths, strict=True) if q > 0]
        last = max(reached, default=0) - 1
        return Rows(torch.cat(request).to(device), torch.cat(position).to(device), last, tuple(runs))

    @staticmethod
    def from_tensors(
        request: Tensor, position: Tensor, max_position: int | None = None, runs: Sequence[Run] | None = None
    ) -> Rows:
        """Rows from an engine's own tensors, any integer dtype, converted to int32.

        Without `max_position` it is read from `position`, which synchronises with a GPU. Numbers beyond int32 become
        its nearest, which no call serves. `runs` says on the host which rows are whose, where the engine knows it:
        long requests of a batch are then scored faster on Volta and Turing. Raises ValueError for other dtypes.
        """
        for name, tensor in (("request", request), ("position", position)):
            if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
                raise ValueError(f"{name}: wanted an integer dtype; got {tensor.dtype}")
        if max_position is None:
            max_position = int(position.max()) if position.numel() else -1
        limits = torch.iinfo(torch.int32)
        request, position = (t.clamp(limits.min, limits.max).to(torch.int32) for t in (request, position))
        return Rows(request, position, max(int(max_position), -1), None if runs is None else tuple(runs))

    @property
    def count(self) -> int:
        """Rows of the call, padding included."""
        return self.request.shape[0]

    @property
    def live(self) -> Tensor:
        """[rows] bool, False for padding."""
        return (self.request >= 0) & (self.position >= 0)

    @property
    def visible_tokens(self) -> Tensor:
        """[rows] int32, tokens each row sees; 0 for padding."""
        return torch.where(self.live, self.position + 1, 0)

    def visible_blocks(self, spec: QsaSpec) -> Tensor:
        """[rows] int32, complete blocks each row sees; 0 for padding."""
        return torch.div(self.visible_tokens, spec.block_tokens, rounding_mode="floor")

    @cached_property
    def run_fault(self) -> tuple[str, str] | None:
        """What `runs` should hold and what it holds, where that cannot be. Found once: layers share their rows."""
        end, rows = 0, self.count
        for run in self.runs or ():
            if not (isinstance(run, Run) and type(run[0]) is type(run[1]) is type(run[2]) is type(run[3]) is int):
                return "runs of four whole numbers", repr(run)
            request, start, stop, last = run
            if not (request >= 0 and end <= start < stop <= rows):
                return f"runs of requests from 0, one after the other within the {rows} rows", repr(run)
            # The first row's position is at least 0.
            if not stop - start - 1 <= last <= self.max_position:
                wanted = f"a last_position from stop - start - 1 to max_position = {self.max_position}"
                return wanted, repr(run)
            end = stop
        return None

    @cached_property
    def highest_request(self) -> int:
        """Largest request that `runs` names; -1 where it names none."""
        return max((run.request for run in self.runs or ()), default=-1)

    def slice(self, start: int, stop: int) -> Rows:
        """Rows start to stop, with the same bound on positions, and what their runs have of them."""
        runs = self.runs
        if runs is not None and not (start == 0 and stop >= self.count):
            first = bisect_right(runs, start, key=lambda run: run.stop)
            last = bisect_left(runs, stop, key=lambda run: run.start)
            runs = tuple(run.within(start, stop) for run in runs[first:last]) if start < stop else ()
        return Rows(self.request[start:stop], self.position[start:stop], self.max_position, runs)

    def __repr__(self) -> str:
        return f"Rows({self.count} rows, max_position={self.max_position}, device={self.request.device})"


@dataclass(frozen=True)
class KvCache:
    """Paged keys and values of one layer.

    keys, values  [pages, page_tokens, kv_heads, head_dim] FP32, FP16, BF16 or FP8-E4M3; any strides, last one 1
    page_table    [requests, table_pages] int32; token t of request r lies on page `page_table[r, t // page_tokens]`
                  at `t % page_tokens`. An entry of -1 is a hole: its tokens do not exist.
    k_scale, v_scale  what stored FP8 numbers are multiplied by: a float, or [kv_heads] FP32; None for other dtypes

    Three pages of 4 tokens, of which request 0 uses pages 2 and 0, in this order:

    >>> pool = torch.zeros(3, 2, 4, 1, 8)
    >>> cache = KvCache.interleaved(pool, torch.tensor([[2, 0]], dtype=torch.int32))
    >>> cache.page_tokens, cache.capacity_tokens, cache.keys.shape
    (4, 8, torch.Size([3, 4, 1, 8]))
    """

    keys: Tensor
    values: Tensor
    page_table: Tensor
    k_scale: float | Tensor | None = None
    v_scale: float | Tensor | None = None

    @staticmethod
    def interleaved(
        pool: Tensor,
        page_table: Tensor,
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
    ) -> KvCache:
        """A cache over one pool `[pages, 2, page_tokens, kv_heads, head_dim]`: keys at 0, values at 1 of axis 1."""
        return KvCache(pool[:, 0], pool[:, 1], page_table, k_scale, v_scale)

    @staticmethod
    def packed(
        pool: Tensor,
        page_table: Tensor,
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
    ) -> KvCache:
        """A cache over one pool `[pages, page_tokens, kv_heads, 2 * head_dim]`: each head's key, then its value."""
        head_dim = pool.shape[-1] // 2
        return KvCache(pool[..., :head_dim], pool[..., head_dim:], page_table, k_scale, v_scale)

    @property
    def page_tokens(self) -> int:
        """Tokens per page."""
        return self.keys.shape[1]

    @property
    def requests(self) -> int:
        """Requests in the page table."""
        return self.page_table.shape[0]

    @property
    def capacity_tokens(self) -> int:
        """Tokens one request can hold: page-table entries times tokens per page."""
        return self.page_table.shape[1] * self.page_tokens

    def __repr__(self) -> str:
        return f"KvCache(keys={_describe(self.keys)}, page_table={_describe(self.page_table)})"


@dataclass(frozen=True)
class IndexCache:
    """Paged index keys of one layer: one pooled, normalised and rotated key per complete block.

    keys          [pages, page_blocks, index_dim] FP32, FP16, BF16 or FP8-E4M3; any strides, last one 1
    page_table    [requests, table_pages] int32; block b of request r lies on page `page_table[r, b // page_blocks]`
                  at `b % page_blocks`. An entry of -1 is a hole: its blocks score -inf and are never selected.
    scale         what stored FP8 numbers are multiplied by, a float; None for other dtypes
    raw_keys      [requests, ring_tokens, index_dim], the latest raw keys (before pooling), token t at
                  `t % ring_tokens`; a multiple of block_tokens. Needed where index keys are written: the block that
                  a call completes may have begun in an earlier call. A ring of n tokens lets the last
                  n - block_tokens + 1 tokens be taken back.

    >>> cache = IndexCache(torch.zeros(3, 16, 128), torch.tensor([[2, 0]], dtype=torch.int32))
    >>> cache.page_blocks, cache.capacity_blocks
    (16, 32)
    """

    keys: Tensor
    page_table: Tensor
    scale: float | None = None
    raw_keys: Tensor | None = None

    @property
    def page_blocks(self) -> int:
        """Blocks per page."""
        return self.keys.shape[1]

    @property
    def requests(self) -> int:
        """Requests in the page table."""
        return self.page_table.shape[0]

    @property
    def capacity_blocks(self) -> int:
        """Blocks one request can hold: page-table entries times blocks per page."""
        return self.page_table.shape[1] * self.page_blocks

    def __repr__(self) -> str:
        return f"IndexCache(keys={_describe(self.keys)}, page_table={_describe(self.page_table)})"


@dataclass(frozen=True)
class Projected:
    """What a layer's projections give for some rows, and the norms and rotary angles that `prepare` applies to it.

    q, keys, values    [rows, q_heads, head_dim], and two of [rows, kv_heads, head_dim]; last strides are 1
    index_q, raw_keys  [rows, index_heads, index_dim], [rows, index_dim]; all five in one dtype, FP32, FP16 or BF16
    *_norm, eps        [head_dim] or [index_dim], in one dtype, of RMS norms: x is multiplied by 1 + weight
    cos, sin           [positions, half], more of them than `Rows.max_position`; with `first_angles` [rows, half].
                       Dimensions j and j + half rotate together by angle j; half is rotary_dim / 2.
    first_angles       [requests, ring_tokens / block_tokens, 2, half]: a ring of cos and sin of blocks' first tokens

    >>> x, weight, turn = torch.zeros(5, 2, 256), torch.zeros(256), torch.ones(4096, 32)
    >>> Projected(x, x, x, x[..., :8], x[:, 0, :8], weight, weight, weight[:8], weight[:8], turn, turn)
    Projected(q=float32[5, 2, 256], cos=float32[4096, 32])
    """

    q: Tensor
    keys: Tensor
    values: Tensor
    index_q: Tensor
    raw_keys: Tensor
    q_norm: Tensor
    k_norm: Tensor
    index_q_norm: Tensor
    index_k_norm: Tensor
    cos: Tensor
    sin: Tensor
    first_angles: Tensor | None = None
    eps: float = 1e-6

    def __repr__(self) -> str:
        return f"Projected(q={_describe(self.q)}, cos={_describe(self.cos)})"


@dataclass(frozen=True)
class Scores:
    """Index scores of some rows, and how many of them each row may look at.

    values   [rows, width] FP32; columns from `visible[row]` on are undefined and never read
    visible  [rows] int32, complete blocks the row sees
    maxima   [rows, segments] FP32, the largest score of each SEGMENT_BLOCKS neighbouring blocks, NaN left out, where
             the scorer knows it; columns past a row's last visible block are undefined. None where it must be found.

    Row 0 sees three blocks; its fourth column is left over from another use of the memory.

    >>> scores = Scores(torch.tensor([[0.5, 0.0, 2.0, float("nan")]]), torch.tensor([3], dtype=torch.int32))
    >>> scores.values[0, : scores.visible[0]].tolist()
    [0.5, 0.0, 2.0]
    """

    values: Tensor
    visible: Tensor
    maxima: Tensor | None = None


@dataclass(frozen=True)
class Selection:
    """The blocks each row attends to, besides its tail.

    blocks  [rows, top_blocks] int32, `count[row]` block ids in ascending order, then -1
    count   [rows] int32

    >>> spec = QsaSpec(top_blocks=2)
    >>> rows = Rows.from_lengths([1], [14])              # position 13: three blocks, tail of tokens 12 and 13
    >>> chosen = Selection(torch.tensor([[0, 2]], dtype=torch.int32), torch.tensor([2], dtype=torch.int32))
    >>> table = chosen.to_token_table(rows, spec, count_column=True)
    >>> table.tolist()
    [[0, 1, 2, 3, 8, 9, 10, 11, 12, 13, -1, 10]]
    >>> Selection.from_token_table(table, rows, spec, count_column=True).blocks.tolist()
    [[0, 2]]
    """

    blocks: Tensor
    count: Tensor

    @property
    def rows(self) -> int:
        """Rows of the call, padding included."""
        return self.blocks.shape[0]

    def slice(self, start: int, stop: int) -> Selection:
        """The selection of rows start to stop: a view."""
        return Selection(self.blocks[start:stop], self.count[start:stop])

    def to_token_table(self, rows: Rows, spec: QsaSpec, *, count_column: bool = False) -> Tensor:
        """The token indices engines use: [rows, selection_width (+ 1)] int32.

        Tokens of the selected blocks in ascending order, then the tail, then -1; with `count_column` the last column
        holds how many tokens there are.
        """
        block_tokens, device = spec.block_tokens, self.blocks.device
        offsets = torch.arange(block_tokens, dtype=torch.int32, device=device)
        width = spec.selection_width
        chosen = torch.arange(self.blocks.shape[1], device=device) < self.count[:, None]
        tokens = torch.where(chosen[..., None], self.blocks[..., None] * block_tokens + offsets, -1).flatten(1)
        table = torch.full((self.rows, width + 1), -1, dtype=torch.int32, device=device)
        table[:, : tokens.shape[1]] = tokens[:, :width]
        visible = rows.visible_tokens
        tail = visible % block_tokens
        first = visible - tail
        column = self.count[:, None] * block_tokens + offsets
        # Offsets past the tail land in the extra column, which is dropped or overwritten below.
        column = torch.where(offsets < tail[:, None], column, width)
        table.scatter_(1, column.long(), (first[:, None] + offsets).to(torch.int32))
        if not count_column:
            return table[:, :width].contiguous()
        table[:, width] = self.count * block_tokens + tail
        return table

    @staticmethod
    def from_token_table(table: Tensor, rows: Rows, spec: QsaSpec, *, count_column: bool = False) -> Selection:
        """The selection behind an engine's token table [rows, any width] of an integer dtype, in any order.

        Entries of -1 are passed over. With `count_column` the last column says how many of the first entries are read.
        A block is selected when its first token is in the table, once or more often; the tail is implied by the row's
        position. Where a row names more than `top_blocks` blocks, `count` says how many, and no call takes it.
        """
        tokens = table
        if count_column:
            tokens = table[:, :-1]
            column = torch.arange(tokens.shape[1], device=table.device)
            tokens = torch.where(column < table[:, -1:], tokens, -1)
        complete = (rows.visible_blocks(spec) * spec.block_tokens)[:, None]
        starts = (tokens >= 0) & (tokens % spec.block_tokens == 0) & (tokens < complete)
        nothing = torch.iinfo(torch.int32).max
        blocks = torch.where(starts, tokens // spec.block_tokens, nothing).sort(dim=1).values
        blocks[:, 1:][blocks[:, 1:] == blocks[:, :-1]] = nothing
        count = (blocks < nothing).sum(dim=1, dtype=torch.int32)
        blocks = blocks.sort(dim=1).values[:, : spec.top_blocks]
        chosen = torch.arange(blocks.shape[1], device=table.device) < count[:, None]
        blocks = torch.where(chosen, blocks, -1).to(torch.int32)
        if blocks.shape[1] < spec.top_blocks:
            blocks = torch.nn.functional.pad(blocks, (0, spec.top_blocks - blocks.shape[1]), value=-1)
        return Selection(blocks.contiguous(), count)

    def __repr__(self) -> str:
        return f"Selection(blocks={_describe(self.blocks)})"


@dataclass(frozen=True)
class Worklist:
    """What each group of rows has to read: the union of its rows' blocks, with a mask bit per row.

    Group g serves rows `group_rows[g] .. group_rows[g + 1]`, all of one request, and reads the entries
    `group_entries[g] .. group_entries[g + 1]`, ascending in `block`. Bit i of `row_mask` says that the group's row i
    attends to the block, up to the row's own position: an open block (the tail) is an entry like any other.

    group_rows     [groups + 1] int64, on the host
    group_entries  [groups + 1] int64, on the host
    block          [entries] int32, logical block id
    row_mask       [entries] int64, bit i for row i of the group; at most 64 rows (bit 63 is the sign)

    Two rows of one request, at positions 13 and 14, selected blocks {0, 2} and {1, 2}; both have tails in block 3.

    >>> work = Worklist(torch.tensor([0, 2]), torch.tensor([0, 4]),
    ...                 torch.tensor([0, 1, 2, 3], dtype=torch.int32), torch.tensor([0b01, 0b10, 0b11, 0b11]))
    >>> work.groups, work.union_ratio(blocks_per_row=3)
    (1, 1.3333333333333333)
    """

    group_rows: Tensor
    group_entries: Tensor
    block: Tensor
    row_mask: Tensor

    @property
    def groups(self) -> int:
        """Number of groups."""
        return self.group_rows.shape[0] - 1

    def union_ratio(self, blocks_per_row: float) -> float:
        """Mean entries of a group as a multiple of one row's selection."""
        return self.block.shape[0] / max(self.groups, 1) / blocks_per_row


@dataclass(frozen=True)
class Partial:
    """Attention over parts of each row's selection, before they are merged.

    output  [parts, rows, q_heads, head_dim] FP32, normalised within its part; 0 where a part sees nothing
    lse     [parts, rows, q_heads] FP32, natural log-sum-exp of the part's scaled logits; -inf where it sees nothing

    >>> part = Partial(torch.zeros(1, 3, 24, 256), torch.full((1, 3, 24), float("-inf")))
    >>> part.parts
    1
    """

    output: Tensor
    lse: Tensor

    @property
    def parts(self) -> int:
        """Number of parts."""
        return self.output.shape[0]


__all__ = [
    "FP8",
    "MAX_HEADS_PER_KV_HEAD",
    "MAX_TOKENS",
    "MAX_TOP_BLOCKS",
    "SEGMENT_BLOCKS",
    "IndexCache",
    "KvCache",
    "Partial",
    "Projected",
    "QsaSpec",
    "Rows",
    "Run",
    "Scores",
    "Selection",
    "Worklist",
]
