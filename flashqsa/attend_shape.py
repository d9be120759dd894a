"""How the attention stage of GPUs cuts its work: tiles, windows of rows, and splits of what does not fill the device.

Everything follows from host numbers. What is legal is said by one predicate per kernel (`attend_refusal` for Triton's,
`hopper_refusal` for the one of compute capability 9.0, `sm7x_refusal` for the one of 7.x); what is preferred is data in
`tables/attend_smxx.py` and `tables/attend_sm7x.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from flashqsa.device import DeviceFacts
from flashqsa.tables import attend_sm7x as sm7x_table
from flashqsa.tables import attend_smxx as attend_table
from flashqsa.values import FP8, KvCache, QsaSpec


@dataclass(frozen=True)
class Layout:
    """Where the tensors of an attention call lie, as far as a kernel minds. The defaults suit every kernel.

    alignment_bytes  largest power of two, up to 16, at whose multiples every head of the tensors begins
    token_bytes      distance of neighbouring tokens of a page, the larger of keys and values
    last_place       offset of the last block of a pool, in units of `place_unit`
    unit_bytes       of such a unit

    >>> pool = torch.zeros(3, 2, 16, 2, 256, dtype=torch.float16)
    >>> Layout.of(KvCache.interleaved(pool, torch.zeros(1, 3, dtype=torch.int32)), QsaSpec())
    Layout(alignment_bytes=16, token_bytes=1024, last_place=19, unit_bytes=4096)
    """

    alignment_bytes: int = 16
    token_bytes: int = 0
    last_place: int = 0
    unit_bytes: int = 0

    @staticmethod
    def of(kv_cache: KvCache, spec: QsaSpec, *others: Tensor | None) -> Layout:
        """The layout of a cache's pools and of other tensors [rows, heads, head_dim], of which some may be None."""
        found, last, token_bytes, unit = 16, 0, 0, place_unit(kv_cache, spec)
        for pool in (kv_cache.keys, kv_cache.values):
            (pages, tokens, heads, _), (page, token, head, _), size = pool.shape, pool.stride(), pool.element_size()
            found |= pool.data_ptr() | (page * size if pages > 1 else 0) | (token * size if tokens > 1 else 0)
            found |= head * size if heads > 1 else 0
            last = max(last, (max(pages - 1, 0) * page + max(tokens - 1, 0) * token) // unit)
            token_bytes = max(token_bytes, token * size)
        for tensor in others:
            if tensor is not None:
                (rows, heads, _), (row, head, _), size = tensor.shape, tensor.stride(), tensor.element_size()
                found |= tensor.data_ptr() | (row * size if rows > 1 else 0) | (head * size if heads > 1 else 0)
        # The lowest bit of all offsets is the largest power of two that divides them.
        return Layout(found & -found, token_bytes, last, unit * kv_cache.keys.element_size())


def place_unit(kv_cache: KvCache, spec: QsaSpec) -> int:
    """Elements that divide the offset of every block in the keys and in the values."""
    found = 0
    for pool in (kv_cache.keys, kv_cache.values):
        found = math.gcd(found, pool.stride(0) if pool.shape[0] > 1 else 0, pool.stride(1) * spec.block_tokens)
    return max(found, 1)


@dataclass(frozen=True)
class TritonTile:
    """How a program of the Triton attention kernel cuts its work.

    group_rows  rows of a window
    lines       query lines of a tile, a power of two from 16: at least group_rows times the query heads of a KV head
    tokens      tokens of a tile, a power of two
    warps       of a program
    stages      tiles in flight, the one at work included
    resident    programs that a multiprocessor holds at a time
    words       whether an FP8 cache is read in words of four numbers, converted by instructions of our own choice
    native_fp8  whether the device converts E4M3 to FP16 itself (from sm_89 on)
    """

    group_rows: int
    lines: int
    tokens: int
    warps: int
    stages: int
    resident: int
    words: bool = False
    native_fp8: bool = True

    @property
    def counters(self) -> int:
        """What counts the ended parts of a unit: one per program."""
        return 1


@dataclass(frozen=True)
class HopperTile:
    """How a program of the CUDA C++ attention kernel of compute capability 9.0 cuts its work.

    group_rows  rows of a window
    consumers   warp groups that hold 64 query lines each, 1 or 2
    stages      tiles of 64 keys, and of 64 values, in flight
    """

    group_rows: int
    consumers: int
    stages: int

    LINES: ClassVar[int] = 64
    TOKENS: ClassVar[int] = 64
    BLOCK_TOKENS: ClassVar[int] = 4
    HEAD_DIM: ClassVar[int] = 256

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: queries, keys, values, masks, four barriers per stage, and room to align them."""
        tile = self.LINES * self.HEAD_DIM * 2
        return (self.consumers + 2 * self.stages) * tile + self.stages * (self.TOKENS * 4 + 32) + 1024

    @property
    def tokens(self) -> int:
        """Tokens of a tile."""
        return self.TOKENS

    @property
    def counters(self) -> int:
        """What counts the ended parts of a unit: one per consumer."""
        return self.consumers

    @property
    def resident(self) -> int:
        """Programs that a multiprocessor holds at a time."""
        return 1


@dataclass(frozen=True)
class Sm7xTile:
    """How a program of the CUDA C++ attention kernel of compute capability 7.x cuts its work.

    group_rows  rows of a window
    head_dim    64, 128 or 256
    capability  of the device: 7.0 and 7.2 (Volta) have other tensor cores than 7.5 (Turing)

    A window of 10 rows of 12 heads on a Quadro RTX 8000, whose programs may have 64 KiB:

    >>> Sm7xTile(10, 256, (7, 5)).shared_bytes, Sm7xTile(10, 256, (7, 5)).kept_groups
    (65536, 8)
    """

    group_rows: int
    head_dim: int
    capability: tuple[int, int]

    LINES: ClassVar[int] = 128
    TOKENS: ClassVar[int] = 32
    BLOCK_TOKENS: ClassVar[int] = 4
    HEAD_DIMS: ClassVar[tuple[int, ...]] = (64, 128, 256)

    @property
    def turing(self) -> bool:
        """Whether the device has Turing's tensor cores, not Volta's."""
        return self.capability >= (7, 5)

    @property
    def kept_groups(self) -> int:
        """Groups of 16 dimensions of the queries that stay in registers."""
        return sm7x_table.KEPT_DIMS[self.head_dim] // 16 if self.turing else 0

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: keys and values of a tile, and what is not kept of the queries; FP16."""
        return 2 * (2 * self.TOKENS * self.head_dim + self.LINES * (self.head_dim - 16 * self.kept_groups))

    @property
    def tokens(self) -> int:
        """Tokens of a tile."""
        return self.TOKENS

    @property
    def counters(self) -> int:
        """What counts the ended parts of a unit: one per program."""
        return 1

    @property
    def resident(self) -> int:
        """Programs that a multiprocessor holds at a time: registers allow one."""
        return 1


AttendTile = TritonTile | HopperTile | Sm7xTile
"""How a program cuts its work, whichever kernel it runs. A launcher takes its own kind and refuses the others."""


@dataclass(frozen=True)
class Split:
    """Which units (a window and a KV head each) are cut: the first `whole` are not, each other one into `parts`.

    inside  whether the part of a unit that ends last merges its parts, in the attention kernel

    >>> Split(units=5, whole=3, parts=4).programs
    11
    """

    units: int
    whole: int
    parts: int = 1
    inside: bool = True

    @property
    def cut(self) -> int:
        """Units that are cut."""
        return self.units - self.whole

    @property
    def programs(self) -> int:
        """Programs to launch: the whole units' first, then part by part."""
        return self.whole + self.cut * self.parts


PART_COST = 0.05
"""What cutting costs each part of a unit besides its share, in units: storing its partial result and merging it."""

MAX_PARTS = 64

MAX_PARTS_INSIDE = 8
"""Most parts that the last of them merges; more are merged by a kernel of their own, with a program per few heads."""

LIST_PAD = 32
"""A window's list is filled up to a multiple of so many entries, so that no tile of the attention kernels is ragged."""

MAX_WINDOW_ROWS = 32
"""Rows of a window: the bits of a mask word."""


@lru_cache(maxsize=4096)
def choose_split(units: int, slots: int, tiles: int) -> Split:
    """Cuts what does not fill a wave of `slots` programs, or that and the wave before it, or nothing.

    tiles  of a typical unit: no unit is cut into more parts than it has tiles

    Time is counted in units: whole waves, then the waves of parts, each of which costs `PART_COST` more than its share.

    >>> choose_split(units=646, slots=264, tiles=64)
    Split(units=646, whole=528, parts=2, inside=True)
    >>> choose_split(units=128, slots=132, tiles=33)
    Split(units=128, whole=128, parts=1, inside=True)
    >>> choose_split(units=2, slots=132, tiles=33)
    Split(units=2, whole=0, parts=33, inside=False)
    """
    best, found = float(-(-units // slots)), Split(units, units)
    most = max(min(tiles, MAX_PARTS), 1)
    rest = units % slots
    for tail in (rest, min(rest + slots, units)):
        # Parts that are merged apart begin with the first unit, so that whole rows are merged.
        inside_only = tail < units
        for parts in range(2, (min(most, MAX_PARTS_INSIDE) if inside_only else most) + 1) if tail else ():
            waves = -(-tail * parts // slots)
            cost = (units - tail) / slots + waves * (1.0 / parts + PART_COST)
            if cost < best - 1e-9:
                best, found = cost, Split(units, units - tail, parts, parts <= MAX_PARTS_INSIDE)
    return found


@dataclass(frozen=True)
class AttendShape:
    """Everything about the attention stage of a GPU that host numbers decide.

    tile        of the Triton kernel, of Hopper's own, or of the one of compute capability 7.x (`Sm7xTile`)
    capacity    most worklist entries of a window
    slots       programs that the device holds at a time
    unit_tiles  tiles of a unit whose rows see as many blocks as any
    cuts        whether units may be cut
    """

    tile: AttendTile
    capacity: int
    slots: int
    unit_tiles: int
    cuts: bool = True

    def split(self, rows: int, spec: QsaSpec) -> Split:
        """How the units of some rows are cut."""
        units = -(-rows // self.tile.group_rows) * spec.kv_heads
        return choose_split(units, self.slots, self.unit_tiles) if self.cuts else Split(units, units)

    def window_bytes(self, spec: QsaSpec) -> int:
        """Bytes of a window's worklist: two places and a mask per token for each entry."""
        return self.capacity * 4 * (2 + spec.block_tokens)

    def chunk_rows(self, spec: QsaSpec, limit_bytes: int) -> int:
        """Rows to attend at a time, so that their worklists fit a workspace limit: whole windows, at least one."""
        return max(limit_bytes // self.window_bytes(spec), 1) * self.tile.group_rows

    def workspace_bytes(self, spec: QsaSpec, rows: int) -> int:
        """Bytes of the worklists of some rows, and of the parts of units that are cut."""
        split = self.split(rows, spec)
        lists = -(-rows // self.tile.group_rows) * self.window_bytes(spec)
        if split.cut == 0:
            return lists
        part_rows = rows - split.whole // spec.kv_heads * self.tile.group_rows
        return lists + split.parts * part_rows * spec.q_heads * (spec.head_dim + 1) * 4


def list_capacity(spec: QsaSpec, group_rows: int, requests: int, max_position: int) -> int:
    """Most worklist entries of a window, filled up: its rows share nothing, or they see no more.

    >>> list_capacity(QsaSpec(), group_rows=8, requests=1, max_position=100_000)
    4128
    >>> list_capacity(QsaSpec(), group_rows=8, requests=1, max_position=1_000)
    256
    """
    visible = spec.visible_blocks(max_position) + 1
    row_entries = min(spec.top_blocks + 1, visible)
    runs = min(group_rows, max(requests, 1))
    most = max(min(group_rows * row_entries, runs * visible), 1)
    return -(-most // LIST_PAD) * LIST_PAD


PLACES = 1 << 31
"""Places of blocks are 32-bit numbers, of which kernels take the sign for a bit."""

MOST_TOKEN_BYTES = 1 << 30
"""The producers of Hopper's own kernel hold the distance of tokens, and of a block's four, in 32 bits."""


RANKED_ENTRIES, RANKED_ENTRIES_TURING = 2048, 1024
"""Entries whose masks the worklist puts together in shared memory at a time: a union of 10 rows of the `far` regime has
1,408. Where a program has 64 KiB, the bitmap of a request of 1,048,576 tokens takes 50,180 bytes of them."""

MIN_BITMAP_BLOCKS = 1024
"""Fewest blocks that a worklist's bitmap has room for."""


def ranked_entries(capability: tuple[int, int]) -> int:
    """Entries that a device's worklist ranks at a time. What is listed does not depend on it.

    >>> ranked_entries((7, 0)), ranked_entries((7, 5)), ranked_entries((9, 0))
    (2048, 1024, 2048)
    """
    return RANKED_ENTRIES_TURING if capability == (7, 5) else RANKED_ENTRIES


def worklist_bytes(blocks: int, ranked: int) -> int:
    """Dynamic shared memory of a worklist program: a bitmap of so many blocks, and so many ranked entries.

    Per 32 blocks a word of bits and a 16-bit prefix, per 1,024 blocks a 32-bit prefix; per ranked entry a mask and an
    id. Room is made for the next powers of two: each size is a kernel to load, and a bound on positions that grows from
    step to step must not load one each time.

    >>> worklist_bytes(262_144, 2048), worklist_bytes(262_144, 1024), worklist_bytes(5, 32)
    (66576, 58384, 464)
    """
    room = 1 << max(blocks - 1, MIN_BITMAP_BLOCKS - 1).bit_length()
    words = room // 32
    entries = 1 << max(ranked - 1, 0).bit_length()
    size = 4 * words + 4 * (-(-words // 32) + 1) + 8 * entries + 2 * words
    return -(-size // 16) * 16


STATIC_SHARED_BYTES = 512
"""Of a worklist program besides: requests, positions and counts of its rows."""


def worklist_refusal(spec: QsaSpec, max_position: int, facts: DeviceFacts) -> str | None:
    """Why a device cannot list what a call's rows have to read, or None when it can.

    >>> worklist_refusal(QsaSpec(block_tokens=1), 1_048_575, DeviceFacts.named("rtx4090"))
    'worklists of 1048576 blocks need 217616 bytes of shared memory, the device has 101376'
    """
    blocks = max(max_position, 0) // spec.block_tokens + 1
    needed = worklist_bytes(blocks, ranked_entries(facts.capability or (0, 0))) + STATIC_SHARED_BYTES
    if needed <= facts.shared_memory_bytes:
        return None
    return (
        f"worklists of {blocks} blocks need {needed} bytes of shared memory, the device has {facts.shared_memory_bytes}"
    )


def attend_refusal(spec: QsaSpec, cache_dtype: torch.dtype, layout: Layout, facts: DeviceFacts) -> str | None:
    """Why Triton's attention cannot serve a layer on a device, or None when it can.

    >>> attend_refusal(QsaSpec(), torch.float16, Layout(), DeviceFacts.named("v100"))
    'Triton has no tensor-core products before sm_80, got sm_70'
    >>> attend_refusal(QsaSpec(head_dim=96), torch.float16, Layout(), DeviceFacts.named("h200"))
    'head_dim must be a power of two from 16 to 256, got 96'
    """
    if facts.capability is None or facts.capability < (8, 0):
        return f"Triton has no tensor-core products before sm_80, got {facts.arch}"
    for name, value, most in (("head_dim", spec.head_dim, 256), ("block_tokens", spec.block_tokens, 32)):
        least = 16 if name == "head_dim" else 1
        if value & (value - 1) or not least <= value <= most:
            return f"{name} must be a power of two from {least} to {most}, got {value}"
    if layout.last_place >= PLACES:
        return f"the cache's strides put blocks at {layout.last_place} units, more than 32 bits address"
    if cache_dtype == FP8 and not native_fp8(facts) and layout.alignment_bytes < 4:
        return f"before sm_89 FP8 heads must begin at multiples of 4 bytes, got multiples of {layout.alignment_bytes}"
    if not triton_tiles(spec, spec.heads_per_kv_head, cache_dtype.itemsize, facts):
        return f"{spec.heads_per_kv_head} heads of {spec.head_dim} do not fit {facts.shared_memory_bytes} bytes"
    return None


def hopper_refusal(
    spec: QsaSpec, q_dtype: torch.dtype, cache_dtype: torch.dtype, layout: Layout, facts: DeviceFacts
) -> str | None:
    """Why Hopper's own attention cannot serve a call on a device, or None when it can.

    >>> half = torch.float16
    >>> hopper_refusal(QsaSpec(), half, half, Layout(alignment_bytes=8), DeviceFacts.named("h200"))
    'made for heads that begin at multiples of 16 bytes, got multiples of 8'
    """
    if facts.capability != (9, 0):
        return f"made for sm_90, got {facts.arch}"
    if spec.head_dim != HopperTile.HEAD_DIM or spec.block_tokens != HopperTile.BLOCK_TOKENS:
        wanted = f"made for heads of {HopperTile.HEAD_DIM} and blocks of {HopperTile.BLOCK_TOKENS} tokens"
        return f"{wanted}, got {spec.head_dim} and {spec.block_tokens}"
    if q_dtype not in (torch.float16, torch.bfloat16) or cache_dtype not in (q_dtype, FP8):
        found = " and ".join(str(dtype).removeprefix("torch.") for dtype in (q_dtype, cache_dtype))
        return f"made for FP16 and BF16 queries with a cache of their dtype or FP8, got {found}"
    if layout.alignment_bytes < 16:
        return f"made for heads that begin at multiples of 16 bytes, got multiples of {layout.alignment_bytes}"
    if max(layout.token_bytes, layout.unit_bytes) >= MOST_TOKEN_BYTES:
        return f"tokens lie {max(layout.token_bytes, layout.unit_bytes)} bytes apart, more than 32 bits address"
    if layout.last_place >= PLACES:
        return f"the cache's strides put blocks at {layout.last_place} units, more than 32 bits address"
    return None


def sm7x_refusal(
    spec: QsaSpec, q_dtype: torch.dtype, cache_dtype: torch.dtype, layout: Layout, facts: DeviceFacts
) -> str | None:
    """Why the attention of compute capability 7.x cannot serve a call on a device, or None when it can.

    >>> volta, half = DeviceFacts.named("v100"), torch.float16
    >>> sm7x_refusal(QsaSpec(), half, FP8, Layout(), volta)
    >>> sm7x_refusal(QsaSpec(), torch.bfloat16, torch.bfloat16, Layout(), volta)
    'sm_70 has no BF16 tensor cores: made for FP16 queries with an FP16 or FP8 cache, got bfloat16 and bfloat16'
    """
    if facts.capability is None or facts.capability[0] != 7:
        return f"made for sm_70 to sm_75, got {facts.arch}"
    if spec.head_dim not in Sm7xTile.HEAD_DIMS or spec.block_tokens != Sm7xTile.BLOCK_TOKENS:
        wanted = f"made for heads of 64, 128 or 256 and blocks of {Sm7xTile.BLOCK_TOKENS} tokens"
        return f"{wanted}, got {spec.head_dim} and {spec.block_tokens}"
    if q_dtype != torch.float16 or cache_dtype not in (torch.float16, FP8):
        found = " and ".join(str(dtype).removeprefix("torch.") for dtype in (q_dtype, cache_dtype))
        lacking = "BF16" if torch.bfloat16 in (q_dtype, cache_dtype) else "FP32"
        wanted = "made for FP16 queries with an FP16 or FP8 cache"
        return f"{facts.arch} has no {lacking} tensor cores: {wanted}, got {found}"
    if layout.alignment_bytes < 16:
        return f"made for heads that begin at multiples of 16 bytes, got multiples of {layout.alignment_bytes}"
    if layout.last_place >= PLACES:
        return f"the cache's strides put blocks at {layout.last_place} units, more than 32 bits address"
    needed = Sm7xTile(1, spec.head_dim, facts.capability).shared_bytes
    if needed > facts.shared_memory_bytes:
        return f"a program needs {needed} bytes of shared memory, the device has {facts.shared_memory_bytes}"
    return None


def prefers_triton(spec: QsaSpec, rows: int, requests: int, cache_dtype: torch.dtype) -> bool:
    """Whether Triton's tile of 16 lines is faster than Hopper's of 64: for a row per request, of few heads.

    With many rows that share nothing it is not: 1,616 rows one by one take 1.37 against 1.20 ms on an H200 (24/2, far).

    An FP8 cache stays with Hopper's own kernel, which converts each number once for both products.
    """
    return rows <= requests and spec.heads_per_kv_head <= 16 and cache_dtype != FP8


def triton_tiles(spec: QsaSpec, lines: int, cache_bytes: int, facts: DeviceFacts) -> list[TritonTile]:
    """Tiles that hold `lines` query lines and fit a device, in order of preference; one row each.

    cache_bytes  of a number in the cache: 1 (FP8), 2 or 4
    """
    wgmma = facts.capability is not None and facts.capability[0] == 9
    fp8 = cache_bytes == 1
    found: list[TritonTile] = []
    table = attend_table.FP32 if cache_bytes == 4 else attend_table.WGMMA if wgmma else attend_table.MMA
    for entry in table:
        # Lists are filled up to a multiple of LIST_PAD entries, so a tile may hold no more.
        tokens = min(entry["tokens"] * 256 // spec.head_dim, 128, LIST_PAD * spec.block_tokens)
        copied = wgmma and entry["lines"] == 64 and cache_bytes < 4
        stages = attend_table.FP8_STAGES if fp8 and copied else entry["stages"]
        # Products of 64 lines read keys and values where they were copied to; others free that place before them.
        tiles = stages if copied else stages - 1
        converted = 1 if fp8 else 0
        width = max(cache_bytes, 2)
        kept = tokens * (tiles * 2 * cache_bytes + 2 * converted * width)
        size = spec.head_dim * (width * entry["lines"] + kept) + 8192
        if entry["lines"] >= lines and size <= facts.shared_memory_bytes and tokens >= spec.block_tokens:
            found.append(
                TritonTile(1, entry["lines"], tokens, entry["warps"], stages, entry["resident"], fp8, native_fp8(facts))
            )
    return found


def native_fp8(facts: DeviceFacts) -> bool:
    """Whether a device converts E4M3 itself."""
    return facts.capability is not None and facts.capability >= (8, 9)


def attend_shape(
    spec: QsaSpec,
    rows: int,
    requests: int,
    max_position: int,
    facts: DeviceFacts,
    *,
    cache_bytes: int = 2,
    hopper: bool = False,
    sm7x: bool = False,
    alone: bool = False,
    cuts: bool = True,
) -> AttendShape:
    """The preferred launch of the attention stage for some rows of a call.

    cache_bytes  of a number in the cache: 1 (FP8), 2 or 4
    hopper       for Hopper's own kernel, where `hopper_refusal` has no reason
    sm7x         for the kernel of compute capability 7.x, where `sm7x_refusal` has none; else for Triton's
    alone        windows of one row
    cuts         whether units may be cut where they do not fill the device. A row's bits depend on how its unit is cut
                 and on what its window holds, so `alone` without cuts gives it the same whatever shares its launch.

    Raises ValueError where `attend_refusal` gives a reason.

    >>> shape = attend_shape(QsaSpec(), 1616, 1, 37_999, DeviceFacts.named("h200"), hopper=True)
    >>> shape.split(1616, QsaSpec()), shape.chunk_rows(QsaSpec(), 128 << 20)
    (Split(units=324, whole=264, parts=2, inside=True), 10850)
    >>> shape.tile
    HopperTile(group_rows=10, consumers=2, stages=2)
    >>> five_verify_rows = attend_shape(QsaSpec(), 320, 64, 32_767, DeviceFacts.named("h200"), hopper=True)
    >>> five_verify_rows.tile
    HopperTile(group_rows=5, consumers=1, stages=3)
    >>> attend_shape(QsaSpec(), 1616, 1, 37_999, DeviceFacts.named("a100")).tile.group_rows
    5
    >>> attend_shape(QsaSpec(), 1616, 1, 37_999, DeviceFacts.named("v100"), sm7x=True).split(1616, QsaSpec())
    Split(units=324, whole=320, parts=8, inside=True)
    """
    heads = spec.heads_per_kv_head
    together = 1 if alone else max(-(-rows // max(requests, 1)), 1)
    tile: AttendTile
    if sm7x:
        held = window_rows(together, Sm7xTile.LINES // heads, sm7x_table.MOST_ROWS)
        tile = Sm7xTile(held, spec.head_dim, facts.capability or (0, 0))
    elif hopper:
        held = HopperTile.LINES // heads
        if together <= held or held >= attend_table.HOPPER_ROWS or cache_bytes == 1:
            tile = HopperTile(window_rows(together, held), 1, 3)
        else:
            tile = HopperTile(window_rows(together, 2 * held), 2, 2)
    else:
        refusal = attend_refusal(spec, STORED[cache_bytes], Layout(), facts)
        if refusal is not None:
            raise ValueError(refusal)
        tile = _triton_tile(spec, window_rows(together, max(64 // heads, 1)), cache_bytes, facts)
    blocks = min(spec.top_blocks, spec.visible_blocks(max_position)) + 1
    return AttendShape(
        tile,
        list_capacity(spec, tile.group_rows, requests, max_position),
        facts.multiprocessors * tile.resident,
        -(-blocks * spec.block_tokens // tile.tokens),
        cuts,
    )


STORED = {1: FP8, 2: torch.float16, 4: torch.float32}
"""A dtype for each size of a cache's numbers."""


def window_rows(together: int, held: int, most: int = attend_table.MOST_ROWS) -> int:
    """Rows of a window, of the `together` rows that a request has on average and the `held` that a tile has room for.

    most  rows, however many there is room for

    >>> window_rows(1, 5), window_rows(4, 5), window_rows(8, 5), window_rows(1616, 5)
    (1, 4, 4, 5)
    """
    held = min(held, most)
    if together > 4 * held:
        return held
    return -(-together // -(-together // held))


def _triton_tile(spec: QsaSpec, group_rows: int, cache_bytes: int, facts: DeviceFacts) -> TritonTile:
    """The preferred tile of the largest window, up to `group_rows`, that fits the device."""
    for rows in range(group_rows, 0, -1):
        tiles = triton_tiles(spec, rows * spec.heads_per_kv_head, cache_bytes, facts)
        if tiles:
            return replace(tiles[0], group_rows=rows)
    raise ValueError(f"{spec.heads_per_kv_head} heads of {spec.head_dim} do not fit {facts.shared_memory_bytes} bytes")
