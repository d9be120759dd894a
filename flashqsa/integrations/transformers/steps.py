"""Decode and verify steps of fixed shapes, each a replay of one CUDA graph: greedy tokens of a model and its cache.

    cache = StaticCache(config=model.config, max_cache_len=...)
    ... prefill, which gives each request's next token `last` [batch] ...
    steps = Steps(model, cache, last)
    tokens = steps.step()                    # one new token for each request
    tokens = steps.step([[17, 4, 9], []])    # the first request's next three are guessed: one to four new tokens for it

A step's shapes depend on its number of rows, and on a bound on positions that grows by powers of two. Each pair is
captured once: a step fills in the ids, replays, and reads the new tokens, which is the only time it waits for the GPU.
Which guesses hold is decided on the device, and what went in for the others is taken back there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flashqsa import check
from flashqsa.integrations.transformers.cache import FlashQsaStaticLayer
from flashqsa.integrations.transformers.errors import CacheMismatchError, UnsupportedModelError
from flashqsa.integrations.transformers.graph import How, StepGraph
from flashqsa.integrations.transformers.layer import FlashQsaAttention, cached_positions
from flashqsa.integrations.transformers.masks import NAME
from flashqsa.integrations.transformers.rollback import LinearStates
from flashqsa.integrations.transformers.switch import qsa_layers
from flashqsa.machine import facts_here

MAX_ROWS = 9
"""Most rows of a request in one step: its last token, and eight that are guessed."""

ROW_COUNTS = (1, 2, 3, 5, 9)
"""Rows that steps come in. Fewer guesses are filled up: what fills up is accepted only where it is the right token."""

LEAST_BOUND_TOKENS = 2048
"""The first bound on positions; each next one is twice as large, up to the cache's length."""


@dataclass(frozen=True)
class StepDone:
    """What a step did: its rows per request, its bound on tokens, and how it ran (see `StepGraph`)."""

    rows: int
    bound_tokens: int
    how: How


