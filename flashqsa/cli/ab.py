"""`flashqsa ab`: argument parsing of its commands. Their work is in the other files `ab_*`, imported when it runs."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from flashqsa.cli.show import OK, Screen, UserError, carried_out_bare

PACKAGES = ("httpx", "httpx_sse", "prometheus_client", "psutil", "pydantic", "tomlkit")

app = typer.Typer(
    help="Compare two ways of serving: boots in order, first token, decode speed, texts, and which route ran.",
    no_args_is_help=True,
)


def _carried_out(work: Callable[[Screen], int]) -> typer.Exit:
    """Runs the work where its packages are there, and turns its errors into one line."""

    def checked(screen: Screen) -> int:
        missing = [name for name in PACKAGES if find_spec(name) is None]
        if missing:
            raise UserError(f"flashqsa ab needs pip install 'flashqsa[ab]'; missing: {', '.join(missing)}")
        return work(screen)

    return typer.Exit(carried_out_bare(None, checked))


@app.command()
def init(
    file: Annotated[Path, typer.Argument(metavar="[FILE]", help="The file to write; it must not exist.")] = Path(
        "ab.toml"
    ),
) -> None:
    """Write an example that runs as it is: the stock layer against FlashQSA in Transformers' server, on the CPU."""

    def work(screen: Screen) -> int:
        from flashqsa.cli.ab_config import write_example

        write_example(file)
        screen.line(f"written: {file}; next: flashqsa ab run {file}")
        return OK

    raise _carried_out(work)


@app.command()
def run(
    file: Annotated[
        Path, typer.Argument(metavar="[FILE]", help="What to compare, as `flashqsa ab init` writes it.")
    ] = (Path("ab.toml")),
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FOLDER", help="Where to keep the run; FILE's name with -run by default."),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Also repeat boots that died in an earlier run.")] = False,
) -> None:
    """Boot the arms in order, ask each the same, and report. The same command goes on with a run that was interrupted.

    The exit code is 1 where a boot died or a request failed.
    """

    def work(screen: Screen) -> int:
        from flashqsa.cli.ab_run import run

        return run(file, out, again, screen)

    raise _carried_out(work)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A run, as `flashqsa ab run` keeps it.")],
) -> None:
    """Report an earlier run again, also one that is not over: terminal, report.md, report.json and plots."""

    def work(screen: Screen) -> int:
        from flashqsa.cli.ab_report import report_folder

        return report_folder(folder, screen)

    raise _carried_out(work)
