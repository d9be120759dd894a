"""What each window of rows has to read, made on the device: one launch, no host synchronisation, no sort.

A window is `group_rows` consecutive rows of the call. The kernel (`worklist.cu`) lists the union of its rows'
blocks and open blocks in ascending logical order, request by request, and writes for every token a mask with a bit per
row. The masks say everything the attention kernel has to know: a token that no row attends to (past every row, on a
hole, or in an entry that only fills up the last tile) has mask 0 and is never loaded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from flashqsa.attend_shape import LIST_PAD, MAX_WINDOW_ROWS, place_unit, ranked_entries, worklist_bytes
from flashqsa.kernels.nvrtc.compiler import Source
from flashqsa.kernels.nvrtc.driver import Kernel
from flashqsa.values import KvCache, QsaSpec, Rows, Selection

THREADS = 512
"""Of a program, which lists one window."""

PARAMETERS = "P" * 10 + "qq" + "i" * 17
"""Parameter types of `flashqsa_worklist`."""


@dataclass(frozen=True)
class WindowLists:
    """The worklist of every window, in device memory.

    group_rows    rows per window; window w serves rows `w * group_rows ..` of the call
    unit          elements per unit of `places` and `value_places`
    places        [windows, capacity] int32: where a block's first token lies in the keys, page and all, in units
    value_places  the same for the values where they have other strides; None where `places` serves both
    token_masks   [windows, capacity, block_tokens] int32: bit i says that row i of the window attends to the token
    entries       [windows] int32, entries of each list; up to the next multiple of `LIST_PAD` masks are 0, beyond
                  that nothing is written
    done          [windows, counters] int32, 0: how many parts of a unit have ended, for the attention kernel to count

    Rows 0 and 1 of one request, at positions 13 and 14, selected blocks {0, 2} and {1, 2}. Their window has four
    entries, with masks 0b01, 0b10, 0b11 and, token by token, 0b11, 0b11, 0b10, 0 for the open block 3. In pages of two
    blocks of four tokens, one KV head of 8 and page table [4, 1], they lie at 256, 288, 64 and 96 elements; the unit is
    a block's 32, so the places are 8, 9, 2 and 3.
    """

    group_rows: int
    unit: int
    places: Tensor
    value_places: Tensor | None
    token_masks: Tensor
    entries: Tensor
    done: Tensor

    @property
    def windows(self) -> int:
        """Windows of the call."""
        return self.places.shape[0]

    @property
    def capacity(self) -> int:
        """Most entries a window can have."""
        return self.places.shape[1]


def empty_lists(
    rows: Rows, spec: QsaSpec, kv_cache: KvCache, group_rows: int, capacity: int, counters: int
) -> WindowLists:
    """Memory for the lists of some rows: `capacity` entries (`attend_shape.list_capacity`) and `counters` per window.

    The cache's places must fit 32 bits (`attend_shape.Layout.last_place`). Raises ValueError for windows of more than
    `MAX_WINDOW_ROWS` rows.
    """
    if not 1 <= group_rows <= MAX_WINDOW_ROWS:
        raise ValueError(f"a window holds 1 to {MAX_WINDOW_ROWS} rows, got {group_rows}")
    device = rows.request.device
    windows = -(-rows.count // group_rows)
    same = kv_cache.keys.stride()[:2] == kv_cache.values.stride()[:2]

    def ints(*shape: int) -> Tensor:
        # The attention kernel fetches a tile's entries before it knows whether there is such a tile.
        spare = torch.empty(math.prod(shape) + LIST_PAD * spec.block_tokens, dtype=torch.int32, device=device)
        return spare[: math.prod(shape)].view(shape)

    return WindowLists(
        group_rows,
        place_unit(kv_cache, spec),
        ints(windows, capacity),
        None if same else ints(windows, capacity),
        ints(windows, capacity, spec.block_tokens),
        ints(windows),
        ints(windows, counters),
    )


def list_windows(
    lists: WindowLists,
    selection: Selection | None,
    rows: Rows,
    spec: QsaSpec,
    kv_cache: KvCache,
    capability: tuple[int, int],
) -> None:
    """Fills `lists` from a selection; without one every visible block is listed.

    Blocks on a hole and ids that no row sees get masks of 0. Raises what `Kernel.launch` raises.
    """
    ranked = min(ranked_entries(capability), lists.capacity)
    kernel = worklist_kernel(capability, bitmap_blocks(rows, spec), ranked)
    arguments = kernel_arguments(lists, selection, rows, spec, kv_cache, ranked)
    kernel.launch(rows.request.device, lists.windows, *arguments)


def bitmap_blocks(rows: Rows, spec: QsaSpec) -> int:
    """Blocks that any row sees, in part or whole."""
    return max(rows.max_position, 0) // spec.block_tokens + 1


def kernel_arguments(
    lists: WindowLists, selection: Selection | None, rows: Rows, spec: QsaSpec, kv_cache: KvCache, ranked: int
) -> tuple[int, ...]:
    """Values of the kernel's parameters, in order. `ranked` entries are put together in shared memory at a time."""
    units: list[int] = []
    for pool in (kv_cache.keys, kv_cache.values):
        page_stride = pool.stride(0) if pool.shape[0] > 1 else 0
        units += [page_stride // lists.unit, pool.stride(1) * spec.block_tokens // lists.unit]
    table = kv_cache.page_table
    return (
        0 if selection is None else selection.blocks.data_ptr(),
        0 if selection is None else selection.count.data_ptr(),
        rows.request.data_ptr(),
        rows.position.data_ptr(),
        table.data_ptr(),
        lists.places.data_ptr(),
        0 if lists.value_places is None else lists.value_places.data_ptr(),
        lists.token_masks.data_ptr(),
        lists.entries.data_ptr(),
        lists.done.data_ptr(),
        0 if selection is None else selection.blocks.stride(0),
        table.stride(0),
        rows.count,
        kv_cache.requests,
        table.shape[1],
        kv_cache.keys.shape[0],
        spec.top_blocks,
        lists.group_rows,
        spec.block_tokens,
        kv_cache.page_tokens // spec.block_tokens,
        *units,
        lists.capacity,
        LIST_PAD,
        bitmap_blocks(rows, spec),
        ranked,
        lists.done.shape[1],
    )


def worklist_kernel(capability: tuple[int, int], blocks: int, ranked: int) -> Kernel:
    """The kernel for a device, with the shared memory that so many blocks and ranked entries need."""
    return _kernel(capability, worklist_bytes(blocks, ranked))


@cache
def _kernel(capability: tuple[int, int], shared_bytes: int) -> Kernel:
    return Kernel(Source("worklist.cu"), "flashqsa_worklist", PARAMETERS, capability, THREADS, shared_bytes)
