"""The cache layers: every way to fill, cut, copy, move and hand over a cache gives what a fresh run gives."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("transformers")

from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicIndexedLayer, StaticIndexedLayer

from flashqsa.integrations.transformers import (
    CacheMismatchError,
    FlashQsaLayer,
    FlashQsaStaticLayer,
    MaskMismatchError,
    disable,
    enable,
    hand_overs,
)
from flashqsa.integrations.transformers.masks import stock_mask
from flashqsa.integrations.transformers.paged import PagedLayer
from flashqsa.integrations.transformers.store import PagedStore
from tests.transformers_tiny import (
    logits,
    one_thread,  # noqa: F401
    padding,
    tiny_config,
    tiny_model,
    tokens,
    twin,
)

CLOSE = 1e-5
MAX_COLUMNS = 160
SPARSE_ONLY: dict[str, Any] = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
"""Without linear layers, whose state cannot be taken back."""


@pytest.fixture(scope="module")
def fast() -> Any:
    """A model of sparse layers only, with FlashQSA."""
    return enable(tiny_model(7, **SPARSE_ONLY))


@pytest.fixture(scope="module")
def mixed() -> Any:
    """A model with a linear layer, with FlashQSA."""
    return enable(tiny_model(8))


def new_cache(model: Any, kind: str, max_columns: int = MAX_COLUMNS) -> Any:
    if kind == "static":
        return StaticCache(config=model.config, max_cache_len=max_columns)
    return DynamicCache(config=model.config)


def paged(cache: Any) -> list[PagedLayer]:
    return [layer for layer in cache.layers if isinstance(layer, PagedLayer)]


def held_by(store: PagedStore) -> list[Tensor]:
    """A store's tensors, but for the norm weight it compares with."""
    return [held for name, held in vars(store).items() if isinstance(held, Tensor) and name != "pooled_with"]


def forget_positions(cache: Any, keep: int, requests: Tensor | None = None) -> None:
    """Until 5.22 the stock model keeps positions on the cache, and leaves it to whoever cuts one to cut them too."""
    positions = getattr(cache, "position_ids", None)
    if positions is not None:
        cache.position_ids = positions[..., :keep] if requests is None else positions[:, requests, :keep]


# -- schedules: a sparse layer by itself, against runs of each request from its first token


