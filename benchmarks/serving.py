"""A model of the released widths on one GPU: time to first token, decode steps, memory, and the stock layer beside it.

    python benchmarks/serving.py --machine h200 [--parts full,chunks,stock,fp8,drafts,widest] [--layers N]
    python benchmarks/serving.py --machine h200 --plot-only

Each part is one `flashqsa run` over its prompt lengths. Its JSON goes to benchmarks/results/serving-NAME.json as soon
as it is there, beside the parts of earlier calls; the plot to benchmarks/plots/serving-NAME.png. Weights are random,
prompts are text. Install flash-linear-attention before: else Transformers' own torch code runs the linear layers, and
the results say so. Run it from the top of the checkout.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent

FULL, WIDEST = "released-64", "released"
"""Presets: all 48 layers with 64 experts each, and as many layers with all 512 experts as memory holds."""

STOCK = ("--decode", "9", "--compare", "stock")

PARTS = {
    "full": ["--preset", FULL, "--tokens", "1k,2k,4k,8k,29k,100k,184k,250k", "--chunk", "8192", "--decode", "65"],
    "chunks": ["--preset", FULL, "--tokens", "29k,184k", "--chunk", "1616", "--decode", "2"],
    "stock": [*("--preset", FULL, "--layers", "12", "--tokens", "1k,2k,4k,8k", "--chunk", "8192"), *STOCK],
    "fp8": ["--preset", FULL, "--tokens", "4k,184k", "--chunk", "8192", "--decode", "65", "--kv-dtype", "fp8"],
    "drafts": ["--preset", FULL, "--tokens", "29k,184k", "--chunk", "8192", "--decode", "129", "--draft", "lookup"],
    "widest": ["--preset", WIDEST, "--tokens", "29k,184k", "--chunk", "8192", "--decode", "33"],
}
"""Options of `flashqsa run` for each part. The prompts are cut from the text that comes with Python. Stock layers are
timed in a quarter of the model: in all of it 4,000 tokens take minutes."""

SHARE_TARGET = 0.35
"""Most of the prefill that sparse layers should take at 184,000 tokens."""


ROUTE_FIELDS = ("phase", "stage", "route", "calls", "rows")
"""What is kept of a route that ran; `flashqsa explain` tells why others did not."""

COLUMNS = (
    *("part", "layers", "chunk", "tokens", "time to first token", "stock", "sparse layers' share"),
    *("decode step", "peak extra memory"),
)


def tell(line: str) -> None:
    """A line of progress or of the table, shown at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def measure(options: list[str], scratch: Path, limit_s: float) -> list[dict[str, Any]]:
    """The runs of one part: those that were done, where the time limit or an error ended it."""
    scratch.parent.mkdir(exist_ok=True, parents=True)
    scratch.unlink(missing_ok=True)
    command = [sys.executable, "-m", "flashqsa", "run", *options, "--json", str(scratch)]
    try:
        ended = f"ended with {subprocess.run(command, check=False, timeout=limit_s).returncode}"
    except subprocess.TimeoutExpired:
        ended = f"not done in {limit_s:g} s"
    if ended != "ended with 0":
        tell(f"{' '.join(command)}: {ended}")
    if not scratch.exists():
        return []
    found = json.loads(scratch.read_text())
    return [kept(run) for run in found.get("runs", [found])]


def kept(run: dict[str, Any]) -> dict[str, Any]:
    """A run without its texts, which say nothing where weights are random."""
    held = {key: value for key, value in run.items() if key not in ("text", "tokens", "versions")}
    return held | {"routes": [{key: entry[key] for key in ROUTE_FIELDS} for entry in run["routes"]]}


