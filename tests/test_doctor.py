"""The doctor: it tells what is there, and a broken install is a line of its report."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from flashqsa import device, machine, pipeline
from flashqsa.__main__ import app
from flashqsa.cli import doctor
from flashqsa.device import DeviceFacts
from flashqsa.kernels.nvrtc import library
from flashqsa.testing import verify
from flashqsa.testing.cases import Case

FINDINGS = ["python", "torch", "numpy", "safetensors", "flashqsa", "transformers", "triton", "nvrtc"]


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
    assert "prefill cpu:fused then cpu:grouped" in routes
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
    assert found["triton"]["state"] == "missing"
    assert "GPUs from sm_80 on" in found["triton"]["detail"]
    assert found["self-test on cpu"]["state"] == "ok"


def test_nvrtc_is_looked_for_where_kernels_look(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*libraries: library.Nvrtc) -> dict[str, Any]:
        monkeypatch.setattr(library, "installed", lambda: libraries)
        code, found, _ = report()
        assert code == 0
        return found["nvrtc"]

    none = opened()
    assert none["state"] == "missing"
    assert "pip install nvidia-cuda-nvrtc" in none["detail"]
    with monkeypatch.context() as patch:
        patch.setenv("FLASHQSA_NVRTC", "/no/libnvrtc.so.13")
        named = opened()
    assert named["state"] == "missing"
    assert named["detail"] == "FLASHQSA_NVRTC names '/no/libnvrtc.so.13', which does not open as an NVRTC"
    both = opened(nvrtc((13, 0), 75, 121), nvrtc((12, 6), 50, 90))
    assert both["detail"] == "12.6 for sm_50 to sm_90; 13.0 for sm_75 to sm_121"


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


def nvrtc(version: tuple[int, int], *archs: int) -> library.Nvrtc:
    """A compiler that nothing asks to compile."""
    return library.Nvrtc(f"libnvrtc.so.{version[0]}", version, frozenset(archs), ctypes.CDLL(None))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[DeviceFacts], None]]:
    """Makes one GPU of given facts appear, with a compiler for newer GPUs; its kernels cannot run."""

    def appear(facts: DeviceFacts) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        here = device.facts_of
        monkeypatch.setattr(machine, "facts_of", lambda where: facts if where.type == "cuda" else here(where))
        monkeypatch.setattr(device, "find_spec", lambda name: name)
        monkeypatch.setattr(library, "installed", lambda: (nvrtc((13, 0), 80, 90, 120),))
        look_again()

    yield appear
    look_again()


def look_again() -> None:
    """As in another process."""
    for cached in (machine._facts_here, machine.maker_of, machine.log_refusal):
        cached.cache_clear()


def verdict(
    monkeypatch: pytest.MonkeyPatch, *failures: str, error: Exception | None = None
) -> list[tuple[str, torch.device | str]]:
    """Makes every case end so, instead of running it; returns the cases that were asked for."""
    asked = []

    def judge(case: Case, where: torch.device | str = "cpu") -> verify.CaseResult:
        asked.append((case.name, where))
        if error is not None:
            raise error
        return verify.CaseResult(case, ("smxx:plain", "sm90:grouped"), None, failures, 0.25)

    monkeypatch.setattr(verify, "verify_case", judge)
    return asked


def test_a_gpu_that_has_no_kernels_is_told_so(
    gpu: Callable[[DeviceFacts], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    arch = "sm_60"
    gpu(replace(DeviceFacts.named("v100"), name="Tesla P100", capability=(6, 0), kernel_sets=frozenset({"reference"})))
    asked = verdict(monkeypatch)
    code, found, told = report()
    assert (code, told["works_on"], asked) == (0, [], [])
    routes = found["routes on cuda:0"]
    assert routes["state"] == "missing"
    assert f"({arch}): no route; {arch} has no kernels, which begin at sm_70" in routes["detail"]
    assert "route='reference'" in routes["detail"]
    assert "self-test on cuda:0" not in found


def test_the_first_capability_with_kernels_is_the_devices() -> None:
    known = [facts for facts in device.KNOWN_DEVICES.values() if facts.capability is not None]
    for facts in known:
        assert facts.capability is not None
        has_kernels = bool(facts.kernel_sets - {"reference"})
        assert has_kernels == (facts.capability >= doctor.FIRST_WITH_KERNELS), facts.name


def test_a_gpu_without_triton_says_what_lacks(gpu: Callable[[DeviceFacts], None]) -> None:
    lacks = tuple((name, "triton is not installed") for name in ("sm90", "smxx"))
    gpu(replace(DeviceFacts.named("h200"), kernel_sets=frozenset({"reference"}), missing=lacks))
    code, found, _ = report()
    assert code == 0
    assert found["routes on cuda:0"]["state"] == "missing"
    assert "no route; triton is not installed. Its kernels (sm90, smxx) need it" in found["routes on cuda:0"]["detail"]


def test_a_gpu_that_works_is_told_with_its_routes(
    gpu: Callable[[DeviceFacts], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu(DeviceFacts.named("h200"))
    asked = verdict(monkeypatch)
    code, found, told = report()
    assert (code, told["works_on"]) == (0, ["cuda:0"])
    routes = found["routes on cuda:0"]["detail"]
    assert "H200 (sm_90): prefill smxx:plain then sm90:grouped, decode smxx:plain then smxx:splitk" in routes
    assert "short smxx:everything then sm90:dense" in routes
    assert "NVRTC 13.0 (libnvrtc.so.13), for sm_90; cubins in " in found["compiler for cuda:0"]["detail"]
    assert asked == [(name, "cuda:0") for name in doctor.GPU_CASES]
    assert "right, error 0.25 of allowed" in found["self-test on cuda:0"]["detail"]
    result = CliRunner().invoke(app, ["doctor"])
    assert "FlashQSA works on this machine's CPU and cuda:0." in result.stdout


def test_a_gpu_with_a_wrong_kernel_fails_and_the_cpu_still_works(
    gpu: Callable[[DeviceFacts], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu(DeviceFacts.named("a100"))
    verdict(monkeypatch, "output changes with a second call")
    code, found, told = report()
    assert (code, told["works_on_cpu"], told["works_on"]) == (1, True, [])
    assert found["self-test on cuda:0"]["state"] == "broken"
    assert "output changes with a second call" in found["self-test on cuda:0"]["detail"]
    result = CliRunner().invoke(app, ["doctor"])
    assert "does not work everywhere here: see self-test on cuda:0." in result.stdout


def test_a_gpu_whose_kernels_cannot_be_launched_is_a_line_of_the_report(
    gpu: Callable[[DeviceFacts], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu(DeviceFacts.named("rtx4090"))
    verdict(monkeypatch, error=RuntimeError("no kernel image is available"))
    code, found, _ = report()
    assert code == 1
    assert found["self-test on cuda:0"]["detail"] == "RuntimeError: no kernel image is available"


def test_a_gpu_without_a_compiler_is_told_what_to_install(
    gpu: Callable[[DeviceFacts], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Kernels that were compiled earlier would serve it.
    monkeypatch.setenv("FLASHQSA_CACHE_DIR", str(tmp_path))
    gpu(DeviceFacts.named("h200"))
    asked = verdict(monkeypatch)
    monkeypatch.setattr(library, "installed", lambda: (nvrtc((11, 8), 50, 89),))
    look_again()
    code, found, told = report()
    assert (code, told["works_on"], asked) == (0, [], [])
    routes = found["routes on cuda:0"]
    assert routes["state"] == "missing"
    assert "H200 (sm_90): no route; no NVRTC here compiles for sm_90" in routes["detail"]
    assert "Install nvidia-cuda-nvrtc" in routes["detail"]
    assert "Its kernels (sm90, smxx) need it" in routes["detail"]
    assert {"compiler for cuda:0", "self-test on cuda:0"}.isdisjoint(found)


def test_a_gpu_whose_tiles_do_not_fit_is_told_so(
    gpu: Callable[[DeviceFacts], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu(replace(DeviceFacts.named("rtx4090"), shared_memory_bytes=1 << 10))
    asked = verdict(monkeypatch)
    code, found, told = report()
    assert (code, told["works_on"], asked) == (0, [], [])
    assert found["routes on cuda:0"]["state"] == "missing"
    assert "no route; select: 4 index heads of 128 need" in found["routes on cuda:0"]["detail"]


@pytest.mark.gpu
def test_the_doctor_passes_on_this_gpu() -> None:
    code, found, told = report()
    if "smxx" not in machine.facts_here(torch.device("cuda:0")).kernel_sets:
        assert found["routes on cuda:0"]["state"] == "missing"
        return
    assert code == 0, found
    assert "cuda:0" in told["works_on"]


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
