"""The only refusal of user input: the same values come back, or `InputError` is raised before work starts.

Everything here reads host facts (shapes, strides, dtypes, devices), in this order: ndim, size, device, dtype, stride,
shape, then what must agree between arguments. Tensors are read where value checks are on, and FP8 scales on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from flashqsa import knobs
from flashqsa.device import KNOWN_DEVICES, DeviceFacts
from flashqsa.plan import Plan
from flashqsa.route import PINS, Call, Stage, route_refusal
from flashqsa.values import (
    FP8,
    MAX_HEADS_PER_KV_HEAD,
    MAX_TOKENS,
    MAX_TOP_BLOCKS,
    IndexCache,
    KvCache,
    Projected,
    QsaSpec,
    Rows,
    Run,
    Selection,
)

FLOATS = (torch.float32, torch.float16, torch.bfloat16)

MAX_SCALE = 2.0**100
MIN_SCALE = 2.0**-60
"""Largest and smallest FP8 scale: kernels fold it with other factors in FP32, and no product may overflow or vanish."""


class InputError(ValueError):
    """An argument that cannot be served: which one, what was wanted, and what came.

    >>> print(InputError("q", "3 dimensions [rows, q_heads, head_dim]", "2"))
    q: wanted 3 dimensions [rows, q_heads, head_dim]; got 2
    """

    def __init__(self, argument: str, wanted: str, got: object) -> None:
        self.argument, self.wanted, self.got = argument, wanted, str(got)
        super().__init__(f"{argument}: wanted {wanted}; got {got}")

    def __reduce__(self) -> tuple[type[InputError], tuple[str, str, str]]:
        # An exception is pickled as its class and what it prints, which is not what this class takes.
        return type(self), (self.argument, self.wanted, self.got)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _tensor(
    argument: str,
    tensor: object,
    dims: Sequence[str],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    shape: Sequence[int | None],
) -> Tensor:
    """One tensor: ndim, size, device, dtype, unit last stride, shape (None: any)."""
    # Most calls are right, and a decode step makes hundreds of them: nothing is put into words before that is known.
    if isinstance(tensor, Tensor) and len(found := tensor.shape) == len(shape) and 0 not in found:
        fits = all(size is None or size == got for size, got in zip(shape, found, strict=True))
        if fits and tensor.dtype in dtypes and tensor.device == device and tensor.stride(-1) == 1:
            return tensor
    layout = f"[{', '.join(dims)}]"
    if not isinstance(tensor, Tensor):
        raise InputError(argument, f"a tensor {layout}", type(tensor).__name__)
    if tensor.ndim != len(dims):
        raise InputError(argument, f"{len(dims)} dimensions {layout}", f"{tensor.ndim}: {list(tensor.shape)}")
    for name, size in zip(dims[1:], tensor.shape[1:], strict=True):
        if size == 0 and name not in ("table_pages", "rows"):
            raise InputError(argument, f"{name} of at least 1", list(tensor.shape))
    if tensor.device != device:
        raise InputError(argument, f"device {device}", tensor.device)
    if tensor.dtype not in dtypes:
        raise InputError(argument, f"dtype {' or '.join(map(_name, dtypes))}", _name(tensor.dtype))
    if tensor.numel() and tensor.ndim and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise InputError(argument, f"a last stride of 1 in {layout}", f"strides {tensor.stride()}")
    wanted = [str(size) if size is not None else name for name, size in zip(dims, shape, strict=True)]
    if any(size is not None and size != got for size, got in zip(shape, tensor.shape, strict=True)):
        raise InputError(argument, f"shape {layout} = [{', '.join(wanted)}]", list(tensor.shape))
    return tensor


def _scale(argument: str, scale: object, dtype: torch.dtype, heads: int | None, device: torch.device) -> None:
    if dtype != FP8:
        if scale is not None:
            raise InputError(argument, f"none for a {_name(dtype)} cache", scale)
        return
    if scale is None:
        raise InputError(argument, "a scale for an FP8 cache", "none")
    if isinstance(scale, Tensor) and heads is not None:
        _tensor(argument, scale, ("kv_heads",), (torch.float32,), device, (heads,))
        if device.type == "cpu" and not bool(((scale >= MIN_SCALE) & (scale <= MAX_SCALE)).all()):
            raise InputError(argument, f"scales from {MIN_SCALE:g} to {MAX_SCALE:g}", scale.tolist())
    elif not isinstance(scale, (int, float)) or isinstance(scale, bool):
        raise InputError(argument, "a float" + (" or [kv_heads] float32" if heads else ""), type(scale).__name__)
    elif not MIN_SCALE <= scale <= MAX_SCALE:
        raise InputError(argument, f"a scale from {MIN_SCALE:g} to {MAX_SCALE:g}", scale)


def check_spec(spec: QsaSpec) -> QsaSpec:
    """The spec, or InputError: heads that do not divide, sizes out of range."""
    if not isinstance(spec, QsaSpec):
        raise InputError("spec", "a QsaSpec", type(spec).__name__)
    for name in ("q_heads", "kv_heads", "head_dim", "index_heads", "index_dim", "block_tokens", "top_blocks"):
        value = getattr(spec, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(f"spec.{name}", "a whole number of at least 1", repr(value))
    if spec.q_heads % spec.kv_heads:
        raise InputError("spec.q_heads", f"a multiple of kv_heads = {spec.kv_heads}", spec.q_heads)
    if spec.heads_per_kv_head > MAX_HEADS_PER_KV_HEAD:
        wanted = f"at most {MAX_HEADS_PER_KV_HEAD} query heads per KV head"
        raise InputError("spec.q_heads", wanted, f"{spec.q_heads} on {spec.kv_heads}")
    if spec.top_blocks > MAX_TOP_BLOCKS:
        raise InputError("spec.top_blocks", f"at most {MAX_TOP_BLOCKS}", spec.top_blocks)
    return spec


def device_of(argument: str, tensor: object) -> torch.device:
    """The device of a call: that of its queries."""
    if not isinstance(tensor, Tensor):
        raise InputError(argument, "a tensor", type(tensor).__name__)
    return tensor.device


def device_of_rows(rows: Rows) -> torch.device:
    """The device of a call that has no queries yet."""
    if not isinstance(rows, Rows):
        raise InputError("rows", "a Rows", type(rows).__name__)
    return device_of("rows.request", rows.request)


def device_of_projected(projected: Projected) -> torch.device:
    """The device of a call that has projections instead of queries."""
    if not isinstance(projected, Projected):
        raise InputError("projected", "a Projected", type(projected).__name__)
    return device_of("projected.q", projected.q)


def check_any_cache(kv_cache: KvCache | None, index_cache: IndexCache | None) -> KvCache | IndexCache:
    """The KV cache, else the index cache; InputError without either."""
    cache = kv_cache if kv_cache is not None else index_cache
    if cache is None:
        raise InputError("kv_cache, index_cache", "at least one cache", "none")
    return cache


def check_rows(rows: Rows, device: torch.device) -> Rows:
    """The rows, or InputError. Metadata is int32: `Rows.from_tensors` converts other integers."""
    if not isinstance(rows, Rows):
        raise InputError("rows", "a Rows", type(rows).__name__)
    _tensor("rows.request", rows.request, ("rows",), (torch.int32,), device, (None,))
    _tensor("rows.position", rows.position, ("rows",), (torch.int32,), device, (rows.count,))
    if not isinstance(rows.max_position, int) or not -1 <= rows.max_position < MAX_TOKENS:
        raise InputError("rows.max_position", f"a whole number from -1 to {MAX_TOKENS - 1}", rows.max_position)
    if rows.runs is not None:
        if not isinstance(rows.runs, tuple):
            raise InputError("rows.runs", "a tuple of Run, or None", type(rows.runs).__name__)
        if rows.run_fault is not None:
            raise InputError("rows.runs", *rows.run_fault)
    return rows


def _runs_within(rows: Rows, requests: int) -> None:
    if rows.highest_request >= requests:
        raise InputError("rows.runs", f"requests below {requests}", rows.highest_request)


def check_kv_cache(cache: KvCache, spec: QsaSpec, device: torch.device, max_position: int) -> KvCache:
    """The KV cache, or InputError."""
    if not isinstance(cache, KvCache):
        raise InputError("kv_cache", "a KvCache", type(cache).__name__)
    dims = ("pages", "page_tokens", "kv_heads", "head_dim")
    heads = (spec.kv_heads, spec.head_dim)
    _tensor("kv_cache.keys", cache.keys, dims, (*FLOATS, FP8), device, (None, None, *heads))
    shape = (cache.keys.shape[0], cache.page_tokens, *heads)
    _tensor("kv_cache.values", cache.values, dims, (cache.keys.dtype,), device, shape)
    if cache.page_tokens % spec.block_tokens:
        wanted = f"a page size that is a multiple of {spec.block_tokens} tokens"
        raise InputError("kv_cache.keys", wanted, cache.page_tokens)
    _page_table("kv_cache", cache.page_table, device, cache.page_tokens, max_position)
    _scale("kv_cache.k_scale", cache.k_scale, cache.keys.dtype, spec.kv_heads, device)
    _scale("kv_cache.v_scale", cache.v_scale, cache.keys.dtype, spec.kv_heads, device)
    return cache


def check_index_cache(cache: IndexCache, spec: QsaSpec, device: torch.device, max_position: int) -> IndexCache:
    """The index cache, or InputError."""
    if not isinstance(cache, IndexCache):
        raise InputError("index_cache", "an IndexCache", type(cache).__name__)
    dims = ("pages", "page_blocks", "index_dim")
    _tensor("index_cache.keys", cache.keys, dims, (*FLOATS, FP8), device, (None, None, spec.index_dim))
    # A request's open block has no key yet, so only complete blocks need a page.
    complete = spec.visible_blocks(max_position) * spec.block_tokens - 1
    _page_table("index_cache", cache.page_table, device, cache.page_blocks * spec.block_tokens, complete)
    if isinstance(cache.scale, Tensor):
        raise InputError("index_cache.scale", "a float", "a tensor")
    _scale("index_cache.scale", cache.scale, cache.keys.dtype, None, device)
    if cache.raw_keys is not None:
        dims = ("requests", "ring_tokens", "index_dim")
        shape = (cache.requests, None, spec.index_dim)
        _tensor("index_cache.raw_keys", cache.raw_keys, dims, FLOATS, device, shape)
        if cache.raw_keys.shape[1] % spec.block_tokens:
            wanted = f"ring_tokens that is a multiple of {spec.block_tokens}"
            raise InputError("index_cache.raw_keys", wanted, cache.raw_keys.shape[1])
    return cache


def _page_table(cache: str, table: Tensor, device: torch.device, page_tokens: int, max_position: int) -> None:
    _tensor(f"{cache}.page_table", table, ("requests", "table_pages"), (torch.int32,), device, (None, None))
    capacity = table.shape[1] * page_tokens
    if max_position >= capacity:
        wanted = f"pages for positions up to {max_position}"
        raise InputError(f"{cache}.page_table", wanted, f"{list(table.shape)}: {capacity} tokens per request")


def check_index_q(index_q: Tensor, index_cache: IndexCache, rows: Rows, spec: QsaSpec) -> Tensor:
    """`index_q` [rows, index_heads, index_dim] in the index cache's dtype (any float for an FP8 cache)."""
    _runs_within(rows, index_cache.requests)
    dtypes = FLOATS if index_cache.keys.dtype == FP8 else (index_cache.keys.dtype,)
    dims = ("rows", "index_heads", "index_dim")
    return _tensor(
        "index_q", index_q, dims, dtypes, rows.request.device, (rows.count, spec.index_heads, spec.index_dim)
    )


