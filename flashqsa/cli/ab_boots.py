"""A server as a child: started, waited for, ended with all it started, its log kept."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import httpx
import psutil

from flashqsa import knobs
from flashqsa.cli.ab_config import Arm
from flashqsa.cli.ab_interrupts import Interrupts
from flashqsa.cli.show import UserError

POLL_S = 0.1
REMNANT_S = 5.0
"""How long what a server left behind may take to end once it is told to."""

READY_TIMEOUT_S, KILLED_S, ROUNDS = 10.0, 10.0, 5
LOG_LINES, LOG_BYTES = 20, 8192
"""What is shown of a log's end, at most."""

MARK = "AB_OF_FLASHQSA"
"""A variable that a server and all it starts have, each boot with another value: what has left the server's session and
lost its parent, as a daemon does, is found by it."""

CONTROLS = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
"""What a terminal would obey, and not show."""


class BootError(Exception):
    """A boot that cannot go on: the server ended, or was never ready. Its text is one line."""


def log_end(path: Path, lines: int = LOG_LINES) -> str:
    """The last lines of a log, LOG_BYTES at most and as plain text; empty where there is none."""
    try:
        with path.open("rb") as source:
            source.seek(max(source.seek(0, os.SEEK_END) - LOG_BYTES, 0))
            text = source.read().decode(errors="replace")
    except OSError:
        return ""
    return CONTROLS.sub("", "\n".join(text.splitlines()[-lines:]))


@dataclass(frozen=True)
class Ended:
    """How a server ended.

    code       its exit code; negative for the signal that killed it
    seconds    from being told to end to the end
    killed     whether it had to be killed
    remnants   processes that it had started and that were still there after it
    """

    code: int
    seconds: float
    killed: bool
    remnants: int

    def __str__(self) -> str:
        how = "killed, since it did not end" if self.killed else f"ended with code {self.code}"
        left = f", {self.remnants} processes of its own were left and ended" if self.remnants else ""
        return f"{how} after {self.seconds:.1f} s{left}"


