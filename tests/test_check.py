"""Every refusal of user input, through the public calls: the argument, what was wanted, what came, and nothing done."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import flashqsa
from flashqsa import IndexCache, InputError, KvCache, QsaSpec, Rows, Selection
from flashqsa.route import PINS
from flashqsa.testing import compare
from flashqsa.values import FP8, MAX_TOKENS, Run

SPEC = QsaSpec(q_heads=6, kv_heads=2, head_dim=16, index_heads=2, index_dim=8, top_blocks=2)
Arguments = dict[str, Any]


def table() -> Tensor:
    """Two requests of up to 4 pages of 8 tokens; the second's last page is a hole."""
    return torch.tensor([[0, 1, 2, 3], [7, 6, 5, -1]], dtype=torch.int32)


def rows() -> Rows:
    """Three rows of each request and one of padding."""
    return Rows.from_lengths([3, 3], [22, 19], pad_to=7)


def kv_cache(dtype: torch.dtype = torch.float32) -> KvCache:
    pool = torch.ones(8, 2, 8, 2, 16).to(dtype)
    scales = (0.5, 2.0) if dtype == FP8 else (None, None)
    return KvCache.interleaved(pool, table(), *scales)


def index_cache(dtype: torch.dtype = torch.float32) -> IndexCache:
    keys = torch.ones(8, 2, 8).to(dtype)
    return IndexCache(keys, table(), 0.5 if dtype == FP8 else None, torch.ones(2, 8, 8))


def selection() -> Selection:
    """Two blocks for each row but the padding."""
    blocks = torch.tensor([[0, 3]] * 6 + [[-1, -1]], dtype=torch.int32)
    return Selection(blocks, torch.tensor([2] * 6 + [0], dtype=torch.int32))


@dataclass(frozen=True)
class PublicCall:
    """A public function, and arguments it accepts."""

    function: Callable[..., object]
    arguments: Callable[[], Arguments]

    def __str__(self) -> str:
        return str(getattr(self.function, "__name__", self.function))


def select_arguments() -> Arguments:
    return {"index_q": torch.ones(7, 2, 8), "index_cache": index_cache(), "rows": rows(), "spec": SPEC}


def attend_arguments() -> Arguments:
    tensors = {"q": torch.ones(7, 6, 16), "gate": torch.ones(7, 6, 16), "kv_cache": kv_cache()}
    return {**tensors, "selection": selection(), "rows": rows(), "spec": SPEC}


def both_arguments() -> Arguments:
    both = {**attend_arguments(), **select_arguments()}
    del both["selection"]
    return both


def write_index_arguments() -> Arguments:
    pooling = {"norm_weight": torch.ones(8), "cos": torch.ones(7, 4), "sin": torch.ones(7, 4)}
    return {"raw_keys": torch.ones(7, 8), "index_cache": index_cache(), "rows": rows(), "spec": SPEC, **pooling}


def write_kv_arguments() -> Arguments:
    new = {"keys": torch.ones(7, 2, 16), "values": torch.ones(7, 2, 16)}
    return {**new, "kv_cache": kv_cache(), "rows": rows(), "spec": SPEC}


def plan_arguments() -> Arguments:
    return {"rows": rows(), "spec": SPEC, "index_cache": index_cache(), "kv_cache": kv_cache()}


SELECT = PublicCall(flashqsa.select_blocks, select_arguments)
ATTEND = PublicCall(flashqsa.sparse_attention, attend_arguments)
BOTH = PublicCall(flashqsa.qsa_attention, both_arguments)
WRITE_INDEX = PublicCall(flashqsa.write_index_keys, write_index_arguments)
WRITE_KV = PublicCall(flashqsa.write_kv, write_kv_arguments)
PLAN = PublicCall(flashqsa.plan_batch, plan_arguments)
CALLS = (SELECT, ATTEND, BOTH, WRITE_INDEX, WRITE_KV, PLAN)


def changed(arguments: Arguments, path: str, change: Callable[[Any], object]) -> Arguments:
    """The arguments with one of them, or one field of one (`rows.request`), changed."""
    name, _, field = path.partition(".")
    if not field:
        return {**arguments, name: change(arguments[name])}
    value = arguments[name]
    return {**arguments, name: replace(value, **{field: change(getattr(value, field))})}


def to(value: object) -> Callable[[Any], object]:
    """The change that puts a value in place of whatever was there."""
    return lambda _: value