def check_q(q: Tensor, kv_cache: KvCache, gate: Tensor | None, rows: Rows, spec: QsaSpec) -> Tensor:
    """`q` and `gate` [rows, q_heads, head_dim] in the KV cache's dtype (any float for an FP8 cache)."""
    _runs_within(rows, kv_cache.requests)
    dtypes = FLOATS if kv_cache.keys.dtype == FP8 else (kv_cache.keys.dtype,)
    dims, shape = ("rows", "q_heads", "head_dim"), (rows.count, spec.q_heads, spec.head_dim)
    _tensor("q", q, dims, dtypes, rows.request.device, shape)
    if gate is not None:
        _tensor("gate", gate, dims, (q.dtype,), q.device, shape)
    return q


def check_selection(selection: Selection | None, rows: Rows, spec: QsaSpec) -> Selection | None:
    """The selection, or InputError; None means all visible blocks and is refused where a row may see more."""
    if selection is None:
        if not spec.selects_everything(rows.max_position):
            wanted = f"a Selection, since rows see up to {spec.visible_blocks(rows.max_position)} blocks"
            raise InputError("selection", f"{wanted} and attend to {spec.top_blocks}", "none")
        return None
    if not isinstance(selection, Selection):
        raise InputError("selection", "a Selection", type(selection).__name__)
    device = rows.request.device
    dims, shape = ("rows", "top_blocks"), (rows.count, spec.top_blocks)
    _tensor("selection.blocks", selection.blocks, dims, (torch.int32,), device, shape)
    _tensor("selection.count", selection.count, ("rows",), (torch.int32,), device, (rows.count,))
    return selection


