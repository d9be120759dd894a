"""The machine code of cubins: instructions and loops, by the disassembler of Triton's wheel or one on PATH.

What is counted here needs no GPU, so tests hold kernels of Volta and Turing to it where neither is at hand.
"""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

VOLTA, TURING = 70, 75
FLAGS_AT = 48
"""Offset of a 64-bit ELF file's `e_flags`, whose bytes 0 and 2 hold the architecture of NVRTC 12's cubins."""

LOCAL_MEMORY = ("LDL", "STL")
"""Loads and stores of a thread's own memory: spilled registers, arrays that are indexed at run time."""


class NoDisassemblerError(RuntimeError):
    """There is no nvdisasm here."""


class DisassemblyError(RuntimeError):
    """nvdisasm refuses a cubin; the message has its own words."""


@dataclass(frozen=True)
class Instruction:
    """One machine instruction.

    offset  bytes from the kernel's start
    opcode  with its modifiers, without a predicate: `HMMA.1688.F32`
    target  where it may jump to; None for what is no jump
    """

    offset: int
    opcode: str
    target: int | None = None

    @property
    def name(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.partition(".")[0]


@dataclass(frozen=True)
class Loop:
    """A backward jump and all that lies between it and its target.

    start, stop  offsets of the first instruction and of the jump
    """

    start: int
    stop: int
    code: tuple[Instruction, ...]

    def count(self, *names: str) -> int:
        """Instructions of some names: `HMMA`, or `HMMA.1688` with modifiers."""
        return count(self.code, *names)


def disassemble(cubin: bytes) -> dict[str, tuple[Instruction, ...]]:
    """Instructions of each kernel of a cubin, in order. Raises NoDisassemblerError, DisassemblyError."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(_for_newer_tools(cubin))
        shown = subprocess.run([_tool(), "-c", path], capture_output=True, text=True, check=False)
    if shown.returncode != 0:
        raise DisassemblyError(shown.stderr.strip())
    return {name: _instructions(text) for name, text in _sections(shown.stdout)}


def count(code: Sequence[Instruction], *names: str) -> int:
    """Instructions whose opcode is one of some names, or begins with it and a dot."""
    return sum(any(f"{one.opcode}.".startswith(f"{name}.") for name in names) for one in code)


def kinds(code: Sequence[Instruction]) -> dict[str, int]:
    """How many instructions there are of each name, most first."""
    return dict(Counter(one.name for one in code).most_common())


def loops(code: Sequence[Instruction]) -> list[Loop]:
    """The loops of a kernel, in order of their jumps."""
    found = []
    for one in code:
        if one.target is not None and one.target < one.offset:
            inside = tuple(other for other in code if one.target <= other.offset <= one.offset)
            found.append(Loop(one.target, one.offset, inside))
    return found


def main_loop(code: Sequence[Instruction]) -> Loop:
    """The shortest loop that holds most of a kernel's tensor-core instructions. Raises ValueError where none does."""
    found = [loop for loop in loops(code) if loop.count("HMMA") > 0]
    if not found:
        raise ValueError("no loop has a tensor-core instruction")
    most = max(loop.count("HMMA") for loop in found)
    return min((loop for loop in found if loop.count("HMMA") == most), key=lambda loop: len(loop.code))


def _tool() -> Path:
    triton = find_spec("triton")
    for place in (triton.submodule_search_locations or ()) if triton else ():
        tool = Path(place) / "backends" / "nvidia" / "bin" / "nvdisasm"
        if tool.exists():
            return tool
    on_path = shutil.which("nvdisasm")
    if on_path is None:
        raise NoDisassemblerError("no nvdisasm here: the triton wheel brings one")
    return Path(on_path)


def _for_newer_tools(cubin: bytes) -> bytes:
    """A cubin of sm_70 labelled sm_75, another as it is.

    nvdisasm refuses sm_70 from CUDA 13.1 on, by the label alone. Both have the same 128-bit encoding, and sm_75's
    disassembler knows every instruction of sm_70's: what it shows of each kernel here is, line by line, what CUDA
    12.8's nvdisasm shows of the cubin as it was.
    """
    (flags,) = struct.unpack_from("<I", cubin, FLAGS_AT)
    if flags & 0xFF != VOLTA:
        return cubin
    relabelled = bytearray(cubin)
    for byte in (0, 2):
        relabelled[FLAGS_AT + byte] = TURING
    return bytes(relabelled)


def _sections(text: str) -> list[tuple[str, str]]:
    parts = re.split(r"^\.text\.(\w+):$", text, flags=re.MULTILINE)
    return list(zip(parts[1::2], parts[2::2], strict=True))


def _instructions(text: str) -> tuple[Instruction, ...]:
    labels: dict[str, int] = {}
    waiting: list[str] = []
    lines: list[tuple[int, str, str | None]] = []
    for line in text.splitlines():
        label = re.match(r"^(\.L_\w+):", line)
        if label:
            waiting.append(label[1])
            continue
        one = re.match(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*)", line)
        if not one:
            continue
        offset = int(one[1], 16)
        labels.update(dict.fromkeys(waiting, offset))
        waiting.clear()
        target = re.search(r"`\((\.L_\w+)\)", one[3]) if one[2].split(".")[0] in ("BRA", "JMP") else None
        lines.append((offset, one[2], target[1] if target else None))
    return tuple(Instruction(at, opcode, labels.get(target) if target else None) for at, opcode, target in lines)