def tensors_of(arguments: Arguments) -> dict[str, Tensor]:
    """Path -> every tensor among the arguments."""
    found: dict[str, Tensor] = {}
    for name, value in arguments.items():
        fields = [(name, value)]
        if isinstance(value, (Rows, KvCache, IndexCache, Selection)):
            fields = [(f"{name}.{field}", getattr(value, field)) for field in value.__dataclass_fields__]
        found.update((path, tensor) for path, tensor in fields if isinstance(tensor, Tensor))
    return found


def refused(call: PublicCall, arguments: Arguments) -> InputError:
    """The InputError of a call, which must leave every tensor among its arguments as it was."""
    before = {path: tensor.clone() for path, tensor in tensors_of(arguments).items() if tensor.device.type == "cpu"}
    with pytest.raises(InputError) as caught:
        call.function(**arguments)
    after = tensors_of(arguments)
    assert all(compare.same_bits(after[path], tensor) for path, tensor in before.items())
    error = caught.value
    assert str(error) == f"{error.argument}: wanted {error.wanted}; got {error.got}"
    return error


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_the_valid_call_is_served(call: PublicCall) -> None:
    call.function(**call.arguments())


# Each tensor of each call, for each reason that a tensor alone can give.

TENSORS = [(call, path) for call in CALLS for path in tensors_of(call.arguments())]

FREE_FIRST = {"kv_cache.keys", "index_cache.keys", "kv_cache.page_table", "index_cache.page_table", "rows.request"}
"""Tensors whose first size is free: what disagrees with it is refused in its stead."""

FREE_LAST = {"kv_cache.page_table", "index_cache.page_table", "cos"}
"""Tensors whose last size is free."""


def each_tensor(but: Collection[str] = (), least_ndim: int = 1) -> pytest.MarkDecorator:
    """Parametrizes over every tensor of every call that has so many dimensions."""
    kept = [
        (call, path)
        for call, path in TENSORS
        if path not in but and tensors_of(call.arguments())[path].ndim >= least_ndim
    ]
    return pytest.mark.parametrize(("call", "path"), kept, ids=[f"{call}-{path}" for call, path in kept])


@each_tensor()
def test_a_list_is_no_tensor(call: PublicCall, path: str) -> None:
    error = refused(call, changed(call.arguments(), path, lambda tensor: tensor.tolist()))
    assert error.argument == path
    assert (error.wanted.startswith("a tensor"), error.got) == (True, "list")


@each_tensor()
def test_one_dimension_too_many(call: PublicCall, path: str) -> None:
    tensor = tensors_of(call.arguments())[path]
    error = refused(call, changed(call.arguments(), path, lambda tensor: tensor[None]))
    assert error.argument == path
    assert f"{tensor.ndim} dimensions [" in error.wanted
    assert error.got == f"{tensor.ndim + 1}: {[1, *tensor.shape]}"


@each_tensor()
def test_one_dimension_too_few(call: PublicCall, path: str) -> None:
    error = refused(call, changed(call.arguments(), path, lambda tensor: tensor[0]))
    assert error.argument == path
    assert "dimension" in error.wanted


@each_tensor()
def test_another_device(call: PublicCall, path: str) -> None:
    # The first tensor of a call says where the call runs; then it is the next one that is elsewhere.
    error = refused(call, changed(call.arguments(), path, lambda tensor: tensor.to("meta")))
    leads = path in ("index_q", "q", "raw_keys", "keys") or (call is PLAN and path == "rows.request")
    if leads:
        assert error.argument in ("rows.request", "rows.position")
        assert (error.wanted, error.got) == ("device meta", "cpu")
    else:
        assert (error.argument, error.wanted, error.got) == (path, "device cpu", "meta")


@each_tensor()
@pytest.mark.parametrize("dtype", [torch.int64, torch.float64], ids=str)
def test_another_dtype(call: PublicCall, path: str, dtype: torch.dtype) -> None:
    error = refused(call, changed(call.arguments(), path, lambda tensor: tensor.to(dtype)))
    assert error.argument == path
    assert error.wanted.startswith("dtype ")
    assert error.got == str(dtype).removeprefix("torch.")


