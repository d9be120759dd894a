"""FlashQSA's prefill beside the stock layer's: logits row by row, selections block by block, and ties at the cut.

Two exact computations may select differently where scores tie, or come so close that the order of a sum decides. So
rows are compared in two steps: the logits of rows whose selections agree, and, where they do not, how far from the cut
the blocks score on which they differ.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flashqsa.capture import Noted
from flashqsa.pipeline import KERNEL_SETS
from flashqsa.values import IndexCache, QsaSpec, Rows, Selection

SCORE_ROWS = 256
LOGIT_TOLERANCE = 1e-4
"""Largest difference of FP32 logits between rows whose selections agree."""

CUT_TOLERANCE = 1e-5
"""How far from the cut, as a share of it, FP32 scores may lie on which two selections differ."""


class HiddenStates:
    """Keeps what a model's body hands to its output head, row by row."""

    def __init__(self) -> None:
        self.parts: list[Tensor] = []

    @contextlib.contextmanager
    def of(self, model: Any) -> Iterator[HiddenStates]:
        """Keeps the states of the model's forward passes inside the `with` block."""
        handle = model.base_model.register_forward_hook(self._keep)
        try:
            yield self
        finally:
            handle.remove()

    def _keep(self, _module: Any, _args: Any, output: Any) -> None:
        self.parts.append(output.last_hidden_state[0].detach())

    def rows(self, count: int) -> Tensor:
        """[count, hidden], the first `count` rows."""
        return torch.cat(self.parts)[:count]


@dataclass(frozen=True)
class _Asked:
    """One select call that FlashQSA made: enough to score its rows again."""

    index_q: Tensor
    index_cache: IndexCache
    rows: Rows


@dataclass(frozen=True)
class _Chosen:
    """The selection of one attention call; None stands for every visible block."""

    selection: Selection | None
    rows: Rows
    spec: QsaSpec


