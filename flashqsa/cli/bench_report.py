"""What `flashqsa bench` hands back: JSON, a table, a plot, and the machine it ran on."""

from __future__ import annotations

import math
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from flashqsa.capture import facts_as_json
from flashqsa.cli.bench_cases import BenchCase
from flashqsa.cli.bench_counts import Counts
from flashqsa.cli.bench_timing import Roofs, Times, roof_dtype
from flashqsa.cli.doctor import NVRTC_PACKAGES
from flashqsa.cli.show import Screen, UserError, mebibytes, seconds, versions
from flashqsa.cli.stats import NO_MATPLOTLIB
from flashqsa.machine import facts_here

SCHEMA = 1
"""Counts up when a key of the JSON changes its meaning or goes."""

PACKAGE = Path(__file__).resolve().parent.parent
ASK_SECONDS = 10


@dataclass(frozen=True)
class Verdict:
    """What the comparison of one result said.

    failure    what is wrong, or None
    rows       rows that were compared
    method     what they were compared with
    max_error  largest absolute difference from FP64, inf for NaN; None where selections were compared
    limit      what it may be
    """

    failure: str | None
    rows: int
    method: str
    max_error: float | None = None
    limit: float | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values; an error that is not finite becomes None, and `failure` says so."""
        error = self.max_error if self.max_error is not None and math.isfinite(self.max_error) else None
        return {**asdict(self), "max_error": error, "passed": self.failure is None}


@dataclass(frozen=True)
class Memory:
    """What a call held.

    peak_bytes   the most at once, inputs included: allocated on a GPU, resident in the process on a CPU
    extra_bytes  beyond what was held before, result included; None where the system does not tell it (a CPU, where
                 freed memory is given back first: Linux with glibc)
    """

    peak_bytes: int
    extra_bytes: int | None


@dataclass(frozen=True)
class PeerReport:
    """A peer beside ours; no time where its result is wrong, or where ours is."""

    name: str
    verdict: Verdict
    times: Times | None


@dataclass(frozen=True)
class MeasureReport:
    """One timed stage of a case; `times` is None where the case failed."""

    name: str
    verdict: Verdict
    times: Times | None
    counts: Counts
    routes: tuple[str, ...]
    workspace_bytes: int
    memory: Memory
    peer: PeerReport | None = None

    def ratio(self) -> float | None:
        """The peer's time over ours; above 1 ours is faster."""
        if self.times is None or self.peer is None or self.peer.times is None:
            return None
        return self.peer.times.median_us / self.times.median_us