@each_tensor(but={"rows.request", "rows.position"})
def test_a_last_stride_other_than_1(call: PublicCall, path: str) -> None:
    tensor = tensors_of(call.arguments())[path]
    wide = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)[..., ::2]
    error = refused(call, changed(call.arguments(), path, to(wide.copy_(tensor))))
    assert error.argument == path
    assert "a last stride of 1 in [" in error.wanted
    assert error.got == f"strides {wide.stride()}"


def test_rows_of_a_stride_other_than_1() -> None:
    spread = torch.stack([rows().position] * 2, dim=1)[:, 0]
    assert refused(SELECT, changed(select_arguments(), "rows.position", to(spread))).argument == "rows.position"


@each_tensor(but=FREE_FIRST)
def test_one_row_more_than_agreed(call: PublicCall, path: str) -> None:
    tensor = tensors_of(call.arguments())[path]
    error = refused(call, changed(call.arguments(), path, lambda tensor: torch.cat([tensor, tensor[:1]])))
    assert error.argument == path
    assert "shape [" in error.wanted
    assert error.got == str([tensor.shape[0] + 1, *tensor.shape[1:]])


@each_tensor(but=FREE_LAST, least_ndim=2)
def test_a_last_size_other_than_agreed(call: PublicCall, path: str) -> None:
    tensor = tensors_of(call.arguments())[path]
    error = refused(call, changed(call.arguments(), path, lambda tensor: tensor[..., :-1].clone()))
    assert error.argument == path
    assert error.got == str([*tensor.shape[:-1], tensor.shape[-1] - 1])


@each_tensor(but={"kv_cache.page_table", "index_cache.page_table"}, least_ndim=2)
def test_a_size_of_0(call: PublicCall, path: str) -> None:
    error = refused(call, changed(call.arguments(), path, lambda tensor: tensor[:, :0]))
    assert error.argument == path
    assert error.wanted.endswith("of at least 1")


# Values of another kind, and what must agree between arguments.


@pytest.mark.parametrize("call", CALLS, ids=str)
@pytest.mark.parametrize(("name", "kind"), [("spec", "a QsaSpec"), ("rows", "a Rows")])
def test_a_tuple_is_no_value(call: PublicCall, name: str, kind: str) -> None:
    error = refused(call, {**call.arguments(), name: (1, 2)})
    assert (error.argument, error.wanted, error.got) == (name, kind, "tuple")


@pytest.mark.parametrize(
    ("call", "name", "kind"),
    [
        *((call, "index_cache", "an IndexCache") for call in (SELECT, BOTH, WRITE_INDEX, PLAN)),
        *((call, "kv_cache", "a KvCache") for call in (ATTEND, BOTH, WRITE_KV, PLAN)),
        (ATTEND, "selection", "a Selection"),
    ],
    ids=str,
)
def test_another_object_is_no_value(call: PublicCall, name: str, kind: str) -> None:
    error = refused(call, {**call.arguments(), name: torch.zeros(1)})
    assert (error.argument, error.wanted, error.got) == (name, kind, "Tensor")


@pytest.mark.parametrize("call", CALLS, ids=str)
@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "4", None])
def test_spec_fields_are_whole_numbers(call: PublicCall, bad: object) -> None:
    for name in ("q_heads", "kv_heads", "head_dim", "index_heads", "index_dim", "block_tokens", "top_blocks"):
        error = refused(call, {**call.arguments(), "spec": replace(SPEC, **{name: bad})})  # type: ignore[arg-type]
        assert error.argument == f"spec.{name}"
        assert error.got == repr(bad)


@pytest.mark.parametrize(
    ("fields", "argument", "wanted", "got"),
    [
        ({"q_heads": 7}, "spec.q_heads", "a multiple of kv_heads = 2", "7"),
        ({"q_heads": 66}, "spec.q_heads", "at most 32 query heads per KV head", "66 on 2"),
        ({"top_blocks": 2049}, "spec.top_blocks", "at most 2048", "2049"),
    ],
)
def test_specs_out_of_range(fields: dict[str, int], argument: str, wanted: str, got: str) -> None:
    for call in CALLS:
        error = refused(call, {**call.arguments(), "spec": replace(SPEC, **fields)})
        assert (error.argument, error.wanted, error.got) == (argument, wanted, got)


@pytest.mark.parametrize("call", CALLS, ids=str)
@pytest.mark.parametrize("bound", [-2, MAX_TOKENS, 21.0, None])
def test_bounds_on_positions(call: PublicCall, bound: object) -> None:
    error = refused(call, {**call.arguments(), "rows": replace(rows(), max_position=bound)})  # type: ignore[arg-type]
    assert (error.argument, error.got) == ("rows.max_position", str(bound))
    assert error.wanted == f"a whole number from -1 to {MAX_TOKENS - 1}"