class Choices:
    """A listener that keeps, for each sparse layer, what each call selected and what its scores are made from."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self.layers = list(layers)
        self.chosen: list[list[_Chosen]] = [[] for _ in self.layers]
        self.asked: list[dict[int, _Asked]] = [{} for _ in self.layers]
        self._layer = 0

    @contextlib.contextmanager
    def following(self) -> Iterator[Choices]:
        """Knows inside the `with` block which layer a call comes from."""
        handles = [
            layer.register_forward_pre_hook(lambda *_, index=index: self._enter(index))
            for index, layer in enumerate(self.layers)
        ]
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, index: int) -> None:
        self._layer = index

    def __call__(self, noted: Noted) -> None:
        """Keeps copies, on the CPU: the caller may use its tensors again."""
        rows = replace(noted.rows, request=_kept(noted.rows.request), position=_kept(noted.rows.position))
        if noted.function == "select_blocks":
            index_q, index_cache = noted.values["index_q"], noted.values["index_cache"]
            assert isinstance(index_q, Tensor)
            assert isinstance(index_cache, IndexCache)
            self.asked[self._layer][int(rows.position[0])] = _Asked(_kept(index_q), index_cache, rows)
            return
        selection = noted.values["selection"]
        if isinstance(selection, Selection):
            selection = Selection(_kept(selection.blocks), _kept(selection.count))
        else:
            selection = None
        self.chosen[self._layer].append(_Chosen(selection, rows, noted.spec))


def _kept(tensor: Tensor) -> Tensor:
    """A copy on the CPU."""
    return tensor.cpu() if tensor.is_cuda else tensor.clone()


class StockChoices:
    """Keeps which blocks the stock indexers select, from the masks they return."""

    def __init__(self, indexers: Sequence[Any], block_tokens: int) -> None:
        self.indexers = list(indexers)
        self.block_tokens = block_tokens
        self.chosen: list[list[Tensor]] = [[] for _ in self.indexers]

    @contextlib.contextmanager
    def following(self) -> Iterator[StockChoices]:
        """Keeps the selections made inside the `with` block."""
        handles = [
            indexer.register_forward_hook(lambda _m, _a, mask, index=index: self._keep(index, mask))
            for index, indexer in enumerate(self.indexers)
        ]
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def _keep(self, index: int, mask: Tensor) -> None:
        chosen = (mask[0, 0] if mask.dtype == torch.bool else mask[0, 0] == 0).cpu()
        self.chosen[index].append(blocks_of_mask(chosen, self.block_tokens))


def blocks_of_mask(chosen: Tensor, block_tokens: int) -> Tensor:
    """[rows, tokens] bool -> [rows, complete blocks] bool: a block is chosen when all its tokens are.

    A row's tail never makes a whole block, and the stock indexer chooses blocks whole.
    """
    blocks = chosen.shape[1] // block_tokens
    return torch.all(chosen[:, : blocks * block_tokens].reshape(chosen.shape[0], blocks, block_tokens), dim=2)


def blocks_of_selection(selection: Selection | None, rows: Rows, spec: QsaSpec) -> Tensor:
    """The same of a Selection, or of every visible block for None: [rows, blocks up to the largest position] bool."""
    width = spec.visible_blocks(rows.max_position)
    column = torch.arange(width)
    if selection is None:
        return column < rows.visible_blocks(spec)[:, None]
    chosen = torch.zeros(rows.count, width + 1, dtype=torch.bool)
    held = torch.arange(selection.blocks.shape[1]) < selection.count[:, None]
    # Entries that hold nothing land in the extra column.
    chosen.scatter_(1, torch.where(held, selection.blocks, width).long(), True)
    return chosen[:, :width]


@dataclass(frozen=True)
class Cuts:
    """Scores at the cut of some rows: FP32, NaN in rows that take all they see.

    last, next    [rows] the worst score selected and the best one left out
    """

    last: Tensor
    next: Tensor


@dataclass(frozen=True)
class Agreement:
    """How FlashQSA's prefill compares with the stock layer's.

    rows                      prompt rows, summed up over the sparse layers for the three counts of ties
    rows_tied                 whose cut ties exactly
    rows_nearly_tied          whose cut is within CUT_TOLERANCE of the next score, and not equal to it
    rows_selecting_otherwise  whose selection is not the stock layer's
    widest_miss               furthest from the cut, as a share of it, of a block on which selections differ
    rows_compared             whose every selection that bears on their logits is the stock layer's
    max_difference            largest difference of any logit, over all rows
    max_difference_compared   the same over the rows compared
    same_tokens, new_tokens   greedy tokens that agree from the first on, and how many there are
    """

    rows: int
    rows_tied: int
    rows_nearly_tied: int
    rows_selecting_otherwise: int
    widest_miss: float
    rows_compared: int
    max_difference: float
    max_difference_compared: float
    same_tokens: int
    new_tokens: int

    @property
    def holds(self) -> bool:
        """Whether FP32 results agree by the two-step rule."""
        return self.max_difference_compared <= LOGIT_TOLERANCE and self.widest_miss <= CUT_TOLERANCE

    def as_json(self) -> dict[str, Any]:
        """The figures as plain JSON values."""
        return {**asdict(self), "agrees_in_fp32": self.holds}


def cuts_of(values: Tensor, visible: Tensor, spec: QsaSpec) -> Cuts:
    """values [rows, width] FP32, visible [rows] -> the scores on both sides of each row's cut."""
    there = (torch.arange(values.shape[1]) < visible[:, None]) & ~values.isnan()
    masked = torch.where(there, values, -torch.inf)
    nothing = torch.full((values.shape[0],), torch.nan)
    if values.shape[1] <= spec.top_blocks:
        return Cuts(nothing, nothing)
    best = masked.topk(spec.top_blocks + 1, dim=1).values
    chooses = visible > spec.top_blocks
    return Cuts(torch.where(chooses, best[:, -2], torch.nan), torch.where(chooses, best[:, -1], torch.nan))


