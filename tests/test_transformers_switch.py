"""Turning FlashQSA on and off, what is refused before work starts, and what a model says about itself."""

from __future__ import annotations

import copy
import functools
import json
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, DynamicCache, Qwen4ExpConfig, Qwen4ExpForCausalLM, StaticCache
from transformers import Qwen4ExpForConditionalGeneration as Multimodal
from transformers.cache_utils import DynamicIndexedLayer, StaticIndexedLayer
from transformers.models.qwen4_exp import modeling_qwen4_exp as modeling

from flashqsa import NoRouteError, QsaSpec
from flashqsa.integrations import transformers as integration
from flashqsa.integrations.transformers import (
    FlashQsaAttention,
    FlashQsaLayer,
    FlashQsaStaticLayer,
    UnsupportedModelError,
    UnsupportedTransformersError,
    disable,
    disable_globally,
    enable,
    enable_globally,
    hand_overs,
    is_enabled,
    portable_config,
    qsa_layers,
    route_report,
    sparse_layer_ids,
    spec_of,
    spec_of_config,
    versions,
)
from flashqsa.integrations.transformers import layer as layer_module
from tests.transformers_tiny import (
    logits,
    one_thread,  # noqa: F401
    tiny_config,
    tiny_model,
    tokens,
    twin,
)


@pytest.fixture
def globally() -> Iterator[None]:
    """FlashQSA on for every model that is built in a test."""
    enable_globally()
    yield
    disable_globally()


@pytest.fixture(scope="module")
def stock() -> Any:
    return tiny_model()


def small(**changes: Any) -> Any:
    return tiny_model(num_hidden_layers=1, layer_types=["full_attention"], **changes)


def cache_kinds(model: Any) -> tuple[set[type], set[type]]:
    """Cache layers of a model's sparse layers, in a dynamic and in a static cache."""
    dynamic, static = DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=8)
    ids = sparse_layer_ids(model.config)
    return {type(dynamic.layers[i]) for i in ids}, {type(static.layers[i]) for i in ids}


# -- one model


def test_enable_and_disable_is_a_round_trip(stock: Any) -> None:
    model, ids = twin(stock), tokens(2, 45)
    want = logits(model, ids)
    state = copy.deepcopy(model.state_dict())
    names = [name for name, _ in model.named_modules()]
    assert enable(model) is model
    assert is_enabled(model)
    assert model.config._attn_implementation == "qsa"
    assert (logits(model, ids) - want).abs().max() <= 1e-4
    assert enable(model) is model  # again is harmless
    assert [name for name, _ in model.named_modules()] == names
    assert all(torch.equal(state[name], weight) for name, weight in model.state_dict().items())
    assert disable(model) is model
    assert not is_enabled(model)
    assert model.config._attn_implementation == "sdpa"
    assert [type(layer) for layer in qsa_layers(model).values()] == [modeling.Qwen4ExpTextAttention] * 2
    assert type(model.model.rotary_emb) is modeling.Qwen4ExpTextRotaryEmbedding
    assert torch.equal(logits(model, ids), want)
    assert all("stock_attn_implementation" not in vars(layer) for layer in qsa_layers(model).values())


@pytest.fixture
def nothing_on() -> Iterator[None]:
    """As if no layer of ours were alive; those that are come back afterwards, with what they need of Transformers."""
    alive = list(layer_module.live_layers)
    layer_module.live_layers.clear()
    disable_globally()
    yield
    layer_module.live_layers.update(alive)
    enable_globally()
    disable_globally()


@pytest.mark.usefixtures("nothing_on")
def test_transformers_is_left_as_it_was_when_nothing_is_on() -> None:
    model, other = small(), small()
    stock_kinds, our_kinds = (
        ({DynamicIndexedLayer}, {StaticIndexedLayer}),
        ({FlashQsaLayer}, {FlashQsaStaticLayer}),
    )
    stock_forward = modeling.Qwen4ExpTextAttention.forward
    assert cache_kinds(model) == stock_kinds
    enable(model)
    enable(other)
    assert cache_kinds(model) == our_kinds
    disable(model)
    assert cache_kinds(model) == our_kinds
    enable_globally()
    disable(other)
    assert cache_kinds(model) == our_kinds
    disable_globally()
    assert cache_kinds(model) == stock_kinds
    assert modeling.Qwen4ExpTextAttention.forward is stock_forward
    assert stock_forward.__module__ == modeling.__name__


