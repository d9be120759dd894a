"""`flashqsa ab report`: what a run found, on the terminal, as `report.md` and `report.json`, and drawn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashqsa.cli.ab_compare import Pair, Probed, conclusion, facts_found, greedy_answers, pairs, probed
from flashqsa.cli.ab_evidence import Sighting, sightings, workers
from flashqsa.cli.ab_folder import SCHEMA, BootRecord, RunFolder, now, write
from flashqsa.cli.ab_measures import CHANCE, Measure, measures
from flashqsa.cli.ab_prompts import GATES, QUESTION
from flashqsa.cli.show import FAILED, OK, Screen, UserError

RULE = (
    "A difference is called one only where it exceeds the spread between boots of the same arm: the larger of the two "
    "arms' distances between their highest and their lowest boot."
)


def rule(measures: Sequence[Measure]) -> str:
    """The rule, and how often noise alone breaks it with so many boots."""
    fewest = min((len(side.boots) for m in measures for side in (m.base, m.fix) if side.boots), default=0)
    if fewest not in CHANCE:
        return RULE
    chance = f"With {fewest} boots of each arm, noise alone does so in about {CHANCE[fewest]:.0%} of all measures"
    return f"{RULE} {chance}; more boots make it rarer."


MOST_DIFFERENCES = 12
"""Differences of texts that the terminal shows; report.md has all of them."""


@dataclass(frozen=True)
class Table:
    """A table of text, for the terminal and for Markdown alike."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]

    def markdown(self) -> str:
        """As Markdown."""
        lines = [self.columns, tuple("---" for _ in self.columns), *self.rows]
        cells = "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)
        return f"## {self.title}\n\n{cells}\n"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


@dataclass(frozen=True)
class Known:
    """Answers with facts: of each boot how many of the facts it holds.

    found  boot -> facts found; a boot that did not answer is left out
    """

    request: str
    question: str
    facts: tuple[str, ...]
    found: dict[str, int]
    answers: dict[str, str]


@dataclass(frozen=True)
class Findings:
    """Everything a run found."""

    folder: RunFolder
    records: list[BootRecord]
    measures: list[Measure]
    pairs: list[Pair]
    known: list[Known]
    probed: list[Probed]
    sightings: list[Sighting]

    @property
    def arms(self) -> list[str]:
        """The arms, the first to compare with."""
        return list(self.folder.config.arms)

    @property
    def complete(self) -> bool:
        """Whether every boot is over and done, and every request was answered."""
        wanted = len(self.folder.config.boots())
        return len(self.records) == wanted and all(record.done and not record.errors for record in self.records)

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        head = self.folder.head
        return {
            "schema": SCHEMA,
            "complete": self.complete,
            "started": head.started,
            "reported": now(),
            "versions": head.versions,
            "characters_per_token": head.characters_per_token,
            "config": head.config,
            "boots": [_boot_json(record) for record in self.records],
            "measures": [measure.as_json() for measure in self.measures],
            "texts": {"conclusion": conclusion(self.pairs), "pairs": [pair.as_json() for pair in self.pairs]},
            "facts": [{"request": k.request, "of": len(k.facts), "found": k.found} for k in self.known],
            "probe": [found.as_json() for found in self.probed],
            "workers": workers(self.sightings),
            "evidence": [sighting.as_json() for sighting in self.sightings],
        }


def _boot_json(record: BootRecord) -> dict[str, Any]:
    return {
        "boot": str(record.boot),
        "arm": record.boot.arm,
        "counted": record.boot.counted,
        "status": record.status,
        "reason": record.reason,
        "log_end": record.log_end,
        "started": record.started,
        "ready_s": record.ready_s,
        "stopped": record.stopped,
        "requests": len(record.answers),
        "errors": [{"request": answer.name, "error": answer.error} for answer in record.errors],
        "requests_s": record.wall_s,
    }


def findings(folder: RunFolder) -> Findings:
    """Everything of a folder. Raises UserError."""
    records = folder.records()
    if not records:
        raise UserError(f"{folder.path}: no boot is over yet")
    return Findings(
        folder,
        records,
        measures(records, list(folder.config.arms)),
        pairs(records),
        known(folder, records),
        probed(folder.config, folder.prompts().probe, records),
        sightings(folder, [record.boot for record in records]),
    )