def agreement(
    ours: Choices,
    stock: StockChoices,
    states: tuple[Tensor, Tensor],
    head: Any,
    tokens: tuple[Sequence[int], Sequence[int]],
    *,
    last_layer_mixes: bool,
) -> Agreement:
    """Compares two prefills of the same prompt.

    states            hidden states [rows, hidden] of both
    head              the output head, hidden states to logits
    last_layer_mixes  whether a layer after the last sparse one carries something from row to row

    A row's logits rest on its own selection in the last sparse layer, and in every layer before it on the selections of
    all rows up to it.
    """
    count = states[0].shape[0]
    tied = nearly = otherwise = 0
    widest = 0.0
    touched = torch.zeros(count, dtype=torch.bool)
    layers = len(ours.layers)
    for layer in range(layers):
        # Rows that either side has no selection of (a call was left to the stock layer) count as differing.
        differs = torch.ones(count, dtype=torch.bool)
        for start, spec, (mine, theirs) in _aligned(ours.chosen[layer], stock.chosen[layer], count):
            differs[start : start + mine.shape[0]] = (mine != theirs).any(dim=1)
            found = _at_the_cut(ours.asked[layer].get(start), spec, mine, theirs)
            tied, nearly, widest = tied + found[0], nearly + found[1], max(widest, found[2])
        otherwise += int(differs.sum())
        spreads = layer < layers - 1 or last_layer_mixes
        touched |= differs.cummax(dim=0).values if spreads else differs
    difference = _logit_difference(states, head)
    compared = difference[~touched]
    same = next((i for i, (a, b) in enumerate(zip(*tokens, strict=False)) if a != b), min(map(len, tokens)))
    return Agreement(
        rows=count,
        rows_tied=tied,
        rows_nearly_tied=nearly,
        rows_selecting_otherwise=otherwise,
        widest_miss=widest,
        rows_compared=compared.numel(),
        max_difference=float(difference.max()),
        max_difference_compared=float(compared.max()) if compared.numel() else 0.0,
        same_tokens=same,
        new_tokens=max(map(len, tokens)),
    )


def _aligned(
    mine: list[_Chosen], theirs: list[Tensor], count: int
) -> Iterator[tuple[int, QsaSpec, tuple[Tensor, Tensor]]]:
    """First row of each prefill chunk, its spec, and both selections of it; decode steps are left out."""
    start = 0
    for ours, stock in zip(mine, theirs, strict=False):
        if start >= count:
            return
        blocks = blocks_of_selection(ours.selection, ours.rows, ours.spec)
        width = max(blocks.shape[1], stock.shape[1])
        pads = [torch.nn.functional.pad(part, (0, width - part.shape[1])) for part in (blocks, stock)]
        yield start, ours.spec, (pads[0], pads[1])
        start += blocks.shape[0]


def _at_the_cut(asked: _Asked | None, spec: QsaSpec, mine: Tensor, theirs: Tensor) -> tuple[int, int, float]:
    """Exact ties, near ties, and the widest miss of one chunk; none where every row took all it saw."""
    if asked is None:
        return 0, 0, 0.0 if torch.equal(mine, theirs) else float("inf")
    tied, nearly, widest = 0, 0, 0.0
    # Any scorer will do to see how close a cut is, and the CPU's needs no plan.
    cache = IndexCache(asked.index_cache.keys.cpu(), asked.index_cache.page_table.cpu(), asked.index_cache.scale)
    for row in range(0, mine.shape[0], SCORE_ROWS):
        part = slice(row, row + SCORE_ROWS)
        rows = asked.rows.slice(row, row + SCORE_ROWS)
        scores = KERNEL_SETS["cpu"].score(asked.index_q[part], cache, rows, spec)
        cuts = cuts_of(scores.values, scores.visible, spec)
        gap = cuts.last - cuts.next
        tied += int((gap == 0).sum())
        nearly += int(((gap > 0) & (gap <= CUT_TOLERANCE * cuts.last)).sum())
        differs = mine[part] != theirs[part]
        if bool(differs.any()):
            row_of, block = differs.nonzero(as_tuple=True)
            cut = cuts.last[row_of]
            away = (scores.values[row_of, block] - cut).abs()
            share = torch.where(away == 0, 0.0, away / cut)
            # No cut (NaN) means that the row takes all it sees, and no difference is small there.
            widest = max(widest, float(torch.where(share.isnan(), torch.inf, share).max()))
    return tied, nearly, widest


@torch.no_grad()
def _logit_difference(states: tuple[Tensor, Tensor], head: Any) -> Tensor:
    """[rows] FP32, the largest difference of a row's logits."""
    found = [
        (head(a).float() - head(b).float()).abs().amax(dim=-1)
        for a, b in zip(torch.split(states[0], SCORE_ROWS), torch.split(states[1], SCORE_ROWS), strict=True)
    ]
    return torch.cat(found).cpu()
