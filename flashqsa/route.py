"""Which kernels serve a call, and why the others do not.

A route is decided by `choose_route` alone, a pure function of a `Call` and of `DeviceFacts`: it launches nothing, reads
no tensor and works for devices that are not there. Candidates stand in order of preference in `SELECT_CANDIDATES` and
`ATTEND_CANDIDATES`; the first that has no reason against it is taken. A pinned route is used or refused, never
replaced.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from flashqsa.device import DeviceFacts
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

    rows, requests, max_position  as in `Rows` and the caches' page tables
    q_dtype, cache_dtype          storage dtypes; `cache_dtype` is the index cache's for the select stage
    selection_given               whether attention reads a Selection, which may hold less than all that a row sees

    >>> Call(QsaSpec(), rows=8192, requests=1, max_position=8191).selects_everything
    False
    """

    spec: QsaSpec
    rows: int
    requests: int
    max_position: int
    q_dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype = torch.float32
    page_tokens: int = 64
    selection_given: bool = False

    @property
    def selects_everything(self) -> bool:
        """Whether no row sees more blocks than it may select."""
        return self.spec.selects_everything(self.max_position)


@dataclass(frozen=True)
class Route:
    """One way to serve a stage.

    stage       "select" or "attend"
    mode        select: `everything`, `plain`; attend: `dense`, `grouped`, `xqa`; both: `reference`
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
    """The route a call takes, the candidates that were refused before it, and those it came before."""

    route: Route
    refused: tuple[Refusal, ...]
    unused: tuple[Route, ...] = ()

    def lines(self) -> list[str]:
        """One line per candidate, in order of preference."""
        found = [f"{self.route.stage}: {self.route}"]
        found += [f"  not {refusal.route}: {refusal.reason}" for refusal in self.refused]
        found += [f"  not {route}: {self.route} comes first" for route in self.unused]
        return found

    def __str__(self) -> str:
        return "\n".join(self.lines())


@dataclass(frozen=True)
class Candidate:
    """A route and the test that says why it cannot serve a call (None: it can)."""

    route: Route
    refusal: Callable[[Call], str | None]


def _always(_call: Call) -> str | None:
    return None


def _only_below_budget(call: Call) -> str | None:
    if call.selects_everything:
        return None
    visible = call.spec.visible_blocks(call.max_position)
    return f"rows see up to {visible} blocks and select {call.spec.top_blocks}"


def _only_without_selection(call: Call) -> str | None:
    if not call.selection_given:
        return _only_below_budget(call)
    return _only_below_budget(call) or "a selection is given, and dense attends to every visible block"


def _needs_neighbours(call: Call) -> str | None:
    if call.rows > call.requests:
        return None
    return f"{call.rows} rows of {call.requests} requests: no more rows than requests"


def _only_when_pinned(_call: Call) -> str | None:
    return "the reference is for checking: it runs only when pinned"


SELECT_CANDIDATES = (
    Candidate(Route("select", "everything", "cpu"), _only_below_budget),
    Candidate(Route("select", "plain", "cpu"), _always),
    Candidate(Route("select", "reference", "reference"), _only_when_pinned),
)
ATTEND_CANDIDATES = (
    Candidate(Route("attend", "dense", "cpu"), _only_without_selection),
    Candidate(Route("attend", "grouped", "cpu"), _needs_neighbours),
    Candidate(Route("attend", "xqa", "cpu"), _always),
    Candidate(Route("attend", "reference", "reference"), _only_when_pinned),
)
CANDIDATES: dict[Stage, tuple[Candidate, ...]] = {"select": SELECT_CANDIDATES, "attend": ATTEND_CANDIDATES}

PINS = frozenset(
    name
    for candidates in CANDIDATES.values()
    for c in candidates
    for name in (c.route.mode, c.route.kernel_set, str(c.route))
)
"""Every name a pin may have."""


def _refusal(candidate: Candidate, call: Call, facts: DeviceFacts, pin: str | None) -> str | None:
    route = candidate.route
    if pin is not None and not route.answers_to(pin):
        return f"{pin} is pinned"
    if route.kernel_set not in facts.kernel_sets:
        return f"the {route.kernel_set} kernels have no image for {facts.name} ({facts.arch})"
    if pin is not None and route.kernel_set == "reference":
        return None
    return candidate.refusal(call)


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
            unused = tuple(c.route for c in candidates[index + 1 :])
            return Decision(candidate.route, tuple(refused), unused)
        refused.append(Refusal(candidate.route, reason))
    reasons = "; ".join(f"{refusal.route}: {refusal.reason}" for refusal in refused)
    raise NoRouteError(
        f"{stage}: no route serves {call.rows} rows on {facts.name} ({facts.arch}): {reasons}", tuple(refused)
    )


_announced: set[tuple[str, torch.device, Route]] = set()


def _log_first(kind: str, device: torch.device, route: Route, text: str) -> None:
    if logger.isEnabledFor(logging.INFO) and (kind, device, route) not in _announced:
        _announced.add((kind, device, route))
        logger.info(text)


def announce(decision: Decision, call: Call, facts: DeviceFacts, device: torch.device) -> None:
    """Logs the first use of a route, and the first refusal of one preferred to it: each once per process and device."""
    route = decision.route
    seen = f"{call.rows} rows of {call.requests} requests, positions to {call.max_position}"
    _log_first("used", device, route, f"{route.stage} takes {route} on {device} ({facts.name}), first for {seen}")
    for refusal in decision.refused:
        text = f"{route.stage} refuses {refusal.route} on {device} ({facts.name}), first for {seen}: {refusal.reason}"
        _log_first("refused", device, refusal.route, text)
