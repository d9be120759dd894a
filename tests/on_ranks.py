"""Runs a function in several processes that form a torch.distributed group: gloo on a CPU, NCCL on as many GPUs."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

TIMEOUT = timedelta(seconds=180)
"""After which a process that waits for one that failed gives up."""

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch sees fewer than two GPUs")


def on_ranks(function: Callable[..., Any], ranks: int, folder: Path, device: str, *arguments: Any) -> list[Any]:
    """What `function(device, *arguments)` returns on each rank, whose device it is given; tensors on the CPU.

    folder  an existing one, for what the processes tell each other
    device  "cpu", or "cuda" for a GPU of its own for each rank

    An exception on any rank is raised here, with its traceback.
    """
    names = (function, ranks, str(folder), device, arguments)
    start_processes(_run, names, nprocs=ranks, start_method="spawn")
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=True) for rank in range(ranks)]


def _run(
    rank: int, function: Callable[..., Any], ranks: int, folder: str, device: str, arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    own = torch.device(device, rank) if device == "cuda" else torch.device(device)
    if own.type == "cuda":
        torch.cuda.set_device(own)
    dist.init_process_group(
        "nccl" if own.type == "cuda" else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=TIMEOUT,
    )
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", ranks)):
            patch.setenv(name, str(value))
        torch.save(function(own, *arguments), Path(folder) / f"rank-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
