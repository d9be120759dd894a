"""`flashqsa bench`: verifies a case, then times it, and gives no time to a wrong result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from flashqsa.check import check_pin
from flashqsa.cli import process
from flashqsa.cli.bench_cases import BenchCase, Wanted, asked_cases
from flashqsa.cli.bench_inputs import Selections, build_workload, free_bytes
from flashqsa.cli.bench_measures import Measure, Setup, measures_of
from flashqsa.cli.bench_peer import load_peer
from flashqsa.cli.bench_report import (
    SCHEMA,
    CaseReport,
    MeasureReport,
    Memory,
    PeerReport,
    Verdict,
    case_as_json,
    machine,
    plot_reports,
    show_reports,
)
from flashqsa.cli.bench_timing import (
    CALLS,
    GraphedCall,
    Manner,
    Roofs,
    Times,
    measure_roofs,
    on_device,
    roof_dtype,
    time_calls,
)
from flashqsa.cli.show import FAILED, OK, Screen, UserError, log_lines, mebibytes, write_json
from flashqsa.cli.stats import check_plot_target
from flashqsa.cli.verify import device_named
from flashqsa.route import NoRouteError
from flashqsa.testing.compare import same_bits
from flashqsa.values import Selection

SPARE_BYTES = 512 << 20
"""Memory beyond a case's inputs and outputs that must be free: scratch, and the reference's."""

GRAPH_CHOICES = ("auto", "on", "off")

STEP_ROWS = 16
"""Rows per request up to which an indexer's case is a step, whose kernels take less time than Python's launches."""


@dataclass(frozen=True)
class Settings:
    """How cases are measured.

    device      a device's name; None for a GPU where there is one
    calls       samples per measure; None for 20 on a GPU and 5 on a CPU
    graph       `auto` replays CUDA graphs for decode and steps, `on` for everything, `off` for nothing
    check_rows  rows that are compared, of a case with more than ALL_ROWS
    """

    device: str | None = None
    calls: int | None = None
    cold: bool = False
    graph: str = "auto"
    peer: Path | None = None
    route: str | None = None
    seed: int = 0
    threads: int | None = None
    check_rows: int = 24
    verbose: bool = False


@dataclass(frozen=True)
class _Run:
    """What all cases of a run share."""

    setup: Setup
    settings: Settings
    selections: Selections

    @property
    def device(self) -> torch.device:
        return self.setup.device

    def manner(self, case: BenchCase) -> Manner:
        """How a case is timed."""
        wanted = self.settings.graph
        few = case.kind == "decode" or (case.kind == "indexer" and case.rows_per_request <= STEP_ROWS)
        graphs = self.device.type == "cuda" and (wanted == "on" or (wanted == "auto" and few))
        return Manner(self.settings.calls or CALLS[self.device.type], self.settings.cold, graphs)


@dataclass(frozen=True)
class _Checked:
    """A measure whose result was judged."""

    measure: Measure
    result: Any
    verdict: Verdict
    peer_verdict: Verdict | None
    memory: Memory


def bench(
    kind: str,
    suite: str | None,
    wanted: Wanted,
    settings: Settings,
    screen: Screen,
    json_target: str | None,
    plot: Path | None,
) -> int:
    """Runs the cases; the exit code is FAILED unless each was right and timed. Raises UserError, InputError."""
    cases = asked_cases(kind, suite, wanted)
    check_plot_target(plot)
    if settings.route is not None and any(case.every_route for case in cases):
        raise UserError(
            f"--route {settings.route}: some of these cases take each route in turn; leave out one of the two"
        )
    run = _prepared(settings, {measure for case in cases for measure in case.measures})
    reports: list[CaseReport] = []
    with log_lines(screen, verbose=settings.verbose), on_device(run.device):
        told = machine(run.device)
        roofs = measure_roofs(run.device, [roof_dtype(case.q_dtype, run.device) for case in cases])
        _show_roofs(told["device"]["name"], roofs, screen)
        for index, case in enumerate(cases):
            place = f"case {index + 1} of {len(cases)}"
            screen.progress.print(f"{place}: {case}; inputs {mebibytes(case.input_bytes)}", soft_wrap=True)
            reports.append(run_case(case, run))
            content = {
                "schema": SCHEMA,
                **told,
                "seed": settings.seed,
                "roofs": asdict(roofs),
                "complete": len(reports) == len(cases),
                "cases": [case_as_json(report, roofs, run.device) for report in reports],
            }
            if json_target != "-" or content["complete"]:
                # After each case, so that a run that is cut short keeps what it measured.
                write_json(json_target, content)
    show_reports(reports, roofs, run.device, screen)
    if plot is not None:
        plot_reports(reports, f"flashqsa bench, {told['device']['name']}", plot)
        screen.line(f"plot written to {plot}")
    return OK if all(report.passed for report in reports) else FAILED


def _show_roofs(name: str, roofs: Roofs, screen: Screen) -> None:
    rates = [f"{dtype} product {rate / 1e12:.3g} TFLOP/s" for dtype, rate in roofs.matmul_flops_per_s.items()]
    copy = f"copy {roofs.copy_bytes_per_s / 1e9:,.0f} GB/s"
    screen.line(f"{name}, measured: {', '.join([copy, *rates])}")


def _prepared(settings: Settings, measures: set[str]) -> _Run:
    """Device, peer and threads, from settings that are checked. Raises UserError, InputError, KnobError."""
    check_pin(settings.route)
    for option, number in (
        ("--calls", settings.calls),
        ("--threads", settings.threads),
        ("--check-rows", settings.check_rows),
    ):
        if number is not None and number < 1:
            raise UserError(f"{option}: wanted at least 1; got {number}")
    if settings.graph not in GRAPH_CHOICES:
        raise UserError(f"--graph: wanted one of {', '.join(GRAPH_CHOICES)}; got {settings.graph!r}")
    name = settings.device or ("cuda" if torch.cuda.is_available() else "cpu")
    # A tensor's device has its index, which values are compared by.
    device = torch.empty(0, device=device_named(name)).device
    if settings.graph == "on" and device.type == "cpu":
        raise UserError("--graph on: a CPU has no CUDA graphs")
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    if device.type == "cpu":
        process.keep_freed_memory()
    peer = None if settings.peer is None else load_peer(settings.peer, measures)
    return _Run(Setup(device, peer, settings.route, settings.check_rows), settings, Selections())


def run_case(case: BenchCase, run: _Run) -> CaseReport:
    """One case: built, verified, timed. What does not fit or has no route is skipped, with the reason."""
    manner = run.manner(case)
    needed, free = case.input_bytes + 4 * case.output_bytes + SPARE_BYTES, free_bytes(run.device)
    if free is not None and needed > free:
        reason = f"needs {mebibytes(needed)} of memory, {mebibytes(free)} are free"
        return CaseReport(case, "skipped", reason, manner.text(run.device))
    try:
        return _run_case(case, run, manner)
    except NoRouteError as error:
        return CaseReport(case, "skipped", str(error), manner.text(run.device))
    except torch.OutOfMemoryError as error:
        reason = f"out of device memory: {str(error).splitlines()[0]}"
    # Outside the handler: its traceback holds the case's tensors.
    torch.cuda.empty_cache()
    return CaseReport(case, "skipped", reason, manner.text(run.device))


def _run_case(case: BenchCase, run: _Run, manner: Manner) -> CaseReport:
    work = build_workload(case, run.device, run.settings.seed, run.selections)
    checked = [_check(measure, run) for measure in measures_of(work, run.setup)]
    failures = [f"{each.measure.name}: {each.verdict.failure}" for each in checked if each.verdict.failure]
    timed: list[tuple[Times, Times | None] | None] = []
    if not failures:
        # Routes are compared, so they are timed in turn; stages one after the other.
        for together in [checked] if case.every_route else [[each] for each in checked]:
            found = _timed(together, run, manner)
            if isinstance(found, str):
                failures.append(found)
                break
            timed.extend(found)
    if failures:
        timed = [None] * len(checked)
    reports = [_report(each, times, run) for each, times in zip(checked, timed, strict=True)]
    status, reason = ("failed", "; ".join(failures)) if failures else ("timed", None)
    return CaseReport(case, status, reason, manner.text(run.device), tuple(reports))


def _report(checked: _Checked, times: tuple[Times, Times | None] | None, run: _Run) -> MeasureReport:
    measure, peer = checked.measure, None
    ours, theirs = times if times is not None else (None, None)
    if run.setup.peer is not None and checked.peer_verdict is not None:
        peer = PeerReport(run.setup.peer.name, checked.peer_verdict, theirs)
    return MeasureReport(
        measure.name,
        checked.verdict,
        ours,
        measure.counts,
        measure.routes,
        measure.workspace_bytes,
        checked.memory,
        peer,
    )


def _check(measure: Measure, run: _Run) -> _Checked:
    """Ours, the peer's, and ours again, which must repeat bit by bit."""
    first = measure.call()
    verdict = measure.judge(first)
    peer_verdict = None if measure.peer_call is None else measure.peer_judge(measure.peer_call())
    second, memory = _with_memory(measure.call, run.device)
    if verdict.failure is None and not same_result(first, second):
        failure = "a second call gave other bits"
        verdict = Verdict(failure, verdict.rows, verdict.method, verdict.max_error, verdict.limit)
    return _Checked(measure, first, verdict, peer_verdict, memory)


