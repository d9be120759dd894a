"""Timers and measured roofs of `flashqsa bench`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

GRAPH_CALLS = 20
"""Calls captured in one CUDA graph, so that the launch of the graph itself counts for little."""

HOST_SHARE = 0.85
"""Part of a call's time from which Python counts as what the GPU waited for: events and the launch take some too."""

WARM_UP = {"cpu": 1, "cuda": 3}
CALLS = {"cpu": 5, "cuda": 20}
"""Timed calls where no number is asked for."""

FLUSH_BYTES = 256 << 20
"""Written before each call under --cold: more than the L2 of any GPU so far."""

ROOF_CALLS = 10
COPY_BYTES = {"cpu": 256 << 20, "cuda": 1 << 30}
MATMUL_SIZE = {"cpu": 1024, "cuda": 8192}

Call = Callable[[], Any]


@dataclass(frozen=True)
class Manner:
    """How calls are timed.

    calls   samples of each
    cold    whether the caches are flushed before each sample
    graphs  whether samples are replays of CUDA graphs
    """

    calls: int
    cold: bool = False
    graphs: bool = False

    @property
    def calls_per_sample(self) -> int:
        """Calls in one sample; a flush before each call leaves room for one."""
        return GRAPH_CALLS if self.graphs and not self.cold else 1

    def text(self, device: torch.device) -> str:
        """How it was timed, in words, for the report."""
        if device.type == "cpu":
            clock = f"median of {self.calls} calls after {WARM_UP['cpu']}, perf_counter"
        elif self.graphs:
            inside = f"{self.calls_per_sample} calls each, divided by {self.calls_per_sample}"
            inside += ", launch of the graph included" if self.calls_per_sample == 1 else ""
            clock = f"median of {self.calls} replays of a CUDA graph of {inside}, CUDA events"
        else:
            clock = (
                f"median of {self.calls} calls after {WARM_UP['cuda']}, CUDA events around each, one sync at the end"
            )
        flushed = f"caches flushed before each by writing {FLUSH_BYTES >> 20} MiB"
        warm = "back to back over the same inputs, which stay cached as far as they fit; not rotated, not flushed"
        return f"{clock}; {flushed if self.cold else warm}"


@dataclass(frozen=True)
class Times:
    """Times of one call, in microseconds.

    host_us  median time until the call returned to Python, where it was launched call by call on a GPU; at or above
             `median_us` the GPU waited for Python
    """

    median_us: float
    min_us: float
    q1_us: float
    q3_us: float
    calls: int
    host_us: float | None = None

    @staticmethod
    def of(samples_us: Sequence[float], host_us: Sequence[float] | None = None) -> Times:
        """The figures of some samples.

        >>> Times.of([4.0, 1.0, 2.0, 3.0, 10.0])
        Times(median_us=3.0, min_us=1.0, q1_us=2.0, q3_us=4.0, calls=5, host_us=None)
        """
        q1, median, q3 = (float(number) for number in np.quantile(samples_us, (0.25, 0.5, 0.75)))
        host = None if host_us is None else float(np.median(host_us))
        return Times(median, min(samples_us), q1, q3, len(samples_us), host)

    @property
    def waits_for_host(self) -> bool:
        """Whether Python took most of the time of a call, so that the GPU idled inside it."""
        return self.host_us is not None and self.host_us >= HOST_SHARE * self.median_us


@dataclass(frozen=True)
class GraphedCall:
    """A call as a CUDA graph of several of it.

    result  what the last of them returned; a replay writes it anew
    """

    graph: torch.cuda.CUDAGraph
    result: Any

    @staticmethod
    def capture(call: Call, device: torch.device, calls: int) -> GraphedCall:
        """Captures `calls` calls after a warm-up on a stream of its own. Raises RuntimeError where a call syncs."""
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP["cuda"]):
                call()
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                result = call()
        return GraphedCall(graph, result)

    def __call__(self) -> Any:
        """Replays the graph."""
        self.graph.replay()
        return self.result


