"""`flashqsa run`: prefills and decodes a Qwen4-Exp model with FlashQSA in place of the stock sparse layer."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from flashqsa import knobs
from flashqsa.capture import decision_as_json, listening
from flashqsa.check import check_pin
from flashqsa.cli import process
from flashqsa.cli.compare import (
    CUT_TOLERANCE,
    LOGIT_TOLERANCE,
    Agreement,
    Choices,
    HiddenStates,
    StockChoices,
    agreement,
)
from flashqsa.cli.engine import (
    PHASES,
    Asked,
    FlashQsaIndexerClock,
    RouteTally,
    RouteUse,
    Stopwatch,
    Timing,
    generate,
    integration,
)
from flashqsa.cli.explain import dtype_named
from flashqsa.cli.presets import Loaded, load_folder, load_preset
from flashqsa.cli.prompt import Prompt, read_prompt
from flashqsa.cli.show import (
    FAILED,
    OK,
    Screen,
    UserError,
    log_lines,
    mebibytes,
    seconds,
    versions,
    write_json,
)
from flashqsa.route import CANDIDATES

DEFAULT_PRESET = "demo"
WARM_UP_TOKENS = 64
STAGES = tuple(CANDIDATES)


@dataclass(frozen=True)
class Job:
    """What `flashqsa run` was asked."""

    prompt: str | None = None
    model: Path | None = None
    preset: str | None = None
    tokens: int | None = None
    chunk: int = 2048
    decode: int = 32
    dtype: str | None = None
    seed: int = 0
    threads: int | None = None
    compare: str | None = None
    route: str | None = None
    verbose: bool = False


@dataclass(frozen=True)
class Outcome:
    """What it found: FlashQSA's figures, and the stock layer's where asked."""

    timing: Timing
    produced: list[int]
    uses: list[RouteUse]
    hand_overs: dict[str, int]
    stock: Timing | None = None
    agreed: Agreement | None = None


def run(job: Job, screen: Screen, json_target: str | None) -> int:
    """Runs, shows and writes. The exit code is FAILED where FlashQSA did not serve, or FP32 results disagree."""
    _check(job)
    if job.threads is not None:
        torch.set_num_threads(job.threads)
    kept = process.keep_freed_memory()
    loaded = load(job.model, job.preset, job.dtype, job.seed)
    prompt = read_prompt(job.prompt, job.tokens, loaded.encode)
    screen.line(
        f"{loaded.name}: {loaded.parameters / 1e6:,.1f} M parameters, {loaded.model.dtype}; "
        f"{len(prompt.tokens):,} tokens of {prompt.source} ({prompt.text_bytes:,} bytes)"
    )
    with log_lines(screen, verbose=job.verbose), pinned(job.route):
        outcome = _carry_out(job, loaded, prompt, screen)
    _show(job, loaded, outcome, screen)
    write_json(json_target, _as_json(job, loaded, prompt, outcome, kept))
    served = any(use.calls for use in outcome.uses)
    agrees = outcome.agreed is None or loaded.model.dtype != torch.float32 or outcome.agreed.holds
    return OK if served and agrees else FAILED


def _check(job: Job) -> None:
    if job.model is not None and job.preset is not None:
        raise UserError("--model and --preset: wanted one of them; got both")
    if job.compare not in (None, "stock"):
        raise UserError(f"--compare: wanted stock; got {job.compare!r}")
    bounds = (("--chunk", job.chunk), ("--decode", job.decode), ("--threads", job.threads), ("--tokens", job.tokens))
    for option, value in bounds:
        if value is not None and value < 1:
            raise UserError(f"{option}: wanted at least 1; got {value}")
    if job.dtype is not None:
        dtype_named(job.dtype)
    check_pin(job.route)


def load(model: Path | None, preset: str | None, dtype: str | None, seed: int) -> Loaded:
    """The model of a folder, or of a preset (DEFAULT_PRESET without either). Raises UserError."""
    if model is not None:
        return load_folder(model, None if dtype is None else dtype_named(dtype))
    return load_preset(preset or DEFAULT_PRESET, dtype_named(dtype or "float32"), seed)


@contextlib.contextmanager
def pinned(route: str | None) -> Iterator[None]:
    """Pins a route for every call inside the `with` block; leaves FLASHQSA_ROUTE in force for None."""
    if route is None:
        yield
        return
    with knobs.ROUTE.set_to(route):
        yield


@contextlib.contextmanager
def enabled(model: Any) -> Iterator[list[Any]]:
    """FlashQSA in place of the stock sparse layers inside the `with` block; yields these layers. Raises UserError."""
    plug = integration()
    try:
        plug.enable(model)
    except (ValueError, ImportError) as error:
        raise UserError(f"FlashQSA cannot stand in for this model's sparse layers: {error}") from error
    try:
        yield list(plug.qsa_layers(model).values())
    finally:
        plug.disable(model)


@dataclass
class Bars:
    """Progress of one side: prompt tokens in chunks, then new tokens."""

    progress: Progress
    side: str
    prompt_tokens: int
    steps: int

    def __post_init__(self) -> None:
        self._prefill = self.progress.add_task(f"{self.side} prefill", total=self.prompt_tokens)
        self._decode = self.progress.add_task(f"{self.side} decode", total=self.steps, visible=self.steps > 0)

    def prefilled(self, tokens: int) -> None:
        """Some prompt tokens are done."""
        self.progress.advance(self._prefill, tokens)

    def decoded(self, tokens: int) -> None:
        """Some new tokens are done."""
        self.progress.advance(self._decode, tokens)


def _carry_out(job: Job, loaded: Loaded, prompt: Prompt, screen: Screen) -> Outcome:
    model, tokens = loaded.model, prompt.tokens
    asked = Asked(tokens, job.chunk, job.decode, loaded.stop_tokens)
    _warm_up(loaded, tokens)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        MofNCompleteColumn(),
        TextColumn("tokens"),
        TimeElapsedColumn(),
    )
    tally, states, stock_states = RouteTally(), HiddenStates(), HiddenStates()
    with Progress(*columns, console=screen.progress) as progress:
        with enabled(model) as layers, contextlib.ExitStack() as stack:
            stack.enter_context(listening(tally))
            choices = Choices(layers)
            if job.compare:
                stack.enter_context(states.of(model))
                stack.enter_context(choices.following())
                stack.enter_context(listening(choices))
            before = Counter(integration().hand_overs())
            clock = FlashQsaIndexerClock(layers)
            bars = Bars(progress, "FlashQSA", len(tokens), job.decode - 1)
            produced, timing = generate(model, asked, layers, clock, bars, tally.start_decode)
            hand_overs = dict(Counter(integration().hand_overs()) - before)
        if not job.compare:
            return Outcome(timing, produced, list(tally.uses.values()), hand_overs)
        stock_choices = StockChoices([layer.indexer for layer in layers], loaded.block_tokens)
        with stock_states.of(model), stock_choices.following():
            stock_clock = Stopwatch([layer.indexer for layer in layers])
            bars = Bars(progress, "stock", len(tokens), job.decode - 1)
            stock_produced, stock = generate(model, asked, layers, stock_clock, bars)
    agreed = agreement(
        choices,
        stock_choices,
        (states.rows(len(tokens)), stock_states.rows(len(tokens))),
        model.get_output_embeddings(),
        (produced, stock_produced),
        last_layer_mixes=loaded.mixes_after_sparse,
    )
    return Outcome(timing, produced, list(tally.uses.values()), hand_overs, stock, agreed)


def _warm_up(loaded: Loaded, tokens: list[int]) -> None:
    """One short pass through the stock layers, so that neither side pays for torch's first calls."""
    with torch.no_grad():
        loaded.model(input_ids=torch.tensor([tokens[:WARM_UP_TOKENS]]), use_cache=False, logits_to_keep=1)