def known(folder: RunFolder, records: Sequence[BootRecord]) -> list[Known]:
    """Long prompts and questions, with what each boot's answer knows."""
    asked, found = folder.prompts(), []
    for name, facts in asked.facts.items():
        answers = {str(r.boot): a for r in records if (a := greedy_answers(r).get(name)) is not None}
        held = {boot: facts_found(facts, answer.text) for boot, answer in answers.items()}
        question = f"the numbers of the gates ({', '.join(GATES)})"
        if name.startswith(QUESTION):
            question = asked.prompts.get(name, "")
        texts = {boot: answer.text for boot, answer in answers.items()}
        found.append(Known(name, question, tuple(facts), held, texts))
    return found


def report(folder: RunFolder, screen: Screen) -> int:
    """Shows and writes; the exit code is FAILED where a boot or a request failed or is missing. Raises UserError."""
    found = findings(folder)
    for table in tables(found):
        screen.table(table.title, table.columns, table.rows[:MOST_DIFFERENCES] if table.title == PARTS else table.rows)
    for record in found.records:
        if not record.done:
            screen.line(f"{record.boot} died: {record.reason}\n{record.log_end}")
    screen.line(conclusion(found.pairs))
    screen.line(rule(found.measures))
    path = folder.path
    plots = draw(found, screen)
    write(path / "report.json", found.as_json())
    try:
        (path / "report.md").write_text(markdown(found, plots), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path / 'report.md'}: cannot be written: {error.strerror or error}") from error
    screen.line(f"written: {path / 'report.md'}, report.json{''.join(f', {plot}' for plot in plots)}")
    return OK if found.complete else FAILED


def draw(found: Findings, screen: Screen) -> list[str]:
    """Names of the plots that were drawn; none without matplotlib, which is said."""
    try:
        from flashqsa.cli.ab_plots import draw_measures
    except ImportError:
        screen.line("no plots: they need matplotlib (pip install 'flashqsa[plot]')")
        return []
    return draw_measures(found.measures, found.folder.path)


PARTS = "where greedy texts part"


def number(value: float | None) -> str:
    """A figure to four digits.

    >>> number(1234.5), number(0.012344), number(None)
    ('1,234', '0.01234', '-')
    """
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def percent(value: float | None) -> str:
    """A signed share."""
    return "-" if value is None else f"{value:+.1%}"


def tables(found: Findings) -> Iterator[Table]:
    """Every table that has rows."""
    base, fix = found.arms
    every = [
        Table("boots", ("boot", "status", "ready, s", "requests", "failed", "requests, s", "end"), _boot_rows(found)),
        Table(
            f"{fix} against {base}",
            ("measure", "of", "unit", base, fix, "difference", "spread", "verdict"),
            [_measure_row(measure) for measure in found.measures],
        ),
        Table("greedy texts that are the same, word by word", ("boot", *_told(found)), _matrix(found)),
        Table(
            PARTS,
            ("request", "boots", "word", "of", "one", "other"),
            [
                (d.request, " / ".join(d.boots), str(d.word), " / ".join(map(str, d.words)), d.first, d.second)
                for pair in found.pairs
                for d in pair.differences
            ],
        ),
        Table(
            "facts in answers",
            ("request", "facts", *(str(record.boot) for record in found.records)),
            [
                (k.request, str(len(k.facts)), *(str(k.found.get(str(r.boot), "-")) for r in found.records))
                for k in found.known
            ],
        ),
        Table(
            "draws that invent something their prompt lacks",
            ("arm", "draws", "distinct", "invent", "95 %"),
            _probe_rows(found),
        ),
        Table(
            "found in logs",
            ("what", *(str(record.boot) for record in found.records)),
            [
                (
                    s.label,
                    *(
                        s.in_boot(str(r.boot), workers(found.sightings)) if found.folder.log(r.boot).is_file() else "-"
                        for r in found.records
                    ),
                )
                for s in found.sightings
            ],
        ),
        Table(
            "requests that failed",
            ("boot", "request", "error"),
            [(str(r.boot), answer.name, str(answer.error)) for r in found.records for answer in r.errors],
        ),
    ]
    return (table for table in every if table.rows)


