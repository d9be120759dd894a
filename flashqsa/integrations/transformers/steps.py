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
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flashqsa import check
from flashqsa.integrations.transformers.cache import FlashQsaStaticLayer
from flashqsa.integrations.transformers.errors import CacheMismatchError, UnsupportedModelError
from flashqsa.integrations.transformers.graph import How, StepGraph
from flashqsa.integrations.transformers.layer import FlashQsaAttention
from flashqsa.integrations.transformers.masks import NAME
from flashqsa.integrations.transformers.paged import DROP_CACHE, require_routes
from flashqsa.integrations.transformers.passes import cached_positions, set_positions
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
    cache    a `StaticCache` that holds the prompts, and the position of each of its columns
    last     [batch] integers: the token that each request goes on with; the cache does not hold it yet
    graphs   False calls the model in every step, as on a CPU

    Raises UnsupportedModelError and CacheMismatchError, TypeError for a `last` that is no tensor of integers, and
    ValueError for tokens out of the vocabulary (read where FLASHQSA_CHECK_VALUES allows it), before anything runs.
    While a step runs nothing else may use the model or the cache. Between steps the cache is an ordinary one, but for
    the positions that Transformers keeps: call `finish` before it is used otherwise, and make new steps afterwards.
    """

    def __init__(self, model: nn.Module, cache: Any, last: Tensor, *, graphs: bool = True) -> None:
        self.model, self.cache = model, cache
        self._sparse = _check_model(model)
        self.layers, self.columns, positions = _check_cache(self._sparse, cache)
        store = self.layers[0].store
        assert store is not None
        device = store.device
        self.batch = store.batch
        self.vocabulary = int(next(iter(self._sparse.values())).config.vocab_size)
        self._check_last(last)
        self._columns_at_start = self.columns
        self._note_columns(self.columns)
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
        choice. Raises, before anything runs: CacheMismatchError where the cache is full, or was used otherwise since
        the last step, or a step failed; UnsupportedModelError where the model is not as it was; NoRouteError; TypeError
        for drafts that are no integers; ValueError for drafts of another batch, too long, or out of the vocabulary.
        """
        self._check_still()
        rows = self._fill_in(drafts)
        bound = self._bound(self.columns + rows)
        run = self._runs.get((rows, bound))
        if run is None or not run.will_replay:
            self._require_routes(rows, bound)
        if run is None:
            run = StepGraph(self.ids.device, graphs=self.graphs, pool=self._pool)
            self._runs[rows, bound] = run
        if rows > 1 and self._linear is None:
            self._linear = LinearStates(self.model, self.cache, MAX_ROWS)
        # What stops in the pass leaves the cache torn, and nobody knows how many columns it holds.
        self._note_columns(None)
        how = run.run(lambda: self._pass(rows, bound))
        read = self.found.tolist()
        self.columns += max(counts[0] for counts in read)
        self._note_columns(self.columns)
        self.done.append(StepDone(rows, bound, how))
        return [tokens[:counts] for counts, *tokens in read]

    def finish(self) -> None:
        """Writes the positions of the new columns where Transformers keeps them; the steps may go on afterwards.

        Raises CacheMismatchError where the cache was used otherwise since the last step, or a step failed.
        """
        self._check_columns()
        store = self.layers[0].store
        assert store is not None
        new = store.visible[:, self._columns_at_start : self.columns]
        first = (self._history[..., -1:] + 1).to(new.device)
        positions = first + (new.cumsum(1) - 1).clamp(min=0)
        set_positions(self.cache, torch.cat((self._history.to(new.device), positions), dim=-1))

    def _note_columns(self, columns: int | None) -> None:
        """Tells the cache layers what they hold, or that a step has begun which may not end."""
        for layer in self.layers:
            layer.known_columns, layer.spoilt = columns, columns is None

    def _check_last(self, last: Any) -> None:
        if not isinstance(last, Tensor) or last.is_floating_point() or last.is_complex() or last.dtype == torch.bool:
            got = f"one of {last.dtype}" if isinstance(last, Tensor) else type(last).__name__
            raise TypeError(f"last: wanted a tensor of integers; got {got}")
        if last.shape != (self.batch,):
            raise CacheMismatchError(
                f"last: wanted a token for each of the cache's {self.batch} requests; got {list(last.shape)}"
            )
        if check.wants_value_checks(None, last.device):
            for request, token in enumerate(last.tolist()):
                self._check_token(f"last[{request}]", token)

    def _check_token(self, name: str, token: int) -> None:
        if not 0 <= token < self.vocabulary:
            raise ValueError(f"{name}: wanted a token from 0 to {self.vocabulary - 1}; got {token}")

    def _check_still(self) -> None:
        """What may have changed since the last step, told by what the host has."""
        _check_layers(self._sparse)
        self._check_columns()

    def _check_columns(self) -> None:
        for layer in self.layers:
            layer.check_unspoilt()
            found = layer.known_columns if layer.store is not None and layer.store.batch == self.batch else None
            if found != self.columns:
                got = "a cache that was used otherwise" if found is None else f"{found} columns"
                raise CacheMismatchError(
                    f"cache: wanted the {self.columns} columns of the last step; got {got} (make new steps)"
                )

    def _require_routes(self, rows: int, bound: int) -> None:
        for module, layer in zip(self._sparse.values(), self.layers, strict=True):
            store = layer.store
            assert store is not None
            heads = store.kv.shape[3]
            spec = module.spec_of_heads(heads * module.qsa_spec.heads_per_kv_head, heads)
            last = layer.last_position(bound)
            require_routes(spec, self.batch * rows, self.batch, last, store.dtype, store.kv.dtype, store.device)

    def _fill_in(self, drafts: Sequence[Sequence[int]] | None) -> int:
        """Brings the guesses to the device and says with how many rows the step runs."""
        if self.room < 1:
            raise CacheMismatchError(f"cache: wanted room for a token; got max_cache_len {self.columns}, all in use")
        guesses = self._checked(drafts)
        longest = max(map(len, guesses), default=0)
        rows = next(count for count in ROW_COUNTS if count > longest)
        rows = max(count for count in ROW_COUNTS if count <= min(rows, self.room))
        if rows > 1:
            for request, guessed in enumerate(guesses):
                kept = guessed[: rows - 1]
                self._drafts[request, : len(kept)] = torch.tensor(kept, dtype=torch.int64)
            # The read at a step's end has waited for the copy before this one.
            self.ids[:, 1:rows].copy_(self._drafts[:, : rows - 1], non_blocking=True)
        return rows

    def _checked(self, drafts: Any) -> list[list[int]]:
        """The guesses as lists of whole numbers, none where none were given."""
        if drafts is None:
            return []
        lists = list(_items("drafts", drafts))
        found = []
        for request, guessed in enumerate(lists):
            name = f"drafts[{request}]"
            found.append([_whole(f"{name}[{place}]", token) for place, token in enumerate(_items(name, guessed))])
        longest = max(map(len, found), default=0)
        if len(found) != self.batch or longest > MAX_ROWS - 1:
            wanted = f"{self.batch} lists of at most {MAX_ROWS - 1} tokens"
            raise ValueError(f"drafts: wanted {wanted}; got {len(found)} of up to {longest}")
        for request, guess in enumerate(found):
            for place, token in enumerate(guess):
                self._check_token(f"drafts[{request}][{place}]", token)
        return found

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
        before = set_positions(self.cache, None)
        try:
            for layer in self.layers:
                layer.step_tokens = bound
            yield
        finally:
            for layer in self.layers:
                layer.step_tokens = None
            set_positions(self.cache, before)


