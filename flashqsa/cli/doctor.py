"""`flashqsa doctor`: what is installed, which devices are here, which routes serve them, and whether they work.

Every probe stands alone and imports what it needs itself, so a broken install shows as a line of the report and not as
a traceback. This is the one file where a probe may catch any exception.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any, Literal

from flashqsa import __version__
from flashqsa.cli.show import FAILED, OK, Screen, write_json

State = Literal["ok", "missing", "broken"]
MINIMUM_PYTHON = (3, 10)
NVRTC_PACKAGES = ("nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc-cu13", "nvidia-cuda-nvrtc")
"""Distributions that bring NVRTC; reports of benchmarks name their versions."""

FIRST_WITH_KERNELS = (7, 0)
"""The first compute capability that has kernels; GPUs before it get the reference, and only where it is pinned."""

GPU_CASES = ("1700-tokens-model", "verify-model")
"""Cases of `flashqsa verify` that a GPU's self-test runs: FP16 rows of a prefill, and verify rows over an FP8 cache, of
the model's heads. Every kernel set with kernels for GPUs takes them."""


@dataclass(frozen=True)
class Finding:
    """What one probe found.

    state    "ok", "missing" (not there: `detail` says what needs it) or "broken"
    needed   whether the CPU road, qsa_attention on CPU tensors, needs it
    wrong    whether it being broken means that results cannot be trusted
    """

    name: str
    state: State
    detail: str
    needed: bool = False
    wrong: bool = False

    @property
    def fails(self) -> bool:
        """Whether the doctor's verdict is bad because of it."""
        return (self.needed and self.state != "ok") or (self.wrong and self.state == "broken")


class ProbeError(Exception):
    """A probe's own verdict: the thing answers, and is not usable."""


class AbsentError(Exception):
    """A probe's own verdict: the thing is not there."""


def probe(name: str, look: Callable[[], str], *, needed: bool = False, wrong: bool = False) -> Finding:
    """Runs one probe; whatever it raises is its finding."""
    try:
        return Finding(name, "ok", look(), needed, wrong)
    except AbsentError as error:
        return Finding(name, "missing", " ".join(str(error).split()), needed, wrong)
    except Exception as error:  # noqa: BLE001 - a finding, whatever it is
        text = str(error) if isinstance(error, ProbeError) else f"{type(error).__name__}: {error}"
        return Finding(name, "broken", " ".join(text.split()), needed, wrong)


def _package(name: str, purpose: str) -> ModuleType:
    try:
        found = version(name)
    except PackageNotFoundError:
        raise AbsentError(f"not installed; {purpose}") from None
    try:
        return import_module(name)
    except ImportError as error:
        raise ProbeError(f"{found} is installed and cannot be imported: {error}") from error


def _python() -> str:
    if sys.version_info[:2] < MINIMUM_PYTHON:
        raise ProbeError(f"{platform.python_version()}; wanted {'.'.join(map(str, MINIMUM_PYTHON))} or newer")
    return f"{platform.python_version()} on {platform.platform()}"


def _torch() -> str:
    torch = _package("torch", "everything needs it: pip install torch")
    build = torch.version.cuda
    kind = "CPU build" if build is None else f"CUDA {build} build"
    return f"{torch.__version__}, {kind}, {torch.get_num_threads()} threads"


def _plain(name: str, purpose: str) -> Callable[[], str]:
    return lambda: str(getattr(_package(name, purpose), "__version__", None) or version(name))


def _transformers() -> str:
    found = str(_package("transformers", "flashqsa run needs it: pip install 'flashqsa[transformers]'").__version__)
    import_module("flashqsa.integrations.transformers.versions").check_version(found)
    import_module("transformers.models.qwen4_exp.modeling_qwen4_exp")
    import_module("flashqsa.integrations.transformers.switch")
    return f"{found}, supported"


def _nvrtc_kernels() -> Any:
    """The kernels that GPUs share and their compiler, as calls get them: importing them needs no GPU."""
    return import_module("flashqsa.pipeline").kernel_set("nvrtc")


def _nvrtc() -> str:
    """Every NVRTC that opens here, whoever brought it: that is where kernels look, too."""
    libraries = _nvrtc_kernels().library.installed()
    if not libraries:
        knob = import_module("flashqsa.knobs").NVRTC
        if knob.read():
            raise AbsentError(f"{knob.name} names {knob.read()!r}, which does not open as an NVRTC")
        raise AbsentError(
            "not found; GPUs compile top-k, worklists, writes and Hopper's attention with it: torch's CUDA builds "
            "bring it, else pip install nvidia-cuda-nvrtc"
        )
    found = [
        f"{library.version[0]}.{library.version[1]} for sm_{min(library.archs)} to sm_{max(library.archs)}"
        for library in sorted(libraries, key=lambda library: library.version)
    ]
    return "; ".join(found)


