"""What every command shares: where text goes, tables, JSON, log lines, and errors in one line."""

from __future__ import annotations

import contextlib
import json
import logging
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.logging import RichHandler
from rich.table import Table
from rich.text import Text

from flashqsa import __version__
from flashqsa.cli.process import let_threads_sleep

PIPE_WIDTH = 140
"""Columns of a table that is not shown on a terminal."""

OK, FAILED, BAD_INPUT = 0, 1, 2
"""Exit codes: done and right; done and something does not hold; the command could not be carried out as asked."""


class UserError(Exception):
    """Something the user can put right; its text is one line."""


@dataclass(frozen=True)
class Screen:
    """Where a command writes: results, and what goes on meanwhile (progress, log lines, errors)."""

    results: Console
    progress: Console

    @staticmethod
    def for_json(target: str | None) -> Screen:
        """Where JSON is written to `-`, standard output is the JSON's and everything else goes to standard error."""
        return Screen(_console(stderr=target == "-"), _console(stderr=True))

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """A table of plain text; columns whose every entry is a number stand to the right."""
        table = Table(header_style="bold")
        for index, column in enumerate(columns):
            numeric = bool(rows) and all(_is_number(row[index]) for row in rows)
            table.add_column(column, justify="right" if numeric else "left", overflow="fold")
        for row in rows:
            table.add_row(*(Text(str(cell)) for cell in row))
        self.results.print(Text(title, style="bold"))
        self.results.print(table)

    def line(self, text: str) -> None:
        """One line of results, as it is."""
        self.results.print(Text(text))


def _console(*, stderr: bool) -> Console:
    console = Console(stderr=stderr, highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console = Console(stderr=stderr, highlight=False, width=max(console.width, PIPE_WIDTH))
    return console


def _is_number(cell: object) -> bool:
    text = str(cell)
    return bool(text) and (text[0].isdecimal() or (text[0] in "-+" and text[1:2].isdecimal()))


def as_text(content: dict[str, Any]) -> str:
    """JSON text with a line per key; not-a-number and infinities are refused, since JSON has none."""
    return json.dumps(content, indent=2, allow_nan=False)


def write_json(target: str | None, content: dict[str, Any]) -> None:
    """Writes `content` to a file, or to standard output for `-`; nothing for None."""
    if target is None:
        return
    text = as_text(content) + "\n"
    if target == "-":
        sys.stdout.write(text)
        return
    try:
        Path(target).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--json {target}: cannot be written: {error.strerror}") from error


def check_json_target(target: str | None) -> None:
    """Refuses a JSON file that could not be written, before the work is done that it is to hold."""
    if target in (None, "-"):
        return
    path = Path(str(target))
    if path.is_dir() or not path.parent.is_dir():
        raise UserError(f"--json {target}: not a file in an existing folder")


@contextlib.contextmanager
def log_lines(screen: Screen, *, verbose: bool = False) -> Iterator[None]:
    """Shows what the package logs: route lines, and with `verbose` everything."""
    logger = logging.getLogger("flashqsa")
    handler = RichHandler(console=screen.progress, show_path=False, show_level=False, log_time_format="[%X]")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG if verbose else logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


def carried_out(json_target: str | None, work: Callable[[Screen], int]) -> int:
    """Runs a command's work and turns the errors that a user can put right into one line and an exit code."""
    let_threads_sleep()
    from flashqsa.capture import CaptureError
    from flashqsa.check import InputError
    from flashqsa.knobs import KnobError
    from flashqsa.route import NoRouteError

    screen = Screen.for_json(json_target)
    try:
        check_json_target(json_target)
        return work(screen)
    except (UserError, InputError, KnobError, CaptureError) as error:
        return report_error(screen, error)
    except NoRouteError as error:
        report_error(screen, error)
        return FAILED


def carried_out_bare(json_target: str | None, work: Callable[[Screen], int]) -> int:
    """As `carried_out`, for a command that must run where the package itself cannot be imported."""
    screen = Screen.for_json(json_target)
    try:
        check_json_target(json_target)
        return work(screen)
    except UserError as error:
        return report_error(screen, error)


def report_error(screen: Screen, error: Exception) -> int:
    """The error in one line on standard error, and its exit code."""
    line = " ".join(str(error).split())
    screen.progress.print(Text.assemble(("error: ", "bold red"), line), soft_wrap=True)
    return BAD_INPUT


def versions() -> dict[str, str]:
    """Versions that belong beside every figure."""
    import torch

    found = {"flashqsa": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
    transformers = sys.modules.get("transformers")
    if transformers is not None:
        found["transformers"] = str(transformers.__version__)
    return found


def seconds(value: float) -> str:
    """A time to three figures: `83.2 us`, `1.24 ms`, `12.5 s`."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        scaled = value * scale
        if scaled >= 1 or unit == "us":
            return f"{scaled:.{2 if scaled < 10 else 1 if scaled < 100 else 0}f} {unit}"
    raise AssertionError("the last unit takes every value")


def mebibytes(size_bytes: int) -> str:
    """A size in MiB."""
    return f"{size_bytes / 2**20:,.0f} MiB"