def _items(name: str, value: Any) -> Iterable[Any]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise TypeError(f"{name}: wanted a sequence of tokens; got {type(value).__name__}")
    return value


def _whole(name: str, token: Any) -> int:
    try:
        return operator.index(token)
    except TypeError as error:
        raise TypeError(f"{name}: wanted a whole number; got {token!r}") from error


def _check_layers(layers: Mapping[str, Any]) -> None:
    """UnsupportedModelError where a sparse layer would not run through FlashQSA."""
    for name, layer in layers.items():
        if not isinstance(layer, FlashQsaAttention):
            raise UnsupportedModelError(f"model.{name}: wanted FlashQSA's layer (call `enable`); got the stock one")
        if layer.config._attn_implementation != NAME or layer.training:
            got = "train mode" if layer.training else f"attn_implementation {layer.config._attn_implementation!r}"
            raise UnsupportedModelError(f"model.{name}: wanted eval mode and attn_implementation {NAME!r}; got {got}")


def _check_model(model: nn.Module) -> dict[str, Any]:
    """The model's sparse layers by name, or what is wrong with the model."""
    layers = qsa_layers(model) if isinstance(model, nn.Module) else {}
    _check_layers(layers)
    if not layers:
        raise UnsupportedModelError(f"model: wanted one with Qwen4-Exp sparse layers; got {type(model).__name__}")
    devices = sorted({str(weight.device) for weight in model.parameters()})
    if len(devices) > 1:
        raise UnsupportedModelError(f"model: wanted all weights on one device; got {', '.join(devices)}")
    return layers


def _check_cache(layers: Mapping[str, Any], cache: Any) -> tuple[list[FlashQsaStaticLayer], int, Tensor]:
    """The cache layers of the sparse layers, their columns and the positions of these, or what is wrong."""
    held_by = getattr(cache, "layers", ())
    found: list[FlashQsaStaticLayer] = []
    for layer in layers.values():
        held = held_by[layer.layer_idx] if layer.layer_idx < len(held_by) else None
        if not isinstance(held, FlashQsaStaticLayer) or held.store is None:
            raise CacheMismatchError(f"cache: wanted a StaticCache that FlashQSA filled; got {type(held).__name__}")
        held.check_unspoilt()
        found.append(held)
    positions = cached_positions(cache)
    if positions is None:
        raise CacheMismatchError(
            "cache: wanted the positions of its columns, which a forward pass leaves there; got none"
        )
    if getattr(cache, "offloading", False):
        raise CacheMismatchError("cache: wanted one that stays on its device; got an offloading one")
    counts = [held.host_columns() for held in found]
    if len(set(counts)) > 1:
        raise CacheMismatchError(f"cache: wanted layers that hold the same columns; got {counts}: {DROP_CACHE}")
    if positions.shape[-1] != counts[0]:
        raise CacheMismatchError(
            f"cache: wanted positions of its {counts[0]} columns; got {positions.shape[-1]} (`finish` writes those of "
            "steps; who crops or resets a cache by hand does the same to its positions)"
        )
    return found, counts[0], positions


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