def table(parts: dict[str, list[dict[str, Any]]]) -> str:
    """A line per run, as Markdown."""
    lines = [COLUMNS, ("---",) * len(COLUMNS)]
    for part, run in ((part, run) for part, runs in parts.items() for run in runs):
        ours, stock = run["flashqsa"], run["stock"]
        cells = (
            part,
            str(run["model"]["layers"]),
            f"{run['settings']['chunk']:,}",
            f"{ours['prompt_tokens']:,}",
            f"{ours['time_to_first_token_s']:.3g} s",
            "" if stock is None else f"{stock['time_to_first_token_s']:.3g} s",
            f"{ours['sparse_layers_share']:.1%}",
            "" if ours["decode_step_ms"] is None else f"{ours['decode_step_ms']:.2f} ms",
            f"{ours['peak_extra_bytes'] / 2**30:.2f} GiB",
        )
        lines.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def draw(results: dict[str, Any], path: Path) -> None:
    """Time to first token, the sparse layers' share, decode steps and memory; then the stock layers beside ours."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(14, 7.6), layout="constrained")
    (first, share, stock_first), (decode, memory, stock_decode) = axes
    shown = {
        "full": ("#1f6fb4", "FlashQSA, chunks of 8,192"),
        "chunks": ("#2a9d8f", "FlashQSA, chunks of 1,616"),
        "fp8": ("#e07a1f", "FlashQSA, FP8 cache"),
    }
    for part, (colour, label) in shown.items():
        runs = results["parts"].get(part, [])
        if not runs:
            continue
        lengths = [run["flashqsa"]["prompt_tokens"] for run in runs]

        def column(name: str, factor: float = 1.0, runs: list[dict[str, Any]] = runs) -> list[float]:
            return [run["flashqsa"][name] * factor for run in runs]

        if part != "fp8":
            first.plot(lengths, column("time_to_first_token_s"), "o-", color=colour, label=label)
            share.plot(lengths, column("sparse_layers_share", 100), "o-", color=colour, label=label)
        if part != "chunks":
            decode.plot(lengths, column("decode_step_ms"), "o-", color=colour, label=label)
        memory.plot(lengths, column("peak_extra_bytes", 2**-30), "o-", color=colour, label=label)
    beside = results["parts"].get("stock", [])
    for whose, colour, label in (("flashqsa", "#1f6fb4", "FlashQSA"), ("stock", "#9a9a9a", "stock layers")):
        lengths = [run[whose]["prompt_tokens"] for run in beside]
        line: dict[str, Any] = {"color": colour, "label": label}
        stock_first.plot(lengths, [run[whose]["time_to_first_token_s"] for run in beside], "o-", **line)
        stock_decode.plot(lengths, [run[whose]["decode_step_ms"] for run in beside], "o-", **line)
    share.axhline(100 * SHARE_TARGET, color="#b03030", linestyle=":", label="target at 184k")
    first.set(yscale="log", ylabel="seconds", title="Time to first token")
    share.set(ylabel="% of the prefill", title="Sparse layers' share")
    decode.set(ylabel="ms", title="A decode step (FlashQSA: replay of a CUDA graph)")
    memory.set(ylabel="GiB", title="Peak memory beyond the weights")
    depth = f"{beside[0]['model']['layers']} layers" if beside else ""
    stock_first.set(yscale="log", ylabel="seconds", title=f"Time to first token beside stock, {depth}")
    stock_decode.set(yscale="log", ylabel="ms", title=f"A decode step beside stock, {depth}")
    for panel in axes.flat:
        panel.set(xscale="log", xlabel="prompt tokens")
        short = panel in (stock_first, stock_decode)
        panel.set_xticks([1_000, 2_000, 4_000, 8_000] if short else [1_000, 4_000, 29_000, 100_000, 250_000])
        panel.set_xticks([], minor=True)
        panel.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}k")
        panel.grid(True, alpha=0.25)
        panel.legend(frameon=False, fontsize=8)
    for panel in (share, decode, memory):
        panel.set_ylim(0, panel.get_ylim()[1] * 1.08)
    runs = results["parts"]["full"]
    figure.suptitle(
        f"{runs[0]['model']['layers']} layers of the released widths, BF16, {runs[0]['machine']['device']['name']}"
    )
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", required=True, help="names the machine in the results")
    parser.add_argument("--parts", default=",".join(PARTS), help="which parts to run, in which order")
    parser.add_argument("--layers", type=int, help="of every part's preset; as many as fit by default")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds that a part may take")
    parser.add_argument("--folder", type=Path, default=HERE / "results", help="where the results go")
    parser.add_argument("--plot-only", action="store_true")
    wanted = parser.parse_args()
    target, scratch = wanted.folder / f"serving-{wanted.machine}.json", Path("build/serving.json")
    depth = [] if wanted.layers is None else ["--layers", str(wanted.layers)]
    results: dict[str, Any] = json.loads(target.read_text()) if target.exists() else {"parts": {}}
    if not wanted.plot_only:
        wanted.folder.mkdir(exist_ok=True, parents=True)
        for part in wanted.parts.split(","):
            started = time.monotonic()
            results["parts"][part] = measure([*PARTS[part], *depth], scratch, wanted.limit)
            target.write_text(json.dumps(results, indent=1) + "\n")
            tell(f"{part}: {time.monotonic() - started:.0f} s")
    tell(table(results["parts"]))
    if wanted.plot_only:
        draw(results, HERE / "plots" / f"serving-{wanted.machine}.png")


if __name__ == "__main__":
    main()