def same_result(first: Any, second: Any) -> bool:
    """Whether two results, outputs or selections, are the same bit for bit."""
    if isinstance(first, Selection) and isinstance(second, Selection):
        return same_bits(first.blocks, second.blocks) and same_bits(first.count, second.count)
    return same_bits(first, second)


def _with_memory(call: Callable[[], Any], device: torch.device) -> tuple[Any, Memory]:
    """A call's result, and what it held."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = call()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device)
        return result, Memory(peak, peak - before)
    # What earlier calls left would be used again without showing.
    told = process.give_back_freed_memory() and process.reset_peak()
    held = process.resident_bytes()
    result = call()
    peak = process.peak_bytes()
    return result, Memory(peak, peak - held if told else None)


def _timed(together: Sequence[_Checked], run: _Run, manner: Manner) -> list[tuple[Times, Times | None]] | str:
    """Times of ours, each with the peer's where there is one and it was right; or what a replay got wrong.

    together  measures whose calls are timed in turn
    """
    peers = [each.measure.peer_call if _peer_is_right(each) else None for each in together]
    calls = [each.measure.call for each in together] + [call for call in peers if call is not None]
    if manner.graphs:
        captured = _captured(calls, len(together), run, manner)
        for each, graph in zip(together, captured, strict=False):
            replayed = graph()
            torch.cuda.synchronize(run.device)
            if not same_result(each.result, replayed):
                return f"{each.measure.name}: a replay of its CUDA graph gave other bits"
        calls = list(captured)
    found = time_calls(calls, run.device, manner)
    theirs = iter(found[len(together) :])
    paired = zip(found, peers, strict=False)
    return [(ours, None if peer is None else next(theirs)) for ours, peer in paired]


def _peer_is_right(checked: _Checked) -> bool:
    return checked.peer_verdict is not None and checked.peer_verdict.failure is None


def _captured(calls: Sequence[Callable[[], Any]], ours: int, run: _Run, manner: Manner) -> list[GraphedCall]:
    """Each call as a CUDA graph: the first `ours` are our own, the others a peer's, which may not be made for one."""
    captured = [GraphedCall.capture(call, run.device, manner.calls_per_sample) for call in calls[:ours]]
    for call in calls[ours:]:
        try:
            captured.append(GraphedCall.capture(call, run.device, manner.calls_per_sample))
        except RuntimeError as error:
            line = str(error).splitlines()[0]
            raise UserError(f"--peer: cannot be captured in a CUDA graph ({line}); --graph off times it") from error
    return captured
