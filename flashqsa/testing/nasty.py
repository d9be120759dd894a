"""Scores, caches and raw keys that broke other implementations, each kind under a name.

Score builders return `Scores` whose columns past a row's visible blocks are poisoned; `NASTY_SCORES` lists those that a
top-k is run on, with the k that hurts. All are right when they equal a full sort by (score descending, id ascending).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from flashqsa.values import FP8, IndexCache, KvCache, QsaSpec, Rows, Scores, Selection


def scores_of(values: Tensor, visible: list[int] | None = None, width: int | None = None) -> Scores:
    """Scores over `values` [rows, n], by default all visible, in a buffer whose other columns hold NaN and +inf."""
    rows, columns = values.shape
    seen = torch.tensor([columns] * rows if visible is None else visible, dtype=torch.int32)
    buffer = torch.full((rows, width or columns + 3), float("nan"))
    buffer[:, 1::2] = float("inf")
    for row in range(rows):
        buffer[row, : int(seen[row])] = values[row, : int(seen[row])]
    return Scores(buffer, seen)


def _shuffled(values: Tensor, rows: int, seed: int = 0) -> Tensor:
    """[rows, n], each row its own permutation of values [n]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([values[torch.randperm(values.numel(), generator=generator)] for _ in range(rows)])


def one_bin_overflow(length: int = 16385, rows: int = 33) -> Scores:
    """Distinct scores in [1.0, 1.245): one bin of the top 11 FP32 bits, or of the top 8 FP16 bits, holds them all."""
    return scores_of(_shuffled(1.0 + torch.arange(length) * (0.2449 / length), rows))


def fp16_twins(twins: int = 4096, larger: int = 100) -> Scores:
    """Scores 1 + i * 2^-23, which one FP16 value stands for, and a few that are clearly larger."""
    near = 1.0 + torch.arange(twins) * 2.0**-23
    return scores_of(_shuffled(torch.cat([near, 2.0 + torch.arange(larger)]), 3))


def crowded_bin(held: int, length: int) -> Scores:
    """`held` distinct scores in [1.0, 1.245), one bin, among a row of others that are all lower.

    Shuffled, ascending and descending: whichever end is dropped, the largest score goes in one row.
    """
    crowd = 1.0 + torch.arange(held) * (0.2449 / held)
    ascending = torch.cat([0.25 + torch.arange(length - held) * 2.0**-20, crowd])
    return scores_of(torch.cat([_shuffled(ascending, 1), torch.stack([ascending, ascending.flip(0)])]))


def exact_bin_total(top_blocks: int = 512, above: int = 200) -> Scores:
    """`above` scores over 4, and a bin near 1 that holds exactly what is still needed; the rest is near 0.1."""
    parts = [4.0 + torch.arange(above) / 64, 1.0 + torch.arange(top_blocks - above) * 2.0**-20]
    return scores_of(_shuffled(torch.cat([*parts, 0.1 + torch.arange(3000) * 2.0**-16]), 4))