def check_plan(
    plan: Plan | None,
    call: Call,
    device: torch.device,
    route: str | None,
    batch_invariant: bool | None,
    stages: Sequence[Stage],
) -> Plan | None:
    """The plan, or InputError where it does not suit the call that is about to be made.

    call    of this call's own tensors; the fields of a stage that is not among `stages` are not looked at

    A plan may be for a larger bound on positions. Raises InputError for a plan of another batch, dtype or device, for
    one whose route these tensors cannot take, or beside a named route or another `batch_invariant`. Raises NoRouteError
    where the plan has no route for one of the stages.
    """
    if plan is None:
        return None
    if not isinstance(plan, Plan):
        raise InputError("plan", "a Plan", type(plan).__name__)
    if route is not None:
        raise InputError("route", "no route beside a plan, which has its own", repr(route))
    made_for = plan.call
    if batch_invariant is not None and batch_invariant != made_for.batch_invariant:
        raise InputError("batch_invariant", "the plan's", batch_invariant)
    same = (made_for.spec, made_for.rows, made_for.requests) == (call.spec, call.rows, call.requests)
    if not same or call.max_position > made_for.max_position:
        raise InputError("plan", f"a plan of {_batch(call)}", f"one of {_batch(made_for)}")
    if not plan.fits_device(device):
        raise InputError("plan", f"one for {device}", f"one for {plan.facts.name} ({plan.facts.arch})")
    for stage in stages:
        chosen = plan.decision(stage).route
        _stage_dtypes(stage, call, made_for)
        reason = route_refusal(chosen, call, plan.facts)
        if reason is not None and chosen.mode == "dense" and call.selection_given:
            raise InputError("plan", "one made with selection_given=True, since a selection is given", "a dense one")
        if reason is not None:
            raise InputError("plan", "one whose route these tensors can take", f"{chosen}: {reason}")
    return plan


