"""How the fused indexer cuts its work: what it samples, where it sets floors, and how much room survivors get.

A row's blocks are sampled, the sample's block at a rank is the row's floor, and only blocks that reach it are kept. For
scores in no order, floors let too few through less than once in a hundred million rows, and more than survivors have
room for less than once in fifty thousand; rows to which either happens are selected from all their scores, so the
result never depends on chance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flashqsa.device import DeviceFacts
from flashqsa.values import SEGMENT_BLOCKS, QsaSpec

WINDOW_LINES = 256
"""Query lines (rows times index heads) of a program: the widest product that Hopper's tensor cores take."""

TILE_BLOCKS = 128
"""Blocks that a program scores at a time."""

THREADS = 256
"""Of a program that ranks samples or survivors."""

MOST_KEYS = 32
"""Keys that such a thread ranks at most."""

FLOOR_SIGMAS = 5.0
"""How far a floor lies below the best blocks: standard deviations of the blocks that a sample's rank lets through."""

ROOM_SIGMAS = 5.0
"""How far beyond their expected number survivors have room, likewise."""

USUAL_SIGMAS = 2.0
"""Of the rows that are ranked in fewer registers, likewise."""

MOST_SLICES = 8
"""Programs that share a window's blocks."""

FLOAT_BYTES, SURVIVOR_BYTES = 4, 8
"""Of a sample's score; of a survivor's score and id."""

ROW_BYTES = 8 + 4 + 4
"""Of a row's floor, its number of visible blocks, and its place in the list of rows to do again."""


@dataclass(frozen=True)
class FusedShape:
    """How the fused indexer of `sm90` cuts a call.

    window_rows    rows of a program
    chunk_rows     rows of a pass over the blocks, whole windows: what of them lies in memory fits the workspace limit
    slices         programs that share a window's tiles
    stride         blocks of which one is sampled, a power of two
    rank           place in the sample, from 1, of the block that sets the floor
    samples        of the longest row
    capacity       survivors that a program may put out for a row
    sample_keys    samples of a row that a thread ranks: 4, 8, 16 or 32
    survivor_keys  survivors of a row that a thread ranks at most, a multiple of 4
    usual_keys     those that it ranks in most rows
    programs       that do rows again, each with room for all scores of one
    """

    window_rows: int
    chunk_rows: int
    slices: int
    stride: int
    rank: int
    samples: int
    capacity: int
    sample_keys: int
    survivor_keys: int
    usual_keys: int
    programs: int

    @property
    def words(self) -> str:
        """What it does, in a line."""
        survivors = f"about {self.stride * self.rank:,} blocks a row go on"
        scorers = f"{self.slices} programs score a window of {self.window_rows} rows"
        return f"one block of {self.stride} sampled, {survivors}; {scorers}"

    def room_bytes(self, rows: int, width: int) -> int:
        """What samples, then survivors, then scores of rows that are done again take: they take turns.

        >>> shape = fused_shape(QsaSpec(), 1616, 183_999, DeviceFacts.named("h200"), 128 << 20)
        >>> shape.room_bytes(1616, 46_000) >> 20, shape.slices, shape.stride, shape.rank
        (43, 5, 16, 76)
        """
        return max(
            rows * self.samples * FLOAT_BYTES,
            rows * self.slices * self.capacity * SURVIVOR_BYTES,
            min(self.programs, rows) * scratch_floats(width) * FLOAT_BYTES,
        )

    def workspace_bytes(self, rows: int, width: int) -> int:
        """All that a pass over so many rows needs."""
        return self.room_bytes(rows, width) + rows * (ROW_BYTES + 4 * self.slices)