def near_ties(length: int = 9407) -> Scores:
    """Scores that all lie within 2^-10 of each other, in steps of one FP32 unit, with some equal pairs."""
    return scores_of(_shuffled(1.0 + (torch.arange(length) // 2 * 2) * 2.0**-23, 3))


def tie_plateau(length: int = 4097, value: float = 0.75) -> Scores:
    """A row of one value: the lowest ids win."""
    return scores_of(torch.full((2, length), value))


def quantised_ties(visible: int = 1342, rows: int = 64, width: int | None = None) -> Scores:
    """Scores round(gauss * 100) / 100, of which dozens to hundreds equal the one at the cut."""
    generator = torch.Generator().manual_seed(visible)
    values = (torch.randn(rows, visible, generator=generator) * 100).round() / 100
    return scores_of(values, width=width)


def ties_at_zero(visible: int = 530, rows: int = 64) -> Scores:
    """Index scores of independent products just above the budget: 1 in 16 is 0, so the cut lies among the zeros."""
    generator = torch.Generator().manual_seed(visible)
    return scores_of(torch.relu(torch.randn(rows, 4, visible, generator=generator)).sum(dim=1))


def distinct_blocks_with_tail(blocks: int = 600) -> Scores:
    """One row of distinct scores; with its tail of 3 it must attend to 4 tokens of each of 512 blocks, 2,051 in all."""
    return scores_of(_shuffled(1.0 + torch.arange(blocks) * 2.0**-10, 1))


def beyond_fp16(length: int = 1001, rows: int = 149) -> Scores:
    """Scores over 65,504, all +inf in FP16; the row length is no multiple of any vector width."""
    return scores_of(_shuffled(65536.0 + torch.arange(length) * 2.0**-3, rows))


def below_fp16(length: int = 1001, rows: int = 149) -> Scores:
    """Fewer than 512 scores above -65,504: the cut lies where FP16 tile-fill values lie."""
    values = torch.cat([-60000.0 - torch.arange(100), -65536.0 - torch.arange(length - 100) * 2.0**-3])
    return scores_of(_shuffled(values, rows))


def infinite_floor(length: int = 600, finite: int = 200) -> Scores:
    """200 finite scores and 400 of -inf, which are never selected."""
    values = torch.cat([-1e30 - torch.arange(finite) * 1e28, torch.full((length - finite,), float("-inf"))])
    return scores_of(_shuffled(values, 5))


def one_nan(length: int = 600) -> Scores:
    """NaN of either sign among 600 scores, which is never selected; a row of nothing else selects nothing."""
    values = _shuffled(torch.arange(length) * 0.5, 4)
    values[0, 7] = float("nan")
    values[1, 599] = -float("nan")
    values[2, ::3] = float("nan")
    values[3] = float("nan")
    return scores_of(values)


def positive_infinities(length: int = 700, infinite: int = 520) -> Scores:
    """More scores of +inf than blocks to select: ties like others."""
    values = torch.arange(length) * 1.0
    values[-infinite:] = float("inf")
    return scores_of(_shuffled(values, 3))


def signed_zeros(length: int = 700) -> Scores:
    """-0.0 and 0.0 in turn, which are equal, and 100 scores below them."""
    values = torch.zeros(length)
    values[::2] = -0.0
    values[50:150] = -1.0
    return scores_of(values[None])


def subnormals(length: int = 900) -> Scores:
    """Distinct subnormal scores, which a kernel that flushes them to 0 takes for ties."""
    return scores_of(_shuffled(torch.arange(length) * 2.0**-149, 3))


def short_rows() -> Scores:
    """Rows that see fewer blocks than k: contexts of 1, 3, 4, 7, 100 and 2,047 tokens, and padding."""
    visible = [0, 0, 1, 1, 25, 511, 0]
    return scores_of(_shuffled(torch.arange(511) * 1.0, len(visible)), visible)


def garbage_past_prefix(width: int = 65536) -> Scores:
    """Rows of 5, 600 and 2,000 visible blocks in a buffer of 65,536 columns whose rest is NaN and +inf."""
    return scores_of(_shuffled(torch.rand(2000, generator=torch.Generator().manual_seed(3)), 3), [5, 600, 2000], width)


def staggered_windows() -> Scores:
    """Rows of 50, 100, 131, 0 and 67 visible blocks: no window is a multiple of a tile, and one is empty."""
    return scores_of(_shuffled(torch.arange(131) * 1.0, 5), [50, 100, 131, 0, 67])


def long_row(length: int = 65536) -> Scores:
    """One row of a long context; 65,536 blocks are 262,144 tokens and one more than a grid's y and z limit."""
    generator = torch.Generator().manual_seed(length)
    return scores_of((torch.rand(1, length, generator=generator) * 4096).round() / 64)


def many_rows(rows: int = 65537) -> Scores:
    """More rows than a grid's y and z limit, of 12 blocks each."""
    generator = torch.Generator().manual_seed(rows)
    return scores_of(torch.randint(0, 6, (rows, 12), generator=generator).float())


@dataclass(frozen=True)
class NastyScores:
    """A named score builder and the numbers of blocks to select from its scores."""

    name: str
    build: Callable[[], Scores]
    top_blocks: tuple[int, ...] = (512,)

    def __str__(self) -> str:
        return self.name


NASTY_SCORES: tuple[NastyScores, ...] = (
    NastyScores("one-bin-16384", partial(one_bin_overflow, 16384), (512, 1024, 2048)),
    NastyScores("one-bin-16385", partial(one_bin_overflow, 16385), (512, 1024, 2048)),
    NastyScores("one-bin-3709", partial(one_bin_overflow, 3709, 3)),
    NastyScores("one-bin-4097", partial(one_bin_overflow, 4097, 3)),
    NastyScores("crowded-bin-3709-of-8192", partial(crowded_bin, 3709, 8192)),
    NastyScores("crowded-bin-4097-of-32768", partial(crowded_bin, 4097, 32768)),
    NastyScores("fp16-twins", fp16_twins),
    NastyScores("exact-bin-total", exact_bin_total, (511, 512, 513)),
    NastyScores("near-ties", near_ties),
    NastyScores("plateau-513", partial(tie_plateau, 513)),
    NastyScores("plateau-4097", partial(tie_plateau, 4097), (512, 2048)),
    NastyScores("plateau-65536", partial(tie_plateau, 65536)),
    NastyScores("plateau-of-zeros", partial(tie_plateau, 600, 0.0)),
    *(NastyScores(f"quantised-ties-{n}", partial(quantised_ties, n)) for n in (480, 512, 768, 1342, 8448)),
    *(NastyScores(f"ties-at-zero-{n}", partial(ties_at_zero, n)) for n in (513, 530, 546, 560)),
    NastyScores("distinct-blocks-with-tail", distinct_blocks_with_tail),
    NastyScores("beyond-fp16", beyond_fp16),
    NastyScores("below-fp16", below_fp16),
    NastyScores("infinite-floor", infinite_floor),
    NastyScores("one-nan", one_nan, (512, 599, 600)),
    NastyScores("positive-infinities", positive_infinities),
    NastyScores("signed-zeros", signed_zeros),
    NastyScores("subnormals", subnormals),
    NastyScores("short-rows", short_rows),
    NastyScores("garbage-past-prefix", garbage_past_prefix),
    NastyScores("staggered-windows", staggered_windows, (1, 66, 512)),
    *(NastyScores(f"long-row-{n}", partial(long_row, n)) for n in (24281, 24520, 32768, 65535, 65536)),
    NastyScores("many-rows", many_rows, (5,)),
)


@dataclass(frozen=True)
class IndexCall:
    """The arguments of one `select_blocks` call.

    index_q  [rows, index_heads, index_dim]
    """

    index_q: Tensor
    index_cache: IndexCache
    rows: Rows
    spec: QsaSpec


def call_of_scores(
    scores: Scores, top_blocks: int = 512, device: torch.device | str = "cpu", page_blocks: int = 64
) -> IndexCall:
    """A call whose index scores are the given ones, exactly: finite, none negative, of at most 256 rows.

    Row r is a request of its own; dimension r of the keys, which all requests share, holds its scores, and its query
    picks that dimension and undoes the scale. Keys that no row sees are NaN, and pages stand in reversed order.
    """
    rows, visible = scores.visible.shape[0], scores.visible.tolist()
    index_dim = 64 if rows <= 64 else 256  # of which the score scale is a power of two
    spec = QsaSpec(index_heads=1, index_dim=index_dim, top_blocks=top_blocks)
    pages = -(-max(visible) // page_blocks)
    keys = torch.full((pages * page_blocks, index_dim), float("nan"))
    keys[: max(visible)] = 0.0
    index_q = torch.zeros(rows, 1, index_dim)
    for row, seen in enumerate(visible):
        keys[:seen, row] = scores.values[row, :seen]
        index_q[row, 0, row] = 1.0 / spec.score_scale
    pool = keys.view(pages, page_blocks, index_dim).flip(0).contiguous().to(device)
    table = torch.arange(pages - 1, -1, -1, dtype=torch.int32).repeat(rows, 1).to(device)
    position = torch.tensor(visible, device=device) * spec.block_tokens - 1
    live = Rows.from_tensors(torch.arange(rows, device=device), position)
    return IndexCall(index_q.to(device), IndexCache(pool, table), live, spec)


@dataclass(frozen=True)
class RawKeys:
    """Raw index keys of whole requests, to be written in pieces.

    keys         per request [tokens, index_dim], before pooling
    norm_weight  [index_dim]
    cos, sin     per request [tokens, rotary_dim]: the angles of the first token of the block each token is in
    """

    keys: tuple[Tensor, ...]
    norm_weight: Tensor
    cos: tuple[Tensor, ...]
    sin: tuple[Tensor, ...]


def raw_keys(
    tokens: tuple[int, ...],
    spec: QsaSpec,
    dtype: torch.dtype = torch.float32,
    rotary_dim: int = 64,
    rope_positions: tuple[Tensor, ...] | None = None,
    seed: int = 0,
) -> RawKeys:
    """Raw keys of requests of so many tokens.

    rope_positions  per request [tokens], what the rotary angles are of; by default 0, 1, 2, ...
    """
    generator = torch.Generator().manual_seed(seed)
    keys = tuple(torch.randn(n, spec.index_dim, generator=generator).to(dtype) for n in tokens)
    norm_weight = (torch.randn(spec.index_dim, generator=generator) * 0.2).to(dtype)
    frequency = 1e7 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
    cos, sin = [], []
    for request, count in enumerate(tokens):
        positions = torch.arange(count) if rope_positions is None else rope_positions[request]
        first = torch.arange(count) // spec.block_tokens * spec.block_tokens
        angles = (positions[first].float()[:, None] * frequency).repeat(1, 2)
        cos.append(angles.cos().to(dtype))
        sin.append(angles.sin().to(dtype))
    return RawKeys(keys, norm_weight, tuple(cos), tuple(sin))


def image_positions(before: int = 10, image: int = 300, after: int = 10) -> Tensor:
    """Rotary positions of text, an image whose tokens share one, and text: blocks are cut by token, not by these."""
    return torch.cat([torch.arange(before), torch.full((image,), before), torch.arange(before + 1, before + 1 + after)])


def empty_index_cache(
    tokens: tuple[int, ...],
    spec: QsaSpec,
    dtype: torch.dtype = torch.float32,
    raw_dtype: torch.dtype = torch.float32,
    page_blocks: int = 16,
    ring_tokens: int = 4,
    device: torch.device | str = "cpu",
) -> IndexCache:
    """An index cache for requests of so many tokens, with a ring, both poisoned; pages stand in reversed order."""
    counts = [-(-(n // spec.block_tokens) // page_blocks) for n in tokens]
    pages = sum(counts)
    table = torch.full((len(tokens), max([*counts, 1])), -1, dtype=torch.int32)
    for request, count in enumerate(counts):
        used = sum(counts[:request])
        table[request, :count] = torch.arange(pages - used, pages - used - count, -1, dtype=torch.int32)
    keys = torch.empty(pages + 1, page_blocks, spec.index_dim, dtype=dtype, device=device)
    if dtype == FP8:
        keys.view(torch.uint8).fill_(0x7F)
    else:
        keys.fill_(float("nan"))
    ring = torch.full((len(tokens), ring_tokens, spec.index_dim), float("nan"), dtype=raw_dtype, device=device)
    return IndexCache(keys, table.to(device), 0.5 if dtype == FP8 else None, ring)


def tiny_weights(
    value_scale: float = 2.0, head_dim: int = 64, device: torch.device | str = "cpu"
) -> tuple[Tensor, KvCache, Rows, QsaSpec]:
    """One row over 2,048 E4M3 tokens: one key at the maximum, 2,047 keys 7 nats lower.

    Each of these weighs exp(-7) = 9.1e-4, which rounds to 0 in E4M3, yet together they hold 65 % of the mass. All
    values are 1 but that of the token at the maximum, which is -1, so the output tells whether the others counted.
    Returns q [1, 1, head_dim] FP32, the cache, the row and the spec.
    """
    spec = QsaSpec(q_heads=1, kv_heads=1, head_dim=head_dim)
    keys = torch.zeros(2048, 1, head_dim)
    keys[:, 0, 0] = -3.5  # a scale of 2 and a query that undoes the softmax's make the stored 3.5 worth 7 nats
    keys[1234, 0, 0] = 0.0
    values = torch.full((2048, 1, head_dim), 1.0 / value_scale)
    values[1234] = -1.0 / value_scale
    pages = (128, 16, 1, head_dim)
    pool = torch.stack([keys.view(pages), values.view(pages)], dim=1).to(FP8).to(device)
    cache = KvCache.interleaved(pool, torch.arange(128, dtype=torch.int32, device=device)[None], 2.0, value_scale)
    q = torch.zeros(1, 1, head_dim, device=device)
    q[0, 0, 0] = head_dim**0.5
    return q, cache, Rows.from_lengths([1], [2048], device=device), spec


def e4m3_extremes(kv_heads: int = 1, head_dim: int = 64) -> Tensor:
    """[n, kv_heads, head_dim] FP32 with every finite E4M3 number, subnormals and +-448 among them."""
    numbers = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    numbers = numbers[numbers.isfinite()]
    each = kv_heads * head_dim
    tokens = -(-numbers.numel() // each)
    return numbers.repeat(tokens * each // numbers.numel() + 1)[: tokens * each].view(tokens, kv_heads, head_dim)


def far_page(
    page_stride: int = 1_540_096, page: int = 1395, dtype: torch.dtype = FP8, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """KV pages [pages, 16, 2, 256] of which one lies more than 2^31 elements into its pool, where only it is touched.

    The pool's other pages are address space that the system need not back with memory. Returns keys and values; page
    `page` is the far one, page 0 may be written too.
    """
    tokens, heads, dim = 16, 2, 256
    pool = torch.empty((page + 1) * page_stride, dtype=torch.uint8, device=device).view(dtype)
    shape, strides = (page + 1, tokens, heads, dim), (page_stride, heads * dim, dim, 1)
    return pool.as_strided(shape, strides), pool.as_strided(shape, strides, tokens * heads * dim)


def planted_block(
    rows: int = 8,
    blocks: int = 4096,
    planted: int = 10,
    top_blocks: int = 16,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, IndexCache, Rows, QsaSpec]:
    """A prefill whose every row must select block `planted`, the only one with a positive score, and the lowest ids.

    Returns index_q [rows, 4, 128], the cache, the rows (the last of 4 * blocks tokens) and the spec.
    """
    spec = QsaSpec(top_blocks=top_blocks)
    pages = -(-blocks // 64)
    keys = torch.zeros(pages * 64, spec.index_dim, dtype=dtype, device=device)
    keys[planted, 0] = 1.0
    index_q = torch.zeros(rows, spec.index_heads, spec.index_dim, dtype=dtype, device=device)
    index_q[:, :, 0] = 1.0
    table = torch.arange(pages, dtype=torch.int32, device=device)[None]
    cache = IndexCache(keys.view(pages, 64, spec.index_dim), table)
    return index_q, cache, Rows.from_lengths([rows], [blocks * spec.block_tokens], device=device), spec


@dataclass(frozen=True)
class Peaks:
    """A group of rows that share no block, each of which hangs on one token of its own blocks.

    q          [rows, q_heads, head_dim] FP32
    peaks      per row the block whose first token holds nearly all of the row's mass; its values are 1
    decoys     per row a block of another row with a token that would weigh as much; its values are -1
    selection  pairwise disjoint, top_blocks each

    A row that attends to its own blocks gets 1, to all rows' blocks 0, and to its own with the decoy for the peak -1.
    """

    q: Tensor
    cache: KvCache
    rows: Rows
    spec: QsaSpec
    selection: Selection
    peaks: tuple[int, ...]
    decoys: tuple[int, ...]


def disjoint_peaks(
    spec: QsaSpec,
    q_dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    rows: int = 8,
) -> Peaks:
    """`rows` neighbouring rows, at most head_dim, whose worklist is as long as one can be: nothing is shared.

    Row r's peak stands at r / (rows - 1) of its ascending selection, so that no part of a worklist can be cut off
    unseen.
    """
    generator = torch.Generator().manual_seed(rows)
    count, page_tokens = spec.top_blocks, 16
    blocks = rows * count + 1  # one is nobody's
    tokens = blocks * spec.block_tokens + rows
    owned = torch.randperm(blocks, generator=generator)[: rows * count].view(rows, count).sort(dim=1).values
    peaks = tuple(int(owned[row, row * (count - 1) // max(rows - 1, 1)]) for row in range(rows))
    decoys = tuple(peaks[(row + 1) % rows] for row in range(rows))
    pages = -(-tokens // page_tokens)
    keys = torch.zeros(pages * page_tokens, spec.kv_heads, spec.head_dim)
    values = torch.zeros_like(keys)
    q = torch.zeros(rows, spec.q_heads, spec.head_dim)
    # 16 nats over the rest: exp(16) is 4,340 times as much as 2,048 tokens of 0 weigh.
    amount = 16.0 / spec.softmax_scale
    for row in range(rows):
        q[row, :, row] = amount / 4
        keys[peaks[row] * spec.block_tokens, :, row] = 4.0
        keys[decoys[row] * spec.block_tokens + 1, :, row] = 4.0
        values[peaks[row] * spec.block_tokens] = 1.0
        values[decoys[row] * spec.block_tokens + 1] = -1.0
    shape = (pages, page_tokens, spec.kv_heads, spec.head_dim)
    pool = torch.stack([keys.view(shape), values.view(shape)], dim=1).to(cache_dtype).to(device)
    scale = 1.0 if cache_dtype == FP8 else None
    table = torch.arange(pages, dtype=torch.int32, device=device)[None]
    selection = Selection(
        owned.to(torch.int32).to(device), torch.full((rows,), count, dtype=torch.int32, device=device)
    )
    return Peaks(
        q.to(q_dtype).to(device),
        KvCache.interleaved(pool, table, scale, scale),
        Rows.from_lengths([rows], [tokens], device=device),
        spec,
        selection,
        peaks,
        decoys,
    )


def negative_positions(dtype: torch.dtype = torch.int32) -> Rows:
    """Rows of one request at positions -1, -2, -5, 0, 2, 3 and 4: the negative ones see nothing."""
    position = torch.tensor([-1, -2, -5, 0, 2, 3, 4], dtype=dtype)
    return Rows.from_tensors(torch.zeros_like(position), position)
