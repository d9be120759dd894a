"""The vLLM plugin beside a package that stands in for vLLM: what it replaces, when, and what it leaves alone."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from flashqsa.integrations.vllm.entry import DISTRIBUTIONS, MODELS, OURS, REPLACED, check_version, require_vllm
from flashqsa.integrations.vllm.errors import UnsupportedVllmError

ROOT = Path(__file__).resolve().parent.parent

ARGUMENTS = {
    "Qwen4ExpQSAAttention": "*, vllm_config, config, layer_id, quant_config=None, reduce_results=True, prefix=''",
    "GatedResidual": "config, use_combine=True, prefix=''",
    "QwenGatedDeltaNetAttention": "config, vllm_config, prefix='', gqa_interleaved_layout=False, reduce_results=True",
}
"""Arguments of the classes of vLLM 0.32.0 that are replaced."""

REPORT = """
import importlib, json, sys
from flashqsa.integrations.vllm import entry
from flashqsa.integrations.vllm.entry import register
# Classes that stand in for ours: those need the real vLLM, whose classes they extend.
entry.REPLACED = {{m: {{n: "ours:" + p.partition(":")[2] for n, p in c.items()}} for m, c in entry.REPLACED.items()}}
{before}
{register}
early = sorted(set(sys.modules) & {{"torch", "vllm", "triton", "ours", "flashqsa.pipeline"}})
found = {{}}
for name, classes in entry.REPLACED.items():
    module = importlib.import_module(name)
    found[name] = [{{kind: getattr(module, kind).__module__ for kind in classes}}, module.built(), module.untouched()]
    found[name].append(module.__loader__.get_source(name) is not None)
print(json.dumps([early, found, sum("Replacing" in type(f).__name__ for f in sys.meta_path)]))
"""


def stand_in(folder: Path, version: str, distribution: str = "vllm", **changed: str) -> Path:
    """A package that is laid out as vLLM, whose classes take its arguments; `changed` gives some others."""
    folder.mkdir(exist_ok=True)
    package = folder
    for part in MODELS.split("."):
        package = package / part
        package.mkdir()
        (package / "__init__.py").write_text("")
    ours = {}
    for name, classes in REPLACED.items():
        lines = ["def untouched():\n    return 'stock'\n"]
        for kind, path in classes.items():
            arguments = changed.get(kind, ARGUMENTS[kind])
            lines.append(f"class {kind}:\n    def __init__(self, {arguments}):\n        pass\n")
            ours[path.partition(":")[2]] = f"    def __init__(self, {ARGUMENTS[kind]}):\n        pass\n"
        # vLLM's models look classes up in their module when they are built.
        kinds = ", ".join(classes)
        lines.append(f"def built():\n    return [kind.__module__ for kind in ({kinds},)]\n")
        (package / f"{name.rpartition('.')[2]}.py").write_text("\n".join(lines))
    (folder / "ours.py").write_text("\n".join(f"class {name}:\n{body}" for name, body in ours.items()))
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
        env={**plain, "PYTHONPATH": path, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def homes_of(done: subprocess.CompletedProcess[str]) -> set[str]:
    """The modules that the replaced classes come from, where they stand and where they are looked up."""
    assert done.returncode == 0, done.stderr
    _, found, _ = json.loads(done.stdout)
    return {home for kinds, built, *_ in found.values() for home in (*kinds.values(), *built)}


def finders_of(done: subprocess.CompletedProcess[str]) -> int:
    count: int = json.loads(done.stdout)[2]
    return count


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("mode", ["auto", "1", None])
def test_classes_are_replaced_when_vllm_imports_them(tmp_path: Path, distribution: str, mode: str | None) -> None:
    done = run(stand_in(tmp_path, "0.32.0", distribution), **({} if mode is None else {"FLASHQSA_VLLM": mode}))
    assert homes_of(done) == {"ours"}
    early, found, finders = json.loads(done.stdout)
    assert early == []
    assert finders == 1
    assert [rest for _, _, *rest in found.values()] == [["stock", True]] * len(REPLACED)
    assert done.stderr == ""


def test_replacing_is_said_in_vllms_log(tmp_path: Path) -> None:
    """vLLM's logger has a handler and a level of its own by the time that its models are imported."""
    logs = "import logging; logging.getLogger('vllm').addHandler(logging.StreamHandler())"
    said = [
        run(stand_in(folder, "0.32.0"), before=f"{logs}; logging.getLogger('vllm').setLevel({level})").stderr
        for folder, level in ((tmp_path / "info", 20), (tmp_path / "warning", 30))
    ]
    lines = [f"FlashQSA serves {', '.join(classes)} of {name}" for name, classes in REPLACED.items()]
    assert said[0].splitlines() == lines
    assert said[1] == ""


