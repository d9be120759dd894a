"""FlashQSA's sparse layer in Transformers against the stock one: selections, logits, padding, calls left to stock."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers")

from transformers import DynamicCache, StaticCache
from transformers.masking_utils import bidirectional_mask_function

from flashqsa import QsaSpec, Selection, pipeline
from flashqsa.integrations.transformers import (
    CacheMismatchError,
    FlashQsaAttention,
    MaskMismatchError,
    disable,
    enable,
    hand_overs,
    spec_of,
)
from flashqsa.integrations.transformers import handover as handover_module
from flashqsa.integrations.transformers.masks import flashqsa_mask
from flashqsa.integrations.transformers.switch import qsa_layers
from tests.transformers_tiny import (
    Choice,
    logits,
    one_thread,  # noqa: F401
    padding,
    reloaded,
    tiny_model,
    tokens,
    twin,
    watching,
)

LOGITS = 1e-4
"""Most that FP32 logits may differ from stock's, on rows whose selection has no tie at the cut."""


def at_once(model: Any, whether: bool | None = True) -> Any:
    """The model with norms, rotary and writing in one step, which a CPU does not take by itself."""
    for layer in qsa_layers(model).values():
        layer.prepare_at_once = whether
    return model


@pytest.fixture(scope="module", params=[None, True], ids=["step by step", "one step"])
def models(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """A stock model, and its twin with FlashQSA."""
    stock = tiny_model()
    return stock, at_once(enable(twin(stock)), request.param)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Selection]:
    """The selections that the pipeline hands on while a test runs, in order."""
    found: list[Selection] = []
    inner = pipeline._select

    def recorded(*args: Any, **kwargs: Any) -> Selection:
        found.append(inner(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(pipeline, "_select", recorded)
    return found


@pytest.fixture
def left_to_stock() -> Callable[[], list[str]]:
    """Reasons for which calls were left to the stock layer since the test began."""
    before = hand_overs()
    return lambda: [reason for reason, count in hand_overs().items() if count > before.get(reason, 0)]


def columns_of(selection: Selection, choice: Choice, spec: QsaSpec) -> Tensor:
    """[batch, rows, columns] bool: the columns that a selection and the tails stand for, as in `Choice.chosen`."""
    batch, rows, columns = choice.mask.shape
    found = torch.zeros(batch, rows, columns, dtype=torch.bool)
    for b in range(batch):
        for r in range(rows):
            visible = choice.mask[b, r].nonzero().flatten()
            whole = visible.numel() // spec.block_tokens * spec.block_tokens
            row = b * rows + r
            blocks = selection.blocks[row, : int(selection.count[row])].long()
            if choice.mask[b, r, r]:
                found[b, r, visible[:whole].view(-1, spec.block_tokens)[blocks].flatten()] = True
                found[b, r, visible[whole:]] = True
    return found


def test_selections_and_logits_equal_stock(models: tuple[Any, Any], seen: list[Selection]) -> None:
    stock, fast = models
    ids = tokens(1, 150)
    with watching(stock) as choices:
        want = logits(stock, ids)
    got = logits(fast, ids, use_cache=False)
    spec = spec_of(fast.model.layers[1].self_attn)
    assert len(seen) == len(choices) == 2
    for selection, choice in zip(seen, choices, strict=True):
        assert int(choice.visible.max()) > 3 * spec.top_blocks
        assert not choice.tied(spec.top_blocks).any()
        assert torch.equal(columns_of(selection, choice, spec), choice.chosen)
    assert (got - want).abs().max() <= LOGITS
    # What dense attention makes of the same weights is another model.
    dense = twin(fast)
    for layer in dense.model.layers[1:]:
        layer.self_attn.indexer.block_topk = 512
    assert (logits(dense, ids, use_cache=False) - want).abs().max() > 100 * LOGITS


def test_ties_at_the_cut_go_to_the_lowest_blocks(seen: list[Selection]) -> None:
    # Two index heads: a block scores exactly 0 once in four times, so most rows that just exceed the budget have ties.
    stock = tiny_model(3, num_hidden_layers=1, layer_types=["full_attention"], indexer_n_heads=2)
    ids = tokens(1, 72)
    with watching(stock) as choices:
        logits(stock, ids)
    fast = enable(twin(stock))
    logits(fast, ids, use_cache=False)
    spec, (choice,), (selection,) = spec_of(fast.model.layers[0].self_attn), choices, seen
    tied = choice.tied(spec.top_blocks)[0]
    assert tied.sum() > 5
    assert (~tied & (choice.visible[0] > spec.top_blocks)).sum() > 5
    ours = columns_of(selection, choice, spec)[0]
    assert torch.equal(ours[~tied], choice.chosen[0][~tied])
    for row in tied.nonzero().flatten().tolist():
        scores = choice.scores[0, row, : int(choice.visible[0, row])]
        order = torch.argsort(scores, descending=True, stable=True)[: spec.top_blocks]
        assert selection.blocks[row].tolist() == order.sort().values.tolist()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2.0**-7), (torch.float16, 2.0**-10)])
