"""`flashqsa build`: compiles what GPUs will ask NVRTC for, so that no compiler is needed where they are.

What is asked for follows from plans: those of the released model's shapes on every known GPU of an architecture. What
comes out lies in the folder that calls look into. Triton's kernels (from 8.0 on: scores, and attention but for
Hopper's) are not among them: Triton compiles them at their first use and keeps them in a folder of its own.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import torch

from flashqsa import knobs, pipeline
from flashqsa.cli.show import FAILED, OK, Screen, UserError, seconds, write_json
from flashqsa.device import KNOWN_DEVICES, DeviceFacts
from flashqsa.machine import facts_here
from flashqsa.plan import Plan, make_plan
from flashqsa.route import Call, NoRouteError
from flashqsa.values import FP8, QsaSpec

HEADS = ((24, 2), (12, 1), (6, 1), (3, 1))
"""Query heads and KV heads of the released model on tensor-parallel ranks of 1, 2, 4 and 8."""

BATCHES = ((1, 1), (4, 1), (5, 1), (8, 1), (12, 1), (64, 1), (320, 1), (1616, 1), (8192, 1), (16, 16), (64, 64))
"""Rows and requests: decode, verify, chunks of one prefill."""

MIXED = ((320, 64), (256, 64), (1616, 3), (200, 7))
"""More of them: verify rows of many requests, prefills together."""

CONTEXTS = (2_048, 8_192, 65_536, 262_144, 524_288, 1_048_576)
"""Tokens of the longest request."""

FP16, BF16 = torch.float16, torch.bfloat16
DTYPES = ((FP16, FP16), (FP16, FP8), (BF16, BF16), (BF16, FP8))
"""Dtypes of queries and caches."""

OWN_SETS = ("sm7x", "sm90")
"""Kernel sets that have sources of their own beside the shared ones."""

TRITON_FROM = (8, 0)
"""Compute capability from which on kernels of Triton serve too."""


@dataclass(frozen=True)
class Built:
    """One kernel of a compiled source; `error` where the source was not compiled.

    variant       the source's macros
    registers     of a thread
    shared_bytes  static shared memory of a program
    spill_bytes   stores of spilled registers
    seconds       of the source; hardly any where it was kept already
    """

    arch: str
    source: str
    kernel: str
    variant: str
    registers: int | None = None
    shared_bytes: int | None = None
    spill_bytes: int | None = None
    seconds: float = 0.0
    error: str | None = None


def build(arch_list: str | None, screen: Screen, json_target: str | None) -> int:
    """Compiles for the architectures of a list, or of FLASHQSA_CUDA_ARCH_LIST, or of the GPUs here."""
    knob = knobs.CUDA_ARCH_LIST
    capabilities = parse_archs(knob.read(), knob.name) if arch_list is None else parse_archs(arch_list)
    nvrtc = pipeline.kernel_set("nvrtc")
    built: list[Built] = []
    for capability in capabilities:
        arch = f"{capability[0]}.{capability[1]}"
        try:
            sources = sources_for(capability)
        except ImportError as error:
            built.append(Built(arch, "", "", "", error=f"its kernels cannot be imported: {error}"))
            continue
        for number, source in enumerate(sources, 1):
            screen.progress.print(f"{arch}: {number} of {len(sources)}, {source.name}", markup=False)
            built += compiled(source, capability, arch, nvrtc)
    folder = pipeline.kernel_set("nvrtc.compiler").cache_folder()
    failed = [entry for entry in built if entry.error is not None]
    columns = ["arch", "source", "kernel", "variant", "registers", "shared bytes", "spilled bytes", "time"]
    rows = [
        [e.arch, e.source, e.kernel, e.variant, e.registers, e.shared_bytes, e.spill_bytes, seconds(e.seconds)]
        for e in built
        if e.error is None
    ]
    screen.table("Kernels", columns, rows)
    for entry in failed:
        screen.line(f"{entry.arch} {entry.source} {entry.variant}: {entry.error}")
    screen.line(f"{len(rows)} kernels in {folder}" + (f", {len(failed)} sources failed" if failed else ""))
    if any(capability >= TRITON_FROM for capability in capabilities):
        screen.line("Triton's kernels, which serve from 8.0 on too, are compiled at their first use.")
    write_json(json_target, {"folder": str(folder), "failed": len(failed), "kernels": [asdict(e) for e in built]})
    return FAILED if failed else OK


def parse_archs(text: str, origin: str = "--arch") -> list[tuple[int, int]]:
    """Compute capabilities of a list such as `7.0;7.5`, each once; of the GPUs here where the list is empty.

    origin  the option or variable that the list comes from, for the message

    Raises UserError for what is no such list, an architecture without kernels, and an empty list without a GPU.

    >>> parse_archs("7.5; 7.0 9.0,7.5")
    [(7, 5), (7, 0), (9, 0)]
    """
    words = [word for word in re.split(r"[;, ]+", text.strip()) if word]
    known = sorted({facts.capability for facts in KNOWN_DEVICES.values() if facts.capability is not None})
    names = ", ".join(f"{major}.{minor}" for major, minor in known)
    if not words:
        here = [facts_here(torch.device("cuda", i)).capability for i in range(_gpus())]
        if not here:
            raise UserError(
                f"no GPU is here: name architectures, as --arch '7.0;7.5' or in {knobs.CUDA_ARCH_LIST.name}; of {names}"
            )
        found = [capability for capability in here if capability is not None]
    else:
        found = []
        for word in words:
            match = re.fullmatch(r"(\d+)\.(\d)", word)
            if match is None or (int(match[1]), int(match[2])) not in known:
                why = "; PTX is not made" if word.endswith("+PTX") else ""
                raise UserError(f"{origin}: wanted some of {names}; got {word!r}{why}")
            found.append((int(match[1]), int(match[2])))
    return list(dict.fromkeys(found))


def _gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def sources_for(capability: tuple[int, int]) -> list[Any]:
    """Every source that GPUs of a compute capability may ask for, each once."""
    found: dict[Any, None] = {}
    shared, preparing = pipeline.kernel_set("nvrtc.released"), pipeline.kernel_set("nvrtc.prepare")
    for plan in plans_for(capability):
        chunks = [chunk for chunk in (plan.select.whole, plan.select.last) if chunk is not None]
        ranks = [chunk.topk for chunk in chunks]
        found.update(dict.fromkeys(shared.sources(plan.call.spec, plan.select.width_blocks, ranks, capability)))
        if not isinstance(plan.attend_choice, NoRouteError):
            made = preparing.sources(plan.call.spec, plan.call.q_dtype, plan.call.cache_dtype)
            found.update(dict.fromkeys(made))
        for choice in (plan.select_choice, plan.attend_choice):
            if not isinstance(choice, NoRouteError) and choice.route.kernel_set in OWN_SETS:
                own = pipeline.kernel_set(f"{choice.route.kernel_set}.released")
                found.update(dict.fromkeys(own.sources(plan)))
    return list(found)


def plans_for(capability: tuple[int, int]) -> Iterator[Plan]:
    """Plans of the released shapes on every known GPU of a compute capability, or on one here that is not known."""
    devices = [facts for facts in KNOWN_DEVICES.values() if facts.capability == capability]
    # What is built here runs elsewhere, mostly within the default limit.
    limits = dict.fromkeys((knobs.WORKSPACE_MIB.read(), knobs.WORKSPACE_MIB.default))
    for facts in devices or [_like(capability)]:
        for heads, (rows, requests), context, dtypes, invariant in product(
            HEADS, (*BATCHES, *MIXED), CONTEXTS, DTYPES, (False, True)
        ):
            spec, (q_dtype, cache_dtype) = QsaSpec(*heads), dtypes
            call = Call(spec, rows, requests, context - 1, q_dtype, cache_dtype, batch_invariant=invariant)
            for mib in limits if rows <= requests * context else ():
                with knobs.WORKSPACE_MIB.set_to(mib):
                    plan = make_plan(call, facts, stages=())
                yield plan


def _like(capability: tuple[int, int]) -> DeviceFacts:
    """Facts of a GPU that is here and of none of the known kinds."""
    here = (facts_here(torch.device("cuda", i)) for i in range(_gpus()))
    return next(replace(facts) for facts in here if facts.capability == capability)


def compiled(source: Any, capability: tuple[int, int], arch: str, nvrtc: Any) -> list[Built]:
    """The kernels of a source, compiled or kept already, with what the compiler's log says of them."""
    variant = " ".join(f"{macro}={value}" for macro, value in source.defines)
    start = time.perf_counter()
    try:
        made = nvrtc.compile_source(source, capability)
    except (nvrtc.CompileError, nvrtc.NvrtcNotFoundError) as error:
        return [Built(arch, source.name, "", variant, error=str(error))]
    took = time.perf_counter() - start
    if made.folder is None:
        return [Built(arch, source.name, "", variant, seconds=took, error="the cache folder cannot be written")]
    return [
        Built(arch, source.name, kernel, variant, registers, shared_bytes, spill_bytes, took)
        for kernel, registers, shared_bytes, spill_bytes in read_log(made.log)
    ]


def read_log(log: str) -> list[tuple[str, int, int, int]]:
    """Name, registers, static shared memory and spilled bytes of each kernel of a compiler's log."""
    found = []
    for part in re.split(r"Compiling entry function ", log)[1:]:
        name = re.match(r"'(\w+)'", part)
        numbers = [
            re.search(pattern, part)
            for pattern in (r"Used (\d+) registers", r"(\d+) bytes smem", r"(\d+) bytes spill st")
        ]
        registers, shared_bytes, spilled = (int(number[1]) if number else 0 for number in numbers)
        found.append((name[1] if name else "", registers, shared_bytes, spilled))
    return found
