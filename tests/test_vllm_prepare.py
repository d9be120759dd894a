"""Storing at vLLM's slots, pooling from its ring, and its prepare step in plain torch, against the reference."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flashqsa.check import InputError
from flashqsa.integrations.vllm import LayoutError
from flashqsa.integrations.vllm.prepare import angles_at, qsa_compress_groups_with_ratio, qsa_prepare
from flashqsa.integrations.vllm.store import qsa_store_cache_rows, store_kv
from flashqsa.reference.prepare import prepare
from flashqsa.testing import compare
from flashqsa.testing.cases import BF16, FP16, FP32
from flashqsa.testing.inputs import filled
from flashqsa.values import FP8, IndexCache, KvCache, Projected, QsaSpec, Rows
from tests.both_devices import DEVICES
from tests.prepare_calls import EPS, Layer, layer_of

SPEC = QsaSpec(q_heads=6, kv_heads=2, head_dim=64, index_heads=2, index_dim=32)
ROTARY = 16
SECTION = (4, 2, 2)
each_device = pytest.mark.parametrize("device", DEVICES)


def slots_of(table: Tensor, request: int, entries: range, per_page: int) -> list[int]:
    return [int(table[request, entry // per_page]) * per_page + entry % per_page for entry in entries]


# Storing.


@each_device
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16, FP8, torch.int64], ids=str)
@pytest.mark.parametrize("shape", [(5, 16, 32), (3, 49, 64), (7, 2, 6)], ids=str)
def test_rows_are_stored_at_their_slots_and_nowhere_else(
    shape: tuple[int, int, int], dtype: torch.dtype, device: str
) -> None:
    pages, page_rows, width = shape
    generator = torch.Generator().manual_seed(width)
    # As vLLM has it, other caches lie between the pages of this one.
    pool = torch.full((pages, page_rows + 3, 1, width), 7, dtype=torch.uint8 if dtype == FP8 else dtype)
    pool = (pool.view(FP8) if dtype == FP8 else pool).to(device)
    numbers = torch.randn(9, width, generator=generator) * 100
    rows = (
        numbers.to(FP16) if dtype == FP8 else numbers.long() << 33 if dtype == torch.int64 else numbers.to(dtype)
    ).to(device)
    slots = torch.randperm(pages * page_rows, generator=generator)[:9]
    slots[torch.tensor([0, 4, 8])] = torch.tensor([-1, -3, -1])
    wanted = pool.clone()
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            wanted[slot // page_rows, slot % page_rows, 0] = rows[row].to(dtype)
    qsa_store_cache_rows(pool[:, :page_rows], slots.to(device), rows[:, None] if page_rows == 16 else rows)
    assert compare.same_bits(pool, wanted)


@each_device
def test_a_ring_takes_rows_that_wrap(device: str) -> None:
    cache = torch.zeros(3, 8, 1, 4, device=device)
    rows = torch.arange(1.0, 7.0, device=device)[:, None].expand(-1, 4)
    qsa_store_cache_rows(cache, torch.tensor([14, 15, 8, 9, 10, -1], device=device), rows)
    assert cache[1, :, 0, 0].tolist() == [3, 4, 5, 0, 0, 0, 1, 2]
    assert float(cache[[0, 2]].abs().sum()) == 0


@each_device
def test_keys_and_values_are_divided_by_their_scales(device: str) -> None:
    pool = filled((3, 16, 2, 128), FP8, device, "nan")
    new = torch.arange(-192, 192, device=device).view(3, 2, 64).to(BF16)
    store_kv(new, new * 2, pool, torch.tensor([40, -1, 3], device=device), 0.5, 4.0)
    assert torch.equal(pool[2, 8, :, :64].float(), (new[0].float() / 0.5).clamp(-448, 448).to(FP8).float())
    assert torch.equal(pool[0, 3, :, 64:].float(), (new[2].float() * 2 / 4).to(FP8).float())
    assert int(pool.float().isnan().all(-1).logical_not().sum()) == 4


def test_rows_that_do_not_fit_a_cache_are_refused_by_name() -> None:
    cache, slots = torch.zeros(3, 8, 1, 4), torch.tensor([1, 2])
    with pytest.raises(LayoutError, match=r"rows: wanted shape \[2, 4\]"):
        qsa_store_cache_rows(cache, slots, torch.zeros(2, 6))
    with pytest.raises(LayoutError, match="cache: wanted shape"):
        qsa_store_cache_rows(cache[:, :, 0], slots, torch.zeros(2, 4))
    with pytest.raises(LayoutError, match="cache: wanted an even width"):
        qsa_store_cache_rows(torch.zeros(3, 8, 1, 3), slots, torch.zeros(2, 3))
    with pytest.raises(InputError, match="page ids below 3"):
        qsa_store_cache_rows(cache, torch.tensor([1, 24]), torch.zeros(2, 4))
    qsa_store_cache_rows(cache, slots[:0], torch.zeros(0, 4))


# Preparing.


@dataclass(frozen=True)
class Engine:
    """The caches of a few requests as vLLM holds them, and how a step is laid out.

    kv            [pages, 16, kv_heads, 2 * head_dim]
    compressed    [pages, 4, 1, index_dim]
    state         [state_blocks, ring_tokens, 1, index_dim], with room for three int64 after each key where `axes`
    kv_table, compressed_table, state_table  [requests, table_pages] int32
    axes          per request [3, tokens], positions of three axes; None where there is one
    """

    layer: Layer
    kv: Tensor
    compressed: Tensor
    state: Tensor
    kv_table: Tensor
    compressed_table: Tensor
    state_table: Tensor
    axes: tuple[Tensor, ...] | None

    def step(self, pieces: list[tuple[int, int]], padding: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """One step of tokens start .. stop of each request: query, gate and index queries of its rows."""
        layer, spec, device = self.layer, self.layer.spec, self.kv.device
        ring = self.state.shape[1]
        fused, axes, starts = [], [], [0]
        position: list[int] = []
        kv_slots: list[int] = []
        block_slots: list[int] = []
        state_slots: list[int] = []
        for request, (start, stop) in enumerate(pieces):
            tokens = range(start, stop)
            fused.append(layer.fused[request][start:stop])
            position += tokens
            kv_slots += slots_of(self.kv_table, request, tokens, 16)
            closing = slots_of(self.compressed_table, request, range(start // 4, (stop + 3) // 4), 4)
            block_slots += [closing[t // 4 - start // 4] if t % 4 == 3 else -1 for t in tokens]
            own = int(self.state_table[request, 0]) * ring
            state_slots += [own + t % ring if t >= stop - ring else -1 for t in tokens]
            starts.append(starts[-1] + stop - start)
            axes.append(
                torch.arange(start, stop).expand(3, -1) if self.axes is None else self.axes[request][:, start:stop]
            )
        rows = torch.nn.functional.pad(torch.cat(fused), (0, 0, 0, padding), value=float("nan")).to(device)
        # vLLM leaves in padding what an earlier step had there.
        place = torch.nn.functional.pad(torch.cat(axes, dim=1), (0, padding), value=2).to(device)

        def entries(values: list[int]) -> Tensor:
            return torch.tensor(values + [-1] * padding, device=device)

        q_size, index_size = 2 * spec.q_heads * spec.head_dim, spec.index_heads * spec.index_dim
        main = q_size + 2 * spec.kv_heads * spec.head_dim
        assert layer.table is not None
        index_q = torch.full((rows.shape[0], spec.index_heads, spec.index_dim), float("nan"), dtype=rows.dtype).to(
            device
        )
        weights = [weight.to(device) for weight in layer.weights]
        query, gate = qsa_prepare(
            rows[:, main : main + index_size],
            rows[:, main + index_size : main + index_size + spec.index_dim],
            place[0] if self.axes is None else place,
            layer.table.flatten(1).to(device),
            weights[2],
            weights[3],
            EPS,
            index_q,
            self.state,
            entries(state_slots),
            self.state_table,
            torch.tensor(starts, dtype=torch.int32, device=device),
            entries(position),
            self.compressed,
            entries(block_slots),
            torch.empty(0, 2, dtype=torch.int32, device=device),
            compress_ratio=4,
            mrope_section=None if self.axes is None else SECTION,
            rope_pos_offset=None if self.axes is None else spec.index_dim,
            main_qkv=rows[:, :main],
            main_q_norm_weight=weights[0],
            main_k_norm_weight=weights[1],
            main_eps=EPS,
            main_kv_cache=self.kv,
            main_slot_mapping=entries(kv_slots),
            main_k_scale=0.5,
            main_v_scale=2.0,
        )
        live = rows.shape[0] - padding
        return query[:live], gate[:live], index_q[:live]


def engine_of(layer: Layer, cache_dtype: torch.dtype, ring: int, device: str, multi_axis: bool = False) -> Engine:
    """An engine whose caches hold NaN, and whose pages and state blocks stand in no order."""
    generator = torch.Generator().manual_seed(ring)
    spec, requests, most = layer.spec, len(layer.tokens), max(layer.tokens)
    table_pages = -(-most // 16)
    pages = requests * table_pages + 2

    def table() -> Tensor:
        order = torch.randperm(pages, generator=generator)[: requests * table_pages]
        return order.view(requests, table_pages).int().to(device)

    tail = 24 // layer.dtype.itemsize if multi_axis else 0
    return Engine(
        layer,
        filled((pages, 16, spec.kv_heads, 2 * spec.head_dim), cache_dtype, device, "nan"),
        filled((pages, 4, 1, spec.index_dim), cache_dtype, device, "nan"),
        filled((requests + 3, ring, 1, spec.index_dim + tail), layer.dtype, device, "nan"),
        table(),
        table(),
        torch.randperm(requests + 3, generator=generator)[:requests, None].int().to(device),
        tuple(torch.randint(0, most, (3, n), generator=generator) for n in layer.tokens) if multi_axis else None,
    )


def angles_of_axes(table: Tensor, axes: Tensor) -> Tensor:
    """[tokens, 2, half] of three-axis positions [3, tokens], pair by pair."""
    half = table.shape[2]
    found = torch.empty(axes.shape[1], 2, half, dtype=table.dtype)
    for pair in range(half):
        axis = pair % 3 if pair % 3 and pair < 3 * SECTION[pair % 3] else 0
        found[:, :, pair] = table[axes[axis], :, pair]
    return found


def wanted_of(engine: Engine) -> tuple[Tensor, Tensor, KvCache, IndexCache]:
    """What the reference makes of all tokens of all requests at once, in caches of its own."""
    layer, spec, axes = engine.layer, engine.layer.spec, engine.axes
    rows = Rows.from_lengths(layer.tokens, layer.tokens)
    q, keys, values, index_q, raw = layer.parts(torch.cat(layer.fused))
    fp8 = engine.kv.dtype == FP8
    kv = KvCache.packed(
        filled(tuple(engine.kv.shape), engine.kv.dtype, "cpu", "nan"),
        engine.kv_table.cpu(),
        *((0.5, 2.0) if fp8 else (None, None)),
    )
    ring = torch.zeros(len(layer.tokens), engine.state.shape[1], spec.index_dim, dtype=layer.dtype)
    pooled = filled((engine.compressed.shape[0], 4, spec.index_dim), engine.kv.dtype, "cpu", "nan")
    index = IndexCache(pooled, engine.compressed_table.cpu(), 1.0 if fp8 else None, ring)
    assert layer.table is not None
    angles, first = layer.table, None
    if axes is not None:
        angles = torch.cat([angles_of_axes(layer.table, each) for each in axes])
        first = torch.zeros(len(axes), ring.shape[1] // 4, 2, layer.table.shape[2], dtype=layer.table.dtype)
    cos, sin = angles[:, 0], angles[:, 1]
    q_norm, k_norm, index_q_norm, index_k_norm = layer.weights
    norms = {"q_norm": q_norm, "k_norm": k_norm, "index_q_norm": index_q_norm, "index_k_norm": index_k_norm}
    new = (q, keys, values, index_q, raw)
    projected = Projected(*new, **norms, cos=cos, sin=sin, first_angles=first, eps=EPS)
    found = prepare(projected, kv, index, rows, spec)
    return *found, kv, index


def close(got: Tensor, wanted: Tensor, dtype: torch.dtype) -> bool:
    """Whether numbers differ by no more than a few roundings to a dtype, and NaN stands where it should."""
    got, wanted = got.cpu().float(), wanted.float()
    # A norm, two products and a sum round once each; squares that are added up in another order move the first.
    unit = torch.finfo(dtype).eps
    return torch.allclose(
        got, wanted, rtol=2 * unit, atol=4 * unit * float(wanted.nan_to_num().abs().max()), equal_nan=True
    )


@each_device
@pytest.mark.parametrize("multi_axis", [False, True], ids=["one-axis", "three-axes"])
@pytest.mark.parametrize(("dtype", "cache_dtype"), [(FP32, FP32), (FP16, FP16), (BF16, BF16), (BF16, FP8)], ids=str)
def test_steps_of_any_size_fill_the_caches_as_the_reference_does(
    dtype: torch.dtype, cache_dtype: torch.dtype, multi_axis: bool, device: str
) -> None:
    tokens = (37, 9, 50)
    layer = layer_of(tokens, SPEC, dtype, ROTARY, by_position=True, seed=3)
    engine = engine_of(layer, cache_dtype, 8, device, multi_axis)
    # Prefill in chunks that cut blocks, verify rows, decode of one token each, and steps that leave a request out.
    ends = [(11, 2, 30), (18, 2, 33), (19, 3, 34), (20, 4, 35), (23, 8, 38), (37, 9, 50)]
    before, outputs = (0, 0, 0), []
    for padding, after in enumerate(ends):
        outputs.append((before, after, engine.step(list(zip(before, after, strict=True)), padding)))
        before = after
    query, index_q, kv, index = wanted_of(engine)
    starts = [0, 37, 46]
    for begin, end, (got_query, got_gate, got_index) in outputs:
        at = torch.cat([torch.arange(s + a, s + b) for s, a, b in zip(starts, begin, end, strict=True)])
        assert close(got_query, query[at], dtype)
        assert close(got_index, index_q[at], dtype)
        gates = torch.cat(layer.fused)[at][:, : 2 * SPEC.q_heads * SPEC.head_dim].unflatten(1, (SPEC.q_heads, -1))
        assert compare.same_bits(got_gate.cpu(), gates[..., SPEC.head_dim :].contiguous())
        assert got_gate.is_contiguous()
    assert close(engine.kv[..., : SPEC.head_dim], kv.keys, cache_dtype)
    assert compare.same_bits(engine.kv[..., SPEC.head_dim :].cpu(), kv.values)
    assert close(engine.compressed[:, :, 0], index.keys, cache_dtype)
    assert index.raw_keys is not None
    for request, count in enumerate(tokens):
        held = engine.state[int(engine.state_table[request, 0]), :, 0].cpu()
        kept = torch.arange(max(count - 8, 0), count) % 8
        assert torch.equal(held[kept, : SPEC.index_dim], index.raw_keys[request][kept])
        if engine.axes is not None:
            place = held[:, SPEC.index_dim :].contiguous().view(torch.int64)
            assert torch.equal(place[kept], engine.axes[request][:, max(count - 8, 0) :].t())
    others = [b for b in range(engine.state.shape[0]) if b not in engine.state_table[:, 0].tolist()]
    assert bool(engine.state[others].isnan().all())


@settings(max_examples=25)
@given(st.data())
def test_pooled_means_do_not_depend_on_how_tokens_come(data: st.DataObject) -> None:
    tokens, ring = data.draw(st.integers(1, 40)), data.draw(st.sampled_from([4, 8, 12]))
    raw = torch.randn(tokens, 1, 8, generator=torch.Generator().manual_seed(tokens)).to(BF16)
    state = torch.full((3, ring, 1, 8), float("nan"), dtype=BF16)
    table, done, pooled, first = torch.tensor([[2]], dtype=torch.int32), 0, [], []
    while done < tokens:
        step = min(data.draw(st.integers(1, 9)), tokens - done)
        position = torch.arange(done, done + step)
        means, begins = qsa_compress_groups_with_ratio(
            raw[done : done + step],
            position[:, None, None].expand(-1, 1, 3),
            state,
            table,
            torch.zeros(step, dtype=torch.int32),
            torch.tensor([0, step], dtype=torch.int32),
            position,
            torch.where(position % 4 == 3, position // 4, -1),
            4,
        )
        pooled.append(means)
        first.append(begins)
        kept = torch.where(position >= done + step - ring, 2 * ring + position % ring, -1)
        qsa_store_cache_rows(state, kept, raw[done : done + step])
        done += step
    blocks = tokens // 4
    wanted = torch.zeros(tokens, 1, 8, dtype=BF16)
    wanted[3::4] = raw[: blocks * 4].view(blocks, 4, 1, 8).float().mean(1).to(BF16)
    assert torch.equal(torch.cat(pooled), wanted)
    assert torch.cat(first)[3::4].tolist() == [[4 * block] * 3 for block in range(blocks)]
    assert not bool(torch.cat(first)[torch.arange(tokens) % 4 != 3].any())


def test_angles_of_one_axis_are_those_of_three_alike() -> None:
    table = torch.randn(9, 16)
    position = torch.tensor([0, 8, 3])
    for one, three in zip(
        angles_at(position, table, None), angles_at(position.expand(3, -1), table, SECTION), strict=True
    ):
        assert torch.equal(one, three)


def test_several_axes_without_sections_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(layer_of((5,), SPEC, FP16, ROTARY, by_position=True), FP16, 8, "cpu", multi_axis=True)
    monkeypatch.setattr("tests.test_vllm_prepare.SECTION", None)
    with pytest.raises(LayoutError, match="one axis without mrope_section"):
        engine.step([(0, 5)])
    short = torch.zeros(1, 2, 1, 8)
    one = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(LayoutError, match="rings of 4 tokens or more"):
        qsa_compress_groups_with_ratio(
            torch.zeros(1, 1, 8), torch.zeros(1, 1, 3).long(), short, one[None], one, torch.tensor([0, 1]), one, one, 4
        )