def test_half_precision_models_follow_the_two_step_rule(
    tmp_path: Path, seen: list[Selection], dtype: torch.dtype, tolerance: float
) -> None:
    """Scores decide but for their rounding; where the same tokens are chosen, the output is the same but for its."""
    stock = reloaded(tiny_model(5, num_hidden_layers=1, layer_types=["full_attention"]), tmp_path, dtype)
    fast = enable(twin(stock))
    ids = tokens(2, 100)
    with watching(stock) as choices:
        want = logits(stock, ids).float()
    got = logits(fast, ids, use_cache=False).float()
    spec, (choice,), (selection,) = spec_of(fast.model.layers[0].self_attn), choices, seen
    ours = columns_of(selection, choice, spec)
    differs = (ours != choice.chosen).any(-1)
    assert differs.float().mean() < 0.1
    for b, r in differs.nonzero().tolist():
        row, visible = b * ids.shape[1] + r, int(choice.visible[b, r])
        scores = choice.scores[b, r, :visible]
        cut = scores.topk(spec.top_blocks).values[-1]
        chosen = torch.zeros(visible, dtype=torch.bool)
        chosen[selection.blocks[row, : int(selection.count[row])].long()] = True
        assert (scores[chosen] >= cut - tolerance * scores.max()).all()
        assert (scores[~chosen] <= cut + tolerance * scores.max()).all()
    assert (got - want)[~differs].abs().max() <= 4 * tolerance * want.abs().max()


def test_below_the_budget_the_dense_route_runs_and_equals_stock(
    models: tuple[Any, Any], seen: list[Selection], caplog: pytest.LogCaptureFixture
) -> None:
    stock, fast = models
    ids = tokens(2, 32)
    assert (logits(fast, ids) - logits(stock, ids)).abs().max() <= LOGITS
    assert not seen  # `dense` needs no selection


PADDINGS: dict[str, dict[int, Any]] = {
    "left 1, 2, 3": {0: slice(0, 1), 1: slice(0, 2), 2: slice(0, 3)},
    "left many": {1: slice(0, 37), 2: slice(0, 50)},
    "right": {0: slice(57, 60), 2: slice(20, 60)},
    "both ends": {0: [0, 1, 58, 59], 1: slice(0, 9)},
    "in between": {0: slice(10, 15), 1: slice(0, 60, 7), 2: [5, 6, 20, 21, 22, 23, 40]},
    "a request of nothing": {1: slice(0, 60)},
}


@pytest.mark.parametrize("name", PADDINGS)
def test_padding_equals_stock(models: tuple[Any, Any], name: str) -> None:
    ids, mask = tokens(3, 60), padding(3, 60, PADDINGS[name])
    want, got = (logits(model, ids, attention_mask=mask) for model in models)
    assert (got - want)[mask.bool()].abs().max() <= LOGITS
    assert torch.isfinite(got).all()


