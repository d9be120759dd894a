"""`flashqsa capture` and `flashqsa replay`, and the calls behind `flashqsa stats`."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashqsa import capture, pipeline
from flashqsa.capture import Captured, Noted, decision_as_json
from flashqsa.check import check_pin
from flashqsa.cli import process
from flashqsa.cli import stats as figures
from flashqsa.cli.engine import Generation, RouteTally, chunks
from flashqsa.cli.prompt import read_prompt
from flashqsa.cli.run import enabled, load, route_rows
from flashqsa.cli.show import FAILED, OK, Screen, UserError, log_lines, seconds, versions, write_json
from flashqsa.cli.verify import chosen_cases
from flashqsa.machine import facts_here
from flashqsa.route import CANDIDATES, Stage
from flashqsa.testing.calls import attention_failures, pick_rows, product_dtype, selection_failure
from flashqsa.testing.inputs import build
from flashqsa.values import IndexCache, KvCache, Selection

WARM_UP_CALLS = 2
Watch = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class Source:
    """Where calls come from: a named case, or one chunk of a preset's prefill of the built-in text.

    chunk_index  which chunk, from 0; the last one for None
    """

    case: str | None = None
    preset: str | None = None
    tokens: int = 4096
    chunk: int = 1024
    chunk_index: int | None = None
    seed: int = 0
    threads: int | None = None


def make_calls(source: Source, watch: Watch) -> str:
    """Makes a source's calls, those that matter inside `watch()`, and returns the source in words. Raises UserError."""
    if source.case is not None and source.preset is not None:
        raise UserError("--case and --preset: wanted one of them; got both")
    for option, value in (("--tokens", source.tokens), ("--chunk", source.chunk), ("--threads", source.threads)):
        if value is not None and value < 1:
            raise UserError(f"{option}: wanted at least 1; got {value}")
    if source.threads is not None:
        torch.set_num_threads(source.threads)
    process.keep_freed_memory()
    return _preset_calls(source, watch) if source.case is None else _case_calls(source.case, watch)


def _case_calls(name: str, watch: Watch) -> str:
    (case,) = chosen_cases((name,), None)
    inputs = build(case)
    with watch():
        selection = inputs.selection
        if selection is None:
            selection = pipeline.select_blocks(inputs.index_q, inputs.index_cache, inputs.rows, inputs.spec)
        pipeline.sparse_attention(inputs.q, inputs.kv_cache, selection, inputs.rows, inputs.spec, inputs.gate)
    return f"case {name}"


def _preset_calls(source: Source, watch: Watch) -> str:
    loaded = load(None, source.preset, None, source.seed)
    prompt = read_prompt(None, source.tokens, loaded.encode)
    pieces = list(chunks(prompt.tokens, source.chunk))
    index = len(pieces) - 1 if source.chunk_index is None else source.chunk_index
    if not 0 <= index < len(pieces):
        raise UserError(f"--chunk-index: wanted 0 to {len(pieces) - 1}; got {source.chunk_index}")
    with enabled(loaded.model):
        run = Generation(loaded.model)
        for number, piece in enumerate(pieces[: index + 1]):
            with watch() if number == index else contextlib.nullcontext():
                run.feed(piece)
    end = index * source.chunk + len(pieces[index])
    return f"{loaded.name}, tokens {index * source.chunk:,} to {end - 1:,}"


def capture_calls(folder: Path, source: Source, screen: Screen, json_target: str | None) -> int:
    """Saves a source's first select call and first attention call under `folder`."""
    existed = set(folder.iterdir()) if folder.is_dir() else set()
    with log_lines(screen):
        words = make_calls(source, lambda: capture.recording(folder))
    found = sorted(set(folder.iterdir()) - existed) if folder.is_dir() else []
    if not found:
        raise UserError(f"{words}: no call reached FlashQSA, so none was saved")
    rows = []
    for path in found:
        saved = capture.load(path)
        size = sum(file.stat().st_size for file in path.iterdir())
        rows.append((str(path), saved.function, f"{saved.rows.count:,}", saved.route, f"{size / 2**20:,.1f} MiB"))
    screen.table(f"captured from {words}", ("folder", "function", "rows", "route", "size"), rows)
    write_json(json_target, {"source": words, "captures": [{"folder": row[0], "function": row[1]} for row in rows]})
    return OK


