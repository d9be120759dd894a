"""The file of `flashqsa ab`: what it means, what is refused by its key, and the prompts that are made from it."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httpx_sse")
pytest.importorskip("tomlkit")

import tomlkit

from flashqsa.cli import ab_compare, ab_prompts
from flashqsa.cli.ab_config import Config, checked, read_config
from flashqsa.cli.ab_prompts import of_length
from flashqsa.cli.show import UserError
from tests.test_cli import invoke, refused

ARMS: dict[str, dict[str, Any]] = {
    "base": {"command": "serve --port {port}"},
    "fix": {"command": ["serve", "a b"], "port": 9},
}


def config(**tables: Any) -> Config:
    return checked({"arms": ARMS, **tables}, "ab.toml")


def test_two_commands_are_enough() -> None:
    found = config()
    base, fix = found.arms.values()
    assert base.words("python3") == ["serve", "--port", "8000"]
    assert fix.words("python3") == ["serve", "a b"]
    assert [str(boot) for boot in found.boots()] == ["00-cold-base", "01-base", "02-fix", "03-base", "04-fix"]
    assert [boot.counted for boot in found.boots()] == [False, True, True, True, True]
    assert found.long.tokens == [29_000] * 4 + [184_000, 250_000]


def test_the_order_of_boots_is_the_files() -> None:
    found = config(plan={"order": ["cold:fix", "fix", "base"]})
    assert [str(boot) for boot in found.boots()] == ["00-cold-fix", "01-fix", "02-base"]


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"arms": {"base": ARMS["base"]}}, "arms: wanted two, the first to compare with; got base"),
        ({"arms": {**ARMS, "fix": {}}}, "arms.fix.command: missing"),
        ({"arms": {**ARMS, "fix": {"command": ""}}}, "arms.fix.command: wanted a program and its arguments"),
        ({"arms": {**ARMS, "fix": {"command": []}}}, "arms.fix.command: wanted a program and its arguments"),
        ({"arms": {**ARMS, "fix": {"command": "'a"}}}, "arms.fix.command: wanted a line as a shell reads it"),
        ({"arms": {**ARMS, "fix": {"command": "a {prot}"}}}, "arms.fix.command.1: wanted no placeholder but"),
        ({"arms": {**ARMS, "fix": {"command": "a {"}}}, "arms.fix.command.1: wanted a text with {port}"),
        ({"arms": {**ARMS, "fix": {"command": "a", "comand": "a"}}}, "arms.fix.comand: no such key; command is one"),
        ({"arms": {**ARMS, "fix": {"command": "a", "port": 0}}}, "arms.fix.port: wanted greater than or equal to 1"),
        ({"arms": {**ARMS, "fix": {"command": "a", "port": "9"}}}, "arms.fix.port: wanted a valid integer; got '9'"),
        ({"arms": {**ARMS, "fix": {"command": "a", "environment": {"A": 1}}}}, "arms.fix.environment.A: wanted"),
        ({"arms": {**ARMS, "a b": {"command": "a"}}}, "arms.a b: wanted a text that should match"),
        ({"plan": {"order": ["bose"]}}, "plan.order.0: wanted one of base, cold:base, fix, cold:fix; got 'bose'"),
        ({"plan": {"order": ["cold:base", "base"]}}, "plan.order: wanted a counted boot of each arm; none of fix"),
        ({"long": {"tokens": [0]}}, "long.tokens.0: wanted greater than or equal to 1; got 0"),
        ({"decode": {"kinds": ["poem"]}}, "decode.kinds.0: wanted 'prose', 'code' or 'edit'; got 'poem'"),
        ({"probe": {"pattern": "("}}, "probe.pattern: wanted a regular expression"),
        ({"evidence": {"patterns": {"x": "("}}}, "evidence.patterns.x: wanted a regular expression"),
        ({"evidence": {"worker": "x"}}, "evidence.worker: wanted a regular expression with a group"),
        (
            {"evidence": {"patterns": {"x": "a*"}}},
            "evidence.patterns.x: wanted a regular expression that does not match",
        ),
        (
            {"probe": {"pattern": "a{99999999999999999999}"}},
            "probe.pattern: wanted a regular expression: the repetition",
        ),
        ({"probe": {"pattern": "(" * 5000 + ")" * 5000}}, "probe.pattern: wanted a regular expression: "),
        ({"probe": {"body": {"x": float("inf")}}}, "probe.body.x: wanted what JSON can carry"),
        ({"probe": {"draws": 10**9}}, "probe.draws: wanted less than or equal to 10000"),
        ({"long": {"tokens": [10**12]}}, "long.tokens.0: wanted less than or equal to 16000000"),
        ({"long": {"tokens": [400]}}, "long.uncounted: wanted fewer than long.tokens has, 1; got 1"),
        ({"long": {"characters_per_token": 1e300}}, "long.characters_per_token: wanted less than or equal to 100"),
        ({"long": {"texts": ["a\0"]}}, "long.texts.0: wanted a text without the character of code 0"),
        (
            {"decode": {"kinds": ["code", "code"]}},
            "decode.kinds: wanted each kind once; decode.repeats asks them again",
        ),
        ({"plan": {"request_timeout_s": float("inf")}}, "plan.request_timeout_s: wanted a finite number; got inf"),
        ({"plan": {"request_timeout_s": 1e300}}, "plan.request_timeout_s: wanted less than or equal to 1000000"),
        ({"arms": {**ARMS, "a" * 300: {"command": "a"}}}, f"arms.{'a' * 300}: wanted a text that should match"),
        *(
            ({"arms": {**ARMS, "fix": {"command": "a", **keys}}}, f"arms.fix.{message}")
            for keys, message in (
                ({"body": {"x": date(2024, 1, 1)}}, "body.x: wanted what JSON can carry: Object of type"),
                (
                    {"body": {"stream": False}},
                    "body.stream: wanted other keys than those of every request: answers are",
                ),
                ({"body": {"temperature": 1.0}}, "body.temperature: wanted other keys than those of every request: it"),
                ({"environment": {"A=B": "x"}}, "environment.A=B: wanted the name of an environment variable"),
                ({"environment": {"A": "\0"}}, "environment.A: wanted a text without the character of code 0"),
                ({"url": "{port:zz}"}, "url: wanted a text with {port} or {python} in it (a brace is doubled): {port}"),
                ({"url": "http://a{port:{x}}"}, "url: wanted a text with {port} or {python} in it"),
                ({"url": "localhost:80/v1"}, "url: wanted an address that begins with http:// or https:// and a host"),
                ({"ready": "http://[::1/v1"}, "ready: wanted an address: "),
                ({"metrics": "/metrics"}, "metrics: wanted an address that begins with http://"),
                ({"command": ["", "a"]}, "command: wanted a program and its arguments"),
                ({"folder": "~no-such-user/a"}, "folder: wanted a path: "),
            )
        ),
        ({"plna": {}}, "plna: no such key; plan is one"),
        ({"plan": 3}, "plan: wanted a valid dictionary"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_is_said_with_its_key(tables: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = tmp_path / "ab.toml"
    file.write_text(tomlkit.dumps({"arms": ARMS, **tables}))
    with pytest.raises(UserError, match=re.escape(f"ab.toml: {message}")):
        read_config(file)
    refused(invoke("ab", "run", str(file)), message)
    assert list(tmp_path.iterdir()) == [file], "nothing is made for a configuration that is wrong"


def test_what_is_no_toml_is_said_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "ab.toml"
    file.write_text("[arms]\nbase = \n")
    refused(invoke("ab", "run", str(file)), "not TOML")
    assert "line 2" in invoke("ab", "run", str(file)).stderr
    refused(invoke("ab", "run", str(tmp_path / "none.toml")), "No such file")
    arms = "".join(f"[arms.{name}]\ncommand = 'a'\n" for name in ("base", "base"))
    file.write_text(arms)
    refused(invoke("ab", "run", str(file)), 'Key "base" already exists')
    file.write_bytes(b"\xff\xfe")
    refused(invoke("ab", "run", str(file)), "not UTF-8 text")


def test_a_file_may_begin_as_some_editors_begin_it(tmp_path: Path) -> None:
    file = tmp_path / "ab.toml"
    file.write_bytes(b"\xef\xbb\xbf" + tomlkit.dumps({"arms": ARMS}).replace("\n", "\r\n").encode())
    assert list(read_config(file).arms) == ["base", "fix"]


def test_the_example_is_written_once_and_is_right(tmp_path: Path) -> None:
    file = tmp_path / "ab.toml"
    assert invoke("ab", "init", str(file)).exit_code == 0
    found = read_config(file)
    assert list(found.arms) == ["base", "fix"]
    assert ["--stock" in arm.words("python3") for arm in found.arms.values()] == [True, False]
    refused(invoke("ab", "init", str(file)), "is there already")
    text = file.read_text()
    # What stands behind a # is right too: each line is put in force by itself.
    commented = re.findall(r"^# ((\w+) = .*)$", text, flags=re.MULTILINE)
    assert len(commented) > 12
    for line, key in commented:
        if key not in re.findall(r"^(\w+) =", text.partition(f"# {line}")[0].rpartition("\n[")[2], flags=re.MULTILINE):
            checked(tomlkit.parse(text.replace(f"# {line}", line, 1)).unwrap(), line)


def test_relative_paths_start_at_the_file(tmp_path: Path) -> None:
    file = tmp_path / "ab.toml"
    arms = {name: {**arm, "folder": "there"} for name, arm in ARMS.items()}
    file.write_text(tomlkit.dumps({"arms": arms, "long": {"texts": ["book.txt"]}, "quality": {"file": "q.toml"}}))
    refused(invoke("ab", "run", str(file)), f"arms.base.folder: no such folder: {tmp_path / 'there'}")
    (tmp_path / "there").mkdir()
    found = read_config(file)
    assert found.arms["fix"].folder == str(tmp_path / "there")
    assert found.long.texts == [str(tmp_path / "book.txt")]
    assert found.quality.file == str(tmp_path / "q.toml")
    refused(invoke("ab", "run", str(file)), f"long.texts: {tmp_path / 'book.txt'}: No such file")


def test_what_logs_are_searched_for_does_not_make_another_run() -> None:
    assert config().fingerprint() == config(evidence={"patterns": {"a": "b"}}).fingerprint()
    assert config().fingerprint() != config(probe={"draws": 3}).fingerprint()


def test_prompts_are_the_same_every_time_and_begin_apart() -> None:
    text = ab_prompts.source_text([])
    first, again = (ab_prompts.long_asks(config(), text, 4.0) for _ in range(2))
    assert first == again
    assert [ask.counted for ask in first] == [False, True, True, True, True, True]
    assert [ask.group for ask in first] == ["29k"] * 4 + ["184k", "250k"]
    assert len({ask.text[:30] for ask in first}) == len(first)
    for ask, tokens in zip(first, config().long.tokens, strict=True):
        assert abs(len(ask.text) - 4 * tokens) <= 4
        # Each number stands once, at its depth, and the end asks for it.
        places = [[m.start() / len(ask.text) for m in re.finditer(fact, ask.text)] for fact in ask.facts]
        assert [len(found) for found in places] == [1, 1, 1]
        assert [round(found[0], 1) for found in places] == [0.1, 0.5, 0.9]
        assert ask.text.endswith("what the document is about.")


@pytest.mark.parametrize("tokens", [1, 60, 120, 400])
def test_a_short_long_prompt_still_holds_its_numbers(tokens: int) -> None:
    ask = ab_prompts.long_ask(ab_prompts.source_text([]), "x", tokens, 1.0, 5, True)
    assert all(len(re.findall(fact, ask.text)) == 1 for fact in ask.facts)


def test_texts_have_the_length_that_was_asked_and_use_every_paragraph() -> None:
    text = ab_prompts.source_text([])
    assert [len(of_length(text, n, "a")) for n in (1, 100, 50_000)] == [1, 100, 50_000]
    assert of_length(text, 500, "a") != of_length(text, 500, "b")
    long = of_length(text, 2 * len(text), "a")
    assert all(" ".join(part.split()) in long for part in text.split("\n\n"))


def test_questions_are_taken_from_a_file_and_refused_by_key(tmp_path: Path) -> None:
    file = tmp_path / "q.toml"

    def asked(text: str) -> list[ab_prompts.Ask]:
        file.write_text(text)
        return ab_prompts.quality_asks(config(quality={"file": str(file)}))

    (one,) = asked("[[question]]\nname = 'n'\ntext = 't'\nfacts = ['a|b']\n")
    assert (one.name, one.text, one.facts) == ("question-n", "t", ("a|b",))
    for text, message in (
        ("[[question]]\nname = 'n'\ntext = 't'\n", "question.0.facts: wanted"),
        ("[[question]]\nname = 'n'\ntext = 't'\nfacts = ['(']\n", "question.0.facts.0: wanted a regular expression"),
        ("[[question]]\nname = 'n'\ntext = 't'\nfacts = ['a']\n" * 2, "question.1.name: wanted a name of its own"),
        (
            "[[question]]\nname = 'n'\ntext = 't'\nfacts = ['a{99999999999999999999}']\n",
            "question.0.facts.0: wanted a reg",
        ),
        (
            "[[question]]\nname = 'n'\ntext = 't'\nfacts = [3]\n",
            "question.0.facts.0: wanted a regular expression; got 3",
        ),
        ("[[question]]\nname = 'n'\ntext = 't'\nfacts = ['a']\nfact = 1\n", "question.0.fact: no such key"),
        ("[[question]]\nname = 'n'\ntext = 't'\nfacts = ['a']\n[x]\n", "x: no such key; question is one"),
        ("[[questions]]\nname = 'n'\ntext = 't'\nfacts = ['a']\n", "question: wanted tables"),
        ("", "question: wanted tables [[question]]; quality.new_tokens = 0 asks none"),
        ("question = 3\n", "question: wanted tables"),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            asked(text)


def test_the_bundled_questions_are_answered_by_right_answers_alone() -> None:
    facts = {ask.group: ask.facts for ask in ab_prompts.quality_asks(config())}
    right = {
        "arithmetic": "It is 216: 9 times 24.",
        "order": "Avocet, Heron, Gannet, Plover",
        "reading": "Thirteen people; 3,600 square paces",
        "code": "[3, 2], since ...",
        "capital": "The Danube, into the Black Sea",
        "translation": "Der Hafen ist im Winter geschlossen.",
    }
    assert facts.keys() == right.keys()
    for name, text in right.items():
        assert ab_compare.facts_found(facts[name], text) == len(facts[name])
        assert ab_compare.facts_found(facts[name], "I do not know, 12 or 2160.") == 0


def test_draws_are_spread_over_the_counted_boots_of_an_arm() -> None:
    found = config(probe={"draws": 5})
    seeds = [[ask.seed for ask in ab_prompts.probe_asks(found, "fix", place)] for place in range(2)]
    assert seeds == [[0, 1, 2], [3, 4]]
    assert all(not ask.greedy for ask in ab_prompts.probe_asks(found, "base", 0))
    assert ab_prompts.probe_asks(config(probe={"draws": 0}), "fix", 0) == []