def test_a_padded_request_equals_its_unpadded_run(models: tuple[Any, Any]) -> None:
    _, fast = models
    lengths, longest = (130, 129, 128, 127, 90), 130
    ids, mask = tokens(5, longest), torch.ones(5, longest, dtype=torch.int64)
    for request, length in enumerate(lengths):
        mask[request, : longest - length] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = DynamicCache(config=fast.config)
    got = logits(fast, ids[:, :-1], attention_mask=mask[:, :-1], position_ids=positions[:, :-1], past_key_values=cache)
    step = logits(fast, ids[:, -1:], attention_mask=mask, position_ids=positions[:, -1:], past_key_values=cache)
    for request, length in enumerate(lengths):
        alone = logits(fast, ids[request : request + 1, longest - length :])[0]
        assert (got[request, longest - length :] - alone[:-1]).abs().max() <= 1e-5
        assert (step[request, 0] - alone[-1]).abs().max() <= 1e-5


def test_long_padded_requests_equal_their_unpadded_runs() -> None:
    """More than 512 blocks of the released budget, pads of 1, 2, 3 and 500, and a step after them."""
    model, _, _ = one_layer(indexer_budget=2048)
    longest, pads = 2600, (1, 2, 3, 500)
    ids = tokens(4, longest)
    mask = padding(4, longest, {request: slice(0, pad) for request, pad in enumerate(pads)})
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
    got = logits(model, ids[:, :-1], attention_mask=mask[:, :-1], position_ids=positions[:, :-1], past_key_values=cache)
    step = logits(model, ids[:, -1:], attention_mask=mask, position_ids=positions[:, -1:], past_key_values=cache)
    for request, pad in enumerate(pads):
        alone = logits(model, ids[request : request + 1, pad:], use_cache=False)[0]
        assert (got[request, pad:] - alone[:-1]).abs().max() <= 1e-5
        assert (step[request, 0] - alone[-1]).abs().max() <= 1e-5