RUNS = "runs of requests from 0, one after the other within the 7 rows"
REACH = "a last_position from stop - start - 1 to max_position = 21"


@pytest.mark.parametrize("call", CALLS, ids=str)
@pytest.mark.parametrize(
    ("runs", "wanted", "got"),
    [
        ([Run(0, 0, 3, 21)], "a tuple of Run, or None", "list"),
        (((0, 0, 3, 21),), "runs of four whole numbers", "(0, 0, 3, 21)"),
        ((Run(0, 0, 3.0, 21),), "runs of four whole numbers", "Run(request=0, start=0, stop=3.0, last_position=21)"),  # type: ignore[arg-type]
        ((Run(-1, 0, 3, 21),), RUNS, "Run(request=-1, start=0, stop=3, last_position=21)"),
        ((Run(0, -1, 3, 21),), RUNS, "Run(request=0, start=-1, stop=3, last_position=21)"),
        ((Run(0, 2, 2, 21),), RUNS, "Run(request=0, start=2, stop=2, last_position=21)"),
        ((Run(0, 0, 8, 21),), RUNS, "Run(request=0, start=0, stop=8, last_position=21)"),
        ((Run(0, 0, 4, 21), Run(1, 3, 6, 18)), RUNS, "Run(request=1, start=3, stop=6, last_position=18)"),
        ((Run(1, 3, 6, 18), Run(0, 0, 3, 21)), RUNS, "Run(request=0, start=0, stop=3, last_position=21)"),
        ((Run(0, 0, 3, 22),), REACH, "Run(request=0, start=0, stop=3, last_position=22)"),
        ((Run(0, 0, 3, 1),), REACH, "Run(request=0, start=0, stop=3, last_position=1)"),
    ],
)
def test_runs_that_cannot_be(call: PublicCall, runs: object, wanted: str, got: str) -> None:
    error = refused(call, {**call.arguments(), "rows": replace(rows(), runs=runs)})  # type: ignore[arg-type]
    assert (error.argument, error.wanted, error.got) == ("rows.runs", wanted, got)


@pytest.mark.parametrize("call", [SELECT, ATTEND, BOTH], ids=str)
def test_runs_of_other_requests(call: PublicCall) -> None:
    stray = replace(rows(), runs=(Run(0, 0, 3, 21), Run(2, 3, 6, 18)))
    error = refused(call, {**call.arguments(), "rows": stray})
    assert (error.argument, error.wanted, error.got) == ("rows.runs", "requests below 2", "2")


@pytest.mark.parametrize("call", [SELECT, ATTEND, BOTH, WRITE_INDEX, WRITE_KV], ids=str)
@pytest.mark.parametrize(
    ("runs", "wanted", "got"),
    [
        ((Run(0, 0, 4, 21),), "the request of each row", "1 at [3]"),
        ((Run(1, 0, 1, 21),), "the request of each row", "0 at [0]"),
        ((Run(0, 0, 3, 20), Run(1, 3, 6, 18)), "a last_position that no row's position passes", "19 at [0]"),
        ((Run(0, 0, 3, 21), Run(1, 4, 6, 17)), "a last_position that no row's position passes", "17 at [4]"),
    ],
)
def test_runs_that_the_tensors_contradict(call: PublicCall, runs: tuple[Run, ...], wanted: str, got: str) -> None:
    arguments = {**call.arguments(), "rows": replace(rows(), runs=runs)}
    error = refused(call, arguments)
    assert (error.argument, error.wanted, error.got) == ("rows.runs", wanted, got)
    call.function(**arguments, check_values=False)


def test_runs_may_leave_rows_out_and_hold_padding() -> None:
    for runs in ((), (Run(1, 4, 6, 18),), (Run(0, 0, 3, 21), Run(1, 3, 7, 19)), (Run(0, 1, 2, 20), Run(0, 2, 3, 21))):
        got = flashqsa.select_blocks(**{**select_arguments(), "rows": replace(rows(), runs=runs)})
        assert compare.same_selection(got, flashqsa.select_blocks(**select_arguments())) is None


