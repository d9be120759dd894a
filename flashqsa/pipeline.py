"""The whole story on one page: check, route, plan, then score, top-k, worklist, attend, merge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from flashqsa import capture, check, reference
from flashqsa.attend_shape import Layout
from flashqsa.device import DeviceFacts
from flashqsa.kernels import cpu
from flashqsa.machine import facts_here
from flashqsa.plan import STAGES, Plan, make_plan
from flashqsa.reference.prepare import prepare as reference_prepare
from flashqsa.route import Call, Route, Stage, announce
from flashqsa.select_shape import begins_aligned
from flashqsa.values import FP8, IndexCache, KvCache, Projected, QsaSpec, Rows, Selection

KERNEL_SETS: dict[str, ModuleType] = {"cpu": cpu}
"""The kernel sets that were used so far, by name."""


def kernel_set(name: str) -> ModuleType:
    """A kernel set, imported at its first use: those for GPUs need packages that not every machine has."""
    if name not in KERNEL_SETS:
        KERNEL_SETS[name] = import_module(f"flashqsa.kernels.{name}")
    return KERNEL_SETS[name]


def plan_batch(
    rows: Rows,
    spec: QsaSpec,
    *,
    index_cache: IndexCache | None = None,
    kv_cache: KvCache | None = None,
    q_dtype: torch.dtype | None = None,
    selection_given: bool = True,
    batch_invariant: bool | None = None,
    route: str | None = None,
) -> Plan:
    """Routes and sizes for a batch, to be passed as `plan=` to every layer's call.

    Takes the caches (one of them at least) for their dtype, layout and number of requests; a cache that is not given is
    taken to be of the other's dtype. `q_dtype` is that of queries and index queries: the cache's by default, BF16 for
    an FP8 cache. Queries and gates are taken to have heads that begin at multiples of 16 bytes, as fresh tensors have.
    With `selection_given=False` the plan is for `qsa_attention`, or for `sparse_attention` without a Selection, and may
    take the dense route. Raises InputError, KnobError, and NoRouteError where the stage of a given cache has no route.
    """
    check.check_spec(spec)
    cache = check.check_any_cache(kv_cache, index_cache)
    check.check_rows(rows, device := check.device_of_rows(rows))
    stages: tuple[Stage, ...] = ()
    if index_cache is not None:
        check.check_index_cache(index_cache, spec, device, rows.max_position)
        stages = ("select",)
    if kv_cache is not None:
        check.check_kv_cache(kv_cache, spec, device, rows.max_position)
        stages = (*stages, "attend")
    check.check_q_dtype(q_dtype)
    dtype, index_dtype = ((c or cache).keys.dtype for c in (kv_cache, index_cache))
    call = Call(
        spec,
        rows.count,
        cache.requests,
        rows.max_position,
        q_dtype or _q_dtype(dtype),
        dtype,
        q_dtype or _q_dtype(index_dtype),
        index_dtype,
        Layout() if kv_cache is None else Layout.of(kv_cache, spec),
        index_cache is None or begins_aligned(index_cache.keys),
        selection_given,
        check.wants_batch_invariance(batch_invariant),
    )
    return make_plan(call, facts_here(device), check.check_pin(route), stages)


def select_blocks(
    index_q: Tensor,
    index_cache: IndexCache,
    rows: Rows,
    spec: QsaSpec,
    *,
    plan: Plan | None = None,
    route: str | None = None,
    batch_invariant: bool | None = None,
    check_values: bool | None = None,
) -> Selection:
    """Selects each row's best blocks: by score descending, then block id ascending; handed on in ascending order.

    index_q          [rows, index_heads, index_dim], normalised and rotated, in the index cache's dtype (any float for
                     an FP8 cache)
    plan             from `plan_batch`; worked out here when absent
    route            pins a route by mode, kernel set or both; it is used or NoRouteError is raised
    batch_invariant  gives a row the same bits whatever shares its launch; default by FLASHQSA_BATCH_INVARIANT. A plan
                     has its own.
    check_values     reads row metadata and page tables for bad entries; default by FLASHQSA_CHECK_VALUES

    The score of block b is index_dim^(-1/2) * sum over heads of relu(<index_q[row, head], key[b]>), in FP32. Blocks
    that score NaN or -inf are never selected. Rows that see no more blocks than they may select take them all.

    Raises InputError, NoRouteError, KnobError, all before work starts.
    """
    _check_index_call(index_q, index_cache, rows, spec, check_values)
    call = _select_call(index_q, index_cache, rows, spec, check.wants_batch_invariance(batch_invariant, plan))
    plan = _plan(plan, call, rows, route, batch_invariant, ("select",))
    return _select(index_q, index_cache, rows, spec, plan)


def _select(index_q: Tensor, index_cache: IndexCache, rows: Rows, spec: QsaSpec, plan: Plan) -> Selection:
    """`select_blocks` of what has been checked and planned."""
    capture.note("select_blocks", spec, rows, plan, index_q=index_q, index_cache=index_cache)
    chosen = _announced(plan, "select", rows)
    if chosen.mode == "reference":
        return reference.select_blocks(index_q, index_cache, rows, spec)
    kernels = kernel_set(chosen.kernel_set)
    selection: Selection
    if chosen.mode == "everything":
        selection = kernels.select_everything(index_cache, rows, spec, plan.select)
        return selection
    if chosen.mode == "fused":
        # Scores of a tile are ranked before the next tile is scored: no row's scores lie in memory as a whole.
        selection = kernels.select_fused(index_q, index_cache, rows, spec, plan.select)
        return selection
    selection = kernels.empty_selection(rows, spec)
    if 0 < rows.count <= plan.select.chunk_rows:
        scores = kernels.score(index_q, index_cache, rows, spec, plan.select)
        kernels.topk(scores, selection, plan.select)
        return selection
    for start, stop in plan.select.chunks(rows.count):
        part = rows.slice(start, stop)
        scores = kernels.score(index_q[start:stop], index_cache, part, spec, plan.select)
        kernels.topk(scores, selection.slice(start, stop), plan.select)
        del scores  # before the next chunk's are made: two would take twice the workspace
    return selection


def sparse_attention(
    q: Tensor,
    kv_cache: KvCache,
    selection: Selection | None,
    rows: Rows,
    spec: QsaSpec,
    gate: Tensor | None = None,
    return_lse: bool = False,
    *,
    plan: Plan | None = None,
    route: str | None = None,
    batch_invariant: bool | None = None,
    check_values: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Grouped-query attention of each row over its selected blocks and its tail.

    q           [rows, q_heads, head_dim], normalised and rotated, in the KV cache's dtype (any float for FP8)
    selection   from `select_blocks`; None only where no row sees more than `spec.top_blocks` blocks
    gate        [rows, q_heads, head_dim] before its sigmoid; multiplies the rounded output in FP32
    return_lse  also return [rows, q_heads] FP32, the natural log-sum-exp of the scaled logits

    Returns [rows, q_heads, head_dim] in q's dtype. A row that sees nothing has output 0 and lse -inf. For inference:
    no gradient is recorded.

    Raises InputError, NoRouteError, KnobError, all before work starts.
    """
    _check_kv_call(q, kv_cache, selection, rows, spec, gate, check_values)
    invariant = check.wants_batch_invariance(batch_invariant, plan)
    call = _attend_call(q, kv_cache, gate, rows, spec, invariant, selection is not None)
    plan = _plan(plan, call, rows, route, batch_invariant, ("attend",))
    return _attend(q, kv_cache, selection, rows, spec, gate, return_lse, plan)


