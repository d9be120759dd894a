"""What `flashqsa ab` is told: two arms, the order of boots, what is asked of each, and what its log is searched for.

A TOML file, read by tomlkit and checked by pydantic. Whatever is wrong is said with the key it stands at.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import shlex
import string
import typing
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import tomlkit
import tomlkit.exceptions
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from flashqsa.cli.show import UserError

TEXTS = Path(__file__).parent / "ab_text"
"""The texts that come with the package."""

COLD = "cold"
PLACEHOLDERS = frozenset({"port", "python"})
OWN_LINES = {
    "FlashQSA route": r"(?P<stage>\w+)\s+takes\s+(?P<route>\w+(?::\w+)?)\s+on\s+[\w:]+\s+\(",
    "left to the stock layer": r"the\s+stock\s+sparse\s+layer\s+runs\s+instead\s+of\s+FlashQSA",
}
"""What FlashQSA logs (`route.py`, and the hand-overs of the Transformers integration). Long lines may be wrapped."""

WORKER = r"\((?P<worker>[A-Za-z]\w*) pid=\d+\)"
"""How vLLM marks the lines of its workers."""

OWN_KEYS = {
    "messages": "it is what is asked",
    "stream": "answers are always streamed",
    "n": "there is one answer to a request",
    "max_tokens": "new_tokens of long, decode, quality and probe say it",
    "temperature": "it is 0, and probe.temperature for the draws",
    "seed": "the draws have their own",
    "model": "the arm's key model says it",
}
"""Keys of a request's body that the rest of the file decides, and where."""

LONGEST_S = 1e6
"""The longest wait that can be asked, 11 days: the system refuses longer ones only once they begin."""

MOST_TOKENS, MOST_ANSWERED, MOST_REQUESTS = 16_000_000, 2**31 - 1, 10_000
"""Of one prompt, of one answer, and of requests of one kind: above every model's context, and within memory."""


class Part(BaseModel):
    """A table of the file: no unknown keys, no conversion between types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def pattern(text: str) -> str:
    """A regular expression that finds something and not nothing. Raises ValueError."""
    try:
        with warnings.catch_warnings():
            # Of what a later Python may read otherwise: this one reads it as it stands.
            warnings.simplefilter("ignore", FutureWarning)
            found = re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"wanted a regular expression: {error}") from error
    if found.search(""):
        raise ValueError(f"wanted a regular expression that does not match an empty text; got {text!r}")
    return text


def _without_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError(f"wanted a text without the character of code 0; got {text!r}")
    return text


def _with_placeholders(text: str) -> str:
    _without_nul(text)
    try:
        parsed = list(string.Formatter().parse(text))
        names = {name for _, name, _, _ in parsed if name is not None}
        if names <= PLACEHOLDERS and any(how or turned for _, _, how, turned in parsed):
            raise ValueError("{port} and {python} take no format")
    except ValueError as error:
        raise ValueError(f"wanted a text with {{port}} or {{python}} in it (a brace is doubled): {error}") from error
    if not names <= PLACEHOLDERS:
        raise ValueError(f"wanted no placeholder but {{port}} and {{python}}; {{{min(names - PLACEHOLDERS)}}} is none")
    return text


def _address(text: str) -> str:
    try:
        url = httpx.URL(_with_placeholders(text).format(port=1, python="python"))
    except httpx.InvalidURL as error:
        raise ValueError(f"wanted an address: {error}; got {text!r}") from error
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError(f"wanted an address that begins with http:// or https:// and a host; got {text!r}")
    return text


def _words(command: object) -> object:
    """A command as its words."""
    try:
        words = shlex.split(command) if isinstance(command, str) else command
    except ValueError as error:
        raise ValueError(f"wanted a line as a shell reads it: {error}") from error
    if not isinstance(words, list) or not words or not words[0]:
        raise ValueError(f"wanted a program and its arguments, as one line or as a list of words; got {command!r}")
    return words


def _variable(name: str) -> str:
    if not name or "=" in _without_nul(name):
        raise ValueError(f"wanted the name of an environment variable; got {name!r}")
    return name


def _body(body: dict[str, Any]) -> dict[str, Any]:
    """Keys of a request's body, which JSON can carry and which nothing else decides."""
    for key, value in body.items():
        if key in OWN_KEYS:
            raise ValueError(f"{key}: wanted other keys than those of every request: {OWN_KEYS[key]}")
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{key}: wanted what JSON can carry: {error}") from error
    return body


Pattern = Annotated[str, AfterValidator(pattern)]
Template = Annotated[str, AfterValidator(_with_placeholders)]
Address = Annotated[str, AfterValidator(_address)]
Name = Annotated[str, AfterValidator(_without_nul)]
Body = Annotated[dict[str, Any], AfterValidator(_body)]
Seconds = Annotated[float, Field(gt=0, le=LONGEST_S)]
Count = Annotated[int, Field(ge=0, le=MOST_REQUESTS)]
Positive = Annotated[int, Field(ge=1, le=MOST_REQUESTS)]
Answered = Annotated[int, Field(ge=1, le=MOST_ANSWERED)]


