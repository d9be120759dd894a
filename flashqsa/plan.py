"""Every size of a call, fixed from host numbers before anything is launched.

A plan depends on the batch's outer shape only (rows, requests, the bound on positions), so one plan serves every layer
of a forward pass and every replay of a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from flashqsa import knobs
from flashqsa.attend_shape import AttendShape, attend_shape
from flashqsa.config import (
    AttendConfig,
    FusedConfig,
    ScoreConfig,
    Sm7xScoreConfig,
    TopkConfig,
    attend_config,
    fused_chunk_rows,
    fused_config,
    fused_row_bytes,
    fused_tile_bytes,
    score_chunk_rows,
    score_config,
    score_row_bytes,
    sm7x_fewest_product_rows,
    sm7x_score_bytes,
    sm7x_score_chunk_rows,
    sm7x_score_config,
    topk_config,
)
from flashqsa.device import DeviceFacts
from flashqsa.machine import facts_here
from flashqsa.product_shape import ProductConfig, product_chunk_rows, product_config, product_workspace_bytes
from flashqsa.route import Call, Decision, NoRouteError, Route, Stage, choose_route
from flashqsa.score_split import score_split
from flashqsa.select_shape import DecodeShape, FusedShape, decode_shape, decodes_at_once, fused_shape
from flashqsa.values import QsaSpec, Rows

FLOAT_BYTES = 4

GPU_SETS = ("smxx", "sm90", "sm7x")

STAGES: tuple[Stage, ...] = ("select", "attend")


@dataclass(frozen=True)
class ChunkConfig:
    """How the score and top-k kernels of GPUs cut a chunk of rows."""

    score: ScoreConfig | Sm7xScoreConfig | ProductConfig
    topk: TopkConfig


@dataclass(frozen=True)
class SelectPlan:
    """Sizes of the score and top-k stages.

    width_blocks     columns of a score row: the most blocks any row of the call sees
    chunk_rows       rows scored at a time, so that their scores fit the workspace limit (at least one)
    workspace_bytes  what a chunk's scores take; on a CPU per index head, and once more for their sum. In the mode
                     `fused` what a chunk's best blocks and a tile take
    capability       of a GPU; None for a CPU
    whole, last      configurations of chunks of `chunk_rows` rows and of the call's last one; None for a CPU
    batch_invariant  whether a row's scores must not depend on what shares its launch
    fused            sizes of the mode `fused`; None for other modes
    """

    width_blocks: int
    chunk_rows: int
    workspace_bytes: int
    capability: tuple[int, int] | None = None
    whole: ChunkConfig | None = None
    last: ChunkConfig | None = None
    batch_invariant: bool = False
    fused: FusedConfig | FusedShape | DecodeShape | None = None

    def chunks(self, rows: int) -> Iterator[tuple[int, int]]:
        """The row ranges to score, in order."""
        for start in range(0, rows, self.chunk_rows):
            yield start, min(start + self.chunk_rows, rows)

    def chunk_config(self, rows: int) -> ChunkConfig:
        """The configuration for a chunk of so many rows. Raises ValueError for a plan of a CPU."""
        config = self.whole if rows == self.chunk_rows else self.last
        if config is None:
            raise ValueError("a plan for a CPU has no configuration for GPU kernels")
        return config

    @property
    def fewest_product_rows(self) -> int | None:
        """Fewest rows of a request of `width_blocks` blocks that cuBLAS scores; None where it scores none."""
        score = None if self.whole is None else self.whole.score
        if not isinstance(score, Sm7xScoreConfig) or score.product_columns == 0:
            return None
        return sm7x_fewest_product_rows(self.width_blocks)

    def product_rows(self, rows: Rows, requests: int, spec: QsaSpec) -> int:
        """Rows of a call that cuBLAS scores: all in the mode `cublas`; on Volta and Turing those of long requests."""
        if self.whole is not None and isinstance(self.whole.score, ProductConfig):
            return rows.count
        found = 0
        for start, stop in self.chunks(rows.count):
            config = self.whole if stop - start == self.chunk_rows else self.last
            if config is not None and isinstance(config.score, Sm7xScoreConfig):
                runs = rows.slice(start, stop).runs
                split = score_split(spec, stop - start, requests, rows.max_position, runs, config.score)
                found += sum(product.stop - product.start for product in split.products)
        return found


@dataclass(frozen=True)
class AttendPlan:
    """Sizes of the worklist, attention and merge stages.

    config           the kernel configuration on a CPU, and for the reference
    max_entries      most worklist entries one group can have: every row's blocks and tails, shared by none
    workspace_bytes  on a CPU what a tile of gathered keys or values and the logits of one softmax take; on a GPU
                     worklists, and the parts of units that are cut
    capability       of a GPU; None for a CPU
    shape            how a GPU's kernels cut the work; None for a CPU
    limit_bytes      for a GPU's worklists
    """

    config: AttendConfig
    max_entries: int
    workspace_bytes: int
    capability: tuple[int, int] | None = None
    shape: AttendShape | None = None
    limit_bytes: int = 0

    def gpu(self) -> tuple[AttendShape, tuple[int, int]]:
        """Shape and compute capability. Raises ValueError for a plan of a CPU."""
        if self.shape is None or self.capability is None:
            raise ValueError("a plan for a CPU has no shape for GPU kernels")
        return self.shape, self.capability


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
    select_choice: Decision | NoRouteError
    attend_choice: Decision | NoRouteError
    select: SelectPlan
    attend: AttendPlan

    @property
    def select_decision(self) -> Decision:
        """The select stage's route. Raises NoRouteError where none serves the batch."""
        return self.decision("select")

    @property
    def attend_decision(self) -> Decision:
        """The attend stage's route. Raises NoRouteError where none serves the batch."""
        return self.decision("attend")

    def decision(self, stage: Stage) -> Decision:
        """A stage's route. Raises NoRouteError where none serves the batch."""
        choice = self.select_choice if stage == "select" else self.attend_choice
        if isinstance(choice, NoRouteError):
            raise choice
        return choice

    def fits_device(self, device: torch.device) -> bool:
        """Whether a device is of the kind, the compute capability and the kernel sets that the plan was made for."""
        here, made_for = facts_here(device), self.facts
        return (here.kind, here.capability, here.kernel_sets) == (
            made_for.kind,
            made_for.capability,
            made_for.kernel_sets,
        )

    @property
    def workspace_bytes(self) -> int:
        """The larger of the two stages' scratch: they do not run at once."""
        return max(self.select.workspace_bytes, self.attend.workspace_bytes)


