"""Passes and steps that fail: the cache stays as it was where nothing was written, else nobody goes on with it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from transformers import DynamicCache, StaticCache

from flashqsa import NoRouteError
from flashqsa.integrations.transformers import (
    CacheMismatchError,
    FlashQsaStaticLayer,
    MaskMismatchError,
    Steps,
    UnsupportedModelError,
    disable,
    enable,
    reserve,
)
from flashqsa.integrations.transformers import paged as paged_module
from flashqsa.integrations.transformers.paged import PagedLayer
from flashqsa.integrations.transformers.passes import cached_positions, set_positions
from flashqsa.route import choose_route
from tests.transformers_tiny import (
    logits,
    one_thread,  # noqa: F401
    padding,
    tiny_model,
    tokens,
    twin,
)

CLOSE = 1e-4
ABSENT = "sm90:grouped"
"""A route that no CPU has."""
KINDS = pytest.mark.parametrize("kind", ["dynamic", "static"])


@pytest.fixture(scope="module")
def fast() -> Any:
    """Two sparse layers, with FlashQSA."""
    return enable(tiny_model(7, num_hidden_layers=2, layer_types=["full_attention"] * 2))


@pytest.fixture(scope="module")
def mixed() -> Any:
    """A linear layer, then two sparse ones, with FlashQSA."""
    return enable(tiny_model(8))


def new_cache(model: Any, kind: str, columns: int = 200) -> Any:
    enable(model)  # a `disable` elsewhere may have been the last that kept our cache layers registered
    if kind == "static":
        return StaticCache(config=model.config, max_cache_len=columns)
    return DynamicCache(config=model.config)


def columns(cache: Any) -> list[int | None]:
    return [layer.columns_on_host() for layer in cache.layers if isinstance(layer, PagedLayer)]


def cut_positions(cache: Any, keep: int) -> None:
    """What a caller does who takes columns back by hand, wherever the release keeps their positions."""
    positions = cached_positions(cache)
    set_positions(cache, positions[..., :keep] if positions is not None and keep else None)


def run_out_of_memory(*_: Any) -> None:
    raise MemoryError("out of memory")


def fail_in_layer(model: Any, number: int, ids: Tensor, cache: Any) -> None:
    hook = model.model.layers[number].register_forward_pre_hook(run_out_of_memory)
    with pytest.raises(MemoryError):
        logits(model, ids, past_key_values=cache)
    hook.remove()


# -- no route


@KINDS
@pytest.mark.parametrize("held", [0, 60])
@pytest.mark.parametrize("then", ["FlashQSA", "stock"])
def test_a_pass_without_a_route_leaves_the_cache_as_it_was(
    fast: Any, kind: str, held: int, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, cache = tokens(2, 90), new_cache(fast, kind)
    want = logits(fast, ids, use_cache=False)[:, held:]
    if held:
        logits(fast, ids[:, :held], past_key_values=cache)
    monkeypatch.setenv("FLASHQSA_ROUTE", ABSENT)
    with pytest.raises(NoRouteError, match="pinned"):
        logits(fast, ids[:, held:], past_key_values=cache)
    monkeypatch.delenv("FLASHQSA_ROUTE")
    assert columns(cache) == [held, held]
    positions = cached_positions(cache)
    assert (0 if positions is None else positions.shape[-1]) == held
    model = disable(twin(fast)) if then == "stock" else fast
    assert (logits(model, ids[:, held:], past_key_values=cache) - want).abs().max() <= CLOSE


def test_another_batch_may_begin_where_a_first_pass_had_no_route(fast: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = DynamicCache(config=fast.config)
    monkeypatch.setenv("FLASHQSA_ROUTE", ABSENT)
    with pytest.raises(NoRouteError):
        logits(fast, tokens(2, 40), past_key_values=cache)
    monkeypatch.delenv("FLASHQSA_ROUTE")
    assert logits(fast, tokens(3, 40), past_key_values=cache).shape[0] == 3


def test_the_layers_of_a_pass_share_one_question_for_routes(fast: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def listening(stage: Any, *rest: Any) -> Any:
        asked.append(stage)
        return choose_route(stage, *rest)

    monkeypatch.setattr("flashqsa.integrations.transformers.paged.choose_route", listening)
    paged_module._find_routes.cache_clear()
    cache = DynamicCache(config=fast.config)
    logits(fast, tokens(1, 40), past_key_values=cache)
    assert asked == ["select", "attend"]
    paged_module._find_routes.cache_clear()


@KINDS
@pytest.mark.parametrize("then", ["FlashQSA", "stock"])
@pytest.mark.parametrize("refusal", ["route", "mask"])
def test_a_refusal_after_a_linear_layer_spoils_the_cache(
    mixed: Any, kind: str, then: str, refusal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, cache = tokens(2, 90), new_cache(mixed, kind)
    mask = padding(2, 90, {0: slice(0, 7)})
    logits(mixed, ids[:, :60], attention_mask=mask[:, :60], past_key_values=cache)
    if refusal == "route":
        monkeypatch.setenv("FLASHQSA_ROUTE", ABSENT)
        with pytest.raises(NoRouteError):
            logits(mixed, ids[:, 60:], attention_mask=mask, past_key_values=cache)
        monkeypatch.delenv("FLASHQSA_ROUTE")
    else:
        with pytest.raises(MaskMismatchError):
            logits(mixed, ids[:, 60:], past_key_values=cache)
    # Whoever puts the positions back cannot put back what the linear layer took in.
    cut_positions(cache, 60)
    model = disable(twin(mixed)) if then == "stock" else mixed
    with pytest.raises(CacheMismatchError, match="drop it and begin a new one"):
        logits(model, ids[:, 60:], attention_mask=mask, past_key_values=cache)
    cache.reset()
    cut_positions(cache, 0)
    want = logits(mixed, ids, use_cache=False)
    assert (logits(model, ids, past_key_values=cache) - want).abs().max() <= CLOSE


# -- a pass that fails part-way


@KINDS
@pytest.mark.parametrize("held", [0, 60])
@pytest.mark.parametrize("put_back", [False, True], ids=["positions left", "positions put back"])
def test_a_cache_whose_layers_hold_unequal_columns_is_refused(fast: Any, kind: str, held: int, put_back: bool) -> None:
    ids, cache = tokens(2, 90), new_cache(fast, kind)
    if held:
        logits(fast, ids[:, :held], past_key_values=cache)
    fail_in_layer(fast, 1, ids[:, held:], cache)
    assert columns(cache) == [90, held]
    if put_back:
        cut_positions(cache, held)
    with pytest.raises(CacheMismatchError, match=rf"in layer 1; got {held}: .* drop it and begin a new one"):
        logits(fast, ids[:, held:], past_key_values=cache)


@KINDS
def test_a_pass_that_fails_before_the_first_sparse_layer_is_noticed(mixed: Any, kind: str) -> None:
    """By the positions that Transformers put down for it."""
    ids, cache = tokens(2, 90), new_cache(mixed, kind)
    logits(mixed, ids[:, :60], past_key_values=cache)
    fail_in_layer(mixed, 1, ids[:, 60:], cache)
    assert columns(cache) == [60, 60]
    with pytest.raises(CacheMismatchError, match=r"positions of 90 columns; got 120: .* drop it"):
        logits(mixed, ids[:, 60:], past_key_values=cache)


@KINDS
def test_cropping_and_resetting_leave_a_cache_that_goes_on(fast: Any, kind: str) -> None:
    """Transformers keeps the positions of what went: they are not taken for a pass that failed, but such a pass is."""
    ids, cache = tokens(2, 90), new_cache(fast, kind)
    want = logits(fast, ids, use_cache=False)
    for _ in range(2):
        logits(fast, ids[:, :80], past_key_values=cache)
        for layer in cache.layers:
            layer.crop(-30)
        assert (logits(fast, ids[:, 50:], past_key_values=cache) - want[:, 50:]).abs().max() <= CLOSE
        cache.reset()
    logits(fast, ids[:, :80], past_key_values=cache)
    for layer in cache.layers:
        layer.crop(-30)
    fail_in_layer(fast, 0, ids[:, 50:], cache)
    with pytest.raises(CacheMismatchError, match="drop it"):
        logits(fast, ids[:, 50:], past_key_values=cache)


# -- steps


def begun(model: Any, length: int = 60) -> tuple[Any, Steps, list[list[int]]]:
    """A cache with two prompts, steps over it, and the greedy tokens of each."""
    ids = tokens(2, length)
    cache = new_cache(model, "static")
    last = logits(model, ids, past_key_values=cache)[:, -1].argmax(-1)
    with torch.no_grad():
        greedy = model.generate(ids, max_new_tokens=12, do_sample=False)[:, length:].tolist()
    return cache, Steps(model, cache, last), greedy


def test_steps_over_a_cache_that_others_did_not_finish_are_refused(mixed: Any) -> None:
    cache, first, greedy = begun(mixed)
    found = [first.step() for _ in range(3)]
    last = torch.tensor([new[-1] for new in found[-1]])
    with pytest.raises(CacheMismatchError, match=r"positions of its 63 columns; got 60 \(`finish` writes"):
        Steps(mixed, cache, last)
    first.finish()
    second = Steps(mixed, cache, last)
    assert second.step() == [[text[4]] for text in greedy]
    # The first steps do not know what the second have done.
    with pytest.raises(CacheMismatchError, match="the 63 columns of the last step; got 64 columns"):
        first.step()
    with pytest.raises(CacheMismatchError, match="63 columns"):
        first.finish()


@pytest.mark.parametrize("way", ["crop", "pass", "reset", "stock"])
def test_a_cache_that_was_used_otherwise_between_steps_is_noticed(fast: Any, way: str) -> None:
    cache, run, _ = begun(fast)
    run.step()
    if way == "crop":
        for layer in cache.layers:
            layer.crop(-1)
    elif way == "reset":
        cache.reset()
    elif way == "pass":
        logits(fast, tokens(2, 3), past_key_values=cache)
    else:
        run.finish()
        logits(disable(twin(fast)), tokens(2, 3), past_key_values=cache)
        enable(fast)
    with pytest.raises(CacheMismatchError, match="wanted the 61 columns of the last step; got"):
        run.step()


@pytest.mark.parametrize("number", [0, 2], ids=["the linear layer", "the last layer"])
def test_steps_of_which_one_failed_go_no_further(mixed: Any, number: int) -> None:
    cache, run, _ = begun(mixed)
    run.step()
    hook = mixed.model.layers[number].register_forward_hook(run_out_of_memory)
    with pytest.raises(MemoryError):
        run.step()
    hook.remove()
    last = torch.zeros(2, dtype=torch.int64)
    ways: list[Callable[[], object]] = [
        run.step,
        run.finish,
        lambda: Steps(mixed, cache, last),
        lambda: logits(mixed, last[:, None], past_key_values=cache),
    ]
    for go_on in ways:
        with pytest.raises(CacheMismatchError, match=r"got a torn one: .* drop it and begin a new one"):
            go_on()
    assert all(layer.known_columns is None for layer in cache.layers if isinstance(layer, FlashQsaStaticLayer))
    assert all(layer.step_tokens is None for layer in cache.layers if isinstance(layer, FlashQsaStaticLayer))


def test_new_steps_over_a_torn_cache_are_refused(fast: Any) -> None:
    cache, _, _ = begun(fast)
    fail_in_layer(fast, 1, tokens(2, 3), cache)
    with pytest.raises(CacheMismatchError, match=r"the same columns; got \[63, 60\]: .* drop it"):
        Steps(fast, cache, torch.zeros(2, dtype=torch.int64))


def test_a_refused_step_leaves_the_steps_as_they_were(mixed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Routes too are asked for before the linear layer runs."""
    _, run, greedy = begun(mixed)
    monkeypatch.setenv("FLASHQSA_ROUTE", ABSENT)
    for drafts in (None, [[1], [2, 3]]):
        with pytest.raises(NoRouteError):
            run.step(drafts)
    monkeypatch.delenv("FLASHQSA_ROUTE")
    disable(mixed)
    with pytest.raises(UnsupportedModelError, match="call `enable`"):
        run.step()
    enable(mixed)
    assert [run.step() for _ in range(3)] == [[[text[place]] for text in greedy] for place in (1, 2, 3)]


