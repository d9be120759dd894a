"""The walls of the package, read from its source: who may import whom, and what may stand where.

A wall is a function from a file to its breaches. Each runs over every file, and over planted breaches it must find.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

import flashqsa

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 600
TEXT_SUFFIXES = {"", ".py", ".cu", ".cuh", ".json", ".md", ".toml", ".txt"}


def files(*tops: str) -> list[str]:
    """Paths of the text files under some folders (or of single files), from the top of the checkout."""
    found = [path for top in tops for path in [ROOT / top, *(ROOT / top).rglob("*")] if path.is_file()]
    kept = [path for path in found if path.suffix in TEXT_SUFFIXES and "__pycache__" not in path.parts]
    return sorted(path.relative_to(ROOT).as_posix() for path in kept)


MODULES = [path for path in files("flashqsa") if path.endswith(".py")]
TESTS = [path for path in files("tests") if path.endswith(".py")]
TEXTS = files("flashqsa", "tests", "docs", "benchmarks", ".ci", *(p.name for p in ROOT.iterdir() if p.is_file()))


@cache
def tree_of(path: str) -> ast.Module:
    """The parsed file."""
    return ast.parse((ROOT / path).read_text("utf-8"))


PUBLIC = {"__init__", "check", "device", "knobs", "machine", "merge", "pipeline", "plan", "route", "support", "values"}
MAY_IMPORT = {
    "values": set(),
    "device": set(),
    "knobs": set(),
    "tables": set(),
    "config": {"device", "tables", "values"},
    "attend_shape": {"device", "tables", "values"},
    "product_shape": {"config", "device", "tables", "values"},
    "score_split": {"config", "tables", "values"},
    "select_shape": {"device", "values"},
    "machine": {"device", "kernels.nvrtc"},
    "growing": {"kernels.nvrtc", "knobs", "machine"},
    "route": {"attend_shape", "config", "device", "product_shape", "select_shape", "values"},
    "plan": {
        *("attend_shape", "config", "device", "knobs", "machine", "product_shape", "route", "score_split"),
        *("select_shape", "values"),
    },
    "check": {"device", "knobs", "plan", "route", "values"},
    "support": {"check", "device", "machine", "route", "values"},
    "reference": {"values"},
    "kernels": {"attend_shape", "config", "kernels.nvrtc", "plan", "product_shape", "score_split", "values"},
    "kernels.nvrtc": {"attend_shape", "config", "knobs", "values"},
    "kernels.sm90": {"attend_shape", "config", "kernels.nvrtc", "kernels.smxx", "plan", "select_shape", "values"},
    "capture": PUBLIC,
    "pipeline": PUBLIC - {"__init__"} | {"attend_shape", "capture", "kernels", "reference", "select_shape"},
    "merge": {"check", "machine", "pipeline", "reference", "values"},
    "ops": {"pipeline", "values"},
    "testing": {"device", "pipeline", "plan", "reference", "route", "values"},
    "integrations": PUBLIC | {"growing", "ops"},
    "cli": PUBLIC | {"capture", "growing", "integrations", "testing"},
    "__init__": PUBLIC,
    "__main__": {"__init__", "cli"},
}
"""Each room, and the other rooms its files may import. A kernel set is a room of its own, under the rule `kernels`
unless it has one. `kernels.nvrtc` has: it compiles on the user's machine, and `knobs` says with what and where to."""

HEAVY = {
    "httpx": ("flashqsa/cli/",),
    "httpx_sse": ("flashqsa/cli/",),
    "matplotlib": ("flashqsa/cli/",),
    "prometheus_client": ("flashqsa/cli/",),
    "psutil": ("flashqsa/cli/",),
    "pydantic": ("flashqsa/cli/",),
    "rich": ("flashqsa/cli/", "flashqsa/__main__.py"),
    "tomlkit": ("flashqsa/cli/",),
    "transformers": ("flashqsa/cli/", "flashqsa/integrations/"),
    "triton": ("flashqsa/kernels/smxx/",),
    "typer": ("flashqsa/cli/", "flashqsa/__main__.py"),
    "vllm": ("flashqsa/integrations/vllm/",),
}
"""Packages that not every caller has or wants, and the places that may import them."""


def room_of(module: str) -> str:
    """The room of a dotted name: `flashqsa.kernels.cpu.score` is in `kernels.cpu`, `flashqsa` itself in `__init__`."""
    parts = module.split(".")[1:]
    return ".".join(parts[: 2 if parts[:1] == ["kernels"] else 1]) or "__init__"