def _boot_rows(found: Findings) -> list[tuple[str, ...]]:
    rows = []
    for record in found.records:
        counted = "" if record.boot.counted else ", not counted"
        cells = (number(record.ready_s), str(len(record.answers)), str(len(record.errors)), number(record.wall_s))
        rows.append((str(record.boot), record.status + counted, *cells, record.stopped))
    over = {record.boot for record in found.records}
    return [*rows, *((str(boot), "not over", *"-----") for boot in found.folder.config.boots() if boot not in over)]


def _measure_row(measure: Measure) -> tuple[str, ...]:
    return (
        measure.name,
        measure.group,
        measure.unit,
        number(measure.base.mean),
        number(measure.fix.mean),
        percent(measure.relative),
        "-" if measure.relative_spread is None else f"{measure.relative_spread:.1%}",
        measure.verdict,
    )


def _told(found: Findings) -> list[str]:
    return list(dict.fromkeys(boot for pair in found.pairs for boot in pair.boots))


def _matrix(found: Findings) -> list[tuple[str, ...]]:
    cells = {pair.boots: f"{pair.same} of {pair.compared}" for pair in found.pairs}
    told = _told(found)

    def cell(one: str, other: str) -> str:
        return "" if one == other else cells.get((one, other)) or cells[other, one]

    return [(one, *(cell(one, other) for other in told)) for one in told]


def _probe_rows(found: Findings) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for side in found.probed:
        low, high = side.interval
        if side.draws:
            counts = (str(side.draws), str(side.distinct), str(side.inventing))
            rows.append((side.arm, *counts, f"{low:.0%} to {high:.0%}"))
    return rows


def markdown(found: Findings, plots: Sequence[str]) -> str:
    """`report.md`."""
    head = found.folder.head
    base, fix = found.arms
    arms = "\n".join(f"- **{name}**: `{' '.join(arm.command)}`" for name, arm in found.folder.config.arms.items())
    versions = ", ".join(f"{name} {version}" for name, version in head.versions.items())
    state = "" if found.complete else "**Not complete**: a boot or a request is missing or failed, see below.\n\n"
    parts = [f"# {fix} against {base}\n\n{state}{arms}\n\nStarted {head.started}; {versions}.\n"]
    parts += [f"![{plot}]({plot})\n" for plot in plots]
    for table in tables(found):
        parts.append(table.markdown())
        if table.title == f"{fix} against {base}":
            parts.append(f"{rule(found.measures)}\n")
        if table.title.startswith("greedy texts"):
            parts.append(f"In words: {conclusion(found.pairs)}.\n")
        if table.title.startswith("draws"):
            pattern = found.folder.config.probe.pattern
            parts.append(f"A draw invents where its answer holds a match of `{pattern}` that its prompt does not.\n")
    for record in found.records:
        if not record.done:
            parts.append(f"## {record.boot} died\n\n{record.reason}\n\n{_block(record.log_end)}\n")
    parts.append("## Answers, side by side\n\nThe first counted boot of each arm that answered.\n")
    for entry in found.known:
        parts.append(f"### {entry.request}\n\n{_quoted(entry.question)}\n")
        for arm in found.arms:
            boot = next((b for b in entry.answers if b.endswith(f"-{arm}") and "-cold-" not in b), None)
            said = "no answer\n" if boot is None else f"{boot}\n\n{_block(entry.answers[boot])}\n"
            parts.append(f"**{arm}**, {said}")
    return "\n".join(parts)


def _block(text: str) -> str:
    """Text as it is: a fence longer than any in it."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}text\n{text}\n{fence}"


def _quoted(text: str) -> str:
    return "\n".join(f"> {line}" for line in text.strip().splitlines())


def report_folder(path: Path, screen: Screen) -> int:
    """The report of an earlier run. Raises UserError."""
    return report(RunFolder.of(path), screen)
