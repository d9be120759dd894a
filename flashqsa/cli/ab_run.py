"""`flashqsa ab run`: boots in order, the same requests in each, and every answer kept."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from flashqsa.cli import ab_prompts
from flashqsa.cli.ab_acceptance import read_counters
from flashqsa.cli.ab_boots import BootError, Server, log_end
from flashqsa.cli.ab_config import Boot, Config, read_config
from flashqsa.cli.ab_folder import BootRecord, Prompts, RunFolder, now, versions
from flashqsa.cli.ab_interrupts import Interrupts
from flashqsa.cli.ab_prompts import CHARACTERS_PER_TOKEN, HELLO_CHARACTERS, LIKELY_CHARACTERS, Ask
from flashqsa.cli.ab_report import report
from flashqsa.cli.ab_requests import Answer, Talk, new_client
from flashqsa.cli.show import FAILED, Screen, UserError

DEATH_S = 2.0
"""After a failed request: how long a dying server may take to be seen dead."""

FAILED_IN_A_ROW, ANSWER_S = 3, 10.0
"""After so many failed requests: how long a server may take to say that it is there."""


def run(file: Path, out: Path | None, again: bool, screen: Screen) -> int:
    """Boots what is not done, and reports. Raises UserError.

    out    the run's folder; None for `FILE` without its ending and with `-run`
    again  also boot anew what died
    """
    if sys.platform == "win32":
        raise UserError("flashqsa ab run: wanted Linux or macOS: servers are ended through their session")
    config = read_config(file)
    # Whatever is wrong with the texts is said before a server is started.
    asked = Asks(config, CHARACTERS_PER_TOKEN).fingerprint()
    folder = RunFolder.begin(out or file.with_name(f"{file.stem}-run"), config, asked)
    _say_what_changed(folder, screen)
    try:
        with Interrupts().taken() as interrupts, _bars(screen) as bars:
            work = Work(folder, screen, bars, interrupts)
            for boot in config.boots():
                record = folder.record(boot)
                if record is not None and (record.done or not again):
                    screen.line(f"{boot}: kept from before ({record.status})")
                else:
                    record = work.carry_out(boot)
                    folder.keep(record)
                    screen.line(summary(record))
                work.advance_boot()
    except KeyboardInterrupt:
        screen.line(f"interrupted, and no server is left; the same command goes on from here: {folder.path}")
        return FAILED
    return report(folder, screen)


def _say_what_changed(folder: RunFolder, screen: Screen) -> None:
    """Says which versions are others than when the run began: its boots belong together."""
    before, after = folder.head.versions, versions()
    changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    told = ", ".join(f"{name} {before.get(name, 'none')}, now {after.get(name, 'none')}" for name in changed)
    if told:
        screen.line(f"since this run began, versions have changed: {told}; --out names a folder for a run of its own")


def summary(record: BootRecord) -> str:
    """One line of how a boot went."""
    if record.done:
        ready = "" if record.ready_s is None else f"ready after {record.ready_s:.1f} s, "
        errors = f"{len(record.errors)} of {len(record.answers)} requests failed"
        return f"{record.boot}: {ready}{errors}, {record.wall_s:.1f} s of requests, {record.stopped}"
    log = f"\n  the end of its log:\n{record.log_end}" if record.log_end else ""
    return f"{record.boot}: died: {record.reason}{log}"


@contextmanager
def _bars(screen: Screen) -> Iterator[Progress]:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=screen.progress) as progress:
        yield progress


class Asks:
    """What a boot is asked. The same text is the same prompt in every boot of a run.

    characters_per_token  of the model, as its first boot reported it. Raises UserError for texts that cannot be read
    """

    def __init__(self, config: Config, characters_per_token: float) -> None:
        self.config = config
        text = ab_prompts.source_text(config.long.texts)
        self.hello = ab_prompts.hello(text)
        self.measured = [
            *ab_prompts.long_asks(config, text, characters_per_token),
            *ab_prompts.decode_asks(config),
            *ab_prompts.quality_asks(config),
        ]
        self.probe = ab_prompts.probe_text(config)

    def prompts(self) -> Prompts:
        """Everything that is asked, as the run keeps it."""
        return Prompts(
            {ask.name: ask.text for ask in (self.hello, *self.measured)},
            {ask.name: list(ask.facts) for ask in self.measured if ask.facts},
            self.probe,
        )

    def fingerprint(self) -> str:
        """Tells runs apart that ask something else, though their configurations are the same: files change."""
        return hashlib.sha256(json.dumps(asdict(self.prompts()), sort_keys=True).encode()).hexdigest()

    def of(self, boot: Boot) -> list[Ask]:
        """The requests of one boot, after the first short one. A boot that is not counted draws nothing."""
        if not boot.counted:
            return self.measured
        same = [other for other in self.config.boots() if other.counted and other.arm == boot.arm]
        return [*self.measured, *ab_prompts.probe_asks(self.config, boot.arm, same.index(boot))]


@dataclass
class Work:
    """Boots, one after the other."""

    folder: RunFolder
    screen: Screen
    bars: Progress
    interrupts: Interrupts

    def __post_init__(self) -> None:
        self._boots: TaskID = self.bars.add_task("boots", total=len(self.folder.config.boots()))
        self._now: TaskID = self.bars.add_task("", total=None)

    def advance_boot(self) -> None:
        """One boot is done."""
        self.bars.advance(self._boots)

    def carry_out(self, boot: Boot) -> BootRecord:
        """One boot from start to end. Raises UserError where the server cannot be started at all."""
        config = self.folder.config
        arm, log = config.arms[boot.arm], self.folder.log(boot)
        started, ready_s, failure = now(), None, None
        answers: list[Answer] = []
        self.bars.reset(self._now, total=None, description=f"{boot}: starting")
        server = Server(arm, log, self.interrupts)
        try:
            with server:
                server.start()
                ready_s = server.wait_until_ready()
                with new_client() as client:
                    url = arm.filled(arm.url, sys.executable)
                    metrics = None if arm.metrics is None else arm.filled(arm.metrics, sys.executable)
                    talk = Talk(client, url, arm.model, arm.body, config.plan.request_timeout_s, metrics)
                    self._greet(server, talk, answers)
                    self._ask_all(boot, server, talk, answers)
                server.check_alive()
                self.bars.update(self._now, description=f"{boot}: stopping")
        except BootError as error:
            failure = error
        status = "done" if failure is None else "died"
        end = "" if failure is None else log_end(log)
        reason = None if failure is None else str(failure)
        return BootRecord(boot, status, reason, end, ready_s, str(server.ended), started, tuple(answers))

    def _greet(self, server: Server, talk: Talk, answers: list[Answer]) -> None:
        """The first short request. Raises BootError where it fails: what follows it would fail too, or differ."""
        answers.append(talk.ask(self._asks(CHARACTERS_PER_TOKEN).hello))
        error = answers[-1].error
        if error is not None:
            server.check_goes_on(DEATH_S)
            raise BootError(f"the first request failed: {error}")
        if talk.metrics is not None and read_counters(talk.client, talk.metrics) is None:
            self.screen.line(f"no metrics can be read at {talk.metrics}: no acceptance length from there")

    def _ask_all(self, boot: Boot, server: Server, talk: Talk, answers: list[Answer]) -> None:
        asks = self._asks(self._characters_per_token(answers[0])).of(boot)
        self.bars.reset(self._now, total=len(asks))
        for ask in asks:
            self.bars.update(self._now, description=f"{boot}: {ask.name}")
            answers.append(talk.ask(ask))
            self._check(server, answers)
            self.bars.advance(self._now)

    def _asks(self, characters_per_token: float) -> Asks:
        return Asks(self.folder.config, characters_per_token)

    def _check(self, server: Server, answers: list[Answer]) -> None:
        """After a request that failed: is the server still there? Raises BootError where it is not.

        One that hangs would be waited for as often as there are requests: after some it is asked whether it is ready.
        """
        if answers[-1].error is None:
            return
        server.check_goes_on(DEATH_S)
        last = answers[-FAILED_IN_A_ROW:]
        if len(last) == FAILED_IN_A_ROW and all(answer.error is not None for answer in last):
            server.check_answers(ANSWER_S)

    def _characters_per_token(self, hello: Answer) -> float:
        """The run's: kept from an earlier boot, else set in the configuration or learned now, and kept."""
        kept = self.folder.head.characters_per_token
        if kept is not None:
            return kept
        found = self.folder.config.long.characters_per_token or self._learned(hello.prompt_tokens)
        self.folder.remember(found, self._asks(found).prompts())
        return found

    def _learned(self, tokens: int | None) -> float:
        """From the tokens that a server reports for the first request; without a likely number, what is usual."""
        few, many = LIKELY_CHARACTERS
        if tokens and few <= HELLO_CHARACTERS / tokens <= many:
            return HELLO_CHARACTERS / tokens
        said = "does not say how many tokens a prompt has"
        if tokens is not None:
            said = f"says that {HELLO_CHARACTERS} characters of text are {tokens} tokens, which is not believed"
        self.screen.line(f"the server {said}; taken: {CHARACTERS_PER_TOKEN} characters each")
        return CHARACTERS_PER_TOKEN