@pytest.mark.parametrize(
    ("drafts", "error", "message"),
    [
        (7, TypeError, "drafts: wanted a sequence of tokens; got int"),
        ("ab", TypeError, "drafts: wanted a sequence of tokens; got str"),
        ([None, []], TypeError, r"drafts\[0\]: wanted a sequence of tokens; got NoneType"),
        ([[3], [4, None]], TypeError, r"drafts\[1\]\[1\]: wanted a whole number; got None"),
        ([[1.5], []], TypeError, r"drafts\[0\]\[0\]: wanted a whole number; got 1.5"),
        (torch.zeros(2, 2), TypeError, r"drafts\[0\]\[0\]: wanted a whole number"),
        ([[-1], []], ValueError, r"drafts\[0\]\[0\]: wanted a token from 0 to 255; got -1"),
        ([[], [3, 10**6]], ValueError, r"drafts\[1\]\[1\]: wanted a token from 0 to 255; got 1000000"),
        ([[2**70], []], ValueError, r"drafts\[0\]\[0\]: wanted a token from 0 to 255"),
        ([], ValueError, "drafts: wanted 2 lists of at most 8 tokens; got 0"),
    ],
)
def test_bad_drafts_are_refused_by_name(fast: Any, drafts: Any, error: type[Exception], message: str) -> None:
    _, run, greedy = begun(fast)
    with pytest.raises(error, match=message):
        run.step(drafts)
    assert run.step(torch.tensor([[3, 4], [5, 6]]))[0][0] == greedy[0][1]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("last", "error", "message"),
    [
        (None, TypeError, "last: wanted a tensor of integers; got NoneType"),
        ([1, 2], TypeError, "last: wanted a tensor of integers; got list"),
        (torch.zeros(2), TypeError, "last: wanted a tensor of integers; got one of torch.float32"),
        (torch.zeros(2, dtype=torch.bool), TypeError, "got one of torch.bool"),
        (torch.tensor([3, -1]), ValueError, r"last\[1\]: wanted a token from 0 to 255; got -1"),
        (torch.tensor([256, 3]), ValueError, r"last\[0\]: wanted a token from 0 to 255; got 256"),
    ],
)
def test_a_bad_last_token_is_refused_by_name(fast: Any, last: Any, error: type[Exception], message: str) -> None:
    cache, _, _ = begun(fast)
    with pytest.raises(error, match=message):
        Steps(fast, cache, last)


