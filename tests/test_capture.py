"""Captures: what is saved of a call comes back bit by bit, nothing is overwritten, and no file can run code."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flashqsa import __version__, capture, pipeline
from flashqsa.capture import CALL_FILE, TENSORS_FILE, CaptureError, Noted
from flashqsa.device import DeviceFacts
from flashqsa.knobs import CAPTURE
from flashqsa.plan import make_plan
from flashqsa.route import Call
from flashqsa.testing.cases import Case, spec_of
from flashqsa.testing.compare import same_bits
from flashqsa.testing.inputs import Inputs, build
from flashqsa.values import FP8, IndexCache, KvCache, Rows, Run, Selection

SPEC = spec_of(6, 2, top_blocks=4)
CASES = [
    Case("capture-fp32", (5, 1), (40, 23), SPEC, padding=(0, 6)),
    Case("capture-bf16", (5, 1), (40, 23), SPEC, torch.bfloat16, torch.bfloat16, 64, layout="packed"),
    Case("capture-fp8", (5, 1), (40, 23), SPEC, torch.bfloat16, FP8, order="reversed"),
    Case("capture-fp8-heads", (5, 1), (40, 23), SPEC, torch.float32, FP8, head_scales=True, layout="apart"),
    Case("capture-holes", (5, 1), (40, 23), SPEC, holes=((0, 1),), gate=False, layout="wide-view"),
    Case("capture-dense", (5, 3), (12, 9), SPEC),
    Case("capture-no-rows", (0, 0), (12, 9), SPEC),
]


def record(inputs: Inputs, folder: Path) -> tuple[Selection, Tensor, Tensor]:
    """Makes both calls of a case under `recording`; returns what they gave."""
    with capture.recording(folder):
        selection = pipeline.select_blocks(inputs.index_q, inputs.index_cache, inputs.rows, inputs.spec)
        output, lse = pipeline.sparse_attention(
            inputs.q, inputs.kv_cache, selection, inputs.rows, inputs.spec, inputs.gate, return_lse=True
        )
    return selection, output, lse


def noted(**values: Any) -> Noted:
    """A small attention call with some of its values replaced."""
    inputs = build(CASES[0])
    plan = make_plan(Call(SPEC, inputs.rows.count, 2, 39), DeviceFacts.named("cpu"))
    selection = pipeline.select_blocks(inputs.index_q, inputs.index_cache, inputs.rows, SPEC)
    held = {"q": inputs.q, "gate": inputs.gate, "kv_cache": inputs.kv_cache, "selection": selection}
    return Noted("sparse_attention", SPEC, inputs.rows, plan, {**held, **values})


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A good capture of a small attention call."""
    return capture.save(tmp_path / "call", noted())


