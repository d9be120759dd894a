"""Time to first token of vLLM on a CPU: with FlashQSA's sparse layers, and with plain torch, token by token.

    .venv-vllm/bin/python benchmarks/vllm_cpu.py --machine NAME [--tokens 1000,4000] [--repeats 3] [--dtype bfloat16]

`make test-vllm` makes that environment. vLLM's own sparse layer does not run on a CPU, so what stands beside FlashQSA's
is what an extension would write first: for each token score every visible block, sort, and attend to the tokens of the
best and to the tail. All else is the same: vLLM's engine, in one process for each of the two, which take turns; the
first prompt of each length is not timed. Each generates a few tokens after the longest prompt, and the result says how
many are the same.

The model has the sparse geometry of the preset `demo`, which is the released model's, with one sparse layer of four,
and linear heads that vLLM's kernel for CPUs takes. Prompts are cut from the text that comes with Python. The result
goes to benchmarks/results/vllm-cpu-NAME.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from flashqsa import knobs, pipeline
from flashqsa.cli.bench_report import machine
from flashqsa.cli.preset_folder import byte_tokenizer
from flashqsa.cli.presets import PRESETS, encode_bytes, transformers_module
from flashqsa.cli.prompt import builtin_text
from flashqsa.values import IndexCache, KvCache, QsaSpec, Rows

HERE = Path(__file__).parent
KINDS = ("flashqsa", "by token")
NEW_TOKENS = 16
"""Generated, untimed, to compare the two."""


def tell(line: str) -> None:
    """A line of progress or of the table, shown at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def by_token(
    index_q: Tensor, q: Tensor, index_cache: IndexCache, kv_cache: KvCache, rows: Rows, spec: QsaSpec, gate: Tensor
) -> Tensor:
    """What `qsa_attention` computes, row by row: takes its arguments and gives its output."""
    output = torch.zeros_like(q)
    request, position = rows.request.tolist(), rows.position.tolist()
    held: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
    for row, (owner, place) in enumerate(zip(request, position, strict=True)):
        if owner < 0 or place < 0:
            continue
        if owner not in held:
            # A request's pages are joined once a step, not once a token.
            pages = kv_cache.page_table[owner].clamp(min=0).long()
            index_pages = index_cache.page_table[owner].clamp(min=0).long()
            held[owner] = (
                index_cache.keys[index_pages].flatten(0, 1).float(),
                kv_cache.keys[pages].flatten(0, 1).float(),
                kv_cache.values[pages].flatten(0, 1).float(),
            )
        index_keys, keys, values = held[owner]
        blocks = (place + 1) // spec.block_tokens
        scores = torch.relu(index_q[row].float() @ index_keys[:blocks].t()).sum(0)
        best = scores.sort(descending=True, stable=True).indices[: spec.top_blocks]
        tokens = (best[:, None] * spec.block_tokens + torch.arange(spec.block_tokens)).flatten()
        tokens = torch.cat([tokens, torch.arange(blocks * spec.block_tokens, place + 1)])
        heads = q[row].float().view(spec.kv_heads, -1, spec.head_dim)
        weights = (heads @ keys[tokens].permute(1, 2, 0) * spec.softmax_scale).softmax(-1)
        attended = (weights @ values[tokens].transpose(0, 1)).view(-1, spec.head_dim).to(q.dtype)
        output[row] = attended * torch.sigmoid(gate[row].float())
    return output


def write_model(folder: Path) -> None:
    """The preset's weights are random, but for the part that all embeddings share: rows select alike by it."""
    transformers, preset = transformers_module(), PRESETS["demo"]
    fields = preset.fields() | {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    torch.manual_seed(0)
    config = transformers.Qwen4ExpTextConfig(**fields)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        part = torch.randn(1, config.hidden_size, dtype=torch.bfloat16)
        model.get_input_embeddings().weight += preset.common * config.initializer_range * part
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def serve(kind: str, folder: str, dtype: str, longest: int) -> None:
    """Answers lines of stdin, each a JSON list of a prompt and how many tokens to make, with lines of JSON.

    vLLM writes to stdout, so answers go where it does not: to a file that the first line names.
    """
    from vllm import LLM, SamplingParams

    if kind == "by token":
        pipeline.qsa_attention = by_token  # type: ignore[assignment]
    target = Path(sys.stdin.readline().strip())
    engine = LLM(
        folder,
        dtype=dtype,
        enforce_eager=True,
        max_model_len=longest + NEW_TOKENS,
        max_num_batched_tokens=longest + NEW_TOKENS,
        max_num_seqs=1,
        enable_prefix_caching=False,
    )
    with target.open("a", encoding="utf-8") as answers:
        for line in sys.stdin:
            prompt, count = json.loads(line)
            sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
            begun = time.perf_counter()
            done = engine.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0]
            taken = time.perf_counter() - begun
            answers.write(json.dumps([taken, list(done.outputs[0].token_ids)]) + "\n")
            answers.flush()


