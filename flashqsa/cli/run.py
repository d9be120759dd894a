"""`flashqsa run`: prefills and decodes a Qwen4-Exp model with FlashQSA in place of the stock sparse layer."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from flashqsa import knobs
from flashqsa.capture import decision_as_json, listening
from flashqsa.check import check_pin
from flashqsa.cli import process
from flashqsa.cli.bench_cases import whole_numbers
from flashqsa.cli.bench_report import machine
from flashqsa.cli.bench_timing import on_device
from flashqsa.cli.clocks import FlashQsaIndexerClock, Stopwatch
from flashqsa.cli.compare import (
    CUT_TOLERANCE,
    LOGIT_TOLERANCE,
    Agreement,
    Choices,
    HiddenStates,
    StockChoices,
    agreement,
)
from flashqsa.cli.engine import PHASES, Asked, RouteTally, RouteUse, Timing, generate, integration, warm_up
from flashqsa.cli.explain import dtype_named
from flashqsa.cli.parts import parts_of
from flashqsa.cli.presets import CPU, Loaded, Place, encode_bytes, load_folder, load_preset
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
from flashqsa.cli.verify import device_named
from flashqsa.machine import facts_here
from flashqsa.route import CANDIDATES
from flashqsa.values import FP8

DEFAULT_PRESET = "demo"
WARM_UP_TOKENS = 64
GRAPHS = ("auto", "on", "off")
KV_DTYPES: Mapping[str, torch.dtype | None] = MappingProxyType({"auto": None, "fp8": FP8})
STAGES = tuple(CANDIDATES)


@dataclass(frozen=True)
class Job:
    """What `flashqsa run` was asked."""

    prompt: str | None = None
    model: Path | None = None
    preset: str | None = None
    tokens: str | None = None
    chunk: int = 2048
    decode: int = 32
    dtype: str | None = None
    seed: int = 0
    threads: int | None = None
    compare: str | None = None
    route: str | None = None
    verbose: bool = False
    device: str | None = None
    layers: int | None = None
    graph: str = "auto"
    draft: str | None = None
    kv_dtype: str = "auto"


@dataclass(frozen=True)
class Outcome:
    """What it found: FlashQSA's figures, and the stock layer's where asked."""

    timing: Timing
    produced: list[int]
    uses: list[RouteUse]
    hand_overs: dict[str, int]
    stock: Timing | None = None
    agreed: Agreement | None = None
    whole_indexers: bool = True
    """Whether the time of our indexers has all parts that the stock ones' has."""

    @property
    def indexer_speedup(self) -> float | None:
        """How many times as fast our indexers are, or None where that cannot be said."""
        if self.stock is None or not (self.whole_indexers and self.stock.indexer_s and self.timing.indexer_s):
            return None
        return self.stock.indexer_s / self.timing.indexer_s


def run(job: Job, screen: Screen, json_target: str | None) -> int:
    """Runs, shows and writes. The exit code is FAILED where FlashQSA did not serve, or FP32 results disagree."""
    _check(job)
    if job.threads is not None:
        torch.set_num_threads(job.threads)
    kept = process.keep_freed_memory()
    device = _device(job)
    # A preset's tokens are known before it is built, and so is how much memory they need.
    prompts = _prompts(job, encode_bytes) if job.model is None else []
    longest = max((len(prompt.tokens) for prompt in prompts), default=0)
    place = Place(device, job.layers, longest + job.decode, min(job.chunk, longest))
    loaded = load(job.model, job.preset, job.dtype or _dtype_for(device, job), job.seed, place)
    prompts = prompts or _prompts(job, loaded.encode)
    found, passed = [], True
    for prompt in prompts:
        screen.line(
            f"{loaded.name}: {loaded.parameters / 1e6:,.1f} M parameters in {len(loaded.config.layer_types)} layers, "
            f"{loaded.model.dtype}, {facts_here(device).name}; "
            f"{len(prompt.tokens):,} tokens of {prompt.source} ({prompt.text_bytes:,} bytes)"
        )
        with log_lines(screen, verbose=job.verbose), pinned(job.route), on_device(device):
            outcome = _carry_out(job, loaded, prompt, screen)
        _show(job, loaded, outcome, screen)
        found.append(_as_json(job, loaded, prompt, outcome, kept))
        # After each length: what is done is kept, whatever becomes of the next.
        write_json(json_target if len(prompts) == 1 or json_target != "-" else None, _together(found))
        served = any(use.calls for use in outcome.uses)
        agrees = outcome.agreed is None or not judged(job, loaded) or outcome.agreed.holds
        passed = passed and served and agrees
    if len(prompts) > 1 and json_target == "-":
        write_json(json_target, _together(found))
    return OK if passed else FAILED