def scratch_floats(width: int) -> int:
    """Scores of a row of `width` blocks and maxima of its segments, each in whole vectors of 16 bytes."""
    segments = -(-width // SEGMENT_BLOCKS)
    return segments * SEGMENT_BLOCKS + -(-segments // 4) * 4


def floor_rank(top_blocks: int, stride: int) -> int:
    """The sample's rank whose block sets a floor that `top_blocks` blocks of the row reach, but for rare chance.

    The blocks that reach the sample's r-th best number about stride * r, give or take stride * sqrt(r) (the standard
    deviation of a negative binomial count); the least r with stride * (r - FLOOR_SIGMAS * sqrt(r)) >= top_blocks.

    >>> [floor_rank(512, stride) for stride in (8, 16, 64)]
    [119, 76, 40]
    """
    root = (FLOOR_SIGMAS + math.sqrt(FLOOR_SIGMAS**2 + 4 * top_blocks / stride)) / 2
    return math.ceil(root**2)


def sample_stride(width: int) -> int:
    """Blocks of which one is sampled: one in 16 costs a sixteenth of the scores; long rows draw about 4,096.

    >>> [sample_stride(blocks) for blocks in (7_250, 46_000, 262_144)]
    [8, 16, 64]
    """
    if width < 16 << 10:
        return 8
    return max(16, 1 << max(-(-width // 4096) - 1, 0).bit_length())


def fused_shape(spec: QsaSpec, rows: int, max_position: int, facts: DeviceFacts, limit_bytes: int) -> FusedShape:
    """The fused indexer's sizes for a call that `fused_refusal` has nothing against."""
    width = max(spec.visible_blocks(max_position), 1)
    stride = sample_stride(width)
    rank = floor_rank(spec.top_blocks, stride)
    wanted = math.ceil(stride * (rank + ROOM_SIGMAS * math.sqrt(rank)))
    usual = math.ceil(stride * (rank + USUAL_SIGMAS * math.sqrt(rank)))
    survivor_keys = _whole_vectors(-(-wanted // THREADS))
    samples = max(width // stride, 1)
    samples += -samples % 4
    window = WINDOW_LINES // spec.index_heads
    programs = min(facts.multiprocessors, max(limit_bytes // 2 // (scratch_floats(width) * FLOAT_BYTES), 1))

    def shape(chunk: int) -> FusedShape:
        slices = _slices(-(-chunk // window), -(-width // TILE_BLOCKS), facts.multiprocessors)
        # Tiles go round the slices, so each gets its share of what clusters; half as much again allows for the rest.
        share = wanted if slices == 1 else 3 * wanted // (2 * slices) + TILE_BLOCKS
        capacity = min(-(-share // 64) * 64, survivor_keys * THREADS)
        return FusedShape(
            window,
            chunk,
            slices,
            stride,
            rank,
            samples,
            capacity,
            _sample_keys(samples),
            survivor_keys,
            -(-usual // THREADS),
            programs,
        )

    windows = -(-max(rows, 1) // window)
    for passes in range(1, windows + 1):
        found = shape(-(-windows // passes) * window)
        if found.workspace_bytes(min(rows, found.chunk_rows), width) <= limit_bytes:
            return found
    return shape(window)


def _slices(windows: int, tiles: int, multiprocessors: int) -> int:
    """Programs per window that keep the multiprocessors busiest: the fewest of those that are equally good."""

    def busy(slices: int) -> float:
        programs = windows * slices
        return programs / (-(-programs // multiprocessors) * multiprocessors)

    choices = range(1, min(MOST_SLICES, max(tiles, 1)) + 1)
    return max(choices, key=lambda slices: (round(busy(slices), 2), -slices))


def _sample_keys(samples: int) -> int:
    """4, 8, 16 or 32 for a thread: few kernels serve all lengths."""
    return 4 << max(-(-samples // (4 * THREADS)) - 1, 0).bit_length()


def _whole_vectors(keys: int) -> int:
    return -(-keys // 4) * 4


def begins_aligned(*tensors: Tensor) -> bool:
    """Whether every last row of tensors, keys or queries, begins at a multiple of 16 bytes.

    >>> begins_aligned(torch.zeros(3, 4, 128, dtype=torch.float16)), begins_aligned(torch.zeros(3, 4, 129)[..., 1:])
    (True, False)
    """
    return all(
        tensor.data_ptr() % 16 == 0
        and all(
            stride * tensor.element_size() % 16 == 0
            for stride, length in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True)
            if length > 1
        )
        for tensor in tensors
    )


def _hopper_refusal(
    spec: QsaSpec, q_dtype: torch.dtype, cache_dtype: torch.dtype, aligned: bool, facts: DeviceFacts
) -> str | None:
    """What both forms of Hopper's selection ask of a call."""
    if facts.capability != (9, 0):
        return f"made for sm_90, got {facts.arch}"
    if spec.index_heads not in (2, 4) or spec.index_dim not in (64, 128):
        return f"made for 2 or 4 index heads of 64 or 128, got {spec.index_heads} of {spec.index_dim}"
    if cache_dtype not in (torch.float16, torch.bfloat16) or q_dtype != cache_dtype:
        return f"made for FP16 or BF16 index queries and keys of one dtype, got {q_dtype} and {cache_dtype}"
    if not aligned:
        return "index queries or keys do not begin at multiples of 16 bytes"
    return None


def fused_refusal(
    spec: QsaSpec, q_dtype: torch.dtype, cache_dtype: torch.dtype, aligned: bool, max_position: int, facts: DeviceFacts
) -> str | None:
    """Why the fused indexer of `sm90` cannot select for a layer on a device, or None when it can.

    aligned  whether index queries and keys begin at multiples of 16 bytes

    >>> h200 = DeviceFacts.named("h200")
    >>> fused_refusal(QsaSpec(), torch.bfloat16, torch.bfloat16, True, 183_999, h200)
    >>> fused_refusal(QsaSpec(index_heads=8), torch.bfloat16, torch.bfloat16, True, 183_999, h200)
    'made for 2 or 4 index heads of 64 or 128, got 8 of 128'
    """
    if (reason := _hopper_refusal(spec, q_dtype, cache_dtype, aligned, facts)) is not None:
        return reason
    width = max(spec.visible_blocks(max_position), 1)
    rank = floor_rank(spec.top_blocks, sample_stride(width))
    wanted = sample_stride(width) * (rank + ROOM_SIGMAS * math.sqrt(rank))
    if wanted > MOST_KEYS * THREADS:
        return (
            f"{spec.top_blocks} of {width} blocks would leave {wanted:.0f} survivors, room is for {MOST_KEYS * THREADS}"
        )
    return None


FUSED_FROM_ROWS, FUSED_FROM_ROWS_PER_REQUEST, FUSED_FROM_SCORES = 1024, 64, 24 << 20
"""Rows of a call, rows per request and scores (rows times the longest row's blocks) from which fusing is faster."""


def decodes_at_once(spec: QsaSpec, rows: int, rows_per_request: int, max_position: int, batch_invariant: bool) -> bool:
    """Whether `sm90` takes one launch for a call, a cluster for each row, where the route `fused` is taken at all.

    Few rows, one of a request: rows of one request would each read its keys. Scores are then those of one row's tile,
    so not where a row must get the same bits whatever shares its launch.
    """
    blocks = spec.visible_blocks(max_position)
    timed = any(rows <= most_rows and blocks <= most_blocks for most_rows, most_blocks, *_ in DECODE_SIZES)
    return timed and rows_per_request <= 1 and not batch_invariant


def fused_loses_to_scores(
    spec: QsaSpec, rows: int, rows_per_request: int, max_position: int, batch_invariant: bool = False
) -> str | None:
    """Why a call should have all its scores written and ranked instead, or None where selecting at once is faster.

    Measured on one H200 by graph replay, 2026-11-30: 512 rows x 46,000 blocks 153 us fused and 113 in full, 1,024 rows
    171 and 225; 1,616 rows x 12,500 blocks 122 and 122, x 16,000 134 and 139; 8,192 rows x 7,250 336 and 393. Of one
    row per request see `DECODE_SIZES`.

    >>> fused_loses_to_scores(QsaSpec(), 1616, 1616, 183_999)
    >>> fused_loses_to_scores(QsaSpec(), 16, 1, 131_071)
    >>> fused_loses_to_scores(QsaSpec(), 64, 4, 131_071)
    'scores in full are faster below 1024 rows, got 64'
    """
    least = FUSED_FROM_ROWS_PER_REQUEST
    scores = rows * spec.visible_blocks(max_position)
    if decodes_at_once(spec, rows, rows_per_request, max_position, batch_invariant):
        if rows < DECODE_FROM_ROWS:
            return f"scores in full are faster below {DECODE_FROM_ROWS} requests of one row, got {rows}"
        return None
    if rows < FUSED_FROM_ROWS:
        return f"scores in full are faster below {FUSED_FROM_ROWS} rows, got {rows}"
    if rows_per_request < least:
        return f"scores in full are faster below {least} rows per request on average, got {rows_per_request}"
    if scores < FUSED_FROM_SCORES:
        return f"scores in full are faster below {FUSED_FROM_SCORES >> 20}M scores, got {scores / (1 << 20):.1f}M"
    return None


MOST_PROGRAMS = 16
"""Programs of the largest cluster: as many as lie within one of Hopper's groups of 14 to 18 multiprocessors."""

DECODE_TILE = 16
"""Keys that a warp of `sm90/decode.cu` multiplies at a time."""

RING_BYTES = 128 << 10
"""Keys that a multiprocessor has on their way at most: several times what memory's bandwidth and latency ask of it."""

DECODE_SIZES = (
    (8, 32_768, 8, 512, 1),
    (16, 32_768, 6, 512, 1),
    (32, 32_768, 6, 256, 2),
    (64, 32_768, 2, 512, 1),
    (132, 8192, 2, 256, 2),
)
"""Up to so many rows of so many blocks: programs of a row, threads of a program, programs on a multiprocessor.

Of clusters of 2 to 16 with 256 or 512 threads, the fastest on one H200 by graph replay, keys not in L2, 2026-11-30. One
row per request; microseconds of `smxx:plain` and of this, at 32,768 and 131,072 tokens: 8 rows 32.2 and 28.7 (131,072);
16 rows 19.9 and 18.1, 49.9 and 45.3; 32 rows 30.4 and 27.2, 83.7 and 81.7; 64 rows 47.7 and 42.0, 152.3 and 139.3;
128 rows 82.1 and 74.5 (32,768). 1 row 11.2 and 13.1, 4 rows 13.7 and 14.4 (32,768): those are left to `smxx`. Of 132
multiprocessors no more than 15 groups of 8 lie together: 16 rows on clusters of 8 take two turns.
"""

DECODE_FROM_ROWS = 8
"""Rows from which one launch was the faster way."""


@dataclass(frozen=True)
class DecodeShape:
    """How `sm90/decode.cu` cuts a call of few rows: a cluster of programs for each row.

    cluster       programs of a row, at most `MOST_PROGRAMS`
    threads       of a program
    stages        tiles of keys that are on their way to a warp
    resident      programs that a multiprocessor has room for
    share_blocks  blocks of the longest row that a program takes, a multiple of `DECODE_TILE`
    """

    cluster: int
    threads: int
    stages: int
    resident: int
    share_blocks: int

    @property
    def words(self) -> str:
        """What it does, in a line."""
        return f"one launch, {self.cluster} programs for each row"

    @property
    def table_bytes(self) -> int:
        """Room for what programs tell each other, and for page-table entries of keys that are to come."""
        warps = self.threads // 32
        return -(-(3072 + warps * self.stages * (DECODE_TILE + 1) * 4) // 128) * 128

    def shared_bytes(self, spec: QsaSpec) -> int:
        """Shared memory of a program.

        >>> shape = decode_shape(QsaSpec(), 16, 131_071, DeviceFacts.named("h200"))
        >>> shape, shape.shared_bytes(QsaSpec()) >> 10
        (DecodeShape(cluster=6, threads=512, stages=2, resident=1, share_blocks=5472), 154)
        """
        ring = self.threads // 32 * self.stages * DECODE_TILE * spec.index_dim * 2
        return self.table_bytes + ring + self.share_blocks * FLOAT_BYTES


def decode_shape(spec: QsaSpec, rows: int, max_position: int, facts: DeviceFacts) -> DecodeShape:
    """The sizes for a call that `decode_refusal` has nothing against.

    >>> h200 = DeviceFacts.named("h200")
    >>> [decode_shape(QsaSpec(), rows, 131_071, h200).cluster for rows in (1, 16, 32, 64, 256)]
    [8, 6, 6, 2, 2]
    >>> decode_shape(QsaSpec(), 16, 1_048_575, h200).cluster
    8
    """
    _, _, *wanted = next((sizes for sizes in DECODE_SIZES if rows <= sizes[0]), DECODE_SIZES[-1])
    cluster, threads, resident = wanted
    sizes = ((cluster, threads, resident), *_other_sizes(cluster))
    fitting = (_decode_shape(spec, max_position, *size, facts) for size in sizes)
    found = next((shape for shape in fitting if shape is not None), None)
    if found is None:
        raise ValueError(f"rows of {spec.visible_blocks(max_position)} blocks fit no cluster")
    return found


def _other_sizes(least: int) -> list[tuple[int, int, int]]:
    """Sizes where the wanted ones do not fit: larger clusters, then fewer programs on a multiprocessor at a time."""
    return [(cluster, 256, 1) for cluster in (2, 4, 6, 8, 12, 16) if cluster >= least]


def _decode_shape(
    spec: QsaSpec, max_position: int, cluster: int, threads: int, resident: int, facts: DeviceFacts
) -> DecodeShape | None:
    """A shape with as deep a ring as fits shared memory, or None where none of two tiles a warp does."""
    share = -(-max(spec.visible_blocks(max_position), 1) // (cluster * DECODE_TILE)) * DECODE_TILE
    # A multiprocessor keeps 1 KiB for itself and for each program (CUDA C++ Programming Guide, "Shared Memory").
    room = (facts.shared_memory_bytes + 1024) // resident - 1024
    deepest = max(RING_BYTES // resident // (threads // 32 * DECODE_TILE * spec.index_dim * 2), 2)
    shapes = (DecodeShape(cluster, threads, stages, resident, share) for stages in range(deepest, 1, -1))
    return next((shape for shape in shapes if shape.shared_bytes(spec) <= room), None)


def decode_refusal(
    spec: QsaSpec, q_dtype: torch.dtype, cache_dtype: torch.dtype, aligned: bool, max_position: int, facts: DeviceFacts
) -> str | None:
    """Why the one-launch selection of `sm90` cannot select for a layer on a device, or None when it can.

    aligned  whether index queries and keys begin at multiples of 16 bytes

    >>> h200 = DeviceFacts.named("h200")
    >>> decode_refusal(QsaSpec(), torch.bfloat16, torch.bfloat16, True, 1_048_575, h200)
    >>> decode_refusal(QsaSpec(), torch.bfloat16, torch.bfloat16, True, 4_194_303, h200)
    'rows of 1048576 blocks: their scores do not fit the shared memory of 16 programs'
    """
    if (reason := _hopper_refusal(spec, q_dtype, cache_dtype, aligned, facts)) is not None:
        return reason
    if _decode_shape(spec, max_position, MOST_PROGRAMS, 256, 1, facts) is None:
        blocks = spec.visible_blocks(max_position)
        return f"rows of {blocks} blocks: their scores do not fit the shared memory of {MOST_PROGRAMS} programs"
    return None