def test_a_model_with_a_config_in_common_keeps_working(stock: Any) -> None:
    config = tiny_config(num_hidden_layers=1, layer_types=["full_attention"])
    one, two = Qwen4ExpForCausalLM(config).eval(), Qwen4ExpForCausalLM(config).eval()
    two.load_state_dict(one.state_dict())
    ids, mask = tokens(2, 45), torch.ones(2, 45, dtype=torch.int64)
    mask[0, :4] = 0
    asked = [{}, {"attention_mask": mask}]
    want = [logits(one, ids, **kwargs) for kwargs in asked]
    enable(two)
    assert one.config is two.config
    for kwargs, expected in zip(asked, want, strict=True):
        assert torch.equal(logits(one, ids, **kwargs), expected)
    cache = DynamicCache(config=config)
    parts = [logits(one, ids[:, :40], past_key_values=cache), logits(one, ids[:, 40:], past_key_values=cache)]
    assert (torch.cat(parts, 1) - want[0]).abs().max() <= 1e-5
    assert type(cache.layers[0]) is FlashQsaLayer
    assert cache.layers[0].store is None


def test_copies_and_pickles_stay_enabled(stock: Any) -> None:
    model = enable(small())
    ids = tokens(1, 40)
    want = logits(model, ids)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert is_enabled(other)
        assert set(qsa_layers(other).values()) <= set(layer_module.live_layers)
        disable(model)
        assert torch.equal(logits(other, ids), want)
        disable(other)
        enable(model)


def test_a_checkpoint_does_not_remember(tmp_path: Path) -> None:
    model = enable(small())
    model.save_pretrained(tmp_path)
    assert '"qsa"' not in (tmp_path / "config.json").read_text("utf-8")
    again = Qwen4ExpForCausalLM.from_pretrained(tmp_path)
    assert not is_enabled(again)
    assert again.config._attn_implementation == "sdpa"


def test_eager_is_remembered() -> None:
    model = small()
    model.set_attn_implementation("eager")
    disable(enable(model))
    assert model.config._attn_implementation == "eager"