@dataclass
class Server:
    """One server, from `start` to the end of its `with` block.

    It is the leader of a session of its own, so control-C reaches it through us alone, and everything that it starts
    can be found.

    interrupts  what to hold back while the server is started and ended
    """

    arm: Arm
    log: Path
    interrupts: Interrupts = field(default_factory=Interrupts)
    ended: Ended | None = None
    _mark: str = field(default_factory=lambda: secrets.token_hex(8), repr=False)
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def __enter__(self) -> Server:
        return self

    def start(self) -> None:
        """Starts it, inside the `with` block. Raises UserError for a port in use and what cannot be started."""
        if in_use(self.arm.port):
            raise UserError(
                f"port {self.arm.port}: something answers there already, which is not the server to measure"
            )
        words = self.arm.words(sys.executable)
        changes = {name: self.arm.filled(text, sys.executable) for name, text in self.arm.environment.items()}
        # A server that is killed should not take the end of its log with it.
        environment = knobs.environment_with({"PYTHONUNBUFFERED": "1", **changes, MARK: self._mark})
        with self.interrupts.held():
            try:
                self.log.parent.mkdir(parents=True, exist_ok=True)
                target = self.log.open("wb")
            except OSError as error:
                raise UserError(f"{self.log}: cannot be written: {error.strerror or error}") from error
            try:
                self._process = subprocess.Popen(
                    words,
                    cwd=self.arm.folder,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=target,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise UserError(f"command {words[0]}: cannot be started: {error.strerror or error}") from error
            finally:
                target.close()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self.stop()

    @property
    def child(self) -> subprocess.Popen[bytes]:
        """The server's process."""
        assert self._process is not None, "started"
        return self._process

    def check_alive(self) -> None:
        """Raises BootError where the server has ended."""
        code = self.child.poll()
        if code is not None:
            raise BootError(f"the server {_ending(code)}")

    def check_goes_on(self, seconds: float) -> None:
        """Raises BootError where the server ends within a while, or nothing listens after it.

        A server that answers its ready URL in between goes on.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.check_alive()
            if self._ready(seconds) is None:
                return
            time.sleep(POLL_S)
        self.check_alive()
        if not in_use(self.arm.port):
            raise BootError(f"nothing listens at port {self.arm.port} any more")

    def check_answers(self, seconds: float) -> None:
        """Raises BootError where the ready URL is not answered with 200 within a while."""
        said = self._ready(seconds)
        if said is not None:
            address = self.arm.filled(self.arm.ready, sys.executable)
            raise BootError(f"the server answers no request any more, nor at {address}: {said}")

    def _ready(self, timeout_s: float) -> str | None:
        """None where the ready URL answers 200, else what is wrong."""
        try:
            address = self.arm.filled(self.arm.ready, sys.executable)
            # The server stands on this machine: no proxy that the environment names leads to it.
            with httpx.stream("GET", address, timeout=timeout_s, trust_env=False) as answer:
                status = answer.status_code
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return f"{type(error).__name__}: {error}"
        return None if status == httpx.codes.OK else f"it answered {status}"

    def wait_until_ready(self, tick: Callable[[], None] = lambda: None) -> float:
        """Seconds until the ready URL answers 200. Raises BootError where the server ends before, or takes too long."""
        started = time.monotonic()
        while True:
            said = self._ready(min(self.arm.ready_timeout_s, READY_TIMEOUT_S))
            # Also where there is an answer: it may be another's, who holds the port for which ours has died.
            self.check_alive()
            if said is None:
                return time.monotonic() - started
            if time.monotonic() - started > self.arm.ready_timeout_s:
                address = self.arm.filled(self.arm.ready, sys.executable)
                raise BootError(f"not ready after {self.arm.ready_timeout_s:g} s at {address}: {said}")
            tick()
            time.sleep(POLL_S)

    def stop(self) -> Ended:
        """Tells the server to end, kills it where it does not, and ends what it left behind.

        What interrupts meanwhile is held back, and means now: the server is killed at once. Raises UserError for one
        that not even that ends, as where it waits for a driver: the next would be measured beside it.
        """
        if self.ended is not None:
            return self.ended
        started, interrupted = time.monotonic(), self.interrupts.count
        with self.interrupts.held():
            mine = family(self.child.pid, self._mark)
            if self.child.poll() is None:
                self.child.send_signal(signal.SIGTERM)
            while self.child.poll() is None and self.interrupts.count == interrupted:
                if time.monotonic() - started > self.arm.stop_timeout_s:
                    break
                time.sleep(POLL_S)
            killed = self.child.poll() is None
            took = time.monotonic() - started
            if killed:
                mine |= family(self.child.pid, self._mark)
                self.child.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.child.wait(KILLED_S)
            remnants = end_all({*mine, *family(self.child.pid, self._mark)})
            for _ in range(ROUNDS):
                # What was just being started while the others were counted.
                late = end_all(family(self.child.pid, self._mark))
                remnants += late
                if not late:
                    break
            code = self.child.poll()
            if code is None:
                raise UserError(
                    f"process {self.child.pid}: the server does not end though it was killed; see to it first"
                )
            self.ended = Ended(code, took, killed, remnants)
        return self.ended


def _ending(code: int) -> str:
    """What an exit code says."""
    if code >= 0:
        return f"ended with code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def in_use(port: int) -> bool:
    """Whether something listens at a port of this machine."""
    try:
        with socket.create_connection(("localhost", port), timeout=1.0):
            return True
    except OSError:
        return False


def family(leader: int, mark: str) -> set[psutil.Process]:
    """What a leader started: its session, its descendants, and whoever has its mark. Not the leader."""
    found: set[psutil.Process] = set()
    for process in psutil.process_iter(["environ"]):
        try:
            # Its variables are None where they belong to somebody else.
            marked = (process.info["environ"] or {}).get(MARK) == mark
            if process.pid != leader and (marked or _session(process.pid) == leader):
                found.add(process)
        except (psutil.Error, OSError):
            continue
    try:
        found.update(psutil.Process(leader).children(recursive=True))
    except psutil.Error:
        return found
    return found


def _session(pid: int) -> int:
    if sys.platform == "win32":
        return -1
    return os.getsid(pid)


def end_all(processes: set[psutil.Process]) -> int:
    """Ends processes, killing what does not end; returns how many were still there."""
    # Workers of a server that has ended take a moment to see it.
    alive = _wait(processes, 1.0)
    for process in alive:
        _quietly(process.terminate)
    for process in (stubborn := _wait(alive, REMNANT_S)):
        _quietly(process.kill)
    _wait(stubborn, KILLED_S)
    return len(alive)


def _wait(processes: set[psutil.Process], seconds: float) -> set[psutil.Process]:
    """What still runs after a while; a process that has ended and that nobody asked after does not run."""
    end = time.monotonic() + seconds
    while (alive := {process for process in processes if _runs(process)}) and time.monotonic() < end:
        time.sleep(POLL_S)
    return alive


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _quietly(action: Callable[[], None]) -> None:
    try:
        action()
    except psutil.Error:
        return