def _batch(call: Call) -> str:
    return f"{call.rows} rows of {call.requests} requests, positions to {call.max_position}, for {call.spec}"


def _stage_dtypes(stage: Stage, call: Call, made_for: Call) -> None:
    """Storage dtypes that a stage's sizes were made for."""
    if stage == "attend":
        wanted, got = call.cache_dtype, made_for.cache_dtype
    else:
        wanted, got = call.index_cache_dtype or call.cache_dtype, made_for.index_cache_dtype or made_for.cache_dtype
        if wanted == got and call.index_q_bytes != made_for.index_q_bytes:
            wanted, got = call.index_q_dtype or call.q_dtype, made_for.index_q_dtype or made_for.q_dtype
    if wanted != got:
        raise InputError("plan", f"one for {_name(wanted)} in the {stage} stage", f"one for {_name(got)}")


def wants_batch_invariance(batch_invariant: bool | None, plan: Plan | None = None) -> bool:
    """The plan's, else the argument, else FLASHQSA_BATCH_INVARIANT."""
    if isinstance(plan, Plan):
        return plan.call.batch_invariant
    if batch_invariant is None:
        return knobs.BATCH_INVARIANT.read() == "on"
    if not isinstance(batch_invariant, bool):
        raise InputError("batch_invariant", "True, False or None", repr(batch_invariant))
    return batch_invariant


def check_pin(route: str | None) -> str | None:
    """The pinned route, from the argument or FLASHQSA_ROUTE; InputError or KnobError for a name no route has."""
    wanted = f"one of {', '.join(sorted(PINS))}"
    if route is None:
        pin = knobs.ROUTE.read()
        if pin and pin not in PINS:
            raise knobs.KnobError(f"{knobs.ROUTE.name}: wanted {wanted}; got {pin!r}")
        return pin or None
    if not isinstance(route, str) or route not in PINS:
        raise InputError("route", wanted, repr(route))
    return route