def test_a_hook_that_kept_the_old_forward_reaches_ours(stock: Any) -> None:
    """As accelerate's hooks do: the wrapped method and its wrapper stand on the instance."""
    model, calls = twin(stock), []

    def wrapper(module: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(type(module._old_forward.__self__).__name__)
        return module._old_forward(*args, **kwargs)

    for layer in qsa_layers(model).values():
        layer._old_forward = layer.forward
        layer.forward = functools.partial(wrapper, layer)
    ids, before = tokens(1, 40), sum(hand_overs().values())
    want = logits(stock, ids)
    enable(model)
    assert [layer._old_forward.__func__ for layer in qsa_layers(model).values()] == [FlashQsaAttention.forward] * 2
    assert (logits(model, ids) - want).abs().max() <= 1e-4
    assert calls == ["FlashQsaAttention"] * 2
    assert sum(hand_overs().values()) == before
    disable(model)
    assert torch.equal(logits(model, ids), want)


def multimodal() -> Any:
    text = {**tiny_config(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"]).to_dict()}
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": 64,
        "num_position_embeddings": 16,
    }
    torch.manual_seed(4)
    special = {"image_token_id": 3, "video_token_id": 4, "vision_start_token_id": 5, "vision_end_token_id": 6}
    return Multimodal(Qwen4ExpConfig(text_config=text, vision_config=vision, **special)).eval()


def test_a_multimodal_model_is_enabled_in_its_text_part() -> None:
    stock = multimodal()
    fast = enable(twin(stock))
    assert is_enabled(fast)
    assert fast.config.text_config._attn_implementation == "qsa"
    assert fast.config.vision_config._attn_implementation == "sdpa"
    ids = tokens(2, 50) % 200 + 10
    asked = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    before = hand_overs()
    want = stock.generate(ids, **asked)
    assert torch.equal(fast.generate(ids, **asked), want)
    assert torch.equal(fast.generate(ids, cache_implementation="static", **asked), want)
    assert hand_overs() == before
    assert fast.config.vision_config._attn_implementation == "sdpa"
    disable(fast)
    configs = fast.config, fast.config.text_config, fast.config.vision_config
    assert [config._attn_implementation for config in configs] == ["sdpa"] * 3
    assert torch.equal(fast.generate(ids, **asked), want)


# -- every model


@pytest.mark.usefixtures("globally")
def test_models_built_while_on_run_through_flashqsa(stock: Any, tmp_path: Path) -> None:
    stock.save_pretrained(tmp_path)
    ids, before = tokens(2, 45), hand_overs()
    want = logits(stock, ids)
    built = [
        Qwen4ExpForCausalLM.from_pretrained(tmp_path),
        # As `transformers serve` does, which names an implementation only where its user does.
        AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=None, dtype="auto"),
        AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa"),
    ]
    assert not is_enabled(stock)
    for model in built:
        assert is_enabled(model)
        assert type(model.model.rotary_emb) is layer_module.FlashQsaRotaryEmbedding
        assert (logits(model.eval(), ids) - want).abs().max() <= 1e-4
    assert hand_overs() == before
    found = built[1].generate(ids, max_new_tokens=4, do_sample=False, cache_implementation="static")
    assert torch.equal(found, stock.generate(ids, max_new_tokens=4, do_sample=False))
    assert hand_overs() == before
    disable(built[0])
    assert torch.equal(logits(built[0], ids), want)


@pytest.mark.usefixtures("globally")
def test_from_config_and_the_multimodal_model_are_built_enabled() -> None:
    assert is_enabled(AutoModelForCausalLM.from_config(tiny_config()))
    model = multimodal()
    assert is_enabled(model)
    assert model.config.get_text_config()._attn_implementation == "qsa"
    assert model.config.vision_config._attn_implementation == "sdpa"


@pytest.mark.usefixtures("globally")
def test_a_model_that_asks_for_eager_keeps_it(stock: Any, tmp_path: Path) -> None:
    stock.save_pretrained(tmp_path)
    model = Qwen4ExpForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert model.config._attn_implementation == "eager"
    reason = "attn_implementation is 'eager', which builds full masks"
    before = hand_overs().get(reason, 0)
    assert (logits(model, tokens(1, 40)) - logits(stock, tokens(1, 40))).abs().max() <= 1e-4
    assert hand_overs()[reason] == before + 2


def test_models_built_before_and_after_are_stock() -> None:
    before = small()
    enable_globally()
    enable_globally()
    try:
        during = small()
    finally:
        disable_globally()
    assert [is_enabled(model) for model in (before, during, small())] == [False, True, False]


# -- what is refused


@pytest.mark.parametrize("found", ["5.16.0", "5.17.1", "5.24.3", "5.24.0.dev0"])
def test_supported_releases(found: str) -> None:
    assert versions.check_version(found) == tuple(int(part) for part in found.split(".")[:2])


@pytest.mark.parametrize("found", ["4.57.1", "5.15.9", "5.25.0", "5.25.0.dev0", "6.0", "unknown"])
def test_other_releases_are_refused_by_name(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "version", lambda _: found)
    with pytest.raises(UnsupportedTransformersError, match=rf"wanted >=5\.16,<5\.25; got {found}"):
        integration.enable  # noqa: B018


def test_no_transformers_is_an_error_with_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(versions, "version", missing)
    with pytest.raises(UnsupportedTransformersError, match=r"wanted >=5\.16,<5\.25; got none \(pip install"):
        integration.enable  # noqa: B018


def test_importing_the_integration_loads_neither_torch_nor_transformers() -> None:
    script = "import sys, flashqsa.integrations.transformers; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout == "set()\n"


def test_every_public_name_is_there() -> None:
    assert set(integration.__all__) <= set(dir(integration))
    for name in integration.__all__:
        assert getattr(integration, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        integration.nothing  # noqa: B018


def test_models_without_sparse_layers_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="wanted one with Qwen4-Exp sparse layers; got Linear"):
        enable(nn.Linear(2, 2))


def test_models_that_were_changed_by_others_are_refused_unchanged(stock: Any) -> None:
    class Patched(modeling.Qwen4ExpTextAttention):  # type: ignore[misc]
        """What another library might make of a layer."""

    model = twin(stock)
    model.model.layers[2].self_attn.__class__ = Patched
    with pytest.raises(UnsupportedModelError, match=r"layers\.2\.self_attn: wanted a Qwen4ExpTextAttention; got .*Pat"):
        enable(model)
    assert not any(isinstance(layer, FlashQsaAttention) for layer in qsa_layers(model).values())
    model = twin(stock)
    model.model.layers[2].self_attn.forward = lambda *args: args
    with pytest.raises(UnsupportedModelError, match="wanted the stock forward; got one set on the instance"):
        enable(model)


def test_a_rotary_embedding_that_grows_is_refused() -> None:
    rope = {**tiny_config().rope_parameters, "rope_type": "dynamic", "factor": 2.0}
    model = small(rope_parameters=rope)
    with pytest.raises(UnsupportedModelError, match="angles depend on the position alone; got rope_type dynamic"):
        enable(model)


RELEASED: dict[str, Any] = {
    "num_hidden_layers": 48,
    "num_attention_heads": 24,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_size": 2048,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 128,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
}
TWELVE = list(range(3, 48, 4))
SPELLINGS = [
    "full_attention",
    "qwen_sparse_attention",
    "indexed_attention",
    "deepseek_sparse_attention",
    "hybrid_indexed",
]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_of_a_sparse_layer_is_understood(spelling: str) -> None:
    types = [spelling if index in TWELVE else "linear_attention" for index in range(48)]
    for config in ({**RELEASED, "layer_types": types}, {"text_config": {**RELEASED, "layer_types": types}}):
        assert sparse_layer_ids(config) == TWELVE
        assert spec_of_config(config) == QsaSpec()
        fields = portable_config(config)
        assert sparse_layer_ids(fields) == TWELVE
        assert set(fields.get("text_config", fields)["layer_types"]) == {"full_attention", "linear_attention"}
    # The installed release loads what `portable_config` gives.
    tiny = {**tiny_config().to_dict(), "layer_types": ["linear_attention", spelling, spelling]}
    loaded = type(tiny_config())(**portable_config(tiny))
    assert sparse_layer_ids(loaded) == [1, 2]


def test_without_layer_types_every_fourth_layer_is_sparse() -> None:
    assert sparse_layer_ids(RELEASED) == TWELVE
    assert sparse_layer_ids({**RELEASED, "full_attention_interval": 2}) == list(range(1, 48, 2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"]}, r"layer_types: wanted .*; got sliding_attention"),
        ({"layer_types": ["linear_attention"] * 4}, "layer_types: wanted at least one sparse layer; got none"),
        ({"indexer_head_dim": None}, "indexer fields indexer_head_dim; got none"),
        (dict.fromkeys(versions.INDEXER_FIELDS), "indexer fields indexer_n_heads, indexer_kv_heads, .*; got none"),
        ({"indexer_kv_heads": 2}, "indexer_kv_heads: wanted 1; got 2"),
        ({"indexer_budget": 2046}, "indexer_budget: wanted a multiple of 4 tokens; got 2046"),
        ({"indexer_budget": 16_384}, "indexer_budget: wanted at most 2048 blocks of 4 tokens; got 16384"),
        ({"indexer_compress_ratio": 0}, "indexer_compress_ratio: wanted a whole number of at least 1; got 0"),
        ({"num_attention_heads": 66}, "num_attention_heads: wanted a multiple of 2 KV heads, at most 32 .*; got 66"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "got rope_type longrope"),
    ],
)
def test_configs_that_cannot_be_served_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    config = {**RELEASED, **changes}
    with pytest.raises(UnsupportedModelError, match=message):
        (sparse_layer_ids if "layer_types" in changes else spec_of_config)(config)
    with pytest.raises(UnsupportedModelError, match=message):
        portable_config(config)


# -- what a model says about itself


@pytest.mark.parametrize("reader", [sparse_layer_ids, spec_of_config, portable_config])
@pytest.mark.parametrize("config", [None, 7, "config.json"])
def test_what_is_no_config_is_refused(reader: Callable[[Any], Any], config: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=f"config: wanted .*; got {type(config).__name__}"):
        reader(config)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"rows": 0}, "rows: wanted a whole number of at least 1; got 0"),
        ({"rows": 2.0}, "rows: wanted a whole number of at least 1; got 2.0"),
        ({"requests": 0}, "requests: wanted a whole number of at least 1; got 0"),
        ({"max_position": -3}, "max_position: wanted a whole number from 0 to 1048575; got -3"),
        ({"max_position": 10**8}, "max_position: wanted a whole number from 0 to 1048575; got 100000000"),
    ],
)
def test_route_report_refuses_numbers_that_no_pass_has(stock: Any, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        route_report(stock, **{"rows": 1, "max_position": 9, **asked})


def test_route_report_says_what_each_layer_takes(stock: Any) -> None:
    model = twin(stock)
    assert [(entry.select, entry.attend) for entry in route_report(model, rows=4, max_position=9)] == [(None, None)] * 2
    enable(model)
    below, above = (route_report(model, rows=30, max_position=last) for last in (30, 300))
    assert [entry.name for entry in below] == ["model.layers.1.self_attn", "model.layers.2.self_attn"]
    assert [str(entry.attend.route) for entry in below if entry.attend] == ["cpu:dense"] * 2
    assert [str(entry.attend.route) for entry in above if entry.attend] == ["cpu:grouped"] * 2
    assert [str(entry.select.route) for entry in above if entry.select] == ["cpu:plain"] * 2
    assert above[0].spec == QsaSpec(4, 2, 32, 8, 32, 4, 8) == spec_of(model.model.layers[1].self_attn)
    assert above[0].device.type == "cpu"
    with pytest.raises(NoRouteError):
        route_report(model, rows=1, max_position=300, route="dense")


def test_the_spec_of_a_layer_is_that_of_its_config() -> None:
    layer = enable(small(indexer_n_heads=2, indexer_head_dim=16)).model.layers[0].self_attn
    assert layer.qsa_spec == spec_of(layer) == QsaSpec(4, 2, 32, 2, 16, 4, 8)


def test_configs_come_from_a_file(tmp_path: Path) -> None:
    small().config.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text("utf-8"))
    assert spec_of_config(fields) == QsaSpec(4, 2, 32, 8, 32, 4, 8)
