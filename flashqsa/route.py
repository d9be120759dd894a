"""Which kernels serve a call, and why the others do not.

A route is decided by `choose_route` alone, a pure function of a `Call` and of `DeviceFacts`: it launches nothing, reads
no tensor and works for devices that are not there. Candidates stand in order of preference in `SELECT_CANDIDATES` and
`ATTEND_CANDIDATES`; the first that has no reason against it is taken. A pinned route is used or refused, never
replaced.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch

from flashqsa.attend_shape import Layout, attend_refusal, hopper_refusal, prefers_triton, sm7x_refusal, worklist_refusal
from flashqsa.config import fused_loses, score_refusal, sm7x_score_refusal, topk_refusal
from flashqsa.device import DeviceFacts
from flashqsa.product_shape import product_loses, product_refusal
from flashqsa.select_shape import decode_refusal, decodes_at_once, fused_loses_to_scores, fused_refusal
from flashqsa.values import QsaSpec

logger = logging.getLogger("flashqsa")

Stage = Literal["select", "attend"]


class NoRouteError(RuntimeError):
    """No route can serve a call; the message holds every candidate's reason, and `refused` holds them apart."""

    def __init__(self, message: str, refused: tuple[Refusal, ...] = ()) -> None:
        self.refused = refused
        super().__init__(message)


