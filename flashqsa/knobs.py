"""Every FLASHQSA_* environment variable: its type, its default, and one line of what it does.

Variables are read when they are needed, never at import, so a test or a notebook may change them between calls.
`docs/KNOBS.md` is written from this file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


class KnobError(ValueError):
    """A FLASHQSA_* variable holds something its type does not allow."""


@dataclass(frozen=True)
class Knob:
    """One environment variable.

    `kind` is "int" (a whole number, at least `minimum`), "choice" (one of `choices`) or "text" (anything).
    """

    name: str
    kind: Literal["int", "choice", "text"]
    default: str
    line: str
    choices: tuple[str, ...] = ()
    minimum: int = 0

    def read(self) -> str:
        """The value in force, or KnobError."""
        text = os.environ.get(self.name, self.default).strip() or self.default
        if self.kind == "choice" and text not in self.choices:
            raise KnobError(f"{self.name}: wanted one of {', '.join(self.choices)}; got {text!r}")
        if self.kind == "int" and (not text.isdecimal() or int(text) < self.minimum):
            raise KnobError(f"{self.name}: wanted a whole number, at least {self.minimum}; got {text!r}")
        return text

    @contextmanager
    def set_to(self, value: str) -> Iterator[None]:
        """Sets the variable inside the `with` block, for this process and its children, and puts back what it was."""
        before = os.environ.get(self.name)
        os.environ[self.name] = value
        try:
            yield
        finally:
            if before is None:
                del os.environ[self.name]
            else:
                os.environ[self.name] = before


WORKSPACE_MIB = Knob(
    "FLASHQSA_WORKSPACE_MIB",
    "int",
    "128",
    "Most memory, in MiB, that one stage may take for scratch (score chunks, gathered keys and values).",
    minimum=1,
)
ROUTE = Knob(
    "FLASHQSA_ROUTE",
    "text",
    "",
    "Pins a route for every call that names none: a mode (`grouped`), a kernel set (`cpu`), or both (`cpu:grouped`).",
)
CHECK_VALUES = Knob(
    "FLASHQSA_CHECK_VALUES",
    "choice",
    "auto",
    "Whether row metadata, page tables and selections are checked entry by entry: `on`, `off`, or `auto` "
    "(on for CPU tensors, off where it would synchronise with a GPU).",
    choices=("auto", "on", "off"),
)
BATCH_INVARIANT = Knob(
    "FLASHQSA_BATCH_INVARIANT",
    "choice",
    "off",
    "Whether a row gets the same bits whatever shares its launch, for calls that do not say: `on` (slower) or `off`.",
    choices=("on", "off"),
)
CAPTURE = Knob(
    "FLASHQSA_CAPTURE",
    "text",
    "",
    "A folder: the first call of each public function in this process is saved there for `flashqsa replay`.",
)
CACHE_DIR = Knob(
    "FLASHQSA_CACHE_DIR",
    "text",
    "",
    "The folder where compiled kernels are kept; by default `flashqsa` in XDG_CACHE_HOME, or in `~/.cache`.",
)
NVRTC = Knob(
    "FLASHQSA_NVRTC",
    "text",
    "",
    "The NVRTC library to compile CUDA C++ with: a file, or a name the dynamic loader knows. Default: the best found.",
)

CUDA_ARCH_LIST = Knob(
    "FLASHQSA_CUDA_ARCH_LIST",
    "text",
    "",
    "What `flashqsa build` compiles for, as `7.0;7.5`. By default the GPUs of this machine.",
)

VLLM = Knob(
    "FLASHQSA_VLLM",
    "choice",
    "auto",
    "Whether FlashQSA's layers serve Qwen4-Exp in a vLLM process: `auto` (where its release is supported), `1` (refuse "
    "to start where it is not) or `0` (never).",
    choices=("auto", "1", "0"),
)

GROWING_POOLS = Knob(
    "FLASHQSA_GROWING_POOLS",
    "choice",
    "auto",
    "Whether pools of growing caches on a GPU get longer where they lie: `auto` (where the driver can) or `0` (they "
    "are copied, in torch's memory, which its limits count and other processes can open).",
    choices=("auto", "0"),
)

KNOBS = (
    WORKSPACE_MIB,
    ROUTE,
    CHECK_VALUES,
    BATCH_INVARIANT,
    CAPTURE,
    CACHE_DIR,
    NVRTC,
    CUDA_ARCH_LIST,
    VLLM,
    GROWING_POOLS,
)


def workspace_bytes() -> int:
    """Bytes of scratch one stage may use."""
    return int(WORKSPACE_MIB.read()) << 20


def set_default(name: str, value: str) -> None:
    """Sets a variable of another library, unless it is set, for this process and its children.

    Most libraries read theirs once, when they are loaded.
    """
    os.environ.setdefault(name, value)


def environment_with(changes: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with some variables set, for a child."""
    return {**os.environ, **changes}


def cache_folder() -> Path:
    """The folder for what this package may make again: compiled kernels."""
    named = CACHE_DIR.read()
    if named:
        return Path(named).expanduser()
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if os.path.isabs(home) else Path.home() / ".cache") / "flashqsa"


def as_markdown() -> str:
    """The table of `docs/KNOBS.md`."""
    lines = ["| variable | type | default | what it does |", "|---|---|---|---|"]
    for knob in KNOBS:
        kind = " / ".join(f"`{c}`" for c in knob.choices) if knob.choices else knob.kind
        default = f"`{knob.default}`" if knob.default else "unset"
        lines.append(f"| `{knob.name}` | {kind} | {default} | {knob.line} |")
    return "\n".join(lines) + "\n"
