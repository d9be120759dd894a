"""Pools that get longer where they lie: on a GPU, and on a CPU with the driver emulated; the same tests for both."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from flashqsa import growing
from flashqsa.cli.process import MemoryMeter
from flashqsa.growing import GrowingPool, can_grow, held_bytes
from flashqsa.kernels.nvrtc import DriverError, mapping
from tests.growing_emulate import GRANULE, RESERVED, FakeDriver, emulated

pytest.importorskip("transformers")

from transformers import DynamicCache

from flashqsa.device import facts_of
from flashqsa.integrations.transformers import enable
from flashqsa.integrations.transformers import store as store_module
from flashqsa.integrations.transformers.paged import PagedLayer
from flashqsa.values import FP8
from tests.test_transformers_cache import SPARSE_ONLY, forget_positions
from tests.transformers_tiny import logits, tiny_model, tokens


class Place:
    """Where a test runs: its device, and the emulated driver of a CPU."""

    def __init__(self, device: torch.device, driver: FakeDriver | None) -> None:
        self.device, self.driver = device, driver


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """An emulated device, or a GPU."""
    gc.collect()
    if request.param == "cuda":
        device = torch.device("cuda", 0)
        if not can_grow(device):
            pytest.skip("this GPU or its driver cannot keep addresses and memory apart")
        yield Place(device, None)
        return
    with emulated(FakeDriver()) as driver:
        yield Place(torch.device("cpu"), driver)
        gc.collect()
        assert not driver.ranges, "addresses were left behind"
        assert driver.used == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, FP8, torch.int64], ids=str)
def test_what_is_held_stays_where_it_is(place: Place, dtype: torch.dtype) -> None:
    pool = GrowingPool((2, 24), dtype, place.device)
    short = pool.tensor(3)
    assert (short.shape, short.dtype, short.device) == ((3, 2, 24), dtype, place.device)
    assert short.is_contiguous()
    values = torch.arange(3 * 2 * 24, device=place.device).reshape(3, 2, 24).to(dtype)
    short.copy_(values)
    kept = values.clone().view(torch.uint8)
    for entries in (4, 5, 40_000, 40_001):
        longer = pool.tensor(entries)
        assert longer.shape == (entries, 2, 24)
        assert longer.data_ptr() == short.data_ptr()
        assert pool.begins(longer)
        assert torch.equal(longer[:3].view(torch.uint8), kept)
        longer[-1].copy_(values[0])
    # The shorter one still reads what the longer one has.
    longer[0] = values[1]
    assert torch.equal(short[0].view(torch.uint8), kept[1])


def test_memory_is_taken_by_granules_and_given_back_with_the_last_tensor(place: Place) -> None:
    before = held_bytes(place.device)
    pool = GrowingPool((100,), torch.float32, place.device)
    assert held_bytes(place.device) == before
    first = pool.tensor(1)
    granule = mapping.granule_bytes(0)
    assert held_bytes(place.device) - before == granule
    pool.tensor(granule // 400)
    assert held_bytes(place.device) - before == granule
    view = pool.tensor(granule // 400 + 1)[5:, 3:]
    assert held_bytes(place.device) - before == 2 * granule
    view.fill_(3.0)
    del pool, first
    assert held_bytes(place.device) - before == 2 * granule
    assert float(view.sum()) == 3.0 * view.numel()
    del view
    assert held_bytes(place.device) == before


def test_copies_have_memory_of_their_own(place: Place) -> None:
    pool = GrowingPool((8,), torch.float32, place.device)
    held = pool.tensor(2).fill_(1.0)
    for other in (copy.copy(pool), copy.deepcopy(pool), pickle.loads(pickle.dumps(pool))):
        assert not other.begins(held)
        other.tensor(2).fill_(2.0)
    twice_pool, twice = copy.deepcopy((pool, held))
    assert not twice_pool.begins(twice)
    twice.fill_(3.0)
    assert held.tolist() == [[1.0] * 8] * 2


def test_tensors_made_in_inference_mode_are_ordinary_ones(place: Place) -> None:
    with torch.inference_mode():
        found = GrowingPool((8,), torch.float32, place.device).tensor(2)
    assert not found.is_inference()
    found.fill_(1.0)


def test_the_meter_counts_what_torch_does_not(place: Place) -> None:
    if place.driver is not None:
        pytest.skip("a CPU's meter reads the process")
    meter = MemoryMeter(place.device)
    pool = GrowingPool((1 << 20,), torch.uint8, place.device)
    pool.tensor(10)
    del pool
    assert 10 << 20 <= meter.peak_extra_bytes() < 14 << 20


def test_memory_that_torch_keeps_is_asked_back_before_a_pool_is_refused() -> None:
    with emulated(FakeDriver(memory=4 * GRANULE)) as driver:
        pool = GrowingPool((GRANULE,), torch.uint8, torch.device("cpu"))
        held = pool.tensor(4).fill_(7)
        with pytest.raises(
            torch.OutOfMemoryError, match=f"{GRANULE:,} more bytes for a pool that holds {4 * GRANULE:,}"
        ):
            pool.tensor(5)
        assert driver.log[-3:] == ["cuMemCreate", "empty_cache", "cuMemCreate"]
        assert held.eq(7).all()
        driver.memory *= 2
        longer = pool.tensor(5)
        assert longer[:4].eq(7).all()
        with pytest.raises(DriverError, match=f"only {RESERVED:,} bytes of addresses are reserved"):
            pool.tensor(RESERVED // GRANULE + 1)
        del pool, held, longer


def test_nothing_is_given_back_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    with emulated(FakeDriver()) as driver:
        pool = GrowingPool((8,), torch.float32, torch.device("cpu"))
        pool.tensor(1)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        before = len(driver.log)
        del pool
        assert driver.log[before:] == []
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        GrowingPool((8,), torch.float32, torch.device("cpu")).tensor(1)
        assert driver.log[before : before + 3] == ["synchronize", "cuMemUnmap", "cuMemAddressFree"]


@pytest.mark.parametrize("lacking", ["cuMemGetAllocationGranularity", "cuMemAddressReserve", "cuMemCreate", "cuMemMap"])
def test_a_driver_that_cannot_is_found_out_and_told(lacking: str, caplog: pytest.LogCaptureFixture) -> None:
    with emulated(FakeDriver()) as driver:
        driver.without.add(lacking)
        growing._can_grow.cache_clear()
        assert not growing._can_grow(torch.device("cuda", 0))
        assert f"cuda:0: pools that grow are copied: {lacking}: CUDA_ERROR_NOT_SUPPORTED" in caplog.text
        driver.without.clear()
        growing._can_grow.cache_clear()
        assert growing._can_grow(torch.device("cuda", 0))
        growing._can_grow.cache_clear()
        gc.collect()
        assert driver.used == 0


def test_a_cpu_has_none() -> None:
    assert not can_grow(torch.device("cpu"))


# -- caches


@pytest.fixture
def model(place: Place) -> Any:
    """A model of sparse layers with FlashQSA."""
    if place.device.type == "cuda" and "smxx" not in facts_of(place.device).kernel_sets:
        pytest.skip("FP32 has routes from compute capability 8.0 on")
    return enable(tiny_model(7, **SPARSE_ONLY).to(place.device))


def stores(cache: Any) -> list[Any]:
    """What the sparse layers of a cache hold."""
    return [layer.store for layer in cache.layers if isinstance(layer, PagedLayer)]


def fed(model: Any, cache: Any, text: torch.Tensor, pieces: list[int]) -> torch.Tensor:
    """Logits of a text that goes through in pieces."""
    found, start = [], 0
    for count in pieces:
        found.append(logits(model, text[:, start : start + count], past_key_values=cache))
        start += count
    return torch.cat(found, dim=1)


def copying(run: Callable[[], Any]) -> Any:
    """What a function returns where pools that grow are copied."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_module, "can_grow", lambda _device: False)
        return run()


