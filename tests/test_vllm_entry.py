"""The vLLM plugin beside a package that stands in for vLLM: what it replaces, when, and what it leaves alone."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from flashqsa.integrations.vllm.entry import DISTRIBUTIONS, REPLACED, check_version, require_vllm
from flashqsa.integrations.vllm.errors import UnsupportedVllmError
from tests.test_vllm_functions import ARGUMENTS

ROOT = Path(__file__).resolve().parent.parent
OURS = "flashqsa.integrations.vllm.functions"
MODEL = "vllm.models.qwen4_exp.nvidia"

REPORT = """
import importlib, json, sys
from flashqsa.integrations.vllm.entry import REPLACED, register
{before}
{register}
early = sorted(set(sys.modules) & {{"torch", "vllm", "triton", "flashqsa.pipeline"}})
found = {{}}
for name, functions in REPLACED.items():
    module = importlib.import_module(name)
    found.update({{function: getattr(module, function).__module__ for function in functions}})
    found[name] = [module.untouched(), module.__loader__.get_source(name) is not None]
called = importlib.import_module("vllm.models.qwen4_exp.nvidia.caller").called()
print(json.dumps([early, found, called, sum("Replacing" in type(f).__name__ for f in sys.meta_path)]))
"""


def stand_in(folder: Path, version: str, distribution: str = "vllm", **changed: str) -> Path:
    """A package that is laid out as vLLM, whose functions take its arguments; `changed` gives some others."""
    package = folder
    for part in (*MODEL.split("."), "ops"):
        package = package / part
        package.mkdir()
        (package / "__init__.py").write_text("")
    for name, functions in REPLACED.items():
        lines = ["def untouched():\n    return 'stock'\n"]
        for function in functions:
            arguments = changed.get(function, ", ".join(ARGUMENTS[function].split()))
            lines.append(f"def {function}({arguments}):\n    return 'stock'\n")
        (package / f"{name.rpartition('.')[2]}.py").write_text("\n".join(lines))
    # vLLM's layers import these functions inside their own, at each call.
    caller = "def called():\n    from .ops.qsa import qsa_sparse_paged_attention as f\n    return f.__module__\n"
    (package.parent / "caller.py").write_text(caller)
    info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    return folder


def run(
    folder: Path, *, before: str = "", register: str = "register()", **variables: str
) -> subprocess.CompletedProcess[str]:
    """A process that registers the plugin, then imports what vLLM would."""
    path = os.pathsep.join([str(folder), str(ROOT)])
    plain = {name: value for name, value in os.environ.items() if not name.startswith("FLASHQSA_")}
    return subprocess.run(
        [sys.executable, "-c", REPORT.format(before=before, register=register)],
        cwd=folder,
        env={**plain, "PYTHONPATH": path, "FLASHQSA_VLLM": "auto", **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def test_nothing_is_replaced_unless_it_is_asked_for(tmp_path: Path) -> None:
    stand_in(tmp_path, "0.32.0")
    plain = {name: value for name, value in os.environ.items() if not name.startswith("FLASHQSA_")}
    done = subprocess.run(
        [sys.executable, "-c", REPORT.format(before="", register="register()")],
        cwd=tmp_path,
        env={**plain, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert functions_of(done).isdisjoint({OURS})


def functions_of(done: subprocess.CompletedProcess[str]) -> set[str]:
    """The modules that the replaced functions come from."""
    assert done.returncode == 0, done.stderr
    _, found, called, _ = json.loads(done.stdout)
    return {found[function] for functions in REPLACED.values() for function in functions} | {called}


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_functions_are_replaced_when_vllm_imports_them(tmp_path: Path, distribution: str) -> None:
    done = run(stand_in(tmp_path, "0.32.0", distribution), FLASHQSA_VLLM="1")
    assert functions_of(done) == {OURS}
    early, found, _, finders = json.loads(done.stdout)
    assert early == []
    assert finders == 1
    assert [found[name] for name in REPLACED] == [["stock", True]] * len(REPLACED)
    assert done.stderr == ""


def test_registering_again_changes_nothing(tmp_path: Path) -> None:
    done = run(stand_in(tmp_path, "0.32.0"), register="register(); register()")
    assert functions_of(done) == {OURS}
    assert json.loads(done.stdout)[3] == 1


def test_modules_that_are_loaded_already_are_replaced_too(tmp_path: Path) -> None:
    before = "".join(f"import {name}\n" for name in REPLACED)
    assert functions_of(run(stand_in(tmp_path, "0.32.0+cu126"), before=before)) == {OURS}


def test_a_knob_leaves_vllm_as_it_is(tmp_path: Path) -> None:
    done = run(stand_in(tmp_path, "0.32.0"), FLASHQSA_VLLM="0")
    assert functions_of(done) == set(REPLACED)
    assert json.loads(done.stdout)[3] == 0
    assert "FLASHQSA_VLLM: wanted one of auto, 1, 0" in run(tmp_path, FLASHQSA_VLLM="off").stderr


@pytest.mark.parametrize("version", ["0.31.0", "0.33.0"])
def test_another_release_is_named_and_left_as_it_is(tmp_path: Path, version: str) -> None:
    done = run(stand_in(tmp_path, version))
    assert functions_of(done) == set(REPLACED)
    assert json.loads(done.stdout)[3] == 0
    assert f"vLLM stays as it is, without FlashQSA: vllm: wanted 0.32.*; got {version}" in done.stderr


def test_another_release_is_refused_where_the_plugin_is_asked_for(tmp_path: Path) -> None:
    done = run(stand_in(tmp_path, "0.33.0"), FLASHQSA_VLLM="1")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.rstrip().endswith("UnsupportedVllmError: vllm: wanted 0.32.*; got 0.33.0")


@pytest.mark.parametrize("before", ["", f"import {MODEL}.ops.qsa"], ids=["later", "earlier"])
def test_functions_with_other_arguments_are_refused_by_name(tmp_path: Path, before: str) -> None:
    done = run(stand_in(tmp_path, "0.32.0", qsa_sparse_paged_attention="q, cache"), before=before)
    assert done.returncode == 1
    wanted = f"{MODEL}.ops.qsa.qsa_sparse_paged_attention: wanted the arguments of vLLM 0.32.*; got ['q', 'cache']"
    assert wanted in done.stderr


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1", "0.32.0+cpu", "0.32.0.post1"])
def test_supported_versions(version: str) -> None:
    assert check_version(version) == "0.32"


@pytest.mark.parametrize(
    "version", ["0.32", "0.32.0rc1", "0.32.1.dev3+gabc", "0.3.2", "0.320.0", "1.0.32.0", "dev", ""]
)
def test_versions_that_are_not_supported(version: str) -> None:
    with pytest.raises(UnsupportedVllmError, match=re.escape(f"vllm: wanted 0.32.*; got {version}")):
        check_version(version)


def test_a_missing_vllm_is_said_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashqsa.integrations.vllm.entry.DISTRIBUTIONS", ("no-such-vllm",))
    with pytest.raises(UnsupportedVllmError, match="got none"):
        require_vllm()


def test_the_package_names_its_entry_point() -> None:
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    found = re.search(r'^\[project\.entry-points\."vllm\.general_plugins"\]\nflashqsa = "([\w.]+):(\w+)"$', text, re.M)
    assert found is not None
    assert callable(getattr(import_module(found[1]), found[2]))
