"""The doctor: it tells what is there, and a broken install is a line of its report."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from types import ModuleType
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from flashqsa import device, pipeline
from flashqsa.__main__ import app
from flashqsa.cli import doctor
from flashqsa.device import DeviceFacts

FINDINGS = ["python", "torch", "numpy", "safetensors", "flashqsa", "transformers", "triton", "nvrtc", "cuda-bindings"]


def report() -> tuple[int, dict[str, dict[str, Any]], dict[str, Any]]:
    """Exit code, findings by name, and the whole JSON of `flashqsa doctor`."""
    result = CliRunner().invoke(app, ["doctor", "--json", "-"])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    told = json.loads(result.stdout)
    return result.exit_code, {finding["name"]: finding for finding in told["findings"]}, told


def broken(name: str, error: BaseException) -> Callable[[str], ModuleType]:
    """`import_module` of an install where one module raises."""

    def load(wanted: str) -> ModuleType:
        if wanted == name:
            raise error
        return import_module(wanted)

    return load


def test_a_good_install_passes() -> None:
    code, found, told = report()
    assert (code, told["works_on_cpu"]) == (0, True)
    assert [name for name in FINDINGS if name in found] == FINDINGS
    needed = {finding["name"]: finding["state"] for finding in found.values() if finding["needed"]}
    assert set(needed.values()) == {"ok"}
    assert {"routes on cpu", "self-test on cpu"} <= set(needed)
    assert str(torch.__version__) in found["torch"]["detail"]
    routes = found["routes on cpu"]["detail"]
    assert "prefill cpu:plain then cpu:grouped" in routes
    assert "decode cpu:plain then cpu:xqa" in routes
    assert "short cpu:everything then cpu:dense" in routes


def test_the_table_shows_every_finding() -> None:
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0
    assert all(name in result.stdout for name in FINDINGS)
    assert "works on this machine's CPU" in result.stdout


@pytest.mark.parametrize(
    ("module", "name", "error", "works"),
    [
        ("matplotlib", "matplotlib", RuntimeError("numpy was built for another ABI"), True),
        ("transformers", "transformers", ImportError("cannot import name 'x'"), True),
        ("numpy", "numpy", ImportError("_multiarray_umath"), False),
        ("torch", "torch", OSError("libtorch_cpu.so: cannot open shared object file"), False),
        ("flashqsa.pipeline", "flashqsa", SyntaxError("invalid syntax"), False),
        ("flashqsa.route", "routes on cpu", AttributeError("module has no attribute"), False),
    ],
)
def test_a_broken_part_is_a_line_of_the_report(
    module: str, name: str, error: BaseException, works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "import_module", broken(module, error))
    code, found, told = report()
    assert found[name]["state"] == "broken"
    assert str(error) in found[name]["detail"]
    assert "\n" not in found[name]["detail"]
    assert (code, told["works_on_cpu"]) == ((0, True) if works else (1, False))
    assert set(FINDINGS) <= set(found)


def test_a_part_that_is_not_installed_says_who_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "version", nothing)
    code, found, _ = report()
    assert code == 1
    assert found["matplotlib"]["state"] == "missing"
    assert "flashqsa stats --plot" in found["matplotlib"]["detail"]
    assert found["nvrtc"]["state"] == "missing"
    assert found["self-test on cpu"]["state"] == "ok"


def test_it_survives_a_python_without_torch() -> None:
    source = (
        "import sys; sys.modules['torch'] = None; from flashqsa.__main__ import app; app(['doctor', '--json', '-'])"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    found = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert found["torch"]["state"] == "broken"
    assert found["python"]["state"] == "ok"
    assert found["self-test on cpu"]["state"] == "broken"


@pytest.mark.parametrize(
    ("function", "message"),
    [("qsa_attention", "off the reference"), ("select_blocks", "select_blocks differs from the reference")],
)
def test_the_self_test_finds_a_wrong_kernel(function: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(pipeline, function)

    def wrong(*args: Any, route: str | None = None, **kwargs: Any) -> Any:
        result = right(*args, route=route, **kwargs)
        if route == "reference":
            return result
        if isinstance(result, torch.Tensor):
            return result * 1.001
        blocks = result.blocks.clone()
        blocks[-3, 0] = (blocks[-3, 0] + 1) % 4
        return type(result)(blocks, result.count)

    monkeypatch.setattr(pipeline, function, wrong)
    code, found, _ = report()
    assert code == 1
    assert found["self-test on cpu"]["state"] == "broken"
    assert message in found["self-test on cpu"]["detail"]


def test_a_result_that_is_no_number_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    right = pipeline.qsa_attention

    def nothing(*args: Any, **kwargs: Any) -> torch.Tensor:
        output = right(*args, **kwargs)
        assert isinstance(output, torch.Tensor)
        return torch.full_like(output, float("nan"))

    monkeypatch.setattr(pipeline, "qsa_attention", nothing)
    assert report()[1]["self-test on cpu"]["state"] == "broken"


def test_a_gpu_without_kernels_is_told_with_its_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    cpu = device.facts_of
    named = DeviceFacts.named("v100")
    monkeypatch.setattr(device, "facts_of", lambda where: named if where.type == "cuda" else cpu(where))
    code, found, _ = report()
    assert code == 0
    assert found["routes on cuda:0"]["state"] == "missing"
    assert "Tesla V100 (sm_70): no route; " in found["routes on cuda:0"]["detail"]
    assert "have no image for Tesla V100" in found["routes on cuda:0"]["detail"]


def test_a_driver_that_does_not_answer_hides_no_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> bool:
        raise RuntimeError("CUDA unknown error")

    monkeypatch.setattr(torch.cuda, "is_available", fails)
    code, found, _ = report()
    assert code == 0
    assert "routes on cpu" in found


def test_a_bad_knob_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHQSA_WORKSPACE_MIB", "lots")
    code, found, _ = report()
    assert code == 1
    assert found["knobs"]["state"] == "broken"
    assert "FLASHQSA_WORKSPACE_MIB" in found["knobs"]["detail"]


def test_an_old_transformers_is_told_what_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    old = ModuleType("transformers")
    old.__dict__["__version__"] = "5.15.2"
    found = {"transformers": old}
    monkeypatch.setattr(doctor, "import_module", lambda name: found.get(name) or import_module(name))
    code, findings, _ = report()
    assert code == 0
    assert findings["transformers"]["state"] == "broken"
    assert "wanted >=5.16" in findings["transformers"]["detail"]
