"""Prefill and decode of a preset at growing prompt lengths: runs `flashqsa run`, keeps its JSON, draws the plot.

    python benchmarks/prefill.py --machine NAME [--lengths 1024,2048,...] [--stock-up-to 8192]
    python benchmarks/prefill.py --machine NAME --plot-only

Results go to benchmarks/results/prefill-NAME.json, the plot to benchmarks/plots/prefill-NAME.png. Each length runs in
a process of its own, so that one run's memory does not colour the next.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def measure(length: int, compare: bool, preset: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "flashqsa", "run", "--preset", preset, "--tokens", str(length), "--json", "-"]
    command += ["--compare", "stock"] if compare else []
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    # The texts of random weights say nothing.
    return {key: value for key, value in found.items() if key not in ("text", "tokens")}


def commit() -> str:
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=HERE, check=False, stdout=subprocess.PIPE, text=True
    )
    return described.stdout.strip() or "unknown"


def draw(results: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = results["runs"]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for name, colour, label in (("stock", "#9a9a9a", "stock layer"), ("flashqsa", "#1f6fb4", "FlashQSA")):
        held = [run for run in runs if run.get(name)]
        lengths = [run[name]["prompt_tokens"] for run in held]
        left.plot(lengths, [run[name]["time_to_first_token_s"] for run in held], "o-", color=colour, label=label)
        layers = [run[name]["sparse_layers_s"] for run in held]
        left.plot(lengths, layers, "o--", color=colour, label=f"{label}: sparse layer alone", alpha=0.6)
        decode = [1e3 / run[name]["decode_tokens_per_s"] for run in held]
        right.plot(lengths, decode, "o-", color=colour, label=label)
    left.set(xscale="log", yscale="log", xlabel="prompt tokens", ylabel="seconds", title="Time to first token")
    right.set(xscale="log", xlabel="context tokens", ylabel="ms per token", title="Decode")
    right.set_ylim(bottom=0)
    for axes in (left, right):
        axes.set_xticks([run["flashqsa"]["prompt_tokens"] for run in runs])
        axes.set_xticks([], minor=True)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1024:g}k")
        axes.grid(True, alpha=0.25)
        axes.legend(frameon=False, fontsize=8)
    figure.suptitle(f"{results['preset']} preset (24/2 heads of 256, 4 index heads of 128), FP32, {results['machine']}")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", required=True, help="names the machine in the results")
    parser.add_argument("--lengths", default="1024,2048,4096,8192,16384,32768")
    parser.add_argument("--stock-up-to", type=int, default=8192, help="longest prompt the stock layer is run on")
    parser.add_argument("--preset", default="demo")
    parser.add_argument("--plot-only", action="store_true")
    wanted = parser.parse_args()
    target = HERE / "results" / f"prefill-{wanted.machine}.json"
    if not wanted.plot_only:
        lengths = [int(text) for text in wanted.lengths.split(",")]
        results = {
            "preset": wanted.preset,
            "machine": wanted.machine,
            "processor": platform.processor() or platform.machine(),
            "date": datetime.now(timezone.utc).date().isoformat(),
            "commit": commit(),
            "command": "python benchmarks/prefill.py " + " ".join(sys.argv[1:]),
            "runs": [measure(length, length <= wanted.stock_up_to, wanted.preset) for length in lengths],
        }
        target.parent.mkdir(exist_ok=True)
        target.write_text(json.dumps(results, indent=1) + "\n")
    plot = HERE / "plots" / f"prefill-{wanted.machine}.png"
    plot.parent.mkdir(exist_ok=True)
    draw(json.loads(target.read_text()), plot)


if __name__ == "__main__":
    main()