def load_one(folder: Path) -> Captured:
    """The capture in a folder; where the folder holds captures instead, a UserError that names them."""
    if not (folder / capture.CALL_FILE).exists() and folder.is_dir():
        inside = sorted(path.parent.name for path in folder.glob(f"*/{capture.CALL_FILE}"))
        if inside:
            raise UserError(f"{folder}: holds captures, name one of them: {', '.join(str(folder / n) for n in inside)}")
    return capture.load(folder)


@dataclass(frozen=True)
class Again:
    """How to make a captured call again.

    times       0 to verify, else how many calls to time after the warm-up
    check_rows  how many rows to verify, evenly spaced; 0 for all
    route       a pin; without one the captured route where this device has it
    """

    times: int = 0
    check_rows: int = 64
    route: str | None = None
    threads: int | None = None


def replay(folder: Path, again: Again, screen: Screen, json_target: str | None) -> int:
    """Makes a captured call again and verifies it against the reference, or times it.

    The exit code is FAILED where the call is wrong.
    """
    for option, value, least in (
        ("--time", again.times, 0),
        ("--rows", again.check_rows, 0),
        ("--threads", again.threads, 1),
    ):
        if value is not None and value < least:
            raise UserError(f"{option}: wanted at least {least}; got {value}")
    if again.threads is not None:
        torch.set_num_threads(again.threads)
    process.keep_freed_memory()
    route, times = again.route, again.times
    check_pin(route)
    call = load_one(folder)
    stage: Stage = "select" if call.function == "select_blocks" else "attend"
    if route is not None and not any(candidate.route.answers_to(route) for candidate in CANDIDATES[stage]):
        names = ", ".join(str(candidate.route) for candidate in CANDIDATES[stage])
        raise UserError(f"--route: wanted one of the {stage} stage, {names}; got {route}")
    pin = route if route is not None else _captured_pin(call)
    tally = RouteTally()
    with log_lines(screen), capture.listening(tally):
        result = _call(call, pin)
    use = next(iter(tally.uses.values()))
    rows = route_rows([use])
    screen.table(
        f"{call.function}, {call.rows.count:,} rows, captured on {call.recorded['device']['name']} "
        f"by flashqsa {call.recorded['versions']['flashqsa']}, torch {call.recorded['versions']['torch']}",
        ("stage", "route", "why"),
        [(stage, name, why) for _, stage, name, _, _, why in rows],
    )
    content: dict[str, Any] = {
        "capture": str(folder),
        "function": call.function,
        "rows": call.rows.count,
        "captured_route": call.route,
        "route": decision_as_json(use.decision),
        "versions": versions(),
    }
    if times:
        spent = _time(call, pin, times)
        content["seconds"] = {"median": statistics.median(spent), "all": spent}
        low, middle, high = (seconds(each) for each in (min(spent), statistics.median(spent), max(spent)))
        screen.line(f"median of {times}: {middle} (from {low} to {high})")
        write_json(json_target, content)
        return OK
    failures, error, checked = _verify(call, result, again.check_rows)
    content["verdict"] = {"rows": checked, "failures": failures, "error_of_allowed": error}
    of = "all rows" if checked == call.rows.count else f"{checked:,} of {call.rows.count:,} rows"
    for failure in failures:
        screen.line(f"WRONG: {failure}")
    if not failures:
        measured = "" if error is None else f", largest error {error:.2f} of what is allowed"
        screen.line(f"right: {of} agree with the reference{measured}")
    write_json(json_target, content)
    return FAILED if failures else OK


def _captured_pin(call: Captured) -> str | None:
    kernel_set = call.route.partition(":")[0]
    return call.route if kernel_set in facts_here(call.rows.request.device).kernel_sets else None


def _call(call: Captured, pin: str | None) -> Selection | tuple[Tensor, Tensor]:
    if call.function == "select_blocks":
        index_cache = call.values["index_cache"]
        assert isinstance(index_cache, IndexCache)
        return pipeline.select_blocks(call.tensor("index_q"), index_cache, call.rows, call.spec, route=pin)
    kv_cache, selection, gate = call.values["kv_cache"], call.values["selection"], call.values["gate"]
    assert isinstance(kv_cache, KvCache)
    assert selection is None or isinstance(selection, Selection)
    assert gate is None or isinstance(gate, Tensor)
    found = pipeline.sparse_attention(
        call.tensor("q"), kv_cache, selection, call.rows, call.spec, gate, return_lse=True, route=pin
    )
    assert isinstance(found, tuple)
    return found


