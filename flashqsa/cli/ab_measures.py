"""Figures of boots and arms, and when a difference between arms may be called one.

The figure of a boot is the median over its counted requests of a group, that of an arm the mean of its boots. How far
boots of the same arm lie apart, at most, is what a difference between arms has to exceed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flashqsa.cli.ab_folder import BootRecord
from flashqsa.cli.ab_requests import Answer

CHANCE = {2: 0.22, 3: 0.05, 4: 0.01}
"""Boots of each arm -> how often a measure is called different where nothing differs, for normal noise: from a million
draws, which the tests make again."""


@dataclass(frozen=True)
class Figure:
    """What is measured of one answer.

    kind    of requests that have it
    lower   whether less is better
    of      its value, None where the answer does not tell it
    """

    name: str
    unit: str
    kind: str
    lower: bool
    of: Callable[[Answer], float | None]


def first_token_s(answer: Answer) -> float | None:
    """Seconds to the first chunk with content."""
    return answer.first_s


def prefill_rate(answer: Answer) -> float | None:
    """Prompt tokens per second until the first chunk with content."""
    if answer.prompt_tokens is None or not answer.first_s:
        return None
    return answer.prompt_tokens / answer.first_s


def _decode_s(answer: Answer) -> float | None:
    if answer.first_s is None or answer.last_s is None or answer.last_s <= answer.first_s:
        return None
    return answer.last_s - answer.first_s


def decode_rate(answer: Answer) -> float | None:
    """Tokens after the first per second, where the server counts them.

    The first chunk is taken for one token; where it holds several, by drafts, the rate is too high by as many.
    """
    taken = _decode_s(answer)
    return None if taken is None or not answer.answer_tokens else (answer.answer_tokens - 1) / taken


def step_ms(answer: Answer) -> float | None:
    """Milliseconds from chunk to chunk, which are steps where a server streams each step by itself."""
    taken = _decode_s(answer)
    return None if taken is None else taken * 1e3 / (answer.chunks - 1)


def acceptance(answer: Answer) -> float | None:
    """Tokens per step with drafts."""
    return answer.acceptance


FIGURES = (
    Figure("time to first token", "s", "long", True, first_token_s),
    Figure("prefill", "tokens/s", "long", False, prefill_rate),
    Figure("decode", "tokens/s", "decode", False, decode_rate),
    Figure("decode step", "ms", "decode", True, step_ms),
    Figure("acceptance length", "tokens/step", "decode", False, acceptance),
)


@dataclass(frozen=True)
class Side:
    """One arm's figure, from the boots that have it.

    >>> Side("base", (("01-base", 1.0), ("03-base", 1.5))).mean
    1.25
    """

    arm: str
    boots: tuple[tuple[str, float], ...]

    @property
    def mean(self) -> float | None:
        """Mean over boots."""
        return statistics.fmean(value for _, value in self.boots) if self.boots else None

    @property
    def spread(self) -> float | None:
        """Between the largest and the smallest boot; None below two boots."""
        values = [value for _, value in self.boots]
        return max(values) - min(values) if len(values) > 1 else None


@dataclass(frozen=True)
class Measure:
    """One figure of one group in both arms.

    >>> base = Side("base", (("01-base", 1.0), ("03-base", 1.1)))
    >>> Measure("time to first token", "s", "29k", True, base, Side("fix", (("02-fix", 0.8), ("04-fix", 0.85)))).verdict
    'fix is better'
    >>> Measure("time to first token", "s", "29k", True, base, Side("fix", (("02-fix", 1.0), ("04-fix", 1.05)))).verdict
    'within the spread'
    """

    name: str
    unit: str
    group: str
    lower: bool
    base: Side
    fix: Side

    @property
    def difference(self) -> float | None:
        """The second arm's mean less the first one's."""
        return None if self.base.mean is None or self.fix.mean is None else self.fix.mean - self.base.mean

    @property
    def relative(self) -> float | None:
        """The difference as a share of the first arm's mean."""
        return self.difference / self.base.mean if self.difference is not None and self.base.mean else None

    @property
    def spread(self) -> float | None:
        """The larger spread of the two arms; None where either has only one boot."""
        if self.base.spread is None or self.fix.spread is None:
            return None
        return max(self.base.spread, self.fix.spread)

    @property
    def relative_spread(self) -> float | None:
        """The spread as a share of the first arm's mean."""
        return self.spread / self.base.mean if self.spread is not None and self.base.mean else None

    @property
    def verdict(self) -> str:
        """Which arm is better, or why that cannot be said."""
        if self.difference is None:
            return "not measured in both arms"
        if self.spread is None:
            return "one boot: no spread to compare with"
        if abs(self.difference) <= self.spread:
            return "within the spread"
        better = self.fix if (self.difference < 0) == self.lower else self.base
        return f"{better.arm} is better"

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        sides = {
            side.arm: {"mean": side.mean, "spread": side.spread, "boots": dict(side.boots)} for side in self._sides
        }
        return {
            "name": self.name,
            "unit": self.unit,
            "group": self.group,
            "lower_is_better": self.lower,
            "arms": sides,
            "difference": self.difference,
            "relative": self.relative,
            "spread": self.spread,
            "verdict": self.verdict,
        }

    @property
    def _sides(self) -> tuple[Side, Side]:
        return self.base, self.fix


def counted(record: BootRecord) -> list[Answer]:
    """The answers of a boot whose figures count: none of a boot that is not counted, or that died."""
    if not record.boot.counted or not record.done:
        return []
    return [answer for answer in record.answers if answer.counted and answer.error is None]


def measures(records: Sequence[BootRecord], arms: Sequence[str]) -> list[Measure]:
    """Every figure of every group that some boot has, in the order of FIGURES, then the time of whole boots."""
    found = []
    for figure in FIGURES:
        groups = dict.fromkeys(
            answer.group for record in records for answer in counted(record) if answer.kind == figure.kind
        )
        for group in groups:

            def value(record: BootRecord, figure: Figure = figure, group: str = group) -> float | None:
                answers = [a for a in counted(record) if a.kind == figure.kind and a.group == group]
                values = [x for a in answers if (x := figure.of(a)) is not None]
                return statistics.median(values) if values else None

            found.append(_measure(figure.name, figure.unit, group, figure.lower, records, arms, value))
    found.append(_measure("ready", "s", "boot", True, records, arms, lambda record: record.ready_s))
    found.append(_measure("all greedy requests", "s", "boot", True, records, arms, greedy_wall_s))
    return [measure for measure in found if measure.base.boots or measure.fix.boots]


def greedy_wall_s(record: BootRecord) -> float | None:
    """Seconds of a boot's greedy requests; None where one of them failed, since it took another time then."""
    asked = [answer for answer in record.answers if answer.kind not in ("hello", "probe")]
    if not asked or any(answer.error is not None for answer in asked):
        return None
    return sum(answer.wall_s for answer in asked)


def _measure(
    name: str,
    unit: str,
    group: str,
    lower: bool,
    records: Sequence[BootRecord],
    arms: Sequence[str],
    value: Callable[[BootRecord], float | None],
) -> Measure:
    def side(arm: str) -> Side:
        mine = [record for record in records if record.boot.arm == arm and record.boot.counted and record.done]
        return Side(arm, tuple((str(r.boot), found) for r in mine if (found := value(r)) is not None))

    return Measure(name, unit, group, lower, side(arms[0]), side(arms[1]))
