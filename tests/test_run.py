"""`flashqsa run`: prompts of several lengths, guesses, how deep a preset is, and what ran each part."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("transformers")

from flashqsa.cli import presets
from flashqsa.cli.parts import parts_of
from tests.test_cli import TINY, invoke, refused, told


def test_guesses_from_the_text_change_no_token_and_are_counted() -> None:
    more = ("--tokens", "600", "--decode", "40", "--json", "-")
    plain, drafted = told(invoke(*TINY, *more)), told(invoke(*TINY, *more, "--draft", "lookup"))
    assert drafted["tokens"] == plain["tokens"]
    steps = drafted["flashqsa"]
    assert sum(steps["step_new_tokens"]) == 39
    assert len(steps["steps_ms"]) == len(steps["step_rows"]) == sum(steps["decode_steps"].values()) < 39
    assert steps["tokens_per_step"] == pytest.approx(39 / len(steps["steps_ms"]))
    assert plain["flashqsa"]["decode_steps"] == {"called": 39, "captured": 0, "replayed": 0}
    assert plain["flashqsa"]["decode_step_ms"] == pytest.approx(sorted(plain["flashqsa"]["steps_ms"])[19])


def test_several_lengths_run_in_one_go(tmp_path: Path) -> None:
    target = tmp_path / "runs.json"
    result = invoke(*TINY, "--tokens", "150,0.1k", "--json", str(target))
    assert result.exit_code == 0, result.output
    content = json.loads(target.read_text())
    assert content["format"] == "flashqsa-runs"
    assert [run["prompt"]["tokens"] for run in content["runs"]] == [100, 150]
    assert content["runs"][1]["tokens"] == told(invoke(*TINY, "--json", "-"))["tokens"]
    text = invoke(
        "run", "--device", "cpu", "--preset", "tiny", "--tokens", "5,9", "-", "--json", "-", text="0123456789"
    )
    assert [run["prompt"]["text_bytes"] for run in told(text)["runs"]] == [10, 10]


def test_a_preset_has_as_many_layers_as_asked() -> None:
    content = told(invoke(*TINY, "--layers", "8", "--json", "-"))
    assert (content["model"]["layers"], content["model"]["sparse_layers"]) == (8, 2)
    assert content["parts"]["sparse layers"] == "FlashQSA"
    assert content["parts"]["linear attention"].startswith(("flash-linear-attention", "Transformers' own torch code"))
    assert content["machine"]["device"]["kind"] == "cpu"


def test_memory_says_how_deep_a_preset_is(monkeypatch: pytest.MonkeyPatch) -> None:
    released, half = presets.PRESETS["released"], torch.bfloat16
    # The widths are the released model's, which has 125 G parameters without its n-gram embeddings.
    assert 124e9 < presets.parameters_of(released, released.layers) < 127e9
    place = presets.Place(tokens=250_000, chunk=8192)
    found = {}
    for gibibytes in (48, 80, 137, 1000):
        monkeypatch.setattr(presets, "free_bytes", lambda _device, size=gibibytes: size << 30)
        found[gibibytes] = presets.layers_that_fit(released, half, place)
        weights = 2 * presets.parameters_of(released, found[gibibytes])
        assert weights < gibibytes << 30
        assert found[gibibytes] == 48 or weights + 8 * 5.2e9 > (gibibytes << 30) - (16 << 30)
    assert sorted(found.values()) == list(found.values())
    monkeypatch.setattr(presets, "free_bytes", lambda _device: 8 << 30)
    refused(invoke("run", "--device", "cpu", "--preset", "released"), "four layers and 8,224 tokens need about")


def test_what_runs_linear_attention_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model = presets.load_preset("tiny", torch.float32, 0).model
    for module in ("fla.ops.gated_delta_rule", "causal_conv1d"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    told_of = parts_of(model)
    assert told_of["linear attention"].startswith("Transformers' own torch code, much slower than flash-linear")
    assert told_of["its convolution"].startswith("Transformers' own torch code, much slower than causal-conv1d")
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", ModuleType("fla.ops.gated_delta_rule"))
    assert parts_of(model)["linear attention"] == "flash-linear-attention"


def test_keys_and_values_are_stored_in_fp8_where_asked() -> None:
    content = told(invoke(*TINY, "--kv-dtype", "fp8", "--json", "-"))
    assert content["settings"]["kv_dtype"] == "fp8"
    refused(invoke(*TINY, "--kv-dtype", "int4"), "--kv-dtype: wanted auto, fp8; got 'int4'")


def test_fp8_beside_the_stock_layer_is_shown_and_not_judged() -> None:
    result = invoke(*TINY, "--kv-dtype", "fp8", "--compare", "stock")
    assert result.exit_code == 0
    assert "Agreement is judged in FP32 only" in result.stdout
    assert "DISAGREE" not in result.stdout


@pytest.mark.gpu
def test_a_gpu_gives_the_same_text_with_and_without_graphs_and_guesses() -> None:
    base = ("run", "--device", "cuda", "--preset", "tiny", "--dtype", "float32", "--tokens", "600", "--chunk", "200")
    graphs, plain, drafted = (
        told(invoke(*base, "--decode", "40", "--json", "-", *more))
        for more in ((), ("--graph", "off"), ("--draft", "lookup"))
    )
    assert graphs["tokens"] == plain["tokens"] == drafted["tokens"]
    assert graphs["flashqsa"]["decode_steps"] == {"called": 1, "captured": 1, "replayed": 37}
    assert plain["flashqsa"]["decode_steps"] == {"called": 39, "captured": 0, "replayed": 0}
    assert graphs["hand_overs"] == drafted["hand_overs"] == {}
    assert graphs["flashqsa"]["cold_first_token_s"] > 0
    assert 0 < graphs["flashqsa"]["sparse_layers_share"] < 1
    assert graphs["machine"]["device"]["kind"] == "cuda"


@pytest.mark.gpu
def test_a_gpu_agrees_with_the_stock_layer() -> None:
    base = ("run", "--device", "cuda", "--preset", "tiny", "--dtype", "float32", "--tokens", "300", "--chunk", "128")
    result = invoke(*base, "--decode", "4", "--compare", "stock", "--json", "-")
    assert result.exit_code == 0, result.stderr
    assert told(result)["comparison"]["agrees_in_fp32"] is True
