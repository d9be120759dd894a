"""Pools that get longer where they lie: on a GPU, and on a CPU with the driver emulated; the same tests for both."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
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
from flashqsa.integrations.transformers import enable, reserve
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
        assert pool.reaches(longer, 40_001)
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
        assert not other.reaches(held, 1)
        other.tensor(2).fill_(2.0)
    twice_pool, twice = copy.deepcopy((pool, held))
    assert not twice_pool.reaches(twice, 1)
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
        assert not pool.reaches(longer, RESERVED // GRANULE + 1)
        with pytest.raises(DriverError, match=f"only {RESERVED:,} bytes of addresses are reserved"):
            pool.tensor(RESERVED // GRANULE + 1)
        del pool, held, longer


class Waiting:
    """An emulated device on which a pool ends while nothing can be given back."""

    def __init__(self, driver: FakeDriver) -> None:
        self.driver = driver
        pool = GrowingPool((8,), torch.float32, torch.device("cpu"))
        pool.tensor(1)
        self.before = len(driver.log)
        del pool
        assert self.did == []

    @property
    def did(self) -> list[str]:
        """What was done on the device since."""
        return self.driver.log[self.before :]


GIVEN_BACK = ["synchronize", "cuMemUnmap", "cuMemAddressFree"]


def test_nothing_is_given_back_while_this_thread_captures_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    with emulated(FakeDriver()) as driver:
        other = GrowingPool((GRANULE,), torch.uint8, torch.device("cpu"))
        other.tensor(1)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        ended = Waiting(driver)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        # The next to need memory sees to it.
        other.tensor(2)
        assert ended.did[:3] == GIVEN_BACK
        del other


def test_nothing_is_given_back_while_steps_of_any_thread_are_captured() -> None:
    with emulated(FakeDriver()) as driver:
        with growing.capturing():
            with ThreadPoolExecutor(1) as threads:
                ended = threads.submit(Waiting, driver).result()
            assert ended.did == []
        assert ended.did == GIVEN_BACK


@pytest.mark.parametrize("failing", GIVEN_BACK)
def test_what_cannot_be_given_back_waits_for_the_next_time(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with emulated(FakeDriver()) as driver:
        pool = GrowingPool((8,), torch.float32, torch.device("cpu"))
        pool.tensor(1)
        before = held_bytes(torch.device("cpu"))
        if failing == "synchronize":
            with monkeypatch.context() as patch:
                patch.setattr(torch.cuda, "synchronize", raising)
                del pool
        else:
            driver.without.add(failing)
            del pool
            driver.without.clear()
        assert len(driver.ranges) == 1
        GrowingPool((8,), torch.float32, torch.device("cpu")).tensor(1)
        assert not driver.ranges
        assert held_bytes(torch.device("cpu")) == before - GRANULE


def raising(_index: int) -> None:
    """A device that another stream's capture keeps from being waited for."""
    raise RuntimeError("operation not permitted when stream is capturing")


def test_a_forked_process_leaves_its_parents_ranges_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with emulated(FakeDriver()) as driver:
        pool = GrowingPool((8,), torch.float32, torch.device("cpu"))
        pool.tensor(1)
        before, kept = len(driver.log), pool._mapping
        assert kept is not None
        own = kept._range.process
        with monkeypatch.context() as patch:
            patch.setattr("os.getpid", lambda: own + 1)
            ended = kept._range
            del pool, kept
        assert driver.log[before:] == []
        mapping._end(ended)
        assert driver.log[before:] == GIVEN_BACK


def test_a_failure_in_the_middle_of_growing_changes_nothing() -> None:
    for name in ("cuMemCreate", "cuMemMap", "cuMemSetAccess"):
        with emulated(FakeDriver()) as driver:
            pool = GrowingPool((GRANULE,), torch.uint8, torch.device("cpu"))
            held = pool.tensor(1).fill_(5)
            used, counted = driver.used, held_bytes(torch.device("cpu"))
            driver.without.add(name)
            with pytest.raises(DriverError, match=name):
                pool.tensor(3)
            assert (driver.used, held_bytes(torch.device("cpu"))) == (used, counted)
            driver.without.clear()
            longer = pool.tensor(3)
            longer[1:] = 6
            assert longer[:, 0].tolist() == [5, 6, 6]
            del pool, held, longer


def test_pools_are_ordinary_tensors_where_addresses_have_run_out(caplog: pytest.LogCaptureFixture) -> None:
    growing._tell.cache_clear()
    model, text = enable(tiny_model(7, **SPARSE_ONLY)), tokens(2, 300)
    with emulated(FakeDriver()) as driver:
        driver.failing["cuMemAddressReserve"] = 1
        cache = DynamicCache(config=model.config)
        found = logits(model, text, past_key_values=cache)
        assert len(driver.ranges) == 1
        assert caplog.text.count("pools that grow are copied: cuMemAddressReserve") == 1
        assert torch.equal(found, copying(lambda: logits(model, text, use_cache=True)))
        del cache


