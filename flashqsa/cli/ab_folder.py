"""A run on disk: what it was told, its prompts, and for each boot its log and its answers.

    run.json                what was asked, with a fingerprint, versions and the characters of a token
    prompts.json            every prompt that was sent, by name
    boots/03-base/log       what the server wrote
    boots/03-base/boot.json how the boot went and every answer; written once the boot is over

A boot without its `boot.json` was interrupted and is run again as a whole: figures of one boot belong together.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

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
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise UserError(f"{path}: wanted a file of `flashqsa ab` with schema {SCHEMA}")
    return content


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run."""

    path: Path
    config: Config

    @staticmethod
    def begin(path: Path, config: Config) -> RunFolder:
        """A new run, or one that was begun with the same configuration. Raises UserError."""
        run = path / "run.json"
        content: dict[str, Any] = {"schema": SCHEMA, "started": now(), "versions": versions()}
        if run.exists():
            content = read(run)
            if content["fingerprint"] != config.fingerprint():
                raise UserError(f"{path}: holds a run of another configuration; name another folder with --out")
        elif path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise UserError(f"{path}: wanted a new folder or one of an earlier run; this is neither")
        try:
            (path / "boots").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{path}: cannot be made: {error.strerror or error}") from error
        # Search patterns may have changed since.
        write(run, {**content, "fingerprint": config.fingerprint(), "config": config.model_dump(mode="json")})
        return RunFolder(path, config)

    @staticmethod
    def of(path: Path) -> RunFolder:
        """The folder of an earlier run. Raises UserError."""
        run = path / "run.json"
        if not run.is_file():
            raise UserError(f"{path}: no run of `flashqsa ab` is there")
        return RunFolder(path, checked(read(run)["config"], str(run)))

    @property
    def head(self) -> dict[str, Any]:
        """`run.json`."""
        return read(self.path / "run.json")

    def remember(self, **values: Any) -> None:
        """Adds to `run.json`."""
        write(self.path / "run.json", {**self.head, **values})

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
        content = read(path)
        del content["schema"]
        answers = tuple(Answer(**answer) for answer in content.pop("answers"))
        return BootRecord(**{**content, "boot": Boot(**content["boot"]), "answers": answers})

    def records(self) -> list[BootRecord]:
        """Every boot that is over, in order."""
        return [record for boot in self.config.boots() if (record := self.record(boot)) is not None]

    def keep(self, record: BootRecord) -> None:
        """Keeps a boot that is over."""
        write(self.boot(record.boot) / "boot.json", {"schema": SCHEMA, **asdict(record)})
