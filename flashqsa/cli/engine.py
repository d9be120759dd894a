"""Prefills and decodes a model in Transformers, and keeps the time, the memory and the routes of it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flashqsa import capture
from flashqsa.capture import Noted
from flashqsa.cli import process
from flashqsa.cli.show import UserError
from flashqsa.route import Decision

PHASES = ("prefill", "decode")


class Stopwatch:
    """Sums the time spent in some modules' forward passes, none of which may call another."""

    def __init__(self, modules: Sequence[Any]) -> None:
        self.modules = list(modules)
        self.seconds = 0.0
        self._started = 0.0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Times the modules' calls inside the `with` block."""
        handles = [module.register_forward_pre_hook(self._start) for module in self.modules]
        handles += [module.register_forward_hook(self._stop) for module in self.modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _start(self, *_: Any) -> None:
        self._started = time.perf_counter()

    def _stop(self, *_: Any) -> None:
        self.seconds += time.perf_counter() - self._started


class FlashQsaIndexerClock(Stopwatch):
    """Sums what takes the place of the stock indexers: their projections and norms, pooling, and selecting blocks.

    Left out is the rotary embedding of the index queries, which is no module and no operator of its own.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        parts = [[layer.indexer.index_qk_proj, layer.indexer.q_layernorm] for layer in layers]
        super().__init__([part for pair in parts for part in pair])
        self._selecting = 0.0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Times the calls inside the `with` block."""
        with super().running(), capture.listening(self._hear), _Pooling(self):
            yield

    def _hear(self, noted: Noted) -> None:
        # A select call begins with its note and ends before the note of the attention that uses it.
        now = time.perf_counter()
        if noted.function == "select_blocks":
            self._selecting = now
        elif self._selecting:
            self.seconds += now - self._selecting
            self._selecting = 0.0


class _Pooling(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds the time of `flashqsa::write_index_keys` to a stopwatch: the one part of an indexer that is no module."""

    def __init__(self, clock: Stopwatch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.clock = clock

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator, timed where it is the one."""
        del types
        if func.name() != "flashqsa::write_index_keys":
            return func(*args, **(kwargs or {}))
        started = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        self.clock.seconds += time.perf_counter() - started
        return result


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
class Timing:
    """What one prefill and decode took.

    chunk_s           seconds of each prefill chunk; their sum is the time to the first token
    sparse_s          seconds of the prefill spent in the sparse layers
    indexer_s         seconds of the prefill spent in their indexers
    decode_s          seconds of the decode steps, which make every new token but the first
    peak_extra_bytes  most memory held beyond what was held before the prefill
    """

    tokens: int
    chunk_s: tuple[float, ...]
    sparse_s: float
    indexer_s: float
    new_tokens: int
    decode_s: float
    peak_extra_bytes: int

    @property
    def first_token_s(self) -> float:
        """Time to the first token."""
        return sum(self.chunk_s)

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second."""
        return self.tokens / self.first_token_s

    @property
    def decode_rate(self) -> float | None:
        """New tokens per second after the first; None without decode steps."""
        steps = self.new_tokens - 1
        return steps / self.decode_s if steps > 0 else None

    @property
    def sparse_share(self) -> float:
        """Share of the prefill that the sparse layers took."""
        return self.sparse_s / self.first_token_s

    def as_json(self) -> dict[str, Any]:
        """The figures as plain JSON values."""
        return {
            "prompt_tokens": self.tokens,
            "time_to_first_token_s": self.first_token_s,
            "prefill_tokens_per_s": self.prefill_rate,
            "chunks_s": list(self.chunk_s),
            "sparse_layers_s": self.sparse_s,
            "sparse_layers_share": self.sparse_share,
            "indexer_s": self.indexer_s,
            "new_tokens": self.new_tokens,
            "decode_s": self.decode_s,
            "decode_tokens_per_s": self.decode_rate,
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
        ids = torch.tensor([list(tokens)], dtype=torch.int64)
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
    """What to generate: from which prompt, in which chunks, how much, and which tokens end it early."""

    tokens: Sequence[int]
    chunk: int
    new_tokens: int
    stop_tokens: frozenset[int] = frozenset()


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
    process.reset_peak()
    before = process.resident_bytes()
    run, layers = Generation(model), Stopwatch(sparse_layers)
    times: list[float] = []
    with layers.running(), indexers.running():
        for piece in chunks(asked.tokens, asked.chunk):
            started = time.perf_counter()
            run.produced = [int(run.feed(piece).argmax())]
            times.append(time.perf_counter() - started)
            watcher.prefilled(len(piece))
    between()
    started = time.perf_counter()
    while len(run.produced) < asked.new_tokens and run.produced[-1] not in asked.stop_tokens:
        run.produced.append(int(run.feed(run.produced[-1:]).argmax()))
        watcher.decoded(1)
    decode_s = time.perf_counter() - started
    timing = Timing(
        tokens=len(asked.tokens),
        chunk_s=tuple(times),
        sparse_s=layers.seconds,
        indexer_s=indexers.seconds,
        new_tokens=len(run.produced),
        decode_s=decode_s,
        peak_extra_bytes=max(process.peak_bytes() - before, 0),
    )
    return run.produced, timing


def integration() -> Any:
    """The Transformers integration, or UserError where it cannot be imported."""
    try:
        from flashqsa.integrations import transformers as found
    except ImportError as error:
        raise UserError(f"the Transformers integration cannot be imported: {error}") from error
    return found