def route_rows(uses: list[RouteUse]) -> list[tuple[str, ...]]:
    """One line per route that ran, then one per route that was refused before it, with the reason."""
    found: list[tuple[str, ...]] = []
    for use in sorted(uses, key=lambda use: (PHASES.index(use.phase), STAGES.index(use.decision.route.stage))):
        decision = use.decision
        stage = decision.route.stage
        found.append((use.phase, stage, str(decision.route), f"{use.calls:,}", f"{use.rows:,}", "taken"))
        for refusal in decision.refused:
            found.append(("", "", f"not {refusal.route}", "", "", refusal.reason))
    return found


def _figures(outcome: Outcome) -> list[tuple[str, ...]]:
    sides = [outcome.timing] if outcome.stock is None else [outcome.timing, outcome.stock]

    def line(name: str, *cells: str) -> tuple[str, ...]:
        ratio = () if len(sides) == 1 else ("",)
        return (name, *cells, *ratio)

    def rate(value: float | None) -> str:
        return "-" if value is None else f"{value:,.1f}"

    found = [
        line("time to first token", *(seconds(side.first_token_s) for side in sides)),
        line("prefill tokens/s", *(rate(side.prefill_rate) for side in sides)),
        line("decode tokens/s", *(rate(side.decode_rate) for side in sides)),
        line("sparse layers", *(seconds(side.sparse_s) for side in sides)),
        line("their share of the prefill", *(f"{side.sparse_share:.1%}" for side in sides)),
        line("their indexers", *(seconds(side.indexer_s) for side in sides)),
        line("peak extra memory", *(mebibytes(side.peak_extra_bytes) for side in sides)),
    ]
    if outcome.stock is None:
        return found
    ours, stock = outcome.timing, outcome.stock
    ratios = {0: speedup(stock.first_token_s, ours.first_token_s), 3: speedup(stock.sparse_s, ours.sparse_s)}
    if ours.decode_s and stock.decode_s:
        ratios[2] = speedup(stock.decode_s, ours.decode_s)
    if ours.indexer_s and stock.indexer_s:
        ratios[5] = speedup(stock.indexer_s, ours.indexer_s)
    return [(*cells[:-1], ratios.get(index, "")) for index, cells in enumerate(found)]