def check_device(device: torch.device | str | int | DeviceFacts) -> torch.device | DeviceFacts:
    """The device that is meant: one of torch's, or facts of one that need not be here; InputError for anything else."""
    wanted = f"a device, a CUDA device's number, DeviceFacts, or one of {', '.join(KNOWN_DEVICES)}"
    if isinstance(device, (torch.device, DeviceFacts)):
        return device
    if isinstance(device, int) and not isinstance(device, bool) and device >= 0:
        return torch.device("cuda", device)
    if not isinstance(device, str):
        raise InputError("device", wanted, repr(device))
    try:
        return torch.device(device)
    except RuntimeError:
        pass
    try:
        return DeviceFacts.named(device)
    except KeyError:
        raise InputError("device", wanted, repr(device)) from None


def wants_value_checks(check_values: bool | None, device: torch.device) -> bool:
    """Whether to read tensors: the argument, else FLASHQSA_CHECK_VALUES, else only where it costs no device sync."""
    if check_values is not None:
        return check_values
    mode = knobs.CHECK_VALUES.read()
    return mode == "on" or (mode == "auto" and device.type == "cpu")


def _entries(argument: str, wanted: str, values: Tensor, bad: Tensor) -> None:
    if bool(bad.any()):
        where = bad.nonzero()[0].tolist()
        raise InputError(argument, wanted, f"{values[tuple(where)].item()} at {where}")


def check_row_values(rows: Rows, requests: int, *, consecutive: bool = False) -> None:
    """Reads the row metadata: request ids in range, positions within the bound and ascending within a request.

    With `consecutive` the rows of a request must be consecutive tokens. What stands beside a -1 in a padding row is not
    looked at.
    """
    request, position, live = rows.request, rows.position, rows.live
    _entries("rows.request", f"ids below {requests}", request, live & (request >= requests))
    wanted = f"positions up to max_position = {rows.max_position}"
    _entries("rows.position", wanted, position, live & (position > rows.max_position))
    held, at = request[live], position[live]
    same = held[1:] == held[:-1]
    bad = torch.zeros_like(live)
    out_of_order = at[1:] != at[:-1] + 1 if consecutive else at[1:] <= at[:-1]
    bad[live.nonzero().flatten()[1:]] = same & out_of_order
    wanted = "consecutive" if consecutive else "ascending"
    _entries("rows.position", f"{wanted} positions within a request", position, bad)
    runs = held[:1].tolist() + held[1:][~same].tolist()
    if len(set(runs)) != len(runs):
        raise InputError("rows.request", "the rows of a request next to each other", "a request that comes twice")
    if rows.runs:
        _check_run_values(rows, rows.runs)


def _check_run_values(rows: Rows, given: tuple[Run, ...]) -> None:
    """Reads the row metadata behind `rows.runs`: each row its run's, within the bound, or padding."""
    runs = torch.tensor(given, dtype=torch.int64, device=rows.request.device)
    length = runs[:, 2] - runs[:, 1]
    # Row by row: how many rows are left of its run, and its place among all rows.
    ends = length.cumsum(0).repeat_interleave(length)
    left = ends - 1 - torch.arange(ends.shape[0], device=ends.device)
    place = runs[:, 2].repeat_interleave(length) - 1 - left
    owner, bound = torch.full_like(rows.request, -1), torch.full_like(rows.position, rows.max_position)
    owner[place] = runs[:, 0].repeat_interleave(length).int()
    bound[place] = (runs[:, 3].repeat_interleave(length) - left).int()
    live = rows.live
    _entries("rows.runs", "the request of each row", rows.request, live & (owner >= 0) & (rows.request != owner))
    wanted = "a last_position that no row's position passes"
    _entries("rows.runs", wanted, rows.position, live & (rows.position > bound))


def check_table_values(cache: str, table: Tensor, pages: int) -> None:
    """Reads a page table: every entry a page, or -1 for a hole."""
    _entries(f"{cache}.page_table", f"-1 or page ids below {pages}", table, (table < -1) | (table >= pages))


