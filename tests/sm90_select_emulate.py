"""The fused indexer of sm90 on the CPU: its rankings run there as CUDA C++, its tensor-core kernels as Python twins.

A twin reads the packed parameters by the names that its source gives them, and takes from the memory behind them what
the kernel would: so the host code that launches them is tested too.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from flashqsa import reference
from flashqsa.kernels.nvrtc import Kernel, Source
from flashqsa.kernels.sm90.select import select_chunks
from flashqsa.plan import SelectPlan
from flashqsa.select_shape import THREADS, TILE_BLOCKS, FusedShape
from flashqsa.values import IndexCache, QsaSpec, Rows, Scores, Selection
from tests.both_devices import poisoned_memory
from tests.nvrtc_emulate import emulated_launches

Array = NDArray[Any]

EVERY_BLOCK, LEAST_SCORE = 0x7FFFFFFF, np.finfo(np.float32).min
"""Of a floor that lets every number through."""

FLOOR = np.dtype([("least", np.float32), ("last", np.int32)])
SURVIVOR = np.dtype([("score", np.float32), ("block", np.int32)])


def sampled_blocks(samples: int, stride: int) -> Array:
    """The blocks that are sampled, in order: `sampled_block` of `sampling.cuh`."""
    sample = np.arange(samples, dtype=np.uint64)
    hashed = (sample ^ sample >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    hashed = (hashed ^ hashed >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return (sample * stride + ((hashed ^ hashed >> 16) & stride - 1)).astype(np.int64)


def blocks_sampled(seen: int, top_blocks: int, rank: int, stride: int) -> int:
    """How many are sampled of those that a row sees; none where every number goes on."""
    return seen // stride if seen > top_blocks and seen // stride > rank else 0


def reaches(scores: Array, blocks: Array, least: float, last: int) -> Array:
    """Which blocks go on, by a floor's rule: they score more, or as much and their id is no higher than `last`."""
    found: Array = (scores > least) | ((scores == least) & (blocks <= last))
    return found


def members(source: Source) -> dict[str, str]:
    """Names of the members of a source's `Arguments`, in order, with their types as codes of the `struct` module."""
    (body,) = re.findall(r"struct Arguments \{\n(.*?)\n\};", source.read(), flags=re.S)
    code = {"int": "i", "long long": "q", "float": "f"}
    found = {}
    for kind, names in re.findall(r"^    (?:const )?([^,;/]+) (\w+(?:, \w+)*);", body, flags=re.M):
        for name in names.split(", "):
            found[name] = "P" if "*" in kind else code[kind]
    return found