class Arm(Part):
    """One way of serving. In every text `{port}` stands for the port and `{python}` for this Python.

    command          the server's words; the file may give one line as a shell reads it, but no shell runs it
    environment      variables beside those that `flashqsa ab` itself has
    folder           where it runs; a relative one starts at the file
    url              what `/chat/completions` follows
    ready            answered with 200 once requests can come
    model            as requests name it; left out where None
    metrics          a page of Prometheus metrics, read before and after each request; None for none
    body             more keys of every request's JSON body
    ready_timeout_s  how long it may take to be ready
    stop_timeout_s   how long it may take to end after it was told to
    """

    command: Annotated[list[Template], BeforeValidator(_words)]
    environment: dict[Annotated[str, AfterValidator(_variable)], Template] = {}
    folder: Name = "."
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    url: Address = "http://localhost:{port}/v1"
    ready: Address = "http://localhost:{port}/health"
    model: str | None = None
    metrics: Address | None = None
    body: Body = {}
    ready_timeout_s: Seconds = 900.0
    stop_timeout_s: Seconds = 60.0

    def filled(self, text: str, python: str) -> str:
        """A text with its placeholders filled."""
        return text.format(port=self.port, python=python)

    def words(self, python: str) -> list[str]:
        """The command's words."""
        return [self.filled(word, python) for word in self.command]


class Plan(Part):
    """When which arm boots: an entry is the name of an arm, or `cold:` and the name for a boot that is not counted."""

    order: list[str] = []
    request_timeout_s: Seconds = 900.0


class Long(Part):
    """Long prompts, in the order they are sent; what is measured is the time to the first token.

    uncounted             so many of the first of a boot are sent and not counted
    texts                 UTF-8 files to make them from; none for the text that comes with the package
    characters_per_token  None to learn it from the token count that the first server reports
    """

    tokens: list[Annotated[int, Field(ge=1, le=MOST_TOKENS)]] = [29_000, 29_000, 29_000, 29_000, 184_000, 250_000]
    uncounted: Count = 1
    new_tokens: Answered = 128
    texts: list[Name] = []
    characters_per_token: Annotated[float, Field(ge=0.01, le=100)] | None = None

    @model_validator(mode="after")
    def _some_count(self) -> Long:
        if self.tokens and self.uncounted >= len(self.tokens):
            raise ValueError(f"uncounted: wanted fewer than long.tokens has, {len(self.tokens)}; got {self.uncounted}")
        return self


class Decode(Part):
    """Short prompts with long answers; what is measured is decode speed."""

    kinds: list[Literal["prose", "code", "edit"]] = ["prose", "code", "edit"]
    new_tokens: Answered = 512
    repeats: Positive = 1

    @model_validator(mode="after")
    def _kinds_stand_once(self) -> Decode:
        if len(set(self.kinds)) < len(self.kinds):
            raise ValueError("kinds: wanted each kind once; decode.repeats asks them again")
        return self


class Quality(Part):
    """Questions with facts that a right answer holds. `file` has the form of `ab_text/questions.toml`."""

    file: Name | None = None
    new_tokens: Annotated[int, Field(ge=0, le=MOST_ANSWERED)] = 256


class Probe(Part):
    """One prompt drawn many times: how often does an answer hold what `pattern` finds and its prompt lacks?

    draws        per arm, spread over its counted boots
    text         None for the one of `ab_text/questions.toml`
    pattern      the facts that can be invented; numbers by default
    body         more keys of these requests' JSON body, beside the arm's
    """

    draws: Count = 16
    temperature: Annotated[float, Field(gt=0)] = 1.0
    new_tokens: Answered = 200
    text: str | None = None
    pattern: Pattern = r"\d+(?:[.,]\d+)*"
    body: Body = {}


class Evidence(Part):
    """Regular expressions that are searched for in every boot's log; named groups tell findings apart.

    flashqsa  also search for FlashQSA's own lines
    worker    finds in a line which process wrote it, as group `worker`; lines without one are the server's own
    """

    flashqsa: bool = True
    patterns: dict[str, Pattern] = {}
    worker: Pattern = WORKER

    @model_validator(mode="after")
    def _worker_has_its_group(self) -> Evidence:
        if "worker" not in re.compile(self.worker).groupindex:
            raise ValueError("worker: wanted a regular expression with a group (?P<worker>...)")
        return self

    def every_pattern(self) -> dict[str, str]:
        """The file's patterns, and FlashQSA's."""
        return {**(OWN_LINES if self.flashqsa else {}), **self.patterns}


@dataclass(frozen=True)
class Boot:
    """One start of a server.

    >>> print(Boot(0, "base", counted=False), Boot(3, "base", counted=True), sep=", ")
    00-cold-base, 03-base
    """

    index: int
    arm: str
    counted: bool

    def __str__(self) -> str:
        return f"{self.index:02d}-{'' if self.counted else COLD + '-'}{self.arm}"


