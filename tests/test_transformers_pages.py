"""Pages of the cache layers: shared, parted, reserved, shuffled, in FP8; and texts that none of it changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("transformers")

from transformers import DynamicCache, StaticCache

from flashqsa import knobs
from flashqsa.device import facts_of
from flashqsa.integrations.transformers import CacheMismatchError, Steps, enable, reserve
from flashqsa.integrations.transformers.paged import PagedLayer
from flashqsa.integrations.transformers.pages import PageBook
from flashqsa.integrations.transformers.store import PAGE_TOKENS, PagedStore
from flashqsa.values import FP8
from tests.both_devices import DEVICES
from tests.test_transformers_cache import SPARSE_ONLY, forget_positions
from tests.test_transformers_layer import at_once
from tests.transformers_tiny import (
    logits,
    one_thread,  # noqa: F401
    tiny_model,
    tokens,
    twin,
)

CLOSE = 1e-5
PROMPT = 150
"""Two full pages of 64, and one that is begun."""


WAYS = [*DEVICES, "cpu at once"]
"""Devices; on a CPU norms, rotary and writing are one step only where that is asked for, on a GPU by themselves."""


def device_of(name: str) -> torch.device:
    """A device whose GPU, if it is one, has routes for FP32."""
    if name == "cuda" and "smxx" not in facts_of(torch.device("cuda", 0)).kernel_sets:
        pytest.skip("FP32 has routes from compute capability 8.0 on")
    return torch.device(name)


def placed(model: Any, way: str) -> Any:
    """A model with FlashQSA in one of `WAYS`."""
    name, _, one_step = way.partition(" ")
    return at_once(enable(model.to(device_of(name))), True if one_step else None)


@pytest.fixture(scope="module", params=WAYS)
def fast(request: pytest.FixtureRequest) -> Any:
    """A model of sparse layers only, with FlashQSA."""
    return placed(tiny_model(7, **SPARSE_ONLY), request.param)


@pytest.fixture(scope="module", params=WAYS)
def mixed(request: pytest.FixtureRequest) -> Any:
    """A model with a linear layer too, with FlashQSA."""
    return placed(tiny_model(8), request.param)


def stores(cache: Any) -> list[PagedStore]:
    """What the sparse layers of a cache hold."""
    return [layer.store for layer in cache.layers if isinstance(layer, PagedLayer) and layer.store is not None]


def new_cache(model: Any, kind: str, columns: int = 320) -> Any:
    """An empty cache."""
    return (
        StaticCache(config=model.config, max_cache_len=columns)
        if kind == "static"
        else DynamicCache(config=model.config)
    )


# -- the book


books = st.tuples(st.integers(1, 4), st.integers(1, 5)).map(lambda size: PageBook(*size, size[0] * size[1]))


@given(books, st.data())
def test_a_request_writes_to_no_page_of_another(book: PageBook, data: st.DataObject) -> None:
    """Through any forks, merges and crops, what each request holds stays what it wrote, page by page."""
    held = {page: f"empty {page}" for page in range(book.pages)}
    texts = [[held[page] for page in row] for row in book.rows.tolist()]
    full = [0] * len(texts)
    for turn in range(data.draw(st.integers(1, 6))):
        requests, width = book.rows.shape
        # Each request fills some pages.
        for request in range(requests):
            new = data.draw(st.integers(full[request], width))
            for place in range(full[request], new):
                held[int(book.rows[request, place])] = texts[request][place] = f"turn {turn} request {request} {place}"
            full[request] = new
        if data.draw(st.booleans()):
            order = data.draw(st.lists(st.integers(0, requests - 1), min_size=1, max_size=5))
            before = book.rows.copy()
            lacking = book.choose(order, full)
            if lacking:
                assert np.array_equal(book.rows, before)
                held |= {book.pages + more: "new" for more in range(lacking)}
                book.pages += lacking
                assert book.choose(order, full) == 0
            texts, full = [list(texts[source]) for source in order], [full[source] for source in order]
        else:
            full = [data.draw(st.integers(0, count)) for count in full]
            lacking, _ = book.part(full)
            if lacking:
                held |= {book.pages + more: "new" for more in range(lacking)}
                book.pages += lacking
                assert book.part(full)[0] == 0
        for request, row in enumerate(book.rows.tolist()):
            assert len(set(row)) == len(row)
            assert [held[page] for page in row[: full[request]]] == texts[request][: full[request]]
            others = {page for other, pages in enumerate(book.rows.tolist()) if other != request for page in pages}
            assert not others & set(row[full[request] :])
        assert int(book.rows.max()) < book.pages


def test_a_book_widens_by_pages_that_nobody_has() -> None:
    book = PageBook(2, 2, 4)
    assert book.missing(3) == 2
    book.pages += 2
    book.widen(3)
    assert sorted(book.rows.ravel().tolist()) == [0, 1, 2, 3, 4, 5]
    assert book.rows[:, :2].tolist() == [[0, 1], [2, 3]]


# -- sharing


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_forks_share_full_pages_and_nothing_they_write(fast: Any, kind: str) -> None:
    cache, device = new_cache(fast, kind), fast.device
    prompt, ends = tokens(1, PROMPT).to(device), tokens(3, 90, seed=5).to(device)
    logits(fast, prompt, past_key_values=cache)
    cache.batch_repeat_interleave(3)
    forget_positions(cache, PROMPT, torch.tensor([0, 0, 0]))
    for store in stores(cache):
        full = PROMPT // PAGE_TOKENS
        assert len(set(store.book.rows[:, :full].ravel().tolist())) == full
        assert store.page_table.tolist() == store.book.rows.tolist()
    got = logits(fast, ends, past_key_values=cache)
    want = logits(fast, torch.cat([prompt.expand(3, -1), ends], 1), use_cache=False)[:, PROMPT:]
    assert (got - want).abs().max() <= CLOSE


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("taken", [10, 60, 100], ids=["within the page", "into a shared page", "over a shared page"])
def test_forks_that_are_cut_back_go_their_own_ways(fast: Any, kind: str, taken: int) -> None:
    cache, device = new_cache(fast, kind), fast.device
    prompt, ends = tokens(1, PROMPT).to(device), tokens(2, 70, seed=6).to(device)
    logits(fast, prompt, past_key_values=cache)
    cache.batch_repeat_interleave(2)
    keep = PROMPT - taken
    for layer in cache.layers:
        layer.crop(-taken)
    forget_positions(cache, keep, torch.tensor([0, 0]))
    got = logits(fast, ends, past_key_values=cache)
    want = logits(fast, torch.cat([prompt[:, :keep].expand(2, -1), ends], 1), use_cache=False)[:, keep:]
    assert (got - want).abs().max() <= CLOSE


def test_beams_of_a_static_cache_move_in_place(fast: Any) -> None:
    cache, device = new_cache(fast, "static"), fast.device
    ids = tokens(3, PROMPT).to(device)
    logits(fast, ids, past_key_values=cache)
    places = [(store.kv.data_ptr(), store.page_table.data_ptr(), store.raw_keys.data_ptr()) for store in stores(cache)]
    order = torch.tensor([2, 2, 0], device=device)
    cache.reorder_cache(order)
    forget_positions(cache, PROMPT, order)
    ends = tokens(3, 70, seed=8).to(device)
    got = logits(fast, ends, past_key_values=cache)
    want = logits(fast, torch.cat([ids[order], ends], 1), use_cache=False)[:, PROMPT:]
    assert (got - want).abs().max() <= CLOSE
    assert [
        (store.kv.data_ptr(), store.page_table.data_ptr(), store.raw_keys.data_ptr()) for store in stores(cache)
    ] == places


def test_a_forked_cache_is_reset_to_pages_of_each_request(fast: Any) -> None:
    for kind in ("dynamic", "static"):
        cache, device = new_cache(fast, kind), fast.device
        logits(fast, tokens(1, PAGE_TOKENS).to(device), past_key_values=cache)
        cache.batch_repeat_interleave(3)
        cache.reset()
        forget_positions(cache, 0, torch.tensor([0, 0, 0]))
        ids = tokens(3, PROMPT, seed=4).to(device)
        got = logits(fast, ids, past_key_values=cache)
        assert (got - logits(fast, ids, use_cache=False)).abs().max() <= CLOSE
        for store in stores(cache):
            assert len(set(store.book.rows.ravel().tolist())) == store.book.rows.size


@pytest.mark.parametrize("columns", [0, -3, 2.5, True, None, "9"], ids=str)
def test_what_is_no_number_of_columns_is_not_reserved(columns: Any) -> None:
    cache = new_cache(tiny_model(2), "dynamic")
    with pytest.raises(ValueError, match=r"columns: wanted a whole number from 1 on; got"):
        reserve(cache, columns)


def test_reserved_room_is_filled_without_a_copy(fast: Any) -> None:
    cache, ids = DynamicCache(config=fast.config), tokens(2, 400).to(fast.device)
    reserve(cache, 400)
    logits(fast, ids[:, :10], past_key_values=cache)
    places = [(store.kv.data_ptr(), store.raw_keys.data_ptr()) for store in stores(cache)]
    found = [logits(fast, ids[:, at : at + 65], past_key_values=cache) for at in range(10, 400, 65)]
    assert [(store.kv.data_ptr(), store.raw_keys.data_ptr()) for store in stores(cache)] == places
    want = logits(fast, ids, use_cache=False)[:, 10:]
    assert (torch.cat(found, 1) - want).abs().max() <= CLOSE
    reserve(cache, 1000)
    assert all(store.capacity >= 1000 for store in stores(cache))
    more = tokens(2, 3, seed=3).to(fast.device)
    want = logits(fast, torch.cat([ids, more], 1), use_cache=False)[:, 400:]
    assert (logits(fast, more, past_key_values=cache) - want).abs().max() <= CLOSE


# -- FP8


def test_fp8_keys_and_values_take_a_quarter_and_stay_what_was_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """In FP32 the result is that of keys and values that were rounded to FP8 before they were stored."""
    whole = enable(tiny_model(7, **SPARSE_ONLY))
    model = enable(twin(whole), kv_dtype=FP8)
    ids = tokens(2, PROMPT)
    cache, plain = DynamicCache(config=model.config), DynamicCache(config=model.config)
    got = [logits(model, ids[:, :100], past_key_values=cache), logits(model, ids[:, 100:], past_key_values=cache)]
    append = PagedStore.append

    def rounded(self: PagedStore, new: Any, *rest: Any) -> Any:
        object.__setattr__(new, "keys", new.keys.to(FP8).float())
        object.__setattr__(new, "values", new.values.to(FP8).float())
        return append(self, new, *rest)

    exact = logits(whole, ids, use_cache=False)
    with monkeypatch.context() as patch:
        patch.setattr(PagedStore, "append", rounded)
        want = logits(whole, ids, past_key_values=plain)
    assert (torch.cat(got, 1) - want).abs().max() <= CLOSE
    assert (exact - want).abs().max() > 1e-3
    for half, full in zip(stores(cache), stores(plain), strict=True):
        assert half.kv.dtype == FP8
        assert 4 * half.kv[0].nbytes == full.kv[0].nbytes
        for mine, other in zip(half.in_columns(PROMPT), full.in_columns(PROMPT), strict=True):
            assert mine.dtype == torch.float32
            assert (mine - other).abs().max() <= CLOSE


def test_an_fp8_cache_follows_every_operation() -> None:
    model = enable(tiny_model(7, **SPARSE_ONLY), kv_dtype=FP8)
    ids, ends = tokens(2, PROMPT), tokens(3, 70, seed=5)
    cache = DynamicCache(config=model.config)
    logits(model, ids, past_key_values=cache)
    for layer in cache.layers:
        layer.crop(-20)
        layer.batch_repeat_interleave(2)
        layer.batch_select_indices(torch.tensor([3, 0, 1]))
        layer.reorder_cache(torch.tensor([1, 1, 0]))
        layer.offload()
        layer.prefetch()
    requests = torch.tensor([0, 0, 1])
    forget_positions(cache, PROMPT - 20, requests)
    got = logits(model, ends, past_key_values=cache)
    want = logits(model, torch.cat([ids[requests, : PROMPT - 20], ends], 1), use_cache=False)[:, PROMPT - 20 :]
    assert (got - want).abs().max() <= CLOSE


def test_only_fp8_is_another_dtype_of_keys_and_values() -> None:
    with pytest.raises(ValueError, match=r"kv_dtype: wanted torch.float8_e4m3fn or None; got torch.int8"):
        enable(tiny_model(0), kv_dtype=torch.int8)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_an_fp8_cache_serves_a_half_model_on_a_gpu(dtype: torch.dtype) -> None:
    device = device_of("cuda")
    exact = enable(tiny_model(2).to(dtype).to(device))
    model = enable(twin(exact), kv_dtype=FP8)
    ids = tokens(2, PROMPT).to(device)
    first, again = (logits(model, ids, use_cache=True).float() for _ in range(2))
    assert torch.equal(first, again)
    assert bool(first.isfinite().all())
    want = logits(exact, ids, use_cache=True).float()
    assert float((first - want).abs().amax(dim=-1).median()) < 0.3 * float(want.std())


# -- the same text, whatever the placement, the chunks and the way of decoding


def greedy(model: Any, ids: Tensor, chunk: int, kind: str, count: int = 24) -> list[int]:
    """Greedy tokens of one request: a prefill in chunks, then a pass for each token, or steps."""
    cache = new_cache(model, "static" if kind == "steps" else kind)
    for start in range(0, ids.shape[1], chunk):
        last = logits(model, ids[:, start : start + chunk], past_key_values=cache)[:, -1].argmax(-1)
    found = [int(last)]
    run = Steps(model, cache, last) if kind == "steps" else None
    while len(found) < count:
        if run is not None:
            found += run.step([found[-3:]])[0]
        else:
            last = logits(model, last[:, None], past_key_values=cache)[:, -1].argmax(-1)
            found.append(int(last))
    return found[:count]


@pytest.fixture
def invariant() -> Iterator[None]:
    """FLASHQSA_BATCH_INVARIANT=on."""
    with knobs.BATCH_INVARIANT.set_to("on"):
        yield


@pytest.mark.parametrize("kind", ["dynamic", "static", "steps"])
@pytest.mark.parametrize("chunk", [PROMPT, 64, 37])
def test_a_text_is_the_same_whatever_the_chunks(mixed: Any, kind: str, chunk: int) -> None:
    ids = tokens(1, PROMPT).to(mixed.device)
    wanted = greedy(mixed, ids, PROMPT, "dynamic")
    assert greedy(mixed, ids, chunk, kind) == wanted
    assert len(set(wanted)) > 3


@pytest.mark.parametrize("kind", ["dynamic", "static", "steps"])
def test_a_text_is_the_same_when_rows_are_invariant(mixed: Any, kind: str, invariant: None) -> None:
    ids = tokens(1, PROMPT).to(mixed.device)
    assert greedy(mixed, ids, 37, kind) == greedy(mixed, ids, PROMPT, "dynamic")


def test_bits_do_not_depend_on_where_pages_lie(mixed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = tokens(2, PROMPT).to(mixed.device)

    def run() -> Tensor:
        cache, parts = DynamicCache(config=mixed.config), []
        for at in (slice(0, 90), slice(90, 149), slice(149, 150)):
            parts.append(logits(mixed, ids[:, at], past_key_values=cache))
        return torch.cat(parts, 1)

    wanted = run()
    assert torch.equal(run(), wanted)
    make, widen = PageBook.__init__, PageBook.widen
    rng = np.random.default_rng(0)

    def shuffled(self: PageBook, requests: int, table_pages: int, pages: int) -> None:
        make(self, requests, table_pages, pages)
        self.rows = rng.permutation(self.rows.ravel()).reshape(self.rows.shape)

    def shuffled_widen(self: PageBook, table_pages: int) -> None:
        held = self.rows.shape[1]
        widen(self, table_pages)
        self.rows[:, held:] = rng.permutation(self.rows[:, held:].ravel()).reshape(self.rows[:, held:].shape)

    monkeypatch.setattr(PageBook, "__init__", shuffled)
    monkeypatch.setattr(PageBook, "widen", shuffled_widen)
    for _ in range(3):
        assert torch.equal(run(), wanted)


# -- what is refused before any layer runs


def test_a_prompt_that_a_static_cache_cannot_hold_is_refused_before_work_starts(mixed: Any) -> None:
    cache = new_cache(mixed, "static", 40)
    with pytest.raises(CacheMismatchError, match="wanted room for 41 columns; got max_cache_len 40"):
        logits(mixed, tokens(1, 41).to(mixed.device), past_key_values=cache)
    assert not cache.layers[0].is_conv_states_initialized[0]
    logits(mixed, tokens(1, 38).to(mixed.device), past_key_values=cache)
    state = cache.layers[0].recurrent_states[0].clone()
    with pytest.raises(CacheMismatchError, match="wanted room for 41 columns"):
        logits(mixed, tokens(1, 3).to(mixed.device), past_key_values=cache)
    assert torch.equal(state, cache.layers[0].recurrent_states[0])


def test_a_cache_on_another_device_is_refused() -> None:
    """With one device here, "meta" plays the other."""
    model = enable(tiny_model(7, **SPARSE_ONLY))
    cache = DynamicCache(config=model.config)
    logits(model, tokens(1, 20), past_key_values=cache)
    cache.layers[0].device = torch.device("meta")
    with pytest.raises(CacheMismatchError, match="wanted one on cpu; got one on meta"):
        logits(model, tokens(1, 2), past_key_values=cache)


def test_a_layer_whose_weights_lie_apart_is_refused() -> None:
    from flashqsa.integrations.transformers import UnsupportedModelError, is_enabled

    model = tiny_model(1)
    model.model.layers[1].self_attn.indexer.to("meta")
    with pytest.raises(UnsupportedModelError, match=r"layers.1.self_attn: wanted all weights on one device; got cpu"):
        enable(model)
    assert not is_enabled(model)
