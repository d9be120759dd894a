"""Models on several devices: heads split over processes, and layers that stand on unlike GPUs."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from torch._subclasses import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, DistributedConfig, Qwen4ExpForCausalLM
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

from flashqsa import capture
from flashqsa.capture import Noted
from flashqsa.device import DeviceFacts
from flashqsa.integrations.transformers import (
    UnsupportedModelError,
    disable,
    enable,
    hand_overs,
    qsa_layers,
    report,
    route_report,
    spec_here,
    spec_on_rank,
    tensor_parallel_plan,
)
from flashqsa.route import NoRouteError
from flashqsa.values import QsaSpec
from tests.on_ranks import on_ranks, two_gpus
from tests.transformers_tiny import logits, tiny_config, tiny_model, tokens

NEW, LENGTH = 5, 100
LAYER = "model.layers.*.self_attn"
KV_HEADS = {"split": 2, "shared": 1}
"""KV heads of models on two ranks: each rank has its own, or both have the one there is."""


@pytest.mark.parametrize(
    ("heads", "ranks", "each"),
    [((24, 2), 1, (24, 2)), ((24, 2), 2, (12, 1)), ((24, 2), 4, (6, 1)), ((24, 2), 8, (3, 1)), ((8, 8), 4, (2, 2))],
)
def test_heads_are_shared_out_evenly(heads: tuple[int, int], ranks: int, each: tuple[int, int]) -> None:
    own = spec_on_rank(QsaSpec(*heads), ranks)
    assert (own.q_heads, own.kv_heads) == each
    assert (own.index_heads, own.top_blocks) == (QsaSpec().index_heads, QsaSpec().top_blocks)


@pytest.mark.parametrize(
    ("heads", "ranks", "message"),
    [((24, 2), 5, "24 query heads"), ((24, 2), 0, "24 query heads"), ((24, 2), 3, "2 KV heads"), ((24, 4), 6, "4 KV")],
)
def test_heads_that_do_not_divide_are_refused(heads: tuple[int, int], ranks: int, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        spec_on_rank(QsaSpec(*heads), ranks)


@pytest.mark.parametrize("ranks", ["2", 2.0, None, True])
def test_ranks_that_are_no_whole_number_are_refused(ranks: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="ranks: wanted a whole number; got"):
        spec_on_rank(QsaSpec(), ranks)
    with pytest.raises(UnsupportedModelError, match="ranks: wanted a whole number; got"):
        tensor_parallel_plan(tiny_config(), ranks)


def test_a_plan_of_no_config_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"config: wanted a config object, .*; got NoneType"):
        tensor_parallel_plan(None, 2)


def test_a_plan_splits_heads_and_leaves_the_indexer_whole() -> None:
    config = tiny_config()
    plan = tensor_parallel_plan(config, 2)
    assert [plan[f"{LAYER}.{name}_proj"] for name in "qkvo"] == ["colwise", "colwise", "colwise", "rowwise"]
    assert plan.get(f"{LAYER}.indexer.index_qk_proj") in (None, "replicate")
    with torch.device("meta"):
        stock = Qwen4ExpForCausalLM(config).tp_plan
    assert {name: style for name, style in plan.items() if ".self_attn" not in name}.items() <= stock.items()
    assert plan == tensor_parallel_plan(config, 2, Qwen4ExpForCausalLM)
    with pytest.raises(UnsupportedModelError, match="query heads"):
        tensor_parallel_plan(config, 3)


@pytest.mark.parametrize(("heads", "ranks"), [((24, 2), 4), ((24, 2), 8), ((4, 1), 2)])
def test_a_rank_keeps_the_kv_head_that_its_query_heads_read(heads: tuple[int, int], ranks: int) -> None:
    q_heads, kv_heads = heads
    plan = tensor_parallel_plan(tiny_config(num_attention_heads=q_heads, num_key_value_heads=kv_heads), ranks)
    style: Any = ALL_PARALLEL_STYLES[plan[f"{LAYER}.k_proj"]]
    assert plan[f"{LAYER}.v_proj"] == plan[f"{LAYER}.k_proj"]
    numbered = torch.arange(kv_heads).repeat_interleave(32).expand(2, 3, -1)
    for rank in range(ranks):
        mesh = SimpleNamespace(get_local_rank=lambda rank=rank: rank, size=lambda: ranks)
        kept = style.transform_output_post_forward(torch.nn.Linear(1, 1), numbered, mesh)
        first = rank * (q_heads // ranks)
        assert kept.shape == (2, 3, 32)
        assert kept.unique().tolist() == [first // (q_heads // kv_heads)]
    layer: Any = ALL_PARALLEL_STYLES[plan[LAYER]].install_forward(torch.nn.Linear(1, 1), mesh)
    assert layer.num_key_value_groups == q_heads // ranks


def listened(call: Callable[..., Any], *arguments: Any, **named: Any) -> tuple[Any, dict[str, Any]]:
    """A call's result, and the heads, routes and selections (as one hash) of its sparse attention."""
    selections, heads, routes = hashlib.sha256(), set(), set()

    def hear(noted: Noted) -> None:
        if noted.function == "sparse_attention":
            heads.add((noted.spec.q_heads, noted.spec.kv_heads))
            routes.add(str(noted.plan.attend_decision.route))
            selection: Any = noted.values["selection"]
            if selection is not None:
                selections.update(selection.blocks.cpu().contiguous().numpy().tobytes())

    with capture.listening(hear):
        result = call(*arguments, **named)
    return result, {"selections": selections.hexdigest(), "heads": sorted(heads), "routes": sorted(routes)}


