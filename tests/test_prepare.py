"""What a layer does between its projections and its attention: on any NVIDIA GPU (emulated, or run), and on the CPU."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flashqsa
from flashqsa import pipeline
from flashqsa.cli.build import sources_for
from flashqsa.device import KNOWN_DEVICES, facts_of
from flashqsa.kernels import nvrtc
from flashqsa.kernels.cpu.prepare import prepare as cpu_prepare
from flashqsa.kernels.cpu.prepare import rms_norm, rotate, sum_of_squares
from flashqsa.kernels.nvrtc import Kernel, NvrtcNotFoundError, Source, compile_source
from flashqsa.kernels.nvrtc.prepare import FEW_ROWS, Variant, prepare, prepare_kernel
from flashqsa.reference.prepare import prepare as reference_prepare
from flashqsa.testing import compare
from flashqsa.testing.inputs import filled
from flashqsa.values import FP8, IndexCache, KvCache, QsaSpec, Rows
from tests.nvrtc_emulate import MACHINES, Machine, copied, machine_named, same_memory
from tests.prepare_calls import (
    EPS,
    SPEC,
    WRONG,
    Wrong,
    arguments_of,
    call_of,
    layer_of,
    operands_of,
    projected,
    random_calls,
    run,
    run_both,
    state_of,
)

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
RELEASED = QsaSpec()
MOST = torch.iinfo(torch.int32).max
LONG_PADDING = 300
"""More rows than a warp looks at in one go (256)."""


@pytest.fixture(scope="module", params=MACHINES)
def machine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    with machine_named(request.param, tmp_path_factory.mktemp("prepare")) as found:
        yield found


# The same bytes as the CPU kernels.


@pytest.mark.parametrize("by_position", [False, True])
@pytest.mark.parametrize("ring_tokens", [4, 8, 12, 40])
def test_any_calls_leave_the_same_bytes_as_the_cpu_kernels(
    by_position: bool, ring_tokens: int, machine: Machine
) -> None:
    layer = layer_of((37, 0, 12, 21), SPEC, torch.float32, 16, by_position=by_position)
    state = state_of(layer, ring_tokens)
    state.kv_cache.page_table[0, 1] = state.index_cache.page_table[0, 1] = -1
    run_both(machine, layer, random_calls(layer, ring_tokens, most=11), state)
    written = ~state.index_cache.keys.isnan().any(dim=-1)
    assert int(written.sum()) == (9 - 2) + 3 + 5
    assert int((~state.kv_cache.keys.isnan()).all(dim=-1).sum()) == (37 - 8) + 12 + 21


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "index_dtype"),
    [*((d, d, d) for d in FLOATS), *((d, FP8, FP8) for d in FLOATS), (torch.bfloat16, FP8, torch.bfloat16)],
    ids=lambda d: str(d)[6:],
)
def test_any_dtypes_of_the_released_shape(
    dtype: torch.dtype, kv_dtype: torch.dtype, index_dtype: torch.dtype, machine: Machine
) -> None:
    layer = layer_of((9, 6), replace(RELEASED, q_heads=6), dtype, 64)
    scales = (torch.tensor([0.37, 2.0]), 1.7)
    state = state_of(layer, 4, kv_dtype=kv_dtype, index_dtype=index_dtype, layout="packed", scales=scales)
    run_both(machine, layer, random_calls(layer, 1, most=6), state)


@pytest.mark.parametrize("layout", ["interleaved", "packed", "apart", "wide-view"])
@pytest.mark.parametrize("skew", [0, 1, 8])
def test_any_layout_and_alignment(layout: str, skew: int, machine: Machine) -> None:
    spec = QsaSpec(q_heads=4, kv_heads=2, head_dim=64, index_heads=1, index_dim=64)
    layer = layer_of((11,), spec, torch.bfloat16, 32, skew=skew, weight_dtype=torch.float32)
    run_both(machine, layer, random_calls(layer, 2, most=9), state_of(layer, 8, layout=layout))


@pytest.mark.parametrize(
    ("block_tokens", "head_dim", "index_dim", "rotary_dim"),
    [(1, 32, 16, 16), (2, 256, 128, 128), (3, 40, 36, 2), (8, 20, 20, 6), (5, 300, 200, 130), (40, 64, 64, 64)],
)
def test_any_sizes(block_tokens: int, head_dim: int, index_dim: int, rotary_dim: int, machine: Machine) -> None:
    spec = QsaSpec(6, 2, head_dim, index_heads=1, index_dim=index_dim, block_tokens=block_tokens)
    layer = layer_of((2 * block_tokens + 1, 3 * block_tokens), spec, torch.float16, rotary_dim)
    state = state_of(layer, 2 * block_tokens)
    run_both(machine, layer, random_calls(layer, block_tokens, most=block_tokens + 2), state)
    whole = state.index_cache.keys.isfinite().all(dim=-1)
    assert int(whole.sum()) == sum(count // block_tokens for count in layer.tokens)


@pytest.mark.parametrize(
    ("weight_dtype", "angle_dtype"), [(FLOATS[0], FLOATS[2]), (FLOATS[2], FLOATS[0]), (FLOATS[1], FLOATS[1])], ids=str
)
def test_weights_and_angles_of_any_dtype(weight_dtype: torch.dtype, angle_dtype: torch.dtype, machine: Machine) -> None:
    layer = layer_of((9,), SPEC, torch.bfloat16, 16, weight_dtype=weight_dtype, angle_dtype=angle_dtype)
    run_both(machine, layer, random_calls(layer, 1, most=5), state_of(layer, 4))


def test_a_row_has_the_same_bits_alone_and_among_many(machine: Machine) -> None:
    # Many rows take their heads four to a warp, few one by one.
    layer = layer_of((FEW_ROWS + 20,), SPEC, torch.bfloat16, 16, whole=False)
    many, few = state_of(layer, 4).on(machine), state_of(layer, 4).on(machine)
    whole = run(prepare, layer, call_of(layer, [(0, 0, FEW_ROWS + 20)]), many, machine.device, machine.capability)
    pieces = [(start, min(start + 37, FEW_ROWS + 20)) for start in range(0, FEW_ROWS + 20, 37)]
    parts = [
        run(prepare, layer, call_of(layer, [(0, *piece)]), few, machine.device, machine.capability) for piece in pieces
    ]
    for together, apart in zip(whole, zip(*parts, strict=True), strict=True):
        assert compare.same_bits(together, torch.cat(apart))
    assert all(same_memory(memory, few.memory[name]) for name, memory in many.memory.items())


# Pooled keys and the ring.


@pytest.mark.parametrize("ring_tokens", [4, 8])
@pytest.mark.parametrize("start", [0, 1, 2, 3])
def test_slots_that_a_block_is_read_from_are_filled_after_it(start: int, ring_tokens: int, machine: Machine) -> None:
    layer = layer_of((40, 40), SPEC, torch.float32, 16)
    for length in range(1, 24):
        state = state_of(layer, ring_tokens)
        first = [call_of(layer, [(0, 0, start), (1, 0, start + 3)])] if start else []
        if first:
            run(cpu_prepare, layer, first[0], state)
        begun = start + 3 if start else 0
        call = call_of(layer, [(1, begun, begun + 1 + length % 7), (0, start, start + length)], {1: length % 3})
        run_both(machine, layer, [call], state)


@pytest.mark.parametrize(
    "where", [{0: LONG_PADDING}, {3: LONG_PADDING}, {8: LONG_PADDING}, {11: LONG_PADDING}, {2: 700}, {3: 300, 7: 300}]
)
@pytest.mark.parametrize("start", [0, 2])
def test_any_number_of_rows_of_padding_may_stand_anywhere(where: dict[int, int], start: int, machine: Machine) -> None:
    # Live rows 0 to 7 are of request 1, 8 to 14 of request 0.
    layer = layer_of((12, 12), replace(SPEC, q_heads=1, index_heads=1), torch.float32, 8)
    state = state_of(layer, 4)
    if start:
        run(cpu_prepare, layer, call_of(layer, [(0, 0, start), (1, 0, start)]), state)
    run_both(machine, layer, [call_of(layer, [(1, start, start + 8), (0, start, start + 7)], where)], state)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_pooled_keys_are_those_of_write_index_keys(dtype: torch.dtype, machine: Machine) -> None:
    layer = layer_of((61, 18), RELEASED, dtype, 64, whole=False, by_position=True)
    ours, theirs = state_of(layer, 8).on(machine), state_of(layer, 8).on(machine)
    assert layer.table is not None
    for call in random_calls(layer, 3, most=17):
        run(prepare, layer, call, ours, machine.device, machine.capability)
        rows = machine.rows(replace(call.rows, position=call.rows.position.masked_fill(call.rows.position > 61, -1)))
        first = call.rows.position.clamp(0, 60) // 4 * 4
        cos, sin = (layer.table[first.long(), i].repeat(1, 2).to(machine.device) for i in (0, 1))
        raw, weight = layer.parts(call.fused)[4].to(machine.device), layer.weights[3].to(machine.device)
        nvrtc.write_index_keys(raw, theirs.index_cache, rows, RELEASED, weight, cos, sin, EPS, machine.capability)
    assert same_memory(ours.memory["index keys"], theirs.memory["index keys"])
    assert same_memory(ours.memory["ring"], theirs.memory["ring"])


@given(data=st.data())
@settings(max_examples=40)
def test_drawn_calls_leave_the_same_bytes_as_the_cpu_kernels(data: st.DataObject, machine: Machine) -> None:
    tokens = data.draw(st.lists(st.integers(0, 30), min_size=1, max_size=4).filter(any), "tokens")
    ring_tokens = 4 * data.draw(st.integers(1, 9), "ring blocks")
    layer = layer_of(tuple(tokens), SPEC, torch.float32, 16, by_position=data.draw(st.booleans(), "by position"))
    state = state_of(
        layer,
        ring_tokens,
        page_tokens=data.draw(st.sampled_from([4, 12, 16]), "page tokens"),
        page_blocks=data.draw(st.sampled_from([1, 3, 4]), "page blocks"),
    )
    for cache in (state.kv_cache, state.index_cache):
        table = cache.page_table
        hole = data.draw(st.integers(0, table.numel()), "hole")
        table.view(-1)[hole : hole + 1] = -1
    most = data.draw(st.integers(1, 30), "most")
    run_both(machine, layer, random_calls(layer, data.draw(st.integers(0, 999), "seed"), most), state)


# What nobody may have, and nothing.


def test_rows_that_no_call_may_have_write_nothing(machine: Machine) -> None:
    layer = layer_of((12, 12), SPEC, torch.float16, 8)
    before = state_of(layer, 4)
    before.kv_cache.page_table.copy_(torch.tensor([[0, 7], [-5, 3]]))
    before.index_cache.page_table.copy_(torch.tensor([[0, 9], [-5, 3]]))
    state = before.on(machine)
    # A good row; pages out of range; past the table; past the bound; requests out of range; padding with other numbers.
    request = torch.tensor([0, 0, 0, 0, 1, 1, 2, MOST, -1, -7, 1, 1], dtype=torch.int32)
    position = torch.tensor([3, 11, 19, 27, 7, MOST, 3, 7, 3, MOST, -1, -MOST], dtype=torch.int32)
    call = replace(call_of(layer, [(0, 0, 12)]), rows=Rows(request, position, 26))
    run(prepare, layer, call, state, machine.device, machine.capability)
    written = {name: (~memory.cpu().isnan()).flatten(2).all(dim=-1) for name, memory in state.memory.items()}
    assert written["keys"].nonzero().tolist() == [[0, 3]]
    assert written["values"].nonzero().tolist() == [[0, 3]]
    # The closed block's other keys are not there, in this call or before it.
    assert written["index keys"].nonzero().tolist() == []
    assert written["ring"].nonzero().tolist() == [[0, 3], [1, 3]]


def test_what_memory_held_before_changes_nothing(machine: Machine) -> None:
    layer = layer_of((21,), SPEC, torch.float32, 16)
    left: dict[str, dict[str, torch.Tensor]] = {}
    for pattern in ("nan", "infinity", "large"):
        state = state_of(layer, 8)
        for memory in state.memory.values():
            memory.copy_(filled(tuple(memory.shape), memory.dtype, "cpu", pattern))
        ours = state.on(machine)
        for call in random_calls(layer, 4, most=6):
            run(prepare, layer, call, ours, machine.device, machine.capability)
        left[pattern] = {name: memory.cpu() for name, memory in ours.memory.items()}
    for name, numbers in left["nan"].items():
        written = ~numbers.isnan()
        assert bool(written.any())
        for pattern in ("infinity", "large"):
            before = filled(tuple(numbers.shape), numbers.dtype, "cpu", pattern)
            assert compare.same_bits(left[pattern][name], torch.where(written, numbers, before)), name


FAR_STRIDE, FAR_PAGE = 1_638_400, 1311


def test_a_page_past_2_to_the_31_elements_is_written_like_any_other(machine: Machine) -> None:
    elements = (FAR_PAGE + 1) * FAR_STRIDE
    if machine.device.type == "cuda" and torch.cuda.mem_get_info(machine.device)[0] < 2 * elements:
        pytest.skip(f"wanted {2 * elements} bytes of free memory")
    # On the CPU the pages that are not touched are address space alone.
    pool = torch.empty(elements, dtype=torch.uint8, device=machine.device).view(FP8)
    keys = pool.as_strided((FAR_PAGE + 1, 16, 2, 256), (FAR_STRIDE, 512, 256, 1))
    values = pool.as_strided(keys.shape, keys.stride(), 16 * 512)
    blocks = pool.as_strided((FAR_PAGE + 1, 4, 128), (FAR_STRIDE, 128, 1), 32 * 512)
    layer = layer_of((16,), replace(RELEASED, q_heads=2), torch.bfloat16, 64)
    for page in (FAR_PAGE, 0):
        table = torch.tensor([[page]], dtype=torch.int32, device=machine.device)
        state = state_of(layer, 4).on(machine)
        assert state.index_cache.raw_keys is not None
        index_cache = IndexCache(blocks, table, 0.5, state.index_cache.raw_keys)
        state = replace(state, kv_cache=KvCache(keys, values, table, 0.5, 2.0), index_cache=index_cache)
        run(prepare, layer, call_of(layer, [(0, 0, 16)]), state, machine.device, machine.capability)
    for memory in (keys, values, blocks):
        assert compare.same_bits(memory[FAR_PAGE], memory[0])
    assert bool(values[0].float().isfinite().all())


def test_no_rows_are_no_launch(machine: Machine) -> None:
    layer = layer_of((4,), SPEC, torch.float32, 8)
    state = state_of(layer, 4)
    call = call_of(layer, [(0, 0, 4)])
    none = replace(call, rows=call.rows.slice(0, 0), fused=call.fused[:0], angles=call.angles[:0])
    ours = state.on(machine)
    for q, index_q in (
        run(prepare, layer, none, ours, machine.device, machine.capability),
        run(cpu_prepare, layer, none, state),
    ):
        assert (q.shape, index_q.shape) == ((0, 3, 48), (0, 2, 32))
    assert all(same_memory(memory, state.memory[name]) for name, memory in ours.memory.items())


def test_a_cache_without_a_ring_is_refused() -> None:
    layer = layer_of((4,), SPEC, torch.float32, 8)
    state = state_of(layer, 4)
    state = replace(state, index_cache=replace(state.index_cache, raw_keys=None))
    for function, last in ((prepare, ((7, 0),)), (cpu_prepare, ())):
        with pytest.raises(TypeError, match="without a ring"):
            run(function, layer, call_of(layer, [(0, 0, 4)]), state, "cpu", *last)


# The CPU kernels against the reference and against Transformers.


@pytest.mark.parametrize("by_position", [False, True])
@pytest.mark.parametrize(
    ("dtype", "cache_dtype"), [*((d, d) for d in FLOATS), (torch.bfloat16, FP8)], ids=lambda d: str(d)[6:]
)
def test_the_cpu_kernels_are_near_the_reference(
    dtype: torch.dtype, cache_dtype: torch.dtype, by_position: bool
) -> None:
    layer = layer_of((37, 21), SPEC, dtype, 16, by_position=by_position, whole=False)
    got, wanted = (state_of(layer, 8, kv_dtype=cache_dtype, index_dtype=cache_dtype) for _ in range(2))
    # A norm's last bit may decide a rounding, and that one those of the rotary's products and their sum.
    unit = torch.finfo(dtype).eps if cache_dtype != FP8 else 2.0**-3
    for call in random_calls(layer, 5, most=13):
        ours, exact = run(cpu_prepare, layer, call, got), run(reference_prepare, layer, call, wanted)
        live = call.rows.live & (call.rows.position <= call.rows.max_position)
        for mine, theirs in zip(ours, exact, strict=True):
            near(mine[live].float(), theirs[live].float(), torch.finfo(dtype).eps)
    for name, memory in got.memory.items():
        near(memory.float(), wanted.memory[name].float(), unit)
    assert bool(got.memory["values"].float().isfinite().any())


def near(got: torch.Tensor, wanted: torch.Tensor, unit: float) -> None:
    """Within a few roundings of one head's larger numbers, and equal nearly everywhere."""
    assert torch.equal(got.isfinite(), wanted.isfinite())
    got, wanted = (numbers[wanted.isfinite()] for numbers in (got, wanted))
    torch.testing.assert_close(got, wanted, rtol=2 * unit, atol=4 * unit)
    # In FP32 the order of a sum shows in the last bits of many numbers.
    assert unit < 1e-6 or float((got == wanted).float().mean()) > 0.99


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norm_and_rotary_are_those_of_transformers(dtype: torch.dtype) -> None:
    stock = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp")
    layer = layer_of((19,), RELEASED, dtype, 64, whole=False)
    q, weight = layer.parts(layer.fused[0])[0], layer.weights[0]
    cos, sin = layer.angles[0].unbind(1)
    norm = stock.Qwen4ExpTextRMSNorm(256, eps=EPS).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(weight)
        whole = (torch.cat([angles, angles], dim=-1) for angles in (cos, sin))
        wanted = stock.apply_rotary_pos_emb(norm(q), None, *whole, unsqueeze_dim=1)
    near(rotate(rms_norm(q, weight, EPS), cos, sin).float(), wanted.float(), torch.finfo(dtype).eps)
    # Given the same norm the rotary has the same bits.
    assert compare.same_bits(rotate(norm(q).detach(), cos, sin), wanted)