@pytest.mark.parametrize("call", [ATTEND, BOTH, WRITE_KV, PLAN], ids=str)
def test_a_page_of_6_tokens(call: PublicCall) -> None:
    cache = KvCache.interleaved(torch.ones(8, 2, 6, 2, 16), table())
    error = refused(call, {**call.arguments(), "kv_cache": cache})
    assert (error.argument, error.got) == ("kv_cache.keys", "6")
    assert error.wanted == "a page size that is a multiple of 4 tokens"


def test_values_of_another_dtype_than_keys() -> None:
    error = refused(ATTEND, changed(attend_arguments(), "kv_cache.values", lambda values: values.half()))
    assert (error.argument, error.wanted, error.got) == ("kv_cache.values", "dtype float32", "float16")


@pytest.mark.parametrize("call", [SELECT, ATTEND, BOTH, WRITE_INDEX, WRITE_KV, PLAN], ids=str)
def test_more_tokens_than_pages(call: PublicCall) -> None:
    far = replace(rows(), max_position=32)  # 33 tokens, on 4 pages of 8; 8 blocks on 4 pages of 2
    if call in (SELECT, WRITE_INDEX):
        call.function(**{**call.arguments(), "rows": far})  # the 33rd token's block is open and has no key yet
        far = replace(far, max_position=35)
    error = refused(call, {**call.arguments(), "rows": far})
    cache = "index_cache" if call in (SELECT, WRITE_INDEX) else "kv_cache"
    assert error.argument == f"{cache}.page_table"
    assert error.wanted == "pages for positions up to " + str(far.max_position)
    assert error.got == "[2, 4]: 32 tokens per request"


@pytest.mark.parametrize(
    ("call", "path"),
    [(ATTEND, "kv_cache.k_scale"), (ATTEND, "kv_cache.v_scale"), (SELECT, "index_cache.scale")],
    ids=str,
)
def test_scales(call: PublicCall, path: str) -> None:
    error = refused(call, changed(call.arguments(), path, to(1.0)))
    assert (error.argument, error.wanted, error.got) == (path, "none for a float32 cache", "1.0")
    fp8 = {**call.arguments(), "kv_cache": kv_cache(FP8), "index_cache": index_cache(FP8)}
    fp8 = {name: value for name, value in fp8.items() if name in call.arguments()}
    call.function(**fp8)
    error = refused(call, changed(fp8, path, to(None)))
    assert (error.argument, error.wanted, error.got) == (path, "a scale for an FP8 cache", "none")
    for bad in (0.0, -1.0, math.inf, math.nan, 1e38, 1e-20):
        error = refused(call, changed(fp8, path, to(bad)))
        assert (error.argument, error.wanted, error.got) == (path, "a scale from 8.67362e-19 to 1.26765e+30", str(bad))
    for other in ("1.0", True):
        error = refused(call, changed(fp8, path, to(other)))
        assert error.argument == path
        assert error.got == type(other).__name__


@pytest.mark.parametrize("path", ["kv_cache.k_scale", "kv_cache.v_scale"])
def test_scales_per_head(path: str) -> None:
    fp8 = {**attend_arguments(), "kv_cache": kv_cache(FP8)}
    flashqsa.sparse_attention(**changed(fp8, path, to(torch.tensor([0.5, 2.0]))))
    for bad, wanted in (
        (torch.ones(3), "shape [kv_heads] = [2]"),
        (torch.ones(2, 1), "1 dimensions [kv_heads]"),
        (torch.ones(2, dtype=torch.float64), "dtype float32"),
        (torch.tensor([1.0, math.nan]), "scales from 8.67362e-19 to 1.26765e+30"),
        (torch.tensor([1.0, -2.0]), "scales from 8.67362e-19 to 1.26765e+30"),
    ):
        error = refused(ATTEND, changed(fp8, path, to(bad)))
        assert (error.argument, error.wanted) == (path, wanted)


def test_an_index_cache_has_one_scale() -> None:
    fp8 = {**select_arguments(), "index_cache": index_cache(FP8)}
    error = refused(SELECT, changed(fp8, "index_cache.scale", to(torch.ones(1))))
    assert (error.argument, error.wanted, error.got) == ("index_cache.scale", "a float", "a tensor")


def test_a_selection_is_needed_above_the_budget() -> None:
    error = refused(ATTEND, {**attend_arguments(), "selection": None})
    assert (error.argument, error.got) == ("selection", "none")
    assert error.wanted == "a Selection, since rows see up to 5 blocks and attend to 2"


