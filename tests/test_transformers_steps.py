"""Steps of fixed shapes: the tokens of plain decoding, whatever is guessed, and a cache that goes on as any other."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("transformers")

from transformers import DynamicCache, StaticCache

from flashqsa import knobs
from flashqsa.device import facts_of
from flashqsa.integrations.transformers import (
    MAX_ROWS,
    CacheMismatchError,
    PromptLookup,
    Steps,
    UnsupportedModelError,
    disable,
    enable,
)
from flashqsa.integrations.transformers.graph import StepGraph
from flashqsa.integrations.transformers.passes import set_positions
from tests.both_devices import DEVICES
from tests.transformers_tiny import (
    logits,
    one_thread,  # noqa: F401
    padding,
    tiny_model,
    tokens,
    twin,
)

NEW, LENGTH, CLOSE = 30, 90, 1e-4
MASK = padding(2, LENGTH, {1: slice(0, 7)})
Drafter = Callable[[list[list[int]]], "list[list[int]] | None"]

N_GRAMS: dict[str, Any] = {
    "ple_layer_ids": [1],
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 50,
    "make_ngram_vocab_size_divisible_by": 8,
}


@pytest.fixture(scope="module", params=DEVICES)
def model(request: pytest.FixtureRequest) -> Any:
    """One linear and two sparse layers, with FlashQSA."""
    if request.param == "cuda" and "smxx" not in facts_of(torch.device("cuda", 0)).kernel_sets:
        pytest.skip("FP32 has routes from compute capability 8.0 on")
    return enable(tiny_model(3).to(request.param))


def prefilled(model: Any, cache: Any) -> Tensor:
    """The first new token of two requests, one of them padded, whose prompts are now in the cache."""
    found = model(
        tokens(2, LENGTH).to(model.device),
        attention_mask=MASK.to(model.device),
        position_ids=(MASK.cumsum(1) - 1).clamp(min=0).to(model.device),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    last: Tensor = found.logits[:, -1].argmax(-1)
    return last


@torch.no_grad()
def plain(model: Any, count: int = NEW) -> list[list[int]]:
    """Greedy tokens of the two requests, a forward pass for each."""
    cache, mask, found = DynamicCache(config=model.config), MASK, []
    last = prefilled(model, cache)
    while True:
        found.append(last.tolist())
        if len(found) == count:
            return [list(request) for request in zip(*found, strict=True)]
        mask = torch.cat((mask, torch.ones(2, 1, dtype=mask.dtype)), 1)
        last = (
            model(
                last[:, None],
                attention_mask=mask.to(model.device),
                position_ids=(mask.cumsum(1) - 1)[:, -1:].to(model.device),
                past_key_values=cache,
                use_cache=True,
            )
            .logits[:, -1]
            .argmax(-1)
        )


def stepped(model: Any, drafter: Drafter, count: int = NEW, **options: Any) -> tuple[list[list[int]], Steps]:
    """The same tokens by steps; `drafter` guesses from what each request has so far."""
    cache = StaticCache(config=model.config, max_cache_len=320)
    with torch.no_grad():
        last = prefilled(model, cache)
    run = Steps(model, cache, last, **options)
    found = [[token] for token in last.tolist()]
    while min(map(len, found)) < count:
        for text, new in zip(found, run.step(drafter(found)), strict=True):
            text += new
    return [text[:count] for text in found], run


def nothing(_texts: list[list[int]]) -> None:
    return None


def half_right(wanted: list[list[int]], seed: int) -> Drafter:
    """Guesses of random length, each token of which is the right one four times in five."""
    rng = random.Random(seed)

    def drafts(texts: list[list[int]]) -> list[list[int]]:
        found = []
        for right, text in zip(wanted, texts, strict=True):
            guess = right[len(text) : len(text) + rng.randint(0, MAX_ROWS - 1)]
            found.append([token if rng.random() < 0.8 else (token + 1) % 256 for token in guess])
        return found

    return drafts


def test_steps_give_the_tokens_of_plain_decoding(model: Any) -> None:
    found, run = stepped(model, nothing)
    assert found == plain(model)
    assert [done.rows for done in run.done] == [1] * (NEW - 1)


@pytest.mark.parametrize("seed", range(4))
def test_guesses_change_no_token(model: Any, seed: int) -> None:
    wanted = plain(model, NEW + MAX_ROWS)
    found, run = stepped(model, half_right(wanted, seed))
    assert found == [text[:NEW] for text in wanted]
    assert len({done.rows for done in run.done}) > 1
    assert len(run.done) < NEW - 1


def test_right_guesses_are_all_taken(model: Any) -> None:
    wanted = plain(model, NEW + MAX_ROWS)

    def right(texts: list[list[int]]) -> list[list[int]]:
        return [all_[len(text) :][: MAX_ROWS - 1] for all_, text in zip(wanted, texts, strict=True)]

    found, run = stepped(model, right)
    assert found == [text[:NEW] for text in wanted]
    assert len(run.done) == -(-(NEW - 1) // MAX_ROWS)


def test_wrong_guesses_leave_no_trace(model: Any) -> None:
    wanted = plain(model)
    wrong = {"texts": 0}

    def drafts(texts: list[list[int]]) -> list[list[int]]:
        wrong["texts"] += 1
        return [[(right[len(text)] + 1) % 256] * 8 for right, text in zip(wanted, texts, strict=True)]

    found, run = stepped(model, drafts)
    assert found == wanted
    assert {done.rows for done in run.done} == {MAX_ROWS}
    assert run.columns == LENGTH + NEW - 1


def test_graphs_are_captured_once_for_each_shape(model: Any) -> None:
    wanted, on_gpu = plain(model, NEW), model.device.type == "cuda"
    found, run = stepped(model, nothing)
    assert found == wanted
    ways = [done.how for done in run.done]
    assert ways == (["called", "captured"] + ["replayed"] * (NEW - 3) if on_gpu else ["called"] * (NEW - 1))
    found, run = stepped(model, nothing, graphs=False)
    assert found == wanted
    assert {done.how for done in run.done} == {"called"}


def test_the_bound_on_positions_grows_and_changes_no_token(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashqsa.integrations.transformers.steps.LEAST_BOUND_TOKENS", 25)
    found, run = stepped(model, nothing)
    assert found == plain(model)
    bounds = [done.bound_tokens for done in run.done]
    assert sorted(set(bounds)) == [100, 200]
    assert all(done.bound_tokens > LENGTH + place for place, done in enumerate(run.done))


def test_runs_repeat_themselves_bit_by_bit(model: Any) -> None:
    wanted = plain(model, NEW + MAX_ROWS)
    held = []
    for _ in range(2):
        _, run = stepped(model, half_right(wanted, 1))
        layer = run.layers[0]
        assert layer.store is not None
        held.append([part.clone() for part in layer.store.in_columns(run.columns)])
    for first, again in zip(*held, strict=True):
        assert torch.equal(first, again)


@pytest.mark.parametrize("through_stock", [False, True], ids=["FlashQSA", "stock"])
def test_a_cache_goes_on_after_steps(model: Any, through_stock: bool) -> None:
    """Where requests took different numbers of guesses the shorter one's columns are padding."""
    wanted = plain(model, NEW + MAX_ROWS)
    found, run = stepped(model, half_right(wanted, 2), count=12)
    run.finish()
    store = run.layers[0].store
    assert store is not None
    shown = store.visible[:, : run.columns].cpu()
    assert not bool(shown.all(dim=1).all())
    more = tokens(2, 20, seed=9)
    mask = torch.cat((shown.long(), torch.ones(2, 20, dtype=torch.int64)), dim=1)
    ids, positions = more.to(model.device), (mask.cumsum(1) - 1)[:, -20:].to(model.device)
    go_on = disable(twin(model)) if through_stock else model
    enable(model)  # `disable` may have been the last that kept our cache layers registered
    got = logits(go_on, ids, attention_mask=mask.to(model.device), position_ids=positions, past_key_values=run.cache)
    prompt = tokens(2, LENGTH)
    for request in range(2):
        # The cache lacks the last token of each text, which the next step would bring.
        held = [*prompt[request][MASK[request].bool()].tolist(), *wanted[request]]
        count = int(shown[request].sum())
        whole = torch.tensor([held[:count] + more[request].tolist()]).to(model.device)
        want = logits(model, whole, use_cache=False)[:, -20:]
        assert (got[request] - want[0]).abs().max() <= CLOSE
    assert found == [text[:12] for text in wanted]


