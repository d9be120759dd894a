"""Hopper's fused indexer on the GPU: equal to scores in full and to a full sort, whatever chance and the inputs do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="scores of smxx are the measure")

import flashqsa
from flashqsa import IndexCache, InputError, NoRouteError, QsaSpec, Rows, Selection, pipeline
from flashqsa.device import facts_of
from flashqsa.kernels.sm90 import select as fused
from flashqsa.select_shape import FusedShape
from flashqsa.testing import compare
from flashqsa.values import Scores
from tests.sm90_select_emulate import sampled_blocks, sorted_out

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
BF16, FP16 = torch.bfloat16, torch.float16
SPEC = QsaSpec()

if torch.cuda.is_available() and "sm90" not in facts_of(GPU).kernel_sets:
    pytest.skip("the fused indexer is for compute capability 9.0", allow_module_level=True)

Make = Callable[[Tensor], Tensor]
"""Makes keys [blocks, index_dim], of all requests, or queries [rows, heads, index_dim] of standard normal numbers."""


def same(numbers: Tensor) -> Tensor:
    return numbers


def quantised(numbers: Tensor) -> Tensor:
    return (numbers * 2).round() / 2


def whole(numbers: Tensor) -> Tensor:
    """Whole numbers whose scores are exact in FP32, whoever adds them up."""
    return (numbers * 1.5).round().clamp(-4, 4)


def part(numbers: Tensor, share: float) -> Tensor:
    """[numbers' first axis, 1], true for about a share of them."""
    generator = torch.Generator(numbers.device).manual_seed(1)
    return (torch.rand(numbers.shape[0], generator=generator, device=numbers.device) < share)[:, None]


def every(numbers: Tensor, period: int, held: int) -> Tensor:
    """[numbers' first axis, 1], true for the first `held` of each period."""
    return (torch.arange(numbers.shape[0], device=numbers.device) % period < held)[:, None]


@dataclass(frozen=True)
class Long:
    """A call that the fused indexer can serve, of requests with random pages.

    query_lengths, contexts  rows and tokens of each request
    keys, queries            of standard normal numbers
    holes                    pages of each request that are missing
    pad_to                   rows of the call, with padding at its end
    """

    name: str
    query_lengths: tuple[int, ...]
    contexts: tuple[int, ...]
    keys: Make = same
    queries: Make = same
    spec: QsaSpec = SPEC
    dtype: torch.dtype = BF16
    page_blocks: int = 4
    holes: int = 0
    pad_to: int | None = None

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Made:
    """Arguments of a call."""

    index_q: Tensor
    cache: IndexCache
    rows: Rows
    spec: QsaSpec

    def select(self, route: str | None = "sm90:fused", **options: Any) -> Selection:
        """What the public call selects: by a route, unless a plan has one."""
        pin = None if "plan" in options else route
        return flashqsa.select_blocks(self.index_q, self.cache, self.rows, self.spec, route=pin, **options)

    def in_full(self) -> Selection:
        """From all scores, by the tile whose scores are the fused indexer's bit for bit."""
        return self.select("smxx:plain", batch_invariant=True)

    def plan(self, **changes: Any) -> flashqsa.Plan:
        """The fused indexer's plan with some of its sizes changed."""
        plan = flashqsa.plan_batch(self.rows, self.spec, index_cache=self.cache, route="sm90:fused")
        assert isinstance(plan.select.fused, FusedShape)
        return replace(plan, select=replace(plan.select, fused=replace(plan.select.fused, **changes)))

    def take(self, start: int, stop: int) -> Made:
        """The same call of some of its rows."""
        return replace(self, index_q=self.index_q[start:stop], rows=self.rows.slice(start, stop))

    def places(self, request: int, blocks: Tensor) -> Tensor:
        """Where blocks of a request lie in the cache, counted in keys."""
        size = self.cache.page_blocks
        return self.cache.page_table[request, blocks // size].long() * size + blocks % size


def make(case: Long) -> Made:
    generator = torch.Generator(GPU).manual_seed(len(case.name))
    rows = Rows.from_lengths(case.query_lengths, case.contexts, device=GPU, pad_to=case.pad_to)
    spec, requests = case.spec, len(case.contexts)
    per = -(-(max(case.contexts) // 4) // case.page_blocks)
    keys = torch.randn(requests * per * case.page_blocks, spec.index_dim, generator=generator, device=GPU)
    index_q = torch.randn(rows.count, spec.index_heads, spec.index_dim, generator=generator, device=GPU)
    table = torch.randperm(requests * per, generator=generator, device=GPU).to(torch.int32).view(requests, per)
    pool = torch.empty(requests * per, case.page_blocks, spec.index_dim, dtype=case.dtype, device=GPU)
    pool[table.view(-1).long()] = case.keys(keys).view(-1, case.page_blocks, spec.index_dim).to(case.dtype)
    if case.holes:
        gone = torch.randint(0, per, (requests, case.holes), generator=generator, device=GPU)
        table.scatter_(1, gone, -1)
    return Made(case.queries(index_q).to(case.dtype), IndexCache(pool, table), rows, spec)


def agree(got: Selection, wanted: Selection) -> None:
    assert compare.same_selection(got, wanted) is None


LONGEST = Long("chunk-184k", (1616,), (184_000,))
TIES = Long("ties", (700,), (150_000,), quantised, quantised)
MIXED = Long("mixed", (1, 0, 70, 3, 500, 64, 2), (9000, 50_000, 80_000, 1500, 60_000, 64, 20_000), pad_to=900)
CASES = [
    Long("chunk-29k", (300,), (29_000,)),
    LONGEST,
    Long("chunk-40k-fp16-pages-of-784", (1616,), (40_000,), dtype=FP16, page_blocks=196),
    TIES,
    Long("all-zero", (200,), (150_000,), torch.zeros_like),
    # Every product is negative but for 1 key in 500: what is selected are these, then the lowest ids among zeros.
    Long("plateau-of-zeros", (200,), (150_000,), lambda k: torch.where(part(k, 0.002), k.abs(), -k.abs()), Tensor.abs),
    Long("constant", (200,), (150_000,), torch.ones_like, torch.ones_like),
    Long("huge", (200,), (100_000,), lambda k: k * 1e18, lambda q: q * 1e18),
    Long("tiny", (200,), (100_000,), lambda k: k * 1e-20, lambda q: q * 1e-20),
    Long("nan", (200,), (100_000,), lambda k: torch.where(part(k, 0.3), float("nan"), k)),
    Long("nearly-all-nan", (200,), (100_000,), lambda k: torch.where(part(k, 0.99), float("nan"), k)),
    Long("holes", (200,), (100_000,), holes=3000),
    Long("nearly-all-holes", (200,), (100_000,), holes=25_000),
    MIXED,
    Long("one-row", (1,), (100_000,)),
    Long("whole-prompt", (20_000,), (20_000,)),
    Long("clusters", (300,), (120_000,), lambda k: torch.where(every(k, 1200, 32), k * 21, k)),
    Long("period-of-the-stride", (300,), (120_000,), lambda k: torch.where(every(k, 16, 1), k * 5, k)),
    Long("million-tokens", (200,), (1 << 20,)),
]


def scores_of(made: Made) -> Scores:
    """Scores of all of a call's rows, by the kernel of `smxx` whose tile is of most rows."""
    plan = flashqsa.plan_batch(
        made.rows, made.spec, index_cache=made.cache, route="smxx:plain", batch_invariant=True
    ).select
    assert plan.chunk_rows >= made.rows.count
    found: Scores = pipeline.kernel_set("smxx").score(made.index_q, made.cache, made.rows, made.spec, plan)
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_selects_what_scores_in_full_do(case: Long) -> None:
    made = make(case)
    got = made.select()
    again = made.select(batch_invariant=True)
    agree(got, made.in_full())
    agree(again, got)
    count = made.rows.count
    for start in {0, count // 2, max(count - 8, 0)}:
        stop = min(start + 8, count)
        agree(got.slice(start, stop), sorted_out(scores_of(made.take(start, stop)), made.spec.top_blocks))


EXACT = [
    Long(
        "2-heads-of-64-top-2048",
        (300,),
        (120_000,),
        whole,
        whole,
        QsaSpec(index_heads=2, index_dim=64, top_blocks=2048),
    ),
    Long("2-heads-of-128-top-16", (300,), (120_000,), whole, whole, QsaSpec(index_heads=2, top_blocks=16), FP16),
    Long("4-heads-of-64", (300, 70), (60_000, 100_000), whole, whole, QsaSpec(index_dim=64), FP16),
    Long("blocks-of-8-tokens", (100,), (100_000,), whole, whole, QsaSpec(block_tokens=8)),
]


@pytest.mark.parametrize("case", EXACT, ids=str)
def test_other_layers_select_what_a_full_sort_does(case: Long) -> None:
    """Scores are exact, so torch's products are the measure: 1 in a few hundred blocks ties with the cut."""
    made = make(case)
    got = made.select()
    width = made.spec.visible_blocks(made.rows.max_position)
    values, start = torch.zeros(made.rows.count, width, device=GPU), 0
    for request, rows in enumerate(case.query_lengths):
        blocks = torch.arange(case.contexts[request] // made.spec.block_tokens, device=GPU)
        keys = made.cache.keys.view(-1, made.spec.index_dim)[made.places(request, blocks)].float()
        products = torch.einsum("rhd,bd->rhb", made.index_q[start : start + rows].float(), keys).relu_()
        values[start : start + rows, : blocks.numel()] = products.sum(dim=1)
        start += rows
    visible = ((made.rows.position + 1) // made.spec.block_tokens).to(torch.int32)
    agree(got, sorted_out(Scores(values, visible), made.spec.top_blocks))


@pytest.fixture
def scratches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The scratch memory of every pass, as it is left."""
    found: list[Any] = []
    make_scratch = fused._Scratch.of

    def kept(*arguments: Any) -> Any:
        found.append(make_scratch(*arguments))
        return found[-1]

    monkeypatch.setattr(fused._Scratch, "of", staticmethod(kept))
    return found


def failed(scratches: list[Any]) -> int:
    """Rows that the last pass did again."""
    return int(scratches[-1].failed[0])


CHANCE = Long("chance", (300,), (120_000,))
FEW_OF_MANY = Long("few-of-many", (70, 3, 200, 64), (80_000, 1500, 60_000, 64), pad_to=400)


def test_ordinary_rows_are_not_done_again(scratches: list[Any]) -> None:
    for case in (CHANCE, LONGEST, TIES):
        made = make(case)
        made.select()
        assert failed(scratches) == 0


@pytest.mark.parametrize(
    ("changes", "least"),
    [
        ({"rank": 12}, 300),  # far too few reach the floor
        ({"rank": 32}, 30),  # in about half of the rows
        ({"rank": 12, "programs": 1}, 300),
        ({"capacity": 64}, 300),  # lists run over
        ({"rank": 120, "survivor_keys": 8, "usual_keys": 8}, 30),  # too many, in some rows
    ],
)
def test_rows_are_done_again_where_chance_fails(changes: dict[str, int], least: int, scratches: list[Any]) -> None:
    made = make(CHANCE)
    wanted = made.in_full()
    plan = made.plan(**changes)
    got = made.select(plan=plan)
    assert failed(scratches) >= least
    agree(got, wanted)
    agree(made.select(plan=plan), wanted)


def raise_sampled(made: Made, factor: float) -> None:
    """Multiplies the keys of each request's sampled blocks, so that the sample misleads."""
    shape = made.plan().select.fused
    assert isinstance(shape, FusedShape)
    flat = made.cache.keys.view(-1, made.spec.index_dim)
    for request in range(made.cache.requests):
        tokens = int(made.rows.position[made.rows.request == request].max()) + 1
        samples = tokens // made.spec.block_tokens // shape.stride
        flat[made.places(request, torch.from_numpy(sampled_blocks(samples, shape.stride)).to(GPU))] *= factor


@pytest.mark.parametrize("factor", [0.0, 64.0])
def test_a_sample_that_misleads_costs_time_and_changes_nothing(factor: float, scratches: list[Any]) -> None:
    """Its blocks are the worst, so that all others reach the floor, or the best, so that none does."""
    made = make(CHANCE)
    raise_sampled(made, factor)
    got = made.select()
    assert failed(scratches) == made.rows.count
    agree(got, made.in_full())


@pytest.mark.parametrize(
    "case", [CHANCE, Long("mixed", (70, 3, 200, 64), (80_000, 1500, 60_000, 64), pad_to=400)], ids=str
)
def test_a_captured_call_follows_its_inputs(case: Long) -> None:
    made = make(case)
    plan = made.plan()
    made.select(plan=plan)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = made.select(plan=plan)
    request, keys = made.rows.request.clone(), made.cache.keys.clone()

    def to_padding() -> None:
        made.rows.request[made.rows.count // 2 :] = -1

    def back() -> None:
        made.rows.request.copy_(request)
        raise_sampled(made, 64.0)

    def other_way() -> None:
        made.cache.keys.copy_(keys)
        raise_sampled(made, 0.0)

    def again() -> None:
        made.cache.keys.copy_(keys)
        made.index_q.copy_(made.index_q.roll(3, 0))

    for change in (lambda: None, to_padding, back, other_way, again):
        change()
        captured.blocks.fill_(-77)
        captured.count.fill_(-77)
        graph.replay()
        agree(captured, made.in_full())
    # Where other rows were selected before, nothing is left of them.
    made.rows.position.fill_(2)
    graph.replay()
    assert not captured.count.any()
    assert bool((captured.blocks == -1).all())


@pytest.mark.parametrize("byte", [0xFF, 0x7F])
def test_workspaces_may_hold_anything(byte: int) -> None:
    """NaN and -1, or NaN and numbers near 2^31."""
    made = make(MIXED)
    wanted = made.select()
    torch.cuda.empty_cache()
    poison = [torch.full((size,), byte, dtype=torch.uint8, device=GPU) for size in (1 << 30, 1 << 20, 1 << 16) * 2]
    poison += [torch.full((1 << 10,), byte, dtype=torch.uint8, device=GPU) for _ in range(64)]
    del poison
    agree(made.select(), wanted)
    agree(made.select(plan=made.plan(rank=12)), wanted)


def test_two_streams_do_not_meet() -> None:
    calls = [make(CHANCE), make(replace(CHANCE, name="the other chance"))]
    # One of them does every row again, beside the other's ordinary passes.
    plans = [calls[0].plan(), calls[1].plan(rank=12)]
    wanted = [call.in_full() for call in calls]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    found = []
    for _ in range(6):
        for call, plan, stream in zip(calls, plans, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(call.select(plan=plan))
    torch.cuda.synchronize()
    for number, got in enumerate(found):
        agree(got, wanted[number % 2])


def test_a_small_workspace_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for case in (LONGEST, MIXED):
        made = make(case)
        wanted = made.select()
        monkeypatch.setenv("FLASHQSA_WORKSPACE_MIB", "4")
        plan = made.plan()
        assert plan.select.workspace_bytes <= 4 << 20
        assert len(list(plan.select.chunks(made.rows.count))) > 3
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        got = made.select()
        selected = 4 * got.blocks.numel() + 4 * got.count.numel()
        assert torch.cuda.max_memory_allocated() - before <= (4 << 20) + selected + 4096
        agree(got, wanted)
        agree(made.select(plan=made.plan(rank=12)), wanted)
        monkeypatch.delenv("FLASHQSA_WORKSPACE_MIB")


def test_a_row_keeps_its_blocks_in_any_company() -> None:
    made = make(LONGEST)
    together = made.select()
    for start, stop in ((0, 1), (63, 65), (700, 1616)):
        agree(made.take(start, stop).select(), together.slice(start, stop))


def test_a_bound_past_every_row_changes_nothing() -> None:
    made = make(CHANCE)
    far = replace(made, rows=replace(made.rows, max_position=(1 << 20) - 1))
    table = torch.full((1, 1 << 16), -1, dtype=torch.int32, device=GPU)
    table[:, : made.cache.page_table.shape[1]] = made.cache.page_table
    far = replace(far, cache=IndexCache(made.cache.keys, table))
    agree(far.select(), made.in_full())


def test_pages_and_strides_may_be_anything() -> None:
    """Pages of another size and order, in a pool past 2^31 numbers that is NaN elsewhere; rows of wider tensors."""
    made = make(CHANCE)
    wanted = made.in_full()
    logical = made.cache.keys.view(-1, 128)[made.places(0, torch.arange(30_000, device=GPU))]

    def agrees(pool: Tensor, order: Tensor, index_q: Tensor) -> None:
        pool[order] = logical.view(-1, pool.shape[1], 128)
        moved = replace(made, index_q=index_q, cache=IndexCache(pool, order[None].to(torch.int32)))
        agree(moved.select(), wanted)
        agree(moved.select(plan=moved.plan(rank=12)), wanted)

    agrees(torch.empty_like(made.cache.keys), torch.randperm(7500, device=GPU), made.index_q)

    wide = torch.full((625, 49, 136), float("nan"), dtype=BF16, device=GPU)
    queries = torch.full((300, 5, 152), float("nan"), dtype=BF16, device=GPU)
    index_q = queries[:, 1:, 16:144].copy_(made.index_q)
    agrees(wide[:, :48, 8:], torch.arange(624, -1, -1, device=GPU), index_q)

    pages = (1 << 31) // (48 * 128) + 1000
    if torch.cuda.mem_get_info(GPU)[0] < 6 << 30:
        pytest.skip("needs 6 GiB of memory")
    huge = torch.full((pages, 48, 128), float("nan"), dtype=BF16, device=GPU)
    order = torch.randperm(pages, device=GPU)[:625]
    order[-1] = pages - 1
    assert (pages - 1) * huge.stride(0) > 1 << 31
    agrees(huge, order, made.index_q)


def test_what_is_not_there_is_not_read() -> None:
    """Rows of no request or past the bound, and pages past the pool, are passed over as padding and holes are."""
    made = make(CHANCE)
    made.rows.request[:70] = 1
    made.rows.position[70:140] = 120_000
    table = made.cache.page_table.clone()
    table[0, 100:200] = made.cache.keys.shape[0]
    table[0, 300:400] = -5
    beyond = replace(made, cache=IndexCache(made.cache.keys, table))
    holes = table.clone()
    holes[0, 100:200] = holes[0, 300:400] = -1
    got = beyond.select()
    agree(got, replace(made, cache=IndexCache(made.cache.keys, holes)).in_full())
    assert not got.count[:140].any()


def test_long_chunks_take_it_and_odd_tensors_are_refused() -> None:
    made = make(LONGEST)
    plan = flashqsa.plan_batch(made.rows, made.spec, index_cache=made.cache)
    assert str(plan.select_decision.route) == "sm90:fused"
    odd = torch.zeros(*made.index_q.shape[:2], 132, dtype=BF16, device=GPU)[..., 4:].copy_(made.index_q)
    with pytest.raises(InputError, match="plan: wanted one whose route these tensors can take; got sm90:fused"):
        replace(made, index_q=odd).select(plan=plan)
    with pytest.raises(NoRouteError, match="do not begin at multiples of 16 bytes"):
        replace(made, index_q=odd).select()
    agree(made.select(None), made.select())