def _lengths(job: Job) -> list[int]:
    """Prompt lengths, shortest first; none for the default."""
    return [] if job.tokens is None else sorted(whole_numbers("--tokens", job.tokens))


def _prompts(job: Job, encode: Callable[[str], list[int]]) -> list[Prompt]:
    """The prompt at every length asked for; it is read once, since standard input can be."""
    lengths = _lengths(job)
    prompt = read_prompt(job.prompt, lengths[-1] if lengths else None, encode)
    return [replace(prompt, tokens=prompt.tokens[:length]) for length in lengths or [len(prompt.tokens)]]


def _together(found: list[dict[str, Any]]) -> dict[str, Any]:
    """One run as it is, several in a list."""
    return found[0] if len(found) == 1 else {"format": "flashqsa-runs", "format_version": 1, "runs": found}


def _check(job: Job) -> None:
    if job.model is not None and job.preset is not None:
        raise UserError("--model and --preset: wanted one of them; got both")
    if job.compare not in (None, "stock"):
        raise UserError(f"--compare: wanted stock; got {job.compare!r}")
    if job.draft not in (None, "lookup"):
        raise UserError(f"--draft: wanted lookup; got {job.draft!r}")
    if job.graph not in GRAPHS:
        raise UserError(f"--graph: wanted {', '.join(GRAPHS)}; got {job.graph!r}")
    if job.kv_dtype not in KV_DTYPES:
        raise UserError(f"--kv-dtype: wanted {', '.join(KV_DTYPES)}; got {job.kv_dtype!r}")
    if job.model is not None and job.layers is not None:
        raise UserError("--layers: wanted with a preset; a model in a folder has its own")
    _lengths(job)
    bounds = (("--chunk", job.chunk), ("--decode", job.decode), ("--threads", job.threads))
    for option, value in bounds:
        if value is not None and value < 1:
            raise UserError(f"{option}: wanted at least 1; got {value}")
    if job.dtype is not None:
        dtype_named(job.dtype)
    check_pin(job.route)


def load(model: Path | None, preset: str | None, dtype: str | None, seed: int, place: Place = CPU) -> Loaded:
    """The model of a folder, or of a preset (DEFAULT_PRESET without either), on a device. Raises UserError."""
    if model is not None:
        return load_folder(model, None if dtype is None else dtype_named(dtype), place.device)
    return load_preset(preset or DEFAULT_PRESET, dtype_named(dtype or "float32"), seed, place)


