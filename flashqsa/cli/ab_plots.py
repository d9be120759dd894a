"""Plots of a run: every boot a point, so that the spread is seen beside the difference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from flashqsa.cli.ab_measures import Measure
from flashqsa.cli.show import UserError

WIDTH_PER_GROUP_IN, WIDTH_IN, HEIGHT_IN = 1.4, 3.0, 4.0


def draw_measures(measures: Sequence[Measure], folder: Path) -> list[str]:
    """A plot for each name of a measure, `time-to-first-token.png`; returns the files' names. Raises UserError."""
    names = []
    for name in dict.fromkeys(measure.name for measure in measures):
        mine = [measure for measure in measures if measure.name == name]
        figure = Figure(figsize=(WIDTH_IN + WIDTH_PER_GROUP_IN * len(mine), HEIGHT_IN), layout="constrained")
        axes = figure.subplots()
        for index, colour in ((0, "tab:blue"), (1, "tab:orange")):
            sides = [(measure.base, measure.fix)[index] for measure in mine]
            places = [place + 0.4 * index - 0.2 for place in range(len(mine))]
            axes.bar(places, [side.mean or 0.0 for side in sides], width=0.36, color=colour, alpha=0.45)
            for place, side in zip(places, sides, strict=True):
                values = [value for _, value in side.boots]
                axes.scatter([place] * len(values), values, color=colour, edgecolor="black", zorder=3)
            axes.scatter([], [], color=colour, edgecolor="black", label=f"{sides[0].arm}: each boot, bar its mean")
        axes.set_xticks(range(len(mine)), [f"{measure.group}\n{measure.verdict}" for measure in mine], fontsize=8)
        better = "less" if mine[0].lower else "more"
        axes.set(ylabel=f"{mine[0].unit} ({better} is better)", title=name, ylim=(0, None))
        axes.legend(fontsize=8)
        names.append(f"{name.replace(' ', '-')}.png")
        try:
            figure.savefig(folder / names[-1])
        except OSError as error:
            raise UserError(f"{folder / names[-1]}: cannot be written: {error}") from error
    return names