def nodes(tree: ast.Module) -> Iterator[ast.stmt | ast.expr | ast.ExceptHandler]:
    """Every node that has a line."""
    yield from (node for node in ast.walk(tree) if isinstance(node, (ast.stmt, ast.expr, ast.ExceptHandler)))


def imported(path: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every import of a file, also inside functions, also by `import_module`."""
    parts = path.removesuffix(".py").split("/")
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*(parts[: -node.level] if node.level else []), *(node.module or "").split(".")]
            for alias in node.names:
                found = [part for part in [*base, alias.name] if part]
                # `from flashqsa import check` imports a module, `from flashqsa.check import InputError` a name in one.
                inner = {"/".join(found) + ".py", "/".join(found) + "/__init__.py"} & set(MODULES)
                yield node.lineno, ".".join(found if inner else found[:-1])
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from ((node.lineno, str(name.value)) for name in node.args[:1] if isinstance(name, ast.Constant))


def imports(path: str, tree: ast.Module) -> Iterator[str]:
    """Imports that cross a wall of `MAY_IMPORT` or `HEAVY`."""
    own = room_of(path.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    allowed = MAY_IMPORT[own if own in MAY_IMPORT else own.partition(".")[0]]
    for line, name in imported(path, tree):
        top, room = name.partition(".")[0], room_of(name)
        if top == "flashqsa" and not {room, room.partition(".")[0] if own == "pipeline" else room} & {own, *allowed}:
            yield f"{line}: {own} imports {room}"
        if top in HEAVY and not path.startswith(HEAVY[top]):
            yield f"{line}: {top} is imported outside {', '.join(HEAVY[top])}"


def plan_types(path: str, tree: ast.Module) -> Iterator[str]:
    """Kernels that take more of `plan` than the types of plans."""
    for node in nodes(tree) if path.startswith("flashqsa/kernels/") else ():
        taken = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        if isinstance(node, ast.ImportFrom) and node.module == "flashqsa.plan":
            yield from (f"{node.lineno}: takes plan.{name}" for name in taken if not name.endswith("Plan"))
        elif "flashqsa.plan" in taken or (isinstance(node, ast.ImportFrom) and "plan" in taken):
            yield f"{node.lineno}: takes all of plan"


def only_in(home: str, *words: str) -> Callable[[str, ast.Module], Iterator[str]]:
    """A wall that keeps some names, read or imported, in one file."""

    def wall(path: str, tree: ast.Module) -> Iterator[str]:
        for node in nodes(tree) if path != home else ():
            found = [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
            found += [node.attr] if isinstance(node, ast.Attribute) else []
            yield from (f"{node.lineno}: {name} belongs in {home}" for name in found if name in words)

    return wall


def refusals(path: str, tree: ast.Module) -> Iterator[str]:
    """`InputError` made or raised outside check.py."""
    for node in nodes(tree) if path != "flashqsa/check.py" else ():
        made = node.func if isinstance(node, ast.Call) else node.exc if isinstance(node, ast.Raise) else None
        if made is not None and ast.unparse(made).split(".")[-1] == "InputError":
            yield f"{node.lineno}: InputError is made outside check.py"


def broad_except(path: str, tree: ast.Module) -> Iterator[str]:
    """Handlers of everything, outside the doctor's probes."""
    for node in nodes(tree) if path != "flashqsa/cli/doctor.py" else ():
        caught: list[ast.expr | None] = [node.type] if isinstance(node, ast.ExceptHandler) else []
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
            caught += node.args
        if any(kind is None or re.search(r"\b(Base)?Exception\b", ast.unparse(kind)) for kind in caught):
            yield f"{node.lineno}: catches everything"


def docstring(path: str, tree: ast.Module) -> Iterator[str]:
    """A module without a docstring."""
    if not ast.get_docstring(tree):
        yield f"1: {path} has no docstring"


environment = only_in("flashqsa/knobs.py", "environ", "environb", "getenv", "putenv")
properties = only_in("flashqsa/device.py", "get_device_properties", "get_device_capability", "get_device_name")
# Facts without what the machine lacks lead to a route whose kernels cannot be made; `facts_here` is for everyone else.
facts = only_in("flashqsa/machine.py", "facts_of")
WALLS = [imports, plan_types, environment, properties, facts, refusals, broad_except, docstring]
WALL_NAMES = ["imports", "plan_types", "environment", "properties", "facts", "refusals", "broad_except", "docstring"]


@pytest.mark.parametrize("wall", WALLS, ids=WALL_NAMES)
def test_the_package_keeps_the_wall(wall: Callable[[str, ast.Module], Iterator[str]]) -> None:
    assert [f"{path}:{breach}" for path in MODULES for breach in wall(path, tree_of(path))] == []


@pytest.mark.parametrize(
    ("wall", "path", "source"),
    [
        (imports, "values", "from flashqsa import knobs"),
        (imports, "values", "from . import knobs"),
        (imports, "values", "import flashqsa"),
        (imports, "device", "def late():\n    import flashqsa.values"),
        (imports, "knobs", "from importlib import import_module\nimport_module('flashqsa.route')"),
        (imports, "reference/score", "from flashqsa.check import InputError"),
        (imports, "reference/score", "from ..kernels import cpu"),
        (imports, "kernels/cpu/score", "from flashqsa import pipeline"),
        (imports, "kernels/cpu/score", "def late():\n    from flashqsa.route import Call"),
        (imports, "kernels/cpu/score", "from flashqsa.reference import sparse_attention"),
        (imports, "kernels/smxx/score", "from flashqsa.kernels.cpu import score"),
        (imports, "kernels/smxx/score", "from flashqsa import knobs"),
        (imports, "kernels/nvrtc/topk", "from flashqsa.kernels.smxx import score"),
        (imports, "check", "from flashqsa.pipeline import plan_batch"),
        (imports, "testing/cases", "from flashqsa.kernels import cpu"),
        (imports, "cli/run", "from flashqsa.reference import select_blocks"),
        (imports, "integrations/transformers", "from flashqsa.kernels.cpu import attend"),
        (imports, "values", "def late():\n    import triton.language as tl"),
        (imports, "kernels/cpu/score", "import triton"),
        (imports, "pipeline", "from transformers import AutoConfig"),
        (plan_types, "kernels/cpu/score", "from flashqsa.plan import make_plan"),
        (plan_types, "kernels/cpu/score", "from flashqsa import plan"),
        (plan_types, "kernels/cpu/score", "import flashqsa.plan"),
        (environment, "route", "import os\nx = os.environ.get('A')"),
        (environment, "route", "from os import getenv"),
        (environment, "cli/run", "import os\nx = os.getenv('A')"),
        (properties, "route", "import torch\nx = torch.cuda.get_device_properties(0)"),
        (properties, "cli/doctor", "from torch.cuda import get_device_capability"),
        (imports, "machine", "from flashqsa.kernels.sm7x import attend"),
        (facts, "pipeline", "from flashqsa.device import DeviceFacts, facts_of"),
        (refusals, "pipeline", "raise InputError('q', 'a', 'b')"),
        (refusals, "cli/run", "error = check.InputError('q', 'a', 'b')"),
        (refusals, "cli/run", "raise check.InputError"),
        (broad_except, "pipeline", "try:\n    x = 1\nexcept:\n    x = 2"),
        (broad_except, "pipeline", "try:\n    x = 1\nexcept (ValueError, Exception) as error:\n    raise"),
        (broad_except, "cli/run", "import builtins\ntry:\n    x = 1\nexcept builtins.BaseException:\n    x = 2"),
        (broad_except, "cli/run", "import contextlib\nwith contextlib.suppress(Exception):\n    x = 1"),
        (docstring, "route", "x = 1"),
    ],
)
def test_a_wall_finds_a_planted_breach(
    wall: Callable[[str, ast.Module], Iterator[str]], path: str, source: str
) -> None:
    assert len(list(wall(f"flashqsa/{path}.py", ast.parse(source)))) == 1


@pytest.mark.parametrize(
    ("wall", "path", "source"),
    [
        (imports, "pipeline", "from flashqsa.kernels import cpu"),
        (imports, "kernels/sm7x/attend", "from flashqsa.kernels.nvrtc import launch\nfrom . import merge"),
        (imports, "kernels/smxx/score", "import triton"),
        (imports, "kernels/nvrtc/compiler", "from flashqsa import knobs"),
        (imports, "cli/run", "import typer\nfrom flashqsa import QsaSpec, route"),
        (imports, "route", "import triton_kernels, flashqsaother"),
        (plan_types, "kernels/cpu/score", "from flashqsa.plan import AttendPlan"),
        (environment, "knobs", "import os\nx = os.environ.get('A')"),
        (properties, "device", "x = torch.cuda.get_device_properties(0)"),
        (facts, "machine", "from flashqsa.device import facts_of"),
        (refusals, "check", "raise InputError('q', 'a', 'b')"),
        (refusals, "cli/run", "try:\n    x = 1\nexcept InputError:\n    raise"),
        (broad_except, "cli/doctor", "try:\n    x = 1\nexcept Exception:\n    x = 2"),
        (broad_except, "cli/run", "try:\n    x = 1\nexcept (OSError, ValueError):\n    x = 2"),
    ],
)
def test_a_wall_lets_through_what_is_allowed(
    wall: Callable[[str, ast.Module], Iterator[str]], path: str, source: str
) -> None:
    assert list(wall(f"flashqsa/{path}.py", ast.parse(source))) == []


def test_every_room_has_its_line_in_the_table() -> None:
    rooms = {room_of(path.removesuffix(".py").replace("/", ".")) for path in MODULES}
    assert {"kernels" if room.startswith("kernels") else room for room in rooms} <= set(MAY_IMPORT)


def too_long(path: str, text: str) -> Iterator[str]:
    """Source files that want to be two."""
    if path.endswith((".py", ".cu", ".cuh")) and text.count("\n") >= MAX_LINES:
        yield f"{text.count(chr(10))} lines"


def leftovers(path: str, text: str) -> Iterator[str]:
    """Marks of unfinished work, and pointers into a tracker that readers do not have."""
    yield from re.findall(r"\b(?:T[O]DO|FIXM[E]|XX[X]|HAC[K])\b|\b(?:[Ii]ssue|[Tt]icket|PR) #?\d+", text)


def machine_paths(path: str, text: str) -> Iterator[str]:
    """Paths that exist on one person's machine only."""
    yield from re.findall(r"(?<![\w.~])/(?:root|home|Users|work|scratch)/|\b[A-Z]:\\Users\\", text)
    yield from (here for here in {f"{ROOT}/", f"{Path.home()}/"} - {"//"} if here in text)


@pytest.mark.parametrize("wall", [too_long, leftovers, machine_paths])
def test_every_text_keeps_the_wall(wall: Callable[[str, str], Iterator[str]]) -> None:
    texts = {path: (ROOT / path).read_text("utf-8") for path in TEXTS}
    assert {path: found for path, text in texts.items() if (found := list(wall(path, text)))} == {}


@pytest.mark.parametrize(
    ("wall", "text"),
    [
        (too_long, "x = 1\n" * MAX_LINES),
        (leftovers, "# todo: later".upper()),
        (leftovers, f"see issue {12}"),
        (machine_paths, "/".join(["cd ", "root", "file"])),
        (machine_paths, str(ROOT / "README.md")),
    ],
)
def test_a_text_wall_finds_a_planted_breach(wall: Callable[[str, str], Iterator[str]], text: str) -> None:
    assert list(wall("flashqsa/planted.py", text))


def test_there_are_files_to_check() -> None:
    assert {"flashqsa/values.py", "flashqsa/kernels/__init__.py", "flashqsa/tables/cpu.py"} <= set(MODULES)
    assert {"Makefile", "LICENSE", ".ci/run", "pyproject.toml", "docs/KNOBS.md", "tests/test_lint.py"} <= set(TEXTS)


@pytest.mark.parametrize("path", TESTS)
def test_test_files_say_what_they_test(path: str) -> None:
    assert path == "tests/__init__.py" or ast.get_docstring(tree_of(path))


def loaded_by(source: str) -> set[str]:
    """Modules that a piece of Python loads in a fresh process, and `cuda` where it initialised CUDA."""
    report = (
        "import json, sys\nbefore = set(sys.modules)\n{}\nloaded = set(sys.modules) - before\n"
        "loaded |= {{'cuda'}} if 'torch' in sys.modules and sys.modules['torch'].cuda.is_initialized() else set()\n"
        "print(json.dumps(sorted(loaded)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", report.format(source)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(json.loads(done.stdout))


def test_importing_the_package_loads_nothing_else() -> None:
    loaded = loaded_by("import flashqsa")
    assert "flashqsa" in loaded
    assert not {name for name in loaded if name.startswith(("flashqsa.", "torch", "numpy"))}


def test_the_public_names_load_nothing_heavy_and_leave_the_gpu_alone() -> None:
    loaded = loaded_by("import torch\nbefore = set(sys.modules)\nfrom flashqsa import *")
    assert "flashqsa.pipeline" in loaded
    assert not {name for name in loaded if name.partition(".")[0] in {*HEAVY, "cuda"}}


def test_the_loading_test_sees_what_is_loaded() -> None:
    assert {"flashqsa.knobs", "wave"} <= loaded_by("import flashqsa.knobs, wave")


@pytest.mark.parametrize("name", flashqsa.__all__)
def test_public_names_resolve_and_say_what_they_are(name: str) -> None:
    found = getattr(flashqsa, name)
    assert name == "__version__" or (found.__doc__ and found.__name__ == name)