def memory(pointer: int, dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...] | None = None) -> Array:
    """What lies at an address, as it is there: writing to the result writes to it. Strides in bytes."""
    dtype = np.dtype(dtype)
    steps = strides or tuple(dtype.itemsize * int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
    size = sum((length - 1) * step for length, step in zip(shape, steps, strict=True)) + dtype.itemsize
    if 0 in shape:
        return np.empty(shape, dtype)
    found: Array = np.ndarray(shape, dtype, (ctypes.c_char * size).from_address(pointer), 0, steps)
    return found


ScoreRow = Callable[[Any, int, int, int], Array]
"""Scores of a row's blocks, -inf on a hole: of the arguments, the row, its request and the number of its blocks."""


@dataclass
class Twins:
    """What stands for the kernels of `score.cu` and `rescore.cu` in one call, and what they saw.

    score_row      gives a row's scores
    first_request  where the call's rows begin in memory
    most           survivors of a row that a program ranks
    seed           of the order in which survivors are listed
    failed         rows of the call that were listed to be done again
    must_fail      those that have to be, by their floors
    wrong          what contradicts the rules for floors
    """

    score_row: ScoreRow
    first_request: int
    most: int
    seed: int = 0
    failed: list[int] = field(default_factory=list)
    must_fail: list[int] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def launch(self, kernel: Kernel, programs: int, arguments: tuple[int | float, ...]) -> None:
        """Runs a kernel's twin."""
        a = SimpleNamespace(**dict(zip(members(kernel.source), arguments, strict=True)))
        macros = dict(kernel.source.defines)
        a.heads, a.dim = macros["HEADS"], macros["DIM"]
        a.first = (a.request - self.first_request) // 4
        if kernel.source.name == "score.cu":
            assert programs == -(-a.rows // (256 // a.heads)) * a.slices
            self._score(a, bool(macros["SAMPLE"]))
        else:
            self._rescore(a)

    def _score(self, a: Any, sample: bool) -> None:
        requests, positions = memory(a.request, np.int32, (a.rows,)), memory(a.position, np.int32, (a.rows,))
        rng = np.random.default_rng(self.seed)
        for row in range(a.rows):
            owner, at = int(requests[row]), int(positions[row])
            live = 0 <= owner < a.requests and 0 <= at <= a.max_position
            seen = (at + 1) // a.block_tokens if live else 0
            drawn = blocks_sampled(seen, a.top, a.rank, a.stride)
            chosen = sampled_blocks(drawn, a.stride)
            if sample:
                samples = memory(a.samples + row * a.samples_stride * 4, np.float32, (drawn,))
                samples[:] = self.score_row(a, row, owner, seen)[chosen] if drawn else 0
            else:
                self._put_survivors(a, row, owner, seen, chosen, rng)

    def _put_survivors(self, a: Any, row: int, owner: int, seen: int, chosen: Array, rng: np.random.Generator) -> None:
        floor = memory(a.floors, FLOOR, (a.rows,))[row]
        least, last = float(floor["least"]), int(floor["last"])
        counts = memory(a.counts + row * a.slices * 4, np.int32, (a.slices,))
        counts[:] = 0
        if np.isnan(least):
            if seen > a.top:
                self.wrong.append(f"row {a.first + row} sees {seen} blocks, of which its floor lets none through")
            return
        scores, ids = self.score_row(a, row, owner, seen), np.arange(seen)
        self._check_floor(a.first + row, scores[chosen], chosen, least, last, a.rank)
        through = rng.permutation(ids[reaches(scores, ids, least, last)])
        for part in range(a.slices):
            mine = through[through // TILE_BLOCKS % a.slices == part]
            counts[part] = mine.size
            mine = mine[: a.capacity]
            start = a.survivors + (row * a.slices + part) * a.capacity * SURVIVOR.itemsize
            survivors = memory(start, SURVIVOR, (mine.size,))
            survivors["score"], survivors["block"] = scores[mine], mine
        every = least == LEAST_SCORE and last == EVERY_BLOCK
        too_few = through.size < a.top and not every
        if too_few or through.size > self.most or counts.max() > a.capacity:
            self.must_fail.append(a.first + row)

    def _check_floor(self, row: int, scores: Array, blocks: Array, least: float, last: int, rank: int) -> None:
        """As many samples as the rank says reach the floor, the best of them; or every block does."""
        numbers = scores > -np.inf
        through = set(blocks[reaches(scores, blocks, least, last)].tolist())
        if numbers.sum() <= rank:
            if (least, last) != (LEAST_SCORE, EVERY_BLOCK):
                self.wrong.append(f"row {row}: {numbers.sum()} samples are numbers, yet the floor is {least}, {last}")
            return
        ranked = sorted(
            (-float(score), int(block)) for score, block in zip(scores, blocks, strict=True) if score > -np.inf
        )
        if through != {block for _, block in ranked[:rank]}:
            self.wrong.append(f"row {row}: {len(through)} samples reach the floor {least}, {last} at rank {rank}")

    def _rescore(self, a: Any) -> None:
        listed = int(memory(a.failed, np.int32, (1,))[0])
        rows = sorted(memory(a.failed + 4, np.int32, (listed,)).tolist())
        assert len(set(rows)) == listed
        for row in rows:
            self.failed.append(a.first + row)
            owner = int(memory(a.request, np.int32, (row + 1,))[row])
            seen = int(memory(a.visible, np.int32, (row + 1,))[row])
            scores = torch.from_numpy(self.score_row(a, row, owner, seen))[None]
            found = reference.topk(Scores(scores, torch.tensor([seen])), a.top)
            memory(a.blocks + row * a.blocks_stride * 4, np.int32, (a.top,))[:] = found.blocks[0].numpy()
            memory(a.count, np.int32, (row + 1,))[row] = int(found.count[0])


def from_memory(a: Any, row: int, owner: int, seen: int) -> Array:
    """Scores of FP16 queries and keys where the arguments say they are: sums in FP32, heads in pairs."""
    q = memory(a.q + row * a.q_row, np.float16, (a.heads, a.dim), (a.q_head, 2)).astype(np.float32)
    block = np.arange(seen)
    column, place = block // a.page_blocks, block % a.page_blocks
    table = memory(a.page_table + owner * a.table_stride * 4, np.int32, (a.table_pages,))
    page = np.where(column < a.table_pages, table[np.minimum(column, a.table_pages - 1)], -1)
    there = (page >= 0) & (page < a.pages)
    strides = (a.key_page, a.key_place, 2)
    keys = memory(a.keys, np.float16, (a.pages, a.page_blocks, a.dim), strides)[np.where(there, page, 0), place]
    parts = np.maximum(q @ keys.astype(np.float32).T, 0)  # NaN stays NaN
    scores = parts.reshape(a.heads // 2, 2, seen).sum(axis=1).sum(axis=0) * np.float32(a.scale)
    found: Array = np.where(there, scores, np.float32(-np.inf)).astype(np.float32)
    return found


def from_matrix(values: NDArray[np.float32]) -> ScoreRow:
    """Scores that are given: row by row of the call."""
    return lambda a, row, _owner, seen: values[a.first + row, :seen]


class Emulator:
    """Launches on CPU tensors run in the emulator, those of tensor cores by `twins`."""

    def __init__(self) -> None:
        self.twins: Twins | None = None

    def select(
        self, index_q: Tensor, cache: IndexCache, rows: Rows, spec: QsaSpec, shape: FusedShape, score_row: ScoreRow
    ) -> tuple[Selection, Twins]:
        """`select_chunks` over memory full of poison, and what its twins saw."""
        self.twins = Twins(score_row, rows.request.data_ptr(), shape.survivor_keys * THREADS, seed=rows.count)
        plan = SelectPlan(spec.visible_blocks(rows.max_position), shape.chunk_rows, 0, (9, 0), fused=shape)
        with poisoned_memory():
            selection = select_chunks(index_q, cache, rows, spec, plan)
        return selection, self.twins


def sorted_out(scores: Scores, top_blocks: int) -> Selection:
    """A full sort's selection; rows that see no more than they may select take all that is not on a hole (-inf)."""
    few = (scores.visible <= top_blocks)[:, None] & (scores.values != float("-inf"))
    return reference.topk(Scores(torch.where(few, 0.0, scores.values), scores.visible), top_blocks)


@contextmanager
def emulated_select(folder: Path) -> Iterator[Emulator]:
    """While it holds, `select_chunks` works on CPU tensors. Compiles into a folder."""
    here = Emulator()
    with emulated_launches(folder), pytest.MonkeyPatch.context() as patch:
        emulated = Kernel.launch

        def launch(kernel: Kernel, device: torch.device, programs: int, *arguments: int | float) -> None:
            if kernel.source.suffix == "a" and device.type == "cpu":
                assert here.twins is not None
                here.twins.launch(kernel, programs, arguments)
            else:
                emulated(kernel, device, programs, *arguments)

        patch.setattr(Kernel, "launch", launch)
        yield here
