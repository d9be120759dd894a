"""The fused indexer of compute capability 9.0: `score.cu` twice, over a sample and over everything, and two rankings.

Floors come from the sample's scores; the scores of all blocks leave the multiprocessor only where they reach a row's
floor; what is left is ranked exactly (`nvrtc/survivors.cu`). Rows for which the floor let too few or too many blocks
through are listed on the device and selected from all their scores (`rescore.cu`) in a launch that every call makes, so
nothing waits for the device. Scores are those of `smxx`'s scorer for many rows, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from flashqsa.config import TopkConfig
from flashqsa.kernels.nvrtc import Kernel, Source
from flashqsa.kernels.nvrtc.everything import empty_selection
from flashqsa.kernels.nvrtc.topk import variant_for
from flashqsa.plan import SelectPlan
from flashqsa.select_shape import MOST_SLICES, THREADS, TILE_BLOCKS, WINDOW_LINES, FusedShape, scratch_floats
from flashqsa.values import IndexCache, QsaSpec, Rows, Selection

FOLDER = Path(__file__).parent

CAPABILITY = (9, 0)

SCORE_PARAMETERS = "P" * 9 + "q" * 6 + "i" * 12 + "f" + "0q"
"""Members of `Arguments` of `score.cu`."""

RESCORE_PARAMETERS = "P" * 9 + "q" * 7 + "i" * 5 + "f" + "0q"
"""Members of `Arguments` of `rescore.cu`."""

FLOOR_PARAMETERS = "Pq" + "P" * 5 + "i" * 6

SURVIVOR_PARAMETERS = "P" * 9 + "qq" + "i" * 7

RESCORE_STAGES = 4
"""Tiles of keys that are on their way to a warp group of `rescore.cu`."""

RESCORE_KEYS = 64
"""Keys of a tile of `rescore.cu`, of each of two warp groups."""

RESCORE_LINES = 16

SCORE_THREADS = 640
"""Of a program of `score.cu`: a warp group of producers, four of consumers."""

PRODUCER_REGISTERS, CONSUMER_REGISTERS = 64, 104
"""Of a thread: a program starts with 96 each, and what its producers give up its four times as many consumers get."""

ALIGNMENT = 1024
"""Of what the tensor cores read in shared memory."""


@dataclass(frozen=True)
class FusedKernels:
    """The kernels of the fused indexer, in the order of their launches."""

    sample: Kernel
    floors: Kernel
    score: Kernel
    select: Kernel
    rescore: Kernel

    @property
    def all(self) -> tuple[Kernel, ...]:
        """The five."""
        return self.sample, self.floors, self.score, self.select, self.rescore


def select_chunks(index_q: Tensor, index_cache: IndexCache, rows: Rows, spec: QsaSpec, plan: SelectPlan) -> Selection:
    """Each row's best blocks: what `score` and `topk` select, without a score matrix. See `pipeline.select_blocks`.

    index_q  [rows, index_heads, index_dim] FP16 or BF16, as the cache's keys

    For calls that `select_shape.fused_refusal` has nothing against. Five launches a chunk of rows; every size follows
    from host numbers. Raises CompileError, NvrtcNotFoundError, DriverError, TypeError for a plan of another mode.
    """
    shape = plan.fused
    if not isinstance(shape, FusedShape):
        raise TypeError(f"wanted a plan with a FusedShape, got {shape}")
    selection = empty_selection(rows, spec)
    if rows.count == 0:
        return selection
    width = max(spec.visible_blocks(rows.max_position), 1)
    kernels = fused_kernels(spec, shape, width, index_q.dtype == torch.bfloat16)
    if rows.count <= shape.chunk_rows:
        scratch = _Scratch.of(shape, rows.count, width, rows.request.device)
        _select_chunk(kernels, index_q, index_cache, rows, spec, shape, scratch, selection)
        return selection
    scratch = _Scratch.of(shape, shape.chunk_rows, width, rows.request.device)
    for start in range(0, rows.count, shape.chunk_rows):
        stop = min(start + shape.chunk_rows, rows.count)
        part, out = rows.slice(start, stop), selection.slice(start, stop)
        _select_chunk(kernels, index_q[start:stop], index_cache, part, spec, shape, scratch, out)
    return selection


@dataclass(frozen=True)
class _Scratch:
    """Memory of a chunk of rows.

    width    blocks of the longest row
    room     samples [rows, samples] FP32, then survivors [rows, slices, capacity, 2], then scores of rows done again
    floors   [rows, 2] int32
    visible  [rows] int32
    failed   [1 + rows] int32
    counts   [rows, slices] int32
    """

    width: int
    room: Tensor
    floors: Tensor
    visible: Tensor
    failed: Tensor
    counts: Tensor

    @staticmethod
    def of(shape: FusedShape, rows: int, width: int, device: torch.device) -> _Scratch:
        room = torch.empty(shape.room_bytes(rows, width), dtype=torch.uint8, device=device)
        numbers = torch.empty(rows * (4 + shape.slices) + 1, dtype=torch.int32, device=device)
        floors, visible, failed, counts = torch.split(numbers, [2 * rows, rows, rows + 1, rows * shape.slices])
        return _Scratch(width, room, floors, visible, failed, counts)


def _select_chunk(
    kernels: FusedKernels,
    index_q: Tensor,
    index_cache: IndexCache,
    rows: Rows,
    spec: QsaSpec,
    shape: FusedShape,
    scratch: _Scratch,
    out: Selection,
) -> None:
    """The five launches: the sample's scores, floors, survivors, their ranking, and rows that are done again."""
    device, keys, table, q_bytes = index_q.device, index_cache.keys, index_cache.page_table, index_q.element_size()
    scale = spec.score_scale * (index_cache.scale or 1.0)
    pages = keys.shape[0]

    def score(kernel: Kernel, slices: int) -> None:
        kernel.launch(
            device,
            -(-rows.count // shape.window_rows) * slices,
            index_q.data_ptr(),
            keys.data_ptr(),
            table.data_ptr(),
            rows.request.data_ptr(),
            rows.position.data_ptr(),
            scratch.room.data_ptr(),
            scratch.floors.data_ptr(),
            scratch.room.data_ptr(),
            scratch.counts.data_ptr(),
            *(stride * q_bytes for stride in index_q.stride()[:2]),
            *(stride * q_bytes for stride in keys.stride()[:2]),
            table.stride(0),
            shape.samples,
            rows.count,
            index_cache.requests,
            rows.max_position,
            table.shape[1],
            pages,
            index_cache.page_blocks,
            spec.block_tokens,
            spec.top_blocks,
            shape.rank,
            shape.stride,
            slices,
            shape.capacity,
            scale,
        )

    score(kernels.sample, min(shape.slices, -(-shape.samples // TILE_BLOCKS)))
    kernels.floors.launch(
        device,
        rows.count,
        scratch.room.data_ptr(),
        shape.samples,
        rows.request.data_ptr(),
        rows.position.data_ptr(),
        scratch.floors.data_ptr(),
        scratch.visible.data_ptr(),
        scratch.failed.data_ptr(),
        index_cache.requests,
        rows.max_position,
        spec.block_tokens,
        spec.top_blocks,
        shape.rank,
        shape.stride,
    )
    score(kernels.score, shape.slices)
    kernels.select.launch(
        device,
        rows.count,
        scratch.room.data_ptr(),
        scratch.counts.data_ptr(),
        scratch.floors.data_ptr(),
        scratch.visible.data_ptr(),
        rows.request.data_ptr(),
        table.data_ptr(),
        out.blocks.data_ptr(),
        out.count.data_ptr(),
        scratch.failed.data_ptr(),
        table.stride(0),
        out.blocks.stride(0),
        shape.slices,
        shape.capacity,
        table.shape[1],
        pages,
        index_cache.page_blocks,
        spec.top_blocks,
        bitmap_words(scratch.width),
    )
    kernels.rescore.launch(
        device,
        min(shape.programs, rows.count),
        index_q.data_ptr(),
        keys.data_ptr(),
        table.data_ptr(),
        rows.request.data_ptr(),
        scratch.visible.data_ptr(),
        scratch.failed.data_ptr(),
        scratch.room.data_ptr(),
        out.blocks.data_ptr(),
        out.count.data_ptr(),
        *(stride * q_bytes for stride in index_q.stride()[:2]),
        *(stride * q_bytes for stride in keys.stride()[:2]),
        table.stride(0),
        scratch_floats(scratch.width),
        out.blocks.stride(0),
        scratch.width,
        table.shape[1],
        pages,
        index_cache.page_blocks,
        spec.top_blocks,
        scale,
    )


def bitmap_words(width: int) -> int:
    """Words of 32 bits that hold a bit for each block of a row."""
    return -(-width // 32)


@cache
def fused_kernels(spec: QsaSpec, shape: FusedShape, width: int, bf16: bool) -> FusedKernels:
    """The kernels of a shape; equal ones share what is compiled and loaded."""
    slab = spec.index_dim // 64
    # Tiles of keys that are on their way to a program. With two heads its scores take twice the room.
    stages = 2 if spec.index_heads == 2 and slab == 2 else 3
    common = (
        ("HEADS", spec.index_heads),
        ("DIM", spec.index_dim),
        ("BF16", int(bf16)),
    )

    def score(sample: int) -> Kernel:
        defines = (
            ("SAMPLE", sample),
            *common,
            ("STAGES", stages),
            ("PRODUCER_REGISTERS", PRODUCER_REGISTERS),
            ("CONSUMER_REGISTERS", CONSUMER_REGISTERS),
        )
        source = Source("score.cu", defines, headers=("hopper.cuh", "sampling.cuh"), suffix="a", folder=FOLDER)
        shared = slab * 128 * (WINDOW_LINES + stages * TILE_BLOCKS) + ALIGNMENT
        function = "flashqsa_sample_sm90" if sample else "flashqsa_score_sm90"
        return Kernel(source, function, SCORE_PARAMETERS, CAPABILITY, SCORE_THREADS, shared)

    def ranking(keys: int, usual_keys: int, slices: int, resident: int) -> Source:
        defines = (
            ("THREADS", THREADS),
            ("KEYS", keys),
            ("USUAL_KEYS", usual_keys),
            ("SLICES", slices),
            ("RESIDENT", resident),
        )
        headers = ("paging.cuh", "ranking.cuh", "sampling.cuh")
        return Source("survivors.cu", defines, headers=headers)

    floors = ranking(shape.sample_keys, shape.sample_keys, 1, 1536 if shape.sample_keys <= 8 else 1024)
    # Rows of a few lists are read as rows of the most would be: fewer kernels, as fast.
    most = 1 if shape.slices == 1 else MOST_SLICES
    select = ranking(shape.survivor_keys, shape.usual_keys, most, 1280 if shape.survivor_keys <= 12 else 768)
    topk = variant_for(spec.top_blocks, width, TopkConfig(CAPABILITY, THREADS, THREADS))
    defines = (
        *common,
        ("STAGES", RESCORE_STAGES),
        ("THREADS", THREADS),
        ("SEGMENTS", topk.segments),
        ("MAXIMA_VECTORS", topk.maxima_vectors),
    )
    headers = ("hopper.cuh", "topk.cuh", "ranking.cuh")
    rescore = Source("rescore.cu", defines, headers=headers, suffix="a", folder=FOLDER)
    rescore_bytes = slab * 128 * (RESCORE_LINES + 2 * RESCORE_STAGES * RESCORE_KEYS) + 2 * ALIGNMENT
    return FusedKernels(
        score(1),
        Kernel(floors, "flashqsa_find_floors", FLOOR_PARAMETERS, CAPABILITY, THREADS),
        score(0),
        Kernel(
            select,
            "flashqsa_select_survivors",
            SURVIVOR_PARAMETERS,
            CAPABILITY,
            THREADS,
            4 * bitmap_words(width),
        ),
        Kernel(rescore, "flashqsa_rescore_sm90", RESCORE_PARAMETERS, CAPABILITY, THREADS, rescore_bytes),
    )
