"""The README's table and plot of GPU times, from the JSON that `flashqsa bench all --suite targets` wrote on one GPU.

    flashqsa bench all --suite targets --json benchmarks/results/targets-h200.json
    flashqsa bench all --suite targets --graph on --json benchmarks/results/targets-graph-h200.json
    python benchmarks/table.py            # prints the table
    python benchmarks/table.py --write    # puts it between its markers in README.md, and draws the plot

Name the files by a path from the clone, as above: the results keep the command. The first file has what was launched
call by call (but for decode, which is timed by graph replay in either case), the second what CUDA graphs replayed.
Another implementation's times, in `PEERS`, were measured apart.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashqsa.cli.bench_timing import HOST_SHARE

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
BY_CALL = HERE / "results" / "targets-h200.json"
BY_GRAPH = HERE / "results" / "targets-graph-h200.json"
PLOT = HERE / "plots" / "targets-h200.png"

BEGIN, END = "<!-- begin: benchmarks/table.py -->", "<!-- end: benchmarks/table.py -->"


@dataclass(frozen=True)
class Peer:
    """Times of another implementation for a case, in microseconds: from `low_us` to `high_us` over several overlaps.

    what  is in the time where it is less than ours does; None where it is the same, so that a ratio means something
    """

    low_us: float
    high_us: float
    what: str | None = None


PEER_NAME = "vLLM 0.32.0"
ATTENTION_1616, ATTENTION_8192 = Peer(1060, 1150), Peer(4800, 4900)

# vLLM 0.32.0's own QSA kernels with its table for sm_90, gate fused, on an H200 (torch 2.11+cu130, Triton 3.6; copy
# 4.18 TB/s, BF16 product 765 TFLOP/s): medians of 20 calls by device events, decode by graph replay, 2026-11. Its top-k
# returns an unordered set. The indexer's time is that of its scores, 392 us, and of its top-k, 283 us.
PEERS = {
    ("attention 1616 rows near, 24,240 tokens, 24/2, bfloat16", "attention"): ATTENTION_1616,
    ("attention 1616 rows mid, 7,500 tokens, 24/2, bfloat16", "attention"): ATTENTION_1616,
    ("attention 1616 rows far, 38,000 tokens, 24/2, bfloat16", "attention"): ATTENTION_1616,
    ("attention 1616 rows mid, 7,500 tokens, 12/1, bfloat16", "attention"): Peer(630, 670),
    ("attention 1616 rows mid, 7,500 tokens, 6/1, bfloat16", "attention"): Peer(550, 630),
    ("attention 8192 rows mid, 14,076 tokens, 24/2, bfloat16", "attention"): ATTENTION_8192,
    ("attention 8192 rows far, 38,000 tokens, 24/2, bfloat16", "attention"): ATTENTION_8192,
    ("attention 1616 rows far, 38,000 tokens, 24/2, float8_e4m3fn", "attention"): Peer(1330, 1480),
    ("indexer 1616 rows, 184,000 tokens, bfloat16", "selection"): Peer(675, 675),
    ("decode 64 x 1 rows, 32,768 tokens, 24/2, bfloat16", "selection"): Peer(35.4, 35.4, "scores alone"),
    ("decode 64 x 1 rows, 32,768 tokens, 24/2, bfloat16", "attention"): Peer(91.0, 91.0),
    ("decode 64 x 4 rows sharing, 32,768 tokens, 24/2, bfloat16", "selection"): Peer(39.1, 39.1, "scores alone"),
    ("decode 64 x 4 rows sharing, 32,768 tokens, 24/2, bfloat16", "attention"): Peer(215.7, 215.7),
    ("decode 1 x 1 rows, 32,768 tokens, 24/2, bfloat16", "selection"): Peer(3.1, 3.1, "scores alone"),
    ("decode 1 x 1 rows, 32,768 tokens, 24/2, bfloat16", "attention"): Peer(7.6, 7.6),
    ("decode 16 x 1 rows, 32,768 tokens, 24/2, bfloat16", "selection"): Peer(8.0, 8.0, "scores alone"),
    ("decode 16 x 1 rows, 32,768 tokens, 24/2, bfloat16", "attention"): Peer(33.5, 33.5),
}

STAGES = {"selection": "scores and top-k", "attention": "attention", "together": "both"}


@dataclass(frozen=True)
class Row:
    """One measured stage of a case, times in microseconds.

    call, graph  medians launched call by call and replayed from a CUDA graph; None where it was not timed that way
    waited       whether the GPU waited for Python in `call`
    """

    case: dict[str, Any]
    stage: str
    call: float | None
    graph: float | None
    waited: bool
    peer: Peer | None

    @property
    def ours(self) -> float | None:
        """Our time beside the peer's: by graph replay, where there is one."""
        return self.call if self.graph is None else self.graph

    @property
    def ratio(self) -> float | None:
        """The peer's shortest time over ours; None where the two do not do the same."""
        if self.peer is None or self.peer.what is not None or self.ours is None:
            return None
        return self.peer.low_us / self.ours