def rewrite(folder: Path, **fields: object) -> None:
    """Changes fields of a capture's JSON."""
    path = folder / CALL_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def with_digest(folder: Path, content: bytes) -> None:
    """Puts `content` in the place of the tensors, as a forger would: the digest fits."""
    (folder / TENSORS_FILE).write_bytes(content)
    rewrite(folder, sha256=capture._digest(folder / TENSORS_FILE))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_loaded_call_gives_the_same_bits(case: Case, tmp_path: Path) -> None:
    inputs = build(case)
    selection, output, lse = record(inputs, tmp_path)

    chosen = capture.load(tmp_path / "select_blocks")
    index_cache = chosen.values["index_cache"]
    assert isinstance(index_cache, IndexCache)
    again = pipeline.select_blocks(chosen.tensor("index_q"), index_cache, chosen.rows, chosen.spec, route=chosen.route)
    assert same_bits(again.blocks, selection.blocks)
    assert same_bits(again.count, selection.count)

    attended = capture.load(tmp_path / "sparse_attention")
    kv_cache, held, gate = (attended.values[name] for name in ("kv_cache", "selection", "gate"))
    assert isinstance(kv_cache, KvCache)
    assert isinstance(held, Selection)
    assert gate is None or isinstance(gate, Tensor)
    found = pipeline.sparse_attention(
        attended.tensor("q"), kv_cache, held, attended.rows, attended.spec, gate, True, route=attended.route
    )
    assert same_bits(found[0], output)
    assert same_bits(found[1], lse)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_a_call_reads_comes_back_bit_by_bit(case: Case, tmp_path: Path) -> None:
    inputs = build(case)
    record(inputs, tmp_path)
    call = capture.load(tmp_path / "sparse_attention")
    cache, before = call.values["kv_cache"], inputs.kv_cache
    assert isinstance(cache, KvCache)
    assert (call.spec, call.rows.max_position) == (inputs.spec, inputs.rows.max_position)
    assert same_bits(call.rows.request, inputs.rows.request)
    assert same_bits(call.rows.position, inputs.rows.position)
    assert same_bits(call.tensor("q"), inputs.q)
    for name in ("k_scale", "v_scale"):
        ours, theirs = getattr(cache, name), getattr(before, name)
        assert same_bits(ours, theirs) if isinstance(theirs, Tensor) else ours == theirs
    assert cache.page_table.shape == before.page_table.shape
    for request, tokens in enumerate(case.context_lengths):
        for page in range(-(-tokens // case.page_tokens) if case.query_lengths[request] else 0):
            new, old = int(cache.page_table[request, page]), int(before.page_table[request, page])
            assert (new < 0) == (old < 0)
            if old >= 0:
                assert same_bits(cache.keys[new], before.keys[old])
                assert same_bits(cache.values[new], before.values[old])


def test_only_pages_that_rows_reach_are_kept(tmp_path: Path) -> None:
    case = Case("reach", (2, 0, 1), (10, 40, 33), SPEC, page_tokens=8, page_blocks=2, order="random")
    inputs = build(case)
    record(inputs, tmp_path)
    call = capture.load(tmp_path / "sparse_attention")
    cache = call.values["kv_cache"]
    assert isinstance(cache, KvCache)
    wanted = {*inputs.kv_cache.page_table[0, :2].tolist(), *inputs.kv_cache.page_table[2, :5].tolist()}
    assert cache.keys.shape[0] == len(wanted) == 7
    assert (cache.page_table >= 0).sum(1).tolist() == [2, 0, 5]
    stored = call.recorded["tensors"]
    assert stored["kv_cache.page_ids"]["shape"] == [7]
    assert call.recorded["values"]["kv_cache"]["pages"] == inputs.kv_cache.keys.shape[0]
    # 9 complete blocks at position 32 with 2 blocks a page: the index cache is reached for 8 of them, 4 pages.
    chosen = capture.load(tmp_path / "select_blocks").values["index_cache"]
    assert isinstance(chosen, IndexCache)
    assert (chosen.page_table >= 0).sum(1).tolist() == [1, 0, 4]


def test_the_json_tells_where_the_call_came_from(saved: Path) -> None:
    told = json.loads((saved / CALL_FILE).read_text())
    assert told["versions"]["flashqsa"] == __version__
    assert told["versions"]["torch"] == torch.__version__
    assert {"python"} < set(told["versions"])
    assert (told["device"]["kind"], told["device"]["arch"]) == ("cpu", "cpu")
    assert told["routes"]["attend"]["route"] == "cpu:grouped"
    refused = {refusal["route"]: refusal["reason"] for refusal in told["routes"]["attend"]["refused"]}
    assert refused["cpu:dense"] == "rows see up to 10 blocks and select 4"
    assert refused["smxx:grouped"] == "the smxx kernels have no image for CPU (cpu)"
    assert told["spec"]["q_heads"] == 6
    assert told["rows"] == {"count": 8, "max_position": 39, "runs": None}
    assert told["format_version"] == capture.FORMAT_VERSION
    # The pool was interleaved: its strides are told, its pages are stored without gaps.
    assert told["tensors"]["kv_cache.keys"]["strides"] == list(build(CASES[0]).kv_cache.keys.stride())


@pytest.mark.parametrize("runs", [None, (), (Run(0, 0, 5, 39), Run(1, 5, 6, 22))], ids=["unknown", "none", "two"])
def test_runs_of_rows_come_back(runs: tuple[Run, ...] | None, tmp_path: Path) -> None:
    inputs = build(replace(CASES[0], padding=()))
    record(replace(inputs, rows=replace(inputs.rows, runs=runs)), tmp_path)
    for function in ("select_blocks", "sparse_attention"):
        assert capture.load(tmp_path / function).rows.runs == runs
    # A capture of a version that kept none.
    rewrite(tmp_path / "select_blocks", rows={"count": 6, "max_position": 39})
    assert capture.load(tmp_path / "select_blocks").rows.runs is None
    for garbage in ([[0, 0, 5]], [7], "two", [[0, 0, "x", 3]]):
        rewrite(tmp_path / "select_blocks", rows={"count": 6, "max_position": 39, "runs": garbage})
        with pytest.raises(CaptureError, match="lacks or garbles a field"):
            capture.load(tmp_path / "select_blocks")


def test_views_are_stored_contiguous_and_equal(tmp_path: Path) -> None:
    call = noted()
    wide = torch.randn(8, 6, 2, 64)
    q = wide[:, :, 1]
    folder = capture.save(tmp_path / "view", replace(call, values={**call.values, "q": q}))
    loaded = capture.load(folder).tensor("q")
    assert not q.is_contiguous()
    assert loaded.is_contiguous()
    assert same_bits(loaded, q)


def test_recording_keeps_first_calls_and_overwrites_nothing(tmp_path: Path) -> None:
    inputs = build(CASES[0])
    for _ in range(2):
        with capture.recording(tmp_path):
            for gate in (None, inputs.gate):
                pipeline.qsa_attention(
                    inputs.index_q, inputs.q, inputs.index_cache, inputs.kv_cache, inputs.rows, inputs.spec, gate
                )
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["select_blocks", "select_blocks-2", "sparse_attention", "sparse_attention-2"]
    assert all(capture.load(tmp_path / name).values["gate"] is None for name in names if name.startswith("sparse"))


def test_the_knob_saves_the_first_call_of_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CAPTURE.name, str(tmp_path / "by-knob"))
    inputs = build(CASES[0])
    for rows in (8, 3):
        pipeline.select_blocks(inputs.index_q[:rows], inputs.index_cache, inputs.rows.slice(0, rows), inputs.spec)
    assert [path.name for path in (tmp_path / "by-knob").iterdir()] == ["select_blocks"]
    assert capture.load(tmp_path / "by-knob" / "select_blocks").rows.count == 8
    monkeypatch.setenv(CAPTURE.name, "")
    pipeline.sparse_attention(
        inputs.q,
        inputs.kv_cache,
        pipeline.select_blocks(inputs.index_q, inputs.index_cache, inputs.rows, inputs.spec),
        inputs.rows,
        inputs.spec,
    )
    assert len(list((tmp_path / "by-knob").iterdir())) == 1


def test_a_call_that_nobody_wants_is_not_looked_at() -> None:
    class Untouchable:
        def __getattr__(self, name: str) -> object:
            raise AssertionError(f"{name} was read")

    poison: Any = Untouchable()
    seen: list[Rows] = []
    capture.note("select_blocks", poison, poison, poison, index_q=poison)
    with (
        pytest.raises(AssertionError, match="was read"),
        capture.listening(lambda call: seen.append(call.rows.slice(0, 1))),
    ):
        capture.note("select_blocks", poison, poison, poison, index_q=poison)


def test_listeners_hear_every_call_with_its_plan() -> None:
    inputs = build(CASES[0])
    outer: list[str] = []
    inner: list[str] = []
    with capture.listening(lambda call: outer.append(call.function)):
        with capture.listening(lambda call: inner.append(str(call.plan.attend_decision.route))):
            pipeline.qsa_attention(
                inputs.index_q, inputs.q, inputs.index_cache, inputs.kv_cache, inputs.rows, inputs.spec, route="xqa"
            )
        pipeline.select_blocks(inputs.index_q, inputs.index_cache, inputs.rows, inputs.spec)
    assert outer == ["select_blocks", "sparse_attention", "select_blocks"]
    assert inner == ["cpu:xqa", "cpu:xqa"]


def test_save_never_overwrites(saved: Path) -> None:
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    with pytest.raises(CaptureError, match="exists already"):
        capture.save(saved, noted())
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
    assert [path.name for path in saved.parent.iterdir()] == ["call"]


def test_a_name_that_another_process_takes_meanwhile_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, write = build(CASES[0]), capture._write

    def late(staging: Path, call: Noted) -> None:
        (theirs := tmp_path / call.function).mkdir(exist_ok=True)
        (theirs / CALL_FILE).write_text("another's")
        write(staging, call)

    monkeypatch.setattr(capture, "_write", late)
    with capture.recording(tmp_path):
        pipeline.select_blocks(inputs.index_q, inputs.index_cache, inputs.rows, inputs.spec)
    assert (tmp_path / "select_blocks" / CALL_FILE).read_text() == "another's"
    assert capture.load(tmp_path / "select_blocks-2").function == "select_blocks"


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(tensors: dict[str, Tensor], path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(capture, "save_file", full)
    with pytest.raises(CaptureError, match="no space left"):
        capture.save(tmp_path / "call", noted())
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_a_capture_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CaptureError, match="cannot be written"):
        capture.save(tmp_path / "file" / "call", noted())


def test_a_bad_page_id_is_named_and_nothing_is_saved(tmp_path: Path) -> None:
    cache = build(CASES[0]).kv_cache
    table = cache.page_table.clone()
    table[0, 0] = cache.keys.shape[0]
    with pytest.raises(CaptureError, match=rf"kv_cache.page_table names page {cache.keys.shape[0]} of"):
        capture.save(tmp_path / "call", noted(kv_cache=replace(cache, page_table=table)))
    assert list(tmp_path.iterdir()) == []


def test_ids_past_a_request_are_not_followed(tmp_path: Path) -> None:
    case = Case("stale", (1, 1), (9, 40), SPEC, page_tokens=8)
    cache = build(case).kv_cache
    table = cache.page_table.clone()
    table[0, 2:] = 10_000
    rows = Rows.from_lengths(case.query_lengths, case.context_lengths)
    call = replace(noted(), rows=rows)
    call = replace(call, values={**call.values, "kv_cache": replace(cache, page_table=table)})
    loaded = capture.load(capture.save(tmp_path / "call", call)).values["kv_cache"]
    assert isinstance(loaded, KvCache)
    assert loaded.page_table[0].tolist()[2:] == [-1] * (table.shape[1] - 2)


class Bomb:
    """A pickle that leaves a file behind when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return (Path.touch, (self.path,))


def test_a_pickle_is_refused_and_does_not_run(saved: Path, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    for content in (pickle.dumps(Bomb(mark)), pickle.dumps({"q": Bomb(mark)}, protocol=2)):
        with_digest(saved, content)
        with pytest.raises(CaptureError, match="cannot be read"):
            capture.load(saved)
    torch.save({"q": Bomb(mark)}, saved / TENSORS_FILE)
    with_digest(saved, (saved / TENSORS_FILE).read_bytes())
    with pytest.raises(CaptureError, match="cannot be read"):
        capture.load(saved)
    assert not mark.exists()


def test_damaged_tensors_are_refused(saved: Path) -> None:
    content = (saved / TENSORS_FILE).read_bytes()
    (saved / TENSORS_FILE).write_bytes(content[:-1])
    with pytest.raises(CaptureError, match="not the file"):
        capture.load(saved)
    for cut in (0, 7, 100, len(content) - 1):
        with_digest(saved, content[:cut])
        with pytest.raises(CaptureError, match="cannot be read"):
            capture.load(saved)
    flipped = bytearray(content)
    flipped[-1] ^= 1
    rewrite(saved, sha256=None)
    (saved / TENSORS_FILE).write_bytes(bytes(flipped))
    with pytest.raises(CaptureError, match="not the file"):
        capture.load(saved)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format": "something-else"}, "is not one of"),
        ({"format_version": 99}, "wanted format version 1; got 99"),
        ({"function": "os.system"}, "got 'os.system'"),
        ({"spec": {"q_heads": 6, "surprise": 1}}, "garbles a field"),
        ({"spec": None}, "garbles a field"),
        ({"rows": {"count": 8}}, "garbles a field"),
        ({"values": {}}, "garbles a field"),
        ({"values": {"q": {"kind": "object"}}}, "garbles a field"),
        ({"routes": {}}, "garbles a field"),
        ({"tensors": {}}, "are not those"),
        ({"tensors": []}, "are not those"),
    ],
)
def test_foreign_json_is_refused(saved: Path, fields: dict[str, object], message: str) -> None:
    rewrite(saved, **fields)
    with pytest.raises(CaptureError, match=message):
        capture.load(saved)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff\xfe", b"null", b"[" * 100_000])
def test_json_that_is_none_is_refused(saved: Path, content: bytes) -> None:
    (saved / CALL_FILE).write_bytes(content)
    with pytest.raises(CaptureError):
        capture.load(saved)


@pytest.mark.parametrize("name", [CALL_FILE, TENSORS_FILE])
def test_a_missing_file_is_named(saved: Path, name: str) -> None:
    (saved / name).unlink()
    with pytest.raises(CaptureError, match=f"{name}.* is missing"):
        capture.load(saved)


def test_scales_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    inputs = build(CASES[2])
    record(inputs, tmp_path)
    folder = tmp_path / "sparse_attention"
    values = json.loads((folder / CALL_FILE).read_text())["values"]
    for scale in (True, [1.0], "rows.request.missing"):
        rewrite(folder, values={**values, "kv_cache": {**values["kv_cache"], "k_scale": scale}})
        with pytest.raises(CaptureError, match="garbles a field"):
            capture.load(folder)
