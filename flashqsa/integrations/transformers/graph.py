"""A function of fixed shapes as a CUDA graph: called, then captured, then replayed. Without a GPU it is just called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

from flashqsa import growing

How = Literal["called", "captured", "replayed"]


class StepGraph:
    """Runs a function that takes nothing, reads and writes tensors that stay where they are, and returns nothing.

    Every run is given the function, and it must do the same each time: it is not kept, so that whoever keeps the graph
    goes when its last user does. A graph that outlives its group of processes has NCCL wait for it when that is taken
    down.

    The first run calls it, so that kernels are compiled and memory is set up, which capture does not allow; the second
    captures it in a CUDA graph and replays that once; later ones replay. So every run does the work once. Where graphs
    are off, or the device has none, every run calls it.

    graphs  whether to capture at all
    pool    memory that graphs share which never run at the same time (`torch.cuda.graph_pool_handle`)
    """

    def __init__(self, device: torch.device, *, graphs: bool = True, pool: Any = None) -> None:
        self.graphs = graphs and device.type == "cuda"
        self.device = device
        self.runs = 0
        self._pool = pool
        self._graph: torch.cuda.CUDAGraph | None = None

    @property
    def will_replay(self) -> bool:
        """Whether the next run only replays, so that nothing is decided on the host."""
        return self._graph is not None

    def run(self, function: Callable[[], None]) -> How:
        """Does the work once, and says how. It does not wait for a GPU.

        function  the host must not read a device tensor in it, or decide by what a tensor holds
        """
        self.runs += 1
        if not self.graphs or self.runs == 1:
            function()
            return "called"
        captured: How = "replayed"
        if self._graph is None:
            self._graph, captured = self._capture(function), "captured"
        self._graph.replay()
        return captured

    def _capture(self, function: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process (progress bars, a server) may use the device meanwhile.
        with (
            growing.capturing(),
            torch.cuda.device(self.device),
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
        ):
            function()
        return graph