def load(path: Path) -> dict[str, Any]:
    """A results file. Raises ValueError for one that was cut short, or that holds a case whose result was wrong."""
    found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    if not found["complete"]:
        raise ValueError(f"{path.name}: the run was cut short")
    wrong = [f"{case['name']}: {case['reason']}" for case in found["cases"] if case["status"] == "failed"]
    if wrong:
        raise ValueError(f"{path.name}: {'; '.join(wrong)}")
    return found


def rows_of(by_call: dict[str, Any], by_graph: dict[str, Any]) -> list[Row]:
    """Every stage of every case of two runs, in the order of the first. Raises ValueError for two kinds of GPU."""
    if by_call["device"]["name"] != by_graph["device"]["name"]:
        raise ValueError(f"two devices: {by_call['device']['name']} and {by_graph['device']['name']}")
    cases: dict[str, dict[str, Any]] = {}
    times: dict[tuple[str, str, bool], dict[str, Any]] = {}
    for run in (by_call, by_graph):
        for case in run["cases"]:
            cases.setdefault(case["name"], case)
            for stage, measure in case["measures"].items():
                if measure["times"] is not None:
                    times[case["name"], stage, "CUDA graph" in case["timing"]] = measure["times"]
    found = []
    for name, case in cases.items():
        for stage in STAGES:
            call, graph = times.get((name, stage, False)), times.get((name, stage, True))
            if call is None and graph is None:
                continue
            host = None if call is None else call["host_us"]
            found.append(
                Row(
                    case,
                    stage,
                    None if call is None else call["median_us"],
                    None if graph is None else graph["median_us"],
                    host is not None and host >= HOST_SHARE * call["median_us"],
                    PEERS.get((name, stage)),
                )
            )
    return found


def time_text(us: float | None) -> str:
    """Three figures with a unit, or a dash."""
    if us is None:
        return "-"
    return f"{us:.1f} us" if us < 100 else f"{us:.0f} us" if us < 1000 else f"{us / 1000:.2f} ms"


def ratio_text(ratio: float | None) -> str:
    """Two figures, or a dash."""
    if ratio is None:
        return "-"
    return f"{ratio:.1f}" if ratio >= 1.05 else f"{ratio:.2f}"


def peer_text(peer: Peer | None) -> str:
    """A peer's time or range of times, with what is in it."""
    if peer is None:
        return "-"
    if peer.low_us == peer.high_us:
        text = time_text(peer.low_us)
    elif peer.low_us < 1000:
        text = f"{peer.low_us:.0f} to {peer.high_us:.0f} us"
    else:
        text = f"{peer.low_us / 1000:.2f} to {peer.high_us / 1000:.2f} ms"
    return text if peer.what is None else f"{text}, {peer.what}"


def case_text(case: dict[str, Any]) -> str:
    """A case's name without its stage, and with the dtype as people call it."""
    name: str = case["name"].removeprefix("attention ").removeprefix("indexer ")
    return name.replace("bfloat16", "BF16").replace("float8_e4m3fn", "FP8 cache").replace("float16", "FP16")


def machine_text(by_call: dict[str, Any], by_graph: dict[str, Any]) -> str:
    """The line that says where and with what it was measured."""
    versions = by_call["versions"]
    commits = []
    for run in (by_call, by_graph):
        commit = run["commit"]
        text = "unknown" if commit is None else commit["id"][:8] + (" with changes" if commit["dirty"] else "")
        commits += [] if text in commits else [text]
    roofs = by_call["roofs"]
    products = ", ".join(
        f"{dtype} product {rate / 1e12:.0f} TFLOP/s" for dtype, rate in roofs["matmul_flops_per_s"].items()
    )
    return (
        f"One {by_call['device']['name']}, driver {by_call['driver']}, torch {versions['torch']}, Triton "
        f"{versions['triton']}, NVRTC {nvrtc_text(versions)}; commit {' and '.join(commits)}; measured roofs: copy "
        f"{roofs['copy_bytes_per_s'] / 1e12:.2f} TB/s, {products}."
    )