def _attend(
    q: Tensor,
    kv_cache: KvCache,
    selection: Selection | None,
    rows: Rows,
    spec: QsaSpec,
    gate: Tensor | None,
    return_lse: bool,
    plan: Plan,
) -> Tensor | tuple[Tensor, Tensor]:
    """`sparse_attention` of what has been checked and planned."""
    capture.note("sparse_attention", spec, rows, plan, q=q, gate=gate, kv_cache=kv_cache, selection=selection)
    chosen = _announced(plan, "attend", rows)
    output: Tensor
    lse: Tensor
    if chosen.mode == "reference":
        output, lse = reference.sparse_attention(q, kv_cache, selection, rows, spec, gate)
    else:
        # Worklist, attend and merge, in as many launches as the kernel set makes of them.
        kernels = kernel_set(chosen.kernel_set)
        output, lse = kernels.sparse_attention(q, kv_cache, selection, rows, spec, gate, return_lse, plan.attend)
    return (output, lse) if return_lse else output


def qsa_attention(
    index_q: Tensor,
    q: Tensor,
    index_cache: IndexCache,
    kv_cache: KvCache,
    rows: Rows,
    spec: QsaSpec,
    gate: Tensor | None = None,
    return_lse: bool = False,
    *,
    plan: Plan | None = None,
    route: str | None = None,
    batch_invariant: bool | None = None,
    check_values: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`select_blocks`, then `sparse_attention` on its selection: arguments, results and errors are theirs.

    Where no row sees more blocks than it may select, nothing is scored or selected, and only the holes of the KV cache
    count: both caches are taken to have the same ones.
    """
    _check_index_call(index_q, index_cache, rows, spec, check_values)
    _check_kv_call(q, kv_cache, None, rows, spec, gate, check_values, after_index=True)
    check.check_requests(index_cache, kv_cache)
    invariant = check.wants_batch_invariance(batch_invariant, plan)
    call = _attend_call(q, kv_cache, gate, rows, spec, invariant, selection_given=False)
    call = replace(
        call,
        index_q_dtype=index_q.dtype,
        index_cache_dtype=index_cache.keys.dtype,
        index_aligned=begins_aligned(index_q, index_cache.keys),
    )
    plan = _plan(plan, call, rows, route, batch_invariant, STAGES)
    selection = None
    if plan.attend_decision.route.mode != "dense":
        selection = _select(index_q, index_cache, rows, spec, plan)
    return _attend(q, kv_cache, selection, rows, spec, gate, return_lse, plan)


def write_index_keys(
    raw_keys: Tensor,
    index_cache: IndexCache,
    rows: Rows,
    spec: QsaSpec,
    *,
    norm_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float = 1e-6,
    check_values: bool | None = None,
) -> None:
    """Stores new raw index keys and, for each row that closes a block, the block's pooled key.

    raw_keys     [rows, index_dim] before norm and rotary, in the dtype of `index_cache.raw_keys`
    norm_weight  [index_dim], the RMS norm's weight; the key is multiplied by 1 + weight
    cos, sin     [rows, rotary_dim], rotary angles of the first token of the block the row is in (NeoX halves: entry j
                 and j + rotary_dim / 2 rotate together; dimensions from rotary_dim on pass)
    eps          the norm's epsilon

    A block's key is rope(rms(round(mean of its raw keys in FP32))), each rounded to the raw keys' dtype (Transformers'
    Qwen4ExpTextQSAIndexer). Rows of one request must be consecutive tokens. Raw keys that this call does not bring are
    read from the ring, so `index_cache.raw_keys` is required. Writes in place. Raises InputError.
    """
    check.check_spec(spec)
    device = check.device_of("raw_keys", raw_keys)
    check.check_rows(rows, device)
    check.check_index_cache(index_cache, spec, device, rows.max_position)
    check.check_raw_keys(raw_keys, index_cache, rows, spec, norm_weight, cos, sin, eps)
    if check.wants_value_checks(check_values, device):
        check.check_row_values(rows, index_cache.requests, consecutive=True)
        check.check_table_values("index_cache", index_cache.page_table, index_cache.keys.shape[0])
    kernels, capability = _writing_kernels(facts_here(device))
    kernels.write_index_keys(raw_keys, index_cache, rows, spec, norm_weight, cos, sin, eps, *capability)


def write_kv(
    keys: Tensor,
    values: Tensor,
    kv_cache: KvCache,
    rows: Rows,
    spec: QsaSpec,
    *,
    check_values: bool | None = None,
) -> None:
    """Stores each row's key and value at its position.

    keys, values  [rows, kv_heads, head_dim], keys normalised and rotated; in the cache's dtype, or any float for an FP8
                  cache, where they are divided by the scale, clamped to +-448 and rounded

    Padding rows and rows on a hole are dropped. Writes in place. Raises InputError.
    """
    check.check_spec(spec)
    device = check.device_of("keys", keys)
    check.check_rows(rows, device)
    check.check_kv_cache(kv_cache, spec, device, rows.max_position)
    check.check_new_kv(keys, values, kv_cache, rows, spec)
    if check.wants_value_checks(check_values, device):
        check.check_row_values(rows, kv_cache.requests)
        check.check_table_values("kv_cache", kv_cache.page_table, kv_cache.keys.shape[0])
    kernels, capability = _writing_kernels(facts_here(device))
    kernels.write_kv(keys, values, kv_cache, rows, *capability)


def prepare(
    projected: Projected,
    kv_cache: KvCache,
    index_cache: IndexCache,
    rows: Rows,
    spec: QsaSpec,
    *,
    check_values: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Everything between a layer's projections and its attention: on a GPU one launch.

    projected   what the projections gave, norm weights and angles; its dtype is that of the ring and of the caches,
                where these are not FP8

    Applies norm and rotary to queries, index queries and keys, and does what `write_kv` and `write_index_keys` do with
    keys, values and raw keys. Each step rounds as Transformers' layer rounds it (docs/kernels/prepare.md). Returns q
    [rows, q_heads, head_dim] and index_q [rows, index_heads, index_dim] for `qsa_attention`, in fresh memory without
    gaps; those of padding are undefined. Rows of one request must be consecutive tokens. `index_cache.raw_keys` is
    required. Writes in place: the caches, the ring and `first_angles`. For inference: no gradient is recorded. Raises
    InputError.
    """
    check.check_spec(spec)
    device = check.device_of_projected(projected)
    check.check_rows(rows, device)
    check.check_kv_cache(kv_cache, spec, device, rows.max_position)
    check.check_index_cache(index_cache, spec, device, rows.max_position)
    check.check_projected(projected, kv_cache, index_cache, rows, spec)
    if check.wants_value_checks(check_values, device):
        check.check_row_values(rows, index_cache.requests, consecutive=True)
        check.check_table_values("kv_cache", kv_cache.page_table, kv_cache.keys.shape[0])
        check.check_table_values("index_cache", index_cache.page_table, index_cache.keys.shape[0])
    function, capability = _preparing_function(facts_here(device))
    return function(projected, kv_cache, index_cache, rows, spec, *capability)


def _check_index_call(
    index_q: Tensor, index_cache: IndexCache, rows: Rows, spec: QsaSpec, check_values: bool | None
) -> None:
    check.check_spec(spec)
    device = check.device_of("index_q", index_q)
    check.check_rows(rows, device)
    check.check_index_cache(index_cache, spec, device, rows.max_position)
    check.check_index_q(index_q, index_cache, rows, spec)
    if check.wants_value_checks(check_values, device):
        check.check_row_values(rows, index_cache.requests)
        check.check_table_values("index_cache", index_cache.page_table, index_cache.keys.shape[0])


def _check_kv_call(
    q: Tensor,
    kv_cache: KvCache,
    selection: Selection | None,
    rows: Rows,
    spec: QsaSpec,
    gate: Tensor | None,
    check_values: bool | None,
    *,
    after_index: bool = False,
) -> None:
    """Checks an attention call; `after_index` where `_check_index_call` has read the rows and a selection follows."""
    check.check_spec(spec)
    device = check.device_of("q", q)
    check.check_rows(rows, device)
    check.check_kv_cache(kv_cache, spec, device, rows.max_position)
    check.check_q(q, kv_cache, gate, rows, spec)
    if not after_index:
        check.check_selection(selection, rows, spec)
    if check.wants_value_checks(check_values, device):
        if not after_index:
            check.check_row_values(rows, kv_cache.requests)
        check.check_table_values("kv_cache", kv_cache.page_table, kv_cache.keys.shape[0])
        if selection is not None:
            check.check_selection_values(selection, rows, spec)


def _q_dtype(cache_dtype: torch.dtype) -> torch.dtype:
    """The dtype that queries of a cache have where nobody says."""
    return torch.bfloat16 if cache_dtype == FP8 else cache_dtype


def _select_call(index_q: Tensor, index_cache: IndexCache, rows: Rows, spec: QsaSpec, batch_invariant: bool) -> Call:
    dtype, cache_dtype = index_q.dtype, index_cache.keys.dtype
    return Call(
        spec,
        rows.count,
        index_cache.requests,
        rows.max_position,
        _q_dtype(cache_dtype),
        cache_dtype,
        dtype,
        cache_dtype,
        index_aligned=begins_aligned(index_q, index_cache.keys),
        batch_invariant=batch_invariant,
    )


def _attend_call(
    q: Tensor,
    kv_cache: KvCache,
    gate: Tensor | None,
    rows: Rows,
    spec: QsaSpec,
    batch_invariant: bool,
    selection_given: bool,
) -> Call:
    return Call(
        spec,
        rows.count,
        kv_cache.requests,
        rows.max_position,
        q.dtype,
        kv_cache.keys.dtype,
        layout=Layout.of(kv_cache, spec, q, gate),
        selection_given=selection_given,
        batch_invariant=batch_invariant,
    )


def _plan(
    plan: Plan | None,
    call: Call,
    rows: Rows,
    route: str | None,
    batch_invariant: bool | None,
    stages: tuple[Stage, ...],
) -> Plan:
    device = rows.request.device
    given = check.check_plan(plan, call, device, route, batch_invariant, stages)
    if given is not None:
        return given
    return make_plan(call, facts_here(device), check.check_pin(route), stages)


def _announced(plan: Plan, stage: Stage, rows: Rows) -> Route:
    device = rows.request.device
    decision = plan.decision(stage)
    announce(decision, plan.call, facts_here(device), device)
    return decision.route


WRITING_SETS = ("smxx", "sm7x", "cpu")
"""Kernel sets that write caches, in order of preference."""


def _writing_kernels(facts: DeviceFacts) -> tuple[ModuleType, tuple[tuple[int, int], ...]]:
    """The module that writes a device's caches, and the GPU's compute capability where it asks for one.

    Writing has one way per kernel set and needs no route; the reference writes where no set has an image.
    """
    kernels = next((kernel_set(name) for name in WRITING_SETS if name in facts.kernel_sets), reference)
    return kernels, () if facts.capability is None or kernels is reference else (facts.capability,)


def _preparing_function(
    facts: DeviceFacts,
) -> tuple[Callable[..., tuple[Tensor, Tensor]], tuple[tuple[int, int], ...]]:
    """The function that prepares on a device: as for writing, it has one way and needs no route.

    GPUs of every kind have the same, and whatever writes their caches prepares too.
    """
    kernels, capability = _writing_kernels(facts)
    if kernels is reference:
        return reference_prepare, ()
    return (kernel_set("nvrtc") if capability else kernels).prepare, capability