def _device(job: Job) -> torch.device:
    """The device asked for, with its number; a GPU where there is one and nothing is asked."""
    device = device_named(job.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if job.graph == "on" and device.type == "cpu":
        raise UserError("--graph on: wanted a GPU; got a CPU, which has no CUDA graphs")
    return torch.empty(0, device=device).device


def _dtype_for(device: torch.device, job: Job) -> str | None:
    """A preset's dtype where none is asked: BF16 on GPUs that multiply it, FP16 on older ones, FP32 on a CPU."""
    capability = facts_here(device).capability
    if job.model is not None or capability is None:
        return None
    return "bfloat16" if capability >= (8, 0) else "float16"


@contextlib.contextmanager
def pinned(route: str | None) -> Iterator[None]:
    """Pins a route for every call inside the `with` block; leaves FLASHQSA_ROUTE in force for None."""
    if route is None:
        yield
        return
    with knobs.ROUTE.set_to(route):
        yield


@contextlib.contextmanager
def enabled(model: Any, kv_dtype: torch.dtype | None = None) -> Iterator[list[Any]]:
    """FlashQSA in place of the stock sparse layers inside the `with` block; yields these layers. Raises UserError."""
    plug = integration()
    try:
        plug.enable(model, kv_dtype=kv_dtype)
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
    device = loaded.model.device
    on_gpu, drafts = device.type == "cuda", job.draft is not None
    stock_asked = Asked(tokens, job.chunk, job.decode, loaded.stop_tokens)
    asked = replace(stock_asked, fixed=on_gpu or drafts, graphs=on_gpu and job.graph != "off", drafts=drafts)
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
        with enabled(model, KV_DTYPES[job.kv_dtype]) as layers, contextlib.ExitStack() as stack:
            # On a GPU the prompt goes through once before it is timed: kernels are compiled and loaded in that pass.
            cold_s = warm_up(model, asked) if on_gpu else None
            stack.enter_context(listening(tally))
            choices, prefill = Choices(layers), stack.enter_context(contextlib.ExitStack())
            if job.compare:
                prefill.enter_context(states.of(model))
                prefill.enter_context(choices.following())
                prefill.enter_context(listening(choices))
            before = Counter(integration().hand_overs())
            clock = FlashQsaIndexerClock(layers, device)
            bars = Bars(progress, "FlashQSA", len(tokens), job.decode - 1)

            def decode_begins() -> None:
                # Only the prefill is compared, and keeping what it chose waits for a GPU, which no graph can.
                prefill.close()
                tally.start_decode()

            produced, timing = generate(model, asked, layers, clock, bars, decode_begins)
            timing = replace(timing, cold_s=cold_s)
            hand_overs = dict(Counter(integration().hand_overs()) - before)
        if not job.compare:
            return Outcome(timing, produced, list(tally.uses.values()), hand_overs, whole_indexers=clock.whole)
        stock_choices = StockChoices([layer.indexer for layer in layers], loaded.block_tokens)
        with stock_states.of(model), stock_choices.following():
            stock_clock = Stopwatch([layer.indexer for layer in layers], device)
            bars = Bars(progress, "stock", len(tokens), job.decode - 1)
            stock_produced, stock = generate(model, stock_asked, layers, stock_clock, bars)
    agreed = agreement(
        choices,
        stock_choices,
        (states.rows(len(tokens)), stock_states.rows(len(tokens))),
        model.get_output_embeddings(),
        (produced, stock_produced),
        last_layer_mixes=loaded.mixes_after_sparse,
    )
    return Outcome(timing, produced, list(tally.uses.values()), hand_overs, stock, agreed, clock.whole)


def _warm_up(loaded: Loaded, tokens: list[int]) -> None:
    """One short pass through the stock layers, so that neither side pays for torch's first calls."""
    with torch.no_grad():
        ids = torch.tensor([tokens[:WARM_UP_TOKENS]], device=loaded.model.device)
        loaded.model(input_ids=ids, use_cache=False, logits_to_keep=1)


def route_rows(uses: list[RouteUse]) -> list[tuple[str, ...]]:
    """One line per route that ran, then one per reason against routes before it."""
    found: list[tuple[str, ...]] = []
    for use in sorted(uses, key=lambda use: (PHASES.index(use.phase), STAGES.index(use.decision.route.stage))):
        decision = use.decision
        stage = decision.route.stage
        found.append((use.phase, stage, str(decision.route), f"{use.calls:,}", f"{use.rows:,}", "taken"))
        found += [("", "", f"not {routes}", "", "", reason) for reason, routes in decision.reasons().items()]
    return found


def _figures(outcome: Outcome) -> list[tuple[str, ...]]:
    sides = [outcome.timing] if outcome.stock is None else [outcome.timing, outcome.stock]

    def line(name: str, *cells: str) -> tuple[str, ...]:
        ratio = () if len(sides) == 1 else ("",)
        return (name, *cells, *ratio)

    def rate(value: float | None) -> str:
        return "-" if value is None else f"{value:,.1f}"

    def step(side: Timing) -> str:
        return "-" if side.step_s is None else seconds(side.step_s)

    indexers = "their indexers" if outcome.whole_indexers else "their indexers (ours: selecting alone)"
    found = [
        line("time to first token", *(seconds(side.first_token_s) for side in sides)),
        line("prefill tokens/s", *(rate(side.prefill_rate) for side in sides)),
        line("decode tokens/s", *(rate(side.decode_rate) for side in sides)),
        line("a decode step, median", *(step(side) for side in sides)),
        line("sparse layers", *(seconds(side.sparse_s) for side in sides)),
        line("their share of the prefill", *(f"{side.sparse_share:.1%}" for side in sides)),
        line(indexers, *(seconds(side.indexer_s) for side in sides)),
        line("peak extra memory", *(mebibytes(side.peak_extra_bytes) for side in sides)),
    ]
    if outcome.stock is None:
        return found
    ours, stock = outcome.timing, outcome.stock
    ratios = {
        "time to first token": speedup(stock.first_token_s, ours.first_token_s),
        "sparse layers": speedup(stock.sparse_s, ours.sparse_s),
    }
    if ours.steps and stock.steps:
        ratios["decode tokens/s"] = speedup(stock.decode_s, ours.decode_s)
    if outcome.indexer_speedup is not None:
        ratios[indexers] = speedup(stock.indexer_s, ours.indexer_s)
    return [(*cells[:-1], ratios.get(cells[0], "")) for cells in found]


def steps_in_words(timing: Timing) -> str:
    """How the decode steps ran, and what drafts were worth."""
    ways = {"called": "launched one by one", "captured": "captured", "replayed": "replayed from CUDA graphs"}
    counts = {words: sum(step.how == how for step in timing.steps) for how, words in ways.items()}
    told = ", ".join(f"{count:,} {words}" for words, count in counts.items() if count)
    rate = (timing.new_tokens - 1) / len(timing.steps)
    return f"{len(timing.steps):,} decode steps ({told}) made {timing.new_tokens - 1:,} tokens: {rate:.2f} a step"


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
    screen.table("what ran each part", ("part", "by"), list(parts_of(loaded.model).items()))
    if outcome.timing.steps:
        screen.line(steps_in_words(outcome.timing))
    sides = ("FlashQSA",) if outcome.stock is None else ("FlashQSA", "stock", "speedup")
    screen.table("figures", ("", *sides), _figures(outcome))
    if outcome.agreed is not None:
        _show_agreement(outcome.agreed, outcome.timing, judged(job, loaded), screen)
    if job.model is not None:
        screen.line(f"text: {loaded.decode(outcome.produced)}")


def judged(job: Job, loaded: Loaded) -> bool:
    """Whether numbers should agree with the stock layer's: nothing is rounded to less than FP32."""
    return loaded.model.dtype == torch.float32 and KV_DTYPES[job.kv_dtype] is None


def _show_agreement(agreed: Agreement, timing: Timing, to_judge: bool, screen: Screen) -> None:
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
    if not to_judge:
        screen.line("Agreement is judged in FP32 only: half types differ by the order of rounding alone, FP8 by more.")
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
            "indexer_speedup": outcome.indexer_speedup,
            "decode_speedup": stock.decode_s / ours.decode_s if stock.decode_s and ours.decode_s else None,
        }
    return {
        "format": "flashqsa-run",
        "format_version": 1,
        "versions": versions(),
        "machine": machine(loaded.model.device),
        "parts": parts_of(loaded.model),
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
            "graph": job.graph,
            "draft": job.draft,
            "kv_dtype": job.kv_dtype,
            "malloc_keeps_freed_memory": kept,
            "indexer_s_has_all_parts": outcome.whole_indexers,
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
