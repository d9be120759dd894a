"""Frozen kernel configurations: what is legal (one predicate) and what is preferred (data, in `tables/`)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from flashqsa.device import DeviceFacts
from flashqsa.tables import cpu as cpu_table
from flashqsa.tables import products as product_table
from flashqsa.tables import score_sm7x as sm7x_table
from flashqsa.tables import smxx as smxx_table
from flashqsa.values import FP8, SEGMENT_BLOCKS, QsaSpec

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
class FusedConfig:
    """How a CPU selects while it scores.

    tile_rows    rows scored at a time against a tile of keys
    tile_blocks  keys of a tile, but for its last page's rest: at most FUSED_PIECE - 1 more
    """

    tile_rows: int
    tile_blocks: int

    @property
    def words(self) -> str:
        """What it does, in a line."""
        return f"tiles of {self.tile_rows} rows and {self.tile_blocks:,} blocks, ranked as they are scored"


FUSED_PIECE = 64
"""Most index keys that a CPU reads as one piece of a page."""

FUSED_KEY_BYTES = 10
"""Bytes of a number of an index key that is read: in FP32, as stored, and what decoding FP8 takes."""

FUSED_LISTS = 5
"""64-bit numbers that ranking a tile may list for each of its scores."""


def fused_row_bytes(spec: QsaSpec, config: FusedConfig) -> int:
    """Bytes that a row of a chunk keeps: its queries in FP32, and a number for each block of its selection and a tile.

    >>> fused_row_bytes(QsaSpec(), FusedConfig(tile_rows=64, tile_blocks=1024))
    14864
    """
    return 4 * spec.index_heads * spec.index_dim + 8 * (spec.top_blocks + config.tile_blocks + FUSED_PIECE + 2)


def fused_tile_bytes(spec: QsaSpec, config: FusedConfig) -> int:
    """Bytes of a tile: index keys as stored and in FP32 and their pages, products per index head, scores, and lists.

    >>> fused_tile_bytes(QsaSpec(), FusedConfig(tile_rows=64, tile_blocks=1024))
    5709824
    """
    blocks = config.tile_blocks + FUSED_PIECE
    scores = 4 * spec.index_heads + 5 + 8 * FUSED_LISTS
    return blocks * (FUSED_KEY_BYTES * spec.index_dim + 64 + config.tile_rows * scores)


def fused_config(spec: QsaSpec, rows: int, width: int, limit_bytes: int, batch_invariant: bool) -> FusedConfig:
    """The preferred tile of a CPU's fused selection, within a workspace limit that one row can keep.

    rows             of the call
    width            most blocks that a row sees
    batch_invariant  takes a row at a time: the shape of a product decides its bits

    >>> fused_config(QsaSpec(), 8192, 8192, 128 << 20, False)
    FusedConfig(tile_rows=64, tile_blocks=1024)
    >>> fused_config(QsaSpec(), 16, 262_144, 1 << 20, False)
    FusedConfig(tile_rows=16, tile_blocks=256)
    """
    lines = 1 if batch_invariant else min(max(rows, 1), cpu_table.FUSED["tile_rows"])
    blocks = min(cpu_table.FUSED["tile_blocks"], max(cpu_table.FUSED["products"] // (lines * spec.index_heads), 1))
    config = FusedConfig(lines, blocks)
    # Narrower tiles first: products of many rows are the faster ones.
    while _fused_bytes(spec, config) > limit_bytes and config != FusedConfig(1, 1):
        if config.tile_blocks > FUSED_PIECE or config.tile_rows == 1:
            config = FusedConfig(config.tile_rows, max(config.tile_blocks // 2, 1))
        else:
            config = FusedConfig(config.tile_rows // 2, config.tile_blocks)
    return config if batch_invariant else replace(config, tile_blocks=min(config.tile_blocks, width))


def _fused_bytes(spec: QsaSpec, config: FusedConfig) -> int:
    return fused_tile_bytes(spec, config) + config.tile_rows * fused_row_bytes(spec, config)


def fused_chunk_rows(spec: QsaSpec, rows: int, config: FusedConfig, limit_bytes: int) -> int:
    """Rows that keys are read for at a time, so that what they keep and a tile fit a workspace limit: at least one.

    >>> fused_chunk_rows(QsaSpec(), 8192, FusedConfig(tile_rows=64, tile_blocks=1024), 8 << 20)
    180
    """
    room = (limit_bytes - fused_tile_bytes(spec, config)) // fused_row_bytes(spec, config)
    return max(min(room, rows, cpu_table.FUSED["chunk_rows"]), 1)


def fused_loses(spec: QsaSpec, rows_per_request: int, max_position: int, batch_invariant: bool) -> str | None:
    """Why a CPU should score a chunk in full before it selects, or None where selecting at once is as fast.

    >>> fused_loses(QsaSpec(), 1616, 183_999, False)
    >>> fused_loses(QsaSpec(), 1, 183_999, False)
    'scores in full are faster below 64 rows per request, got 1'
    """
    blocks, least = spec.visible_blocks(max_position), cpu_table.FUSED_FROM
    if batch_invariant:
        return "batch_invariant scores a row at a time: scores in full are faster"
    if rows_per_request < least["rows_per_request"]:
        return f"scores in full are faster below {least['rows_per_request']} rows per request, got {rows_per_request}"
    if blocks < least["blocks"]:
        return f"scores in full are faster below {least['blocks']} blocks a row, got {blocks}"
    return None


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
    spec: QsaSpec,
    rows: int,
    requests: int,
    max_position: int,
    q_bytes: int,
    facts: DeviceFacts,
    batch_invariant: bool = False,
) -> ScoreConfig:
    """The preferred configuration of the score stage for some rows of a call, whose queries take `q_bytes` a number.

    batch_invariant  takes the same tile whatever the rows: a score's bits depend on the products of its tile, not on
                     what else the tile holds

    >>> score_config(QsaSpec(), 544, 1, 183_999, 2, DeviceFacts.named("h200"))
    ScoreConfig(rows=32, window=32, columns=128, slices=15, runs=1, warps=4, stages=2, decode_fp8=False)
    >>> score_config(QsaSpec(), 320, 64, 32_767, 2, DeviceFacts.named("h200")).window    # five verify rows per request
    5
    """
    capability = facts.capability or (0, 0)
    together = -(-rows // max(requests, 1))
    tiles = smxx_table.score_tiles(capability, q_bytes)
    tile = next((tile for tile in tiles if tile["rows"] >= together and not batch_invariant), tiles[-1])
    even = rows == together * requests and 0 < together <= tile["rows"]
    window = together if even else tile["rows"]
    width = max(spec.visible_blocks(max_position), 1)
    windows = max(-(-rows // window), 1)
    wanted = facts.multiprocessors * tile["programs"]
    runs = 1 if even else min(max(requests, 1), tile["rows"], smxx_table.MAX_RUNS)
    columns = tile["columns"]
    if windows * -(-width // columns) < facts.multiprocessors and not batch_invariant:
        columns = tile["columns_few"]
    slices = min(max(wanted // windows, 1), -(-width // columns))
    return ScoreConfig(tile["rows"], window, columns, slices, runs, tile["warps"], tile["stages"], capability < (8, 9))


MAX_BLOCKS = 1 << 18
"""Blocks of the longest row that the exact top-k of GPUs ranks: 1,048,576 tokens in blocks of 4."""


def topk_refusal(spec: QsaSpec, max_position: int) -> str | None:
    """Why the exact top-k of GPUs cannot rank a call's rows, or None when it can.

    >>> topk_refusal(QsaSpec(block_tokens=1), 1_048_575)
    'rows of 1048576 blocks: the exact top-k ranks at most 262144'
    """
    blocks = spec.visible_blocks(max_position)
    return None if blocks <= MAX_BLOCKS else f"rows of {blocks} blocks: the exact top-k ranks at most {MAX_BLOCKS}"


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
    return even_chunk_rows(rows, limit_bytes // score_row_bytes(spec, max_position))


def even_chunk_rows(rows: int, most: int) -> int:
    """Rows of a chunk, up to `most` or one: a call's chunks are even, and whole windows.

    >>> even_chunk_rows(1616, 686)
    544
    """
    if rows <= max(most, 1):
        return max(rows, 1)
    even = -(-rows // -(-rows // max(most, 1)))
    return min(-(-even // SCORE_CHUNK_UNIT) * SCORE_CHUNK_UNIT, max(most, 1))


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
class Sm7xScoreConfig:
    """How the score stage of `sm7x` cuts its work.

    capability       compute capability of the device it is compiled for
    quad_pairs       whether its products are Volta's (m8n8k4), or else Turing's (m16n8k8)
    rows             rows that a program has room for: 1, 2, 4, 8 or 16
    window           rows that a program takes, at most `rows`
    strips           tiles of 16 blocks that a warp scores at a time
    warps            of a program
    resident         programs that a multiprocessor should hold: bounds the registers of a thread
    slice_blocks     blocks of a row that a program scores, whole strips
    runs             requests of a window that have a program each; the last takes all that are left
    product_columns  blocks whose products with all rows cuBLAS could make at a time, which bounds its memory; 0 where
                     the paged scorer takes every row
    programs         of the paged scorer that the device has use for, where cuBLAS leaves it a part of the rows; 0 keeps
                     this configuration for them
    """

    capability: tuple[int, int]
    quad_pairs: bool
    rows: int
    window: int
    strips: int
    warps: int
    resident: int
    slice_blocks: int
    runs: int
    product_columns: int = 0
    programs: int = 0

    @property
    def strip_blocks(self) -> int:
        """Blocks that a warp scores at a time."""
        return self.strips * SM7X_TILE


SM7X_TILE = 16
"""Lines and columns of a matrix product of `sm7x`."""

SM7X_MAX_INDEX_DIM = 256

SM7X_SHARED_BYTES = 48 << 10
"""Shared memory that queries of a program of `sm7x` may take: what every program has without asking for more."""


def sm7x_query_bytes(spec: QsaSpec, rows: int) -> int:
    """Shared memory that the queries of so many rows take in a program of `sm7x`, padding included (`line_units`).

    >>> sm7x_query_bytes(QsaSpec(), 16)
    20480
    """
    lines = -(-spec.index_heads * rows // SM7X_TILE) * SM7X_TILE
    units = -(-spec.index_dim // 32) * 4
    return lines * 16 * (units + (12 - units % 8) % 8)


def sm7x_score_refusal(spec: QsaSpec, q_dtype: torch.dtype, cache_dtype: torch.dtype, facts: DeviceFacts) -> str | None:
    """Why the score stage of `sm7x` cannot score a layer on a device, or None when it can.

    >>> v100 = DeviceFacts.named("v100")
    >>> sm7x_score_refusal(QsaSpec(), torch.float16, torch.float16, v100)
    >>> sm7x_score_refusal(QsaSpec(), torch.bfloat16, torch.bfloat16, v100)
    'BF16 index queries: sm_70 has no tensor cores for BF16, use FP16'
    >>> sm7x_score_refusal(QsaSpec(index_dim=40), torch.float16, FP8, v100)
    'index_dim must be a multiple of 16 up to 256, got 40'
    """
    if facts.capability is None or not (7, 0) <= facts.capability < (8, 0):
        return f"made for sm_70 to sm_75, got {facts.arch}"
    names = {torch.bfloat16: "BF16", torch.float32: "FP32"}
    for what, dtype, allowed in (
        ("index queries", q_dtype, (torch.float16,)),
        ("an index cache", cache_dtype, (torch.float16, FP8)),
    ):
        if dtype not in allowed:
            name = names.get(dtype, str(dtype))
            return f"{name} {what}: {facts.arch} has no tensor cores for {name}, use FP16"
    if spec.index_dim % 16 or not 16 <= spec.index_dim <= SM7X_MAX_INDEX_DIM:
        return f"index_dim must be a multiple of 16 up to {SM7X_MAX_INDEX_DIM}, got {spec.index_dim}"
    wanted = sm7x_query_bytes(spec, 1)
    if wanted > SM7X_SHARED_BYTES:
        return f"{spec.index_heads} index heads of {spec.index_dim} need {wanted} bytes of shared memory for one row"
    return None


def sm7x_score_config(
    spec: QsaSpec,
    rows: int,
    requests: int,
    max_position: int,
    facts: DeviceFacts,
    limit_bytes: int,
    batch_invariant: bool = False,
) -> Sm7xScoreConfig:
    """The preferred configuration of `sm7x`'s score stage for some rows of a call. Raises ValueError for a CPU.

    limit_bytes      workspace of the stage: cuBLAS's keys and products take half of it, scores the other
    batch_invariant  takes the paged scorer with the same tile whatever the rows: cuBLAS chooses kernels by shape

    Whether one request brings the rows that cuBLAS is for is not known here: `score_split` tells for each call.

    >>> long = sm7x_score_config(QsaSpec(), 320, 1, 183_999, DeviceFacts.named("rtx8000"), 128 << 20)
    >>> long.product_columns, long.rows
    (11520, 16)
    >>> sm7x_score_config(QsaSpec(), 320, 64, 32_767, DeviceFacts.named("v100"), 128 << 20).window    # 5 to verify
    5
    """
    if facts.capability is None:
        raise ValueError(f"no score configuration is made for {facts.arch}")
    width = max(spec.visible_blocks(max_position), 1)
    programs = facts.multiprocessors * sm7x_table.PROGRAMS
    columns = 0
    if not batch_invariant and sm7x_prefers_products(rows, width):
        columns = product_columns(spec, rows, width, limit_bytes // 2)
    return Sm7xScoreConfig(
        facts.capability,
        facts.capability < (7, 5),
        **sm7x_paged_sizes(spec, rows, requests, width, programs, batch_invariant),
        product_columns=columns,
        programs=programs,
    )


def sm7x_tiles(spec: QsaSpec) -> list[sm7x_table.ScoreTile]:
    """Tiles of the paged scorer whose queries fit shared memory; the smallest in any case."""
    tiles = [tile for tile in sm7x_table.TILES if sm7x_query_bytes(spec, tile["rows"]) <= SM7X_SHARED_BYTES]
    return tiles or [sm7x_table.TILES[0]]


def sm7x_paged_sizes(
    spec: QsaSpec, rows: int, requests: int, width: int, programs: int, batch_invariant: bool = False
) -> dict[str, int]:
    """Fields of `Sm7xScoreConfig` that say how the paged scorer cuts rows of up to `width` blocks."""
    together = -(-rows // max(requests, 1))
    tiles = sm7x_tiles(spec)
    tile = next((tile for tile in tiles if tile["rows"] >= together and not batch_invariant), tiles[-1])
    even = rows == together * requests and 0 < together <= tile["rows"]
    window = together if even else tile["rows"]
    slices = max(programs // max(-(-rows // window), 1), 1)
    # A slice keeps every warp at work, where there are as many blocks.
    round_blocks = tile["strips"] * SM7X_TILE * sm7x_table.WARPS
    return {
        "rows": tile["rows"],
        "window": window,
        "strips": tile["strips"],
        "warps": sm7x_table.WARPS,
        "resident": sm7x_resident(spec, tile["rows"], tile["strips"]),
        "slice_blocks": -(-width // (slices * round_blocks)) * round_blocks,
        "runs": 1 if even else min(max(requests, 1), tile["rows"], sm7x_table.MAX_RUNS),
    }


def sm7x_resident(spec: QsaSpec, rows: int, strips: int) -> int:
    """Programs of 128 threads that the 65,536 registers of a multiprocessor hold without spilling.

    >>> [sm7x_resident(QsaSpec(), rows, strips) for rows, strips in ((1, 1), (4, 1), (8, 2), (16, 2))]
    [4, 4, 3, 2]
    """
    tiles = min(-(-spec.index_heads * rows // SM7X_TILE), 4) * strips
    few = 2 if tiles > 4 or spec.index_dim > 128 else 3
    return 4 if tiles == 1 and spec.index_dim <= 128 else few


def sm7x_prefers_products(rows: int, width: int) -> bool:
    """Whether cuBLAS scores so many rows of one request, of up to `width` blocks."""
    return rows >= sm7x_fewest_product_rows(width)


def sm7x_fewest_product_rows(width: int) -> int:
    """Fewest rows of one request, of up to `width` blocks, that cuBLAS scores.

    >>> sm7x_fewest_product_rows(7250), sm7x_fewest_product_rows(46_000)
    (145, 64)
    """
    return max(sm7x_table.PRODUCT_ROWS, -(-sm7x_table.PRODUCT_SCORES // max(width, 1)))


def sm7x_score_chunk_rows(
    spec: QsaSpec, rows: int, max_position: int, limit_bytes: int, batch_invariant: bool = False
) -> int:
    """Rows to score at a time: `score_chunk_rows` within the limit, or half of it where cuBLAS may need the other.

    >>> sm7x_score_chunk_rows(QsaSpec(), 1616, 183_999, 128 << 20)
    343
    """
    width = max(spec.visible_blocks(max_position), 1)
    products = not batch_invariant and sm7x_prefers_products(rows, width)
    return score_chunk_rows(spec, rows, max_position, limit_bytes // 2 if products else limit_bytes)


def sm7x_score_bytes(spec: QsaSpec, config: Sm7xScoreConfig, rows: int, max_position: int) -> int:
    """Bytes of the scores and segment maxima of a chunk of rows, and of cuBLAS's keys and products."""
    return rows * score_row_bytes(spec, max_position) + config.product_columns * product_bytes(spec, rows)


@dataclass(frozen=True)
class Product:
    """Rows of one request that cuBLAS scores.

    request      whose keys they are multiplied with
    start, stop  the rows; `stop` is the one after the last
    width        most blocks that one of them sees
    columns      blocks whose products are made at a time
    """

    request: int
    start: int
    stop: int
    width: int
    columns: int


def product_bytes(spec: QsaSpec, rows: int) -> int:
    """Bytes of one gathered key in FP16 or BF16 and of its products."""
    return 2 * spec.index_dim + 4 * rows * spec.index_heads


def product_columns(spec: QsaSpec, rows: int, width: int, limit_bytes: int) -> int:
    """Blocks, of up to `width`, whose products with so many rows cuBLAS makes at a time: within a limit, or 128."""
    unit = product_table.PRODUCT_COLUMNS
    most = max(limit_bytes // product_bytes(spec, rows) // unit, 1)
    all_units = -(-width // unit)
    # Even chunks: a narrow last one would leave most of a device without work.
    return -(-all_units // -(-all_units // most)) * unit
