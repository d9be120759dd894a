"""`flashqsa ab run`: servers that answer, die, stay silent or will not end, and a run that is interrupted."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httpx_sse")
pytest.importorskip("tomlkit")
pytest.importorskip("uvicorn")

import psutil
import tomlkit

from flashqsa.cli import ab as ab_command
from flashqsa.cli import ab_boots, ab_folder, ab_run
from flashqsa.cli.ab_boots import LOG_BYTES, Server, family, log_end
from flashqsa.cli.ab_config import Arm, Boot, checked, read_config
from flashqsa.cli.ab_folder import BootRecord, RunFolder
from flashqsa.cli.ab_interrupts import Interrupts
from flashqsa.cli.ab_prompts import CHARACTERS_PER_TOKEN
from flashqsa.cli.ab_run import Asks
from flashqsa.cli.serve import SERVER_PACKAGES
from tests import ab_server
from tests.ab_server import free_port
from tests.test_cli import invoke, refused

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="servers are ended through their session")

SERVER = str(Path(ab_server.__file__))
ROOT = str(Path(__file__).resolve().parent.parent)
SECONDS = 50
QUICK: dict[str, Any] = {
    "plan": {"order": ["base", "fix"], "request_timeout_s": 20.0},
    "long": {"tokens": [300, 300], "new_tokens": 4},
    "decode": {"kinds": ["prose"], "new_tokens": 8},
    "quality": {"new_tokens": 0},
    "probe": {"draws": 0},
}


def arm(*options: str, **keys: Any) -> dict[str, Any]:
    command = ["{python}", SERVER, "--port", "{port}", *options]
    return {
        "command": command,
        "port": free_port(),
        "environment": {"PYTHONPATH": ROOT},
        "stop_timeout_s": 20.0,
        **keys,
    }


def write(folder: Path, base: dict[str, Any], fix: dict[str, Any], **tables: Any) -> str:
    file = folder / "ab.toml"
    file.write_text(tomlkit.dumps({"arms": {"base": base, "fix": fix}, **(QUICK | tables)}))
    return str(file)


def reported(folder: Path) -> dict[str, Any]:
    content = json.loads((folder / "ab-run" / "report.json").read_text())
    assert isinstance(content, dict)
    return content


def boot(folder: Path, name: str) -> dict[str, Any]:
    content = json.loads((folder / "ab-run" / "boots" / name / "boot.json").read_text())
    assert isinstance(content, dict)
    return content


def test_two_arms_are_booted_in_order_and_reported(tmp_path: Path) -> None:
    (tmp_path / "place").mkdir()
    base = arm(metrics="http://localhost:{port}/metrics")
    fix = arm("--last", "other end.", folder="place", environment={"PYTHONPATH": ROOT, "AB_TEST": "set to {port}"})
    plan = {"order": ["cold:fix", "base", "fix", "base", "fix"]}
    probe = {"draws": 3, "new_tokens": 3}
    patterns = {"a request": r"request (?P<number>\d)$", "nothing": "no such line", "boots": "boots: good"}
    file = write(
        tmp_path, base, fix, plan=plan, probe=probe, quality={"new_tokens": 3}, evidence={"patterns": patterns}
    )
    result = invoke("ab", "run", file)
    assert result.exit_code == 0, result.output
    found = reported(tmp_path)
    assert found["complete"]
    assert [entry["boot"] for entry in found["boots"]] == ["00-cold-fix", "01-base", "02-fix", "03-base", "04-fix"]
    assert {entry["status"] for entry in found["boots"]} == {"done"}
    # hello, 2 long, 1 decode, 6 questions; draws in counted boots only, the odd one in an arm's first.
    assert [entry["requests"] for entry in found["boots"]] == [10, 12, 12, 11, 11]
    log = (tmp_path / "ab-run/boots/02-fix/log").read_text()
    assert f"boots: good, set to {fix['port']}, in {(tmp_path / 'place').resolve()}" in log

    measures = {(measure["name"], measure["group"]): measure for measure in found["measures"]}
    wanted = ("time to first token", "300"), ("prefill", "300"), ("decode", "prose"), ("decode step", "prose")
    for key in (*wanted, ("ready", "boot"), ("all greedy requests", "boot")):
        assert {name: list(side["boots"]) for name, side in measures[key]["arms"].items()} == {
            "base": ["01-base", "03-base"],
            "fix": ["02-fix", "04-fix"],
        }
    assert measures["acceptance length", "prose"]["arms"]["base"]["mean"] == 2.5
    assert measures["acceptance length", "prose"]["verdict"] == "not measured in both arms"
    # The first long request of a boot is not counted: one value is left, that of the second.
    second = next(answer for answer in boot(tmp_path, "01-base")["answers"] if answer["name"] == "300-1")
    assert measures[wanted[0]]["arms"]["base"]["boots"]["01-base"] == second["first_s"]

    texts = found["texts"]
    assert "differ between the arms only: 300-0, 300-1, prose-0, question-arithmetic" in texts["conclusion"]
    same = {tuple(pair["boots"]): pair["same"] for pair in texts["pairs"]}
    assert (same["01-base", "03-base"], same["00-cold-fix", "04-fix"], same["01-base", "02-fix"]) == (9, 9, 0)
    part = next(d for pair in texts["pairs"] for d in pair["differences"] if d["request"] == "prose-0")
    assert part["texts"] in (["end.", "other end."], ["other end.", "end."])

    evidence = {entry["label"]: entry["boots"] for entry in found["evidence"]}
    assert evidence["FlashQSA route: attend cpu:grouped"]["01-base"] == {"Worker_TP0": 12}
    assert evidence["a request: 3"]["04-fix"] == {"Worker_TP0": 1}
    assert evidence["boots"]["00-cold-fix"] == {"server": 1}
    assert evidence["nothing"] == evidence["left to the stock layer"] == {}
    assert [(probe["arm"], probe["draws"], probe["distinct"], probe["inventing"]) for probe in found["probe"]] == [
        ("base", 3, 1, 3),
        ("fix", 3, 1, 3),
    ]
    report = (tmp_path / "ab-run/report.md").read_text()
    assert "| FlashQSA route: attend cpu:grouped | Worker_TP0 10 | Worker_TP0 12 |" in report
    assert "other end." in report.partition("## Answers, side by side")[2]

    # What is done is kept; what logs are searched for may change, and nothing else.
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "ab-run/boots").rglob("*")}
    write(tmp_path, base, fix, plan=plan, probe=probe, quality={"new_tokens": 3}, evidence={"patterns": {"e": "4$"}})
    assert invoke("ab", "run", file).exit_code == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "ab-run/boots").rglob("*")} == before
    assert [entry["label"] for entry in reported(tmp_path)["evidence"]].count("e") == 1
    assert invoke("ab", "report", str(tmp_path / "ab-run")).exit_code == 0
    write(tmp_path, base, fix)
    refused(invoke("ab", "run", file), "holds a run of another configuration; name another folder with --out")


def test_a_boot_that_dies_is_told_with_its_log_and_the_rest_goes_on(tmp_path: Path) -> None:
    file = write(tmp_path, arm("--boot", "dies"), arm(), plan={"order": ["base", "fix"]})
    result = invoke("ab", "run", file)
    assert result.exit_code == 1
    dead, alive = reported(tmp_path)["boots"]
    assert (dead["status"], dead["reason"]) == ("died", "the server ended with code 1")
    assert dead["log_end"].splitlines()[-1] == "no memory left"
    assert alive["status"] == "done"
    assert not reported(tmp_path)["complete"]
    assert "no memory left" in result.output
    assert "no memory left" in (tmp_path / "ab-run/report.md").read_text()
    # It is a result and kept, unless it is asked for anew.
    started = [dead["started"], alive["started"]]
    time.sleep(1)
    invoke("ab", "run", file)
    assert [entry["started"] for entry in reported(tmp_path)["boots"]] == started
    invoke("ab", "run", file, "--again")
    again = [entry["started"] for entry in reported(tmp_path)["boots"]]
    assert again[0] > started[0]
    assert again[1] == started[1]


@pytest.mark.parametrize(
    ("mode", "reason"),
    [("unready", "it answered 503"), ("deaf", "ConnectError")],
)
def test_a_server_that_is_never_ready_is_given_up(mode: str, reason: str, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    file = write(tmp_path, arm("--boot", mode, "--pids", str(pids), ready_timeout_s=1.5), arm())
    assert invoke("ab", "run", file).exit_code == 1
    dead, alive = reported(tmp_path)["boots"]
    assert dead["status"] == "died"
    assert dead["reason"].startswith("not ready after 1.5 s at http://localhost:")
    assert reason in dead["reason"]
    assert alive["status"] == "done"


def test_a_server_that_dies_at_work_leaves_what_it_answered(tmp_path: Path) -> None:
    file = write(tmp_path, arm(model="dies"), arm())
    assert invoke("ab", "run", file).exit_code == 1
    dead, alive = reported(tmp_path)["boots"]
    assert (dead["status"], dead["reason"]) == ("died", "the server ended with code 7")
    assert dead["log_end"].endswith("about to die")
    answers = boot(tmp_path, "00-base")["answers"]
    assert [(answer["name"], answer["error"] is None) for answer in answers] == [("hello", True), ("300-0", False)]
    assert alive["status"] == "done"


def test_requests_that_fail_do_not_stop_a_boot_and_do_not_count(tmp_path: Path) -> None:
    file = write(tmp_path, arm(model="cut"), arm(model="busy"))
    result = invoke("ab", "run", file)
    assert result.exit_code == 1
    found = reported(tmp_path)
    assert [(entry["status"], len(entry["errors"])) for entry in found["boots"]] == [("done", 3), ("done", 3)]
    assert {measure["name"] for measure in found["measures"]} == {"ready"}
    assert found["texts"]["conclusion"] == "no greedy text was answered by two boots"
    assert "HTTP 429" in result.output
    assert "the server does not say how many tokens a prompt has" not in result.output


def test_a_server_that_refuses_the_first_request_is_asked_no_more(tmp_path: Path) -> None:
    fix = arm(model="unlikely", metrics="http://localhost:{port}/nowhere")
    result = invoke("ab", "run", write(tmp_path, arm(model="500"), fix))
    assert result.exit_code == 1
    refusing, unlikely = reported(tmp_path)["boots"]
    assert (refusing["status"], refusing["requests"]) == ("died", 1)
    assert refusing["reason"].startswith('the first request failed: HTTP 500: {"error": {"message": "out of luck')
    assert (unlikely["status"], unlikely["requests"]) == ("done", 4)
    # Nothing was learned from the boot that failed, and the other's count is not believed.
    assert "says that 2000 characters of text are 1000000 tokens, which is not believed" in result.output
    assert reported(tmp_path)["characters_per_token"] == CHARACTERS_PER_TOKEN
    assert f"no metrics can be read at http://localhost:{fix['port']}/nowhere" in result.output


def alive(pids: list[int]) -> list[int]:
    found = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    return [each.pid for each in found if each.status() != psutil.STATUS_ZOMBIE]


def wait_for(path: Path, text: str, run: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + SECONDS
    while not (path.exists() and text in path.read_text()):
        assert run.poll() is None
        assert time.monotonic() < end
        time.sleep(0.05)


SIGNALS = [
    ("parent", [signal.SIGINT]),
    ("parent", [signal.SIGTERM]),
    ("parent", [signal.SIGHUP]),
    ("parent", [signal.SIGQUIT]),
    ("parent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]),
    ("stubborn", [signal.SIGINT] * 5),
]


@pytest.mark.parametrize(
    ("mode", "told"), SIGNALS, ids=[f"{mode}-{len(told)}-{told[-1].name}" for mode, told in SIGNALS]
)
def test_an_interrupted_run_leaves_nothing_and_goes_on(mode: str, told: list[signal.Signals], tmp_path: Path) -> None:
    flag, pids = tmp_path / "silent", tmp_path / "pids"
    file = write(tmp_path, arm(), arm("--boot", mode, "--flag", str(flag), "--pids", str(pids), stop_timeout_s=3.0))
    flag.touch()
    command = [sys.executable, "-m", "flashqsa", "ab", "run", file]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        wait_for(tmp_path / "ab-run/boots/01-fix/log", "silence", run)
        started = json.loads(pids.read_text())
        assert len(alive(started)) == 3
        for each in told:
            run.send_signal(each)
        output = run.communicate(timeout=SECONDS)[0].decode()
    finally:
        run.kill()
        run.wait()
    assert run.returncode == 1, output
    assert "interrupted, and no server is left" in output
    assert alive(started) == []
    assert not (tmp_path / "ab-run/boots/01-fix/boot.json").exists()
    kept = boot(tmp_path, "00-base")["started"]
    invoke("ab", "report", str(tmp_path / "ab-run"))
    assert not reported(tmp_path)["complete"]
    flag.unlink()
    assert invoke("ab", "run", file).exit_code == 0
    assert reported(tmp_path)["complete"]
    assert boot(tmp_path, "00-base")["started"] == kept
    assert alive(json.loads(pids.read_text())) == []


def test_a_server_that_will_not_end_is_killed_with_what_it_started(tmp_path: Path) -> None:
    pids, port = tmp_path / "pids", free_port()
    keys = arm("--boot", "stubborn", "--pids", str(pids), port=port, stop_timeout_s=0.5)
    with Server(Arm(**{**keys, "folder": str(tmp_path)}), tmp_path / "log") as server:
        server.start()
        server.wait_until_ready()
        started = json.loads(pids.read_text())
        assert len(alive(started)) == 3
        assert {each.pid for each in family(started[0], "no mark")} == set(started[1:])
        ended = server.stop()
    assert "I stay" in (tmp_path / "log").read_text()
    assert (ended.killed, ended.code, ended.remnants) == (True, -signal.SIGKILL, 2)
    assert alive(started) == []
    assert server.stop() is ended


def test_a_server_that_cannot_be_killed_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ab_boots, "KILLED_S", 0.2)
    kept: list[subprocess.Popen[bytes]] = []
    monkeypatch.setattr(subprocess.Popen, "kill", lambda process: kept.append(process))
    try:
        result = invoke("ab", "run", write(tmp_path, arm("--boot", "stubborn", stop_timeout_s=0.3), arm()))
    finally:
        for process in kept:
            process.send_signal(signal.SIGKILL)
            process.wait()
    assert result.exit_code == 2
    assert f"error: process {kept[0].pid}: the server does not end though it was killed" in result.stderr


def test_a_server_that_turns_into_a_daemon_is_ended_too(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    assert invoke("ab", "run", write(tmp_path, arm("--boot", "daemon", "--pids", str(pids)), arm())).exit_code == 1
    dead = reported(tmp_path)["boots"][0]
    assert (dead["status"], dead["reason"]) == ("died", "the server ended with code 0")
    assert dead["stopped"].endswith("1 processes of its own were left and ended")
    assert alive(json.loads(pids.read_text())) == []


def test_what_is_shown_of_a_log_is_short_and_plain(tmp_path: Path) -> None:
    assert invoke("ab", "run", write(tmp_path, arm("--boot", "loud"), arm())).exit_code == 1
    dead = reported(tmp_path)["boots"][0]
    assert dead["log_end"].splitlines()[-1] == "no memory left"
    assert len(dead["log_end"]) <= LOG_BYTES
    assert (tmp_path / "ab-run/boots/00-base/log").stat().st_size > 2_000_000
    log = tmp_path / "log"
    log.write_bytes(b"one\n\x1b[31mt\x07wo\x1b[0m \xff\r\n")
    assert log_end(log) == "one\ntwo \ufffd"


def test_signals_interrupt_once_unless_they_are_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN), signal.getsignal(signal.SIGTERM)
    try:
        with Interrupts().taken() as interrupts:
            os.kill(os.getpid(), signal.SIGHUP)  # as under nohup
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
            assert interrupts.count == 2
        assert (signal.getsignal(signal.SIGHUP), signal.getsignal(signal.SIGTERM)) == (signal.SIG_IGN, before[1])
    finally:
        signal.signal(signal.SIGHUP, before[0])


def test_what_is_held_back_interrupts_at_its_end() -> None:
    reached = []

    def work() -> None:
        with interrupts.held():
            with interrupts.held():
                os.kill(os.getpid(), signal.SIGINT)
                reached.append("inner")
            reached.append("outer")
        reached.append("never")

    with Interrupts().taken() as interrupts:
        with pytest.raises(KeyboardInterrupt):
            work()
        with interrupts.held():
            reached.append("once")
    assert reached == ["inner", "outer", "once"]


@pytest.mark.parametrize("told", [signal.SIGINT, signal.SIGTERM], ids=lambda told: told.name)
def test_an_interruption_while_a_server_starts_leaves_none(
    told: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def interrupted(*arguments: Any, **keys: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*arguments, **keys))
        os.kill(os.getpid(), told)
        return started[0]

    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", interrupted)
    keys = {**arm("--boot", "deaf"), "folder": str(tmp_path)}
    with (
        Interrupts().taken() as interrupts,
        pytest.raises(KeyboardInterrupt),
        Server(Arm(**keys), tmp_path / "log", interrupts) as one,
    ):
        one.start()
    assert started[0].returncode is not None
    assert alive([started[0].pid]) == []


def test_a_port_in_use_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    keys = arm()
    with socket.socket() as taken:
        taken.bind(("localhost", keys["port"]))
        taken.listen()
        result = invoke("ab", "run", write(tmp_path, keys, arm()))
    assert result.exit_code == 2
    assert f"error: port {keys['port']}: something answers there already" in result.stderr


def test_a_command_that_is_not_there_is_refused(tmp_path: Path) -> None:
    result = invoke("ab", "run", write(tmp_path, {**arm(), "command": ["no-such-server"]}, arm()))
    assert result.exit_code == 2
    assert "error: command no-such-server: cannot be started: No such file" in result.stderr


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "ab-run").mkdir()
    (tmp_path / "ab-run/mine").touch()
    refused(invoke("ab", "run", write(tmp_path, arm(), arm())), "wanted a new folder or one of an earlier run")
    refused(invoke("ab", "report", str(tmp_path / "ab-run")), "no run of `flashqsa ab` is there")
    assert os.listdir(tmp_path / "ab-run") == ["mine"]


def test_a_server_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ab_run, "DEATH_S", 0.1)
    monkeypatch.setattr(ab_run, "ANSWER_S", 0.2)
    decode = {"kinds": ["prose", "code", "edit"], "new_tokens": 8}
    plan = {"order": ["base", "fix"], "request_timeout_s": 2.0}
    file = write(tmp_path, arm(model="hangs", stop_timeout_s=0.5), arm(), decode=decode, plan=plan)
    assert invoke("ab", "run", file).exit_code == 1
    hung, well = reported(tmp_path)["boots"]
    assert (hung["status"], hung["requests"], len(hung["errors"])) == ("died", 4, 3)
    assert hung["reason"].startswith("the server answers no request any more, nor at http://localhost:")
    assert hung["reason"].endswith("/health: ReadTimeout: timed out")
    assert (well["status"], well["requests"]) == ("done", 6)


def test_versions_that_have_changed_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, arm(), arm())
    assert "versions have changed" not in invoke("ab", "run", file).output
    monkeypatch.setattr(ab_run, "versions", lambda: {**ab_folder.versions(), "torch": "0.1"})
    result = invoke("ab", "run", file)
    assert result.exit_code == 0
    assert "since this run began, versions have changed: torch " in result.output
    assert ", now 0.1;" in " ".join(result.output.split())


def test_a_plan_may_ask_nothing_but_the_first_request(tmp_path: Path) -> None:
    nothing: dict[str, Any] = {"long": {"tokens": []}, "decode": {"kinds": []}}
    result = invoke("ab", "run", write(tmp_path, arm(), arm(), **nothing))
    assert result.exit_code == 0, result.output
    found = reported(tmp_path)
    assert [entry["requests"] for entry in found["boots"]] == [1, 1]
    assert {measure["name"] for measure in found["measures"]} == {"ready"}
    assert found["texts"]["conclusion"] == "no greedy text was answered by two boots"


def test_a_log_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    file = write(tmp_path, arm(), arm())
    config = read_config(Path(file))
    RunFolder.begin(tmp_path / "ab-run", config, Asks(config, CHARACTERS_PER_TOKEN).fingerprint())
    (tmp_path / "ab-run/boots/00-base/log").mkdir(parents=True)
    result = invoke("ab", "run", file)
    assert result.exit_code == 2
    assert "boots/00-base/log: cannot be written: Is a directory" in result.stderr


def test_texts_that_have_changed_are_not_put_together(tmp_path: Path) -> None:
    book, questions = tmp_path / "book 1.txt", tmp_path / "my questions.toml"
    book.write_text("One sentence. Another one.\n\nA paragraph more.\n")
    questions.write_text("[[question]]\nname = 'n'\ntext = 't'\nfacts = ['characters']\n")
    long = {"tokens": [300], "uncounted": 0, "texts": [book.name]}
    file = write(tmp_path, arm(), arm(), long=long, quality={"file": questions.name, "new_tokens": 3})
    assert invoke("ab", "run", file).exit_code == 0
    for changed, text in ((book, "Other words."), (questions, "[[question]]\nname = 'n'\ntext = 'u'\nfacts = ['x']\n")):
        before = changed.read_text()
        changed.write_text(text)
        refused(invoke("ab", "run", file), "holds a run with other texts or questions")
        changed.write_text(before)
    # The report needs neither.
    facts = reported(tmp_path)["facts"]
    assert facts[-1] == {"request": "question-n", "of": 1, "found": {"00-base": 1, "01-fix": 1}}
    book.unlink()
    questions.unlink()
    assert invoke("ab", "report", str(tmp_path / "ab-run")).exit_code == 0
    assert reported(tmp_path)["facts"] == facts
    (tmp_path / "ab-run/prompts.json").unlink()
    refused(invoke("ab", "report", str(tmp_path / "ab-run")), "prompts.json: cannot be read: No such file")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("run.json", "{", "run.json: damaged: Expecting property name"),
        ("run.json", '{"schema": 1}', "run.json: damaged: started: Field required"),
        ("run.json", '{"schema": 7}', "run.json: wanted a file of `flashqsa ab` with schema 1"),
        ("boots/00-base/boot.json", "", "boot.json: damaged: Expecting value"),
        ("boots/00-base/boot.json", '{"schema": 1, "boot": 3}', "boot.json: damaged: boot: Input should be"),
        ("boots/00-base/boot.json", "[" * 100_000, "boot.json: damaged: "),
        ("boots/00-base/boot.json", "other", "00-base/boot.json: damaged: wanted boot 00-base; got 01-fix"),
    ],
)
def test_a_damaged_folder_is_refused_with_its_file(name: str, text: str, message: str, tmp_path: Path) -> None:
    config = checked({"arms": {one: {"command": "x"} for one in ("base", "fix")}, **QUICK}, "ab.toml")
    folder = RunFolder.begin(tmp_path / "a run", config, "asked")
    for index, one in enumerate(config.arms):
        record = BootRecord(Boot(index, one, True), "done", None, "", 1.0, "", "", ())
        folder.boot(record.boot).mkdir(parents=True)
        folder.keep(record)
    assert invoke("ab", "report", str(folder.path)).exit_code == 0
    damaged = folder.path / name
    damaged.write_text((folder.boot(config.boots()[1]) / "boot.json").read_text() if text == "other" else text)
    refused(invoke("ab", "report", str(folder.path)), message)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ab_command, "find_spec", lambda name: None if name == "tomlkit" else name)
    refused(invoke("ab", "init"), "flashqsa ab needs pip install 'flashqsa[ab]'; missing: tomlkit")


@pytest.mark.parametrize("command", ["init", "run", "report"])
def test_every_option_has_its_help(command: str) -> None:
    import typer.main

    found = typer.main.get_command(ab_command.app).commands[command]  # type: ignore[attr-defined]
    assert found.help
    assert invoke("ab", command, "--help").exit_code == 0
    assert all(parameter.help or parameter.name == "help" for parameter in found.params)


def test_the_example_runs_the_stock_layer_against_flashqsa(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    for package in SERVER_PACKAGES:
        pytest.importorskip(package)
    file = tmp_path / "ab.toml"
    invoke("ab", "init", str(file))
    content = tomlkit.parse(file.read_text()).unwrap()
    for side in content["arms"].values():
        side.update(port=free_port(), environment={"HF_HOME": str(tmp_path / "hub"), "PYTHONPATH": ROOT})
    small = {"plan": {"order": ["base", "fix"]}, "long": {"tokens": [400], "uncounted": 0, "new_tokens": 24}}
    file.write_text(tomlkit.dumps(content | QUICK | small))
    result = invoke("ab", "run", str(file))
    assert result.exit_code == 0, result.output
    found = reported(tmp_path)
    assert found["texts"]["conclusion"] == "every greedy text is the same, word by word, in all boots (1 pairs)"
    answers = {name: boot(tmp_path, name)["answers"] for name in ("00-base", "01-fix")}
    assert all(len(set(answer["text"])) > 1 for side in answers.values() for answer in side[1:])
    assert [answer["answer_tokens"] for answer in answers["01-fix"]] == [1, 24, 8]
    # A byte is a token of this model, but for the template's own.
    assert abs(answers["00-base"][1]["prompt_tokens"] - 400) < 25
    evidence = {entry["label"]: entry["boots"] for entry in found["evidence"]}
    routes = {label for label in evidence if label.startswith("FlashQSA route: ")}
    assert {label.split()[2] for label in routes} == {"select", "attend"}
    assert all(list(evidence[label]) == ["01-fix"] for label in routes)
    assert evidence["left to the stock layer"] == {}