def test_last_tokens_may_be_of_any_integer_type(fast: Any) -> None:
    cache, run, greedy = begun(fast)
    last = run.ids[:, 0].to(torch.int32)
    assert Steps(fast, cache, last).step() == [[text[1]] for text in greedy]


# -- inference mode


@KINDS
@pytest.mark.parametrize("made_outside", [False, True])
@pytest.mark.parametrize("way", ["pass", "crop", "reset", "reorder", "reserve", "repeat"])
def test_a_cache_filled_in_inference_mode_is_used_outside(fast: Any, kind: str, made_outside: bool, way: str) -> None:
    ids = tokens(2, 90)
    want = logits(fast, ids, use_cache=False)
    cache = new_cache(fast, kind)
    with torch.inference_mode():
        cache = cache if made_outside else new_cache(fast, kind)
        fast(ids[:, :60], past_key_values=cache)
    begin = 60
    if way == "crop":
        for layer in cache.layers:
            layer.crop(-10)
        begin = 50
    elif way == "reset":
        cache.reset()
        begin = 0
    elif way == "reorder":
        cache.reorder_cache(torch.tensor([1, 0]))
        ids, want = ids.flip(0), want.flip(0)
    elif way == "reserve":
        reserve(cache, 700)
    elif way == "repeat":
        cache.batch_repeat_interleave(1)
    got = logits(fast, ids[:, begin:], past_key_values=cache)
    assert (got - want[:, begin:]).abs().max() <= CLOSE


