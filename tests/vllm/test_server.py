"""vLLM's server with FlashQSA's layers: an answer that comes in parts has the tokens that the engine makes."""

from __future__ import annotations

import json
import re
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

from tests.vllm.engine import ON_GPU, generate, on_gpu, running
from tests.vllm.test_generate import CHUNKS, EXACT, PROMPTS

pytestmark = pytest.mark.vllm


@contextmanager
def serving(folder: Path, log: Path) -> Iterator[str]:
    """The address of a server that answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # The command `vllm` looks for a distribution of that name, which the build for CPUs has not.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "2048", "--enforce-eager"]
    command += ["--max-num-batched-tokens", str(CHUNKS), "--dtype", EXACT]
    if on_gpu():
        for name, value in ON_GPU.items():
            command += ["--" + name.replace("_", "-"), json.dumps(value)]
    address = f"http://127.0.0.1:{port}"
    with running(command, {}, log) as server:
        for _ in range(300):
            assert server.poll() is None, log.read_text()
            try:
                with urlopen(f"{address}/health", timeout=5):
                    break
            except (URLError, ConnectionError, TimeoutError):
                time.sleep(1)
        yield address


def streamed(address: str, folder: Path, prompt: list[int]) -> list[tuple[list[int], str | None]]:
    """The parts of an answer: tokens, and why it ended. (Random bytes make no text that could be compared.)"""
    asked = {"model": str(folder), "prompt": prompt, "max_tokens": 8, "temperature": 0, "stream": True}
    asked["return_token_ids"] = True
    request = Request(f"{address}/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"})
    parts = []
    with urlopen(request, timeout=300) as answer:
        for line in answer:
            data = line.decode().strip().removeprefix("data: ")
            if data and data != "[DONE]":
                choice = json.loads(data)["choices"][0]
                parts.append((choice["token_ids"] or [], choice["finish_reason"]))
    return parts


def test_a_streamed_answer_has_the_engines_tokens(loud_model: Path, tmp_path: Path) -> None:
    # One by one there as they come here, so that steps are alike.
    outputs = [
        output
        for outputs in generate(
            loud_model,
            [[prompt] for prompt in PROMPTS],
            dtype=EXACT,
            max_num_batched_tokens=CHUNKS,
            variables={"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        ).rounds
        for output in outputs
    ]
    with serving(loud_model, tmp_path / "log.txt") as address:
        for output in outputs:
            parts = streamed(address, loud_model, output.prompt)
            assert len(parts) > 1
            assert parts[-1][1] == "length"
            assert [token for tokens, _ in parts for token in tokens] == output.tokens
    where = "on cuda" if on_gpu() else "cpu:grouped on cpu"
    assert re.search(rf"attend takes .*{where}", (tmp_path / "log.txt").read_text())
