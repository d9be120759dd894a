"""Every size of a call, fixed from host numbers before anything is launched.

A plan depends on the batch's outer shape only (rows, requests, the bound on positions), so one plan serves every layer
of a forward pass and every replay of a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from flashqsa import knobs
from flashqsa.config import AttendConfig, attend_config
from flashqsa.device import DeviceFacts, facts_of
from flashqsa.route import Call, Decision, choose_route

FLOAT_BYTES = 4


@dataclass(frozen=True)
class SelectPlan:
    """Sizes of the score and top-k stages.

    width_blocks     columns of a score row: the most blocks any row of the call sees
    chunk_rows       rows scored at a time, so that their scores fit the workspace limit (at least one)
    workspace_bytes  what a chunk's scores take: per index head, and once more for their sum
    """

    width_blocks: int
    chunk_rows: int
    workspace_bytes: int

    def chunks(self, rows: int) -> Iterator[tuple[int, int]]:
        """The row ranges to score, in order."""
        for start in range(0, rows, self.chunk_rows):
            yield start, min(start + self.chunk_rows, rows)


@dataclass(frozen=True)
class AttendPlan:
    """Sizes of the worklist, attention and merge stages.

    config           the kernel configuration
    max_entries      most worklist entries one group can have: every row's blocks and tails, shared by none
    workspace_bytes  what a tile of gathered keys or values and the logits of one softmax take
    """

    config: AttendConfig
    max_entries: int
    workspace_bytes: int


@dataclass(frozen=True)
class Plan:
    """Routes and sizes of one batch: pass it to every layer's call instead of having them worked out again.

    A plan fits a batch with the same number of rows and requests whose positions stay within `max_position`, on a
    device like the one it was made for.

    >>> from flashqsa.values import QsaSpec
    >>> plan = make_plan(Call(QsaSpec(), rows=8192, requests=1, max_position=8191), DeviceFacts.named("cpu"))
    >>> str(plan.attend_decision.route), plan.select.width_blocks
    ('cpu:grouped', 2048)
    """

    call: Call
    facts: DeviceFacts
    select_decision: Decision
    attend_decision: Decision
    select: SelectPlan
    attend: AttendPlan

    def fits_device(self, device: torch.device) -> bool:
        """Whether a device is of the kind, the compute capability and the kernel sets that the plan was made for."""
        here, made_for = facts_of(device), self.facts
        return (here.kind, here.capability, here.kernel_sets) == (
            made_for.kind,
            made_for.capability,
            made_for.kernel_sets,
        )

    @property
    def workspace_bytes(self) -> int:
        """The larger of the two stages' scratch: they do not run at once."""
        return max(self.select.workspace_bytes, self.attend.workspace_bytes)


def plan_select(call: Call, limit_bytes: int) -> SelectPlan:
    """Sizes of the select stage within a workspace limit."""
    width = max(call.spec.visible_blocks(call.max_position), 1)
    row_bytes = width * (call.spec.index_heads + 1) * FLOAT_BYTES
    chunk = min(max(limit_bytes // row_bytes, 1), max(call.rows, 1))
    return SelectPlan(width, chunk, chunk * row_bytes)


def plan_attend(call: Call, decision: Decision, facts: DeviceFacts, limit_bytes: int) -> AttendPlan:
    """Sizes of the attend stage within a workspace limit."""
    mode = decision.route.mode
    if mode == "reference":
        # It reads a row at a time on any device and takes no configuration: the CPU's is legal everywhere.
        mode, facts = "xqa", DeviceFacts.named("cpu")
    config = attend_config(mode, facts)
    spec = call.spec
    largest = config.group_rows[-1]
    visible = spec.visible_blocks(call.max_position) + 1
    entries = min(largest * (spec.top_blocks + 1), visible)
    # Half the limit for the gathered keys or values and their stored form, half for the logits.
    token_bytes = 2 * spec.kv_heads * spec.head_dim * FLOAT_BYTES
    tile = min(config.tile_tokens, max(limit_bytes // 2 // token_bytes, spec.block_tokens))
    logit_bytes = spec.q_heads * FLOAT_BYTES
    row_tokens = min(config.row_tokens, max(limit_bytes // 2 // logit_bytes, largest * spec.block_tokens))
    config = replace(config, tile_tokens=tile, row_tokens=row_tokens)
    return AttendPlan(config, entries, tile * token_bytes + row_tokens * logit_bytes)


def make_plan(call: Call, facts: DeviceFacts, pin: str | None = None) -> Plan:
    """Routes and sizes for a batch.

    Raises NoRouteError when a stage has no route, KnobError for a bad FLASHQSA_WORKSPACE_MIB.
    """
    limit = knobs.workspace_bytes()
    select = choose_route("select", call, facts, pin)
    attend = choose_route("attend", call, facts, pin)
    return Plan(call, facts, select, attend, plan_select(call, limit), plan_attend(call, attend, facts, limit))