class Server:
    """An engine in a process of its own."""

    def __init__(self, kind: str, folder: Path, dtype: str, longest: int) -> None:
        self.answers = folder / f"{kind}.jsonl"
        self.answers.touch()
        self.reader = self.answers.open(encoding="utf-8")
        command = [sys.executable, __file__, "--serve", kind, "--folder", str(folder), "--dtype", dtype]
        variables = {
            "FLASHQSA_VLLM": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "HF_HUB_OFFLINE": "1",
        }
        self.log = (folder / f"{kind}.log").open("w")
        self.process = subprocess.Popen(
            [*command, "--tokens", str(longest)],
            env=knobs.environment_with(variables),
            stdin=subprocess.PIPE,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._say(str(self.answers))

    def _say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def ask(self, prompt: list[int], count: int) -> tuple[float, list[int]]:
        """Seconds that an answer took, and its tokens."""
        self._say(json.dumps([prompt, count]))
        while not (line := self.reader.readline()).endswith("\n"):
            if self.process.poll() is not None:
                sys.exit(f"an engine ended with {self.process.returncode}:\n{Path(self.log.name).read_text()}")
            time.sleep(0.005)
        taken, tokens = json.loads(line)
        return taken, tokens

    def end(self) -> None:
        """Ends the engine."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def measure(lengths: list[int], repeats: int, dtype: str) -> dict[str, Any]:
    """Times by length and kind, and how alike the two are."""
    text = encode_bytes(builtin_text())
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_model(folder)
        servers = {kind: Server(kind, folder, dtype, max(lengths)) for kind in KINDS}
        longest = text[: max(lengths)]
        texts = [server.ask(longest, NEW_TOKENS)[1] for server in servers.values()]
        runs = []
        for length in lengths:
            taken: dict[str, list[float]] = {kind: [] for kind in KINDS}
            # Another piece of text each time, the same for both; the first is not counted.
            for turn in range(repeats + 1):
                prompt = text[turn * length : (turn + 1) * length]
                for kind, server in servers.items():
                    taken[kind].append(server.ask(prompt, 1)[0])
            kept = {kind: times[1:] for kind, times in taken.items()}
            found = {f"{kind.replace(' ', '_')}_s": statistics.median(times) for kind, times in kept.items()}
            runs.append({"tokens": length, **found, "each_s": kept})
            tell(f"{length} tokens: " + ", ".join(f"{kind} {statistics.median(kept[kind]):.2f} s" for kind in KINDS))
        for server in servers.values():
            server.end()
    same = sum(a == b for a, b in zip(*texts, strict=True))
    return {"same_tokens": same, "of_tokens": NEW_TOKENS, "runs": runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", help="names the machine in the results")
    parser.add_argument("--tokens", default="1000,4000", help="prompt lengths")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--serve", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    lengths = [int(length) for length in wanted.tokens.split(",")]
    if wanted.serve:
        serve(wanted.serve, wanted.folder, wanted.dtype, max(lengths))
        return
    if not wanted.machine:
        parser.error("--machine is required")
    found = measure(lengths, wanted.repeats, wanted.dtype)
    results = {
        "machine": wanted.machine,
        "date": datetime.now(timezone.utc).date().isoformat(),
        **machine(torch.device("cpu")),
        "command": "python benchmarks/vllm_cpu.py " + " ".join(sys.argv[1:]),
        "vllm": version("vllm-cpu"),
        "threads": torch.get_num_threads(),
        "model": "preset demo, linear heads of 128",
        "dtype": wanted.dtype,
        **found,
    }
    target = HERE / "results" / f"vllm-cpu-{wanted.machine}.json"
    target.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
