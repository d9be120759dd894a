"""Prefills and decodes a model in Transformers, and keeps the time, the memory and the routes of it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from flashqsa.capture import Noted
from flashqsa.cli import process
from flashqsa.cli.clocks import Stopwatch
from flashqsa.cli.show import UserError
from flashqsa.route import Decision

PHASES = ("prefill", "decode")


@dataclass
class RouteUse:
    """One route as calls took it: how many calls and rows, and the decision of the first of them."""

    phase: str
    decision: Decision
    calls: int = 0
    rows: int = 0


class RouteTally:
    """A listener that counts which routes calls take."""

    def __init__(self) -> None:
        self.phase = PHASES[0]
        self.uses: dict[tuple[str, str, str], RouteUse] = {}

    def __call__(self, noted: Noted) -> None:
        """Counts one call."""
        selects = noted.function == "select_blocks"
        decision = noted.plan.select_decision if selects else noted.plan.attend_decision
        key = (self.phase, decision.route.stage, str(decision.route))
        use = self.uses.setdefault(key, RouteUse(self.phase, decision))
        use.calls += 1
        use.rows += noted.rows.count

    def start_decode(self) -> None:
        """Counts what follows apart from the prefill."""
        self.phase = PHASES[1]


@dataclass(frozen=True)
class StepTime:
    """One decode step: its seconds, the rows and new tokens of a request, and how it ran.

    how  `called`: launch by launch; `captured`: in a CUDA graph that was made in this step; `replayed`: in one
    """

    seconds: float
    rows: int = 1
    new_tokens: int = 1
    how: str = "called"


@dataclass(frozen=True)
class Timing:
    """What one prefill and decode took.

    chunk_s           seconds of each prefill chunk; their sum is the time to the first token
    sparse_s          seconds of the prefill spent in the sparse layers
    indexer_s         seconds of the prefill spent in their indexers
    steps             the decode steps, which make every new token but the first
    peak_extra_bytes  most memory held beyond what was held before the prefill: the device's on a GPU
    cold_s            seconds of a first, untimed prefill, with what is compiled in it; None where there was none
    """

    tokens: int
    chunk_s: tuple[float, ...]
    sparse_s: float
    indexer_s: float
    new_tokens: int
    steps: tuple[StepTime, ...]
    peak_extra_bytes: int
    cold_s: float | None = None

    @property
    def first_token_s(self) -> float:
        """Time to the first token."""
        return sum(self.chunk_s)

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second."""
        return self.tokens / self.first_token_s

    @property
    def decode_s(self) -> float:
        """Seconds of all decode steps."""
        return sum(step.seconds for step in self.steps)

    @property
    def decode_rate(self) -> float | None:
        """New tokens per second after the first; None without decode steps."""
        return (self.new_tokens - 1) / self.decode_s if self.steps else None

    @property
    def settled(self) -> tuple[StepTime, ...]:
        """The steps that replay a graph; without graphs, all of them."""
        replayed = tuple(step for step in self.steps if step.how == "replayed")
        return replayed or self.steps

    @property
    def step_s(self) -> float | None:
        """Median seconds of a settled step; None without decode steps."""
        return statistics.median(step.seconds for step in self.settled) if self.steps else None

    @property
    def sparse_share(self) -> float:
        """Share of the prefill that the sparse layers took."""
        return self.sparse_s / self.first_token_s

    def as_json(self) -> dict[str, Any]:
        """The figures as plain JSON values."""
        ways = {how: sum(step.how == how for step in self.steps) for how in ("called", "captured", "replayed")}
        return {
            "prompt_tokens": self.tokens,
            "time_to_first_token_s": self.first_token_s,
            "cold_first_token_s": self.cold_s,
            "prefill_tokens_per_s": self.prefill_rate,
            "chunks_s": list(self.chunk_s),
            "sparse_layers_s": self.sparse_s,
            "sparse_layers_share": self.sparse_share,
            "indexer_s": self.indexer_s,
            "new_tokens": self.new_tokens,
            "decode_s": self.decode_s,
            "decode_tokens_per_s": self.decode_rate,
            "decode_step_ms": None if self.step_s is None else self.step_s * 1e3,
            "decode_steps": ways,
            "tokens_per_step": (self.new_tokens - 1) / len(self.steps) if self.steps else None,
            "steps_ms": [step.seconds * 1e3 for step in self.steps],
            "step_rows": [step.rows for step in self.steps],
            "step_new_tokens": [step.new_tokens for step in self.steps],
            "peak_extra_bytes": self.peak_extra_bytes,
        }


