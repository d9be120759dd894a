"""Time spent in parts of a model: by the host's clock on a CPU, by CUDA events on a GPU, which runs behind the host."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flashqsa import capture
from flashqsa.capture import Noted

Moment = Any
"""A time in seconds, or a CUDA event."""


class Stopwatch:
    """Sums the time spent in some modules' forward passes, none of which may call another.

    On a GPU it is the time from the first to the last of a pass's kernels, with what the GPU waits for in between.
    """

    def __init__(self, modules: Sequence[Any], device: torch.device | str = "cpu") -> None:
        self.modules = list(modules)
        self.device = torch.device(device)
        self._seconds = 0.0
        self._spans: list[tuple[Moment, Moment]] = []
        self._started: Moment = None

    @property
    def seconds(self) -> float:
        """The sum so far. Waits for a GPU."""
        if self._spans:
            torch.cuda.synchronize(self.device)
            self._seconds += sum(start.elapsed_time(stop) for start, stop in self._spans) / 1e3
            self._spans = []
        return self._seconds

    def now(self) -> Moment:
        """This moment, of the device's own clock."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def add(self, start: Moment, stop: Moment) -> None:
        """Adds the time between two moments."""
        if self.device.type == "cuda":
            self._spans.append((start, stop))
        else:
            self._seconds += stop - start

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
        self._started = self.now()

    def _stop(self, *_: Any) -> None:
        self.add(self._started, self.now())


class FlashQsaIndexerClock(Stopwatch):
    """Sums what takes the place of the stock indexers: their projections and norms, pooling, and selecting blocks.

    Left out is the rotary embedding of the index queries, which is no module and no operator of its own. On a GPU it is
    selecting alone: norms and pooling share a launch with other parts there, which hooks would take apart.
    """

    def __init__(self, layers: Sequence[Any], device: torch.device | str = "cpu") -> None:
        parts = [[layer.indexer.index_qk_proj, layer.indexer.q_layernorm] for layer in layers]
        on_gpu = torch.device(device).type == "cuda"
        super().__init__([] if on_gpu else [part for pair in parts for part in pair], device)
        self._selecting: Moment = None

    @property
    def whole(self) -> bool:
        """Whether all parts of an indexer are timed, as a stock one's are."""
        return bool(self.modules)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Times the calls inside the `with` block."""
        with (
            super().running(),
            capture.listening(self._hear),
            _Pooling(self) if self.whole else contextlib.nullcontext(),
        ):
            yield

    def _hear(self, noted: Noted) -> None:
        # A select call begins with its note and ends before the note of the attention that uses it.
        now = self.now()
        if noted.function == "select_blocks":
            self._selecting = now
        elif self._selecting is not None:
            self.add(self._selecting, now)
            self._selecting = None


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
        started = self.clock.now()
        result = func(*args, **(kwargs or {}))
        self.clock.add(started, self.clock.now())
        return result
