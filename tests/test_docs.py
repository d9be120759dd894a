"""The documents say what is there: generated pages, examples, links, and every path, command and variable they name."""

from __future__ import annotations

import ast
import doctest
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer.core

import flashqsa
from flashqsa import knobs
from flashqsa.__main__ import app
from flashqsa.attend_shape import HopperTile
from flashqsa.device import KNOWN_DEVICES
from flashqsa.route import CANDIDATES, MOST_SPLIT_ROWS
from flashqsa.values import MAX_TOKENS, MAX_TOP_BLOCKS, QsaSpec

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PAGE_NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]
EXAMPLES = sorted(path for path in (ROOT / "flashqsa").rglob("*.py") if ">>> " in path.read_text("utf-8"))
REQUIRED = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/NUMERICS.md",
    "docs/KNOBS.md",
    "docs/DEBUGGING.md",
    "docs/FACTS.md",
    "docs/ADDING_A_ROUTE.md",
    "docs/ROUTES.md",
    "docs/BENCH.md",
    "docs/AB.md",
    "docs/TRANSFORMERS.md",
    "docs/VLLM.md",
    "docs/kernels/select.md",
    "docs/kernels/attend.md",
]
FOLDERS = ("flashqsa/", "tests/", "docs/", "benchmarks/", ".ci/")


def code_of(text: str) -> list[str]:
    """The pieces of a page that are set as code: spans in backquotes, and the lines of fenced and indented blocks."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, flags=re.M | re.S)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [*re.findall(r"`([^`\n]+)`", prose), *lines, *re.findall(r"^ {4}(.+)$", prose, flags=re.M)]


def missing_paths(code: list[str]) -> list[str]:
    """Paths into the checkout that do not exist; a pattern or a placeholder (`<stage>`, `*`) is not a path."""
    words = [word.strip("\"'()[],;:") for piece in code for word in piece.split()]
    paths = [word.partition("::")[0] for word in words if word.startswith(FOLDERS) and not re.search(r"[<>*{}$]", word)]
    return [path for path in paths if not (ROOT / path).exists()]


def commands(code: list[str], program: str) -> Iterator[list[str]]:
    """Argument lists of a program's calls, with or without variables set before it; a comment or a pipe ends one."""
    for piece in code:
        for call in re.findall(rf"(?:^|[$;&|] ?)(?:\w+=\S+ )*{program}(?: ([^#;&|>]*)|$)", piece):
            yield call.split()


def unknown_targets(code: list[str], makefile: str) -> list[str]:
    """Targets of `make` that the Makefile lacks."""
    targets = set(re.findall(r"^([\w-]+):(?!=)", makefile, flags=re.M))
    named = [word for call in commands(code, "make") for word in call if "=" not in word and not word.startswith("-")]
    return [target for target in named if target not in targets]


def unknown_commands(code: list[str]) -> list[str]:
    """Commands of `flashqsa`, and options of them, that its command line lacks."""
    known = typer.main.get_command(app)
    assert isinstance(known, typer.core.TyperGroup)
    found = []
    for words in [*commands(code, "flashqsa"), *commands(code, r"\S*python[\d.]* -m flashqsa")]:
        command: Any = known
        while isinstance(command, typer.core.TyperGroup) and words and not words[0].startswith("-"):
            name, *words = words
            command = command.commands.get(name)
            found += [name] if command is None else []
        options = {option for p in command.params for option in (*p.opts, *p.secondary_opts)} if command else set()
        named = [word.partition("=")[0] for word in words if word.startswith("-")]
        found += [] if command is None else [option for option in named if option not in {*options, "--help"}]
    return found


def unknown_names(text: str) -> list[str]:
    """Names that a page's Python takes from the package and that are not there. Raises SyntaxError, ImportError."""
    found = []
    for block in re.findall(r"^```python\n(.*?)^```", text, flags=re.M | re.S):
        for node in ast.walk(ast.parse("" if block.startswith(">>>") else block)):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    importlib.import_module(alias.name)
                continue
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flashqsa"):
                home, names = importlib.import_module(node.module or ""), [alias.name for alias in node.names]
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "flashqsa":
                home, names = flashqsa, [node.attr]
            else:
                continue
            found += [name for name in names if not (hasattr(home, name) or is_module(home, name))]
    return found


def is_module(home: ModuleType, name: str) -> bool:
    """Whether a package has a module of that name, which nobody may have imported yet."""
    return hasattr(home, "__path__") and find_spec(f"{home.__name__}.{name}") is not None


def unknown_knobs(text: str) -> set[str]:
    """FLASHQSA_* variables that knobs.py lacks."""
    return set(re.findall(r"\bFLASHQSA_[A-Z_]+[A-Z]\b", text)) - {knob.name for knob in knobs.KNOBS}


def broken_links(text: str, folder: Path) -> list[str]:
    """Relative links that lead to no file, or to no heading of it."""
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        there = (folder / target).exists()
        if there and anchor:
            there = anchor in headings((folder / target).read_text("utf-8") if target else text)
        found += [] if there else [link]
    return found


def headings(text: str) -> set[str]:
    """The anchors that a Markdown page gives its headings."""
    titles = re.findall(r"^#+ +(.+?) *$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", REQUIRED)
def test_the_page_is_there(name: str) -> None:
    assert (ROOT / name).is_file()


def test_the_knobs_page_is_the_one_that_make_docs_writes() -> None:
    page = (ROOT / "docs/KNOBS.md").read_text("utf-8")
    assert page == page.partition("| variable")[0] + knobs.as_markdown()