def nvrtc_text(versions: dict[str, Any]) -> str:
    """The newest NVRTC package of a run."""
    found = [text for name, text in versions.items() if "nvrtc" in name and text]
    return max(found, key=lambda text: [int(part) for part in text.split(".")], default="unknown")


def table(by_call: dict[str, Any], by_graph: dict[str, Any]) -> str:
    """The whole block: a line about the machine, and the table in Markdown."""
    lines = [
        machine_text(by_call, by_graph),
        "",
        f"| case | stage | {PEER_NAME}, measured apart | FlashQSA, call by call | FlashQSA, graph replay | ratio |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows_of(by_call, by_graph):
        call = time_text(row.call) + (" *" if row.waited else "")
        ratio = ratio_text(row.ratio)
        cells = (case_text(row.case), STAGES[row.stage], peer_text(row.peer), call, time_text(row.graph), ratio)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def put(text: str, block: str) -> str:
    """A page with the block between its markers. Raises ValueError for a page without them."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{block}\n{END}{after}"


def bar_label(row: Row) -> str:
    """What stands below a group of bars."""
    case = row.case
    spec = case["spec"]
    if case["kind"] == "decode":
        return f"{case['requests']} x {case['rows_per_request']} rows"
    rows = f"{case['rows']:,} rows"
    if case["kind"] == "indexer":
        return f"indexer\n{rows}\n{case['context'] // 1000}k"
    heads = f"{spec['q_heads']}/{spec['kv_heads']}"
    return f"{rows}\n{case['regime']}\n{heads}{' FP8' if 'float8' in case['dtype'] else ''}"


def draw(by_call: dict[str, Any], by_graph: dict[str, Any], path: Path) -> None:
    """Bars of the peer's times beside ours, for what both do."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in rows_of(by_call, by_graph) if row.ratio is not None]
    decode = [row for row in rows if row.case["kind"] == "decode"]
    prefill = [row for row in rows if row.case["kind"] != "decode"]
    figure, panels = pyplot.subplots(
        1, 2, figsize=(12, 4.4), layout="constrained", width_ratios=(max(len(prefill), 1), max(len(decode), 1))
    )
    groups = (
        (panels[0], prefill, 1e3, "ms", "A chunk of a prompt"),
        (panels[1], decode, 1.0, "us", "Decode attention, 32k, graph replay"),
    )
    for axes, shown, unit, unit_name, title in groups:
        bars = (
            (f"{PEER_NAME}, measured apart", "#9a9a9a", [row.peer.low_us if row.peer else None for row in shown]),
            ("FlashQSA, call by call", "#9cc3e5", [row.call for row in shown]),
            ("FlashQSA, graph replay", "#1f6fb4", [row.graph for row in shown]),
        )
        held = [bar for bar in bars if any(time is not None for time in bar[2])]
        width = 0.8 / max(len(held), 1)
        for place, (name, colour, times) in enumerate(held):
            at = [index + (place - (len(held) - 1) / 2) * width for index in range(len(shown))]
            axes.bar(at, [(time or 0.0) / unit for time in times], width, color=colour, label=name)
        for index, row in enumerate(shown):
            highest = max(time for time in (row.peer.low_us if row.peer else 0, row.call, row.graph) if time)
            axes.annotate(f"{ratio_text(row.ratio)} x", (index, highest / unit), ha="center", va="bottom", fontsize=8)
        axes.set_xticks(range(len(shown)), [bar_label(row) for row in shown], fontsize=8)
        axes.set(ylabel=unit_name, title=title)
        axes.grid(True, axis="y", alpha=0.25)
    panels[0].legend(frameon=False, fontsize=8)
    figure.suptitle(f"{by_call['device']['name']}: time, lower is better; above the bars the peer's time over ours")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write README.md's table and the plot")
    wanted = parser.parse_args()
    by_call, by_graph = load(BY_CALL), load(BY_GRAPH)
    block = table(by_call, by_graph)
    if not wanted.write:
        sys.stdout.write(block + "\n")
        return
    README.write_text(put(README.read_text("utf-8"), block), "utf-8")
    PLOT.parent.mkdir(exist_ok=True)
    draw(by_call, by_graph, PLOT)


if __name__ == "__main__":
    main()
