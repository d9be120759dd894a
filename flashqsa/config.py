"""Frozen kernel configurations: what is legal (one predicate) and what is preferred (data, in `tables/`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from flashqsa.device import DeviceFacts
from flashqsa.tables import attend_smxx as attend_table
from flashqsa.tables import cpu as cpu_table
from flashqsa.tables import smxx as smxx_table
from flashqsa.values import SEGMENT_BLOCKS, QsaSpec

MAX_GROUP_ROWS = 64
"""A worklist entry carries one 64-bit word of row bits."""

SCORE_CHUNK_UNIT = 32
"""Chunks of rows are multiples of the largest score tile's rows, so that no tile is part empty."""


@dataclass(frozen=True)
class GroupCost:
    """What a group of rows costs, for choosing group sizes by the unions they would read.

    group_us    fixed part of a group, in microseconds
    gather_ns   nanoseconds per element of a token's key (kv_heads * head_dim) in the union: the gather of its key and
                value, and what a product costs however few rows it serves
    product_ns  nanoseconds per element of a row's query (q_heads * head_dim) and token of the union: both products

    >>> GroupCost(group_us=100.0, gather_ns=1.0, product_ns=0.1).of(2, 1000, query_size=64, key_size=16)
    128.8
    """

    group_us: float
    gather_ns: float
    product_ns: float

    def of(self, rows: int, tokens: int, query_size: int, key_size: int) -> float:
        """Microseconds of a group of `rows` rows whose union holds `tokens` tokens."""
        return self.group_us + 1e-3 * tokens * (self.gather_ns * key_size + self.product_ns * rows * query_size)


@dataclass(frozen=True)
class AttendConfig:
    """How the attention stage of a kernel set cuts its work.

    group_rows   group sizes it may use, ascending, each a multiple of the one before; the CPU set picks among them by
                 the union each would read
    tile_tokens  most tokens of a group's union gathered at a time
    row_tokens   most logits per query head of one softmax: a group of n rows takes row_tokens / n tokens of its union
                 at once, and merges what is beyond
    cost         what a group costs
    """

    group_rows: tuple[int, ...]
    tile_tokens: int
    row_tokens: int
    cost: GroupCost


def config_refusal(config: AttendConfig, facts: DeviceFacts) -> str | None:
    """Why `config` cannot run on a device, or None when it can."""
    if not config.group_rows or list(config.group_rows) != sorted(set(config.group_rows)):
        return f"group sizes must ascend, got {config.group_rows}"
    if config.group_rows[0] < 1 or config.group_rows[-1] > MAX_GROUP_ROWS:
        return f"groups hold 1 to {MAX_GROUP_ROWS} rows, got {config.group_rows}"
    if any(large % small for small, large in zip(config.group_rows, config.group_rows[1:], strict=False)):
        return f"each group size must divide the next, got {config.group_rows}"
    if min(config.tile_tokens, config.row_tokens) < 1:
        return f"a tile and a softmax hold at least one token, got {config.tile_tokens} and {config.row_tokens}"
    if facts.kind != "cpu":
        return f"no configuration is made for {facts.arch}"
    return None


def attend_config(mode: str, facts: DeviceFacts) -> AttendConfig:
    """The preferred legal configuration of an attention mode on a device.

    Raises ValueError when the table holds an illegal one.
    """
    entry = cpu_table.ATTEND[mode]
    config = AttendConfig(**entry, cost=GroupCost(**cpu_table.COST))
    refusal = config_refusal(config, facts)
    if refusal is not None:
        raise ValueError(f"{mode}: {refusal}")
    return config


@dataclass(frozen=True)
class ScoreConfig:
    """How the score stage of the kernel sets for GPUs cuts its work.

    rows           rows that a program has room for: lines of its matrix product
    window         rows that a program takes, at most `rows`; they share its keys where they belong to one request
    columns        blocks scored at a time
    slices         parts that a row's blocks are cut into, each a program's
    runs           requests of a window that have a program each; the last takes all that are left
    warps, stages  of Triton: warps of a program, tiles of keys in flight
    decode_fp8     whether E4M3 is decoded bit by bit, for GPUs whose compiler does not know it (before sm_89)
    """

    rows: int
    window: int
    columns: int
    slices: int
    runs: int
    warps: int
    stages: int
    decode_fp8: bool = False


