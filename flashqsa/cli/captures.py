"""`flashqsa capture` and `flashqsa replay`, and the captures behind `flashqsa stats`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashqsa import capture, pipeline
from flashqsa.check import check_pin
from flashqsa.cli import stats as figures
from flashqsa.cli.engine import Generation, chunks
from flashqsa.cli.prompt import read_prompt
from flashqsa.cli.run import enabled, load
from flashqsa.cli.show import FAILED, OK, Screen, UserError, log_lines, seconds, versions, write_json
from flashqsa.cli.verify import chosen_cases, verdict_of
from flashqsa.testing.inputs import build
from flashqsa.values import IndexCache, KvCache, Selection

WARM_UP_CALLS = 2


@dataclass(frozen=True)
class Source:
    """Where a call comes from: a named case, or one chunk of a preset's prefill of the built-in text.

    chunk_index  which chunk, from 0; the last one for None
    """

    case: str | None = None
    preset: str | None = None
    tokens: int = 4096
    chunk: int = 1024
    chunk_index: int | None = None
    seed: int = 0
    threads: int | None = None


def make_call(source: Source, screen: Screen) -> Callable[[], None]:
    """Gets everything ready for the call; what it returns makes it. Raises UserError."""
    if source.case is not None and source.preset is not None:
        raise UserError("--case and --preset: wanted one of them; got both")
    if source.case is not None:
        return _case_call(source.case)
    for option, value in (("--tokens", source.tokens), ("--chunk", source.chunk), ("--threads", source.threads)):
        if value is not None and value < 1:
            raise UserError(f"{option}: wanted at least 1; got {value}")
    if source.threads is not None:
        torch.set_num_threads(source.threads)
    return _preset_call(source, screen)


def _case_call(name: str) -> Callable[[], None]:
    (case,) = chosen_cases((name,), None)
    inputs = build(case)

    def call() -> None:
        selection = inputs.selection
        if selection is None:
            selection = pipeline.select_blocks(inputs.index_q, inputs.index_cache, inputs.rows, inputs.spec)
        pipeline.sparse_attention(inputs.q, inputs.kv_cache, selection, inputs.rows, inputs.spec, inputs.gate)

    return call


def _preset_call(source: Source, screen: Screen) -> Callable[[], None]:
    loaded = load(None, source.preset, None, source.seed)
    prompt = read_prompt(None, source.tokens, loaded.encode)
    pieces = list(chunks(prompt.tokens, source.chunk))
    index = len(pieces) - 1 if source.chunk_index is None else source.chunk_index
    if not 0 <= index < len(pieces):
        raise UserError(f"--chunk-index: wanted 0 to {len(pieces) - 1}; got {source.chunk_index}")
    screen.line(f"{loaded.name}: chunk {index} of {len(pieces)}, {len(pieces[index]):,} rows")
    return lambda: None


def capture_call(folder: Path, source: Source, screen: Screen, json_target: str | None) -> int:
    """Saves the first select call and the first attention call of a source under `folder`."""
    raise NotImplementedError
