"""What `flashqsa ab` makes of answers: figures and their spread, texts word by word, facts, draws, logs, tables."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("httpx_sse")
pytest.importorskip("tomlkit")

from flashqsa import route
from flashqsa.cli.ab_compare import compare, conclusion, pairs, probed
from flashqsa.cli.ab_config import Boot, Config, Evidence, checked
from flashqsa.cli.ab_evidence import Sighting, search
from flashqsa.cli.ab_folder import BootRecord, Prompts, RunFolder
from flashqsa.cli.ab_measures import CHANCE, Measure, Side, measures
from flashqsa.cli.ab_report import Table, findings, markdown, rule
from flashqsa.cli.ab_requests import Answer
from flashqsa.testing.cases import CASES
from flashqsa.testing.verify import verify_case

ARMS = ("base", "fix")


def answer(name: str = "29k-1", kind: str = "long", **keys: Any) -> Answer:
    told: dict[str, Any] = {
        "group": "29k",
        "counted": True,
        "error": None,
        "text": "all the same",
        "thought": "",
        "first_s": 2.0,
        "last_s": 6.0,
        "chunks": 5,
        "wall_s": 7.0,
        "prompt_tokens": 100,
        "answer_tokens": 9,
    }
    return Answer(name, kind, **(told | keys))


def record(index: int, arm: str, *answers: Answer, counted: bool = True, status: str = "done") -> BootRecord:
    reason = None if status == "done" else "the server ended with code 1"
    return BootRecord(Boot(index, arm, counted), status, reason, "", 3.0, "", "", answers)


def by_name(records: list[BootRecord]) -> dict[str, Any]:
    return {measure.name: measure for measure in measures(records, ARMS)}


def test_figures_of_one_answer() -> None:
    task = answer("prose-0", "decode", group="prose", acceptance=2.5)
    found = by_name([record(0, "base", answer(), task), record(1, "fix", answer(), task)])
    assert found["time to first token"].base.mean == 2.0
    assert found["prefill"].base.mean == 50.0
    assert found["decode"].base.mean == 2.0  # 8 tokens after the first in 4 s
    assert found["decode step"].base.mean == 1000.0  # 4 steps between 5 chunks
    assert found["acceptance length"].base.mean == 2.5
    assert found["all greedy requests"].base.mean == 14.0


@pytest.mark.parametrize(
    ("keys", "absent"),
    [
        ({"prompt_tokens": None}, {"prefill"}),
        ({"first_s": None, "last_s": None, "chunks": 0}, {"time to first token", "prefill"}),
        ({"error": "cut"}, {"time to first token", "prefill", "all greedy requests"}),
        ({"counted": False}, {"time to first token", "prefill"}),
    ],
)
def test_what_an_answer_does_not_tell_has_no_figure(keys: dict[str, Any], absent: set[str]) -> None:
    whole = set(by_name([record(0, "base", answer())]))
    assert whole - set(by_name([record(0, "base", answer(**keys))])) == absent


def test_a_boot_counts_with_the_median_and_an_arm_with_the_mean() -> None:
    first = [answer(f"29k-{i}", first_s=value) for i, value in enumerate((1.0, 2.0, 9.0))]
    found = by_name([record(0, "base", *first), record(2, "base", answer(first_s=4.0)), record(1, "fix", answer())])
    base = found["time to first token"].base
    assert base.boots == (("00-base", 2.0), ("02-base", 4.0))
    assert (base.mean, base.spread) == (3.0, 2.0)


def test_boots_that_are_cold_or_died_do_not_count() -> None:
    cold = record(0, "base", answer(first_s=9.0), counted=False)
    dead = record(1, "base", answer(first_s=9.0), status="died")
    found = by_name([cold, dead, record(2, "base", answer()), record(3, "fix", answer())])
    assert found["time to first token"].base.boots == (("02-base", 2.0),)


@pytest.mark.parametrize(
    ("base", "fix", "verdict"),
    [
        ((1.0, 1.1), (0.8, 0.85), "fix is better"),
        ((1.0, 1.1), (1.4, 1.5), "base is better"),
        ((1.0, 1.1), (1.0, 1.05), "within the spread"),
        ((1.0, 1.5), (0.8, 0.8), "within the spread"),  # one arm's boots lie apart, however calm the other is
        ((0.8, 0.8), (1.0, 1.5), "within the spread"),
        ((1.0, 1.25), (1.25, 1.5), "within the spread"),  # the difference equals the spread
        ((1.0,), (0.1,), "one boot: no spread to compare with"),
        ((1.0, 1.1), (0.1,), "one boot: no spread to compare with"),
        ((), (0.1,), "not measured in both arms"),
    ],
)
def test_a_difference_is_called_one_above_the_spread_only(
    base: tuple[float, ...], fix: tuple[float, ...], verdict: str
) -> None:
    sides = [*((value, "base") for value in base), *((value, "fix") for value in fix)]
    records = [record(index, arm, answer(first_s=value)) for index, (value, arm) in enumerate(sides)]
    found = by_name(records)
    assert found["time to first token"].verdict == verdict
    if verdict.endswith("better"):
        # Less time for the same prompt is more tokens per second, of which more are better.
        assert found["prefill"].verdict == verdict


def test_the_spread_stands_beside_the_difference_in_the_same_unit() -> None:
    values = [("base", 1.0), ("base", 1.1), ("fix", 0.5), ("fix", 0.7)]
    found = by_name([record(index, arm, answer(first_s=value)) for index, (arm, value) in enumerate(values)])
    measure = found["time to first token"]
    assert measure.relative == pytest.approx(-0.45 / 1.05)
    assert measure.relative_spread == pytest.approx(0.2 / 1.05)
    assert by_name([record(0, "base", answer()), record(1, "fix", answer())])["prefill"].relative_spread is None


@pytest.mark.parametrize("boots", CHANCE)
def test_how_often_noise_is_called_a_difference(boots: int) -> None:
    base, fix = np.random.default_rng(0).normal(size=(2, 200_000, boots))
    spread = np.maximum(np.ptp(base, axis=1), np.ptp(fix, axis=1))
    called = np.abs(base.mean(axis=1) - fix.mean(axis=1)) > spread
    assert called.mean() == pytest.approx(CHANCE[boots], abs=0.005)
    for one, other, wanted in zip(base[:500].tolist(), fix[:500].tolist(), called[:500].tolist(), strict=True):
        sides = [
            Side(arm, tuple((str(i), x) for i, x in enumerate(side)))
            for arm, side in zip(ARMS, (one, other), strict=True)
        ]
        assert Measure("ready", "s", "boot", True, *sides).verdict.endswith("is better") == wanted
    values = [("base", answer()), ("fix", answer())] * boots
    found = measures([record(index, arm, kept) for index, (arm, kept) in enumerate(values)], ARMS)
    assert f"With {boots} boots of each arm" in rule(found)


def test_texts_are_compared_word_by_word() -> None:
    one = record(0, "base", answer("a", text="the sea is wide"), answer("b", text="x y"), answer("c", text=""))
    other = record(1, "fix", answer("a", text="the sea was wide"), answer("b", text="x\n y"), answer("c", text=""))
    pair = compare(one, other)
    (difference,) = pair.differences
    assert (difference.request, difference.word, difference.words) == ("a", 2, (4, 4))
    assert (difference.first, difference.second) == ("is wide", "was wide")
    assert (pair.compared, pair.same, pair.spaces, pair.empty) == (3, 2, ("b",), ("c",))
    assert conclusion([pair]) == "greedy texts differ between the arms only: a; no word was said in: c"


def test_what_a_terminal_would_obey_is_shown_as_text() -> None:
    pair = compare(record(0, "base", answer(text="a \x1b[2Jb")), record(1, "fix", answer(text="a b\u202e")))
    assert [(d.first, d.second) for d in pair.differences] == [("\\x1b[2Jb", "b\\u202e")]
    evidence = Evidence(flashqsa=False, patterns={"x": r"is (?P<name>\S+)"})
    assert list(search("it is \x1b[2Jred\n", evidence)) == [("x: \\x1b[2Jred", "server")]


def test_a_thought_is_part_of_the_text() -> None:
    pair = compare(record(0, "base", answer(thought="hm")), record(1, "fix", answer(thought="ha")))
    assert [difference.word for difference in pair.differences] == [0]


def test_answers_that_failed_or_were_drawn_are_not_compared() -> None:
    drawn, failed = answer("draw-0", "probe", text="a"), answer("x", error="cut", text="b")
    pair = compare(record(0, "base", answer(), drawn, failed), record(1, "fix", answer(), answer("x", text="c")))
    assert (pair.compared, pair.same) == (1, 1)


def test_the_conclusion_tells_noise_within_an_arm_from_a_change() -> None:
    texts = {"base": ("one", "same"), "fix": ("one", "other")}
    records = [
        record(index, arm, answer("noisy", text=f"run {index}"), answer("calm", text=texts[arm][1]))
        for index, arm in enumerate(("base", "fix", "base", "fix"))
    ]
    found = pairs(records)
    assert len(found) == 6
    wanted = "greedy texts differ between the arms only: calm; differ between boots of one arm already: noisy"
    assert conclusion(found) == wanted
    assert conclusion([]) == "no greedy text was answered by two boots"


def config(**tables: Any) -> Config:
    return checked({"arms": {arm: {"command": "x"} for arm in ARMS}, **tables}, "ab.toml")


def test_draws_are_graded_by_what_their_prompt_lacks() -> None:
    draws = [
        answer("draw-0", "probe", text="12 rowers since 1931"),
        answer("draw-1", "probe", text="built in 1932", thought="maybe 1940"),
        answer("draw-2", "probe", text="40", error="cut"),
    ]
    base, fix = probed(config(), "Built in 1931 for 12.", [record(0, "base", *draws), record(1, "fix", answer())])
    assert (base.draws, base.distinct, base.inventing) == (2, 2, 1)
    assert base.found == (("draw-1", ("1932",)),)
    assert (fix.draws, fix.interval) == (0, (0.0, 1.0))


def test_logs_are_searched_over_line_breaks_and_colours() -> None:
    log = (
        "(Worker_TP0 pid=12) attend \x1b[1mtakes\x1b[0m cpu:xqa on cuda:0 (NVIDIA H200), first for 1 rows\n"
        "(Worker_TP1 pid=13) attend takes cpu:xqa on cuda:1 (NVIDIA H200), first for 1 rows\n"
        "[10:11:12] select takes cpu:plain\n           on cpu (CPU), first\n"
        "  the stock sparse layer\n  runs instead of FlashQSA: a mask\n"
        "attend refuses cpu:grouped on cpu (CPU)\n"
    )
    evidence = Evidence(patterns={"refused": r"refuses (?P<route>\S+)", "word": "first"})
    assert search(log, evidence) == {
        ("FlashQSA route: attend cpu:xqa", "Worker_TP0"): 1,
        ("FlashQSA route: attend cpu:xqa", "Worker_TP1"): 1,
        ("FlashQSA route: select cpu:plain", "server"): 1,
        ("left to the stock layer", "server"): 1,
        ("refused: cpu:grouped", "server"): 1,
        ("word", "Worker_TP0"): 1,
        ("word", "Worker_TP1"): 1,
        ("word", "server"): 1,
    }
    assert {label for label, _ in search(log, Evidence(flashqsa=False))} == set()


def test_what_flashqsa_logs_is_what_is_searched_for(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    from flashqsa.integrations.transformers import handover

    monkeypatch.setattr(route, "_announced", set())
    monkeypatch.setattr(handover, "_counts", Counter())
    with caplog.at_level("INFO", "flashqsa"):
        verify_case(CASES[0], torch.device("cpu"))
        handover.note_hand_over("a reason of this test")
    labels = {label for label, _ in search("\n".join(caplog.messages), Evidence())}
    assert "left to the stock layer" in labels
    assert any(label.startswith("FlashQSA route: attend cpu:") for label in labels)
    assert any(label.startswith("FlashQSA route: select cpu:") for label in labels)


def test_a_line_may_match_and_name_no_worker() -> None:
    evidence = Evidence(flashqsa=False, patterns={"x": "found"}, worker=r"by (?P<worker>\w+)|found")
    assert search("by TP0: found\nfound\n", evidence) == {("x", "TP0"): 1, ("x", "server"): 1}


def test_a_worker_without_the_finding_is_named() -> None:
    sighting = Sighting("x", {"00-base": {"TP0": 1}, "01-fix": {"server": 2}})
    assert sighting.in_boot("00-base", ["TP0", "TP1", "server"]) == "TP0 1, TP1 no"
    assert sighting.in_boot("01-fix", ["server"]) == "2"
    assert sighting.in_boot("02-base", ["TP0"]) == "no"


def test_tables_survive_what_stands_in_their_cells() -> None:
    text = Table("t", ("a", "b"), [("x|y", "two\nlines")]).markdown()
    assert text == "## t\n\n| a | b |\n| --- | --- |\n| x\\|y | two lines |\n"


def test_answers_with_fences_are_quoted_whole(tmp_path: Path) -> None:
    folder = RunFolder.begin(
        tmp_path / "run", config(quality={"new_tokens": 9}, plan={"order": ["base", "fix"]}), "asked"
    )
    folder.remember(4.0, Prompts({"question-code": "?"}, {"question-code": [r"x = \d"]}, "draw"))
    said = "```python\nx = 1\n```"
    for index, arm in enumerate(ARMS):
        kept = record(index, arm, answer("question-code", "quality", group="code", text=said))
        folder.boot(kept.boot).mkdir(parents=True)
        folder.keep(kept)
    assert folder.records()[0].answers[0].text == said
    assert findings(folder).known[0].found == {"00-base": 1, "01-fix": 1}
    assert f"````text\n{said}\n````" in markdown(findings(folder), [])
    # A log that is gone says nothing; one that is there and holds nothing says no.
    folder.log(folder.config.boots()[1]).touch()
    assert "| left to the stock layer | - | no |" in markdown(findings(folder), [])
