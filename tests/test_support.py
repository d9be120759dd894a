"""What this machine lacks for a device: facts, routes, `device_supported`, explain. Facts stand for GPUs."""

from __future__ import annotations

import ctypes
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from flashqsa import Call, DeviceFacts, InputError, NoRouteError, QsaSpec, choose_route, device_supported, machine
from flashqsa import device as devices
from flashqsa.__main__ import app
from flashqsa.cli import explain
from flashqsa.kernels.nvrtc import compile_source, library
from flashqsa.kernels.nvrtc.library import Nvrtc
from flashqsa.kernels.nvrtc.released import shared_sources
from flashqsa.machine import facts_here
from flashqsa.plan import make_plan

GPUS = ("v100", "rtx8000", "h100")
"""The devices of a machine with all three, in the order of their numbers."""

CALL = Call(QsaSpec(), 64, 1, 32_767, torch.float16, torch.float16)
LACKS_VOLTA = "no NVRTC here compiles for sm_70"


class StandIn(Nvrtc):
    """A compiler that makes something of anything."""

    def compile(self, name: str, _source: str, _headers: Any, options: Any) -> tuple[bytes | None, str]:
        return f"{name} {options}".encode(), "a log"


def stand_in(version: tuple[int, int], *archs: int) -> Nvrtc:
    return StandIn(f"libnvrtc.so.{version[0]}", version, frozenset(archs), ctypes.CDLL(None))


OLD, NEW = stand_in((12, 6), 70, 75, 80, 90), stand_in((13, 0), 75, 80, 90, 100, 120)