def test_a_cache_that_grows_copies_no_page(model: Any, place: Place) -> None:
    cache, text = DynamicCache(config=model.config), tokens(2, 1500).to(place.device)
    whole = logits(model, text, use_cache=True)
    pieces = [150, 1, 349, 500, 1, 499]
    parts = [fed(model, cache, text[:, :150], [150])]
    addresses = [(store.kv.data_ptr(), store.index_keys.data_ptr()) for store in stores(cache)]
    pages = stores(cache)[0].kv.shape[0]
    parts.append(fed(model, cache, text[:, 150:], pieces[1:]))
    assert [(store.kv.data_ptr(), store.index_keys.data_ptr()) for store in stores(cache)] == addresses
    assert stores(cache)[0].kv.shape[0] > 3 * pages
    assert float((torch.cat(parts, dim=1) - whole).abs().max()) < 1e-4


def test_a_cache_grows_through_every_operation(model: Any, place: Place) -> None:
    """Forks, crops, resets and moves between growths: the logits are those of caches that are copied."""
    text = tokens(4, 900).to(place.device)

    def run() -> list[torch.Tensor]:
        cache = DynamicCache(config=model.config)
        found = [logits(model, text[:2, :200], past_key_values=cache)]
        cache.batch_repeat_interleave(2)
        forget_positions(cache, 200, torch.tensor([0, 0, 1, 1]))
        found.append(logits(model, text[:, 200:520], past_key_values=cache))
        cache.reorder_cache(torch.tensor([3, 1, 1, 0]))
        cache.crop(300)
        forget_positions(cache, 300)
        found.append(logits(model, text[:, 300:700], past_key_values=cache))
        for store in stores(cache):
            store.change(lambda stored: stored.cpu().clone().to(place.device))
        found.append(logits(model, text[:, 700:900], past_key_values=cache))
        own = copy.deepcopy(cache)
        found.append(logits(model, text[:, :500], past_key_values=own))
        found.append(logits(model, text[:, :300], past_key_values=cache))
        cache.reset()
        forget_positions(cache, 0)
        found.append(logits(model, text[:, :600], past_key_values=cache))
        return found

    for one, other in zip(run(), copying(run), strict=True):
        assert torch.equal(one, other)


def test_a_cache_gives_its_memory_back(model: Any, place: Place) -> None:
    before = held_bytes(place.device)
    cache = DynamicCache(config=model.config)
    logits(model, tokens(1, 300).to(place.device), past_key_values=cache)
    held = held_bytes(place.device) - before
    assert held >= len(stores(cache)) * 2 * mapping.granule_bytes(0)
    for store in stores(cache):
        store.change(lambda stored: stored.clone())
    assert held_bytes(place.device) == before, "what lies elsewhere now holds no pool"
    logits(model, tokens(1, 900).to(place.device), past_key_values=cache)
    assert held_bytes(place.device) - before >= held
    gone = weakref.ref(stores(cache)[0])
    del cache, store
    gc.collect()
    assert gone() is None
    assert held_bytes(place.device) == before


def test_generate_is_not_changed_by_growth(model: Any, place: Place) -> None:
    text = tokens(2, 90).to(place.device)
    asked = {"max_new_tokens": 300, "do_sample": False}
    grown = model.generate(text, **asked)
    assert torch.equal(grown, copying(lambda: model.generate(text, **asked)))