class Steps:
    """Greedy steps of a model over a static cache that a prompt went through.

    model    with FlashQSA on (`enable`), in eval mode, on one device
    cache    a `StaticCache` that holds the prompts
    last     [batch] the token that each request goes on with; the cache does not hold it yet
    graphs   False calls the model in every step, as on a CPU

    Raises UnsupportedModelError and CacheMismatchError, before anything runs. While a step runs nothing else may use
    the model or the cache. Between steps the cache is an ordinary one, but for the positions that Transformers keeps:
    call `finish` before it is used otherwise.
    """

    def __init__(self, model: nn.Module, cache: Any, last: Tensor, *, graphs: bool = True) -> None:
        self.model, self.cache = model, cache
        self.layers = _check(model, cache, last)
        store = self.layers[0].store
        assert store is not None
        device = store.device
        self.batch = store.batch
        self.columns = self._columns_at_start = self.layers[0].host_columns()
        for layer in self.layers:
            layer.known_columns = self.columns
        positions = cached_positions(cache)
        assert positions is not None
        self._history = positions
        self.next_position = (positions[..., -1] + 1).to(device)
        self.ids = torch.zeros((self.batch, MAX_ROWS), dtype=torch.int64, device=device)
        self.ids[:, 0] = last
        self.found = torch.zeros((self.batch, 1 + MAX_ROWS), dtype=torch.int64, device=device)
        self._drafts = torch.zeros((self.batch, MAX_ROWS - 1), dtype=torch.int64, pin_memory=device.type == "cuda")
        # Value checks read the device, which no graph can.
        self.graphs = graphs and device.type == "cuda" and not check.wants_value_checks(None, device)
        self._pool = torch.cuda.graph_pool_handle() if self.graphs else None
        self._runs: dict[tuple[int, int], StepGraph] = {}
        self._linear: LinearStates | None = None
        self.done: list[StepDone] = []

    @property
    def room(self) -> int:
        """Columns that are left: the most rows a step may have."""
        return int(self.layers[0].max_cache_len) - self.columns

    def step(self, drafts: Sequence[Sequence[int]] | None = None) -> list[list[int]]:
        """One step: each request's new tokens, of which the last is the one it goes on with.

        drafts  guesses of what comes after each request's last token, at most MAX_ROWS - 1; None for none

        A request gets one token, and one more for each of its guesses from the first on that is the model's greedy
        choice. Raises CacheMismatchError where the cache is full, ValueError for drafts of another batch or too long.
        """
        rows = self._fill_in(drafts)
        bound = self._bound(self.columns + rows)
        run = self._runs.get((rows, bound))
        if run is None:
            run = StepGraph(lambda: self._pass(rows, bound), self.ids.device, graphs=self.graphs, pool=self._pool)
            self._runs[rows, bound] = run
        if rows > 1 and self._linear is None:
            self._linear = LinearStates(self.model, self.cache, MAX_ROWS)
        how = run.run()
        read = self.found.tolist()
        self.columns += max(counts[0] for counts in read)
        for layer in self.layers:
            layer.known_columns = self.columns
        self.done.append(StepDone(rows, bound, how))
        return [tokens[:counts] for counts, *tokens in read]

    def finish(self) -> None:
        """Writes the positions of the new columns where Transformers keeps them; the steps may go on afterwards."""
        store = self.layers[0].store
        assert store is not None
        new = store.visible[:, self._columns_at_start : self.columns]
        first = (self._history[..., -1:] + 1).to(new.device)
        positions = first + (new.cumsum(1) - 1).clamp(min=0)
        _set_positions(self.cache, torch.cat((self._history.to(new.device), positions), dim=-1))

    def _fill_in(self, drafts: Sequence[Sequence[int]] | None) -> int:
        """Brings the guesses to the device and says with how many rows the step runs."""
        if self.room < 1:
            raise CacheMismatchError(f"cache: wanted room for a token; got max_cache_len {self.columns}, all in use")
        longest = max(map(len, drafts), default=0) if drafts else 0
        if drafts is not None and (len(drafts) != self.batch or longest > MAX_ROWS - 1):
            wanted = f"{self.batch} lists of at most {MAX_ROWS - 1} tokens"
            raise ValueError(f"drafts: wanted {wanted}; got {len(drafts)} of up to {longest}")
        rows = next(count for count in ROW_COUNTS if count > longest)
        rows = max(count for count in ROW_COUNTS if count <= min(rows, self.room))
        if rows > 1 and drafts:
            for request, guessed in enumerate(drafts):
                kept = list(guessed[: rows - 1])
                self._drafts[request, : len(kept)] = torch.tensor(kept, dtype=torch.int64)
            # The read at a step's end has waited for the copy before this one.
            self.ids[:, 1:rows].copy_(self._drafts[:, : rows - 1], non_blocking=True)
        return rows

    def _bound(self, tokens: int) -> int:
        bound = LEAST_BOUND_TOKENS
        while bound < tokens:
            bound *= 2
        return min(bound, int(self.layers[0].max_cache_len))

    @torch.no_grad()
    def _pass(self, rows: int, bound: int) -> None:
        """What a graph holds: the model's pass, which guesses hold, and taking back the others."""
        ids = self.ids[:, :rows]
        positions = self.next_position[..., None] + torch.arange(rows, device=ids.device)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._stepping(bound))
            stack.enter_context(_capturable_experts(self.model))
            if rows > 1:
                assert self._linear is not None
                stack.enter_context(self._linear.followed(rows))
            logits = self.model(
                input_ids=ids, position_ids=positions, past_key_values=self.cache, use_cache=True
            ).logits
        tokens = logits.argmax(dim=-1)
        kept = torch.ones(self.batch, dtype=torch.int64, device=ids.device)
        if rows > 1:
            assert self._linear is not None
            kept += (ids[:, 1:] == tokens[:, :-1]).cumprod(dim=1).sum(dim=1)
            self._linear.restore(kept, rows)
            for layer in self.layers:
                layer.take_back(kept, rows)
        self.found[:, 0] = kept
        self.found[:, 1 : 1 + rows] = tokens
        self.ids[:, :1] = tokens.gather(1, kept[:, None] - 1)
        self.next_position += kept

    @contextlib.contextmanager
    def _stepping(self, bound: int) -> Iterator[None]:
        """The cache layers count on the device, and Transformers keeps no positions, inside the `with` block."""
        before = _set_positions(self.cache, None)
        try:
            for layer in self.layers:
                layer.step_tokens = bound
            yield
        finally:
            for layer in self.layers:
                layer.step_tokens = None
            _set_positions(self.cache, before)


