"""`flashqsa serve`: presets on disk, what is refused before anything is loaded, and a server that answers."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from flashqsa.cli import preset_folder, presets
from flashqsa.cli import serve as serve_command
from flashqsa.cli.serve import SERVER_PACKAGES, Serving
from tests.test_cli import invoke, refused

TEXTS = ("plain", "Grüße, 漢字, 🙂", "a\x00b\tc\r\n \x7f\x80\xad", "")
SECONDS = 50


@pytest.fixture
def no_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes Transformers' server as it is: what it was asked can be read without what it runs on."""
    monkeypatch.setattr(serve_command, "SERVER_PACKAGES", ())


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_a_presets_tokenizer_takes_bytes(text: str) -> None:
    tokenizer = preset_folder.byte_tokenizer()
    tokens = tokenizer(text)["input_ids"]
    assert tokens == presets.encode_bytes(text)
    assert tokenizer.decode(tokens) == text
    assert tokenizer(f"{text}<|end|>")["input_ids"] == [*tokens, presets.BYTE_TOKENS]


def test_a_preset_on_disk_is_the_preset(tmp_path: Path) -> None:
    preset_folder.write_preset("tiny", tmp_path, seed=3)
    loaded = presets.load_folder(tmp_path, None)
    wanted = presets.load_preset("tiny", torch.float32, 3).model.state_dict()
    found = loaded.model.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert loaded.decode(loaded.encode("as it was")) == "as it was"
    chat = transformers.AutoTokenizer.from_pretrained(tmp_path)
    asked = [{"role": "user", "content": "Hello"}]
    assert chat.apply_chat_template(asked, add_generation_prompt=True, tokenize=False) == "user: Hello\nassistant: "


def test_missing_packages_are_named_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_command, "find_spec", lambda name: None if name in ("uvicorn", "openai") else name)
    monkeypatch.setattr(serve_command, "write_preset", pytest.fail)
    refused(invoke("serve", "tiny"), "pip install 'flashqsa[serve]'); missing: uvicorn, openai")


@pytest.mark.usefixtures("no_packages")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tiny", "--no-such-option"), "transformers serve: No such option: --no-such-option"),
        (("tiny", "--model-timeout", "soon"), "transformers serve: Invalid value for '--model-timeout'"),
        (("--log-level", "info", "tiny"), "MODEL: wanted before the options that the server takes; got --log-level"),
        (("tiny", "--threads", "0"), "--threads: wanted at least 1; got 0"),
        (("tiny", "--route", "fast"), "route: wanted"),
        (("tiny", "--stock", "--route", "cpu"), "--stock and --route: wanted one of them; got both"),
        (("tiny", "--device", "cuda:77"), "--device cuda:77: torch"),
        (("tiny", "--dtype", "float64"), "--dtype: wanted one of auto, float32, bfloat16, float16; got float64"),
        (("tiny", "--stock", "--dtype", "int8"), "--dtype: wanted one of auto, float32, bfloat16, float16; got int8"),
    ],
    ids=str,
)
def test_what_cannot_be_served_is_refused_in_one_line(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_command, "write_preset", pytest.fail)
    result = invoke("serve", *arguments)
    assert result.exit_code == 2
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last


@pytest.mark.usefixtures("no_packages")
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (None, "Transformers cannot read its configuration"),
        ({"model_type": "llama"}, "FlashQSA cannot stand in for its sparse layers: config: wanted the indexer fields"),
    ],
    ids=["no model", "another model"],
)
def test_a_model_without_sparse_layers_is_refused(fields: dict[str, Any] | None, message: str, tmp_path: Path) -> None:
    if fields is not None:
        (tmp_path / "config.json").write_text(json.dumps(fields))
    refused(invoke("serve", str(tmp_path)), message)


def test_options_reach_transformers_server() -> None:
    serving = Serving("here", "0.0.0.0", 9, "cpu", "float16", passed=("--enable-cors", "--model-timeout", "7"))
    arguments = ["here", *serving.options()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serve_command, "SERVER_PACKAGES", ())
        asked = serve_command._understood(serve_command.server_command(), arguments).params
    wanted = {"force_model": "here", "host": "0.0.0.0", "port": 9, "device": "cpu", "dtype": "float16"}
    assert {**wanted, "enable_cors": True, "model_timeout": 7}.items() <= asked.items()


def test_a_server_that_cannot_load_its_model_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Command:
        def make_context(self, *_: Any) -> Any:
            return type("Context", (), {"params": {"device": "cpu"}})

        def invoke(self, _: Any) -> None:
            raise ValueError("no such dtype")

    monkeypatch.setattr(serve_command, "server_command", Command)
    result = invoke("serve", "tiny")
    assert result.exit_code == 2
    assert "error: Transformers cannot serve tiny: no such dtype" in result.stderr
    modeling = transformers.models.qwen4_exp.modeling_qwen4_exp
    assert modeling.Qwen4ExpTextAttention.__module__ == modeling.__name__, "FlashQSA is off again"


@contextmanager
def served(folder: Path, *options: str) -> Iterator[tuple[str, Path]]:
    """A server of the tiny preset on a free port, ready to be asked: its address and its log."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    log, address = folder / "log", f"http://localhost:{port}"
    command = [sys.executable, "-m", "flashqsa", "serve", "tiny", "--port", str(port), "--device", "cpu", *options]
    # The hub's folder is not there yet: the server must not mind.
    environment = {**os.environ, "HF_HOME": str(folder / "hub"), "TMPDIR": str(folder)}
    with log.open("w") as target:
        process = subprocess.Popen(command, stdout=target, stderr=subprocess.STDOUT, env=environment)
    try:
        end = time.monotonic() + SECONDS
        while not answers(address):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.1)
        yield address, log
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=SECONDS) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError):
        return False


def ask(address: str, **fields: Any) -> str:
    """The body of the answer to a chat request."""
    body = {"messages": [{"role": "user", "content": "word " * 20}], "max_tokens": 6, "temperature": 0, **fields}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        return str(answer.read().decode())


@pytest.mark.skipif(sys.platform == "win32", reason="processes are told to end by a signal")
def test_a_preset_is_served_whole_and_streamed(tmp_path: Path) -> None:
    for package in SERVER_PACKAGES:
        pytest.importorskip(package)
    with served(tmp_path, "--enable-cors", "--threads", "1") as (address, log):
        with urllib.request.urlopen(f"{address}/v1/models", timeout=SECONDS) as answer:
            assert json.load(answer)["object"] == "list"
        whole = json.loads(ask(address))
        events = [line.removeprefix("data: ") for line in ask(address, stream=True).splitlines() if line]
        name = re.search(r"in requests the model is (\S+), or left out", " ".join(log.read_text().split()))
        assert name is not None
        assert Path(name[1]).is_dir()
        named = json.loads(ask(address, model=name[1]))
    assert whole["usage"]["completion_tokens"] == 6
    assert whole["usage"]["prompt_tokens"] == len("user: " + "word " * 20 + "\nassistant: ")
    text = whole["choices"][0]["message"]["content"]
    pieces = [json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events if event != "[DONE]"]
    assert sum(map(bool, pieces)) > 1
    assert "".join(pieces) == text == named["choices"][0]["message"]["content"]
    said = " ".join(log.read_text().split())
    for stage, rows in (("select", 118), ("attend", 118), ("attend", 1)):
        assert len(re.findall(rf"{stage} takes cpu:\w+ on cpu \(CPU\), first for {rows} rows of 1 requests", said)) == 1
    assert "CORS" in said
    assert "the stock sparse layer runs instead" not in said
    assert not Path(name[1]).exists(), "the preset's folder goes with the server"
