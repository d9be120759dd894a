"""What logs say of how requests were computed: regular expressions, counted by boot and by worker."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashqsa.cli.ab_config import Boot, Evidence
from flashqsa.cli.ab_folder import RunFolder
from flashqsa.cli.ab_requests import printable

SERVER = "server"
"""The worker of lines that name none."""

COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Sighting:
    """One finding in every boot.

    label   the pattern's name, and what its named groups held: `FlashQSA route: select cpu:plain`
    counts  boot -> worker -> how often; a boot without it is left out
    """

    label: str
    counts: dict[str, dict[str, int]]

    def in_boot(self, boot: str, known: Sequence[str]) -> str:
        """What a table says of one boot; known workers without the finding are named too.

        >>> Sighting("x", {"01-base": {"TP0": 2}}).in_boot("01-base", ["TP0", "TP1"])
        'TP0 2, TP1 no'
        """
        counts = self.counts.get(boot, {})
        if not counts:
            return "no"
        if set(counts) == {SERVER} == {SERVER, *known}:
            return str(counts[SERVER])
        named = {*counts, *known} - ({SERVER} - set(counts))
        return ", ".join(f"{worker} {counts.get(worker, 'no')}" for worker in sorted(named))

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"label": self.label, "boots": self.counts}


def search(text: str, evidence: Evidence) -> Counter[tuple[str, str]]:
    """How often each label was found, by worker; what a terminal would colour is searched as plain text.

    >>> log = "(TP1 pid=7) attend takes cpu:plain on cpu (CPU), first for 9 rows"
    >>> search(log, Evidence())
    Counter({('FlashQSA route: attend cpu:plain', 'TP1'): 1})
    """
    plain = COLOURS.sub("", text)
    found: Counter[tuple[str, str]] = Counter()
    for name, pattern in evidence.every_pattern().items():
        for match in re.finditer(pattern, plain, flags=re.MULTILINE):
            held = printable(" ".join(" ".join(value.split()) for value in match.groupdict().values() if value))
            start = plain.rfind("\n", 0, match.start()) + 1
            end = plain.find("\n", match.start())
            writer = re.search(evidence.worker, plain[start : len(plain) if end < 0 else end])
            found[f"{name}: {held}" if held else name, (writer and writer["worker"]) or SERVER] += 1
    return found


def sightings(folder: RunFolder, boots: Sequence[Boot]) -> list[Sighting]:
    """Everything that was found in some boot, and every pattern that was found in none."""
    evidence = folder.config.evidence
    counts: dict[str, dict[str, dict[str, int]]] = {}
    for boot in boots:
        for (label, worker), count in search(_log(folder.log(boot)), evidence).items():
            counts.setdefault(label, {}).setdefault(str(boot), {})[worker] = count
    for name in evidence.every_pattern():
        if not any(label == name or label.startswith(f"{name}: ") for label in counts):
            counts[name] = {}
    return [Sighting(label, found) for label, found in sorted(counts.items())]


def workers(found: Sequence[Sighting]) -> list[str]:
    """Every worker that something was found for in some boot."""
    return sorted({worker for sighting in found for counts in sighting.counts.values() for worker in counts})


def _log(path: Path) -> str:
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:
        return ""
