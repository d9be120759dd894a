"""The command line: argument parsing only. Each command's work is in `flashqsa/cli`, imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flashqsa.cli import ab

app = typer.Typer(
    name="flashqsa",
    help="FlashQSA: Qwen Sparse Attention, exact, repeatable and fast.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(ab.app, name="ab")

JsonTarget = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE", help="Also write the results as JSON to FILE, or to standard output for -."),
]
RoutePin = Annotated[
    str | None,
    typer.Option(
        "--route",
        metavar="PIN",
        help="Use this route or fail: a mode (grouped), a kernel set (cpu), both (cpu:grouped), or reference.",
    ),
]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show everything that is logged, not route lines alone.")]
Seed = Annotated[int, typer.Option("--seed", min=0, max=2**32 - 1, help="Seed of a preset's random weights.")]
Threads = Annotated[int | None, typer.Option("--threads", metavar="N", help="CPU threads; torch's choice by default.")]
CaseName = Annotated[
    str | None, typer.Option("--case", metavar="NAME", help="Take a named case of `flashqsa verify --list`.")
]
PresetName = Annotated[
    str | None,
    typer.Option("--preset", metavar="NAME", help="Prefill this random preset: demo, demo-2x, demo-apart or tiny."),
]


def _version(wanted: bool) -> None:
    if wanted:
        from flashqsa import __version__

        typer.echo(f"flashqsa {__version__}")
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """FlashQSA: Qwen Sparse Attention, exact, repeatable and fast."""


@app.command()
def run(
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="[PROMPT_FILE|-]",
            help="Text to prefill, - for standard input. By default the language reference that comes with Python.",
        ),
    ] = None,
    model: Annotated[
        Path | None, typer.Option("--model", metavar="FOLDER", help="A Qwen4-Exp model and its tokenizer on disk.")
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            "--preset",
            metavar="NAME",
            help="A random model instead: demo (the released model's sparse geometry, small everything else; the "
            "default), demo-2x (two sparse layers), demo-apart (rows that share little), tiny, or for a GPU released "
            "(every layer as wide as the released model's) and released-64 (with an eighth of its experts).",
        ),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option("--layers", metavar="N", help="Layers of a preset; released has as many as memory holds."),
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", metavar="NAME", help="cpu, cuda or cuda:1; a GPU where there is one.")
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            "--tokens",
            metavar="LIST",
            help="Cut the prompt to so many tokens, or run several lengths: 1k,29k,250k. By default a file is whole, "
            "Python's text 8192.",
        ),
    ] = None,
    chunk: Annotated[int, typer.Option("--chunk", metavar="N", help="Rows of one prefill chunk.")] = 2048,
    decode: Annotated[int, typer.Option("--decode", metavar="N", help="New tokens to generate, greedily.")] = 32,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            metavar="DTYPE",
            help="float32 (a preset's default on a CPU), bfloat16 (on a GPU) or float16 (on one before 8.0); else a "
            "model's own.",
        ),
    ] = None,
    seed: Seed = 0,
    threads: Threads = None,
    compare: Annotated[
        str | None,
        typer.Option(
            "--compare",
            metavar="stock",
            help="Also run the stock layer and compare time, logits and selections. Slow: its indexer loops in Python.",
        ),
    ] = None,
    graph: Annotated[
        str,
        typer.Option("--graph", metavar="WHEN", help="Decode steps in CUDA graphs: auto (on a GPU), on or off."),
    ] = "auto",
    draft: Annotated[
        str | None,
        typer.Option(
            "--draft", metavar="lookup", help="Guess from the text what comes next, and verify up to 9 rows a step."
        ),
    ] = None,
    kv_dtype: Annotated[
        str,
        typer.Option("--kv-dtype", metavar="DTYPE", help="Keys and values in the cache: auto (the model's) or fp8."),
    ] = "auto",
    route: RoutePin = None,
    verbose: Verbose = False,
    json_target: JsonTarget = None,
) -> None:
    """Prefill and decode a Qwen4-Exp model in Transformers, with FlashQSA in place of its sparse layers.

    Shows which routes ran and why, the time to the first token, rates, the sparse layers' share and peak memory.
    """
    from flashqsa.cli import show

    def work(screen: show.Screen) -> int:
        from flashqsa.cli.run import Job, run

        job = Job(
            prompt=prompt,
            model=model,
            preset=preset,
            tokens=tokens,
            chunk=chunk,
            decode=decode,
            dtype=dtype,
            seed=seed,
            threads=threads,
            compare=compare,
            route=route,
            verbose=verbose,
            device=device,
            layers=layers,
            graph=graph,
            draft=draft,
            kv_dtype=kv_dtype,
        )
        return run(job, screen, json_target)

    raise typer.Exit(show.carried_out(json_target, work))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|PRESET", help="A folder or a name on Hugging Face's hub, or a preset as `flashqsa run` has."
        ),
    ],
    host: Annotated[
        str | None, typer.Option("--host", metavar="NAME", help="Listen here; localhost by default.")
    ] = None,
    port: Annotated[
        int | None, typer.Option("--port", metavar="N", help="Listen on this port; 8000 by default.")
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", metavar="NAME", help="cpu, cuda or cuda:1; a GPU where there is one.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", metavar="DTYPE", help="float32, bfloat16 or float16; the model's own by default."),
    ] = None,
    seed: Seed = 0,
    threads: Threads = None,
    stock: Annotated[bool, typer.Option("--stock", help="Leave the stock sparse layers in place, to compare.")] = False,
    route: RoutePin = None,
    verbose: Verbose = False,
) -> None:
    """Serve a Qwen4-Exp model with Transformers' OpenAI-compatible server, FlashQSA in place of its sparse layers.

    Logs each route at its first use, and every reason why a call was left to the stock layer. Takes the other options
    of `transformers serve` too: `flashqsa serve MODEL -- --help` shows them.
    """
    from flashqsa.cli import show

    def work(screen: show.Screen) -> int:
        from flashqsa.cli.serve import Serving, serve

        passed = tuple(word for word in context.args if word != "--")
        return serve(Serving(model, host, port, device, dtype, seed, threads, route, verbose, stock, passed), screen)

    raise typer.Exit(show.carried_out(None, work))


@app.command()
def doctor(json_target: JsonTarget = None) -> None:
    """Show what is installed, which devices are here, which routes serve them and why others do not.

    Runs a small self-test. The exit code is 0 where FlashQSA works on the CPU.
    """
    from flashqsa.cli import show

    def work(screen: show.Screen) -> int:
        from flashqsa.cli.doctor import doctor

        return doctor(screen, json_target)

    raise typer.Exit(show.carried_out_bare(json_target, work))


@app.command()
def explain(
    rows: Annotated[int, typer.Option("--rows", metavar="N", help="Query rows of the call.")] = 2048,
    requests: Annotated[int, typer.Option("--requests", metavar="N", help="Requests they belong to.")] = 1,
    context: Annotated[int, typer.Option("--context", metavar="N", help="Tokens of the longest request.")] = 32768,
    heads: Annotated[
        str, typer.Option("--heads", metavar="Q/KV", help="Query heads and KV heads on this rank.")
    ] = "24/2",
    head_dim: Annotated[int, typer.Option("--head-dim", metavar="N", help="Numbers per head.")] = 256,
    dtype: Annotated[
        str, typer.Option("--dtype", metavar="DTYPE", help="Of the queries: float32, float16 or bfloat16.")
    ] = "float32",
    cache_dtype: Annotated[
        str | None,
        typer.Option(
            "--cache-dtype", metavar="DTYPE", help="Of the caches; also float8_e4m3fn. The queries' by default."
        ),
    ] = None,
    page_tokens: Annotated[int, typer.Option("--page-tokens", metavar="N", help="Tokens per cache page.")] = 64,
    top_blocks: Annotated[int, typer.Option("--top-blocks", metavar="N", help="Blocks a row selects.")] = 512,
    device: Annotated[
        str,
        typer.Option("--device", metavar="NAME", help="here, cpu, or a GPU that need not be here: v100, t4, h200, ..."),
    ] = "here",
    batch_invariant: Annotated[
        bool, typer.Option("--batch-invariant", help="A row gets the same bits whatever shares its launch.")
    ] = False,
    route: RoutePin = None,
    json_target: JsonTarget = None,
) -> None:
    """Show the route of a described call, and why each other route was refused. Nothing is launched.

    The exit code is 1 where no route serves the call.
    """
    from flashqsa.cli import show

    def work(screen: show.Screen) -> int:
        from flashqsa.cli.explain import Question, explain

        question = Question(
            rows,
            requests,
            context,
            heads,
            head_dim,
            dtype,
            cache_dtype,
            page_tokens,
            top_blocks,
            device,
            route,
            batch_invariant,
        )
        return explain(question, screen, json_target)

    raise typer.Exit(show.carried_out(json_target, work))


@app.command()
def verify(
    device: Annotated[str, typer.Option("--device", metavar="NAME", help="cpu, cuda or cuda:1.")] = "cpu",
    case: Annotated[
        list[str] | None, typer.Option("--case", metavar="NAME", help="Only this case; may be given several times.")
    ] = None,
    tag: Annotated[
        str | None, typer.Option("--tag", metavar="TAG", help="Only cases with this tag: smoke takes seconds.")
    ] = None,
    list_only: Annotated[bool, typer.Option("--list", help="Show the cases without running them.")] = False,
    route: RoutePin = None,
    verbose: Verbose = False,
    json_target: JsonTarget = None,
) -> None:
    """Run the case list on a device and compare every result with the reference.

    The exit code is 1 unless every case passes.
    """
    from flashqsa.cli import show

    def work(screen: show.Screen) -> int:
        from flashqsa.cli.verify import Selected, list_cases, verify

        selected = Selected(device, tuple(case or ()), tag, route, verbose)
        return list_cases(selected, screen, json_target) if list_only else verify(selected, screen, json_target)

    raise typer.Exit(show.carried_out(json_target, work))


Tokens = Annotated[int, typer.Option("--tokens", metavar="N", help="Prompt tokens of a preset's prefill.")]
Chunk = Annotated[int, typer.Option("--chunk", metavar="N", help="Rows of one prefill chunk.")]
ChunkIndex = Annotated[
    int | None, typer.Option("--chunk-index", metavar="N", help="Which chunk, from 0; the last one by default.")
]


@app.command()
def capture(
    folder: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to save under; nothing in it is overwritten.")],
    case: CaseName = None,
    preset: PresetName = None,
    tokens: Tokens = 4096,
    chunk: Chunk = 1024,
    chunk_index: ChunkIndex = None,
    seed: Seed = 0,
    threads: Threads = None,
    json_target: JsonTarget = None,
) -> None:
    """Save one call, with its tensors, metadata and route, for `flashqsa replay` and `flashqsa stats`.

    The call is a named case, or one chunk of a preset's prefill. To capture calls of a program of your own, set
    FLASHQSA_CAPTURE to a folder.
    """
    from flashqsa.cli import show

    def work(screen: show.Screen) -> int:
        from flashqsa.cli.captures import Source, capture_calls

        source = Source(case, preset, tokens, chunk, chunk_index, seed, threads)
        return capture_calls(folder, source, screen, json_target)

    raise typer.Exit(show.carried_out(json_target, work))


@app.command()
def replay(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="One capture, such as OUT/sparse_attention.")],
    time: Annotated[
        int, typer.Option("--time", metavar="N", help="Time N calls after a warm-up instead of verifying.")
    ] = 0,
    rows: Annotated[
        int, typer.Option("--rows", metavar="N", help="Verify N rows, evenly spaced; 0 for all. The reference is slow.")
    ] = 64,
    route: RoutePin = None,
    threads: Threads = None,
    json_target: JsonTarget = None,
) -> None:
    """Make a captured call again, and verify it against the reference or time it.

    Takes the captured route where this machine has it. Loading a capture runs no code from it. The exit code is 1 where
    the result is wrong.
    """
    from flashqsa.cli import show

    def work(screen: show.Screen) -> int:
        from flashqsa.cli.captures import Again, replay

        return replay(folder, Again(time, rows, route, threads), screen, json_target)

    raise typer.Exit(show.carried_out(json_target, work))


@app.command()
def stats(
    folder: Annotated[
        Path | None, typer.Argument(metavar="[FOLDER]", help="A capture; without one a preset or case is run.")
    ] = None,
    case: CaseName = None,
    preset: PresetName = None,
    tokens: Tokens = 4096,
    chunk: Chunk = 1024,
    chunk_index: ChunkIndex = None,
    page_tokens: Annotated[
        int | None, typer.Option("--page-tokens", metavar="N", help="Count pages of N tokens instead of the cache's.")
    ] = None,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE.png", help="Also draw it (matplotlib).")] = None,
    seed: Seed = 0,
    threads: Threads = None,
    json_target: JsonTarget = None,
) -> None:
    """Show how much rows share: overlap of neighbours, union by group size, ties, pages read, distance.

    Ties at the cut need scores, so a capture of select_blocks, a preset or a case.
    """
    from flashqsa.cli import show

    def work(screen: show.Screen) -> int:
        from flashqsa.cli.captures import Source, stats

        source = Source(case, preset, tokens, chunk, chunk_index, seed, threads)
        return stats(folder, source, page_tokens, plot, screen, json_target)

    raise typer.Exit(show.carried_out(json_target, work))


@app.command()
def bench(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="attention|indexer|decode|pipeline|all",
            help="What to measure: attention on given selections, scoring and top-k, steps of many requests, both "
            "stages of a chunk, or with --suite all of these.",
        ),
    ],
    suite: Annotated[
        str | None,
        typer.Option(
            "--suite", metavar="NAME", help="A ready list: smoke (seconds), targets, sweep (the indexer) or full."
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", metavar="NAME", help="cpu, cuda or cuda:1; a GPU where there is one.")
    ] = None,
    rows: Annotated[
        str | None, typer.Option("--rows", metavar="LIST", help="Rows of a chunk, as 1616,8192; k stands for 1,000.")
    ] = None,
    heads: Annotated[
        str | None, typer.Option("--heads", metavar="LIST", help="Query heads/KV heads, as 24/2,12/1,6/1.")
    ] = None,
    regime: Annotated[
        str | None,
        typer.Option("--regime", metavar="LIST", help="How much rows share: near,mid,far,equal,disjoint."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", metavar="LIST", help="Of the caches: bf16,fp16,fp8,fp32.")
    ] = None,
    context: Annotated[
        str | None,
        typer.Option("--context", metavar="LIST", help="Tokens, as 24240,7.5k,1M; for attention a regime has its own."),
    ] = None,
    batch: Annotated[
        str | None, typer.Option("--batch", metavar="LIST", help="Requests of a step, as 1,16,64.")
    ] = None,
    rows_per_request: Annotated[
        str | None,
        typer.Option(
            "--rows-per-request", metavar="LIST", help="Rows of each of them, as 1,4,5: 1 and drafts to verify."
        ),
    ] = None,
    share: Annotated[
        bool | None,
        typer.Option(
            "--share/--no-share", help="Whether rows of one decode request select the same; they do by default."
        ),
    ] = None,
    gate: Annotated[
        bool | None, typer.Option("--gate/--no-gate", help="Whether the output is gated; it is by default.")
    ] = None,
    page_tokens: Annotated[
        str | None, typer.Option("--page-tokens", metavar="LIST", help="Tokens per cache page; 16 by default.")
    ] = None,
    head_dim: Annotated[
        int | None, typer.Option("--head-dim", metavar="N", help="Numbers per head; 256 by default.")
    ] = None,
    top_blocks: Annotated[
        int | None, typer.Option("--top-blocks", metavar="N", help="Blocks a row selects; 512 by default.")
    ] = None,
    every_route: Annotated[
        bool | None,
        typer.Option("--every-route", help="Time each route that can serve a case of the indexer, in turn."),
    ] = None,
    calls: Annotated[
        int | None, typer.Option("--calls", metavar="N", help="Timed calls of each; 20 on a GPU, 5 on a CPU.")
    ] = None,
    cold: Annotated[bool, typer.Option("--cold", help="Flush the caches before each call.")] = False,
    graph: Annotated[
        str, typer.Option("--graph", metavar="WHEN", help="Time replays of CUDA graphs: auto (for decode), on or off.")
    ] = "auto",
    peer: Annotated[
        Path | None,
        typer.Option("--peer", metavar="FILE.py", help="Time another implementation beside: see docs/BENCH.md."),
    ] = None,
    check_rows: Annotated[
        int, typer.Option("--check-rows", metavar="N", help="Rows compared with the reference in cases of over 64.")
    ] = 24,
    route: RoutePin = None,
    seed: Annotated[int, typer.Option("--seed", min=0, max=2**32 - 1, help="Seed of the inputs.")] = 0,
    threads: Threads = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE.png", help="Draw time against context and overlap (matplotlib)."),
    ] = None,
    verbose: Verbose = False,
    json_target: JsonTarget = None,
) -> None:
    """Verify and then time attention, the indexer, decode steps or whole chunks, on a GPU or a CPU.

    A wrong result gets no time. Shows the share of the machine's measured roofs, how much rows shared and the largest
    error. The exit code is 1 unless every case was right and timed.
    """
    from flashqsa.cli import show

    def work(screen: show.Screen) -> int:
        from flashqsa.cli.bench import Settings, bench
        from flashqsa.cli.bench_cases import Wanted

        wanted = Wanted(
            rows,
            heads,
            regime,
            dtype,
            context,
            batch,
            rows_per_request,
            share,
            gate,
            page_tokens,
            head_dim,
            top_blocks,
            every_route,
        )
        settings = Settings(device, calls, cold, graph, peer, route, seed, threads, check_rows, verbose)
        return bench(kind, suite, wanted, settings, screen, json_target, plot)

    raise typer.Exit(show.carried_out(json_target, work))


@app.command()
def build(
    arch: Annotated[
        str | None,
        typer.Option(
            "--arch",
            metavar="LIST",
            help="Compute capabilities, as '7.0;7.5'. By default FLASHQSA_CUDA_ARCH_LIST, or those of the GPUs here.",
        ),
    ] = None,
    json_target: JsonTarget = None,
) -> None:
    """Compile CUDA C++ for GPUs that need not be here, so that calls need no compiler: for container images.

    Fills the folder of FLASHQSA_CACHE_DIR. Triton's kernels are compiled at their first use all the same. The exit code
    is 1 where something was not compiled.
    """
    from flashqsa.cli import show

    def work(screen: show.Screen) -> int:
        from flashqsa.cli.build import build

        return build(arch, screen, json_target)

    raise typer.Exit(show.carried_out(json_target, work))


def main() -> None:
    """The `flashqsa` command."""
    app()


if __name__ == "__main__":
    main()
