"""The kernels of Volta and Turing on any newer NVIDIA GPU: compiled to PTX, which its driver takes.

    python benchmarks/ptx_check.py --json benchmarks/results/sm7x-ptx-NAME.json

Shows that they compute right; says nothing of their speed, since a newer GPU imitates Volta's products. Each case is
attended to twice, compared bit by bit, with FP64 (24 rows), and with the route the GPU would take itself (all rows).
Worklists are made with both sizes of shared memory, which must list the same. Selections are compared with a full sort
of the scores that the kernels made. sm_70 needs an NVRTC 12 (`FLASHQSA_NVRTC`, or the wheel nvidia-cuda-nvrtc-cu12).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from flashqsa import DeviceFacts, QsaSpec, Rows, Selection, reference, sparse_attention
from flashqsa.attend_shape import Layout
from flashqsa.cli.bench_cases import BenchCase
from flashqsa.cli.bench_inputs import Selections, Workload, build_workload
from flashqsa.cli.bench_report import machine
from flashqsa.kernels import sm7x
from flashqsa.kernels.nvrtc import NvrtcNotFoundError, driver, worklist
from flashqsa.kernels.nvrtc.compiler import Compiled, Source, compile_source
from flashqsa.plan import Plan, make_plan
from flashqsa.route import Call
from flashqsa.testing import accuracy, compare
from flashqsa.testing.calls import pick_rows
from flashqsa.values import FP8, Scores

GPU = torch.device("cuda")
DEVICES = ("v100", "rtx8000")
LIMIT = 2e-3
"""Largest error against FP64 on unit-normal data."""

HALF = torch.float16


@contextmanager
def as_ptx() -> Iterator[None]:
    """Kernels of compute capability 7.x become PTX of their virtual architecture."""

    def compiled(source: Source, capability: tuple[int, int]) -> Compiled:
        return compile_source(replace(source, virtual=capability[0] == 7), capability)

    with mock.patch.object(driver, "compile_source", compiled):
        yield


def cases() -> list[BenchCase]:
    found = []
    for heads in ((6, 1), (12, 1), (24, 2), (24, 1)):
        spec = QsaSpec(*heads)
        for dtype in (HALF, FP8):
            for page_tokens in (16, 784):
                for regime, rows, context in (("far", 203, 9000), ("equal", 64, 4099), ("disjoint", 64, 20_002)):
                    found.append(BenchCase("attention", 1, rows, context, spec, dtype, regime, page_tokens))
            found.append(BenchCase("attention", 5, 5, 4101, spec, dtype, "far", 16))
            found.append(BenchCase("attention", 16, 1, 8191, spec, dtype, "far", 784))
    return found


def plan_of(work: Workload, rows: Rows, facts: DeviceFacts) -> Plan:
    case = work.case
    layout = Layout.of(work.kv_cache, case.spec, work.q, work.gate) if work.kv_cache is not None else Layout()
    call = Call(
        case.spec, rows.count, case.requests, rows.max_position, HALF, case.dtype, HALF, case.dtype, layout, True
    )
    return make_plan(call, facts)


def attend(work: Workload, plan: Plan) -> tuple[Tensor, Tensor]:
    assert work.q is not None
    assert work.kv_cache is not None
    arguments = (work.q, work.kv_cache, work.selection, work.rows, work.case.spec, work.gate, True, plan.attend)
    output, lse = sm7x.sparse_attention(*arguments)
    assert lse is not None
    return output, lse


def same_worklists(work: Workload, plan: Plan) -> bool:
    """Whether both sizes of the worklist's shared memory give the same lists."""
    assert work.kv_cache is not None
    shape, _ = plan.attend.gpu()
    found = []
    for capability in ((7, 0), (7, 5)):
        lists = worklist.empty_lists(
            work.rows, work.case.spec, work.kv_cache, shape.tile.group_rows, shape.capacity, work.case.spec.kv_heads
        )
        for tensor in (lists.places, lists.token_masks, lists.entries):
            tensor.fill_(-1)
        worklist.list_windows(lists, work.selection, work.rows, work.case.spec, work.kv_cache, capability)
        found.append(lists)
    pairs = [(getattr(found[0], name), getattr(found[1], name)) for name in ("places", "token_masks", "entries")]
    return all(torch.equal(a, b) for a, b in pairs)