@dataclass(frozen=True)
class TopkConfig:
    """How the top-k of the kernel sets for GPUs runs.

    capability  compute capability of the device it is compiled for
    threads     of a program, which selects one row's blocks
    resident    threads that should fit on a multiprocessor: bounds the registers of one
    """

    capability: tuple[int, int]
    threads: int
    resident: int


def score_config(
    spec: QsaSpec, rows: int, requests: int, max_position: int, q_bytes: int, facts: DeviceFacts
) -> ScoreConfig:
    """The preferred configuration of the score stage for some rows of a call, whose queries take `q_bytes` a number.

    >>> score_config(QsaSpec(), 544, 1, 183_999, 2, DeviceFacts.named("h200"))
    ScoreConfig(rows=32, window=32, columns=128, slices=15, runs=1, warps=4, stages=2, decode_fp8=False)
    >>> score_config(QsaSpec(), 320, 64, 32_767, 2, DeviceFacts.named("h200")).window    # five verify rows per request
    5
    """
    capability = facts.capability or (0, 0)
    together = -(-rows // max(requests, 1))
    tiles = smxx_table.score_tiles(capability, q_bytes)
    tile = next((tile for tile in tiles if tile["rows"] >= together), tiles[-1])
    even = rows == together * requests and 0 < together <= tile["rows"]
    window = together if even else tile["rows"]
    width = max(spec.visible_blocks(max_position), 1)
    windows = max(-(-rows // window), 1)
    wanted = facts.multiprocessors * tile["programs"]
    runs = 1 if even else min(max(requests, 1), tile["rows"], smxx_table.MAX_RUNS)
    columns = tile["columns"]
    if windows * -(-width // columns) < facts.multiprocessors:
        columns = tile["columns_few"]
    slices = min(max(wanted // windows, 1), -(-width // columns))
    return ScoreConfig(tile["rows"], window, columns, slices, runs, tile["warps"], tile["stages"], capability < (8, 9))


def score_refusal(spec: QsaSpec, q_bytes: int, facts: DeviceFacts) -> str | None:
    """Why the score stage of `smxx` cannot score a layer on a device, or None when it can.

    >>> score_refusal(QsaSpec(), 2, DeviceFacts.named("v100"))
    'Triton has no tensor-core products before sm_80, got sm_70'
    >>> score_refusal(QsaSpec(index_dim=96), 2, DeviceFacts.named("h200"))
    'index_dim must be a power of two from 16 on, got 96'
    """
    if facts.capability is None or facts.capability < (8, 0):
        return f"Triton has no tensor-core products before sm_80, got {facts.arch}"
    dim = spec.index_dim
    if dim < 16 or dim & (dim - 1):
        return f"index_dim must be a power of two from 16 on, got {dim}"
    heads = 1 << max(spec.index_heads - 1, 0).bit_length()
    for tile in smxx_table.score_tiles(facts.capability, q_bytes):
        # Queries, as many tiles of keys as are in flight, and the tile of scores on its way to memory.
        lines, columns = max(heads * tile["rows"], 16), tile["columns"]
        wanted = (lines + tile["stages"] * columns) * dim * q_bytes + 4 * tile["rows"] * columns
        if wanted > facts.shared_memory_bytes:
            return (
                f"{spec.index_heads} index heads of {dim} need {wanted} bytes of shared memory for {tile['rows']} rows"
            )
    return None


def score_chunk_rows(spec: QsaSpec, rows: int, max_position: int, limit_bytes: int) -> int:
    """Rows to score at a time on a GPU, so that scores and segment maxima fit a workspace limit: even, whole windows.

    >>> score_chunk_rows(QsaSpec(), 1616, 183_999, 128 << 20)
    544
    """
    most = max(limit_bytes // score_row_bytes(spec, max_position), 1)
    if rows <= most:
        return max(rows, 1)
    even = -(-rows // -(-rows // most))
    return min(-(-even // SCORE_CHUNK_UNIT) * SCORE_CHUNK_UNIT, most)


def score_row_bytes(spec: QsaSpec, max_position: int) -> int:
    """Bytes of a row's scores and segment maxima on a GPU.

    >>> score_row_bytes(QsaSpec(), 183_999)
    195504
    """
    segments = -(-max(spec.visible_blocks(max_position), 1) // SEGMENT_BLOCKS)
    return 4 * (segments * SEGMENT_BLOCKS + -(-segments // 4) * 4)


def topk_config(spec: QsaSpec, rows: int, facts: DeviceFacts) -> TopkConfig:
    """The preferred configuration of the top-k for some rows of a call. Raises ValueError for a CPU.

    >>> topk_config(QsaSpec(), 1616, DeviceFacts.named("t4"))
    TopkConfig(capability=(7, 5), threads=256, resident=1024)
    """
    if facts.capability is None:
        raise ValueError(f"no top-k configuration is made for {facts.arch}")
    many = rows > facts.multiprocessors and spec.top_blocks <= 2 * smxx_table.TOPK_MANY
    threads = smxx_table.TOPK_MANY if many else smxx_table.TOPK_FEW
    # sm_75 holds 1,024 threads per multiprocessor, sm_86, sm_89 and sm_12x 1,536, the others 2,048.
    resident = 1024 if facts.capability == (7, 5) else 1536
    return TopkConfig(facts.capability, threads, resident if many else threads)


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
    def resident(self) -> int:
        """Programs that a multiprocessor holds at a time."""
        return 1


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
    """Everything about the attention stage of `smxx` that host numbers decide.

    tile        of the Triton kernel, or of Hopper's own
    capacity    most worklist entries of a window
    slots       programs that the device holds at a time
    unit_tiles  tiles of a unit whose rows see as many blocks as any
    cuts        whether units may be cut
    """

    tile: TritonTile | HopperTile
    capacity: int
    slots: int
    unit_tiles: int
    cuts: bool = True

    def split(self, rows: int, spec: QsaSpec) -> Split:
        """How the units of some rows are cut."""
        units = -(-rows // self.tile.group_rows) * spec.kv_heads
        return choose_split(units, self.slots, self.unit_tiles) if self.cuts else Split(units, units)

    def chunk_rows(self, spec: QsaSpec, limit_bytes: int) -> int:
        """Rows to attend at a time, so that their worklists fit a workspace limit: whole windows, at least one."""
        window_bytes = self.capacity * 4 * (2 + spec.block_tokens)
        return max(limit_bytes // window_bytes, 1) * self.tile.group_rows


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


def attend_refusal(spec: QsaSpec, fp32: bool, facts: DeviceFacts) -> str | None:
    """Why the attention stage of `smxx` cannot serve a layer on a device, or None when it can.

    fp32  whether the cache holds FP32

    >>> attend_refusal(QsaSpec(), False, DeviceFacts.named("v100"))
    'Triton has no tensor-core products before sm_80, got sm_70'
    >>> attend_refusal(QsaSpec(head_dim=96), False, DeviceFacts.named("h200"))
    'head_dim must be a power of two from 16 to 256, got 96'
    """
    if facts.capability is None or facts.capability < (8, 0):
        return f"Triton has no tensor-core products before sm_80, got {facts.arch}"
    if fp32:
        return "tensor cores take FP16 and BF16: an FP32 cache would lose bits"
    for name, value, most in (("head_dim", spec.head_dim, 256), ("block_tokens", spec.block_tokens, 32)):
        least = 16 if name == "head_dim" else 1
        if value & (value - 1) or not least <= value <= most:
            return f"{name} must be a power of two from {least} to {most}, got {value}"
    if not triton_tiles(spec, spec.heads_per_kv_head, False, facts):
        return f"{spec.heads_per_kv_head} heads of {spec.head_dim} do not fit {facts.shared_memory_bytes} bytes"
    return None


def triton_tiles(spec: QsaSpec, lines: int, fp8: bool, facts: DeviceFacts) -> list[TritonTile]:
    """Tiles that hold `lines` query lines and fit a device, in order of preference; one row each."""
    wgmma = facts.capability is not None and facts.capability[0] == 9
    found: list[TritonTile] = []
    for entry in attend_table.WGMMA if wgmma else attend_table.MMA:
        # Lists are filled up to a multiple of LIST_PAD entries, so a tile may hold no more.
        tokens = min(entry["tokens"] * 256 // spec.head_dim, 128, LIST_PAD * spec.block_tokens)
        stages = attend_table.FP8_STAGES if fp8 and wgmma and entry["lines"] == 64 else entry["stages"]
        # Products of 64 lines read keys and values where they were copied to; others free that place before them.
        tiles = stages if wgmma and entry["lines"] == 64 else stages - 1
        converted = 1 if fp8 else 0
        size = spec.head_dim * (2 * entry["lines"] + 2 * tokens * (tiles * (1 if fp8 else 2) + 2 * converted)) + 8192
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
    fp8: bool = False,
    hopper: bool = True,
    batch_invariant: bool = False,
) -> AttendShape:
    """The preferred launch of the attention stage for some rows of a call.

    fp8              whether the cache holds FP8
    hopper           whether the caller's tensors suit Hopper's own kernel (`kernels.smxx.hopper.hopper_refusal`)
    batch_invariant  gives a row the same bits whatever shares its launch: it shares no gather, and is not cut

    Raises ValueError where `attend_refusal` gives a reason.

    >>> shape = attend_shape(QsaSpec(), 1616, 1, 37_999, DeviceFacts.named("h200"))
    >>> shape.split(1616, QsaSpec()), shape.chunk_rows(QsaSpec(), 128 << 20)
    (Split(units=324, whole=264, parts=2, inside=True), 10850)
    >>> shape.tile
    HopperTile(group_rows=10, consumers=2, stages=2)
    >>> attend_shape(QsaSpec(), 320, 64, 32_767, DeviceFacts.named("h200")).tile    # five verify rows per request
    HopperTile(group_rows=5, consumers=1, stages=3)
    >>> attend_shape(QsaSpec(), 1616, 1, 37_999, DeviceFacts.named("a100")).tile.group_rows
    5
    """
    refusal = attend_refusal(spec, False, facts)
    if refusal is not None:
        raise ValueError(refusal)
    heads = spec.heads_per_kv_head
    together = 1 if batch_invariant else max(-(-rows // max(requests, 1)), 1)
    tile: TritonTile | HopperTile
    if hopper and facts.capability == (9, 0) and spec.head_dim == HopperTile.HEAD_DIM and spec.block_tokens == 4:
        held = HopperTile.LINES // heads
        if together == 1 and heads <= 16 and not fp8 and not batch_invariant:
            tile = _triton_tile(spec, 1, fp8, facts)
        elif together <= held or held >= attend_table.HOPPER_ROWS or fp8:
            tile = HopperTile(window_rows(together, held), 1, 3)
        else:
            tile = HopperTile(window_rows(together, 2 * held), 2, 2)
    else:
        tile = _triton_tile(spec, window_rows(together, max(64 // heads, 1)), fp8, facts)
    blocks = min(spec.top_blocks, spec.visible_blocks(max_position)) + 1
    return AttendShape(
        tile,
        list_capacity(spec, tile.group_rows, requests, max_position),
        facts.multiprocessors * tile.resident,
        -(-blocks * spec.block_tokens // tile.tokens),
        not batch_invariant,
    )


def window_rows(together: int, held: int) -> int:
    """Rows of a window, of the `together` rows that a request has on average and the `held` that a tile has room for.

    >>> window_rows(1, 5), window_rows(4, 5), window_rows(8, 5), window_rows(1616, 5)
    (1, 4, 4, 5)
    """
    held = min(held, attend_table.MOST_ROWS)
    if together > 4 * held:
        return held
    return -(-together // -(-together // held))


def _triton_tile(spec: QsaSpec, group_rows: int, fp8: bool, facts: DeviceFacts) -> TritonTile:
    tiles = triton_tiles(spec, group_rows * spec.heads_per_kv_head, fp8, facts)
    if not tiles:
        group_rows, tiles = 1, triton_tiles(spec, spec.heads_per_kv_head, fp8, facts)
    return replace(tiles[0], group_rows=group_rows)