def plan_select(call: Call, choice: Decision | NoRouteError, facts: DeviceFacts, limit_bytes: int) -> SelectPlan:
    """Sizes of the select stage within a workspace limit."""
    spec, width = call.spec, max(call.spec.visible_blocks(call.max_position), 1)
    if not isinstance(choice, NoRouteError) and str(choice.route) == "cpu:fused":
        return _plan_cpu_fused(call, width, limit_bytes)
    if isinstance(choice, NoRouteError) or choice.route.kernel_set in ("cpu", "reference"):
        row_bytes = width * (spec.index_heads + 1) * FLOAT_BYTES
        chunk = min(max(limit_bytes // row_bytes, 1), max(call.rows, 1))
        return SelectPlan(width, chunk, chunk * row_bytes, batch_invariant=call.batch_invariant)
    if choice.route.mode == "everything":
        return SelectPlan(width, max(call.rows, 1), 0, facts.capability)
    if choice.route.mode == "fused":
        return _plan_sm90_fused(call, facts, width, limit_bytes)
    if choice.route.kernel_set == "sm7x":
        return _plan_sm7x_select(call, facts, width, limit_bytes)
    if choice.route.mode == "cublas":
        return _plan_products(call, facts, width, limit_bytes)
    chunk = score_chunk_rows(spec, call.rows, call.max_position, limit_bytes)

    def config(rows: int) -> ChunkConfig:
        score = score_config(
            spec, rows, call.requests, call.max_position, call.index_q_bytes, facts, call.batch_invariant
        )
        return ChunkConfig(score, topk_config(spec, rows, facts))

    return SelectPlan(
        width,
        chunk,
        chunk * score_row_bytes(spec, call.max_position),
        facts.capability,
        config(chunk),
        config(call.rows % chunk or chunk),
        call.batch_invariant,
    )


def _plan_sm90_fused(call: Call, facts: DeviceFacts, width: int, limit_bytes: int) -> SelectPlan:
    spec = call.spec
    at_once = decodes_at_once(spec, call.rows, call.rows_per_request, call.max_position, call.batch_invariant)

    def in_full(rows: int) -> ChunkConfig:
        # What writes the same scores, bit for bit, for whoever asks for them: the tile of many rows, or of one.
        score = score_config(spec, rows, call.requests, call.max_position, call.index_q_bytes, facts, not at_once)
        return ChunkConfig(score, topk_config(spec, rows, facts))

    if at_once:
        one, few = decode_shape(spec, call.rows, call.max_position, facts), in_full(max(call.rows, 1))
        return SelectPlan(width, max(call.rows, 1), 0, facts.capability, few, few, fused=one)
    shape = fused_shape(spec, call.rows, call.max_position, facts, limit_bytes)
    workspace = shape.workspace_bytes(min(shape.chunk_rows, max(call.rows, 1)), width)

    whole, last = in_full(shape.chunk_rows), in_full(call.rows % shape.chunk_rows or shape.chunk_rows)
    return SelectPlan(
        width, shape.chunk_rows, workspace, facts.capability, whole, last, call.batch_invariant, fused=shape
    )


def _plan_cpu_fused(call: Call, width: int, limit_bytes: int) -> SelectPlan:
    config = fused_config(call.spec, call.rows, width, limit_bytes, call.batch_invariant)
    chunk = fused_chunk_rows(call.spec, call.rows, config, limit_bytes)
    workspace = fused_tile_bytes(call.spec, config) + chunk * fused_row_bytes(call.spec, config)
    return SelectPlan(width, chunk, workspace, batch_invariant=call.batch_invariant, fused=config)


def _plan_sm7x_select(call: Call, facts: DeviceFacts, width: int, limit_bytes: int) -> SelectPlan:
    spec, batch = call.spec, (call.requests, call.max_position)
    chunk = sm7x_score_chunk_rows(spec, call.rows, call.max_position, limit_bytes, call.batch_invariant)

    def score(rows: int) -> Sm7xScoreConfig:
        return sm7x_score_config(spec, rows, *batch, facts, limit_bytes, call.batch_invariant)

    rest = call.rows % chunk or chunk
    whole, last = score(chunk), score(rest)
    return SelectPlan(
        width,
        chunk,
        # Of fewer rows cuBLAS takes more columns at a time.
        max(
            sm7x_score_bytes(spec, whole, chunk, call.max_position),
            sm7x_score_bytes(spec, last, rest, call.max_position),
        ),
        facts.capability,
        ChunkConfig(whole, topk_config(spec, chunk, facts)),
        ChunkConfig(last, topk_config(spec, rest, facts)),
        call.batch_invariant,
    )


def _plan_products(call: Call, facts: DeviceFacts, width: int, limit_bytes: int) -> SelectPlan:
    spec, longest = call.spec, call.max_position
    chunk = product_chunk_rows(spec, call.rows, longest, limit_bytes)
    rest = call.rows % chunk or chunk
    whole, last = (product_config(spec, rows, longest, facts, limit_bytes) for rows in (chunk, rest))
    return SelectPlan(
        width,
        chunk,
        max(
            product_workspace_bytes(spec, whole, chunk, longest),
            product_workspace_bytes(spec, last, rest, longest),
        ),
        facts.capability,
        ChunkConfig(whole, topk_config(spec, chunk, facts)),
        ChunkConfig(last, topk_config(spec, rest, facts)),
    )


def plan_attend(call: Call, choice: Decision | NoRouteError, facts: DeviceFacts, limit_bytes: int) -> AttendPlan:
    """Sizes of the attend stage within a workspace limit."""
    route = None if isinstance(choice, NoRouteError) else choice.route
    if route is not None and route.kernel_set in GPU_SETS:
        return _plan_gpu_attend(call, route, facts, limit_bytes)
    # The reference reads a row at a time on any device and takes no configuration: the CPU's is legal everywhere.
    mode = "xqa" if route is None or route.mode == "reference" else route.mode
    config = attend_config(mode, DeviceFacts.named("cpu"))
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


def _plan_gpu_attend(call: Call, route: Route, facts: DeviceFacts, limit_bytes: int) -> AttendPlan:
    shape = attend_shape(
        call.spec,
        call.rows,
        call.requests,
        call.max_position,
        facts,
        cache_bytes=call.cache_dtype.itemsize,
        hopper=route.kernel_set == "sm90",
        sm7x=route.kernel_set == "sm7x",
        alone=route.mode == "xqa",
        cuts=not call.batch_invariant,
    )
    rows = min(shape.chunk_rows(call.spec, limit_bytes), call.rows)
    if shape.workspace_bytes(call.spec, rows) > limit_bytes:
        # Parts of units that are cut do not fit: the device is less busy, and the limit is kept.
        shape = replace(shape, cuts=False)
    return AttendPlan(
        attend_config("xqa", DeviceFacts.named("cpu")),
        shape.capacity,
        shape.workspace_bytes(call.spec, rows),
        facts.capability,
        shape,
        limit_bytes,
    )


def make_plan(call: Call, facts: DeviceFacts, pin: str | None = None, stages: tuple[Stage, ...] = STAGES) -> Plan:
    """Routes and sizes for a batch.

    stages  that must have a route; another's NoRouteError is kept and raised when its decision is asked for

    Raises NoRouteError when one of `stages` has no route, KnobError for a bad FLASHQSA_WORKSPACE_MIB.
    """
    return _plan_for(call, facts, pin, stages, knobs.workspace_bytes())


@lru_cache(maxsize=256)
def _plan_for(call: Call, facts: DeviceFacts, pin: str | None, stages: tuple[Stage, ...], limit: int) -> Plan:
    """`make_plan` within a workspace limit. The layers of a model ask for the same plan in turn."""
    choices: dict[str, Decision | NoRouteError] = {}
    for stage in STAGES:
        try:
            choices[stage] = choose_route(stage, call, facts, pin)
        except NoRouteError as error:
            if stage in stages:
                raise
            choices[stage] = error
    select, attend = choices["select"], choices["attend"]
    sizes = plan_select(call, select, facts, limit), plan_attend(call, attend, facts, limit)
    return Plan(call, facts, select, attend, *sizes)
