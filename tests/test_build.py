"""`flashqsa build`: what it compiles, that calls ask for nothing else, that its folder serves without a compiler."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main
from typer.testing import CliRunner

from flashqsa import pipeline
from flashqsa.__main__ import app
from flashqsa.cli import build as command
from flashqsa.cli.show import UserError
from flashqsa.device import DeviceFacts
from flashqsa.kernels.nvrtc import CompileError, Kernel, NvrtcNotFoundError, Source, compile_source, library
from flashqsa.kernels.nvrtc.library import Nvrtc, nvrtc_for
from flashqsa.kernels.nvrtc.sparse import AttendKernels
from flashqsa.plan import make_plan
from flashqsa.route import Call
from flashqsa.values import FP8, IndexCache, KvCache, QsaSpec, Rows, Scores, Selection

VOLTA, TURING, HOPPER = (7, 0), (7, 5), (9, 0)
FP16, BF16 = torch.float16, torch.bfloat16
LOG = """ptxas info    : Compiling entry function 'one' for 'sm_75'
ptxas info    : Function properties for one
ptxas         .     8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 33 registers, used 1 barriers, 384 bytes smem, 480 bytes cmem[0]
ptxas info    : Compiling entry function 'two' for 'sm_75'
ptxas info    : Function properties for two
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 28 registers, used 0 barriers, 424 bytes cmem[0]
"""


class StandIn(Nvrtc):
    """A compiler that answers with its version and the options, and refuses a source of a name."""

    def compile(  # type: ignore[override]
        self, name: str, _source: str, _headers: tuple[tuple[str, str], ...], options: tuple[str, ...]
    ) -> tuple[bytes | None, str]:
        if name == "refused.cu":
            return None, "refused.cu(1): error: made up"
        return f"{self.version} {options}".encode(), LOG


def stand_in(major: int, minor: int, *archs: int) -> StandIn:
    return StandIn(f"libnvrtc.so.{major}", (major, minor), frozenset(archs), None)  # type: ignore[arg-type]


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Nvrtc]]:
    """The compilers that are found, to be changed by the test; an empty cache folder."""
    found: list[Nvrtc] = [stand_in(12, 6, 70, 75, 80, 90)]
    monkeypatch.setattr(library, "installed", lambda: tuple(found))
    monkeypatch.setenv("FLASHQSA_CACHE_DIR", str(tmp_path / "cache"))
    compile_source.cache_clear()
    yield found
    compile_source.cache_clear()


def forget_compilers(libraries: list[Nvrtc]) -> None:
    """As in another process, on a machine without NVRTC."""
    libraries.clear()
    compile_source.cache_clear()


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["build", *arguments])


def test_its_folder_serves_without_a_compiler(libraries: list[Nvrtc], tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    result = invoke("--arch", "7.0;7.5", "--json", str(report))
    assert result.exit_code == 0, result.output
    told = json.loads(report.read_text())
    assert told["failed"] == 0
    assert told["folder"] == str(tmp_path / "cache" / "nvrtc")
    forget_compilers(libraries)
    for capability in (VOLTA, TURING):
        sources = command.sources_for(capability)
        assert len(sources) >= 15
        assert len([k for k in told["kernels"] if k["arch"] == ".".join(map(str, capability))]) == 2 * len(sources)
        for source in sources:
            found = compile_source(source, capability)
            assert f"sm_{capability[0]}{capability[1]}".encode() in found.cubin
            assert found.folder is not None
    with pytest.raises(NvrtcNotFoundError, match=r"sm_80; found: none"):
        compile_source(sources[0], (8, 0))
    with pytest.raises(NvrtcNotFoundError):
        compile_source(replace(sources[0], defines=(("OTHER", 1),)), TURING)


def test_what_goes_in_decides_which_entry_serves(libraries: list[Nvrtc], tmp_path: Path) -> None:
    (tmp_path / "a.cuh").write_text("one")
    source = Source("a.cu", (("WIDTH", 4),), text="text", headers=("a.cuh",), folder=tmp_path)
    compile_source(source, TURING)
    forget_compilers(libraries)
    assert compile_source(source, TURING).cubin.startswith(b"(12, 6)")
    for other in (
        replace(source, text="other"),
        replace(source, defines=(("WIDTH", 5),)),
        replace(source, suffix="a"),
        replace(source, virtual=True),
        replace(source, name="b.cu"),
    ):
        with pytest.raises(NvrtcNotFoundError):
            compile_source(other, TURING)
    (tmp_path / "a.cuh").write_text("two")
    compile_source.cache_clear()
    with pytest.raises(NvrtcNotFoundError):
        compile_source(source, TURING)


def test_the_newest_whole_entry_serves_and_older_architectures_of_a_major_version(libraries: list[Nvrtc]) -> None:
    source = Source("a.cu", text="text")
    made = {}
    for version in ((12, 6), (12, 10), (12, 9)):
        libraries[:] = [stand_in(*version, 80)]
        compile_source.cache_clear()
        made[version] = compile_source(source, (8, 0)).folder
    forget_compilers(libraries)
    assert compile_source(source, (8, 0)).cubin.startswith(b"(12, 10)")
    assert compile_source(source, (8, 6)).cubin.startswith(b"(12, 10)")
    compile_source.cache_clear()
    newest = made[12, 10]
    assert newest is not None
    (newest / "kernel.cubin").write_bytes(b"half")
    newest.with_name(f"{newest.name}.unfinished").mkdir()
    assert compile_source(source, (8, 0)).cubin.startswith(b"(12, 9)")
    with pytest.raises(NvrtcNotFoundError):
        compile_source(source, TURING)


def test_a_compiler_that_is_here_comes_before_entries_of_others(libraries: list[Nvrtc]) -> None:
    source = Source("a.cu", text="text")
    compile_source(source, TURING)
    compile_source.cache_clear()
    libraries[:] = [stand_in(13, 0, 75)]
    assert compile_source(source, TURING).cubin.startswith(b"(13, 0)")


@pytest.mark.parametrize("archs", ["8.0", "8.6", "8.9", "9.0", "10.0", "12.0", "12.1"])
def test_newer_architectures_have_their_shared_kernels(archs: str, libraries: list[Nvrtc]) -> None:
    (capability,) = command.parse_archs(archs)
    names = {source.name for source in command.sources_for(capability)}
    shared = {"everything.cu", "worklist.cu", "write.cu", "topk.cu", "products.cu", "prepare.cu"}
    own = {"attend.cu", "decode.cu", "score.cu", "survivors.cu", "rescore.cu"}
    assert names == (shared | own if capability == HOPPER else shared)


def test_failures_are_told_and_counted(libraries: list[Nvrtc], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sources = [Source("fine.cu", text="text"), Source("refused.cu", (("WIDTH", 4),), text="text")]
    monkeypatch.setattr(command, "sources_for", lambda _: sources)
    report = tmp_path / "report.json"
    result = invoke("--arch", "7.5,12.0", "--json", str(report))
    assert result.exit_code == 1
    told = json.loads(report.read_text())
    assert told["failed"] == 3
    assert [(k["arch"], k["kernel"]) for k in told["kernels"] if k["error"] is None] == [("7.5", "one"), ("7.5", "two")]
    assert "refused.cu WIDTH=4" in result.stdout
    assert "no NVRTC here compiles for sm_120" in " ".join(result.stdout.split())
    assert "2 kernels" in result.stdout
    assert "Triton's kernels" in result.stdout
    with pytest.raises(CompileError):
        compile_source(sources[1], TURING)


def test_a_folder_that_cannot_be_written_is_a_failure(
    libraries: list[Nvrtc], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "sources_for", lambda _: [Source("fine.cu", text="text")])
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLASHQSA_CACHE_DIR", str(tmp_path / "file"))
    result = invoke("--arch", "7.5")
    assert result.exit_code == 1
    assert "the cache folder cannot be written" in result.stdout


def test_kernels_that_cannot_be_imported_are_a_failure(libraries: list[Nvrtc], monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(_: tuple[int, int]) -> list[Source]:
        raise ModuleNotFoundError("No module named 'triton'")

    monkeypatch.setattr(command, "sources_for", absent)
    result = invoke("--arch", "9.0")
    assert result.exit_code == 1
    assert "9.0" in result.stdout
    assert "cannot be imported: No module named 'triton'" in result.stdout


def test_the_log_is_read_kernel_by_kernel() -> None:
    assert command.read_log(LOG) == [("one", 33, 384, 4), ("two", 28, 0, 0)]
    assert command.read_log("nothing of the kind") == []


@pytest.mark.parametrize("text", ["6.1", "7.5;x", "75", "sm_75", "7.5+PTX"])
def test_architectures_without_kernels_are_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    result = invoke("--arch", text)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: --arch: wanted some of 7.0, 7.5,")
    monkeypatch.setenv("FLASHQSA_CUDA_ARCH_LIST", text)
    result = invoke()
    assert result.exit_code == 2
    assert result.stderr.startswith("error: FLASHQSA_CUDA_ARCH_LIST: wanted some of 7.0, 7.5,")
    assert ("PTX is not made" in result.stderr) == ("PTX" in text)


@pytest.mark.parametrize("capability", [VOLTA, HOPPER], ids=str)
def test_a_small_workspace_leaves_out_nothing(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A container is built with one limit and runs with another: the default is always compiled for."""
    wanted = set(command.sources_for(capability))
    monkeypatch.setenv("FLASHQSA_WORKSPACE_MIB", "1")
    assert wanted <= set(command.sources_for(capability))


