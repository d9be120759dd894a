"""Another implementation, from a file of the user's, timed in the same run on the same tensors. See docs/BENCH.md."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from flashqsa.cli.bench_inputs import Workload
from flashqsa.cli.show import UserError
from flashqsa.values import QsaSpec, Selection

NAMES = {"attention": ("make_attention", "attention"), "selection": ("make_indexer", "indexer")}
"""What a peer's file may define for a measure; the factory is taken where it has both."""


@dataclass(frozen=True)
class Peer:
    """A peer's file, loaded.

    name  of the file, without its suffix
    """

    name: str
    module: ModuleType

    def function(self, measure: str) -> tuple[Callable[..., Any], bool] | None:
        """The function for a measure, and whether it is a factory; None where the file has none."""
        for name in NAMES.get(measure, ()):
            found = getattr(self.module, name, None)
            if callable(found):
                return found, name.startswith("make_")
        return None

    def call(self, measure: str, work: Workload, selection: Selection | None) -> Callable[[], Any] | None:
        """A call without arguments on a case's tensors; None where the file has nothing for the measure."""
        found = self.function(measure)
        if found is None:
            return None
        function, factory = found
        given: tuple[Any, ...] = (work.index_q, work.index_cache, work.rows, work.case.spec)
        if measure == "attention":
            given = (work.q, work.kv_cache, selection, work.rows, work.case.spec, work.gate)
        if not factory:
            return lambda: function(*given)
        made = function(*given)
        if not callable(made):
            raise UserError(f"--peer: {function.__name__} returned {type(made).__name__}; wanted a function")
        return made  # type: ignore[no-any-return]


def load_peer(path: Path, measures: set[str]) -> Peer:
    """Runs a peer's file. Raises UserError where it cannot be read or serves none of the measures."""
    if not path.is_file():
        raise UserError(f"--peer {path}: not a file")
    if path.suffix != ".py":
        raise UserError(f"--peer {path}: wanted a Python file")
    spec = importlib.util.spec_from_file_location(f"flashqsa_peer_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UserError(f"--peer {path}: cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (SyntaxError, ImportError, NameError, AttributeError, TypeError, ValueError, OSError, RuntimeError) as error:
        raise UserError(f"--peer {path}: {type(error).__name__}: {error}") from error
    peer = Peer(path.stem, module)
    if not any(peer.function(measure) for measure in measures):
        wanted = " or ".join(name for measure in sorted(measures) for name in NAMES.get(measure, ()))
        raise UserError(f"--peer {path}: defines no function {wanted}")
    return peer


def as_selection(found: Any, spec: QsaSpec) -> Selection | str:
    """A peer's selection, or why it is none: a Selection, or block ids [rows, any width] in any order, -1 for none."""
    if isinstance(found, Selection):
        return found
    if not isinstance(found, Tensor) or found.dim() != 2 or found.is_floating_point() or found.dtype == torch.bool:
        kind = f"{found.dtype} {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        return f"wanted a Selection or whole block ids [rows, width]; got {kind}"
    nothing = torch.iinfo(torch.int32).max
    ids = torch.where(found < 0, nothing, found.long()).sort(dim=1).values
    count = (ids < nothing).sum(dim=1, dtype=torch.int32)
    if int(count.max()) > spec.top_blocks:
        return f"a row selects {int(count.max())} blocks, of {spec.top_blocks}"
    blocks = torch.full((ids.shape[0], spec.top_blocks), -1, dtype=torch.int32, device=ids.device)
    width = min(ids.shape[1], spec.top_blocks)
    blocks[:, :width] = torch.where(ids[:, :width] < nothing, ids[:, :width], -1).to(torch.int32)
    return Selection(blocks, count)
