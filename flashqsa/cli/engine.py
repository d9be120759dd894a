"""Prefills and decodes a model in Transformers, and keeps the time, the memory and the routes of it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flashqsa.capture import Noted
from flashqsa.cli import memory
from flashqsa.cli.show import UserError
from flashqsa.route import Decision

Advance = Callable[[int], None]


class Stopwatch:
    """Sums the time spent in some modules' forward passes."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._started = 0.0

    @contextlib.contextmanager
    def on(self, modules: Sequence[Any]) -> Iterator[Stopwatch]:
        """Times the modules' calls inside the `with` block; none of them may call another."""
        handles = [module.register_forward_pre_hook(self._start) for module in modules]
        handles += [module.register_forward_hook(self._stop) for module in modules]
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def _start(self, *_: Any) -> None:
        self._started = time.perf_counter()

    def _stop(self, *_: Any) -> None:
        self.seconds += time.perf_counter() - self._started


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
        self.phase = "prefill"
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
        self.phase = "decode"


@dataclass(frozen=True)
class Timing:
    """What one prefill and decode took.

    chunk_s           seconds of each prefill chunk; their sum is the time to the first token
    sparse_s          seconds of the prefill spent in the sparse layers
    indexer_s         seconds of the prefill spent in their indexers; None where it was not timed
    decode_s          seconds of the decode steps, which make every new token but the first
    peak_extra_bytes  most memory held beyond what was held before the prefill
    """

    tokens: int
    chunk_s: tuple[float, ...]
    sparse_s: float
    indexer_s: float | None
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


def generate(
    model: Any,
    tokens: Sequence[int],
    *,
    chunk: int,
    new_tokens: int,
    sparse_layers: Sequence[Any],
    indexers: Sequence[Any] = (),
    stop_tokens: frozenset[int] = frozenset(),
    on_chunk: Advance = lambda _: None,
    on_token: Advance = lambda _: None,
    on_decode: Callable[[], None] = lambda: None,
) -> tuple[list[int], Timing]:
    """Prefills `tokens` in chunks and decodes greedily; returns the new tokens and what it took.

    on_chunk, on_token  told of the number of tokens done in each prefill chunk and decode step
    on_decode           told once, between prefill and decode
    """
    memory.reset_peak()
    before = memory.resident_bytes()
    run, layers, parts = Generation(model), Stopwatch(), Stopwatch()
    times: list[float] = []
    logits = torch.empty(0)
    with layers.on(sparse_layers), parts.on(indexers):
        for piece in chunks(tokens, chunk):
            started = time.perf_counter()
            logits = run.feed(piece)
            run.produced = [int(logits.argmax())]
            times.append(time.perf_counter() - started)
            on_chunk(len(piece))
    on_decode()
    started = time.perf_counter()
    while len(run.produced) < new_tokens and run.produced[-1] not in stop_tokens:
        run.produced.append(int(run.feed(run.produced[-1:]).argmax()))
        on_token(1)
    decode_s = time.perf_counter() - started
    timing = Timing(
        tokens=len(tokens),
        chunk_s=tuple(times),
        sparse_s=layers.seconds,
        indexer_s=parts.seconds if indexers else None,
        new_tokens=len(run.produced),
        decode_s=decode_s,
        peak_extra_bytes=max(memory.peak_bytes() - before, 0),
    )
    return run.produced, timing


def integration() -> Any:
    """The Transformers integration, or UserError where it cannot be imported."""
    try:
        from flashqsa.integrations import transformers as found
    except ImportError as error:
        raise UserError(f"the Transformers integration cannot be imported: {error}") from error
    return found