def test_the_knob_has_pools_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(growing, "_can_grow", lambda _device: True)
    assert can_grow(torch.device("cuda", 0))
    monkeypatch.setenv("FLASHQSA_GROWING_POOLS", "0")
    assert not can_grow(torch.device("cuda", 0))


@pytest.mark.parametrize(
    "lacking",
    ["cuMemGetAllocationGranularity", "cuMemAddressReserve", "cuMemCreate", "cuMemMap", "cuMemSetAccess"],
)
def test_a_driver_that_cannot_is_found_out_and_told(lacking: str, caplog: pytest.LogCaptureFixture) -> None:
    with emulated(FakeDriver()) as driver:
        driver.without.add(lacking)
        growing._can_grow.cache_clear()
        growing._tell.cache_clear()
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


def lying(store: Any) -> list[torch.Tensor]:
    """What grows where it lies."""
    return [store.kv, store.index_keys, store.raw_keys]


def copying(run: Callable[[], Any]) -> Any:
    """What a function returns where pools that grow are copied."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(growing, "can_grow", lambda _device: False)
        return run()


def test_a_cache_that_grows_copies_no_page(model: Any, place: Place) -> None:
    cache, text = DynamicCache(config=model.config), tokens(2, 1500).to(place.device)
    whole = logits(model, text, use_cache=True)
    pieces = [150, 1, 349, 500, 1, 499]
    parts = [fed(model, cache, text[:, :150], [150])]
    addresses = [[held.data_ptr() for held in lying(store)] for store in stores(cache)]
    pages = stores(cache)[0].kv.shape[0]
    parts.append(fed(model, cache, text[:, 150:], pieces[1:]))
    assert [[held.data_ptr() for held in lying(store)] for store in stores(cache)] == addresses
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
    assert held >= len(stores(cache)) * 3 * mapping.granule_bytes(0)
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
    asked = {"max_new_tokens": 60, "do_sample": False}
    grown = model.generate(text, **asked)
    assert torch.equal(grown, copying(lambda: model.generate(text, **asked)))


@pytest.mark.parametrize("left", range(7))
def test_a_cache_that_ran_out_of_memory_goes_on(left: int) -> None:
    """Whichever of the pools' memory is refused, in whichever operation: what is held is kept, and may be read on."""
    model, text = enable(tiny_model(7, **SPARSE_ONLY)), tokens(4, 1200)
    with emulated(FakeDriver()) as driver:
        for grow in (
            lambda cache: reserve(cache, 1200),
            lambda cache: cache.batch_repeat_interleave(4),
        ):
            cache = DynamicCache(config=model.config)
            logits(model, text[:1, :200], past_key_values=cache)
            driver.failing["cuMemCreate"] = left
            failed = False
            try:
                grow(cache)
            except DriverError:
                failed = True
            driver.failing.clear()
            if failed:
                forget_positions(cache, 200)
            requests = stores(cache)[0].batch
            if {store.batch for store in stores(cache)} == {requests}:
                forget_positions(cache, 200, torch.zeros(requests, dtype=torch.int64))
                cache.crop(150)
                forget_positions(cache, 150)
                same = text[:1].repeat(requests, 1)
                found = logits(model, same[:, 150:1000], past_key_values=cache)
                wanted = logits(model, same[:, :1000], use_cache=True)[:, 150:]
                assert float((found - wanted).abs().max()) < 1e-4
            del cache


def test_passes_without_a_cache_ask_for_no_memory_that_grows(model: Any, place: Place) -> None:
    before = held_bytes(place.device)
    with torch.no_grad():
        logits(model, tokens(2, 300).to(place.device), use_cache=False)
    assert held_bytes(place.device) == before
    if place.driver is not None:
        assert place.driver.log == []


@pytest.mark.filterwarnings("ignore")
def test_compiled_models_have_pools_that_are_copied() -> None:
    one = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    model, text = enable(tiny_model(7, **(SPARSE_ONLY | one))), tokens(2, 700)
    with emulated(FakeDriver()), torch.no_grad():
        compiled = torch.compile(model.forward, backend="aot_eager")
        found, cache = [], DynamicCache(config=model.config)
        for start, stop in ((0, 300), (300, 301), (301, 700)):
            ids = text[:, start:stop]
            found.append(compiled(input_ids=ids, past_key_values=cache, use_cache=True).logits)
        assert float((torch.cat(found, dim=1) - logits(model, text, use_cache=True)).abs().max()) < 1e-4
        del cache
    torch.compiler.reset()


def test_a_fork_leaves_no_memory_behind(model: Any, place: Place) -> None:
    cache = DynamicCache(config=model.config)
    logits(model, tokens(1, 300).to(place.device), past_key_values=cache)
    before = held_bytes(place.device)
    cache.batch_repeat_interleave(2)
    own = [store.raw_keys for store in stores(cache)]
    assert all(held.shape[0] == 2 for held in own)
    # What each request has of its own is copied, into ordinary memory; pages are shared.
    assert held_bytes(place.device) <= before