def _package_itself() -> str:
    import_module("flashqsa.pipeline")
    return f"{__version__} at {import_module('flashqsa').__path__[0]}"


def _knobs() -> str:
    knobs = import_module("flashqsa.knobs")
    values = {knob.name: knob.read() for knob in knobs.KNOBS}
    changed = [f"{name}={value}" for name, value in values.items() if value != _default(knobs, name)]
    return ", ".join(changed) if changed else "all FLASHQSA_* variables at their defaults"


def _default(knobs: ModuleType, name: str) -> str:
    return next(str(knob.default) for knob in knobs.KNOBS if knob.name == name)


def _self_test() -> str:
    """One small call through the CPU kernels, against the reference."""
    torch = import_module("torch")
    pipeline = import_module("flashqsa.pipeline")
    values = import_module("flashqsa.values")
    spec = values.QsaSpec(q_heads=4, kv_heads=2, head_dim=32, index_heads=2, index_dim=16, top_blocks=4)
    generator = torch.Generator().manual_seed(0)

    def whole_numbers(*shape: int) -> Any:
        # Small whole numbers make FP32 scores exact, so both selections must be equal to the last entry.
        return torch.randint(-3, 4, shape, generator=generator).float()

    rows = values.Rows.from_lengths([24, 1], [56, 37], pad_to=26)
    tables = torch.tensor([[6, 0, 3, 1], [5, 2, 4, -1]], dtype=torch.int32)
    index_cache = values.IndexCache(whole_numbers(7, 4, 16), tables)
    kv_cache = values.KvCache.interleaved(torch.randn(7, 2, 16, 2, 32, generator=generator), tables)
    index_q = whole_numbers(26, 2, 16)
    q, gate = torch.randn(2, 26, 4, 32, generator=generator)
    found = pipeline.select_blocks(index_q, index_cache, rows, spec)
    wanted = pipeline.select_blocks(index_q, index_cache, rows, spec, route="reference")
    if not (torch.equal(found.blocks, wanted.blocks) and torch.equal(found.count, wanted.count)):
        raise ProbeError("select_blocks differs from the reference")
    output = pipeline.qsa_attention(index_q, q, index_cache, kv_cache, rows, spec, gate)
    exact = pipeline.qsa_attention(index_q, q, index_cache, kv_cache, rows, spec, gate, route="reference")
    error = float((output - exact).abs().max())
    if not error <= 1e-5:
        raise ProbeError(f"qsa_attention is {error:.1e} off the reference; wanted at most 1e-05")
    return f"26 rows, selection equal, output within {error:.1e} of the reference"


def _device_routes(name: str) -> Callable[[], str]:
    def look() -> str:
        routes = import_module("flashqsa.route")
        explain = import_module("flashqsa.cli.explain")
        values = import_module("flashqsa.values")
        torch = import_module("torch")
        facts = import_module("flashqsa.machine").facts_here(torch.device(name))
        dtype = torch.float32 if facts.kind == "cpu" else torch.float16
        found = []
        for what, rows, requests, last in (("prefill", 2048, 1, 32767), ("decode", 1, 1, 32767), ("short", 64, 1, 63)):
            call = routes.Call(values.QsaSpec(), rows, requests, last, dtype, dtype)
            taken = []
            for stage in routes.CANDIDATES:
                decision = explain.stage_decision(stage, call, facts)
                if isinstance(decision, routes.NoRouteError):
                    raise AbsentError(f"{facts.name} ({facts.arch}): no route; {_why_no_route(facts, decision)}")
                taken.append(str(decision.route))
            found.append(f"{what} {' then '.join(taken)}")
        return f"{facts.name} ({facts.arch}): {', '.join(found)}"

    return look