@dataclass
class Generation:
    """A prefill and decode under way, one forward pass at a time.

    cache     the model's own, made by its first pass
    produced  new tokens, greedily chosen
    """

    model: Any
    cache: Any = None
    produced: list[int] = field(default_factory=list)

    @torch.no_grad()
    def feed(self, tokens: Sequence[int]) -> Tensor:
        """One forward pass over `tokens`; returns the last row's logits [vocab]."""
        ids = torch.tensor([list(tokens)], dtype=torch.int64, device=self.model.device)
        output = self.model(input_ids=ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.cache = output.past_key_values
        logits: Tensor = output.logits[0, -1]
        return logits


def chunks(tokens: Sequence[int], chunk: int) -> Iterator[Sequence[int]]:
    """The prompt in pieces of `chunk` tokens, the last one perhaps shorter."""
    for start in range(0, len(tokens), chunk):
        yield tokens[start : start + chunk]


@dataclass(frozen=True)
class Asked:
    """What to generate: from which prompt, in which chunks, how much, and how.

    stop_tokens  end the text early
    fixed        a cache of full size from the start, and decode steps of fixed shapes (`Steps`)
    graphs       these steps are captured in CUDA graphs
    drafts       what comes next is guessed from the text, and verified in steps of several rows
    """

    tokens: Sequence[int]
    chunk: int
    new_tokens: int
    stop_tokens: frozenset[int] = frozenset()
    fixed: bool = False
    graphs: bool = False
    drafts: bool = False


class Watcher(Protocol):
    """Told of progress."""

    def prefilled(self, tokens: int) -> None:
        """Some prompt tokens are done."""

    def decoded(self, tokens: int) -> None:
        """Some new tokens are done."""


def generate(
    model: Any,
    asked: Asked,
    sparse_layers: Sequence[Any],
    indexers: Stopwatch,
    watcher: Watcher,
    between: Callable[[], None] = lambda: None,
) -> tuple[list[int], Timing]:
    """Prefills a prompt in chunks and decodes greedily; returns the new tokens and what it took.

    indexers  what times the indexers of the prefill
    between   called once, between prefill and decode
    """
    memory = process.MemoryMeter(model.device)
    run, layers = Generation(model, _cache(model, asked)), Stopwatch(sparse_layers, model.device)
    times: list[float] = []
    with layers.running(), indexers.running():
        for piece in chunks(asked.tokens, asked.chunk):
            started = time.perf_counter()
            run.produced = [int(run.feed(piece).argmax())]
            times.append(time.perf_counter() - started)
            watcher.prefilled(len(piece))
    between()
    steps = tuple(_fixed_steps(run, asked, watcher) if asked.fixed else _plain_steps(run, asked, watcher))
    timing = Timing(
        tokens=len(asked.tokens),
        chunk_s=tuple(times),
        sparse_s=layers.seconds,
        indexer_s=indexers.seconds,
        new_tokens=len(run.produced),
        steps=steps,
        peak_extra_bytes=memory.peak_extra_bytes(),
    )
    return run.produced, timing


def warm_up(model: Any, asked: Asked) -> float:
    """Seconds of the whole prefill, run once so that everything is compiled and loaded."""
    started = time.perf_counter()
    run = Generation(model, _cache(model, asked))
    for piece in chunks(asked.tokens, asked.chunk):
        int(run.feed(piece).argmax())
    return time.perf_counter() - started


def _cache(model: Any, asked: Asked) -> Any:
    """A cache of fixed size, with room for a last step of many rows; None for the model's own."""
    if not asked.fixed:
        return None
    from transformers import StaticCache

    room = len(asked.tokens) + asked.new_tokens + integration().MAX_ROWS
    return StaticCache(config=model.config, max_cache_len=room)


def _goes_on(run: Generation, asked: Asked) -> bool:
    return len(run.produced) < asked.new_tokens and run.produced[-1] not in asked.stop_tokens


def _plain_steps(run: Generation, asked: Asked, watcher: Watcher) -> Iterator[StepTime]:
    while _goes_on(run, asked):
        started = time.perf_counter()
        run.produced.append(int(run.feed(run.produced[-1:]).argmax()))
        yield StepTime(time.perf_counter() - started)
        watcher.decoded(1)


def _fixed_steps(run: Generation, asked: Asked, watcher: Watcher) -> Iterator[StepTime]:
    plug = integration()
    last = torch.tensor(run.produced[-1:], device=run.model.device)
    steps = plug.Steps(run.model, run.cache, last, graphs=asked.graphs)
    text = plug.PromptLookup([*asked.tokens, *run.produced]) if asked.drafts else None
    while _goes_on(run, asked):
        started = time.perf_counter()
        left = asked.new_tokens - len(run.produced)
        guessed = None if text is None else [text.guess(min(left, plug.MAX_ROWS) - 1)]
        found = _until_stop(steps.step(guessed)[0][:left], asked.stop_tokens)
        taken = time.perf_counter() - started
        run.produced += found
        if text is not None:
            text.extend(found)
        yield StepTime(taken, steps.done[-1].rows, len(found), steps.done[-1].how)
        watcher.decoded(len(found))


def _until_stop(tokens: list[int], stop: frozenset[int]) -> list[int]:
    """The tokens up to the first that ends the text, which is kept."""
    end = next((place for place, token in enumerate(tokens, 1) if token in stop), len(tokens))
    return tokens[:end]


def integration() -> Any:
    """The Transformers integration, or UserError where it cannot be imported."""
    try:
        from flashqsa.integrations import transformers as found
    except ImportError as error:
        raise UserError(f"the Transformers integration cannot be imported: {error}") from error
    return found