def model_on_rank(device: torch.device, folders: list[str], dtype: torch.dtype) -> list[dict[str, Any]]:
    """What one of two ranks makes of each model: its logits, and those of the stock layers split in the same way."""
    found = []
    ids = tokens(2, LENGTH).to(device)
    for folder in folders:
        plan = tensor_parallel_plan(AutoConfig.from_pretrained(folder), 2)
        split = DistributedConfig(tp_size=2, tp_plan=plan)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, distributed_config=split).eval()
        enable(model)
        whole, heard = listened(logits, model, ids, use_cache=True)
        asked = {"max_new_tokens": NEW, "do_sample": False, "prefill_chunk_size": 33}
        generated = model.generate(ids, **asked)
        layer = next(iter(qsa_layers(model).values()))
        stored = layer.indexer.index_qk_proj.weight.shape[0]
        own = spec_here(layer)
        reported = {(entry.spec.q_heads, entry.spec.kv_heads) for entry in route_report(model, rows=9, max_position=99)}
        heard |= {"own": (own.q_heads, own.kv_heads), "reported": sorted(reported), "index_rows": stored}
        served = dict(hand_overs())
        stock = logits(disable(model), ids)
        heard |= {"logits": whole.cpu(), "generated": generated.cpu(), "stock": stock.cpu(), "served": served}
        found.append(heard)
    return found


@pytest.mark.skipif(sys.platform == "win32", reason="gloo has no file store there")
@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", torch.float32),
        pytest.param("cuda", torch.float32, marks=[pytest.mark.gpu, two_gpus], id="two GPUs"),
        pytest.param("cuda", torch.bfloat16, marks=[pytest.mark.gpu, two_gpus], id="two GPUs, bfloat16"),
    ],
)
def test_two_ranks_select_alike_and_agree_with_one_process(device: str, dtype: torch.dtype, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="Transformers places weights with it")
    folders = [tmp_path / name for name in KV_HEADS]
    for folder, kv_heads in zip(folders, KV_HEADS.values(), strict=True):
        tiny_model(2, num_key_value_heads=kv_heads).save_pretrained(folder)
    ranks = on_ranks(model_on_rank, 2, tmp_path, device, [str(folder) for folder in folders], dtype)
    ids = tokens(2, LENGTH).to(device)
    for folder, one, two in zip(folders, *ranks, strict=True):
        alone: Any = enable(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval())
        # One selection serves all heads: the two ranks make it from the same numbers.
        assert one["selections"] == two["selections"] != hashlib.sha256().hexdigest()
        assert torch.equal(one["logits"], two["logits"])
        assert torch.equal(one["generated"], two["generated"])
        for heard in (one, two):
            assert heard["heads"] == heard["reported"] == [heard["own"]] == [(2, 1)]
            assert heard["index_rows"] == 9 * 32, "the indexer is whole on each rank"
            assert heard["served"] == {}
        wanted, heard = listened(logits, alone, ids, use_cache=True)
        assert one["routes"] == heard["routes"]
        difference = (one["logits"].float() - wanted.cpu().float()).abs().amax(dim=-1)
        scale = float(wanted.float().std())
        if dtype == torch.float32:
            # Sums over ranks are added in another order: a few units of FP32, or a block at the cut.
            assert float(difference.max()) < 1e-4 * scale
            assert one["selections"] == heard["selections"]
            asked = {"max_new_tokens": NEW, "do_sample": False}
            assert torch.equal(one["generated"], alone.generate(ids, **asked).cpu())
            stock = logits(disable(alone), ids)
            assert float((one["stock"] - stock.cpu()).abs().max()) < 1e-4 * scale
        else:
            assert float(difference.median()) < 0.1 * scale