def test_caches_of_different_requests() -> None:
    longer = changed(both_arguments(), "kv_cache.page_table", lambda pages: torch.cat([pages, pages[:1]]))
    error = refused(BOTH, longer)
    assert (error.argument, error.wanted, error.got) == ("kv_cache.page_table", "2 requests, as index_cache has", "3")


def test_a_plan_needs_a_cache() -> None:
    error = refused(PLAN, {"rows": rows(), "spec": SPEC})
    assert (error.argument, error.wanted, error.got) == ("kv_cache, index_cache", "at least one cache", "none")


@pytest.mark.parametrize("ring", [None, torch.ones(2, 6, 8)], ids=["no ring", "ring of 6 tokens"])
def test_writing_index_keys_needs_a_ring_of_whole_blocks(ring: Tensor | None) -> None:
    error = refused(WRITE_INDEX, changed(write_index_arguments(), "index_cache.raw_keys", to(ring)))
    assert error.argument == "index_cache.raw_keys"
    assert (error.got, "multiple of 4" in error.wanted) == (("none", False) if ring is None else ("6", True))


@pytest.mark.parametrize("width", [3, 10])
def test_rotary_dims_are_even_and_fit(width: int) -> None:
    angles = {"cos": torch.ones(7, width), "sin": torch.ones(7, width)}
    error = refused(WRITE_INDEX, {**write_index_arguments(), **angles})
    assert (error.argument, error.wanted, error.got) == ("cos", "an even rotary_dim, at most index_dim = 8", str(width))


# Routes and plans.