def test_parts_of_a_store_may_be_made_in_inference_mode(fast: Any) -> None:
    """Beams reordered there: what each request has is made anew, and the pools are not."""
    ids, cache = tokens(2, 90), DynamicCache(config=fast.config)
    want = logits(fast, ids, use_cache=False)
    logits(fast, ids[:, :60], past_key_values=cache)
    with torch.inference_mode():
        cache.reorder_cache(torch.tensor([0, 1]))
    store = cache.layers[0].store
    assert store.raw_keys.is_inference()
    assert not store.kv.is_inference()
    assert (logits(fast, ids[:, 60:], past_key_values=cache) - want[:, 60:]).abs().max() <= CLOSE


def test_steps_follow_a_prompt_in_inference_mode(fast: Any) -> None:
    _, run, greedy = begun(fast)
    with torch.inference_mode():
        cache = StaticCache(config=fast.config, max_cache_len=200)
        fast(tokens(2, 60), past_key_values=cache)
    assert Steps(fast, cache, run.ids[:, 0]).step() == [[text[1]] for text in greedy]


def test_an_fp8_cache_takes_no_notice_of_the_default_dtype(fast: Any) -> None:
    model = enable(copy.deepcopy(fast), kv_dtype=torch.float8_e4m3fn)
    want = logits(model, tokens(1, 50))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        got = logits(model, tokens(1, 50))
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(got, want)
