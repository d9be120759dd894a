"""Whether boots said the same, word by word; what answers know and what they invent."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flashqsa.cli.ab_config import Config
from flashqsa.cli.ab_folder import BootRecord
from flashqsa.cli.ab_requests import Answer, printable

GREEDY = ("long", "decode", "quality")
SHOWN_WORDS, SHOWN_CHARACTERS = 8, 80
"""What is shown from the first difference on, at most."""

Z_95 = 1.959964
"""The 97.5 % quantile of the normal distribution."""


@dataclass(frozen=True)
class Difference:
    """Where two greedy texts part.

    word    the first word that differs, from 0; both texts have `word` words in common before it
    first   what the one says from there on, second the other; empty where a text has ended
    """

    request: str
    boots: tuple[str, str]
    word: int
    words: tuple[int, int]
    first: str
    second: str

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "request": self.request,
            "boots": list(self.boots),
            "word": self.word,
            "words": list(self.words),
            "texts": [self.first, self.second],
        }


@dataclass(frozen=True)
class Pair:
    """Two boots, compared over every greedy request that both answered.

    spaces  requests whose words are the same and whose white space is not
    empty   requests that both answered with no word
    """

    boots: tuple[str, str]
    arms: tuple[str, str]
    compared: int
    differences: tuple[Difference, ...]
    spaces: tuple[str, ...]
    empty: tuple[str, ...]

    @property
    def same(self) -> int:
        """Requests whose words are the same."""
        return self.compared - len(self.differences)

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "boots": list(self.boots),
            "compared": self.compared,
            "same": self.same,
            "only_spaces_differ": list(self.spaces),
            "empty": list(self.empty),
            "differences": [difference.as_json() for difference in self.differences],
        }


def first_difference(one: Sequence[str], other: Sequence[str]) -> int | None:
    """The place of the first word that differs, None for equal texts.

    >>> first_difference("the sea is wide".split(), "the sea was wide".split())
    2
    >>> first_difference(["the", "sea"], ["the", "sea", "is"])
    2
    """
    for place, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return place
    return None if len(one) == len(other) else min(len(one), len(other))


def greedy_answers(record: BootRecord) -> dict[str, Answer]:
    """A boot's greedy answers by name, without those that failed: a text that was cut is no answer."""
    return {answer.name: answer for answer in record.answers if answer.kind in GREEDY and answer.error is None}


def compare(one: BootRecord, other: BootRecord) -> Pair:
    """Two boots, word by word."""
    mine, theirs = greedy_answers(one), greedy_answers(other)
    both = [name for name in mine if name in theirs]
    boots, differences, spaces = (str(one.boot), str(other.boot)), [], []
    for name in both:
        left, right = mine[name].words, theirs[name].words
        place = first_difference(left, right)
        if place is not None:
            shown = slice(place, place + SHOWN_WORDS)
            texts = _shown(left[shown]), _shown(right[shown])
            differences.append(Difference(name, boots, place, (len(left), len(right)), *texts))
        elif (mine[name].thought, mine[name].text) != (theirs[name].thought, theirs[name].text):
            spaces.append(name)
    empty = tuple(name for name in both if not mine[name].words and not theirs[name].words)
    return Pair(boots, (one.boot.arm, other.boot.arm), len(both), tuple(differences), tuple(spaces), empty)


def _shown(words: Sequence[str]) -> str:
    text = printable(" ".join(words))
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def pairs(records: Sequence[BootRecord]) -> list[Pair]:
    """Every boot with every later one, also those that are not counted and those that died on the way."""
    told = [record for record in records if greedy_answers(record)]
    return [compare(one, other) for index, one in enumerate(told) for other in told[index + 1 :]]


def conclusion(found: Sequence[Pair]) -> str:
    """What the pairs say together."""
    compared = [pair for pair in found if pair.compared]
    if not compared:
        return "no greedy text was answered by two boots"
    within = {d.request for pair in compared if pair.arms[0] == pair.arms[1] for d in pair.differences}
    between = {d.request for pair in compared if pair.arms[0] != pair.arms[1] for d in pair.differences}
    empty = sorted({name for pair in compared for name in pair.empty})
    nothing = f"; no word was said in: {', '.join(empty)}" if empty else ""
    if not within and not between:
        return f"every greedy text is the same, word by word, in all boots ({len(compared)} pairs){nothing}"
    parts = []
    if between - within:
        parts.append(f"differ between the arms only: {', '.join(sorted(between - within))}")
    if within:
        parts.append(f"differ between boots of one arm already: {', '.join(sorted(within))}")
    return "greedy texts " + "; ".join(parts) + nothing


def facts_found(facts: Sequence[str], text: str) -> int:
    """How many facts an answer holds."""
    return sum(re.search(fact, text, flags=re.IGNORECASE | re.DOTALL) is not None for fact in facts)


def invented(pattern: str, prompt: str, answer: str) -> list[str]:
    """What the pattern finds in an answer and not in its prompt, each once.

    >>> invented(r"[0-9]+", "Built in 1931, rowed by 12.", "Built in 1931 for 12 men and 40 pounds.")
    ['40']
    """
    known = {match.group() for match in re.finditer(pattern, prompt)}
    return list(dict.fromkeys(found for m in re.finditer(pattern, answer) if (found := m.group()) not in known))


@dataclass(frozen=True)
class Probed:
    """The draws of one arm.

    distinct   texts among them: 1 of many draws means that the server did not sample
    inventing  draws that hold something which their prompt lacks
    found      what, by draw
    """

    arm: str
    draws: int
    distinct: int
    inventing: int
    found: tuple[tuple[str, tuple[str, ...]], ...]

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval of the share of draws that invent (E. B. Wilson, 1927).

        >>> low, high = Probed("base", 16, 16, 2, ()).interval
        >>> round(low, 3), round(high, 3)
        (0.035, 0.36)
        """
        if not self.draws:
            return 0.0, 1.0
        share, n, z2 = self.inventing / self.draws, self.draws, Z_95**2
        middle = (share + z2 / (2 * n)) / (1 + z2 / n)
        half = Z_95 / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
        return max(middle - half, 0.0), min(middle + half, 1.0)

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "arm": self.arm,
            "draws": self.draws,
            "distinct": self.distinct,
            "inventing": self.inventing,
            "interval": list(self.interval),
            "found": {draw: list(what) for draw, what in self.found},
        }


def probed(config: Config, prompt: str, records: Sequence[BootRecord]) -> list[Probed]:
    """Both arms' draws, graded: a draw invents where its answer holds a match of `probe.pattern` that its prompt
    lacks. What a model thinks before it answers is not graded."""
    found = []
    for arm in config.arms:
        draws = [a for r in records if r.boot.arm == arm for a in r.answers if a.kind == "probe" and a.error is None]
        graded = [(a.name, tuple(invented(config.probe.pattern, prompt, a.text))) for a in draws]
        inventing = [entry for entry in graded if entry[1]]
        found.append(Probed(arm, len(graded), len({a.text for a in draws}), len(inventing), tuple(inventing)))
    return found
