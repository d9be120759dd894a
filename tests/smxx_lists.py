"""The worklists of `kernels.smxx` worked out in plain Python, for tests of the kernels that write and read them."""

from __future__ import annotations

import torch

from flashqsa.attend_shape import list_capacity
from flashqsa.kernels.nvrtc.worklist import WindowLists, empty_lists
from flashqsa.reference.expand import row_blocks
from flashqsa.values import KvCache, QsaSpec, Rows, Selection


def poisoned_lists(rows: Rows, spec: QsaSpec, cache: KvCache, group_rows: int, counters: int = 1) -> WindowLists:
    """Lists whose memory leads nowhere and whose masks attend to everything."""
    capacity = list_capacity(spec, group_rows, cache.requests, rows.max_position)
    lists = empty_lists(rows, spec, cache, group_rows, capacity, counters)
    for tensor in (lists.places, lists.value_places, lists.token_masks, lists.entries, lists.done):
        if tensor is not None:
            tensor.fill_(-1)
    return lists


def host_lists(
    selection: Selection | None, rows: Rows, spec: QsaSpec, cache: KvCache, group_rows: int, counters: int = 1
) -> WindowLists:
    """What the kernel should write, over memory as `poisoned_lists` leaves it."""
    lists = poisoned_lists(rows, spec, cache, group_rows, counters)
    lists.done.zero_()
    page_blocks, live = cache.page_tokens // spec.block_tokens, rows.live.tolist()
    request, position = rows.request.tolist(), rows.position.tolist()
    for window in range(lists.windows):
        members = range(window * group_rows, min((window + 1) * group_rows, rows.count))
        owners = list(dict.fromkeys(request[row] for row in members if live[row]))
        entry = 0
        for owner in owners:
            own = [row for row in members if live[row] and request[row] == owner]
            for block, masks in sorted(_masks(selection, rows, spec, own, members.start, position).items()):
                page = int(cache.page_table[owner, block // page_blocks])
                for pool, places in ((cache.keys, lists.places), (cache.values, lists.value_places)):
                    if places is not None:
                        at = page * pool.stride(0) + block % page_blocks * spec.block_tokens * pool.stride(1)
                        places[window, entry] = at // lists.unit if page >= 0 else 0
                lists.token_masks[window, entry] = torch.tensor(masks if page >= 0 else [0] * len(masks))
                entry += 1
        lists.entries[window] = entry
        end = -(-entry // 32) * 32
        lists.token_masks[window, entry:end] = 0
        for places in (lists.places, lists.value_places):
            if places is not None:
                places[window, entry:end] = 0
    return lists


def _masks(
    selection: Selection | None, rows: Rows, spec: QsaSpec, own: list[int], first: int, position: list[int]
) -> dict[int, list[int]]:
    """Block -> for each of its tokens a signed word with a bit per row that attends to it."""
    found: dict[int, list[int]] = {}
    for row in own:
        blocks = row_blocks(selection, rows, spec, row)
        if spec.tail_tokens(position[row]):
            blocks = [*blocks, spec.visible_blocks(position[row])]
        for block in blocks:
            words = found.setdefault(block, [0] * spec.block_tokens)
            for index in range(spec.block_tokens):
                if block * spec.block_tokens + index <= position[row]:
                    words[index] |= 1 << (row - first)
    return {block: [word - (1 << 32) if word >> 31 else word for word in words] for block, words in found.items()}