def attention(work: Workload, facts: DeviceFacts) -> dict[str, Any]:
    """One case of attention on the kernels of `facts`."""
    case = work.case
    assert work.q is not None
    assert work.kv_cache is not None
    assert work.selection is not None
    plan = plan_of(work, work.rows, facts)
    output, lse = attend(work, plan)
    again, again_lse = attend(work, plan)
    picked = pick_rows(work.rows, 24)
    error = accuracy.largest_error(
        output, work.q, work.kv_cache, work.selection, work.rows, case.spec, work.gate, picked
    )
    own = sparse_attention(work.q, work.kv_cache, work.selection, work.rows, case.spec, work.gate)
    assert isinstance(own, Tensor)
    same = compare.same_bits(output, again) and compare.same_bits(lse, again_lse)
    shape, _ = plan.attend.gpu()
    found = {
        "case": f"{case}, pages of {case.page_tokens}, {case.regime}",
        "for": facts.arch,
        "route": str(plan.attend_decision.route),
        "max_error": error,
        "max_difference_to_the_gpus_own_route": float((output.float() - own.float()).abs().max()),
        "same_bits_twice": same,
        "same_worklists": same_worklists(work, plan),
        "parts": shape.split(work.rows.count, case.spec).parts,
    }
    limit = LIMIT if case.dtype != FP8 else 2 * LIMIT
    found["right"] = error <= limit and same and found["same_worklists"]
    return found


def selection(work: Workload, facts: DeviceFacts) -> dict[str, Any]:
    """One case of scores and top-k on the kernels of `facts`."""
    case, rows, spec = work.case, work.rows, work.case.spec
    assert work.index_q is not None
    assert work.index_cache is not None
    plan = plan_of(work, rows, facts).select
    product_rows = plan.product_rows(rows, case.requests, spec)
    found: list[Selection] = []
    wanted: list[str | None] = []
    worst = 0.0
    for _ in range(2):
        out = sm7x.empty_selection(rows, spec)
        for start, stop in plan.chunks(rows.count):
            part = rows.slice(start, stop)
            scores = sm7x.score(work.index_q[start:stop], work.index_cache, part, spec, plan)
            sm7x.topk(scores, out.slice(start, stop), plan)
            sort = reference.topk(Scores(scores.values, scores.visible), spec.top_blocks)
            wanted.append(compare.same_selection(out.slice(start, stop), sort))
            few = Rows(part.request[-2:], part.position[-2:], part.max_position)
            exact = reference.score(work.index_q[start:stop][-2:], work.index_cache, few, spec)
            seen = int(exact.visible[-1])
            worst = max(worst, float((scores.values[-1, :seen] - exact.values[-1, :seen]).abs().max()))
        found.append(out)
    same = torch.equal(found[0].blocks, found[1].blocks) and torch.equal(found[0].count, found[1].count)
    return {
        "case": str(case),
        "for": facts.arch,
        "rows": rows.count,
        "rows_by_cublas": product_rows,
        "largest_score_error": worst,
        "full_sort_of_its_own_scores": wanted[0] if any(wanted) else "equal",
        "same_bits_twice": same,
        "right": same and not any(wanted) and worst < 1e-4,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    wanted = parser.parse_args()
    content: dict[str, Any] = {**machine(GPU), "note": "PTX through the driver of a newer GPU: right, not timed"}
    content.update(command=f"python benchmarks/ptx_check.py --json {wanted.json}", cases=[])
    made = Selections()
    with as_ptx(), torch.no_grad():
        for name in DEVICES:
            facts = DeviceFacts.named(name)
            for case in cases():
                work = build_workload(case, GPU, 0, made)
                work = replace(work, q=work.q.to(HALF), gate=None if work.gate is None else work.gate.to(HALF))  # type: ignore[union-attr]
                try:
                    content["cases"].append(attention(work, facts))
                except NvrtcNotFoundError as error:
                    content["cases"].append({"case": str(case), "for": facts.arch, "right": False, "why": str(error)})
                    break
                say(content["cases"][-1])
            for rows, requests, context in (
                (64, 1, 29_000),
                (1616, 1, 29_000),
                (300, 3, 29_000),
                (4, 16, 9000),
                (1, 64, 40_000),
            ):
                for dtype in (HALF, FP8):
                    case = BenchCase("indexer", requests, rows, context, QsaSpec(), dtype, "far")
                    work = build_workload(case, GPU, 0, made)
                    work = replace(work, index_q=work.index_q.to(HALF))  # type: ignore[union-attr]
                    content["cases"].append(selection(work, facts))
                    say(content["cases"][-1])
    content["right"] = all(case["right"] for case in content["cases"])
    if wanted.json is not None:
        wanted.json.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    say(f"{sum(c['right'] for c in content['cases'])} of {len(content['cases'])} right")
    return 0 if content["right"] else 1


def say(what: object) -> None:
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