class Config(Part):
    """The whole file."""

    arms: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9_]{1,64}$")], Arm]
    plan: Plan = Plan()
    long: Long = Long()
    decode: Decode = Decode()
    quality: Quality = Quality()
    probe: Probe = Probe()
    evidence: Evidence = Evidence()

    @model_validator(mode="after")
    def _arms_and_order_agree(self) -> Config:
        if len(self.arms) != 2:
            raise ValueError(f"arms: wanted two, the first to compare with; got {', '.join(self.arms) or 'none'}")
        for index, entry in enumerate(self.plan.order):
            if entry.removeprefix(f"{COLD}:") not in self.arms:
                wanted = ", ".join(f"{name}, {COLD}:{name}" for name in self.arms)
                raise ValueError(f"plan.order.{index}: wanted one of {wanted}; got {entry!r}")
        counted = {boot.arm for boot in self.boots() if boot.counted}
        if counted != set(self.arms):
            missing = ", ".join(name for name in self.arms if name not in counted)
            raise ValueError(f"plan.order: wanted a counted boot of each arm; none of {missing}")
        return self

    def boots(self) -> list[Boot]:
        """The boots in order; where the file names none: cold, first, second, first, second."""
        names = list(self.arms)
        order = self.plan.order or [f"{COLD}:{names[0]}", *names, *names]
        return [
            Boot(index, entry.removeprefix(f"{COLD}:"), counted=not entry.startswith(f"{COLD}:"))
            for index, entry in enumerate(order)
        ]

    def fingerprint(self) -> str:
        """Tells runs apart whose answers may not be put together; what logs are searched for does not count."""
        content = self.model_dump(mode="json", exclude={"evidence"})
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def parse_toml(text: str, source: str) -> dict[str, Any]:
    """The tables of a TOML text. Raises UserError with the line of what cannot be read."""
    try:
        return tomlkit.parse(text).unwrap()
    except tomlkit.exceptions.TOMLKitError as error:
        raise UserError(f"{source}: not TOML: {error}") from error


def read_text(path: Path, what: str) -> str:
    """A UTF-8 file. Raises UserError."""
    try:
        # Some editors mark the beginning of UTF-8.
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"{what} {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{what} {path}: not UTF-8 text ({error.reason} at byte {error.start})") from error


def read_config(path: Path) -> Config:
    """The configuration of a file, with its paths made absolute. Raises UserError, which names the key."""
    config = checked(parse_toml(read_text(path, "configuration"), str(path)), str(path))
    home = path.resolve().parent

    def absolute(name: str, key: str) -> str:
        try:
            return str(home / Path(name).expanduser())
        except RuntimeError as error:
            raise UserError(f"{path}: {key}: wanted a path: {error}; got {name!r}") from error

    arms = {
        name: arm.model_copy(update={"folder": absolute(arm.folder, f"arms.{name}.folder")})
        for name, arm in config.arms.items()
    }
    for name, arm in arms.items():
        if not Path(arm.folder).is_dir():
            raise UserError(f"{path}: arms.{name}.folder: no such folder: {arm.folder}")
    long = config.long.model_copy(update={"texts": [absolute(text, "long.texts") for text in config.long.texts]})
    file = config.quality.file
    quality = config.quality.model_copy(update={"file": None if file is None else absolute(file, "quality.file")})
    return config.model_copy(update={"arms": arms, "long": long, "quality": quality})


def checked(content: dict[str, Any], source: str) -> Config:
    """The configuration of tables that were read. Raises UserError."""
    try:
        return Config.model_validate(content)
    except ValidationError as error:
        raise UserError(f"{source}: {'; '.join(dict.fromkeys(_messages(error)))}") from error


def _messages(error: ValidationError) -> Iterator[str]:
    for found in error.errors(include_url=False):
        # For a key that is wrong itself pydantic adds a part that no file has.
        place = [str(part) for part in found["loc"] if part != "[key]"]
        key = ".".join(place)
        if found["type"] == "extra_forbidden":
            near = difflib.get_close_matches(place[-1], _keys_at(place[:-1]), n=1)
            yield f"{key}: no such key{f'; {near[0]} is one' if near else ''}"
        elif found["type"] == "missing":
            yield f"{key}: missing"
        elif found["type"] == "value_error":
            message = str(found["ctx"]["error"])
            # What concerns several keys names them itself.
            yield (
                f"{key}.{message}"
                if key and re.match(r"[\w.]+: ", message)
                else f"{key}: {message}"
                if key
                else message
            )
        else:
            wanted = (
                found["msg"].replace("Input should be", "wanted").replace("String should", "wanted a text that should")
            )
            yield f"{key}: {wanted[:1].lower()}{wanted[1:]}; got {found['input']!r}"


def _keys_at(place: list[str]) -> list[str]:
    """The keys of the table at a place."""
    part: Any = Config
    for name in place:
        inner = typing.get_args(part)
        part = inner[-1] if inner else part.model_fields[name].annotation
    return list(part.model_fields)


def write_example(path: Path) -> None:
    """Writes a commented file that runs as it is. Raises UserError where there is one already."""
    try:
        with path.open("x", encoding="utf-8") as target:
            target.write((TEXTS / "example.toml").read_text(encoding="utf-8"))
    except FileExistsError as error:
        raise UserError(f"{path}: is there already") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from error