def tried(path: Path) -> doctest.TestResults:
    """Failed and attempted examples of a module's docstrings."""
    return doctest.testmod(importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts)))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_in_docstrings_run(path: Path) -> None:
    assert tried(path).failed == 0


@pytest.mark.parametrize("stem", ["values", "route", "plan", "check", "device"])
def test_the_values_carry_examples(stem: str) -> None:
    assert tried(ROOT / f"flashqsa/{stem}.py").attempted > 0


@pytest.mark.parametrize("page", PAGES, ids=PAGE_NAMES)
def test_examples_in_pages_run(page: Path) -> None:
    assert doctest.testfile(str(page), module_relative=False, encoding="utf-8").failed == 0


def test_the_readme_example_runs() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text("utf-8"), flags=re.M | re.S)
    whole = [block for block in blocks if "import" in block and "..." not in block]
    assert whole
    for block in whole:
        subprocess.run([sys.executable, "-c", block], cwd=ROOT, check=True, capture_output=True)


@pytest.mark.parametrize("page", PAGES, ids=PAGE_NAMES)
def test_what_a_page_names_is_there(page: Path) -> None:
    text = page.read_text("utf-8")
    code = code_of(text)
    assert missing_paths(code) == []
    assert unknown_targets(code, (ROOT / "Makefile").read_text("utf-8")) == []
    assert unknown_commands(code) == []
    assert unknown_names(text) == []
    assert unknown_knobs(text) == set()
    assert broken_links(text, page.parent) == []


def test_code_names_no_unknown_knob_and_no_missing_page() -> None:
    texts = {str(path): path.read_text("utf-8") for path in [*(ROOT / "flashqsa").rglob("*.py"), ROOT / "Makefile"]}
    assert {name: found for name, text in texts.items() if (found := unknown_knobs(text))} == {}
    pages = {(name, page) for name, text in texts.items() for page in re.findall(r"\bdocs/[\w/]+\.\w+", text)}
    assert {(name, page) for name, page in pages if not (ROOT / page).exists()} == set()


def test_the_checks_find_what_is_wrong() -> None:
    page = (
        "    make tset\n\n`flashqsa dance`, `flashqsa ab jump`, see `docs/NOWHERE.md`,"
        " [this](NOWHERE.md) and [here](#no-such-heading).\n"
        "```bash\nFLASHQSA_NO_SUCH=1 python -m flashqsa run --no-such-option 3  # a comment\n```\n"
        "```python\nfrom flashqsa.route import no_such\nflashqsa.nor_this(1)\n```\n"
    )
    code = code_of(page)
    assert unknown_targets(code, "test:\n\tx") == ["tset"]
    assert unknown_commands(code) == ["dance", "jump", "--no-such-option"]
    assert missing_paths(code) == ["docs/NOWHERE.md"]
    assert broken_links(page, ROOT) == ["NOWHERE.md", "#no-such-heading"]
    assert unknown_names(page) == ["no_such", "nor_this"]
    assert unknown_knobs(page) == {"FLASHQSA_NO_SUCH"}


def test_the_checks_let_through_what_is_there() -> None:
    page = (
        "# Two words\n\n    make test    # a comment\n\n"
        "`docs/KNOBS.md`, `docs/kernels/<stage>.md`, `flashqsa doctor --help`, `flashqsa ab run --out x`,"
        " `FLASHQSA_ROUTE`, [self](#two-words), [page](docs/KNOBS.md#knobs), [site](https://example.org/x)\n"
    )
    code = code_of(page)
    assert unknown_targets(code, "test: lint\n\tx") == []
    assert unknown_commands(code) == missing_paths(code) == broken_links(page, ROOT) == []
    assert unknown_knobs(page) == set()


ROUTE_LINES = ("Formats", "Taken", "Refused", "Evidence", "Not verified")


def test_the_routes_page_says_what_is_to_be_known_of_every_candidate() -> None:
    page = (ROOT / "docs" / "ROUTES.md").read_text("utf-8")
    sections = {part.partition("\n")[0]: part for part in page.split("\n### ")[1:]}
    routes = [str(c.route) for candidates in CANDIDATES.values() for c in candidates if c.route.mode != "reference"]
    assert list(sections) == [*routes, "reference"]
    for name, text in sections.items():
        assert [line.partition(":")[0][2:] for line in text.splitlines() if line.startswith("- ")] == list(
            ROUTE_LINES
        ), name
        evidence = text.partition("- Evidence:")[2].partition("- Not verified:")[0]
        assert {"interpreted", "compiled", "run", "timed"} & set(re.findall(r"[a-z]+", evidence)), name
        kernel_set = name.partition(":")[0]
        sets = {facts.arch for facts in KNOWN_DEVICES.values() if kernel_set in facts.kernel_sets}
        if kernel_set == "sm90":
            assert sets == {"sm_90"}
        assert sets, name


def test_the_routes_page_names_the_limits_that_routes_have() -> None:
    page = (ROOT / "docs" / "ROUTES.md").read_text("utf-8")
    assert f"up to {MOST_SPLIT_ROWS} rows per request" in page
    assert f"heads of {HopperTile.HEAD_DIM}, blocks of {HopperTile.BLOCK_TOKENS} tokens" in page
    for limit in (MAX_TOP_BLOCKS, MAX_TOKENS // QsaSpec().block_tokens):
        assert f"{limit:,}" in page