def check_selection_values(selection: Selection, rows: Rows, spec: QsaSpec) -> None:
    """Reads a selection: counts in range, ids ascending and visible, -1 after them."""
    blocks, count = selection.blocks, selection.count
    visible = rows.visible_blocks(spec)
    _entries("selection.count", "0 to top_blocks, at most the visible blocks", count, (count < 0) | (count > visible))
    _entries("selection.count", f"at most top_blocks = {spec.top_blocks}", count, count > spec.top_blocks)
    chosen = torch.arange(blocks.shape[1], device=blocks.device) < count[:, None]
    bad = torch.where(chosen, (blocks < 0) | (blocks >= visible[:, None]), blocks != -1)
    _entries("selection.blocks", "visible block ids, then -1", blocks, bad)
    falling = chosen[:, 1:] & (blocks[:, 1:] <= blocks[:, :-1])
    _entries("selection.blocks", "ascending block ids", blocks[:, 1:], falling)


def check_new_kv(keys: Tensor, values: Tensor, cache: KvCache, rows: Rows, spec: QsaSpec) -> None:
    """`keys` and `values` [rows, kv_heads, head_dim] that are about to be written to a KV cache."""
    dtypes = FLOATS if cache.keys.dtype == FP8 else (cache.keys.dtype,)
    dims, shape = ("rows", "kv_heads", "head_dim"), (rows.count, spec.kv_heads, spec.head_dim)
    _tensor("keys", keys, dims, dtypes, rows.request.device, shape)
    _tensor("values", values, dims, (keys.dtype,), rows.request.device, shape)