@dataclass(frozen=True)
class CaseReport:
    """One case: `status` is timed, failed (something was wrong: no times) or skipped (did not run: see `reason`)."""

    case: BenchCase
    status: str
    reason: str | None
    manner: str
    measures: tuple[MeasureReport, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether everything ran and was right, the peer's results included."""
        peers = [m.peer for m in self.measures if m.peer is not None]
        return self.status == "timed" and all(peer.verdict.failure is None for peer in peers)


def shares(counts: Counts, times: Times, roofs: Roofs, dtype: str) -> dict[str, float]:
    """Rates reached, as numbers and as shares of the roofs, and the time the roofs allow at least."""
    taken, product = times.median_us * 1e-6, roofs.matmul_flops_per_s[dtype]
    floor = max(counts.flops / product, counts.bytes["useful"] / roofs.copy_bytes_per_s)
    return {
        "flops_per_s": counts.flops / taken,
        "useful_bytes_per_s": counts.bytes["useful"] / taken,
        "of_matmul_roof": counts.flops / taken / product,
        "of_copy_roof": counts.bytes["useful"] / taken / roofs.copy_bytes_per_s,
        "floor_us": floor * 1e6,
        "of_floor": floor / taken,
    }


def case_as_json(report: CaseReport, roofs: Roofs, device: torch.device) -> dict[str, Any]:
    """One case as plain JSON values."""
    case = report.case
    dtype = str(roof_dtype(case.q_dtype, device)).removeprefix("torch.")
    content: dict[str, Any] = {
        "name": str(case),
        "status": report.status,
        "reason": report.reason,
        "kind": case.kind,
        "rows": case.rows,
        "requests": case.requests,
        "rows_per_request": case.rows_per_request,
        "context": case.context,
        "regime": case.regime,
        "spec": asdict(case.spec),
        "dtype": case.dtype_name,
        "q_dtype": str(case.q_dtype).removeprefix("torch."),
        "page_tokens": case.page_tokens,
        "gate": case.gate,
        "every_route": case.every_route,
        "input_bytes": case.input_bytes,
        "timing": report.manner,
        "roof_dtype": dtype,
        "measures": {},
    }
    for measure in report.measures:
        told: dict[str, Any] = {
            "verified": measure.verdict.as_json(),
            "times": None if measure.times is None else asdict(measure.times),
            "flops": measure.counts.flops,
            "bytes": measure.counts.bytes,
            "union": {str(size): ratio for size, ratio in measure.counts.union.items()},
            "group_gather_bytes": {str(size): size_bytes for size, size_bytes in measure.counts.group_gather.items()},
            "rates": None if measure.times is None else shares(measure.counts, measure.times, roofs, dtype),
            "routes": list(measure.routes),
            "workspace_bytes": measure.workspace_bytes,
            **asdict(measure.memory),
            "peer": None,
        }
        if measure.peer is not None:
            told["peer"] = {
                "name": measure.peer.name,
                "verified": measure.peer.verdict.as_json(),
                "times": None if measure.peer.times is None else asdict(measure.peer.times),
                "ratio": measure.ratio(),
            }
        content["measures"][measure.name] = told
    content["shares"] = stage_shares(report)
    content["of_taken"] = of_taken(report)
    return content


def of_taken(report: CaseReport) -> dict[str, float] | None:
    """Time of each route over that of the route that is taken, the first; None where a case times one route."""
    times = {measure.name: measure.times for measure in report.measures}
    taken = next(iter(times.values()), None)
    if not report.case.every_route or taken is None:
        return None
    return {name: found.median_us / taken.median_us for name, found in times.items() if found is not None}


def stage_shares(report: CaseReport) -> dict[str, float] | None:
    """Time of each stage alone over the time of both together; None where a case does not time them all."""
    times = {measure.name: measure.times for measure in report.measures}
    together = times.get("together")
    if together is None:
        return None
    alone = {name: taken for name, taken in times.items() if name != "together" and taken is not None}
    return {name: taken.median_us / together.median_us for name, taken in alone.items()}


def _asked(*command: str) -> str | None:
    """What a program of the system says; None where it is absent, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def commit() -> dict[str, Any] | None:
    """Commit of the checkout this package runs from, and whether files differ from it; None outside a checkout."""
    git = ("git", "-C", str(PACKAGE))
    # A package installed inside someone else's checkout is not of its commit.
    if _asked(*git, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    found, changed = _asked(*git, "rev-parse", "HEAD"), _asked(*git, "status", "--porcelain", "--", ".")
    return None if found is None else {"id": found, "dirty": bool(changed)}


def machine(device: torch.device) -> dict[str, Any]:
    """What belongs beside every figure: device, driver, versions, commit and command line."""
    found: dict[str, str | None] = dict(versions())
    for name in ("numpy", "triton", *NVRTC_PACKAGES):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    driver = _asked("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "device": facts_as_json(facts_here(device)),
        "driver": driver.splitlines()[0] if driver else None,
        "cuda": torch.version.cuda,
        "versions": found,
        "commit": commit(),
        "command": shlex.join(["flashqsa", *sys.argv[1:]]),
    }


def _time(times: Times | None) -> str:
    return "-" if times is None else seconds(times.median_us * 1e-6)


def show_reports(reports: Sequence[CaseReport], roofs: Roofs, device: torch.device, screen: Screen) -> None:
    """A row per timed stage, then what was refused a time, and why."""
    lines: list[tuple[str, ...]] = []
    show_routes(reports, screen)
    for report in reports:
        if report.case.every_route:
            continue
        dtype = str(roof_dtype(report.case.q_dtype, device)).removeprefix("torch.")
        for measure in report.measures:
            error = measure.verdict.max_error
            rates = None if measure.times is None else shares(measure.counts, measure.times, roofs, dtype)
            spread, peer = "-", "-"
            if measure.times is not None:
                low, q1, q3 = (
                    seconds(us * 1e-6) for us in (measure.times.min_us, measure.times.q1_us, measure.times.q3_us)
                )
                spread = f"{low}, {q1} - {q3}"
            if measure.peer is not None:
                ratio = measure.ratio()
                peer = "wrong" if measure.peer.verdict.failure else _time(measure.peer.times)
                peer += "" if ratio is None else f" ({ratio:.2f}x)"
            lines.append(
                (
                    str(report.case),
                    measure.name,
                    _time(measure.times) + (" *" if measure.times and measure.times.waits_for_host else ""),
                    spread,
                    f"{measure.counts.union[8]:.2f}" if 8 in measure.counts.union else "-",
                    "-" if rates is None else f"{rates['of_matmul_roof']:.1%}",
                    "-" if rates is None else f"{rates['of_copy_roof']:.1%}",
                    "-" if error is None else f"{error:.1e}",
                    peer,
                )
            )
    columns = ("case", "stage", "median", "min, quartiles", "union of 8", "of matmul", "of copy", "error", "peer")
    if lines:
        screen.table("bench", columns, lines)
    if any(m.times is not None and m.times.waits_for_host for report in reports for m in report.measures):
        screen.line("* launched call by call, and the device waited for Python: --graph on leaves that out")
    for report in reports:
        if report.reason is not None:
            screen.line(f"{report.status}: {report.case}: {report.reason}")
        for measure in report.measures:
            if measure.peer is not None and measure.peer.verdict.failure is not None:
                screen.line(f"peer {measure.peer.name} is wrong: {report.case}: {measure.peer.verdict.failure}")


def show_routes(reports: Sequence[CaseReport], screen: Screen) -> None:
    """A row for each route of the cases that time every one: the route that is taken comes first."""
    lines: list[tuple[str, ...]] = []
    for report in reports:
        ratios = of_taken(report) or {}
        for measure in report.measures if report.case.every_route else ():
            extra, planned = measure.memory.extra_bytes, measure.workspace_bytes
            lines.append(
                (
                    str(report.case),
                    measure.name.split()[-1],
                    _time(measure.times) + (" *" if measure.times and measure.times.waits_for_host else ""),
                    "-" if measure.name not in ratios else f"{ratios[measure.name]:.2f}",
                    mebibytes(planned),
                    "-" if extra is None else mebibytes(extra),
                    "-" if measure.peer is None else _time(measure.peer.times),
                )
            )
    if lines:
        columns = ("case", "route", "median", "of the first", "planned", "memory", "peer")
        screen.table("routes, timed in turn", columns, lines)


def plot_reports(reports: Sequence[CaseReport], title: str, path: Path) -> None:
    """Time against context, and against the union of 8 rows, as an image. Raises UserError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError(NO_MATPLOTLIB) from error
    by_context: dict[str, list[tuple[float, float]]] = {}
    by_union: dict[str, list[tuple[float, float]]] = {}
    for report in reports:
        case, spec = report.case, report.case.spec
        rows = f"{case.requests} x {case.rows_per_request}" if case.kind == "decode" else str(case.rows)
        for measure in report.measures:
            timed = [(measure.name, measure.times)]
            if measure.peer is not None:
                timed.append((f"{measure.name} by {measure.peer.name}", measure.peer.times))
            for name, times in timed:
                if times is None:
                    continue
                heads = "" if measure.name.startswith("selection") else f", {spec.q_heads}/{spec.kv_heads}"
                label = f"{case.kind}: {name}, {rows} rows{heads}, {case.dtype_name}"
                shown = f"{label}, {case.regime}" if case.kind in ("attention", "pipeline") else label
                by_context.setdefault(shown, []).append((case.context, times.median_us))
                if 8 in measure.counts.union:
                    by_union.setdefault(label, []).append((measure.counts.union[8], times.median_us))
    figure = Figure(figsize=(13, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes, series in ((left, by_context), (right, by_union)):
        for label, points in series.items():
            axes.plot(*zip(*sorted(points), strict=True), marker="o", label=label)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("us per call (median)")
        axes.grid(True, alpha=0.25)
        if series:
            axes.legend(frameon=False, fontsize=7)
    left.set(xlabel="context tokens", title="time against context")
    right.set(xlabel="union of 8 rows, in selections", title="time against overlap")
    figure.suptitle(title)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise UserError(f"--plot {path}: cannot be written: {error}") from error
