"""A model on two GPUs of one machine: its heads split over two ranks, or its layers over two stages, beside one GPU.

    python benchmarks/two_gpus.py --machine h200-x2 [--ways one,ranks,stages] [--layers 16]
    python benchmarks/two_gpus.py --machine h200-x2 --plot-only

Writes a preset to a temporary folder once, and loads it in each way with FlashQSA on. Each prompt goes through once
before it is timed. Results go to benchmarks/results/serving-NAME.json: times, memory, routes, a hash of the selections
of each process, and the greedy tokens that agree with one GPU's; `--plot-only` draws them. Needs accelerate. With
`--device cpu` it is tried without GPUs.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from flashqsa import capture
from flashqsa.capture import Noted
from flashqsa.cli.bench_report import machine
from flashqsa.cli.clocks import Stopwatch
from flashqsa.cli.engine import Asked, generate, warm_up
from flashqsa.cli.parts import parts_of
from flashqsa.cli.preset_folder import write_preset
from flashqsa.cli.presets import Place, encode_bytes
from flashqsa.cli.prompt import builtin_text

HERE = Path(__file__).parent

WAYS = ("one", "ranks", "ranks-plain", "stages")
"""One GPU; two ranks with decode steps in CUDA graphs, and launched one by one; two stages."""


LEFT_OUT = ("produced", "chunks_s", "steps_ms", "step_rows", "step_new_tokens")
"""What the results leave out of a run: a list entry for each token or chunk."""

PARTING_S = 60
"""Seconds after which a process that cannot leave its group says where it stands, and ends."""


class Heard:
    """A listener: the routes that sparse attention took, its heads, and one hash of all it selected."""

    def __init__(self) -> None:
        self.routes: Counter[str] = Counter()
        self.heads: set[tuple[int, int]] = set()
        self.hash = hashlib.sha256()

    def __call__(self, noted: Noted) -> None:
        """Takes one call in."""
        if noted.function != "sparse_attention":
            return
        self.routes[str(noted.plan.attend_decision.route)] += 1
        self.heads.add((noted.spec.q_heads, noted.spec.kv_heads))
        selection: Any = noted.values["selection"]
        if selection is not None:
            self.hash.update(selection.blocks.cpu().contiguous().numpy().tobytes())


class Silent:
    """Watches nothing."""

    def prefilled(self, tokens: int) -> None:
        """Some prompt tokens are done."""

    def decoded(self, tokens: int) -> None:
        """Some new tokens are done."""


def load(way: str, folder: Path, device: str) -> tuple[Any, list[Any]]:
    """The model in one of the ways, with FlashQSA on, and its sparse layers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from flashqsa.integrations.transformers import enable, qsa_layers, tensor_parallel_plan

    how: dict[str, Any]
    config = AutoConfig.from_pretrained(folder)
    if way.startswith("ranks"):
        from transformers import DistributedConfig

        how = {"distributed_config": DistributedConfig(tp_size=2, tp_plan=tensor_parallel_plan(config, 2))}
    elif way == "stages":
        second = {
            f"model.layers.{index}": 1 for index in range(config.num_hidden_layers // 2, config.num_hidden_layers)
        }
        first = {f"model.layers.{index}": 0 for index in range(config.num_hidden_layers // 2)}
        rest = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.hyper_connection_mixer": 1, "lm_head": 1}
        how = {"device_map": rest | first | second}
    else:
        how = {"device_map": {"": device}}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **how).eval()
    return enable(model), list(qsa_layers(model).values())


def measure(way: str, wanted: argparse.Namespace, rank: int) -> None:
    """Writes what this process finds beside the model: a run for each prompt length."""
    started = time.monotonic()
    model, layers = load(way, wanted.folder, wanted.device)
    loaded_s, text = time.monotonic() - started, encode_bytes(builtin_text())
    tell(f"  {way}: loaded in {loaded_s:.1f} s")
    on_gpu = wanted.device == "cuda"
    runs: list[dict[str, Any]] = []
    found = {"way": way, "loaded_s": loaded_s, "parts": parts_of(model), "machine": machine(model.device), "runs": runs}
    for length in wanted.tokens:
        asked = Asked(
            text[:length], wanted.chunk, wanted.decode, fixed=way != "stages", graphs=on_gpu and way in ("one", "ranks")
        )
        cold_s = warm_up(model, asked)
        tell(f"  {way}: {length:,} tokens in {cold_s:.1f} s, everything compiled in it")
        produced, timing = generate(
            model, asked, layers if way != "stages" else [], Stopwatch([], model.device), Silent()
        )
        tell(f"  {way}: {length:,} tokens in {timing.first_token_s:.2f} s, then {timing.decode_s:.2f} s of steps")
        heard = Heard()
        # Once more, listened to: hashing waits for the GPU, and so has no place in what is timed.
        with capture.listening(heard):
            warm_up(model, asked)
        runs.append(
            timing.as_json()
            | {"cold_first_token_s": cold_s, "produced": produced, "selections": heard.hash.hexdigest()}
            | {"attention_routes": dict(heard.routes), "heads": sorted(heard.heads), "chunk": wanted.chunk}
        )
        # What is done is kept, whatever becomes of the next length.
        (wanted.folder / f"{way}-{rank}.json").write_text(json.dumps(found))


def child(way: str, wanted: argparse.Namespace) -> None:
    """One process of a way."""
    rank = int(os.environ.get("RANK", "0"))
    if way.startswith("ranks"):
        if wanted.device == "cuda":
            torch.cuda.set_device(rank)
        torch.distributed.init_process_group("nccl" if wanted.device == "cuda" else "gloo")
    measure(way, wanted, rank)
    if way.startswith("ranks"):
        faulthandler.dump_traceback_later(PARTING_S, exit=True)
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
        faulthandler.cancel_dump_traceback_later()


def start(way: str, wanted: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs a way in processes of its own; what each of them found before it failed or took too long."""
    ranks = 2 if way.startswith("ranks") else 1
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"] if ranks == 2 else []
    tokens = ",".join(map(str, wanted.tokens))
    options = ["--child", way, "--folder", str(wanted.folder), "--device", wanted.device, "--tokens", tokens]
    options += ["--chunk", str(wanted.chunk), "--decode", str(wanted.decode)]
    command = [sys.executable, *launcher, str(Path(__file__).resolve()), *options]
    # A session of its own, so that what the launcher started ends with it and disturbs no later way.
    with subprocess.Popen(command, start_new_session=True) as started:
        try:
            code = started.wait(wanted.limit)
            ended = f"ended with {code}" if code else None
        except subprocess.TimeoutExpired:
            ended = f"not done in {wanted.limit:g} s"
            os.killpg(started.pid, signal.SIGKILL)
    if ended:
        tell(f"{way}: {ended}")
    written = [wanted.folder / f"{way}-{rank}.json" for rank in range(ranks)]
    found = [json.loads(path.read_text()) for path in written if path.exists()]
    # A rank that was stopped may be a length behind the other.
    shortest = min((len(process["runs"]) for process in found), default=0) if len(found) == ranks else 0
    return [process | {"runs": process["runs"][:shortest]} for process in found] if shortest else []


def together(found: dict[str, list[dict[str, Any]]], command: str) -> dict[str, Any]:
    """The results of all ways that a command asked for, each compared with one GPU's and rank with rank."""
    results: dict[str, Any] = {"ways": {}}
    alone = {run["prompt_tokens"]: run for run in found["one"][0]["runs"]} if found.get("one") else {}
    for way, processes in found.items():
        if not processes:
            continue
        first = processes[0]
        results["machine"] = results.get("machine", first["machine"]) | {"command": command}
        lines = []
        for index, run in enumerate(first["runs"]):
            others = [process["runs"][index] for process in processes[1:]]
            produced, one = run["produced"], alone.get(run["prompt_tokens"])
            same = None
            if one is not None:
                pairs = zip(produced, one["produced"], strict=True)
                same = next((place for place, (a, b) in enumerate(pairs) if a != b), len(produced))
            lines.append(
                {key: value for key, value in run.items() if key not in LEFT_OUT}
                | {
                    "ranks_select_the_same": all(run["selections"] == other["selections"] for other in others),
                    "ranks_produce_the_same": all(produced == other["produced"] for other in others),
                    "selects_as_one_gpu": None if one is None else run["selections"] == one["selections"],
                    "tokens_as_one_gpu": same,
                    "peak_extra_bytes_each": [run["peak_extra_bytes"], *(o["peak_extra_bytes"] for o in others)],
                }
            )
        results["ways"][way] = {"loaded_s": first["loaded_s"], "parts": first["parts"], "runs": lines}
    return results


NAMES = {"one": "one GPU", "ranks": "heads on two GPUs", "ranks-plain": "the same, no graphs", "stages": "two stages"}


def draw(results: dict[str, Any], path: Path) -> None:
    """Time to first token, a decode step and memory in each way, a group of bars for each prompt length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels: dict[str, Callable[[dict[str, Any]], float]] = {
        "time to first token, s": lambda run: run["time_to_first_token_s"],
        "a decode step, ms": lambda run: run["decode_step_ms"],
        "peak memory beside the weights, the first GPU, GiB": lambda run: run["peak_extra_bytes"] / 2**30,
    }
    figure, axes = pyplot.subplots(1, len(panels), figsize=(12, 3.9), layout="constrained")
    width = 0.8 / len(results["ways"])
    for panel, (title, read) in zip(axes, panels.items(), strict=True):
        for place, (way, part) in enumerate(results["ways"].items()):
            at = [group + (place - (len(results["ways"]) - 1) / 2) * width for group in range(len(part["runs"]))]
            bars = panel.bar(at, [read(run) for run in part["runs"]], width * 0.92, label=NAMES[way])
            panel.bar_label(bars, fmt=lambda height: f"{height:.3g}", fontsize=8)
        lengths = [f"{run['prompt_tokens']:,} tokens" for run in next(iter(results["ways"].values()))["runs"]]
        panel.set_xticks(range(len(lengths)), lengths)
        panel.set_title(title, fontsize=10)
        panel.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=8)
    device = results["machine"]["device"]["name"]
    figure.suptitle(f"{results['layers']} layers of the released widths, BF16, chunks of 8,192, {device}", fontsize=11)
    figure.savefig(path, dpi=110)


def tell(line: str) -> None:
    """A line of progress or of the table, shown at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def table(results: dict[str, Any]) -> str:
    """A line per run, as Markdown."""
    lines = [
        "| way | tokens | time to first token | decode step | peak extra memory, each | selects the same | tokens |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for way, part in results["ways"].items():
        for run in part["runs"]:
            memory = ", ".join(f"{size / 2**30:.2f}" for size in run["peak_extra_bytes_each"])
            step = "" if run["decode_step_ms"] is None else f"{run['decode_step_ms']:.2f} ms"
            lines.append(
                f"| {way} | {run['prompt_tokens']:,} | {run['time_to_first_token_s']:.3g} s | {step} | {memory} GiB "
                f"| {run['ranks_select_the_same']} | {run['tokens_as_one_gpu']} of {run['new_tokens']} |"
            )
    return "\n".join(lines)


def numbers(text: str) -> list[int]:
    """Prompt lengths, as 29000,184000."""
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", help="names the machine in the results")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--preset", default="released-64")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--tokens", type=numbers, default=[4_000, 29_000, 184_000])
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--decode", type=int, default=33)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds that a way may take")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="where the results go")
    parser.add_argument("--plot-only", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if wanted.child:
        child(wanted.child, wanted)
        return
    if not wanted.machine:
        parser.error("--machine: wanted a name")
    target = wanted.results / f"serving-{wanted.machine}.json"
    if wanted.plot_only:
        draw(json.loads(target.read_text()), HERE / "plots" / f"serving-{wanted.machine}.png")
        return
    with tempfile.TemporaryDirectory() as folder:
        wanted.folder = Path(folder)
        dtype = torch.bfloat16 if wanted.device == "cuda" else torch.float32
        write_preset(wanted.preset, wanted.folder, dtype, 0, Place(torch.device(wanted.device), wanted.layers))
        if wanted.device == "cuda":
            torch.cuda.empty_cache()
        found: dict[str, list[dict[str, Any]]] = {}
        tokens = ",".join(map(str, wanted.tokens))
        command = f"python benchmarks/two_gpus.py --machine {wanted.machine} --tokens {tokens} --ways {wanted.ways}"
        for way in wanted.ways.split(","):
            started = time.monotonic()
            found[way] = start(way, wanted)
            tell(f"{way}: {time.monotonic() - started:.0f} s")
            results = {"preset": wanted.preset, "layers": wanted.layers, "decode": wanted.decode} | together(
                found, command
            )
            wanted.results.mkdir(exist_ok=True, parents=True)
            target.write_text(json.dumps(results, indent=1) + "\n")
    tell(table(results))


if __name__ == "__main__":
    main()
