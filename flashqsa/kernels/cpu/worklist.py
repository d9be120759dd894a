"""Groups of rows and what each has to read: the union of the rows' blocks, with a bit per row."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from flashqsa.config import AttendConfig
from flashqsa.kernels.cpu.paging import Ints, pages_of, request_runs
from flashqsa.plan import AttendPlan
from flashqsa.values import KvCache, QsaSpec, Rows, Selection, Worklist

Ids = npt.NDArray[np.int32]
Words = npt.NDArray[np.uint64]


def worklist(selection: Selection | None, rows: Rows, spec: QsaSpec, kv_cache: KvCache, plan: AttendPlan) -> Worklist:
    """Cuts rows into groups and lists the blocks of each.

    selection  None stands for every visible block

    Groups are consecutive rows of one request, so padding rows form groups of their own, without entries. Blocks on a
    hole of the KV cache are dropped; an open block is an entry of the rows that stand in it. The group sizes follow
    from the selection alone (`choose_groups`), never from where pages lie.
    """
    config = plan.config
    largest = config.group_rows[-1]
    position = rows.position.numpy().astype(np.int64)
    group_stops: list[int] = []
    group_entries: list[int] = [0]
    blocks: list[Ids] = [np.empty(0, np.int32)]
    masks: list[Words] = [np.empty(0, np.uint64)]
    for run in request_runs(rows):
        present = _present(kv_cache, run.request, int(position[run.stop - 1]), spec) if run.request >= 0 else None
        for start in range(run.start, run.stop, largest):
            stop = min(start + largest, run.stop)
            if present is None:
                pieces = [(stop - start, blocks[0], masks[0])]
            else:
                block, mask = _window(selection, position, start, stop, present, spec)
                pieces = _split(block, mask, stop - start, config, spec)
            row = start
            for count, block, mask in pieces:
                row += count
                group_stops.append(row)
                group_entries.append(group_entries[-1] + block.shape[0])
                blocks.append(block)
                masks.append(mask)
    return Worklist(
        torch.tensor([0, *group_stops], dtype=torch.int64),
        torch.tensor(group_entries, dtype=torch.int64),
        torch.from_numpy(np.concatenate(blocks)),
        torch.from_numpy(np.concatenate(masks).view(np.int64)),
    )


def _present(kv_cache: KvCache, request: int, last_position: int, spec: QsaSpec) -> npt.NDArray[np.bool_]:
    """Whether each block of a request up to the one that holds `last_position` is on a page."""
    first_tokens = np.arange(last_position // spec.block_tokens + 1) * spec.block_tokens
    return pages_of(kv_cache.page_table, request, first_tokens, kv_cache.page_tokens) >= 0


def _window(
    selection: Selection | None,
    position: Ints,
    start: int,
    stop: int,
    present: npt.NDArray[np.bool_],
    spec: QsaSpec,
) -> tuple[Ids, Words]:
    """Union of the blocks of rows `start .. stop` of one request, and which of them attend to each."""
    at = position[start:stop]
    if selection is None:
        block = np.flatnonzero(present[: at[-1] // spec.block_tokens + 1])
        # Positions ascend, so the rows that reach a block are the last ones.
        unreached = np.searchsorted(at, block * spec.block_tokens).astype(np.uint64)
        everyone = np.uint64((1 << (stop - start)) - 1)
        return block.astype(np.int32), everyone >> unreached << unreached
    bits = np.zeros(present.shape[0], dtype=np.uint64)
    chosen, count = selection.blocks.numpy(), selection.count.numpy()
    for index in range(stop - start):
        bit = np.uint64(1 << index)
        bits[chosen[start + index, : count[start + index]]] |= bit
        if (at[index] + 1) % spec.block_tokens:
            bits[at[index] // spec.block_tokens] |= bit
    block = np.flatnonzero((bits != 0) & present)
    return block.astype(np.int32), bits[block]


def _split(block: Ids, mask: Words, count: int, config: AttendConfig, spec: QsaSpec) -> list[tuple[int, Ids, Words]]:
    """Cuts a window into groups: rows, blocks and masks of each."""
    pieces: list[tuple[int, Ids, Words]] = []
    for first, size in choose_groups(mask, count, config, spec):
        rows = min(size, count - first)
        if rows == count:
            return [(rows, block, mask)]
        part = mask >> np.uint64(first) & np.uint64((1 << rows) - 1)
        kept = np.flatnonzero(part)
        pieces.append((rows, block[kept], part[kept]))
    return pieces


def choose_groups(mask: Words, count: int, config: AttendConfig, spec: QsaSpec) -> list[tuple[int, int]]:
    """Cheapest cut of a window of `count` rows into groups of the configured sizes: (first row, size) of each.

    mask  [entries], bit i for row i of the window

    A group costs its entries' gather, its rows' products with them, and a fixed part (`config.GroupCost`). Sizes nest,
    so the cheapest cut of a larger group is either the group itself or the cheapest cuts of the smaller ones in it.
    """
    sizes = [size for size in config.group_rows if size < count]
    sizes.append(config.group_rows[len(sizes)])
    query_size, key_size = spec.q_heads * spec.head_dim, spec.kv_heads * spec.head_dim
    best: list[float] = []
    cuts: list[list[tuple[int, int]]] = []
    for level, size in enumerate(sizes):
        unions = _union_sizes(mask, size, -(-count // size))
        ratio = size // sizes[level - 1] if level else 1
        costs: list[float] = []
        found: list[list[tuple[int, int]]] = []
        for index, union in enumerate(unions):
            rows = min(size, count - index * size)
            whole = config.cost.of(rows, union * spec.block_tokens, query_size, key_size)
            inner = sum(best[index * ratio : (index + 1) * ratio]) if level else float("inf")
            if whole <= inner:
                costs.append(whole)
                found.append([(index * size, size)])
            else:
                costs.append(inner)
                found.append([cut for part in cuts[index * ratio : (index + 1) * ratio] for cut in part])
        best, cuts = costs, found
    return cuts[0]


def _union_sizes(mask: Words, size: int, groups: int) -> list[int]:
    """Entries that at least one row of each group of `size` consecutive rows attends to."""
    if groups == 1:
        return [mask.shape[0]]
    if size in (1, 8, 16, 32):
        # Little-endian words: bit i of the window is bit i % 8 of byte i // 8.
        octets = mask.astype("<u8").view(np.uint8).reshape(-1, 8)
        lanes = np.unpackbits(octets, axis=1, bitorder="little") if size == 1 else octets.view(f"<u{size // 8}")
        return [int(n) for n in np.count_nonzero(lanes[:, :groups], axis=0)]
    whole = np.uint64((1 << size) - 1)
    return [int(np.count_nonzero(mask >> np.uint64(index * size) & whole)) for index in range(groups)]