def check_raw_keys(
    raw_keys: Tensor,
    cache: IndexCache,
    rows: Rows,
    spec: QsaSpec,
    norm_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> None:
    """Raw index keys, one per row, that are about to be pooled and written, with what pooling needs."""
    device = rows.request.device
    if cache.raw_keys is None:
        raise InputError("index_cache.raw_keys", "a ring of raw keys [requests, ring_tokens, index_dim]", "none")
    shape = (rows.count, spec.index_dim)
    _tensor("raw_keys", raw_keys, ("rows", "index_dim"), (cache.raw_keys.dtype,), device, shape)
    _tensor("norm_weight", norm_weight, ("index_dim",), FLOATS, device, (spec.index_dim,))
    _tensor("cos", cos, ("rows", "rotary_dim"), FLOATS, device, (rows.count, None))
    _tensor("sin", sin, ("rows", "rotary_dim"), (cos.dtype,), device, tuple(cos.shape))
    if cos.shape[1] % 2 or cos.shape[1] > spec.index_dim:
        raise InputError("cos", f"an even rotary_dim, at most index_dim = {spec.index_dim}", cos.shape[1])
    _epsilon("eps", eps)


def _epsilon(argument: str, eps: object) -> None:
    if not isinstance(eps, float) or not math.isfinite(eps) or eps < 0:
        raise InputError(argument, "a finite float of at least 0", repr(eps))


def check_projected(
    projected: Projected, kv_cache: KvCache, index_cache: IndexCache, rows: Rows, spec: QsaSpec
) -> Projected:
    """What a layer's projections give, one row each, beside the caches that it goes to, which were checked."""
    device, count, ring = rows.request.device, rows.count, index_cache.raw_keys
    heads, index_heads = ("rows", "q_heads", "head_dim"), ("rows", "index_heads", "index_dim")
    kv_heads, kv_shape = ("rows", "kv_heads", "head_dim"), (count, spec.kv_heads, spec.head_dim)
    q = _tensor("projected.q", projected.q, heads, FLOATS, device, (count, spec.q_heads, spec.head_dim))
    _tensor("projected.keys", projected.keys, kv_heads, (q.dtype,), device, kv_shape)
    _tensor("projected.values", projected.values, kv_heads, (q.dtype,), device, kv_shape)
    index_shape = (count, spec.index_heads, spec.index_dim)
    _tensor("projected.index_q", projected.index_q, index_heads, (q.dtype,), device, index_shape)
    _tensor(
        "projected.raw_keys", projected.raw_keys, ("rows", "index_dim"), (q.dtype,), device, (count, spec.index_dim)
    )
    if ring is None:
        raise InputError("index_cache.raw_keys", "a ring of raw keys [requests, ring_tokens, index_dim]", "none")
    for name, held, dtypes in (
        ("kv_cache.keys", kv_cache.keys, (q.dtype, FP8)),
        ("index_cache.keys", index_cache.keys, (q.dtype, FP8)),
        ("index_cache.raw_keys", ring, (q.dtype,)),
    ):
        if held.dtype not in dtypes:
            raise InputError(name, f"dtype {' or '.join(map(_name, dtypes))}, as projected.q has", _name(held.dtype))
    weights: Sequence[torch.dtype] = FLOATS
    for name, dim in (("q", "head_dim"), ("k", "head_dim"), ("index_q", "index_dim"), ("index_k", "index_dim")):
        argument = f"projected.{name}_norm"
        weight = getattr(projected, f"{name}_norm")
        weights = (_tensor(argument, weight, (dim,), weights, device, (getattr(spec, dim),)).dtype,)
    _check_angles(projected, index_cache, ring, rows, spec)
    _epsilon("projected.eps", projected.eps)
    check_requests(index_cache, kv_cache)
    return projected


def _check_angles(projected: Projected, cache: IndexCache, ring: Tensor, rows: Rows, spec: QsaSpec) -> None:
    """Rotary angles by row, where those of blocks' first tokens are kept, or by position."""
    device, kept = rows.request.device, projected.first_angles
    by_row = kept is not None
    dims = ["rows" if by_row else "positions", "rotary_dim / 2"]
    cos = _tensor("projected.cos", projected.cos, dims, FLOATS, device, (rows.count if by_row else None, None))
    _tensor("projected.sin", projected.sin, dims, (cos.dtype,), device, tuple(cos.shape))
    if 2 * cos.shape[1] > min(spec.head_dim, spec.index_dim):
        wanted = f"a rotary_dim of at most head_dim = {spec.head_dim} and index_dim = {spec.index_dim}"
        raise InputError("projected.cos", wanted, 2 * cos.shape[1])
    if not by_row and cos.shape[0] <= rows.max_position:
        raise InputError("projected.cos", f"angles of positions up to {rows.max_position}", f"{cos.shape[0]} of them")
    if by_row:
        dims = ["requests", "ring_tokens / block_tokens", "2", "rotary_dim / 2"]
        shape = (cache.requests, ring.shape[1] // spec.block_tokens, 2, cos.shape[1])
        _tensor("projected.first_angles", kept, dims, (cos.dtype,), device, shape)


def check_q_dtype(dtype: torch.dtype | None) -> torch.dtype | None:
    """The dtype of queries that are not there yet, or None for the cache's."""
    if dtype is not None and dtype not in FLOATS:
        raise InputError("q_dtype", f"one of {', '.join(map(_name, FLOATS))}", dtype)
    return dtype


def check_requests(index_cache: IndexCache, kv_cache: KvCache) -> None:
    """Both caches hold the same requests."""
    if index_cache.requests != kv_cache.requests:
        wanted = f"{index_cache.requests} requests, as index_cache has"
        raise InputError("kv_cache.page_table", wanted, kv_cache.requests)


def check_parts(
    outputs: Tensor | Sequence[Tensor], lses: Tensor | Sequence[Tensor], gate: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Outputs [parts, rows, q_heads, head_dim] and lses [parts, rows, q_heads] FP32 of parts of rows, contiguous."""
    outputs, lses = _stacked("outputs", outputs), _stacked("lses", lses)
    device, dims = outputs.device, ("parts", "rows", "q_heads", "head_dim")
    _tensor("outputs", outputs, dims, FLOATS, device, (None,) * 4)
    if not outputs.shape[0]:
        raise InputError("outputs", "at least one part", "none")
    _tensor("lses", lses, dims[:-1], (torch.float32,), device, tuple(outputs.shape[:-1]))
    if gate is not None:
        _tensor("gate", gate, dims[1:], FLOATS, device, tuple(outputs.shape[1:]))
    return outputs, lses


def _stacked(argument: str, parts: Tensor | Sequence[Tensor]) -> Tensor:
    """Parts as one contiguous tensor."""
    if isinstance(parts, Tensor):
        return parts.contiguous()
    if not isinstance(parts, (list, tuple)) or not all(isinstance(part, Tensor) for part in parts):
        raise InputError(argument, "a tensor, or a list of one tensor for each part", type(parts).__name__)
    if not parts:
        raise InputError(argument, "at least one part", "none")
    for part in parts[1:]:
        for kind in ("device", "dtype", "shape"):
            wanted, got = getattr(parts[0], kind), getattr(part, kind)
            if wanted != got:
                raise InputError(argument, f"parts of one {kind}, {wanted} as the first", got)
    return torch.stack(tuple(parts))