def speedup(stock_s: float, ours_s: float) -> str:
    """How many times as fast."""
    return f"{stock_s / ours_s:.1f} x"


def _show(job: Job, loaded: Loaded, outcome: Outcome, screen: Screen) -> None:
    columns = ("phase", "stage", "route", "calls", "rows", "why")
    screen.table("routes", columns, route_rows(outcome.uses))
    for reason, calls in outcome.hand_overs.items():
        screen.line(f"the stock layer ran {calls:,} times: {reason}")
    if not outcome.uses:
        screen.line("No call reached FlashQSA.")
    sides = ("FlashQSA",) if outcome.stock is None else ("FlashQSA", "stock", "speedup")
    screen.table("figures", ("", *sides), _figures(outcome))
    if outcome.agreed is not None:
        _show_agreement(outcome.agreed, outcome.timing, loaded, screen)
    if job.model is not None:
        screen.line(f"text: {loaded.decode(outcome.produced)}")


def _show_agreement(agreed: Agreement, timing: Timing, loaded: Loaded, screen: Screen) -> None:
    rows = [
        ("prompt rows", f"{agreed.rows:,}"),
        ("selections with an exact tie at the cut", f"{agreed.rows_tied:,}"),
        (f"selections with a gap at the cut within {CUT_TOLERANCE:g} of it", f"{agreed.rows_nearly_tied:,}"),
        ("selections other than the stock layer's", f"{agreed.rows_selecting_otherwise:,}"),
        ("furthest from the cut among differing blocks, as a share", f"{agreed.widest_miss:.1e}"),
        ("rows whose selections agree", f"{agreed.rows_compared:,}"),
        ("largest difference of their logits", f"{agreed.max_difference_compared:.1e}"),
        ("largest difference, rows that select otherwise too", f"{agreed.max_difference:.1e}"),
        ("greedy tokens that agree", f"{agreed.same_tokens} of {agreed.new_tokens}"),
    ]
    screen.table(f"FlashQSA beside the stock layer, {timing.tokens:,} tokens", ("", "value"), rows)
    if loaded.model.dtype != torch.float32:
        screen.line("Agreement is judged in FP32 only: half types differ by the order of rounding alone.")
    elif agreed.holds:
        screen.line(f"FlashQSA and the stock layer agree: logits to {LOGIT_TOLERANCE:g}, selections up to ties.")
    else:
        screen.line(f"FlashQSA and the stock layer DISAGREE: wanted logits within {LOGIT_TOLERANCE:g}.")


def _as_json(job: Job, loaded: Loaded, prompt: Prompt, outcome: Outcome, kept: bool) -> dict[str, Any]:
    stock, agreed = outcome.stock, outcome.agreed
    compared: dict[str, Any] | None = None
    if stock is not None and agreed is not None:
        ours = outcome.timing
        compared = {
            **agreed.as_json(),
            "first_token_speedup": stock.first_token_s / ours.first_token_s,
            "sparse_layers_speedup": stock.sparse_s / ours.sparse_s,
            "indexer_speedup": stock.indexer_s / ours.indexer_s if stock.indexer_s and ours.indexer_s else None,
            "decode_speedup": stock.decode_s / ours.decode_s if stock.decode_s and ours.decode_s else None,
        }
    return {
        "format": "flashqsa-run",
        "format_version": 1,
        "versions": versions(),
        "model": {
            "name": loaded.name,
            "parameters": loaded.parameters,
            "dtype": str(loaded.model.dtype).removeprefix("torch."),
            "layers": len(loaded.config.layer_types),
            "sparse_layers": sum(kind != "linear_attention" for kind in loaded.config.layer_types),
            "top_blocks": loaded.config.indexer_budget // loaded.block_tokens,
        },
        "prompt": {"source": prompt.source, "text_bytes": prompt.text_bytes, "tokens": len(prompt.tokens)},
        "settings": {
            "chunk": job.chunk,
            "decode": job.decode,
            "seed": job.seed,
            "threads": torch.get_num_threads(),
            "route": job.route,
            "malloc_keeps_freed_memory": kept,
        },
        "routes": [
            {"phase": use.phase, "stage": use.decision.route.stage, "calls": use.calls, "rows": use.rows}
            | decision_as_json(use.decision)
            for use in outcome.uses
        ],
        "hand_overs": outcome.hand_overs,
        "flashqsa": outcome.timing.as_json(),
        "stock": None if stock is None else stock.as_json(),
        "comparison": compared,
        "tokens": outcome.produced,
        "text": loaded.decode(outcome.produced),
    }
