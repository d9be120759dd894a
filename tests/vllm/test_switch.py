"""The plugin in vLLM's processes: it is found, can be switched off, and refuses by name what it does not serve."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.vllm.engine import on_gpu, prompt_of, started
from tests.vllm.models import write_model

pytestmark = pytest.mark.vllm

on_a_cpu = pytest.mark.skipif(on_gpu(), reason="vLLM itself serves this on a GPU")
ALONE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


@on_a_cpu
@pytest.mark.parametrize("switch", [{"FLASHQSA_VLLM": "0"}, {"VLLM_PLUGINS": "none"}], ids=["knob", "plugins"])
def test_without_the_plugin_vllm_refuses_a_cpu(model: Path, switch: dict[str, str]) -> None:
    code, log = started(model, [[prompt_of(20)]], {**ALONE, **switch}, dtype="bfloat16")
    assert code != 0
    assert "Qwen4Exp QSA requires FlashAttention" in log
    assert "FlashQSA serves" not in log


def test_a_setting_that_is_not_served_is_named_before_weights_are_loaded(model: Path) -> None:
    code, log = started(model, [[prompt_of(20)]], ALONE, dtype="float16", kv_cache_dtype="bfloat16")
    assert code != 0
    assert (
        "UnsupportedSettingError: kv_cache_dtype: wanted auto, the model's dtype, fp8 or fp8_e4m3; got bfloat16" in log
    )


@pytest.mark.parametrize(
    ("knob", "message"),
    [("FLASHQSA_CHECK_VALUES", "wanted one of auto, on, off; got 'yes'"), ("FLASHQSA_ROUTE", "wanted one of cpu, ")],
)
def test_a_knob_that_holds_something_else_is_named_before_weights_are_loaded(
    monkeypatch: pytest.MonkeyPatch, knob: str, message: str
) -> None:
    from flashqsa.integrations.vllm.engine import check_settings
    from flashqsa.knobs import KnobError

    monkeypatch.setenv(knob, "yes")
    with pytest.raises(KnobError, match=f"{knob}: {message}"):
        check_settings(settings(), SimpleNamespace(), None, "auto")


@pytest.mark.skipif(not on_gpu(), reason="a CPU serves this")
def test_fp32_is_refused_on_a_gpu_before_weights_are_loaded(model: Path) -> None:
    code, log = started(model, [[prompt_of(20)]], ALONE, dtype="float32")
    assert code != 0
    assert "UnsupportedSettingError: dtype: wanted float16 or bfloat16 on a GPU" in log


def test_a_length_past_the_rotary_table_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path, max_position_embeddings=300)
    allowed = {**ALONE, "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
    code, log = started(folder, [[prompt_of(20)]], allowed, dtype="float16", max_model_len=301)
    assert code != 0
    assert "UnsupportedSettingError: max_model_len: wanted at most the 300 positions" in log


@on_a_cpu
def test_ngram_embeddings_are_refused_on_a_cpu_before_their_layer_is_built(tmp_path: Path) -> None:
    folder = write_model(tmp_path, ple_layer_ids=[2], ngram_vocab_size_base=1000, split_ngram_parts=4)
    code, log = started(folder, [[prompt_of(20)]], ALONE, dtype="bfloat16")
    assert code != 0
    assert "UnsupportedSettingError: ple_layer_ids: wanted none on a CPU" in log


def settings(
    dtype: torch.dtype = torch.float16, drafts: str | None = None, lora: object = None, **parallel: int
) -> SimpleNamespace:
    """As much of vLLM's settings as is looked at."""
    sizes = ("prefill_context_parallel_size", "decode_context_parallel_size", "pipeline_parallel_size")
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**{**dict.fromkeys(sizes, 1), **parallel}),
        model_config=SimpleNamespace(dtype=dtype),
        lora_config=lora,
        speculative_config=None if drafts is None else SimpleNamespace(method=drafts),
    )


@pytest.mark.parametrize(
    ("vllm_config", "config", "quant_config", "cache", "message"),
    [
        (settings(dtype=torch.float64), {}, None, "auto", "dtype: wanted float16, bfloat16 or float32"),
        (settings(), {}, None, "fp8_e5m2", "kv_cache_dtype: wanted auto"),
        (settings(), {}, SimpleNamespace(kv_cache_scheme="any"), "auto", "quantization: wanted weights without"),
        (
            settings(decode_context_parallel_size=2),
            {},
            None,
            "auto",
            "decode_context_parallel_size: wanted 1",
        ),
        (settings(), {"dual_chunk_attention_config": {}}, None, "auto", "dual_chunk_attention_config: wanted none"),
        (settings(), {"is_causal": False}, None, "auto", "is_causal: wanted a causal decoder"),
    ],
)
def test_settings_are_refused_by_name(
    vllm_config: Any, config: dict[str, Any], quant_config: Any, cache: str, message: str
) -> None:
    from flashqsa.integrations.vllm.engine import check_settings
    from flashqsa.integrations.vllm.errors import UnsupportedSettingError

    with pytest.raises(UnsupportedSettingError, match=message):
        check_settings(vllm_config, SimpleNamespace(**config), quant_config, cache)


@on_a_cpu
@pytest.mark.parametrize(
    ("vllm_config", "config", "message"),
    [
        (settings(), {"ple_layer_ids": [3]}, "ple_layer_ids: wanted none on a CPU"),
        (settings(pipeline_parallel_size=2), {}, "pipeline_parallel_size: wanted 1 on a CPU"),
        (settings(lora=SimpleNamespace()), {}, "enable_lora: wanted False on a CPU"),
        (settings(drafts="ngram"), {}, "speculative_config: wanted none on a CPU"),
    ],
)
def test_what_vllm_cannot_do_on_a_cpu_is_refused_by_name(
    vllm_config: Any, config: dict[str, Any], message: str
) -> None:
    test_settings_are_refused_by_name(vllm_config, config, None, "auto", message)


def test_a_device_without_kernels_is_refused_with_every_reason() -> None:
    from flashqsa import QsaSpec
    from flashqsa.integrations.vllm.engine import check_device
    from flashqsa.integrations.vllm.errors import UnsupportedSettingError

    check_device(torch.device("cpu"), QsaSpec(), torch.float16, (False, True), 512, 8192)
    with pytest.raises(UnsupportedSettingError, match="device: wanted one that FlashQSA has kernels for"):
        check_device(torch.device("cuda", 7), QsaSpec(), torch.float16, (False, False), 512, 8192)


@pytest.mark.parametrize(
    ("pin", "most_tokens", "refusal"),
    [
        ("xqa", 8192, None),
        ("reference", 8192, None),
        ("dense", 2048, None),
        ("dense", 8192, "attend: no route serves 1 rows on .*cpu:dense: rows see up to 1024 blocks and select 512"),
        ("grouped", 8192, "attend: no route serves 1 rows on .*cpu:grouped: 1 rows of 1 requests"),
    ],
)
def test_a_pin_that_cannot_serve_every_step_is_refused(
    monkeypatch: pytest.MonkeyPatch, pin: str, most_tokens: int, refusal: str | None
) -> None:
    from flashqsa import NoRouteError, QsaSpec
    from flashqsa.integrations.vllm.engine import check_device

    monkeypatch.setenv("FLASHQSA_ROUTE", pin)
    asked = (torch.device("cpu"), QsaSpec(), torch.float16, (False, False), 512, most_tokens)
    if refusal is None:
        check_device(*asked)
    else:
        with pytest.raises(NoRouteError, match=refusal):
            check_device(*asked)
