"""Layers, caches and calls for the tests of `prepare`: what projections give, call by call, and where it goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from flashqsa import ops
from flashqsa.kernels.cpu.prepare import prepare as cpu_prepare
from flashqsa.kernels.nvrtc.prepare import prepare
from flashqsa.testing import compare, nasty
from flashqsa.testing.inputs import kv_pool
from flashqsa.values import FP8, IndexCache, KvCache, Projected, QsaSpec, Rows
from tests.nvrtc_emulate import Machine, copied, same_memory

EPS = 1e-6
SPEC = QsaSpec(q_heads=3, kv_heads=1, head_dim=48, index_heads=2, index_dim=32)


@dataclass(frozen=True)
class Layer:
    """One layer's shape, weights, and what its projections give for every token of some requests.

    fused        per request [tokens, width]: queries and gates head by head, keys, values, index queries, raw keys
    angles       per request [tokens, 2, rotary_dim / 2]
    table        [positions, 2, rotary_dim / 2], or None: angles by position, the same for all requests
    weights      of the norms of q, k, index_q and index_k
    skew         columns before the queries, so that nothing is aligned where it is odd
    """

    spec: QsaSpec
    fused: tuple[Tensor, ...]
    angles: tuple[Tensor, ...]
    table: Tensor | None
    weights: tuple[Tensor, ...]
    skew: int

    @property
    def dtype(self) -> torch.dtype:
        return self.fused[0].dtype

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(fused.shape[0] for fused in self.fused)

    def parts(self, fused: Tensor) -> list[Tensor]:
        """q, keys, values, index_q and raw_keys of projected rows, as views of them."""
        spec = self.spec
        q_size, kv_size = 2 * spec.q_heads * spec.head_dim, spec.kv_heads * spec.head_dim
        sizes = [self.skew, q_size, kv_size, kv_size, spec.index_heads * spec.index_dim, spec.index_dim]
        _, q, keys, values, index_q, raw_keys, _ = fused.split([*sizes, fused.shape[1] - sum(sizes)], dim=1)
        heads = [t.unflatten(1, (-1, spec.head_dim)) for t in (keys, values)]
        q = q.unflatten(1, (spec.q_heads, -1))[..., : spec.head_dim]
        return [q, *heads, index_q.unflatten(1, (-1, spec.index_dim)), raw_keys]


def layer_of(
    tokens: tuple[int, ...],
    spec: QsaSpec,
    dtype: torch.dtype,
    rotary_dim: int,
    *,
    by_position: bool = False,
    whole: bool = True,
    skew: int = 0,
    weight_dtype: torch.dtype | None = None,
    angle_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> Layer:
    """A layer of random numbers.

    With `whole` the means of raw keys are whole numbers or quarters: the squares of a pooled key's norm then add up
    exactly, so that no order of the sum can be told from another. Angles are of positions that repeat, as an image's.
    """
    generator = torch.Generator().manual_seed(seed)
    width = 2 * spec.q_heads * spec.head_dim + 2 * spec.kv_heads * spec.head_dim
    width += (spec.index_heads + 1) * spec.index_dim + skew
    width += -width % 16 + (16 if skew % 2 == 0 else 17)
    fused = [torch.randn(count, width, generator=generator).mul(3).to(dtype) for count in tokens]
    angles = [_angles(torch.randint(0, 4000, (count,), generator=generator), rotary_dim) for count in tokens]
    weights = [
        torch.randn(dim, generator=generator).mul(0.2).to(weight_dtype or dtype)
        for dim in (spec.head_dim, spec.head_dim, spec.index_dim, spec.index_dim)
    ]
    table = _angles(torch.arange(max(tokens) + 3), rotary_dim).to(angle_dtype or dtype) if by_position else None
    held = tuple(each.to(angle_dtype or dtype) for each in angles)
    layer = Layer(spec, tuple(fused), held, table, tuple(weights), skew)
    if whole:
        unit = 1 if spec.block_tokens in (1, 2, 4) else spec.block_tokens
        for part in fused:
            raw = layer.parts(part)[4]
            raw.copy_((torch.randint(-8, 9, raw.shape, generator=generator) * unit).to(dtype))
    return layer


def _angles(positions: Tensor, rotary_dim: int) -> Tensor:
    frequency = 1e7 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
    angles = positions.float()[:, None] * frequency
    return torch.stack((angles.cos(), angles.sin()), dim=1)


@dataclass(frozen=True)
class State:
    """What calls write."""

    kv_cache: KvCache
    index_cache: IndexCache
    first_angles: Tensor | None

    def on(self, machine: Machine) -> State:
        """A copy, memory and all."""
        kept = None if self.first_angles is None else copied(machine.device, self.first_angles)[0]
        return State(machine.kv_cache(self.kv_cache), machine.index_cache(self.index_cache), kept)

    @property
    def memory(self) -> dict[str, Tensor]:
        """Every tensor that is written, by name."""
        assert self.index_cache.raw_keys is not None
        named = {"keys": self.kv_cache.keys, "values": self.kv_cache.values, "index keys": self.index_cache.keys}
        kept = {} if self.first_angles is None else {"first angles": self.first_angles}
        return named | {"ring": self.index_cache.raw_keys} | kept


def state_of(
    layer: Layer,
    ring_tokens: int,
    *,
    kv_dtype: torch.dtype | None = None,
    index_dtype: torch.dtype | None = None,
    layout: str = "interleaved",
    page_tokens: int = 8,
    page_blocks: int = 2,
    scales: tuple[float | Tensor, float | Tensor] = (0.37, 1.7),
) -> State:
    """Caches for a layer's requests, full of NaN. Pages of the KV cache stand in random order."""
    spec, kv_dtype = layer.spec, kv_dtype or layer.dtype
    index_dtype = index_dtype or layer.dtype
    index_cache = nasty.empty_index_cache(layer.tokens, spec, index_dtype, layer.dtype, page_blocks, ring_tokens)
    columns = -(-max(layer.tokens) // page_tokens)
    pages = len(layer.tokens) * columns
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(pages)).view(-1, columns).to(torch.int32)
    pools = kv_pool(layout, (pages, page_tokens, spec.kv_heads, spec.head_dim), kv_dtype)
    kv_cache = KvCache(*pools, table, *(scales if kv_dtype == FP8 else (None, None)))
    kept = None
    if layer.table is None:
        shape = (len(layer.tokens), ring_tokens // spec.block_tokens, *layer.angles[0].shape[1:])
        kept = torch.full(shape, float("nan"), dtype=layer.angles[0].dtype)
    return State(kv_cache, index_cache, kept)


@dataclass(frozen=True)
class Call:
    """The rows of one call, what the projections give for them, and their angles; padding's are NaN."""

    rows: Rows
    fused: Tensor
    angles: Tensor


def call_of(layer: Layer, pieces: list[tuple[int, int, int]], gaps: dict[int, int] | None = None) -> Call:
    """A call of pieces (request, first token, end), with `gaps[i]` rows of padding before its i-th live row."""
    request: list[int] = []
    position: list[int] = []
    fused: list[Tensor] = []
    angles: list[Tensor] = []
    tokens = [(owner, token) for owner, start, stop in pieces for token in range(start, stop)]
    for live, (owner, token) in enumerate([*tokens, (-1, -1)]):
        for index in range((gaps or {}).get(live, 0)):
            # Either sign alone marks padding, and so does a position past the bound; the other number would count.
            request.append(owner if index % 3 else -1)
            position.append((max(token - 1, 0), -5, 1 << 20)[index % 3])
            fused.append(layer.fused[0].new_full((1, *layer.fused[0].shape[1:]), float("nan")))
            angles.append(layer.angles[0].new_full((1, *layer.angles[0].shape[1:]), float("nan")))
        if owner >= 0:
            request.append(owner)
            position.append(token)
            fused.append(layer.fused[owner][token : token + 1])
            angles.append(layer.angles[owner][token : token + 1])
    numbers = torch.tensor(request, dtype=torch.int32), torch.tensor(position, dtype=torch.int32)
    return Call(Rows(*numbers, max(token for _, token in tokens)), torch.cat(fused), torch.cat(angles))


def random_calls(layer: Layer, seed: int, most: int, padding: bool = True) -> list[Call]:
    """Calls that bring up to `most` tokens of each request at a time, requests in any order, padding anywhere."""
    generator = torch.Generator().manual_seed(seed)

    def upto(limit: int) -> int:
        return int(torch.randint(0, limit + 1, (), generator=generator))

    calls: list[Call] = []
    done = [0] * len(layer.tokens)
    while done != list(layer.tokens):
        pieces = []
        for owner in torch.randperm(len(done), generator=generator).tolist():
            step = min(upto(most), layer.tokens[owner] - done[owner])
            pieces += [(owner, done[owner], done[owner] + step)] if step else []
            done[owner] += step
        rows = sum(stop - start for _, start, stop in pieces)
        gaps = {upto(rows): upto(4) for _ in range(3)} if padding else {}
        calls += [call_of(layer, pieces, gaps)] if pieces else []
    return calls


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fresh memory holds NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def projected(
    layer: Layer, fused: Tensor, weights: Sequence[Tensor], angles: Tensor, first_angles: Tensor | None
) -> Projected:
    """What a call takes beside its caches: views of projected rows, and of angles [rows or positions, 2, half]."""
    q, keys, values, index_q, raw_keys = layer.parts(fused)
    q_norm, k_norm, index_q_norm, index_k_norm = weights
    cos, sin = angles.unbind(1)
    return Projected(
        q, keys, values, index_q, raw_keys, q_norm, k_norm, index_q_norm, index_k_norm, cos, sin, first_angles, EPS
    )


def run(
    function: Callable[..., tuple[Tensor, Tensor]],
    layer: Layer,
    call: Call,
    state: State,
    device: torch.device | str = "cpu",
    *last: Any,
) -> tuple[Tensor, Tensor]:
    """Calls one of the `prepare` functions; `last` is what comes after `spec`."""
    # One copy for all views: they share memory, as a fused projection's do.
    fused, angles = copied(device, call.fused, call.angles if layer.table is None else layer.table)
    new = projected(layer, fused, copied(device, *layer.weights), angles, state.first_angles)
    rows = replace(call.rows, request=call.rows.request.to(device), position=call.rows.position.to(device))
    return function(new, state.kv_cache, state.index_cache, rows, layer.spec, *last)


def run_both(machine: Machine, layer: Layer, calls: list[Call], state: State) -> State:
    """Makes calls on a machine and with the CPU kernels: results and all of the memory must have the same bytes.

    Rows of padding must be left as fresh memory was. Returns the machine's state.
    """
    ours = state.on(machine)
    for call in calls:
        with poisoned_memory():
            got = run(prepare, layer, call, ours, machine.device, machine.capability)
        wanted = run(cpu_prepare, layer, call, state)
        live = call.rows.live & (call.rows.position <= call.rows.max_position)
        for name, mine, theirs in zip(("q", "index_q"), got, wanted, strict=True):
            assert compare.same_bits(mine.cpu()[live], theirs[live]), name
            assert bool(mine.cpu()[~live].isnan().all()), f"padding is written to {name}"
        for name, memory in ours.memory.items():
            assert same_memory(memory, state.memory[name]), name
    return ours


# The public call.


def arguments_of(by_position: bool, cache_dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Arguments that the public call takes: 14 rows of two requests and 2 of padding, all in FP32 but the caches."""
    layer = layer_of((14, 9), SPEC, torch.float32, 16, by_position=by_position)
    state = state_of(layer, 8, kv_dtype=cache_dtype, index_dtype=cache_dtype)
    call = call_of(layer, [(1, 0, 5), (0, 0, 9)])
    padding = torch.full((2,), -1, dtype=torch.int32)
    rows = Rows(torch.cat([call.rows.request, padding]), torch.cat([call.rows.position, padding]), 8)
    fused, angles = (torch.cat([part, part.new_zeros(2, *part.shape[1:])]) for part in (call.fused, call.angles))
    angles = angles if layer.table is None else layer.table
    return {
        "projected": projected(layer, fused, layer.weights, angles, state.first_angles),
        "kv_cache": state.kv_cache,
        "index_cache": state.index_cache,
        "rows": rows,
        "spec": layer.spec,
    }


def operands_of(given: dict[str, Any]) -> tuple[Any, ...]:
    """The operator's operands for arguments of the public call."""
    new, kv, index, rows = given["projected"], given["kv_cache"], given["index_cache"], given["rows"]
    parts = [getattr(new, field.name) for field in fields(new)]
    scales = [None if scale is None else torch.as_tensor(scale).view(-1) for scale in (kv.k_scale, kv.v_scale)]
    caches = (kv.keys, kv.values, kv.page_table, *scales, index.keys, index.page_table, index.scale, index.raw_keys)
    return (*parts, *caches, rows.request, rows.position, rows.max_position, ops.pack_spec(given["spec"]))


@dataclass(frozen=True)
class Wrong:
    """One argument of the public call, or one field of one, changed so that it is refused.

    path      the argument (`rows`), or a field of one (`rows.position`)
    wanted    how the refusal goes on after "wanted"
    argument  what the refusal names, where that is not `path`
    """

    path: str
    change: Callable[[Any], Any]
    wanted: str
    argument: str | None = None

    def among(self, given: dict[str, Any]) -> dict[str, Any]:
        """The arguments with this one changed."""
        name, _, field = self.path.partition(".")
        value = given[name]
        changed = replace(value, **{field: self.change(getattr(value, field))}) if field else self.change(value)
        return {**given, name: changed}


ANGLES, KEPT = "[rows, rotary_dim / 2]", "[requests, ring_tokens / block_tokens, 2, rotary_dim / 2]"
WRONG = (
    Wrong("projected", lambda _: None, "a Projected; got NoneType"),
    Wrong("projected.q", lambda _: 1.0, "a tensor; got float"),
    Wrong("projected.q", lambda t: t[:-1], "shape [rows, q_heads, head_dim] = [16, 3, 48]; got [15, 3, 48]"),
    Wrong("projected.q", lambda t: t[:, 0], "3 dimensions [rows, q_heads, head_dim]; got 2: [16, 48]"),
    Wrong("projected.q", lambda t: t.double(), "dtype float32 or float16 or bfloat16; got float64"),
    Wrong("projected.keys", lambda t: t.half(), "dtype float32; got float16"),
    Wrong(
        "projected.keys", lambda t: t.expand(-1, 2, -1), "shape [rows, kv_heads, head_dim] = [16, 1, 48]; got [16, 2"
    ),
    Wrong("projected.values", lambda t: t.repeat_interleave(2, 2)[..., ::2], "a last stride of 1 in [rows, kv_heads,"),
    Wrong(
        "projected.index_q", lambda t: t[:, :1], "shape [rows, index_heads, index_dim] = [16, 2, 32]; got [16, 1, 32]"
    ),
    Wrong("projected.raw_keys", lambda t: t[:, None], "2 dimensions [rows, index_dim]; got 3"),
    Wrong("projected.raw_keys", lambda t: t.bfloat16(), "dtype float32; got bfloat16"),
    Wrong("projected.q_norm", lambda t: t[1:], "shape [head_dim] = [48]; got [47]"),
    Wrong("projected.q_norm", lambda t: t.to(FP8), "dtype float32 or float16 or bfloat16; got float8_e4m3fn"),
    Wrong("projected.k_norm", lambda t: t.half(), "dtype float32; got float16"),
    Wrong("projected.index_q_norm", lambda t: t[None], "1 dimensions [index_dim]; got 2"),
    Wrong("projected.index_k_norm", lambda t: t[1:], "shape [index_dim] = [32]; got [31]"),
    Wrong("projected.cos", lambda t: t[:-1], f"shape {ANGLES} = [16, rotary_dim / 2]; got [15, 8]"),
    Wrong("projected.sin", lambda t: t.half(), "dtype float32; got float16"),
    Wrong("projected.sin", lambda t: t[:, 1:], f"shape {ANGLES} = [16, 8]; got [16, 7]"),
    Wrong("projected.first_angles", lambda t: t[:, 1:], f"shape {KEPT} = [2, 2, 2, 8]; got [2, 1, 2, 8]"),
    Wrong("projected.first_angles", lambda t: t.half(), "dtype float32; got float16"),
    Wrong("projected.eps", lambda _: float("nan"), "a finite float of at least 0; got nan"),
    Wrong("projected.eps", lambda _: -1.0, "a finite float of at least 0; got -1.0"),
    Wrong("index_cache.raw_keys", lambda _: None, "a ring of raw keys [requests, ring_tokens, index_dim]; got none"),
    Wrong("index_cache.raw_keys", lambda t: t.half(), "dtype float32, as projected.q has; got float16"),
    Wrong("index_cache.keys", lambda t: t.half(), "dtype float32 or float8_e4m3fn, as projected.q has; got float16"),
    Wrong("spec", lambda s: replace(s, q_heads=0), "a whole number of at least 1; got 0", "spec.q_heads"),
    Wrong("rows", lambda _: 3, "a Rows; got int"),
    Wrong("rows.max_position", lambda _: 99, "pages for positions up to 99", "kv_cache.page_table"),
    Wrong("rows.position", lambda t: t + (t == 3).int(), "consecutive positions within a request; got"),
    Wrong("rows.request", lambda t: t + 2 * (t == 1).int(), "ids below 2; got 3"),
    Wrong("kv_cache.page_table", lambda t: t[:1], "2 requests, as index_cache has; got 1"),
    Wrong("kv_cache.page_table", lambda t: t + 90, "-1 or page ids below"),
    Wrong("index_cache.page_table", lambda t: t + 90, "-1 or page ids below"),
)
"""Of `arguments_of(by_position=False)`."""