def _check(model: nn.Module, cache: Any, last: Tensor) -> list[FlashQsaStaticLayer]:
    """The cache layers of the sparse layers, or what is wrong with the model or the cache."""
    layers = qsa_layers(model)
    for name, layer in layers.items():
        if not isinstance(layer, FlashQsaAttention):
            raise UnsupportedModelError(f"model.{name}: wanted FlashQSA's layer (call `enable`); got the stock one")
        if layer.config._attn_implementation != NAME or layer.training:
            got = "train mode" if layer.training else f"attn_implementation {layer.config._attn_implementation!r}"
            raise UnsupportedModelError(f"model.{name}: wanted eval mode and attn_implementation {NAME!r}; got {got}")
    if not layers:
        raise UnsupportedModelError(f"model: wanted one with Qwen4-Exp sparse layers; got {type(model).__name__}")
    devices = sorted({str(weight.device) for weight in model.parameters()})
    if len(devices) > 1:
        raise UnsupportedModelError(f"model: wanted all weights on one device; got {', '.join(devices)}")
    found: list[FlashQsaStaticLayer] = []
    for layer in layers.values():
        held = cache.layers[layer.layer_idx] if layer.layer_idx < len(cache.layers) else None
        if not isinstance(held, FlashQsaStaticLayer) or held.store is None:
            raise CacheMismatchError(f"cache: wanted a StaticCache that FlashQSA filled; got {type(held).__name__}")
        found.append(held)
    batch = found[0].store.batch if found[0].store is not None else 0
    if last.shape != (batch,):
        raise CacheMismatchError(
            f"last: wanted a token for each of the cache's {batch} requests; got {list(last.shape)}"
        )
    if cached_positions(cache) is None:
        raise CacheMismatchError(
            "cache: wanted the positions of its columns, which a forward pass leaves there; got none"
        )
    if getattr(cache, "offloading", False):
        raise CacheMismatchError("cache: wanted one that stays on its device; got an offloading one")
    return found


def _set_positions(cache: Any, positions: Tensor | None) -> Tensor | None:
    """Replaces the positions that Transformers keeps of a cache's columns; returns what they were.

    Until 5.22 they are an attribute of the cache, which must be absent to be begun anew; then one of an indexed layer.
    """
    before = cached_positions(cache)
    holder = next((layer for layer in cache.layers if getattr(layer, "indexer_position_ids", None) is not None), None)
    if holder is None and not hasattr(cache, "position_ids"):
        holder = next((layer for layer in cache.layers if hasattr(layer, "indexer_position_ids")), None)
    if holder is not None:
        holder.indexer_position_ids = positions
    elif positions is not None:
        cache.position_ids = positions
    elif hasattr(cache, "position_ids"):
        del cache.position_ids
    return before


@contextlib.contextmanager
def _capturable_experts(model: nn.Module) -> Iterator[None]:
    """Has the experts run, inside the `with` block, in a way that does not read the device.

    torch's grouped product keeps to the device in BF16 from compute capability 8.0 on. Else each token's experts are
    multiplied as a batch of products, which copies their weights: right for a few rows.
    """
    weight = next(model.parameters())
    if weight.device.type == "cpu":
        yield
        return
    capability = facts_here(weight.device).capability or (0, 0)
    grouped = weight.dtype == torch.bfloat16 and capability >= (8, 0)
    configs = {id(layer.config): layer.config for layer in qsa_layers(model).values()}
    before = {key: config._experts_implementation for key, config in configs.items()}
    try:
        for config in configs.values():
            config._experts_implementation = "grouped_mm" if grouped else "batched_mm"
        yield
    finally:
        for key, config in configs.items():
            config._experts_implementation = before[key]