def test_the_list_comes_from_the_option_then_the_variable_then_the_gpus(
    libraries: list[Nvrtc], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []

    def no_sources(capability: tuple[int, int]) -> list[Source]:
        asked.append(capability)
        return []

    monkeypatch.setattr(command, "sources_for", no_sources)
    monkeypatch.setenv("FLASHQSA_CUDA_ARCH_LIST", "7.5;7.0;7.5")
    assert invoke().exit_code == 0
    assert asked == [TURING, VOLTA]
    asked.clear()
    assert invoke("--arch", "9.0").exit_code == 0
    assert asked == [HOPPER]
    monkeypatch.delenv("FLASHQSA_CUDA_ARCH_LIST")
    monkeypatch.setattr(command, "_gpus", lambda: 0)
    with pytest.raises(UserError, match="no GPU is here: name architectures"):
        command.parse_archs("")
    monkeypatch.setattr(command, "_gpus", lambda: 2)
    monkeypatch.setattr(command, "facts_here", lambda _: DeviceFacts.named("t4"))
    assert command.parse_archs(" ") == [TURING]


def test_every_option_has_its_help() -> None:
    found = typer.main.get_command(app).commands["build"]  # type: ignore[attr-defined]
    assert found.help
    assert all(parameter.help or parameter.name == "help" for parameter in found.params)


# What calls ask for: launches are recorded, not made, on CPU tensors with the plans of GPUs that are not here.


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> set[Source]:
    """Sources of the kernels that would have been launched."""
    found: set[Source] = set()
    monkeypatch.setattr(Kernel, "launch", lambda kernel, *_: found.add(kernel.source))
    monkeypatch.setattr(import_module("flashqsa.kernels.nvrtc.products"), "multiply", lambda *_: None)
    return found


def call_everything(gpu: str, rows: int, requests: int, context: int, heads: tuple[int, int], dtypes: Any) -> None:
    """Selects, attends and writes as a model does, through the kernel sets that the plan names."""
    facts, spec, (q_dtype, cache_dtype) = DeviceFacts.named(gpu), QsaSpec(*heads), dtypes
    queries = [rows // requests] * requests
    batch = Rows.from_lengths(queries, [context] * requests)
    plan = make_plan(Call(spec, rows, requests, context - 1, q_dtype, cache_dtype), facts)
    table = torch.full((requests, -(-context // 64)), -1, dtype=torch.int32)
    raw = torch.zeros(requests, 8, spec.index_dim, dtype=q_dtype)
    index_cache = IndexCache(torch.zeros(1, 16, spec.index_dim).to(cache_dtype), table, raw_keys=raw)
    kv_cache = KvCache.interleaved(torch.zeros(1, 2, 64, spec.kv_heads, spec.head_dim).to(cache_dtype), table)
    selecting = pipeline.kernel_set(plan.select_decision.route.kernel_set)
    index_q = torch.zeros(rows, spec.index_heads, spec.index_dim, dtype=q_dtype)
    # Hopper's folder selects for long chunks; what else is done with index keys it leaves to Triton's.
    writing = pipeline.kernel_set("smxx") if plan.select_decision.route.kernel_set == "sm90" else selecting
    selection: Selection = writing.empty_selection(batch, spec)
    if plan.select_decision.route.mode == "everything":
        selecting.select_everything(index_cache, batch, spec, plan.select)
    elif plan.select_decision.route.mode == "fused":
        selecting.select_fused(index_q, index_cache, batch, spec, plan.select)
    else:
        for start, stop in plan.select.chunks(rows):
            part = batch.slice(start, stop)
            if plan.select_decision.route.kernel_set == "sm7x":
                scores = selecting.score(index_q[start:stop], index_cache, part, spec, plan.select)
            else:
                seen = torch.zeros(stop - start, dtype=torch.int32)
                scores = Scores(torch.empty(stop - start, plan.select.width_blocks), seen)
            selecting.topk(scores, selection.slice(start, stop), plan.select)
    q = torch.zeros(rows, spec.q_heads, spec.head_dim, dtype=q_dtype)
    attending = pipeline.kernel_set(plan.attend_decision.route.kernel_set)
    attending.sparse_attention(q, kv_cache, selection, batch, spec, q, True, plan.attend)
    new = torch.zeros(rows, spec.kv_heads, spec.head_dim, dtype=q_dtype)
    writing.write_kv(new, new, kv_cache, batch, facts.capability)
    norm, turn = torch.zeros(spec.index_dim), torch.zeros(rows, 64)
    keys = torch.zeros(rows, spec.index_dim, dtype=q_dtype)
    writing.write_index_keys(keys, index_cache, batch, spec, norm, turn, turn, 1e-6, facts.capability)


SHAPES = ((1, 1, 777), (1, 1, 40_000), (5, 1, 200_000), (64, 64, 32_768), (320, 64, 32_768), (1616, 1, 184_000))
"""Rows, requests and tokens."""


@pytest.mark.parametrize("gpu", ["v100", "t4", "rtx8000"])
@pytest.mark.parametrize("cache_dtype", [FP16, FP8], ids=["fp16", "fp8"])
def test_volta_and_turing_ask_for_nothing_else(gpu: str, cache_dtype: torch.dtype, asked: set[Source]) -> None:
    for heads in ((24, 2), (6, 1)):
        for shape in (*SHAPES, (1000, 1, 1_000_000), (1617, 3, 29_000)):
            call_everything(gpu, *shape, heads, (FP16, cache_dtype))
    assert {source.name for source in asked} >= {"score.cu", "products.cu", "topk.cu", "attend.cu", "write.cu"}
    capability = DeviceFacts.named(gpu).capability
    assert capability is not None
    assert asked <= set(command.sources_for(capability))


@pytest.mark.parametrize("dtypes", [(FP16, FP8), (BF16, BF16), (BF16, FP8)], ids=["fp16-fp8", "bf16", "bf16-fp8"])
def test_hopper_asks_for_nothing_else(
    dtypes: tuple[torch.dtype, torch.dtype], asked: set[Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="the folder of Hopper's attention takes its merge from Triton's")
    for name in ("sm90", "smxx"):
        kernels = pipeline.kernel_set(name)
        attend = kernels.KERNELS.attend if name == "sm90" else lambda *_: None
        monkeypatch.setattr(kernels, "KERNELS", AttendKernels(attend, lambda *_: None))
    for heads in ((24, 2), (6, 1)):
        for shape in SHAPES:
            call_everything("h200", *shape, heads, dtypes)
    wanted = {"topk.cu", "attend.cu", "write.cu"}
    assert {source.name for source in asked} >= (wanted | {"survivors.cu"} if dtypes == (BF16, BF16) else wanted)
    assert asked <= set(command.sources_for(HOPPER))


# With a real NVRTC; without one for the architecture the test is skipped.


def test_what_is_built_is_what_a_device_loads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    try:
        nvrtc_for(TURING)
    except NvrtcNotFoundError as error:
        pytest.skip(str(error))
    chosen = [s for s in command.sources_for(TURING) if s.name in ("everything.cu", "score.cu", "merge.cu")][:4]
    monkeypatch.setattr(command, "sources_for", lambda _: chosen)
    monkeypatch.setenv("FLASHQSA_CACHE_DIR", str(tmp_path))
    compile_source.cache_clear()
    result = invoke("--arch", "7.5", "--json", "-")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)["kernels"]
    assert [entry["source"] for entry in told] == [source.name for source in chosen]
    assert all(0 < entry["registers"] <= 255 and entry["seconds"] > 0 for entry in told)
    monkeypatch.setattr(library, "installed", lambda: ())
    compile_source.cache_clear()
    for source in chosen:
        assert compile_source(source, TURING).cubin.startswith(b"\x7fELF")
    compile_source.cache_clear()
