"""What a server is asked: long prompts, decode tasks, questions with known answers and a probe; the same every time.

Prompts of any length are made from paragraphs that are put in an order drawn from a seed, so the same texts and sizes
give the same prompts on every machine, and no two prompts of a boot begin alike: a server that keeps prefixes has
nothing to reuse.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashqsa.cli.ab_config import TEXTS, Config, parse_toml, pattern, read_text
from flashqsa.cli.show import UserError

KINDS = ("hello", "long", "decode", "quality", "probe")
GATES = ("north", "river", "upper")
"""Each long prompt hides a number for each of these, at a tenth, at half and at nine tenths of its length."""

QUESTION = "question-"
"""How names of questions begin."""

QUESTION_KEYS = {"name": str, "text": str, "facts": list}
HELLO_CHARACTERS = 2000
CHARACTERS_PER_TOKEN = 4.2
"""Taken where no server reports how many tokens a prompt has: about that of English text in large vocabularies."""

LIKELY_CHARACTERS = 0.25, 25.0
"""What text may have in characters per token, from tokens of parts of a byte on; other counts are not believed."""


@dataclass(frozen=True)
class Ask:
    """One request.

    name         tells it from the others of a boot
    kind         one of KINDS
    group        what its measure is averaged with: `29k`, `prose`
    text         the user's message
    new_tokens   the most that are answered
    counted      whether its measure counts
    temperature  0 for greedy
    seed         None where the answer is greedy
    facts        regular expressions that a right answer holds
    body         more keys of the request's JSON body
    """

    name: str
    kind: str
    group: str
    text: str
    new_tokens: int
    counted: bool = True
    temperature: float = 0.0
    seed: int | None = None
    facts: tuple[str, ...] = ()
    body: Mapping[str, Any] = field(default_factory=dict)

    @property
    def greedy(self) -> bool:
        """Whether the same text must come every time."""
        return self.temperature == 0


def short(tokens: int) -> str:
    """A size as people say it.

    >>> short(29_000), short(1500), short(600)
    ('29k', '1.5k', '600')
    """
    return f"{tokens / 1000:g}k" if tokens >= 1000 else str(tokens)


def source_text(paths: Sequence[str]) -> str:
    """The files that long prompts are made from, one after the other; without any, the bundled text. UserError."""
    chosen = [Path(path) for path in paths] or [TEXTS / "harbour.txt"]
    text = "\n\n".join(read_text(path, "long.texts:") for path in chosen)
    if not text.split():
        raise UserError(f"long.texts: wanted some text; {', '.join(map(str, chosen))} has none")
    return text


def shuffled(text: str, seed: str) -> Iterator[str]:
    """The paragraphs of a text, over and over, in an order drawn anew each time; every one has a number of its own."""
    paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", text) if part.strip()]
    # `random()` of a seed is the same in every Python; `shuffle` has changed.
    draw, number = random.Random(seed), 0
    while True:
        for paragraph in sorted(paragraphs, key=lambda _: draw.random()):
            number += 1
            yield f"{number}. {paragraph}\n\n"


def of_length(text: str, characters: int, seed: str) -> str:
    """Exactly so many characters of shuffled paragraphs, the last one cut."""
    found, length = [], 0
    for paragraph in shuffled(text, seed):
        found.append(paragraph)
        length += len(paragraph)
        if length >= characters:
            break
    return "".join(found)[:characters]


def hello(text: str) -> Ask:
    """A short request of known size, sent first: it tells how many tokens its text is, and what the server accepts."""
    return Ask("hello", "hello", "hello", of_length(text, HELLO_CHARACTERS, "hello"), 1, counted=False)


def long_ask(text: str, name: str, tokens: int, characters_per_token: float, new_tokens: int, counted: bool) -> Ask:
    """A prompt of about so many tokens: text with three numbers in it, which the end asks for."""
    draw = random.Random(f"gates of {name}")
    # Six digits: more than any paragraph's number has.
    codes = [str(100_000 + int(draw.random() * 900_000)) for _ in GATES]
    end = (
        "\n\nEnd of the document. First list the numbers of the north gate, the river gate and the upper gate as the "
        "document gives them. Then say in three sentences what the document is about."
    )
    head = f"Document {name}, to be read as a whole.\n\n"
    hidden = [f"The number of the {gate} gate is {code}. " for gate, code in zip(GATES, codes, strict=True)]
    others = len(head) + sum(map(len, hidden)) + len(end)
    body = of_length(text, max(int(tokens * characters_per_token) - others, 1), name)
    pieces, start = [], 0
    for said, share in zip(hidden, (0.1, 0.5, 0.9), strict=True):
        place = int(len(body) * share)
        # After a sentence where one ends in between, else after a word.
        sentence, word = (body.rfind(mark, start, place) + len(mark) for mark in (". ", " "))
        place = max(sentence if sentence > 1 else word, start)
        pieces += [body[start:place], said]
        start = place
    whole = head + "".join([*pieces, body[start:]]) + end
    return Ask(name, "long", short(tokens), whole, new_tokens, counted, facts=tuple(rf"\b{code}\b" for code in codes))


def long_asks(config: Config, text: str, characters_per_token: float) -> list[Ask]:
    """The long prompts in order."""
    long = config.long
    return [
        long_ask(
            text, f"{short(tokens)}-{index}", tokens, characters_per_token, long.new_tokens, index >= long.uncounted
        )
        for index, tokens in enumerate(long.tokens)
    ]


def decode_asks(config: Config) -> list[Ask]:
    """The decode tasks, as often as asked; a repeated one begins with its number."""
    ledger = read_text(TEXTS / "ledger.txt", "text")
    tasks = {
        "prose": "Tell at length, in plain prose, how a small harbour lives through one year, month by month.",
        "code": "Write a Python module that keeps a timetable of ferries: arrivals, departures, delays, and a table "
        "for printing. Use dataclasses and docstrings, and write tests for it. Give code only.",
        "edit": "Rename the class Stay to Visit everywhere in the following file, change nothing else, and give the "
        f"whole file back.\n\n{ledger}",
    }
    return [
        Ask(f"{kind}-{turn}", "decode", kind, f"Task {turn + 1}. {tasks[kind]}", config.decode.new_tokens)
        for turn in range(config.decode.repeats)
        for kind in config.decode.kinds
    ]


def question_file(config: Config) -> tuple[str, dict[str, Any]]:
    """The questions and where they stand. Raises UserError, which names the key."""
    path = TEXTS / "questions.toml" if config.quality.file is None else Path(config.quality.file)
    return str(path), parse_toml(read_text(path, "quality.file:"), str(path))


def quality_asks(config: Config) -> list[Ask]:
    """The questions whose answers are known; none for `new_tokens = 0`. Raises UserError."""
    if config.quality.new_tokens == 0:
        return []
    source, content = question_file(config)
    found: list[Ask] = []
    questions = content.get("question")
    if not isinstance(questions, list) or not questions:
        raise UserError(f"{source}: question: wanted tables [[question]]; quality.new_tokens = 0 asks none")
    # The file that comes with the package has the probe's prompt too.
    for key in sorted(content.keys() - {"question", "probe"}):
        raise UserError(f"{source}: {key}: no such key; question is one")
    for index, question in enumerate(questions):
        if not isinstance(question, dict):
            raise UserError(f"{source}: question: wanted tables [[question]]")
        for key, kind in QUESTION_KEYS.items():
            if not isinstance(question.get(key), kind) or not question[key]:
                raise UserError(f"{source}: question.{index}.{key}: wanted; got {question.get(key)!r}")
        for key in sorted(question.keys() - QUESTION_KEYS.keys()):
            raise UserError(f"{source}: question.{index}.{key}: no such key; wanted {', '.join(QUESTION_KEYS)}")
        for place, fact in enumerate(question["facts"]):
            try:
                pattern(fact)
            except (ValueError, TypeError) as error:
                said = str(error) if isinstance(fact, str) else f"wanted a regular expression; got {fact!r}"
                raise UserError(f"{source}: question.{index}.facts.{place}: {said}") from error
        name = question["name"]
        if name in {ask.group for ask in found}:
            raise UserError(f"{source}: question.{index}.name: wanted a name of its own; got {name!r} again")
        facts = tuple(question["facts"])
        found.append(
            Ask(f"{QUESTION}{name}", "quality", name, question["text"], config.quality.new_tokens, facts=facts)
        )
    return found


def probe_text(config: Config) -> str:
    """The prompt of the probe. Raises UserError."""
    if config.probe.text is not None:
        return config.probe.text
    source = TEXTS / "questions.toml"
    return str(parse_toml(read_text(source, "text"), str(source))["probe"]["text"]).strip()


def probe_asks(config: Config, arm: str, place: int) -> list[Ask]:
    """The draws of one counted boot.

    place  which of its arm's counted boots it is; the first ones take what does not divide
    """
    boots = sum(boot.counted and boot.arm == arm for boot in config.boots())
    each, left = divmod(config.probe.draws, boots)
    first = place * each + min(place, left)
    probe, text = config.probe, probe_text(config)
    return [
        Ask(
            f"draw-{index}",
            "probe",
            "probe",
            text,
            probe.new_tokens,
            temperature=probe.temperature,
            seed=index,
            body=probe.body,
        )
        for index in range(first, first + each + (place < left))
    ]
