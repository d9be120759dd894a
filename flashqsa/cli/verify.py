"""`flashqsa verify`: the case list through the public calls, against the reference."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.progress import Progress

from flashqsa.check import check_pin
from flashqsa.cli.show import FAILED, OK, Screen, UserError, log_lines, seconds, versions, write_json
from flashqsa.testing.cases import CASES, Case
from flashqsa.testing.verify import CaseResult, verify_case


@dataclass(frozen=True)
class Selected:
    """Which cases `flashqsa verify` was asked for, and how."""

    device: str = "cpu"
    names: tuple[str, ...] = ()
    tag: str | None = None
    route: str | None = None
    verbose: bool = False


def chosen_cases(names: Sequence[str], tag: str | None) -> list[Case]:
    """The cases of some names and of a tag (all without either). Raises UserError where there is none."""
    known = {case.name: case for case in CASES}
    for name in names:
        if name not in known:
            raise UserError(f"--case: no case is called {name!r}; flashqsa verify --list shows them")
    found = [known[name] for name in names] if names else list(CASES)
    if tag is not None:
        found = [case for case in found if tag in case.tags]
    if not found:
        tags = sorted({each for case in CASES for each in case.tags})
        raise UserError(f"--tag: no case has {tag!r}; tags are {', '.join(tags)}")
    return found


def list_cases(selected: Selected, screen: Screen, json_target: str | None) -> int:
    """Shows each case that was asked for in one line, without running it."""
    cases = chosen_cases(selected.names, selected.tag)
    rows = [(str(case).partition(": ")[0], str(case).partition(": ")[2], ", ".join(case.tags)) for case in cases]
    screen.table("cases", ("name", "what it calls", "tags"), rows)
    write_json(json_target, {"cases": [{"name": name, "call": call, "tags": tags} for name, call, tags in rows]})
    return OK


def device_named(name: str) -> torch.device:
    """A device that is here. Raises UserError."""
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda"):
            raise UserError(f"--device: wanted cpu, cuda or cuda:1; got {name}")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        # A torch without CUDA says so by an AssertionError.
        raise UserError(f"--device {name}: {str(error).splitlines()[0]}") from error
    return device


def verify(selected: Selected, screen: Screen, json_target: str | None) -> int:
    """Runs the cases and shows a verdict on each.

    The exit code is FAILED unless every case passes. A pinned route passes over the cases it cannot serve, and must
    serve one at least.
    """
    cases, device = chosen_cases(selected.names, selected.tag), device_named(selected.device)
    check_pin(selected.route)
    results: list[tuple[CaseResult, float]] = []
    with log_lines(screen, verbose=selected.verbose), Progress(console=screen.progress, transient=True) as progress:
        bar = progress.add_task("cases", total=len(cases))
        for case in cases:
            started = time.perf_counter()
            result = verify_case(case, device, selected.route)
            results.append((result, time.perf_counter() - started))
            progress.advance(bar)
    screen.table(
        f"{len(cases)} cases on {device}",
        ("case", "routes", "verdict", "error, of allowed", "time"),
        [
            (r.case.name, ", ".join(r.routes), verdict(r), f"{r.error:.2f}" if r.routes else "-", seconds(spent))
            for r, spent in results
        ],
    )
    served = [result for result, _ in results if selected.route is None or result.refused is None]
    passed = sum(result.passed for result in served)
    beside = f"; {len(cases) - len(served)} are not for {selected.route}" if len(served) < len(cases) else ""
    screen.line(f"{passed} of {len(served)} cases pass{beside}.")
    write_json(json_target, _as_json(device, results))
    return OK if served and passed == len(served) else FAILED


def verdict(result: CaseResult) -> str:
    """One line on one case."""
    if result.refused is not None:
        return f"refused: {result.refused}"
    return "; ".join(result.failures) or "right"


def _as_json(device: torch.device, results: list[tuple[CaseResult, float]]) -> dict[str, Any]:
    return {
        "device": str(device),
        "versions": versions(),
        "passed": all(result.passed for result, _ in results),
        "cases": [
            {
                "name": result.case.name,
                "passed": result.passed,
                "routes": list(result.routes),
                "refused": result.refused,
                "failures": list(result.failures),
                "error_of_allowed": result.error,
                "seconds": spent,
            }
            for result, spent in results
        ],
    }