def test_registering_again_changes_nothing(tmp_path: Path) -> None:
    done = run(stand_in(tmp_path, "0.32.0"), register="register(); register()")
    assert homes_of(done) == {"ours"}
    assert finders_of(done) == 1


def test_modules_that_are_loaded_already_are_replaced_too(tmp_path: Path) -> None:
    before = "".join(f"import {name}\n" for name in REPLACED)
    assert homes_of(run(stand_in(tmp_path, "0.32.0+cu126"), before=before)) == {"ours"}


def test_a_knob_leaves_vllm_as_it_is(tmp_path: Path) -> None:
    done = run(stand_in(tmp_path, "0.32.0"), FLASHQSA_VLLM="0")
    assert homes_of(done) == set(REPLACED)
    assert finders_of(done) == 0
    assert "FLASHQSA_VLLM: wanted one of auto, 1, 0" in run(tmp_path, FLASHQSA_VLLM="off").stderr


@pytest.mark.parametrize("version", ["0.31.0", "0.33.0"])
def test_another_release_is_named_and_left_as_it_is(tmp_path: Path, version: str) -> None:
    done = run(stand_in(tmp_path, version))
    assert homes_of(done) == set(REPLACED)
    assert finders_of(done) == 0
    assert f"vLLM stays as it is, without FlashQSA: vllm: wanted 0.32.*; got {version}" in done.stderr


def test_another_release_is_refused_where_the_plugin_is_asked_for(tmp_path: Path) -> None:
    done = run(stand_in(tmp_path, "0.33.0"), FLASHQSA_VLLM="1")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.rstrip().endswith("UnsupportedVllmError: vllm: wanted 0.32.*; got 0.33.0")


@pytest.mark.parametrize("before", ["", f"import {MODELS}.model"], ids=["later", "earlier"])
def test_classes_with_other_arguments_are_refused_by_name(tmp_path: Path, before: str) -> None:
    done = run(stand_in(tmp_path, "0.32.0", GatedResidual="config, prefix"), before=before)
    assert done.returncode == 1
    wanted = f"{MODELS}.model.GatedResidual: wanted the arguments of vLLM 0.32.*; got ['config', 'prefix']"
    assert wanted in done.stderr


def test_every_class_has_its_file_and_its_arguments() -> None:
    """What `REPLACED` names is there to be imported, once vLLM is."""
    for classes in REPLACED.values():
        for kind, path in classes.items():
            module, _, name = path.partition(":")
            assert module.startswith(f"{OURS}.")
            tree = ast.parse(ROOT.joinpath(*module.split(".")).with_suffix(".py").read_text("utf-8"))
            wanted = ast.parse(f"class {name}:\n    def __init__(self, {ARGUMENTS[kind]}): ...")
            found, named = (arguments_of_class(file, name) for file in (tree, wanted))
            assert found == named


def arguments_of_class(tree: ast.Module, name: str) -> str:
    """The names of a class's arguments, with `*` where those by name begin."""
    kind = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    init = next(node for node in kind.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    return " ".join([*(a.arg for a in init.args.args), "*", *(a.arg for a in init.args.kwonlyargs)])


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