@dataclass(frozen=True)
class Call:
    """The host facts of one call that a route may depend on.

    rows, requests, max_position       as in `Rows` and the caches' page tables
    q_dtype, cache_dtype               storage dtypes of queries and KV cache: the attend stage's
    index_q_dtype, index_cache_dtype   of index queries and index cache: the select stage's; None for the same
    layout                             where the attend stage's tensors lie
    index_aligned                      whether index queries and index keys begin at multiples of 16 bytes
    selection_given                    whether attention reads a Selection, which may hold less than all a row sees
    batch_invariant                    whether a row must get the same bits whatever shares its launch

    >>> Call(QsaSpec(), rows=8192, requests=1, max_position=8191).selects_everything
    False
    >>> Call(QsaSpec(), rows=320, requests=64, max_position=8191).rows_per_request
    5
    """

    spec: QsaSpec
    rows: int
    requests: int
    max_position: int
    q_dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype = torch.float32
    index_q_dtype: torch.dtype | None = None
    index_cache_dtype: torch.dtype | None = None
    layout: Layout = field(default_factory=Layout)
    index_aligned: bool = True
    selection_given: bool = False
    batch_invariant: bool = False

    @property
    def index_q_bytes(self) -> int:
        """Bytes of a number of the index queries."""
        return (self.index_q_dtype or self.q_dtype).itemsize

    @property
    def rows_per_request(self) -> int:
        """Rows that a request has on average, rounded up."""
        return -(-self.rows // max(self.requests, 1))

    @property
    def selects_everything(self) -> bool:
        """Whether no row sees more blocks than it may select."""
        return self.spec.selects_everything(self.max_position)


@dataclass(frozen=True)
class Route:
    """One way to serve a stage.

    stage       "select" or "attend"
    mode        select: `everything`, `fused`, `cublas`, `plain`; attend: `dense`, `splitk`, `grouped`, `xqa`; both:
                `reference`
    kernel_set  the folder of kernels that runs it

    >>> str(Route("attend", "grouped", "cpu"))
    'cpu:grouped'
    """

    stage: Stage
    mode: str
    kernel_set: str

    def __str__(self) -> str:
        return self.mode if self.mode == self.kernel_set else f"{self.kernel_set}:{self.mode}"

    def answers_to(self, pin: str) -> bool:
        """Whether a pin (`grouped`, `cpu` or `cpu:grouped`) names this route."""
        return pin in (self.mode, self.kernel_set, str(self))


@dataclass(frozen=True)
class Refusal:
    """A candidate that was passed over, and why."""

    route: Route
    reason: str


@dataclass(frozen=True)
class Decision:
    """The route a call takes, the candidates that were refused, and those it came before."""

    route: Route
    refused: tuple[Refusal, ...]
    unused: tuple[Route, ...] = ()

    def reasons(self) -> dict[str, str]:
        """Each reason against candidates, and these, as `sm90:dense, sm90:xqa`."""
        found: dict[str, list[str]] = {}
        for refusal in self.refused:
            found.setdefault(refusal.reason, []).append(str(refusal.route))
        return {reason: ", ".join(routes) for reason, routes in found.items()}

    def lines(self) -> list[str]:
        """The route, then every other candidate with its reason; candidates of one reason share a line."""
        reasons = self.reasons()
        if self.unused:
            reasons[f"{self.route} comes first"] = ", ".join(map(str, self.unused))
        return [f"{self.route.stage}: {self.route}", *(f"  not {them}: {reason}" for reason, them in reasons.items())]

    def __str__(self) -> str:
        return "\n".join(self.lines())


Test = Callable[[Call, DeviceFacts], "str | None"]


def _nothing(_call: Call, _facts: DeviceFacts) -> str | None:
    return None


@dataclass(frozen=True)
class Candidate:
    """A route and the tests that say why it does not take a call (None: it does).

    refusal      why it cannot serve the call
    passed_over  why it should not, although it could: a pin does not ask
    """

    route: Route
    refusal: Test = _nothing
    passed_over: Test = _nothing


def _all(*tests: Test) -> Test:
    """The first reason of several tests."""

    def first(call: Call, facts: DeviceFacts) -> str | None:
        return next((reason for test in tests if (reason := test(call, facts)) is not None), None)

    return first


def _only_below_budget(call: Call, _facts: DeviceFacts) -> str | None:
    if call.selects_everything:
        return None
    visible = call.spec.visible_blocks(call.max_position)
    return f"rows see up to {visible} blocks and select {call.spec.top_blocks}"


def _only_without_selection(call: Call, facts: DeviceFacts) -> str | None:
    reason = _only_below_budget(call, facts)
    if reason is None and call.selection_given:
        return "a selection is given, and dense attends to every visible block"
    return reason


def _needs_neighbours(call: Call, _facts: DeviceFacts) -> str | None:
    if call.rows > call.requests:
        return None
    return f"{call.rows} rows of {call.requests} requests: no more rows than requests"


MOST_SPLIT_ROWS = 16
"""Rows per request up to which a call counts as decode or verification."""


def _needs_few_rows(call: Call, _facts: DeviceFacts) -> str | None:
    if call.rows_per_request <= MOST_SPLIT_ROWS:
        return None
    return f"{call.rows_per_request} rows per request on average: made for at most {MOST_SPLIT_ROWS}"


def _shares(call: Call, _facts: DeviceFacts) -> str | None:
    if call.batch_invariant:
        return "batch_invariant: a row's bits would depend on the rows that share its launch"
    return None


def _scores_on_smxx(call: Call, facts: DeviceFacts) -> str | None:
    return topk_refusal(call.spec, call.max_position) or score_refusal(call.spec, call.index_q_bytes, facts)


def _fuses_on_sm90(call: Call, facts: DeviceFacts) -> str | None:
    q_dtype, cache_dtype = call.index_q_dtype or call.q_dtype, call.index_cache_dtype or call.cache_dtype
    batch = (call.spec, call.rows, call.rows_per_request, call.max_position, call.batch_invariant)
    form = decode_refusal if decodes_at_once(*batch) else fused_refusal
    refusal = form(call.spec, q_dtype, cache_dtype, call.index_aligned, call.max_position, facts)
    return topk_refusal(call.spec, call.max_position) or refusal


def _faster_in_full(call: Call, _facts: DeviceFacts) -> str | None:
    return fused_loses_to_scores(call.spec, call.rows, call.rows_per_request, call.max_position, call.batch_invariant)


def _multiplies_on_smxx(call: Call, facts: DeviceFacts) -> str | None:
    q_dtype, cache_dtype = call.index_q_dtype or call.q_dtype, call.index_cache_dtype or call.cache_dtype
    refusal = product_refusal(call.spec, q_dtype, cache_dtype, call.requests, call.batch_invariant, facts)
    return topk_refusal(call.spec, call.max_position) or refusal


def _faster_by_pages(call: Call, facts: DeviceFacts) -> str | None:
    return product_loses(call.spec, call.rows, call.max_position, facts)


def _lists(call: Call, facts: DeviceFacts) -> str | None:
    return worklist_refusal(call.spec, call.max_position, facts)


def _attends_on_smxx(call: Call, facts: DeviceFacts) -> str | None:
    return attend_refusal(call.spec, call.cache_dtype, call.layout, facts) or _lists(call, facts)


def _attends_on_sm90(call: Call, facts: DeviceFacts) -> str | None:
    return hopper_refusal(call.spec, call.q_dtype, call.cache_dtype, call.layout, facts) or _lists(call, facts)


def _scores_on_sm7x(call: Call, facts: DeviceFacts) -> str | None:
    q_dtype, cache_dtype = call.index_q_dtype or call.q_dtype, call.index_cache_dtype or call.cache_dtype
    refusal = sm7x_score_refusal(call.spec, q_dtype, cache_dtype, facts)
    return topk_refusal(call.spec, call.max_position) or refusal


def _attends_on_sm7x(call: Call, facts: DeviceFacts) -> str | None:
    return sm7x_refusal(call.spec, call.q_dtype, call.cache_dtype, call.layout, facts) or _lists(call, facts)


def _left_to_triton(call: Call, _facts: DeviceFacts) -> str | None:
    if prefers_triton(call.spec, call.rows, call.requests, call.cache_dtype):
        return "windows of one row with few heads are faster in smxx's smaller tile"
    return None


def _scored_in_full(call: Call, _facts: DeviceFacts) -> str | None:
    return fused_loses(call.spec, call.rows_per_request, call.max_position, call.batch_invariant)


def _for_checking(_call: Call, _facts: DeviceFacts) -> str | None:
    return "the reference is for checking: it runs only when pinned"


SELECT_CANDIDATES = (
    Candidate(Route("select", "everything", "smxx"), _only_below_budget),
    Candidate(Route("select", "fused", "sm90"), _fuses_on_sm90, _faster_in_full),
    Candidate(Route("select", "cublas", "smxx"), _multiplies_on_smxx, _faster_by_pages),
    Candidate(Route("select", "plain", "smxx"), _scores_on_smxx),
    Candidate(Route("select", "everything", "sm7x"), _only_below_budget),
    Candidate(Route("select", "plain", "sm7x"), _scores_on_sm7x),
    Candidate(Route("select", "everything", "cpu"), _only_below_budget),
    Candidate(Route("select", "fused", "cpu"), passed_over=_scored_in_full),
    Candidate(Route("select", "plain", "cpu")),
    Candidate(Route("select", "reference", "reference"), passed_over=_for_checking),
)
ATTEND_CANDIDATES = (
    Candidate(
        Route("attend", "dense", "sm90"), _all(_attends_on_sm90, _only_without_selection, _shares), _left_to_triton
    ),
    Candidate(Route("attend", "dense", "smxx"), _all(_attends_on_smxx, _only_without_selection, _shares)),
    Candidate(Route("attend", "splitk", "sm90"), _all(_attends_on_sm90, _needs_few_rows, _shares), _left_to_triton),
    Candidate(Route("attend", "splitk", "smxx"), _all(_attends_on_smxx, _needs_few_rows, _shares)),
    Candidate(Route("attend", "grouped", "sm90"), _all(_attends_on_sm90, _needs_neighbours, _shares)),
    Candidate(Route("attend", "grouped", "smxx"), _all(_attends_on_smxx, _needs_neighbours, _shares)),
    Candidate(Route("attend", "xqa", "sm90"), _attends_on_sm90),
    Candidate(Route("attend", "xqa", "smxx"), _attends_on_smxx),
    Candidate(Route("attend", "dense", "sm7x"), _all(_attends_on_sm7x, _only_without_selection, _shares)),
    Candidate(Route("attend", "splitk", "sm7x"), _all(_attends_on_sm7x, _needs_few_rows, _shares)),
    Candidate(Route("attend", "grouped", "sm7x"), _all(_attends_on_sm7x, _needs_neighbours, _shares)),
    Candidate(Route("attend", "xqa", "sm7x"), _attends_on_sm7x),
    Candidate(Route("attend", "dense", "cpu"), _all(_only_without_selection, _shares)),
    Candidate(Route("attend", "grouped", "cpu"), _all(_needs_neighbours, _shares)),
    Candidate(Route("attend", "xqa", "cpu")),
    Candidate(Route("attend", "reference", "reference"), passed_over=_for_checking),
)
CANDIDATES: dict[Stage, tuple[Candidate, ...]] = {"select": SELECT_CANDIDATES, "attend": ATTEND_CANDIDATES}

PINS = frozenset(
    name
    for candidates in CANDIDATES.values()
    for c in candidates
    for name in (c.route.mode, c.route.kernel_set, str(c.route))
)
"""Every name a pin may have."""


def _absence(route: Route, facts: DeviceFacts) -> str | None:
    """Why a route's kernels cannot run on a device at all, or None when they can."""
    if route.kernel_set in facts.kernel_sets:
        return None
    lacks = dict(facts.missing).get(route.kernel_set)
    return lacks or f"the {route.kernel_set} kernels have no image for {facts.name} ({facts.arch})"


def _refusal(candidate: Candidate, call: Call, facts: DeviceFacts, pin: str | None) -> str | None:
    route = candidate.route
    if pin is not None and not route.answers_to(pin):
        return f"{pin} is pinned"
    absent = _absence(route, facts)
    if absent is not None:
        return absent
    reason = candidate.refusal(call, facts)
    if reason is None and pin is None:
        reason = candidate.passed_over(call, facts)
    return reason


def route_refusal(route: Route, call: Call, facts: DeviceFacts) -> str | None:
    """Why a route cannot serve a call on a device, or None when it can, preferred or not.

    Raises StopIteration for a route that is no candidate.
    """
    candidate = next(c for c in CANDIDATES[route.stage] if c.route == route)
    return _refusal(candidate, call, facts, str(route))


def choose_route(stage: Stage, call: Call, facts: DeviceFacts, pin: str | None = None) -> Decision:
    """The first candidate of a stage that can serve `call` on a device, with the reasons against those before it.

    A pin that names no candidate of this stage (`grouped`, asked of the select stage) leaves the stage free.
    Raises NoRouteError, with every candidate's reason, when none can; ValueError for a pin that no route has.
    """
    if pin is not None and pin not in PINS:
        raise ValueError(f"pin: wanted one of {', '.join(sorted(PINS))}; got {pin!r}")
    candidates = CANDIDATES[stage]
    if pin is not None and not any(c.route.answers_to(pin) for c in candidates):
        pin = None
    refused: list[Refusal] = []
    for index, candidate in enumerate(candidates):
        reason = _refusal(candidate, call, facts, pin)
        if reason is None:
            unused: list[Route] = []
            for later in candidates[index + 1 :]:
                absent = _absence(later.route, facts)
                if absent is None:
                    unused.append(later.route)
                else:
                    refused.append(Refusal(later.route, absent))
            return Decision(candidate.route, tuple(refused), tuple(unused))
        refused.append(Refusal(candidate.route, reason))
    reasons = "; ".join(f"{refusal.route}: {refusal.reason}" for refusal in refused)
    raise NoRouteError(
        f"{stage}: no route serves {call.rows} rows on {facts.name} ({facts.arch}): {reasons}", tuple(refused)
    )


_announced: set[tuple[str, torch.device, Route]] = set()


def _log_first(kind: str, device: torch.device, route: Route, text: str) -> None:
    if (kind, device, route) not in _announced:
        _announced.add((kind, device, route))
        logger.info(text)


def announce(decision: Decision, call: Call, facts: DeviceFacts, device: torch.device) -> None:
    """Logs the first use of a route, and the first refusal of another with an image: once per process and device."""
    if not logger.isEnabledFor(logging.INFO):
        return
    route = decision.route
    seen = f"{call.rows} rows of {call.requests} requests, positions to {call.max_position}"
    _log_first("used", device, route, f"{route.stage} takes {route} on {device} ({facts.name}), first for {seen}")
    here = facts.kernel_sets | {name for name, _ in facts.missing}
    for refusal in decision.refused:
        if refusal.route.kernel_set not in here:
            continue
        text = f"{route.stage} refuses {refusal.route} on {device} ({facts.name}), first for {seen}: {refusal.reason}"
        _log_first("refused", device, refusal.route, text)
