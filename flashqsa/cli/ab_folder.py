"""A run on disk: what it was told, its prompts, and for each boot its log and its answers.

    run.json                what was asked, with fingerprints, versions and the characters of a token
    prompts.json            every prompt that was sent, by name, and the facts that a right answer holds
    boots/03-base/log       what the server wrote
    boots/03-base/boot.json how the boot went and every answer; written once the boot is over

A boot without its `boot.json` was interrupted and is run again as a whole: figures of one boot belong together.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from flashqsa import __version__
from flashqsa.cli.ab_config import Boot, Config, checked
from flashqsa.cli.ab_requests import Answer
from flashqsa.cli.show import UserError

SCHEMA = 1
"""Counts up when a key of the JSON changes its meaning or goes."""

PACKAGES = ("torch", "transformers", "httpx", "triton", "vllm", "sglang")


@dataclass(frozen=True)
class BootRecord:
    """How one boot went.

    status   `done`, or `died`: the server was never ready, or ended before it was told to
    reason   why it died; None otherwise
    log_end  the last lines of its log where it died
    ready_s  from its start until it was ready; None where it never was
    stopped  how it ended, in words
    """

    boot: Boot
    status: str
    reason: str | None
    log_end: str
    ready_s: float | None
    stopped: str
    started: str
    answers: tuple[Answer, ...]

    @property
    def done(self) -> bool:
        """Whether the server lived until it was told to end."""
        return self.status == "done"

    @property
    def errors(self) -> list[Answer]:
        """Requests that went wrong."""
        return [answer for answer in self.answers if answer.error is not None]

    @property
    def wall_s(self) -> float:
        """Seconds of all requests together."""
        return sum(answer.wall_s for answer in self.answers)


def now() -> str:
    """The time as ISO 8601, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """Versions of what may matter here; a server may run in another environment and says its own in its log."""
    found = {"flashqsa": __version__, "python": platform.python_version(), "system": platform.platform()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Writes JSON whole or not at all. Raises UserError."""
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from error


def read(path: Path) -> dict[str, Any]:
    """JSON that `write` wrote. Raises UserError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: damaged: {error}") from error
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise UserError(f"{path}: wanted a file of `flashqsa ab` with schema {SCHEMA}")
    return content


@dataclass(frozen=True)
class Head:
    """What `run.json` holds.

    started               when the run began; `versions` are those of then
    fingerprint           of the configuration, and `asked` of the texts and questions that it names
    characters_per_token  of the model; None before the first boot has told
    """

    started: str
    versions: dict[str, str]
    fingerprint: str
    asked: str
    config: dict[str, Any]
    characters_per_token: float | None = None


@dataclass(frozen=True)
class Prompts:
    """What `prompts.json` holds: prompts by name, facts of those that have some, and the prompt of the draws."""

    prompts: dict[str, str]
    facts: dict[str, list[str]]
    probe: str


Kind = TypeVar("Kind")


def read_as(kind: type[Kind], path: Path) -> Kind:
    """JSON that `write` wrote, as a dataclass. Raises UserError for what is no such file, or is damaged."""
    content = read(path)
    try:
        return TypeAdapter(kind).validate_python(content)
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        place = ".".join(map(str, wrong["loc"]))
        raise UserError(f"{path}: damaged: {place}: {wrong['msg']}") from error


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run."""

    path: Path
    config: Config

    @staticmethod
    def begin(path: Path, config: Config, asked: str) -> RunFolder:
        """A new run, or one that was begun with the same configuration and texts. Raises UserError.

        asked  tells texts and questions apart: see `Asks.fingerprint`
        """
        run = path / "run.json"
        try:
            if run.exists():
                head = read_as(Head, run)
                if head.fingerprint != config.fingerprint():
                    raise UserError(f"{path}: holds a run of another configuration; name another folder with --out")
                if head.asked != asked:
                    raise UserError(
                        f"{path}: holds a run with other texts or questions: a file of long.texts or quality.file has "
                        "changed, or those that come with flashqsa; name another folder with --out"
                    )
            elif path.exists() and (not path.is_dir() or any(path.iterdir())):
                raise UserError(f"{path}: wanted a new folder or one of an earlier run; this is neither")
            else:
                head = Head(now(), versions(), config.fingerprint(), asked, {})
            (path / "boots").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{path}: cannot be made: {error.strerror or error}") from error
        folder = RunFolder(path, config)
        # Search patterns may have changed since.
        folder._keep_head(replace(head, config=config.model_dump(mode="json")))
        return folder

    @staticmethod
    def of(path: Path) -> RunFolder:
        """The folder of an earlier run. Raises UserError."""
        run = path / "run.json"
        if not run.is_file():
            raise UserError(f"{path}: no run of `flashqsa ab` is there")
        return RunFolder(path, checked(read_as(Head, run).config, str(run)))

    @property
    def head(self) -> Head:
        """`run.json`. Raises UserError."""
        return read_as(Head, self.path / "run.json")

    def remember(self, characters_per_token: float, prompts: Prompts) -> None:
        """Keeps what the first boot has told, and the prompts that are made with it. Raises UserError."""
        write(self.path / "prompts.json", {"schema": SCHEMA, **asdict(prompts)})
        self._keep_head(replace(self.head, characters_per_token=characters_per_token))

    def _keep_head(self, head: Head) -> None:
        write(self.path / "run.json", {"schema": SCHEMA, **asdict(head)})

    def prompts(self) -> Prompts:
        """What is asked; nothing where no server has come so far. Raises UserError."""
        if self.head.characters_per_token is None:
            return Prompts({}, {}, "")
        return read_as(Prompts, self.path / "prompts.json")

    def boot(self, boot: Boot) -> Path:
        """A boot's folder."""
        return self.path / "boots" / str(boot)

    def log(self, boot: Boot) -> Path:
        """A boot's log."""
        return self.boot(boot) / "log"

    def record(self, boot: Boot) -> BootRecord | None:
        """What is kept of a boot; None where it is not over. Raises UserError."""
        path = self.boot(boot) / "boot.json"
        if not path.exists():
            return None
        found = read_as(BootRecord, path)
        if found.boot != boot:
            raise UserError(f"{path}: damaged: wanted boot {boot}; got {found.boot}")
        return found

    def records(self) -> list[BootRecord]:
        """Every boot that is over, in order."""
        return [record for boot in self.config.boots() if (record := self.record(boot)) is not None]

    def keep(self, record: BootRecord) -> None:
        """Keeps a boot that is over."""
        write(self.boot(record.boot) / "boot.json", {"schema": SCHEMA, **asdict(record)})