@pytest.mark.parametrize("call", [SELECT, ATTEND, BOTH, PLAN], ids=str)
def test_a_route_that_does_not_exist(call: PublicCall, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = f"one of {', '.join(sorted(PINS))}"
    error = refused(call, {**call.arguments(), "route": "fast"})
    assert (error.argument, error.wanted, error.got) == ("route", wanted, "'fast'")
    error = refused(call, {**call.arguments(), "route": ["xqa"]})
    assert (error.argument, error.got) == ("route", "['xqa']")
    monkeypatch.setenv("FLASHQSA_ROUTE", "faster")
    with pytest.raises(flashqsa.KnobError, match=r"FLASHQSA_ROUTE: wanted one of .*; got 'faster'"):
        call.function(**call.arguments())


@pytest.mark.parametrize("call", [SELECT, ATTEND, BOTH], ids=str)
def test_plans(call: PublicCall) -> None:
    plan = flashqsa.plan_batch(**plan_arguments())
    call.function(**call.arguments(), plan=plan)
    error = refused(call, {**call.arguments(), "plan": "grouped"})
    assert (error.argument, error.wanted, error.got) == ("plan", "a Plan", "str")
    error = refused(call, {**call.arguments(), "plan": plan, "route": "xqa"})
    assert (error.argument, error.got) == ("route", "'xqa'")
    for other in (
        {"rows": Rows.from_lengths([3, 3], [22, 19])},  # 6 rows
        {"rows": replace(rows(), max_position=20, runs=None)},  # too low a bound
        {"spec": replace(SPEC, top_blocks=1)},
    ):
        wrong = flashqsa.plan_batch(**{**plan_arguments(), **other})
        error = refused(call, {**call.arguments(), "plan": wrong})
        assert error.argument == "plan"
        assert error.wanted == f"a plan of 7 rows of 2 requests, positions to 21, for {SPEC}"
        assert error.got.startswith(f"one of {wrong.call.rows} rows of 2 requests")


# Values that only reading the tensors can refuse.

READ = [
    (WRITE_KV, "rows.request", 2, 2, "ids below 2", "2 at [2]"),
    (SELECT, "rows.request", 2, 9, "ids below 2", "9 at [2]"),
    (SELECT, "rows.position", 2, 22, "positions up to max_position = 21", "22 at [2]"),
    (ATTEND, "rows.position", 1, 19, "ascending positions within a request", "19 at [1]"),
    (SELECT, "rows.position", 1, 21, "ascending positions within a request", "21 at [2]"),
    (SELECT, "rows.request", 5, 0, "the rows of a request next to each other", "a request that comes twice"),
    (SELECT, "index_cache.page_table", (0, 1), 8, "-1 or page ids below 8", "8 at [0, 1]"),
    (WRITE_INDEX, "index_cache.page_table", (1, 3), -2, "-1 or page ids below 8", "-2 at [1, 3]"),
    (ATTEND, "kv_cache.page_table", (1, 0), 99, "-1 or page ids below 8", "99 at [1, 0]"),
    (WRITE_KV, "kv_cache.page_table", (0, 0), 8, "-1 or page ids below 8", "8 at [0, 0]"),
    (ATTEND, "selection.count", 3, -1, "0 to top_blocks, at most the visible blocks", "-1 at [3]"),
    (ATTEND, "selection.count", 6, 1, "0 to top_blocks, at most the visible blocks", "1 at [6]"),
    (ATTEND, "selection.count", 0, 3, "at most top_blocks = 2", "3 at [0]"),
    (ATTEND, "selection.blocks", (0, 1), 5, "visible block ids, then -1", "5 at [0, 1]"),
    (ATTEND, "selection.blocks", (0, 0), -1, "visible block ids, then -1", "-1 at [0, 0]"),
    (ATTEND, "selection.blocks", (6, 0), 0, "visible block ids, then -1", "0 at [6, 0]"),
    (ATTEND, "selection.blocks", (1, 1), 0, "ascending block ids", "0 at [1, 0]"),
]


@pytest.mark.parametrize(("call", "path", "where", "bad", "wanted", "got"), READ, ids=lambda value: str(value))
def test_values_that_were_read(
    call: PublicCall, path: str, where: int | tuple[int, int], bad: int, wanted: str, got: str
) -> None:
    def spoil(tensor: Tensor) -> Tensor:
        spoiled = tensor.clone()
        spoiled[where] = bad
        return spoiled

    arguments = changed(call.arguments(), path, spoil)
    for check_values in (None, True):
        error = refused(call, {**arguments, "check_values": check_values})
        assert (error.argument, error.wanted, error.got) == (path, wanted, got)


def test_qsa_attention_reads_both_caches() -> None:
    for path in ("index_cache.page_table", "kv_cache.page_table", "rows.request"):
        bad = changed(both_arguments(), path, lambda tensor: torch.full_like(tensor, 50))
        assert refused(BOTH, bad).argument == path


def test_values_are_not_read_where_that_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # Entries past the count are never used, so a selection that the check refuses gives the same output without it.
    dirty = changed(attend_arguments(), "selection.blocks", lambda blocks: blocks.index_fill(0, torch.tensor([6]), 77))
    assert refused(ATTEND, dirty).argument == "selection.blocks"
    wanted = flashqsa.sparse_attention(**attend_arguments())
    assert isinstance(wanted, Tensor)
    assert torch.equal(flashqsa.sparse_attention(**dirty, check_values=False), wanted)  # type: ignore[arg-type]
    monkeypatch.setenv("FLASHQSA_CHECK_VALUES", "off")
    assert torch.equal(flashqsa.sparse_attention(**dirty), wanted)  # type: ignore[arg-type]
    assert refused(ATTEND, {**dirty, "check_values": True}).argument == "selection.blocks"
    monkeypatch.setenv("FLASHQSA_CHECK_VALUES", "on")
    assert refused(ATTEND, dirty).argument == "selection.blocks"


def test_refusals_name_the_first_reason_in_order() -> None:
    # ndim before dtype before shape: all three are wrong here.
    error = refused(ATTEND, {**attend_arguments(), "q": torch.ones(1, 7, 6, 15, dtype=torch.float64)})
    assert "3 dimensions" in error.wanted
    error = refused(ATTEND, {**attend_arguments(), "q": torch.ones(7, 6, 15, dtype=torch.float64)})
    assert error.wanted == "dtype float32"
    error = refused(ATTEND, {**attend_arguments(), "q": torch.ones(7, 6, 15)})
    assert error.wanted == "shape [rows, q_heads, head_dim] = [7, 6, 16]"


def test_an_input_error_is_a_value_error_that_carries_its_parts() -> None:
    error = InputError("q", "3 dimensions", 2)
    assert isinstance(error, ValueError)
    assert (error.argument, error.wanted, error.got) == ("q", "3 dimensions", "2")
    # A worker process hands it to its parent pickled.
    for copied in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
        assert type(copied) is InputError
        assert str(copied) == str(error)
        assert (copied.argument, copied.wanted, copied.got) == ("q", "3 dimensions", "2")