def _time(call: Captured, pin: str | None, times: int) -> list[float]:
    spent = []
    for number in range(WARM_UP_CALLS + times):
        started = time.perf_counter()
        _call(call, pin)
        if call.rows.request.is_cuda:
            torch.cuda.synchronize(call.rows.request.device)
        if number >= WARM_UP_CALLS:
            spent.append(time.perf_counter() - started)
    return spent


def _verify(
    call: Captured, result: Selection | tuple[Tensor, Tensor], most: int
) -> tuple[list[str], float | None, int]:
    """Failures, largest error as a share of what is allowed (None for a selection), and rows compared."""
    picked = pick_rows(call.rows, most)
    if isinstance(result, Selection):
        index_cache = call.values["index_cache"]
        assert isinstance(index_cache, IndexCache)
        failure = selection_failure(result, call.tensor("index_q"), index_cache, call.rows, call.spec, picked)
        return ([] if failure is None else [failure]), None, picked.numel()
    kv_cache, selection, gate = call.values["kv_cache"], call.values["selection"], call.values["gate"]
    assert isinstance(kv_cache, KvCache)
    assert selection is None or isinstance(selection, Selection)
    assert gate is None or isinstance(gate, Tensor)
    failures, error = attention_failures(
        *result,
        call.tensor("q"),
        kv_cache,
        selection,
        call.rows,
        call.spec,
        gate,
        picked,
        product_dtype("smxx" if call.rows.request.is_cuda else "cpu", kv_cache.keys.dtype),
    )
    return failures, error, picked.numel()


def stats(
    folder: Path | None,
    source: Source,
    page_tokens: int | None,
    plot: Path | None,
    screen: Screen,
    json_target: str | None,
) -> int:
    """Shows how much the rows of a captured call share, or of a call made for it."""
    figures.check_plot_target(plot)
    if folder is not None and (source.case is not None or source.preset is not None):
        raise UserError("FOLDER and --preset or --case: wanted one of them; got both")
    if folder is not None:
        found, words = load_one(folder), str(folder)
        values: dict[str, Noted | Captured] = {found.function: found}
    else:
        heard: dict[str, Noted] = {}
        with log_lines(screen):
            words = make_calls(source, lambda: capture.listening(lambda noted: _keep_first(heard, noted)))
        values = dict(heard)
    return figures.report(_stats_of(values, page_tokens), words, screen, json_target, plot)


def _keep_first(heard: dict[str, Noted], noted: Noted) -> None:
    heard.setdefault(noted.function, noted)


def _stats_of(calls: dict[str, Noted | Captured], page_tokens: int | None) -> figures.Stats:
    selects, attends = calls.get("select_blocks"), calls.get("sparse_attention")
    ties, selection = None, None
    if selects is not None:
        index_q, index_cache = selects.values["index_q"], selects.values["index_cache"]
        assert isinstance(index_q, Tensor)
        assert isinstance(index_cache, IndexCache)
        selection = pipeline.select_blocks(index_q, index_cache, selects.rows, selects.spec)
        ties = figures.ties_at_cut(index_q, index_cache, selects.rows, selects.spec)
        page = index_cache.page_blocks * selects.spec.block_tokens
    call = selects or attends
    if call is None:
        raise UserError("no call reached FlashQSA, so there is nothing to measure")
    if attends is not None:
        kv_cache, given = attends.values["kv_cache"], attends.values["selection"]
        assert isinstance(kv_cache, KvCache)
        page = kv_cache.page_tokens
        selection = given if isinstance(given, Selection) else selection
    if selection is None:
        selection = Selection(
            torch.full((call.rows.count, call.spec.top_blocks), -1, dtype=torch.int32),
            torch.zeros(call.rows.count, dtype=torch.int32),
        )
    page = page if page_tokens is None else page_tokens
    if page < call.spec.block_tokens or page % call.spec.block_tokens:
        raise UserError(f"--page-tokens: wanted a multiple of {call.spec.block_tokens}; got {page}")
    return figures.stats_of(selection, call.rows, call.spec, page, ties)