class Largest(TorchDispatchMode):
    """Notes the most elements any tensor has that an operator makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return made


def test_nothing_as_large_as_rows_by_keys_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHQSA_WORKSPACE_MIB", "1")
    model, _, _ = one_layer()
    length = 2400
    ids, mask = tokens(1, length), padding(1, length, {0: slice(0, 2)})
    with torch.no_grad(), Largest() as largest:
        model(ids, attention_mask=mask, logits_to_keep=1)
    assert largest.elements < length * length // 4  # not even as rows by blocks
    with torch.no_grad(), Largest() as largest:
        disable(model)(ids[:, :200], attention_mask=mask[:, :200], logits_to_keep=1)
    assert largest.elements >= 200 * 200


def test_tokens_that_share_a_position_are_still_tokens(models: tuple[Any, Any]) -> None:
    """10 text tokens, an image whose tokens share an axis, 10 text tokens: blocks are cut by order, not position."""
    stock, fast = models
    size, text = 40, 10
    image = torch.stack([torch.full((size,), text), text + torch.arange(size) // 8, text + torch.arange(size) % 8])
    before = torch.arange(text).expand(3, -1)
    after = torch.arange(text).expand(3, -1) + text + 8
    positions = torch.cat([before, image, after], 1)[:, None]
    ids = tokens(1, size + 2 * text)
    want = logits(stock, ids, position_ids=positions)
    assert (logits(fast, ids, position_ids=positions) - want).abs().max() <= LOGITS
    cache = DynamicCache(config=fast.config)
    split = 47
    first = logits(fast, ids[:, :split], position_ids=positions[..., :split], past_key_values=cache)
    rest = logits(fast, ids[:, split:], position_ids=positions[..., split:], past_key_values=cache)
    assert (torch.cat([first, rest], 1) - want).abs().max() <= LOGITS


def test_packed_sequences_are_left_to_stock_and_say_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without linear layers, whose state stock lets run from one packed sequence into the next.
    stock = tiny_model(num_hidden_layers=2, layer_types=["full_attention"] * 2)
    fast = enable(twin(stock))
    monkeypatch.setattr(handover_module, "_counts", type(handover_module._counts)())
    ids, positions = tokens(1, 70), torch.cat([torch.arange(30), torch.arange(40)])[None]
    with caplog.at_level(logging.WARNING, "flashqsa"):
        want, got = (logits(model, ids, position_ids=positions, use_cache=False) for model in (stock, fast))
        logits(fast, ids, position_ids=positions, use_cache=False)
    assert torch.equal(got, want)
    apart = logits(fast, ids[:, 30:], use_cache=False)
    assert (got[:, 30:] - apart).abs().max() <= LOGITS
    assert ["packed sequences" in record.message for record in caplog.records] == [True]
    assert sum(hand_overs().values()) == 4


def test_a_custom_mask_is_left_to_stock(models: tuple[Any, Any], left_to_stock: Callable[[], list[str]]) -> None:
    ids = tokens(1, 48)
    mask = torch.ones(48, 48, dtype=torch.bool).tril()[None, None].clone()
    mask[..., 20:, 3:9] = False
    want, got = (logits(model, ids, attention_mask=mask) for model in models)
    assert torch.equal(got, want)
    assert left_to_stock() == ["the mask is not plain causal: packed sequences, or a custom mask"]


def test_the_mask_function_never_hides_a_pattern() -> None:
    """None means causal, so a pattern that stock would skip must be built; padding is passed on, filled up."""
    skips: dict[str, Any] = {"allow_is_causal_skip": True, "allow_is_bidirectional_skip": True}
    full = flashqsa_mask(2, 5, 5, mask_function=bidirectional_mask_function, **skips)
    assert full is not None
    assert full.shape == (2, 1, 5, 5)
    assert full.all()
    assert flashqsa_mask(2, 5, 5, **skips) is None
    given = padding(2, 5, {0: slice(0, 2)}).bool()
    passed = flashqsa_mask(2, 5, 5, attention_mask=given, **skips)
    assert passed is given
    filled = flashqsa_mask(2, 5, 8, attention_mask=given, **skips)
    assert filled is not None
    assert torch.equal(filled, torch.cat([given, torch.zeros(2, 3, dtype=torch.bool)], 1))


def test_gradients_flow_through_the_stock_layer(
    models: tuple[Any, Any], left_to_stock: Callable[[], list[str]]
) -> None:
    stock, fast = (twin(model) for model in models)
    ids, mask = tokens(2, 40), padding(2, 40, {0: slice(0, 5)})
    for model in (stock, fast):
        model(ids, attention_mask=mask).logits[:, -1].square().sum().backward()
    pairs = zip(stock.named_parameters(), fast.named_parameters(), strict=True)
    grads = {name: (want.grad, got.grad) for (name, want), (_, got) in pairs if "self_attn" in name}
    assert any(want is not None and want.abs().max() > 0 for want, _ in grads.values())
    for name, (want, got) in grads.items():
        assert (want is None) == (got is None), name
        assert want is None or torch.equal(want, got), name
    assert left_to_stock() == ["gradients are recorded (wrap inference in torch.no_grad())"]


def test_dropout_is_left_to_stock(left_to_stock: Callable[[], list[str]]) -> None:
    stock = tiny_model(num_hidden_layers=1, layer_types=["full_attention"], attention_dropout=0.5).train()
    fast = enable(twin(stock))
    found = []
    for model in (stock, fast):
        torch.manual_seed(0)
        found.append(logits(model, tokens(1, 24)))
    assert torch.equal(*found)
    assert left_to_stock() == ["attention dropout is on (call model.eval() for inference)"]


def test_attention_weights_come_from_the_stock_layer(
    models: tuple[Any, Any], left_to_stock: Callable[[], list[str]]
) -> None:
    stock, fast = models
    ids, mask = tokens(2, 44), padding(2, 44, {1: slice(0, 3)})
    with torch.no_grad():
        found = fast(ids, attention_mask=mask, output_attentions=True)
    assert len(found.attentions) == 2
    for weights in found.attentions:
        assert weights.shape == (2, 4, 44, 44)
        assert (weights.sum(-1) - 1).abs().max() <= 1e-5
    assert (found.logits - logits(stock, ids, attention_mask=mask))[mask.bool()].abs().max() <= LOGITS
    assert left_to_stock() == ["attention weights are asked for"]


def test_another_attention_implementation_runs_stock(
    models: tuple[Any, Any], left_to_stock: Callable[[], list[str]]
) -> None:
    stock, fast = (twin(model) for model in models)
    fast.set_attn_implementation("sdpa")
    ids = tokens(1, 40)
    assert torch.equal(logits(fast, ids), logits(stock, ids))
    assert left_to_stock() == ["attn_implementation is 'sdpa', which builds full masks"]


@pytest.mark.parametrize("route", ["reference", "cpu:xqa", "cpu:grouped"])
def test_a_pinned_route_reaches_the_layer(models: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, route: str) -> None:
    _, fast = models
    ids = tokens(1, 50)
    want = logits(fast, ids)
    monkeypatch.setenv("FLASHQSA_ROUTE", route)
    assert (logits(fast, ids) - want).abs().max() <= 1e-5


def test_autocast_runs(models: tuple[Any, Any]) -> None:
    ids = tokens(1, 32)  # below the budget, so that rounding cannot change a selection
    with torch.autocast("cpu", torch.bfloat16):
        want, got = (logits(model, ids).float() for model in models)
    assert (got - want).abs().max() <= 2.0**-5 * want.abs().max()


def test_a_mask_that_contradicts_the_cache_is_refused(models: tuple[Any, Any]) -> None:
    """And the cache with it: the linear layer that comes first has taken the pass in."""
    _, fast = models
    ids, mask = tokens(2, 50), padding(2, 50, {1: slice(0, 7)})
    cache = DynamicCache(config=fast.config)
    logits(fast, ids[:, :40], attention_mask=mask[:, :40], past_key_values=cache)
    shown = torch.ones(2, 1, 10, 50, dtype=torch.bool).tril(40)
    for other, message in [
        (None, r"attention_mask: wanted .* 40 columns .* got none"),
        (padding(2, 50, {1: slice(0, 6)}), "got another one"),
        (shown, "padding to stay padding"),
    ]:
        torn = copy.deepcopy(cache)
        with pytest.raises(MaskMismatchError, match=message):
            logits(fast, ids[:, 40:], attention_mask=other, past_key_values=torn)
        with pytest.raises(CacheMismatchError, match="drop it and begin a new one"):
            logits(fast, ids[:, 40:], attention_mask=mask, past_key_values=torn)
    assert torch.isfinite(logits(fast, ids[:, 40:], attention_mask=mask, past_key_values=cache)).all()


def one_layer(**changes: Any) -> tuple[Any, FlashQsaAttention, Any]:
    model = enable(tiny_model(num_hidden_layers=1, layer_types=["full_attention"], num_experts=2, **changes))
    return model, model.model.layers[0].self_attn, model.model.rotary_emb


@pytest.mark.parametrize("one_step", [False, True])
def test_the_layer_compiles_to_one_graph(one_step: bool) -> None:
    model, layer, rotary = one_layer()
    at_once(model, one_step)
    hidden = torch.randn(2, 60, 64, generator=torch.Generator().manual_seed(2))
    mask = torch.ones(2, 60, dtype=torch.bool)
    mask[0, :7] = False
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        angles = rotary(hidden, torch.arange(60).expand(3, 2, -1))
        for given in (mask, None):
            assert (compiled(hidden, angles, given)[0] - layer(hidden, angles, given)[0]).abs().max() <= 1e-6


@pytest.mark.parametrize("one_step", [False, True])
def test_decode_with_a_static_cache_compiles_once(one_step: bool) -> None:
    model = at_once(one_layer()[0], one_step)
    ids = tokens(2, 60)
    mask = padding(2, 60, {0: slice(0, 5)})
    want = logits(model, ids, attention_mask=mask)
    cache = StaticCache(config=model.config, max_cache_len=64)
    logits(model, ids[:, :50], attention_mask=mask[:, :50], past_key_values=cache)
    torch._dynamo.reset()
    step = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    graphs = []
    for column in range(50, 60):
        inputs = model.prepare_inputs_for_generation(
            ids[:, : column + 1], 1, past_key_values=cache, attention_mask=mask[:, : column + 1], use_cache=True
        )
        with torch.no_grad():
            got = step(**inputs).logits[:, 0]
        assert (got - want[:, column]).abs().max() <= 1e-5
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    # The second step makes the length of the position history, which the stock model keeps, a variable.
    assert graphs[1] == graphs[-1]