def forget() -> None:
    """As in another process."""
    caches: tuple[Any, ...] = (machine._facts_here, machine.maker_of, machine.log_refusal, devices.facts_of)
    for cached in (*caches, compile_source):
        cached.cache_clear()


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Nvrtc]]:
    """The compilers of a machine with `GPUS` and Triton, to be changed by the test; an empty cache folder."""
    found = [NEW]
    monkeypatch.setattr(library, "installed", lambda: tuple(found))
    monkeypatch.setattr(devices, "find_spec", lambda name: name)
    monkeypatch.setenv("FLASHQSA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(GPUS))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties(GPUS[device.index]))
    forget()
    yield found
    forget()


def properties(name: str) -> SimpleNamespace:
    """What torch tells of a known device."""
    facts = DeviceFacts.named(name)
    assert facts.capability is not None
    return SimpleNamespace(
        name=facts.name,
        major=facts.capability[0],
        minor=facts.capability[1],
        multi_processor_count=facts.multiprocessors,
        shared_memory_per_block_optin=facts.shared_memory_bytes,
        total_memory=facts.memory_bytes,
    )


def gpu(index: int) -> torch.device:
    return torch.device("cuda", index)


def test_each_device_of_a_mixed_machine_has_its_own_answer(
    libraries: list[Nvrtc], caplog: pytest.LogCaptureFixture
) -> None:
    """NVRTC 13 leaves out the V100 beside two GPUs that it serves: refused by name before any work, logged once."""
    caplog.set_level(logging.WARNING, "flashqsa")
    for _ in range(2):
        volta, turing, hopper = (device_supported(index) for index in range(3))
        assert not volta
        assert (bool(turing), bool(hopper)) == (True, True)
        assert (turing.kernel_sets, hopper.kernel_sets) == (("sm7x",), ("sm90", "smxx"))
        assert turing.made_by == "NVRTC 13.0 (libnvrtc.so.13), for sm_75"
        assert LACKS_VOLTA in str(volta.reason)
        assert "found: libnvrtc.so.13 (13.0, sm_75 to sm_120)" in str(volta.reason)
        assert "Install nvidia-cuda-nvrtc-cu12==12.6.77" in str(volta.reason)
        assert "Nor are everything.cu, worklist.cu, write.cu kept compiled" in str(volta.reason)
    (told,) = caplog.records
    assert told.getMessage().startswith(f"cuda:0 (Tesla V100, sm_70) has no kernels here: {LACKS_VOLTA}")
    with pytest.raises(NoRouteError, match=f"sm7x:grouped: {LACKS_VOLTA}"):
        choose_route("attend", CALL, facts_here(gpu(0)))
    with pytest.raises(NoRouteError, match=f"sm7x:plain: {LACKS_VOLTA}"):
        make_plan(CALL, facts_here(gpu(0)))
    assert str(choose_route("attend", CALL, facts_here(gpu(0)), "reference").route) == "reference"
    routes = [str(make_plan(CALL, facts_here(gpu(index))).attend_decision.route) for index in (1, 2)]
    assert routes == ["sm7x:grouped", "sm90:grouped"]


def test_every_device_of_a_mixed_machine_is_served_by_an_older_nvrtc(libraries: list[Nvrtc]) -> None:
    libraries.append(OLD)
    found = [device_supported(f"cuda:{index}") for index in range(3)]
    assert all(found)
    assert [support.made_by for support in found] == [
        "NVRTC 12.6 (libnvrtc.so.12), for sm_70",
        "NVRTC 13.0 (libnvrtc.so.13), for sm_75",
        "NVRTC 13.0 (libnvrtc.so.13), for sm_90",
    ]
    assert str(found[0]) == "cuda:0 (Tesla V100, sm_70): served by sm7x; NVRTC 12.6 (libnvrtc.so.12), for sm_70"


def test_triton_s_kernels_need_nvrtc_too(libraries: list[Nvrtc], caplog: pytest.LogCaptureFixture) -> None:
    libraries.clear()
    for index in range(3):
        assert "no NVRTC here compiles" in str(device_supported(index).reason)
        assert facts_here(gpu(index)).kernel_sets == {"reference"}
    assert [name for name, _ in facts_here(gpu(2)).missing] == ["sm90", "smxx"]
    with pytest.raises(NoRouteError, match="smxx:plain: no NVRTC here compiles for sm_90; found: none"):
        choose_route("select", CALL, facts_here(gpu(2)))
    assert [record.getMessage()[:6] for record in caplog.records] == ["cuda:0", "cuda:1", "cuda:2"]


def test_without_triton_the_package_is_the_reason(libraries: list[Nvrtc], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "find_spec", lambda name: None if name == "triton" else name)
    assert device_supported("cuda:2").reason == "triton is not installed"
    assert device_supported("cuda:1")


def test_kept_kernels_serve_without_a_compiler(libraries: list[Nvrtc], tmp_path: Path) -> None:
    libraries[:] = [OLD]
    assert CliRunner().invoke(app, ["build", "--arch", "7.0"]).exit_code == 0
    libraries[:] = [NEW]
    forget()
    found = device_supported("cuda:0")
    assert found
    assert found.made_by == f"kernels compiled elsewhere, kept in {tmp_path / 'cache' / 'nvrtc'}"
    assert str(make_plan(CALL, facts_here(gpu(0))).attend_decision.route) == "sm7x:grouped"


def test_kernels_of_another_version_do_not_count(libraries: list[Nvrtc]) -> None:
    libraries[:] = [OLD]
    for source in shared_sources((7, 0)):
        compile_source(replace(source, text=source.read() + "// as it was\n"), (7, 0))
    libraries[:] = [NEW]
    forget()
    assert LACKS_VOLTA in str(device_supported("cuda:0").reason)


def test_too_little_shared_memory_is_a_reason(
    libraries: list[Nvrtc], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lacking = properties("rtx8000")
    lacking.shared_memory_per_block_optin = 48 << 10
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: lacking)
    for _ in range(2):
        found = device_supported("cuda:1")
        assert found.kernel_sets == ("sm7x",)
        assert found.reason == "attend: a program needs 65536 bytes of shared memory, the device has 49152"
    hopper = replace(DeviceFacts.named("h100"), shared_memory_bytes=1 << 10)
    assert str(device_supported(hopper).reason).startswith("select: ")
    assert "bytes of shared memory" in str(device_supported(hopper).reason)
    assert [record.args[0] for record in caplog.records if isinstance(record.args, tuple)] == [gpu(1)]


def test_a_device_without_a_number_is_the_current_one(libraries: list[Nvrtc], monkeypatch: pytest.MonkeyPatch) -> None:
    assert facts_here(torch.device("cuda")).name == "Quadro RTX 8000"
    assert device_supported("cuda").device == "cuda:1"
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert facts_here(torch.device("cuda")).name == "H100"


def test_devices_that_are_not_here_are_asked_of_this_machine(libraries: list[Nvrtc]) -> None:
    assert device_supported("RTX 8000").made_by == "NVRTC 13.0 (libnvrtc.so.13), for sm_75"
    assert LACKS_VOLTA in str(device_supported("v100"))
    assert LACKS_VOLTA in str(device_supported(DeviceFacts.named("v100")).reason)
    pascal = DeviceFacts("cuda", "Tesla P100", (6, 0), kernel_sets=devices.kernel_sets_for((6, 0)))
    assert device_supported(pascal).reason == "no kernels are made for sm_60"
    assert device_supported(torch.device("meta")).reason == "no kernels are made for meta"
    assert device_supported(3).reason == f"torch {torch.__version__} sees 3 CUDA devices here"


@pytest.mark.parametrize("wrong", ["gtx9000", "", -1, True, None, 1.5])
def test_what_names_no_device_is_refused(wrong: Any) -> None:
    with pytest.raises(
        InputError, match="device: wanted a device, a CUDA device's number, DeviceFacts, or one of cpu,"
    ):
        device_supported(wrong)


def test_a_machine_is_looked_at_once(libraries: list[Nvrtc], monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []

    def look() -> tuple[Nvrtc, ...]:
        looked.append(1)
        return (NEW,)

    monkeypatch.setattr(library, "installed", look)
    for _ in range(3):
        facts_here(gpu(1))
        device_supported(1)
    assert len(looked) == 1


def test_a_call_on_a_cpu_looks_for_no_library() -> None:
    program = (
        "import ctypes, torch\n"
        "def refuse(*arguments, **options): raise AssertionError('opened a library')\n"
        "ctypes.CDLL.__init__ = refuse\n"
        "import sys, flashqsa\n"
        "from flashqsa.machine import facts_here\n"
        "assert facts_here(torch.device('cpu')).kernel_sets == {'cpu', 'reference'}\n"
        "assert flashqsa.device_supported('cpu')\n"
        "assert not [name for name in sys.modules if name.startswith('flashqsa.kernels.nvrtc')]\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_explain_names_what_the_gpu_here_lacks(libraries: list[Nvrtc], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain, "devices_here", lambda: [torch.device("cpu"), gpu(0)])
    result = CliRunner().invoke(app, ["explain", "--dtype", "fp16", "--device", "here", "--json", "-"])
    assert result.exit_code == 1
    told = json.loads(result.stdout)
    assert told["device"]["missing"][0][0] == "sm7x"
    reasons = {refusal["route"]: refusal["reason"] for refusal in told["routes"]["attend"]["refused"]}
    assert reasons["sm7x:grouped"].startswith(LACKS_VOLTA)


def test_a_library_that_is_none_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "libnvrtc.so.12").write_text("not a library")
    (tmp_path / "libnvrtc-builtins.so.12.6").write_text("not a library")
    assert library.open_library(str(tmp_path / "libnvrtc.so.12")) is None
    assert library.open_library("libc.so.6") is None