@pytest.mark.parametrize("dim", [1, 2, 31, 32, 64, 65, 128, 200, 256, 300, 512])
def test_squares_are_summed_by_lane_then_across_lanes(dim: int) -> None:
    numbers = torch.randn(5, dim, generator=torch.Generator().manual_seed(dim))
    span = 8 if dim > 128 else 4 if dim > 64 else 2 if dim > 32 else 1
    for row in numbers:
        lanes = [torch.zeros(()) for _ in range(32)]
        for d in range(dim):
            lanes[d // span % 32] = lanes[d // span % 32] + row[d] * row[d]
        for step in (16, 8, 4, 2, 1):
            lanes = [lanes[lane] + lanes[lane ^ step] for lane in range(32)]
        assert float(sum_of_squares(row[None])) == float(lanes[0])


# The public call.


@pytest.mark.parametrize("by_position", [False, True])
@pytest.mark.parametrize("cache_dtype", [torch.float32, FP8], ids=str)
def test_the_public_call_does_what_the_cpu_kernels_do(by_position: bool, cache_dtype: torch.dtype) -> None:
    ours, theirs = (arguments_of(by_position, cache_dtype) for _ in range(2))
    got, wanted = flashqsa.prepare(**ours), cpu_prepare(**theirs)
    assert all(compare.same_bits(mine, other) for mine, other in zip(got, wanted, strict=True))
    written = [
        (each["kv_cache"].keys, each["kv_cache"].values, each["index_cache"].keys, each["index_cache"].raw_keys)
        for each in (ours, theirs)
    ]
    for mine, other in zip(*written, strict=True):
        assert same_memory(mine, other)
        assert bool(mine.float().isfinite().any())


def test_where_no_kernels_are_the_reference_prepares(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = replace(facts_of(torch.device("cpu")), kernel_sets=frozenset({"reference"}))
    monkeypatch.setattr(pipeline, "facts_here", lambda _: bare)
    ours, theirs = arguments_of(False), arguments_of(False)
    got, wanted = flashqsa.prepare(**ours), reference_prepare(**theirs)
    assert all(compare.same_bits(mine, other) for mine, other in zip(got, wanted, strict=True))


@pytest.mark.parametrize("name", [n for n, facts in KNOWN_DEVICES.items() if facts.capability is not None])
def test_every_gpu_prepares_with_the_one_kernel(name: str) -> None:
    facts = KNOWN_DEVICES[name]
    if facts.kernel_sets >= {"smxx"}:
        pytest.importorskip("triton", reason="the folder of the GPU's kernels imports it")
    assert pipeline._preparing_function(facts) == (prepare, (facts.capability,))


def test_no_gradient_is_recorded() -> None:
    for prepares in (flashqsa.prepare, reference_prepare):
        given = arguments_of(False)
        leaves = {n: getattr(given["projected"], n).clone().requires_grad_() for n in ("q", "keys", "q_norm", "cos")}
        given["projected"] = replace(given["projected"], **leaves)
        results = (*prepares(**given), given["kv_cache"].keys, given["projected"].first_angles)
        assert not any(result.requires_grad for result in results)


@pytest.mark.parametrize("wrong", WRONG, ids=[f"{wrong.path}-{i}" for i, wrong in enumerate(WRONG)])
def test_what_it_cannot_take_is_refused_by_name_and_nothing_is_done(wrong: Wrong) -> None:
    given = arguments_of(False)
    memory = [given["kv_cache"].keys, given["index_cache"].keys, given["projected"].first_angles]
    before = [tensor.clone() for tensor in memory]
    with pytest.raises(flashqsa.InputError) as caught:
        flashqsa.prepare(**wrong.among(given))
    assert caught.value.argument == (wrong.argument or wrong.path)
    assert str(caught.value).startswith(f"{caught.value.argument}: wanted {wrong.wanted}")
    assert all(compare.same_bits(tensor, kept) for tensor, kept in zip(memory, before, strict=True))


def test_angles_and_caches_that_do_not_fit_are_refused() -> None:
    given = arguments_of(by_position=True)
    new = given["projected"]
    short = replace(new, cos=new.cos[:8], sin=new.sin[:8])
    with pytest.raises(flashqsa.InputError, match=r"projected\.cos: wanted angles of positions up to 8; got 8 of them"):
        flashqsa.prepare(**{**given, "projected": short})
    flashqsa.prepare(**{**given, "projected": replace(new, cos=new.cos[:9], sin=new.sin[:9])})
    wide = replace(new, cos=torch.ones(17, 17), sin=torch.ones(17, 17))
    wanted = r"a rotary_dim of at most head_dim = 48 and index_dim = 32; got 34"
    with pytest.raises(flashqsa.InputError, match=wanted):
        flashqsa.prepare(**{**given, "projected": wide})
    half = given["kv_cache"]
    half = replace(half, keys=half.keys.half(), values=half.values.half())
    with pytest.raises(flashqsa.InputError, match=r"kv_cache\.keys: wanted dtype float32 or float8_e4m3fn, as projec"):
        flashqsa.prepare(**{**given, "kv_cache": half})


def test_values_are_not_read_where_that_is_asked_for() -> None:
    given = arguments_of(False)
    given["rows"] = replace(given["rows"], position=given["rows"].position.masked_fill(given["rows"].position > 7, 99))
    with pytest.raises(flashqsa.InputError, match=r"rows\.position: wanted positions up to max_position = 8; got 99"):
        flashqsa.prepare(**given)
    flashqsa.prepare(**given, check_values=False)
    assert bool(given["kv_cache"].keys.isfinite().any())


# What is compiled ahead.


@pytest.mark.parametrize("capability", [(7, 0), (8, 0), (9, 0)], ids=str)
def test_what_a_released_layer_asks_for_is_compiled_ahead(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Source] = []
    monkeypatch.setattr(Kernel, "launch", lambda kernel, *_: asked.append(kernel.source))
    dtypes = (torch.float16,) if capability < (8, 0) else (torch.float16, torch.bfloat16)
    for dtype in dtypes:
        layer = layer_of((9,), RELEASED, dtype, 64)
        for kv_dtype, index_dtype in ((dtype, dtype), (FP8, dtype), (FP8, FP8)):
            state = state_of(layer, 8, kv_dtype=kv_dtype, index_dtype=index_dtype)
            run(prepare, layer, call_of(layer, [(0, 0, 9)]), state, "cpu", capability)
    ahead = {source for source in sources_for(capability) if source.name == "prepare.cu"}
    assert len(set(asked)) == 3 * len(dtypes)
    assert set(asked) == ahead


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("by_position", [False, True])
def test_the_public_call_on_a_gpu_waits_for_nothing(by_position: bool) -> None:
    device = torch.device("cuda", 0)

    def on_gpu(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return copied(device, value)[0]
        if dataclasses.is_dataclass(value) and not isinstance(value, (type, QsaSpec)):
            return replace(value, **{f.name: on_gpu(getattr(value, f.name)) for f in dataclasses.fields(value)})
        return value

    wanted = flashqsa.prepare(**(theirs := arguments_of(by_position)))
    ours = {name: on_gpu(value) for name, value in arguments_of(by_position).items()}
    flashqsa.prepare(**{name: on_gpu(value) for name, value in arguments_of(by_position).items()})  # compiles
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = flashqsa.prepare(**ours)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    live = theirs["rows"].live
    for mine, other in zip(got, wanted, strict=True):
        assert compare.same_bits(mine.cpu()[live], other[live])
    for name, field in (("kv_cache", "keys"), ("kv_cache", "values"), ("index_cache", "keys")):
        mine, other = (getattr(each[name], field) for each in (ours, theirs))
        assert compare.same_bits(mine.cpu(), other)
        assert bool(other.isfinite().any())


@pytest.mark.gpu
def test_the_operator_passes_torchs_own_check_on_a_gpu() -> None:
    operands = [
        copied("cuda", each)[0] if isinstance(each, torch.Tensor) else each for each in operands_of(arguments_of(False))
    ]
    # What padding gets is undefined, and the check compares two calls.
    rows = len(operands[0])
    operands = [
        each[: rows - 2] if isinstance(each, torch.Tensor) and each.shape[0] == rows else each for each in operands
    ]
    torch.library.opcheck(torch.ops.flashqsa.prepare.default, tuple(operands))


@pytest.mark.gpu
@pytest.mark.parametrize("ring_tokens", [4, 8, 64])
def test_long_calls_fill_the_ring_in_order(ring_tokens: int, tmp_path: Path) -> None:
    layer = layer_of((3000, 700, 5), replace(RELEASED, q_heads=2), torch.bfloat16, 64)
    with machine_named("gpu", tmp_path) as machine:
        for start in range(1, 4):
            state = state_of(layer, ring_tokens)
            run(cpu_prepare, layer, call_of(layer, [(0, 0, start), (1, 0, start), (2, 0, 1)]), state)
            call = call_of(layer, [(1, start, 700), (2, 1, 5), (0, start, 3000)], {800: 40})
            first = state.on(machine)
            for _ in range(20):
                again = first.on(machine)
                run(prepare, layer, call, again, machine.device, machine.capability)
            run(cpu_prepare, layer, call, state)
            for name, memory in again.memory.items():
                assert same_memory(memory, state.memory[name]), name


@pytest.mark.gpu
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, FP8], ids=str)
def test_a_graph_prepares_what_its_rows_say_when_it_is_replayed(cache_dtype: torch.dtype, tmp_path: Path) -> None:
    layer = layer_of((40, 40, 40), RELEASED, torch.bfloat16, 64)
    state = state_of(layer, 4, kv_dtype=cache_dtype, index_dtype=cache_dtype)
    replayed = (
        ([(2, 0, 5), (0, 0, 3), (1, 0, 1)], {0: 3}),
        ([(0, 3, 13)], {5: 2}),
        ([(1, 1, 4), (2, 5, 8), (0, 13, 17)], {10: 2}),
        ([(1, 4, 5)], {0: 4, 1: 7}),
    )
    calls = [call_of(layer, pieces, gaps) for pieces, gaps in replayed]
    calls = [replace(call, rows=replace(call.rows, max_position=39)) for call in calls]
    assert {call.rows.count for call in calls} == {12}
    with machine_named("gpu", tmp_path) as machine:
        ours = state.on(machine)
        # Padding alone: the warm-up writes nothing.
        padding = torch.full((12,), -1, dtype=torch.int32, device=machine.device)
        rows = Rows(padding, padding.clone(), 39)
        fused, angles, *weights = copied(machine.device, calls[0].fused, calls[0].angles, *layer.weights)

        def step() -> tuple[torch.Tensor, torch.Tensor]:
            new = projected(layer, fused, weights, angles, ours.first_angles)
            return flashqsa.prepare(new, ours.kv_cache, ours.index_cache, rows, layer.spec)

        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = step()
        for call in calls:
            for held, numbers in (
                (rows.request, call.rows.request),
                (rows.position, call.rows.position),
                (fused, call.fused),
                (angles, call.angles),
            ):
                held.copy_(numbers)
            graph.replay()
            torch.cuda.synchronize()
            wanted = run(cpu_prepare, layer, call, state)
            live = call.rows.live & (call.rows.position <= 39)
            for mine, theirs in zip(results, wanted, strict=True):
                assert compare.same_bits(mine.cpu()[live], theirs[live])
            for name, memory in ours.memory.items():
                assert same_memory(memory, state.memory[name]), name


# Compiled for every GPU.


@pytest.mark.parametrize("capability", [(7, 0), (7, 5), (8, 0), (9, 0), (12, 0)], ids=str)
@pytest.mark.parametrize("fp8", [False, True])
def test_the_kernel_compiles(
    capability: tuple[int, int], fp8: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FLASHQSA_CACHE_DIR", str(tmp_path))
    dtype = torch.float16 if capability < (8, 0) else torch.bfloat16
    kernel = prepare_kernel(capability, Variant(dtype, fp8, fp8, dtype, dtype, 256, 128, 64, 4, wide=True))
    compile_source.cache_clear()
    try:
        found = compile_source(kernel.source, capability)
    except NvrtcNotFoundError as error:
        pytest.skip(str(error))
    finally:
        compile_source.cache_clear()
    assert re.findall(r"Compiling entry function '(\w+)'", found.log) == ["flashqsa_prepare"]
    spilt = [int(count) for count in re.findall(r"(\d+) bytes spill stores", found.log)]
    assert max(spilt) <= 32, "more than a few registers are set aside"
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", found.log)]
    assert max(registers) <= 64, "fewer than 1,024 threads fit on a multiprocessor"


def test_the_kernels_parameters_are_packed_as_the_source_has_them() -> None:
    bf16 = torch.bfloat16
    kernel = prepare_kernel((9, 0), Variant(bf16, False, False, bf16, bf16, 256, 128, 64, 4, wide=True))
    assert kernel.packing.size == 5 * 24 + 2 * 8 + 4 * 8 + 3 * 48 + 2 * 24 + 32 + 64 + 32 + 5 * 4
    assert kernel.shared_bytes == 8 * 4 * (64 + 128 + 4)