def test_n_gram_embeddings_are_taken_back_too() -> None:
    model = enable(tiny_model(4, **N_GRAMS))
    with torch.no_grad():
        # Stock starts them at zero, where they do nothing.
        model.model.layers[0].ple.conv1d.weight.normal_()
    wanted = plain(model, NEW + MAX_ROWS)
    found, run = stepped(model, half_right(wanted, 3))
    assert found == [text[:NEW] for text in wanted]
    assert len(run.done) < NEW - 1


@pytest.mark.parametrize("changes", [{}, N_GRAMS], ids=["plain", "n-grams"])
@pytest.mark.parametrize("rows", [1, 5])
def test_a_pass_reads_no_tensor_on_the_host(
    changes: dict[str, Any], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over tensors without numbers a read is an error, and so is a shape that depends on them: no graph holds one."""
    model = enable(tiny_model(4, **changes))
    _, run = stepped(model, half_right(plain(model, NEW), 1), count=12)
    monkeypatch.setenv(knobs.CHECK_VALUES.name, "off")
    # What a pass takes on a GPU in FP32; a CPU keeps what the model has.
    monkeypatch.setattr(model.config, "_experts_implementation", "batched_mm")
    with FakeTensorMode(allow_non_fake_inputs=True):
        run._pass(rows, 256)
    monkeypatch.setattr(model.config, "_experts_implementation", "eager")
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(RuntimeError, match="nonzero"):
        run._pass(rows, 256)


def test_modules_keep_their_own_forward(model: Any) -> None:
    stepped(model, half_right(plain(model, NEW + MAX_ROWS), 0), count=8)
    assert not [name for name, module in model.named_modules() if "forward" in vars(module)]


def test_the_last_room_is_used_and_no_more(model: Any) -> None:
    cache = StaticCache(config=model.config, max_cache_len=LENGTH + 4)
    with torch.no_grad():
        run = Steps(model, cache, prefilled(model, cache))
    assert run.room == 4
    run.step([[1] * 8, []])
    assert run.done[-1].rows == 3
    while run.room:
        run.step()
    with pytest.raises(CacheMismatchError, match="wanted room for a token; got max_cache_len 94"):
        run.step()


def test_what_cannot_step_is_refused_before_work_starts(model: Any) -> None:
    device = model.device
    last = torch.zeros(2, dtype=torch.int64, device=device)
    cache = StaticCache(config=model.config, max_cache_len=200)
    with pytest.raises(CacheMismatchError, match="a StaticCache that FlashQSA filled; got FlashQsaStaticLayer"):
        Steps(model, cache, last)
    with torch.no_grad():
        prefilled(model, cache)
    with pytest.raises(CacheMismatchError, match=r"a token for each of the cache's 2 requests; got \[3\]"):
        Steps(model, cache, torch.zeros(3, dtype=torch.int64, device=device))
    run = Steps(model, cache, last)
    for drafts in ([[1]], [[1] * 9, []]):
        with pytest.raises(ValueError, match="2 lists of at most 8 tokens"):
            run.step(drafts)
    growing = DynamicCache(config=model.config)
    with torch.no_grad():
        prefilled(model, growing)
    with pytest.raises(CacheMismatchError, match="got FlashQsaLayer"):
        Steps(model, growing, last)
    with pytest.raises(UnsupportedModelError, match="call `enable`"):
        Steps(disable(twin(model)), cache, last)
    enable(model)
    other = enable(twin(model)).train()
    with pytest.raises(UnsupportedModelError, match="got train mode"):
        Steps(other, cache, last)
    with pytest.raises(UnsupportedModelError, match="wanted one with Qwen4-Exp sparse layers; got Linear"):
        Steps(torch.nn.Linear(2, 2), cache, last)
    moved = enable(twin(model))
    moved.lm_head = moved.lm_head.to("meta")
    with pytest.raises(UnsupportedModelError, match=f"all weights on one device; got {device}, meta"):
        Steps(moved, cache, last)
    kept = set_positions(cache, None)
    with pytest.raises(CacheMismatchError, match="positions of its columns"):
        Steps(model, cache, last)
    set_positions(cache, kept)
    assert Steps(model, cache, last).room == 110


def test_a_function_runs_once_in_every_run() -> None:
    calls: list[int] = []
    graph = StepGraph(torch.device("cpu"))
    assert [graph.run(lambda: calls.append(1)) for _ in range(3)] == ["called"] * 3
    assert len(calls) == 3


@pytest.mark.gpu
def test_a_graph_does_the_work_once_in_every_run() -> None:
    device = torch.device("cuda", 0)
    total, one = torch.zeros(1, device=device), torch.ones(1, device=device)
    graph = StepGraph(device)

    def add() -> None:
        total.add_(one)

    assert [graph.run(add) for _ in range(4)] == ["called", "captured", "replayed", "replayed"]
    one.fill_(10)
    graph.run(add)
    assert float(total) == 14


def test_steps_and_their_graphs_go_with_their_last_user(model: Any) -> None:
    # NCCL waits for graphs that hold its kernels when a group of processes is taken down, without an end.
    with torch.no_grad():
        cache = StaticCache(config=model.config, max_cache_len=320)
        steps = Steps(model, cache, prefilled(model, cache))
        for drafts in (None, None, [[1, 2], [3]], [[1, 2], [3]]):
            steps.step(drafts)
    gone: list[weakref.ref[Any]] = [weakref.ref(steps), *map(weakref.ref, steps._runs.values())]
    assert len(gone) == 3
    gc.disable()
    try:
        del steps
        assert [found() for found in gone] == [None] * 3
    finally:
        gc.enable()


# -- guesses


@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 3), max_size=10), st.integers(1, 8))
def test_a_guess_is_what_followed_the_last_time(prompt: list[int], more: list[int], most: int) -> None:
    text = PromptLookup(prompt)
    text.extend(more)
    held = prompt + more
    wanted: list[int] = []
    for size in (2, 3):
        places = [at for at in range(size, len(held)) if held[at - size : at] == held[-size:]]
        if places:
            grown = list(held)
            for _ in range(most):
                grown.append(grown[len(grown) - len(held) + places[-1]])
            wanted = grown[len(held) :]
    assert text.tokens == held
    assert text.guess(most) == wanted