GPUS = {torch.device("cuda", 0): "v100", torch.device("cuda", 1): "h200"}
"""Two GPUs that are not here, of generations that share no kernel."""


def facts_of_gpus(device: torch.device) -> DeviceFacts:
    return DeviceFacts.named(GPUS[device])


def spread_model(dtype: torch.dtype) -> Any:
    """A model whose first sparse layer stands on the one GPU, and whose second on the other, as far as it says."""
    model = enable(tiny_model(2, head_dim=64).to(dtype))
    for layer, device in zip(qsa_layers(model).values(), GPUS, strict=True):
        with FakeTensorMode():
            layer.k_norm.weight = torch.nn.Parameter(torch.empty(64, dtype=dtype, device=device))
    return model


def test_each_layer_asks_about_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "facts_here", facts_of_gpus)
    old, new = route_report(spread_model(torch.float16), rows=512, max_position=4095)
    assert [entry.device for entry in (old, new)] == list(GPUS)
    sets = [{entry.select.route.kernel_set, entry.attend.route.kernel_set} for entry in (old, new)]  # type: ignore[union-attr]
    assert sets[0] == {"sm7x"}
    assert sets[1] <= {"smxx", "sm90"}
    with pytest.raises(NoRouteError, match="V100"):
        route_report(spread_model(torch.bfloat16), rows=512, max_position=4095)


@pytest.mark.gpu
@two_gpus
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_layers_on_two_gpus_give_the_tokens_of_one(dtype: torch.dtype, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="Transformers places weights with it")
    tiny_model(2).save_pretrained(tmp_path)
    first = ("model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.layers.1")
    places = dict.fromkeys(first, 0) | dict.fromkeys(("model.layers.2", "model.hyper_connection_mixer", "lm_head"), 1)
    ids = tokens(2, LENGTH).to("cuda:0")
    models = [
        AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype, device_map=where).eval() for where in (places, 0)
    ]
    spread, alone = (enable(model) for model in models)
    assert [entry.device.index for entry in route_report(spread, rows=9, max_position=99)] == [0, 1]
    asked = {"max_new_tokens": NEW, "do_sample": False, "prefill_chunk_size": 33}
    before = dict(hand_overs())
    (found, heard), (wanted, alone_heard) = (listened(model.generate, ids, **asked) for model in (spread, alone))
    assert torch.equal(found, wanted)
    assert heard == alone_heard, "two GPUs of one kind take the same routes and select the same"
    assert dict(hand_overs()) == before


def test_a_layer_whose_weights_are_offloaded_is_served(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="Transformers places weights with it")
    tiny_model(2).save_pretrained(tmp_path / "model")
    names = ("model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.hyper_connection_mixer", "lm_head")
    places = dict.fromkeys((*names, "model.layers.1"), "cpu") | {"model.layers.2": "disk"}
    offloaded, whole = (
        enable(AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32, **how).eval())
        for how in ({"device_map": places, "offload_folder": str(tmp_path / "weights")}, {})
    )
    assert qsa_layers(offloaded)["model.layers.2.self_attn"].k_norm.weight.is_meta
    assert [entry.device.type for entry in route_report(offloaded, rows=9, max_position=99)] == ["cpu", "cpu"]
    before, ids = dict(hand_overs()), tokens(2, LENGTH)
    assert torch.equal(logits(offloaded, ids, use_cache=True), logits(whole, ids, use_cache=True))
    assert dict(hand_overs()) == before