def time_calls(calls: Sequence[Call], device: torch.device, manner: Manner) -> list[Times]:
    """Times of several calls, taken in turn: first, second, first, second. Under `graphs` they are `GraphedCall`s."""
    flush = torch.empty(FLUSH_BYTES if manner.cold else 0, dtype=torch.uint8, device=device)
    if device.type == "cuda":
        with torch.cuda.device(device):
            return _time_on_gpu(calls, device, manner, flush)
    for call in calls:
        for _ in range(WARM_UP["cpu"]):
            call()
    samples: list[list[float]] = [[] for _ in calls]
    for _ in range(manner.calls):
        for call, taken in zip(calls, samples, strict=True):
            flush.add_(1)
            start = time.perf_counter()
            call()
            taken.append((time.perf_counter() - start) * 1e6)
    return [Times.of(taken) for taken in samples]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _time_on_gpu(calls: Sequence[Call], device: torch.device, manner: Manner, flush: torch.Tensor) -> list[Times]:
    for call in calls:
        for _ in range(WARM_UP["cuda"]):
            call()
    torch.cuda.synchronize(device)
    events: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in calls]
    host: list[list[float]] = [[] for _ in calls]
    for _ in range(manner.calls):
        for index, call in enumerate(calls):
            start, stop = _event(), _event()
            if manner.cold:
                flush.add_(1)
            start.record()
            began = time.perf_counter()
            call()
            host[index].append((time.perf_counter() - began) * 1e6)
            stop.record()
            events[index].append((start, stop))
    torch.cuda.synchronize(device)
    # Events count in milliseconds.
    unit = 1e3 / manner.calls_per_sample
    samples = [[start.elapsed_time(stop) * unit for start, stop in pairs] for pairs in events]
    if manner.graphs:
        return [Times.of(taken) for taken in samples]
    return [Times.of(taken, mine) for taken, mine in zip(samples, host, strict=True)]


@dataclass(frozen=True)
class Roofs:
    """What this machine does at best, measured in this run: the fastest of ROOF_CALLS calls.

    copy_bytes_per_s   bytes read and bytes written, of a plain copy
    matmul_flops_per_s dtype name -> of a dense square product
    """

    copy_bytes_per_s: float
    matmul_flops_per_s: dict[str, float]


def roof_dtype(q_dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of the products behind a call: the queries' on a GPU; CPU kernels multiply in FP32."""
    return torch.float32 if device.type == "cpu" else q_dtype


def measure_roofs(device: torch.device, dtypes: Sequence[torch.dtype]) -> Roofs:
    """Copy bandwidth, and the rate of a dense product for each dtype."""
    manner = Manner(ROOF_CALLS)
    source = torch.zeros(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = time_calls([_copy(source, target)], device, manner)[0]
    del source, target
    rates: dict[str, float] = {}
    size = MATMUL_SIZE[device.type]
    for dtype in dict.fromkeys(dtypes):
        # Random contents: products of zeros draw less power, and clocks are higher than any real call's.
        left, right = torch.randn(2, size, size, device=device).to(dtype).unbind(0)
        out = torch.empty_like(left)
        taken = time_calls([_product(left, right, out)], device, manner)[0]
        rates[str(dtype).removeprefix("torch.")] = 2.0 * size**3 / (taken.min_us * 1e-6)
    if device.type == "cuda":
        # Gigabytes that torch would keep in pieces, where a case may need them whole.
        del left, right, out
        torch.cuda.empty_cache()
    return Roofs(2.0 * COPY_BYTES[device.type] / (copied.min_us * 1e-6), rates)


def _copy(source: torch.Tensor, target: torch.Tensor) -> Call:
    return lambda: target.copy_(source)


def _product(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> Call:
    return lambda: torch.mm(left, right, out=out)


@contextlib.contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """Makes a GPU the current one inside the `with` block; nothing for a CPU."""
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        yield
