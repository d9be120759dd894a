"""The whole story on one page: check, route, plan, then score, top-k, worklist, attend, merge."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from flashqsa import capture, check, reference
from flashqsa.device import DeviceFacts, facts_of
from flashqsa.kernels import cpu
from flashqsa.plan import Plan, make_plan
from flashqsa.route import Call, Route, announce
from flashqsa.values import IndexCache, KvCache, QsaSpec, Rows, Selection

KERNEL_SETS: dict[str, ModuleType] = {"cpu": cpu}


def plan_batch(
    rows: Rows,
    spec: QsaSpec,
    *,
    index_cache: IndexCache | None = None,
    kv_cache: KvCache | None = None,
    q_dtype: torch.dtype | None = None,
    selection_given: bool = True,
    route: str | None = None,
) -> Plan:
    """Routes and sizes for a batch, to be passed as `plan=` to every layer's call.

    Takes the caches (one of them at least) for their dtype, page size and number of requests. `q_dtype` defaults to the
    cache's dtype. With `selection_given=False` the plan is for `qsa_attention`, or for `sparse_attention` without a
    Selection, and may take the dense route. Raises InputError, NoRouteError, KnobError.
    """
    check.check_spec(spec)
    cache = check.check_any_cache(kv_cache, index_cache)
    check.check_rows(rows, device := check.device_of_rows(rows))
    if index_cache is not None:
        check.check_index_cache(index_cache, spec, device, rows.max_position)
    if kv_cache is not None:
        check.check_kv_cache(kv_cache, spec, device, rows.max_position)
    call = _call(rows, spec, cache, check.check_q_dtype(q_dtype), selection_given)
    return make_plan(call, facts_of(device), check.check_pin(route))


def select_blocks(
    index_q: Tensor,
    index_cache: IndexCache,
    rows: Rows,
    spec: QsaSpec,
    *,
    plan: Plan | None = None,
    route: str | None = None,
    check_values: bool | None = None,
) -> Selection:
    """Selects each row's best blocks: by score descending, then block id ascending; handed on in ascending order.

    index_q       [rows, index_heads, index_dim], normalised and rotated, in the index cache's dtype
    plan          from `plan_batch`; worked out here when absent
    route         pins a route by mode, kernel set or both; it is used or NoRouteError is raised
    check_values  reads row metadata and page tables for bad entries; default by FLASHQSA_CHECK_VALUES

    The score of block b is index_dim^(-1/2) * sum over heads of relu(<index_q[row, head], key[b]>), in FP32. Blocks
    that score NaN or -inf are never selected. Rows that see no more blocks than they may select take them all.

    Raises InputError, NoRouteError, KnobError, all before work starts.
    """
    _check_index_call(index_q, index_cache, rows, spec, check_values)
    plan = _plan(plan, rows, spec, index_cache, index_q.dtype, route, selection_given=False)
    return _select(index_q, index_cache, rows, spec, plan)


def _select(index_q: Tensor, index_cache: IndexCache, rows: Rows, spec: QsaSpec, plan: Plan) -> Selection:
    """`select_blocks` of what has been checked and planned."""
    capture.note("select_blocks", spec, rows, plan, index_q=index_q, index_cache=index_cache)
    chosen = _announced(plan, "select", rows)
    if chosen.mode == "reference":
        return reference.select_blocks(index_q, index_cache, rows, spec)
    kernels = KERNEL_SETS[chosen.kernel_set]
    selection: Selection
    if chosen.mode == "everything":
        selection = kernels.select_everything(index_cache, rows, spec)
        return selection
    selection = kernels.empty_selection(rows, spec)
    for start, stop in plan.select.chunks(rows.count):
        part = rows.slice(start, stop)
        scores = kernels.score(index_q[start:stop], index_cache, part, spec)
        kernels.topk(scores, selection.slice(start, stop))
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
    plan = _plan(plan, rows, spec, kv_cache, q.dtype, route, selection_given=selection is not None)
    output, lse = _attend(q, kv_cache, selection, rows, spec, gate, plan)
    return (output, lse) if return_lse else output


def _attend(
    q: Tensor,
    kv_cache: KvCache,
    selection: Selection | None,
    rows: Rows,
    spec: QsaSpec,
    gate: Tensor | None,
    plan: Plan,
) -> tuple[Tensor, Tensor]:
    """`sparse_attention` of what has been checked and planned: output and lse."""
    capture.note("sparse_attention", spec, rows, plan, q=q, gate=gate, kv_cache=kv_cache, selection=selection)
    chosen = _announced(plan, "attend", rows)
    if chosen.mode == "reference":
        return reference.sparse_attention(q, kv_cache, selection, rows, spec, gate)
    kernels = KERNEL_SETS[chosen.kernel_set]
    work = kernels.worklist(selection, rows, spec, kv_cache, plan.attend)
    partial = kernels.attend(q, kv_cache, work, rows, spec, plan.attend)
    output, lse = kernels.merge(partial, gate, q.dtype)
    return output, lse


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
    check_values: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`select_blocks`, then `sparse_attention` on its selection: arguments, results and errors are theirs.

    Where no row sees more blocks than it may select, nothing is scored or selected, and only the holes of the KV cache
    count: both caches are taken to have the same ones.
    """
    _check_index_call(index_q, index_cache, rows, spec, check_values)
    _check_kv_call(q, kv_cache, None, rows, spec, gate, check_values, after_index=True)
    check.check_requests(index_cache, kv_cache)
    plan = _plan(plan, rows, spec, kv_cache, q.dtype, route, selection_given=False)
    selection = None
    if plan.attend_decision.route.mode != "dense":
        selection = _select(index_q, index_cache, rows, spec, plan)
    output, lse = _attend(q, kv_cache, selection, rows, spec, gate, plan)
    return (output, lse) if return_lse else output


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
    kernels = _writing_kernels(facts_of(device))
    kernels.write_index_keys(raw_keys, index_cache, rows, spec, norm_weight, cos, sin, eps)


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
    _writing_kernels(facts_of(device)).write_kv(keys, values, kv_cache, rows)


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


def _call(
    rows: Rows,
    spec: QsaSpec,
    cache: IndexCache | KvCache,
    q_dtype: torch.dtype | None,
    selection_given: bool,
) -> Call:
    page_tokens = cache.page_tokens if isinstance(cache, KvCache) else cache.page_blocks * spec.block_tokens
    cache_dtype = cache.keys.dtype
    return Call(
        spec,
        rows.count,
        cache.requests,
        rows.max_position,
        q_dtype or cache_dtype,
        cache_dtype,
        page_tokens,
        selection_given,
    )


def _plan(
    plan: Plan | None,
    rows: Rows,
    spec: QsaSpec,
    cache: IndexCache | KvCache,
    q_dtype: torch.dtype,
    route: str | None,
    *,
    selection_given: bool,
) -> Plan:
    given = check.check_plan(plan, rows, cache.requests, spec, route, selection_given)
    if given is not None:
        return given
    return make_plan(
        _call(rows, spec, cache, q_dtype, selection_given), facts_of(rows.request.device), check.check_pin(route)
    )


def _announced(plan: Plan, stage: str, rows: Rows) -> Route:
    device = rows.request.device
    decision = plan.select_decision if stage == "select" else plan.attend_decision
    announce(decision, plan.call, facts_of(device), device)
    return decision.route


def _writing_kernels(facts: DeviceFacts) -> ModuleType:
    """Writing has one way per kernel set and needs no route; the reference writes where no set has an image."""
    return next((kernels for name, kernels in KERNEL_SETS.items() if name in facts.kernel_sets), reference)