@dataclass
class Bench:
    """One sparse layer, a cache, and what went into it: `hidden` and `visible` [batch, columns, ...]."""

    model: Any
    cache: Any
    hidden: Tensor
    visible: Tensor
    seed: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(11))

    @property
    def layer(self) -> Any:
        return self.model.model.layers[0].self_attn

    def angles(self, columns: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():  # all of them, though the layer needs the last
            cos, sin = self.model.model.rotary_emb(self.hidden[:1], columns.expand(3, 1, -1))
        return cos.detach(), sin.detach()

    def append(self, count: int, hide: list[int], through_stock: bool = False) -> None:
        """Runs `count` new columns, of which those of `hide` are padding in request 0, and checks the output."""
        batch, before = self.hidden.shape[:2]
        hidden = torch.randn(batch, count, self.hidden.shape[2], generator=self.seed)
        visible = torch.ones(batch, count, dtype=torch.bool)
        visible[0, [column for column in hide if column < count]] = False
        self.hidden, self.visible = torch.cat([self.hidden, hidden], 1), torch.cat([self.visible, visible], 1)
        columns = before + count
        mask = self.visible
        if through_stock:
            mask = stock_mask(batch, count, self.cache.get_mask_sizes(count, 0)[0], before, self.visible)
        angles = [part.expand(batch, -1, -1) for part in self.angles(torch.arange(columns))]
        with torch.no_grad():
            got, _ = self.layer(hidden, angles, mask, self.cache)
            for request in range(batch):
                seen = self.visible[request].nonzero().flatten()
                new = seen[seen >= before]
                if not new.numel():
                    continue
                alone, _ = self.layer(self.hidden[request, seen][None], self.angles(seen), None, None)
                assert (got[request, new - before] - alone[0, -new.numel() :]).abs().max() <= CLOSE

    def choose(self, requests: Tensor) -> None:
        self.hidden, self.visible = self.hidden[requests], self.visible[requests]


def steps(static: bool) -> st.SearchStrategy[list[tuple[str, int, list[int]]]]:
    names = ["append", "append", "append", "stock", "crop", "reorder", "offload"]
    # The stock static layer cannot change its batch.
    names += [] if static else ["select", "repeat"]
    hide = st.lists(st.integers(0, 20), max_size=6)
    step = st.tuples(st.sampled_from(names), st.integers(1, 21), hide)
    return st.lists(step, min_size=3, max_size=9)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@settings(max_examples=25)
@given(data=st.data())
def test_any_schedule_equals_a_fresh_run(kind: str, data: st.DataObject) -> None:
    model = _bench_model()
    columns = 400 if kind == "static" else MAX_COLUMNS
    bench = Bench(model, new_cache(model, kind, columns), torch.empty(2, 0, 64), torch.empty(2, 0, dtype=torch.bool))
    bench.append(data.draw(st.integers(1, 60)), data.draw(st.lists(st.integers(0, 20), max_size=6)))
    layer = bench.cache.layers[0]
    for name, size, hide in data.draw(steps(kind == "static")):
        batch, held = bench.hidden.shape[:2]
        if name in ("append", "stock"):
            bench.append(size, hide, through_stock=name == "stock")
        elif name == "crop":
            taken = min(size, held - 1)  # the stock layer leaves the batch of an empty cache as it is
            bench.cache.crop(-taken)
            bench.hidden, bench.visible = bench.hidden[:, : held - taken], bench.visible[:, : held - taken]
        elif name == "reorder":
            order = torch.arange(batch).roll(size) if size % 3 else torch.full((batch,), size % batch)
            bench.cache.reorder_cache(order)
            bench.choose(order)
        elif name == "select":
            kept = torch.arange(batch)[size % 2 :] if batch > 1 else torch.arange(batch)
            bench.cache.batch_select_indices(kept)
            bench.choose(kept)
        elif name == "repeat" and batch < 3:
            bench.cache.batch_repeat_interleave(2)
            bench.choose(torch.arange(batch).repeat_interleave(2))
        elif name == "offload":
            layer.offload()
            layer.prefetch()
        assert int(layer.get_seq_length()) == bench.hidden.shape[1]
    bench.append(5, [])


_models: dict[str, Any] = {}


def _bench_model() -> Any:
    """A model of one sparse layer; 16 index heads, so that no block scores 0 and no selection has a tie at the cut."""
    if not _models:
        _models["one"] = enable(tiny_model(9, num_hidden_layers=1, layer_types=["full_attention"], indexer_n_heads=16))
    return _models["one"]


# -- whole models


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("chunks", [[100], [37, 63], [1, 2, 3, 4, 90], [99, 1], [33] + [1] * 5 + [62]])
def test_chunks_and_steps_equal_one_pass(mixed: Any, kind: str, chunks: list[int]) -> None:
    ids, mask = tokens(2, 100), padding(2, 100, {1: slice(0, 6)})
    want = logits(mixed, ids, attention_mask=mask, use_cache=False)
    cache, done, found = new_cache(mixed, kind), 0, []
    for size in chunks:
        part = ids[:, done : done + size]
        done += size
        found.append(logits(mixed, part, attention_mask=mask[:, :done], past_key_values=cache))
        assert int(cache.get_seq_length()) == done
        assert cache.get_mask_sizes(1, 1) == ((MAX_COLUMNS, 0) if kind == "static" else (done + 1, 0))
    # The linear layer takes another way through a chunk than through a token.
    assert (torch.cat(found, 1) - want)[mask.bool()].abs().max() <= 1e-4


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_decode_neither_copies_nor_pools_again(fast: Any, kind: str) -> None:
    cache = new_cache(fast, kind)
    ids = tokens(1, 110)
    logits(fast, ids[:, :90], past_key_values=cache)
    logits(fast, ids[:, 90:91], past_key_values=cache)
    store = paged(cache)[0].store
    assert store is not None
    places = [tensor.data_ptr() for tensor in (store.kv, store.raw_keys, store.index_keys)]
    pooled = store.index_keys.flatten(0, 1)  # one request's pages, in order
    # A key that is pooled again would be repaired. These score NaN, so that their blocks are not chosen.
    pooled[:22] = float("nan")
    for column in range(91, 97):
        logits(fast, ids[:, column : column + 1], past_key_values=cache)
    assert pooled[:22].isnan().all()
    assert torch.isfinite(pooled[22:24]).all()
    assert places == [tensor.data_ptr() for tensor in (store.kv, store.raw_keys, store.index_keys)]


def test_a_store_grows_seldom_and_keeps_what_it_holds(fast: Any) -> None:
    cache = new_cache(fast, "dynamic")
    ids = tokens(1, 700)
    want = logits(fast, ids, use_cache=False)
    capacities, found = [], []
    for start in range(0, 700, 20):
        found.append(logits(fast, ids[:, start : start + 20], past_key_values=cache))
        store = paged(cache)[0].store
        assert store is not None
        capacities.append(store.capacity)
        assert store.nbytes == sum(held.nbytes for held in held_by(store))
    assert sorted(set(capacities)) == [64, 320, 576, 832]
    assert (torch.cat(found, 1) - want).abs().max() <= CLOSE


def test_reading_a_cache_gives_what_stock_would_hold(fast: Any) -> None:
    stock = disable(twin(fast))
    ids, mask = tokens(2, 50), padding(2, 50, {0: [0, 1, 2, 30], 1: slice(45, 50)})
    ours, theirs = DynamicCache(config=fast.config), DynamicCache(config=stock.config)
    logits(fast, ids, attention_mask=mask, past_key_values=ours)
    logits(stock, ids, attention_mask=mask, past_key_values=theirs)
    shown = mask.bool()
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        assert mine.keys.shape == other.keys.shape
        assert (mine.keys - other.keys).transpose(1, 2)[shown].abs().max() <= CLOSE
        assert (mine.values - other.values).transpose(1, 2)[shown].abs().max() <= CLOSE
        assert (mine.indexer_keys - other.indexer_keys)[shown].abs().max() <= CLOSE
        assert not mine.keys.transpose(1, 2)[~shown].any()


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_sequence_may_change_hands(fast: Any, kind: str) -> None:
    """Prefill by stock, go on with FlashQSA, then stock again, and once more FlashQSA."""
    stock = disable(twin(fast))
    ids, mask = tokens(2, 90), padding(2, 90, {0: slice(0, 7)})
    want = logits(fast, ids, attention_mask=mask, use_cache=False)
    enable(fast)  # `disable` may have been the last that kept our cache layers registered
    cache, done = new_cache(fast, kind), 0
    for model, size in [(stock, 50), (fast, 20), (fast, 1), (stock, 3), (fast, 16)]:
        got = logits(model, ids[:, done : done + size], attention_mask=mask[:, : done + size], past_key_values=cache)
        shown = mask[:, done : done + size].bool()
        assert (got - want[:, done : done + size])[shown].abs().max() <= 1e-4
        done += size


def test_a_stock_cache_is_taken_over_in_its_place(fast: Any) -> None:
    stock = disable(twin(fast))
    ids = tokens(1, 80)
    want = logits(fast, ids, use_cache=False)
    for kind, stock_kind, ours in [
        (DynamicCache(config=stock.config), DynamicIndexedLayer, FlashQsaLayer),
        (StaticCache(config=stock.config, max_cache_len=96), StaticIndexedLayer, FlashQsaStaticLayer),
    ]:
        kind.layers = [stock_kind(max_cache_len=96) for _ in kind.layers]
        logits(stock, ids[:, :60], past_key_values=kind)
        assert [type(layer) for layer in kind.layers] == [stock_kind] * 2
        got = logits(fast, ids[:, 60:], past_key_values=kind)
        assert [type(layer) for layer in kind.layers] == [ours] * 2
        assert (got - want[:, 60:]).abs().max() <= 1e-4


def test_recorded_gradients_mid_sequence_do_not_matter(fast: Any) -> None:
    """A prefill that forgot `no_grad` goes to stock; the steps after it do not."""
    ids = tokens(1, 70)
    want = logits(fast, ids, use_cache=False)
    cache, before = DynamicCache(config=fast.config), sum(hand_overs().values())
    first = fast(ids[:, :50], past_key_values=cache).logits
    assert first.requires_grad
    assert sum(hand_overs().values()) == before + 2
    rest = logits(fast, ids[:, 50:], past_key_values=cache)
    assert sum(hand_overs().values()) == before + 2
    assert (torch.cat([first.detach(), rest], 1) - want).abs().max() <= 1e-4


def test_a_custom_mask_mid_sequence_goes_to_stock_and_back(fast: Any) -> None:
    """The stock layer then needs the angles of the whole history, which were not computed."""
    stock = disable(twin(fast))
    ids = tokens(1, 80)
    mask = torch.ones(1, 1, 10, 70, dtype=torch.bool).tril(60)
    mask[..., 5:11] = False
    caches = DynamicCache(config=stock.config), DynamicCache(config=fast.config)
    for model, cache in zip((stock, fast), caches, strict=True):
        logits(model, ids[:, :60], past_key_values=cache)
    want, got = (
        logits(model, ids[:, 60:70], attention_mask=mask, past_key_values=cache)
        for model, cache in zip((stock, fast), caches, strict=True)
    )
    assert (got - want).abs().max() <= 1e-4
    want, got = (
        logits(model, ids[:, 70:], past_key_values=cache) for model, cache in zip((stock, fast), caches, strict=True)
    )
    assert (got - want).abs().max() <= 1e-4


def test_inference_mode_may_be_left_mid_sequence(fast: Any) -> None:
    ids = tokens(1, 70)
    want = logits(fast, ids, use_cache=False)
    cache = DynamicCache(config=fast.config)
    with torch.inference_mode():
        fast(ids[:, :50], past_key_values=cache)
    assert (logits(fast, ids[:, 50:], past_key_values=cache) - want[:, 50:]).abs().max() <= CLOSE


def test_a_forked_sequence_goes_on_both_ways(fast: Any) -> None:
    prompt, ends = tokens(1, 75), tokens(2, 12, seed=5)
    cache = DynamicCache(config=fast.config)
    logits(fast, prompt, past_key_values=cache)
    cache.batch_repeat_interleave(2)
    forget_positions(cache, 75, torch.tensor([0, 0]))
    other = copy.deepcopy(cache)
    whole = torch.cat([prompt.expand(2, -1), ends], 1)
    want = logits(fast, whole, use_cache=False)[:, 75:]
    assert (logits(fast, ends, past_key_values=cache) - want).abs().max() <= CLOSE
    # The copy shares nothing with what went on.
    logits(fast, tokens(2, 30, seed=6), past_key_values=cache)
    assert (logits(fast, ends, past_key_values=other) - want).abs().max() <= CLOSE


def test_two_sequences_are_merged_into_a_batch(fast: Any) -> None:
    """Lengths 60 and 44: laid out in columns, padded on the left, and put in a stock cache."""
    long, short, ends = tokens(1, 60, seed=1), tokens(1, 44, seed=2), tokens(2, 9, seed=3)
    parts = []
    for ids in (long, short):
        cache = DynamicCache(config=fast.config)
        logits(fast, ids, position_ids=torch.arange(ids.shape[1])[None], past_key_values=cache)
        parts.append(cache)
    merged = DynamicCache(config=fast.config)
    missing = 60 - 44
    for layer, (a, b) in zip(merged.layers, zip(*(part.layers for part in parts), strict=True), strict=True):
        pad = torch.nn.functional.pad
        layer.update_indexer(torch.cat([a.indexer_keys, pad(b.indexer_keys, (0, 0, missing, 0))]))
        layer.update(
            torch.cat([a.keys, pad(b.keys, (0, 0, missing, 0))]),
            torch.cat([a.values, pad(b.values, (0, 0, missing, 0))]),
        )
    mask = padding(2, 69, {1: slice(0, missing)})
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    history = positions[None, :, :60].expand(3, -1, -1)
    if hasattr(parts[0], "position_ids"):
        merged.position_ids = history
    else:
        merged.layers[0].indexer_position_ids = history
    got = logits(fast, ends, attention_mask=mask, position_ids=positions[:, 60:], past_key_values=merged)
    for request, ids in enumerate((long, short)):
        alone = logits(fast, torch.cat([ids, ends[request : request + 1]], 1), use_cache=False)
        assert (got[request] - alone[0, -9:]).abs().max() <= CLOSE


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("tokens_to_remove", [-1, -2, -3, -4, -33, -80, 60, 100])
def test_a_cropped_cache_goes_on_as_if_the_tokens_had_not_come(fast: Any, kind: str, tokens_to_remove: int) -> None:
    """Negative numbers are tokens to take back; a positive one is how many to keep."""
    cache = new_cache(fast, kind)
    ids = tokens(2, 80)
    logits(fast, ids, past_key_values=cache)
    for layer in cache.layers:
        layer.crop(tokens_to_remove)
    keep = min(tokens_to_remove, 80) if tokens_to_remove > 0 else 80 + tokens_to_remove
    forget_positions(cache, keep)
    assert int(cache.get_seq_length()) == keep
    assert not any(layer.keys[:, :, keep:].any() for layer in cache.layers)
    new = tokens(2, 21, seed=9)
    want = logits(fast, torch.cat([ids[:, :keep], new], 1), use_cache=False)[:, keep:]
    assert (logits(fast, new, past_key_values=cache) - want).abs().max() <= CLOSE


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_reset_cache_is_empty(fast: Any, kind: str) -> None:
    cache = new_cache(fast, kind)
    logits(fast, tokens(2, 50), attention_mask=padding(2, 50, {0: slice(0, 9)}), past_key_values=cache)
    cache.reset()
    assert not any(layer.keys.any() for layer in cache.layers)
    forget_positions(cache, 0)
    assert int(cache.get_seq_length()) == 0
    ids = tokens(2, 45, seed=4)
    assert (logits(fast, ids, past_key_values=cache) - logits(fast, ids, use_cache=False)).abs().max() <= CLOSE


def test_early_initialization_changes_nothing(fast: Any) -> None:
    cache = new_cache(fast, "static")
    cache.early_initialization(batch_size=2, num_heads=2, head_dim=32, dtype=torch.float32, device=torch.device("cpu"))
    assert cache.is_initialized
    ids = tokens(2, 45)
    assert (logits(fast, ids, past_key_values=cache) - logits(fast, ids, use_cache=False)).abs().max() <= CLOSE
    assert cache.batch_size == 2
    assert cache.get_max_length() == MAX_COLUMNS
    assert cache.is_compileable


def test_offloaded_layers_come_back_before_they_are_used(fast: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one device here, "meta" plays the other: what was moved there has no numbers, and says so."""
    cache = DynamicCache(config=fast.config)
    ids = tokens(1, 50)
    logits(fast, ids[:, :40], past_key_values=cache)
    layer = paged(cache)[0]
    store = layer.store
    assert store is not None
    layer.device = torch.device("meta")
    layer.prefetch()
    assert {tensor.device.type for tensor in held_by(store)} == {"meta"}
    layer.device = torch.device("cpu")
    with pytest.raises(NotImplementedError, match="meta"):
        logits(fast, ids[:, 40:], past_key_values=cache)
    cache = DynamicCache(config=fast.config)
    logits(fast, ids[:, :40], past_key_values=cache)
    calls: list[str] = []
    monkeypatch.setattr(cache, "offloading", True)
    monkeypatch.setattr(cache, "only_non_sliding", False, raising=False)
    monkeypatch.setattr(cache, "prefetch", lambda index, _: calls.append(f"prefetch {index}"))
    monkeypatch.setattr(cache, "offload", lambda index, _: calls.append(f"offload {index}"))
    got = logits(fast, ids[:, 40:], past_key_values=cache)
    assert calls == ["prefetch 1", "offload 0", "prefetch 2", "offload 1"]
    assert (got - logits(fast, ids, use_cache=False)[:, 40:]).abs().max() <= CLOSE


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_positions_that_are_kept_on_a_layer_follow_it(kind: str) -> None:
    """From 5.23 on the stock model keeps the positions of a sequence on its first sparse layer."""
    model = _bench_model()
    bench = Bench(model, new_cache(model, kind), torch.empty(3, 0, 64), torch.empty(3, 0, dtype=torch.bool))
    bench.append(20, [])
    layer = bench.cache.layers[0]
    positions = torch.arange(3 * 3 * 20).view(3, 3, 20)
    layer.indexer_position_ids = positions
    layer.crop(-4)
    layer.reorder_cache(torch.tensor([2, 2, 0]))
    assert torch.equal(layer.indexer_position_ids, positions[:, [2, 2, 0], :16])
    layer.batch_repeat_interleave(2)
    layer.batch_select_indices(torch.tensor([0, 5]))
    assert torch.equal(layer.indexer_position_ids, positions[:, [2, 0], :16])
    layer.reset()
    assert layer.indexer_position_ids is None


# -- what is refused


def test_torn_caches_are_refused(fast: Any) -> None:
    """Index keys that were lost, cut short or never written are an error, not padding."""
    stock = disable(twin(fast))
    ids = tokens(1, 60)

    def torn(kind: str) -> Any:
        cache = new_cache(stock, kind)
        logits(stock, ids[:, :50], past_key_values=cache)
        return cache

    cache = torn("dynamic")
    cache.layers[0].indexer_keys = cache.layers[0].indexer_keys[:, :4]
    with pytest.raises(CacheMismatchError, match="wanted index keys for its 50 columns; got 4"):
        logits(fast, ids[:, 50:], past_key_values=cache)
    cache = torn("dynamic")
    cache.layers[1].indexer_keys = None
    with pytest.raises(CacheMismatchError, match="wanted index keys for its 50 columns; got 0"):
        logits(fast, ids[:, 50:], past_key_values=cache)
    cache = torn("static")
    cache.layers[0].indexer_cumulative_length.fill_(12)
    with pytest.raises(CacheMismatchError, match="wanted index keys for its 50 columns; got 12"):
        logits(fast, ids[:, 50:], past_key_values=cache)


def test_a_cache_of_another_batch_is_refused(fast: Any) -> None:
    layer, rotary = fast.model.layers[0].self_attn, fast.model.rotary_emb

    def run(cache: Any, batch: int, columns: int, new: int) -> None:
        with torch.no_grad():
            angles = rotary(torch.empty(batch, columns, 64), torch.arange(columns).expand(3, batch, -1))
            layer(torch.zeros(batch, new, 64), angles, None, cache)

    cache = DynamicCache(config=fast.config)
    run(cache, 2, 20, 20)
    with pytest.raises(CacheMismatchError, match="wanted 3 requests; got 2"):
        run(cache, 3, 25, 5)
    cache.layers[0].update(*(torch.zeros(2, 2, 1, 32) for _ in range(2)))
    cache.layers[0].update_indexer(torch.zeros(2, 1, 32))
    with pytest.raises(CacheMismatchError, match="wanted 3 requests; got 2"):
        run(cache, 3, 26, 5)
    with pytest.raises(CacheMismatchError, match="wanted all 26 columns; got 5"):
        run(cache, 2, 5, 5)


def test_a_full_static_cache_is_refused(fast: Any) -> None:
    cache = new_cache(fast, "static", 32)
    with pytest.raises(CacheMismatchError, match="wanted room for 33 columns; got max_cache_len 32"):
        logits(fast, tokens(1, 33), past_key_values=cache)
    logits(fast, tokens(1, 32), past_key_values=cache)
    with pytest.raises(CacheMismatchError, match="wanted room for 33 columns"):
        logits(fast, tokens(1, 1), past_key_values=cache)


def test_padding_that_was_not_kept_cannot_be_shown_later(fast: Any) -> None:
    """Also where the stock layer ran in between, which sees zeros there."""
    stock = disable(twin(fast))
    enable(fast)
    cache, ids, mask = DynamicCache(config=fast.config), tokens(2, 50), padding(2, 50, {1: slice(0, 4)})
    logits(fast, ids[:, :40], attention_mask=mask[:, :40], past_key_values=cache)
    logits(stock, ids[:, 40:45], attention_mask=mask[:, :45], past_key_values=cache)
    with pytest.raises(MaskMismatchError, match="padding to stay padding"):
        logits(fast, ids[:, 45:], past_key_values=cache)
    logits(fast, ids[:, 45:], attention_mask=mask, past_key_values=cache)


def test_the_check_of_masks_can_be_switched_off(fast: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, ids, mask = DynamicCache(config=fast.config), tokens(2, 50), padding(2, 50, {1: slice(0, 4)})
    logits(fast, ids[:, :40], attention_mask=mask[:, :40], past_key_values=cache)
    monkeypatch.setenv("FLASHQSA_CHECK_VALUES", "off")
    logits(fast, ids[:, 40:], past_key_values=cache)


def test_a_cache_layer_of_another_kind_goes_to_stock(fast: Any) -> None:
    class Other(DynamicIndexedLayer):  # type: ignore[misc]
        """What another library might bring."""

    cache = DynamicCache(config=fast.config)
    cache.layers = [Other() for _ in cache.layers]
    ids = tokens(1, 45)
    before = hand_overs().get("the cache layer is Other, not an indexed one", 0)
    got = logits(fast, ids, past_key_values=cache)
    assert hand_overs()["the cache layer is Other, not an indexed one"] == before + 2
    assert (got - logits(fast, ids, use_cache=False)).abs().max() <= 1e-4


def test_other_models_may_use_our_cache_layers(fast: Any) -> None:
    """Filled through the stock calls alone, our layers do what the stock ones do, to the bit."""
    config = tiny_config()
    generator = torch.Generator().manual_seed(0)
    pairs: list[tuple[Any, Any]] = [
        (FlashQsaLayer(), DynamicIndexedLayer()),
        (FlashQsaStaticLayer(max_cache_len=64), StaticIndexedLayer(max_cache_len=64)),
    ]
    for ours, stock in pairs:
        for count in (7, 1, 5):
            keys, values = torch.randn(2, 2, 2, count, config.head_dim, generator=generator)
            raw = torch.randn(2, count, 32, generator=generator)
            for layer in (ours, stock):
                layer.update_indexer(raw)
                layer.update(keys, values)
        for layer in (ours, stock):
            layer.reorder_cache(torch.tensor([1, 0]))
            if isinstance(layer, DynamicIndexedLayer):
                layer.crop(-2)
                layer.batch_repeat_interleave(2)
                layer.batch_select_indices(torch.tensor([0, 3]))
                layer.offload()
                layer.prefetch()
        assert int(ours.get_seq_length()) == int(stock.get_seq_length())
        for name in ("keys", "values", "indexer_keys"):
            assert torch.equal(getattr(ours, name), getattr(stock, name))