def _why_no_route(facts: Any, error: Exception) -> str:
    """What a device lacks where a call of the doctor's got an error for a route, and what to do."""
    reason = import_module("flashqsa.support").device_supported(facts).reason or str(error)
    if facts.missing:
        sets = ", ".join(sorted(kernel_set for kernel_set, _ in facts.missing))
        where = "torch's CUDA builds for Linux bring Triton and an NVRTC"
        return f"{reason.rstrip('.')}. Its kernels ({sets}) need it; {where}"
    if facts.capability is not None and facts.capability < FIRST_WITH_KERNELS:
        return (
            f"{facts.arch} has no kernels, which begin at sm_{FIRST_WITH_KERNELS[0]}{FIRST_WITH_KERNELS[1]}; "
            "route='reference' runs, in FP64 and row by row, for checking"
        )
    return f"{reason}; route='reference' runs, in FP64 and row by row, for checking"


def _nvrtc_of(name: str) -> Callable[[], str]:
    def look() -> str:
        support = import_module("flashqsa.support").device_supported(name)
        if not support:
            raise AbsentError(support.reason)
        return f"{support.made_by}; cubins in {_nvrtc_kernels().compiler.cache_folder()}"

    return look


def _gpu_self_test(name: str) -> Callable[[], str]:
    """Two small cases through the kernels of a GPU, against the reference on the CPU. The first run compiles."""

    def look() -> str:
        verify = import_module("flashqsa.testing.verify")
        named = import_module("flashqsa.testing.cases").named
        told = []
        for case in GPU_CASES:
            result = verify.verify_case(named(case), name)
            if not result.passed:
                raise ProbeError(str(result))
            told.append(str(result))
        return "; ".join(told)

    return look


def _devices() -> list[str]:
    """Every device torch names; the CPU alone where torch or its driver cannot be asked."""
    try:
        torch = import_module("torch")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    except (ImportError, OSError, RuntimeError, AttributeError):
        return ["cpu"]
    return ["cpu", *(f"cuda:{index}" for index in range(count))]


def findings() -> list[Finding]:
    """Every probe, in the order of the report."""
    found = [
        probe("python", _python, needed=True),
        probe("torch", _torch, needed=True),
        probe("numpy", _plain("numpy", "torch wants it: pip install numpy"), needed=True),
        probe("safetensors", _plain("safetensors", "captures need it: pip install safetensors"), needed=True),
        probe("flashqsa", _package_itself, needed=True),
        probe("transformers", _transformers),
        probe(
            "triton",
            _plain("triton", "GPUs from sm_80 on score, attend and merge with it; torch's CUDA builds bring it"),
        ),
        probe("nvrtc", _nvrtc),
        probe("matplotlib", _plain("matplotlib", "flashqsa stats --plot needs it: pip install 'flashqsa[plot]'")),
        probe("knobs", _knobs),
    ]
    devices = _devices()
    for name in devices:
        found.append(probe(f"routes on {name}", _device_routes(name), needed=name == "cpu"))
    found.append(probe("self-test on cpu", _self_test, needed=True))
    for name in devices[1:]:
        found += _gpu_findings(name, {finding.name: finding.state for finding in found})
    return found


def _gpu_findings(name: str, states: dict[str, State]) -> list[Finding]:
    """What a GPU compiles with, and its self-test; nothing where it has no route."""
    if states[f"routes on {name}"] != "ok":
        return []
    compiler = probe(f"compiler for {name}", _nvrtc_of(name))
    if compiler.state != "ok":
        return [compiler]
    return [compiler, probe(f"self-test on {name}", _gpu_self_test(name), wrong=True)]


def working_gpus(found: list[Finding]) -> list[str]:
    """GPUs whose self-test passed."""
    tests = [f.name.removeprefix("self-test on ") for f in found if f.name.startswith("self-test") and f.state == "ok"]
    return [name for name in tests if name != "cpu"]


def doctor(screen: Screen, json_target: str | None) -> int:
    """Shows every finding.

    The exit code is OK where everything that the CPU road needs is, and no GPU's self-test found a fault. A GPU without
    a route, or without a compiler, is told and is no failure.
    """
    found = findings()
    works = all(finding.state == "ok" for finding in found if finding.needed)
    failing = [finding.name for finding in found if finding.fails]
    gpus = working_gpus(found)
    screen.table("flashqsa doctor", ("what", "state", "detail"), [(f.name, f.state, f.detail) for f in found])
    if works:
        screen.line(" and ".join(["FlashQSA works on this machine's CPU", *gpus]) + ".")
    if failing:
        screen.line(f"FlashQSA does not work {'everywhere ' if works else ''}here: see {', '.join(failing)}.")
    report = {"works_on_cpu": works, "works_on": gpus, "findings": [asdict(finding) for finding in found]}
    write_json(json_target, report)
    return FAILED if failing else OK
